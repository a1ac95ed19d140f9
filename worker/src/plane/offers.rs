//! The logs that are offered in this process, by source.

use super::{PlaneError, Source};
use kvbm::{Epoch, EventLog};
use parking_lot::Mutex;
use std::collections::hash_map::Entry;
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// The offered logs.
#[derive(Default)]
pub(crate) struct Offers {
    logs: Mutex<HashMap<Source, OfferedLogs>>,
    /// Numbers offers.
    counter: AtomicU64,
}

/// The logs offered for one source, ordered by epoch and then by offer.
type OfferedLogs = BTreeMap<OfferKey, Arc<EventLog>>;

/// One offer of a source.
pub(crate) type OfferKey = (Epoch, u64);

impl Offers {
    /// Adds an offer, which [`withdraw`](Self::withdraw) ends.
    pub(crate) fn add(&self, source: Source, log: Arc<EventLog>) -> OfferKey {
        let key = (log.epoch(), self.counter.fetch_add(1, Ordering::Relaxed));
        self.logs.lock().entry(source).or_default().insert(key, log);
        key
    }

    pub(crate) fn withdraw(&self, source: Source, key: OfferKey) {
        if let Entry::Occupied(mut of) = self.logs.lock().entry(source) {
            of.get_mut().remove(&key);
            if of.get().is_empty() {
                of.remove();
            }
        }
    }

    /// The latest offer of the latest epoch.
    pub(crate) fn latest(&self, source: Source) -> Result<Arc<EventLog>, PlaneError> {
        self.select(source, |logs| logs.values().next_back().cloned())?.ok_or_else(|| absent(source))
    }

    /// The latest offer of an epoch; `None` if only other epochs are offered.
    pub(crate) fn of_epoch(&self, source: Source, epoch: Epoch) -> Result<Option<Arc<EventLog>>, PlaneError> {
        self.select(source, |logs| logs.range((epoch, 0)..=(epoch, u64::MAX)).next_back().map(|(_, log)| log.clone()))
    }

    fn select<T>(&self, source: Source, select: impl FnOnce(&OfferedLogs) -> T) -> Result<T, PlaneError> {
        self.logs.lock().get(&source).map(select).ok_or_else(|| absent(source))
    }
}

fn absent(source: Source) -> PlaneError {
    PlaneError::Absent(source.to_string())
}
