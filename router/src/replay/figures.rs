//! What a replay amounts to.

use serde::Serialize;
use std::time::Duration;

/// One request's life, in nanoseconds of virtual time.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct Served {
    pub(super) arrived_ns: u64,
    pub(super) first_ns: u64,
    pub(super) ended_ns: u64,
    pub(super) output: u64,
    pub(super) blocks: u64,
    /// Of `blocks`, those that were not computed.
    pub(super) hits: u64,
    /// Who served it.
    pub(super) worker: usize,
    /// Who computed its prompt, when that was somebody else.
    pub(super) helper: Option<usize>,
}

/// One run.
pub(super) struct Outcome {
    pub(super) served: Vec<Served>,
    pub(super) gaps: Histogram,
    pub(super) busy_ns: Vec<u64>,
    pub(super) end_ns: u64,
    /// Whether some workers only prefill or decode.
    pub(super) apart: bool,
    /// How often one changed between prefill and decode, if they do.
    pub(super) flips: Option<u64>,
}

/// What is good enough: a first token and, on average over an answer, the next ones within these times.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slo {
    /// Time to first token.
    pub ttft: Duration,
    /// Mean time between an answer's tokens.
    pub itl: Duration,
}

/// One policy at one load, averaged over seeds. Seconds, and requests per second.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Figures {
    /// The policy.
    pub name: String,
    /// The rate, as a multiple of capacity; `None` when a rate was asked for.
    pub load: Option<f64>,
    /// Requests per second offered.
    pub rate_rps: f64,
    /// Requests that were served to their end, all seeds together.
    pub finished: u64,
    /// Requests too long for any worker, and those that the waiting room sent away, all seeds together.
    pub refused: u64,
    /// Mean time to first token.
    pub ttft_mean_s: f64,
    /// Half of the requests had theirs within.
    pub ttft_p50_s: f64,
    /// Nine in ten.
    pub ttft_p90_s: f64,
    /// 99 in a hundred.
    pub ttft_p99_s: f64,
    /// Time from token to token: half were within.
    pub itl_p50_s: f64,
    /// Nine in ten.
    pub itl_p90_s: f64,
    /// 99 in a hundred.
    pub itl_p99_s: f64,
    /// Share of prompt blocks that were not computed.
    pub hit_rate: f64,
    /// The same of the last quarter of the requests.
    pub hit_rate_end: f64,
    /// Requests per second of arrivals that met the SLO.
    pub goodput_rps: f64,
    /// Share of requests that met it.
    pub good: f64,
    /// The busiest worker's time in steps over the average worker's.
    pub imbalance: f64,
    /// From the first arrival to the last token.
    pub makespan_s: f64,
    /// Requests whose prompt was computed by one worker and handed over to another, all seeds together; `None` when all workers
    /// do everything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub handed_over: Option<u64>,
    /// Times that a worker changed between prefill and decode, all seeds together; `None` when nobody may.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub flips: Option<u64>,
}

impl Outcome {
    pub(super) fn figures(&self, rate: f64, slo: Slo) -> Figures {
        let done: Vec<&Served> = self.served.iter().filter(|served| served.ended_ns > 0).collect();
        let mut ttft: Vec<f64> = done.iter().map(|served| seconds(served.first_ns - served.arrived_ns)).collect();
        ttft.sort_unstable_by(f64::total_cmp);
        let count = done.len().max(1) as f64;
        let sum = |these: &[&Served], of: fn(&Served) -> u64| these.iter().map(|served| of(served)).sum::<u64>() as f64;
        // In the order of the trace.
        let last = &done[done.len() * 3 / 4..];
        let good = done.iter().filter(|served| served.meets(slo)).count() as f64;
        let busiest = self.busy_ns.iter().max().copied().unwrap_or(0) as f64;
        let busy = self.busy_ns.iter().sum::<u64>() as f64 / self.busy_ns.len().max(1) as f64;
        let started = self.served.iter().map(|served| served.arrived_ns).min().unwrap_or(0);
        Figures {
            name: String::new(),
            load: None,
            rate_rps: rate,
            finished: done.len() as u64,
            refused: (self.served.len() - done.len()) as u64,
            ttft_mean_s: ttft.iter().sum::<f64>() / count,
            ttft_p50_s: quantile(&ttft, 0.5),
            ttft_p90_s: quantile(&ttft, 0.9),
            ttft_p99_s: quantile(&ttft, 0.99),
            itl_p50_s: self.gaps.quantile(0.5),
            itl_p90_s: self.gaps.quantile(0.9),
            itl_p99_s: self.gaps.quantile(0.99),
            hit_rate: sum(&done, |served| served.hits) / sum(&done, |served| served.blocks).max(1.0),
            hit_rate_end: sum(last, |served| served.hits) / sum(last, |served| served.blocks).max(1.0),
            goodput_rps: rate * good / self.served.len().max(1) as f64,
            good: good / self.served.len().max(1) as f64,
            imbalance: if busy > 0.0 { busiest / busy } else { 1.0 },
            makespan_s: seconds(self.end_ns.saturating_sub(started)),
            flips: self.flips,
            handed_over: self.apart.then(|| done.iter().filter(|served| served.helper.is_some()).count() as u64),
        }
    }
}

impl Figures {
    /// Averages over seeds; counts are sums.
    pub(super) fn over_seeds(all: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len().max(1) as f64;
        Self {
            name: String::new(),
            load: None,
            rate_rps: mean(|f| f.rate_rps),
            finished: all.iter().map(|f| f.finished).sum(),
            refused: all.iter().map(|f| f.refused).sum(),
            ttft_mean_s: mean(|f| f.ttft_mean_s),
            ttft_p50_s: mean(|f| f.ttft_p50_s),
            ttft_p90_s: mean(|f| f.ttft_p90_s),
            ttft_p99_s: mean(|f| f.ttft_p99_s),
            itl_p50_s: mean(|f| f.itl_p50_s),
            itl_p90_s: mean(|f| f.itl_p90_s),
            itl_p99_s: mean(|f| f.itl_p99_s),
            hit_rate: mean(|f| f.hit_rate),
            hit_rate_end: mean(|f| f.hit_rate_end),
            goodput_rps: mean(|f| f.goodput_rps),
            good: mean(|f| f.good),
            imbalance: mean(|f| f.imbalance),
            makespan_s: mean(|f| f.makespan_s),
            handed_over: all.iter().map(|f| f.handed_over).sum(),
            flips: all.iter().map(|f| f.flips).sum(),
        }
    }
}

impl Served {
    fn meets(&self, slo: Slo) -> bool {
        let between = self.output.saturating_sub(1).max(1);
        u128::from(self.first_ns - self.arrived_ns) <= slo.ttft.as_nanos()
            && u128::from((self.ended_ns - self.first_ns) / between) <= slo.itl.as_nanos()
    }
}

/// Times, counted in steps of about one per cent.
#[derive(Default)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    pub(super) all: u64,
}

impl Histogram {
    /// Steps per factor of e.
    const STEPS: f64 = 100.0;

    pub(super) fn add(&mut self, ns: u64, times: u64) {
        if times == 0 {
            return;
        }
        let at = ((ns.max(1) as f64).ln() * Self::STEPS) as usize;
        if self.counts.len() <= at {
            self.counts.resize(at + 1, 0);
        }
        self.counts[at] += times;
        self.all += times;
    }

    /// In seconds.
    pub(super) fn quantile(&self, q: f64) -> f64 {
        let rank = ((self.all as f64 * q).ceil() as u64).max(1);
        let mut below = 0;
        let at = self.counts.iter().position(|count| {
            below += count;
            below >= rank
        });
        at.map_or(0.0, |at| ((at as f64 + 0.5) / Self::STEPS).exp() / 1e9)
    }
}

/// The smallest value that at least this share of the sorted values does not exceed.
fn quantile(sorted: &[f64], q: f64) -> f64 {
    let rank = (sorted.len() as f64 * q).ceil() as usize;
    sorted.get(rank.max(1) - 1).copied().unwrap_or(0.0)
}

fn seconds(ns: u64) -> f64 {
    ns as f64 / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_of_the_values_that_came() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        let ranks = [0.0, 0.5, 0.99, 1.0].map(|q| quantile(&values, q) as u64);
        assert_eq!(ranks, [1, 50, 99, 100]);
        assert!(quantile(&[], 0.5).abs() < 1e-12);
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|ms| histogram.add(ms * 1_000_000, 1));
        assert!((histogram.quantile(0.9) / 0.9 - 1.0).abs() < 0.01);
    }
}
