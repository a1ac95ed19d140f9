//! JSON as Python's `json.dumps` writes it. Models are trained on such prompts, so the spaces matter.

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use std::io::{self, Write};

/// The filter `tojson`: `json.dumps(value, ensure_ascii=False, indent=indent)`.
#[expect(clippy::needless_pass_by_value, reason = "minijinja hands arguments over")]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Accepted and ignored: Hugging Face's default is not to escape, and templates do not change it.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        // Bounds the size of the output.
        Some(spaces) => dump(value, &mut out, PrettyFormatter::with_indent(" ".repeat(spaces.min(16)).as_bytes())),
        None => dump(value, &mut out, PythonJson),
    };
    written.map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

fn dump(value: &Value, out: &mut Vec<u8>, formatter: impl Formatter) -> serde_json::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(out, formatter))
}

/// One line, with a space after each comma and colon.
struct PythonJson;

impl Formatter for PythonJson {
    fn begin_array_value<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_key<W: ?Sized + Write>(&mut self, writer: &mut W, first: bool) -> io::Result<()> {
        if first { Ok(()) } else { writer.write_all(b", ") }
    }

    fn begin_object_value<W: ?Sized + Write>(&mut self, writer: &mut W) -> io::Result<()> {
        writer.write_all(b": ")
    }
}
