//! What a request costs of the limit of its key, by how it ends.

use super::{Gateway, client_builder, server};
use blockyard::config::{CacheSalt, Config, Upstream};
use frontend::{ApiKey, KeyEntry, KeyFile};
use http::header::{CONTENT_TYPE, LOCATION};
use reqwest::redirect::Policy;
use serde_json::json;
use std::num::NonZero;
use std::path::Path;
use std::time::Duration;
use upstream::relay::fake::{FakeEngine, Script};

/// The prompt has about 500 tokens, so a key that is charged for one cannot send another.
const TOKENS_PER_MINUTE: u32 = 800;

#[tokio::test]
async fn a_prompt_is_charged_once_the_server_may_have_computed_it() {
    let error = json!({ "error": { "message": "scripted", "code": null } });
    let usage = json!({ "prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2 });
    let whole = Script::json(200, &json!({ "choices": [], "usage": usage }));
    let rows = [
        ("deadline", whole.clone().after(Duration::from_mins(1)), 504, 429),
        ("fails", Script::json(500, &error), 500, 429),
        ("refuses", Script::json(400, &error), 400, 200),
        ("does not have it", Script::json(501, &error), 501, 200),
        ("redirects", Script::json(307, &error).header(LOCATION, "/v1/else"), 307, 200),
        ("redirects elsewhere", Script::json(307, &error).header(LOCATION, "http://else/"), 502, 200),
        ("no server behind a proxy", Script::json(502, &error), 502, 200),
    ];
    // A request that gets 429 does not reach the server.
    let scripts = rows.iter().flat_map(|(_, script, _, next)| {
        [Some(script.clone()), (*next == 200).then(|| whole.clone())].into_iter().flatten()
    });
    let server = server(scripts.collect::<Vec<_>>()).await;
    let gateway = KeyedGateway::start(&server, rows.len()).await;
    for (number, (name, _, first, next)) in rows.iter().enumerate() {
        assert_eq!(gateway.ask(number, (*name == "deadline").then_some(1000)).await, *first, "{name}");
        assert_eq!(gateway.ask(number, None).await, *next, "{name}: the next request");
    }
}

#[tokio::test]
async fn a_prompt_is_charged_if_the_server_closes_the_connection_without_a_response() {
    let server = server([]).await;
    // Each time: a request on a connection that was open before is sent again.
    server.set_page("/v1/chat/completions", Script::close());
    let gateway = KeyedGateway::start(&server, 1).await;
    assert_eq!(gateway.ask(0, None).await, 503);
    assert_eq!(gateway.ask(0, None).await, 429, "the server may have computed the prompt");
}

/// A gateway, and keys for it.
struct KeyedGateway {
    gateway: Gateway,
    keys: Vec<ApiKey>,
    _folder: tempfile::TempDir,
}

impl KeyedGateway {
    async fn start(server: &FakeEngine, keys: usize) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("keys.toml");
        let keys: Vec<_> = (0..keys).map(|_| ApiKey::generate().unwrap()).collect();
        KeyFile::change(&file, |file| {
            for (number, key) in keys.iter().enumerate() {
                let tokens_per_minute = NonZero::new(TOKENS_PER_MINUTE);
                file.keys.push(KeyEntry { tokens_per_minute, ..KeyEntry::new(format!("key-{number}"), key.hash()) });
            }
            Ok(())
        })
        .unwrap();
        // Requests with a key may have a tenant, and the server has no salts.
        let upstream = Upstream { cache_salt: CacheSalt::Off, ..Upstream::new(server.uri()) };
        let mut config = Config { upstreams: vec![upstream], ..Config::with_cache(Path::new("/nonexistent")) };
        config.frontend.api_keys_file = Some(file);
        let mut gateway = Gateway::with(config).await;
        gateway.http = client_builder().redirect(Policy::none()).build().unwrap();
        Self { gateway, keys, _folder: folder }
    }

    /// The status of a request with the key of this number. It is charged when its response has ended.
    async fn ask(&self, key: usize, deadline_ms: Option<u32>) -> u16 {
        let body = json!({ "model": "org/m", "messages": [{ "role": "user", "content": "word ".repeat(400) }] });
        let url = format!("{}/v1/chat/completions", self.gateway.url);
        let request = self.gateway.http.post(url).bearer_auth(self.keys[key].reveal());
        let mut request = request.header(CONTENT_TYPE, "application/json").body(body.to_string());
        if let Some(deadline_ms) = deadline_ms {
            request = request.header("x-blockyard-deadline-ms", deadline_ms.to_string());
        }
        let answer = request.send().await.unwrap();
        let status = answer.status().as_u16();
        drop(answer.bytes().await.unwrap());
        status
    }
}
