//! How many prompts arrive, and how busy workers are with them.

use super::prefix_demand::HORIZON;
use super::timestamp::Timestamp;

/// Averages over [`MEAN_SECONDS`].
#[derive(Default)]
pub(super) struct PromptFlow {
    /// Decayed number of prompts, and the seconds since the first one with the same decay. Their quotient is the rate.
    prompts: f64,
    seconds: f64,
    /// Share of the workers with queued prompts.
    busy: f64,
    /// Mean queue of the workers, in seconds.
    queue: f64,
    at: Option<Timestamp>,
}

/// Prompts that arrive, as one decision sees them.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct PromptArrivals {
    /// Per second and worker.
    rate: f64,
    /// Seconds until a second of queued work is done, while further prompts arrive.
    drain: f64,
    /// Mean queue of the workers, in seconds.
    mean_queue: f64,
}

/// Time constant of the averages: longer than a burst or the cold start of a cache, after which the queues are what
/// they were before, and shorter than most changes of traffic.
const MEAN_SECONDS: f64 = 30.0;
/// Seconds that are added to the time since the first prompt: the first few prompts do not give a rate.
const MIN_SECONDS: f64 = 1.0;

impl PromptFlow {
    /// Counts a prompt. `busy`: share of the workers with queued prompts; `queue`: their mean queue, in seconds.
    pub(super) fn arrived(&mut self, busy: f64, queue: f64, now: Timestamp) {
        let elapsed = self.at.map_or(0, |at| now.bits().saturating_sub(at.bits())) as f64 / 1e9;
        let keep = (-elapsed / MEAN_SECONDS).exp();
        self.prompts = self.prompts * keep + 1.0;
        self.seconds = MEAN_SECONDS + (self.seconds - MEAN_SECONDS) * keep;
        self.busy += (busy - self.busy) * (1.0 - keep);
        self.queue += (queue - self.queue) * (1.0 - keep);
        self.at = Some(now);
    }

    pub(super) fn arrivals(&self, workers: usize) -> PromptArrivals {
        // The prompt that is being placed is not one of those that come behind it.
        let others = (self.prompts - 1.0).max(0.0);
        PromptArrivals::new(others / (self.seconds + MIN_SECONDS) / workers.max(1) as f64, self.busy, self.queue)
    }
}

impl PromptArrivals {
    /// No prompt arrives.
    #[cfg(test)]
    pub(crate) const NONE: Self = Self { rate: 0.0, drain: 1.0, mean_queue: 0.0 };

    /// `rate`: per second and worker; `busy`: share of the time in which a worker has queued prompts; `mean_queue`: of
    /// the workers, in seconds.
    pub(crate) fn new(rate: f64, busy: f64, mean_queue: f64) -> Self {
        Self { rate, drain: (1.0 - busy).max(0.0).recip(), mean_queue }
    }

    /// Number of prompts that wait longer because of a prompt of `seconds` behind a queue of `queue` seconds.
    ///
    /// On the worker these are the prompts that arrive while its queue is computed and, on average, half of the prompt.
    /// Prompts that go elsewhere because of it wait longer there, as long as the other workers have queues: that is the
    /// mean queue. Queues that do not drain are limited to [`HORIZON`].
    #[inline]
    pub(crate) fn behind(&self, queue: f64, seconds: f64) -> f64 {
        self.rate * ((queue + self.mean_queue + seconds / 2.0) * self.drain).min(HORIZON)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;
    use tokio::time::Instant;

    #[test]
    fn rate_and_load_are_averages_from_the_first_seconds_on() {
        let (mut flow, start) = (PromptFlow::default(), Instant::now());
        for nth in 0..600_u32 {
            let busy = f64::from(nth % 2);
            flow.arrived(busy, 3.0 * busy, (start + Duration::from_millis(100) * nth).into());
        }
        let PromptArrivals { rate, drain, mean_queue } = flow.arrivals(5);
        assert!((rate - 2.0).abs() < 0.2 && (drain - 1.0 / 0.57).abs() < 0.2, "ten a second on five: {rate} {drain}");
        assert!((mean_queue - 3.0 * (1.0 - drain.recip())).abs() < 1e-9, "{mean_queue} {drain}");
    }

    #[test]
    fn prompts_queue_behind_until_the_queue_is_empty() {
        let arrivals = PromptArrivals::new(2.0, 0.5, 0.0);
        assert!((arrivals.behind(1.0, 0.5) - 5.0).abs() < 1e-9);
        assert!(arrivals.behind(0.0, 0.5) < arrivals.behind(0.0, 1.0) && PromptArrivals::NONE.behind(9.0, 9.0) == 0.0);
        assert!((PromptArrivals::new(2.0, 1.0, 0.0).behind(1.0, 0.5) - 2.0 * HORIZON).abs() < 1e-9, "it never drains");
        let busy_fleet = PromptArrivals::new(2.0, 0.5, 3.0);
        assert!((busy_fleet.behind(1.0, 0.5) - 17.0).abs() < 1e-9, "twelve of them wait on other workers");
    }
}
