//! A JSON object read field by field, so that whatever is wrong is refused by its path and in OpenAI's words. A field that
//! nobody takes is a vendor's: it is left alone here and travels on in the body's own bytes.

use crate::error::Error;
use serde_json::{Map, Value};
use std::ops::RangeInclusive;

/// What is left of an object, and where in the request it stands.
pub(crate) struct Fields {
    path: String,
    map: Map<String, Value>,
}

impl Fields {
    /// Parses a request's body.
    pub(crate) fn parse(body: &[u8]) -> Result<Self, Error> {
        match serde_json::from_slice(body) {
            Ok(Value::Object(map)) => Ok(Self { path: String::new(), map }),
            Ok(other) => {
                Err(Error::Malformed(format!("The request body must be a JSON object, but it is {}.", kind(&other))))
            }
            Err(error) => Err(Error::Malformed(format!(
                "We could not parse the JSON body of your request: {error}. (The body had {} bytes.)",
                body.len()
            ))),
        }
    }

    /// The fields of an object at `path`.
    pub(crate) fn of(path: String, value: Value) -> Result<Self, Error> {
        match value {
            Value::Object(map) => Ok(Self { path, map }),
            other => Err(mistyped(&path, "an object", &other)),
        }
    }

    /// A field's path.
    pub(crate) fn path(&self, name: &str) -> String {
        if self.path.is_empty() { name.into() } else { format!("{}.{name}", self.path) }
    }

    /// A field as it came. `null` is the same as absent, as it is with OpenAI.
    pub(crate) fn value(&mut self, name: &str) -> Option<Value> {
        self.map.remove(name).filter(|value| !value.is_null())
    }

    /// Puts a field (back).
    pub(crate) fn put(&mut self, name: &str, value: Value) {
        self.map.insert(name.into(), value);
    }

    /// All that is left.
    pub(crate) fn rest(self) -> Map<String, Value> {
        self.map
    }

    /// The path of a field that nobody took.
    pub(crate) fn unknown(&self) -> Option<String> {
        self.map.keys().next().map(|name| self.path(name))
    }

    /// That a field is not there.
    pub(crate) fn missing(&self, name: &str) -> Error {
        let path = self.path(name);
        let message = format!("Missing required parameter: '{path}'.");
        Error::invalid(path, "missing_required_parameter", message)
    }

    /// A string.
    pub(crate) fn text(&mut self, name: &str) -> Result<Option<String>, Error> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::String(text)) => Ok(Some(text)),
            Some(other) => Err(mistyped(&self.path(name), "a string", &other)),
        }
    }

    /// A boolean.
    pub(crate) fn flag(&mut self, name: &str) -> Result<Option<bool>, Error> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Bool(flag)) => Ok(Some(flag)),
            Some(other) => Err(mistyped(&self.path(name), "a boolean", &other)),
        }
    }

    /// An object.
    pub(crate) fn object(&mut self, name: &str) -> Result<Option<Fields>, Error> {
        self.value(name).map(|value| Fields::of(self.path(name), value)).transpose()
    }

    /// An array.
    pub(crate) fn array(&mut self, name: &str) -> Result<Option<Vec<Value>>, Error> {
        match self.value(name) {
            None => Ok(None),
            Some(Value::Array(items)) => Ok(Some(items)),
            Some(other) => Err(mistyped(&self.path(name), "an array", &other)),
        }
    }

    /// A number within a range.
    pub(crate) fn number(&mut self, name: &str, range: RangeInclusive<f64>) -> Result<Option<f32>, Error> {
        let path = self.path(name);
        self.value(name).map(|value| number(&path, &value, range)).transpose()
    }

    /// A whole number within a range.
    pub(crate) fn integer(&mut self, name: &str, range: RangeInclusive<i64>) -> Result<Option<i64>, Error> {
        let path = self.path(name);
        self.value(name).map(|value| integer(&path, &value, range)).transpose()
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
    let whole = |number: f64| (number.fract() == 0.0).then_some(number as i128);
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
    let message = format!("Invalid type for '{path}': expected {wanted}, but got {} instead.", kind(got));
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
