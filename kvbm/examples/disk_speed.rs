//! How fast the disk tier writes and reads, next to `fio` with direct access on the same folder, in turns; and how fast many
//! blocks are found again after a restart.
//!
//! `cargo run --release -p kvbm --example disk_speed -- FOLDER [--block-bytes N] [--mib N] [--rounds N] [--chain N] [--recover N] [--json]`
//!
//! A log that grows writes into space that the filesystem has to find, so it stands beside a file that `fio` begins; a full
//! one writes where older blocks were, as `fio` does into a file that is there. Neither side syncs: what both promise is that
//! the device has the bytes. `fio` begins its clock when its file has its space, the tier when it is asked to store. Requests
//! of `fio` are as large as a block, and a megabyte at least.
//!
//! Devices burst and other load comes and goes, so only the ratios of one run mean something; medians are shown, each round
//! begins with another one, files that were deleted are let go before the next measurement, and the first `fio` is asked
//! twice: how far it is from itself is what a ratio is worth. Without `fio` only the tier is measured, and that is said.
//! `--chain N` has N blocks follow each other (four megabytes of them otherwise): what lies in several segments is carried over
//! when the log is full, which shows in what is written for each byte that is stored. `--recover N` writes N small blocks and opens the log again, its pages dropped from the page cache where that is allowed.

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use kvbm::disk::Settings;
use kvbm::{Block, DiskTier, Domain, Epoch, EventLog, Fingerprint, SequenceHash, Tier};
use serde_json::{Value, json};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Bytes that one offer carries, as the manager offers them; some are under way, within what the queue takes.
const OFFER: usize = 16 << 20;
/// Bytes that one load asks for: the KV of some thousand tokens.
const LOAD: usize = 64 << 20;
/// Bytes that are verified together, as the manager does.
const VERIFY: usize = 4 << 20;

/// What `fio` is asked for: its engine, requests under way, processes. The first one is asked once more.
const REFERENCES: [(&str, usize, usize); 4] = [("psync", 1, 1), ("psync", 1, 2), ("io_uring", 8, 1), ("psync", 1, 1)];
const AGAIN: usize = REFERENCES.len() - 1;

/// What is measured, and what `fio` calls it.
const WAYS: [(&str, &str); 3] = [("write", "write"), ("rewrite", "write"), ("read", "read")];

/// A device that is told what is free any more gets so long for it.
const SETTLE: Duration = Duration::from_millis(300);

struct Arguments {
    folder: PathBuf,
    block_bytes: usize,
    mib: usize,
    rounds: usize,
    chain: Option<usize>,
    recover: Option<usize>,
    json: bool,
}

impl Arguments {
    fn read() -> Result<Self> {
        let mut given = std::env::args().skip(1);
        let folder = given.next().filter(|folder| !folder.starts_with('-')).ok_or("which folder?")?;
        let (folder, chain, recover) = (folder.into(), None, None);
        let mut read = Self { folder, block_bytes: 72 << 10, mib: 1024, rounds: 5, chain, recover, json: false };
        while let Some(name) = given.next() {
            let mut number = || -> Result<usize> { Ok(given.next().ok_or("a number is missing")?.parse()?) };
            match name.as_str() {
                "--block-bytes" => read.block_bytes = number()?,
                "--mib" => read.mib = number()?,
                "--rounds" => read.rounds = number()?,
                "--chain" => read.chain = Some(number()?),
                "--recover" => read.recover = Some(number()?),
                "--json" => read.json = true,
                other => return Err(format!("unknown: {other}").into()),
            }
        }
        Ok(read)
    }
}

#[tokio::main]
async fn main() -> Result<()> {
    let arguments = Arguments::read()?;
    // Beside the program itself by default, which has the shorter name.
    let folder = arguments.folder.join("disk_speed.measured");
    std::fs::create_dir_all(&folder)?;
    let told = match arguments.recover {
        Some(blocks) => recovery(&folder, blocks, arguments.rounds).await,
        None => speeds(&folder, &arguments).await,
    };
    std::fs::remove_dir_all(&folder)?;
    let told = told?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&told)?);
    }
    Ok(())
}

/// Our speed and that of `fio`, in turns.
async fn speeds(folder: &Path, arguments: &Arguments) -> Result<Value> {
    let Arguments { block_bytes, mib, rounds, .. } = *arguments;
    let raw = folder.join("raw");
    let references = if Command::new("fio").arg("--version").output().is_ok() {
        &REFERENCES[..]
    } else {
        eprintln!("fio is not installed, so there is nothing to compare with: apt-get install fio");
        &[]
    };
    let mut tier = Subject::new(folder, arguments).await?;
    let mut ours: [Vec<f64>; WAYS.len()] = Default::default();
    let mut theirs: [[Vec<f64>; WAYS.len()]; REFERENCES.len()] = Default::default();
    let mut written: [Vec<f64>; WAYS.len()] = Default::default();
    for round in 0..rounds {
        tier.renew();
        for (way, (name, direction)) in WAYS.into_iter().enumerate() {
            for turn in 0..=references.len() {
                let turn = (turn + round) % (references.len() + 1);
                let begins = name == "write";
                if let Some(reference) = references.get(turn) {
                    if begins {
                        let _ = std::fs::remove_file(&raw);
                    }
                    settle(folder).await?;
                    let request = block_bytes.max(1 << 20);
                    theirs[turn][way].push(fio(&raw, direction, *reference, request, mib << 20)?);
                } else {
                    settle(folder).await?;
                    let before = bytes_written();
                    ours[way].push(tier.run(name).await?);
                    written[way].push((bytes_written() - before) / tier.bytes());
                }
            }
        }
        if !arguments.json {
            let [write, rewrite, read] = [0, 1, 2].map(|way| ours[way][round]);
            println!("round {round}: write {write:.2}, rewrite {rewrite:.2}, read {read:.2} GB/s");
        }
    }
    let mut told = json!({ "block_bytes": block_bytes, "mib": mib, "rounds": rounds, "unit": "GB/s" });
    for (way, (name, _)) in WAYS.into_iter().enumerate() {
        let (our, amplified) = (median(&ours[way]), median(&written[way]));
        let mut compared = Vec::new();
        let against = |of: &[Vec<f64>; WAYS.len()], that: &[f64]| -> Vec<f64> {
            that.iter().zip(&of[way]).map(|(one, other)| one / other).collect()
        };
        for ((engine, depth, jobs), of) in references.iter().zip(&theirs).take(AGAIN) {
            let reference = format!("fio {engine} x{}", depth * jobs);
            let (their, ratio) = (median(&of[way]), median(&against(of, &ours[way])));
            if !arguments.json {
                println!("{name:7} {our:.2} GB/s, {reference:14} {their:.2} GB/s: median ratio {ratio:.2}");
            }
            compared.push(json!({ "reference": reference, "speed": their, "ratio": ratio }));
        }
        let noise = against(&theirs[0], &theirs[AGAIN][way]);
        let (least, most) = (noise.iter().copied().reduce(f64::min), noise.iter().copied().reduce(f64::max));
        if !arguments.json {
            if let (Some(least), Some(most)) = (least, most) {
                println!("{name:7} the first fio beside itself: {least:.2} to {most:.2}");
            }
            println!("{name:7} {amplified:.3} bytes written for each that was stored or read");
        }
        told[name] = json!({ "tier": our, "written": amplified, "fio": compared, "noise": [least, most] });
    }
    Ok(told)
}

/// Lets go of what was deleted: the device is told with the next commit, and hears it beside what is written then.
async fn settle(folder: &Path) -> Result<()> {
    std::fs::File::open(folder)?.sync_all()?;
    tokio::time::sleep(SETTLE).await;
    Ok(())
}

/// Bytes that this process had written to devices so far.
fn bytes_written() -> f64 {
    let told = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let bytes = told.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok());
    bytes.unwrap_or(0.0)
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Sequential direct access; GB/s.
fn fio(
    file: &Path,
    direction: &str,
    (engine, depth, jobs): (&str, usize, usize),
    request: usize,
    bytes: usize,
) -> Result<f64> {
    let each = bytes / jobs;
    let mut command = Command::new("fio");
    command.args(["--name=raw", "--direct=1", "--group_reporting", "--output-format=json"]);
    command.arg(format!("--filename={}", file.display())).arg(format!("--rw={direction}"));
    command.arg(format!("--ioengine={engine}")).arg(format!("--iodepth={depth}")).arg(format!("--numjobs={jobs}"));
    command.args([format!("--bs={request}"), format!("--size={each}"), format!("--offset_increment={each}")]);
    let done = command.output().map_err(|error| format!("fio: {error}; is it installed?"))?;
    let told: Value = serde_json::from_slice(&done.stdout).map_err(|_| "fio failed")?;
    let speed = told["jobs"][0][direction]["bw_bytes"].as_f64().ok_or("fio said nothing")?;
    Ok(speed / 1e9)
}

fn open(folder: &Path, capacity: usize) -> Result<Arc<DiskTier>> {
    let settings = Settings { capacity_bytes: capacity as u64, min_free_bytes: 0, ..Settings::default() };
    Ok(DiskTier::open(folder, settings, Arc::new(EventLog::new(Epoch(1))))?)
}

fn fingerprint() -> Fingerprint {
    Fingerprint::of([("what", &b"disk_speed"[..])])
}

/// Blocks that follow each other, in bytes: the turns of one conversation, which mostly lie in one segment.
const CONVERSATION: usize = 4 << 20;

/// Where payloads begin in memory: at pages, as in the host's.
const PAGE: usize = 4096;

/// Chains of blocks with payloads from memory that no cache holds. Another `set` has other names.
fn chains(set: &str, count: usize, block_bytes: usize, chain: usize) -> Vec<Block> {
    let tokens: Vec<u32> = (0..count as u32).collect();
    let names = kvbm::ChainKey::root(&Domain::shared(), set, None).names(&tokens, 1);
    let each = (LOAD / block_bytes).max(1);
    let memory: Bytes = (0..each * block_bytes + PAGE).map(|at| (at / 7) as u8).collect();
    let skip = memory.as_ptr().align_offset(PAGE);
    let payload = |n: usize| memory.slice(skip + n % each * block_bytes..skip + (n % each + 1) * block_bytes);
    let parents = [None].into_iter().chain(names.iter().copied().map(Some));
    let parents = parents.enumerate().map(|(n, parent)| parent.filter(|_| n % chain > 0));
    let named = names.iter().zip(parents).enumerate();
    named.map(|(n, (name, parent))| Block::seal(*name, parent, fingerprint(), payload(n))).collect()
}

async fn store(tier: &DiskTier, blocks: &[Block], offer: usize) -> Result<()> {
    let offers = blocks.chunks(offer).map(|some| tier.store(some.to_vec()));
    let mut offers = futures::stream::iter(offers).buffered(3);
    while let Some(answers) = offers.next().await {
        answers.into_iter().collect::<Result<Vec<()>, _>>()?;
    }
    Ok(())
}

/// The tier that is measured: a log that is full, and one that is begun in each round.
struct Subject {
    folder: PathBuf,
    block_bytes: usize,
    count: usize,
    chain: usize,
    full: Arc<DiskTier>,
    grows: Option<Arc<DiskTier>>,
    blocks: Vec<Block>,
    round: usize,
}

impl Subject {
    async fn new(folder: &Path, arguments: &Arguments) -> Result<Self> {
        let Arguments { block_bytes, mib, chain, .. } = *arguments;
        let (total, count) = (mib << 20, (mib << 20) / block_bytes);
        let full = open(&folder.join("full"), total)?;
        let chain = chain.unwrap_or(CONVERSATION / block_bytes).max(1);
        let folder = folder.join("grows");
        let mut subject = Self { folder, block_bytes, count, chain, full, grows: None, blocks: Vec::new(), round: 0 };
        subject.renew();
        store(&subject.full, &subject.blocks, subject.offer()).await?;
        Ok(subject)
    }

    /// Bytes of one measurement.
    fn bytes(&self) -> f64 {
        (self.count * self.block_bytes) as f64
    }

    fn offer(&self) -> usize {
        OFFER.div_ceil(self.block_bytes)
    }

    /// Other blocks, of which no log has any.
    fn renew(&mut self) {
        self.round += 1;
        self.blocks = chains(&format!("round {}", self.round), self.count, self.block_bytes, self.chain);
    }

    /// GB/s of payload.
    async fn run(&mut self, way: &str) -> Result<f64> {
        let mut started = Instant::now();
        match way {
            "write" => {
                let tier = open(&self.folder, 4 * self.count * self.block_bytes)?;
                started = Instant::now();
                store(&tier, &self.blocks, self.offer()).await?;
                self.grows = Some(tier);
            }
            "rewrite" => store(&self.full, &self.blocks, self.offer()).await?,
            _ => self.load(self.grows.as_ref().ok_or("nothing was written")?).await?,
        }
        let took = started.elapsed();
        if way == "read" {
            self.grows = None;
            std::fs::remove_dir_all(&self.folder)?;
        }
        Ok(self.bytes() / took.as_secs_f64() / 1e9)
    }

    /// Loads and verifies all of the blocks, as the manager does.
    async fn load(&self, tier: &DiskTier) -> Result<()> {
        let names: Vec<SequenceHash> = self.blocks.iter().map(|block| block.header.name).collect();
        for some in names.chunks(LOAD.div_ceil(self.block_bytes)) {
            let loading = tier.load(fingerprint(), some.to_vec()).map(|(index, answer)| {
                let block = answer?.ok_or("a block is missing")?;
                Ok::<_, Box<dyn Error>>((some[index], block))
            });
            let verify = |batch: Vec<(SequenceHash, Block)>| async move {
                let verifying = tokio::task::spawn_blocking(move || {
                    batch.into_iter().try_for_each(|(name, block)| block.verify(name, fingerprint()).map(drop))
                });
                Ok(verifying.await??)
            };
            let batches = loading.try_chunks(VERIFY.div_ceil(self.block_bytes)).map_err(|error| error.1);
            batches.try_for_each_concurrent(2, verify).await?;
        }
        Ok(())
    }
}

/// Writes many of the smallest blocks and opens the log again, some times.
async fn recovery(folder: &Path, count: usize, rounds: usize) -> Result<Value> {
    let total = count * 512;
    let tier = open(folder, 4 * total)?;
    store(&tier, &chains("recovery", count, 300, 64), OFFER / 512).await?;
    drop(tier);
    let mut seconds = Vec::new();
    let mut cold = true;
    for _ in 0..rounds {
        cold &= Command::new("sh").args(["-c", "sync; echo 1 > /proc/sys/vm/drop_caches"]).status()?.success();
        let started = Instant::now();
        let tier = open(folder, 4 * total)?;
        seconds.push(started.elapsed().as_secs_f64());
        if tier.usage().blocks != count as u64 {
            return Err(format!("{} of {count} blocks came back", tier.usage().blocks).into());
        }
    }
    let cached = if cold { "dropped from the page cache" } else { "in the page cache" };
    eprintln!("{count} blocks back in {:.3} s (median of {rounds}), {cached}", median(&seconds));
    Ok(json!({ "blocks": count, "seconds": median(&seconds), "cold": cold, "rounds": rounds }))
}
