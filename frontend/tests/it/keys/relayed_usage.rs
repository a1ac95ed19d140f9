//! Tokens of relayed requests: those that the server reports, and estimates of the others.

use super::setup::{end, head, key_with_tokens, prompt, server};
use crate::fake::{completion, post, relayed_card, send};
use crate::key_file::with_key;
use crate::relay::{part, relaying};
use axum::http::Method;
use bytes::Bytes;
use frontend::Tokenizers;
use futures::future::BoxFuture;
use serde_json::json;
use spans::Tracer;
use std::collections::BTreeMap;
use std::sync::Arc;
use worker::engine::{ModelCard, RelayReport, Tokenize, TokenizeError};

/// An engine that says the tokens of every prompt: five.
struct FiveTokens;

impl Tokenize for FiveTokens {
    fn name(&self) -> &'static str {
        "five tokens"
    }

    fn tokenize(&self, _: Bytes) -> BoxFuture<'_, Result<Vec<u32>, TokenizeError>> {
        Box::pin(std::future::ready(Ok(vec![0; 5])))
    }
}

#[tokio::test]
async fn an_estimated_prompt_is_corrected_to_what_the_engine_says() {
    // 240 bytes are estimated as 61 tokens, so a bucket of 100 admits one such prompt, if it were not corrected.
    let prompt = json!({ "prompt": "x".repeat(240) });
    let report = |prompt_tokens| RelayReport { prompt_tokens, completion_tokens: Some(3), ..RelayReport::default() };
    for (is_asked, report, expected) in [
        (false, report(Some(10)), [200, 200, 200]),
        (false, report(Some(500)), [200, 429, 429]),
        (false, report(None), [200, 429, 429]),
        (true, report(None), [200, 200, 200]),
    ] {
        let (keys, key) = key_with_tokens(100);
        let engine = server(report);
        let card = ModelCard { has_exact_blocks: is_asked, ..relayed_card() };
        *engine.card.lock() = Arc::new(card.clone());
        let registry = prometheus::Registry::new();
        let tokenizers = Arc::new(Tokenizers::new(BTreeMap::new(), &registry).unwrap());
        let _server = tokenizers.add_server(&card, None, Arc::new(FiveTokens)).await;
        let parts = frontend::Parts { tokenizers, tracer: Tracer::off() };
        let router = frontend::router_with(parts, engine, registry, keys.settings()).unwrap();
        let mut statuses = Vec::new();
        for _ in 0..3 {
            statuses.push(send(&router, with_key(completion(prompt.clone()), &key)).await.status.as_u16());
        }
        assert_eq!(statuses, expected, "asked: {is_asked}, {report:?}");
    }
}

#[tokio::test]
async fn output_that_the_engine_does_not_report_is_counted() {
    let events = "data: {\"text\":\"x\"}\n\n".repeat(200);
    let json = json!({ "text": "x".repeat(800) }).to_string();
    let verbose = json!({ "text": "x", "segments": [{ "text": "x".repeat(800) }] }).to_string();
    let message = json!({ "role": "assistant", "content": "tok" });
    let line = json!({ "model": "tiny", "created_at": "2026-11-26T15:00:00Z", "message": message, "done": false });
    let lines = format!("{line}\n").repeat(40);
    let image = json!({ "data": [{ "b64_json": "iVBORw0KGgo/".repeat(400) }] }).to_string();
    let base64 = "iVBORw0KGgo/".repeat(400);
    let none = RelayReport::default();
    let embeddings = RelayReport { prompt_tokens: Some(1), ..none };
    let few = RelayReport { completion_tokens: Some(1), ..none };
    for (content_type, body, path, report, expected) in [
        ("text/event-stream; charset=utf-8", &events, "/generate", none, 429),
        ("text/event-stream", &events, "/v1/completions", embeddings, 429),
        ("text/event-stream", &events, "/v1/completions", few, 200),
        ("application/json", &json, "/generate", none, 429),
        ("application/json", &json, "/v1/chat/completions", embeddings, 429),
        ("text/plain", &json, "/v1/audio/transcriptions", none, 429),
        ("", &json, "/v1/audio/transcriptions", none, 429),
        ("application/json", &json, "/v1/audio/transcriptions", none, 429),
        ("application/json", &verbose, "/v1/audio/transcriptions", none, 200),
        ("application/json", &json, "/v1/completions", few, 200),
        ("application/json", &json, "/v1/embeddings", embeddings, 200),
        ("application/json", &json, "/rerank", none, 200),
        ("application/json", &json, "/detokenize", none, 200),
        ("application/json", &json, "/v1/messages/count_tokens", none, 200),
        ("application/json", &json, "/v1/chat/completions/render", none, 200),
        ("application/json", &json, "/v1/completions/render", none, 200),
        ("application/json", &json, "/v1/messages/render", none, 200),
        ("application/json", &json, "/v1/responses/render", none, 200),
        ("application/json", &json, "/v1/chat/completions/derender", none, 200),
        ("application/json", &json, "/v1/completions/derender", none, 200),
        ("application/json", &json, "/cohere/v2/chat/render", none, 200),
        ("application/json", &json, "/cohere/v2/chat", none, 429),
        ("audio/wav", &json, "/v1/audio/speech", none, 200),
        ("text/plain", &base64, "/v1/audio/speech", none, 200),
        ("application/json", &image, "/v1/images/generations", none, 200),
        ("application/x-ndjson", &lines, "/v1/chat/completions", none, 200),
        ("application/x-ndjson", &lines.repeat(3), "/v1/chat/completions", none, 429),
    ] {
        let (keys, key) = key_with_tokens(100);
        let engine = relaying(vec![head(content_type, None), part(body.clone()), end(report)]);
        let router = engine.router_with(keys.settings());
        let mut statuses = Vec::new();
        for _ in 0..2 {
            // What the request says of a stream makes no difference, and so does its method. Routes take POST only.
            let body = json!({ "model": "org/tiny", "prompt": [1], "n": 2, "stream": "maybe" });
            let mut request = with_key(post(path, &body), &key);
            if path == "/generate" {
                *request.method_mut() = Method::PUT;
            }
            statuses.push(send(&router, request).await.status.as_u16());
        }
        assert_eq!(statuses, [200, expected], "{content_type} {path} {report:?}");
    }
}

#[tokio::test]
async fn a_wrong_report_does_not_use_up_a_limit_for_days() {
    let (keys, key) = key_with_tokens(100);
    let report =
        RelayReport { prompt_tokens: Some(u32::MAX), completion_tokens: Some(u32::MAX), ..RelayReport::default() };
    let engine = server(report);
    let router = engine.router_with(keys.settings());
    let ask = async || send(&router, with_key(prompt(1), &key)).await;
    assert_eq!(ask().await.status, 200);
    let refused = ask().await;
    assert_eq!(refused.status, 429);
    let wait: u64 = refused.header("retry-after").parse().unwrap();
    assert!(wait <= 60, "{wait} s for twice the context of 64 tokens");
}
