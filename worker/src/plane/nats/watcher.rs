//! Follows the bucket for one watcher, and reports changes of its view.
//!
//! The server sends the last revision of every key, then all changes. After each new connection, when the server sends
//! nothing for too long, and when the secret changes, the watcher begins again with all keys and compares them with its
//! view: so nothing is lost, and nothing is reported twice.

use super::Address;
use super::Connector;
use super::authentication::{KeyChanges, RecordKeys, StoredRecord};
use super::bucket::{self, Change};
use super::connection::{ANSWER_TIMEOUT, Connection, ConnectionState, until};
use super::metrics::Refused;
use super::record::{Record, Unusable};
use super::subjects;
use super::texts::{Texts, TextsCache};
use super::view::View;
use crate::plane::{Instance, Membership, WorkerId};
use async_nats::jetstream::Message;
use async_nats::jetstream::consumer::push::Ordered;
use futures::StreamExt;
use spans::{FaultLog, LogLimit};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{mpsc, watch};
use tokio::time::Instant;

pub(super) struct Watcher {
    connection: Arc<Connection>,
    keys: Option<RecordKeys>,
    view: View,
    records: BTreeMap<WorkerId, KnownRecord>,
    /// Why the last record of a key is not used.
    refused: BTreeMap<WorkerId, String>,
    /// Limits log lines about records that are not used. A client with the permissions of a worker can write any number
    /// of them.
    warnings: LogLimit,
    /// Limits log lines about attempts to follow the bucket that fail.
    failures: FaultLog,
    texts: TextsCache,
    /// Unbounded, because the contract forbids loss; workers register and leave rarely.
    changes: mpsc::UnboundedSender<Membership>,
}

/// The last record of a worker that was used.
struct KnownRecord {
    stored: StoredRecord,
    /// Kept for other instances of the same model.
    _texts: Option<Arc<Texts>>,
}

/// Why following ended.
enum Ended {
    /// The watcher was dropped.
    Dropped,
    /// The keys must be listed again.
    ListAgain,
}

type StateReceiver = watch::Receiver<ConnectionState>;

/// Delay between attempts to follow the bucket while the server does not answer.
const RETRY_DELAY: Duration = Duration::from_millis(500);
/// Log lines per minute about records that are not used. After a change of the secret there is one for each worker that
/// still has the former secret; more lines would say nothing new.
const WARNINGS_PER_MINUTE: u32 = 20;
/// Why a value that does not expire as a record does is not used.
const FOREIGN: &str = "the value does not expire in seconds (the header Nats-TTL), as each record of a worker does; \
    another client of NATS wrote it";

impl Watcher {
    pub(super) fn new(
        connection: Arc<Connection>,
        connector: Connector,
        keys: Option<RecordKeys>,
        changes: mpsc::UnboundedSender<Membership>,
    ) -> Self {
        let view = View::new(connector, connection.settings.lease);
        let warnings = LogLimit::new(WARNINGS_PER_MINUTE, Duration::from_mins(1));
        Self {
            connection,
            keys,
            view,
            records: BTreeMap::new(),
            refused: BTreeMap::new(),
            warnings,
            failures: FaultLog::default(),
            texts: TextsCache::default(),
            changes,
        }
    }

    /// Begins to follow, and returns when the server has answered: later changes are reported one by one.
    pub(super) async fn start(self) {
        let mut state = self.connection.state();
        state.mark_unchanged();
        let follow = tokio::time::timeout(ANSWER_TIMEOUT, self.connection.bucket.follow()).await;
        let first = follow.ok().and_then(Result::ok);
        tokio::spawn(self.run(first, state));
    }

    async fn run(mut self, mut first: Option<(u64, Ordered)>, mut state: StateReceiver) {
        self.connection.leases.change_received(Instant::now());
        loop {
            let follow = match first.take() {
                Some(follow) => Ok(follow),
                None if state.wait_for(|state| state.connected).await.is_err() => return,
                None => self.connection.bucket.follow().await,
            };
            let ended = match follow {
                Ok((keys, messages)) => {
                    if self.failures.ended() {
                        tracing::info!("the registrations of workers are followed again");
                    }
                    self.follow(keys, messages, &mut state).await
                }
                Err(error) => {
                    let error = self.connection.explain(error);
                    if let Some(suppressed) = self.failures.failed() {
                        tracing::warn!(
                            error,
                            suppressed,
                            "cannot follow the registrations of workers; the last view is used"
                        );
                    }
                    tokio::select! {
                        () = self.changes.closed() => Ended::Dropped,
                        () = tokio::time::sleep(RETRY_DELAY) => Ended::ListAgain,
                    }
                }
            };
            match ended {
                Ended::Dropped => return,
                Ended::ListAgain => {}
            }
        }
    }

    async fn follow(&mut self, listed: u64, mut messages: Ordered, state: &mut StateReceiver) -> Ended {
        let (changes, mut key_changes) = (self.changes.clone(), KeyChanges::of(self.keys.as_ref()));
        let mut silent_at = Instant::now() + self.max_silence();
        self.view.begin_list(Instant::now());
        if listed == 0 {
            self.end_list();
        }
        loop {
            // Without a connection to NATS the view stays as it is.
            let due = self.view.next_due().filter(|_| self.connection.is_connected());
            tokio::select! {
                biased;
                () = changes.closed() => return Ended::Dropped,
                Ok(()) = state.changed() => {
                    if state.borrow_and_update().connected {
                        // Renewals could not arrive before.
                        self.connection.leases.change_received(Instant::now());
                        return Ended::ListAgain;
                    }
                }
                // Each record is verified again: one that was ignored may be authentic now, and the other way round.
                () = key_changes.next() => return Ended::ListAgain,
                message = messages.next() => {
                    let Some(Ok(message)) = message else { return Ended::ListAgain };
                    self.message(&message).await;
                    silent_at = Instant::now() + self.max_silence();
                }
                () = until(due) => {
                    let left = self.view.due(Instant::now());
                    self.report(left);
                }
                // Its messages may be lost with the server that had the consumer. Without instances there are none.
                () = tokio::time::sleep_until(silent_at) => {
                    if self.connection.is_connected() {
                        return Ended::ListAgain;
                    }
                    silent_at = Instant::now() + self.max_silence();
                }
            }
        }
    }

    /// Two leases: more than a few renewals are missing.
    fn max_silence(&self) -> Duration {
        self.view.renewed_within() * 2
    }

    async fn message(&mut self, message: &Message) {
        self.view.message_received(Instant::now());
        if !self.view.is_listing() {
            self.connection.leases.change_received(Instant::now());
        }
        if let Some(id) = subjects::worker(&message.subject) {
            let change = bucket::change(message.headers.as_ref(), message.payload.clone());
            let change = match change {
                Change::Put(stored, lifetime) => self.put(id, stored, lifetime).await,
                Change::Foreign => self.refuse(id, &Unusable::Ignored(FOREIGN.to_owned())),
                Change::Deleted => {
                    self.records.remove(&id);
                    self.refused.remove(&id);
                    self.view.removed(id)
                }
                Change::Expired => {
                    self.refused.remove(&id);
                    self.view.expired(id, Instant::now())
                }
            };
            self.report(change);
        }
        // The messages of the list count down to zero; a renewal meanwhile is one of them.
        if self.view.is_listing() && message.info().is_ok_and(|info| info.pending == 0) {
            self.end_list();
        }
    }

    fn end_list(&mut self) {
        let left = self.view.end_list(Instant::now());
        self.report(left);
    }

    async fn put(&mut self, id: WorkerId, stored: StoredRecord, lifetime: Duration) -> Option<Membership> {
        // Most records are renewals. The keys may have changed since the last one.
        let is_known = self.records.get(&id).is_some_and(|known| known.stored == stored);
        let is_known = is_known && stored.verify(id, self.keys.as_ref()).is_ok();
        if is_known && self.view.renewed(id, lifetime, Instant::now()) {
            self.refused.remove(&id);
            return None;
        }
        let (instance, address, texts) = match self.read(id, &stored).await {
            Ok(read) => read,
            Err(unusable) => return self.refuse(id, &unusable),
        };
        // The same problem is reported again if it comes back.
        self.refused.remove(&id);
        self.records.insert(id, KnownRecord { stored, _texts: texts });
        self.view.registered(instance, address, lifetime, Instant::now())
    }

    /// Each renewal brings an unusable record again, and each time it is read again, because its texts can still
    /// arrive. It is reported once.
    fn refuse(&mut self, id: WorkerId, unusable: &Unusable) -> Option<Membership> {
        let (Unusable::Ignored(problem) | Unusable::Superseded(problem)) = unusable;
        if self.refused.get(&id) != Some(problem) {
            self.connection.metrics.refused(Refused::Instance);
            if let Some(suppressed) = self.warnings.admit() {
                tracing::warn!(worker = %id, problem, suppressed, "the record of the worker is not used");
            }
            self.refused.insert(id, problem.clone());
        }
        match unusable {
            Unusable::Superseded(_) => self.view.removed(id),
            Unusable::Ignored(_) => {
                self.view.unusable(id, Instant::now());
                None
            }
        }
    }

    async fn read(
        &mut self,
        id: WorkerId,
        stored: &StoredRecord,
    ) -> Result<(Instance, Address, Option<Arc<Texts>>), Unusable> {
        let record = Record::admit(id, stored, self.keys.as_ref())?;
        let texts = match &record.texts {
            Some(texts) => Some(self.texts.get(&self.connection, texts).await.map_err(Unusable::Superseded)?),
            None => None,
        };
        let address = record.address.clone();
        Ok((record.into_instance(texts.as_deref()), address, texts))
    }

    fn report(&mut self, changes: impl IntoIterator<Item = Membership>) {
        for change in changes {
            if let Membership::Left(id, _) = &change {
                self.records.remove(id);
            }
            // The watcher may have been dropped.
            let _ = self.changes.send(change);
        }
        self.connection.leases.set_followed(self.view.len(), self.view.renewed_within());
    }
}
