//! The forward pass on the CPU, from token ids to logits, and the choice of the next token.
//!
//! [`Model`] computes chunks of sequences over a [`KvCache`], [`Sampler`] chooses tokens. Not here: scheduling and the
//! ownership of blocks. The caller names the slots and owns those that are written.

mod attention;
mod forward;
mod kv_cache;
mod linear;
mod rope;
mod sampling;
mod simd;

pub(super) use forward::{Chunk, Logits, LogitsVisitor, Model};
pub(super) use kv_cache::KvCache;
pub(super) use sampling::{Sampler, are_finite, logprobs};
