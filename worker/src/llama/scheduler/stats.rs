//! Counters and measured speeds of one engine: updated while it runs, readable at any time.

use kvbm::BlockManager;
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::plane::{Load, OnboardSpeed};

/// Counters of one engine. All orderings are relaxed: the counters are independent, and readers need only a recent
/// value.
pub(in crate::llama) struct EngineStats {
    waiting_tokens: AtomicU64,
    accepted: AtomicU32,
    /// Accepted requests whose prompt another worker still computes.
    arriving: AtomicU32,
    running: AtomicU32,
    paused: AtomicU32,
    active_blocks: AtomicU64,
    speed: Mutex<Speed>,
    /// Requests also arrive and end outside of the scheduler's steps; this wakes the scheduler.
    changed: Arc<Notify>,
}

impl EngineStats {
    pub(in crate::llama) fn new() -> Arc<Self> {
        Arc::new(Self {
            waiting_tokens: AtomicU64::new(0),
            accepted: AtomicU32::new(0),
            arriving: AtomicU32::new(0),
            running: AtomicU32::new(0),
            paused: AtomicU32::new(0),
            active_blocks: AtomicU64::new(0),
            speed: Mutex::default(),
            changed: Arc::default(),
        })
    }

    /// Counts a request and its uncomputed tokens until the guard is dropped.
    pub(in crate::llama) fn accept(self: &Arc<Self>, tokens: usize) -> RequestStats {
        self.waiting_tokens.fetch_add(tokens as u64, Relaxed);
        self.accepted.fetch_add(1, Relaxed);
        self.changed.notify_one();
        RequestStats { stats: Arc::clone(self), tokens: tokens as u64, is_arriving: false }
    }

    /// Resolves when a request was accepted, got blocks or ended since the last call.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// The notification that wakes the scheduler.
    pub(in crate::llama) fn notifier(&self) -> Arc<Notify> {
        Arc::clone(&self.changed)
    }

    pub(super) fn set_running(&self, sequences: usize, paused: usize, blocks: usize) {
        self.running.store(sequences as u32, Relaxed);
        self.paused.store(paused as u32, Relaxed);
        self.active_blocks.store(blocks as u64, Relaxed);
    }

    /// Records the duration of a step. It includes the steps of other engines that it waited for, because clients wait
    /// for those too.
    pub(in crate::llama) fn record_step(&self, prompt_rows: usize, took: Duration) {
        let mut speed = self.speed.lock();
        speed.record_step(prompt_rows, took.as_secs_f64());
    }

    /// Measured seconds per prefilled token.
    pub(super) fn seconds_per_prompt_token(&self) -> Option<f64> {
        self.speed.lock().seconds_per_prompt_token()
    }

    /// Records that a request joins the batch, and whether others wait.
    pub(super) fn record_admission(&self, others_wait: bool) {
        let mut speed = self.speed.lock();
        speed.record_admission(Instant::now(), others_wait);
    }

    /// Estimated time until a request that is accepted now joins the batch: the queued prompts are computed before it,
    /// and as many sequences leave the batch as requests wait.
    pub(in crate::llama) fn drain_time(&self) -> Duration {
        let (tokens, requests) = (self.waiting_tokens.load(Relaxed) as f64, self.waiting() as f64);
        let speed = self.speed.lock();
        let prompts = speed.seconds_per_prompt_token().map(|each| each * tokens);
        let places = speed.entry_interval.map(|each| each * requests);
        let seconds = prompts.into_iter().chain(places).fold(1.0, f64::max);
        // At least a second, which no client should undercut, and at most a minute, beyond which the estimate means
        // nothing.
        Duration::from_secs_f64(seconds.clamp(1.0, 60.0))
    }

    /// Accepted requests that wait for the batch. Not among them: paused ones, which wait for their readers, and those
    /// whose prompt another worker still computes.
    pub(in crate::llama) fn waiting(&self) -> usize {
        let [accepted, arriving, running, paused] =
            [&self.accepted, &self.arriving, &self.running, &self.paused].map(|count| count.load(Relaxed));
        accepted.saturating_sub(arriving + running + paused) as usize
    }

    /// Requests whose prompt another worker still computes.
    pub(in crate::llama) fn arriving(&self) -> usize {
        self.arriving.load(Relaxed) as usize
    }

    pub(in crate::llama) fn load(&self, manager: &BlockManager, block_bytes: usize, sequences_max: usize) -> Load {
        let speed = self.speed.lock();
        Load {
            number: 0,
            waiting_tokens: self.waiting_tokens.load(Relaxed),
            running: self.running.load(Relaxed),
            waiting: self.waiting() as u32,
            paused: self.paused.load(Relaxed),
            sequences_max: sequences_max as u32,
            active_blocks: self.active_blocks.load(Relaxed),
            total_blocks: manager.capacity() as u64,
            prefill_tokens_per_second: speed.seconds_per_prompt_token().map(f64::recip),
            decode_step_seconds: speed.decode_step,
            block_bytes: block_bytes as u64,
            onboard: manager
                .speeds()
                .into_iter()
                .map(|s| OnboardSpeed {
                    level: s.level,
                    latency_seconds: s.latency.as_secs_f64(),
                    bytes_per_second: s.bytes_per_second,
                    queued_blocks: s.queued,
                })
                .collect(),
        }
    }
}

/// One request's share of the counters.
pub(in crate::llama) struct RequestStats {
    stats: Arc<EngineStats>,
    tokens: u64,
    is_arriving: bool,
}

impl RequestStats {
    /// These tokens need no more computing.
    pub(super) fn computed(&mut self, tokens: usize) {
        let tokens = self.tokens.min(tokens as u64);
        self.tokens -= tokens;
        self.stats.waiting_tokens.fetch_sub(tokens, Relaxed);
    }

    /// Another worker computes the prompt: the request is neither work nor a part of the queue.
    pub(super) fn start_arriving(&mut self) {
        self.computed(usize::MAX);
        if !std::mem::replace(&mut self.is_arriving, true) {
            self.stats.arriving.fetch_add(1, Relaxed);
        }
        self.stats.changed.notify_one();
    }

    /// The request joins the queue, with so many tokens to compute.
    pub(super) fn arrived(&mut self, pending: usize) {
        self.computed(usize::MAX);
        self.add_pending(pending);
        if std::mem::take(&mut self.is_arriving) {
            self.stats.arriving.fetch_sub(1, Relaxed);
        }
        self.stats.changed.notify_one();
    }

    /// These tokens need computing again.
    pub(super) fn add_pending(&mut self, tokens: usize) {
        self.tokens += tokens as u64;
        self.stats.waiting_tokens.fetch_add(tokens as u64, Relaxed);
    }
}

impl Drop for RequestStats {
    fn drop(&mut self) {
        self.stats.waiting_tokens.fetch_sub(self.tokens, Relaxed);
        if self.is_arriving {
            self.stats.arriving.fetch_sub(1, Relaxed);
        }
        self.stats.accepted.fetch_sub(1, Relaxed);
        self.stats.changed.notify_one();
    }
}

/// Exponentially decaying averages of step durations.
#[derive(Default)]
struct Speed {
    prompt_tokens: f64,
    prompt_seconds: f64,
    decode_step: Option<f64>,
    /// Seconds between requests that join the batch while others wait.
    entry_interval: Option<f64>,
    /// When the last request joined, if others waited then.
    last_entry: Option<Instant>,
}

impl Speed {
    /// Prompt tokens after which a measurement counts half: a few chunks, so that a change of load shows within
    /// seconds.
    const HALF_LIFE: f64 = 4096.0;
    /// Fewer prompt rows than this measure the fixed cost of a step rather than prefill.
    const MIN_ROWS: usize = 32;

    fn record_step(&mut self, prompt_rows: usize, seconds: f64) {
        if prompt_rows == 0 {
            // Weight 1/8: about the last ten steps count.
            self.decode_step = Some(self.decode_step.map_or(seconds, |old| old + (seconds - old) / 8.0));
        } else if prompt_rows >= Self::MIN_ROWS {
            let keep = 0.5f64.powf(prompt_rows as f64 / Self::HALF_LIFE);
            self.prompt_tokens = self.prompt_tokens * keep + prompt_rows as f64;
            self.prompt_seconds = self.prompt_seconds * keep + seconds;
        }
    }

    fn record_admission(&mut self, now: Instant, others_wait: bool) {
        if let Some(last) = self.last_entry {
            let seconds = (now - last).as_secs_f64();
            // Weight 1/16: sequences leave in bursts.
            self.entry_interval = Some(self.entry_interval.map_or(seconds, |old| old + (seconds - old) / 16.0));
        }
        self.last_entry = others_wait.then_some(now);
    }

    fn seconds_per_prompt_token(&self) -> Option<f64> {
        (self.prompt_tokens > 0.0).then(|| self.prompt_seconds / self.prompt_tokens)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dropping_the_guard_subtracts_its_counts() {
        let stats = EngineStats::new();
        let mut waiting = stats.accept(100);
        waiting.computed(70);
        waiting.add_pending(20);
        assert_eq!(stats.waiting_tokens.load(Relaxed), 50);
        waiting.computed(500);
        assert_eq!(stats.waiting_tokens.load(Relaxed), 0);
        drop(waiting);
        assert_eq!((stats.waiting_tokens.load(Relaxed), stats.accepted.load(Relaxed)), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn drain_time_counts_queued_requests() {
        let stats = EngineStats::new();
        let waiting: Vec<RequestStats> = (0..20).map(|_| stats.accept(1)).collect();
        assert_eq!(stats.drain_time(), Duration::from_secs(1), "without measurements");
        for _ in 0..5 {
            stats.record_admission(true);
            tokio::time::advance(Duration::from_secs(2)).await;
        }
        assert_eq!(stats.drain_time(), Duration::from_secs(40), "twenty wait, and one joins every two seconds");
        stats.record_admission(false);
        tokio::time::advance(Duration::from_hours(1)).await;
        stats.record_admission(true);
        assert_eq!(stats.drain_time(), Duration::from_secs(40), "without a queue the estimate is kept");
        drop(waiting);
    }

    #[test]
    fn speed_follows_the_measurements() {
        let mut speed = Speed::default();
        assert_eq!(speed.seconds_per_prompt_token(), None);
        speed.record_step(8, 1.0);
        assert_eq!(speed.seconds_per_prompt_token(), None, "eight rows are too few");
        for _ in 0..100 {
            speed.record_step(512, 0.512);
        }
        let each = speed.seconds_per_prompt_token().unwrap();
        assert!((each - 1e-3).abs() < 1e-9);
        for _ in 0..100 {
            speed.record_step(512, 1.024);
        }
        assert!((speed.seconds_per_prompt_token().unwrap() - 2e-3).abs() < 1e-6);
    }
}
