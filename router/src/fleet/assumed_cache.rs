//! The blocks that a worker is assumed to cache, from the prompts that this router sent to it; for workers with
//! inaccurate events. Pure.
//!
//! A conservative guess: at most as many blocks as the worker has, evicted least recently sent first and from the end
//! of a prompt, none older than [`MAX_AGE`]. Prompts sent by other routers and generated tokens are not in it.
//!
//! The order is approximate: a block that was entered recently is not entered again, because most blocks of a prompt
//! are those of a hot prefix. So a block may be evicted as if it had been sent an eighth of the capacity, or of
//! [`MAX_AGE`], earlier.

use crate::hash::NumberMap;
use kvbm::SequenceHash;
use std::collections::VecDeque;
use std::collections::hash_map::Entry;
use std::ops::Range;
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
    /// Number of entries when the present generation of entries began, and the one before.
    generations: [u64; 2],
    /// When the present generation began.
    turned: Option<Instant>,
}

/// What a prompt changed.
#[derive(Default, PartialEq, Eq, Debug)]
pub(crate) struct Inserted {
    /// The blocks of the prompt that were entered, as ranges of its blocks. The others were entered recently.
    pub(crate) entered: Vec<Range<usize>>,
    /// The blocks that were evicted.
    pub(crate) removed: Vec<SequenceHash>,
}

/// A prefix not used for this long is evicted on a busy worker, and rarely needed on an idle one.
pub(crate) const MAX_AGE: Duration = Duration::from_mins(10);

/// Number of generations in the capacity, and in [`MAX_AGE`]. Entries of two generations are recent. One that ends late,
/// because no prompt came, is at most twice as long.
const GENERATIONS: u32 = 32;

/// Assumed capacity of a worker that does not report one: blocks of 16 tokens that fit a small GPU.
pub(crate) const DEFAULT_BLOCKS: usize = 16_384;

impl AssumedCache {
    /// Adds the blocks of a computed prompt, and evicts blocks to stay within `capacity`.
    pub(crate) fn insert(&mut self, prompt: &[SequenceHash], capacity: usize, now: Instant) -> Inserted {
        let recent = self.recent_after(capacity, now);
        let Inserted { mut entered, mut removed } = Inserted::default();
        // The end first, so that it is evicted first.
        for (index, hash) in prompt.iter().enumerate().rev() {
            let entry = (self.entries + 1, *hash);
            match self.latest.entry(hash.short()) {
                Entry::Occupied(known) if known.get().0 > recent => continue,
                Entry::Occupied(mut known) => drop(known.insert(entry)),
                Entry::Vacant(vacant) => drop(vacant.insert(entry)),
            }
            self.entries += 1;
            self.queue.push_back((self.entries, now, *hash));
            match entered.last_mut() {
                Some(Range { start, .. }) if *start == index + 1 => *start = index,
                _ => entered.push(index..index + 1),
            }
        }
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
        Inserted { entered, removed }
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

    /// Entries with a larger number are recent: those of the present generation and of the one before. A generation
    /// is a part of the capacity, or of [`MAX_AGE`].
    fn recent_after(&mut self, capacity: usize, now: Instant) -> u64 {
        let age = self.turned.map_or(MAX_AGE, |turned| now.saturating_duration_since(turned));
        let longest = MAX_AGE / GENERATIONS;
        let [present, _] = self.generations;
        if age >= 2 * longest {
            (self.generations, self.turned) = ([self.entries; 2], Some(now));
        } else if age >= longest || self.entries - present >= capacity as u64 / u64::from(GENERATIONS) {
            (self.generations, self.turned) = ([self.entries, present], Some(now));
        }
        self.generations[1]
    }

    fn drop_block(&mut self, entry: u64, hash: SequenceHash, removed: &mut Vec<SequenceHash>) {
        if let Entry::Occupied(known) = self.latest.entry(hash.short())
            && known.get().0 == entry
        {
            known.remove();
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
        let mut removed_by = |prompt| cache.insert(&hashes(prompt), 6, now).removed;
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

    #[test]
    fn blocks_that_were_entered_recently_are_not_entered_again() {
        let (mut cache, now) = (AssumedCache::default(), Instant::now());
        let mut entered_by = |prompt: &[SequenceHash]| -> Vec<SequenceHash> {
            let Inserted { entered, .. } = cache.insert(prompt, 1600, now);
            entered.into_iter().flat_map(|range| prompt[range].to_vec()).collect()
        };
        assert_eq!(entered_by(&hashes(0..40)), hashes(0..40));
        assert_eq!(entered_by(&[hashes(0..30), hashes(50..60)].concat()), hashes(50..60), "the prefix is known");
        let mixed = [hashes(0..20), hashes(70..80), hashes(30..40), hashes(80..85)].concat();
        assert_eq!(entered_by(&mixed), [hashes(80..85), hashes(70..80)].concat());
    }

    #[test]
    fn no_block_of_a_growing_conversation_expires() {
        let (mut cache, start) = (AssumedCache::default(), Instant::now());
        for turn in 0..250_u8 {
            let now = start + MAX_AGE / 20 * u32::from(turn);
            cache.insert(&hashes(0..1 + turn / 2), 1600, now);
            assert!(cache.expire(now + MAX_AGE / 5 * 4).is_empty(), "turn {turn}: {:?}", cache.queue.front());
        }
    }

    #[test]
    fn a_block_that_is_used_is_kept_while_others_fill_the_cache() {
        let (mut cache, now) = (AssumedCache::default(), Instant::now());
        let hot = hashes(0..10);
        for nth in 0..10_000_u32 {
            let mut prompt = hot.clone();
            prompt.push(SequenceHash::from_bytes([nth.to_le_bytes(); 4].as_flattened().try_into().unwrap()));
            let Inserted { removed, .. } = cache.insert(&prompt, 160, now);
            assert!(!removed.iter().any(|hash| hot.contains(hash)), "at {nth}");
        }
        assert_eq!(cache.latest.len(), 160);
        assert!(cache.queue.len() <= 320);
    }
}
