use super::*;
use crate::engine::{Error, ModelCard, OutputStream, Readiness, Request};
use crate::plane::contract::instance;
use crate::plane::{KvCache, Role};
use bytes::Bytes;
use kvbm::Fingerprint;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use tokio::sync::Notify;
use tokio::time::sleep;

/// Prefixes, of which some are in a store.
#[derive(Default)]
struct Listed {
    prefixes: Vec<Vec<SequenceHash>>,
    stored: BTreeSet<SequenceHash>,
}

impl Prefixes for Listed {
    fn used_again(&self) -> BoxFuture<'_, Box<dyn Iterator<Item = Vec<SequenceHash>> + Send>> {
        let prefixes = self.prefixes.clone();
        Box::pin(async { Box::new(prefixes.into_iter()) as _ })
    }

    fn is_stored(&self, prefix: &[SequenceHash]) -> bool {
        prefix.iter().all(|block| self.stored.contains(block))
    }
}

/// A worker that copies, in 10 ms, what it does not have, or answers with an error.
#[derive(Default)]
struct Copying {
    answers: Mutex<Vec<PrefetchError>>,
    orders: Mutex<Vec<usize>>,
    held: Mutex<BTreeSet<SequenceHash>>,
}

impl Engine for Copying {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        unreachable!("no request is sent")
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        Vec::new()
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn prefetch(&self, copy: PrefixCopy) -> BoxFuture<'_, Result<Prefetched, PrefetchError>> {
        Box::pin(async move {
            assert_eq!(copy.peer, Some(source()));
            self.orders.lock().push(copy.blocks.len());
            if let Some(error) = self.answers.lock().pop() {
                return Err(error);
            }
            sleep(Duration::from_millis(10)).await;
            let mut held = self.held.lock();
            let blocks = copy.blocks.iter().filter(|block| held.insert(**block)).count();
            Ok(Prefetched { blocks: blocks as u32, bytes: blocks as u64 * 100 })
        })
    }
}

fn source() -> PeerMemory {
    PeerMemory(Bytes::from_static(b"w1"))
}

/// Blocks whose hashes begin with these bytes.
fn blocks(of: u8, range: std::ops::Range<u8>) -> Vec<SequenceHash> {
    let block = |n| {
        let mut bytes = [0; 16];
        bytes[..2].copy_from_slice(&[of, n]);
        SequenceHash::from_bytes(bytes)
    };
    range.map(block).collect()
}

fn with_memory(id: u64, host_blocks: u64) -> Instance {
    let kv_cache = KvCache { fingerprint: Fingerprint::from_bytes([1; 32]), blocks: 64, host_blocks, device: None };
    Instance { kv_cache: Some(kv_cache), ..instance(id, 1) }
}

/// Copies of these prefixes from a worker to workers with a G2 of so many blocks each, in this order.
fn copies(listed: Listed, to: &[(&Arc<Copying>, u64)]) -> DrainCopies {
    let own = with_memory(1, 64);
    let receiver = |(engine, host_blocks): &(&Arc<Copying>, u64)| {
        let others = [(Arc::new(with_memory(2, *host_blocks)), Arc::clone(engine) as Arc<dyn Engine>)];
        receivers(&own, &others, &[]).pop().unwrap()
    };
    DrainCopies::of(Box::new(listed), source(), to.iter().map(receiver).collect())
}

fn listed(prefixes: &[Vec<SequenceHash>]) -> Listed {
    Listed { prefixes: prefixes.to_vec(), ..Listed::default() }
}

#[tokio::test(start_paused = true)]
async fn prefixes_are_spread_and_one_that_continues_another_follows_it() {
    let (a, b) = (Arc::<Copying>::default(), Arc::<Copying>::default());
    let (first, second) = (blocks(1, 0..8), blocks(2, 0..8));
    let longer = [first.clone(), blocks(3, 0..4)].concat();
    let branch = [first[..2].to_vec(), blocks(4, 0..8)].concat();
    let mut copies = copies(listed(&[first, second, longer, branch]), &[(&a, 400), (&b, 400)]);
    copies.run(std::future::ready(())).await;
    assert_eq!((&*a.orders.lock(), &*b.orders.lock()), (&vec![8, 12], &vec![8, 10]), "the branch shares a fifth only");
    assert_eq!(copies.copied(), Copies { prefixes: 4, blocks: 8 + 8 + 4 + 10, bytes: 3000 });
}

#[tokio::test(start_paused = true)]
async fn what_all_workers_can_load_from_a_store_is_not_copied() {
    let engine = Arc::<Copying>::default();
    let stored = blocks(1, 0..4).into_iter().collect();
    let prefixes = vec![blocks(1, 0..4), blocks(1, 0..5)];
    let mut copies = copies(Listed { prefixes, stored }, &[(&engine, 400)]);
    copies.run(std::future::ready(())).await;
    assert_eq!(*engine.orders.lock(), [5]);
}

#[tokio::test(start_paused = true)]
async fn a_drain_takes_at_most_a_quarter_of_the_memory_of_a_worker() {
    let engine = Arc::<Copying>::default();
    let prefixes = [1, 2, 3].map(|of| blocks(of, 0..6));
    let mut copies = copies(listed(&prefixes), &[(&engine, 40)]);
    copies.run(std::future::ready(())).await;
    assert_eq!(*engine.orders.lock(), [6, 6], "a quarter is ten blocks");
    let engine = Arc::<Copying>::default();
    let mut copies = self::copies(listed(&[blocks(1, 0..60)]), &[(&engine, 40)]);
    copies.run(std::future::ready(())).await;
    assert_eq!(*engine.orders.lock(), [10], "of a longer prefix its beginning");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_declines_is_asked_again_for_a_while_and_others_meanwhile() {
    let (busy, idle) = (Arc::<Copying>::default(), Arc::<Copying>::default());
    *busy.answers.lock() = vec![PrefetchError::Busy; 2];
    let mut both = copies(listed(&[blocks(1, 0..4)]), &[(&busy, 400), (&idle, 400)]);
    both.run(std::future::ready(())).await;
    assert_eq!((busy.orders.lock().len(), idle.orders.lock().len()), (1, 1));
    let mut only = copies(listed(&[blocks(1, 0..4)]), &[(&busy, 400)]);
    only.run(std::future::ready(())).await;
    assert_eq!(only.copied().blocks, 4, "it copies once its queue is empty");
    *busy.answers.lock() = vec![PrefetchError::Busy; 100];
    let began = Instant::now();
    let mut never = copies(listed(&[blocks(2, 0..4), blocks(3, 0..4)]), &[(&busy, 400)]);
    never.run(std::future::ready(())).await;
    assert_eq!((never.copied(), began.elapsed()), (Copies::default(), PAUSE * (MAX_DECLINED - 1)));
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_cannot_copy_is_asked_once_and_its_prefix_goes_elsewhere() {
    let (older, other) = (Arc::<Copying>::default(), Arc::<Copying>::default());
    *older.answers.lock() = vec![PrefetchError::Unsupported];
    let prefixes = [1, 2].map(|of| blocks(of, 0..4));
    let mut copies = copies(listed(&prefixes), &[(&older, 400), (&other, 400)]);
    copies.run(std::future::ready(())).await;
    assert_eq!((older.orders.lock().len(), copies.copied().blocks), (1, 8));
}

/// A worker in a process that is frozen: a copy fails two seconds after the process was checked.
#[derive(Default)]
struct Frozen(Notify);

impl Engine for Frozen {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        unreachable!("no request is sent")
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        Vec::new()
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }

    fn prefetch(&self, _: PrefixCopy) -> BoxFuture<'_, Result<Prefetched, PrefetchError>> {
        Box::pin(async {
            self.0.notified().await;
            sleep(Duration::from_secs(2)).await;
            Err(PrefetchError::Failed("it does not answer".to_owned()))
        })
    }

    fn check_process(&self) {
        self.0.notify_one();
    }
}

#[tokio::test(start_paused = true)]
async fn the_prefix_of_a_frozen_worker_goes_to_another_one_long_before_the_timeout() {
    let (frozen, other) = (Arc::new(Frozen::default()), Arc::<Copying>::default());
    let mut copies = copies(listed(&[blocks(1, 0..4), blocks(2, 0..4)]), &[(&other, 400)]);
    let instance = Arc::new(with_memory(3, 400));
    copies.receivers.splice(0..0, receivers(&with_memory(1, 64), &[(instance, frozen as _)], &[]));
    let began = Instant::now();
    copies.run(std::future::ready(())).await;
    assert_eq!(copies.copied().blocks, 8);
    assert!(began.elapsed() < COPY_TIMEOUT / 2, "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn what_running_requests_add_is_copied_when_they_have_ended() {
    struct Growing(Mutex<Vec<Vec<SequenceHash>>>);
    impl Prefixes for Growing {
        fn used_again(&self) -> BoxFuture<'_, Box<dyn Iterator<Item = Vec<SequenceHash>> + Send>> {
            let now = self.0.lock().pop();
            Box::pin(async { Box::new(now.into_iter()) as _ })
        }

        fn is_stored(&self, _: &[SequenceHash]) -> bool {
            false
        }
    }
    let engine = Arc::<Copying>::default();
    let mut copies = copies(Listed::default(), &[(&engine, 400)]);
    copies.prefixes = Box::new(Growing(Mutex::new(vec![blocks(1, 0..9), blocks(1, 0..6)])));
    copies.run(sleep(Duration::from_secs(3))).await;
    assert_eq!((&*engine.orders.lock(), copies.copied().blocks), (&vec![6, 9], 9));
}

#[test]
fn only_workers_that_can_use_the_blocks_get_copies() {
    let own = with_memory(1, 64);
    let names = |others: &[Instance], leaving: &[u64]| -> BTreeSet<u64> {
        let engine = || Arc::<Copying>::default() as Arc<dyn Engine>;
        let others: Vec<_> = others.iter().map(|other| (Arc::new(other.clone()), engine())).collect();
        let leaving: Vec<_> = leaving.iter().copied().map(WorkerId).collect();
        receivers(&own, &others, &leaving).into_iter().map(|receiver| receiver.worker.0).collect()
    };
    let other_model = Instance {
        model: Arc::new(ModelCard { id: "other".into(), ..ModelCard::clone(&own.model) }),
        ..with_memory(3, 64)
    };
    let other_cache = KvCache { fingerprint: Fingerprint::from_bytes([2; 32]), ..own.kv_cache.unwrap() };
    let other_fingerprint = Instance { kv_cache: Some(other_cache), ..with_memory(4, 64) };
    let unknown = Instance { kv_cache: None, ..with_memory(5, 64) };
    let all = [own.clone(), with_memory(2, 64), other_model, other_fingerprint, unknown, with_memory(6, 0)];
    assert_eq!(names(&all, &[]), BTreeSet::from([2]));
    assert_eq!(names(&[with_memory(2, 64), with_memory(7, 64)], &[7]), BTreeSet::from([2]), "it ends too");
    let prefill = Instance { role: Role::Prefill, ..with_memory(8, 64) };
    assert_eq!(names(&[with_memory(2, 64), prefill.clone()], &[]), BTreeSet::from([2]));
    assert_eq!(names(&[prefill], &[]), BTreeSet::from([8]), "another role is better than none");
}
