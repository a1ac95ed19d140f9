//! The results of a replay.

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

/// Results of one policy at one rate: means over all runs, counts are sums over all runs.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Figures {
    /// Name of the policy.
    pub policy: String,
    /// Offered rate divided by the capacity; `None` when the rate was given in requests per second.
    pub load_factor: Option<f64>,
    /// Offered rate, in requests per second.
    pub rate_rps: f64,
    /// Requests that were served to their last token, summed over all runs.
    pub completed: u64,
    /// Requests that were too long for every worker or that admission rejected, summed over all runs.
    pub rejected: u64,
    /// Mean time to first token, in seconds.
    pub ttft_mean_s: f64,
    /// Median time to first token, in seconds.
    pub ttft_p50_s: f64,
    /// 90th percentile of the time to first token, in seconds.
    pub ttft_p90_s: f64,
    /// 99th percentile of the time to first token, in seconds.
    pub ttft_p99_s: f64,
    /// Median inter-token latency, in seconds.
    pub itl_p50_s: f64,
    /// 90th percentile of the inter-token latency, in seconds.
    pub itl_p90_s: f64,
    /// 99th percentile of the inter-token latency, in seconds.
    pub itl_p99_s: f64,
    /// Share of prompt blocks that were found in a cache, from 0 to 1.
    pub hit_rate: f64,
    /// `hit_rate` of the last quarter of the requests.
    pub hit_rate_last_quarter: f64,
    /// Requests per second that met the SLO.
    pub goodput_rps: f64,
    /// Share of requests that met the SLO, from 0 to 1.
    pub slo_attainment: f64,
    /// Time in steps of the busiest worker divided by that of the average worker.
    pub imbalance: f64,
    /// Seconds of virtual time from the first arrival to the last token.
    pub makespan_s: f64,
    /// Requests that were prefilled on one worker and decoded on another, summed over all runs; `None` when every
    /// worker has the role `both`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub remote_prefills: Option<u64>,
    /// Role changes between prefill and decode, summed over all runs; `None` when the planner applies none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub role_changes: Option<u64>,
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
            policy: String::new(),
            load_factor: None,
            rate_rps: rate,
            completed: done.len() as u64,
            rejected: (self.served.len() - done.len()) as u64,
            ttft_mean_s: ttft.iter().sum::<f64>() / count,
            ttft_p50_s: quantile(&ttft, 0.5),
            ttft_p90_s: quantile(&ttft, 0.9),
            ttft_p99_s: quantile(&ttft, 0.99),
            itl_p50_s: self.gaps.quantile(0.5),
            itl_p90_s: self.gaps.quantile(0.9),
            itl_p99_s: self.gaps.quantile(0.99),
            hit_rate: sum(&done, |served| served.hits) / sum(&done, |served| served.blocks).max(1.0),
            hit_rate_last_quarter: sum(last, |served| served.hits) / sum(last, |served| served.blocks).max(1.0),
            goodput_rps: rate * good / self.served.len().max(1) as f64,
            slo_attainment: good / self.served.len().max(1) as f64,
            imbalance: if busy > 0.0 { busiest / busy } else { 1.0 },
            makespan_s: seconds(self.end_ns.saturating_sub(started)),
            role_changes: self.flips,
            remote_prefills: self.apart.then(|| done.iter().filter(|served| served.helper.is_some()).count() as u64),
        }
    }
}

impl Figures {
    /// Averages over seeds; counts are sums.
    pub(super) fn over_seeds(all: &[Self]) -> Self {
        let mean = |of: fn(&Self) -> f64| all.iter().map(of).sum::<f64>() / all.len().max(1) as f64;
        Self {
            policy: String::new(),
            load_factor: None,
            rate_rps: mean(|f| f.rate_rps),
            completed: all.iter().map(|f| f.completed).sum(),
            rejected: all.iter().map(|f| f.rejected).sum(),
            ttft_mean_s: mean(|f| f.ttft_mean_s),
            ttft_p50_s: mean(|f| f.ttft_p50_s),
            ttft_p90_s: mean(|f| f.ttft_p90_s),
            ttft_p99_s: mean(|f| f.ttft_p99_s),
            itl_p50_s: mean(|f| f.itl_p50_s),
            itl_p90_s: mean(|f| f.itl_p90_s),
            itl_p99_s: mean(|f| f.itl_p99_s),
            hit_rate: mean(|f| f.hit_rate),
            hit_rate_last_quarter: mean(|f| f.hit_rate_last_quarter),
            goodput_rps: mean(|f| f.goodput_rps),
            slo_attainment: mean(|f| f.slo_attainment),
            imbalance: mean(|f| f.imbalance),
            makespan_s: mean(|f| f.makespan_s),
            remote_prefills: all.iter().map(|f| f.remote_prefills).sum(),
            role_changes: all.iter().map(|f| f.role_changes).sum(),
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
