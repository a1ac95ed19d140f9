//! A JSON object read field by field, so that a wrong field is refused by its path and in OpenAI's words.
//!
//! A body is split into its top-level fields without parsing their values. A value is parsed when its field is taken, and all
//! parsed values of a body together are limited in number: a JSON value in memory takes up to a hundred times its text. Fields
//! that are not taken are never parsed.

mod raw;

pub(crate) use raw::Raw;

use crate::error::Error;
use bytes::Bytes;
use raw::{Budget, Refused};
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// Top-level fields of a body. All of OpenAI, vLLM and SGLang together have about 150.
const FIELDS_MAX: usize = 1024;

/// The fields of an object that are not taken yet, and the object's place in the request.
pub(crate) struct Fields {
    path: String,
    map: Map<String, Value>,
    /// Of a request's body: its fields, not parsed.
    unparsed: Vec<(String, Raw)>,
    budget: Budget,
}

impl Fields {
    /// Splits a request's body into its fields.
    pub(crate) fn parse(body: &Bytes) -> Result<Self, Error> {
        let malformed = |error: serde_json::Error| {
            let bytes = body.len();
            Error::Malformed(format!(
                "We could not parse the JSON body of your request: {error}. (The body had {bytes} bytes.)"
            ))
        };
        let whole = Raw::new(body).map_err(malformed)?;
        if !whole.is_object() {
            return Err(Error::Malformed(format!(
                "The request body must be a JSON object, but it is {}.",
                whole.kind()
            )));
        }
        let unparsed = whole.fields(FIELDS_MAX)?;
        Ok(Self { path: String::new(), map: Map::new(), unparsed, budget: Budget::default() })
    }

    /// The fields of the object `value` at `path`, which was taken from these.
    pub(crate) fn within(&self, path: String, value: Value) -> Result<Self, Error> {
        match value {
            Value::Object(map) => Ok(Self { path, map, unparsed: Vec::new(), budget: self.budget.clone() }),
            other => Err(mistyped(&path, "an object", &other)),
        }
    }

    /// A field's path.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }

    /// A field of the body as its text. `null` is the same as absent, as it is with OpenAI. Of a name that occurs several times the
    /// last value counts, as in a parsed object.
    pub(crate) fn raw(&mut self, name: &str) -> Option<Raw> {
        let at = self.unparsed.iter().rposition(|(field, _)| field == name)?;
        let (_, raw) = self.unparsed.remove(at);
        self.unparsed.retain(|(field, _)| field != name);
        Some(raw).filter(|raw| !raw.is_null())
    }

    /// A field's value. `null` is the same as absent, as it is with OpenAI.
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

    /// JSON that a client sent as a string; `None` when the string is something else.
    pub(crate) fn embedded(&self, path: &str, text: &str) -> Result<Option<Value>, Error> {
        match raw::parse(text.as_bytes(), &self.budget) {
            Ok(value) => Ok(Some(value)),
            Err(Refused::Json(_)) => Ok(None),
            Err(refused) => Err(refused.at(path)),
        }
    }

    /// Puts a field (back).
    pub(crate) fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.into(), value);
    }

    /// All that is left of an object within the body.
    pub(crate) fn rest(self) -> Map<String, Value> {
        self.map
    }

    /// The names of the fields that were not taken.
    pub(crate) fn left(&self) -> impl Iterator<Item = &str> {
        self.map.keys().map(String::as_str).chain(self.unparsed.iter().map(|(name, _)| name.as_str()))
    }

    /// The path of a field that was not taken.
    pub(crate) fn unknown(&self) -> Option<String> {
        self.left().next().map(|name| self.path(name))
    }

    /// That a field is not there.
    pub(crate) fn missing(&self, name: &str) -> Error {
        let path = self.path(name);
        let message = format!("Missing required parameter: '{path}'.");
        Error::invalid(path, "missing_required_parameter", message)
    }

    /// A string.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Error> {
        match self.value(name)? {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(mistyped(&self.path(name), "a string", &other)),
        }
    }

    /// A boolean.
    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, Error> {
        match self.value(name)? {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(mistyped(&self.path(name), "a boolean", &other)),
        }
    }

    /// An object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Fields>, Error> {
        self.value(name)?.map(|value| self.within(self.path(name), value)).transpose()
    }

    /// An array.
    pub(crate) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, Error> {
        match self.value(name)? {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(mistyped(&self.path(name), "an array", &other)),
        }
    }

    /// A number within a range.
    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, Error> {
        let path = self.path(name);
        self.value(name)?.map(|value| number(&path, &value, range)).transpose()
    }

    /// A whole number within a range.
    pub(crate) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Error> {
        let path = self.path(name);
        self.value(name)?.map(|value| integer(&path, &value, range)).transpose()
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
    // Integers beyond 64 bits come as the decimal that is nearest, which may be the smallest of 64 bits.
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

/// A value of the wrong type.
pub(crate) fn mistyped(path: &str, wanted: &str, got: &Value) -> Error {
    mistyped_as(path, wanted, kind(got))
}

/// A value of the wrong type, which is `got`.
pub(crate) fn mistyped_as(path: &str, wanted: &str, got: &str) -> Error {
    let message = format!("Invalid type for '{path}': expected {wanted}, but got {got} instead.");
    Error::invalid(path, "invalid_type", message)
}

/// An array without elements.
pub(crate) fn empty(path: &str) -> Error {
    let message = format!("Invalid '{path}': empty array. Expected an array with minimum length 1.");
    Error::invalid(path, "empty_array", message)
}

/// An array with too many elements.
pub(crate) fn too_long(path: &str, most: usize, got: usize) -> Error {
    let message =
        format!("Invalid '{path}': array too long. Expected an array with maximum length {most}, but got {got}.");
    Error::invalid(path, "array_above_max_length", message)
}

fn out_of_range(
    path: &str,
    noun: &str,
    below: bool,
    least: &dyn std::fmt::Display,
    most: &dyn std::fmt::Display,
    got: &Value,
) -> Error {
    let (code, side, expected) = match (noun, below) {
        ("integer", true) => ("integer_below_min_value", "below minimum", format!(">= {least}")),
        ("integer", false) => ("integer_above_max_value", "above maximum", format!("<= {most}")),
        (_, true) => ("decimal_below_min_value", "below minimum", format!(">= {least}")),
        (_, false) => ("decimal_above_max_value", "above maximum", format!("<= {most}")),
    };
    let message = format!("Invalid '{path}': {noun} {side} value. Expected a value {expected}, but got {got} instead.");
    Error::invalid(path, code, message)
}

/// What a value is, for a person.
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
