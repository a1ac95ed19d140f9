//! The order by slack to a latency target, and the share of late requests.

use super::*;
use crate::admission::settings::LateRequests;

/// A request of this cost that must be sent to an idle worker by then.
fn by(start_by: Instant, request: QueuedRequest) -> QueuedRequest {
    let mut request = QueuedRequest { start_by: Some(start_by), ..request };
    request.ticket.target = Some(start_by + Duration::from_secs(1));
    request
}

fn late(request: QueuedRequest) -> QueuedRequest {
    let now = Instant::now();
    QueuedRequest { start_by: None, is_late: true, reserved: [Demand::default(); 2], ..by(now, request) }
}

fn after(now: Instant, ms: u64) -> Instant {
    now + Duration::from_millis(ms)
}

/// A route with this queue time, which takes late requests if that is at most 100 ms.
fn open(ms: u64) -> Opening {
    Opening { queue_time: Duration::from_millis(ms), takes_late: ms <= 100 }
}

#[test]
fn least_slack_goes_first_and_late_requests_last() {
    let (mut queue, limits, now) = (FairQueue::default(), limits(u64::MAX), Instant::now());
    let too_late = wait_at(&mut queue, &limits, late(request("a", 10)), now);
    let relaxed = wait_at(&mut queue, &limits, by(after(now, 900), request("a", 10)), now);
    let urgent = wait_at(&mut queue, &limits, by(after(now, 300), request("a", 10)), now);
    // Behind 400 ms of queue the urgent one would be late; it waits for a shorter queue.
    assert_eq!(queue.admit_next(&limits, now, |_, _| Some(open(400))), Some(relaxed));
    assert_eq!(queue.admit_next(&limits, now, |_, _| Some(open(400))), None, "a late request waits for a short queue");
    let order: Vec<u64> = std::iter::from_fn(|| queue.admit_next(&limits, now, |_, _| Some(open(50)))).collect();
    assert_eq!(order, [urgent, too_late]);
}

#[test]
fn a_request_is_late_once_an_idle_worker_would_miss_its_target() {
    let (mut queue, limits, now) = (FairQueue::default(), limits(u64::MAX), Instant::now());
    let numbers = [300, 100, 200].map(|ms| wait_at(&mut queue, &limits, by(after(now, ms), request("a", 10)), now));
    let mut own = QueuedRequest { start_by: Some(after(now, 50)), ..request("a", 10) };
    own.ticket.deadline = own.start_by;
    wait_at(&mut queue, &limits, own, now);
    assert_eq!(queue.late(after(now, 100)), [] as [u64; 0]);
    assert_eq!(queue.late(after(now, 250)), [numbers[1], numbers[2]], "a deadline of its own is no target");
    for number in numbers {
        queue.leave(number);
    }
    assert_eq!(queue.late(after(now, 1000)), [] as [u64; 0]);
}

#[test]
fn late_request_is_rejected_only_if_configured_and_only_if_it_would_wait() {
    let (mut queue, now) = (FairQueue::default(), Instant::now());
    let reject = Settings { late_requests: LateRequests::Reject, ..limits(u64::MAX) };
    let one = || late(request("a", 10));
    assert!(matches!(enter(&mut queue, &reject, one(), Some(open(50)), now), Outcome::Immediate(_)));
    assert!(matches!(enter(&mut queue, &reject, one(), Some(open(500)), now), Outcome::Rejected(Rejection::Late(_))));
    assert!(matches!(enter(&mut queue, &limits(u64::MAX), one(), Some(open(500)), now), Outcome::Queued(..)));
}

#[test]
fn tenant_with_only_late_requests_keeps_its_share() {
    let (mut queue, limits, now) = (FairQueue::default(), limits(u64::MAX), Instant::now());
    let mut of = HashMap::new();
    for _ in 0..100 {
        of.insert(wait_at(&mut queue, &limits, late(request("late", 10)), now), "late");
        of.insert(wait_at(&mut queue, &limits, by(after(now, 5000), request("fast", 10)), now), "fast");
    }
    // The queue of the worker is short at every third turn only. A request in time does not wait for that.
    let mut served = Vec::new();
    for turn in 0..150 {
        served.extend(queue.admit_next(&limits, now, |_, _| Some(open(if turn % 3 == 2 { 50 } else { 500 }))));
    }
    assert_eq!(served.len(), 100, "while the turn of a late request comes, its worker gets no other");
    let late = served.iter().filter(|number| of[number] == "late").count();
    assert!((served.len() / 2).abs_diff(late) <= 1, "{late} of {}", served.len());
}

#[test]
fn new_request_in_time_takes_the_place_of_late_ones_of_its_tenant() {
    let (mut queue, limits, now) = (FairQueue::default(), limits(100), Instant::now());
    let [first, second] = [(); 2].map(|()| wait_at(&mut queue, &limits, late(request("a", 40)), now));
    let entry = enter(&mut queue, &limits, by(after(now, 500), request("a", 40)), None, now);
    assert_eq!(entry, Outcome::Queued(3, vec![second]), "the latest first");
    let entry = enter(&mut queue, &limits, late(request("a", 40)), None, now);
    assert!(matches!(entry, Outcome::Rejected(Rejection::QueueFull(_))), "{entry:?}");
    assert!(queue.waiting.contains_key(&first));
}

/// A request of the model.
#[derive(Clone, Debug)]
struct Entry {
    tenant: u8,
    worker: u64,
    tokens: u64,
    /// Milliseconds until the latest time to be sent; `None`: it is late.
    slack: Option<u64>,
}

fn entry() -> impl Strategy<Value = Entry> {
    let slack = prop_oneof![2 => (0..1000u64).prop_map(Some), 1 => Just(None)];
    (0..2u8, 0..3u64, 1..200u64, slack).prop_map(|(tenant, worker, tokens, slack)| Entry {
        tenant,
        worker,
        tokens,
        slack,
    })
}

/// The next request by the rules, found by looking at all of them.
fn model(queue: &FairQueue, now: Instant, queues: &[Option<u64>; 3]) -> Option<u64> {
    let of = |number: &u64| &queue.waiting[number];
    let queue_ms = |number: &u64| queues[of(number).route.decode.0 as usize];
    let mut tenants: Vec<&Arc<str>> = queue.waiting.values().map(|request| &request.ticket.tenant).collect();
    tenants.sort_by(|a, b| queue.tenants[*a].served.total_cmp(&queue.tenants[*b].served).then(a.cmp(b)));
    tenants.dedup();
    let mut held: Vec<u64> = Vec::new();
    for tenant in tenants {
        let is_free = |number: &u64, held: &[u64]| {
            &of(number).ticket.tenant == tenant
                && queue_ms(number).is_some()
                && !held.contains(&of(number).route.decode.0)
        };
        let oldest = queue.waiting.keys().find(|number| is_free(number, &held) && of(number).is_late);
        let credit = queue.tenants[tenant].late[1].credit;
        if let Some(oldest) = oldest.filter(|oldest| of(oldest).cost_tokens as f64 <= credit) {
            if queue_ms(oldest) <= Some(100) {
                return Some(*oldest);
            }
            held.push(of(oldest).route.decode.0);
        }
        let in_time = |number: &u64| {
            let wait = Duration::from_millis(queue_ms(number).unwrap_or_default());
            of(number).start_by.is_some_and(|start_by| now + wait <= start_by)
        };
        let free = || queue.waiting.keys().filter(|number| is_free(number, &held));
        if let Some(first) =
            free().filter(|number| in_time(number)).min_by_key(|number| (of(number).start_by, **number))
        {
            return Some(*first);
        }
        if let Some(first) = free().find(|number| of(number).is_late && queue_ms(number) <= Some(100)) {
            return Some(*first);
        }
        let waits = free().filter(|number| of(number).is_late).map(|number| of(number).route.decode.0);
        let waits: Vec<u64> = waits.collect();
        held.extend(waits);
    }
    None
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn next_request_is_that_of_the_model(
        entries in prop::collection::vec(entry(), 1..60),
        steps in prop::collection::vec(prop::array::uniform3(prop::option::of(0..600u64)), 1..80),
    ) {
        let (mut queue, limits, now) = (FairQueue::default(), limits(u64::MAX), Instant::now());
        let mut entries = entries.into_iter();
        for (at, queues) in steps.into_iter().enumerate() {
            for Entry { tenant, worker, tokens, slack } in entries.by_ref().take(2) {
                let request = on(worker, &tenant.to_string(), tokens);
                let request = match slack {
                    Some(ms) => by(after(now, ms), request),
                    None => late(request),
                };
                wait_at(&mut queue, &limits, request, now);
            }
            // Time passes, and some requests become late.
            let now = after(now, at as u64 * 10);
            for number in queue.late(now) {
                let request = late(queue.waiting[&number].clone());
                prop_assert!(queue.begin_reroute(number));
                queue.insert(&limits, number, request);
            }
            let expected = model(&queue, now, &queues);
            let open_route = |_: &FairQueue, route: Route| queues[route.decode.0 as usize].map(open);
            prop_assert_eq!(queue.admit_next(&limits, now, open_route), expected);
            let cost = |request: &&QueuedRequest| if request.is_late { request.cost_tokens } else { 0 };
            let late_cost: u64 = queue.waiting.values().map(|request| cost(&request)).sum();
            prop_assert_eq!(queue.tenants.values().map(|tenant| tenant.late[1].cost).sum::<u64>(), late_cost);
        }
    }

    /// A late request goes before ten times its tokens, and one more request, of requests in time of its tenant.
    #[test]
    fn late_request_does_not_starve(size in 1..500u64, above in 1..500u64) {
        let (mut queue, limits, now) = (FairQueue::default(), limits(u64::MAX), Instant::now());
        let oldest = wait_at(&mut queue, &limits, late(request("a", size)), now);
        let mut sent = 0;
        loop {
            wait_at(&mut queue, &limits, by(after(now, 1000), request("a", above)), now);
            let number = queue.admit_next(&limits, now, |_, _| OPEN).unwrap();
            if number == oldest {
                break;
            }
            sent += above;
            prop_assert!(sent <= 10 * size + above, "{sent} before {size}");
        }
    }
}
