//! Limits of the native engine's batches and queues.

use serde::{Deserialize, Serialize};
use std::time::Duration;

/// How a native engine batches.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Settings {
    /// Prompt tokens computed in one step. Default 512: larger chunks prefill little faster, and a decoding request
    /// waits for the whole chunk.
    pub max_prefill_chunk_tokens: usize,
    /// Sequences in one batch. Default 64: more rows per step cost latency and gain little on a CPU.
    pub max_num_seqs: usize,
    /// Requests accepted beyond those in the batch. Default 1024; more are told to try again later.
    pub max_queued_requests: usize,
    /// What becomes of requests whose output is not read. Not in the configuration.
    #[serde(skip)]
    pub unread: Unread,
}

/// What becomes of a request whose output is not read, once what may be generated ahead of its reader is there.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Unread {
    /// It keeps its place in the batch for so long, and then gives it up with its blocks until its output is read
    /// again.
    pub place: Duration,
    /// It fails after so long.
    pub limit: Duration,
}

impl Default for Unread {
    /// A quarter of a second, since the reader is 72 tokens behind by then. Half a minute: proxies close connections
    /// that stand still after that.
    fn default() -> Self {
        Self { place: Duration::from_millis(250), limit: Duration::from_secs(30) }
    }
}

impl Default for Settings {
    fn default() -> Self {
        Self { max_prefill_chunk_tokens: 512, max_num_seqs: 64, max_queued_requests: 1024, unread: Unread::default() }
    }
}
