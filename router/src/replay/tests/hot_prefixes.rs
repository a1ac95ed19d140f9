//! Prefixes that many requests have: copies of them ahead of demand, and how their requests spread over workers.

use super::*;

#[test]
fn hot_prefixes_are_copied_ahead_of_demand_and_used() {
    // The prefix spreads over the workers for seconds: each request that computes it has one of its own.
    const RATE: f64 = 6.0;
    let traffic = Traffic::Generated { workload: Workload::HotPrefix(16 << 10), requests: 200 };
    let run = |prefetch, seed| {
        let settings = Settings { prefetch, ..Settings::default() };
        let (trace, options) = (traffic.at(RATE, seed), Options { settings, ..with_host(options(32)) });
        let outcome = Simulation::new(&trace, &options, &KV, RATE, seed).unwrap().run().unwrap();
        let computed = outcome.requests.iter().map(|it| it.blocks - it.hits).sum::<u64>();
        (outcome.results(RATE, options.slo), computed)
    };
    let (mut fewer, mut mean_on, mut mean_off) = (0, 0.0, 0.0);
    for seed in 0..3 {
        let [(on, computed), (off, computed_off)] = [run(true, seed), run(false, seed)];
        assert_eq!((on.completed, off.completed, off.copies), (200, 200, None));
        let copies = on.copies.unwrap();
        assert!(copies.ordered >= 1 && copies.used >= 1, "{copies:?}");
        assert!(copies.completed + copies.failed <= copies.ordered, "{copies:?}");
        assert!(copies.used + copies.unused <= copies.ordered, "{copies:?}");
        assert!(0 < copies.used_tokens && copies.used_tokens <= copies.copied_tokens, "{copies:?}");
        mean_on += on.ttft_mean_s;
        mean_off += off.ttft_mean_s;
        assert!(computed <= computed_off, "{computed} blocks computed with copies, {computed_off} without");
        assert_eq!((on, computed), run(true, seed), "two runs of a seed are equal");
        fewer += u32::from(computed < computed_off);
    }
    assert!(fewer >= 1, "copies saved the computation of no block");
    assert!(mean_on < mean_off, "copies delay requests: {mean_on} {mean_off}");
}

/// Requests of which 95 % have one prefix of 32k tokens: one per second for a minute, so that few workers hold it, and
/// then 1.25 per second and worker.
fn rising_demand(workers: usize, seed: u64) -> Trace {
    const SLOW: usize = 60;
    let mut trace = Workload::HotPrefix(32 << 10).generate(1500, 1.25 * workers as f64, seed);
    let since = trace.requests[SLOW].arrival_ms;
    for (nth, spec) in trace.requests.iter_mut().enumerate() {
        spec.arrival_ms = 1000 * nth.min(SLOW) as u64 + spec.arrival_ms.saturating_sub(since);
    }
    trace
}

#[test]
fn requests_with_a_hot_prefix_do_not_herd_on_the_workers_that_hold_it() {
    // Without the cost of the batch or of replication, 16 workers serve a quarter of the requests in time, and less. At
    // first the demand is not known yet: later requests count.
    for (workers, first, seeds, at_most, spread) in [(16, 300, 2, 1.03, 1.7), (64, 700, 1, 1.05, 3.0)] {
        let profile = toml::from_str(H100).unwrap();
        let options = Options { profile, ..options(workers) };
        let run = |policy: &PolicyUnderTest, seed: u64| {
            let trace = rising_demand(workers, seed);
            let mut outcome = Simulation::new(&trace, &options, policy, trace.rate(), seed).unwrap().run().unwrap();
            outcome.requests.drain(..first);
            let mut by_worker = vec![0.0; workers];
            outcome.requests.iter().for_each(|served| by_worker[served.worker] += 1.0);
            let most = by_worker.into_iter().fold(0.0, f64::max);
            (outcome.results(trace.rate(), options.slo), most * workers as f64 / outcome.requests.len() as f64)
        };
        let [kv, least_loaded] = [KV, LEAST_LOADED].map(|policy| {
            let (results, spreads): (Vec<Results>, Vec<f64>) = (0..seeds).map(|seed| run(&policy, seed)).unzip();
            (Results::mean_of_runs(&results), spreads.into_iter().fold(0.0, f64::max))
        });
        let described = format!("{workers} workers: {kv:?} {least_loaded:?}");
        assert!(kv.0.slo_attainment >= 0.97 * least_loaded.0.slo_attainment, "{described}");
        assert!(kv.0.ttft_mean_s <= at_most * least_loaded.0.ttft_mean_s, "{described}");
        assert!(kv.1 <= spread, "the busiest has {} times the mean of the requests, {described}", kv.1);
    }
}

#[test]
fn no_copies_are_ordered_without_host_memory_or_by_other_routers() {
    let traffic = Traffic::Generated { workload: Workload::HotPrefix(16 << 10), requests: 100 };
    let copies = |options: &Options, policy: &PolicyUnderTest| {
        let trace = traffic.at(30.0, 0);
        Simulation::new(&trace, options, policy, 30.0, 0).unwrap().run().unwrap().copies
    };
    assert_eq!(copies(&options(8), &KV), None);
    let with_host = with_host(options(8));
    assert_eq!(copies(&with_host, &PolicyUnderTest::Peer(Peer::ALL[0])), None);
    assert!(copies(&with_host, &KV).is_some());
}
