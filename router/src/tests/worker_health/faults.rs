//! Requests that fail: against which workers they count, and when these get requests again.

use super::*;

/// A stream on the first of two workers. That is a real `Worker` around its engine, which changes its role when it is
/// asked to; the second one is busy, so that requests go to the first.
async fn on_a_worker_with_roles(
    harness: &Harness,
    first: &Arc<FakeEngine>,
    second: &Arc<FakeEngine>,
) -> (Worker, watch::Sender<Load>, OutputStream) {
    harness.report(second, Load { waiting_tokens: 5000, running: 1, ..Load::default() });
    let planes = Planes { discovery: harness.discovery.clone(), events: harness.events.clone() };
    let (id, epoch, model) = (WorkerId(1), Epoch(1), first.models()[0].clone());
    let instance = Instance { id, epoch, role: Role::Both, model, stores: vec![], kv_cache: None };
    let (reports, load) = watch::channel(Load::default());
    let worker = Worker::start(&planes, instance, first.clone(), Arc::new(EventLog::new(epoch)), load).await.unwrap();
    settle().await;
    let stream = harness.ask(prompt(1, 100)).await.unwrap();
    (worker, reports, stream)
}

/// Requests another role of the first worker.
async fn change_role(harness: &Harness, role: Role) {
    let body = EventBody::RoleRequest { worker: WorkerId(1), role };
    harness.events.publish(Event { source: Source::Router(RouterId(0)), epoch: Epoch(0), body });
    settle().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_changes_its_role_keeps_streams_and_load() {
    let (harness, a, b) = two().await;
    let (_worker, _reports, mut stream) = on_a_worker_with_roles(&harness, &a, &b).await;
    let id = WorkerId(1);
    let (runs, role) = (harness.load(1), || harness.router.core.fleet.snapshot().get(id).unwrap().instance.role);
    assert_eq!((a.open(), b.open(), runs.1, role()), (1, 0, 1, Role::Both));
    for to in [Role::Prefill, Role::Decode] {
        change_role(&harness, to).await;
        assert_eq!((role(), harness.load(1), a.open()), (to, runs, 1), "running requests continue and stay booked");
    }
    let mut ids = Vec::new();
    while let Some(item) = stream.next().await {
        let Output::Tokens(tokens) = item.unwrap() else { panic!("tokens are expected") };
        ids.extend(tokens.ids);
    }
    drop(stream);
    assert_eq!((ids, a.open(), harness.load(1)), (vec![1, 2], 0, (0, 0, 0)), "the booking ends with the stream");
    assert_eq!((is_ejected(&harness, 1), harness.metric("blockyard_router_retries_total")), (false, 0));
}

#[tokio::test(start_paused = true)]
async fn a_fault_of_a_request_that_was_sent_before_a_change_of_the_role_counts() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::BreakLater(Error::Unresponsive("no answer".to_owned())));
    let (_worker, _reports, stream) = on_a_worker_with_roles(&harness, &a, &b).await;
    change_role(&harness, Role::Decode).await;
    assert!(stream.all(async |item| item.is_ok()).await, "it is continued on the other one");
    assert_eq!((a.requests(), b.requests()), (1, 1));
    let worker = harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().clone();
    assert_eq!((worker.instance.role, worker.is_failing()), (Role::Decode, true));
    // A check of the worker, as it is now, begins.
    worker.probe_started(Instant::now());
    assert!(is_ejected(&harness, 1));
}

/// Two servers, whose health checks compute nothing.
async fn two_servers() -> (Arc<Harness>, Arc<FakeEngine>, Arc<FakeEngine>) {
    let (harness, a, b) = two().await;
    *a.server.lock() = Some(1);
    *b.server.lock() = Some(2);
    (harness, a, b)
}

#[tokio::test(start_paused = true)]
async fn rare_requests_seldom_meet_a_server_that_answers_only_health_checks() {
    let (harness, a, b) = two_servers().await;
    a.set_behaviour(Behaviour::RefuseRequests(failed()));
    for family in 0..15 {
        harness.answer(prompt(family, 10)).await.unwrap();
        assert_eq!(harness.router.degraded().len(), usize::from(a.requests() >= 3), "after request {family}");
        pass(&harness, &[&a, &b], 6).await;
    }
    assert!((4..=8).contains(&a.requests()), "{} requests", a.requests());
    a.set_behaviour(Behaviour::Serve);
    pass(&harness, &[&a, &b], 61).await;
    assert_eq!(harness.router.degraded().len(), 1, "only its health checks are good");
    for family in 20..22 {
        harness.answer(prompt(family, 10)).await.unwrap();
    }
    assert_eq!(harness.router.degraded(), [""; 0], "a request has succeeded");
}

#[tokio::test(start_paused = true)]
async fn good_health_checks_for_minutes_take_a_server_from_the_list() {
    let (harness, a, b) = two_servers().await;
    a.set_behaviour(Behaviour::RefuseRequests(failed()));
    for family in 0..6 {
        harness.answer(prompt(family, 10)).await.unwrap();
    }
    pass(&harness, &[&a, &b], 280).await;
    assert_eq!(harness.router.degraded().len(), 1);
    pass(&harness, &[&a, &b], 40).await;
    assert_eq!(harness.router.degraded(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_server_that_awaits_a_trial_serves_when_no_other_answers() {
    let (harness, a, b) = two_servers().await;
    a.set_behaviour(Behaviour::RefuseRequests(failed()));
    for family in 0..40 {
        harness.answer(prompt(family, 10)).await.unwrap();
        pass(&harness, &[&a, &b], 1).await;
    }
    b.set_behaviour(Behaviour::Hang);
    pass(&harness, &[&a, &b], 20).await;
    assert!(is_ejected(&harness, 1) && is_ejected(&harness, 2));
    a.set_behaviour(Behaviour::Serve);
    let before = (a.requests(), b.requests());
    harness.answer(prompt(50, 10)).await.unwrap();
    assert_eq!((a.requests(), b.requests()), (before.0 + 1, before.1));
}

#[tokio::test(start_paused = true)]
async fn a_request_that_workers_fail_counts_against_none_of_them() {
    let no_answer = || Error::NoAnswer("connection closed".to_owned());
    let refused = || Error::Unavailable("connection refused".to_owned());
    // Whether each of three workers fails requests, and how many are ejected at once.
    for (error, fail, expected) in [
        (no_answer(), [true, true, true], 0),
        (no_answer(), [true, false, false], 1),
        (no_answer(), [true, true, false], 2),
        (refused(), [true, true, true], 3),
        (failed(), [true, true, true], 0),
        (failed(), [true, false, false], 1),
        (failed(), [true, true, false], 2),
    ] {
        let harness = defaults();
        for (id, fails) in (1..).zip(fail) {
            let worker = harness.worker(id, Role::Both).await;
            if fails {
                worker.set_behaviour(Behaviour::RefuseRequests(error.clone()));
            }
        }
        let mut ejected = 0;
        for family in 0..40 {
            let is_served = harness.answer(prompt(family, 10)).await.is_ok();
            assert_eq!(is_served, fail.contains(&false), "{error}");
            ejected = [1, 2, 3].into_iter().filter(|id| is_ejected(&harness, *id)).count().max(ejected);
        }
        assert_eq!(ejected, expected, "{error} {fail:?}");
        let counts_against_none = |problem: &String| problem.contains("counts against no worker");
        let is_listed = harness.router.degraded().iter().any(counts_against_none);
        assert_eq!(is_listed, expected == 0, "{error} {fail:?}");
    }
    let harness = defaults();
    harness.worker(1, Role::Both).await.set_behaviour(Behaviour::RefuseRequests(no_answer()));
    for family in 0..3 {
        assert!(harness.answer(prompt(family, 10)).await.is_err());
    }
    assert_eq!(harness.router.degraded().len(), 1, "no other worker shows whose fault it is");
}
