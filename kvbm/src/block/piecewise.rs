//! The verification of a block whose payload arrives in pieces, each while it is in the processor's cache.

use super::corrupt::Corrupt;
use super::hash::{Fingerprint, SequenceHash};
use super::header::{Codec, Header};
use crc_fast::{CrcAlgorithm, Digest};

/// Verifies a block in the engine's own format, piece by piece.
#[derive(Clone, Debug)]
pub struct PieceVerifier {
    header: Header,
    digest: Digest,
    length: u64,
}

impl PieceVerifier {
    /// Begins with a header, which must be that of the requested block.
    pub fn new(header: &Header, hash: SequenceHash, fingerprint: Fingerprint) -> Result<Self, Corrupt> {
        header.check_names(hash, fingerprint)?;
        if header.codec != Codec::Raw || header.key.is_some() {
            return Err(Corrupt::Transform);
        }
        let mut digest = Digest::new(CrcAlgorithm::Crc64Nvme);
        digest.update(&header.checksummed());
        Ok(Self { header: *header, digest, length: 0 })
    }

    /// Adds the next bytes of the payload.
    pub fn update(&mut self, bytes: &[u8]) {
        self.digest.update(bytes);
        self.length += bytes.len() as u64;
    }

    /// The header, if all bytes were added and its length and checksum are theirs.
    pub fn verify(self) -> Result<Header, Corrupt> {
        if self.length != self.header.length {
            return Err(Corrupt::Length);
        }
        if self.digest.finalize() != self.header.checksum {
            return Err(Corrupt::Checksum);
        }
        Ok(self.header)
    }
}

#[cfg(test)]
mod tests {
    use super::super::Block;
    use super::*;
    use bytes::Bytes;

    const HASH: SequenceHash = SequenceHash::from_bytes([1; 16]);
    const FINGERPRINT: Fingerprint = Fingerprint::from_bytes([2; 32]);

    fn verified(header: &Header, pieces: &[&[u8]]) -> Result<(), Corrupt> {
        let mut verifier = PieceVerifier::new(header, HASH, FINGERPRINT)?;
        pieces.iter().copied().for_each(|piece| verifier.update(piece));
        verifier.verify().map(|verified| assert_eq!(verified, *header))
    }

    #[test]
    fn a_block_in_pieces_is_verified_like_a_whole_one() {
        let payload: Vec<u8> = (0..1000_u32).map(|at| (at * 7) as u8).collect();
        let block = Block::new(HASH, None, FINGERPRINT, Bytes::from(payload.clone()));
        let (header, parts) = (block.header, [&payload[..1], &payload[1..700], &payload[700..]]);
        assert_eq!(verified(&header, &parts), Ok(()));
        assert_eq!(verified(&header, &parts[..2]), Err(Corrupt::Length));
        assert_eq!(verified(&header, &[&payload, &[0]]), Err(Corrupt::Length));
        assert_eq!(verified(&header, &[parts[1], parts[0], parts[2]]), Err(Corrupt::Checksum));
        let other = Header { hash: SequenceHash::from_bytes([3; 16]), ..header };
        assert_eq!(verified(&other, &parts), Err(Corrupt::OtherBlock));
        let other = Header { fingerprint: Fingerprint::from_bytes([3; 32]), ..header };
        assert_eq!(verified(&other, &parts), Err(Corrupt::OtherFingerprint));
        assert_eq!(verified(&Header { codec: Codec::Bf16, ..header }, &parts), Err(Corrupt::Transform));
    }
}
