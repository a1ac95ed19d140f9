//! Workers and servers that stall, and slow ones.

use super::*;

#[tokio::test(start_paused = true)]
async fn one_stalled_worker_delays_no_client() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::Hang);
    let before = Instant::now();
    let asking = harness.clone();
    let answers = tokio::spawn(async move {
        let answers = join_all((0..6).map(|family| asking.answer(prompt(family, 100)))).await;
        (answers, Instant::now())
    });
    pass(&harness, &[&a, &b], 40).await;
    let (answers, ended) = answers.await.unwrap();
    assert!(answers.iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert!(ended - before < Duration::from_secs(30), "{:?}", ended - before);
    assert_eq!((a.requests(), b.requests(), a.open()), (3, 6, 0));
    let before = Instant::now();
    join_all((6..12).map(|family| harness.answer(prompt(family, 100)))).await;
    assert_eq!((a.requests(), before.elapsed().as_secs()), (3, 0), "the stalled worker is ejected");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_stalls_after_output_of_others_delays_no_client() {
    let (harness, a, b) = two().await;
    a.set_behaviour(Behaviour::Hang);
    let asking = harness.clone();
    let answers = tokio::spawn(async move { join_all((0..2).map(|family| asking.answer(prompt(family, 100)))).await });
    pass(&harness, &[&a, &b], 3).await;
    assert_eq!((a.requests(), b.requests()), (1, 1));
    // As the last output of a stream that was running when the request came.
    harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().record_output(Instant::now());
    pass(&harness, &[&a, &b], 20).await;
    assert!(answers.is_finished(), "overdue after 11 s without output");
    assert!(answers.await.unwrap().iter().all(|answer| answer == &Ok(vec![1, 2])));
    assert_eq!((b.requests(), is_ejected(&harness, 1)), (2, true));
}

#[tokio::test(start_paused = true)]
async fn no_worker_counts_as_stalled_when_all_are_slow() {
    let (harness, a, b) = two().await;
    for worker in [&a, &b] {
        worker.set_behaviour(Behaviour::Hang);
    }
    let asking = harness.clone();
    let answers = tokio::spawn(async move { join_all((0..2).map(|family| asking.answer(prompt(family, 100)))).await });
    pass(&harness, &[&a, &b], 120).await;
    assert_eq!((a.requests(), b.requests(), is_ejected(&harness, 1), is_ejected(&harness, 2)), (1, 1, false, false));
    answers.abort();
}

/// Two servers that send no output for `silent`, and the answer to a request whose response comes whole. It has at
/// most ten tokens, so that it is overdue after 12 s.
async fn silent_servers(silent: Duration) -> (Arc<Harness>, [Arc<FakeEngine>; 2], JoinHandle<Result<Vec<u32>, Error>>) {
    let harness = Arc::new(defaults());
    let servers = [harness.relayed_worker(1).await, harness.relayed_worker(2).await];
    for (id, server) in (1..).zip(&servers) {
        *server.server.lock() = Some(id);
        server.set_behaviour(Behaviour::ServeAfter(silent));
    }
    let stop = StopConditions { max_tokens: Some(10), ..StopConditions::default() };
    let request = relayed_as(false, "/v1/completions", Request { stop, ..prompt(1, 100) });
    let asking = Arc::clone(&harness);
    let answer = tokio::spawn(async move { asking.answer(request).await });
    pass(&harness, &[&servers[0], &servers[1]], 2).await;
    (harness, servers, answer)
}

#[tokio::test(start_paused = true)]
async fn a_long_response_that_comes_whole_stays_on_a_server_that_answers_health_checks() {
    let (harness, [a, b], answer) = silent_servers(Duration::from_secs(200)).await;
    pass(&harness, &[&a, &b], 210).await;
    assert_eq!(answer.await.unwrap(), Ok(vec![1, 2]));
    assert_eq!((a.requests() + b.requests(), is_ejected(&harness, 1), is_ejected(&harness, 2)), (1, false, false));
    let computing = if a.requests() == 1 { &a } else { &b };
    assert!(probes(computing) > 20, "{} health checks while the response was overdue", probes(computing));
}

#[tokio::test(start_paused = true)]
async fn a_response_that_comes_whole_is_asked_elsewhere_if_the_health_check_fails() {
    let (harness, [a, b], answer) = silent_servers(Duration::from_secs(1000)).await;
    let (computing, other, id) = if a.requests() == 1 { (&a, &b, 1) } else { (&b, &a, 2) };
    computing.set_behaviour(Behaviour::Hang);
    other.set_behaviour(Behaviour::Serve);
    pass(&harness, &[&a, &b], 60).await;
    assert!(answer.is_finished());
    assert_eq!(answer.await.unwrap(), Ok(vec![1, 2]));
    assert_eq!((computing.requests(), other.requests(), is_ejected(&harness, id)), (1, 1, true));
}

/// Two servers of which the first hangs, after its health check has begun. Each has a request of a prompt that takes
/// ten seconds, so that it is overdue after 110 s.
async fn server_that_hangs_with_a_request() -> (Arc<Harness>, [Arc<FakeEngine>; 2], JoinHandle<bool>) {
    let harness = Arc::new(defaults());
    let (a, b) = (harness.relayed_worker(1).await, harness.relayed_worker(2).await);
    (*a.server.lock(), *b.server.lock()) = (Some(1), Some(2));
    a.set_behaviour(Behaviour::Hang);
    while probes(&a) == 0 {
        pass(&harness, &[&a, &b], 1).await;
    }
    let asking = Arc::clone(&harness);
    let answers = tokio::spawn(async move {
        let ask = |family| asking.answer(relayed_as(true, "/v1/completions", prompt(family, 10_000)));
        join_all((0..2).map(ask)).await.iter().all(Result::is_ok)
    });
    pass(&harness, &[&a, &b], 2).await;
    assert_eq!((a.requests(), b.requests(), is_ejected(&harness, 1)), (1, 1, false));
    (harness, [a, b], answers)
}

#[tokio::test(start_paused = true)]
async fn a_request_without_output_leaves_a_server_whose_health_check_fails() {
    let (harness, [a, b], answers) = server_that_hangs_with_a_request().await;
    // The check fails 10 s after it began; the other server needs 10 s for each of the two.
    pass(&harness, &[&a, &b], 30).await;
    assert!(answers.is_finished() && answers.await.unwrap());
    assert_eq!((a.requests(), b.requests(), is_ejected(&harness, 1)), (1, 2, true));
}

#[tokio::test(start_paused = true)]
async fn a_request_stays_on_a_server_with_output_whose_health_check_fails() {
    let (harness, [a, b], answers) = server_that_hangs_with_a_request().await;
    let server = harness.router.core.fleet.snapshot().get(WorkerId(1)).unwrap().clone();
    for _ in 0..60 {
        server.record_output(Instant::now());
        pass(&harness, &[&a, &b], 1).await;
    }
    assert_eq!((a.requests(), b.requests(), is_ejected(&harness, 1)), (1, 1, true));
    // Without output, until the next check has failed.
    pass(&harness, &[&a, &b], 40).await;
    assert!(answers.is_finished() && answers.await.unwrap());
    assert_eq!((a.requests(), b.requests()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_server_that_hangs_is_found_although_its_clients_leave_early() {
    let harness = Arc::new(defaults());
    let server = harness.relayed_worker(1).await;
    *server.server.lock() = Some(1);
    server.set_behaviour(Behaviour::Hang);
    let asking = Arc::clone(&harness);
    let clients = tokio::spawn(async move {
        // The server always has a request. No client leaves at the moment at which due checks are started.
        for family in 0..20 {
            let request = relayed_as(true, "/v1/completions", prompt(family, 100));
            let _ = tokio::time::timeout(Duration::from_millis(1999), asking.answer(request)).await;
        }
    });
    pass(&harness, &[&server], 30).await;
    clients.abort();
    assert!(probes(&server) > 0 && is_ejected(&harness, 1), "{} health checks", probes(&server));
}
