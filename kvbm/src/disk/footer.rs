//! What lies in a segment, and the footer that says so once the segment is sealed.
//!
//! Footer, little endian, at the next multiple of 4,096 after the last record, up to the end of the file:
//!
//! | bytes | field |
//! | --: | --- |
//! | 52 × n | entries: name 16, parent 16, offset in units of 512 4, payload length 4, owner's number 3, kind 1, expires 4, |
//! |        | pinned until 4: as in the block's header |
//! | 48 × m | owners, numbered from 0: fingerprint 32, cache domain 16 |
//! | … | zeros, so that the footer ends at a multiple of 4,096 |
//! | 40 | only in a sealed footer, whose magic is `BLKYFOO5`: number of the metadata key 8, tag 32 |
//! | 32 | trailer: magic `BLKYFOO4`, footer's offset 8, n 4, m 4, CRC-64/NVME over the footer before it 8 |
//!
//! 52 bytes a block: a million of them are read back in one stretch of 52 MB.
//!
//! A footer is sealed where blocks are encrypted; there, one without a sound seal counts as damaged, and its segment is scanned.
//! The tag covers the segment's number, the footer before the seal, and the trailer before the CRC.
//!
//! Of a trailer nothing is believed: a footer has exactly the length that its counts call for, ends with the file, and its records
//! lie before it, one after the other. Memory is taken only for entries that are there.

use super::direct::{Access, Buffer};
use super::record::{self, Found};
use crate::block::{Date, DomainId, Fingerprint, Keep, SequenceHash};
use crate::transform::crypt::{Authenticity, Context, MetadataKeys, SEAL, Seal};
use crc_fast::{CrcAlgorithm, checksum};

const MAGIC: [u8; 8] = *b"BLKYFOO4";
const SEALED: [u8; 8] = *b"BLKYFOO5";
/// Bytes of a footer at most: of a segment of 128 MiB with the smallest blocks it takes 26 MB.
const MAX_BYTES: u64 = 64 << 20;
/// Owners that a new record's is looked for among. More of them may be listed twice, which costs 48 bytes each.
const RECENT: usize = 256;
const ENTRY: usize = 52;
const OWNER: usize = 48;
const TRAILER: usize = 32;

/// Whose bytes a block has, and who may share it.
type Owner = (Fingerprint, DomainId);

/// One record of a segment.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Entry {
    pub(super) name: SequenceHash,
    pub(super) parent: Option<SequenceHash>,
    /// Discarded: earlier records of the block no longer count.
    pub(super) gone: bool,
    /// In units of [`Access::UNIT`].
    pub(super) offset: u32,
    /// Payload bytes.
    pub(super) length: u32,
    /// A miss from then on.
    pub(super) expires: Option<Date>,
    /// Carried over before.
    pub(super) pinned: Option<Date>,
    /// Which of the listing's owners.
    owner: u32,
}

impl Entry {
    /// As far as it stands in a footer.
    pub(super) fn keep(&self) -> Keep {
        Keep { expires: self.expires, pinned: self.pinned, ..Keep::default() }
    }
}

/// All records of a segment.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct Listing {
    owners: Vec<Owner>,
    entries: Vec<Entry>,
}

impl Listing {
    /// How many of the first records are looked for where a footer may begin: enough that damage to one does not hide it.
    const FIRST: usize = 8;

    /// Adds a record at a byte offset; records may come in any order.
    pub(super) fn push(&mut self, record: &Found, offset: u64) {
        let (owner, name, parent, length, gone) = match record {
            Found::Block(header) => {
                ((header.fingerprint, header.domain), header.name, header.parent, header.length as u32, false)
            }
            Found::Gone(fingerprint, name) => ((*fingerprint, DomainId::SHARED), *name, None, 0, true),
        };
        let keep = if let Found::Block(header) = record { header.keep } else { Keep::default() };
        let Keep { expires, pinned, .. } = keep;
        // Mostly the last one's.
        let first = self.owners.len().saturating_sub(RECENT);
        let known = self.owners[first..].iter().rposition(|known| *known == owner).map(|at| first + at);
        let owner = known.unwrap_or_else(|| {
            self.owners.push(owner);
            self.owners.len() - 1
        }) as u32;
        let offset = (offset / Access::UNIT) as u32;
        self.entries.push(Entry { name, parent, gone, offset, length, expires, pinned, owner });
    }

    /// By place, and owners numbered as they come: as who scans the segment finds them.
    pub(super) fn sort(&mut self) {
        self.entries.sort_unstable_by_key(|entry| entry.offset);
        let owners = std::mem::take(&mut self.owners);
        let mut numbers = vec![None; owners.len()];
        for entry in &mut self.entries {
            let owner = entry.owner as usize;
            entry.owner = *numbers[owner].get_or_insert_with(|| {
                self.owners.push(owners[owner]);
                self.owners.len() as u32 - 1
            });
        }
    }

    /// The records with their fingerprints.
    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = (Fingerprint, &Entry)> + ExactSizeIterator {
        self.entries.iter().map(|entry| (self.owners[entry.owner as usize].0, entry))
    }

    /// The records with their domains, which discards do not say, and their fingerprints.
    pub(super) fn records(&self) -> impl Iterator<Item = (DomainId, Fingerprint, &Entry)> {
        self.entries.iter().map(|entry| {
            let (fingerprint, domain) = self.owners[entry.owner as usize];
            (domain, fingerprint, entry)
        })
    }

    pub(super) fn len(&self) -> usize {
        self.entries.len()
    }

    /// Where the last record ends, at most.
    pub(super) fn end(&self) -> u64 {
        let end = |e: &Entry| u64::from(e.offset) * Access::UNIT + record::span(u64::from(e.length), Access::UNIT);
        self.entries.iter().map(end).max().unwrap_or(0)
    }

    /// Bytes of the footer of a segment with `entries` records of so many owners, sealed or not.
    pub(super) fn footer_span(entries: usize, owners: usize) -> u64 {
        Self::span(entries as u64, owners as u64)
    }

    fn span(entries: u64, owners: u64) -> u64 {
        (entries * ENTRY as u64 + owners * OWNER as u64 + (SEAL + TRAILER) as u64).next_multiple_of(Access::BLOCK)
    }

    /// The footer of segment `number` that will stand at byte `at`, sealed if there is a key to do so.
    pub(super) fn encode(&self, at: u64, number: u32, keys: Option<&MetadataKeys>) -> Buffer {
        let span = Self::footer_span(self.entries.len(), self.owners.len()) as usize;
        let mut footer = Buffer::zeroed(span);
        let (entries, rest) = footer.split_at_mut(self.entries.len() * ENTRY);
        for (to, entry) in entries.chunks_exact_mut(ENTRY).zip(&self.entries) {
            to[..16].copy_from_slice(entry.name.as_bytes());
            if let Some(parent) = &entry.parent {
                to[16..32].copy_from_slice(parent.as_bytes());
            }
            to[32..36].copy_from_slice(&entry.offset.to_le_bytes());
            to[36..40].copy_from_slice(&entry.length.to_le_bytes());
            to[40..43].copy_from_slice(&entry.owner.to_le_bytes()[..3]);
            to[43] = if entry.gone { 2 } else { u8::from(entry.parent.is_some()) };
            to[44..48].copy_from_slice(&Date::encode(entry.expires).to_le_bytes());
            to[48..52].copy_from_slice(&Date::encode(entry.pinned).to_le_bytes());
        }
        for (to, (fingerprint, domain)) in rest.chunks_exact_mut(OWNER).zip(&self.owners) {
            to[..32].copy_from_slice(fingerprint.as_bytes());
            to[32..].copy_from_slice(domain.as_bytes());
        }
        let trailer = span - TRAILER;
        footer[trailer..trailer + 8].copy_from_slice(if keys.is_some() { &SEALED } else { &MAGIC });
        footer[trailer + 8..trailer + 16].copy_from_slice(&at.to_le_bytes());
        footer[trailer + 16..trailer + 20].copy_from_slice(&(self.entries.len() as u32).to_le_bytes());
        footer[trailer + 20..trailer + 24].copy_from_slice(&(self.owners.len() as u32).to_le_bytes());
        if let Some(keys) = keys {
            match keys.seal(Context::Footer(number), covered(&footer)) {
                Some(seal) => footer[trailer - SEAL..trailer].copy_from_slice(&seal.to_bytes()),
                // No reader that wants a seal will take it, and no other is misled.
                None => footer[trailer..trailer + 8].copy_from_slice(&MAGIC),
            }
        }
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &footer[..span - 8]);
        footer[span - 8..].copy_from_slice(&sum.to_le_bytes());
        footer
    }

    /// Whether `bytes` begin as the footer of these records does. Some of the first may be lost.
    pub(super) fn begins(&self, bytes: &[u8]) -> bool {
        self.entries.iter().take(Self::FIRST).any(|entry| bytes.starts_with(entry.name.as_bytes()))
    }

    /// What the trailer says, if `tail`, the last bytes of a file of `length` bytes, ends in one.
    pub(super) fn locate(tail: &[u8], length: u64) -> Option<Trailer> {
        let trailer = tail.last_chunk::<TRAILER>()?;
        (trailer[..8] == MAGIC || trailer[..8] == SEALED).then_some(())?;
        Some(Trailer { at: word(trailer, 8), entries: half(trailer, 16), owners: half(trailer, 20), length })
    }

    /// Reads the footer of segment `number`; `None` when anything about it is not as it was written, or when there are `keys` and it
    /// was not sealed by one of them.
    pub(super) fn decode(footer: &[u8], number: u32, keys: Option<&MetadataKeys>) -> Option<Self> {
        let trailer = footer.last_chunk::<TRAILER>()?;
        let (body, sum) = footer.split_at(footer.len() - 8);
        if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != sum {
            return None;
        }
        let sealed = trailer[..8] == SEALED;
        if let Some(keys) = keys {
            let (body, _) = footer.split_last_chunk::<TRAILER>()?;
            let seal = Seal::from_bytes(body.last_chunk().filter(|_| sealed)?);
            if keys.verify(Context::Footer(number), covered(footer), &seal) != Authenticity::Authentic {
                return None;
            }
        }
        let at = word(trailer, 8);
        let length = at.checked_add(footer.len() as u64)?;
        Self::locate(footer, length)?.start()?;
        let (entries, owners) = (half(trailer, 16) as usize, half(trailer, 20) as usize);
        let (entries, rest) = footer.split_at(entries * ENTRY);
        let owner = |bytes: &[u8]| {
            (Fingerprint::from_bytes(std::array::from_fn(|i| bytes[i])), DomainId::from_bytes(array(bytes, 32)))
        };
        let owners: Vec<Owner> = rest.chunks_exact(OWNER).take(owners).map(owner).collect();
        let entry = |bytes: &[u8]| {
            let name = |at: usize| SequenceHash::from_bytes(array(bytes, at));
            let owner = u32::from_le_bytes([bytes[40], bytes[41], bytes[42], 0]);
            ((owner as usize) < owners.len() && bytes[43] <= 2).then(|| Entry {
                name: name(0),
                parent: (bytes[43] == 1).then(|| name(16)),
                gone: bytes[43] == 2,
                offset: half(bytes, 32),
                length: half(bytes, 36),
                expires: Date::decode(half(bytes, 44)),
                pinned: Date::decode(half(bytes, 48)),
                owner,
            })
        };
        // `collect` of an `Option` would not know how many there are.
        let mut listed = Vec::with_capacity(entries.len() / ENTRY);
        let mut end = 0;
        for bytes in entries.chunks_exact(ENTRY) {
            let entry = entry(bytes)?;
            let start = u64::from(entry.offset) * Access::UNIT;
            if start < end {
                return None;
            }
            end = start + record::span(u64::from(entry.length), Access::UNIT);
            listed.push(entry);
        }
        (end <= at).then_some(Self { owners, entries: listed })
    }
}

/// What the trailer of a footer says. Nothing of it is believed.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Trailer {
    at: u64,
    entries: u32,
    owners: u32,
    /// Of the file.
    length: u64,
}

impl Trailer {
    /// Where the footer begins, if one of that many entries and owners can stand there, and its records before it.
    pub(super) fn start(&self) -> Option<u64> {
        let (entries, owners) = (u64::from(self.entries), u64::from(self.owners));
        let bytes = Listing::span(entries, owners);
        let older = (entries * ENTRY as u64 + owners * OWNER as u64 + TRAILER as u64).next_multiple_of(Access::BLOCK);
        let found = self.length.checked_sub(self.at)?;
        // Before footers could be sealed, some took a block less.
        let fits = (found == bytes || found == older) && found <= MAX_BYTES;
        (fits && owners <= entries && entries <= self.at / Access::UNIT).then_some(self.at)
    }
}

/// What a seal covers of a footer, which has room for one: all before the seal, and of the trailer all but the CRC.
fn covered(footer: &[u8]) -> [&[u8]; 2] {
    let trailer = footer.len() - TRAILER;
    [&footer[..trailer - SEAL], &footer[trailer..footer.len() - 8]]
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

fn half(bytes: &[u8], at: usize) -> u32 {
    u32::from_le_bytes(array(bytes, at))
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    *bytes[at..].first_chunk().expect("callers know how much there is")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::block::Header;
    use crate::tests::fuzz;
    use crate::tier::conformance::chain;
    use crate::transform::crypt::{Environment, KeySource, Keys};
    use proptest::prelude::*;
    use std::sync::Arc;

    /// Where the footer of [`listing`] stands.
    const AT: u64 = 6 * 4096;

    fn name(n: u8) -> SequenceHash {
        SequenceHash::from_bytes([n; 16])
    }

    fn listing() -> Listing {
        let mut listing = Listing::default();
        for (n, block) in chain(1, 5).into_iter().enumerate() {
            let date = |seconds| Some(Date::from_unix(seconds));
            let keep = Keep { expires: date(n as u64 + 7), pinned: date(n as u64 + 3), ..Keep::default() };
            let domain = DomainId::from_bytes([n as u8 / 2; 16]);
            listing.push(&Found::Block(Header { domain, keep, ..block.header }), n as u64 * 4096);
        }
        listing.push(&Found::Gone(Fingerprint::from_bytes([3; 32]), name(4)), 5 * 4096);
        listing
    }

    #[test]
    fn a_footer_says_what_the_listing_said() {
        let footer = listing().encode(AT, 1, None);
        assert_eq!(footer.len() as u64 % Access::BLOCK, 0);
        let length = AT + footer.len() as u64;
        assert_eq!(Listing::locate(&footer, length).and_then(|trailer| trailer.start()), Some(AT));
        assert_eq!(Listing::decode(&footer, 1, None), Some(listing()));
    }

    #[tokio::test]
    async fn an_unsealed_forged_or_moved_footer_is_refused() {
        let keys = async |master: &str| {
            let master = master.repeat(32);
            let environment: Environment = Arc::new(move |_| Some(master.clone()));
            let store = Arc::new(object_store::memory::InMemory::new());
            let keys = Keys::open(store, "", KeySource::Env("KEYS".into()), environment).await.unwrap();
            MetadataKeys::open(keys).await.unwrap()
        };
        let (ours, theirs) = (keys("01").await, keys("02").await);
        let sealed = listing().encode(AT, 7, Some(&ours));
        assert_eq!(Listing::decode(&sealed, 7, Some(&ours)), Some(listing()));
        assert_eq!(Listing::decode(&sealed, 7, None), Some(listing()), "without keys there is nothing to verify with");
        assert_eq!(Listing::decode(&sealed, 8, Some(&ours)), None, "another segment's");
        assert_eq!(Listing::decode(&sealed, 7, Some(&theirs)), None, "another key");
        assert_eq!(Listing::decode(&listing().encode(AT, 7, None), 7, Some(&ours)), None, "no seal");
        for at in (0..sealed.len() - 8).step_by(5) {
            let mut bad = sealed.to_vec();
            bad[at] ^= 1;
            assert_eq!(Listing::decode(&fuzz::summed(bad), 7, Some(&ours)), None, "byte {at}");
        }
    }

    #[test]
    fn a_footer_that_does_not_fit_its_file_is_refused() {
        let sound = listing().encode(AT, 1, None).to_vec();
        let trailer = sound.len() - TRAILER;
        let start = |change: &dyn Fn(&mut Vec<u8>), length: u64| {
            let mut footer = sound.clone();
            change(&mut footer);
            Listing::locate(&footer, length).and_then(|trailer| trailer.start())
        };
        let length = AT + sound.len() as u64;
        assert_eq!(start(&|_| {}, length), Some(AT));
        // The counts of the issue, and a footer that would be the whole file.
        assert_eq!(start(&|footer| footer[trailer + 16..trailer + 20].fill(0xFF), length), None);
        assert_eq!(start(&|footer| footer[trailer + 20..trailer + 24].fill(0xFF), length), None);
        assert_eq!(start(&|footer| footer[trailer + 8..trailer + 16].fill(0), 20 << 30), None);
        assert_eq!(start(&|footer| footer[trailer + 8..trailer + 16].fill(0xFF), length), None);
        // An entry beyond the footer, and one upon another.
        for (at, offset) in [(0, AT), (ENTRY, 0)] {
            let mut footer = sound.clone();
            footer[at + 32..at + 36].copy_from_slice(&((offset / Access::UNIT) as u32).to_le_bytes());
            assert_eq!(Listing::decode(&fuzz::summed(footer), 1, None), None);
        }
        let mut footer = sound.clone();
        footer[36..40].fill(0xFF);
        let footer = fuzz::summed(footer);
        fuzz::in_corpus("footer-block-length-maximal", &footer);
        assert_eq!(Listing::decode(&footer, 1, None), None);
        let mut footer = sound.clone();
        footer[trailer + 16..trailer + 20].fill(0xFF);
        fuzz::in_corpus("footer-entry-count-maximal", &fuzz::summed(footer));
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_decode_within_bounds_or_are_refused(
            bytes in prop_oneof![
                1 => fuzz::arbitrary(),
                4 => fuzz::changed(listing().encode(AT, 1, None).to_vec()).prop_map(fuzz::summed),
            ],
        ) {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| Listing::decode(bytes, 1, None));
            if let Some(listing) = decoded {
                assert!(listing.end() <= word(bytes.last_chunk::<TRAILER>().unwrap(), 8));
            }
        }
    }

    #[test]
    fn corpus_inputs_decode_within_bounds() {
        for (name, bytes) in fuzz::corpus() {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| Listing::decode(bytes, 1, None));
            assert_eq!(decoded, None, "{name}");
        }
    }

    #[test]
    fn a_footer_is_the_same_in_whatever_order_records_came() {
        let records: Vec<_> =
            (0..6).map(|n| (Found::Gone(Fingerprint::from_bytes([n; 32]), name(n)), n.into())).collect();
        let footer = |order: &mut dyn Iterator<Item = &(Found, u64)>| {
            let mut listing = Listing::default();
            order.for_each(|(record, at)| listing.push(record, at * 4096));
            listing.sort();
            listing.encode(0, 1, None).to_vec()
        };
        assert_eq!(footer(&mut records.iter().rev()), footer(&mut records.iter()));
    }

    #[test]
    fn any_flipped_bit_and_any_cut_is_seen() {
        let footer = listing().encode(AT, 1, None);
        for bit in 0..footer.len() * 8 {
            let mut bad = footer.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Listing::decode(&bad, 1, None), None, "bit {bit}");
        }
        assert!((0..footer.len()).all(|cut| Listing::decode(&footer[..cut], 1, None).is_none()));
    }
}
