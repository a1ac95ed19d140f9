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
//! | 8 | CRC-64/NVME over all before |
//!
//! Idle: for how many seconds nobody had used these blocks when the object was written. An age and no date: a writer's clock may be
//! far off, and when the object was written the store knows. Version 3 had such a date there; it is read as if there were none.

use super::layout::Writer;
use crate::{Date, DomainId, Fingerprint, Header, Keep, SequenceHash};
use crc_fast::{CrcAlgorithm, checksum};
use std::time::Duration;

const MAGIC: [u8; 8] = *b"BLKYMAN4";
const FORMER: [u8; 8] = *b"BLKYMAN3";
const SECTION: usize = 64;
const ENTRY: usize = 52;

/// A block in an object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) name: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    /// Of its header.
    pub(super) offset: u32,
    /// Payload bytes.
    pub(super) length: u32,
    /// A miss from then on.
    pub(super) expires: Option<Date>,
    /// Not to be deleted before.
    pub(super) pinned: Option<Date>,
}

impl Entry {
    /// As far as it stands in a manifest.
    pub(super) fn keep(&self) -> Keep {
        Keep { expires: self.expires, pinned: self.pinned, ..Keep::default() }
    }

    pub(super) fn end(&self) -> u64 {
        u64::from(self.offset) + Header::LEN as u64 + u64::from(self.length)
    }
}

/// One object and its blocks, all of one domain and one fingerprint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Section {
    pub(super) domain: DomainId,
    pub(super) fingerprint: Fingerprint,
    pub(super) object: u64,
    /// For how long its blocks had not been used when it was written: what is packed again is no younger for that.
    pub(super) idle: Duration,
    pub(super) entries: Vec<Entry>,
}

impl Section {
    /// Bytes of the object.
    pub(super) fn bytes(&self) -> u64 {
        self.entries.iter().map(Entry::end).max().unwrap_or(0)
    }
}

/// Whole seconds, as they are written down; longer than a century is as good as one.
pub(super) fn seconds(age: Duration) -> u32 {
    u32::try_from(age.as_secs()).unwrap_or(u32::MAX)
}

pub(super) fn encode(writer: Writer, sections: &[Section]) -> Vec<u8> {
    let mut bytes = Vec::new();
    bytes.extend(MAGIC);
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
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Reads a manifest; `None` when it is not one of `writer`, whole and unchanged.
pub(super) fn decode(writer: Writer, bytes: &[u8]) -> Option<Vec<Section>> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != *sum {
        return None;
    }
    let former = body.starts_with(&FORMER);
    let magic = if former { FORMER } else { MAGIC };
    let mut rest = body.strip_prefix(&magic)?.strip_prefix(&writer.to_bytes())?;
    let mut sections = Vec::new();
    while let Some((head, after)) = rest.split_first_chunk::<SECTION>() {
        let number = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| head[at + i]));
        let count = number(56) as usize;
        let (entries, after) = after.split_at_checked(count.checked_mul(ENTRY)?)?;
        sections.push(Section {
            domain: DomainId::from_bytes(std::array::from_fn(|i| head[i])),
            fingerprint: Fingerprint::from_bytes(std::array::from_fn(|i| head[16 + i])),
            object: u64::from_le_bytes(std::array::from_fn(|i| head[48 + i])),
            idle: if former { Duration::ZERO } else { Duration::from_secs(number(60).into()) },
            entries: entries.as_chunks::<ENTRY>().0.iter().map(entry).collect(),
        });
        rest = after;
    }
    rest.is_empty().then_some(sections)
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
        assert_eq!(decode(writer, &encode(writer, &sections())), Some(sections()));
        assert_eq!(decode(writer, &encode(writer, &[])), Some(vec![]));
    }

    #[test]
    fn what_version_three_wrote_is_read_without_the_date_that_it_had_of_a_use() {
        let (writer, mut sections) = (Writer::new(), sections());
        let mut bytes = encode(writer, &sections);
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
        let sound = encode(writer, &sections());
        for bit in 0..sound.len() * 8 {
            let mut bad = sound.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(writer, &bad), None, "bit {bit}");
        }
        assert!((0..sound.len()).all(|cut| decode(writer, &sound[..cut]).is_none()));
        assert_eq!(decode(Writer::new(), &sound), None);
    }
}
