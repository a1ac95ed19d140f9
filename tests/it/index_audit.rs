//! What the router believes, what the tiers say, and what is found from outside: the same blocks, name by name.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::cache::asked;
use super::process::{Client, Process};
use serde_json::Value;
use std::path::Path;
use std::time::Duration;
use tokio::time::{Instant, sleep};

/// Offloads, events and repairs are over long before, and a path of the SSD tier that was left alone is asked again.
const PATIENCE: Duration = Duration::from_mins(5);
const LEVELS: [&str; 4] = ["g1", "g2", "g3", "g4"];

/// Waits until something rests in each tier, whatever is believed of it.
pub(crate) async fn filled(client: &Client, case: &str) {
    agreed(client, case, |_| true).await;
}

/// Waits until what is believed is what rests, in every tier, and something does in each.
pub(crate) async fn settled(client: &Client, case: &str) {
    agreed(client, case, |place| place["actual"].is_object() && place["indexed"] == place["actual"]).await;
}

async fn agreed(client: &Client, case: &str, holds: impl Fn(&Value) -> bool) {
    let end = Instant::now() + PATIENCE;
    loop {
        let places = client.places().await;
        let filled = |level: &str| {
            places
                .iter()
                .any(|place| place["tier"] == level && place["actual"]["blocks"].as_u64().is_some_and(|n| n > 0))
        };
        if places.iter().all(&holds) && LEVELS.into_iter().all(filled) {
            return;
        }
        assert!(Instant::now() < end, "{case}: {places:?}");
        sleep(Duration::from_millis(100)).await;
    }
}

/// Which blocks `blockyard cache ls` finds, by level.
pub(crate) fn outside(store: &Path, elsewhere: &[&str]) -> Value {
    asked(store, &[&["ls"], elsewhere].concat()).0["digests"].take()
}

/// Waits until that is what is believed to rest in the tiers that others may look into.
pub(crate) async fn found(client: &Client, store: &Path, elsewhere: &[&str], case: &str) -> Value {
    let end = Instant::now() + PATIENCE;
    loop {
        let (outside, places) = (outside(store, elsewhere), client.places().await);
        let found: Vec<_> = outside.as_object().unwrap().iter().collect();
        let believed = |level: &str| places.iter().find(|place| place["tier"] == level).map(|place| &place["indexed"]);
        if !found.is_empty() && found.iter().all(|(level, census)| believed(level) == Some(census)) {
            return outside;
        }
        assert!(Instant::now() < end, "{case}: found {outside}, believed {places:?}");
        sleep(Duration::from_millis(200)).await;
    }
}

/// A prompt of 24 blocks, and then a bit.
fn prompt() -> Vec<u32> {
    (0..=24 * 16).map(|n| 10 + n * 7 % 500).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn what_two_workers_computed_rests_once_in_the_store_that_they_share() {
    let (data, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let at = store.path().to_str().unwrap();
    let places = ["--g4", at, "--workers", "both:2", "--set", "admin.listen=127.0.0.1:0"];
    let sizes = ["--set", "tiers.g1=8MiB", "--set", "tiers.g2=8MiB", "--set", "tiers.g3=off"];
    let policy = ["--set", "router.policy=round-robin"];
    let mut process = Process::start(data.path(), &[&places[..], &sizes, &policy].concat(), &[]).await;
    let prompt = prompt();
    let (one, other) = tokio::join!(process.client.complete(&prompt), process.client.complete(&prompt));
    assert_eq!(one.unwrap().0, other.unwrap().0);
    let held: Vec<u64> = process
        .client
        .places()
        .await
        .iter()
        .filter(|place| place["tier"] == "g1")
        .map(|place| place["actual"]["blocks"].as_u64().unwrap())
        .collect();
    assert_eq!((held.len(), held[0], held[0] >= 24), (2, held[1], true), "both workers computed all of it");
    // What is on its way is written.
    process.stop();
    let listed = asked(store.path(), &["ls"]).0;
    let stored: u64 =
        listed["contents"].as_array().unwrap().iter().map(|holding| holding["blocks"].as_u64().unwrap()).sum();
    assert_eq!((stored, &listed["digests"]["g4"]["blocks"]), (held[0], &stored.into()));
}
