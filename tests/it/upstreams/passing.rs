//! Requests and responses pass as they are.

use super::{Gateway, TIMEOUT, chat, completions, server};
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, LOCATION, RETRY_AFTER};
use serde_json::{Value, json};
use upstream::relay::chunk::Usage;
use upstream::relay::fake::Script;

#[tokio::test]
async fn a_stream_is_what_the_server_sends() {
    let usage = Usage { prompt_tokens: Some(20), completion_tokens: Some(2), cached_tokens: Some(16) };
    let script = Script::chat(&["Hello", " world"], Some(usage));
    let server = server([script.clone(), script.clone()]).await;
    let gateway = Gateway::start(&[&server]).await;
    let asked = r#"{"model":"org/m","messages":[],"stream":true, "stream_options":{"include_usage":true},"x":[1]}"#;
    let answer = gateway.post("/v1/chat/completions", asked).await;
    assert_eq!(answer.status(), 200);
    let decision: Value = serde_json::from_str(answer.headers()["x-blockyard-explain"].to_str().unwrap()).unwrap();
    assert!(decision.is_object());
    assert_eq!(answer.bytes().await.unwrap(), script.body());
    assert_eq!(completions(&server)[0].body, asked, "nothing had to be changed");

    let answer = gateway.post("/v1/chat/completions", &chat("hello", true)).await.text().await.unwrap();
    assert!(!answer.contains("usage") && answer.ends_with("data: [DONE]\n\n"), "{answer}");
    let sent: Value = serde_json::from_slice(&completions(&server)[1].body).unwrap();
    assert_eq!(sent["stream_options"]["include_usage"], true, "the gateway asks for itself");
    assert_eq!(gateway.metric("blockyard_frontend_cached_tokens_total").await, 32);
}

#[tokio::test]
async fn a_stream_of_several_choices_is_not_asked_for_usage() {
    let server = server([Script::chat(&["Hello"], None)]).await;
    let gateway = Gateway::start(&[&server]).await;
    let body = r#"{"model":"org/m","messages":[],"stream":true,"n":2}"#;
    assert_eq!(gateway.post("/v1/chat/completions", body).await.status(), 200);
    assert_eq!(completions(&server)[0].body, body, "no key is charged");
}

#[tokio::test]
async fn a_response_with_a_length_is_counted_as_whole() {
    let body =
        json!({ "choices": [], "usage": { "prompt_tokens": 9, "prompt_tokens_details": { "cached_tokens": 8 } } });
    let length: &'static str = body.to_string().len().to_string().leak();
    let server = server([Script::json(200, &body).header(CONTENT_LENGTH, length)]).await;
    let gateway = Gateway::start(&[&server]).await;
    let answer = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!(answer.headers()[CONTENT_LENGTH], length);
    assert_eq!(answer.json::<Value>().await.unwrap(), body);
    assert_eq!(gateway.metric("blockyard_frontend_cached_tokens_total").await, 8);
}

#[tokio::test]
async fn an_error_of_the_server_passes_as_it_is() {
    let error = json!({ "object": "error", "message": "top_logprobs must be at most 20" });
    let server = server([Script::json(400, &error), Script::json(429, &error).header(RETRY_AFTER, "7")]).await;
    let gateway = Gateway::start(&[&server]).await;
    let refused = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!((refused.status().as_u16(), refused.json::<Value>().await.unwrap()), (400, error));
    let busy = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!((busy.status().as_u16(), &busy.headers()[RETRY_AFTER]), (429, &"7".parse().unwrap()));
}

#[tokio::test]
async fn a_redirect_of_the_server_is_an_error() {
    let server = server([]).await;
    let redirect = Script::json(302, &json!({})).header(LOCATION, "http://127.0.0.1:1/");
    server.set_page("/v1/chat/completions", redirect);
    let gateway = Gateway::start(&[&server]).await;
    let answer = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!((answer.status().as_u16(), answer.headers().get(LOCATION)), (502, None));
    let error = answer.json::<Value>().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("a redirect (status 302)"), "{error}");
}

#[tokio::test]
async fn requests_without_a_prompt_pass() {
    let files = json!({ "object": "list", "data": [] });
    let server = server([Script::json(200, &files), Script::json(200, &json!("ok"))]).await;
    let gateway = Gateway::start(&[&server]).await;
    let listed = gateway.http.get(format!("{}/v1/files?limit=2", gateway.url)).send().await.unwrap();
    assert_eq!(listed.json::<Value>().await.unwrap(), files);
    let requests = server.requests();
    let asked = requests.iter().find(|request| request.uri.path() == "/v1/files").unwrap();
    assert_eq!((asked.method.as_str(), asked.uri.query()), ("GET", Some("limit=2")));
    let audio = gateway.http.post(format!("{}/v1/audio/transcriptions", gateway.url)).body(vec![0, 159, 146, 150]);
    let answer = audio.header(CONTENT_TYPE, "multipart/form-data; boundary=x").send().await.unwrap();
    assert_eq!(answer.status(), 200);
    assert_eq!(completions(&server)[0].body[..], [0, 159, 146, 150]);
}

#[tokio::test]
async fn a_client_that_leaves_cancels_the_request_at_the_server() {
    let server = server([Script::chat(&["Hello", " world"], None).hanging_after(2)]).await;
    let gateway = Gateway::start(&[&server]).await;
    let mut answer = gateway.post("/v1/chat/completions", &chat("hello", true)).await;
    assert!(answer.chunk().await.unwrap().is_some());
    drop(answer);
    tokio::time::timeout(TIMEOUT, server.cancelled(1)).await.expect("the server notices");
}
