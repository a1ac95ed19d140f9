//! Idle connections of HTTP/1.1 to one engine, the one that was used last first.
//!
//! An engine may close a connection at any time. One whose end has arrived is not given out; a request that is sent
//! just before it arrives is sent again by the client.

use super::connect::{Socket, is_quiet};
use parking_lot::Mutex;
use std::sync::{Arc, Weak};
use std::time::Duration;
use tokio::time::{Instant, sleep_until};

/// The idle connections.
#[derive(Debug)]
pub(super) struct Pool {
    idle: Mutex<Idle>,
    /// How long a connection is kept.
    timeout: Duration,
    /// Maximum number of connections that are kept.
    max: usize,
    this: Weak<Self>,
}

#[derive(Default, Debug)]
struct Idle {
    /// With the time since when each is idle, the oldest first.
    sockets: Vec<(Instant, Socket)>,
    /// A task closes those that were idle for too long. It ends when there are none.
    is_swept: bool,
}

impl Pool {
    pub(super) fn new(timeout: Duration, max: usize) -> Arc<Self> {
        Arc::new_cyclic(|this| Self { idle: Mutex::default(), timeout, max, this: this.clone() })
    }

    /// Keeps a connection on which an answer has ended.
    pub(super) fn put(&self, socket: Socket) {
        let mut idle = self.idle.lock();
        let now = Instant::now();
        if idle.sockets.len() < self.max {
            idle.sockets.push((now, socket));
        }
        if !idle.is_swept && !idle.sockets.is_empty() {
            idle.is_swept = true;
            tokio::spawn(sweep(self.this.clone(), now + self.timeout));
        }
    }

    /// Takes a connection that can be used.
    pub(super) fn take(&self) -> Option<Socket> {
        loop {
            let (since, mut socket) = self.idle.lock().sockets.pop()?;
            if since.elapsed() < self.timeout && is_quiet(&mut socket) {
                return Some(socket);
            }
        }
    }

    /// Closes the connections that were idle for too long. Returns when the next one will have been; `None`: there are
    /// none.
    fn close_expired(&self) -> Option<Instant> {
        let now = Instant::now();
        let mut idle = self.idle.lock();
        let expired = idle.sockets.partition_point(|(since, _)| *since + self.timeout <= now);
        let closed: Vec<_> = idle.sockets.drain(..expired).collect();
        let next = idle.sockets.first().map(|(since, _)| *since + self.timeout);
        idle.is_swept = next.is_some();
        // A close takes a system call each.
        drop(idle);
        drop(closed);
        next
    }
}

async fn sweep(pool: Weak<Pool>, mut at: Instant) {
    loop {
        sleep_until(at).await;
        match pool.upgrade().and_then(|pool| pool.close_expired()) {
            Some(next) => at = next,
            None => return,
        }
    }
}
