//! Parent relations: how many children of a block are resident, and how many of them are held.
//!
//! A block may be inserted before its parent, or outlive it. Then the counts stand under the parent's hash.

use super::EvictionIndex;
use super::rank::EvictionRank;
use crate::block::SequenceHash;

/// The parent of a block.
pub(super) enum Parent {
    Root,
    Here(u32),
    Absent(SequenceHash),
}

impl EvictionIndex {
    pub(super) fn attach_to_parent(&mut self, slot: u32) {
        match self.locate_parent(slot) {
            Parent::Root => {}
            Parent::Absent(hash) => self.absent.entry(hash).or_default().resident += 1,
            Parent::Here(at) => {
                let node = &mut self.nodes[at as usize];
                if node.children.resident == 0 {
                    self.groups[usize::from(node.group)].leaves.remove(&node.leaf(at));
                }
                node.children.resident += 1;
            }
        }
    }

    pub(super) fn detach_from_parent(&mut self, slot: u32) {
        match self.locate_parent(slot) {
            Parent::Root => {}
            Parent::Absent(hash) => {
                let children = self.absent.get_mut(&hash).expect("a resident child is counted under its parent's hash");
                children.resident -= 1;
                if children.resident == 0 {
                    self.absent.remove(&hash);
                }
            }
            Parent::Here(at) => {
                let node = &mut self.nodes[at as usize];
                node.children.resident -= 1;
                if node.children.resident == 0 && !node.held() {
                    self.groups[usize::from(node.group)].leaves.insert(node.leaf(at));
                }
            }
        }
    }

    /// The block was not held before. Walks up to the first ancestor that was held already; for a chain that is held
    /// from its root on, one step per block.
    pub(super) fn became_held(&mut self, mut slot: u32) {
        loop {
            self.evictable -= 1;
            let node = &self.nodes[slot as usize];
            if node.children.resident == 0 {
                self.groups[usize::from(node.group)].leaves.remove(&node.leaf(slot));
            }
            match self.locate_parent(slot) {
                Parent::Root => return,
                Parent::Absent(hash) => return self.absent.entry(hash).or_default().held += 1,
                Parent::Here(at) => {
                    let node = &mut self.nodes[at as usize];
                    let before = node.held();
                    node.children.held += 1;
                    if before {
                        return;
                    }
                    slot = at;
                }
            }
        }
    }

    /// The block is not held any more. Walks up to the first ancestor that is still held.
    pub(super) fn became_evictable(&mut self, mut slot: u32) {
        loop {
            self.evictable += 1;
            self.ticks += 1;
            let node = &mut self.nodes[slot as usize];
            node.rank = EvictionRank::new(node.rank.is_probationary(), node.rank.aged_frequency(), self.ticks);
            if node.children.resident == 0 {
                self.groups[usize::from(node.group)].leaves.insert(node.leaf(slot));
            }
            match self.locate_parent(slot) {
                Parent::Root => return,
                Parent::Absent(hash) => {
                    let children = self.absent.get_mut(&hash).expect("a held child is counted under its parent's hash");
                    return children.held -= 1;
                }
                Parent::Here(at) => {
                    let node = &mut self.nodes[at as usize];
                    node.children.held -= 1;
                    if node.held() {
                        return;
                    }
                    slot = at;
                }
            }
        }
    }

    pub(super) fn locate_parent(&mut self, slot: u32) -> Parent {
        let node = &self.nodes[slot as usize];
        let Some(hash) = node.parent else { return Parent::Root };
        let seen = &self.nodes[node.parent_at as usize];
        if seen.resident && seen.hash == hash {
            return Parent::Here(node.parent_at);
        }
        match self.find(hash) {
            None => Parent::Absent(hash),
            Some(at) => {
                self.nodes[slot as usize].parent_at = at;
                Parent::Here(at)
            }
        }
    }
}
