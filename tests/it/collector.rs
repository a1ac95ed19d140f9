//! A collector of spans in the test process: OTLP over HTTP in JSON.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use axum::Json;
use axum::extract::State;
use axum::routing::post;
use parking_lot::Mutex;
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::net::TcpListener;

/// Time for spans to arrive on a busy machine. They are sent a second after they end.
const TIMEOUT: Duration = Duration::from_mins(2);

/// Collects spans until it is dropped.
pub(crate) struct Collector {
    url: String,
    spans: Arc<Mutex<Vec<CollectedSpan>>>,
    task: tokio::task::JoinHandle<()>,
}

/// A span as it was sent.
#[derive(Clone, Debug)]
pub(crate) struct CollectedSpan {
    pub(crate) trace: String,
    pub(crate) id: String,
    pub(crate) parent: Option<String>,
    pub(crate) name: String,
    /// `service.name` of its process.
    pub(crate) service: String,
    pub(crate) attributes: BTreeMap<String, Value>,
    pub(crate) failed: bool,
}

impl Collector {
    pub(crate) async fn start() -> Self {
        let spans: Arc<Mutex<Vec<CollectedSpan>>> = Arc::default();
        let app = axum::Router::new().route("/v1/traces", post(receive)).with_state(Arc::clone(&spans));
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let registry = prometheus::Registry::new();
        let server = frontend::Server::new(&frontend::Settings::default(), &registry).unwrap();
        let serving = async move { server.serve(listener, app, frontend::Shutdown::default()).await.unwrap() };
        let task = tokio::spawn(serving);
        Self { url, spans, task }
    }

    /// The address, without path.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// The spans so far.
    pub(crate) fn spans(&self) -> Vec<CollectedSpan> {
        self.spans.lock().clone()
    }

    /// The spans of a trace, once they include all of these names.
    pub(crate) async fn trace(&self, trace: &str, names: &[&str]) -> Trace {
        let all = async {
            loop {
                let mut spans = self.spans();
                spans.retain(|span| span.trace == trace);
                if names.iter().all(|name| spans.iter().any(|span| span.name == *name)) {
                    return Trace(spans);
                }
                tokio::time::sleep(Duration::from_millis(20)).await;
            }
        };
        let waited = tokio::time::timeout(TIMEOUT, all).await;
        waited.unwrap_or_else(|_| panic!("{names:?} in trace {trace}: {:#?}", self.spans()))
    }
}

impl Drop for Collector {
    fn drop(&mut self) {
        self.task.abort();
    }
}

/// The spans of one trace.
#[derive(Debug)]
pub(crate) struct Trace(pub(crate) Vec<CollectedSpan>);

impl Trace {
    /// The only span with this name within a parent.
    pub(crate) fn child(&self, parent: &str, name: &str) -> &CollectedSpan {
        let mut children = self.children(parent).filter(|span| span.name == name);
        let child = children.next().unwrap_or_else(|| panic!("no {name} in {parent}: {self:#?}"));
        assert!(children.next().is_none(), "several {name} in {parent}: {self:#?}");
        child
    }

    /// The spans within a parent.
    pub(crate) fn children(&self, parent: &str) -> impl Iterator<Item = &CollectedSpan> {
        self.0.iter().filter(move |span| span.parent.as_deref() == Some(parent))
    }
}

impl CollectedSpan {
    pub(crate) fn number(&self, key: &str) -> u64 {
        self.attributes[key].as_str().unwrap_or_else(|| panic!("{key} of {self:#?}")).parse().unwrap()
    }

    pub(crate) fn text(&self, key: &str) -> &str {
        self.attributes[key].as_str().unwrap_or_else(|| panic!("{key} of {self:#?}"))
    }
}

async fn receive(State(spans): State<Arc<Mutex<Vec<CollectedSpan>>>>, Json(message): Json<Value>) -> Json<Value> {
    for resource in message["resourceSpans"].as_array().unwrap() {
        let service = attributes(&resource["resource"])["service.name"].as_str().unwrap().to_owned();
        let scopes = resource["scopeSpans"].as_array().unwrap().iter();
        let sent = scopes.flat_map(|scope| scope["spans"].as_array().unwrap());
        spans.lock().extend(sent.map(|span| collected(span, &service)));
    }
    Json(Value::Object(Map::new()))
}

fn collected(span: &Value, service: &str) -> CollectedSpan {
    let text = |key: &str| span[key].as_str().map(str::to_owned);
    let nanos = |key: &str| span[key].as_str().unwrap().parse::<u64>().unwrap();
    assert!(nanos("startTimeUnixNano") <= nanos("endTimeUnixNano"), "{span}");
    CollectedSpan {
        trace: text("traceId").unwrap(),
        id: text("spanId").unwrap(),
        parent: text("parentSpanId"),
        name: text("name").unwrap(),
        service: service.to_owned(),
        attributes: attributes(span),
        failed: span["status"]["code"] == 2,
    }
}

/// The values of attributes. Whole numbers are texts, as in the message.
fn attributes(of: &Value) -> BTreeMap<String, Value> {
    let pair = |attribute: &Value| {
        let value = attribute["value"].as_object().unwrap().values().next().unwrap().clone();
        (attribute["key"].as_str().unwrap().to_owned(), value)
    };
    of["attributes"].as_array().unwrap().iter().map(pair).collect()
}
