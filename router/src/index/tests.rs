use super::*;
use kvbm::{ChainKey, Domain};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

const WORKERS: u64 = 70; // more than one word of bits
const STORES: u64 = 3;
const BLOCKS: usize = 10;

fn chain(number: u32) -> Vec<SequenceHash> {
    let tokens: Vec<u32> = (0..BLOCKS as u32).map(|at| number * 1000 + at).collect();
    ChainKey::root(&Domain::shared(), "m", None).names(&tokens, 1)
}

fn stored(level: Level, blocks: &[SequenceHash]) -> BlockEvent {
    BlockEvent::Stored { level, parent: None, blocks: blocks.to_vec() }
}

fn removed(level: Level, blocks: &[SequenceHash]) -> BlockEvent {
    BlockEvent::Removed { level, blocks: blocks.to_vec() }
}

/// The same answers, computed the slow way.
#[derive(Default)]
struct Model {
    reach: BTreeMap<WorkerId, Vec<StoreId>>,
    held: BTreeMap<Source, BTreeSet<(Level, SequenceHash)>>,
}

impl Model {
    fn at(&self, worker: WorkerId, names: &[SequenceHash]) -> Held {
        let mut sources = vec![Source::Worker(worker)];
        sources.extend(self.reach[&worker].iter().map(|store| Source::Store(*store)));
        let mut held = [0; LEVELS.len()];
        for name in names {
            let holds = |level: Level| {
                sources.iter().any(|source| self.held.get(source).is_some_and(|held| held.contains(&(level, *name))))
            };
            match LEVELS.iter().position(|level| holds(*level)) {
                Some(level) => held[level] += 1,
                None => break,
            }
        }
        Held::of(held)
    }

    fn memberships(&self) -> usize {
        self.held.values().map(BTreeSet::len).sum()
    }
}

#[derive(Clone, Debug)]
enum Step {
    Join(u64, Vec<u64>),
    Leave(u64),
    Stored(Source, Level, u32, usize, usize),
    Removed(Source, Level, u32, usize, usize),
    Cleared(Source, Level),
    Replace(Source, Vec<(Level, u32, usize)>),
    /// Everybody there holds a chain's beginning: the hot prefix that makes the wide forms of holders.
    Flood(Level, u32, usize),
    Drain(Level, u32, usize),
}

fn source() -> impl Strategy<Value = Source> {
    prop_oneof![
        3 => (0..WORKERS).prop_map(|id| Source::Worker(WorkerId(id))),
        1 => (0..STORES).prop_map(|id| Source::Store(StoreId(id))),
    ]
}

fn level() -> impl Strategy<Value = Level> {
    proptest::sample::select(&LEVELS[..])
}

fn step() -> impl Strategy<Value = Step> {
    let run = || (source(), level(), 0..4u32, 0..BLOCKS, 1..BLOCKS);
    prop_oneof![
        4 => (0..WORKERS, proptest::collection::vec(0..STORES, 0..3)).prop_map(|(id, stores)| Step::Join(id, stores)),
        1 => (0..WORKERS).prop_map(Step::Leave),
        6 => run().prop_map(|(s, l, chain, at, n)| Step::Stored(s, l, chain, at, n)),
        3 => run().prop_map(|(s, l, chain, at, n)| Step::Removed(s, l, chain, at, n)),
        1 => (source(), level()).prop_map(|(s, l)| Step::Cleared(s, l)),
        1 => (source(), proptest::collection::vec((level(), 0..4u32, 0..BLOCKS), 0..20)).prop_map(|(s, b)| Step::Replace(s, b)),
        1 => (level(), 0..4u32, 1..BLOCKS).prop_map(|(l, chain, n)| Step::Flood(l, chain, n)),
        1 => (level(), 0..4u32, 1..BLOCKS).prop_map(|(l, chain, n)| Step::Drain(l, chain, n)),
    ]
}

fn run_of(number: u32, at: usize, n: usize) -> Vec<SequenceHash> {
    chain(number)[at..(at + n).min(BLOCKS)].to_vec()
}

fn take(index: &Index, model: &mut Model, source: Source, event: BlockEvent) {
    index.apply(source, &event);
    // A source that nobody knows is ignored.
    let known = match source {
        Source::Worker(id) => model.reach.contains_key(&id),
        Source::Store(_) | Source::Router(_) => model.held.contains_key(&source),
    };
    if !known {
        return;
    }
    let held = model.held.entry(source).or_default();
    match event {
        BlockEvent::Stored { level, blocks, .. } => held.extend(blocks.into_iter().map(|block| (level, block))),
        BlockEvent::Removed { level, blocks } => blocks.into_iter().for_each(|block| {
            held.remove(&(level, block));
        }),
        BlockEvent::Cleared { level } => held.retain(|(at, _)| *at != level),
    }
}

fn perform(index: &Index, model: &mut Model, slots: &mut BTreeMap<WorkerId, Slot>, step: Step) {
    match step {
        Step::Join(id, stores) => {
            let stores: Vec<StoreId> = stores.into_iter().map(StoreId).collect();
            slots.insert(WorkerId(id), index.join(WorkerId(id), &stores));
            for store in &stores {
                model.held.entry(Source::Store(*store)).or_default();
            }
            model.reach.insert(WorkerId(id), stores);
        }
        Step::Leave(id) => {
            let lonely = index.leave(WorkerId(id));
            slots.remove(&WorkerId(id));
            model.reach.remove(&WorkerId(id));
            model.held.remove(&Source::Worker(WorkerId(id)));
            for store in lonely {
                assert!(!model.reach.values().any(|stores| stores.contains(&store)), "{store} is still reached");
                index.forget(Source::Store(store));
                model.held.remove(&Source::Store(store));
            }
        }
        Step::Stored(source, level, chain, at, n) => take(index, model, source, stored(level, &run_of(chain, at, n))),
        Step::Removed(source, level, chain, at, n) => take(index, model, source, removed(level, &run_of(chain, at, n))),
        Step::Cleared(source, level) => take(index, model, source, BlockEvent::Cleared { level }),
        Step::Replace(source, blocks) => {
            let blocks: Vec<_> = blocks.into_iter().map(|(level, number, at)| (level, chain(number)[at])).collect();
            index.replace(source, &blocks);
            if let Some(held) = model.held.get_mut(&source) {
                *held = blocks.into_iter().collect();
            } else if let Source::Worker(id) = source
                && model.reach.contains_key(&id)
            {
                model.held.insert(source, blocks.into_iter().collect());
            }
        }
        Step::Flood(level, chain, n) => {
            for id in model.reach.keys().copied().collect::<Vec<_>>() {
                take(index, model, Source::Worker(id), stored(level, &run_of(chain, 0, n)));
            }
        }
        Step::Drain(level, chain, n) => {
            for id in model.reach.keys().copied().collect::<Vec<_>>() {
                take(index, model, Source::Worker(id), removed(level, &run_of(chain, 0, n)));
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn the_index_agrees_with_a_naive_model_under_churn(
        everybody in any::<bool>(),
        steps in proptest::collection::vec(step(), 1..150),
    ) {
        let (index, mut model, mut slots) = (Index::new(), Model::default(), BTreeMap::new());
        if everybody {
            (0..WORKERS).for_each(|id| perform(&index, &mut model, &mut slots, Step::Join(id, vec![id % STORES])));
        }
        for step in steps {
            perform(&index, &mut model, &mut slots, step);
            prop_assert_eq!(index.memberships(), model.memberships());
        }
        for number in 0..4 {
            let overlap = index.overlap(&chain(number));
            for (worker, slot) in &slots {
                prop_assert_eq!(overlap.at(*slot), model.at(*worker, &chain(number)), "{} chain {}", worker, number);
            }
        }
        for id in 0..WORKERS {
            perform(&index, &mut model, &mut slots, Step::Leave(id));
        }
        prop_assert_eq!(index.memberships(), 0);
    }
}

#[test]
fn an_evicted_middle_block_ends_the_run_and_a_slower_copy_bridges_it() {
    let (index, names) = (Index::new(), chain(1));
    let (a, store) = (WorkerId(1), StoreId(9));
    let slot = index.join(a, &[store]);
    index.apply(Source::Worker(a), &stored(Level::G1, &names));
    index.apply(Source::Worker(a), &removed(Level::G1, &names[3..4]));
    assert_eq!(index.overlap(&names).at(slot), Held::of([3, 0, 0, 0]));
    index.apply(Source::Store(store), &stored(Level::G3, &names[..5]));
    assert_eq!(index.overlap(&names).at(slot), Held::of([BLOCKS as u32 - 1, 0, 1, 0]));
}

#[test]
fn a_store_outlives_its_writer_and_serves_whoever_reaches_it() {
    let (index, names) = (Index::new(), chain(1));
    let store = StoreId(9);
    let [writer, reader, stranger] = [WorkerId(1), WorkerId(2), WorkerId(3)];
    index.join(writer, &[store]);
    let (reads, cannot) = (index.join(reader, &[store]), index.join(stranger, &[]));
    index.apply(Source::Store(store), &stored(Level::G4, &names));
    assert!(index.leave(writer).is_empty(), "the reader still reaches the store");
    let overlap = index.overlap(&names);
    assert_eq!(overlap.at(reads), Held::of([0, 0, 0, BLOCKS as u32]));
    assert_eq!(overlap.at(cannot).run(), 0);
    assert_eq!(index.leave(reader), [store]);
}

#[test]
fn a_membership_takes_less_than_forty_bytes_and_gives_them_back() {
    let index = Index::new();
    let empty = index.bytes();
    let tokens: Vec<u32> = (0..100_000).collect();
    let names = ChainKey::root(&Domain::shared(), "m", None).names(&tokens, 1);
    for (id, own) in (0..).zip(names.chunks(2000)) {
        index.join(WorkerId(id), &[StoreId(1)]);
        index.apply(Source::Worker(WorkerId(id)), &stored(Level::G1, own));
        // Half of it is offloaded, and everybody holds the same beginning.
        index.apply(Source::Worker(WorkerId(id)), &stored(Level::G2, &own[..1000]));
        index.apply(Source::Worker(WorkerId(id)), &stored(Level::G1, &names[..200]));
        index.apply(Source::Store(StoreId(1)), &stored(Level::G3, &own[..500]));
    }
    let each = index.bytes() as f64 / index.memberships() as f64;
    assert!(each < 40.0, "{each:.1} bytes per membership");
    (0..50).for_each(|id| {
        index.leave(WorkerId(id));
    });
    index.forget(Source::Store(StoreId(1)));
    assert_eq!(index.memberships(), 0);
    assert!(index.bytes() < empty + 256 * 4096, "{} bytes are left in an empty index", index.bytes());
}
