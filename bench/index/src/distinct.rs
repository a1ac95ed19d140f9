//! Memory of the router's index when more blocks are announced than its memory limit allows, and none are removed.

use crate::measure::resident;
use crate::workload::mix;
use anyhow::Result;
use kvbm::{BlockEvent, Level, SequenceHash};
use router::index::{Holder, Index};
use serde_json::{Value, json};
use worker::plane::WorkerId;

/// About a quarter of what ten million blocks take without a limit.
const MEMORY_LIMIT: usize = 64 << 20;
const WORKERS: u64 = 128;
/// Blocks per event.
const RUN: usize = 512;
/// Events between two measurements.
const MEASURE_EVERY: usize = 256;

/// Announces this many distinct blocks and returns the maximum memory.
pub(crate) fn measure(blocks: usize) -> Result<Value> {
    let before = resident()?;
    let index = Index::with_memory_limit(MEMORY_LIMIT)?;
    for worker in 0..WORKERS {
        index.join(WorkerId(worker), &[]);
    }
    let hash = |at: usize| SequenceHash::from_bytes(u128::from(mix(at as u64)).to_le_bytes());
    let (mut counted, mut grown) = (0, 0);
    for (event, from) in (0..blocks).step_by(RUN).enumerate() {
        // Each worker extends a chain of its own.
        let parent = from.checked_sub(RUN * WORKERS as usize).map(|before| hash(before + RUN - 1));
        let blocks = (from..(from + RUN).min(blocks)).map(hash).collect();
        let holder = Holder::Worker(WorkerId(event as u64 % WORKERS));
        index.apply(holder, &BlockEvent::Stored { level: Level::G1, parent, blocks });
        if event % MEASURE_EVERY == 0 {
            counted = counted.max(index.bytes());
            grown = grown.max(resident()? - before);
        }
    }
    Ok(json!({
        "distinct": blocks,
        "memory_limit_bytes": MEMORY_LIMIT,
        "index_bytes_most": counted.max(index.bytes()),
        "resident_bytes_most": grown.max(resident()? - before),
        "entries_left": index.entries(),
        "pages_evicted": index.evicted_pages(),
    }))
}
