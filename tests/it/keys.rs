//! `blockyard key` and a server that follows its file, as real programs.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::{Process, client, program};
use serde_json::{Value, json};
use std::ffi::OsStr;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};
use std::time::{Duration, Instant};

/// Time for what takes less than a second on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);

/// A key from the environment.
const CHOSEN: &str = "a-key-that-a-person-chose";

fn key(file: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    command.arg("key").args(arguments).arg("--file").arg(file).env_clear().output().unwrap()
}

fn text(bytes: &[u8]) -> &str {
    std::str::from_utf8(bytes).unwrap()
}

async fn status(url: &str, key: &str) -> u16 {
    client().get(format!("{url}/v1/models")).bearer_auth(key).send().await.unwrap().status().as_u16()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_key_works_from_its_creation_to_its_removal() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("keys.toml");
    let added = key(&file, &["add", "ci", "--tenant", "ann", "--model", "tiny", "--tokens-per-minute", "1000000"]);
    let created = text(&added.stdout).trim().to_owned();
    assert!(added.status.success() && created.starts_with("by-"), "{}", text(&added.stderr));
    assert!(!text(&std::fs::read(&file).unwrap()).contains(&created[3..]));
    assert_eq!(std::fs::metadata(&file).unwrap().permissions().mode() & 0o777, 0o600);
    let list: Value = serde_json::from_slice(&key(&file, &["list", "--json"]).stdout).unwrap();
    for (field, expected) in [("name", json!("ci")), ("tenant", json!("ann")), ("models", json!(["tiny"]))] {
        assert_eq!(list[0][field], expected);
    }
    assert!(text(&key(&file, &["list"]).stdout).contains("1000000"));
    for (arguments, expected) in [
        (&["add", "ci"][..], "`ci` exists already; remove it first: blockyard key remove --file"),
        (&["remove", "cd"], "no key \"cd\"; it has ci"),
        (&["add", "a b"], "expected 1 to 64 letters"),
        (&["add", "cd", "--model", ""], "expected the name of a model"),
        (&["add", "cd", "--model", "tiny", "--model", " "], "expected the name of a model"),
    ] {
        let refused = key(&file, arguments);
        assert!(!refused.status.success() && text(&refused.stderr).contains(expected), "{}", text(&refused.stderr));
    }

    let other = folder.path().join("other.toml");
    let added: Value = serde_json::from_slice(&key(&other, &["add", "ann", "--json"]).stdout).unwrap();
    assert!(added["name"] == "ann" && added["key"].as_str().unwrap().starts_with("by-"), "{added}");
    assert!(key(&other, &["remove", "ann"]).status.success());
    assert!(text(&key(&other, &["remove", "ann"]).stderr).contains("no key \"ann\"; it has none"));

    let keys = format!("frontend.api_keys_file={}", file.display());
    let settings = ["--workers", "both:1", "--set", "tiers.g3=off", "--set", "tiers.g1=32MiB", "--set", &keys];
    let arguments = [&settings[..], &["--listen", "0.0.0.0:0"]].concat();
    let environment = [("BLOCKYARD_API_KEY", OsStr::new(CHOSEN))];
    let data = folder.path().join("data");
    let process = Process::start(&data, &arguments, &environment).await;
    let url = process.client.url.clone();
    assert_eq!(
        [status(&url, &created).await, status(&url, CHOSEN).await, status(&url, "by-other").await],
        [200, 200, 401]
    );
    let later = text(&key(&file, &["add", "later"]).stdout).trim().to_owned();
    assert!(key(&file, &["remove", "ci"]).status.success());
    let deadline = Instant::now() + TIMEOUT;
    while status(&url, &created).await != 401 || status(&url, &later).await != 200 {
        assert!(Instant::now() < deadline, "the changes take effect");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    process.signal("TERM");
    let (_, log) = process.wait();
    assert!(log.contains("API keys reloaded") && !log.contains("asks for no key"), "{log}");
    for secret in [&created[3..], &later[3..], CHOSEN] {
        assert!(!log.contains(secret), "a key is in the log: {log}");
    }
}

#[test]
fn the_key_of_the_environment_is_checked_and_never_printed() {
    let print = |key: &str| {
        let mut command = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--data-dir", "/nonexistent/data"]);
        command.arg("--print-config").env("BLOCKYARD_API_KEY", key).output().unwrap()
    };
    let printed = print(CHOSEN);
    assert!(printed.status.success(), "{}", text(&printed.stderr));
    assert!(!text(&printed.stdout).contains(CHOSEN));
    for wrong in ["", "too-short"] {
        let refused = print(wrong);
        let error = text(&refused.stderr);
        assert!(!refused.status.success() && error.contains("BLOCKYARD_API_KEY: expected a key of 16"), "{error}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_on_a_public_address_without_keys_warns() {
    let data = tempfile::tempdir().unwrap();
    let settings = ["--workers", "both:1", "--set", "tiers.g3=off", "--set", "tiers.g1=32MiB"];
    let process = Process::start(data.path(), &[&settings[..], &["--listen", "0.0.0.0:0"]].concat(), &[]).await;
    process.signal("TERM");
    let (_, log) = process.wait();
    let warnings: Vec<_> =
        log.lines().filter(|line| line.contains("WARN") && line.contains("asks for no key")).collect();
    assert!(warnings.len() == 1 && warnings[0].contains("frontend.api_keys_file"), "{log}");
}
