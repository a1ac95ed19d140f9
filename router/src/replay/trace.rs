//! A trace: who asked what, and when. The format is Mooncake's: a line of JSON per request, with its arrival in milliseconds
//! (`timestamp`), `input_length` and `output_length` in tokens, and `hash_ids`, one number per block of 512 tokens that
//! names the block together with everything before it.

use crate::hash::splitmix64;
use crate::trace::UNIT_TOKENS;
use kvbm::SequenceHash;
use serde::Deserialize;
use std::collections::{HashMap, HashSet};
use std::io::BufRead;

/// Tokens per block of a trace.
pub const BLOCK_TOKENS: u64 = UNIT_TOKENS;

/// Requests in the order in which they arrived.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    pub(super) requests: Vec<Asked>,
}

/// One request.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct Asked {
    /// Milliseconds since the first.
    pub(super) at_ms: u64,
    pub(super) input: u64,
    pub(super) output: u64,
    pub(super) blocks: Vec<u32>,
    /// Which conversation it seems to belong to.
    pub(super) session: u64,
    /// Which model, where a record says it; else nothing.
    pub(super) model: Box<str>,
}

/// A line that is no request.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// It could not be read.
    #[error("trace: {0}")]
    Read(#[from] std::io::Error),
    /// It is not what a trace holds.
    #[error("trace, line {line}: {what}")]
    Line {
        /// Counted from 1.
        line: usize,
        /// What is wrong.
        what: String,
    },
    /// There is nothing to replay.
    #[error("trace: contains no request")]
    Empty,
}

#[derive(Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u32>,
    #[serde(default)]
    model: Box<str>,
}

impl Trace {
    /// Reads a trace. Empty lines are skipped.
    pub fn read(lines: impl BufRead) -> Result<Self, TraceError> {
        let mut requests = Vec::new();
        for (at, line) in lines.lines().enumerate() {
            let line = line?;
            if line.trim().is_empty() {
                continue;
            }
            let wrong = |what: String| TraceError::Line { line: at + 1, what };
            let Line { timestamp, input_length, output_length, hash_ids, model } =
                serde_json::from_str(&line).map_err(|error| wrong(no_request(&error)))?;
            let blocks = input_length.div_ceil(BLOCK_TOKENS);
            if input_length == 0 || hash_ids.len() as u64 != blocks {
                let have = hash_ids.len();
                return Err(wrong(format!("input_length {input_length} needs {blocks} hash_ids, found {have}")));
            }
            if !timestamp.is_finite() || timestamp < 0.0 {
                return Err(wrong(format!("timestamp {timestamp} is not a number of milliseconds of at least 0")));
            }
            let (at_ms, output) = (timestamp as u64, output_length.max(1));
            requests.push(Asked { at_ms, input: input_length, output, blocks: hash_ids, session: 0, model });
        }
        requests.sort_by_key(|asked| asked.at_ms);
        let Some(first) = requests.first().map(|asked| asked.at_ms) else { return Err(TraceError::Empty) };
        for asked in &mut requests {
            asked.at_ms -= first;
        }
        name_sessions(&mut requests);
        Ok(Self { requests })
    }

    /// Requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there is nothing to replay, which [`Trace::read`] refuses.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Requests per second as recorded.
    pub fn rate(&self) -> f64 {
        let last = self.requests.last().map_or(0, |asked| asked.at_ms);
        self.len() as f64 / (last.max(1) as f64 / 1000.0)
    }

    /// The share of blocks that one cache without end would have held when they were asked for: what no policy can beat.
    pub fn bound(&self) -> f64 {
        let mut seen = HashSet::<u32>::new();
        let (mut hits, mut all) = (0, 0);
        for asked in &self.requests {
            hits += asked.blocks.iter().take_while(|block| seen.contains(*block)).count();
            all += asked.blocks.len();
            seen.extend(&asked.blocks);
        }
        hits as f64 / all.max(1) as f64
    }

    /// Arrival times in nanoseconds, at `rate` requests per second on average. The recorder wrote times in coarse steps; the
    /// seed decides where in its step a request falls, and so in which order.
    pub(super) fn arrivals(&self, rate: f64, seed: u64) -> Vec<(u64, u32)> {
        let scale = 1e6 * self.rate() / rate;
        let mut times = Vec::with_capacity(self.len());
        let mut step_ms = 0;
        for (at, asked) in self.requests.iter().enumerate().rev() {
            if let Some(next) = self.requests.get(at + 1).filter(|next| next.at_ms > asked.at_ms) {
                step_ms = next.at_ms - asked.at_ms;
            }
            let within = unit(splitmix64(seed ^ splitmix64(at as u64))) * step_ms as f64;
            times.push((((asked.at_ms as f64 + within) * scale) as u64, at as u32));
        }
        times.sort_unstable();
        times
    }
}

/// What is wrong with a line that could not be read, and what one looks like. The line is named by who asks.
fn no_request(error: &serde_json::Error) -> String {
    let (all, column) = (error.to_string(), error.column());
    let what = all.strip_suffix(&format!(" at line {} column {column}", error.line())).unwrap_or(&all);
    format!("{what} at column {column}; a line is a request, like {LINE}")
}

/// A line of a trace.
const LINE: &str = r#"{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}"#;

/// A trace names no sessions, but a conversation's prompts begin alike. What more than [`OPENING`] of all prompts have is an
/// instruction that many conversations open with; the first block after that names the session.
fn name_sessions(requests: &mut [Asked]) {
    let mut askers = HashMap::<u32, usize>::new();
    for block in requests.iter().flat_map(|asked| &asked.blocks) {
        *askers.entry(*block).or_default() += 1;
    }
    let many = (requests.len() as f64 * OPENING) as usize;
    for Asked { blocks, session, .. } in requests {
        let own = blocks.iter().find(|block| askers[*block] <= many);
        *session = own.or(blocks.last()).copied().unwrap_or_default().into();
    }
}

/// Of the 7,373 sessions that this makes of the public trace, the largest has one prompt in 280.
const OPENING: f64 = 0.1;

/// A number in [0, 1) from random bits.
pub(super) fn unit(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// The name of a block in the index.
pub(super) fn name(block: u32) -> SequenceHash {
    let (low, high) = (splitmix64(u64::from(block)), splitmix64(!u64::from(block)));
    SequenceHash::from_bytes(((u128::from(high) << 64) | u128::from(low)).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_that_is_no_request_is_named() {
        let text = "{\"timestamp\":0,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2]}\n\n{\"timestamp\":0}";
        let error = Trace::read(text.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("trace, line 3: missing field `input_length` at column 15; a line is"), "{error}");
        let error = Trace::read("# Notes".as_bytes()).unwrap_err().to_string();
        assert_eq!(error, format!("trace, line 1: expected value at column 1; a line is a request, like {LINE}"));
        assert_eq!(Trace::read(LINE.as_bytes()).unwrap().len(), 1);
        let short = "{\"timestamp\":0,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1]}";
        let error = Trace::read(short.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "trace, line 1: input_length 600 needs 2 hash_ids, found 1");
        assert!(matches!(Trace::read("\n".as_bytes()), Err(TraceError::Empty)));
    }

    #[test]
    fn a_session_is_what_goes_on_after_the_opening_that_many_share() {
        let line = |ids: &[u32]| {
            let input = ids.len() * 512;
            format!("{{\"timestamp\":0,\"input_length\":{input},\"output_length\":1,\"hash_ids\":{ids:?}}}\n")
        };
        // Two openings, 1 2 and 3; twenty conversations with each, and another turn of some.
        let starts = (10..30).flat_map(|own| [line(&[1, 2, own]), line(&[3, 100 + own])]);
        let more = [line(&[1, 2, 10, 50]), line(&[3, 110, 51, 52]), line(&[1, 2, 11, 53]), line(&[3])];
        let trace = Trace::read(starts.chain(more).collect::<String>().as_bytes()).unwrap();
        let sessions: Vec<u64> = trace.requests.iter().map(|asked| asked.session).collect();
        assert_eq!(sessions[..4], [10, 110, 11, 111]);
        assert_eq!(sessions[40..], [10, 110, 11, 3]);
    }

    #[test]
    fn the_bound_counts_leading_blocks_that_anybody_had() {
        let line = |ids: &str, n: u64| {
            format!("{{\"timestamp\":0,\"input_length\":{},\"output_length\":1,\"hash_ids\":[{ids}]}}\n", n * 512)
        };
        // 0 + 2 + 1: the 4 of the last comes after a block that nobody had.
        let text = line("1,2,3", 3) + &line("1,2,4", 3) + &line("1,5,4", 3);
        assert!((Trace::read(text.as_bytes()).unwrap().bound() - 3.0 / 9.0).abs() < 1e-12);
    }

    #[test]
    fn arrivals_keep_the_rate_and_stay_in_their_step() {
        let line =
            |at: u64| format!("{{\"timestamp\":{at},\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}}\n");
        let text: String = [0, 0, 0, 3000, 3000, 6000].map(line).concat();
        let trace = Trace::read(text.as_bytes()).unwrap();
        let times = trace.arrivals(trace.rate() * 2.0, 7);
        assert!(times.is_sorted());
        for (time, at) in times {
            let from = trace.requests[at as usize].at_ms * 500_000;
            assert!((from..from + 1_500_000_000).contains(&time), "{at} at {time}");
        }
    }
}
