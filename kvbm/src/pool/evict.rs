//! Which blocks a pool holds, their parent relations, and which block to evict next.
//!
//! Pure: no clock, no lock, no bytes. A pool (device or host) keeps one [`EvictionIndex`] under its lock and carries
//! out its decisions.
//!
//! **Invariant: leaves before parents.** A block with a resident child is never evicted, so eviction leaves no hole in
//! a chain. **Invariant: a held block holds its parent.** So every block that is not held can be evicted, in some
//! order, and [`EvictionIndex::evictable`] is exactly the number of slots that an allocation can get by eviction.
//!
//! **Victim order**: the group of domains chosen by [`victim_group`], then lowest priority, then lowest aged frequency,
//! then least recently released. Frequencies come from a decaying count-min sketch ([`frequency_sketch`], as in
//! W-TinyLFU), so a scan does not displace blocks that are used repeatedly. As in SLRU, a new block is admitted in any
//! case and starts in *probation* (an eighth of the slots), where it is evicted after all blocks of the main segment:
//! this leaves time for a second use.

mod frequency_sketch;
mod node;
mod parents;
mod rank;

use crate::block::{Priority, SequenceHash};
use crate::table::{BlockMap, HashIndex, Prefetcher, hugepages, prefetch};
use crate::tier::{Bounds, victim_group};
use frequency_sketch::FrequencySketch;
use node::{Children, Leaf, Node};
use parents::Parent;
use rank::EvictionRank;
use std::collections::BTreeSet;
use std::ops::Range;

/// The blocks of one pool, by slot.
pub(super) struct EvictionIndex {
    slots: HashIndex,
    nodes: Vec<Node>,
    /// Children of blocks that are not resident: a child may be inserted before its parent, and a parent may be
    /// discarded.
    absent: BlockMap<Children>,
    /// Groups of domains that are counted apart; at least one.
    groups: Vec<Group>,
    frequency: FrequencySketch,
    /// Number of blocks in probation, and its limit.
    probation: usize,
    max_probation: usize,
    evictable: usize,
    /// Counts insertions and releases: the time of an [`EvictionRank`].
    ticks: u64,
}

/// The blocks of one domain, or of all domains without a quota of their own.
#[derive(Default)]
struct Group {
    bounds: Bounds,
    resident: usize,
    /// Blocks that may be evicted now, in order: resident, not held, without a resident child.
    leaves: BTreeSet<Leaf>,
}

/// How often a resident block was used.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockUse {
    pub(crate) hash: SequenceHash,
    pub(crate) parent: Option<SequenceHash>,
    /// At most 15, halved from time to time. The computation of the block is the first use.
    pub(crate) uses: u8,
    /// The time of its last release, in changes of the pool.
    pub(crate) released: u64,
}

/// The result of [`EvictionIndex::remove`].
pub(super) enum Removed {
    /// There was no such block.
    Absent,
    /// The slot belongs to the caller now.
    Vacated(u32),
    /// A guard still holds the block; the last [`EvictionIndex::release`] reports that the slot is free.
    StillHeld,
}

impl Group {
    fn oldest_probationary(&self) -> Option<&Leaf> {
        let first = |priority| {
            self.leaves.range((priority, EvictionRank::PROBATION, 0)..=(priority, EvictionRank::LAST, u32::MAX)).next()
        };
        Priority::ALL.into_iter().filter_map(first).min_by_key(|(_, rank, _)| *rank)
    }
}

impl EvictionIndex {
    /// An empty index for `capacity` slots.
    pub(super) fn new(capacity: usize) -> Self {
        let mut nodes = Vec::with_capacity(capacity);
        hugepages::advise_hugepages(nodes.spare_capacity_mut());
        Self {
            slots: HashIndex::with_capacity(capacity),
            nodes,
            absent: BlockMap::default(),
            groups: vec![Group::default()],
            frequency: FrequencySketch::new(capacity),
            probation: 0,
            max_probation: capacity.div_ceil(8),
            evictable: 0,
            ticks: 0,
        }
    }

    /// Counts the blocks of one group per element of `bounds`.
    ///
    /// # Panics
    /// When the index is not empty.
    pub(super) fn set_bounds(&mut self, bounds: &[Bounds]) {
        assert_eq!(self.len(), 0, "bounds are set before there are blocks");
        self.groups = bounds.iter().map(|bounds| Group { bounds: *bounds, ..Group::default() }).collect();
    }

    /// Number of blocks that can be found by hash.
    pub(super) fn len(&self) -> usize {
        self.slots.len()
    }

    /// Number of blocks that are not held. Each of them can be evicted by repeated calls of [`EvictionIndex::evict`].
    pub(super) fn evictable(&self) -> usize {
        self.evictable
    }

    /// The slot of a block.
    pub(super) fn find(&self, hash: SequenceHash) -> Option<u32> {
        self.slots.find(&hash, |at| self.nodes[at as usize].hash == hash)
    }

    /// The slot of `hashes[at]`, in a sequence of lookups in ascending order that prefetches later hashes. The index
    /// may change between two lookups; a prefetched slot is therefore checked again, since an evicted block's hash
    /// stays in its node.
    pub(super) fn find_ahead(&self, prefetcher: &mut Prefetcher, hashes: &[SequenceHash], at: usize) -> Option<u32> {
        let is = |node: &Node, hash: &SequenceHash| node.resident && node.hash == *hash;
        self.slots.find_batched(prefetcher, hashes, at, |at| self.nodes.get(at as usize), is)
    }

    /// The slot of each of `hashes`.
    pub(super) fn find_each(&self, hashes: &[SequenceHash]) -> impl Iterator<Item = Option<u32>> {
        let mut prefetcher = Prefetcher::default();
        (0..hashes.len()).map(move |at| self.find_ahead(&mut prefetcher, hashes, at))
    }

    /// Prefetches the memory that [`EvictionIndex::insert`] of this hash reads.
    pub(super) fn prefetch_insert(&self, hash: &SequenceHash) {
        self.slots.prefetch(hash);
        self.frequency.prefetch(hash);
    }

    /// Prefetches the node of a slot.
    pub(super) fn prefetch_node(&self, slot: u32) {
        if let Some(node) = self.nodes.get(slot as usize) {
            prefetch::prefetch(node);
        }
    }

    /// Hash and parent of the block in a slot.
    pub(super) fn block(&self, slot: u32) -> (SequenceHash, Option<SequenceHash>) {
        let node = &self.nodes[slot as usize];
        (node.hash, node.parent)
    }

    /// Every block that can be found by hash.
    pub(super) fn hashes(&self) -> impl Iterator<Item = SequenceHash> {
        self.nodes.iter().filter(|node| node.resident).map(|node| node.hash)
    }

    /// The uses of the blocks that can be found by hash in a range of slots.
    pub(super) fn uses(&self, slots: Range<usize>) -> impl Iterator<Item = BlockUse> {
        let nodes = self.nodes.get(slots.start..slots.end.min(self.nodes.len())).unwrap_or_default();
        nodes.iter().filter(|node| node.resident).map(|node| BlockUse {
            hash: node.hash,
            parent: node.parent,
            uses: self.frequency.decayed(node.uses, node.rank.aged_frequency()),
            released: node.rank.time(),
        })
    }

    /// The estimated uses of a block that was evicted.
    pub(super) fn former_uses(&self, hash: &SequenceHash) -> u8 {
        self.frequency.estimate(hash)
    }

    /// Inserts a block into an empty slot, not held. Its hash must not be resident yet. The insertion counts as a use.
    pub(super) fn insert(
        &mut self,
        slot: u32,
        (hash, parent): (SequenceHash, Option<SequenceHash>),
        priority: Priority,
        group: u16,
    ) {
        if self.nodes.len() <= slot as usize {
            self.nodes.resize(slot as usize + 1, Node::EMPTY);
        }
        self.ticks += 1;
        let children = self.absent.remove(&hash).unwrap_or_default();
        // A block that names itself as its parent would never be a leaf.
        let parent = parent.filter(|parent| *parent != hash);
        let uses = self.frequency.count_use(self.frequency.estimate(&hash));
        let rank = EvictionRank::new(true, self.frequency.aged_frequency(uses), self.ticks);
        let node = Node { hash, parent, children, rank, uses, priority, group, resident: true, ..Node::EMPTY };
        let (leaf, held) = (children.resident == 0, node.held());
        self.nodes[slot as usize] = node;
        self.slots.insert(&hash, slot);
        self.evictable += 1;
        self.probation += 1;
        self.groups[usize::from(group)].resident += 1;
        if leaf {
            self.groups[usize::from(group)].leaves.insert((priority, rank, slot));
        }
        self.attach_to_parent(slot);
        if held {
            // By children that were inserted before it.
            self.became_held(slot);
        }
        while self.probation > self.max_probation && self.promote_oldest().is_some() {}
    }

    /// Moves the least recently released leaf in probation, and its ancestors in probation, to the main segment.
    fn promote_oldest(&mut self) -> Option<()> {
        let oldest =
            self.groups.iter().filter_map(Group::oldest_probationary).min_by_key(|(_, rank, _)| *rank).copied()?;
        let (.., leaf) = oldest;
        self.group(leaf).leaves.remove(&oldest);
        let mut slot = leaf;
        while self.nodes[slot as usize].rank.is_probationary() {
            let node = &mut self.nodes[slot as usize];
            node.rank = EvictionRank::new(false, node.rank.aged_frequency(), node.rank.time());
            self.probation -= 1;
            match self.locate_parent(slot) {
                Parent::Here(at) => slot = at,
                Parent::Root | Parent::Absent(_) => break,
            }
        }
        let promoted = self.nodes[leaf as usize].leaf(leaf);
        self.group(leaf).leaves.insert(promoted);
        Some(())
    }

    fn group(&mut self, slot: u32) -> &mut Group {
        &mut self.groups[usize::from(self.nodes[slot as usize].group)]
    }

    /// Adds a guard.
    pub(super) fn hold(&mut self, slot: u32) {
        let node = &mut self.nodes[slot as usize];
        let before = node.held();
        node.holds += 1;
        if !before {
            self.became_held(slot);
        }
    }

    /// Adds a guard and counts a use. Fast path: the parent is in the slot given by `after`, and the caller holds it;
    /// then no other node is read.
    pub(super) fn acquire(&mut self, slot: u32, after: Option<(u32, SequenceHash)>) {
        let node = &mut self.nodes[slot as usize];
        if node.held() {
            node.holds += 1;
        } else if let Some((at, hash)) = after
            && node.parent_at == at
            && node.parent == Some(hash)
            && node.children.resident > 0
        {
            node.holds += 1;
            self.evictable -= 1;
            self.nodes[at as usize].children.held += 1;
        } else {
            self.hold(slot);
        }
        self.record_use(slot);
    }

    /// Counts a use of a held block.
    pub(super) fn record_use(&mut self, slot: u32) {
        let node = &mut self.nodes[slot as usize];
        debug_assert!(node.held(), "the order of leaves would be wrong");
        node.uses = self.frequency.count_use(self.frequency.decayed(node.uses, node.rank.aged_frequency()));
        node.rank =
            EvictionRank::new(node.rank.is_probationary(), self.frequency.aged_frequency(node.uses), node.rank.time());
    }

    /// Drops a guard. True: the block was removed before, this was its last guard, and the slot belongs to the caller
    /// now.
    pub(super) fn release(&mut self, slot: u32) -> bool {
        let node = &mut self.nodes[slot as usize];
        node.holds -= 1;
        if !node.resident {
            return node.holds == 0;
        }
        if !node.held() {
            self.became_evictable(slot);
        }
        false
    }

    /// Changes the priority of a block.
    pub(super) fn set_priority(&mut self, slot: u32, priority: Priority) {
        let node = &mut self.nodes[slot as usize];
        let was_leaf = self.groups[usize::from(node.group)].leaves.remove(&node.leaf(slot));
        node.priority = priority;
        if was_leaf {
            self.groups[usize::from(node.group)].leaves.insert(node.leaf(slot));
        }
    }

    /// Evicts the next victim. Its slot belongs to the caller now.
    pub(super) fn evict(&mut self) -> Option<(u32, SequenceHash)> {
        let usage = |group: &Group| (group.bounds, group.resident, !group.leaves.is_empty());
        let group = victim_group(self.groups.iter().map(usage))?;
        self.evict_of(group)
    }

    /// Evicts a leaf of a group that is above its maximum.
    pub(super) fn evict_over_limit(&mut self) -> Option<(u32, SequenceHash)> {
        let over_limit = |group: &Group| group.resident > group.bounds.maximum && !group.leaves.is_empty();
        let group = self.groups.iter().position(over_limit)?;
        self.evict_of(group)
    }

    fn evict_of(&mut self, group: usize) -> Option<(u32, SequenceHash)> {
        let &(.., slot) = self.groups[group].leaves.first()?;
        let Node { hash, uses, rank, parent_at, .. } = self.nodes[slot as usize];
        self.prefetch_insert(&hash);
        // Usually the next victim.
        self.prefetch_node(parent_at);
        self.frequency.record(&hash, self.frequency.decayed(uses, rank.aged_frequency()));
        self.detach(slot);
        Some((slot, hash))
    }

    /// Removes a block from the pool, whether or not it has children.
    pub(super) fn remove(&mut self, hash: SequenceHash) -> Removed {
        let Some(slot) = self.find(hash) else { return Removed::Absent };
        self.detach(slot);
        if self.nodes[slot as usize].holds == 0 { Removed::Vacated(slot) } else { Removed::StillHeld }
    }

    /// Removes a block from the index; guards may remain.
    fn detach(&mut self, slot: u32) {
        if self.nodes[slot as usize].held() {
            // As if all guards were dropped, so that the parent's count stays right; remaining guards find the node not
            // resident.
            self.became_evictable(slot);
        }
        let node = &mut self.nodes[slot as usize];
        let group = &mut self.groups[usize::from(node.group)];
        group.leaves.remove(&node.leaf(slot));
        group.resident -= 1;
        let (hash, children) = (node.hash, std::mem::take(&mut node.children));
        node.resident = false;
        self.probation -= usize::from(node.rank.is_probationary());
        self.evictable -= 1;
        self.slots.remove(&hash, slot);
        if children.resident > 0 {
            self.absent.insert(hash, children);
        }
        self.detach_from_parent(slot);
    }
}

#[cfg(test)]
mod tests;
