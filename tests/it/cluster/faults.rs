//! What happens to requests when parts of a deployment fail: NATS, a worker that freezes, a frontend, an address that
//! two workers claim.

use super::*;
use std::process::{Child, Stdio};

/// A NATS server of this test, which can be stopped and started again.
pub(super) struct Nats {
    program: String,
    folder: TempDir,
    pub(super) port: u16,
    process: Child,
}

impl Nats {
    /// `None` without the program.
    pub(super) async fn start() -> Option<Self> {
        let Ok(program) = std::env::var("WORKER_TEST_NATS_SERVER") else {
            let _ = writeln!(std::io::stderr(), "SKIPPED: no program in WORKER_TEST_NATS_SERVER; `make test` sets it");
            return None;
        };
        let folder = tempfile::tempdir().unwrap();
        let port = free_port();
        let process = Self::spawn(&program, &folder, port).await;
        Some(Self { program, folder, port, process })
    }

    async fn spawn(program: &str, folder: &TempDir, port: u16) -> Child {
        let mut command = Command::new(program);
        command.args(["-js", "-a", "127.0.0.1", "-p", &port.to_string(), "-sd"]).arg(folder.path());
        let process = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
        while tokio::net::TcpStream::connect(("127.0.0.1", port)).await.is_err() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        process
    }

    pub(super) fn stop(&mut self) {
        self.process.kill().unwrap();
        self.process.wait().unwrap();
    }

    pub(super) async fn start_again(&mut self) {
        self.process = Self::spawn(&self.program, &self.folder, self.port).await;
    }
}

impl Drop for Nats {
    fn drop(&mut self) {
        self.stop();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_served_while_nats_is_away() {
    let Some(mut nats) = Nats::start().await else { return };
    let cluster = Cluster::at(format!("nats://127.0.0.1:{}", nats.port));
    let worker = cluster.worker(&cluster.seat("a")).await;
    let frontend = cluster.frontend().await;
    let (choice, _) = frontend.client.complete(&prompt(1)).await.unwrap();
    nats.stop();
    while frontend.client.metric("blockyard_nats_connected", "").await > 0.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (again, cached) = frontend.client.complete(&prompt(1)).await.unwrap();
    assert_eq!((again["text"].clone(), cached), (choice["text"].clone(), 288));
    let clients = SteadyClients::start(&frontend.client, 3);
    // 14 s, so that every time has passed after which a frontend could remove the worker: the longest are the two
    // leases of 6 s after which it notices the end of all workers.
    for _ in 0..28 {
        let (again, _) = frontend.client.complete(&prompt(1)).await.unwrap();
        assert_eq!(again["text"], choice["text"]);
        for process in [&frontend, &worker] {
            let (is_ready, body) = process.client.get("/ready").await;
            assert!(is_ready && body.contains("not connected to NATS"), "{body}");
        }
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    nats.start_again().await;
    let other = cluster.worker(&cluster.seat("b")).await;
    until_workers(&frontend, 2).await;
    clients.stop().await;
    until_cached(&frontend, &prompt(1)).await;
    assert!(!frontend.client.get("/ready").await.1.contains("NATS"));
    drop(other);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_when_its_worker_is_killed_while_nats_is_away() {
    let Some(mut nats) = Nats::start().await else { return };
    let cluster = Cluster::at(format!("nats://127.0.0.1:{}", nats.port));
    let mut fleet = Fleet::start(&cluster, 2, &[]).await;
    nats.stop();
    while fleet.frontend.client.metric("blockyard_nats_connected", "").await > 0.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let (_, texts) = fleet.kill_in_mid_stream(&greedy(1, 1500)).await;
    assert!(fleet.frontend.client.metric("blockyard_nats_connected", "").await < 1.0, "it was away for all of this");
    fleet.assert_undisturbed(&greedy(1, 1500), &texts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_when_its_worker_freezes_and_the_worker_comes_back() {
    let Some(cluster) = Cluster::new() else { return };
    let fleet = Fleet::start(&cluster, 2, &[]).await;
    let frontend = &fleet.frontend;
    let stream = fleet.begun(&greedy(1, 1500)).await;
    let frozen = &fleet.workers[fleet.busy().await];
    let clients = SteadyClients::start(&frontend.client, 3);
    frozen.signal("STOP");
    let texts = stream.read_to_the_end().await;
    let log = frontend.log();
    let line = "the worker has left or is late, and does not answer";
    assert!(log.contains(line), "found when its lease ended, not by a ping: {log}");
    assert!(fleet.moves("continued").await > 0.0);
    frozen.signal("CONT");
    until_workers(frontend, 2).await;
    clients.stop().await;
    fleet.assert_undisturbed(&greedy(1, 1500), &texts).await;
    while frozen.client.metric("blockyard_worker_requests_running", "").await > 0.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// Its lease does not end.
#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_freezes_while_nats_is_away_gets_no_request_until_it_answers() {
    let Some(mut nats) = Nats::start().await else { return };
    let cluster = Cluster::at(format!("nats://127.0.0.1:{}", nats.port));
    let fleet = Fleet::start(&cluster, 2, &[]).await;
    let frontend = &fleet.frontend;
    nats.stop();
    while frontend.client.metric("blockyard_nats_connected", "").await > 0.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let stream = fleet.begun(&greedy(1, 1500)).await;
    let frozen = &fleet.workers[fleet.busy().await];
    frozen.signal("STOP");
    let texts = stream.read_to_the_end().await;
    let log = frontend.log();
    assert!(log.contains("no answer to GET /live"), "found by a check of its connection: {log}");
    assert!(fleet.moves("continued").await > 0.0);
    let mut prompts = (2..).map(prompt);
    for prompt in prompts.by_ref().take(8) {
        frontend.client.complete(&prompt).await.unwrap();
    }
    let retries = frontend.client.metric("blockyard_router_retries_total", "").await;
    assert!(retries < 1.0, "{retries} requests waited for it: {}", frontend.log());
    assert!(frontend.client.metric("blockyard_nats_connected", "").await < 1.0, "it was away for all of this");
    frozen.signal("CONT");
    let computed = async || frozen.client.metric("blockyard_worker_prompt_tokens_computed_total", "").await;
    let before = computed().await;
    // Health checks have one token each.
    while computed().await < before + 200.0 {
        frontend.client.complete(&prompts.next().unwrap()).await.unwrap();
    }
    fleet.assert_undisturbed(&greedy(1, 1500), &texts).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_stop_computing_for_a_frontend_that_was_killed_and_streams_of_another_go_on() {
    let Some(cluster) = Cluster::new() else { return };
    let worker = cluster.worker(&cluster.seat("a")).await;
    let (mut killed, other) = tokio::join!(cluster.frontend(), cluster.frontend());
    let mut broken = Streamed::start(&killed, &greedy(1, 10_000)).await;
    let mut kept = Streamed::start(&other, &greedy(2, 1500)).await;
    for stream in [&mut broken, &mut kept] {
        stream.read_more(100).await;
    }
    killed.kill();
    let texts = kept.read_to_the_end().await;
    while worker.client.metric("blockyard_worker_requests_running", "").await > 0.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(worker.client.metric("blockyard_worker_generated_tokens_total", "").await < 11_500.0);
    assert!(other.client.metric("blockyard_router_stream_moves_total", "").await < 1.0, "the stream was not disturbed");
    let undisturbed = Streamed::start(&other, &greedy(2, 1500)).await.read_to_the_end().await;
    assert!(texts == undisturbed, "{texts:?}\n{undisturbed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_prefilled_in_another_process_until_that_is_killed() {
    let Some(cluster) = Cluster::new() else { return };
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let mut prefill = cluster.worker_at(&first, &["--workers", "prefill:1"]).await;
    let decode = cluster.worker_at(&second, &["--workers", "decode:1"]).await;
    let frontend = cluster.frontend_with(&["--set", "router.disaggregation=always"]).await;
    until_workers(&frontend, 2).await;
    let handed_over = async || decode.client.metric("blockyard_tier_transfer_bytes_total", "tier=\"peer\"").await;
    let mut answered = Vec::new();
    // A hand-over that does not begin in time is abandoned, and the prompt computed.
    while handed_over().await == 0.0 {
        let seed = answered.len() as u32;
        answered.push(frontend.client.complete(&prompt(seed)).await.unwrap().0["text"].clone());
    }
    let remote = "outcome=\"remote_prefill\"";
    assert!(frontend.client.metric("blockyard_router_disaggregated_requests_total", remote).await > 0.0);
    assert!(prefill.client.metric("blockyard_worker_prompt_tokens_computed_total", "").await > 0.0);
    let clients = SteadyClients::start(&frontend.client, 3);
    prefill.kill();
    // The decode worker computes the prompts itself, also before the lease of the other one expires.
    let fresh = cluster.seat("c");
    for seed in 100..103 {
        frontend.client.complete(&prompt(seed)).await.unwrap();
    }
    clients.stop().await;
    let alone = cluster.worker(&fresh).await;
    drop(decode);
    until_workers(&frontend, 1).await;
    for (seed, text) in answered.into_iter().enumerate() {
        let choice = loop {
            let answer = frontend.client.ask(&prompt(seed as u32)).await.unwrap();
            if answer["choices"][0]["text"].is_string() {
                break answer["choices"][0]["text"].clone();
            }
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        assert_eq!(choice, text, "a worker that does both gives the same text");
    }
    drop(alone);
}

#[tokio::test(flavor = "multi_thread")]
async fn of_two_processes_at_one_url_the_later_one_serves() {
    let Some(cluster) = Cluster::new() else { return };
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let url = format!("http://{}", second.listen);
    let before = cluster.worker_at(&first, &["--advertise", &url]).await;
    let after = cluster.worker_at(&second, &["--advertise", &url]).await;
    let frontend = cluster.frontend().await;
    for seed in 0..4 {
        frontend.client.complete(&prompt(seed)).await.unwrap();
    }
    assert!(after.client.metric("blockyard_worker_prompt_tokens_computed_total", "").await > 0.0);
    while before.client.metric("blockyard_nats_lease_renewals_total", "superseded").await < 1.0 {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_serves_again_when_a_later_process_at_its_url_has_stopped() {
    let Some(cluster) = Cluster::new() else { return };
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let before = cluster.worker(&first).await;
    let frontend = cluster.frontend().await;
    frontend.client.complete(&prompt(0)).await.unwrap();
    let url = format!("http://{}", first.listen);
    let mut after = cluster.worker_at(&second, &["--advertise", &url]).await;
    let reason = loop {
        let (is_ready, body) = before.client.get("/ready").await;
        if !is_ready {
            break body;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    };
    assert!(reason.contains("another process serves it"), "{reason}");
    assert!(before.client.metric("blockyard_nats_superseded_workers", "").await > 0.0);
    after.stop();
    while !before.client.get("/ready").await.0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    while frontend.client.ask(&prompt(1)).await.unwrap()["choices"].is_null() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}
