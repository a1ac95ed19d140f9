//! What rests in the tiers of this process, beside what its router believes of it.
//!
//! The two agree but for what is on its way; where they go on differing, requests are placed by what is not so.

use kvbm::{BlockManager, Census, Level};
use router::Router;
use serde::Serialize;
use std::collections::BTreeMap;
use std::sync::Arc;
use worker::plane::{Source, StoreId, WorkerId};

/// Who can be asked.
pub struct Rests {
    pub(super) router: Arc<Router>,
    pub(super) workers: Vec<(WorkerId, BlockManager)>,
    pub(super) stores: Vec<(StoreId, Level, Count)>,
}

/// Counts what rests in a store; `None` once it is closed.
pub(super) type Count = Arc<dyn Fn() -> Option<Census> + Send + Sync>;

/// A place where blocks rest.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Place {
    /// Whose: a worker, or a store that several share.
    pub source: String,
    /// Which of its levels.
    pub level: Level,
    /// What the router believes; `None` when it had to forget some of it, to stay within its budget.
    pub believed: Option<Census>,
    /// What the tier says itself; `None` for one of another process.
    pub rests: Option<Census>,
}

impl Rests {
    /// Every place where something rests, or is believed to.
    pub fn places(&self) -> Vec<Place> {
        let mut places: BTreeMap<(Source, Level), (Option<Census>, Option<Census>)> = BTreeMap::new();
        let own = self.workers.iter().flat_map(|(id, manager)| {
            manager.census().into_iter().map(|(level, census)| (Source::Worker(*id), level, census))
        });
        let shared = self.stores.iter().filter_map(|(id, level, count)| Some((Source::Store(*id), *level, count()?)));
        for (source, level, census) in own.chain(shared) {
            places.insert((source, level), (Some(Census::default()), Some(census)));
        }
        for (source, level, digest) in self.router.believed() {
            let believed = digest.whole.then_some(Census { blocks: digest.blocks, sum: digest.sum });
            places.entry((source, level)).or_default().0 = believed;
        }
        let place = |((source, level), (believed, rests)): ((Source, Level), _)| Place {
            source: match source {
                Source::Worker(id) => format!("worker {id}"),
                Source::Store(id) => format!("store {id}"),
                Source::Router(id) => format!("router {id}"),
            },
            level,
            believed,
            rests,
        };
        places.into_iter().map(place).collect()
    }
}
