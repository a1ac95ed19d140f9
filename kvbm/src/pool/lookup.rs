//! Blocks found by name: held, used, or merely seen.

use super::Pool;
use super::handles::{CachedBlock, CachedBlocks, Held};
use crate::block::SequenceHash;
use crate::table::{Ahead, BATCH};

impl Pool {
    /// The leading `names` that are here, held, and used once more.
    pub(crate) fn matched(&self, names: &[SequenceHash]) -> CachedBlocks {
        let mut held = Vec::with_capacity(names.len());
        let mut ahead = Ahead::default();
        // In batches, so that nobody waits for the lock for long; what is held already keeps what precedes it.
        'all: for start in (0..names.len()).step_by(BATCH) {
            let mut state = self.0.settled();
            let residents = &mut state.residents;
            // What was the block before may have been discarded between two batches.
            let mut before = None;
            for at in start..names.len().min(start + BATCH) {
                let Some(id) = residents.find_of(&mut ahead, names, at) else { break 'all };
                residents.take(id, before);
                before = Some((id, names[at]));
                held.push(Held { id, name: names[at] });
            }
        }
        CachedBlocks::new(&self.0, held)
    }

    /// Each of `names`, held if it is here, and used once more.
    pub(crate) fn used(&self, names: &[SequenceHash]) -> Vec<Option<CachedBlock>> {
        let held = self.found(names);
        let mut state = self.0.lock();
        held.iter().flatten().for_each(|block| state.residents.used(block.slot().0));
        drop(state);
        held
    }

    /// Each of `names`, held if it is here, which is no use: blocks are copied without being asked for. One call for a chain,
    /// from its root on, costs far less than one per block: a hold walks up to the first ancestor that is held.
    pub(crate) fn found(&self, names: &[SequenceHash]) -> Vec<Option<CachedBlock>> {
        let mut held: Vec<Option<Held>> = Vec::with_capacity(names.len());
        for batch in names.chunks(BATCH) {
            let mut state = self.0.settled();
            let before = held.len();
            let found = state.residents.find_each(batch).zip(batch);
            held.extend(found.map(|(id, name)| Some(Held { id: id?, name: *name })));
            held[before..].iter().flatten().for_each(|block| state.residents.hold(block.id));
        }
        held.into_iter().map(|held| held.map(|block| CachedBlock::new(self.0.clone(), block))).collect()
    }

    /// Those of `names` that are here, in order, held by one guard, which is no use either.
    pub(crate) fn present(&self, names: &[SequenceHash]) -> CachedBlocks {
        let mut held = Vec::with_capacity(names.len());
        for batch in names.chunks(BATCH) {
            let mut state = self.0.settled();
            let before = held.len();
            let found = state.residents.find_each(batch).zip(batch);
            held.extend(found.filter_map(|(id, name)| Some(Held { id: id?, name: *name })));
            held[before..].iter().for_each(|block| state.residents.hold(block.id));
        }
        CachedBlocks::new(&self.0, held)
    }

    /// Which of `names` are here, and which are not.
    pub(crate) fn sort(&self, names: &[SequenceHash]) -> (Vec<SequenceHash>, Vec<SequenceHash>) {
        let [mut here, mut missing] = [Vec::with_capacity(names.len()), Vec::new()];
        for batch in names.chunks(BATCH) {
            for (found, name) in self.0.settled().residents.find_each(batch).zip(batch) {
                if found.is_some() { here.push(*name) } else { missing.push(*name) }
            }
        }
        (here, missing)
    }

    /// How many leading `names` are here.
    pub(crate) fn holds(&self, names: &[SequenceHash]) -> usize {
        let mut here = 0;
        for batch in names.chunks(BATCH) {
            let found = self.0.settled().residents.find_each(batch).take_while(Option::is_some).count();
            here += found;
            if found < batch.len() {
                break;
            }
        }
        here
    }

    /// The first of `names` that is here.
    pub(crate) fn next(&self, names: &[SequenceHash]) -> Option<usize> {
        let within = |(batch, names): (usize, &[SequenceHash])| {
            let found = self.0.lock().residents.find_each(names).position(|found| found.is_some());
            found.map(|at| batch * BATCH + at)
        };
        names.chunks(BATCH).enumerate().find_map(within)
    }
}
