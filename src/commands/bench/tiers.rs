//! Measures each configured tier, written and read as the block manager does, alternating with its raw device.

use super::raw::{self, Rates};
use crate::commands::output;
use crate::config::{ByteSize, Config};
use crate::node::{Transforms, access, sizes};
use crate::process::machine;
use anyhow::{Context, ensure};
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use kvbm::codec::synthetic::{self, Shape};
use kvbm::object::StoreLocation;
use kvbm::{
    Block, DiskTier, Epoch, EventLog, Fingerprint, HostTier, Metrics, ObjectTier, SequenceHash, StoreError, Tier, disk,
    object,
};
use serde::Serialize;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// One case of the measurement.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Case {
    /// Size of a block, in bytes.
    #[serde(rename = "block_bytes")]
    pub(super) block: usize,
    /// Number of concurrent requests.
    #[serde(rename = "concurrency")]
    pub(super) parallel: usize,
    /// Bytes that are written and read in each round.
    #[serde(rename = "round_bytes")]
    pub(super) bytes: usize,
}

/// Results of one tier in one case: medians over the rounds; ratios are medians of the rounds' ratios.
#[derive(Clone, Debug, Serialize)]
pub(super) struct Measured {
    pub(super) tier: &'static str,
    /// Folder or URL of the tier; `memory` for G2.
    #[serde(rename = "location")]
    pub(super) place: String,
    #[serde(flatten)]
    pub(super) case: Case,
    /// Write bandwidth of the tier, in bytes per second.
    #[serde(rename = "write_bytes_per_second")]
    pub(super) write: f64,
    /// Read bandwidth of the tier, in bytes per second.
    #[serde(rename = "read_bytes_per_second")]
    pub(super) read: f64,
    /// Write bandwidth without the tier, in bytes per second.
    #[serde(rename = "raw_write_bytes_per_second")]
    pub(super) raw_write: f64,
    /// Read bandwidth without the tier, in bytes per second.
    #[serde(rename = "raw_read_bytes_per_second")]
    pub(super) raw_read: f64,
    pub(super) write_ratio: f64,
    pub(super) read_ratio: f64,
    /// Time to read a single block, in seconds.
    #[serde(rename = "latency_s")]
    pub(super) latency: f64,
    /// What the raw bandwidths measure.
    #[serde(rename = "raw_baseline")]
    pub(super) raw: &'static str,
}

/// Bytes of one store request and of one load request.
const REQUEST: usize = 16 << 20;
/// Bytes that are verified in one task.
const VERIFY: usize = 4 << 20;
/// Single blocks that are read for the latency.
const SINGLES: usize = 9;

/// A folder of the benchmark, removed on drop, and the number of parent folders that were created for it.
struct TempFolder(PathBuf, usize);

impl TempFolder {
    fn new(within: &Path) -> anyhow::Result<Self> {
        let folder = within.join(run_name());
        let made = within.ancestors().take_while(|above| !above.exists()).count();
        std::fs::create_dir_all(&folder).with_context(|| format!("cannot create {}", folder.display()))?;
        Ok(Self(folder, made))
    }
}

impl Drop for TempFolder {
    fn drop(&mut self) {
        // A folder that cannot be removed is recognizable by its name.
        let _ = std::fs::remove_dir_all(&self.0);
        for above in self.0.ancestors().skip(1).take(self.1) {
            // Fails if another process uses the folder by now: it is not empty then.
            let _ = std::fs::remove_dir(above);
        }
    }
}

/// The name of the folders and prefixes of this run.
fn run_name() -> String {
    format!("bench-io-{}", std::process::id())
}

/// A tier to measure.
enum Target {
    Memory,
    Disk(TempFolder),
    Shared(Arc<ObjectTier>, Option<TempFolder>),
}

/// Measures every tier that is configured, in every case.
pub(super) async fn measure(config: &Config, cases: &[Case], rounds: usize) -> anyhow::Result<Vec<Measured>> {
    let registry = prometheus::Registry::new();
    let metrics = Metrics::new(&registry)?;
    let transforms = Transforms::open(config, &metrics).await?;
    let mut targets = Vec::new();
    if config.tiers.g2 != crate::config::Budget::Off {
        targets.push(("g2", "memory".to_owned(), Target::Memory));
    }
    for disk in sizes::disks(&config.tiers, &config.data_dir, machine::space) {
        let most = cases.iter().map(|case| case.bytes).max().unwrap_or_default() as u64;
        let (free, wanted) = (machine::space(&disk.folder).free, 4 * most);
        let [have, want] = [free, wanted].map(|bytes| ByteSize(bytes).about());
        let at = disk.folder.display().to_string();
        ensure!(free > wanted, "{at} has {have} free, but the measurement needs {want}; reduce --bytes");
        targets.push(("g3", at, Target::Disk(TempFolder::new(&disk.folder)?)));
    }
    let g3_5 = config.tiers.g3_5.as_ref().map(|flash| ("g3_5", StoreLocation::Folder(flash.path.clone())));
    let g4 = config.tiers.g4.url.clone().map(|location| ("g4", location));
    for (tier, location) in g3_5.into_iter().chain(g4) {
        let settings = object::Settings { request_timeout: config.tiers.g4.request_timeout.0, ..Default::default() };
        let log = Arc::new(EventLog::new(Epoch(1)));
        let target = match &location {
            StoreLocation::Folder(folder) => {
                let folder = TempFolder::new(folder)?;
                Target::Shared(ObjectTier::open_folder(&folder.0, settings, log)?, Some(folder))
            }
            StoreLocation::Cloud { cloud, url, prefix } => {
                let below =
                    StoreLocation::Cloud { cloud: *cloud, url: url.clone(), prefix: prefix.clone().join(run_name()) };
                Target::Shared(ObjectTier::open_location(&below, &access(config), settings, log, None)?, None)
            }
        };
        targets.push((tier, location.to_string(), target));
    }
    let values = synthetic::kv(1, Shape { layers: 32, tokens: 32, channels: 1024 });
    let payload = Bytes::from(synthetic::bf16(&values).repeat(4));
    let mut measured = Vec::new();
    for (tier, at, target) in &targets {
        for case in cases {
            let (block, parallel) = (ByteSize(case.block as u64).about(), case.parallel);
            output::note(format_args!("{tier} {at}: blocks of {block}, {parallel} at once"));
            let measurement = Measurement {
                config,
                transforms: &transforms,
                metrics: &metrics,
                target,
                payload: &payload,
                case: *case,
            };
            let figures = measurement.rounds(rounds).await.with_context(|| format!("{tier} {at}"))?;
            measured.push(figures.into_measured(tier, at.clone(), *case));
        }
    }
    ensure!(!measured.is_empty(), "no tier below G1 is configured: set the folder of G3 (--data-dir), or G4 (--g4)");
    Ok(measured)
}

/// Removes the objects of `measure` from the shared store, also after an error.
pub(super) async fn clear(config: &Config) -> anyhow::Result<()> {
    let Some(location) = &config.tiers.g4.url else { return Ok(()) };
    raw::clear(location, &access(config), config.tiers.g4.request_timeout.0, &run_name()).await
}

struct Measurement<'a> {
    config: &'a Config,
    transforms: &'a Transforms,
    metrics: &'a Metrics,
    target: &'a Target,
    payload: &'a Bytes,
    case: Case,
}

#[derive(Default)]
struct Samples {
    /// Through the tier.
    tier: Vec<Rates>,
    /// Of the device, without the tier.
    raw: Vec<Rates>,
    latency: Vec<f64>,
    what: &'static str,
}

impl Measurement<'_> {
    async fn rounds(&self, rounds: usize) -> anyhow::Result<Samples> {
        let Case { bytes, block, .. } = self.case;
        let mut figures = Samples::default();
        let memory = match self.target {
            Target::Memory => {
                let log = Arc::new(EventLog::new(Epoch(1)));
                Some(HostTier::new(bytes as u64, block, fingerprint(), log, self.metrics)?)
            }
            _ => None,
        };
        // In memory, the first round includes page faults and is not counted.
        let warm_up = usize::from(memory.is_some());
        for round in 0..rounds + warm_up {
            let (raw, what) = self.raw().await?;
            let tier: Arc<dyn Tier> = match (self.target, &memory) {
                (Target::Memory, Some(host)) => Arc::new(host.clone()),
                (Target::Disk(folder), _) => {
                    let settings =
                        disk::Settings { capacity_bytes: 4 * bytes as u64, min_free_bytes: 0, ..Default::default() };
                    let log = Arc::new(EventLog::new(Epoch(1)));
                    self.transforms.wrap(DiskTier::open(&folder.0.join("tier"), settings, log)?)
                }
                (Target::Shared(tier, _), _) => self.transforms.wrap(tier.clone()),
                (Target::Memory, None) => unreachable!("memory was made above"),
            };
            let (rates, latency) = self.through_tier(&*tier, round).await?;
            if let Some(host) = &memory {
                // Free the slots, so that the next round writes to the same memory.
                (0..bytes / block).for_each(|n| host.discard(fingerprint(), self.name(round, n)));
            }
            drop(tier);
            if let Target::Disk(folder) = self.target {
                std::fs::remove_dir_all(folder.0.join("tier"))?;
            }
            if round >= warm_up {
                figures.tier.push(rates);
                figures.raw.push(raw);
                figures.latency.extend(latency);
            }
            figures.what = what;
        }
        Ok(figures)
    }

    async fn raw(&self) -> anyhow::Result<(Rates, &'static str)> {
        let Case { bytes, parallel, .. } = self.case;
        let blocking = |work: Box<dyn FnOnce() -> std::io::Result<(Rates, &'static str)> + Send>| async {
            Ok(tokio::task::spawn_blocking(work).await.context("measuring failed")??)
        };
        match self.target {
            Target::Memory => blocking(Box::new(move || Ok((raw::copies(bytes, parallel)?, "memcpy")))).await,
            Target::Disk(folder) => {
                let file = folder.0.join("raw");
                blocking(Box::new(move || {
                    let (rates, is_direct) = raw::direct(&file, bytes, parallel)?;
                    Ok((rates, if is_direct { "O_DIRECT" } else { "page cache" }))
                }))
                .await
            }
            Target::Shared(_, Some(folder)) => {
                let folder = folder.0.clone();
                blocking(Box::new(move || Ok((raw::files(&folder, bytes, parallel)?, "files")))).await
            }
            Target::Shared(_, None) => {
                let location = self.config.tiers.g4.url.as_ref().context("a shared tier has a location")?;
                let timeout = self.config.tiers.g4.request_timeout.0;
                let rates =
                    raw::objects(location, &access(self.config), timeout, &run_name(), (bytes, parallel)).await?;
                Ok((rates, "raw client"))
            }
        }
    }

    /// Writes and reads the blocks of one round, then reads single blocks for the latency.
    async fn through_tier(&self, tier: &dyn Tier, round: usize) -> anyhow::Result<(Rates, Vec<f64>)> {
        let Case { bytes, block, parallel } = self.case;
        let batch = REQUEST.div_ceil(block);
        let blocks: Vec<Block> = (0..bytes / block).map(|n| self.block(round, n)).collect();
        let names: Vec<SequenceHash> = blocks.iter().map(|block| block.header.hash).collect();
        let moved = (blocks.len() * block) as f64;
        let started = Instant::now();
        stream::iter(blocks.chunks(batch).map(|some| store(tier, some.to_vec())))
            .buffer_unordered(parallel)
            .try_collect::<()>()
            .await?;
        let write = moved / started.elapsed().as_secs_f64();
        drop(blocks);
        let started = Instant::now();
        stream::iter(names.chunks(batch).map(|some| load(tier, some, VERIFY.div_ceil(block))))
            .buffer_unordered(parallel)
            .try_collect::<()>()
            .await?;
        let read = moved / started.elapsed().as_secs_f64();
        let mut latency = Vec::new();
        for name in names.iter().step_by((names.len() / SINGLES).max(1)).take(SINGLES) {
            let started = Instant::now();
            load(tier, &[*name], 1).await?;
            latency.push(started.elapsed().as_secs_f64());
        }
        Ok(([write, read], latency))
    }

    /// A block hash that differs in each round and case, since stored blocks are not written again.
    fn name(&self, round: usize, n: usize) -> SequenceHash {
        let Case { block, parallel, .. } = self.case;
        let mut bytes = [0; 16];
        let words = [n as u32, round as u32, block as u32, parallel as u32];
        bytes.chunks_mut(4).zip(words).for_each(|(bytes, word)| bytes.copy_from_slice(&word.to_le_bytes()));
        SequenceHash::from_bytes(bytes)
    }

    fn block(&self, round: usize, n: usize) -> Block {
        let block = self.case.block;
        let at = n % (self.payload.len() / block) * block;
        Block::new(self.name(round, n), None, fingerprint(), self.payload.slice(at..at + block))
    }
}

fn fingerprint() -> Fingerprint {
    Fingerprint::of([("what", &b"bench io"[..])])
}

/// Stores blocks, and retries those that are rejected as busy.
async fn store(tier: &dyn Tier, mut blocks: Vec<Block>) -> anyhow::Result<()> {
    while !blocks.is_empty() {
        let answers = tier.store(blocks.clone()).await;
        let mut busy = Vec::new();
        for (block, answer) in blocks.into_iter().zip(answers) {
            match answer {
                Ok(()) => {}
                Err(StoreError::Busy) => busy.push(block),
                Err(error) => return Err(error.into()),
            }
        }
        blocks = busy;
        if !blocks.is_empty() {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
    }
    Ok(())
}

/// Reads and verifies blocks, as the manager does.
async fn load(tier: &dyn Tier, names: &[SequenceHash], batch: usize) -> anyhow::Result<()> {
    let loading = tier.load(fingerprint(), names.to_vec()).map(|(index, answer)| {
        let block = answer?.context("a block that was just written cannot be found")?;
        Ok::<_, anyhow::Error>((names[index], block))
    });
    let verify = |loaded: Vec<(SequenceHash, Block)>| async move {
        let verifying =
            move || loaded.into_iter().try_for_each(|(name, block)| block.verify(name, fingerprint()).map(drop));
        Ok(tokio::task::spawn_blocking(verifying).await??)
    };
    loading.try_chunks(batch).map_err(|error| error.1).try_for_each_concurrent(2, verify).await
}

impl Samples {
    fn into_measured(self, tier: &'static str, place: String, case: Case) -> Measured {
        let of = |rates: &[Rates], way: usize| median(rates.iter().map(|rates| rates[way]).collect());
        let ratio =
            |way: usize| median(self.tier.iter().zip(&self.raw).map(|(tier, raw)| tier[way] / raw[way]).collect());
        Measured {
            tier,
            place,
            case,
            write: of(&self.tier, 0),
            read: of(&self.tier, 1),
            raw_write: of(&self.raw, 0),
            raw_read: of(&self.raw, 1),
            write_ratio: ratio(0),
            read_ratio: ratio(1),
            latency: median(self.latency.clone()),
            raw: self.what,
        }
    }
}

/// The middle value; of an even number, the lower of the two.
pub(super) fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values.get(values.len().saturating_sub(1) / 2).copied().unwrap_or_default()
}

/// The results as a table.
pub(super) fn table(measured: &[Measured]) -> String {
    let mut text = String::new();
    let mut place = None;
    for figures in measured {
        let Measured { tier, case: Case { block, parallel, .. }, raw, .. } = figures;
        if place.replace(&figures.place) != Some(&figures.place) {
            let at = &figures.place;
            text += &format!("{tier} {at}, GB/s, compared with {raw}\n");
            text += "     block  at once   write     raw  ratio    read     raw  ratio  one block\n";
        }
        let block = ByteSize(*block as u64).about();
        let [write, raw_write, read, raw_read] =
            [figures.write, figures.raw_write, figures.read, figures.raw_read].map(|rate| rate / 1e9);
        let (write_ratio, read_ratio, latency) = (figures.write_ratio, figures.read_ratio, figures.latency * 1e3);
        text += &format!(
            "{block:>10}  {parallel:>7}  {write:>6.2}  {raw_write:>6.2}  {write_ratio:>5.2}  {read:>6.2}  \
             {raw_read:>6.2}  \
             {read_ratio:>5.2}  {latency:>6.2} ms\n"
        );
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(flavor = "multi_thread")]
    async fn each_tier_is_measured_and_no_file_is_left() {
        let home = tempfile::tempdir().unwrap();
        let shared = home.path().join("shared");
        let mut config = Config::with_cache(&home.path().join("cache"));
        config.tiers.g4.url = Some(StoreLocation::Folder(shared.clone()));
        let cases = [1, 3].map(|parallel| Case { block: 64 << 10, parallel, bytes: 2 << 20 });
        let measured = measure(&config, &cases, 1).await.unwrap();
        let tiers: Vec<_> = measured.iter().map(|figures| (figures.tier, figures.case.parallel)).collect();
        assert_eq!(tiers, [("g2", 1), ("g2", 3), ("g3", 1), ("g3", 3), ("g4", 1), ("g4", 3)]);
        for Measured { write, read, raw_write, raw_read, latency, .. } in &measured {
            assert!([write, read, raw_write, raw_read, latency].iter().all(|figure| **figure > 0.0), "{measured:?}");
        }
        assert_eq!(std::fs::read_dir(home.path()).unwrap().count(), 0, "created parent folders are removed, too");
        assert_eq!(table(&measured).lines().count(), 3 * 2 + 6);
    }
}
