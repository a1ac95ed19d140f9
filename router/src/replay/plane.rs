//! The planes of a replay: what workers announce and report, numbered, late, or lost.

use super::Profile;
use super::engine::{Change, Engine};
use super::trace::{self, Asked, unit};
use crate::hash::{NumberMap, splitmix64};
use kvbm::{BlockEvent, Level};
use worker::plane::Load;

/// Numbers what is announced, and loses some of it.
pub(super) struct Plane {
    /// By source: the last number; workers, and at the end the shared store.
    numbers: Vec<u64>,
    /// By block, the one before it: an event tells of a run of one chain.
    parents: NumberMap<u32, u32>,
    loss: f64,
    /// From then on nothing is lost.
    sound_from_ns: u64,
    draws: u64,
}

/// A message on its way from a source to every router.
#[derive(Clone)]
pub(super) enum Message {
    Blocks(u64, BlockEvent),
    Load(Load),
}

impl Plane {
    pub(super) fn new(workers: usize, requests: &[Asked], loss: f64, sound_from_ns: u64, seed: u64) -> Self {
        let pairs = requests.iter().flat_map(|asked| asked.blocks.windows(2));
        let parents = pairs.map(|pair| (pair[1], pair[0])).collect();
        Self { numbers: vec![0; workers + 1], parents, loss, sound_from_ns, draws: seed }
    }

    /// The last number that a source used.
    pub(super) fn number(&self, source: usize) -> u64 {
        self.numbers[source]
    }

    /// A worker announces what changed. Answers with the messages that are not lost on their way, and from which source.
    pub(super) fn announce(&mut self, now: u64, worker: usize, changes: &[Change]) -> Vec<(usize, Message)> {
        let mut messages = Vec::new();
        let runs = changes.chunk_by(|a, b| {
            let alike = (a.level, a.stored) == (b.level, b.stored);
            alike && (!a.stored || self.parents.get(&b.block) == Some(&a.block))
        });
        for run in runs {
            let (level, stored) = (run[0].level, run[0].stored);
            let parent = self.parents.get(&run[0].block).map(|block| trace::name(*block));
            let blocks = run.iter().map(|change| trace::name(change.block)).collect();
            let event = if stored {
                BlockEvent::Stored { level, parent, blocks }
            } else {
                BlockEvent::Removed { level, blocks }
            };
            let source = if level == Level::G3 { self.numbers.len() - 1 } else { worker };
            self.numbers[source] += 1;
            self.draws = splitmix64(self.draws);
            if now >= self.sound_from_ns || unit(self.draws) >= self.loss {
                messages.push((source, Message::Blocks(self.numbers[source], event)));
            }
        }
        messages
    }

    /// A worker's report, as it leaves.
    pub(super) fn report(&self, worker: usize, engine: &Engine, profile: &Profile) -> Message {
        Message::Load(Load { number: self.numbers[worker], ..engine.load(profile) })
    }
}
