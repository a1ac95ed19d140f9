//! What a segment is made of: records, one after the other, each at a multiple of the grain.
//!
//! A block's record is its [`Header`], zeros up to byte 512, and its payload. That of a discarded block says that earlier
//! records of it no longer count:
//!
//! | offset | bytes | field |
//! | --: | --: | --- |
//! | 0 | 8 | magic `BLKYGONE` |
//! | 8 | 16 | name |
//! | 24 | 32 | fingerprint |
//! | 56 | 8 | CRC-64/NVME over bytes 0 to 56 |
//!
//! Zeros fill the rest up to the grain, and what is written together up to a block of the device. There is no segment header: every record describes itself.

use super::direct::Access;
use crate::block::{Block, Corrupt, Fingerprint, Header, SequenceHash};
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};

/// Where the payload begins.
const BODY: usize = Access::UNIT as usize;
const GONE: [u8; 8] = *b"BLKYGONE";
const GONE_LEN: usize = 64;

/// Something to be written.
#[derive(Clone, Copy)]
pub(super) enum Record<'a> {
    Block(&'a Block),
    Gone(Fingerprint, SequenceHash),
}

impl Record<'_> {
    /// Bytes that the record takes.
    pub(super) fn span(&self, grain: u64) -> u64 {
        match self {
            Self::Block(block) => span(block.header.length, grain),
            Self::Gone(..) => grain,
        }
    }

    /// Writes the record; `into` is exactly as long.
    pub(super) fn encode(&self, into: &mut [u8]) {
        let used = match self {
            Self::Block(block) => {
                let (head, body) = into.split_at_mut(BODY);
                head[..Header::LEN].copy_from_slice(&block.header.encode());
                head[Header::LEN..].fill(0);
                body[..block.payload.len()].copy_from_slice(&block.payload);
                BODY + block.payload.len()
            }
            Self::Gone(fingerprint, name) => {
                into[..8].copy_from_slice(&GONE);
                into[8..24].copy_from_slice(name.as_bytes());
                into[24..56].copy_from_slice(fingerprint.as_bytes());
                let sum = checksum(CrcAlgorithm::Crc64Nvme, &into[..56]);
                into[56..GONE_LEN].copy_from_slice(&sum.to_le_bytes());
                GONE_LEN
            }
        };
        into[used..].fill(0);
    }
}

/// Bytes that a block's record takes.
pub(super) fn span(payload: u64, grain: u64) -> u64 {
    (BODY as u64 + payload).next_multiple_of(grain)
}

/// The block in a record. Its checksum is for whoever serves it to verify.
pub(super) fn block(record: &Bytes) -> Result<Block, Corrupt> {
    let header = Header::decode(record.first_chunk().ok_or(Corrupt::Length)?)?;
    let end = usize::try_from(header.length).ok().and_then(|length| length.checked_add(BODY));
    let end = end.filter(|end| *end <= record.len()).ok_or(Corrupt::Length)?;
    Ok(Block { header, payload: record.slice(BODY..end) })
}

/// A sound record that was found in a segment.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) enum Found {
    Block(Header),
    Gone(Fingerprint, SequenceHash),
}

/// A record of a block that claims more bytes is not looked at: two segments of the default size.
const MAX: u64 = 256 << 20;

/// How many bytes the record of a block claims to have, if `bytes` begin with the header of one.
pub(super) fn claimed(bytes: &[u8]) -> Option<u64> {
    let header = Header::decode(bytes.first_chunk()?).ok()?;
    Some(BODY as u64 + header.length)
}

/// What stands at the start of `bytes`, judged by its own checksum. The record of a block that claims more bytes than `most` is
/// not sound.
///
/// `Err` says how many bytes are needed to judge; a record that ends with the file is not sound.
pub(super) fn judge(bytes: &[u8], most: u64) -> Result<Option<Found>, usize> {
    if bytes.starts_with(&GONE) {
        let Some(record) = bytes.first_chunk::<GONE_LEN>() else { return Err(GONE_LEN) };
        let sound = checksum(CrcAlgorithm::Crc64Nvme, &record[..56]).to_le_bytes() == record[56..];
        let name = SequenceHash::from_bytes(std::array::from_fn(|i| record[8 + i]));
        let fingerprint = Fingerprint::from_bytes(std::array::from_fn(|i| record[24 + i]));
        return Ok(sound.then_some(Found::Gone(fingerprint, name)));
    }
    let Some(head) = bytes.first_chunk::<{ Header::LEN }>() else { return Err(Header::LEN) };
    let Ok(header) = Header::decode(head) else { return Ok(None) };
    // Bounded by `Header::decode`, so that nothing overflows.
    let end = BODY + header.length as usize;
    if end as u64 > most.min(MAX) {
        return Ok(None);
    }
    let Some(payload) = bytes.get(BODY..end) else { return Err(end) };
    Ok(header.describes(payload).then_some(Found::Block(header)))
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
        fn any_bytes_are_judged_without_memory_taken(
            bytes in prop_oneof![fuzz::arbitrary(), fuzz::changed(record()), Just(record())],
        ) {
            let most = MAX as usize;
            match fuzz::bounded(&bytes, 1, |bytes| judge(bytes, u64::MAX)) {
                // As much as a record can have, and more than there is.
                Err(needed) => assert!(needed <= most && needed > bytes.len()),
                Ok(Some(Found::Block(header))) => assert!(BODY as u64 + header.length <= bytes.len() as u64),
                Ok(_) => {}
            }
            // A record that is loaded shares the bytes that were read.
            let read = Bytes::from(bytes);
            if let Ok(block) = fuzz::bounded(&read, 1, |_| block(&read)) {
                assert_eq!(block.header.length, block.payload.len() as u64);
            }
        }
    }
}
