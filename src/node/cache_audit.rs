//! The blocks in the tiers of this process beside the blocks in the router's index.
//!
//! The two differ only by events in flight. If they keep differing, the router expects cache hits that do not come, or
//! misses some.

use kvbm::{BlockManager, Level, SetDigest};
use router::Router;
use router::index::Holder;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use worker::plane::{StoreId, WorkerId};

/// The router and the tiers of this process.
pub struct CacheAudit {
    /// `None` in a process without a router.
    pub(super) router: Option<Arc<Router>>,
    pub(super) workers: Vec<(WorkerId, BlockManager)>,
    pub(super) stores: Vec<(StoreId, Level, DigestOf)>,
}

/// Computes the digest of the blocks in a store; `None` once the store is closed.
pub(super) type DigestOf = Arc<dyn Fn() -> Option<SetDigest> + Send + Sync>;

/// The digests of one tier of one holder of blocks.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct TierAudit {
    /// `worker w1`, or `store` and its id for a tier that several workers share.
    pub source: String,
    /// Tier of the source.
    pub tier: Level,
    /// Blocks in the router's index; `None` if the index evicted some of them to stay within its memory limit, and in a
    /// process without a router.
    pub indexed: Option<SetDigest>,
    /// Blocks that the tier itself reports; `None` for a tier of another process.
    pub actual: Option<SetDigest>,
}

impl CacheAudit {
    /// Every tier that has blocks, or has blocks in the router's index.
    pub fn tiers(&self) -> Vec<TierAudit> {
        let mut tiers: BTreeMap<(Holder, Level), (Option<SetDigest>, Option<SetDigest>)> = BTreeMap::new();
        let own = self.workers.iter().flat_map(|(id, manager)| {
            manager.set_digest().into_iter().map(|(level, digest)| (Holder::Worker(*id), level, digest))
        });
        let shared = self.stores.iter().filter_map(|(id, level, digest)| Some((Holder::Store(*id), *level, digest()?)));
        for (holder, level, digest) in own.chain(shared) {
            tiers.insert((holder, level), (self.router.as_ref().map(|_| SetDigest::default()), Some(digest)));
        }
        for (holder, level, indexed) in self.router.iter().flat_map(|router| router.index_digests()) {
            tiers.entry((holder, level)).or_default().0 = indexed;
        }
        let place = |((holder, tier), (indexed, actual)): ((Holder, Level), _)| TierAudit {
            source: match holder {
                Holder::Worker(id) => format!("worker {id}"),
                Holder::Estimate(id) => format!("estimate of worker {id}"),
                Holder::Store(id) => format!("store {id}"),
            },
            tier,
            indexed,
            actual,
        };
        tiers.into_iter().map(place).collect()
    }
}
