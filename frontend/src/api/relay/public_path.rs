//! Which paths of a server clients may use.
//!
//! A path reaches the server as the client wrote it. It is checked as written and decoded, because some servers and the
//! proxies before them find the endpoint in the decoded path.

use super::is_inference;
use crate::settings::RelayPath;
use std::borrow::Cow;

/// Endpoints outside of `/v1/` that answer a request and change nothing.
const WITHOUT_VERSION: [&str; 14] = [
    "/tokenize",
    "/detokenize",
    "/score",
    "/rerank",
    "/v2/rerank",
    "/v2/embed",
    "/cohere/v2/chat",
    "/cohere/v2/chat/render",
    "/pooling",
    "/classify",
    "/invocations",
    "/generate",
    "/generative_scoring",
    "/encode",
];

/// Whether clients may use an engine's endpoint. Others change the engine for all clients: they load adapters, flush
/// caches, or put it to sleep. A path that an engine could read as another one is not public. `further`: paths that the
/// operator has allowed.
pub(super) fn is_public(path: &str, further: &[RelayPath]) -> bool {
    let Some(decoded) = decoded(path) else { return false };
    if path.contains(['\\', ';']) || has_ambiguous_parts(path) || !is_allowed(path, further) {
        return false;
    }
    // An id may have encoded characters; the names of endpoints need none.
    *decoded == *path || (has_plain_endpoint(path) && is_same_endpoint(&decoded) && is_allowed(&decoded, further))
}

/// A path, or a part of one, with the bytes that its percent-encoding stands for. `None`: it is no valid encoding of
/// UTF-8, or could be read in several ways: with control characters, or with characters that separate or encode.
pub(super) fn decoded(path: &str) -> Option<Cow<'_, str>> {
    if !path.contains('%') {
        return Some(Cow::Borrowed(path));
    }
    let mut bytes = Vec::with_capacity(path.len());
    let mut rest = path.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'%' {
            bytes.push(byte);
            continue;
        }
        let mut digit = || char::from(rest.next()?).to_digit(16);
        let byte = u8::try_from(16 * digit()? + digit()?).expect("two hexadecimal digits are a byte");
        // A server that decodes twice would find another path.
        if matches!(byte, b'%' | b'\\' | b';') {
            return None;
        }
        bytes.push(byte);
    }
    String::from_utf8(bytes).ok().filter(|text| !text.contains(char::is_control)).map(Cow::Owned)
}

/// Whether a part of a path, but for its last one, is empty, or one is `.` or `..`: some servers leave these out.
fn has_ambiguous_parts(path: &str) -> bool {
    let mut parts = path.split('/').skip(1).peekable();
    std::iter::from_fn(|| parts.next().map(|part| (part, parts.peek().is_none())))
        .any(|(part, is_last)| matches!(part, "." | "..") || (part.is_empty() && !is_last))
}

/// Whether this is a path below `/v1/` that does not change the engine, a known one, or one of `further`.
fn is_allowed(path: &str, further: &[RelayPath]) -> bool {
    // Some engines ignore the case of paths.
    let endpoint = path.strip_prefix("/v1/").unwrap_or_default().to_ascii_lowercase();
    let changes_the_engine = endpoint.starts_with("load_lora") || endpoint.starts_with("unload_lora");
    (path.starts_with("/v1/") && !changes_the_engine)
        || WITHOUT_VERSION.contains(&path)
        || further.iter().any(|allowed| allowed.contains(path))
}

/// Whether the name of an endpoint below `/v1/`, such as `files`, has no encoded characters.
fn has_plain_endpoint(path: &str) -> bool {
    let below = path.strip_prefix("/v1/");
    below.and_then(|below| below.split('/').next()).is_none_or(|name| !name.contains('%'))
}

/// Whether the server that decodes a path finds no endpoint in it for which the gateway does more than for others.
fn is_same_endpoint(decoded: &str) -> bool {
    let path = decoded.split(['?', '#']).next().unwrap_or_default();
    !has_ambiguous_parts(path) && !has_ambiguous_parts(decoded) && !is_inference(path.trim_end_matches('/'))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn encoded_characters_of_ids_are_public() {
        for path in [
            "/v1/files/a%20b",
            "/v1/files/a%2Fb/content",
            "/v1/responses/resp%3A1",
            "/v1/responses/resp%5f1/cancel",
            "/v1/files/%C3%A4.txt",
            "/v1/files/a%3Fb",
            "/v1/files/a%2Ejsonl",
        ] {
            assert!(is_public(path, &[]), "{path}");
        }
        let further = [RelayPath::try_from("/api/v2/*".to_owned()).unwrap()];
        assert!(is_public("/api/v2/a%20b", &further) && !is_public("/api/v2/a%20b", &[]));
    }

    #[test]
    fn encoding_a_path_opens_no_other_one() {
        let further = ["/api/*", "/infill"].map(|path| RelayPath::try_from(path.to_owned()).unwrap());
        for path in [
            "/v1/%2e%2e/sleep",
            "/v1/files/%2e%2e/%2E%2E/sleep",
            "/v1/files/.%2e/x",
            "/v1/files/a%2F..%2F..%2Fsleep",
            "/v1/files/a%2F%2Fb",
            "/v1/files/%2Fa",
            "/v1/files/a%5C..%5Cb",
            "/v1/files/a%3B",
            "/v1/files/a%00",
            "/v1/files/a%0a",
            "/v1/files/a%7F",
            "/v1/files/a%C2%80",
            "/v1/files/a%252e",
            "/v1/files/a%25",
            "/v1/files/%c0%ae",
            "/v1/files/%ff",
            "/v1/files/a%",
            "/v1/files/a%2",
            "/v1/files/a%zz",
            "/v1/files/a%+2",
            "/v1/files/..%3Fx",
            "/v1/load%5Flora_adapter",
            "/v1/%6Coad_lora_adapter",
            "/v1%2Fload_lora_adapter",
            "/v1/res%70onses/x",
            "/%76%31/files/x",
            "/v1/chat/com%70letions",
            "/v1/chat/completions%3Fx",
            "/v1/chat/completions%2Fbatch",
            "/v1/messages/%63ount_tokens%2F",
            "/v2/re%72ank",
            "/infil%6C",
            "/api%2Fx",
            "/api/x/%2e%2e/sleep",
            "/%61pi/x",
            "/sleep%3F/v1/",
        ] {
            assert!(!is_public(path, &further), "{path}");
        }
    }
}
