//! Requests and responses pass as they are.

use super::{Gateway, TIMEOUT, chat, client_builder, completions, server};
use http::Method;
use http::header::{CONTENT_LENGTH, CONTENT_TYPE, ETAG, IF_NONE_MATCH, LOCATION, RETRY_AFTER};
use reqwest::redirect::Policy;
use serde_json::{Value, json};
use tokio::time::timeout;
use upstream::relay::chunk::Usage;
use upstream::relay::fake::{FakeEngine, Recorded, Script};

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
    assert_eq!(gateway.metric("blockyard_frontend_cached_tokens_total"), 32);
}

#[tokio::test]
async fn a_stream_ends_although_its_server_keeps_the_response_open() {
    let script = Script::chat(&["Hello"], None);
    let server = server([script.clone().hanging_after(3)]).await;
    let gateway = Gateway::start(&[&server]).await;
    let answer = gateway.post("/v1/chat/completions", &chat("hello", true)).await;
    let answer = timeout(TIMEOUT, answer.bytes()).await.expect("the response ends");
    assert_eq!(answer.unwrap(), script.body());
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
    assert_eq!(gateway.metric("blockyard_frontend_cached_tokens_total"), 8);
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
async fn an_error_whose_body_is_not_passed_whole_says_so() {
    let long = json!({ "error": { "message": "x".repeat(3 << 20) } });
    let short = Script::json(422, &json!({ "error": "the reason" })).header(CONTENT_LENGTH, "100");
    let server = server([Script::json(400, &long), short.broken_after(1)]).await;
    let gateway = Gateway::start(&[&server]).await;
    for (status, what) in [(400, "a body of more than 1 MiB"), (422, "a body that broke off")] {
        let answer = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
        assert_eq!(answer.status(), status);
        let error = answer.json::<Value>().await.unwrap()["error"].take();
        assert_eq!(error["code"], "incomplete_error");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(what) && message.contains("Its beginning: {\"error\":"), "{message}");
    }
}

#[tokio::test]
async fn a_redirect_to_another_server_is_an_error() {
    let servers = [server([]).await, server([]).await];
    for server in &servers {
        let redirect = Script::json(302, &json!({})).header(LOCATION, "http://127.0.0.1:1/");
        server.set_page("/v1/chat/completions", redirect);
    }
    let gateway = Gateway::start(&servers.each_ref()).await;
    let answer = gateway.post("/v1/chat/completions", &chat("hello", false)).await;
    assert_eq!((answer.status().as_u16(), answer.headers().get(LOCATION)), (502, None));
    let error = answer.json::<Value>().await.unwrap();
    assert!(error["error"]["message"].as_str().unwrap().contains("a redirect (status 302)"), "{error}");
    assert_eq!(gateway.metric("blockyard_router_retries_total"), 0);
}

#[tokio::test]
async fn a_client_follows_a_redirect_of_a_server_to_itself_at_the_gateway() {
    let (server, whole) = (server([]).await, Script::json(200, &json!({ "choices": [] })));
    let address = format!("{}v1/chat/completions?a=b", server.uri()).leak();
    // As FastAPI answers a path with a slash at its end.
    server.set_page("/v1/chat/completions/", Script::events([""; 0]).status(307).header(LOCATION, address));
    server.set_page("/v1/chat/completions", whole);
    let gateway = Gateway::start(&[&server]).await;
    let client = client_builder().redirect(Policy::none()).build().unwrap();
    // More than the failures that take a server out of service.
    for _ in 0..8 {
        let request = client.post(format!("{}/v1/chat/completions/", gateway.url)).body(chat("hello", false));
        let answer = request.header(CONTENT_TYPE, "application/json").send().await.unwrap();
        let location = answer.headers()[LOCATION].to_str().unwrap();
        assert_eq!((answer.status().as_u16(), location), (307, "/v1/chat/completions?a=b"));
    }
    assert_eq!(gateway.post("/v1/chat/completions/", &chat("hello", false)).await.status(), 200);
    let followed = completions(&server).pop().unwrap();
    assert_eq!((followed.uri.path(), followed.uri.query()), ("/v1/chat/completions", Some("a=b")));
    let relative = Script::events([""; 0]).status(307).header(LOCATION, "../completions?c");
    server.set_page("/v1/chat/completions/", relative);
    let request = client.post(format!("{}/v1/chat/completions/", gateway.url)).body(chat("hello", false));
    let answer = request.header(CONTENT_TYPE, "application/json").send().await.unwrap();
    let location = answer.headers()[LOCATION].to_str().unwrap();
    assert_eq!((answer.status().as_u16(), location), (307, "/v1/chat/completions?c"));
}

#[tokio::test]
async fn answers_that_say_nothing_of_a_servers_health_pass() {
    let error = json!({ "error": { "message": "The model does not support Embeddings API", "code": 501 } });
    let servers = [server([]).await, server([]).await];
    for server in &servers {
        server.set_page("/v1/embeddings", Script::json(501, &error));
        let unchanged = Script::events([""; 0]).status(304).header(ETAG, "\"a\"");
        server.set_page("/v1/files/a", unchanged);
    }
    let gateway = Gateway::start(&servers.each_ref()).await;
    for _ in 0..8 {
        let answer = gateway.post("/v1/embeddings", r#"{"model":"org/m","input":"a"}"#).await;
        assert_eq!((answer.status().as_u16(), answer.json::<Value>().await.unwrap()), (501, error.clone()));
        let request = gateway.http.get(format!("{}/v1/files/a", gateway.url)).header(IF_NONE_MATCH, "\"a\"");
        let answer = request.send().await.unwrap();
        assert_eq!((answer.status().as_u16(), &answer.headers()[ETAG]), (304, &"\"a\"".parse().unwrap()));
    }
    assert_eq!(gateway.metric("blockyard_router_retries_total"), 0);
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

/// Fields of requests, written as no serializer writes them.
const FIELDS: &[&str] = &[
    r#""max_tokens" : 6"#,
    r#""max_completion_tokens":3,"min_tokens":1"#,
    r#""temperature":1.0,"top_p":5e-1,"top_k":-1,"min_p":0.10"#,
    r#""seed":9223372036854775807"#,
    r#""seed":18446744073709551616"#,
    r#""n":2"#,
    r#""n":0"#,
    r#""best_of":2,"use_beam_search":true,"length_penalty":0.5"#,
    r#""temperature":"hot""#,
    r#""stop":["\u00e9","\ud83d\ude82","/\/"],"include_stop_str_in_output":true"#,
    r#""logit_bias":{"5":3,"5":4}"#,
    r#""frequency_penalty":0.5,"presence_penalty":-0,"repetition_penalty":1.20"#,
    r#""logprobs":true,"top_logprobs":30,"prompt_logprobs":1"#,
    r#""echo":true,"suffix":"","stop_token_ids":[ 7 ],"ignore_eos":true,"bad_words":["a"]"#,
    r#""skip_special_tokens":false,"spaces_between_special_tokens":false,"return_token_ids":true"#,
    r##""response_format":{"type":"json_schema","json_schema":{"name":"a","schema":{"b":1,"a":2,"$ref":"#\/x"}}}"##,
    r#""structured_outputs":{"regex":"[\u0061b]+\\d"}"#,
    r#""tools":[ {"type":"function","function":{"parameters":{},"name":"f"}} ],"tool_choice":"auto""#,
    r#""tool_choice":{"type":"function","function":{"name":"f"}},"parallel_tool_calls":false"#,
    r#""stream_options":{"include_usage":true}"#,
    r#""stream_options":{ "include_usage" : true , "continuous_usage_stats":true}"#,
    r#""truncate_prompt_tokens":3,"priority":3,"user":"user","metadata":{"a":"b"}"#,
    r#""cache_salt":"salt""#,
    r#""request_id":"abc","kv_transfer_params":{"do_remote_decode":true,"x":null}"#,
    r#""chat_template_kwargs":{"enable_thinking":false},"add_generation_prompt":false"#,
    r#""reasoning_effort":"low","include_reasoning":false,"documents":[{"title":"t"}]"#,
    r#""vllm_xargs":{"a":1e2},"mm_processor_kwargs":{},"media_io_kwargs":{}"#,
    r#""unknown_field":[1,2.50,{"\u006bey":[]}]"#,
    "\"a\":1,\n\t\"b\" :\r\n null",
    r#""":0"#,
];

/// What a server answers: an error, a body, or a stream, with the usage at its end if that is asked for.
fn answer(request: &Recorded) -> Script {
    let body: Value = serde_json::from_slice(&request.body).unwrap();
    if body["temperature"] == "hot" || body["n"] == 0 {
        return Script::json(400, &json!({ "object": "error", "message": "h\u{e9}: [{'input': 'hot'}]" }));
    }
    if body["stream"] != true {
        let body = r#"{ "id":"x", "choices":[ ],"created":1.0e9, "\u00e9":null ,"usage":{"prompt_tokens":9} }"#;
        return Script::events([body, "\n"]).header(CONTENT_TYPE, "application/json");
    }
    let usage = Usage { prompt_tokens: Some(9), completion_tokens: Some(2), cached_tokens: None };
    let usage = (body["stream_options"]["include_usage"] == true).then_some(usage);
    let texts = ["\u{1f682}", " \"\\u00e9\n"];
    if request.uri.path() == "/v1/completions" {
        Script::completion(&texts, usage)
    } else {
        Script::chat(&texts, usage)
    }
}

#[tokio::test]
async fn fields_and_answers_pass_byte_for_byte() {
    let server = server([]).await;
    let prompts = [
        ("/v1/chat/completions", r#""messages":[{"role":"user","content":"h\u00e9"}]"#),
        ("/v1/completions", r#""prompt": "h\u00e9""#),
    ];
    for (path, _) in prompts {
        server.set_answers(path, answer);
    }
    let gateway = Gateway::start(&[&server]).await;
    for (path, prompt) in prompts {
        for (fields, stream) in FIELDS.iter().flat_map(|fields| [(fields, false), (fields, true)]) {
            let sent = format!(r#"{{ "model":"org/m", {prompt} ,{fields}, "stream":{stream}}}"#);
            let direct = gateway.http.post(format!("{}{}", server.uri(), &path[1..])).body(sent.clone()).send().await;
            let relayed = gateway.post(path, &sent).await;
            let direct = direct.unwrap();
            assert_eq!(direct.status(), relayed.status(), "{sent}");
            assert_eq!(direct.headers()[CONTENT_TYPE], relayed.headers()[CONTENT_TYPE], "{sent}");
            assert_eq!(direct.bytes().await.unwrap(), relayed.bytes().await.unwrap(), "{sent}");

            // The usage of a stream of one choice is asked for.
            let is_asked = stream && !fields.contains("stream_options") && !fields.contains(r#""n":2"#);
            let mut expected = sent;
            if is_asked {
                expected.pop();
                expected.push_str(r#","stream_options":{"include_usage":true}}"#);
            }
            let received = completions(&server).pop().unwrap();
            assert_eq!(received.uri.path(), path);
            assert_eq!(received.body, expected);
        }
    }
}

#[tokio::test]
async fn a_request_that_changes_something_is_sent_once() {
    let answers = || [Script::json(200, &json!({})), Script::close(), Script::json(500, &json!({}))];
    for (method, path) in [(Method::POST, "/v1/batches"), (Method::DELETE, "/v1/files/id"), (Method::PUT, "/v1/thing")]
    {
        let servers = [server(answers()).await, server(answers()).await];
        let gateway = Gateway::start(&[&servers[0], &servers[1]]).await;
        let counted = || servers.iter().flat_map(FakeEngine::requests).filter(|it| it.uri.path() == path).count();
        for sent in 1..=6 {
            let request = gateway.http.request(method.clone(), format!("{}{path}", gateway.url));
            request.body("{}").send().await.unwrap();
            assert_eq!(counted(), sent, "{method} {path}");
        }
    }
}
