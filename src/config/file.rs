//! A configuration file: its values, and the line of each key.

use super::Error;
use std::fmt::Write;
use std::io::{self, Read};
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
    /// Reads a file for the start of a process, also from a pipe such as `/dev/stdin`.
    pub(super) fn read(path: &Path) -> Result<Self, Vec<Error>> {
        Self::parse(path, read_once(path))
    }

    /// Reads a file again, for a reload. A pipe in its place is refused: it would stop this reload and all later ones.
    pub(super) fn read_again(path: &Path) -> Result<Self, Vec<Error>> {
        Self::parse(path, read_text(path, MAX_FILE_BYTES))
    }

    /// Reports all syntax errors, not only the first.
    fn parse(path: &Path, text: io::Result<String>) -> Result<Self, Vec<Error>> {
        let text = text.map_err(|error| vec![Error::File { path: path.into(), error }])?;
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

/// The text of a file, a pipe or a device, within the limit: a device would fill the memory. Waits for the writer of a
/// pipe.
fn read_once(path: &Path) -> io::Result<String> {
    let mut bytes = Vec::new();
    std::fs::File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > MAX_FILE_BYTES {
        let problem = format!("expected at most {MAX_FILE_BYTES} bytes");
        return Err(io::Error::new(io::ErrorKind::InvalidData, problem));
    }
    String::from_utf8(bytes).map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))
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
