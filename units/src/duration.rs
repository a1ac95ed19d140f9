//! A duration with its unit.

use crate::{Invalid, text};
use serde::de::{Deserialize, Deserializer};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A duration: `"250ms"`, `"30s"`, `"5m"`. At most 1000 days: beyond that clocks overflow.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct HumanDuration(pub Duration);

/// Each unit in nanoseconds, the longest first.
const UNITS: [(&str, u128); 6] = [
    ("h", 3_600_000_000_000),
    ("m", 60_000_000_000),
    ("s", 1_000_000_000),
    ("ms", 1_000_000),
    ("us", 1_000),
    ("ns", 1),
];
/// The longest duration in nanoseconds.
const MAX: u128 = 1000 * 24 * 3_600_000_000_000;
/// The error of a longer one.
const TOO_LARGE: &str = r#"it is too large: the longest duration is "24000h" (1000 days)"#;

impl HumanDuration {
    /// A duration of whole seconds.
    pub const fn secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }

    /// A duration of whole milliseconds.
    pub const fn millis(milliseconds: u64) -> Self {
        Self(Duration::from_millis(milliseconds))
    }

    /// The duration in seconds.
    pub fn as_secs_f64(self) -> f64 {
        self.0.as_secs_f64()
    }
}

impl From<Duration> for HumanDuration {
    fn from(duration: Duration) -> Self {
        Self(duration)
    }
}

impl fmt::Display for HumanDuration {
    /// Prints exactly, in the longest unit of which the duration is a whole multiple: `90s`, `2m`, `1h`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let nanos = self.0.as_nanos();
        if nanos == 0 {
            return f.write_str("0s");
        }
        let whole = |(_, unit): &&(&str, u128)| nanos.is_multiple_of(*unit);
        let (name, unit) = UNITS.iter().find(whole).expect("every duration is a number of nanoseconds");
        write!(f, "{}{name}", nanos / unit)
    }
}

impl FromStr for HumanDuration {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let text = text.trim();
        let hint = r#"expected a duration with its unit, like "250ms", "30s" or "5m""#;
        let split = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
        let (number, name) = (&text[..split], text[split..].trim());
        if name.is_empty() {
            return match text.parse::<f64>() {
                Ok(0.0) => Ok(Self::default()),
                Ok(_) => Err(Invalid(format!("{hint}; write {text} seconds as \"{text}s\""))),
                Err(_) => Err(Invalid(hint.into())),
            };
        }
        let unit = UNITS.iter().find(|(unit, _)| *unit == name).map(|(_, unit)| *unit);
        let unit = unit.ok_or_else(|| Invalid(hint.into()))?;
        let nanos = match text::scaled(number, unit) {
            Some(nanos) if nanos <= MAX => nanos,
            Some(_) => return Err(Invalid(TOO_LARGE.into())),
            // It has too many digits, or is no number.
            None if number.parse::<f64>().is_ok_and(|number| number * unit as f64 > MAX as f64) => {
                return Err(Invalid(TOO_LARGE.into()));
            }
            None => return Err(Invalid(hint.into())),
        };
        let (seconds, rest) = (nanos / 1_000_000_000, nanos % 1_000_000_000);
        Ok(Self(Duration::new(seconds as u64, rest as u32)))
    }
}

impl Serialize for HumanDuration {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for HumanDuration {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text::read(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_printed_in_their_longest_whole_unit() {
        for (text, printed) in [
            ("250ms", "250ms"),
            ("30s", "30s"),
            ("1.5 s", "1500ms"),
            ("120s", "2m"),
            ("90s", "90s"),
            ("60m", "1h"),
            ("0.05ms", "50us"),
            ("1ns", "1ns"),
            ("0", "0s"),
            ("0h", "0s"),
        ] {
            assert_eq!(text.parse::<HumanDuration>().unwrap().to_string(), printed);
        }
    }

    #[test]
    fn a_number_without_a_unit_is_refused_with_the_right_spelling() {
        for text in ["30", "", "s", "-1s", "infs", "3 fortnights", "nan", "1e300s", ".s", "1.2.3s"] {
            assert!(text.parse::<HumanDuration>().unwrap_err().to_string().contains("250ms"), "{text}");
        }
        for (json, wanted) in [("30", "\"30s\""), ("1.5", "\"1.5s\""), ("true", "like \"250ms\"")] {
            let error = serde_json::from_str::<HumanDuration>(json).unwrap_err().to_string();
            assert!(error.contains(wanted), "{json}: {error}");
        }
        assert_eq!(serde_json::from_str::<HumanDuration>("0").unwrap(), HumanDuration::default());
    }

    #[test]
    fn a_duration_that_is_too_large_is_refused_with_the_largest() {
        let parse = |text: &str| text.parse::<HumanDuration>();
        for text in ["24001h", "24000.001h", "86400000.000000001s", "100000000000000000000000s"] {
            let error = parse(text).unwrap_err().to_string();
            assert_eq!(error, r#"it is too large: the longest duration is "24000h" (1000 days)"#, "{text}");
        }
        assert_eq!(parse("24000h"), Ok(HumanDuration(Duration::from_nanos(MAX as u64))));
    }

    proptest::proptest! {
        #[test]
        fn every_duration_survives_printing(nanos in 0..MAX as u64) {
            let duration = HumanDuration(Duration::from_nanos(nanos));
            proptest::prop_assert_eq!(duration.to_string().parse::<HumanDuration>(), Ok(duration));
        }
    }
}
