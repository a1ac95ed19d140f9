//! Answers requests for the logs that this process offers: their epochs, with the URL at which they can be read over
//! HTTP, and for readers that cannot, ranges and pieces of snapshots.

use super::codec::{self, LogAnswer, LogRequest};
use super::connection::Connection;
use super::http_logs::HttpLogs;
use super::metrics::Refused;
use super::transfers::{OpenSnapshots, encode_snapshot};
use crate::plane::{Offers, RANGE_MAX, Source};
use async_nats::{HeaderMap, Message, Subscriber};
use bytes::Bytes;
use futures::StreamExt;
use kvbm::{Epoch, EventLog};
use std::collections::HashMap;
use std::sync::Arc;
use tokio_util::sync::{CancellationToken, DropGuard};

/// Keeps a subscription for every log that is offered.
pub(super) struct Responder {
    logs: Arc<Logs>,
    /// The subscription of each source (without an epoch) and of each of its logs.
    served: HashMap<(Source, Option<Epoch>), DropGuard>,
}

/// What answers are made of.
struct Logs {
    connection: Arc<Connection>,
    offers: Arc<Offers>,
    snapshots: OpenSnapshots,
    /// Where these logs can be read over HTTP.
    http: Option<Arc<HttpLogs>>,
}

impl Responder {
    pub(super) fn new(connection: Arc<Connection>, offers: Arc<Offers>, http: Option<Arc<HttpLogs>>) -> Self {
        let logs = Logs { connection, offers, snapshots: OpenSnapshots::default(), http };
        Self { logs: Arc::new(logs), served: HashMap::new() }
    }

    /// Begins or ends answering for a log, depending on whether it is offered now.
    pub(super) async fn serve(&mut self, source: Source, epoch: Epoch) {
        let offered = self.logs.offers.of_epoch(source, epoch);
        self.set(source, None, offered.is_ok()).await;
        self.set(source, Some(epoch), offered.is_ok_and(|log| log.is_some())).await;
    }

    async fn set(&mut self, source: Source, epoch: Option<Epoch>, is_offered: bool) {
        if !is_offered {
            self.served.remove(&(source, epoch));
            return;
        }
        if self.served.contains_key(&(source, epoch)) {
            return;
        }
        let Connection { client, subjects, .. } = &*self.logs.connection;
        let subject = epoch.map_or_else(|| subjects.log(source), |epoch| subjects.log_of_epoch(source, epoch));
        match client.subscribe(subject).await {
            Ok(requests) => {
                let stop = CancellationToken::new();
                let answers = Arc::clone(&self.logs).answer_all(requests, source, epoch);
                tokio::spawn(stop.clone().run_until_cancelled_owned(answers));
                self.served.insert((source, epoch), stop.drop_guard());
            }
            // The subject is valid, so this means that the client is closed.
            Err(error) => tracing::error!(%source, %error, "cannot offer the log"),
        }
    }
}

impl Logs {
    async fn answer_all(self: Arc<Self>, mut requests: Subscriber, source: Source, epoch: Option<Epoch>) {
        while let Some(request) = requests.next().await {
            let this = Arc::clone(&self);
            // A large snapshot takes a second; other requests must not wait for it.
            tokio::spawn(async move { this.reply(request, source, epoch).await });
        }
    }

    async fn reply(&self, request: Message, source: Source, epoch: Option<Epoch>) {
        let Connection { client, metrics, .. } = &*self.connection;
        let Some(reply) = self.connection.reply_to(&request) else { return };
        let asked = match codec::decode(&request.payload) {
            Ok(asked) => asked,
            Err(error) => {
                metrics.refused(Refused::Log);
                tracing::debug!(%source, %error, "request for a log");
                // An answer in the protocol of this process tells the reader why it is refused.
                LogRequest::Epoch
            }
        };
        let (answer, headers) = match epoch {
            // All processes that offer a log of the source are asked, and only which one they offer.
            None => self.answer(source, self.offers.latest(source).ok(), LogRequest::Epoch).await,
            Some(epoch) => self.answer(source, self.offers.of_epoch(source, epoch).ok().flatten(), asked).await,
        };
        let sent = match headers {
            Some(headers) => client.publish_with_headers(reply, headers, answer).await,
            None => client.publish(reply, answer).await,
        };
        if let Err(error) = sent {
            tracing::warn!(%source, %error, "answer cannot be sent");
        }
    }

    async fn answer(
        &self,
        source: Source,
        log: Option<Arc<EventLog>>,
        request: LogRequest,
    ) -> (Bytes, Option<HeaderMap>) {
        let Some(log) = log else { return (message(LogAnswer::Absent, &[]), None) };
        let answer = match request {
            LogRequest::Epoch => {
                let headers = self.http.as_ref().and_then(|http| http.headers(source, log.epoch()));
                return (message(LogAnswer::Epoch(log.epoch()), &[]), headers);
            }
            // The last event may exceed the half by its own size; the largest has a quarter of the smallest limit.
            LogRequest::Range { after } => range(&log, after, self.connection.client.max_payload() / 2),
            LogRequest::OpenSnapshot => self.open_snapshot(source, log).await,
            LogRequest::ReadSnapshot { snapshot, offset } => match self.snapshots.read(snapshot, offset) {
                Some(piece) => message(LogAnswer::Piece, &piece),
                None => message(LogAnswer::Closed, &[]),
            },
        };
        (answer, None)
    }

    async fn open_snapshot(&self, source: Source, log: Arc<EventLog>) -> Bytes {
        let (epoch, (number, _)) = (log.epoch(), log.digest());
        let (snapshot, bytes, first) = match self.snapshots.find(source, epoch, number) {
            Some(opened) => opened,
            None if !self.snapshots.has_room() => return message(LogAnswer::Busy, &[]),
            None => {
                let snapshot = log.snapshot_in_background().await;
                let number = snapshot.number;
                self.snapshots.open(source, epoch, number, encode_snapshot(snapshot).await)
            }
        };
        message(LogAnswer::Snapshot { snapshot, bytes }, &first)
    }
}

/// The events after a number, as many as fit into an answer.
fn range(log: &EventLog, after: u64, max_bytes: usize) -> Bytes {
    let Ok(kept) = log.after(after, RANGE_MAX) else { return message(LogAnswer::Truncated, &[]) };
    let (mut encoded, mut events) = (Vec::new(), 0);
    for event in &kept {
        encoded.extend(codec::encode(event));
        events += 1;
        if encoded.len() >= max_bytes {
            break;
        }
    }
    message(LogAnswer::Range { events }, &encoded)
}

fn message(answer: LogAnswer, rest: &[u8]) -> Bytes {
    let mut message = codec::encode(&answer);
    message.extend_from_slice(rest);
    message.into()
}
