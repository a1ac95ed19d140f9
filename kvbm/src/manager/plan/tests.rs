use super::*;
use proptest::prelude::*;

fn stretch(tier: usize, blocks: usize, latency: f64, seconds_per_block: f64) -> Stretch {
    Stretch { tier, blocks, known: Known::Speed(Measured { latency, seconds_per_block, queued: 0 }) }
}

/// Without a deadline.
fn plan(stretches: &[Stretch], recompute: Option<f64>) -> Plan {
    super::plan(stretches, recompute, None)
}

fn split(plan: Plan) -> (usize, usize) {
    (plan.head, plan.tail)
}

#[test]
fn a_fast_tier_gives_all_and_one_that_is_far_too_slow_nothing() {
    assert_eq!(split(plan(&[stretch(0, 100, 0.05, 0.0005)], Some(0.01))), (100, 0));
    assert_eq!(split(plan(&[stretch(0, 100, 0.05, 0.2)], Some(0.01))), (0, 0));
}

#[test]
fn a_tier_as_fast_as_computing_works_from_the_other_end() {
    let plan = plan(&[stretch(0, 100, 0.01, 0.01)], Some(0.01));
    assert_eq!(split(plan), (0, 50), "half the time of either");
    assert_eq!(plan.patience.limit(0, Duration::ZERO), Duration::ZERO, "there is nothing to wait for");
}

#[test]
fn what_a_fast_tier_holds_comes_first_and_a_slow_one_works_from_the_end() {
    // 40 blocks in a twenty-fifth of a second, then 60 at the speed of computing: the two meet in their middle.
    let stretches = [stretch(0, 40, 0.0, 0.0001), stretch(1, 60, 0.01, 0.01)];
    assert_eq!(split(plan(&stretches, Some(0.01))), (40, 30));
}

#[test]
fn latency_must_pay_off_too() {
    assert_eq!(split(plan(&[stretch(0, 4, 0.1, 0.001)], Some(0.01))), (0, 0));
    assert_eq!(split(plan(&[stretch(0, 40, 0.1, 0.0001)], Some(0.01))), (40, 0));
}

#[test]
fn what_others_wait_for_comes_first() {
    let behind = |queued| {
        let measured = Measured { latency: 0.0, seconds_per_block: 0.001, queued };
        split(plan(&[Stretch { tier: 0, blocks: 100, known: Known::Speed(measured) }], Some(0.01)))
    };
    assert_eq!([behind(450), behind(2_000)], [(100, 0), (0, 0)]);
}

#[test]
fn a_slow_tier_helps_for_as_long_as_a_fast_one_is_busy_anyway() {
    // The fast one takes 100 ms for its 101 blocks; in that time the slow one delivers 4 of its own.
    let stretches = [stretch(0, 101, 0.0, 0.001), stretch(1, 5, 0.01, 0.025)];
    assert_eq!(split(plan(&stretches, Some(0.01))), (101 + 4, 0));
}

#[test]
fn what_was_not_measured_is_tried_within_the_grace() {
    let unknown = Stretch { tier: 0, blocks: 10, known: Known::Nothing };
    let patience = Patience { grace: Patience::GRACE, per_block: Duration::from_millis(10), silence: Patience::GRACE };
    assert_eq!(plan(&[unknown], Some(0.01)), Plan { head: 10, tail: 0, patience });
    let long = Stretch { blocks: 2_000, ..unknown };
    let patience = plan(&[long], Some(0.01)).patience;
    assert_eq!((patience.grace, patience.silence), (Duration::from_secs(1), Patience::GRACE));
}

#[test]
fn a_silent_tier_is_asked_and_not_waited_for() {
    let silent = Stretch { tier: 1, blocks: 10, known: Known::Silent };
    assert_eq!(split(plan(&[silent], Some(0.01))), (0, 10));
    assert_eq!(plan(&[silent], Some(0.01)).patience.limit(0, Duration::ZERO), Duration::ZERO);
    let stretches = [stretch(0, 20, 0.001, 0.0001), silent, stretch(0, 5, 0.001, 0.0001)];
    assert_eq!(split(plan(&stretches, Some(0.01))), (20, 15));
    assert_eq!(split(plan(&stretches, None)), (20, 15));
}

#[test]
fn a_tier_that_stops_talking_is_not_waited_for_although_much_is_at_stake() {
    let patience = plan(&[stretch(0, 1_000, 0.005, 0.0001)], Some(0.01)).patience;
    let (spoke, silence) = (Duration::from_millis(30), Duration::from_millis(60));
    assert_eq!(patience.limit(300, spoke), spoke + silence);
}

#[test]
fn waiting_never_makes_late_what_computing_keeps_in_time() {
    let unknown = Stretch { tier: 0, blocks: 100, known: Known::Nothing };
    let grace = |left| super::plan(&[unknown], Some(0.01), Some(left)).patience.grace;
    assert_eq!(grace(1.03).as_millis(), 30, "computing takes a second");
    assert_eq!([grace(0.5), grace(5.0)], [Patience::GRACE; 2], "late without the tier, and never late");
}

#[test]
fn a_deadline_makes_a_small_gain_worth_while() {
    // In time only when the tier does a twelfth of the work.
    let slow = [stretch(0, 100, 0.12, 0.12)];
    assert_eq!(split(plan(&slow, Some(0.01))), (0, 0));
    let (head, tail) = split(super::plan(&slow, Some(0.01), Some(0.95)));
    assert!(head == 0 && tail > 5, "{tail}");
}

#[test]
fn what_would_come_after_the_deadline_is_not_loaded() {
    let fast = [stretch(0, 100, 0.01, 0.01)];
    let with = |left| split(super::plan(&fast, Some(1.0), Some(left)));
    assert_eq!([with(2.0), with(0.505), with(0.0), with(-1.0)], [(100, 0), (50, 0), (0, 0), (0, 0)]);
    let unknown = [Stretch { tier: 0, blocks: 10, known: Known::Nothing }];
    assert_eq!(split(super::plan(&unknown, None, Some(-1.0))), (0, 0));
}

#[test]
fn nothing_is_loaded_when_computing_is_free_and_all_when_nobody_knows() {
    let stretches = [stretch(0, 10, 0.001, 0.001)];
    assert_eq!(split(plan(&stretches, Some(0.0))), (0, 0));
    assert_eq!(split(plan(&stretches, None)), (10, 0));
    assert_eq!(split(plan(&[], Some(0.01))), (0, 0));
}

fn any_stretches() -> impl Strategy<Value = Vec<Stretch>> {
    let known = prop_oneof![
        1 => Just(Known::Nothing),
        1 => Just(Known::Silent),
        6 => (0.0..0.3f64, 0.0..0.03f64, 0..20usize).prop_map(|(latency, seconds_per_block, queued)| Known::Speed(
            Measured { latency, seconds_per_block, queued }
        )),
    ];
    let tiers = prop::collection::vec(known, 3);
    (tiers, prop::collection::vec((0..3usize, 1..40usize), 0..6)).prop_map(|(tiers, stretches)| {
        stretches.into_iter().map(|(tier, blocks)| Stretch { tier, blocks, known: tiers[tier] }).collect()
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn never_later_than_the_best_of_loading_all_computing_all_and_any_head(stretches in any_stretches(), cost in 0.0..0.02f64) {
        prop_assume!(stretches.iter().all(|stretch| stretch.known != Known::Silent));
        let total: usize = stretches.iter().map(|stretch| stretch.blocks).sum();
        let Plan { head, tail, .. } = plan(&stretches, Some(cost));
        prop_assert!(head + tail <= total);
        let planned = finish(&stretches, head, tail, cost);
        for other in 0..=total {
            prop_assert!(planned <= finish(&stretches, other, 0, cost) + FREE + 1e-9, "a head of {} is quicker", other);
        }
        prop_assert!(planned <= total as f64 * cost + FREE + 1e-9);
    }

    #[test]
    fn what_computing_keeps_in_time_no_tier_makes_late(
        stretches in any_stretches(), cost in 0.001..0.02f64, spare in 0.0..2.0f64, arrived in 0..500usize, news in 0.0..9.0f64,
    ) {
        let total = stretches.iter().map(|stretch| stretch.blocks).sum::<usize>() as f64;
        let left = total * cost + spare;
        let Plan { head, tail, patience } = super::plan(&stretches, Some(cost), Some(left));
        prop_assert!(load_seconds(&stretches, head, tail) <= left);
        let arrived = arrived.min(head);
        let begun = patience.limit(arrived, seconds(news)).as_secs_f64();
        prop_assert!(begun + (total - arrived as f64) * cost <= left + 1e-3);
    }

    #[test]
    fn both_ends_meet(stretches in any_stretches(), cost in 0.001..0.02f64, share in 0.0..1.0f64) {
        let total: usize = stretches.iter().map(|stretch| stretch.blocks).sum();
        let head = (total as f64 * share) as usize;
        let met = finish(&stretches, head, meeting_point(&stretches, head, cost), cost);
        for tail in 0..=total - head {
            // One block of computing is what the grid allows.
            prop_assert!(met <= finish(&stretches, head, tail, cost) + cost + 1e-9, "a tail of {} is quicker", tail);
        }
    }

    #[test]
    fn a_request_never_starts_later_than_a_miss_plus_the_grace(
        stretches in any_stretches(), cost in 0.0..0.1f64, arrived in 0..500usize, news in 0.0..9.0f64,
    ) {
        let Plan { head, patience, .. } = plan(&stretches, Some(cost));
        let arrived = arrived.min(head);
        let start = patience.limit(arrived, seconds(news)).as_secs_f64() + (head - arrived) as f64 * cost;
        prop_assert!(start <= head as f64 * cost * 1.05 + Patience::GRACE.as_secs_f64() + 1e-3);
        let silent = stretches.first().is_some_and(|stretch| stretch.known == Known::Silent);
        prop_assert!(!silent || head == 0);
    }
}
