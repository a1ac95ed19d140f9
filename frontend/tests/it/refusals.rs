//! Rejected requests: status, code and parameter.

use crate::fake::{FakeEngine, Step, TestResponse, chat, completion, last, post, send};
use async_openai::error::ApiError;
use axum::body::Body;
use axum::http::Request;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use worker::engine::{Error, FinishReason, ModelCard};

fn check(what: &str, answer: &TestResponse, status: u16, code: &Value, param: &Value) {
    let body = answer.json();
    let error = &body["error"];
    let kind = match status {
        429 => "rate_limit_error",
        500.. => "server_error",
        _ => "invalid_request_error",
    };
    assert_eq!(
        (answer.status.as_u16(), &error["type"], &error["code"], &error["param"]),
        (status, &json!(kind), code, param),
        "{what}: {body}"
    );
    assert!(error["message"].as_str().is_some_and(|message| !message.is_empty()), "{what}: {body}");
    assert!(!answer.header("x-request-id").is_empty());
    serde_json::from_value::<ApiError>(error.clone()).unwrap_or_else(|e| panic!("{what}: {e}: {body}"));
}

/// hyper limits the headers of HTTP/1.1 only.
#[tokio::test]
async fn more_than_100_headers_are_rejected() {
    let router = FakeEngine::with_steps(vec![]).router();
    let ask = async |count: usize| {
        let names = (0..count).map(|nth| format!("x-{nth}"));
        let request = names.fold(Request::get("/live"), |request, name| request.header(name, "y"));
        send(&router, request.body(Body::empty()).unwrap()).await
    };
    assert_eq!(ask(100).await.status, 200);
    check("101 headers", &ask(101).await, 431, &json!("headers_too_large"), &Value::Null);
}

#[tokio::test]
async fn invalid_cache_fields_are_rejected() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let table = [
        (json!({ "cache": true }), "invalid_type", "cache"),
        (json!({ "cache": { "ttl": 0 } }), "integer_below_min_value", "cache.ttl"),
        (json!({ "cache": { "ttl": "1h" } }), "invalid_type", "cache.ttl"),
        (json!({ "cache": { "pin": 86_401 } }), "integer_above_max_value", "cache.pin"),
        (json!({ "cache": { "store": "no" } }), "invalid_type", "cache.store"),
        (json!({ "cache": { "priority": "urgent" } }), "invalid_value", "cache.priority"),
        (json!({ "cache": { "tll": 60 } }), "unknown_parameter", "cache.tll"),
    ];
    for (fields, code, param) in table {
        for request in [chat(fields.clone()), completion(fields.clone())] {
            let answer = send(&engine.router(), request).await;
            check(&fields.to_string(), &answer, 400, &json!(code), &json!(param));
        }
    }
}

#[tokio::test]
#[expect(clippy::too_many_lines, reason = "a list of cases")]
async fn invalid_chat_requests_are_rejected() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let router = engine.router();
    let message = |message: Value| json!({ "messages": [{ "role": "user", "content": "a" }, message] });
    let many_biases: serde_json::Map<String, Value> = (0..1025).map(|id: u32| (id.to_string(), json!(1))).collect();
    let table = [
        (json!({ "model": null }), "missing_required_parameter", "model"),
        (json!({ "model": 5 }), "invalid_type", "model"),
        (json!({ "messages": null }), "missing_required_parameter", "messages"),
        (json!({ "messages": [] }), "empty_array", "messages"),
        (json!({ "messages": "hi" }), "invalid_type", "messages"),
        (message(json!("hi")), "invalid_type", "messages[1]"),
        (message(json!({ "content": "a" })), "missing_required_parameter", "messages[1].role"),
        (message(json!({ "role": "king", "content": "a" })), "invalid_value", "messages[1].role"),
        (message(json!({ "role": "user" })), "missing_required_parameter", "messages[1].content"),
        (message(json!({ "role": "user", "content": 5 })), "invalid_type", "messages[1].content"),
        (message(json!({ "role": "user", "content": [] })), "empty_array", "messages[1].content"),
        (
            message(json!({ "role": "user", "content": [{ "type": "text" }] })),
            "missing_required_parameter",
            "messages[1].content[0].text",
        ),
        (
            message(json!({ "role": "user", "content": [{ "type": "image_url", "image_url": { "url": "data:," } }] })),
            "unsupported_value",
            "messages[1].content[0]",
        ),
        (message(json!({ "role": "tool", "content": "a" })), "invalid_value", "messages"),
        (json!({ "temperature": 2.5 }), "decimal_above_max_value", "temperature"),
        (json!({ "temperature": -1 }), "decimal_below_min_value", "temperature"),
        (json!({ "temperature": "hot" }), "invalid_type", "temperature"),
        (json!({ "top_p": 1.1 }), "decimal_above_max_value", "top_p"),
        (json!({ "top_k": -2 }), "integer_below_min_value", "top_k"),
        (json!({ "min_p": true }), "invalid_type", "min_p"),
        (json!({ "n": 0 }), "integer_below_min_value", "n"),
        (json!({ "n": 129 }), "integer_above_max_value", "n"),
        (json!({ "n": 1.5 }), "invalid_type", "n"),
        (json!({ "max_tokens": 0 }), "integer_below_min_value", "max_tokens"),
        (json!({ "max_completion_tokens": -3 }), "integer_below_min_value", "max_completion_tokens"),
        (json!({ "max_tokens": 99_999_999_999_999_999_999_u128 as f64 }), "integer_above_max_value", "max_tokens"),
        (json!({ "seed": 18_446_744_073_709_551_615_u64 }), "integer_above_max_value", "seed"),
        // What JSON makes of the integer one below the smallest of 64 bits.
        (json!({ "seed": -9_223_372_036_854_775_809.0 }), "integer_below_min_value", "seed"),
        (json!({ "max_tokens": 60 }), "context_length_exceeded", "messages"),
        (
            json!({ "messages": [{ "role": "user", "content": "a ".repeat(50) }] }),
            "context_length_exceeded",
            "messages",
        ),
        (json!({ "min_tokens": 5, "max_tokens": 4 }), "integer_above_max_value", "min_tokens"),
        (json!({ "presence_penalty": 3 }), "decimal_above_max_value", "presence_penalty"),
        (json!({ "frequency_penalty": -3 }), "decimal_below_min_value", "frequency_penalty"),
        (json!({ "repetition_penalty": 0 }), "decimal_below_min_value", "repetition_penalty"),
        (json!({ "logit_bias": { "a": 1 } }), "invalid_value", "logit_bias"),
        (json!({ "logit_bias": { "265": 1 } }), "invalid_value", "logit_bias"),
        (json!({ "logit_bias": { "5": 101 } }), "decimal_above_max_value", "logit_bias.5"),
        (json!({ "logit_bias": many_biases }), "object_above_max_properties", "logit_bias"),
        (json!({ "logprobs": 1 }), "invalid_type", "logprobs"),
        (json!({ "top_logprobs": 2 }), "invalid_value", "top_logprobs"),
        (json!({ "logprobs": true, "top_logprobs": 21 }), "integer_above_max_value", "top_logprobs"),
        (json!({ "stop": 5 }), "invalid_type", "stop"),
        (json!({ "stop": ["a", 5] }), "invalid_type", "stop[1]"),
        (json!({ "stop": [""] }), "invalid_value", "stop"),
        (json!({ "stop": vec!["a"; 17] }), "array_above_max_length", "stop"),
        (json!({ "stop_token_ids": [265] }), "integer_above_max_value", "stop_token_ids[0]"),
        (json!({ "stream": "yes" }), "invalid_type", "stream"),
        (json!({ "priority": "urgent" }), "invalid_value", "priority"),
        (json!({ "priority": 0.5 }), "invalid_type", "priority"),
        (json!({ "priority": true }), "invalid_type", "priority"),
        (json!({ "deadline_ms": 0 }), "integer_below_min_value", "deadline_ms"),
        (json!({ "deadline_ms": "soon" }), "invalid_type", "deadline_ms"),
        (json!({ "stream_options": { "include_usage": true } }), "invalid_value", "stream_options"),
        (
            json!({ "stream": true, "stream_options": { "include_usage": 1 } }),
            "invalid_type",
            "stream_options.include_usage",
        ),
        (json!({ "response_format": { "type": "json_object" } }), "unsupported_value", "response_format"),
        (json!({ "modalities": ["text", "audio"] }), "unsupported_value", "modalities[1]"),
        (json!({ "functions": [{ "name": "f" }] }), "unsupported_parameter", "functions"),
        (json!({ "echo": true }), "unsupported_parameter", "echo"),
        (json!({ "guided_json": {"type": "object"} }), "unsupported_parameter", "guided_json"),
        (json!({ "temprature": 0.5 }), "unknown_parameter", "temprature"),
        (json!({ "stream": true, "prompt_logprobs": 1 }), "unsupported_value", "prompt_logprobs"),
        (json!({ "stream": true, "stream_options": { "include_usge": true } }), "unknown_parameter", "include_usge"),
        (json!({ "cache_salt": 5 }), "invalid_type", "cache_salt"),
        (json!({ "tools": [{ "type": "function" }] }), "missing_required_parameter", "tools[0].function"),
        (
            json!({ "tools": [{ "type": "function", "function": {} }] }),
            "missing_required_parameter",
            "tools[0].function.name",
        ),
        (json!({ "tools": [{ "type": "custom" }] }), "unsupported_value", "tools[0].type"),
        (json!({ "tool_choice": "required" }), "unsupported_value", "tool_choice"),
        (json!({ "chat_template_kwargs": [] }), "invalid_type", "chat_template_kwargs"),
        (
            json!({ "continue_final_message": true, "add_generation_prompt": true }),
            "invalid_value",
            "continue_final_message",
        ),
    ];
    for (fields, code, param) in table {
        let answer = send(&router, chat(fields.clone())).await;
        check(&fields.to_string(), &answer, 400, &json!(code), &json!(param));
    }
    assert!(engine.seen.lock().is_empty(), "the engine is not asked");
}

#[tokio::test]
async fn invalid_completion_requests_are_rejected() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let router = engine.router();
    let table = [
        (json!({ "prompt": null }), "missing_required_parameter", "prompt"),
        (json!({ "prompt": {} }), "invalid_type", "prompt"),
        (json!({ "prompt": [] }), "empty_array", "prompt"),
        (json!({ "prompt": [[]] }), "invalid_value", "prompt"),
        (json!({ "prompt": "", "add_special_tokens": false }), "invalid_value", "prompt"),
        (json!({ "prompt": [1, "a"] }), "invalid_type", "prompt[1]"),
        (json!({ "prompt": ["a", 1] }), "invalid_type", "prompt[1]"),
        (json!({ "prompt": [[1], [1, 265]] }), "integer_above_max_value", "prompt[1][1]"),
        (json!({ "prompt": [-1] }), "integer_below_min_value", "prompt[0]"),
        (json!({ "prompt": vec!["a"; 129] }), "array_above_max_length", "prompt"),
        (json!({ "prompt": ["a", "b"], "n": 65 }), "integer_above_max_value", "n"),
        (json!({ "prompt": vec![1; 60] }), "context_length_exceeded", "prompt"),
        (json!({ "logprobs": true }), "invalid_type", "logprobs"),
        (json!({ "logprobs": 21 }), "integer_above_max_value", "logprobs"),
        (json!({ "max_tokens": -1 }), "integer_below_min_value", "max_tokens"),
        (json!({ "response_format": { "type": "json_schema" } }), "unsupported_value", "response_format"),
        (json!({ "tools": [{}] }), "unsupported_parameter", "tools"),
        (json!({ "best_of": 2 }), "unsupported_value", "best_of"),
        (json!({ "suffix": "." }), "unsupported_parameter", "suffix"),
    ];
    for (fields, code, param) in table {
        let answer = send(&router, completion(fields.clone())).await;
        check(&fields.to_string(), &answer, 400, &json!(code), &json!(param));
    }
    assert!(engine.seen.lock().is_empty(), "the engine is not asked");
}

#[tokio::test]
async fn bodies_that_are_not_requests_are_rejected() {
    let router = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]).router();
    let raw = |kind: &str, body: &'static str| {
        Request::post("/v1/chat/completions").header("content-type", kind).body(Body::from(body)).unwrap()
    };
    let broken = send(&router, raw("application/json", "{\"model\": \"x\",\n \"messages\": [}")).await;
    check("broken", &broken, 400, &Value::Null, &Value::Null);
    assert!(broken.json()["error"]["message"].as_str().unwrap().contains("line 2 column 15"));
    for body in ["", "[]", "{\"model\": \"\\ud800\"}", "{\"model\": 1e999}"] {
        check(body, &send(&router, raw("application/json", body)).await, 400, &Value::Null, &Value::Null);
    }
    let xml = send(&router, raw("text/xml; charset=utf-8", "<a/>")).await;
    check("xml", &xml, 415, &Value::Null, &Value::Null);
    let mut zipped = raw("application/json", "\u{1f}\u{8b}");
    zipped.headers_mut().insert("content-encoding", "gzip".parse().unwrap());
    check("gzip", &send(&router, zipped).await, 415, &Value::Null, &Value::Null);
    let deep: &'static str = Box::leak("[".repeat(100_000).into_boxed_str());
    check("deep", &send(&router, raw("application/json", deep)).await, 400, &Value::Null, &Value::Null);
    // The default content type of `curl -d`.
    let good = r#"{"model":"org/tiny","messages":[{"role":"user","content":"hello"}]}"#;
    assert_eq!(send(&router, raw("application/x-www-form-urlencoded", good)).await.status, 200);
}

#[tokio::test]
async fn a_body_above_the_limit_is_rejected() {
    let engine = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]);
    let settings = frontend::Settings { max_body: units::ByteSize(100), ..frontend::Settings::default() };
    let router = frontend::router(engine, prometheus::Registry::new(), settings).unwrap();
    let fitting = chat(json!({ "a": "x".repeat(10) }));
    assert_eq!(send(&router, fitting).await.status, 200);
    let large = send(&router, chat(json!({ "a": "x".repeat(100) }))).await;
    check("large", &large, 413, &json!("request_too_large"), &Value::Null);
}

#[tokio::test(start_paused = true)]
async fn a_body_that_does_not_arrive_times_out() {
    let router = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]).router();
    let never = Body::from_stream(futures::stream::pending::<Result<bytes::Bytes, std::io::Error>>());
    let answer = send(&router, Request::post("/v1/completions").body(never).unwrap()).await;
    check("silent", &answer, 408, &json!("request_timeout"), &Value::Null);
}

#[tokio::test]
async fn an_unknown_model_is_named_with_those_that_are_known() {
    let router = FakeEngine::with_steps(vec![last("", FinishReason::Stop)]).router();
    let body = json!({ "model": "gpt-4", "messages": [{ "role": "user", "content": "a" }] });
    let answer = send(&router, post("/v1/chat/completions", &body)).await;
    check("model", &answer, 404, &json!("model_not_found"), &json!("model"));
    let message = answer.json()["error"]["message"].as_str().unwrap().to_owned();
    assert!(message.contains("`gpt-4` does not exist") && message.contains("org/tiny"), "{message}");
}

#[tokio::test]
async fn the_error_of_an_unknown_model_lists_at_most_ten_others() {
    let engine = FakeEngine::with_steps(vec![]);
    let message = async |others: usize| {
        let card = |nth: usize| Arc::new(ModelCard::new(&format!("org/m{nth:02}"), 64, 16));
        *engine.others.lock() = (0..others).rev().map(card).collect();
        let answer = send(&engine.router(), completion(json!({ "model": "other" }))).await;
        answer.json()["error"]["message"].as_str().unwrap().to_owned()
    };
    let nine: Vec<_> = (0..9).map(|nth| format!("org/m{nth:02}")).collect();
    let nine = nine.join(", ");
    let start = format!("The model `other` does not exist. Served here: {nine}");
    assert_eq!(message(9).await, format!("{start}, org/tiny."));
    let end = ", org/m09, and 15 more. GET /v1/models lists all of them.";
    assert_eq!(message(24).await, format!("{start}{end}"));
}

#[tokio::test]
async fn an_engines_refusal_has_its_status() {
    let table = [
        (Error::Overloaded { retry_after: Duration::from_secs(3) }, 429, "rate_limit_exceeded", Value::Null),
        (Error::DeadlineExceeded, 504, "deadline_exceeded", Value::Null),
        (Error::Unavailable("no worker".into()), 503, "service_unavailable", Value::Null),
        (Error::NoAnswer("connection closed".into()), 503, "service_unavailable", Value::Null),
        (Error::Unresponsive("no answer".into()), 503, "service_unavailable", Value::Null),
        (Error::Failed("out of order".into()), 500, "internal_error", Value::Null),
        (Error::UnknownModel("org/tiny".into()), 404, "model_not_found", json!("model")),
        (Error::PromptTooLong { prompt: 9, context: 8 }, 400, "context_length_exceeded", json!("messages")),
        (Error::Invalid { field: "seed", problem: "odd".into() }, 400, "invalid_value", json!("seed")),
    ];
    for (error, status, code, param) in table {
        for stream in [false, true] {
            let refused = error.clone();
            let engine = FakeEngine::new(move |_| Err(refused.clone()));
            let answer = send(&engine.router(), chat(json!({ "stream": stream }))).await;
            check(&error.to_string(), &answer, status, &json!(code), &param);
            let wait = answer.headers.get("retry-after").map(|wait| wait.to_str().unwrap());
            let expected = [(429, "3"), (503, "5")].into_iter().find_map(|(of, wait)| (of == status).then_some(wait));
            assert_eq!(wait, expected, "{error}");
        }
        // The same as a later item of the stream, in a full response.
        let engine = FakeEngine::with_steps(vec![Step::Fail(error.clone())]);
        check(&error.to_string(), &send(&engine.router(), chat(json!({}))).await, status, &json!(code), &param);
    }
}

#[tokio::test]
async fn the_engines_prompt_error_names_the_clients_field() {
    let engine = FakeEngine::new(|_| Err(Error::PromptTooLong { prompt: 9, context: 8 }));
    let answer = send(&engine.router(), completion(json!({}))).await;
    check("prompt", &answer, 400, &json!("context_length_exceeded"), &json!("prompt"));
}

#[tokio::test]
async fn a_panic_is_an_error_response() {
    let engine = FakeEngine::with_steps(vec![Step::Panic]);
    let answer = send(&engine.router(), chat(json!({}))).await;
    check("panic", &answer, 500, &json!("internal_error"), &Value::Null);
    assert!(!String::from_utf8(answer.body).unwrap().contains("scripted"), "what panicked is for the log");
}

#[tokio::test]
async fn a_stream_without_a_finish_reason_is_an_error() {
    let answer = send(&FakeEngine::with_steps(vec![]).router(), chat(json!({}))).await;
    check("no end", &answer, 500, &json!("internal_error"), &Value::Null);
}
