//! The metrics of the servers behind this gateway.

use crate::kv_events::Ignored;
use prometheus::{IntCounter, IntCounterVec, Opts, Registry};

/// The metrics. Clones share them.
#[derive(Clone)]
pub struct Metrics {
    ignored_blocks: IntCounterVec,
    hedged_probes: IntCounterVec,
    undecodable_batches: IntCounter,
}

/// Which of two health checks had a good answer first.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answered {
    First,
    Second,
    Neither,
}

impl Metrics {
    /// Declares the metrics, once per registry.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let help = "Blocks in KV events of upstreams that the index does not get, by reason.";
        let ignored_blocks =
            IntCounterVec::new(Opts::new("blockyard_upstream_kv_blocks_ignored_total", help), &["reason"])?;
        let help = "Second health checks of upstreams, because the first one failed or took longer than usual, by \
                    which of the two had a good answer.";
        let hedged_probes =
            IntCounterVec::new(Opts::new("blockyard_upstream_hedged_probes_total", help), &["answered"])?;
        let help = "Batches of KV events of upstreams that cannot be decoded.";
        let undecodable_batches = IntCounter::new("blockyard_upstream_kv_undecodable_batches_total", help)?;
        registry.register(Box::new(undecodable_batches.clone()))?;
        for counter in [&ignored_blocks, &hedged_probes] {
            registry.register(Box::new(counter.clone()))?;
        }
        Ok(Self { ignored_blocks, hedged_probes, undecodable_batches })
    }

    /// Counts a second health check.
    pub(crate) fn hedged_probe(&self, answered: Answered) {
        let label = match answered {
            Answered::First => "first",
            Answered::Second => "second",
            Answered::Neither => "neither",
        };
        self.hedged_probes.with_label_values(&[label]).inc();
    }

    /// Counts a batch of KV events that cannot be decoded.
    pub(crate) fn undecodable_batch(&self) {
        self.undecodable_batches.inc();
    }

    /// Counts what was ignored since `before`.
    pub(crate) fn ignored(&self, now: &Ignored, before: &Ignored) {
        for ((reason, now), (_, before)) in now.by_reason().into_iter().zip(before.by_reason()) {
            if now > before {
                self.ignored_blocks.with_label_values(&[reason]).inc_by(now - before);
            }
        }
    }
}
