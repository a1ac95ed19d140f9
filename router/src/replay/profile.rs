//! How fast a simulated worker is, and what it can keep.

use serde::{Deserialize, Serialize};

/// A worker: one engine with its memory. All times in seconds, all speeds per second.
///
/// A step takes `step + sequence · decoding + context · (tokens that decoding reads) + token · (prompt tokens computed) +
/// attention · (prompt tokens computed × tokens before them)`.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Profile {
    /// What it is called in output.
    pub name: String,
    /// Where the figures come from.
    pub origin: String,
    /// Of every step: reading the weights, launching kernels.
    pub step_s: f64,
    /// Of every sequence that decodes in a step.
    pub sequence_s: f64,
    /// Of every token of context that decoding reads in a step.
    pub context_s: f64,
    /// Of every prompt token, attention apart.
    pub token_s: f64,
    /// Of every pair of a prompt token and a token before it.
    pub attention_s: f64,
    /// Tokens that a step computes at most.
    pub step_tokens: u64,
    /// Sequences in a batch at most.
    pub sequences: usize,
    /// Bytes of the KV of one token.
    pub kv_bytes_per_token: u64,
    /// Bytes of device memory for KV.
    pub device_bytes: u64,
    /// Host memory, if blocks are offloaded to it.
    pub host: Option<Store>,
    /// A store that all workers share, if blocks are offloaded to one.
    pub shared: Option<Store>,
    /// Between a worker that computes a prompt and one that decodes it, if workers hand over.
    pub peer: Option<Link>,
}

/// Somewhere to keep blocks that fell out of device memory.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Store {
    /// Bytes that it holds.
    pub bytes: u64,
    /// Bytes per second when a prefix is brought up.
    pub bytes_per_second: f64,
    /// Seconds until the first of them.
    pub latency_s: f64,
}

/// How fast blocks come from somewhere.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Bytes per second.
    pub bytes_per_second: f64,
    /// Seconds until the first of them.
    pub latency_s: f64,
}

impl Store {
    pub(super) const fn link(&self) -> Link {
        Link { bytes_per_second: self.bytes_per_second, latency_s: self.latency_s }
    }
}

impl Profile {
    /// What is wrong with the figures, naming the key.
    pub fn check(&self) -> Result<(), String> {
        let times = [
            ("step_s", self.step_s),
            ("sequence_s", self.sequence_s),
            ("context_s", self.context_s),
            ("token_s", self.token_s),
            ("attention_s", self.attention_s),
        ];
        if let Some((key, value)) = times.iter().find(|(_, value)| !value.is_finite() || *value < 0.0) {
            return Err(format!("{key}: {value} is not a number of at least 0"));
        }
        if self.step_s <= 0.0 || self.token_s <= 0.0 {
            return Err("step_s and token_s: more than 0, or time would stand still".to_owned());
        }
        if self.sequences == 0 || self.step_tokens <= self.sequences as u64 {
            return Err("step_tokens: more than sequences, which is at least 1".to_owned());
        }
        if self.kv_bytes_per_token == 0 {
            return Err("kv_bytes_per_token: at least 1".to_owned());
        }
        let [host, shared] = [self.host, self.shared].map(|store| store.map(|store| store.link()));
        for (key, link) in [("host", host), ("shared", shared), ("peer", self.peer)] {
            if link.is_some_and(|link| link.bytes_per_second <= 0.0 || link.latency_s < 0.0) {
                return Err(format!("{key}: bytes_per_second more than 0, latency_s at least 0"));
            }
        }
        Ok(())
    }

    pub(super) fn block_bytes(&self) -> u64 {
        self.kv_bytes_per_token * super::BLOCK_TOKENS
    }

    /// Blocks of device memory.
    pub(super) fn blocks(&self) -> u64 {
        self.device_bytes / self.block_bytes()
    }

    /// Seconds for `chunk` prompt tokens that follow `before` others.
    pub(super) fn prefill_s(&self, chunk: u64, before: u64) -> f64 {
        let (chunk, before) = (chunk as f64, before as f64);
        chunk * self.token_s + chunk * (before + chunk / 2.0) * self.attention_s
    }

    /// Seconds until `blocks` have come over a link.
    pub(super) fn onboard_s(&self, link: &Link, blocks: u64) -> f64 {
        if blocks == 0 {
            return 0.0;
        }
        link.latency_s + (blocks * self.block_bytes()) as f64 / link.bytes_per_second
    }
}
