//! All that an owner has announced, told as the fewest events would tell it: in runs of one chain.

use super::{Epoch, Level};
use crate::SequenceHash;
use crate::names::{ByName, NameSet};
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

/// A block among those of one level.
struct Node {
    name: SequenceHash,
    parent: Option<SequenceHash>,
    /// The next child of the same parent.
    sibling: Option<u32>,
}

/// Lays the blocks of a level, given with their parents, in runs: parents before their children.
pub(super) fn runs(level: Level, blocks: impl Iterator<Item = (SequenceHash, Option<SequenceHash>)>) -> Vec<Run> {
    let mut nodes: Vec<Node> = blocks.map(|(name, parent)| Node { name, parent, sibling: None }).collect();
    let held: NameSet = nodes.iter().map(|node| node.name).collect();
    let mut children: ByName<u32> = ByName::default();
    let mut roots = Vec::new();
    for (at, node) in (0..).zip(&mut nodes) {
        match node.parent.filter(|parent| held.contains(parent)) {
            Some(parent) => node.sibling = children.insert(parent, at),
            None => roots.push(at),
        }
    }
    let mut runs = Vec::new();
    let mut due = roots;
    // Whoever announces circles gets runs all the same: whatever is left begins one.
    let mut left = 0..nodes.len() as u32;
    let mut told = vec![false; nodes.len()];
    while let Some(first) = due.pop().or_else(|| left.find(|at| !told[*at as usize])) {
        let mut blocks = Vec::new();
        let mut next = Some(first).filter(|at| !told[*at as usize]);
        while let Some(at) = next.take() {
            told[at as usize] = true;
            let name = nodes[at as usize].name;
            blocks.push(name);
            // The others come later, and as runs of their own.
            let mut child = children.remove(&name).filter(|at| !told[*at as usize]);
            next = child;
            while let Some(sibling) = child.and_then(|at| nodes[at as usize].sibling) {
                due.push(sibling);
                child = Some(sibling);
            }
        }
        if !blocks.is_empty() {
            runs.push(Run { level, parent: nodes[first as usize].parent, blocks });
        }
    }
    runs
}
