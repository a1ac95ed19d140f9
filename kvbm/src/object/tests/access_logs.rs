//! Access logs: objects that any process read are kept; and scans are incremental.

use super::*;
use crate::object::gc::{MarkReason, Policy};

const HOUR: Duration = Duration::from_hours(1);

/// On any store: two writers, and a reader in another process that reads later.
pub(super) async fn read_objects_are_kept_and_scans_are_incremental(store: Arc<dyn ObjectStore>, prefix: &str) {
    let open = || ObjectTier::open(store.clone(), prefix, Settings::default(), Arc::new(EventLog::new(Epoch(1))));
    let one = open();
    let other = open();
    let reader = open();
    let (read, left) = (chain(1, 10), chain(2, 10));
    super::store(&*one, read.clone()).await;
    super::store(&*other, left.clone()).await;
    let learned = async {
        while reader.holds(fingerprint(), &hashes(&read)) < 10 || reader.holds(fingerprint(), &hashes(&left)) < 10 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), learned).await.expect("it learns of both");
    // Stores have modification dates in whole seconds.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(all_found(&load(&*reader, fingerprint(), hashes(&read)).await));
    reader.access_log.flush().await;

    let collector = Collector::open(store.clone(), prefix, Duration::from_secs(30));
    let inventory = collector.scan(|_, _| ()).await.unwrap();
    let written = inventory.objects.values().map(|stored| stored.modified).max().unwrap();
    let then = written.after(HOUR * 10);
    let aged = Policy { max_age: Some(HOUR * 10), ..Policy::default() };
    // The second object was written later, and the first one was read.
    let tight = Policy { capacity: Some(inventory.bytes() - 1), ..Policy::default() };
    for (policy, why) in [(&aged, MarkReason::MaxAge), (&tight, MarkReason::Capacity)] {
        let report = collector.dry_run(&inventory, policy, then);
        let marked: Vec<_> = report.marked.iter().map(|(why, amount)| (*why, amount.objects)).collect();
        assert_eq!(marked, [(why, 1)]);
    }
    collector.collect(&inventory, &aged, then).await.unwrap();

    // Four lists and the tombstone list; then four lists; then four lists and a manifest.
    for (new, requests) in [(0, 5), (0, 4), (1, 5)] {
        if new > 0 {
            super::store(&*one, chain(3, 10)).await;
        }
        let before = collector.request_counts().requests;
        let inventory = collector.scan(|_, _| ()).await.unwrap();
        assert_eq!(collector.request_counts().requests - before, requests);
        let stored: Vec<SequenceHash> = inventory.hashes(written).collect();
        assert!(hashes(&read).iter().all(|name| stored.contains(name)) && !stored.contains(&left[0].header.hash));
    }
}

#[tokio::test]
async fn in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    read_objects_are_kept_and_scans_are_incremental(store, "kv").await;
}

#[tokio::test(start_paused = true)]
async fn access_logs_are_flushed_at_the_interval_of_the_level() {
    for (level, few) in [(Level::G4, 4..=6), (Level::G3_5, 30..=60)] {
        let shared = Arc::new(flaky::Flaky::default());
        let events = Arc::new(EventLog::new(Epoch(1)));
        let tier = ObjectTier::open(shared.clone(), "kv", Settings { level, ..Settings::default() }, events);
        store(&*tier, chain(1, 10)).await;
        let before = shared.puts();
        tokio::time::sleep(HOUR).await;
        assert_eq!(shared.puts(), before, "nothing was read");
        for _ in 0..60 {
            assert!(all_found(&load(&*tier, fingerprint(), hashes(&chain(1, 10))).await));
            tokio::time::sleep(Duration::from_mins(1)).await;
        }
        assert!(few.contains(&(shared.puts() - before)), "{level}: {} flushes", shared.puts() - before);
    }
}
