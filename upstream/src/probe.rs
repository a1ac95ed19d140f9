//! Hedged probes: if a health check has failed, or takes longer than usual, a second one is started.
//!
//! ```text
//!   first ── good answer within the usual time ─────────────────────────────────▶ healthy
//!     ├── failed ──────────┐
//!     └── no answer yet ───┴─▶ second, on a new connection ── a good answer of either ──▶ healthy
//!                                                          └─ both failed ──▶ the error of the last one
//! ```
//! So one lost packet or one dead connection in the pool does not make a server unhealthy, and does not delay its
//! re-admission. A server that is slow but alive keeps its first probe, which may still answer.
//!
//! Not here: how long the caller waits for an answer of either, and what follows from it (the router).

use crate::metrics::{Answered, Metrics};
use futures::future::{Either, select};
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::pin::pin;
use std::time::Duration;
use tokio::time::{Instant, timeout};

/// Number of answers whose times count: two minutes of an idle server.
const RECENT: usize = 32;
/// Of fewer answers no 95th percentile is known.
const FEWEST: usize = 8;
/// The usual time of a server of which too little is known. TCP repeats the first packet of a connection after 1 s.
const UNKNOWN: Duration = Duration::from_secs(1);
/// The shortest usual time. Linux repeats a lost packet after 200 ms at the earliest, and a server whose event loop is
/// busy for less is not asked twice.
const SHORTEST: Duration = Duration::from_millis(250);
/// The longest usual time: of the 10 s of the router most are left to the second probe.
const LONGEST: Duration = Duration::from_secs(2);

/// The probes of one server.
pub(crate) struct Probes {
    times: Mutex<AnswerTimes>,
    metrics: Metrics,
}

/// How long the latest good answers took, the oldest first.
#[derive(Default)]
struct AnswerTimes(VecDeque<Duration>);

/// A second probe. Dropping it counts which one answered.
struct Second<'a> {
    metrics: &'a Metrics,
    answered: Answered,
}

impl AnswerTimes {
    fn add(&mut self, time: Duration) {
        if self.0.len() == RECENT {
            self.0.pop_front();
        }
        self.0.push_back(time);
    }

    /// Time after which a second probe is started: the 95th percentile (nearest rank), within bounds.
    fn usual(&self) -> Duration {
        if self.0.len() < FEWEST {
            return UNKNOWN;
        }
        let mut times: Vec<_> = self.0.iter().copied().collect();
        times.sort_unstable();
        times[(times.len() * 95).div_ceil(100) - 1].clamp(SHORTEST, LONGEST)
    }
}

impl Drop for Second<'_> {
    fn drop(&mut self) {
        self.metrics.hedged_probe(self.answered);
    }
}

impl Probes {
    pub(crate) fn new(metrics: Metrics) -> Self {
        Self { times: Mutex::default(), metrics }
    }

    /// The first good answer of two probes. `second` is started only if the first one has failed or is late.
    pub(crate) async fn hedge<E>(
        &self,
        first: impl Future<Output = Result<(), E>>,
        second: impl Future<Output = Result<(), E>>,
    ) -> Result<(), E> {
        let mut first = pin!(self.timed(first));
        let usual = self.times.lock().usual();
        let in_time = timeout(usual, &mut first).await;
        if let Ok(Ok(())) = in_time {
            return Ok(());
        }
        // Counts a caller that gives up, too.
        let mut hedged = Second { metrics: &self.metrics, answered: Answered::Neither };
        let second = pin!(self.timed(second));
        let (answered, result) = if in_time.is_ok() {
            (Answered::Second, second.await)
        } else {
            match select(first, second).await {
                Either::Left((Err(_), second)) => (Answered::Second, second.await),
                Either::Right((Err(_), first)) => (Answered::First, first.await),
                Either::Left((answer, _)) => (Answered::First, answer),
                Either::Right((answer, _)) => (Answered::Second, answer),
            }
        };
        if result.is_ok() {
            hedged.answered = answered;
        }
        result
    }

    /// Records the time of a good answer.
    async fn timed<E>(&self, probe: impl Future<Output = Result<(), E>>) -> Result<(), E> {
        let started = Instant::now();
        probe.await?;
        self.times.lock().add(started.elapsed());
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus::Registry;
    use std::future::{pending, ready};
    use tokio::time::sleep;

    fn probes() -> (Probes, Registry) {
        let registry = Registry::new();
        (Probes::new(Metrics::new(&registry).unwrap()), registry)
    }

    /// Second probes by which one answered.
    fn hedged(registry: &Registry) -> Vec<(String, u64)> {
        let families = registry.gather();
        let of = families.iter().filter(|family| family.name() == "blockyard_upstream_hedged_probes_total");
        let count = |metric: &prometheus::proto::Metric| {
            (metric.get_label()[0].value().to_owned(), metric.get_counter().get_value() as u64)
        };
        of.flat_map(prometheus::proto::MetricFamily::get_metric).map(count).collect()
    }

    async fn answer(after: Duration, result: Result<(), &'static str>) -> Result<(), &'static str> {
        sleep(after).await;
        result
    }

    #[test]
    fn the_usual_time_is_a_bounded_95th_percentile_of_the_latest_answers() {
        let mut times = AnswerTimes::default();
        let ms = Duration::from_millis;
        (0..FEWEST - 1).for_each(|_| times.add(ms(1)));
        assert_eq!(times.usual(), UNKNOWN);
        times.add(ms(1));
        assert_eq!(times.usual(), SHORTEST);
        (1..=32).for_each(|n| times.add(ms(n * 40)));
        assert_eq!((times.0.len(), times.usual()), (RECENT, ms(31 * 40)), "one of 32 is slower");
        (0..3).for_each(|_| times.add(ms(60_000)));
        assert_eq!(times.usual(), LONGEST);
    }

    #[tokio::test(start_paused = true)]
    async fn an_answer_in_the_usual_time_starts_no_second_probe() {
        let (probes, registry) = probes();
        let second = async { panic!("started") };
        assert_eq!(probes.hedge(answer(UNKNOWN / 2, Ok(())), second).await, Ok(()));
        assert_eq!(hedged(&registry), []);
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_good_answer_counts() {
        let (second, soon) = (UNKNOWN, Duration::from_millis(10));
        for (first, other, expected, takes, answered) in [
            // The first never answers.
            (answer(UNKNOWN * 99, Ok(())), answer(soon, Ok(())), Ok(()), second + soon, "second"),
            // The first is slow, but alive.
            (answer(second + soon, Ok(())), answer(soon * 2, Ok(())), Ok(()), second + soon, "first"),
            (answer(second * 3, Ok(())), answer(soon, Err("b")), Ok(()), second * 3, "first"),
            // The first fails: the second does not wait.
            (answer(soon, Err("a")), answer(soon, Ok(())), Ok(()), soon * 2, "second"),
            (answer(second + soon, Err("a")), answer(soon * 9, Ok(())), Ok(()), second + soon * 9, "second"),
            // Both fail.
            (answer(soon, Err("a")), answer(soon, Err("b")), Err("b"), soon * 2, "neither"),
            (answer(second * 2, Err("a")), answer(soon, Err("b")), Err("a"), second * 2, "neither"),
        ] {
            let ((probes, registry), started) = (probes(), Instant::now());
            assert_eq!(probes.hedge(first, other).await, expected);
            assert_eq!((started.elapsed(), hedged(&registry)), (takes, vec![(answered.to_owned(), 1)]));
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_caller_that_gives_up_is_counted() {
        let (probes, registry) = probes();
        let never = timeout(UNKNOWN * 2, probes.hedge::<()>(pending(), pending())).await;
        assert!(never.is_err());
        assert_eq!(hedged(&registry), [("neither".to_owned(), 1)]);
    }

    #[tokio::test(start_paused = true)]
    async fn a_server_that_answers_fast_gets_its_second_probe_sooner() {
        let (probes, _) = probes();
        for _ in 0..FEWEST {
            probes.hedge::<()>(ready(Ok(())), pending()).await.unwrap();
        }
        let started = Instant::now();
        probes.hedge::<()>(pending(), ready(Ok(()))).await.unwrap();
        assert_eq!(started.elapsed(), SHORTEST);
    }
}
