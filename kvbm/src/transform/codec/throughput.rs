//! How fast the device below is, and how fast the codec: measured on what passes, forgotten slowly.

use super::policy::Rates;
use crate::block::{Block, Date, Fingerprint, Level, SequenceHash};
use crate::tier::{Loaded, StoreError, Tier, Usage};
use futures::future::BoxFuture;
use futures::stream::{BoxStream, StreamExt};
use futures::{Stream, stream};
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::Poll;
use std::time::Duration;
use tokio::time::Instant;

/// Both directions of something that moves bytes.
#[derive(Default)]
pub(super) struct Gauge {
    pub(super) offload: Rate,
    pub(super) onboard: Rate,
}

impl Gauge {
    /// `None` while a direction was not measured yet.
    pub(super) fn rates(&self) -> Option<Rates> {
        Some(Rates { offload: self.offload.get()?, onboard: self.onboard.get()? })
    }
}

/// Bytes per second, a moving average.
#[derive(Default)]
pub(super) struct Rate(Mutex<Option<f64>>);

impl Rate {
    /// What a new measurement weighs: after a dozen, a device that became slow is seen as slow.
    const WEIGHT: f64 = 0.2;

    pub(super) fn get(&self) -> Option<f64> {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn learn(&self, bytes: u64, took: Duration) {
        // A clock that stands still, as in simulations, measures nothing.
        if bytes == 0 || took.is_zero() {
            return;
        }
        let now = bytes as f64 / took.as_secs_f64();
        let mut rate = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *rate = Some(rate.map_or(now, |before| before + Self::WEIGHT * (now - before)));
    }
}

/// A tier whose device is measured.
pub(super) struct Measured {
    tier: Arc<dyn Tier>,
    gauge: Arc<Gauge>,
}

impl Measured {
    /// Less is all latency.
    const LEAST: u64 = 1 << 20;

    pub(super) fn new(tier: Arc<dyn Tier>, gauge: Arc<Gauge>) -> Self {
        Self { tier, gauge }
    }
}

impl Tier for Measured {
    fn level(&self) -> Level {
        self.tier.level()
    }

    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.tier.holds(fingerprint, names)
    }

    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let gauge = self.gauge.clone();
        let mut found = self.tier.load(fingerprint, names);
        // Only the time in which somebody waits for the device counts: not that in which blocks wait to be decoded.
        let (mut waited, mut bytes, mut since) = (Duration::ZERO, 0, None);
        let mut timed = move |context: &mut std::task::Context<'_>| {
            let began = *since.get_or_insert_with(Instant::now);
            let Poll::Ready(next) = Pin::new(&mut found).poll_next(context) else { return Poll::Pending };
            waited += began.elapsed();
            since = None;
            match &next {
                Some((_, Ok(Some(block)))) => bytes += block.header.length,
                None if bytes >= Self::LEAST => gauge.onboard.learn(std::mem::take(&mut bytes), waited),
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
            if bytes >= Self::LEAST && answers.iter().all(Result::is_ok) {
                self.gauge.offload.learn(bytes, began.elapsed());
            }
            answers
        })
    }

    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        self.tier.discard(fingerprint, name);
    }

    fn expire_one(&self, fingerprint: Fingerprint, name: SequenceHash) -> usize {
        self.tier.expire_one(fingerprint, name)
    }

    fn expire(&self, now: Date) -> usize {
        self.tier.expire(now)
    }

    fn usage(&self) -> Usage {
        self.tier.usage()
    }
}
