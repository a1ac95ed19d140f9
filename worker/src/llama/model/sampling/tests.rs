use super::*;
use proptest::prelude::*;

fn sampler(sampling: &Sampling) -> Sampler {
    Sampler::new(sampling, 1, &[])
}

fn choose(sampler: &mut Sampler, logits: &[f32], position: usize) -> u32 {
    sampler.next(&mut logits.to_vec(), position, &[]).0
}

/// How often each token is chosen in `draws` positions.
fn counts(sampling: &Sampling, logits: &[f32], draws: usize) -> Vec<usize> {
    let mut sampler = Sampler::new(sampling, 42, &[]);
    let mut counts = vec![0; logits.len()];
    (0..draws).for_each(|position| counts[choose(&mut sampler, logits, position) as usize] += 1);
    counts
}

/// Logits of these probabilities.
fn logits_of(probabilities: &[f32]) -> Vec<f32> {
    probabilities.iter().map(|p| p.ln()).collect()
}

#[test]
fn greedy_takes_the_likeliest_or_the_lowest_id() {
    let mut greedy = sampler(&Sampling { temperature: 0.0, ..Sampling::default() });
    assert_eq!(choose(&mut greedy, &[0.0, 3.0, 3.0, -1.0], 0), 1);
}

#[test]
fn logits_that_are_not_finite_are_found_anywhere() {
    let logits: Vec<f32> = (0..1000).map(|i| i as f32 - 500.0).chain([f32::MAX, f32::MIN, 0.0]).collect();
    assert!(are_finite(&logits) && are_finite(&[]));
    for value in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
        for at in [0, 17, 500, 1002] {
            let mut broken = logits.clone();
            broken[at] = value;
            assert!(!are_finite(&broken), "{value} at {at}");
        }
    }
}

#[test]
fn a_draw_is_a_function_of_seed_and_position() {
    let logits: Vec<f32> = (0..500).map(|i| (i % 17) as f32 * 0.1).collect();
    let run = |seed, request: Option<u64>| {
        let sampling = Sampling { seed: request, ..Sampling::default() };
        let mut sampler = Sampler::new(&sampling, seed, &[]);
        (0..50).map(|position| choose(&mut sampler, &logits, position)).collect::<Vec<_>>()
    };
    assert_eq!(run(7, None), run(7, None));
    assert_eq!(run(7, Some(1)), run(8, Some(1)), "the request's seed decides");
    assert_ne!(run(7, None), run(8, None));
    let mut late = sampler(&Sampling::default());
    let mut early = sampler(&Sampling::default());
    choose(&mut early, &logits, 3);
    assert_eq!(choose(&mut early, &logits, 9), choose(&mut late, &logits, 9), "what came before does not matter");
}

#[test]
fn draws_follow_the_distribution_and_the_temperature() {
    let logits = logits_of(&[0.5, 0.3, 0.15, 0.05]);
    let plain = counts(&Sampling::default(), &logits, 20_000);
    for (count, p) in plain.iter().zip([0.5, 0.3, 0.15, 0.05]) {
        assert!((*count as f64 / 20_000.0 - p).abs() < 0.015, "{plain:?}");
    }
    // At temperature 1/2 probabilities are squared, then normed.
    let cold = counts(&Sampling { temperature: 0.5, ..Sampling::default() }, &logits, 20_000);
    assert!((cold[0] as f64 / 20_000.0 - 0.25 / 0.365).abs() < 0.015, "{cold:?}");
}

#[test]
fn top_k_keeps_the_k_likeliest() {
    let logits = logits_of(&[0.1, 0.3, 0.2, 0.3, 0.1]);
    let counts = counts(&Sampling { top_k: Some(3), ..Sampling::default() }, &logits, 2_000);
    assert!(counts.iter().map(|c| *c > 0).eq([false, true, true, true, false]), "{counts:?}");
}

#[test]
fn top_p_keeps_the_smallest_set_that_has_the_mass() {
    let logits = logits_of(&[0.05, 0.5, 0.15, 0.3]);
    let kept = |top_p| {
        let counts = counts(&Sampling { top_p, ..Sampling::default() }, &logits, 2_000);
        (0..4).filter(|i| counts[*i] > 0).collect::<Vec<_>>()
    };
    assert_eq!(kept(0.79), [1, 3]);
    assert_eq!(kept(0.81), [1, 2, 3]);
    assert_eq!(kept(0.0), [1], "one is always left");
    assert_eq!(kept(1.0), [0, 1, 2, 3]);
}

#[test]
fn min_p_is_relative_to_the_likeliest_token() {
    let logits = logits_of(&[0.4, 0.21, 0.19, 0.2]);
    let counts = counts(&Sampling { min_p: 0.49, ..Sampling::default() }, &logits, 2_000);
    assert!(counts.iter().map(|c| *c > 0).eq([true, true, false, true]), "{counts:?}");
}

#[test]
fn top_p_counts_what_top_k_left() {
    // Of the three likeliest, the first two have 0.8 of the mass.
    let logits = logits_of(&[0.25, 0.15, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]);
    let counts = counts(&Sampling { top_k: Some(3), top_p: 0.75, ..Sampling::default() }, &logits, 2_000);
    assert_eq!(counts.iter().filter(|c| **c > 0).count(), 2, "{counts:?}");
}

#[test]
fn frequency_counts_each_time_and_presence_once() {
    let greedy = Sampling { temperature: 0.0, ..Sampling::default() };
    let tokens = |sampling| {
        let mut sampler = sampler(&sampling);
        (0..6).map(|position| choose(&mut sampler, &[1.0, 0.7, 0.0], position)).collect::<Vec<_>>()
    };
    // 1.0 0.7 → 0.6 0.7 → 0.6 0.3 → 0.2 0.3 → 0.2 -0.1 → -0.2 -0.1 (and 0.0)
    assert_eq!(tokens(Sampling { frequency_penalty: 0.4, ..greedy.clone() }), [0, 1, 0, 1, 0, 2]);
    // Each of the first two loses 0.4 once; then the first is ahead for ever.
    assert_eq!(tokens(Sampling { presence_penalty: 0.4, ..greedy }), [0, 1, 0, 0, 0, 0]);
}

#[test]
fn repetition_counts_the_prompt_and_pushes_towards_unlikely() {
    let sampling = Sampling { temperature: 0.0, repetition_penalty: 2.0, ..Sampling::default() };
    let mut sampler = Sampler::new(&sampling, 1, &[0, 9]);
    let mut logits = [3.0, 2.0, -1.0];
    assert_eq!(sampler.next(&mut logits, 0, &[]).0, 1, "3 / 2 < 2");
    assert_eq!(sampler.next(&mut [-1.0, -1.5, -1.9], 1, &[]).0, 2, "negative logits are multiplied");
}

#[test]
fn bias_and_bans_do_not_change_logprobs() {
    let sampling = Sampling {
        temperature: 0.0,
        logit_bias: vec![(2, 100.0), (1, -100.0), (77, 5.0)],
        logprobs: Some(2),
        ..Sampling::default()
    };
    let mut sampler = sampler(&sampling);
    let (token, logprobs) = sampler.next(&mut logits_of(&[0.3, 0.5, 0.2]), 0, &[]);
    let logprobs = logprobs.unwrap();
    assert_eq!(token, 2);
    assert!((logprobs.chosen - 0.2f32.ln()).abs() < 1e-5);
    assert_eq!(logprobs.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), [1, 0]);
    assert!((logprobs.top[0].1 - 0.5f32.ln()).abs() < 1e-5);
    assert_eq!(sampler.next(&mut logits_of(&[0.3, 0.5, 0.2]), 1, &[2, 99]).0, 0);
    assert_eq!(
        sampler.next(&mut logits_of(&[0.3, 0.5, 0.2]), 2, &[0, 1, 2]).0,
        0,
        "all banned: a token is still chosen"
    );
}

#[test]
fn no_alternatives_are_reported_unless_requested() {
    let mut with = sampler(&Sampling { logprobs: Some(0), ..Sampling::default() });
    assert!(with.next(&mut [0.0, 0.0], 0, &[]).1.unwrap().top.is_empty());
    assert!(sampler(&Sampling::default()).next(&mut [0.0, 0.0], 0, &[]).1.is_none());
}

/// What may be chosen, by sorting everything.
fn reference(logits: &[f32], sampling: &Sampling) -> Vec<u32> {
    let best = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let mut all: Vec<(f32, u32)> =
        logits.iter().zip(0..).map(|(x, id)| (exp((x - best) / sampling.temperature), id)).collect();
    all.retain(|(weight, _)| *weight >= sampling.min_p && *weight > 0.0);
    all.sort_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
    all.truncate(sampling.top_k.map_or(usize::MAX, |k| k as usize));
    let total: f64 = all.iter().map(|(weight, _)| f64::from(*weight)).sum();
    let mut mass = 0.0;
    let mut kept = vec![];
    for (weight, id) in all {
        kept.push(id);
        mass += f64::from(weight);
        // A hair of slack: the order of summation differs.
        if mass >= f64::from(sampling.top_p) * total * (1.0 + 1e-9) {
            break;
        }
    }
    kept
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    /// Partial selection keeps what sorting everything would keep, and every choice is among it.
    #[test]
    fn a_choice_survives_every_cut(
        logits in prop::collection::vec(-8f32..8.0, 1..3000),
        top_k in prop::option::of(1u32..400),
        top_p in 0.0f32..=1.0,
        min_p in 0.0f32..0.2,
        temperature in 0.2f32..2.0,
        seed in any::<u64>(),
    ) {
        let sampling = Sampling { temperature, top_p, top_k, min_p, ..Sampling::default() };
        let allowed = reference(&logits, &sampling);
        let mut sampler = Sampler::new(&sampling, seed, &[]);
        for position in 0..8 {
            let token = choose(&mut sampler, &logits, position);
            prop_assert!(allowed.contains(&token), "{} of {} allowed", token, allowed.len());
        }
    }

    #[test]
    fn alternatives_are_the_likeliest_in_order(logits in prop::collection::vec(-4i8..4, 1..300), n in 0u8..20) {
        let logits: Vec<f32> = logits.into_iter().map(f32::from).collect();
        let got = logprobs(&logits, 0, n);
        let mut want: Vec<u32> = (0..logits.len() as u32).collect();
        want.sort_by(|a, b| logits[*b as usize].total_cmp(&logits[*a as usize]).then(a.cmp(b)));
        want.truncate(n as usize);
        prop_assert_eq!(got.top.iter().map(|(id, _)| *id).collect::<Vec<_>>(), want);
        let all = logprobs(&logits, 0, 255);
        if logits.len() <= 255 {
            let mass: f32 = all.top.iter().map(|(_, p)| p.exp()).sum();
            prop_assert!((mass - 1.0).abs() < 1e-4);
        }
    }
}
