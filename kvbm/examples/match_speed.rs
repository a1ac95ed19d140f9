//! Latency of finding and pinning a prompt's blocks among a million resident blocks.
//!
//! ```text
//! cargo run --release -p kvbm --example match_speed [-- --json]
//! ```
//!
//! The device is a fake without bytes. Chains of 1,000 blocks are registered in turns, so that the blocks of a chain
//! are far apart in memory. They are looked up in random order, so that no CPU cache has their entries. The measured
//! call is `BlockManager::lookup`, from hashes to pinned blocks.

use kvbm::splitmix::SplitMix64;
use kvbm::{BlockAttrs, BlockId, BlockManager, DeviceBlocks, Epoch, EventLog, Fingerprint, Metrics, SequenceHash};
use serde_json::json;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Resident blocks, blocks of a chain, and measured lookups.
const RESIDENT: usize = 1_000_000;
const CHAIN: usize = 1_000;
const SAMPLES: usize = 4_000;

/// Slots without bytes.
struct EmptyDevice(usize);

impl DeviceBlocks for EmptyDevice {
    fn capacity(&self) -> usize {
        self.0
    }
    fn block_bytes(&self) -> usize {
        0
    }
    fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of([])
    }
    fn read(&self, _: BlockId, _: &mut [u8]) {}
    fn write(&self, _: BlockId, _: &[u8]) {}
}

/// A seeded random number generator.
struct Random(SplitMix64);

impl Random {
    fn below(&mut self, bound: usize) -> usize {
        (self.0.next_u64() % bound as u64) as usize
    }

    fn chain(&mut self, blocks: usize) -> Vec<SequenceHash> {
        let hash = |random: &mut Self| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&random.0.next_u64().to_le_bytes());
            bytes[8..].copy_from_slice(&random.0.next_u64().to_le_bytes());
            SequenceHash::from_bytes(bytes)
        };
        (0..blocks).map(|_| hash(self)).collect()
    }
}

fn register(manager: &BlockManager, chain: &[SequenceHash], at: usize, blocks: usize) {
    let slots = manager.allocate(blocks).expect("no block is in use");
    let indices = at..at + blocks;
    let parent = |n: usize| n.checked_sub(1).map(|n| chain[n]);
    let full = slots.into_iter().zip(indices);
    let full = full.map(|(slot, n)| slot.complete(chain[n], parent(n), BlockAttrs::default()));
    drop(manager.register_all(full.collect()));
}

/// A full cache, and its chains.
fn fill(random: &mut Random) -> (BlockManager, Vec<Vec<SequenceHash>>) {
    // Some free slots for the thread that registers blocks.
    let device = Arc::new(EmptyDevice(RESIDENT + 10 * CHAIN));
    let metrics = Metrics::new(&prometheus::Registry::new()).expect("a new registry has no metrics");
    let manager = BlockManager::new(device, None, vec![], Arc::new(EventLog::new(Epoch(1))), metrics);
    let chains: Vec<_> = (0..RESIDENT / CHAIN).map(|_| random.chain(CHAIN)).collect();
    // Registers 16 blocks of each chain at a time, as chunked prefills do, in a new random order each time.
    let mut order: Vec<usize> = (0..chains.len()).collect();
    for at in (0..CHAIN).step_by(16) {
        for last in (1..order.len()).rev() {
            order.swap(last, random.below(last + 1));
        }
        for chain in &order {
            register(&manager, &chains[*chain], at, 16.min(CHAIN - at));
        }
    }
    (manager, chains)
}

/// Durations of lookups and of releases, each sorted.
fn measure(manager: &BlockManager, chains: &[Vec<SequenceHash>], random: &mut Random) -> [Vec<Duration>; 2] {
    let mut matched = Vec::with_capacity(SAMPLES);
    let mut released = Vec::with_capacity(SAMPLES);
    for _ in 0..SAMPLES {
        let chain = &chains[random.below(chains.len())];
        // The hashes of a prompt are in the CPU cache: they were just computed.
        let hashes = std::hint::black_box(chain.clone());
        let start = Instant::now();
        let held = manager.lookup(&hashes);
        let elapsed = start.elapsed();
        if held.len() < CHAIN {
            // Some blocks of the chain were evicted for blocks that the other thread registers.
            continue;
        }
        matched.push(elapsed);
        let start = Instant::now();
        drop(held);
        released.push(start.elapsed());
    }
    matched.sort_unstable();
    released.sort_unstable();
    [matched, released]
}

fn show(case: &str, [matched, released]: &[Vec<Duration>; 2], json: bool) {
    let us = |times: &[Duration], part: f64| times[((times.len() - 1) as f64 * part) as usize].as_secs_f64() * 1e6;
    let [p50, p90, p99] = [0.5, 0.9, 0.99].map(|part| us(matched, part));
    let release = us(released, 0.5);
    if json {
        let [p50, p90, p99, release] = [p50, p90, p99, release].map(|us| (us * 10.0).round() / 10.0);
        println!(
            "{}",
            json!({
                "case": case, "resident": RESIDENT, "blocks": CHAIN, "p50_us": p50, "p90_us": p90, "p99_us": p99,
                "release_p50_us": release,
            })
        );
    } else {
        println!("{case:<28} {p50:>8.1} {p90:>8.1} {p99:>8.1} {release:>12.1}");
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    let mut random = Random(SplitMix64::new(1));
    let (manager, chains) = fill(&mut random);
    if !json {
        println!("matching {CHAIN} blocks of {RESIDENT}, µs          p50      p90      p99  release p50");
    }
    show("alone", &measure(&manager, &chains, &mut random), json);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut random = Random(SplitMix64::new(2));
            while !done.load(Ordering::Relaxed) {
                // As a decoding batch, which fills a few blocks from time to time.
                register(&manager, &random.chain(16), 0, 16);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        show("beside one that registers", &measure(&manager, &chains, &mut random), json);
        done.store(true, Ordering::Relaxed);
    });
}
