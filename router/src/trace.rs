//! The trace file of served requests: one line of JSON for each. `blockyard replay` reads it as a trace, and
//! `blockyard calibrate` derives a worker profile from it.
//!
//! A line contains no token and no text. Blocks are numbers derived from their hashes, so lines show which prompts
//! share a prefix and nothing else about them. Requests send their lines to a writer thread; when its queue is full,
//! lines are dropped and counted, and requests do not wait.

use crate::hash::mix;
use crate::metrics::Metrics;
use crate::policy::Row;
use arc_swap::ArcSwapOption;
use kvbm::{Level, SequenceHash, permissions};
use prometheus::IntCounterVec;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::{self, File, Metadata};
use std::io::{self, ErrorKind, Write};
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
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

/// Writes the record, when there is to be one.
#[derive(Default)]
pub(crate) struct Recorder(ArcSwapOption<Open>);

/// A record that is being written.
struct Open {
    path: PathBuf,
    file: FileId,
    lines: SyncSender<Line>,
    counts: IntCounterVec,
    /// Nothing more is written in it.
    ended: Arc<AtomicBool>,
}

/// A file, whatever it is called: its device and number.
#[derive(PartialEq, Eq)]
struct FileId(u64, u64);

/// A request that is to be recorded, once it has ended.
pub(crate) struct Life {
    record: Arc<Open>,
    arrived: Instant,
    line: Line,
}

/// Tokens that a number stands for, as in Mooncake's traces.
pub(crate) const UNIT_TOKENS: u64 = 512;
/// Lines that wait to be written: some megabytes at most.
const WAITING: usize = 4096;
/// What nobody looks after must end somewhere: about four million requests.
const BYTES_MAX: u64 = 1 << 30;

impl Recorder {
    /// Records into this file from now on, behind what is in it; or nowhere. A record that has ended begins anew once there is
    /// room, and so does one whose file was moved away; any other goes on, because requests that are being served keep it open.
    pub(crate) fn write_to(&self, path: Option<&Path>, metrics: &Metrics) -> Result<(), String> {
        if path.is_some_and(|path| self.0.load().as_ref().is_some_and(|record| record.goes_to(path))) {
            return Ok(());
        }
        self.0.store(path.map(|path| Open::new(path, metrics)).transpose()?.map(Arc::new));
        Ok(())
    }

    /// Whether there is a record.
    pub(crate) fn is_on(&self) -> bool {
        self.0.load().as_ref().is_some_and(|record| record.is_on())
    }

    /// A request that arrived at a time, if there is a record.
    pub(crate) fn begin(&self, arrived: Instant) -> Option<Life> {
        let record = self.0.load_full().filter(|record| record.is_on())?;
        let ago = arrived.elapsed();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let timestamp = now.saturating_sub(ago).as_micros() as f64 / 1e3;
        Some(Life { record, arrived, line: Line::at(timestamp) })
    }
}

impl Open {
    fn new(path: &Path, metrics: &Metrics) -> Result<Self, String> {
        let wrong = |error: io::Error| format!("router.trace_file: {} cannot be written: {error}", path.display());
        let file = permissions::private().create(true).append(true).open(path).map_err(wrong)?;
        permissions::narrow(&file, path).map_err(wrong)?;
        let id = FileId::of(&file.metadata().map_err(wrong)?);
        let (lines, incoming) = sync_channel(WAITING);
        let counts = metrics.recorded.clone();
        let record = Self { path: path.to_owned(), file: id, lines, counts: counts.clone(), ended: Arc::default() };
        let (name, ended) = (path.to_owned(), record.ended.clone());
        // It ends when nobody can send lines any more.
        let write = move || write(&name, &file, &incoming, &counts, &ended);
        thread::Builder::new().name("trace".into()).spawn(write).map_err(wrong)?;
        Ok(record)
    }

    fn is_on(&self) -> bool {
        !self.ended.load(Ordering::Relaxed)
    }

    /// Whether what is written here is what is found there.
    fn goes_to(&self, path: &Path) -> bool {
        self.is_on() && self.path == path && fs::metadata(path).is_ok_and(|data| FileId::of(&data) == self.file)
    }
}

impl FileId {
    fn of(data: &Metadata) -> Self {
        Self(data.dev(), data.ino())
    }
}

/// Writes lines for as long as anybody may send some. What comes after the first that cannot be written is dropped: with a gap
/// in it, it would be no trace of anything.
fn write(path: &Path, file: &File, lines: &Receiver<Line>, counts: &IntCounterVec, ended: &AtomicBool) {
    while let Ok(line) = lines.recv() {
        if ended.load(Ordering::Relaxed) {
            counts.with_label_values(&["dropped"]).inc();
            continue;
        }
        match append(file, file, &line) {
            Ok(()) => counts.with_label_values(&["written"]).inc(),
            Err(error) => {
                tracing::error!(
                    path = %path.display(), %error,
                    "the trace file cannot be written; later requests are not recorded"
                );
                ended.store(true, Ordering::Relaxed);
                counts.with_label_values(&["dropped"]).inc();
            }
        }
    }
}

/// One line, at once: whoever reads along sees no half of one, and none is left to whoever goes on. `way`: through which it is written.
fn append(file: &File, mut way: impl Write, line: &Line) -> io::Result<()> {
    let before = file.metadata()?.len();
    if before >= BYTES_MAX {
        return Err(ErrorKind::FileTooLarge.into());
    }
    let mut text = serde_json::to_string(line)?;
    text.push('\n');
    way.write_all(text.as_bytes()).inspect_err(|_| {
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

    /// What is known of a request when it is placed.
    pub(crate) fn placed(
        request: &Request,
        row: &Row<'_>,
        names: &[SequenceHash],
        disaggregated: bool,
        draw: u64,
    ) -> Self {
        let (tokens, block_size) = (request.tokens.len() as u64, row.prompt.block_size);
        let (standing, member) = (&row.desk.standing, row.member());
        let known = |value: u64| (value > 0).then_some(value);
        Self {
            input_length: tokens,
            hash_ids: numbers(names, block_size, tokens, draw),
            model: request.model.to_string(),
            worker: member.id().to_string(),
            disaggregated,
            kv_cache_tokens: known(u64::from(standing.total_blocks) * block_size),
            kv_bytes_per_token: standing.speeds.block_bytes.get().map(|bytes| bytes / block_size as f64),
            max_num_seqs: known(member.batch()),
            ..Self::at(0.0)
        }
    }
}

impl Life {
    /// It goes to a worker, for the first time or again.
    pub(crate) fn sent(&mut self) {
        self.line.dispatched_s = self.arrived.elapsed().as_secs_f64();
    }

    /// Its first output is there, from who it was placed on.
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

    /// More tokens came.
    pub(crate) fn output(&mut self, tokens: usize) {
        if tokens > 0 {
            self.line.output_length += tokens as u64;
            self.line.last_token_s = self.arrived.elapsed().as_secs_f64();
        }
    }
}

impl Drop for Life {
    fn drop(&mut self) {
        // What never had an output is no measure of anything.
        if self.line.output_length == 0 {
            return;
        }
        let line = std::mem::replace(&mut self.line, Line::at(0.0));
        if self.record.lines.try_send(line).is_err() {
            self.record.counts.with_label_values(&["dropped"]).inc();
        }
    }
}

/// A number for each [`UNIT_TOKENS`] of a prompt of so many tokens, the last of which may be fewer. `draw` is for what has no name:
/// a beginning shorter than a block is like no other.
fn numbers(names: &[SequenceHash], block_size: u64, tokens: u64, draw: u64) -> Vec<u32> {
    let number = |unit: u64| {
        let full = ((unit + 1) * UNIT_TOKENS / block_size.max(1)).min(names.len() as u64);
        let last = full.checked_sub(1).map_or(draw, |last| names[last as usize].short());
        // Two units may end with the same block.
        mix(last ^ unit) as u32
    };
    (0..tokens.div_ceil(UNIT_TOKENS)).map(number).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvbm::{ChainKey, Domain};
    use std::fs::OpenOptions;

    /// The way to a disk on which so many bytes are left.
    struct Narrow<'a>(&'a File, usize);

    impl Write for Narrow<'_> {
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
    fn of_a_line_that_a_disk_has_no_room_for_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("record");
        let file = OpenOptions::new().create(true).append(true).open(&path).unwrap();
        append(&file, &file, &Line::at(1.0)).unwrap();
        let sound = fs::read_to_string(&path).unwrap();
        for left in [0, 1, sound.len() - 1] {
            let error = append(&file, Narrow(&file, left), &Line::at(2.0)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::StorageFull);
            assert_eq!(fs::read_to_string(&path).unwrap(), sound, "{left} bytes of it fitted");
        }
        // Whoever goes on begins a line.
        append(&file, &file, &Line::at(3.0)).unwrap();
        let lines = fs::read_to_string(&path).unwrap();
        let stamps: Vec<f64> =
            lines.lines().map(|line| serde_json::from_str::<Line>(line).unwrap().timestamp).collect();
        assert_eq!(stamps, [1.0, 3.0]);
    }

    #[test]
    fn prompts_have_numbers_in_common_as_far_as_they_are_alike() {
        let key = ChainKey::root(&Domain::shared(), "toy", None);
        let numbers = |prompt: &[u32], draw| {
            let names = key.names(&prompt[..(prompt.len() - 1) / 16 * 16], 16);
            numbers(&names, 16, prompt.len() as u64, draw)
        };
        let one: Vec<u32> = (0..1300).collect();
        let mut other = one.clone();
        other[1100] = 7;
        let (one, other) = (numbers(&one, 1), numbers(&other, 2));
        assert_eq!(one.len(), 3);
        assert_eq!(one[..2], other[..2]);
        assert_ne!(one[2], other[2]);
        assert_ne!(numbers(&[1, 2, 3], 1), numbers(&[1, 2, 3], 2), "too short to have anything in common");
        let whole: Vec<u32> = (0..1024).collect();
        let whole = numbers(&whole, 1);
        assert!(whole.len() == 2 && whole[0] != whole[1]);
    }
}
