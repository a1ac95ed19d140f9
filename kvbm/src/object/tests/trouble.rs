//! A store in trouble for a moment: requests are made again, slow reads are asked for twice, nobody waits for a dead one.

use super::flaky::{Flaky, Mood};
use super::*;
use tokio::time::Instant;

async fn loads(tier: &ObjectTier, seed: u64) -> bool {
    all(&load(tier, fingerprint(), names(&chain(seed, 5))).await)
}

#[tokio::test(start_paused = true)]
async fn a_request_that_fails_once_is_made_again() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    for (word, retries) in [("/blocks/", 1), ("/manifests/", 2)] {
        tier.caught_up().await;
        shared.set(Some((word, Mood::FailsOnce)));
        store(&*tier, chain(retries, 5)).await;
        assert_eq!(tier.counts().retries, retries, "{word}");
        assert!(loads(&tier, retries).await);
    }
    shared.set(Some(("/blocks/", Mood::FailsOnce)));
    assert!(loads(&tier, 1).await);
    assert_eq!((tier.counts().retries, tier.lost_objects()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn a_read_that_hangs_is_asked_for_a_second_time_and_the_first_answer_counts() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    store(&*tier, chain(1, 5)).await;
    for _ in 0..60 {
        assert!(loads(&tier, 1).await);
    }
    assert_eq!(tier.counts().hedges, 0, "all were quick");
    shared.set(Some(("/blocks/", Mood::HangsOnce)));
    let start = Instant::now();
    assert!(loads(&tier, 1).await);
    assert!(start.elapsed() < Duration::from_millis(100), "{:?} of virtual time", start.elapsed());
    let counts = tier.counts();
    assert_eq!((counts.hedges, counts.hedges_won, counts.retries), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_costs_nobody_any_time_and_comes_back_by_itself() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    tier.caught_up().await;
    store(&*tier, chain(1, 5)).await;
    shared.set(Some(("", Mood::Hangs)));
    // Those who find out wait for their requests to time out.
    while !matches!(tier.settled().await, Standing::Away(_)) {
        assert!(!loads(&tier, 1).await);
    }
    tokio::time::sleep(Duration::from_mins(5)).await;
    let (start, before) = (Instant::now(), shared.requests());
    for _ in 0..100 {
        assert!(!loads(&tier, 1).await);
        assert!(tier.store(chain(2, 1)).await.iter().all(Result::is_err));
    }
    assert!(start.elapsed() < Duration::from_mins(1), "{:?} of virtual time", start.elapsed());
    assert!(shared.requests() - before < 70, "the follower's own, one in a round at most");
    shared.set(None);
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert!(loads(&tier, 1).await, "nothing was forgotten");
    assert_eq!(tier.settled().await, Standing::Ready);
}

#[tokio::test(start_paused = true)]
async fn an_upload_in_parts_that_fails_is_given_up_each_time_and_costs_its_blocks_only() {
    let shared = Arc::new(Flaky::default());
    let events = Arc::new(EventLog::new(Epoch(1)));
    let large = Settings { object_bytes: 16 << 20, object_blocks: 1, ..Settings::default() };
    let tier = ObjectTier::open(shared.clone(), "kv", large, events);
    shared.set(Some(("/blocks/", Mood::Fails)));
    let blocks = chain_of(fingerprint(), 1, 5, 4 << 20);
    assert!(tier.store(blocks.clone()).await.iter().any(Result::is_err));
    assert_eq!(shared.given_up(), 4, "every attempt cleared up after itself");
    shared.set(None);
    tokio::time::sleep(Duration::from_secs(2)).await;
    store(&*tier, blocks.clone()).await;
    assert!(all(&load(&*tier, fingerprint(), names(&blocks)).await));
}
