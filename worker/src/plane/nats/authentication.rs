//! The message authentication code (MAC) of a record: it shows that the process that wrote the record knows the secret
//! of the deployment, beside having the permission to write the bucket.
//!
//! A frontend sends the secret of the deployment and prompts to the address in a record. The permissions of NATS let
//! each worker, and each client with the credentials of one, write the record of any. So a process signs its records
//! with a key that is derived from the secret, and a process with a secret ignores records that were not signed with
//! the same one. The MAC covers the id of the worker and the whole record: a copy for another id, or with another
//! address, is not valid. It is carried in a header of the message, so that processes without a secret read the record
//! as it is.
//!
//! Not here: freshness. A copy of a record that once was valid is valid, so it can show a worker that has left, at the
//! address that this worker had.

use crate::plane::WorkerId;
use bytes::Bytes;

/// Signs and checks the records of a deployment.
#[derive(Clone)]
pub struct RecordKey([u8; blake3::KEY_LEN]);

/// A record as it is in the bucket.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct StoredRecord {
    pub(super) json: Bytes,
    /// The MAC as hexadecimal digits, if the process that wrote the record has a secret.
    pub(super) mac: Option<String>,
}

/// Why a record is not authentic.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub(super) enum MacError {
    #[error("it has no MAC, and this process has a secret")]
    Missing,
    #[error("its MAC was not made with the secret of this process")]
    Wrong,
}

/// Separates this key from other uses of the secret. It names the construction, and changes with it.
const CONTEXT: &str = "blockyard 2026-11 MAC of records in discovery";

impl RecordKey {
    /// The key that belongs to the secret of a deployment.
    pub fn derive(secret: &[u8]) -> Self {
        Self(blake3::derive_key(CONTEXT, secret))
    }

    fn mac(&self, id: WorkerId, json: &[u8]) -> blake3::Hash {
        let mut hasher = blake3::Hasher::new_keyed(&self.0);
        hasher.update(&id.0.to_le_bytes()).update(json);
        hasher.finalize()
    }
}

impl StoredRecord {
    /// The record of a worker as a process with this key writes it.
    pub(super) fn sign(id: WorkerId, json: Bytes, key: Option<&RecordKey>) -> Self {
        let mac = key.map(|key| key.mac(id, &json).to_hex().to_string());
        Self { json, mac }
    }

    /// Whether the record of a worker was signed with this key. Without a key, all records are accepted.
    pub(super) fn verify(&self, id: WorkerId, key: Option<&RecordKey>) -> Result<(), MacError> {
        let Some(key) = key else { return Ok(()) };
        let mac = self.mac.as_deref().ok_or(MacError::Missing)?;
        // Hashes are compared in constant time.
        let is_valid = blake3::Hash::from_hex(mac).is_ok_and(|mac| mac == key.mac(id, &self.json));
        if is_valid { Ok(()) } else { Err(MacError::Wrong) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const JSON: &str = r#"{"address":"http://10.0.0.7:8100"}"#;

    fn signed(key: Option<&RecordKey>) -> StoredRecord {
        StoredRecord::sign(WorkerId(7), JSON.into(), key)
    }

    #[test]
    fn a_mac_is_valid_for_its_secret_id_and_record_only() {
        let (ours, other) = (RecordKey::derive(b"0123456789abcdef"), RecordKey::derive(b"0123456789abcdeF"));
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
    fn without_a_secret_a_record_needs_no_mac_and_may_have_any() {
        let wrong = StoredRecord { mac: Some("wrong".to_owned()), ..signed(None) };
        for record in [signed(None), signed(Some(&RecordKey::derive(b"0123456789abcdef"))), wrong] {
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
        assert_eq!(signed(Some(&RecordKey::derive(b"0123456789abcdef"))).mac, Some(expected));
    }
}
