//! One rule each.

use super::position::Position;
use super::*;
use along::{announce, runs};
use kvbm::{BlockEvent, ChainKey, Domain, Level, SequenceHash};
use worker::plane::{StoreId, WorkerId};

mod along;
mod concurrent;
mod memory;
mod model;
mod table;

/// Blocks of a [`chain`].
const BLOCKS: usize = 10;

fn chain(number: u32) -> Vec<SequenceHash> {
    let tokens: Vec<u32> = (0..BLOCKS as u32).map(|at| number * 1000 + at).collect();
    ChainKey::root(&Domain::shared(), "m", None).hashes(&tokens, 1)
}

fn stored(level: Level, blocks: &[SequenceHash]) -> BlockEvent {
    BlockEvent::Stored { level, parent: None, blocks: blocks.to_vec() }
}

fn removed(level: Level, blocks: &[SequenceHash]) -> BlockEvent {
    BlockEvent::Removed { level, blocks: blocks.to_vec() }
}

#[test]
fn an_evicted_block_ends_the_run_unless_a_slower_level_has_it() {
    let (index, hashes) = (Index::new(), chain(1));
    let (a, store) = (WorkerId(1), StoreId(9));
    let holder_id = index.join(a, &[store]);
    index.apply(Holder::Worker(a), &stored(Level::G1, &hashes));
    index.apply(Holder::Worker(a), &removed(Level::G1, &hashes[3..4]));
    assert_eq!(index.overlap(&hashes).at(holder_id), WorkerOverlap::of([3, 0, 0, 0, 0]));
    index.apply(Holder::Store(store), &stored(Level::G3, &hashes[..5]));
    assert_eq!(index.overlap(&hashes).at(holder_id), WorkerOverlap::of([BLOCKS as u32 - 1, 0, 1, 0, 0]));
}

#[test]
fn a_store_outlives_its_writer_and_serves_its_readers() {
    let (index, hashes) = (Index::new(), chain(1));
    let store = StoreId(9);
    let [writer, reader, stranger] = [WorkerId(1), WorkerId(2), WorkerId(3)];
    index.join(writer, &[store]);
    let (reads, cannot) = (index.join(reader, &[store]), index.join(stranger, &[]));
    index.apply(Holder::Store(store), &stored(Level::G4, &hashes));
    assert!(index.leave(writer).is_empty(), "the reader still reaches the store");
    let overlap = index.overlap(&hashes);
    assert_eq!(overlap.at(reads), WorkerOverlap::of([0, 0, 0, 0, BLOCKS as u32]));
    assert_eq!(overlap.at(cannot).total(), 0);
    assert_eq!(index.leave(reader), [store]);
}

#[test]
fn a_hole_is_exact_until_the_block_is_stored_again() {
    let index = Index::new();
    let (id, holder_id) = (WorkerId(1), index.join(WorkerId(1), &[]));
    let other = (WorkerId(2), index.join(WorkerId(2), &[]));
    let (hashes, events) = runs(1, 300, 300);
    index.apply(Holder::Worker(id), &events[0]);
    index.apply(Holder::Worker(other.0), &events[0]);
    for at in [200, 64, 10, 0] {
        index.apply(Holder::Worker(id), &removed(Level::G1, &hashes[at..=at]));
        let overlap = index.overlap(&hashes);
        assert_eq!((overlap.at(holder_id).total(), overlap.at(other.1).total()), (at as u32, 300));
    }
    index.apply(Holder::Worker(other.0), &removed(Level::G1, &hashes));
    for (at, run) in [(10, 0), (0, 64), (64, 200), (200, 300)] {
        let stored = BlockEvent::Stored { level: Level::G1, parent: None, blocks: hashes[at..=at].to_vec() };
        index.apply(Holder::Worker(id), &stored);
        assert_eq!(index.overlap(&hashes).at(holder_id).total(), run, "after {at}");
    }
}

#[test]
fn blocks_removed_one_by_one_are_gone_before_their_entries_are() {
    let index = Index::new();
    let [a, b] = [1, 2].map(|id| (WorkerId(id), index.join(WorkerId(id), &[])));
    let (hashes, events) = runs(1, 128, 128);
    announce(&index, a.0, &events);
    let remove = |at: usize| index.apply(Holder::Worker(a.0), &removed(Level::G1, &hashes[at..=at]));
    for at in (28..128).rev() {
        remove(at);
        assert_eq!(index.overlap(&hashes).at(a.1).total(), at as u32);
        assert_eq!(index.entries(), at);
    }
    let late = index.sharded_table.entries() - index.entries();
    assert!(late > 0, "some entries are removed later, in batches");
    // The same blocks get new positions.
    announce(&index, b.0, &events);
    let overlap = index.overlap(&hashes);
    assert_eq!((overlap.at(a.1).total(), overlap.at(b.1).total()), (28, 128));
    (0..28).for_each(remove);
    assert_eq!(index.overlap(&hashes).at(b.1).total(), 128);
    assert_eq!(index.sharded_table.entries(), 128, "a worker without blocks has no entries");
    index.leave(b.0);
    assert_eq!((index.arena.used(), index.sharded_table.entries()), (0, 0));
}

#[test]
fn a_snapshot_places_each_chain_in_pages_of_its_own() {
    let (log, index, id) = (kvbm::EventLog::new(kvbm::Epoch(1)), Index::new(), WorkerId(1));
    let holder_id = index.join(id, &[]);
    let chains: Vec<_> = (0..20).map(|number| runs(number, 512, 16)).collect();
    // The chains grow in turns.
    for nth in 0..32 {
        for (_, events) in &chains {
            log.announce(events[nth].clone());
        }
    }
    index.replace(Holder::Worker(id), &log.snapshot().runs);
    for (hashes, _) in &chains {
        assert_eq!(index.overlap(hashes).at(holder_id).total(), 512);
        let snapshot = index.snapshot.load();
        let positions: Vec<_> = hashes.iter().map(|hash| snapshot.find(hash.short()).unwrap()).collect();
        let page_ends: Vec<_> = positions.windows(2).filter(|pair| pair[0].page() != pair[1].page()).collect();
        assert!(page_ends.len() <= 8, "512 blocks lie in {} pages of 64", page_ends.len() + 1);
        for end in page_ends {
            let next = snapshot.page(end[0].page()).unwrap().successor(end[0].offset());
            assert_eq!(next.map(Position::page), Some(end[1].page()), "a page has the successor of its last block");
        }
    }
}

#[test]
fn pages_allocated_together_are_neighbours_where_possible() {
    let arena = Arena::new();
    let take = |pages| arena.allocate(pages, |_| ()).unwrap();
    assert_eq!([take(8), take(8), take(1)], [1..9, 9..17, 17..18]);
    arena.release(&[2, 4, 5, 10, 11, 12], |_| ());
    assert_eq!(take(3), 10..13);
    assert_eq!(take(2), 4..6);
    assert_eq!(take(1), 2..3);
    // No extent is long enough: the longest one is allocated, then another chunk.
    let all: Vec<u32> =
        std::iter::from_fn(|| Some(take(1).start)).take_while(|page| *page < snapshot::CHUNK as u32 - 1).collect();
    assert_eq!(all.len(), snapshot::CHUNK - 18 - 1);
    arena.release(&[20, 30, 31], |_| ());
    assert_eq!(take(9), 30..32);
    assert_eq!(arena.used(), snapshot::CHUNK - 1 - 1);
}
