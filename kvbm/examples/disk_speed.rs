//! Throughput of the disk tier, compared with `fio` with direct access on the same folder, and the time to recover many
//! blocks after a restart.
//!
//! ```text
//! cargo run --release -p kvbm --example disk_speed -- FOLDER [--block-bytes N] [--mib N] [--rounds N]
//!     [--workload NAME] [--chain N] [--recover N] [--json]
//! ```
//!
//! A growing log writes into space that the filesystem allocates, so it is compared with a new file of `fio`; a full
//! log overwrites older blocks, and is compared with an existing file. Neither side syncs: both guarantee only that
//! the device has the bytes. The clock of `fio` starts when its file is allocated, that of the tier when it is asked to
//! store. `fio` makes requests of the size of a block in some jobs, and of one megabyte or more in others.
//!
//! Devices burst and other load varies, so each measurement of the tier is between two of the same `fio`, and the
//! result is the median of its ratios to the two. The ratio of one `fio` to the one before shows the noise. Deleted
//! files are trimmed before the next measurement. Without `fio` only the tier is measured, with a warning.
//!
//! `--workload write`, `rewrite` or `read` measures only that one. `--chain N` makes chains of N blocks (default: four
//! megabytes). Chains that span segments are carried over when the log is full, which shows in the bytes written per
//! byte stored. `--recover N` writes N small blocks and opens the log again, with its pages dropped from the page cache
//! where that is allowed.

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
const STORE_BYTES: usize = 16 << 20;
/// Bytes of one load: the KV cache of some thousand tokens.
const LOAD_BYTES: usize = 64 << 20;
/// Bytes that are verified together, as the manager does.
const VERIFY_BYTES: usize = 4 << 20;

/// Concurrent loads, so that the device is busy while the last blocks of one load are verified.
const CONCURRENT_LOADS: usize = 2;

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

/// The workloads, and their names in `fio`.
const WORKLOADS: [(&str, &str); 3] = [("write", "write"), ("rewrite", "write"), ("read", "read")];

/// Time for the device to trim freed space.
const SETTLE: Duration = Duration::from_millis(300);

struct Arguments {
    folder: PathBuf,
    block_bytes: usize,
    mib: usize,
    rounds: usize,
    workload: Option<String>,
    chain: Option<usize>,
    recover: Option<usize>,
    json: bool,
}

impl Arguments {
    fn read() -> Result<Self> {
        let mut given = std::env::args().skip(1);
        let folder = given.next().filter(|folder| !folder.starts_with('-')).ok_or("the folder is missing")?;
        let mut read = Self {
            folder: folder.into(),
            block_bytes: 72 << 10,
            mib: 1024,
            rounds: 5,
            workload: None,
            chain: None,
            recover: None,
            json: false,
        };
        while let Some(name) = given.next() {
            let mut number = || -> Result<usize> { Ok(given.next().ok_or("a number is missing")?.parse()?) };
            match name.as_str() {
                "--workload" => {
                    read.workload = given.next().filter(|workload| WORKLOADS.iter().any(|(name, _)| name == workload));
                }
                "--block-bytes" => read.block_bytes = number()?,
                "--mib" => read.mib = number()?,
                "--rounds" => read.rounds = number()?,
                "--chain" => read.chain = Some(number()?),
                "--recover" => read.recover = Some(number()?),
                "--json" => read.json = true,
                other => return Err(format!("unknown argument: {other}").into()),
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

/// Measurements of the tier and of `fio`, alternating.
#[derive(Default)]
struct Pairs {
    tier: Vec<f64>,
    /// One more than of the tier: each of the tier is between two of `fio`.
    fio: Vec<f64>,
}

impl Pairs {
    fn ratios(&self) -> Vec<f64> {
        let neighbours = self.fio.windows(2).map(|pair| (pair[0] * pair[1]).sqrt());
        self.tier.iter().zip(neighbours).map(|(tier, fio)| tier / fio).collect()
    }

    /// Ratio of each measurement of `fio` to the one before.
    fn noise(&self) -> Vec<f64> {
        self.fio.windows(2).map(|pair| pair[1] / pair[0]).collect()
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
    for (name, direction) in WORKLOADS {
        if arguments.workload.as_ref().is_some_and(|workload| workload != name) {
            continue;
        }
        let mut speeds = Vec::new();
        let mut written = Vec::new();
        let mut compared = Vec::new();
        // Without references the loop runs once, with `None`.
        for reference in references.iter().copied().map(Some).chain(references.is_empty().then_some(None)) {
            let job = FioJob {
                file: folder.join("raw"),
                direction,
                new_file: name == "write",
                request: block_bytes,
                bytes: mib << 20,
            };
            let mut pairs = Pairs::default();
            pairs.fio.extend(job.speed(reference)?);
            for _ in 0..rounds {
                let before = bytes_written();
                pairs.tier.push(tier.run(name).await?);
                written.push((bytes_written() - before) / tier.bytes());
                pairs.fio.extend(job.speed(reference)?);
            }
            let [least, median, most] = quartiles(&pairs.tier);
            if !json {
                println!("{name:7} {median:.2} GB/s ({least:.2} to {most:.2})");
            }
            if let Some(reference) = reference {
                let name = reference.name(block_bytes);
                let speed = quartiles(&pairs.fio)[1];
                let ratios = quartiles(&pairs.ratios());
                let noise = quartiles(&pairs.noise());
                if !json {
                    println!(
                        "    {:.2} of {name}, {speed:.2} GB/s: quartiles {:.2?}; of fio to fio {:.2?}",
                        ratios[1], ratios, noise
                    );
                }
                compared.push(
                    json!({ "reference": name, "speed": speed, "ratio": ratios[1], "ratios": ratios, "noise": noise }),
                );
            }
            speeds.append(&mut pairs.tier);
        }
        let speed = quartiles(&speeds)[1];
        let written = quartiles(&written)[1];
        if !json {
            println!("    {written:.3} bytes written per byte stored or read");
        }
        report[name] = json!({ "tier": speed, "written": written, "fio": compared });
    }
    Ok(report)
}

/// Trims deleted files now: otherwise the device does it at the next commit, during the measured writes.
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
struct FioJob {
    file: PathBuf,
    direction: &'static str,
    /// Whether each measurement uses a new file.
    new_file: bool,
    /// Minimum number of bytes of a request.
    request: usize,
    bytes: usize,
}

impl FioJob {
    /// Throughput of sequential direct access in GB/s; `None` without a reference.
    fn speed(&self, reference: Option<&Reference>) -> Result<Option<f64>> {
        let Some(Reference { engine, depth, jobs, least }) = reference else { return Ok(None) };
        if self.new_file {
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
        let speed = report["jobs"][0][self.direction]["bw_bytes"].as_f64().ok_or("fio printed no throughput")?;
        Ok(Some(speed / 1e9))
    }
}

fn open(folder: &Path, capacity: usize) -> Result<Arc<DiskTier>> {
    let settings = Settings { capacity_bytes: capacity as u64, min_free_bytes: 0, ..Settings::default() };
    Ok(DiskTier::open(folder, settings, Arc::new(EventLog::new(Epoch(1))))?)
}

fn fingerprint() -> Fingerprint {
    Fingerprint::of([("benchmark", &b"disk_speed"[..])])
}

/// Default bytes of a chain: one conversation, whose blocks are mostly in one segment.
const CHAIN_BYTES: usize = 4 << 20;

/// Chains of blocks with payloads from uncached memory in huge pages, as in the host tier. Another `set` has other
/// hashes.
fn chains(set: &str, count: usize, block_bytes: usize, chain: usize) -> Vec<Block> {
    let tokens: Vec<u32> = (0..count as u32).collect();
    let hashes = kvbm::ChainKey::root(&Domain::shared(), set, None).hashes(&tokens, 1);
    let each = (LOAD_BYTES / block_bytes).max(1);
    let mut memory = Vec::with_capacity(each * block_bytes + HUGE_PAGE);
    advise_hugepages(memory.spare_capacity_mut());
    memory.extend((0..memory.capacity()).map(|at| (at / 7) as u8));
    let memory = Bytes::from(memory);
    let skip = memory.as_ptr().align_offset(HUGE_PAGE);
    let payload = |n: usize| memory.slice(skip + n % each * block_bytes..skip + (n % each + 1) * block_bytes);
    let parents = [None].into_iter().chain(hashes.iter().copied().map(Some));
    let parents = parents.enumerate().map(|(n, parent)| parent.filter(|_| n % chain > 0));
    let blocks = hashes.iter().zip(parents).enumerate();
    blocks.map(|(n, (hash, parent))| Block::new(*hash, parent, fingerprint(), payload(n))).collect()
}

/// Stores blocks in requests of so many blocks.
async fn store(tier: &DiskTier, blocks: &[Block], request_blocks: usize) -> Result<()> {
    let requests = blocks.chunks(request_blocks).map(|part| tier.store(part.to_vec()));
    let mut requests = futures::stream::iter(requests).buffered(3);
    while let Some(answers) = requests.next().await {
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
    /// The log that is read, and its blocks.
    read: Arc<DiskTier>,
    stored: Vec<SequenceHash>,
    /// Number of sets of blocks made so far.
    sets: usize,
}

impl Subject {
    async fn new(folder: &Path, arguments: &Arguments) -> Result<Self> {
        let Arguments { block_bytes, mib, chain, .. } = *arguments;
        let total = mib << 20;
        let count = total / block_bytes;
        let full = open(&folder.join("full"), total)?;
        let read = open(&folder.join("read"), 4 * total)?;
        let chain = chain.unwrap_or(CHAIN_BYTES / block_bytes).max(1);
        let folder = folder.to_owned();
        let mut subject = Self { folder, block_bytes, count, chain, full, read, stored: Vec::new(), sets: 0 };
        let blocks = subject.new_blocks();
        for tier in [&subject.full, &subject.read] {
            store(tier, &blocks, subject.request_blocks()).await?;
        }
        subject.stored = blocks.iter().map(|block| block.header.hash).collect();
        Ok(subject)
    }

    /// Bytes of one measurement.
    fn bytes(&self) -> f64 {
        (self.count * self.block_bytes) as f64
    }

    /// Blocks of one store request.
    fn request_blocks(&self) -> usize {
        STORE_BYTES.div_ceil(self.block_bytes)
    }

    /// Blocks that no log has.
    fn new_blocks(&mut self) -> Vec<Block> {
        self.sets += 1;
        chains(&format!("set {}", self.sets), self.count, self.block_bytes, self.chain)
    }

    /// Runs a workload. Returns its GB/s of payload.
    async fn run(&mut self, workload: &str) -> Result<f64> {
        let blocks = if workload == "read" { Vec::new() } else { self.new_blocks() };
        let folder = self.folder.join("new");
        let started;
        let took = match workload {
            "write" => {
                let tier = open(&folder, 4 * self.count * self.block_bytes)?;
                started = Instant::now();
                store(&tier, &blocks, self.request_blocks()).await?;
                let took = started.elapsed();
                drop(tier);
                std::fs::remove_dir_all(&folder)?;
                settle(&self.folder)?;
                took
            }
            "rewrite" => {
                started = Instant::now();
                store(&self.full, &blocks, self.request_blocks()).await?;
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
        let loads = self.stored.chunks(LOAD_BYTES.div_ceil(self.block_bytes)).map(Ok);
        let loads = futures::stream::iter(loads);
        loads.try_for_each_concurrent(CONCURRENT_LOADS, |part| self.load_part(part)).await
    }

    async fn load_part(&self, hashes: &[SequenceHash]) -> Result<()> {
        let loading = self.read.load(fingerprint(), hashes.to_vec()).map(|(index, answer)| {
            let block = answer?.ok_or("a block is missing")?;
            Ok::<_, Box<dyn Error>>((hashes[index], block))
        });
        let verify = |batch: Vec<(SequenceHash, Block)>| async move {
            let verifying = tokio::task::spawn_blocking(move || {
                batch.into_iter().try_for_each(|(hash, block)| block.verify(hash, fingerprint()).map(drop))
            });
            Ok(verifying.await??)
        };
        let batches = loading.try_chunks(VERIFY_BYTES.div_ceil(self.block_bytes)).map_err(|error| error.1);
        batches.try_for_each_concurrent(2, verify).await
    }
}

/// Writes many of the smallest blocks and opens the log again, `rounds` times.
async fn recovery(folder: &Path, count: usize, rounds: usize) -> Result<Value> {
    let total = count * 512;
    let tier = open(folder, 4 * total)?;
    store(&tier, &chains("recovery", count, 300, 64), STORE_BYTES / 512).await?;
    drop(tier);
    let mut seconds = Vec::new();
    let mut cold = true;
    for _ in 0..rounds {
        cold &= Command::new("sh").args(["-c", "sync; echo 1 > /proc/sys/vm/drop_caches"]).status()?.success();
        let started = Instant::now();
        let tier = open(folder, 4 * total)?;
        seconds.push(started.elapsed().as_secs_f64());
        if tier.usage().blocks != count as u64 {
            return Err(format!("{} of {count} blocks were recovered", tier.usage().blocks).into());
        }
    }
    let cached = if cold { "dropped from the page cache" } else { "in the page cache" };
    eprintln!("{count} blocks recovered in {:.3} s (median of {rounds}), {cached}", quartiles(&seconds)[1]);
    Ok(json!({ "blocks": count, "seconds": quartiles(&seconds)[1], "cold": cold, "rounds": rounds }))
}
