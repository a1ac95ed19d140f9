//! The blocks that a worker is assumed to cache, from the prompts that this router sent to it; for workers with
//! inaccurate events. Pure.
//!
//! A conservative guess: at most as many blocks as the worker has, evicted least recently sent first and from the end
//! of a prompt, none older than [`MAX_AGE`]. Prompts sent by other routers and generated tokens are not in it.
//!
//! The blocks are a doubly linked list in a vector, in the order in which they were entered. Their age is counted in
//! generations. A block of one of the last two is not entered again, because most blocks of a prompt are those of a hot
//! prefix. So a block may be evicted as if it had been sent a sixteenth of the capacity, or an eighth of [`MAX_AGE`],
//! earlier.

use kvbm::{HashIndex, Prefetcher, SequenceHash};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;
use tokio::time::Instant;

/// The blocks, by the time of the last prompt that contained them.
pub(crate) struct AssumedCache {
    /// Where each block is among the nodes.
    positions: HashIndex,
    /// The node [`END`] is before the first block of the list and after its last one.
    nodes: Vec<Node>,
    /// Nodes that are not in the list.
    free: Vec<u32>,
    /// When each generation began, the oldest first; those that are too old have left.
    generations: VecDeque<Instant>,
    /// Number of the oldest one.
    first_generation: u32,
    /// Number of new blocks in the newest one.
    added: usize,
}

struct Node {
    hash: SequenceHash,
    /// The generation in which it was entered.
    generation: u32,
    newer: u32,
    older: u32,
}

/// A prefix not used for this long is evicted on a busy worker, and rarely needed on an idle one.
pub(crate) const MAX_AGE: Duration = Duration::from_mins(10);

/// Number of generations in the capacity, and in [`MAX_AGE`]. One that ends late, because no prompt came, is at most
/// twice as long.
const GENERATIONS: u32 = 32;

/// Number of generations whose beginning is known: each of them has added a part of the capacity or lasted a part of
/// [`MAX_AGE`], but for one of two that begin together.
const MAX_GENERATIONS: usize = 4 * GENERATIONS as usize;

/// Assumed capacity of a worker that does not report one: blocks of 16 tokens that fit a small GPU.
pub(crate) const DEFAULT_BLOCKS: usize = 16_384;

/// Position of the node that is no block.
const END: u32 = 0;
/// The hash of a node that is no block.
const NO_HASH: SequenceHash = SequenceHash::from_bytes([0; 16]);

impl Default for AssumedCache {
    fn default() -> Self {
        Self {
            positions: HashIndex::default(),
            nodes: vec![Node { hash: NO_HASH, generation: 0, newer: END, older: END }],
            free: Vec::new(),
            generations: VecDeque::new(),
            first_generation: 0,
            added: 0,
        }
    }
}

impl AssumedCache {
    /// Adds the blocks of a computed prompt. Calls `entered` with each range of its blocks that are entered; the others
    /// were recently. Returns the blocks that are evicted to stay within `capacity`.
    pub(crate) fn insert(
        &mut self,
        prompt: &[SequenceHash],
        capacity: usize,
        now: Instant,
        mut entered: impl FnMut(Range<usize>),
    ) -> Vec<SequenceHash> {
        let generation = self.generation(capacity, now);
        let mut prefetcher = Prefetcher::default();
        let mut range = 0..0;
        // Each block is older than the ones before it in the prompt, so that the end is evicted first.
        let mut newer = END;
        for (index, hash) in prompt.iter().enumerate() {
            let (node, matches) =
                (|position| self.nodes.get(position as usize), |node: &Node, hash: &_| node.hash == *hash);
            let known = self.positions.find_batched(&mut prefetcher, prompt, index, node, matches);
            let position = if let Some(position) = known {
                if self.nodes[position as usize].generation + 1 >= generation {
                    continue;
                }
                self.unlink(position);
                position
            } else {
                let position = self.free_node();
                self.positions.insert(hash, position);
                self.added += 1;
                position
            };
            self.link(position, *hash, generation, newer);
            newer = position;
            if range.end != index {
                if !range.is_empty() {
                    entered(range);
                }
                range = index..index;
            }
            range.end = index + 1;
        }
        if !range.is_empty() {
            entered(range);
        }
        let mut removed = Vec::new();
        while self.positions.len() > capacity {
            removed.push(self.remove(self.oldest()));
        }
        removed
    }

    /// Removes and returns the blocks that are too old.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<SequenceHash> {
        let is_old = |began: &Instant| now.saturating_duration_since(*began) >= MAX_AGE;
        let old = self.generations.partition_point(is_old);
        self.generations.drain(..old);
        self.first_generation += old as u32;
        let mut removed = Vec::new();
        // The list is in the order of generations.
        while self.oldest() != END && self.nodes[self.oldest() as usize].generation < self.first_generation {
            removed.push(self.remove(self.oldest()));
        }
        removed
    }

    /// All blocks, the most recently entered first.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = SequenceHash> {
        let node = |position: u32| (position != END).then(|| &self.nodes[position as usize]);
        let newest = node(self.nodes[END as usize].older);
        std::iter::successors(newest, move |newer| node(newer.older)).map(|node| node.hash)
    }

    /// The generation of a prompt. The next one begins when the newest one has added a part of the capacity, or after
    /// a part of [`MAX_AGE`].
    fn generation(&mut self, capacity: usize, now: Instant) -> u32 {
        let age = self.generations.back().map_or(MAX_AGE, |began| now.saturating_duration_since(*began));
        let longest = MAX_AGE / GENERATIONS;
        // After a long time without prompts no block is recent.
        let begun = match age {
            _ if age >= 2 * longest => 2,
            _ if age >= longest || self.added >= capacity / GENERATIONS as usize => 1,
            _ => 0,
        };
        if begun > 0 {
            self.generations.extend([now; 2].into_iter().take(begun));
            self.added = 0;
        }
        // Blocks of earlier ones are evicted, or too old.
        while self.generations.len() > MAX_GENERATIONS {
            self.generations.pop_front();
            self.first_generation += 1;
        }
        self.first_generation + self.generations.len() as u32 - 1
    }

    /// A node that is not in the list.
    fn free_node(&mut self) -> u32 {
        self.free.pop().unwrap_or_else(|| {
            self.nodes.push(Node { hash: NO_HASH, generation: 0, newer: END, older: END });
            (self.nodes.len() - 1) as u32
        })
    }

    fn oldest(&self) -> u32 {
        self.nodes[END as usize].newer
    }

    /// Puts a node into the list, next to a newer one; [`END`]: as the newest one.
    fn link(&mut self, position: u32, hash: SequenceHash, generation: u32, newer: u32) {
        let older = std::mem::replace(&mut self.nodes[newer as usize].older, position);
        self.nodes[older as usize].newer = position;
        self.nodes[position as usize] = Node { hash, generation, newer, older };
    }

    fn unlink(&mut self, position: u32) {
        let Node { newer, older, .. } = self.nodes[position as usize];
        self.nodes[newer as usize].older = older;
        self.nodes[older as usize].newer = newer;
    }

    fn remove(&mut self, position: u32) -> SequenceHash {
        self.unlink(position);
        self.free.push(position);
        let hash = self.nodes[position as usize].hash;
        self.positions.remove(&hash, position);
        hash
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hashes(bytes: std::ops::Range<u8>) -> Vec<SequenceHash> {
        bytes.map(|byte| SequenceHash::from_bytes([byte; 16])).collect()
    }

    fn held(cache: &AssumedCache) -> Vec<SequenceHash> {
        let mut held: Vec<_> = cache.blocks().collect();
        held.sort();
        held
    }

    #[test]
    fn the_end_of_the_least_recently_sent_prompt_is_evicted_first() {
        let (mut cache, now) = (AssumedCache::default(), Instant::now());
        let mut removed_by = |prompt| cache.insert(&hashes(prompt), 6, now, drop);
        assert!(removed_by(0..4).is_empty());
        assert!(removed_by(10..12).is_empty());
        assert_eq!(removed_by(20..22), [hashes(3..4), hashes(2..3)].concat());
        assert!(removed_by(0..2).is_empty());
        assert_eq!(removed_by(30..31), hashes(11..12), "blocks that were sent again are kept");
        assert_eq!(held(&cache), [hashes(0..2), hashes(10..11), hashes(20..22), hashes(30..31)].concat());
    }

    #[test]
    fn old_blocks_expire() {
        let (mut cache, now) = (AssumedCache::default(), Instant::now());
        cache.insert(&hashes(0..4), 100, now, drop);
        cache.insert(&hashes(0..2), 100, now + MAX_AGE / 2, drop);
        assert!(cache.expire(now + MAX_AGE / 2).is_empty());
        assert_eq!(cache.expire(now + MAX_AGE), [hashes(3..4), hashes(2..3)].concat());
        assert_eq!(held(&cache), hashes(0..2));
    }

    #[test]
    fn nodes_are_used_again() {
        let (mut cache, start) = (AssumedCache::default(), Instant::now());
        for nth in 0..1000_u32 {
            let now = start + MAX_AGE / 50 * nth;
            cache.insert(&hashes((nth % 200) as u8..(nth % 200) as u8 + 10), 100, now, drop);
            cache.expire(now);
        }
        assert!(cache.nodes.len() <= 111 && cache.generations.len() <= 100, "{} nodes", cache.nodes.len());
    }

    #[test]
    fn blocks_that_were_entered_recently_are_not_entered_again() {
        let (mut cache, now) = (AssumedCache::default(), Instant::now());
        let mut entered_by = |prompt: &[SequenceHash]| -> Vec<SequenceHash> {
            let mut entered = Vec::new();
            cache.insert(prompt, 1600, now, |range| entered.extend_from_slice(&prompt[range]));
            entered
        };
        assert_eq!(entered_by(&hashes(0..40)), hashes(0..40));
        assert_eq!(entered_by(&[hashes(0..30), hashes(50..60)].concat()), hashes(50..60), "the prefix is known");
        let mixed = [hashes(0..20), hashes(70..80), hashes(30..40), hashes(80..85)].concat();
        assert_eq!(entered_by(&mixed), [hashes(70..80), hashes(80..85)].concat());
    }

    #[test]
    fn no_block_of_a_growing_conversation_expires() {
        let (mut cache, start) = (AssumedCache::default(), Instant::now());
        for turn in 0..250_u8 {
            let now = start + MAX_AGE / 20 * u32::from(turn);
            cache.insert(&hashes(0..1 + turn / 2), 1600, now, drop);
            assert!(cache.expire(now + MAX_AGE / 5 * 4).is_empty(), "turn {turn}");
        }
    }

    #[test]
    fn a_block_that_is_used_is_kept_while_others_fill_the_cache() {
        let (mut cache, now) = (AssumedCache::default(), Instant::now());
        let hot = hashes(0..10);
        for nth in 0..10_000_u32 {
            let mut prompt = hot.clone();
            prompt.push(SequenceHash::from_bytes([nth.to_le_bytes(); 4].as_flattened().try_into().unwrap()));
            let removed = cache.insert(&prompt, 160, now, drop);
            assert!(!removed.iter().any(|hash| hot.contains(hash)), "at {nth}");
        }
        assert_eq!(cache.positions.len(), 160);
    }
}
