//! The loads under which all gateways are measured, one after the other.

use super::figures::What;
use super::load::{Load, Measured, Until};
use super::peers::Gateway;
use std::net::SocketAddr;
use std::time::Duration;

/// Between two tokens of a paced stream: 50 tokens per second.
const PACE: Duration = Duration::from_millis(20);
/// Size of the prompts of [`Scenario::Long`], and of what each of them shares with others.
pub(super) const LONG_PROMPT: usize = 16 << 10;
pub(super) const LONG_SHARED: usize = 12 << 10;

/// What is measured while all gateways run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Scenario {
    /// Short prompts, whole answers.
    Plain,
    /// The same, as streams without a pace.
    Stream,
    /// 256 streams of 50 tokens per second.
    Paced,
    /// One request at a time, one token.
    Single,
    /// Prompts of 16 KiB, of which 12 KiB are shared, one token.
    Long,
}

impl Scenario {
    /// All scenarios.
    pub const ALL: [Self; 5] = [Self::Plain, Self::Stream, Self::Paced, Self::Single, Self::Long];

    /// The load of one measurement.
    pub fn load(self, addresses: Vec<SocketAddr>, time: Duration) -> Load {
        let (clients, stream, tokens, prompt, shared) = match self {
            Self::Plain => (32, false, 64, 128, 64),
            Self::Stream => (32, true, 64, 128, 64),
            Self::Paced => (256, true, 64, 128, 64),
            Self::Single => (1, true, 1, 128, 64),
            Self::Long => (32, true, 1, LONG_PROMPT, LONG_SHARED),
        };
        let warmup = Duration::from_secs(if self == Self::Paced { 2 } else { 1 });
        Load { addresses, clients, stream, tokens, prompt, shared, warmup, until: Until::Elapsed(time) }
    }

    /// Time between two tokens of a stream.
    pub fn pace(self) -> Duration {
        if self == Self::Paced { PACE } else { Duration::ZERO }
    }

    /// Whether it says something about a gateway. Dynamo's own engines send tokens at a pace of their own, and several
    /// in one chunk.
    pub fn concerns(self, gateway: Gateway) -> bool {
        gateway != Gateway::Dynamo || matches!(self, Self::Plain | Self::Long)
    }

    /// The figures that it measures.
    pub fn measures(self) -> &'static [What] {
        match self {
            Self::Plain => &[What::CpuRequest],
            Self::Stream => &[What::CpuChunk],
            Self::Paced => &[What::CpuChunkPaced],
            Self::Single => &[What::AddedFirst50, What::AddedFirst99],
            Self::Long => &[What::CpuLong],
        }
    }

    /// Its name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Stream => "stream",
            Self::Paced => "paced",
            Self::Single => "single",
            Self::Long => "long",
        }
    }

    /// The figures of a measurement; `direct`: the same load without a gateway.
    pub fn values(self, measured: &Measured, direct: Option<&Measured>) -> Vec<(What, f64)> {
        let added = |quantile| Some(measured.first_us(quantile)? - direct?.first_us(quantile)?);
        let value = |what| match what {
            What::CpuRequest | What::CpuLong => Some(measured.cpu_per_request()),
            What::CpuChunk | What::CpuChunkPaced => Some(measured.cpu_per_chunk()),
            What::AddedFirst50 => added(0.5),
            What::AddedFirst99 => added(0.99),
            What::MemoryStreams | What::MemoryPrompts => None,
        };
        self.measures().iter().filter_map(|what| Some((*what, value(*what)?))).collect()
    }
}
