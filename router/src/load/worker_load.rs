//! Load of one worker: its last report, plus bookings that are not in the report yet.
//!
//! A report describes the past. A request sent after the report counts on top of it; a request sent long enough before
//! the report is contained in it and does not count again. In between it is unknown whether the report contains the
//! request, so the larger of both counts is used: nothing counts twice. While reports are missing, only bookings count.
//!
//! The reports of a server of another program contain the requests of other routers a second late, or not at all. There
//! the bookings of all routers are a lower bound of what the report says.

mod state;

use super::demand::Demand;
use super::load_changes::LoadChanges;
use super::model_stats::ModelStats;
use super::output_lengths::ExpectedOutput;
use super::pace::Pace;
use super::published::PublishedLoad;
use super::stats::{DEFAULT_BLOCK_TOKENS, LoadStats, MeasuredMask};
use super::timestamp::Timestamp;
use parking_lot::{Mutex, MutexGuard};
use state::{InReport, State, average};
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::time::Instant;
use worker::plane::{DeviceId, Load};

/// Load of one worker, shared by the requests and the feed.
pub(crate) struct WorkerLoad {
    state: Mutex<State>,
    /// What is learned of the model, once the worker serves one.
    model_stats: OnceLock<Arc<ModelStats>>,
    /// What computes, if it is known.
    device: OnceLock<DeviceId>,
    /// How fast the device of the worker is.
    pace: OnceLock<Arc<Mutex<Pace>>>,
    /// Tokens of a block; 0 when unknown.
    block_tokens: AtomicU32,
    /// Blocks that the memory of the worker holds; 0 when only its reports say it.
    memory_blocks: AtomicU64,
    /// Whether the worker loads blocks from a store.
    has_store: AtomicBool,
    /// The worker is a server of another program. This router reports its load itself, and such reports contain the
    /// requests of other routers late, or not at all.
    is_server: bool,
    /// The part of `state` that decisions read without a lock.
    published: PublishedLoad,
    /// Where changes of `published` are counted, once the worker serves a model.
    change_group: OnceLock<(Arc<LoadChanges>, usize)>,
}

/// Whether a worker reports its load.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) enum Reports {
    /// It never has.
    #[default]
    Never,
    Current,
    /// The worker is silent: it used to.
    Stopped,
}

/// The load of a worker as one decision reads it.
pub(crate) struct LoadReading {
    pub(crate) stats: LoadStats,
    pub(crate) measured: MeasuredMask,
    /// The worker is ejected: its circuit breaker is not closed, or it asked for no requests.
    pub(crate) ejected: bool,
    /// Whether the worker reports its load.
    pub(crate) reports: Reports,
    /// The worker is a server of another program, whose reports do not come over the event plane.
    pub(crate) is_server: bool,
    /// The ejection has an end: the worker answers health checks and its requests failed, or it asked for no requests.
    pub(crate) temporarily_ejected: bool,
    /// Number of the choice for its model that last chose the worker; 0 means never.
    pub(crate) chosen: u64,
    /// The reading expires then, even if the version does not change.
    pub(crate) until: Option<Timestamp>,
}

/// A request sent this long before a report is contained in it: one network hop and the engine's next step.
const IN_REPORT_AFTER: Duration = Duration::from_millis(50);
/// Reports come at least once a second. After three missed reports the last one is stale.
const STALE_AFTER: Duration = Duration::from_secs(3);
/// After five missed reports a worker that used to report is ejected while other workers are available.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// An ejection that ends within this time has an end that is known: more than the longest back-pressure and wait for a
/// trial, and less than that of an open breaker, which stands for no end.
const MAX_TEMPORARY_EJECTION: Duration = Duration::from_hours(1);

impl WorkerLoad {
    /// The load of a server of another program, which this router reports itself.
    pub(crate) fn of_server() -> Self {
        Self { is_server: true, ..Self::default() }
    }

    /// Sets the tokens of a block, by which the price of a block is estimated whose bytes the worker does not report.
    pub(crate) fn set_block_tokens(&self, tokens: usize) {
        self.block_tokens.store(tokens as u32, Ordering::Relaxed);
    }

    /// Sets how many blocks the memory of the worker holds, 0 when only its reports say it, and whether it loads others
    /// from a store.
    pub(crate) fn set_cache(&self, memory_blocks: u64, has_store: bool) {
        self.memory_blocks.store(memory_blocks, Ordering::Relaxed);
        self.has_store.store(has_store, Ordering::Relaxed);
    }

    /// Sets where measurements of the worker are recorded: in the statistics of its model. `device`: what computes; its
    /// workers share a pace. A worker whose device is not known has a pace of its own.
    pub(crate) fn set_model_stats(&self, stats: &Arc<ModelStats>, device: Option<DeviceId>) {
        // A worker keeps its model and its device.
        self.change_group.get_or_init(|| (stats.changes().clone(), stats.changes().next_group()));
        if let Some(device) = device {
            let _ = self.device.set(device);
        }
        let _ = self.pace.set(stats.pace_of(device));
        let _ = self.model_stats.set(stats.clone());
    }

    /// What computes, if it is known.
    pub(super) fn device(&self) -> Option<DeviceId> {
        self.device.get().copied()
    }

    fn pace(&self) -> Pace {
        self.pace.get().map(|pace| *pace.lock()).unwrap_or_default()
    }

    /// Adds a booking. `cached_tokens`: of the prompt, if the worker computes the rest of it. Returns its number.
    pub(crate) fn book(&self, demand: Demand, cached_tokens: Option<u64>, output: ExpectedOutput, now: Instant) -> u64 {
        let mut state = self.lock();
        self.use_blocks(&mut state, &demand, now);
        state.book(demand, cached_tokens, output, now, false)
    }

    /// Adds a booking of another router, whose output is expected to be as long as those of the model. Returns its
    /// number.
    pub(crate) fn book_remote(&self, demand: Demand, now: Instant) -> u64 {
        let output = self.model_stats.get().map(|model| model.expect_any_output()).unwrap_or_default();
        let mut state = self.lock();
        self.use_blocks(&mut state, &demand, now);
        state.book(demand, None, output, now, true)
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
            booking.demand = Demand { prefill_tokens, prompts: 1, ..booking.demand.without_prompt() };
            booking.cached_tokens = None;
        });
    }

    /// Changes the demand of a request that was not sent yet. Returns whether it differs from the present one.
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
        if let Some(model) = self.model_stats.get()
            && let Some(group) = state.prefilled(number, &model.step_time(), self.pace(), now)
            && let Some(ratio) = model.prefill_measured(&group)
            && let Some(pace) = self.pace.get()
        {
            pace.lock().prefill_measured(ratio);
        }
        state.change(number, |booking| {
            booking.demand = booking.demand.without_prompt();
            // Of another router's request, the message that it was sent may have been lost. The further choices of a
            // relayed response are part of the first one's request. A decode worker may answer before the prefill ends.
            booking.sent.get_or_insert(now);
            booking.started = Some(now);
            booking.remote = false;
        });
    }

    /// Removes a booking. `generated`: tokens that the request has generated, 0 when unknown.
    pub(crate) fn release(&self, number: u64, generated: u64, now: Instant) {
        let mut state = self.lock();
        let mut demand = Demand::default();
        state.change(number, |booking| demand = std::mem::take(&mut booking.demand));
        let Some(booking) = state.open.remove(&number) else { return };
        if booking.in_report != InReport::No {
            state.ended_since_report.add(demand.without_prompt());
        }
        if let Some(started) = booking.started {
            average(&mut state.mean_duration, (now - booking.booked_at).as_secs_f64());
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
            && let Some(model) = self.model_stats.get()
        {
            let ratio = model.step_measured(sequences, context_tokens, seconds);
            if let Some(pace) = self.pace.get() {
                pace.lock().step_measured(ratio);
            }
        }
        state.ended_since_report = Demand::default();
        state.report = Some((load, now));
        self.use_blocks(&mut state, &Demand::default(), now);
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

    /// The group of the worker, once it serves a model: its version changes, too, whenever [`Self::version`] does.
    pub(super) fn change_group(&self) -> Option<&(Arc<LoadChanges>, usize)> {
        self.change_group.get()
    }

    /// Counts a change that was published.
    fn count_change(&self) {
        if let Some((changes, group)) = self.change_group.get() {
            changes.raise(*group);
        }
    }

    /// Reads all that a decision needs.
    pub(crate) fn read(&self, now: Timestamp) -> LoadReading {
        let (age, ejected_until) = (self.published.age(now), self.published.ejected_until());
        let older = |than: Duration| age.is_some_and(|age| age > than.as_nanos() as u64);
        let becomes_older = |than: Duration| Some(now.after((than.as_nanos() as u64 + 1).checked_sub(age?)?));
        let ejection_ends = (now.bits() < ejected_until).then(|| now.after(ejected_until - now.bits()));
        let reports = match age {
            None => Reports::Never,
            Some(_) if older(SILENT_AFTER) => Reports::Stopped,
            Some(_) => Reports::Current,
        };
        // A worker that never reported has no fresh report and is not silent.
        let stats = self.published.stats(age.is_some() && !older(STALE_AFTER));
        LoadReading {
            stats: LoadStats {
                block_tokens: self.block_tokens.load(Ordering::Relaxed),
                has_store: self.has_store.load(Ordering::Relaxed),
                ..stats
            },
            measured: self.published.measured(),
            ejected: ejection_ends.is_some(),
            reports,
            is_server: self.is_server,
            temporarily_ejected: ejection_ends.is_some()
                && ejected_until - now.bits() <= MAX_TEMPORARY_EJECTION.as_nanos() as u64,
            chosen: self.published.chosen(),
            until: [ejection_ends, becomes_older(STALE_AFTER), becomes_older(SILENT_AFTER)].into_iter().flatten().min(),
        }
    }

    /// Whether the worker is to be passed over while others are available.
    pub(crate) fn is_ejected(&self, now: impl Into<Timestamp>) -> bool {
        let reading = self.read(now.into());
        reading.ejected || reading.reports == Reports::Stopped
    }

    /// Ejects the worker until then; `None` ends the ejection.
    pub(crate) fn eject_until(&self, until: Option<Timestamp>) {
        self.published.set_ejected_until(until);
        self.count_change();
    }

    /// Records that the worker was chosen, with the number of the choice among those for its model.
    pub(crate) fn choose(&self) {
        self.published.choose(self.model_stats.get().map_or(1, |model| model.next_choice()));
        self.count_change();
    }

    /// A request uses the blocks of its context. Estimates how many blocks one more use loses.
    fn use_blocks(&self, state: &mut State, demand: &Demand, now: Instant) {
        let block_tokens = match self.block_tokens.load(Ordering::Relaxed) {
            0 => DEFAULT_BLOCK_TOKENS,
            tokens => tokens,
        };
        let blocks = demand.blocks.max(demand.context_tokens / u64::from(block_tokens));
        state.use_rate.used(blocks as f64, now.into());
        let memory = match self.memory_blocks.load(Ordering::Relaxed) {
            0 => state.report.as_ref().map_or(0, |(load, _)| load.total_blocks),
            blocks => blocks,
        };
        state.lost_share = self
            .model_stats
            .get()
            .filter(|_| memory > 0)
            .map(|model| model.lost_share(memory as f64 / state.use_rate.per_second()));
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
        let load = Self {
            state: Mutex::default(),
            model_stats: OnceLock::new(),
            device: OnceLock::new(),
            pace: OnceLock::new(),
            block_tokens: AtomicU32::new(0),
            memory_blocks: AtomicU64::new(0),
            has_store: AtomicBool::new(false),
            is_server: false,
            published: PublishedLoad::default(),
            change_group: OnceLock::new(),
        };
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
        let [fresh, stale] = self.state.stats(self.load.pace(), self.load.is_server);
        self.load.published.publish(reported, &fresh, &stale);
        self.load.count_change();
    }
}

#[cfg(test)]
mod tests;
