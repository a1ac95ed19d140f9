//! Chooses the blocks of a victim segment that are carried over to the head. Pure.
//!
//! A log reclaims whole segments. It carries over pinned blocks, then blocks in use: those that were read and those
//! with a child in a later segment; and the ancestors of both in the segment, because a block is useless without its
//! parents.

use crate::block::{Fingerprint, SequenceHash};
use std::collections::{BTreeSet, HashSet};

/// A block that the index locates in the segment, in the order of the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) fingerprint: Fingerprint,
    pub(super) hash: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    /// Whether the block was read, or has a child in a later segment.
    pub(super) hot: bool,
    /// Whether the block is pinned.
    pub(super) pinned: bool,
    /// Length of the record in bytes.
    pub(super) bytes: u64,
}

/// Indices of the blocks to carry over, in the order of the log, at most `budget` bytes. Pinned blocks come before
/// hot ones; among each, the first ones come first, because they are the parents of the others.
pub(super) fn carried(candidates: &[Candidate], budget: u64) -> Vec<usize> {
    let mut left = budget;
    let mut carried = BTreeSet::new();
    for condition in [|block: &Candidate| block.pinned, |block: &Candidate| block.hot] {
        for position in wanted(candidates, condition) {
            if carried.contains(&position) {
                continue;
            }
            let Some(rest) = left.checked_sub(candidates[position].bytes) else { break };
            left = rest;
            carried.insert(position);
        }
    }
    carried.into_iter().collect()
}

/// Indices of the blocks that satisfy the condition and of their ancestors, in the order of the log.
fn wanted(candidates: &[Candidate], condition: impl Fn(&Candidate) -> bool) -> Vec<usize> {
    let mut needed: HashSet<(Fingerprint, SequenceHash)> = HashSet::new();
    let mut wanted = Vec::new();
    for (position, block) in candidates.iter().enumerate().rev() {
        if condition(block) || needed.contains(&(block.fingerprint, block.hash)) {
            wanted.push(position);
            needed.extend(block.parent.map(|parent| (block.fingerprint, parent)));
        }
    }
    wanted.reverse();
    wanted
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Blocks as `(hash, parent, hot)` of ten bytes each, and the pinned hashes. Returns the hashes that are carried
    /// over.
    fn carried_hashes_with_pins(blocks: &[(u8, u8, bool)], pinned: &[u8], budget: u64) -> Vec<u8> {
        let candidate = |&(hash, parent, hot): &(u8, u8, bool)| Candidate {
            fingerprint: Fingerprint::from_bytes([0; 32]),
            hash: SequenceHash::from_bytes([hash; 16]),
            parent: (parent > 0).then(|| SequenceHash::from_bytes([parent; 16])),
            hot,
            pinned: pinned.contains(&hash),
            bytes: 10,
        };
        let candidates: Vec<_> = blocks.iter().map(candidate).collect();
        carried(&candidates, budget).into_iter().map(|at| blocks[at].0).collect()
    }

    fn carried_hashes(blocks: &[(u8, u8, bool)], budget: u64) -> Vec<u8> {
        carried_hashes_with_pins(blocks, &[], budget)
    }

    #[test]
    fn pinned_blocks_and_their_parents_come_first() {
        let blocks = [(9, 0, true), (1, 0, false), (2, 1, false), (3, 2, false), (8, 0, true)];
        assert_eq!(carried_hashes_with_pins(&blocks, &[2], 20), [1, 2]);
        assert_eq!(carried_hashes_with_pins(&blocks, &[2], 30), [9, 1, 2]);
        assert_eq!(carried_hashes_with_pins(&blocks, &[2], 100), [9, 1, 2, 8]);
    }

    #[test]
    fn unused_blocks_are_not_carried_over() {
        assert_eq!(carried_hashes(&[(1, 0, false), (2, 1, false)], 100), [0; 0]);
    }

    #[test]
    fn blocks_in_use_are_carried_over_with_their_parents() {
        let chain = [(1, 0, false), (2, 1, false), (8, 0, false), (3, 2, true), (4, 3, false)];
        assert_eq!(carried_hashes(&chain, 100), [1, 2, 3]);
    }

    #[test]
    fn a_small_budget_keeps_parents_first() {
        let chain = [(1, 0, true), (2, 1, true), (3, 2, true)];
        assert_eq!(carried_hashes(&chain, 25), [1, 2]);
        assert_eq!(carried_hashes(&chain, 9), [0; 0]);
    }
}
