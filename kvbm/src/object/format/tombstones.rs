//! What a collector is about to delete, so that nobody asks for it any more. Immutable, checksummed, bound to its name.
//!
//! Little endian: magic `BLKYREM1`, name 16, then for each object its writer 16 and number 8, then CRC-64/NVME 8 over all
//! before.

use super::layout::{ObjectId, Writer};
use crc_fast::{CrcAlgorithm, checksum};

const MAGIC: [u8; 8] = *b"BLKYREM1";
const ENTRY: usize = 24;
/// Objects that one list names at most.
pub(in crate::object) const MOST: usize = 100_000;
/// Bytes of a list at most.
pub(in crate::object) const MAX_BYTES: u64 = 32 + (MOST * ENTRY) as u64;

pub(in crate::object) fn encode(name: Writer, objects: &[ObjectId]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &name.to_bytes()].concat();
    for object in objects {
        bytes.extend(object.writer.to_bytes());
        bytes.extend(object.number.to_le_bytes());
    }
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Reads a list of removals; `None` when it is not the one of that name, whole and unchanged.
pub(in crate::object) fn decode(name: Writer, bytes: &[u8]) -> Option<Vec<ObjectId>> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != *sum {
        return None;
    }
    let body = body.strip_prefix(&MAGIC)?.strip_prefix(&name.to_bytes())?;
    let (entries, rest) = body.as_chunks::<ENTRY>();
    let object = |entry: &[u8; ENTRY]| ObjectId {
        writer: Writer::from_bytes(std::array::from_fn(|i| entry[i])),
        number: u64::from_le_bytes(std::array::from_fn(|i| entry[16 + i])),
    };
    rest.is_empty().then(|| entries.iter().map(object).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use proptest::prelude::*;

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_decode_within_bounds_or_are_refused(
            bytes in fuzz::inputs(encode(Writer::from_bytes([7; 16]), &[ObjectId { writer: Writer::from_bytes([8; 16]), number: 9 }; 5])),
        ) {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| decode(Writer::from_bytes([7; 16]), bytes));
            assert!(decoded.is_none_or(|objects| objects.len() * ENTRY <= bytes.len()));
        }
    }

    #[test]
    fn what_was_written_is_read_and_any_flipped_bit_cut_or_other_name_is_seen() {
        let (name, writer) = (Writer::new(), Writer::new());
        let objects: Vec<_> = (0..3).map(|number| ObjectId { writer, number }).collect();
        let sound = encode(name, &objects);
        assert_eq!(decode(name, &sound), Some(objects));
        for bit in 0..sound.len() * 8 {
            let mut bad = sound.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(name, &bad), None, "bit {bit}");
        }
        assert!((0..sound.len()).all(|cut| decode(name, &sound[..cut]).is_none()));
        assert_eq!(decode(writer, &sound), None);
    }
}
