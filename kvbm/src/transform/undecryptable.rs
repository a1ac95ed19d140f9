//! Blocks that a tier returns and that this process cannot decrypt, for lack of the key. They are counted, and the
//! first one of a tier is logged.

use crate::block::{Block, Level};
use crate::metrics::Metrics;
use std::fmt::Display;
use std::sync::atomic::{AtomicBool, Ordering};

/// The undecryptable blocks of one tier.
pub(super) struct Undecryptable {
    level: Level,
    metrics: Metrics,
    is_logged: AtomicBool,
}

impl Undecryptable {
    pub(super) fn new(level: Level, metrics: Metrics) -> Self {
        // The series exists before the first block, so that alerts see the increase.
        metrics.undecryptable(level, 0);
        Self { level, metrics, is_logged: AtomicBool::new(false) }
    }

    /// Counts a block. `why` says what is missing to decrypt it.
    pub(super) fn count(&self, block: &Block, why: impl Display) {
        self.metrics.undecryptable(self.level, 1);
        // Thousands of blocks may follow, of the same key in most cases.
        if !self.is_logged.swap(true, Ordering::Relaxed) {
            tracing::warn!(
                tier = %self.level, domain = %block.header.domain, reason = %why,
                "cannot decrypt stored blocks; they are computed and stored again"
            );
        }
    }
}
