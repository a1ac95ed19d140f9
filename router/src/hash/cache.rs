//! Block hashes of prompts, with a cache of those that were computed recently.
//!
//! The hashes of a prompt are a chain of one compression per block, each of which needs the result of the one before.
//! Most prompts begin like an earlier one, and comparing tokens takes a tenth of the time of hashing. So the tokens of
//! recent prompts are kept in segments, each with the hashes of its blocks and the chain values before and after it.
//! A segment counts only if all of its tokens and the chain value before it are equal, so the result is always that of
//! [`ChainKey::hashes`], and prompts of two cache domains never share a segment.
//!
//! The cache is a set-associative table of two ways. A segment that was found since its slot was last looked at is not
//! replaced, so prompts that are seen once do not displace the prefixes that many share.

use super::splitmix64;
use kvbm::{ChainKey, SequenceHash};
use parking_lot::Mutex;

/// Tokens per segment: long enough that finding one costs little beside hashing its blocks (2 µs), and short enough
/// that prompts which share less than a thousand tokens have one in common.
const SEGMENT_TOKENS: usize = 512;
/// Number of segments that are kept: a million tokens, 5.4 MB.
const SEGMENTS: usize = 2048;

/// The cache.
pub(crate) struct HashCache {
    /// Pairs of slots; a segment is in either slot of its pair.
    slots: Box<[Mutex<Slot>]>,
}

#[derive(Default)]
struct Slot {
    segment: Option<Box<Segment>>,
    /// Whether the segment was found since a new one was last refused its place.
    is_used: bool,
}

/// Consecutive tokens of a prompt, and the hashes of their blocks.
struct Segment {
    tokens: [u32; SEGMENT_TOKENS],
    /// Chain value before the first block, which commits to everything before it.
    before: ChainKey,
    /// Chain value after the last block.
    after: ChainKey,
    /// One per block, so their number tells the block size.
    hashes: Box<[SequenceHash]>,
}

impl Default for HashCache {
    fn default() -> Self {
        Self { slots: (0..SEGMENTS).map(|_| Mutex::default()).collect() }
    }
}

impl HashCache {
    /// Hashes of all full blocks of a prompt, in order: the same as [`ChainKey::hashes`].
    pub(crate) fn hashes(&self, root: ChainKey, tokens: &[u32], block_size: usize) -> Vec<SequenceHash> {
        if !SEGMENT_TOKENS.is_multiple_of(block_size) {
            return root.hashes(tokens, block_size);
        }
        let mut hashes = Vec::with_capacity(tokens.len() / block_size);
        let (segments, rest) = tokens.as_chunks::<SEGMENT_TOKENS>();
        let mut key = root;
        for segment in segments {
            let pair = pair_of(&key, segment);
            key = match self.find(pair, &key, segment, block_size, &mut hashes) {
                Some(after) => after,
                None => self.compute(pair, key, segment, block_size, &mut hashes),
            };
        }
        hashes.extend(rest.chunks_exact(block_size).map(|block| key.push(block)));
        hashes
    }

    /// Appends the hashes of a segment that is kept. Returns the chain value after it.
    fn find(
        &self,
        pair: usize,
        before: &ChainKey,
        tokens: &[u32; SEGMENT_TOKENS],
        block_size: usize,
        hashes: &mut Vec<SequenceHash>,
    ) -> Option<ChainKey> {
        for slot in self.pair(pair) {
            // Another decision holds the lock for less time than hashing takes, but may have been suspended.
            let Some(mut slot) = slot.try_lock() else { continue };
            let Some(segment) = &slot.segment else { continue };
            if segment.is(before, tokens, block_size) {
                hashes.extend_from_slice(&segment.hashes);
                let after = segment.after;
                slot.is_used = true;
                return Some(after);
            }
        }
        None
    }

    /// Appends the hashes of a segment, and keeps them if a slot of the pair is free or was not used. Returns the chain
    /// value after the segment.
    fn compute(
        &self,
        pair: usize,
        before: ChainKey,
        tokens: &[u32; SEGMENT_TOKENS],
        block_size: usize,
        hashes: &mut Vec<SequenceHash>,
    ) -> ChainKey {
        let (mut after, first) = (before, hashes.len());
        hashes.extend(tokens.chunks_exact(block_size).map(|block| after.push(block)));
        for slot in self.pair(pair) {
            let Some(mut slot) = slot.try_lock() else { continue };
            if !std::mem::take(&mut slot.is_used) {
                slot.keep(tokens, before, after, &hashes[first..]);
                break;
            }
        }
        after
    }

    fn pair(&self, pair: usize) -> &[Mutex<Slot>] {
        &self.slots[pair * 2..pair * 2 + 2]
    }
}

impl Slot {
    /// Keeps a segment, in the memory of the one before it.
    fn keep(&mut self, tokens: &[u32; SEGMENT_TOKENS], before: ChainKey, after: ChainKey, hashes: &[SequenceHash]) {
        match &mut self.segment {
            Some(segment) if segment.hashes.len() == hashes.len() => {
                segment.tokens = *tokens;
                (segment.before, segment.after) = (before, after);
                segment.hashes.copy_from_slice(hashes);
            }
            segment => *segment = Some(Box::new(Segment { tokens: *tokens, before, after, hashes: hashes.into() })),
        }
    }
}

impl Segment {
    fn is(&self, before: &ChainKey, tokens: &[u32; SEGMENT_TOKENS], block_size: usize) -> bool {
        self.hashes.len() * block_size == SEGMENT_TOKENS && self.before == *before && self.tokens == *tokens
    }
}

/// The pair of slots of a segment: by a fast hash of its tokens that need not resist collisions, because segments are
/// compared.
fn pair_of(before: &ChainKey, tokens: &[u32; SEGMENT_TOKENS]) -> usize {
    // Four hashes of every fourth pair of tokens, whose multiplications do not wait for each other. The first token of
    // a pair is the low half, so that a pair is one load.
    let mut lanes = [before.hash().short(); 4];
    for chunk in tokens.as_chunks::<8>().0 {
        for (lane, [low, high]) in lanes.iter_mut().zip(chunk.as_chunks::<2>().0) {
            let two = u64::from(*low) | u64::from(*high) << 32;
            *lane = (*lane ^ two).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29);
        }
    }
    let hash = lanes.into_iter().fold(0, |hash, lane| splitmix64(hash ^ lane));
    hash as usize % (SEGMENTS / 2)
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::Domain;

    fn root(model: &str) -> ChainKey {
        ChainKey::root(&Domain::shared(), model, None)
    }

    fn tokens(seed: u64, len: usize) -> Vec<u32> {
        (0..len as u64).map(|at| splitmix64(seed << 32 | at) as u32 % 50_000).collect()
    }

    fn kept(cache: &HashCache) -> Vec<[u32; SEGMENT_TOKENS]> {
        cache.slots.iter().filter_map(|slot| slot.lock().segment.as_ref().map(|segment| segment.tokens)).collect()
    }

    #[test]
    fn hashes_are_those_without_a_cache() {
        let cache = HashCache::default();
        let shared = tokens(1, 3000);
        for round in 0..3 {
            for block_size in [16, 32, 24, 1, 512, 1024] {
                for model in ["a", "b"] {
                    for shared_len in [0, 100, 512, 513, 1024, 2900] {
                        let mut prompt = shared[..shared_len].to_vec();
                        prompt.extend(tokens(2 + shared_len as u64, 700));
                        let hashes = cache.hashes(root(model), &prompt, block_size);
                        assert!(
                            hashes == root(model).hashes(&prompt, block_size),
                            "round {round}, blocks of {block_size}, model {model}, {shared_len} shared tokens"
                        );
                    }
                }
            }
        }
    }

    #[test]
    fn a_segment_is_found_again_after_the_same_prefix_only() {
        let cache = HashCache::default();
        let prompt = tokens(1, SEGMENT_TOKENS * 2);
        let (first, second) = prompt.split_at(SEGMENT_TOKENS);
        let find = |before: &ChainKey, tokens: &[u32], block_size| {
            let tokens = tokens.try_into().unwrap();
            cache.find(pair_of(before, tokens), before, tokens, block_size, &mut Vec::new())
        };
        assert!(find(&root("a"), first, 16).is_none(), "nothing is kept yet");
        cache.hashes(root("a"), &prompt, 16);
        let after = find(&root("a"), first, 16).expect("the first segment is kept");
        assert!(find(&after, second, 16).is_some());
        assert!(find(&root("b"), first, 16).is_none(), "another model");
        assert!(find(&root("a"), second, 16).is_none(), "another prefix");
        assert!(find(&root("a"), first, 32).is_none(), "blocks of another size");
    }

    #[test]
    fn prompts_that_are_seen_once_do_not_displace_a_shared_prefix() {
        let cache = HashCache::default();
        let shared = tokens(1, SEGMENT_TOKENS);
        for seed in 2..(SEGMENTS as u64 * 10) {
            cache.hashes(root("a"), &tokens(seed, SEGMENT_TOKENS), 512);
            // As often as a fifth of all prompts.
            if seed % 5 == 0 {
                cache.hashes(root("a"), &shared, 512);
            }
        }
        let kept = kept(&cache);
        assert!(kept.len() > SEGMENTS / 2, "the cache is in use: {}", kept.len());
        assert!(kept.iter().any(|tokens| tokens == &*shared));
    }
}
