//! Virtual time from an engine's turn to its first token: from whatever tier, never later than a miss.

use super::*;
use crate::manager::plan::Patience;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};

const BLOCKS: usize = 400;
const COMPUTE: Duration = Duration::from_millis(10);
const MISS: Duration = Duration::from_secs(4);
/// What counts as free in a plan.
const HICCUP: Duration = Duration::from_millis(20);
/// What is asked for at once from the end.
const PIECE: Duration = Duration::from_millis(50);

/// A device that serves one block after the other, whoever asks, and perhaps nothing after some of them.
struct Throttled {
    tier: Arc<dyn Tier>,
    latency: Duration,
    per_block: Arc<Mutex<Duration>>,
    free: Arc<Mutex<Instant>>,
    left: Arc<AtomicUsize>,
}

impl Throttled {
    async fn new(latency_ms: u64, per_block: Duration, holds: std::ops::Range<usize>) -> Arc<Self> {
        let inner = at(Level::G3, 0, 0);
        inner.keeps(holds).await;
        Arc::new(Self {
            tier: inner.tier.clone(),
            latency: Duration::from_millis(latency_ms),
            per_block: Arc::new(Mutex::new(per_block)),
            free: Arc::new(Mutex::new(Instant::now())),
            left: Arc::new(AtomicUsize::new(usize::MAX)),
        })
    }
}

impl Tier for Throttled {
    fn level(&self) -> Level {
        Level::G3
    }
    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.tier.holds(fingerprint, names)
    }
    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (latency, per_block) = (self.latency, self.per_block.clone());
        let (free, left) = (self.free.clone(), self.left.clone());
        let serve = move |(n, loaded)| {
            let (per_block, free, left) = (per_block.clone(), free.clone(), left.clone());
            async move {
                if n == 0 {
                    tokio::time::sleep(latency).await;
                }
                if left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1)).is_err() {
                    futures::future::pending::<()>().await;
                }
                let until = {
                    let mut free = free.lock().unwrap_or_else(PoisonError::into_inner);
                    *free = Instant::now().max(*free) + *per_block.lock().unwrap_or_else(PoisonError::into_inner);
                    *free
                };
                tokio::time::sleep_until(until).await;
                loaded
            }
        };
        self.tier.load(fingerprint, names).enumerate().then(serve).boxed()
    }
    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        self.tier.store(blocks)
    }
    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        self.tier.discard(fingerprint, name);
    }
    fn expire(&self, now: Date) -> usize {
        self.tier.expire(now)
    }
    fn usage(&self) -> Usage {
        self.tier.usage()
    }
}

/// What an engine with nothing else to do makes of the blocks of `range`, chunk by chunk: time, and how many it did not
/// compute.
async fn first_token(site: &Site, range: std::ops::Range<usize>, chunk: usize) -> (Duration, usize) {
    first_token_after(None, ms(COMPUTE.as_millis() as u64), site, range, chunk).await
}

/// The same from the engine's turn, which comes when the request has `waited` for it, if only for others' tasks to run.
async fn first_token_after(
    waited: Option<Duration>,
    recompute: Recompute,
    site: &Site,
    range: std::ops::Range<usize>,
    chunk: usize,
) -> (Duration, usize) {
    let wake = Arc::new(Notify::new());
    let all: Vec<SequenceHash> = range.clone().map(name).collect();
    let onboarding = site.manager.begin(&all, recompute, wake.clone());
    match waited {
        None => {}
        Some(Duration::ZERO) => tokio::task::yield_now().await,
        Some(time) => tokio::time::sleep(time).await,
    }
    let start = Instant::now();
    if let Some(onboarding) = &onboarding {
        onboarding.turn();
        while onboarding.is_worth_waiting() {
            wake.notified().await;
        }
    }
    let (mut held, mut computed) = (site.manager.matched(&all), 0);
    while held.len() < all.len() {
        let left = &all[held.len()..];
        let count = site.manager.next(left).unwrap_or(left.len()).min(chunk);
        let from = range.start + held.len();
        if let Some(onboarding) = &onboarding {
            onboarding.claim(held.len() + count);
        }
        tokio::time::sleep(COMPUTE * count as u32).await;
        held.extend(site.compute(from..from + count));
        computed += count;
        held.extend(site.manager.found(&all[held.len()..]));
    }
    site.assert_sound(&held);
    if let Some(onboarding) = onboarding {
        onboarding.end().await;
    }
    (start.elapsed(), all.len() - computed)
}

/// The time at which computing from the front meets a tier that loads from the end, if that is worth it at all.
fn both_ends(latency: Duration, per_block: Duration) -> Duration {
    let (cost, per_block) = (COMPUTE.as_secs_f64(), per_block.as_secs_f64());
    let loaded = (MISS.as_secs_f64() - latency.as_secs_f64() + per_block) / (cost + per_block);
    let met = MISS.as_secs_f64() - loaded * cost;
    Duration::from_secs_f64(if met < 0.9 * MISS.as_secs_f64() { met } else { MISS.as_secs_f64() })
}

/// From ten times slower than computing to ten times faster: what the two ends would take, and no more; however often the
/// tier was used before, and whether or not the request had to wait for its turn.
#[tokio::test(start_paused = true)]
async fn a_tier_of_any_speed() {
    const LATENCY: u64 = 20;
    for waited in [None, Some(Duration::ZERO), Some(Duration::from_millis(30)), Some(Duration::from_millis(300))] {
        for chunk in [1, 32] {
            let mut slower = [Duration::MAX; 3];
            for times in [10.0, 5.0, 2.0, 1.2, 1.0, 0.8, 0.3, 0.1] {
                let per_block = COMPUTE.mul_f64(times);
                let slow = Throttled::new(LATENCY, per_block, 0..BLOCKS).await;
                let site = Site::new(2 * BLOCKS, 0, vec![slow]);
                let ideal = both_ends(Duration::from_millis(LATENCY), per_block);
                for (attempt, slower) in slower.iter_mut().enumerate() {
                    let (time, loaded) =
                        first_token_after(waited, ms(COMPUTE.as_millis() as u64), &site, 0..BLOCKS, chunk).await;
                    let case = format!("{times} of computing, chunk {chunk}, waited {waited:?}, attempt {attempt}");
                    let unknown = if attempt == 0 { Patience::GRACE } else { Duration::ZERO };
                    assert!(time <= MISS.mul_f64(1.05) + unknown + HICCUP, "{case}: {time:?}, {loaded} loaded");
                    // The ends meet but for the chunk that is computed meanwhile, and the piece that is loaded.
                    let most = ideal.mul_f64(1.1) + COMPUTE * chunk as u32 + PIECE + unknown;
                    assert!(time <= most, "{case}: {time:?}, wanted {most:?}, {loaded} loaded");
                    let before = slower.saturating_add(COMPUTE * chunk as u32 + HICCUP);
                    assert!(time <= before, "{case}: {time:?}, a slower tier {slower:?}");
                    *slower = time;
                    drop(site.manager.allocate(2 * BLOCKS));
                }
            }
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_hangs_costs_one_grace_and_is_never_waited_for_again_until_it_answers() {
    let device = Throttled::new(1, Duration::from_millis(1), 0..BLOCKS).await;
    device.left.store(0, Relaxed);
    let site = Site::new(2 * BLOCKS, 0, vec![device.clone()]);
    for attempt in 0..12 {
        let (time, loaded) = first_token(&site, 0..BLOCKS, 32).await;
        let constant = if attempt == 0 { Patience::GRACE } else { Duration::ZERO };
        assert_eq!((time, loaded), (MISS + constant, 0), "attempt {attempt}");
        drop(site.manager.allocate(2 * BLOCKS));
    }
    device.left.store(usize::MAX, Relaxed);
    tokio::time::sleep(Duration::from_secs(65)).await;
    let (time, loaded) = first_token(&site, 0..BLOCKS, 32).await;
    assert!(time < MISS / 4 && loaded > BLOCKS / 2, "asked while computing, it answers: {time:?}, {loaded}");
    drop(site.manager.allocate(2 * BLOCKS));
    let (time, loaded) = first_token(&site, 0..BLOCKS, 32).await;
    assert!(time < MISS / 8 && loaded == BLOCKS, "and is trusted again: {time:?}, {loaded}");
}

#[tokio::test(start_paused = true)]
async fn a_deadline_that_computing_meets_is_met_whatever_the_tier_does() {
    let slack = Duration::from_millis(30);
    // It hangs at once, and after some blocks.
    for delivers in [0, 8, 200] {
        for waited in [None, Some(Duration::from_millis(50))] {
            let device = Throttled::new(1, Duration::from_millis(2), 0..BLOCKS).await;
            device.left.store(delivers, Relaxed);
            let site = Site::new(2 * BLOCKS, 0, vec![device]);
            let by = Instant::now() + waited.unwrap_or_default() + MISS + slack;
            let recompute = Recompute { by: Some(by), ..ms(COMPUTE.as_millis() as u64) };
            let (time, loaded) = first_token_after(waited, recompute, &site, 0..BLOCKS, 32).await;
            assert!(time <= MISS + slack, "{delivers} delivered, waited {waited:?}: {time:?}, {loaded} loaded");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_stalls_half_way() {
    // Loaded before anything is computed, and from the end.
    for (times, share) in [(0.1, 0.5), (1.0, 0.2)] {
        let device = Throttled::new(1, COMPUTE.mul_f64(times), 0..BLOCKS).await;
        let site = Site::new(2 * BLOCKS, 0, vec![device.clone()]);
        first_token(&site, 0..BLOCKS, 8).await;
        for attempt in 0..3 {
            drop(site.manager.allocate(2 * BLOCKS));
            device.left.store((BLOCKS as f64 * share) as usize, Relaxed);
            let (time, loaded) = first_token(&site, 0..BLOCKS, 8).await;
            let case = format!("{times} of computing, attempt {attempt}: {time:?}, {loaded} loaded");
            let gained = time <= MISS.mul_f64(1.1 - share) + HICCUP && loaded > BLOCKS / 10;
            assert!(if attempt == 0 { gained } else { time <= MISS + HICCUP }, "{case}");
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_becomes_ten_times_slower_than_computing() {
    let device = Throttled::new(1, COMPUTE.mul_f64(0.1), 0..BLOCKS).await;
    let site = Site::new(2 * BLOCKS, 0, vec![device.clone()]);
    let (time, loaded) = first_token(&site, 0..BLOCKS, 8).await;
    assert!(time < MISS.mul_f64(0.12) && loaded == BLOCKS, "{time:?}, {loaded}");
    *device.per_block.lock().unwrap() = COMPUTE * 10;
    for _ in 0..3 {
        drop(site.manager.allocate(2 * BLOCKS));
        let (time, _) = first_token(&site, 0..BLOCKS, 8).await;
        assert!(time <= MISS.mul_f64(1.05) + Patience::GRACE, "{time:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_tier_that_many_ask_at_once() {
    // Each alone would have its blocks in a quarter of the time that computing takes; the device serves one at a time.
    let device = Throttled::new(5, COMPUTE.mul_f64(0.25), 0..8 * 100).await;
    let site = Site::new(3 * 800, 0, vec![device]);
    for _ in 0..3 {
        let all = (0..8).map(|one| first_token(&site, one * 100..one * 100 + 100, 8));
        for (time, loaded) in futures::future::join_all(all).await {
            let miss = COMPUTE * 100;
            assert!(time <= miss.mul_f64(1.05) + Patience::GRACE, "{time:?}, {loaded} loaded");
        }
        drop(site.manager.allocate(3 * 800));
    }
}

#[tokio::test(start_paused = true)]
async fn blocks_come_up_while_the_request_waits_for_its_turn() {
    let device = Throttled::new(20, COMPUTE * 2, 0..100).await;
    let site = Site::new(400, 0, vec![device]);
    let wake = Arc::new(Notify::new());
    let onboarding = site.manager.begin(&names(100), ms(10), wake.clone()).unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(site.manager.next(&names(100)[99..]), Some(0), "slower than computing, and there when it is wanted");
    let turn = Instant::now();
    onboarding.turn();
    while onboarding.is_worth_waiting() {
        wake.notified().await;
    }
    assert_eq!(turn.elapsed(), Duration::ZERO);
    assert_eq!(onboarding.from(&name(99)), Some(Level::G3));
    site.assert_sound(&site.manager.matched(&names(100)));
}

#[tokio::test(start_paused = true)]
async fn requests_that_wait_share_a_quarter_of_the_device() {
    let device = Throttled::new(1, Duration::from_millis(1), 0..100).await;
    let site = Site::new(80, 0, vec![device]);
    let begin = |range: std::ops::Range<usize>| {
        let names: Vec<_> = range.map(name).collect();
        site.manager.begin(&names, ms(10), Arc::new(Notify::new())).unwrap()
    };
    let (first, second, third) = (begin(0..50), begin(50..60), begin(60..70));
    tokio::time::sleep(Duration::from_secs(1)).await;
    let resident = || site.manager.0.core.pool.resident();
    assert_eq!(resident(), 20, "as many of the first one's as there is room for");
    drop(first);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(resident(), 40, "its room is the others' now");
    assert_eq!(site.manager.available(), 60, "what it brought is still found, and held by nobody");
    drop((second, third));
    tokio::task::yield_now().await;
    assert_eq!(site.manager.available(), 80);
}
