//! Polls a future again at once when it wakes itself.
//!
//! hyper wakes the task of a connection twice while it polls a request with a body: the handler asks for the body,
//! and gets it. A task that wakes itself is put into the queue of its thread, and another thread is woken to steal it,
//! which takes longer than the rest of the request.

use futures::task::{ArcWake, AtomicWaker, waker};
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, Waker};

/// Polls in a row. A future that wakes itself more often yields to other tasks.
const MAX_POLLS: usize = 8;

/// A future that is polled again when it wakes itself.
pub(super) struct Repoll<F> {
    future: Pin<Box<F>>,
    shared: Arc<Shared>,
    /// Sets the flags of `shared`. The future is polled with it.
    waker: Waker,
}

struct Shared {
    /// The future is being polled.
    is_polled: AtomicBool,
    /// It was woken since its last poll began.
    is_woken: AtomicBool,
    task: AtomicWaker,
}

impl<F> Repoll<F> {
    pub(super) fn new(future: F) -> Self {
        let shared = Arc::new(Shared {
            is_polled: AtomicBool::new(false),
            is_woken: AtomicBool::new(false),
            task: AtomicWaker::new(),
        });
        Self { future: Box::pin(future), waker: waker(Arc::clone(&shared)), shared }
    }

    /// The future.
    pub(super) fn inner(&mut self) -> Pin<&mut F> {
        self.future.as_mut()
    }
}

impl<F: Future> Future for Repoll<F> {
    type Output = F::Output;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<F::Output> {
        let Self { future, shared, waker } = &mut *self;
        shared.task.register(context.waker());
        for _ in 0..MAX_POLLS {
            // A swap, so that the poll sees what was done before a wake-up that is taken back here.
            shared.is_woken.swap(false, Ordering::SeqCst);
            shared.is_polled.store(true, Ordering::SeqCst);
            let outcome = future.as_mut().poll(&mut Context::from_waker(waker));
            shared.is_polled.store(false, Ordering::SeqCst);
            if outcome.is_ready() || !shared.is_woken.load(Ordering::SeqCst) {
                return outcome;
            }
        }
        context.waker().wake_by_ref();
        Poll::Pending
    }
}

impl ArcWake for Shared {
    /// Either the poll that runs sees the first flag, or this sees that none runs.
    fn wake_by_ref(this: &Arc<Self>) {
        this.is_woken.store(true, Ordering::SeqCst);
        if !this.is_polled.load(Ordering::SeqCst) {
            this.task.wake();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::future::poll_fn;
    use std::sync::atomic::AtomicUsize;
    use std::time::Duration;

    /// Counts the wake-ups of a task.
    #[derive(Default)]
    struct Wakes(AtomicUsize);

    impl ArcWake for Wakes {
        fn wake_by_ref(this: &Arc<Self>) {
            this.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    /// Polls a future that wakes itself `times` times, once. Returns whether it was ready, and the task's wake-ups.
    fn polled(times: usize) -> (bool, usize) {
        let mut left = times;
        let mut future = Repoll::new(poll_fn(move |context| {
            if left == 0 {
                return Poll::Ready(());
            }
            left -= 1;
            context.waker().wake_by_ref();
            Poll::Pending
        }));
        let wakes = Arc::new(Wakes::default());
        let is_ready = Pin::new(&mut future).poll(&mut Context::from_waker(&waker(Arc::clone(&wakes)))).is_ready();
        (is_ready, wakes.0.load(Ordering::SeqCst))
    }

    #[test]
    fn a_future_that_wakes_itself_is_polled_again_up_to_a_limit() {
        assert_eq!(polled(0), (true, 0));
        assert_eq!(polled(MAX_POLLS - 1), (true, 0));
        assert_eq!(polled(MAX_POLLS), (false, 1), "the task goes on later");
    }

    #[tokio::test]
    async fn wakes_from_outside_reach_the_task() {
        Repoll::new(tokio::time::sleep(Duration::from_millis(1))).await;
        let (sender, mut receiver) = tokio::sync::mpsc::channel(1);
        let thread = std::thread::spawn(move || (0..10_000).for_each(|number| sender.blocking_send(number).unwrap()));
        for expected in 0..10_000 {
            let received = Repoll::new(receiver.recv());
            assert_eq!(received.await, Some(expected));
        }
        thread.join().unwrap();
    }
}
