//! Throughput of the wrapped tier and of the codec: moving averages over the blocks that pass.

use super::policy::Rates;
use crate::block::{Block, Fingerprint, SequenceHash};
use crate::tier::{Loaded, StoreError, Tier, delegate};
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use futures::{Stream, stream};
use parking_lot::Mutex;
use std::pin::Pin;
use std::sync::Arc;
use std::task::Poll;
use std::time::Duration;
use tokio::time::Instant;

/// Throughput in both directions.
#[derive(Default)]
pub(super) struct Throughput {
    pub(super) offload: Rate,
    pub(super) onboard: Rate,
}

impl Throughput {
    /// `None` until both directions are measured.
    pub(super) fn rates(&self) -> Option<Rates> {
        Some(Rates { offload: self.offload.get()?, onboard: self.onboard.get()? })
    }
}

/// Bytes per second, a moving average.
#[derive(Default)]
pub(super) struct Rate(Mutex<Option<f64>>);

impl Rate {
    /// Weight of a new measurement: a dozen measurements nearly replace the average.
    const WEIGHT: f64 = 0.2;

    pub(super) fn get(&self) -> Option<f64> {
        *self.0.lock()
    }

    pub(super) fn record(&self, bytes: u64, took: Duration) {
        // A clock that stands still, as in simulations, measures nothing.
        if bytes == 0 || took.is_zero() {
            return;
        }
        let now = bytes as f64 / took.as_secs_f64();
        let mut rate = self.0.lock();
        *rate = Some(rate.map_or(now, |before| before + Self::WEIGHT * (now - before)));
    }
}

/// A tier that measures its throughput.
pub(super) struct MeasuredTier {
    tier: Arc<dyn Tier>,
    throughput: Arc<Throughput>,
}

impl MeasuredTier {
    /// Minimum number of bytes of a measurement: the time of fewer bytes is mostly latency.
    const MIN_BYTES: u64 = 1 << 20;

    pub(super) fn new(tier: Arc<dyn Tier>, throughput: Arc<Throughput>) -> Self {
        Self { tier, throughput }
    }
}

impl Tier for MeasuredTier {
    delegate!(tier: level, holds, discard, withdraw, expire_one, expire, usage);

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let throughput = self.throughput.clone();
        let mut found = self.tier.load(fingerprint, hashes);
        // Counts only the time in which the stream is polled and pending, not that in which blocks wait to be decoded.
        let (mut waited, mut bytes, mut since) = (Duration::ZERO, 0, None);
        let mut timed = move |context: &mut std::task::Context<'_>| {
            let began = *since.get_or_insert_with(Instant::now);
            let Poll::Ready(next) = Pin::new(&mut found).poll_next(context) else { return Poll::Pending };
            waited += began.elapsed();
            since = None;
            match &next {
                Some((_, Ok(Some(block)))) => bytes += block.header.length,
                None if bytes >= Self::MIN_BYTES => throughput.onboard.record(std::mem::take(&mut bytes), waited),
                _ => {}
            }
            Poll::Ready(next)
        };
        stream::poll_fn(move |context| timed(context)).boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let bytes: u64 = blocks.iter().map(|block| block.header.length).sum();
        Box::pin(async move {
            let began = Instant::now();
            let answers = self.tier.store(blocks).await;
            if bytes >= Self::MIN_BYTES && answers.iter().all(Result::is_ok) {
                self.throughput.offload.record(bytes, began.elapsed());
            }
            answers
        })
    }
}
