//! How fast the disk tier writes and reads, next to `fio` with direct access on the same folder, in turns; and how fast many
//! blocks are found again after a restart.
//!
//! `cargo run --release -p kvbm --example disk_speed -- FOLDER [--block-bytes N] [--mib N] [--rounds N] [--recover N] [--json]`
//!
//! A log that grows writes into space that the filesystem has to find, so it stands beside a file that `fio` begins; a full
//! one writes where older blocks were, as `fio` does into a file that is there. Without `fio` only the tier is measured, and that is said. Devices burst and other load comes and goes, so only the ratios of one run mean something; medians are shown. `--recover N`
//! writes N blocks of one sector each and opens the log again, its pages dropped from the page cache where that is allowed.

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use kvbm::disk::Settings;
use kvbm::{Block, DiskTier, Domain, Epoch, EventLog, Fingerprint, SequenceHash, Tier};
use serde_json::{Value, json};
use std::error::Error;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Instant;

type Result<T, E = Box<dyn Error>> = std::result::Result<T, E>;

/// Bytes that one offer carries, as the manager offers them; some are under way, within what the queue takes.
const OFFER: usize = 16 << 20;
/// Bytes that one load asks for: the KV of some thousand tokens.
const LOAD: usize = 64 << 20;
/// Bytes that are verified together, as the manager does.
const VERIFY: usize = 4 << 20;

/// What `fio` is asked for: its engine, requests under way, processes.
const REFERENCES: [(&str, usize, usize); 3] = [("psync", 1, 1), ("psync", 1, 2), ("io_uring", 8, 1)];

/// What is measured, and what `fio` calls it.
const WAYS: [(&str, &str); 3] = [("write", "write"), ("rewrite", "write"), ("read", "read")];

struct Arguments {
    folder: PathBuf,
    block_bytes: usize,
    mib: usize,
    rounds: usize,
    recover: Option<usize>,
    json: bool,
}

impl Arguments {
    fn read() -> Result<Self> {
        let mut given = std::env::args().skip(1);
        let folder = given.next().filter(|folder| !folder.starts_with('-')).ok_or("which folder?")?;
        let mut read =
            Self { folder: folder.into(), block_bytes: 72 << 10, mib: 1024, rounds: 5, recover: None, json: false };
        while let Some(name) = given.next() {
            let mut number = || -> Result<usize> { Ok(given.next().ok_or("a number is missing")?.parse()?) };
            match name.as_str() {
                "--block-bytes" => read.block_bytes = number()?,
                "--mib" => read.mib = number()?,
                "--rounds" => read.rounds = number()?,
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
    let mut ours: [Vec<f64>; WAYS.len()] = Default::default();
    let mut theirs: [[Vec<f64>; WAYS.len()]; REFERENCES.len()] = Default::default();
    for round in 0..rounds {
        for (reference, of) in references.iter().zip(&mut theirs) {
            // The file is new the first time, and there the second.
            let _ = std::fs::remove_file(&raw);
            for (of, (_, direction)) in of.iter_mut().zip(WAYS) {
                of.push(fio(&raw, direction, *reference, mib)?);
            }
        }
        let speeds = tier(&folder.join(round.to_string()), block_bytes, mib << 20).await?;
        ours.iter_mut().zip(speeds).for_each(|(of, speed)| of.push(speed));
        if !arguments.json {
            let [write, rewrite, read] = speeds;
            println!("round {round}: write {write:.2}, rewrite {rewrite:.2}, read {read:.2} GB/s");
        }
    }
    let mut told = json!({ "block_bytes": block_bytes, "mib": mib, "rounds": rounds, "unit": "GB/s" });
    for (direction, (name, _)) in WAYS.into_iter().enumerate() {
        told[name] = json!({ "tier": median(&ours[direction]), "fio": [] });
        let mut compared = Vec::new();
        for ((engine, depth, jobs), of) in references.iter().zip(&theirs) {
            let reference = format!("fio {engine} x{}", depth * jobs);
            let ratios: Vec<f64> = ours[direction].iter().zip(&of[direction]).map(|(our, their)| our / their).collect();
            let (their, ratio) = (median(&of[direction]), median(&ratios));
            if !arguments.json {
                let our = median(&ours[direction]);
                println!("{name:7} {our:.2} GB/s, {reference:14} {their:.2} GB/s: median ratio {ratio:.2}");
            }
            compared.push(json!({ "reference": reference, "speed": their, "ratio": ratio }));
        }
        told[name]["fio"] = compared.into();
    }
    Ok(told)
}

fn median(values: &[f64]) -> f64 {
    let mut values = values.to_vec();
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

/// Sequential direct access in units of a megabyte, what one of our reads is; GB/s.
fn fio(file: &Path, direction: &str, (engine, depth, jobs): (&str, usize, usize), mib: usize) -> Result<f64> {
    let each = mib / jobs;
    let mut command = Command::new("fio");
    command.args(["--name=raw", "--direct=1", "--bs=1M", "--group_reporting", "--output-format=json"]);
    command.arg(format!("--filename={}", file.display())).arg(format!("--rw={direction}"));
    command.arg(format!("--ioengine={engine}")).arg(format!("--iodepth={depth}")).arg(format!("--numjobs={jobs}"));
    command.args([format!("--size={each}M"), format!("--offset_increment={each}M")]);
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

/// Blocks that follow each other: the turns of one conversation. A full log carries over what later blocks build upon, and
/// one chain from end to end would be carried over again and again.
const CONVERSATION: usize = 64;

/// Chains of blocks with payloads from memory that no cache holds.
fn chains(count: usize, block_bytes: usize) -> Vec<Block> {
    let tokens: Vec<u32> = (0..count as u32).collect();
    let names = kvbm::ChainKey::root(&Domain::shared(), "disk_speed", None).names(&tokens, 1);
    let memory: Bytes = (0..LOAD.max(block_bytes)).map(|at| (at / 7) as u8).collect();
    let each = memory.len() / block_bytes;
    let payload = |n: usize| memory.slice(n % each * block_bytes..(n % each + 1) * block_bytes);
    let parents = [None].into_iter().chain(names.iter().copied().map(Some));
    let parents = parents.enumerate().map(|(n, parent)| parent.filter(|_| n % CONVERSATION > 0));
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

/// Writes, writes into a full log, and reads that much through a tier; GB/s of payload each.
async fn tier(folder: &Path, block_bytes: usize, total: usize) -> Result<[f64; WAYS.len()]> {
    let blocks = chains(2 * (total / block_bytes), block_bytes);
    let (blocks, others) = blocks.split_at(blocks.len() / 2);
    let names: Vec<SequenceHash> = blocks.iter().map(|block| block.header.name).collect();
    let (bytes, offer) = ((names.len() * block_bytes) as f64, OFFER.div_ceil(block_bytes));

    let full = open(folder, total)?;
    store(&full, others, offer).await?;
    let started = Instant::now();
    store(&full, blocks, offer).await?;
    let rewrite = bytes / started.elapsed().as_secs_f64() / 1e9;
    drop(full);
    std::fs::remove_dir_all(folder)?;

    let tier = open(folder, 4 * total)?;
    let started = Instant::now();
    store(&tier, blocks, offer).await?;
    let write = bytes / started.elapsed().as_secs_f64() / 1e9;

    let started = Instant::now();
    for some in names.chunks(LOAD.div_ceil(block_bytes)) {
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
        loading
            .try_chunks(VERIFY.div_ceil(block_bytes))
            .map_err(|error| error.1)
            .try_for_each_concurrent(2, verify)
            .await?;
    }
    let read = bytes / started.elapsed().as_secs_f64() / 1e9;
    drop(tier);
    std::fs::remove_dir_all(folder)?;
    Ok([write, rewrite, read])
}

/// Writes many of the smallest blocks and opens the log again, some times.
async fn recovery(folder: &Path, count: usize, rounds: usize) -> Result<Value> {
    let total = count * 512;
    let tier = open(folder, 4 * total)?;
    store(&tier, &chains(count, 300), OFFER / 512).await?;
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
