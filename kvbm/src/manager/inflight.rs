//! Which blocks are on their way into G1, so that requests that want the same prefix at once load it once.
//!
//! Whoever brings blocks says so and tells of every step; others follow, each with its own patience, and take over when
//! the first one gives up. Two copies of one prefix would not only be read twice: they would push others out of G1.

use crate::block::SequenceHash;
use crate::table::{ByName, NameSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use tokio::sync::watch;

/// The blocks on their way into one G1.
#[derive(Default)]
pub(super) struct Coming(Mutex<ByName<watch::Receiver<()>>>);

/// The right to bring some blocks. Dropping it says that they come no more, or are there.
pub(super) struct Bringing<'a> {
    coming: &'a Coming,
    ours: NameSet,
    steps: watch::Sender<()>,
}

impl Coming {
    /// Begins to bring `names`, unless somebody brings the first of them already: then that one's steps, seen from now on.
    pub(super) fn bring(&self, names: &[SequenceHash]) -> Result<Bringing<'_>, watch::Receiver<()>> {
        let coming = self.lock();
        if let Some(other) = names.first().and_then(|first| coming.get(first)) {
            let mut steps = other.clone();
            steps.mark_unchanged();
            return Err(steps);
        }
        Ok(self.claim(coming, names))
    }

    /// Begins to bring those of `names` that nobody brings.
    pub(super) fn bring_rest(&self, names: &[SequenceHash]) -> Bringing<'_> {
        self.claim(self.lock(), names)
    }

    fn claim(&self, coming: MutexGuard<'_, ByName<watch::Receiver<()>>>, names: &[SequenceHash]) -> Bringing<'_> {
        let mut bringing = Bringing { coming: self, ours: NameSet::default(), steps: watch::Sender::new(()) };
        bringing.add(coming, names);
        bringing
    }

    fn lock(&self) -> MutexGuard<'_, ByName<watch::Receiver<()>>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Bringing<'_> {
    /// Begins to bring those of `names` that nobody brings, too.
    pub(super) fn bring_more(&mut self, names: &[SequenceHash]) {
        self.add(self.coming.lock(), names);
    }

    fn add(&mut self, mut coming: MutexGuard<'_, ByName<watch::Receiver<()>>>, names: &[SequenceHash]) {
        for name in names {
            coming.entry(*name).or_insert_with(|| {
                self.ours.insert(*name);
                self.steps.subscribe()
            });
        }
    }

    /// Leaves them to whoever else wants them.
    pub(super) fn leave(&mut self) {
        *self = Self { coming: self.coming, ours: NameSet::default(), steps: watch::Sender::new(()) };
    }

    /// Some more of them are in G1.
    pub(super) fn step(&self) {
        self.steps.send_replace(());
    }

    /// Whether this one brings the block, and nobody else.
    pub(super) fn brings(&self, name: &SequenceHash) -> bool {
        self.ours.contains(name)
    }
}

impl Drop for Bringing<'_> {
    fn drop(&mut self) {
        let mut coming = self.coming.lock();
        for name in &self.ours {
            coming.remove(name);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(n: u8) -> Vec<SequenceHash> {
        (0..n).map(|n| SequenceHash::from_bytes([n; 16])).collect()
    }

    #[tokio::test]
    async fn a_second_one_follows_until_the_first_is_done() {
        let coming = Coming::default();
        let Ok(first) = coming.bring(&names(3)) else { panic!("nobody else brings them") };
        first.step();
        let Err(mut steps) = coming.bring(&names(5)) else { panic!("the first one does") };
        assert!(!steps.has_changed().unwrap(), "only what comes from now on");
        first.step();
        assert!(steps.changed().await.is_ok());
        drop(first);
        assert!(steps.changed().await.is_err());
        assert!(coming.bring(&names(5)).is_ok());
        assert!(coming.lock().is_empty());
    }

    #[test]
    fn who_brings_the_middle_keeps_it() {
        let coming = Coming::default();
        let Ok(middle) = coming.bring(&names(3)[1..]) else { panic!("nobody else brings them") };
        let whole = coming.bring(&names(4));
        assert!(whole.is_ok(), "the first block is not on its way");
        drop(whole);
        assert!(coming.bring(&names(3)[1..]).is_err(), "still the first one's");
        let rest = coming.bring_rest(&names(4)[1..]);
        assert_eq!([1, 2, 3].map(|at| rest.brings(&names(4)[at])), [false, false, true]);
        drop(middle);
        let mut rest = rest;
        rest.bring_more(&names(4));
        assert!(names(4).iter().all(|name| rest.brings(name)), "what was the first one's is free");
    }
}
