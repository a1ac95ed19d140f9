//! What all parts of a simulation share: the network between its processes, the log of events, and the violations of
//! invariants.

use super::network::{Network, Node};
use kvbm::splitmix::{SplitMix64, splitmix64};
use kvbm::{DomainId, Epoch, SequenceHash, Tier};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{Request, Work};
use worker::handoff::Peers;
use worker::plane::{Source, WorkerId};

/// Shared by all parts of one simulation.
pub(super) struct World {
    seed: u64,
    start: Instant,
    log: Mutex<EventLog>,
    violations: Mutex<Vec<String>>,
    faults: Mutex<Faults>,
    /// How often the stream of each request was continued on another worker.
    moves: Mutex<BTreeMap<String, u32>>,
    pub(super) network: Network,
    /// What peers reach of each worker that runs.
    pub(super) memories: Mutex<BTreeMap<WorkerId, Memory>>,
    /// The cache domain of each block that any worker computed.
    owners: Mutex<BTreeMap<SequenceHash, DomainId>>,
    /// The last snapshot that each process has received of each source: its epoch, and when.
    snapshots: Mutex<BTreeMap<(Node, Source), (Epoch, Instant)>>,
}

/// The faults at present.
#[derive(Default)]
struct Faults {
    active: u32,
    /// When the last one ended.
    ended: Option<Instant>,
}

/// The memory of a worker, as its peers see it.
#[derive(Clone)]
pub(super) struct Memory {
    pub(super) tier: Arc<dyn Tier>,
    /// Its hand-overs.
    pub(super) handoffs: Peers,
}

/// Every event of the simulation, one line each, hashed.
struct EventLog {
    hasher: blake3::Hasher,
    lines: u64,
    is_printed: bool,
}

/// A generator of random numbers: `SplitMix64` with the draws that the simulation needs.
#[derive(Clone)]
pub(super) struct Rng(SplitMix64);

/// Violations that are kept: what follows the first is mostly its consequence.
const MAX_VIOLATIONS: usize = 8;

impl World {
    pub(super) fn new(seed: u64, is_printed: bool) -> Arc<Self> {
        Arc::new(Self {
            seed,
            start: Instant::now(),
            log: Mutex::new(EventLog { hasher: blake3::Hasher::new(), lines: 0, is_printed }),
            violations: Mutex::default(),
            faults: Mutex::default(),
            moves: Mutex::default(),
            network: Network::new(),
            memories: Mutex::default(),
            owners: Mutex::default(),
            snapshots: Mutex::default(),
        })
    }

    /// A generator of its own for a part of the simulation, so that one part's draws do not shift another's.
    pub(super) fn rng(&self, part: &str, number: u64) -> Rng {
        let part = part.bytes().fold(self.seed, |hash, byte| splitmix64(hash ^ u64::from(byte)));
        Rng(SplitMix64::new(splitmix64(part ^ splitmix64(number))))
    }

    /// Virtual time since the start.
    pub(super) fn now(&self) -> Duration {
        self.start.elapsed()
    }

    /// Adds a line to the log of events.
    pub(super) fn log(&self, event: fmt::Arguments<'_>) {
        let line = format!("{:12.6} {event}\n", self.now().as_secs_f64());
        let mut log = self.log.lock();
        log.hasher.update(line.as_bytes());
        log.lines += 1;
        if log.is_printed {
            print!("{line}");
        }
    }

    /// Hash of the log of events so far, and its number of lines.
    pub(super) fn digest(&self) -> (String, u64) {
        let log = self.log.lock();
        (log.hasher.finalize().to_hex()[..16].to_owned(), log.lines)
    }

    /// Records that an invariant does not hold.
    pub(super) fn violated(&self, what: fmt::Arguments<'_>) {
        self.log(format_args!("VIOLATED {what}"));
        let mut violations = self.violations.lock();
        if violations.len() < MAX_VIOLATIONS {
            violations.push(format!("at {:.6} s: {what}", self.now().as_secs_f64()));
        }
    }

    pub(super) fn violations(&self) -> Vec<String> {
        self.violations.lock().clone()
    }

    /// Whether a further violation would be kept.
    pub(super) fn keeps_violations(&self) -> bool {
        self.violations.lock().len() < MAX_VIOLATIONS
    }

    pub(super) fn fault_begins(&self, fault: &dyn fmt::Debug) {
        self.faults.lock().active += 1;
        self.log(format_args!("fault: {fault:?}"));
    }

    pub(super) fn fault_ends(&self, fault: &dyn fmt::Debug) {
        {
            let mut faults = self.faults.lock();
            faults.active -= 1;
            faults.ended = Some(Instant::now());
        }
        self.log(format_args!("end of fault: {fault:?}"));
    }

    /// Whether there was no fault for so long.
    pub(super) fn is_undisturbed_for(&self, time: Duration) -> bool {
        let faults = self.faults.lock();
        faults.active == 0 && faults.ended.is_none_or(|ended| ended.elapsed() >= time)
    }

    /// Records that a process receives a snapshot.
    pub(super) fn snapshot_arrives(&self, node: Node, source: Source, epoch: Epoch) {
        self.snapshots.lock().insert((node, source), (epoch, Instant::now()));
    }

    /// Whether a process has received a snapshot of this epoch at this instant.
    pub(super) fn has_snapshot_now(&self, node: Node, source: Source, epoch: Epoch) -> bool {
        self.snapshots.lock().get(&(node, source)) == Some(&(epoch, Instant::now()))
    }

    /// Records that a worker accepts a request.
    pub(super) fn accepts(&self, worker: WorkerId, request: &Request) {
        let id = &request.id;
        self.log(format_args!("{worker} accepts {id}"));
        if request.generated_tokens > 0 && !matches!(request.work, Work::Prefill) {
            *self.moves.lock().entry(id.to_string()).or_default() += 1;
        }
    }

    /// How often the stream that was continued most often was continued.
    pub(super) fn most_moves(&self) -> u32 {
        self.moves.lock().values().copied().max().unwrap_or_default()
    }

    /// Records that a worker computed or loaded a block for a request of a cache domain. Two domains never share a
    /// hash.
    pub(super) fn uses(&self, node: Node, hash: SequenceHash, domain: DomainId) {
        let owner = *self.owners.lock().entry(hash).or_insert(domain);
        if owner != domain {
            self.violated(format_args!("{node}: two cache domains share block {hash}"));
        }
    }
}

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0.next_u64()
    }

    pub(super) fn within(&mut self, range: Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start).max(1)
    }

    /// Whether an event of this probability happens.
    pub(super) fn chance(&mut self, probability: f64) -> bool {
        self.0.uniform() < probability
    }

    pub(super) fn duration(&mut self, range: &Range<Duration>) -> Duration {
        range.start + range.end.saturating_sub(range.start).mul_f64(self.0.uniform())
    }

    pub(super) fn millis(&mut self, range: Range<u64>) -> Duration {
        Duration::from_millis(self.within(range))
    }

    pub(super) fn pick<'a, T>(&mut self, items: &'a [T]) -> Option<&'a T> {
        let last = items.len().checked_sub(1)?;
        items.get(self.within(0..last as u64 + 1) as usize)
    }
}
