//! The results of a replay.

use super::planner::Planned;
use serde::Serialize;
use std::time::Duration;

/// What happened to one request. Times are nanoseconds of virtual time; 0 means never.
#[derive(Clone, Copy, Default, PartialEq, Debug)]
pub(super) struct RequestRecord {
    pub(super) arrived_ns: u64,
    pub(super) first_token_ns: u64,
    pub(super) finished_ns: u64,
    pub(super) output_tokens: u64,
    pub(super) blocks: u64,
    /// Blocks of the prompt that were not computed.
    pub(super) hits: u64,
    /// Worker that decoded.
    pub(super) worker: usize,
    /// Worker that computed the prompt, if it was another one.
    pub(super) prefill_worker: Option<usize>,
}

/// The outcome of one run.
#[derive(Default)]
pub(super) struct RunOutcome {
    pub(super) requests: Vec<RequestRecord>,
    pub(super) inter_token_gaps: Histogram,
    pub(super) busy_ns: Vec<u64>,
    pub(super) end_ns: u64,
    /// Whether some workers have the role prefill or decode.
    pub(super) disaggregated: bool,
    /// Number of role changes; `None` when the planner applies none.
    pub(super) role_changes: Option<u64>,
    /// Number of requests that were too long for every worker.
    pub(super) too_long: usize,
    /// What the planner advised.
    pub(super) planned: Option<Planned>,
    /// Copies ahead of demand; `None` when the routers order none.
    pub(super) copies: Option<Copies>,
}

/// Copies of shared prefixes ahead of demand, summed over all runs.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Copies {
    /// Copies that routers ordered.
    pub ordered: u64,
    /// Those that workers completed.
    pub completed: u64,
    /// Those that workers declined, did not find, or gave up after their time limit.
    pub failed: u64,
    /// Copies of which a request used a block: onboarded it from host memory.
    pub used: u64,
    /// Copies of which blocks were loaded and none was used.
    pub unused: u64,
    /// Prompt tokens in the blocks that were loaded.
    pub copied_tokens: u64,
    /// Bytes of these blocks.
    pub copied_bytes: u64,
    /// Prompt tokens in those of the blocks that were used; each block of a copy counts once.
    pub used_tokens: u64,
}

/// Service-level objective: upper limits of the time to first token and of the mean time between tokens.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct Slo {
    /// Time to first token.
    pub ttft: Duration,
    /// Mean time between the tokens of a request.
    pub itl: Duration,
}

/// Results of one policy at one rate: means over all runs, counts are sums over all runs.
///
/// Times to first token and times between tokens are NaN if no request was served to its last token, or none had a
/// second token. JSON has `null` for that.
#[derive(Clone, PartialEq, Debug, Default, Serialize)]
pub struct Results {
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
    /// What the planner advised, the largest of all runs; `None` when it does not run.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub planned: Option<Planned>,
    /// Copies ahead of demand; `None` when they are not simulated.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub copies: Option<Copies>,
}

impl RunOutcome {
    /// A quantile of the time to first token, in seconds, of all requests that fit on a worker. It is infinite where it
    /// falls on requests that admission rejected.
    pub(super) fn ttft_quantile_of_all(&self, q: f64) -> f64 {
        let ttft = |request: &RequestRecord| match request.first_token_ns {
            0 => f64::INFINITY,
            first_token_ns => seconds(first_token_ns - request.arrived_ns),
        };
        let mut all: Vec<f64> = self.requests.iter().map(ttft).collect();
        all.sort_unstable_by(f64::total_cmp);
        // Those that are too long for every worker are among the infinite ones at the end.
        quantile(&all[..all.len() - self.too_long], q)
    }

    pub(super) fn results(&self, rate: f64, slo: Slo) -> Results {
        let done: Vec<&RequestRecord> = self.requests.iter().filter(|request| request.finished_ns > 0).collect();
        let mut ttft: Vec<f64> =
            done.iter().map(|request| seconds(request.first_token_ns - request.arrived_ns)).collect();
        ttft.sort_unstable_by(f64::total_cmp);
        let sum = |requests: &[&RequestRecord], of: fn(&RequestRecord) -> u64| {
            requests.iter().map(|request| of(request)).sum::<u64>() as f64
        };
        // Requests are in the order of the trace.
        let last = &done[done.len() * 3 / 4..];
        let ttft_at = |q: f64| if ttft.is_empty() { f64::NAN } else { quantile(&ttft, q) };
        let itl_at =
            |q: f64| if self.inter_token_gaps.total == 0 { f64::NAN } else { self.inter_token_gaps.quantile(q) };
        let good = done.iter().filter(|request| request.meets_slo(slo)).count() as f64;
        let busiest = self.busy_ns.iter().max().copied().unwrap_or(0) as f64;
        let busy = self.busy_ns.iter().sum::<u64>() as f64 / self.busy_ns.len().max(1) as f64;
        let started = self.requests.iter().map(|request| request.arrived_ns).min().unwrap_or(0);
        Results {
            policy: String::new(),
            load_factor: None,
            rate_rps: rate,
            completed: done.len() as u64,
            rejected: (self.requests.len() - done.len()) as u64,
            // NaN without any: 0 divided by 0.
            ttft_mean_s: ttft.iter().sum::<f64>() / ttft.len() as f64,
            ttft_p50_s: ttft_at(0.5),
            ttft_p90_s: ttft_at(0.9),
            ttft_p99_s: ttft_at(0.99),
            itl_p50_s: itl_at(0.5),
            itl_p90_s: itl_at(0.9),
            itl_p99_s: itl_at(0.99),
            hit_rate: sum(&done, |request| request.hits) / sum(&done, |request| request.blocks).max(1.0),
            hit_rate_last_quarter: sum(last, |request| request.hits) / sum(last, |request| request.blocks).max(1.0),
            goodput_rps: rate * good / self.requests.len().max(1) as f64,
            slo_attainment: good / self.requests.len().max(1) as f64,
            imbalance: if busy > 0.0 { busiest / busy } else { 1.0 },
            makespan_s: seconds(self.end_ns.saturating_sub(started)),
            role_changes: self.role_changes,
            planned: self.planned,
            copies: self.copies,
            remote_prefills: self
                .disaggregated
                .then(|| done.iter().filter(|request| request.prefill_worker.is_some()).count() as u64),
        }
    }
}

impl Results {
    /// Averages over runs; counts are sums.
    pub(super) fn mean_of_runs(all: &[Self]) -> Self {
        // Over the runs that have a value; NaN if none has.
        let mean = |of: fn(&Self) -> f64| {
            let values: Vec<f64> = all.iter().map(of).filter(|value| !value.is_nan()).collect();
            values.iter().sum::<f64>() / values.len() as f64
        };
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
            planned: all.iter().filter_map(|f| f.planned).reduce(Planned::max),
            copies: all.iter().filter_map(|f| f.copies).reduce(Copies::plus),
        }
    }
}

impl Copies {
    fn plus(self, other: Self) -> Self {
        Self {
            ordered: self.ordered + other.ordered,
            completed: self.completed + other.completed,
            failed: self.failed + other.failed,
            used: self.used + other.used,
            unused: self.unused + other.unused,
            copied_tokens: self.copied_tokens + other.copied_tokens,
            copied_bytes: self.copied_bytes + other.copied_bytes,
            used_tokens: self.used_tokens + other.used_tokens,
        }
    }
}

impl RequestRecord {
    fn meets_slo(&self, slo: Slo) -> bool {
        let gaps = self.output_tokens.saturating_sub(1).max(1);
        u128::from(self.first_token_ns - self.arrived_ns) <= slo.ttft.as_nanos()
            && u128::from((self.finished_ns - self.first_token_ns) / gaps) <= slo.itl.as_nanos()
    }
}

/// A histogram of times with logarithmic buckets of about 1 %.
#[derive(Default)]
pub(super) struct Histogram {
    counts: Vec<u64>,
    pub(super) total: u64,
}

impl Histogram {
    /// Buckets per factor of e.
    const BUCKETS_PER_E: f64 = 100.0;

    pub(super) fn add(&mut self, ns: u64, times: u64) {
        if times == 0 {
            return;
        }
        let at = ((ns.max(1) as f64).ln() * Self::BUCKETS_PER_E) as usize;
        if self.counts.len() <= at {
            self.counts.resize(at + 1, 0);
        }
        self.counts[at] += times;
        self.total += times;
    }

    /// The quantile, in seconds; 0 when empty.
    pub(super) fn quantile(&self, q: f64) -> f64 {
        let rank = ((self.total as f64 * q).ceil() as u64).max(1);
        let mut below = 0;
        let at = self.counts.iter().position(|count| {
            below += count;
            below >= rank
        });
        at.map_or(0.0, |at| ((at as f64 + 0.5) / Self::BUCKETS_PER_E).exp() / 1e9)
    }
}

/// The smallest value that is not exceeded by a share `q` of the sorted values.
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
    fn times_are_absent_without_a_finished_request() {
        let slo = Slo { ttft: Duration::from_secs(2), itl: Duration::from_secs(2) };
        let outcome = |finished_ns: u64| {
            let record = RequestRecord { first_token_ns: finished_ns / 2, finished_ns, ..RequestRecord::default() };
            RunOutcome { requests: vec![record], ..RunOutcome::default() }.results(1.0, slo)
        };
        let [none, one] = [0, 2_000_000_000].map(outcome);
        let json = serde_json::to_value(Results::mean_of_runs(std::slice::from_ref(&none))).unwrap();
        for key in ["ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s"] {
            assert!(json[key].is_null(), "{key}: {json}");
        }
        assert_eq!(json["hit_rate"], 0.0);
        let mean = Results::mean_of_runs(&[none, one]);
        assert_eq!((mean.ttft_mean_s, mean.ttft_p99_s, mean.slo_attainment), (1.0, 1.0, 0.5));
        assert!(mean.itl_p50_s.is_nan(), "no request had a second token");
    }

    #[test]
    fn quantiles_are_recorded_values() {
        let values: Vec<f64> = (1..=100).map(f64::from).collect();
        let ranks = [0.0, 0.5, 0.99, 1.0].map(|q| quantile(&values, q) as u64);
        assert_eq!(ranks, [1, 50, 99, 100]);
        assert!(quantile(&[], 0.5).abs() < 1e-12);
        let mut histogram = Histogram::default();
        (1..=1000).for_each(|ms| histogram.add(ms * 1_000_000, 1));
        assert!((histogram.quantile(0.9) / 0.9 - 1.0).abs() < 0.01);
    }
}
