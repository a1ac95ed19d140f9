//! Limits of a key, and requests that fail.

use super::setup::{code, engine, key_with_tokens, prompt};
use crate::fake::{FakeEngine, Step, completion, relayed_card, send};
use crate::key_file::{Keys, with_key};
use axum::http::StatusCode;
use frontend::Settings;
use serde_json::json;
use std::num::NonZero;
use std::sync::Arc;
use worker::engine::Error;

#[tokio::test]
async fn requests_beyond_a_limit_get_429_with_retry_after() {
    let keys = Keys::new();
    let few = keys.add("few", |key| key.requests_per_minute = NonZero::new(2));
    let tokens = keys.add("tokens", |key| key.tokens_per_minute = NonZero::new(10));
    let unlimited = keys.add("unlimited", |_| ());
    let router = engine().router_with(keys.settings());
    let ask = async |key: &str, prompt: &[u32]| {
        let response = send(&router, with_key(completion(json!({ "prompt": prompt })), key)).await;
        if response.status == StatusCode::TOO_MANY_REQUESTS {
            assert_eq!(code(&response).1, "rate_limit_exceeded");
            Err(response.header("retry-after").parse::<u64>().unwrap())
        } else {
            assert_eq!(response.status, 200);
            Ok(())
        }
    };
    assert_eq!([ask(&few, &[1]).await, ask(&few, &[1]).await], [Ok(()); 2]);
    let wait = ask(&few, &[1]).await.unwrap_err();
    assert!((1..=30).contains(&wait), "{wait} s for one request");
    // Each has two tokens of the prompt and three of the output.
    assert_eq!([ask(&tokens, &[1, 2]).await, ask(&tokens, &[1, 2]).await], [Ok(()); 2]);
    let wait = ask(&tokens, &[1, 2]).await.unwrap_err();
    assert!((1..=12).contains(&wait), "{wait} s for two tokens");
    for _ in 0..20 {
        assert_eq!(ask(&unlimited, &[1, 2]).await, Ok(()));
    }
}

#[tokio::test]
async fn a_request_that_fails_costs_no_tokens() {
    let (keys, key) = key_with_tokens(10);
    let engine = FakeEngine::with_steps(vec![Step::Fail(Error::Failed("scripted".into()))]);
    let router = engine.router_with(keys.settings());
    for _ in 0..4 {
        assert_eq!(send(&router, with_key(prompt(8), &key)).await.status, 500);
    }
}

#[tokio::test]
async fn a_request_that_a_worker_may_have_computed_costs_its_prompt() {
    let failed = || Step::Fail(Error::Failed("scripted".into()));
    let unavailable = Step::Fail(Error::Unavailable("connection refused".into()));
    // Attempts, how many of them are refused, and the statuses of two requests.
    for (attempts, refused, step, expected) in [
        (0, 0, Step::Hang, [504, 504]),
        (1, 0, Step::Hang, [504, 429]),
        (2, 1, Step::Hang, [504, 429]),
        (0, 0, failed(), [500, 500]),
        (1, 0, failed(), [500, 429]),
        (1, 1, unavailable, [503, 503]),
    ] {
        for is_relayed in [false, true] {
            let (keys, key) = key_with_tokens(10);
            let steps = vec![step.clone()];
            let engine = FakeEngine::new(move |request| {
                (0..attempts).for_each(|_| request.attributes.attempts.begin());
                (0..refused).for_each(|_| request.attributes.attempts.refused());
                Ok(steps.clone())
            });
            if is_relayed {
                *engine.card.lock() = Arc::new(relayed_card());
            }
            let hangs = matches!(step, Step::Hang);
            let max_request_time = hangs.then(|| units::HumanDuration::millis(300));
            let router = engine.router_with(Settings { max_request_time, ..keys.settings() });
            for status in expected {
                let answer = send(&router, with_key(prompt(8), &key)).await.status;
                assert_eq!(answer, status, "{attempts} attempts, {refused} refused, relayed: {is_relayed}");
            }
        }
    }
}
