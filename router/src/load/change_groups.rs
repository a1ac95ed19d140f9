//! The workers of a model by their group in [`LoadChanges`], as one reader has seen them.

use super::load_changes::{GROUPS, LoadChanges};
use super::worker_load::WorkerLoad;
use std::sync::Arc;

/// The groups of a list of workers.
#[derive(Default)]
pub(super) struct ChangeGroups {
    /// `None`: no worker is in a group.
    changes: Option<Arc<LoadChanges>>,
    groups: Vec<Group>,
    /// Indexes of workers that are in no group, which may have changed at any time.
    others: Vec<u32>,
}

struct Group {
    /// The version up to which all changes were seen.
    seen: u64,
    /// Indexes of its workers.
    members: Vec<u32>,
}

impl ChangeGroups {
    pub(super) fn of<'a>(workers: impl Iterator<Item = &'a WorkerLoad>) -> Self {
        let (mut changes, mut others) = (None::<Arc<LoadChanges>>, Vec::new());
        let mut groups: Vec<Group> = (0..GROUPS).map(|_| Group { seen: 0, members: Vec::new() }).collect();
        for (at, load) in (0..).zip(workers) {
            match load.change_group() {
                Some((of, group)) if Arc::ptr_eq(of, changes.get_or_insert_with(|| of.clone())) => {
                    groups[*group].members.push(at);
                }
                _ => others.push(at),
            }
        }
        Self { changes, groups, others }
    }

    /// Calls `visit` with the index of each worker that may have changed.
    pub(super) fn changed(&mut self, mut visit: impl FnMut(usize)) {
        let Self { changes, groups, others } = self;
        if let Some(changes) = changes {
            for (nth, group) in groups.iter_mut().enumerate() {
                let version = changes.version(nth);
                if version != group.seen {
                    group.seen = version;
                    for at in &group.members {
                        visit(*at as usize);
                    }
                }
            }
        }
        for at in others {
            visit(*at as usize);
        }
    }

    /// All workers are about to be looked at.
    pub(super) fn all_seen(&mut self) {
        let Some(changes) = &self.changes else { return };
        for (nth, group) in self.groups.iter_mut().enumerate() {
            group.seen = changes.version(nth);
        }
    }
}
