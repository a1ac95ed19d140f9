//! Cached worker snapshots, refreshed when the load version changes or the snapshot expires.
//!
//! A decision refreshes a few of a thousand snapshots. It holds the cache until it is made, explained and booked, so
//! the explanation shows the values that made the decision.

use super::change_groups::ChangeGroups;
use super::device_load::{DeviceLoads, OtherWorkers};
use super::estimate::ServiceEstimate;
use super::least_times::LeastTimes;
use super::prefix_demand::HORIZON;
use super::prompt_flow::{PromptArrivals, PromptFlow};
use super::stats::{Coverage, FleetMeans, LoadStats, MeasuredMask};
use super::timestamp::Timestamp;
use super::worker_load::{LoadReading, Reports, WorkerLoad};

/// Snapshots of the workers of a model, by index of the worker's entry.
#[derive(Default)]
pub(crate) struct SnapshotCache {
    keys: Vec<CacheKey>,
    /// Where changes are found.
    groups: ChangeGroups,
    /// No snapshot expires before, as [`Timestamp::bits`].
    expire: u64,
    all: Vec<WorkerSnapshot>,
    /// Lower bounds of the service times in `all`.
    least_times: Vec<LeastTimes>,
    /// Workers with queued prompts.
    busy: u64,
    /// Sequences of all workers.
    sequences: u64,
    /// Sum of the queues of the workers that are not ejected, in microseconds, each limited to [`HORIZON`]. Integers,
    /// because rounding errors of a float would add up.
    queued_micros: u64,
    /// Load of the devices that several workers share.
    devices: DeviceLoads,
    /// Workers that are ejected.
    ejected: usize,
    /// Own workers, whose reports come over the event plane.
    workers: ReportCounts,
    /// Servers of other programs, whose load this router reports itself.
    servers: ReportCounts,
    /// Prompts that arrive: one per decision of this router or of another one.
    flow: PromptFlow,
    /// Means that replace missing measurements.
    fleet_means: FleetMeans,
    /// The smallest lost share of all workers, computed as often as the means.
    least_lost_share: f32,
}

/// Sequences of a number of workers.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
pub(crate) struct WorkerSequences {
    pub(crate) workers: u32,
    pub(crate) sequences: u64,
}

/// How many report their load, and how many have stopped to.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct ReportCounts {
    current: usize,
    stopped: usize,
}

/// Snapshot of one worker. The first cache line has what every decision reads of every worker, the next what it reads
/// of workers with blocks to onboard.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(C, align(64))]
pub(crate) struct WorkerSnapshot {
    /// The worker is passed over while others are available.
    ejected: bool,
    /// Whether the worker reports its load.
    reports: Reports,
    /// The worker is a server of another program.
    is_server: bool,
    /// The worker is ejected until a known time: it is preferred to other ejected workers.
    pub(crate) temporarily_ejected: bool,
    /// Number of the choice for its model that last chose the worker; 0 means never.
    pub(crate) chosen: u64,
    /// Service times, with means of the fleet for missing measurements.
    pub(crate) estimate: ServiceEstimate,
    /// Mask of the speeds that the worker has measured itself.
    measured: MeasuredMask,
    /// Load of the worker.
    pub(crate) stats: LoadStats,
}

/// Validity of a snapshot: version of the load, and the time at which the snapshot expires.
#[derive(Clone, Copy)]
struct CacheKey {
    version: u32,
    until: u64,
}

impl CacheKey {
    /// No snapshot yet.
    const EMPTY: Self = Self { version: 0, until: 0 };
}

impl SnapshotCache {
    /// Refreshes the snapshots that are out of date. `load`: of each of a number of `workers`, which stay the same.
    pub(crate) fn refresh<'a>(&mut self, workers: usize, load: impl Fn(usize) -> &'a WorkerLoad, now: Timestamp) {
        if self.keys.len() != workers {
            let default = WorkerSnapshot::default();
            self.all.resize(workers, default);
            self.least_times.resize(workers, LeastTimes::of(&default.estimate));
            self.keys.resize(workers, CacheKey::EMPTY);
            self.groups = ChangeGroups::of((0..workers).map(&load));
            self.devices = DeviceLoads::of((0..workers).map(|at| load(at).device()));
            self.devices.recount(self.all.iter().map(|snapshot| &snapshot.estimate));
            self.expire = 0;
        }
        let mut measured = false;
        if now.bits() < self.expire {
            let mut groups = std::mem::take(&mut self.groups);
            groups.changed(|at| self.refresh_worker(at, load(at), now, &mut measured));
            self.groups = groups;
        } else {
            self.groups.all_seen();
            (0..workers).for_each(|at| self.refresh_worker(at, load(at), now, &mut measured));
            self.expire = self.keys.iter().map(|key| key.until).fold(u64::MAX, u64::min);
        }
        self.update_means(measured, now);
        self.prompt_arrived(now);
    }

    /// `measured`: set if the set of measured fields has changed.
    #[inline]
    fn refresh_worker(&mut self, at: usize, load: &WorkerLoad, now: Timestamp, measured: &mut bool) {
        let (version, key) = (load.version(), &mut self.keys[at]);
        if version == key.version && now.bits() < key.until {
            return;
        }
        // A change after this read raises the version again.
        let reading = load.read(now);
        *key = CacheKey { version, until: reading.until.map_or(u64::MAX, Timestamp::bits) };
        self.expire = self.expire.min(key.until);
        let snapshot = &mut self.all[at];
        *measured |= reading.measured != snapshot.measured;
        self.busy += u64::from(reading.stats.prompts > 0);
        self.busy -= u64::from(snapshot.stats.prompts > 0);
        self.sequences += u64::from(reading.stats.sequences);
        self.sequences -= u64::from(snapshot.stats.sequences);
        self.ejected += usize::from(reading.ejected);
        self.ejected -= usize::from(snapshot.ejected);
        let counts = if reading.is_server { &mut self.servers } else { &mut self.workers };
        for (count, state) in [(&mut counts.current, Reports::Current), (&mut counts.stopped, Reports::Stopped)] {
            *count += usize::from(reading.reports == state);
            *count -= usize::from(snapshot.reports == state);
        }
        self.queued_micros -= queued_micros(snapshot);
        let new = WorkerSnapshot::of(&reading, &self.fleet_means);
        self.devices.change(at, &snapshot.estimate, &new.estimate);
        *snapshot = new;
        self.queued_micros += queued_micros(snapshot);
        self.least_times[at] = LeastTimes::of(&snapshot.estimate);
    }

    /// Counts a prompt that was placed, by this router or by another one.
    pub(crate) fn prompt_arrived(&mut self, now: Timestamp) {
        let workers = self.all.len().max(1) as f64;
        self.flow.arrived(self.busy as f64 / workers, self.queued_micros as f64 / 1e6 / workers, now);
    }

    /// Prompts that arrive, and queues, averaged over half a minute. A prompt that is placed again counts again.
    pub(crate) fn arrivals(&self) -> PromptArrivals {
        self.flow.arrivals(self.all.len())
    }

    /// Sequences of all workers.
    pub(crate) fn sequences(&self) -> WorkerSequences {
        WorkerSequences { workers: self.all.len() as u32, sequences: self.sequences }
    }

    /// What the other workers of the device of a worker compute; `None` if it shares the device with no other.
    #[inline]
    pub(crate) fn others_on_device(&self, at: usize) -> Option<OtherWorkers> {
        self.devices.others(at, &self.all[at].estimate)
    }

    /// Number of the last choice for the model; 0 if none shares its device with another.
    pub(crate) fn last_choice(&self) -> u64 {
        if self.devices.are_shared() { self.all.iter().map(|worker| worker.chosen).max().unwrap_or(0) } else { 0 }
    }

    /// Blocks that are lost for each one that is used, on the worker that loses least.
    pub(crate) fn least_lost_share(&self) -> f32 {
        self.least_lost_share
    }

    #[inline]
    pub(crate) fn all(&self) -> &[WorkerSnapshot] {
        &self.all
    }

    /// Lower bounds of the service times, in the same order.
    #[inline]
    pub(crate) fn least_times(&self) -> &[LeastTimes] {
        &self.least_times
    }

    /// Whether any worker is passed over.
    pub(crate) fn is_any_passed_over(&self) -> bool {
        let is_unusual = |counts: &ReportCounts, is_server| counts.stopped > 0 && self.is_silence_unusual(is_server);
        self.ejected > 0 || is_unusual(&self.workers, false) || is_unusual(&self.servers, true)
    }

    /// Whether a worker is passed over while others are available: it is ejected, or silent while others report.
    #[inline]
    pub(crate) fn is_passed_over(&self, snapshot: &WorkerSnapshot) -> bool {
        snapshot.ejected || self.is_unusually_silent(snapshot)
    }

    #[inline]
    pub(crate) fn is_unusually_silent(&self, snapshot: &WorkerSnapshot) -> bool {
        snapshot.reports == Reports::Stopped && self.is_silence_unusual(snapshot.is_server)
    }

    /// If all own workers are silent, the event plane is away, and that says nothing about any of them. Reports of
    /// servers do not come over it: they say nothing about own workers, and any report shows that a silent server is
    /// unusual.
    #[inline]
    fn is_silence_unusual(&self, is_server: bool) -> bool {
        self.workers.current > 0 || is_server && self.servers.current > 0
    }

    /// `measured`: the set of measured fields may have changed.
    fn update_means(&mut self, measured: bool, now: Timestamp) {
        let Self { all, least_times, fleet_means, least_lost_share, queued_micros: queued, devices, .. } = self;
        let mut coverage = fleet_means.coverage();
        if measured {
            coverage = Coverage::default();
            for snapshot in all.iter() {
                coverage.add(snapshot.measured);
            }
        }
        if !fleet_means.is_due(coverage, now) {
            return;
        }
        // Means that all workers have measured themselves replace nothing. The lost shares change all the same.
        if fleet_means.update(coverage, now, || all.iter().map(|snapshot| snapshot.stats.speeds)) {
            for (snapshot, least_times) in all.iter_mut().zip(least_times) {
                snapshot.estimate = estimate(snapshot.stats, snapshot.measured, fleet_means);
                *least_times = LeastTimes::of(&snapshot.estimate);
            }
            *queued = all.iter().map(queued_micros).sum();
            devices.recount(all.iter().map(|snapshot| &snapshot.estimate));
        }
        *least_lost_share = all.iter().map(|snapshot| snapshot.estimate.lost_share).fold(f32::INFINITY, f32::min);
    }
}

/// The queue of a worker that is not ejected.
fn queued_micros(snapshot: &WorkerSnapshot) -> u64 {
    if snapshot.ejected { 0 } else { (snapshot.estimate.queue.min(HORIZON) * 1e6) as u64 }
}

impl<'a> FromIterator<&'a ServiceEstimate> for WorkerSequences {
    fn from_iter<I: IntoIterator<Item = &'a ServiceEstimate>>(workers: I) -> Self {
        let add = |all: Self, worker: &ServiceEstimate| Self {
            workers: all.workers + 1,
            sequences: all.sequences + u64::from(worker.sequences),
        };
        workers.into_iter().fold(Self::default(), add)
    }
}

impl WorkerSnapshot {
    fn of(reading: &LoadReading, fleet_means: &FleetMeans) -> Self {
        let LoadReading { stats, measured, ejected, reports, is_server, temporarily_ejected, chosen, .. } = *reading;
        let estimate = estimate(stats, measured, fleet_means);
        Self { ejected, reports, is_server, temporarily_ejected, chosen, estimate, measured, stats }
    }
}

/// Service times, with means of the fleet for missing measurements.
fn estimate(mut stats: LoadStats, measured: MeasuredMask, fleet_means: &FleetMeans) -> ServiceEstimate {
    fleet_means.fill(measured, &mut stats.speeds);
    ServiceEstimate::of(&stats)
}

impl Default for WorkerSnapshot {
    fn default() -> Self {
        let stats = LoadStats::default();
        Self {
            estimate: ServiceEstimate::of(&stats),
            chosen: 0,
            ejected: false,
            reports: Reports::Never,
            is_server: false,
            temporarily_ejected: false,
            measured: MeasuredMask::default(),
            stats,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::splitmix64;
    use crate::load::demand::Demand;
    use crate::load::model_stats::ModelStats;
    use crate::load::output_lengths::ExpectedOutput;
    use crate::load::stats::MEANS_MAX_AGE;
    use std::collections::HashSet;
    use std::sync::Arc;
    use std::time::Duration;
    use tokio::time::Instant;
    use worker::plane::{DeviceId, Load};

    /// A cache filled from scratch.
    fn anew(fleet: &[WorkerLoad], now: Instant) -> SnapshotCache {
        let mut snapshots = SnapshotCache::default();
        snapshots.refresh(fleet.len(), |at| &fleet[at], now.into());
        snapshots
    }

    #[test]
    fn refreshed_snapshots_equal_new_ones() {
        let (fleet, mut kept) = ((0..8).map(|_| WorkerLoad::default()).collect::<Vec<_>>(), SnapshotCache::default());
        // Two workers are in no group.
        let model = Arc::new(ModelStats::default());
        for (nth, load) in fleet[2..].iter().enumerate() {
            load.set_model_stats(&model, (nth < 4).then_some(DeviceId(nth as u64 / 2)));
        }
        let (start, mut open, mut ejected) = (Instant::now(), Vec::new(), HashSet::new());
        for round in 0..1_000 {
            let draw = splitmix64(round);
            // Slow enough that reports become stale and means are computed again each time.
            let now = start + 2 * MEANS_MAX_AGE * round as u32;
            let load = &fleet[(draw % 8) as usize];
            match draw >> 8 & 7 {
                0 => load.report(
                    Load {
                        running: (draw >> 16 & 15) as u32,
                        waiting_tokens: draw >> 20 & 4095,
                        total_blocks: 100,
                        prefill_tokens_per_second: (draw >> 32 & 1 == 0).then_some(500.0 + (draw >> 40 & 511) as f64),
                        decode_step_seconds: Some(0.01),
                        ..Load::default()
                    },
                    now,
                ),
                1 | 2 => {
                    let demand = Demand { prefill_tokens: 99, prompts: 1, ..Demand::default() };
                    open.push((load, load.book(demand, None, ExpectedOutput::default(), now)));
                }
                3 => open.drain(..open.len().min(2)).for_each(|(load, number)| load.release(number, 0, now)),
                4 => load.choose(),
                5 => load.eject_until(Some(Timestamp::from(now + Duration::from_millis(draw >> 16 & 2047)))),
                _ => {}
            }
            kept.refresh(fleet.len(), |at| &fleet[at], now.into());
            let new = anew(&fleet, now);
            assert_eq!((&kept.all, kept.busy), (&new.all, new.busy), "round {round}");
            assert_eq!(kept.queued_micros, new.queued_micros, "round {round}");
            assert_eq!(kept.devices.sums(), new.devices.sums(), "round {round}");
            let each: WorkerSequences = kept.all.iter().map(|snapshot| &snapshot.estimate).collect();
            assert_eq!((kept.sequences(), new.sequences()), (each, each), "round {round}");
            let counts = |cache: &SnapshotCache| (cache.ejected, cache.workers, cache.servers);
            assert_eq!((&kept.least_times, counts(&kept)), (&new.least_times, counts(&new)), "round {round}");
            ejected.extend(kept.all.iter().map(|snapshot| snapshot.ejected));
        }
        assert_eq!(ejected.len(), 2, "some were ejected");
    }

    #[test]
    fn a_silent_worker_is_passed_over_only_while_others_report() {
        let (fleet, start) = ([(), (), ()].map(|()| WorkerLoad::default()), Instant::now());
        fleet[..2].iter().for_each(|load| load.report(Load::default(), start));
        let passed_over = |now: Instant| {
            let snapshots = anew(&fleet, now);
            let each: Vec<bool> = snapshots.all().iter().map(|snapshot| snapshots.is_passed_over(snapshot)).collect();
            assert_eq!(snapshots.is_any_passed_over(), each.contains(&true));
            each
        };
        assert_eq!(passed_over(start), [false; 3]);
        let later = start + Duration::from_secs(6);
        assert_eq!(passed_over(later), [false; 3], "no reports arrive");
        fleet[0].report(Load::default(), later);
        assert_eq!(passed_over(later), [false, true, false]);
        let last = later + Duration::from_secs(6);
        fleet[0].eject_until(Some((last + Duration::from_secs(1)).into()));
        assert_eq!(passed_over(last), [true, false, false], "its circuit breaker says more");
    }

    #[test]
    fn own_workers_are_not_silent_because_servers_of_other_programs_report() {
        let fleet = [WorkerLoad::default(), WorkerLoad::default(), WorkerLoad::of_server(), WorkerLoad::of_server()];
        let start = Instant::now();
        let passed_over = |now: Instant| {
            let snapshots = anew(&fleet, now);
            let each: Vec<bool> = snapshots.all().iter().map(|snapshot| snapshots.is_passed_over(snapshot)).collect();
            assert_eq!(snapshots.is_any_passed_over(), each.contains(&true));
            each
        };
        for load in &fleet {
            load.report(Load::default(), start);
        }
        assert_eq!(passed_over(start), [false; 4]);
        let later = start + Duration::from_secs(6);
        for server in &fleet[2..] {
            server.report(Load::default(), later);
        }
        assert_eq!(passed_over(later), [false; 4], "the event plane is away");
        fleet[0].report(Load::default(), later);
        assert_eq!(passed_over(later), [false, true, false, false]);
        let last = later + Duration::from_secs(6);
        fleet[0].report(Load::default(), last);
        assert_eq!(passed_over(last), [false, true, true, true], "servers do not answer");
    }

    #[test]
    fn the_least_lost_share_follows_workers_that_have_measured_the_same() {
        let (model, start) = (Arc::new(ModelStats::default()), Instant::now());
        let fleet = [(), ()].map(|()| {
            let load = WorkerLoad::default();
            load.set_model_stats(&model, None);
            load.set_cache(100, false);
            load
        });
        let mut snapshots = SnapshotCache::default();
        let mut least = |blocks, now: Instant| {
            for load in &fleet {
                let demand = Demand { blocks, ..Demand::default() };
                load.release(load.book(demand, None, ExpectedOutput::default(), now), 0, now);
                load.report(Load { prefill_tokens_per_second: Some(1_000.0), ..Load::default() }, now);
            }
            snapshots.refresh(fleet.len(), |at| &fleet[at], now.into());
            snapshots.least_lost_share()
        };
        assert!(least(0, start) < 0.01, "nothing is used");
        assert!(least(1_000, start + 2 * MEANS_MAX_AGE) > 0.5, "a memory of 100 blocks is full within a second");
    }
}
