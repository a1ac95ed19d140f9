//! `Retry-After` of an overloaded fleet, from the measured drain rate to the response header. Runs on a paused clock.

use axum::body::Body;
use axum::http::{Request as HttpRequest, StatusCode};
use futures::future::BoxFuture;
use futures::{StreamExt, stream};
use kvbm::Epoch;
use router::Router;
use std::sync::Arc;
use std::time::Duration;
use tower::ServiceExt;
use worker::engine::{Engine, Error, ModelCard, OutputStream, Readiness, Request};
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::plane::{Discovery, Event, EventBody, Events, Instance, Load, Role, RouterId, Source, WorkerId};

#[path = "../../frontend/tests/it/tiny_tokenizer.rs"]
mod tiny_tokenizer;

/// An engine that accepts every request and never answers.
struct Silent(Arc<ModelCard>);

impl Engine for Silent {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        Box::pin(async { Ok(stream::pending().boxed()) })
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        vec![self.0.clone()]
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

fn card() -> ModelCard {
    ModelCard {
        vocabulary: tiny_tokenizer::VOCABULARY,
        eos: vec![tiny_tokenizer::EOS],
        tokenizer: Some(tiny_tokenizer::tokenizer().into()),
        ..ModelCard::new("tiny", 4096, 16)
    }
}

#[tokio::test(start_paused = true)]
async fn retry_after_is_the_time_until_the_queue_has_space() {
    let discovery = Arc::new(LocalDiscovery::default());
    let events = Arc::new(LocalEvents::default());
    let registry = prometheus::Registry::new();
    let settings = toml::from_str("[admission]\nmax_queued_tokens = 6600").unwrap();
    let router = Router::new(RouterId(1), discovery.clone(), events.clone(), settings, &registry).unwrap();
    let app = frontend::router(router, registry, frontend::Settings::default()).unwrap();
    let (id, epoch, model) = (WorkerId(1), Epoch(1), Arc::new(card()));
    let instance = Instance { id, epoch, role: Role::Both, model: model.clone(), stores: vec![], kv_cache: None };
    let _lease = discovery.register(instance, Arc::new(Silent(model))).await.unwrap();
    // Lets every runnable task run.
    let settle = || tokio::time::sleep(Duration::from_millis(1));
    let report = |waiting_tokens| {
        let load = Load { waiting_tokens, running: 1, prefill_tokens_per_second: Some(1000.0), ..Load::default() };
        events.publish(Event { source: Source::Worker(id), epoch, body: EventBody::Load(load) });
        settle()
    };
    // Prompts of different kinds share no prefix.
    let ask = |kind: u32, tokens: usize| {
        let body = serde_json::json!({ "model": "tiny", "prompt": vec![kind; tokens], "max_tokens": 1 });
        let request = HttpRequest::post("/v1/completions").header("content-type", "application/json");
        tokio::spawn(app.clone().oneshot(request.body(Body::from(body.to_string())).unwrap()))
    };
    settle().await;
    report(2000).await;
    let mut waiting = Vec::new();
    for kind in 0..13 {
        waiting.push(ask(kind, 500));
        settle().await;
    }
    // Twice, four requests leave the queue and four new ones arrive: it drains 2,000 tokens in two seconds.
    for first in [13, 17] {
        tokio::time::sleep(Duration::from_secs(2) - Duration::from_millis(5)).await;
        report(0).await;
        for kind in first..first + 4 {
            waiting.push(ask(kind, 500));
            settle().await;
        }
    }
    assert!(waiting.iter().all(|request| !request.is_finished()), "no request is rejected");
    // 6,500 of 6,600 tokens are queued. 3,900 must leave the queue before it can take 4,000 more.
    let rejected = ask(21, 4000).await.unwrap().unwrap();
    assert_eq!(
        (rejected.status(), &rejected.headers()["retry-after"]),
        (StatusCode::TOO_MANY_REQUESTS, &"4".parse().unwrap())
    );
}
