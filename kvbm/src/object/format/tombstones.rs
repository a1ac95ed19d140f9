//! Tombstone lists: objects that a collector marked for deletion, so that they are not read any more. Immutable,
//! checksummed, bound to the collector's id.
//!
//! Little endian: magic `BLKYREM1`, collector 16, then for each object its writer 16 and number 8, then CRC-64/NVME 8
//! over all bytes before.

use super::layout::{InstanceId, ObjectId};
use crc_fast::{CrcAlgorithm, checksum};

const MAGIC: [u8; 8] = *b"BLKYREM1";
const ENTRY_LEN: usize = 24;
/// Maximum number of objects in one list.
pub(in crate::object) const MAX_ENTRIES: usize = 100_000;
/// Maximum bytes of a list.
pub(in crate::object) const MAX_BYTES: u64 = 32 + (MAX_ENTRIES * ENTRY_LEN) as u64;

pub(in crate::object) fn encode(collector: InstanceId, objects: &[ObjectId]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &collector.to_bytes()].concat();
    for object in objects {
        bytes.extend(object.writer.to_bytes());
        bytes.extend(object.number.to_le_bytes());
    }
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Decodes a list; `None` if it is invalid or of another collector.
pub(in crate::object) fn decode(collector: InstanceId, bytes: &[u8]) -> Option<Vec<ObjectId>> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != *sum {
        return None;
    }
    let body = body.strip_prefix(&MAGIC)?.strip_prefix(&collector.to_bytes())?;
    let (entries, rest) = body.as_chunks::<ENTRY_LEN>();
    let object = |entry: &[u8; ENTRY_LEN]| ObjectId {
        writer: InstanceId::from_bytes(std::array::from_fn(|i| entry[i])),
        number: u64::from_le_bytes(std::array::from_fn(|i| entry[16 + i])),
    };
    rest.is_empty().then(|| entries.iter().map(object).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use proptest::prelude::*;

    fn object() -> ObjectId {
        ObjectId { writer: InstanceId::from_bytes([8; 16]), number: 9 }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn decoding_any_bytes_is_bounded(
            bytes in fuzz::inputs(encode(InstanceId::from_bytes([7; 16]), &[object(); 5])),
        ) {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| decode(InstanceId::from_bytes([7; 16]), bytes));
            assert!(decoded.is_none_or(|objects| objects.len() * ENTRY_LEN <= bytes.len()));
        }
    }

    #[test]
    fn a_flipped_bit_a_cut_or_another_id_is_detected() {
        let collector = InstanceId::new();
        let writer = InstanceId::new();
        let objects: Vec<_> = (0..3).map(|number| ObjectId { writer, number }).collect();
        let valid = encode(collector, &objects);
        assert_eq!(decode(collector, &valid), Some(objects));
        for bit in 0..valid.len() * 8 {
            let mut corrupt = valid.clone();
            corrupt[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(collector, &corrupt), None, "bit {bit}");
        }
        assert!((0..valid.len()).all(|cut| decode(collector, &valid[..cut]).is_none()));
        assert_eq!(decode(writer, &valid), None);
    }
}
