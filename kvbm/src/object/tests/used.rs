//! What is read stays, whoever wrote it; and looking through a store again costs what is new in it.

use super::*;
use crate::object::gc::{Policy, Why};

const HOUR: Duration = Duration::from_hours(1);

/// On any store: two writers, and a reader in another process, a moment later.
pub(super) async fn what_is_read_stays_and_a_pass_reads_what_is_new(store: Arc<dyn ObjectStore>, prefix: &str) {
    let open = || ObjectTier::open(store.clone(), prefix, Settings::default(), Arc::new(EventLog::new(Epoch(1))));
    let (one, other, reader) = (open(), open(), open());
    let (read, left) = (chain(1, 10), chain(2, 10));
    super::store(&*one, read.clone()).await;
    super::store(&*other, left.clone()).await;
    let learned = async {
        while reader.holds(fingerprint(), &names(&read)) < 10 || reader.holds(fingerprint(), &names(&left)) < 10 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), learned).await.expect("it learns of both");
    // Stores date by the second.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(all(&load(&*reader, fingerprint(), names(&read)).await));
    reader.uses.note().await;

    let collector = Collector::open(store.clone(), prefix, Duration::from_secs(30));
    let survey = collector.survey(|_, _| ()).await.unwrap();
    let written = survey.objects.values().map(|stored| stored.modified).max().unwrap();
    let then = written.after(HOUR * 10);
    let aged = Policy { age_max: Some(HOUR * 10), ..Policy::default() };
    // The second was written later, and the first is read.
    let tight = Policy { budget: Some(survey.bytes() - 1), ..Policy::default() };
    for (policy, why) in [(&aged, Why::Age), (&tight, Why::Budget)] {
        let report = collector.would(&survey, policy, then);
        let condemned: Vec<_> = report.condemned.iter().map(|(why, amount)| (*why, amount.objects)).collect();
        assert_eq!(condemned, [(why, 1)]);
    }
    collector.collect(&survey, &aged, then).await.unwrap();

    // Four lists and what was said of removals; then four lists; then those and a manifest.
    for (new, requests) in [(0, 5), (0, 4), (1, 5)] {
        if new > 0 {
            super::store(&*one, chain(3, 10)).await;
        }
        let before = collector.counts().requests;
        let survey = collector.survey(|_, _| ()).await.unwrap();
        assert_eq!(collector.counts().requests - before, requests);
        let rests: Vec<SequenceHash> = survey.names(written).collect();
        assert!(names(&read).iter().all(|name| rests.contains(name)) && !rests.contains(&left[0].header.name));
    }
}

#[tokio::test]
async fn in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let store = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    what_is_read_stays_and_a_pass_reads_what_is_new(store, "kv").await;
}

#[tokio::test(start_paused = true)]
async fn a_process_that_reads_every_minute_notes_it_a_few_times_in_an_hour_and_in_a_pod_at_once() {
    for (level, few) in [(Level::G4, 4..=6), (Level::Pod, 30..=60)] {
        let shared = Arc::new(flaky::Flaky::default());
        let events = Arc::new(EventLog::new(Epoch(1)));
        let tier = ObjectTier::open(shared.clone(), "kv", Settings { level, ..Settings::default() }, events);
        store(&*tier, chain(1, 10)).await;
        let before = shared.puts();
        tokio::time::sleep(HOUR).await;
        assert_eq!(shared.puts(), before, "nothing was read");
        for _ in 0..60 {
            assert!(all(&load(&*tier, fingerprint(), names(&chain(1, 10))).await));
            tokio::time::sleep(Duration::from_mins(1)).await;
        }
        assert!(few.contains(&(shared.puts() - before)), "{level}: {} notes", shared.puts() - before);
    }
}
