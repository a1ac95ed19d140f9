//! The event plane of a replay: numbers block events and load reports, and loses some of the events.

use super::Profile;
use super::engine::{BlockChange, Engine};
use super::trace::{self, RequestSpec, unit_interval};
use crate::hash::{NumberMap, splitmix64};
use kvbm::{BlockEvent, Level};
use worker::plane::Load;

/// Assigns sequence numbers to events, and loses some events.
pub(super) struct EventPlane {
    /// Last sequence number of each worker, and of the shared store at the end.
    sequence_numbers: Vec<u64>,
    /// The preceding block of each block. An event covers consecutive blocks of one chain.
    parents: NumberMap<u32, u32>,
    event_loss: f64,
    /// Time from which no event is lost, in nanoseconds.
    lossless_from_ns: u64,
    rng_state: u64,
}

/// A message in transit from a source to every router.
#[derive(Clone)]
pub(super) enum Message {
    Blocks(u64, BlockEvent),
    Load(Load),
}

impl EventPlane {
    pub(super) fn new(
        workers: usize,
        requests: &[RequestSpec],
        event_loss: f64,
        lossless_from_ns: u64,
        seed: u64,
    ) -> Self {
        let pairs = requests.iter().flat_map(|spec| spec.blocks.windows(2));
        let parents = pairs.map(|pair| (pair[1], pair[0])).collect();
        Self { sequence_numbers: vec![0; workers + 1], parents, event_loss, lossless_from_ns, rng_state: seed }
    }

    /// Last sequence number of a source.
    pub(super) fn last_sequence_number(&self, source: usize) -> u64 {
        self.sequence_numbers[source]
    }

    /// Announces the changes of a worker. Returns the messages that are not lost, each with its source.
    pub(super) fn announce(&mut self, now: u64, worker: usize, changes: &[BlockChange]) -> Vec<(usize, Message)> {
        let mut messages = Vec::new();
        let runs = changes.chunk_by(|a, b| {
            let same_kind = (a.level, a.stored) == (b.level, b.stored);
            same_kind && (!a.stored || self.parents.get(&b.block) == Some(&a.block))
        });
        for run in runs {
            let (level, stored) = (run[0].level, run[0].stored);
            let parent = self.parents.get(&run[0].block).map(|block| trace::block_hash(*block));
            let blocks = run.iter().map(|change| trace::block_hash(change.block)).collect();
            let event = if stored {
                BlockEvent::Stored { level, parent, blocks }
            } else {
                BlockEvent::Removed { level, blocks }
            };
            let source = if level == Level::G4 { self.sequence_numbers.len() - 1 } else { worker };
            self.sequence_numbers[source] += 1;
            self.rng_state = splitmix64(self.rng_state);
            if now >= self.lossless_from_ns || unit_interval(self.rng_state) >= self.event_loss {
                messages.push((source, Message::Blocks(self.sequence_numbers[source], event)));
            }
        }
        messages
    }

    /// The load report of a worker.
    pub(super) fn report(&self, worker: usize, engine: &Engine, profile: &Profile) -> Message {
        Message::Load(Load { number: self.sequence_numbers[worker], ..engine.load(profile) })
    }
}
