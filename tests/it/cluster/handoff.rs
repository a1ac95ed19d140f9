//! Prompts that are computed in one process and handed over to another one, chunk by chunk, and what happens when one
//! of the two fails meanwhile.

use super::*;
use tokio::task::JoinHandle;

const RECEIVED: &str = "blockyard_worker_handoffs_received_total";
const SENT: &str = "blockyard_worker_handoffs_sent_total";
const BYTES: &str = "blockyard_worker_handoff_received_bytes_total";
const RUNNING: &str = "blockyard_worker_requests_running";

/// A prefill worker, decode workers, and a frontend that uses them for all prompts.
struct Split {
    prefill: Process,
    decode: Vec<Process>,
    frontend: Process,
    _cluster: Cluster,
}

impl Split {
    /// `None` without a NATS server.
    async fn start(decode: usize) -> Option<Self> {
        let cluster = Cluster::new()?;
        let seats: Vec<Seat> = (0..=decode).map(|nth| cluster.seat(&format!("w{nth}"))).collect();
        // Small chunks, so that a prompt takes many.
        let start = async |seat: &Seat, role: &str| {
            cluster.worker_at(seat, &["--set", "engine.max_prefill_chunk_tokens=64", "--workers", role]).await
        };
        let prefill = start(&seats[0], "prefill:1").await;
        let mut workers = Vec::new();
        for seat in &seats[1..] {
            workers.push(start(seat, "decode:1").await);
        }
        let frontend = cluster.frontend_with(&["--set", "router.disaggregation=always"]).await;
        until_workers(&frontend, 1 + decode).await;
        Some(Self { prefill, decode: workers, frontend, _cluster: cluster })
    }

    /// Sends a request in the background.
    fn ask(&self, prompt: Vec<u32>) -> JoinHandle<Value> {
        let client = self.frontend.client.clone();
        // The frontend may be killed.
        tokio::spawn(async move { client.ask(&prompt).await.unwrap_or_default() })
    }

    /// Sends a request, and waits until blocks of its unfinished prompt have arrived at a decode worker. Returns the
    /// request and the worker.
    async fn ask_and_wait(&self, seed: u32) -> (JoinHandle<Value>, usize) {
        let mut before = Vec::new();
        for worker in &self.decode {
            before.push(worker.client.metric(BYTES, "phase=\"prefill\"").await);
        }
        let asked = self.ask(long_prompt(seed));
        loop {
            for (at, worker) in self.decode.iter().enumerate() {
                if worker.client.metric(BYTES, "phase=\"prefill\"").await > before[at] {
                    assert!(!asked.is_finished(), "the prompt takes longer");
                    return (asked, at);
                }
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }

    /// Waits until a worker runs nothing and keeps nothing for others.
    async fn until_idle(worker: &Process) {
        while worker.client.metric(RUNNING, "").await > 0.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

/// Takes long enough to interfere.
fn long_prompt(seed: u32) -> Vec<u32> {
    (0..9_000).map(|i| (i * 7 + i * i / 11 + seed * 131) % 400 + 5).collect()
}

/// The answer of a worker that does both.
async fn alone(prompt: &[u32]) -> Value {
    let cluster = Cluster::new().unwrap();
    let _worker = cluster.worker(&cluster.seat("alone")).await;
    let frontend = cluster.frontend().await;
    text(&frontend.client.ask(prompt).await.unwrap())
}

fn text(answer: &Value) -> Value {
    let text = answer["choices"][0]["text"].clone();
    assert!(text.is_string(), "{answer}");
    text
}

/// Waits until a metric of a worker is above a value.
async fn until_counted(worker: &Process, name: &str, label: &str, above: f64) {
    while worker.client.metric(name, label).await <= above {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn most_blocks_arrive_while_another_process_computes_the_prompt() {
    let Some(split) = Split::start(1).await else { return };
    let (asked, _) = split.ask_and_wait(1).await;
    assert_eq!(text(&asked.await.unwrap()), alone(&long_prompt(1)).await);
    let [decode] = &split.decode[..] else { panic!("one") };
    assert!(decode.client.metric(RECEIVED, "complete").await > 0.0);
    assert!(decode.client.metric("blockyard_worker_handoff_seconds_count", "").await > 0.0);
    let remote = "outcome=\"remote_prefill\"";
    assert!(split.frontend.client.metric("blockyard_router_disaggregated_requests_total", remote).await > 0.0);
    until_counted(&split.prefill, SENT, "released", 0.0).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefill_worker_that_is_killed_or_frozen_costs_no_request() {
    for signal in ["KILL", "STOP"] {
        let Some(split) = Split::start(1).await else { return };
        let (asked, _) = split.ask_and_wait(2).await;
        split.prefill.signal(signal);
        assert_eq!(text(&asked.await.unwrap()), alone(&long_prompt(2)).await, "{signal}");
        let fallback = "outcome=\"local_fallback\"";
        let fallbacks = split.frontend.client.metric("blockyard_router_disaggregated_requests_total", fallback).await;
        assert!(fallbacks > 0.0, "{signal}");
        Split::until_idle(&split.decode[0]).await;
        if signal == "STOP" {
            // It has noticed that its request is gone, and keeps nothing.
            split.prefill.signal("CONT");
            until_counted(&split.prefill, SENT, "", 0.0).await;
            Split::until_idle(&split.prefill).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_decode_worker_that_is_killed_is_replaced_and_the_prefill_worker_keeps_nothing() {
    let Some(mut split) = Split::start(2).await else { return };
    let (asked, at) = split.ask_and_wait(3).await;
    split.decode[at].kill();
    assert_eq!(text(&asked.await.unwrap()), alone(&long_prompt(3)).await);
    until_counted(&split.prefill, SENT, "", 0.0).await;
    Split::until_idle(&split.prefill).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_client_that_leaves_during_the_prefill_leaves_nothing_behind() {
    let Some(split) = Split::start(1).await else { return };
    let (asked, _) = split.ask_and_wait(4).await;
    asked.abort();
    until_counted(&split.prefill, SENT, "cancelled", 0.0).await;
    // The prefill worker may have dropped the blocks before the decode worker learns that the request is cancelled.
    until_counted(&split.decode[0], RECEIVED, "", 0.0).await;
    for worker in [&split.prefill, &split.decode[0]] {
        Split::until_idle(worker).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_frontend_that_is_killed_during_the_prefill_leaves_nothing_behind() {
    let Some(mut split) = Split::start(1).await else { return };
    let (_asked, _) = split.ask_and_wait(5).await;
    split.frontend.kill();
    until_counted(&split.prefill, SENT, "cancelled", 0.0).await;
    // The prefill worker may have dropped the blocks before the decode worker learns that the request is cancelled.
    until_counted(&split.decode[0], RECEIVED, "", 0.0).await;
    for worker in [&split.prefill, &split.decode[0]] {
        Split::until_idle(worker).await;
    }
}
