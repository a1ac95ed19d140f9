//! Load of one worker: its last report, plus bookings that are not in the report yet.
//!
//! A report describes the past. A request sent after the report counts on top of it; a request sent long enough before
//! the report is contained in it and does not count again. In between it is unknown whether the report contains the
//! request, so the larger of both counts is used: nothing counts twice. While reports are missing, only bookings count.

use super::published::PublishedLoad;
use super::stats::{LOWER_TIERS, LoadStats, MeasuredMask, Speeds, lower_tier};
use super::timestamp::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::time::Duration;
use tokio::time::Instant;
use worker::plane::Load;

/// What a request needs from a worker.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) struct Demand {
    /// Prompt tokens to compute on the worker.
    pub(crate) prefill_tokens: u64,
    /// G1 blocks for prompt and output.
    pub(crate) blocks: u64,
    /// Prompts to compute on the worker: 1 until the first token.
    pub(crate) prompts: u64,
    /// Sequences: 1 for a request that decodes on the worker.
    pub(crate) sequences: u64,
}

/// Load of one worker, shared by the requests and the feed.
pub(crate) struct WorkerLoad {
    state: Mutex<State>,
    /// The part of `state` that decisions read without a lock.
    published: PublishedLoad,
}

#[derive(Default)]
struct State {
    report: Option<(Load, Instant)>,
    /// Open bookings by number. Ordered, so that iteration is deterministic.
    open: BTreeMap<u64, OpenBooking>,
    last: u64,
    /// Sum over all open bookings.
    total: Demand,
    /// Sum over bookings with [`InReport::No`].
    not_in_report: Demand,
    /// Sum over bookings with [`InReport::Maybe`].
    maybe_in_report: Demand,
    /// Sum over bookings that wait in other routers.
    remote: Demand,
    /// Sum over bookings that the latest report may contain and that have ended since. Without prefill: it is unknown
    /// how much of it was left to compute at the time of the report.
    ended_since_report: Demand,
    step: Option<f64>,
    handoff_overhead: Option<f64>,
    mean_duration: Option<f64>,
}

/// The load of a worker as one decision reads it.
pub(crate) struct LoadReading {
    pub(crate) stats: LoadStats,
    pub(crate) measured: MeasuredMask,
    /// The worker is ejected: it is silent, or its circuit breaker is not closed.
    pub(crate) ejected: bool,
    /// Number of the choice that last chose the worker; 0 means never.
    pub(crate) chosen: u64,
    /// The reading expires then, even if the version does not change.
    pub(crate) until: Option<Timestamp>,
}

struct OpenBooking {
    demand: Demand,
    booked: Instant,
    /// When the request was sent to the worker; `None` while its prefill runs on another worker.
    sent: Option<Instant>,
    in_report: InReport,
    started: bool,
    /// The request waits in another router, or is about to be sent by it.
    remote: bool,
}

/// Whether the latest report contains a booking.
#[derive(Clone, Copy, PartialEq, Eq)]
enum InReport {
    /// The report came before the request was sent.
    No,
    /// The report came so soon after the request was sent that they may have crossed.
    Maybe,
    Yes,
}

/// A request sent this long before a report is contained in it: one network hop and the engine's next step.
const IN_REPORT_AFTER: Duration = Duration::from_millis(50);
/// Reports come at least once a second. After three missed reports the last one is stale.
const STALE_AFTER: Duration = Duration::from_secs(3);
/// After five missed reports a worker that used to report is ejected while other workers are available.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// Weight of a new measurement in the exponentially weighted moving averages: about the last ten count.
const EWMA_WEIGHT: f64 = 0.1;

impl WorkerLoad {
    /// Adds a booking. Returns its number.
    pub(crate) fn book(&self, demand: Demand, now: Instant) -> u64 {
        self.lock().book(demand, now, false)
    }

    /// Adds a booking of another router. Returns its number.
    pub(crate) fn book_remote(&self, demand: Demand, now: Instant) -> u64 {
        self.lock().book(demand, now, true)
    }

    /// Sum of the bookings of other routers that are not sent yet.
    pub(crate) fn remote(&self) -> Demand {
        self.state().remote
    }

    /// Sum over all open bookings.
    #[cfg(test)]
    pub(crate) fn booked(&self) -> Demand {
        self.state().total
    }

    /// The other router's request has left its admission queue and will be sent.
    pub(crate) fn dequeued(&self, number: u64) {
        self.lock().change(number, |booking| booking.remote = false);
    }

    /// The request was sent to the worker.
    pub(crate) fn sent(&self, number: u64, now: Instant) {
        self.lock().change(number, |booking| {
            booking.sent = Some(now);
            booking.remote = false;
        });
    }

    /// Changes the number of prompt tokens that the request computes on this worker.
    pub(crate) fn revise(&self, number: u64, prefill_tokens: u64) {
        self.lock().change(number, |booking| {
            booking.demand.prefill_tokens = prefill_tokens;
            booking.demand.prompts = 1;
        });
    }

    /// Changes what a request takes that was not sent yet. Returns whether that is a change.
    pub(crate) fn rebook(&self, number: u64, demand: Demand) -> bool {
        if self.state().open.get(&number).is_none_or(|booking| booking.demand == demand) {
            return false;
        }
        self.lock().change(number, |booking| booking.demand = demand);
        true
    }

    /// The first token was received: no prefill is left.
    pub(crate) fn started(&self, number: u64) {
        self.lock().change(number, |booking| {
            booking.demand.prefill_tokens = 0;
            booking.demand.prompts = 0;
            booking.started = true;
            booking.remote = false;
        });
    }

    /// Removes a booking.
    pub(crate) fn release(&self, number: u64, now: Instant) {
        let mut state = self.lock();
        let mut left = Demand::default();
        state.change(number, |booking| left = std::mem::take(&mut booking.demand));
        let Some(booking) = state.open.remove(&number) else { return };
        if booking.in_report != InReport::No {
            state.ended_since_report.add(Demand { prefill_tokens: 0, prompts: 0, ..left });
        }
        if booking.started {
            average(&mut state.mean_duration, (now - booking.booked).as_secs_f64());
        }
    }

    /// Records a report.
    pub(crate) fn report(&self, load: Load, now: Instant) {
        let mut state = self.lock();
        let unseen =
            state.open.iter().filter(|(_, booking)| booking.in_report != InReport::Yes && booking.sent.is_some());
        let numbers: Vec<u64> = unseen.map(|(number, _)| *number).collect();
        for number in numbers {
            state.change(number, |booking| match booking.sent {
                Some(sent) if sent + IN_REPORT_AFTER <= now => booking.in_report = InReport::Yes,
                Some(_) => booking.in_report = InReport::Maybe,
                None => {}
            });
        }
        if let Some(step) = load.decode_step_seconds.filter(|step| *step > 0.0 && load.running > 0) {
            average(&mut state.step, step / f64::from(load.running));
        }
        state.ended_since_report = Demand::default();
        state.report = Some((load, now));
    }

    /// Records the seconds of a KV hand-off without the transfer.
    pub(crate) fn handed_off(&self, seconds: f64) {
        average(&mut self.lock().handoff_overhead, seconds);
    }

    /// The latest report, unless it is stale.
    pub(crate) fn latest(&self, now: Instant) -> Option<Load> {
        self.state()
            .report
            .as_ref()
            .filter(|(_, at)| now.saturating_duration_since(*at) <= STALE_AFTER)
            .map(|(load, _)| load.clone())
    }

    /// Whether the worker has reported before and now does not.
    #[inline]
    pub(crate) fn is_silent(&self, now: impl Into<Timestamp>) -> bool {
        self.published.age(now.into()).is_some_and(|age| age > SILENT_AFTER.as_nanos() as u64)
    }

    /// The current load of the worker.
    pub(crate) fn stats(&self, now: impl Into<Timestamp>) -> LoadStats {
        self.read(now.into()).stats
    }

    /// Changes whenever a reading changes, except when only time has passed.
    #[inline]
    pub(crate) fn version(&self) -> u32 {
        self.published.version()
    }

    /// Reads all that a decision needs.
    pub(crate) fn read(&self, now: Timestamp) -> LoadReading {
        let (age, ejected_until) = (self.published.age(now), self.published.ejected_until());
        let older = |than: Duration| age.is_some_and(|age| age > than.as_nanos() as u64);
        let becomes_older = |than: Duration| Some(now.after((than.as_nanos() as u64 + 1).checked_sub(age?)?));
        let ejection_ends = (now.bits() < ejected_until).then(|| now.after(ejected_until - now.bits()));
        LoadReading {
            // A worker that never reported has no fresh report and is not silent.
            stats: self.published.stats(age.is_some() && !older(STALE_AFTER)),
            measured: self.published.measured(),
            ejected: ejection_ends.is_some() || older(SILENT_AFTER),
            chosen: self.published.chosen(),
            until: [ejection_ends, becomes_older(STALE_AFTER), becomes_older(SILENT_AFTER)].into_iter().flatten().min(),
        }
    }

    /// Whether the worker is to be passed over while others are available.
    pub(crate) fn is_ejected(&self, now: impl Into<Timestamp>) -> bool {
        self.read(now.into()).ejected
    }

    /// Ejects the worker until then; `None` ends the ejection.
    pub(crate) fn eject_until(&self, until: Option<Timestamp>) {
        self.published.set_ejected_until(until);
    }

    /// Records the number of the choice that chose the worker.
    pub(crate) fn choose(&self, nth: u64) {
        self.published.choose(nth);
    }

    /// The state, for reading only: changes made through this guard are not published.
    fn state(&self) -> MutexGuard<'_, State> {
        // Sums and bookings change together, and nothing panics in between.
        self.state.lock()
    }

    fn lock(&self) -> WriteGuard<'_> {
        WriteGuard { state: self.state(), load: self }
    }
}

impl Default for WorkerLoad {
    fn default() -> Self {
        let load = Self { state: Mutex::default(), published: PublishedLoad::default() };
        drop(load.lock());
        load
    }
}

/// Write access to the state. Dropping it publishes the changes.
struct WriteGuard<'a> {
    state: MutexGuard<'a, State>,
    load: &'a WorkerLoad,
}

impl Deref for WriteGuard<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for WriteGuard<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

impl Drop for WriteGuard<'_> {
    fn drop(&mut self) {
        let reported = self.state.report.as_ref().map(|(_, at)| Timestamp::from(*at));
        self.load.published.publish(reported, &self.state.stats(true), &self.state.stats(false));
    }
}

impl State {
    /// The load, computed with a fresh (`true`) or a stale (`false`) report.
    fn stats(&self, fresh: bool) -> LoadStats {
        let Self {
            total,
            not_in_report,
            maybe_in_report,
            ended_since_report,
            step,
            handoff_overhead,
            mean_duration,
            ..
        } = self;
        let (step, handoff_overhead, mean_duration) =
            ((*step).into(), (*handoff_overhead).into(), (*mean_duration).into());
        let mut stats = LoadStats {
            waiting_tokens: count(total.prefill_tokens),
            prompts: count(total.prompts),
            sequences: count(total.sequences),
            active_blocks: count(total.blocks),
            total_blocks: 0,
            queued: [0; LOWER_TIERS],
            speeds: Speeds { step, handoff_overhead, mean_duration, ..Speeds::default() },
        };
        let Some((load, _)) = &self.report else { return stats };
        // A stale report may still be larger than the bookings, which do not contain other routers' running requests.
        let join = |reported: u64, of: fn(&Demand) -> u64| {
            let reported = reported.saturating_sub(of(ended_since_report));
            count(if fresh { of(not_in_report) + reported.max(of(maybe_in_report)) } else { reported.max(of(total)) })
        };
        let sequences = u64::from(load.running) + u64::from(load.waiting);
        stats.waiting_tokens = join(load.waiting_tokens, |demand| demand.prefill_tokens);
        // The report omits prompts that are being computed, so the router's own bookings are a lower bound.
        stats.prompts = join(u64::from(load.waiting), |demand| demand.prompts).max(count(total.prompts));
        stats.sequences = join(sequences, |demand| demand.sequences);
        stats.active_blocks = join(load.active_blocks, |demand| demand.blocks);
        stats.total_blocks = count(load.total_blocks);
        stats.speeds.prefill = load.prefill_tokens_per_second.filter(|speed| *speed > 0.0).into();
        stats.speeds.block_bytes = Some(load.block_bytes as f64).filter(|bytes| *bytes > 0.0).into();
        for speed in load.onboard.iter().filter(|speed| speed.bytes_per_second > 0.0) {
            stats.speeds.set_onboard(speed.level, speed.latency_seconds, speed.bytes_per_second);
            if let Some(queued) = lower_tier(speed.level).and_then(|at| stats.queued.get_mut(at)) {
                *queued = count(speed.queued_blocks);
            }
        }
        stats
    }

    fn book(&mut self, demand: Demand, booked: Instant, remote: bool) -> u64 {
        self.last += 1;
        let nothing = Demand::default();
        let booking =
            OpenBooking { demand: nothing, booked, sent: None, in_report: InReport::No, started: false, remote };
        self.open.insert(self.last, booking);
        self.change(self.last, |booking| booking.demand = demand);
        self.last
    }

    /// Changes a booking and the sums that contain it.
    fn change(&mut self, number: u64, change: impl FnOnce(&mut OpenBooking)) {
        let Self { open, total, not_in_report, maybe_in_report, remote, .. } = self;
        let Some(booking) = open.get_mut(&number) else { return };
        let mut sums = |booking: &OpenBooking, apply: fn(&mut Demand, Demand)| {
            apply(total, booking.demand);
            match booking.in_report {
                InReport::No => apply(not_in_report, booking.demand),
                InReport::Maybe => apply(maybe_in_report, booking.demand),
                InReport::Yes => {}
            }
            if booking.remote {
                apply(remote, booking.demand);
            }
        };
        sums(booking, Demand::sub);
        change(booking);
        sums(booking, Demand::add);
    }
}

impl Demand {
    pub(crate) fn plus(mut self, other: Self) -> Self {
        self.add(other);
        self
    }

    pub(crate) fn add(&mut self, other: Self) {
        self.prefill_tokens += other.prefill_tokens;
        self.prompts += other.prompts;
        self.blocks += other.blocks;
        self.sequences += other.sequences;
    }

    pub(crate) fn sub(&mut self, other: Self) {
        self.prefill_tokens -= other.prefill_tokens;
        self.prompts -= other.prompts;
        self.blocks -= other.blocks;
        self.sequences -= other.sequences;
    }
}

/// The count as decisions read it, saturated at `u32::MAX`.
fn count(count: u64) -> u32 {
    count.try_into().unwrap_or(u32::MAX)
}

fn average(value: &mut Option<f64>, newest: f64) {
    *value = Some(value.map_or(newest, |value| value + EWMA_WEIGHT * (newest - value)));
}

#[cfg(test)]
mod tests {
    use super::*;

    const REQUEST: Demand = Demand { prefill_tokens: 100, prompts: 1, blocks: 10, sequences: 1 };

    fn report(waiting_tokens: u64) -> Load {
        Load { waiting_tokens, ..Load::default() }
    }

    #[tokio::test(start_paused = true)]
    async fn a_booking_and_the_report_of_it_count_once() {
        let load = WorkerLoad::default();
        let number = load.book(REQUEST, Instant::now());
        assert_eq!(load.stats(Instant::now()).waiting_tokens, 100);
        load.sent(number, Instant::now());
        load.report(report(0), Instant::now());
        assert_eq!(load.stats(Instant::now()).waiting_tokens, 100, "the report is as old as the request");
        load.report(report(100), Instant::now());
        assert_eq!(load.stats(Instant::now()).waiting_tokens, 100, "the report may contain it, so it counts once");
        tokio::time::advance(IN_REPORT_AFTER).await;
        load.report(Load { running: 2, active_blocks: 25, ..report(80) }, Instant::now());
        assert_eq!(load.stats(Instant::now()).waiting_tokens, 80);
        load.release(number, Instant::now());
        let stats = load.stats(Instant::now());
        assert_eq!((stats.sequences, stats.active_blocks), (1, 15), "it has ended since the report");
        load.report(Load { running: 1, active_blocks: 15, ..report(0) }, Instant::now());
        assert_eq!(load.stats(Instant::now()).sequences, 1, "the next report contains its end");
    }

    #[tokio::test(start_paused = true)]
    async fn reading_keeps_the_version_and_started_requests_are_local() {
        let (load, now) = (WorkerLoad::default(), Instant::now());
        let number = load.book_remote(REQUEST, now);
        let version = load.version();
        assert_eq!((load.remote(), load.latest(now)), (REQUEST, None));
        assert_eq!(load.version(), version);
        load.started(number);
        assert_eq!(load.remote(), Demand::default());
    }

    #[tokio::test(start_paused = true)]
    async fn an_unsent_booking_counts_beside_any_report() {
        let load = WorkerLoad::default();
        let number = load.book(Demand { prefill_tokens: 0, prompts: 0, ..REQUEST }, Instant::now());
        tokio::time::advance(Duration::from_secs(1)).await;
        load.report(report(0), Instant::now());
        assert_eq!(load.stats(Instant::now()).active_blocks, 10);
        load.revise(number, 100);
        assert_eq!(load.stats(Instant::now()).waiting_tokens, 100);
    }

    #[tokio::test(start_paused = true)]
    async fn a_stale_report_leaves_the_bookings_to_count() {
        let load = WorkerLoad::default();
        load.report(report(0), Instant::now());
        let number = load.book(REQUEST, Instant::now());
        load.sent(number, Instant::now());
        tokio::time::advance(Duration::from_secs(1)).await;
        load.report(report(0), Instant::now());
        tokio::time::advance(STALE_AFTER + Duration::from_millis(1)).await;
        assert_eq!(load.stats(Instant::now()).waiting_tokens, 100);
        assert!(!load.is_silent(Instant::now()));
        tokio::time::advance(SILENT_AFTER).await;
        assert!(load.is_silent(Instant::now()));
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_token_frees_the_prefill_and_the_release_the_rest() {
        let load = WorkerLoad::default();
        let number = load.book(REQUEST, Instant::now());
        load.started(number);
        let stats = load.stats(Instant::now());
        assert_eq!((stats.waiting_tokens, stats.active_blocks, stats.sequences), (0, 10, 1));
        tokio::time::advance(Duration::from_secs(2)).await;
        load.release(number, Instant::now());
        let stats = load.stats(Instant::now());
        assert_eq!((stats.active_blocks, stats.sequences), (0, 0));
        assert_eq!(stats.speeds.mean_duration.get(), Some(2.0));
    }
}
