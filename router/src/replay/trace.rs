//! A trace of requests in Mooncake's format: one line of JSON per request, with its arrival in milliseconds
//! (`timestamp`), `input_length` and `output_length` in tokens, and `hash_ids`, one number per block of 512 tokens that
//! identifies the block together with all blocks before it. The trace file of a router adds the `model`, the `tenant`
//! and the `max_tokens` of each request; other fields are ignored.

use crate::hash::splitmix64;
use crate::telemetry::UNIT_TOKENS;
use kvbm::SequenceHash;
use serde::{Deserialize, Serialize};
use std::collections::{HashMap, HashSet};
use std::io::{self, BufRead, Write};
use std::sync::Arc;

/// Tokens per block of a trace.
pub const BLOCK_TOKENS: u64 = UNIT_TOKENS;

/// Requests in order of arrival.
#[derive(Clone, PartialEq, Debug)]
pub struct Trace {
    pub(super) requests: Vec<RequestSpec>,
}

/// One request.
#[derive(Clone, PartialEq, Debug)]
pub(super) struct RequestSpec {
    /// Milliseconds since the first request.
    pub(super) arrival_ms: u64,
    pub(super) input_tokens: u64,
    pub(super) output_tokens: u64,
    pub(super) blocks: Vec<u32>,
    /// The conversation that the request seems to belong to.
    pub(super) session: u64,
    /// The requested model, if the line has one; otherwise empty.
    pub(super) model: Box<str>,
    /// The tenant, if the line has one; otherwise empty.
    pub(super) tenant: Box<str>,
    /// Largest number of output tokens that the request allowed, if the line has it.
    pub(super) max_tokens: Option<u32>,
}

/// Why a trace cannot be read.
#[derive(Debug, thiserror::Error)]
pub enum TraceError {
    /// Reading failed.
    #[error("trace: {0}")]
    Read(#[from] std::io::Error),
    /// A line is not a request.
    #[error("trace, line {line}: {what}")]
    Line {
        /// Number of the line, from 1.
        line: usize,
        /// What is wrong with it.
        what: String,
    },
    /// The trace contains no request.
    #[error("trace: contains no request")]
    Empty,
}

#[derive(Serialize, Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u64,
    output_length: u64,
    hash_ids: Vec<u32>,
    #[serde(default, skip_serializing_if = "str::is_empty")]
    model: Box<str>,
    #[serde(default, skip_serializing_if = "str::is_empty")]
    tenant: Box<str>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    max_tokens: Option<u32>,
}

impl RequestSpec {
    /// Names the distribution of output lengths that the request belongs to. The simulated workers serve all models of
    /// a trace, so that the model is part of the name.
    pub(super) fn output_class(&self) -> Arc<str> {
        if self.model.is_empty() {
            return Arc::from(&*self.tenant);
        }
        format!("{}\n{}", self.model, self.tenant).into()
    }
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
            let invalid = |what: String| TraceError::Line { line: at + 1, what };
            let Line { timestamp, input_length, output_length, hash_ids, model, tenant, max_tokens } =
                serde_json::from_str(&line).map_err(|error| invalid(describe_parse_error(&error)))?;
            let blocks = input_length.div_ceil(BLOCK_TOKENS);
            if input_length == 0 || hash_ids.len() as u64 != blocks {
                let have = hash_ids.len();
                return Err(invalid(format!("input_length {input_length} needs {blocks} hash_ids, found {have}")));
            }
            if !timestamp.is_finite() || timestamp < 0.0 {
                return Err(invalid(format!("timestamp {timestamp} is not a number of milliseconds of at least 0")));
            }
            let (arrival_ms, output) = (timestamp as u64, output_length.max(1));
            requests.push(RequestSpec {
                arrival_ms,
                input_tokens: input_length,
                output_tokens: output,
                blocks: hash_ids,
                session: 0,
                model,
                tenant,
                max_tokens,
            });
        }
        if requests.is_empty() {
            return Err(TraceError::Empty);
        }
        Ok(Self::new(requests))
    }

    /// A trace of requests in any order.
    pub(super) fn new(mut requests: Vec<RequestSpec>) -> Self {
        requests.sort_by_key(|spec| spec.arrival_ms);
        let first = requests.first().map_or(0, |spec| spec.arrival_ms);
        for spec in &mut requests {
            spec.arrival_ms -= first;
        }
        assign_sessions(&mut requests);
        Self { requests }
    }

    /// Writes the trace in the format that [`Trace::read`] reads.
    pub fn write(&self, mut to: impl Write) -> io::Result<()> {
        for spec in &self.requests {
            let line = Line {
                timestamp: spec.arrival_ms as f64,
                input_length: spec.input_tokens,
                output_length: spec.output_tokens,
                hash_ids: spec.blocks.clone(),
                model: spec.model.clone(),
                tenant: spec.tenant.clone(),
                max_tokens: spec.max_tokens,
            };
            serde_json::to_writer(&mut to, &line)?;
            to.write_all(b"\n")?;
        }
        to.flush()
    }

    /// Number of requests.
    pub fn len(&self) -> usize {
        self.requests.len()
    }

    /// Whether there are no requests. [`Trace::read`] rejects such a trace.
    pub fn is_empty(&self) -> bool {
        self.requests.is_empty()
    }

    /// Recorded rate, in requests per second.
    pub fn rate(&self) -> f64 {
        let last = self.requests.last().map_or(0, |spec| spec.arrival_ms);
        self.len() as f64 / (last.max(1) as f64 / 1000.0)
    }

    /// The hit rate of one unlimited cache, from 0 to 1: an upper bound for every policy.
    pub fn hit_rate_bound(&self) -> f64 {
        let mut seen = HashSet::<u32>::new();
        let (mut hits, mut all) = (0, 0);
        for spec in &self.requests {
            hits += spec.blocks.iter().take_while(|block| seen.contains(*block)).count();
            all += spec.blocks.len();
            seen.extend(&spec.blocks);
        }
        hits as f64 / all.max(1) as f64
    }

    /// Arrival times in nanoseconds, at `rate` requests per second on average. A recorder may write times in steps, of
    /// three seconds in the public trace; then the seed places each request between its time and the next one, and
    /// thereby also decides the order. Other times are those of milliseconds.
    pub(super) fn arrivals(&self, rate: f64, seed: u64) -> Vec<(u64, u32)> {
        let scale = 1e6 * self.rate() / rate;
        let distinct = self.requests.chunk_by(|a, b| a.arrival_ms == b.arrival_ms).count();
        let in_steps = self.len() as f64 > distinct as f64 * REQUESTS_PER_TIME;
        let mut times = Vec::with_capacity(self.len());
        let mut step_ms = u64::from(!in_steps);
        for (at, spec) in self.requests.iter().enumerate().rev() {
            let later = self.requests.get(at + 1).filter(|next| in_steps && next.arrival_ms > spec.arrival_ms);
            if let Some(next) = later {
                step_ms = next.arrival_ms - spec.arrival_ms;
            }
            let within = unit_interval(splitmix64(seed ^ splitmix64(at as u64))) * step_ms as f64;
            times.push((((spec.arrival_ms as f64 + within) * scale) as u64, at as u32));
        }
        times.sort_unstable();
        times
    }
}

/// With more requests per distinct time than this, a trace was recorded in steps. The public trace has ten, its parts
/// more than one and a half; of times in milliseconds few are equal up to hundreds of requests per second.
const REQUESTS_PER_TIME: f64 = 1.2;

/// Describes why a line cannot be parsed, with an example. The caller adds the number of the line.
fn describe_parse_error(error: &serde_json::Error) -> String {
    let (all, column) = (error.to_string(), error.column());
    let what = all.strip_suffix(&format!(" at line {} column {column}", error.line())).unwrap_or(&all);
    format!("{what} at column {column}; a line is a request, like {EXAMPLE_LINE}")
}

/// A valid line.
const EXAMPLE_LINE: &str = r#"{"timestamp": 0, "input_length": 600, "output_length": 20, "hash_ids": [1, 2]}"#;

/// Assigns sessions. A trace does not contain any, but prompts of a conversation start with the same blocks. Blocks in
/// more than [`COMMON_PREFIX_SHARE`] of all prompts are instructions that many conversations share; the first block
/// after them identifies the session.
fn assign_sessions(requests: &mut [RequestSpec]) {
    let mut occurrences = HashMap::<u32, usize>::new();
    for block in requests.iter().flat_map(|spec| &spec.blocks) {
        *occurrences.entry(*block).or_default() += 1;
    }
    let most = (requests.len() as f64 * COMMON_PREFIX_SHARE) as usize;
    for RequestSpec { blocks, session, .. } in requests {
        let own = blocks.iter().find(|block| occurrences[*block] <= most);
        *session = own.or(blocks.last()).copied().unwrap_or_default().into();
    }
}

/// Yields 7,373 sessions for the public trace; the largest has one of 280 prompts.
const COMMON_PREFIX_SHARE: f64 = 0.1;

/// A number in [0, 1) from 64 random bits.
pub(super) fn unit_interval(bits: u64) -> f64 {
    (bits >> 11) as f64 / (1_u64 << 53) as f64
}

/// The hash of a trace's block in the index.
pub(super) fn block_hash(block: u32) -> SequenceHash {
    let (low, high) = (splitmix64(u64::from(block)), splitmix64(!u64::from(block)));
    SequenceHash::from_bytes(((u128::from(high) << 64) | u128::from(low)).to_le_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_names_the_invalid_line() {
        let text = "{\"timestamp\":0,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2]}\n\n{\"timestamp\":0}";
        let error = Trace::read(text.as_bytes()).unwrap_err().to_string();
        assert!(error.starts_with("trace, line 3: missing field `input_length` at column 15; a line is"), "{error}");
        let error = Trace::read("# Notes".as_bytes()).unwrap_err().to_string();
        assert_eq!(
            error,
            format!("trace, line 1: expected value at column 1; a line is a request, like {EXAMPLE_LINE}")
        );
        assert_eq!(Trace::read(EXAMPLE_LINE.as_bytes()).unwrap().len(), 1);
        let short = "{\"timestamp\":0,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1]}";
        let error = Trace::read(short.as_bytes()).unwrap_err().to_string();
        assert_eq!(error, "trace, line 1: input_length 600 needs 2 hash_ids, found 1");
        assert!(matches!(Trace::read("\n".as_bytes()), Err(TraceError::Empty)));
    }

    #[test]
    fn model_tenant_and_limit_of_a_request_are_optional() {
        let line = |more: &str| {
            format!("{{\"timestamp\":0,\"input_length\":600,\"output_length\":1,\"hash_ids\":[1,2]{more}}}\n")
        };
        let text = line("") + &line(",\"model\":\"m\",\"tenant\":\"t\",\"max_tokens\":9,\"worker\":\"w1\"");
        let trace = Trace::read(text.as_bytes()).unwrap();
        let of = |nth: usize| {
            let RequestSpec { model, tenant, max_tokens, .. } = &trace.requests[nth];
            (&**model, &**tenant, *max_tokens, trace.requests[nth].output_class())
        };
        assert_eq!(of(0), ("", "", None, "".into()));
        assert_eq!(of(1), ("m", "t", Some(9), "m\nt".into()));
        let mut written = Vec::new();
        trace.write(&mut written).unwrap();
        assert_eq!(Trace::read(written.as_slice()).unwrap(), trace);
    }

    #[test]
    fn first_block_after_a_common_prefix_is_the_session() {
        let line = |ids: &[u32]| {
            let input = ids.len() * 512;
            format!("{{\"timestamp\":0,\"input_length\":{input},\"output_length\":1,\"hash_ids\":{ids:?}}}\n")
        };
        // Two common prefixes, 1 2 and 3; twenty conversations with each, and further turns of some.
        let starts = (10..30).flat_map(|own| [line(&[1, 2, own]), line(&[3, 100 + own])]);
        let more = [line(&[1, 2, 10, 50]), line(&[3, 110, 51, 52]), line(&[1, 2, 11, 53]), line(&[3])];
        let trace = Trace::read(starts.chain(more).collect::<String>().as_bytes()).unwrap();
        let sessions: Vec<u64> = trace.requests.iter().map(|spec| spec.session).collect();
        assert_eq!(sessions[..4], [10, 110, 11, 111]);
        assert_eq!(sessions[40..], [10, 110, 11, 3]);
    }

    #[test]
    fn arrivals_are_spread_over_the_steps_of_the_recorder() {
        let line = |timestamp: &u64| {
            format!("{{\"timestamp\":{timestamp},\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}}\n")
        };
        let late_ms = |times: &[u64]| {
            let trace = Trace::read(times.iter().map(line).collect::<String>().as_bytes()).unwrap();
            let late = |(ns, nth): &(u64, u32)| (*ns as f64 / 1e6 - times[*nth as usize] as f64).round() as u64;
            trace.arrivals(trace.rate(), 7).iter().map(late).collect::<Vec<u64>>()
        };
        // Two requests per step, which is not exact.
        let in_steps = late_ms(&[0, 0, 3_000, 3_000, 6_001, 6_001]);
        assert!(in_steps.iter().all(|late| *late <= 3_001) && in_steps.iter().any(|late| *late > 100), "{in_steps:?}");
        let exact = late_ms(&[0, 3_000, 6_001, 9_000]);
        assert!(exact.iter().all(|late| *late <= 1), "{exact:?}");
    }

    #[test]
    fn hit_rate_bound_counts_leading_blocks_seen_before() {
        let line = |ids: &str, n: u64| {
            format!("{{\"timestamp\":0,\"input_length\":{},\"output_length\":1,\"hash_ids\":[{ids}]}}\n", n * 512)
        };
        // 0 + 2 + 1: the 4 of the last prompt follows a block that is new.
        let text = line("1,2,3", 3) + &line("1,2,4", 3) + &line("1,5,4", 3);
        assert!((Trace::read(text.as_bytes()).unwrap().hit_rate_bound() - 3.0 / 9.0).abs() < 1e-12);
    }

    #[test]
    fn arrivals_keep_the_rate_and_their_interval() {
        let line =
            |at: u64| format!("{{\"timestamp\":{at},\"input_length\":1,\"output_length\":1,\"hash_ids\":[1]}}\n");
        let text: String = [0, 0, 0, 3000, 3000, 6000].map(line).concat();
        let trace = Trace::read(text.as_bytes()).unwrap();
        let times = trace.arrivals(trace.rate() * 2.0, 7);
        assert!(times.is_sorted());
        for (time, at) in times {
            let from = trace.requests[at as usize].arrival_ms * 500_000;
            assert!((from..from + 1_500_000_000).contains(&time), "{at} at {time}");
        }
    }
}
