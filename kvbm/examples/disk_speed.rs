//! How fast the disk tier writes and reads, next to `dd` with direct access on the same folder, in turns.
//!
//! `cargo run --release -p kvbm --example disk_speed -- FOLDER [BLOCK_BYTES [TOTAL_MIB]]`
//!
//! Devices burst and other load comes and goes, so only the ratios of one run mean something; the median of five is shown.

use bytes::Bytes;
use futures::StreamExt;
use kvbm::disk::Settings;
use kvbm::{Block, DiskTier, Domain, Epoch, EventLog, Fingerprint, SequenceHash, Tier};
use std::error::Error;
use std::path::Path;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::time::Instant;

const ROUNDS: usize = 5;
/// Bytes that one offer carries; two are under way, below what the queue takes.
const OFFER: usize = 16 << 20;
/// Bytes that one load asks for: the KV of some thousand tokens.
const LOAD: usize = 64 << 20;

#[tokio::main]
async fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = arguments.next().ok_or("which folder?")?;
    let block_bytes: usize = arguments.next().map_or(Ok(72 << 10), |bytes| bytes.parse())?;
    let total_mib: usize = arguments.next().map_or(Ok(1024), |mib| mib.parse())?;
    let folder = Path::new(&folder).join("disk_speed");
    std::fs::create_dir_all(&folder)?;
    let raw = folder.join("raw");

    let (mut writes, mut reads) = (Vec::new(), Vec::new());
    for round in 0..ROUNDS {
        let plain_write = dd("/dev/zero".as_ref(), &raw, "oflag=direct", "4M", total_mib / 4)?;
        let (write, read) = tier(&folder.join(round.to_string()), block_bytes, total_mib << 20).await?;
        let plain_read = dd(&raw, "/dev/null".as_ref(), "iflag=direct", "1M", total_mib)?;
        println!("write {write:.2} of {plain_write:.2} GB/s, read {read:.2} of {plain_read:.2} GB/s");
        writes.push(write / plain_write);
        reads.push(read / plain_read);
    }
    let median = |ratios: &mut Vec<f64>| {
        ratios.sort_by(f64::total_cmp);
        ratios[ratios.len() / 2]
    };
    println!("blocks of {block_bytes} bytes, median of {ROUNDS} rounds, share of dd with one request at a time:");
    println!("write {:.2}, read and verified {:.2}", median(&mut writes), median(&mut reads));
    Ok(std::fs::remove_dir_all(&folder)?)
}

/// Copies with `dd`; GB/s.
fn dd(from: &Path, to: &Path, flag: &str, block: &str, count: usize) -> Result<f64, Box<dyn Error>> {
    let mut command = Command::new("dd");
    command.arg(format!("if={}", from.display())).arg(format!("of={}", to.display())).arg(flag);
    command.args([format!("bs={block}"), format!("count={count}"), "conv=notrunc".into()]);
    let started = Instant::now();
    let done = command.stderr(Stdio::null()).status()?;
    let bytes = count << if block == "4M" { 22 } else { 20 };
    if done.success() { Ok(bytes as f64 / started.elapsed().as_secs_f64() / 1e9) } else { Err("dd failed".into()) }
}

/// Writes and reads that much through a tier; GB/s of payload each.
async fn tier(folder: &Path, block_bytes: usize, total: usize) -> Result<(f64, f64), Box<dyn Error>> {
    let settings = Settings { capacity_bytes: 4 * total as u64, min_free_bytes: 0, ..Settings::default() };
    let tier = DiskTier::open(folder, settings, Arc::new(EventLog::new(Epoch(1))))?;
    let fingerprint = Fingerprint::of([("what", &b"disk_speed"[..])]);
    let root = kvbm::ChainKey::root(&Domain::shared(), "disk_speed", None);
    let tokens: Vec<u32> = (0..(total / block_bytes) as u32).collect();
    let names: Vec<SequenceHash> = root.names(&tokens, 1);
    let payload = Bytes::from(vec![7; block_bytes]);
    let blocks: Vec<Block> = names.iter().map(|name| Block::seal(*name, None, fingerprint, payload.clone())).collect();

    let started = Instant::now();
    let offers = blocks.chunks(OFFER.div_ceil(block_bytes)).map(|some| tier.store(some.to_vec()));
    let mut offers = futures::stream::iter(offers).buffered(2);
    while let Some(answers) = offers.next().await {
        answers.into_iter().collect::<Result<Vec<()>, _>>()?;
    }
    drop(offers);
    let write = (names.len() * block_bytes) as f64 / started.elapsed().as_secs_f64() / 1e9;

    let started = Instant::now();
    for some in names.chunks(LOAD.div_ceil(block_bytes)) {
        let mut loading = tier.load(fingerprint, some.to_vec());
        while let Some((index, answer)) = loading.next().await {
            answer?.ok_or("a block is missing")?.verify(some[index], fingerprint)?;
        }
    }
    let read = (names.len() * block_bytes) as f64 / started.elapsed().as_secs_f64() / 1e9;
    drop(tier);

    let started = Instant::now();
    let again = DiskTier::open(folder, settings, Arc::new(EventLog::new(Epoch(2))))?;
    println!("opened again with {} blocks in {:.3} s", again.usage().blocks, started.elapsed().as_secs_f64());
    drop(again);
    std::fs::remove_dir_all(folder)?;
    Ok((write, read))
}
