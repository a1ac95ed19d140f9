//! Space reclamation: a rotation creates the next head segment and reclaims the oldest segments.
//!
//! ```text
//!   rotate ─▶ create a segment ─▶ under the lock: it becomes the head, victims are chosen,
//!                                     their blocks to carry over get space in the head
//!             writers go on ◀────────┘  └▶ carry over and spill blocks, delete the victims
//! ```
//!
//! One thread rotates at a time, and all reads and writes happen without the lock. Each quota group has segments of
//! its own, and so reclaims its own.

use super::Settings;
use super::direct::{self, Access};
use super::log::{Location, Log, OpenHead, Spill, State};
use super::reclaim::{self, Candidate};
use super::record::{self, Record};
use super::segment::{self, Head, Segment};
use crate::block::Block;
use crate::tier::coalesce::{self, BlockRange, ReadRun};
use crate::tier::{StoreError, victim_group};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// At most one part in so many of a segment is carried over, so that reclaiming frees space.
const CARRIED_DIVISOR: u64 = 4;
/// When others have filled the disk, the log retains one part in so many of its capacity.
const RETAINED_DIVISOR: u64 = 4;
/// It retains at least so many segments: the head and a sealed one ([`reclaimable_bytes`]).
const RETAINED_SEGMENTS: u64 = 2;
/// On a full disk a head may be smaller than configured, at least one part in so many.
const SMALL_HEAD_DIVISOR: u64 = 4;
/// One part in so many of the free space is left to the filesystem, which needs some for its own structures.
const METADATA_DIVISOR: u64 = 64;
/// The retained space may be exceeded by one part in so many of a segment: segments are not filled to their end, and
/// one victim has to suffice for one new segment.
const SLACK_DIVISOR: u64 = 8;
/// Maximum length in bytes of one read and one write of carried over blocks.
const CARRY_BYTES: u64 = 4 << 20;

/// A victim: no longer part of the log, but still readable.
pub(super) struct ReclaimingSegment {
    segment: Arc<Segment>,
    /// Blocks that the index locates in the segment.
    blocks: Vec<(Candidate, Location)>,
    /// Blocks to carry over, with their space in the head.
    carried_over: Vec<CarryOver>,
    /// Indices of blocks in use that are not carried over but worth spilling.
    to_spill: Vec<usize>,
}

/// Blocks that are copied together.
struct CarryOver {
    run: ReadRun,
    head: Arc<Head>,
    at: u64,
}

impl Log {
    /// Seals the head of a group, creates the next one, and frees space for the rotation after this one. Runs on one
    /// thread at a time, without the lock; other writers go on as soon as the new head exists.
    ///
    /// Blocks that are carried over get at most the first `carry` bytes of the new head. It has at least `least` bytes.
    pub(super) fn rotate(&self, group: u16, carry: u64, least: u64) -> Result<(), StoreError> {
        if self.in_cooldown() {
            return Err(StoreError::Busy);
        }
        let full = self.lock().heads.remove(&group);
        // This seals the segment, unless another thread still writes to it.
        drop(full);
        self.start_head(group, carry, least).map_err(|error| {
            self.start_cooldown(&error);
            self.check_folder_after(&error);
            StoreError::Io(error)
        })
    }

    fn start_head(&self, group: u16, carry: u64, least: u64) -> io::Result<()> {
        self.check_folder()?;
        let before = self.used_bytes();
        let (head, is_full) = self.create_segment(group, least)?;
        let number = head.segment().number();
        // A small head has no space to spare.
        let carry = if head.segment().bytes() < self.settings.segment_bytes { 0 } else { carry };
        // Checked before victims are chosen, because those must then be deleted.
        let short = self.missing_free_bytes()? > 0;
        let victims = {
            let mut state = self.lock();
            state.segments.retain(|_, segment| !segment.is_deleted());
            state.segments.insert(number, head.segment().clone());
            // While space is short, the head is closed for writing until it is certain that it can be kept.
            state.heads.insert(group, OpenHead { head: head.clone(), end: 0, records: 0, reserved: short });
            self.select_victims(&mut state, group, carry)
        };
        if !short {
            self.notify();
        }
        for victim in victims {
            self.reclaim(&victim);
        }
        if !short {
            self.set_disk_is_full(is_full);
            return Ok(());
        }
        let made = self.make_room(before, carry);
        let mut state = self.lock();
        match (made, state.heads.get_mut(&group)) {
            (Ok(()), Some(open)) => {
                open.reserved = false;
                drop(state);
                self.notify();
                self.set_disk_is_full(true);
                Ok(())
            }
            (made, _) => {
                // The carried over blocks are lost too.
                state.heads.remove(&group);
                drop(state);
                self.delete_segment(head.segment());
                segment::delete_spare(&self.io, &self.folder);
                made.and(Err(io::ErrorKind::NotConnected.into()))
            }
        }
    }

    /// Bytes that the log keeps when others have filled the disk.
    fn retained_bytes(&self) -> u64 {
        (self.capacity() / RETAINED_DIVISOR).max(RETAINED_SEGMENTS * self.settings.segment_bytes)
    }

    /// Reclaims segments while the filesystem has less than `min_free_bytes` free. The log retains a part of its
    /// capacity ([`Self::retained_bytes`]) and continues to write in that space; it does not grow.
    fn make_room(&self, before: u64, carry: u64) -> io::Result<()> {
        let kept = before.min(self.retained_bytes());
        loop {
            let over = self.used_bytes().saturating_sub(kept + self.settings.segment_bytes / SLACK_DIVISOR);
            let wanted = self.missing_free_bytes()?.min(over);
            if wanted == 0 {
                return Ok(());
            }
            let next = {
                let mut state = self.lock();
                // If the segments would not suffice, none is reclaimed.
                let suffices = reclaimable_bytes(&state) >= wanted;
                suffices.then(|| self.next_victim(&mut state, carry)).flatten()
            };
            let Some(victim) = next else {
                let why = "the disk is full, and removing the oldest segments would not free enough";
                return Err(io::Error::new(io::ErrorKind::StorageFull, why));
            };
            self.reclaim(&victim);
        }
    }

    /// Creates the next head. On a full disk the head may be smaller than a segment, but has at least `least` bytes. It
    /// takes the space of the spare, and what is free beyond `min_free_bytes`. If that is less than `least`, the oldest
    /// segments are reclaimed for it, without carrying blocks over; none is, if that would not suffice. The second
    /// value is whether the disk is full.
    fn create_segment(&self, group: u16, least: u64) -> io::Result<(Arc<Head>, bool)> {
        #[cfg(test)]
        self.shared.hooks.write(self.path)?;
        let whole = self.settings.segment_bytes;
        let least = least.max(whole / SMALL_HEAD_DIVISOR);
        let mut error = io::Error::from_raw_os_error(libc::ENOSPC);
        // Not attempted without the space: until it failed, the attempt would take all that is free, and fill the disk
        // for other programs.
        if self.free_bytes()?.saturating_add(self.spare_bytes()) >= whole {
            match self.create_head(group, whole) {
                Err(refused) if is_full(&refused) => error = refused,
                answer => return answer.map(|head| (head, false)),
            }
        }
        // A failed attempt has deleted the spare, and its space is free. A quota of the user is not part of the free
        // space; what it leaves is unknown.
        let has_quota = error.kind() == io::ErrorKind::QuotaExceeded;
        let mut free = if has_quota {
            0
        } else {
            let beyond = self.free_bytes()?.saturating_sub(self.settings.min_free_bytes);
            self.spare_bytes().saturating_add(usable(beyond))
        };
        if free >= least {
            if let Some(head) = self.create_small_head(group, free, least)? {
                return Ok((head, true));
            }
            // The filesystem does not grant what it reports.
            free = 0;
        }
        // Otherwise the first victim would not become the spare.
        segment::delete_spare(&self.io, &self.folder);
        let mut freed = 0;
        while freed + free < least {
            let Some(victim) = self.victim_for_head(least - freed - free) else { return Err(error) };
            freed += victim.segment.bytes();
            self.reclaim(&victim);
        }
        // The first victim is the spare now. A head that is not larger takes its space before others can.
        let bytes = if freed >= least { freed } else { freed + free };
        let mut head = self.create_small_head(group, bytes, least)?;
        if head.is_none() && !has_quota {
            head = self.create_small_head(group, usable(self.free_bytes()?).min(bytes), least)?;
        }
        if head.is_none() && freed > 0 {
            self.reclaimed_in_vain.store(true, Ordering::Relaxed);
        }
        head.map(|head| (head, true)).ok_or(error)
    }

    /// A head of about `bytes`; `None` when that is less than `least` or the disk has less.
    fn create_small_head(&self, group: u16, bytes: u64, least: u64) -> io::Result<Option<Arc<Head>>> {
        let bytes = bytes.min(self.settings.segment_bytes) / Access::BLOCK * Access::BLOCK;
        if bytes < least {
            return Ok(None);
        }
        match self.create_head(group, bytes) {
            Err(error) if is_full(&error) => Ok(None),
            answer => answer.map(Some),
        }
    }

    fn create_head(&self, group: u16, bytes: u64) -> io::Result<Arc<Head>> {
        #[cfg(test)]
        if let Err(error) = self.shared.hooks.reserve(bytes, self.used_bytes()) {
            segment::delete_spare(&self.io, &self.folder);
            return Err(error);
        }
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let keys = self.shared.keys.clone();
        let head = Head::create(&self.folder, (number, group), bytes, self.access, &self.io, keys, &self.used_bytes)?;
        self.reclaimed_in_vain.store(false, Ordering::Relaxed);
        Ok(Arc::new(head))
    }

    /// The next victim for a head on a full disk, if enough may be reclaimed to free `wanted` bytes.
    fn victim_for_head(&self, wanted: u64) -> Option<ReclaimingSegment> {
        let mut state = self.lock();
        let suffices = reclaimable_bytes(&state) >= wanted;
        // Others may take the space before the log does; that must not go on until nothing is left.
        let may = !self.reclaimed_in_vain.load(Ordering::Relaxed) || self.used_bytes() > self.retained_bytes();
        (suffices && may).then(|| self.next_victim(&mut state, 0)).flatten()
    }

    /// Bytes that the filesystem has free for the log.
    pub(super) fn free_bytes(&self) -> io::Result<u64> {
        #[cfg(test)]
        if let Some(free) = self.shared.hooks.free(self.used_bytes()) {
            return Ok(free);
        }
        self.io.query(|| direct::free_bytes(&self.folder))
    }

    /// Bytes of the spare, which a new segment reuses. They do not count as free.
    fn spare_bytes(&self) -> u64 {
        // The free bytes that a test sets include the spare.
        #[cfg(test)]
        if self.shared.hooks.free(0).is_some() {
            return 0;
        }
        segment::spare_bytes(&self.io, &self.folder)
    }

    /// Bytes missing to `min_free_bytes` of free space, after the spare was deleted.
    fn missing_free_bytes(&self) -> io::Result<u64> {
        let missing = || -> io::Result<u64> { Ok(self.settings.min_free_bytes.saturating_sub(self.free_bytes()?)) };
        match missing()? {
            0 => Ok(0),
            some if !segment::delete_spare(&self.io, &self.folder) => Ok(some),
            _ => missing(),
        }
    }

    /// Chooses victims until the group is within its limit and the next segment fits into the capacity.
    fn select_victims(&self, state: &mut State, group: u16, carry: u64) -> Vec<ReclaimingSegment> {
        let most = self.quotas.bounds[usize::from(group)].maximum;
        let mut victims = Vec::new();
        while bytes_of(state, group) > most {
            let Some(next) = self.oldest_victim(state, group, carry) else { break };
            victims.push(next);
        }
        victims.extend(self.excess_victims(state, carry));
        victims
    }

    /// Chooses victims until the next segment fits into the capacity.
    fn excess_victims(&self, state: &mut State, carry: u64) -> Vec<ReclaimingSegment> {
        let Settings { capacity_bytes, segment_bytes, .. } = self.settings;
        let taken = |state: &State| -> u64 {
            let remaining = state.segments.values().filter(|segment| !segment.is_reclaiming());
            remaining.map(|segment| segment.bytes()).sum()
        };
        let mut victims = Vec::new();
        while taken(state) + segment_bytes > capacity_bytes {
            let Some(next) = self.next_victim(state, carry) else { break };
            victims.push(next);
        }
        victims
    }

    /// Reclaims the oldest recovered segments of a log whose capacity was larger before, and its larger spare. Nothing
    /// is carried over, because no head exists yet.
    pub(super) fn shrink_to_capacity(&self) {
        let victims = self.excess_victims(&mut self.lock(), 0);
        for victim in &victims {
            self.reclaim(victim);
        }
        if !victims.is_empty() {
            tracing::info!(
                folder = %self.folder.display(), segments = victims.len(), capacity_bytes = self.capacity(),
                used_bytes = self.used_bytes(), "removed the oldest segments, because the capacity of G3 is smaller now"
            );
        }
        segment::delete_large_spare(&self.io, &self.folder, self.settings.segment_bytes);
    }

    /// The oldest sealed segment of the group that is furthest over its guarantee.
    pub(super) fn next_victim(&self, state: &mut State, carry: u64) -> Option<ReclaimingSegment> {
        let groups = (0..).zip(&self.quotas.bounds).map(|(group, bounds)| {
            let gives = segments_of(state, group).any(|segment| segment.is_sealed());
            (*bounds, bytes_of(state, group), gives)
        });
        let group = victim_group(groups)?;
        self.oldest_victim(state, group as u16, carry)
    }

    /// The oldest sealed segment of a group. The blocks to carry over get space in the head at once, so that a later
    /// tombstone is also later in the log.
    fn oldest_victim(&self, state: &mut State, group: u16, carry: u64) -> Option<ReclaimingSegment> {
        let segment = segments_of(state, group).find(|segment| segment.is_sealed())?.clone();
        segment.start_reclaiming();
        let mut victim =
            ReclaimingSegment { segment, blocks: Vec::new(), carried_over: Vec::new(), to_spill: Vec::new() };
        if carry > 0 {
            self.choose_carried_over(state.heads.get_mut(&group), carry, &mut victim);
        }
        Some(victim)
    }

    /// Chooses the blocks of a victim to carry over, and those worth spilling.
    fn choose_carried_over(&self, mut open: Option<&mut OpenHead>, carry: u64, victim: &mut ReclaimingSegment) {
        let number = victim.segment.number();
        let record_list = victim.segment.record_list();
        let blocks = record_list.iter().filter(|(_, entry)| !entry.is_tombstone).filter_map(|(fingerprint, entry)| {
            let location = self.shared.index.get(fingerprint, entry.hash)?;
            let bytes = record::span(u64::from(entry.length), self.access.alignment());
            let (hash, parent, hot) = (entry.hash, entry.parent, location.hot);
            let pinned = self.shared.index.is_pinned(fingerprint, hash);
            let candidate = Candidate { fingerprint, hash, parent, hot, pinned, bytes };
            (self.is_in_segment(&location, number) && location.offset == entry.offset).then_some((candidate, location))
        });
        victim.blocks = blocks.collect();
        drop(record_list);
        let candidates: Vec<Candidate> = victim.blocks.iter().map(|(candidate, _)| *candidate).collect();
        // One rotation may reclaim several segments.
        let left = |open: &mut OpenHead| carry.saturating_sub(open.end);
        let part = self.settings.segment_bytes / CARRIED_DIVISOR;
        let budget = open.as_deref_mut().map_or(0, left).min(part);
        let mut most = budget;
        let (carried, runs) = loop {
            let carried = reclaim::carried(&candidates, most);
            let runs = victim.runs(&carried);
            // Each copied run takes whole device blocks.
            let takes: u64 = runs.iter().map(|run| (run.end() - run.start()).next_multiple_of(Access::BLOCK)).sum();
            if takes <= budget {
                break (carried, runs);
            }
            most = (u128::from(most) * u128::from(budget) / u128::from(takes)) as u64;
        };
        victim.to_spill = reclaim::carried(&candidates, part.saturating_add(budget));
        victim.to_spill.retain(|index| carried.binary_search(index).is_err());
        let Some(open) = open else { return };
        let carried_over = runs.into_iter().map(|run| {
            let at = open.take(run.end() - run.start(), run.blocks.len());
            CarryOver { run, head: open.head.clone(), at }
        });
        victim.carried_over = carried_over.collect();
    }

    /// Carries over and spills the chosen blocks, and deletes the segment.
    pub(super) fn reclaim(&self, victim: &ReclaimingSegment) {
        // The other blocks leave the index first, so that a store of one of them is not answered as already stored.
        let carried_over: HashSet<usize> = victim
            .carried_over
            .iter()
            .flat_map(|carried_over| carried_over.run.blocks.iter().map(|wanted| wanted.index))
            .collect();
        let goes = victim.blocks.iter().enumerate().filter(|(index, _)| !carried_over.contains(index));
        let goes = goes.map(|(_, (block, _))| (block.fingerprint, block.hash));
        self.shared.index.remove(goes, |location| self.is_in_segment(location, victim.segment.number()));
        if let Err(error) = self.carry_over(victim) {
            tracing::warn!(folder = %self.folder.display(), %error, "cannot copy hot blocks to a new segment");
        }
        self.delete_segment(&victim.segment);
    }

    fn delete_segment(&self, segment: &Segment) {
        let (number, record_list) = (segment.number(), std::mem::take(&mut *segment.record_list()));
        let blocks = record_list.iter().map(|(fingerprint, entry)| (fingerprint, entry.hash));
        self.shared.index.remove(blocks, |location| self.is_in_segment(location, number));
        if let Err(error) = segment::delete_keeping_spare(&self.io, &self.folder, number) {
            tracing::warn!(folder = %self.folder.display(), segment = number, %error, "cannot delete a segment");
        }
        segment.resize(0);
    }

    fn carry_over(&self, victim: &ReclaimingSegment) -> io::Result<()> {
        let number = victim.segment.number();
        let (mut unreadable, mut last) = (0, None);
        for CarryOver { run, head, at } in &victim.carried_over {
            // An unreadable run loses its own blocks only.
            let valid = match self.read_valid(victim, run) {
                Ok(valid) => valid,
                Err(error) => {
                    (unreadable, last) = (unreadable + run.blocks.len(), Some(error));
                    continue;
                }
            };
            let records: Vec<Record<'_>> = valid.iter().map(Record::Block).collect();
            let offsets = head.write(*at, &records, &self.shared.pool)?;
            for (block, offset) in valid.iter().zip(offsets) {
                let new = self.index_entry(block, head.segment(), offset);
                let still = |location: &Location| self.is_in_segment(location, number);
                self.shared.index.relocate(new.fingerprint, new.hash, still, new.location);
            }
            if self.is_withdrawn() {
                // `withdraw` did not find these blocks in the head.
                let blocks = valid.iter().map(|block| (block.header.fingerprint, block.header.hash));
                self.shared.index.remove(blocks, |location| self.is_in_segment(location, head.segment().number()));
            }
        }
        if let Some(error) = last {
            tracing::warn!(
                folder = %self.folder.display(), segment = number, blocks = unreadable, %error,
                "cannot read blocks in use; they are deleted with their segment"
            );
        }
        if let Some(Spill { wants, to }) = self.shared.spill.get() {
            let wanted = |index: &&usize| wants(victim.blocks[**index].0.fingerprint, victim.blocks[**index].0.hash);
            let to_spill: Vec<usize> = victim.to_spill.iter().filter(wanted).copied().collect();
            for run in victim.runs(&to_spill) {
                // Blocks that do not fit into the channel are dropped.
                let valid = self.read_valid(victim, &run).unwrap_or_default();
                for block in valid {
                    let _ = to.try_send(block);
                }
            }
        }
        Ok(())
    }

    /// The blocks of a run that pass verification.
    fn read_valid(&self, victim: &ReclaimingSegment, run: &ReadRun) -> io::Result<Vec<Block>> {
        let records = run.blocks.iter().zip(self.read(victim.segment.number(), run)?);
        let valid = records.filter_map(|(wanted, record)| {
            let candidate = victim.blocks[wanted.index].0;
            let read = record::block(&record?).ok()?;
            read.check(candidate.hash, candidate.fingerprint).ok()?;
            Some(read)
        });
        Ok(valid.collect())
    }
}

impl ReclaimingSegment {
    /// The runs of records of some blocks.
    fn runs(&self, positions: &[usize]) -> Vec<ReadRun> {
        let wanted = positions.iter().map(|&index| {
            let (candidate, location) = &self.blocks[index];
            BlockRange { index, offset: u64::from(location.offset) * Access::UNIT, length: candidate.bytes }
        });
        coalesce::coalesce(wanted.collect(), 0, CARRY_BYTES)
    }
}

/// The segments of a group that are not being reclaimed, oldest first.
fn segments_of(state: &State, group: u16) -> impl Iterator<Item = &Arc<Segment>> {
    state.segments.values().filter(move |segment| segment.group() == group && !segment.is_reclaiming())
}

/// Bytes of a group's segments.
fn bytes_of(state: &State, group: u16) -> usize {
    segments_of(state, group).map(|segment| segment.bytes() as usize).sum()
}

/// Bytes that the log may give up on a full disk: all sealed segments but the newest, so that a write never costs all
/// blocks.
fn reclaimable_bytes(state: &State) -> u64 {
    let sealed = state.segments.values().filter(|segment| segment.is_sealed() && !segment.is_reclaiming());
    sealed.rev().skip(1).map(|segment| segment.bytes()).sum()
}

/// Whether the disk, or the quota of the user on it, has no space for a file.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// The part of the free bytes that one file can take.
fn usable(free: u64) -> u64 {
    free - free / METADATA_DIVISOR
}
