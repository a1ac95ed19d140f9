//! Why a stored block is not the one that was requested, or not intact.

/// Why a loaded block fails verification. The block is deleted, counted and recomputed.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Corrupt {
    /// The bytes are no block header.
    #[error("not a block header")]
    Header,
    /// The block is intact, but its hash is not the requested one.
    #[error("hash of another block")]
    OtherBlock,
    /// Another engine computed the block.
    #[error("another engine's fingerprint")]
    OtherFingerprint,
    /// The payload is shorter or longer than the header says.
    #[error("wrong payload length")]
    Length,
    /// The checksum does not match the header and the payload.
    #[error("checksum does not match")]
    Checksum,
    /// The payload is still encoded or encrypted, or it is in plain text in a tier that encrypts everything.
    #[error("encoding or encryption differs from this tier's")]
    Transform,
    /// The encoded payload does not decode, although the checksum matches.
    #[error("cannot be decoded")]
    Encoding,
    /// The checksum matches, but the payload was not encrypted with the data key.
    #[error("authentication tag does not match")]
    Forged,
}
