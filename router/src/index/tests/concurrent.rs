//! Readers and writers at the same time.

use super::*;
use std::collections::BTreeSet;

#[test]
fn concurrent_readers_and_writers_agree_with_the_model() {
    let index = Index::new();
    let holder_ids: Vec<HolderId> = (0..4).map(|id| index.join(WorkerId(id), &[])).collect();
    let chains: Vec<_> = (0..6).map(|number| runs(number, 200, 50)).collect();
    let stable = index.join(WorkerId(9), &[]);
    for (_, events) in &chains {
        announce(&index, WorkerId(9), events);
    }
    let held: Vec<BTreeSet<SequenceHash>> = std::thread::scope(|scope| {
        let writer = |id: u64| {
            let (index, chains) = (&index, &chains);
            move || {
                let mut held = BTreeSet::new();
                for step in 0..400 {
                    let dice = crate::hash::splitmix64(id << 32 | step);
                    let (hashes, events) = &chains[dice as usize % chains.len()];
                    let part = (dice >> 8) as usize % 4;
                    if dice >> 20 & 1 == 0 {
                        index.apply(Holder::Worker(WorkerId(id)), &events[part]);
                        held.extend(&hashes[part * 50..][..50]);
                    } else {
                        let removed_blocks = &hashes[part * 50 + (dice >> 30) as usize % 40..][..10];
                        index.apply(Holder::Worker(WorkerId(id)), &removed(Level::G1, removed_blocks));
                        held.retain(|hash| !removed_blocks.contains(hash));
                    }
                }
                held
            }
        };
        let writers: Vec<_> = (0..4).map(|id| scope.spawn(writer(id))).collect();
        let is_writing = || writers.iter().any(|writer| !writer.is_finished());
        while is_writing() {
            for (hashes, _) in &chains {
                // A lookup gives up on a page whose writer is descheduled, perhaps for milliseconds.
                while is_writing() && index.overlap(hashes).at(stable).total() != 200 {
                    std::thread::yield_now();
                }
            }
        }
        for (hashes, _) in &chains {
            assert_eq!(index.overlap(hashes).at(stable).total(), 200, "a holder without changes is read completely");
        }
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    for (hashes, _) in &chains {
        let overlap = index.overlap(hashes);
        for (holder_id, held) in holder_ids.iter().zip(&held) {
            assert_eq!(
                overlap.at(*holder_id).total() as usize,
                hashes.iter().take_while(|hash| held.contains(*hash)).count()
            );
        }
    }
    assert_eq!(index.entries(), held.iter().map(BTreeSet::len).sum::<usize>() + 6 * 200);
}
