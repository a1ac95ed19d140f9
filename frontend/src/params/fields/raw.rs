//! JSON text that is validated but not parsed: a view of the body's own bytes. Parsing counts each value against a
//! budget.

use super::kind;
use crate::error::Error;
use bytes::Bytes;
use memchr::{memchr, memchr2};
use serde::de::{DeserializeSeed, Deserializer, Error as _, IgnoredAny, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};
use std::cell::Cell;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Maximum number of parsed values of one body: arrays, objects and their contents. A conversation of 2,048 messages
/// with tool calls and 128 tools has about 70,000. A value takes up to 200 bytes, so all take up to 26 MiB, and those
/// of a second reader as much again. Token ids and texts of a prompt are not counted, because they are read one by one.
const MAX_VALUES: usize = 128 << 10;

/// Fields of most bodies, for which there is room from the start.
const FEW_FIELDS: usize = 16;

/// The number of values of a body that may still be parsed.
#[derive(Clone)]
pub(crate) struct Budget(Arc<AtomicUsize>);

impl Default for Budget {
    fn default() -> Self {
        Self(Arc::new(AtomicUsize::new(MAX_VALUES)))
    }
}

impl Budget {
    /// Takes one value. Returns whether there was one left.
    fn take(&self) -> bool {
        self.0.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |left| left.checked_sub(1)).is_ok()
    }
}

/// Why JSON text was not parsed.
pub(crate) enum ParseError {
    /// The body has too many values.
    TooMany,
    /// The text is well formed but cannot be parsed: nested too deeply, a number out of range, or half of a surrogate
    /// pair.
    Json(serde_json::Error),
}

impl ParseError {
    /// The error of the field at `path`.
    pub(crate) fn at(self, path: &str) -> Error {
        match self {
            Self::TooMany => {
                let message = format!(
                    "Invalid '{path}': the request has too many values. Expected at most {MAX_VALUES} elements of \
                     arrays and properties of objects in all of its fields; shorten '{path}'."
                );
                Error::invalid(path, "too_many_values", message)
            }
            Self::Json(error) => {
                Error::Malformed(format!("We could not parse the JSON body of your request: '{path}': {error}."))
            }
        }
    }
}

/// The name of a field, without escapes: a part of the body, unless it was written with some.
#[derive(Clone, Default)]
pub(super) struct Name(Bytes);

/// Well-formed JSON text.
#[derive(Clone, Debug)]
pub(crate) struct Raw(Bytes);

impl Raw {
    /// Validates a text.
    pub(crate) fn new(text: &Bytes) -> Result<Self, serde_json::Error> {
        let IgnoredAny = serde_json::from_slice(text)?;
        Ok(Self(text.slice_ref(text.trim_ascii())))
    }

    /// The text.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(crate) fn is_null(&self) -> bool {
        self.0.starts_with(b"n")
    }

    pub(crate) fn is_object(&self) -> bool {
        self.0.starts_with(b"{")
    }

    pub(crate) fn is_array(&self) -> bool {
        self.0.starts_with(b"[")
    }

    pub(crate) fn is_string(&self) -> bool {
        self.0.starts_with(b"\"")
    }

    pub(crate) fn is_number(&self) -> bool {
        self.0.first().is_some_and(|byte| matches!(byte, b'-' | b'0'..=b'9'))
    }

    /// The type of the value, for error messages.
    pub(crate) fn kind(&self) -> &'static str {
        match self.0.first() {
            Some(b'[') => "an array",
            Some(b'{') => "an object",
            // Any other value is small.
            Some(b'"') => "a string",
            _ => serde_json::from_slice(&self.0).map_or("a number out of range", |value| kind(&value)),
        }
    }

    /// Parses a string.
    pub(crate) fn text(&self, path: &str) -> Result<String, Error> {
        serde_json::from_slice(&self.0).map_err(|error| ParseError::Json(error).at(path))
    }

    /// Parses a number.
    pub(crate) fn number(&self, path: &str) -> Result<Value, Error> {
        serde_json::from_slice(&self.0).map_err(|error| ParseError::Json(error).at(path))
    }

    /// A number of at most nine digits, such as a token id.
    pub(crate) fn small(&self) -> Option<i64> {
        let digits = self.0.len() <= 9 && self.0.iter().all(u8::is_ascii_digit);
        digits.then(|| self.0.iter().fold(0, |number, digit| number * 10 + i64::from(digit - b'0')))
    }

    /// Parses the text. Each value counts against the budget, also if the text is rejected.
    pub(crate) fn value(&self, budget: &Budget) -> Result<Value, ParseError> {
        match self.simple() {
            Some(_) if !budget.take() => Err(ParseError::TooMany),
            Some(value) => Ok(value),
            None => parse(&self.0, budget),
        }
    }

    /// The value, if it is one that most fields have, which takes less time than a parser.
    fn simple(&self) -> Option<Value> {
        match &self.0[..] {
            b"true" => Some(Value::Bool(true)),
            b"false" => Some(Value::Bool(false)),
            [b'"', text @ .., b'"'] if memchr(b'\\', text).is_none() => {
                std::str::from_utf8(text).ok().map(|text| Value::String(text.to_owned()))
            }
            _ => self.small().map(Value::from),
        }
    }

    /// The fields of an object, in order, at most `max` of them.
    pub(super) fn fields(&self, max: usize) -> Result<Vec<(Name, Raw)>, Error> {
        let mut fields = Vec::with_capacity(FEW_FIELDS);
        self.walk(&mut |name, raw| {
            if fields.len() == max {
                return Err(Error::Malformed(format!("The request body has more than {max} fields.")));
            }
            fields.push((name, raw));
            Ok(())
        })?;
        Ok(fields)
    }

    /// Calls `take` with each element of an array, until it fails.
    pub(crate) fn elements(&self, mut take: impl FnMut(Raw) -> Result<(), Error>) -> Result<(), Error> {
        self.walk(&mut |_, raw| take(raw))
    }

    /// Calls `take` with each element of an array, or with each name and value of an object, until it fails.
    fn walk(&self, take: &mut dyn FnMut(Name, Raw) -> Result<(), Error>) -> Result<(), Error> {
        let object = self.is_object();
        let mut scan = Scan { text: &self.0, at: 1 };
        while !matches!(scan.next(), b']' | b'}') {
            let mut name = Name::default();
            if object {
                name = self.name(scan.value())?;
                scan.at += usize::from(scan.next() == b':');
            }
            take(name, self.part(scan.value()))?;
            scan.at += usize::from(scan.next() == b',');
        }
        Ok(())
    }

    /// The name of a field, which stands here with its quotes.
    fn name(&self, range: Range<usize>) -> Result<Name, Error> {
        let written = &self.0[range.start + 1..range.end - 1];
        if memchr(b'\\', written).is_none() && std::str::from_utf8(written).is_ok() {
            return Ok(Name(self.0.slice_ref(written)));
        }
        self.part(range).text("").map(|name| Name(name.into()))
    }

    fn part(&self, range: Range<usize>) -> Self {
        Self(self.0.slice(range))
    }
}

impl Name {
    pub(super) fn as_str(&self) -> &str {
        std::str::from_utf8(&self.0).expect("it was checked when it was made")
    }

    pub(super) fn is(&self, name: &str) -> bool {
        self.0 == name
    }
}

/// Finds the parts of well-formed JSON text.
struct Scan<'a> {
    text: &'a [u8],
    at: usize,
}

impl Scan<'_> {
    /// The next byte other than white space.
    fn next(&mut self) -> u8 {
        while self.text[self.at].is_ascii_whitespace() {
            self.at += 1;
        }
        self.text[self.at]
    }

    /// Steps over a value.
    fn value(&mut self) -> Range<usize> {
        let mut depth = 0usize;
        let first = self.next();
        let start = self.at;
        loop {
            match self.text[self.at] {
                b'"' => self.string(),
                b'[' | b'{' => {
                    depth += 1;
                    self.at += 1;
                }
                b']' | b'}' => {
                    depth -= 1;
                    self.at += 1;
                }
                _ => self.at += 1,
            }
            let ended = match first {
                b'"' => true,
                b'[' | b'{' => depth == 0,
                _ => self
                    .text
                    .get(self.at)
                    .is_none_or(|byte| matches!(byte, b',' | b']' | b'}' | b' ' | b'\n' | b'\r' | b'\t')),
            };
            if ended {
                return start..self.at;
            }
        }
    }

    fn string(&mut self) {
        self.at += 1;
        loop {
            self.at += memchr2(b'"', b'\\', &self.text[self.at..]).expect("well-formed text ends its strings");
            if self.text[self.at] == b'"' {
                self.at += 1;
                return;
            }
            self.at += 2;
        }
    }
}

/// Parses a JSON text within a budget of values.
pub(crate) fn parse(text: &[u8], budget: &Budget) -> Result<Value, ParseError> {
    let left = Cell::new(budget.0.load(Ordering::Relaxed));
    let mut deserializer = serde_json::Deserializer::from_slice(text);
    let value =
        BudgetedValue(&left).deserialize(&mut deserializer).and_then(|value| deserializer.end().map(|()| value));
    budget.0.store(left.get(), Ordering::Relaxed);
    value.map_err(|error| if left.get() == 0 { ParseError::TooMany } else { ParseError::Json(error) })
}

/// Parses a value while the budget lasts.
#[derive(Clone, Copy)]
struct BudgetedValue<'a>(&'a Cell<usize>);

impl<'de> DeserializeSeed<'de> for BudgetedValue<'_> {
    type Value = Value;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        match self.0.get().checked_sub(1) {
            Some(left) => {
                self.0.set(left);
                deserializer.deserialize_any(self)
            }
            None => Err(D::Error::custom("too many values")),
        }
    }
}

impl<'de> Visitor<'de> for BudgetedValue<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E>(self, value: f64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut parts: A) -> Result<Value, A::Error> {
        let mut values = Vec::new();
        while let Some(value) = parts.next_element_seed(self)? {
            values.push(value);
        }
        Ok(values.into())
    }

    fn visit_map<A: MapAccess<'de>>(self, mut parts: A) -> Result<Value, A::Error> {
        let mut values = Map::new();
        while let Some(name) = parts.next_key::<String>()? {
            let value = parts.next_value_seed(self)?;
            values.insert(name, value);
        }
        Ok(values.into())
    }
}
