//! Goodput in overload with a target of the time between tokens.

use super::tests::{options, run_policy};
use super::{AdmissionMode, Options, PolicyUnderTest, Slo, Workload};
use crate::policy::Policy;
use std::time::Duration;

#[test]
fn overload_with_a_target_between_tokens_keeps_more_requests_in_time() {
    // Two workers have memory for about 50 sequences each, whose tokens then take 20 ms, and then compute about 8
    // requests per second.
    const RATE: f64 = 12.0;
    let trace = Workload::DecodeHeavy.generate(600, RATE, 7);
    let at = |settings: &str| {
        let settings = toml::from_str(settings).unwrap();
        let slo = Slo { ttft: Duration::from_secs(2), itl: Duration::from_millis(15) };
        let options = Options { admission: AdmissionMode::Queue, settings, slo, ..options(2) };
        run_policy(&trace, &options, &PolicyUnderTest::Policy(Policy::Kv), RATE, 1)
    };
    let (without, with) = (at("[slo]\nttft = '2s'"), at("[slo]\nttft = '2s'\nitl = '15ms'"));
    assert!(with.slo_attainment > 1.2 * without.slo_attainment, "{with:?} {without:?}");
    assert!(with.itl_p50_s < 0.015 && with.itl_p50_s < without.itl_p50_s, "{with:?} {without:?}");
}
