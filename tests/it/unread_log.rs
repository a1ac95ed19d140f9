//! The server serves whether or not its log is read.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use crate::process::{Process, program};
use std::io::Read;

/// More than the system buffers in a pipe.
const MANY_LINES: &str = "log.filter=trace";

async fn start(data: &tempfile::TempDir, log: std::io::PipeWriter) -> Process {
    let mut command = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--json", "--set", MANY_LINES]);
    command.arg("--data-dir").arg(data.path()).args(["--set", "frontend.shutdown_delay=0s"]);
    Process::launch_logging_to(log.into(), tempfile::tempfile().unwrap(), command).await
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unread_log_delays_no_request() {
    let data = tempfile::tempdir().unwrap();
    let (mut unread, log) = std::io::pipe().unwrap();
    let mut process = start(&data, log).await;
    // Requests log until the pipe and the queue of lines are full.
    let dropped = async || process.client.metric("blockyard_log_lines_dropped_total", "").await;
    while dropped().await == 0.0 {
        process.client.ask(&[1, 2, 3]).await.unwrap();
    }
    process.client.ask(&[1, 2, 3]).await.unwrap();
    process.stop();
    let mut read = Vec::new();
    unread.read_to_end(&mut read).unwrap();
    assert!(read.len() >= 4096, "{} bytes", read.len());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_closed_log_ends_nothing() {
    let data = tempfile::tempdir().unwrap();
    let (reader, log) = std::io::pipe().unwrap();
    let mut process = start(&data, log).await;
    drop(reader);
    for _ in 0..3 {
        process.client.ask(&[1, 2, 3]).await.unwrap();
    }
    process.stop();
}
