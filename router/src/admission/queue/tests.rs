use super::super::settings::Tenant;
use super::super::ticket::Ticket;
use super::*;
use proptest::prelude::*;
use std::collections::HashMap;
use worker::engine::Priority;

mod overload;
mod shares;
mod slo;

/// A route with capacity and without a queue.
const OPEN: Option<Opening> = Some(IDLE);
const IDLE: Opening = Opening { queue_time: Duration::ZERO, takes_late: true };

fn limits(tokens: u64) -> Settings {
    Settings { max_queued_tokens: tokens, ..Settings::default() }
}

fn weighing(weights: &[(&str, f64)]) -> Settings {
    let tenant = |(name, weight): &(&str, f64)| ((*name).to_owned(), Tenant { weight: *weight, ..Tenant::default() });
    Settings { tenants: weights.iter().map(tenant).collect(), ..limits(u64::MAX) }
}

fn request(tenant: &str, tokens: u64) -> QueuedRequest {
    on(1, tenant, tokens)
}

fn on(worker: u64, tenant: &str, tokens: u64) -> QueuedRequest {
    let now = Instant::now();
    let ticket = Ticket {
        model: "m".into(),
        tenant: tenant.into(),
        priority: Priority::Normal,
        deadline: None,
        target: None,
        queue_deadline: now + Duration::from_hours(1),
        tokens,
        choices: 1,
    };
    QueuedRequest {
        ticket,
        start_by: None,
        is_late: false,
        cost_tokens: tokens,
        route: Route { decode: WorkerId(worker), prefill: None },
        reserved: [
            Demand {
                prefill_tokens: tokens,
                sequences: 1,
                blocks: tokens / 16,
                prompts: 1,
                context_tokens: tokens,
                timed_tokens: 0,
                prefill_micros: 0,
            },
            Demand::default(),
        ],
        placed: now,
    }
}

fn with(priority: Priority, mut request: QueuedRequest) -> QueuedRequest {
    request.ticket.priority = priority;
    request
}

/// What became of a new request, with the numbers of the requests that were shed for it.
#[derive(PartialEq, Debug)]
enum Outcome {
    Immediate(u64),
    Queued(u64, Vec<u64>),
    Rejected(Rejection),
}

fn enter(
    queue: &mut FairQueue,
    limits: &Settings,
    request: QueuedRequest,
    open: Option<Opening>,
    now: Instant,
) -> Outcome {
    match queue.admit_or_queue(limits, request, open, now) {
        Enqueued::Immediate(number) => Outcome::Immediate(number),
        Enqueued::Queued { number, shed } => {
            Outcome::Queued(number, shed.into_iter().map(|(number, _)| number).collect())
        }
        Enqueued::Rejected(rejection) => Outcome::Rejected(rejection),
    }
}

fn wait(queue: &mut FairQueue, limits: &Settings, request: QueuedRequest) -> u64 {
    wait_at(queue, limits, request, Instant::now())
}

fn wait_at(queue: &mut FairQueue, limits: &Settings, request: QueuedRequest, now: Instant) -> u64 {
    match enter(queue, limits, request, None, now) {
        Outcome::Queued(number, shed) if shed.is_empty() => number,
        other => panic!("{other:?}"),
    }
}

/// Numbers of the admitted requests in order, until none can be admitted.
fn order(queue: &mut FairQueue, limits: &Settings) -> Vec<u64> {
    std::iter::from_fn(|| queue.admit_next(limits, Instant::now(), |_, _| OPEN)).collect()
}

#[test]
fn empty_queue_and_open_route_admit_at_once() {
    let mut queue = FairQueue::default();
    let limits = limits(100);
    let now = Instant::now();
    assert_eq!(enter(&mut queue, &limits, request("a", 1000), OPEN, now), Outcome::Immediate(1));
    let first = wait(&mut queue, &limits, request("a", 1000));
    assert_eq!(
        enter(&mut queue, &limits, request("b", 1), OPEN, now),
        Outcome::Rejected(Rejection::QueueFull(Duration::from_secs(1)))
    );
    assert_eq!(order(&mut queue, &limits), [first], "an empty queue takes any request");
    queue.leave(1);
    queue.leave(first);
    assert!(queue.tenants.is_empty() && queue.running.is_empty(), "ended requests leave nothing behind");
}

#[test]
fn requests_wait_behind_those_of_the_same_worker_only() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let huge = wait(&mut queue, &limits, on(1, "a", 1_000_000));
    let small = wait(&mut queue, &limits, on(2, "a", 10));
    let only_2 = |_: &FairQueue, route: Route| (route.decode == WorkerId(2)).then_some(IDLE);
    assert_eq!(queue.admit_next(&limits, Instant::now(), only_2), Some(small));
    assert_eq!(queue.admit_next(&limits, Instant::now(), only_2), None);
    let entry = enter(&mut queue, &limits, on(1, "a", 1), OPEN, Instant::now());
    assert!(matches!(entry, Outcome::Queued(..)), "{entry:?}");
    assert_eq!(order(&mut queue, &limits)[0], huge);
}

#[test]
fn small_request_does_not_wait_behind_huge_ones_of_others() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let huge: Vec<u64> = (0..10).map(|_| wait(&mut queue, &limits, request("a", 100_000))).collect();
    let small = wait(&mut queue, &limits, request("b", 10));
    assert_eq!(order(&mut queue, &limits)[..2], [huge[0], small]);
}

#[test]
fn earlier_deadline_goes_first_within_its_tenant() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let now = Instant::now();
    let by = |seconds| Some(now + Duration::from_secs(seconds));
    let never = wait(&mut queue, &limits, request("a", 10));
    let later = wait(&mut queue, &limits, QueuedRequest { start_by: by(9), ..request("a", 10) });
    let sooner = wait(&mut queue, &limits, QueuedRequest { start_by: by(5), ..request("a", 10) });
    let other = wait(&mut queue, &limits, request("b", 10));
    assert_eq!(order(&mut queue, &limits), [sooner, other, later, never]);
    let past = QueuedRequest { start_by: Some(now), ..request("a", 10) };
    assert_eq!(enter(&mut queue, &limits, past, OPEN, now), Outcome::Rejected(Rejection::DeadlineExceeded));
}

#[test]
fn request_waits_until_the_route_can_meet_its_deadline() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let now = Instant::now();
    let by = |seconds| QueuedRequest { start_by: Some(now + Duration::from_secs(seconds)), ..request("a", 10) };
    let open_after = |seconds| Some(Opening { queue_time: Duration::from_secs(seconds), takes_late: false });
    assert!(matches!(enter(&mut queue, &limits, by(5), open_after(5), now), Outcome::Immediate(_)));
    let Outcome::Queued(sooner, _) = enter(&mut queue, &limits, by(5), open_after(6), now) else { panic!("too late") };
    assert_eq!(queue.admit_next(&limits, now, |_, _| open_after(6)), None);
    let later = wait(&mut queue, &limits, by(9));
    assert_eq!(queue.admit_next(&limits, now, |_, _| open_after(6)), Some(later));
    assert_eq!(queue.admit_next(&limits, now, |_, _| open_after(5)), Some(sooner));
}

#[test]
fn cost_is_computed_tokens_and_output_of_all_choices() {
    let ticket = Ticket { choices: 3, ..request("a", 1000).ticket };
    let amount = |prefill_tokens| Demand { prefill_tokens, ..Demand::default() };
    let route = Route { decode: WorkerId(1), prefill: Some(WorkerId(2)) };
    let placed = ticket.placed(route, [amount(0), amount(300)], 20, 0.0, Instant::now());
    assert_eq!(placed.cost_tokens, 300 + 3 * 20);
}

#[test]
fn higher_class_goes_first_and_lower_ones_get_a_tenth() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let one = |priority| with(priority, request("a", 10));
    let mut class = HashMap::new();
    for priority in [Priority::Low, Priority::Normal, Priority::High] {
        for _ in 0..200 {
            class.insert(wait(&mut queue, &limits, one(priority)), priority);
        }
    }
    let order: Vec<Priority> = order(&mut queue, &limits).iter().map(|number| class[number]).collect();
    let count = |part: &[Priority], of| part.iter().filter(|priority| **priority == of).count();
    assert_eq!(count(&order[..10], Priority::High), 10, "the highest class goes first");
    let first = &order[..220];
    let [low, normal, high] = [Priority::Low, Priority::Normal, Priority::High].map(|of| count(first, of));
    assert!((15..=25).contains(&low) && (15..=25).contains(&normal), "{low} {normal} {high}");
    assert_eq!(order.len(), 600);
}

#[test]
fn tenants_share_by_weight_without_credit_for_idle_time() {
    let limits = weighing(&[("heavy", 3.0)]);
    let mut queue = FairQueue::default();
    // Requests that did not queue cost nothing.
    for _ in 0..50 {
        let entry = enter(&mut queue, &limits, request("heavy", 1000), OPEN, Instant::now());
        assert!(matches!(entry, Outcome::Immediate(_)));
    }
    let mut of = HashMap::new();
    for _ in 0..400 {
        of.insert(wait(&mut queue, &limits, request("heavy", 100)), "heavy");
        of.insert(wait(&mut queue, &limits, request("light", 100)), "light");
    }
    let first: Vec<u64> = (0..400).filter_map(|_| queue.admit_next(&limits, Instant::now(), |_, _| OPEN)).collect();
    let heavy = first.iter().filter(|number| of[number] == "heavy").count();
    assert!((296..=304).contains(&heavy), "{heavy} of 400");
    // A tenant that comes later starts at the virtual time.
    for _ in 0..100 {
        of.insert(wait(&mut queue, &limits, request("late", 100)), "late");
    }
    let next: Vec<u64> = (0..50).filter_map(|_| queue.admit_next(&limits, Instant::now(), |_, _| OPEN)).collect();
    let late = next.iter().filter(|number| of[number] == "late").count();
    assert!((8..=14).contains(&late), "{late} of 50 at a weight of 1 in 5");
}

#[test]
fn service_is_remembered_when_the_queue_drains() {
    let limits = limits(u64::MAX);
    let mut queue = FairQueue::default();
    // "a" has one request running and at most one in the queue, which is therefore empty again and again.
    let mut running = wait(&mut queue, &limits, request("a", 1000));
    assert_eq!(order(&mut queue, &limits), [running]);
    for _ in 0..10 {
        let next = wait(&mut queue, &limits, request("a", 1000));
        queue.leave(running);
        assert_eq!(order(&mut queue, &limits), [next]);
        running = next;
    }
    let (again, first) = (wait(&mut queue, &limits, request("a", 1000)), wait(&mut queue, &limits, request("b", 10)));
    queue.leave(running);
    assert_eq!(order(&mut queue, &limits), [first, again]);
    for number in [first, again] {
        queue.leave(number);
    }
    assert!(queue.tenants.is_empty(), "no service is remembered of an idle fleet");
}

#[test]
fn idle_tenants_are_removed_while_others_run() {
    let limits = limits(u64::MAX);
    let mut queue = FairQueue::default();
    let mut running = wait(&mut queue, &limits, request("first", 10));
    assert_eq!(order(&mut queue, &limits), [running]);
    let mut most = 0;
    for nth in 0..5_000 {
        let next = wait(&mut queue, &limits, request(&nth.to_string(), 100 + nth % 7));
        assert_eq!(order(&mut queue, &limits), [next]);
        queue.leave(running);
        running = next;
        most = most.max(queue.tenants.len());
    }
    assert!(most <= 2 * IDLE_TENANTS_MAX + 2, "{most} names");
}

#[test]
fn idle_tenants_are_removed_while_others_queue() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let now = Instant::now();
    let only_2 = |_: &FairQueue, route: Route| (route.decode == WorkerId(2)).then_some(IDLE);
    wait(&mut queue, &limits, request("waiting", 100));
    let greedy = wait(&mut queue, &limits, on(2, "greedy", 1_000_000));
    assert_eq!(queue.admit_next(&limits, now, only_2), Some(greedy));
    queue.leave(greedy);
    let mut most = 0;
    for nth in 0..20_000 {
        let number = wait(&mut queue, &limits, on(2, &nth.to_string(), 100 + nth % 7));
        assert_eq!(queue.admit_next(&limits, now, only_2), Some(number));
        queue.leave(number);
        most = most.max(queue.tenants.len());
    }
    assert!(most <= 2 * IDLE_TENANTS_MAX + 2 && queue.tenants.contains_key("waiting"), "{most} names");
    assert!(queue.tenants["greedy"].served >= 1e6, "a tenant far ahead is remembered");
}

#[test]
fn cached_tokens_cost_nothing() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let mut of = HashMap::new();
    for _ in 0..100 {
        of.insert(wait(&mut queue, &limits, QueuedRequest { cost_tokens: 100, ..request("hits", 1000) }), "hits");
        of.insert(wait(&mut queue, &limits, request("misses", 1000)), "misses");
    }
    let first: Vec<u64> = (0..44).filter_map(|_| queue.admit_next(&limits, Instant::now(), |_, _| OPEN)).collect();
    assert_eq!(first.iter().filter(|number| of[number] == "hits").count(), 40, "ten times as many for the same work");
}

#[test]
fn limits_of_a_tenant_do_not_delay_others() {
    let tenant = Tenant { max_inflight_tokens: Some(100), max_queued_tokens: Some(50), ..Tenant::default() };
    let limits = Settings { tenants: [("a".to_owned(), tenant)].into(), ..limits(u64::MAX) };
    let mut queue = FairQueue::default();
    let now = Instant::now();
    assert_eq!(
        enter(&mut queue, &limits, request("a", 500), OPEN, now),
        Outcome::Immediate(1),
        "one alone may be too large"
    );
    let waits = enter(&mut queue, &limits, request("a", 40), OPEN, now);
    assert_eq!(waits, Outcome::Queued(2, vec![]));
    let rejected = enter(&mut queue, &limits, request("a", 20), OPEN, now);
    assert_eq!(rejected, Outcome::Rejected(Rejection::TenantLimit(Duration::from_secs(1))));
    let other = wait(&mut queue, &limits, request("b", 1000));
    assert_eq!(order(&mut queue, &limits), [other]);
    queue.leave(1);
    assert_eq!(order(&mut queue, &limits), [2]);
}

#[test]
fn full_queue_sheds_lower_classes_and_larger_shares() {
    let mut queue = FairQueue::default();
    let limits = limits(100);
    let now = Instant::now();
    let low = wait(&mut queue, &limits, with(Priority::Low, request("a", 40)));
    let normal: Vec<u64> = (0..3).map(|_| wait(&mut queue, &limits, request("a", 20))).collect();
    let high = with(Priority::High, request("a", 60));
    let entry = enter(&mut queue, &limits, high, None, now);
    assert_eq!(entry, Outcome::Queued(5, vec![normal[2], low]), "the latest of each class");
    let rejected = enter(&mut queue, &limits, request("a", 20), None, now);
    assert!(
        matches!(rejected, Outcome::Rejected(Rejection::QueueFull(_))),
        "not for the same class and tenant: {rejected:?}"
    );
    let fair = enter(&mut queue, &limits, request("b", 20), None, now);
    assert_eq!(fair, Outcome::Queued(6, vec![normal[1]]));
    let greedy = enter(&mut queue, &limits, request("b", 20), None, now);
    assert!(matches!(greedy, Outcome::Rejected(Rejection::QueueFull(_))), "the other tenant has as much: {greedy:?}");
    assert_eq!(queue.tokens, 100);
}

/// One step of a random history.
#[derive(Clone, Debug)]
enum Step {
    Enter { tenant: u8, priority: u8, tokens: u64, worker: u64, open: bool },
    AdmitNext { open: u64 },
    Leave { nth: usize },
    Reroute { nth: usize, worker: u64 },
}

fn step() -> impl Strategy<Value = Step> {
    prop_oneof![
        4 => (0..3u8, 0..3u8, 1..200u64, 0..3u64, any::<bool>()).prop_map(|(tenant, priority, tokens, worker, open)| {
            Step::Enter { tenant, priority, tokens, worker, open }
        }),
        3 => (0..3u64).prop_map(|open| Step::AdmitNext { open }),
        2 => any::<usize>().prop_map(|nth| Step::Leave { nth }),
        1 => (any::<usize>(), 0..3u64).prop_map(|(nth, worker)| Step::Reroute { nth, worker }),
    ]
}

#[test]
fn reroute_starts_with_the_oldest_placement() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let later = Instant::now() + Duration::from_secs(1);
    let [first, second] = [(); 2].map(|()| wait(&mut queue, &limits, request("a", 100)));
    let high = wait(&mut queue, &limits, with(Priority::High, QueuedRequest { placed: later, ..request("a", 100) }));
    assert_eq!(queue.select(2, |_| true), [high, first]);
    queue.begin_reroute(first);
    queue.insert(&limits, first, QueuedRequest { placed: later, ..request("a", 100) });
    assert_eq!(queue.select(2, |_| true), [high, second]);
}

#[test]
fn reroute_keeps_the_service_counts_of_tenants() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let now = Instant::now();
    let modest = [(); 3].map(|()| wait(&mut queue, &limits, on(2, "a", 480)));
    let greedy = [(); 10].map(|()| wait(&mut queue, &limits, request("b", 100)));
    let open = |_: &FairQueue, route: Route| (route.decode == WorkerId(1)).then_some(IDLE);
    let gone: Vec<u64> = std::iter::from_fn(|| queue.admit_next(&limits, now, open)).collect();
    assert_eq!(gone, greedy);
    assert!(modest.into_iter().all(|number| queue.begin_reroute(number)) && queue.is_empty());
    assert!(greedy.into_iter().all(|number| queue.leave(number).is_none()));
    for number in modest {
        queue.insert(&limits, number, request("a", 480));
    }
    let more = [(); 3].map(|()| wait(&mut queue, &limits, request("b", 100)));
    assert_eq!(order(&mut queue, &limits), [modest, more].concat(), "the other tenant got a thousand tokens");
}

#[test]
fn request_that_leaves_during_a_reroute_is_removed() {
    let mut queue = FairQueue::default();
    let limits = limits(u64::MAX);
    let gone = wait(&mut queue, &limits, request("a", 100));
    assert!(queue.begin_reroute(gone));
    assert_eq!((queue.tenants.len(), queue.leave(gone).is_none()), (1, true));
    assert!(queue.rerouting.is_empty() && queue.tenants.is_empty());
}

proptest! {
    /// Sums match the queued and running requests, limits hold, and each request is in one place.
    #[test]
    fn tokens_are_conserved_and_bounds_hold(steps in prop::collection::vec(step(), 1..200)) {
        let tenant = Tenant { weight: 2.0, max_inflight_tokens: Some(300), max_queued_tokens: Some(400) };
        let limits = Settings { tenants: [("1".to_owned(), tenant)].into(), ..limits(1000) };
        let mut queue = FairQueue::default();
        let now = Instant::now();
        let mut inside: BTreeSet<u64> = BTreeSet::new();
        for step in steps {
            let nth = |nth: usize| inside.iter().nth(nth % inside.len().max(1)).copied();
            match step {
                Step::Enter { tenant, priority, tokens, worker, open } => {
                    let priority = [Priority::Low, Priority::Normal, Priority::High][priority as usize];
                    let request = with(priority, on(worker, &tenant.to_string(), tokens));
                    match enter(&mut queue, &limits, request, open.then_some(IDLE), now) {
                        Outcome::Immediate(number) => assert!(inside.insert(number)),
                        Outcome::Queued(number, shed) => {
                            assert!(inside.insert(number));
                            assert!(shed.iter().all(|number| inside.remove(number)));
                        }
                        Outcome::Rejected(_) => {}
                    }
                }
                Step::AdmitNext { open } => {
                    let is_open = |route: Route| route.decode == WorkerId(open);
                    let admitted = queue.admit_next(&limits, now, |_, route| is_open(route).then_some(IDLE));
                    if let Some(number) = admitted {
                        assert!(inside.contains(&number) && queue.running.contains_key(&number));
                    } else {
                        // No request that could be admitted was passed over.
                        let could = |request: &QueuedRequest| {
                            is_open(request.route) && queue.may_run(&limits, &request.tenant, request.tokens)
                        };
                        // The first of a tenant holds back its others.
                        let firsts = queue.classes.iter().flat_map(|class| class.flows.values());
                        let firsts = firsts.flat_map(BTreeMap::values).filter_map(BTreeSet::first);
                        assert!(!firsts.map(|(.., number)| &queue.waiting[number]).any(could));
                    }
                }
                Step::Leave { nth: n } => {
                    if let Some(number) = nth(n) {
                        queue.leave(number);
                        inside.remove(&number);
                    }
                }
                Step::Reroute { nth: n, worker } => {
                    if let Some(number) = nth(n).filter(|number| queue.waiting.contains_key(number)) {
                        let route = Route { decode: WorkerId(worker), prefill: None };
                        let request = QueuedRequest { route, ..queue.waiting[&number].clone() };
                        assert!(queue.begin_reroute(number));
                        queue.insert(&limits, number, request);
                    }
                }
            }
            let waiting: u64 = queue.waiting.values().map(|request| request.tokens).sum();
            assert_eq!(queue.tokens, waiting);
            assert_eq!(queue.queued_tokens().iter().sum::<u64>(), waiting);
            assert_eq!(queue.reserved.values().map(|amount| amount.prefill_tokens).sum::<u64>(), waiting);
            assert_eq!(queue.tenants.values().map(|tenant| tenant.waiting).sum::<u64>(), waiting);
            let running: u64 = queue.running.values().map(|running| running.tokens).sum();
            assert_eq!(queue.tenants.values().map(|tenant| tenant.running).sum::<u64>(), running);
            assert!(waiting <= 1000);
            let of: Vec<&QueuedRequest> = queue.waiting.values().filter(|request| &*request.tenant == "1").collect();
            assert!(of.iter().map(|request| request.tokens).sum::<u64>() <= 400 || of.len() == 1);
            let runs: Vec<u64> = queue.running.values().filter(|of| &*of.tenant == "1").map(|of| of.tokens).collect();
            assert!(runs.iter().sum::<u64>() <= 300 || runs.len() == 1);
            let there: BTreeSet<u64> = queue.waiting.keys().chain(queue.running.keys()).copied().collect();
            assert_eq!(&there, &inside);
        }
        for number in inside {
            queue.leave(number);
        }
        assert!(queue.is_empty() && queue.tenants.is_empty() && queue.reserved.is_empty());
    }

    /// While two tenants queue, their service per weight differs by no more than their largest requests.
    #[test]
    fn shares_differ_by_at_most_a_request(
        sizes in prop::collection::vec((1..500u64, 1..500u64), 50..100),
        weight in 0.25..4.0f64,
    ) {
        let limits = weighing(&[("a", weight)]);
        let mut queue = FairQueue::default();
        let mut of = HashMap::new();
        for (a, b) in &sizes {
            of.insert(wait(&mut queue, &limits, request("a", *a)), ("a", *a));
            of.insert(wait(&mut queue, &limits, request("b", *b)), ("b", *b));
        }
        let mut got = [0.0, 0.0];
        let mut left = [sizes.len(); 2];
        while left.iter().all(|left| *left > 0) {
            let (tenant, tokens) = of[&queue.admit_next(&limits, Instant::now(), |_, _| OPEN).unwrap()];
            let at = usize::from(tenant == "b");
            got[at] += tokens as f64 / limits.tenant(tenant).weight;
            left[at] -= 1;
            let bound = 500.0 / weight.min(1.0);
            assert!((got[0] - got[1]).abs() <= bound, "{got:?}");
        }
    }

    /// A request of the lowest class goes before ten times its tokens, and one more request, of higher classes.
    #[test]
    fn lowest_class_does_not_starve(size in 1..500u64, above in 1..500u64) {
        let limits = limits(u64::MAX);
        let mut queue = FairQueue::default();
        let low = wait(&mut queue, &limits, with(Priority::Low, request("a", size)));
        let mut gone = 0;
        loop {
            // Higher classes always have requests.
            wait(&mut queue, &limits, with(Priority::High, request("b", above)));
            wait(&mut queue, &limits, with(Priority::Normal, request("c", above)));
            // It is rerouted again and again, while other requests come and leave.
            let again = queue.waiting[&low].clone();
            assert!(queue.begin_reroute(low));
            let other = wait(&mut queue, &limits, with(Priority::High, request("b", above)));
            queue.leave(other);
            queue.insert(&limits, low, again);
            let number = queue.admit_next(&limits, Instant::now(), |_, _| OPEN).unwrap();
            if number == low {
                break;
            }
            gone += above;
            assert!(gone <= 10 * size + above, "{gone} before {size}");
        }
    }
}
