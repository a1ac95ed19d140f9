//! A scripted engine, and a client for the routes before it.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{HeaderMap, Request as HttpRequest, StatusCode};
use futures::future::BoxFuture;
use futures::{FutureExt, StreamExt, stream};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::Value;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::sync::Semaphore;
use tower::ServiceExt;
use worker::engine::{
    Engine, Error, FinishReason, Logprobs, ModelCard, Output, OutputStream, PromptReport, Readiness, Request, Tokens,
};

use crate::tiny_tokenizer;

/// One step of a scripted stream.
#[derive(Clone)]
pub(crate) enum Step {
    Say(Tokens),
    /// An item of a relayed response.
    Relay(Output),
    Fail(Error),
    /// Waits for a permit.
    Wait(Arc<Semaphore>),
    /// Is not ready when it is polled first.
    Yield,
    Hang,
    Panic,
}

type Script = dyn Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync;

/// An engine that follows a script.
pub(crate) struct FakeEngine {
    script: Box<Script>,
    pub(crate) readiness: Mutex<Readiness>,
    pub(crate) card: Mutex<Arc<ModelCard>>,
    /// Further models that are listed.
    pub(crate) others: Mutex<Vec<Arc<ModelCard>>>,
    /// A model that is expected back.
    pub(crate) absent: Mutex<Option<String>>,
    /// Requests in order of arrival.
    pub(crate) seen: Mutex<Vec<Request>>,
    /// The number of open streams.
    pub(crate) open: Arc<AtomicUsize>,
}

impl FakeEngine {
    pub(crate) fn new(script: impl Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync + 'static) -> Arc<Self> {
        Arc::new(Self {
            script: Box::new(script),
            readiness: Mutex::new(Readiness::Ready),
            card: Mutex::new(Arc::new(card())),
            others: Mutex::default(),
            absent: Mutex::default(),
            seen: Mutex::default(),
            open: Arc::default(),
        })
    }

    /// An engine with the same steps for every request.
    pub(crate) fn with_steps(steps: Vec<Step>) -> Arc<Self> {
        Self::new(move |_| Ok(steps.clone()))
    }

    /// A server with the client's API: requests for its model are relayed.
    pub(crate) fn relaying(script: impl Fn(&Request) -> Result<Vec<Step>, Error> + Send + Sync + 'static) -> Arc<Self> {
        let engine = Self::new(script);
        *engine.card.lock() = Arc::new(relayed_card());
        engine
    }

    pub(crate) fn router(self: &Arc<Self>) -> Router {
        self.router_with(frontend::Settings::default())
    }

    pub(crate) fn router_with(self: &Arc<Self>, settings: frontend::Settings) -> Router {
        frontend::router(self.clone(), prometheus::Registry::new(), settings).unwrap()
    }

    /// The only request that arrived.
    pub(crate) fn only(&self) -> Request {
        let seen = self.seen.lock();
        assert_eq!(seen.len(), 1);
        seen[0].clone()
    }

    /// The request that arrived last.
    pub(crate) fn last(&self) -> Request {
        self.seen.lock().last().expect("a request").clone()
    }

    pub(crate) fn open(&self) -> usize {
        self.open.load(Ordering::SeqCst)
    }
}

impl Engine for FakeEngine {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        let steps = (self.script)(&request);
        self.seen.lock().push(request);
        let open = Open::new(self.open.clone());
        async move {
            let steps = stream::iter(steps?).then(move |step| {
                let _held_by_the_stream = &open;
                async move {
                    match step {
                        Step::Say(tokens) => Some(Ok(Output::Tokens(tokens))),
                        Step::Relay(output) => Some(Ok(output)),
                        Step::Fail(error) => Some(Err(error)),
                        Step::Wait(permits) => {
                            permits.acquire().await.unwrap().forget();
                            None
                        }
                        Step::Yield => {
                            tokio::task::yield_now().await;
                            None
                        }
                        Step::Hang => std::future::pending().await,
                        Step::Panic => panic!("a scripted panic"),
                    }
                }
            });
            Ok(steps.filter_map(|output| async { output }).boxed())
        }
        .boxed()
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        let mut models = self.others.lock().clone();
        models.push(self.card.lock().clone());
        models
    }

    fn absence(&self, model: &str) -> Option<String> {
        self.absent.lock().as_ref().filter(|absent| *absent == model).map(|_| "it has just left".into())
    }

    fn readiness(&self) -> Readiness {
        self.readiness.lock().clone()
    }
}

struct Open(Arc<AtomicUsize>);

impl Open {
    fn new(count: Arc<AtomicUsize>) -> Self {
        count.fetch_add(1, Ordering::SeqCst);
        Self(count)
    }
}

impl Drop for Open {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A model called `org/tiny` with room for 64 tokens.
pub(crate) fn card() -> ModelCard {
    let template = "{% for m in messages %}{{ bos_token if loop.first }}<|turn|>{{ m.role }}:{{ m.content }}\
        {% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}{% endfor %}\
        {% if tools %}{{ tools | tojson }}{% endif %}{% if add_generation_prompt %}<|turn|>{% endif %}";
    ModelCard {
        identity: "tiny".into(),
        created: 1_700_000_000,
        vocabulary: tiny_tokenizer::VOCABULARY,
        eos: vec![tiny_tokenizer::EOS],
        tokenizer: Some(tiny_tokenizer::tokenizer().into()),
        chat_template: Some(template.into()),
        special_tokens: vec![("bos_token".into(), "<|bos|>".into())],
        ..ModelCard::new("org/tiny", 64, 16)
    }
}

/// The same model where requests for it are relayed.
pub(crate) fn relayed_card() -> ModelCard {
    ModelCard { tokenizer: None, is_relayed: true, has_exact_blocks: false, ..card() }
}

/// Text as tokens, one per byte.
pub(crate) fn bytes(text: &str) -> Vec<u32> {
    text.bytes().map(u32::from).collect()
}

/// An item with this text.
pub(crate) fn say(text: &str) -> Step {
    Step::Say(Tokens { ids: bytes(text), ..Tokens::default() })
}

/// A first item: 48 tokens of the prompt were in host memory, 17 were computed.
pub(crate) fn first(text: &str) -> Step {
    let cached = serde_json::from_value(serde_json::json!([["g2", 48]])).unwrap();
    let worker = Some("w1".into());
    let prompt = PromptReport { cached, computed: 17, worker, ..PromptReport::default() };
    Step::Say(Tokens { ids: bytes(text), prompt: Some(prompt), ..Tokens::default() })
}

/// A last item.
pub(crate) fn last(text: &str, finish: FinishReason) -> Step {
    Step::Say(Tokens { ids: bytes(text), finish: Some(finish), ..Tokens::default() })
}

/// A last item with log-probabilities: each token -0.5, and one rival.
pub(crate) fn last_with_logprobs(ids: &[u32], rival: u32) -> Step {
    let logprobs =
        ids.iter().map(|id| Logprobs { chosen: -0.5, rank: 1, top: vec![(*id, -0.5), (rival, f32::NEG_INFINITY)] });
    let logprobs = logprobs.collect();
    Step::Say(Tokens { ids: ids.to_vec(), logprobs, finish: Some(FinishReason::Length), ..Tokens::default() })
}

/// A complete response.
pub(crate) struct TestResponse {
    pub(crate) status: StatusCode,
    pub(crate) headers: HeaderMap,
    pub(crate) body: Vec<u8>,
}

impl TestResponse {
    pub(crate) fn json(&self) -> Value {
        self.parsed()
    }

    pub(crate) fn parsed<T: DeserializeOwned>(&self) -> T {
        serde_json::from_slice(&self.body).unwrap_or_else(|e| panic!("{e}: {}", String::from_utf8_lossy(&self.body)))
    }

    /// The data of all events.
    pub(crate) fn events(&self) -> Vec<String> {
        events(std::str::from_utf8(&self.body).unwrap())
    }

    pub(crate) fn header(&self, name: &str) -> &str {
        self.headers.get(name).unwrap_or_else(|| panic!("no {name}")).to_str().unwrap()
    }
}

/// The data of the events in a piece of a stream.
pub(crate) fn events(text: &str) -> Vec<String> {
    assert!(text.ends_with("\n\n"), "whole events only: {text:?}");
    text.split_terminator("\n\n").map(|event| event.strip_prefix("data: ").unwrap_or(event).to_owned()).collect()
}

/// A request with a JSON body.
pub(crate) fn post(path: &str, body: &Value) -> HttpRequest<Body> {
    HttpRequest::post(path).header("content-type", "application/json").body(Body::from(body.to_string())).unwrap()
}

/// Sends a request and waits for the whole response.
pub(crate) async fn send(router: &Router, request: HttpRequest<Body>) -> TestResponse {
    let response = router.clone().oneshot(request).await.unwrap();
    let status = response.status();
    let headers = response.headers().clone();
    TestResponse { status, headers, body: to_bytes(response.into_body(), usize::MAX).await.unwrap().to_vec() }
}

/// The answer to a health check, once the tokenizer is loaded: a busy machine takes longer than a check waits.
pub(crate) async fn ready(router: &Router) -> TestResponse {
    loop {
        let answer = send(router, HttpRequest::get("/ready").body(Body::empty()).unwrap()).await;
        if !String::from_utf8_lossy(&answer.body).contains("is being loaded") {
            return answer;
        }
    }
}

/// A chat request with these fields besides a message.
pub(crate) fn chat(fields: Value) -> HttpRequest<Body> {
    let mut body = serde_json::json!({ "model": "org/tiny", "messages": [{ "role": "user", "content": "hello" }] });
    merge(&mut body, fields);
    post("/v1/chat/completions", &body)
}

/// A completion request with these fields besides a prompt.
pub(crate) fn completion(fields: Value) -> HttpRequest<Body> {
    let mut body = serde_json::json!({ "model": "org/tiny", "prompt": "hello" });
    merge(&mut body, fields);
    post("/v1/completions", &body)
}

fn merge(body: &mut Value, fields: Value) {
    let Value::Object(fields) = fields else { panic!("fields are an object") };
    body.as_object_mut().unwrap().extend(fields);
}
