//! More blocks than the router's index may know: what it takes for them, while nobody gives any up.

use crate::measure::resident;
use crate::workload::mix;
use anyhow::Result;
use kvbm::{BlockEvent, Level, SequenceHash};
use router::index::Index;
use serde_json::{Value, json};
use worker::plane::{Source, WorkerId};

/// A quarter of what ten million blocks take without a limit, about.
const BUDGET: usize = 64 << 20;
const WORKERS: u64 = 128;
/// Blocks that an event tells of.
const RUN: usize = 512;
/// Events between two looks.
const LOOKS: usize = 256;

/// Passes so many distinct blocks through, and answers with the most that was seen of its memory.
pub(crate) fn measure(blocks: usize) -> Result<Value> {
    let before = resident()?;
    let index = Index::with_memory_limit(BUDGET);
    for worker in 0..WORKERS {
        index.join(WorkerId(worker), &[]);
    }
    let name = |at: usize| SequenceHash::from_bytes(u128::from(mix(at as u64)).to_le_bytes());
    let (mut counted, mut grown) = (0, 0);
    for (event, from) in (0..blocks).step_by(RUN).enumerate() {
        // Each worker goes on with a chain of its own.
        let parent = from.checked_sub(RUN * WORKERS as usize).map(|before| name(before + RUN - 1));
        let blocks = (from..(from + RUN).min(blocks)).map(name).collect();
        let source = Source::Worker(WorkerId(event as u64 % WORKERS));
        index.apply(source, &BlockEvent::Stored { level: Level::G1, parent, blocks });
        if event % LOOKS == 0 {
            counted = counted.max(index.bytes());
            grown = grown.max(resident()? - before);
        }
    }
    Ok(json!({
        "distinct": blocks,
        "budget_bytes": BUDGET,
        "index_bytes_most": counted.max(index.bytes()),
        "resident_bytes_most": grown.max(resident()? - before),
        "memberships_left": index.entries(),
        "pages_forgotten": index.evicted_pages(),
    }))
}
