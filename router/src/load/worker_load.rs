//! Load of one worker: its last report, plus bookings that are not in the report yet.
//!
//! A report describes the past. A request sent after the report counts on top of it; a request sent long enough before
//! the report is contained in it and does not count again. In between it is unknown whether the report contains the
//! request, so the larger of both counts is used: nothing counts twice. While reports are missing, only bookings count.
//!
//! The reports of a server of another program contain the requests of other routers a second late, or not at all. There
//! the bookings of all routers are a lower bound of what the report says.

use super::demand::Demand;
use super::least_squares::LeastSquares;
use super::model_stats::ModelStats;
use super::output_lengths::ExpectedOutput;
use super::prefill_time::{PrefillGroup, PrefillWork};
use super::published::PublishedLoad;
use super::stats::{LOWER_TIERS, LoadStats, MeasuredMask, Speeds, lower_tier};
use super::step_time::StepTime;
use super::timestamp::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use std::collections::BTreeMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::time::Instant;
use worker::plane::Load;

/// Load of one worker, shared by the requests and the feed.
pub(crate) struct WorkerLoad {
    state: Mutex<State>,
    /// What is learned of the model, once the worker serves one.
    model: OnceLock<Arc<ModelStats>>,
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
    /// Duration of decode steps and of prompts, relative to those on an average worker.
    step_pace: Option<f64>,
    prefill_pace: Option<f64>,
    /// The prompts that were done last.
    prefills: Option<PrefillGroup>,
    /// Mean of what the sequences had still to generate, at the latest report.
    rest_tokens: Option<f64>,
    /// Seconds from one token of a request to the next.
    token_interval: Option<f64>,
    /// Seconds of a hand-over after its prefill: constant, and per estimated second of the whole transfer. The last few
    /// hundred count: they are rarer than steps, and networks change.
    handoffs: LeastSquares<2, 256>,
    mean_duration: Option<f64>,
    /// Reports contain the requests of other routers late, or not at all.
    is_server: bool,
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
    /// When the first token was received.
    started: Option<Instant>,
    /// Prompt tokens that are cached on the worker; `None` if the time of the prompt says nothing of its prefill.
    cached_tokens: Option<u64>,
    output: ExpectedOutput,
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
/// The same for the pace of a worker: about the last hundred count, because one step or prompt says more of itself than
/// of the worker.
const PACE_WEIGHT: f64 = 0.01;
/// Range of a measured pace: beyond it the measurement is wrong.
const PACES: (f64, f64) = (0.05, 20.0);

impl WorkerLoad {
    /// The load of a server of another program, which this router reports itself.
    pub(crate) fn of_server() -> Self {
        let load = Self::default();
        load.lock().is_server = true;
        load
    }

    /// Has the worker's measurements count for a model.
    pub(crate) fn learn_for(&self, model: &Arc<ModelStats>) {
        // A worker keeps its model.
        let _ = self.model.set(model.clone());
    }

    /// Adds a booking. `cached_tokens`: of the prompt, if the worker computes the rest of it. Returns its number.
    pub(crate) fn book(&self, demand: Demand, cached_tokens: Option<u64>, output: ExpectedOutput, now: Instant) -> u64 {
        self.lock().book(demand, cached_tokens, output, now, false)
    }

    /// Adds a booking of another router. Returns its number.
    pub(crate) fn book_remote(&self, demand: Demand, now: Instant) -> u64 {
        self.lock().book(demand, None, ExpectedOutput::default(), now, true)
    }

    /// Number of open bookings.
    pub(crate) fn reservations(&self) -> usize {
        self.state().open.len()
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
        // Of a request of this router, no sum depends on when it was sent, so that there is nothing to publish.
        if let Some(booking) = self.state().open.get_mut(&number).filter(|booking| !booking.remote) {
            booking.sent = Some(now);
            return;
        }
        self.lock().change(number, |booking| {
            booking.sent = Some(now);
            booking.remote = false;
        });
    }

    /// Changes the number of prompt tokens that the request computes on this worker.
    pub(crate) fn revise(&self, number: u64, prefill_tokens: u64) {
        self.lock().change(number, |booking| {
            booking.demand.prefill_tokens = prefill_tokens;
            booking.demand.timed_tokens = 0;
            booking.demand.prefill_micros = 0;
            booking.demand.prompts = 1;
            booking.cached_tokens = None;
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
    pub(crate) fn started(&self, number: u64, now: Instant) {
        let mut state = self.lock();
        if let Some(model) = self.model.get()
            && let Some(group) = state.prefilled(number, &model.step_time(), now)
            && let Some(ratio) = model.prefill_measured(&group)
        {
            pace(&mut state.prefill_pace, ratio);
        }
        state.change(number, |booking| {
            booking.demand.prefill_tokens = 0;
            booking.demand.timed_tokens = 0;
            booking.demand.prefill_micros = 0;
            booking.demand.prompts = 0;
            booking.started = Some(now);
            booking.remote = false;
        });
    }

    /// Removes a booking. `generated`: tokens that the request has generated, 0 when unknown.
    pub(crate) fn release(&self, number: u64, generated: u64, now: Instant) {
        let mut state = self.lock();
        let mut left = Demand::default();
        state.change(number, |booking| left = std::mem::take(&mut booking.demand));
        let Some(booking) = state.open.remove(&number) else { return };
        if booking.in_report != InReport::No {
            state.ended_since_report.add(Demand {
                prefill_tokens: 0,
                timed_tokens: 0,
                prefill_micros: 0,
                prompts: 0,
                ..left
            });
        }
        if let Some(started) = booking.started {
            average(&mut state.mean_duration, (now - booking.booked).as_secs_f64());
            if generated > 1 {
                average(&mut state.token_interval, (now - started).as_secs_f64() / (generated - 1) as f64);
            }
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
        state.rest_tokens = state.rest_tokens(load.decode_step_seconds, now);
        if let Some([sequences, context_tokens, seconds]) = state.step_sample(&load)
            && let Some(model) = self.model.get()
        {
            let ratio = model.step_measured(sequences, context_tokens, seconds);
            pace(&mut state.step_pace, ratio);
        }
        state.ended_since_report = Demand::default();
        state.report = Some((load, now));
    }

    /// Records a hand-over to the worker: the estimated seconds for all of its blocks, and those from the end of the
    /// prefill to the first token.
    pub(crate) fn handed_off(&self, transfer: f64, seconds: f64) {
        self.lock().handoffs.add([1.0, transfer], seconds);
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
        let load = Self { state: Mutex::default(), model: OnceLock::new(), published: PublishedLoad::default() };
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
            rest_tokens,
            handoffs,
            mean_duration,
            ..
        } = self;
        let handoff = handoffs.coefficients();
        let mut stats = LoadStats {
            waiting_tokens: count(total.prefill_tokens),
            prompts: count(total.prompts),
            sequences: count(total.sequences),
            active_blocks: count(total.blocks),
            context_tokens: count(total.context_tokens),
            rest_tokens: (*rest_tokens).into(),
            waiting_seconds: total.waiting_seconds(total.prefill_tokens),
            step_pace: self.step_pace.into(),
            prefill_pace: self.prefill_pace.into(),
            queued: [0; LOWER_TIERS],
            speeds: Speeds {
                handoff_overhead: handoff.map(|[overhead, _]| overhead).into(),
                handoff_transfer: handoff.map(|[_, transfer]| transfer).into(),
                mean_duration: (*mean_duration).into(),
                ..Speeds::default()
            },
            ..LoadStats::default()
        };
        let Some((load, _)) = &self.report else { return stats };
        // A stale report may still be larger than the bookings, which do not contain other routers' running requests.
        let join = |reported: u64, of: fn(&Demand) -> u64| {
            let reported = reported.saturating_sub(of(ended_since_report));
            count(if fresh { of(not_in_report) + reported.max(of(maybe_in_report)) } else { reported.max(of(total)) })
        };
        let sequences = u64::from(load.running) + u64::from(load.waiting);
        stats.waiting_tokens = join(load.waiting_tokens, |demand| demand.prefill_tokens);
        // An engine finds out what is cached of a prompt when it leaves the queue, so while prompts are queued it
        // reports more than is to be computed. The bookings know it, and are all that there is, unless the report
        // contains requests of others.
        let in_report = |of: fn(&Demand) -> u64| of(total) - of(not_in_report);
        let booked = in_report(|demand| demand.sequences).max(in_report(|demand| demand.prompts));
        if load.waiting > 0 && sequences <= booked + ended_since_report.sequences {
            stats.waiting_tokens = stats.waiting_tokens.min(count(total.prefill_tokens));
        }
        let booked_at_least = |booked: u64| if self.is_server { count(booked) } else { 0 };
        stats.waiting_tokens = stats.waiting_tokens.max(booked_at_least(total.prefill_tokens));
        stats.waiting_seconds = total.waiting_seconds(stats.waiting_tokens.into());
        // The report omits prompts that are being computed, so the router's own bookings are a lower bound.
        stats.prompts = join(u64::from(load.waiting), |demand| demand.prompts).max(count(total.prompts));
        stats.sequences = join(sequences, |demand| demand.sequences).max(booked_at_least(total.sequences));
        stats.active_blocks = join(load.active_blocks, |demand| demand.blocks);
        // Requests that wait for the batch hold no blocks yet, but are before any new one.
        let waiting = (total.blocks * u64::from(load.waiting)).checked_div(total.sequences).unwrap_or(0);
        stats.active_blocks = stats.active_blocks.saturating_add(count(waiting));
        stats.total_blocks = count(load.total_blocks);
        // The bookings know the contexts; sequences of others are taken to have as much each.
        if total.sequences > 0 {
            let each = total.context_tokens as f64 / total.sequences as f64;
            stats.context_tokens = count((each * f64::from(stats.sequences)) as u64);
        }
        stats.sequences_max = load.sequences_max;
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

    /// What the sequences have still to generate, on average; `None` without any.
    fn rest_tokens(&self, step: Option<f64>, now: Instant) -> Option<f64> {
        let interval = self.token_interval.or(step).filter(|interval| *interval > 0.0)?;
        let (mut sum, mut sequences) = (0.0, 0.0);
        for booking in self.open.values().filter(|booking| booking.demand.sequences > 0) {
            let running = booking.started.map_or(0.0, |started| (now - started).as_secs_f64());
            sum += booking.output.rest(running / interval);
            sequences += 1.0;
        }
        (sequences > 0.0).then(|| sum / sequences)
    }

    /// The decode step of a report, if it is a new one: sequences, tokens of context, seconds.
    fn step_sample(&self, load: &Load) -> Option<[f64; 3]> {
        let seconds = load.decode_step_seconds.filter(|step| *step > 0.0 && load.running > 0)?;
        let is_known = self.report.as_ref().is_some_and(|(before, _)| before.decode_step_seconds == Some(seconds));
        let (running, total) = (f64::from(load.running), self.total);
        let context_tokens = total.context_tokens as f64 * running / total.sequences as f64;
        (!is_known && total.sequences > 0).then_some([running, context_tokens, seconds])
    }

    /// Records that a prompt is done. Returns the prompts that were done before it, if that group is complete.
    /// `step`: of an average worker.
    fn prefilled(&mut self, number: u64, step: &StepTime, now: Instant) -> Option<PrefillGroup> {
        let booking = self.open.get(&number)?;
        let (sent, cached_tokens) = (booking.sent?, booking.cached_tokens?);
        let work = PrefillWork::of(booking.demand.prefill_tokens, cached_tokens);
        // Where requests wait for memory or for a place in the batch, their times say nothing of prefill.
        let is_full = |(load, _): &(Load, Instant)| {
            (load.sequences_max > 0 && load.running >= load.sequences_max)
                || (load.waiting > 0 && load.active_blocks * 10 > load.total_blocks * 9)
        };
        if self.report.as_ref().is_some_and(is_full) {
            self.prefills = None;
            return None;
        }
        let (sequences, context_tokens) = self.total.decoding();
        let step = step.seconds(sequences, context_tokens) * self.step_pace.unwrap_or(1.0);
        PrefillGroup::add(&mut self.prefills, work, step, sent, now)
    }

    fn book(
        &mut self,
        demand: Demand,
        cached_tokens: Option<u64>,
        output: ExpectedOutput,
        booked: Instant,
        remote: bool,
    ) -> u64 {
        self.last += 1;
        let (nothing, in_report) = (Demand::default(), InReport::No);
        let booking = OpenBooking {
            demand: nothing,
            booked,
            sent: None,
            in_report,
            started: None,
            cached_tokens,
            output,
            remote,
        };
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

fn pace(value: &mut Option<f64>, measured: f64) {
    let (measured, before) = (measured.clamp(PACES.0, PACES.1), value.unwrap_or(1.0));
    *value = Some(before + (measured - before) * PACE_WEIGHT);
}

/// The count as decisions read it, saturated at `u32::MAX`.
fn count(count: u64) -> u32 {
    count.try_into().unwrap_or(u32::MAX)
}

fn average(value: &mut Option<f64>, newest: f64) {
    *value = Some(value.map_or(newest, |value| value + EWMA_WEIGHT * (newest - value)));
}

#[cfg(test)]
mod tests;
