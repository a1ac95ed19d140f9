//! Tenants over HTTP, through a whole node: isolation of their blocks, cache parameters of requests, quotas, metrics.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::client;
use blockyard::config::{Budget, ByteSize, Config, Listen, TenantQuota, Tiers};
use blockyard::node::{Node, Process};
use frontend::{ApiKey, KeyEntry, KeyFile};
use serde_json::{Value, json};
use std::num::NonZero;
use std::path::Path;
use std::time::Duration;

/// A node that serves `tiny` to tenants named by the header `x-tenant`.
struct Harness {
    node: Node,
    url: String,
    http: reqwest::Client,
    _data: tempfile::TempDir,
}

impl Harness {
    async fn start(tiers: Tiers) -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut config = config(data.path(), tiers);
        config.frontend.tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
        let node = Node::start(&config).await.unwrap();
        let url = format!("http://{}/v1/completions", node.address());
        Self { node, url, http: client(), _data: data }
    }

    /// Completes one fixed prompt: the text, and the number of cached prompt tokens.
    async fn ask(&self, tenant: &str, cache: Value) -> (String, u64) {
        self.complete(tenant, &(0..97).map(|n| 10 + n * 7 % 500).collect::<Vec<_>>(), cache).await
    }

    async fn complete(&self, tenant: &str, prompt: &[u32], cache: Value) -> (String, u64) {
        let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 4, "temperature": 0, "cache": cache});
        let response = self.http.post(&self.url).header("x-tenant", tenant).json(&body).send().await.unwrap();
        let answer: Value = response.json().await.unwrap();
        let cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"].as_u64();
        (answer["choices"][0]["text"].as_str().unwrap().into(), cached.unwrap())
    }
}

/// A configuration that serves `tiny`.
fn config(data: &Path, tiers: Tiers) -> Config {
    let mut config = Config::with_cache(data);
    config.model = "tiny".parse().unwrap();
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    config.workers = "both:1".parse().unwrap();
    config.tiers = tiers;
    config
}

fn mib(n: u64) -> Budget {
    Budget::Bytes(ByteSize(n << 20))
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_share_no_blocks_and_get_the_same_answer() {
    let harness = Harness::start(Tiers { g1: mib(32), g2: mib(32), g3: mib(64), ..Tiers::default() }).await;
    let (text, cold) = harness.ask("ann", json!({"ttl": 86_400, "priority": "low"})).await;
    assert_eq!(cold, 0);
    assert_eq!(harness.ask("ann", Value::Null).await, (text.clone(), 96));
    assert_eq!(
        harness.ask("bob", json!({"store": false})).await,
        (text.clone(), 0),
        "ann's blocks are not visible to bob"
    );
    assert_eq!(harness.ask("bob", json!({"pin": 60})).await, (text.clone(), 96));
    assert_eq!(harness.ask("", Value::Null).await, (text, 0), "requests without a tenant see no tenant's blocks");
    harness.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_evicts_a_tenant_without_quota_and_not_one_with() {
    let ann = TenantQuota { g1_guaranteed: ByteSize(1 << 20), ..TenantQuota::of("ann") };
    let tiers = Tiers { g1: mib(2), g2: Budget::Off, g3: Budget::Off, quotas: vec![ann], ..Tiers::default() };
    let harness = Harness::start(tiers).await;
    for tenant in ["ann", "cid"] {
        assert_eq!(harness.ask(tenant, Value::Null).await.1, 0);
    }
    for seed in 0..8 {
        let prompt: Vec<u32> = (0..320).map(|n| 10 + (seed * 31 + n * 11) % 500).collect();
        // Twice: without the guarantee, more frequently used blocks than ann's would stay.
        for _ in 0..2 {
            harness.complete("bob", &prompt, Value::Null).await;
        }
    }
    assert_eq!(harness.ask("ann", Value::Null).await.1, 96);
    assert_eq!(harness.ask("cid", Value::Null).await.1, 0, "the flood evicts blocks without a guarantee");
    harness.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn the_metrics_of_two_keys_have_the_tokens_of_their_answers() {
    let data = tempfile::tempdir().unwrap();
    let file = data.path().join("keys.toml");
    let keys = ["ann", "bob"].map(|tenant| {
        let key = ApiKey::generate().unwrap();
        let entry = KeyEntry {
            tenant: Some(tenant.to_owned()),
            tokens_per_minute: NonZero::new(1_000_000),
            ..KeyEntry::new(format!("key-of-{tenant}"), key.hash())
        };
        KeyFile::change(&file, |file| {
            file.keys.push(entry);
            Ok(())
        })
        .unwrap();
        (tenant, key.reveal().to_owned())
    });
    let mut config = config(data.path(), Tiers { g1: mib(32), g2: Budget::Off, g3: Budget::Off, ..Tiers::default() });
    config.frontend.api_keys_file = Some(file);
    let node = Node::start(&config).await.unwrap();
    let (url, http) = (format!("http://{}", node.address()), client());
    let metrics = async || http.get(format!("{url}/metrics")).send().await.unwrap().text().await.unwrap();
    for (nth, (tenant, key)) in keys.iter().enumerate() {
        let mut expected = [0_u64; 3];
        for _ in 0..2 {
            let prompt: Vec<u32> = (0..97).map(|n| 10 + n * 7 % 500).collect();
            let body = json!({"model": "tiny", "prompt": prompt, "max_tokens": 4 + nth});
            let request = http.post(format!("{url}/v1/completions")).bearer_auth(key).json(&body);
            let answer: Value = request.send().await.unwrap().json().await.unwrap();
            let usage = &answer["usage"];
            let cached = &usage["prompt_tokens_details"]["cached_tokens"];
            for (sum, tokens) in expected.iter_mut().zip([&usage["prompt_tokens"], cached, &usage["completion_tokens"]])
            {
                *sum += tokens.as_u64().unwrap();
            }
        }
        let ended = format!("blockyard_frontend_tenant_requests_total{{outcome=\"ok\",tenant=\"{tenant}\"}} 2\n");
        // The last byte arrives before its request is counted.
        while !metrics().await.contains(&ended) {
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let text = metrics().await;
        for (kind, tokens) in ["prompt", "cached", "generated"].into_iter().zip(expected) {
            let line = format!("blockyard_frontend_tenant_{kind}_tokens_total{{tenant=\"{tenant}\"}} {tokens}\n");
            assert!(tokens > 0 && text.contains(&line), "{line} is not in\n{text}");
        }
        let limit =
            format!("blockyard_frontend_tenant_limit_per_minute{{limit=\"tokens\",tenant=\"{tenant}\"}} 1000000\n");
        assert!(text.contains(&limit), "{limit} is not in\n{text}");
        assert!(!text.contains("tenant=\"key-of-"), "a key's name is no tenant");
    }
    node.shutdown().await;
}
