//! State of a worker's load: its last report, the open bookings, their sums, and what is measured of the worker.
//!
//! Not here: the lock, and what is published of it.

use crate::load::block_use_rate::BlockUseRate;
use crate::load::demand::Demand;
use crate::load::least_squares::LeastSquares;
use crate::load::output_lengths::ExpectedOutput;
use crate::load::pace::Pace;
use crate::load::prefill_time::{PrefillGroup, PrefillWork};
use crate::load::stats::{LOWER_TIERS, LoadStats, Speeds, lower_tier};
use crate::load::step_time::StepTime;
use std::collections::BTreeMap;
use tokio::time::Instant;
use worker::plane::Load;

#[derive(Default)]
pub(super) struct State {
    pub(super) report: Option<(Load, Instant)>,
    /// Open bookings by number. Ordered, so that iteration is deterministic.
    pub(super) open: BTreeMap<u64, OpenBooking>,
    last: u64,
    /// Sum over all open bookings.
    pub(super) total: Demand,
    /// Sum over bookings with [`InReport::No`].
    not_in_report: Demand,
    /// Sum over bookings with [`InReport::Maybe`].
    maybe_in_report: Demand,
    /// Sum over bookings that wait in other routers.
    pub(super) remote: Demand,
    /// Sum over bookings that the latest report may contain and that have ended since. Without prefill: it is unknown
    /// how much of it was left to compute at the time of the report.
    pub(super) ended_since_report: Demand,
    /// The prompts that were done last.
    prefills: Option<PrefillGroup>,
    /// Mean of what the sequences had still to generate, at the latest report.
    pub(super) rest_tokens: Option<f64>,
    /// Seconds from one token of a request to the next.
    pub(super) token_interval: Option<f64>,
    /// Seconds of a hand-over after its prefill: constant, and per estimated second of the whole transfer. The last few
    /// hundred count: they are rarer than steps, and networks change.
    pub(super) handoffs: LeastSquares<2, 256>,
    pub(super) mean_duration: Option<f64>,
    /// Blocks that requests use on the worker, and how many of them are lost for each one more.
    pub(super) use_rate: BlockUseRate,
    pub(super) lost_share: Option<f64>,
}

pub(super) struct OpenBooking {
    pub(super) demand: Demand,
    pub(super) booked_at: Instant,
    /// When the request was sent to the worker; `None` while its prefill runs on another worker.
    pub(super) sent: Option<Instant>,
    pub(super) in_report: InReport,
    /// When the first token was received.
    pub(super) started: Option<Instant>,
    /// Prompt tokens that are cached on the worker; `None` if the time of the prompt says nothing of its prefill.
    pub(super) cached_tokens: Option<u64>,
    output: ExpectedOutput,
    /// The request waits in another router, or is about to be sent by it.
    pub(super) remote: bool,
}

/// Whether the latest report contains a booking.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum InReport {
    /// The report came before the request was sent.
    No,
    /// The report came so soon after the request was sent that they may have crossed.
    Maybe,
    Yes,
}

/// Weight of a new measurement in the exponentially weighted moving averages: about the last ten count.
const EWMA_WEIGHT: f64 = 0.1;

impl State {
    /// The load, computed with a fresh report and with a stale one. They differ in their counts only. `is_server`: the
    /// worker is a server of another program.
    pub(super) fn stats(&self, pace: Pace, is_server: bool) -> [LoadStats; 2] {
        let Self { total, rest_tokens, handoffs, mean_duration, .. } = self;
        let handoff = handoffs.coefficients();
        let mut stats = LoadStats {
            waiting_tokens: count(total.prefill_tokens),
            prompts: count(total.prompts),
            sequences: count(total.sequences),
            active_blocks: count(total.blocks),
            context_tokens: count(total.context_tokens),
            rest_tokens: (*rest_tokens).into(),
            waiting_seconds: total.waiting_seconds(total.prefill_tokens),
            step_pace: pace.step.into(),
            prefill_pace: pace.prefill.into(),
            lost_share: self.lost_share.into(),
            queued: [0; LOWER_TIERS],
            speeds: Speeds {
                handoff_overhead: handoff.map(|[overhead, _]| overhead).into(),
                handoff_transfer: handoff.map(|[_, transfer]| transfer).into(),
                mean_duration: (*mean_duration).into(),
                ..Speeds::default()
            },
            ..LoadStats::default()
        };
        let Some((load, _)) = &self.report else { return [stats; 2] };
        add_measured(load, &mut stats);
        [true, false].map(|fresh| {
            let mut stats = stats;
            self.add_counts(load, fresh, is_server, &mut stats);
            stats
        })
    }

    /// Combines the counts of the bookings with those of a fresh (`true`) or a stale (`false`) report.
    fn add_counts(&self, load: &Load, fresh: bool, is_server: bool, stats: &mut LoadStats) {
        let Self { total, not_in_report, maybe_in_report, ended_since_report, .. } = self;
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
        let booked_at_least = |booked: u64| if is_server { count(booked) } else { 0 };
        stats.waiting_tokens = stats.waiting_tokens.max(booked_at_least(total.prefill_tokens));
        stats.waiting_seconds = total.waiting_seconds(stats.waiting_tokens.into());
        // The report omits prompts that are being computed, so the router's own bookings are a lower bound.
        stats.prompts = join(u64::from(load.waiting), |demand| demand.prompts).max(count(total.prompts));
        stats.sequences = join(sequences, |demand| demand.sequences).max(booked_at_least(total.sequences));
        stats.active_blocks = join(load.active_blocks, |demand| demand.blocks);
        // Requests that wait for the batch hold no blocks yet, but are before any new one.
        let waiting = (total.blocks * u64::from(load.waiting)).checked_div(total.sequences).unwrap_or(0);
        stats.active_blocks = stats.active_blocks.saturating_add(count(waiting));
        // The bookings know the contexts; sequences of others are taken to have as much each.
        if total.sequences > 0 {
            let each = total.context_tokens as f64 / total.sequences as f64;
            stats.context_tokens = count((each * f64::from(stats.sequences)) as u64);
        }
    }

    /// What the sequences have still to generate, on average; `None` without any.
    pub(super) fn rest_tokens(&self, step: Option<f64>, now: Instant) -> Option<f64> {
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
    pub(super) fn step_sample(&self, load: &Load) -> Option<[f64; 3]> {
        let seconds = load.decode_step_seconds.filter(|step| *step > 0.0 && load.running > 0)?;
        let is_known = self.report.as_ref().is_some_and(|(before, _)| before.decode_step_seconds == Some(seconds));
        let (running, total) = (f64::from(load.running), self.total);
        let context_tokens = total.context_tokens as f64 * running / total.sequences as f64;
        (!is_known && total.sequences > 0).then_some([running, context_tokens, seconds])
    }

    /// Records that a prompt is done. Returns the prompts that were done before it, if that group is complete.
    /// `step`: of an average worker, and `pace`, of this one relative to it.
    pub(super) fn prefilled(&mut self, number: u64, step: &StepTime, pace: Pace, now: Instant) -> Option<PrefillGroup> {
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
        let step = step.seconds(sequences, context_tokens) * pace.step.unwrap_or(1.0);
        PrefillGroup::add(&mut self.prefills, work, step, sent, now)
    }

    pub(super) fn book(
        &mut self,
        demand: Demand,
        cached_tokens: Option<u64>,
        output: ExpectedOutput,
        booked_at: Instant,
        remote: bool,
    ) -> u64 {
        self.last += 1;
        let (nothing, in_report) = (Demand::default(), InReport::No);
        let booking = OpenBooking {
            demand: nothing,
            booked_at,
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
    pub(super) fn change(&mut self, number: u64, change: impl FnOnce(&mut OpenBooking)) {
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

/// Adds what a report says whatever its age.
fn add_measured(load: &Load, stats: &mut LoadStats) {
    stats.total_blocks = count(load.total_blocks);
    stats.sequences_max = load.sequences_max;
    stats.speeds.prefill = load.prefill_tokens_per_second.filter(|speed| *speed > 0.0).into();
    stats.speeds.block_bytes = Some(load.block_bytes as f64).filter(|bytes| *bytes > 0.0).into();
    for speed in load.onboard.iter().filter(|speed| speed.bytes_per_second > 0.0) {
        stats.speeds.set_onboard(speed.level, speed.latency_seconds, speed.bytes_per_second);
        if let Some(queued) = lower_tier(speed.level).and_then(|at| stats.queued.get_mut(at)) {
            *queued = count(speed.queued_blocks);
        }
    }
}

/// The count as decisions read it, saturated at `u32::MAX`.
fn count(count: u64) -> u32 {
    count.try_into().unwrap_or(u32::MAX)
}

pub(super) fn average(value: &mut Option<f64>, newest: f64) {
    *value = Some(value.map_or(newest, |value| value + EWMA_WEIGHT * (newest - value)));
}
