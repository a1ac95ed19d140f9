//! Manifests: which blocks some objects of one writer hold. Immutable, checksummed, bound to the writer.
//!
//! Little endian:
//!
//! | bytes | field |
//! | --: | --- |
//! | 8 | magic `BLKYMAN4`; the last digit is the version |
//! | 16 | writer |
//! | 64 | sections: domain 16, fingerprint 32, object number 8, number of entries n 4, idle seconds 4, then n entries |
//! | 52 × n | entries: block hash 16, parent hash 16, offset of the header 4, payload length 4, expires 4, |
//! |        | pinned until 4, 1 if there is a parent 1, zeros 3 |
//! | 40 | only if authenticated (magic `BLKYMAN5`): number of the metadata key 8, tag 32 |
//! | 8 | CRC-64/NVME over all bytes before |
//!
//! Where blocks are encrypted, manifests are authenticated, and one without a valid tag is rejected ([`is_authentic`]).
//! The tag covers all bytes before it, and the number of the manifest.
//!
//! Entries are in the order of their offsets and do not overlap, and an object has at most [`MAX_OBJECT_BYTES`]; a
//! manifest that violates this is invalid. Decoding allocates only for entries that are present.
//!
//! Idle: for how long the blocks had not been used when the object was written. This is a duration, not a date,
//! because the writer's clock may be wrong; the store knows when the object was written. Version 3 has a date in this
//! field, which is ignored.

use super::layout::InstanceId;
use crate::block::{BlockRetention, Date, DomainId, Fingerprint, Header, SequenceHash};
use crate::transform::crypt::{Authenticity, Context, KeyError, METADATA_TAG_LEN, MetadataKeys, MetadataTag};
use crc_fast::{CrcAlgorithm, checksum};
use std::time::Duration;

const MAGIC: [u8; 8] = *b"BLKYMAN4";
const MAGIC_V3: [u8; 8] = *b"BLKYMAN3";
const MAGIC_AUTHENTICATED: [u8; 8] = *b"BLKYMAN5";
/// Maximum bytes of a manifest. Writers keep to it: a section of 65,000 of the smallest blocks takes 3.4 MB.
pub(in crate::object) const MAX_BYTES: u64 = 64 << 20;
/// Maximum bytes of an object. Writers stop at 128 MiB plus one block.
pub(in crate::object) const MAX_OBJECT_BYTES: u64 = 2 << 30;
const SECTION_LEN: usize = 64;
const ENTRY_LEN: usize = 52;

/// A block in an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::object) struct BlockEntry {
    pub(in crate::object) hash: SequenceHash,
    pub(in crate::object) parent: Option<SequenceHash>,
    /// Offset of the header in the object, in bytes.
    pub(in crate::object) offset: u32,
    /// Bytes of the payload.
    pub(in crate::object) length: u32,
    /// The block is a miss from this time on.
    pub(in crate::object) expires: Option<Date>,
    /// The block is not deleted before this time.
    pub(in crate::object) pinned: Option<Date>,
}

impl BlockEntry {
    /// The retention terms, as far as a manifest contains them.
    pub(in crate::object) fn retention(&self) -> BlockRetention {
        BlockRetention { expires: self.expires, pinned: self.pinned, ..BlockRetention::default() }
    }

    pub(in crate::object) fn end(&self) -> u64 {
        u64::from(self.offset) + Header::LEN as u64 + u64::from(self.length)
    }
}

/// One object and its blocks, all of one domain and one fingerprint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::object) struct Section {
    pub(in crate::object) domain: DomainId,
    pub(in crate::object) fingerprint: Fingerprint,
    pub(in crate::object) object: u64,
    /// For how long the blocks had not been used when the object was written. Compaction keeps this, so that rewritten
    /// blocks do not count as recently used.
    pub(in crate::object) idle: Duration,
    pub(in crate::object) entries: Vec<BlockEntry>,
}

impl Section {
    /// Bytes of the object.
    pub(in crate::object) fn bytes(&self) -> u64 {
        self.entries.iter().map(BlockEntry::end).max().unwrap_or(0)
    }
}

/// A duration in whole seconds, at most `u32::MAX`.
pub(in crate::object) fn whole_seconds(age: Duration) -> u32 {
    u32::try_from(age.as_secs()).unwrap_or(u32::MAX)
}

/// Encodes a manifest, with a tag if there is a usable key.
pub(in crate::object) fn encode(
    writer: InstanceId,
    number: u64,
    sections: &[Section],
    keys: Option<&MetadataKeys>,
) -> Vec<u8> {
    let mut bytes = encode_body(if keys.is_some() { MAGIC_AUTHENTICATED } else { MAGIC }, writer, sections);
    if let Some(keys) = keys {
        match keys.make_tag(context(writer, number), [&bytes, &[]]) {
            Some(tag) => bytes.extend(tag.to_bytes()),
            // Readers that require a tag reject it; others can read it.
            None => bytes[..8].copy_from_slice(&MAGIC),
        }
    }
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

fn context(writer: InstanceId, number: u64) -> Context {
    Context::Manifest(writer.to_bytes(), number)
}

/// Bytes of a section in a manifest.
pub(in crate::object) fn encoded_len(section: &Section) -> u64 {
    (SECTION_LEN + section.entries.len() * ENTRY_LEN) as u64
}

fn encode_body(magic: [u8; 8], writer: InstanceId, sections: &[Section]) -> Vec<u8> {
    let bytes = sections.iter().map(encoded_len).sum::<u64>() as usize + 24 + METADATA_TAG_LEN + 8;
    let mut bytes = Vec::with_capacity(bytes);
    bytes.extend(magic);
    bytes.extend(writer.to_bytes());
    for section in sections {
        bytes.extend(section.domain.as_bytes());
        bytes.extend(section.fingerprint.as_bytes());
        bytes.extend(section.object.to_le_bytes());
        bytes.extend((section.entries.len() as u32).to_le_bytes());
        bytes.extend(whole_seconds(section.idle).to_le_bytes());
        for entry in &section.entries {
            bytes.extend(entry.hash.as_bytes());
            bytes.extend(entry.parent.map_or([0; 16], |parent| *parent.as_bytes()));
            bytes.extend(entry.offset.to_le_bytes());
            bytes.extend(entry.length.to_le_bytes());
            bytes.extend(Date::encode(entry.expires).to_le_bytes());
            bytes.extend(Date::encode(entry.pinned).to_le_bytes());
            bytes.extend([u8::from(entry.parent.is_some()), 0, 0, 0]);
        }
    }
    bytes
}

/// Whether a holder of a metadata key made the tag of a manifest, for this number. Loads the key if it is not in
/// memory.
pub(in crate::object) async fn is_authentic(
    writer: InstanceId,
    number: u64,
    bytes: &[u8],
    keys: &MetadataKeys,
) -> Result<bool, KeyError> {
    let Some((body, tag)) = split_tag(bytes) else { return Ok(false) };
    let verify = || keys.verify(context(writer, number), [body, &[]], &tag);
    let result = match verify() {
        Authenticity::UnknownKey => match keys.fetch(tag.key).await {
            Ok(_) => verify(),
            Err(KeyError::UnknownMasterKey { .. } | KeyError::Corrupt { .. }) => Authenticity::UnknownKey,
            Err(error) => return Err(error),
        },
        result => result,
    };
    Ok(result == Authenticity::Authentic)
}

/// The authenticated bytes, and their tag.
fn split_tag(bytes: &[u8]) -> Option<(&[u8], MetadataTag)> {
    let (body, _) = bytes.split_last_chunk::<8>()?;
    let (body, tag) = body.split_last_chunk::<METADATA_TAG_LEN>()?;
    body.starts_with(&MAGIC_AUTHENTICATED).then(|| (body, MetadataTag::from_bytes(tag)))
}

/// Decodes a manifest; `None` if it is invalid or of another writer. Does not verify the tag.
pub(in crate::object) fn decode(writer: InstanceId, bytes: &[u8]) -> Option<Vec<Section>> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != *sum {
        return None;
    }
    let is_v3 = body.starts_with(&MAGIC_V3);
    let (magic, body) = match split_tag(bytes) {
        Some((body, _)) => (MAGIC_AUTHENTICATED, body),
        None => (if is_v3 { MAGIC_V3 } else { MAGIC }, body),
    };
    let mut rest = body.strip_prefix(&magic)?.strip_prefix(&writer.to_bytes())?;
    let mut sections = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<SECTION_LEN>() {
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let count = number(56) as usize;
        let (entries, after) = after.split_at_checked(count.checked_mul(ENTRY_LEN)?)?;
        let entries: Vec<BlockEntry> = entries.as_chunks::<ENTRY_LEN>().0.iter().map(decode_entry).collect();
        if !is_valid_layout(&entries) {
            return None;
        }
        sections.push(Section {
            domain: DomainId::from_bytes(std::array::from_fn(|i| head[i])),
            fingerprint: Fingerprint::from_bytes(std::array::from_fn(|i| head[16 + i])),
            object: u64::from_le_bytes(std::array::from_fn(|i| head[48 + i])),
            idle: if is_v3 { Duration::ZERO } else { Duration::from_secs(number(60).into()) },
            entries,
        });
        rest = after;
    }
    rest.is_empty().then_some(sections)
}

/// Whether the entries are in order, do not overlap, and fit into an object.
fn is_valid_layout(entries: &[BlockEntry]) -> bool {
    let ends = entries.iter().map(BlockEntry::end);
    entries.iter().skip(1).zip(ends).all(|(next, end)| u64::from(next.offset) >= end)
        && entries.last().is_none_or(|last| last.end() <= MAX_OBJECT_BYTES)
}

fn decode_entry(bytes: &[u8; ENTRY_LEN]) -> BlockEntry {
    let hash = |at: usize| SequenceHash::from_bytes(std::array::from_fn(|i| bytes[at + i]));
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let parent = (bytes[48] == 1).then(|| hash(16));
    let (expires, pinned) = (Date::decode(number(40)), Date::decode(number(44)));
    BlockEntry { hash: hash(0), parent, offset: number(32), length: number(36), expires, pinned }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use proptest::prelude::*;

    fn sections() -> Vec<Section> {
        let entry = |n: u8| BlockEntry {
            hash: SequenceHash::from_bytes([n; 16]),
            parent: (n > 1).then(|| SequenceHash::from_bytes([n - 1; 16])),
            offset: u32::from(n) * 1000,
            length: 500,
            expires: (n > 2).then(|| Date::from_unix(9)),
            pinned: (n > 1).then(|| Date::from_unix(5)),
        };
        let section = |space: u8, entries: &[u8]| Section {
            domain: DomainId::from_bytes([space + 1; 16]),
            fingerprint: Fingerprint::from_bytes([space; 32]),
            object: u64::from(space) + 7,
            idle: Duration::from_secs(u64::from(space - 1) * 3),
            entries: entries.iter().copied().map(entry).collect(),
        };
        vec![section(1, &[1, 2, 3]), section(2, &[1]), section(3, &[])]
    }

    #[test]
    fn decode_returns_what_was_encoded() {
        let writer = InstanceId::new();
        assert_eq!(decode(writer, &encode(writer, 0, &sections(), None)), Some(sections()));
        assert_eq!(decode(writer, &encode(writer, 0, &[], None)), Some(vec![]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn decoding_any_bytes_is_bounded(
            bytes in fuzz::inputs(encode(InstanceId::from_bytes([7; 16]), 0, &sections(), None)),
        ) {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| decode(InstanceId::from_bytes([7; 16]), bytes));
            for section in decoded.into_iter().flatten() {
                assert!(section.bytes() <= MAX_OBJECT_BYTES && section.entries.len() * ENTRY_LEN <= bytes.len());
            }
        }
    }

    #[test]
    fn corpus_inputs_decode_within_bounds() {
        let writer = InstanceId::from_bytes([7; 16]);
        let mut forged = encode(writer, 0, &sections(), None);
        forged[24 + 56..][..4].fill(0xFF);
        fuzz::in_corpus("manifest-entry-count-maximal", &fuzz::summed(forged));
        let mut forged = encode(writer, 0, &sections(), None);
        forged[24 + SECTION_LEN + 36..][..4].fill(0xFF);
        fuzz::in_corpus("manifest-block-length-maximal", &fuzz::summed(forged));
        for (name, bytes) in fuzz::corpus() {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| decode(writer, bytes));
            assert_eq!(decoded, None, "{name}");
        }
    }

    #[test]
    fn overlapping_and_oversized_entries_are_refused() {
        let writer = InstanceId::new();
        let changed = |change: fn(&mut Vec<BlockEntry>)| {
            let mut sections = sections();
            change(&mut sections[0].entries);
            decode(writer, &encode(writer, 0, &sections, None))
        };
        assert!(changed(|_| {}).is_some());
        assert_eq!(changed(|entries| entries[1].offset = entries[0].offset), None);
        assert_eq!(changed(|entries| entries.reverse()), None);
        assert_eq!(changed(|entries| entries[2].length = u32::MAX), None);
    }

    #[test]
    fn version_3_is_read_without_its_idle_field() {
        let writer = InstanceId::new();
        let mut sections = sections();
        let mut bytes = encode(writer, 0, &sections, None);
        let body = bytes.len() - 8;
        bytes[..8].copy_from_slice(b"BLKYMAN3");
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes[..body]);
        bytes[body..].copy_from_slice(&sum.to_le_bytes());
        for section in &mut sections {
            section.idle = Duration::ZERO;
        }
        assert_eq!(decode(writer, &bytes), Some(sections));
    }

    #[test]
    fn a_flipped_bit_a_cut_or_another_writer_is_detected() {
        let writer = InstanceId::new();
        let valid = encode(writer, 0, &sections(), None);
        for bit in 0..valid.len() * 8 {
            let mut corrupt = valid.clone();
            corrupt[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(writer, &corrupt), None, "bit {bit}");
        }
        assert!((0..valid.len()).all(|cut| decode(writer, &valid[..cut]).is_none()));
        assert_eq!(decode(InstanceId::new(), &valid), None);
    }
}
