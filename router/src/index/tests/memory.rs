//! Memory in use, its limit, and eviction.

use super::*;
use std::collections::BTreeMap;
use std::sync::atomic::Ordering;

#[test]
fn memory_stays_bounded_while_caches_turn_over() {
    // Caches turn over a hundred times with forks and holes everywhere; memory must stay proportional to what is held.
    let index = Index::new();
    let workers: Vec<WorkerId> = (0..8).map(WorkerId).collect();
    for id in &workers {
        index.join(*id, &[]);
    }
    let mut most = 0;
    let mut held: BTreeMap<WorkerId, Vec<SequenceHash>> = BTreeMap::new();
    for round in 0..800_u32 {
        let id = workers[round as usize % workers.len()];
        let (hashes, events) = runs(round, 300, 100);
        let held = held.entry(id).or_default();
        held.extend(&hashes);
        announce(&index, id, &events);
        // Blocks are removed in random order, which leaves nearly every page with a few.
        held.sort_unstable_by_key(|hash| crate::hash::splitmix64(hash.short() ^ u64::from(round)));
        let removed_blocks: Vec<SequenceHash> = held.drain(..held.len().saturating_sub(3000)).collect();
        index.apply(Holder::Worker(id), &removed(Level::G1, &removed_blocks));
        if round > 200 {
            most = most.max(index.bytes());
        }
    }
    assert_eq!(index.entries(), 8 * 3000);
    let each = most as f64 / index.entries() as f64;
    assert!(each < 60.0, "{each:.1} bytes per entry where caches lose blocks at random");
    for id in workers {
        index.leave(id);
    }
    assert_eq!(index.entries(), 0);
    assert_eq!((index.arena.used(), index.sharded_table.entries()), (0, 0));
    assert!(index.bytes() < 2 * 150_000, "{} bytes are left in an empty index", index.bytes());
}

#[test]
fn an_index_over_its_limit_evicts_cold_pages_only() {
    const LIMIT: usize = 4 << 20;
    let index = Index::with_memory_limit(LIMIT).unwrap();
    let (id, holder_id) = (WorkerId(1), index.join(WorkerId(1), &[]));
    let (hot, events) = runs(0, 512, 512);
    index.apply(Holder::Worker(id), &events[0]);
    for number in 1..=1000 {
        let (hashes, events) = runs(number, 512, 512);
        index.apply(Holder::Worker(id), &events[0]);
        assert!(index.overlap(&hashes).at(holder_id).total() <= 512);
        assert_eq!(index.overlap(&hot).at(holder_id).total(), 512, "a page in use stays");
    }
    assert!(index.bytes() < LIMIT + LIMIT / 4, "{} bytes", index.bytes());
    assert!(index.evicted_pages() > 1000);
    let digest = index.digest(Holder::Worker(id), Level::G1).unwrap();
    assert_eq!((index.is_complete(Holder::Worker(id)), digest.blocks), (false, index.entries() as u64));
    // A snapshot restores what fits.
    let (hashes, _) = runs(1, 512, 512);
    assert_eq!(index.overlap(&hashes).at(holder_id).total(), 0, "its pages were the coldest");
    index.replace(Holder::Worker(id), &[kvbm::Run { level: Level::G1, parent: None, blocks: hashes.clone() }]);
    assert_eq!(index.overlap(&hashes).at(holder_id).total(), 512);
    assert!(index.is_complete(Holder::Worker(id)));
    // A smaller limit takes effect at once.
    index.set_memory_limit(LIMIT / 4);
    assert!(index.bytes() < LIMIT / 2, "{} bytes", index.bytes());
    index.leave(id);
    assert_eq!(index.entries(), 0);
}

#[test]
fn eviction_ends_when_nothing_is_left_to_evict() {
    // Tables and page sets alone exceed this limit.
    let index = Index::with_memory_limit(0).unwrap();
    index.join(WorkerId(1), &[]);
    let (_, events) = runs(0, 64, 64);
    index.apply(Holder::Worker(WorkerId(1)), &events[0]);
    assert_eq!((index.evicted_pages(), index.entries()), (1, 0));
    let clock_hand = || *index.clock_hand.lock();
    assert_eq!(clock_hand(), 1, "it stops after the only page in use");
    index.evict_to_limit();
    assert_eq!(clock_hand(), 1);
}

#[test]
fn the_memory_limit_holds_under_churn() {
    const LIMIT: usize = 4 << 20;
    const WORKERS: u64 = 100;
    let index = Index::with_memory_limit(LIMIT).unwrap();
    let workers: Vec<WorkerId> = (0..WORKERS).map(WorkerId).collect();
    for id in &workers {
        index.join(*id, &[]);
    }
    let mut most = [0; 2];
    for number in 0..16_000 {
        let (_, events) = runs(number, 256, 256);
        index.apply(Holder::Worker(workers[number as usize % workers.len()]), &events[0]);
        let part = &mut most[usize::from(number >= 8000)];
        *part = index.bytes().max(*part);
    }
    assert!(index.evicted_pages() > 16_000, "everything has changed many times");
    assert!(most[1] <= LIMIT, "{most:?} bytes");
    // Removing a worker takes time proportional to what it holds, not to what it ever held.
    let state = index.holder_state(Holder::Worker(workers[0])).unwrap();
    let named = state.lock().by_level[0].len();
    let held = state.digests.at(0).blocks as usize;
    assert!(held > 0 && named <= held / 64 * 2 + 32, "{named} pages for {held} blocks");
    for id in &workers {
        index.leave(*id);
    }
    assert_eq!((index.entries(), index.bytes.holder_pages.load(Ordering::Relaxed)), (0, 0));
}

#[test]
fn an_entry_takes_less_than_forty_bytes_and_frees_them() {
    let index = Index::new();
    let empty = index.bytes();
    let tokens: Vec<u32> = (0..100_000).collect();
    let hashes = ChainKey::root(&Domain::shared(), "m", None).hashes(&tokens, 1);
    for (id, own) in (0..).zip(hashes.chunks(2000)) {
        index.join(WorkerId(id), &[StoreId(1)]);
        index.apply(Holder::Worker(WorkerId(id)), &stored(Level::G1, own));
        // Half of the blocks are offloaded, and all workers hold the same beginning.
        index.apply(Holder::Worker(WorkerId(id)), &stored(Level::G2, &own[..1000]));
        index.apply(Holder::Worker(WorkerId(id)), &stored(Level::G1, &hashes[..200]));
        index.apply(Holder::Store(StoreId(1)), &stored(Level::G3, &own[..500]));
    }
    let each = index.bytes() as f64 / index.entries() as f64;
    assert!(each < 40.0, "{each:.1} bytes per entry");
    for id in 0..50 {
        index.leave(WorkerId(id));
    }
    index.forget(Holder::Store(StoreId(1)));
    assert_eq!(index.entries(), 0);
    assert!(index.bytes() < empty + 160_000, "{} bytes are left in an empty index", index.bytes());
}
