//! A value of the configuration that is not possible.

use std::fmt;
use std::ops::RangeInclusive;

/// A value of the configuration that is not possible.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Problem {
    /// The key, with the sections that it lies in.
    pub key: String,
    /// What would be right.
    pub problem: String,
}

impl Problem {
    /// What would be right for a key.
    pub fn new(key: impl Into<String>, problem: impl Into<String>) -> Self {
        Self { key: key.into(), problem: problem.into() }
    }

    /// A problem unless the value lies in the range. Not a number lies in none.
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
