//! `blockyard cache shred` while a process serves from the same folder.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::Process;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

/// The domain of requests without a tenant.
const SHARED: &str = "00000000000000000000000000000000";

/// A prompt of 640 token ids, different for each `seed`. 39 of its 40 blocks can be cached.
fn prompt(seed: u32) -> Vec<u32> {
    (0..640).map(|n| 10 + (seed * 31 + n * 7) % 500).collect()
}

/// The number of the domain's wrapped keys that are not shredded.
fn keys(data: &Path) -> usize {
    let Ok(entries) = fs::read_dir(data.join("keys").join(SHARED)) else { return 0 };
    entries.filter(|entry| !entry.as_ref().unwrap().file_name().to_str().unwrap().ends_with("shredded")).count()
}

/// Waits until `done` holds, and fails after two minutes.
async fn until(what: &str, mut done: impl AsyncFnMut() -> bool) {
    let waiting = async {
        while !done().await {
            tokio::time::sleep(Duration::from_millis(100)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(2), waiting).await.unwrap_or_else(|_| panic!("{what}"));
}

#[tokio::test]
async fn a_running_process_serves_nothing_from_before_a_shred() {
    let data = tempfile::tempdir().unwrap();
    let master = data.path().join("master");
    fs::write(&master, "07".repeat(32)).unwrap();
    let encryption = format!(r#"tiers.encryption={{keys={{file="{}"}}}}"#, master.display());
    let sets = [&*encryption, "tiers.g1=32MiB", "tiers.g2=32MiB", "tiers.g3=64MiB", "workers=both:1"];
    let sets: Vec<&str> = sets.iter().flat_map(|set| ["--set", set]).collect();
    let mut process = Process::start(data.path(), &sets, &[]).await;
    let (asked_again, not_asked_again) = (prompt(1), prompt(2));
    for before in [&asked_again, &not_asked_again] {
        assert_eq!(process.client.complete(before).await.unwrap().1, 0);
        assert!(process.client.complete(before).await.unwrap().1 > 600, "from memory");
    }
    until("a key is stored", async || keys(data.path()) == 1).await;

    let mut shred = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    shred.args(["cache", "shred", "--domain", SHARED, "--data-dir"]).arg(data.path()).args(&sets);
    shred.env_clear().env("HOME", "/nonexistent");
    let mut shred = || {
        let output = shred.output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        assert_eq!(keys(data.path()), 0);
        String::from_utf8(output.stdout).unwrap()
    };
    let text = shred();
    assert!(text.contains("1 key destroyed, 0 objects"), "{text}");
    // Once the running process has noticed the shred, it misses; it caches what it computes from then on.
    let client = &process.client;
    until("the first miss", async || client.complete(&asked_again).await.unwrap().1 == 0).await;
    assert!(client.complete(&asked_again).await.unwrap().1 > 600);

    // New blocks are stored under a new key, once the pending offloads from before the shred are dropped.
    let (mut seed, folder) = (2, data.path());
    let next = async || {
        seed += 1;
        client.complete(&prompt(seed)).await.unwrap();
        keys(folder) == 1
    };
    until("a new key", next).await;
    let new = prompt(1_000);
    process.client.complete(&new).await.unwrap();
    process.stop();
    let process = Process::start(data.path(), &sets, &[]).await;
    assert_eq!(process.client.complete(&not_asked_again).await.unwrap().1, 0, "no block from before the shred");
    assert!(process.client.complete(&new).await.unwrap().1 > 0, "blocks under the new key");
    drop(process);
    shred();
    let text = shred();
    assert!(text.contains("was shredded before, and has no key since"), "{text}");
}
