//! The JetStream key-value bucket of the instances: reads, compare-and-set writes with an expiry, and a consumer of all
//! changes.
//!
//! A revision with the header `Nats-TTL` expires alone. When the last one of a key is gone, the server writes a marker,
//! which consumers receive. A revision without an expiry stays, so below it the expiry of others leaves no marker. The
//! client has no call for an update with an expiry, so writes are published with these headers.

use super::ConnectError;
use super::authentication::StoredRecord;
use super::settings::Settings;
use super::subjects::{self, Subjects};
use crate::plane::WorkerId;
use async_nats::HeaderMap;
use async_nats::header::{
    HeaderValue, NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, NATS_MARKER_REASON, NATS_MESSAGE_TTL, NATS_ROLLUP,
};
use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::push::{Ordered, OrderedConfig};
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::kv;
use async_nats::jetstream::stream::{InfoError, LastRawMessageErrorKind, Stream};
use async_nats::jetstream::{Context, ErrorCode};
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use std::time::Duration;
use tokio::time::Instant;

pub(super) struct Bucket {
    jetstream: Context,
    stream: Stream,
    config: kv::Config,
    subjects: Subjects,
}

/// The last revision of a key.
pub(super) struct Last {
    /// The number that the next write must expect; 0 if there is none.
    pub(super) revision: u64,
    /// The value; `None` if the key was never written, was deleted, has expired, or has no expiry.
    pub(super) value: Option<StoredRecord>,
    /// Whether something else than a worker wrote the revision.
    pub(super) is_foreign: bool,
}

/// What a write replaces.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Replaces {
    /// The value of the key, if this is its last revision.
    Revision(u64),
    /// All revisions of the key, if this is the last one. To be used where something else than a worker wrote it: it
    /// may have no expiry, and would be the value again when the records of the worker have expired.
    AllUpTo(u64),
    /// All revisions of the key, whatever the last one is.
    All,
}

/// A change of a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Change {
    /// A record, and the time for which it is valid.
    Put(StoredRecord, Duration),
    /// A value without an expiry, or with one that no worker sets: something else wrote it.
    Foreign,
    Deleted,
    Expired,
}

/// Why a write failed.
#[derive(Debug)]
pub(super) enum WriteError {
    /// The last revision of the key is not the expected one.
    Conflict,
    /// There is no such bucket any more.
    NoBucket,
    /// The server did not answer, or refused. The write may have happened.
    Failed(String),
}

/// Revisions kept of each key. A consumer that lags by less receives every change; a worker that restarts in a loop
/// makes one every few seconds.
const HISTORY: i64 = 64;

/// Time for which the marker of an expiry is kept, the shortest possible: the server raises the lifetime of every key
/// to it. A follower that was disconnected for longer finds no key, which means the same.
const MARKER_LIFETIME: Duration = Duration::from_secs(1);

/// Time for which a deletion is kept, beyond a lease. It must outlive the revisions before it, of which the last would
/// become the value again.
const DELETION_LIFETIME: Duration = Duration::from_mins(1);

/// Delay between attempts to open the bucket: a cluster that has just started has no leader yet.
const OPEN_DELAY: Duration = Duration::from_millis(250);

/// The header with the MAC of a record.
const MAC: &str = "Blockyard-MAC";

const OPERATION: &str = "KV-Operation";
const DELETE: &str = "DEL";

/// The message replaces all others of its subject.
const ROLLUP_SUBJECT: &str = "sub";

impl Bucket {
    /// Opens the bucket, and creates it if there is none.
    pub(super) async fn open(
        jetstream: Context,
        settings: &Settings,
        subjects: Subjects,
        deadline: Instant,
    ) -> Result<Self, ConnectError> {
        let config = kv::Config {
            bucket: settings.bucket.clone(),
            description: "instances of blockyard".to_owned(),
            history: HISTORY,
            num_replicas: settings.replicas,
            limit_markers: Some(MARKER_LIFETIME),
            ..kv::Config::default()
        };
        let problem = |problem| ConnectError::Bucket { bucket: settings.bucket.clone(), problem };
        let mut is_logged = false;
        loop {
            let error = match open_or_create(&jetstream, &config).await {
                Ok(stream) => {
                    check(&stream, settings.lease).map_err(problem)?;
                    return Ok(Self { jetstream, stream, config, subjects });
                }
                Err(error) => error,
            };
            if Instant::now() + OPEN_DELAY >= deadline {
                return Err(problem(format!("{error}; {}", hint(&error))));
            }
            // Otherwise the log of a frontend that waits for the first worker has violations of permissions only.
            if !std::mem::replace(&mut is_logged, true) {
                tracing::warn!(
                    bucket = settings.bucket,
                    problem = error,
                    "the bucket can neither be opened nor created yet; trying again until nats.connect_timeout is \
                     over; the first worker creates it"
                );
            }
            tokio::time::sleep(OPEN_DELAY).await;
        }
    }

    /// Creates the bucket again after it was lost, as by a server that lost its disk.
    pub(super) async fn create_again(&self) -> Result<(), String> {
        self.jetstream.create_key_value(self.config.clone()).await.map(drop).map_err(|error| error.to_string())
    }

    pub(super) async fn last(&self, id: WorkerId) -> Result<Last, String> {
        match self.stream.get_last_raw_message_by_subject(&self.subjects.instance(id)).await {
            Ok(message) => {
                let (value, is_foreign) = match change(Some(&message.headers), message.payload) {
                    Change::Put(value, _) => (Some(value), false),
                    Change::Foreign => (None, true),
                    Change::Deleted | Change::Expired => (None, false),
                };
                Ok(Last { revision: message.sequence, value, is_foreign })
            }
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                Ok(Last { revision: 0, value: None, is_foreign: false })
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// The workers that have a key, whatever is in it. Needs no consumer, which only frontends may create.
    pub(super) async fn workers(&self) -> Result<Vec<WorkerId>, String> {
        let keys =
            self.stream.info_with_subjects(self.subjects.instances()).await.map_err(|error| error.to_string())?;
        let worker = |key: Result<(String, usize), _>| async move {
            key.map(|(subject, _)| subjects::worker(&subject)).map_err(|error: InfoError| error.to_string()).transpose()
        };
        keys.filter_map(worker).try_collect().await
    }

    /// Writes a record that expires. Returns the new revision.
    pub(super) async fn put(
        &self,
        id: WorkerId,
        record: &StoredRecord,
        replaces: Replaces,
        lifetime: Duration,
    ) -> Result<u64, WriteError> {
        let mut headers = HeaderMap::new();
        if let Some(mac) = &record.mac {
            headers.insert(MAC, mac.as_str());
        }
        self.write(id, headers, record.json.clone(), replaces, lifetime).await
    }

    /// Deletes a key whose values have this lifetime, if `expected` is its last revision.
    pub(super) async fn delete(&self, id: WorkerId, expected: u64, lifetime: Duration) -> Result<(), WriteError> {
        let mut headers = HeaderMap::new();
        headers.insert(OPERATION, DELETE);
        let replaces = Replaces::Revision(expected);
        self.write(id, headers, Bytes::new(), replaces, lifetime + DELETION_LIFETIME).await.map(drop)
    }

    async fn write(
        &self,
        id: WorkerId,
        mut headers: HeaderMap,
        value: Bytes,
        replaces: Replaces,
        lifetime: Duration,
    ) -> Result<u64, WriteError> {
        if let Replaces::Revision(expected) | Replaces::AllUpTo(expected) = replaces {
            headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, HeaderValue::from(expected));
        }
        // A stream that was not made as a bucket may refuse it. Without it followers end the lease themselves.
        let can_roll_up = self.stream.cached_info().config.allow_rollup;
        if can_roll_up && !matches!(replaces, Replaces::Revision(_)) {
            headers.insert(NATS_ROLLUP, ROLLUP_SUBJECT);
        }
        headers.insert(NATS_MESSAGE_TTL, HeaderValue::from(lifetime.as_secs()));
        let sent = self.jetstream.publish_with_headers(self.subjects.instance(id), headers, value).await;
        let acknowledged = match sent {
            Ok(acknowledgement) => acknowledgement.await,
            Err(error) => Err(error),
        };
        acknowledged.map(|acknowledgement| acknowledgement.sequence).map_err(|error| match error.kind() {
            PublishErrorKind::WrongLastSequence => WriteError::Conflict,
            PublishErrorKind::StreamNotFound => WriteError::NoBucket,
            _ if is_conflict(&error) => WriteError::Conflict,
            _ => WriteError::Failed(error.to_string()),
        })
    }

    /// The last revision of every key, then all changes. Also returns the number of keys.
    pub(super) async fn follow(&self) -> Result<(u64, Ordered), String> {
        let config = OrderedConfig {
            deliver_subject: self.jetstream.client().new_inbox(),
            description: Some("instances".to_owned()),
            filter_subject: self.subjects.instances(),
            deliver_policy: DeliverPolicy::LastPerSubject,
            ..OrderedConfig::default()
        };
        let consumer = self.stream.create_consumer(config).await.map_err(|error| error.to_string())?;
        let keys = consumer.cached_info().num_pending;
        Ok((keys, consumer.messages().await.map_err(|error| error.to_string())?))
    }
}

async fn open_or_create(jetstream: &Context, config: &kv::Config) -> Result<Stream, String> {
    // A frontend may open and not create.
    let store = match jetstream.get_key_value(&config.bucket).await {
        Ok(store) => store,
        Err(absent) => {
            let created = jetstream.create_key_value(config.clone()).await;
            created.map_err(|error| format!("{absent}; it cannot be created: {error}"))?
        }
    };
    Ok(store.stream)
}

/// What to change if the bucket cannot be opened. To a request that its permissions deny a client gets no answer.
fn hint(error: &str) -> &'static str {
    if error.contains("stream not found") && error.contains("timed out") {
        "start a worker, which creates the bucket, or allow this user of NATS to create it"
    } else {
        "is JetStream enabled on the server and allowed for the account?"
    }
}

fn check(stream: &Stream, lease: Duration) -> Result<(), String> {
    let config = &stream.cached_info().config;
    let problem = match config.subject_delete_marker_ttl.filter(|_| config.allow_message_ttl) {
        Some(markers) if markers <= lease => return Ok(()),
        Some(markers) => format!("its markers live {} s, so that no key expires sooner", markers.as_secs()),
        None => "single keys do not expire in it (limit markers are off)".to_owned(),
    };
    Err(problem + "; delete the bucket, or name another one")
}

/// In a cluster the error has a code of its own.
fn is_conflict(error: &async_nats::jetstream::context::PublishError) -> bool {
    let source = std::error::Error::source(error).and_then(|source| source.downcast_ref());
    source.is_some_and(|error: &async_nats::jetstream::Error| {
        error.error_code() == ErrorCode::STREAM_WRONG_LAST_SEQUENCE_CONSTANT
    })
}

/// What a message of the bucket's stream means.
pub(super) fn change(headers: Option<&HeaderMap>, value: Bytes) -> Change {
    let header = |name: &str| headers.and_then(|headers| headers.get(name)).map(HeaderValue::as_str);
    match header(NATS_MARKER_REASON.as_ref()) {
        Some("MaxAge") => Change::Expired,
        Some(_) => Change::Deleted,
        None if header(OPERATION).is_some_and(|operation| operation != "PUT") => Change::Deleted,
        None => match header(NATS_MESSAGE_TTL.as_ref()).and_then(lifetime) {
            Some(lifetime) => Change::Put(StoredRecord { json: value, mac: header(MAC).map(str::to_owned) }, lifetime),
            None => Change::Foreign,
        },
    }
}

/// The expiry of a record as workers write it, in seconds. Other clients may write other units, or `never`.
fn lifetime(seconds: &str) -> Option<Duration> {
    seconds.parse().ok().filter(|seconds: &u64| *seconds > 0).map(Duration::from_secs)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_and_deletions_are_told_from_values() {
        let of = |pairs: &[(&str, &str)]| {
            let mut headers = HeaderMap::new();
            for (name, value) in pairs {
                headers.insert(*name, *value);
            }
            change(Some(&headers), Bytes::from_static(b"v"))
        };
        let put = |mac: Option<&str>| {
            let record = StoredRecord { json: Bytes::from_static(b"v"), mac: mac.map(str::to_owned) };
            Change::Put(record, Duration::from_secs(5))
        };
        let expiry = ("Nats-TTL", "5");
        assert_eq!((of(&[expiry]), of(&[expiry, ("Blockyard-MAC", "0f")])), (put(None), put(Some("0f"))));
        assert_eq!(of(&[("Nats-Marker-Reason", "MaxAge"), ("Nats-TTL", "1s")]), Change::Expired);
        assert_eq!(of(&[("Nats-Marker-Reason", "Purge")]), Change::Deleted);
        for operation in ["DEL", "PURGE"] {
            assert_eq!(of(&[("KV-Operation", operation)]), Change::Deleted);
        }
    }

    #[test]
    fn a_value_without_an_expiry_in_seconds_is_no_record() {
        assert_eq!(change(None, Bytes::from_static(b"v")), Change::Foreign);
        for (name, value) in
            [("Blockyard-MAC", "0f"), ("Nats-TTL", "never"), ("Nats-TTL", "0"), ("Nats-TTL", "1h"), ("Nats-TTL", "-1")]
        {
            let mut headers = HeaderMap::new();
            headers.insert(name, value);
            assert_eq!(change(Some(&headers), Bytes::from_static(b"v")), Change::Foreign, "{name}: {value}");
        }
    }
}
