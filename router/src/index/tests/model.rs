//! The index compared with a naive model.

use super::*;
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const WORKERS: u64 = 70; // more than one word of bits
const STORES: u64 = 3;

/// A naive model of the index.
#[derive(Default)]
struct Model {
    reach: BTreeMap<WorkerId, Vec<StoreId>>,
    held: BTreeMap<Holder, BTreeSet<(Level, SequenceHash)>>,
}

impl Model {
    fn at(&self, worker: WorkerId, hashes: &[SequenceHash]) -> WorkerOverlap {
        let mut holders = vec![Holder::Worker(worker)];
        holders.extend(self.reach[&worker].iter().map(|store| Holder::Store(*store)));
        let mut held = [0; LEVELS.len()];
        for hash in hashes {
            let holds = |level: Level| {
                holders.iter().any(|holder| self.held.get(holder).is_some_and(|held| held.contains(&(level, *hash))))
            };
            match LEVELS.iter().position(|level| holds(*level)) {
                Some(level) => held[level] += 1,
                None => break,
            }
        }
        WorkerOverlap::of(held)
    }

    fn entries(&self) -> usize {
        self.held.values().map(BTreeSet::len).sum()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Join(u64, Vec<u64>),
    Leave(u64),
    Stored(Holder, Level, u32, usize, usize),
    Removed(Holder, Level, u32, usize, usize),
    Cleared(Holder, Level),
    Replace(Holder, Vec<(Level, u32, usize)>),
    /// All workers store the beginning of a chain, which creates groups of holders.
    Flood(Level, u32, usize),
    Drain(Level, u32, usize),
}

fn holder() -> impl Strategy<Value = Holder> {
    prop_oneof![
        3 => (0..WORKERS).prop_map(|id| Holder::Worker(WorkerId(id))),
        1 => (0..STORES).prop_map(|id| Holder::Store(StoreId(id))),
    ]
}

fn level() -> impl Strategy<Value = Level> {
    proptest::sample::select(&LEVELS[..])
}

fn step() -> impl Strategy<Value = Step> {
    let run = || (holder(), level(), 0..4u32, 0..BLOCKS, 1..BLOCKS);
    prop_oneof![
        4 => (0..WORKERS, proptest::collection::vec(0..STORES, 0..3)).prop_map(|(id, stores)| Step::Join(id, stores)),
        1 => (0..WORKERS).prop_map(Step::Leave),
        6 => run().prop_map(|(s, l, chain, at, n)| Step::Stored(s, l, chain, at, n)),
        3 => run().prop_map(|(s, l, chain, at, n)| Step::Removed(s, l, chain, at, n)),
        1 => (holder(), level()).prop_map(|(s, l)| Step::Cleared(s, l)),
        1 => (holder(), proptest::collection::vec((level(), 0..4u32, 0..BLOCKS), 0..20))
            .prop_map(|(s, b)| Step::Replace(s, b)),
        1 => (level(), 0..4u32, 1..BLOCKS).prop_map(|(l, chain, n)| Step::Flood(l, chain, n)),
        1 => (level(), 0..4u32, 1..BLOCKS).prop_map(|(l, chain, n)| Step::Drain(l, chain, n)),
    ]
}

fn run_of(number: u32, at: usize, n: usize) -> Vec<SequenceHash> {
    chain(number)[at..(at + n).min(BLOCKS)].to_vec()
}

fn apply(index: &Index, model: &mut Model, holder: Holder, event: BlockEvent) {
    index.apply(holder, &event);
    // The index ignores unknown holders.
    let known = match holder {
        Holder::Worker(id) => model.reach.contains_key(&id),
        Holder::Estimate(_) | Holder::Store(_) => model.held.contains_key(&holder),
    };
    if !known {
        return;
    }
    let held = model.held.entry(holder).or_default();
    match event {
        BlockEvent::Stored { level, blocks, .. } => held.extend(blocks.into_iter().map(|block| (level, block))),
        BlockEvent::Removed { level, blocks } => blocks.into_iter().for_each(|block| {
            held.remove(&(level, block));
        }),
        BlockEvent::Cleared { level } => held.retain(|(at, _)| *at != level),
    }
}

fn perform(index: &Index, model: &mut Model, holder_ids: &mut BTreeMap<WorkerId, HolderId>, step: Step) {
    match step {
        Step::Join(id, stores) => {
            let stores: Vec<StoreId> = stores.into_iter().map(StoreId).collect();
            holder_ids.insert(WorkerId(id), index.join(WorkerId(id), &stores));
            for store in &stores {
                model.held.entry(Holder::Store(*store)).or_default();
            }
            model.reach.insert(WorkerId(id), stores);
        }
        Step::Leave(id) => {
            let unreferenced = index.leave(WorkerId(id));
            holder_ids.remove(&WorkerId(id));
            model.reach.remove(&WorkerId(id));
            model.held.remove(&Holder::Worker(WorkerId(id)));
            for store in unreferenced {
                assert!(!model.reach.values().any(|stores| stores.contains(&store)), "{store} is still reached");
                index.forget(Holder::Store(store));
                model.held.remove(&Holder::Store(store));
            }
        }
        Step::Stored(holder, level, chain, at, n) => apply(index, model, holder, stored(level, &run_of(chain, at, n))),
        Step::Removed(holder, level, chain, at, n) => {
            apply(index, model, holder, removed(level, &run_of(chain, at, n)));
        }
        Step::Cleared(holder, level) => apply(index, model, holder, BlockEvent::Cleared { level }),
        Step::Replace(holder, blocks) => {
            let mut blocks = blocks;
            blocks.sort_unstable();
            blocks.dedup();
            let follows = |a: &(Level, _, usize), b: &(Level, _, usize)| (a.0, a.1, a.2 + 1) == *b;
            let runs = blocks.chunk_by(follows).map(|run| {
                let ((level, _, at), hashes) = (run[0], chain(run[0].1));
                let parent = at.checked_sub(1).map(|before| hashes[before]);
                kvbm::Run { level, parent, blocks: hashes[at..at + run.len()].to_vec() }
            });
            index.replace(holder, &runs.collect::<Vec<_>>());
            let blocks: Vec<_> = blocks.into_iter().map(|(level, number, at)| (level, chain(number)[at])).collect();
            if let Some(held) = model.held.get_mut(&holder) {
                *held = blocks.into_iter().collect();
            } else if let Holder::Worker(id) = holder
                && model.reach.contains_key(&id)
            {
                model.held.insert(holder, blocks.into_iter().collect());
            }
        }
        Step::Flood(level, chain, n) => {
            for id in model.reach.keys().copied().collect::<Vec<_>>() {
                apply(index, model, Holder::Worker(id), stored(level, &run_of(chain, 0, n)));
            }
        }
        Step::Drain(level, chain, n) => {
            for id in model.reach.keys().copied().collect::<Vec<_>>() {
                apply(index, model, Holder::Worker(id), removed(level, &run_of(chain, 0, n)));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_index_agrees_with_a_naive_model_under_churn(
        all_join in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..150),
    ) {
        let (index, mut model, mut holder_ids) = (Index::new(), Model::default(), BTreeMap::new());
        if all_join {
            (0..WORKERS).for_each(|id| perform(&index, &mut model, &mut holder_ids, Step::Join(id, vec![id % STORES])));
        }
        for step in steps {
            perform(&index, &mut model, &mut holder_ids, step);
            prop_assert_eq!(index.entries(), model.entries());
            for (holder, held) in &model.held {
                for level in LEVELS {
                    let digest = held.iter().filter(|(at, _)| *at == level).map(|(_, hash)| *hash).collect();
                    prop_assert_eq!(index.digest(*holder, level), Some(digest), "{:?} at {}", holder, level);
                }
            }
        }
        for number in 0..4 {
            let overlap = index.overlap(&chain(number));
            for (worker, holder_id) in &holder_ids {
                let expected = model.at(*worker, &chain(number));
                prop_assert_eq!(overlap.at(*holder_id), expected, "{} chain {}", worker, number);
            }
        }
        for id in 0..WORKERS {
            perform(&index, &mut model, &mut holder_ids, Step::Leave(id));
        }
        prop_assert_eq!(index.entries(), 0);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn blocks_of_a_store_count_for_all_its_readers(
        other in any::<bool>(),
        left in 0..6u64,
        steps in proptest::collection::vec((0..8u64, level(), any::<bool>(), 0..300usize, 1..300usize), 1..40),
    ) {
        // All workers read one store, so most pages count alike for all; some workers also read another store.
        let (index, mut model) = (Index::new(), Model::default());
        let (hashes, _) = runs(7, 300, 300);
        let reach = |id: u64| if other && id < 3 { vec![StoreId(6), StoreId(7)] } else { vec![StoreId(6)] };
        let mut holder_ids: BTreeMap<WorkerId, HolderId> =
            (0..6).map(|id| (WorkerId(id), index.join(WorkerId(id), &reach(id)))).collect();
        model.reach = (0..6).map(|id| (WorkerId(id), reach(id).clone())).collect();
        for id in [6, 7] {
            model.held.insert(Holder::Store(StoreId(id)), BTreeSet::new());
        }
        for (id, level, comes, at, n) in steps {
            let holder = if id < 6 { Holder::Worker(WorkerId(id)) } else { Holder::Store(StoreId(id)) };
            let run = &hashes[at..(at + n).min(hashes.len())];
            // A worker holds a small part of a prompt, a store often most of it.
            let run = if id < 6 { &run[..run.len().min(40)] } else { run };
            if id < 7 || other {
                apply(&index, &mut model, holder, if comes { stored(level, run) } else { removed(level, run) });
            }
        }
        index.leave(WorkerId(left));
        holder_ids.remove(&WorkerId(left));
        model.held.remove(&Holder::Worker(WorkerId(left)));
        for len in [1, 64, 200, 300] {
            let overlap = index.overlap(&hashes[..len]);
            for (worker, holder_id) in &holder_ids {
                prop_assert_eq!(overlap.at(*holder_id), model.at(*worker, &hashes[..len]), "{} of {}", worker, len);
            }
        }
    }
}
