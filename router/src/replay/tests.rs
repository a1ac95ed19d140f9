mod hot_prefixes;

use super::*;
use crate::policy::Policy;
use crate::replay::simulation::Simulation;
use crate::state::Settings;
use std::num::NonZero;
use std::time::Duration;
use worker::plane::Role;

const FIXTURE: &str = include_str!("../../tests/fixtures/conversation.jsonl");
const H100: &str = include_str!("../../../deploy/profiles/h100-8b.toml");
const KV: PolicyUnderTest = PolicyUnderTest::Policy(Policy::Kv);
const LEAST_LOADED: PolicyUnderTest = PolicyUnderTest::Policy(Policy::LeastLoaded);

pub(super) fn run_policy(trace: &Trace, options: &Options, policy: &PolicyUnderTest, rate: f64, runs: u64) -> Results {
    let (traffic, policies) = (Traffic::Recorded(trace.clone()), [policy.clone()]);
    let runs = Runs {
        traffic: &traffic,
        options,
        policies: &policies,
        rates: &[rate],
        seeds: 0..runs,
        threads: NonZero::<usize>::MIN,
        clairvoyant: false,
    };
    runs.replay(|_| {}).unwrap().remove(0)
}

pub(super) fn fixture() -> Trace {
    Trace::read(FIXTURE.as_bytes()).unwrap()
}

/// Each worker has memory for a tenth of the fixture, so that caches evict.
pub(super) fn options(workers: usize) -> Options {
    let profile: Profile = toml::from_str(H100).unwrap();
    profile.check().unwrap();
    let profile = Profile { kv_cache_bytes: 200 * profile.block_bytes(), ..profile };
    let slo = Slo { ttft: Duration::from_secs(2), itl: Duration::from_millis(100) };
    Options {
        profile,
        workers: vec![Role::Both; workers],
        replicas: 1,
        event_delay: Duration::from_millis(5),
        event_loss: 0.0,
        event_loss_until: 1.0,
        resync_delay: Duration::from_millis(50),
        slo,
        admission: AdmissionMode::Off,
        queue_order: QueueOrder::Fcfs,
        rebalance: false,
        settings: Settings::default(),
    }
}

pub(super) fn with_stores(mut options: Options) -> Options {
    let store = Store { capacity_bytes: 300 * options.profile.block_bytes(), bytes_per_second: 20e9, latency_s: 0.001 };
    options.profile.host = Some(store);
    options.profile.shared = Some(Store { capacity_bytes: 10 * store.capacity_bytes, bytes_per_second: 5e9, ..store });
    options
}

/// Each worker also has host memory for one and a half times the blocks of its device memory.
fn with_host(mut options: Options) -> Options {
    let capacity_bytes = 300 * options.profile.block_bytes();
    options.profile.host = Some(Store { capacity_bytes, bytes_per_second: 20e9, latency_s: 0.001 });
    options
}

fn line(timestamp: u64, input: u64, output: u64, blocks: &[u32]) -> String {
    let request = serde_json::json!({
        "timestamp": timestamp, "input_length": input, "output_length": output, "hash_ids": blocks,
    });
    request.to_string() + "\n"
}

/// One second per full block, and 1 ms per step.
fn one_second_per_block() -> Options {
    let profile = Profile {
        name: "hand".into(),
        origin: "made up".into(),
        step_base_s: 0.001,
        decode_sequence_s: 0.0,
        decode_context_token_s: 0.0,
        prefill_token_s: 1.0 / 512.0,
        prefill_attention_pair_s: 0.0,
        max_num_batched_tokens: 100_000,
        max_num_seqs: 8,
        kv_bytes_per_token: 1,
        kv_cache_bytes: 512 * 20,
        host: None,
        shared: None,
        peer: None,
    };
    Options { profile, event_delay: Duration::ZERO, ..options(1) }
}

#[test]
fn results_depend_only_on_the_seed() {
    let (trace, options) = (fixture(), Options { event_loss: 0.1, ..with_stores(options(4)) });
    for policy in PolicyUnderTest::all() {
        let run = || serde_json::to_string(&run_policy(&trace, &options, &policy, 8.0, 2)).unwrap();
        assert_eq!(run(), run(), "{}", policy.name());
    }
    let of_seed =
        |seed| Simulation::new(&trace, &options, &KV, 8.0, seed).unwrap().run().unwrap().results(8.0, options.slo);
    assert_ne!(of_seed(0), of_seed(1));
}

#[test]
fn every_request_ends_and_hits_stay_below_the_bound() {
    let trace = fixture();
    for options in [options(3), with_stores(options(3)), Options { event_loss: 0.2, ..with_stores(options(3)) }] {
        for policy in PolicyUnderTest::all() {
            let results = run_policy(&trace, &options, &policy, 20.0, 1);
            assert_eq!((results.completed, results.rejected), (trace.len() as u64, 0), "{}", policy.name());
            assert!(results.hit_rate <= trace.hit_rate_bound() + 1e-9, "{} hits {}", policy.name(), results.hit_rate);
            assert!(results.imbalance >= 1.0 && results.ttft_p50_s <= results.ttft_p99_s);
        }
    }
}

#[test]
fn session_policy_keeps_a_conversation_on_its_worker() {
    // Forty conversations with the same first block, three turns each, one turn per minute.
    let turn = |at: u32| [vec![1], (0..=at / 40).map(|turn| 100 * (at % 40) + 10 + turn).collect()].concat();
    let text: String = (0..120).map(|at| (at, turn(at))).fold(String::new(), |text, (at, blocks)| {
        text + &line(60_000 * u64::from(at), 512 * blocks.len() as u64, 1, &blocks)
    });
    let trace = Trace::read(text.as_bytes()).unwrap();
    let options = Options { workers: vec![Role::Both; 4], ..one_second_per_block() };
    let workers = |policy| {
        let outcome = Simulation::new(&trace, &options, &PolicyUnderTest::Policy(policy), trace.rate(), 0)
            .unwrap()
            .run()
            .unwrap();
        outcome.requests.iter().map(|served| served.worker).collect::<Vec<_>>()
    };
    let by_session = workers(Policy::Session);
    assert!(by_session[..40] == by_session[40..80] && by_session[..40] == by_session[80..], "{by_session:?}");
    assert!((0..4).all(|worker| by_session.contains(&worker)), "a common prefix is not a session: {by_session:?}");
    let at_random = workers(Policy::Random);
    assert_ne!(at_random[..40], at_random[40..80]);
}

#[test]
fn times_of_three_requests_match_a_calculation() {
    // Two blocks; an hour later the same with one more; then one block while the second request is computed.
    let text = line(0, 1024, 3, &[1, 2]) + &line(3_600_000, 1536, 1, &[1, 2, 3]) + &line(3_600_001, 512, 1, &[4]);
    let trace = Trace::read(text.as_bytes()).unwrap();
    let options = one_second_per_block();
    // At the recorded rate times are exact, except that arrivals within the interval of the first two are spread.
    let outcome = Simulation::new(&trace, &options, &KV, trace.rate(), 0).unwrap().run().unwrap();
    let ttft: Vec<f64> = outcome.requests.iter().map(|s| (s.first_token_ns - s.arrived_ns) as f64 / 1e9).collect();
    assert!((ttft[0] - 2.001).abs() < 1e-6, "two blocks and a step: {ttft:?}");
    assert!((ttft[1] - 1.001).abs() < 1e-6, "one of three is new: {ttft:?}");
    let queued = outcome.requests[1].first_token_ns - outcome.requests[2].arrived_ns;
    assert!((ttft[2] - queued as f64 / 1e9 - 1.001).abs() < 1e-6, "then its own: {ttft:?}");
    assert_eq!(outcome.requests.iter().map(|s| s.hits).collect::<Vec<_>>(), [0, 2, 0]);
    let decoded = outcome.requests[0].finished_ns - outcome.requests[0].first_token_ns;
    assert_eq!(decoded, 2_000_000, "two more tokens, a step each");
}

fn always_disaggregated() -> Settings {
    Settings { disaggregation: crate::policy::Disaggregation::Always, ..Settings::default() }
}

#[test]
fn times_of_a_remote_prefill_match_a_calculation() {
    // Four blocks, of which the first two are cached; then a request without a full block to transfer.
    let text = line(0, 1024, 2, &[1, 2]) + &line(3_600_000, 2048, 1, &[1, 2, 3, 4]) + &line(7_200_000, 512, 1, &[9]);
    let trace = Trace::read(text.as_bytes()).unwrap();
    let mut options = Options { workers: vec![Role::Prefill, Role::Decode], ..one_second_per_block() };
    options.profile.peer = Some(Link { bytes_per_second: 102_400.0, latency_s: 0.01 });
    let policy = PolicyUnderTest::Settings("always".into(), Box::new(always_disaggregated()));
    let served = Simulation::new(&trace, &options, &policy, trace.rate(), 0).unwrap().run().unwrap().requests;
    let ttft = |nth: usize| (served[nth].first_token_ns - served[nth].arrived_ns) as f64 / 1e9;
    // Two blocks and a step; two blocks over the link; the last token and a step.
    let whole = 2.001 + (0.01 + 0.01) + (1.0 / 512.0 + 0.001);
    assert!((ttft(0) - whole).abs() < 1e-6 && (ttft(1) - whole).abs() < 1e-6, "{served:?}");
    assert!((ttft(2) - 1.001).abs() < 1e-6, "{served:?}");
    let parts: Vec<_> = served.iter().map(|served| (served.prefill_worker, served.worker, served.hits)).collect();
    assert_eq!(parts, [(Some(0), 1, 0), (Some(0), 1, 2), (None, 1, 0)]);
}

#[test]
fn transfers_share_the_links_of_both_workers() {
    // The second and the third prompt are computed together while the first is transferred.
    let text = line(0, 1024, 1, &[0, 1]) + &line(1, 1024, 1, &[2, 3]) + &line(2, 1024, 1, &[4, 5]);
    let trace = Trace::read(text.as_bytes()).unwrap();
    let always = always_disaggregated();
    let ready = |decodes: usize| {
        let workers = [vec![Role::Prefill], vec![Role::Decode; decodes]].concat();
        let mut options = Options { workers, ..one_second_per_block() };
        options.profile.peer = Some(Link { bytes_per_second: 10_240.0, latency_s: 0.01 });
        let policy = PolicyUnderTest::Settings("always".into(), Box::new(always.clone()));
        let served = Simulation::new(&trace, &options, &policy, trace.rate(), 0).unwrap().run().unwrap().requests;
        assert_eq!(served.iter().map(|it| it.prefill_worker).collect::<Vec<_>>(), [Some(0); 3]);
        let apart = served[2].first_token_ns.abs_diff(served[1].first_token_ns) as f64 / 1e9;
        // Two blocks, and the latency.
        assert!((apart - 0.11).abs() < 1e-6, "{served:?}");
        served[1].worker == served[2].worker
    };
    assert!(ready(1), "one transfer at a time to a worker");
    assert!(!ready(2), "one transfer at a time from a worker");
}

#[test]
fn request_too_long_for_every_worker_is_rejected() {
    let text = line(0, 512 * 21, 1, &(0..21).collect::<Vec<u32>>()) + &line(1, 512, 1, &[0]);
    let results = run_policy(&Trace::read(text.as_bytes()).unwrap(), &one_second_per_block(), &KV, 1.0, 1);
    assert_eq!((results.completed, results.rejected), (1, 1));
}

#[test]
fn kv_beats_least_loaded_and_random_on_hits_and_ttft() {
    let (trace, options) = (fixture(), options(4));
    for rate in [6.0, 12.0, 20.0] {
        let [kv, least_loaded, random] = [KV, LEAST_LOADED, PolicyUnderTest::Policy(Policy::Random)]
            .map(|policy| run_policy(&trace, &options, &policy, rate, 3));
        assert!(kv.hit_rate > least_loaded.hit_rate && kv.hit_rate > random.hit_rate, "{kv:?} {least_loaded:?}");
        assert!(kv.ttft_mean_s < least_loaded.ttft_mean_s, "at {rate}/s: {kv:?} {least_loaded:?}");
        assert!(least_loaded.ttft_mean_s < random.ttft_mean_s, "at {rate}/s: {least_loaded:?} {random:?}");
    }
}

#[test]
fn at_saturation_cache_aware_routing_does_not_lose_to_load() {
    let (trace, options) = (fixture(), options(4));
    let full = capacity(&Traffic::Recorded(trace.clone()), &options, |_, _| {}).unwrap();
    for load in [1.0, 1.2, 1.5] {
        let [kv, least_loaded] =
            [&KV, &LEAST_LOADED].map(|policy| run_policy(&trace, &options, policy, full * load, 3));
        assert!(
            kv.ttft_p99_s <= least_loaded.ttft_p99_s * 1.02 && kv.ttft_mean_s < least_loaded.ttft_mean_s,
            "at {load}: {kv:?} {least_loaded:?}",
        );
    }
}

#[test]
fn lost_events_cost_few_hits_and_stores_add_hits() {
    let (trace, exact) = (fixture(), options(4));
    let hit_rate = |options: &Options| run_policy(&trace, options, &KV, 12.0, 3).hit_rate;
    let lossy = hit_rate(&Options { event_loss: 0.1, ..exact.clone() });
    let all = hit_rate(&exact);
    assert!(lossy > all - 0.02, "{lossy} of {all}");
    assert!(hit_rate(&with_stores(exact)) > all + 0.02);
}

/// Hit rates of the requests in the half with lost events, and in the last quarter.
fn lossy(event_loss: f64, resync_delay: Duration) -> [f64; 2] {
    let (trace, runs) = (fixture(), 8);
    let options = Options { event_loss, event_loss_until: 0.5, resync_delay, ..options(4) };
    let mut sums = [(0, 0); 2];
    for seed in 0..runs {
        let served = Simulation::new(&trace, &options, &KV, 12.0, seed).unwrap().run().unwrap().requests;
        let half = served.len() / 2;
        for (sum, part) in sums.iter_mut().zip([&served[..half], &served[half * 3 / 2..]]) {
            sum.0 += part.iter().map(|served| served.hits).sum::<u64>();
            sum.1 += part.iter().map(|served| served.blocks).sum::<u64>();
        }
    }
    sums.map(|(hits, blocks)| hits as f64 / blocks as f64)
}

#[test]
fn hit_rate_recovers_from_lost_events_by_resync() {
    let sound = lossy(0.0, Duration::ZERO);
    let [slow, never] = [2, 1_000_000].map(|seconds| lossy(0.1, Duration::from_secs(seconds)));
    let less = |rates: [f64; 2]| [sound[0] - rates[0], sound[1] - rates[1]];
    assert!((0.002..0.02).contains(&less(slow)[0]) && less(slow)[1] < 0.01, "{slow:?} of {sound:?}");
    assert!(
        less(never)[0] > 0.02 && less(never)[1] > 0.01,
        "without resync the hit rate must stay low: {never:?} of {sound:?}"
    );
}

#[test]

fn eight_routers_have_nearly_the_hit_rate_and_wait_of_one() {
    let trace = fixture();
    let of = |replicas| run_policy(&trace, &Options { replicas, ..options(8) }, &KV, 24.0, 3);
    let (one, eight) = (of(1), of(8));
    assert!(eight.hit_rate >= 0.95 * one.hit_rate, "{} of {}", eight.hit_rate, one.hit_rate);
    assert!(eight.ttft_mean_s <= 1.1 * one.ttft_mean_s, "{} instead of {}", eight.ttft_mean_s, one.ttft_mean_s);
}

#[test]
fn capacity_is_where_a_time_is_ten_times_that_of_an_idle_fleet() {
    let (trace, options) = (fixture(), options(2));
    let mut tried = Vec::new();
    let found =
        capacity(&Traffic::Recorded(trace.clone()), &options, |rate, service| tried.push((rate, service))).unwrap();
    let idle = tried[0].1;
    let saturated = |rate| {
        let results = run_policy(&trace, &options, &LEAST_LOADED, rate, 1);
        results.ttft_p99_s >= SATURATION_FACTOR * idle.ttft_p99_s
            || results.itl_p50_s > SATURATION_FACTOR * idle.itl_p50_s
    };
    assert!(!saturated(found) && saturated(found * 1.1), "{found} of {tried:?}");
}

#[test]
fn capacity_counts_rejected_requests_as_missed() {
    let (traffic, options) = (Traffic::Recorded(fixture()), options(4));
    let of = |admission| {
        let mut tried = Vec::new();
        let options = Options { admission, ..options.clone() };
        let found = capacity(&traffic, &options, |rate, service| tried.push((rate, service.ttft_p99_s))).unwrap();
        (found, tried.iter().any(|(_, p99)| p99.is_infinite()))
    };
    let (off, queue, deadline) = (of(AdmissionMode::Off), of(AdmissionMode::Queue), of(AdmissionMode::Deadline));
    // Without that rule the search ends at its upper bound, at several times the capacity.
    assert!(queue.0 < 1.5 * off.0 && deadline.0 < 1.5 * off.0, "{off:?} {queue:?} {deadline:?}");
    assert!(!off.1 && deadline.1, "{off:?} {deadline:?}");
}

#[test]
fn results_do_not_depend_on_the_number_of_threads() {
    let (traffic, options) = (Traffic::Generated { workload: Workload::Chat, requests: 200 }, options(4));
    let on = |threads| {
        let runs = Runs {
            traffic: &traffic,
            options: &options,
            policies: &[KV, LEAST_LOADED],
            rates: &[2.0, 8.0],
            seeds: 3..6,
            threads: NonZero::new(threads).unwrap(),
            clairvoyant: true,
        };
        runs.replay(|_| {}).unwrap()
    };
    let one = on(1);
    assert_eq!(one, on(5));
    let names: Vec<_> = one.iter().map(|results| (results.policy.as_str(), results.rate_rps as u32)).collect();
    let of = |rate| [("kv", rate), ("least-loaded", rate), (CLAIRVOYANT, rate)];
    assert_eq!(names, [of(2), of(8)].concat());
    assert!(one.iter().all(|results| results.completed == 600));
    for of_rate in one.chunks(3) {
        let best = &of_rate[2];
        let is_best = |it: &Results| {
            best.ttft_mean_s <= it.ttft_mean_s
                && best.ttft_p99_s <= it.ttft_p99_s
                && best.slo_attainment >= it.slo_attainment
        };
        assert!(of_rate.iter().all(is_best), "{of_rate:?}");
    }
}

#[test]
fn report_has_charts_with_a_line_per_policy_and_a_table() {
    let results: Vec<Results> = [("kv", 1.0), ("a<b", 1.0), ("kv", 2.0)]
        .map(|(name, rate)| Results {
            policy: name.into(),
            rate_rps: rate,
            goodput_rps: rate / 2.0,
            ..Results::default()
        })
        .into();
    let page = html_report(&results, "two & three");
    // Five charts with two policies, of which the first has two points.
    assert_eq!((page.matches("<svg").count(), page.matches("<polyline").count()), (5, 10));
    assert_eq!((page.matches("<circle").count(), page.matches("<tr>").count()), (15, 4));
    for text in ["requests offered per second", "two &amp; three", "a&lt;b", ">kv<", "<td>1.00</td>"] {
        assert!(page.contains(text), "{text}");
    }
    assert!(!page.contains("NaN") && !page.contains("inf"));
    let chart = page.split("<svg").nth(1).unwrap();
    assert!(chart.rfind(">kv<") > chart.rfind(">a&lt;b<"), "no line covers that of kv");
}

#[test]
fn admission_rejects_late_requests_only_under_overload() {
    let trace = fixture();
    let at = |admission, rate| run_policy(&trace, &Options { admission, ..options(4) }, &KV, rate, 1);
    assert_eq!(at(AdmissionMode::Queue, 1.0), at(AdmissionMode::Off, 1.0));
    assert_eq!(at(AdmissionMode::Deadline, 1.0).rejected, 0);
    // Far above the capacity of four workers.
    let [off, queue, deadline] =
        [AdmissionMode::Off, AdmissionMode::Queue, AdmissionMode::Deadline].map(|how| at(how, 100.0));
    assert_eq!(off.completed, trace.len() as u64);
    assert_eq!(queue.completed + queue.rejected, trace.len() as u64);
    assert_eq!(deadline.completed + deadline.rejected, trace.len() as u64);
    // Without admission the router keeps long prompts apart from short ones, so nearly as many of these are in time.
    assert!(deadline.rejected > 0 && deadline.goodput_rps > 0.9 * off.goodput_rps, "{deadline:?} {off:?}");
    // The deadline is two seconds. How much decoding slows prefill is not known beforehand.
    assert!(deadline.ttft_p99_s < 4.0 && off.ttft_p99_s > 8.0, "{} {}", deadline.ttft_p99_s, off.ttft_p99_s);
}

#[test]
fn k_lpm_takes_the_longest_prefix_between_the_oldest_requests() {
    // One step per request, and all of them wait for the first one, of which three share the prefix.
    let own = |nth: u32| line(u64::from(nth), 1024, 1, &[100 + nth, 200 + nth]);
    let shared = |nth: u32| line(u64::from(nth), 1024, 1, &[1, 300 + nth]);
    let text = shared(0) + &own(1) + &own(2) + &shared(3) + &shared(4);
    let trace = Trace::read(text.as_bytes()).unwrap();
    let order = |queue_order| {
        let mut options = Options { queue_order, ..one_second_per_block() };
        options.profile.max_num_seqs = 1;
        let served = Simulation::new(&trace, &options, &KV, trace.rate(), 0).unwrap().run().unwrap().requests;
        let mut order: Vec<usize> = (0..5).collect();
        order.sort_by_key(|nth| served[*nth].first_token_ns);
        order
    };
    assert_eq!(order(QueueOrder::Fcfs), [0, 1, 2, 3, 4]);
    assert_eq!(order(QueueOrder::KLpm(NonZero::new(2).unwrap())), [0, 3, 1, 4, 2]);
    assert_eq!(order(QueueOrder::KLpm(NonZero::new(4).unwrap())), [0, 3, 4, 1, 2]);
}

#[test]
fn overload_with_a_target_keeps_more_requests_in_time() {
    let trace = fixture();
    let at = |settings: &str| {
        let settings = toml::from_str(settings).unwrap();
        // The share in time of one seed varies by a tenth: 200 requests arrive in two seconds.
        run_policy(&trace, &Options { admission: AdmissionMode::Queue, settings, ..options(4) }, &KV, 100.0, 6)
    };
    let (without, with) = (at(""), at("[slo]\nttft = '2s'"));
    assert!(with.slo_attainment > 1.1 * without.slo_attainment, "{with:?} {without:?}");
    assert_eq!(with.rejected, 0, "late requests are served, too");
    let rejecting = at("[slo]\nttft = '2s'\n[admission]\nlate_requests = 'reject'");
    // About as many are in time; late ones are refused instead of served.
    assert!(rejecting.rejected > 0 && rejecting.slo_attainment > 0.95 * with.slo_attainment, "{rejecting:?} {with:?}");
}

#[test]
fn several_routers_with_admission_are_deterministic() {
    let trace = fixture();
    let options = Options { admission: AdmissionMode::Deadline, replicas: 3, ..with_stores(options(4)) };
    let run = || run_policy(&trace, &options, &KV, 20.0, 1);
    assert_eq!(run(), run());
    assert_eq!(run().completed + run().rejected, trace.len() as u64);
}

#[test]
fn settings_apply_to_our_policies_and_not_to_baselines() {
    let (trace, default) = (fixture(), options(4));
    let text = "decode_interference_weight = 50";
    let settings = toml::from_str(text).unwrap();
    let tuned = Options { settings, ..default.clone() };
    for policy in PolicyUnderTest::all() {
        let [before, after] = [&default, &tuned].map(|options| run_policy(&trace, options, &policy, 20.0, 1));
        let blind =
            PolicyUnderTest::Policy(Policy::RoundRobin) == policy || PolicyUnderTest::Policy(Policy::Random) == policy;
        let weighs = matches!(policy, PolicyUnderTest::Policy(_)) && !blind;
        assert_eq!(before != after, weighs, "{}", policy.name());
    }
    let traffic = Traffic::Recorded(trace.clone());
    let tried = |options: &Options| capacity(&traffic, options, |_, _| {}).unwrap().to_bits();
    assert_eq!(tried(&tuned), tried(&default), "capacity does not depend on settings");
}

#[test]
fn per_model_settings_and_admission_limits_apply() {
    let of = |model: &str| {
        let text = FIXTURE.replace("\"timestamp\"", &format!("\"model\": \"{model}\", \"timestamp\""));
        Trace::read(text.as_bytes()).unwrap()
    };
    let (small, big) = (of("small"), of("big"));
    let text = "[models.small]\ndecode_interference_weight = 50\npolicy = 'random'";
    let tuned = Options { settings: toml::from_str(text).unwrap(), ..options(4) };
    let run = |trace: &Trace, options: &Options| run_policy(trace, options, &KV, 20.0, 1);
    assert_eq!(run(&big, &tuned), run(&fixture(), &options(4)));
    let alone = Settings { decode_interference_weight: 50.0, ..Settings::default() };
    assert_eq!(run(&small, &tuned), run(&big, &Options { settings: alone, ..options(4) }));
    let as_configured = PolicyUnderTest::Settings("as configured".into(), Box::new(tuned.settings.clone()));
    assert_ne!(
        Results { policy: "kv".into(), ..run_policy(&small, &tuned, &as_configured, 20.0, 1) },
        run(&small, &tuned)
    );

    let settings = toml::from_str("[admission]\nmax_queue_time = '1s'").unwrap();
    let queue = Options { admission: AdmissionMode::Queue, ..options(4) };
    let rejected = |options: &Options| run_policy(&big, options, &KV, 100.0, 1).rejected;
    assert!(rejected(&Options { settings, ..queue.clone() }) > rejected(&queue));
}
