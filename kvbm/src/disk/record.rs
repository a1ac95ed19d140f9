//! The records of a segment. They are adjacent, each at a multiple of the alignment; there is no segment header.
//!
//! A block's record is its [`Header`], zeros up to byte 512, and its payload. A tombstone says that earlier records
//! of a block no longer count:
//!
//! | offset | bytes | field |
//! | --: | --: | --- |
//! | 0 | 8 | magic `BLKYGONE` |
//! | 8 | 16 | block hash |
//! | 24 | 32 | fingerprint |
//! | 56 | 8 | CRC-64/NVME over bytes 0 to 56 |
//!
//! Zeros fill a record up to the alignment, and records that are written together up to a block of the device.

use super::direct::Access;
use crate::block::{Block, Corrupt, Fingerprint, Header, SequenceHash};
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};

/// Offset of the payload in bytes.
const PAYLOAD_OFFSET: usize = Access::UNIT as usize;
const TOMBSTONE_MAGIC: [u8; 8] = *b"BLKYGONE";
const TOMBSTONE_LEN: usize = 64;

/// A record to be written.
#[derive(Clone, Copy)]
pub(super) enum Record<'a> {
    Block(&'a Block),
    Tombstone(Fingerprint, SequenceHash),
}

impl Record<'_> {
    /// Length of the record in bytes, with padding.
    pub(super) fn span(&self, alignment: u64) -> u64 {
        match self {
            Self::Block(block) => span(block.header.length, alignment),
            Self::Tombstone(..) => alignment,
        }
    }

    /// Encodes the record into `into`, whose length is [`span`](Self::span).
    pub(super) fn encode(&self, into: &mut [u8]) {
        let used = match self {
            Self::Block(block) => {
                let (head, body) = into.split_at_mut(PAYLOAD_OFFSET);
                head[..Header::LEN].copy_from_slice(&block.header.encode());
                head[Header::LEN..].fill(0);
                body[..block.payload.len()].copy_from_slice(&block.payload);
                PAYLOAD_OFFSET + block.payload.len()
            }
            Self::Tombstone(fingerprint, hash) => {
                into[..8].copy_from_slice(&TOMBSTONE_MAGIC);
                into[8..24].copy_from_slice(hash.as_bytes());
                into[24..56].copy_from_slice(fingerprint.as_bytes());
                let sum = checksum(CrcAlgorithm::Crc64Nvme, &into[..56]);
                into[56..TOMBSTONE_LEN].copy_from_slice(&sum.to_le_bytes());
                TOMBSTONE_LEN
            }
        };
        into[used..].fill(0);
    }
}

/// Length of a block's record in bytes, with padding.
pub(super) fn span(payload: u64, alignment: u64) -> u64 {
    (PAYLOAD_OFFSET as u64 + payload).next_multiple_of(alignment)
}

/// Decodes the block of a record. Does not compare its checksum.
pub(super) fn block(record: &Bytes) -> Result<Block, Corrupt> {
    let header = Header::decode(record.first_chunk().ok_or(Corrupt::Length)?)?;
    let end = usize::try_from(header.length).ok().and_then(|length| length.checked_add(PAYLOAD_OFFSET));
    let end = end.filter(|end| *end <= record.len()).ok_or(Corrupt::Length)?;
    Ok(Block { header, payload: record.slice(PAYLOAD_OFFSET..end) })
}

/// A valid record that was found in a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum ParsedRecord {
    Block(Header),
    Tombstone(Fingerprint, SequenceHash),
}

/// Maximum length of a block's record in bytes: two segments of the default size. Scans skip a longer one.
const MAX_RECORD_BYTES: u64 = 256 << 20;

/// Length that a block's record at the start of `bytes` claims, if there is a header.
pub(super) fn claimed_bytes(bytes: &[u8]) -> Option<u64> {
    let header = Header::decode(bytes.first_chunk()?).ok()?;
    Some(PAYLOAD_OFFSET as u64 + header.length)
}

/// Whether `bytes` begin like a record.
pub(super) fn begins(bytes: &[u8]) -> bool {
    bytes.starts_with(&TOMBSTONE_MAGIC) || claimed_bytes(bytes).is_some()
}

/// Parses the record at the start of `bytes` and compares its checksum. Returns `None` for an invalid record, and for
/// one that claims more than `max_bytes` bytes.
///
/// `Err` is the number of bytes that are needed. A record that the end of the file cuts off is invalid.
pub(super) fn parse(bytes: &[u8], max_bytes: u64) -> Result<Option<ParsedRecord>, usize> {
    if bytes.starts_with(&TOMBSTONE_MAGIC) {
        let Some(record) = bytes.first_chunk::<TOMBSTONE_LEN>() else { return Err(TOMBSTONE_LEN) };
        let sound = checksum(CrcAlgorithm::Crc64Nvme, &record[..56]).to_le_bytes() == record[56..];
        let hash = SequenceHash::from_bytes(std::array::from_fn(|i| record[8 + i]));
        let fingerprint = Fingerprint::from_bytes(std::array::from_fn(|i| record[24 + i]));
        return Ok(sound.then_some(ParsedRecord::Tombstone(fingerprint, hash)));
    }
    let Some(head) = bytes.first_chunk::<{ Header::LEN }>() else { return Err(Header::LEN) };
    let Ok(header) = Header::decode(head) else { return Ok(None) };
    // `Header::decode` limits the length, so this cannot overflow.
    let end = PAYLOAD_OFFSET + header.length as usize;
    if end as u64 > max_bytes.min(MAX_RECORD_BYTES) {
        return Ok(None);
    }
    let Some(payload) = bytes.get(PAYLOAD_OFFSET..end) else { return Err(end) };
    Ok(header.matches(payload).then_some(ParsedRecord::Block(header)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use crate::tier::conformance::chain;
    use proptest::prelude::*;

    fn record() -> Vec<u8> {
        let block = chain(1, 1).remove(0);
        let record = Record::Block(&block);
        let mut bytes = vec![0; record.span(Access::UNIT) as usize];
        record.encode(&mut bytes);
        bytes
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn parse_of_arbitrary_bytes_allocates_nothing(
            bytes in prop_oneof![fuzz::arbitrary(), fuzz::changed(record()), Just(record())],
        ) {
            let most = MAX_RECORD_BYTES as usize;
            match fuzz::bounded(&bytes, 1, |bytes| parse(bytes, u64::MAX)) {
                // At most the maximum length of a record, and more than there is.
                Err(needed) => assert!(needed <= most && needed > bytes.len()),
                Ok(Some(ParsedRecord::Block(header))) => {
                    assert!(PAYLOAD_OFFSET as u64 + header.length <= bytes.len() as u64);
                }
                Ok(_) => {}
            }
            // A loaded block shares the bytes that were read.
            let read = Bytes::from(bytes);
            if let Ok(block) = fuzz::bounded(&read, 1, |_| block(&read)) {
                assert_eq!(block.header.length, block.payload.len() as u64);
            }
        }
    }
}
