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
//! its own, and so reclaims its own. Not here: which blocks are carried over, and how (`victim`).

use super::Settings;
use super::direct::{self, Access};
use super::log::{Log, OpenHead, State};
use super::record::Record;
use super::segment::{self, Head, Segment};
use super::victim::{KeptBlocks, ReclaimingSegment};
use crate::block::Block;
use crate::tier::{StoreError, victim_group};
use std::io;
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
        let mut victim = ReclaimingSegment::new(segment);
        if carry_bytes > 0 {
            self.choose_carried_over_to_head(state, carry_bytes, &mut victim);
        }
        Some(victim)
    }
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
