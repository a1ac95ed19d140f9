//! Processes that are stopped while they serve: streams are finished or moved, and no request fails.

use super::faults::Nats;
use super::*;
use parking_lot::Mutex;

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_is_stopped_finishes_its_streams() {
    let Some(cluster) = Cluster::new() else { return };
    let fleet = Fleet::start(&cluster, 2, &[]).await;
    let stream = fleet.begun(&greedy(1, 1000)).await;
    fleet.workers[fleet.busy().await].signal("TERM");
    let texts = stream.read_to_the_end().await;
    assert!(fleet.moves("").await < 1.0, "{}", fleet.frontend.log());
    fleet.assert_undisturbed(&greedy(1, 1000), &texts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn streams_that_outlast_the_shutdown_timeout_of_a_worker_are_moved() {
    let Some(cluster) = Cluster::new() else { return };
    let mut fleet = Fleet::start(&cluster, 2, &["--set", "shutdown_timeout=1s"]).await;
    let seeded = json!({"model": "tiny", "prompt": prompt(2), "max_tokens": 4000, "temperature": 1, "seed": 5, "n": 2,
        "ignore_eos": true, "stream": true});
    let stream = fleet.begun(&seeded).await;
    let at = fleet.busy().await;
    let reading = tokio::spawn(stream.read_to_the_end());
    tokio::task::block_in_place(|| fleet.workers[at].stop());
    let texts = reading.await.unwrap();
    let log = fleet.workers[at].log();
    for line in ["the requests end here", "four fifths of its shutdown_timeout are over"] {
        assert!(log.contains(line), "{line}: {log}");
    }
    // The choices may be on both workers.
    assert!(fleet.moves("continued").await >= 1.0, "{}", fleet.frontend.log());
    fleet.start_again(at).await;
    fleet.assert_undisturbed(&seeded, &texts).await;
}

/// More workers are stopped under one stream than may fail it. None is started again: the stream would have to be
/// longer by the time of the starts. A second signal ends each at once: with one, each would compute the stream until
/// four fifths of its `shutdown_timeout` are over, which are thousands of tokens.
#[tokio::test(flavor = "multi_thread")]
async fn a_stream_outlives_each_worker_of_a_rolling_restart() {
    let Some(cluster) = Cluster::new() else { return };
    let mut fleet = Fleet::start(&cluster, 5, &[]).await;
    let mut stream = Streamed::start(&fleet.frontend, &greedy(1, 1500)).await;
    let mut stopped = Vec::new();
    for moves in 1..=4 {
        stream.read_more(100).await;
        let at = fleet.busy().await;
        let worker = fleet.workers.swap_remove(at);
        worker.signal("TERM");
        while fleet.frontend.client.metric("blockyard_router_workers", "").await > fleet.workers.len() as f64 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // A worker that sends outputs after it has left is one that was stopped.
        let generated = async || worker.client.metric("blockyard_worker_generated_tokens_total", "").await;
        let when_it_left = generated().await;
        while generated().await < when_it_left + 5.0 {
            tokio::time::sleep(Duration::from_millis(1)).await;
        }
        // Signals within 50 ms count as one.
        tokio::time::sleep(Duration::from_millis(60)).await;
        worker.signal("TERM");
        stopped.push(worker);
        while fleet.moves("continued").await < f64::from(moves) {
            stream.read().await;
        }
    }
    let texts = stream.read_to_the_end().await;
    for worker in stopped {
        let (status, log) = worker.wait();
        assert!(status.success(), "{status}: {log}");
    }
    fleet.assert_undisturbed(&greedy(1, 1500), &texts).await;
    assert!(fleet.moves("failed").await < 1.0);
}

/// Without G3 and G4 only the memory of the worker has the blocks.
#[tokio::test(flavor = "multi_thread")]
async fn prefixes_that_were_used_again_are_on_another_worker_when_theirs_has_ended() {
    let Some(cluster) = Cluster::new() else { return };
    let memory_only = ["--set", "tiers.g3=off"];
    let mut first = cluster.worker_at(&cluster.seat("a"), &memory_only).await;
    let frontend = cluster.frontend().await;
    let client = &frontend.client;
    let (choice, cached) = client.complete(&prompt(1)).await.unwrap();
    assert_eq!(cached, 0);
    for _ in 0..2 {
        assert_eq!(client.complete(&prompt(1)).await.unwrap().1, 288);
    }
    client.complete(&prompt(2)).await.unwrap();
    let second = cluster.worker_at(&cluster.seat("b"), &memory_only).await;
    until_workers(&frontend, 2).await;
    tokio::task::block_in_place(|| first.stop());
    let log = first.log();
    assert!(log.contains("prefixes copied to other workers"), "{log}");
    let (again, cached) = client.complete(&prompt(1)).await.unwrap();
    assert_eq!((again["text"].clone(), cached), (choice["text"].clone(), 288), "{log}");
    assert_eq!(client.complete(&prompt(2)).await.unwrap().1, 0, "one that was used once was not copied");
    assert!(second.client.metric("blockyard_worker_prefetches_total", "complete").await >= 1.0, "{log}");
}

/// Frontends, as a load balancer knows them.
type Balanced = Arc<Mutex<Vec<Client>>>;

/// Streams one completion through a frontend that is ready, as load balancers choose it. It may begin to shut down just
/// then.
async fn ask_any(frontends: &Balanced, nth: usize, body: &Value) -> Result<(), String> {
    let known = frontends.lock().clone();
    for frontend in known.iter().cycle().skip(nth).take(known.len()) {
        let is_ready = client()
            .get(format!("{}/ready", frontend.url))
            .send()
            .await
            .is_ok_and(|answer| answer.status().is_success());
        if !is_ready {
            continue;
        }
        let sent = client().post(format!("{}/v1/completions", frontend.url)).json(body).send().await;
        let response = sent.map_err(|error| error.to_string())?;
        let text = response.text().await.map_err(|error| format!("the stream broke: {error}"))?;
        let is_complete = text.contains("data: [DONE]") && !text.contains("\"error\"");
        return if is_complete { Ok(()) } else { Err(text) };
    }
    Err("no frontend is ready".to_owned())
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_fails_while_everything_is_restarted_in_turn() {
    let Some(mut nats) = Nats::start().await else { return };
    let cluster = Cluster::at(format!("nats://127.0.0.1:{}", nats.port));
    let seats = [cluster.seat("a"), cluster.seat("b")];
    let (first, second) = tokio::join!(cluster.worker(&seats[0]), cluster.worker(&seats[1]));
    let mut workers = [first, second];
    let noticed = ["--set", "frontend.shutdown_delay=1s"];
    let (left, right) = tokio::join!(cluster.frontend_with(&noticed), cluster.frontend_with(&noticed));
    let mut frontends = [left, right];
    for frontend in &frontends {
        until_workers(frontend, 2).await;
    }
    let balanced: Balanced = Arc::new(Mutex::new(frontends.iter().map(|frontend| frontend.client.clone()).collect()));
    let stop = Arc::new(AtomicBool::new(false));
    let clients = (0..4_u32).map(|nth| {
        let (balanced, stop) = (Arc::clone(&balanced), Arc::clone(&stop));
        tokio::spawn(async move {
            let mut answered = 0_u32;
            while !stop.load(Ordering::Relaxed) {
                let body = json!({"model": "tiny", "prompt": prompt(nth * 1000 + answered), "max_tokens": 100,
                    "temperature": 0, "ignore_eos": true, "stream": true});
                let answer = ask_any(&balanced, (nth + answered) as usize, &body).await;
                assert!(answer.is_ok(), "client {nth}, request {answered}: {answer:?}");
                answered += 1;
            }
            answered
        })
    });
    let clients: Vec<_> = clients.collect();
    for at in 0..2 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        tokio::task::block_in_place(|| workers[at].stop());
        workers[at] = cluster.worker(&seats[at]).await;
        for frontend in &frontends {
            until_workers(frontend, 2).await;
        }
    }
    nats.stop();
    tokio::time::sleep(Duration::from_secs(1)).await;
    nats.start_again().await;
    for frontend in &frontends {
        while frontend.client.metric("blockyard_nats_connected", "").await < 1.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
    for (at, frontend) in frontends.iter_mut().enumerate() {
        tokio::time::sleep(Duration::from_millis(300)).await;
        tokio::task::block_in_place(|| frontend.stop());
        *frontend = cluster.frontend_with(&noticed).await;
        until_workers(frontend, 2).await;
        balanced.lock()[at] = frontend.client.clone();
    }
    stop.store(true, Ordering::Relaxed);
    for client in clients {
        assert!(client.await.unwrap() > 0);
    }
}
