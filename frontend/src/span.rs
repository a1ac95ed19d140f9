//! A length of time in a configuration: text with a unit.

use serde::de::{Deserialize, Deserializer, Error, IgnoredAny};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;
use std::time::Duration;

/// A length of time: `"250ms"`, `"30s"`, `"5m"`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Span(pub Duration);

/// A text is not a length of time.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(r#"expected a length of time with its unit, like "250ms", "30s" or "5m""#)]
pub struct NotASpan;

impl Span {
    const UNITS: [(&'static str, f64); 4] = [("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];

    /// A number of seconds.
    pub const fn secs(seconds: u64) -> Self {
        Self(Duration::from_secs(seconds))
    }
}

impl fmt::Display for Span {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0.as_millis() {
            ms if ms.is_multiple_of(1000) => write!(f, "{}s", ms / 1000),
            ms => write!(f, "{ms}ms"),
        }
    }
}

impl FromStr for Span {
    type Err = NotASpan;

    fn from_str(text: &str) -> Result<Self, NotASpan> {
        let (number, seconds) = Self::UNITS
            .iter()
            .find_map(|(unit, seconds)| Some((text.trim().strip_suffix(unit)?, *seconds)))
            .ok_or(NotASpan)?;
        let span = number.trim().parse::<f64>().map_err(|_| NotASpan)? * seconds;
        // A thousand days is for ever; beyond it clocks overflow.
        if (0.0..86_400_000.0).contains(&span) { Ok(Self(Duration::from_secs_f64(span))) } else { Err(NotASpan) }
    }
}

impl Serialize for Span {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Span {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        /// A number without a unit is refused with the same words as any other text.
        #[derive(serde::Deserialize)]
        #[serde(untagged)]
        enum Written {
            Text(String),
            Other(IgnoredAny),
        }
        match Written::deserialize(from).map_err(|_| D::Error::custom(NotASpan))? {
            Written::Text(text) => text.parse().map_err(D::Error::custom),
            Written::Other(_) => Err(D::Error::custom(NotASpan)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Span;

    #[test]
    fn spans_need_a_unit() {
        for (text, printed) in
            [("250ms", "250ms"), ("30s", "30s"), ("1.5 s", "1500ms"), ("2m", "120s"), ("1h", "3600s")]
        {
            assert_eq!(text.parse::<Span>().unwrap().to_string(), printed);
        }
        for text in ["30", "", "s", "-1s", "infs", "3 fortnights"] {
            assert!(text.parse::<Span>().unwrap_err().to_string().contains("250ms"), "{text}");
        }
    }
}
