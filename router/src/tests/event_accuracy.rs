//! Workers whose events are missing, wrong, or about something else: routing goes on by what can be believed.

use super::harness::{BLOCK, Fake, MODEL, Yard, names, prompt, settle, stored};
use super::{believed, defaults};
use kvbm::{BlockEvent, ChainKey, Epoch, EventLog, Level, SequenceHash};
use serde_json::Value;
use std::sync::Arc;
use std::time::Duration;
use worker::engine::Request;
use worker::plane::{Event, EventBody, Events, Load, Phase, Source, StoreId, WorkerId};

/// As many seconds as it takes to be judged.
const A_WHILE: Duration = Duration::from_secs(8);

/// What the router says of its knowledge of a worker.
fn remark(explanation: &Value, id: &str) -> Option<String> {
    let candidates = explanation["candidates"].as_array().unwrap();
    let row = candidates.iter().find(|row| row["worker"] == id).unwrap();
    row["index"].as_str().map(str::to_owned)
}

/// The mode of a worker, as its metric says.
fn mode(yard: &Yard, id: &str) -> String {
    let families = yard.registry.gather();
    let family = families.iter().find(|family| family.name() == "blockyard_router_worker_index_source").unwrap();
    let label = |metric: &prometheus::proto::Metric, name: &str| {
        let found = metric.get_label().iter().find(|label| label.name() == name);
        found.map(|label| label.value().to_owned()).unwrap()
    };
    let metrics = family.get_metric().iter();
    let mut of = metrics.filter(|metric| label(metric, "worker") == id && metric.get_gauge().get_value() > 0.0);
    let mode = label(of.next().unwrap(), "source");
    assert!(of.next().is_none(), "one at a time");
    mode
}

/// Asks, and has the worker announce what it computed, as it says.
async fn honest(yard: &Yard, worker: &Fake, request: &Request) {
    yard.answer(request.clone()).await.unwrap();
    let mut blocks = names(request);
    blocks.truncate((request.tokens.len() - 1) / BLOCK);
    yard.announce(worker, stored(Level::G1, &blocks), true);
    settle().await;
}

#[tokio::test(start_paused = true)]
async fn a_worker_without_events_is_estimated_from_sent_prompts() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    for worker in [&a, &b] {
        worker.remember(&[]);
    }
    for family in 0..4 {
        yard.answer(prompt(family, 1600)).await.unwrap();
    }
    tokio::time::sleep(A_WHILE).await;
    assert_eq!([mode(&yard, "w1"), mode(&yard, "w2")], ["estimated"; 2]);
    let homes = [a.families(), b.families()];
    for round in 0..3 {
        for family in 0..4 {
            let explained = yard.explain(prompt(family, 1600)).await;
            assert_eq!(explained["cached_tokens"], 1584, "round {round}: {explained}");
            for worker in ["w1", "w2"] {
                assert_eq!(remark(&explained, worker).as_deref(), Some("estimated: publishes no KV events"));
            }
        }
    }
    for (worker, home) in [(&a, &homes[0]), (&b, &homes[1])] {
        assert!(worker.families().iter().all(|family| home.contains(family)), "each prompt returns to its blocks");
    }
    assert_eq!(yard.metric("blockyard_router_prefix_overpredicted_tokens_total"), 0);
}

#[tokio::test(start_paused = true)]
async fn what_was_sent_to_a_silent_worker_is_bounded_by_its_blocks_and_expires() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    let room = |blocks| Load { total_blocks: blocks, ..Load::default() };
    yard.report(&worker, room(150));
    yard.answer(prompt(1, 1600)).await.unwrap();
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(believed(&yard, &prompt(1, 1600)).await, 99);
    assert_eq!(believed(&yard, &prompt(2, 1600)).await, 0);
    assert_eq!(yard.router.core.index.entries(), 150);
    assert_eq!(believed(&yard, &prompt(1, 1600)).await, 51, "the end of the older prompt went first");
    tokio::time::sleep(crate::fleet::KEPT + A_WHILE).await;
    assert_eq!(yard.router.core.index.entries(), 0);
    assert_eq!(mode(&yard, "w1"), "estimated");
}

#[tokio::test(start_paused = true)]
async fn a_worker_that_begins_to_announce_is_known_by_its_events_at_once() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    worker.remember(&[]);
    yard.answer(prompt(1, 1600)).await.unwrap();
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(mode(&yard, "w1"), "estimated");
    yard.announce(&worker, stored(Level::G1, &names(&prompt(1, 1600))[..10]), true);
    tokio::time::sleep(A_WHILE).await;
    assert_eq!(mode(&yard, "w1"), "events");
    let explained = yard.explain(prompt(1, 1600)).await;
    assert_eq!((explained["cached_tokens"].as_u64(), remark(&explained, "w1")), (Some(160), None));
    assert_eq!(yard.router.core.index.entries(), 10, "what was sent is forgotten");
    yard.roster.expire(WorkerId(1));
    settle().await;
    assert_eq!(yard.router.core.index.entries(), 0);
}

#[tokio::test(start_paused = true)]
async fn events_of_another_block_size_fall_back_to_the_estimate() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    worker.remember(&[]);
    for round in 0..10 {
        for family in 0..2 {
            let request = prompt(family, 1600);
            yard.answer(request.clone()).await.unwrap();
            // It says 16 tokens in a block and names blocks of 32.
            let root = ChainKey::root(&request.domain, &format!("{MODEL}@1"), None);
            yard.announce(&worker, stored(Level::G1, &root.hashes(&request.tokens, 2 * BLOCK)), round == 0);
            yard.report(&worker, Load::default());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let explained = yard.explain(prompt(0, 1600)).await;
    let why = "estimated: reports hits on blocks that its KV events do not contain; check its block size";
    assert_eq!(remark(&explained, "w1").as_deref(), Some(why));
    assert_eq!((mode(&yard, "w1").as_str(), explained["cached_tokens"].as_u64()), ("estimated", Some(1584)));
}

#[tokio::test(start_paused = true)]
async fn an_index_that_lies_is_demoted_its_snapshot_taken_again_and_believed_when_it_tells_the_truth() {
    let yard = defaults();
    let (a, b) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    for worker in [&a, &b] {
        worker.remember(&[]);
    }
    // One announces what it never has.
    let lie = |family| names(&prompt(family, 1600));
    for family in 0..10 {
        yard.announce(&a, stored(Level::G1, &lie(family)), true);
    }
    settle().await;
    let snapshots = yard.repairs("snapshot_applied");
    for family in 0..8 {
        yard.answer(prompt(family, 1600)).await.unwrap();
    }
    assert_eq!((a.requests(), b.requests()), (8, 0), "it is believed");
    assert!(yard.metric("blockyard_router_prefix_overpredicted_tokens_total") > 8 * 1500);
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!([mode(&yard, "w1"), mode(&yard, "w2")], ["estimated", "events"]);
    assert_eq!(yard.repairs("snapshot_applied"), snapshots + 1);
    let explained = yard.explain(prompt(9, 1600)).await;
    assert_eq!(explained["cached_tokens"], 0, "its lies are not believed any more: {explained}");
    assert_eq!(
        remark(&explained, "w1").as_deref(),
        Some("estimated: reports no hits on blocks that its KV events contain")
    );

    // It repents: what it has is what it announced.
    yard.announce(&a, BlockEvent::Cleared { level: Level::G1 }, true);
    yard.announce(&b, BlockEvent::Cleared { level: Level::G1 }, true);
    let hot = prompt(30, 1600);
    a.remember(&names(&hot));
    yard.announce(&a, stored(Level::G1, &names(&hot)), true);
    yard.roster.expire(WorkerId(2));
    settle().await;
    for _ in 0..15 {
        honest(&yard, &a, &hot).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(mode(&yard, "w1"), "estimated", "not yet");
    for _ in 0..3 {
        honest(&yard, &a, &hot).await;
    }
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!((mode(&yard, "w1").as_str(), believed(&yard, &hot).await), ("events", 99));
}

#[tokio::test(start_paused = true)]
async fn an_honest_fleet_is_never_demoted_however_many_come_at_once() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    worker.remember(&[]);
    for round in 0..20 {
        let same = futures::future::join_all((0..3).map(|_| honest_burst(&yard, &worker, round)));
        same.await;
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert_eq!(mode(&yard, "w1"), "events", "round {round}");
    }
}

/// What each of several equal requests would announce is announced once.
async fn honest_burst(yard: &Yard, worker: &Fake, family: u32) {
    let request = prompt(family % 5, 1600);
    yard.answer(request.clone()).await.unwrap();
    let blocks: Vec<SequenceHash> = names(&request)[..99].to_vec();
    if !worker.log.snapshot().blocks().any(|block| block == (Level::G1, blocks[98])) {
        yard.announce(worker, stored(Level::G1, &blocks), true);
    }
    yard.report(worker, Load::default());
}

#[tokio::test(start_paused = true)]
async fn drift_that_no_number_shows_is_found_by_the_digest_and_repaired() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    let (source, index) = (Source::Worker(WorkerId(1)), &yard.router.core.index);
    let blocks = names(&prompt(1, 1600));
    for (level, blocks) in [(Level::G1, &blocks[..40]), (Level::G2, &blocks[..60]), (Level::G1, &blocks[..40])] {
        yard.announce(&worker, stored(level, blocks), true);
    }
    settle().await;
    let removed = |level, blocks: &[SequenceHash]| BlockEvent::Removed { level, blocks: blocks.to_vec() };
    // An event applied as nothing, one as another, one to another level.
    let drifts = [
        vec![removed(Level::G1, &blocks[39..40])],
        vec![removed(Level::G2, &blocks[50..51]), stored(Level::G2, &names(&prompt(2, 1600))[..1])],
        vec![removed(Level::G1, &blocks[7..8]), stored(Level::G3, &blocks[7..8])],
    ];
    for (nth, drift) in (0..).zip(drifts) {
        yard.attest(&worker);
        settle().await;
        assert_eq!(yard.metric("blockyard_router_index_divergences_total"), nth, "nothing is wrong yet");
        for event in &drift {
            index.apply(source, event);
        }
        yard.report(&worker, Load::default());
        settle().await;
        assert_eq!(yard.repairs("snapshot_applied"), 1 + nth, "numbers show nothing");
        yard.attest(&worker);
        settle().await;
        assert_eq!(yard.repairs("snapshot_applied"), 2 + nth);
        assert_eq!((believed(&yard, &prompt(1, 1600)).await, index.entries()), (60, 100));
    }
}

#[tokio::test(start_paused = true)]
async fn a_lost_last_event_of_a_store_is_noticed_by_its_digests() {
    let yard = defaults();
    let (request, store) = (prompt(1, 1600), Source::Store(StoreId(5)));
    let log = Arc::new(EventLog::new(Epoch(3)));
    let _offer = yard.bus.offer(store, log.clone());
    let _worker = yard.join(1, Phase::Both, MODEL, 1, &[5]).await;
    log.announce(stored(Level::G4, &names(&request)[..40]));
    for _ in 0..2 {
        let (number, digest) = log.digest();
        yard.bus.publish(Event { source: store, epoch: Epoch(3), body: EventBody::Digest { number, digest } });
        tokio::time::sleep(Duration::from_secs(10)).await;
    }
    assert_eq!(believed(&yard, &request).await, 40);
}
