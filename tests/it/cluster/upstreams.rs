//! Frontends with servers of other programs, here scripted ones, beside workers.

use super::faults::Nats;
use super::*;
use crate::upstreams::{MESSAGES, publish};
use upstream::kv_events::fake::FakePublisher;
use upstream::relay::fake::{FakeEngine, Script};

/// A server that lists a model.
async fn server(model: &str) -> FakeEngine {
    let server = FakeEngine::start([]).await.unwrap();
    server.set_page("/v1/models", Script::json(200, &json!({ "data": [{ "id": model, "max_model_len": 4096 }] })));
    server
}

/// A server that publishes its KV events.
async fn publishing_server(model: &str) -> (FakeEngine, FakePublisher) {
    let (server, publisher) = (server(model).await, FakePublisher::start().await.unwrap());
    let source = json!([{ "endpoint": format!("tcp://*:{}", publisher.port()), "block_size": 32 }]);
    server.set_page("/kv_event_sources", Script::json(200, &source));
    (server, publisher)
}

impl Cluster {
    /// A frontend with upstreams and an admin API.
    async fn gateway(&self, servers: &[&FakeEngine], more: &[&str]) -> Process {
        let urls: Vec<String> = servers.iter().map(|server| server.uri().to_string()).collect();
        let upstreams = urls.iter().flat_map(|url| ["--upstream", url.as_str()]);
        let own = ["--set", "admin.listen=127.0.0.1:0"];
        self.frontend_with(&own.into_iter().chain(upstreams).chain(more.iter().copied()).collect::<Vec<_>>()).await
    }
}

/// The completions that a server got.
fn completions(server: &FakeEngine) -> usize {
    server.requests().iter().filter(|request| request.uri.path() == "/v1/completions").count()
}

async fn send(frontend: &Process, model: &str, prompt: &[u32]) -> reqwest::Response {
    let body = json!({ "model": model, "prompt": prompt, "max_tokens": 4 });
    let request = client().post(format!("{}/v1/completions", frontend.client.url)).json(&body);
    request.header("x-blockyard-explain", "1").send().await.unwrap()
}

/// The decision about a completion: the chosen worker, and how many tokens it is expected to have.
async fn decision(frontend: &Process, model: &str, prompt: &[u32]) -> (String, u64) {
    let answer = send(frontend, model, prompt).await;
    let (status, headers) = (answer.status(), answer.headers().clone());
    let text = answer.text().await.unwrap();
    assert_eq!(status, 200, "{text}\n{}", frontend.log());
    let decision: Value = serde_json::from_str(headers["x-blockyard-explain"].to_str().unwrap()).unwrap();
    (decision["chosen"].as_str().unwrap().to_owned(), decision["cached_tokens"].as_u64().unwrap())
}

/// `GET /admin/workers`.
async fn workers(frontend: &Process) -> Vec<Value> {
    let url = format!("{}/admin/workers", frontend.client.admin.as_ref().unwrap());
    client().get(url).header("x-blockyard-admin", "1").send().await.unwrap().json().await.unwrap()
}

/// The ids of the workers of a model.
async fn ids(frontend: &Process, model: &str) -> Vec<String> {
    let all = workers(frontend).await;
    let of_model = all.iter().filter(|worker| worker["model"] == model);
    of_model.map(|worker| worker["worker"].as_str().unwrap().to_owned()).collect()
}

async fn models(frontend: &Process) -> Vec<String> {
    let (_, listed) = frontend.client.get("/v1/models").await;
    let listed: Value = serde_json::from_str(&listed).unwrap();
    listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap().to_owned()).collect()
}

/// Waits until frontends know of each other: reservations of a router without peers are not sent.
async fn until_replicas(frontends: [&Process; 2]) {
    for frontend in frontends {
        while frontend.client.metric("blockyard_router_replicas", "").await < 2.0 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prompt_goes_to_the_server_that_has_its_prefix_from_either_frontend() {
    let Some(cluster) = Cluster::new() else { return };
    let ((one, _quiet), (other, publisher)) = (publishing_server("org/m").await, publishing_server("org/m").await);
    let _worker = cluster.worker(&cluster.seat("a")).await;
    let aliases = ["--set", "aliases.chat=org/m", "--set", "aliases.small=tiny"];
    let servers = [&one, &other];
    let (left, right) = tokio::join!(cluster.gateway(&servers, &aliases), cluster.gateway(&servers, &aliases));
    until_workers(&left, 3).await;
    until_workers(&right, 3).await;
    let known = [ids(&left, "org/m").await, ids(&right, "org/m").await];
    assert_eq!((known[0].len(), &known[0]), (2, &known[1]), "a server has one id in all frontends");

    publish(&publisher, MESSAGES.lines().next().unwrap());
    let prompt: Vec<u32> = (100..200).collect();
    let mut chosen = Vec::new();
    for frontend in [&left, &right] {
        while decision(frontend, "org/m", &prompt).await.1 != 96 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let before = (completions(&one), completions(&other));
        chosen.push(decision(frontend, "org/m", &prompt).await.0);
        assert_eq!(decision(frontend, "chat", &prompt).await, (chosen[0].clone(), 96), "an alias of the same model");
        assert_eq!((completions(&one), completions(&other)), (before.0, before.1 + 2));
    }
    assert_eq!(chosen[0], chosen[1]);

    for frontend in [&left, &right] {
        let prompt = super::prompt(1);
        frontend.client.complete(&prompt).await.unwrap();
        let (worker, _) = decision(frontend, "small", &prompt).await;
        assert_eq!(ids(frontend, "tiny").await, [worker], "an alias of a model of workers");
        assert_eq!(models(frontend).await, ["chat", "org/m", "small", "tiny"]);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_reservation_of_one_frontend_counts_at_the_other() {
    let Some(cluster) = Cluster::new() else { return };
    let (one, other) = (server("org/m").await, server("org/m").await);
    let servers = [&one, &other];
    // Ready without any worker.
    let (left, right) = tokio::join!(cluster.gateway(&servers, &[]), cluster.gateway(&servers, &[]));
    until_workers(&left, 2).await;
    until_workers(&right, 2).await;
    until_replicas([&left, &right]).await;
    for server in servers {
        server.set_page("/v1/completions", Script::completion(&["a", "b"], None).hanging_after(1));
    }
    let body = json!({ "model": "org/m", "prompt": prompt(1), "max_tokens": 500, "stream": true });
    let stream = Streamed::start(&left, &body).await;
    let busy = async |frontend: &Process| {
        let busy = workers(frontend).await.into_iter().filter(|worker| worker["requests"] == 1);
        busy.map(|worker| worker["worker"].as_str().unwrap().to_owned()).collect::<Vec<_>>()
    };
    let reserved = busy(&left).await;
    assert_eq!(reserved.len(), 1);
    while busy(&right).await != reserved {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The servers have no metrics: only the reservation can say that one of them has a request.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(busy(&right).await, reserved, "load reports do not hide it");
    drop(stream);
    while !busy(&left).await.is_empty() || !busy(&right).await.is_empty() {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }

    // Prompts that are not computed yet: the second frontend avoids the server of the first.
    for server in servers {
        server.set_page("/v1/completions", Script::completion(&["a", "b"], None).hanging_after(0));
    }
    let start = async |frontend: &Process, seed: u32, count: usize| {
        let url = format!("{}/v1/completions", frontend.client.url);
        let body = json!({ "model": "org/m", "prompt": prompt(seed), "max_tokens": 500, "stream": true });
        let request = tokio::spawn(client().post(url).json(&body).send()).abort_handle();
        while busy(&right).await.len() < count {
            assert!(!request.is_finished());
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        request
    };
    let before = (completions(&one), completions(&other));
    let requests = [start(&left, 2, 1).await, start(&right, 3, 2).await];
    while completions(&one) + completions(&other) < before.0 + before.1 + 2 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!((completions(&one), completions(&other)), (before.0 + 1, before.1 + 1));
    requests.iter().for_each(tokio::task::AbortHandle::abort);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_session_has_the_same_server_at_every_frontend() {
    let Some(cluster) = Cluster::new() else { return };
    let (one, other) = (server("org/m").await, server("org/m").await);
    let policy = ["--set", "router.policy=session"];
    // The order of the upstreams makes no difference.
    let (here, there) = ([&one, &other], [&other, &one]);
    let (left, right) = tokio::join!(cluster.gateway(&here, &policy), cluster.gateway(&there, &policy));
    until_workers(&left, 2).await;
    until_workers(&right, 2).await;
    for session in 0..16 {
        let body = json!({ "model": "org/m", "prompt": prompt(session), "user": format!("session {session}") });
        let mut counts = vec![[completions(&one), completions(&other)]];
        for frontend in [&left, &right] {
            let answer = client().post(format!("{}/v1/completions", frontend.client.url)).json(&body).send().await;
            assert_eq!(answer.unwrap().status(), 200);
            counts.push([completions(&one), completions(&other)]);
        }
        let sent = |at: usize| [counts[at][0] - counts[at - 1][0], counts[at][1] - counts[at - 1][1]];
        assert_eq!(sent(1), sent(2), "session {session}");
    }
    assert!(completions(&one) > 0 && completions(&other) > 0, "both have sessions");
}

#[tokio::test(flavor = "multi_thread")]
async fn upstreams_are_served_added_and_removed_while_nats_is_away() {
    let Some(mut nats) = Nats::start().await else { return };
    let cluster = Cluster::at(format!("nats://127.0.0.1:{}", nats.port));
    let (one, other) = (server("org/m").await, server("org/n").await);
    let file = cluster.folder.path().join("frontend.toml");
    let write = |upstreams: &[&FakeEngine]| {
        let urls: Vec<String> = upstreams.iter().map(|server| format!("'{}'", server.uri())).collect();
        std::fs::write(&file, format!("upstreams = [{}]\n", urls.join(", "))).unwrap();
    };
    let until_models = async |frontend: &Process, expected: &[&str]| {
        while models(frontend).await != expected {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    write(&[]);
    let _worker = cluster.worker(&cluster.seat("a")).await;
    let frontend = cluster.gateway(&[], &["--config", file.to_str().unwrap()]).await;
    // The first upstream of a frontend.
    write(&[&one]);
    until_models(&frontend, &["org/m", "tiny"]).await;
    nats.stop();
    while frontend.client.metric("blockyard_nats_connected", "").await > 0.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Longer than a lease.
    for _ in 0..16 {
        assert_eq!(send(&frontend, "org/m", &prompt(1)).await.status(), 200);
        frontend.client.complete(&prompt(1)).await.unwrap();
        assert!(frontend.client.get("/ready").await.0);
        tokio::time::sleep(Duration::from_millis(500)).await;
    }
    write(&[&one, &other]);
    until_models(&frontend, &["org/m", "org/n", "tiny"]).await;
    assert_eq!(send(&frontend, "org/n", &prompt(1)).await.status(), 200);
    write(&[&other]);
    until_models(&frontend, &["org/n", "tiny"]).await;
    nats.start_again().await;
    let _other = cluster.worker(&cluster.seat("b")).await;
    until_workers(&frontend, 3).await;
    assert_eq!(send(&frontend, "org/n", &prompt(1)).await.status(), 200);
    write(&[]);
    until_models(&frontend, &["tiny"]).await;
    assert_eq!(send(&frontend, "org/n", &prompt(1)).await.status(), 503, "it may come back");
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_serve_a_model_that_an_upstream_has_too() {
    let Some(cluster) = Cluster::new() else { return };
    let server = server("tiny").await;
    let mut worker = cluster.worker(&cluster.seat("a")).await;
    let frontend = cluster.gateway(&[&server], &[]).await;
    until_workers(&frontend, 2).await;
    for seed in 0..4 {
        frontend.client.complete(&prompt(seed)).await.unwrap();
    }
    assert_eq!(completions(&server), 0);
    assert_eq!(models(&frontend).await, ["tiny"]);
    let unused: Vec<bool> = workers(&frontend).await.iter().map(|worker| worker["unused"].is_string()).collect();
    assert_eq!(unused.iter().filter(|unused| **unused).count(), 1);
    assert!(frontend.log().contains("requests go to the workers only"), "{}", frontend.log());
    tokio::task::block_in_place(|| worker.stop());
    while !send(&frontend, "tiny", &prompt(1)).await.status().is_success() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    assert!(completions(&server) > 0, "without workers the upstream serves");
}
