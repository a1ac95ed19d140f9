//! A configuration file: its values, and the line of each key.

use super::Error;
use std::fmt::Write;
use std::path::{Path, PathBuf};
use toml::Spanned;
use toml::de::{DeTable, DeValue};
use transport::read_text;

/// Maximum size of a file: tables of tens of thousands of upstreams.
pub(super) const MAX_FILE_BYTES: u64 = 16 << 20;

/// A parsed file.
pub(super) struct File {
    path: PathBuf,
    text: String,
    /// The values of the file.
    pub(super) table: toml::Table,
}

impl File {
    /// Reads a file. Reports all syntax errors, not only the first.
    pub(super) fn read(path: &Path) -> Result<Self, Vec<Error>> {
        // A pipe in its place would stop all later reloads, and a device would fill the memory.
        let text = read_text(path, MAX_FILE_BYTES).map_err(|error| vec![Error::File { path: path.into(), error }])?;
        let syntax = |error: &toml::de::Error| Error::Syntax {
            path: path.into(),
            line: line_at(&text, error.span().map_or(0, |span| span.start)),
            error: error.message().trim().replace('\n', ", "),
        };
        let (_, errors) = DeTable::parse_recoverable(&text);
        if !errors.is_empty() {
            return Err(errors.iter().map(syntax).collect());
        }
        // The recovering parser accepts values that cannot be converted: an invalid date, or a number that is too
        // large.
        let table = toml::from_str(&text).map_err(|error| vec![syntax(&error)])?;
        Ok(Self { path: path.into(), text, table })
    }

    /// The path of the file, as shown for the origin of values.
    pub(super) fn name(&self) -> String {
        self.path.display().to_string()
    }

    /// The file and the line of a key, or of the nearest enclosing table.
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

/// Byte offset of the key at a path, or of the deepest existing key on the path. A key may contain dots.
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
