//! The metrics of the servers behind this gateway.

use crate::kv_events::Ignored;
use prometheus::{IntCounterVec, Opts, Registry};

/// The metrics. Clones share them.
#[derive(Clone)]
pub struct Metrics {
    ignored_blocks: IntCounterVec,
}

impl Metrics {
    /// Declares the metrics, once per registry.
    pub fn new(registry: &Registry) -> prometheus::Result<Self> {
        let help = "Blocks in KV events of upstreams that the index does not get, by reason.";
        let ignored_blocks =
            IntCounterVec::new(Opts::new("blockyard_upstream_kv_blocks_ignored_total", help), &["reason"])?;
        registry.register(Box::new(ignored_blocks.clone()))?;
        Ok(Self { ignored_blocks })
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
