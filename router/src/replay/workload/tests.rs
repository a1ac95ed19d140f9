use super::*;
use std::collections::{HashMap, HashSet};

fn mean(trace: &Trace, of: impl Fn(&RequestSpec) -> u64) -> f64 {
    trace.requests.iter().map(of).sum::<u64>() as f64 / trace.len() as f64
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    for workload in Workload::all() {
        let of = |seed| workload.generate(600, 20.0, seed);
        assert_eq!(of(1), of(1), "{workload}");
        assert_ne!(of(1), of(2), "{workload}");
        assert_eq!(of(1).len(), 600, "{workload}");
    }
}

#[test]
fn an_unknown_name_lists_the_classes() {
    let error = "chatt".parse::<Workload>().unwrap_err();
    let wanted = "expected one of agents, no-reuse, hot-prefix:LENGTH (like hot-prefix:32k), shifting-prefixes, \
                  decode-heavy, documents, chat, prefix-bursts";
    assert_eq!(error, wanted);
}

#[test]
fn a_high_rate_takes_the_first_requests_of_all_sessions() {
    // Hundreds of sessions began before the trace. Dropping their later requests early changes nothing: the trace of
    // few requests is the beginning of that of many.
    for workload in [Workload::Agents, Workload::Documents, Workload::Chat] {
        let of = |requests| workload.generate(requests, 60.0, 5).requests;
        let (few, many) = (of(20), of(4_000));
        let lengths = |requests: &[RequestSpec]| -> Vec<(u64, u64, u64)> {
            requests.iter().map(|it| (it.arrival_ms, it.input_tokens, it.output_tokens)).collect()
        };
        assert_eq!(lengths(&few), lengths(&many[..20]), "{workload}");
    }
}

#[test]
fn a_written_workload_is_read_back() {
    for workload in Workload::all() {
        let trace = workload.generate(300, 20.0, 3);
        let mut text = Vec::new();
        trace.write(&mut text).unwrap();
        assert_eq!(Trace::read(text.as_slice()).unwrap(), trace, "{workload}");
    }
}

#[test]
fn a_name_is_parsed_as_it_is_printed() {
    for workload in Workload::all().into_iter().chain([Workload::HotPrefix(1000)]) {
        assert_eq!(workload.to_string().parse(), Ok(workload));
    }
    let error = |name: &str| name.parse::<Workload>().unwrap_err();
    assert!(error("agent").contains("agents, no-reuse, hot-prefix:LENGTH"), "{}", error("agent"));
    for wrong in ["hot-prefix:", "hot-prefix:511", "hot-prefix:99999k", "hot-prefix:99999999999999999999k"] {
        assert!(error(wrong).contains("512 to 1024k"), "{wrong}");
    }
}

#[test]
fn requests_arrive_at_the_rate() {
    for workload in Workload::all() {
        let rate = workload.generate(8_000, 40.0, 0).rate();
        assert!((30.0..50.0).contains(&rate), "{workload}: {rate}");
    }
}

/// Share of prompt tokens that one unlimited cache would hold, and mean lengths.
#[test]
fn classes_share_what_their_names_say() {
    let of = |workload: Workload| {
        let trace = workload.generate(8_000, 20.0, 0);
        let [input, output] = [mean(&trace, |spec| spec.input_tokens), mean(&trace, |spec| spec.output_tokens)];
        (trace.hit_rate_bound(), input, output)
    };
    let check = |workload, hits: std::ops::Range<f64>, input: std::ops::Range<f64>, output: std::ops::Range<f64>| {
        let (bound, prompt, generated) = of(workload);
        let holds = hits.contains(&bound) && input.contains(&prompt) && output.contains(&generated);
        assert!(holds, "{workload}: hits {bound:.3}, {prompt:.0} prompt tokens, {generated:.0} output tokens");
    };
    check(Workload::Agents, 0.9..0.99, 35e3..55e3, 350.0..450.0);
    check(Workload::NoReuse, 0.0..1e-9, 1.8e3..2.3e3, 190.0..230.0);
    check(Workload::HotPrefix(32 << 10), 0.93..0.97, 31e3..33e3, 250.0..290.0);
    check(Workload::ShiftingPrefixes, 0.7..0.95, 7e3..12e3, 180.0..220.0);
    check(Workload::DecodeHeavy, 0.5..0.7, 2.9e3..3.3e3, 590.0..650.0);
    check(Workload::Documents, 0.8..0.95, 20e3..30e3, 70.0..90.0);
    check(Workload::Chat, 0.5..0.9, 3e3..10e3, 400.0..480.0);
    check(Workload::PrefixBursts, 0.9..0.95, 15e3..18e3, 250.0..290.0);
}

#[test]
fn hot_prefixes_change_half_way() {
    let trace = Workload::ShiftingPrefixes.generate(4_000, 20.0, 0);
    let popular = |requests: &[RequestSpec]| -> HashSet<u32> {
        let mut counts = HashMap::<u32, usize>::new();
        for spec in requests {
            *counts.entry(spec.blocks[0]).or_default() += 1;
        }
        counts.into_iter().filter(|(_, count)| *count > 10).map(|(block, _)| block).collect()
    };
    let [before, after] = [popular(&trace.requests[..2000]), popular(&trace.requests[2000..])];
    assert!(before.len() > 20 && after.len() > 20 && before.is_disjoint(&after), "{before:?} {after:?}");
}

#[test]
fn bursts_stay_bursts_at_any_rate() {
    for rate in [1.0, 100.0] {
        let arrivals = Workload::PrefixBursts.generate(1_200, rate, 0).arrivals(rate, 0);
        // Sixty requests within a tenth of a second.
        let bursts = arrivals.windows(60).filter(|window| window[59].0 - window[0].0 < 100_000_000).count();
        assert!(bursts >= 10, "{bursts} at {rate}/s");
    }
}
