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
//! | 32 | trailer: magic `BLKYFOO4`, footer's offset 8, n 4, m 4, CRC-64/NVME over the footer before it 8 |
//!
//! 52 bytes a block: a million of them are read back in one stretch of 52 MB.

use super::direct::{Access, Buffer};
use super::record::{self, Found};
use crate::{Date, DomainId, Fingerprint, Keep, SequenceHash};
use crc_fast::{CrcAlgorithm, checksum};

const MAGIC: [u8; 8] = *b"BLKYFOO4";
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
        let known = self.owners.iter().rposition(|known| *known == owner);
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

    /// Bytes of the footer of a segment with `entries` records of so many owners.
    pub(super) fn footer_span(entries: usize, owners: usize) -> u64 {
        ((entries * ENTRY + owners * OWNER + TRAILER) as u64).next_multiple_of(Access::BLOCK)
    }

    /// The footer that will stand at byte `at`.
    pub(super) fn encode(&self, at: u64) -> Buffer {
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
        footer[trailer..trailer + 8].copy_from_slice(&MAGIC);
        footer[trailer + 8..trailer + 16].copy_from_slice(&at.to_le_bytes());
        footer[trailer + 16..trailer + 20].copy_from_slice(&(self.entries.len() as u32).to_le_bytes());
        footer[trailer + 20..trailer + 24].copy_from_slice(&(self.owners.len() as u32).to_le_bytes());
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &footer[..span - 8]);
        footer[span - 8..].copy_from_slice(&sum.to_le_bytes());
        footer
    }

    /// Whether `bytes` begin as the footer of these records does. Some of the first may be lost.
    pub(super) fn begins(&self, bytes: &[u8]) -> bool {
        self.entries.iter().take(Self::FIRST).any(|entry| bytes.starts_with(entry.name.as_bytes()))
    }

    /// Where the footer of a file of `length` bytes begins, if `tail`, the last bytes of the file, ends in a trailer.
    pub(super) fn locate(tail: &[u8], length: u64) -> Option<u64> {
        let trailer = tail.last_chunk::<TRAILER>()?;
        let at = word(trailer, 8);
        (trailer[..8] == MAGIC && at <= length.checked_sub(TRAILER as u64)?).then_some(at)
    }

    /// Reads a footer; `None` when anything about it is not as it was written.
    pub(super) fn decode(footer: &[u8]) -> Option<Self> {
        let trailer = footer.last_chunk::<TRAILER>()?;
        let (body, sum) = footer.split_at(footer.len() - 8);
        if trailer[..8] != MAGIC || checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != sum {
            return None;
        }
        let (entries, owners) = (half(trailer, 16) as usize, half(trailer, 20) as usize);
        if entries * ENTRY + owners * OWNER + TRAILER > footer.len() {
            return None;
        }
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
        let entries = entries.chunks_exact(ENTRY).map(entry).collect::<Option<_>>()?;
        Some(Self { owners, entries })
    }
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
    use crate::Header;
    use crate::contract::chain;

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
        let footer = listing().encode(8192);
        assert_eq!(footer.len() as u64 % Access::BLOCK, 0);
        let length = 8192 + footer.len() as u64;
        assert_eq!(Listing::locate(&footer, length), Some(8192));
        assert_eq!(Listing::decode(&footer), Some(listing()));
    }

    #[test]
    fn a_footer_is_the_same_in_whatever_order_records_came() {
        let records: Vec<_> =
            (0..6).map(|n| (Found::Gone(Fingerprint::from_bytes([n; 32]), name(n)), n.into())).collect();
        let footer = |order: &mut dyn Iterator<Item = &(Found, u64)>| {
            let mut listing = Listing::default();
            order.for_each(|(record, at)| listing.push(record, at * 4096));
            listing.sort();
            listing.encode(0).to_vec()
        };
        assert_eq!(footer(&mut records.iter().rev()), footer(&mut records.iter()));
    }

    #[test]
    fn any_flipped_bit_and_any_cut_is_seen() {
        let footer = listing().encode(0);
        for bit in 0..footer.len() * 8 {
            let mut bad = footer.to_vec();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(Listing::decode(&bad), None, "bit {bit}");
        }
        assert!((0..footer.len()).all(|cut| Listing::decode(&footer[..cut]).is_none()));
    }
}
