//! A server with a prefix cache, as vLLM has it: it reports the cached tokens of each prompt, and announces its blocks
//! in KV events, which name the salts that it was sent.

use super::{Gateway, TIMEOUT, completions, server};
use blockyard::config::{Config, Upstream};
use serde_json::{Value, json};
use std::collections::HashMap;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use tokio::time::sleep;
use upstream::kv_events::fake::FakePublisher;
use upstream::relay::fake::{FakeEngine, Recorded, Script};

/// Tokens per block.
const BLOCK: usize = 32;

struct CachingServer {
    server: FakeEngine,
    cache: Arc<Cache>,
}

struct Cache {
    publisher: FakePublisher,
    blocks: Mutex<Blocks>,
}

#[derive(Default)]
struct Blocks {
    /// The server's hash of each block, by the salt and the tokens up to the end of the block.
    hashes: HashMap<(String, Vec<u32>), u64>,
    /// Number of hashes that were given.
    last_hash: u64,
    /// Number of published events.
    published: u64,
}

impl CachingServer {
    async fn start() -> Self {
        let (server, publisher) = (server([]).await, FakePublisher::start().await.unwrap());
        let source = json!([{ "endpoint": format!("tcp://*:{}", publisher.port()), "block_size": BLOCK }]);
        server.set_page("/kv_event_sources", Script::json(200, &source));
        server.set_page("/openapi.json", Script::json(200, &json!({ "properties": { "cache_salt": {} } })));
        let cache = Arc::new(Cache { publisher, blocks: Mutex::default() });
        let answering = Arc::clone(&cache);
        server.set_answers("/v1/completions", move |request| answering.answer(request));
        Self { server, cache }
    }

    fn published(&self) -> u64 {
        self.cache.blocks.lock().unwrap().published
    }
}

impl Cache {
    /// Answers a completion: stores its blocks, and reports those that it had before, without the block of the last
    /// token.
    fn answer(&self, request: &Recorded) -> Script {
        let body: Value = serde_json::from_slice(&request.body).unwrap();
        let prompt: Vec<u32> = serde_json::from_value(body["prompt"].clone()).unwrap();
        let salt = body["cache_salt"].as_str().unwrap_or_default();
        let had = self.store(salt, &prompt);
        let cached = had.min((prompt.len() - 1) / BLOCK) * BLOCK;
        let usage = json!({ "prompt_tokens": prompt.len(), "prompt_tokens_details": { "cached_tokens": cached } });
        Script::json(200, &json!({ "choices": [], "usage": usage }))
    }

    /// Stores the blocks of a prompt, and returns the number of those that it had.
    fn store(&self, salt: &str, prompt: &[u32]) -> usize {
        let mut blocks = self.blocks.lock().unwrap();
        let key = |count: usize| (salt.to_owned(), prompt[..count * BLOCK].to_vec());
        let all = prompt.len() / BLOCK;
        let had = (1..=all).take_while(|count| blocks.hashes.contains_key(&key(*count))).count();
        if had == all {
            return had;
        }
        let parent = blocks.hashes.get(&key(had)).copied();
        let mut hashes = Vec::new();
        for count in had + 1..=all {
            blocks.last_hash += 1;
            hashes.push(blocks.last_hash);
            let hash = blocks.last_hash;
            blocks.hashes.insert(key(count), hash);
        }
        // Only the first block of a prompt names the salt.
        let first_keys = if had == 0 && !salt.is_empty() { array([text(salt)]) } else { NIL.to_vec() };
        let extra_keys = std::iter::once(first_keys).chain(hashes.iter().map(|_| NIL.to_vec())).take(hashes.len());
        let event = [
            vec![0x88],
            [text("type"), text("BlockStored")].concat(),
            [text("block_hashes"), array(hashes.iter().copied().map(number))].concat(),
            [text("parent_block_hash"), parent.map_or(NIL.to_vec(), number)].concat(),
            [text("token_ids"), array(prompt[had * BLOCK..all * BLOCK].iter().map(|token| number((*token).into())))]
                .concat(),
            [text("block_size"), number(BLOCK as u64)].concat(),
            [text("lora_id"), NIL.to_vec()].concat(),
            [text("medium"), text("GPU")].concat(),
            [text("extra_keys"), array(extra_keys)].concat(),
        ];
        self.publish(&mut blocks, &event.concat());
        had
    }

    /// Evicts the last block of the longest prompt.
    fn evict(&self) {
        let mut blocks = self.blocks.lock().unwrap();
        let Some(last) = blocks.hashes.keys().max_by_key(|(_, tokens)| tokens.len()).cloned() else { return };
        let hash = blocks.hashes.remove(&last).unwrap();
        let event = [
            vec![0x83],
            [text("type"), text("BlockRemoved")].concat(),
            [text("block_hashes"), array([number(hash)])].concat(),
            [text("medium"), text("GPU")].concat(),
        ];
        self.publish(&mut blocks, &event.concat());
    }

    /// Publishes a batch of one event.
    fn publish(&self, blocks: &mut Blocks, event: &[u8]) {
        let batch = [&[0x92, 0xcb][..], &1.5_f64.to_be_bytes(), &[0x91], event].concat();
        self.publisher.publish([b"kv", &blocks.published.to_be_bytes(), &batch]);
        blocks.published += 1;
    }
}

/// Values of msgpack.
const NIL: [u8; 1] = [0xc0];

fn text(text: &str) -> Vec<u8> {
    [&[0xd9, text.len() as u8], text.as_bytes()].concat()
}

fn number(number: u64) -> Vec<u8> {
    [&[0xcf][..], &number.to_be_bytes()].concat()
}

fn array(items: impl IntoIterator<Item = Vec<u8>>) -> Vec<u8> {
    let items: Vec<Vec<u8>> = items.into_iter().collect();
    [&[0xdc][..], &(items.len() as u16).to_be_bytes(), &items.concat()].concat()
}

/// Completes a prompt: its cached tokens, as predicted and as reported.
async fn complete(gateway: &Gateway, tenant: Option<&str>, prompt: &[u32]) -> (u64, u64) {
    let body = json!({ "model": "org/m", "prompt": prompt, "max_tokens": 1 });
    let request = gateway.http.post(format!("{}/v1/completions", gateway.url)).json(&body);
    let request = tenant.into_iter().fold(request, |request, tenant| request.header("x-tenant", tenant));
    let answer = request.header("x-blockyard-explain", "1").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    let decision: Value = serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
    let answer: Value = answer.json().await.unwrap();
    let reported = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64().unwrap();
    (decision["cached_tokens"].as_u64().unwrap(), reported)
}

/// Waits until the index has all events that these servers have published.
async fn until_applied(gateway: &Gateway, servers: &[CachingServer]) {
    let published: u64 = servers.iter().map(CachingServer::published).sum();
    let applied = async {
        while (gateway.metric("blockyard_router_index_events_total") as u64) < published {
            sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(TIMEOUT, applied).await.expect("the events arrive");
}

#[tokio::test]
async fn predicted_cached_tokens_are_those_that_servers_report() {
    let servers = [CachingServer::start().await, CachingServer::start().await];
    let gateway = Gateway::start(&[&servers[0].server, &servers[1].server]).await;
    // Ten conversations. Every third prompt of one is the same again, and some end with a full block.
    let mut lengths: [u32; 10] = std::array::from_fn(|conversation| 90 + 3 * conversation as u32);
    let (mut predicted, mut reported) = (Vec::new(), Vec::new());
    for turn in 0..80_usize {
        let conversation = (turn * 7 + turn / 10) % 10;
        let length = &mut lengths[conversation];
        *length += if turn / 10 % 3 == 2 { 0 } else { 32 };
        let prompt: Vec<u32> = (0..*length).map(|n| conversation as u32 * 1000 + n).collect();
        let (expected, is) = complete(&gateway, None, &prompt).await;
        predicted.push(expected);
        reported.push(is);
        if turn % 5 == 4 {
            servers[turn % 2].cache.evict();
        }
        until_applied(&gateway, &servers).await;
    }
    assert_eq!(predicted, reported);
    assert!(reported.iter().sum::<u64>() > 4_000, "most prompts are repeated: {reported:?}");
    assert!(servers.iter().all(|server| completions(&server.server).len() > 10), "both servers get requests");
}

#[tokio::test]
async fn a_tenant_finds_the_blocks_that_events_name_by_its_salt() {
    let servers = [CachingServer::start().await];
    let mut config = Config {
        upstreams: vec![Upstream::new(servers[0].server.uri())],
        ..Config::with_cache(Path::new("/nonexistent"))
    };
    config.frontend.tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
    let gateway = Gateway::with(config).await;
    let prompt: Vec<u32> = (100..200).collect();
    for tenant in [Some("ann"), Some("bob"), None] {
        assert_eq!(complete(&gateway, tenant, &prompt).await, (0, 0), "{tenant:?} finds no block of another");
        until_applied(&gateway, &servers).await;
    }
    for tenant in [Some("ann"), None, Some("bob")] {
        assert_eq!(complete(&gateway, tenant, &prompt).await, (96, 96), "{tenant:?} finds its own");
    }
    assert_eq!(servers[0].published(), 3, "each has blocks of its own");
    let salt = |request: &Recorded| serde_json::from_slice::<Value>(&request.body).unwrap()["cache_salt"].clone();
    let salts: Vec<Value> = completions(&servers[0].server).iter().map(salt).collect();
    assert!(salts[0].is_string() && salts[1].is_string() && salts[0] != salts[1], "{salts:?}");
    assert_eq!((&salts[2], &salts[3], &salts[5]), (&Value::Null, &salts[0], &salts[1]));
}
