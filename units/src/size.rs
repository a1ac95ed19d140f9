//! A number of bytes with its unit.

use crate::{Invalid, text};
use serde::de::{Deserialize, Deserializer};
use serde::ser::{Serialize, Serializer};
use std::fmt;
use std::str::FromStr;

/// A number of bytes: `"4GiB"`, `"512MB"`, `"65536B"`. Below 2^63.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct ByteSize(pub u64);

/// Units that are parsed. The first six are printed: binary units, the largest first.
const UNITS: [(&str, u64); 16] = [
    ("PiB", 1 << 50),
    ("TiB", 1 << 40),
    ("GiB", 1 << 30),
    ("MiB", 1 << 20),
    ("KiB", 1 << 10),
    ("B", 1),
    ("Pi", 1 << 50),
    ("Ti", 1 << 40),
    ("Gi", 1 << 30),
    ("Mi", 1 << 20),
    ("Ki", 1 << 10),
    ("PB", 1_000_000_000_000_000),
    ("TB", 1_000_000_000_000),
    ("GB", 1_000_000_000),
    ("MB", 1_000_000),
    ("KB", 1_000),
];
/// Number of units that are printed.
const PRINTED: usize = 6;

impl ByteSize {
    /// The size rounded to a tenth of its unit, for display: `1.2 GiB`. The unit is chosen after rounding, so there is
    /// no `1024.0 MiB`.
    pub fn about(self) -> String {
        let units = &UNITS[..PRINTED - 1];
        let Some(at) = units.iter().position(|(_, unit)| self.0 >= *unit) else {
            return format!("{} B", self.0);
        };
        let rounded = |at: usize| {
            let (name, unit) = units[at];
            format!("{:.1} {name}", self.0 as f64 / unit as f64)
        };
        let text = rounded(at);
        if at > 0 && text.starts_with("1024.0 ") { rounded(at - 1) } else { text }
    }

    /// The size as `usize`.
    pub const fn as_usize(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for ByteSize {
    /// Prints exactly, in the largest binary unit of which the size is a whole multiple.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0 == 0 {
            return f.write_str("0B");
        }
        let whole = |(_, unit): &&(&str, u64)| self.0.is_multiple_of(*unit);
        let (name, unit) = UNITS[..PRINTED].iter().find(whole).expect("every size is a number of bytes");
        write!(f, "{}{name}", self.0 / unit)
    }
}

impl FromStr for ByteSize {
    type Err = Invalid;

    fn from_str(text: &str) -> Result<Self, Invalid> {
        let text = text.trim();
        let hint = r#"expected a size with its unit, like "4GiB", "512MiB" or "1000B""#;
        let split = text.find(|letter: char| !letter.is_ascii_digit() && letter != '.').unwrap_or(text.len());
        let (number, name) = (&text[..split], text[split..].trim());
        if name.is_empty() {
            return match (text.parse::<u64>(), text.parse::<f64>()) {
                (_, Ok(0.0)) => Ok(Self(0)),
                (Ok(bytes), _) => Err(Invalid(format!("{hint}; write {bytes} bytes as \"{}\"", Self(bytes)))),
                _ => Err(Invalid(hint.into())),
            };
        }
        let unit = UNITS.iter().find(|(unit, _)| unit.eq_ignore_ascii_case(name)).map(|(_, unit)| *unit);
        // Fractions of bytes are invalid.
        let unit = unit.filter(|unit| *unit > 1 || !number.contains('.'));
        let bytes = unit.and_then(|unit| text::scaled(number, unit.into())).filter(|bytes| *bytes < 1 << 63);
        bytes.map(|bytes| Self(bytes as u64)).ok_or_else(|| Invalid(hint.into()))
    }
}

impl Serialize for ByteSize {
    fn serialize<S: Serializer>(&self, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for ByteSize {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        text::read(from)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_printed_exactly_in_binary_units() {
        for (text, printed) in [
            ("4GiB", "4GiB"),
            ("4096 MiB", "4GiB"),
            ("1.5gib", "1536MiB"),
            ("2Gi", "2GiB"),
            ("1PiB", "1PiB"),
            ("2pi", "2PiB"),
            ("1PB", "976562500000KiB"),
            ("1GB", "1000000000B"),
            ("10KB", "10000B"),
            ("65536B", "64KiB"),
            ("100b", "100B"),
            ("0", "0B"),
            ("0GiB", "0B"),
        ] {
            assert_eq!(text.parse::<ByteSize>().unwrap().to_string(), printed);
        }
        assert_eq!(ByteSize(1_288_490_189).about(), "1.2 GiB");
    }

    #[test]
    fn a_rounded_size_is_below_1024_of_its_unit() {
        for (bytes, shown) in [
            (0, "0 B"),
            (1023, "1023 B"),
            (1 << 10, "1.0 KiB"),
            ((1 << 20) - 52, "1023.9 KiB"),
            ((1 << 20) - 51, "1.0 MiB"),
            ((1 << 20) - 1, "1.0 MiB"),
            (1 << 20, "1.0 MiB"),
            ((1 << 30) - 1, "1.0 GiB"),
            ((1 << 40) - 1, "1.0 TiB"),
            ((1 << 50) - 1, "1.0 PiB"),
            (1 << 60, "1024.0 PiB"),
        ] {
            assert_eq!(ByteSize(bytes).about(), shown, "{bytes} bytes");
        }
    }

    #[test]
    fn a_number_without_a_unit_is_refused_with_the_right_spelling() {
        for text in ["", "GiB", "-1GiB", "4 apples", "1.5", "1.5B", "99999999999TiB", "NaNGiB", "ä", "65536"] {
            assert!(text.parse::<ByteSize>().unwrap_err().to_string().contains("4GiB"), "{text}");
        }
        for (json, wanted) in [("65536", "\"64KiB\""), ("1.5", "like \"4GiB\""), ("-1", "4GiB"), ("[]", "4GiB")] {
            let error = serde_json::from_str::<ByteSize>(json).unwrap_err().to_string();
            assert!(error.contains(wanted), "{json}: {error}");
        }
        assert_eq!(serde_json::from_str::<ByteSize>("0").unwrap(), ByteSize(0));
    }

    proptest::proptest! {
        #[test]
        fn every_size_survives_printing(bytes in 0..1_u64 << 63) {
            proptest::prop_assert_eq!(ByteSize(bytes).to_string().parse::<ByteSize>(), Ok(ByteSize(bytes)));
        }
    }
}
