//! The JetStream key-value bucket of the instances: reads, compare-and-set writes with an expiry, and a consumer of all
//! changes.
//!
//! A key expires alone when its last revision has the header `Nats-TTL`; the server then writes a marker, which
//! consumers receive. The client has no call for an update with an expiry, so writes are published with these headers.

use super::ConnectError;
use super::authentication::StoredRecord;
use super::settings::Settings;
use super::subjects::Subjects;
use crate::plane::WorkerId;
use async_nats::HeaderMap;
use async_nats::header::{HeaderValue, NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, NATS_MARKER_REASON, NATS_MESSAGE_TTL};
use async_nats::jetstream::consumer::DeliverPolicy;
use async_nats::jetstream::consumer::push::{Ordered, OrderedConfig};
use async_nats::jetstream::context::PublishErrorKind;
use async_nats::jetstream::kv;
use async_nats::jetstream::stream::{LastRawMessageErrorKind, Stream};
use async_nats::jetstream::{Context, ErrorCode};
use bytes::Bytes;
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
    /// The value; `None` if the key was never written, was deleted, or has expired.
    pub(super) value: Option<StoredRecord>,
}

/// A change of a key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Change {
    Put(StoredRecord),
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
        loop {
            let error = match open_or_create(&jetstream, &config).await {
                Ok(stream) => {
                    check(&stream, settings.lease).map_err(problem)?;
                    return Ok(Self { jetstream, stream, config, subjects });
                }
                Err(error) => error,
            };
            if Instant::now() + OPEN_DELAY >= deadline {
                let hint = "; is JetStream enabled on the server and allowed for the account?";
                return Err(problem(error + hint));
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
                let value = match change(Some(&message.headers), message.payload) {
                    Change::Put(value) => Some(value),
                    Change::Deleted | Change::Expired => None,
                };
                Ok(Last { revision: message.sequence, value })
            }
            Err(error) if error.kind() == LastRawMessageErrorKind::NoMessageFound => {
                Ok(Last { revision: 0, value: None })
            }
            Err(error) => Err(error.to_string()),
        }
    }

    /// Writes a record that expires, if `expected` is the last revision of the key; `None`: whatever is there. Returns
    /// the new revision.
    pub(super) async fn put(
        &self,
        id: WorkerId,
        record: &StoredRecord,
        expected: Option<u64>,
        lifetime: Duration,
    ) -> Result<u64, WriteError> {
        let mut headers = HeaderMap::new();
        if let Some(mac) = &record.mac {
            headers.insert(MAC, mac.as_str());
        }
        self.write(id, headers, record.json.clone(), expected, lifetime).await
    }

    /// Deletes a key whose values have this lifetime, if `expected` is its last revision.
    pub(super) async fn delete(&self, id: WorkerId, expected: u64, lifetime: Duration) -> Result<(), WriteError> {
        let mut headers = HeaderMap::new();
        headers.insert(OPERATION, DELETE);
        self.write(id, headers, Bytes::new(), Some(expected), lifetime + DELETION_LIFETIME).await.map(drop)
    }

    async fn write(
        &self,
        id: WorkerId,
        mut headers: HeaderMap,
        value: Bytes,
        expected: Option<u64>,
        lifetime: Duration,
    ) -> Result<u64, WriteError> {
        if let Some(expected) = expected {
            headers.insert(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE, HeaderValue::from(expected));
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
        None => Change::Put(StoredRecord { json: value, mac: header(MAC).map(str::to_owned) }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn markers_and_deletions_are_told_from_values() {
        let of = |name: &str, value: &str| {
            let mut headers = HeaderMap::new();
            headers.insert(name, value);
            change(Some(&headers), Bytes::from_static(b"v"))
        };
        let put = |mac: Option<&str>| {
            Change::Put(StoredRecord { json: Bytes::from_static(b"v"), mac: mac.map(str::to_owned) })
        };
        assert_eq!(change(None, Bytes::from_static(b"v")), put(None));
        assert_eq!((of("Nats-TTL", "5"), of("Blockyard-MAC", "0f")), (put(None), put(Some("0f"))));
        assert_eq!(of("Nats-Marker-Reason", "MaxAge"), Change::Expired);
        assert_eq!(of("Nats-Marker-Reason", "Purge"), Change::Deleted);
        assert_eq!((of("KV-Operation", "DEL"), of("KV-Operation", "PURGE")), (Change::Deleted, Change::Deleted));
    }
}
