//! Whole nodes inside the test process, and the real program: settings of tiers, explanations, startup errors. What
//! also holds for separate processes is in `scenarios`.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::{client, program};
use blockyard::config::{
    Budget, ByteSize, Compression, Config, DiskPath, Encryption, HumanDuration, Listen, SharedFlash,
};
use blockyard::node::{Node, Process};
use kvbm::crypt::KeySource;
use kvbm::object::StoreLocation;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::sync::Arc;
use std::time::Duration;
use worker::plane::RouterId;
use worker::plane::local::{LocalDiscovery, LocalEvents};

/// A node that serves `tiny`, and a client for it.
struct Harness {
    node: Node,
    url: String,
    http: reqwest::Client,
}

fn config(data: &Path) -> Config {
    let budget = |mib: u64| Budget::Bytes(ByteSize(mib << 20));
    let mut config = Config::with_cache(data);
    config.model = "tiny".parse().unwrap();
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    config.shutdown_timeout = Some(HumanDuration::secs(20));
    (config.tiers.g1, config.tiers.g2, config.tiers.g3) = (budget(32), budget(32), budget(64));
    config
}

fn aggregated(data: &Path) -> Config {
    Config { workers: "both:1".parse().unwrap(), ..config(data) }
}

/// The seeds of the prompts of [`Harness::complete_all`].
const SEEDS: std::ops::Range<u32> = 1..5;
/// Cacheable blocks of these prompts: 39 for each.
const PROMPT_BLOCKS: f64 = 4.0 * 39.0;

/// Token ids of every vocabulary, different for each `seed`.
fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|n| 10 + (seed * 31 + n * 7) % 500).collect()
}

impl Harness {
    async fn start(config: Config) -> Self {
        let node = Node::start(&config).await.unwrap();
        let url = format!("http://{}", node.address());
        Self { node, url, http: client() }
    }

    async fn post(&self, path: &str, body: &Value) -> reqwest::Response {
        self.http
            .post(format!("{}{path}", self.url))
            .json(body)
            .header("x-blockyard-explain", "1")
            .send()
            .await
            .unwrap()
    }

    async fn answer(&self, path: &str, body: &Value) -> Value {
        let response = self.post(path, body).await;
        let (status, body) = (response.status(), response.text().await.unwrap());
        assert!(status.is_success(), "{status}: {body}");
        serde_json::from_str(&body).unwrap()
    }

    /// Completes one prompt of 640 tokens per seed: the texts, and the largest number of cached tokens of a prompt.
    /// It may be less than 624: on a busy machine, blocks that load too slowly are recomputed.
    async fn complete_all(&self) -> (Vec<String>, u64) {
        let mut texts = Vec::new();
        let mut most = 0;
        for seed in SEEDS {
            let (text, cached) = self.complete(&prompt(seed, 640)).await;
            texts.push(text);
            most = most.max(cached);
        }
        (texts, most)
    }

    /// Completes a prompt of token ids: the text, and the number of cached prompt tokens.
    async fn complete(&self, prompt: &[u32]) -> (String, u64) {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0});
        let answer = self.answer("/v1/completions", &body).await;
        (answer["choices"][0]["text"].as_str().unwrap().into(), cached(&answer))
    }

    /// Waits until the node knows that a tier has the blocks of all prompts of `complete_all`.
    async fn wait_for_blocks_in(&self, tier: &str) {
        let label = format!(r#"tier="{tier}""#);
        let known = async {
            while self.metric("blockyard_tier_blocks", &[&label]).await < PROMPT_BLOCKS {
                tokio::time::sleep(Duration::from_millis(50)).await;
            }
        };
        tokio::time::timeout(Duration::from_mins(5), known).await.expect("the node sees the writer's blocks");
    }

    async fn get(&self, path: &str) -> String {
        self.http.get(format!("{}{path}", self.url)).send().await.unwrap().text().await.unwrap()
    }

    /// The sum of a metric's series that have all of `labels`.
    async fn metric(&self, name: &str, labels: &[&str]) -> f64 {
        let text = self.get("/metrics").await;
        let series =
            text.lines().filter(|line| line.starts_with(&format!("{name}{{")) || line.starts_with(&format!("{name} ")));
        let wanted = series.filter(|line| labels.iter().all(|label| line.contains(label)));
        wanted.map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// A node listens before its model is loaded; this is the listener without a model.
#[tokio::test(flavor = "multi_thread")]
async fn requests_before_the_model_is_loaded_get_503() {
    let discovery = Arc::new(LocalDiscovery::default());
    let events = Arc::new(LocalEvents::default());
    let registry = prometheus::Registry::new();
    let router = router::Router::new(RouterId(1), discovery, events, router::Settings::default(), &registry).unwrap();
    let server = frontend::Server::new(&frontend::Settings::default(), &registry).unwrap();
    let app = frontend::router(router, registry, frontend::Settings::default()).unwrap();
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let stop = frontend::Shutdown::default();
    let stopped = stop.clone();
    let server = tokio::spawn(async move { server.serve(listener, app, stopped).await });
    let http = client();
    for (path, status) in [("/live", 200), ("/ready", 503), ("/v1/models", 200)] {
        assert_eq!(http.get(format!("{url}{path}")).send().await.unwrap().status(), status, "{path}");
    }
    let body = json!({"model": "tiny", "prompt": "hello"});
    let refused = http.post(format!("{url}/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(refused.status(), 503, "not 404: the model may still be loading");
    stop.close(Duration::ZERO);
    server.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn encrypted_blocks_survive_a_restart_only_with_their_key() {
    let data = tempfile::tempdir().unwrap();
    let key = |name: &str, digit: &str| {
        let file = data.path().join(name);
        std::fs::write(&file, digit.repeat(64)).unwrap();
        Some(Encryption { keys: KeySource::File(file) })
    };
    let (right, wrong) = (key("right", "a"), key("wrong", "b"));
    let config_with = |encryption: &Option<Encryption>| {
        let mut config = config(data.path());
        (config.tiers.compression, config.tiers.encryption) = (Compression::Always, encryption.clone());
        config
    };
    let mut answers = Vec::new();
    let mut hits = Vec::new();
    for encryption in [&right, &right, &wrong, &None] {
        let harness = Harness::start(config_with(encryption)).await;
        answers.push(harness.complete_all().await);
        hits.push(harness.metric("blockyard_tier_hit_blocks_total", &[r#"tier="g3""#]).await);
        harness.node.shutdown().await;
    }
    let cached: Vec<u64> = answers.iter().map(|(_, cached)| *cached).collect();
    assert!(hits[1] > 0.0, "{hits:?} blocks hit");
    assert_eq!((cached[0], cached[2]), (0, 0), "another key decrypts nothing");
    assert!(answers.iter().all(|(text, _)| *text == answers[0].0));
}

#[tokio::test(flavor = "multi_thread")]
async fn shared_flash_is_read_before_the_object_store() {
    let [one, two, flash, shared] = [(); 4].map(|()| tempfile::tempdir().unwrap());
    let sharing = |data: &Path| {
        let mut config = aggregated(data);
        config.tiers.g4.url = Some(StoreLocation::Folder(shared.path().into()));
        config.tiers.g3_5 = Some(SharedFlash { path: flash.path().into(), capacity: ByteSize(1 << 30), max_age: None });
        config
    };
    let writer = Harness::start(sharing(one.path())).await;
    let (texts, _) = writer.complete_all().await;
    writer.node.shutdown().await;
    let reader = Harness::start(sharing(two.path())).await;
    for tier in ["g3_5", "g4"] {
        reader.wait_for_blocks_in(tier).await;
    }
    let (again, _) = reader.complete_all().await;
    assert_eq!(again, texts);
    let hits = async |tier| reader.metric("blockyard_tier_hit_blocks_total", &[tier]).await;
    assert!(hits(r#"tier="g3_5""#).await > 0.0 && hits(r#"tier="g4""#).await < 1.0);
    reader.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_remote_prefill_is_explained() {
    let data = tempfile::tempdir().unwrap();
    let disaggregated = {
        let mut config = config(data.path());
        config.router.disaggregation = router::Disaggregation::Always;
        Harness::start(config).await
    };
    // When the prefill worker stalls, the request falls back to local prefill: then the next prompt is tried.
    let first_handoff = async {
        for nth in 3.. {
            let body = json!({"model": "tiny", "prompt": prompt(nth, 1500), "max_tokens": 6, "temperature": 0});
            let response = disaggregated.post("/v1/completions", &body).await;
            let explained = response.headers()["x-blockyard-explain"].to_str().unwrap().to_owned();
            let answer: Value = response.json().await.unwrap();
            let from_peer = [r#"tier="peer""#, r#"direction="onboard""#];
            if disaggregated.metric("blockyard_tier_transfer_bytes_total", &from_peer).await > 0.0 {
                return (serde_json::from_str::<Value>(&explained).unwrap(), answer);
            }
        }
        unreachable!("prompts do not end");
    };
    let handoff = tokio::time::timeout(Duration::from_mins(5), first_handoff).await;
    let (explained, answer) = handoff.expect("a prompt is handed over within five minutes");
    assert_eq!(explained["disaggregation"]["prefill"], "w1", "{explained}");
    assert_ne!(explained["chosen"], "w1", "{explained}");
    assert_eq!(cached(&answer), 0, "blocks computed by the prefill worker for this request are not cached tokens");
    disaggregated.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn models_probes_and_metrics_are_served() {
    let data = tempfile::tempdir().unwrap();
    let harness = Harness::start(config(data.path())).await;
    harness.complete(&prompt(4, 100)).await;
    assert!(harness.get("/v1/models").await.contains("tiny"));
    for path in ["/health", "/live", "/ready"] {
        let status = harness.http.get(format!("{}{path}", harness.url)).send().await.unwrap().status();
        assert_eq!(status, 200, "{path}");
    }
    let metrics = harness.get("/metrics").await;
    for name in [
        "blockyard_frontend_",
        "blockyard_router_prefix_predicted_tokens_total",
        "blockyard_router_prefix_actual_tokens_total",
        "blockyard_worker_prompt_tokens_computed_total",
        "blockyard_worker_step_seconds_bucket",
        "blockyard_tier_blocks{tier=\"g1\",worker=\"w1\"}",
        "blockyard_tier_used_bytes{tier=\"g3\",worker=\"shared\"}",
    ] {
        assert!(metrics.contains(name), "{name} is not in:\n{metrics}");
    }
    harness.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_small_g1_limits_the_context_that_clients_see() {
    let data = tempfile::tempdir().unwrap();
    let mut config = aggregated(data.path());
    // 32 blocks of 32 KiB.
    (config.tiers.g1, config.tiers.g3) = (Budget::Bytes(ByteSize(1 << 20)), Budget::Off);
    let harness = Harness::start(config).await;
    let models: Value = serde_json::from_str(&harness.get("/v1/models").await).unwrap();
    assert_eq!(models["data"][0]["max_model_len"], 512, "{models}");
    assert_eq!(harness.node.banner().as_json()["max_model_len"], 512);
    assert!(harness.node.banner().to_string().contains("context of 512 tokens"), "{}", harness.node.banner());
    let body =
        |tokens: u32| json!({"model": "tiny", "prompt": prompt(1, 100), "max_tokens": tokens, "ignore_eos": true});
    let answer = harness.answer("/v1/completions", &body(412)).await;
    assert_eq!(answer["usage"]["completion_tokens"], 412, "{answer}");
    let refused = harness.post("/v1/completions", &body(413)).await;
    assert_eq!(refused.status(), 400);
    assert!(refused.text().await.unwrap().contains("512 tokens"));
    harness.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_second_node_on_a_data_folder_is_rejected() {
    let data = tempfile::tempdir().unwrap();
    let harness = Harness::start(config(data.path())).await;
    let log = config(data.path()).data_dir.join("g3");
    let error = format!("{:#}", Node::start(&config(data.path())).await.err().expect("the folder is in use"));
    assert!(error.contains("--data-dir") && error.contains("process"), "{error}");
    // Before the model is loaded, whose folder would be written first.
    let other = tempfile::tempdir().unwrap();
    let mut config = config(other.path());
    config.tiers.g3_paths = vec![DiskPath { path: log, capacity: Budget::Auto }];
    let error = format!("{:#}", Node::start(&config).await.err().expect("the log is in use"));
    assert!(error.contains("belongs to process") && !config.data_dir.join("models").exists(), "{error}");
    harness.node.shutdown().await;
}

fn start_error(arguments: &[&str]) -> String {
    let Output { status, stderr, .. } = program(arguments).output().unwrap();
    assert_eq!(status.code(), Some(1), "{arguments:?}");
    String::from_utf8(stderr).unwrap()
}

#[test]
fn startup_errors_name_the_setting_to_change() {
    let taken = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = taken.local_addr().unwrap().to_string();
    let data = tempfile::tempdir().unwrap();
    let data = data.path().to_str().unwrap();
    let error = start_error(&["--data-dir", data, "--listen", &address]);
    assert!(error.contains(&address) && error.contains("--listen"), "{error}");
    let admin = format!("admin.listen={address}");
    let error = start_error(&["--model", "tiny", "--data-dir", data, "--listen", "127.0.0.1:0", "--set", &admin]);
    assert!(error.contains(&address) && error.contains("--set admin.listen="), "{error}");
    assert!(!error.contains("loading tiny"), "the port is checked before the model is loaded: {error}");
    let common = ["--data-dir", data, "--listen", "127.0.0.1:0", "--model"];
    let error = start_error(&[&common[..], &["no/such/folder"]].concat());
    assert!(error.contains("no/such/folder") && error.contains("tiny"), "{error}");
    let error = start_error(&[&common[..], &["tiny", "--set", "tiers.g1=900TiB"]].concat());
    assert!(error.contains("not enough memory") && error.contains("tiers.g1"), "{error}");
    let error = start_error(&["--set", "router.polcy=kv"]);
    assert!(error.contains("did you mean `router.policy`"), "{error}");
}

#[cfg(target_os = "linux")]
#[test]
fn memory_that_the_system_refuses_is_an_error_with_its_key() {
    let data = tempfile::tempdir().unwrap();
    let common = ["--data-dir", data.path().to_str().unwrap(), "--listen", "127.0.0.1:0", "--model", "tiny"];
    for (tier, key, other) in [("G1", "tiers.g1", "tiers.g2"), ("G2", "tiers.g2", "tiers.g1")] {
        let sizes = [format!("{key}=4GiB"), format!("{other}=32MiB")];
        let sets = ["--workers", "both:1", "--set", "tiers.g3=off", "--set", &sizes[0], "--set", &sizes[1]];
        let command = program(&[&common[..], &sets].concat());
        // A limit of the address space, below 4 GiB.
        let mut limited = Command::new("/bin/sh");
        limited.args(["-c", r#"ulimit -v 4000000; exec "$0" "$@""#]).arg(command.get_program());
        limited.args(command.get_args()).env_clear().env("HOME", "/nonexistent");
        let Output { status, stderr, .. } = limited.output().unwrap();
        let log = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{key}: {log}");
        let expected = format!("error: the system refuses 4.0 GiB for {tier} of worker w1 ({key}); make it smaller");
        assert!(log.contains(&expected) && !log.contains("panicked"), "`{expected}` is not in:\n{log}");
        assert!(log.contains("or raise the limit of the address space (ulimit -v)"), "{log}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_limit_of_addresses_that_no_process_can_run_with_is_an_error() {
    for command in [&["serve"][..], &["doctor"], &["replay", "--workload", "agents"]] {
        let Output { status, stderr, .. } = within_addresses(300_000, command);
        let log = String::from_utf8(stderr).unwrap();
        assert_eq!(status.code(), Some(1), "{command:?}: {log}");
        let expected = "error: the address space of this process is limited to 307200000 bytes, and at least 536870912";
        assert!(log.starts_with(expected) && log.contains("ulimit -v unlimited"), "{command:?}: {log}");
    }
}

/// What the program answers to these arguments within a limit of the address space.
#[cfg(target_os = "linux")]
fn within_addresses(kibibytes: u32, arguments: &[&str]) -> Output {
    let mut limited = Command::new("/bin/sh");
    let script = format!(r#"ulimit -v {kibibytes}; exec "$0" "$@""#);
    limited.args(["-c", &script, env!("CARGO_BIN_EXE_blockyard")]).args(arguments);
    limited.env_clear().env("HOME", "/nonexistent").output().unwrap()
}

#[cfg(target_os = "linux")]
#[test]
fn threads_that_the_system_refuses_are_an_error_without_a_panic() {
    let data = tempfile::tempdir().unwrap();
    let data = ["--data-dir", data.path().to_str().unwrap(), "--listen", "127.0.0.1:0"];
    let serve = [&["serve", "--model", "tiny", "--set", "threads=1024"], &data[..]].concat();
    // Less than the stacks of all threads.
    let Output { status, stderr, .. } = within_addresses(1_500_000, &serve);
    let log = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(1), "{log}");
    let expected = "error: cannot load the model tiny: the system refuses 1024 compute threads: ";
    assert!(log.contains(expected) && log.contains("(ulimit -v") && !log.contains("panic"), "{log}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_replay_has_as_many_threads_as_addresses_allow() {
    let replay = ["replay", "--workload", "agents", "--requests", "100", "--policy", "kv,random", "--threads", "64"];
    let replay = [&replay[..], &["--runs", "16", "--rate", "1,2"]].concat();
    let Output { status, stderr, .. } = within_addresses(600_000, &replay);
    assert_eq!(status.code(), Some(0), "{}", String::from_utf8_lossy(&stderr));
    let Output { status, stderr, .. } = within_addresses(600_000, &[&replay[..], &["--replicas", "128"]].concat());
    let log = String::from_utf8(stderr).unwrap();
    let expected = "error: no memory for the index of a simulated router: the system refuses ";
    assert!(status.code() == Some(1) && log.contains(expected) && log.contains("(RLIMIT_AS: ulimit -v"), "{log}");
}

#[test]
fn the_banner_has_the_address_and_a_signal_stops_cleanly() {
    use std::io::{BufRead, BufReader, Read};
    let data = tempfile::tempdir().unwrap();
    let arguments = ["--model", "tiny", "--listen", "127.0.0.1:0", "--json", "--set", "tiers.g1=16MiB"];
    let arguments = [&arguments[..], &["--set", "frontend.shutdown_delay=0s", "--data-dir"]].concat();
    for signal in ["-INT", "-TERM"] {
        let mut command = program(&[&arguments[..], &[data.path().to_str().unwrap()]].concat());
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let banner: Value = serde_json::from_str(&line).unwrap_or_else(|_| {
            let mut log = String::new();
            child.stderr.take().unwrap().read_to_string(&mut log).unwrap();
            panic!("no banner:\n{log}")
        });
        let address = banner["address"].as_str().unwrap();
        assert!(std::net::TcpStream::connect(address).is_ok(), "{banner}");
        assert!(Command::new("kill").args([signal, &child.id().to_string()]).status().unwrap().success());
        assert!(child.wait().unwrap().success(), "{signal}");
    }
}
