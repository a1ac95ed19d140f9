//! JSON as Python writes it. Models were trained on prompts with `json.dumps`, so the spaces matter.

use minijinja::value::{Kwargs, Value};
use minijinja::{Error, ErrorKind};
use serde::Serialize;
use serde_json::ser::{Formatter, PrettyFormatter};
use std::io::{self, Write};

/// The filter: `json.dumps(value, ensure_ascii=False, indent=indent)`.
#[expect(clippy::needless_pass_by_value, reason = "minijinja hands arguments over")]
pub(super) fn tojson(value: &Value, options: Kwargs) -> Result<String, Error> {
    let indent: Option<usize> = options.get("indent")?;
    // Hugging Face's renderer escapes nothing unless told to, and no template tells it to.
    let _: Option<bool> = options.get("ensure_ascii")?;
    options.assert_all_used()?;
    let mut out = Vec::new();
    let written = match indent {
        // Nobody indents further, and a template must not make a page out of a brace.
        Some(spaces) => dump(value, &mut out, PrettyFormatter::with_indent(" ".repeat(spaces.min(16)).as_bytes())),
        None => dump(value, &mut out, Spaced),
    };
    written.map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))?;
    String::from_utf8(out).map_err(|e| Error::new(ErrorKind::BadSerialization, e.to_string()))
}

fn dump(value: &Value, out: &mut Vec<u8>, formatter: impl Formatter) -> serde_json::Result<()> {
    value.serialize(&mut serde_json::Serializer::with_formatter(out, formatter))
}

/// One line, with a space after each comma and colon.
struct Spaced;

impl Formatter for Spaced {
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
