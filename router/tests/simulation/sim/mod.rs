//! Deterministic simulation: routers, workers, planes and a shared store in one thread and in virtual time, with faults
//! drawn from a seed.
//!
//! ```text
//!   clients ─▶ Router ─▶ link ─▶ engine ─▶ BlockManager ─▶ G2, link ─▶ shared store
//!                ▲                  │ Worker (serve)
//!                └── node planes ◀──┘ leases, events, ranges, snapshots
//! ```
//! Real: the router with all its tasks, `worker::serve`, the planes in memory, hand-over, the block manager with its
//! tiers. Simulated: the network between the processes (delay, loss, repetition, reordering, cuts), the processes
//! (kill, drain, freeze, wrong clocks, two with one id), and the [model](model), whose text shows any wrong block.
//!
//! A run is a function of its seed: one thread, a paused clock, seeded randomness, maps without random order. All that
//! happens is a line of a log, whose hash is the same for every run of the seed.

mod clients;
mod cluster;
mod engine;
mod faults;
mod invariants;
mod link;
mod model;
mod network;
mod planes;
mod scenario;
mod store;
mod world;

use cluster::Cluster;
use invariants::InstantCheck;
pub(crate) use scenario::Kind;
use scenario::Scenario;
use std::cell::RefCell;
use std::sync::{Arc, Once};
use std::time::Duration;
use worker::plane::WorkerId;
use world::World;

/// The outcome of a seed.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Outcome {
    /// Hash of the log of events, and its number of lines.
    pub(crate) digest: String,
    pub(crate) lines: u64,
    /// Invariants that did not hold.
    pub(crate) violations: Vec<String>,
    /// Virtual time.
    pub(crate) seconds: u64,
    /// How often the stream that was continued on another worker most often was continued.
    pub(crate) moves: u32,
}

/// Virtual time by which all faults and all requests have ended. Both begin within 40 s; a drain waits for requests,
/// which end within minutes.
const TIME_LIMIT: Duration = Duration::from_hours(1);

thread_local! {
    /// Panics on this thread since the start of the simulation.
    static PANICS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Runs a seed as a scenario of this kind; `None`: of the kind that the seed draws. Prints its log of events if
/// `is_printed`.
pub(crate) fn run(seed: u64, kind: Option<Kind>, is_printed: bool) -> Outcome {
    static HOOK: Once = Once::new();
    HOOK.call_once(|| {
        let before = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            PANICS.with_borrow_mut(|panics| panics.push(info.to_string()));
            before(info);
        }));
    });
    PANICS.take();
    let _inline = kvbm::blocking::Inline::on_this_thread();
    let check = Arc::new(InstantCheck::default());
    let at_end = check.clone();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_time()
        .start_paused(true)
        .on_thread_park(move || at_end.run())
        .build()
        .expect("a runtime without I/O starts");
    let mut outcome = runtime.block_on(simulate(seed, kind, is_printed, &check));
    outcome.violations.extend(PANICS.take().into_iter().map(|panic| format!("panic: {panic}")));
    outcome
}

async fn simulate(seed: u64, kind: Option<Kind>, is_printed: bool, check: &InstantCheck) -> Outcome {
    let world = World::new(seed, is_printed);
    let scenario = Scenario::draw(&world, kind);
    world.log(format_args!(
        "seed {seed}: {:?}, {} routers, {} workers, {} requests in {:?}, {} faults",
        scenario.kind,
        scenario.routers,
        scenario.first_workers(),
        scenario.requests,
        scenario.length,
        scenario.faults.len()
    ));
    let cluster = Cluster::new(&world, scenario);
    (0..cluster.scenario.routers).for_each(|number| cluster.start_router(number));
    for (number, shape) in (0..cluster.scenario.first_workers()).zip(&cluster.scenario.workers) {
        cluster.start_worker(WorkerId(number), shape).await;
    }
    // Routers learn of the workers before the first request.
    tokio::time::sleep(Duration::from_secs(1)).await;
    let watching = tokio::spawn(invariants::watch(Arc::clone(&cluster)));
    check.start(&cluster);
    let all = async { futures::join!(clients::run(&cluster), faults::run(&cluster)) };
    if tokio::time::timeout(TIME_LIMIT, all).await.is_ok() {
        world.log(format_args!("all faults have ended, and all requests"));
        clients::ask_again(&cluster).await;
        invariants::check_quiet(&cluster).await;
    } else {
        world.violated(format_args!("a fault or a request has not ended after {TIME_LIMIT:?}"));
    }
    watching.abort();
    let (digest, lines) = world.digest();
    let (violations, seconds, moves) = (world.violations(), world.now().as_secs(), world.most_moves());
    Outcome { digest, lines, violations, seconds, moves }
}
