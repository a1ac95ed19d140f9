//! The size of offload batches, and how long a worker waits for a batch to fill. Pure.

use crate::block::Level;
use crate::manager::shared::Core;
use std::time::Duration;
use tokio::time::Instant;

/// Bytes in a batch: twice the smallest object worth storing.
const BATCH_BYTES: usize = 16 << 20;

/// The limit for a shared store with large blocks: one object.
const MAX_SHARED_BATCH_BYTES: usize = 128 << 20;

/// How long a worker waits for a batch to fill. Decoding completes blocks one by one; a tenth of a second collects
/// them, and is far below the two seconds in which other processes may expect to see them.
const FILL_TIME: Duration = Duration::from_millis(100);

/// A batch for a shared store costs an object and a manifest, whatever it contains. Batches of this many blocks cost
/// little per block. Smaller ones are limited by a token bucket: a burst of [`SMALL_BATCH_BURST`], as one or a few
/// prompts make them, and one more per [`SMALL_BATCH_INTERVAL`]. So blocks after a pause are stored at once, and a
/// trickle is stored in batches. A process that crashes loses at most these blocks, and they can be computed again.
const SHARED_BATCH_BLOCKS: usize = 64;
const SMALL_BATCH_BURST: f64 = 8.0;
const SMALL_BATCH_INTERVAL: Duration = Duration::from_secs(30);

/// How long a worker waits for more blocks.
pub(super) enum Batcher {
    /// Not at all.
    Immediate,
    /// For [`FILL_TIME`].
    Short,
    /// For [`FILL_TIME`] while the bucket of small batches has `tokens`; then longer.
    SharedStore { tokens: f64, last: Option<Instant> },
}

impl Batcher {
    pub(super) fn at(level: Level) -> Self {
        match level {
            Level::G3_5 | Level::G4 => Self::SharedStore { tokens: SMALL_BATCH_BURST, last: None },
            _ => Self::Short,
        }
    }

    /// Number of blocks in a batch.
    pub(super) fn batch_blocks(&self, core: &Core) -> usize {
        let block = core.device.block_bytes().max(1);
        let bytes = match self {
            Self::SharedStore { .. } => BATCH_BYTES.max((SHARED_BATCH_BLOCKS * block).min(MAX_SHARED_BATCH_BYTES)),
            Self::Immediate | Self::Short => BATCH_BYTES,
        };
        // At most a quarter of the memory that a batch is read from, so that a small pool stays usable meanwhile.
        let source = core.host.as_ref().map_or(core.pool.capacity(), |host| host.capacity().min(core.pool.capacity()));
        (bytes / block).min(source / 4).max(1)
    }

    /// A batch begins: refills the bucket.
    pub(super) fn begin(&mut self, now: Instant) {
        if let Self::SharedStore { tokens, last: Some(last) } = self {
            let pause = now.saturating_duration_since(*last);
            *tokens = (*tokens + pause.as_secs_f64() / SMALL_BATCH_INTERVAL.as_secs_f64()).min(SMALL_BATCH_BURST);
        }
    }

    /// Until when to wait, with `blocks` blocks of which the first came at `first`.
    pub(super) fn until(&self, first: Instant, blocks: usize) -> Instant {
        match self {
            Self::Immediate => first,
            Self::SharedStore { tokens, .. } if blocks < SHARED_BATCH_BLOCKS => {
                first + FILL_TIME.max(SMALL_BATCH_INTERVAL.mul_f64((1.0 - tokens).max(0.0)))
            }
            Self::Short | Self::SharedStore { .. } => first + FILL_TIME,
        }
    }

    /// A batch is taken.
    pub(super) fn end(&mut self, now: Instant, blocks: usize) {
        if let Self::SharedStore { tokens, last } = self {
            *last = Some(now);
            *tokens = (*tokens - f64::from(u8::from(blocks < SHARED_BATCH_BLOCKS))).max(0.0);
        }
    }
}
