//! What some objects of one writer hold. Immutable, checksummed, and bound to its writer.
//!
//! Little endian:
//!
//! | bytes | field |
//! | --: | --- |
//! | 8 | magic `BLKYMAN4`; the last digit is the version |
//! | 16 | writer |
//! | … | sections: domain 16, fingerprint 32, object's number 8, entries n 4, idle 4, then n entries |
//! | 52 × n | entries: name 16, parent 16, offset of the header 4, payload length 4, expires 4, pinned until 4, 1 when there is |
//! |        | a parent 1, zeros 3 |
//! | 40 | only in a sealed manifest, whose magic is `BLKYMAN5`: number of the metadata key 8, tag 32 |
//! | 8 | CRC-64/NVME over all before |
//!
//! A manifest is sealed where blocks are encrypted; there, one without a sound seal is refused ([`authentic`]). The tag covers all
//! before the seal, and the manifest's number.
//!
//! Entries come in the order of their offsets and do not overlap. What claims otherwise, or more than [`MAX_OBJECT`], is not one of
//! ours; memory is taken only for entries that are there.
//!
//! Idle: for how many seconds nobody had used these blocks when the object was written. An age and no date: a writer's clock may be
//! far off, and when the object was written the store knows. Version 3 had such a date there; it is read as if there were none.

use super::layout::Writer;
use crate::block::{Date, DomainId, Fingerprint, Header, Keep, SequenceHash};
use crate::transform::crypt::{Authenticity, Context, KeyError, MetadataKeys, SEAL, Seal};
use crc_fast::{CrcAlgorithm, checksum};
use std::time::Duration;

const MAGIC: [u8; 8] = *b"BLKYMAN4";
const FORMER: [u8; 8] = *b"BLKYMAN3";
const SEALED: [u8; 8] = *b"BLKYMAN5";
/// Bytes of a manifest at most, which writers keep to: a section of 65,000 of the smallest blocks takes 3.4 MB.
pub(in crate::object) const MAX_BYTES: u64 = 64 << 20;
/// Bytes of an object at most. Writers stop at 128 MiB and one block.
pub(in crate::object) const MAX_OBJECT: u64 = 2 << 30;
const SECTION: usize = 64;
const ENTRY: usize = 52;

/// A block in an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::object) struct Entry {
    pub(in crate::object) name: SequenceHash,
    pub(in crate::object) parent: Option<SequenceHash>,
    /// Of its header.
    pub(in crate::object) offset: u32,
    /// Payload bytes.
    pub(in crate::object) length: u32,
    /// A miss from then on.
    pub(in crate::object) expires: Option<Date>,
    /// Not to be deleted before.
    pub(in crate::object) pinned: Option<Date>,
}

impl Entry {
    /// As far as it stands in a manifest.
    pub(in crate::object) fn keep(&self) -> Keep {
        Keep { expires: self.expires, pinned: self.pinned, ..Keep::default() }
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
    /// For how long its blocks had not been used when it was written: what is packed again is no younger for that.
    pub(in crate::object) idle: Duration,
    pub(in crate::object) entries: Vec<Entry>,
}

impl Section {
    /// Bytes of the object.
    pub(in crate::object) fn bytes(&self) -> u64 {
        self.entries.iter().map(Entry::end).max().unwrap_or(0)
    }
}

/// Whole seconds, as they are written down; longer than a century is as good as one.
pub(in crate::object) fn seconds(age: Duration) -> u32 {
    u32::try_from(age.as_secs()).unwrap_or(u32::MAX)
}

/// A manifest, sealed if there is a key to do so.
pub(in crate::object) fn encode(
    writer: Writer,
    number: u64,
    sections: &[Section],
    keys: Option<&MetadataKeys>,
) -> Vec<u8> {
    let mut bytes = body(if keys.is_some() { SEALED } else { MAGIC }, writer, sections);
    if let Some(keys) = keys {
        match keys.seal(context(writer, number), [&bytes, &[]]) {
            Some(seal) => bytes.extend(seal.to_bytes()),
            // No reader that wants a seal will take it, and no other is misled.
            None => bytes[..8].copy_from_slice(&MAGIC),
        }
    }
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

fn context(writer: Writer, number: u64) -> Context {
    Context::Manifest(writer.to_bytes(), number)
}

/// The bytes of a section in a manifest.
pub(in crate::object) fn span(section: &Section) -> u64 {
    (SECTION + section.entries.len() * ENTRY) as u64
}

fn body(magic: [u8; 8], writer: Writer, sections: &[Section]) -> Vec<u8> {
    let bytes = sections.iter().map(span).sum::<u64>() as usize + 24 + SEAL + 8;
    let mut bytes = Vec::with_capacity(bytes);
    bytes.extend(magic);
    bytes.extend(writer.to_bytes());
    for section in sections {
        bytes.extend(section.domain.as_bytes());
        bytes.extend(section.fingerprint.as_bytes());
        bytes.extend(section.object.to_le_bytes());
        bytes.extend((section.entries.len() as u32).to_le_bytes());
        bytes.extend(seconds(section.idle).to_le_bytes());
        for entry in &section.entries {
            bytes.extend(entry.name.as_bytes());
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

/// Whether a manifest is what a holder of a metadata key wrote under this number. The answer for one whose key is not in memory
/// waits for the key.
pub(in crate::object) async fn authentic(
    writer: Writer,
    number: u64,
    bytes: &[u8],
    keys: &MetadataKeys,
) -> Result<bool, KeyError> {
    let Some((body, seal)) = sealed(bytes) else { return Ok(false) };
    let verify = || keys.verify(context(writer, number), [body, &[]], &seal);
    let verdict = match verify() {
        Authenticity::UnknownKey => match keys.learn(seal.key).await {
            Ok(_) => verify(),
            Err(KeyError::Locked { .. } | KeyError::Damaged { .. }) => Authenticity::UnknownKey,
            Err(error) => return Err(error),
        },
        verdict => verdict,
    };
    Ok(verdict == Authenticity::Authentic)
}

/// What a seal covers, and the seal.
fn sealed(bytes: &[u8]) -> Option<(&[u8], Seal)> {
    let (body, _) = bytes.split_last_chunk::<8>()?;
    let (body, seal) = body.split_last_chunk::<SEAL>()?;
    body.starts_with(&SEALED).then(|| (body, Seal::from_bytes(seal)))
}

/// Reads a manifest; `None` when it is not one of `writer`, whole and unchanged. Does not look at a seal.
pub(in crate::object) fn decode(writer: Writer, bytes: &[u8]) -> Option<Vec<Section>> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != *sum {
        return None;
    }
    let former = body.starts_with(&FORMER);
    let (magic, body) = match sealed(bytes) {
        Some((body, _)) => (SEALED, body),
        None => (if former { FORMER } else { MAGIC }, body),
    };
    let mut rest = body.strip_prefix(&magic)?.strip_prefix(&writer.to_bytes())?;
    let mut sections = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<SECTION>() {
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let count = number(56) as usize;
        let (entries, after) = after.split_at_checked(count.checked_mul(ENTRY)?)?;
        let entries: Vec<Entry> = entries.as_chunks::<ENTRY>().0.iter().map(entry).collect();
        if !is_sound(&entries) {
            return None;
        }
        sections.push(Section {
            domain: DomainId::from_bytes(std::array::from_fn(|i| head[i])),
            fingerprint: Fingerprint::from_bytes(std::array::from_fn(|i| head[16 + i])),
            object: u64::from_le_bytes(std::array::from_fn(|i| head[48 + i])),
            idle: if former { Duration::ZERO } else { Duration::from_secs(number(60).into()) },
            entries,
        });
        rest = after;
    }
    rest.is_empty().then_some(sections)
}

/// Whether blocks can lie so in one object.
fn is_sound(entries: &[Entry]) -> bool {
    let ends = entries.iter().map(Entry::end);
    entries.iter().skip(1).zip(ends).all(|(next, end)| u64::from(next.offset) >= end)
        && entries.last().is_none_or(|last| last.end() <= MAX_OBJECT)
}

fn entry(bytes: &[u8; ENTRY]) -> Entry {
    let name = |at: usize| SequenceHash::from_bytes(std::array::from_fn(|i| bytes[at + i]));
    let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
    let parent = (bytes[48] == 1).then(|| name(16));
    let (expires, pinned) = (Date::decode(number(40)), Date::decode(number(44)));
    Entry { name: name(0), parent, offset: number(32), length: number(36), expires, pinned }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use proptest::prelude::*;

    fn sections() -> Vec<Section> {
        let entry = |n: u8| Entry {
            name: SequenceHash::from_bytes([n; 16]),
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
    fn a_manifest_says_what_was_written() {
        let writer = Writer::new();
        assert_eq!(decode(writer, &encode(writer, 0, &sections(), None)), Some(sections()));
        assert_eq!(decode(writer, &encode(writer, 0, &[], None)), Some(vec![]));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_decode_within_bounds_or_are_refused(
            bytes in fuzz::inputs(encode(Writer::from_bytes([7; 16]), 0, &sections(), None)),
        ) {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| decode(Writer::from_bytes([7; 16]), bytes));
            for section in decoded.into_iter().flatten() {
                assert!(section.bytes() <= MAX_OBJECT && section.entries.len() * ENTRY <= bytes.len());
            }
        }
    }

    #[test]
    fn corpus_inputs_decode_within_bounds() {
        let writer = Writer::from_bytes([7; 16]);
        let mut forged = encode(writer, 0, &sections(), None);
        forged[24 + 56..][..4].fill(0xFF);
        fuzz::in_corpus("manifest-entry-count-maximal", &fuzz::summed(forged));
        let mut forged = encode(writer, 0, &sections(), None);
        forged[24 + SECTION + 36..][..4].fill(0xFF);
        fuzz::in_corpus("manifest-block-length-maximal", &fuzz::summed(forged));
        for (name, bytes) in fuzz::corpus() {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| decode(writer, bytes));
            assert_eq!(decoded, None, "{name}");
        }
    }

    #[test]
    fn overlapping_and_oversized_entries_are_refused() {
        let writer = Writer::new();
        let changed = |change: fn(&mut Vec<Entry>)| {
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
    fn what_version_three_wrote_is_read_without_the_date_that_it_had_of_a_use() {
        let (writer, mut sections) = (Writer::new(), sections());
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
    fn any_flipped_bit_any_cut_and_another_writer_is_seen() {
        let writer = Writer::new();
        let sound = encode(writer, 0, &sections(), None);
        for bit in 0..sound.len() * 8 {
            let mut bad = sound.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(writer, &bad), None, "bit {bit}");
        }
        assert!((0..sound.len()).all(|cut| decode(writer, &sound[..cut]).is_none()));
        assert_eq!(decode(Writer::new(), &sound), None);
    }
}
