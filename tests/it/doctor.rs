//! `blockyard doctor` in front of scripted servers: one that is sound, and those that lack one thing each.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

mod native;

use super::process::doctor;
use super::upstreams::{MESSAGES, publish, sglang, sglang_payload, tokenizer_folder};
use blockyard::commands::doctor::{Check, Probing, Status, examine};
use blockyard::config::{Alias, Config, Deployment, HttpVersion, KvEvents, KvSockets, Listen, Upstream};
use http::Uri;
use http::header::DATE;
use serde_json::{Value, json};
use std::net::TcpListener;
use std::num::NonZero;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use tokio::io::AsyncWriteExt;
use upstream::kv_events::fake::FakePublisher;
use upstream::relay::fake::{FakeEngine, Recorded, Script};

/// A server that answers as vLLM 0.32 does, and its publisher, which has announced three blocks of 32 tokens.
struct Vllm {
    server: FakeEngine,
    publisher: FakePublisher,
}

impl Vllm {
    async fn start() -> Self {
        let (server, publisher) = (FakeEngine::start([]).await.unwrap(), FakePublisher::start().await.unwrap());
        let models = json!({ "object": "list", "data": [{ "id": "m", "owned_by": "vllm", "max_model_len": 4096 }] });
        server.set_page("/v1/models", Script::json(200, &models));
        server.set_page("/version", Script::json(200, &json!({ "version": "0.32.0" })));
        server.set_page("/metrics", Script::events(["vllm:cache_config_info{block_size=\"32\"} 1.0\n"]));
        server.set_page(
            "/tokenize",
            Script::json(200, &json!({ "count": 100, "tokens": (100..200).collect::<Vec<u32>>() })),
        );
        let vllm = Self { server, publisher };
        vllm.set_endpoint(vllm.publisher.port());
        vllm.set_usage(&json!({ "prompt_tokens": 100, "prompt_tokens_details": { "cached_tokens": 96 } }));
        publish(&vllm.publisher, MESSAGES.lines().next().unwrap());
        vllm
    }

    fn set_endpoint(&self, port: u16) {
        let source = json!({ "enable_kv_cache_events": true, "endpoint": format!("tcp://*:{port}"), "topic": "kv" });
        self.server.set_page("/kv_event_sources", Script::json(200, &json!({ "0": source })));
    }

    fn set_usage(&self, usage: &Value) {
        self.server.set_page("/v1/completions", Script::json(200, &json!({ "choices": [], "usage": usage })));
    }

    fn upstream(&self) -> Upstream {
        Upstream::new(self.server.uri())
    }
}

fn config(upstream: Upstream) -> Config {
    let mut config = Config::with_cache(Path::new("/nonexistent"));
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    config.upstreams = vec![upstream];
    config
}

async fn checks(upstream: Upstream) -> Vec<Check> {
    examine(&config(upstream), Probing::Send).await
}

/// Expects this check to fail with this status, and with these words in what to change.
#[track_caller]
fn expect(checks: &[Check], name: &str, status: Status, fix: &str) {
    let found = checks.iter().find(|check| check.check == name && check.status == status);
    let found = found.unwrap_or_else(|| panic!("{name} is not {status:?}: {checks:#?}"));
    assert!(found.fix.as_ref().is_some_and(|text| text.contains(fix)), "{fix} is not in {found:?}");
}

/// A port that nothing listens on.
fn closed_port() -> u16 {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port()
}

fn uri(text: &str) -> Uri {
    text.parse().unwrap()
}

#[tokio::test]
async fn a_date_that_was_stale_once_is_no_wrong_clock() {
    let vllm = Vllm::start().await;
    let stale_until = |last: usize| {
        let asked = Arc::new(AtomicUsize::new(0));
        move |_: &Recorded| {
            let answer = Script::json(200, &json!({ "version": "0.32.0" }));
            let is_stale = asked.fetch_add(1, Ordering::SeqCst) <= last;
            if is_stale { answer.header(DATE, "Sat, 01 Jan 2000 00:00:00 GMT") } else { answer }
        }
    };
    vllm.server.set_answers("/version", stale_until(1));
    let found = checks(vllm.upstream()).await;
    assert!(found.iter().any(|check| check.check == "clock" && check.status == Status::Ok), "{found:#?}");
    vllm.server.set_answers("/version", stale_until(usize::MAX));
    expect(&checks(vllm.upstream()).await, "clock", Status::Warning, "NTP");
}

#[tokio::test]
async fn a_sound_server_has_no_problem() {
    let vllm = Vllm::start().await;
    let checks = checks(vllm.upstream()).await;
    let (sound, rest): (Vec<_>, Vec<_>) = checks.iter().partition(|check| check.status == Status::Ok);
    // The limit of open files is a property of the machine. The fake publisher has no replay socket.
    let rest: Vec<_> = rest.into_iter().filter(|check| check.check != "open_files").collect();
    assert_eq!(rest.iter().map(|check| check.check).collect::<Vec<_>>(), ["kv_replay"], "{checks:#?}");
    let detail = |name| &sound.iter().find(|check| check.check == name).unwrap().detail;
    assert_eq!(detail("server"), "vLLM 0.32.0");
    assert_eq!(detail("models"), "m (4096 tokens)");
    assert_eq!(detail("kv_tokens"), "events have the tokens of /tokenize: 3 of 3 blocks");
    assert_eq!(detail("cached_tokens"), "96 of 100 tokens of a repeated prompt, as predicted");
    let sent = vllm.server.requests().into_iter().filter(|request| request.uri.path() == "/v1/completions");
    let prompts: Vec<Value> = sent.map(|request| serde_json::from_slice(&request.body).unwrap()).collect();
    assert_eq!((prompts.len(), &prompts[0]), (2, &prompts[1]), "the same prompt twice");
}

#[tokio::test]
async fn a_sound_sglang_has_no_problem() {
    let publisher = FakePublisher::start().await.unwrap();
    let server = sglang(publisher.port(), 1).await;
    let tokens = json!({ "count": 150, "max_model_len": 4096, "tokens": (1..=150).collect::<Vec<u32>>() });
    server.set_page("/tokenize", Script::json(200, &tokens));
    let usage = json!({ "prompt_tokens": 150, "prompt_tokens_details": { "cached_tokens": 128 } });
    server.set_page("/v1/completions", Script::json(200, &json!({ "choices": [], "usage": usage })));
    publisher.publish([&[], &0_u64.to_be_bytes(), &sglang_payload()]);
    let found = checks(Upstream::new(server.uri())).await;
    let faulty: Vec<_> = found.iter().filter(|check| check.status != Status::Ok).map(|check| check.check).collect();
    assert!(faulty.iter().all(|check| ["kv_replay", "open_files"].contains(check)), "{found:#?}");
    let detail = |name| found.iter().find(|check| check.check == name).unwrap().detail.as_str();
    assert_eq!(detail("server"), "SGLang 0.5.23");
    assert_eq!(detail("kv_events"), format!("the server names tcp://127.0.0.1:{}", publisher.port()));
    assert_eq!(detail("block_size"), "64 tokens in the server's /server_info");
    assert_eq!(detail("cached_tokens"), "128 of 150 tokens of a repeated prompt, as predicted");
    server.set_page("/server_info", Script::json(200, &json!({ "version": "0.5.23", "page_size": 64 })));
    let silent = examine(&config(Upstream::new(server.uri())), Probing::Skip).await;
    expect(&silent, "kv_events", Status::Problem, "start SGLang with");
}

#[tokio::test]
async fn completions_are_for_one_rank() {
    let (vllm, other) = (Vllm::start().await, FakePublisher::start().await.unwrap());
    let source = |port: u16| json!({ "endpoint": format!("tcp://*:{port}"), "topic": "kv" });
    let sources = json!({ "0": source(vllm.publisher.port()), "1": source(other.port()) });
    vllm.server.set_page("/kv_event_sources", Script::json(200, &sources));
    let checks = checks(vllm.upstream()).await;
    let cached = checks.iter().find(|check| check.check == "cached_tokens").unwrap();
    assert_eq!(cached.detail, "96 of 100 tokens of a repeated prompt, as predicted");
    let sent = vllm.server.requests().into_iter().filter(|request| request.uri.path() == "/v1/completions");
    assert!(sent.map(|request| request.headers["x-data-parallel-rank"].clone()).all(|rank| rank == "0"));
    let live = format!("tcp://127.0.0.1:{}", vllm.publisher.port()).parse().unwrap();
    let kv_events = KvEvents::At(vec![KvSockets { live, replay: None }]);
    let one = examine(&config(Upstream { kv_events, ..vllm.upstream() }), Probing::Skip).await;
    expect(&one, "kv_events", Status::Warning, "list the publishers of all ranks in upstreams.0.kv_events");
}

/// Answers as llama.cpp and Ollama give them: other fields of `/v1/models`, a `/tokenize` of another form or none.
#[tokio::test]
async fn other_programs_are_named_with_their_versions() {
    let server = FakeEngine::start([]).await.unwrap();
    let model = json!({ "id": "m.gguf", "owned_by": "llamacpp", "meta": { "n_ctx": 2048, "n_ctx_train": 4096 } });
    server.set_page("/v1/models", Script::json(200, &json!({ "object": "list", "data": [model] })));
    server.set_page("/props", Script::json(200, &json!({ "build_info": "b6900-abcdef0" })));
    server.set_page("/tokenize", Script::json(200, &json!({ "tokens": [] })));
    let usage = json!({ "prompt_tokens": 70, "prompt_tokens_details": { "cached_tokens": 69 } });
    server.set_page("/v1/completions", Script::json(200, &json!({ "choices": [], "usage": usage })));
    let found = checks(Upstream::new(server.uri())).await;
    let detail = |found: &[Check], name| found.iter().find(|check| check.check == name).unwrap().detail.clone();
    assert_eq!(detail(&found, "server"), "llama.cpp b6900-abcdef0");
    assert_eq!(detail(&found, "models"), "m.gguf (2048 tokens)");
    assert_eq!(
        detail(&found, "tokenize"),
        "/tokenize answers no `tokens`; not needed, because no KV events are followed"
    );
    assert!(found.iter().all(|check| check.status != Status::Problem), "{found:#?}");
    let server = FakeEngine::start([]).await.unwrap();
    let models = json!({ "object": "list", "data": [{ "id": "qwen3:8b", "owned_by": "library", "created": 1 }] });
    server.set_page("/v1/models", Script::json(200, &models));
    server.set_page("/api/version", Script::json(200, &json!({ "version": "0.30.1" })));
    let found = checks(Upstream::new(server.uri())).await;
    assert_eq!(detail(&found, "server"), "Ollama 0.30.1");
    assert_eq!(detail(&found, "models"), "qwen3:8b (context unknown)");
}

#[tokio::test]
async fn without_probe_no_completion_is_sent() {
    let vllm = Vllm::start().await;
    let checks = examine(&config(vllm.upstream()), Probing::Skip).await;
    assert!(checks.iter().all(|check| check.status != Status::Problem), "{checks:#?}");
    assert!(vllm.server.requests().iter().all(|request| request.method == "GET"));
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_named() {
    let down = checks(Upstream::new(uri(&format!("http://127.0.0.1:{}", closed_port())))).await;
    expect(&down, "tcp", Status::Problem, "start the server");
    let unknown = checks(Upstream::new(uri("http://no-such-host.invalid:8000"))).await;
    expect(&unknown, "dns", Status::Problem, "getent hosts no-such-host.invalid");
    assert!(unknown.iter().all(|check| check.check != "tcp"), "nothing that needs the address is checked");
    let plain = Vllm::start().await;
    let tls = checks(Upstream::new(uri(&plain.server.uri().to_string().replace("http:", "https:")))).await;
    expect(&tls, "tls", Status::Problem, "write http://");
    let old = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let old_uri = uri(&format!("http://{}", old.local_addr().unwrap()));
    // The answer of a server of HTTP/1.1 to the preface of HTTP/2.
    let answers = tokio::spawn(async move {
        while let Ok((mut connection, _)) = old.accept().await {
            let _ = connection.write_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n").await;
        }
    });
    let h2c = checks(Upstream { http: HttpVersion::H2c, ..Upstream::new(old_uri) }).await;
    answers.abort();
    expect(&h2c, "http", Status::Problem, "remove upstreams.0.http");
    let https = uri(&plain.server.uri().to_string().replace("http:", "https:"));
    let unreadable = checks(Upstream { ca_file: Some("/no/such/ca".into()), ..Upstream::new(https) }).await;
    expect(&unreadable, "ca_file", Status::Problem, "upstreams.0.ca_file");
}

#[tokio::test]
async fn an_api_that_other_machines_use_without_a_key_is_a_warning() {
    let vllm = Vllm::start().await;
    let mut config = config(vllm.upstream());
    for (host, is_open) in [("0.0.0.0", true), ("::", true), ("127.0.0.1", false), ("::1", false), ("localhost", false)]
    {
        config.listen.host = host.into();
        let checks = examine(&config, Probing::Skip).await;
        assert_eq!(checks.iter().any(|check| check.check == "api_keys"), is_open, "{host}");
        if is_open {
            expect(&checks, "api_keys", Status::Warning, "blockyard key add");
        }
    }
}

#[tokio::test]
async fn a_wrong_key_and_a_missing_one_are_told_apart() {
    let vllm = Vllm::start().await;
    vllm.server.set_page("/v1/models", Script::json(401, &json!({ "error": "Unauthorized" })));
    expect(&checks(vllm.upstream()).await, "api_key", Status::Problem, "set upstreams.0.api_key_file");
    let file = tempfile::NamedTempFile::new().unwrap();
    std::fs::write(file.path(), "wrong\n").unwrap();
    let with_key = Upstream { api_key_file: Some(file.path().into()), ..vllm.upstream() };
    expect(&checks(with_key.clone()).await, "api_key", Status::Problem, file.path().to_str().unwrap());
    assert_eq!(vllm.server.requests().last().unwrap().headers["authorization"], "Bearer wrong");
    vllm.server.set_page("/v1/models", Script::json(403, &json!({})));
    expect(&checks(with_key).await, "api_key", Status::Problem, "proxy");
    let missing = Upstream { api_key_file: Some("/no/such/key".into()), ..vllm.upstream() };
    expect(&checks(missing).await, "api_key_file", Status::Problem, "upstreams.0.api_key_file");
}

#[tokio::test]
async fn a_server_that_is_none_of_openai_is_named() {
    let vllm = Vllm::start().await;
    vllm.server.set_page("/v1/models", Script::events(["<html>It works</html>"]));
    expect(&checks(vllm.upstream()).await, "models", Status::Problem, "without /v1");
    vllm.server.set_page("/v1/models", Script::json(503, &json!({})));
    expect(&checks(vllm.upstream()).await, "http", Status::Problem, "loaded its model");
}

#[tokio::test]
async fn one_server_under_two_names_is_a_warning() {
    let (vllm, other) = (Vllm::start().await, Vllm::start().await);
    let by_name = format!("http://localhost:{}", vllm.server.uri().port_u16().unwrap());
    let mut config = config(Upstream::new(uri(&by_name)));
    config.upstreams.extend([other.upstream(), vllm.upstream()]);
    let found = examine(&config, Probing::Skip).await;
    let same: Vec<_> = found.iter().filter(|check| check.check == "same_server").collect();
    assert_eq!((same.len(), same[0].target.as_str()), (1, vllm.upstream().shown_url().as_str()), "{found:#?}");
    assert!(same[0].detail.starts_with(&format!("the same server as {by_name}/ (upstreams.0)")), "{:?}", same[0]);
    expect(&found, "same_server", Status::Warning, "remove upstreams.2");
}

#[tokio::test]
async fn a_vllm_without_kv_events_gets_its_flag() {
    let vllm = Vllm::start().await;
    vllm.server.set_page("/kv_event_sources", Script::json(404, &json!({})));
    expect(&checks(vllm.upstream()).await, "kv_events", Status::Problem, "--kv-events-config");
}

#[tokio::test]
async fn a_socket_that_does_not_answer_is_named() {
    let vllm = Vllm::start().await;
    vllm.set_endpoint(closed_port());
    expect(&checks(vllm.upstream()).await, "kv_socket", Status::Problem, "upstreams.0.kv_events");
    vllm.set_endpoint(vllm.server.uri().port_u16().unwrap());
    let not_zmq = checks(vllm.upstream()).await;
    expect(&not_zmq, "kv_socket", Status::Problem, "the port of endpoint");
    assert!(not_zmq.iter().any(|check| check.check == "cached_tokens"), "the server is checked all the same");
}

#[tokio::test]
async fn a_replay_socket_of_another_server_is_a_warning() {
    let start = async || FakePublisher::start_at(0, Some(0)).await.unwrap();
    let (vllm, publisher, other, idle) = (Vllm::start().await, start().await, start().await, start().await);
    let (live, own) = (publisher.port(), publisher.replay_port());
    vllm.server.set_answers("/v1/completions", move |_| {
        publish(&publisher, MESSAGES.lines().next().unwrap());
        Script::json(200, &json!({ "choices": [], "usage": { "prompt_tokens": 100 } }))
    });
    other.publish([b"kv", &0_u64.to_be_bytes(), &sglang_payload()]);
    let at = |port: u16| format!("tcp://127.0.0.1:{port}").parse().unwrap();
    for (replay, expected) in
        [(own, Status::Ok), (other.replay_port(), Status::Warning), (idle.replay_port(), Status::Warning)]
    {
        let sockets = KvSockets { live: at(live), replay: replay.map(at) };
        let found = checks(Upstream { kv_events: KvEvents::At(vec![sockets]), ..vllm.upstream() }).await;
        let of_replay = found.iter().filter(|check| check.check == "kv_replay");
        assert_eq!(
            of_replay.map(|check| check.status).max_by_key(|status| *status as u8),
            Some(expected),
            "{found:#?}"
        );
        if expected == Status::Warning {
            expect(&found, "kv_replay", expected, "set upstreams.0.kv_events_replay to the address of replay_endpoint");
        }
    }
}

#[tokio::test]
async fn another_block_size_is_a_problem() {
    let vllm = Vllm::start().await;
    let upstream = Upstream { block_size: NonZero::new(16), ..vllm.upstream() };
    let checks = checks(upstream).await;
    expect(&checks, "block_size", Status::Problem, "or set it to 32");
    expect(&checks, "kv_block_size", Status::Problem, "upstreams.0.block_size = 32");
    // A prompt that is shorter than a block of the server would look like a server without KV events.
    let sent = vllm.server.requests().into_iter().find(|request| request.uri.path() == "/v1/completions").unwrap();
    let body: Value = serde_json::from_slice(&sent.body).unwrap();
    assert!(body["prompt"].as_str().unwrap().split(' ').count() > 3 * 32, "{body}");
}

#[tokio::test]
async fn missing_token_details_are_a_warning() {
    let vllm = Vllm::start().await;
    vllm.set_usage(&json!({ "prompt_tokens": 100 }));
    let checks = checks(vllm.upstream()).await;
    expect(&checks, "cached_tokens", Status::Warning, "--enable-prompt-tokens-details");
}

/// The tokens of a server with the model of [`tokenizer_folder`]: bytes. `for_tools`: one more in prompts with tools.
fn byte_tokens(request: &Recorded, for_tools: Option<u32>) -> Script {
    let body: Value = serde_json::from_slice(&request.body).unwrap();
    let parts = |content: &Value| {
        let texts = content.as_array().into_iter().flatten().map(|part| part["text"].as_str().unwrap());
        texts.collect::<Vec<_>>().join("\n")
    };
    let text = |message: &Value| message["content"].as_str().map_or_else(|| parts(&message["content"]), str::to_owned);
    let prompt: String = match body["prompt"].as_str() {
        Some(prompt) => prompt.to_owned(),
        None => body["messages"].as_array().unwrap().iter().map(text).collect(),
    };
    let more = for_tools.filter(|_| body["tools"].is_array());
    let tokens: Vec<u32> = prompt.bytes().map(u32::from).chain(more).collect();
    Script::json(200, &json!({ "count": tokens.len(), "tokens": tokens }))
}

#[tokio::test]
async fn a_local_tokenizer_with_other_tokens_is_a_problem() {
    let (vllm, folder) = (Vllm::start().await, tokenizer_folder());
    let mut config = config(vllm.upstream());
    config.tokenizers.insert("m".to_owned(), folder.path().to_owned());
    let found = async |config: &Config| {
        let checks = examine(config, Probing::Skip).await.into_iter();
        checks.filter(|check| check.check == "local_tokenizer").collect::<Vec<_>>()
    };
    let all_different = found(&config).await;
    assert_eq!(all_different.len(), 3, "{all_different:#?}");
    for kind in ["completion", "chat", "tools"] {
        let of_kind = all_different.iter().find(|check| check.detail.starts_with(&format!("m, prompts of {kind}: ")));
        let check = of_kind.unwrap_or_else(|| panic!("{kind}: {all_different:#?}"));
        assert_eq!(check.status, Status::Problem);
        assert!(check.fix.as_ref().is_some_and(|fix| fix.contains("set tokenizers.\"m\" to the folder")), "{check:?}");
    }

    vllm.server.set_answers("/tokenize", |request| byte_tokens(request, Some(1)));
    let other_tools = found(&config).await;
    assert_eq!(other_tools.iter().map(|check| check.status).collect::<Vec<_>>(), [Status::Ok, Status::Problem]);
    assert_eq!(other_tools[0].detail, "m: the tokens of the server in prompts of completion, chat");
    assert!(other_tools[1].detail.starts_with("m, prompts of tools: token "), "{other_tools:#?}");

    vllm.server.set_answers("/tokenize", |request| byte_tokens(request, None));
    let [same] = &found(&config).await[..] else { panic!("one check") };
    assert_eq!(
        (same.status, &*same.detail),
        (Status::Ok, "m: the tokens of the server in prompts of completion, chat, tools")
    );

    config.tokenizers.insert("n".to_owned(), folder.path().to_owned());
    expect(&examine(&config, Probing::Skip).await, "local_tokenizer", Status::Warning, "/v1/models");
    config.tokenizers.remove("n");

    vllm.server.set_page("/tokenize", Script::json(503, &json!({})));
    let [failed] = &found(&config).await[..] else { panic!("one check") };
    assert!(failed.status == Status::Problem && failed.detail.contains("/tokenize: 503"), "{failed:?}");
}

#[tokio::test]
async fn an_alias_for_a_model_without_a_server_is_named() {
    let vllm = Vllm::start().await;
    let mut config = config(vllm.upstream());
    let alias = |models: &[&str]| Alias {
        deployments: models.iter().map(|model| Deployment { model: (*model).to_owned(), weight: 1 }).collect(),
    };
    config.aliases = [("wrong", alias(&["n"])), ("split", alias(&["m", "n"])), ("right", alias(&["m"]))]
        .map(|(name, alias)| (name.to_owned(), alias))
        .into();
    let checks = examine(&config, Probing::Skip).await;
    expect(&checks, "alias", Status::Problem, "let aliases.\"wrong\" name models as /v1/models of the servers lists");
    expect(&checks, "alias", Status::Warning, "them (m), or start a server with n");
    assert!(checks.iter().any(|check| check.check == "alias" && check.status == Status::Ok), "{checks:#?}");
    config.upstreams.push(Upstream::new(uri(&format!("http://127.0.0.1:{}", closed_port()))));
    let checks = examine(&config, Probing::Skip).await;
    assert!(checks.iter().all(|check| check.check != "alias"), "the other server may have the model: {checks:#?}");
}

#[tokio::test]
async fn a_server_that_ignores_salts_is_a_problem_of_tenants() {
    let vllm = Vllm::start().await;
    let mut config = config(vllm.upstream());
    config.frontend.tenant_header = Some("x-tenant".to_owned().try_into().unwrap());
    let no_field = examine(&config, Probing::Send).await;
    expect(&no_field, "cache_salt", Status::Problem, "upstreams.0.cache_salt");
    vllm.server.set_page("/openapi.json", Script::json(200, &json!({ "properties": { "cache_salt": {} } })));
    let checks = examine(&config, Probing::Send).await;
    expect(&checks, "cache_salt", Status::Problem, "update the server");
}

#[tokio::test]
async fn json_is_an_array_of_checks_and_the_status_is_1() {
    let vllm = Vllm::start().await;
    let run = async |more: &[&str]| {
        let url = vllm.server.uri().to_string();
        let mut command = doctor(&["--listen", "127.0.0.1:0", "--upstream", &url, "--json"]);
        command.args(more);
        let output = tokio::task::spawn_blocking(move || command.output().unwrap()).await.unwrap();
        let checks: Vec<Value> = serde_json::from_slice(&output.stdout).unwrap();
        (output.status.code(), checks)
    };
    let (status, checks) = run(&[]).await;
    assert_eq!(status, Some(0), "{checks:#?}");
    let keys: Vec<&String> = checks[0].as_object().unwrap().keys().collect();
    assert_eq!(keys, ["check", "target", "status", "detail", "fix"]);
    let (status, checks) = run(&["--set", "no.such=1"]).await;
    assert_eq!((status, &checks[0]["status"]), (Some(1), &json!("problem")));
    assert!(checks[0]["detail"].as_str().unwrap().contains("no.such"), "{checks:#?}");
}
