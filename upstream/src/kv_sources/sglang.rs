//! Where SGLang publishes its KV events, and its page size, as its `GET /server_info` says (since 0.5.6).
//!
//! The page has all arguments of the server, among them these, of which `kv_events_config` is JSON in a string:
//!
//! ```json
//! {"page_size": 64, "dp_size": 2, "nnodes": 1,
//!  "kv_events_config": "{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\"}",
//!  "kv_events": {"block_size": 64, "dp_size": 2}}
//! ```
//! Each data-parallel rank has a publisher, at the port of the first one plus the rank. `kv_events` is there since
//! 0.5.13, and is stronger than the arguments: pages of several devices may make up one block (`dcp_size`), and the
//! ranks may be those of the attention (`attn_dp_size`). Releases that have it also read the rank of a request from a
//! header (since 0.5.10), so it tells whether requests can name ranks.

use super::KvSources;
use crate::ask::{Page, page};
use crate::kv_events::{Endpoint, EndpointError, Source};
use crate::relay::client::Client;
use http::HeaderValue;
use serde_json::Value;
use std::num::NonZero;

/// The endpoint of a configuration that names none.
const DEFAULT_ENDPOINT: &str = "tcp://*:5557";
/// Maximum number of data-parallel ranks that a server may report: more than any deployment has, and few enough to
/// subscribe to all of them.
const MAX_RANKS: u64 = 1024;

/// Asks a server on `host`, which stands for publishers that bind to all addresses. `None`: it does not answer.
pub(super) async fn ask(client: &Client, api_key: Option<&HeaderValue>, host: &str) -> Option<KvSources> {
    match page(client, api_key, "/server_info").await {
        Page::Body(body) => Some(read(&body, host)),
        Page::Absent | Page::TooLarge => Some(KvSources::default()),
        Page::Failed => None,
    }
}

/// Reads the page. What is not understood counts as absent.
fn read(body: &[u8], host: &str) -> KvSources {
    let info: Value = serde_json::from_slice(body).unwrap_or_default();
    let described = &info["kv_events"];
    let block_size = described["block_size"].as_u64().or_else(|| info["page_size"].as_u64());
    let ranks = described["dp_size"].as_u64().or_else(|| info["dp_size"].as_u64());
    let ranks = ranks.unwrap_or(1).clamp(1, MAX_RANKS);
    // Ranks on other nodes publish there, and the page does not name these hosts.
    let is_elsewhere = ranks > 1 && info["nnodes"].as_u64().is_some_and(|nodes| nodes > 1);
    let first = publisher(&info, host).unwrap_or_else(|error| {
        tracing::warn!(%error, "a publisher of kv events cannot be followed");
        None
    });
    let sources: Vec<Source> = match first.filter(|_| !is_elsewhere) {
        Some(first) => (0..ranks as u32).map_while(|rank| first.of_rank(rank)).collect(),
        None => Vec::new(),
    };
    let can_be_named = described.is_object() && sources.len() > 1;
    KvSources {
        ranks: if can_be_named { (0..sources.len() as u32).collect() } else { Vec::new() },
        sources,
        block_size: block_size.and_then(|size| NonZero::new(u32::try_from(size).ok()?)),
    }
}

/// The publisher of the first rank. `None`: the server publishes no events.
fn publisher(info: &Value, host: &str) -> Result<Option<Source>, EndpointError> {
    let config = info["kv_events_config"].as_str().and_then(|config| serde_json::from_str(config).ok());
    let config: Value = config.unwrap_or_default();
    if config["publisher"] != "zmq" {
        return Ok(None);
    }
    let live = Endpoint::on_host(config["endpoint"].as_str().unwrap_or(DEFAULT_ENDPOINT), host)?;
    let replay = config["replay_endpoint"].as_str().map(|text| Endpoint::on_host(text, host)).transpose()?;
    Ok(Some(Source { live, replay, topic: config["topic"].as_str().unwrap_or_default().to_owned() }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::program::Program;
    use crate::relay::client::Settings;
    use crate::relay::fake::{FakeEngine, Script};
    use serde_json::json;

    const OLDEST: &str = include_str!("../../tests/fixtures/server_info/sglang-0.5.7.json");
    const NEWEST: &str = include_str!("../../tests/fixtures/server_info/sglang-0.5.23.json");

    fn page_of(text: &str) -> Value {
        text.parse().unwrap()
    }

    fn read_page(page: &Value) -> KvSources {
        read(page.to_string().as_bytes(), "10.0.0.1")
    }

    fn source(live: &str, replay: Option<&str>) -> Source {
        let replay = replay.map(|replay| replay.parse().unwrap());
        Source { live: live.parse().unwrap(), replay, topic: "kv".into() }
    }

    #[test]
    fn the_oldest_release_names_its_publisher_and_page_size() {
        let expected = KvSources {
            sources: vec![source("tcp://10.0.0.1:5557", Some("tcp://10.0.0.1:5657"))],
            ranks: Vec::new(),
            block_size: NonZero::new(64),
        };
        assert_eq!(read_page(&page_of(OLDEST)), expected);
        // Its ranks publish at ports of their own, but no request can name one.
        let mut ranks = page_of(OLDEST);
        ranks["dp_size"] = json!(2);
        let of_ranks = read_page(&ranks);
        let second = source("tcp://10.0.0.1:5558", Some("tcp://10.0.0.1:5658"));
        assert_eq!((of_ranks.sources, of_ranks.ranks), (vec![expected.sources[0].clone(), second], vec![]));
    }

    #[test]
    fn each_rank_is_at_a_port_of_its_own_and_can_be_named() {
        let expected = KvSources {
            sources: vec![
                source("tcp://10.0.0.1:5557", Some("tcp://10.0.0.1:5657")),
                source("tcp://10.0.0.1:5558", Some("tcp://10.0.0.1:5658")),
            ],
            ranks: vec![0, 1],
            block_size: NonZero::new(128),
        };
        let page = page_of(NEWEST);
        assert_eq!((&page["page_size"], &page["dp_size"]), (&json!(64), &json!(1)), "of one device, and of replicas");
        assert_eq!(read_page(&page), expected);
        let with = |key: &str, value: Value| {
            let mut page = page.clone();
            page[key] = value;
            read_page(&page)
        };
        let one = with("kv_events", json!({ "dp_size": 1 }));
        assert_eq!((one.sources.len(), one.ranks), (1, vec![]), "one rank is the server");
        assert!(with("nnodes", json!(2)).sources.is_empty(), "the hosts of the other nodes are not known");
        let at_the_end = json!("{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:65535\"}");
        assert_eq!(with("kv_events_config", at_the_end).sources.len(), 1);
    }

    #[test]
    fn a_server_without_a_publisher_has_a_page_size() {
        let of = |config: Value| {
            let mut page = page_of(OLDEST);
            page["kv_events_config"] = config;
            read_page(&page)
        };
        let silent = KvSources { block_size: NonZero::new(64), ..KvSources::default() };
        for config in [json!(null), json!("{}"), json!("{\"publisher\":\"null\"}"), json!("{"), json!(7)] {
            assert_eq!(of(config.clone()), silent, "{config}");
        }
        assert_eq!(of(json!("{\"publisher\":\"zmq\",\"endpoint\":\"ipc:///tmp/kv\"}")), silent);
        let default = of(json!("{\"publisher\":\"zmq\"}"));
        assert_eq!(default.sources[0].live, "tcp://10.0.0.1:5557".parse().unwrap());
        assert_eq!(read(b"<html>", "h"), KvSources::default());
    }

    #[tokio::test]
    async fn only_sglang_is_asked_for_this_page() {
        let server = FakeEngine::start([]).await.unwrap();
        let client = Client::new(&server.uri(), &Settings::default()).unwrap();
        let ask = async |program| KvSources::ask(&client, None, "10.0.0.1", program).await;
        server.set_page("/server_info", Script::json(200, &page_of(NEWEST)));
        assert_eq!(ask(Program::Sglang).await.unwrap().ranks, [0, 1]);
        assert_eq!(ask(Program::Other).await, Some(KvSources::default()));
        server.set_page("/server_info", Script::json(404, &json!({})));
        assert_eq!(ask(Program::Sglang).await, Some(KvSources::default()));
        server.set_page("/server_info", Script::json(503, &json!({})));
        assert_eq!(ask(Program::Sglang).await, None, "it is asked again");
        assert_eq!(ask(Program::Vllm).await, Some(KvSources::default()));
        assert_eq!(Program::of_owner(Some("sglang")), Program::Sglang);
        assert_eq!(Program::of_owner(Some("vllm")), Program::Vllm);
        assert_eq!(Program::of_owner(None), Program::Other);
    }
}
