//! Encryption and decryption of one block under a key of its own. Synchronous and CPU-bound.
//!
//! Payload of an encrypted block: 24 random bytes, the ciphertext, and its tag of 16 bytes. The plaintext is, little
//! endian: the payload, padding, the payload's length (8 bytes), and the checksum of the original block (8 bytes). The
//! associated data is the header without its checksum.

use super::KeyError;
use crate::block::{Block, Codec, Corrupt, Header, KeyId};
use crate::transform::Buffers;
use ring::aead::{AES_256_GCM, Aad, LessSafeKey, NONCE_LEN, Nonce, UnboundKey};
use ring::rand::{SecureRandom, SystemRandom};
use std::sync::Arc;

const SALT: usize = 24;
const TAG: usize = 16;
const TRAILER: usize = 16;

/// Encoded blocks are padded to a multiple of this, as exact lengths would reveal something about their content. Raw
/// blocks all have the same length.
const PAD: usize = 4096;

/// A key from which the keys of blocks are derived.
pub(super) struct DataKey {
    id: KeyId,
    secret: [u8; 32],
}

impl DataKey {
    pub(super) fn new(id: KeyId, secret: [u8; 32]) -> Self {
        Self { id, secret }
    }

    /// A new key.
    pub(super) fn random() -> Result<Self, KeyError> {
        Ok(Self { id: KeyId::from_bytes(random()?), secret: random()? })
    }

    pub(super) fn id(&self) -> KeyId {
        self.id
    }

    pub(super) fn secret(&self) -> &[u8; 32] {
        &self.secret
    }

    pub(super) fn encrypt(&self, block: &Block, buffers: &Arc<Buffers>) -> Result<Block, KeyError> {
        Ok(self.encrypt_with(random()?, block, buffers))
    }

    fn encrypt_with(&self, salt: [u8; SALT], block: &Block, buffers: &Arc<Buffers>) -> Block {
        let Block { header, payload } = block;
        let padding = match header.codec {
            Codec::Raw => 0,
            Codec::Bf16 | Codec::F32 => (payload.len() + TRAILER).next_multiple_of(PAD) - payload.len() - TRAILER,
        };
        let length = SALT + payload.len() + padding + TRAILER + TAG;
        let mut bytes = buffers.take(length);
        bytes.clear();
        bytes.extend_from_slice(&salt);
        bytes.extend_from_slice(payload);
        bytes.resize(SALT + payload.len() + padding, 0);
        bytes.extend_from_slice(&header.length.to_le_bytes());
        bytes.extend_from_slice(&header.checksum.to_le_bytes());
        let header = Header { key: Some(self.id), length: length as u64, ..*header };
        let sealed = self.block_key(&salt).seal_in_place_separate_tag(zero_nonce(), aad(&header), &mut bytes[SALT..]);
        let tag = sealed.expect("a block is shorter than 64 GiB");
        bytes.extend_from_slice(tag.as_ref());
        Block { header: header.for_payload(&bytes), payload: bytes.freeze() }
    }

    /// The block as it was before it was encrypted, with its checksum of then.
    pub(super) fn decrypt(&self, block: &Block, buffers: &Arc<Buffers>) -> Result<Block, Corrupt> {
        let (salt, ciphertext) = block.payload.split_first_chunk::<SALT>().ok_or(Corrupt::Length)?;
        let mut bytes = buffers.take(ciphertext.len());
        bytes.clear();
        bytes.extend_from_slice(ciphertext);
        let opened = self.block_key(salt).open_in_place(zero_nonce(), aad(&block.header), &mut bytes);
        let plain = opened.map_err(|_| Corrupt::Forged)?;
        let (payload, trailer) = plain.split_last_chunk::<TRAILER>().ok_or(Corrupt::Length)?;
        let word = |at: usize| u64::from_le_bytes(std::array::from_fn(|i| trailer[at + i]));
        let (length, checksum) = (word(0), word(8));
        if length > payload.len() as u64 {
            return Err(Corrupt::Length);
        }
        bytes.truncate(length as usize);
        let header = Header { key: None, length, checksum, ..block.header };
        Ok(Block { header, payload: bytes.freeze() })
    }

    fn block_key(&self, salt: &[u8; SALT]) -> LessSafeKey {
        aes(blake3::keyed_hash(&self.secret, salt).as_bytes())
    }
}

pub(super) fn aes(key: &[u8; 32]) -> LessSafeKey {
    LessSafeKey::new(UnboundKey::new(&AES_256_GCM, key).expect("a key of 32 bytes"))
}

/// Random bytes from the operating system, for secrets.
pub(super) fn random<const N: usize>() -> Result<[u8; N], KeyError> {
    let mut bytes = [0; N];
    SystemRandom::new().fill(&mut bytes).map_err(|_| KeyError::Random)?;
    Ok(bytes)
}

/// The nonce of the only message under a key.
fn zero_nonce() -> Nonce {
    Nonce::assume_unique_for_key([0; NONCE_LEN])
}

fn aad(header: &Header) -> Aad<impl AsRef<[u8]>> {
    Aad::from(header.checksummed())
}

#[cfg(test)]
mod tests {
    use super::super::key_source::unhex;
    use super::*;
    use crate::block::{BlockRetention, Date, DomainId, SequenceHash};
    use crate::tier::conformance::{chain, fingerprint};
    use bytes::Bytes;

    fn key() -> DataKey {
        DataKey::new(KeyId::from_bytes([1; 8]), [2; 32])
    }

    /// Decrypts a changed block with a correct checksum, as a forger would make it.
    fn forged(key: &DataKey, header: Header, payload: impl Into<Bytes>) -> Result<Block, Corrupt> {
        let payload = payload.into();
        key.decrypt(&Block { header: header.for_payload(&payload), payload }, &Arc::default())
    }

    #[test]
    fn a_block_comes_back_and_its_ciphertext_is_never_the_same() {
        let key = key();
        let block = chain(1, 1).remove(0);
        let (one, other) =
            (key.encrypt(&block, &Arc::default()).unwrap(), key.encrypt(&block, &Arc::default()).unwrap());
        assert_ne!(one.payload[SALT..SALT + 64], other.payload[SALT..SALT + 64]);
        for encrypted in [one, other] {
            assert_eq!(encrypted.check(block.header.hash, fingerprint()), Ok(()));
            let back = key.decrypt(&encrypted, &Arc::default()).unwrap();
            assert_eq!((back.header, back.payload), (block.header, block.payload.clone()));
        }
    }

    #[test]
    fn the_format_is_stable() {
        // The bytes were computed with an independent implementation of BLAKE3 and AES-256-GCM.
        let hash = SequenceHash::from_bytes([3; 16]);
        let block = Block::new(hash, None, fingerprint(), Bytes::from_static(b"kv"));
        let encrypted = key().encrypt_with([4; SALT], &block, &Arc::default());
        let found: [u8; 34] = encrypted.payload[SALT..].try_into().unwrap();
        assert_eq!(Some(found), unhex("1ab792e3971ea4b6d30b29c7e87ba783e60503187acfe8a0b46ca45f095d8b99dffc"));
    }

    #[test]
    fn any_forged_byte_or_header_field_is_detected() {
        let key = key();
        let block = chain(1, 1).remove(0);
        let Block { header, payload } = key.encrypt(&block, &Arc::default()).unwrap();
        for at in 0..payload.len() {
            let mut bytes = payload.to_vec();
            bytes[at] ^= 1 << (at % 8);
            assert_eq!(forged(&key, header, bytes).unwrap_err(), Corrupt::Forged, "byte {at}");
        }
        let hash = SequenceHash::from_bytes([9; 16]);
        let headers = [
            Header { hash, ..header },
            Header { parent: Some(hash), ..header },
            Header { fingerprint: crate::block::Fingerprint::from_bytes([0; 32]), ..header },
            Header { codec: Codec::Bf16, ..header },
            Header { key: Some(KeyId::from_bytes([7; 8])), ..header },
            Header { domain: DomainId::from_bytes([7; 16]), ..header },
            Header { retention: BlockRetention { expires: Some(Date::from_unix(9)), ..header.retention }, ..header },
        ];
        for changed in headers {
            assert_eq!(forged(&key, changed, payload.clone()).unwrap_err(), Corrupt::Forged, "{changed:?}");
        }
        for length in (0..payload.len()).step_by(7) {
            assert!(forged(&key, header, payload.slice(..length)).is_err(), "{length} bytes left");
        }
        let other = DataKey::new(key.id, [8; 32]);
        assert_eq!(forged(&other, header, payload).unwrap_err(), Corrupt::Forged, "another key");
    }

    #[test]
    fn encoded_blocks_are_padded() {
        let block = chain(1, 1).remove(0);
        let header = Header { codec: Codec::Bf16, ..block.header }.for_payload(&block.payload);
        let encoded = Block { header, ..block };
        let encrypted = key().encrypt(&encoded, &Arc::default()).unwrap();
        assert_eq!((encrypted.payload.len() - SALT - TAG) % PAD, 0);
        assert_eq!(key().decrypt(&encrypted, &Arc::default()).unwrap().payload, encoded.payload);
    }
}
