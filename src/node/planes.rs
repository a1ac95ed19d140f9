//! The planes of a process: in memory if it runs all components, else on NATS. A frontend has both: the upstreams of
//! its own configuration are in memory.

use crate::config::Config;
use anyhow::Context;
use prometheus::Registry;
use std::sync::Arc;
use transport::{CertificateMetrics, ClientTls};
use worker::plane::combined::{CombinedDiscovery, CombinedEvents};
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::plane::nats::{Address, Connection, Connector, Metrics, NatsDiscovery, NatsEvents};
use worker::remote::{Credentials, RemoteEngine, Secret};
use worker::serve::Planes;

/// The planes on NATS.
pub(super) struct NatsPlanes {
    pub(super) discovery: Arc<NatsDiscovery>,
    pub(super) events: Arc<NatsEvents>,
}

/// The planes of what only this process knows.
pub(super) fn local() -> Planes {
    Planes { discovery: Arc::new(LocalDiscovery::default()), events: Arc::new(LocalEvents::default()) }
}

/// Both planes as the router of a frontend sees them: workers come from NATS, upstreams from `local`, and the
/// reservations of all frontends pass over NATS.
pub(super) fn combined(NatsPlanes { discovery, events }: NatsPlanes, local: &Planes) -> Planes {
    Planes {
        discovery: Arc::new(CombinedDiscovery::new(discovery, Arc::clone(&local.discovery))),
        events: Arc::new(CombinedEvents::new(events, Arc::clone(&local.events))),
    }
}

/// Connects to NATS. Workers of this process, if there are any, are registered with `address`. Those of other processes
/// are reached with `credentials`, and only if their records are signed with the same secret: that of this process is
/// sent to their address.
pub(super) async fn open(
    config: &Config,
    address: Address,
    credentials: Credentials,
    registry: &Registry,
) -> anyhow::Result<NatsPlanes> {
    let connection = Connection::open(config.nats.settings(), Metrics::new(registry)?).await?;
    let key = credentials.secret.as_ref().map(Secret::record_key);
    let connector: Connector =
        Arc::new(move |instance, address| Arc::new(RemoteEngine::new(instance, address, credentials.clone())));
    let discovery = NatsDiscovery::new(Arc::clone(&connection), address, connector, key);
    Ok(NatsPlanes { discovery: Arc::new(discovery), events: Arc::new(NatsEvents::new(connection)) })
}

/// What this process shows to workers of other processes. Blocks while it reads files; to be called within a runtime.
pub(super) fn credentials(config: &Config, certificates: &CertificateMetrics) -> anyhow::Result<Credentials> {
    let files = config.cluster.tls.client()?;
    let tls = files.map(|files| ClientTls::open(files, certificates.clone())).transpose()?;
    Ok(Credentials { secret: secret(config)?, tls: tls.map(Arc::new) })
}

/// The secret that frontends send and workers require. Blocks while it reads the file.
pub(super) fn secret(config: &Config) -> anyhow::Result<Option<Secret>> {
    let Some(path) = &config.cluster.secret_file else { return Ok(None) };
    let key = || format!("cluster.secret_file = \"{}\"", path.display());
    let text = std::fs::read_to_string(path).with_context(key)?;
    Ok(Some(Secret::new(&text).with_context(key)?))
}
