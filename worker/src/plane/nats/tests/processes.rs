//! Several processes: their connections, and the end of one.

use super::*;
use crate::plane::contract::{engine, instance, next, soon};
use crate::plane::{Discovery, Lease, Membership, PlaneError, Role, WorkerId};
use kvbm::Epoch;
use tokio::runtime::Runtime;

/// A worker in a runtime of its own, so that it can end as a process does: without deregistering.
pub(super) struct Process {
    runtime: Option<Runtime>,
    _lease: Lease,
}

impl Process {
    pub(super) async fn start(settings: Settings, id: u64, epoch: u64) -> Result<Self, PlaneError> {
        let runtime = Runtime::new().unwrap();
        let registered = runtime.spawn(async move {
            let discovery = discovery_of(&connect(settings).await);
            discovery.register(instance(id, epoch), engine()).await
        });
        match registered.await.unwrap() {
            Ok(lease) => Ok(Self { runtime: Some(runtime), _lease: lease }),
            Err(error) => {
                runtime.shutdown_background();
                Err(error)
            }
        }
    }

    /// Ends all its tasks and connections.
    pub(super) fn kill(self) {
        drop(self);
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        // A runtime must not wait for its tasks where a test is async.
        self.runtime.take().unwrap().shutdown_background();
    }
}

#[tokio::test]
async fn a_killed_process_leaves_when_its_lease_expires() {
    let Some(server) = shared() else { return };
    let settings = short_lease(settings(&server));
    let other = discovery_of(&connect(settings.clone()).await);
    let _other = other.register(instance(2, 1), engine()).await.unwrap();
    let mut watch = watch(settings.clone()).await;
    assert_eq!(next(&mut watch).await, (2, 1, true));
    let process = Process::start(settings.clone(), 1, 1).await.unwrap();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    process.kill();
    assert_eq!(next(&mut watch).await, (1, 1, false));
    let _again = Process::start(settings, 1, 2).await.unwrap();
    assert_eq!(next(&mut watch).await, (1, 2, true));
}

#[tokio::test]
async fn a_restarted_worker_does_not_wait_for_its_old_lease() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let mut watch = watch(settings.clone()).await;
    let first = Process::start(settings.clone(), 1, 1).await.unwrap();
    first.kill();
    let _second = Process::start(settings, 1, 2).await.unwrap();
    assert_eq!([next(&mut watch).await, next(&mut watch).await], [(1, 1, true), (1, 2, true)]);
}

#[tokio::test]
async fn of_two_workers_with_one_id_the_later_epoch_serves() {
    let Some(server) = shared() else { return };
    let settings = short_lease(settings(&server));
    let (first, registry) = open(settings.clone()).await.unwrap();
    let first = discovery_of(&first);
    let second = discovery_of(&connect(settings.clone()).await);
    let mut watch = watch(settings).await;
    let old = first.register(instance(1, 5), engine()).await.unwrap();
    for refused in [4, 5] {
        let error = second.register(instance(1, refused), engine()).await.unwrap_err();
        assert!(matches!(&error, PlaneError::Refused(text) if text.contains("another process serves as worker w1")));
    }
    let new = second.register(instance(1, 6), engine()).await.unwrap();
    assert_eq!([next(&mut watch).await, next(&mut watch).await], [(1, 5, true), (1, 6, true)]);
    until("the former process notices", async || {
        counter(&registry, "blockyard_nats_lease_renewals_total", "superseded") == 1
    })
    .await;
    assert!(old.lost().is_cancelled(), "its holder can register again");
    assert_eq!(gauge(&registry, "blockyard_nats_superseded_workers"), 1);
    drop(old);
    first.wait_until_deregistered().await;
    assert_eq!(gauge(&registry, "blockyard_nats_superseded_workers"), 0, "it is not to be registered");
    let _other = first.register(instance(2, 1), engine()).await.unwrap();
    assert_eq!(next(&mut watch).await, (2, 1, true), "the old lease did not deregister the new epoch");
    assert!(first.register(instance(1, 5), engine()).await.is_err());
    assert_eq!(gauge(&registry, "blockyard_nats_superseded_workers"), 1);
    drop(new);
    assert_eq!(next(&mut watch).await, (1, 6, false));
    let _again = first.register(instance(1, 5), engine()).await.unwrap();
    assert_eq!(next(&mut watch).await, (1, 5, true), "the later epoch has ended");
    assert_eq!(gauge(&registry, "blockyard_nats_superseded_workers"), 0);
}

#[tokio::test]
async fn a_worker_whose_record_was_lost_registers_again() {
    let Some(server) = shared() else { return };
    let settings = short_lease(settings(&server));
    let (connection, registry) = open(settings.clone()).await.unwrap();
    let _lease = discovery_of(&connection).register(instance(1, 1), engine()).await.unwrap();
    let mut watch = watch(settings).await;
    assert_eq!(next(&mut watch).await, (1, 1, true));
    // As an expiry while the process was frozen. A renewal may come in between.
    until("the record is deleted", async || {
        let revision = connection.bucket.last(WorkerId(1)).await.unwrap().revision;
        connection.bucket.delete(WorkerId(1), revision, connection.settings.lease).await.is_ok()
    })
    .await;
    assert_eq!([next(&mut watch).await, next(&mut watch).await], [(1, 1, false), (1, 1, true)]);
    // The watcher may see the record before the process has its acknowledgement.
    until("the process has registered again", async || {
        counter(&registry, "blockyard_nats_lease_renewals_total", "registered_again") == 1
    })
    .await;
}

/// A value without an expiry in the key of a worker, as another client of NATS may write it. Returns its revision.
async fn write_value(connection: &Connection, id: u64) -> u64 {
    let jetstream = async_nats::jetstream::new(connection.client.clone());
    let written = jetstream.publish(connection.subjects.instance(WorkerId(id)), "{}".into()).await.unwrap();
    written.await.unwrap().sequence
}

#[tokio::test]
async fn a_value_without_an_expiry_does_not_hide_that_a_lease_is_over() {
    let Some(server) = shared() else { return };
    let settings = short_lease(settings(&server));
    let (connection, registry) = open(settings.clone()).await.unwrap();
    let discovery = discovery_of(&connection);
    let _other = discovery.register(instance(2, 1), engine()).await.unwrap();
    let mut watch = discovery.watch();
    assert_eq!(next(&mut watch).await, (2, 1, true));
    // The last record of a process that ended before its next renewal.
    let value = write_value(&connection, 1).await;
    let (record, _) = record::Record::new(&instance(1, 1), &address(), "ended");
    let record = authentication::StoredRecord { json: record.encode(), mac: None };
    let replaces = bucket::Replaces::Revision(value);
    connection.bucket.put(WorkerId(1), &record, replaces, settings.lease).await.unwrap();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    assert_eq!(next(&mut watch).await, (1, 1, false), "the server reports no expiry");
    assert_eq!(counter(&registry, "blockyard_nats_refused_total", "instance"), 1, "the value is no record");
    assert!(is_quiet(&mut watch, settings.lease).await, "the other one lives");
}

#[tokio::test]
async fn a_renewal_replaces_all_that_something_else_has_written() {
    let Some(server) = shared() else { return };
    let settings = short_lease(settings(&server));
    let connection = connect(settings.clone()).await;
    let _lease = discovery_of(&connection).register(instance(1, 1), engine()).await.unwrap();
    let values = [write_value(&connection, 1).await, write_value(&connection, 1).await];
    let jetstream = async_nats::jetstream::new(connection.client.clone());
    let stream = jetstream.get_stream(format!("KV_{}", settings.bucket)).await.unwrap();
    for value in values {
        until("the value is gone", async || stream.get_raw_message(value).await.is_err()).await;
    }
    assert!(connection.bucket.last(WorkerId(1)).await.unwrap().value.is_some(), "its record is in their place");
}

#[tokio::test]
async fn a_role_changes_within_the_epoch() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let discovery = discovery_of(&connect(settings.clone()).await);
    let mut watch = watch(settings).await;
    let old = discovery.register(instance(1, 1), engine()).await.unwrap();
    let prefill = crate::plane::Instance { role: Role::Prefill, ..instance(1, 1) };
    let new = discovery.register(prefill, engine()).await.unwrap();
    drop(old);
    assert_eq!(next(&mut watch).await, (1, 1, true));
    let Membership::Joined(joined, _) = soon(&mut watch).await else { panic!("it left") };
    assert_eq!((joined.epoch, joined.role), (Epoch(1), Role::Prefill));
    drop(new);
    assert_eq!(next(&mut watch).await, (1, 1, false));
}

#[tokio::test]
async fn an_instance_arrives_with_its_tokenizer() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let connection = connect(settings.clone()).await;
    let mut sent = instance(1, 1);
    let tokenizer: String = "0123456789,".repeat(30_000);
    let model = Arc::make_mut(&mut sent.model);
    (model.tokenizer, model.chat_template) = (Some(tokenizer.into()), Some("{{ messages }}".to_owned()));
    let _lease = discovery_of(&connection).register(sent.clone(), engine()).await.unwrap();
    let record = connection.bucket.last(WorkerId(1)).await.unwrap().value.unwrap();
    let bytes = record.json.len();
    assert!(bytes < 1024, "a record is renewed every few seconds: {bytes} bytes");
    let mut watch = watch(settings).await;
    let Membership::Joined(joined, _) = soon(&mut watch).await else { panic!("it left") };
    assert_eq!(*joined, sent);
}
