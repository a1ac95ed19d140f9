//! The records of a segment, and the footer of a sealed segment, which lists them.
//!
//! Footer, little endian, at the next multiple of 4,096 after the last record, up to the end of the file:
//!
//! | bytes | field |
//! | --: | --- |
//! | 52 × n | entries: hash 16, parent 16, offset in units of 512 bytes 4, payload length 4, namespace number 3, |
//! |        | kind 1, expires 4, pinned until 4: as in the block header |
//! | 48 × m | namespaces, numbered from 0: fingerprint 32, cache domain 16 |
//! | … | zeros, so that the footer ends at a multiple of 4,096 |
//! | 40 | only in an authenticated footer, whose magic is `BLKYFOO5`: number of the metadata key 8, tag 32 |
//! | 32 | trailer: magic `BLKYFOO4`, footer's offset 8, n 4, m 4, CRC-64/NVME over the footer before it 8 |
//!
//! An entry takes 52 bytes, so the footers of a million blocks take 52 MB.
//!
//! Footers are authenticated where blocks are encrypted. There, a footer without a valid tag is rejected, and its
//! segment is scanned. The tag covers the segment's number, the footer before the tag, and the trailer before the
//! CRC. Only a tag of a known key that does not match counts as corruption: a footer without a tag, or with one of
//! another key, is from before encryption was turned on or the keys were replaced.
//!
//! The trailer is untrusted: a footer must have exactly the length that its counts imply, end with the file, and list
//! records that are before it and do not overlap. Memory is allocated only for entries that are present.

use super::direct::{Access, Buffer};
use super::record::{self, ParsedRecord};
use crate::block::{BlockRetention, Date, DomainId, Fingerprint, SequenceHash};
use crate::transform::crypt::{Authenticity, Context, METADATA_TAG_LEN, MetadataKeys, MetadataTag};
use crc_fast::{CrcAlgorithm, checksum};

const MAGIC: [u8; 8] = *b"BLKYFOO4";
const AUTHENTICATED_MAGIC: [u8; 8] = *b"BLKYFOO5";
/// Maximum length of a footer in bytes. That of a segment of 128 MiB with the smallest blocks has 26 MB.
const MAX_BYTES: u64 = 64 << 20;
/// Number of recent namespaces that a new record's is searched in. An older one may be listed twice, which costs 48
/// bytes.
const RECENT: usize = 256;
const ENTRY_LEN: usize = 52;
const NAMESPACE_LEN: usize = 48;
const TRAILER_LEN: usize = 32;

/// Engine and cache domain of a block.
type Namespace = (Fingerprint, DomainId);

/// One record of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) hash: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    /// Whether the record is a tombstone: earlier records of the block no longer count.
    pub(super) is_tombstone: bool,
    /// In units of [`Access::UNIT`].
    pub(super) offset: u32,
    /// Payload length in bytes.
    pub(super) length: u32,
    /// The block is a miss from this date on.
    pub(super) expires: Option<Date>,
    /// The block is carried over before this date.
    pub(super) pinned: Option<Date>,
    /// Index into the record list's namespaces.
    namespace: u32,
}

impl Entry {
    /// The retention, as far as a footer contains it.
    pub(super) fn retention(&self) -> BlockRetention {
        BlockRetention { expires: self.expires, pinned: self.pinned, ..BlockRetention::default() }
    }
}

/// The records of a segment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct RecordList {
    namespaces: Vec<Namespace>,
    entries: Vec<Entry>,
}

impl RecordList {
    /// Number of first entries that are compared to detect a damaged footer; several, so that damage to one does not
    /// hide it.
    const FIRST: usize = 8;

    /// Adds a record at a byte offset, in any order.
    pub(super) fn push(&mut self, record: &ParsedRecord, offset: u64) {
        let (namespace, hash, parent, length, is_tombstone) = match record {
            ParsedRecord::Block(header) => {
                ((header.fingerprint, header.domain), header.hash, header.parent, header.length as u32, false)
            }
            ParsedRecord::Tombstone(fingerprint, hash) => ((*fingerprint, DomainId::SHARED), *hash, None, 0, true),
        };
        let retention =
            if let ParsedRecord::Block(header) = record { header.retention } else { BlockRetention::default() };
        let BlockRetention { expires, pinned, .. } = retention;
        // Usually the namespace of the previous record.
        let first = self.namespaces.len().saturating_sub(RECENT);
        let known = self.namespaces[first..].iter().rposition(|known| *known == namespace).map(|at| first + at);
        let namespace = known.unwrap_or_else(|| {
            self.namespaces.push(namespace);
            self.namespaces.len() - 1
        }) as u32;
        let offset = (offset / Access::UNIT) as u32;
        self.entries.push(Entry { hash, parent, is_tombstone, offset, length, expires, pinned, namespace });
    }

    /// Sorts by offset, and numbers the namespaces by first use: the order in which a scan finds them.
    pub(super) fn sort(&mut self) {
        self.entries.sort_unstable_by_key(|entry| entry.offset);
        let namespaces = std::mem::take(&mut self.namespaces);
        let mut numbers = vec![None; namespaces.len()];
        for entry in &mut self.entries {
            let namespace = entry.namespace as usize;
            entry.namespace = *numbers[namespace].get_or_insert_with(|| {
                self.namespaces.push(namespaces[namespace]);
                self.namespaces.len() as u32 - 1
            });
        }
    }

    /// The records with their fingerprints.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (Fingerprint, &Entry)> + ExactSizeIterator {
        self.entries.iter().map(|entry| (self.namespaces[entry.namespace as usize].0, entry))
    }

    /// The records with their domains and fingerprints. A tombstone has no domain.
    pub(super) fn records(&self) -> impl Iterator<Item = (DomainId, Fingerprint, &Entry)> {
        self.entries.iter().map(|entry| {
            let (fingerprint, domain) = self.namespaces[entry.namespace as usize];
            (domain, fingerprint, entry)
        })
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Upper bound of the end of the last record, in bytes.
    pub(super) fn end(&self) -> u64 {
        let end = |e: &Entry| u64::from(e.offset) * Access::UNIT + record::span(u64::from(e.length), Access::UNIT);
        self.entries.iter().map(end).max().unwrap_or(0)
    }

    /// Length in bytes of the footer of `entries` records in so many namespaces, with a tag or without.
    pub(super) fn footer_bytes(entries: usize, namespaces: usize) -> u64 {
        Self::span(entries as u64, namespaces as u64)
    }

    fn span(entries: u64, namespaces: u64) -> u64 {
        (entries * ENTRY_LEN as u64 + namespaces * NAMESPACE_LEN as u64 + (METADATA_TAG_LEN + TRAILER_LEN) as u64)
            .next_multiple_of(Access::BLOCK)
    }

    /// Encodes the footer of segment `number` at byte `at`, with a tag if there is a key.
    pub(super) fn encode(&self, at: u64, number: u32, keys: Option<&MetadataKeys>) -> Buffer {
        let span = Self::footer_bytes(self.entries.len(), self.namespaces.len()) as usize;
        let mut footer = Buffer::zeroed(span);
        let (entries, rest) = footer.split_at_mut(self.entries.len() * ENTRY_LEN);
        for (to, entry) in entries.chunks_exact_mut(ENTRY_LEN).zip(&self.entries) {
            to[..16].copy_from_slice(entry.hash.as_bytes());
            if let Some(parent) = &entry.parent {
                to[16..32].copy_from_slice(parent.as_bytes());
            }
            to[32..36].copy_from_slice(&entry.offset.to_le_bytes());
            to[36..40].copy_from_slice(&entry.length.to_le_bytes());
            to[40..43].copy_from_slice(&entry.namespace.to_le_bytes()[..3]);
            to[43] = if entry.is_tombstone { 2 } else { u8::from(entry.parent.is_some()) };
            to[44..48].copy_from_slice(&Date::encode(entry.expires).to_le_bytes());
            to[48..52].copy_from_slice(&Date::encode(entry.pinned).to_le_bytes());
        }
        for (to, (fingerprint, domain)) in rest.chunks_exact_mut(NAMESPACE_LEN).zip(&self.namespaces) {
            to[..32].copy_from_slice(fingerprint.as_bytes());
            to[32..].copy_from_slice(domain.as_bytes());
        }
        let trailer = span - TRAILER_LEN;
        footer[trailer..trailer + 8].copy_from_slice(if keys.is_some() { &AUTHENTICATED_MAGIC } else { &MAGIC });
        footer[trailer + 8..trailer + 16].copy_from_slice(&at.to_le_bytes());
        footer[trailer + 16..trailer + 20].copy_from_slice(&(self.entries.len() as u32).to_le_bytes());
        footer[trailer + 20..trailer + 24].copy_from_slice(&(self.namespaces.len() as u32).to_le_bytes());
        if let Some(keys) = keys {
            match keys.make_tag(Context::Footer(number), covered(&footer)) {
                Some(tag) => footer[trailer - METADATA_TAG_LEN..trailer].copy_from_slice(&tag.to_bytes()),
                // A reader that requires a tag rejects this footer; others can use it.
                None => footer[trailer..trailer + 8].copy_from_slice(&MAGIC),
            }
        }
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &footer[..span - 8]);
        footer[span - 8..].copy_from_slice(&sum.to_le_bytes());
        footer
    }

    /// Whether `bytes` start like the footer of these records. Some of the first entries may be missing.
    pub(super) fn begins(&self, bytes: &[u8]) -> bool {
        self.entries.iter().take(Self::FIRST).any(|entry| bytes.starts_with(entry.hash.as_bytes()))
    }

    /// The trailer at the end of `tail`, which are the last bytes of a file of `length` bytes.
    pub(super) fn locate(tail: &[u8], length: u64) -> Option<Trailer> {
        let trailer = tail.last_chunk::<TRAILER_LEN>()?;
        (trailer[..8] == MAGIC || trailer[..8] == AUTHENTICATED_MAGIC).then_some(())?;
        Some(Trailer { at: u64_at(trailer, 8), entries: u32_at(trailer, 16), namespaces: u32_at(trailer, 20), length })
    }

    /// Decodes the footer of segment `number`. Returns `None` when it is corrupt, or when `keys` are given and none
    /// of them made its tag.
    pub(super) fn decode(footer: &[u8], number: u32, keys: Option<&MetadataKeys>) -> Option<Self> {
        let trailer = footer.last_chunk::<TRAILER_LEN>()?;
        let (body, sum) = footer.split_at(footer.len() - 8);
        if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != sum {
            return None;
        }
        let has_tag = trailer[..8] == AUTHENTICATED_MAGIC;
        if let Some(keys) = keys {
            let (body, _) = footer.split_last_chunk::<TRAILER_LEN>()?;
            let tag = MetadataTag::from_bytes(body.last_chunk().filter(|_| has_tag)?);
            if keys.verify(Context::Footer(number), covered(footer), &tag) != Authenticity::Authentic {
                return None;
            }
        }
        let at = u64_at(trailer, 8);
        let length = at.checked_add(footer.len() as u64)?;
        Self::locate(footer, length)?.start()?;
        let (entries, namespaces) = (u32_at(trailer, 16) as usize, u32_at(trailer, 20) as usize);
        let (entries, rest) = footer.split_at(entries * ENTRY_LEN);
        let namespace = |bytes: &[u8]| {
            (Fingerprint::from_bytes(std::array::from_fn(|i| bytes[i])), DomainId::from_bytes(array(bytes, 32)))
        };
        let namespaces: Vec<Namespace> = rest.chunks_exact(NAMESPACE_LEN).take(namespaces).map(namespace).collect();
        let entry = |bytes: &[u8]| {
            let hash = |at: usize| SequenceHash::from_bytes(array(bytes, at));
            let namespace = u32::from_le_bytes([bytes[40], bytes[41], bytes[42], 0]);
            ((namespace as usize) < namespaces.len() && bytes[43] <= 2).then(|| Entry {
                hash: hash(0),
                parent: (bytes[43] == 1).then(|| hash(16)),
                is_tombstone: bytes[43] == 2,
                offset: u32_at(bytes, 32),
                length: u32_at(bytes, 36),
                expires: Date::decode(u32_at(bytes, 44)),
                pinned: Date::decode(u32_at(bytes, 48)),
                namespace,
            })
        };
        // `collect` into an `Option` would not know the number of entries.
        let mut listed = Vec::with_capacity(entries.len() / ENTRY_LEN);
        let mut end = 0;
        for bytes in entries.chunks_exact(ENTRY_LEN) {
            let entry = entry(bytes)?;
            let start = u64::from(entry.offset) * Access::UNIT;
            if start < end {
                return None;
            }
            end = start + record::span(u64::from(entry.length), Access::UNIT);
            listed.push(entry);
        }
        (end <= at).then_some(Self { namespaces, entries: listed })
    }

    /// Whether a footer that [`decode`](Self::decode) rejects matches its checksum, and only has no tag of any of the
    /// `keys`.
    pub(super) fn lacks_known_tag(footer: &[u8], number: u32, keys: &MetadataKeys) -> bool {
        let Some((body, trailer)) = footer.split_last_chunk::<TRAILER_LEN>() else { return false };
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &footer[..footer.len() - 8]);
        let Some(tag) = body.last_chunk().map(MetadataTag::from_bytes) else { return false };
        trailer.ends_with(&sum.to_le_bytes())
            && (trailer[..8] == MAGIC
                || keys.verify(Context::Footer(number), covered(footer), &tag) == Authenticity::UnknownKey)
    }
}

/// The untrusted trailer of a footer.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Trailer {
    at: u64,
    entries: u32,
    namespaces: u32,
    /// Length of the file in bytes.
    length: u64,
}

impl Trailer {
    /// Offset of the footer, if one with these counts fits there behind its records.
    pub(super) fn start(&self) -> Option<u64> {
        let (entries, namespaces) = (u64::from(self.entries), u64::from(self.namespaces));
        let bytes = RecordList::span(entries, namespaces);
        let older = (entries * ENTRY_LEN as u64 + namespaces * NAMESPACE_LEN as u64 + TRAILER_LEN as u64)
            .next_multiple_of(Access::BLOCK);
        let found = self.length.checked_sub(self.at)?;
        // Footers of versions before tags took a block less in some cases.
        let fits = (found == bytes || found == older) && found <= MAX_BYTES;
        (fits && namespaces <= entries && entries <= self.at / Access::UNIT).then_some(self.at)
    }
}

/// The bytes that a tag covers: all before the tag, and the trailer without the CRC.
fn covered(footer: &[u8]) -> [&[u8]; 2] {
    let trailer = footer.len() - TRAILER_LEN;
    [&footer[..trailer - METADATA_TAG_LEN], &footer[trailer..footer.len() - 8]]
}

fn u64_at(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

fn u32_at(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("callers check the length")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Header;
    use crate::tests::fuzz;
    use crate::tier::conformance::chain;
    use crate::transform::crypt::{Environment, KeySource, Keyring};
    use proptest::prelude::*;
    use std::sync::Arc;

    /// Offset of the footer of [`record_list`].
    const AT: u64 = 6 * 4096;

    fn hash(n: u8) -> SequenceHash {
        SequenceHash::from_bytes([n; 16])
    }

    fn record_list() -> RecordList {
        let mut record_list = RecordList::default();
        for (n, block) in chain(1, 5).into_iter().enumerate() {
            let date = |seconds| Some(Date::from_unix(seconds));
            let retention =
                BlockRetention { expires: date(n as u64 + 7), pinned: date(n as u64 + 3), ..BlockRetention::default() };
            let domain = DomainId::from_bytes([n as u8 / 2; 16]);
            record_list.push(&ParsedRecord::Block(Header { domain, retention, ..block.header }), n as u64 * 4096);
        }
        record_list.push(&ParsedRecord::Tombstone(Fingerprint::from_bytes([3; 32]), hash(4)), 5 * 4096);
        record_list
    }

    #[test]
    fn a_footer_round_trips() {
        let footer = record_list().encode(AT, 1, None);
        assert_eq!(footer.len() as u64 % Access::BLOCK, 0);
        let length = AT + footer.len() as u64;
        assert_eq!(RecordList::locate(&footer, length).and_then(|trailer| trailer.start()), Some(AT));
        assert_eq!(RecordList::decode(&footer, 1, None), Some(record_list()));
    }

    #[tokio::test]
    async fn an_unauthenticated_forged_or_moved_footer_is_rejected() {
        let keys = async |master: &str| {
            let master = master.repeat(32);
            let environment: Environment = Arc::new(move |_| Some(master.clone()));
            let store = Arc::new(object_store::memory::InMemory::new());
            let keys = Keyring::open(store, "", KeySource::Env("KEYS".into()), environment).await.unwrap();
            MetadataKeys::open(keys).await.unwrap()
        };
        let (ours, theirs) = (keys("01").await, keys("02").await);
        let footer = record_list().encode(AT, 7, Some(&ours));
        assert_eq!(RecordList::decode(&footer, 7, Some(&ours)), Some(record_list()));
        assert_eq!(
            RecordList::decode(&footer, 7, None),
            Some(record_list()),
            "without keys there is nothing to verify with"
        );
        assert_eq!(RecordList::decode(&footer, 8, Some(&ours)), None, "another segment's");
        assert_eq!(RecordList::decode(&footer, 7, Some(&theirs)), None, "another key");
        assert_eq!(RecordList::decode(&record_list().encode(AT, 7, None), 7, Some(&ours)), None, "no tag");
        for at in (0..footer.len() - 8).step_by(5) {
            let mut bad = footer.to_vec();
            bad[at] ^= 1;
            assert_eq!(RecordList::decode(&fuzz::summed(bad), 7, Some(&ours)), None, "byte {at}");
        }
    }

    #[test]
    fn a_footer_that_does_not_fit_its_file_is_rejected() {
        let sound = record_list().encode(AT, 1, None).to_vec();
        let trailer = sound.len() - TRAILER_LEN;
        let start = |change: &dyn Fn(&mut Vec<u8>), length: u64| {
            let mut footer = sound.clone();
            change(&mut footer);
            RecordList::locate(&footer, length).and_then(|trailer| trailer.start())
        };
        let length = AT + sound.len() as u64;
        assert_eq!(start(&|_| {}, length), Some(AT));
        // Counts that are too large, and a footer that claims to be the whole file.
        assert_eq!(start(&|footer| footer[trailer + 16..trailer + 20].fill(0xFF), length), None);
        assert_eq!(start(&|footer| footer[trailer + 20..trailer + 24].fill(0xFF), length), None);
        assert_eq!(start(&|footer| footer[trailer + 8..trailer + 16].fill(0), 20 << 30), None);
        assert_eq!(start(&|footer| footer[trailer + 8..trailer + 16].fill(0xFF), length), None);
        // An entry beyond the footer, and one that overlaps another.
        for (at, offset) in [(0, AT), (ENTRY_LEN, 0)] {
            let mut footer = sound.clone();
            footer[at + 32..at + 36].copy_from_slice(&((offset / Access::UNIT) as u32).to_le_bytes());
            assert_eq!(RecordList::decode(&fuzz::summed(footer), 1, None), None);
        }
        let mut footer = sound.clone();
        footer[36..40].fill(0xFF);
        let footer = fuzz::summed(footer);
        fuzz::in_corpus("footer-block-length-maximal", &footer);
        assert_eq!(RecordList::decode(&footer, 1, None), None);
        let mut footer = sound.clone();
        footer[trailer + 16..trailer + 20].fill(0xFF);
        fuzz::in_corpus("footer-entry-count-maximal", &fuzz::summed(footer));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn arbitrary_bytes_decode_within_bounds_or_are_rejected(
            bytes in prop_oneof![
                1 => fuzz::arbitrary(),
                4 => fuzz::changed(record_list().encode(AT, 1, None).to_vec()).prop_map(fuzz::summed),
            ],
        ) {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| RecordList::decode(bytes, 1, None));
            if let Some(record_list) = decoded {
                assert!(record_list.end() <= u64_at(bytes.last_chunk::<TRAILER_LEN>().unwrap(), 8));
            }
        }
    }

    #[test]
    fn corpus_inputs_decode_within_bounds() {
        for (name, bytes) in fuzz::corpus() {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| RecordList::decode(bytes, 1, None));
            assert_eq!(decoded, None, "{name}");
        }
    }

    #[test]
    fn a_footer_does_not_depend_on_the_order_of_records() {
        let records: Vec<_> =
            (0..6).map(|n| (ParsedRecord::Tombstone(Fingerprint::from_bytes([n; 32]), hash(n)), n.into())).collect();
        let footer = |order: &mut dyn Iterator<Item = &(ParsedRecord, u64)>| {
            let mut record_list = RecordList::default();
            order.for_each(|(record, at)| record_list.push(record, at * 4096));
            record_list.sort();
            record_list.encode(0, 1, None).to_vec()
        };
        assert_eq!(footer(&mut records.iter().rev()), footer(&mut records.iter()));
    }

    #[test]
    fn any_flipped_bit_or_truncation_is_detected() {
        let footer = record_list().encode(AT, 1, None);
        for bit in 0..footer.len() * 8 {
            let mut bad = footer.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(RecordList::decode(&bad, 1, None), None, "bit {bit}");
        }
        assert!((0..footer.len()).all(|cut| RecordList::decode(&footer[..cut], 1, None).is_none()));
    }
}
