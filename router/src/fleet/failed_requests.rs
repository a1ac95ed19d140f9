//! Requests that several workers failed and none served, by model.
//!
//! Such a failure counts against none of the workers, because the request may be its cause. So when all workers fail
//! all requests and answer health checks, no breaker opens: only these counts show it.
//!
//! Not here: which failures these are (`dispatch::serve`).

use super::health::{RECENT_FAULTS, REPAIRED_AFTER};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::time::Instant;

/// The outcomes of recent requests of each model of which one was such a failure.
#[derive(Default)]
pub(crate) struct FailedRequests {
    by_model: Mutex<BTreeMap<Arc<str>, Recent>>,
    /// There is a model, so that requests that are served look it up.
    has_models: AtomicBool,
}

struct Recent {
    /// The last sixteen outcomes, the newest in the lowest bit; 1 is a failure.
    outcomes: u16,
    last_failure: Instant,
}

impl FailedRequests {
    /// Records that several workers failed a request and none served it.
    pub(crate) fn failed(&self, model: &str, now: Instant) {
        let mut by_model = self.by_model.lock();
        // Also the limit of models: those that are gone have no requests.
        by_model.retain(|_, recent| recent.is_of_now(now));
        match by_model.get_mut(model) {
            Some(recent) => *recent = Recent { outcomes: recent.outcomes << 1 | 1, last_failure: now },
            None => drop(by_model.insert(model.into(), Recent { outcomes: 1, last_failure: now })),
        }
        self.has_models.store(true, Ordering::Relaxed);
    }

    /// Records that a request was served.
    pub(crate) fn served(&self, model: &str) {
        if !self.has_models.load(Ordering::Relaxed) {
            return;
        }
        let mut by_model = self.by_model.lock();
        if let Some(recent) = by_model.get_mut(model) {
            recent.outcomes <<= 1;
            if recent.outcomes == 0 {
                by_model.remove(model);
            }
        }
        self.has_models.store(!by_model.is_empty(), Ordering::Relaxed);
    }

    /// The models of which half of the last sixteen requests are such failures, for `/ready`.
    pub(crate) fn problems(&self, now: Instant) -> Vec<String> {
        let by_model = self.by_model.lock();
        let is_listed = |recent: &Recent| recent.is_of_now(now) && recent.outcomes.count_ones() >= RECENT_FAULTS;
        let listed = by_model.iter().filter(|(_, recent)| is_listed(recent));
        let describe = |model| {
            format!(
                "half of the last 16 requests for the model `{model}`, or more, failed on several workers and were \
                 served by none; this counts against no worker, and the log has the errors"
            )
        };
        listed.map(|(model, _)| describe(model)).collect()
    }
}

impl Recent {
    fn is_of_now(&self, now: Instant) -> bool {
        now.saturating_duration_since(self.last_failure) < REPAIRED_AFTER
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn a_model_is_listed_while_half_of_its_requests_fail() {
        let (failed, now) = (FailedRequests::default(), Instant::now());
        for count in 1..=20 {
            failed.failed("m", now);
            assert_eq!(failed.problems(now).len(), usize::from(count >= 8), "{count} failures");
        }
        failed.served("other");
        for count in 1..=16 {
            failed.served("m");
            assert_eq!(failed.problems(now).len(), usize::from(count <= 8), "{count} served requests");
        }
        assert!(failed.by_model.lock().is_empty() && !failed.has_models.load(Ordering::Relaxed));
    }

    #[test]
    fn failures_of_the_past_are_not_listed_and_not_kept() {
        let (failed, now) = (FailedRequests::default(), Instant::now());
        for _ in 0..8 {
            failed.failed("gone", now);
        }
        assert!(failed.problems(now)[0].contains("`gone`"));
        let later = now + REPAIRED_AFTER + Duration::from_secs(1);
        assert_eq!(failed.problems(later), [""; 0]);
        failed.failed("m", later);
        assert_eq!(failed.by_model.lock().len(), 1);
    }
}
