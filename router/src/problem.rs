//! Invalid values of the configuration.

use std::fmt;
use std::ops::RangeInclusive;

/// An invalid value of the configuration.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The key with its sections, as `router.policy`.
    pub key: String,
    /// What is wrong, or what is expected.
    pub problem: String,
}

impl Problem {
    /// A problem with the value of a key.
    pub fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { key: key.into(), problem: problem.into() }
    }

    /// A problem unless the value is in the range. NaN never is.
    #[expect(clippy::needless_pass_by_value, reason = "the values are numbers and durations")]
    pub fn unless_within<T: PartialOrd + fmt::Display>(key: &str, value: T, range: RangeInclusive<T>) -> Option<Self> {
        let problem = || format!("expected a number between {} and {}", range.start(), range.end());
        (!range.contains(&value)).then(|| Self::new(key, problem()))
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.key, self.problem)
    }
}
