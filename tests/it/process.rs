//! The real program as a child process, and clients for it.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use serde_json::{Value, json};
use std::ffi::OsStr;
use std::fs::File;
use std::io::{BufRead, BufReader};
use std::net::TcpListener;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

/// The longest that a start or a stop may take. Each takes a second; on a machine that runs several test suites at
/// once, up to a minute.
const START_LIMIT: Duration = Duration::from_mins(5);

/// A free port for a server that is started later, and perhaps again. It is drawn below the ports that the system gives
/// to connections, so that none takes it meanwhile, and in turn, from a port that the process id chooses, so that tests
/// beside each other hardly ever draw one twice.
pub(crate) fn free_port() -> u16 {
    static DRAWN: AtomicU32 = AtomicU32::new(0);
    loop {
        let drawn = std::process::id().wrapping_mul(20).wrapping_add(DRAWN.fetch_add(1, Ordering::Relaxed));
        let port = 15_000 + (drawn % 17_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// A running `blockyard serve`. Dropping it kills the process.
pub(crate) struct Process {
    child: Child,
    /// Its standard error. Failed assertions show the end of it.
    log: File,
    pub(crate) client: Client,
}

/// A client of a running program.
#[derive(Clone)]
pub(crate) struct Client {
    /// `http://host:port` of the API.
    pub(crate) url: String,
    /// `http://host:port` of the admin API, if it listens.
    pub(crate) admin: Option<String>,
    http: reqwest::Client,
}

impl Process {
    /// Serves `tiny` with its data folder at `data`, and waits until it is ready. `arguments` may set other paths.
    pub(crate) async fn start(data: &Path, arguments: &[&str], environment: &[(&str, &OsStr)]) -> Self {
        let mut command = program(&["--model", "tiny", "--listen", "127.0.0.1:0", "--json", "--data-dir"]);
        // No load balancer needs time to notice the stop.
        command
            .arg(data)
            .args(["--set", "frontend.shutdown_delay=0s"])
            .args(arguments)
            .envs(environment.iter().copied());
        Self::launch(command).await
    }

    /// Runs a command that executes the program, and waits until it is ready.
    pub(crate) async fn launch(command: Command) -> Self {
        let log = tempfile::tempfile().unwrap();
        Self::launch_logging_to(log.try_clone().unwrap().into(), log, command).await
    }

    /// As [`launch`](Self::launch), of a server with TLS.
    pub(crate) async fn launch_with_tls(command: Command, http: reqwest::Client) -> Self {
        let log = tempfile::tempfile().unwrap();
        Self::launch_for(log.try_clone().unwrap().into(), log, command, "https", http).await
    }

    /// As [`launch`](Self::launch), with another standard error.
    pub(crate) async fn launch_logging_to(stderr: Stdio, log: File, command: Command) -> Self {
        Self::launch_for(stderr, log, command, "http", client()).await
    }

    async fn launch_for(stderr: Stdio, log: File, mut command: Command, scheme: &str, http: reqwest::Client) -> Self {
        let mut child = command.stdout(Stdio::piped()).stderr(stderr).spawn().unwrap();
        // The command would keep the other end of a pipe open.
        drop(command);
        let mut stdout = BufReader::new(child.stdout.take().unwrap());
        let read = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            stdout.read_line(&mut line).map(|_| line)
        });
        let Ok(line) = tokio::time::timeout(START_LIMIT, read).await else {
            // Ends the blocking read.
            let _ = child.kill();
            panic!("no banner within {START_LIMIT:?}:\n{}", last_of(&log));
        };
        let banner: Value =
            serde_json::from_str(&line.unwrap().unwrap()).unwrap_or_else(|_| panic!("no banner:\n{}", last_of(&log)));
        let admin = banner["admin_address"].as_str().map(|address| format!("http://{address}"));
        let client = Client { url: format!("{scheme}://{}", banner["address"].as_str().unwrap()), admin, http };
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

    /// Sends SIGTERM and waits for the end of the process: a clean stop, which writes all pending blocks.
    pub(crate) fn stop(&mut self) {
        let kill = Command::new("kill").arg(self.id().to_string()).status().unwrap();
        let deadline = Instant::now() + START_LIMIT;
        let status = loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                break status;
            }
            if Instant::now() > deadline {
                self.kill();
                panic!("did not stop within {START_LIMIT:?}:\n{}", last_of(&self.log));
            }
            std::thread::sleep(Duration::from_millis(20));
        };
        assert!(kill.success() && status.success(), "{kill}, {status}:\n{}", last_of(&self.log));
    }

    /// Sends a signal by its name.
    pub(crate) fn signal(&self, name: &str) {
        // Fails if the process has ended.
        let _ = Command::new("kill").args(["-s", name, &self.id().to_string()]).status().unwrap();
    }

    /// Waits for the end of the process: its status and its whole log.
    pub(crate) fn wait(mut self) -> (ExitStatus, String) {
        let status = self.child.wait().unwrap();
        (status, self.log())
    }

    /// Its log so far.
    pub(crate) fn log(&self) -> String {
        let mut log = vec![0; self.log.metadata().unwrap().len() as usize];
        self.log.read_exact_at(&mut log, 0).unwrap();
        String::from_utf8_lossy(&log).into_owned()
    }

    /// Sends SIGKILL: the program neither drains requests nor seals segments.
    pub(crate) fn kill(&mut self) {
        // Fails if the process has ended.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

/// A client for plain HTTP. With the features of the workspace, `reqwest` needs a TLS provider even so.
pub(crate) fn client() -> reqwest::Client {
    client_builder().build().unwrap()
}

/// A client with settings of its own.
pub(crate) fn client_builder() -> reqwest::ClientBuilder {
    // Fails if a provider is installed.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::builder()
}

/// `blockyard serve` with these arguments and without our environment.
pub(crate) fn program(arguments: &[&str]) -> Command {
    command("serve", arguments)
}

/// `blockyard doctor` with these arguments and without our environment.
pub(crate) fn doctor(arguments: &[&str]) -> Command {
    command("doctor", arguments)
}

/// A command of the program with these arguments and without our environment.
pub(crate) fn command(name: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    command.arg(name).args(arguments).env_clear().env("HOME", "/nonexistent");
    command
}

/// The last 4,000 bytes of a log.
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

    /// A completion of 24 tokens: the response body, which may be an API error. `Err` when the connection fails.
    pub(crate) async fn ask(&self, prompt: &[u32]) -> reqwest::Result<Value> {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "logprobs": 1});
        let response = self.http.post(format!("{}/v1/completions", self.url)).json(&body).send().await?;
        response.json().await
    }

    /// A completion of 24 tokens: its choice, and the number of cached prompt tokens. `Err` when the connection fails.
    pub(crate) async fn complete(&self, prompt: &[u32]) -> reqwest::Result<(Value, u64)> {
        let mut answer = self.ask(prompt).await?;
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        let cached = cached.unwrap_or_else(|| panic!("no answer: {answer}"));
        Ok((answer["choices"][0].take(), cached))
    }

    /// `GET /admin/index`: for each tier of each worker, what the index has and what the tier itself has.
    pub(crate) async fn index_audit(&self) -> Vec<Value> {
        let url = format!("{}/admin/index", self.admin.as_ref().unwrap());
        self.http.get(url).header("x-blockyard-admin", "1").send().await.unwrap().json().await.unwrap()
    }

    /// The sum of a metric's series whose labels contain `label`.
    pub(crate) async fn metric(&self, name: &str, label: &str) -> f64 {
        let (_, metrics) = self.get("/metrics").await;
        let matches = |line: &&str| line.split(['{', ' ']).next() == Some(name) && line.contains(label);
        metrics.lines().filter(matches).map(|line| line.rsplit(' ').next().unwrap().parse::<f64>().unwrap()).sum()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
