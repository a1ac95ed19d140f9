//! What a client gets of an answer that is an error, or a redirect.

use crate::relay::error::{Answer, Cut};
use crate::relay::headers;
use bytes::Bytes;
use http::{HeaderMap, HeaderValue, StatusCode, header};
use worker::engine::{ErrorKind, ErrorResponse};

/// Characters of a body that is not whole which the client gets: an error begins with what is wrong, and what follows
/// may be the whole request.
const MAX_QUOTED: usize = 2000;

/// The response for the client.
///
/// A redirect that would send the client past this gateway has no `Location` any more, and of other statuses than
/// errors the API knows none, so the client gets an error of the gateway instead, without a header of the server. It
/// gets one too, with the server's status, in place of a body that is not whole, which would look complete.
pub(super) fn of(answer: Answer) -> ErrorResponse {
    let Answer { status, headers, body, cut, kind } = answer;
    let is_at_gateway = status.is_redirection() && headers.contains_key(header::LOCATION);
    let (headers, body) = match cut {
        Some(cut) if status.is_client_error() || status.is_server_error() => {
            return incomplete(status, &headers, &body, cut, kind);
        }
        // The client needs no body to follow it.
        Some(_) if is_at_gateway => (headers::response(headers, headers::Body::Changed), Bytes::new()),
        None if status.is_client_error() || status.is_server_error() || is_at_gateway => {
            (headers::response(headers, headers::Body::Changed), body)
        }
        _ => {
            let what = if status.is_redirection() { "a redirect" } else { "no status of the API" };
            return bad_gateway(&format!("server answered with {what} (status {})", status.as_u16()), kind);
        }
    };
    ErrorResponse { status, headers, body, kind, replaces: None }
}

/// The response to a request whose answer is not one of HTTP (RFC 9112, section 5.2).
pub(super) fn malformed(why: &str) -> ErrorResponse {
    bad_gateway(&format!("server's answer is not valid HTTP: {why}"), ErrorKind::Fault)
}

/// The response to a request that was not sent, because its path is too long.
pub(super) fn path_too_long(why: &str) -> ErrorResponse {
    let (headers, body) = own(&format!("The request was not sent: {why}."), "invalid_request_error", "url_too_long");
    let (status, kind, replaces) = (StatusCode::URI_TOO_LONG, ErrorKind::Request, Some(why.into()));
    ErrorResponse { status, headers, body: body.into(), kind, replaces }
}

/// The response in place of an answer that is none. `wrong`: what is wrong with it, after "the".
fn bad_gateway(wrong: &str, kind: ErrorKind) -> ErrorResponse {
    let (headers, body) = own(&format!("The {wrong}."), "server_error", "bad_gateway");
    let replaces = Some(format!("the {wrong}").into());
    ErrorResponse { status: StatusCode::BAD_GATEWAY, headers, body: body.into(), kind, replaces }
}

/// The error of a body of which only the beginning was read.
fn incomplete(status: StatusCode, headers: &HeaderMap, body: &[u8], cut: Cut, kind: ErrorKind) -> ErrorResponse {
    let begin: String = String::from_utf8_lossy(body).chars().take(MAX_QUOTED).collect();
    let is_text = !begin.is_empty() && !headers.contains_key(header::CONTENT_ENCODING);
    let beginning = if is_text { format!(" Its beginning: {begin}") } else { String::new() };
    let wrong = format!("server answered with status {} and {cut}", status.as_u16());
    let message = format!("The {wrong}.{beginning}");
    let r#type = match status {
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        status if status.is_server_error() => "server_error",
        _ => "invalid_request_error",
    };
    let (mut own, body) = own(&message, r#type, "incomplete_error");
    if let Some(wait) = headers.get(header::RETRY_AFTER) {
        own.insert(header::RETRY_AFTER, wait.clone());
    }
    ErrorResponse { status, headers: own, body: body.into(), kind, replaces: Some(format!("the {wrong}").into()) }
}

/// An error object of the gateway.
fn own(message: &str, r#type: &str, code: &str) -> (HeaderMap, String) {
    let error = serde_json::json!({ "message": message, "type": r#type, "param": null, "code": code });
    let content_type = (header::CONTENT_TYPE, HeaderValue::from_static("application/json"));
    ([content_type].into_iter().collect(), serde_json::json!({ "error": error }).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};
    use worker::engine::Error;

    /// The response for an answer with a `Location` and `Retry-After`.
    fn response(status: u16, body: &'static str, cut: Option<Cut>) -> ErrorResponse {
        let location = (header::LOCATION, HeaderValue::from_static("/elsewhere"));
        let wait = (header::RETRY_AFTER, HeaderValue::from_static("7"));
        let headers = [location, wait].into_iter().collect();
        let (status, body) = (StatusCode::from_u16(status).unwrap(), Bytes::from_static(body.as_bytes()));
        of(Answer { status, headers, body, cut, kind: ErrorKind::Fault })
    }

    #[test]
    fn a_status_that_the_api_does_not_know_becomes_an_error_of_the_gateway() {
        let (mut headers, status) = (HeaderMap::new(), StatusCode::FOUND);
        headers.insert(header::SERVER, HeaderValue::from_static("x"));
        let without_location = of(Answer { status, headers, body: Bytes::new(), cut: None, kind: ErrorKind::Request });
        for (response, what) in
            [(without_location, "a redirect (status 302)"), (response(600, "", None), "(status 600)")]
        {
            assert_eq!((response.status, response.headers.len()), (StatusCode::BAD_GATEWAY, 1), "{what}");
            let body: Value = serde_json::from_slice(&response.body).unwrap();
            assert!(body["error"]["message"].as_str().unwrap().contains(what), "{body}");
            assert_eq!(body["error"]["type"], json!("server_error"));
        }
    }

    #[test]
    fn an_answer_that_is_not_valid_http_is_a_bad_gateway() {
        let response = malformed("invalid HTTP header parsed");
        assert_eq!((response.status, response.kind), (StatusCode::BAD_GATEWAY, ErrorKind::Fault));
        let body: Value = serde_json::from_slice(&response.body).unwrap();
        assert_eq!(body["error"]["code"], "bad_gateway");
        let logged = "the server's answer is not valid HTTP: invalid HTTP header parsed";
        assert_eq!(Error::Relayed(response.into()).to_string(), logged, "the log does not call it the server's 502");
    }

    #[test]
    fn an_error_and_a_redirect_at_the_gateway_pass() {
        for status in [307, 400, 599] {
            let response = response(status, "moved", None);
            assert_eq!((response.status.as_u16(), &response.body[..]), (status, &b"moved"[..]));
            assert!(response.headers.contains_key(header::LOCATION), "it passes");
        }
        let response = response(307, "mov", Some(Cut::BrokenOff));
        assert_eq!((response.status.as_u16(), response.body.len(), response.headers.len()), (307, 0, 2));
    }

    #[test]
    fn a_body_that_is_not_whole_does_not_look_whole() {
        for (status, r#type) in [(400, "invalid_request_error"), (429, "rate_limit_error"), (500, "server_error")] {
            let response = response(status, "{\"error\":\"the reas", Some(Cut::BrokenOff));
            assert_eq!(
                (response.status.as_u16(), response.headers[header::RETRY_AFTER].as_bytes()),
                (status, &b"7"[..])
            );
            assert!(!response.headers.contains_key(header::LOCATION));
            let body: Value = serde_json::from_slice(&response.body).unwrap();
            let message = format!(
                "The server answered with status {status} and a body that broke off. Its beginning: \
                 {{\"error\":\"the reas"
            );
            let error = json!({ "message": message, "type": r#type, "param": null, "code": "incomplete_error" });
            assert_eq!(body, json!({ "error": error }));
            let logged = format!("the server answered with status {status} and a body that broke off");
            assert_eq!(response.replaces.as_deref(), Some(&*logged), "without its beginning, which may quote a prompt");
        }
        let long: &'static str = "é".repeat(MAX_QUOTED + 1).leak();
        let response = response(400, long, Some(Cut::TooLong));
        let body: Value = serde_json::from_slice(&response.body).unwrap();
        let message = body["error"]["message"].as_str().unwrap();
        assert!(message.contains("a body of more than 1 MiB."), "{message}");
        assert_eq!(message.matches('é').count(), MAX_QUOTED);
    }
}
