//! What a router holds for requests that have not ended.

use crate::router::Router;

/// What a router holds for requests that have not ended. All are zero when it has no requests, and no other router has
/// any: what is left then was leaked.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Outstanding {
    /// Reservations of this router and of others, on all workers.
    pub reservations: usize,
    /// Requests in the admission queue.
    pub queued: usize,
    /// Requests that hold a permit.
    pub permits: usize,
    /// Anchors of prompts in flight.
    pub prefix_anchors: usize,
}

impl Router {
    /// Counts what is held now. For tests and diagnosis: it takes the locks of the request path one after the other.
    pub fn outstanding(&self) -> Outstanding {
        let fleet = self.core.fleet.snapshot();
        let (queued, permits) = self.core.admission.outstanding();
        Outstanding {
            reservations: fleet.workers().map(|worker| worker.load.reservations()).sum(),
            queued,
            permits,
            prefix_anchors: self.core.inflight.anchor_count(),
        }
    }
}
