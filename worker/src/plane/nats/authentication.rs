//! The message authentication codes (MACs) of records and of the addresses of logs: a MAC shows that the process that
//! sent them knows the secret of the deployment, beside having the permission to write the bucket or to answer.
//!
//! A frontend sends prompts to the address in a record. The permissions of NATS let each worker, and each client with
//! the credentials of one, write the record of any. So a process signs its records
//! with a key that is derived from the secret, and a process with a secret ignores records that were not signed with
//! the same one. The MAC covers the id of the worker and the whole record: a copy for another id, or with another
//! address, is not valid. It is carried in a header of the message, so that processes without a secret read the record
//! as it is. The URL at which a log can be read has a MAC too, made with another key: a process with a secret connects
//! to no URL from NATS that was not signed.
//!
//! A secret is replaced while processes run: for some time a process accepts two of them, and signs with one. When its
//! keys change, it signs its records again, and verifies those of others again.
//!
//! Not here: freshness. A copy of a record that once was valid is valid, so it can show a worker that has left, at the
//! address that this worker had.

use super::Address;
use crate::plane::{Source, WorkerId};
use bytes::Bytes;
use kvbm::Epoch;
use tokio::sync::watch;

/// Signs and checks the records of a deployment, and the addresses of its logs.
#[derive(Clone)]
pub struct RecordKey([u8; blake3::KEY_LEN]);

/// The keys of a process: the first one signs its records, and each verifies records of others. Clones see the same
/// keys.
#[derive(Clone)]
pub struct RecordKeys(watch::Receiver<Vec<RecordKey>>);

/// Reports changes of keys.
pub(super) struct KeyChanges(Option<watch::Receiver<Vec<RecordKey>>>);

/// A record as it is in the bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct StoredRecord {
    pub(super) json: Bytes,
    /// The MAC as hexadecimal digits, if the process that wrote the record has a secret.
    pub(super) mac: Option<String>,
}

/// The URL at which a process serves a log, as it is in an answer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct LogAddress {
    pub(super) url: Address,
    /// The MAC as hexadecimal digits, if the process has a secret.
    pub(super) mac: Option<String>,
}

/// Why a record or an address is not authentic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum MacError {
    #[error("it has no MAC, and this process has a secret")]
    Missing,
    #[error("its MAC was not made with a secret that this process accepts")]
    Wrong,
}

/// Separates this key from other uses of the secret. It names the construction, and changes with it.
const CONTEXT: &str = "blockyard 2026-11 MAC of records in discovery";

/// Separates the key of addresses, which is derived from that of records.
const LOG_CONTEXT: &str = "blockyard 2026-11 MAC of addresses of logs";

impl RecordKey {
    /// The key that belongs to a secret.
    pub fn derive(secret: &[u8]) -> Self {
        Self(blake3::derive_key(CONTEXT, secret))
    }

    fn mac(&self, id: WorkerId, json: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&id.0.to_le_bytes()).update(json);
        hasher.finalize()
    }

    fn log_mac(&self, source: Source, epoch: Epoch, url: &Address) -> blake3::Hash {
        let key = blake3::derive_key(LOG_CONTEXT, &self.0);
        blake3::keyed_hash(&key, format!("{source} {} {url}", epoch.0).as_bytes())
    }
}

/// The MAC made with the first key; `None` without a secret.
fn sign(keys: Option<&RecordKeys>, mac: impl Fn(&RecordKey) -> blake3::Hash) -> Option<String> {
    keys.and_then(|keys| keys.0.borrow().first().map(|key| mac(key).to_hex().to_string()))
}

/// Whether a MAC was made with one of these keys. Without a secret, everything is accepted.
fn verify(
    mac: Option<&str>,
    keys: Option<&RecordKeys>,
    expected: impl Fn(&RecordKey) -> blake3::Hash,
) -> Result<(), MacError> {
    let Some(keys) = keys else { return Ok(()) };
    let mac = blake3::Hash::from_hex(mac.ok_or(MacError::Missing)?).map_err(|_| MacError::Wrong)?;
    // Hashes are compared in constant time.
    let is_valid = keys.0.borrow().iter().any(|key| mac == expected(key));
    if is_valid { Ok(()) } else { Err(MacError::Wrong) }
}

impl RecordKeys {
    /// The keys in a channel. Without any nothing is signed, and no record is accepted.
    pub fn following(keys: watch::Receiver<Vec<RecordKey>>) -> Self {
        Self(keys)
    }
}

#[cfg(test)]
impl RecordKeys {
    /// Keys that do not change.
    pub(super) fn fixed(keys: impl Into<Vec<RecordKey>>) -> Self {
        Self(watch::channel(keys.into()).1)
    }
}

impl KeyChanges {
    /// The changes from now on.
    pub(super) fn of(keys: Option<&RecordKeys>) -> Self {
        let mut receiver = keys.map(|keys| keys.0.clone());
        if let Some(receiver) = &mut receiver {
            receiver.mark_unchanged();
        }
        Self(receiver)
    }

    /// Waits for the next change; for ever without keys, or with keys that will not change again.
    pub(super) async fn next(&mut self) {
        if let Some(receiver) = &mut self.0
            && receiver.changed().await.is_ok()
        {
            return;
        }
        std::future::pending::<()>().await;
    }
}

impl StoredRecord {
    /// The record of a worker as a process with these keys writes it.
    pub(super) fn sign(id: WorkerId, json: Bytes, keys: Option<&RecordKeys>) -> Self {
        let mac = sign(keys, |key| key.mac(id, &json));
        Self { json, mac }
    }

    /// Whether the record of a worker was signed with one of these keys. Without a secret, all records are accepted.
    pub(super) fn verify(&self, id: WorkerId, keys: Option<&RecordKeys>) -> Result<(), MacError> {
        verify(self.mac.as_deref(), keys, |key| key.mac(id, &self.json))
    }
}

impl LogAddress {
    /// The URL for the log of a source in an epoch, as a process with these keys names it.
    pub(super) fn sign(source: Source, epoch: Epoch, url: Address, keys: Option<&RecordKeys>) -> Self {
        let mac = sign(keys, |key| key.log_mac(source, epoch, &url));
        Self { url, mac }
    }

    /// Whether the URL was signed for this log with one of these keys. Without a secret, all are accepted.
    pub(super) fn verify(&self, source: Source, epoch: Epoch, keys: Option<&RecordKeys>) -> Result<(), MacError> {
        verify(self.mac.as_deref(), keys, |key| key.log_mac(source, epoch, &self.url))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use futures::FutureExt;

    const JSON: &str = r#"{"address":"http://10.0.0.7:8100"}"#;

    fn keys<const N: usize>(secrets: [&str; N]) -> RecordKeys {
        RecordKeys::fixed(secrets.map(|secret| RecordKey::derive(secret.as_bytes())))
    }

    fn signed(keys: Option<&RecordKeys>) -> StoredRecord {
        StoredRecord::sign(WorkerId(7), JSON.into(), keys)
    }

    #[test]
    fn a_mac_is_valid_for_its_secret_id_and_record_only() {
        let (ours, other) = (keys(["0123456789abcdef"]), keys(["0123456789abcdeF"]));
        let record = signed(Some(&ours));
        let verify = |record: &StoredRecord| record.verify(WorkerId(7), Some(&ours));
        assert_eq!(verify(&record), Ok(()));
        assert_eq!(record.verify(WorkerId(8), Some(&ours)), Err(MacError::Wrong), "another id");
        assert_eq!(record.verify(WorkerId(7), Some(&other)), Err(MacError::Wrong), "another secret");
        let moved = StoredRecord { json: JSON.replace("10.0.0.7", "10.0.0.8").into(), ..record.clone() };
        assert_eq!(verify(&moved), Err(MacError::Wrong), "another address");
        assert_eq!(verify(&signed(None)), Err(MacError::Missing));
        for mac in ["", "00", "x", &*"0".repeat(64), &record.mac.clone().unwrap()[1..]] {
            assert_eq!(verify(&StoredRecord { mac: Some(mac.to_owned()), ..record.clone() }), Err(MacError::Wrong));
        }
    }

    #[test]
    fn the_mac_of_an_address_is_valid_for_its_secret_log_and_url_only() {
        let (ours, other) = (keys(["0123456789abcdef"]), keys(["0123456789abcdeF"]));
        let (source, epoch) = (Source::Worker(WorkerId(7)), Epoch(5));
        let url = Address("http://10.0.0.7:8100".to_owned());
        let address = LogAddress::sign(source, epoch, url.clone(), Some(&ours));
        assert_eq!(address.verify(source, epoch, Some(&ours)), Ok(()));
        for (source, epoch, keys) in
            [(Source::Worker(WorkerId(8)), epoch, &ours), (source, Epoch(6), &ours), (source, epoch, &other)]
        {
            assert_eq!(address.verify(source, epoch, Some(keys)), Err(MacError::Wrong), "{source} {epoch:?}");
        }
        let moved = LogAddress { url: Address("http://10.0.0.8:8100".to_owned()), ..address };
        assert_eq!(moved.verify(source, epoch, Some(&ours)), Err(MacError::Wrong), "another URL");
        let unsigned = LogAddress::sign(source, epoch, url, None);
        assert_eq!(unsigned.verify(source, epoch, Some(&ours)), Err(MacError::Missing));
        assert_eq!(unsigned.verify(source, epoch, None), Ok(()), "without a secret");
    }

    #[test]
    fn the_first_key_signs_and_each_verifies() {
        let (former, new) = ("0123456789abcdef", "fedcba9876543210");
        let verify = |signing: &RecordKeys, verifying: &RecordKeys| {
            signed(Some(signing)).verify(WorkerId(7), Some(verifying)).is_ok()
        };
        // The steps of a rotation: in each, a process that has made the step and one that has not accept each other.
        let steps = [keys([former]), keys([former, new]), keys([new, former]), keys([new])];
        for pair in steps.windows(2) {
            assert!(verify(&pair[0], &pair[1]) && verify(&pair[1], &pair[0]));
        }
        assert!(!verify(&steps[1], &steps[3]), "the first one signs");
        assert!(!verify(&keys([]), &keys([former])) && !verify(&keys([former]), &keys([])), "no key is no secret");
    }

    #[tokio::test]
    async fn keys_that_change_sign_and_verify_from_then_on() {
        let derive = |secret: &str| RecordKey::derive(secret.as_bytes());
        let (former, new) = ("0123456789abcdef", "fedcba9876543210");
        let (sender, receiver) = watch::channel(vec![derive(former)]);
        let following = RecordKeys::following(receiver);
        let before = signed(Some(&following));
        sender.send_replace(vec![derive("a-change-before-it-is-followed")]);
        let mut changes = KeyChanges::of(Some(&following));
        let is_changed = |changes: &mut KeyChanges| changes.next().now_or_never().is_some();
        assert!(!is_changed(&mut changes));
        sender.send_replace(vec![derive(new)]);
        assert!(is_changed(&mut changes) && !is_changed(&mut changes), "once");
        assert_eq!(before.verify(WorkerId(7), Some(&following)), Err(MacError::Wrong));
        assert_eq!(signed(Some(&following)), signed(Some(&keys([new]))));
        drop(sender);
        assert!(!is_changed(&mut changes) && !is_changed(&mut KeyChanges::of(None)));
    }

    #[test]
    fn without_a_secret_a_record_needs_no_mac_and_may_have_any() {
        let wrong = StoredRecord { mac: Some("wrong".to_owned()), ..signed(None) };
        for record in [signed(None), signed(Some(&keys(["0123456789abcdef"]))), wrong] {
            assert_eq!(record.verify(WorkerId(7), None), Ok(()));
        }
    }

    /// When this fails, processes of other versions do not accept each other's records: change `CONTEXT` too, and say
    /// so in the changelog.
    #[test]
    fn the_mac_is_that_of_the_documented_construction() {
        let key = blake3::derive_key(CONTEXT, b"0123456789abcdef");
        let input = [&7u64.to_le_bytes()[..], JSON.as_bytes()].concat();
        let expected = blake3::keyed_hash(&key, &input).to_hex().to_string();
        assert_eq!(signed(Some(&keys(["0123456789abcdef"]))).mac, Some(expected));
        let (source, url) = (Source::Worker(WorkerId(7)), Address("http://10.0.0.7:8100".to_owned()));
        let key = blake3::derive_key(LOG_CONTEXT, &key);
        let expected = blake3::keyed_hash(&key, b"w7 5 http://10.0.0.7:8100").to_hex().to_string();
        assert_eq!(LogAddress::sign(source, Epoch(5), url, Some(&keys(["0123456789abcdef"]))).mac, Some(expected));
    }
}
