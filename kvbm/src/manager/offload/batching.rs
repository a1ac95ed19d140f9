//! How much a lane takes at once, and how long it waits for that. Pure.

use crate::block::Level;
use crate::manager::Core;
use std::time::Duration;
use tokio::time::Instant;

/// Bytes in one batch: what a tier writes in one go, twice the smallest object worth storing.
const BATCH_BYTES: usize = 16 << 20;

/// What a batch for a store that others share may take, of large blocks: one object.
const SHARED_BYTES: usize = 128 << 20;

/// How long a tier's lane waits for a batch to fill. Decoding finishes blocks one by one; a tenth of a second collects
/// them and is far below the two seconds in which others may expect to see them.
const LINGER: Duration = Duration::from_millis(100);

/// A batch for a store that others share costs an object and a manifest, whatever is in it. With so many blocks these are few
/// for each. Smaller ones are bounded: several in a row, as a prompt or a few make them, and then one for each such time, most
/// of it spent waiting for more. So what comes after a pause goes at once, and a trickle goes in batches; a process that dies
/// takes no more than these along, and they can be computed again.
const ENOUGH: usize = 64;
const SMALL: f64 = 8.0;
const TRICKLE: Duration = Duration::from_secs(30);

/// How long a lane waits for more than one block.
pub(super) enum Linger {
    /// Not at all.
    No,
    /// For a moment.
    Briefly,
    /// For a moment while so many small batches are left; then longer.
    Thriftily { left: f64, last: Option<Instant> },
}

impl Linger {
    pub(super) fn at(level: Level) -> Self {
        match level {
            Level::Pod | Level::G4 => Self::Thriftily { left: SMALL, last: None },
            _ => Self::Briefly,
        }
    }

    /// Blocks in a batch.
    pub(super) fn batch_blocks(&self, core: &Core) -> usize {
        let block = core.device.block_bytes().max(1);
        let bytes = match self {
            Self::Thriftily { .. } => BATCH_BYTES.max((ENOUGH * block).min(SHARED_BYTES)),
            Self::No | Self::Briefly => BATCH_BYTES,
        };
        // At most a quarter of what a batch is read from, so that a small pool stays usable meanwhile.
        let source = core.host.as_ref().map_or(core.pool.capacity(), |host| host.capacity().min(core.pool.capacity()));
        (bytes / block).min(source / 4).max(1)
    }

    /// A batch begins.
    pub(super) fn begin(&mut self, now: Instant) {
        if let Self::Thriftily { left, last: Some(last) } = self {
            let pause = now.saturating_duration_since(*last);
            *left = (*left + pause.as_secs_f64() / TRICKLE.as_secs_f64()).min(SMALL);
        }
    }

    /// Until when to wait, with so many blocks of which the first came at `first`.
    pub(super) fn until(&self, first: Instant, blocks: usize) -> Instant {
        match self {
            Self::No => first,
            Self::Thriftily { left, .. } if blocks < ENOUGH => {
                first + LINGER.max(TRICKLE.mul_f64((1.0 - left).max(0.0)))
            }
            Self::Briefly | Self::Thriftily { .. } => first + LINGER,
        }
    }

    /// A batch goes.
    pub(super) fn end(&mut self, now: Instant, blocks: usize) {
        if let Self::Thriftily { left, last } = self {
            *last = Some(now);
            *left = (*left - f64::from(u8::from(blocks < ENOUGH))).max(0.0);
        }
    }
}
