//! What one streamed token costs between the engine and the connection. Allocations are asserted, because they do not
//! depend on the machine; times are printed:
//!
//! ```text
//! cargo test --release --workspace --test stream_cost -- --nocapture
//! ```

#![expect(clippy::unwrap_used, reason = "a test may panic")]

#[path = "../../tests/counting_allocator/mod.rs"]
mod counting_allocator;
#[path = "it/tiny_tokenizer.rs"]
mod tiny_tokenizer;

use axum::body::Body;
use axum::http::Request as HttpRequest;
use counting_allocator::{allocations, count_this_thread};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use parking_lot::Mutex;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::{Duration, Instant};
use tower::ServiceExt;
use worker::engine::{Engine, Error, FinishReason, ModelCard, Output, OutputStream, Readiness, Request, Tokens};

/// Enough for an average.
const TOKENS: usize = 1_000;

/// An engine whose answers are there already.
struct Ready(Mutex<Vec<Vec<Output>>>);

impl Ready {
    /// Every answer has one token per item.
    fn answers(count: usize) -> Arc<Self> {
        let item = |at: usize| {
            let finish = (at + 1 == TOKENS).then_some(FinishReason::Length);
            Output::Tokens(Tokens { ids: vec![u32::from(b'a') + at as u32 % 20], finish, ..Tokens::default() })
        };
        Arc::new(Self(Mutex::new((0..count).map(|_| (0..TOKENS).map(item).collect()).collect())))
    }
}

impl Engine for Ready {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        let answer = self.0.lock().pop().unwrap();
        async { Ok(stream::iter(answer.into_iter().map(Ok)).boxed()) }.boxed()
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![Arc::new(ModelCard {
            vocabulary: tiny_tokenizer::VOCABULARY,
            eos: vec![tiny_tokenizer::EOS],
            tokenizer: Some(tiny_tokenizer::tokenizer().into()),
            chat_template: Some("{% for m in messages %}{{ m.content }}{% endfor %}".into()),
            random_weights: true,
            has_exact_blocks: true,
            ..ModelCard::new("tiny", 2 * TOKENS, 16)
        })]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

/// Time and allocations per token of one streamed answer, without its first and its last token.
async fn streamed(engine: &Arc<Ready>, path: &str, fields: &Value) -> (Duration, f64) {
    let router = frontend::router(engine.clone(), prometheus::Registry::new(), frontend::Settings::default()).unwrap();
    let mut body = json!({ "model": "tiny", "max_tokens": TOKENS, "stream": true });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    let request = HttpRequest::post(path).header("content-type", "application/json");
    let response = router.oneshot(request.body(Body::from(body.to_string())).unwrap()).await.unwrap();
    let mut body = response.into_body().into_data_stream();
    drop(body.next().await.unwrap().unwrap());
    let (before, start) = (allocations(), Instant::now());
    for _ in 1..TOKENS - 1 {
        let write = body.next().await.unwrap().unwrap();
        assert!(write.starts_with(b"data: {\"id\""), "{write:?}");
    }
    let (allocations, took) = (allocations() - before, start.elapsed());
    let last = body.next().await.unwrap().unwrap();
    assert!(last.ends_with(b"data: [DONE]\n\n") && body.next().await.is_none(), "{last:?}");
    let counted = TOKENS - 2;
    (took / counted as u32, allocations as f64 / counted as f64)
}

#[tokio::test]
async fn a_streamed_token_allocates_only_its_text() {
    const ROUNDS: usize = 10;
    // The runtime has no other thread.
    count_this_thread();
    let chat = json!({ "messages": [{ "role": "user", "content": "hello" }] });
    let mut chat_with_stop = chat.clone();
    chat_with_stop["stop"] = json!(["#"]);
    for (name, path, fields) in [
        ("chat", "/v1/chat/completions", chat),
        ("chat with a stop string", "/v1/chat/completions", chat_with_stop),
        ("completion", "/v1/completions", json!({ "prompt": "hello" })),
    ] {
        let engine = Ready::answers(ROUNDS);
        let mut rounds = Vec::new();
        for _ in 0..ROUNDS {
            rounds.push(streamed(&engine, path, &fields).await);
        }
        let fastest = rounds.iter().map(|round| round.0).min().unwrap();
        let allocations = rounds[0].1;
        println!("{name}: {fastest:?}, {allocations:.3} allocations");
        assert!(allocations <= 1.01, "{name}: {allocations}");
    }
}
