//! Access logs: which objects one process read, and how long ago.
//!
//! Little endian: magic `BLKYUSE2`, reader 16, then for each object its writer 16, number 8 and the seconds since it
//! was read 4, then CRC-64/NVME 8 over all bytes before. Ages instead of dates, because the reader's clock may be
//! wrong; the store knows when the log was written.

use super::layout::{InstanceId, ObjectId};
use super::manifest::whole_seconds;
use crc_fast::{CrcAlgorithm, checksum};
use std::time::Duration;

const MAGIC: [u8; 8] = *b"BLKYUSE2";
const ENTRY_LEN: usize = 28;
/// Maximum number of objects in a log: under 2 MB.
pub(in crate::object) const MAX_ENTRIES: usize = 1 << 16;
/// Maximum bytes of a log.
pub(in crate::object) const MAX_BYTES: u64 = 32 + (MAX_ENTRIES * ENTRY_LEN) as u64;

pub(in crate::object) fn encode(reader: InstanceId, used: &[(ObjectId, Duration)]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &reader.to_bytes()].concat();
    for (object, idle) in used {
        bytes.extend(object.writer.to_bytes());
        bytes.extend(object.number.to_le_bytes());
        bytes.extend(whole_seconds(*idle).to_le_bytes());
    }
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Decodes a log; `None` if it is invalid or of another reader.
pub(in crate::object) fn decode(reader: InstanceId, bytes: &[u8]) -> Option<Vec<(ObjectId, Duration)>> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != *sum {
        return None;
    }
    let body = body.strip_prefix(&MAGIC)?.strip_prefix(&reader.to_bytes())?;
    let (entries, rest) = body.as_chunks::<ENTRY_LEN>();
    let used = |entry: &[u8; ENTRY_LEN]| {
        let writer = InstanceId::from_bytes(std::array::from_fn(|i| entry[i]));
        let number = u64::from_le_bytes(std::array::from_fn(|i| entry[16 + i]));
        let idle = u32::from_le_bytes(std::array::from_fn(|i| entry[24 + i]));
        (ObjectId { writer, number }, Duration::from_secs(idle.into()))
    };
    rest.is_empty().then(|| entries.iter().map(used).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use proptest::prelude::*;

    fn object(number: u64) -> ObjectId {
        ObjectId { writer: InstanceId::from_bytes([7; 16]), number }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn decoding_any_bytes_is_bounded(
            bytes in fuzz::inputs(encode(InstanceId::from_bytes([7; 16]), &[(object(1), Duration::from_secs(9)); 5])),
        ) {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| decode(InstanceId::from_bytes([7; 16]), bytes));
            assert!(decoded.is_none_or(|used| used.len() * ENTRY_LEN <= bytes.len()));
        }
    }

    #[test]
    fn a_flipped_bit_a_cut_or_another_reader_is_detected() {
        let reader = InstanceId::new();
        let used: Vec<_> = (1..4).map(|n| (object(n), Duration::from_secs(n * 100))).collect();
        let valid = encode(reader, &used);
        assert_eq!(decode(reader, &valid), Some(used));
        for bit in 0..valid.len() * 8 {
            let mut corrupt = valid.clone();
            corrupt[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(reader, &corrupt), None, "bit {bit}");
        }
        assert!((0..valid.len()).all(|cut| decode(reader, &valid[..cut]).is_none()));
        assert_eq!(decode(InstanceId::new(), &valid), None);
    }
}
