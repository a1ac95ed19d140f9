//! Accuracy of a worker's KV events: compares the cache hits that the worker reports with its events. Pure.
//!
//! ```text
//!            has published no event, and none for what it computed ──▶ estimated: no events
//!            │                                                       │ an event arrives ──▶ events
//!   events ──┤ publishes no further event for what it computed ──▶ estimated: stopped events ──▶ estimated: no events
//!            │                                                       │ an event arrives ──▶ events
//!            half of its last reports differ from its events ──▶ estimated: wrong or missing events
//!                                                                   │ they agree again ──▶ events
//! ```
//! The cache of a worker with inaccurate events is estimated from the prompts sent to it, see
//! [`AssumedCache`](super::assumed_cache::AssumedCache). Its events are still followed, so that it can recover. Where
//! events have stopped, as when the plane is away, the last ones count too: blocks are there until they are evicted.

use super::assumed_cache::MAX_AGE;
use std::time::Duration;
use tokio::time::Instant;

/// The source of the router's view of a worker's cache.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum CacheView {
    /// Its KV events.
    #[default]
    Events,
    /// An estimate from the prompts sent to it, and why.
    Estimated(EstimateReason),
}

/// Why a worker's cache is estimated.
#[expect(clippy::enum_variant_names, reason = "a reason is about the events of the worker")]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum EstimateReason {
    /// The worker publishes no events.
    NoEvents,
    /// Its events no longer arrive.
    StoppedEvents,
    /// The worker reports hits on blocks that no event contained: the events are lost, or use another block size.
    MissingEvents,
    /// The worker reports no hits on blocks that its events contained.
    WrongEvents,
}

/// Recent evidence about the events of one worker.
#[derive(Debug, Default)]
pub(crate) struct EventAccuracy {
    cache_view: CacheView,
    /// Time of the last event.
    last_event: Option<Instant>,
    /// Since when an event is due; `None` if none is.
    event_due_since: Option<Instant>,
    /// The latest reports of hits, the newest in the lowest bit: which differed from the events, and which of those had
    /// more hits.
    wrong: u16,
    more: u16,
    answers: u32,
}

/// An event is due at once; a slow plane takes a second, and a lost event is replayed within two.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// Number of reports that count.
const WINDOW: u32 = u16::BITS;
/// Wrong reports, of the last [`WINDOW`], that change the view to an estimate. On a full fleet one report in ten is
/// wrong, because a block is evicted between the decision and the execution, or because an event is late. With a wrong
/// block size all reports are wrong.
const WRONG_MIN: u32 = 8;
/// Wrong reports at most to use the events again.
const WRONG_MAX_TO_RECOVER: u32 = 2;

impl CacheView {
    /// All views.
    pub(crate) const ALL: [Self; 5] = [
        Self::Events,
        Self::Estimated(EstimateReason::NoEvents),
        Self::Estimated(EstimateReason::StoppedEvents),
        Self::Estimated(EstimateReason::MissingEvents),
        Self::Estimated(EstimateReason::WrongEvents),
    ];

    /// The values of the labels `source` and `reason` in metrics.
    pub(crate) const fn labels(self) -> [&'static str; 2] {
        match self {
            Self::Events => ["events", ""],
            Self::Estimated(EstimateReason::NoEvents) => ["estimated", "no_events"],
            Self::Estimated(EstimateReason::StoppedEvents) => ["estimated", "stopped_events"],
            Self::Estimated(EstimateReason::MissingEvents) => ["estimated", "missing_events"],
            Self::Estimated(EstimateReason::WrongEvents) => ["estimated", "wrong_events"],
        }
    }

    /// The remark in explanations and logs; `None` for events.
    pub(crate) const fn remark(self) -> Option<&'static str> {
        match self {
            Self::Events => None,
            Self::Estimated(EstimateReason::NoEvents) => Some("estimated: publishes no KV events"),
            Self::Estimated(EstimateReason::StoppedEvents) => {
                Some("estimated: no further KV events arrive; the last ones count, and the prompts since")
            }
            Self::Estimated(EstimateReason::MissingEvents) => {
                Some("estimated: reports hits on blocks that its KV events do not contain; check its block size")
            }
            Self::Estimated(EstimateReason::WrongEvents) => {
                Some("estimated: reports no hits on blocks that its KV events contain")
            }
        }
    }
}

impl EventAccuracy {
    /// The accuracy of a worker that is known to publish no events.
    pub(crate) fn without_events() -> Self {
        Self { cache_view: CacheView::Estimated(EstimateReason::NoEvents), ..Self::default() }
    }

    /// Records an event, or a snapshot that contains new ones.
    pub(crate) fn event_arrived(&mut self, now: Instant) {
        self.last_event = Some(now);
        self.event_due_since = None;
    }

    /// Whether no event has arrived yet.
    pub(crate) fn has_no_event(&self) -> bool {
        self.last_event.is_none()
    }

    /// The worker has computed blocks for a request placed at `placed` that its events did not contain: an event is
    /// due.
    pub(crate) fn blocks_computed(&mut self, placed: Instant, now: Instant) {
        if self.last_event.is_none_or(|at| at < placed) {
            self.event_due_since.get_or_insert(now);
        }
    }

    /// Records a report of cached tokens: `in_events` as the events say, `reported` as the worker says. Differences
    /// of less than a block, or of at most half of the larger value, do not count.
    pub(crate) fn hits_reported(&mut self, in_events: u64, reported: u64, block_size: u64) {
        let most = in_events.max(reported);
        if most < block_size {
            return;
        }
        let differs = in_events.abs_diff(reported);
        let wrong = differs > block_size && 2 * differs > most;
        self.wrong = self.wrong << 1 | u16::from(wrong);
        self.more = self.more << 1 | u16::from(wrong && reported > in_events);
        self.answers += 1;
    }

    /// The new cache view, if it changes.
    pub(crate) fn evaluate(&mut self, now: Instant) -> Option<CacheView> {
        let due_for =
            |time: Duration| self.event_due_since.is_some_and(|since| now.saturating_duration_since(since) >= time);
        let (wrong, silent) = (self.wrong.count_ones(), due_for(SILENT_AFTER));
        let mostly_more = 2 * self.more.count_ones() >= wrong;
        let cache_view = match self.cache_view {
            CacheView::Events if self.has_no_event() && (silent || wrong >= WRONG_MIN) => {
                CacheView::Estimated(EstimateReason::NoEvents)
            }
            CacheView::Events if silent => CacheView::Estimated(EstimateReason::StoppedEvents),
            // The reports differ from the events because of those that are due.
            CacheView::Events if self.event_due_since.is_some() => CacheView::Events,
            // The last events say too little about the cache by now.
            CacheView::Estimated(EstimateReason::StoppedEvents)
                if due_for(MAX_AGE) || (wrong >= WRONG_MIN && !mostly_more) =>
            {
                CacheView::Estimated(EstimateReason::NoEvents)
            }
            CacheView::Events if wrong >= WRONG_MIN && mostly_more => {
                CacheView::Estimated(EstimateReason::MissingEvents)
            }
            CacheView::Events if wrong >= WRONG_MIN => CacheView::Estimated(EstimateReason::WrongEvents),
            CacheView::Estimated(EstimateReason::NoEvents | EstimateReason::StoppedEvents)
                if self.event_due_since.is_none() && !self.has_no_event() =>
            {
                CacheView::Events
            }
            CacheView::Estimated(EstimateReason::MissingEvents | EstimateReason::WrongEvents)
                if self.answers >= WINDOW && wrong <= WRONG_MAX_TO_RECOVER =>
            {
                CacheView::Events
            }
            same => same,
        };
        if cache_view == self.cache_view {
            return None;
        }
        *self =
            Self { cache_view, last_event: self.last_event, event_due_since: self.event_due_since, ..Self::default() };
        Some(cache_view)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(accuracy: &mut EventAccuracy, answers: u32, in_events: u64, reported: u64) -> Option<CacheView> {
        (0..answers).for_each(|_| accuracy.hits_reported(in_events, reported, 16));
        accuracy.evaluate(Instant::now())
    }

    fn with_event() -> EventAccuracy {
        let mut accuracy = EventAccuracy::default();
        accuracy.event_arrived(Instant::now());
        accuracy
    }

    #[test]
    fn half_of_the_last_reports_wrong_changes_to_an_estimate() {
        for (in_events, reported, reason) in
            [(160, 0, EstimateReason::WrongEvents), (0, 160, EstimateReason::MissingEvents)]
        {
            let mut accuracy = with_event();
            assert_eq!(after(&mut accuracy, 20, 160, 160), None);
            assert_eq!(after(&mut accuracy, WRONG_MIN - 1, in_events, reported), None);
            assert_eq!(after(&mut accuracy, 1, in_events, reported), Some(CacheView::Estimated(reason)));
            assert_eq!(after(&mut accuracy, 5, in_events, reported), None, "reported once");
        }
    }

    #[test]
    fn evictions_and_less_than_a_block_are_tolerated() {
        let mut accuracy = with_event();
        for _ in 0..100 {
            accuracy.hits_reported(160, 100, 16);
            accuracy.hits_reported(16, 0, 16);
            accuracy.hits_reported(0, 15, 16);
            assert_eq!(accuracy.evaluate(Instant::now()), None);
        }
        for _ in 0..50 {
            assert_eq!(after(&mut accuracy, 1, 160, 0), None);
            assert_eq!(after(&mut accuracy, 3, 160, 160), None, "one in four is what a full fleet may do");
        }
    }

    #[test]
    fn events_are_used_again_after_a_window_of_agreement() {
        let mut accuracy = with_event();
        assert!(after(&mut accuracy, WRONG_MIN, 160, 0).is_some());
        assert_eq!(after(&mut accuracy, WINDOW - 1, 160, 160), None, "not yet");
        assert_eq!(after(&mut accuracy, 1, 160, 160), Some(CacheView::Events));
        assert_eq!(after(&mut accuracy, WRONG_MIN - 1, 160, 0), None, "and starts counting again");
    }

    #[test]
    fn a_worker_without_events_is_estimated_until_one_arrives() {
        let (mut accuracy, now) = (EventAccuracy::default(), Instant::now());
        assert_eq!(accuracy.evaluate(now + SILENT_AFTER), None, "nothing computed, no event due");
        accuracy.blocks_computed(now, now);
        assert_eq!(accuracy.evaluate(now), None);
        assert_eq!(accuracy.evaluate(now + SILENT_AFTER), Some(CacheView::Estimated(EstimateReason::NoEvents)));
        accuracy.event_arrived(now + SILENT_AFTER);
        assert_eq!(accuracy.evaluate(now + SILENT_AFTER), Some(CacheView::Events));
        accuracy.blocks_computed(now, now + SILENT_AFTER * 2);
        assert_eq!(accuracy.evaluate(now + SILENT_AFTER * 4), None, "the event came while the prompt was computed");
    }

    /// One whose events have stopped, and the time.
    fn stopped() -> (EventAccuracy, Instant) {
        let (mut accuracy, now) = (with_event(), Instant::now() + SILENT_AFTER);
        accuracy.blocks_computed(now, now);
        // What was computed since then is cached, and no event says so.
        (0..WINDOW).for_each(|_| accuracy.hits_reported(0, 160, 16));
        assert_eq!(accuracy.evaluate(now), None, "an event is due");
        let now = now + SILENT_AFTER;
        assert_eq!(accuracy.evaluate(now), Some(CacheView::Estimated(EstimateReason::StoppedEvents)));
        (accuracy, now)
    }

    #[test]
    fn the_last_events_count_until_another_one_arrives() {
        let (mut accuracy, now) = stopped();
        (0..WINDOW).for_each(|_| accuracy.hits_reported(0, 160, 16));
        assert_eq!(accuracy.evaluate(now), None);
        accuracy.event_arrived(now);
        assert_eq!(accuracy.evaluate(now), Some(CacheView::Events));
    }

    #[test]
    fn the_last_events_do_not_count_once_they_are_wrong_or_old() {
        let (mut accuracy, now) = stopped();
        (0..WRONG_MIN).for_each(|_| accuracy.hits_reported(160, 0, 16));
        assert_eq!(accuracy.evaluate(now), Some(CacheView::Estimated(EstimateReason::NoEvents)));
        let (mut accuracy, now) = stopped();
        assert_eq!(accuracy.evaluate(now + MAX_AGE), Some(CacheView::Estimated(EstimateReason::NoEvents)));
        accuracy.event_arrived(now + MAX_AGE);
        assert_eq!(accuracy.evaluate(now + MAX_AGE), Some(CacheView::Events));
    }
}
