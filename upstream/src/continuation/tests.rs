use super::*;
use crate::relay::fake::Greedy;
use crate::relay::stream::{Item, Relay, UsageInStream};
use bytes::Bytes;
use futures::{FutureExt, StreamExt, stream};
use http::{Response, header};
use http_body_util::StreamBody;
use serde_json::{Value, json};
use worker::engine::{RequestGroup, Work};

fn http(path: &'static str, body: &Value) -> HttpRequest {
    HttpRequest {
        body: body.to_string().into(),
        is_stream: true,
        private_fields: &["cache"],
        ..HttpRequest::post(path)
    }
}

fn request(http: &HttpRequest) -> Request {
    Request { work: Work::Relay(http.clone().into()), ..Request::greedy("r", "org/m", &[1], 4) }
}

/// A greedy request with further fields. Null removes one.
fn greedy(path: &'static str, fields: &Value) -> HttpRequest {
    let mut body = json!({ "model": "org/m", "temperature": 0, "stream": true });
    body[if path == CHAT { "messages" } else { "prompt" }] = if path == CHAT { json!([]) } else { json!("a") };
    for (name, value) in fields.as_object().unwrap() {
        body[name] = value.clone();
    }
    http(path, &body)
}

fn is_followed(path: &'static str, fields: &Value) -> bool {
    let http = greedy(path, fields);
    followed(&http, &request(&http)).is_some()
}

#[test]
fn only_greedy_streams_of_known_fields_are_followed() {
    for fields in [
        json!({}),
        json!({ "temperature": 0.0, "seed": 3, "top_p": 0.5, "n": 1, "logprobs": null, "stop": null }),
        json!({ "max_tokens": 5, "cache_salt": "s", "cache": { "ttl": "1h" }, "unknown": null }),
        json!({ "stop": "\n" }),
        json!({ "stop": ["\n", "é"], "stop_token_ids": [7], "ignore_eos": true, "tools": [], "min_tokens": 0 }),
        json!({ "repetition_penalty": 1.1, "presence_penalty": 0, "frequency_penalty": 0.0 }),
    ] {
        assert!(is_followed(CHAT, &fields) && is_followed(COMPLETIONS, &fields), "{fields}");
    }
    for fields in [
        json!({ "temperature": 0.7 }),
        json!({ "temperature": null }),
        json!({ "n": 2 }),
        json!({ "stop": "\n\n" }),
        json!({ "stop": ["a", "bc"] }),
        json!({ "stop": 3 }),
        json!({ "presence_penalty": 0.1 }),
        json!({ "frequency_penalty": -1 }),
        json!({ "min_tokens": 4 }),
        json!({ "logprobs": 0 }),
        json!({ "logprobs": true }),
        json!({ "tools": [{}] }),
        json!({ "tool_choice": "auto" }),
        json!({ "response_format": { "type": "json_object" } }),
        json!({ "structured_outputs": { "regex": "a" } }),
        json!({ "echo": true }),
        json!({ "bad_words": ["a"] }),
        json!({ "use_beam_search": true }),
        json!({ "vllm_xargs": {} }),
        json!({ "unknown": 1 }),
    ] {
        assert!(!is_followed(CHAT, &fields) && !is_followed(COMPLETIONS, &fields), "{fields}");
    }
    let known = greedy(CHAT, &json!({}));
    let is_followed = |http: &HttpRequest, request: &Request| followed(http, request).is_some();
    assert!(!is_followed(&HttpRequest { is_stream: false, ..known.clone() }, &request(&known)));
    let target = PathAndQuery::from_static("/v1/responses");
    assert!(!is_followed(&HttpRequest { target, ..known.clone() }, &request(&known)));
    let group = Some(RequestGroup::new(2));
    assert!(!is_followed(&known, &Request { group, ..request(&known) }), "two prompts");
    assert!(!is_followed(&HttpRequest { body: "[]".into(), ..known.clone() }, &request(&known)));
}

/// The stream of a request that breaks off after this many chunks.
fn broken(path: &'static str, http: &HttpRequest, chunks: usize) -> Broken {
    let output = vec![(10, "Hel"), (11, "lo"), (12, " you")];
    let model = Greedy { name: "one", prompt: vec![1, 2, 3], output, tokens_per_chunk: 1 };
    let mut body: Value = serde_json::from_slice(&http.body).unwrap();
    body["return_token_ids"] = true.into();
    let sent = model.stream(path, &body).body();
    let events = memchr::memmem::find_iter(&sent, b"\n\n").map(|end| end + 2);
    let cut = events.take(chunks).last().unwrap();
    let frames = [Ok(sent.slice(..cut)), Err(std::io::Error::from(std::io::ErrorKind::ConnectionReset))];
    let frames = stream::iter(frames.map(|chunk| chunk.map(http_body::Frame::data)));
    let response = Response::builder().header(header::CONTENT_TYPE, "text/event-stream");
    let mut relay = Relay::new(response.body(StreamBody::new(frames)).unwrap(), UsageInStream::Strip);
    assert!(relay.follow(followed(http, &request(http)).unwrap()));
    let items: Vec<_> = relay.by_ref().collect::<Vec<_>>().now_or_never().unwrap();
    assert!(matches!(items.first(), Some(Ok(Item::Head(_)))) && matches!(items.last(), Some(Err(_))), "{items:?}");
    relay.broken().unwrap()
}

/// The request for the rest of the stream of `http`.
fn rest(http: &HttpRequest, before: usize, context: usize, broken: &Broken) -> Result<RelayRest, &'static str> {
    Kept::of(http)?.rest(before, context, broken)
}

fn json_of(body: &Bytes) -> Value {
    serde_json::from_slice(body).unwrap()
}

#[test]
fn the_rest_is_a_completion_of_the_prompt_and_the_tokens_that_were_sent() {
    let fields = json!({
        "messages": [{ "role": "user", "content": "a" }, { "role": "user", "content": [{ "type": "text" }] }],
        "max_completion_tokens": 20, "max_tokens": 30, "n": 1, "tools": [], "reasoning_effort": "low",
        "cache_salt": "s", "stop": "\n", "ignore_eos": true,
    });
    let http = greedy(CHAT, &fields);
    let mut broken_off = broken(CHAT, &http, 3);
    let rest = rest(&http, 0, 4096, &broken_off).unwrap();
    assert_eq!((&rest.tokens[..], rest.generated_tokens), (&[1, 2, 3, 10, 11][..], 2));
    assert_eq!((rest.http.target.path(), rest.http.is_stream), (COMPLETIONS, true));
    let expected = json!({
        "model": "org/m", "temperature": 0, "stream": true, "cache_salt": "s", "stop": "\n", "ignore_eos": true,
        "prompt": [1, 2, 3, 10, 11], "max_tokens": 18,
    });
    assert_eq!(json_of(&rest.http.body), expected);
    // The other server fails too, after one more token.
    let again = Request { tokens: rest.tokens, generated_tokens: 2, ..request(&rest.http) };
    let continuation = rest.http.continues.clone().unwrap();
    assert_eq!(continued(&continuation, &again).unwrap().broken().unwrap(), broken_off);
    broken_off.generated.push(12);
    let next = self::rest(&rest.http, 2, 4096, &broken_off).unwrap();
    assert_eq!((json_of(&next.http.body)["max_tokens"].as_u64(), next.generated_tokens), (Some(17), 3));
    assert!(continued(&Continuation("{}".into()), &again).is_none());
}

#[test]
fn a_request_without_a_limit_has_that_of_its_endpoint_or_of_the_context() {
    let left = |path: &'static str, context| {
        let http = greedy(path, &json!({}));
        let chunks = if path == CHAT { 3 } else { 2 };
        let rest = rest(&http, 0, context, &broken(path, &http, chunks));
        rest.map(|rest| json_of(&rest.http.body)["max_tokens"].as_u64().unwrap())
    };
    assert_eq!(left(COMPLETIONS, 4096), Ok(COMPLETION_TOKENS as u64 - 2));
    assert_eq!(left(CHAT, 100), Ok(100 - 3 - 2));
    assert!(left(CHAT, UNKNOWN_CONTEXT).is_err_and(|why| why.contains("limit")));
}

#[test]
fn the_prompt_of_a_request_is_not_kept() {
    let text = "a".repeat(MAX_KEPT);
    let messages = json!([{ "role": "user", "content": text }]);
    for (path, fields) in [(CHAT, json!({ "messages": messages })), (COMPLETIONS, json!({ "prompt": text }))] {
        let kept = Kept::of(&greedy(path, &fields)).unwrap();
        assert!(kept.http.body.len() < 100, "{path}");
        let long = Kept::of(&greedy(path, &json!({ "user": text })));
        assert!(long.is_err_and(|why| why.contains("too long")), "{path}");
    }
}

#[test]
fn messages_with_images_are_not_continued() {
    let parts = [
        json!([{ "type": "text", "text": "a" }, { "type": "image_url", "image_url": { "url": "data:," } }]),
        json!({ "type": "text" }),
        json!([{ "image": "a" }]),
    ];
    for content in parts {
        let http = greedy(CHAT, &json!({ "messages": [{ "role": "user", "content": content }] }));
        let rest = rest(&http, 0, 4096, &broken(CHAT, &http, 2));
        assert!(rest.is_err_and(|why| why.contains("messages")), "{content}");
    }
    let text = br#"[{"role":"assistant","content":null,"tool_calls":[]},{"content":"a"},{},{"content":[]}]"#;
    assert!(are_text(text));
}
