//! A store with short faults: requests are retried, slow reads are hedged, and an unavailable store fails fast.

use super::flaky::{Fault, Flaky};
use super::*;
use tokio::time::Instant;

async fn all_load(tier: &ObjectTier, seed: u64) -> bool {
    all_found(&load(tier, fingerprint(), hashes(&chain(seed, 5))).await)
}

#[tokio::test(start_paused = true)]
async fn a_failed_request_is_retried() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    for (word, retries) in [("/blocks/", 1), ("/manifests/", 2)] {
        tier.wait_until_ready().await;
        shared.set_fault(Some((word, Fault::FailsOnce)));
        store(&*tier, chain(retries, 5)).await;
        assert_eq!(tier.request_counts().retries, retries, "{word}");
        assert!(all_load(&tier, retries).await);
    }
    shared.set_fault(Some(("/blocks/", Fault::FailsOnce)));
    assert!(all_load(&tier, 1).await);
    assert_eq!((tier.request_counts().retries, tier.missing_objects()), (3, 0));
}

#[tokio::test(start_paused = true)]
async fn a_hanging_read_is_hedged() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    store(&*tier, chain(1, 5)).await;
    for _ in 0..60 {
        assert!(all_load(&tier, 1).await);
    }
    assert_eq!(tier.request_counts().hedges, 0, "all were quick");
    shared.set_fault(Some(("/blocks/", Fault::HangsOnce)));
    let start = Instant::now();
    assert!(all_load(&tier, 1).await);
    assert!(start.elapsed() < Duration::from_millis(100), "{:?} of virtual time", start.elapsed());
    let counts = tier.request_counts();
    assert_eq!((counts.hedges, counts.hedges_won, counts.retries), (1, 1, 0));
}

#[tokio::test(start_paused = true)]
async fn an_open_circuit_fails_fast_and_closes_by_itself() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    tier.wait_until_ready().await;
    store(&*tier, chain(1, 5)).await;
    shared.set_fault(Some(("", Fault::Hangs)));
    // Until the circuit breaker opens, requests end by timeout.
    while !matches!(tier.initial_health().await, StoreHealth::Unavailable(_)) {
        assert!(!all_load(&tier, 1).await);
    }
    tokio::time::sleep(Duration::from_mins(5)).await;
    let start = Instant::now();
    let before = shared.requests();
    for _ in 0..100 {
        assert!(!all_load(&tier, 1).await);
        assert!(tier.store(chain(2, 1)).await.iter().all(Result::is_err));
    }
    assert!(start.elapsed() < Duration::from_mins(1), "{:?} of virtual time", start.elapsed());
    assert!(shared.requests() - before < 70, "the follower's own, one in a round at most");
    shared.set_fault(None);
    tokio::time::sleep(Duration::from_secs(15)).await;
    assert!(all_load(&tier, 1).await, "nothing was forgotten");
    assert_eq!(tier.initial_health().await, StoreHealth::Ready);
}

#[tokio::test(start_paused = true)]
async fn a_failed_multipart_upload_is_aborted() {
    let shared = Arc::new(Flaky::default());
    let events = Arc::new(EventLog::new(Epoch(1)));
    let large = Settings { object_bytes: 16 << 20, object_blocks: 1, ..Settings::default() };
    let tier = ObjectTier::open(shared.clone(), "kv", large, events);
    shared.set_fault(Some(("/blocks/", Fault::Fails)));
    let blocks = chain_of(fingerprint(), 1, 5, 4 << 20);
    assert!(tier.store(blocks.clone()).await.iter().any(Result::is_err));
    assert_eq!(shared.aborted_uploads(), 4, "every attempt cleared up after itself");
    shared.set_fault(None);
    tokio::time::sleep(Duration::from_secs(2)).await;
    store(&*tier, blocks.clone()).await;
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&blocks)).await));
}
