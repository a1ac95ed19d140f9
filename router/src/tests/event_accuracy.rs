//! Workers whose KV events are missing or wrong: routing by an estimate of their cache.

use super::harness::{BLOCK, FakeEngine, Harness, MODEL, card, names, prompt, relayed, settle, stored};
use super::{cached_blocks, defaults};
use crate::index::Holder;
use kvbm::{BlockEvent, ChainKey, Epoch, EventLog, Level, SequenceHash};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{ModelCard, Request};
use worker::plane::{Event, EventBody, Events, Load, Role, Source, StoreId, WorkerId};

/// Time in which event accuracy is evaluated.
const EVALUATION: Duration = Duration::from_secs(8);

/// A prompt for servers of another program.
fn relayed_prompt(family: u32, tokens: usize) -> Request {
    relayed("/v1/completions", prompt(family, tokens))
}

/// The remark about a worker's index source in an explanation.
fn index_remark(explanation: &Value, id: &str) -> Option<String> {
    let candidates = explanation["candidates"].as_array().unwrap();
    let row = candidates.iter().find(|row| row["worker"] == id).unwrap();
    row["index"].as_str().map(str::to_owned)
}

/// Index source of a worker, from its metric.
fn index_source(harness: &Harness, id: &str) -> String {
    let [source, _] = index_labels(harness, id);
    source
}

/// Index source of a worker and the reason, from its metric.
fn index_labels(harness: &Harness, id: &str) -> [String; 2] {
    let families = harness.registry.gather();
    let family = families.iter().find(|family| family.name() == "blockyard_router_worker_index_source").unwrap();
    let label = |metric: &prometheus::proto::Metric, name: &str| {
        let found = metric.get_label().iter().find(|label| label.name() == name);
        found.map(|label| label.value().to_owned()).unwrap()
    };
    let metrics = family.get_metric().iter();
    let mut of = metrics.filter(|metric| label(metric, "worker") == id && metric.get_gauge().get_value() > 0.0);
    let metric = of.next().unwrap();
    assert!(of.next().is_none(), "one source at a time");
    ["source", "reason"].map(|name| label(metric, name))
}

/// Sends a request, and announces the blocks that the worker computed.
async fn request_and_announce(harness: &Harness, worker: &FakeEngine, request: &Request) {
    harness.answer(request.clone()).await.unwrap();
    let mut blocks = names(request);
    blocks.truncate((request.tokens.len() - 1) / BLOCK);
    harness.announce(worker, stored(Level::G1, &blocks), true);
    settle().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_without_events_is_routed_by_an_estimate() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    for worker in [&a, &b] {
        worker.cache_blocks(&[]);
    }
    for family in 0..4 {
        harness.answer(prompt(family, 1600)).await.unwrap();
    }
    tokio::time::sleep(EVALUATION).await;
    for worker in ["w1", "w2"] {
        assert_eq!(index_labels(&harness, worker), ["estimated", "no_events"]);
    }
    let homes = [a.families(), b.families()];
    for round in 0..3 {
        for family in 0..4 {
            let explained = harness.explain(prompt(family, 1600)).await;
            assert_eq!(explained["cached_tokens"], 1584, "round {round}: {explained}");
            for worker in ["w1", "w2"] {
                assert_eq!(index_remark(&explained, worker).as_deref(), Some("estimated: publishes no KV events"));
            }
        }
    }
    for (worker, home) in [(&a, &homes[0]), (&b, &homes[1])] {
        assert!(worker.families().iter().all(|family| home.contains(family)), "each prompt returns to its worker");
    }
    assert_eq!(harness.metric("blockyard_router_prefix_overpredicted_tokens_total"), 0);
}

/// A server that says so when it is added: the second request already finds the first.
#[tokio::test(start_paused = true)]
async fn the_cache_of_a_server_that_publishes_no_events_is_estimated_from_the_start() {
    let harness = defaults();
    let server = || ModelCard { is_relayed: true, has_exact_blocks: false, ..card(MODEL) };
    let mut servers = Vec::new();
    for id in 1..=2 {
        servers.push(harness.join_with(id, Role::Both, server(), 1, &[]).await);
    }
    assert_eq!([index_source(&harness, "w1"), index_source(&harness, "w2")], ["estimated"; 2]);
    for _ in 0..4 {
        harness.answer(relayed_prompt(7, 1600)).await.unwrap();
    }
    let mut requests: Vec<usize> = servers.iter().map(|server| server.requests()).collect();
    requests.sort_unstable();
    assert_eq!(requests, [0, 4], "one server gets them all");
}

#[tokio::test(start_paused = true)]
async fn prompts_of_estimated_tokens_say_nothing_of_the_events() {
    for (has_estimated_tokens, source) in [(false, "estimated"), (true, "events")] {
        let harness = defaults();
        harness.worker(1, Role::Both).await.cache_blocks(&[]);
        for _ in 0..2 {
            for family in 0..10 {
                let mut request = prompt(family, 1600);
                request.attributes.has_estimated_tokens = has_estimated_tokens;
                harness.answer(request).await.unwrap();
            }
        }
        tokio::time::sleep(EVALUATION).await;
        assert_eq!(index_source(&harness, "w1"), source);
    }
}

#[tokio::test(start_paused = true)]
async fn prompts_of_unknown_tokens_are_found_by_their_text() {
    let harness = defaults();
    let workers = [harness.relayed_worker(1).await, harness.relayed_worker(2).await];
    let text = |family| {
        let mut request = relayed_prompt(family, 1600);
        request.attributes.has_estimated_tokens = true;
        request
    };
    let remark = "estimated: the tokens of the prompt are unknown; compared by its text";
    let first = harness.explain(text(7)).await;
    settle().await;
    let again = harness.explain(text(7)).await;
    assert_eq!((&again["cached_tokens"], &again["chosen"]), (&1584.into(), &first["chosen"]));
    assert_eq!(index_remark(&again, "w1").as_deref(), Some(remark));
    let known = harness.explain(relayed_prompt(7, 1600)).await;
    assert_eq!((known["cached_tokens"].as_u64(), index_remark(&known, "w1")), (Some(0), None), "events have the rest");
    for worker in &workers {
        harness.announce(worker, stored(Level::G1, &names(&relayed_prompt(8, 1600))), true);
    }
    tokio::time::sleep(EVALUATION).await;
    assert_eq!([index_source(&harness, "w1"), index_source(&harness, "w2")], ["events"; 2]);
    assert_eq!(cached_blocks(&harness, &relayed_prompt(8, 1600)).await, 99);
    assert_eq!(cached_blocks(&harness, &text(7)).await, 99, "both are known at once");
    assert_eq!(cached_blocks(&harness, &text(8)).await, 0, "the text of announced tokens was not sent");
    tokio::time::sleep(crate::fleet::ASSUMED_MAX_AGE + EVALUATION).await;
    assert_eq!(
        [cached_blocks(&harness, &relayed_prompt(8, 1600)).await, cached_blocks(&harness, &text(7)).await],
        [99, 0]
    );
}

#[tokio::test(start_paused = true)]
async fn texts_outlive_a_time_of_inaccurate_events() {
    let harness = defaults();
    let worker = harness.relayed_worker(1).await;
    worker.cache_blocks(&[]);
    let mut text = relayed_prompt(7, 1600);
    text.attributes.has_estimated_tokens = true;
    harness.answer(text.clone()).await.unwrap();
    harness.answer(relayed_prompt(1, 1600)).await.unwrap();
    tokio::time::sleep(EVALUATION).await;
    assert_eq!(index_source(&harness, "w1"), "estimated");
    assert_eq!(
        [cached_blocks(&harness, &text).await, cached_blocks(&harness, &relayed_prompt(1, 1600)).await],
        [99, 99]
    );
    harness.announce(&worker, stored(Level::G1, &names(&relayed_prompt(1, 1600))[..10]), true);
    tokio::time::sleep(EVALUATION).await;
    assert_eq!(index_source(&harness, "w1"), "events");
    assert_eq!(
        [cached_blocks(&harness, &text).await, cached_blocks(&harness, &relayed_prompt(1, 1600)).await],
        [99, 10]
    );
}

#[tokio::test(start_paused = true)]
async fn an_estimate_is_bounded_by_the_workers_blocks_and_expires() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let room = |blocks| Load { total_blocks: blocks, ..Load::default() };
    harness.report(&worker, room(150));
    harness.answer(prompt(1, 1600)).await.unwrap();
    tokio::time::sleep(EVALUATION).await;
    assert_eq!(cached_blocks(&harness, &prompt(1, 1600)).await, 99);
    assert_eq!(cached_blocks(&harness, &prompt(2, 1600)).await, 0);
    assert_eq!(harness.router.core.index.entries(), 150);
    assert_eq!(cached_blocks(&harness, &prompt(1, 1600)).await, 51, "the end of the older prompt is evicted first");
    tokio::time::sleep(crate::fleet::ASSUMED_MAX_AGE + EVALUATION).await;
    assert_eq!(harness.router.core.index.entries(), 0);
    assert_eq!(index_source(&harness, "w1"), "estimated");
}

#[tokio::test(start_paused = true)]
async fn the_first_event_of_a_worker_replaces_its_estimate() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    worker.cache_blocks(&[]);
    harness.answer(prompt(1, 1600)).await.unwrap();
    tokio::time::sleep(EVALUATION).await;
    assert_eq!(index_source(&harness, "w1"), "estimated");
    harness.announce(&worker, stored(Level::G1, &names(&prompt(1, 1600))[..10]), true);
    tokio::time::sleep(EVALUATION).await;
    assert_eq!(index_source(&harness, "w1"), "events");
    let explained = harness.explain(prompt(1, 1600)).await;
    assert_eq!((explained["cached_tokens"].as_u64(), index_remark(&explained, "w1")), (Some(160), None));
    assert_eq!(harness.router.core.index.entries(), 10, "the estimate is removed");
    harness.discovery.expire(WorkerId(1));
    settle().await;
    assert_eq!(harness.router.core.index.entries(), 0);
}

/// As while the event plane is away.
#[tokio::test(start_paused = true)]
async fn the_last_events_count_when_no_further_ones_arrive() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let announced = &names(&prompt(1, 1600))[..99];
    worker.cache_blocks(announced);
    harness.announce(&worker, stored(Level::G1, announced), true);
    tokio::time::sleep(EVALUATION).await;
    harness.answer(prompt(2, 1600)).await.unwrap();
    tokio::time::sleep(EVALUATION).await;
    assert_eq!(index_labels(&harness, "w1"), ["estimated", "stopped_events"]);
    harness.answer(prompt(3, 1600)).await.unwrap();
    let remark = "estimated: no further KV events arrive; the last ones count, and the prompts since";
    for family in [1, 3] {
        let explained = harness.explain(prompt(family, 1600)).await;
        assert_eq!(explained["cached_tokens"], 1584, "family {family}: {explained}");
        assert_eq!(index_remark(&explained, "w1").as_deref(), Some(remark));
    }
    harness.announce(&worker, stored(Level::G1, &names(&prompt(2, 1600))[..10]), true);
    tokio::time::sleep(EVALUATION).await;
    assert_eq!(index_labels(&harness, "w1"), ["events", ""]);
    assert_eq!(
        [cached_blocks(&harness, &prompt(1, 1600)).await, cached_blocks(&harness, &prompt(2, 1600)).await],
        [99, 10]
    );
}

#[tokio::test(start_paused = true)]
async fn events_with_a_wrong_block_size_are_replaced_by_estimates() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    worker.cache_blocks(&[]);
    for round in 0..10 {
        for family in 0..2 {
            let request = prompt(family, 1600);
            harness.answer(request.clone()).await.unwrap();
            // The worker reports a block size of 16 tokens but announces blocks of 32.
            let root = ChainKey::root(&request.domain, &format!("{MODEL}@1"), None);
            harness.announce(&worker, stored(Level::G1, &root.hashes(&request.tokens, 2 * BLOCK)), round == 0);
            harness.report(&worker, Load::default());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let explained = harness.explain(prompt(0, 1600)).await;
    let why = "estimated: reports hits on blocks that its KV events do not contain; check its block size";
    assert_eq!(index_remark(&explained, "w1").as_deref(), Some(why));
    assert_eq!(index_labels(&harness, "w1"), ["estimated", "missing_events"]);
    assert_eq!(explained["cached_tokens"], 1584);
}

#[tokio::test(start_paused = true)]
async fn wrong_events_cause_an_estimate_until_they_are_right_again() {
    let harness = defaults();
    let (a, b) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    for worker in [&a, &b] {
        worker.cache_blocks(&[]);
    }
    // One worker announces blocks that it never has.
    let wrong_blocks = |family| names(&prompt(family, 1600));
    for family in 0..10 {
        harness.announce(&a, stored(Level::G1, &wrong_blocks(family)), true);
    }
    settle().await;
    let snapshots = harness.resyncs("snapshot_applied");
    for family in 0..8 {
        harness.answer(prompt(family, 1600)).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (8, 0), "its events are trusted at first");
    assert!(harness.metric("blockyard_router_prefix_overpredicted_tokens_total") > 8 * 1500);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(index_labels(&harness, "w1"), ["estimated", "wrong_events"]);
    assert_eq!(index_labels(&harness, "w2"), ["events", ""]);
    assert_eq!(harness.resyncs("snapshot_applied"), snapshots + 1);
    let explained = harness.explain(prompt(9, 1600)).await;
    assert_eq!(explained["cached_tokens"], 0, "its events are not used any more: {explained}");
    assert_eq!(
        index_remark(&explained, "w1").as_deref(),
        Some("estimated: reports no hits on blocks that its KV events contain")
    );

    // From now on it announces exactly what it has.
    harness.announce(&a, BlockEvent::Cleared { level: Level::G1 }, true);
    harness.announce(&b, BlockEvent::Cleared { level: Level::G1 }, true);
    let hot = prompt(30, 1600);
    a.cache_blocks(&names(&hot));
    harness.announce(&a, stored(Level::G1, &names(&hot)), true);
    harness.discovery.expire(WorkerId(2));
    settle().await;
    for _ in 0..15 {
        request_and_announce(&harness, &a, &hot).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(index_source(&harness, "w1"), "estimated", "too few accurate reports");
    for _ in 0..3 {
        request_and_announce(&harness, &a, &hot).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((index_source(&harness, "w1").as_str(), cached_blocks(&harness, &hot).await), ("events", 99));
}

#[tokio::test(start_paused = true)]
async fn accurate_events_are_never_replaced_by_an_estimate() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    worker.cache_blocks(&[]);
    for round in 0..20 {
        let same = futures::future::join_all((0..3).map(|_| burst_and_announce(&harness, &worker, round)));
        same.await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(index_source(&harness, "w1"), "events", "round {round}");
    }
}

/// Of several equal requests only one announces its blocks.
async fn burst_and_announce(harness: &Harness, worker: &FakeEngine, family: u32) {
    let request = prompt(family % 5, 1600);
    harness.answer(request.clone()).await.unwrap();
    let blocks: Vec<SequenceHash> = names(&request)[..99].to_vec();
    if !worker.log.snapshot().blocks().any(|block| block == (Level::G1, blocks[98])) {
        harness.announce(worker, stored(Level::G1, &blocks), true);
    }
    harness.report(worker, Load::default());
}

#[tokio::test(start_paused = true)]
async fn the_digest_reveals_divergence_without_a_gap() {
    let harness = defaults();
    let worker = harness.worker(1, Role::Both).await;
    let (holder, index) = (Holder::Worker(WorkerId(1)), &harness.router.core.index);
    let blocks = names(&prompt(1, 1600));
    for (level, blocks) in [(Level::G1, &blocks[..40]), (Level::G2, &blocks[..60]), (Level::G1, &blocks[..40])] {
        harness.announce(&worker, stored(level, blocks), true);
    }
    settle().await;
    let removed = |level, blocks: &[SequenceHash]| BlockEvent::Removed { level, blocks: blocks.to_vec() };
    // Three divergences: an event lost, one applied as another, one applied at another level.
    let drifts = [
        vec![removed(Level::G1, &blocks[39..40])],
        vec![removed(Level::G2, &blocks[50..51]), stored(Level::G2, &names(&prompt(2, 1600))[..1])],
        vec![removed(Level::G1, &blocks[7..8]), stored(Level::G3, &blocks[7..8])],
    ];
    for (nth, drift) in (0..).zip(drifts) {
        harness.publish_digest(&worker);
        settle().await;
        assert_eq!(harness.metric("blockyard_router_index_divergences_total"), nth, "no divergence yet");
        for event in &drift {
            index.apply(holder, event);
        }
        harness.report(&worker, Load::default());
        settle().await;
        assert_eq!(harness.resyncs("snapshot_applied"), 1 + nth, "no gap in the sequence numbers");
        harness.publish_digest(&worker);
        settle().await;
        assert_eq!(harness.resyncs("snapshot_applied"), 2 + nth);
        assert_eq!((cached_blocks(&harness, &prompt(1, 1600)).await, index.entries()), (60, 100));
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_last_event_of_a_store_is_found_by_its_digests() {
    let harness = defaults();
    let (request, store) = (prompt(1, 1600), Source::Store(StoreId(5)));
    let log = Arc::new(EventLog::new(Epoch(3)));
    let _offer = harness.events.offer(store, log.clone());
    let _worker = harness.join(1, Role::Both, MODEL, 1, &[5]).await;
    log.announce(stored(Level::G4, &names(&request)[..40]));
    for _ in 0..2 {
        let (number, digest) = log.digest();
        harness.events.publish(Event { source: store, epoch: Epoch(3), body: EventBody::Digest { number, digest } });
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    assert_eq!(cached_blocks(&harness, &request).await, 40);
}
