//! Two properties of the time to first token, measured on the native engine: a lookup without a hit costs nearly
//! nothing, and no tier, however slow, makes a request slower than it is without the tier.
//!
//! `cargo run --release -p worker --example first_token [-- --json] [--miss | --sweep]`
//!
//! **Miss**: new prompts, alternately on an engine with G2, G3 and G4 and on one without; offloads finish before the
//! next prompt. **Sweep**: a tier that holds the whole prompt and serves one block after the other, from ten times
//! slower than computing to ten times faster, and one that never answers; compared with an engine without tiers. The
//! first request does not know the tier's speed and may wait 100 ms for it; the median of the later ones is compared
//! with the engine without tiers. **Beside**: another request generates meanwhile, and the time between its tokens is
//! compared with that beside a prompt that is computed.

use futures::future::{BoxFuture, FutureExt};
use futures::stream::{self, BoxStream, StreamExt};
use kvbm::{
    Block, BlockManager, ChainKey, Date, DiskTier, Epoch, EventLog, Fingerprint, HostTier, Level, Loaded, ObjectTier,
    SequenceHash, StoreError, Tier, Usage, disk, object,
};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::error::Error;
use std::path::Path;
use std::pin::pin;
use std::sync::Arc;
use std::time::{Duration, Instant};
use worker::engine::{Domain, Engine, Request, measure_ttft};
use worker::handoff::Peers;
use worker::llama::{Builtin, LlamaEngine, ModelSource, Runtime, Settings};
use worker::metrics::Metrics;
use worker::plane::WorkerId;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Prompt tokens of a miss: few, so that the fixed cost shows.
const SHORT: usize = 256;
const PAIRS: usize = 120;
/// Warm-up pairs: the engines measure their speed and touch every slot of G1 and G2.
const WARM: usize = 20;
/// Pause before each prompt of either side. Only one side waits for offloads, and a request after a wait runs at
/// another speed than one without; without the pause the times of both sides have two modes.
const PAUSE: Duration = Duration::from_millis(20);
/// Prompt tokens of the sweep.
const LONG: usize = 2048;
const ROUNDS: usize = 5;
/// Engines that use a tier for the first time.
const FIRSTS: usize = 3;
/// The tier's time per block, relative to the time of computing one.
const STEPS: [f64; 8] = [10.0, 5.0, 2.0, 1.2, 1.0, 0.8, 0.3, 0.1];

#[tokio::main]
async fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let has_flag = |flag: &str| arguments.iter().any(|argument| argument == flag);
    let folder = tempfile::tempdir()?;
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let runtime = Runtime::open(&ModelSource::Builtin(Builtin::Small), folder.path(), threads, &|_, _| {})?;
    let miss = if has_flag("--sweep") { Value::Null } else { miss(&runtime, folder.path()).await? };
    let (sweep, beside) = if has_flag("--miss") { Default::default() } else { sweep(&runtime).await? };
    if has_flag("--json") {
        println!("{:#}", json!({ "miss": miss, "sweep": sweep, "beside": beside }));
    } else {
        if let Some(ratio) = miss["ratio"].as_f64() {
            println!("a miss of {SHORT} tokens with tiers ÷ without: {ratio:.4}");
        }
        for row in sweep.iter().chain(&beside) {
            println!("{row}");
        }
    }
    Ok(())
}

/// An engine with its block manager.
struct Harness {
    runtime: Arc<Runtime>,
    manager: BlockManager,
    engine: Arc<LlamaEngine>,
    slots: usize,
}

impl Harness {
    fn new(runtime: &Arc<Runtime>, host: bool, lower: Vec<Arc<dyn Tier>>) -> Result<(Self, Option<HostTier>)> {
        let registry = prometheus::Registry::new();
        let (blocks, engines) = (kvbm::Metrics::new(&registry)?, Metrics::new(&registry)?);
        let (slots, block) = (2 * LONG / runtime.card().block_size, runtime.block_bytes());
        let memory = runtime.memory(slots)?;
        let (device, log) = (memory.device(), Arc::new(EventLog::new(Epoch(1))));
        let capacity = (slots * block) as u64;
        let host = host.then(|| HostTier::new(capacity, block, device.fingerprint(), log.clone(), &blocks));
        let host = host.transpose()?;
        let manager = BlockManager::new(device, host.clone(), lower, log, blocks);
        let (peers, metrics) = (Peers::default(), engines.of("1", "bench"));
        let runtime = runtime.clone();
        let started = (runtime.clone(), memory, manager.clone());
        let engine =
            LlamaEngine::start(WorkerId(1), started.0, started.1, started.2, peers, metrics, Settings::default());
        Ok((Self { runtime, manager, engine, slots }, host))
    }

    /// Seconds to the first token.
    async fn first_token(&self, tokens: &[u32]) -> Result<f64> {
        Ok(measure_ttft(&*self.engine, self.ask(tokens, 1)).await?.as_secs_f64())
    }

    fn ask(&self, prompt: &[u32], tokens: u32) -> Request {
        Request::greedy("first_token", &self.runtime.card().id, prompt, tokens)
    }

    /// Seconds between the tokens of one request while another one, of `prompt`, waits for its first.
    async fn gaps_beside(&self, small: &[u32], prompt: &[u32]) -> Result<Vec<f64>> {
        let mut stream = self.engine.generate(self.ask(small, LONG as u32)).await?;
        stream.next().await.ok_or("no token")??;
        let (mut last, mut gaps) = (Instant::now(), Vec::new());
        let mut other = pin!(self.first_token(prompt));
        loop {
            tokio::select! {
                token = stream.next() => {
                    token.ok_or("the stream ended early")??;
                    gaps.push(last.elapsed().as_secs_f64());
                    last = Instant::now();
                }
                took = &mut other => {
                    took?;
                    return Ok(gaps);
                }
            }
        }
    }

    /// Empties G1 once the last request has released its blocks.
    async fn empty_g1(&self) {
        while self.manager.allocate(self.slots).is_none() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
}

/// Prompts that share no block.
struct Prompts(u32);

impl Prompts {
    fn next(&mut self, runtime: &Runtime, tokens: usize) -> Vec<u32> {
        self.0 += 1;
        let token = |n: u32| (n.wrapping_mul(2_654_435_761) ^ self.0.wrapping_mul(40_503)) >> 4;
        (0..tokens as u32).map(|n| token(n) % runtime.card().vocabulary as u32).collect()
    }
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// The cost of a lookup without a hit, as a ratio of times to first token.
async fn miss(runtime: &Arc<Runtime>, folder: &Path) -> Result<Value> {
    let log = || Arc::new(EventLog::new(Epoch(1)));
    let settings = disk::Settings { capacity_bytes: 1 << 30, min_free_bytes: 0, ..disk::Settings::default() };
    let lower: Vec<Arc<dyn Tier>> = vec![
        DiskTier::open(&folder.join("g3"), settings, log())?,
        ObjectTier::open_folder(&folder.join("g4"), object::Settings::default(), log())?,
    ];
    let ((with, _), (without, _)) = (Harness::new(runtime, true, lower)?, Harness::new(runtime, false, vec![])?);
    let mut prompts = Prompts(0);
    let mut times: [Vec<f64>; 2] = Default::default();
    for pair in 0..PAIRS + WARM {
        let mut both = [(0, &with), (1, &without)];
        both.rotate_left(pair % 2);
        for (which, harness) in both {
            tokio::time::sleep(PAUSE).await;
            let took = harness.first_token(&prompts.next(runtime, SHORT)).await?;
            harness.manager.flush().await;
            if pair >= WARM {
                times[which].push(took);
            }
        }
    }
    let ratios = times[0].iter().zip(&times[1]).map(|(with, without)| with / without).collect();
    let [with, without] = times.map(median);
    Ok(json!({
        "tokens": SHORT, "pairs": PAIRS, "with_seconds": with, "without_seconds": without,
        // The median over pairs, whose two sides ran under the same conditions.
        "ratio": median(ratios), "ratio_of_medians": with / without,
    }))
}

/// Times to first token from tiers of different speeds, relative to an engine without tiers; and the token gaps of
/// another request.
async fn sweep(runtime: &Arc<Runtime>) -> Result<(Vec<Value>, Vec<Value>)> {
    let mut prompts = Prompts(1 << 20);
    let (prompt, small) = (prompts.next(runtime, LONG), prompts.next(runtime, SHORT));
    let (source, host) = Harness::new(runtime, true, vec![])?;
    source.first_token(&prompt).await?;
    source.manager.flush().await;
    let names =
        ChainKey::root(&Domain::shared(), &runtime.card().identity, None).hashes(&prompt, runtime.card().block_size);
    let host = host.ok_or("the host tier was requested")?;
    let fingerprint = source.runtime.memory(1)?.device().fingerprint();
    let mut blocks = HashMap::new();
    for (index, block) in host.load(fingerprint, names.clone()).collect::<Vec<_>>().await {
        blocks.insert(names[index], block?.ok_or("a block is missing")?);
    }
    let blocks = Arc::new(blocks);
    let (without, _) = Harness::new(runtime, false, vec![])?;
    let (mut base, mut gaps) = (Vec::new(), Vec::new());
    for _ in 0..ROUNDS {
        base.push(without.first_token(&prompts.next(runtime, LONG)).await?);
        gaps.extend(without.gaps_beside(&small, &prompts.next(runtime, LONG)).await?);
    }
    let computing = median(base) / names.len() as f64;
    let (mut results, mut beside) = (Vec::new(), vec![token_gaps(&json!("computed"), gaps)]);
    for times in STEPS.into_iter().map(Some).chain([None]) {
        let per_block = times.map(|times| Duration::from_secs_f64(computing * times));
        let open = || {
            let tier = Arc::new(Slow { blocks: blocks.clone(), per_block, free: Arc::new(Mutex::new(Instant::now())) });
            Harness::new(runtime, false, vec![tier])
        };
        let (mut firsts, mut known) = (Vec::new(), None);
        for _ in 0..FIRSTS {
            let (harness, _) = open()?;
            // The engine measures its prefill speed.
            for _ in 0..2 {
                harness.first_token(&prompts.next(runtime, LONG)).await?;
            }
            harness.empty_g1().await;
            let miss = without.first_token(&prompts.next(runtime, LONG)).await?;
            firsts.push((harness.first_token(&prompt).await?, miss));
            known = Some(harness);
        }
        let harness = known.ok_or("no engine was started")?;
        let (mut later, mut gaps) = (Vec::new(), Vec::new());
        for _ in 0..ROUNDS {
            harness.empty_g1().await;
            let miss = without.first_token(&prompts.next(runtime, LONG)).await?;
            later.push(harness.first_token(&prompt).await? / miss);
            harness.empty_g1().await;
            gaps.extend(harness.gaps_beside(&small, &prompt).await?);
        }
        firsts.sort_by(|(took, miss), (other, its)| (took - miss).total_cmp(&(other - its)));
        let (took, miss) = firsts[firsts.len() / 2];
        results.push(json!({
            "times_of_computing": times, "first_seconds": took, "first_miss_seconds": miss, "ratio": median(later),
        }));
        beside.push(token_gaps(&json!(times), gaps));
    }
    Ok((results, beside))
}

/// The time between the tokens of one request while the prompt of another is computed or loaded from a tier.
fn token_gaps(other: &Value, mut gaps: Vec<f64>) -> Value {
    gaps.sort_by(f64::total_cmp);
    let at = |share: f64| gaps.get((gaps.len() as f64 * share) as usize).copied();
    json!({ "beside": other, "gaps": gaps.len(), "gap_median_seconds": at(0.5), "gap_p90_seconds": at(0.9) })
}

/// A tier that serves one block after the other, or never answers.
struct Slow {
    blocks: Arc<HashMap<SequenceHash, Block>>,
    per_block: Option<Duration>,
    free: Arc<Mutex<Instant>>,
}

impl Tier for Slow {
    fn level(&self) -> Level {
        Level::G3
    }

    fn holds(&self, _: Fingerprint, names: &[SequenceHash]) -> usize {
        names.iter().take_while(|name| self.blocks.contains_key(*name)).count()
    }

    fn load(&self, _: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (blocks, per_block, free) = (self.blocks.clone(), self.per_block, self.free.clone());
        // A timer that fires up to a millisecond late must not make the tier slower than configured.
        let called = Instant::now();
        let serve = move |(index, name): (usize, SequenceHash)| {
            let (block, free) = (blocks.get(&name).cloned(), free.clone());
            async move {
                let Some(per_block) = per_block else { return futures::future::pending().await };
                let until = {
                    let mut free = free.lock();
                    *free = called.max(*free) + per_block;
                    *free
                };
                tokio::time::sleep_until(until.into()).await;
                (index, Ok(block))
            }
        };
        stream::iter(names.into_iter().enumerate()).then(serve).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        // The tier accepts no blocks.
        async move { blocks.iter().map(|_| Err(StoreError::Full)).collect() }.boxed()
    }

    fn discard(&self, _: Fingerprint, _: SequenceHash) {}

    fn expire(&self, _: Date) -> usize {
        0
    }

    fn usage(&self) -> Usage {
        Usage { blocks: self.blocks.len() as u64, ..Usage::default() }
    }
}
