//! Reading what somebody may be changing, without waiting for him.
//!
//! A [`Version`] stands beside data made of atomics. It is odd while the data changes. A reader looks at it, at the data,
//! and at it again: the same even number twice means that nothing changed in between.
//!
//! **Ordering.** Writers take turns by a lock of their own. A writer's odd number comes before its first change, by the release
//! fence; so a reader that saw a change, and then passed its own acquire fence, sees at least that odd number at its second
//! look, and starts over. The even number is stored with release and the reader's first look acquires it, so that what was
//! written under it is seen under it.

use super::sync::{AtomicU8, AtomicU32, LOOKS, Ordering, fence, pause};

/// How often something has changed, twice over.
pub(crate) struct Version(AtomicU32);

impl Version {
    /// Of what has never changed.
    pub(crate) fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// Makes a change. The caller holds the lock that writers take turns by.
    pub(crate) fn change<T>(&self, change: impl FnOnce() -> T) -> T {
        let version = self.0.load(Ordering::Relaxed);
        self.0.store(version.wrapping_add(1), Ordering::Relaxed);
        fence(Ordering::Release);
        let outcome = change();
        self.0.store(version.wrapping_add(2), Ordering::Release);
        outcome
    }

    /// Looks until nothing changed meanwhile; `None` when it does not come to rest.
    pub(crate) fn look<T>(&self, mut look: impl FnMut() -> T) -> Option<T> {
        for look_number in 0..LOOKS {
            let seen = self.look_once(&mut look);
            if seen.is_some() {
                return seen;
            }
            pause(look_number);
        }
        None
    }

    /// Looks once; `None` when something changed meanwhile.
    #[inline]
    pub(crate) fn look_once<T>(&self, look: impl FnOnce() -> T) -> Option<T> {
        let version = self.0.load(Ordering::Acquire);
        if !version.is_multiple_of(2) {
            return None;
        }
        let seen = look();
        fence(Ordering::Acquire);
        (self.0.load(Ordering::Relaxed) == version).then_some(seen)
    }
}

/// Whose turn it is to change something that lies on the same cache line. It is held for as long as a page takes, and where few blocks
/// of a page move, for as long as their tables take: so whoever finds it taken looks again, and soon lets others run in between.
pub(crate) struct Turn(AtomicU8);

/// Somebody's turn, until it is dropped.
#[must_use = "it is given back when this is dropped"]
pub(crate) struct Taken<'a>(&'a Turn);

const FREE: u8 = 0;
const TAKEN: u8 = 1;

impl Turn {
    /// Nobody's.
    pub(crate) fn new() -> Self {
        Self(AtomicU8::new(FREE))
    }

    /// Waits for one's turn.
    pub(crate) fn take(&self) -> Taken<'_> {
        for look in 0.. {
            if let Some(taken) = self.try_take() {
                return taken;
            }
            pause(look);
        }
        unreachable!("the loop is infinite")
    }

    /// Takes it if it is nobody's.
    pub(crate) fn try_take(&self) -> Option<Taken<'_>> {
        // Looked at first: only who may get it asks for the line.
        let free = self.0.load(Ordering::Relaxed) == FREE;
        let taken = free && self.0.compare_exchange(FREE, TAKEN, Ordering::Acquire, Ordering::Relaxed).is_ok();
        // One made in vain would give another's turn back.
        taken.then(|| Taken(self))
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.0.0.store(FREE, Ordering::Release);
    }
}
