//! Copies of shared prefixes that were ordered ahead of demand and have not ended; pauses of workers after them.

use crate::fleet::Worker;
use parking_lot::Mutex;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;
use worker::engine::PrefixCopy;
use worker::plane::WorkerId;

/// The copies that one router has ordered.
#[derive(Default)]
pub(crate) struct PrefixCopies {
    state: Mutex<State>,
    ordered: Notify,
}

#[derive(Default)]
struct State {
    /// Orders that were not taken yet.
    ordered: VecDeque<(Arc<Worker>, PrefixCopy)>,
    /// Workers that get a copy, with the short hash of the last block of the prefix.
    on_the_way: BTreeMap<WorkerId, u64>,
    pauses: BTreeMap<WorkerId, Pause>,
    /// When the next copy may be considered.
    next: Option<Instant>,
}

/// Until when a worker gets no copy.
#[derive(Clone, Copy)]
struct Pause {
    until: Instant,
    /// Orders in a row that it did not carry out.
    failures: u32,
    /// The prefix that it has copied last, and until when it does not get that again.
    copied: Option<(u64, Instant)>,
}

/// An order, to be carried out. Dropping it without an end says that it was cancelled.
#[must_use = "dropping an order cancels it"]
pub(crate) struct CopyOrder {
    copies: Arc<PrefixCopies>,
    pub(crate) to: Arc<Worker>,
    pub(crate) copy: PrefixCopy,
    end: Option<CopyEnd>,
}

/// How an order ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum CopyEnd {
    Done,
    /// The worker declined or failed; it may have room or time later.
    Failed,
    /// The worker never copies.
    Unsupported,
}

/// Copies at a time: enough to spread a prefix over a fleet within seconds, few enough to leave the network and the
/// stores to requests. A worker gets one at a time.
const MAX_ON_THE_WAY: usize = 4;
/// Shortest time between two considerations: one reads the load of every worker, and a demand lasts for seconds.
const INTERVAL: Duration = Duration::from_millis(100);
/// Pause of a worker after a copy: by then its events have arrived.
const PAUSE_AFTER_COPY: Duration = Duration::from_secs(1);
/// Time after which a worker gets the same prefix again, at the earliest. One that evicts it before has no room for it.
const PAUSE_OF_PREFIX: Duration = Duration::from_mins(1);
/// Pause after a first order that a worker did not carry out; doubled after each further one, up to the longest, which
/// is also that of a worker that never copies. It may be replaced by another version.
const FIRST_PAUSE: Duration = Duration::from_secs(5);
const LONGEST_PAUSE: Duration = Duration::from_mins(5);

impl PrefixCopies {
    /// Whether a further copy may be considered now. It may not again for a moment.
    pub(crate) fn may_order(&self, now: Instant) -> bool {
        let mut state = self.state.lock();
        if state.on_the_way.len() >= MAX_ON_THE_WAY || state.next.is_some_and(|next| now < next) {
            return false;
        }
        state.next = Some(now + INTERVAL);
        true
    }

    /// Workers that get no copy of a prefix now: each gets another one, or pauses.
    pub(crate) fn unavailable(&self, prefix: u64, now: Instant) -> Vec<WorkerId> {
        let state = self.state.lock();
        let has_copied = |pause: &Pause| pause.copied.is_some_and(|(other, until)| other == prefix && now < until);
        let is_paused = |pause: &Pause| now < pause.until || has_copied(pause);
        let paused = state.pauses.iter().filter(|(_, pause)| is_paused(pause)).map(|(worker, _)| *worker);
        state.on_the_way.keys().copied().chain(paused).collect()
    }

    /// Workers that get a copy of the prefix whose last block has this short hash.
    pub(crate) fn receivers(&self, prefix: u64) -> Vec<WorkerId> {
        let state = self.state.lock();
        state.on_the_way.iter().filter(|(_, other)| **other == prefix).map(|(worker, _)| *worker).collect()
    }

    /// Orders a copy of a prefix, which the short hash of its last block names.
    pub(crate) fn order(&self, to: &Arc<Worker>, prefix: u64, copy: PrefixCopy) {
        let mut state = self.state.lock();
        // Decisions are serialized, so the worker gets no other copy.
        state.on_the_way.insert(to.id(), prefix);
        state.ordered.push_back((to.clone(), copy));
        drop(state);
        self.ordered.notify_one();
    }

    /// Takes the next order, if there is one: the worker, and what it is to copy. [`Self::ended`] must follow.
    pub(crate) fn take(&self) -> Option<(Arc<Worker>, PrefixCopy)> {
        self.state.lock().ordered.pop_front()
    }

    /// Waits for the next order.
    pub(crate) async fn next(self: &Arc<Self>) -> CopyOrder {
        loop {
            if let Some((to, copy)) = self.take() {
                return CopyOrder { copies: self.clone(), to, copy, end: None };
            }
            self.ordered.notified().await;
        }
    }

    /// The copy of a worker has ended. `None`: it was cancelled.
    pub(crate) fn ended(&self, worker: WorkerId, end: Option<CopyEnd>, now: Instant) {
        let mut state = self.state.lock();
        let prefix = state.on_the_way.remove(&worker);
        let before = state.pauses.get(&worker).copied().unwrap_or(Pause { until: now, failures: 0, copied: None });
        let pause = match end {
            None => return,
            Some(CopyEnd::Done) => {
                let copied = prefix.map(|prefix| (prefix, now + PAUSE_OF_PREFIX));
                Pause { until: now + PAUSE_AFTER_COPY, failures: 0, copied }
            }
            Some(CopyEnd::Failed) => {
                let doubled = FIRST_PAUSE.saturating_mul(2_u32.saturating_pow(before.failures));
                Pause { until: now + doubled.min(LONGEST_PAUSE), failures: before.failures + 1, ..before }
            }
            Some(CopyEnd::Unsupported) => Pause { until: now + LONGEST_PAUSE, ..before },
        };
        // Of workers that have left, too.
        state.pauses.retain(|_, pause| now < pause.until + LONGEST_PAUSE);
        state.pauses.insert(worker, pause);
    }
}

impl CopyOrder {
    /// The order has ended.
    pub(crate) fn end(mut self, end: CopyEnd) {
        self.end = Some(end);
    }
}

impl Drop for CopyOrder {
    fn drop(&mut self) {
        self.copies.ended(self.to.id(), self.end, Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const WORKER: WorkerId = WorkerId(1);

    #[test]
    fn pauses_become_longer_until_a_copy_is_made() {
        let (copies, mut now) = (PrefixCopies::default(), Instant::now());
        let is_paused_after = |end, now: Instant, seconds: u64| {
            copies.ended(WORKER, Some(end), now);
            let until = now + Duration::from_secs(seconds);
            assert!(copies.unavailable(0, until - Duration::from_millis(1)).contains(&WORKER), "{end:?}: {seconds} s");
            assert!(!copies.unavailable(0, until).contains(&WORKER), "{end:?}: {seconds} s");
        };
        for seconds in [5, 10, 20, 40, 80, 160, 300, 300] {
            is_paused_after(CopyEnd::Failed, now, seconds);
            now += Duration::from_secs(seconds);
        }
        is_paused_after(CopyEnd::Done, now, 1);
        is_paused_after(CopyEnd::Failed, now, 5);
        is_paused_after(CopyEnd::Unsupported, now, 300);
    }

    #[test]
    fn a_worker_gets_the_same_prefix_again_only_after_a_while() {
        let (copies, now) = (PrefixCopies::default(), Instant::now());
        copies.state.lock().on_the_way.insert(WORKER, 7);
        copies.ended(WORKER, Some(CopyEnd::Done), now);
        let is_unavailable =
            |prefix, seconds| copies.unavailable(prefix, now + Duration::from_secs(seconds)) == [WORKER];
        assert!(is_unavailable(7, 59) && !is_unavailable(7, 60));
        assert!(is_unavailable(8, 0) && !is_unavailable(8, 1), "another prefix");
    }

    #[test]
    fn copies_are_considered_at_a_bounded_rate_and_few_at_a_time() {
        let (copies, now) = (PrefixCopies::default(), Instant::now());
        assert!(copies.may_order(now) && !copies.may_order(now + INTERVAL / 2) && copies.may_order(now + INTERVAL));
        let later = now + Duration::from_mins(1);
        for worker in 0..MAX_ON_THE_WAY as u64 {
            copies.state.lock().on_the_way.insert(WorkerId(worker), worker % 2);
        }
        assert!(!copies.may_order(later));
        assert_eq!(copies.receivers(1), [WorkerId(1), WorkerId(3)]);
        copies.ended(WORKER, None, later);
        assert!(copies.may_order(later), "one was cancelled");
        assert_eq!(copies.unavailable(0, later), [WorkerId(0), WorkerId(2), WorkerId(3)]);
    }
}
