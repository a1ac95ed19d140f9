//! Blocks that requests under way will leave behind, before any event tells of them.
//!
//! While a prompt waits in a worker's queue its blocks are nobody's; but who comes with the same prefix finds them there, if
//! he queues behind it. So each request promises its blocks for as long as it is booked. Only the leading blocks of a
//! prompt are ever asked for, and a promise is always of leading blocks: the first block that nobody promised ends a walk.

use crate::index::{Overlap, Slot};
use kvbm::SequenceHash;
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is promised, by whom, and how often.
#[derive(Default)]
pub(crate) struct Promises(Mutex<HashMap<u64, Vec<(Slot, u32)>>>);

/// One request's promise; dropping it takes it back.
#[must_use = "dropping a promise takes it back"]
pub(crate) struct Promise {
    promises: Arc<Promises>,
    slot: Slot,
    names: Box<[u64]>,
}

impl Promises {
    /// Promises the leading blocks of a prompt on a worker.
    pub(crate) fn make(self: &Arc<Self>, slot: Slot, names: &[SequenceHash]) -> Promise {
        let names: Box<[u64]> = names.iter().map(SequenceHash::short).collect();
        let mut promised = self.lock();
        for name in &names {
            let slots = promised.entry(*name).or_default();
            match slots.iter_mut().find(|(by, _)| *by == slot) {
                Some((_, times)) => *times += 1,
                None => slots.push((slot, 1)),
            }
        }
        drop(promised);
        Promise { promises: self.clone(), slot, names }
    }

    /// Adds to what workers hold of a prompt what is promised right after it.
    pub(crate) fn extend(&self, overlap: &mut Overlap, names: &[SequenceHash]) {
        let promised = self.lock();
        for (position, name) in names.iter().enumerate() {
            let Some(slots) = promised.get(&name.short()) else { return };
            for (slot, _) in slots {
                overlap.lengthen(*slot, position as u32);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<u64, Vec<(Slot, u32)>>> {
        // Nothing that runs under this lock panics half-way.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Promise {
    fn drop(&mut self) {
        let mut promised = self.promises.lock();
        for name in &self.names {
            let Some(slots) = promised.get_mut(name) else { continue };
            let Some(at) = slots.iter().position(|(by, _)| *by == self.slot) else { continue };
            slots[at].1 -= 1;
            if slots[at].1 == 0 {
                slots.swap_remove(at);
            }
            if slots.is_empty() {
                promised.remove(name);
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
            promises.extend(&mut overlap, &names);
            [overlap.at(holds), overlap.at(idle)]
        };
        assert_eq!(both(), [Held::of([0, 2, 0, 0]), Held::default()]);
        let (first, second) = (promises.make(holds, &names[..4]), promises.make(holds, &names[..3]));
        assert_eq!(both(), [Held::of([2, 2, 0, 0]), Held::default()], "nobody else has it");
        drop(first);
        assert_eq!(both(), [Held::of([1, 2, 0, 0]), Held::default()]);
        drop(second);
        assert!(promises.lock().is_empty(), "and nothing is left of it");
    }
}
