//! Several processes that collect in one store: it stays below its capacity, and about one process runs per interval.

use super::*;
use crate::block::Clock;
use crate::object::gc::Policy;
use std::sync::atomic::{AtomicU64, Ordering};

const EVERY: Duration = Duration::from_mins(30);

/// A clock that follows virtual time in steps of a second.
pub(super) fn virtual_clock() -> (Clock, AbortOnDropHandle<()>) {
    virtual_clock_from(Clock::system().now())
}

/// The same, starting at another time than the machine's.
pub(super) fn virtual_clock_from(start: crate::block::Date) -> (Clock, AbortOnDropHandle<()>) {
    let clock = Clock::manual(start);
    let handle = clock.clone();
    let ticking = tokio::spawn(async move {
        for second in 0.. {
            handle.set(start.after(Duration::from_secs(second)));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    (clock, AbortOnDropHandle::new(ticking))
}

fn collector(store: &Arc<dyn ObjectStore>) -> Collector {
    Collector::open(store.clone(), "kv", Duration::from_secs(10))
}

#[tokio::test(start_paused = true)]
async fn about_one_of_many_processes_runs_per_interval() {
    let flaky = Arc::new(flaky::Flaky::default());
    let shared: Arc<dyn ObjectStore> = flaky.clone();
    let (clock, _ticks) = virtual_clock();
    flaky.use_clock(&clock);
    let outcomes: Arc<[AtomicU64; 3]> = Arc::default();
    let one = || {
        let scheduler = GcScheduler { policy: Policy { capacity: Some(60_000), ..Policy::default() }, interval: EVERY };
        let outcomes = outcomes.clone();
        let on_run = move |outcome: &GcOutcome| {
            let which = match outcome {
                GcOutcome::Collected { .. } => 0,
                GcOutcome::Skipped => 1,
                GcOutcome::Failed(_) => 2,
            };
            outcomes[which].fetch_add(1, Ordering::Relaxed);
        };
        AbortOnDropHandle::new(tokio::spawn(scheduler.run(collector(&shared), clock.clone(), on_run)))
    };
    let _tasks: Vec<_> = (0..8).map(|_| one()).collect();
    let (writer, _) = open_on(shared.clone());
    for seed in 0..100 {
        store(&*writer, chain(seed, 10)).await;
        tokio::time::sleep(EVERY / 5).await;
    }
    let [collected, skipped, failed] = outcomes.each_ref().map(|count| count.load(Ordering::Relaxed));
    // Twenty intervals. Two runs are at least three quarters of an interval apart.
    assert!((14..=27).contains(&collected) && failed == 0, "{collected} collected, {failed} failed");
    assert!(collected + skipped > 120, "each process tries to start a run: {skipped} skipped");
    tokio::time::sleep(EVERY * 4).await;
    let bytes = collector(&shared).scan(|_, _| ()).await.unwrap().bytes();
    assert!((1..=60_000).contains(&bytes), "{bytes}");
    assert_eq!(writer.missing_objects(), 0, "followers learned of the deletions in time");
}

#[tokio::test(start_paused = true)]
async fn failures_and_future_dates_do_not_stop_collection() {
    let flaky = Arc::new(flaky::Flaky::default());
    let shared: Arc<dyn ObjectStore> = flaky.clone();
    let (clock, _ticks) = virtual_clock();
    flaky.use_clock(&clock);
    let outcomes: Arc<parking_lot::Mutex<Vec<&'static str>>> = Arc::default();
    let reports = outcomes.clone();
    let scheduler = GcScheduler { policy: Policy::default(), interval: EVERY };
    let on_run = move |outcome: &GcOutcome| {
        reports.lock().push(match outcome {
            GcOutcome::Collected { .. } => "collected",
            GcOutcome::Skipped => "skipped",
            GcOutcome::Failed(_) => "failed",
        });
    };
    collector(&shared).try_start(EVERY, clock.now().after(EVERY * 100)).await.unwrap();
    flaky.set_fault(Some(("collected", flaky::Fault::Fails)));
    let _task = AbortOnDropHandle::new(tokio::spawn(scheduler.run(collector(&shared), clock.clone(), on_run)));
    tokio::time::sleep(EVERY * 3).await;
    assert!(outcomes.lock().iter().all(|outcome| *outcome == "failed"));
    flaky.set_fault(None);
    tokio::time::sleep(EVERY * 2).await;
    assert_eq!(outcomes.lock().last(), Some(&"collected"));
}

#[tokio::test(start_paused = true)]
async fn a_fast_clock_does_not_shorten_the_grace_period() {
    let flaky = Arc::new(flaky::Flaky::default());
    let shared: Arc<dyn ObjectStore> = flaky.clone();
    let (clock, _ticks) = virtual_clock();
    flaky.use_clock(&clock);
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(1, 10)).await;
    let scheduler = GcScheduler { policy: Policy { capacity: Some(0), ..Policy::default() }, interval: EVERY };
    let collector = collector(&shared);
    let ahead = Clock::manual(clock.now());
    let mut reports = Vec::new();
    for (run, minutes) in (1..).zip([1, 1, 10]) {
        ahead.set(clock.now().after(EVERY * 10 * run));
        let GcOutcome::Collected { report, .. } = scheduler.run_once(&collector, &ahead, EVERY).await else {
            panic!("no other process ran")
        };
        reports.push((report.marked.len(), report.deleted.objects));
        tokio::time::sleep(Duration::from_mins(minutes)).await;
    }
    ahead.set(clock.now().after(EVERY * 100));
    let GcOutcome::Collected { report, .. } = scheduler.run_once(&collector, &ahead, EVERY).await else {
        panic!("no other process ran")
    };
    assert_eq!((reports, report.deleted.objects), (vec![(1, 0), (0, 0), (0, 0)], 1));
}
