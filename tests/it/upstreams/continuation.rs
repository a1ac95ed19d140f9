//! A stream of a server that fails is continued on another one, if `continue_streams` is set and its text is the same.

use super::{Gateway, completions, server};
use blockyard::config::{CacheSalt, Upstream};
use serde_json::{Value, json};
use upstream::relay::fake::{FakeEngine, Greedy, Recorded};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";

/// "Hello, é dear you!": of a character the first half comes without a text.
fn model(name: &'static str) -> Greedy {
    let output = vec![(10, "Hel"), (11, "lo,"), (12, ""), (13, " é"), (14, " dear"), (15, " you"), (16, "!")];
    Greedy { name, prompt: vec![1, 2, 3], output, tokens_per_chunk: 1 }
}

/// Whether a request is for the rest of a stream.
fn is_rest(request: &Recorded) -> bool {
    sent(request)["prompt"].is_array()
}

/// The body of a request.
fn sent(request: &Recorded) -> Value {
    serde_json::from_slice(&request.body).unwrap()
}

/// Two servers. Each breaks its streams off after this many tokens, but not those that it continues.
async fn servers(tokens: usize) -> [FakeEngine; 2] {
    let servers = [server([]).await, server([]).await];
    for (server, name) in servers.iter().zip(["one", "another"]) {
        for path in [CHAT, COMPLETIONS] {
            server.set_answers(path, move |request| {
                let answer = model(name).answer(request);
                let parts = tokens + usize::from(path == CHAT);
                if is_rest(request) { answer } else { answer.broken_after(parts) }
            });
        }
    }
    servers
}

fn continuing(server: &FakeEngine) -> Upstream {
    Upstream { continue_streams: true, ..Upstream::new(server.uri()) }
}

async fn gateway_of(servers: &[FakeEngine; 2]) -> Gateway {
    Gateway::of(servers.each_ref().map(continuing).to_vec()).await
}

/// The requests for the rest of streams.
fn rests(servers: &[FakeEngine; 2]) -> Vec<Value> {
    let requests = servers.iter().flat_map(completions);
    requests.filter(is_rest).map(|request| sent(&request)).collect()
}

/// The body of a greedy request for a stream, with further fields.
fn body(path: &str, fields: &Value) -> Value {
    let mut body = json!({ "model": "org/m", "temperature": 0, "stream": true });
    if path == CHAT {
        body["messages"] = json!([{ "role": "user", "content": "hello" }]);
    } else {
        body["prompt"] = json!("hello");
    }
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    body
}

async fn answer(gateway: &Gateway, path: &str, body: &Value) -> String {
    gateway.post(path, &body.to_string()).await.text().await.unwrap()
}

#[tokio::test]
async fn a_stream_of_a_server_that_fails_is_continued_on_another() {
    for path in [CHAT, COMPLETIONS] {
        for tokens in [1, 3, 5] {
            let servers = servers(tokens).await;
            let gateway = gateway_of(&servers).await;
            for fields in [
                json!({ "max_tokens": 6 }),
                json!({ "stream_options": { "include_usage": true } }),
                json!({ "return_token_ids": true, "max_tokens": 7 }),
            ] {
                let asked = body(path, &fields);
                let answer = answer(&gateway, path, &asked).await;
                let first = if answer.contains("-one\"") { "one" } else { "another" };
                let undisturbed = model(first).stream(path, &asked).body();
                assert_eq!(answer, String::from_utf8(undisturbed.to_vec()).unwrap(), "{path} {tokens} {fields}");
            }
            assert_eq!(gateway.metric("blockyard_router_stream_moves_total"), 3);
            // The first half of a character was held back.
            let generated = [10, 11, 12, 13, 14].into_iter().take(if tokens == 3 { 2 } else { tokens });
            let prompt: Vec<u32> = [1, 2, 3].into_iter().chain(generated).collect();
            let rests = rests(&servers);
            assert!(rests.len() == 3 && rests.iter().all(|rest| rest["prompt"] == json!(prompt)), "{rests:?}");
        }
    }
}

#[tokio::test]
async fn a_stream_whose_text_could_differ_ends_with_an_error() {
    let servers = servers(2).await;
    let gateway = gateway_of(&servers).await;
    for fields in [json!({ "temperature": 0.7, "seed": 5 }), json!({ "stop": ["ab"] }), json!({ "min_tokens": 2 })] {
        let answer = answer(&gateway, COMPLETIONS, &body(COMPLETIONS, &fields)).await;
        assert!(answer.contains("lo,") && !answer.contains("[DONE]"), "{answer}");
        assert!(answer.contains(r#"data: {"error":"#), "{answer}");
    }
    let asked_for_ids = |request: Recorded| sent(&request)["return_token_ids"] == true;
    assert!(!servers.iter().flat_map(completions).any(asked_for_ids), "it is not followed");
    assert_eq!(gateway.metric("blockyard_router_stream_moves_total"), 0);
}

#[tokio::test]
async fn streams_are_continued_only_where_both_servers_are_set_to_it() {
    for continued in [[false, true], [true, false], [false, false]] {
        let servers = servers(2).await;
        let upstreams = [0, 1].map(|at| Upstream { continue_streams: continued[at], ..continuing(&servers[at]) });
        let gateway = Gateway::of(upstreams.to_vec()).await;
        for _ in 0..4 {
            let answer = answer(&gateway, CHAT, &body(CHAT, &json!({}))).await;
            assert!(answer.contains(r#"data: {"error":"#) && !answer.contains("token_ids\":["), "{answer}");
        }
        assert!(rests(&servers).is_empty(), "{continued:?}");
    }
}

#[tokio::test]
async fn the_rest_of_a_stream_has_its_salt() {
    let servers = servers(2).await;
    let salted = servers.each_ref().map(|server| Upstream { cache_salt: CacheSalt::On, ..continuing(server) });
    let gateway = Gateway::of(salted.to_vec()).await;
    let asked = body(COMPLETIONS, &json!({ "cache_salt": "mine" }));
    let answer = answer(&gateway, COMPLETIONS, &asked).await;
    assert!(answer.ends_with("data: [DONE]\n\n"), "{answer}");
    let salts: Vec<Value> =
        servers.iter().flat_map(completions).map(|request| sent(&request)["cache_salt"].clone()).collect();
    assert!(salts.len() == 2 && salts[0] == salts[1] && salts[0].is_string() && salts[0] != "mine", "{salts:?}");
}
