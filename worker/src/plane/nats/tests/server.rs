//! A NATS server of a test.

use super::variable;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;
use tokio::net::TcpStream;
use tokio::time::{Instant, sleep};

/// A server with its data in a folder of its own, stopped when it is dropped.
pub(super) struct Server {
    program: PathBuf,
    folder: tempfile::TempDir,
    port: u16,
    arguments: Vec<String>,
    has_jetstream: bool,
    process: Option<Child>,
}

/// Time for a start on a busy machine.
const START: Duration = Duration::from_secs(30);

impl Server {
    /// A server with JetStream; `None` if `make test` has not installed the program.
    pub(super) async fn start(arguments: &[&str]) -> Option<Self> {
        let mut server = Self::prepare(arguments)?;
        server.start_again().await;
        Some(server)
    }

    /// A server with JetStream and this configuration.
    pub(super) async fn with_configuration(text: &str) -> Option<Self> {
        let mut server = Self::prepare(&[])?;
        let file = server.folder().join("nats.conf");
        std::fs::write(&file, text).unwrap();
        server.arguments.extend(["-c".to_owned(), file.display().to_string()]);
        server.start_again().await;
        Some(server)
    }

    pub(super) async fn without_jetstream() -> Option<Self> {
        let mut server = Self::prepare(&[])?;
        server.has_jetstream = false;
        server.start_again().await;
        Some(server)
    }

    /// Three servers of one cluster.
    pub(super) async fn cluster() -> Option<Vec<Self>> {
        let ports: Vec<u16> = (0..3).map(|_| free_port()).collect();
        let routes: Vec<_> = ports.iter().map(|port| format!("nats://127.0.0.1:{port}")).collect();
        let mut servers = Vec::new();
        for (at, port) in ports.iter().enumerate() {
            let (name, cluster) = (format!("n{at}"), format!("nats://127.0.0.1:{port}"));
            let arguments =
                ["-n", &name, "--cluster_name", "test", "--cluster", &cluster, "--routes", &routes.join(",")];
            servers.push(Self::start(&arguments).await?);
        }
        Some(servers)
    }

    fn prepare(arguments: &[&str]) -> Option<Self> {
        let program = variable("WORKER_TEST_NATS_SERVER")?.into();
        let arguments = arguments.iter().map(|argument| (*argument).to_owned()).collect();
        let folder = tempfile::tempdir().unwrap();
        Some(Self { program, folder, port: free_port(), arguments, has_jetstream: true, process: None })
    }

    pub(super) fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub(super) fn url(&self) -> String {
        format!("nats://127.0.0.1:{}", self.port)
    }

    /// The URL by name, for certificates.
    pub(super) fn tls_url(&self) -> String {
        format!("tls://localhost:{}", self.port)
    }

    /// Starts the server on the same port, with the data that it has.
    pub(super) async fn start_again(&mut self) {
        let log = std::fs::File::create(self.folder().join("log")).unwrap();
        let mut command = Command::new(&self.program);
        command.args(["-a", "127.0.0.1", "-p", &self.port.to_string()]);
        if self.has_jetstream {
            command.args(["-js", "-sd"]).arg(self.folder().join("data"));
        }
        command.args(&self.arguments).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log);
        self.process = Some(command.spawn().unwrap());
        let deadline = Instant::now() + START;
        while TcpStream::connect(("127.0.0.1", self.port)).await.is_err() {
            let log = || std::fs::read_to_string(self.folder().join("log")).unwrap_or_default();
            assert!(Instant::now() < deadline, "the NATS server did not start:\n{}", log());
            sleep(Duration::from_millis(20)).await;
        }
    }

    /// Decides whether the server has JetStream when it is started again.
    pub(super) fn set_jetstream(&mut self, has_jetstream: bool) {
        self.has_jetstream = has_jetstream;
    }

    /// Kills the server. Its data stays.
    pub(super) fn stop(&mut self) {
        if let Some(mut process) = self.process.take() {
            process.kill().unwrap();
            process.wait().unwrap();
        }
    }

    /// Deletes the data of a stopped server.
    pub(super) fn delete_data(&self) {
        std::fs::remove_dir_all(self.folder().join("data")).unwrap();
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A free port for a server that is started later, and perhaps again. It is drawn below the ports that the system gives
/// to connections, so that none takes it meanwhile, and in turn, from a port that the process id chooses, so that tests
/// beside each other hardly ever draw one twice.
fn free_port() -> u16 {
    static DRAWN: AtomicU32 = AtomicU32::new(0);
    loop {
        let drawn = std::process::id().wrapping_mul(20).wrapping_add(DRAWN.fetch_add(1, Ordering::Relaxed));
        let port = 15_000 + (drawn % 17_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}
