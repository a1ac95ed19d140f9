//! Holders that join and leave.

use super::Index;
use super::holder::{Holder, HolderId};
use super::snapshot::HolderDirectory;
use std::sync::Arc;
use worker::plane::{StoreId, WorkerId};

impl Index {
    /// Adds a worker that can onboard from `stores`. A known worker keeps its blocks and gets the new list of stores.
    pub fn join(&self, worker: WorkerId, stores: &[StoreId]) -> HolderId {
        self.update_holders(|holders| register(holders, Holder::Worker(worker), stores))
    }

    /// Adds the estimate of a worker's cache, which can onboard from `stores`. As in [`join`](Self::join), a known one
    /// keeps its blocks.
    pub(crate) fn join_estimate(&self, worker: WorkerId, stores: &[StoreId]) -> HolderId {
        self.update_holders(|holders| register(holders, Holder::Estimate(worker), stores))
    }

    /// Adds several workers with the same stores in one update.
    pub fn join_all(&self, workers: impl Iterator<Item = WorkerId>, stores: &[StoreId]) -> Vec<HolderId> {
        self.update_holders(|holders| workers.map(|worker| register(holders, Holder::Worker(worker), stores)).collect())
    }

    /// Removes a worker, its estimate, and the blocks of both. Returns the stores that no other worker can read.
    pub fn leave(&self, worker: WorkerId) -> Vec<StoreId> {
        self.forget(Holder::Estimate(worker));
        self.forget(Holder::Worker(worker));
        self.snapshot.load().holders.unreferenced_stores()
    }

    /// Removes a holder and its blocks, in time proportional to the number of its blocks and of all holders.
    pub fn forget(&self, holder: Holder) {
        let Some(state) = self.update_holders(|holders| holders.unregister(holder)) else { return };
        let mut pages = state.lock();
        pages.unregistered = true;
        for holder_level in state.id.levels() {
            self.clear_level(&state, &mut pages, holder_level);
        }
        self.release_reserved_pages(state.id, &mut pages);
        self.account_pages(&state, &mut pages);
        drop(pages);
        self.update_holders(|holders| holders.release(state.id));
    }

    /// Replaces the list of holders.
    fn update_holders<T>(&self, apply: impl FnOnce(&mut HolderDirectory) -> T) -> T {
        self.update(|snapshot| {
            let mut holders = HolderDirectory::clone(&snapshot.holders);
            let outcome = apply(&mut holders);
            snapshot.holders = Arc::new(holders);
            outcome
        })
    }
}

/// Registers a worker or an estimate, and that it can read these stores and no others.
fn register(holders: &mut HolderDirectory, reader: Holder, stores: &[StoreId]) -> HolderId {
    let holder_id = holders.register(reader);
    let number = holder_id.index() as u32;
    holders.readers.iter_mut().for_each(|workers| workers.unset(number));
    for store in stores {
        let at = holders.register(Holder::Store(*store)).index();
        holders.readers[at].set(number);
    }
    holder_id
}
