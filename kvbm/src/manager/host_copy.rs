//! Copies blocks into host memory (G2) before a request needs them.
//!
//! Unlike an onboarding, a copy takes no slot of G1, and no request waits for it. It proceeds in batches of a few
//! megabytes. Before each batch it waits while requests load blocks from one of its tiers, and while its caller has
//! other work. A block is verified while it is stored ([`inbox`]), and again when a request onboards it.
//!
//! Not here: which blocks are worth a copy, and from which tier. The router decides that.

mod inbox;

use super::locate::locate;
use super::shared::Core;
use super::sources::Source;
use crate::block::SequenceHash;
use crate::blocking;
use crate::metrics::Direction;
use crate::pool::HostTier;
use crate::tier::LoadError;
use futures::StreamExt;
use inbox::HostInbox;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// The result of a copy into G2.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Copied {
    /// Number of blocks that were neither in G1 nor in G2.
    pub missing: usize,
    /// Number of these that are in G2 now, counted from the first.
    pub blocks: usize,
    /// Their bytes.
    pub bytes: u64,
}

/// Why nothing is copied into G2.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum NoRoom {
    /// There is no G2.
    #[error("there is no host memory for blocks")]
    NoHostTier,
    /// So many blocks are missing.
    #[error("{0} blocks are more than a copy may take of the host memory")]
    TooLarge(usize),
}

/// Bytes that are copied at a time, first and at most: a few milliseconds of a tier, after which requests come first
/// again. Batches become larger while most of their time is latency.
const BATCH_BYTES: (usize, usize) = (4 << 20, 32 << 20);
/// The next batch is twice as large if one took less than this many times the time to its first block.
const MAX_LATENCIES: u32 = 3;

/// A copy takes at most one in this many blocks of G2. The others are of requests that were served here.
const MAX_SHARE: usize = 4;

/// Interval at which a copy checks whether it may go on. No request waits for it.
const POLL_INTERVAL: Duration = Duration::from_millis(5);

/// How a batch ended.
#[derive(Default)]
struct BatchEnd {
    /// Number of leading blocks that were copied.
    blocks: usize,
    /// Time to the first blocks of its sources, and to the last.
    first: Duration,
    all: Duration,
}

/// Copies leading `hashes` that are neither in G1 nor in G2 from the first source that holds each.
pub(super) async fn copy_to_host(
    core: &Core,
    sources: &[Source],
    hashes: &[SequenceHash],
    may_copy: impl Fn() -> bool,
) -> Result<Copied, NoRoom> {
    let host = core.host.as_ref().ok_or(NoRoom::NoHostTier)?;
    // Before anything is read: blocks of a domain that is purged from here on are not kept.
    let since = host.purges();
    let (_, not_in_device) = core.pool.partition(hashes);
    let (_, missing) = host.partition(&not_in_device);
    if missing.len() > host.capacity() / MAX_SHARE {
        return Err(NoRoom::TooLarge(missing.len()));
    }
    let block_bytes = core.device.block_bytes();
    let mut copied = Copied { missing: missing.len(), ..Copied::default() };
    let [mut batch_blocks, max_blocks] =
        [BATCH_BYTES.0, BATCH_BYTES.1].map(|bytes| (bytes / block_bytes.max(1)).max(1));
    let mut rest = &missing[..];
    while !rest.is_empty() {
        while !may_copy() || sources.iter().any(|source| source.throughput.queued() > 0) {
            sleep(POLL_INTERVAL).await;
        }
        let (batch, later) = rest.split_at(batch_blocks.min(rest.len()));
        let end = copy_batch(core, host, sources, batch, since).await;
        copied.blocks += end.blocks;
        copied.bytes += (end.blocks * block_bytes) as u64;
        if end.blocks < batch.len() {
            // Later blocks are of no use without this one.
            break;
        }
        if end.all < MAX_LATENCIES * end.first {
            batch_blocks = (2 * batch_blocks).min(max_blocks);
        }
        rest = later;
    }
    Ok(copied)
}

/// Copies leading blocks of a batch.
async fn copy_batch(core: &Core, host: &HostTier, sources: &[Source], batch: &[SequenceHash], since: u64) -> BatchEnd {
    let fingerprint = core.device.fingerprint();
    let mut end = BatchEnd::default();
    for (source, range) in locate(core, sources, batch, Instant::now()) {
        let (tier, begun, hashes) = (&sources[source].tier, Instant::now(), batch[range].to_vec());
        let inbox = HostInbox::new(host.clone(), fingerprint, hashes.clone());
        let (mut yielded, mut first) = (Vec::new(), None);
        let mut answers = tier.load_into(fingerprint, hashes.clone(), inbox.receiver());
        while let Some((at, answer)) = answers.next().await {
            first.get_or_insert_with(Instant::now);
            // An index that was not requested breaks the contract of the tier.
            let Some(hash) = hashes.get(at) else { continue };
            match answer {
                Ok(block) => yielded.extend(block.map(|block| (at, block))),
                Err(LoadError::Corrupt(why)) => core.discard_corrupt(tier, *hash, why),
                Err(error) => tracing::debug!(tier = %tier.level(), %error, "cannot load a block"),
            }
        }
        drop(answers);
        let first = [first, inbox.first()].into_iter().flatten().min();
        end.first += first.map(|first| first - begun).unwrap_or_default();
        end.all += begun.elapsed();
        let now = core.clock.now();
        let registered = blocking::spawn(move || {
            for (at, block) in yielded {
                // Without a slot the copy ends there.
                let _ = inbox.write(at, block);
            }
            inbox.register(now, since)
        });
        // The error of a runtime that shuts down.
        let Ok((stored, corrupt)) = registered.await else { return end };
        if let Some(why) = corrupt {
            core.discard_corrupt(tier, hashes[stored], why);
        }
        if stored > 0 {
            let bytes = (stored * core.device.block_bytes()) as u64;
            core.metrics.moved(tier.level(), Direction::Onboard, bytes, begun.elapsed());
        }
        end.blocks += stored;
        if stored < hashes.len() {
            return end;
        }
    }
    end
}
