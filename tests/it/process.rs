//! The real program, killed without warning: what its SSD tier announced is still there, and answers as before.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// How long the program may take to start or to stop. Each takes a second; a machine that runs several test suites at once may
/// need a minute.
const START_LIMIT: Duration = Duration::from_mins(5);

/// A running program. Dropping it kills it.
pub(crate) struct Process {
    child: Child,
    /// What it says of itself: told when it does not do what it was asked for.
    log: File,
    pub(crate) client: Client,
}

/// Who asks it.
#[derive(Clone)]
pub(crate) struct Client {
    pub(crate) url: String,
    pub(crate) admin: Option<String>,
    http: reqwest::Client,
}

impl Process {
    /// The program on `tiny`, with everything that it writes but what `arguments` say below `data`; ready.
    pub(crate) async fn start(data: &Path, arguments: &[&str], environment: &[(&str, &OsStr)]) -> Self {
        let mut command = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--json", "--data-dir"]);
        // No load balancer has to notice that it stops.
        command
            .arg(data)
            .args(["--set", "frontend.shutdown_delay=0s"])
            .args(arguments)
            .envs(environment.iter().copied());
        Self::launch(command).await
    }

    /// A command that becomes the program; ready.
    pub(crate) async fn launch(mut command: Command) -> Self {
        let log = tempfile::tempfile().unwrap();
        let mut child = command.stdout(Stdio::piped()).stderr(log.try_clone().unwrap()).spawn().unwrap();
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let read = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            stdout.read_line(&mut line).map(|_| line)
        });
        let Ok(line) = tokio::time::timeout(START_LIMIT, read).await else {
            // Ends the thread that reads.
            let _ = child.kill();
            panic!("no banner within {START_LIMIT:?}:\n{}", last_of(&log));
        };
        let banner: Value =
            serde_json::from_str(&line.unwrap().unwrap()).unwrap_or_else(|_| panic!("no banner:\n{}", last_of(&log)));
        let admin = banner["admin_address"].as_str().map(|address| format!("http://{address}"));
        let client = Client { url: format!("http://{}", banner["address"].as_str().unwrap()), admin, http: client() };
        let ready = async {
            while !client.get("/ready").await.0 {
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let in_time = tokio::time::timeout(START_LIMIT, ready).await;
        let mut process = Self { child, log, client };
        if in_time.is_err() {
            process.kill();
            panic!("not ready within {START_LIMIT:?}:\n{}", last_of(&process.log));
        }
        process
    }

    pub(crate) fn id(&self) -> u32 {
        self.child.id()
    }

    /// SIGTERM, and waits until everything is written and it has ended.
    pub(crate) fn stop(&mut self) {
        let asked = Command::new("kill").arg(self.id().to_string()).status().unwrap();
        let deadline = Instant::now() + START_LIMIT;
        let ended = loop {
            if let Some(ended) = self.child.try_wait().unwrap() {
                break ended;
            }
            if Instant::now() > deadline {
                self.kill();
                panic!("did not stop within {START_LIMIT:?}:\n{}", last_of(&self.log));
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(asked.success() && ended.success(), "{asked}, {ended}:\n{}", last_of(&self.log));
    }

    /// Sends a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        // It may have ended.
        let _ = Command::new("kill").args(["-s", name, &self.id().to_string()]).status().unwrap();
    }

    /// Waits until it has ended: how, and all that it logged.
    pub(crate) fn ended(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        let mut log = vec![0; self.log.metadata().unwrap().len() as usize];
        self.log.read_exact_at(&mut log, 0).unwrap();
        (status, String::from_utf8_lossy(&log).into_owned())
    }

    /// SIGKILL: no drain, no seal, no goodbye.
    pub(crate) fn kill(&mut self) {
        // It may have ended.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

/// A client for plain HTTP. Some features in the workspace make it ask for a provider of TLS all the same.
pub(crate) fn client() -> reqwest::Client {
    // It may have been installed before.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

/// The real program.
pub(crate) fn program(arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    command.arg("serve").args(arguments).env_clear().env("HOME", "/nonexistent");
    command
}

/// The last lines of a log.
fn last_of(log: &File) -> String {
    let length = log.metadata().unwrap().len();
    let from = length.saturating_sub(4_000);
    let mut last = vec![0; (length - from) as usize];
    log.read_exact_at(&mut last, from).unwrap();
    String::from_utf8_lossy(&last).into_owned()
}

impl Client {
    pub(crate) async fn get(&self, path: &str) -> (bool, String) {
        let response = self.http.get(format!("{}{path}", self.url)).send().await.unwrap();
        (response.status().is_success(), response.text().await.unwrap())
    }

    /// What the program answers, which may be an error of its own. An error when it dies meanwhile.
    pub(crate) async fn ask(&self, prompt: &[u32]) -> reqwest::Result<Value> {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 1});
        let response = self.http.post(format!("{}/v1/completions", self.url)).json(&body).send().await?;
        response.json().await
    }

    /// The first choice, and how many tokens of the prompt were cached. An error when the program dies meanwhile.
    pub(crate) async fn complete(&self, prompt: &[u32]) -> reqwest::Result<(Value, u64)> {
        let mut answer = self.ask(prompt).await?;
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        let cached = cached.unwrap_or_else(|| panic!("no answer: {answer}"));
        Ok((answer["choices"][0].take(), cached))
    }

    /// Where something rests: what is believed of it, and what the tier says, as `GET /admin/index` has it.
    pub(crate) async fn places(&self) -> Vec<Value> {
        let url = format!("{}/admin/index", self.admin.as_ref().unwrap());
        self.http.get(url).header("x-blockyard-admin", "1").send().await.unwrap().json().await.unwrap()
    }

    /// The sum of a metric's series that have the label.
    pub(crate) async fn metric(&self, name: &str, label: &str) -> f64 {
        let (_, metrics) = self.get("/metrics").await;
        let of = |line: &&str| line.split(['{', ' ']).next() == Some(name) && line.contains(label);
        metrics.lines().filter(of).map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
