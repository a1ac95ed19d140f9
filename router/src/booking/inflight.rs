//! Blocks that requests under way will leave behind, before any event tells of them.
//!
//! While a prompt waits in a worker's queue its blocks are nobody's; but who comes with the same prefix finds them there, if
//! he queues behind it. So each request promises its blocks for as long as it is booked. A name commits to everything before
//! it, so a promise names only some blocks, its anchors: whoever promises an anchor promises all that lead to it.

use crate::hash::Numbered;
use crate::index::{Overlap, Slot};
use kvbm::SequenceHash;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is promised, by whom, and how often.
#[derive(Default)]
pub(crate) struct Promises(Mutex<Numbered<u64, Makers>>);

impl Promise {
    /// Short names of some blocks: the promise is of them and of all that lead to them.
    pub(crate) fn anchors(&self) -> &[u64] {
        &self.anchors
    }
}

/// Who promises an anchor. Nearly always one worker, which takes no list.
#[derive(Default)]
struct Makers {
    first: Option<(Slot, u32)>,
    others: Vec<(Slot, u32)>,
}

/// One request's promise; dropping it takes it back.
#[must_use = "dropping a promise takes it back"]
pub(crate) struct Promise {
    promises: Arc<Promises>,
    slot: Slot,
    anchors: Box<[u64]>,
}

/// Tokens between anchors: what a follower may overlook of a promise. Less than what a step of a large model computes, and
/// an eighth of the work that every block would be.
const ANCHOR_TOKENS: usize = 128;

impl Promises {
    /// Promises the leading blocks of a prompt on a worker, but for the first `held`, which it has already.
    pub(crate) fn make(self: &Arc<Self>, slot: Slot, names: &[SequenceHash], block_size: usize, held: u32) -> Promise {
        let anchors: Box<[u64]> =
            anchors(names, block_size).filter(|(last, _)| *last >= held).map(|(_, name)| name).collect();
        self.at(slot, anchors)
    }

    /// Promises what leads to each of the anchors, as [`Promise::anchors`] of another router says.
    pub(crate) fn at(self: &Arc<Self>, slot: Slot, anchors: Box<[u64]>) -> Promise {
        let mut promised = self.lock();
        for anchor in &anchors {
            promised.entry(*anchor).or_default().add(slot);
        }
        drop(promised);
        Promise { promises: self.clone(), slot, anchors }
    }

    /// Whether a worker has promised any of a prompt.
    pub(crate) fn made(&self, slot: Slot, names: &[SequenceHash], block_size: usize) -> bool {
        let promised = self.lock();
        let by = |makers: &Makers| makers.all().any(|(by, _)| *by == slot);
        !promised.is_empty() && anchors(names, block_size).any(|(_, anchor)| promised.get(&anchor).is_some_and(by))
    }

    /// Adds to what workers hold of a prompt what is promised beyond it.
    pub(crate) fn extend(&self, overlap: &mut Overlap, names: &[SequenceHash], block_size: usize) {
        let promised = self.lock();
        if promised.is_empty() {
            return;
        }
        // The last that a worker promises says all.
        for (last, anchor) in anchors(names, block_size).rev() {
            let makers = promised.get(&anchor).into_iter().flat_map(Makers::all);
            makers.for_each(|(slot, _)| overlap.lengthen(*slot, last + 1));
        }
    }

    fn lock(&self) -> MutexGuard<'_, Numbered<u64, Makers>> {
        // Nothing that runs under this lock panics half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Makers {
    fn all(&self) -> impl Iterator<Item = &(Slot, u32)> {
        self.first.iter().chain(&self.others)
    }

    fn add(&mut self, slot: Slot) {
        if let Some((_, times)) = self.first.iter_mut().chain(&mut self.others).find(|(by, _)| *by == slot) {
            *times += 1;
            return;
        }
        match self.first {
            None => self.first = Some((slot, 1)),
            Some(_) => self.others.push((slot, 1)),
        }
    }

    /// Takes one promise back. Whether others are left.
    fn take(&mut self, slot: Slot) -> bool {
        if let Some((_, times)) = self.first.iter_mut().chain(&mut self.others).find(|(by, _)| *by == slot) {
            *times -= 1;
        }
        self.others.retain(|(_, times)| *times > 0);
        if self.first.is_none_or(|(_, times)| times == 0) {
            self.first = self.others.pop();
        }
        self.first.is_some()
    }
}

/// Positions and names of a prompt's anchors, in order: every so many blocks, and the last.
fn anchors(names: &[SequenceHash], block_size: usize) -> impl DoubleEndedIterator<Item = (u32, u64)> {
    let stride = (ANCHOR_TOKENS / block_size.max(1)).max(1);
    let end = names.len();
    let positions = (1..=end.div_ceil(stride)).map(move |nth| (nth * stride).min(end));
    positions.map(|upto| (upto as u32 - 1, names[upto - 1].short()))
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut promised = self.promises.lock();
        for anchor in &self.anchors {
            if let Entry::Occupied(mut makers) = promised.entry(*anchor)
                && !makers.get_mut().take(self.slot)
            {
                makers.remove();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::{Held, Index};
    use kvbm::{BlockEvent, Level};
    use worker::plane::{Source, WorkerId};

    #[test]
    fn a_promise_lengthens_what_is_held_until_the_last_of_its_makers_has_gone() {
        let names: Vec<SequenceHash> = (0..5).map(|byte| SequenceHash::from_bytes([byte; 16])).collect();
        let (index, promises) = (Index::new(), Arc::new(Promises::default()));
        let [holds, idle] = [1, 2].map(|id| index.join(WorkerId(id), &[]));
        let stored = BlockEvent::Stored { level: Level::G2, parent: None, blocks: names[..2].to_vec() };
        index.apply(Source::Worker(WorkerId(1)), &stored);
        let both = || {
            let mut overlap = index.overlap(&names);
            promises.extend(&mut overlap, &names, ANCHOR_TOKENS);
            [overlap.at(holds), overlap.at(idle)]
        };
        assert_eq!(both(), [Held::of([0, 2, 0, 0, 0]), Held::default()]);
        let make = |blocks: usize| promises.make(holds, &names[..blocks], ANCHOR_TOKENS, 2);
        let (first, second) = (make(4), make(3));
        assert_eq!(both(), [Held::of([2, 2, 0, 0, 0]), Held::default()], "nobody else has it");
        drop(first);
        assert_eq!(both(), [Held::of([1, 2, 0, 0, 0]), Held::default()]);
        drop(second);
        assert!(promises.lock().is_empty(), "and nothing is left of it");
    }
    #[test]
    fn a_promise_of_small_blocks_is_found_at_its_anchors() {
        let names: Vec<SequenceHash> = (0..20).map(|byte| SequenceHash::from_bytes([byte; 16])).collect();
        let (index, promises) = (Index::new(), Arc::new(Promises::default()));
        let [a, b] = [1, 2].map(|id| index.join(WorkerId(id), &[]));
        let _kept = [promises.make(a, &names[..18], 16, 0), promises.make(b, &names[..9], 16, 0)];
        let seen = |blocks: usize| {
            let mut overlap = index.overlap(&names[..blocks]);
            promises.extend(&mut overlap, &names[..blocks], 16);
            [overlap.at(a).run(), overlap.at(b).run()]
        };
        assert_eq!(seen(18), [18, 8], "the same prompt is found whole");
        assert_eq!(seen(20), [16, 8], "a longer one to the last anchor that both have");
        assert_eq!(seen(7), [0, 0], "what ends before the first anchor is not found");
    }
}
