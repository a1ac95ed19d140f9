//! Making room: the next segment begins, the oldest goes.

use super::Settings;
use super::direct::{self, Access};
use super::listing::Listing;
use super::load::block;
use super::log::{Log, Place, State, WRITE};
use super::reclaim::{self, Candidate};
use super::record::{self, Record};
use super::segment::{self, Head};
use crate::run::{self, Wanted};
use crate::{Block, StoreError};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

/// After a failed write the device is left alone for so long, then tried again.
pub(super) const REST: Duration = Duration::from_secs(1);
/// At most this part of a segment is carried over, so that reclaiming makes room.
const CARRIED: u64 = 4;

impl Log {
    /// Seals the head, begins a new one, and makes room so that the next roll finds some.
    pub(super) fn roll(&self, state: &mut State) -> Result<(), StoreError> {
        if self.rests() {
            return Err(StoreError::Busy);
        }
        state.head = None;
        let rolled = self.begin(state);
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

    fn begin(&self, state: &mut State) -> io::Result<()> {
        let Settings { capacity_bytes, segment_bytes, .. } = self.settings;
        let head = loop {
            #[cfg(test)]
            self.shared.rig.write(self.volume)?;
            let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
            match Head::create(&self.folder, number, segment_bytes, self.access, &self.taken) {
                Ok(head) => break Arc::new(head),
                // No room even for one more: give up the oldest without carrying anything over.
                Err(error) if error.kind() == io::ErrorKind::StorageFull && self.reclaim(state, false) => {}
                Err(error) => return Err(error),
            }
        };
        state.segments.insert(head.segment().number(), head.segment().clone());
        (state.head, state.end, state.records) = (Some(head), 0, 0);
        while self.taken() + segment_bytes > capacity_bytes || self.is_short()? {
            if !self.reclaim(state, true) {
                break;
            }
        }
        if self.is_short()? {
            // Even what was carried over must go.
            if let Some(head) = state.head.take() {
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

    /// Gives up the oldest segment, if there is a sealed one.
    fn reclaim(&self, state: &mut State, carry: bool) -> bool {
        let oldest = state.segments.values().next().filter(|oldest| oldest.is_sealed()).cloned();
        let Some(oldest) = oldest else { return false };
        let listing = std::mem::take(&mut *oldest.listing());
        if carry && let Err(error) = self.carry(state, oldest.number(), &listing) {
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

    /// Copies what is in use from the oldest segment to the head.
    fn carry(&self, state: &mut State, number: u32, listing: &Listing) -> io::Result<()> {
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
        let half = (self.settings.segment_bytes / 2).saturating_sub(state.end);
        let budget = half.min(self.settings.segment_bytes / CARRIED);
        let carried = reclaim::carried(&blocks, budget);
        let wanted = carried.iter().map(|&index| {
            let (candidate, place) = &candidates[index];
            Wanted { index, offset: u64::from(place.offset) * Access::UNIT, length: candidate.bytes }
        });
        let head = state.head.clone().ok_or(io::ErrorKind::NotFound)?;
        for run in run::runs(wanted.collect(), 0, WRITE) {
            let records = self.read(number, &run)?;
            let sound = run.wanted.iter().zip(records).filter_map(|(wanted, record)| {
                let candidate = candidates[wanted.index].0;
                let read = block(&record?).ok()?;
                read.check(candidate.name, candidate.fingerprint).ok()?;
                Some(read)
            });
            let sound: Vec<Block> = sound.collect();
            let offsets = head.write(state.end, sound.iter().map(Record::Block), &self.shared.pool)?;
            for (block, offset) in sound.iter().zip(offsets) {
                let new = self.resting(block, head.segment().number(), offset);
                let still = |place: &Place| self.is_in(place, number);
                self.shared.index.relocate(new.fingerprint, new.name, still, new.place);
                state.end = offset + Record::Block(block).span(self.access.grain());
                state.records += 1;
            }
        }
        Ok(())
    }
}
