//! CPU-bound work off the async threads, with limited concurrency.

use std::io;
use std::num::NonZero;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

/// Limits the number of threads that a transform keeps busy, over all requests.
pub(super) struct BlockingPool {
    permits: Arc<Semaphore>,
    threads: usize,
}

impl BlockingPool {
    /// A pool with as many threads as there are cores.
    pub(super) fn new() -> Self {
        let threads = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self { permits: Arc::new(Semaphore::new(threads)), threads }
    }

    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `work` on a blocking thread. Dropping the future cancels work that has not started.
    pub(super) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let permit = self.permits.clone().acquire_owned().await.map_err(io::Error::other)?;
        let running = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(permit);
            done
        });
        AbortOnDropHandle::new(running).await.map_err(io::Error::other)
    }
}
