//! Digests of the index, to be compared with those of the tiers.

use crate::index::{Holder, LEVELS};
use crate::router::Router;
use kvbm::{CacheDigest, Epoch, Level, SetDigest};
use std::collections::BTreeSet;

/// The blocks of a worker or a store in the index, as far as its events were applied.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexedEvents {
    /// Epoch of the last event that the index includes.
    pub epoch: Epoch,
    /// Number of that event; 0 before the first.
    pub number: u64,
    /// Digest of the indexed blocks at all levels; `None` if the index evicted some.
    pub digest: Option<CacheDigest>,
}

impl Router {
    /// Digest of the index, for each worker and each store that a worker reaches, at each level with indexed blocks.
    /// `None` for a holder of which the index evicted blocks.
    pub fn index_digests(&self) -> Vec<(Holder, Level, Option<SetDigest>)> {
        let fleet = self.core.fleet.snapshot();
        let workers = fleet.workers().map(|member| Holder::Worker(member.id()));
        let stores: BTreeSet<_> = fleet.workers().flat_map(|member| member.instance.stores.iter().copied()).collect();
        let holders = workers.chain(stores.into_iter().map(Holder::Store));
        let each = |holder| LEVELS.into_iter().map(move |level| (holder, level));
        let indexed = |(holder, level)| {
            let digest = self.core.index.digest(holder, level).filter(|digest| digest.blocks > 0)?;
            Some((holder, level, self.core.index.is_complete(holder).then_some(digest)))
        };
        holders.flat_map(each).filter_map(indexed).collect()
    }

    /// What the index has of a worker or a store, as of which of its events. `None` for an unknown one. Exact while no
    /// event is being applied: digest and number are read one after the other.
    pub fn indexed_events(&self, holder: Holder) -> Option<IndexedEvents> {
        let (epoch, number, digest) = self.core.index.last_event(holder)?;
        Some(IndexedEvents { epoch, number, digest })
    }
}
