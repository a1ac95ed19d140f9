//! The router's index, the tiers' own directories and `blockyard cache ls` agree on every block hash.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::cache::cache_json;
use super::process::{Client, Process};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Longer than offloads, events and resyncs take, and than the cooldown of a failed SSD path.
const AGREEMENT_LIMIT: Duration = Duration::from_mins(5);
const LEVELS: [&str; 4] = ["g1", "g2", "g3", "g4"];

/// Waits until every tier holds blocks, whatever the index has.
pub(crate) async fn wait_until_filled(client: &Client, case: &str) {
    wait_for_audit(client, case, |_| true).await;
}

/// Waits until every tier holds blocks, and the index has exactly these.
pub(crate) async fn wait_until_indexed(client: &Client, case: &str) {
    wait_for_audit(client, case, |tier| tier["actual"].is_object() && tier["indexed"] == tier["actual"]).await;
}

async fn wait_for_audit(client: &Client, case: &str, accepted: impl Fn(&Value) -> bool) {
    let end = Instant::now() + AGREEMENT_LIMIT;
    loop {
        let audit = client.index_audit().await;
        let filled = |level: &str| {
            audit.iter().any(|tier| tier["tier"] == level && tier["actual"]["blocks"].as_u64().is_some_and(|n| n > 0))
        };
        if audit.iter().all(&accepted) && LEVELS.into_iter().all(filled) {
            return;
        }
        assert!(Instant::now() < end, "{case}: {audit:?}");
        sleep(Duration::from_millis(100)).await;
    }
}

/// The digests of the blocks that `blockyard cache ls` finds, by tier.
pub(crate) fn listed_digests(store: &Path, arguments: &[&str]) -> Value {
    cache_json(store, &[&["ls"], arguments].concat()).0["digests"].take()
}

/// Waits until the index agrees with `blockyard cache ls` on every tier that the command can read: the digests.
pub(crate) async fn wait_until_listed(client: &Client, store: &Path, arguments: &[&str], case: &str) -> Value {
    let end = Instant::now() + AGREEMENT_LIMIT;
    loop {
        let listed = listed_digests(store, arguments);
        let audit = client.index_audit().await;
        let digests: Vec<_> = listed.as_object().unwrap().iter().collect();
        let indexed = |level: &str| audit.iter().find(|tier| tier["tier"] == level).map(|tier| &tier["indexed"]);
        if !digests.is_empty() && digests.iter().all(|(level, digest)| indexed(level) == Some(digest)) {
            return listed;
        }
        assert!(Instant::now() < end, "{case}: listed {listed}, audit {audit:?}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// A prompt of 24 full blocks and one token.
fn prompt() -> Vec<u32> {
    (0..=24 * 16).map(|n| 10 + n * 7 % 500).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_that_two_workers_computed_are_stored_once() {
    let data = tempfile::tempdir().unwrap();
    let store = tempfile::tempdir().unwrap();
    let fleet = ["--g4", store.path().to_str().unwrap(), "--workers", "both:2", "--set", "admin.listen=127.0.0.1:0"];
    let sizes = ["--set", "tiers.g1=8MiB", "--set", "tiers.g2=8MiB", "--set", "tiers.g3=off"];
    let policy = ["--set", "router.policy=round-robin"];
    let mut process = Process::start(data.path(), &[&fleet[..], &sizes, &policy].concat(), &[]).await;
    let prompt = prompt();
    let (one, other) = tokio::join!(process.client.complete(&prompt), process.client.complete(&prompt));
    assert_eq!(one.unwrap().0, other.unwrap().0);
    let held: Vec<u64> = process
        .client
        .index_audit()
        .await
        .iter()
        .filter(|tier| tier["tier"] == "g1")
        .map(|tier| tier["actual"]["blocks"].as_u64().unwrap())
        .collect();
    assert_eq!((held.len(), held[0], held[0] >= 24), (2, held[1], true), "both workers computed the whole prompt");
    // A clean stop finishes pending offloads.
    process.stop();
    let listed = cache_json(store.path(), &["ls"]).0;
    let stored: u64 =
        listed["contents"].as_array().unwrap().iter().map(|contents| contents["blocks"].as_u64().unwrap()).sum();
    assert_eq!((stored, &listed["digests"]["g4"]["blocks"]), (held[0], &stored.into()));
}
