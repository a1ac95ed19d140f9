//! The load of one engine: its requests through this process, those of others as the server reports them, and speeds.
//!
//! The own requests are counted as they start and end. A server's report is older, but contains the requests of other
//! gateways: what it reports beyond the own requests is theirs, and is added until the next report.
//!
//! Not here: asking the server (`load_reports`).

mod batch_size;
mod speeds;

use batch_size::BatchSize;
use parking_lot::Mutex;
use speeds::Speeds;
use std::sync::Arc;
use tokio::sync::watch;
use tokio::time::Instant;
use worker::engine::RelayReport;
use worker::plane::Load;

/// Counts the requests that were sent to an engine and have not ended.
#[derive(Clone)]
pub(crate) struct LoadCounter(Arc<Shared>);

struct Shared {
    state: Mutex<State>,
    load: watch::Sender<Load>,
}

#[derive(Default)]
struct State {
    own: Counts,
    /// Maximum number of concurrent requests of this process since the metrics of the server were read last.
    most_own: u32,
    others: Counts,
    cache: CacheUsage,
    batch: BatchSize,
    speeds: Speeds,
}

/// Requests of an engine.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
struct Counts {
    waiting: u32,
    waiting_tokens: u64,
    running: u32,
}

/// How many blocks of a server's cache are in use by requests.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct CacheUsage {
    pub(crate) active_blocks: u64,
    /// 0: unknown.
    pub(crate) total_blocks: u64,
}

/// The load that a server reports of itself, with the requests of all gateways.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub(crate) struct Reported {
    /// Requests in the batch.
    pub(crate) running: u32,
    /// Requests that are not in the batch yet.
    pub(crate) waiting: u32,
    pub(crate) cache: CacheUsage,
}

/// One request, until it is dropped.
#[must_use = "the request is counted until this is dropped"]
pub(crate) struct Counted {
    shared: Arc<Shared>,
    tokens: u64,
    choices: u32,
    started: Instant,
    /// Whether no other request waited before it, so that the time to its first output shows how fast its prompt was
    /// computed.
    was_first: bool,
    /// When it got its first output. From then on its choices count as running; before, its prompt counts as waiting.
    first_output: Mutex<Option<Instant>>,
}

impl LoadCounter {
    pub(crate) fn new() -> Self {
        Self(Arc::new(Shared { state: Mutex::default(), load: watch::Sender::default() }))
    }

    /// The load, now and after each change.
    pub(crate) fn watch(&self) -> watch::Receiver<Load> {
        self.0.load.subscribe()
    }

    /// Counts a request with a prompt of `tokens` tokens as waiting.
    pub(crate) fn start(&self, tokens: u64, choices: u32) -> Arc<Counted> {
        let was_first = self.0.change(|state| {
            let was_first = state.own.waiting + state.others.waiting == 0;
            state.own.waiting += 1;
            state.own.waiting_tokens += tokens;
            state.most_own = state.most_own.max(state.own.requests());
            was_first
        });
        let (shared, started) = (Arc::clone(&self.0), Instant::now());
        Arc::new(Counted { shared, tokens, choices, started, was_first, first_output: Mutex::default() })
    }

    /// The metrics of the server are about to be read. They may contain every request of this process that is counted
    /// from now on.
    pub(crate) fn asking(&self) {
        let mut state = self.0.state.lock();
        state.most_own = state.own.requests();
    }

    /// Records what the server reports; `None`: it no longer does.
    pub(crate) fn reported(&self, reported: Option<Reported>) {
        self.0.change(|state| {
            match &reported {
                Some(Reported { running, waiting, cache }) => state.batch.reported(*running, *waiting, cache.is_full()),
                // The server may have ended, and another one may follow.
                None => state.batch = BatchSize::default(),
            }
            let Reported { running, waiting, cache } = reported.unwrap_or_default();
            let others = running.saturating_add(waiting).saturating_sub(state.most_own);
            let waiting = waiting.saturating_sub(state.own.waiting).min(others);
            // The server does not say how many tokens they have.
            state.others = Counts { waiting, waiting_tokens: 0, running: others - waiting };
            state.cache = cache;
        });
    }

    /// Publishes the load without speeds that are too old.
    pub(crate) fn refresh(&self) {
        self.0.change(|_| ());
    }

    pub(crate) fn is(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl CacheUsage {
    /// Whether requests may wait for blocks. An engine keeps some free for the sequences that run.
    fn is_full(self) -> bool {
        self.active_blocks.saturating_mul(10) > self.total_blocks.saturating_mul(9)
    }
}

impl Counts {
    fn requests(self) -> u32 {
        self.waiting + self.running
    }
}

impl Shared {
    /// Changes the state and publishes the load.
    fn change<T>(&self, change: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock();
        let result = change(&mut state);
        // Under the lock, so that the latest load is published last.
        self.load.send_replace(state.load());
        result
    }

    /// The same, for a change that tasks need not be woken for.
    fn change_quietly(&self, change: impl FnOnce(&mut State)) {
        let mut state = self.state.lock();
        change(&mut state);
        self.load.send_if_modified(|load| {
            *load = state.load();
            false
        });
    }
}

impl State {
    fn load(&self) -> Load {
        let Self { own, others, cache, batch, speeds, most_own: _ } = self;
        Load {
            waiting: own.waiting + others.waiting,
            waiting_tokens: own.waiting_tokens + others.waiting_tokens,
            running: own.running + others.running,
            active_blocks: cache.active_blocks,
            total_blocks: cache.total_blocks,
            sequences_max: batch.sequences_max(),
            prefill_tokens_per_second: speeds.prefill_tokens_per_second(),
            decode_step_seconds: speeds.decode_step_seconds(),
            ..Load::default()
        }
    }
}

impl Counted {
    /// Records the first output. `is_stream`: more is computed. The rest of another response follows at once, so its
    /// end announces this change too: each announcement takes the locks of eight lists of waiting tasks.
    pub(crate) fn first_output(&self, is_stream: bool) {
        let mut first_output = self.first_output.lock();
        if first_output.is_none() {
            *first_output = Some(Instant::now());
            let change = |state: &mut State| {
                state.own.waiting -= 1;
                state.own.waiting_tokens -= self.tokens;
                state.own.running += self.choices;
            };
            if is_stream {
                self.shared.change(change);
            } else {
                self.shared.change_quietly(change);
            }
        }
    }

    /// Learns the speeds of the engine from a whole stream. The first output of another response is its last, and says
    /// nothing of either.
    pub(crate) fn streamed(&self, report: &RelayReport) {
        let Some(first_output) = *self.first_output.lock() else { return };
        let (prefill, decode) = (first_output - self.started, first_output.elapsed());
        self.shared.change(|state| {
            if let (Some(prompt), Some(cached), true) = (report.prompt_tokens, report.cached_tokens, self.was_first) {
                state.speeds.prefilled(prompt.saturating_sub(cached), prefill.as_secs_f64());
            }
            if let Some(tokens) = report.completion_tokens {
                state.speeds.decoded(tokens / self.choices.max(1), decode.as_secs_f64());
            }
        });
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        let runs = self.first_output.get_mut().is_some();
        self.shared.change(|state| {
            if runs {
                state.own.running -= self.choices;
            } else {
                state.own.waiting -= 1;
                state.own.waiting_tokens -= self.tokens;
            }
        });
    }
}

#[cfg(test)]
mod tests;
