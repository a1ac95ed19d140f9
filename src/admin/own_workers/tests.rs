use super::*;
use axum::body::{Body, to_bytes};
use axum::http::{Method, Request};
use futures::future::BoxFuture;
use kvbm::{Epoch, EventLog};
use serde_json::{Value, json};
use std::time::Duration;
use tokio::sync::watch;
use tower::ServiceExt;
use worker::engine::{Engine, Error as EngineError, ModelCard, OutputStream, Readiness};
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::plane::{Instance, Load};
use worker::serve::{Planes, Worker};

/// An engine that is never asked.
struct Unused;

impl Engine for Unused {
    fn generate(&self, _: worker::engine::Request) -> BoxFuture<'_, Result<OutputStream, EngineError>> {
        Box::pin(async { Err(EngineError::Failed("it is not asked".into())) })
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        Vec::new()
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

/// A registered worker with the id 7, the sender of its load, and its admin API.
async fn started() -> (Worker, watch::Sender<Load>, Router) {
    let planes = Planes { discovery: Arc::new(LocalDiscovery::default()), events: Arc::new(LocalEvents::default()) };
    let model = ModelCard { vocabulary: 10, ..ModelCard::new("m", 64, 16) };
    let (id, epoch, load) = (WorkerId(7), Epoch(1), watch::Sender::new(Load::default()));
    let instance = Instance { id, epoch, role: Role::Both, model: Arc::new(model), stores: vec![], kv_cache: None };
    let log = Arc::new(EventLog::new(epoch));
    let worker = Worker::start(&planes, instance, Arc::new(Unused), log, load.subscribe()).await.unwrap();
    let routes = routes(vec![(id, worker.cordon().clone())]);
    (worker, load, routes)
}

async fn ask(routes: &Router, method: Method, path: &str) -> (u16, Value) {
    let request = Request::builder().method(method).uri(format!("/admin/workers{path}")).body(Body::empty()).unwrap();
    let answer = routes.clone().oneshot(request).await.unwrap();
    let status = answer.status().as_u16();
    (status, serde_json::from_slice(&to_bytes(answer.into_body(), 1 << 16).await.unwrap()).unwrap())
}

fn status(cordoned: bool, registered: bool, requests: u32) -> Value {
    json!({"worker": "w7", "role": "both", "cordoned": cordoned, "registered": registered, "requests": requests})
}

#[tokio::test(start_paused = true)]
async fn a_drain_answers_when_the_requests_have_ended_or_the_time_is_over() {
    let (_worker, load, routes) = started().await;
    assert_eq!(ask(&routes, Method::GET, "").await, (200, json!([status(false, true, 0)])));
    load.send_modify(|load| (load.running, load.waiting, load.paused) = (1, 2, 3));
    assert_eq!(ask(&routes, Method::POST, "/w7/drain?timeout=5s").await, (202, status(true, false, 6)));
    let waiting = tokio::spawn({
        let routes = routes.clone();
        async move { ask(&routes, Method::POST, "/7/drain?timeout=1h").await }
    });
    tokio::time::sleep(Duration::from_mins(10)).await;
    assert!(!waiting.is_finished());
    load.send_replace(Load::default());
    assert_eq!(waiting.await.unwrap(), (200, status(true, false, 0)));
}

#[tokio::test(start_paused = true)]
async fn a_cordon_is_shown_until_it_is_lifted() {
    let (worker, _load, routes) = started().await;
    let (code, cordoned) = ask(&routes, Method::POST, "/w7/cordon").await;
    assert_eq!((code, &cordoned["cordoned"]), (200, &json!(true)));
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(ask(&routes, Method::GET, "").await.1, json!([status(true, false, 0)]));
    assert_eq!(ask(&routes, Method::POST, "/w7/uncordon").await.0, 200);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(ask(&routes, Method::GET, "").await.1, json!([status(false, true, 0)]));
    drop(worker);
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(ask(&routes, Method::GET, "").await.1[0]["registered"], false, "it has ended");
}

#[tokio::test]
async fn wrong_requests_are_named() {
    let (_worker, _load, routes) = started().await;
    for (path, code, wanted) in [
        ("/w8/cordon", 404, "there is no worker \"w8\""),
        ("/seven/uncordon", 404, "there is no worker \"seven\""),
        ("/w7/drain?timeout=soon", 400, "timeout"),
        ("/w7/drain?time=1s", 400, "time"),
    ] {
        let (status, answer) = ask(&routes, Method::POST, path).await;
        let message = answer["error"]["message"].as_str().unwrap();
        assert!(status == code && message.contains(wanted), "{path}: {status} {message}");
    }
    assert_eq!(ask(&routes, Method::GET, "").await.1[0]["cordoned"], false, "none of them has an effect");
}
