//! Space reclamation: a rotation creates the next head segment and reclaims the oldest segments.
//!
//! ```text
//!   rotate ─▶ create a segment ─▶ under the lock: it becomes the head, victims are chosen,
//!                                     their blocks to carry over get space in the head
//!             writers go on ◀────────┘  └▶ carry over and spill blocks, delete the victims
//! ```
//!
//! **On a full disk** the order is the opposite: victims are reclaimed before the head is created, so that the log
//! never takes free space that is to stay free ([`Log::space_limit`]). Their blocks to carry over wait in memory.
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

/// At most a quarter of a segment is carried over, so that reclaiming frees space.
const CARRIED_DIVISOR: u64 = 4;
/// When others have filled the disk, the log retains a quarter of its capacity.
const RETAINED_DIVISOR: u64 = 4;
/// Minimum number of segments that it retains: the head and a sealed one ([`reclaimable_bytes`]).
const RETAINED_SEGMENTS: u64 = 2;
/// On a full disk a head may be smaller than configured, down to a quarter.
const SMALL_HEAD_DIVISOR: u64 = 4;
/// The smallest head of a log that is limited to less than [`Settings::MIN_SEGMENTS`] whole segments, unless a block
/// needs more. Its heads are smaller, so that it still has about as many: a segment in use by a writer cannot be
/// reclaimed, and while one of three writers rotates, the others use two.
const SMALLEST_HEAD_BYTES: u64 = Settings::MIN_SEGMENT_BYTES / SMALL_HEAD_DIVISOR;
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
    /// The head and the offset in it; `None` when the blocks wait in memory for the next head.
    to: Option<(Arc<Head>, u64)>,
}

/// The blocks of some runs, in memory.
type KeptBlocks = Vec<Vec<Block>>;

/// Sizes that a new head may have, in bytes.
#[derive(Clone, Copy)]
struct HeadSizes {
    /// With less than this, old segments are reclaimed first.
    least: u64,
    most: u64,
}

impl HeadSizes {
    /// The sizes in a log whose segments may take `limit` together, for a block that needs `block_bytes`.
    fn within(limit: u64, whole: u64, block_bytes: u64) -> Self {
        let part = (limit / Settings::MIN_SEGMENTS).max(SMALLEST_HEAD_BYTES);
        // Half of a part, so that the rest of the limit, after three whole parts, is used too.
        let smallest = (part / 2).clamp(SMALLEST_HEAD_BYTES, whole / SMALL_HEAD_DIVISOR);
        let least = block_bytes.max(smallest).next_multiple_of(Access::BLOCK);
        Self { least, most: part.max(least).min(whole) }
    }
}

/// What segments that were reclaimed before a head exists have given to it.
#[derive(Default)]
struct Freed {
    bytes: u64,
    kept: KeptBlocks,
}

/// A head, before it is part of the log.
struct NewHead {
    head: Arc<Head>,
    /// Blocks to carry over to it.
    kept: KeptBlocks,
    /// Whether a full disk limits the log.
    is_full: bool,
}

impl Log {
    /// Seals the head of a group, creates the next one, and frees space for the rotation after this one. Runs on one
    /// thread at a time, without the lock; other writers go on as soon as the new head exists.
    ///
    /// Blocks that are carried over get at most the first `carry_bytes` of the new head. It has at least
    /// `min_head_bytes`.
    pub(super) fn rotate(&self, group: u16, carry_bytes: u64, min_head_bytes: u64) -> Result<(), StoreError> {
        if self.in_cooldown() {
            return Err(StoreError::Busy);
        }
        // Sealing the head truncates it, and the next one may have that space again.
        let used_before = self.used_bytes() + self.spare_bytes();
        let full = self.lock().heads.remove(&group);
        // This seals the segment, unless another thread still writes to it.
        drop(full);
        self.start_head(group, carry_bytes, min_head_bytes, used_before).map_err(|error| {
            self.start_cooldown(&error);
            self.check_folder_after(&error);
            StoreError::Io(error)
        })
    }

    fn start_head(&self, group: u16, carry_bytes: u64, min_head_bytes: u64, used_before: u64) -> io::Result<()> {
        self.check_folder()?;
        let NewHead { head, kept, is_full } = self.create_segment(group, carry_bytes, min_head_bytes, used_before)?;
        let (number, bytes) = (head.segment().number(), head.segment().bytes());
        // A small head has no space to spare.
        let carry_bytes = if bytes < self.settings.segment_bytes { 0 } else { carry_bytes };
        let (kept, victims) = {
            let mut state = self.lock();
            state.segments.retain(|_, segment| !segment.is_deleted());
            state.segments.insert(number, head.segment().clone());
            let mut open = OpenHead { head: head.clone(), end: 0, records: 0 };
            let max_carried = carry_limit(bytes, min_head_bytes);
            let place = |blocks: Vec<Block>| {
                let bytes: u64 = blocks.iter().map(|block| Record::Block(block).span(self.access.alignment())).sum();
                let fits = open.end + bytes.next_multiple_of(Access::BLOCK) <= max_carried;
                fits.then(|| (open.take(bytes, blocks.len()), blocks))
            };
            let kept: Vec<(u64, Vec<Block>)> = kept.into_iter().filter_map(place).collect();
            state.heads.insert(group, open);
            (kept, self.select_victims(&mut state, group, carry_bytes))
        };
        self.notify();
        if let Err(error) = self.write_kept(&head, &kept) {
            tracing::warn!(folder = %self.folder.display(), %error, "cannot copy hot blocks to a new segment");
        }
        for victim in victims {
            self.reclaim(&victim);
        }
        self.set_disk_is_full(is_full);
        Ok(())
    }

    /// Bytes that the log keeps when others have filled the disk.
    fn retained_bytes(&self) -> u64 {
        (self.capacity() / RETAINED_DIVISOR).max(RETAINED_SEGMENTS * self.settings.segment_bytes)
    }

    /// Bytes that all segments, including the next head, may take: what the log takes now and what is free beyond
    /// `min_free_bytes`, or less what is missing to it. When others have filled the disk, the log retains a part of its
    /// capacity ([`Self::retained_bytes`]), but does not grow: `used_before` is what it took before its head was
    /// sealed.
    fn space_limit(&self, used: u64, used_before: u64) -> io::Result<u64> {
        let (free, min_free) = (self.free_bytes()?, self.settings.min_free_bytes);
        let taken = used + self.spare_bytes();
        let beyond = direct::usable(free.saturating_sub(min_free));
        let missing = min_free.saturating_sub(free);
        Ok(taken.saturating_add(beyond).saturating_sub(missing).max(used_before.min(self.retained_bytes())))
    }

    /// Creates the next head within [`Self::space_limit`]. It takes what is left of the limit, up to a whole segment,
    /// or up to a quarter of a limit below four whole segments. Only if what is left is less than `min_head_bytes` and
    /// the smallest head, the oldest segments are reclaimed first; none is, if that would not suffice.
    fn create_segment(
        &self,
        group: u16,
        carry_bytes: u64,
        min_head_bytes: u64,
        used_before: u64,
    ) -> io::Result<NewHead> {
        #[cfg(test)]
        self.shared.hooks.write(self.path)?;
        let whole = self.settings.segment_bytes;
        let used = self.used_bytes();
        let limit = self.space_limit(used, used_before)?;
        let sizes = HeadSizes::within(limit, whole, min_head_bytes);
        let wanted = (used + sizes.least).saturating_sub(limit);
        let mut freed = Freed::default();
        if wanted > 0 {
            let Some(victims) = self.reclaim_for_head(group, wanted, carry_bytes, sizes) else {
                // It begins like the error of the filesystem, which is known to operators.
                let why = "No space left on device: the disk is full, and removing the oldest segments would not free \
                           enough";
                return Err(io::Error::new(io::ErrorKind::StorageFull, why));
            };
            freed = victims;
        }
        let new_head = |head: Arc<Head>, kept| {
            let is_full = wanted > 0 || head.segment().bytes() < whole;
            NewHead { head, kept, is_full }
        };
        let left = limit.saturating_add(freed.bytes).saturating_sub(used);
        let refused = match self.create_head(group, left.min(sizes.most)) {
            Err(error) if is_full(&error) => error,
            answer => return answer.map(|head| new_head(head, freed.kept)),
        };
        // Others have taken the space at the same moment, or the filesystem does not grant what it reports, or a quota
        // of the user does not, which is not part of the free space. Only the space of victims is certain.
        if freed.bytes < sizes.least {
            let Some(more) = self.reclaim_for_head(group, sizes.least - freed.bytes, carry_bytes, sizes) else {
                self.reclaim_gave_no_space.fetch_or(freed.bytes > 0, Ordering::Relaxed);
                return Err(refused);
            };
            freed.bytes += more.bytes;
            freed.kept.extend(more.kept);
        }
        let mut answer = self.create_head(group, freed.bytes.min(sizes.most));
        if answer.as_ref().is_err_and(is_full) && refused.kind() != io::ErrorKind::QuotaExceeded {
            let granted = direct::usable(self.free_bytes()?).min(freed.bytes).min(sizes.most);
            if granted >= sizes.least {
                answer = self.create_head(group, granted);
            }
        }
        match answer {
            Err(error) if is_full(&error) => {
                self.reclaim_gave_no_space.store(true, Ordering::Relaxed);
                Err(refused)
            }
            answer => answer.map(|head| NewHead { is_full: true, ..new_head(head, freed.kept) }),
        }
    }

    /// Creates a head of about `bytes`, at most a whole segment.
    fn create_head(&self, group: u16, bytes: u64) -> io::Result<Arc<Head>> {
        let bytes = bytes.min(self.settings.segment_bytes) / Access::BLOCK * Access::BLOCK;
        #[cfg(test)]
        if let Err(error) = self.shared.hooks.reserve(bytes, self.used_bytes()) {
            segment::delete_spare(&self.io, &self.folder);
            return Err(error);
        }
        let number = self.shared.next.fetch_add(1, Ordering::Relaxed);
        let keys = self.shared.keys.clone();
        let head = Head::create(&self.folder, (number, group), bytes, self.access, &self.io, keys, &self.used_bytes)?;
        self.reclaim_gave_no_space.store(false, Ordering::Relaxed);
        Ok(Arc::new(head))
    }

    /// Reclaims the oldest segments until they have given `wanted` bytes, which are missing to the smallest head.
    /// `None`, and no block is deleted, when the segments that may be reclaimed give less.
    fn reclaim_for_head(&self, group: u16, wanted: u64, carry_bytes: u64, sizes: HeadSizes) -> Option<Freed> {
        let (victims, bytes) = {
            let mut state = self.lock();
            // Others may take the space before the log does; that must not go on until nothing is left.
            let may = !self.reclaim_gave_no_space.load(Ordering::Relaxed) || self.used_bytes() > self.retained_bytes();
            if !may || reclaimable_bytes(&state, wanted, sizes.least) < wanted {
                return None;
            }
            let (mut victims, mut bytes) = (Vec::new(), 0);
            while bytes < wanted {
                let Some(victim) = self.next_victim(&mut state, 0) else { break };
                bytes += victim.segment.bytes();
                victims.push(victim);
            }
            let head_bytes = (sizes.least + bytes).saturating_sub(wanted).min(sizes.most);
            let mut carry_left = carry_bytes.min(carry_limit(head_bytes, sizes.least));
            for victim in &mut victims {
                let of = victim.segment.group();
                if of == group {
                    self.choose_carried_over(None, carry_left, victim);
                    carry_left = carry_left.saturating_sub(victim.carried_bytes());
                } else {
                    self.choose_carried_over_to_head(&mut state, carry_bytes, victim);
                }
            }
            (victims, bytes)
        };
        // Otherwise the first victim would not become the spare, whose space others cannot take.
        segment::delete_spare(&self.io, &self.folder);
        let kept = victims.iter().flat_map(|victim| self.reclaim(victim)).collect();
        Some(Freed { bytes, kept })
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

    /// Chooses victims until the group is within its limit and the next segment fits into the capacity.
    fn select_victims(&self, state: &mut State, group: u16, carry_bytes: u64) -> Vec<ReclaimingSegment> {
        let max_bytes = self.quotas.bounds[usize::from(group)].maximum;
        let mut victims = Vec::new();
        while bytes_of(state, group) > max_bytes {
            let Some(next) = self.oldest_victim(state, group, carry_bytes) else { break };
            victims.push(next);
        }
        victims.extend(self.excess_victims(state, carry_bytes));
        victims
    }

    /// Chooses victims until the next segment fits into the capacity.
    fn excess_victims(&self, state: &mut State, carry_bytes: u64) -> Vec<ReclaimingSegment> {
        let Settings { capacity_bytes, segment_bytes, .. } = self.settings;
        let taken = |state: &State| -> u64 {
            let remaining = state.segments.values().filter(|segment| !segment.is_reclaiming());
            remaining.map(|segment| segment.bytes()).sum()
        };
        let mut victims = Vec::new();
        while taken(state) + segment_bytes > capacity_bytes {
            let Some(next) = self.next_victim(state, carry_bytes) else { break };
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
    pub(super) fn next_victim(&self, state: &mut State, carry_bytes: u64) -> Option<ReclaimingSegment> {
        let groups = (0..).zip(&self.quotas.bounds).map(|(group, bounds)| {
            let gives = segments_of(state, group).any(|segment| segment.is_sealed());
            (*bounds, bytes_of(state, group), gives)
        });
        let group = victim_group(groups)?;
        self.oldest_victim(state, group as u16, carry_bytes)
    }

    /// The oldest sealed segment of a group. The blocks to carry over get space in the head at once, so that a later
    /// tombstone is also later in the log.
    fn oldest_victim(&self, state: &mut State, group: u16, carry_bytes: u64) -> Option<ReclaimingSegment> {
        let segment = segments_of(state, group).find(|segment| segment.is_sealed())?.clone();
        segment.start_reclaiming();
        let mut victim =
            ReclaimingSegment { segment, blocks: Vec::new(), carried_over: Vec::new(), to_spill: Vec::new() };
        if carry_bytes > 0 {
            self.choose_carried_over_to_head(state, carry_bytes, &mut victim);
        }
        Some(victim)
    }

    /// Chooses the blocks of a victim to carry over to the open head of its group, if there is one, and those worth
    /// spilling.
    fn choose_carried_over_to_head(&self, state: &mut State, carry_bytes: u64, victim: &mut ReclaimingSegment) {
        let open = state.heads.get_mut(&victim.segment.group());
        // One rotation may reclaim several segments.
        let left = open.as_ref().map_or(0, |open| carry_bytes.saturating_sub(open.end));
        self.choose_carried_over(open, left, victim);
    }

    /// Chooses the blocks of a victim to carry over, at most `left` bytes, and those worth spilling. Without an open
    /// head the former wait in memory for the next one.
    fn choose_carried_over(&self, mut open: Option<&mut OpenHead>, left: u64, victim: &mut ReclaimingSegment) {
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
        let part = self.settings.segment_bytes / CARRIED_DIVISOR;
        let budget = left.min(part);
        let mut max_carried = budget;
        let (carried, runs) = loop {
            let carried = reclaim::carried(&candidates, max_carried);
            let runs = victim.runs(&carried);
            // Each copied run takes whole device blocks.
            let takes: u64 = runs.iter().map(whole_blocks).sum();
            if takes <= budget {
                break (carried, runs);
            }
            max_carried = (u128::from(max_carried) * u128::from(budget) / u128::from(takes)) as u64;
        };
        victim.to_spill = reclaim::carried(&candidates, part.saturating_add(budget));
        victim.to_spill.retain(|index| carried.binary_search(index).is_err());
        let carried_over = runs.into_iter().map(|run| {
            let (bytes, records) = (run.end() - run.start(), run.blocks.len());
            let to = open.as_deref_mut().map(|open| (open.head.clone(), open.take(bytes, records)));
            CarryOver { run, to }
        });
        victim.carried_over = carried_over.collect();
    }

    /// Carries over and spills the chosen blocks, and deletes the segment. Returns the blocks that wait for the next
    /// head. They are misses until they are in it.
    pub(super) fn reclaim(&self, victim: &ReclaimingSegment) -> KeptBlocks {
        // The other blocks leave the index first, so that a store of one of them is not answered as already stored.
        let carried_over: HashSet<usize> = victim
            .carried_over
            .iter()
            .flat_map(|carried_over| carried_over.run.blocks.iter().map(|wanted| wanted.index))
            .collect();
        let removed = victim.blocks.iter().enumerate().filter(|(index, _)| !carried_over.contains(index));
        let removed = removed.map(|(_, (block, _))| (block.fingerprint, block.hash));
        self.shared.index.remove(removed, |location| self.is_in_segment(location, victim.segment.number()));
        let kept = self.carry_over(victim).unwrap_or_else(|error| {
            tracing::warn!(folder = %self.folder.display(), %error, "cannot copy hot blocks to a new segment");
            Vec::new()
        });
        self.delete_segment(&victim.segment);
        kept
    }

    /// Writes blocks to the places in the head that were taken for them.
    fn write_kept(&self, head: &Head, kept: &[(u64, Vec<Block>)]) -> io::Result<()> {
        for (at, blocks) in kept {
            let records: Vec<Record<'_>> = blocks.iter().map(Record::Block).collect();
            let offsets = head.write(*at, &records, &self.shared.pool)?;
            let entries = blocks.iter().zip(offsets);
            self.index_blocks(entries.map(|(block, offset)| self.index_entry(block, head.segment(), offset)));
            self.remove_if_withdrawn(blocks, head);
        }
        Ok(())
    }

    /// Removes blocks that were written to the head from the index, if `withdraw` did not find them there.
    fn remove_if_withdrawn(&self, written: &[Block], head: &Head) {
        if self.is_withdrawn() {
            let blocks = written.iter().map(|block| (block.header.fingerprint, block.header.hash));
            self.shared.index.remove(blocks, |location| self.is_in_segment(location, head.segment().number()));
        }
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

    fn carry_over(&self, victim: &ReclaimingSegment) -> io::Result<KeptBlocks> {
        let number = victim.segment.number();
        let (mut unreadable, mut last, mut kept) = (0, None, Vec::new());
        for CarryOver { run, to } in &victim.carried_over {
            // An unreadable run loses its own blocks only.
            let valid = match self.read_valid(victim, run) {
                Ok(valid) => valid,
                Err(error) => {
                    (unreadable, last) = (unreadable + run.blocks.len(), Some(error));
                    continue;
                }
            };
            let Some((head, at)) = to else {
                if !valid.is_empty() {
                    kept.push(valid);
                }
                continue;
            };
            let records: Vec<Record<'_>> = valid.iter().map(Record::Block).collect();
            let offsets = head.write(*at, &records, &self.shared.pool)?;
            for (block, offset) in valid.iter().zip(offsets) {
                let new = self.index_entry(block, head.segment(), offset);
                let is_in_victim = |location: &Location| self.is_in_segment(location, number);
                self.shared.index.relocate(new.fingerprint, new.hash, is_in_victim, new.location);
            }
            self.remove_if_withdrawn(&valid, head);
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
        Ok(kept)
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
    /// Bytes that the blocks to carry over take in a head.
    fn carried_bytes(&self) -> u64 {
        self.carried_over.iter().map(|carried_over| whole_blocks(&carried_over.run)).sum()
    }

    /// The runs of records of some blocks.
    fn runs(&self, positions: &[usize]) -> Vec<ReadRun> {
        let wanted = positions.iter().map(|&index| {
            let (candidate, location) = &self.blocks[index];
            BlockRange { index, offset: u64::from(location.offset) * Access::UNIT, length: candidate.bytes }
        });
        coalesce::coalesce(wanted.collect(), 0, CARRY_BYTES)
    }
}

/// Bytes that a run takes in a head.
fn whole_blocks(run: &ReadRun) -> u64 {
    (run.end() - run.start()).next_multiple_of(Access::BLOCK)
}

/// Bytes of a head that blocks from memory may take, so that `reserved_bytes` are left. A footer of many small records
/// may take an eighth.
fn carry_limit(head_bytes: u64, reserved_bytes: u64) -> u64 {
    head_bytes.saturating_sub(reserved_bytes) / 8 * 7
}

/// The segments of a group that are not being reclaimed, oldest first.
fn segments_of(state: &State, group: u16) -> impl Iterator<Item = &Arc<Segment>> {
    state.segments.values().filter(move |segment| segment.group() == group && !segment.is_reclaiming())
}

/// Bytes of a group's segments.
fn bytes_of(state: &State, group: u16) -> usize {
    segments_of(state, group).map(|segment| segment.bytes() as usize).sum()
}

/// Bytes that the log may give up on a full disk: all sealed segments but the newest, so that a write does not cost all
/// blocks. If these give less than `wanted`, the newest may be given up too: while another thread still writes to a
/// full head, because its blocks are kept; or if two of the `smallest` heads fit into its space, because a log that has
/// filled the disk with one segment could never write again.
fn reclaimable_bytes(state: &State, wanted: u64, smallest: u64) -> u64 {
    let segments = || state.segments.values().filter(|segment| !segment.is_reclaiming());
    let is_open = |number: u32| state.heads.values().any(|open| open.head.segment().number() == number);
    let is_written = segments().any(|segment| !segment.is_sealed() && !is_open(segment.number()));
    let sealed = segments().filter(|segment| segment.is_sealed() && !segment.is_deleted());
    let sealed: Vec<u64> = sealed.map(|segment| segment.bytes()).collect();
    let Some((newest, older)) = sealed.split_last() else { return 0 };
    let older: u64 = older.iter().sum();
    let may_give_all = older < wanted && (is_written || *newest >= 2 * smallest);
    if may_give_all { older + newest } else { older }
}

/// Whether the disk, or the quota of the user on it, has no space for a file.
fn is_full(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
