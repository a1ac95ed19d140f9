//! Discovery on NATS: a registrar per process, and a watcher per stream of changes.

use super::authentication::RecordKeys;
use super::connection::Connection;
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
