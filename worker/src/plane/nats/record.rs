//! The record of an instance in the bucket, as JSON, and the rule which process may write it.
//!
//! A record is written with each renewal and sent to every follower, so it is small: the texts of the model, megabytes
//! of tokenizer, are named by their hash and fetched once (see [`texts`](super::texts)).

use super::authentication::{RecordKeys, StoredRecord};
use super::texts::{Texts, TextsRef};
use super::{Address, PROTOCOL};
use crate::engine::ModelCard;
use crate::plane::{Instance, WorkerId};
use bytes::Bytes;
use kvbm::Epoch;
use serde::{Deserialize, Serialize};
use std::sync::Arc;

/// Longest text of a record that is logged: a URL or an error has less.
const MAX_LOGGED: usize = 200;

/// The record of one worker.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub(super) struct Record {
    protocol: u8,
    /// The process that renews the record.
    process: String,
    pub(super) address: Address,
    /// The texts that are not in the model of `instance`.
    pub(super) texts: Option<TextsRef>,
    instance: Instance,
}

/// The fields that every protocol number has: they decide which process may write the record.
#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
pub(super) struct RecordHead {
    pub(super) protocol: u64,
    process: String,
    instance: InstanceHead,
}

#[derive(Clone, PartialEq, Eq, Debug, Deserialize)]
struct InstanceHead {
    epoch: Epoch,
}

/// Why a record cannot be used.
#[derive(Clone, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum RecordError {
    #[error("protocol number {0}, this process has {PROTOCOL}")]
    Protocol(u64),
    #[error("not a record: {0}")]
    Invalid(String),
}

/// What a record that cannot be used says about the worker of its key.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Unusable {
    /// Nothing: whatever wrote it is not known to be a process of the deployment.
    Ignored(String),
    /// Another process has registered, whose instance cannot be used.
    Superseded(String),
}

/// Which process wrote the last record of a worker, compared with the process and epoch that are about to write it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Writer {
    /// The process itself, in this epoch or a former one.
    Own,
    /// Another process in a former epoch: it ended, or has to give way.
    Former,
    /// Another process in this epoch or a later one.
    Other,
}

impl Record {
    pub(super) fn new(instance: &Instance, address: &Address, process: &str) -> (Self, Option<Texts>) {
        let texts = Texts::of(&instance.model);
        let model = ModelCard { tokenizer: None, chat_template: None, ..ModelCard::clone(&instance.model) };
        let record = Self {
            protocol: PROTOCOL,
            process: process.to_owned(),
            address: address.clone(),
            texts: texts.as_ref().map(Texts::reference),
            instance: Instance { model: Arc::new(model), ..instance.clone() },
        };
        (record, texts)
    }

    pub(super) fn encode(&self) -> Bytes {
        serde_json::to_vec(self).expect("a record has only string keys").into()
    }

    pub(super) fn decode(json: &[u8]) -> Result<Self, RecordError> {
        let head = RecordHead::decode(json)?;
        if head.protocol != u64::from(PROTOCOL) {
            return Err(RecordError::Protocol(head.protocol));
        }
        serde_json::from_slice(json).map_err(|error| invalid(&error))
    }

    /// The record in the key of a worker, if it can be used by a process with these keys.
    pub(super) fn admit(id: WorkerId, stored: &StoredRecord, keys: Option<&RecordKeys>) -> Result<Self, Unusable> {
        let verified = stored.verify(id, keys);
        let record = match Self::decode(&stored.json) {
            Ok(record) => record,
            Err(error @ RecordError::Protocol(_)) if verified.is_ok() => {
                return Err(Unusable::Superseded(error.to_string()));
            }
            // The number explains more than a MAC that a former protocol may not have.
            Err(error) => return Err(Unusable::Ignored(error.to_string())),
        };
        if let Err(error) = verified {
            // Quoted, because whatever wrote the record chose it.
            let address = shortened(&record.address.0);
            return Err(Unusable::Ignored(format!(
                "the record with the address {address:?} is not authentic: {error}; write the same secret to \
                 cluster.secret_file of all frontends and workers, and use a version that signs records; if no worker \
                 of yours has this address, another client of NATS wrote the record"
            )));
        }
        if record.instance.id != id {
            return Err(Unusable::Ignored(format!("the record is that of {}", record.instance.id)));
        }
        Ok(record)
    }

    /// The instance with its texts.
    pub(super) fn into_instance(self, texts: Option<&Texts>) -> Instance {
        let Some(texts) = texts else { return self.instance };
        let model = texts.clone().add_to(ModelCard::clone(&self.instance.model));
        Instance { model: Arc::new(model), ..self.instance }
    }
}

impl RecordHead {
    pub(super) fn decode(json: &[u8]) -> Result<Self, RecordError> {
        serde_json::from_slice(json).map_err(|error| invalid(&error))
    }

    /// Epochs decide between processes with the same worker id. A restarted worker has a later epoch, and must not wait
    /// until the lease of its predecessor expires; from outside, a second worker with the same id looks the same. So
    /// the later epoch is registered. The former one is registered again when the later one has ended.
    pub(super) fn writer(&self, process: &str, epoch: Epoch) -> Writer {
        match self.instance.epoch {
            written if written > epoch => Writer::Other,
            _ if self.process == process => Writer::Own,
            written if written < epoch => Writer::Former,
            _ => Writer::Other,
        }
    }

    pub(super) fn epoch(&self) -> Epoch {
        self.instance.epoch
    }
}

/// The error without its position in the record: records that are wrong in the same way are reported once.
fn invalid(error: &serde_json::Error) -> RecordError {
    let text = error.to_string();
    let what = text.split(" at line ").next().unwrap_or_default();
    RecordError::Invalid(shortened(what))
}

/// A text of a record for the log: its beginning, because whatever wrote the record chose its length.
fn shortened(text: &str) -> String {
    text.chars().take(MAX_LOGGED).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::contract::instance;
    use crate::plane::nats::RecordKey;
    use crate::plane::{DeviceId, KvCache};
    use kvbm::Fingerprint;

    fn record(epoch: u64) -> Record {
        Record::new(&instance(7, epoch), &Address("http://host:1".into()), "p").0
    }

    #[test]
    fn records_survive_encoding_and_lack_the_texts() {
        let mut full = instance(7, 3);
        let model = ModelCard {
            tokenizer: Some("TOKENIZER".into()),
            chat_template: Some("TEMPLATE".into()),
            ..ModelCard::clone(&full.model)
        };
        full.model = Arc::new(model);
        let (record, texts) = Record::new(&full, &Address("http://host:1".into()), "p");
        let json = record.encode();
        let text = String::from_utf8_lossy(&json).into_owned();
        assert!(!text.contains("TOKENIZER") && !text.contains("TEMPLATE"), "{text}");
        let decoded = Record::decode(&json).unwrap();
        assert_eq!(decoded, record);
        assert_eq!(decoded.into_instance(texts.as_ref()), full);
    }

    #[test]
    fn records_of_versions_with_fewer_or_more_fields_are_read() {
        let kv_cache = Some(KvCache {
            fingerprint: Fingerprint::from_bytes([7; 32]),
            blocks: 9,
            host_blocks: 0,
            device: Some(DeviceId(3)),
        });
        let full = Instance { kv_cache, ..instance(7, 1) };
        let written = Record::new(&full, &Address("http://host:1".into()), "p").0;
        let mut json: serde_json::Value = serde_json::from_slice(&written.encode()).unwrap();
        json["instance"]["added_later"] = 1.into();
        let read = |json: &serde_json::Value| Record::decode(json.to_string().as_bytes()).unwrap();
        assert_eq!(read(&json), written);
        json["instance"].as_object_mut().unwrap().remove("kv_cache").unwrap();
        assert_eq!(read(&json), record(1), "a worker that says nothing of its KV cache");
    }

    #[test]
    fn another_protocol_number_is_refused_by_its_number() {
        let json = String::from_utf8(record(1).encode().to_vec()).unwrap();
        for other in [0, 2, 300] {
            let json = json.replace("\"protocol\":1", &format!("\"protocol\":{other}"));
            assert_eq!(Record::decode(json.as_bytes()), Err(RecordError::Protocol(other)));
        }
        assert!(matches!(Record::decode(b"{}"), Err(RecordError::Invalid(_))));
    }

    #[test]
    fn only_a_record_says_that_a_worker_was_superseded() {
        let json = String::from_utf8(record(1).encode().to_vec()).unwrap();
        let admit = |id, json: &[u8]| {
            let stored = StoredRecord { json: Bytes::copy_from_slice(json), mac: None };
            Record::admit(WorkerId(id), &stored, None)
        };
        assert_eq!(admit(7, json.as_bytes()), Ok(record(1)));
        let newer = json.replace("\"protocol\":1", "\"protocol\":2");
        assert!(matches!(admit(7, newer.as_bytes()), Err(Unusable::Superseded(_))));
        assert!(matches!(admit(8, json.as_bytes()), Err(Unusable::Ignored(_))), "of another worker");
        let answer = br#"{"type": "io.nats.jetstream.api.v1.stream_info_response", "total": 0}"#;
        for other in [&b""[..], b"\x01\x00", b"{}", answer, &json.as_bytes()[..100]] {
            let problem = admit(7, other);
            assert!(matches!(&problem, Err(Unusable::Ignored(text)) if !text.contains(" line ")), "{problem:?}");
        }
    }

    #[test]
    fn with_a_secret_a_record_that_is_not_signed_with_it_says_nothing() {
        let keys = RecordKeys::fixed([RecordKey::derive(b"0123456789abcdef")]);
        let signed = StoredRecord::sign(WorkerId(7), record(1).encode(), Some(&keys));
        let admit = |stored: &StoredRecord| Record::admit(WorkerId(7), stored, Some(&keys));
        assert_eq!(admit(&signed), Ok(record(1)));
        let changed = |from: &str, to: &str| {
            let json = String::from_utf8(signed.json.to_vec()).unwrap();
            assert!(json.contains(from), "{json}");
            StoredRecord { json: json.replace(from, to).into(), ..signed.clone() }
        };
        let ignored = |stored: &StoredRecord| match admit(stored) {
            Err(Unusable::Ignored(problem)) => problem,
            other => panic!("{other:?}"),
        };
        let moved = ignored(&changed("http://host:1", "http://other:1"));
        assert!(moved.contains("\"http://other:1\"") && moved.contains("cluster.secret_file"), "{moved}");
        let unsigned = ignored(&StoredRecord { mac: None, ..signed.clone() });
        assert!(unsigned.contains("\"http://host:1\"") && unsigned.contains("no MAC"), "{unsigned}");
        let newer = changed("\"protocol\":1", "\"protocol\":2");
        assert_eq!(ignored(&newer), "protocol number 2, this process has 1", "it ends no worker");
        let newer = StoredRecord::sign(WorkerId(7), newer.json, Some(&keys));
        assert!(matches!(admit(&newer), Err(Unusable::Superseded(_))));
    }

    #[test]
    fn the_later_epoch_may_write_and_the_former_may_not() {
        let head = RecordHead::decode(&record(5).encode()).unwrap();
        let writer = |process, epoch| head.writer(process, Epoch(epoch));
        assert_eq!([writer("p", 5), writer("p", 6), writer("p", 4)], [Writer::Own, Writer::Own, Writer::Other]);
        assert_eq!([writer("q", 5), writer("q", 6), writer("q", 4)], [Writer::Other, Writer::Former, Writer::Other]);
    }
}
