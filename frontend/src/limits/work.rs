//! Limits on how much text is parsed, rendered and tokenized at the same time.
//!
//! ```text
//!   below 8 KiB    immediately, on the async thread; below 64 KiB what is read through, or known but for a few KiB
//!   up to 256 KiB  short queue: as many at the same time as there are processors
//!   above          long queue: weighted by bytes, at most half as many at the same time
//! ```
//! The queues are separate, so work on long texts does not delay work on short ones. One [`WorkPermit`] covers a
//! request from its body to its tokens, so the memory of intermediate results is bounded too.

use crate::error::Error;
use std::sync::Arc;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Bodies below this size are processed on the async thread, which takes about a millisecond.
const MIN_OFFLOADED_BYTES: usize = 8 << 10;
/// Bodies below this size are read through on the async thread, which takes about 0.1 ms; a blocking thread takes 20 µs
/// to wake up.
const MIN_OFFLOADED_SCAN_BYTES: usize = 64 << 10;
/// Bodies from this size on take more than a tenth of a second.
const MIN_LONG_BYTES: usize = 256 << 10;
/// Capacity of the long queue in KiB of bodies. A parsed and rendered body takes up to four times its size.
const LONG_QUEUE_KIB: u32 = 32 << 10;

/// The two queues.
pub(crate) struct WorkQueues {
    short: Arc<Semaphore>,
    long: Arc<Semaphore>,
    /// Minimum weight of a body in the long queue in KiB, which bounds the number of bodies.
    min_weight: u32,
}

/// The right to process a body. It is released when all clones and all running work are dropped.
#[derive(Clone)]
pub(crate) struct WorkPermit {
    /// Size of the body.
    bytes: usize,
    /// The body's share of the memory for bodies, and its permit of a queue.
    held: Arc<(Option<OwnedSemaphorePermit>, Option<OwnedSemaphorePermit>)>,
}

impl Default for WorkQueues {
    fn default() -> Self {
        let processors = std::thread::available_parallelism().map_or(1, usize::from);
        let min_weight = LONG_QUEUE_KIB / (processors as u32 / 2).max(1);
        Self {
            short: Arc::new(Semaphore::new(processors)),
            long: Arc::new(Semaphore::new(LONG_QUEUE_KIB as usize)),
            min_weight,
        }
    }
}

impl WorkQueues {
    /// Waits for a permit to process a body of `bytes`. The permit also holds `memory`, the share of the body.
    pub(crate) async fn acquire(&self, bytes: usize, memory: Option<OwnedSemaphorePermit>) -> WorkPermit {
        if bytes < MIN_OFFLOADED_BYTES {
            return WorkPermit { bytes, held: Arc::new((memory, None)) };
        }
        let (queue, weight) = if bytes < MIN_LONG_BYTES {
            (&self.short, 1)
        } else {
            let kib = u32::try_from(bytes.div_ceil(1024)).unwrap_or(u32::MAX);
            (&self.long, kib.clamp(self.min_weight, LONG_QUEUE_KIB))
        };
        let permit = Arc::clone(queue).acquire_many_owned(weight).await.expect("the semaphores are never closed");
        WorkPermit { bytes, held: Arc::new((memory, Some(permit))) }
    }
}

impl WorkPermit {
    /// Ends the work, and returns the body's share of the memory for bodies. `None` while a part of the work runs,
    /// which then holds it.
    pub(crate) fn into_memory(self) -> Option<OwnedSemaphorePermit> {
        Arc::into_inner(self.held).and_then(|(memory, _queue)| memory)
    }

    /// Runs a part of the work, on a blocking thread unless the body is small. The work runs to its end even if the
    /// caller is dropped, and holds the permit until then.
    pub(crate) async fn run<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.run_from(MIN_OFFLOADED_BYTES, work).await
    }

    /// Whether [`scan`](Self::scan) runs its work on the async thread.
    pub(crate) fn scans_inline(&self) -> bool {
        self.bytes < MIN_OFFLOADED_SCAN_BYTES
    }

    /// Runs work that reads the body a few times and does nothing else, as [`run`](Self::run) does.
    pub(crate) async fn scan<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        self.run_from(MIN_OFFLOADED_SCAN_BYTES, work).await
    }

    async fn run_from<T: Send + 'static>(
        &self,
        min_offloaded: usize,
        work: impl FnOnce() -> Result<T, Error> + Send + 'static,
    ) -> Result<T, Error> {
        if self.bytes < min_offloaded {
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
        let queues = WorkQueues::default();
        let mut long = Vec::new();
        while let Some(permit) = queues.acquire(16 << 20, None).now_or_never() {
            long.push(permit);
        }
        assert!((1..=2).contains(&long.len()), "bodies of 16 MiB fill the long queue");
        assert!(queues.acquire(MIN_LONG_BYTES, None).now_or_never().is_none());
        assert!(queues.acquire(MIN_LONG_BYTES - 1, None).now_or_never().is_some());
        assert!(queues.acquire(100, None).now_or_never().is_some());
        long.pop();
        assert!(queues.acquire(MIN_LONG_BYTES, None).now_or_never().is_some());
    }

    #[tokio::test]
    async fn a_permit_is_held_until_abandoned_work_ends() {
        let queues = WorkQueues {
            long: Arc::new(Semaphore::new(LONG_QUEUE_KIB as usize)),
            min_weight: LONG_QUEUE_KIB,
            ..WorkQueues::default()
        };
        let memory = Arc::new(Semaphore::new(1));
        let permit = queues.acquire(1 << 20, memory.clone().try_acquire_owned().ok()).await;
        let (end, ended) = mpsc::channel::<()>();
        let mut work = Box::pin(permit.run(move || Ok(ended.recv().is_ok())));
        assert!(work.as_mut().now_or_never().is_none());
        drop(work);
        drop(permit);
        assert_eq!((queues.long.available_permits(), memory.available_permits()), (0, 0));
        end.send(()).unwrap();
        let _free = queues.acquire(1 << 20, None).await;
        assert_eq!(memory.available_permits(), 1);
    }
}
