//! The body of a request to an endpoint that this program does not have.
//!
//! **What a server may read as JSON is read here too, or refused.** Servers go by the content type or by the bytes, and
//! some read more than JSON: a byte order mark, UTF-16, `NaN`. In a body that passes unread, a client could name a
//! model that its key may not use, or the cache salt of another tenant. Not here: what the fields of the body mean.

use super::form::{Boundary, FormModel};
use crate::error::Error;
use crate::params::Fields;
use axum::http::HeaderMap;
use axum::http::header::CONTENT_TYPE;
use bytes::Bytes;

/// The body of a request, as far as it is understood.
pub(in crate::api) enum Contents {
    /// A JSON object.
    Json(Fields),
    /// A form that names a model.
    Form(FormModel),
    /// Anything else, or nothing.
    Other,
}

/// What the headers of a request say of its body.
pub(super) struct MediaType {
    /// Type and subtype in lower case; empty if there is no header.
    essence: String,
    boundary: Option<Boundary>,
}

impl MediaType {
    /// The type of a body. Several headers are refused, because servers differ in which they read.
    pub(super) fn of(headers: &HeaderMap) -> Result<Self, Error> {
        let mut values = headers.get_all(CONTENT_TYPE).iter();
        let value = values.next().map(|value| String::from_utf8_lossy(value.as_bytes())).unwrap_or_default();
        if values.next().is_some() {
            return Err(Error::Malformed("The request has several headers 'content-type'. Send one.".into()));
        }
        let essence = value.split(';').next().unwrap_or_default().trim().to_ascii_lowercase();
        Ok(Self { essence, boundary: Boundary::of(headers) })
    }

    /// Whether every server reads the body as JSON, or not at all.
    pub(super) fn is_json_or_absent(&self) -> bool {
        self.essence.is_empty() || self.is_json()
    }

    fn is_json(&self) -> bool {
        let subtype = self.essence.strip_prefix("application/").filter(|subtype| !subtype.contains([' ', ',']));
        subtype.is_some_and(|subtype| subtype == "json" || subtype.ends_with("+json"))
    }
}

impl Contents {
    /// Reads a body. The error says why it is no JSON object, if it should be one.
    pub(super) fn read(media_type: &MediaType, body: &Bytes) -> Result<Self, Error> {
        let is_json = media_type.is_json() && !body.trim_ascii().is_empty();
        if is_json || looks_like_json(body) {
            return Fields::parse(body).map(Self::Json);
        }
        let form = media_type.boundary.as_ref().and_then(|boundary| FormModel::find(boundary, body));
        Ok(form.map_or(Self::Other, Self::Form))
    }
}

/// Whether a body begins as a JSON object does, in any encoding, after white space and a byte order mark or without.
fn looks_like_json(body: &[u8]) -> bool {
    let is_before = |byte: u8| byte.is_ascii_whitespace() || matches!(byte, 0 | 0xef | 0xbb | 0xbf | 0xfe | 0xff);
    body.iter().copied().find(|byte| !is_before(*byte)) == Some(b'{')
}

#[cfg(test)]
mod tests {
    use super::*;

    fn media_type(text: &str) -> MediaType {
        let mut headers = HeaderMap::new();
        if !text.is_empty() {
            headers.insert(CONTENT_TYPE, text.parse().unwrap());
        }
        MediaType::of(&headers).unwrap()
    }

    fn read(content_type: &str, body: &[u8]) -> Result<Contents, Error> {
        Contents::read(&media_type(content_type), &Bytes::copy_from_slice(body))
    }

    fn utf16(text: &str) -> Vec<u8> {
        text.encode_utf16().flat_map(u16::to_le_bytes).collect()
    }

    #[test]
    fn what_a_server_may_read_as_json_is_json_or_refused() {
        let object = r#"{"model":"m"}"#;
        let with_mark = utf16(&format!("\u{feff}{object}"));
        for content_type in ["", "application/json; charset=utf-16", "application/octet-stream", "text/plain"] {
            assert!(matches!(read(content_type, object.as_bytes()), Ok(Contents::Json(_))), "{content_type}");
            // The last but one is a lone surrogate, which Python's parser takes.
            for body in [
                &b"\xef\xbb\xbf{}"[..],
                &utf16(object),
                &with_mark,
                br#" {"x":NaN}"#,
                b"{",
                b"{}{}",
                b"{\0}\0",
                b"{\"x\":\"\xed\xa0\x80\"}",
                b"{\"x\":\"\xff\"}",
            ] {
                assert!(matches!(read(content_type, body), Err(Error::Malformed(_))), "{content_type} {body:?}");
            }
        }
        for body in [&b"no JSON"[..], b"[1]", b"\"a\"", b"null"] {
            assert!(read("Application/Vnd.x+JSON", body).is_err(), "{body:?}");
        }
    }

    #[test]
    fn other_bodies_pass() {
        for (content_type, body) in [
            ("", &b"RIFF {}"[..]),
            ("application/json", b" \n"),
            ("", b""),
            ("audio/wav", b"\xff\xfb\x90{}"),
            ("multipart/form-data; boundary=b", b"--b\r\n"),
        ] {
            assert!(matches!(read(content_type, body), Ok(Contents::Other)), "{content_type} {body:?}");
        }
    }

    #[test]
    fn one_header_names_the_type() {
        for (text, expected) in [
            ("", true),
            ("application/JSON;charset=utf-8", true),
            ("application/vnd.api+json", true),
            ("application/x-www-form-urlencoded", false),
            ("application/x-www-form-urlencoded, application/json", false),
            ("text/json", false),
        ] {
            assert_eq!(media_type(text).is_json_or_absent(), expected, "{text}");
        }
        let mut two = HeaderMap::new();
        for text in ["application/json", "text/plain"] {
            two.append(CONTENT_TYPE, text.parse().unwrap());
        }
        assert!(MediaType::of(&two).is_err(), "servers differ in which they read");
    }
}
