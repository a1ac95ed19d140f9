//! The planes in memory as one process sees them over the network: delayed, lossy, cut off, and with leases that end
//! when a process no longer renews them.

mod discovery;
mod events;

pub(super) use discovery::{LEASE, NodeDiscovery, RENEWAL, Registrations};
pub(super) use events::{NodeEvents, Offered};

use super::network::Node;
use super::world::{Rng, World};
use std::time::Duration;
use worker::plane::PlaneError;

/// Time after which a request to the planes that is not answered fails.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);

/// One message of a request to the planes, or of its answer.
async fn hop(world: &World, from: Node, to: Node, rng: &parking_lot::Mutex<Rng>) -> Result<(), PlaneError> {
    let (delay, is_lost) = {
        let mut rng = rng.lock();
        (world.network.delay(&mut rng), rng.chance(world.network.quality().loss))
    };
    tokio::time::sleep(delay).await;
    if is_lost || world.network.is_cut(from, to) {
        tokio::time::sleep(ANSWER_TIMEOUT).await;
        return Err(PlaneError::Unavailable(format!("no answer of {to} to {from}")));
    }
    // A frozen process answers once it goes on, unless the caller has given up.
    let answered = tokio::time::timeout(ANSWER_TIMEOUT, world.network.reached(from, to)).await;
    answered.map_err(|_| PlaneError::Unavailable(format!("no answer of {to} to {from}")))
}
