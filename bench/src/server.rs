//! A `blockyard serve` process: started with a configuration, watched until ready, stopped as an operator would.

use crate::client::Client;
use anyhow::{Context, Result, bail};
use std::fs::{self, File};
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

/// Making `small`'s weights for the first time, on a busy machine.
const START_MAX: Duration = Duration::from_mins(3);

/// Draining, and letting accepted offloads come to rest.
const STOP_MAX: Duration = Duration::from_mins(1);

const POLL: Duration = Duration::from_millis(20);

/// A running server; dropping it kills it.
#[derive(Debug)]
pub struct Server {
    process: Child,
    /// Where its log goes.
    pub log: PathBuf,
    /// A client of it.
    pub client: Client,
}

/// How a server is started.
#[derive(Clone, Debug)]
pub struct Settings<'a> {
    /// The `blockyard` binary.
    pub binary: &'a Path,
    /// A built-in model, or a folder.
    pub model: &'a str,
    /// Its own folder.
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
        let address = format!("127.0.0.1:{}", free_port()?);
        let mut command = Command::new(settings.binary);
        command.args(["serve", "--model", settings.model, "--listen", &address, "--data-dir"]).arg(settings.data);
        command.arg("--config").arg(&config).stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        let process = command.spawn().with_context(|| format!("{} does not start", settings.binary.display()))?;
        let mut server = Self { process, log, client: Client::new(&format!("http://{address}")) };
        let started = Instant::now();
        while started.elapsed() < START_MAX {
            if let Some(status) = server.process.try_wait()? {
                bail!("blockyard serve ended with {status}:\n{}", server.log_tail());
            }
            if server.client.get("/ready").is_ok_and(|(status, _)| status == 200) {
                return Ok(server);
            }
            std::thread::sleep(POLL);
        }
        bail!("blockyard serve was not ready within {START_MAX:?}:\n{}", server.log_tail())
    }

    /// Stops it as Ctrl-C would, and waits for its end.
    pub fn stop(mut self) -> Result<()> {
        // The standard library cannot send SIGINT; `kill` is everywhere.
        let asked = Command::new("kill").args(["-INT", &self.process.id().to_string()]).status()?;
        anyhow::ensure!(asked.success(), "kill -INT: {asked}");
        let started = Instant::now();
        while started.elapsed() < STOP_MAX {
            if let Some(status) = self.process.try_wait()? {
                anyhow::ensure!(status.success(), "blockyard serve ended with {status}:\n{}", self.log_tail());
                return Ok(());
            }
            std::thread::sleep(POLL);
        }
        bail!("blockyard serve did not stop within {STOP_MAX:?}:\n{}", self.log_tail())
    }

    /// The end of its log.
    pub fn log_tail(&self) -> String {
        let log = fs::read_to_string(&self.log).unwrap_or_default();
        let lines: Vec<&str> = log.lines().collect();
        lines[lines.len().saturating_sub(30)..].join("\n")
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // Both fail only when it has ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A port that was free a moment ago.
fn free_port() -> Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}
