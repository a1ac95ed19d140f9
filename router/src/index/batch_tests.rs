//! Lookups of many workers, compared with a model that counts each worker separately.

use super::*;
use kvbm::{BlockEvent, ChainKey, Domain, SequenceHash};
use proptest::prelude::*;
use worker::plane::{StoreId, WorkerId};

const WORKERS: usize = 200;
const STORES: usize = 2;
/// A little more than three pages.
const BLOCKS: usize = 200;

/// An index, and the expected content: for each holder and level, which blocks of one prompt it holds. Stores follow
/// the workers.
struct Fleet {
    index: Index,
    hashes: Vec<SequenceHash>,
    /// By worker index. A worker id is used once; a holder id may be reused.
    workers: Vec<(WorkerId, HolderId)>,
    reach: Vec<Vec<usize>>,
    held: Vec<[[bool; BLOCKS]; LEVELS.len()]>,
    overlap: Overlap,
}

impl Fleet {
    fn new(reach: impl Fn(usize) -> Vec<usize>) -> Self {
        let tokens: Vec<u32> = (0..BLOCKS as u32).collect();
        let hashes = ChainKey::root(&Domain::shared(), "m", None).hashes(&tokens, 1);
        let (index, reach): (_, Vec<Vec<usize>>) = (Index::new(), (0..WORKERS).map(reach).collect());
        let workers = (0..WORKERS).map(|at| join(&index, at, &reach[at])).collect();
        let held = vec![[[false; BLOCKS]; LEVELS.len()]; WORKERS + STORES];
        Self { index, hashes, workers, reach, held, overlap: Overlap::default() }
    }

    fn announce(&mut self, holder: usize, level: usize, stored: bool, range: std::ops::Range<usize>) {
        let range = range.start.min(BLOCKS)..range.end.min(BLOCKS);
        let holder_of_event = match holder.checked_sub(WORKERS) {
            None => Holder::Worker(self.workers[holder].0),
            Some(store) => Holder::Store(StoreId(store as u64)),
        };
        let (blocks, at) = (self.hashes[range.clone()].to_vec(), LEVELS[level]);
        let parent = range.start.checked_sub(1).map(|before| self.hashes[before]);
        let event = if stored {
            BlockEvent::Stored { level: at, parent, blocks }
        } else {
            BlockEvent::Removed { level: at, blocks }
        };
        self.index.apply(holder_of_event, &event);
        self.held[holder][level][range].fill(stored);
    }

    /// Replaces a worker by a new one, which may get the same holder id.
    fn replace_worker(&mut self, holder: usize) {
        self.index.leave(self.workers[holder].0);
        let next = self.workers[holder].0.0 as usize + WORKERS;
        self.workers[holder] = join(&self.index, next, &self.reach[holder]);
        self.held[holder] = [[false; BLOCKS]; LEVELS.len()];
    }

    fn expected(&self, holder: usize, len: usize) -> WorkerOverlap {
        let mut held = [0; LEVELS.len()];
        let stores = self.reach[holder].iter().map(|store| WORKERS + store);
        let holders: Vec<usize> = std::iter::once(holder).chain(stores).collect();
        for block in 0..len {
            let has = |level: &usize| holders.iter().any(|holder| self.held[*holder][*level][block]);
            let Some(level) = (0..LEVELS.len()).find(has) else { break };
            held[level] += 1;
        }
        WorkerOverlap::of(held)
    }

    fn check(&mut self) {
        for len in [1, 40, 64, BLOCKS] {
            // Reuses the memory of the last result.
            self.index.overlap_into(&self.hashes[..len], &mut self.overlap);
            for (holder, (id, holder_id)) in self.workers.iter().enumerate() {
                assert_eq!(self.overlap.at(*holder_id), self.expected(holder, len), "{id} of {len}");
            }
        }
    }
}

fn join(index: &Index, id: usize, reach: &[usize]) -> (WorkerId, HolderId) {
    let stores: Vec<StoreId> = reach.iter().map(|store| StoreId(*store as u64)).collect();
    let id = WorkerId(id as u64);
    (id, index.join(id, &stores))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn many_workers_are_counted_as_a_naive_model_counts_them(
        reached in 0..3_usize,
        steps in proptest::collection::vec(
            (0..12_usize, 0..LEVELS.len(), 0..WORKERS, 1..WORKERS, 1..5_usize, 0..BLOCKS, 1..BLOCKS),
            1..25,
        ),
    ) {
        // The first store is readable by all workers or none, the other by some.
        let reads = |worker: usize, store: usize| reached > store && worker.is_multiple_of(2 * store + 1);
        let mut fleet = Fleet::new(|worker| (0..STORES).filter(|store| reads(worker, *store)).collect());
        for (kind, level, first, many, stride, at, n) in steps {
            let workers = (first..WORKERS).step_by(stride).take(many);
            match kind {
                0 => workers.take(20).for_each(|holder| fleet.replace_worker(holder)),
                1..3 if reached > kind - 1 => fleet.announce(WORKERS + kind - 1, level, true, 0..n),
                3 if reached > 0 => fleet.announce(WORKERS, level, false, at..at + 9),
                // Many workers change alike: a prefix, a middle part, or a hole.
                4..8 => workers.for_each(|holder| fleet.announce(holder, level, true, 0..n)),
                8..10 => workers.for_each(|holder| fleet.announce(holder, level, true, at..at + n)),
                _ => workers.for_each(|holder| fleet.announce(holder, level, false, at..at + n.min(30))),
            }
        }
        fleet.check();
    }
}

#[test]
fn more_distinct_workers_than_classes_are_counted_exactly() {
    // The bits of a worker's index say at which levels it holds a page and whether it reads the store: 64 combinations,
    // different for each page.
    let mut fleet = Fleet::new(|id| if id >> 5 & 1 == 1 { vec![0] } else { vec![] });
    for (page, at) in (0..BLOCKS).step_by(64).enumerate() {
        for holder in 0..WORKERS {
            for level in (0..LEVELS.len()).filter(|level| holder >> ((level + page) % 6) & 1 == 1) {
                fleet.announce(holder, level, true, at + level..at + 64);
                fleet.announce(holder, level, true, at..at + holder % 3);
            }
            if holder % 5 == 0 {
                // A mask that no other worker has.
                fleet.announce(holder, page % 2, true, at..at + 1 + holder / 5);
            }
        }
    }
    fleet.check();
    fleet.announce(WORKERS, 4, true, 0..BLOCKS - 10);
    fleet.check();
}
