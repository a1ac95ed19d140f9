//! The capacity bounds the bytes in the store for any number of writers, and blocks continue to be stored.

use super::gc_schedule::virtual_clock;
use super::*;
use crate::object::gc::{Policy, headroom};

const CAPACITY: u64 = 600_000;

fn open_with_capacity(store: &Arc<flaky::Flaky>) -> Arc<ObjectTier> {
    let settings = Settings { capacity: Some(CAPACITY), ..Settings::default() };
    ObjectTier::open(store.clone(), "kv", settings, Arc::new(EventLog::new(Epoch(1))))
}

/// Bytes of all objects in the store.
async fn stored(store: &flaky::Flaky) -> u64 {
    store.list(Some(&"kv/blocks".into())).map(|meta| meta.unwrap().size).collect::<Vec<_>>().await.into_iter().sum()
}

/// Lets `processes` write for an hour with a grace period of `grace` minutes. Returns the maximum bytes in the store,
/// and the number of blocks that were stored in the second half.
async fn write_above_capacity(processes: u64, grace: u64) -> (u64, usize) {
    let shared = Arc::new(flaky::Flaky::default());
    let (clock, _ticks) = virtual_clock();
    shared.use_clock(&clock);
    let grace = Duration::from_mins(grace);
    let policy = Policy { capacity: Some(CAPACITY), headroom: headroom(CAPACITY), grace, ..Policy::default() };
    let tiers: Vec<_> = (0..processes).map(|_| open_with_capacity(&shared)).collect();
    let scheduler = GcScheduler { policy, interval: Duration::from_hours(1) };
    let collecting = tiers.iter().map(|tier| scheduler.clone().run(tier.collector(), clock.clone(), |_| ()));
    let _collecting: Vec<_> = collecting.map(|run| AbortOnDropHandle::new(tokio::spawn(run))).collect();
    for tier in &tiers {
        tier.wait_until_ready().await;
    }
    let mut most = 0;
    let mut stored_blocks = 0;
    for second in 0..3600 {
        for (nth, tier) in (0..).zip(&tiers) {
            let answers = tier.store(chain(second * processes + nth, 5)).await;
            stored_blocks += if second < 1800 { 0 } else { answers.iter().filter(|answer| answer.is_ok()).count() };
        }
        most = stored(&shared).await.max(most);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(tiers.iter().all(|tier| tier.missing_objects() == 0), "each heard in time of what went");
    (most, stored_blocks)
}

#[tokio::test(start_paused = true)]
async fn one_process_stays_below_the_capacity() {
    let (most, stored_blocks) = write_above_capacity(1, 10).await;
    assert!((CAPACITY * 3 / 4..=CAPACITY).contains(&most), "{most} bytes");
    // About an eighth of the capacity every half minute.
    assert!(stored_blocks > 500, "{stored_blocks} blocks were stored in half an hour");
}

#[tokio::test(start_paused = true)]
async fn three_processes_stay_below_the_capacity() {
    let (most, stored_blocks) = write_above_capacity(3, 1).await;
    assert!((CAPACITY * 3 / 4..=CAPACITY).contains(&most), "{most} bytes");
    assert!(stored_blocks > 500, "{stored_blocks} blocks were stored in half an hour");
}

#[tokio::test(start_paused = true)]
async fn unknown_objects_count_towards_the_capacity() {
    let shared = Arc::new(flaky::Flaky::default());
    let (clock, _ticks) = virtual_clock();
    shared.use_clock(&clock);
    // An object of a version whose manifests are not read.
    let foreign = Layout::new("kv").object(DomainId::SHARED, fingerprint(), InstanceId::new(), 0);
    let bytes = vec![0; CAPACITY as usize - 20_000];
    object_store::ObjectStoreExt::put(&*shared, &foreign, bytes.into()).await.unwrap();
    tokio::time::sleep(Duration::from_mins(2)).await;
    let (other, _) = open_on(shared.clone());
    store(&*other, chain(1, 3)).await;
    let tier = open_with_capacity(&shared);
    tier.wait_until_ready().await;
    assert!(tier.usage().bytes > CAPACITY - 20_000, "{:?}", tier.usage());
    let answers = tier.store(chain(2, 20)).await;
    assert!(answers.iter().any(|answer| matches!(answer, Err(StoreError::Full))));
    assert!(stored(&shared).await <= CAPACITY);
}

#[tokio::test(start_paused = true)]
async fn objects_dropped_from_the_catalog_count_as_used() {
    let shared = Arc::new(flaky::Flaky::default());
    let settings = Settings { capacity: Some(CAPACITY), known_blocks: 20, ..Settings::default() };
    let tier = ObjectTier::open(shared.clone(), "kv", settings, Arc::new(EventLog::new(Epoch(1))));
    tier.wait_until_ready().await;
    for seed in 0..100 {
        tier.store(chain(seed, 10)).await;
    }
    assert!(tier.usage().blocks <= 20);
    let bytes = stored(&shared).await;
    assert!((CAPACITY * 3 / 4..=CAPACITY).contains(&bytes), "{bytes} bytes");
}

/// In real time, on files: `BLOCKYARD_SOAK_SECONDS=360 cargo test -p kvbm capacity_soak -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes"]
async fn capacity_soak() {
    let seconds = std::env::var("BLOCKYARD_SOAK_SECONDS").map_or(60, |seconds| seconds.parse().unwrap());
    let folder = tempfile::tempdir().unwrap();
    let capacity = 300 << 20;
    let scheduler = GcScheduler {
        policy: Policy { capacity: Some(capacity), headroom: headroom(capacity), ..Policy::default() },
        interval: Duration::from_hours(1),
    };
    let settings = Settings { capacity: Some(capacity), ..Settings::default() };
    let tiers = [0, 1].map(|_| open_in(folder.path(), settings).0);
    let collecting =
        tiers.iter().map(|tier| scheduler.clone().run(tier.collector(), crate::block::Clock::system(), |_| ()));
    let _collecting: Vec<_> = collecting.map(|run| AbortOnDropHandle::new(tokio::spawn(run))).collect();
    let start = std::time::Instant::now();
    let mut stored_blocks = 0_u64;
    let mut refused = 0_u64;
    let mut seed = 0;
    let mut most = 0;
    let mut shown = 0;
    while start.elapsed() < Duration::from_secs(seconds) {
        for tier in &tiers {
            let answers = tier.store(chain_of(fingerprint(), seed, 32, 100_000)).await;
            let stored = answers.iter().filter(|answer| answer.is_ok()).count();
            (stored_blocks, refused, seed) = (stored_blocks + stored as u64, refused + (32 - stored) as u64, seed + 1);
        }
        let sizes = files(folder.path(), "blocks").into_iter().filter_map(|path| fs::metadata(path).ok());
        let bytes: u64 = sizes.map(|file| file.len()).sum();
        most = bytes.max(most);
        if start.elapsed().as_secs() / 10 >= shown {
            shown = start.elapsed().as_secs() / 10 + 1;
            let at = start.elapsed().as_secs();
            let mib = bytes >> 20;
            println!("{at:>4} s: {mib:>3} MiB on disk, {stored_blocks} blocks stored, {refused} refused");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("at most {} MiB of {} MiB", most >> 20, capacity >> 20);
    assert!(most <= capacity);
}
