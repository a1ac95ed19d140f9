//! Speed and compression ratio of the transforms of stored blocks: encoding and encryption.
//!
//! ```text
//! cargo run --release -p kvbm --example transform_speed [-- [--json] [FILE…]]
//! ```
//!
//! Measures the lossless codec on one core, on synthetic KV cache or on files of raw KV cache. For synthetic KV cache
//! it then measures how fast a disk tier in the folder for temporary files stores and loads blocks with each
//! combination of transforms. The results are medians. The combinations are measured in turns, because devices burst.

use bytes::Bytes;
use futures::StreamExt;
use kvbm::codec::synthetic::{self, Shape};
use kvbm::codec::{Coder, Mode, best_codec, encoded, entropy_bound};
use kvbm::crypt::{KeySource, Keyring, encrypted};
use kvbm::{Block, Codec, DiskTier, Epoch, EventLog, Fingerprint, Metrics, SequenceHash, Tier, disk};
use serde_json::{Value, json};
use std::error::Error;
use std::sync::Arc;
use std::time::Instant;

/// A block of 2 MiB, as bf16.
const SHAPE: Shape = Shape { layers: 32, tokens: 16, channels: 1024 };
const ENGINE: Fingerprint = Fingerprint::from_bytes([2; 32]);
/// Runs of the codec, and rounds of the tiers.
const RUNS: usize = 31;
/// Number of stored blocks: 256 MiB.
const BLOCKS: usize = 128;
const ROUNDS: usize = 9;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let (flags, files): (Vec<String>, Vec<String>) =
        std::env::args().skip(1).partition(|argument| argument.starts_with("--"));
    let json = flags.iter().any(|flag| flag == "--json");
    let mut report = json!({ "codec": [] });
    let mut payloads = Vec::new();
    if files.is_empty() {
        let values = synthetic::kv(1, SHAPE);
        payloads.push(("synthetic bf16".into(), synthetic::bf16(&values)));
        payloads.push(("synthetic f32".into(), synthetic::f32(&values)));
        report["tiers"] = tiers(synthetic::bf16(&values), json).await?;
    }
    for file in files {
        let raw = std::fs::read(&file)?;
        payloads.push((file, raw));
    }
    let each = payloads.into_iter().map(|(what, raw)| codec(&what, raw, json));
    report["codec"] = each.collect::<Vec<Value>>().into();
    if json {
        println!("{report:#}");
    }
    Ok(())
}

fn block(raw: Vec<u8>) -> Block {
    Block::new(SequenceHash::from_bytes([1; 16]), None, ENGINE, Bytes::from(raw))
}

fn codec(what: &str, raw: Vec<u8>, json: bool) -> Value {
    let block = block(raw);
    let bytes = block.payload.len();
    let (codec, estimated) = best_codec(&block.payload);
    let mut coder = Coder::default();
    let mut decoder = Coder::default();
    let encoded = coder.encode(&block, codec);
    let encode = rate(bytes, || drop(coder.encode(&block, codec)));
    let decode = rate(bytes, || drop(decoder.decode(&encoded)));
    let sample = rate(bytes, || assert!(best_codec(&block.payload).1 > 1.0));
    let ratio = bytes as f64 / encoded.payload.len() as f64;
    let bound = entropy_bound(codec, &block.payload);
    assert!(codec != Codec::Raw);
    if json {
        return json!({
            "what": what, "codec": format!("{codec:?}"), "ratio": ratio, "bound": bound, "of_bound": ratio / bound,
            "encode_gbps": encode, "decode_gbps": decode, "sample_gbps": sample,
        });
    }
    println!(
        "{what}: {codec:?}, ratio {ratio:.3} (sample {estimated:.3}, order-0 bound {bound:.3}: {:.1} %), \
         encode {encode:.2} GB/s, decode {decode:.2} GB/s, sample {sample:.0} GB/s",
        ratio / bound * 100.0
    );
    Value::Null
}

/// Throughput of stores and loads of a disk tier, by combination of transforms.
async fn tiers(raw: Vec<u8>, json: bool) -> Result<Value, Box<dyn Error>> {
    let folder = tempfile::tempdir()?;
    let metrics = Metrics::new(&prometheus::Registry::new())?;
    let keys = folder.path().join("keys");
    let source = KeySource::Env("KEY".into());
    let keys = Keyring::in_folder(&keys, source, Arc::new(|_| Some("5a".repeat(32)))).await?;
    let blocks: Vec<Block> = (0..BLOCKS)
        .map(|n| Block::new(SequenceHash::from_bytes([n as u8; 16]), None, ENGINE, Bytes::from(raw.clone())))
        .collect();
    let bytes = BLOCKS * raw.len();
    let mut seconds = [(); 4].map(|()| [Vec::new(), Vec::new()]);
    let mut cpu = [[0.0; 4]; 2];
    for round in 0..ROUNDS {
        for (n, times) in seconds.iter_mut().enumerate() {
            let path = folder.path().join(format!("{round}-{n}"));
            let settings = disk::Settings { capacity_bytes: 2 << 30, min_free_bytes: 0, ..Default::default() };
            let disk: Arc<dyn Tier> = DiskTier::open(&path, settings, Arc::new(EventLog::new(Epoch(1))))?;
            let encrypt = |tier| encrypted(tier, keys.clone(), metrics.clone());
            let tier = match n {
                0 => disk,
                1 => encrypt(disk),
                2 => encoded(disk, Mode::Smaller, metrics.clone()),
                _ => encoded(encrypt(disk), Mode::Smaller, metrics.clone()),
            };
            let before = cpu_seconds();
            let start = Instant::now();
            for part in blocks.chunks(8) {
                for answer in tier.store(part.to_vec()).await {
                    answer?;
                }
            }
            times[0].push(start.elapsed().as_secs_f64());
            cpu[0][n] += cpu_seconds() - before;
            let before = cpu_seconds();
            let start = Instant::now();
            let hashes = blocks.iter().map(|block| block.header.hash).collect();
            let mut loading = tier.load(blocks[0].header.fingerprint, hashes);
            while let Some((index, loaded)) = loading.next().await {
                let block = loaded?.ok_or("a miss")?;
                block.verify(blocks[index].header.hash, blocks[index].header.fingerprint)?;
            }
            times[1].push(start.elapsed().as_secs_f64());
            cpu[1][n] += cpu_seconds() - before;
            drop((loading, tier));
            std::fs::remove_dir_all(path)?;
        }
    }
    let mut report = json!({});
    for (direction, what) in ["store", "onboard"].into_iter().enumerate() {
        let rates = seconds.each_mut().map(|times| {
            times[direction].sort_by(f64::total_cmp);
            bytes as f64 / times[direction][ROUNDS / 2] / 1e9
        });
        let [raw, encrypted, encoded, both] = rates;
        let [raw_cpu, encrypted_cpu, encoded_cpu, both_cpu] =
            cpu[direction].map(|seconds| seconds / (ROUNDS * bytes) as f64 * 1e9);
        if json {
            let figures = |gbps: f64, seconds: f64| json!({ "gbps": gbps, "processor_seconds_per_gb": seconds });
            report[what] = json!({
                "raw": figures(raw, raw_cpu), "encrypted": figures(encrypted, encrypted_cpu),
                "encoded": figures(encoded, encoded_cpu), "both": figures(both, both_cpu),
            });
            continue;
        }
        println!(
            "disk tier, {what}: raw {raw:.2} GB/s, encrypted {encrypted:.2} ({:+.0} %), \
             encoded {encoded:.2} ({:+.0} %), both {both:.2} ({:+.0} %)",
            (encrypted / raw - 1.0) * 100.0,
            (encoded / raw - 1.0) * 100.0,
            (both / raw - 1.0) * 100.0,
        );
        println!(
            "  CPU seconds per GB: raw {raw_cpu:.2}, encrypted {encrypted_cpu:.2}, encoded {encoded_cpu:.2}, \
             both {both_cpu:.2}"
        );
    }
    Ok(report)
}

/// CPU seconds that this process has used. Unlike elapsed time, it does not depend on other processes.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let ticks = stat.rsplit(')').next().unwrap_or_default().split_whitespace().skip(11).take(2);
    ticks.filter_map(|ticks| ticks.parse::<f64>().ok()).sum::<f64>() / 100.0
}

/// Median throughput in GB/s of work on so many bytes.
fn rate(bytes: usize, mut work: impl FnMut()) -> f64 {
    let mut seconds: Vec<f64> = (0..RUNS)
        .map(|_| {
            let start = Instant::now();
            work();
            start.elapsed().as_secs_f64()
        })
        .collect();
    seconds.sort_by(f64::total_cmp);
    bytes as f64 / seconds[RUNS / 2] / 1e9
}
