//! One worker alone, without a router: an engine and its steps in virtual time. A clone continues independently.

use crate::admission::Stage;
use crate::replay::engine::{Effects, Engine, Environment, Schedule};
use crate::replay::options::Options;
use crate::replay::profile::Profile;
use crate::replay::trace::{BLOCK_TOKENS, RequestSpec};

/// What all workers and their clones share.
pub(super) struct Shared<'a> {
    pub(super) requests: &'a [RequestSpec],
    pub(super) times: Vec<Times>,
    profile: &'a Profile,
    environment: Environment,
    effects: Effects,
}

/// What happened to a request, in nanoseconds; 0 means not yet.
#[derive(Clone, Copy, Default)]
pub(super) struct Times {
    pub(super) arrived_ns: u64,
    pub(super) first_ns: u64,
    pub(super) finished_ns: u64,
    /// Leading blocks that were cached.
    pub(super) hits: u64,
}

#[derive(Clone)]
pub(super) struct IsolatedWorker {
    pub(super) engine: Engine,
    /// End of the current step.
    busy_until_ns: Option<u64>,
    /// End of onboarding, when no step is in progress.
    wait_until_ns: Option<u64>,
    /// Times between tokens, and how many.
    pub(super) gaps: Vec<(u64, u64)>,
}

impl<'a> Shared<'a> {
    pub(super) fn new(requests: &'a [RequestSpec], profile: &'a Profile, arrivals: &[(u64, u32)]) -> Self {
        let mut times = vec![Times::default(); requests.len()];
        for (at, request) in arrivals {
            times[*request as usize].arrived_ns = *at;
        }
        Self { requests, times, profile, environment: Environment::default(), effects: Effects::default() }
    }

    /// Forgets what happened to these requests after `now_ns`, in a window that did not take place.
    pub(super) fn reset(&mut self, requests: &[u32], now_ns: u64) {
        for request in requests {
            let times = &mut self.times[*request as usize];
            // What ends at this moment ends after the arrival that the window begins with.
            for time in [&mut times.first_ns, &mut times.finished_ns] {
                if *time >= now_ns {
                    *time = 0;
                }
            }
        }
    }
}

impl IsolatedWorker {
    pub(super) fn new(options: &Options) -> Self {
        let engine = Engine::new(&options.profile, options.queue_order);
        Self { engine, busy_until_ns: None, wait_until_ns: None, gaps: Vec::new() }
    }

    /// All requests that are queued or running.
    pub(super) fn requests(&self) -> Vec<u32> {
        self.engine.requests().collect()
    }

    /// Seconds of prefill that are queued, and of a decode step.
    pub(super) fn load_s(&self, shared: &Shared<'_>) -> f64 {
        let load = self.engine.load(shared.profile);
        load.waiting_tokens as f64 * shared.profile.prefill_token_s
            + f64::from(load.running) * shared.profile.decode_sequence_s
            + load.active_blocks as f64 * BLOCK_TOKENS as f64 * shared.profile.decode_context_token_s
    }

    /// Seconds that the queued requests will still wait for each other, half of them on average.
    pub(super) fn backlog_s(&self, shared: &Shared<'_>) -> f64 {
        let load = self.engine.load(shared.profile);
        load.waiting_tokens as f64 * shared.profile.prefill_token_s * f64::from(load.waiting) / 2.0
    }

    /// A request arrives. The worker must have advanced to this moment.
    pub(super) fn accept(&mut self, shared: &mut Shared<'_>, now_ns: u64, request: u32) {
        self.engine.accept(request, &shared.requests[request as usize], Stage::Whole, None);
        if self.busy_until_ns.is_some() {
            if let Some(end) = self.engine.interrupt(now_ns) {
                self.busy_until_ns = Some(end);
            }
        } else {
            self.schedule(shared, now_ns);
        }
    }

    /// Runs all that happens before a moment. Returns the time of the last event.
    pub(super) fn advance(&mut self, shared: &mut Shared<'_>, until_ns: u64) -> u64 {
        let mut last_ns = 0;
        while let Some(now_ns) = self.busy_until_ns.or(self.wait_until_ns).filter(|next| *next < until_ns) {
            last_ns = now_ns;
            if self.busy_until_ns.take().is_some() {
                let Shared { requests, environment, effects, .. } = shared;
                self.engine.complete_steps(now_ns, requests, &mut environment.store, effects);
                self.record(shared, now_ns);
            }
            self.schedule(shared, now_ns);
        }
        last_ns
    }

    fn schedule(&mut self, shared: &mut Shared<'_>, now_ns: u64) {
        let Shared { requests, profile, environment, effects, .. } = shared;
        (self.busy_until_ns, self.wait_until_ns) =
            match self.engine.schedule(now_ns, requests, profile, environment, effects) {
                Schedule::RunUntil(until) => (Some(until), None),
                Schedule::WaitUntil(until) => (None, Some(until)),
                Schedule::Idle => (None, None),
            };
        self.record(shared, now_ns);
    }

    fn record(&mut self, shared: &mut Shared<'_>, now_ns: u64) {
        let Shared { times, effects, .. } = shared;
        effects.first_tokens.drain(..).for_each(|request| times[request as usize].first_ns = now_ns);
        effects.finished.drain(..).for_each(|request| times[request as usize].finished_ns = now_ns);
        effects.admitted.drain(..).for_each(|(request, blocks)| times[request as usize].hits = blocks);
        self.gaps.append(&mut effects.inter_token_gaps);
        effects.changes.clear();
    }
}
