//! Throughput of the disk tier, compared with `fio` with direct access on the same folder, and the time to recover many
//! blocks after a restart.
//!
//! ```text
//! cargo run --release -p kvbm --example disk_speed -- FOLDER [--block-bytes N] [--mib N] [--rounds N] [--way NAME]
//!     [--chain N] [--recover N] [--json]
//! ```
//!
//! A growing log writes into space that the filesystem allocates, so it is compared with a new file of `fio`; a full
//! log overwrites older blocks, and is compared with an existing file. Neither side syncs: both promise only that the
//! device has the bytes. The clock of `fio` starts when its file is allocated, that of the tier when it is asked to
//! store.
//! `fio` makes requests of the size of a block, and in other ways requests of one megabyte or more.
//!
//! Devices burst and other load varies, so each measurement of the tier is between two of the same `fio`, and the
//! result is the median of its ratios to the two. The ratio of one `fio` to the one before shows the noise. Deleted
//! files are trimmed before the next measurement. Without `fio` only the tier is measured, with a warning. `--way
//! write`,
//! `rewrite` or `read` measures one of them.
//! `--chain N` makes chains of N blocks (default: four megabytes). Chains that span segments are carried over when the
//! log is full, which shows in the bytes written per byte stored. `--recover N` writes N small blocks and opens the log
//! again, with its pages dropped from the page cache where that is allowed.

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use kvbm::disk::Settings;
use kvbm::hugepages::{HUGE_PAGE, advise_hugepages};
use kvbm::{Block, DiskTier, Domain, Epoch, EventLog, Fingerprint, SequenceHash, Tier};
use serde_json::{Value, json};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Bytes of one store request, as the manager makes them. Several are in flight, within the limit of the queue.
const OFFER: usize = 16 << 20;
/// Bytes of one load: the KV of some thousand tokens.
const LOAD: usize = 64 << 20;
/// Bytes that are verified together, as the manager does.
const VERIFY: usize = 4 << 20;

/// Concurrent loads, so that the device is busy while the last blocks of one load are verified.
const LOADS: usize = 2;

/// Parameters of `fio`.
struct Reference {
    engine: &'static str,
    depth: usize,
    jobs: usize,
    /// Minimum request size in bytes.
    least: usize,
}

const REFERENCES: [Reference; 4] = [
    Reference { engine: "psync", depth: 1, jobs: 1, least: 0 },
    Reference { engine: "psync", depth: 1, jobs: 1, least: 1 << 20 },
    Reference { engine: "psync", depth: 1, jobs: 2, least: 1 << 20 },
    Reference { engine: "io_uring", depth: 8, jobs: 1, least: 1 << 20 },
];

/// The measurements, and their names in `fio`.
const WAYS: [(&str, &str); 3] = [("write", "write"), ("rewrite", "write"), ("read", "read")];

/// Time for the device to trim freed space.
const SETTLE: Duration = Duration::from_millis(300);

struct Arguments {
    folder: PathBuf,
    block_bytes: usize,
    mib: usize,
    rounds: usize,
    way: Option<String>,
    chain: Option<usize>,
    recover: Option<usize>,
    json: bool,
}

impl Arguments {
    fn read() -> Result<Self> {
        let mut given = std::env::args().skip(1);
        let folder = given.next().filter(|folder| !folder.starts_with('-')).ok_or("which folder?")?;
        let (folder, way, chain, recover) = (folder.into(), None, None, None);
        let mut read = Self { folder, block_bytes: 72 << 10, mib: 1024, rounds: 5, way, chain, recover, json: false };
        while let Some(name) = given.next() {
            let mut number = || -> Result<usize> { Ok(given.next().ok_or("a number is missing")?.parse()?) };
            match name.as_str() {
                "--way" => read.way = given.next().filter(|way| WAYS.iter().any(|(name, _)| name == way)),
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
    // Not `disk_speed`, which is the program itself if FOLDER is its folder.
    let folder = arguments.folder.join("disk_speed.measured");
    std::fs::create_dir_all(&folder)?;
    let report = match arguments.recover {
        Some(blocks) => recovery(&folder, blocks, arguments.rounds).await,
        None => speeds(&folder, &arguments).await,
    };
    std::fs::remove_dir_all(&folder)?;
    let report = report?;
    if arguments.json {
        println!("{}", serde_json::to_string_pretty(&report)?);
    }
    Ok(())
}

/// Measurements of the tier and of one reference, alternating.
#[derive(Default)]
struct Pairs {
    ours: Vec<f64>,
    /// One more than `ours`: each of `ours` is between two.
    theirs: Vec<f64>,
}

impl Pairs {
    fn ratios(&self) -> Vec<f64> {
        let beside = self.theirs.windows(2).map(|pair| (pair[0] * pair[1]).sqrt());
        self.ours.iter().zip(beside).map(|(ours, theirs)| ours / theirs).collect()
    }

    /// Ratio of each reference measurement to the one before.
    fn noise(&self) -> Vec<f64> {
        self.theirs.windows(2).map(|pair| pair[1] / pair[0]).collect()
    }
}

/// Measures the tier and `fio` in turns.
async fn speeds(folder: &Path, arguments: &Arguments) -> Result<Value> {
    let Arguments { block_bytes, mib, rounds, json, .. } = *arguments;
    let mut references: Vec<&Reference> = REFERENCES
        .iter()
        .filter(|of| of.least != 1 << 20 || of.depth * of.jobs > 1 || block_bytes < of.least)
        .collect();
    if Command::new("fio").arg("--version").output().is_err() {
        eprintln!("fio is not installed, so there is nothing to compare with: apt-get install fio");
        references.clear();
    }
    let mut tier = Subject::new(folder, arguments).await?;
    let mut report = json!({ "block_bytes": block_bytes, "mib": mib, "rounds": rounds, "unit": "GB/s" });
    for (name, direction) in WAYS {
        if arguments.way.as_ref().is_some_and(|way| way != name) {
            continue;
        }
        let (mut ours, mut written, mut compared) = (Vec::new(), Vec::new(), Vec::new());
        // Without references the loop runs once, with `None`.
        for reference in references.iter().copied().map(Some).chain(references.is_empty().then_some(None)) {
            let raw = Raw {
                file: folder.join("raw"),
                direction,
                begins: name == "write",
                request: block_bytes,
                bytes: mib << 20,
            };
            let mut pairs = Pairs::default();
            pairs.theirs.extend(raw.speed(reference)?);
            for _ in 0..rounds {
                let before = bytes_written();
                pairs.ours.push(tier.run(name).await?);
                written.push((bytes_written() - before) / tier.bytes());
                pairs.theirs.extend(raw.speed(reference)?);
            }
            let [least, median, most] = quartiles(&pairs.ours);
            if !json {
                println!("{name:7} {median:.2} GB/s ({least:.2} to {most:.2})");
            }
            if let Some(reference) = reference {
                let (name, speed) = (reference.name(block_bytes), quartiles(&pairs.theirs)[1]);
                let (ratios, noise) = (quartiles(&pairs.ratios()), quartiles(&pairs.noise()));
                if !json {
                    println!(
                        "    {:.2} of {name}, {speed:.2} GB/s: quartiles {:.2?}, and of it beside itself {:.2?}",
                        ratios[1], ratios, noise
                    );
                }
                compared.push(
                    json!({ "reference": name, "speed": speed, "ratio": ratios[1], "ratios": ratios, "noise": noise }),
                );
            }
            ours.append(&mut pairs.ours);
        }
        let (speed, written) = (quartiles(&ours)[1], quartiles(&written)[1]);
        if !json {
            println!("    {written:.3} bytes written for each that was stored or read");
        }
        report[name] = json!({ "tier": speed, "written": written, "fio": compared });
    }
    Ok(report)
}

/// Trims deleted files now: otherwise the device does it with the next commit, beside the measured writes.
fn settle(folder: &Path) -> Result<()> {
    std::fs::File::open(folder)?.sync_all()?;
    std::thread::sleep(SETTLE);
    Ok(())
}

/// Bytes that this process has written to devices so far.
fn bytes_written() -> f64 {
    let counters = std::fs::read_to_string("/proc/self/io").unwrap_or_default();
    let bytes = counters.lines().find_map(|line| line.strip_prefix("write_bytes: ")?.parse().ok());
    bytes.unwrap_or(0.0)
}

/// The quartiles of some values.
fn quartiles(values: &[f64]) -> [f64; 3] {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    [1, 2, 3].map(|quarter| values[(values.len() - 1) * quarter / 4])
}

impl Reference {
    fn name(&self, block_bytes: usize) -> String {
        let Self { engine, depth, jobs, least } = self;
        let request =
            if *least == 0 { "a block each".to_owned() } else { format!("{} KiB each", block_bytes.max(*least) >> 10) };
        format!("fio {engine} x{}, {request}", depth * jobs)
    }
}

/// A file that `fio` writes or reads from one end to the other.
struct Raw {
    file: PathBuf,
    direction: &'static str,
    /// Whether each measurement uses a new file.
    begins: bool,
    /// Bytes of a request, at least.
    request: usize,
    bytes: usize,
}

impl Raw {
    /// Throughput of sequential direct access in GB/s; `None` without a reference.
    fn speed(&self, reference: Option<&Reference>) -> Result<Option<f64>> {
        let Some(Reference { engine, depth, jobs, least }) = reference else { return Ok(None) };
        if self.begins {
            let _ = std::fs::remove_file(&self.file);
            settle(self.file.parent().ok_or("a file in a folder")?)?;
        }
        let each = self.bytes / jobs;
        let mut command = Command::new("fio");
        command.args(["--name=raw", "--direct=1", "--group_reporting", "--output-format=json"]);
        command.arg(format!("--filename={}", self.file.display())).arg(format!("--rw={}", self.direction));
        command.arg(format!("--ioengine={engine}")).arg(format!("--iodepth={depth}")).arg(format!("--numjobs={jobs}"));
        let request = self.request.max(*least);
        command.args([format!("--bs={request}"), format!("--size={each}"), format!("--offset_increment={each}")]);
        let done = command.output().map_err(|error| format!("fio: {error}"))?;
        let report: Value = serde_json::from_slice(&done.stdout).map_err(|_| "fio failed")?;
        let speed = report["jobs"][0][self.direction]["bw_bytes"].as_f64().ok_or("fio said nothing")?;
        Ok(Some(speed / 1e9))
    }
}

fn open(folder: &Path, capacity: usize) -> Result<Arc<DiskTier>> {
    let settings = Settings { capacity_bytes: capacity as u64, min_free_bytes: 0, ..Settings::default() };
    Ok(DiskTier::open(folder, settings, Arc::new(EventLog::new(Epoch(1))))?)
}

fn fingerprint() -> Fingerprint {
    Fingerprint::of([("what", &b"disk_speed"[..])])
}

/// Default bytes of a chain: the turns of one conversation, most of them in one segment.
const CONVERSATION: usize = 4 << 20;

/// Chains of blocks with payloads from uncached memory in huge pages, as in the host tier. Another `set` has other
/// hashes.
fn chains(set: &str, count: usize, block_bytes: usize, chain: usize) -> Vec<Block> {
    let tokens: Vec<u32> = (0..count as u32).collect();
    let names = kvbm::ChainKey::root(&Domain::shared(), set, None).hashes(&tokens, 1);
    let each = (LOAD / block_bytes).max(1);
    let mut memory = Vec::with_capacity(each * block_bytes + HUGE_PAGE);
    advise_hugepages(memory.spare_capacity_mut());
    memory.extend((0..memory.capacity()).map(|at| (at / 7) as u8));
    let memory = Bytes::from(memory);
    let skip = memory.as_ptr().align_offset(HUGE_PAGE);
    let payload = |n: usize| memory.slice(skip + n % each * block_bytes..skip + (n % each + 1) * block_bytes);
    let parents = [None].into_iter().chain(names.iter().copied().map(Some));
    let parents = parents.enumerate().map(|(n, parent)| parent.filter(|_| n % chain > 0));
    let named = names.iter().zip(parents).enumerate();
    named.map(|(n, (name, parent))| Block::new(*name, parent, fingerprint(), payload(n))).collect()
}

async fn store(tier: &DiskTier, blocks: &[Block], offer: usize) -> Result<()> {
    let offers = blocks.chunks(offer).map(|some| tier.store(some.to_vec()));
    let mut offers = futures::stream::iter(offers).buffered(3);
    while let Some(answers) = offers.next().await {
        answers.into_iter().collect::<Result<Vec<()>, _>>()?;
    }
    Ok(())
}

/// The measured logs: a full one, a new one for each measurement, and one that is read.
struct Subject {
    folder: PathBuf,
    block_bytes: usize,
    count: usize,
    chain: usize,
    full: Arc<DiskTier>,
    rests: Arc<DiskTier>,
    resting: Vec<SequenceHash>,
    sets: usize,
}

impl Subject {
    async fn new(folder: &Path, arguments: &Arguments) -> Result<Self> {
        let Arguments { block_bytes, mib, chain, .. } = *arguments;
        let (total, count) = (mib << 20, (mib << 20) / block_bytes);
        let [full, rests] =
            [("full", total), ("rests", 4 * total)].map(|(name, capacity)| open(&folder.join(name), capacity));
        let (full, rests) = (full?, rests?);
        let chain = chain.unwrap_or(CONVERSATION / block_bytes).max(1);
        let folder = folder.to_owned();
        let mut subject = Self { folder, block_bytes, count, chain, full, rests, resting: Vec::new(), sets: 0 };
        let blocks = subject.others();
        for tier in [&subject.full, &subject.rests] {
            store(tier, &blocks, subject.offer()).await?;
        }
        subject.resting = blocks.iter().map(|block| block.header.hash).collect();
        Ok(subject)
    }

    /// Bytes of one measurement.
    fn bytes(&self) -> f64 {
        (self.count * self.block_bytes) as f64
    }

    fn offer(&self) -> usize {
        OFFER.div_ceil(self.block_bytes)
    }

    /// New blocks, which no log has.
    fn others(&mut self) -> Vec<Block> {
        self.sets += 1;
        chains(&format!("set {}", self.sets), self.count, self.block_bytes, self.chain)
    }

    /// GB/s of payload.
    async fn run(&mut self, way: &str) -> Result<f64> {
        let blocks = if way == "read" { Vec::new() } else { self.others() };
        let folder = self.folder.join("grows");
        let started;
        let took = match way {
            "write" => {
                let tier = open(&folder, 4 * self.count * self.block_bytes)?;
                started = Instant::now();
                store(&tier, &blocks, self.offer()).await?;
                let took = started.elapsed();
                drop(tier);
                std::fs::remove_dir_all(&folder)?;
                settle(&self.folder)?;
                took
            }
            "rewrite" => {
                started = Instant::now();
                store(&self.full, &blocks, self.offer()).await?;
                started.elapsed()
            }
            _ => {
                started = Instant::now();
                self.load().await?;
                started.elapsed()
            }
        };
        Ok(self.bytes() / took.as_secs_f64() / 1e9)
    }

    /// Loads and verifies all of the blocks, as the manager does.
    async fn load(&self) -> Result<()> {
        let loads = self.resting.chunks(LOAD.div_ceil(self.block_bytes)).map(Ok);
        let loads = futures::stream::iter(loads);
        loads.try_for_each_concurrent(LOADS, |some| self.load_some(some)).await
    }

    async fn load_some(&self, names: &[SequenceHash]) -> Result<()> {
        let loading = self.rests.load(fingerprint(), names.to_vec()).map(|(index, answer)| {
            let block = answer?.ok_or("a block is missing")?;
            Ok::<_, Box<dyn Error>>((names[index], block))
        });
        let verify = |batch: Vec<(SequenceHash, Block)>| async move {
            let verifying = tokio::task::spawn_blocking(move || {
                batch.into_iter().try_for_each(|(name, block)| block.verify(name, fingerprint()).map(drop))
            });
            Ok(verifying.await??)
        };
        let batches = loading.try_chunks(VERIFY.div_ceil(self.block_bytes)).map_err(|error| error.1);
        batches.try_for_each_concurrent(2, verify).await
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
    eprintln!("{count} blocks back in {:.3} s (median of {rounds}), {cached}", quartiles(&seconds)[1]);
    Ok(json!({ "blocks": count, "seconds": quartiles(&seconds)[1], "cold": cold, "rounds": rounds }))
}
