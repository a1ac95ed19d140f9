//! Throughput of moving blocks between G1 and G2, compared with a plain copy of the same bytes.
//!
//! ```text
//! cargo run --release -p kvbm --example host_speed [-- --json]
//! ```
//!
//! The time of an offload is that of `BlockManager::flush` after blocks were registered, the time of an onboarding is
//! that of `BlockManager::onboard`. Both include all steps: finding, checksums, verifying, registering. The plain copy
//! uses one thread, and memory of the same size. The three are measured in turns; the results are medians.

use kvbm::device::copy_observed;
use kvbm::{
    BlockAttrs, BlockId, BlockManager, DeviceBlocks, Epoch, EventLog, Fingerprint, HostTier, Metrics, Recompute,
    SequenceHash, Tier,
};
use parking_lot::RwLock;
use serde_json::json;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Bytes moved in each round: more than any CPU cache holds.
const BYTES: usize = 96 << 20;
const ROUNDS: usize = 7;

/// Plain memory as a device: whole pages, as engines allocate them. Copies between memory of other alignment
/// take 1.5 times as long.
struct Device {
    slots: Vec<RwLock<Slot>>,
    block: usize,
}

struct Slot {
    memory: Vec<u8>,
    /// The first byte of a page.
    start: usize,
}

impl Slot {
    const PAGE: usize = 4096;

    fn new(block: usize, byte: u8) -> Self {
        let memory = vec![byte; block + Self::PAGE];
        let start = memory.as_ptr().align_offset(Self::PAGE);
        Self { memory, start }
    }
}

impl Device {
    fn new(slots: usize, block: usize) -> Self {
        let slot = |n: usize| RwLock::new(Slot::new(block, n as u8));
        Self { slots: (0..slots).map(slot).collect(), block }
    }
}

impl DeviceBlocks for Device {
    fn capacity(&self) -> usize {
        self.slots.len()
    }
    fn block_bytes(&self) -> usize {
        self.block
    }
    fn fingerprint(&self) -> Fingerprint {
        Fingerprint::of([])
    }
    fn read(&self, slot: BlockId, into: &mut [u8]) {
        self.read_observed(slot, into, &mut |_| {});
    }
    fn write(&self, slot: BlockId, from: &[u8]) {
        self.write_observed(slot, from, &mut |_| {});
    }
    fn read_observed(&self, slot: BlockId, into: &mut [u8], observe: &mut dyn FnMut(&[u8])) {
        let slot = self.slots[slot.0 as usize].read();
        copy_observed(&slot.memory[slot.start..][..self.block], into, observe);
    }
    fn write_observed(&self, slot: BlockId, from: &[u8], observe: &mut dyn FnMut(&[u8])) {
        let slot = &mut *self.slots[slot.0 as usize].write();
        copy_observed(from, &mut slot.memory[slot.start..][..self.block], observe);
    }
}

/// Hashes of the blocks of one round.
fn hashes(round: usize, count: usize) -> Vec<SequenceHash> {
    let hash = |n: usize| {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&(n as u64 + 1).to_le_bytes());
        bytes[8..].copy_from_slice(&(round as u64).to_le_bytes());
        SequenceHash::from_bytes(bytes)
    };
    (0..count).map(hash).collect()
}

/// Median throughput in GB/s of the plain copy, of offloading, and of onboarding.
async fn measure(block: usize) -> [f64; 3] {
    let count = BYTES / block;
    let metrics = Metrics::new(&prometheus::Registry::new()).expect("a new registry has no metrics");
    let log = Arc::new(EventLog::new(Epoch(1)));
    let device = Arc::new(Device::new(count, block));
    let host = HostTier::new(BYTES as u64, block, device.fingerprint(), log.clone(), &metrics);
    let host = host.expect("the system has this memory");
    let manager = BlockManager::new(device.clone(), Some(host.clone()), vec![], log, metrics);
    let from = vec![1_u8; BYTES];
    let mut to = vec![2_u8; BYTES];
    let mut times: [Vec<Duration>; 3] = Default::default();
    for round in 0..=ROUNDS {
        let start = Instant::now();
        for (to, from) in to.chunks_mut(block).zip(from.chunks(block)) {
            to.copy_from_slice(from);
        }
        std::hint::black_box(&mut to);
        let copied = start.elapsed();

        let hashes = hashes(round, count);
        let parents = std::iter::once(None).chain(hashes.iter().copied().map(Some));
        let slots = manager.allocate(count).expect("nothing is held");
        let full = slots.into_iter().zip(&hashes).zip(parents);
        let full = full.map(|((slot, hash), parent)| slot.complete(*hash, parent, BlockAttrs::default())).collect();
        let start = Instant::now();
        let held = manager.register_all(full);
        manager.flush().await;
        let offload = start.elapsed();
        drop(held);

        // Evicts the blocks from G1. G2 has them.
        drop(manager.allocate(count).expect("nothing is held"));
        let start = Instant::now();
        let onboarded = manager.onboard(&hashes, Recompute { seconds_per_block: Some(1.0), deadline: None }).await;
        let onboard = start.elapsed();
        assert_eq!(onboarded.blocks.len(), count, "all blocks are in G2, and computing them would take longer");
        drop(onboarded);
        // Otherwise the next round would compete for slots with these blocks, which were used more often than its own.
        for hash in &hashes {
            host.discard(device.fingerprint(), *hash);
        }
        // The first round touches memory that the system has not allocated yet.
        if round > 0 {
            times.iter_mut().zip([copied, offload, onboard]).for_each(|(times, time)| times.push(time));
        }
    }
    times.map(|mut times| {
        times.sort_unstable();
        BYTES as f64 / times[times.len() / 2].as_secs_f64() / 1e9
    })
}

#[tokio::main]
async fn main() {
    let json = std::env::args().any(|argument| argument == "--json");
    if !json {
        println!("  block   memcpy GB/s   G1→G2 GB/s   of it   G2→G1 GB/s   of it");
    }
    for block in [64 << 10, 192 << 10, 1 << 20] {
        let [copy, down, up] = measure(block).await;
        if json {
            let [copy_gbps, down_gbps, up_gbps, down_ratio, up_ratio] =
                [copy, down, up, down / copy, up / copy].map(|value| (value * 100.0).round() / 100.0);
            println!(
                "{}",
                json!({
                    "block_bytes": block, "memcpy_gbps": copy_gbps, "down_gbps": down_gbps, "up_gbps": up_gbps,
                    "down_ratio": down_ratio, "up_ratio": up_ratio,
                })
            );
        } else {
            let kib = block >> 10;
            let (of_down, of_up) = (down / copy * 100.0, up / copy * 100.0);
            println!("{kib:>4} KiB {copy:>13.2} {down:>12.2} {of_down:>6.0}% {up:>12.2} {of_up:>6.0}%");
        }
    }
}
