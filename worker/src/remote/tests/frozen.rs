//! Processes that are frozen, or do not answer for another reason.

use super::*;
use crate::engine::{PrefetchError, PrefixCopy};
use std::sync::atomic::AtomicBool;
use std::thread::{self, JoinHandle};
use tokio::sync::{Notify, oneshot};

/// The freeze of an engine that generates one token, and blocks the thread of its process when it is polled again,
/// until the freeze is over.
#[derive(Clone, Default)]
struct Freeze {
    has_begun: Arc<AtomicBool>,
    is_over: Arc<AtomicBool>,
}

impl Freeze {
    fn engine(&self) -> Arc<dyn Engine> {
        let freeze = self.clone();
        Arc::new(Streams(move || {
            let tokens = stream::unfold((freeze.clone(), false), async |(freeze, generated)| {
                // The first token is sent before the second blocks.
                tokio::time::sleep(Duration::from_millis(20)).await;
                while generated && !freeze.is_over.load(Ordering::SeqCst) {
                    freeze.has_begun.store(true, Ordering::SeqCst);
                    thread::sleep(Duration::from_millis(5));
                }
                let token = Output::Tokens(Tokens { ids: vec![1], ..Tokens::default() });
                Some((Ok(token), (freeze, true)))
            });
            tokens.boxed()
        }))
    }
}

/// A thread that serves, as a process of its own does, and is frozen by the first request.
struct Process {
    remote: RemoteEngine,
    freeze: Freeze,
    stop: Arc<Notify>,
    thread: Option<JoinHandle<()>>,
}

impl Process {
    async fn start() -> Self {
        let (freeze, stop) = (Freeze::default(), Arc::new(Notify::new()));
        let (sender, receiver) = oneshot::channel();
        let thread = thread::spawn({
            let (engine, stop) = (freeze.engine(), Arc::clone(&stop));
            move || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                runtime.block_on(async {
                    let pair = Pair::open(engine).await;
                    sender.send((pair.instance.clone(), pair.address.clone())).ok().unwrap();
                    stop.notified().await;
                });
            }
        });
        let (instance, address) = receiver.await.unwrap();
        Self { remote: RemoteEngine::new(&instance, &address, None), freeze, stop, thread: Some(thread) }
    }

    /// A stream of which the first output has arrived. The process is frozen.
    async fn stream(&self) -> OutputStream {
        let mut outputs = self.remote.generate(request(&self.remote, &[1], 9)).await.unwrap();
        assert!(outputs.next().await.unwrap().is_ok());
        until("the process is frozen", || self.freeze.has_begun.load(Ordering::SeqCst)).await;
        outputs
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.stop.notify_one();
        self.freeze.is_over.store(true, Ordering::SeqCst);
        let joined = self.thread.take().map(JoinHandle::join);
        assert!(thread::panicking() || joined.is_some_and(|joined| joined.is_ok()));
    }
}

fn is_unresponsive<T>(result: &Result<T, Error>) -> bool {
    matches!(result, Err(Error::Unresponsive(text)) if text.contains("w7"))
}

#[tokio::test]
async fn a_process_that_answers_nothing_is_unresponsive_to_all_of_its_requests() {
    let process = Process::start().await;
    let mut outputs = process.stream().await;
    // From here on seconds pass at once, because nothing arrives.
    tokio::time::pause();
    let (streamed, sent) = tokio::join!(outputs.next(), process.remote.generate(request(&process.remote, &[1], 9)));
    assert!(is_unresponsive(&streamed.unwrap()));
    assert!(is_unresponsive(&sent));
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_process_that_left_fail_if_it_does_not_answer() {
    let process = Process::start().await;
    let mut outputs = process.stream().await;
    process.remote.check_process();
    assert!(is_unresponsive(&outputs.next().await.unwrap()));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_to_a_process_that_does_not_answer_fails_when_it_is_checked() {
    let process = Process::start().await;
    let _outputs = process.stream().await;
    let copy = PrefixCopy { blocks: [].into(), peer: None };
    let (copied, ()) = tokio::join!(process.remote.prefetch(copy), async {
        // The request is on its way first.
        tokio::time::sleep(Duration::from_millis(100)).await;
        process.remote.check_process();
    });
    assert!(matches!(copied, Err(PrefetchError::Failed(_))));
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_of_a_process_that_left_go_on_if_it_answers() {
    let pair = Pair::open(Endless::default().engine()).await;
    let mut outputs = pair.remote.generate(request(&pair.remote, &[1], 1)).await.unwrap();
    pair.remote.check_process();
    let until = tokio::time::Instant::now() + Duration::from_secs(3);
    while tokio::time::Instant::now() < until {
        assert!(outputs.next().await.unwrap().is_ok());
    }
}
