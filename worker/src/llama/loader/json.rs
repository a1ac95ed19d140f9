//! Access to single fields of a JSON file; each error names the file and the field.

use super::error::FolderError;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value};
use std::io::Read;
use std::path::Path;
use transport::open_regular;

/// An object in a JSON file.
#[derive(Clone, Copy)]
pub(crate) struct Fields<'a> {
    path: &'a Path,
    /// Path of the object in the file: empty, or the parents' names, each with a dot.
    prefix: &'a str,
    object: &'a Map<String, Value>,
}

impl<'a> Fields<'a> {
    /// The file's top level.
    pub(crate) fn of(path: &'a Path, file: &'a Value) -> Result<Self, FolderError> {
        let object = file.as_object().ok_or_else(|| FolderError::Json {
            path: path.to_owned(),
            problem: "the file is not a JSON object".to_owned(),
        })?;
        Ok(Self { path, prefix: "", object })
    }

    /// The object in field `name`; `prefix` is `name` with a dot. Null is like absent.
    pub(crate) fn object(&self, name: &str, prefix: &'a str) -> Result<Option<Fields<'a>>, FolderError> {
        match self.object.get(name) {
            None | Some(Value::Null) => Ok(None),
            Some(Value::Object(object)) => Ok(Some(Self { path: self.path, prefix, object })),
            Some(_) => Err(self.wrong(name, "must be an object")),
        }
    }

    /// The value. Null counts as absent.
    pub(crate) fn raw(&self, name: &str) -> Option<&'a Value> {
        self.object.get(name).filter(|value| !value.is_null())
    }

    /// Whether the field is present, even if null.
    pub(crate) fn contains(&self, name: &str) -> bool {
        self.object.contains_key(name)
    }

    /// A field that may be absent or null.
    pub(crate) fn optional<T: DeserializeOwned>(&self, name: &str) -> Result<Option<T>, FolderError> {
        self.raw(name)
            .map(|value| {
                T::deserialize(value).map_err(|error| self.wrong(name, format!("is {}: {error}", short(value))))
            })
            .transpose()
    }

    /// A required field.
    pub(crate) fn required<T: DeserializeOwned>(&self, name: &str) -> Result<T, FolderError> {
        self.optional(name)?.ok_or_else(|| self.wrong(name, "is missing"))
    }

    /// A required count from 1 to `max`.
    pub(crate) fn count(&self, name: &str, max: usize) -> Result<usize, FolderError> {
        let count = self.required(name)?;
        self.bounded(name, count, max)
    }

    /// An optional count from 1 to `max`.
    pub(crate) fn optional_count(&self, name: &str, max: usize) -> Result<Option<usize>, FolderError> {
        self.optional(name)?.map(|count| self.bounded(name, count, max)).transpose()
    }

    /// The error that field `name` is wrong; `problem` continues a sentence that starts with the name.
    pub(crate) fn wrong(&self, name: &str, problem: impl Into<String>) -> FolderError {
        FolderError::Field {
            path: self.path.to_owned(),
            field: format!("{}{name}", self.prefix),
            problem: problem.into(),
        }
    }

    fn bounded(&self, name: &str, count: usize, max: usize) -> Result<usize, FolderError> {
        if (1..=max).contains(&count) {
            Ok(count)
        } else {
            Err(self.wrong(name, format!("is {count}; it must be from 1 to {max}")))
        }
    }
}

/// A value for an error message, truncated if long.
fn short(value: &Value) -> String {
    let text = value.to_string();
    match text.char_indices().nth(60) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text,
    }
}

/// The content of a JSON file.
pub(super) fn json(path: &Path) -> Result<Value, FolderError> {
    parse(path, &read(path)?)
}

pub(super) fn read(path: &Path) -> Result<String, FolderError> {
    let mut text = String::new();
    match open_regular(path).and_then(|mut file| file.read_to_string(&mut text)) {
        Ok(_) => Ok(text),
        Err(source) => Err(FolderError::Read { path: path.to_owned(), source }),
    }
}

pub(super) fn parse(path: &Path, text: &str) -> Result<Value, FolderError> {
    serde_json::from_str(text).map_err(|error| FolderError::Json {
        path: path.to_owned(),
        problem: format!("the file is not valid JSON: {error}"),
    })
}
