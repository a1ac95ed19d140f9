//! How much lies in a store that has a capacity: all of it is listed now and then, whatever is known of it.
//!
//! What was written is learned from manifests within seconds. The rest is not: objects about to be deleted, those of which no
//! more is kept in mind, and those of other versions. A list names a thousand objects in one request, so it is made rarely
//! while there is room, and often near the capacity, as far as it takes a small part of the time.

use super::Standing;
use super::catalog::Catalog;
use super::client::Client;
use super::format::layout::Layout;
use object_store::Error;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, sleep};

/// How often while there is room, and near the capacity, where deletions are waited for.
const PAUSE: Duration = Duration::from_mins(10);
const PAUSE_NEAR: Duration = Duration::from_secs(10);
/// The pause is at least so many times what the list took.
const PAUSE_FACTOR: u32 = 20;
/// After failures it doubles from a second to about a minute.
const PAUSE_FAILED: u32 = 6;
/// Near the capacity: above three quarters of it.
const NEAR: (u64, u64) = (3, 4);

/// Measures what lies in a store.
pub(super) struct Meter {
    pub(super) client: Arc<Client>,
    pub(super) layout: Layout,
    pub(super) catalog: Arc<Catalog>,
    pub(super) capacity: u64,
    /// What was there at the start must be known before it is told apart from the rest.
    pub(super) standing: watch::Receiver<Standing>,
    /// Whether it was measured.
    pub(super) measured: watch::Sender<bool>,
}

impl Meter {
    /// Measures for ever.
    pub(super) async fn run(mut self) {
        // Without a follower nothing is learned any more, and nothing is stored.
        let _ = self.standing.wait_for(|standing| *standing == Standing::Ready).await;
        let (mut last, mut soonest, mut failed) = (None::<Instant>, Instant::now(), 0_u32);
        loop {
            let start = Instant::now();
            let near = self.catalog.taken() / NEAR.0 > self.capacity / NEAR.1;
            let due = near || last.is_none_or(|last| start - last >= PAUSE);
            if due && start >= soonest {
                match self.measure().await {
                    Ok(()) => {
                        (last, failed) = (Some(start), 0);
                        self.measured.send_replace(true);
                    }
                    Err(error) => {
                        failed = (failed + 1).min(PAUSE_FAILED);
                        tracing::debug!(%error, "cannot measure the store");
                    }
                }
                soonest = Instant::now() + start.elapsed() * PAUSE_FACTOR + Duration::from_secs((1 << failed) - 1);
            }
            sleep(if last.is_some() { PAUSE_NEAR } else { Duration::from_secs(1) }).await;
        }
    }

    /// What is just being written counts as not known, and twice once it is known, until the next list: a little too much rather
    /// than too little.
    async fn measure(&self) -> Result<(), Error> {
        let before = self.catalog.unknown_bytes();
        self.catalog.measured(&self.client.list_all(&self.layout.all_blocks()).await?, before);
        Ok(())
    }
}
