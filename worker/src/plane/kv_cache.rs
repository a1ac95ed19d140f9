//! What other processes need to know of the KV cache of a worker.

use super::{DeviceId, Instance};
use kvbm::Fingerprint;
use serde::{Deserialize, Serialize};

/// The KV cache of a worker in its own memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct KvCache {
    /// Fingerprint of the blocks that the worker computes and can load; 64 hexadecimal digits.
    #[serde(with = "hex")]
    pub fingerprint: Fingerprint,
    /// Capacity of device memory (G1) in blocks.
    pub blocks: u64,
    /// Capacity of host memory (G2) in blocks, which has copies of the blocks of G1; 0 without G2, and in the records
    /// of older workers.
    #[serde(default)]
    pub host_blocks: u64,
    /// The device that has it and computes; `None` when unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<DeviceId>,
}

impl Instance {
    /// Whether the workers can load each other's blocks, and compute the same text. Unknown counts as yes: blocks are
    /// verified where they are loaded.
    pub fn can_share_blocks(&self, other: &Self) -> bool {
        self.kv_cache.zip(other.kv_cache).is_none_or(|(own, others)| own.fingerprint == others.fingerprint)
    }
}

mod hex {
    use kvbm::Fingerprint;
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(fingerprint: &Fingerprint, to: S) -> Result<S::Ok, S::Error> {
        to.serialize_str(&blake3::Hash::from_bytes(*fingerprint.as_bytes()).to_hex())
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<Fingerprint, D::Error> {
        let text = String::deserialize(from)?;
        let bytes = blake3::Hash::from_hex(text).map_err(D::Error::custom)?;
        Ok(Fingerprint::from_bytes(*bytes.as_bytes()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::contract::instance;

    #[test]
    fn a_fingerprint_is_written_as_hexadecimal_digits() {
        let cache =
            KvCache { fingerprint: Fingerprint::from_bytes([0xa5; 32]), blocks: 9, host_blocks: 20, device: None };
        let json = serde_json::to_value(cache).unwrap();
        assert_eq!(json, serde_json::json!({ "fingerprint": "a5".repeat(32), "blocks": 9, "host_blocks": 20 }));
        assert_eq!(serde_json::from_value::<KvCache>(json).unwrap(), cache);
        let json = serde_json::json!({ "fingerprint": "a5".repeat(32), "blocks": 9 });
        let older = KvCache { host_blocks: 0, ..cache };
        assert_eq!(serde_json::from_value::<KvCache>(json).unwrap(), older, "the record of an older worker");
        for wrong in ["a5", "", &"zz".repeat(32)] {
            let json = serde_json::json!({ "fingerprint": wrong, "blocks": 9 });
            assert!(serde_json::from_value::<KvCache>(json).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn workers_with_other_fingerprints_share_no_blocks() {
        let with = |fingerprint: Option<u8>| {
            let cache = |byte| KvCache {
                fingerprint: Fingerprint::from_bytes([byte; 32]),
                blocks: 9,
                host_blocks: 0,
                device: None,
            };
            Instance { kv_cache: fingerprint.map(cache), ..instance(1, 1) }
        };
        assert!(with(Some(1)).can_share_blocks(&with(Some(1))));
        assert!(!with(Some(1)).can_share_blocks(&with(Some(2))));
        assert!(with(Some(1)).can_share_blocks(&with(None)) && with(None).can_share_blocks(&with(Some(1))));
    }
}
