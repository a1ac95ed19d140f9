//! Making room: the next segment begins, the oldest goes.
//!
//! ```text
//!   roll ─▶ next segment made ─▶ one step under the lock: it is the head, what goes is chosen,
//!                                what of it stays has a place in the head
//!           others write again ◀┘  └▶ what stays is copied, handed over, forgotten; then the space is the next one's
//! ```
//!
//! One rolls at a time, and all reading and writing is done without the lock. Where domains are told apart, each has
//! segments of its own, and so gives up its own.

use super::Settings;
use super::direct::{self, Access};
use super::log::{Log, Open, Place, Spill, State};
use super::reclaim::{self, Candidate};
use super::record::{self, Record};
use super::segment::{self, Head, Segment};
use crate::block::Block;
use crate::tier::coalesce::{self, Run, Wanted};
use crate::tier::{StoreError, payer};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// At most this part of a segment is carried over, so that reclaiming makes room.
const CARRIED: u64 = 4;
/// One in so many bytes of its capacity a log keeps when others have filled the disk: enough to be of use, and what others need
/// more urgently they got from the rest.
const KEPT: u64 = 4;
/// By one in so many bytes of a segment it may be over that: segments are not all filled to their end, and one that goes is to
/// be enough for one that comes.
const SLACK: u64 = 8;
/// One read and one write of what is carried over.
const CARRY: u64 = 4 << 20;

/// A segment that goes: no longer one of the log's, and still to be read.
pub(super) struct Going {
    segment: Arc<Segment>,
    /// What rests in it.
    blocks: Vec<(Candidate, Place)>,
    /// What of it stays, with its place.
    stays: Vec<Move>,
    /// Which of the others are worth handing over.
    over: Vec<usize>,
}

/// Blocks that are copied together.
struct Move {
    run: Run,
    head: Arc<Head>,
    at: u64,
}

impl Log {
    /// Seals a group's head, begins a new one, and makes room so that the next roll finds some. For one at a time, without
    /// the lock: the others write as soon as the new head is there.
    ///
    /// At most the first `carry` bytes of the new one are for what is carried over.
    pub(super) fn roll(&self, group: u16, carry: u64) -> Result<(), StoreError> {
        if self.rests() {
            return Err(StoreError::Busy);
        }
        let full = self.lock().heads.remove(&group);
        // Sealed here, unless somebody still writes to it.
        drop(full);
        self.begin(group, carry).map_err(|error| {
            self.rest(&error);
            self.suspect(&error);
            match error.kind() {
                io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => StoreError::Full,
                _ => StoreError::Io(error),
            }
        })
    }

    fn begin(&self, group: u16, carry: u64) -> io::Result<()> {
        self.stands()?;
        let before = self.taken();
        let head = self.create(group)?;
        let number = head.segment().number();
        // Asked before anything is chosen, which must then go.
        let short = self.missing()? > 0;
        let going = {
            let mut state = self.lock();
            state.segments.retain(|_, segment| !segment.is_gone());
            state.segments.insert(number, head.segment().clone());
            // While space is short, nobody writes to the head before it is known that it may stay.
            state.heads.insert(group, Open { head: head.clone(), end: 0, records: 0, reserved: short });
            self.too_much(&mut state, group, carry)
        };
        if !short {
            self.tell();
        }
        for going in going {
            self.give_up(&going);
        }
        if !short {
            return Ok(());
        }
        let made = self.make_room(before, carry);
        let mut state = self.lock();
        match (made, state.heads.get_mut(&group)) {
            (Ok(()), Some(open)) => {
                open.reserved = false;
                drop(state);
                self.tell();
                Ok(())
            }
            (made, _) => {
                // Even what was carried over must go.
                state.heads.remove(&group);
                drop(state);
                self.forget(head.segment());
                segment::give_back(&self.io, &self.folder);
                made.and(Err(io::ErrorKind::NotConnected.into()))
            }
        }
    }

    /// Gives segments up while less is free than the filesystem is to keep. A log that others have crowded out of their space
    /// keeps a part of its own ([`KEPT`]) and writes on in that; it only does not grow.
    fn make_room(&self, before: u64, carry: u64) -> io::Result<()> {
        let kept = before.min(self.capacity() / KEPT);
        loop {
            let over = self.taken().saturating_sub(kept + self.settings.segment_bytes / SLACK);
            let wanted = self.missing()?.min(over);
            if wanted == 0 {
                return Ok(());
            }
            let next = {
                let mut state = self.lock();
                let sealed = state.segments.values().filter(|segment| segment.is_sealed() && !segment.is_going());
                // What would not suffice stays.
                let suffices = sealed.map(|segment| segment.bytes()).sum::<u64>() >= wanted;
                suffices.then(|| self.next_to_go(&mut state, carry)).flatten()
            };
            let Some(going) = next else { return Err(io::ErrorKind::StorageFull.into()) };
            self.give_up(&going);
        }
    }

    fn create(&self, group: u16) -> io::Result<Arc<Head>> {
        loop {
            #[cfg(test)]
            self.shared.rig.write(self.volume)?;
            let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
            let (bytes, keys) = (self.settings.segment_bytes, self.shared.keys.clone());
            match Head::create(&self.folder, (number, group), bytes, self.access, &self.io, keys, &self.taken) {
                Ok(head) => return Ok(Arc::new(head)),
                Err(error) if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded) => {
                    // No room even for one more: the oldest goes, and nothing of it stays.
                    let next = self.next_to_go(&mut self.lock(), 0);
                    let Some(going) = next else { return Err(error) };
                    self.give_up(&going);
                }
                Err(error) => return Err(error),
            }
        }
    }

    /// Bytes by which less is free than the filesystem is to keep, a spare given back.
    fn missing(&self) -> io::Result<u64> {
        let free = || {
            #[cfg(test)]
            if let Some(free) = self.shared.rig.free(self.taken()) {
                return Ok(free);
            }
            self.io.look(|| direct::free_bytes(&self.folder))
        };
        let missing = || -> io::Result<u64> { Ok(self.settings.min_free_bytes.saturating_sub(free()?)) };
        match missing()? {
            0 => Ok(0),
            some if !segment::give_back(&self.io, &self.folder) => Ok(some),
            _ => missing(),
        }
    }

    /// What has to go so that a group has no more than it may have, and the next segment finds room.
    fn too_much(&self, state: &mut State, group: u16, carry: u64) -> Vec<Going> {
        let Settings { capacity_bytes, segment_bytes, .. } = self.settings;
        let most = self.division.bounds[usize::from(group)].maximum;
        let mut going = Vec::new();
        while has(state, group) > most {
            let Some(next) = self.oldest_to_go(state, group, carry) else { break };
            going.push(next);
        }
        let taken = |state: &State| -> u64 {
            let stay = state.segments.values().filter(|segment| !segment.is_going());
            stay.map(|segment| segment.bytes()).sum()
        };
        while taken(state) + segment_bytes > capacity_bytes {
            let Some(next) = self.next_to_go(state, carry) else { break };
            going.push(next);
        }
        going
    }

    /// A segment of the group that is furthest over what it was promised, if there is a sealed one.
    pub(super) fn next_to_go(&self, state: &mut State, carry: u64) -> Option<Going> {
        let groups = (0..).zip(&self.division.bounds).map(|(group, bounds)| {
            let gives = of(state, group).any(|segment| segment.is_sealed());
            (*bounds, has(state, group), gives)
        });
        let payer = payer(groups)?;
        self.oldest_to_go(state, payer as u16, carry)
    }

    /// The oldest segment of a group, if there is a sealed one. What stays of it takes its place in the group's head at
    /// once, so that a discard that is noted later is found later in the log.
    fn oldest_to_go(&self, state: &mut State, group: u16, carry: u64) -> Option<Going> {
        let segment = of(state, group).find(|segment| segment.is_sealed())?.clone();
        segment.go();
        let mut going = Going { segment, blocks: Vec::new(), stays: Vec::new(), over: Vec::new() };
        if carry > 0 {
            self.choose(state.heads.get_mut(&group), carry, &mut going);
        }
        Some(going)
    }

    /// Chooses what of a segment stays, and what is worth handing over.
    fn choose(&self, mut open: Option<&mut Open>, carry: u64, going: &mut Going) {
        let number = going.segment.number();
        let listing = going.segment.listing();
        let blocks = listing.iter().filter(|(_, entry)| !entry.gone).filter_map(|(fingerprint, entry)| {
            let place = self.shared.index.get(fingerprint, entry.name)?;
            let bytes = record::span(u64::from(entry.length), self.access.grain());
            let (name, parent, hot) = (entry.name, entry.parent, place.hot);
            let pinned = self.shared.index.is_pinned(fingerprint, name);
            let candidate = Candidate { fingerprint, name, parent, hot, pinned, bytes };
            (self.is_in(&place, number) && place.offset == entry.offset).then_some((candidate, place))
        });
        going.blocks = blocks.collect();
        drop(listing);
        let candidates: Vec<Candidate> = going.blocks.iter().map(|(candidate, _)| *candidate).collect();
        // Several segments may go in one roll.
        let left = |open: &mut Open| carry.saturating_sub(open.end);
        let part = self.settings.segment_bytes / CARRIED;
        let budget = open.as_deref_mut().map_or(0, left).min(part);
        let mut most = budget;
        let (stay, runs) = loop {
            let stay = reclaim::carried(&candidates, most);
            let runs = going.runs(&stay);
            // What is copied together takes whole blocks of the device.
            let takes: u64 = runs.iter().map(|run| (run.end() - run.start()).next_multiple_of(Access::BLOCK)).sum();
            if takes <= budget {
                break (stay, runs);
            }
            most = (u128::from(most) * u128::from(budget) / u128::from(takes)) as u64;
        };
        going.over = reclaim::carried(&candidates, part.saturating_add(budget));
        going.over.retain(|index| stay.binary_search(index).is_err());
        let Some(open) = open else { return };
        let stays = runs.into_iter().map(|run| {
            let at = open.take(run.end() - run.start(), run.wanted.len());
            Move { run, head: open.head.clone(), at }
        });
        going.stays = stays.collect();
    }

    /// Copies what stays, hands over what somebody else wants, and forgets the rest.
    pub(super) fn give_up(&self, going: &Going) {
        // The rest first: what is offered meanwhile is stored anew, and not believed to rest.
        let stays: HashSet<usize> =
            going.stays.iter().flat_map(|stays| stays.run.wanted.iter().map(|wanted| wanted.index)).collect();
        let goes = going.blocks.iter().enumerate().filter(|(index, _)| !stays.contains(index));
        let goes = goes.map(|(_, (block, _))| (block.fingerprint, block.name));
        self.shared.index.remove(goes, |place| self.is_in(place, going.segment.number()));
        if let Err(error) = self.carry(going) {
            tracing::warn!(folder = %self.folder.display(), %error, "cannot copy hot blocks to a new segment");
        }
        self.forget(&going.segment);
    }

    fn forget(&self, segment: &Segment) {
        let (number, listing) = (segment.number(), std::mem::take(&mut *segment.listing()));
        let blocks = listing.iter().map(|(fingerprint, entry)| (fingerprint, entry.name));
        self.shared.index.remove(blocks, |place| self.is_in(place, number));
        if let Err(error) = segment::retire(&self.io, &self.folder, number) {
            tracing::warn!(folder = %self.folder.display(), segment = number, %error, "cannot delete a segment");
        }
        segment.resize(0);
    }

    fn carry(&self, going: &Going) -> io::Result<()> {
        let number = going.segment.number();
        let (mut unreadable, mut last) = (0, None);
        for Move { run, head, at } in &going.stays {
            // One bad place costs what lies in it.
            let sound = match self.sound(going, run) {
                Ok(sound) => sound,
                Err(error) => {
                    (unreadable, last) = (unreadable + run.wanted.len(), Some(error));
                    continue;
                }
            };
            let records: Vec<Record<'_>> = sound.iter().map(Record::Block).collect();
            let offsets = head.write(*at, &records, &self.shared.pool)?;
            for (block, offset) in sound.iter().zip(offsets) {
                let new = self.resting(block, head.segment(), offset);
                let still = |place: &Place| self.is_in(place, number);
                self.shared.index.relocate(new.fingerprint, new.name, still, new.place);
            }
            if self.is_withdrawn() {
                // Whoever withdrew did not find them in the head.
                let blocks = sound.iter().map(|block| (block.header.fingerprint, block.header.name));
                self.shared.index.remove(blocks, |place| self.is_in(place, head.segment().number()));
            }
        }
        if let Some(error) = last {
            tracing::warn!(
                folder = %self.folder.display(), segment = number, blocks = unreadable, %error,
                "cannot read blocks in use; they are deleted with their segment"
            );
        }
        if let Some(Spill { wants, to }) = self.shared.spill.get() {
            let wanted = |index: &&usize| wants(going.blocks[**index].0.fingerprint, going.blocks[**index].0.name);
            let over: Vec<usize> = going.over.iter().filter(wanted).copied().collect();
            for run in going.runs(&over) {
                // What does not fit waits for nobody.
                let sound = self.sound(going, &run).unwrap_or_default();
                for block in sound {
                    let _ = to.try_send(block);
                }
            }
        }
        Ok(())
    }

    /// The blocks of a run that are what they were.
    fn sound(&self, going: &Going, run: &Run) -> io::Result<Vec<Block>> {
        let records = run.wanted.iter().zip(self.read(going.segment.number(), run)?);
        let sound = records.filter_map(|(wanted, record)| {
            let candidate = going.blocks[wanted.index].0;
            let read = record::block(&record?).ok()?;
            read.check(candidate.name, candidate.fingerprint).ok()?;
            Some(read)
        });
        Ok(sound.collect())
    }
}

impl Going {
    /// Where some of the blocks lie.
    fn runs(&self, positions: &[usize]) -> Vec<Run> {
        let wanted = positions.iter().map(|&index| {
            let (candidate, place) = &self.blocks[index];
            Wanted { index, offset: u64::from(place.offset) * Access::UNIT, length: candidate.bytes }
        });
        coalesce::runs(wanted.collect(), 0, CARRY)
    }
}

/// A group's segments that are not given up, oldest first.
fn of(state: &State, group: u16) -> impl Iterator<Item = &Arc<Segment>> {
    state.segments.values().filter(move |segment| segment.group() == group && !segment.is_going())
}

/// Bytes that a group's segments take.
fn has(state: &State, group: u16) -> usize {
    of(state, group).map(|segment| segment.bytes() as usize).sum()
}
