//! Ids of traces and spans, as W3C Trace Context and OpenTelemetry define them: random bytes, not all zero.

use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::num::{NonZero, NonZeroU64, NonZeroU128};
use std::sync::atomic::{AtomicU64, Ordering};

/// The id of a trace, the same in all processes.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct TraceId(NonZeroU128);

/// The id of a span within its trace.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SpanId(NonZeroU64);

impl TraceId {
    /// Parses 32 lower-case hexadecimal digits that are not all zero.
    pub(crate) fn parse(digits: &str) -> Option<Self> {
        is_lower_hex(digits, 32).then(|| u128::from_str_radix(digits, 16).ok().and_then(NonZero::new))?.map(Self)
    }

    /// The low 64 bits, by which samplers decide.
    pub(crate) fn low(self) -> u64 {
        self.0.get() as u64
    }
}

impl SpanId {
    /// Parses 16 lower-case hexadecimal digits that are not all zero.
    pub(crate) fn parse(digits: &str) -> Option<Self> {
        is_lower_hex(digits, 16).then(|| u64::from_str_radix(digits, 16).ok().and_then(NonZero::new))?.map(Self)
    }
}

/// Whether a text is this many hexadecimal digits. `from_str_radix` also takes a sign and upper case.
pub(crate) fn is_lower_hex(text: &str, digits: usize) -> bool {
    text.len() == digits && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
}

impl fmt::Display for TraceId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:032x}", self.0)
    }
}

impl fmt::Display for SpanId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Makes ids: a counter hashed with the random keys of the standard library's hash maps.
pub(crate) struct Ids {
    keys: [RandomState; 3],
    made: AtomicU64,
}

impl Ids {
    pub(crate) fn new() -> Self {
        Self { keys: std::array::from_fn(|_| RandomState::new()), made: AtomicU64::new(0) }
    }

    pub(crate) fn trace(&self) -> TraceId {
        let nth = self.made.fetch_add(1, Ordering::Relaxed);
        let [high, low] = [0, 1].map(|key| u128::from(self.keys[key].hash_one(nth)));
        TraceId(NonZero::new(high << 64 | low).unwrap_or(NonZero::<u128>::MIN))
    }

    pub(crate) fn span(&self) -> SpanId {
        let nth = self.made.fetch_add(1, Ordering::Relaxed);
        SpanId(NonZero::new(self.keys[2].hash_one(nth)).unwrap_or(NonZero::<u64>::MIN))
    }
}
