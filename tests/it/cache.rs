//! `blockyard cache` beside nodes that share a folder.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use bytes::Bytes;
use kvbm::object::Settings;
use kvbm::{Block, DiskTier, Epoch, EventLog, Fingerprint, ObjectTier, SequenceHash, Tier};
use serde_json::Value;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Arc;

fn cache(arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    command.arg("cache").args(arguments).env_clear().env("HOME", "/nonexistent").output().unwrap()
}

/// Runs a command on a folder, and reads what it says to programs.
pub(crate) fn asked(folder: &Path, arguments: &[&str]) -> (Value, Option<i32>) {
    let (what, rest) = arguments.split_first().unwrap();
    let shared = folder.to_str().unwrap();
    let output = cache(&[&[*what, "--json", "--g4", shared][..], rest].concat());
    let stderr = String::from_utf8(output.stderr).unwrap();
    (serde_json::from_slice(&output.stdout).expect(&stderr), output.status.code())
}

/// A G3 log of three blocks that nobody uses.
async fn logged(folder: &Path) {
    let events = Arc::new(EventLog::new(Epoch(1)));
    let tier =
        DiskTier::open(folder, kvbm::disk::Settings { min_free_bytes: 0, ..Default::default() }, events).unwrap();
    let blocks = (1..=3).map(block).collect();
    assert!(tier.store(blocks).await.iter().all(Result::is_ok));
}

fn block(n: u8) -> Block {
    let name = SequenceHash::from_bytes([n; 16]);
    Block::new(name, None, Fingerprint::from_bytes([7; 32]), Bytes::from(vec![n; 1_000]))
}

/// A folder with three blocks, each in an object of its own.
async fn stored(folder: &Path) {
    let events = Arc::new(EventLog::new(Epoch(1)));
    let tier =
        ObjectTier::open_folder(folder, Settings { object_bytes: 1, object_blocks: 1, ..Settings::default() }, events)
            .unwrap();
    assert!(tier.store((1..=3).map(block).collect()).await.iter().all(Result::is_ok));
}

fn files(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { files(&path) } else { 1 }).sum()
}

#[tokio::test]
async fn what_rests_is_listed_collected_after_a_grace_and_verified() {
    let folder = tempfile::tempdir().unwrap();
    let (at, blocks) = (folder.path(), folder.path().join("blocks"));
    stored(at).await;
    let (listed, status) = asked(at, &["ls"]);
    let holding = &listed["contents"][0];
    assert_eq!((&holding["blocks"], &holding["objects"], status), (&3.into(), &3.into(), Some(0)));
    assert_eq!(asked(at, &["gc", "--capacity", "2500B", "--dry-run"]).0["report"]["marked"]["capacity"]["objects"], 1);
    assert_eq!(asked(at, &["ls"]).0, listed, "a dry run changes nothing");
    asked(at, &["gc", "--capacity", "2500B"]);
    assert_eq!((&asked(at, &["ls"]).0["contents"][0]["blocks"], files(&blocks)), (&2.into(), 3), "marked, not deleted");
    assert_eq!(asked(at, &["gc"]).0["report"]["deleted"]["objects"], 0);
    assert_eq!(asked(at, &["gc", "--grace", "0s"]).0["report"]["deleted"]["objects"], 1);
    assert_eq!(files(&blocks), 2);
    let (seen, status) = asked(at, &["verify"]);
    assert_eq!(
        (&seen["valid_blocks"], &seen["corrupt_blocks"], &seen["missing_objects"], status),
        (&2.into(), &0.into(), &0.into(), Some(0))
    );
}

#[tokio::test]
async fn the_log_of_g3_is_listed_beside_the_shared_store_or_alone() {
    let (data, shared) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    logged(&data.path().join("g3")).await;
    stored(shared.path()).await;
    let at = data.path().to_str().unwrap();
    let ls = || asked(shared.path(), &["ls", "--data-dir", at]);
    // A process that another test starts just now has the lock too, for a moment.
    let (both, status) = (0..100).map(|_| ls()).find(|(both, _)| both["g3"][0]["in_use"] == false).unwrap_or_else(ls);
    let log = &both["g3"][0];
    assert_eq!((&log["contents"][0]["blocks"], &log["in_use"], status), (&3.into(), &false.into(), Some(0)));
    assert_eq!(both["contents"][0]["blocks"], 3);
    let alone = cache(&["ls", "--data-dir", at]);
    let text = String::from_utf8(alone.stdout).unwrap();
    assert!(alone.status.success() && text.contains("not in use: 1 segments") && !text.contains("WRITER"), "{text}");
}

#[tokio::test]
async fn a_store_named_alone_is_listed_without_the_log_of_g3() {
    let (home, shared) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // Where `serve` keeps it when no flag says otherwise.
    logged(&home.path().join(".cache/blockyard/g3")).await;
    stored(shared.path()).await;
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
        let output = command.arg("cache").args(arguments).env_clear().env("HOME", home.path()).output().unwrap();
        let said: Value = serde_json::from_slice(&output.stdout).unwrap();
        said["g3"].as_array().unwrap().len()
    };
    let at = shared.path().to_str().unwrap();
    for command in ["ls", "verify"] {
        assert_eq!(run(&[command, "--json", "--g4", at]), 0, "{command}");
        assert_eq!(run(&[command, "--json"]), 1, "{command}");
    }
}

#[tokio::test]
async fn the_log_of_g3_is_verified_unless_a_process_uses_it() {
    let data = tempfile::tempdir().unwrap();
    let (at, folder) = (data.path().to_str().unwrap(), data.path().join("g3"));
    logged(&folder).await;
    let verify = || cache(&["verify", "--json", "--data-dir", at]);
    let said = |output: &Output| serde_json::from_slice::<Value>(&output.stdout).unwrap()["g3"][0].clone();
    // A process that another test starts just now has the lock too, for a moment.
    let sound = (0..100).map(|_| verify()).find(|output| output.status.success()).unwrap_or_else(verify);
    let seen = said(&sound);
    assert_eq!(
        (&seen["valid_blocks"], &seen["corrupt_blocks"], &seen["undecryptable_blocks"]),
        (&3.into(), &0.into(), &0.into()),
        "{seen}"
    );
    let segment = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
    let segment = segment.into_iter().find(|path| path.extension().is_some_and(|it| it == "segment")).unwrap();
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[600] ^= 1;
    std::fs::write(&segment, bytes).unwrap();
    let damaged = (0..100).map(|_| verify()).find(|output| !output.stdout.is_empty()).unwrap_or_else(verify);
    assert_eq!((damaged.status.code(), &said(&damaged)["corrupt_blocks"]), (Some(1), &1.into()));
    let events = Arc::new(EventLog::new(Epoch(1)));
    let settings = kvbm::disk::Settings { min_free_bytes: 0, ..Default::default() };
    let _owner = DiskTier::open(&folder, settings, events).unwrap();
    let refused = verify();
    let stderr = String::from_utf8(refused.stderr).unwrap();
    let owner = format!("in use by process {}", std::process::id());
    assert!(refused.status.code() == Some(1) && stderr.contains(&owner), "{stderr}");
}

#[test]
fn what_cannot_be_done_is_said() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    for (arguments, said) in [
        (vec!["ls", "--data-dir", at], "--g4"),
        (vec!["shred", "--data-dir", at, "--domain", "acme"], "tiers.encryption is not set"),
        (vec!["ls", "--g4", "/nonexistent/folder"], "cannot be used"),
    ] {
        let output = cache(&arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && stderr.contains(said), "{arguments:?}: {stderr}");
    }
}

#[test]
fn a_shredded_domain_has_no_key_left() {
    let folder = tempfile::tempdir().unwrap();
    let master = folder.path().join("master");
    std::fs::write(&master, "07".repeat(32)).unwrap();
    let set = format!(r#"tiers.encryption={{keys={{file="{}"}}}}"#, master.display());
    let (said, status) = asked(folder.path(), &["shred", "--set", &set, "--domain", "acme", "--remove"]);
    assert_eq!((&said["destroyed_keys"], status), (&0.into(), Some(0)));
    assert_eq!(said["domain"].as_str().unwrap(), kvbm::Domain::derived(b"", "acme").id().to_string());
}
