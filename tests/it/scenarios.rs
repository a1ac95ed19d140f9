//! Scenarios that hold for every way to run the program, from one source: embedded (one `serve`), and distributed (a
//! frontend and a worker process for each worker, over a real NATS server). Only what clients can see is compared.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::cluster::{Cluster, Seat, Streamed, until_workers};
use super::process::{Client, Process, client};
use futures::future::join_all;
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::time::Duration;
use tempfile::TempDir;

/// How the parts of a deployment are divided into processes.
#[derive(Clone, Copy)]
enum Layout {
    Embedded,
    Distributed,
}

/// Each scenario as a test of each layout.
macro_rules! scenarios {
    ($($name:ident)*) => {
        mod embedded {$(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(super::Layout::Embedded).await;
            }
        )*}
        mod distributed {$(
            #[tokio::test(flavor = "multi_thread")]
            async fn $name() {
                super::$name(super::Layout::Distributed).await;
            }
        )*}
    };
}

scenarios! {
    a_chat_is_answered_whole_and_streamed_with_the_same_text
    a_second_turn_hits_the_blocks_of_the_first
    a_prompt_is_answered_from_the_ssd_after_a_restart
    blocks_in_the_shared_store_are_found_by_another_deployment
    a_remote_prefill_gives_the_same_text
    a_running_stream_ends_before_the_deployment_stops
    all_choices_of_a_request_are_streamed
    a_client_that_disconnects_stops_the_computation
    a_hot_prefix_is_copied_to_an_idle_worker_before_a_request_needs_it
    a_worker_without_host_memory_gets_no_copy
    no_prefix_is_copied_ahead_of_demand_when_that_is_off
    requests_with_a_hot_prefix_are_shared_by_all_workers
}

/// Roles of the workers, and further arguments.
#[derive(Clone, Default)]
struct Options {
    roles: Vec<&'static str>,
    /// Of `serve`, or of each worker.
    worker: Vec<String>,
    /// Of `serve`, or of the frontend.
    frontend: Vec<String>,
}

/// A running deployment. Its folders and addresses outlive a stop.
struct Deployment {
    options: Options,
    place: Place,
    /// `serve`, or the frontend.
    api: Process,
    /// Worker processes of a distributed deployment.
    workers: Vec<Process>,
}

enum Place {
    Embedded(TempDir),
    Distributed(Cluster, Vec<Seat>),
}

fn strs(arguments: &[String]) -> Vec<&str> {
    arguments.iter().map(String::as_str).collect()
}

impl Deployment {
    /// `None` if this machine lacks a server that the layout needs.
    async fn start(layout: Layout, options: Options) -> Option<Self> {
        let place = match layout {
            Layout::Embedded => Place::Embedded(tempfile::tempdir().unwrap()),
            Layout::Distributed => {
                let cluster = Cluster::new()?;
                let seats = (0..options.roles.len()).map(|nth| cluster.seat(&format!("worker-{nth}"))).collect();
                Place::Distributed(cluster, seats)
            }
        };
        let (api, workers) = launch(&place, &options).await;
        Some(Self { options, place, api, workers })
    }

    fn client(&self) -> &Client {
        &self.api.client
    }

    /// Stops everything as an operator does: the API first, then the workers.
    fn stop(&mut self) {
        tokio::task::block_in_place(|| {
            self.api.stop();
            self.workers.iter_mut().for_each(Process::stop);
        });
    }

    /// Starts it again after [`stop`](Self::stop), with the same folders.
    async fn start_again(&mut self) {
        (self.api, self.workers) = launch(&self.place, &self.options).await;
    }

    /// The sum of a metric of workers, over all processes that have some.
    async fn worker_metric(&self, name: &str, label: &str) -> f64 {
        let mut sum = 0.0;
        let embedded = self.workers.is_empty().then_some(&self.api);
        for process in self.workers.iter().chain(embedded) {
            sum += process.client.metric(name, label).await;
        }
        sum
    }

    async fn answer(&self, path: &str, body: &Value) -> Value {
        let response = client().post(format!("{}{path}", self.client().url)).json(body).send().await.unwrap();
        let (status, body) = (response.status(), response.text().await.unwrap());
        assert!(status.is_success(), "{status}: {body}");
        serde_json::from_str(&body).unwrap()
    }
}

async fn launch(place: &Place, options: &Options) -> (Process, Vec<Process>) {
    match place {
        Place::Embedded(data) => {
            let roles = options.roles.join(",");
            let own = ["--workers", &roles, "--set", "tiers.g1=32MiB", "--set", "tiers.g2=32MiB"];
            let own = [&own[..], &["--set", "tiers.g3=64MiB"]].concat();
            let arguments = [&own[..], &strs(&options.worker), &strs(&options.frontend)].concat();
            (Process::start(data.path(), &arguments, &[]).await, Vec::new())
        }
        Place::Distributed(cluster, seats) => {
            let mut workers = Vec::new();
            for (seat, role) in seats.iter().zip(&options.roles) {
                let arguments = [&["--workers", role][..], &strs(&options.worker)].concat();
                workers.push(cluster.worker_at(seat, &arguments).await);
            }
            let frontend = cluster.frontend_with(&strs(&options.frontend)).await;
            until_workers(&frontend, workers.len()).await;
            (frontend, workers)
        }
    }
}

fn one_worker() -> Options {
    Options { roles: vec!["both:1"], ..Options::default() }
}

/// Token ids of every vocabulary, different for each `seed`.
fn prompt(seed: u32, tokens: u32) -> Vec<u32> {
    (0..tokens).map(|nth| 10 + (seed * 31 + nth * 7) % 500).collect()
}

fn cached(answer: &Value) -> u64 {
    answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap()
}

/// Waits for what other processes learn by events. The limit is for a machine that runs several suites at once.
async fn within_minutes(what: &str, condition: impl AsyncFn() -> bool) {
    let wait = async {
        while !condition().await {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    assert!(tokio::time::timeout(Duration::from_mins(5), wait).await.is_ok(), "{what}");
}

async fn a_chat_is_answered_whole_and_streamed_with_the_same_text(layout: Layout) {
    let Some(deployment) = Deployment::start(layout, one_worker()).await else { return };
    let mut body = json!({"model": "tiny", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 8,
        "temperature": 0});
    let whole = deployment.answer("/v1/chat/completions", &body).await;
    assert_eq!(whole["usage"]["completion_tokens"], 8);
    body["stream"] = true.into();
    let url = format!("{}/v1/chat/completions", deployment.client().url);
    let events = client().post(url).json(&body).send().await.unwrap().text().await.unwrap();
    let data: Vec<_> = events.lines().filter_map(|line| line.strip_prefix("data: ")).collect();
    assert_eq!(data.last(), Some(&"[DONE]"));
    let chunks = data[..data.len() - 1].iter().map(|line| serde_json::from_str::<Value>(line).unwrap());
    let text: String =
        chunks.filter_map(|chunk| Some(chunk["choices"][0]["delta"]["content"].as_str()?.to_owned())).collect();
    assert_eq!(text, whole["choices"][0]["message"]["content"].as_str().unwrap());
}

async fn a_second_turn_hits_the_blocks_of_the_first(layout: Layout) {
    let Some(deployment) = Deployment::start(layout, one_worker()).await else { return };
    let mut messages = vec![json!({"role": "user", "content": "tell me a story of a wagon ".repeat(20)})];
    let mut before = 0;
    for turn in 0..3 {
        let body = json!({"model": "tiny", "messages": messages, "max_tokens": 24, "temperature": 0});
        let answer = deployment.answer("/v1/chat/completions", &body).await;
        assert!(cached(&answer) + 32 >= before, "turn {turn}: {} cached of {before} before", cached(&answer));
        assert_eq!(cached(&answer) == 0, turn == 0);
        before = answer["usage"]["prompt_tokens"].as_u64().unwrap();
        messages.push(json!({"role": "assistant", "content": answer["choices"][0]["message"]["content"]}));
        messages.push(json!({"role": "user", "content": "and then?"}));
    }
}

async fn a_prompt_is_answered_from_the_ssd_after_a_restart(layout: Layout) {
    let Some(mut deployment) = Deployment::start(layout, one_worker()).await else { return };
    let mut texts = Vec::new();
    for seed in 0..4 {
        let (choice, cached) = deployment.client().complete(&prompt(seed, 640)).await.unwrap();
        assert_eq!(cached, 0);
        texts.push(choice["text"].clone());
    }
    deployment.stop();
    deployment.start_again().await;
    // Blocks that load too slowly are computed, so not every prompt must be cached.
    let mut hits = 0;
    for (seed, text) in texts.iter().enumerate() {
        let (choice, cached) = deployment.client().complete(&prompt(seed as u32, 640)).await.unwrap();
        assert_eq!(choice["text"], *text);
        hits += cached;
    }
    assert!(hits > 0, "no prompt was cached after the restart");
    assert!(deployment.worker_metric("blockyard_tier_hit_blocks_total", "tier=\"g3\"").await > 0.0);
}

async fn blocks_in_the_shared_store_are_found_by_another_deployment(layout: Layout) {
    let shared = tempfile::tempdir().unwrap();
    let store = vec!["--g4".to_owned(), shared.path().to_str().unwrap().to_owned()];
    let options = Options { worker: store, ..one_worker() };
    let Some(mut writer) = Deployment::start(layout, options.clone()).await else { return };
    // The reader starts before the blocks exist, so it must follow later manifests.
    let Some(reader) = Deployment::start(layout, options).await else { return };
    let mut texts = Vec::new();
    for seed in 0..4 {
        texts.push(writer.client().complete(&prompt(seed, 640)).await.unwrap().0["text"].clone());
    }
    // A clean stop writes what is pending.
    writer.stop();
    let all = async || reader.worker_metric("blockyard_tier_blocks", "tier=\"g4\"").await >= 4.0 * 39.0;
    within_minutes("the reader sees the blocks of the writer", all).await;
    for (seed, text) in texts.iter().enumerate() {
        let (choice, _) = reader.client().complete(&prompt(seed as u32, 640)).await.unwrap();
        assert_eq!(choice["text"], *text);
    }
    assert!(reader.worker_metric("blockyard_tier_hit_blocks_total", "tier=\"g4\"").await > 0.0);
}

async fn a_remote_prefill_gives_the_same_text(layout: Layout) {
    let split = Options {
        roles: vec!["prefill:1", "decode:1"],
        frontend: ["--set", "router.disaggregation=always"].map(str::to_owned).to_vec(),
        ..Options::default()
    };
    let Some(split) = Deployment::start(layout, split).await else { return };
    let Some(single) = Deployment::start(layout, one_worker()).await else { return };
    // A hand-over that does not begin in time is abandoned, and the prompt computed: then the next one is tried.
    let mut texts = Vec::new();
    let handed_over = async || split.worker_metric("blockyard_tier_transfer_bytes_total", "tier=\"peer\"").await;
    while handed_over().await == 0.0 {
        assert!(texts.len() < 100, "no prompt of a hundred was handed over");
        let (choice, cached) = split.client().complete(&prompt(texts.len() as u32, 1500)).await.unwrap();
        assert_eq!(cached, 0, "blocks that were computed for this request are not cached tokens");
        texts.push(choice["text"].clone());
    }
    for (seed, text) in texts.iter().enumerate() {
        let (choice, _) = single.client().complete(&prompt(seed as u32, 1500)).await.unwrap();
        assert_eq!(choice["text"], *text);
    }
}

async fn a_running_stream_ends_before_the_deployment_stops(layout: Layout) {
    let Some(mut deployment) = Deployment::start(layout, one_worker()).await else { return };
    let body = json!({"model": "tiny", "prompt": prompt(5, 64), "max_tokens": 400, "temperature": 0,
        "ignore_eos": true, "stream": true});
    let undisturbed = Streamed::start(&deployment.api, &body).await.read_to_the_end().await;
    let mut stream = Streamed::start(&deployment.api, &body).await;
    stream.read().await;
    let reading = tokio::spawn(stream.read_to_the_end());
    deployment.stop();
    assert_eq!(reading.await.unwrap(), undisturbed);
}

async fn all_choices_of_a_request_are_streamed(layout: Layout) {
    let Some(deployment) = Deployment::start(layout, one_worker()).await else { return };
    let body = json!({"model": "tiny", "prompt": prompt(6, 200), "max_tokens": 40, "temperature": 1, "seed": 3, "n": 4,
        "ignore_eos": true, "stream": true});
    let texts = Streamed::start(&deployment.api, &body).await.read_to_the_end().await;
    let mut whole = body;
    whole["stream"] = false.into();
    let answer = deployment.answer("/v1/completions", &whole).await;
    let mut choices = answer["choices"].as_array().unwrap().clone();
    choices.sort_by_key(|choice| choice["index"].as_u64());
    let same: Vec<&str> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, same);
}

async fn a_client_that_disconnects_stops_the_computation(layout: Layout) {
    let Some(deployment) = Deployment::start(layout, one_worker()).await else { return };
    let body = json!({"model": "tiny", "prompt": prompt(7, 64), "max_tokens": 10_000, "ignore_eos": true,
        "stream": true});
    let mut stream = Streamed::start(&deployment.api, &body).await;
    stream.read().await;
    drop(stream);
    let idle = async || deployment.worker_metric("blockyard_worker_requests_running", "").await < 1.0;
    within_minutes("the request ends", idle).await;
    let generated = deployment.worker_metric("blockyard_worker_generated_tokens_total", "").await;
    assert!(generated < 10_000.0, "{generated} tokens were generated for a client that was gone");
}

/// The prompts of this seed and of the next hundred begin with no block of another one of these tests.
const HOT_SEED: u32 = 200;
/// More than the 1,024 tokens of which demand is counted.
const HOT_TOKENS: u32 = 1100;
/// Blocks of the prefix that is copied.
const SHARED_BLOCKS: u64 = 64;

/// Two workers, of which a request gets the one of its session, unless that is overloaded.
fn two_workers(worker: &[&str], frontend: &[&str]) -> Options {
    let owned =
        |arguments: &[&str]| -> Vec<String> { arguments.iter().map(|argument| (*argument).to_owned()).collect() };
    let frontend = [&["--set", "router.policy=session"][..], frontend].concat();
    Options { roles: vec!["both:1", "both:1"], worker: owned(worker), frontend: owned(&frontend) }
}

/// Two workers: one that serves the requests for a prompt, and an idle one.
struct Imbalance<'a> {
    deployment: &'a Deployment,
    /// The session of the first.
    busy: String,
    /// The other worker and its session.
    idle: (String, String),
}

impl<'a> Imbalance<'a> {
    async fn new(deployment: &'a Deployment) -> Self {
        let mut sessions = BTreeMap::new();
        for nth in 0..100 {
            let session = format!("session {nth}");
            let (explained, _) = explained(deployment, &for_session(&prompt(nth, 20), 1, &session)).await;
            sessions.entry(explained["chosen"].as_str().unwrap().to_owned()).or_insert(session);
        }
        assert_eq!(sessions.len(), 2, "a hundred sessions belong to two workers");
        let (_, busy) = sessions.pop_first().unwrap();
        Self { deployment, busy, idle: sessions.pop_first().unwrap() }
    }

    /// Asks for one prompt after the other, until a copy of one has this outcome and the idle worker was not asked for
    /// it. Returns that prompt. On a machine with much other load the steps of the busy worker may take so long that a
    /// request of its session goes to the idle one, which then has the prompt in G1: as a copy, or as computed there.
    async fn ask_until_copy(&self, outcome: &str) -> Vec<u32> {
        for nth in 0..100 {
            let counts = async || (self.copies(outcome).await, self.requests_to_idle().await);
            let hot = prompt(HOT_SEED + nth, HOT_TOKENS);
            let (copies, to_idle) = counts().await;
            self.ask(&hot).await;
            let (copies_after, to_idle_after) = counts().await;
            if copies_after > copies && to_idle_after <= to_idle {
                return hot;
            }
        }
        panic!("no copy is {outcome}, after 1,200 requests for 100 prompts");
    }

    /// Asks for a prompt, twelve requests at a time, and waits for the ends of these and of the copies that they
    /// caused. With fewer, the steps of the busy worker are little longer than those of an idle one, and a copy saves
    /// little.
    async fn ask(&self, prompt: &[u32]) {
        let mut body = for_session(prompt, 100, &self.busy);
        body["stream"] = true.into();
        let mut streams = Vec::new();
        for _ in 0..12 {
            streams.push(Streamed::start(&self.deployment.api, &body).await);
        }
        for stream in streams {
            stream.read_to_the_end().await;
        }
        // Each copy is counted when it starts, and when it ends.
        let counted = async || self.deployment.client().metric("blockyard_router_prefix_copies_total", "").await;
        let all_ended = async || counted().await >= 2.0 * self.copies("started").await;
        within_minutes("the copies end", all_ended).await;
    }

    /// The blocks of a prompt that the router knows to be in the host memory of the idle worker.
    async fn copied_blocks(&self, prompt: &[u32]) -> u64 {
        let (explained, _) = explained(self.deployment, &for_session(prompt, 1, &self.busy)).await;
        let candidates = explained["candidates"].as_array().unwrap();
        let idle = candidates.iter().find(|candidate| candidate["worker"] == self.idle.0.as_str());
        idle.map_or(0, |idle| idle["cached_blocks"]["g2"].as_u64().unwrap_or(0))
    }

    /// Requests that the router has sent to the idle worker.
    async fn requests_to_idle(&self) -> f64 {
        let label = format!("worker=\"{}\"", self.idle.0);
        self.deployment.client().metric("blockyard_router_requests_total", &label).await
    }

    /// Copies that the router has counted with this outcome.
    async fn copies(&self, outcome: &str) -> f64 {
        let label = format!("outcome=\"{outcome}\"");
        self.deployment.client().metric("blockyard_router_prefix_copies_total", &label).await
    }
}

fn for_session(prompt: &[u32], tokens: u32, session: &str) -> Value {
    json!({"model": "tiny", "prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": true,
        "prompt_cache_key": session})
}

/// The router's explanation of a request, and its answer.
async fn explained(deployment: &Deployment, body: &Value) -> (Value, Value) {
    let request = client().post(format!("{}/v1/completions", deployment.client().url)).json(body);
    let response = request.header("x-blockyard-explain", "1").send().await.unwrap();
    let explained = response.headers()["x-blockyard-explain"].to_str().unwrap().to_owned();
    (serde_json::from_str(&explained).unwrap(), response.json().await.unwrap())
}

async fn a_hot_prefix_is_copied_to_an_idle_worker_before_a_request_needs_it(layout: Layout) {
    let Some(deployment) = Deployment::start(layout, two_workers(&[], &[])).await else { return };
    let load = Imbalance::new(&deployment).await;
    let hot = load.ask_until_copy("complete").await;
    within_minutes("the router learns of the copy", async || load.copied_blocks(&hot).await >= SHARED_BLOCKS).await;
    let prefetched = deployment.worker_metric("blockyard_worker_prefetched_blocks_total", "").await;
    assert!(prefetched >= SHARED_BLOCKS as f64, "{prefetched}");
    let (_, there) = explained(&deployment, &for_session(&hot, 24, &load.busy)).await;
    let (decision, here) = explained(&deployment, &for_session(&hot, 24, &load.idle.1)).await;
    assert_eq!(decision["chosen"], load.idle.0.as_str(), "{decision}");
    assert_eq!(here["choices"][0]["text"], there["choices"][0]["text"]);
    // On a busy machine some of the blocks may load too slowly, and are computed.
    assert!(cached(&here) > 0, "{here}");
}

async fn a_worker_without_host_memory_gets_no_copy(layout: Layout) {
    let options = two_workers(&["--set", "tiers.g2=off"], &[]);
    let Some(deployment) = Deployment::start(layout, options).await else { return };
    let load = Imbalance::new(&deployment).await;
    load.ask_until_copy("no_memory").await;
    assert!(load.copies("complete").await < 1.0);
    assert!(deployment.worker_metric("blockyard_worker_prefetched_blocks_total", "").await < 1.0);
}

async fn no_prefix_is_copied_ahead_of_demand_when_that_is_off(layout: Layout) {
    let options = two_workers(&[], &["--set", "router.prefetch=false"]);
    let Some(deployment) = Deployment::start(layout, options).await else { return };
    let load = Imbalance::new(&deployment).await;
    // More than a copy takes that is made.
    let hot = prompt(HOT_SEED, HOT_TOKENS);
    for _ in 0..3 {
        load.ask(&hot).await;
    }
    assert!(load.copies("started").await < 1.0);
    assert!(deployment.worker_metric("blockyard_worker_prefetched_blocks_total", "").await < 1.0);
}

/// Longest difference in cost of workers that are taken as equal, in seconds.
const TIE: f64 = 0.026;

/// Whether a request waits behind others for longer than a worker without a queue would have needed for all of it.
fn waits_although_a_worker_is_free(decision: &Value) -> bool {
    let candidates = decision["candidates"].as_array().unwrap();
    let term = |candidate: &Value, name: &str| candidate["terms_s"][name].as_f64().unwrap_or_default();
    // The chosen worker is the first. Its steps may be shorter than those of the average worker.
    let (chosen, others) = candidates.split_first().unwrap();
    let waits = term(chosen, "queue") + term(chosen, "decode").min(0.0);
    let costs = |other: &Value| other["cost_s"].as_f64().unwrap();
    others.iter().any(|other| term(other, "queue") <= 0.0 && waits > costs(other) + TIE)
}

async fn requests_with_a_hot_prefix_are_shared_by_all_workers(layout: Layout) {
    const WORKERS: usize = 4;
    const REQUESTS: usize = 48;
    const ROUNDS: usize = 10;
    let options = Options { roles: vec!["both:1"; WORKERS], ..Options::default() };
    let Some(deployment) = Deployment::start(layout, options).await else { return };
    // Each has an end of its own.
    let body = |nth: usize| {
        let tokens = [prompt(HOT_SEED, HOT_TOKENS), prompt(nth as u32, 20)].concat();
        json!({"model": "tiny", "prompt": tokens, "max_tokens": 32, "temperature": 0, "ignore_eos": true})
    };
    // One after the other, so that few workers have the prefix.
    for nth in 0..3 {
        explained(&deployment, &body(nth)).await;
    }
    let mut served = BTreeMap::<String, usize>::new();
    for round in 1..=ROUNDS {
        let bodies: Vec<Value> = (0..REQUESTS).map(|nth| body(round * REQUESTS + nth)).collect();
        let answers = join_all(bodies.iter().map(|body| explained(&deployment, body))).await;
        served.clear();
        for (decision, _) in &answers {
            assert!(!waits_although_a_worker_is_free(decision), "{decision}");
            *served.entry(decision["chosen"].as_str().unwrap().to_owned()).or_default() += 1;
        }
        // Half of an equal share.
        if served.len() == WORKERS && served.values().all(|count| *count >= REQUESTS / WORKERS / 2) {
            return;
        }
    }
    panic!("the requests are not shared by the workers after {ROUNDS} rounds: {served:?} of {REQUESTS}");
}
