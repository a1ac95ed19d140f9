use super::*;
use crate::policy::Policy;
use crate::replay::simulation::Simulation;
use crate::replay::tests::{fixture, options};
use crate::replay::{PolicyUnderTest, Workload};

fn of_policy(trace: &Trace, options: &Options, rate: f64, policy: Policy) -> RunOutcome {
    Simulation::new(trace, options, &PolicyUnderTest::Policy(policy), rate, 0).unwrap().run().unwrap()
}

fn assignment(outcome: &RunOutcome) -> Vec<usize> {
    outcome.requests.iter().map(|record| record.worker).collect()
}

#[test]
fn a_fixed_assignment_has_the_times_of_the_simulation() {
    // One worker leaves nothing to search.
    let (trace, options) = (fixture(), options(1));
    let simulated = of_policy(&trace, &options, 2.0, Policy::Random);
    let found = improve(&trace, &options, &trace.arrivals(2.0, 0), &assignment(&simulated), Objective::FirstToken);
    assert_eq!(found.requests, simulated.requests);
    assert_eq!((found.busy_ns, found.end_ns), (simulated.busy_ns, simulated.end_ns));
    let quantiles = |gaps: &Histogram| (gaps.total, gaps.quantile(0.5).to_bits());
    assert_eq!(quantiles(&found.inter_token_gaps), quantiles(&simulated.inter_token_gaps));
}

#[test]
fn the_search_improves_what_it_is_asked_to() {
    let options = options(4);
    for workload in [Workload::NoReuse, Workload::Chat] {
        let (rate, requests) = (10.0, 400);
        let trace = workload.generate(requests, rate, 0);
        let (arrivals, kv) = (trace.arrivals(rate, 0), of_policy(&trace, &options, rate, Policy::Random));
        let of =
            |objective| improve(&trace, &options, &arrivals, &assignment(&kv), objective).results(rate, options.slo);
        let (before, first, late, misses) = (
            kv.results(rate, options.slo),
            of(Objective::FirstToken),
            of(Objective::LateFirstToken),
            of(Objective::Misses),
        );
        assert_eq!(first.completed, requests as u64);
        assert!(first.ttft_mean_s < before.ttft_mean_s, "{workload}: {first:?} {before:?}");
        assert!(late.ttft_p99_s < before.ttft_p99_s, "{workload}: {late:?} {before:?}");
        assert!(misses.slo_attainment >= before.slo_attainment, "{workload}: {misses:?} {before:?}");
    }
}
