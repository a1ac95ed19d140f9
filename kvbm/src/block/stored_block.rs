//! A stored block: header and payload, and their verification.

use super::corrupt::Corrupt;
use super::hash::{DomainId, Fingerprint, SequenceHash};
use super::header::{Codec, Header};
use super::retention::BlockAttrs;
use bytes::Bytes;

/// A stored block, which moves between tiers. Cloning shares the payload.
#[derive(Clone, Debug)]
pub struct Block {
    /// Describes the payload.
    pub header: Header,
    /// The payload, encoded and encrypted as the header says.
    pub payload: Bytes,
}

impl Block {
    /// A block of a raw payload, in the shared domain, with default retention.
    pub fn new(hash: SequenceHash, parent: Option<SequenceHash>, fingerprint: Fingerprint, payload: Bytes) -> Self {
        Self { header: Header::new(hash, parent, fingerprint, BlockAttrs::default(), &payload), payload }
    }

    /// The block in another cache domain.
    #[must_use]
    pub fn in_domain(self, domain: DomainId) -> Self {
        let retention = self.header.retention;
        self.with_attrs(BlockAttrs { domain, retention })
    }

    /// The block with another domain and retention.
    #[must_use]
    pub fn with_attrs(self, BlockAttrs { domain, retention }: BlockAttrs) -> Self {
        let header = Header { domain, retention, ..self.header }.for_payload(&self.payload);
        Self { header, ..self }
    }

    /// Checks that this is the requested block and that its payload is the one that was stored. The payload may be
    /// encoded or encrypted.
    pub fn check(&self, hash: SequenceHash, fingerprint: Fingerprint) -> Result<(), Corrupt> {
        self.check_while_copying(hash, fingerprint, |payload, update| update(payload))
    }

    fn check_while_copying(
        &self,
        hash: SequenceHash,
        fingerprint: Fingerprint,
        copy: impl FnOnce(&[u8], &mut dyn FnMut(&[u8])),
    ) -> Result<(), Corrupt> {
        self.header.check_names(hash, fingerprint)?;
        if self.header.length != self.payload.len() as u64 {
            return Err(Corrupt::Length);
        }
        if self.header.checksum != self.header.checksum_while_copying(|update| copy(&self.payload, update)) {
            return Err(Corrupt::Checksum);
        }
        Ok(())
    }

    /// Verifies the block: it passes [`check`](Self::check), and its payload is neither encoded nor encrypted.
    pub fn verify(self, hash: SequenceHash, fingerprint: Fingerprint) -> Result<Verified, Corrupt> {
        self.verify_while_copying(hash, fingerprint, |payload, update| update(payload))
    }

    /// Verifies the block while `copy` copies its payload and passes every part, in order, to its second argument. The
    /// target must not be read before this succeeds.
    pub(crate) fn verify_while_copying(
        self,
        hash: SequenceHash,
        fingerprint: Fingerprint,
        copy: impl FnOnce(&[u8], &mut dyn FnMut(&[u8])),
    ) -> Result<Verified, Corrupt> {
        self.check_while_copying(hash, fingerprint, copy)?;
        if self.header.codec != Codec::Raw || self.header.key.is_some() {
            return Err(Corrupt::Transform);
        }
        Ok(Verified(self))
    }
}

/// A block in the engine's own format whose hash, fingerprint, length and checksum were verified.
#[derive(Clone, Debug)]
pub struct Verified(Block);

impl Verified {
    /// The verified header.
    pub fn header(&self) -> &Header {
        &self.0.header
    }

    /// The verified payload.
    pub fn payload(&self) -> &[u8] {
        &self.0.payload
    }
}
