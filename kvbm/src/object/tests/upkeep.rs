//! Several processes that look after one store: it stays within its bounds, and about one looks through it each time.

use super::*;
use crate::block::Clock;
use crate::object::gc::Policy;
use std::sync::atomic::{AtomicU64, Ordering};

const EVERY: Duration = Duration::from_mins(30);

/// A clock that goes with virtual time, in steps of a second.
pub(super) fn ticking() -> (Clock, AbortOnDropHandle<()>) {
    ticking_from(Clock::system().now())
}

/// The same, from another time on than the machine's.
pub(super) fn ticking_from(start: crate::block::Date) -> (Clock, AbortOnDropHandle<()>) {
    let clock = Clock::standing(start);
    let hand = clock.clone();
    let ticking = tokio::spawn(async move {
        for second in 0.. {
            hand.set(start.after(Duration::from_secs(second)));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    });
    (clock, AbortOnDropHandle::new(ticking))
}

fn collector(store: &Arc<dyn ObjectStore>) -> Collector {
    Collector::open(store.clone(), "kv", Duration::from_secs(10))
}

#[tokio::test(start_paused = true)]
async fn of_many_processes_about_one_collects_each_time_and_the_store_stays_within_its_budget() {
    let flaky = Arc::new(flaky::Flaky::default());
    let shared: Arc<dyn ObjectStore> = flaky.clone();
    let (clock, _ticks) = ticking();
    flaky.date_by(&clock);
    let turns: Arc<[AtomicU64; 3]> = Arc::default();
    let one = || {
        let upkeep = Upkeep { policy: Policy { budget: Some(60_000), ..Policy::default() }, every: EVERY };
        let turns = turns.clone();
        let told = move |outcome: &Outcome| {
            let which = match outcome {
                Outcome::Collected { .. } => 0,
                Outcome::Passed => 1,
                Outcome::Failed(_) => 2,
            };
            turns[which].fetch_add(1, Ordering::Relaxed);
        };
        AbortOnDropHandle::new(tokio::spawn(upkeep.run(collector(&shared), clock.clone(), told)))
    };
    let _tasks: Vec<_> = (0..8).map(|_| one()).collect();
    let (writer, _) = open_on(shared.clone());
    for seed in 0..100 {
        store(&*writer, chain(seed, 10)).await;
        tokio::time::sleep(EVERY / 5).await;
    }
    let [collected, passed, failed] = turns.each_ref().map(|count| count.load(Ordering::Relaxed));
    // Twenty intervals; the time between two may be three quarters of one.
    assert!((14..=27).contains(&collected) && failed == 0, "{collected} collected, {failed} failed");
    assert!(collected + passed > 120, "each process asks for its turn: {passed} passed");
    tokio::time::sleep(EVERY * 4).await;
    let bytes = collector(&shared).survey(|_, _| ()).await.unwrap().bytes();
    assert!((1..=60_000).contains(&bytes), "{bytes}");
    assert_eq!(writer.lost_objects(), 0, "whoever serves heard in time");
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_is_collected_when_it_is_back_and_a_date_from_the_future_holds_nobody_up() {
    let flaky = Arc::new(flaky::Flaky::default());
    let shared: Arc<dyn ObjectStore> = flaky.clone();
    let (clock, _ticks) = ticking();
    flaky.date_by(&clock);
    let outcomes: Arc<std::sync::Mutex<Vec<&'static str>>> = Arc::default();
    let said = outcomes.clone();
    let upkeep = Upkeep { policy: Policy::default(), every: EVERY };
    let told = move |outcome: &Outcome| {
        said.lock().unwrap().push(match outcome {
            Outcome::Collected { .. } => "collected",
            Outcome::Passed => "passed",
            Outcome::Failed(_) => "failed",
        });
    };
    collector(&shared).turn(EVERY, clock.now().after(EVERY * 100)).await.unwrap();
    flaky.set(Some(("collected", flaky::Mood::Fails)));
    let _task = AbortOnDropHandle::new(tokio::spawn(upkeep.run(collector(&shared), clock.clone(), told)));
    tokio::time::sleep(EVERY * 3).await;
    assert!(outcomes.lock().unwrap().iter().all(|outcome| *outcome == "failed"));
    flaky.set(None);
    tokio::time::sleep(EVERY * 2).await;
    assert_eq!(outcomes.lock().unwrap().last(), Some(&"collected"));
}

#[tokio::test(start_paused = true)]
async fn a_clock_that_is_ahead_cuts_no_grace_short() {
    let flaky = Arc::new(flaky::Flaky::default());
    let shared: Arc<dyn ObjectStore> = flaky.clone();
    let (clock, _ticks) = ticking();
    flaky.date_by(&clock);
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(1, 10)).await;
    let upkeep = Upkeep { policy: Policy { budget: Some(0), ..Policy::default() }, every: EVERY };
    let (collector, ahead) = (collector(&shared), Clock::standing(clock.now()));
    let mut said = Vec::new();
    for (turn, minutes) in (1..).zip([1, 1, 10]) {
        ahead.set(clock.now().after(EVERY * 10 * turn));
        let Outcome::Collected { report, .. } = upkeep.turn(&collector, &ahead, EVERY).await else {
            panic!("it is its turn")
        };
        said.push((report.condemned.len(), report.deleted.objects));
        tokio::time::sleep(Duration::from_mins(minutes)).await;
    }
    ahead.set(clock.now().after(EVERY * 100));
    let Outcome::Collected { report, .. } = upkeep.turn(&collector, &ahead, EVERY).await else {
        panic!("it is its turn")
    };
    assert_eq!((said, report.deleted.objects), (vec![(1, 0), (0, 0), (0, 0)], 1));
}
