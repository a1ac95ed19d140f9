//! A budget bounds what lies in the store, however many processes write, and what they write goes on coming to rest.

use super::upkeep::ticking;
use super::*;
use crate::object::gc::{Policy, headroom};

const BUDGET: u64 = 600_000;

fn open_bounded(store: &Arc<flaky::Flaky>) -> Arc<ObjectTier> {
    let settings = Settings { capacity: Some(BUDGET), ..Settings::default() };
    ObjectTier::open(store.clone(), "kv", settings, Arc::new(EventLog::new(Epoch(1))))
}

/// Bytes of all objects that lie there.
async fn stored(store: &flaky::Flaky) -> u64 {
    store.list(Some(&"kv/blocks".into())).map(|meta| meta.unwrap().size).collect::<Vec<_>>().await.into_iter().sum()
}

/// How many processes write how much for an hour, with a grace of so many minutes: the most that lay there, and how many blocks
/// came to rest in the second half.
async fn overloaded(processes: u64, grace: u64) -> (u64, usize) {
    let shared = Arc::new(flaky::Flaky::default());
    let (clock, _ticks) = ticking();
    shared.date_by(&clock);
    let grace = Duration::from_mins(grace);
    let policy = Policy { budget: Some(BUDGET), headroom: headroom(BUDGET), grace, ..Policy::default() };
    let tiers: Vec<_> = (0..processes).map(|_| open_bounded(&shared)).collect();
    let upkeep = Upkeep { policy, every: Duration::from_hours(1) };
    let collecting = tiers.iter().map(|tier| upkeep.clone().run(tier.collector(), clock.clone(), |_| ()));
    let _collecting: Vec<_> = collecting.map(|run| AbortOnDropHandle::new(tokio::spawn(run))).collect();
    for tier in &tiers {
        tier.caught_up().await;
    }
    let (mut most, mut came) = (0, 0);
    for second in 0..3600 {
        for (nth, tier) in (0..).zip(&tiers) {
            let answers = tier.store(chain(second * processes + nth, 5)).await;
            came += if second < 1800 { 0 } else { answers.iter().filter(|answer| answer.is_ok()).count() };
        }
        most = stored(&shared).await.max(most);
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert!(tiers.iter().all(|tier| tier.lost_objects() == 0), "each heard in time of what went");
    (most, came)
}

#[tokio::test(start_paused = true)]
async fn a_budget_is_kept_by_one_process_at_the_default_grace() {
    let (most, came) = overloaded(1, 10).await;
    assert!((BUDGET * 3 / 4..=BUDGET).contains(&most), "{most} bytes");
    // An eighth of the budget in each half minute or so.
    assert!(came > 500, "{came} blocks came to rest in half an hour");
}

#[tokio::test(start_paused = true)]
async fn a_budget_is_kept_by_three_processes() {
    let (most, came) = overloaded(3, 1).await;
    assert!((BUDGET * 3 / 4..=BUDGET).contains(&most), "{most} bytes");
    assert!(came > 500, "{came} blocks came to rest in half an hour");
}

#[tokio::test(start_paused = true)]
async fn what_a_new_process_cannot_know_takes_room_too() {
    let shared = Arc::new(flaky::Flaky::default());
    let (clock, _ticks) = ticking();
    shared.date_by(&clock);
    // As of a version whose manifests are not read.
    let foreign = Layout::new("kv").blocks(DomainId::SHARED, fingerprint(), Writer::new(), 0);
    let bytes = vec![0; BUDGET as usize - 20_000];
    object_store::ObjectStoreExt::put(&*shared, &foreign, bytes.into()).await.unwrap();
    tokio::time::sleep(Duration::from_mins(2)).await;
    let (other, _) = open_on(shared.clone());
    store(&*other, chain(1, 3)).await;
    let tier = open_bounded(&shared);
    tier.caught_up().await;
    assert!(tier.usage().bytes > BUDGET - 20_000, "{:?}", tier.usage());
    let answers = tier.store(chain(2, 20)).await;
    assert!(answers.iter().any(|answer| matches!(answer, Err(StoreError::Full))));
    assert!(stored(&shared).await <= BUDGET);
}

#[tokio::test(start_paused = true)]
async fn what_is_forgotten_for_lack_of_memory_still_takes_room() {
    let shared = Arc::new(flaky::Flaky::default());
    let settings = Settings { capacity: Some(BUDGET), known_blocks: 20, ..Settings::default() };
    let tier = ObjectTier::open(shared.clone(), "kv", settings, Arc::new(EventLog::new(Epoch(1))));
    tier.caught_up().await;
    for seed in 0..100 {
        tier.store(chain(seed, 10)).await;
    }
    assert!(tier.usage().blocks <= 20);
    let bytes = stored(&shared).await;
    assert!((BUDGET * 3 / 4..=BUDGET).contains(&bytes), "{bytes} bytes");
}

/// For minutes, in real time, on files: `BLOCKYARD_SOAK_SECONDS=360 cargo test -p kvbm budget_soak -- --ignored --nocapture`.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
#[ignore = "takes minutes"]
async fn budget_soak() {
    let seconds = std::env::var("BLOCKYARD_SOAK_SECONDS").map_or(60, |seconds| seconds.parse().unwrap());
    let (folder, budget) = (tempfile::tempdir().unwrap(), 300 << 20);
    let upkeep = Upkeep {
        policy: Policy { budget: Some(budget), headroom: headroom(budget), ..Policy::default() },
        every: Duration::from_hours(1),
    };
    let settings = Settings { capacity: Some(budget), ..Settings::default() };
    let tiers = [0, 1].map(|_| open_in(folder.path(), settings).0);
    let collecting =
        tiers.iter().map(|tier| upkeep.clone().run(tier.collector(), crate::block::Clock::system(), |_| ()));
    let _collecting: Vec<_> = collecting.map(|run| AbortOnDropHandle::new(tokio::spawn(run))).collect();
    let start = std::time::Instant::now();
    let (mut came, mut refused, mut seed, mut most, mut shown) = (0_u64, 0_u64, 0, 0, 0);
    while start.elapsed() < Duration::from_secs(seconds) {
        for tier in &tiers {
            let answers = tier.store(chain_of(fingerprint(), seed, 32, 100_000)).await;
            let stored = answers.iter().filter(|answer| answer.is_ok()).count();
            (came, refused, seed) = (came + stored as u64, refused + (32 - stored) as u64, seed + 1);
        }
        let sizes = files(folder.path(), "blocks").into_iter().filter_map(|path| fs::metadata(path).ok());
        let bytes: u64 = sizes.map(|file| file.len()).sum();
        most = bytes.max(most);
        if start.elapsed().as_secs() / 10 >= shown {
            shown = start.elapsed().as_secs() / 10 + 1;
            let (at, mib) = (start.elapsed().as_secs(), bytes >> 20);
            println!("{at:>4} s: {mib:>3} MiB on disk, {came} blocks stored, {refused} refused");
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    println!("at most {} MiB of {} MiB", most >> 20, budget >> 20);
    assert!(most <= budget);
}
