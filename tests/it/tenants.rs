//! What a client asks for its blocks, and whose they are, over HTTP and through a whole node.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::client;
use blockyard::config::{Budget, ByteSize, Config, Listen, TenantQuota, Tiers};
use blockyard::node::Node;
use serde_json::{Value, json};

/// A node that serves `tiny` to tenants.
struct Served {
    node: Node,
    url: String,
    http: reqwest::Client,
    _data: tempfile::TempDir,
}

impl Served {
    async fn start(tiers: Tiers) -> Self {
        let data = tempfile::tempdir().unwrap();
        let mut config = Config::with_cache(data.path());
        config.model = "tiny".parse().unwrap();
        config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
        config.workers = "both:1".parse().unwrap();
        config.tiers = tiers;
        config.frontend.tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
        let node = Node::start(&config).await.unwrap();
        let url = format!("http://{}/v1/completions", node.address());
        Self { node, url, http: client(), _data: data }
    }

    /// The answer's text, and how many tokens of the prompt were cached.
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

fn budget(mib: u64) -> Budget {
    Budget::Bytes(ByteSize(mib << 20))
}

#[tokio::test(flavor = "multi_thread")]
async fn tenants_share_no_blocks_and_get_the_same_answer() {
    let served = Served::start(Tiers { g1: budget(32), g2: budget(32), g3: budget(64), ..Tiers::default() }).await;
    let (text, cold) = served.ask("ann", json!({"ttl": 86_400, "priority": "low"})).await;
    assert_eq!(cold, 0);
    assert_eq!(served.ask("ann", Value::Null).await, (text.clone(), 96));
    assert_eq!(served.ask("bob", json!({"store": false})).await, (text.clone(), 0), "not ann's");
    assert_eq!(served.ask("bob", json!({"pin": 60})).await, (text.clone(), 96));
    assert_eq!(served.ask("", Value::Null).await, (text, 0), "nobody in particular has none of them");
    served.node.shutdown().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_flood_displaces_what_nobody_was_promised_and_not_what_a_tenant_was() {
    let ann = TenantQuota { g1_guaranteed: ByteSize(1 << 20), ..TenantQuota::of("ann") };
    let tiers = Tiers { g1: budget(2), g2: Budget::Off, g3: Budget::Off, quotas: vec![ann], ..Tiers::default() };
    let served = Served::start(tiers).await;
    for tenant in ["ann", "cid"] {
        assert_eq!(served.ask(tenant, Value::Null).await.1, 0);
    }
    for seed in 0..8 {
        let prompt: Vec<u32> = (0..320).map(|n| 10 + (seed * 31 + n * 11) % 500).collect();
        // Twice: what is used more often than hers would stay, were it not for the promise.
        for _ in 0..2 {
            served.complete("bob", &prompt, Value::Null).await;
        }
    }
    assert_eq!(served.ask("ann", Value::Null).await.1, 96);
    assert_eq!(served.ask("cid", Value::Null).await.1, 0, "there was not enough of a flood");
    served.node.shutdown().await;
}
