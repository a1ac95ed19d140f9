use super::{BlockPool, CachedBlock, CachedBlocks, PartialBlock};
use crate::block::{BlockAttrs, Clock, Level, SequenceHash};
use crate::event::{BlockEvent, Epoch, EventLog};
use crate::metrics::MemoryMetrics;
use proptest::prelude::*;
use std::collections::HashSet;
use std::sync::Arc;

mod shares;
mod terms;

fn hash(n: u8) -> SequenceHash {
    SequenceHash::from_bytes([n; 16])
}

fn pool(capacity: usize) -> (BlockPool, Arc<EventLog>) {
    let log = Arc::new(EventLog::new(Epoch(1)));
    (BlockPool::new(Level::G1, capacity, log.clone(), metrics(), Clock::system()), log)
}

fn metrics() -> MemoryMetrics {
    crate::metrics::Metrics::new(&prometheus::Registry::new()).unwrap().memory(Level::G1)
}

fn put(pool: &BlockPool, n: u8, parent: Option<u8>) -> CachedBlock {
    let slot = pool.allocate(1).unwrap().pop().unwrap();
    pool.register(vec![slot.complete(hash(n), parent.map(hash), BlockAttrs::default())]).into_iter().next().unwrap()
}

#[test]
fn drop_returns_the_slot_in_every_phase() {
    let (pool, ..) = pool(2);
    let both = pool.allocate(2).unwrap();
    assert!(pool.allocate(1).is_none(), "all or nothing");
    drop(both);
    let full = pool.allocate(1).unwrap().pop().unwrap().complete(hash(1), None, BlockAttrs::default());
    assert_eq!(pool.available(), 1);
    drop(full);
    let cached = put(&pool, 1, None);
    assert_eq!(pool.available(), 1);
    drop(cached);
    assert_eq!((pool.available(), pool.resident()), (2, 1), "it stays cached, and can be evicted");
}

#[test]
fn free_slots_go_before_leaves_and_leaves_before_parents() {
    let (pool, log) = pool(4);
    drop([put(&pool, 1, None), put(&pool, 2, Some(1)), put(&pool, 3, Some(2))]);
    let first = pool.allocate(1).unwrap();
    assert_eq!(pool.resident(), 3, "a slot was free");
    let second = pool.allocate(2).unwrap();
    assert_eq!(pool.hashes(), [hash(1)]);
    let removed = log.after(0, 100).unwrap().pop().unwrap().event;
    assert_eq!(removed, BlockEvent::Removed { level: Level::G1, blocks: vec![hash(3), hash(2)] });
    drop((first, second));
}

#[test]
fn equally_used_leaves_are_evicted_in_lru_order() {
    let (pool, ..) = pool(3);
    drop([put(&pool, 1, None), put(&pool, 2, None), put(&pool, 3, None)]);
    drop(pool.lookup(&[hash(1)]));
    drop(pool.allocate(1));
    let mut left = pool.hashes();
    left.sort();
    assert_eq!(left, [hash(1), hash(3)]);
}

#[test]
fn a_held_block_keeps_its_ancestors() {
    let (pool, ..) = pool(3);
    let parents = [put(&pool, 1, None), put(&pool, 2, Some(1))];
    let child = put(&pool, 3, Some(2));
    drop(parents);
    assert_eq!(pool.available(), 0);
    assert!(pool.allocate(1).is_none());
    drop(child);
    assert_eq!(pool.available(), 3);
}

#[test]
fn registering_a_hash_twice_frees_the_duplicate() {
    let (pool, log) = pool(2);
    let first = put(&pool, 1, None);
    let second = put(&pool, 1, None);
    assert_eq!(first.slot(), second.slot());
    assert_eq!((pool.available(), log.snapshot().number), (1, 1));
}

#[test]
fn a_chain_registered_together_is_one_event() {
    let (pool, log) = pool(4);
    let slots = pool.allocate(4).unwrap();
    let hashes = [(2, Some(1)), (3, Some(2)), (4, Some(3)), (9, None)];
    let full = slots
        .into_iter()
        .zip(hashes)
        .map(|(slot, (n, parent))| slot.complete(hash(n), parent.map(hash), BlockAttrs::default()));
    drop(pool.register(full.collect()));
    let events: Vec<BlockEvent> = log.after(0, 10).unwrap().into_iter().map(|numbered| numbered.event).collect();
    let stored = |parent: Option<u8>, blocks: &[u8]| BlockEvent::Stored {
        level: Level::G1,
        parent: parent.map(hash),
        blocks: blocks.iter().copied().map(hash).collect(),
    };
    assert_eq!(events, [stored(Some(1), &[2, 3, 4]), stored(None, &[9])]);
}

#[test]
fn a_weak_block_upgrades_while_it_is_resident() {
    let (pool, ..) = pool(1);
    let weak = put(&pool, 1, None).downgrade();
    assert_eq!(weak.upgrade().unwrap().hash(), hash(1));
    drop(pool.allocate(1));
    assert!(weak.upgrade().is_none());
    drop(pool);
    assert!(weak.upgrade().is_none());
}

#[test]
fn a_discarded_block_is_not_found_but_stays_held() {
    let (pool, log) = pool(1);
    let held = put(&pool, 1, None);
    pool.discard(hash(1));
    assert_eq!((pool.holds(&[hash(1)]), pool.available(), pool.resident()), (0, 0, 0));
    assert!(log.snapshot().runs.is_empty());
    drop(held);
    assert_eq!(pool.available(), 1);
}

/// Blocks form a forest: the parent of `n` is `n / 3`, and 0 is a root.
fn parent(n: u8) -> Option<u8> {
    (n > 0).then_some(n / 3)
}

#[derive(Clone, Debug)]
enum Op {
    Register(u8),
    Match(u8),
    Release(usize),
    Allocate(usize),
    Return(usize),
    Discard(u8),
}

fn op() -> impl Strategy<Value = Op> {
    prop_oneof![
        4 => (0..40u8).prop_map(Op::Register),
        2 => (0..40u8).prop_map(Op::Match),
        4 => (0..16usize).prop_map(Op::Release),
        2 => (1..6usize).prop_map(Op::Allocate),
        2 => (0..16usize).prop_map(Op::Return),
        1 => (0..40u8).prop_map(Op::Discard),
    ]
}

/// A naive model of the same rules.
#[derive(Default)]
struct Model {
    resident: HashSet<u8>,
}

impl Model {
    /// Held by a guard, or by a held resident descendant.
    fn held(&self, n: u8, guards: &[(u8, CachedBlock)]) -> bool {
        guards.iter().any(|(m, _)| *m == n)
            || self.resident.iter().any(|child| *child != 0 && parent(*child) == Some(n) && self.held(*child, guards))
    }

    fn evictable(&self, guards: &[(u8, CachedBlock)]) -> HashSet<u8> {
        self.resident.iter().copied().filter(|n| !self.held(*n, guards)).collect()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn the_pool_agrees_with_the_naive_model(ops in prop::collection::vec(op(), 1..120)) {
        const CAPACITY: usize = 12;
        let (pool, log) = pool(CAPACITY);
        let mut model = Model::default();
        // Guards of a discarded block do not hold a later block of the same hash: they are kept apart.
        let (mut guards, mut orphaned): (Vec<(u8, CachedBlock)>, Vec<CachedBlock>) = (Vec::new(), Vec::new());
        let mut partial: Vec<PartialBlock> = Vec::new();
        for op in ops {
            let idle_before = model.evictable(&guards);
            match op {
                Op::Register(n) => {
                    let Some(slot) = partial.pop() else { continue };
                    let full = slot.complete(hash(n), parent(n).map(hash), BlockAttrs::default());
                    guards.push((n, pool.register(vec![full]).into_iter().next().unwrap()));
                    model.resident.insert(n);
                }
                Op::Match(n) => {
                    let mut chain: Vec<u8> = std::iter::successors(Some(n), |n| parent(*n)).collect();
                    chain.reverse();
                    let want = chain.iter().take_while(|n| model.resident.contains(n)).count();
                    let hashes: Vec<_> = chain.iter().copied().map(hash).collect();
                    let got = pool.lookup(&hashes);
                    prop_assert_eq!(got.len(), want);
                    guards.extend(chain.into_iter().zip(got));
                }
                Op::Release(i) if !guards.is_empty() => drop(guards.swap_remove(i % guards.len())),
                Op::Release(i) if !orphaned.is_empty() => drop(orphaned.swap_remove(i % orphaned.len())),
                Op::Return(i) if !partial.is_empty() => drop(partial.swap_remove(i % partial.len())),
                Op::Release(_) | Op::Return(_) => {}
                Op::Allocate(n) => {
                    let held = guards.iter().map(|(_, guard)| guard).chain(&orphaned).map(CachedBlock::slot);
                    let pinned = model.resident.len() - idle_before.len();
                    let orphaned_slots: HashSet<_> = orphaned.iter().map(CachedBlock::slot).collect();
                    let free = CAPACITY - partial.len() - model.resident.len() - orphaned_slots.len();
                    let got = pool.allocate(n);
                    prop_assert_eq!(got.is_some(), free + idle_before.len() >= n, "pinned {}", pinned);
                    let taken: HashSet<_> = held.collect();
                    for slot in got.into_iter().flatten() {
                        prop_assert!(!taken.contains(&slot.slot()), "a held slot was handed out");
                        partial.push(slot);
                    }
                    // The removed blocks were evicted: they were not held, and had no resident child.
                    let left: HashSet<_> = pool.hashes().into_iter().collect();
                    let (removed, stay): (Vec<_>, Vec<_>) =
                        model.resident.iter().partition(|n| !left.contains(&hash(**n)));
                    let evicted = if free + idle_before.len() >= n { n.saturating_sub(free) } else { 0 };
                    prop_assert_eq!(removed.len(), evicted);
                    prop_assert!(removed.iter().all(|n| idle_before.contains(n)));
                    let lost_parent = |n: u8| parent(n).is_some_and(|parent| removed.contains(&parent) && parent != n);
                    prop_assert!(!stay.iter().any(|n| lost_parent(*n)));
                    model.resident.retain(|n| !removed.contains(n));
                }
                Op::Discard(n) => {
                    pool.discard(hash(n));
                    model.resident.remove(&n);
                    let (left, stay) = guards.into_iter().partition(|(m, _)| *m == n);
                    guards = stay;
                    orphaned.extend(Vec::into_iter(left).map(|(_, guard)| guard));
                }
            }
            let hashes: HashSet<_> = pool.hashes().into_iter().collect();
            let want: HashSet<_> = model.resident.iter().copied().map(hash).collect();
            prop_assert_eq!(&hashes, &want);
            let announced: HashSet<_> = log.snapshot().blocks().map(|(_, hash)| hash).collect();
            prop_assert_eq!(&hashes, &announced);
            prop_assert_eq!(pool.resident(), want.len());
        }
        drop((guards, orphaned, partial));
        prop_assert_eq!(pool.available(), CAPACITY);
        let all = pool.allocate(CAPACITY);
        prop_assert!(all.is_some_and(|all| all.len() == CAPACITY));
    }
}
