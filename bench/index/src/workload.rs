//! The stream of events: the prompts of a trace, sent to simulated workers with LRU caches.
//!
//! It is generated before anything is measured, and is the same for every index.

use crate::seam::{Block, Index};
use anyhow::{Context, Result, ensure};
use dynamo_kv_router::protocols::{LocalBlockHash, compute_seq_hash_for_block};
use serde::Deserialize;
use std::collections::{HashMap, VecDeque};
use std::path::Path;

const BLOCK_TOKENS: usize = 16;
/// One hash id of the trace stands for 512 tokens.
const BLOCKS_PER_NUMBER: u64 = 512 / BLOCK_TOKENS as u64;
/// One event per engine step; 8,192 tokens is a common step size.
const STEP_BLOCKS: usize = 8192 / BLOCK_TOKENS;
/// Share of the requests whose events fill the index. The events of the others are the measured churn.
const FILL: f64 = 0.7;

/// Which blocks a full worker evicts first.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Evict {
    /// The end of the least recently used request: no worker ever has a hole.
    Tail,
    /// Its beginning, which leaves holes everywhere. Only for checks; no engine does that.
    Head,
}

/// Parameters of a workload.
pub(crate) struct Plan<'a> {
    pub(crate) trace: &'a Path,
    pub(crate) workers: u32,
    /// Blocks per worker.
    pub(crate) cache: usize,
    /// Number of times that the trace is repeated, each time with other hashes.
    pub(crate) copies: u64,
    pub(crate) evict: Evict,
    /// Whether each removed block is an event of its own, as some engines announce it.
    pub(crate) singles: bool,
}

/// An event of one worker.
#[derive(Clone, Copy)]
pub(crate) struct Event {
    pub(crate) worker: u32,
    /// The request that caused the event.
    pub(crate) request: usize,
    change: Change,
}

#[derive(Clone, Copy)]
enum Change {
    Stored { parent: Option<u64>, from: usize, to: usize },
    Removed { from: usize, to: usize },
}

/// The stream of events.
#[derive(Default)]
pub(crate) struct Workload {
    stored: Vec<Block>,
    removed: Vec<u64>,
    pub(crate) events: Vec<Event>,
    /// Index of the first event of the churn.
    pub(crate) churn: usize,
    /// Prompts by request.
    pub(crate) prompts: Vec<Vec<Block>>,
    /// Number of requests in the churn.
    pub(crate) recent: usize,
}

#[derive(Deserialize)]
struct Line {
    input_length: usize,
    hash_ids: Vec<u64>,
}

/// The cache of a worker: each hash with its last use, and all uses in order. A use that is not the last one of its
/// hash is skipped.
#[derive(Default)]
struct Cache {
    last: HashMap<u64, usize>,
    uses: VecDeque<(usize, u64)>,
}

/// SplitMix64.
pub(crate) fn mix(value: u64) -> u64 {
    let value = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Workload {
    pub(crate) fn new(plan: &Plan<'_>) -> Result<Self> {
        let path = plan.trace.display();
        let text =
            std::fs::read_to_string(plan.trace).with_context(|| format!("there is no trace to read at {path}"))?;
        let lines: Vec<Line> = text
            .lines()
            .map(serde_json::from_str)
            .collect::<Result<_, _>>()
            .with_context(|| format!("{path} is no trace in Mooncake's format"))?;
        ensure!(!lines.is_empty(), "{path} has no request in it");
        let total = lines.len() * plan.copies as usize;
        let fill = (total as f64 * FILL) as usize;
        let mut caches: Vec<Cache> = (0..plan.workers).map(|_| Cache::default()).collect();
        let mut workload = Self { recent: total - fill, ..Self::default() };
        let requests = (0..plan.copies).flat_map(|copy| lines.iter().map(move |line| (copy, line)));
        for (request, (copy, line)) in requests.enumerate() {
            if request == fill {
                workload.churn = workload.events.len();
            }
            let worker = worker_for(line, request as u64, copy, plan.workers);
            let prompt = prompt(line, copy);
            workload.serve(plan, &mut caches[worker as usize], worker, request, &prompt);
            workload.prompts.push(prompt);
        }
        Ok(workload)
    }

    /// One request on one worker: first the evictions, then the new blocks, one event per step.
    fn serve(&mut self, plan: &Plan<'_>, cache: &mut Cache, worker: u32, request: usize, prompt: &[Block]) {
        let from = self.removed.len();
        let hit = cache.take(plan, request, prompt, &mut self.removed);
        let step = if plan.singles { 1 } else { usize::MAX };
        for from in (from..self.removed.len()).step_by(step) {
            let change = Change::Removed { from, to: self.removed.len().min(from.saturating_add(step)) };
            self.events.push(Event { worker, request, change });
        }
        let mut parent = hit.checked_sub(1).map(|last| prompt[last].sequence);
        for step in prompt[hit..].chunks(STEP_BLOCKS) {
            let from = self.stored.len();
            self.stored.extend_from_slice(step);
            let change = Change::Stored { parent, from, to: self.stored.len() };
            self.events.push(Event { worker, request, change });
            parent = step.last().map(|block| block.sequence);
        }
    }

    pub(crate) fn apply(&self, index: &impl Index, event: &Event) {
        match event.change {
            Change::Stored { parent, from, to } => index.stored(event.worker, parent, &self.stored[from..to]),
            Change::Removed { from, to } => index.removed(event.worker, &self.removed[from..to]),
        }
    }

    /// Number of stored and removed blocks.
    pub(crate) fn operations(events: &[Event]) -> usize {
        let blocks = |event: &Event| match event.change {
            Change::Stored { from, to, .. } | Change::Removed { from, to } => to - from,
        };
        events.iter().map(blocks).sum()
    }
}

impl Cache {
    /// Adds a prompt to the cache. Returns the number of cached leading blocks, and adds evicted hashes to `evicted`.
    fn take(&mut self, plan: &Plan<'_>, now: usize, prompt: &[Block], evicted: &mut Vec<u64>) -> usize {
        let hit = prompt.iter().take_while(|block| self.last.contains_key(&block.sequence)).count();
        let mut fresh = 0;
        for block in prompt {
            match self.last.get_mut(&block.sequence) {
                Some(last) => *last = now,
                None => fresh += 1,
            }
        }
        while self.last.len() + fresh > plan.cache {
            let Some((used, hash)) = self.uses.pop_front() else { break };
            if self.last.get(&hash) == Some(&used) {
                self.last.remove(&hash);
                evicted.push(hash);
            }
        }
        let uses = prompt.iter().map(|block| (now, block.sequence));
        self.last.extend(uses.clone().map(|(now, hash)| (hash, now)));
        match plan.evict {
            Evict::Tail => self.uses.extend(uses.rev()),
            Evict::Head => self.uses.extend(uses),
        }
        hit
    }
}

fn prompt(line: &Line, copy: u64) -> Vec<Block> {
    let parts = |number: &u64| {
        let number = mix(copy << 40 | number);
        (0..BLOCKS_PER_NUMBER).map(move |part| LocalBlockHash(mix(number ^ part)))
    };
    let contents: Vec<_> = line.hash_ids.iter().flat_map(parts).take(line.input_length / BLOCK_TOKENS).collect();
    let sequences = compute_seq_hash_for_block(&contents);
    contents.iter().zip(sequences).map(|(content, sequence)| Block { content: content.0, sequence }).collect()
}

/// Requests with the same first 2,048 tokens go to the same worker, except one request in five, which goes to any
/// worker.
fn worker_for(line: &Line, request: u64, copy: u64, workers: u32) -> u32 {
    let dice = mix(request ^ 0xd1ce);
    let key = if dice.is_multiple_of(5) {
        mix(dice)
    } else {
        line.hash_ids.iter().take(4).fold(copy, |key, number| mix(key ^ number))
    };
    (key % u64::from(workers)) as u32
}
