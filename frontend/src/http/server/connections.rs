//! Admission of connections to one listener.
//!
//! At the limit, the connection that has waited for its client for the longest time is closed: it has no request, or
//! one that has not arrived completely. If the server works on requests of all, a few reserved connections are accepted
//! for health checks and metrics only.

use super::activity::Activity;
use parking_lot::{Mutex, MutexGuard};
use spans::LogLimit;
use std::collections::HashMap;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::Notify;

/// Reserved connections beyond the limit, for health checks and metrics. Each has one short request, so a few are
/// enough for several load balancers and scrapers at the same time.
const RESERVED: usize = 16;

/// Time to wait for the end of a connection that was closed to make room. Its task needs microseconds, unless the
/// server has no CPU time for it.
const MAX_EVICTION_TIME: Duration = Duration::from_millis(100);

/// The connections of one listener.
pub(super) struct Connections {
    max: usize,
    open: Mutex<Open>,
    /// Notified when a connection ends.
    ended: Notify,
    /// Rate limit of the log lines of evicted connections.
    evictions: LogLimit,
}

#[derive(Default)]
struct Open {
    next: u64,
    connections: HashMap<u64, Arc<Activity>>,
}

/// The decision about an accepted connection.
pub(super) enum Admission {
    /// It is served.
    Admitted(Slot),
    /// It is served, but only health checks and metrics.
    Reserved(Slot),
    /// It is closed.
    Rejected,
}

/// The slot of an open connection, which is released on drop.
#[must_use]
pub(super) struct Slot {
    id: u64,
    pub(super) activity: Arc<Activity>,
    connections: Arc<Connections>,
}

impl Connections {
    pub(super) fn new(max: usize) -> Self {
        Self { max, open: Mutex::default(), ended: Notify::new(), evictions: LogLimit::default() }
    }

    /// Admits a connection. At the limit, it first ends one that waits for its client, so that there are never more
    /// than the limit and the reserve.
    pub(super) async fn admit(self: &Arc<Self>) -> Admission {
        loop {
            if self.count() < self.max {
                return Admission::Admitted(self.insert());
            }
            let mut ended = pin!(self.ended.notified());
            // Connections that end from here on are noticed.
            ended.as_mut().enable();
            if !self.evict_longest_waiting() {
                break;
            }
            if let Some(suppressed) = self.evictions.admit() {
                tracing::warn!(
                    suppressed,
                    "connections are closed to accept new ones: max_connections = {} is reached; raise \
                     frontend.max_connections, or the limit of open files if it is what allows no more",
                    self.max
                );
            }
            // If it takes longer, the next one is evicted.
            let _ = tokio::time::timeout(MAX_EVICTION_TIME, ended).await;
        }
        if self.count() < self.max.saturating_add(RESERVED) {
            Admission::Reserved(self.insert())
        } else {
            Admission::Rejected
        }
    }

    /// The number of open connections.
    pub(super) fn count(&self) -> usize {
        self.open().connections.len()
    }

    /// The number of requests whose response is not completely passed to the transport.
    pub(super) fn requests(&self) -> usize {
        self.open().connections.values().map(|activity| activity.requests()).sum()
    }

    /// Ends the connection that has waited for its client for the longest time, if there is one. Not those without a
    /// request first: a connection that was just accepted has none yet. It scans all connections, which takes
    /// microseconds and happens only at the limit.
    pub(super) fn evict_longest_waiting(&self) -> bool {
        let open = self.open();
        let waiting =
            open.connections.values().filter_map(|activity| Some((activity.waits_for_client_since()?, activity)));
        let longest = waiting.min_by_key(|(since, _)| *since);
        longest.is_some_and(|(_, activity)| activity.evict())
    }

    fn insert(self: &Arc<Self>) -> Slot {
        let activity = Activity::new();
        let mut open = self.open();
        let id = open.next;
        open.next += 1;
        open.connections.insert(id, Arc::clone(&activity));
        Slot { id, activity, connections: Arc::clone(self) }
    }

    fn open(&self) -> MutexGuard<'_, Open> {
        self.open.lock()
    }
}

impl Drop for Slot {
    fn drop(&mut self) {
        self.connections.open().connections.remove(&self.id);
        self.connections.ended.notify_waiters();
    }
}

#[cfg(test)]
mod tests {
    use super::{Admission, Connections, RESERVED, Slot};
    use std::sync::Arc;
    use std::time::Duration;

    async fn admitted(connections: &Arc<Connections>) -> Slot {
        match connections.admit().await {
            Admission::Admitted(slot) => slot,
            Admission::Reserved(_) | Admission::Rejected => panic!("there is room"),
        }
    }

    /// Ends the connection once it is evicted, as its task does.
    fn serve(slot: Slot) -> tokio::task::JoinHandle<()> {
        tokio::spawn(async move { slot.activity.evicted().await })
    }

    #[tokio::test(start_paused = true)]
    async fn the_longest_waiting_connection_makes_room() {
        let connections = Arc::new(Connections::new(3));
        let busy = admitted(&connections).await;
        let request = busy.activity.request(false);
        let uploading = admitted(&connections).await;
        let part = (uploading.activity.request(false), uploading.activity.receiving());
        tokio::time::advance(Duration::from_secs(1)).await;
        let idle = admitted(&connections).await;
        let [uploading, idle] = [uploading, idle].map(serve);
        let first = admitted(&connections).await;
        assert!(uploading.is_finished() && !idle.is_finished(), "its request has been incomplete for longer");
        let working = first.activity.request(false);
        let second = admitted(&connections).await;
        assert!(idle.is_finished());
        assert_eq!((connections.count(), connections.requests()), (3, 2), "of `busy` and `first`");
        assert_eq!(connections.evictions.admit(), None, "the log names the evictions");
        drop((request, part, busy, working, first, second));
        assert_eq!((connections.count(), connections.requests()), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn evicted_connections_count_until_they_have_ended() {
        let connections = Arc::new(Connections::new(2));
        let mut idle = vec![admitted(&connections).await, admitted(&connections).await];
        let admitting = tokio::spawn({
            let connections = Arc::clone(&connections);
            async move { connections.admit().await }
        });
        tokio::task::yield_now().await;
        assert!(!admitting.is_finished() && connections.count() == 2);
        idle.clear();
        assert!(matches!(admitting.await.unwrap(), Admission::Admitted(_)));
    }

    #[tokio::test]
    async fn connections_with_requests_leave_only_the_reserve() {
        let connections = Arc::new(Connections::new(1));
        let mut open = Vec::new();
        for nth in 0..=RESERVED {
            let slot = match connections.admit().await {
                Admission::Admitted(slot) if nth == 0 => slot,
                Admission::Reserved(slot) if nth > 0 => slot,
                _ => panic!("connection {nth}"),
            };
            let request = slot.activity.request(false);
            open.push((request, slot));
        }
        assert!(matches!(connections.admit().await, Admission::Rejected));
    }
}
