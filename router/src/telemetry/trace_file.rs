//! The trace file of served requests: one line of JSON for each. `blockyard replay` reads it as a trace, and
//! `blockyard calibrate` derives a worker profile from it.
//!
//! A line contains no token and no text. Blocks are numbers derived from their hashes, so lines show which prompts
//! share a prefix and nothing else about them. Tenants are numbers derived from their names and from a number that
//! differs between processes, so lines show which requests have the same tenant, and guesses of a name cannot be
//! checked. Requests send their lines to a writer thread; when its queue is full, lines are dropped and counted, and
//! requests do not wait.

use super::Metrics;
use crate::hash::{hash_str, splitmix64};
use crate::policy::ScoredWorker;
use arc_swap::ArcSwapOption;
use kvbm::{Level, SequenceHash, permissions};
use prometheus::IntCounterVec;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::{FileTypeExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, OnceLock};
use std::thread;
use std::time::{SystemTime, UNIX_EPOCH};
use tokio::time::Instant;
use worker::engine::{PromptReport, Request};

/// One request. The first four fields are those of a trace in Mooncake's format; fields that end in `_s` are seconds
/// since the request arrived.
#[derive(Clone, PartialEq, Debug, Serialize, Deserialize)]
pub struct Line {
    /// Arrival, in milliseconds since 1970.
    pub timestamp: f64,
    /// Number of prompt tokens.
    pub input_length: u64,
    /// Number of generated tokens.
    pub output_length: u64,
    /// One number for each 512 prompt tokens, which identifies them together with all tokens before them.
    pub hash_ids: Vec<u32>,
    /// Name of the requested model.
    pub model: String,
    /// Number of the tenant, the same for all requests of one tenant to one process; empty without a tenant.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tenant: String,
    /// Largest number of tokens that the request allowed to generate, if it named one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_tokens: Option<u32>,
    /// Worker that decoded.
    pub worker: String,
    /// Whether another worker computed the prompt.
    #[serde(default)]
    pub disaggregated: bool,
    /// When the router sent the request to its worker: until then it was queued or tried on other workers.
    pub dispatched_s: f64,
    /// When its first token arrived.
    pub first_token_s: f64,
    /// When its last token arrived.
    pub last_token_s: f64,
    /// Number of prompt tokens that were found in a cache, by tier.
    #[serde(default)]
    pub cached_tokens: BTreeMap<Level, u64>,
    /// Number of tokens that fit into the worker's device memory, if the worker reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_cache_tokens: Option<u64>,
    /// Bytes of KV for one token, if the worker reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_bytes_per_token: Option<f64>,
    /// Largest number of sequences in the worker's batch, if the worker reports it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_num_seqs: Option<u64>,
}

/// Writes the trace file, if one is configured.
#[derive(Default)]
pub(crate) struct Recorder(ArcSwapOption<TraceFile>);

/// An open trace file and its writer thread.
struct TraceFile {
    path: PathBuf,
    file: FileId,
    lines: SyncSender<Line>,
    counts: IntCounterVec,
    /// Why a line could not be written. Then no further lines are.
    failure: Arc<OnceLock<String>>,
}

/// Identifies a file independently of its path: device and inode.
#[derive(PartialEq, Eq)]
struct FileId(u64, u64);

/// A request whose line is written once it has ended.
pub(crate) struct RequestTrace {
    trace_file: Arc<TraceFile>,
    arrived: Instant,
    line: Line,
}

/// Prompt tokens per hash id, as in Mooncake's traces.
pub(crate) const UNIT_TOKENS: u64 = 512;
/// Maximum number of queued lines: some megabytes at most.
const QUEUED_LINES_MAX: usize = 4096;
/// Maximum size of the file, so that a forgotten trace does not fill the disk: about four million requests.
const FILE_BYTES_MAX: u64 = 1 << 30;

impl Recorder {
    /// Appends to this file from now on, or to none. A file that has failed, or that was moved away, is opened again;
    /// any other stays open, because requests in flight hold it.
    pub(crate) fn write_to(&self, path: Option<&Path>, metrics: &Metrics) -> Result<(), String> {
        if path.is_some_and(|path| self.0.load().as_ref().is_some_and(|trace_file| trace_file.writes_to(path))) {
            return Ok(());
        }
        self.0.store(path.map(|path| TraceFile::new(path, metrics)).transpose()?.map(Arc::new));
        Ok(())
    }

    /// Whether lines are written.
    pub(crate) fn is_on(&self) -> bool {
        self.0.load().as_ref().is_some_and(|trace_file| trace_file.is_on())
    }

    /// Why requests are not recorded, though a file is configured; `None` if they are.
    pub(crate) fn problem(&self) -> Option<String> {
        self.0.load().as_ref().and_then(|trace_file| trace_file.failure.get().cloned())
    }

    /// Starts the trace of a request, if lines are written.
    pub(crate) fn begin(&self, arrived: Instant) -> Option<RequestTrace> {
        let trace_file = self.0.load_full().filter(|trace_file| trace_file.is_on())?;
        let ago = arrived.elapsed();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let timestamp = now.saturating_sub(ago).as_micros() as f64 / 1e3;
        Some(RequestTrace { trace_file, arrived, line: Line::at(timestamp) })
    }
}

impl TraceFile {
    fn new(path: &Path, metrics: &Metrics) -> Result<Self, String> {
        let wrong = |error: io::Error| format!("router.trace_file: {} cannot be written: {error}", path.display());
        // A pipe without a reader would block the caller, which may be a reload of the running process.
        if fs::metadata(path).is_ok_and(|data| data.file_type().is_fifo()) {
            return Err(format!("router.trace_file: {} is a named pipe; expected a file", path.display()));
        }
        let file = permissions::private_file_options().create(true).append(true).open(path).map_err(wrong)?;
        permissions::restrict_file(&file, path).map_err(wrong)?;
        let id = FileId::of(&file.metadata().map_err(wrong)?);
        let (lines, incoming) = sync_channel(QUEUED_LINES_MAX);
        let counts = metrics.trace_records.clone();
        let trace_file =
            Self { path: path.to_owned(), file: id, lines, counts: counts.clone(), failure: Arc::default() };
        let (name, failure) = (path.to_owned(), trace_file.failure.clone());
        // The thread ends when all senders are dropped.
        let write = move || write(&name, &file, &incoming, &counts, &failure);
        thread::Builder::new().name("trace".into()).spawn(write).map_err(wrong)?;
        Ok(trace_file)
    }

    fn is_on(&self) -> bool {
        self.failure.get().is_none()
    }

    /// Whether this file is the one at the path.
    fn writes_to(&self, path: &Path) -> bool {
        self.is_on() && self.path == path && fs::metadata(path).is_ok_and(|data| FileId::of(&data) == self.file)
    }
}

impl FileId {
    fn of(data: &Metadata) -> Self {
        Self(data.dev(), data.ino())
    }
}

/// Writes lines until all senders are dropped. After the first line that cannot be written the rest is dropped: a
/// trace with a gap is useless.
fn write(path: &Path, file: &File, lines: &Receiver<Line>, counts: &IntCounterVec, failure: &OnceLock<String>) {
    while let Ok(line) = lines.recv() {
        if failure.get().is_some() {
            counts.with_label_values(&["dropped"]).inc();
            continue;
        }
        match append(file, file, &line) {
            Ok(()) => counts.with_label_values(&["written"]).inc(),
            Err(error) => {
                let problem = format!(
                    "router.trace_file: {} cannot be written: {error}; requests are not recorded until a reload \
                     (SIGHUP) opens the file again",
                    path.display()
                );
                tracing::error!("{problem}");
                let _ = failure.set(problem);
                counts.with_label_values(&["dropped"]).inc();
            }
        }
    }
}

/// Appends one line with a single write, so that a reader does not see half of it. A line that was written in part is
/// removed. `writer`: a handle of `file`.
fn append(file: &File, mut writer: impl Write, line: &Line) -> io::Result<()> {
    let before = file.metadata()?.len();
    if before >= FILE_BYTES_MAX {
        let full = "it has reached 1 GiB, the largest size; move it away";
        return Err(io::Error::new(ErrorKind::FileTooLarge, full));
    }
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    writer.write_all(text.as_bytes()).inspect_err(|_| {
        let _ = file.set_len(before);
    })
}

impl Line {
    fn at(timestamp: f64) -> Self {
        Self {
            timestamp,
            input_length: 0,
            output_length: 0,
            hash_ids: Vec::new(),
            model: String::new(),
            tenant: String::new(),
            max_tokens: None,
            worker: String::new(),
            disaggregated: false,
            dispatched_s: 0.0,
            first_token_s: 0.0,
            last_token_s: 0.0,
            cached_tokens: BTreeMap::new(),
            kv_cache_tokens: None,
            kv_bytes_per_token: None,
            max_num_seqs: None,
        }
    }

    /// The fields that are known when a request is placed. `salt`: makes numbers of tenants that are known to no other
    /// process.
    pub(crate) fn placed(
        request: &Request,
        row: &ScoredWorker<'_>,
        hashes: &[SequenceHash],
        disaggregated: bool,
        random: u64,
        salt: u64,
    ) -> Self {
        let (tokens, block_size) = (request.tokens.len() as u64, row.prompt.block_size);
        let (stats, member) = (&row.snapshot.stats, row.worker());
        let known = |value: u64| (value > 0).then_some(value);
        Self {
            input_length: tokens,
            hash_ids: hash_ids(hashes, block_size, tokens, random),
            model: request.model.to_string(),
            tenant: tenant_number(&request.attributes.tenant, salt),
            max_tokens: request.stop.max_tokens,
            worker: member.id().to_string(),
            disaggregated,
            kv_cache_tokens: known(u64::from(stats.total_blocks) * block_size),
            kv_bytes_per_token: stats.speeds.block_bytes.get().map(|bytes| bytes / block_size as f64),
            max_num_seqs: known(member.max_num_seqs()),
            ..Self::at(0.0)
        }
    }
}

impl RequestTrace {
    /// Records that the request is sent to a worker, for the first time or again.
    pub(crate) fn dispatched(&mut self) {
        self.line.dispatched_s = self.arrived.elapsed().as_secs_f64();
    }

    /// Records the first output, from the worker of `placed`.
    pub(crate) fn started(&mut self, placed: Line, report: Option<&PromptReport>) {
        let now = self.arrived.elapsed().as_secs_f64();
        let cached = report.into_iter().flat_map(|report| &report.cached);
        self.line = Line {
            timestamp: self.line.timestamp,
            dispatched_s: self.line.dispatched_s,
            first_token_s: now,
            last_token_s: now,
            cached_tokens: cached.map(|(level, tokens)| (*level, u64::from(*tokens))).collect(),
            ..placed
        };
    }

    /// Records more output tokens.
    pub(crate) fn output(&mut self, tokens: usize) {
        if tokens > 0 {
            self.line.output_length += tokens as u64;
            self.line.last_token_s = self.arrived.elapsed().as_secs_f64();
        }
    }
}

impl Drop for RequestTrace {
    fn drop(&mut self) {
        // A request without output measures nothing.
        if self.line.output_length == 0 {
            return;
        }
        let line = std::mem::replace(&mut self.line, Line::at(0.0));
        if self.trace_file.lines.try_send(line).is_err() {
            self.trace_file.counts.with_label_values(&["dropped"]).inc();
        }
    }
}

/// What stands for a tenant in a line.
fn tenant_number(tenant: &str, salt: u64) -> String {
    if tenant.is_empty() { String::new() } else { format!("{:08x}", splitmix64(hash_str(tenant) ^ salt) as u32) }
}

/// One hash id for each [`UNIT_TOKENS`] of a prompt of `tokens` tokens; the last unit may be shorter. `random` stands
/// for a prompt shorter than a block, which has no hash.
fn hash_ids(hashes: &[SequenceHash], block_size: u64, tokens: u64, random: u64) -> Vec<u32> {
    let number = |unit: u64| {
        let full = ((unit + 1) * UNIT_TOKENS / block_size.max(1)).min(hashes.len() as u64);
        let last = full.checked_sub(1).map_or(random, |last| hashes[last as usize].short());
        // Two units may end with the same block.
        splitmix64(last ^ unit) as u32
    };
    (0..tokens.div_ceil(UNIT_TOKENS)).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::{ChainKey, Domain};
    use std::fs::OpenOptions;

    /// A writer to a disk with this many bytes left.
    struct FullDisk<'a>(&'a File, usize);

    impl Write for FullDisk<'_> {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            let fits = bytes.len().min(self.1);
            self.1 -= fits;
            if fits == 0 { Err(ErrorKind::StorageFull.into()) } else { self.0.write(&bytes[..fits]) }
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn line_that_does_not_fit_on_the_disk_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        let file = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        append(&file, &file, &Line::at(1.0)).unwrap();
        let sound = fs::read_to_string(&path).unwrap();
        for left in [0, 1, sound.len() - 1] {
            let error = append(&file, FullDisk(&file, left), &Line::at(2.0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::StorageFull);
            assert_eq!(fs::read_to_string(&path).unwrap(), sound, "{left} bytes of the line fit");
        }
        // The next line starts at the beginning of a line.
        append(&file, &file, &Line::at(3.0)).unwrap();
        let lines = fs::read_to_string(&path).unwrap();
        let stamps: Vec<f64> =
            lines.lines().map(|line| serde_json::from_str::<Line>(line).unwrap().timestamp).collect();
        assert_eq!(stamps, [1.0, 3.0]);
    }

    #[test]
    fn prompts_share_hash_ids_as_far_as_they_are_equal() {
        let key = ChainKey::root(&Domain::shared(), "toy", None);
        let hash_ids = |prompt: &[u32], random| {
            let names = key.hashes(&prompt[..(prompt.len() - 1) / 16 * 16], 16);
            hash_ids(&names, 16, prompt.len() as u64, random)
        };
        let one: Vec<u32> = (0..1300).collect();
        let mut other = one.clone();
        other[1100] = 7;
        let one = hash_ids(&one, 1);
        let other = hash_ids(&other, 2);
        assert_eq!(one.len(), 3);
        assert_eq!(one[..2], other[..2]);
        assert_ne!(one[2], other[2]);
        assert_ne!(hash_ids(&[1, 2, 3], 1), hash_ids(&[1, 2, 3], 2), "prompts shorter than a block share nothing");
        let whole: Vec<u32> = (0..1024).collect();
        let whole = hash_ids(&whole, 1);
        assert!(whole.len() == 2 && whole[0] != whole[1]);
    }
}
