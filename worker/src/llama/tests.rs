//! The central property of the engine: an answer and its KV have the same bits, independent of the tier that the prefix
//! came from, of the chunks of the prompt, and of the other sequences in the batch.

use super::{Builtin, LlamaEngine, Memory, ModelSource, Runtime, Settings, UnreadOutput};
use crate::engine::contract::{self, collect, request};
use crate::engine::{Engine, FinishReason, Output, PromptReport, Work};
use crate::handoff::Peers;
use crate::metrics;
use crate::plane::WorkerId;
use futures::StreamExt;
use futures::future::join_all;
use kvbm::{
    BlockEvent, BlockManager, ChainKey, Clock, DiskTier, Domain, Epoch, EventLog, HostTier, Level, ObjectTier, Tier,
};
use kvbm::{Faults, Faulty, disk, object};
use std::path::Path;
use std::sync::{Arc, OnceLock};

mod scores;
mod soak;
mod terms;
mod unread;

/// The runtime of all tests: one copy of a small random model.
fn runtime() -> Arc<Runtime> {
    static RUNTIME: OnceLock<Arc<Runtime>> = OnceLock::new();
    let open = || {
        let data = std::env::temp_dir().join("blockyard-tests");
        Runtime::open(&ModelSource::Builtin(Builtin::Tiny), &data, 2, &|_, _| {}).unwrap()
    };
    Arc::clone(RUNTIME.get_or_init(open))
}

/// An engine with its memory, tiers and metrics.
struct Harness {
    engine: Arc<LlamaEngine>,
    manager: BlockManager,
    memory: Memory,
    host: Option<HostTier>,
    log: Arc<EventLog>,
    registry: prometheus::Registry,
}

struct Shape {
    worker: u64,
    chunk: usize,
    g1: usize,
    g2: usize,
    lower: Vec<Arc<dyn Tier>>,
    peers: Peers,
    clock: Clock,
    engine: Settings,
}

/// Settings under which an unread sequence stays in the batch and keeps its blocks.
fn keeps_unread() -> Settings {
    let never = std::time::Duration::from_hours(1);
    Settings { unread: UnreadOutput { pause_after: never, fail_after: never }, ..Settings::default() }
}

impl Default for Shape {
    fn default() -> Self {
        Self {
            worker: 1,
            chunk: 512,
            g1: 1200,
            g2: 0,
            lower: Vec::new(),
            peers: Peers::default(),
            clock: Clock::system(),
            engine: Settings::default(),
        }
    }
}

impl Harness {
    fn new(shape: Shape) -> Self {
        let runtime = runtime();
        let registry = prometheus::Registry::new();
        let kvbm_metrics = kvbm::Metrics::new(&registry).unwrap();
        let log = log();
        let memory = runtime.memory(shape.g1).unwrap();
        let device = memory.device();
        let host = (shape.g2 > 0).then(|| {
            let bytes = (shape.g2 * runtime.block_bytes()) as u64;
            let (block, clock) = (runtime.block_bytes(), shape.clock.clone());
            HostTier::with_clock(bytes, block, device.fingerprint(), Arc::clone(&log), &kvbm_metrics, clock)
        });
        let manager =
            BlockManager::with_clock(device, host.clone(), shape.lower, Arc::clone(&log), kvbm_metrics, shape.clock);
        let worker = WorkerId(shape.worker);
        shape.peers.insert(worker, manager.peer());
        let settings = Settings { max_prefill_chunk_tokens: shape.chunk, ..shape.engine };
        let metrics = metrics::Metrics::new(&registry).unwrap().of("w", "tiny");
        let engine =
            LlamaEngine::start(worker, runtime, memory.clone(), manager.clone(), shape.peers, metrics, settings);
        Self { engine, manager, memory, host, log, registry }
    }

    /// Records a prefill speed of one second per prompt token, so that loading is always quicker than computing. The
    /// weight of this measurement exceeds that of all prompts of a test.
    fn assume_slow_prefill(&self) {
        self.engine.stats.record_step(1 << 24, std::time::Duration::from_secs(1 << 24));
    }

    /// Steps so far, of one kind.
    fn steps(&self, kind: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "blockyard_worker_step_seconds").unwrap();
        let of_kind = |m: &&prometheus::proto::Metric| m.get_label().iter().any(|label| label.value() == kind);
        family.get_metric().iter().find(of_kind).map_or(0, |metric| metric.get_histogram().get_sample_count())
    }

    /// The sum of a counter over all series with this label value.
    fn count(&self, metric: &str, label: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == metric).unwrap();
        let labelled = |m: &&prometheus::proto::Metric| m.get_label().iter().any(|of| of.value() == label);
        family.get_metric().iter().filter(labelled).map(|metric| metric.get_counter().get_value() as u64).sum()
    }

    async fn run(&self, prompt: &[u32], tokens: u32) -> Answer {
        self.run_as(Work::Generate, prompt, tokens).await
    }

    async fn run_as(&self, work: Work, prompt: &[u32], tokens: u32) -> Answer {
        let mut request = request(&*self.engine, prompt, tokens);
        request.work = work;
        let all = collect(self.engine.generate(request).await.unwrap()).await.unwrap();
        let report = all.prompt.unwrap();
        let known = [prompt, &all.ids].concat();
        // The last generated token was never fed back, so its KV does not exist.
        let kv = self.kv(&known[..known.len() - 1]);
        Answer { ids: all.ids, kv, report }
    }

    /// The bytes of all full blocks of `tokens`, which must be in G1.
    fn kv(&self, tokens: &[u32]) -> Vec<u8> {
        let card = Arc::clone(runtime().card());
        let names = ChainKey::root(&Domain::shared(), &card.identity, None).hashes(tokens, card.block_size);
        let blocks = self.manager.lookup(&names);
        assert_eq!(blocks.len(), names.len(), "computed blocks are cached");
        let device = self.memory.device();
        let mut bytes = vec![0; device.block_bytes() * blocks.len()];
        for (block, into) in blocks.iter().zip(bytes.chunks_exact_mut(device.block_bytes())) {
            device.read(block.slot(), into);
        }
        bytes
    }

    /// Waits for offloads, and empties G1.
    async fn settle(&self) {
        self.manager.flush().await;
        // A finished sequence releases its blocks just after its last token is sent.
        while self.manager.allocate(self.manager.capacity()).is_none() {
            tokio::task::yield_now().await;
        }
    }

    /// Stops the engine and drops everything it holds, as the end of its process would.
    async fn close(self) {
        let mut load = self.engine.load();
        drop(self);
        while load.changed().await.is_ok() {}
    }
}

#[derive(PartialEq, Debug)]
struct Answer {
    ids: Vec<u32>,
    kv: Vec<u8>,
    report: PromptReport,
}

impl Answer {
    /// Compares an answer with the one that was computed alone, and the tier of its prefix with the expected one.
    fn must_equal(&self, want: &Self, case: &str, from: Option<Level>) {
        assert_eq!(self.ids, want.ids, "{case}: tokens");
        assert!(self.kv == want.kv, "{case}: KV bytes differ");
        if let Some(from) = from {
            let expect = want.report.computed as usize;
            let found: u32 = self.report.cached.iter().filter(|(level, _)| *level == from).map(|(_, n)| n).sum();
            // All that can be reused: full blocks, without the prompt's last token.
            let reusable = (expect - 1) / 16 * 16;
            assert!(
                found > 0 && found as usize <= reusable,
                "{case}: {found} of {reusable} from {from}: {:?}",
                self.report
            );
            assert_eq!(self.report.cached_tokens(), found, "{case}: all from one tier: {:?}", self.report);
        }
    }
}

/// A random number generator (`SplitMix64`), so that a failing case is identified by its seed.
struct Rng(u64);

impl Rng {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    fn random_tokens(&mut self, len: std::ops::Range<u64>) -> Vec<u32> {
        let len = self.within(len);
        self.tokens(len)
    }

    fn tokens(&mut self, len: u64) -> Vec<u32> {
        let vocabulary = runtime().card().vocabulary as u64;
        (0..len).map(|_| self.within(0..vocabulary) as u32).collect()
    }
}

/// A conversation of two compute: the second prompt repeats the first, what was answered, and something new.
struct Conversation {
    first: Vec<u32>,
    second: Vec<u32>,
    answers: [Answer; 2],
}

const ANSWER: u32 = 37;

impl Conversation {
    /// Draws one, and computes both compute alone, without any cache, in chunks of 512.
    async fn draw(rng: &mut Rng) -> Self {
        let len = rng.within(20..1100);
        let first = rng.tokens(len);
        let one = Harness::new(Shape::default()).run(&first, ANSWER).await;
        let more = rng.within(1..300);
        let second = [&first[..], &one.ids, &rng.tokens(more)].concat();
        let two = Harness::new(Shape::default()).run(&second, ANSWER).await;
        assert_eq!(two.report.cached_tokens(), 0, "the reference was computed");
        Self { first, second, answers: [one, two] }
    }

    /// Runs the second turn on `harness` and compares it with the reference.
    async fn second_on(&self, harness: &Harness, case: &str, from: Option<Level>) {
        harness.run(&self.second, ANSWER).await.must_equal(&self.answers[1], case, from);
    }
}

fn cases() -> impl Iterator<Item = (u64, Rng)> {
    // BLOCKYARD_CASES=100 for a night; a failure names its seed.
    let cases = std::env::var("BLOCKYARD_CASES").map_or(5, |n| n.parse().unwrap());
    (0..cases).map(|seed| (seed, Rng(seed)))
}

#[tokio::test(flavor = "multi_thread")]
async fn chunks_and_batch_mates_change_nothing() {
    for (seed, mut rng) in cases() {
        let talk = Conversation::draw(&mut rng).await;
        for chunk in [64, 128, 256, 1024] {
            let harness = Harness::new(Shape { chunk, ..Shape::default() });
            let mates: Vec<_> = (0..rng.within(0..8)).map(|_| rng.random_tokens(1..400)).collect();
            let case = format!("seed {seed}, chunk {chunk}, {} others", mates.len());
            let beside = join_all(mates.iter().map(|mate| harness.run(mate, 9)));
            let (answer, beside) = futures::join!(harness.run(&talk.second, ANSWER), beside);
            answer.must_equal(&talk.answers[1], &case, None);
            for (mate, answer) in mates.iter().zip(beside) {
                let alone = Harness::new(Shape::default()).run(mate, 9).await;
                answer.must_equal(&alone, &case, None);
            }
        }
    }
}

fn log() -> Arc<EventLog> {
    Arc::new(EventLog::new(Epoch(1)))
}

fn disk(folder: &Path) -> Arc<dyn Tier> {
    let settings = disk::Settings { capacity_bytes: 64 << 20, min_free_bytes: 0, ..disk::Settings::default() };
    DiskTier::open(folder, settings, log()).unwrap()
}

async fn shared(folder: &Path) -> Arc<dyn Tier> {
    let tier = ObjectTier::open_folder(folder, object::Settings::default(), log()).unwrap();
    tier.wait_until_ready().await;
    tier
}

/// One writer fills all tiers; then the same turn is answered from each of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_is_the_same_from_every_tier() {
    for (seed, mut rng) in cases() {
        let talk = Conversation::draw(&mut rng).await;
        let ssd = tempfile::tempdir().unwrap();
        let store = tempfile::tempdir().unwrap();
        let below = |lower| Harness::new(Shape { lower, ..Shape::default() });

        let log = disk(ssd.path());
        let writer = Harness::new(Shape {
            g2: 1200,
            lower: vec![Arc::clone(&log), shared(store.path()).await],
            ..Shape::default()
        });
        writer.run(&talk.first, ANSWER).await;
        talk.second_on(&writer, &format!("seed {seed}, g1"), Some(Level::G1)).await;
        writer.settle().await;
        talk.second_on(&writer, &format!("seed {seed}, g2"), Some(Level::G2)).await;
        talk.second_on(&below(vec![log]), &format!("seed {seed}, g3"), Some(Level::G3)).await;
        let other = shared(store.path()).await;
        talk.second_on(&below(vec![other]), &format!("seed {seed}, shared folder"), Some(Level::G4)).await;
        writer.close().await;
        let again = below(vec![disk(ssd.path())]);
        talk.second_on(&again, &format!("seed {seed}, g3 after a restart"), Some(Level::G3)).await;
    }
}

/// Blocks arrive late, in any order, corrupt or never: those that arrived in time are used, the others are computed,
/// and the answer is the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_partly_loaded_prefix_changes_nothing() {
    let late = std::time::Duration::ZERO..=std::time::Duration::from_millis(400);
    for (seed, mut rng) in cases() {
        let talk = Conversation::draw(&mut rng).await;
        let ssd = tempfile::tempdir().unwrap();
        let log = disk(ssd.path());
        let writer = Harness::new(Shape { lower: vec![Arc::clone(&log)], ..Shape::default() });
        writer.run(&talk.first, ANSWER).await;
        writer.settle().await;
        let faults = Faults { latency: late.clone(), lost: 0.1, corrupt: 0.1, hang: 0.1, ..Faults::default() };
        let faulty: Arc<dyn Tier> = Arc::new(Faulty::new(log, seed, faults));
        let reader = Harness::new(Shape { chunk: 64, lower: vec![faulty], ..Shape::default() });
        for round in 0..3 {
            let case = format!("seed {seed}, round {round}");
            let both = [talk.second_on(&reader, &case, None), talk.second_on(&reader, &case, None)];
            join_all(both).await;
            while reader.manager.allocate(reader.manager.capacity()).is_none() {
                tokio::task::yield_now().await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_changes_nothing() {
    for (seed, mut rng) in cases() {
        let talk = Conversation::draw(&mut rng).await;
        let peers = Peers::default();
        let prefill = Harness::new(Shape { worker: 1, peers: peers.clone(), ..Shape::default() });
        let decode = Harness::new(Shape { worker: 2, peers, ..Shape::default() });
        // Computing the blocks again takes longer than any transfer.
        decode.assume_slow_prefill();
        let mut prefill_request = request(&*prefill.engine, &talk.second, 1);
        prefill_request.work = Work::Prefill;
        let mut stream = prefill.engine.generate(prefill_request).await.unwrap();
        let Some(Ok(Output::Handoff(handoff))) = stream.next().await else { panic!("a prefill ends with a handoff") };
        let answer = decode.run_as(Work::Resume(handoff), &talk.second, ANSWER).await;
        answer.must_equal(&talk.answers[1], &format!("seed {seed}, handoff"), None);
        assert_eq!(answer.report.handed_over as usize, (talk.second.len() - 1) / 16 * 16);
        assert_eq!(answer.report.cached_tokens(), 0, "tokens computed for the request do not count as cached");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn yielded_handoff_blocks_are_counted_once() {
    let (mut rng, peers) = (Rng(19), Peers::default());
    let prefill = Harness::new(Shape { worker: 1, peers: peers.clone(), ..Shape::default() });
    let decode = Harness::new(Shape { worker: 2, peers, g1: 60, engine: keeps_unread(), ..Shape::default() });
    let prompt = rng.tokens(448);
    prefill.run(&prompt[..304], 1).await;
    let start = async |harness: &Harness, work, prompt: &[u32], answer| {
        let mut request = request(&*harness.engine, prompt, answer);
        (request.work, request.stop.ignore_eos) = (work, true);
        harness.engine.generate(request).await.unwrap()
    };
    let mut prefill_stream = start(&prefill, Work::Prefill, &prompt, 1).await;
    let Some(Ok(Output::Handoff(handoff))) = prefill_stream.next().await else {
        panic!("a prefill ends with a handoff")
    };
    let available = async |most: usize| {
        let fit = async {
            while decode.manager.available() > most {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_mins(5), fit).await.expect("blocks are taken");
    };
    // One request runs until its output is unread, with 25 blocks; the next needs 35; the handoff takes 27 of the
    // others.
    let runs = start(&decode, Work::Generate, &rng.tokens(320), 600).await;
    available(35).await;
    let first = tokio::spawn(collect(start(&decode, Work::Generate, &rng.tokens(545), 1).await));
    decode.engine.load().wait_for(|load| load.waiting == 1).await.unwrap();
    let second = tokio::spawn(collect(start(&decode, Work::Resume(handoff), &prompt, 1).await));
    available(8).await;
    drop(runs);
    first.await.unwrap().unwrap();
    let report = second.await.unwrap().unwrap().prompt.unwrap();
    assert_eq!((report.handed_over, report.cached_tokens()), (432, 304));
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_an_unknown_peer_are_recomputed() {
    let mut rng = Rng(7);
    let talk = Conversation::draw(&mut rng).await;
    let peers = Peers::default();
    let ticket = crate::handoff::HandoffTicket { peer: WorkerId(99), cached: vec![(Level::G1, 16)] };
    let harness = Harness::new(Shape { peers, ..Shape::default() });
    let answer = harness.run_as(Work::Resume(ticket.encode()), &talk.second, ANSWER).await;
    answer.must_equal(&talk.answers[1], "unknown peer", None);
    assert_eq!((answer.report.handed_over, answer.report.cached_tokens()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn preemption_does_not_change_answers() {
    let mut rng = Rng(11);
    let prompts: Vec<_> = (0..6).map(|_| rng.tokens(300)).collect();
    // 60 blocks hold three such prompts with their answers; the others wait, and the youngest is preempted.
    let harness = Harness::new(Shape { g1: 60, g2: 200, ..Shape::default() });
    let answers = join_all(prompts.iter().map(|prompt| async {
        let mut request = request(&*harness.engine, prompt, 90);
        request.stop.ignore_eos = true;
        collect(harness.engine.generate(request).await.unwrap()).await.unwrap().ids
    }))
    .await;
    for (prompt, ids) in prompts.iter().zip(answers) {
        let alone = Harness::new(Shape::default()).run(prompt, 90).await;
        assert_eq!(ids, alone.ids);
    }
    // The prompts differ, so only a preempted sequence can hit blocks in G2.
    assert!(harness.count("blockyard_worker_preemptions_total", "w") > 0);
    assert!(harness.count("blockyard_tier_hit_blocks_total", "g2") > 0, "yielded blocks are onboarded again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preempted_sequence_onboards_while_it_waits() {
    let mut rng = Rng(13);
    let harness = Harness::new(Shape { g1: 60, g2: 400, engine: keeps_unread(), ..Shape::default() });
    harness.assume_slow_prefill();
    let mut running = 0;
    let mut start = async |tokens, answer| {
        let prompt = rng.tokens(tokens);
        let mut request = request(&*harness.engine, &prompt, answer);
        request.stop.ignore_eos = true;
        let stream = harness.engine.generate(request).await.unwrap();
        // One after the other: the last one that joins the batch is preempted. That may have happened before this test
        // sees it in the batch.
        running += 1;
        let preempted = || harness.count("blockyard_worker_preemptions_total", "w") > 0;
        harness.engine.load().wait_for(|load| load.running == running || preempted()).await.unwrap();
        (prompt, stream)
    };
    // 56 of 60 blocks at first. The first two need 22 more, so the youngest is preempted.
    let (_, mut long) = start(320, 600).await;
    let (_, short) = start(128, 200).await;
    let (prompt, victim) = start(448, 40).await;
    let victim = tokio::spawn(collect(victim));
    let mut short = std::pin::pin!(collect(short));
    loop {
        tokio::select! {
            biased;
            ended = &mut short => break drop(ended.unwrap()),
            token = long.next() => drop(token.unwrap().unwrap()),
        }
    }
    // The output of the long one is not read from here on: it stays in the batch, and the youngest does not fit.
    assert!(harness.count("blockyard_worker_preemptions_total", "w") > 0);
    let card = Arc::clone(runtime().card());
    let names = ChainKey::root(&Domain::shared(), &card.identity, None).hashes(&prompt, card.block_size);
    let onboarded = || {
        let events = harness.log.after(0, usize::MAX).unwrap().into_iter().map(|numbered| numbered.event);
        let stored = events.filter_map(|event| match event {
            BlockEvent::Stored { level: Level::G1, blocks, .. } => Some(blocks),
            _ => None,
        });
        let theirs = stored.flatten().filter(|block| names.contains(block)).count();
        theirs > names.len()
    };
    let onboarding = async {
        while !onboarded() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), onboarding).await.expect("blocks are onboarded from G2");
    assert!(!victim.is_finished(), "it still waits");
    collect(long).await.unwrap();
    let alone = Harness::new(Shape::default()).run(&prompt, 40).await;
    assert_eq!(victim.await.unwrap().unwrap().ids, alone.ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn later_requests_yield_blocks_to_the_first() {
    let (mut rng, harness) = (Rng(17), Harness::new(Shape { g1: 60, engine: keeps_unread(), ..Shape::default() }));
    let start = async |prompt: &[u32], answer| {
        let mut request = request(&*harness.engine, prompt, answer);
        request.stop.ignore_eos = true;
        harness.engine.generate(request).await.unwrap()
    };
    let available = async |fits: &dyn Fn(usize) -> bool| {
        let fit = async {
            while !fits(harness.manager.available()) {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_mins(5), fit).await.expect("blocks come or go");
    };
    let known = rng.tokens(448);
    collect(start(&known, 1).await).await.unwrap();
    // Two run until they are 72 tokens ahead of their reader: 25 and 21 blocks.
    let mut running = Vec::new();
    for tokens in [320, 256] {
        running.push(start(&rng.tokens(tokens), 600).await);
    }
    available(&|blocks| blocks <= 14).await;
    // The first request needs 29 blocks; the second holds cached blocks.
    let first = tokio::spawn(collect(start(&rng.tokens(448), 1).await));
    harness.engine.load().wait_for(|load| load.waiting == 1).await.unwrap();
    let second = tokio::spawn(collect(start(&known, 1).await));
    available(&|blocks| blocks <= 4).await;
    assert!(!first.is_finished());
    running.pop();
    // After one running request has left, only the blocks that the second one holds are missing.
    tokio::time::timeout(std::time::Duration::from_secs(20), first)
        .await
        .expect("the first request runs")
        .unwrap()
        .unwrap();
    drop(running);
    second.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn outgrowing_the_memory_ends_a_request_as_when_alone() {
    // Twelve blocks. The first request stops within six full blocks, unread; the other reuses those, and takes all.
    let shape = || Shape { g1: 12, engine: keeps_unread(), ..Shape::default() };
    let start = async |harness: &Harness, prompt: &[u32]| {
        let mut request = request(&*harness.engine, prompt, 600);
        request.stop.ignore_eos = true;
        harness.engine.generate(request).await.unwrap()
    };
    let prompt = Rng(23).tokens(25);
    let whole = collect(start(&Harness::new(shape()), &prompt).await).await.unwrap();
    assert_eq!((whole.ids.len(), whole.finish), (12 * 16 + 1 - 25, Some(FinishReason::Length)));
    // Once the first is read meanwhile, and once it stops when all blocks are taken.
    for reads in [true, false] {
        let harness = Harness::new(shape());
        let until = async |available: usize| {
            while harness.manager.available() > available {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        let done = async {
            let first = start(&harness, &prompt).await;
            until(6).await;
            // It stops 72 tokens ahead of its reader.
            let known = if reads { 72 } else { 12 * 16 - 72 - 25 };
            let second = start(&harness, &[&prompt[..], &whole.ids[..known]].concat()).await;
            if !reads {
                until(0).await;
                // Its reader goes on, and it needs another block.
                assert_eq!(collect(first).await.unwrap().ids, whole.ids);
            }
            let second = collect(second).await.unwrap();
            (known, second)
        };
        let done = tokio::time::timeout(std::time::Duration::from_mins(1), done).await;
        let (known, second) = done.unwrap_or_else(|_| panic!("the request waits for blocks forever, reads: {reads}"));
        assert_eq!(second.ids, whole.ids[known..]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_chunk_smaller_than_a_block_computes_blocks() {
    let (prompt, harness) = (Rng(29).tokens(100), Harness::new(Shape { chunk: 5, ..Shape::default() }));
    let answer = tokio::time::timeout(std::time::Duration::from_mins(1), harness.run(&prompt, 3)).await;
    let alone = Harness::new(Shape::default()).run(&prompt, 3).await;
    assert_eq!(answer.expect("it computes").ids, alone.ids);
}

#[tokio::test(flavor = "multi_thread")]
async fn dropping_the_stream_frees_the_engine() {
    let harness = Harness::new(Shape::default());
    let mut stream = harness.engine.generate(request(&*harness.engine, &Rng(1).tokens(700), 4000)).await.unwrap();
    assert!(stream.next().await.unwrap().is_ok());
    drop(stream);
    let mut load = harness.engine.load();
    load.wait_for(|load| load.running == 0 && load.waiting_tokens == 0).await.unwrap();
    assert_eq!(harness.manager.available(), harness.manager.capacity());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_pauses_gets_the_rest_later() {
    let harness = Harness::new(Shape::default());
    let prompt = Rng(3).tokens(40);
    let mut slow = harness.engine.generate(request(&*harness.engine, &prompt, 300)).await.unwrap();
    let Some(Ok(Output::Tokens(first))) = slow.next().await else { panic!("a first token") };
    // Another request runs and finishes meanwhile; by then the paused one has stopped computing.
    let beside = harness.run(&prompt, 300).await.ids;
    let rest = collect(slow).await.unwrap();
    assert_eq!([first.ids, rest.ids].concat(), beside);
}

#[tokio::test(flavor = "multi_thread")]
async fn identical_prompts_are_computed_once() {
    let harness = Harness::new(Shape { chunk: 64, ..Shape::default() });
    let prompt = Rng(5).tokens(640);
    let reports = join_all((0..4).map(|_| harness.run(&prompt, 3))).await;
    let computed: u32 = reports.iter().map(|answer| answer.report.computed).sum();
    // Each computes its own last block; all other blocks are computed once.
    assert!(computed <= 640 + 3 * 16, "{computed} tokens computed");
}

#[tokio::test(flavor = "multi_thread")]
async fn keeps_the_contract() {
    contract::check(Harness::new(Shape::default()).engine).await;
}
