//! The events that arrive: one NATS subscription per topic and process, shared by all subscribers in the process.

use super::codec::{self, EventMessage};
use super::connection::Connection;
use super::metrics::{Lost, Metrics, Refused};
use super::subjects;
use crate::plane::{Event, Topic};
use async_nats::Message;
use futures::stream::{self, BoxStream, StreamExt};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio_util::sync::CancellationToken;

pub(super) struct Subscriptions {
    topics: [Subscription; Topic::ALL.len()],
    metrics: Metrics,
}

struct Subscription {
    sender: broadcast::Sender<Event>,
    is_requested: AtomicBool,
}

/// Events kept for a slow subscriber; older ones are lost to it. A fleet of a thousand workers sends as many in some
/// seconds.
const BACKLOG: usize = 16_384;

impl Subscriptions {
    pub(super) fn new(metrics: Metrics) -> Self {
        let new = |_| Subscription { sender: broadcast::Sender::new(BACKLOG), is_requested: AtomicBool::new(false) };
        Self { topics: Topic::ALL.map(new), metrics }
    }

    /// The events of a topic from now on, and whether the topic must be subscribed to at the server.
    pub(super) fn add(&self, topic: Topic) -> (BoxStream<'static, Event>, bool) {
        let Subscription { sender, is_requested } = &self.topics[topic as usize];
        let metrics = self.metrics.clone();
        let events = stream::unfold((sender.subscribe(), metrics), async |(mut receiver, metrics)| {
            loop {
                match receiver.recv().await {
                    Ok(event) => return Some((event, (receiver, metrics))),
                    Err(RecvError::Lagged(events)) => metrics.lost(Lost::Subscriber, events),
                    Err(RecvError::Closed) => return None,
                }
            }
        });
        (events.boxed(), !is_requested.swap(true, Ordering::AcqRel))
    }

    /// Subscribes to a topic at the server, until `stop`.
    pub(super) async fn start(self: &Arc<Self>, connection: &Connection, topic: Topic, stop: CancellationToken) {
        let mut messages = match connection.client.subscribe(connection.subjects.topic(topic)).await {
            Ok(messages) => messages,
            // The subject is valid, so this means that the client is closed.
            Err(error) => return tracing::error!(%error, "cannot subscribe to events"),
        };
        let this = Arc::clone(self);
        tokio::spawn(stop.run_until_cancelled_owned(async move {
            while let Some(message) = messages.next().await {
                if let Some(event) = this.decode(topic, &message) {
                    // Having no subscriber is not an error.
                    let _ = this.topics[topic as usize].sender.send(event);
                }
            }
        }));
    }

    fn decode(&self, topic: Topic, message: &Message) -> Option<Event> {
        let decoded = codec::decode::<EventMessage>(&message.payload);
        // A message of another topic would get around the permissions of its subject.
        let decoded = decoded.ok().filter(|decoded| decoded.body.topic() == topic);
        let event = subjects::source(&message.subject)
            .zip(decoded)
            .map(|(source, EventMessage { epoch, body })| Event { source, epoch, body });
        if event.is_none() {
            self.metrics.refused(Refused::Event);
            tracing::debug!(subject = %message.subject, "event of another protocol number, or not decodable");
        }
        event
    }
}
