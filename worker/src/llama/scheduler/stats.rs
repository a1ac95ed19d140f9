//! How the engine is doing: counted as it happens, measured as it runs, read at any time.

use kvbm::BlockManager;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use tokio::sync::Notify;
use tokio::time::Instant;

use crate::plane::{Load, OnboardSpeed};

/// Counters of one engine. Relaxed throughout: each is a figure of its own, and readers want a recent one.
pub(in crate::llama) struct Vitals {
    waiting_tokens: AtomicU64,
    accepted: AtomicU32,
    running: AtomicU32,
    paused: AtomicU32,
    active_blocks: AtomicU64,
    speed: Mutex<Speed>,
    /// Requests come and end outside of the scheduler's steps too.
    changed: Arc<Notify>,
}

impl Vitals {
    pub(in crate::llama) fn new() -> Arc<Self> {
        Arc::new(Self {
            waiting_tokens: AtomicU64::new(0),
            accepted: AtomicU32::new(0),
            running: AtomicU32::new(0),
            paused: AtomicU32::new(0),
            active_blocks: AtomicU64::new(0),
            speed: Mutex::default(),
            changed: Arc::default(),
        })
    }

    /// Counts a request and its uncomputed tokens, until the guard is dropped.
    pub(in crate::llama) fn accept(self: &Arc<Self>, tokens: usize) -> Waiting {
        self.waiting_tokens.fetch_add(tokens as u64, Relaxed);
        self.accepted.fetch_add(1, Relaxed);
        self.changed.notify_one();
        Waiting { vitals: Arc::clone(self), tokens: tokens as u64 }
    }

    /// Resolves when a request was accepted, got its blocks, or has ended since the last time.
    pub(super) async fn changed(&self) {
        self.changed.notified().await;
    }

    /// Whoever has news for the scheduler says so here.
    pub(super) fn changes(&self) -> Arc<Notify> {
        Arc::clone(&self.changed)
    }

    pub(super) fn set_running(&self, sequences: usize, paused: usize, blocks: usize) {
        self.running.store(sequences as u32, Relaxed);
        self.paused.store(paused as u32, Relaxed);
        self.active_blocks.store(blocks as u64, Relaxed);
    }

    /// Takes in what a step took, turns of other engines included: that is what a client waits for.
    pub(in crate::llama) fn stepped(&self, prompt_rows: usize, took: Duration) {
        let mut speed = self.speed.lock().unwrap_or_else(PoisonError::into_inner);
        speed.stepped(prompt_rows, took.as_secs_f64());
    }

    /// Measured seconds to prefill one token.
    pub(super) fn seconds_per_prompt_token(&self) -> Option<f64> {
        self.speed.lock().unwrap_or_else(PoisonError::into_inner).seconds_per_prompt_token()
    }

    /// A request enters the batch, and others wait or not.
    pub(super) fn entered(&self, others_wait: bool) {
        let mut speed = self.speed.lock().unwrap_or_else(PoisonError::into_inner);
        speed.entered(Instant::now(), others_wait);
    }

    /// Time until a request that is accepted now likely gets its turn: once the prompts before it are computed, and as many
    /// sequences have left the batch as wait for a place in it.
    pub(in crate::llama) fn drain_time(&self) -> Duration {
        let (tokens, requests) = (self.waiting_tokens.load(Relaxed) as f64, self.waiting() as f64);
        let speed = self.speed.lock().unwrap_or_else(PoisonError::into_inner);
        let prompts = speed.seconds_per_prompt_token().map(|each| each * tokens);
        let places = speed.entry_interval.map(|each| each * requests);
        let seconds = prompts.into_iter().chain(places).fold(1.0, f64::max);
        // Between a second, which no client should undercut, and a minute, beyond which nobody can promise.
        Duration::from_secs_f64(seconds.clamp(1.0, 60.0))
    }

    /// Requests accepted that wait for a place in the batch. Those that wait for their readers are not among them.
    pub(in crate::llama) fn waiting(&self) -> usize {
        let [accepted, running, paused] =
            [&self.accepted, &self.running, &self.paused].map(|count| count.load(Relaxed));
        accepted.saturating_sub(running + paused) as usize
    }

    pub(in crate::llama) fn load(&self, manager: &BlockManager, block_bytes: usize, sequences_max: usize) -> Load {
        let speed = self.speed.lock().unwrap_or_else(PoisonError::into_inner);
        Load {
            number: 0,
            waiting_tokens: self.waiting_tokens.load(Relaxed),
            // A worker drains until none is left, so those that wait for their readers count as running.
            running: self.running.load(Relaxed) + self.paused.load(Relaxed),
            waiting: self.waiting() as u32,
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

/// One request's share in the counters.
pub(in crate::llama) struct Waiting {
    vitals: Arc<Vitals>,
    tokens: u64,
}

impl Waiting {
    /// So many tokens need no more computing.
    pub(super) fn computed(&mut self, tokens: usize) {
        let tokens = self.tokens.min(tokens as u64);
        self.tokens -= tokens;
        self.vitals.waiting_tokens.fetch_sub(tokens, Relaxed);
    }

    /// So many tokens need computing again.
    pub(super) fn again(&mut self, tokens: usize) {
        self.tokens += tokens as u64;
        self.vitals.waiting_tokens.fetch_add(tokens as u64, Relaxed);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        self.vitals.waiting_tokens.fetch_sub(self.tokens, Relaxed);
        self.vitals.accepted.fetch_sub(1, Relaxed);
        self.vitals.changed.notify_one();
    }
}

/// Decaying averages of what steps take.
#[derive(Default)]
struct Speed {
    prompt_tokens: f64,
    prompt_seconds: f64,
    decode_step: Option<f64>,
    /// Seconds between requests that enter the batch, while others wait.
    entry_interval: Option<f64>,
    /// When the last one entered, if others waited then.
    last_entry: Option<Instant>,
}

impl Speed {
    /// Prompt tokens after which a measurement counts half: a few chunks, so that a change of load is seen within seconds.
    const HALF_LIFE: f64 = 4096.0;
    /// Fewer prompt rows than this say more about the fixed cost of a step than about prefill.
    const ROWS_MIN: usize = 32;

    fn stepped(&mut self, prompt_rows: usize, seconds: f64) {
        if prompt_rows == 0 {
            // An eighth: about the last ten steps count.
            self.decode_step = Some(self.decode_step.map_or(seconds, |old| old + (seconds - old) / 8.0));
        } else if prompt_rows >= Self::ROWS_MIN {
            let keep = 0.5f64.powf(prompt_rows as f64 / Self::HALF_LIFE);
            self.prompt_tokens = self.prompt_tokens * keep + prompt_rows as f64;
            self.prompt_seconds = self.prompt_seconds * keep + seconds;
        }
    }

    fn entered(&mut self, now: Instant, others_wait: bool) {
        if let Some(last) = self.last_entry {
            let seconds = (now - last).as_secs_f64();
            // A sixteenth: sequences leave in bursts.
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
    fn dropping_the_guard_takes_back_what_it_counted() {
        let vitals = Vitals::new();
        let mut waiting = vitals.accept(100);
        waiting.computed(70);
        waiting.again(20);
        assert_eq!(vitals.waiting_tokens.load(Relaxed), 50);
        waiting.computed(500);
        assert_eq!(vitals.waiting_tokens.load(Relaxed), 0);
        drop(waiting);
        assert_eq!((vitals.waiting_tokens.load(Relaxed), vitals.accepted.load(Relaxed)), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn drain_time_counts_places_in_the_batch() {
        let vitals = Vitals::new();
        let waiting: Vec<Waiting> = (0..20).map(|_| vitals.accept(1)).collect();
        assert_eq!(vitals.drain_time(), Duration::from_secs(1), "nothing is measured yet");
        for _ in 0..5 {
            vitals.entered(true);
            tokio::time::advance(Duration::from_secs(2)).await;
        }
        assert_eq!(vitals.drain_time(), Duration::from_secs(40), "twenty wait, and one goes every two seconds");
        vitals.entered(false);
        tokio::time::advance(Duration::from_hours(1)).await;
        vitals.entered(true);
        assert_eq!(vitals.drain_time(), Duration::from_secs(40), "without a queue nothing is measured");
        drop(waiting);
    }

    #[test]
    fn speed_follows_what_is_measured() {
        let mut speed = Speed::default();
        assert_eq!(speed.seconds_per_prompt_token(), None);
        speed.stepped(8, 1.0);
        assert_eq!(speed.seconds_per_prompt_token(), None, "eight rows say nothing about prefill");
        for _ in 0..100 {
            speed.stepped(512, 0.512);
        }
        let each = speed.seconds_per_prompt_token().unwrap();
        assert!((each - 1e-3).abs() < 1e-9);
        for _ in 0..100 {
            speed.stepped(512, 1.024);
        }
        assert!((speed.seconds_per_prompt_token().unwrap() - 2e-3).abs() < 1e-6);
    }
}
