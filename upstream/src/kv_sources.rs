//! Where a server publishes its KV events, and its block size, as it says itself.
//!
//! vLLM 0.32 answers `GET /kv_event_sources` with its configuration by data-parallel rank:
//!
//! ```json
//! {"0": {"enable_kv_cache_events": true, "endpoint": "tcp://*:5557", "replay_endpoint": null, "topic": ""}}
//! ```
//! A list of such objects, each with `data_parallel_rank`, is understood too, also in a field `sources`.
//!
//! A request names the rank that is to serve it in a header, as the position among the ranks of the server. So the
//! ranks can be distinguished only if the server lists a publisher for each of them.
//!
//! Its block size is a label in its `/metrics`. SGLang says both in `/server_info` ([`sglang`]). Other servers and
//! older releases say neither.

mod sglang;

use crate::ask::{Page, page};
use crate::kv_events::{Endpoint, EndpointError, Source};
use crate::program::Program;
use crate::relay::client::Client;
use http::HeaderValue;
use serde_json::Value;
use std::num::NonZero;

/// What a server says of its KV events.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct KvSources {
    /// Its publishers by data-parallel rank. None: it publishes no events, or does not say.
    pub sources: Vec<Source>,
    /// The numbers of the ranks, in the order of the publishers, if requests can name them; else none.
    pub ranks: Vec<u32>,
    /// Tokens per block.
    pub block_size: Option<NonZero<u32>>,
}

impl KvSources {
    /// Asks a server on `host`, which stands for publishers that bind to all addresses. `None`: it does not answer.
    pub async fn ask(client: &Client, api_key: Option<&HeaderValue>, host: &str, program: Program) -> Option<Self> {
        if program == Program::Sglang {
            return sglang::ask(client, api_key, host).await;
        }
        let mut answer = match page(client, api_key, "/kv_event_sources").await {
            Page::Body(body) => Self::read(&body, host),
            Page::Absent | Page::TooLarge => Self::default(),
            Page::Failed => return None,
        };
        if answer.block_size.is_none() {
            answer.block_size = match page(client, api_key, "/metrics").await {
                Page::Body(metrics) => block_size_in_metrics(&String::from_utf8_lossy(&metrics)),
                Page::Absent | Page::TooLarge => None,
                Page::Failed => return None,
            };
        }
        Some(answer)
    }

    /// Reads the list of publishers. What is not understood counts as absent.
    fn read(body: &[u8], host: &str) -> Self {
        let body: Value = serde_json::from_slice(body).unwrap_or_default();
        let by_rank = body.as_object().into_iter().flatten();
        let by_rank = by_rank.filter_map(|(rank, listed)| Some((Some(rank.parse::<u64>().ok()?), listed)));
        let list = body.as_array().or_else(|| body["sources"].as_array()).into_iter().flatten();
        let list = list.map(|listed| (listed["data_parallel_rank"].as_u64(), listed));
        let listed: Vec<(Option<u64>, &Value)> = by_rank.chain(list).collect();
        let mut sources = Vec::new();
        for (rank, listed) in &listed {
            match source(listed, host) {
                Ok(Some(source)) => sources.push((*rank, source)),
                Ok(None) => {}
                Err(error) => tracing::warn!(%error, "a publisher of kv events cannot be followed"),
            }
        }
        sources.sort_by_key(|(rank, _)| *rank);
        let number = |(rank, _): &(Option<u64>, Source)| rank.and_then(|rank| u32::try_from(rank).ok());
        let mut ranks: Vec<u32> = sources.iter().filter_map(number).collect();
        let are_distinct = ranks.is_sorted_by(|one, next| one < next);
        if ranks.len() < 2 || ranks.len() < listed.len() || !are_distinct {
            ranks.clear();
        }
        let listed = listed.into_iter().map(|(_, listed)| listed);
        let block_size = listed.chain([&body]).find_map(|listed| listed.get("block_size")?.as_u64());
        Self {
            sources: sources.into_iter().map(|(_, source)| source).collect(),
            ranks,
            block_size: block_size.and_then(|size| NonZero::new(u32::try_from(size).ok()?)),
        }
    }
}

fn source(listed: &Value, host: &str) -> Result<Option<Source>, EndpointError> {
    let endpoint = |name: &str| {
        let text = listed[name].as_str().filter(|text| !text.is_empty());
        text.map(|text| Endpoint::on_host(text, host)).transpose()
    };
    if listed["enable_kv_cache_events"] == false {
        return Ok(None);
    }
    let Some(live) = endpoint("endpoint")? else { return Ok(None) };
    let topic = listed["topic"].as_str().unwrap_or_default().to_owned();
    Ok(Some(Source { live, replay: endpoint("replay_endpoint")?, topic }))
}

/// The block size of vLLM's cache, which is a label: `vllm:cache_config_info{block_size="16",…} 1.0`.
fn block_size_in_metrics(metrics: &str) -> Option<NonZero<u32>> {
    let labels = metrics.lines().find_map(|line| line.strip_prefix("vllm:cache_config_info{"))?;
    let size = labels.split(',').find_map(|label| label.trim_start().strip_prefix("block_size=\""))?;
    size.split_once('"')?.0.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(body: &Value) -> KvSources {
        KvSources::read(body.to_string().as_bytes(), "10.0.0.1")
    }

    #[test]
    fn each_rank_has_its_publisher() {
        let listed = serde_json::json!([
            { "data_parallel_rank": 1, "endpoint": "tcp://*:5558", "replay_endpoint": "tcp://*:5560", "topic": "kv" },
            { "data_parallel_rank": 0, "endpoint": "tcp://10.0.0.2:5557", "replay_endpoint": null, "topic": null },
            { "data_parallel_rank": 2, "endpoint": "inproc://cache" },
            { "data_parallel_rank": 3, "endpoint": null, "block_size": 32 },
        ]);
        let of = |live: &str, replay: Option<&str>, topic: &str| Source {
            live: live.parse().unwrap(),
            replay: replay.map(|replay| replay.parse().unwrap()),
            topic: topic.into(),
        };
        let expected = KvSources {
            sources: vec![
                of("tcp://10.0.0.2:5557", None, ""),
                of("tcp://10.0.0.1:5558", Some("tcp://10.0.0.1:5560"), "kv"),
            ],
            ranks: Vec::new(),
            block_size: NonZero::new(32),
        };
        assert_eq!(read(&listed), expected);
        assert_eq!(read(&serde_json::json!({ "sources": listed })), expected);
    }

    #[test]
    fn ranks_that_all_publish_can_be_named() {
        let source =
            |rank: u64| serde_json::json!({ "data_parallel_rank": rank, "endpoint": format!("tcp://*:{rank}") });
        let of = |ranks: &[u64]| read(&ranks.iter().map(|rank| source(*rank)).collect()).ranks;
        assert_eq!(of(&[3, 2]), [2, 3], "the ranks of one node of several");
        for other in [&[0][..], &[1, 1]] {
            assert_eq!(of(other), [0; 0], "{other:?}");
        }
        let silent = serde_json::json!({ "data_parallel_rank": 2, "endpoint": null });
        assert_eq!(read(&serde_json::json!([source(0), source(1), silent])).ranks, [0; 0]);
        let unnamed = serde_json::json!([{ "endpoint": "tcp://*:1" }, { "endpoint": "tcp://*:2" }]);
        assert_eq!((read(&unnamed).sources.len(), read(&unnamed).ranks), (2, vec![]));
    }

    #[test]
    fn vllm_answers_by_rank() {
        // Recorded from vLLM 0.32.0.
        let answer = r#"{"0":{"enable_kv_cache_events":true,"publisher":"zmq","endpoint":"tcp://*:5501",
            "replay_endpoint":"tcp://*:5601","buffer_steps":10000,"hwm":100000,"max_queue_size":100000,"topic":"kv"}}"#;
        let source = Source {
            live: "tcp://10.0.0.1:5501".parse().unwrap(),
            replay: Some("tcp://10.0.0.1:5601".parse().unwrap()),
            topic: "kv".into(),
        };
        assert_eq!(read(&answer.parse().unwrap()).sources, [source]);
        let off = answer.replace("true", "false");
        assert_eq!(read(&off.parse().unwrap()), KvSources::default());
    }

    #[test]
    fn what_is_not_understood_counts_as_absent() {
        for odd in ["[]", "{}", "[7]", "null", "\"x\"", r#"{"sources":{}}"#, r#"[{"block_size":0}]"#] {
            assert_eq!(read(&odd.parse().unwrap()), KvSources::default(), "{odd}");
        }
        assert_eq!(KvSources::read(b"<html>", "h"), KvSources::default());
    }

    #[test]
    fn the_block_size_is_a_label_of_a_metric() {
        let metrics = "# HELP vllm:cache_config_info Information of the LLMEngine CacheConfig\n\
            vllm:cache_config_info{block_size=\"32\",cache_dtype=\"auto\",engine=\"0\"} 1.0\n";
        assert_eq!(block_size_in_metrics(metrics), NonZero::new(32));
        for other in ["", "vllm:cache_config_info{block_size=\"None\"} 1.0", "vllm:cache_config_info{x=\"1\"} 1.0"] {
            assert_eq!(block_size_in_metrics(other), None);
        }
    }
}
