//! The program as a gateway of servers with OpenAI's API, here scripted ones.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

mod aliases;
mod caching;
mod charges;
mod continuation;
mod kv_events;
mod passing;
mod servers;
mod stored;
mod tokenizers;
mod websockets;

pub(crate) use self::tokenizers::tokenizer_folder;
pub(crate) use kv_events::{MESSAGES, publish, sglang, sglang_payload};

use super::process::{client, client_builder};
use blockyard::config::{Config, Listen, Upstream};
use blockyard::node::{Node, Process as _};
use http::header::CONTENT_TYPE;
use prometheus::proto::MetricFamily;
use serde_json::json;
use std::path::Path;
use std::time::Duration;
use tokio::time::sleep;
use upstream::relay::fake::{FakeEngine, Recorded, Script};

/// Time for what happens within seconds on an idle machine.
const TIMEOUT: Duration = Duration::from_mins(1);

fn models() -> Script {
    lists("org/m")
}

fn lists(model: &str) -> Script {
    Script::json(200, &json!({ "object": "list", "data": [{ "id": model, "max_model_len": 4096 }] }))
}

/// A server that lists its model, and follows the scripts for other requests.
async fn server(scripts: impl IntoIterator<Item = Script>) -> FakeEngine {
    let server = FakeEngine::start(scripts).await.unwrap();
    server.set_page("/v1/models", models());
    // Health checks take no script.
    server.set_page("/health", Script::json(200, &json!({})));
    server
}

struct Gateway {
    node: Node,
    url: String,
    http: reqwest::Client,
}

impl Gateway {
    async fn start(servers: &[&FakeEngine]) -> Self {
        Self::of(servers.iter().map(|server| Upstream::new(server.uri())).collect()).await
    }

    async fn of(upstreams: Vec<Upstream>) -> Self {
        Self::with(Config { upstreams, ..Config::with_cache(Path::new("/nonexistent")) }).await
    }

    async fn with(mut config: Config) -> Self {
        let servers = config.upstreams.len();
        config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
        let node = Node::start(&config).await.unwrap();
        let url = format!("http://{}", node.address());
        let gateway = Self { node, url, http: client() };
        gateway.has_workers(servers).await;
        gateway
    }

    /// Waits until the router has this many workers, or more.
    async fn has_workers(&self, workers: usize) {
        let are_registered = async {
            while self.metric("blockyard_router_workers") < workers {
                sleep(Duration::from_millis(10)).await;
            }
        };
        tokio::time::timeout(TIMEOUT, are_registered).await.expect("all servers are registered");
    }

    async fn post(&self, path: &str, body: &str) -> reqwest::Response {
        let request = self.http.post(format!("{}{path}", self.url)).header(CONTENT_TYPE, "application/json");
        request.header("x-blockyard-explain", "1").body(body.to_owned()).send().await.unwrap()
    }

    /// The sum of a counter or gauge over its labels. Not from `/metrics`, which may need an API key.
    fn metric(&self, name: &str) -> usize {
        let families = self.node.registry().gather();
        let samples = families.iter().filter(|family| family.name() == name).flat_map(MetricFamily::get_metric);
        samples.map(|sample| sample.get_counter().get_value() + sample.get_gauge().get_value()).sum::<f64>() as usize
    }
}

/// What a server got beside the requests of the gateway itself.
fn completions(server: &FakeEngine) -> Vec<Recorded> {
    server.requests().into_iter().filter(|request| request.method == "POST").collect()
}

fn chat(content: &str, stream: bool) -> String {
    json!({ "model": "org/m", "messages": [{ "role": "user", "content": content }], "stream": stream }).to_string()
}
