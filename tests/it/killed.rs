//! The real program, killed without warning: what its SSD tier announced is still there, and answers as before.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::serve::{client, program};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::path::Path;
use std::process::{Child, Stdio};
use std::time::Duration;

/// A running program. Dropping it kills it.
struct Process {
    child: Child,
    url: String,
    http: reqwest::Client,
}

impl Process {
    async fn start(data: &Path) -> Self {
        let mut command = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--json", "--data-dir"]);
        // No G2, so that what comes back can only come from the SSD.
        command.arg(data).args(["--set", "tiers.g1=32MiB", "--set", "tiers.g2=off", "--set", "tiers.g3=64MiB"]);
        let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap();
        let mut banner = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut banner).unwrap();
        let banner: Value = serde_json::from_str(&banner).unwrap();
        let process = Self { child, url: format!("http://{}", banner["address"].as_str().unwrap()), http: client() };
        while !process.get("/ready").await.0 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        process
    }

    async fn get(&self, path: &str) -> (bool, String) {
        let response = self.http.get(format!("{}{path}", self.url)).send().await.unwrap();
        (response.status().is_success(), response.text().await.unwrap())
    }

    async fn complete(&self, prompt: &[u32]) -> (Value, u64) {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 1});
        let response = self.http.post(format!("{}/v1/completions", self.url)).json(&body).send().await.unwrap();
        let mut answer: Value = response.json().await.unwrap();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
        (answer["choices"][0].take(), cached)
    }

    async fn blocks_on_ssd(&self) -> usize {
        let (_, metrics) = self.get("/metrics").await;
        let line = metrics.lines().find_map(|line| line.strip_prefix(r#"blockyard_store_blocks{tier="g3"} "#));
        line.map_or(0, |blocks| blocks.parse().unwrap())
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // SIGKILL: no drain, no seal, no goodbye.
        self.child.kill().unwrap();
        self.child.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_killed_process_comes_back_with_its_blocks_and_the_same_answers() {
    let data = tempfile::tempdir().unwrap();
    let prompt: Vec<u32> = (0..640).map(|n| 10 + n * 7 % 500).collect();
    let first = Process::start(data.path()).await;
    let (answer, cold) = first.complete(&prompt).await;
    assert_eq!(cold, 0);
    while first.blocks_on_ssd().await < 640 / 16 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    drop(first);
    let second = Process::start(data.path()).await;
    let (again, warm) = second.complete(&prompt).await;
    assert_eq!(again, answer, "text and log-probabilities");
    assert_eq!(warm, 639 / 16 * 16);
}
