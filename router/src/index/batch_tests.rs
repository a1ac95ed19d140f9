//! Lookups of many workers at once against the same computed one by one.

use super::*;
use kvbm::{ChainKey, Domain};
use proptest::prelude::*;

const WORKERS: usize = 200;
const STORES: usize = 2;
/// A little more than three pages.
const BLOCKS: usize = 200;

/// What each holds of one prompt, a flag for each block at each level: workers, and then stores.
struct Fleet {
    index: Index,
    names: Vec<SequenceHash>,
    /// By worker. A number is used once, a slot again.
    workers: Vec<(WorkerId, Slot)>,
    reach: Vec<Vec<usize>>,
    held: Vec<[[bool; BLOCKS]; LEVELS.len()]>,
    overlap: Overlap,
}

impl Fleet {
    fn new(reach: impl Fn(usize) -> Vec<usize>) -> Self {
        let tokens: Vec<u32> = (0..BLOCKS as u32).collect();
        let names = ChainKey::root(&Domain::shared(), "m", None).hashes(&tokens, 1);
        let (index, reach): (_, Vec<Vec<usize>>) = (Index::new(), (0..WORKERS).map(reach).collect());
        let workers = (0..WORKERS).map(|at| join(&index, at, &reach[at])).collect();
        let held = vec![[[false; BLOCKS]; LEVELS.len()]; WORKERS + STORES];
        Self { index, names, workers, reach, held, overlap: Overlap::default() }
    }

    fn tell(&mut self, who: usize, level: usize, comes: bool, range: std::ops::Range<usize>) {
        let range = range.start.min(BLOCKS)..range.end.min(BLOCKS);
        let source = match who.checked_sub(WORKERS) {
            None => Source::Worker(self.workers[who].0),
            Some(store) => Source::Store(StoreId(store as u64)),
        };
        let (blocks, at) = (self.names[range.clone()].to_vec(), LEVELS[level]);
        let parent = range.start.checked_sub(1).map(|before| self.names[before]);
        let event = if comes {
            BlockEvent::Stored { level: at, parent, blocks }
        } else {
            BlockEvent::Removed { level: at, blocks }
        };
        self.index.apply(source, &event);
        self.held[who][level][range].fill(comes);
    }

    /// One goes, and another comes, who may get its slot.
    fn swap(&mut self, who: usize) {
        self.index.leave(self.workers[who].0);
        let next = self.workers[who].0.0 as usize + WORKERS;
        self.workers[who] = join(&self.index, next, &self.reach[who]);
        self.held[who] = [[false; BLOCKS]; LEVELS.len()];
    }

    fn expected(&self, who: usize, len: usize) -> Held {
        let mut held = [0; LEVELS.len()];
        let stores = self.reach[who].iter().map(|store| WORKERS + store);
        let sources: Vec<usize> = std::iter::once(who).chain(stores).collect();
        for block in 0..len {
            let has = |level: &usize| sources.iter().any(|source| self.held[*source][*level][block]);
            let Some(level) = (0..LEVELS.len()).find(has) else { break };
            held[level] += 1;
        }
        Held::of(held)
    }

    fn check(&mut self) {
        for len in [1, 40, 64, BLOCKS] {
            // Written over what the last one left.
            self.index.overlap_into(&self.names[..len], &mut self.overlap);
            for (who, (id, slot)) in self.workers.iter().enumerate() {
                assert_eq!(self.overlap.at(*slot), self.expected(who, len), "{id} of {len}");
            }
        }
    }
}

fn join(index: &Index, id: usize, reach: &[usize]) -> (WorkerId, Slot) {
    let stores: Vec<StoreId> = reach.iter().map(|store| StoreId(*store as u64)).collect();
    let id = WorkerId(id as u64);
    (id, index.join(id, &stores))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn hundreds_of_workers_are_counted_together_as_they_would_be_one_by_one(
        reached in 0..3_usize,
        steps in proptest::collection::vec(
            (0..12_usize, 0..LEVELS.len(), 0..WORKERS, 1..WORKERS, 1..5_usize, 0..BLOCKS, 1..BLOCKS),
            1..25,
        ),
    ) {
        // The first store is reached by all or by none, the other by some.
        let mut fleet = Fleet::new(|id| (0..STORES).filter(|store| reached > *store && id % (2 * store + 1) == 0).collect());
        for (kind, level, first, many, stride, at, n) in steps {
            let workers = (first..WORKERS).step_by(stride).take(many);
            match kind {
                0 => workers.take(20).for_each(|who| fleet.swap(who)),
                1..3 if reached > kind - 1 => fleet.tell(WORKERS + kind - 1, level, true, 0..n),
                3 if reached > 0 => fleet.tell(WORKERS, level, false, at..at + 9),
                // The same for many: from the beginning, from anywhere, or a hole.
                4..8 => workers.for_each(|who| fleet.tell(who, level, true, 0..n)),
                8..10 => workers.for_each(|who| fleet.tell(who, level, true, at..at + n)),
                _ => workers.for_each(|who| fleet.tell(who, level, false, at..at + n.min(30))),
            }
        }
        fleet.check();
    }
}

#[test]
fn workers_that_have_parts_in_more_ways_than_there_are_classes_are_counted_all_the_same() {
    // A worker's number says at which levels it holds a page, and whether it reaches the store: 64 ways, others page by page.
    let mut fleet = Fleet::new(|id| if id >> 5 & 1 == 1 { vec![0] } else { vec![] });
    for (page, at) in (0..BLOCKS).step_by(64).enumerate() {
        for who in 0..WORKERS {
            for level in (0..LEVELS.len()).filter(|level| who >> ((level + page) % 6) & 1 == 1) {
                fleet.tell(who, level, true, at + level..at + 64);
                fleet.tell(who, level, true, at..at + who % 3);
            }
            if who % 5 == 0 {
                // Like nobody else.
                fleet.tell(who, page % 2, true, at..at + 1 + who / 5);
            }
        }
    }
    fleet.check();
    fleet.tell(WORKERS, 4, true, 0..BLOCKS - 10);
    fleet.check();
}
