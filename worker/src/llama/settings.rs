//! Limits of the native engine's batches and queues.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Limits of a native engine's batch and queue.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Prompt tokens computed in one step. Default 512: larger chunks prefill little faster, and a decoding request
    /// waits for the whole chunk.
    pub max_prefill_chunk_tokens: usize,
    /// Sequences in one batch. Default 64: more rows per step cost latency and gain little on a CPU.
    pub max_num_seqs: usize,
    /// Requests accepted beyond those in the batch. Default 1024; further ones are rejected with a time to retry after.
    pub max_queued_requests: usize,
    /// When requests whose output is not read are paused and failed. Not in the configuration.
    #[serde(skip)]
    pub unread: UnreadOutput,
    /// How long the two workers of a hand-over wait for each other. Not in the configuration.
    #[serde(skip)]
    pub handoff: HandoffLimits,
}

/// When a request whose output is not read is paused and failed. Both times start when the engine has generated as many
/// tokens ahead of the reader as it may.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct UnreadOutput {
    /// After this time the request leaves the batch and gives up its blocks until its output is read again.
    pub pause_after: Duration,
    /// After this time the request fails.
    pub fail_after: Duration,
}

impl Default for UnreadOutput {
    /// 250 ms: the reader is 72 tokens behind by then. 30 s: proxies close idle connections after about that time.
    fn default() -> Self {
        Self { pause_after: Duration::from_millis(250), fail_after: Duration::from_secs(30) }
    }
}

/// How long the two workers of a hand-over wait for each other.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct HandoffLimits {
    /// Minimum time for which the decode worker waits for a prefill without progress. If computing the whole prompt
    /// itself would take longer, it waits for that time.
    pub min_idle: Duration,
    /// How long the prefill worker keeps the blocks of a complete prefill that are not fetched.
    pub lease: Duration,
}

impl Default for HandoffLimits {
    /// 10 s: a chunk takes a few seconds at most, and the prefill worker may compute chunks of other prompts meanwhile.
    /// 60 s: fetching takes a second at most; the rest is time in the queue of a decode worker without free memory.
    fn default() -> Self {
        Self { min_idle: Duration::from_secs(10), lease: Duration::from_mins(1) }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            max_prefill_chunk_tokens: 512,
            max_num_seqs: 64,
            max_queued_requests: 1024,
            unread: UnreadOutput::default(),
            handoff: HandoffLimits::default(),
        }
    }
}
