//! Virtual time from the start of a wait to the first token: with any tier, never later than a miss.

use super::*;
use crate::manager::plan::WaitBudget;
use parking_lot::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

const BLOCKS: usize = 400;
const COMPUTE: Duration = Duration::from_millis(10);
const MISS: Duration = Duration::from_secs(4);
/// The time that a plan counts as negligible.
const TOLERANCE: Duration = Duration::from_millis(20);
/// The size of a piece of the tail.
const PIECE: Duration = Duration::from_millis(50);

/// A device that serves one block at a time for all loads, and hangs after some number of blocks.
struct ThrottledTier {
    tier: Arc<dyn Tier>,
    latency: Duration,
    per_block: Arc<Mutex<Duration>>,
    free: Arc<Mutex<Instant>>,
    left: Arc<AtomicUsize>,
}

impl ThrottledTier {
    async fn new(latency_ms: u64, per_block: Duration, holds: std::ops::Range<usize>) -> Arc<Self> {
        let inner = placed(Level::G3, 0, 0);
        inner.fill(holds).await;
        Arc::new(Self {
            tier: inner.tier.clone(),
            latency: Duration::from_millis(latency_ms),
            per_block: Arc::new(Mutex::new(per_block)),
            free: Arc::new(Mutex::new(Instant::now())),
            left: Arc::new(AtomicUsize::new(usize::MAX)),
        })
    }
}

impl Tier for ThrottledTier {
    delegate!(tier: holds, store, discard, withdraw, expire_one, expire, usage);

    fn level(&self) -> Level {
        Level::G3
    }
    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let latency = self.latency;
        let per_block = self.per_block.clone();
        let free = self.free.clone();
        let left = self.left.clone();
        let serve = move |(n, loaded)| {
            let per_block = per_block.clone();
            let free = free.clone();
            let left = left.clone();
            async move {
                if n == 0 {
                    tokio::time::sleep(latency).await;
                }
                if left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err() {
                    futures::future::pending::<()>().await;
                }
                let until = {
                    let mut free = free.lock();
                    *free = Instant::now().max(*free) + *per_block.lock();
                    *free
                };
                tokio::time::sleep_until(until).await;
                loaded
            }
        };
        self.tier.load(fingerprint, hashes).enumerate().then(serve).boxed()
    }
}

/// What an otherwise idle engine does with the blocks of `range`, chunk by chunk: the time, and how many blocks it did
/// not compute.
async fn first_token(harness: &Harness, range: std::ops::Range<usize>, chunk: usize) -> (Duration, usize) {
    first_token_after(None, ms(COMPUTE.as_millis() as u64), harness, range, chunk).await
}

/// The same from the start of the wait, which comes after `waited`; zero lets other tasks run once.
async fn first_token_after(
    waited: Option<Duration>,
    recompute: Recompute,
    harness: &Harness,
    range: std::ops::Range<usize>,
    chunk: usize,
) -> (Duration, usize) {
    let wake = Arc::new(Notify::new());
    let all: Vec<SequenceHash> = range.clone().map(hash).collect();
    let onboarding = harness.manager.start_onboarding(&all, recompute, wake.clone(), &UNTRACED);
    match waited {
        None => {}
        Some(Duration::ZERO) => tokio::task::yield_now().await,
        Some(time) => tokio::time::sleep(time).await,
    }
    let start = Instant::now();
    if let Some(onboarding) = &onboarding {
        onboarding.start_waiting();
        while onboarding.should_wait() {
            wake.notified().await;
        }
    }
    let mut held = harness.manager.lookup(&all);
    let mut computed = 0;
    while held.len() < all.len() {
        let left = &all[held.len()..];
        let count = harness.manager.next_cached(left).unwrap_or(left.len()).min(chunk);
        let from = range.start + held.len();
        if let Some(onboarding) = &onboarding {
            onboarding.advance(held.len() + count);
        }
        tokio::time::sleep(COMPUTE * count as u32).await;
        held.extend(harness.compute(from..from + count));
        computed += count;
        held.extend(harness.manager.lookup_again(&all[held.len()..]));
    }
    harness.assert_sound(&held);
    if let Some(onboarding) = onboarding {
        onboarding.stop().await;
    }
    (start.elapsed(), all.len() - computed)
}

/// The time at which computing from the front meets a tier that loads from the end, if that is worthwhile.
fn both_ends(latency: Duration, per_block: Duration) -> Duration {
    let cost = COMPUTE.as_secs_f64();
    let per_block = per_block.as_secs_f64();
    let loaded = (MISS.as_secs_f64() - latency.as_secs_f64() + per_block) / (cost + per_block);
    let met = MISS.as_secs_f64() - loaded * cost;
    Duration::from_secs_f64(if met < 0.9 * MISS.as_secs_f64() { met } else { MISS.as_secs_f64() })
}

/// From ten times slower than computing to ten times faster: the time of loading from both ends, with and without
/// earlier measurements, and whether or not the load began ahead of the wait.
#[tokio::test(start_paused = true)]
async fn a_tier_of_any_speed_is_never_slower_than_a_miss() {
    const LATENCY: u64 = 20;
    for waited in [None, Some(Duration::ZERO), Some(Duration::from_millis(30)), Some(Duration::from_millis(300))] {
        for chunk in [1, 32] {
            let mut slower = [Duration::MAX; 3];
            for times in [10.0, 5.0, 2.0, 1.2, 1.0, 0.8, 0.3, 0.1] {
                let per_block = COMPUTE.mul_f64(times);
                let slow = ThrottledTier::new(LATENCY, per_block, 0..BLOCKS).await;
                let harness = Harness::new(2 * BLOCKS, 0, vec![slow]);
                let ideal = both_ends(Duration::from_millis(LATENCY), per_block);
                for (attempt, slower) in slower.iter_mut().enumerate() {
                    let (time, loaded) =
                        first_token_after(waited, ms(COMPUTE.as_millis() as u64), &harness, 0..BLOCKS, chunk).await;
                    let case = format!("{times} of computing, chunk {chunk}, waited {waited:?}, attempt {attempt}");
                    let unknown = if attempt == 0 { WaitBudget::BASE } else { Duration::ZERO };
                    assert!(time <= MISS.mul_f64(1.05) + unknown + TOLERANCE, "{case}: {time:?}, {loaded} loaded");
                    // The ends meet but for the chunk that is being computed, and the piece that is being loaded.
                    let most = ideal.mul_f64(1.1) + COMPUTE * chunk as u32 + PIECE + unknown;
                    assert!(time <= most, "{case}: {time:?}, wanted {most:?}, {loaded} loaded");
                    let before = slower.saturating_add(COMPUTE * chunk as u32 + TOLERANCE);
                    assert!(time <= before, "{case}: {time:?}, a slower tier {slower:?}");
                    *slower = time;
                    drop(harness.manager.allocate(2 * BLOCKS));
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_hangs_costs_one_base_wait_until_it_answers() {
    let device = ThrottledTier::new(1, Duration::from_millis(1), 0..BLOCKS).await;
    device.left.store(0, Relaxed);
    let harness = Harness::new(2 * BLOCKS, 0, vec![device.clone()]);
    for attempt in 0..12 {
        let (time, loaded) = first_token(&harness, 0..BLOCKS, 32).await;
        let constant = if attempt == 0 { WaitBudget::BASE } else { Duration::ZERO };
        assert_eq!((time, loaded), (MISS + constant, 0), "attempt {attempt}");
        drop(harness.manager.allocate(2 * BLOCKS));
    }
    device.left.store(usize::MAX, Relaxed);
    tokio::time::sleep(Duration::from_secs(65)).await;
    let (time, loaded) = first_token(&harness, 0..BLOCKS, 32).await;
    assert!(time < MISS / 4 && loaded > BLOCKS / 2, "it answers requests made while computing: {time:?}, {loaded}");
    drop(harness.manager.allocate(2 * BLOCKS));
    let (time, loaded) = first_token(&harness, 0..BLOCKS, 32).await;
    assert!(time < MISS / 8 && loaded == BLOCKS, "and it is waited for again: {time:?}, {loaded}");
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_computing_meets_is_met_with_any_tier() {
    let slack = Duration::from_millis(30);
    // It hangs at once, and after some blocks.
    for delivers in [0, 8, 200] {
        for waited in [None, Some(Duration::from_millis(50))] {
            let device = ThrottledTier::new(1, Duration::from_millis(2), 0..BLOCKS).await;
            device.left.store(delivers, Relaxed);
            let harness = Harness::new(2 * BLOCKS, 0, vec![device]);
            let deadline = Instant::now() + waited.unwrap_or_default() + MISS + slack;
            let recompute = Recompute { deadline: Some(deadline), ..ms(COMPUTE.as_millis() as u64) };
            let (time, loaded) = first_token_after(waited, recompute, &harness, 0..BLOCKS, 32).await;
            assert!(time <= MISS + slack, "{delivers} delivered, waited {waited:?}: {time:?}, {loaded} loaded");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_stalls_half_way() {
    // As the head, and as the tail.
    for (times, share) in [(0.1, 0.5), (1.0, 0.2)] {
        let device = ThrottledTier::new(1, COMPUTE.mul_f64(times), 0..BLOCKS).await;
        let harness = Harness::new(2 * BLOCKS, 0, vec![device.clone()]);
        first_token(&harness, 0..BLOCKS, 8).await;
        for attempt in 0..3 {
            drop(harness.manager.allocate(2 * BLOCKS));
            device.left.store((BLOCKS as f64 * share) as usize, Relaxed);
            let (time, loaded) = first_token(&harness, 0..BLOCKS, 8).await;
            let case = format!("{times} of computing, attempt {attempt}: {time:?}, {loaded} loaded");
            let gained = time <= MISS.mul_f64(1.1 - share) + TOLERANCE && loaded > BLOCKS / 10;
            assert!(if attempt == 0 { gained } else { time <= MISS + TOLERANCE }, "{case}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_becomes_slow_costs_at_most_the_base_wait() {
    let device = ThrottledTier::new(1, COMPUTE.mul_f64(0.1), 0..BLOCKS).await;
    let harness = Harness::new(2 * BLOCKS, 0, vec![device.clone()]);
    let (time, loaded) = first_token(&harness, 0..BLOCKS, 8).await;
    assert!(time < MISS.mul_f64(0.12) && loaded == BLOCKS, "{time:?}, {loaded}");
    *device.per_block.lock() = COMPUTE * 10;
    for _ in 0..3 {
        drop(harness.manager.allocate(2 * BLOCKS));
        let (time, _) = first_token(&harness, 0..BLOCKS, 8).await;
        assert!(time <= MISS.mul_f64(1.05) + WaitBudget::BASE, "{time:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_with_many_concurrent_loads() {
    // Alone, each would have its blocks in a quarter of the computing time; the device serves one at a time.
    let device = ThrottledTier::new(5, COMPUTE.mul_f64(0.25), 0..8 * 100).await;
    let harness = Harness::new(3 * 800, 0, vec![device]);
    for _ in 0..3 {
        let all = (0..8).map(|one| first_token(&harness, one * 100..one * 100 + 100, 8));
        for (time, loaded) in futures::future::join_all(all).await {
            let miss = COMPUTE * 100;
            assert!(time <= miss.mul_f64(1.05) + WaitBudget::BASE, "{time:?}, {loaded} loaded");
        }
        drop(harness.manager.allocate(3 * 800));
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_are_loaded_before_the_engine_is_ready() {
    let device = ThrottledTier::new(20, COMPUTE * 2, 0..100).await;
    let harness = Harness::new(400, 0, vec![device]);
    let wake = Arc::new(Notify::new());
    let onboarding = harness.manager.start_onboarding(&hashes(100), ms(10), wake.clone(), &UNTRACED).unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(harness.manager.next_cached(&hashes(100)[99..]), Some(0), "slower than computing, and in G1 in time");
    let start = Instant::now();
    onboarding.start_waiting();
    while onboarding.should_wait() {
        wake.notified().await;
    }
    assert_eq!(start.elapsed(), Duration::ZERO);
    assert_eq!(onboarding.loaded_from(&hash(99)), Some(Level::G3));
    harness.assert_sound(&harness.manager.lookup(&hashes(100)));
}

#[tokio::test(start_paused = true)]
async fn loads_ahead_share_a_quarter_of_the_device() {
    let device = ThrottledTier::new(1, Duration::from_millis(1), 0..100).await;
    let harness = Harness::new(80, 0, vec![device]);
    let begin = |range: std::ops::Range<usize>| {
        let hashes: Vec<_> = range.map(hash).collect();
        harness.manager.start_onboarding(&hashes, ms(10), Arc::new(Notify::new()), &UNTRACED).unwrap()
    };
    let (first, second, third) = (begin(0..50), begin(50..60), begin(60..70));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let resident = || harness.manager.0.core.pool.resident();
    assert_eq!(resident(), 20, "as many of the first request's blocks as the share allows");
    drop(first);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(resident(), 40, "its share is free for the others");
    assert_eq!(harness.manager.available(), 60, "the loaded blocks are cached, and not held");
    drop((second, third));
    tokio::task::yield_now().await;
    assert_eq!(harness.manager.available(), 80);
}
