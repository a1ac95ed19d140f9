//! Invalid values of the configuration.

use std::fmt;
use std::ops::RangeInclusive;
use units::{ByteSize, HumanDuration};

/// An invalid value of the configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The key with its sections, as `router.policy`.
    pub key: String,
    /// What is wrong, or what is expected.
    pub problem: String,
}

/// A value with a range.
pub trait Quantity: PartialOrd + fmt::Display {
    /// What errors call it.
    const NOUN: &str;
}

impl Quantity for u32 {
    const NOUN: &str = "a number";
}

impl Quantity for u64 {
    const NOUN: &str = "a number";
}

impl Quantity for usize {
    const NOUN: &str = "a number";
}

impl Quantity for f64 {
    const NOUN: &str = "a number";
}

impl Quantity for ByteSize {
    const NOUN: &str = "a size";
}

impl Quantity for HumanDuration {
    const NOUN: &str = "a duration";
}

impl Problem {
    /// A problem with the value of a key.
    pub fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { key: key.into(), problem: problem.into() }
    }

    /// A problem unless the value is in the range. NaN never is.
    #[expect(clippy::needless_pass_by_value, reason = "the values are numbers and durations")]
    pub fn unless_within<T: Quantity>(key: &str, value: T, range: RangeInclusive<T>) -> Option<Self> {
        let problem = || format!("expected {} between {} and {}", T::NOUN, range.start(), range.end());
        (!range.contains(&value)).then(|| Self::new(key, problem()))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.problem)
    }
}
