//! Chains of many pages.

use super::*;

/// A chain and its events, of `run` blocks each.
pub(super) fn runs(number: u32, blocks: u32, run: usize) -> (Vec<SequenceHash>, Vec<BlockEvent>) {
    let tokens: Vec<u32> = (0..blocks).map(|at| at | number << 20).collect();
    let hashes = ChainKey::root(&Domain::shared(), "m", None).hashes(&tokens, 1);
    let mut parent = None;
    let event = |blocks: &[SequenceHash]| {
        let parent = std::mem::replace(&mut parent, blocks.last().copied());
        BlockEvent::Stored { level: Level::G1, parent, blocks: blocks.to_vec() }
    };
    let events = hashes.chunks(run).map(event).collect();
    (hashes, events)
}

pub(super) fn announce(index: &Index, worker: WorkerId, events: &[BlockEvent]) {
    for event in events {
        index.apply(Holder::Worker(worker), event);
    }
}

#[test]
fn a_chain_of_many_pages_forks_and_ends_exactly() {
    let index = Index::new();
    let [a, b] = [1, 2].map(|id| (WorkerId(id), index.join(WorkerId(id), &[])));
    // Runs end at any offset of a page, and the pages of two workers alternate.
    let (long, events) = runs(1, 1000, 37);
    announce(&index, a.0, &events);
    announce(&index, b.0, &events[..9]);
    for len in [1, 63, 64, 65, 333, 334, 999, 1000] {
        let overlap = index.overlap(&long[..len]);
        assert_eq!(overlap.at(a.1).total(), len as u32);
        assert_eq!(overlap.at(b.1).total(), len.min(333) as u32);
    }
    let mut fork = long.clone();
    let other = runs(2, 1000, 1000).0;
    for at in [0, 1, 63, 64, 100, 332, 333, 998] {
        fork[at..].copy_from_slice(&other[at..]);
        assert_eq!(index.overlap(&fork).at(a.1).total(), at as u32);
        fork[at..].copy_from_slice(&long[at..]);
    }
}

#[test]
fn a_reused_page_is_not_mistaken_for_its_former_chain() {
    let index = Index::new();
    let [a, b] = [1, 2].map(|id| (WorkerId(id), index.join(WorkerId(id), &[])));
    let (long, events) = runs(1, 640, 640);
    let (other, others) = runs(2, 640, 640);
    announce(&index, a.0, &events);
    for at in [64, 100, 320] {
        index.apply(Holder::Worker(a.0), &removed(Level::G1, &long[at..]));
        announce(&index, b.0, &others);
        assert_eq!(index.overlap(&long).at(a.1).total(), at as u32);
        let stored = BlockEvent::Stored { level: Level::G1, parent: Some(long[at - 1]), blocks: long[at..].to_vec() };
        index.apply(Holder::Worker(a.0), &stored);
        for (chain, (_, holder_id), other_id) in [(&long, a, b.1), (&other, b, a.1)] {
            let overlap = index.overlap(chain);
            assert_eq!((overlap.at(holder_id).total(), overlap.at(other_id).total()), (640, 0));
        }
        index.apply(Holder::Worker(b.0), &removed(Level::G1, &other));
    }
}

#[test]
fn equal_pages_are_counted_exactly() {
    let index = Index::new();
    let store = StoreId(1);
    let ids = [1, 2, 3, 4, 5].map(WorkerId);
    let holder_ids = ids.map(|id| index.join(id, if id.0 == 5 { std::slice::from_ref(&store) } else { &[] }));
    let (chain, events) = runs(1, 640, 640);
    let part = |range: std::ops::Range<usize>, level| {
        let parent = range.start.checked_sub(1).map(|before| chain[before]);
        BlockEvent::Stored { level, parent, blocks: chain[range].to_vec() }
    };
    // Two workers have the whole chain. One has its second half at a slower level. One has a gap and continues after
    // it. One has only the beginning, and a store has more.
    announce(&index, ids[0], &events);
    announce(&index, ids[1], &events);
    announce(&index, ids[2], &[part(0..320, Level::G1), part(320..640, Level::G3)]);
    announce(&index, ids[3], &[part(0..200, Level::G1), part(256..640, Level::G1)]);
    let lens = || (1..=640).step_by(9).chain([64, 128, 576, 577, 640]);
    for len in lens() {
        let overlap = index.overlap(&chain[..len]);
        let runs = [0, 1, 2, 3].map(|worker: usize| overlap.at(holder_ids[worker]).total() as usize);
        assert_eq!(runs, [len, len, len, len.min(200)]);
    }
    announce(&index, ids[4], &[part(0..64, Level::G1)]);
    index.apply(Holder::Store(store), &part(0..576, Level::G4));
    for len in lens() {
        let overlap = index.overlap(&chain[..len]);
        let has = |worker: usize| overlap.at(holder_ids[worker]).by_level().collect::<Vec<_>>();
        let expect = |parts: &[(Level, usize, usize)]| {
            let within = parts.iter().map(|(level, from, to)| (*level, len.min(*to).saturating_sub(*from) as u32));
            within.filter(|(_, blocks)| *blocks > 0).collect::<Vec<_>>()
        };
        assert_eq!(has(0), expect(&[(Level::G1, 0, 640)]), "{len}");
        assert_eq!(has(1), has(0), "{len}");
        assert_eq!(has(2), expect(&[(Level::G1, 0, 320), (Level::G3, 320, 640)]), "{len}");
        assert_eq!(has(3), expect(&[(Level::G1, 0, 200)]), "{len}");
        assert_eq!(has(4), expect(&[(Level::G1, 0, 64), (Level::G4, 64, 576)]), "{len}");
    }
}

#[test]
fn a_holder_without_blocks_keeps_no_reserved_pages() {
    let index = Index::new();
    index.join(WorkerId(1), &[]);
    let (hashes, events) = runs(1, 20_000, 100);
    announce(&index, WorkerId(1), &events);
    assert!(index.arena.used() > hashes.len().div_ceil(64), "some pages are reserved");
    index.apply(Holder::Worker(WorkerId(1)), &removed(Level::G1, &hashes));
    assert_eq!(index.arena.used(), 0);
}

#[test]
fn a_chain_continues_in_its_page_after_other_chains() {
    let index = Index::new();
    index.join(WorkerId(1), &[]);
    let chains: Vec<_> = (1..=4).map(|number| runs(number, 128, 32)).collect();
    for round in 0..4 {
        for (_, events) in &chains {
            announce(&index, WorkerId(1), &events[round..=round]);
        }
    }
    for (hashes, _) in &chains {
        let snapshot = index.snapshot.load();
        let positions: Vec<_> = hashes.iter().map(|hash| snapshot.find(hash.short()).unwrap()).collect();
        assert!(positions[..64].iter().all(|position| position.page() == positions[0].page()), "a page of its own");
        assert!(positions[64..].iter().all(|position| position.page() == positions[64].page()), "a second page");
    }
}
