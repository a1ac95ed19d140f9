//! How long it takes to find, and hold, a prompt's blocks among a million resident ones.
//!
//! ```text
//! cargo run --release -p kvbm --example match_speed [-- --json]
//! ```
//!
//! The device is a fake without bytes. Chains of 1,000 blocks are cached side by side, so that the blocks of one lie far
//! apart, and matched in random order, each time through memory that was last touched a thousand chains ago: nothing of it
//! is in a cache that is smaller than all of it. What is timed is `BlockManager::lookup`, from names to held blocks.

use kvbm::{BlockAttrs, BlockId, BlockManager, DeviceBlocks, Epoch, EventLog, Fingerprint, Metrics, SequenceHash};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

const RESIDENT: usize = 1_000_000;
const CHAIN: usize = 1_000;
const SAMPLES: usize = 4_000;

/// Slots without bytes.
struct Nothing(usize);

impl DeviceBlocks for Nothing {
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

/// Numbers that repeat with the seed (splitmix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    fn below(&mut self, bound: usize) -> usize {
        (self.next() % bound as u64) as usize
    }

    fn chain(&mut self, blocks: usize) -> Vec<SequenceHash> {
        let name = |random: &mut Self| {
            let mut bytes = [0; 16];
            bytes[..8].copy_from_slice(&random.next().to_le_bytes());
            bytes[8..].copy_from_slice(&random.next().to_le_bytes());
            SequenceHash::from_bytes(bytes)
        };
        (0..blocks).map(|_| name(self)).collect()
    }
}

fn register(manager: &BlockManager, chain: &[SequenceHash], at: usize, blocks: usize) {
    let slots = manager.allocate(blocks).expect("nobody holds anything");
    let names = at..at + blocks;
    let parent = |n: usize| n.checked_sub(1).map(|n| chain[n]);
    let full = slots.into_iter().zip(names);
    let full = full.map(|(slot, n)| slot.complete(chain[n], parent(n), BlockAttrs::default()));
    drop(manager.register_all(full.collect()));
}

/// A full cache, and what is in it.
fn fill(random: &mut Random) -> (BlockManager, Vec<Vec<SequenceHash>>) {
    // A little room, for what the other thread registers.
    let device = Arc::new(Nothing(RESIDENT + 10 * CHAIN));
    let metrics = Metrics::new(&prometheus::Registry::new()).expect("a registry of our own");
    let manager = BlockManager::new(device, None, vec![], Arc::new(EventLog::new(Epoch(1))), metrics);
    let chains: Vec<_> = (0..RESIDENT / CHAIN).map(|_| random.chain(CHAIN)).collect();
    // As prefills in chunks of 16 blocks do, in an order of their own each time.
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

/// Times of matches, sorted, and of letting go.
fn measure(manager: &BlockManager, chains: &[Vec<SequenceHash>], random: &mut Random) -> [Vec<Duration>; 2] {
    let [mut matched, mut released] = [Vec::with_capacity(SAMPLES), Vec::with_capacity(SAMPLES)];
    for _ in 0..SAMPLES {
        let chain = &chains[random.below(chains.len())];
        // A prompt's names were just computed.
        let names = std::hint::black_box(chain.clone());
        let start = Instant::now();
        let held = manager.lookup(&names);
        let elapsed = start.elapsed();
        if held.len() < CHAIN {
            // What the other thread registered took its room.
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
        println!(
            r#"{{"case":"{case}","resident":{RESIDENT},"blocks":{CHAIN},"p50_us":{p50:.1},"p90_us":{p90:.1},"p99_us":{p99:.1},"release_p50_us":{release:.1}}}"#
        );
    } else {
        println!("{case:<28} {p50:>8.1} {p90:>8.1} {p99:>8.1} {release:>12.1}");
    }
}

#[tokio::main(flavor = "current_thread")]
async fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    let mut random = Random(1);
    let (manager, chains) = fill(&mut random);
    if !json {
        println!("matching {CHAIN} blocks of {RESIDENT}, µs          p50      p90      p99  release p50");
    }
    show("alone", &measure(&manager, &chains, &mut random), json);
    let done = AtomicBool::new(false);
    std::thread::scope(|threads| {
        threads.spawn(|| {
            let mut random = Random(2);
            while !done.load(Ordering::Relaxed) {
                // A decoding batch: some blocks now and then.
                register(&manager, &random.chain(16), 0, 16);
                std::thread::sleep(Duration::from_micros(200));
            }
        });
        show("beside one that registers", &measure(&manager, &chains, &mut random), json);
        done.store(true, Ordering::Relaxed);
    });
}
