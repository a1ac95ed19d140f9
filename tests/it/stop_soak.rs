//! The real program, stopped by signals at random moments under load, with segments of the default size: it stops
//! cleanly, and each later start finds all durable blocks.
//!
//! `BLOCKYARD_SOAK_SECONDS` sets the duration (20), `BLOCKYARD_SOAK_SEED` the random choices (1). Failures name it.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::fault_soak::{Rng, WAIT_LIMIT, number};
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

/// A G3 log large enough for segments of the default size. It is the only tier that outlives the process.
const SIZES: [&str; 8] =
    ["--set", "tiers.g1=32MiB", "--set", "tiers.g2=off", "--set", "tiers.g3=2GiB", "--set", "tiers.g3_min_free=off"];
const CLIENTS: u32 = 3;
/// A log larger than this is replaced by an empty folder, so that the tier never reclaims segments.
const MAX_BYTES: u64 = 1 << 30;
/// The fewest stops of a run.
const MIN_STOPS: u32 = 3;

fn prompt(kind: u32) -> Vec<u32> {
    (0..320).map(|n| 10 + (kind * 131 + n * 7 + n * n % (kind % 89 + 3)) % 500).collect()
}

/// Starts clients that each send new prompts, numbered from `first` on, until the program stops.
fn start_load(client: &Client, over: &Arc<AtomicBool>, first: u32) -> Vec<JoinHandle<Vec<(u32, Value)>>> {
    let client_task = |n: u32| {
        let (client, over) = (client.clone(), over.clone());
        tokio::spawn(async move {
            let mut answers = Vec::new();
            for kind in (first + n..).step_by(CLIENTS as usize) {
                let answer = client.ask(&prompt(kind)).await;
                let stopping = over.load(Relaxed);
                match answer {
                    Ok(mut answer) if answer["choices"].is_array() => answers.push((kind, answer["choices"][0].take())),
                    // Requests may fail once the program is stopping.
                    rejected => assert!(stopping, "prompt {kind}: {rejected:?}"),
                }
                if stopping {
                    break;
                }
            }
            answers
        })
    };
    (0..CLIENTS).map(client_task).collect()
}

fn inspect_log(data: &Path) -> LogContents {
    inspect(&data.join("g3"), Date::from_unix(0)).unwrap().unwrap()
}

fn blocks(log: &LogContents) -> u64 {
    log.contents.iter().map(|entry| entry.blocks).sum()
}

async fn in_g3(client: &Client) -> u64 {
    client.metric("blockyard_tier_blocks", "g3").await as u64
}

/// Asserts that a started program has all durable blocks and reports no error.
async fn assert_healthy(client: &Client, durable: u64, case: &str) {
    let deadline = Instant::now() + WAIT_LIMIT;
    while in_g3(client).await != durable {
        assert!(Instant::now() < deadline, "{case}: {durable} durable blocks, and {} are found", in_g3(client).await);
        sleep(Duration::from_millis(20)).await;
    }
    for (metric, expected) in [
        ("blockyard_panics_total", 0.0),
        ("blockyard_tier_corrupt_ranges_total", 0.0),
        ("blockyard_tier_corrupt_footers_total", 0.0),
        ("blockyard_tier_path_failures_total", 0.0),
        ("blockyard_tier_corrupt_blocks_total", 0.0),
        ("blockyard_tier_path_up", 1.0),
    ] {
        let value = client.metric(metric, "").await;
        assert!((value - expected).abs() < 0.5, "{case}: {metric} is {value}, not {expected}");
    }
    let (_, ready) = client.get("/ready").await;
    assert!(!ready.contains("degraded"), "{case}: {ready}");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_start_after_a_clean_stop_finds_every_durable_block() {
    let (seconds, seed) = (number("BLOCKYARD_SOAK_SECONDS", 20), number("BLOCKYARD_SOAK_SEED", 1));
    println!("seed {seed}");
    let mut rng = Rng::new(seed);
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut data = tempfile::tempdir().unwrap();
    // Blocks in the log of `data`.
    let mut durable = 0;
    // A prompt and its answer from the run before.
    let mut last = None::<(u32, Value)>;
    let mut stops = 0;
    let mut stops_while_starting = 0;
    let mut next_prompt = 0;
    while stops < MIN_STOPS || Instant::now() < end {
        let signal = ["TERM", "INT"][rng.below(2) as usize];
        let case = format!("seed {seed}, stop {stops} by SIG{signal}");
        if durable > 0 && rng.below(4) == 0 {
            stop_while_starting(data.path(), signal, Duration::from_millis(rng.below(400))).await;
            stops_while_starting += 1;
        }
        let process = Process::start(data.path(), &SIZES, &[]).await;
        assert_healthy(&process.client, durable, &case).await;
        if let Some((kind, answer)) = last.take() {
            let (again, cached) = process.client.complete(&prompt(kind)).await.unwrap();
            assert_eq!(again, answer, "{case}: prompt {kind}, {cached} tokens cached");
        }
        let over = Arc::new(AtomicBool::new(false));
        let load = start_load(&process.client, &over, next_prompt);
        next_prompt += 1_000;
        sleep(Duration::from_millis(rng.below(1_500))).await;
        let reported = in_g3(&process.client).await;
        over.store(true, Relaxed);
        process.signal(signal);
        let ended = tokio::task::spawn_blocking(move || process.wait());
        let (status, log) =
            timeout(WAIT_LIMIT, ended).await.unwrap_or_else(|_| panic!("{case}: no end of the process")).unwrap();
        for answers in futures::future::join_all(load).await {
            last = answers.unwrap().pop().or(last);
        }
        assert!(status.success(), "{case}: {status}\n{log}");
        assert!(!log.contains("panic") && !log.contains("ERROR"), "{case}:\n{log}");
        let log_contents = inspect_log(data.path());
        assert_eq!(log_contents.open_segments, 0, "{case}: a segment was not sealed\n{log}");
        durable = blocks(&log_contents);
        assert!(durable >= reported, "{case}: {reported} blocks were reported, and {durable} are stored");
        stops += 1;
        if log_contents.bytes > MAX_BYTES {
            data = tempfile::tempdir().unwrap();
            durable = 0;
            last = None;
        }
    }
    println!("{stops} stops, {stops_while_starting} more while starting; {durable} blocks stored at the end");
    assert!(durable > 0, "the last run stored blocks");
}

/// Starts the program and stops it after `after`, usually before it is ready.
async fn stop_while_starting(data: &Path, signal: &str, after: Duration) {
    let mut command = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--data-dir"]);
    let mut child = command.arg(data).args(SIZES).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    sleep(after).await;
    let _ = std::process::Command::new("kill").args(["-s", signal, &child.id().to_string()]).status().unwrap();
    let ended = tokio::task::spawn_blocking(move || child.wait());
    timeout(WAIT_LIMIT, ended).await.expect("the process ends").unwrap().unwrap();
}
