//! Along chains of many pages.

use super::*;

/// Runs of one chain, each told by an event of its own.
pub(super) fn runs(number: u32, blocks: u32, run: usize) -> (Vec<SequenceHash>, Vec<BlockEvent>) {
    let tokens: Vec<u32> = (0..blocks).map(|at| at | number << 20).collect();
    let names = ChainKey::root(&Domain::shared(), "m", None).hashes(&tokens, 1);
    let mut parent = None;
    let event = |blocks: &[SequenceHash]| {
        let parent = std::mem::replace(&mut parent, blocks.last().copied());
        BlockEvent::Stored { level: Level::G1, parent, blocks: blocks.to_vec() }
    };
    let events = names.chunks(run).map(event).collect();
    (names, events)
}

pub(super) fn tell(index: &Index, worker: WorkerId, events: &[BlockEvent]) {
    for event in events {
        index.apply(Source::Worker(worker), event);
    }
}

#[test]
fn a_chain_longer_than_a_page_forks_and_ends_where_it_should() {
    let index = Index::new();
    let [a, b] = [1, 2].map(|id| (WorkerId(id), index.join(WorkerId(id), &[])));
    // Runs that end anywhere in a page, and two workers' that alternate.
    let (long, events) = runs(1, 1000, 37);
    tell(&index, a.0, &events);
    tell(&index, b.0, &events[..9]);
    for len in [1, 63, 64, 65, 333, 334, 999, 1000] {
        let overlap = index.overlap(&long[..len]);
        assert_eq!(overlap.at(a.1).run(), len as u32);
        assert_eq!(overlap.at(b.1).run(), len.min(333) as u32);
    }
    let mut fork = long.clone();
    let other = runs(2, 1000, 1000).0;
    for at in [0, 1, 63, 64, 100, 332, 333, 998] {
        fork[at..].copy_from_slice(&other[at..]);
        assert_eq!(index.overlap(&fork).at(a.1).run(), at as u32);
        fork[at..].copy_from_slice(&long[at..]);
    }
}

#[test]
fn a_page_that_was_taken_by_another_chain_leads_nobody_astray() {
    let index = Index::new();
    let [a, b] = [1, 2].map(|id| (WorkerId(id), index.join(WorkerId(id), &[])));
    let (long, events) = runs(1, 640, 640);
    let (other, others) = runs(2, 640, 640);
    tell(&index, a.0, &events);
    for at in [64, 100, 320] {
        index.apply(Source::Worker(a.0), &removed(Level::G1, &long[at..]));
        tell(&index, b.0, &others);
        assert_eq!(index.overlap(&long).at(a.1).run(), at as u32);
        let stored = BlockEvent::Stored { level: Level::G1, parent: Some(long[at - 1]), blocks: long[at..].to_vec() };
        index.apply(Source::Worker(a.0), &stored);
        for (chain, (_, slot), nobody) in [(&long, a, b.1), (&other, b, a.1)] {
            let overlap = index.overlap(chain);
            assert_eq!((overlap.at(slot).run(), overlap.at(nobody).run()), (640, 0));
        }
        index.apply(Source::Worker(b.0), &removed(Level::G1, &other));
    }
}

#[test]
fn pages_alike_count_for_each_as_they_would_one_by_one() {
    let index = Index::new();
    let store = StoreId(1);
    let ids = [1, 2, 3, 4, 5].map(WorkerId);
    let slots = ids.map(|id| index.join(id, if id.0 == 5 { std::slice::from_ref(&store) } else { &[] }));
    let (chain, events) = runs(1, 640, 640);
    let part = |range: std::ops::Range<usize>, level| {
        let parent = range.start.checked_sub(1).map(|before| chain[before]);
        BlockEvent::Stored { level, parent, blocks: chain[range].to_vec() }
    };
    // Two have all of it; one its first half, and the second at a slower level; one begins, and goes on where it left a gap;
    // and one has a little, of which a store has more.
    tell(&index, ids[0], &events);
    tell(&index, ids[1], &events);
    tell(&index, ids[2], &[part(0..320, Level::G1), part(320..640, Level::G3)]);
    tell(&index, ids[3], &[part(0..200, Level::G1), part(256..640, Level::G1)]);
    let lens = || (1..=640).step_by(9).chain([64, 128, 576, 577, 640]);
    for len in lens() {
        let overlap = index.overlap(&chain[..len]);
        let runs = [0, 1, 2, 3].map(|worker: usize| overlap.at(slots[worker]).run() as usize);
        assert_eq!(runs, [len, len, len, len.min(200)]);
    }
    tell(&index, ids[4], &[part(0..64, Level::G1)]);
    index.apply(Source::Store(store), &part(0..576, Level::G4));
    for len in lens() {
        let overlap = index.overlap(&chain[..len]);
        let has = |worker: usize| overlap.at(slots[worker]).by_level().collect::<Vec<_>>();
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
fn who_holds_nothing_any_more_keeps_no_pages_for_what_may_come() {
    let index = Index::new();
    index.join(WorkerId(1), &[]);
    let (names, events) = runs(1, 20_000, 100);
    tell(&index, WorkerId(1), &events);
    assert!(index.arena.used() > names.len().div_ceil(64), "some are kept");
    index.apply(Source::Worker(WorkerId(1)), &removed(Level::G1, &names));
    assert_eq!(index.arena.used(), 0);
}

#[test]
fn a_chain_goes_on_where_it_ended_though_its_source_stored_others_meanwhile() {
    let index = Index::new();
    index.join(WorkerId(1), &[]);
    let chains: Vec<_> = (1..=4).map(|number| runs(number, 128, 32)).collect();
    for turn in 0..4 {
        for (_, events) in &chains {
            tell(&index, WorkerId(1), &events[turn..=turn]);
        }
    }
    for (names, _) in &chains {
        let body = index.body.load();
        let places: Vec<_> = names.iter().map(|name| body.find(name.short()).unwrap()).collect();
        assert!(places[..64].iter().all(|place| place.page() == places[0].page()), "a page of its own");
        assert!(places[64..].iter().all(|place| place.page() == places[64].page()), "and another");
    }
}
