//! A `blockyard serve` process: started with a configuration, awaited until ready, stopped with SIGINT.

use crate::client::Client;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// The longest start: the first one makes the weights of `small`, perhaps on a busy machine.
const START_TIMEOUT: Duration = Duration::from_mins(3);

/// The longest stop: draining requests and finishing accepted offloads.
const STOP_TIMEOUT: Duration = Duration::from_mins(1);

const POLL_INTERVAL: Duration = Duration::from_millis(20);

/// A running server. Dropping it kills the process.
#[derive(Debug)]
pub struct Server {
    process: Child,
    /// The file with its output.
    pub log: PathBuf,
    /// A client of the server.
    pub client: Client,
    /// Its address.
    pub address: SocketAddr,
}

/// Settings of a server.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// The `blockyard` binary.
    pub binary: &'a Path,
    /// A built-in model, or a folder.
    pub model: &'a str,
    /// The data folder, configuration and log of the server.
    pub data: &'a Path,
    /// The configuration file's text.
    pub config: String,
}

impl Server {
    /// Starts a server and waits until it is ready.
    pub fn start(settings: &Settings<'_>) -> Result<Self> {
        fs::create_dir_all(settings.data)?;
        let log = settings.data.join("serve.log");
        let config = settings.data.join("serve.toml");
        fs::write(&config, &settings.config)?;
        let output = File::options().create(true).append(true).open(&log)?;
        let address = SocketAddr::from((Ipv4Addr::LOCALHOST, free_port()?));
        let listen = address.to_string();
        let mut command = Command::new(settings.binary);
        command.args(["serve", "--model", settings.model, "--listen", &listen, "--data-dir"]).arg(settings.data);
        command.arg("--config").arg(&config).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let process = command.spawn().with_context(|| format!("{} does not start", settings.binary.display()))?;
        let mut server = Self { process, log, client: Client::new(&format!("http://{address}")), address };
        let started = Instant::now();
        while started.elapsed() < START_TIMEOUT {
            if let Some(status) = server.process.try_wait()? {
                bail!("blockyard serve ended with {status}:\n{}", server.log_tail());
            }
            if server.client.get("/ready").is_ok_and(|(status, _)| status == 200) {
                return Ok(server);
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        bail!("blockyard serve was not ready within {START_TIMEOUT:?}:\n{}", server.log_tail())
    }

    /// The id of the process.
    pub fn id(&self) -> u32 {
        self.process.id()
    }

    /// Stops the server with SIGINT, as Ctrl-C does, and waits for its end.
    pub fn stop(mut self) -> Result<()> {
        // The standard library cannot send SIGINT.
        let kill = Command::new("kill").args(["-INT", &self.process.id().to_string()]).status()?;
        anyhow::ensure!(kill.success(), "kill -INT: {kill}");
        let started = Instant::now();
        while started.elapsed() < STOP_TIMEOUT {
            if let Some(status) = self.process.try_wait()? {
                anyhow::ensure!(status.success(), "blockyard serve ended with {status}:\n{}", self.log_tail());
                return Ok(());
            }
            std::thread::sleep(POLL_INTERVAL);
        }
        bail!("blockyard serve did not stop within {STOP_TIMEOUT:?}:\n{}", self.log_tail())
    }

    /// The last 30 lines of the log.
    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only if the process has ended.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A port that is free now.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
