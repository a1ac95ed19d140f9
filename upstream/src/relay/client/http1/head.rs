//! Heads of HTTP/1.1: that of a request as bytes, and that of an answer from bytes.

use super::framing::Framing;
use bytes::Bytes;
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header};
use std::io::{self, Write};
use std::mem::MaybeUninit;

/// Maximum number of bytes of the head of an answer. Engines send 300.
pub(in super::super) const MAX_HEAD: usize = 64 << 10;
/// Maximum number of headers of an answer.
const MAX_HEADERS: usize = 128;

/// The head of an answer, and what it says of the rest.
#[derive(Debug)]
pub(super) struct AnswerHead {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    /// Bytes of the head with its empty line.
    pub(super) length: usize,
    pub(super) framing: Framing,
    /// Another request may follow on the connection.
    pub(super) keeps_alive: bool,
}

impl AnswerHead {
    /// Whether the head says that the connection switches to `protocol`, and to no other one.
    pub(super) fn switches_to(&self, protocol: &str) -> bool {
        let mut named = self.headers.get_all(header::UPGRADE).iter();
        let is_named = named.next().is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(protocol.as_bytes()));
        is_named && named.next().is_none() && connection_options(&self.headers).any(|option| is(option, "upgrade"))
    }
}

/// The head of a request. `target` is a path with its query, or two parts of one; `body` is the length of the body.
pub(super) fn request(method: &Method, target: [&str; 2], host: &str, headers: &HeaderMap, body: usize) -> Bytes {
    let fields: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len() + 4).sum();
    // Method, version and the two headers below have less than 100 bytes.
    let mut head = Vec::with_capacity(100 + target[0].len() + target[1].len() + host.len() + fields);
    for part in [method.as_str(), " ", target[0], target[1], " HTTP/1.1\r\n"] {
        head.extend_from_slice(part.as_bytes());
    }
    put(&mut head, "host", host.as_bytes());
    for (name, value) in headers {
        put(&mut head, name.as_str(), value.as_bytes());
    }
    // Without a body these methods need no length (RFC 9110, section 8.6).
    if body > 0 || ![Method::GET, Method::HEAD, Method::OPTIONS, Method::DELETE].contains(method) {
        write!(head, "content-length: {body}\r\n").expect("writing to memory does not fail");
    }
    head.extend_from_slice(b"\r\n");
    head.into()
}

fn put(head: &mut Vec<u8>, name: &str, value: &[u8]) {
    for part in [name.as_bytes(), b": ", value, b"\r\n"] {
        head.extend_from_slice(part);
    }
}

/// Reads the head at the start of `received`. `None` if it is not complete.
pub(super) fn answer(received: &[u8], method: &Method) -> io::Result<Option<AnswerHead>> {
    let mut fields = [const { MaybeUninit::uninit() }; MAX_HEADERS];
    let mut parsed = httparse::Response::new(&mut []);
    let config = httparse::ParserConfig::default();
    let length = match config.parse_response_with_uninit_headers(&mut parsed, received, &mut fields) {
        Ok(httparse::Status::Complete(length)) => length,
        Ok(httparse::Status::Partial) if received.len() >= MAX_HEAD => return Err(malformed("the head is too long")),
        Ok(httparse::Status::Partial) => return Ok(None),
        Err(error) => return Err(io::Error::new(io::ErrorKind::InvalidData, error)),
    };
    let status = parsed.code.and_then(|code| StatusCode::from_u16(code).ok());
    let status = status.ok_or_else(|| malformed("the status is not one of HTTP"))?;
    // One allocation for the values of all headers.
    let head = Bytes::copy_from_slice(&received[..length]);
    // Room for one that the gateway adds, for which the map would be built again.
    let mut headers = HeaderMap::with_capacity(parsed.headers.len() + 1);
    for field in parsed.headers.iter() {
        let name =
            HeaderName::from_bytes(field.name.as_bytes()).map_err(|_| malformed("a header has no valid name"))?;
        let value = HeaderValue::from_maybe_shared(slice_of(&head, received, field.value));
        headers.append(name, value.map_err(|_| malformed("a header has no valid value"))?);
    }
    let is_http_10 = parsed.version == Some(0);
    let framing = framing(status, &headers, method, is_http_10)?;
    let keeps_alive = framing != Framing::UntilClose && keeps_alive(&headers, is_http_10);
    Ok(Some(AnswerHead { status, headers, length, framing, keeps_alive }))
}

/// The copy of `part` in `copy`, which is a copy of the start of `whole`. `part` is a slice of that.
fn slice_of(copy: &Bytes, whole: &[u8], part: &[u8]) -> Bytes {
    let start = part.as_ptr().addr().wrapping_sub(whole.as_ptr().addr());
    // An empty value need not be anywhere.
    if part.is_empty() { Bytes::new() } else { copy.slice(start..start + part.len()) }
}

/// How the body ends (RFC 9112, section 6.3).
fn framing(status: StatusCode, headers: &HeaderMap, method: &Method, is_http_10: bool) -> io::Result<Framing> {
    if method == Method::HEAD
        || status.is_informational()
        || [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status)
    {
        return Ok(Framing::Length(0));
    }
    if let Some(last) = headers.get_all(header::TRANSFER_ENCODING).iter().next_back() {
        // Two readers that differ about the end of a body take its rest for another answer.
        if is_http_10 || headers.contains_key(header::CONTENT_LENGTH) {
            return Err(malformed("a Transfer-Encoding where none may be"));
        }
        let last = last.to_str().ok().and_then(|codings| codings.rsplit(',').next());
        let is_chunked = last.is_some_and(|coding| coding.trim().eq_ignore_ascii_case("chunked"));
        return Ok(if is_chunked { Framing::CHUNKED } else { Framing::UntilClose });
    }
    let mut lengths = headers.get_all(header::CONTENT_LENGTH).iter();
    let Some(first) = lengths.next() else { return Ok(Framing::UntilClose) };
    if lengths.any(|other| other != first) {
        return Err(malformed("several lengths of the body"));
    }
    let digits = first.to_str().ok().filter(|text| text.bytes().all(|byte| byte.is_ascii_digit()));
    let length = digits.and_then(|text| text.parse().ok()).ok_or_else(|| malformed("no valid length of the body"))?;
    Ok(Framing::Length(length))
}

fn keeps_alive(headers: &HeaderMap, is_http_10: bool) -> bool {
    let mut options = connection_options(headers);
    if is_http_10 { options.any(|option| is(option, "keep-alive")) } else { !options.any(|option| is(option, "close")) }
}

/// The options in the headers `Connection`.
fn connection_options(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let lists = headers.get_all(header::CONNECTION).iter().filter_map(|list| list.to_str().ok());
    lists.flat_map(|list| list.split(',')).map(str::trim)
}

fn is(option: &str, name: &str) -> bool {
    option.eq_ignore_ascii_case(name)
}

fn malformed(problem: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, problem)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str, method: &Method) -> Option<(u16, Framing, bool)> {
        let head = answer(text.as_bytes(), method).ok()?.expect("a whole head");
        assert_eq!(head.length, text.len());
        Some((head.status.as_u16(), head.framing, head.keeps_alive))
    }

    fn post(text: &str) -> Option<(u16, Framing, bool)> {
        read(text, &Method::POST)
    }

    #[test]
    fn a_request_has_the_headers_that_frame_it() {
        let headers: HeaderMap = [(header::ACCEPT, HeaderValue::from_static("*/*"))]
            .into_iter()
            .chain([(header::TE, "x".parse().unwrap())])
            .collect();
        let text = request(&Method::POST, ["/base", "/v1/x?y"], "h:80", &headers, 12);
        let expected = "POST /base/v1/x?y HTTP/1.1\r\nhost: h:80\r\naccept: */*\r\nte: x\r\ncontent-length: 12\r\n\r\n";
        assert_eq!(text, expected);
        let has_length = |method, body| {
            let text = request(&method, ["/", ""], "h", &HeaderMap::new(), body);
            text.windows(16).any(|part| part == b"content-length: ")
        };
        assert!(has_length(Method::POST, 0) && has_length(Method::DELETE, 1) && !has_length(Method::GET, 0));
    }

    #[test]
    fn a_head_says_how_its_body_ends() {
        let until_close = Some((200, Framing::UntilClose, false));
        for (fields, expected) in [
            ("Content-Length: 12\r\n", Some((200, Framing::Length(12), true))),
            ("content-length: 12\r\ncontent-length: 12\r\n", Some((200, Framing::Length(12), true))),
            ("content-length: 12\r\nconnection: x, Close\r\n", Some((200, Framing::Length(12), false))),
            ("transfer-encoding: Chunked\r\n", Some((200, Framing::CHUNKED, true))),
            ("transfer-encoding: gzip\r\ntransfer-encoding: x, chunked\r\n", Some((200, Framing::CHUNKED, true))),
            ("transfer-encoding: chunked, gzip\r\n", until_close),
            ("", until_close),
            ("content-length: 12\r\ncontent-length: 13\r\n", None),
            ("content-length: +12\r\n", None),
            ("content-length: 99999999999999999999\r\n", None),
            ("content-length: 12\r\ntransfer-encoding: chunked\r\n", None),
            ("no colon\r\n", None),
        ] {
            assert_eq!(post(&format!("HTTP/1.1 200 OK\r\n{fields}\r\n")), expected, "{fields}");
        }
        let length = "content-length: 12\r\n";
        assert_eq!(
            read(&format!("HTTP/1.1 200 OK\r\n{length}\r\n"), &Method::HEAD),
            Some((200, Framing::Length(0), true))
        );
        assert_eq!(post("HTTP/1.1 204 No Content\r\n\r\n"), Some((204, Framing::Length(0), true)));
        assert_eq!(post(&format!("HTTP/1.0 200 OK\r\n{length}\r\n")), Some((200, Framing::Length(12), false)));
        let kept = post(&format!("HTTP/1.0 200 OK\r\n{length}connection: keep-alive\r\n\r\n"));
        assert_eq!(kept, Some((200, Framing::Length(12), true)));
        assert_eq!(post("HTTP/1.0 200 OK\r\ntransfer-encoding: chunked\r\n\r\n"), None);
    }

    #[test]
    fn a_head_is_complete_at_its_empty_line() {
        let text = "HTTP/1.1 200 OK\r\nX-Engine: a b \r\nset-cookie: 1\r\nset-cookie: 2\r\ncontent-length: 0\r\n\r\n";
        for end in 0..text.len() {
            assert!(answer(&text.as_bytes()[..end], &Method::POST).unwrap().is_none());
        }
        let head = answer(format!("{text}body").as_bytes(), &Method::POST).unwrap().unwrap();
        assert_eq!((head.length, head.headers["x-engine"].as_bytes()), (text.len(), &b"a b"[..]));
        assert_eq!(head.headers.get_all("set-cookie").iter().collect::<Vec<_>>(), ["1", "2"]);
        let long = format!("HTTP/1.1 200 OK\r\nx: {}", "y".repeat(MAX_HEAD));
        assert!(answer(long.as_bytes(), &Method::POST).is_err());
    }
}
