//! Workloads generated from a seed: classes of traffic that differ in what they share and in what they load.
//!
//! A workload is generated at the request rate of a run. So the time between the turns of a conversation and the width
//! of a burst do not change with the rate, unlike those of a recorded trace, which is replayed faster or slower. The
//! same class, number of requests, rate and seed give the same trace.
//!
//! Not here: what the lengths and intervals of each class are and where they come from (`classes`).

mod classes;
mod prompt;

#[cfg(test)]
mod tests;

use super::random::Random;
use super::trace::{BLOCK_TOKENS, RequestSpec, Trace};
use std::fmt;
use std::str::FromStr;

/// A class of traffic.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Workload {
    /// Agents: long prompts that grow from step to step, and bursts of sub-agents that continue the same prompt.
    Agents,
    /// Prompts that share nothing.
    NoReuse,
    /// One prefix of this many tokens in 95 % of all requests.
    HotPrefix(u64),
    /// A set of popular prefixes, which is replaced by another one after half of the requests.
    ShiftingPrefixes,
    /// Long outputs, with a short prefix in all requests: memory and decode limit, not prefill.
    DecodeHeavy,
    /// Several questions about each of many long documents.
    Documents,
    /// Conversations of several turns.
    Chat,
    /// Bursts of 60 requests with the same prefix.
    PrefixBursts,
}

/// Lengths of the prefix in the classes that [`Workload::all`] lists.
const HOT_PREFIXES: [u64; 3] = [4 << 10, 16 << 10, 32 << 10];
/// Default number of requests per worker: several minutes of traffic near capacity in each class, many times longer
/// than a request takes.
const REQUESTS_PER_WORKER: usize = 500;
/// Limit of the default number of requests: a run with a few hundred workers takes seconds.
const REQUESTS_MAX: usize = 30_000;

/// The later requests of sessions are dropped when there are this many times as many as are wanted. At thousands of
/// requests per second, those of the sessions that began before the trace are millions.
const KEPT_DRAFTS: usize = 4;

impl Workload {
    /// All classes.
    pub fn all() -> Vec<Self> {
        use Workload::{Agents, Chat, DecodeHeavy, Documents, NoReuse, PrefixBursts, ShiftingPrefixes};
        let hot = HOT_PREFIXES.map(Self::HotPrefix);
        [Agents, NoReuse]
            .into_iter()
            .chain(hot)
            .chain([ShiftingPrefixes, DecodeHeavy, Documents, Chat, PrefixBursts])
            .collect()
    }

    /// The names of all classes, as the command line takes them.
    fn names() -> String {
        let name = |workload: Self| match workload {
            Self::HotPrefix(_) => "hot-prefix:LENGTH (like hot-prefix:32k)".to_owned(),
            other => other.to_string(),
        };
        let mut names: Vec<String> = Self::all().into_iter().map(name).collect();
        names.dedup();
        names.join(", ")
    }

    /// Default number of requests for a fleet.
    pub fn default_requests(workers: usize) -> usize {
        (workers * REQUESTS_PER_WORKER).min(REQUESTS_MAX)
    }

    /// Generates `requests` requests that arrive at `rate` per second on average.
    pub fn generate(self, requests: usize, rate: f64, seed: u64) -> Trace {
        let mut generator = Generator::new(requests, rate, seed);
        match self {
            Self::Agents => generator.agents(),
            Self::NoReuse => generator.no_reuse(),
            Self::HotPrefix(tokens) => generator.hot_prefix(tokens),
            Self::ShiftingPrefixes => generator.shifting_prefixes(),
            Self::DecodeHeavy => generator.decode_heavy(),
            Self::Documents => generator.documents(),
            Self::Chat => generator.chat(),
            Self::PrefixBursts => generator.prefix_bursts(),
        }
        generator.into_trace()
    }
}

impl fmt::Display for Workload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Agents => f.write_str("agents"),
            Self::NoReuse => f.write_str("no-reuse"),
            Self::HotPrefix(tokens) if tokens % 1024 == 0 => write!(f, "hot-prefix:{}k", tokens / 1024),
            Self::HotPrefix(tokens) => write!(f, "hot-prefix:{tokens}"),
            Self::ShiftingPrefixes => f.write_str("shifting-prefixes"),
            Self::DecodeHeavy => f.write_str("decode-heavy"),
            Self::Documents => f.write_str("documents"),
            Self::Chat => f.write_str("chat"),
            Self::PrefixBursts => f.write_str("prefix-bursts"),
        }
    }
}

impl FromStr for Workload {
    type Err = String;

    /// Parses a name as [`Display`](fmt::Display) prints it. The prefix may have any length of at least one block.
    fn from_str(name: &str) -> Result<Self, String> {
        if let Some(workload) = Self::all().into_iter().find(|workload| workload.to_string() == name) {
            return Ok(workload);
        }
        let length = name.strip_prefix("hot-prefix:").ok_or_else(|| format!("expected one of {}", Self::names()))?;
        let tokens = match length.strip_suffix('k') {
            Some(thousands) => thousands.parse::<u64>().ok().and_then(|number| number.checked_mul(1024)),
            None => length.parse().ok(),
        };
        // Above the context of any model.
        let valid = tokens.filter(|tokens| (BLOCK_TOKENS..=1 << 20).contains(tokens));
        valid
            .map(Self::HotPrefix)
            .ok_or_else(|| "expected a length of 512 to 1024k tokens, like hot-prefix:32k".to_owned())
    }
}

/// The requests of a workload while they are generated.
struct Generator {
    random: Random,
    /// Number of requests that are wanted.
    requests: usize,
    /// Requests per second.
    rate: f64,
    blocks: prompt::Blocks,
    /// Requests with their arrival, in seconds.
    drafts: Vec<(f64, RequestSpec)>,
}

impl Generator {
    fn new(requests: usize, rate: f64, seed: u64) -> Self {
        Self { random: Random::new(seed), requests, rate, blocks: prompt::Blocks::default(), drafts: Vec::new() }
    }

    /// Adds a request.
    fn request(&mut self, arrival_s: f64, prompt: &prompt::Prompt, output_tokens: u64) {
        let spec = RequestSpec {
            arrival_ms: 0,
            input_tokens: prompt.tokens(),
            output_tokens: output_tokens.max(1),
            blocks: prompt.blocks(&mut self.blocks),
            session: 0,
            model: "".into(),
            tenant: "".into(),
            max_tokens: None,
        };
        self.drafts.push((arrival_s, spec));
    }

    /// Adds independent requests: `each` adds those of one arrival, which is the number of its first request and its
    /// time. `of` requests arrive at once; arrivals are a Poisson process.
    fn arrivals(&mut self, of: usize, mut each: impl FnMut(&mut Self, usize, f64)) {
        let mut now_s = 0.0;
        while self.drafts.len() < self.requests {
            now_s += self.random.exponential(of as f64 / self.rate);
            each(self, self.drafts.len(), now_s);
        }
    }

    /// Adds sessions: `each` adds the requests of a session that begins at a time. Sessions begin as a Poisson process,
    /// `of` is their mean number of requests. The first ones begin `longest_s` seconds before the trace, so that the
    /// mix of first and later requests is the same from the start to the end of the trace.
    fn sessions(&mut self, of: f64, longest_s: f64, mut each: impl FnMut(&mut Self, f64)) {
        let mut begin_s = -longest_s;
        loop {
            // Checked after many sessions, because it counts all requests.
            for _ in 0..64 {
                begin_s += self.random.exponential(of / self.rate);
                each(self, begin_s);
            }
            self.drafts.retain(|(at, _)| *at >= 0.0);
            if self.drafts.len() >= KEPT_DRAFTS * self.requests {
                self.keep_first();
            }
            if self.drafts.iter().filter(|(at, _)| *at <= begin_s).count() >= self.requests {
                return;
            }
        }
    }

    /// Sorts the requests by arrival and drops those that come after as many as are wanted.
    fn keep_first(&mut self) {
        self.drafts.sort_by(|a, b| a.0.total_cmp(&b.0));
        self.drafts.truncate(self.requests);
    }

    fn into_trace(mut self) -> Trace {
        self.keep_first();
        let of = |(at, spec): (f64, RequestSpec)| RequestSpec { arrival_ms: (at * 1000.0) as u64, ..spec };
        Trace::new(self.drafts.into_iter().map(of).collect())
    }
}
