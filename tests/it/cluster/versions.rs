//! Processes that differ: in the number of their protocol, in the weights of a model, in their clocks.

use super::*;
use std::fs;
use std::io::Read;
use std::net::TcpStream;

/// Publishes messages to the NATS server of the tests, without a library: its protocol is text. Each has the time to
/// live of a lease, without which a record does not count.
fn publish(server: &str, messages: &[(String, Vec<u8>)]) {
    let mut socket = TcpStream::connect(server.strip_prefix("nats://").unwrap()).unwrap();
    socket.write_all(b"CONNECT {\"verbose\":false,\"headers\":true}\r\n").unwrap();
    let headers = "NATS/1.0\r\nNats-TTL: 6\r\n\r\n";
    for (subject, payload) in messages {
        let (header_bytes, bytes) = (headers.len(), headers.len() + payload.len());
        socket.write_all(format!("HPUB {subject} {header_bytes} {bytes}\r\n{headers}").as_bytes()).unwrap();
        socket.write_all(&[payload, &b"\r\n"[..]].concat()).unwrap();
    }
    socket.write_all(b"PING\r\n").unwrap();
    let (mut answer, mut part) = (String::new(), [0; 4096]);
    while !answer.contains("PONG") {
        let count = socket.read(&mut part).unwrap();
        answer.push_str(std::str::from_utf8(&part[..count]).unwrap());
        assert!(count > 0 && !answer.contains("-ERR"), "{answer}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_with_other_protocol_numbers_are_refused_by_their_number() {
    let Some(cluster) = Cluster::new() else { return };
    let worker = cluster.worker(&cluster.seat("a")).await;
    let frontend = cluster.frontend().await;
    let [server, prefix, bucket] = &cluster.nats[..] else { panic!("three settings") };
    let value = |setting: &str| setting.split_once('=').unwrap().1.to_owned();
    let (prefix, bucket) = (value(prefix), value(bucket));
    let record = |id: u32, protocol: u32| {
        let record = json!({"protocol": protocol, "process": "other", "address": "http://127.0.0.1:1",
            "instance": {"epoch": 1}});
        (format!("$KV.{bucket}.instances.{id}"), record.to_string().into_bytes())
    };
    let event = |protocol: u8| (format!("{prefix}.events.cache.worker.7"), vec![protocol, 0, 0]);
    // The one before this one, and the one after it. Events and requests have numbers of their own.
    publish(server, &[record(7, 0), record(8, 2), event(0), event(2)]);
    let refused = async |kind: &str| frontend.client.metric("blockyard_nats_refused_total", kind).await;
    while refused("kind=\"instance\"").await < 2.0 || refused("kind=\"event\"").await < 2.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The log is written by another thread than the one that counts.
    let named = |protocol| format!("protocol number {protocol}, this process has 1");
    while !(frontend.log().contains(&named(0)) && frontend.log().contains(&named(2))) {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!(frontend.client.metric("blockyard_router_workers", "").await < 2.0);
    for protocol in ["2", "4"] {
        let request = client().post(format!("{}/workers/1/generate", worker.client.url));
        // Those with number 2 send the secret itself.
        let request = request.header("authorization", "Bearer 0123456789abcdef0123456789abcdef");
        let response = request.header("x-blockyard-protocol", protocol).send().await.unwrap();
        assert_eq!(response.status().as_u16(), 400);
        let text = response.text().await.unwrap();
        assert!(text.contains(&format!("protocol number {protocol}, this worker 3")), "{text}");
    }
    frontend.client.complete(&prompt(1)).await.unwrap();
}

/// A copy of a model of the fixtures, in a folder of the same name whatever `nth` is. Other weights if `nth` is not 0.
fn model(cluster: &Cluster, nth: u8) -> String {
    let from = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/reference/llama");
    let to = cluster.folder.path().join(format!("models-{nth}")).join("model");
    fs::create_dir_all(&to).unwrap();
    for file in fs::read_dir(from).unwrap().map(|file| file.unwrap().path()) {
        fs::copy(&file, to.join(file.file_name().unwrap())).unwrap();
    }
    if nth > 0 {
        let path = to.join("model.safetensors");
        let mut weights = fs::read(&path).unwrap();
        let header = 8 + u64::from_le_bytes(weights[..8].try_into().unwrap()) as usize;
        // The second half moves by four bytes, which are whole elements: finite numbers stay finite.
        let half = ((weights.len() - header) / 2) & !3;
        weights[header + half..].rotate_right(4);
        fs::write(path, weights).unwrap();
    }
    to.to_str().unwrap().to_owned()
}

#[tokio::test(flavor = "multi_thread")]
async fn workers_with_other_weights_under_one_name_share_no_block_and_no_stream() {
    let Some(cluster) = Cluster::new() else { return };
    let store = cluster.folder.path().join("store");
    let store = store.to_str().unwrap();
    let ask = async |frontend: &Process, seed: u32| {
        let prompt: Vec<u32> = (0..64).map(|i| (i * 7 + seed * 31) % 90 + 5).collect();
        let body = json!({"model": "model", "prompt": prompt, "max_tokens": 16, "temperature": 0});
        let request = client().post(format!("{}/v1/completions", frontend.client.url)).json(&body);
        let answer: Value = request.send().await.unwrap().json().await.unwrap();
        let text = answer["choices"][0]["text"].as_str().unwrap_or_else(|| panic!("{answer}")).to_owned();
        (text, answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap())
    };
    // What each of the two answers alone.
    let (seats, mut alone) = ([cluster.seat("a"), cluster.seat("b")], Vec::new());
    let models = [model(&cluster, 0), model(&cluster, 1)];
    let worker = async |nth: usize| cluster.worker_at(&seats[nth], &["--model", &models[nth], "--g4", store]).await;
    for nth in 0..2 {
        let mut only = worker(nth).await;
        let frontend = cluster.frontend().await;
        let mut texts = Vec::new();
        for seed in 0..4 {
            texts.push(ask(&frontend, seed).await.0);
        }
        alone.push(texts);
        only.stop();
    }
    assert_ne!(alone[0], alone[1]);
    // Both, with the blocks of both in one store.
    let workers = [worker(0).await, worker(1).await];
    let frontend = cluster.frontend().await;
    until_workers(&frontend, 2).await;
    // The log is written by another thread.
    while !frontend.log().contains("workers have different weights under this name") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for _ in 0..3 {
        for seed in 0..4 {
            let (text, _) = ask(&frontend, seed).await;
            let by = (0..2).find(|nth| alone[*nth][seed as usize] == text);
            assert!(by.is_some(), "{text:?} is of neither: {alone:?}");
        }
    }
    let corrupt = async |nth: usize| workers[nth].client.metric("blockyard_tier_corrupt_blocks_total", "").await;
    assert!(corrupt(0).await + corrupt(1).await < 1.0);
}

/// Asks until a worker has answered. A frontend may not know yet that the last worker has left, or that the next one is
/// there.
async fn until_answered(frontend: &Process, prompt: &[u32]) -> Value {
    loop {
        let answer = frontend.client.ask(prompt).await.unwrap();
        if answer["choices"][0]["text"].is_string() {
            return answer;
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn clocks_that_are_wrong_by_an_hour_break_nothing() {
    let Some(cluster) = Cluster::new() else { return };
    let library = cluster.folder.path().join("clock.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/clock.c");
    let mut compiler = Command::new("cc");
    compiler.args(["-O1", "-shared", "-fPIC", "-o"]).args([&library, &source]).arg("-ldl");
    assert!(compiler.status().unwrap().success());
    let store = cluster.folder.path().join("store");
    let collects = ["--g4", store.to_str().unwrap(), "--set", "tiers.g3=off", "--set", "tiers.g4.max_age=24h"];
    let often = ["--set", "tiers.g4.gc_interval=1s", "--set", "tiers.g4.gc_grace=10m"];
    let worker = async |seat: &Seat, offset: i64| {
        let mut command = cluster.worker_command(seat, &[&collects[..], &often[..]].concat());
        command.env("LD_PRELOAD", &library).env("CLOCK_OFFSET_SECONDS", offset.to_string());
        Process::launch(command).await
    };
    let seats = [cluster.seat("a"), cluster.seat("b")];
    let mut ahead = worker(&seats[0], 3600).await;
    let frontend = cluster.frontend().await;
    let mut texts = Vec::new();
    for seed in 0..4 {
        texts.push(frontend.client.complete(&prompt(seed)).await.unwrap().0["text"].clone());
    }
    ahead.stop();
    // The blocks that one wrote are found by the other, whose clock is two hours behind.
    let behind = worker(&seats[1], -3600).await;
    while behind.client.metric("blockyard_tier_blocks", "tier=\"g4\"").await < 4.0 * 18.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let mut cached = 0;
    for (seed, text) in (0..).zip(&texts) {
        let answer = until_answered(&frontend, &prompt(seed)).await;
        assert_eq!(answer["choices"][0]["text"], *text);
        // Where reading is slower than computing, some of the blocks are computed.
        cached += answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    }
    assert!(cached > 0);
    let runs = "outcome=\"completed\"";
    while behind.client.metric("blockyard_tier_gc_runs_total", runs).await < 2.0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let deleted = "state=\"deleted\"";
    assert!(behind.client.metric("blockyard_tier_gc_objects_total", deleted).await < 1.0, "nothing is too old");
    // A worker is killed, and starts again with a clock that is an hour behind: its epoch is an earlier one.
    let mut before = worker(&seats[0], 3600).await;
    until_workers(&frontend, 2).await;
    before.kill();
    let again = worker(&seats[0], 0).await;
    until_workers(&frontend, 2).await;
    drop(behind);
    for (seed, text) in (0..).zip(&texts) {
        let answer = until_answered(&frontend, &prompt(seed)).await;
        assert_eq!(answer["choices"][0]["text"], *text);
    }
    // Leases are judged by the server of NATS: both would have expired otherwise.
    tokio::time::sleep(Duration::from_secs(8)).await;
    frontend.client.complete(&prompt(9)).await.unwrap();
    drop(again);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_whose_last_worker_left_is_unavailable_and_not_unknown() {
    let Some(cluster) = Cluster::new() else { return };
    let other = model(&cluster, 0);
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let _tiny = cluster.worker(&first).await;
    let mut leaves = cluster.worker_at(&second, &["--model", &other]).await;
    let frontend = cluster.frontend().await;
    until_workers(&frontend, 2).await;
    let ask = async |model: &str| {
        let body = json!({"model": model, "prompt": [5, 6, 7], "max_tokens": 1});
        client().post(format!("{}/v1/completions", frontend.client.url)).json(&body).send().await.unwrap()
    };
    assert_eq!(ask("model").await.status().as_u16(), 200);
    leaves.stop();
    let response = loop {
        let response = ask("model").await;
        if response.status().as_u16() != 200 {
            break response;
        }
    };
    assert_eq!((response.status().as_u16(), response.headers()["retry-after"].to_str().unwrap()), (503, "5"));
    let text = response.text().await.unwrap();
    assert!(text.contains("`model` has no worker now"), "{text}");
    assert_eq!(ask("unknown").await.status().as_u16(), 404);
    assert_eq!(ask("tiny").await.status().as_u16(), 200);
}
