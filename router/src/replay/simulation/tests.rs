use super::*;
use crate::policy::Policy;
use crate::replay::tests::{fixture, options, run_policy, with_stores};
use crate::replay::{Link, PolicyUnderTest, QueueOrder};
use proptest::prelude::*;
use std::time::Duration;
use units::HumanDuration;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// With any mix of roles and any link speed, every request gets all of its tokens, and no state of it remains on a
    /// worker or in a router.
    #[test]
    fn every_request_completes_and_leaves_no_state(
        (prefill, decode, both) in (1..4_usize, 0..4_usize, 0..3_usize),
        (replicas, event_delay_ms) in (1..3_usize, 0..20_u64),
        (stores, rebalance, admission, memory) in (any::<bool>(), any::<bool>(), 0..3_usize, 60..300_u64),
        (speed, rate) in (1e9..50e9, 2.0..60.0),
        target_ms in prop::option::of(50..5_000_u64),
        policy in prop::sample::select(PolicyUnderTest::all()),
        seed in any::<u64>(),
    ) {
        let trace = Trace { requests: fixture().requests[..150].to_vec() };
        let mut options = if stores { with_stores(options(1)) } else { options(1) };
        let [a, b, c] = [(Role::Prefill, prefill), (Role::Decode, decode), (Role::Both, both)]
            .map(|(role, count)| vec![role; count]);
        options.workers = [a, b, c].concat();
        options.admission = [AdmissionMode::Off, AdmissionMode::Queue, AdmissionMode::Deadline][admission];
        options.settings.slo.ttft = target_ms.map(HumanDuration::millis);
        options.profile.peer = Some(Link { bytes_per_second: speed, latency_s: 0.001 });
        options.profile.kv_cache_bytes = memory * options.profile.block_bytes();
        let options = Options { replicas, rebalance, event_delay: Duration::from_millis(event_delay_ms), ..options };
        let mut simulation = Simulation::new(&trace, &options, &policy, rate, seed).unwrap();
        simulation.run_events().unwrap();

        prop_assert_eq!(simulation.unfinished, 0);
        let (done, rejected): (Vec<&RequestRecord>, Vec<&RequestRecord>) =
        simulation.records.iter().partition(|it| it.finished_ns > 0);
        let fits = trace.requests.iter().filter(|spec| Engine::fits(&options.profile, spec)).count();
        if options.admission == AdmissionMode::Off {
            prop_assert_eq!(done.len(), fits);
        }
        prop_assert!(rejected.iter().all(|it| it.first_token_ns == 0 && it.prefill_worker.is_none()));
        for it in &done {
            prop_assert!(it.arrived_ns < it.first_token_ns, "{it:?}");
                prop_assert!(it.first_token_ns <= it.finished_ns && it.hits <= it.blocks, "{it:?}");
            prop_assert!(it.prefill_worker != Some(it.worker), "{it:?}");
        }
        // Each token but the first one adds a gap.
        let tokens: u64 = done.iter().map(|it| it.output_tokens - 1).sum();
        prop_assert_eq!(simulation.inter_token_gaps.total, tokens);
        for worker in &simulation.workers {
            let load = worker.engine.load(&options.profile);
            prop_assert_eq!((load.running, load.waiting, load.waiting_tokens, load.active_blocks), (0, 0, 0, 0));
        }
        // Messages between routers may still be in transit.
        prop_assert!(replicas > 1 || simulation.routers[0].is_idle());
    }
}

/// Pairs of long prompts arrive while other requests decode.
fn bursts(workers: Vec<Role>) -> crate::replay::Results {
    let short_requests = (0..300).map(|nth| (nth * 50, 1_000, 300, 10_000 + nth as u32 * 100));
    let long = (0..10).map(|nth| (1_500 + nth / 2 * 3_000, 30_000, 20, 50_000 + nth as u32 * 100));
    let line = |(at, input, output, first): (u64, u64, u64, u32)| {
        let blocks: Vec<u32> = (first..).take(input.div_ceil(512) as usize).collect();
        let spec =
            serde_json::json!({ "timestamp": at, "input_length": input, "output_length": output, "hash_ids": blocks });
        spec.to_string() + "\n"
    };
    let text: String = short_requests.chain(long).map(line).collect();
    let trace = Trace::read(text.as_bytes()).unwrap();
    let mut options = options(1);
    options.profile.kv_cache_bytes *= 10;
    let options = Options { workers, ..options };
    run_policy(&trace, &options, &PolicyUnderTest::Policy(Policy::Kv), trace.rate(), 3)
}

#[test]
fn remote_prefill_shields_decoding_from_long_prompts() {
    let aggregated = bursts(vec![Role::Both; 4]);
    let disaggregated = bursts([vec![Role::Prefill; 2], vec![Role::Decode; 2]].concat());
    assert_eq!((aggregated.completed, disaggregated.completed), (930, 930));
    assert_eq!(aggregated.remote_prefills, None);
    assert!(
        disaggregated.remote_prefills.is_some_and(|count| count >= 30),
        "the long ones at least: {disaggregated:?}"
    );
    assert!(disaggregated.itl_p99_s < aggregated.itl_p99_s / 2.0, "{disaggregated:?} {aggregated:?}");
}

#[test]
fn workers_change_roles_when_the_demand_changes() {
    // Long prompts with short outputs, and one prefill worker of four.
    let long = |nth: u64| {
        let blocks: Vec<u64> = (nth * 100..).take(32).collect();
        let (at, input) = (nth * 300, 32 * 512);
        serde_json::json!({ "timestamp": at, "input_length": input, "output_length": 8, "hash_ids": blocks })
            .to_string()
    };
    let text = (0..600).map(long).collect::<Vec<_>>().join("\n");
    let trace = Trace::read(text.as_bytes()).unwrap();
    let workers = [vec![Role::Prefill], vec![Role::Decode; 3]].concat();
    let of = |rebalance| {
        let options = Options { rebalance, workers: workers.clone(), ..options(1) };
        run_policy(&trace, &options, &PolicyUnderTest::Policy(Policy::Kv), trace.rate(), 1)
    };
    let (stay, change) = (of(false), of(true));
    assert_eq!((stay.completed, change.completed, stay.role_changes), (600, 600, None));
    assert!(change.role_changes.is_some_and(|role_changes| (1..=4).contains(&role_changes)), "{change:?}");
    let planned = change.planned.unwrap();
    assert!(stay.planned.is_none() && planned.max_workers == 8, "{planned:?}");
    assert!((3..=7).contains(&planned.prefill_workers) && planned.decode_workers >= 1, "{planned:?}");
    assert!(
        change.ttft_mean_s < stay.ttft_mean_s && change.remote_prefills > stay.remote_prefills,
        "{change:?} {stay:?}"
    );
}

#[test]
fn prompt_dropped_in_transit_still_counts_as_transferred() {
    let requests = vec![RequestSpec {
        arrival_ms: 0,
        input_tokens: 8 * 512,
        output_tokens: 4,
        blocks: (0..8).collect(),
        session: 0,
        model: "".into(),
        tenant: "".into(),
        max_tokens: None,
    }];
    let trace = Trace { requests };
    let options = Options { workers: vec![Role::Prefill, Role::Decode], ..options(1) };
    for (running, helper) in [(0, None), (1, Some(0))] {
        let mut simulation = Simulation::new(&trace, &options, &PolicyUnderTest::Policy(Policy::Kv), 1.0, 0).unwrap();
        let decodes = |simulation: &Simulation<'_>| simulation.workers[1].engine.load(&options.profile);
        while decodes(&simulation).waiting + decodes(&simulation).running == 0 {
            let (now, event) = simulation.next_event().unwrap();
            if let (0, Event::StepEnd(0, _)) = (running, event) {
                // The decode worker is busy and admits nothing.
                simulation.workers[1].is_busy = true;
            }
            simulation.advance(now, event);
        }
        assert_eq!(decodes(&simulation).running, running);
        simulation.effects.dropped.push(0);
        let now = simulation.records[0].arrived_ns + 1_000_000_000;
        simulation.publish_effects(now, 0);
        simulation.workers[1].is_busy = false;
        simulation.start_step(now, 1);
        simulation.run_events().unwrap();
        assert_eq!((simulation.records[0].prefill_worker, simulation.records[0].finished_ns > 0), (helper, true));
    }
}

#[test]
fn stalled_requests_end_the_run_with_an_error() {
    let (trace, options) =
        (Trace { requests: fixture().requests[..20].to_vec() }, Options { rebalance: true, ..options(2) });
    let mut simulation = Simulation::new(&trace, &options, &PolicyUnderTest::Policy(Policy::Kv), 9.0, 0).unwrap();
    // The request is on the worker, but no step is scheduled.
    let (_, request) = simulation.arrivals.pop().unwrap();
    simulation.workers[0].engine.accept(request, &trace.requests[request as usize], Stage::Whole, None);
    simulation.workers[0].is_busy = true;
    let stuck = simulation.run().err().unwrap().to_string();
    assert!(stuck.contains("is stuck"), "{stuck}");
}

#[test]
fn workers_retaining_each_others_prompts_do_not_deadlock() {
    // 20 blocks of 512 tokens; each request needs twelve.
    let profile = Profile {
        kv_cache_bytes: 20 * 512,
        kv_bytes_per_token: 1,
        host: None,
        shared: None,
        peer: Some(Link { bytes_per_second: 1e9, latency_s: 0.0 }),
        ..options(1).profile
    };
    let blocks = |first: u32| (first..first + 11).collect();
    let spec = |first| RequestSpec {
        arrival_ms: 0,
        input_tokens: 11 * 512,
        output_tokens: 1,
        blocks: blocks(first),
        session: 0,
        model: "".into(),
        tenant: "".into(),
        max_tokens: None,
    };
    let (requests, mut environment) =
        (vec![spec(0), spec(100)], Environment { store: None, send_link_free_ns: vec![0; 2] });
    let mut workers = [0; 2].map(|_| Engine::new(&profile, QueueOrder::Fcfs));
    let mut step = |worker: &mut Engine, now: u64| {
        let mut effects = Effects::default();
        match worker.schedule(now, &requests, &profile, &mut environment, &mut effects) {
            Schedule::RunUntil(end) => {
                worker.complete_steps(end, &requests, &mut None, &mut effects);
                (end, effects)
            }
            Schedule::WaitUntil(until) => (until, effects),
            Schedule::Idle => (now, effects),
        }
    };
    let mut now = 0;
    for (request, worker) in (0..).zip(&mut workers) {
        worker.accept(request, &requests[request as usize], Stage::Prefill, None);
        let mut handed = Vec::new();
        while handed.is_empty() {
            let (end, effects) = step(worker, now);
            (now, handed) = (end, effects.prefilled);
        }
        assert_eq!(handed, [request]);
    }
    // Each request decodes where the prompt of the other is retained.
    let [a, b] = &mut workers;
    a.accept(1, &requests[1], Stage::Decode, Some(1));
    b.accept(0, &requests[0], Stage::Decode, Some(0));
    let (_, effects) = step(a, now);
    assert_eq!((effects.dropped, effects.prefilled.len()), (vec![0], 0), "the retained prompt is dropped");
    b.recompute_prompt(0, &requests[0]);
    assert_eq!(b.load(&profile).waiting_tokens, 11 * 512, "and computed on its decode worker");
    let mut done = Vec::new();
    for worker in &mut workers {
        while done.is_empty() || worker.load(&profile).running + worker.load(&profile).waiting > 0 {
            let (end, effects) = step(worker, now);
            assert!(end > now || !effects.finished.is_empty(), "the worker is idle");
            now = end;
            done.extend(effects.finished);
        }
    }
    assert_eq!(done, [1, 0]);
}

#[test]
fn output_lengths_are_learned_by_model_and_tenant() {
    // Outputs have 100 tokens with one model, and 400 and 1,500 with the other, by tenant.
    let line = |nth: u64| {
        let (model, tenant, output) = [("a", "x", 100), ("b", "x", 400), ("b", "y", 1500)][nth as usize % 3];
        let spec = serde_json::json!({
            "timestamp": 500 * nth, "input_length": 512, "output_length": output, "hash_ids": [nth], "model": model,
            "tenant": tenant,
        });
        spec.to_string() + "\n"
    };
    let trace = Trace::read((0..300).map(line).collect::<String>().as_bytes()).unwrap();
    let options = options(2);
    let policy = PolicyUnderTest::Policy(Policy::Kv);
    let mut simulation = Simulation::new(&trace, &options, &policy, trace.rate(), 0).unwrap();
    simulation.run_events().unwrap();
    let expected = |spec: &RequestSpec| simulation.routers[0].expected_output(spec);
    for spec in &trace.requests[..3] {
        let (found, length) = (expected(spec), spec.output_tokens as f64);
        assert!((found / length - 1.0).abs() < 0.3, "{found} instead of {length}");
    }
    let limited = RequestSpec { max_tokens: Some(50), ..trace.requests[2].clone() };
    assert!(expected(&limited) <= 50.0, "{}", expected(&limited));
}
