//! Speed and memory of a simulated worker.

use super::trace::RequestSpec;
use kvbm::Fingerprint;
use serde::{Deserialize, Serialize};
use worker::plane::KvCache;

/// A worker: an engine and its memory. Times are in seconds, speeds are per second. A step takes
///
/// ```text
///   step_base_s
///   + decode_sequence_s · (sequences that decode)
///   + decode_context_token_s · (context tokens that decoding reads)
///   + prefill_token_s · (prompt tokens computed)
///   + prefill_attention_pair_s · (prompt tokens computed × tokens before them)
/// ```
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// Name of the profile in output.
    pub name: String,
    /// Source of the values.
    pub origin: String,
    /// Constant time of a step, in seconds: reading the weights, launching kernels.
    pub step_base_s: f64,
    /// Time for each sequence that decodes in a step, in seconds.
    pub decode_sequence_s: f64,
    /// Time for each context token that decoding reads in a step, in seconds.
    pub decode_context_token_s: f64,
    /// Time for each prompt token that is computed, without attention, in seconds.
    pub prefill_token_s: f64,
    /// Time of attention for each pair of a computed prompt token and a token before it, in seconds.
    pub prefill_attention_pair_s: f64,
    /// Largest number of tokens that one step computes, prompt and output tokens together.
    pub max_num_batched_tokens: u64,
    /// Largest number of sequences in a batch.
    pub max_num_seqs: usize,
    /// Bytes of KV for one token.
    pub kv_bytes_per_token: u64,
    /// Bytes of device memory for KV.
    pub kv_cache_bytes: u64,
    /// Host memory of the worker (G2); without it nothing is offloaded or copied there.
    pub host: Option<Store>,
    /// Store that all workers share (G4); without it nothing is offloaded there.
    pub shared: Option<Store>,
    /// Link from one worker to another, for prompts of prefill workers and for copies ahead of demand; needed where
    /// roles differ.
    pub peer: Option<Link>,
}

/// A tier that keeps blocks evicted from device memory.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Store {
    /// Capacity, in bytes.
    pub capacity_bytes: u64,
    /// Bandwidth of onboarding, in bytes per second.
    pub bytes_per_second: f64,
    /// Latency until the first byte, in seconds.
    pub latency_s: f64,
}

/// Speed of a transfer of blocks.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bandwidth, in bytes per second.
    pub bytes_per_second: f64,
    /// Latency until the first byte, in seconds.
    pub latency_s: f64,
}

impl Store {
    pub(super) const fn link(&self) -> Link {
        Link { bytes_per_second: self.bytes_per_second, latency_s: self.latency_s }
    }
}

impl Profile {
    /// Checks the values; the error names the key.
    pub fn check(&self) -> Result<(), String> {
        let times = [
            ("step_base_s", self.step_base_s),
            ("decode_sequence_s", self.decode_sequence_s),
            ("decode_context_token_s", self.decode_context_token_s),
            ("prefill_token_s", self.prefill_token_s),
            ("prefill_attention_pair_s", self.prefill_attention_pair_s),
        ];
        if let Some((key, value)) = times.iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            return Err(format!("{key} = {value}: expected a number of at least 0"));
        }
        if self.step_base_s <= 0.0 || self.prefill_token_s <= 0.0 {
            return Err(
                "step_base_s and prefill_token_s: expected more than 0, or virtual time would not advance".to_owned()
            );
        }
        if self.max_num_seqs == 0 || self.max_num_batched_tokens <= self.max_num_seqs as u64 {
            return Err("max_num_batched_tokens: expected more than max_num_seqs, which is at least 1".to_owned());
        }
        if self.kv_bytes_per_token == 0 {
            return Err("kv_bytes_per_token: expected at least 1".to_owned());
        }
        let [host, shared] = [self.host, self.shared].map(|store| store.map(|store| store.link()));
        for (key, link) in [("host", host), ("shared", shared), ("peer", self.peer)] {
            if link.is_some_and(|link| link.bytes_per_second <= 0.0 || link.latency_s < 0.0) {
                return Err(format!("{key}: expected bytes_per_second above 0 and latency_s of at least 0"));
            }
        }
        Ok(())
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.kv_bytes_per_token * super::BLOCK_TOKENS
    }

    /// Blocks that fit into device memory.
    pub(super) fn blocks(&self) -> u64 {
        self.kv_cache_bytes / self.block_bytes()
    }

    /// What the record of such a worker says of its memory.
    pub(super) fn kv_cache(&self) -> KvCache {
        let host_blocks = self.host.map_or(0, |host| host.capacity_bytes / self.block_bytes());
        KvCache { fingerprint: Fingerprint::from_bytes([0; 32]), blocks: self.blocks(), host_blocks, device: None }
    }

    /// Seconds to compute `chunk` prompt tokens that follow `before` others.
    pub(super) fn prefill_s(&self, chunk: u64, before: u64) -> f64 {
        let (chunk, before) = (chunk as f64, before as f64);
        chunk * self.prefill_token_s + chunk * (before + chunk / 2.0) * self.prefill_attention_pair_s
    }

    /// Seconds that decoding adds to the steps of a batch, from the first to the last token of a request.
    pub(super) fn decode_s(&self, spec: &RequestSpec) -> f64 {
        let (tokens, context) = (spec.output_tokens as f64, spec.input_tokens as f64);
        tokens * (self.decode_sequence_s + (context + tokens / 2.0) * self.decode_context_token_s)
    }

    /// Seconds to transfer `blocks` over a link.
    pub(super) fn onboard_s(&self, link: &Link, blocks: u64) -> f64 {
        if blocks == 0 {
            return 0.0;
        }
        link.latency_s + (blocks * self.block_bytes()) as f64 / link.bytes_per_second
    }
}
