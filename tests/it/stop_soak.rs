//! The real program, stopped by signals at random moments under load, with segments of the default size: it stops in order, and
//! each later start finds what was durable.
//!
//! `BLOCKYARD_SOAK_SECONDS=3600` for longer, `BLOCKYARD_SOAK_SEED` for other moments. A failure names its seed.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::fault_soak::{PATIENCE, Rng, number};
use super::process::program;
use super::process::{Client, Process};
use kvbm::Date;
use kvbm::disk::{LogContents, inspect};
use serde_json::Value;
use std::path::Path;
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

/// Segments of the default size; nothing but the SSD tier that a later life could find anything in.
const SIZES: [&str; 8] =
    ["--set", "tiers.g1=32MiB", "--set", "tiers.g2=off", "--set", "tiers.g3=2GiB", "--set", "tiers.g3_min_free=off"];
const CLIENTS: u32 = 3;
/// With more than this in the tier another folder follows, so that nothing is ever given up for want of room.
const BYTES_MAX: u64 = 1 << 30;
/// Fewer stops show nothing.
const STOPS_MIN: u32 = 3;

fn prompt(kind: u32) -> Vec<u32> {
    (0..320).map(|n| 10 + (kind * 131 + n * 7 + n * n % (kind % 89 + 3)) % 500).collect()
}

/// Asks for one new prompt after the other, from `first` on, until the program stops.
fn load(client: &Client, over: &Arc<AtomicBool>, first: u32) -> Vec<JoinHandle<Vec<(u32, Value)>>> {
    let one = |n: u32| {
        let (client, over) = (client.clone(), over.clone());
        tokio::spawn(async move {
            let mut answers = Vec::new();
            for kind in (first + n..).step_by(CLIENTS as usize) {
                let answer = client.ask(&prompt(kind)).await;
                let stopping = over.load(Relaxed);
                match answer {
                    Ok(mut answer) if answer["choices"].is_array() => answers.push((kind, answer["choices"][0].take())),
                    // The program has been asked to stop.
                    refused => assert!(stopping, "prompt {kind}: {refused:?}"),
                }
                if stopping {
                    break;
                }
            }
            answers
        })
    };
    (0..CLIENTS).map(one).collect()
}

fn found(data: &Path) -> LogContents {
    inspect(&data.join("g3"), Date::from_unix(0)).unwrap().unwrap()
}

fn blocks(log: &LogContents) -> u64 {
    log.contents.iter().map(|entry| entry.blocks).sum()
}

async fn in_g3(client: &Client) -> u64 {
    client.metric("blockyard_tier_blocks", "g3").await as u64
}

/// What must hold of a program that has started above what others left.
async fn assert_healthy(client: &Client, durable: u64, case: &str) {
    let late = Instant::now() + PATIENCE;
    while in_g3(client).await != durable {
        assert!(Instant::now() < late, "{case}: {durable} blocks rested, and {} are found", in_g3(client).await);
        sleep(Duration::from_millis(20)).await;
    }
    for (metric, wanted) in [
        ("blockyard_panics_total", 0.0),
        ("blockyard_tier_corrupt_ranges_total", 0.0),
        ("blockyard_tier_corrupt_footers_total", 0.0),
        ("blockyard_tier_path_failures_total", 0.0),
        ("blockyard_tier_corrupt_blocks_total", 0.0),
        ("blockyard_tier_path_up", 1.0),
    ] {
        let value = client.metric(metric, "").await;
        assert!((value - wanted).abs() < 0.5, "{case}: {metric} is {value}, not {wanted}");
    }
    let (_, ready) = client.get("/ready").await;
    assert!(!ready.contains("degraded"), "{case}: {ready}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_after_any_clean_stop_finds_what_was_durable() {
    let (seconds, seed) = (number("BLOCKYARD_SOAK_SECONDS", 20), number("BLOCKYARD_SOAK_SEED", 1));
    println!("seed {seed}");
    let (mut rng, end) = (Rng::new(seed), Instant::now() + Duration::from_secs(seconds));
    let (mut data, mut durable, mut last) = (tempfile::tempdir().unwrap(), 0, None::<(u32, Value)>);
    let (mut stops, mut early, mut next) = (0, 0, 0);
    while stops < STOPS_MIN || Instant::now() < end {
        let signal = ["TERM", "INT"][rng.below(2) as usize];
        let case = format!("seed {seed}, stop {stops} by SIG{signal}");
        if durable > 0 && rng.below(4) == 0 {
            stop_while_starting(data.path(), signal, Duration::from_millis(rng.below(400))).await;
            early += 1;
        }
        let process = Process::start(data.path(), &SIZES, &[]).await;
        assert_healthy(&process.client, durable, &case).await;
        if let Some((kind, answer)) = last.take() {
            let (again, cached) = process.client.complete(&prompt(kind)).await.unwrap();
            assert_eq!(again, answer, "{case}: prompt {kind}, {cached} tokens cached");
        }
        let over = Arc::new(AtomicBool::new(false));
        let load = load(&process.client, &over, next);
        next += 1_000;
        sleep(Duration::from_millis(rng.below(1_500))).await;
        let announced = in_g3(&process.client).await;
        over.store(true, Relaxed);
        process.signal(signal);
        let ended = tokio::task::spawn_blocking(move || process.ended());
        let (status, log) =
            timeout(PATIENCE, ended).await.unwrap_or_else(|_| panic!("{case}: it does not end")).unwrap();
        for answers in futures::future::join_all(load).await {
            last = answers.unwrap().pop().or(last);
        }
        assert!(status.success(), "{case}: {status}\n{log}");
        assert!(!log.contains("panic") && !log.contains("ERROR"), "{case}:\n{log}");
        let left = found(data.path());
        assert_eq!(left.open_segments, 0, "{case}: a segment was not sealed\n{log}");
        durable = blocks(&left);
        assert!(durable >= announced, "{case}: {announced} blocks were announced, and {durable} rest");
        stops += 1;
        if left.bytes > BYTES_MAX {
            (data, durable, last) = (tempfile::tempdir().unwrap(), 0, None);
        }
    }
    println!("{stops} stops, {early} more while it started; at the end {durable} blocks rest");
    assert!(durable > 0, "it is no idle run");
}

/// A life that ends before it is ready.
async fn stop_while_starting(data: &Path, signal: &str, after: Duration) {
    let mut command = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--data-dir"]);
    let mut child = command.arg(data).args(SIZES).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    sleep(after).await;
    let _ = std::process::Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
    let ended = tokio::task::spawn_blocking(move || child.wait());
    timeout(PATIENCE, ended).await.expect("it ends").unwrap().unwrap();
}
