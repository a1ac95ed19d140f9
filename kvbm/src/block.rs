//! What a block is: its hash, header, payload and retention, and the names of the tiers.
//!
//! This room is the vocabulary of the crate. It imports no other room, and everything in it is a plain value.
//! Not here: where a block is stored (`tier`, `pool`), and the events about it (`event`).
//!
//! A stored block is a header and an opaque payload. Verification is in the type: a tier returns a [`Block`], and only
//! [`Block::verify`] turns it into a [`Verified`], which may be copied to device memory. A payload that arrives in
//! pieces goes through a [`PieceVerifier`]. A stored payload may be compressed, encrypted, or both. The checksum covers
//! the stored payload, so that a tier can [check](Block::check) a block without decoding it; `verify` accepts only a
//! payload in the engine's own format.

mod corrupt;
mod crc;
mod date;
mod hash;
mod header;
mod level;
mod piecewise;
mod retention;
mod stored_block;
#[cfg(test)]
mod tests;

pub use corrupt::Corrupt;
pub use date::{Clock, Date};
pub use hash::{ChainKey, Domain, DomainId, Fingerprint, SequenceHash};
pub use header::{Codec, Header, KeyId};
pub use level::Level;
pub use piecewise::PieceVerifier;
pub use retention::{BlockAttrs, BlockRetention, Priority, Retention};
pub use stored_block::{Block, Verified};
