//! A store that fails or hangs: new blocks fail, no call hangs, and the catalog is kept.

use super::flaky::{Fault, Flaky};
use super::*;

#[tokio::test(start_paused = true)]
async fn a_failed_object_write_fails_only_its_blocks() {
    for fault in [Fault::Fails, Fault::Hangs] {
        let shared = Arc::new(Flaky::default());
        let (tier, events) = open_on(shared.clone());
        store(&*tier, chain(1, 5)).await;
        shared.set_fault(Some(("/blocks/", fault)));
        let answers = tier.store(chain(2, 5)).await;
        assert!(answers.iter().all(|answer| matches!(answer, Err(StoreError::Io(_)))), "{fault:?}");
        assert_eq!(announced(&events, Level::G4).len(), 5);
        assert!(tier.write_failure().is_some(), "{fault:?}");
        shared.set_fault(None);
        store(&*tier, chain(2, 5)).await;
        assert_eq!(tier.write_failure(), None);
        assert!(all_found(&load(&*tier, fingerprint(), hashes(&chain(2, 5))).await));
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_manifest_is_retried_under_its_number() {
    for fault in [Fault::Fails, Fault::Hangs, Fault::FailsAfterwards] {
        let shared = Arc::new(Flaky::default());
        let (tier, events) = open_on(shared.clone());
        let (reader, _) = open_on(shared.clone());
        reader.wait_until_ready().await;
        shared.set_fault(Some(("/manifests/", fault)));
        assert!(tier.store(chain(1, 5)).await.iter().all(Result::is_err), "{fault:?}");
        assert!(announced(&events, Level::G4).is_empty(), "not stored yet");
        tokio::time::sleep(Duration::from_secs(100)).await;
        shared.set_fault(None);
        store(&*tier, chain(2, 5)).await;
        assert_eq!(tier.usage().blocks, 10, "{fault:?}: the first blocks were stored after all");
        for seed in [1, 2] {
            seconds_until_found(&reader, &hashes(&chain(seed, 5))).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn an_unreachable_store_is_read_when_it_responds() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(1, 5)).await;
    shared.set_fault(Some(("", Fault::Fails)));
    let (tier, _) = open_on(shared.clone());
    let hour = Duration::from_hours(1);
    assert!(tokio::time::timeout(hour, tier.wait_until_ready()).await.is_err());
    assert_eq!(tier.usage().blocks, 0);
    shared.set_fault(None);
    tier.wait_until_ready().await;
    assert_eq!(tier.usage().blocks, 5);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_never_answered_is_soon_unavailable() {
    let shared = Arc::new(Flaky::default());
    shared.set_fault(Some(("", Fault::Hangs)));
    let (tier, _) = open_on(shared.clone());
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(!tier.is_unavailable(), "it may still answer");
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(tier.is_unavailable(), "before its first request has timed out");
    shared.set_fault(None);
    tier.wait_until_ready().await;
    assert!(!tier.is_unavailable());
    shared.set_fault(Some(("", Fault::Hangs)));
    tokio::time::sleep(Duration::from_secs(6)).await;
    assert!(!tier.is_unavailable(), "it has answered before, so its poll decides");
    while tier.is_available() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(tier.is_unavailable());
}

#[tokio::test(start_paused = true)]
async fn a_store_that_takes_no_writes_is_read_and_says_why_until_it_takes_them() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    store(&*tier, chain(1, 5)).await;
    shared.set_fault(Some(("/blocks/", Fault::FailsAfterwards)));
    assert!(tier.store(chain(2, 5)).await.iter().all(Result::is_err));
    for _ in 0..60 {
        tokio::time::sleep(Duration::from_secs(1)).await;
        assert!(tier.is_available(), "the store answers lists");
        assert!(tier.write_failure().unwrap().contains("down"), "{:?}", tier.write_failure());
    }
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&chain(1, 5))).await));
    shared.set_fault(None);
    store(&*tier, chain(3, 5)).await;
    assert_eq!(tier.write_failure(), None);
}

#[tokio::test(start_paused = true)]
async fn a_store_that_denies_blocks_says_why_until_it_returns_them() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    tier.wait_until_ready().await;
    store(&*tier, chain(1, 5)).await;
    let loaded = async || all_found(&load(&*tier, fingerprint(), hashes(&chain(1, 5))).await);
    shared.set_fault(Some(("/blocks/", Fault::Fails)));
    assert!(!loaded().await);
    assert_eq!(tier.read_failure(), None, "it may be an outage, of which the polls know");
    shared.set_fault(Some(("/blocks/", Fault::Denied)));
    assert!(!loaded().await);
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert!(tier.is_available(), "the store answers lists");
    assert!(tier.read_failure().is_some_and(|why| why.contains("archived")), "{:?}", tier.read_failure());
    assert_eq!((tier.write_failure(), tier.missing_objects()), (None, 0));
    shared.set_fault(None);
    assert!(loaded().await);
    assert_eq!(tier.read_failure(), None);
}

#[tokio::test(start_paused = true)]
async fn writes_that_fail_in_an_outage_are_not_reported_after_it() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    tier.wait_until_ready().await;
    shared.set_fault(Some(("", Fault::Fails)));
    assert!(tier.store(chain(1, 5)).await.iter().all(Result::is_err));
    while tier.is_available() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(tier.write_failure().is_some());
    shared.set_fault(None);
    while !tier.is_available() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert_eq!(tier.write_failure(), None, "no block was offloaded since");
}

#[tokio::test(start_paused = true)]
async fn failed_reads_drop_nothing_from_the_catalog() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    store(&*tier, chain(1, 5)).await;
    for fault in [Fault::Fails, Fault::Hangs] {
        shared.set_fault(Some(("/blocks/", fault)));
        let mut loading = tier.load(fingerprint(), hashes(&chain(1, 5)));
        let mut failed = 0;
        while let Some((_, answer)) = loading.next().await {
            failed += usize::from(matches!(answer, Err(LoadError::Io(_))));
        }
        assert_eq!(failed, 5);
        shared.set_fault(None);
        assert!(all_found(&load(&*tier, fingerprint(), hashes(&chain(1, 5))).await));
        assert_eq!(tier.missing_objects(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn a_full_queue_answers_busy_at_once() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    shared.set_fault(Some(("/blocks/", Fault::Hangs)));
    let large = chain_of(fingerprint(), 1, 80, 4 << 20);
    let answers = tier.store(large).await;
    let busy = answers.iter().filter(|answer| matches!(answer, Err(StoreError::Busy))).count();
    assert!((5..75).contains(&busy), "{busy} of 80");
    assert!(answers.iter().all(Result::is_err), "the others failed when the store did not answer");
}

#[tokio::test(start_paused = true)]
async fn a_folder_that_disappears_is_not_created_again_and_used_when_it_is_back() {
    let parent = tempfile::tempdir().unwrap();
    let (at, aside) = (parent.path().join("kv"), parent.path().join("aside"));
    let (tier, _) = open_in(&at, Settings::default());
    tier.wait_until_ready().await;
    store(&*tier, chain(1, 5)).await;
    fs::rename(&at, &aside).unwrap();
    assert!(tier.store(chain(2, 5)).await.iter().all(Result::is_err));
    while tier.is_available() {
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    assert!(tier.is_unavailable());
    assert!(tier.write_failure().is_some_and(|why| why.contains("mount it again")), "{:?}", tier.write_failure());
    assert!(!at.exists(), "below a removed mount it would be on the disk of the system");

    // Another folder, as an empty mount point is.
    fs::create_dir(&at).unwrap();
    tokio::time::sleep(Duration::from_secs(30)).await;
    assert!(tier.store(chain(3, 5)).await.iter().all(Result::is_err));
    let mut loading = tier.load(fingerprint(), hashes(&chain(1, 5)));
    while let Some((_, loaded)) = loading.next().await {
        assert!(!matches!(loaded, Ok(Some(_))));
    }
    drop(loading);
    assert!(!tier.is_available());
    assert_eq!(at.read_dir().unwrap().count(), 0, "nothing is written into it");

    fs::remove_dir(&at).unwrap();
    fs::rename(&aside, &at).unwrap();
    tier.wait_until_ready().await;
    store(&*tier, chain(4, 5)).await;
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&chain(1, 5))).await), "its blocks are known");
    assert_eq!((tier.write_failure(), tier.missing_objects()), (None, 0));
}
