//! `blockyard bench io`: what it leaves behind.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use std::fs;
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread;
use std::time::Duration;

/// Entries of a folder whose names are those of a measurement.
fn measurements(folder: &Path) -> Vec<String> {
    let names = fs::read_dir(folder).into_iter().flatten().map(|entry| entry.unwrap().file_name());
    names.map(|name| name.into_string().unwrap()).filter(|name| name.starts_with("bench-io-")).collect()
}

#[test]
fn a_measurement_that_is_stopped_removes_its_folders() {
    for signal in ["INT", "TERM"] {
        let home = tempfile::tempdir().unwrap();
        let (data, store) = (home.path().join("data"), home.path().join("store"));
        fs::create_dir(&store).unwrap();
        let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
        command.args(["bench", "io", "--bytes", "64MiB", "--block", "1MiB", "--parallel", "1", "--rounds", "99"]);
        command.args(["--set", "tiers.g2=off", "--set", "tiers.g3=1GiB"]).arg("--data-dir").arg(&data);
        command.arg("--g4").arg(&store).env_clear().env("HOME", home.path());
        let mut child = command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().unwrap();
        // The folder of G3 is there when its first measurement begins.
        let progress = BufReader::new(child.stderr.take().unwrap());
        let mut lines = progress.lines().map(|line| line.unwrap());
        assert!(lines.any(|line| line.starts_with("g3 ")), "{signal}");
        while measurements(&data.join("g3")).is_empty() {
            assert_eq!(child.try_wait().unwrap(), None, "{signal}");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap().success());
        assert!(lines.any(|line| line == "error: interrupted"), "{signal}");
        assert_eq!(child.wait().unwrap().code(), Some(1), "{signal}");
        assert_eq!((measurements(&data.join("g3")), measurements(&store)), (vec![], vec![]), "{signal}");
    }
}
