//! The blocks that a worker is assumed to cache, from the prompts that this router sent to it; for workers with
//! inaccurate events. Pure.
//!
//! A conservative guess: at most as many blocks as the worker has, evicted least recently sent first and from the end
//! of a prompt, none older than [`MAX_AGE`]. Prompts sent by other routers and generated tokens are not in it.

use crate::hash::NumberMap;
use kvbm::SequenceHash;
use std::collections::VecDeque;
use std::time::Duration;
use tokio::time::Instant;

/// The blocks, by the time of the last prompt that contained them.
#[derive(Default)]
pub(crate) struct AssumedCache {
    /// The number of a block's latest entry in the queue, by its short hash. If two blocks have the same, the earlier
    /// one leaves with the later one.
    latest: NumberMap<u64, (u64, SequenceHash)>,
    /// Entries, oldest first, including those that a later entry of the same block replaced.
    queue: VecDeque<(u64, Instant, SequenceHash)>,
    entries: u64,
}

/// A prefix not used for this long is evicted on a busy worker, and rarely needed on an idle one.
pub(crate) const MAX_AGE: Duration = Duration::from_mins(10);

/// Assumed capacity of a worker that does not report one: blocks of 16 tokens that fit a small GPU.
pub(crate) const DEFAULT_BLOCKS: usize = 16_384;

impl AssumedCache {
    /// Adds the blocks of a computed prompt. Returns the blocks that were evicted to stay within `capacity`.
    pub(crate) fn insert(&mut self, prompt: &[SequenceHash], capacity: usize, now: Instant) -> Vec<SequenceHash> {
        for hash in prompt.iter().rev() {
            self.entries += 1;
            self.latest.insert(hash.short(), (self.entries, *hash));
            self.queue.push_back((self.entries, now, *hash));
        }
        let mut removed = Vec::new();
        while self.latest.len() > capacity
            && let Some((entry, _, hash)) = self.queue.pop_front()
        {
            self.drop_block(entry, hash, &mut removed);
        }
        // Afterwards at least half of the entries are current, so the cost is constant per entry.
        if self.queue.len() > 2 * self.latest.len() {
            let latest = &self.latest;
            self.queue.retain(|(entry, _, hash)| latest.get(&hash.short()).is_some_and(|(last, _)| last == entry));
        }
        removed
    }

    /// Removes and returns the blocks that are too old.
    pub(crate) fn expire(&mut self, now: Instant) -> Vec<SequenceHash> {
        let mut removed = Vec::new();
        while let Some((entry, at, hash)) = self.queue.front().copied()
            && now.saturating_duration_since(at) >= MAX_AGE
        {
            self.queue.pop_front();
            self.drop_block(entry, hash, &mut removed);
        }
        removed
    }

    /// All blocks, in no order.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = SequenceHash> {
        self.latest.values().map(|(_, hash)| *hash)
    }

    fn drop_block(&mut self, entry: u64, hash: SequenceHash, removed: &mut Vec<SequenceHash>) {
        if self.latest.get(&hash.short()).is_some_and(|(last, _)| *last == entry) {
            self.latest.remove(&hash.short());
            removed.push(hash);
        }
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
        assert!(cache.insert(&hashes(0..4), 6, now).is_empty());
        assert!(cache.insert(&hashes(10..12), 6, now).is_empty());
        assert_eq!(cache.insert(&hashes(20..22), 6, now), [hashes(3..4), hashes(2..3)].concat());
        cache.insert(&hashes(0..2), 6, now);
        assert_eq!(cache.insert(&hashes(30..31), 6, now), hashes(11..12), "blocks that were sent again are kept");
        assert_eq!(held(&cache), [hashes(0..2), hashes(10..11), hashes(20..22), hashes(30..31)].concat());
    }

    #[test]
    fn old_blocks_expire() {
        let (mut cache, now) = (AssumedCache::default(), Instant::now());
        cache.insert(&hashes(0..4), 100, now);
        cache.insert(&hashes(0..2), 100, now + MAX_AGE / 2);
        assert!(cache.expire(now + MAX_AGE / 2).is_empty());
        assert_eq!(cache.expire(now + MAX_AGE), [hashes(3..4), hashes(2..3)].concat());
        assert_eq!(held(&cache), hashes(0..2));
    }

    #[test]
    fn a_hot_prompt_does_not_grow_the_queue() {
        let (mut cache, now) = (AssumedCache::default(), Instant::now());
        cache.insert(&hashes(50..51), 100, now);
        (0..1000).for_each(|_| drop(cache.insert(&hashes(0..10), 100, now)));
        assert!(cache.queue.len() <= 2 * cache.latest.len(), "{}", cache.queue.len());
    }
}
