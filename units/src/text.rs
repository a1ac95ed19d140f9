//! Parsing and deserialization of values that are written as text with a unit.

use serde::de::{self, Deserializer, Visitor};
use std::fmt;
use std::marker::PhantomData;
use std::str::FromStr;

/// Deserializes from text, and from numbers as if they were text, so that a number without a unit gets the same error
/// in every format.
pub(crate) fn read<'de, T: FromStr<Err = crate::Invalid>, D: Deserializer<'de>>(from: D) -> Result<T, D::Error> {
    from.deserialize_any(Text(PhantomData))
}

struct Text<T>(PhantomData<T>);

impl<T: FromStr<Err = crate::Invalid>> Visitor<'_> for Text<T> {
    type Value = T;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match "".parse::<T>() {
            Err(error) => f.write_str(error.to_string().trim_start_matches("expected ")),
            Ok(_) => f.write_str("text with a unit"),
        }
    }

    fn visit_str<E: de::Error>(self, text: &str) -> Result<T, E> {
        text.parse().map_err(E::custom)
    }

    fn visit_u64<E: de::Error>(self, number: u64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_i64<E: de::Error>(self, number: i64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }

    fn visit_f64<E: de::Error>(self, number: f64) -> Result<T, E> {
        self.visit_str(&number.to_string())
    }
}

/// `number`, which may have a fraction, times `unit`, rounded down. `None` if it is not a number or overflows.
pub(crate) fn scaled(number: &str, unit: u128) -> Option<u128> {
    let number = number.trim();
    let (whole, fraction) = number.split_once('.').unwrap_or((number, ""));
    let digits = |text: &str| text.bytes().all(|digit| digit.is_ascii_digit()) && text.len() <= 20;
    if (whole.is_empty() && fraction.is_empty()) || !digits(whole) || !digits(fraction) {
        return None;
    }
    let parse = |text: &str| if text.is_empty() { Some(0) } else { text.parse::<u128>().ok() };
    let over = 10_u128.checked_pow(fraction.len() as u32)?;
    let part = parse(fraction)?.checked_mul(unit)? / over;
    parse(whole)?.checked_mul(unit)?.checked_add(part)
}
