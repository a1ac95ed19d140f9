//! Which blocks of the oldest segment are worth carrying over to the newest. Pure.
//!
//! A log gives up its oldest segment whole. Carried over is what is pinned, then what was in use since it was written: blocks
//! that were read, blocks that a later segment builds upon. And whatever precedes those in the segment, because a block
//! without its parents can be used by nobody.

use crate::block::{Fingerprint, SequenceHash};
use std::collections::{BTreeSet, HashSet};

/// A block that still rests in the segment, in the order of the log.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    pub(super) fingerprint: Fingerprint,
    pub(super) name: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    /// Read, or built upon by a later segment.
    pub(super) hot: bool,
    /// To be kept, whether it is used or not.
    pub(super) pinned: bool,
    /// What it takes.
    pub(super) bytes: u64,
}

/// Positions of the blocks to carry over, in the order of the log, at most `budget` bytes: when that does not suffice,
/// what is pinned before what is hot, and of each the first ones, which are the parents of the others.
pub(super) fn carried(candidates: &[Candidate], budget: u64) -> Vec<usize> {
    let mut left = budget;
    let mut carried = BTreeSet::new();
    for wish in [|block: &Candidate| block.pinned, |block: &Candidate| block.hot] {
        for position in wanted(candidates, wish) {
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

/// What is wished for and what precedes it, in the order of the log.
fn wanted(candidates: &[Candidate], wish: impl Fn(&Candidate) -> bool) -> Vec<usize> {
    let mut needed: HashSet<(Fingerprint, SequenceHash)> = HashSet::new();
    let mut wanted = Vec::new();
    for (position, block) in candidates.iter().enumerate().rev() {
        if wish(block) || needed.contains(&(block.fingerprint, block.name)) {
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

    /// Blocks as `(name, parent, hot)`, ten bytes each, and the pinned ones' names; returns the names that are carried.
    fn names_with(blocks: &[(u8, u8, bool)], pinned: &[u8], budget: u64) -> Vec<u8> {
        let candidate = |&(name, parent, hot): &(u8, u8, bool)| Candidate {
            fingerprint: Fingerprint::from_bytes([0; 32]),
            name: SequenceHash::from_bytes([name; 16]),
            parent: (parent > 0).then(|| SequenceHash::from_bytes([parent; 16])),
            hot,
            pinned: pinned.contains(&name),
            bytes: 10,
        };
        let candidates: Vec<_> = blocks.iter().map(candidate).collect();
        carried(&candidates, budget).into_iter().map(|at| blocks[at].0).collect()
    }

    fn names(blocks: &[(u8, u8, bool)], budget: u64) -> Vec<u8> {
        names_with(blocks, &[], budget)
    }

    #[test]
    fn what_is_pinned_goes_along_first_with_its_parents() {
        let blocks = [(9, 0, true), (1, 0, false), (2, 1, false), (3, 2, false), (8, 0, true)];
        assert_eq!(names_with(&blocks, &[2], 20), [1, 2]);
        assert_eq!(names_with(&blocks, &[2], 30), [9, 1, 2]);
        assert_eq!(names_with(&blocks, &[2], 100), [9, 1, 2, 8]);
    }

    #[test]
    fn what_was_never_used_is_given_up() {
        assert_eq!(names(&[(1, 0, false), (2, 1, false)], 100), [0; 0]);
    }

    #[test]
    fn a_block_in_use_takes_its_parents_along_but_not_its_children() {
        let chain = [(1, 0, false), (2, 1, false), (8, 0, false), (3, 2, true), (4, 3, false)];
        assert_eq!(names(&chain, 100), [1, 2, 3]);
    }

    #[test]
    fn a_budget_that_does_not_suffice_keeps_parents() {
        let chain = [(1, 0, true), (2, 1, true), (3, 2, true)];
        assert_eq!(names(&chain, 25), [1, 2]);
        assert_eq!(names(&chain, 9), [0; 0]);
    }
}
