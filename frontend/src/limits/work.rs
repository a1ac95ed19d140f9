//! How much text is worked on at once: parsed, rendered and tokenised.
//!
//! ```text
//!   below 8 KiB    on the spot
//!   up to 256 KiB  a short lane, as many at once as there are processors
//!   above          a long lane, weighted by bytes, at most half as many at once
//! ```
//! Work on a long text does not delay that on short ones: they wait in lanes of their own. One [`Turn`] covers a request from its
//! body to its tokens, so that what is made of a body in between counts too.

use crate::error::Error;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Below this much text, work is done on the spot: it takes about a millisecond.
const ASIDE_BYTES_MIN: usize = 8 << 10;
/// Above this much, work takes more than a tenth of a second.
const LONG_BYTES_MIN: usize = 256 << 10;
/// What the long lane takes at once, in KiB of bodies. Parsed and rendered, a body takes up to four times its bytes.
const LONG_KIB: u32 = 32 << 10;

/// The lanes.
pub(crate) struct Lanes {
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
    /// The least weight in the long lane, which bounds how many are worked on at once.
    share: u32,
}

/// The right to work on a body, until it and the work are dropped.
#[derive(Clone)]
pub(crate) struct Turn {
    /// The work is done off the async threads.
    aside: bool,
    /// The body's share of the memory for bodies, and a place in a lane.
    held: Arc<(Option<OwnedSemaphorePermit>, Option<OwnedSemaphorePermit>)>,
}

impl Default for Lanes {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let share = LONG_KIB / (processors as u32 / 2).max(1);
        Self { short: Arc::new(Semaphore::new(processors)), long: Arc::new(Semaphore::new(LONG_KIB as usize)), share }
    }
}

impl Lanes {
    /// Waits for a turn to work on a body of so many bytes. Its share of memory is kept as long as the turn.
    pub(crate) async fn turn(&self, bytes: usize, memory: Option<OwnedSemaphorePermit>) -> Turn {
        if bytes < ASIDE_BYTES_MIN {
            return Turn { aside: false, held: Arc::new((memory, None)) };
        }
        let (lane, weight) = if bytes < LONG_BYTES_MIN {
            (&self.short, 1)
        } else {
            let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
            (&self.long, kib.clamp(self.share, LONG_KIB))
        };
        let permit = Arc::clone(lane).acquire_many_owned(weight).await.expect("the semaphores are never closed");
        Turn { aside: true, held: Arc::new((memory, Some(permit))) }
    }
}

impl Turn {
    /// Does a part of the work: off the async threads, unless it is short. It runs to its end even if nothing waits for it any more,
    /// and keeps the turn until then.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        if !self.aside {
            return work();
        }
        let held = Arc::clone(&self.held);
        let work = move || {
            let _held = held;
            work()
        };
        tokio::task::spawn_blocking(work).await.map_err(|e| Error::Failed(e.to_string()))?
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;
    use std::sync::mpsc;

    #[tokio::test]
    async fn short_work_does_not_wait_for_long_work() {
        let lanes = Lanes::default();
        let mut long = Vec::new();
        while let Some(turn) = lanes.turn(16 << 20, None).now_or_never() {
            long.push(turn);
        }
        assert!((1..=2).contains(&long.len()), "bodies of 16 MiB fill the long lane");
        assert!(lanes.turn(LONG_BYTES_MIN, None).now_or_never().is_none());
        assert!(lanes.turn(LONG_BYTES_MIN - 1, None).now_or_never().is_some());
        assert!(lanes.turn(100, None).now_or_never().is_some());
        long.pop();
        assert!(lanes.turn(LONG_BYTES_MIN, None).now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_turn_is_kept_until_work_that_is_not_awaited_ends() {
        let lanes = Lanes { long: Arc::new(Semaphore::new(LONG_KIB as usize)), share: LONG_KIB, ..Lanes::default() };
        let memory = Arc::new(Semaphore::new(1));
        let turn = lanes.turn(1 << 20, memory.clone().try_acquire_owned().ok()).await;
        let (end, ended) = mpsc::channel::<()>();
        let mut work = Box::pin(turn.run(move || Ok(ended.recv().is_ok())));
        assert!(work.as_mut().now_or_never().is_none());
        drop(work);
        drop(turn);
        assert_eq!((lanes.long.available_permits(), memory.available_permits()), (0, 0));
        end.send(()).unwrap();
        let _free = lanes.turn(1 << 20, None).await;
        assert_eq!(memory.available_permits(), 1);
    }
}
