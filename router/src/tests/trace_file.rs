//! The record of served requests: what it says, and that it can be switched on and off.

use super::harness::{Behaviour, Yard, prompt};
use super::{defaults, failed};
use crate::replay::Trace;
use crate::{Recorded, Settings};
use futures::StreamExt;
use std::collections::BTreeSet;
use std::path::Path;
use std::time::Duration;
use worker::engine::Request;
use worker::plane::{Phase, WorkerId};

/// The lines, once there are so many of them.
async fn lines(path: &Path, count: usize) -> Vec<Recorded> {
    for _ in 0..1000 {
        let text = std::fs::read_to_string(path).unwrap_or_default();
        if text.lines().count() >= count {
            return text.lines().map(|line| serde_json::from_str(line).unwrap()).collect();
        }
        // Another thread writes, on the machine's clock.
        tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(5))).await.unwrap();
    }
    panic!("no {count} lines came");
}

fn recording(path: &Path) -> Settings {
    Settings { trace_file: Some(path.to_owned()), ..Settings::default() }
}

#[tokio::test(start_paused = true)]
async fn what_was_served_is_a_trace_that_can_be_replayed() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    let yard = Yard::new(recording(&path));
    let (bad, good) = (yard.worker(1, Phase::Both).await, yard.worker(2, Phase::Both).await);
    good.remember(&[]);
    bad.become_(Behaviour::Refuse(failed()));
    yard.answer(prompt(1, 1200)).await.unwrap();
    // The same beginning, and another end.
    let mut tokens = prompt(1, 1200).tokens.to_vec();
    tokens[1100] = 7;
    yard.answer(Request { tokens: tokens.into(), ..prompt(1, 1200) }).await.unwrap();
    let lines = lines(&path, 2).await;
    let about = |line: &Recorded| (line.input_length, line.output_length, line.worker.clone(), line.disaggregated);
    assert_eq!(lines.iter().map(about).collect::<Vec<_>>(), vec![(1200, 2, WorkerId(2).to_string(), false); 2]);
    assert_eq!(lines.iter().map(|line| line.cached_tokens.values().sum()).collect::<Vec<u64>>(), [0, 1088]);
    assert_eq!(lines[0].hash_ids[..2], lines[1].hash_ids[..2]);
    assert_ne!(lines[0].hash_ids[2], lines[1].hash_ids[2]);
    assert!(
        lines.iter().all(|line| line.dispatched_s <= line.first_token_s && line.first_token_s <= line.last_token_s)
    );
    assert_eq!(Trace::read(std::fs::read(&path).unwrap().as_slice()).unwrap().len(), 2);
}

#[tokio::test(start_paused = true)]
async fn recording_starts_and_stops_while_requests_are_served_and_a_path_that_cannot_be_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    let yard = defaults();
    yard.worker(1, Phase::Both).await;
    yard.answer(prompt(1, 100)).await.unwrap();
    yard.router.update_settings(recording(&path)).unwrap();
    yard.answer(prompt(2, 200)).await.unwrap();
    let nowhere = folder.path().join("no").join("run.jsonl");
    let error = yard.router.update_settings(recording(&nowhere)).unwrap_err().to_string();
    assert!(error.starts_with("router.trace_file: ") && error.contains("no/run.jsonl"), "{error}");
    yard.answer(prompt(3, 300)).await.unwrap();
    yard.router.update_settings(Settings::default()).unwrap();
    yard.answer(prompt(4, 400)).await.unwrap();
    yard.router.update_settings(recording(&path)).unwrap();
    yard.answer(prompt(5, 500)).await.unwrap();
    // What the first writer still had may come after what the second has.
    let lengths: BTreeSet<u64> = lines(&path, 3).await.iter().map(|line| line.input_length).collect();
    assert_eq!(lengths, BTreeSet::from([200, 300, 500]));
}

#[tokio::test(start_paused = true)]
async fn a_record_goes_on_under_its_name_when_it_was_moved_away_and_in_its_place_when_room_was_made() {
    let folder = tempfile::tempdir().unwrap();
    let [path, moved] = ["run.jsonl", "moved.jsonl"].map(|name| folder.path().join(name));
    let yard = Yard::new(recording(&path));
    yard.worker(1, Phase::Both).await;
    let length = |line: &Recorded| line.input_length;
    yard.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(lines(&path, 1).await.iter().map(length).collect::<Vec<_>>(), [100]);
    std::fs::rename(&path, &moved).unwrap();
    yard.router.update_settings(recording(&path)).unwrap();
    yard.answer(prompt(2, 200)).await.unwrap();
    assert_eq!(lines(&path, 1).await.iter().map(length).collect::<Vec<_>>(), [200]);
    assert_eq!(lines(&moved, 1).await.len(), 1);
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(1 << 30).unwrap();
    yard.answer(prompt(3, 300)).await.unwrap();
    assert_eq!(counted(&yard, 3).await, [2, 1]);
    file.set_len(0).unwrap();
    yard.router.update_settings(recording(&path)).unwrap();
    yard.answer(prompt(4, 400)).await.unwrap();
    assert_eq!(lines(&path, 1).await.iter().map(length).collect::<Vec<_>>(), [400]);
}

/// Lines written, and dropped, once there are so many of both.
async fn counted(yard: &Yard, count: u64) -> [u64; 2] {
    for _ in 0..1000 {
        let counts =
            ["written", "dropped"].map(|of| yard.router.core.metrics.trace_records.with_label_values(&[of]).get());
        if counts.iter().sum::<u64>() >= count {
            return counts;
        }
        tokio::task::spawn_blocking(|| std::thread::sleep(Duration::from_millis(5))).await.unwrap();
    }
    panic!("no {count} lines were counted");
}

#[tokio::test(start_paused = true)]
async fn a_record_ends_at_its_bound_and_goes_on_under_the_same_name_once_there_is_room() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    // It takes no room: nothing was ever written in it.
    let file = std::fs::File::create(&path).unwrap();
    file.set_len((1 << 30) - 1).unwrap();
    let yard = Yard::new(recording(&path));
    yard.worker(1, Phase::Both).await;
    yard.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(counted(&yard, 1).await, [1, 0]);
    yard.answer(prompt(2, 200)).await.unwrap();
    assert_eq!(counted(&yard, 2).await, [1, 1], "it is full");
    yard.answer(prompt(3, 300)).await.unwrap();
    assert!(!yard.router.core.recorder.is_on());
    std::fs::rename(&path, folder.path().join("full.jsonl")).unwrap();
    yard.router.update_settings(recording(&path)).unwrap();
    yard.answer(prompt(4, 400)).await.unwrap();
    let lengths: Vec<u64> = lines(&path, 1).await.iter().map(|line| line.input_length).collect();
    assert_eq!((lengths, counted(&yard, 3).await), (vec![400], [2, 1]), "what is not recorded is not counted either");
}

#[tokio::test(start_paused = true)]
async fn a_record_stays_one_though_settings_change_while_requests_are_served() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("run.jsonl");
    // The next line is the last that fits.
    std::fs::File::create(&path).unwrap().set_len((1 << 30) - 1).unwrap();
    let yard = Yard::new(recording(&path));
    yard.worker(1, Phase::Both).await;
    let served = yard.ask(prompt(1, 100)).await.unwrap();
    yard.router.update_settings(recording(&path)).unwrap();
    yard.answer(prompt(2, 200)).await.unwrap();
    assert_eq!(counted(&yard, 1).await, [1, 0]);
    let length = || std::fs::metadata(&path).unwrap().len();
    let before = length();
    served.collect::<Vec<_>>().await;
    assert_eq!((counted(&yard, 2).await, length()), ([1, 1], before), "what was counted stays");
    assert!(!yard.router.core.recorder.is_on(), "there is one record, and it has ended");
}

#[tokio::test(start_paused = true)]
async fn a_line_that_finds_the_disk_full_is_counted_and_the_last_for_now() {
    let yard = Yard::new(recording(Path::new("/dev/full")));
    yard.worker(1, Phase::Both).await;
    yard.answer(prompt(1, 100)).await.unwrap();
    assert_eq!(counted(&yard, 1).await, [0, 1]);
    assert!(!yard.router.core.recorder.is_on());
}
