//! The engine under test with its memory and tiers, and what the tests compare: answers with their KV.

use crate::engine::contract::{collect, request};
use crate::engine::{Engine, PromptReport, Work};
use crate::handoff::Peers;
use crate::llama::{Builtin, LlamaEngine, Memory, ModelSource, Runtime, Settings, UnreadOutput};
use crate::metrics;
use crate::plane::WorkerId;
use kvbm::{
    BlockManager, ChainKey, Clock, DiskTier, Domain, Epoch, EventLog, HostTier, Level, ObjectTier, Tier, disk, object,
};
use std::path::Path;
use std::sync::{Arc, OnceLock};

/// The runtime of all tests: one copy of a small random model.
pub(super) fn runtime() -> Arc<Runtime> {
    static RUNTIME: OnceLock<Arc<Runtime>> = OnceLock::new();
    let open = || {
        let data = std::env::temp_dir().join("blockyard-tests");
        Runtime::open(&ModelSource::Builtin(Builtin::Tiny), &data, 2, &|_, _| {}).unwrap()
    };
    Arc::clone(RUNTIME.get_or_init(open))
}

/// An engine with its memory, tiers and metrics.
pub(crate) struct Harness {
    pub(crate) engine: Arc<LlamaEngine>,
    pub(in crate::llama) manager: BlockManager,
    pub(super) memory: Memory,
    pub(super) host: Option<HostTier>,
    pub(super) log: Arc<EventLog>,
    pub(super) registry: prometheus::Registry,
}

pub(crate) struct Shape {
    pub(crate) worker: u64,
    pub(crate) chunk: usize,
    pub(crate) g1: usize,
    pub(crate) g2: usize,
    pub(crate) lower: Vec<Arc<dyn Tier>>,
    pub(crate) peers: Peers,
    pub(crate) clock: Clock,
    pub(crate) engine: Settings,
}

/// Repeats a trial that loads blocks until it has a result. A load that does not begin within 100 ms is abandoned, and
/// a busy machine can stop a thread for longer than that.
pub(crate) async fn unless_stalled<T>(trial: impl AsyncFn() -> Option<T>) -> T {
    for _ in 0..10 {
        if let Some(result) = trial().await {
            return result;
        }
    }
    panic!("no trial loads the blocks");
}

/// Settings under which an unread sequence stays in the batch and keeps its blocks.
pub(super) fn keeps_unread() -> Settings {
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
    pub(crate) fn new(shape: Shape) -> Self {
        Self::of_model(runtime(), shape)
    }

    pub(super) fn of_model(runtime: Arc<Runtime>, shape: Shape) -> Self {
        let registry = prometheus::Registry::new();
        let kvbm_metrics = kvbm::Metrics::new(&registry).unwrap();
        let log = log();
        let memory = runtime.memory(shape.g1).unwrap();
        let device = memory.device();
        let host = (shape.g2 > 0).then(|| {
            let bytes = (shape.g2 * runtime.block_bytes()) as u64;
            let (block, clock) = (runtime.block_bytes(), shape.clock.clone());
            HostTier::with_clock(bytes, block, device.fingerprint(), Arc::clone(&log), &kvbm_metrics, clock).unwrap()
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
    pub(crate) fn assume_slow_prefill(&self) {
        self.engine.stats.record_step(1 << 24, std::time::Duration::from_secs(1 << 24));
    }

    /// Steps so far, of one kind.
    pub(super) fn steps(&self, kind: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == "blockyard_worker_step_seconds").unwrap();
        let of_kind = |m: &&prometheus::proto::Metric| m.get_label().iter().any(|label| label.value() == kind);
        family.get_metric().iter().find(of_kind).map_or(0, |metric| metric.get_histogram().get_sample_count())
    }

    /// The sum of a counter over all series with this label value.
    pub(super) fn count(&self, metric: &str, label: &str) -> u64 {
        let families = self.registry.gather();
        let family = families.iter().find(|family| family.name() == metric).unwrap();
        let labelled = |m: &&prometheus::proto::Metric| m.get_label().iter().any(|of| of.value() == label);
        family.get_metric().iter().filter(labelled).map(|metric| metric.get_counter().get_value() as u64).sum()
    }

    pub(super) async fn run(&self, prompt: &[u32], tokens: u32) -> Answer {
        self.run_as(Work::Generate, prompt, tokens).await
    }

    pub(super) async fn run_as(&self, work: Work, prompt: &[u32], tokens: u32) -> Answer {
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
    pub(super) fn kv(&self, tokens: &[u32]) -> Vec<u8> {
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
    pub(super) async fn settle(&self) {
        self.manager.flush().await;
        // A finished sequence releases its blocks just after its last token is sent.
        while self.manager.allocate(self.manager.capacity()).is_none() {
            tokio::task::yield_now().await;
        }
    }

    /// Stops the engine and drops everything it holds, as the end of its process would.
    pub(super) async fn close(self) {
        let mut load = self.engine.load();
        drop(self);
        while load.changed().await.is_ok() {}
    }
}

#[derive(PartialEq, Debug)]
pub(super) struct Answer {
    pub(super) ids: Vec<u32>,
    pub(super) kv: Vec<u8>,
    pub(super) report: PromptReport,
}

impl Answer {
    /// Compares an answer with the one that was computed alone, and the tier of its prefix with the expected one.
    pub(super) fn must_equal(&self, want: &Self, case: &str, from: Option<Level>) {
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
pub(super) struct Rng(pub(super) u64);

impl Rng {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub(super) fn within(&mut self, range: std::ops::Range<u64>) -> u64 {
        range.start + self.next() % (range.end - range.start)
    }

    pub(super) fn random_tokens(&mut self, len: std::ops::Range<u64>) -> Vec<u32> {
        let len = self.within(len);
        self.tokens(len)
    }

    pub(super) fn tokens(&mut self, len: u64) -> Vec<u32> {
        let vocabulary = runtime().card().vocabulary as u64;
        (0..len).map(|_| self.within(0..vocabulary) as u32).collect()
    }
}

/// A conversation of two compute: the second prompt repeats the first, what was answered, and something new.
pub(super) struct Conversation {
    pub(super) first: Vec<u32>,
    pub(super) second: Vec<u32>,
    pub(super) answers: [Answer; 2],
}

pub(super) const ANSWER: u32 = 37;

impl Conversation {
    /// Draws one, and computes both compute alone, without any cache, in chunks of 512.
    pub(super) async fn draw(rng: &mut Rng) -> Self {
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
    pub(super) async fn second_on(&self, harness: &Harness, case: &str, from: Option<Level>) {
        harness.run(&self.second, ANSWER).await.must_equal(&self.answers[1], case, from);
    }
}

pub(super) fn cases() -> impl Iterator<Item = (u64, Rng)> {
    // BLOCKYARD_CASES=100 for a night; a failure names its seed.
    let cases = std::env::var("BLOCKYARD_CASES").map_or(5, |n| n.parse().unwrap());
    (0..cases).map(|seed| (seed, Rng(seed)))
}

pub(super) fn log() -> Arc<EventLog> {
    Arc::new(EventLog::new(Epoch(1)))
}

pub(super) fn disk(folder: &Path) -> Arc<dyn Tier> {
    let settings = disk::Settings { capacity_bytes: 64 << 20, min_free_bytes: 0, ..disk::Settings::default() };
    DiskTier::open(folder, settings, log()).unwrap()
}

pub(super) async fn shared(folder: &Path) -> Arc<dyn Tier> {
    let tier = ObjectTier::open_folder(folder, object::Settings::default(), log()).unwrap();
    tier.wait_until_ready().await;
    tier
}
