//! In which groups of workers the load of one has changed, so that a decision looks at a few of a thousand workers.
//!
//! Each worker is in one of [`GROUPS`] groups. **Ordering.** A change raises the version of the worker
//! ([`published`](super::published)) and then that of its group, both with release. A reader loads the version of the
//! group with acquire, and then the versions of its workers. So when it finds the version of the group that it found
//! before, it has seen all changes up to it.

use super::sync::{AtomicU64, Ordering};

/// Versions of the groups of one model's workers.
#[derive(Debug)]
pub(super) struct LoadChanges {
    versions: Box<[AtomicU64]>,
    /// Number of workers that have got a group.
    members: AtomicU64,
}

/// Number of groups: of a thousand workers each has sixteen, which are looked at in as much time as the groups.
pub(super) const GROUPS: usize = 64;

impl Default for LoadChanges {
    fn default() -> Self {
        Self { versions: (0..GROUPS).map(|_| AtomicU64::new(0)).collect(), members: AtomicU64::new(0) }
    }
}

impl LoadChanges {
    /// The group of a further worker.
    pub(super) fn next_group(&self) -> usize {
        self.members.fetch_add(1, Ordering::Relaxed) as usize % GROUPS
    }

    /// The load of a worker of the group has changed.
    pub(super) fn raise(&self, group: usize) {
        self.versions[group].fetch_add(1, Ordering::Release);
    }

    /// Changes after each change of a worker of the group.
    #[inline]
    pub(super) fn version(&self, group: usize) -> u64 {
        self.versions[group].load(Ordering::Acquire)
    }
}
