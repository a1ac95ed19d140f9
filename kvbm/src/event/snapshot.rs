//! All that an owner has announced, told as the fewest events would tell it: in runs of one chain.

use super::{Announced, Epoch, bit};
use crate::block::{Level, SequenceHash};
use crate::table::BlockMap;
use serde::{Deserialize, Serialize};

/// All that an owner has announced, as of a number.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Snapshot {
    /// The life that the numbers belong to.
    pub epoch: Epoch,
    /// The last event that the snapshot includes; 0 when there was none.
    pub number: u64,
    /// Every announced block, once per level where it rests. A run comes after the one that it continues.
    pub runs: Vec<Run>,
}

/// Blocks that rest at one level, each the child of the one before.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Run {
    /// Where.
    pub level: Level,
    /// What precedes the first block; `None` at the root, or when it is not known.
    pub parent: Option<SequenceHash>,
    /// At least one.
    pub blocks: Vec<SequenceHash>,
}

impl Snapshot {
    /// Every block, and where it rests.
    pub fn blocks(&self) -> impl Iterator<Item = (Level, SequenceHash)> + '_ {
        self.runs.iter().flat_map(|run| run.blocks.iter().map(|block| (run.level, *block)))
    }
}

/// Nobody's place.
const NONE: u32 = u32::MAX;

/// Lays blocks in runs, one level after the other: parents before their children.
pub(super) fn runs(mut blocks: Vec<(SequenceHash, Announced)>) -> Vec<Run> {
    let places: BlockMap<u32> = blocks.iter().zip(0..).map(|((name, _), at)| (*name, at)).collect();
    let place = |parent: Option<SequenceHash>| parent.and_then(|parent| places.get(&parent)).copied().unwrap_or(NONE);
    let parents: Vec<u32> = blocks.iter().map(|(_, known)| place(known.parent)).collect();
    drop(places);
    // The first child of each at a level, and the next child of the same parent. Whoever is told leaves none behind.
    let (mut child, mut sibling) = (vec![NONE; blocks.len()], vec![NONE; blocks.len()]);
    let levels = blocks.iter().fold(0, |all, (_, known)| all | known.levels);
    let (mut runs, mut due) = (Vec::new(), Vec::new());
    for level in Level::ALL.into_iter().filter(|level| levels & bit(*level) != 0) {
        for (at, _) in blocks.iter().enumerate().filter(|(_, (_, known))| known.rests_at(level)) {
            match parents[at] {
                parent if parent != NONE && blocks[parent as usize].1.rests_at(level) => {
                    sibling[at] = std::mem::replace(&mut child[parent as usize], at as u32);
                }
                _ => due.push(at as u32),
            }
        }
        // Whoever announces circles gets runs all the same: whatever is left begins one.
        let mut left = 0..blocks.len() as u32;
        while let Some(first) = due.pop().or_else(|| left.find(|at| blocks[*at as usize].1.rests_at(level))) {
            let (parent, mut next, mut run) = (blocks[first as usize].1.parent, first, Vec::new());
            while next != NONE && blocks[next as usize].1.rests_at(level) {
                let (name, known) = &mut blocks[next as usize];
                run.push(*name);
                // It is told.
                known.levels &= !bit(level);
                next = std::mem::replace(&mut child[next as usize], NONE);
                // The others come later, and as runs of their own.
                due.extend(successors(next, &sibling).skip(1));
            }
            if !run.is_empty() {
                runs.push(Run { level, parent, blocks: run });
            }
        }
    }
    runs
}

/// A child and those after it.
fn successors(first: u32, sibling: &[u32]) -> impl Iterator<Item = u32> {
    let some = |at: u32| Some(at).filter(|at| *at != NONE);
    std::iter::successors(some(first), move |at| some(sibling[*at as usize]))
}
