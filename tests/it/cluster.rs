//! Frontends and workers in separate processes, over a real NATS server.
//!
//! `make test` starts the server (`tests/servers/run.py`) and passes its URL in the environment; without it these tests
//! print that they were skipped.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

mod admin;
mod drain;
mod faults;
mod fleet;
mod handoff;
mod partitions;
mod proxy;
mod secrets;
mod tls;
mod traces;
mod upstreams;
mod versions;

use super::process::{Client, Process, client, client_builder, command, free_port};
use fleet::Fleet;
use futures::StreamExt;
use serde_json::{Value, json};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;
use tempfile::TempDir;
use tokio::task::JoinHandle;

/// Processes that find each other over NATS, under a prefix of their own.
pub(crate) struct Cluster {
    nats: Vec<String>,
    folder: TempDir,
    secret: PathBuf,
}

/// The folder and the address of a worker, which stay the same when it is started again.
pub(crate) struct Seat {
    data: String,
    listen: String,
}

impl Cluster {
    /// `None` without a NATS server.
    pub(crate) fn new() -> Option<Self> {
        let Ok(server) = std::env::var("WORKER_TEST_NATS") else {
            // Not `eprintln`: the test harness captures it.
            let _ = writeln!(std::io::stderr(), "SKIPPED: no NATS server in WORKER_TEST_NATS; `make test` starts one");
            return None;
        };
        Some(Self::at(server))
    }

    /// Processes at a NATS server.
    fn at(server: String) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let folder = tempfile::tempdir().unwrap();
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "0123456789abcdef0123456789abcdef\n").unwrap();
        // Tests share the server.
        let name = format!("it{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let nats = [server, format!("nats.prefix={name}"), format!("nats.bucket={name}")];
        Self { nats: nats.to_vec(), folder, secret }
    }

    fn arguments(&self) -> Vec<String> {
        let [server, prefix, bucket] = &self.nats[..] else { panic!("three settings") };
        let secret = self.secret.to_str().unwrap();
        let common = ["--json", "--nats", server, "--set", prefix, "--set", bucket, "--secret-file", secret];
        common.map(str::to_owned).to_vec()
    }

    pub(crate) fn seat(&self, name: &str) -> Seat {
        let listen = format!("127.0.0.1:{}", free_port());
        Seat { data: self.folder.path().join(name).to_str().unwrap().to_owned(), listen }
    }

    async fn worker(&self, seat: &Seat) -> Process {
        self.worker_at(seat, &[]).await
    }

    pub(crate) async fn worker_at(&self, seat: &Seat, more: &[&str]) -> Process {
        Process::launch(self.worker_command(seat, more)).await
    }

    /// The command of a worker. Its model is `tiny` unless `more` names another.
    fn worker_command(&self, seat: &Seat, more: &[&str]) -> Command {
        let own = ["--data-dir", &seat.data, "--listen", &seat.listen];
        let model = if more.contains(&"--model") { &[][..] } else { &["--model", "tiny"] };
        let sizes = ["--set", "tiers.g1=32MiB", "--set", "tiers.g2=32MiB", "--set", "tiers.g3=64MiB"];
        let common = self.arguments();
        let common: Vec<&str> = common.iter().map(String::as_str).collect();
        command("worker", &[&own[..], model, &sizes[..], &common[..], more].concat())
    }

    /// A frontend, once it knows a worker.
    async fn frontend(&self) -> Process {
        self.frontend_with(&[]).await
    }

    pub(crate) async fn frontend_with(&self, more: &[&str]) -> Process {
        let common = self.arguments();
        let common: Vec<&str> = common.iter().map(String::as_str).collect();
        let own = ["--listen", "127.0.0.1:0", "--set", "frontend.shutdown_delay=0s"];
        Process::launch(command("frontend", &[&own[..], &common[..], more].concat())).await
    }
}

fn prompt(seed: u32) -> Vec<u32> {
    // Without the second step the prompts would repeat after 400 seeds.
    (0..300).map(|i| (i * (7 + 2 * (seed / 400)) + seed * 131) % 400 + 5).collect()
}

/// A streamed completion of exactly this many tokens, each of which is the most probable one.
fn greedy(seed: u32, tokens: u32) -> Value {
    json!({"model": "tiny", "prompt": prompt(seed), "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "stream": true})
}

/// Asks until the answer has cached tokens: events of other processes arrive a moment after what they describe.
async fn until_cached(process: &Process, prompt: &[u32]) -> (Value, u64) {
    loop {
        let (choice, cached) = process.client.complete(prompt).await.unwrap();
        if cached > 0 {
            return (choice, cached);
        }
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn any_frontend_routes_to_the_worker_that_has_the_blocks() {
    let Some(cluster) = Cluster::new() else { return };
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let (first, second) = tokio::join!(cluster.worker(&first), cluster.worker(&second));
    let (left, right) = tokio::join!(cluster.frontend(), cluster.frontend());
    // Both workers compute some prompts, each once.
    for seed in 0..8 {
        let (choice, cached) = left.client.complete(&prompt(seed)).await.unwrap();
        assert_eq!(cached, 0);
        // The other frontend learns of the blocks by events.
        let (again, cached) = until_cached(&right, &prompt(seed)).await;
        assert_eq!((choice["text"].clone(), cached), (again["text"].clone(), 288));
    }
    let requests =
        async |process: &Process| process.client.metric("blockyard_worker_prompt_tokens_computed_total", "").await;
    assert!(requests(&first).await > 0.0 && requests(&second).await > 0.0, "both workers served");
    for frontend in [&left, &right] {
        until_logs_are_read(frontend, "http").await;
        assert!(log_reads(frontend, "nats").await < 1.0, "{}", frontend.log());
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_go_on_when_a_worker_is_killed_and_its_blocks_are_found_after_a_restart() {
    let Some(cluster) = Cluster::new() else { return };
    let (seat, other) = (cluster.seat("a"), cluster.seat("b"));
    let mut worker = cluster.worker(&seat).await;
    let mut frontend = cluster.frontend().await;
    let mut texts = Vec::new();
    for seed in 10..18 {
        let (choice, _) = frontend.client.complete(&prompt(seed)).await.unwrap();
        texts.push((seed, choice["text"].clone()));
    }
    // A clean stop writes the blocks to G3 and deregisters the worker.
    worker.stop();
    let other = cluster.worker(&other).await;
    while frontend.client.ask(&prompt(2)).await.unwrap()["choices"].is_null() {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    let mut worker = cluster.worker(&seat).await;
    // How many tokens of a prompt are cached depends on the disk: prefill computes blocks while others are still read.
    let mut from_ssd = 0.0;
    for (seed, text) in &texts {
        let (again, _) = until_cached(&frontend, &prompt(*seed)).await;
        assert_eq!(again["text"], *text, "prompt {seed}");
        from_ssd = worker.client.metric("blockyard_worker_prompt_tokens_cached_total", "tier=\"g3\"").await;
    }
    assert!(from_ssd > 0.0, "no block was loaded from the SSD of the restarted worker");
    worker.kill();
    for (seed, text) in &texts {
        let (elsewhere, _) = frontend.client.complete(&prompt(*seed)).await.unwrap();
        assert_eq!(elsewhere["text"], *text, "another worker answers before the lease of the dead one expires");
    }
    frontend.stop();
    drop(other);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_rejects_requests_without_the_secret_and_a_frontend_ignores_workers_of_another() {
    let Some(mut cluster) = Cluster::new() else { return };
    let worker = cluster.worker(&cluster.seat("a")).await;
    let http = client();
    for (path, header, expected) in [
        ("/workers/1/generate", "Bearer wrong-wrong-wrong-wrong", 401),
        ("/workers/1/generate", "Bearer 0123456789abcdef0123456789abcdef", 401),
        ("/v1/completions", "Bearer 0123456789abcdef0123456789abcdef", 404),
    ] {
        let url = format!("{}{path}", worker.client.url);
        let response = http.post(url).header("authorization", header).header("x-blockyard-protocol", "3").send();
        assert_eq!(response.await.unwrap().status().as_u16(), expected, "{path}");
    }
    let log = http.get(format!("{}/logs/worker/1/1/snapshot", worker.client.url)).header("x-blockyard-protocol", "3");
    assert_eq!(log.send().await.unwrap().status().as_u16(), 401, "which blocks it has is read with the secret only");
    let refused = worker.client.metric("blockyard_cluster_requests_refused_total", "reason=\"secret\"").await;
    assert!((refused - 3.0).abs() < f64::EPSILON, "{refused}");
    // The log is written by another thread than the one that counts.
    while !worker.log().contains("a request without a secret that this worker accepts was refused") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let rebinding = http.get(format!("{}/metrics", worker.client.url)).header("host", "attacker.example").send();
    assert_eq!(rebinding.await.unwrap().status().as_u16(), 403, "on loopback only loopback hosts");
    // A worker with another secret is not used: a frontend would send it prompts.
    let frontend = cluster.frontend().await;
    std::fs::write(cluster.folder.path().join("other"), "another secret".repeat(4).replace(' ', "-")).unwrap();
    cluster.secret = cluster.folder.path().join("other");
    let other = cluster.worker(&cluster.seat("b")).await;
    while frontend.client.metric("blockyard_nats_refused_total", "kind=\"instance\"").await < 1.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // The log is written by another thread than the one that counts.
    let refused = loop {
        match frontend.log().lines().find(|line| line.contains(&other.client.url)) {
            Some(line) => break line.to_owned(),
            None => tokio::time::sleep(Duration::from_millis(20)).await,
        }
    };
    assert!(refused.contains("cluster.secret_file"), "{refused}");
    assert!((frontend.client.metric("blockyard_router_workers", "").await - 1.0).abs() < 0.5, "{refused}");
    frontend.client.complete(&prompt(1)).await.unwrap();
}

#[test]
fn wrong_settings_are_refused_before_anything_starts() {
    let refused = |name: &str, arguments: &[&str]| {
        let output = command(name, arguments).output().unwrap();
        assert!(!output.status.success(), "{name} {arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let cases: [(&str, &[&str], &str); 16] = [
        ("worker", &["--workers", "prefill:0"], "no worker"),
        ("worker", &["--listen", "0.0.0.0:0"], "cluster.advertise"),
        ("worker", &["--advertise", "https://host:1"], "the worker has no TLS"),
        ("worker", &["--advertise", "ftp://host:1"], "http://HOST:PORT"),
        ("worker", &["--set", "cluster.tls.key_file=x"], "cluster.tls.cert_file is needed"),
        ("frontend", &["--set", "cluster.tls.ca_file=no/such/file"], "cluster.tls.ca_file = "),
        ("worker", &["--listen", "127.0.0.1:9", "--set", "admin.listen=127.0.0.1:9"], "admin.listen"),
        ("worker", &["--secret-file", "no/such/file"], "cluster.secret_file"),
        ("frontend", &["--nats", "nats://user:password@host:4222"], "credentials"),
        ("frontend", &["--nats", "http://host:4222"], "expected nats://HOST:PORT or tls://HOST:PORT"),
        ("frontend", &["--set", "frontend.api_keys_file=no/such/file"], "frontend.api_keys_file"),
        ("frontend", &["--set", "nats.user=me"], "nats.password_file"),
        ("frontend", &["--set", "nats.token_file=no/such/file"], "nats.token_file = \"no/such/file\": "),
        ("worker", &["--set", "nats.ca_file=no/such/file"], "nats.ca_file = \"no/such/file\": "),
        ("worker", &["--set", "upstreams=[\"http://host:8000\"]"], "`blockyard serve`, or `blockyard frontend`"),
        ("frontend", &["--upstream", "http://host:8000/v1"], "without /v1"),
    ];
    for (name, arguments, expected) in cases {
        let arguments = [&["--print-config", "--set", "data_dir=data"], arguments].concat();
        let error = refused(name, &arguments);
        assert!(error.contains(expected), "{name} {arguments:?}: {error}");
    }
    let keys = "frontend.api_keys_file=no/such/file";
    let shared = command("worker", &["--print-config", "--set", "data_dir=data", "--set", keys]).output().unwrap();
    assert!(shared.status.success(), "only frontends read the keys: {}", String::from_utf8_lossy(&shared.stderr));
    let unreachable = ["--nats", "nats://127.0.0.1:1", "--set", "nats.connect_timeout=10ms", "--listen", "127.0.0.1:0"];
    assert!(refused("frontend", &unreachable).contains("cannot be reached"));
}

#[test]
fn a_worker_on_a_public_address_without_a_secret_and_without_tls_warns_of_both() {
    let folder = tempfile::tempdir().unwrap();
    let data = folder.path().join("data");
    // The warnings come first, and no NATS server answers at this address.
    let common = ["--model", "tiny", "--nats", "nats://127.0.0.1:1", "--set", "nats.connect_timeout=10ms"];
    let log = |arguments: &[&str]| {
        let output =
            command("worker", &[&common[..], arguments].concat()).arg("--data-dir").arg(&data).output().unwrap();
        assert!(!output.status.success(), "{arguments:?}");
        String::from_utf8(output.stderr).unwrap()
    };
    let warnings = |log: &str, text: &str| log.lines().filter(|l| l.contains("WARN") && l.contains(text)).count();
    let public = log(&["--listen", "0.0.0.0:0", "--advertise", "http://127.0.0.1:1"]);
    for (text, advice) in [("can use the workers", "cluster.secret_file"), ("without TLS", "cluster.tls.cert_file")] {
        assert_eq!(warnings(&public, text), 1, "{public}");
        assert!(public.contains(advice), "{public}");
    }
    let private = log(&["--listen", "127.0.0.1:0"]);
    assert_eq!(warnings(&private, "can use the workers") + warnings(&private, "without TLS"), 0, "{private}");
}

#[test]
fn the_help_shows_the_real_defaults() {
    use clap::CommandFactory;
    let mut program = blockyard::commands::cli::Cli::command();
    let config = blockyard::config::Config::with_cache("".as_ref());
    let mut help = |name: &str| program.find_subcommand_mut(name).unwrap().render_long_help().to_string();
    assert!(help("frontend").contains(&format!("[default: {}]", config.listen)));
    let worker = help("worker");
    for default in [config.cluster.listen.to_string(), config.model.to_string(), "both:1".to_owned()] {
        assert!(worker.contains(&format!("[default: {default}]")), "{default} is not in:\n{worker}");
    }
    assert!(worker.contains(&config.nats.servers[0]));
    let printed = command("worker", &["--print-config", "--json", "--data-dir", "data"]).output().unwrap();
    let printed: Value = serde_json::from_slice(&printed.stdout).unwrap();
    assert_eq!(printed["workers"]["value"], json!("both:1"), "{printed}");
}

/// A stream of completions: the text of each choice so far, and whether it has ended.
pub(crate) struct Streamed {
    body: futures::stream::BoxStream<'static, reqwest::Result<bytes::Bytes>>,
    unread: String,
    texts: Vec<String>,
    ended: bool,
}

impl Streamed {
    pub(crate) async fn start(process: &Process, body: &Value) -> Self {
        let url = format!("{}/v1/completions", process.client.url);
        let response = client().post(url).json(body).send().await.unwrap();
        assert!(response.status().is_success(), "{:?}", response.text().await);
        let choices = body["n"].as_u64().unwrap_or(1) as usize;
        let body = response.bytes_stream().boxed();
        Self { body, unread: String::new(), texts: vec![String::new(); choices], ended: false }
    }

    /// Reads the next part of the body.
    pub(crate) async fn read(&mut self) {
        let part = self.body.next().await.expect("the stream has its end").unwrap();
        self.unread.push_str(std::str::from_utf8(&part).unwrap());
        while let Some((event, rest)) = self.unread.split_once("\n\n") {
            // A line with a colon at its start keeps the connection alive.
            let data = event.strip_prefix("data: ").unwrap_or_default();
            assert!(!data.is_empty() || event.starts_with(':'), "{event}");
            if data == "[DONE]" {
                self.ended = true;
            } else if !data.is_empty() {
                let chunk: Value = serde_json::from_str(data).unwrap();
                assert!(chunk["error"].is_null(), "{chunk}");
                for choice in chunk["choices"].as_array().unwrap() {
                    let at = choice["index"].as_u64().unwrap() as usize;
                    self.texts[at].push_str(choice["text"].as_str().unwrap());
                }
            }
            self.unread = String::from(rest);
        }
    }

    /// Reads until each choice has at least this many more bytes of text.
    async fn read_more(&mut self, bytes: usize) {
        let enough: Vec<usize> = self.texts.iter().map(|text| text.len() + bytes).collect();
        while self.texts.iter().zip(&enough).any(|(text, enough)| text.len() < *enough) {
            self.read().await;
        }
    }

    pub(crate) async fn read_to_the_end(mut self) -> Vec<String> {
        while !self.ended {
            self.read().await;
        }
        self.texts
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_stream_goes_on_when_its_worker_is_killed() {
    let Some(cluster) = Cluster::new() else { return };
    let mut fleet = Fleet::start(&cluster, 2, &[]).await;
    let seeded = json!({"model": "tiny", "prompt": prompt(2), "max_tokens": 1000, "temperature": 1, "seed": 5,
        "frequency_penalty": 0.5, "n": 2, "ignore_eos": true, "stream": true});
    for request in [greedy(1, 1500), seeded] {
        let (killed, texts) = fleet.kill_in_mid_stream(&request).await;
        fleet.start_again(killed).await;
        fleet.assert_undisturbed(&request, &texts).await;
    }
    assert!(fleet.moves("failed").await < 1.0);
}

/// Waits until a frontend knows this number of workers that are alive.
pub(crate) async fn until_workers(frontend: &Process, count: usize) {
    while frontend.client.metric("blockyard_router_workers", "").await < count as f64 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The snapshots and ranges that a frontend has read over `http` or `nats`.
async fn log_reads(frontend: &Process, transport: &str) -> f64 {
    frontend.client.metric("blockyard_nats_log_reads_total", &format!("transport=\"{transport}\"")).await
}

/// Waits until a frontend has read some.
async fn until_logs_are_read(frontend: &Process, transport: &str) {
    while log_reads(frontend, transport).await < 1.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The load of the tests of faults: clients that send one request after the other, usually three of them. Each request
/// must be answered.
pub(crate) struct SteadyClients {
    stop: Arc<AtomicBool>,
    /// Each returns the number of its answers.
    clients: Vec<JoinHandle<u32>>,
}

impl SteadyClients {
    pub(crate) fn start(client: &Client, count: u32) -> Self {
        let stop = Arc::new(AtomicBool::new(false));
        let clients = (0..count).map(|nth| {
            let (client, stop) = (client.clone(), Arc::clone(&stop));
            tokio::spawn(async move {
                let mut answered = 0_u32;
                while !stop.load(Ordering::Relaxed) {
                    let answer = client.ask(&prompt(nth * 1000 + answered)).await.unwrap();
                    assert!(answer["choices"][0]["text"].is_string(), "{answer}");
                    answered += 1;
                }
                answered
            })
        });
        Self { clients: clients.collect(), stop }
    }

    /// Fails if a request has failed.
    pub(crate) fn check(&self) {
        assert!(!self.clients.iter().any(JoinHandle::is_finished), "a client has failed");
    }

    pub(crate) async fn stop(self) {
        self.stop.store(true, Ordering::Relaxed);
        for client in self.clients {
            assert!(client.await.unwrap() > 0);
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_fails_while_workers_are_restarted_one_after_the_other() {
    let Some(cluster) = Cluster::new() else { return };
    let mut fleet = Fleet::start(&cluster, 2, &[]).await;
    let clients = SteadyClients::start(&fleet.frontend.client, 4);
    for round in 0..4 {
        let at = round % 2;
        tokio::time::sleep(Duration::from_millis(300)).await;
        tokio::task::block_in_place(|| fleet.workers[at].stop());
        fleet.start_again(at).await;
    }
    clients.stop().await;
}
