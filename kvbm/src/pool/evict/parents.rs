//! Who follows whom: how many of a block's followers are here, and how many of them are held.
//!
//! A block may be here before the one that it follows, or after that has gone. Then its parent is known by name alone.

use super::Residents;
use super::rank::Turn;
use crate::block::SequenceHash;

/// Where the parent of a block is.
pub(super) enum Parent {
    Root,
    Here(u32),
    Absent(SequenceHash),
}

impl Residents {
    pub(super) fn follow(&mut self, slot: u32) {
        match self.parent_of(slot) {
            Parent::Root => {}
            Parent::Absent(name) => self.absent.entry(name).or_default().resident += 1,
            Parent::Here(at) => {
                let node = &mut self.nodes[at as usize];
                if node.followers.resident == 0 {
                    self.groups[usize::from(node.group)].leaves.remove(&node.leaf(at));
                }
                node.followers.resident += 1;
            }
        }
    }

    pub(super) fn unfollow(&mut self, slot: u32) {
        match self.parent_of(slot) {
            Parent::Root => {}
            Parent::Absent(name) => {
                let followers =
                    self.absent.get_mut(&name).expect("a resident child is counted under its parent's hash");
                followers.resident -= 1;
                if followers.resident == 0 {
                    self.absent.remove(&name);
                }
            }
            Parent::Here(at) => {
                let node = &mut self.nodes[at as usize];
                node.followers.resident -= 1;
                if node.followers.resident == 0 && !node.held() {
                    self.groups[usize::from(node.group)].leaves.insert(node.leaf(at));
                }
            }
        }
    }

    /// Not held a moment ago. Walks up to the first ancestor that was held before; a chain pinned from its root on walks
    /// one step per block.
    pub(super) fn became_held(&mut self, mut slot: u32) {
        loop {
            self.idle -= 1;
            let node = &self.nodes[slot as usize];
            if node.followers.resident == 0 {
                self.groups[usize::from(node.group)].leaves.remove(&node.leaf(slot));
            }
            match self.parent_of(slot) {
                Parent::Root => return,
                Parent::Absent(name) => return self.absent.entry(name).or_default().held += 1,
                Parent::Here(at) => {
                    let node = &mut self.nodes[at as usize];
                    let before = node.held();
                    node.followers.held += 1;
                    if before {
                        return;
                    }
                    slot = at;
                }
            }
        }
    }

    /// Nobody holds it any more. Walks up to the first ancestor that is still held.
    pub(super) fn became_idle(&mut self, mut slot: u32) {
        loop {
            self.idle += 1;
            self.clock += 1;
            let node = &mut self.nodes[slot as usize];
            node.turn = Turn::new(node.turn.is_young(), node.turn.height(), self.clock);
            if node.followers.resident == 0 {
                self.groups[usize::from(node.group)].leaves.insert(node.leaf(slot));
            }
            match self.parent_of(slot) {
                Parent::Root => return,
                Parent::Absent(name) => {
                    let followers =
                        self.absent.get_mut(&name).expect("a held child is counted under its parent's hash");
                    return followers.held -= 1;
                }
                Parent::Here(at) => {
                    let node = &mut self.nodes[at as usize];
                    node.followers.held -= 1;
                    if node.held() {
                        return;
                    }
                    slot = at;
                }
            }
        }
    }

    pub(super) fn parent_of(&mut self, slot: u32) -> Parent {
        let node = &self.nodes[slot as usize];
        let Some(name) = node.parent else { return Parent::Root };
        let seen = &self.nodes[node.parent_at as usize];
        if seen.resident && seen.name == name {
            return Parent::Here(node.parent_at);
        }
        match self.find(name) {
            None => Parent::Absent(name),
            Some(at) => {
                self.nodes[slot as usize].parent_at = at;
                Parent::Here(at)
            }
        }
    }
}
