//! Tiers whose stored blocks are transformed: encoded, encrypted.
//!
//! This room owns the wrapper that adds a transform to any tier, and two transforms: [`codec`] compresses blocks
//! without loss, [`crypt`] encrypts them and manages the keys. A load returns what was stored, or an error.
//! Not here: storage, which is the wrapped tier's.
//!
//! ```text
//!   manager ── raw ──▶ TransformedTier ── encoded ──▶ TransformedTier ── encrypted ──▶ any tier
//!                         (codec)                        (crypt)
//! ```
//!
//! The wrapped tier sees ordinary blocks whose header describes the transformed bytes, so it can check, list and
//! recover them without knowledge of the transform. The checksum of the original bytes is part of the transformed
//! payload: damage from before the transform is detected after its inverse.

mod blocking_pool;
mod buffers;
pub mod codec;
pub mod crypt;
mod tier;
mod undecryptable;

use blocking_pool::BlockingPool;
pub(crate) use buffers::Buffers;
use tier::{Inverted, Transform, TransformedTier};
use undecryptable::Undecryptable;
