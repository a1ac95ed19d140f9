//! A configuration file: its values, and on which line each key stands.

use super::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};

/// A file that was read.
pub(super) struct File {
    path: PathBuf,
    text: String,
    /// Its values.
    pub(super) table: toml::Table,
}

impl File {
    /// Reads a file. All its syntax errors are found, not the first only.
    pub(super) fn read(path: &Path) -> Result<Self, Vec<Error>> {
        let text = std::fs::read_to_string(path).map_err(|error| vec![Error::File { path: path.into(), error }])?;
        let syntax = |error: &toml::de::Error| Error::Syntax {
            path: path.into(),
            line: line_at(&text, error.span().map_or(0, |span| span.start)),
            error: error.message().trim().replace('\n', ", "),
        };
        let (_, errors) = DeTable::parse_recoverable(&text);
        if !errors.is_empty() {
            return Err(errors.iter().map(syntax).collect());
        }
        // What the parser takes and its values do not: a date that does not exist, or a number too large.
        let table = toml::from_str(&text).map_err(|error| vec![syntax(&error)])?;
        Ok(Self { path: path.into(), text, table })
    }

    /// How the file is called as the origin of values.
    pub(super) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The file and the line on which a key stands, or the nearest thing that it lies in.
    pub(super) fn origin(&self, key: &str) -> String {
        let mut origin = self.name();
        if let Ok(table) = DeTable::parse(&self.text) {
            let steps: Vec<&str> = key.split('.').collect();
            if let Some(at) = in_table(table.get_ref(), &steps) {
                write!(origin, ":{}", line_at(&self.text, at)).expect("a string takes everything");
            }
        }
        origin
    }
}

/// Where the key that these steps lead to begins, or the deepest one on the way. A key may have dots in it.
fn in_table(table: &DeTable<'_>, steps: &[&str]) -> Option<usize> {
    (1..=steps.len()).find_map(|len| {
        let name = steps[..len].join(".");
        let (key, value) = table.iter().find(|(key, _)| **key.get_ref() == name)?;
        in_value(value, &steps[len..]).or_else(|| Some(key.span().start))
    })
}

fn in_value(value: &Spanned<DeValue<'_>>, steps: &[&str]) -> Option<usize> {
    let (first, rest) = steps.split_first()?;
    match value.get_ref() {
        DeValue::Table(table) => in_table(table, steps),
        DeValue::Array(list) => {
            let element = list.get(first.parse::<usize>().ok()?)?;
            in_value(element, rest).or_else(|| Some(element.span().start))
        }
        _ => None,
    }
}

/// The line, from 1, of a byte.
fn line_at(text: &str, byte: usize) -> usize {
    1 + text.as_bytes().iter().take(byte).filter(|byte| **byte == b'\n').count()
}
