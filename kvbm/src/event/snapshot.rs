//! Snapshots of all announced blocks, as runs of one chain: the fewest events that describe them.

use super::Epoch;
use super::log::{Announced, bit};
use crate::block::{Level, SequenceHash};
use crate::table::BlockMap;
use serde::{Deserialize, Serialize};

/// All announced blocks as of one event number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// The epoch that the numbers belong to.
    pub epoch: Epoch,
    /// Number of the last event that the snapshot includes; 0 if there was none.
    pub number: u64,
    /// Every announced block, once per level that has it. A run comes after the one that contains its parent.
    pub runs: Vec<Run>,
}

/// Blocks of one level, each the child of the one before it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// The level that has the blocks.
    pub level: Level,
    /// Parent of the first block; `None` if it begins a sequence or if its parent is not known.
    pub parent: Option<SequenceHash>,
    /// The blocks, not empty.
    pub blocks: Vec<SequenceHash>,
}

impl Snapshot {
    /// Every block with each level that has it.
    pub fn blocks(&self) -> impl Iterator<Item = (Level, SequenceHash)> + '_ {
        self.runs.iter().flat_map(|run| run.blocks.iter().map(|block| (run.level, *block)))
    }
}

/// In place of an index: no such block.
const NONE: u32 = u32::MAX;

/// Groups blocks into runs, one level after the other, parents before their children.
pub(super) fn runs(mut blocks: Vec<(SequenceHash, Announced)>) -> Vec<Run> {
    let indices: BlockMap<u32> = blocks.iter().zip(0..).map(|((hash, _), at)| (*hash, at)).collect();
    let index = |parent: Option<SequenceHash>| parent.and_then(|parent| indices.get(&parent)).copied().unwrap_or(NONE);
    let parents: Vec<u32> = blocks.iter().map(|(_, known)| index(known.parent)).collect();
    drop(indices);
    // The first child of each block at the current level, and the next child of the same parent. Blocks are taken out
    // of these lists when they are added to a run, so the lists are empty after each level.
    let (mut child, mut sibling) = (vec![NONE; blocks.len()], vec![NONE; blocks.len()]);
    let levels = blocks.iter().fold(0, |all, (_, known)| all | known.levels);
    let (mut runs, mut pending) = (Vec::new(), Vec::new());
    for level in Level::ALL.into_iter().filter(|level| levels & bit(*level) != 0) {
        for (at, _) in blocks.iter().enumerate().filter(|(_, (_, known))| known.is_at(level)) {
            match parents[at] {
                parent if parent != NONE && blocks[parent as usize].1.is_at(level) => {
                    sibling[at] = std::mem::replace(&mut child[parent as usize], at as u32);
                }
                _ => pending.push(at as u32),
            }
        }
        // Wrong announcements can form cycles, which no run has reached: any of their blocks begins a run.
        let mut unreached = 0..blocks.len() as u32;
        while let Some(first) = pending.pop().or_else(|| unreached.find(|at| blocks[*at as usize].1.is_at(level))) {
            let (parent, mut next, mut run) = (blocks[first as usize].1.parent, first, Vec::new());
            while next != NONE && blocks[next as usize].1.is_at(level) {
                let (hash, known) = &mut blocks[next as usize];
                run.push(*hash);
                known.levels &= !bit(level);
                next = std::mem::replace(&mut child[next as usize], NONE);
                // The other children begin runs of their own, after this one.
                pending.extend(siblings(next, &sibling).skip(1));
            }
            if !run.is_empty() {
                runs.push(Run { level, parent, blocks: run });
            }
        }
    }
    runs
}

/// A child and its siblings after it.
fn siblings(first: u32, sibling: &[u32]) -> impl Iterator<Item = u32> {
    let some = |at: u32| Some(at).filter(|at| *at != NONE);
    std::iter::successors(some(first), move |at| some(sibling[*at as usize]))
}
