//! The HTTP server of a process: its port, its limit of connections, and its end.

use super::banner;
use super::port_user::{RunningBlockyard, blockyard_at};
use crate::config::{Config, Listen};
use crate::process::machine;
use anyhow::anyhow;
use axum::Router;
use frontend::{Server, Shutdown};
use prometheus::Registry;
use std::io;
use std::time::Duration;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A running HTTP server. Dropping it closes it at once.
pub(super) struct HttpServer {
    server: Server,
    task: JoinHandle<io::Result<()>>,
    close_on_drop: CloseOnDrop,
}

/// Closes the HTTP server when dropped.
struct CloseOnDrop(Shutdown);

impl Drop for CloseOnDrop {
    fn drop(&mut self) {
        self.0.abandon();
    }
}

impl HttpServer {
    pub(super) fn start(server: Server, listener: TcpListener, app: Router) -> Self {
        let close_on_drop = CloseOnDrop(Shutdown::default());
        let task = tokio::spawn({
            let (server, shutdown) = (server.clone(), close_on_drop.0.clone());
            async move { server.serve(listener, app, shutdown).await }
        });
        Self { server, task, close_on_drop }
    }

    /// The server, with the limits of the frontend.
    pub(super) fn server(&self) -> &Server {
        &self.server
    }

    /// Makes `/ready` answer 503.
    pub(super) fn announce_shutdown(&self) {
        self.close_on_drop.0.announce();
    }

    /// Accepts no more connections, and waits `drain` for running requests. The server logs when they take longer, with
    /// what limits their time.
    pub(super) async fn close(&mut self, drain: Duration, limit: String) {
        self.close_on_drop.0.explain_limit(limit);
        self.close_on_drop.0.close(drain);
        if !self.task.is_finished() {
            let _ = (&mut self.task).await;
        }
    }

    /// Resolves when the server has failed, with the reason.
    pub(super) async fn failed(&mut self) -> anyhow::Error {
        match (&mut self.task).await {
            Ok(Ok(())) => anyhow!("the HTTP server stopped"),
            Ok(Err(error)) => anyhow::Error::from(error).context("the HTTP server failed"),
            Err(panic) => anyhow::Error::from(panic).context("the HTTP server failed"),
        }
    }
}

/// The server of these settings, with at most as many connections as open files allow.
pub(super) fn server(
    mut settings: frontend::Settings,
    registry: &Registry,
) -> anyhow::Result<(Server, frontend::Settings)> {
    settings.max_connections = max_connections(settings.max_connections, machine::open_files());
    Ok((Server::new(&settings, registry)?, settings))
}

/// Open files that are kept for what does not grow with the connections of clients: libraries, logs, tiers, the sockets
/// of KV events and health checks, and the connections for `/live` and `/ready` beyond the limit.
const FILES_KEPT: u64 = 80;
/// Connections of clients in a share of the other files.
const CONNECTIONS_PER_SHARE: u64 = 3;
/// Files in a share: for each connection of a client one, and one for the connection to the server that computes the
/// response. The other two are for connections to servers that wait for the next request.
const FILES_PER_SHARE: u64 = 8;

/// The most connections of clients with which a process has a connection to a server for each, within this limit of
/// open files.
pub(crate) fn connections_within(files: u64) -> usize {
    let fit = files.saturating_sub(FILES_KEPT) / FILES_PER_SHARE * CONNECTIONS_PER_SHARE;
    usize::try_from(fit).unwrap_or(usize::MAX).max(1)
}

/// The limit of open files that this number of connections of clients needs.
pub(crate) fn files_for(connections: usize) -> u64 {
    let shares = u64::try_from(connections).unwrap_or(u64::MAX).div_ceil(CONNECTIONS_PER_SHARE);
    shares.saturating_mul(FILES_PER_SHARE).saturating_add(FILES_KEPT)
}

/// The limit of connections of clients: at most what the limit of open `files` allows.
fn max_connections(wanted: usize, files: Option<u64>) -> usize {
    let fit = files.map_or(usize::MAX, connections_within);
    if fit < wanted {
        tracing::warn!(
            max_connections = fit,
            configured = wanted,
            open_files = files,
            "the limit of open files allows fewer connections than configured; raise it (ulimit -n {}, LimitNOFILE= in \
             systemd), or set frontend.max_connections",
            files_for(wanted)
        );
    }
    fit.min(wanted)
}

/// Opens the port of the OpenAI-compatible API, and warns if other machines can use it without a key.
pub(super) async fn listen_to_clients(config: &Config) -> anyhow::Result<TcpListener> {
    let listener = listen(&config.listen, "--listen ").await?;
    let address = listener.local_addr()?;
    if !address.ip().is_loopback() && !config.frontend.needs_key() {
        tracing::warn!(%address, "{}", banner::open_to_all(address.port()));
    }
    Ok(listener)
}

/// Why a port cannot be opened.
pub(crate) struct PortError {
    pub(crate) problem: String,
    /// What to change.
    pub(crate) advice: String,
    /// The Blockyard that has the port.
    pub(crate) used_by: Option<RunningBlockyard>,
}

/// Opens a port. The error says what to change.
pub(crate) async fn listen(at: &Listen, flag: &str) -> anyhow::Result<TcpListener> {
    bind(at, flag).await.map_err(|PortError { problem, advice, .. }| anyhow!("{problem}; {advice}"))
}

/// Opens a port. `flag` sets another address when one is written after it, like `--listen `.
pub(crate) async fn bind(at: &Listen, flag: &str) -> Result<TcpListener, PortError> {
    let error = match TcpListener::bind((at.host.as_str(), at.port)).await {
        Ok(listener) => return Ok(listener),
        Err(error) => error,
    };
    if error.kind() != io::ErrorKind::AddrInUse {
        let problem = format!("cannot listen on {at}: {error}");
        return Err(PortError { problem, advice: format!("choose another address: {flag}ADDR:PORT"), used_by: None });
    }
    let used_by = blockyard_at(at).await;
    let program = used_by.as_ref().map_or_else(|| "another program".to_owned(), ToString::to_string);
    let is_shutting_down = used_by.as_ref().is_some_and(|blockyard| blockyard.is_shutting_down);
    let first = if is_shutting_down { "wait until it has ended" } else { "stop it" };
    let other = Listen { port: at.port.checked_add(1).unwrap_or(8000), ..at.clone() };
    let (problem, advice) =
        (format!("{at} is in use by {program}"), format!("{first}, or listen elsewhere: {flag}{other}"));
    Err(PortError { problem, advice, used_by })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_connection_of_a_client_leaves_a_file_for_one_to_a_server() {
        for files in [1, 81, 88, 256, 512, 1024, 4096, 65_536] {
            let connections = max_connections(usize::MAX, Some(files));
            assert!(connections >= 1);
            let used = 2 * connections as u64 + FILES_KEPT;
            assert!(connections == 1 || used <= files, "{files}: {connections}");
        }
        assert_eq!(max_connections(4096, Some(256)), 66);
        assert_eq!(max_connections(4096, None), 4096);
        assert_eq!(files_for(4096), 11_008);
        assert_eq!(max_connections(4096, Some(files_for(4096))), 4096, "the advice is enough");
    }
}
