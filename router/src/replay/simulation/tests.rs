use super::*;
use crate::policy::Policy;
use crate::replay::tests::{fixture, options, replay, with_stores};
use crate::replay::{Chooser, Link, Preset};
use proptest::prelude::*;
use std::time::Duration;

proptest! {
    #![proptest_config(ProptestConfig { cases: 48, ..ProptestConfig::default() })]

    /// Whoever prefills, decodes, or does both, and however slowly blocks are handed over: every request gets all of its tokens, and
    /// nothing is left of it on a worker or in a router's books.
    #[test]
    fn a_hand_over_costs_no_request_and_leaves_nothing_behind(
        (prefill, decode, both) in (1..4_usize, 0..4_usize, 0..3_usize),
        (replicas, lag_ms) in (1..3_usize, 0..20_u64),
        (stores, flip, door, memory) in (any::<bool>(), any::<bool>(), 0..3_usize, 60..300_u64),
        (speed, rate) in (1e9..50e9, 2.0..60.0),
        chooser in prop::sample::select(Chooser::all()),
        seed in any::<u64>(),
    ) {
        let trace = Trace { requests: fixture().requests[..150].to_vec() };
        let mut options = if stores { with_stores(options(1)) } else { options(1) };
        let [a, b, c] = [(Phase::Prefill, prefill), (Phase::Decode, decode), (Phase::Both, both)]
            .map(|(phase, count)| vec![phase; count]);
        options.workers = [a, b, c].concat();
        options.admission = [Admission::Off, Admission::Queue, Admission::Deadline][door];
        options.profile.peer = Some(Link { bytes_per_second: speed, latency_s: 0.001 });
        options.profile.kv_cache_bytes = memory * options.profile.block_bytes();
        let options = Options { replicas, flip, lag: Duration::from_millis(lag_ms), ..options };
        let mut simulation = Simulation::new(&trace, &options, &chooser, rate, seed);
        simulation.play().unwrap();

        prop_assert_eq!(simulation.open, 0);
        let (done, refused): (Vec<&Served>, Vec<&Served>) = simulation.served.iter().partition(|it| it.ended_ns > 0);
        let fits = trace.requests.iter().filter(|asked| Engine::fits(&options.profile, asked)).count();
        if options.admission == Admission::Off {
            prop_assert_eq!(done.len(), fits);
        }
        prop_assert!(refused.iter().all(|it| it.first_ns == 0 && it.helper.is_none()));
        for it in &done {
            prop_assert!(it.arrived_ns < it.first_ns && it.first_ns <= it.ended_ns && it.hits <= it.blocks, "{it:?}");
            prop_assert!(it.helper != Some(it.worker), "{it:?}");
        }
        // Each token but the first of an answer came a gap after another.
        let tokens: u64 = done.iter().map(|it| it.output - 1).sum();
        prop_assert_eq!(simulation.gaps.all, tokens);
        for worker in &simulation.workers {
            let load = worker.engine.load(&options.profile);
            prop_assert_eq!((load.running, load.waiting, load.waiting_tokens, load.active_blocks), (0, 0, 0, 0));
        }
        // What routers tell each other may still be under way.
        prop_assert!(replicas > 1 || simulation.routers[0].is_idle());
    }
}

/// Long prompts come in pairs, while others read.
fn bursts(workers: Vec<Phase>) -> crate::replay::Figures {
    let readers = (0..300).map(|nth| (nth * 50, 1_000, 300, 10_000 + nth as u32 * 100));
    let long = (0..10).map(|nth| (1_500 + nth / 2 * 3_000, 30_000, 20, 50_000 + nth as u32 * 100));
    let line = |(at, input, output, first): (u64, u64, u64, u32)| {
        let blocks: Vec<u32> = (first..).take(input.div_ceil(512) as usize).collect();
        let asked =
            serde_json::json!({ "timestamp": at, "input_length": input, "output_length": output, "hash_ids": blocks });
        asked.to_string() + "\n"
    };
    let text: String = readers.chain(long).map(line).collect();
    let trace = Trace::read(text.as_bytes()).unwrap();
    let mut options = options(1);
    options.profile.kv_cache_bytes *= 10;
    let options = Options { workers, ..options };
    replay(&trace, &options, &Chooser::Settings("latency", Box::new(Preset::Latency.settings())), trace.rate(), 3)
}

#[test]
fn who_reads_does_not_feel_long_prompts_that_others_compute() {
    let together = bursts(vec![Phase::Both; 4]);
    let apart = bursts([vec![Phase::Prefill; 2], vec![Phase::Decode; 2]].concat());
    assert_eq!((together.completed, apart.completed), (930, 930));
    assert_eq!(together.remote_prefills, None);
    assert!(apart.remote_prefills.is_some_and(|handed| handed >= 30), "the long ones at least: {apart:?}");
    assert!(apart.itl_p99_s < together.itl_p99_s / 2.0, "{apart:?} {together:?}");
}

#[test]
fn workers_change_sides_when_what_is_asked_does() {
    // Long prompts with hardly an answer to them, and one of four workers to compute them.
    let long = |nth: u64| {
        let blocks: Vec<u64> = (nth * 100..).take(32).collect();
        let (at, input) = (nth * 300, 32 * 512);
        serde_json::json!({ "timestamp": at, "input_length": input, "output_length": 8, "hash_ids": blocks })
            .to_string()
    };
    let text = (0..600).map(long).collect::<Vec<_>>().join("\n");
    let trace = Trace::read(text.as_bytes()).unwrap();
    let workers = [vec![Phase::Prefill], vec![Phase::Decode; 3]].concat();
    let of = |flip| {
        let options = Options { flip, workers: workers.clone(), ..options(1) };
        replay(&trace, &options, &Chooser::Policy(Policy::Kv), trace.rate(), 1)
    };
    let (stay, change) = (of(false), of(true));
    assert_eq!((stay.completed, change.completed, stay.role_changes), (600, 600, None));
    assert!(change.role_changes.is_some_and(|flips| (1..=4).contains(&flips)), "{change:?}");
    assert!(change.itl_p99_s < stay.itl_p99_s && change.remote_prefills > stay.remote_prefills, "{change:?} {stay:?}");
}

#[test]
fn a_prompt_that_is_lost_once_its_blocks_are_on_their_way_was_handed_over_all_the_same() {
    let requests =
        vec![Asked { at_ms: 0, input: 8 * 512, output: 4, blocks: (0..8).collect(), session: 0, model: "".into() }];
    let trace = Trace { requests };
    let options = Options { workers: vec![Phase::Prefill, Phase::Decode], ..options(1) };
    for (running, helper) in [(0, None), (1, Some(0))] {
        let mut simulation = Simulation::new(&trace, &options, &Chooser::Policy(Policy::Kv), 1.0, 0);
        let decodes = |simulation: &Simulation<'_>| simulation.workers[1].engine.load(&options.profile);
        while decodes(&simulation).waiting + decodes(&simulation).running == 0 {
            let (now, event) = simulation.next().unwrap();
            if let (0, Event::StepEnds(0, _)) = (running, event) {
                // Whoever decodes is busy, and takes nobody in.
                simulation.workers[1].occupied = true;
            }
            simulation.happen(now, event);
        }
        assert_eq!(decodes(&simulation).running, running);
        simulation.effects.lost.push(0);
        let now = simulation.served[0].arrived_ns + 1_000_000_000;
        simulation.tell(now, 0);
        simulation.workers[1].occupied = false;
        simulation.work(now, 1);
        simulation.play().unwrap();
        assert_eq!((simulation.served[0].helper, simulation.served[0].ended_ns > 0), (helper, true));
    }
}

#[test]
fn requests_that_all_stand_still_end_a_replay_with_a_sentence() {
    let (trace, options) =
        (Trace { requests: fixture().requests[..20].to_vec() }, Options { flip: true, ..options(2) });
    let mut simulation = Simulation::new(&trace, &options, &Chooser::Policy(Policy::Kv), 9.0, 0);
    // It comes, and nobody has it begin.
    let (_, request) = simulation.arrivals.pop().unwrap();
    simulation.workers[0].engine.accept(request, &trace.requests[request as usize], Stage::Whole, None);
    simulation.workers[0].occupied = true;
    let stuck = simulation.run().err().unwrap().to_string();
    assert!(stuck.contains("are stuck"), "{stuck}");
}

#[test]
fn two_workers_whose_memory_is_full_of_each_others_prompts_do_not_wait_for_ever() {
    // 20 blocks of 512 tokens, of which each request takes twelve.
    let profile = Profile {
        kv_cache_bytes: 20 * 512,
        kv_bytes_per_token: 1,
        host: None,
        shared: None,
        peer: Some(Link { bytes_per_second: 1e9, latency_s: 0.0 }),
        ..options(1).profile
    };
    let blocks = |first: u32| (first..first + 11).collect();
    let asked =
        |first| Asked { at_ms: 0, input: 11 * 512, output: 1, blocks: blocks(first), session: 0, model: "".into() };
    let (requests, mut around) = (vec![asked(0), asked(100)], Around { store: None, sends_ns: vec![0; 2] });
    let mut workers = [Engine::new(&profile), Engine::new(&profile)];
    let mut step = |worker: &mut Engine, now: u64| {
        let mut effects = Effects::default();
        match worker.turn(now, &requests, &profile, &mut around, &mut effects) {
            Turn::Step(end) => {
                worker.stepped(end, &requests, &mut None, &mut effects);
                (end, effects)
            }
            Turn::Wait(until) => (until, effects),
            Turn::Rest => (now, effects),
        }
    };
    let mut now = 0;
    for (request, worker) in (0..).zip(&mut workers) {
        worker.accept(request, &requests[request as usize], Stage::Prefill, None);
        let mut handed = Vec::new();
        while handed.is_empty() {
            let (end, effects) = step(worker, now);
            (now, handed) = (end, effects.handed);
        }
        assert_eq!(handed, [request]);
    }
    // Each goes on where the other is kept.
    let [a, b] = &mut workers;
    a.accept(1, &requests[1], Stage::Decode, Some(1));
    b.accept(0, &requests[0], Stage::Decode, Some(0));
    let (_, effects) = step(a, now);
    assert_eq!((effects.lost, effects.handed.len()), (vec![0], 0), "its prompt makes room");
    b.lost(0, &requests[0]);
    assert_eq!(b.load(&profile).waiting_tokens, 11 * 512, "and is computed where it decodes");
    let mut done = Vec::new();
    for worker in &mut workers {
        while done.is_empty() || worker.load(&profile).running + worker.load(&profile).waiting > 0 {
            let (end, effects) = step(worker, now);
            assert!(end > now || !effects.finished.is_empty(), "it rests");
            now = end;
            done.extend(effects.finished);
        }
    }
    assert_eq!(done, [1, 0]);
}
