//! Loom test of `published.rs` and `load_changes.rs`: every interleaving of one reader and its writers.

use super::stats::{self, LoadStats};
use super::timestamp::{self, Timestamp};
use load_changes::LoadChanges;
use loom::sync::Arc;
use loom::thread;
use published::PublishedLoad;
use tokio::time::Instant;

mod sync {
    pub(super) use loom::sync::atomic::{AtomicU32, AtomicU64, Ordering};
}

#[expect(clippy::duplicate_mod, dead_code, reason = "the same text over other atomics, and not all of it in a test")]
#[path = "published.rs"]
mod published;

#[expect(clippy::duplicate_mod, reason = "the same text over other atomics")]
#[path = "load_changes.rs"]
mod load_changes;

/// Two preemptions are enough for nearly every ordering error.
fn explore(model: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    builder.preemption_bound = Some(2);
    builder.check(model);
}

#[test]
fn an_unchanged_version_means_the_latest_report_was_read() {
    let (now, stats) =
        (Timestamp::from(Instant::now()), |waiting_tokens| LoadStats { waiting_tokens, ..LoadStats::default() });
    explore(move || {
        let published = Arc::new(PublishedLoad::default());
        let load = published.clone();
        let reports = thread::spawn(move || load.publish(Some(now), &stats(7), &stats(3)));
        let version = published.version();
        let seen = (published.age(now), published.stats(true).waiting_tokens);
        reports.join().unwrap();
        if published.version() == version {
            assert_eq!(seen, (Some(0), 7));
        }
    });
}

#[test]
fn an_unchanged_version_means_the_latest_ejection_was_read() {
    loom::model(|| {
        let published = Arc::new(PublishedLoad::default());
        let (health, fleet, now) = (published.clone(), published.clone(), Timestamp::from(Instant::now()));
        let ejecting = thread::spawn(move || health.set_ejected_until(Some(now)));
        let chosen = thread::spawn(move || fleet.choose(5));
        let version = published.version();
        let seen = (published.ejected_until(), published.chosen());
        ejecting.join().unwrap();
        chosen.join().unwrap();
        if published.version() == version {
            assert_eq!(seen, (now.bits(), 5));
        }
    });
}

#[test]
fn an_unchanged_version_of_a_group_means_the_latest_change_was_read() {
    explore(|| {
        let (published, changes) = (Arc::new(PublishedLoad::default()), Arc::new(LoadChanges::default()));
        let group = changes.next_group();
        let (load, raised) = (published.clone(), changes.clone());
        let chosen = thread::spawn(move || {
            load.choose(5);
            raised.raise(group);
        });
        let before = changes.version(group);
        let seen = (published.version(), published.chosen());
        chosen.join().unwrap();
        if changes.version(group) == before {
            assert_eq!(seen, (published.version(), 5));
        }
    });
}
