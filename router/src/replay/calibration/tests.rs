use super::*;
use crate::policy::Policy;
use crate::replay::simulation::Simulation;
use crate::replay::{AdmissionMode, BLOCK_TOKENS, Options, PolicyUnderTest, QueueOrder, Slo, Trace};
use std::time::Duration;
use worker::plane::Role;

const FIXTURE: &str = include_str!("../../../tests/fixtures/conversation.jsonl");
const H100: &str = include_str!("../../../../deploy/profiles/h100-8b.toml");

fn h100() -> Profile {
    toml::from_str(H100).unwrap()
}

/// The trace that a simulated run would have written.
fn record(profile: &Profile, workers: usize, rate: f64) -> Vec<Line> {
    let trace = Trace::read(FIXTURE.as_bytes()).unwrap();
    let slo = Slo { ttft: Duration::from_secs(2), itl: Duration::from_millis(100) };
    let (event_delay, profile) = (Duration::from_millis(5), profile.clone());
    let options = Options {
        profile,
        workers: vec![Role::Both; workers],
        replicas: 1,
        event_delay,
        event_loss: 0.0,
        event_loss_until: 1.0,
        resync_delay: event_delay,
        slo,
        admission: AdmissionMode::Off,
        queue_order: QueueOrder::Fcfs,
        rebalance: false,
        settings: crate::state::Settings::default(),
    };
    let outcome =
        Simulation::new(&trace, &options, &PolicyUnderTest::Policy(Policy::Kv), rate, 0).unwrap().run().unwrap();
    let line = |(spec, served): (&crate::replay::trace::RequestSpec, &crate::replay::results::RequestRecord)| {
        let since = |ns: u64| (ns - served.arrived_ns) as f64 / 1e9;
        let found = (served.hits * BLOCK_TOKENS).min(spec.input_tokens - 1);
        serde_json::from_value::<Line>(serde_json::json!({
            "timestamp": served.arrived_ns as f64 / 1e6, "input_length": spec.input_tokens,
            "output_length": spec.output_tokens,
            "hash_ids": spec.blocks, "model": "toy", "worker": served.worker.to_string(), "dispatched_s": 0.0,
            "first_token_s": since(served.first_token_ns), "last_token_s": since(served.finished_ns),
            "cached_tokens": { "g1": found }, "kv_cache_tokens": options.profile.blocks() * BLOCK_TOKENS,
            "kv_bytes_per_token": options.profile.kv_bytes_per_token, "max_num_seqs": options.profile.max_num_seqs,
        }))
        .unwrap()
    };
    trace.requests.iter().zip(&outcome.requests).map(line).collect()
}

fn close(what: &str, found: f64, want: f64, share: f64) {
    assert!((found / want - 1.0).abs() < share, "{what}: {found} for {want}");
}

#[test]
fn calibration_recovers_the_profile_of_a_simulated_run() {
    let made = h100();
    // Prefill takes twice as long as in the base profile, reading the context three times as long.
    let made = Profile {
        prefill_token_s: made.prefill_token_s * 2.0,
        decode_context_token_s: made.decode_context_token_s * 3.0,
        max_num_seqs: 100,
        ..made
    };
    let made = Profile { kv_cache_bytes: made.kv_cache_bytes / 2, ..made };
    for (workers, rate) in [(2, 1.0), (4, 3.0)] {
        let Calibration {
            profile,
            prefill_median_relative_error: prefill,
            decode_median_relative_error: decode,
            from_base,
            ..
        } = calibrate(&record(&made, workers, rate), &h100()).unwrap();
        close("step_base_s", profile.step_base_s, made.step_base_s, 0.1);
        close("prefill_token_s", profile.prefill_token_s, made.prefill_token_s, 0.1);
        close("prefill_attention_pair_s", profile.prefill_attention_pair_s, made.prefill_attention_pair_s, 0.25);
        close("decode_context_token_s", profile.decode_context_token_s, made.decode_context_token_s, 0.25);
        assert!(prefill < 0.05 && decode < 0.1, "{prefill} {decode}");
        assert_eq!((profile.max_num_seqs, profile.kv_bytes_per_token), (100, made.kv_bytes_per_token));
        close("kv_cache_bytes", profile.kv_cache_bytes as f64, made.kv_cache_bytes as f64, 0.01);
        assert_eq!(from_base, ["max_num_batched_tokens", "peer"]);
        profile.check().unwrap();
    }
}

#[test]
fn calibration_measures_the_speed_of_a_tier() {
    // One prompt per second. A third of them onboard some hundred tokens at 1 GB/s after 20 ms.
    let line = |at: usize| {
        let input = 1000 + 700 * (at % 5) as u64;
        let found = if at.is_multiple_of(3) { 300 + 200 * (at % 4) as u64 } else { 0 };
        let computed = (input - found) as f64;
        let onboard = if found > 0 { 0.02 + found as f64 * 100_000.0 / 1e9 } else { 0.0 };
        let prompt = 0.01 + computed * 0.000_1 + onboard;
        let decode = 0.01 * (10 + at % 30) as f64;
        serde_json::from_value::<Line>(serde_json::json!({
            "timestamp": 1000 * at, "input_length": input,
            "output_length": 11 + at % 30, "hash_ids": [], "model": "toy",
            "worker": "w", "dispatched_s": 0.0, "first_token_s": prompt, "last_token_s": prompt + decode,
            "cached_tokens": if found > 0 { serde_json::json!({ "g3": found }) } else { serde_json::json!({}) },
            "kv_bytes_per_token": 100_000,
        }))
        .unwrap()
    };
    let lines: Vec<Line> = (0..300).map(line).collect();
    let host = Store { capacity_bytes: 1 << 40, bytes_per_second: 5e9, latency_s: 1.0 };
    let base = Profile { host: Some(host), shared: Some(host), max_num_batched_tokens: 1 << 20, ..h100() };
    let Calibration { profile, from_base, .. } = calibrate(&lines, &base).unwrap();
    let found = profile.host.unwrap();
    close("bytes_per_second", found.bytes_per_second, 1e9, 0.1);
    close("latency_s", found.latency_s, 0.02, 0.2);
    assert_eq!((found.capacity_bytes, profile.shared), (host.capacity_bytes, Some(host)));
    assert_eq!(from_base, ["max_num_batched_tokens", "peer", "kv_cache_bytes", "max_num_seqs", "shared"]);
}

#[test]
fn too_few_requests_are_an_error() {
    let lines = record(&h100(), 2, 1.0);
    assert_eq!(calibrate(&lines[..20], &h100()), Err(CalibrationError::TooFew { found: 20 }));
    let apart: Vec<Line> = lines.iter().cloned().map(|line| Line { disaggregated: true, ..line }).collect();
    assert_eq!(calibrate(&apart, &h100()), Err(CalibrationError::TooFew { found: 0 }));
}

#[test]
fn similar_requests_are_an_error_that_says_what_to_record() {
    // A step takes 10 ms, a sequence 1 ms, a token 0.1 ms.
    let line = |at: u64, every: u64, input: u64, together: u64| {
        let prompt = 0.01 + 0.0001 * input as f64;
        let decode = 40.0 * (0.01 + 0.001 * together as f64);
        serde_json::from_value::<Line>(serde_json::json!({
            "timestamp": every * at, "input_length": input,
            "output_length": 41, "hash_ids": [], "model": "toy", "worker": "w",
            "dispatched_s": 0.0, "first_token_s": prompt, "last_token_s": prompt + decode,
        }))
        .unwrap()
    };
    let alike: Vec<Line> = (0..60).map(|at| line(at, 2_000, 1000, 1)).collect();
    let base = Profile { max_num_batched_tokens: 1 << 20, ..h100() };
    let error = calibrate(&alike, &base).unwrap_err().to_string();
    for text in
        ["the 60 requests", "1000 to 1000 tokens", "batches of 1 to 1", "at least 100 requests", "factor of ten"]
    {
        assert!(error.contains(text), "{text}: {error}");
    }
    let length = |at: u64| 200 * (1 + at % 10);
    let alone = (0..50).map(|at| line(at, 2_000, length(at), 1));
    let several = (50..75).flat_map(|at| (0..2).map(move |_| line(at, 2_000, length(at), 2)));
    let Calibration { profile, .. } = calibrate(&alone.chain(several).collect::<Vec<_>>(), &base).unwrap();
    assert!(profile.prefill_token_s > 0.0 && profile.step_base_s > 0.0, "{profile:?}");
}
