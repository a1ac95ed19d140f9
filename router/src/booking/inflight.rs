//! Prefixes of requests in flight, before any event announces their blocks.
//!
//! Blocks of queued prompts are not in the index yet, but a request with the same prefix that is queued behind them
//! will hit them, so they count as present. Each reservation adds the prefix of its prompt for as long as it lives. A
//! block hash commits to everything before it, so only some blocks are recorded, the anchors: a worker that holds an
//! anchor holds all blocks that lead to it.

use crate::hash::NumberMap;
use crate::index::{HolderId, Overlap};
use kvbm::SequenceHash;
use parking_lot::{Mutex, MutexGuard};
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// Anchors in flight, and the workers on which they are.
#[derive(Default)]
pub(crate) struct InflightPrefixes(Mutex<NumberMap<u64, Holders>>);

impl InflightPrefix {
    /// Short hashes of some blocks, which stand for all blocks that lead to them.
    pub(crate) fn anchors(&self) -> &[u64] {
        &self.anchors
    }
}

/// The workers with an anchor in flight, and how often. Nearly always one, which needs no list.
#[derive(Default)]
struct Holders {
    first: Option<(HolderId, u32)>,
    others: Vec<(HolderId, u32)>,
}

/// The prefix of one request; dropping it removes it.
#[must_use = "dropping a prefix removes it"]
pub(crate) struct InflightPrefix {
    prefixes: Arc<InflightPrefixes>,
    slot: HolderId,
    anchors: Box<[u64]>,
}

/// Tokens between anchors, and so the part of a prefix that a later request may miss. Less than a step of a large
/// model computes, and an eighth of the work that every block would be.
const ANCHOR_TOKENS: usize = 128;

impl InflightPrefixes {
    /// Adds the leading blocks of a prompt on a worker, except the first `held`, which it has already.
    pub(crate) fn add(
        self: &Arc<Self>,
        slot: HolderId,
        hashes: &[SequenceHash],
        block_size: usize,
        held: u32,
    ) -> InflightPrefix {
        let anchors: Box<[u64]> =
            anchors(hashes, block_size).filter(|(last, _)| *last >= held).map(|(_, name)| name).collect();
        self.add_anchors(slot, anchors)
    }

    /// Adds the blocks that lead to each anchor, as [`InflightPrefix::anchors`] of another router lists them.
    pub(crate) fn add_anchors(self: &Arc<Self>, slot: HolderId, anchors: Box<[u64]>) -> InflightPrefix {
        let mut holders_by_anchor = self.lock();
        for anchor in &anchors {
            holders_by_anchor.entry(*anchor).or_default().add(slot);
        }
        drop(holders_by_anchor);
        InflightPrefix { prefixes: self.clone(), slot, anchors }
    }

    /// Whether a worker has any part of a prompt in flight.
    pub(crate) fn contains(&self, slot: HolderId, hashes: &[SequenceHash], block_size: usize) -> bool {
        let holders_by_anchor = self.lock();
        let by = |holders: &Holders| holders.all().any(|(holder, _)| *holder == slot);
        !holders_by_anchor.is_empty()
            && anchors(hashes, block_size).any(|(_, anchor)| holders_by_anchor.get(&anchor).is_some_and(by))
    }

    /// Extends the overlap of each worker by its prefixes in flight.
    pub(crate) fn extend(&self, overlap: &mut Overlap, hashes: &[SequenceHash], block_size: usize) {
        let holders_by_anchor = self.lock();
        if holders_by_anchor.is_empty() {
            return;
        }
        // The last anchor of a worker covers all before it.
        for (last, anchor) in anchors(hashes, block_size).rev() {
            let holders = holders_by_anchor.get(&anchor).into_iter().flat_map(Holders::all);
            holders.for_each(|(slot, _)| overlap.extend(*slot, last + 1));
        }
    }

    /// Number of anchors in flight.
    pub(crate) fn anchor_count(&self) -> usize {
        self.lock().len()
    }

    fn lock(&self) -> MutexGuard<'_, NumberMap<u64, Holders>> {
        // No code under this lock panics.
        self.0.lock()
    }
}

impl Holders {
    fn all(&self) -> impl Iterator<Item = &(HolderId, u32)> {
        self.first.iter().chain(&self.others)
    }

    fn add(&mut self, slot: HolderId) {
        if let Some((_, times)) = self.first.iter_mut().chain(&mut self.others).find(|(holder, _)| *holder == slot) {
            *times += 1;
            return;
        }
        match self.first {
            None => self.first = Some((slot, 1)),
            Some(_) => self.others.push((slot, 1)),
        }
    }

    /// Removes one prefix of a worker. Returns whether others are left.
    fn remove(&mut self, slot: HolderId) -> bool {
        if let Some((_, times)) = self.first.iter_mut().chain(&mut self.others).find(|(holder, _)| *holder == slot) {
            *times -= 1;
        }
        self.others.retain(|(_, times)| *times > 0);
        if self.first.is_none_or(|(_, times)| times == 0) {
            self.first = self.others.pop();
        }
        self.first.is_some()
    }
}

/// Positions and short hashes of a prompt's anchors, in order: one every few blocks, and the last block.
fn anchors(hashes: &[SequenceHash], block_size: usize) -> impl DoubleEndedIterator<Item = (u32, u64)> {
    let stride = (ANCHOR_TOKENS / block_size.max(1)).max(1);
    let end = hashes.len();
    let positions = (1..=end.div_ceil(stride)).map(move |nth| (nth * stride).min(end));
    positions.map(|upto| (upto as u32 - 1, hashes[upto - 1].short()))
}

impl Drop for InflightPrefix {
    fn drop(&mut self) {
        let mut holders_by_anchor = self.prefixes.lock();
        for anchor in &self.anchors {
            if let Entry::Occupied(mut holders) = holders_by_anchor.entry(*anchor)
                && !holders.get_mut().remove(self.slot)
            {
                holders.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Holder, Index, WorkerOverlap};
    use kvbm::{BlockEvent, Level};
    use worker::plane::WorkerId;

    #[test]
    fn prefix_extends_the_overlap_until_its_last_request_ends() {
        let hashes: Vec<SequenceHash> = (0..5).map(|byte| SequenceHash::from_bytes([byte; 16])).collect();
        let index = Index::new();
        let prefixes = Arc::new(InflightPrefixes::default());
        let [holds, idle] = [1, 2].map(|id| index.join(WorkerId(id), &[]));
        let stored = BlockEvent::Stored { level: Level::G2, parent: None, blocks: hashes[..2].to_vec() };
        index.apply(Holder::Worker(WorkerId(1)), &stored);
        let both = || {
            let mut overlap = index.overlap(&hashes);
            prefixes.extend(&mut overlap, &hashes, ANCHOR_TOKENS);
            [overlap.at(holds), overlap.at(idle)]
        };
        assert_eq!(both(), [WorkerOverlap::of([0, 2, 0, 0, 0]), WorkerOverlap::default()]);
        let add = |blocks: usize| prefixes.add(holds, &hashes[..blocks], ANCHOR_TOKENS, 2);
        let first = add(4);
        let second = add(3);
        assert_eq!(both(), [WorkerOverlap::of([2, 2, 0, 0, 0]), WorkerOverlap::default()], "no other worker has it");
        drop(first);
        assert_eq!(both(), [WorkerOverlap::of([1, 2, 0, 0, 0]), WorkerOverlap::default()]);
        drop(second);
        assert!(prefixes.lock().is_empty(), "no anchor is left");
    }

    #[test]
    fn prefix_of_small_blocks_is_found_at_its_anchors() {
        let hashes: Vec<SequenceHash> = (0..20).map(|byte| SequenceHash::from_bytes([byte; 16])).collect();
        let index = Index::new();
        let prefixes = Arc::new(InflightPrefixes::default());
        let [a, b] = [1, 2].map(|id| index.join(WorkerId(id), &[]));
        let _kept = [prefixes.add(a, &hashes[..18], 16, 0), prefixes.add(b, &hashes[..9], 16, 0)];
        let seen = |blocks: usize| {
            let mut overlap = index.overlap(&hashes[..blocks]);
            prefixes.extend(&mut overlap, &hashes[..blocks], 16);
            [overlap.at(a).total(), overlap.at(b).total()]
        };
        assert_eq!(seen(18), [18, 8], "the same prompt is found completely");
        assert_eq!(seen(20), [16, 8], "a longer one to the last anchor that both have");
        assert_eq!(seen(7), [0, 0], "a prompt shorter than the first anchor is not found");
    }
}
