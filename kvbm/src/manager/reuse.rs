//! The prefixes in G1 and G2 that requests have used again, and will probably use again.
//!
//! A block was used again if a second request has found it. One that was used once counts too if it was used at least
//! half as often as the block before it: a conversation goes on there, while a prompt that shares only its head with
//! others branches off after a block with many uses.
//!
//! Not here: which of them another worker should get.

use super::shared::Core;
use crate::block::SequenceHash;
use crate::pool::{BlockUse, HostTier};
use crate::table::{BlockMap, BlockSet};
use std::cmp::Reverse;
use std::vec::IntoIter;

/// A prefix, from the first block of a sequence to one after which no block was used again.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct ReusedPrefix {
    /// Its blocks, from the first.
    pub blocks: Vec<SequenceHash>,
    /// Uses of the last one: at most 15, halved from time to time.
    pub uses: u8,
}

/// Prefixes, the most used ones first, and of these the last used ones. Each is made when it is asked for: many share a
/// long head.
#[derive(Default, Debug)]
pub struct ReusedPrefixes {
    blocks: Vec<Known>,
    /// The last blocks of the prefixes.
    ends: IntoIter<usize>,
}

/// A block that is in memory.
#[derive(Clone, Copy, Debug)]
struct Known {
    hash: SequenceHash,
    parent: Parent,
    uses: u8,
    /// Those in G1 were used after those that are only in G2.
    used_at: (bool, u64),
    state: State,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Parent {
    /// The block begins a sequence.
    Root,
    Absent,
    At(usize),
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    Unknown,
    /// It belongs to a prefix; whether another block of one follows it.
    Reused {
        has_child: bool,
    },
    Other,
}

/// Fewest uses of a block that was used again: its computation is the first.
const USED_AGAIN: u8 = 2;

/// The prefixes of a manager. Blocks for the time of reading each slot.
pub(super) fn reused_prefixes(core: &Core) -> ReusedPrefixes {
    let device = core.pool.uses();
    let mut host = core.host.as_ref().map(HostTier::uses).unwrap_or_default();
    let in_device: BlockSet = device.iter().map(|block| block.hash).collect();
    host.retain(|block| !in_device.contains(&block.hash));
    // G2 counts loads only. Uses of evicted blocks are known where they were used.
    let hashes: Vec<SequenceHash> = host.iter().map(|block| block.hash).collect();
    for (block, former) in host.iter_mut().zip(core.pool.former_uses(&hashes)) {
        block.uses = block.uses.max(former);
    }
    ReusedPrefixes::of(&device, &host)
}

impl ReusedPrefixes {
    /// Of the blocks of G1, and of those that are only in G2.
    fn of(device: &[BlockUse], host: &[BlockUse]) -> Self {
        let known = |block: &BlockUse, in_device| Known {
            hash: block.hash,
            parent: block.parent.map_or(Parent::Root, |_| Parent::Absent),
            uses: block.uses,
            used_at: (in_device, block.released),
            state: State::Unknown,
        };
        let all = || device.iter().chain(host);
        let mut blocks: Vec<Known> = device.iter().map(|block| known(block, true)).collect();
        blocks.extend(host.iter().map(|block| known(block, false)));
        let places: BlockMap<usize> = all().zip(0..).map(|(block, at)| (block.hash, at)).collect();
        for (known, block) in blocks.iter_mut().zip(all()) {
            if let Some(at) = block.parent.and_then(|parent| places.get(&parent)) {
                known.parent = Parent::At(*at);
            }
        }
        drop(places);
        (0..blocks.len()).for_each(|at| classify(&mut blocks, at));
        let ends = (0..blocks.len()).filter(|at| blocks[*at].state == State::Reused { has_child: false });
        let mut ends: Vec<usize> = ends.collect();
        ends.sort_by_key(|at| Reverse((blocks[*at].uses, blocks[*at].used_at)));
        Self { blocks, ends: ends.into_iter() }
    }
}

/// Finds the state of a block, and of those before it.
fn classify(blocks: &mut [Known], at: usize) {
    let mut path = Vec::new();
    let mut next = at;
    while blocks[next].state == State::Unknown {
        // Until it is known. Wrong parents can form a circle, which ends here.
        blocks[next].state = State::Other;
        path.push(next);
        match blocks[next].parent {
            Parent::At(parent) => next = parent,
            Parent::Root | Parent::Absent => break,
        }
    }
    for at in path.into_iter().rev() {
        let Known { parent, uses, .. } = blocks[at];
        let is_reused = match parent {
            Parent::Root => uses >= USED_AGAIN,
            Parent::Absent => false,
            Parent::At(before) => {
                let before = blocks[before];
                let goes_on = uses > 0 && uses * 2 >= before.uses;
                matches!(before.state, State::Reused { .. }) && (uses >= USED_AGAIN || goes_on)
            }
        };
        if is_reused {
            blocks[at].state = State::Reused { has_child: false };
            if let Parent::At(before) = parent {
                blocks[before].state = State::Reused { has_child: true };
            }
        }
    }
}

impl Iterator for ReusedPrefixes {
    type Item = ReusedPrefix;

    fn next(&mut self) -> Option<ReusedPrefix> {
        let end = self.ends.next()?;
        let (mut blocks, mut at) = (vec![self.blocks[end].hash], end);
        while let Parent::At(before) = self.blocks[at].parent {
            blocks.push(self.blocks[before].hash);
            at = before;
        }
        blocks.reverse();
        Some(ReusedPrefix { blocks, uses: self.blocks[end].uses })
    }

    fn size_hint(&self) -> (usize, Option<usize>) {
        self.ends.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hash(n: u8) -> SequenceHash {
        SequenceHash::from_bytes([n; 16])
    }

    /// A block, the one before it, and its uses.
    fn block(n: u8, parent: u8, uses: u8) -> BlockUse {
        let parent = (parent > 0).then(|| hash(parent));
        BlockUse { hash: hash(n), parent, uses, released: u64::from(n) }
    }

    fn prefixes(device: &[BlockUse], host: &[BlockUse]) -> Vec<(Vec<u8>, u8)> {
        let numbers = |prefix: ReusedPrefix| prefix.blocks.iter().map(|hash| hash.as_bytes()[0]).collect();
        ReusedPrefixes::of(device, host).map(|prefix| (numbers(prefix.clone()), prefix.uses)).collect()
    }

    #[test]
    fn a_prefix_that_was_used_once_is_none() {
        assert_eq!(prefixes(&[block(1, 0, 1), block(2, 1, 1)], &[]), []);
        assert_eq!(prefixes(&[block(1, 0, 2), block(2, 1, 2)], &[]), [(vec![1, 2], 2)]);
    }

    #[test]
    fn a_conversation_is_a_prefix_with_its_last_turn() {
        let turns = [block(1, 0, 3), block(2, 1, 2), block(3, 2, 1)];
        assert_eq!(prefixes(&turns, &[]), [(vec![1, 2, 3], 1)]);
    }

    #[test]
    fn prompts_that_share_only_their_head_are_left_out() {
        let mut blocks = vec![block(1, 0, 9), block(2, 1, 9)];
        blocks.extend((3..12).map(|n| block(n, 2, 1)));
        assert_eq!(prefixes(&blocks, &[]), [(vec![1, 2], 9)]);
    }

    #[test]
    fn the_most_used_prefixes_come_first_and_then_the_last_used() {
        let device = [block(1, 0, 4), block(2, 1, 2), block(3, 1, 4), block(4, 1, 2)];
        assert_eq!(prefixes(&device, &[]), [(vec![1, 3], 4), (vec![1, 4], 2), (vec![1, 2], 2)]);
        assert_eq!(
            prefixes(&[block(1, 0, 2)], &[block(2, 1, 2), block(9, 0, 2)]),
            [(vec![9], 2), (vec![1, 2], 2)],
            "the blocks of one prefix may be in both memories"
        );
    }

    #[test]
    fn a_prefix_without_its_head_is_of_no_use() {
        assert_eq!(prefixes(&[block(2, 1, 5), block(3, 2, 5)], &[]), []);
        assert_eq!(prefixes(&[block(2, 3, 5), block(3, 2, 5)], &[]), [], "nor is a circle");
    }
}
