//! The planes of a process: in memory if it runs all components, else on NATS. A frontend has both: the upstreams of
//! its own configuration are in memory.

use crate::config::Config;
use anyhow::Context;
use prometheus::Registry;
use std::path::Path;
use std::sync::Arc;
use transport::{CertificateMetrics, ClientTls};
use worker::plane::combined::{CombinedDiscovery, CombinedEvents};
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::plane::nats::{
    Address, Connection, Connector, HttpLogs, Metrics, NatsDiscovery, NatsEvents, Process, Settings,
};
use worker::remote::{Credentials, RemoteEngine, RemoteLogs, Secret, SecretMetrics};
use worker::serve::Planes;

/// The planes on NATS.
pub(super) struct NatsPlanes {
    pub(super) discovery: Arc<NatsDiscovery>,
    pub(super) events: Arc<NatsEvents>,
    /// The connection of both.
    pub(super) connection: Arc<Connection>,
}

/// The planes of what only this process knows.
pub(super) fn local() -> Planes {
    Planes { discovery: Arc::new(LocalDiscovery::default()), events: Arc::new(LocalEvents::default()) }
}

/// Both planes as the router of a frontend sees them: workers come from NATS, upstreams from `local`, and the
/// reservations of all frontends pass over NATS.
pub(super) fn combined(NatsPlanes { discovery, events, .. }: NatsPlanes, local: &Planes) -> Planes {
    Planes {
        discovery: Arc::new(CombinedDiscovery::new(discovery, Arc::clone(&local.discovery))),
        events: Arc::new(CombinedEvents::new(events, Arc::clone(&local.events))),
    }
}

/// Connects to NATS. The workers of this process are registered with `address`, and its logs are served there; `None`:
/// it has no workers. Those of other processes are reached with `credentials`, and only if their records are signed
/// with a secret that this process accepts: they are sent prompts.
pub(super) async fn open(
    config: &Config,
    address: Option<Address>,
    credentials: Credentials,
    registry: &Registry,
) -> anyhow::Result<NatsPlanes> {
    let process = if address.is_some() { Process::Worker } else { Process::Frontend };
    let settings = Settings { process, ..config.nats.settings() };
    let connection = Connection::open(settings, Metrics::new(registry)?).await?;
    let keys = credentials.secret.as_ref().map(Secret::record_keys);
    let logs = HttpLogs::new(address.clone(), keys.clone(), Arc::new(RemoteLogs::new(credentials.clone())));
    let connector: Connector =
        Arc::new(move |instance, address| Arc::new(RemoteEngine::new(instance, address, credentials.clone())));
    let address = address.unwrap_or_else(|| Address(String::new()));
    let discovery = NatsDiscovery::new(Arc::clone(&connection), address, connector, keys);
    let events = Arc::new(NatsEvents::with_http(Arc::clone(&connection), logs));
    Ok(NatsPlanes { discovery: Arc::new(discovery), events, connection })
}

/// What this process shows to workers of other processes. Blocks while it reads files, whose changes are followed.
/// To be called within a runtime.
pub(super) fn credentials(
    config: &Config,
    certificates: &CertificateMetrics,
    registry: &Registry,
) -> anyhow::Result<Credentials> {
    let files = config.cluster.tls.client()?;
    let tls = files.map(|files| ClientTls::open(files, certificates.clone())).transpose()?;
    let reloads = SecretMetrics::new(registry)?;
    let secret = match &config.cluster.secret_file {
        Some(path) => Some(Secret::open(path, reloads).with_context(|| secret_file(path))?),
        None => None,
    };
    Ok(Credentials { secret, tls: tls.map(Arc::new) })
}

/// Checks the file with the secret that frontends and workers share. Blocks while it reads the file.
pub(super) fn check_secret(config: &Config) -> anyhow::Result<()> {
    let Some(path) = &config.cluster.secret_file else { return Ok(()) };
    Secret::check(path).with_context(|| secret_file(path))
}

fn secret_file(path: &Path) -> String {
    format!("cluster.secret_file = \"{}\"", path.display())
}
