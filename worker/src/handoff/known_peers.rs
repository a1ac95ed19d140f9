//! The memories of workers in other processes, kept so that the speed of each is measured once and its idle connections
//! are used again.
//!
//! A request names the worker whose memory is read, so there may be any number of them. Those that were not used for
//! long are forgotten. A memory that is being read stays until its reader drops it. Not here: whether a worker still
//! exists, which this process does not know.

use super::RemoteMemory;
use crate::plane::WorkerId;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The memories that were used last.
#[derive(Default)]
pub(super) struct KnownPeers(HashMap<WorkerId, KnownPeer>);

struct KnownPeer {
    url: String,
    memory: Arc<dyn RemoteMemory>,
    used: Instant,
}

/// Maximum number of memories. Beyond it the least recently used one is forgotten, which costs a new connection and a
/// new measurement of its speed. Each has up to eight idle connections with buffers of a few MiB.
const MAX_PEERS: usize = 256;

/// A memory that was not used for this time is forgotten: its worker has probably left.
const MAX_IDLE: Duration = Duration::from_mins(10);

impl KnownPeers {
    /// The memory of a worker at a URL, which `connect` makes if it is not known.
    pub(super) fn get(
        &mut self,
        peer: WorkerId,
        url: &str,
        now: Instant,
        connect: impl FnOnce() -> Arc<dyn RemoteMemory>,
    ) -> Arc<dyn RemoteMemory> {
        if let Some(known) = self.0.get_mut(&peer).filter(|known| known.url == url) {
            known.used = now;
            return Arc::clone(&known.memory);
        }
        // One at another URL is replaced.
        self.0.remove(&peer);
        self.make_room(now);
        let memory = connect();
        self.0.insert(peer, KnownPeer { url: url.to_owned(), memory: Arc::clone(&memory), used: now });
        memory
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Forgets idle memories, and one more if there is no room for another.
    fn make_room(&mut self, now: Instant) {
        self.0.retain(|_, known| now - known.used < MAX_IDLE);
        if self.0.len() < MAX_PEERS {
            return;
        }
        let oldest = self.0.iter().min_by_key(|(_, known)| known.used).map(|(peer, _)| *peer);
        if let Some(oldest) = oldest {
            self.0.remove(&oldest);
        }
    }
}
