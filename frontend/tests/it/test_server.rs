//! A frontend that listens on a port of its own.

use crate::fake::FakeEngine;
use frontend::{Server, Settings, Shutdown};
use prometheus::{Registry, TextEncoder};
use std::net::SocketAddr;
use std::sync::Arc;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;

/// A server, and what tests observe and stop it with.
pub(crate) struct TestServer {
    pub(crate) address: SocketAddr,
    pub(crate) shutdown: Shutdown,
    pub(crate) serving: JoinHandle<std::io::Result<()>>,
    registry: Registry,
}

impl TestServer {
    pub(crate) async fn start(engine: &Arc<FakeEngine>, settings: Settings) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let (shutdown, registry) = (Shutdown::default(), Registry::new());
        let server = Server::new(&settings, &registry).unwrap();
        let router = frontend::router(engine.clone(), registry.clone(), settings).unwrap();
        let stopped = shutdown.clone();
        let serving = tokio::spawn(async move { server.serve(listener, router, stopped).await });
        Self { address, shutdown, serving, registry }
    }

    /// The value of a series; `None` if there is none.
    pub(crate) fn metric(&self, series: &str) -> Option<String> {
        let text = TextEncoder::new().encode_to_string(&self.registry.gather()).unwrap();
        text.lines().find_map(|line| Some(line.strip_prefix(series)?.trim().to_owned()))
    }
}
