//! What a block is: its hash, its header, its bytes, its retention, and the tier in which it rests.
//!
//! This room is the vocabulary of the crate. It imports no other room, and everything in it is a plain value.
//! Not here: where a block lies (`tier`, `pool`), and what happened to it (`event`).
//!
//! A block at rest is a header that describes it, and opaque bytes.
//!
//! The phases of a resting block are types: a [`Block`] is what a tier hands back, believed by nobody; only
//! [`Block::verify`] makes a [`Verified`] of it, and only what was verified is found in device memory. A block may
//! rest encoded, encrypted, or both; its header describes the bytes as they rest, so that a tier can [check](Block::check)
//! what it does not understand, and `verify` believes only the engine's own bytes.
//!
//! Header, 128 bytes, little endian:
//!
//! | offset | bytes | field |
//! | --: | --: | --- |
//! | 0 | 8 | magic `BLKYARD2`; the last digit is the version |
//! | 8 | 16 | name |
//! | 24 | 16 | name of the parent, zeros at the root |
//! | 40 | 32 | fingerprint |
//! | 72 | 8 | payload length |
//! | 80 | 1 | codec: 0 raw, 1 bf16, 2 f32 |
//! | 81 | 1 | 1 when there is a parent |
//! | 82 | 1 | cipher: 0 none, 1 AES-256-GCM |
//! | 83 | 1 | priority: 0 low, 1 normal, 2 high |
//! | 84 | 4 | expires, seconds since 1970, zero for never |
//! | 88 | 4 | pinned until, likewise |
//! | 92 | 1 | 1 when it must not rest anywhere below the device |
//! | 93 | 3 | zeros |
//! | 96 | 8 | data key, zeros without a cipher |
//! | 104 | 16 | cache domain, zeros for the one that everybody shares |
//! | 120 | 8 | CRC-64/NVME over bytes 0 to 120 and the payload |

mod date;
mod hash;
mod level;
mod retention;

pub use date::{Clock, Date};
pub use hash::{ChainKey, Domain, DomainId, Fingerprint, SequenceHash};
pub use level::Level;
pub use retention::{Custody, Keep, Priority, Retention};

use bytes::Bytes;
use crc_fast::{CrcAlgorithm, Digest, checksum, checksum_combine};
use std::fmt;

const MAGIC: [u8; 8] = *b"BLKYARD2";
const SUMMED: usize = 120;

/// How the payload is encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Codec {
    /// The engine's bytes as they are.
    #[default]
    Raw,
    /// Two-byte floats, their exponents entropy-coded.
    Bf16,
    /// Four-byte floats, likewise.
    F32,
}

impl Codec {
    const fn byte(self) -> u8 {
        match self {
            Self::Raw => 0,
            Self::Bf16 => 1,
            Self::F32 => 2,
        }
    }

    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Raw, Self::Bf16, Self::F32].into_iter().find(|codec| codec.byte() == byte)
    }
}

/// The data key that a block is encrypted under, by its public number.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId([u8; 8]);

impl KeyId {
    /// The bytes, as they stand in headers.
    pub const fn as_bytes(&self) -> &[u8; 8] {
        &self.0
    }

    /// A number read back from a header, or drawn.
    pub const fn from_bytes(bytes: [u8; 8]) -> Self {
        Self(bytes)
    }
}

impl fmt::Display for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for KeyId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// What a block at rest says of itself.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Its content.
    pub name: SequenceHash,
    /// The content before it; `None` at the root.
    pub parent: Option<SequenceHash>,
    /// Whose bytes.
    pub fingerprint: Fingerprint,
    /// Payload bytes.
    pub length: u64,
    /// How they are encoded.
    pub codec: Codec,
    /// What they are encrypted under, if they are.
    pub key: Option<KeyId>,
    /// Who may share them.
    pub domain: DomainId,
    /// How long they are kept.
    pub keep: Keep,
    /// CRC-64/NVME over the other fields and the payload.
    pub checksum: u64,
}

impl Header {
    /// Bytes that a header takes at rest.
    pub const LEN: usize = 128;

    /// Bytes of a payload at most: blocks of the largest models take some ten MiB. A header that claims more is refused, before
    /// memory is taken for it; a tier that knows its engine's blocks is stricter.
    pub const MAX_LENGTH: u64 = 1 << 30;

    /// The header at rest.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..SUMMED].copy_from_slice(&self.summed());
        bytes[SUMMED..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// Reads a header; whether its checksum holds is for [`Block::verify`] to say, once the payload is there.
    pub fn decode(bytes: &[u8; Self::LEN]) -> Result<Self, Corrupt> {
        let array = |at: usize| -> [u8; 16] { std::array::from_fn(|i| bytes[at + i]) };
        let word = |at: usize| -> [u8; 8] { std::array::from_fn(|i| bytes[at + i]) };
        let half = |at: usize| u32::from_le_bytes(std::array::from_fn(|i| bytes[at + i]));
        if bytes[..8] != MAGIC || bytes[93..96] != [0; 3] || bytes[81] > 1 || bytes[92] > 1 {
            return Err(Corrupt::Header);
        }
        let priority = [Priority::Low, Priority::Normal, Priority::High];
        let priority = *priority.get(usize::from(bytes[83])).ok_or(Corrupt::Header)?;
        let (expires, pinned) = (Date::decode(half(84)), Date::decode(half(88)));
        let codec = Codec::from_byte(bytes[80]).ok_or(Corrupt::Header)?;
        let key = match (bytes[82], word(96)) {
            (0, [0, 0, 0, 0, 0, 0, 0, 0]) => None,
            (1, key) => Some(KeyId::from_bytes(key)),
            _ => return Err(Corrupt::Header),
        };
        if u64::from_le_bytes(word(72)) > Self::MAX_LENGTH {
            return Err(Corrupt::Header);
        }
        let parent = (bytes[81] == 1).then(|| SequenceHash::from_bytes(array(24)));
        if parent.is_none() && array(24) != [0; 16] {
            return Err(Corrupt::Header);
        }
        Ok(Self {
            name: SequenceHash::from_bytes(array(8)),
            parent,
            fingerprint: Fingerprint::from_bytes(std::array::from_fn(|i| bytes[40 + i])),
            length: u64::from_le_bytes(word(72)),
            codec,
            key,
            domain: DomainId::from_bytes(array(104)),
            keep: Keep { expires, pinned, store: bytes[92] == 0, priority },
            checksum: u64::from_le_bytes(word(SUMMED)),
        })
    }

    /// Bytes that a payload of `bytes` of an engine takes at most in whatever form it rests: encryption adds less than two pages, and
    /// what encoding makes larger stays as it was.
    pub const fn most_at_rest(bytes: u64) -> u64 {
        bytes.saturating_add(8 << 10)
    }

    /// Describes an engine's fresh bytes.
    pub(crate) fn seal(
        name: SequenceHash,
        parent: Option<SequenceHash>,
        fingerprint: Fingerprint,
        custody: Custody,
        payload: &[u8],
    ) -> Self {
        Self::seal_along(name, parent, fingerprint, custody, payload.len(), |seen| seen(payload))
    }

    /// The same while `copy` moves the bytes, `length` of them, and shows them in order.
    pub(crate) fn seal_along(
        name: SequenceHash,
        parent: Option<SequenceHash>,
        fingerprint: Fingerprint,
        custody: Custody,
        length: usize,
        copy: impl FnOnce(&mut dyn FnMut(&[u8])),
    ) -> Self {
        let (codec, length, Custody { domain, keep }) = (Codec::Raw, length as u64, custody);
        let header = Self { name, parent, fingerprint, length, codec, key: None, domain, keep, checksum: 0 };
        Self { checksum: header.sum_along(copy), ..header }
    }

    /// Whose block it is, and how long it is kept.
    pub fn custody(&self) -> Custody {
        Custody { domain: self.domain, keep: self.keep }
    }

    /// Whether these are the bytes that the header was made for.
    pub(crate) fn describes(&self, payload: &[u8]) -> bool {
        self.length == payload.len() as u64 && self.checksum == self.sum(payload)
    }

    /// The same block in other bytes.
    pub(crate) fn describing(mut self, payload: &[u8]) -> Self {
        self.length = payload.len() as u64;
        self.checksum = self.sum(payload);
        self
    }

    /// The same block and bytes, kept otherwise. The payload is not read: its part of the checksum stays what it was, and
    /// bytes that are not what they were stay found out.
    pub(crate) fn kept(self, keep: Keep) -> Self {
        let kept = Self { keep, ..self };
        // A sum is linear: what a change of the header does to it depends on the header, and on how much follows.
        let part = |header: &Self| {
            let sum = checksum(CrcAlgorithm::Crc64Nvme, &header.summed());
            checksum_combine(CrcAlgorithm::Crc64Nvme, sum, 0, self.length)
        };
        Self { checksum: self.checksum ^ part(&self) ^ part(&kept), ..kept }
    }

    /// All that the checksum covers beside the payload.
    pub(crate) fn summed(&self) -> [u8; SUMMED] {
        let mut bytes = [0; SUMMED];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(self.name.as_bytes());
        if let Some(parent) = &self.parent {
            bytes[24..40].copy_from_slice(parent.as_bytes());
            bytes[81] = 1;
        }
        bytes[40..72].copy_from_slice(self.fingerprint.as_bytes());
        bytes[72..80].copy_from_slice(&self.length.to_le_bytes());
        bytes[80] = self.codec.byte();
        if let Some(key) = &self.key {
            bytes[82] = 1;
            bytes[96..104].copy_from_slice(key.as_bytes());
        }
        bytes[83] = self.keep.priority as u8;
        bytes[84..88].copy_from_slice(&Date::encode(self.keep.expires).to_le_bytes());
        bytes[88..92].copy_from_slice(&Date::encode(self.keep.pinned).to_le_bytes());
        bytes[92] = u8::from(!self.keep.store);
        bytes[104..SUMMED].copy_from_slice(self.domain.as_bytes());
        bytes
    }

    fn sum(&self, payload: &[u8]) -> u64 {
        self.sum_along(|seen| seen(payload))
    }

    /// The checksum of a payload that `show` shows in order, while it does with it what it likes.
    fn sum_along(&self, show: impl FnOnce(&mut dyn FnMut(&[u8]))) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&self.summed());
        show(&mut |bytes| digest.update(bytes));
        digest.finalize()
    }
}

/// A block as it travels between tiers. Cloning shares the payload.
#[derive(Clone, Debug)]
pub struct Block {
    /// What it says of itself.
    pub header: Header,
    /// The bytes, encoded as the header says.
    pub payload: Bytes,
}

impl Block {
    /// Describes fresh bytes.
    pub fn seal(name: SequenceHash, parent: Option<SequenceHash>, fingerprint: Fingerprint, payload: Bytes) -> Self {
        Self { header: Header::seal(name, parent, fingerprint, Custody::default(), &payload), payload }
    }

    /// The same block in the given cache domain, described anew.
    #[must_use]
    pub fn in_domain(self, domain: DomainId) -> Self {
        let keep = self.header.keep;
        self.in_custody(Custody { domain, keep })
    }

    /// The same block as another's, or kept for another time, described anew.
    #[must_use]
    pub fn in_custody(self, Custody { domain, keep }: Custody) -> Self {
        let header = Header { domain, keep, ..self.header }.describing(&self.payload);
        Self { header, ..self }
    }

    /// Whether it is the block asked for, and its bytes, whatever they mean, are those that came to rest.
    pub fn check(&self, name: SequenceHash, fingerprint: Fingerprint) -> Result<(), Corrupt> {
        self.check_along(name, fingerprint, |payload, seen| seen(payload))
    }

    fn check_along(
        &self,
        name: SequenceHash,
        fingerprint: Fingerprint,
        copy: impl FnOnce(&[u8], &mut dyn FnMut(&[u8])),
    ) -> Result<(), Corrupt> {
        if self.header.name != name {
            return Err(Corrupt::OtherBlock);
        }
        if self.header.fingerprint != fingerprint {
            return Err(Corrupt::OtherFingerprint);
        }
        if self.header.length != self.payload.len() as u64 {
            return Err(Corrupt::Length);
        }
        if self.header.checksum != self.header.sum_along(|seen| copy(&self.payload, seen)) {
            return Err(Corrupt::Checksum);
        }
        Ok(())
    }

    /// Believes the block if it [checks](Self::check), and its bytes are the engine's own.
    pub fn verify(self, name: SequenceHash, fingerprint: Fingerprint) -> Result<Verified, Corrupt> {
        self.verify_along(name, fingerprint, |payload, seen| seen(payload))
    }

    /// The same while `copy` moves the bytes to where nobody looks before they are believed, and shows them in order.
    pub(crate) fn verify_along(
        self,
        name: SequenceHash,
        fingerprint: Fingerprint,
        copy: impl FnOnce(&[u8], &mut dyn FnMut(&[u8])),
    ) -> Result<Verified, Corrupt> {
        self.check_along(name, fingerprint, copy)?;
        if self.header.codec != Codec::Raw || self.header.key.is_some() {
            return Err(Corrupt::Form);
        }
        Ok(Verified(self))
    }
}

/// A block whose name, fingerprint, length and checksum were all verified, in the engine's own bytes.
#[derive(Clone, Debug)]
pub struct Verified(Block);

impl Verified {
    /// What it says of itself, which is true.
    pub fn header(&self) -> &Header {
        &self.0.header
    }

    /// The engine's bytes.
    pub fn payload(&self) -> &[u8] {
        &self.0.payload
    }
}

/// Why a loaded block is not believed. It is quarantined, counted and recomputed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Corrupt {
    /// The header is not one.
    #[error("not a block header")]
    Header,
    /// It is a sound block, but not the one asked for.
    #[error("hash of another block")]
    OtherBlock,
    /// It is another engine's.
    #[error("another engine's fingerprint")]
    OtherFingerprint,
    /// Too few or too many bytes.
    #[error("wrong payload length")]
    Length,
    /// The bytes changed.
    #[error("checksum does not match")]
    Checksum,
    /// It is encoded or encrypted, and nobody undid it; or it is in clear where everything is to be encrypted.
    #[error("encoding or encryption differs from this tier's")]
    Form,
    /// The encoded bytes do not decode, although their checksum holds.
    #[error("cannot be decoded")]
    Encoding,
    /// The checksum holds, but who wrote the bytes did not know the key.
    #[error("authentication tag does not match")]
    Forged,
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use proptest::prelude::*;

    fn block() -> Block {
        let name = SequenceHash::from_bytes([3; 16]);
        let parent = Some(SequenceHash::from_bytes([2; 16]));
        Block::seal(name, parent, Fingerprint::from_bytes([9; 32]), Bytes::from(vec![5; 300])).in_custody(custody())
    }

    fn custody() -> Custody {
        let date = |seconds| Some(Date::from_unix(seconds));
        let keep = Keep { expires: date(0xF0F1_F2F3), pinned: date(7), store: false, priority: Priority::High };
        Custody { domain: DomainId::from_bytes([6; 16]), keep }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_header_decodes_to_what_it_encodes_or_is_refused(
            bytes in prop_oneof![fuzz::arbitrary(), fuzz::changed(block().header.encode().to_vec())],
        ) {
            let Some(bytes) = bytes.first_chunk() else { return Ok(()) };
            if let Ok(header) = fuzz::bounded(bytes, 1, |_| Header::decode(bytes)) {
                assert!(header.length <= Header::MAX_LENGTH);
                assert_eq!(Header::decode(&header.encode()), Ok(header));
            }
        }
    }

    #[test]
    fn only_the_engines_own_bytes_are_believed() {
        let Block { header, payload } = block();
        let codecs = [(Codec::Bf16, None), (Codec::F32, None), (Codec::Raw, Some(KeyId::from_bytes([7; 8])))];
        for (codec, key) in codecs {
            let header = Header { codec, key, ..header }.describing(&payload);
            assert_eq!(Header::decode(&header.encode()), Ok(header));
            let rests = Block { header, payload: payload.clone() };
            assert_eq!(rests.check(header.name, header.fingerprint), Ok(()));
            assert_eq!(rests.verify(header.name, header.fingerprint).unwrap_err(), Corrupt::Form);
        }
    }

    #[test]
    fn any_flipped_bit_of_header_or_payload_is_detected() {
        let good = block();
        let (name, fingerprint) = (good.header.name, good.header.fingerprint);
        let rest = [&good.header.encode()[..], &good.payload].concat();
        for bit in 0..rest.len() * 8 {
            let mut bad = rest.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            let head: [u8; Header::LEN] = bad[..Header::LEN].try_into().unwrap();
            let verdict = Header::decode(&head).and_then(|header| {
                Block { header, payload: Bytes::copy_from_slice(&bad[Header::LEN..]) }.verify(name, fingerprint)
            });
            assert!(verdict.is_err(), "bit {bit} flipped unseen");
        }
    }

    #[test]
    fn keeping_a_block_longer_describes_it_anew_without_reading_it() {
        for length in [0, 1, 300, 70_000] {
            let payload = Bytes::from(vec![5; length]);
            let block = Block::seal(SequenceHash::from_bytes([3; 16]), None, Fingerprint::from_bytes([9; 32]), payload);
            let kept = block.header.kept(custody().keep);
            assert_eq!(kept, Header { keep: custody().keep, ..block.header }.describing(&block.payload));
            assert_eq!(kept.kept(Keep::default()), block.header);
        }
    }

    #[test]
    fn a_header_of_another_version_is_refused() {
        let mut older = block().header.encode();
        older[7] = b'1';
        assert_eq!(Header::decode(&older), Err(Corrupt::Header));
    }

    #[test]
    fn a_sound_block_survives_its_header_and_nothing_else_passes_for_it() {
        let good = block();
        let (name, fingerprint) = (good.header.name, good.header.fingerprint);
        assert_eq!(Header::decode(&good.header.encode()), Ok(good.header));
        assert_eq!(good.header.custody(), custody());
        assert!(good.clone().verify(name, fingerprint).is_ok());
        let other = SequenceHash::from_bytes([4; 16]);
        assert_eq!(good.clone().verify(other, fingerprint).unwrap_err(), Corrupt::OtherBlock);
        let foreign = Fingerprint::from_bytes([8; 32]);
        assert_eq!(good.clone().verify(name, foreign).unwrap_err(), Corrupt::OtherFingerprint);
        let short = Block { payload: good.payload.slice(1..), ..good };
        assert_eq!(short.verify(name, fingerprint).unwrap_err(), Corrupt::Length);
    }
}
