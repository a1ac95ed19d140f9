//! The real program with idle connections, without free file descriptors, with few addresses, and during shutdown.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::client;
use rustix::process::{Pid, Resource, Rlimit, prlimit};
use serde_json::{Value, json};
use std::fs::File;
use std::io::{BufRead, BufReader, Read, Seek};
use std::net::TcpStream;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// A running program with a limit of the system. Dropping it kills the process.
struct Program {
    child: Child,
    address: String,
    log: File,
    data: tempfile::TempDir,
}

impl Program {
    /// Serves `tiny` with at most `files` open files.
    fn start(files: u64, set: &[&str]) -> Self {
        Self::within(&format!("-n {files}"), set)
    }

    /// Serves `tiny` within a limit of `ulimit`.
    fn within(limit: &str, set: &[&str]) -> Self {
        let (data, log) = (tempfile::tempdir().unwrap(), tempfile::tempfile().unwrap());
        let mut command = Command::new("sh");
        command.arg("-c").arg(format!("ulimit {limit} && exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_blockyard"));
        command.args(["serve", "--model", "tiny", "--listen", "127.0.0.1:0", "--json", "--workers", "both:1"]);
        command.args(["--set", "tiers.g1=16MiB", "--set", "tiers.g2=off", "--set", "tiers.g3=off", "--data-dir"]);
        command.arg(data.path()).args(set.iter().flat_map(|assignment| ["--set", assignment]));
        command.env("BLOCKYARD_LOG__FORMAT", "json").stdout(Stdio::piped()).stderr(log.try_clone().unwrap());
        let mut child = command.spawn().unwrap();
        let mut banner = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut banner).unwrap();
        let banner: Value = serde_json::from_str(&banner).unwrap();
        let address = banner["address"].as_str().unwrap().to_owned();
        Self { child, address, log, data }
    }

    fn url(&self, path: &str) -> String {
        format!("http://{}{path}", self.address)
    }

    async fn status(&self, path: &str) -> u16 {
        client().get(self.url(path)).send().await.unwrap().status().as_u16()
    }

    /// Waits for the model's tokenizer, which is loaded after the start.
    async fn until_ready(&self) {
        while self.status("/ready").await != 200 {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }

    async fn metric(&self, series: &str) -> f64 {
        let text = client().get(self.url("/metrics")).send().await.unwrap().text().await.unwrap();
        let line = text.lines().find_map(|line| line.strip_prefix(series));
        line.map_or(0.0, |value| value.trim().parse().unwrap())
    }

    fn pid(&self) -> Pid {
        Pid::from_child(&self.child)
    }

    fn signal(&self, name: &str) {
        assert!(Command::new("kill").args([name, &self.child.id().to_string()]).status().unwrap().success());
    }

    fn wait(&mut self) -> ExitStatus {
        self.child.wait().unwrap()
    }

    /// The log lines that contain a word.
    fn logged(&mut self, word: &str) -> Vec<String> {
        let mut log = String::new();
        self.log.rewind().unwrap();
        self.log.read_to_string(&mut log).unwrap();
        log.lines().filter(|line| line.contains(word)).map(str::to_owned).collect()
    }

    fn resident_mib(&self) -> u64 {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.child.id())).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
        line.split_whitespace().next().unwrap().parse::<u64>().unwrap() >> 10
    }

    fn open_files(&self) -> usize {
        std::fs::read_dir(format!("/proc/{}/fd", self.child.id())).unwrap().count()
    }
}

impl Drop for Program {
    fn drop(&mut self) {
        // Fails if the process has ended.
        let _ = self.child.kill();
        self.child.wait().unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_limit_of_the_address_space_leaves_room_beside_the_index() {
    // 4 GB: the index of a process without a limit reserves 16 GiB of addresses.
    let program = Program::within("-v 4000000", &[]);
    program.until_ready().await;
    let body = json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 2});
    let answer = client().post(program.url("/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(answer.status().as_u16(), 200);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_thousand_idle_sockets_leave_descriptors_for_requests() {
    blockyard::process::machine::raise_open_files();
    let mut program = Program::start(256, &[]);
    program.until_ready().await;
    let (memory, files) = (program.resident_mib(), program.open_files());
    let idle: Vec<TcpStream> = (0..1000).map(|_| TcpStream::connect(&program.address).unwrap()).collect();
    for path in ["/live", "/ready", "/metrics"] {
        assert_eq!(program.status(path).await, 200, "{path}");
    }
    let body = json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4});
    let answer = client().post(program.url("/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let open = program.metric("blockyard_frontend_open_connections").await;
    println!(
        "{} sockets: {open} open, RSS {memory} to {} MiB, files {files} to {}",
        idle.len(),
        program.resident_mib(),
        program.open_files()
    );
    assert!(open <= 68.0, "{open} connections are open; 256 files allow 66");
    let advice = "allows fewer connections than configured; raise it (ulimit -n 11008, LimitNOFILE= in systemd)";
    assert_eq!(program.logged(advice).len(), 1);
    let evicted = "connections are closed to accept new ones: max_connections = 66 is reached";
    assert!(!program.logged(evicted).is_empty());
}

#[tokio::test(flavor = "multi_thread")]
async fn accept_errors_are_counted_and_logged_at_a_bounded_rate() {
    let mut program = Program::start(512, &[]);
    let set = |files| {
        let limit = Rlimit { current: Some(files), maximum: Some(512) };
        prlimit(Some(program.pid()), Resource::Nofile, limit).unwrap();
    };
    set(4);
    let waiting = TcpStream::connect(&program.address).unwrap();
    let began = std::time::Instant::now();
    tokio::time::sleep(Duration::from_millis(1500)).await;
    set(512);
    let took = began.elapsed();
    assert_eq!(program.status("/live").await, 200);
    let errors = program.metric("blockyard_frontend_accept_errors_total{error=\"file_descriptors\"}").await;
    let limit = 2.0 + took.as_secs_f64() * 10.0;
    assert!((1.0..limit).contains(&errors), "{errors} errors in {took:?}: at most ten per second");
    let lines = program.logged("cannot accept connections");
    assert!(!lines.is_empty() && lines.len() as f64 <= 1.0 + took.as_secs_f64() / 10.0, "{lines:?}");
    drop(waiting);
}

#[tokio::test(flavor = "multi_thread")]
async fn after_sigterm_requests_are_served_until_the_listener_closes() {
    let mut program = Program::start(1024, &["frontend.shutdown_delay=10m", "shutdown_timeout=20m"]);
    program.until_ready().await;
    program.signal("-TERM");
    while program.status("/ready").await != 503 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert_eq!(program.status("/live").await, 200);
    let body = json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 4});
    let served = client().post(program.url("/v1/completions")).json(&body).send().await.unwrap();
    assert_eq!(served.status().as_u16(), 200, "the load balancer may not have noticed yet");
    let ready = client().get(program.url("/ready")).send().await.unwrap();
    assert_eq!((ready.status().as_u16(), ready.headers()["retry-after"].to_str().unwrap()), (503, "1"));
    let error: Value = ready.json().await.unwrap();
    assert_eq!(error["error"]["code"], "shutting_down");
    for (command, expected) in [("serve", "error: "), ("doctor", "warning  port")] {
        let mut other = Command::new(env!("CARGO_BIN_EXE_blockyard"));
        other.args([command, "--model", "tiny", "--listen", &program.address, "--data-dir"]).arg(program.data.path());
        let output = tokio::task::spawn_blocking(move || other.output().unwrap()).await.unwrap();
        let said = String::from_utf8([output.stdout, output.stderr].concat()).unwrap();
        let problem = format!("{} is in use by a Blockyard {} that is", program.address, env!("CARGO_PKG_VERSION"));
        assert!(said.contains(&format!("{problem} shutting down")) && said.contains(expected), "{said}");
        assert!(said.contains("wait until it has ended, or listen elsewhere: --"), "{said}");
    }
    // A second signal ends the process at once.
    program.signal("-TERM");
    assert!(program.wait().success());
    let notice = "shutting down: /ready is 503; new requests are served for 600 s more (frontend.shutdown_delay), \
                  running ones may finish within 960 s (four fifths of shutdown_timeout = 20m); a second signal stops \
                  at once";
    assert_eq!(program.logged(notice).len(), 1, "{:?}", program.logged("shutting down"));
}

#[tokio::test(flavor = "multi_thread")]
async fn after_sigint_there_is_no_delay_and_the_log_counts_from_the_signal() {
    let mut program = Program::start(1024, &["shutdown_timeout=1s"]);
    program.until_ready().await;
    let body = json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 1500, "ignore_eos": true, "stream": true});
    // More than the engine computes within the time: all of them are aborted, or most.
    for _ in 0..60 {
        let request = client().post(program.url("/v1/completions")).json(&body);
        tokio::spawn(async move {
            if let Ok(response) = request.send().await {
                // Ends with an error event.
                let _ = response.bytes().await;
            }
        });
    }
    while program.metric("blockyard_frontend_requests_in_flight").await < 40.0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    program.signal("-INT");
    assert!(program.wait().success());
    let notice = "shutting down: no new requests are served, running ones may finish within 0.8 s (four fifths of \
                  shutdown_timeout = 1s); a second signal stops at once";
    assert_eq!(program.logged(notice).len(), 1, "{:?}", program.logged("shutting down"));
    let aborted =
        program.logged("s after the signal to stop and are ended with an error (503): they get four fifths of");
    assert_eq!(aborted.len(), 1, "{aborted:?}");
    assert!(!aborted[0].contains(" 0.0 s after"), "{aborted:?}");
}

#[test]
fn a_signal_before_the_start_is_complete_is_logged() {
    let log = tempfile::NamedTempFile::new().unwrap();
    // Nothing listens at port 1: the process waits for a server.
    let mut command = Command::new(env!("CARGO_BIN_EXE_blockyard"));
    command.args(["frontend", "--listen", "127.0.0.1:0", "--nats", "nats://127.0.0.1:1"]);
    command.args(["--set", "nats.connect_timeout=10m"]);
    let mut child = command.env_clear().env("HOME", "/nonexistent").stderr(log.reopen().unwrap()).spawn().unwrap();
    let until_logged = |line: &str| {
        while !std::fs::read_to_string(log.path()).unwrap().contains(line) {
            std::thread::sleep(Duration::from_millis(20));
        }
    };
    until_logged("cannot connect to NATS; trying again");
    assert!(Command::new("kill").arg(child.id().to_string()).status().unwrap().success());
    assert!(child.wait().unwrap().success());
    until_logged("stopped by a signal before it was ready");
}

#[tokio::test(flavor = "multi_thread")]
async fn the_listener_closes_after_the_shutdown_delay() {
    let mut program = Program::start(1024, &["frontend.shutdown_delay=100ms"]);
    program.signal("-TERM");
    assert!(program.wait().success());
    assert!(TcpStream::connect(&program.address).is_err());
}
