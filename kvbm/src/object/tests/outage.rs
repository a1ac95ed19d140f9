//! A store that fails or hangs: new blocks are refused, nothing hangs, and what was known comes back with it.

use super::flaky::{Flaky, Mood};
use super::*;

#[tokio::test(start_paused = true)]
async fn an_object_that_cannot_be_written_costs_its_blocks_only() {
    for mood in [Mood::Fails, Mood::Hangs] {
        let shared = Arc::new(Flaky::default());
        let (tier, events) = open_on(shared.clone());
        store(&*tier, chain(1, 5)).await;
        shared.set(Some(("/blocks/", mood)));
        let answers = tier.store(chain(2, 5)).await;
        assert!(answers.iter().all(|answer| matches!(answer, Err(StoreError::Io(_)))), "{mood:?}");
        assert_eq!(announced(&events, Level::G4).len(), 5);
        shared.set(None);
        store(&*tier, chain(2, 5)).await;
        assert!(all(&load(&*tier, fingerprint(), names(&chain(2, 5))).await));
    }
}

#[tokio::test(start_paused = true)]
async fn a_manifest_that_failed_is_written_later_and_leaves_no_gap() {
    for mood in [Mood::Fails, Mood::Hangs, Mood::FailsAfterwards] {
        let shared = Arc::new(Flaky::default());
        let (tier, events) = open_on(shared.clone());
        let (reader, _) = open_on(shared.clone());
        reader.caught_up().await;
        shared.set(Some(("/manifests/", mood)));
        assert!(tier.store(chain(1, 5)).await.iter().all(Result::is_err), "{mood:?}");
        assert!(announced(&events, Level::G4).is_empty(), "not at rest yet");
        tokio::time::sleep(Duration::from_secs(100)).await;
        shared.set(None);
        store(&*tier, chain(2, 5)).await;
        assert_eq!(tier.usage().blocks, 10, "{mood:?}: the first ones came to rest after all");
        for seed in [1, 2] {
            found_after(&reader, &names(&chain(seed, 5))).await;
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_store_that_is_away_at_the_start_is_learned_when_it_comes() {
    let shared = Arc::new(Flaky::default());
    let (writer, _) = open_on(shared.clone());
    store(&*writer, chain(1, 5)).await;
    shared.set(Some(("", Mood::Fails)));
    let (tier, _) = open_on(shared.clone());
    let hour = Duration::from_hours(1);
    assert!(tokio::time::timeout(hour, tier.caught_up()).await.is_err());
    assert_eq!(tier.usage().blocks, 0);
    shared.set(None);
    tier.caught_up().await;
    assert_eq!(tier.usage().blocks, 5);
}

#[tokio::test(start_paused = true)]
async fn reads_of_a_store_that_is_away_fail_and_forget_nothing() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    store(&*tier, chain(1, 5)).await;
    for mood in [Mood::Fails, Mood::Hangs] {
        shared.set(Some(("/blocks/", mood)));
        let mut loading = tier.load(fingerprint(), names(&chain(1, 5)));
        let mut failed = 0;
        while let Some((_, answer)) = loading.next().await {
            failed += usize::from(matches!(answer, Err(LoadError::Io(_))));
        }
        assert_eq!(failed, 5);
        shared.set(None);
        assert!(all(&load(&*tier, fingerprint(), names(&chain(1, 5))).await));
        assert_eq!(tier.lost_objects(), 0);
    }
}

#[tokio::test(start_paused = true)]
async fn more_than_the_queue_holds_is_busy_at_once() {
    let shared = Arc::new(Flaky::default());
    let (tier, _) = open_on(shared.clone());
    shared.set(Some(("/blocks/", Mood::Hangs)));
    let large = chain_of(fingerprint(), 1, 80, 4 << 20);
    let answers = tier.store(large).await;
    let busy = answers.iter().filter(|answer| matches!(answer, Err(StoreError::Busy))).count();
    assert!((5..75).contains(&busy), "{busy} of 80");
    assert!(answers.iter().all(Result::is_err), "the others failed when the store did not answer");
}
