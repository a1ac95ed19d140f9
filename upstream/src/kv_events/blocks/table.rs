//! The known blocks by the engine's hash.

use crate::kv_events::wire::EngineHash;
use foldhash::fast::RandomState;
use std::collections::HashMap;

/// An array of blocks, and a table of their positions.
///
/// Blocks of one event are neighbours in the array, so storing them touches few cache lines and memory pages; in one
/// table with the hashes each would touch several of its own.
pub(super) struct Table<E> {
    /// The keys are hashes of the engine, which no client chooses. Rust's default hash took a tenth of the instructions
    /// of an event.
    positions: HashMap<EngineHash, u32, RandomState>,
    entries: Vec<E>,
    /// Positions of removed blocks, whose entries are out of date.
    free: Vec<u32>,
}

impl<E> Default for Table<E> {
    fn default() -> Self {
        Self { positions: HashMap::default(), entries: Vec::new(), free: Vec::new() }
    }
}

impl<E> Table<E> {
    pub(super) fn len(&self) -> usize {
        self.positions.len()
    }

    /// Prepares for lookups and insertions of these blocks, of which at most `room` are new. One such lookup waits for
    /// the one before it, because the hash of a block depends on its parent. Those in here do not wait for each other,
    /// so their cache misses overlap.
    pub(super) fn prepare(&mut self, blocks: &[EngineHash], room: usize) {
        let new = blocks.iter().filter(|hash| !self.positions.contains_key(hash)).count();
        self.positions.reserve(new.min(room));
    }

    pub(super) fn get(&self, hash: EngineHash) -> Option<&E> {
        self.positions.get(&hash).map(|position| &self.entries[*position as usize])
    }

    pub(super) fn get_mut(&mut self, hash: EngineHash) -> Option<&mut E> {
        self.positions.get(&hash).map(|position| &mut self.entries[*position as usize])
    }

    /// Adds a block that is not known.
    pub(super) fn insert(&mut self, hash: EngineHash, entry: E) -> &mut E {
        let position = if let Some(position) = self.free.pop() {
            self.entries[position as usize] = entry;
            position
        } else {
            self.entries.push(entry);
            self.entries.len() as u32 - 1
        };
        self.positions.insert(hash, position);
        &mut self.entries[position as usize]
    }

    pub(super) fn remove(&mut self, hash: EngineHash) {
        self.free.extend(self.positions.remove(&hash));
    }
}
