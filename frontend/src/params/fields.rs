//! Reads a JSON object field by field. Errors name the field's path, in OpenAI's words.
//!
//! A body is split into its top-level fields without parsing their values. A value is parsed when its field is taken,
//! and the number of parsed values per body is limited: a JSON value in memory takes up to a hundred times its text.
//! Fields that are not taken are never parsed.

mod raw;

pub(crate) use raw::Raw;

use crate::error::Error;
use bytes::Bytes;
use memchr::memmem;
use raw::{Budget, Name, ParseError};
use serde_json::{Map, Value};
use std::fmt::Display;
use std::ops::RangeInclusive;

/// Maximum number of top-level fields of a body. OpenAI, vLLM and SGLang together have about 150.
const MAX_FIELDS: usize = 1024;

/// The fields of an object that are not taken yet, and the object's path in the request.
pub(crate) struct Fields {
    path: String,
    map: Map<String, Value>,
    /// The fields of a request's body, unparsed. Empty for objects within it.
    unparsed: Vec<(Name, Raw)>,
    budget: Budget,
}

impl Fields {
    /// Splits a request's body into its fields.
    pub(crate) fn parse(body: &Bytes) -> Result<Self, Error> {
        let malformed = |error: &dyn Display| {
            let (bytes, hint) = (body.len(), hint(body));
            Error::Malformed(format!(
                "We could not parse the JSON body of your request: {error}. (The body had {bytes} bytes.){hint}"
            ))
        };
        // The parser does not look at strings that it steps over, which may be relayed.
        str::from_utf8(body).map_err(|error| malformed(&error))?;
        let whole = Raw::new(body).map_err(|error| malformed(&error))?;
        if !whole.is_object() {
            return Err(Error::Malformed(format!(
                "The request body must be a JSON object, but it is {}.",
                whole.kind()
            )));
        }
        let unparsed = whole.fields(MAX_FIELDS)?;
        Ok(Self { path: String::new(), map: Map::new(), unparsed, budget: Budget::default() })
    }

    /// The fields of the object `value` at `path`, which was taken from these fields.
    pub(crate) fn within(&self, path: String, value: Value) -> Result<Self, Error> {
        match value {
            Value::Object(map) => Ok(Self { path, map, unparsed: Vec::new(), budget: self.budget.clone() }),
            other => Err(mistyped(&path, "an object", &other)),
        }
    }

    /// The fields of a body for a second reader: what it parses counts against a limit of its own, so that the first
    /// one can read what it needs.
    pub(crate) fn for_second_reader(&self) -> Self {
        let (path, unparsed) = (self.path.clone(), self.unparsed.clone());
        Self { path, map: Map::new(), unparsed, budget: Budget::default() }
    }

    /// The path of a field of this object.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }

    /// Takes a field of the body as JSON text. `null` is the same as absent, as in OpenAI's API. If a name occurs
    /// several times, the last value counts, as in a parsed object.
    pub(crate) fn raw(&mut self, name: &str) -> Option<Raw> {
        let at = self.unparsed.iter().rposition(|(field, _)| field.is(name))?;
        let (_, raw) = self.unparsed.remove(at);
        self.unparsed.retain(|(field, _)| !field.is(name));
        Some(raw).filter(|raw| !raw.is_null())
    }

    /// Whether another parser may read another value for a field: it occurs several times, or in other letter case.
    pub(crate) fn is_ambiguous(&self, name: &str) -> bool {
        let mut alike = self.unparsed.iter().filter(|(field, _)| field.as_str().eq_ignore_ascii_case(name));
        alike.next().is_some_and(|(field, _)| !field.is(name)) || alike.next().is_some()
    }

    /// A field of the body as JSON text, which is not taken.
    pub(crate) fn peek(&self, name: &str) -> Option<&Raw> {
        self.unparsed.iter().rfind(|(field, _)| field.is(name)).map(|(_, raw)| raw)
    }

    /// The fields of an object that is a field of the body, which is not taken. `None`: it is absent or no object.
    pub(crate) fn peek_object(&self, name: &str) -> Result<Option<Self>, Error> {
        let Some(raw) = self.peek(name).filter(|raw| raw.is_object()) else { return Ok(None) };
        let (path, unparsed) = (self.path(name), raw.fields(MAX_FIELDS)?);
        Ok(Some(Self { path, map: Map::new(), unparsed, budget: self.budget.clone() }))
    }

    /// Takes a field's value. `null` is the same as absent, as in OpenAI's API.
    pub(crate) fn value(&mut self, name: &str) -> Result<Option<Value>, Error> {
        match self.raw(name) {
            Some(raw) => self.parsed(name, &raw).map(Some),
            None => Ok(self.map.remove(name).filter(|value| !value.is_null())),
        }
    }

    /// Parses the text of the field `name`, or of a part of it.
    pub(crate) fn parsed(&self, name: &str, raw: &Raw) -> Result<Value, Error> {
        raw.value(&self.budget).map_err(|error| error.at(&self.path(name)))
    }

    /// Parses JSON that a client sent as a string; `None` if the string is not JSON.
    pub(crate) fn embedded(&self, path: &str, text: &str) -> Result<Option<Value>, Error> {
        match raw::parse(text.as_bytes(), &self.budget) {
            Ok(value) => Ok(Some(value)),
            Err(ParseError::Json(_)) => Ok(None),
            Err(error) => Err(error.at(path)),
        }
    }

    /// Sets a field.
    pub(crate) fn insert(&mut self, name: &str, value: Value) {
        self.map.insert(name.into(), value);
    }

    /// The fields that were not taken, of an object within the body.
    pub(crate) fn into_remaining(self) -> Map<String, Value> {
        self.map
    }

    /// The names of the fields that were not taken.
    pub(crate) fn remaining(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str).chain(self.unparsed.iter().map(|(name, _)| name.as_str()))
    }

    /// The path of the first field that was not taken.
    pub(crate) fn first_remaining_path(&self) -> Option<String> {
        self.remaining().next().map(|name| self.path(name))
    }

    /// The error of a missing field.
    pub(crate) fn missing(&self, name: &str) -> Error {
        let path = self.path(name);
        let message = format!("Missing required parameter: '{path}'.");
        Error::invalid(path, "missing_required_parameter", message)
    }

    /// Takes a string.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Error> {
        match self.value(name)? {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(mistyped(&self.path(name), "a string", &other)),
        }
    }

    /// Takes a boolean.
    pub(crate) fn boolean(&mut self, name: &str) -> Result<Option<bool>, Error> {
        match self.value(name)? {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(mistyped(&self.path(name), "a boolean", &other)),
        }
    }

    /// Takes an object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Fields>, Error> {
        self.value(name)?.map(|value| self.within(self.path(name), value)).transpose()
    }

    /// Takes an array.
    pub(crate) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, Error> {
        match self.value(name)? {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(mistyped(&self.path(name), "an array", &other)),
        }
    }

    /// Takes a number within a range.
    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, Error> {
        self.value(name)?.map(|value| number(&self.path(name), &value, range)).transpose()
    }

    /// Takes a whole number within a range.
    pub(crate) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Error> {
        let Some(value) = self.value(name)? else { return Ok(None) };
        // Only an error needs the path.
        let within = value.as_i64().filter(|number| range.contains(number));
        within.map_or_else(|| integer(&self.path(name), &value, range), Ok).map(Some)
    }
}

/// What to change in a body that is no JSON, but that some servers accept.
fn hint(body: &[u8]) -> &'static str {
    let has = |word: &str| memmem::find(body, word.as_bytes()).is_some();
    let is_utf8 = !body.starts_with(b"\xef\xbb\xbf") && str::from_utf8(body).is_ok_and(|text| !text.contains('\0'));
    if !is_utf8 {
        " JSON must be encoded in UTF-8, without a byte order mark."
    } else if has("NaN") || has("Infinity") {
        " JSON has no NaN and no Infinity: leave the field out, or send null."
    } else {
        ""
    }
}

/// A number within a range.
pub(crate) fn number(path: &str, value: &Value, range: RangeInclusive<f64>) -> Result<f32, Error> {
    let number = value.as_f64().ok_or_else(|| mistyped(path, "a number", value))?;
    if range.contains(&number) {
        return Ok(number as f32);
    }
    Err(out_of_range(path, "decimal", number < *range.start(), range.start(), range.end(), value))
}

/// A whole number within a range; `3.0` is one too.
pub(crate) fn integer(path: &str, value: &Value, range: RangeInclusive<i64>) -> Result<i64, Error> {
    // serde_json parses integers beyond 64 bits as the nearest `f64`, which may be `i64::MIN`.
    let within = |number: f64| if number <= i64::MIN as f64 { i128::MIN } else { number as i128 };
    let whole = |number: f64| (number.fract() == 0.0).then(|| within(number));
    let number = match value {
        Value::Number(n) => n.as_i128().or_else(|| n.as_f64().and_then(whole)),
        _ => None,
    };
    let number = number.ok_or_else(|| mistyped(path, "an integer", value))?;
    match i64::try_from(number) {
        Ok(number) if range.contains(&number) => Ok(number),
        _ => Err(out_of_range(path, "integer", number < (*range.start()).into(), range.start(), range.end(), value)),
    }
}

/// The error of a value of the wrong type.
pub(crate) fn mistyped(path: &str, expected: &str, got: &Value) -> Error {
    mistyped_as(path, expected, kind(got))
}

/// The error of a value of the wrong type, where `got` names its type.
pub(crate) fn mistyped_as(path: &str, expected: &str, got: &str) -> Error {
    let message = format!("Invalid type for '{path}': expected {expected}, but got {got} instead.");
    Error::invalid(path, "invalid_type", message)
}

/// The error of an array without elements.
pub(crate) fn empty(path: &str) -> Error {
    let message = format!("Invalid '{path}': empty array. Expected an array with minimum length 1.");
    Error::invalid(path, "empty_array", message)
}

/// The error of an array with too many elements.
pub(crate) fn too_long(path: &str, max: usize, got: usize) -> Error {
    let message =
        format!("Invalid '{path}': array too long. Expected an array with maximum length {max}, but got {got}.");
    Error::invalid(path, "array_above_max_length", message)
}

fn out_of_range(
    path: &str,
    noun: &str,
    below: bool,
    min: &dyn std::fmt::Display,
    max: &dyn std::fmt::Display,
    got: &Value,
) -> Error {
    let (code, side, expected) = match (noun, below) {
        ("integer", true) => ("integer_below_min_value", "below minimum", format!(">= {min}")),
        ("integer", false) => ("integer_above_max_value", "above maximum", format!("<= {max}")),
        (_, true) => ("decimal_below_min_value", "below minimum", format!(">= {min}")),
        (_, false) => ("decimal_above_max_value", "above maximum", format!("<= {max}")),
    };
    let message = format!("Invalid '{path}': {noun} {side} value. Expected a value {expected}, but got {got} instead.");
    Error::invalid(path, code, message)
}

/// A value's type, for error messages.
fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "a boolean",
        Value::Number(n) if n.is_f64() => "a decimal",
        Value::Number(_) => "an integer",
        Value::String(_) => "a string",
        Value::Array(_) => "an array",
        Value::Object(_) => "an object",
    }
}

#[cfg(test)]
mod tests;
