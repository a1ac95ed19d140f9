//! What tiers delivered: verified, written into the device and given to everyone, or sent away.

use super::{Item, Loading, Place};
use crate::block::{Corrupt, Header, SequenceHash};
use crate::manager::Core;
use crate::pool::{FullBlock, PartialBlock};
use std::collections::VecDeque;
use tokio::time::Instant;

/// Bytes verified and written per hop to a blocking thread: enough to hide the hop, few enough to begin early.
pub(super) const WRITE_BYTES: usize = 4 << 20;

/// Hops at the same time: one core's memcpy does not fill the memory's bandwidth, two nearly do.
pub(super) const WRITES: usize = 2;

/// What became of an item.
pub(super) enum Written {
    Good {
        source: usize,
        index: usize,
        block: FullBlock,
    },
    Bad {
        source: usize,
        index: usize,
        why: Corrupt,
    },
    /// Sound, and older than its request allowed.
    Over {
        source: usize,
        index: usize,
    },
}

impl Loading<'_> {
    /// Verifies and writes what is queued and still wanted, on a blocking thread.
    pub(super) fn write(&mut self) {
        let claimed = self.job.shared.claimed();
        let mut items = std::mem::take(&mut self.queue);
        for late in items.extract_if(.., |item| item.index < claimed) {
            self.job.inner.core.metrics.missed(self.level(late.source), 1);
        }
        let core = self.job.inner.core.clone();
        let Some(slots) = core.pool.allocate(items.len()) else {
            return self.give_up(&items);
        };
        self.writing += items.len();
        let names: Vec<_> = items.iter().map(|item| self.job.names[item.index]).collect();
        self.writes.push(tokio::task::spawn_blocking(move || {
            let items = items.into_iter().zip(names).zip(slots);
            items.map(|((item, name), slot)| core.write(item, name, slot)).collect()
        }));
    }

    pub(super) fn place(&mut self, mut written: Vec<Written>) {
        self.writing -= written.len();
        // In order, so that a run is announced as one.
        written.sort_by_key(|written| match written {
            Written::Good { index, .. } | Written::Bad { index, .. } | Written::Over { index, .. } => *index,
        });
        let (mut blocks, mut from) = (Vec::new(), Vec::new());
        for written in written {
            match written {
                Written::Good { source, index, block } => {
                    self.seen[source].delivered += 1;
                    blocks.push(block);
                    from.push((index, self.level(source)));
                }
                Written::Bad { source, index, why } => {
                    self.quarantine(source, index, why);
                    self.try_next(source, index);
                }
                Written::Over { source, index } => {
                    self.expire(source, index);
                    self.try_next(source, index);
                }
            }
        }
        if !blocks.is_empty() {
            for (_, level) in &from {
                self.job.inner.core.metrics.hit(*level, 1);
            }
            self.job.shared.come_from(from.iter().map(|(index, level)| (self.job.names[*index], *level)));
            // At once, for those who follow; and if this request is dropped, what it loaded stays cached.
            let cached = self.job.inner.core.pool.register_since(blocks, self.job.purges);
            let mut there = cached.iter().peekable();
            for (index, _) in from {
                // Of a domain that was purged meanwhile nothing is registered.
                let registered = there.next_if(|held| held.name() == self.job.names[index]).is_some();
                self.places[index] = if registered { Place::There } else { Place::Lost };
            }
            self.job.shared.keep(cached);
            self.lead += self.places[self.lead..].iter().take_while(|place| **place == Place::There).count();
            self.news = Instant::now();
            self.bringing.step();
        }
    }

    /// There is no room: what is there so far must do.
    fn give_up(&mut self, items: &[Item]) {
        self.recall();
        self.todo.iter_mut().for_each(VecDeque::clear);
        for item in items {
            self.places[item.index] = Place::Lost;
        }
        self.places.iter_mut().filter(|place| **place == Place::Unasked).for_each(|place| *place = Place::Lost);
        self.bringing.leave();
    }

    fn expire(&self, source: usize, index: usize) {
        let (tier, core, name) = (&self.job.sources[source].tier, &self.job.inner.core, self.job.names[index]);
        core.metrics.expired(tier.level(), tier.lapse(core.device.fingerprint(), name));
    }

    pub(super) fn quarantine(&self, source: usize, index: usize, why: Corrupt) {
        let (tier, name) = (&self.job.sources[source].tier, self.job.names[index]);
        let core = &self.job.inner.core;
        if let Some(others) = core.quarantines.pass() {
            tracing::warn!(
                tier = %tier.level(), block = %name, reason = %why, suppressed = others,
                "corrupt block deleted"
            );
        } else {
            tracing::debug!(tier = %tier.level(), block = %name, reason = %why, "corrupt block deleted");
        }
        self.job.inner.core.metrics.corrupt(tier.level());
        tier.discard(self.job.inner.core.device.fingerprint(), name);
    }
}

impl Core {
    /// Writes a block into the device if it is what was asked for. Runs on a blocking thread.
    fn write(&self, item: Item, name: SequenceHash, slot: PartialBlock) -> Written {
        let Item { source, index, block } = item;
        if block.payload.len() != self.device.block_bytes() {
            return Written::Bad { source, index, why: Corrupt::Length };
        }
        // One pass over the bytes: they are in the device before they are believed, in a slot that nobody else knows of.
        let copy = |bytes: &[u8], seen: &mut dyn FnMut(&[u8])| self.device.write_seen(slot.slot(), bytes, seen);
        match block.verify_along(name, self.device.fingerprint(), copy) {
            Ok(block) if block.header().keep.is_over(self.clock.now()) => Written::Over { source, index },
            Ok(block) => {
                let Header { parent, .. } = *block.header();
                Written::Good { source, index, block: slot.complete(name, parent, block.header().custody()) }
            }
            Err(why) => Written::Bad { source, index, why },
        }
    }
}
