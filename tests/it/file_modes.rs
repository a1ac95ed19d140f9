//! File modes: other users cannot read blocks, keys or traces that the program writes, whatever the umask is.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::{Process, program};
use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

fn mode(path: &Path) -> u32 {
    fs::symlink_metadata(path).unwrap().permissions().mode() & 0o7777
}

/// The folder and everything below it, each with its mode.
fn modes(folder: &Path) -> Vec<(PathBuf, u32)> {
    let below = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let below = below.flat_map(|path| if path.is_dir() { modes(&path) } else { vec![(path.clone(), mode(&path))] });
    std::iter::once((folder.to_owned(), mode(folder))).chain(below).collect()
}

fn set_mode(path: &Path, mode: u32) {
    fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
}

/// The entries to which group or others have any access.
fn open_to_others(folder: &Path) -> Vec<(PathBuf, u32)> {
    modes(folder).into_iter().filter(|(_, mode)| mode & 0o077 != 0).collect()
}

/// Serves one long prompt with encrypted shared flash and a trace file, and stops.
async fn serve_once(root: &Path, umask: &str) {
    let flash = format!(r#"tiers.g3_5={{path="{}", capacity="64MiB"}}"#, root.join("flash").display());
    let keys = format!(r#"tiers.encryption={{keys={{file="{}"}}}}"#, root.join("master").display());
    let trace = format!("router.trace_file={}", root.join("trace.jsonl").display());
    let sets =
        [&*flash, &keys, &trace, "frontend.shutdown_delay=0s", "tiers.g1=32MiB", "tiers.g2=32MiB", "tiers.g3=64MiB"];
    let sets = sets.iter().flat_map(|set| ["--set", set]);
    let mut serve = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--json", "--data-dir"]);
    serve.arg(root.join("data")).args(sets);
    let mut command = Command::new("sh");
    command.args(["-c", &format!(r#"umask {umask} && exec "$0" "$@""#)]);
    command.arg(serve.get_program()).args(serve.get_args()).env_clear().env("HOME", "/nonexistent");
    let mut process = Process::launch(command).await;
    let prompt: Vec<u32> = (0..640).map(|n| 10 + (n * 7) % 500).collect();
    process.client.complete(&prompt).await.unwrap();
    process.stop();
}

#[tokio::test]
async fn files_and_folders_are_private_under_umask_000() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("master"), "07".repeat(32)).unwrap();
    serve_once(root.path(), "000").await;
    let [data, flash, trace] = ["data", "flash", "trace.jsonl"].map(|name| root.path().join(name));
    assert_eq!((open_to_others(&data), open_to_others(&flash), mode(&trace)), (vec![], vec![], 0o600));
    let written = |folder: &Path| modes(folder).iter().filter(|(path, _)| path.is_file()).count();
    let folders = [data.join("g3"), flash.join("manifests"), flash.join("blocks"), flash.join("keys")];
    assert!(folders.iter().all(|folder| written(folder) > 0), "{:?}", [modes(&data), modes(&flash)]);

    // A restart narrows modes that earlier runs left wider.
    for (path, _) in [modes(&data.join("g3")), modes(&flash)].concat() {
        set_mode(&path, if path.is_dir() { 0o755 } else { 0o644 });
    }
    set_mode(&trace, 0o644);
    serve_once(root.path(), "000").await;
    assert_eq!((open_to_others(&data), mode(&trace)), (vec![], 0o600));
    let folders = ["manifests", "blocks", "removals", "uses", "keys"].map(|name| mode(&flash.join(name)));
    assert_eq!(folders, [0o700; 5], "private folders also hide what is below them");
}

#[tokio::test]
async fn a_setgid_shared_flash_folder_stays_shared_with_its_group() {
    let root = tempfile::tempdir().unwrap();
    fs::write(root.path().join("master"), "07".repeat(32)).unwrap();
    let flash = root.path().join("flash");
    fs::create_dir(&flash).unwrap();
    set_mode(&flash, 0o2770);
    serve_once(root.path(), "022").await;
    let shared = |(path, mode): &(PathBuf, u32)| mode & 0o777 == if path.is_dir() { 0o770 } else { 0o660 };
    let below: Vec<_> = modes(&flash).into_iter().filter(|entry| !shared(entry)).collect();
    assert_eq!(below, []);
    assert_eq!(open_to_others(&root.path().join("data").join("g3")), [], "only shared flash is shared");
}
