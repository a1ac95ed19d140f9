//! The registrations of this process: one task writes, renews and deletes their records, and starts watchers, in the
//! order in which it was asked. When the secret changes, the records are signed again. Not here: attempts to register a
//! worker again whose lease is lost; its holder makes them.
//!
//! ```text
//!   register ──▶ held ──renew──▶ held              expired meanwhile: registered again
//!                  │ renew: a later epoch            ──▶ superseded: the lease is lost
//!                  └ lease dropped                   ──▶ deleted, if the record is still that of this epoch
//! ```
//!
//! Every write names the revision that it replaces (compare and set), so a process that was frozen cannot overwrite the
//! record of its successor. What is not a record of a worker is overwritten, with all that is before it: something that
//! writes it again and again must not end a registration, so the last attempt of several names no revision. Order
//! matters within a process: a watcher that starts after a lease was dropped must not see its instance.

use super::Address;
use super::authentication::{KeyChanges, RecordKeys, StoredRecord};
use super::bucket::{Last, Replaces, WriteError};
use super::connection::{Connection, until};
use super::metrics::Renewal;
use super::record::{Record, RecordHead, Writer};
use super::watcher::Watcher;
use crate::plane::{Instance, Lease, PlaneError, WorkerId};
use bytes::Bytes;
use futures::future::join_all;
use kvbm::Epoch;
use spans::LogLimit;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::{CancellationToken, DropGuard};

/// A command to the registrar.
pub(super) enum Command {
    Register(Box<Instance>, oneshot::Sender<Result<Lease, PlaneError>>),
    Release(WorkerId, LeaseId),
    Watch(Box<Watcher>),
    /// Confirm that all commands before this one were carried out.
    Confirm(oneshot::Sender<()>),
}

/// Number of a lease in this process.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(super) struct LeaseId(u64);

/// Sends commands. Unbounded, because a lease is dropped without waiting; workers register rarely.
pub(super) type Commands = mpsc::UnboundedSender<Command>;

pub(super) struct Registrar {
    connection: Arc<Connection>,
    address: Address,
    /// Keys that sign the records of this process, and that verify which records were written by processes of the
    /// deployment.
    keys: Option<RecordKeys>,
    /// For leases. Weak, so that the task ends when the plane and all leases are dropped.
    commands: mpsc::WeakUnboundedSender<Command>,
    held: BTreeMap<WorkerId, HeldRegistration>,
    /// Workers of this process that another process has registered.
    superseded: BTreeSet<WorkerId>,
    last_lease: LeaseId,
    /// Limits log lines about renewals that fail, of which there are several per worker and lease.
    failures: LogLimit,
}

/// A registration.
struct HeldRegistration {
    lease: LeaseId,
    epoch: Epoch,
    /// The record, which is signed with each renewal.
    json: Bytes,
    revision: u64,
    renewed_at: Instant,
    renew_at: Instant,
    /// The log has a line that the last renewal failed.
    is_failure_logged: bool,
    /// Cancelled when another process has registered the worker.
    lost: CancellationToken,
    /// Serves the texts of its model.
    _texts: Option<DropGuard>,
}

/// What became of a renewal.
enum Renewed {
    Written(u64, Renewal),
    Superseded(String),
    Failed(String),
}

/// Attempts to write a record that others write at the same time.
const MAX_ATTEMPTS: usize = 5;

impl Registrar {
    /// Starts the task, which ends when the sender and all leases are dropped.
    pub(super) fn start(connection: Arc<Connection>, address: Address, keys: Option<RecordKeys>) -> Commands {
        let (commands, receiver) = mpsc::unbounded_channel();
        let registrar = Self {
            connection,
            address,
            keys,
            commands: commands.downgrade(),
            held: BTreeMap::new(),
            superseded: BTreeSet::new(),
            last_lease: LeaseId::default(),
            failures: LogLimit::default(),
        };
        tokio::spawn(registrar.run(receiver));
        commands
    }

    async fn run(mut self, mut commands: mpsc::UnboundedReceiver<Command>) {
        let mut state = self.connection.state();
        state.mark_unchanged();
        let mut key_changes = KeyChanges::of(self.keys.as_ref());
        loop {
            let due = self.held.values().map(|held| held.renew_at).min();
            tokio::select! {
                biased;
                command = commands.recv() => match command {
                    Some(command) => self.run_command(command).await,
                    None => return,
                },
                Ok(()) = state.changed() => {
                    if state.borrow_and_update().connected {
                        // Leases may have expired meanwhile.
                        self.renew_all_now();
                    }
                }
                () = key_changes.next() => self.renew_all_now(),
                () = until(due) => self.renew_due().await,
            }
        }
    }

    async fn run_command(&mut self, command: Command) {
        match command {
            Command::Register(instance, reply) => {
                let registered = self.register(*instance).await;
                // If the caller has given up, the lease is dropped here.
                drop(reply.send(registered));
            }
            Command::Release(id, lease) => self.release(id, lease).await,
            Command::Watch(watcher) => watcher.start().await,
            Command::Confirm(reply) => {
                // The caller may have given up.
                let _ = reply.send(());
            }
        }
    }

    async fn register(&mut self, instance: Instance) -> Result<Lease, PlaneError> {
        let connection = Arc::clone(&self.connection);
        if !connection.is_connected() {
            return Err(PlaneError::Unavailable("not connected to NATS".to_owned()));
        }
        let (record, texts) = Record::new(&instance, &self.address, &connection.process);
        let record = StoredRecord::sign(instance.id, record.encode(), self.keys.as_ref());
        let (bytes, limit) = (record.json.len(), connection.client.max_payload() / 2);
        if bytes > limit {
            let problem = format!("the record of worker {} has {bytes} bytes, over {limit}", instance.id);
            return Err(PlaneError::Refused(problem));
        }
        // Before the record is visible: its readers ask for the texts at once.
        let texts = match texts {
            Some(texts) => Some(texts.serve(&connection).await.map_err(PlaneError::Unavailable)?),
            None => None,
        };
        let written = write(&connection, self.keys.as_ref(), &instance, &record).await;
        match &written {
            Ok(_) => self.set_superseded(instance.id, false),
            Err(PlaneError::Refused(_)) => self.set_superseded(instance.id, true),
            Err(_) => {}
        }
        let revision = written?;
        connection.leases.clear(instance.id);
        self.last_lease.0 += 1;
        let lost = CancellationToken::new();
        let held = HeldRegistration {
            lease: self.last_lease,
            epoch: instance.epoch,
            json: record.json,
            revision,
            renewed_at: Instant::now(),
            renew_at: self.next_renewal(),
            is_failure_logged: false,
            lost: lost.clone(),
            _texts: texts,
        };
        let former = self.held.insert(instance.id, held);
        if let Some(former) = former.filter(|former| former.epoch != instance.epoch) {
            former.lost.cancel();
        }
        let (id, lease, commands) = (instance.id, self.last_lease, self.commands.upgrade());
        Ok(Lease::with_loss(lost, move || {
            if let Some(commands) = commands {
                // An error means that the task has ended with its runtime; then the lease expires.
                let _ = commands.send(Command::Release(id, lease));
            }
        }))
    }

    async fn release(&mut self, id: WorkerId, lease: LeaseId) {
        // A worker that registered again has a newer lease; the old one must not deregister it.
        if self.held.get(&id).is_none_or(|held| held.lease != lease) {
            // The lost lease of a worker that is cordoned or ends.
            return self.set_superseded(id, false);
        }
        let Some(mut held) = self.held.remove(&id) else { return };
        self.connection.leases.clear(id);
        let lease_time = self.connection.settings.lease;
        for _ in 0..MAX_ATTEMPTS {
            match self.connection.bucket.delete(id, held.revision, lease_time).await {
                Ok(()) | Err(WriteError::NoBucket) => return,
                Err(WriteError::Conflict) => match last(&self.connection, self.keys.as_ref(), id).await {
                    // A renewal whose answer was lost.
                    Ok(last) if writer(&last, &self.connection, held.epoch) == Some(Writer::Own) => {
                        held.revision = last.revision;
                    }
                    Ok(_) => return,
                    Err(error) => return log_release(id, &self.connection.explain(error)),
                },
                Err(WriteError::Failed(error)) => return log_release(id, &self.connection.explain(error)),
            }
        }
    }

    async fn renew_due(&mut self) {
        let now = Instant::now();
        let (connection, keys) = (&self.connection, self.keys.as_ref());
        let due = self.held.iter().filter(|(_, held)| held.renew_at <= now);
        let renewals = due.map(|(id, held)| async move { (*id, renew(connection, keys, *id, held).await) });
        for (id, renewed) in join_all(renewals).await {
            let next = self.next_renewal();
            let metrics = &self.connection.metrics;
            match (renewed, self.held.get_mut(&id)) {
                (Renewed::Written(revision, outcome), Some(held)) => {
                    (held.revision, held.renewed_at, held.renew_at) = (revision, Instant::now(), next);
                    metrics.renewal(outcome);
                    self.connection.leases.clear(id);
                    let was_failing = std::mem::take(&mut held.is_failure_logged);
                    if matches!(outcome, Renewal::Registered) {
                        let why = "the lease had expired, or the record was overwritten; the worker registered again";
                        tracing::info!(worker = %id, "{why}");
                    } else if was_failing {
                        tracing::info!(worker = %id, "the lease is renewed again");
                    }
                }
                (Renewed::Failed(error), Some(held)) => {
                    held.renew_at = next;
                    metrics.renewal(Renewal::Failed);
                    let error = self.connection.explain(error);
                    self.connection.leases.renewal_failed(id, held.renewed_at, &error);
                    if let Some(suppressed) = self.failures.admit() {
                        held.is_failure_logged = true;
                        tracing::warn!(worker = %id, error, suppressed, "the lease cannot be renewed now");
                    }
                }
                (Renewed::Superseded(by), _) => {
                    tracing::error!(worker = %id, by, "the worker is not registered any more");
                    if let Some(held) = self.held.remove(&id) {
                        held.lost.cancel();
                    }
                    self.set_superseded(id, true);
                    self.connection.leases.clear(id);
                    self.connection.metrics.renewal(Renewal::Superseded);
                }
                (_, None) => {}
            }
        }
    }

    /// Notes whether another process has registered a worker of this process.
    fn set_superseded(&mut self, id: WorkerId, is_superseded: bool) {
        if is_superseded {
            self.superseded.insert(id);
        } else {
            self.superseded.remove(&id);
        }
        self.connection.metrics.superseded(self.superseded.len());
    }

    fn renew_all_now(&mut self) {
        let now = Instant::now();
        self.held.values_mut().for_each(|held| held.renew_at = now);
    }

    fn next_renewal(&self) -> Instant {
        Instant::now() + self.connection.settings.renewal_interval()
    }
}

fn log_release(id: WorkerId, error: &str) {
    tracing::warn!(worker = %id, error, "the worker cannot be deregistered; its lease expires");
}

/// The last record of a worker. What is none, or was not signed with one of these keys, counts as none: a client
/// of NATS without the secret must not end a registration.
async fn last(connection: &Connection, keys: Option<&RecordKeys>, id: WorkerId) -> Result<Last, String> {
    let Last { revision, value, is_foreign } = connection.bucket.last(id).await?;
    let is_there = value.is_some();
    let is_of_worker =
        |stored: &StoredRecord| stored.verify(id, keys).is_ok() && RecordHead::decode(&stored.json).is_ok();
    let value = value.filter(is_of_worker);
    let is_foreign = is_foreign || (is_there && value.is_none());
    Ok(Last { revision, value, is_foreign })
}

/// The writer of the last record, compared with this process; `None` without a record that can be read.
fn writer(last: &Last, connection: &Connection, epoch: Epoch) -> Option<Writer> {
    let head = RecordHead::decode(&last.value.as_ref()?.json).ok()?;
    Some(head.writer(&connection.process, epoch))
}

/// Writes the record of an instance, if no other process has registered its epoch or a later one.
async fn write(
    connection: &Connection,
    keys: Option<&RecordKeys>,
    instance: &Instance,
    record: &StoredRecord,
) -> Result<u64, PlaneError> {
    let (id, bucket) = (instance.id, &connection.bucket);
    let failed = |error| connection.registration_error(error);
    for attempt in 1..=MAX_ATTEMPTS {
        let last = last(connection, keys, id).await.map_err(failed)?;
        let writer = writer(&last, connection, instance.epoch);
        if writer == Some(Writer::Other) {
            return Err(PlaneError::Refused(taken_message(id, &last)));
        }
        match bucket.put(id, record, replaces(&last, attempt), connection.settings.lease).await {
            Ok(revision) => return Ok(revision),
            Err(WriteError::Conflict) => {}
            Err(WriteError::NoBucket) => bucket.create_again().await.map_err(failed)?,
            Err(WriteError::Failed(error)) => return Err(failed(error)),
        }
    }
    Err(PlaneError::Unavailable(format!("the record of worker {id} changes all the time")))
}

/// What an attempt to write replaces. Of a key that holds no record of a worker, and changes so often that all attempts
/// before the last found another revision, it replaces what is there. A record that is overwritten nevertheless,
/// because it was written just now, is written again by its process.
fn replaces(last: &Last, attempt: usize) -> Replaces {
    match last {
        Last { value: None, .. } if attempt == MAX_ATTEMPTS => Replaces::All,
        Last { is_foreign: true, .. } => Replaces::AllUpTo(last.revision),
        Last { .. } => Replaces::Revision(last.revision),
    }
}

fn taken_message(id: WorkerId, last: &Last) -> String {
    let epoch = last.value.as_ref().and_then(|stored| RecordHead::decode(&stored.json).ok());
    let epoch = epoch.map_or(0, |head| head.epoch().0);
    format!(
        "another process serves as worker {id}, since epoch {epoch}; give each process a URL of its own \
         (cluster.advertise), or wait until that process ends or its lease expires"
    )
}

async fn renew(connection: &Connection, keys: Option<&RecordKeys>, id: WorkerId, held: &HeldRegistration) -> Renewed {
    let (bucket, lease) = (&connection.bucket, connection.settings.lease);
    let record = StoredRecord::sign(id, held.json.clone(), keys);
    match bucket.put(id, &record, Replaces::Revision(held.revision), lease).await {
        Ok(revision) => return Renewed::Written(revision, Renewal::Renewed),
        Err(WriteError::Failed(error)) => return Renewed::Failed(error),
        Err(WriteError::NoBucket) => {
            if let Err(error) = bucket.create_again().await {
                return Renewed::Failed(error);
            }
        }
        Err(WriteError::Conflict) => {}
    }
    // The lease has expired, the answer to a renewal was lost, another process has registered, or something else has
    // written.
    for attempt in 1..=MAX_ATTEMPTS {
        let last = match last(connection, keys, id).await {
            Ok(last) => last,
            Err(error) => return Renewed::Failed(error),
        };
        let writer = writer(&last, connection, held.epoch);
        if writer == Some(Writer::Other) {
            return Renewed::Superseded(taken_message(id, &last));
        }
        let outcome = if writer == Some(Writer::Own) { Renewal::Renewed } else { Renewal::Registered };
        match bucket.put(id, &record, replaces(&last, attempt), lease).await {
            Ok(revision) => return Renewed::Written(revision, outcome),
            Err(WriteError::Failed(error)) => return Renewed::Failed(error),
            Err(WriteError::NoBucket) => break,
            Err(WriteError::Conflict) => {}
        }
    }
    Renewed::Failed("the record changed meanwhile".to_owned())
}
