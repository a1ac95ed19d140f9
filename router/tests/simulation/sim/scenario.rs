//! What happens in a simulation, drawn from its seed: the cluster, the requests, and the faults.

use super::engine::Speed;
use super::model::Variant;
use super::network::{Node, Quality};
use super::world::{Rng, World};
use kvbm::Faults;
use router::{Admission, Disaggregation, PlannerMode, PlannerSettings, Policy, Settings};
use std::ops::Range;
use std::time::Duration;
use units::HumanDuration;
use worker::plane::{Role, WorkerId};

#[derive(Clone)]
pub(super) struct Scenario {
    pub(super) kind: Kind,
    pub(super) settings: Settings,
    pub(super) routers: u64,
    /// Workers that run from the beginning, and then one of another variant of the model, which a fault may start.
    pub(super) workers: Vec<WorkerShape>,
    pub(super) store_blocks: Option<usize>,
    pub(super) domains: u64,
    /// Requests and faults begin within this time.
    pub(super) length: Duration,
    pub(super) requests: u64,
    /// Output tokens of a request.
    pub(super) outputs: Range<u64>,
    pub(super) faults: Vec<(Duration, Fault)>,
}

/// What a seed is about.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Kind {
    /// Nothing fails: no request may fail either.
    Calm,
    /// Every worker is drained and started again, one after the other: no request may fail.
    RollingRestart,
    /// The same several times, with outputs of several hundred tokens and drains that end before them, so that streams
    /// are moved from worker to worker: no request may fail.
    LongStreams,
    /// The planes are slow and lose, repeat and reorder events: no request may fail.
    LossyPlanes,
    /// One worker of several fails in one way: no request may fail.
    OneFault,
    /// Anything.
    Chaos,
    /// Never drawn: routers skip removals of blocks and count them as applied, which the checks must find.
    SkippedRemovals,
}

#[derive(Clone)]
pub(super) struct WorkerShape {
    pub(super) variant: Variant,
    pub(super) role: Role,
    pub(super) device_blocks: usize,
    pub(super) host_blocks: usize,
    pub(super) speed: Speed,
}

/// A fault, and what ends it.
#[derive(Clone, Debug)]
pub(super) enum Fault {
    /// A worker is killed and starts again after a time.
    Kill(WorkerId, Duration),
    /// A worker is drained and starts again. Requests that take longer than the limit are cut off.
    Drain(WorkerId, Option<Duration>),
    /// All workers are drained and start again, one after the other, so many times.
    RollingRestart(u64, Option<Duration>),
    /// A second process with the id of a worker starts, and takes over. The first one ends after a time.
    SameId(WorkerId, Duration),
    /// The worker of another variant of the model joins, and is drained after a time.
    OtherVariant(Duration),
    KillRouter(u64, Duration),
    Freeze(Node, Duration),
    Cut(Node, Node, Duration),
    /// Messages are lost, late, repeated, overtaken.
    Quality(Quality, Duration),
    /// Faults of the shared store, for one worker.
    Tier(WorkerId, Faults, Duration),
    /// The clock of a worker is wrong by so many seconds.
    Clock(WorkerId, i64, Duration),
    /// A block disappears from the store.
    Collect(u64),
}

impl Fault {
    /// Whether every other worker still serves every router.
    fn is_of_one_worker(&self) -> bool {
        match self {
            Self::Kill(..)
            | Self::Drain(..)
            | Self::SameId(..)
            | Self::OtherVariant(_)
            | Self::Tier(..)
            | Self::Clock(..)
            | Self::Collect(_) => true,
            Self::Freeze(node, _) => matches!(node, Node::Worker(_)),
            Self::Cut(a, _, _) => matches!(a, Node::Worker(_)),
            Self::RollingRestart(..) | Self::KillRouter(..) | Self::Quality(..) => false,
        }
    }
}

const fn ms(range: Range<u64>) -> Range<Duration> {
    Duration::from_millis(range.start)..Duration::from_millis(range.end)
}

impl Scenario {
    /// `kind`: `None` to draw it.
    pub(super) fn draw(world: &World, kind: Option<Kind>) -> Self {
        let rng = &mut world.rng("scenario", 0);
        let drawn = match rng.within(0..20) {
            0 | 1 => Kind::Calm,
            2 | 3 => Kind::RollingRestart,
            4 => Kind::LongStreams,
            5 | 6 => Kind::LossyPlanes,
            7..=10 => Kind::OneFault,
            _ => Kind::Chaos,
        };
        let kind = kind.unwrap_or(drawn);
        let workers = workers(rng, kind);
        let (routers, length) = (rng.within(1..4), rng.duration(&ms(5_000..40_000)));
        let (requests, outputs) = match kind {
            Kind::LongStreams => (rng.within(4..12), 200..600),
            _ => (rng.within(10..80), 1..60),
        };
        let store_blocks = rng.chance(0.7).then(|| rng.within(20..400) as usize);
        let mut scenario = Self {
            kind,
            settings: settings(rng),
            routers,
            workers,
            store_blocks,
            domains: rng.within(1..4),
            length,
            requests,
            outputs,
            faults: Vec::new(),
        };
        scenario.faults = scenario.draw_faults(rng);
        scenario
    }

    /// Number of workers that run from the beginning.
    pub(super) fn first_workers(&self) -> u64 {
        self.workers.len() as u64 - 1
    }

    fn draw_faults(&self, rng: &mut Rng) -> Vec<(Duration, Fault)> {
        match self.kind {
            Kind::Calm => Vec::new(),
            Kind::RollingRestart => {
                let limit = rng.chance(0.5).then(|| rng.millis(2_000..5_000));
                vec![(rng.duration(&ms(0..5_000)), Fault::RollingRestart(1, limit))]
            }
            Kind::LongStreams => {
                let limit = rng.millis(1_500..3_000);
                vec![(rng.duration(&ms(0..5_000)), Fault::RollingRestart(2, Some(limit)))]
            }
            Kind::SkippedRemovals => {
                let quality = Quality { skips_removals: true, ..Quality::default() };
                vec![(Duration::ZERO, Fault::Quality(quality, self.length))]
            }
            Kind::LossyPlanes => vec![(Duration::ZERO, Fault::Quality(bad_quality(rng), self.length))],
            Kind::OneFault => {
                let at = rng.duration(&(Duration::ZERO..self.length));
                let fault = std::iter::repeat_with(|| self.draw_fault(rng)).find(Fault::is_of_one_worker);
                fault.map(|fault| (at, fault)).into_iter().collect()
            }
            Kind::Chaos => {
                let count = rng.within(1..9);
                (0..count).map(|_| (rng.duration(&(Duration::ZERO..self.length)), self.draw_fault(rng))).collect()
            }
        }
    }

    fn draw_fault(&self, rng: &mut Rng) -> Fault {
        let worker = WorkerId(rng.within(0..self.first_workers()));
        let router = rng.within(0..self.routers);
        let short = rng.duration(&ms(100..3_000));
        let time = if rng.chance(0.5) { short } else { rng.duration(&ms(3_000..40_000)) };
        match rng.within(0..16) {
            0..=2 => Fault::Kill(worker, time),
            3 => Fault::Drain(worker, rng.chance(0.5).then_some(short)),
            4 => Fault::KillRouter(router, time),
            5 => Fault::Freeze(Node::Worker(worker.0), time),
            6 => Fault::Cut(Node::Worker(worker.0), Node::Router(router), time),
            7 => Fault::Cut(Node::Worker(worker.0), Node::Broker, time),
            8 => Fault::Cut(Node::Router(router), Node::Broker, time),
            9 => {
                let other = Node::Worker(rng.within(0..self.first_workers()));
                let to = if other == Node::Worker(worker.0) { Node::Store } else { other };
                Fault::Cut(Node::Worker(worker.0), to, time)
            }
            10 => Fault::Quality(bad_quality(rng), time),
            11 => Fault::Tier(worker, bad_tier(rng), time),
            12 => Fault::SameId(worker, time),
            13 => Fault::OtherVariant(time),
            14 => Fault::Clock(worker, if rng.chance(0.5) { 3600 } else { -3600 }, time),
            _ => Fault::Collect(rng.next()),
        }
    }
}

fn settings(rng: &mut Rng) -> Settings {
    let modes = [Disaggregation::Auto, Disaggregation::Always, Disaggregation::Never];
    let policy = if rng.chance(0.6) { Policy::Kv } else { rng.pick(&Policy::ALL).cloned().unwrap_or_default() };
    let admission = Admission {
        max_queued_tokens: rng.within(1_000..20_000),
        max_queue_time: HumanDuration::secs(rng.within(2..61)),
        ..Admission::default()
    };
    let mode = if rng.chance(0.3) { PlannerMode::Apply } else { PlannerMode::Recommend };
    Settings {
        policy,
        disaggregation: rng.pick(&modes).copied().unwrap_or_default(),
        seed: rng.next(),
        index_memory: units::ByteSize(1 << 20),
        planner: PlannerSettings { mode, ..PlannerSettings::default() },
        admission,
        ..Settings::default()
    }
}

fn workers(rng: &mut Rng, kind: Kind) -> Vec<WorkerShape> {
    let is_long = kind == Kind::LongStreams;
    let count = rng.within(if kind == Kind::OneFault || is_long { 3..6 } else { 2..6 });
    let is_disaggregated = rng.chance(0.5) && !is_long;
    let host = rng.chance(0.7);
    let roles = [Role::Prefill, Role::Decode, Role::Both];
    let speed = Speed {
        max_num_seqs: rng.within(if is_long { 4..12 } else { 2..12 }) as usize,
        max_queued_requests: rng.within(4..40) as usize,
        chunk_tokens: 16 * rng.within(2..17) as usize,
        prompt_token: Duration::from_micros(rng.within(200..1_500)),
        step: rng.millis(if is_long { 25..50 } else { 4..30 }),
    };
    let other = if rng.chance(0.5) { Variant::OtherWeights } else { Variant::OtherLayout };
    // So that a stream sends tokens while its worker drains, and does not wait for memory.
    let device_blocks = if is_long { 400..600 } else { 60..160 };
    let mut shape = |number: u64| WorkerShape {
        variant: if number < count { Variant::Usual } else { other },
        // At least one of each, so that requests can be served.
        role: match number {
            _ if !is_disaggregated => Role::Both,
            0 => Role::Prefill,
            1 => Role::Decode,
            _ => rng.pick(&roles).copied().unwrap_or_default(),
        },
        device_blocks: rng.within(device_blocks.clone()) as usize,
        host_blocks: if host { rng.within(8..200) as usize } else { 0 },
        speed,
    };
    (0..=count).map(&mut shape).collect()
}

fn bad_quality(rng: &mut Rng) -> Quality {
    let mut some = |most: f64| if rng.chance(0.5) { most * (rng.within(0..100) as f64 / 100.0) } else { 0.0 };
    let (loss, duplication, reordering) = (some(0.4), some(0.3), some(0.3));
    let slowest = rng.within(2..600);
    Quality { delay: ms(1..1 + slowest), loss, duplication, reordering, skips_removals: false }
}

fn bad_tier(rng: &mut Rng) -> Faults {
    let mut some = |most: f64| if rng.chance(0.4) { most * (rng.within(0..100) as f64 / 100.0) } else { 0.0 };
    let (hang, error, busy, lost) = (some(0.1), some(0.5), some(0.5), some(0.3));
    let (short, corrupt, wrong) = (some(0.3), some(0.3), some(0.3));
    let latency = Duration::ZERO..=rng.millis(0..400);
    Faults { latency, hang, error, busy, lost, short, corrupt, wrong }
}
