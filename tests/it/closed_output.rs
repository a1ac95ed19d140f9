//! Commands whose standard output, or standard error, is closed by its reader, as `blockyard … | head` does.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use std::path::Path;
use std::process::{Command, Stdio};

/// Runs the program with a pipe without a reader as its standard output: its exit status and standard error.
fn run(arguments: &[&str], home: &Path) -> (Option<i32>, String) {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    command.args(arguments).env_clear().env("HOME", home).stdout(Stdio::from(writer));
    let output = command.output().unwrap();
    (output.status.code(), String::from_utf8(output.stderr).unwrap())
}

#[test]
fn a_reader_that_has_read_enough_is_not_an_error() {
    let home = tempfile::tempdir().unwrap();
    let (store, keys) = (home.path().join("store"), home.path().join("keys.toml"));
    std::fs::create_dir(&store).unwrap();
    std::fs::write(&keys, "").unwrap();
    let (store, keys) = (store.to_str().unwrap(), keys.to_str().unwrap());
    let commands: [&[&str]; 10] = [
        &["serve", "--print-config"],
        &["serve", "--print-config", "--json"],
        &["key", "list", "--file", keys],
        &["key", "list", "--file", keys, "--json"],
        &["cache", "ls", "--g4", store],
        &["cache", "ls", "--g4", store, "--json"],
        &["doctor", "--no-probe"],
        &["replay", "--workload", "chat", "--requests", "20", "--rate", "1"],
        &["replay", "--workload", "chat", "--requests", "20", "--rate", "1", "--json"],
        &["replay", "--workload", "chat", "--requests", "20", "--rate", "1", "--write-trace", "-"],
    ];
    for arguments in commands {
        let (status, stderr) = run(arguments, home.path());
        assert_eq!(status, Some(0), "{arguments:?}: {stderr}");
        assert!(!stderr.contains("panicked") && !stderr.contains("error:"), "{arguments:?}: {stderr}");
    }
}

#[test]
fn a_key_that_could_not_be_shown_is_an_error() {
    let home = tempfile::tempdir().unwrap();
    let file = home.path().join("keys.toml");
    let (status, stderr) = run(&["key", "add", "ci", "--file", file.to_str().unwrap()], home.path());
    assert_eq!(status, Some(1), "{stderr}");
    assert!(stderr.contains("blockyard key remove ci --file") && !stderr.contains("panicked"), "{stderr}");
}

#[test]
fn a_command_goes_on_without_a_reader_of_standard_error() {
    let home = tempfile::tempdir().unwrap();
    let keys = home.path().join("keys.toml");
    let keys = keys.to_str().unwrap();
    let commands: [(&[&str], i32); 4] = [
        (&["key", "add", "ci", "--file", keys], 0),
        (&["key", "remove", "ci", "--file", keys], 0),
        (&["replay", "--workload", "chat", "--requests", "20", "--rate", "1", "--policy", "random"], 0),
        (&["serve", "--listen", "nowhere"], 1),
    ];
    for (arguments, status) in commands {
        let (reader, writer) = std::io::pipe().unwrap();
        drop(reader);
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
        command.args(arguments).env_clear().env("HOME", home.path()).stderr(Stdio::from(writer));
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}");
    }
}
