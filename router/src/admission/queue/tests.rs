use super::super::settings::Tenant;
use super::super::ticket::Bid;
use super::*;
use proptest::prelude::*;
use worker::engine::Priority;

mod overload;
mod shares;

/// A lane that takes what comes, at once.
const OPEN: Option<Duration> = Some(Duration::ZERO);

fn limits(tokens: u64) -> Settings {
    Settings { max_queued_tokens: tokens, ..Settings::default() }
}

fn weighing(weights: &[(&str, f64)]) -> Settings {
    let tenant = |(name, weight): &(&str, f64)| ((*name).to_owned(), Tenant { weight: *weight, ..Tenant::default() });
    Settings { tenants: weights.iter().map(tenant).collect(), ..limits(u64::MAX) }
}

fn asked(tenant: &str, tokens: u64) -> Asked {
    on(1, tenant, tokens)
}

fn on(worker: u64, tenant: &str, tokens: u64) -> Asked {
    let now = Instant::now();
    let bid = Bid {
        model: "m".into(),
        tenant: tenant.into(),
        priority: Priority::Normal,
        deadline: None,
        tired: now + Duration::from_hours(1),
        tokens,
        max_tokens: None,
        answers: 1,
    };
    Asked {
        bid,
        latest: None,
        charge: tokens,
        lane: Lane { decode: WorkerId(worker), prefill: None },
        held: [Amount { prefill_tokens: tokens, sequences: 1, blocks: tokens / 16, prompts: 1 }, Amount::default()],
        placed: now,
    }
}

fn with(priority: Priority, mut asked: Asked) -> Asked {
    asked.bid.priority = priority;
    asked
}

/// What became of a newcomer, with the numbers of those that had to go for it.
#[derive(PartialEq, Debug)]
enum Came {
    Straight(u64),
    Waits(u64, Vec<u64>),
    Refused(Refusal),
}

fn enter(room: &mut Room, limits: &Settings, asked: Asked, open: Option<Duration>, now: Instant) -> Came {
    match room.enter(limits, asked, open, now) {
        Entry::Straight(number) => Came::Straight(number),
        Entry::Waits { number, displaced } => {
            Came::Waits(number, displaced.into_iter().map(|(number, _)| number).collect())
        }
        Entry::Refused(refusal) => Came::Refused(refusal),
    }
}

fn wait(room: &mut Room, limits: &Settings, asked: Asked) -> u64 {
    wait_at(room, limits, asked, Instant::now())
}

fn wait_at(room: &mut Room, limits: &Settings, asked: Asked, now: Instant) -> u64 {
    match enter(room, limits, asked, None, now) {
        Came::Waits(number, displaced) if displaced.is_empty() => number,
        other => panic!("{other:?}"),
    }
}

/// Who goes, until nobody can.
fn order(room: &mut Room, limits: &Settings) -> Vec<u64> {
    std::iter::from_fn(|| room.turn(limits, Instant::now(), |_, _| OPEN)).collect()
}

#[test]
fn an_open_lane_before_an_empty_room_lets_straight_through_and_a_closed_one_does_not() {
    let (mut room, limits, now) = (Room::default(), limits(100), Instant::now());
    assert_eq!(enter(&mut room, &limits, asked("a", 1000), OPEN, now), Came::Straight(1));
    let first = wait(&mut room, &limits, asked("a", 1000));
    assert_eq!(
        enter(&mut room, &limits, asked("b", 1), OPEN, now),
        Came::Refused(Refusal::Full(Duration::from_secs(1)))
    );
    assert_eq!(order(&mut room, &limits), [first], "an empty room takes any one");
    room.leave(1);
    room.leave(first);
    assert!(room.tenants.is_empty() && room.running.is_empty(), "nothing is left of who has gone");
}

#[test]
fn nobody_passes_those_who_wait_for_the_same_worker_and_nobody_waits_behind_those_who_wait_for_another() {
    let (mut room, limits) = (Room::default(), limits(u64::MAX));
    let huge = wait(&mut room, &limits, on(1, "a", 1_000_000));
    let small = wait(&mut room, &limits, on(2, "a", 10));
    let only_2 = |_: &Room, lane: Lane| (lane.decode == WorkerId(2)).then_some(Duration::ZERO);
    assert_eq!(room.turn(&limits, Instant::now(), only_2), Some(small));
    assert_eq!(room.turn(&limits, Instant::now(), only_2), None);
    let entry = enter(&mut room, &limits, on(1, "a", 1), OPEN, Instant::now());
    assert!(matches!(entry, Came::Waits(..)), "{entry:?}");
    assert_eq!(order(&mut room, &limits)[0], huge);
}

#[test]
fn a_small_request_does_not_wait_behind_the_huge_ones_of_another_tenant() {
    let (mut room, limits) = (Room::default(), limits(u64::MAX));
    let huge: Vec<u64> = (0..10).map(|_| wait(&mut room, &limits, asked("a", 100_000))).collect();
    let small = wait(&mut room, &limits, asked("b", 10));
    assert_eq!(order(&mut room, &limits)[..2], [huge[0], small]);
}

#[test]
fn the_earlier_start_goes_first_but_not_before_another_tenants_turn() {
    let (mut room, limits, now) = (Room::default(), limits(u64::MAX), Instant::now());
    let by = |seconds| Some(now + Duration::from_secs(seconds));
    let never = wait(&mut room, &limits, asked("a", 10));
    let later = wait(&mut room, &limits, Asked { latest: by(9), ..asked("a", 10) });
    let sooner = wait(&mut room, &limits, Asked { latest: by(5), ..asked("a", 10) });
    let other = wait(&mut room, &limits, asked("b", 10));
    assert_eq!(order(&mut room, &limits), [sooner, other, later, never]);
    let past = Asked { latest: Some(now), ..asked("a", 10) };
    assert_eq!(enter(&mut room, &limits, past, OPEN, now), Came::Refused(Refusal::Late));
}

#[test]
fn who_would_be_too_late_behind_the_queue_waits_for_it_to_get_shorter_and_lets_others_go() {
    let (mut room, limits, now) = (Room::default(), limits(u64::MAX), Instant::now());
    let by = |seconds| Asked { latest: Some(now + Duration::from_secs(seconds)), ..asked("a", 10) };
    let queue = |seconds| Some(Duration::from_secs(seconds));
    assert!(matches!(enter(&mut room, &limits, by(5), queue(5), now), Came::Straight(_)));
    let Came::Waits(sooner, _) = enter(&mut room, &limits, by(5), queue(6), now) else { panic!("too late") };
    assert_eq!(room.turn(&limits, now, |_, _| queue(6)), None);
    let later = wait(&mut room, &limits, by(9));
    assert_eq!(room.turn(&limits, now, |_, _| queue(6)), Some(later));
    assert_eq!(room.turn(&limits, now, |_, _| queue(5)), Some(sooner));
}

#[test]
fn what_is_charged_is_what_is_computed_and_all_answers() {
    let bid = Bid { max_tokens: Some(20), answers: 3, ..asked("a", 1000).bid };
    let part = |prefill_tokens| Amount { prefill_tokens, ..Amount::default() };
    let lane = Lane { decode: WorkerId(1), prefill: Some(WorkerId(2)) };
    assert_eq!(bid.placed(lane, [part(0), part(300)], 0.0, Instant::now()).charge, 300 + 3 * 20);
}

#[test]
fn a_higher_class_goes_first_and_the_lower_ones_get_their_tenth() {
    let (mut room, limits) = (Room::default(), limits(u64::MAX));
    let one = |priority| with(priority, asked("a", 10));
    let mut class = HashMap::new();
    for priority in [Priority::Low, Priority::Normal, Priority::High] {
        for _ in 0..200 {
            class.insert(wait(&mut room, &limits, one(priority)), priority);
        }
    }
    let order: Vec<Priority> = order(&mut room, &limits).iter().map(|number| class[number]).collect();
    let count = |part: &[Priority], of| part.iter().filter(|priority| **priority == of).count();
    assert_eq!(count(&order[..10], Priority::High), 10, "first and foremost");
    let first = &order[..220];
    let [low, normal, high] = [Priority::Low, Priority::Normal, Priority::High].map(|of| count(first, of));
    assert!((15..=25).contains(&low) && (15..=25).contains(&normal), "{low} {normal} {high}");
    assert_eq!(order.len(), 600);
}

#[test]
fn tenants_share_by_weight_and_nobody_saves_up_while_nobody_waits() {
    let limits = weighing(&[("heavy", 3.0)]);
    let mut room = Room::default();
    // What went straight through costs nothing.
    for _ in 0..50 {
        let entry = enter(&mut room, &limits, asked("heavy", 1000), OPEN, Instant::now());
        assert!(matches!(entry, Came::Straight(_)));
    }
    let mut of = HashMap::new();
    for _ in 0..400 {
        of.insert(wait(&mut room, &limits, asked("heavy", 100)), "heavy");
        of.insert(wait(&mut room, &limits, asked("light", 100)), "light");
    }
    let first: Vec<u64> = (0..400).filter_map(|_| room.turn(&limits, Instant::now(), |_, _| OPEN)).collect();
    let heavy = first.iter().filter(|number| of[number] == "heavy").count();
    assert!((296..=304).contains(&heavy), "{heavy} of 400");
    // Somebody who comes late starts from now, and has no arrears to catch up on.
    for _ in 0..100 {
        of.insert(wait(&mut room, &limits, asked("late", 100)), "late");
    }
    let next: Vec<u64> = (0..50).filter_map(|_| room.turn(&limits, Instant::now(), |_, _| OPEN)).collect();
    let late = next.iter().filter(|number| of[number] == "late").count();
    assert!((8..=14).contains(&late), "{late} of 50 at a weight of 1 in 5");
}

#[test]
fn tenants_who_want_nothing_any_more_are_forgotten_though_the_room_is_never_empty() {
    let (mut room, limits, now) = (Room::default(), limits(u64::MAX), Instant::now());
    let only_2 = |_: &Room, lane: Lane| (lane.decode == WorkerId(2)).then_some(Duration::ZERO);
    wait(&mut room, &limits, asked("patient", 100));
    let greedy = wait(&mut room, &limits, on(2, "greedy", 1_000_000));
    assert_eq!(room.turn(&limits, now, only_2), Some(greedy));
    room.leave(greedy);
    let mut most = 0;
    for nth in 0..20_000 {
        let number = wait(&mut room, &limits, on(2, &nth.to_string(), 100 + nth % 7));
        assert_eq!(room.turn(&limits, now, only_2), Some(number));
        room.leave(number);
        most = most.max(room.tenants.len());
    }
    assert!(most <= 2 * AHEAD + 2 && room.tenants.contains_key("patient"), "{most} names");
    assert!(room.tenants["greedy"].used >= 1e6, "who is far ahead is kept in mind");
}

#[test]
fn what_is_cached_costs_no_turn() {
    let (mut room, limits) = (Room::default(), limits(u64::MAX));
    let mut of = HashMap::new();
    for _ in 0..100 {
        of.insert(wait(&mut room, &limits, Asked { charge: 100, ..asked("hits", 1000) }), "hits");
        of.insert(wait(&mut room, &limits, asked("misses", 1000)), "misses");
    }
    let first: Vec<u64> = (0..44).filter_map(|_| room.turn(&limits, Instant::now(), |_, _| OPEN)).collect();
    assert_eq!(first.iter().filter(|number| of[number] == "hits").count(), 40, "ten times as many for the same work");
}

#[test]
fn a_tenants_limits_hold_and_hold_nobody_else() {
    let tenant = Tenant { max_inflight_tokens: Some(100), max_queued_tokens: Some(50), ..Tenant::default() };
    let limits = Settings { tenants: [("a".to_owned(), tenant)].into(), ..limits(u64::MAX) };
    let (mut room, now) = (Room::default(), Instant::now());
    assert_eq!(enter(&mut room, &limits, asked("a", 500), OPEN, now), Came::Straight(1), "one alone may be too large");
    let waits = enter(&mut room, &limits, asked("a", 40), OPEN, now);
    assert_eq!(waits, Came::Waits(2, vec![]));
    let refused = enter(&mut room, &limits, asked("a", 20), OPEN, now);
    assert_eq!(refused, Came::Refused(Refusal::TenantFull(Duration::from_secs(1))));
    let other = wait(&mut room, &limits, asked("b", 1000));
    assert_eq!(order(&mut room, &limits), [other]);
    room.leave(1);
    assert_eq!(order(&mut room, &limits), [2]);
}

#[test]
fn a_full_room_makes_place_for_a_higher_class_and_for_whoever_has_less_than_its_share() {
    let (mut room, limits, now) = (Room::default(), limits(100), Instant::now());
    let low = wait(&mut room, &limits, with(Priority::Low, asked("a", 40)));
    let normal: Vec<u64> = (0..3).map(|_| wait(&mut room, &limits, asked("a", 20))).collect();
    let high = with(Priority::High, asked("a", 60));
    let entry = enter(&mut room, &limits, high, None, now);
    assert_eq!(entry, Came::Waits(5, vec![normal[2], low]), "of each class the latest");
    let refused = enter(&mut room, &limits, asked("a", 20), None, now);
    assert!(matches!(refused, Came::Refused(Refusal::Full(_))), "not for more of the same: {refused:?}");
    let fair = enter(&mut room, &limits, asked("b", 20), None, now);
    assert_eq!(fair, Came::Waits(6, vec![normal[1]]));
    let greedy = enter(&mut room, &limits, asked("b", 20), None, now);
    assert!(matches!(greedy, Came::Refused(Refusal::Full(_))), "they have as much: {greedy:?}");
    assert_eq!(room.tokens, 100);
}

/// One step of a random history.
#[derive(Clone, Debug)]
enum Step {
    Enter { tenant: u8, priority: u8, tokens: u64, worker: u64, open: bool },
    Turn { open: u64 },
    Leave { nth: usize },
    Again { nth: usize, worker: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u8, 0..3u8, 1..200u64, 0..3u64, any::<bool>()).prop_map(|(tenant, priority, tokens, worker, open)| {
            Step::Enter { tenant, priority, tokens, worker, open }
        }),
        3 => (0..3u64).prop_map(|open| Step::Turn { open }),
        2 => any::<usize>().prop_map(|nth| Step::Leave { nth }),
        1 => (any::<usize>(), 0..3u64).prop_map(|(nth, worker)| Step::Again { nth, worker }),
    ]
}

#[test]
fn those_are_placed_anew_first_who_have_not_been_for_the_longest() {
    let (mut room, limits, later) = (Room::default(), limits(u64::MAX), Instant::now() + Duration::from_secs(1));
    let [first, second] = [(); 2].map(|()| wait(&mut room, &limits, asked("a", 100)));
    let high = wait(&mut room, &limits, with(Priority::High, Asked { placed: later, ..asked("a", 100) }));
    assert_eq!(room.some(2, |_| true), [high, first]);
    room.recall(first);
    room.put(&limits, first, Asked { placed: later, ..asked("a", 100) });
    assert_eq!(room.some(2, |_| true), [high, second]);
}

#[test]
fn who_is_placed_anew_keeps_what_others_have_got_before_it() {
    let (mut room, limits, now) = (Room::default(), limits(u64::MAX), Instant::now());
    let modest = [(); 3].map(|()| wait(&mut room, &limits, on(2, "a", 480)));
    let greedy = [(); 10].map(|()| wait(&mut room, &limits, asked("b", 100)));
    let open = |_: &Room, lane: Lane| (lane.decode == WorkerId(1)).then_some(Duration::ZERO);
    let gone: Vec<u64> = std::iter::from_fn(|| room.turn(&limits, now, open)).collect();
    assert_eq!(gone, greedy);
    assert!(modest.into_iter().all(|number| room.recall(number)) && room.is_empty());
    assert!(greedy.into_iter().all(|number| room.leave(number).is_none()));
    for number in modest {
        room.put(&limits, number, asked("a", 480));
    }
    let more = [(); 3].map(|()| wait(&mut room, &limits, asked("b", 100)));
    assert_eq!(order(&mut room, &limits), [modest, more].concat(), "a thousand tokens went to the other");
}

#[test]
fn who_leaves_while_it_is_placed_anew_is_forgotten() {
    let (mut room, limits) = (Room::default(), limits(u64::MAX));
    let gone = wait(&mut room, &limits, asked("a", 100));
    assert!(room.recall(gone));
    assert_eq!((room.tenants.len(), room.leave(gone).is_none()), (1, true));
    assert!(room.recalled.is_empty() && room.tenants.is_empty());
}

proptest! {
    /// Whatever happens: sums are the sums of what is there, bounds hold, and nobody is lost or in two places.
    #[test]
    fn tokens_are_conserved_and_bounds_hold(steps in prop::collection::vec(step(), 1..200)) {
        let tenant = Tenant { weight: 2.0, max_inflight_tokens: Some(300), max_queued_tokens: Some(400) };
        let limits = Settings { tenants: [("1".to_owned(), tenant)].into(), ..limits(1000) };
        let (mut room, now) = (Room::default(), Instant::now());
        let mut inside: BTreeSet<u64> = BTreeSet::new();
        for step in steps {
            let nth = |nth: usize| inside.iter().nth(nth % inside.len().max(1)).copied();
            match step {
                Step::Enter { tenant, priority, tokens, worker, open } => {
                    let priority = [Priority::Low, Priority::Normal, Priority::High][priority as usize];
                    let asked = with(priority, on(worker, &tenant.to_string(), tokens));
                    match enter(&mut room, &limits, asked, open.then_some(Duration::ZERO), now) {
                        Came::Straight(number) => assert!(inside.insert(number)),
                        Came::Waits(number, displaced) => {
                            assert!(inside.insert(number));
                            assert!(displaced.iter().all(|number| inside.remove(number)));
                        }
                        Came::Refused(_) => {}
                    }
                }
                Step::Turn { open } => {
                    let turn = room.turn(&limits, now, |_, lane| (lane.decode == WorkerId(open)).then_some(Duration::ZERO));
                    if let Some(number) = turn {
                        assert!(inside.contains(&number) && room.running.contains_key(&number));
                    } else {
                        // Nobody was passed over who could go.
                        let could = |asked: &Asked| {
                            asked.lane.decode == WorkerId(open) && room.may_run(&limits, &asked.tenant, asked.tokens)
                        };
                        // Of one tenant the first in turn holds the others.
                        let firsts = room.classes.iter().flat_map(|class| class.flows.values());
                        let firsts = firsts.flat_map(BTreeMap::values).filter_map(|turns| turns.first());
                        assert!(!firsts.map(|(.., number)| &room.waiting[number]).any(could));
                    }
                }
                Step::Leave { nth: n } => {
                    if let Some(number) = nth(n) {
                        room.leave(number);
                        inside.remove(&number);
                    }
                }
                Step::Again { nth: n, worker } => {
                    if let Some(number) = nth(n).filter(|number| room.waiting.contains_key(number)) {
                        let asked = Asked { lane: Lane { decode: WorkerId(worker), prefill: None }, ..room.waiting[&number].clone() };
                        assert!(room.recall(number));
                        room.put(&limits, number, asked);
                    }
                }
            }
            let waiting: u64 = room.waiting.values().map(|asked| asked.tokens).sum();
            assert_eq!(room.tokens, waiting);
            assert_eq!(room.by_class().iter().sum::<u64>(), waiting);
            assert_eq!(room.held.values().map(|held| held.prefill_tokens).sum::<u64>(), waiting);
            assert_eq!(room.tenants.values().map(|tenant| tenant.waiting).sum::<u64>(), waiting);
            let running: u64 = room.running.values().map(|running| running.tokens).sum();
            assert_eq!(room.tenants.values().map(|tenant| tenant.running).sum::<u64>(), running);
            assert!(waiting <= 1000);
            let of: Vec<&Asked> = room.waiting.values().filter(|asked| &*asked.tenant == "1").collect();
            assert!(of.iter().map(|asked| asked.tokens).sum::<u64>() <= 400 || of.len() == 1);
            let runs: Vec<u64> = room.running.values().filter(|of| &*of.tenant == "1").map(|of| of.tokens).collect();
            assert!(runs.iter().sum::<u64>() <= 300 || runs.len() == 1);
            let there: BTreeSet<u64> = room.waiting.keys().chain(room.running.keys()).copied().collect();
            assert_eq!(&there, &inside);
        }
        for number in inside {
            room.leave(number);
        }
        assert!(room.is_empty() && room.tenants.is_empty() && room.held.is_empty());
    }

    /// While two tenants wait, what they got for their weights differs by no more than their largest requests.
    #[test]
    fn shares_differ_by_at_most_a_request(
        sizes in prop::collection::vec((1..500u64, 1..500u64), 50..100),
        weight in 0.25..4.0f64,
    ) {
        let (limits, mut room) = (weighing(&[("a", weight)]), Room::default());
        let mut of = HashMap::new();
        for (a, b) in &sizes {
            of.insert(wait(&mut room, &limits, asked("a", *a)), ("a", *a));
            of.insert(wait(&mut room, &limits, asked("b", *b)), ("b", *b));
        }
        let (mut got, mut left) = ([0.0, 0.0], [sizes.len(); 2]);
        while left.iter().all(|left| *left > 0) {
            let (tenant, tokens) = of[&room.turn(&limits, Instant::now(), |_, _| OPEN).unwrap()];
            let at = usize::from(tenant == "b");
            got[at] += tokens as f64 / limits.tenant(tenant).weight;
            left[at] -= 1;
            let bound = 500.0 / weight.min(1.0);
            assert!((got[0] - got[1]).abs() <= bound, "{got:?}");
        }
    }

    /// Somebody of the lowest class goes before ten times its tokens, and one request more, have gone above it.
    #[test]
    fn nobody_starves(size in 1..500u64, above in 1..500u64) {
        let (limits, mut room) = (limits(u64::MAX), Room::default());
        let low = wait(&mut room, &limits, with(Priority::Low, asked("a", size)));
        let mut gone = 0;
        loop {
            // There is always more above.
            wait(&mut room, &limits, with(Priority::High, asked("b", above)));
            wait(&mut room, &limits, with(Priority::Normal, asked("c", above)));
            // And it is placed anew again and again, while others come and go.
            let again = room.waiting[&low].clone();
            assert!(room.recall(low));
            let other = wait(&mut room, &limits, with(Priority::High, asked("b", above)));
            room.leave(other);
            room.put(&limits, low, again);
            let number = room.turn(&limits, Instant::now(), |_, _| OPEN).unwrap();
            if number == low {
                break;
            }
            gone += above;
            assert!(gone <= 10 * size + above, "{gone} before {size}");
        }
    }
}
