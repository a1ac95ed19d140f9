//! Discovery on NATS: a registrar per process, and a watcher per stream of changes.

use super::authentication::RecordKeys;
use super::connection::Connection;
use super::record::Record;
use super::registrar::{Command, Commands, Registrar};
use super::watcher::Watcher;
use super::{Address, Connector};
use crate::engine::Engine;
use crate::plane::{Discovery, Instance, Lease, Membership, PlaneError};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};

/// Records that [`NatsDiscovery::registered`] reads at a time: each takes a round trip.
const CONCURRENT_READS: usize = 32;

/// Discovery on NATS.
pub struct NatsDiscovery {
    connection: Arc<Connection>,
    connector: Connector,
    keys: Option<RecordKeys>,
    registrar: Commands,
}

impl NatsDiscovery {
    /// Discovery over a connection. Workers of this process are registered with `address`; the engines of all instances
    /// come from `connector`. With keys, the records of this process are signed with the first one, and instances whose
    /// records are not signed with one of them are ignored.
    pub fn new(connection: Arc<Connection>, address: Address, connector: Connector, keys: Option<RecordKeys>) -> Self {
        let registrar = Registrar::start(Arc::clone(&connection), address, keys.clone());
        Self { connection, connector, keys, registrar }
    }

    /// The instances that are registered now, without the texts of their models, and an engine for each. Records that
    /// cannot be used are left out. Unlike [`watch`](Discovery::watch), it needs only the permissions of a worker.
    pub async fn registered(&self) -> Result<Vec<(Arc<Instance>, Arc<dyn Engine>)>, PlaneError> {
        if !self.connection.is_connected() {
            return Err(self.unavailable("not connected to NATS".to_owned()));
        }
        let workers = self.connection.bucket.workers().await.map_err(|error| self.unavailable(error))?;
        let records = stream::iter(workers).map(|id| async move { (id, self.connection.bucket.last(id).await) });
        let mut records = records.buffer_unordered(CONCURRENT_READS);
        let mut registered = Vec::new();
        while let Some((id, last)) = records.next().await {
            let Some(stored) = last.map_err(|error| self.unavailable(error))?.value else { continue };
            let Ok(record) = Record::admit(id, &stored, self.keys.as_ref()) else { continue };
            let address = record.address.clone();
            let instance = Arc::new(record.into_instance(None));
            let engine = (self.connector)(&instance, &address);
            registered.push((instance, engine));
        }
        Ok(registered)
    }

    fn unavailable(&self, error: String) -> PlaneError {
        PlaneError::Unavailable(self.connection.explain(error))
    }

    /// Waits until dropped leases are deregistered. To be called before the process ends; otherwise its instances are
    /// reported as left only when their leases expire.
    pub async fn wait_until_deregistered(&self) {
        let (sender, receiver) = oneshot::channel();
        // An error means that the task has ended with its runtime.
        if self.registrar.send(Command::Confirm(sender)).is_ok() {
            let _ = receiver.await;
        }
    }
}

impl Discovery for NatsDiscovery {
    /// The engine stays in this process: watchers, in this process too, reach it at the address.
    fn register(&self, instance: Instance, _engine: Arc<dyn Engine>) -> BoxFuture<'_, Result<Lease, PlaneError>> {
        Box::pin(async move {
            let (sender, receiver) = oneshot::channel();
            let ended = || PlaneError::Unavailable("the plane has ended".to_owned());
            self.registrar.send(Command::Register(Box::new(instance), sender)).map_err(|_| ended())?;
            receiver.await.map_err(|_| ended())?
        })
    }

    fn watch(&self) -> BoxStream<'static, Membership> {
        let (sender, receiver) = mpsc::unbounded_channel();
        let (connection, connector) = (Arc::clone(&self.connection), Arc::clone(&self.connector));
        let watcher = Watcher::new(connection, connector, self.keys.clone(), sender);
        // An error means that the task has ended with its runtime; then the stream ends.
        let _ = self.registrar.send(Command::Watch(Box::new(watcher)));
        stream::unfold(receiver, async |mut receiver| receiver.recv().await.map(|change| (change, receiver))).boxed()
    }
}
