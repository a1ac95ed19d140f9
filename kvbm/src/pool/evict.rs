//! Which blocks are here, who follows whom, and which one to give up next.
//!
//! Pure: no clock, no lock, no bytes. A pool (device or host) keeps one [`Residents`] under its lock and carries out what
//! it answers.
//!
//! **Invariant: leaves before parents.** A block with a resident child is never given up, so eviction never leaves a hole
//! in a chain. **Invariant: a held block holds its parent.** So every block that is not held can be given up, in some
//! order, and [`Residents::idle`] is exactly what an allocation can count on.
//!
//! **Who goes first**: of the domain that has to pay ([`payer`]) and its leaves of the least priority, the one that
//! was used least often, and of those the one that was let go longest ago. Counts fade ([`frequency_sketch`]). So what is read once, however much of it, passes through without displacing what is used
//! again and again. A new block always gets in, and for as long as it is among the *young* (an eighth of the slots) it goes
//! after all others: there is time for it to be used again.

mod frequency_sketch;
mod node;
mod parents;
mod rank;

use crate::block::{Priority, SequenceHash};
use crate::table::{Ahead, ByName, Positions, hugepages};
use crate::tier::{Bounds, payer};
use frequency_sketch::Frequency;
use node::{Followers, Leaf, Node};
use parents::Parent;
use rank::Turn;
use std::collections::BTreeSet;

/// The blocks of one pool, by slot.
pub(crate) struct Residents {
    names: Positions,
    nodes: Vec<Node>,
    /// Followers of blocks that are not here: a child may arrive before its parent, and a parent may be discarded.
    absent: ByName<Followers>,
    /// At least one: domains that are counted apart.
    groups: Vec<Group>,
    frequency: Frequency,
    /// Blocks that are young, and how many may be.
    young: usize,
    young_most: usize,
    idle: usize,
    clock: u64,
}

/// The blocks of a domain, or of all that nobody named.
#[derive(Default)]
struct Group {
    bounds: Bounds,
    resident: usize,
    /// What may go now, and when it is its turn: resident, not held, no resident child.
    leaves: BTreeSet<Leaf>,
}

/// What [`Residents::remove`] did.
pub(crate) enum Removed {
    /// There was no such block.
    Absent,
    /// The slot is the caller's.
    Vacated(u32),
    /// Somebody still holds the block; the last [`Residents::release`] says that the slot is free.
    StillHeld,
}

impl Group {
    fn oldest_young(&self) -> Option<&Leaf> {
        let first = |priority| self.leaves.range((priority, Turn::YOUNG, 0)..=(priority, Turn::LAST, u32::MAX)).next();
        Priority::ALL.into_iter().filter_map(first).min_by_key(|(_, turn, _)| *turn)
    }
}

impl Residents {
    /// For slots up to `capacity`.
    pub(crate) fn new(capacity: usize) -> Self {
        let mut nodes = Vec::with_capacity(capacity);
        hugepages::enlarge(nodes.spare_capacity_mut());
        Self {
            names: Positions::with_capacity(capacity),
            nodes,
            absent: ByName::default(),
            groups: vec![Group::default()],
            frequency: Frequency::new(capacity),
            young: 0,
            young_most: capacity.div_ceil(8),
            idle: 0,
            clock: 0,
        }
    }

    /// Counts the blocks of several groups apart, from now on: before there are any.
    pub(crate) fn divide(&mut self, bounds: &[Bounds]) {
        assert_eq!(self.len(), 0, "blocks are here already, of nobody knows whom");
        self.groups = bounds.iter().map(|bounds| Group { bounds: *bounds, ..Group::default() }).collect();
    }

    /// Blocks that can be found by name.
    pub(crate) fn len(&self) -> usize {
        self.names.len()
    }

    /// Blocks that nobody holds. All of them can be given up, one [`Residents::evict`] after the other.
    pub(crate) fn idle(&self) -> usize {
        self.idle
    }

    /// Where a block is.
    pub(crate) fn find(&self, name: SequenceHash) -> Option<u32> {
        self.names.find(&name, |at| self.nodes[at as usize].name == name)
    }

    /// Where one of many names is that are looked up one after the other, from the first. Between two looks others may change what
    /// is here: what was seen ahead is looked at again, for a block that was given up leaves its name behind.
    pub(crate) fn find_of(&self, ahead: &mut Ahead, names: &[SequenceHash], at: usize) -> Option<u32> {
        let is = |node: &Node, name: &SequenceHash| node.resident && node.name == *name;
        self.names.find_of(ahead, names, at, |at| self.nodes.get(at as usize), is)
    }

    /// Where each of `names` is.
    pub(crate) fn find_each(&self, names: &[SequenceHash]) -> impl Iterator<Item = Option<u32>> {
        let mut ahead = Ahead::default();
        (0..names.len()).map(move |at| self.find_of(&mut ahead, names, at))
    }

    /// Begins to bring what [`Residents::insert`] of a name reads.
    pub(crate) fn expect(&self, name: &SequenceHash) {
        self.names.fetch(name);
        self.frequency.fetch(name);
    }

    /// Begins to bring what is known of a block in a slot.
    pub(crate) fn fetch(&self, slot: u32) {
        if let Some(node) = self.nodes.get(slot as usize) {
            hugepages::fetch(node);
        }
    }

    /// What a block in a slot is, and what precedes it.
    pub(crate) fn block(&self, slot: u32) -> (SequenceHash, Option<SequenceHash>) {
        let node = &self.nodes[slot as usize];
        (node.name, node.parent)
    }

    /// Every block that can be found by name.
    pub(crate) fn names(&self) -> impl Iterator<Item = SequenceHash> {
        self.nodes.iter().filter(|node| node.resident).map(|node| node.name)
    }

    /// A block comes to rest in an empty slot, not held. Its name must not be here yet. That it comes is a use.
    pub(crate) fn insert(
        &mut self,
        slot: u32,
        (name, parent): (SequenceHash, Option<SequenceHash>),
        priority: Priority,
        group: u16,
    ) {
        if self.nodes.len() <= slot as usize {
            self.nodes.resize(slot as usize + 1, Node::EMPTY);
        }
        self.clock += 1;
        let followers = self.absent.remove(&name).unwrap_or_default();
        // A block that claims to follow itself would never be a leaf.
        let parent = parent.filter(|parent| *parent != name);
        let uses = self.frequency.used(self.frequency.recall(&name));
        let turn = Turn::new(true, self.frequency.height(uses), self.clock);
        let node = Node { name, parent, followers, turn, uses, priority, group, resident: true, ..Node::EMPTY };
        let (leaf, held) = (followers.resident == 0, node.held());
        self.nodes[slot as usize] = node;
        self.names.insert(&name, slot);
        self.idle += 1;
        self.young += 1;
        self.groups[usize::from(group)].resident += 1;
        if leaf {
            self.groups[usize::from(group)].leaves.insert((priority, turn, slot));
        }
        self.follow(slot);
        if held {
            // By children that were here before it.
            self.became_held(slot);
        }
        while self.young > self.young_most && self.grow_up().is_some() {}
    }

    /// The young leaf that was let go longest ago is young no more, nor is what it follows.
    fn grow_up(&mut self) -> Option<()> {
        let oldest = self.groups.iter().filter_map(Group::oldest_young).min_by_key(|(_, turn, _)| *turn).copied()?;
        let (.., leaf) = oldest;
        self.group(leaf).leaves.remove(&oldest);
        let mut slot = leaf;
        while self.nodes[slot as usize].turn.is_young() {
            let node = &mut self.nodes[slot as usize];
            node.turn = Turn::new(false, node.turn.height(), node.turn.time());
            self.young -= 1;
            match self.parent_of(slot) {
                Parent::Here(at) => slot = at,
                Parent::Root | Parent::Absent(_) => break,
            }
        }
        let grown = self.nodes[leaf as usize].leaf(leaf);
        self.group(leaf).leaves.insert(grown);
        Some(())
    }

    fn group(&mut self, slot: u32) -> &mut Group {
        &mut self.groups[usize::from(self.nodes[slot as usize].group)]
    }

    /// One more guard.
    pub(crate) fn hold(&mut self, slot: u32) {
        let node = &mut self.nodes[slot as usize];
        let before = node.held();
        node.holds += 1;
        if !before {
            self.became_held(slot);
        }
    }

    /// One more guard of a block, which is used once more. As a rule it follows the block in the slot `after`, which the
    /// caller holds: then that is all that is looked at.
    pub(crate) fn take(&mut self, slot: u32, after: Option<(u32, SequenceHash)>) {
        let node = &mut self.nodes[slot as usize];
        if node.held() {
            node.holds += 1;
        } else if let Some((at, name)) = after
            && node.parent_at == at
            && node.parent == Some(name)
            && node.followers.resident > 0
        {
            node.holds += 1;
            self.idle -= 1;
            self.nodes[at as usize].followers.held += 1;
        } else {
            self.hold(slot);
        }
        self.used(slot);
    }

    /// A held block is used once more.
    pub(crate) fn used(&mut self, slot: u32) {
        let node = &mut self.nodes[slot as usize];
        debug_assert!(node.held(), "its place among the leaves would be wrong");
        node.uses = self.frequency.used(self.frequency.faded(node.uses, node.turn.height()));
        node.turn = Turn::new(node.turn.is_young(), self.frequency.height(node.uses), node.turn.time());
    }

    /// One guard less. True: the block was removed meanwhile, nobody needs the slot any more, and it is the caller's.
    pub(crate) fn release(&mut self, slot: u32) -> bool {
        let node = &mut self.nodes[slot as usize];
        node.holds -= 1;
        if !node.resident {
            return node.holds == 0;
        }
        if !node.held() {
            self.became_idle(slot);
        }
        false
    }

    /// Gives a block another priority.
    pub(crate) fn prefer(&mut self, slot: u32, priority: Priority) {
        let node = &mut self.nodes[slot as usize];
        let waits = self.groups[usize::from(node.group)].leaves.remove(&node.leaf(slot));
        node.priority = priority;
        if waits {
            self.groups[usize::from(node.group)].leaves.insert(node.leaf(slot));
        }
    }

    /// Gives up the leaf whose turn it is. Its slot is the caller's.
    pub(crate) fn evict(&mut self) -> Option<(u32, SequenceHash)> {
        let stand = |group: &Group| (group.bounds, group.resident, !group.leaves.is_empty());
        let group = payer(self.groups.iter().map(stand))?;
        self.evict_of(group)
    }

    /// Gives up a leaf of a group that has more than it may.
    pub(crate) fn evict_surplus(&mut self) -> Option<(u32, SequenceHash)> {
        let exceeds = |group: &Group| group.resident > group.bounds.maximum && !group.leaves.is_empty();
        let group = self.groups.iter().position(exceeds)?;
        self.evict_of(group)
    }

    fn evict_of(&mut self, group: usize) -> Option<(u32, SequenceHash)> {
        let &(.., slot) = self.groups[group].leaves.first()?;
        let Node { name, uses, turn, parent_at, .. } = self.nodes[slot as usize];
        self.expect(&name);
        // As a rule the next to go.
        self.fetch(parent_at);
        self.frequency.remember(&name, self.frequency.faded(uses, turn.height()));
        self.detach(slot);
        Some((slot, name))
    }

    /// Takes a block out of the pool, whatever follows it.
    pub(crate) fn remove(&mut self, name: SequenceHash) -> Removed {
        let Some(slot) = self.find(name) else { return Removed::Absent };
        self.detach(slot);
        if self.nodes[slot as usize].holds == 0 { Removed::Vacated(slot) } else { Removed::StillHeld }
    }

    /// Out of the index; guards may remain.
    fn detach(&mut self, slot: u32) {
        if self.nodes[slot as usize].held() {
            // As if all let go, so that the parent's count is right; those that remain find the node not resident.
            self.became_idle(slot);
        }
        let node = &mut self.nodes[slot as usize];
        let group = &mut self.groups[usize::from(node.group)];
        group.leaves.remove(&node.leaf(slot));
        group.resident -= 1;
        let (name, followers) = (node.name, std::mem::take(&mut node.followers));
        node.resident = false;
        self.young -= usize::from(node.turn.is_young());
        self.idle -= 1;
        self.names.remove(&name, slot);
        if followers.resident > 0 {
            self.absent.insert(name, followers);
        }
        self.unfollow(slot);
    }
}

#[cfg(test)]
mod tests;
