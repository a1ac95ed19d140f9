//! Holds what the index promised against what the engine found.

use crate::fleet::Member;
use crate::metrics::Metrics;
use std::sync::atomic::{AtomicU32, Ordering};

/// Answers in a row from blocks that a worker never announced.
#[derive(Default)]
pub(crate) struct Unannounced(AtomicU32);

/// So many cannot be events that are merely late.
const SUSPICIOUS: u32 = 8;

/// Compares one answer, in tokens.
pub(crate) fn compare(metrics: &Metrics, member: &Member, predicted: u64, actual: u64) {
    metrics.predicted_tokens.inc_by(predicted);
    metrics.actual_tokens.inc_by(actual);
    metrics.false_tokens.inc_by(predicted.saturating_sub(actual));
    metrics.missed_tokens.inc_by(actual.saturating_sub(predicted));
    if member.unannounced.note(predicted, actual) {
        let block_size = member.instance.model.block_size;
        tracing::warn!(
            worker = %member.id(), block_size,
            "worker answers from blocks that it never announced: are its events on, and its blocks of this size?",
        );
    }
}

impl Unannounced {
    /// Whether the worker has just become suspicious.
    fn note(&self, predicted: u64, actual: u64) -> bool {
        if predicted > 0 {
            self.0.store(0, Ordering::Relaxed);
            return false;
        }
        actual > 0 && self.0.fetch_add(1, Ordering::Relaxed) + 1 == SUSPICIOUS
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_worker_whose_events_are_silently_off_is_noticed_once() {
        let seen = Unannounced::default();
        let warned: Vec<bool> = (0..20).map(|_| seen.note(0, 64)).collect();
        assert_eq!(warned.iter().filter(|warned| **warned).count(), 1);
        assert!(!(0..20).any(|_| Unannounced::default().note(0, 0)), "nothing cached, nothing missed");
    }
}
