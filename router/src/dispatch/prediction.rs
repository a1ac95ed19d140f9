//! Compares the cache hits that a decision predicted with those that the worker reports.
//!
//! Where a server chooses which of its workers (its data-parallel ranks) computes a prompt, nothing is compared: it is
//! not known whose cache the report is about. Each of these workers may have the prompt afterwards.

use crate::booking::InflightPrefixes;
use crate::fleet::{CacheView, Worker};
use crate::index::Index;
use crate::policy::{Decision, Overlaps, ScoredWorker, ServingMode};
use crate::telemetry::Metrics;
use kvbm::SequenceHash;
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::Request;

/// What was predicted for a worker when a prompt was placed there.
pub(crate) struct HitPrediction {
    placed: Instant,
    /// Predicted cached prompt tokens.
    cached: u64,
    /// Cached prompt tokens by the worker's own events alone; `None` when this cannot be compared with what the worker
    /// reports: other requests were about to compute a part of the prompt there, a part was to come from another
    /// worker, or the tokens of the prompt are an estimate.
    announced: Option<u64>,
    /// Prompt tokens in full blocks, and those of them that the worker had not announced.
    full: u64,
    unannounced: u64,
    /// The workers of which a server chooses the one that computes the prompt. Empty: the worker computes it.
    one_of: Vec<Arc<Worker>>,
    /// Hashes of the prompt's blocks, if they are to be recorded as sent.
    hashes: Vec<SequenceHash>,
    /// Seconds per prompt token on the worker.
    seconds_per_token: f64,
    /// Seconds by which the next best choice was more expensive.
    margin_seconds: f64,
}

impl HitPrediction {
    /// The prediction for one worker of a decision. To be made before the request's own prefix is added to `inflight`.
    pub(crate) fn of(
        request: &Request,
        inflight: &InflightPrefixes,
        decision: &Decision<'_>,
        row: &ScoredWorker<'_>,
        overlaps: &Overlaps,
        now: Instant,
    ) -> Self {
        let (member, scheme, block_size) = (row.worker(), row.entry.scheme, row.prompt.block_size);
        let hashes = overlaps.hashes(scheme);
        let announced = u64::from(overlaps.held(scheme, member.events_slot).total()) * block_size;
        let full = hashes.len() as u64 * block_size;
        let is_inflight = inflight.contains(member.events_slot, hashes, block_size as usize);
        // The tokens of this prompt are not those of the worker's events, so its report says nothing about the events.
        let has_estimated_tokens = request.attributes.has_estimated_tokens;
        let one_of = decision.chosen_by_server(request);
        let is_comparable = !(has_estimated_tokens && member.instance.model.has_exact_blocks) && one_of.is_empty();
        let is_alone = !is_inflight && decision.chosen.serving_mode == ServingMode::Aggregated;
        let by_text = has_estimated_tokens && member.text_slot.is_some();
        let noted = by_text || member.cache_view != CacheView::Events || member.estimated_cache.has_no_event();
        Self {
            placed: now,
            cached: row.cached(),
            announced: (is_alone && is_comparable).then_some(announced),
            full,
            unannounced: if is_comparable { full.saturating_sub(announced) } else { 0 },
            one_of,
            hashes: if noted { hashes.to_vec() } else { Vec::new() },
            seconds_per_token: row.snapshot.estimate.seconds_per_token,
            margin_seconds: (decision.runner_up() - row.cost().total()).max(0.0),
        }
    }

    /// Whether it is known that the worker computes the prompt.
    pub(crate) fn is_of_one_worker(&self) -> bool {
        self.one_of.is_empty()
    }

    /// Records that the worker has computed the prompt. `found`: cached tokens that it reports.
    pub(crate) fn computed(&self, index: &Index, member: &Worker, found: Option<u64>, now: Instant) {
        // A worker that found the whole prompt has computed no block.
        if self.unannounced > 0 && found.is_none_or(|found| found < self.full) {
            member.estimated_cache.blocks_computed(self.placed, now);
        }
        if self.hashes.is_empty() {
            return;
        }
        let mine = self.is_of_one_worker().then_some(member);
        for member in mine.into_iter().chain(self.one_of.iter().map(|worker| &**worker)) {
            let capacity_blocks = member.load.stats(now).total_blocks as usize;
            member.estimated_cache.prompt_sent(index, member.id(), &self.hashes, capacity_blocks, now);
        }
    }

    /// Compares the prediction with the cached tokens that the first output reports: `found`, of which the context is
    /// the most that can be true.
    pub(crate) fn compare(&self, metrics: &Metrics, member: &Worker, found: u64) {
        if !self.is_of_one_worker() {
            return;
        }
        let found = found.min(member.instance.model.context as u64);
        let missing = self.cached.saturating_sub(found);
        metrics.predicted_tokens.inc_by(self.cached);
        metrics.actual_tokens.inc_by(found);
        metrics.overpredicted_tokens.inc_by(missing);
        metrics.underpredicted_tokens.inc_by(found.saturating_sub(self.cached));
        // Of the time for the missing tokens, the part that the next best choice would have saved.
        metrics.regret_seconds.inc_by((missing as f64 * self.seconds_per_token - self.margin_seconds).max(0.0));
        if let Some(announced) = self.announced {
            let block_size = member.instance.model.block_size as u64;
            member.estimated_cache.hits_reported(announced, found, block_size);
        }
    }
}
