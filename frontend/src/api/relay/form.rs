//! The model that a form names (`multipart/form-data`, RFC 7578), as in requests to transcribe audio.
//!
//! Only the field `model` is read; files are passed over. A form that is not understood here names no model: what it
//! means is the engine's business.

use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderMap, HeaderValue};
use bytes::Bytes;
use memchr::memmem::{self, Finder};
use std::ops::Range;

/// Maximum number of parts of a form that is understood. Requests with audio have about ten fields, those with images
/// up to sixteen files.
const MAX_PARTS: usize = 128;
/// Maximum size of the header of a part: a name, the name of a file, and a type.
const MAX_HEADER: usize = 4 << 10;
/// Maximum length of the name of a model.
const MAX_NAME: usize = 256;
/// Maximum length of a boundary (RFC 2046, section 5.1.1).
const MAX_BOUNDARY: usize = 70;

/// The line that separates the parts of a form.
pub(super) struct Boundary(String);

/// The field `model` of a form.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(in crate::api) struct FormModel {
    pub(super) name: String,
    /// Where the body has it.
    at: Range<usize>,
}

impl Boundary {
    /// The boundary of a body that is a form.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let (kind, parameters) = headers.get(CONTENT_TYPE).map(HeaderValue::to_str)?.ok()?.split_once(';')?;
        let boundary =
            parameter(parameters, "boundary").filter(|_| kind.trim().eq_ignore_ascii_case("multipart/form-data"));
        boundary.filter(|text| (1..=MAX_BOUNDARY).contains(&text.len())).map(|text| Self(format!("\r\n--{text}")))
    }
}

impl FormModel {
    /// The model that a form names. `None`: it names none, or several.
    pub(super) fn find(boundary: &Boundary, body: &[u8]) -> Option<Self> {
        let delimiter = boundary.0.as_bytes();
        let finder = Finder::new(delimiter);
        // The first delimiter may begin the body, without the end of a line before it.
        let first = if body.starts_with(&delimiter[2..]) { Some(delimiter.len() - 2) } else { None };
        let mut at = first.or_else(|| Some(finder.find(body)? + delimiter.len()))?;
        let mut found = None;
        for _ in 0..MAX_PARTS {
            let part = &body[at..];
            if part.starts_with(b"--") {
                return found;
            }
            // The end of the delimiter's line is that before the header, which may be empty.
            let header = &part[..memmem::find(&part[..part.len().min(MAX_HEADER)], b"\r\n\r\n")?];
            let start = at + header.len() + 4;
            let end = start + finder.find(&body[start..])?;
            if is_model(header) {
                let name =
                    str::from_utf8(&body[start..end]).ok().filter(|name| (1..=MAX_NAME).contains(&name.len()))?;
                if found.replace(Self { name: name.to_owned(), at: start..end }).is_some() {
                    return None;
                }
            }
            at = end + delimiter.len();
        }
        None
    }

    /// The form with another name of the model. Copies the body.
    pub(super) fn renamed(&self, body: &Bytes, name: &str) -> Bytes {
        [&body[..self.at.start], name.as_bytes(), &body[self.at.end..]].concat().into()
    }
}

/// Whether a part with this header is the field `model`, and no file.
fn is_model(header: &[u8]) -> bool {
    let Ok(header) = str::from_utf8(header) else { return false };
    let fields = header.split("\r\n").filter_map(|line| line.split_once(':'));
    let mut dispositions = fields.filter(|(name, _)| name.trim().eq_ignore_ascii_case("content-disposition"));
    let Some((_, disposition)) = dispositions.next() else { return false };
    parameter(disposition, "name") == Some("model") && parameter(disposition, "filename").is_none()
}

/// A parameter after a semicolon, also in quotes. Values with escapes or semicolons are not understood.
fn parameter<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let mut parameters = text.split(';').filter_map(|parameter| parameter.split_once('='));
    let (_, value) = parameters.find(|(of, _)| of.trim().eq_ignore_ascii_case(name))?;
    let value = value.trim();
    Some(value.strip_prefix('"').and_then(|value| value.strip_suffix('"')).unwrap_or(value))
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const FORM: &str = "--b\r\nContent-Disposition: form-data; name=\"file\"; filename=\"model\"\r\n\
        Content-Type: audio/wav\r\n\r\nRIFF\r\n--\r\n\r\n\0\r\n--b\r\n\
        content-disposition: form-data; name=model\r\n\r\nwhisper\r\n--b\r\n\
        Content-Disposition: form-data; name=\"language\"\r\n\r\nde\r\n--b--\r\n";

    fn boundary(content_type: &str) -> Option<String> {
        let headers = HeaderMap::from_iter([(CONTENT_TYPE, content_type.parse().unwrap())]);
        Boundary::of(&headers).map(|boundary| boundary.0)
    }

    fn find(body: &str) -> Option<FormModel> {
        FormModel::find(&Boundary("\r\n--b".to_owned()), body.as_bytes())
    }

    #[test]
    fn the_model_of_a_form_is_found_and_replaced() {
        for form in [FORM.to_owned(), format!("a preamble\r\n{FORM}")] {
            let found = find(&form).unwrap();
            assert_eq!(found.name, "whisper");
            assert_eq!(found.renamed(&Bytes::from(form.clone()), "org/w"), form.replace("whisper", "org/w"));
        }
    }

    #[test]
    fn a_form_that_is_not_understood_names_no_model() {
        let twice = FORM.replace("name=\"language\"", "name=\"model\"");
        let file = FORM.replace("name=model", "name=model; filename=x");
        let (empty, other) = (FORM.replace("whisper", ""), FORM.replace("--b", "--c"));
        let cut = &FORM[..FORM.len() - 8];
        for form in ["", "--b", "--b--", "{}", cut, &twice, &file, &empty, &other] {
            assert_eq!(find(form), None, "{form}");
        }
    }

    #[test]
    fn a_boundary_is_a_parameter_of_the_type() {
        assert_eq!(boundary("Multipart/Form-Data; charset=utf-8; Boundary=\"x y\""), Some("\r\n--x y".to_owned()));
        assert_eq!(boundary("multipart/form-data;boundary=x"), Some("\r\n--x".to_owned()));
        let long = format!("multipart/form-data;boundary={}", "x".repeat(71));
        for other in ["multipart/form-data", "multipart/mixed; boundary=x", "multipart/form-data; boundary=", &long] {
            assert_eq!(boundary(other), None, "{other}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_a_panic(parts in prop::collection::vec(prop::sample::select(vec![
            "--b", "\r\n", "\r\n\r\n", "--", "content-disposition: form-data; name=model", ";", "=", "\"", "x", "\0",
        ]), 0..40)) {
            let body = parts.concat();
            if let Some(found) = find(&body) {
                prop_assert_eq!(&body[found.at.clone()], &found.name);
            }
        }
    }
}
