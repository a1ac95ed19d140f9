//! The trace file of served requests: content, rotation, limits.

use super::harness::{Behaviour, Harness, prompt};
use super::{defaults, failed};
use crate::replay::Trace;
use crate::{Recorded, Settings};
use futures::StreamExt;
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;
use std::time::Duration;
use worker::engine::{Engine, Request, RequestAttributes, StopConditions};
use worker::plane::{Role, WorkerId};

/// Waits until the file has this many lines and returns them.
async fn lines(path: &Path, count: usize) -> Vec<Recorded> {
    for _ in 0..1000 {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if text.lines().count() >= count {
            return text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        }
        // A thread writes the file, on the real clock.
        tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(5))).await.unwrap();
    }
    panic!("fewer than {count} lines were written");
}

fn recording(path: &Path) -> Settings {
    Settings { trace_file: Some(path.to_owned()), ..Settings::default() }
}

#[tokio::test(start_paused = true)]
async fn the_trace_file_can_be_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    let harness = Harness::new(recording(&path));
    let (bad, good) = (harness.worker(1, Role::Both).await, harness.worker(2, Role::Both).await);
    good.cache_blocks(&[]);
    bad.set_behaviour(Behaviour::Refuse(failed()));
    let attributes = RequestAttributes { tenant: "acme".into(), ..RequestAttributes::default() };
    let stop = StopConditions { max_tokens: Some(300), ..StopConditions::default() };
    harness.answer(Request { attributes, stop, ..prompt(1, 1200) }).await.unwrap();
    // A prompt with the same prefix and a different end.
    let mut tokens = prompt(1, 1200).tokens.to_vec();
    tokens[1100] = 7;
    harness.answer(Request { tokens: tokens.into(), ..prompt(1, 1200) }).await.unwrap();
    let lines = lines(&path, 2).await;
    let about = |line: &Recorded| (line.input_length, line.output_length, line.worker.clone(), line.disaggregated);
    assert_eq!(lines.iter().map(about).collect::<Vec<_>>(), vec![(1200, 2, WorkerId(2).to_string(), false); 2]);
    assert_eq!(lines.iter().map(|line| line.cached_tokens.values().sum()).collect::<Vec<u64>>(), [0, 1088]);
    assert_eq!((lines[0].max_tokens, lines[1].max_tokens, &*lines[1].tenant), (Some(300), None, ""));
    assert!(lines[0].tenant.len() == 8 && !lines[0].tenant.contains("acme"), "{}", lines[0].tenant);
    assert_eq!(lines[0].hash_ids[..2], lines[1].hash_ids[..2]);
    assert_ne!(lines[0].hash_ids[2], lines[1].hash_ids[2]);
    assert!(
        lines.iter().all(|line| line.dispatched_s <= line.first_token_s && line.first_token_s <= line.last_token_s)
    );
    assert_eq!(Trace::read(std::fs::read(&path).unwrap().as_slice()).unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn the_trace_file_can_be_switched_while_serving() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    let harness = defaults();
    harness.worker(1, Role::Both).await;
    harness.answer(prompt(1, 100)).await.unwrap();
    harness.router.update_settings(recording(&path)).unwrap();
    harness.answer(prompt(2, 200)).await.unwrap();
    let nowhere = folder.path().join("no").join("run.jsonl");
    let error = harness.router.update_settings(recording(&nowhere)).unwrap_err().to_string();
    assert!(error.starts_with("router.trace_file: ") && error.contains("no/run.jsonl"), "{error}");
    harness.answer(prompt(3, 300)).await.unwrap();
    harness.router.update_settings(Settings::default()).unwrap();
    harness.answer(prompt(4, 400)).await.unwrap();
    harness.router.update_settings(recording(&path)).unwrap();
    harness.answer(prompt(5, 500)).await.unwrap();
    // The first writer may flush its last lines after the second one started.
    let lengths: BTreeSet<u64> = lines(&path, 3).await.iter().map(|line| line.input_length).collect();
    assert_eq!(lengths, BTreeSet::from([200, 300, 500]));
}

#[tokio::test(start_paused = true)]
async fn a_named_pipe_is_refused_and_blocks_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
    let harness = defaults();
    harness.worker(1, Role::Both).await;
    let error = harness.router.update_settings(recording(&path)).unwrap_err().to_string();
    assert!(error.ends_with("pipe is a named pipe; expected a file"), "{error}");
    harness.answer(prompt(1, 100)).await.unwrap();
}

#[cfg(target_os = "linux")]
#[tokio::test(start_paused = true)]
async fn a_full_disk_is_listed_until_the_file_is_opened_again() {
    let folder = tempfile::tempdir().unwrap();
    let harness = Harness::new(recording(Path::new("/dev/full")));
    harness.worker(1, Role::Both).await;
    assert_eq!(harness.router.degraded(), [""; 0]);
    harness.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(counted(&harness, 1).await, [0, 1]);
    assert_eq!(
        harness.router.degraded(),
        ["router.trace_file: /dev/full cannot be written: No space left on device (os error 28); requests are not \
          recorded until a reload (SIGHUP) opens the file again"]
    );
    harness.router.update_settings(recording(&folder.path().join("run.jsonl"))).unwrap();
    assert_eq!(harness.router.degraded(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_moved_or_truncated_trace_file_is_reopened() {
    let folder = tempfile::tempdir().unwrap();
    let [path, moved] = ["run.jsonl", "moved.jsonl"].map(|name| folder.path().join(name));
    let harness = Harness::new(recording(&path));
    harness.worker(1, Role::Both).await;
    let length = |line: &Recorded| line.input_length;
    harness.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(lines(&path, 1).await.iter().map(length).collect::<Vec<_>>(), [100]);
    std::fs::rename(&path, &moved).unwrap();
    harness.router.update_settings(recording(&path)).unwrap();
    harness.answer(prompt(2, 200)).await.unwrap();
    assert_eq!(lines(&path, 1).await.iter().map(length).collect::<Vec<_>>(), [200]);
    assert_eq!(lines(&moved, 1).await.len(), 1);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(1 << 30).unwrap();
    harness.answer(prompt(3, 300)).await.unwrap();
    assert_eq!(counted(&harness, 3).await, [2, 1]);
    file.set_len(0).unwrap();
    harness.router.update_settings(recording(&path)).unwrap();
    harness.answer(prompt(4, 400)).await.unwrap();
    assert_eq!(lines(&path, 1).await.iter().map(length).collect::<Vec<_>>(), [400]);
}

/// Waits until this many lines are counted. Returns the numbers of written and of dropped lines.
async fn counted(harness: &Harness, count: u64) -> [u64; 2] {
    for _ in 0..1000 {
        let counts =
            ["written", "dropped"].map(|of| harness.router.core.metrics.trace_records.with_label_values(&[of]).get());
        if counts.iter().sum::<u64>() >= count {
            return counts;
        }
        tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(5))).await.unwrap();
    }
    panic!("fewer than {count} lines were counted");
}

#[tokio::test(start_paused = true)]
async fn a_full_trace_file_stops_until_it_is_rotated() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    // A sparse file, which uses no disk space.
    let file = std::fs::File::create(&path).unwrap();
    file.set_len((1 << 30) - 1).unwrap();
    let harness = Harness::new(recording(&path));
    harness.worker(1, Role::Both).await;
    harness.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(counted(&harness, 1).await, [1, 0]);
    harness.answer(prompt(2, 200)).await.unwrap();
    assert_eq!(counted(&harness, 2).await, [1, 1], "the file is full");
    harness.answer(prompt(3, 300)).await.unwrap();
    assert!(!harness.router.core.recorder.is_on());
    std::fs::rename(&path, folder.path().join("full.jsonl")).unwrap();
    harness.router.update_settings(recording(&path)).unwrap();
    harness.answer(prompt(4, 400)).await.unwrap();
    let lengths: Vec<u64> = lines(&path, 1).await.iter().map(|line| line.input_length).collect();
    assert_eq!(
        (lengths, counted(&harness, 3).await),
        (vec![400], [2, 1]),
        "requests without a trace line are not counted"
    );
}

#[tokio::test(start_paused = true)]
async fn retuning_keeps_the_trace_file_and_its_limit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    // Only the next line still fits.
    std::fs::File::create(&path).unwrap().set_len((1 << 30) - 1).unwrap();
    let harness = Harness::new(recording(&path));
    harness.worker(1, Role::Both).await;
    let served = harness.ask(prompt(1, 100)).await.unwrap();
    harness.router.update_settings(recording(&path)).unwrap();
    harness.answer(prompt(2, 200)).await.unwrap();
    assert_eq!(counted(&harness, 1).await, [1, 0]);
    let length = || std::fs::metadata(&path).unwrap().len();
    let before = length();
    served.collect::<Vec<_>>().await;
    assert_eq!((counted(&harness, 2).await, length()), ([1, 1], before), "the counters remain");
    assert!(!harness.router.core.recorder.is_on(), "the trace file is still full");
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_stops_the_trace_file() {
    let harness = Harness::new(recording(Path::new("/dev/full")));
    harness.worker(1, Role::Both).await;
    harness.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(counted(&harness, 1).await, [0, 1]);
    assert!(!harness.router.core.recorder.is_on());
}
