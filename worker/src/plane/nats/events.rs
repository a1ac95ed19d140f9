//! Events on NATS: a task that sends them in order, and the logs that are offered and asked for.

use super::codec::{self, EventMessage};
use super::connection::Connection;
use super::http_logs::HttpLogs;
use super::metrics::Lost;
use super::outbox::{Command, Outbox};
use super::requests;
use super::responder::Responder;
use super::subscriptions::Subscriptions;
use crate::plane::{Event, Events, Lease, Offers, PlaneError, RangeAnswer, Source, Topic};
use futures::future::BoxFuture;
use futures::stream::BoxStream;
use kvbm::{Epoch, EventLog, Snapshot};
use std::sync::Arc;
use tokio::sync::oneshot;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Events on NATS. Dropping it ends its subscriptions and offers.
pub struct NatsEvents {
    connection: Arc<Connection>,
    outbox: Arc<Outbox>,
    subscriptions: Arc<Subscriptions>,
    offers: Arc<Offers>,
    http: Option<Arc<HttpLogs>>,
    _stop: DropGuard,
}

/// Sends what is in the outbox.
struct Sender {
    connection: Arc<Connection>,
    outbox: Arc<Outbox>,
    subscriptions: Arc<Subscriptions>,
    responder: Responder,
    stop: CancellationToken,
}

impl NatsEvents {
    /// Events over a connection, which snapshots and ranges use too.
    pub fn new(connection: Arc<Connection>) -> Self {
        Self::open(connection, None)
    }

    /// Events over a connection. Snapshots and ranges come over HTTP from processes that serve them.
    pub fn with_http(connection: Arc<Connection>, logs: HttpLogs) -> Self {
        Self::open(connection, Some(Arc::new(logs)))
    }

    fn open(connection: Arc<Connection>, http: Option<Arc<HttpLogs>>) -> Self {
        let stop = CancellationToken::new();
        let outbox = Arc::new(Outbox::new(connection.metrics.clone()));
        let subscriptions = Arc::new(Subscriptions::new(connection.metrics.clone()));
        let offers = Arc::new(Offers::default());
        let sender = Sender {
            responder: Responder::new(Arc::clone(&connection), Arc::clone(&offers), http.clone()),
            connection: Arc::clone(&connection),
            outbox: Arc::clone(&outbox),
            subscriptions: Arc::clone(&subscriptions),
            stop: stop.child_token(),
        };
        tokio::spawn(stop.clone().run_until_cancelled_owned(sender.run()));
        Self { connection, outbox, subscriptions, offers, http, _stop: stop.drop_guard() }
    }

    /// Waits until everything published, offered and subscribed so far was handed to the connection.
    async fn sent(&self) -> Result<(), PlaneError> {
        if !self.connection.is_connected() {
            return Err(PlaneError::Unavailable("not connected to NATS".to_owned()));
        }
        let (sender, receiver) = oneshot::channel();
        self.outbox.push(Command::Confirm(sender));
        requests::in_time(receiver).await?.map_err(|_| PlaneError::Unavailable("the plane has ended".to_owned()))
    }
}

impl Sender {
    async fn run(mut self) {
        let mut state = self.connection.state();
        loop {
            match self.outbox.next().await {
                Command::Publish(event) => {
                    // Without a connection events wait here, where the oldest give way, and not in the client.
                    if state.wait_for(|state| state.connected).await.is_err() {
                        return;
                    }
                    self.publish(event).await;
                }
                Command::Subscribe(topic) => {
                    self.subscriptions.start(&self.connection, topic, self.stop.clone()).await;
                }
                Command::Serve(source, epoch) => self.responder.serve(source, epoch).await,
                Command::Confirm(sender) => {
                    // The caller may have given up.
                    let _ = sender.send(());
                }
            }
        }
    }

    async fn publish(&self, Event { source, epoch, body }: Event) {
        let Connection { client, subjects, metrics, .. } = &*self.connection;
        let subject = subjects.event(body.topic(), source);
        let message = codec::encode(&EventMessage { epoch, body });
        if let Err(error) = client.publish(subject, message.into()).await {
            tracing::warn!(%source, %error, "event cannot be sent");
            metrics.lost(Lost::TooLarge, 1);
        }
    }
}

impl Events for NatsEvents {
    fn publish(&self, event: Event) {
        self.outbox.push(Command::Publish(event));
    }

    fn subscribe(&self, topic: Topic) -> BoxStream<'static, Event> {
        let (events, first) = self.subscriptions.add(topic);
        if first {
            self.outbox.push(Command::Subscribe(topic));
        }
        events
    }

    fn offer(&self, source: Source, log: Arc<EventLog>) -> Lease {
        let epoch = log.epoch();
        let key = self.offers.add(source, log);
        self.outbox.push(Command::Serve(source, epoch));
        let (offers, outbox) = (Arc::clone(&self.offers), Arc::clone(&self.outbox));
        Lease::new(move || {
            offers.withdraw(source, key);
            outbox.push(Command::Serve(source, epoch));
        })
    }

    fn range(&self, source: Source, epoch: Epoch, after: u64) -> BoxFuture<'_, RangeAnswer> {
        Box::pin(async move {
            self.sent().await?;
            requests::range(&self.connection, self.http.as_deref(), source, epoch, after).await
        })
    }

    fn snapshot(&self, source: Source) -> BoxFuture<'_, Result<Snapshot, PlaneError>> {
        Box::pin(async move {
            self.sent().await?;
            requests::snapshot(&self.connection, self.http.as_deref(), source).await
        })
    }
}
