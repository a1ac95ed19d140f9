//! Work that blocks a thread: copies and checksums of many blocks.
//!
//! It runs on the blocking threads of the runtime. A deterministic simulation has one thread: there the work is a task
//! of the runtime like any other, so that the order of everything follows from the seed.
//!
//! Not here: files and processes, for which there are no such simulations.

use std::cell::Cell;
use std::marker::PhantomData;
use tokio::task::JoinHandle;

thread_local! {
    static INLINE: Cell<bool> = const { Cell::new(false) };
}

/// Runs the blocking work of this thread's runtime as tasks on this thread, until it is dropped.
#[must_use = "dropping it moves blocking work to other threads again"]
pub struct Inline {
    before: bool,
    /// The flag belongs to the thread.
    _not_send: PhantomData<*const ()>,
}

impl Inline {
    /// For a runtime with the flavor `current_thread`, on the thread that runs it.
    pub fn on_this_thread() -> Self {
        Self { before: INLINE.replace(true), _not_send: PhantomData }
    }
}

impl Drop for Inline {
    fn drop(&mut self) {
        INLINE.set(self.before);
    }
}

/// Runs `work` where it may block.
pub(crate) fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
    if INLINE.get() { tokio::spawn(async { work() }) } else { tokio::task::spawn_blocking(work) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    #[tokio::test]
    async fn inline_work_runs_on_the_thread_of_the_runtime() {
        let here = thread::current().id();
        let work = || thread::current().id();
        assert_ne!(spawn(work).await.unwrap(), here);
        let inline = Inline::on_this_thread();
        assert_eq!(spawn(work).await.unwrap(), here);
        drop(inline);
        assert_ne!(spawn(work).await.unwrap(), here);
    }
}
