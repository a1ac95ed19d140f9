//! Admission of connections to one listener.
//!
//! At the limit, the connection that has been without a request for the longest time is closed. If all have requests, a
//! few reserved connections are accepted for health checks and metrics only.

use super::activity::Activity;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::Arc;

/// Reserved connections beyond the limit, for health checks and metrics. Each has one short request, so a few are
/// enough for several load balancers and scrapers at the same time.
const RESERVED: usize = 16;

/// The connections of one listener.
pub(super) struct Connections {
    max: usize,
    open: Mutex<Open>,
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
        Self { max, open: Mutex::default() }
    }

    /// Admits a connection. At the limit, it evicts one without a request.
    pub(super) fn admit(self: &Arc<Self>) -> Admission {
        let count = self.count();
        if count < self.max || self.evict_longest_without_request() {
            Admission::Admitted(self.insert())
        } else if count < self.max.saturating_add(RESERVED) {
            Admission::Reserved(self.insert())
        } else {
            Admission::Rejected
        }
    }

    /// The number of open connections.
    pub(super) fn count(&self) -> usize {
        self.open().connections.len()
    }

    /// Ends the connection that has been without a request for the longest time, if there is one. It scans all
    /// connections, which takes microseconds and happens only at the limit.
    pub(super) fn evict_longest_without_request(&self) -> bool {
        let open = self.open();
        let waiting =
            open.connections.values().filter_map(|activity| Some((activity.without_request_since()?, activity)));
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
    }
}

#[cfg(test)]
mod tests {
    use super::{Admission, Connections, RESERVED};
    use std::sync::Arc;

    #[tokio::test(start_paused = true)]
    async fn the_longest_idle_connection_makes_room() {
        let connections = Arc::new(Connections::new(2));
        let Admission::Admitted(busy) = connections.admit() else { panic!("there is room") };
        let request = busy.activity.request(false);
        tokio::time::advance(std::time::Duration::from_secs(1)).await;
        let Admission::Admitted(idle) = connections.admit() else { panic!("there is room") };
        let Admission::Admitted(new) = connections.admit() else { panic!("the idle one makes room") };
        assert!(idle.activity.without_request_since().is_none() && new.activity.without_request_since().is_some());
        drop((request, busy, idle, new));
        assert_eq!(connections.count(), 0);
    }

    #[tokio::test]
    async fn connections_with_requests_leave_only_the_reserve() {
        let connections = Arc::new(Connections::new(1));
        let mut open = Vec::new();
        for nth in 0..=RESERVED {
            let slot = match connections.admit() {
                Admission::Admitted(slot) if nth == 0 => slot,
                Admission::Reserved(slot) if nth > 0 => slot,
                _ => panic!("connection {nth}"),
            };
            let request = slot.activity.request(false);
            open.push((request, slot));
        }
        assert!(matches!(connections.admit(), Admission::Rejected));
    }
}
