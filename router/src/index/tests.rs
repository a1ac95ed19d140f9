use super::position::Place;
use super::*;
use along::{runs, tell};
use kvbm::{ChainKey, Domain};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet};

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
            let mut blocks = blocks;
            blocks.sort_unstable();
            blocks.dedup();
            let follows = |a: &(Level, _, usize), b: &(Level, _, usize)| (a.0, a.1, a.2 + 1) == *b;
            let runs = blocks.chunk_by(follows).map(|run| {
                let ((level, _, at), names) = (run[0], chain(run[0].1));
                let parent = at.checked_sub(1).map(|before| names[before]);
                kvbm::Run { level, parent, blocks: names[at..at + run.len()].to_vec() }
            });
            index.replace(source, &runs.collect::<Vec<_>>());
            let blocks: Vec<_> = blocks.into_iter().map(|(level, number, at)| (level, chain(number)[at])).collect();
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
            for (source, held) in &model.held {
                for level in LEVELS {
                    let digest = held.iter().filter(|(at, _)| *at == level).map(|(_, name)| *name).collect();
                    prop_assert_eq!(index.digest(*source, level), Some(digest), "{} at {}", source, level);
                }
            }
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

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn what_stores_have_counts_for_all_who_reach_them_beside_what_they_hold_themselves(
        other in any::<bool>(),
        gone in 0..6u64,
        steps in proptest::collection::vec((0..8u64, level(), any::<bool>(), 0..300usize, 1..300usize), 1..40),
    ) {
        // Everybody reaches one store, so that most pages are counted alike for all; some reach another, too.
        let (index, mut model) = (Index::new(), Model::default());
        let (names, _) = runs(7, 300, 300);
        let reach = |id: u64| if other && id < 3 { vec![StoreId(6), StoreId(7)] } else { vec![StoreId(6)] };
        let mut slots: BTreeMap<WorkerId, Slot> =
            (0..6).map(|id| (WorkerId(id), index.join(WorkerId(id), &reach(id)))).collect();
        model.reach = (0..6).map(|id| (WorkerId(id), reach(id).clone())).collect();
        for id in [6, 7] {
            model.held.insert(Source::Store(StoreId(id)), BTreeSet::new());
        }
        for (id, level, comes, at, n) in steps {
            let source = if id < 6 { Source::Worker(WorkerId(id)) } else { Source::Store(StoreId(id)) };
            let run = &names[at..(at + n).min(names.len())];
            // A worker seldom holds most of a prompt, a store often does.
            let run = if id < 6 { &run[..run.len().min(40)] } else { run };
            if id < 7 || other {
                take(&index, &mut model, source, if comes { stored(level, run) } else { removed(level, run) });
            }
        }
        index.leave(WorkerId(gone));
        slots.remove(&WorkerId(gone));
        model.held.remove(&Source::Worker(WorkerId(gone)));
        for len in [1, 64, 200, 300] {
            let overlap = index.overlap(&names[..len]);
            for (worker, slot) in &slots {
                prop_assert_eq!(overlap.at(*slot), model.at(*worker, &names[..len]), "{} of {}", worker, len);
            }
        }
    }
}

#[test]
fn an_evicted_middle_block_ends_the_run_and_a_slower_copy_bridges_it() {
    let (index, names) = (Index::new(), chain(1));
    let (a, store) = (WorkerId(1), StoreId(9));
    let slot = index.join(a, &[store]);
    index.apply(Source::Worker(a), &stored(Level::G1, &names));
    index.apply(Source::Worker(a), &removed(Level::G1, &names[3..4]));
    assert_eq!(index.overlap(&names).at(slot), Held::of([3, 0, 0, 0, 0]));
    index.apply(Source::Store(store), &stored(Level::G3, &names[..5]));
    assert_eq!(index.overlap(&names).at(slot), Held::of([BLOCKS as u32 - 1, 0, 1, 0, 0]));
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
    assert_eq!(overlap.at(reads), Held::of([0, 0, 0, 0, BLOCKS as u32]));
    assert_eq!(overlap.at(cannot).run(), 0);
    assert_eq!(index.leave(reader), [store]);
}

#[test]
fn a_hole_is_exact_and_healed_by_storing_the_block_again() {
    let index = Index::new();
    let (id, slot) = (WorkerId(1), index.join(WorkerId(1), &[]));
    let other = (WorkerId(2), index.join(WorkerId(2), &[]));
    let (names, events) = runs(1, 300, 300);
    index.apply(Source::Worker(id), &events[0]);
    index.apply(Source::Worker(other.0), &events[0]);
    for at in [200, 64, 10, 0] {
        index.apply(Source::Worker(id), &removed(Level::G1, &names[at..=at]));
        let overlap = index.overlap(&names);
        assert_eq!((overlap.at(slot).run(), overlap.at(other.1).run()), (at as u32, 300));
    }
    index.apply(Source::Worker(other.0), &removed(Level::G1, &names));
    for (at, run) in [(10, 0), (0, 64), (64, 200), (200, 300)] {
        let stored = BlockEvent::Stored { level: Level::G1, parent: None, blocks: names[at..=at].to_vec() };
        index.apply(Source::Worker(id), &stored);
        assert_eq!(index.overlap(&names).at(slot).run(), run, "after {at}");
    }
}

#[test]
fn prefix_state_stays_bounded() {
    // Caches that turn over a hundred times, forks and holes everywhere: what is known is what is held, and so is its price.
    let index = Index::new();
    let workers: Vec<WorkerId> = (0..8).map(WorkerId).collect();
    for id in &workers {
        index.join(*id, &[]);
    }
    let mut most = 0;
    let mut held: BTreeMap<WorkerId, Vec<SequenceHash>> = BTreeMap::new();
    for round in 0..800_u32 {
        let id = workers[round as usize % workers.len()];
        let (names, events) = runs(round, 300, 100);
        let held = held.entry(id).or_default();
        held.extend(&names);
        tell(&index, id, &events);
        // Blocks are given up in an order that is nobody's, so that nearly every page is left with a few.
        held.sort_unstable_by_key(|name| crate::hash::splitmix64(name.short() ^ u64::from(round)));
        let gone: Vec<SequenceHash> = held.drain(..held.len().saturating_sub(3000)).collect();
        index.apply(Source::Worker(id), &removed(Level::G1, &gone));
        if round > 200 {
            most = most.max(index.bytes());
        }
    }
    assert_eq!(index.memberships(), 8 * 3000);
    let each = most as f64 / index.memberships() as f64;
    assert!(each < 60.0, "{each:.1} bytes per membership where caches lose blocks at random");
    for id in workers {
        index.leave(id);
    }
    assert_eq!(index.memberships(), 0);
    assert_eq!((index.arena.used(), index.locator.entries()), (0, 0));
    assert!(index.bytes() < 2 * 150_000, "{} bytes are left in an empty index", index.bytes());
}

#[test]
fn an_index_over_its_budget_forgets_the_coldest_and_is_never_wrong() {
    const BUDGET: usize = 4 << 20;
    let index = Index::with_budget(BUDGET);
    let (id, slot) = (WorkerId(1), index.join(WorkerId(1), &[]));
    let (hot, events) = runs(0, 512, 512);
    index.apply(Source::Worker(id), &events[0]);
    for number in 1..=1000 {
        let (names, events) = runs(number, 512, 512);
        index.apply(Source::Worker(id), &events[0]);
        assert!(index.overlap(&names).at(slot).run() <= 512);
        assert_eq!(index.overlap(&hot).at(slot).run(), 512, "what is asked for stays");
    }
    assert!(index.bytes() < BUDGET + BUDGET / 4, "{} bytes", index.bytes());
    assert!(index.forgotten() > 1000);
    let digest = index.digest(Source::Worker(id), Level::G1).unwrap();
    assert_eq!((index.is_complete(Source::Worker(id)), digest.blocks), (false, index.memberships() as u64));
    // A snapshot restores what fits.
    let (names, _) = runs(1, 512, 512);
    assert_eq!(index.overlap(&names).at(slot).run(), 0, "it was the coldest");
    index.replace(Source::Worker(id), &[kvbm::Run { level: Level::G1, parent: None, blocks: names.clone() }]);
    assert_eq!(index.overlap(&names).at(slot).run(), 512);
    assert!(index.is_complete(Source::Worker(id)));
    // A smaller budget is kept at once.
    index.set_budget(BUDGET / 4);
    assert!(index.bytes() < BUDGET / 2, "{} bytes", index.bytes());
    index.leave(id);
    assert_eq!(index.memberships(), 0);
}

#[test]
fn forgetting_ends_where_nothing_is_left_though_the_budget_is_not_kept() {
    // Tables and ledgers alone take more than this.
    let index = Index::with_budget(0);
    index.join(WorkerId(1), &[]);
    let (_, events) = runs(0, 64, 64);
    index.apply(Source::Worker(WorkerId(1)), &events[0]);
    assert_eq!((index.forgotten(), index.memberships()), (1, 0));
    let hand = || *index.hand.lock().unwrap();
    assert_eq!(hand(), 1, "it goes no further than the only page that was in use");
    index.trim();
    assert_eq!(hand(), 1);
}

#[test]
fn a_budget_is_kept_however_often_what_is_known_has_changed() {
    const BUDGET: usize = 4 << 20;
    const WORKERS: u64 = 100;
    let index = Index::with_budget(BUDGET);
    let workers: Vec<WorkerId> = (0..WORKERS).map(WorkerId).collect();
    for id in &workers {
        index.join(*id, &[]);
    }
    let mut most = [0; 2];
    for number in 0..16_000 {
        let (_, events) = runs(number, 256, 256);
        index.apply(Source::Worker(workers[number as usize % workers.len()]), &events[0]);
        let part = &mut most[usize::from(number >= 8000)];
        *part = index.bytes().max(*part);
    }
    assert!(index.forgotten() > 16_000, "everything has changed many times");
    assert!(most[1] <= BUDGET, "{most:?} bytes");
    // A worker that leaves costs what it holds, and not what it held.
    let owner = index.owner(Source::Worker(workers[0])).unwrap();
    let named = owner.lock().pages[0].len();
    let held = owner.digest(0).blocks as usize;
    assert!(held > 0 && named <= held / 64 * 2 + 32, "{named} pages for {held} blocks");
    for id in &workers {
        index.leave(*id);
    }
    assert_eq!((index.memberships(), index.bytes.ledgers.load(Ordering::Relaxed)), (0, 0));
}

#[test]
fn a_snapshot_lays_each_chain_in_pages_of_its_own_as_its_events_would() {
    let (log, index, id) = (kvbm::EventLog::new(kvbm::Epoch(1)), Index::new(), WorkerId(1));
    let slot = index.join(id, &[]);
    let chains: Vec<_> = (0..20).map(|number| runs(number, 512, 16)).collect();
    // They grow side by side.
    for nth in 0..32 {
        for (_, events) in &chains {
            log.announce(events[nth].clone());
        }
    }
    index.replace(Source::Worker(id), &log.snapshot().runs);
    for (names, _) in &chains {
        assert_eq!(index.overlap(names).at(slot).run(), 512);
        let body = index.body.load();
        let places: Vec<_> = names.iter().map(|name| body.find(name.short()).unwrap()).collect();
        let turns: Vec<_> = places.windows(2).filter(|pair| pair[0].page() != pair[1].page()).collect();
        assert!(turns.len() <= 8, "512 blocks lie in {} pages of 64", turns.len() + 1);
        for turn in turns {
            let next = body.page(turn[0].page()).unwrap().next(turn[0].at());
            assert_eq!(next.map(Place::page), Some(turn[1].page()), "no table says where the chain goes on");
        }
    }
}

#[test]
fn readers_and_writers_side_by_side_agree_with_the_model_in_the_end() {
    let index = Index::new();
    let slots: Vec<Slot> = (0..4).map(|id| index.join(WorkerId(id), &[])).collect();
    let chains: Vec<_> = (0..6).map(|number| runs(number, 200, 50)).collect();
    let rest = index.join(WorkerId(9), &[]);
    for (_, events) in &chains {
        tell(&index, WorkerId(9), events);
    }
    let held: Vec<BTreeSet<SequenceHash>> = std::thread::scope(|scope| {
        let writer = |id: u64| {
            let (index, chains) = (&index, &chains);
            move || {
                let mut held = BTreeSet::new();
                for step in 0..400 {
                    let dice = crate::hash::splitmix64(id << 32 | step);
                    let (names, events) = &chains[dice as usize % chains.len()];
                    let part = (dice >> 8) as usize % 4;
                    if dice >> 20 & 1 == 0 {
                        index.apply(Source::Worker(WorkerId(id)), &events[part]);
                        held.extend(&names[part * 50..][..50]);
                    } else {
                        let gone = &names[part * 50 + (dice >> 30) as usize % 40..][..10];
                        index.apply(Source::Worker(WorkerId(id)), &removed(Level::G1, gone));
                        held.retain(|name| !gone.contains(name));
                    }
                }
                held
            }
        };
        let writers: Vec<_> = (0..4).map(|id| scope.spawn(writer(id))).collect();
        while writers.iter().any(|writer| !writer.is_finished()) {
            for (names, _) in &chains {
                // A writer that the system stopped in the middle of a page is not waited for.
                let whole = (0..1000).any(|_| index.overlap(names).at(rest).run() == 200);
                assert!(whole, "who changes nothing is seen whole");
            }
        }
        writers.into_iter().map(|writer| writer.join().unwrap()).collect()
    });
    for (names, _) in &chains {
        let overlap = index.overlap(names);
        for (slot, held) in slots.iter().zip(&held) {
            assert_eq!(overlap.at(*slot).run() as usize, names.iter().take_while(|name| held.contains(*name)).count());
        }
    }
    assert_eq!(index.memberships(), held.iter().map(BTreeSet::len).sum::<usize>() + 6 * 200);
}

#[test]
fn a_membership_takes_less_than_forty_bytes_and_gives_them_back() {
    let index = Index::new();
    let empty = index.bytes();
    let tokens: Vec<u32> = (0..100_000).collect();
    let names = ChainKey::root(&Domain::shared(), "m", None).hashes(&tokens, 1);
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
    for id in 0..50 {
        index.leave(WorkerId(id));
    }
    index.forget(Source::Store(StoreId(1)));
    assert_eq!(index.memberships(), 0);
    assert!(index.bytes() < empty + 160_000, "{} bytes are left in an empty index", index.bytes());
}

#[test]
fn a_table_keeps_its_entries_while_it_grows_and_shrinks() {
    use super::table::Table;
    // The places are names here: few, and then so many that groups overflow.
    let tag = |place: u32| crate::hash::splitmix64(u64::from(place));
    let entered = |table: &Table, places: std::ops::Range<u32>| {
        places.for_each(|place| assert!(table.enter(tag(place), place, |here| here == place)));
    };
    let check = |table: &Table, places: u32| {
        for place in 0..places {
            assert_eq!(table.find(tag(place), |here| here == place), Some(place));
            assert!(!table.enter(tag(place), place, |here| here == place), "it is there");
        }
        assert_eq!(table.find(tag(places), |here| here == places), None);
    };
    let mut table = Table::new(0);
    let mut places = 0;
    let mut by_name = 0;
    for larger in [true; 9].into_iter().chain([false; 9]) {
        let wanted = table.slots() as u32 * 7 / if larger { 10 } else { 40 };
        entered(&table, places.min(wanted)..wanted);
        (wanted..places.max(wanted)).for_each(|place| assert!(table.take(tag(place), place)));
        places = wanted;
        check(&table, places);
        let mut unsure = Vec::new();
        table = table.relaid(larger, |place| unsure.push(place));
        by_name += unsure.len();
        for place in unsure {
            assert!(table.enter(tag(place), place, |_| false));
        }
        check(&table, places);
    }
    assert!(table.is_least() && by_name > 0);
}

#[test]
fn pages_that_are_wanted_together_lie_side_by_side_where_there_is_room() {
    let arena = Arena::new();
    let take = |pages| arena.take(pages, |_| ()).unwrap();
    assert_eq!([take(8), take(8), take(1)], [1..9, 9..17, 17..18]);
    arena.give(&[2, 4, 5, 10, 11, 12], |_| ());
    assert_eq!(take(3), 10..13);
    assert_eq!(take(2), 4..6);
    assert_eq!(take(1), 2..3);
    // Nowhere are as many: it is the longest that there is, and then there is another chunk.
    let all: Vec<u32> =
        std::iter::from_fn(|| Some(take(1).start)).take_while(|page| *page < snapshot::CHUNK as u32 - 1).collect();
    assert_eq!(all.len(), snapshot::CHUNK - 18 - 1);
    arena.give(&[20, 30, 31], |_| ());
    assert_eq!(take(9), 30..32);
    assert_eq!(arena.used(), snapshot::CHUNK - 1 - 1);
}
