//! The form of error objects and events: that of OpenAI's, Anthropic's or Cohere's API.

use super::Error;
use axum::http::StatusCode;
use axum::response::Response;
use serde_json::{Value, json};
use worker::engine::ErrorResponse;

/// The form of error objects and of the events that have them, as the clients of an endpoint expect it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum ErrorForm {
    /// `{"error": {…}}`, and an event without a name.
    OpenAi,
    /// `{"type": "error", "error": {…}}`, and an event with the name `error`. Anthropic's clients pass over events
    /// without a name, so a stream that broke off would look complete to them.
    Anthropic,
    /// `{"message": …}`, and the event that ends a message, with the finish reason of an error. Cohere's clients wait
    /// for this event.
    Cohere,
}

/// The endpoints of Cohere's API that do not begin with `/cohere/`.
const OF_COHERE: [&str; 2] = ["/v2/embed", "/v2/rerank"];

impl ErrorForm {
    /// The form for requests to this path.
    pub(crate) fn of(path: &str) -> Self {
        match path.strip_prefix("/v1/messages") {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => Self::Anthropic,
            _ if path.starts_with("/cohere/") || OF_COHERE.contains(&path) => Self::Cohere,
            _ => Self::OpenAi,
        }
    }
}

impl Error {
    /// The error object as JSON.
    fn object(&self, form: ErrorForm) -> String {
        if let Self::Relayed(response) = self
            && response.replaces.is_some()
        {
            return in_form(response, form);
        }
        if form == ErrorForm::Cohere {
            return json!({ "message": self.to_string() }).to_string();
        }
        let mut body = self.body();
        if form == ErrorForm::Anthropic {
            (body.r#type, body.error.r#type) = (Some("error"), anthropic_type(self.status()));
        }
        serde_json::to_string(&body).expect("an error object has string keys")
    }

    /// The error as an event of a stream.
    pub(crate) fn event(&self, form: ErrorForm) -> String {
        match form {
            ErrorForm::OpenAi => format!("data: {}\n\n", self.object(form)),
            ErrorForm::Anthropic => format!("event: error\ndata: {}\n\n", self.object(form)),
            ErrorForm::Cohere => {
                let delta = json!({ "error": self.to_string(), "finish_reason": "ERROR" });
                format!("event: message-end\ndata: {}\n\n", json!({ "type": "message-end", "delta": delta }))
            }
        }
    }

    /// Writes the error object of a response to this error in another form. A server's error stays as it is, but not
    /// the one that the gateway has put in its place.
    pub(crate) fn write(&self, response: &mut Response, form: ErrorForm) {
        let is_of_server = matches!(self, Self::Relayed(relayed) if relayed.replaces.is_none());
        if form != ErrorForm::OpenAi && !is_of_server {
            *response.body_mut() = self.object(form).into();
        }
    }
}

/// The error object in place of a server's answer, which has OpenAI's form.
fn in_form(response: &ErrorResponse, form: ErrorForm) -> String {
    let object: Option<Value> = serde_json::from_slice(&response.body).ok();
    match (form, object) {
        (ErrorForm::Anthropic, Some(mut object)) if object["error"].is_object() => {
            object["error"]["type"] = anthropic_type(response.status).into();
            json!({ "type": "error", "error": object["error"] }).to_string()
        }
        (ErrorForm::Cohere, Some(object)) if object["error"]["message"].is_string() => {
            json!({ "message": object["error"]["message"] }).to_string()
        }
        _ => String::from_utf8_lossy(&response.body).into_owned(),
    }
}

/// The `type` that Anthropic's errors with this status have.
fn anthropic_type(status: StatusCode) -> &'static str {
    match status {
        StatusCode::UNAUTHORIZED => "authentication_error",
        StatusCode::FORBIDDEN => "permission_error",
        StatusCode::NOT_FOUND => "not_found_error",
        StatusCode::PAYLOAD_TOO_LARGE => "request_too_large",
        StatusCode::TOO_MANY_REQUESTS => "rate_limit_error",
        StatusCode::SERVICE_UNAVAILABLE => "overloaded_error",
        StatusCode::REQUEST_TIMEOUT | StatusCode::GATEWAY_TIMEOUT => "timeout_error",
        status if status.is_server_error() => "api_error",
        _ => "invalid_request_error",
    }
}
