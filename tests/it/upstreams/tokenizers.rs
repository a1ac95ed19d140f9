//! Tokenizers of the gateway for models of servers.

use super::{Gateway, chat, completions, lists, server};
use blockyard::config::{Alias, Config, Deployment, Listen, Upstream};
use blockyard::node::Node;
use serde_json::{Value, json};
use std::path::Path;
use upstream::relay::fake::Script;

/// A folder with a tokenizer whose tokens are bytes, and a chat template.
pub(crate) fn tokenizer_folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bytes: serde_json::Map<String, Value> =
        (0..256_u32).map(|byte| (format!("<0x{byte:02X}>"), byte.into())).collect();
    let tokenizer = json!({
        "version": "1.0", "added_tokens": [], "normalizer": null, "pre_tokenizer": null, "post_processor": null,
        "decoder": { "type": "Sequence", "decoders": [{ "type": "ByteFallback" }, { "type": "Fuse" }] },
        "model": { "type": "BPE", "vocab": bytes, "merges": [], "byte_fallback": true, "unk_token": "<0x00>" },
    });
    std::fs::write(folder.path().join("tokenizer.json"), tokenizer.to_string()).unwrap();
    let config = json!({ "chat_template": "{% for m in messages %}{{ m.content }}{% endfor %}" });
    std::fs::write(folder.path().join("tokenizer_config.json"), config.to_string()).unwrap();
    folder
}

#[tokio::test]
async fn a_local_tokenizer_is_used_if_it_agrees_with_the_server() {
    let folder = tokenizer_folder();
    for (tokenize, used, source) in [
        (Script::json(404, &json!({})), 3, "local"),
        (Script::json(200, &json!({ "count": 3, "tokens": [1, 2, 3] })), 0, "estimate"),
    ] {
        let server = server([]).await;
        server.set_page("/tokenize", tokenize);
        let gateway = Gateway::with(Config {
            upstreams: vec![Upstream::new(server.uri())],
            tokenizers: [("org/m".to_owned(), folder.path().to_owned())].into(),
            ..Config::with_cache(Path::new("/nonexistent"))
        });
        let gateway = gateway.await;
        assert_eq!(gateway.metric("blockyard_frontend_local_tokenizer_used"), used);
        let text = "sixteen bytes!! ".repeat(4);
        assert_eq!(gateway.post("/v1/chat/completions", &chat(&text, true)).await.status(), 200);
        let counted = format!("blockyard_frontend_relayed_prompts_total{{model=\"org/m\",tokens=\"{source}\"}} 1");
        let metrics = gateway.http.get(format!("{}/metrics", gateway.url)).send().await.unwrap().text().await.unwrap();
        assert!(metrics.lines().any(|line| line == counted), "{counted}");
        let asked = server.requests().into_iter().filter(|request| request.uri.path() == "/tokenize").count();
        assert_eq!(asked, if used == 0 { 8 } else { 1 }, "only when it is registered");
    }
}

#[tokio::test]
async fn each_model_of_an_alias_has_its_own_tokenizer() {
    let folder = tokenizer_folder();
    let (one, other) = (server([]).await, server([]).await);
    other.set_page("/v1/models", lists("org/n"));
    for server in [&one, &other] {
        server.set_page("/tokenize", Script::json(404, &json!({})));
    }
    let deployment = |model: &str| Deployment { model: model.to_owned(), weight: 1 };
    let gateway = Gateway::with(Config {
        upstreams: [&one, &other].map(|server| Upstream::new(server.uri())).into(),
        aliases: [("chat".to_owned(), Alias { deployments: vec![deployment("org/m"), deployment("org/n")] })].into(),
        tokenizers: [("org/n".to_owned(), folder.path().to_owned())].into(),
        ..Config::with_cache(Path::new("/nonexistent"))
    })
    .await;
    for number in 0..20 {
        let body = json!({ "model": "chat", "prompt": format!("conversation {number}") }).to_string();
        assert_eq!(gateway.post("/v1/completions", &body).await.status(), 200);
    }
    let sent = |server| completions(server).iter().filter(|request| request.uri.path() == "/v1/completions").count();
    let metrics = gateway.http.get(format!("{}/metrics", gateway.url)).send().await.unwrap().text().await.unwrap();
    for (source, count) in [("local", sent(&other)), ("estimate", sent(&one))] {
        let counted = format!("blockyard_frontend_relayed_prompts_total{{model=\"chat\",tokens=\"{source}\"}} {count}");
        assert!(count > 0 && metrics.lines().any(|line| line == counted), "{counted}");
    }
}

#[tokio::test]
async fn a_folder_without_a_tokenizer_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let mut config = Config::with_cache(Path::new("/nonexistent"));
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    config.upstreams = vec![Upstream::new("http://127.0.0.1:9".parse().unwrap())];
    config.tokenizers.insert("org/m".to_owned(), folder.path().to_owned());
    let Err(error) = Node::start(&config).await else { panic!("it started") };
    let error = format!("{error:#}");
    assert!(error.contains("tokenizers.\"org/m\"") && error.contains("tokenizer.json is missing"), "{error}");
}
