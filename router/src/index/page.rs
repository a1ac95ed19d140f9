//! A page: 64 block hashes and their holders.
//!
//! Hashes are in the order in which they were announced. A block hash commits to all blocks before it, so a lookup
//! compares a run by its last hash. The head repeats the last hash of the page. It also has the position of the
//! successor of the last block, and of the successor of one block where the chain forks. A lookup of a long prompt
//! therefore reads one or two cache lines per page and no table. Successor positions are hints that were right when
//! written; the reader compares the hash that it finds there.
//!
//! A position is used once in the lifetime of a page, so a hash never changes under a reader. Readers use the page's
//! [`SeqLock`] and do not wait; writers hold its [`SpinLock`].

use super::bits::ones;
use super::holder::{HolderId, HolderLevel};
use super::holder_set::{HolderSet, InternCache};
use super::holders::Holders;
use super::position::Position;
use super::run::Run;
use super::seqlock::SeqLock;
use super::spin_lock::{SpinGuard, SpinLock};
use super::sync::{AtomicU8, AtomicU32, AtomicU64, Ordering, prefetch};
use arc_swap::{ArcSwapOption, Guard};
use kvbm::SequenceHash;
use std::sync::Arc;

/// Positions per page: the number of bits of a mask.
pub(super) const PAGE_BLOCKS: u32 = 64;

/// A page within its chunk.
#[derive(Clone, Copy)]
pub(super) struct Page<'a> {
    head: &'a Head,
    hashes: &'a Hashes,
}

/// Metadata of a page: one cache line, next to the heads of neighbouring pages.
#[repr(align(64))]
pub(super) struct Head {
    seqlock: SeqLock,
    /// The only holder and its mask; or [`HolderLevel::MANY`] and the address of the holder set, which identifies it.
    holder_level: AtomicU32,
    mask: AtomicU64,
    holder_set: ArcSwapOption<HolderSet>,
    /// Positions whose block has a holder.
    live: AtomicU64,
    /// Of a live position: whether its block follows the one before it in a chain, which is live too. Of a dead one:
    /// whether the tables still have an entry for it.
    links: AtomicU64,
    /// The hash at the last position, once used.
    last_hash: AtomicU64,
    /// Predicted position of the successor of the last block; [`Position::NONE`] if unknown.
    last_successor: AtomicU32,
    /// The same for one other block, and the offset of that block.
    fork_successor: AtomicU32,
    fork_offset: AtomicU8,
    /// Number of used positions, from the first on.
    used: AtomicU8,
    clock: AtomicU8,
    /// Serializes writers.
    lock: SpinLock,
    /// The holder that appends to this page.
    owner: AtomicU32,
}

/// The hashes of a page.
#[repr(align(64))]
pub(super) struct Hashes([AtomicU64; PAGE_BLOCKS as usize]);

const _: () = assert!(size_of::<Head>() == 64, "a head is one cache line");

/// State of a page for clock eviction.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum ClockState {
    /// Not read since the hand passed.
    Cold,
    /// Read since the hand passed.
    Hot,
    /// Hashes are being inserted; the page must not be evicted or freed.
    Pinned,
}

/// Hashes per cache line.
pub(super) const LINE_HASHES: usize = 8;

/// Result of reading a page.
pub(super) struct PageRead {
    /// Number of leading blocks of the prompt that match from the given offset on.
    pub(super) len: u32,
    /// The only holder and its mask, as in the head.
    pub(super) holder_level: HolderLevel,
    pub(super) mask: u64,
    /// The holder set if there are many. While this guard lives, its address is not reused.
    pub(super) holder_set: Option<Guard<Option<Arc<HolderSet>>>>,
    /// Predicted position of the next block of the prompt.
    pub(super) next: Option<Position>,
}

impl Head {
    pub(super) fn new() -> Self {
        Self {
            seqlock: SeqLock::new(),
            holder_level: AtomicU32::new(HolderLevel::NONE.raw()),
            mask: AtomicU64::new(0),
            holder_set: ArcSwapOption::empty(),
            live: AtomicU64::new(0),
            links: AtomicU64::new(0),
            last_hash: AtomicU64::new(0),
            last_successor: AtomicU32::new(0),
            fork_successor: AtomicU32::new(0),
            fork_offset: AtomicU8::new(0),
            used: AtomicU8::new(0),
            clock: AtomicU8::new(0),
            lock: SpinLock::new(),
            owner: AtomicU32::new(u32::MAX),
        }
    }

    /// Loads the cache line. The value has no meaning.
    pub(super) fn load_line(&self) -> u64 {
        self.live.load(Ordering::Relaxed)
    }
}

impl Hashes {
    pub(super) fn new() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl<'a> Page<'a> {
    pub(super) fn new(head: &'a Head, hashes: &'a Hashes) -> Self {
        Self { head, hashes }
    }

    /// Prefetches the whole page.
    pub(super) fn prefetch(&self) {
        prefetch(self.head);
        self.hashes.0.iter().step_by(LINE_HASHES).for_each(prefetch);
    }

    /// Whether a live block with this hash is at an offset. This may change at any time unless the caller holds the
    /// page's lock.
    pub(super) fn has(&self, at: u32, hash: u64) -> bool {
        self.live() >> at & 1 == 1 && self.hash_from_head(at) == hash
    }

    pub(super) fn hash(&self, at: u32) -> u64 {
        self.hashes.0[at as usize].load(Ordering::Relaxed)
    }

    /// Locks the page for writing. A thread that holds one page lock takes a second only with
    /// [`try_lock`](Self::try_lock).
    pub(super) fn lock(&self) -> SpinGuard<'a> {
        self.head.lock.lock()
    }

    /// Locks the page if it is not locked.
    pub(super) fn try_lock(&self) -> Option<SpinGuard<'a>> {
        self.head.lock.try_lock()
    }

    pub(super) fn live(&self) -> u64 {
        self.head.live.load(Ordering::Acquire)
    }

    pub(super) fn used(&self) -> u32 {
        self.head.used.load(Ordering::Relaxed).into()
    }

    /// Loads the cache lines of an offset. The value has no meaning.
    pub(super) fn load_line(&self, at: u32) -> u64 {
        self.head.load_line() ^ self.hash(at)
    }

    /// How many blocks of the prompt match from an offset on, and who holds them. `None` if a writer did not finish in
    /// time.
    pub(super) fn read(&self, at: u32, prompt: &[SequenceHash]) -> Option<PageRead> {
        self.head.seqlock.read(|| {
            let len = self.matching_run(at, prompt);
            let holder_level = HolderLevel::from_raw(self.head.holder_level.load(Ordering::Relaxed));
            let holder_set = (holder_level == HolderLevel::MANY).then(|| self.head.holder_set.load());
            let next = (at + len).checked_sub(1).and_then(|last| self.successor(last));
            PageRead { len, holder_level, mask: self.head.mask.load(Ordering::Relaxed), holder_set, next }
        })
    }

    /// Whether this page is full, ends with this hash, is one chain and has the same holders as `read`; if so, the
    /// predicted successor or [`Position::NONE`]. Also `None` if the page is being changed.
    #[inline]
    pub(super) fn equal_successor(&self, read: &PageRead, end: u64) -> Option<Position> {
        let head = self.head;
        let is = |word: &AtomicU64, value: u64| word.load(Ordering::Relaxed) == value;
        let alike = head.seqlock.try_read(|| {
            let held =
                head.holder_level.load(Ordering::Relaxed) == read.holder_level.raw() && is(&head.mask, read.mask);
            let linked = head.links.load(Ordering::Relaxed) | 1 == u64::MAX;
            (held && linked && is(&head.live, u64::MAX) && is(&head.last_hash, end))
                .then(|| Position(head.last_successor.load(Ordering::Relaxed)))
        });
        alike.flatten()
    }

    fn matching_run(&self, from: u32, prompt: &[SequenceHash]) -> u32 {
        let live = self.head.live.load(Ordering::Relaxed);
        let links = live & self.head.links.load(Ordering::Relaxed);
        let longest = (PAGE_BLOCKS - from).min(prompt.len() as u32);
        let is = |len: u32| self.hash_from_head(from + len) == prompt[len as usize].short();
        let mut len = 0;
        while len < longest && live >> (from + len) & 1 == 1 {
            let linked = (links >> (from + len) >> 1).trailing_ones().min(longest - len - 1);
            if is(len + linked) {
                len += linked + 1;
                continue;
            }
            if !is(len) {
                return len;
            }
            // The prompt diverges within this run: binary search for the last matching block.
            let (mut alike, mut differs) = (0, linked);
            // The noted fork is the most likely point.
            let fork = u32::from(self.head.fork_offset.load(Ordering::Relaxed)).wrapping_sub(from + len);
            if fork < linked && is(len + fork) {
                if !is(len + fork + 1) {
                    return len + fork + 1;
                }
                alike = fork + 1;
            }
            while differs - alike > 1 {
                let middle = alike.midpoint(differs);
                if is(len + middle) { alike = middle } else { differs = middle }
            }
            return len + alike + 1;
        }
        len
    }

    /// Like [`hash`](Self::hash), but reads the last hash from the head.
    fn hash_from_head(&self, at: u32) -> u64 {
        if at == PAGE_BLOCKS - 1 { self.head.last_hash.load(Ordering::Relaxed) } else { self.hash(at) }
    }

    /// Predicted position of the successor of a block, if that is not the next offset.
    pub(super) fn successor(&self, at: u32) -> Option<Position> {
        let next = match at {
            _ if at == PAGE_BLOCKS - 1 => self.head.last_successor.load(Ordering::Relaxed),
            _ if at == u32::from(self.head.fork_offset.load(Ordering::Relaxed)) => {
                self.head.fork_successor.load(Ordering::Relaxed)
            }
            _ => return None,
        };
        Some(Position(next)).filter(|position| *position != Position::NONE)
    }

    /// Notes the position of the successor of a block. There is space for the last block and for one other.
    pub(super) fn set_successor(&self, at: u32, next: Position) {
        if at == PAGE_BLOCKS - 1 {
            self.head.last_successor.store(next.0, Ordering::Relaxed);
        } else {
            self.head.fork_offset.store(at as u8, Ordering::Relaxed);
            self.head.fork_successor.store(next.0, Ordering::Relaxed);
        }
    }

    pub(super) fn clock(&self) -> ClockState {
        match self.head.clock.load(Ordering::Relaxed) {
            0 => ClockState::Cold,
            1 => ClockState::Hot,
            _ => ClockState::Pinned,
        }
    }

    pub(super) fn set_clock(&self, clock: ClockState) {
        self.head.clock.store(clock as u8, Ordering::Relaxed);
    }

    /// Notes that the page was read. Does not write if the page is hot or pinned already.
    pub(super) fn mark_hot(&self) {
        if self.clock() == ClockState::Cold {
            self.change_clock(ClockState::Cold, ClockState::Hot);
        }
    }

    /// The clock hand passed.
    pub(super) fn mark_cold(&self) {
        self.change_clock(ClockState::Hot, ClockState::Cold);
    }

    /// The caller does not hold the page's lock, so a concurrent change to [`ClockState::Pinned`] must win.
    fn change_clock(&self, from: ClockState, to: ClockState) {
        let (from, to) = (from as u8, to as u8);
        let _ = self.head.clock.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
    }
}

/// Updates. The caller holds the page's lock.
impl Page<'_> {
    pub(super) fn is_owned_by(&self, owner: HolderId) -> bool {
        self.head.owner.load(Ordering::Relaxed) == owner.raw()
    }

    /// Assigns a free page to a holder.
    pub(super) fn assign_to(&self, owner: HolderId) {
        self.head.owner.store(owner.raw(), Ordering::Relaxed);
        self.head.used.store(0, Ordering::Relaxed);
        self.set_successor(0, Position::NONE);
        self.set_successor(PAGE_BLOCKS - 1, Position::NONE);
    }

    /// Makes the page free if it has an owner, no live block and no table entry, and is not pinned. Returns whether it
    /// did.
    pub(super) fn try_release(&self) -> bool {
        let has_entry = self.live() != 0 || self.head.links.load(Ordering::Relaxed) != 0;
        let releases = !has_entry && self.in_use() && self.clock() != ClockState::Pinned;
        if releases {
            self.head.owner.store(u32::MAX, Ordering::Relaxed);
            self.set_clock(ClockState::Cold);
        }
        releases
    }

    fn in_use(&self) -> bool {
        self.head.owner.load(Ordering::Relaxed) != u32::MAX
    }

    /// Whether the block at an offset and the one before it are live and consecutive in a chain.
    pub(super) fn is_linked(&self, at: u32) -> bool {
        (self.live() & self.head.links.load(Ordering::Relaxed)) >> at & 1 == 1
    }

    /// Notes that the tables have no entry for these dead positions any more.
    pub(super) fn set_unindexed(&self, dead: u64) {
        self.head.links.store(self.head.links.load(Ordering::Relaxed) & !dead, Ordering::Relaxed);
    }

    pub(super) fn holders(&self) -> Holders {
        match HolderLevel::from_raw(self.head.holder_level.load(Ordering::Relaxed)) {
            HolderLevel::NONE => Holders::Empty,
            HolderLevel::MANY => self.head.holder_set.load_full().map_or(Holders::Empty, Holders::Many),
            holder_level => Holders::One(holder_level, self.head.mask.load(Ordering::Relaxed)),
        }
    }

    /// Appends hashes with one holder. The first follows the hash `parent`; each other one follows the one before it if
    /// its bit in `links` is set. Returns the first offset.
    pub(super) fn append(
        &self,
        holder_level: HolderLevel,
        Run { hashes, parent, .. }: Run<'_>,
        links: u64,
        cache: &mut InternCache,
    ) -> u32 {
        let first = self.used();
        let bits = ones(hashes.len() as u32) << first;
        let mut holders = self.holders();
        holders.add(holder_level, bits, cache);
        let live = self.live() | bits;
        let follows = first > 0 && live >> (first - 1) & 1 == 1 && parent == Some(self.hash(first - 1));
        let links = (links & !1 | u64::from(follows)) << first & bits;
        self.head.seqlock.write(|| {
            for (position, hash) in self.hashes.0[first as usize..].iter().zip(hashes) {
                position.store(*hash, Ordering::Relaxed);
            }
            self.head.last_hash.store(self.hash(PAGE_BLOCKS - 1), Ordering::Relaxed);
            self.head.links.store(self.head.links.load(Ordering::Relaxed) | links, Ordering::Relaxed);
            self.head.used.store((first + hashes.len() as u32) as u8, Ordering::Relaxed);
            self.head.live.store(live, Ordering::Release);
            self.store_holders(holders);
        });
        first
    }

    /// Sets the holders. Positions without a holder become dead; returns those that were live. The tables have an entry
    /// for each of them until [`set_unindexed`](Self::set_unindexed).
    pub(super) fn set_holders(&self, holders: Holders) -> u64 {
        let (before, links) = (self.live(), self.head.links.load(Ordering::Relaxed));
        let live = before & holders.union();
        let dead = before & !live;
        let (linked, indexed) = (links & live & !(dead << 1), links & !before | dead);
        self.head.seqlock.write(|| {
            self.head.live.store(live, Ordering::Release);
            self.head.links.store(linked | indexed, Ordering::Relaxed);
            self.store_holders(holders);
        });
        dead
    }

    fn store_holders(&self, holders: Holders) {
        let (holder_level, mask, holder_set) = match holders {
            Holders::Empty => (HolderLevel::NONE, 0, None),
            Holders::One(holder_level, mask) => (holder_level, mask, None),
            Holders::Many(holder_set) => (HolderLevel::MANY, Arc::as_ptr(&holder_set).addr() as u64, Some(holder_set)),
        };
        if holder_set.is_some() || self.head.holder_level.load(Ordering::Relaxed) == HolderLevel::MANY.raw() {
            self.head.holder_set.store(holder_set);
        }
        self.head.holder_level.store(holder_level.raw(), Ordering::Relaxed);
        self.head.mask.store(mask, Ordering::Relaxed);
    }
}
