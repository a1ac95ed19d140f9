//! The header of a stored block: its fields, its encoding, and the checksum.
//!
//! 128 bytes, little endian:
//!
//! | offset | bytes | field |
//! | --: | --: | --- |
//! | 0 | 8 | magic `BLKYARD2`; the last digit is the version |
//! | 8 | 16 | block hash |
//! | 24 | 16 | hash of the parent, zeros at the root |
//! | 40 | 32 | fingerprint |
//! | 72 | 8 | payload length |
//! | 80 | 1 | codec: 0 raw, 1 bf16, 2 f32 |
//! | 81 | 1 | 1 when there is a parent |
//! | 82 | 1 | cipher: 0 none, 1 AES-256-GCM |
//! | 83 | 1 | priority: 0 low, 1 normal, 2 high |
//! | 84 | 4 | expires, seconds since 1970, zero for never |
//! | 88 | 4 | pinned until, seconds since 1970, zero for never |
//! | 92 | 1 | 1 when the block must not be stored below the device |
//! | 93 | 3 | zeros |
//! | 96 | 8 | data key, zeros without a cipher |
//! | 104 | 16 | cache domain, zeros for the shared domain |
//! | 120 | 8 | CRC-64/NVME over bytes 0 to 120 and the payload |

use super::corrupt::Corrupt;
use super::crc::combine;
use super::date::Date;
use super::hash::{DomainId, Fingerprint, SequenceHash};
use super::retention::{BlockAttrs, BlockRetention, Priority};
use crc_fast::{CrcAlgorithm, Digest, checksum};
use std::fmt;

const MAGIC: [u8; 8] = *b"BLKYARD2";
/// Bytes of a header that the checksum covers: all but the checksum itself.
const CHECKSUMMED_LEN: usize = 120;

/// How the payload is encoded.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum Codec {
    /// The engine's bytes as they are.
    #[default]
    Raw,
    /// Two-byte floats, their exponents entropy-coded.
    Bf16,
    /// Four-byte floats, their exponents entropy-coded.
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

/// Public id of the data key that a block is encrypted with.
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct KeyId([u8; 8]);

impl KeyId {
    /// The eight bytes, as in block headers.
    pub const fn as_bytes(&self) -> &[u8; 8] {
        &self.0
    }

    /// An id from a block header, or a random one for a new key.
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

/// Describes a stored block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    /// Hash of the block's content.
    pub hash: SequenceHash,
    /// Hash of the block before it in the sequence; `None` at the root.
    pub parent: Option<SequenceHash>,
    /// Fingerprint of the engine that computed the payload.
    pub fingerprint: Fingerprint,
    /// Payload length in bytes.
    pub length: u64,
    /// Encoding of the payload.
    pub codec: Codec,
    /// Data key of the payload's encryption; `None` for plain text.
    pub key: Option<KeyId>,
    /// Cache domain whose requests may use the block.
    pub domain: DomainId,
    /// When the block expires, until when it is pinned, and its priority.
    pub retention: BlockRetention,
    /// CRC-64/NVME over the other fields and the payload.
    pub checksum: u64,
}

impl Header {
    /// Length of an encoded header in bytes.
    pub const LEN: usize = 128;

    /// Maximum payload length in bytes; blocks of the largest models take some ten MiB. Decoding rejects a header that
    /// claims more, before memory is allocated for the payload. A tier that knows its engine's block size is stricter.
    pub const MAX_LENGTH: u64 = 1 << 30;

    /// The encoded header.
    pub fn encode(&self) -> [u8; Self::LEN] {
        let mut bytes = [0; Self::LEN];
        bytes[..CHECKSUMMED_LEN].copy_from_slice(&self.checksummed());
        bytes[CHECKSUMMED_LEN..].copy_from_slice(&self.checksum.to_le_bytes());
        bytes
    }

    /// Decodes a header. The checksum needs the payload: [`Block::check`](super::Block::check) compares it.
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
            hash: SequenceHash::from_bytes(array(8)),
            parent,
            fingerprint: Fingerprint::from_bytes(std::array::from_fn(|i| bytes[40 + i])),
            length: u64::from_le_bytes(word(72)),
            codec,
            key,
            domain: DomainId::from_bytes(array(104)),
            retention: BlockRetention { expires, pinned, store: bytes[92] == 0, priority },
            checksum: u64::from_le_bytes(word(CHECKSUMMED_LEN)),
        })
    }

    /// Maximum stored length in bytes of an engine's payload of `bytes`. Encryption adds less than two pages, and a
    /// payload that encoding would enlarge is stored raw.
    pub const fn max_stored_bytes(bytes: u64) -> u64 {
        bytes.saturating_add(8 << 10)
    }

    /// Describes a raw payload of an engine.
    pub(crate) fn new(
        hash: SequenceHash,
        parent: Option<SequenceHash>,
        fingerprint: Fingerprint,
        attrs: BlockAttrs,
        payload: &[u8],
    ) -> Self {
        Self::new_while_copying(hash, parent, fingerprint, attrs, payload.len(), |update| update(payload))
    }

    /// Describes a payload of `length` bytes while `copy` copies it: `copy` passes every part, in order, to its
    /// argument, which adds the part to the checksum.
    pub(crate) fn new_while_copying(
        hash: SequenceHash,
        parent: Option<SequenceHash>,
        fingerprint: Fingerprint,
        attrs: BlockAttrs,
        length: usize,
        copy: impl FnOnce(&mut dyn FnMut(&[u8])),
    ) -> Self {
        let (codec, length, BlockAttrs { domain, retention }) = (Codec::Raw, length as u64, attrs);
        let header = Self { hash, parent, fingerprint, length, codec, key: None, domain, retention, checksum: 0 };
        Self { checksum: header.checksum_while_copying(copy), ..header }
    }

    /// Describes a raw payload of `length` bytes whose own checksum is known: its bytes are not read.
    pub(crate) fn of_known_payload(
        hash: SequenceHash,
        parent: Option<SequenceHash>,
        fingerprint: Fingerprint,
        attrs: BlockAttrs,
        (length, payload_checksum): (usize, u64),
    ) -> Self {
        let header = Self::new_while_copying(hash, parent, fingerprint, attrs, length, |_| {});
        // So far the checksum is that of the fields alone.
        Self { checksum: header.checksum_with(header.checksum, payload_checksum), ..header }
    }

    /// The checksum of the payload alone, from that of the fields and the payload.
    pub(crate) fn payload_checksum(&self) -> u64 {
        self.checksum ^ self.checksum_with(checksum(CrcAlgorithm::Crc64Nvme, &self.checksummed()), 0)
    }

    /// The checksum of the fields and the payload, from those of each.
    fn checksum_with(&self, fields: u64, payload: u64) -> u64 {
        combine(fields, payload, self.length)
    }

    /// Checks that this is the requested block of the engine.
    pub(super) fn check_names(&self, hash: SequenceHash, fingerprint: Fingerprint) -> Result<(), Corrupt> {
        if self.hash != hash {
            return Err(Corrupt::OtherBlock);
        }
        if self.fingerprint != fingerprint {
            return Err(Corrupt::OtherFingerprint);
        }
        Ok(())
    }

    /// Domain and retention.
    pub fn attrs(&self) -> BlockAttrs {
        BlockAttrs { domain: self.domain, retention: self.retention }
    }

    /// Whether length and checksum match the payload.
    pub(crate) fn matches(&self, payload: &[u8]) -> bool {
        self.length == payload.len() as u64 && self.checksum == self.checksum_of(payload)
    }

    /// The header with length and checksum of another payload.
    pub(crate) fn for_payload(mut self, payload: &[u8]) -> Self {
        self.length = payload.len() as u64;
        self.checksum = self.checksum_of(payload);
        self
    }

    /// The header with another retention. The payload is not read: its part of the checksum is unchanged, so that a
    /// corrupt payload is still detected.
    pub(crate) fn with_retention(self, retention: BlockRetention) -> Self {
        let changed = Self { retention, ..self };
        let fields = checksum(CrcAlgorithm::Crc64Nvme, &changed.checksummed());
        Self { checksum: self.checksum_with(fields, self.payload_checksum()), ..changed }
    }

    /// The encoded fields that the checksum covers.
    pub(crate) fn checksummed(&self) -> [u8; CHECKSUMMED_LEN] {
        let mut bytes = [0; CHECKSUMMED_LEN];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..24].copy_from_slice(self.hash.as_bytes());
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
        bytes[83] = self.retention.priority as u8;
        bytes[84..88].copy_from_slice(&Date::encode(self.retention.expires).to_le_bytes());
        bytes[88..92].copy_from_slice(&Date::encode(self.retention.pinned).to_le_bytes());
        bytes[92] = u8::from(!self.retention.store);
        bytes[104..CHECKSUMMED_LEN].copy_from_slice(self.domain.as_bytes());
        bytes
    }

    fn checksum_of(&self, payload: &[u8]) -> u64 {
        self.checksum_while_copying(|update| update(payload))
    }

    /// The checksum with a payload that `copy` passes, in order, to its argument.
    pub(super) fn checksum_while_copying(&self, copy: impl FnOnce(&mut dyn FnMut(&[u8]))) -> u64 {
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&self.checksummed());
        copy(&mut |bytes| digest.update(bytes));
        digest.finalize()
    }
}
