//! Digests of the index, to be compared with those of the tiers.

use crate::index::{Holder, LEVELS};
use crate::router::Router;
use kvbm::{Level, SetDigest};
use std::collections::BTreeSet;

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
}
