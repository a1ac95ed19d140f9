//! Events that are lost, late, or of another life; and stores that several workers reach.

use super::fake::{BLOCK, MODEL, Yard, names, prompt, settle, stored};
use super::{believed, defaults};
use crate::settings::Settings;
use kvbm::{BlockEvent, Epoch, Level};
use std::sync::Arc;
use std::time::Duration;
use worker::plane::local::Link;
use worker::plane::{Event, EventBody, Events, Load, Phase, Source, StoreId};

#[tokio::test(start_paused = true)]
async fn a_lost_event_is_repaired_by_a_snapshot_while_the_stale_view_serves() {
    let yard = Yard::over(Settings::default(), Link { lag: Duration::from_secs(2), ..Link::default() });
    let worker = yard.worker(1, Phase::Both).await;
    let request = prompt(1, 1600);
    let blocks = names(&request);
    tokio::time::sleep(Duration::from_secs(5)).await;
    yard.announce(&worker, stored(Level::G1, &blocks[..10]), true);
    tokio::time::sleep(Duration::from_secs(5)).await;
    yard.announce(&worker, stored(Level::G1, &blocks[10..20]), false);
    yard.announce(&worker, stored(Level::G1, &blocks[20..30]), true);
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(believed(&yard, &request).await, 10, "the snapshot is still on its way");
    tokio::time::sleep(Duration::from_secs(3)).await;
    assert_eq!(believed(&yard, &request).await, 30);
    assert_eq!(yard.metric("blockyard_router_snapshots_total"), 2, "one when it joined, one now");
}

#[tokio::test(start_paused = true)]
async fn a_lost_last_event_is_noticed_by_the_next_reports() {
    let yard = defaults();
    let worker = yard.worker(1, Phase::Both).await;
    let request = prompt(1, 1600);
    yard.announce(&worker, stored(Level::G1, &names(&request)[..10]), false);
    for _ in 0..3 {
        yard.report(&worker, Load::default());
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    assert_eq!(believed(&yard, &request).await, 10);
}

#[tokio::test(start_paused = true)]
async fn a_new_life_forgets_the_old_one_and_a_late_farewell_does_not_take_it_down() {
    let yard = defaults();
    let request = prompt(1, 1600);
    let old = yard.worker(1, Phase::Both).await;
    yard.announce(&old, stored(Level::G1, &names(&request)), true);
    settle().await;
    assert_eq!(believed(&yard, &request).await, 99);
    let new = yard.join(1, Phase::Both, MODEL, 2, &[]).await;
    yard.announce(&old, stored(Level::G1, &names(&request)), true);
    settle().await;
    assert_eq!(believed(&yard, &request).await, 0);
    yard.announce(&new, stored(Level::G2, &names(&request)[..5]), true);
    settle().await;
    assert_eq!(believed(&yard, &request).await, 5);
    assert_eq!(new.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_shared_store_serves_every_worker_that_reaches_it() {
    let yard = defaults();
    let (request, store) = (prompt(1, 1600), Source::Store(StoreId(5)));
    let log = Arc::new(kvbm::EventLog::new(Epoch(3)));
    log.announce(stored(Level::G3, &names(&request)[..40]));
    let from = log.clone();
    let _offer = yard.bus.offer(store, Arc::new(move || from.snapshot()));
    let a = yard.join(1, Phase::Both, MODEL, 1, &[5]).await;
    let _b = yard.join(2, Phase::Both, MODEL, 1, &[]).await;
    assert_eq!(believed(&yard, &request).await, 40, "the one that reaches it is the cheaper");
    let event = stored(Level::G3, &names(&request)[40..50]);
    log.announce(event.clone());
    yard.bus.publish(Event { source: store, epoch: Epoch(3), body: EventBody::Block { number: 2, event } });
    settle().await;
    let explained = yard.explain(request).await;
    assert_eq!(explained["candidates"][0]["cached_blocks"]["g3"], 50);
    assert_eq!(a.requests(), 2);
}

#[tokio::test(start_paused = true)]
async fn a_link_that_loses_every_fifth_event_costs_no_truth_in_the_end() {
    let yard = Yard::over(Settings::default(), Link { loss: 0.2, seed: 11, ..Link::default() });
    let mut workers = Vec::new();
    for id in 1..=3 {
        workers.push(yard.worker(id, Phase::Both).await);
    }
    for round in 0..60u32 {
        for (id, worker) in (0..).zip(&workers) {
            let blocks = names(&prompt(round * 3 + id, 20 * BLOCK));
            yard.announce(worker, stored(Level::G1, &blocks), true);
            yard.announce(worker, BlockEvent::Removed { level: Level::G1, blocks: blocks[..7].to_vec() }, true);
            yard.report(worker, Load::default());
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
    }
    for _ in 0..10 {
        for worker in &workers {
            yard.report(worker, Load::default());
        }
        tokio::time::sleep(Duration::from_secs(1)).await;
    }
    let announced: usize = workers.iter().map(|worker| worker.log.snapshot().blocks.len()).sum();
    assert_eq!(yard.router.core.index.memberships(), announced);
    assert!(yard.metric("blockyard_router_snapshots_total") > 10, "the link lost nothing: the test shows nothing");
}
