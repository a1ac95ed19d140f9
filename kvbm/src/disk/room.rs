//! Making room: the next segment begins, the oldest goes.
//!
//! Where domains are told apart, each has segments of its own, and so gives up its own.

use super::Settings;
use super::direct::{self, Access};
use super::listing::Listing;
use super::load::block;
use super::log::{Log, Open, Place, Spill, State, WRITE};
use super::reclaim::{self, Candidate};
use super::record::{self, Record};
use super::segment::{self, Head, Segment};
use crate::run::{self, Run, Wanted};
use crate::{Block, StoreError, shares};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// After a failed write the device is left alone for so long, then tried again.
pub(super) const REST: Duration = Duration::from_secs(1);
/// At most this part of a segment is carried over, so that reclaiming makes room.
const CARRIED: u64 = 4;

impl Log {
    /// Seals a group's head, begins a new one, and makes room so that the next roll finds some.
    pub(super) fn roll(&self, state: &mut State, group: u16) -> Result<(), StoreError> {
        if self.rests() {
            return Err(StoreError::Busy);
        }
        state.heads.remove(&group);
        let rolled = self.begin(state, group);
        rolled.map_err(|error| {
            self.rest();
            self.suspect(&error);
            tracing::warn!(folder = %self.folder.display(), %error, "no new segment, disk tier takes no blocks for a while");
            match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreError::Full,
                _ => StoreError::Io(error),
            }
        })
    }

    fn begin(&self, state: &mut State, group: u16) -> io::Result<()> {
        let Settings { capacity_bytes, segment_bytes, .. } = self.settings;
        let head = loop {
            #[cfg(test)]
            self.shared.rig.write(self.volume)?;
            let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
            match Head::create(&self.folder, (number, group), segment_bytes, self.access, &self.taken) {
                Ok(head) => break Arc::new(head),
                // No room even for one more: give up the oldest without carrying anything over.
                Err(error) if error.kind() == io::ErrorKind::StorageFull && self.make_room(state, false) => {}
                Err(error) => return Err(error),
            }
        };
        state.segments.insert(head.segment().number(), head.segment().clone());
        state.heads.insert(group, Open { head, end: 0, records: 0 });
        let most = self.division.bounds[usize::from(group)].maximum;
        while has(state, group) > most && self.reclaim(state, group, true) {}
        while self.taken() + segment_bytes > capacity_bytes || self.is_short()? {
            if !self.make_room(state, true) {
                break;
            }
        }
        if self.is_short()? {
            // Even what was carried over must go.
            if let Some(Open { head, .. }) = state.heads.remove(&group) {
                let listing = std::mem::take(&mut *head.segment().listing());
                self.forget(state, head.segment().number(), &listing);
                segment::give_back(&self.folder);
            }
            return Err(io::ErrorKind::StorageFull.into());
        }
        Ok(())
    }

    /// Whether less is free than the filesystem is to keep, a spare given back.
    fn is_short(&self) -> io::Result<bool> {
        let short = || -> io::Result<bool> { Ok(direct::free_bytes(&self.folder)? < self.settings.min_free_bytes) };
        Ok(short()? && (!segment::give_back(&self.folder) || short()?))
    }

    /// Gives up a segment of the group that is furthest over what it was promised, if there is a sealed one.
    fn make_room(&self, state: &mut State, carry: bool) -> bool {
        let groups = (0..).zip(&self.division.bounds).map(|(group, bounds)| {
            let gives = of(state, group).any(|segment| segment.is_sealed());
            (*bounds, has(state, group), gives)
        });
        let payer = shares::payer(groups);
        payer.is_some_and(|group| self.reclaim(state, group as u16, carry))
    }

    /// Gives up the oldest segment of a group, if there is a sealed one.
    fn reclaim(&self, state: &mut State, group: u16, carry: bool) -> bool {
        let oldest = of(state, group).find(|segment| segment.is_sealed()).cloned();
        let Some(oldest) = oldest else { return false };
        let listing = std::mem::take(&mut *oldest.listing());
        if carry && let Err(error) = self.carry(state, &oldest, &listing) {
            tracing::warn!(folder = %self.folder.display(), %error, "hot blocks could not be carried over");
        }
        self.forget(state, oldest.number(), &listing);
        true
    }

    fn forget(&self, state: &mut State, number: u32, listing: &Listing) {
        let blocks = listing.iter().map(|(fingerprint, entry)| (fingerprint, entry.name));
        self.shared.index.remove(blocks, |place| self.is_in(place, number));
        state.segments.remove(&number);
        if let Err(error) = segment::retire(&self.folder, number) {
            tracing::warn!(folder = %self.folder.display(), number, %error, "segment could not be removed");
        }
    }

    /// Copies what is in use from a group's oldest segment to its head; what has no room there is handed over.
    fn carry(&self, state: &mut State, oldest: &Segment, listing: &Listing) -> io::Result<()> {
        let number = oldest.number();
        let mut open = state.heads.get_mut(&oldest.group());
        let candidates: Vec<(Candidate, Place)> = listing
            .iter()
            .filter(|(_, entry)| !entry.gone)
            .filter_map(|(fingerprint, entry)| {
                let place = self.shared.index.get(fingerprint, entry.name)?;
                let bytes = record::span(u64::from(entry.length), self.access.grain());
                let (name, parent, hot) = (entry.name, entry.parent, place.hot);
                let pinned = self.shared.index.is_pinned(fingerprint, name);
                let candidate = Candidate { fingerprint, name, parent, hot, pinned, bytes };
                (self.is_in(&place, number) && place.offset == entry.offset).then_some((candidate, place))
            })
            .collect();
        let blocks: Vec<Candidate> = candidates.iter().map(|(candidate, _)| *candidate).collect();
        // Several segments may go in one roll; half of the head is left for new blocks.
        let half = |open: &mut Open| (self.settings.segment_bytes / 2).saturating_sub(open.end);
        let part = self.settings.segment_bytes / CARRIED;
        let budget = open.as_deref_mut().map_or(0, half).min(part);
        let carried = reclaim::carried(&blocks, budget);
        let runs = |positions: &[usize]| {
            let wanted = positions.iter().map(|&index| {
                let (candidate, place) = &candidates[index];
                Wanted { index, offset: u64::from(place.offset) * Access::UNIT, length: candidate.bytes }
            });
            run::runs(wanted.collect(), 0, WRITE)
        };
        let sound = |run: &Run| -> io::Result<Vec<Block>> {
            let sound = run.wanted.iter().zip(self.read(number, run)?).filter_map(|(wanted, record)| {
                let candidate = candidates[wanted.index].0;
                let read = block(&record?).ok()?;
                read.check(candidate.name, candidate.fingerprint).ok()?;
                Some(read)
            });
            Ok(sound.collect())
        };
        for run in runs(&carried) {
            let (Some(open), sound) = (open.as_deref_mut(), sound(&run)?) else { break };
            let head = open.head.clone();
            let offsets = head.write(open.end, sound.iter().map(Record::Block), &self.shared.pool)?;
            for (block, offset) in sound.iter().zip(offsets) {
                let new = self.resting(block, head.segment().number(), offset);
                let still = |place: &Place| self.is_in(place, number);
                self.shared.index.relocate(new.fingerprint, new.name, still, new.place);
                open.end = (offset + Record::Block(block).span(self.access.grain())).next_multiple_of(Access::BLOCK);
                open.records += 1;
            }
        }
        if let Some(Spill { wants, to }) = self.shared.spill.get() {
            let mut over = reclaim::carried(&blocks, part.saturating_add(budget));
            let wanted = |index: &usize| wants(blocks[*index].fingerprint, blocks[*index].name);
            over.retain(|index| carried.binary_search(index).is_err() && wanted(index));
            for run in runs(&over) {
                // What does not fit waits for nobody.
                sound(&run)?.into_iter().for_each(|block| drop(to.try_send(block)));
            }
        }
        Ok(())
    }
}

/// A group's segments, oldest first.
fn of(state: &State, group: u16) -> impl Iterator<Item = &Arc<Segment>> {
    state.segments.values().filter(move |segment| segment.group() == group)
}

/// Bytes that a group's segments take.
fn has(state: &State, group: u16) -> usize {
    of(state, group).map(|segment| segment.bytes() as usize).sum()
}
