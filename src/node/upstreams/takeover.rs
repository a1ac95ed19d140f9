//! How a table of the configuration takes the place of others, so that no request meets a gateway without servers.
//!
//! The servers of a changed table have the ids of the former ones, which they replace when they are registered. Until
//! then the former ones get the requests. So do the servers of tables that leave in the same change.
//!
//! Not here: when a takeover is complete. The first server of the new table that is registered says so, and
//! [`Upstreams`](super::Upstreams) after a time limit.

use super::Running;
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Mutex;

/// The tables that a new table takes the place of. Dropping it deregisters them.
pub(super) struct Takeover(Mutex<Option<Former>>);

struct Former {
    /// The table that the same URL had.
    table: Option<Running>,
    /// Tables of other URLs. They leave with the last takeover that they are a part of.
    others: Arc<BTreeMap<String, Running>>,
}

impl Takeover {
    pub(super) fn new(table: Option<Running>, others: Arc<BTreeMap<String, Running>>) -> Self {
        Self(Mutex::new(Some(Former { table, others })))
    }

    /// Deregisters the former servers of the URL, and those of other URLs if no other takeover waits for them. Returns
    /// when they are no longer followed: the server that comes may have the key of one that leaves. Later calls change
    /// nothing.
    pub(super) async fn complete(&self) {
        let mut former = self.0.lock().await;
        let Some(Former { table, others }) = former.take() else { return };
        for Running { stop, tasks, .. } in Arc::into_inner(others).unwrap_or_default().into_values().chain(table) {
            drop(stop);
            tasks.close();
            tasks.wait().await;
        }
    }
}
