use super::position::Position;
use super::*;
use along::{announce, runs};
use kvbm::{BlockEvent, ChainKey, Domain, Level, SequenceHash};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::Ordering;
use worker::plane::{StoreId, WorkerId};

mod along;

const WORKERS: u64 = 70; // more than one word of bits
const STORES: u64 = 3;
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
    let index = Index::with_memory_limit(LIMIT);
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
    let index = Index::with_memory_limit(0);
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
    let index = Index::with_memory_limit(LIMIT);
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

#[test]
fn a_table_keeps_its_entries_when_resized() {
    use super::table::Table;
    // Positions serve as hashes here. First there are few, then so many that groups overflow.
    let tag = |position: u32| crate::hash::splitmix64(u64::from(position));
    let entered = |table: &Table, positions: std::ops::Range<u32>| {
        positions.for_each(|position| assert!(table.insert(tag(position), position, |here| here == position)));
    };
    let check = |table: &Table, positions: u32| {
        for position in 0..positions {
            assert_eq!(table.find(tag(position), |here| here == position), Some(position));
            assert!(!table.insert(tag(position), position, |here| here == position), "it is in the table");
        }
        assert_eq!(table.find(tag(positions), |here| here == positions), None);
    };
    let mut table = Table::new(0);
    let mut positions = 0;
    let mut by_name = 0;
    for larger in [true; 9].into_iter().chain([false; 9]) {
        let wanted = table.slots() as u32 * 7 / if larger { 10 } else { 40 };
        entered(&table, positions.min(wanted)..wanted);
        (wanted..positions.max(wanted)).for_each(|position| assert!(table.remove(tag(position), position)));
        positions = wanted;
        check(&table, positions);
        let mut rehash = Vec::new();
        table = table.resized(larger, |position| rehash.push(position));
        by_name += rehash.len();
        for position in rehash {
            assert!(table.insert(tag(position), position, |_| false));
        }
        check(&table, positions);
    }
    assert!(table.is_smallest() && by_name > 0);
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
