//! Measures the bytes in a store with a capacity by listing all objects periodically.
//!
//! Manifests tell within seconds what other processes wrote. They do not cover objects that are marked for deletion,
//! objects that the catalog dropped for lack of memory, and objects of other versions. A list returns a thousand
//! objects per request, so it is rare while there is room, and frequent near the capacity, as far as it takes a small
//! part of the time.

use super::catalog::Catalog;
use super::client::Client;
use super::client::health::StoreHealth;
use super::format::layout::Layout;
use object_store::Error;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// Time between two measurements while there is room, and near the capacity, where writers wait for deletions.
const INTERVAL: Duration = Duration::from_mins(10);
const INTERVAL_NEAR_CAPACITY: Duration = Duration::from_secs(10);
/// The interval is at least this many times the duration of a measurement.
const MIN_INTERVAL_FACTOR: u32 = 20;
/// After failures the pause doubles from one second to about a minute.
const MAX_BACKOFF_DOUBLINGS: u32 = 6;
/// Near the capacity: above three quarters of it.
const NEAR_CAPACITY: (u64, u64) = (3, 4);

/// Measures the bytes in a store.
pub(super) struct UsageMeter {
    pub(super) client: Arc<Client>,
    pub(super) layout: Layout,
    pub(super) catalog: Arc<Catalog>,
    pub(super) capacity: u64,
    /// The measurement waits until the catalog is complete, to tell known objects from unknown ones.
    pub(super) health: watch::Receiver<StoreHealth>,
    /// Whether a measurement succeeded.
    pub(super) is_measured: watch::Sender<bool>,
}

impl UsageMeter {
    /// Measures periodically. Never returns.
    pub(super) async fn run(mut self) {
        // If the follower ended, no measurement is made, and no block is stored.
        let _ = self.health.wait_for(|health| *health == StoreHealth::Ready).await;
        let mut last = None::<Instant>;
        let mut not_before = Instant::now();
        let mut failures = 0_u32;
        loop {
            let start = Instant::now();
            let near = self.catalog.used_bytes() / NEAR_CAPACITY.0 > self.capacity / NEAR_CAPACITY.1;
            let due = near || last.is_none_or(|last| start - last >= INTERVAL);
            if due && start >= not_before {
                match self.measure().await {
                    Ok(()) => {
                        last = Some(start);
                        failures = 0;
                        self.is_measured.send_replace(true);
                    }
                    Err(error) => {
                        failures = (failures + 1).min(MAX_BACKOFF_DOUBLINGS);
                        tracing::debug!(%error, "cannot measure the store");
                    }
                }
                not_before =
                    Instant::now() + start.elapsed() * MIN_INTERVAL_FACTOR + Duration::from_secs((1 << failures) - 1);
            }
            sleep(if last.is_some() { INTERVAL_NEAR_CAPACITY } else { Duration::from_secs(1) }).await;
        }
    }

    /// Objects that are being written count as unknown, and twice once the catalog has them, until the next
    /// measurement: the result is too high rather than too low.
    async fn measure(&self) -> Result<(), Error> {
        let before = self.catalog.unknown_bytes();
        self.catalog.reconcile(&self.client.list_all(&self.layout.objects()).await?, before);
        Ok(())
    }
}
