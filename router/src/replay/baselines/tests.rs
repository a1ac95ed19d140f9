use super::*;

fn spec(blocks: &[u32]) -> RequestSpec {
    RequestSpec {
        arrival_ms: 0,
        input_tokens: blocks.len() as u64 * BLOCK_TOKENS,
        output_tokens: 1,
        blocks: blocks.to_vec(),
        session: 0,
        model: "".into(),
        tenant: "".into(),
        max_tokens: None,
    }
}

/// Two workers, of which the first has a random half of all ties.
fn two(peer: Peer) -> Baseline {
    Baseline::new(peer, 2, 0)
}

#[test]
fn dynamo_counts_a_block_in_use_once() {
    let mut baseline = two(Peer::Dynamo);
    let (two, four) = (spec(&[1, 2]), spec(&[1, 2, 3, 4]));
    let first = baseline.choose(0, &two, &[0, 0]);
    let other = 1 - first;
    let cached = |blocks| if first == 0 { [blocks, 0] } else { [0, blocks] };
    // There: 2 + 1 to prefill, 2 in use and 2 more; on the other: 4 to prefill and 4 in use.
    assert_eq!(baseline.choose(1, &four, &cached(3)), first);
    // There: 3 + 4 to prefill and 4 in use; on the other: 4 and 4.
    assert_eq!(baseline.choose(2, &four, &[0, 0]), other);
    for (request, worker, spec) in [(0, first, &two), (1, first, &four), (2, other, &four)] {
        baseline.started(worker, request);
        baseline.finished(worker, request, spec);
    }
    assert_eq!((baseline.requests.clone(), baseline.prefill_tokens.clone()), (vec![0; 2], vec![0; 2]));
    // Nothing is in use any more: 4 + 4 on both.
    let chosen: std::collections::HashSet<usize> = (10..30)
        .map(|request| {
            let worker = baseline.choose(request, &four, &[0, 0]);
            baseline.finished(worker, request, &four);
            worker
        })
        .collect();
    assert_eq!(chosen.len(), 2, "ties are random");
}

#[test]
fn vllm_router_follows_a_long_prefix_while_load_is_balanced() {
    let mut baseline = two(Peer::VllmRouter);
    let long = spec(&[1, 2, 3, 4]);
    for request in 0..=64 {
        assert_eq!(baseline.choose(request, &long, &[0, 0]), 0);
    }
    assert_eq!(baseline.choose(65, &long, &[0, 0]), 1, "65 requests more than the other");
    assert_eq!(baseline.choose(66, &spec(&[1, 7, 8, 9]), &[0, 0]), 1, "a quarter is not enough");
}

#[test]
fn smg_leaves_a_holder_that_is_overloaded() {
    let mut baseline = two(Peer::Smg);
    let long = spec(&[1, 2, 3, 4]);
    let chosen: Vec<usize> = (0..20).map(|request| baseline.choose(request, &long, &[4, 0])).collect();
    let sticky = chosen.iter().take_while(|worker| **worker == 0).count();
    // With n requests there and none elsewhere the mean is n/2; 9 exceed 4.5 and 4.5 + 2 √4.5, 8 do not exceed 4 + 4.
    assert_eq!(sticky, 9, "{chosen:?}");
    assert_eq!(chosen[9], 1, "{chosen:?}");
    // A full KV cache costs more than a queued prompt.
    let mut baseline = two(Peer::Smg);
    baseline.reported(0, Report { waiting: 0, kv_usage: 0.95 });
    assert!((0..2).all(|request| baseline.choose(request, &long, &[0, 0]) == 1));
}

#[test]
fn llm_d_adds_up_prefix_queue_and_memory() {
    let mut baseline = two(Peer::LlmD);
    let long = spec(&[1, 2, 3, 4]);
    assert_eq!(baseline.choose(0, &long, &[1, 0]), 0);
    // Half of the prefix is worth 1.5, the shorter queue 2.
    baseline.reported(0, Report { waiting: 5, kv_usage: 0.0 });
    assert_eq!(baseline.choose(1, &long, &[2, 0]), 1);
    assert_eq!(baseline.choose(2, &long, &[3, 0]), 0);
    // Free memory is worth 1.
    baseline.reported(0, Report { waiting: 5, kv_usage: 0.5 });
    assert_eq!(baseline.choose(3, &long, &[3, 0]), 1);
}

#[test]
fn lmetric_multiplies_tokens_and_requests() {
    let mut baseline = two(Peer::LMetric);
    let long = spec(&[1, 2, 3, 4]);
    assert_eq!(baseline.choose(0, &long, &[3, 0]), 0);
    baseline.started(0, 0);
    // 1 block × 2 requests against 4 blocks × 1.
    assert_eq!(baseline.choose(1, &long, &[3, 0]), 0);
    // (1 + 1) × 3 against 4 × 1.
    assert_eq!(baseline.choose(2, &long, &[3, 0]), 1);
}

#[test]
fn load_aware_weighs_prefix_and_relative_load_alike() {
    let mut baseline = two(Peer::LoadAware);
    let long = spec(&[1, 2, 3, 4]);
    assert_eq!(baseline.choose(0, &long, &[4, 0]), 0);
    // 1 - 0.5 against 0 + 0.5: a tie; half of the prefix is less.
    assert_eq!(baseline.choose(1, &long, &[2, 0]), 1);
}

#[test]
fn bounded_hash_keeps_a_prefix_on_a_worker_below_the_bound() {
    let mut baseline = Baseline::new(Peer::BoundedHash, 4, 0);
    let owner = |baseline: &Baseline, block| {
        let Rule::BoundedHash(ring) = &baseline.rule else { unreachable!() };
        let spec = spec(&[block]);
        let zero = [0; 4];
        ring.choose(&View {
            spec: &spec,
            cached_blocks: &zero,
            requests: &zero,
            prefill_tokens: &zero,
            reports: &baseline.reports,
        })
    };
    let owners: std::collections::HashSet<usize> = (0..50).map(|block| owner(&baseline, block)).collect();
    assert_eq!(owners.len(), 4, "prefixes are spread");
    let first = owner(&baseline, 1);
    let chosen: Vec<usize> = (0..8).map(|request| baseline.choose(request, &spec(&[1, request]), &[0; 4])).collect();
    assert_eq!(chosen[0], first);
    // Of eight requests none has more than 1.25 × 2, rounded up.
    assert!((0..4).all(|worker| chosen.iter().filter(|at| **at == worker).count() <= 3), "{chosen:?}");
}
