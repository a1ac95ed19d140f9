//! Blocks that are handed over while the prompt is computed, and what goes wrong with that.

use super::*;
use crate::engine::{OutputStream, Request};
use crate::handoff::{HandoffProgress, HandoffTicket, Progress};
use crate::llama::HandoffLimits;
use kvbm::{Faults, Faulty, SequenceHash};
use std::time::Duration;
use tokio::time::sleep;

const PREFILL: WorkerId = WorkerId(1);
const BLOCKS: usize = 24;
const RECEIVED: &str = "blockyard_worker_handoffs_received_total";
const SENT: &str = "blockyard_worker_handoffs_sent_total";
const BYTES: &str = "blockyard_worker_handoff_received_bytes_total";

/// A decode worker beside a prefill worker whose blocks are there, and whose progress the test decides.
struct Pair {
    _prefill: Harness,
    decode: Harness,
    peers: Peers,
    prompt: Vec<u32>,
    alone: Vec<u32>,
    ticket: HandoffTicket,
}

impl Pair {
    async fn new(seed: u64, shape: Shape) -> (Self, HandoffProgress) {
        let (prompt, peers) = (Rng(seed).tokens(16 * BLOCKS as u64 + 1), Peers::default());
        let prefill = Harness::new(Shape { worker: PREFILL.0, peers: peers.clone(), ..Shape::default() });
        let alone = prefill.run(&prompt, 5).await.ids;
        let decode = Harness::new(Shape { worker: 2, peers: peers.clone(), ..shape });
        let (ticket, progress) = peers.begin(PREFILL);
        (Self { _prefill: prefill, decode, peers, prompt, alone, ticket }, progress)
    }

    async fn resume(&self) -> OutputStream {
        let work = Work::Resume(self.ticket.encode());
        let request = request(&*self.decode.engine, &self.prompt, 5);
        self.decode.engine.generate(Request { work, ..request }).await.unwrap()
    }

    fn hashes(&self) -> Vec<SequenceHash> {
        let card = Arc::clone(runtime().card());
        ChainKey::root(&Domain::shared(), &card.identity, None).hashes(&self.prompt, card.block_size)
    }

    /// Waits until this many leading blocks are in G1 of the decode worker.
    async fn arrived(&self, blocks: usize) {
        let hashes = self.hashes();
        let arrived = async {
            while self.decode.manager.hold(&hashes).len() < blocks {
                sleep(Duration::from_millis(1)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(1), arrived).await.expect("the blocks arrive");
    }

    /// Repeats what advances the progress until this many blocks have arrived: a load that does not begin in time is
    /// given up until the next progress.
    async fn advance(&self, progress: &HandoffProgress, blocks: usize) {
        progress.computed(blocks);
        self.arrived(blocks).await;
    }

    fn bytes(&self, phase: &str) -> usize {
        self.decode.count(BYTES, phase) as usize / runtime().block_bytes()
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_arrive_while_the_prompt_is_computed() {
    let (pair, progress) = Pair::new(41, Shape::default()).await;
    let stream = pair.resume().await;
    for blocks in [3, 10, BLOCKS - 4] {
        pair.advance(&progress, blocks).await;
        // It is no work of this worker yet.
        let is_idle = |load: &crate::plane::Load| (load.waiting, load.waiting_tokens, load.running) == (0, 0, 0);
        pair.decode.engine.load().wait_for(is_idle).await.unwrap();
    }
    progress.complete(vec![(Level::G1, 16)]);
    let answer = collect(stream).await.unwrap();
    assert_eq!(answer.ids, pair.alone);
    let report = answer.prompt.unwrap();
    assert_eq!((report.handed_over, report.cached_tokens()), (16 * BLOCKS as u32, 16));
    assert_eq!((pair.bytes("prefill"), pair.bytes("after_prefill")), (BLOCKS - 4, 4));
    assert_eq!(pair.decode.count(RECEIVED, "complete"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_the_prefill_worker_computed_does_not_count_as_cached() {
    for found in [0, 48] {
        let (pair, progress) = Pair::new(42, Shape::default()).await;
        // The blocks are here before, as if they came through a shared tier.
        pair.decode.run(&pair.prompt, 1).await;
        progress.complete(vec![(Level::G2, found)]);
        let report = collect(pair.resume().await).await.unwrap().prompt.unwrap();
        assert_eq!((report.handed_over, report.cached_tokens()), (0, found));
        assert_eq!(report.computed as usize, pair.prompt.len() - found as usize);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_that_fails_is_finished_by_the_decode_worker() {
    for arrived in [0, 7, BLOCKS - 1] {
        let (pair, progress) = Pair::new(43, Shape::default()).await;
        let stream = pair.resume().await;
        pair.advance(&progress, arrived).await;
        drop(progress);
        let answer = collect(stream).await.unwrap();
        assert_eq!(answer.ids, pair.alone);
        let report = answer.prompt.unwrap();
        assert_eq!((report.handed_over as usize, report.cached_tokens()), (16 * arrived, 0));
        assert_eq!(pair.decode.count(RECEIVED, "failed"), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_without_progress_is_not_waited_for() {
    let handoff = HandoffLimits { min_idle: Duration::from_secs(1), ..HandoffLimits::default() };
    let shape = Shape { engine: Settings { handoff, ..Settings::default() }, ..Shape::default() };
    let (pair, progress) = Pair::new(44, shape).await;
    let stream = pair.resume().await;
    pair.advance(&progress, 7).await;
    let answer = collect(stream).await.unwrap();
    assert_eq!((answer.ids, answer.prompt.unwrap().handed_over), (pair.alone.clone(), 16 * 7));
    assert_eq!(pair.decode.count(RECEIVED, "stalled"), 1);
    drop(progress);
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_are_corrupt_or_missing_are_computed() {
    let faults = [
        Faults { corrupt: 0.3, ..Faults::default() },
        Faults { wrong: 0.3, ..Faults::default() },
        Faults { short: 0.3, ..Faults::default() },
        Faults { lost: 0.3, ..Faults::default() },
        Faults { error: 1.0, ..Faults::default() },
        Faults { hang: 0.3, ..Faults::default() },
    ];
    for (seed, faults) in faults.into_iter().enumerate() {
        let case = format!("{faults:?}");
        let (pair, progress) = Pair::new(45, Shape::default()).await;
        let memory = pair.peers.find_local(PREFILL).unwrap();
        pair.peers.insert(PREFILL, Arc::new(Faulty::new(memory, seed as u64, faults)));
        let stream = pair.resume().await;
        for blocks in 1..BLOCKS {
            progress.computed(blocks);
            sleep(Duration::from_millis(1)).await;
        }
        progress.complete(Vec::new());
        let answer = tokio::time::timeout(Duration::from_mins(1), collect(stream)).await.expect("it ends").unwrap();
        assert_eq!(answer.ids, pair.alone, "{case}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_that_is_cancelled_leaves_nothing_behind() {
    let (pair, progress) = Pair::new(46, Shape::default()).await;
    let stream = pair.resume().await;
    pair.advance(&progress, 7).await;
    drop(stream);
    while pair.decode.count(RECEIVED, "cancelled") == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!(pair.decode.manager.available(), pair.decode.manager.capacity());
    progress.computed(9);
    assert_eq!(pair.bytes("prefill"), 7);
    drop(progress);
    assert_eq!(pair.peers.open_handoffs(), 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_count_that_arrive_before_their_request_is_cancelled() {
    let handoff = HandoffLimits { min_idle: Duration::from_hours(1), ..HandoffLimits::default() };
    let shape = Shape { engine: Settings { handoff, ..Settings::default() }, ..Shape::default() };
    let (pair, progress) = Pair::new(48, shape).await;
    let memory = pair.peers.find_local(PREFILL).unwrap();
    // With this seed the first blocks arrive, and those behind a block for which the load waits.
    pair.peers.insert(PREFILL, Arc::new(Faulty::new(memory, 1, Faults { hang: 0.1, ..Faults::default() })));
    let stream = pair.resume().await;
    progress.computed(BLOCKS - 1);
    pair.arrived(2).await;
    let (hashes, manager) = (pair.hashes(), &pair.decode.manager);
    let arrived = async {
        loop {
            let arrived = hashes.iter().filter(|hash| manager.next_cached(&[**hash]).is_some()).count();
            if arrived > manager.hold(&hashes).len() {
                return arrived;
            }
            sleep(Duration::from_millis(1)).await;
        }
    };
    let arrived = tokio::time::timeout(Duration::from_mins(1), arrived).await.expect("a block behind a missing one");
    assert_eq!(pair.bytes("prefill"), 0, "the load has not ended");
    drop(stream);
    while pair.decode.count(RECEIVED, "cancelled") == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    assert!((arrived..BLOCKS - 1).contains(&pair.bytes("prefill")), "{} of {arrived} blocks", pair.bytes("prefill"));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_decode_worker_loads_the_blocks_when_it_has_room() {
    unless_stalled(async || (tokens_computed_by_a_full_decode_worker().await <= 16).then_some(())).await;
}

/// The prompt tokens that a decode worker computes which has no room for blocks until the prefill is complete.
async fn tokens_computed_by_a_full_decode_worker() -> u64 {
    let shape = Shape { g1: BLOCKS + 4, engine: keeps_unread(), ..Shape::default() };
    let (pair, progress) = Pair::new(47, shape).await;
    pair.decode.assume_slow_prefill();
    // It takes nearly all memory until it is dropped.
    let mut other =
        pair.decode.engine.generate(request(&*pair.decode.engine, &Rng(5).tokens(16 * 20), 400)).await.unwrap();
    other.next().await.unwrap().unwrap();
    let stream = pair.resume().await;
    for blocks in [8, 16] {
        progress.computed(blocks);
        sleep(Duration::from_millis(20)).await;
    }
    progress.complete(Vec::new());
    pair.decode.engine.load().wait_for(|load| load.waiting == 1).await.unwrap();
    let computed = pair.decode.count("blockyard_worker_prompt_tokens_computed_total", "w");
    drop(other);
    let answer = collect(stream).await.unwrap();
    assert_eq!(answer.ids, pair.alone);
    pair.decode.count("blockyard_worker_prompt_tokens_computed_total", "w") - computed
}

/// Starts a prefill and waits for its end.
async fn prefill(harness: &Harness, prompt: &[u32]) -> OutputStream {
    let prefill_request = Request { work: Work::Prefill, ..request(&*harness.engine, prompt, 1) };
    let mut stream = harness.engine.generate(prefill_request).await.unwrap();
    assert!(matches!(stream.next().await, Some(Ok(Output::Handoff(_)))));
    let end = tokio::time::timeout(Duration::from_mins(1), stream.next()).await.expect("the prompt is computed");
    assert!(matches!(end, Some(Ok(Output::Prefilled))));
    stream
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_no_decode_worker_fetches_do_not_stop_prefill() {
    let peers = Peers::default();
    let harness = Harness::new(Shape { g1: 20, peers: peers.clone(), ..Shape::default() });
    let mut kept = Vec::new();
    for seed in 0..4 {
        // Two of them fit.
        kept.push(prefill(&harness, &Rng(seed).tokens(16 * 9 + 1)).await);
    }
    assert!(harness.count(SENT, "reclaimed") >= 2);
    assert_eq!(peers.open_handoffs(), 4, "the decode workers may still ask");
    drop(kept);
    while peers.open_handoffs() > 0 || harness.manager.available() < harness.manager.capacity() {
        sleep(Duration::from_millis(1)).await;
    }
    let ends = harness.count(SENT, "reclaimed") + harness.count(SENT, "released");
    assert_eq!(ends, 4, "each is counted once");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_lease_of_a_handoff_ends() {
    let handoff = HandoffLimits { lease: Duration::from_millis(50), ..HandoffLimits::default() };
    let harness = Harness::new(Shape { engine: Settings { handoff, ..Settings::default() }, ..Shape::default() });
    let stream = prefill(&harness, &Rng(1).tokens(100)).await;
    while harness.manager.available() < harness.manager.capacity() {
        sleep(Duration::from_millis(1)).await;
    }
    drop(stream);
    sleep(Duration::from_millis(10)).await;
    assert_eq!((harness.count(SENT, "expired"), harness.count(SENT, "released")), (1, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_prefill_ends_its_handoff() {
    let peers = Peers::default();
    let harness = Harness::new(Shape { chunk: 16, peers: peers.clone(), ..Shape::default() });
    let prefill_request = Request { work: Work::Prefill, ..request(&*harness.engine, &Rng(1).tokens(5000), 1) };
    let mut stream = harness.engine.generate(prefill_request).await.unwrap();
    let Some(Ok(Output::Handoff(handoff))) = stream.next().await else { panic!("a prefill begins with a handoff") };
    let blocks = peers.find(&HandoffTicket::decode(&handoff).unwrap()).unwrap();
    drop(stream);
    let last = blocks.progress.collect::<Vec<_>>().await.pop();
    assert!(last.is_some_and(|last| matches!(last, Progress::Computing { blocks } if blocks < 300)));
    while harness.manager.available() < harness.manager.capacity() {
        sleep(Duration::from_millis(1)).await;
    }
    assert_eq!((peers.open_handoffs(), harness.count(SENT, "cancelled")), (0, 1));
}
