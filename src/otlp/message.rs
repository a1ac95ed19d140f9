//! The message of OTLP: an `ExportTraceServiceRequest` in the JSON encoding of protobuf, version 1.
//!
//! Ids are hexadecimal, whole numbers of 64 bits are text, and enumerations are numbers, as the specification of OTLP
//! says.

use crate::config::OtelVariables;
use serde_json::{Value as Json, json};
use spans::{EndedSpan, Event, Value};

/// What the spans of a process have in common.
pub(super) struct Resource(Json);

/// `STATUS_CODE_ERROR`.
const ERROR: u8 = 2;

impl Resource {
    pub(super) fn new(service: &str, instance: &str, variables: &OtelVariables) -> Self {
        let own = [
            ("service.name", service),
            ("service.version", env!("CARGO_PKG_VERSION")),
            ("service.instance.id", instance),
        ];
        let more = variables.resource_attributes.as_deref().map(pairs).unwrap_or_default();
        let is_own = |key: &str| own.iter().any(|(name, _)| *name == key);
        let more = more.iter().filter(|(key, _)| !is_own(key)).map(|(key, value)| (key.as_str(), value.as_str()));
        let attributes = own.into_iter().chain(more).map(|(key, text)| attribute(key, &Value::Text(text.to_owned())));
        Self(json!({ "attributes": attributes.collect::<Vec<_>>() }))
    }

    /// The message with these spans.
    pub(super) fn message(&self, spans: &[EndedSpan]) -> Vec<u8> {
        let spans: Vec<Json> = spans.iter().map(span).collect();
        let scope = json!({ "name": "blockyard", "version": env!("CARGO_PKG_VERSION") });
        let message = json!({
            "resourceSpans": [{ "resource": self.0, "scopeSpans": [{ "scope": scope, "spans": spans }] }],
        });
        message.to_string().into_bytes()
    }
}

/// Number of spans that the collector rejected, from the body of its response.
pub(super) fn rejected(body: &[u8]) -> u64 {
    let answer: Json = serde_json::from_slice(body).unwrap_or_default();
    let rejected = &answer["partialSuccess"]["rejectedSpans"];
    rejected.as_u64().or_else(|| rejected.as_str()?.parse().ok()).unwrap_or(0)
}

fn span(span: &EndedSpan) -> Json {
    let mut json = json!({
        "traceId": span.trace.to_string(),
        "spanId": span.id.to_string(),
        "name": span.name,
        "kind": span.kind as u8,
        "startTimeUnixNano": span.start.to_string(),
        "endTimeUnixNano": span.end.to_string(),
        "attributes": span.attributes.iter().map(|(key, value)| attribute(key, value)).collect::<Vec<_>>(),
    });
    if let Some(parent) = span.parent {
        json["parentSpanId"] = parent.to_string().into();
    }
    if let Some(state) = &span.tracestate {
        json["traceState"] = state.to_string().into();
    }
    if !span.events.is_empty() {
        let event = |Event { name, time }: &Event| json!({ "timeUnixNano": time.to_string(), "name": name });
        json["events"] = span.events.iter().map(event).collect();
    }
    if let Some(error) = &span.error {
        json["status"] = json!({ "code": ERROR, "message": error });
    }
    json
}

fn attribute(key: &str, value: &Value) -> Json {
    let value = match value {
        Value::Text(text) => json!({ "stringValue": text }),
        Value::Int(number) => json!({ "intValue": number.to_string() }),
        Value::Float(number) if number.is_finite() => json!({ "doubleValue": number }),
        // "NaN", "Infinity" and "-Infinity" in the JSON encoding of protobuf.
        Value::Float(number) if number.is_nan() => json!({ "doubleValue": "NaN" }),
        Value::Float(number) => json!({ "doubleValue": if *number > 0.0 { "Infinity" } else { "-Infinity" } }),
        Value::Bool(value) => json!({ "boolValue": value }),
        Value::Texts(texts) => {
            let values: Vec<Json> = texts.iter().map(|text| json!({ "stringValue": text })).collect();
            json!({ "arrayValue": { "values": values } })
        }
    };
    json!({ "key": key, "value": value })
}

/// The pairs of a list `name=value,…` with percent-encoded values, as in OpenTelemetry's variables. Entries without a
/// name are left out.
pub(super) fn pairs(list: &str) -> Vec<(String, String)> {
    let pair = |entry: &str| {
        let (name, value) = entry.split_once('=')?;
        Some((name.trim().to_owned(), percent_decoded(value.trim()))).filter(|(name, _)| !name.is_empty())
    };
    list.split(',').filter_map(pair).collect()
}

fn percent_decoded(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|digits| str::from_utf8(digits).ok());
        let byte = code.filter(|_| *first == b'%').and_then(|digits| u8::from_str_radix(digits, 16).ok());
        bytes.push(byte.unwrap_or(*first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}
