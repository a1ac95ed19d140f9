//! Expiry, pins and priority in one pool.

use super::*;
use crate::block::{Date, Priority, Retention};
use std::time::Duration;

const START: u64 = 1_000;

/// A pool with a clock that the test sets.
struct Timed {
    pool: BlockPool,
    log: Arc<EventLog>,
    metrics: MemoryMetrics,
    clock: Clock,
}

impl Timed {
    fn new(capacity: usize) -> Self {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let metrics = metrics();
        let clock = Clock::manual(Date::from_unix(START));
        let pool = BlockPool::new(Level::G1, capacity, log.clone(), metrics.clone(), clock.clone());
        Self { pool, log, metrics, clock }
    }

    fn put(&self, n: u8, parent: Option<u8>, asked: Retention) -> CachedBlock {
        let slot = self.pool.allocate(1).unwrap().pop().unwrap();
        let attrs = BlockAttrs { retention: asked.from(self.clock.now()), ..BlockAttrs::default() };
        self.pool.register(vec![slot.complete(hash(n), parent.map(hash), attrs)]).into_iter().next().unwrap()
    }

    fn at(&self, seconds: u64) {
        self.clock.set(Date::from_unix(START + seconds));
    }

    fn announced(&self) -> HashSet<SequenceHash> {
        self.log.snapshot().blocks().map(|(_, hash)| hash).collect()
    }
}

fn ttl(seconds: u64) -> Retention {
    Retention { ttl: Some(Duration::from_secs(seconds)), ..Retention::default() }
}

fn pin(seconds: u64) -> Retention {
    Retention { pin: Some(Duration::from_secs(seconds)), ..Retention::default() }
}

#[test]
fn an_expired_block_is_a_miss_and_announced_as_removed() {
    let timed = Timed::new(4);
    let held = timed.put(1, None, ttl(10));
    drop([timed.put(2, Some(1), ttl(10)), timed.put(3, Some(2), Retention::default())]);
    timed.at(9);
    assert_eq!(timed.pool.lookup(&[hash(1), hash(2), hash(3)]).len(), 3);
    timed.at(10);
    assert_eq!(timed.pool.holds(&[hash(1)]), 0);
    assert_eq!(timed.announced(), HashSet::from([hash(3)]), "blocks without an expiry stay");
    assert_eq!((timed.pool.resident(), timed.metrics.expired.get()), (1, 2));
    assert_eq!(timed.pool.available(), 3, "the guard keeps its slot");
    drop(held);
    assert_eq!(timed.pool.available(), 4);
    drop(timed.put(1, None, ttl(5)));
    assert_eq!(timed.pool.holds(&[hash(1)]), 1, "a block computed again has a new expiry");
}

#[test]
fn expire_removes_blocks_without_a_lookup() {
    let timed = Timed::new(2);
    drop(timed.put(1, None, ttl(10)));
    timed.at(11);
    timed.pool.expire();
    assert!(timed.announced().is_empty());
}

#[test]
fn a_pinned_block_survives_a_scan_until_its_pin_ends() {
    let timed = Timed::new(4);
    drop([timed.put(1, None, Retention::default()), timed.put(2, Some(1), pin(10))]);
    let scan = |from: u8| (from..from + 20).for_each(|n| drop(timed.put(n, None, Retention::default())));
    scan(100);
    assert_eq!(timed.pool.holds(&[hash(1), hash(2)]), 2, "with its ancestor");
    assert_eq!(timed.pool.available(), 2);
    timed.at(10);
    assert_eq!(timed.pool.available(), 4);
    scan(200);
    assert_eq!(timed.pool.holds(&[hash(1)]), 0);
}

#[test]
fn pins_take_at_most_half_of_a_pool() {
    let timed = Timed::new(6);
    (1..=5).for_each(|n| drop(timed.put(n, None, pin(10))));
    assert_eq!((timed.pool.available(), timed.metrics.rejected_pins.get()), (3, 2));
    drop(timed.pool.allocate(3).expect("the other half"));
    assert_eq!(timed.pool.hashes().len(), 3);
    timed.pool.unpin();
    assert_eq!((timed.pool.available(), timed.metrics.rejected_pins.get()), (6, 5));
    timed.at(20);
    timed.pool.expire();
    assert_eq!(timed.pool.available(), 6, "a removed pin is not removed again");
}

#[test]
fn a_pinned_block_can_be_discarded_and_can_expire() {
    let timed = Timed::new(4);
    drop([timed.put(1, None, pin(10)), timed.put(2, None, Retention { pin: ttl(99).ttl, ..ttl(10) })]);
    timed.pool.discard(hash(1));
    timed.at(10);
    assert_eq!((timed.pool.available(), timed.pool.resident()), (4, 0));
    (1..=4).for_each(|n| drop(timed.put(n, None, pin(10))));
    assert_eq!(timed.pool.available(), 2, "their pins were given back");
}

#[test]
fn extending_retention_never_shortens_it() {
    let timed = Timed::new(4);
    drop([timed.put(1, None, ttl(10)), timed.put(2, Some(1), Retention { store: false, ..ttl(50) })]);
    let changed = timed.pool.extend_retention([hash(1), hash(2), hash(9)], ttl(30).from(timed.clock.now()));
    assert_eq!(
        changed.iter().map(|(hash, before)| (*hash, before.retention.store)).collect::<Vec<_>>(),
        [(hash(1), true), (hash(2), false)]
    );
    timed.at(29);
    assert_eq!(timed.pool.lookup(&[hash(1), hash(2)]).attrs().iter().filter(|attrs| attrs.retention.store).count(), 2);
    timed.at(30);
    assert_eq!((timed.pool.holds(&[hash(1)]), timed.pool.holds(&[hash(2)])), (0, 1));
    // Computing the block again requests its retention again.
    drop(timed.put(2, None, Retention::default()));
    timed.at(1_000);
    assert_eq!(timed.pool.holds(&[hash(2)]), 1);
}

#[test]
fn eviction_follows_priority_and_spares_parents() {
    let timed = Timed::new(5);
    let urgent = |priority| Retention { priority, ..Retention::default() };
    drop([timed.put(1, None, urgent(Priority::High)), timed.put(2, Some(1), urgent(Priority::Low))]);
    drop([timed.put(3, None, urgent(Priority::Low)), timed.put(4, Some(3), urgent(Priority::High))]);
    drop(timed.put(5, None, Retention::default()));
    let mut left: HashSet<_> = timed.pool.hashes().into_iter().collect();
    let mut order = Vec::new();
    let mut taken = Vec::new();
    while !left.is_empty() {
        taken.extend(timed.pool.allocate(1).unwrap());
        let now: HashSet<_> = timed.pool.hashes().into_iter().collect();
        order.extend(left.difference(&now).copied());
        left = now;
    }
    assert_eq!(order, [2, 5, 1, 4, 3].map(hash));
}

#[test]
fn clock_jumps_do_no_harm() {
    let timed = Timed::new(4);
    drop([timed.put(1, None, ttl(10)), timed.put(2, None, pin(10))]);
    timed.clock.set(Date::from_unix(0));
    assert_eq!(timed.pool.holds(&[hash(1)]), 1);
    drop(timed.put(3, None, Retention { ttl: Some(Duration::MAX), pin: Some(Duration::MAX), ..Retention::default() }));
    timed.clock.set(Date::from_unix(u64::MAX));
    assert_eq!((timed.pool.resident(), timed.pool.available()), (1, 4));
}

#[derive(Clone, Debug)]
enum Op {
    Put(u8, Option<u8>, Option<u8>),
    Match(u8),
    Release(usize),
    Renew(u8, u8),
    Scan(usize),
    Pass(u8),
    Discard(u8),
}

fn op() -> impl Strategy<Value = Op> {
    let asked = || prop::option::of(1..20u8);
    prop_oneof![
        5 => (0..30u8, asked(), asked()).prop_map(|(n, ttl, pin)| Op::Put(n, ttl, pin)),
        2 => (0..30u8).prop_map(Op::Match),
        4 => (0..8usize).prop_map(Op::Release),
        1 => (0..30u8, 1..20u8).prop_map(|(n, pin)| Op::Renew(n, pin)),
        3 => (1..6usize).prop_map(Op::Scan),
        3 => (1..5u8).prop_map(Op::Pass),
        1 => (0..30u8).prop_map(Op::Discard),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 300, failure_persistence: None, ..ProptestConfig::default() })]

    /// In any order of operations: events match the resident blocks, no expired block is served, no slot is lost, and
    /// pins take at most half of the slots.
    #[test]
    fn retention_holds_in_any_order_of_operations(ops in prop::collection::vec(op(), 1..100)) {
        const CAPACITY: usize = 10;
        let timed = Timed::new(CAPACITY);
        let mut guards: Vec<CachedBlock> = Vec::new();
        let mut now = 0;
        for op in ops {
            match op {
                Op::Put(n, ttl, pin) => {
                    if timed.pool.available() == 0 {
                        continue;
                    }
                    let seconds = |s: Option<u8>| s.map(|s| Duration::from_secs(s.into()));
                    let asked = Retention { ttl: seconds(ttl), pin: seconds(pin), ..Retention::default() };
                    guards.push(timed.put(n, parent(n), asked));
                }
                Op::Match(n) => guards.extend(timed.pool.lookup(&[hash(n)])),
                Op::Release(i) if !guards.is_empty() => drop(guards.swap_remove(i % guards.len())),
                Op::Release(_) => {}
                Op::Renew(n, seconds) => {
                    let retention = pin(seconds.into()).from(timed.clock.now());
                    _ = timed.pool.extend_retention([hash(n)], retention);
                }
                Op::Scan(n) => drop(timed.pool.allocate(n)),
                Op::Pass(seconds) => {
                    now += u64::from(seconds);
                    timed.at(now);
                }
                Op::Discard(n) => timed.pool.discard(hash(n)),
            }
            timed.pool.expire();
            let all: Vec<SequenceHash> = timed.pool.hashes();
            for block in timed.pool.get_each(&all).into_iter().flatten() {
                prop_assert!(!block.attrs().retention.is_expired(timed.clock.now()), "{block:?}");
            }
            prop_assert_eq!(all.iter().copied().collect::<HashSet<_>>(), timed.announced());
            prop_assert_eq!(timed.pool.resident(), all.len());
        }
        guards.clear();
        prop_assert!(timed.pool.available() >= CAPACITY / 2 || timed.pool.hashes().len() > CAPACITY / 2);
        timed.at(now + 100);
        prop_assert_eq!(timed.pool.available(), CAPACITY);
        prop_assert!(timed.pool.allocate(CAPACITY).is_some());
    }
}
