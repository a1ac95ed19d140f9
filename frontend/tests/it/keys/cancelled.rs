//! Requests whose client leaves before their end.

use super::setup::{end, event_stream, key_with_tokens, leave, prompt};
use crate::fake::{FakeEngine, Step, relayed_card, send};
use crate::key_file::with_key;
use crate::relay::part;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::sleep;
use tower::ServiceExt;
use worker::engine::{ModelCard, RelayReport};

#[tokio::test]
async fn a_client_that_leaves_before_the_response_pays_for_its_prompt() {
    for is_relayed in [false, true] {
        let (keys, key) = key_with_tokens(10);
        let engine = FakeEngine::with_steps(vec![Step::Hang]);
        if is_relayed {
            *engine.card.lock() = Arc::new(relayed_card());
        }
        let router = engine.router_with(keys.settings());
        let ask = || with_key(prompt(8), &key);
        let left = tokio::spawn(router.clone().oneshot(ask()));
        while engine.seen.lock().is_empty() {
            sleep(Duration::from_millis(1)).await;
        }
        left.abort();
        assert!(left.await.unwrap_err().is_cancelled());
        assert_eq!(send(&router, ask()).await.status, 429, "relayed: {is_relayed}");
    }
}

#[tokio::test]
async fn a_response_that_is_left_costs_what_was_reported() {
    let report = RelayReport { prompt_tokens: Some(30), completion_tokens: Some(50), ..RelayReport::default() };
    let engine = FakeEngine::relaying(move |request| {
        let is_left = request.tokens.len() == 1;
        let end = if is_left { Step::Hang } else { end(RelayReport::default()) };
        Ok(vec![event_stream(report), part("data: {}\n\n"), end])
    });
    let (keys, key) = key_with_tokens(100);
    let router = engine.router_with(keys.settings());
    leave(&router, with_key(prompt(1), &key)).await;
    assert_eq!(send(&router, with_key(prompt(30), &key)).await.status, 429, "it has used 80 tokens");
}

#[tokio::test]
async fn a_stream_that_is_left_costs_the_text_of_its_events() {
    // As of vLLM with `--stream-interval 80`: nothing is reported before the end.
    let engine = FakeEngine::relaying(|_| {
        let event = format!("data: {{\"choices\":[{{\"index\":0,\"text\":\"{}\"}}]}}\n\n", "abc ".repeat(80));
        Ok(vec![event_stream(RelayReport::default()), part(event), Step::Hang])
    });
    *engine.card.lock() = Arc::new(ModelCard { context: 1024, ..relayed_card() });
    let (keys, key) = key_with_tokens(100);
    let router = engine.router_with(keys.settings());
    leave(&router, with_key(prompt(1), &key)).await;
    assert_eq!(send(&router, with_key(prompt(30), &key)).await.status, 429, "it has used 81 tokens");
}
