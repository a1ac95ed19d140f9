//! Copies of prefixes that a router has a worker of another process make.

use super::*;
use crate::engine::{PeerMemory, PrefetchError, Prefetched, PrefixCopy};
use kvbm::SequenceHash;
use parking_lot::Mutex;

/// Answers each copy in this way, or never.
struct Copies {
    answer: Option<Result<Prefetched, PrefetchError>>,
    asked: Mutex<Vec<PrefixCopy>>,
    running: Arc<AtomicUsize>,
}

impl Copies {
    fn answering(answer: Option<Result<Prefetched, PrefetchError>>) -> Arc<Self> {
        Arc::new(Self { answer, asked: Mutex::default(), running: Arc::default() })
    }
}

impl Engine for Copies {
    fn generate(&self, _request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        async { Err(Error::Failed("it only copies".to_owned())) }.boxed()
    }

    fn models(&self) -> Vec<Arc<crate::engine::ModelCard>> {
        vec![crate::plane::contract::instance(1, 1).model]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn prefetch(&self, copy: PrefixCopy) -> BoxFuture<'_, Result<Prefetched, PrefetchError>> {
        self.asked.lock().push(copy);
        self.running.fetch_add(1, Ordering::SeqCst);
        let (running, answer) = (Running(Arc::clone(&self.running)), self.answer.clone());
        async move {
            let _running = running;
            match answer {
                Some(answer) => answer,
                None => std::future::pending().await,
            }
        }
        .boxed()
    }
}

fn copy() -> PrefixCopy {
    let blocks: Vec<_> = (0..3).map(|n| SequenceHash::from_bytes([n; 16])).collect();
    PrefixCopy { blocks: blocks.into(), peer: Some(PeerMemory(Bytes::from_static(b"peer"))) }
}

#[tokio::test(flavor = "multi_thread")]
async fn the_order_and_the_answer_arrive_unchanged() {
    for answer in [
        Ok(Prefetched { blocks: 3, bytes: 1 << 40 }),
        Err(PrefetchError::Busy),
        Err(PrefetchError::Failed("for a reason".to_owned())),
    ] {
        let engine = Copies::answering(Some(answer.clone()));
        let pair = Pair::open(Arc::clone(&engine) as Arc<dyn Engine>).await;
        let alone = PrefixCopy { peer: None, ..copy() };
        for order in [copy(), alone] {
            assert_eq!(pair.remote.prefetch(order.clone()).await, answer);
            assert_eq!(engine.asked.lock().pop(), Some(order));
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_future_stops_the_copy() {
    let engine = Copies::answering(None);
    let pair = Pair::open(Arc::clone(&engine) as Arc<dyn Engine>).await;
    let copying = tokio::time::timeout(Duration::from_millis(200), pair.remote.prefetch(copy()));
    assert!(copying.await.is_err());
    assert_eq!(engine.asked.lock().len(), 1, "it had begun");
    until("the copy stops", || engine.running.load(Ordering::SeqCst) == 0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_needs_the_secret_and_a_registered_worker() {
    let (ours, other) = ("0123456789abcdef", "another-secret-of-16");
    let engine = Copies::answering(Some(Ok(Prefetched::default())));
    let pair = Pair::of(Arc::clone(&engine) as Arc<dyn Engine>, Some(secret(ours)), Some(secret(other))).await;
    let refused = pair.remote.prefetch(copy()).await;
    assert!(matches!(&refused, Err(PrefetchError::Failed(text)) if text.contains("status 401")), "{refused:?}");
    let mut pair = Pair::open(Arc::clone(&engine) as Arc<dyn Engine>).await;
    pair.lease = Lease::new(|| ());
    // As a worker of a version without the endpoint answers.
    assert_eq!(pair.remote.prefetch(copy()).await, Err(PrefetchError::Unsupported));
    assert!(engine.asked.lock().is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_that_never_copies_declines() {
    let pair = Pair::open(Endless::default().engine()).await;
    assert_eq!(pair.remote.prefetch(copy()).await, Err(PrefetchError::Unsupported));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_ends_when_its_worker_is_deregistered() {
    let engine = Copies::answering(None);
    let mut pair = Pair::open(Arc::clone(&engine) as Arc<dyn Engine>).await;
    let remote = RemoteEngine::new(&pair.instance, &pair.address, None);
    let copying = tokio::spawn(async move { remote.prefetch(copy()).await });
    until("the copy begins", || engine.running.load(Ordering::SeqCst) == 1).await;
    pair.lease = Lease::new(|| ());
    assert_eq!(copying.await.unwrap(), Err(PrefetchError::Busy));
    assert_eq!(engine.running.load(Ordering::SeqCst), 0);
}
