//! The number of sequences in an engine's full batch (`max_num_seqs`), learned from its reports: vLLM, SGLang and
//! llama.cpp say how many requests run and wait, but not how many can run.
//!
//! While requests wait although the cache has room, the batch is full. A single report may be of a moment in which the
//! engine had not taken the waiting requests yet, or computed a long prompt before them. So the largest number of
//! running requests counts once it was reported [`CONFIRMED`] times. It is forgotten when more requests run, and when
//! it was not reported for [`MAX_AGE`].

use std::time::Duration;
use tokio::time::Instant;

/// What was learned so far.
#[derive(Clone, Copy, Default, Debug)]
pub(super) struct BatchSize {
    /// The most requests that ran while others waited.
    most: u32,
    /// Number of reports with that many.
    reports: u32,
    /// Time of the latest of them.
    reported: Option<Instant>,
}

/// Reports are a second apart: in three seconds a batch that is not full has taken the requests that wait, and one that
/// is full has had its maximum number of sequences.
const CONFIRMED: u32 = 3;
/// An engine that looks full gets no requests while others are idle, so that nothing else would correct it. A batch
/// that is full again is noticed within seconds.
const MAX_AGE: Duration = Duration::from_mins(1);

impl BatchSize {
    /// Records a report. `is_cache_full`: the cache has no room for further requests, so they wait for blocks.
    pub(super) fn reported(&mut self, running: u32, waiting: u32, is_cache_full: bool) {
        if running > self.most || !self.is_recent() {
            *self = Self::default();
        }
        if running > 0 && running >= self.most && waiting > 0 && !is_cache_full {
            let reports = self.reports.saturating_add(1);
            *self = Self { most: running, reports, reported: Some(Instant::now()) };
        }
    }

    /// Maximum number of sequences in the batch; 0 when unknown.
    pub(super) fn sequences_max(&self) -> u32 {
        if self.reports >= CONFIRMED && self.is_recent() { self.most } else { 0 }
    }

    fn is_recent(&self) -> bool {
        self.reported.is_some_and(|at| at.elapsed() <= MAX_AGE)
    }
}
