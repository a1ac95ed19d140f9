//! `blockyard cache`: `ls`, `gc`, `verify` and `shred` over a shared store and a G3 log.

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

/// Runs a subcommand with `--json` on a shared folder: its output and its exit status.
pub(crate) fn cache_json(folder: &Path, arguments: &[&str]) -> (Value, Option<i32>) {
    let (what, rest) = arguments.split_first().unwrap();
    let shared = folder.to_str().unwrap();
    let output = cache(&[&[*what, "--json", "--g4", shared][..], rest].concat());
    let stderr = String::from_utf8(output.stderr).unwrap();
    (serde_json::from_slice(&output.stdout).expect(&stderr), output.status.code())
}

/// Writes a G3 log with three blocks and closes it.
async fn write_g3_log(folder: &Path) {
    let events = Arc::new(EventLog::new(Epoch(1)));
    let tier =
        DiskTier::open(folder, kvbm::disk::Settings { min_free_bytes: 0, ..Default::default() }, events).unwrap();
    let blocks = (1..=3).map(block).collect();
    assert!(tier.store(blocks).await.iter().all(Result::is_ok));
}

fn block(n: u8) -> Block {
    let hash = SequenceHash::from_bytes([n; 16]);
    Block::new(hash, None, Fingerprint::from_bytes([7; 32]), Bytes::from(vec![n; 1_000]))
}

/// Writes three blocks to a shared folder, each in an object of its own.
async fn write_store(folder: &Path) {
    let events = Arc::new(EventLog::new(Epoch(1)));
    let tier =
        ObjectTier::open_folder(folder, Settings { object_bytes: 1, object_blocks: 1, ..Settings::default() }, events)
            .unwrap();
    assert!(tier.store((1..=3).map(block).collect()).await.iter().all(Result::is_ok));
}

fn count_files(folder: &Path) -> usize {
    let entries = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    entries.map(|path| if path.is_dir() { count_files(&path) } else { 1 }).sum()
}

#[tokio::test]
async fn gc_deletes_marked_objects_after_the_grace_period() {
    let folder = tempfile::tempdir().unwrap();
    let (at, blocks) = (folder.path(), folder.path().join("blocks"));
    write_store(at).await;
    let (listed, status) = cache_json(at, &["ls"]);
    let contents = &listed["contents"][0];
    assert_eq!((&contents["blocks"], &contents["objects"], status), (&3.into(), &3.into(), Some(0)));
    assert_eq!(
        cache_json(at, &["gc", "--capacity", "2500B", "--dry-run"]).0["report"]["marked"]["capacity"]["objects"],
        1
    );
    assert_eq!(cache_json(at, &["ls"]).0, listed, "a dry run changes nothing");
    let waiting = |report: &serde_json::Value| report["report"]["already_marked"]["objects"].clone();
    assert_eq!(waiting(&cache_json(at, &["gc", "--capacity", "2500B"]).0), 0);
    assert_eq!(
        (&cache_json(at, &["ls"]).0["contents"][0]["blocks"], count_files(&blocks)),
        (&2.into(), 3),
        "marked, not deleted"
    );
    let second = cache_json(at, &["gc"]).0;
    assert_eq!((&second["report"]["deleted"]["objects"], waiting(&second)), (&0.into(), 1.into()));
    assert_eq!(cache_json(at, &["gc", "--grace", "0s"]).0["report"]["deleted"]["objects"], 1);
    assert_eq!(count_files(&blocks), 2);
    let (report, status) = cache_json(at, &["verify"]);
    assert_eq!(
        (&report["valid_blocks"], &report["corrupt_blocks"], &report["missing_objects"], status),
        (&2.into(), &0.into(), &0.into(), Some(0))
    );
}

#[tokio::test]
async fn ls_shows_the_g3_log_with_or_without_a_shared_store() {
    let (data, shared) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    write_g3_log(&data.path().join("g3")).await;
    write_store(shared.path()).await;
    let at = data.path().to_str().unwrap();
    let ls = || cache_json(shared.path(), &["ls", "--data-dir", at]);
    // A child that another test forks at this moment inherits the lock and holds it until its exec: try again.
    let (both, status) = (0..100).map(|_| ls()).find(|(both, _)| both["g3"][0]["in_use"] == false).unwrap_or_else(ls);
    let log = &both["g3"][0];
    assert_eq!((&log["contents"][0]["blocks"], &log["in_use"], status), (&3.into(), &false.into(), Some(0)));
    assert_eq!(both["contents"][0]["blocks"], 3);
    let alone = cache(&["ls", "--data-dir", at]);
    let text = String::from_utf8(alone.stdout).unwrap();
    assert!(alone.status.success() && text.contains("not in use: 1 segment,") && !text.contains("WRITER"), "{text}");
}

#[tokio::test]
async fn ls_and_verify_of_a_g4_url_alone_leave_out_the_g3_log() {
    let (home, shared) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    // The default of `data_dir`.
    write_g3_log(&home.path().join(".cache/blockyard/g3")).await;
    write_store(shared.path()).await;
    let run = |arguments: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
        let output = command.arg("cache").args(arguments).env_clear().env("HOME", home.path()).output().unwrap();
        let report: Value = serde_json::from_slice(&output.stdout).unwrap();
        report["g3"].as_array().unwrap().len()
    };
    let at = shared.path().to_str().unwrap();
    for command in ["ls", "verify"] {
        assert_eq!(run(&[command, "--json", "--g4", at]), 0, "{command}");
        assert_eq!(run(&[command, "--json"]), 1, "{command}");
    }
}

#[tokio::test]
async fn verify_checks_the_g3_log_unless_a_process_uses_it() {
    let data = tempfile::tempdir().unwrap();
    let (at, folder) = (data.path().to_str().unwrap(), data.path().join("g3"));
    write_g3_log(&folder).await;
    let verify = || cache(&["verify", "--json", "--data-dir", at]);
    let g3_report = |output: &Output| serde_json::from_slice::<Value>(&output.stdout).unwrap()["g3"][0].clone();
    // A child that another test forks at this moment inherits the lock and holds it until its exec: try again.
    let intact = (0..100).map(|_| verify()).find(|output| output.status.success()).unwrap_or_else(verify);
    let report = g3_report(&intact);
    assert_eq!(
        (&report["valid_blocks"], &report["corrupt_blocks"], &report["undecryptable_blocks"]),
        (&3.into(), &0.into(), &0.into()),
        "{report}"
    );
    let segment = std::fs::read_dir(&folder).unwrap().map(|file| file.unwrap().path());
    let segment = segment.into_iter().find(|path| path.extension().is_some_and(|it| it == "segment")).unwrap();
    let mut bytes = std::fs::read(&segment).unwrap();
    bytes[600] ^= 1;
    std::fs::write(&segment, bytes).unwrap();
    let damaged = (0..100).map(|_| verify()).find(|output| !output.stdout.is_empty()).unwrap_or_else(verify);
    assert_eq!((damaged.status.code(), &g3_report(&damaged)["corrupt_blocks"]), (Some(1), &1.into()));
    let events = Arc::new(EventLog::new(Epoch(1)));
    let settings = kvbm::disk::Settings { min_free_bytes: 0, ..Default::default() };
    let _owner = DiskTier::open(&folder, settings, events).unwrap();
    let refused = verify();
    let stderr = String::from_utf8(refused.stderr).unwrap();
    let owner = format!("in use by process {}", std::process::id());
    assert!(refused.status.code() == Some(1) && stderr.contains(&owner), "{stderr}");
}

#[test]
fn errors_name_the_setting_that_is_missing_or_wrong() {
    let folder = tempfile::tempdir().unwrap();
    let at = folder.path().to_str().unwrap();
    for (arguments, expected) in [
        (vec!["ls", "--data-dir", at], "--g4"),
        (vec!["shred", "--data-dir", at, "--domain", "acme"], "tiers.encryption is not set"),
        (vec!["ls", "--g4", "/nonexistent/folder"], "/nonexistent/folder does not exist"),
        (vec!["ls", "--g3-5", "--data-dir", at], r#"--set 'tiers.g3_5={path="DIR", capacity="SIZE"}'"#),
    ] {
        let output = cache(&arguments);
        let stderr = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.code() == Some(1) && stderr.contains(expected), "{arguments:?}: {stderr}");
    }
}

#[test]
fn shred_of_a_domain_without_keys_is_refused_and_leaves_no_notice() {
    let folder = tempfile::tempdir().unwrap();
    let master = folder.path().join("master");
    std::fs::write(&master, "07".repeat(32)).unwrap();
    let set = format!(r#"tiers.encryption={{keys={{file="{}"}}}}"#, master.display());
    let at = folder.path().to_str().unwrap();
    let output = cache(&["shred", "--g4", at, "--set", &set, "--domain", "acme", "--remove"]);
    let stderr = String::from_utf8(output.stderr).unwrap();
    let id = kvbm::Domain::derived(b"", "acme").id();
    assert!(stderr.contains(&format!("domain {id} has no key in this key store")), "{stderr}");
    assert!(stderr.contains("frontend.tenant_secret_file"), "{stderr}");
    assert_eq!((output.status.code(), output.stdout.len()), (Some(1), 0));
    assert!(!folder.path().join("keys/shreds").exists(), "no notice for running processes");
}

#[test]
fn a_store_that_does_not_answer_is_named_with_what_to_do() {
    let endpoint = "tiers.g4.endpoint=http://127.0.0.1:1";
    for subcommand in ["ls", "verify", "gc"] {
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
        let arguments = ["cache", subcommand, "--g4", "s3://kv-cache/blocks", "--set", endpoint];
        let environment = [("HOME", "/nonexistent"), ("AWS_ACCESS_KEY_ID", "a"), ("AWS_SECRET_ACCESS_KEY", "b")];
        let output = command.args(arguments).env_clear().envs(environment).output().unwrap();
        let error = String::from_utf8(output.stderr).unwrap();
        assert!(error.starts_with("error: s3://kv-cache/blocks cannot be read (`blockyard doctor` "), "{error}");
        assert_eq!(output.status.code(), Some(1));
    }
}
