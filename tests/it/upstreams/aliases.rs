//! Aliases of models, and weighted splits.

use super::{Gateway, completions, lists, server};
use blockyard::config::{Alias, Config, Deployment, Upstream};
use http::header::CONTENT_TYPE;
use serde_json::{Value, json};
use std::path::Path;
use upstream::relay::fake::{FakeEngine, Script};

/// A gateway of these servers with an alias `chat`.
async fn with_alias(servers: &[&FakeEngine], deployments: &[(&str, u32)]) -> Gateway {
    let deployment = |(model, weight): &(&str, u32)| Deployment { model: (*model).to_owned(), weight: *weight };
    let alias = Alias { deployments: deployments.iter().map(deployment).collect() };
    Gateway::with(Config {
        upstreams: servers.iter().map(|server| Upstream::new(server.uri())).collect(),
        aliases: [("chat".to_owned(), alias)].into(),
        ..Config::with_cache(Path::new("/nonexistent"))
    })
    .await
}

#[tokio::test]
async fn an_alias_is_sent_under_the_models_own_name() {
    let answer = json!({ "model": "org/m", "choices": [] });
    let server = server([Script::json(200, &answer)]).await;
    let gateway = with_alias(&[&server], &[("org/m", 1)]).await;
    let body = r#"{"messages":[],  "model" : "chat","top_p":0.10}"#;
    let response = gateway.post("/v1/chat/completions", body).await;
    assert_eq!(response.json::<Value>().await.unwrap(), answer, "the model that answered is named");
    assert_eq!(completions(&server)[0].body, r#"{"messages":[],  "model" : "org/m","top_p":0.10}"#);
    let listed = gateway.http.get(format!("{}/v1/models", gateway.url)).send().await.unwrap();
    let listed: Value = listed.json().await.unwrap();
    let ids: Vec<&str> = listed["data"].as_array().unwrap().iter().map(|model| model["id"].as_str().unwrap()).collect();
    assert_eq!(ids, ["chat", "org/m"]);
}

#[tokio::test]
async fn a_request_that_names_no_model_is_one_for_the_only_one() {
    let answer = || Script::json(200, &json!({ "choices": [] }));
    let server = server([answer(), answer(), answer()]).await;
    server.set_page(
        "/v1/models",
        Script::json(200, &json!({ "data": [{ "id": "org/m" }, { "id": "adapter", "parent": "org/m" }] })),
    );
    let other = self::server([]).await;
    other.set_page("/v1/models", lists("org/other"));
    let body = r#"{"messages":[{"role":"user","content":"hello"}],"model":null}"#;

    let gateway = with_alias(&[&server], &[("adapter", 1)]).await;
    assert_eq!(gateway.post("/v1/chat/completions", body).await.status(), 200);
    assert_eq!(gateway.post("/v1/completions", r#"{"prompt":"hello"}"#).await.status(), 200);
    let sent = completions(&server);
    assert_eq!(sent[0].body, body.replace("null", r#""org/m""#));
    assert_eq!(sent[1].body, r#"{"prompt":"hello"}"#);
    let empty = r#"{"prompt":"hello","model":""}"#;
    assert_eq!(gateway.post("/v1/completions", empty).await.status(), 200, "an empty name is none");
    assert_eq!(completions(&server)[2].body, r#"{"prompt":"hello","model":"org/m"}"#);

    let gateway = with_alias(&[&server, &other], &[("org/m", 1)]).await;
    let answer = gateway.post("/v1/chat/completions", body).await;
    assert_eq!(answer.status(), 400, "of several models one must be named");
    let answer: Value = answer.json().await.unwrap();
    assert_eq!((&answer["error"]["param"], completions(&server).len()), (&json!("model"), 3));
    assert_eq!(gateway.post("/v1/chat/completions", &body.replace("null", r#""""#)).await.status(), 400);
}

#[tokio::test]
async fn the_names_of_a_model_are_one_model() {
    let listed = |id: &str, root: &str, parent: Option<&str>| json!({ "id": id, "root": root, "parent": parent });
    let set_models = |server: &FakeEngine, models: &[Value]| {
        server.set_page("/v1/models", Script::json(200, &json!({ "data": models })));
    };
    let names = [listed("org/m", "/srv/m", None), listed("a-name", "/srv/m", None)];
    let answer = || Script::json(200, &json!({ "choices": [] }));
    let [one, other] = [server([answer()]).await, server([answer()]).await];
    for server in [&one, &other] {
        server.set_page("/tokenize", Script::json(200, &json!({ "tokens": [1] })));
        set_models(server, &[names[0].clone(), names[1].clone(), listed("adapter", "/srv/a", Some("org/m"))]);
    }
    let gateway = Gateway::start(&[&one, &other]).await;
    gateway.has_workers(6).await;
    for path in ["/v1/completions", "/tokenize"] {
        assert_eq!(gateway.post(path, r#"{"prompt":"hello"}"#).await.status(), 200, "{path}");
    }

    // Other servers may have other models at the same path.
    set_models(&one, &names);
    set_models(&other, &[listed("org/n", "/srv/m", None)]);
    let gateway = Gateway::start(&[&one, &other]).await;
    gateway.has_workers(3).await;
    assert_eq!(gateway.post("/v1/completions", r#"{"prompt":"hello"}"#).await.status(), 400);
    let listed = gateway.http.get(format!("{}/v1/models", gateway.url)).send().await.unwrap();
    let listed: Value = listed.json().await.unwrap();
    let roots: Vec<_> = listed["data"].as_array().unwrap().iter().map(|model| [&model["id"], &model["root"]]).collect();
    assert_eq!(json!(roots), json!([["a-name", "org/m"], ["org/m", "org/m"], ["org/n", "org/n"]]));
}

#[tokio::test]
async fn an_alias_in_a_form_is_replaced() {
    let server = server([]).await;
    let gateway = with_alias(&[&server], &[("org/m", 1)]).await;
    let form = |model: &str| {
        let field =
            |header: &str, value: &str| format!("--b\r\nContent-Disposition: form-data; {header}\r\n\r\n{value}\r\n");
        let file = field("name=\"file\"; filename=\"a.wav\"", "RIFF chat");
        format!("{}{file}--b--\r\n", field("name=\"model\"", model))
    };
    let post = async |model: &str| {
        let request = gateway.http.post(format!("{}/v1/audio/transcriptions", gateway.url));
        request.header(CONTENT_TYPE, "multipart/form-data; boundary=b").body(form(model)).send().await.unwrap()
    };
    for named in ["chat", "org/m"] {
        assert_eq!(post(named).await.status(), 200);
        assert_eq!(completions(&server).last().unwrap().body, form("org/m"), "{named}");
    }
    let unknown = post("other").await;
    assert_eq!(unknown.status(), 404);
    let unknown: Value = unknown.json().await.unwrap();
    assert_eq!((&unknown["error"]["code"], completions(&server).len()), (&json!("model_not_found"), 2));
}

#[tokio::test]
async fn conversations_stay_with_their_deployment() {
    let (one, other) = (server([]).await, server([]).await);
    other.set_page("/v1/models", lists("org/n"));
    let gateway = with_alias(&[&one, &other], &[("org/m", 1), ("org/n", 1), ("org/absent", 8)]).await;
    let mut counts = Vec::new();
    for conversation in 0..20 {
        let mut messages = vec![
            json!({ "role": "system", "content": "Answer briefly." }),
            json!({ "role": "user", "content": format!("question {conversation}") }),
        ];
        for turn in 0..3 {
            let body = json!({ "model": "chat", "messages": messages }).to_string();
            assert_eq!(gateway.post("/v1/chat/completions", &body).await.status(), 200);
            messages.push(json!({ "role": "assistant", "content": "yes" }));
            messages.push(json!({ "role": "user", "content": format!("and {turn}?") }));
        }
        counts.push([completions(&one).len(), completions(&other).len()]);
    }
    assert!(counts.iter().all(|[one, other]| one % 3 == 0 && other % 3 == 0), "{counts:?}");
    assert!(counts.last().unwrap().iter().all(|count| *count > 0), "both get conversations: {counts:?}");
}

#[tokio::test]
async fn an_alias_for_a_model_without_a_server_is_degraded() {
    let server = server([]).await;
    let gateway = with_alias(&[&server], &[("org/m", 1), ("org/absent", 1)]).await;
    let ready = gateway.http.get(format!("{}/ready", gateway.url)).send().await.unwrap();
    assert_eq!(ready.status(), 200);
    let ready: Value = ready.json().await.unwrap();
    let expected = "aliases.\"chat\": no server has the model org/absent; the other deployments get its requests";
    assert_eq!(ready["degraded"], json!([expected]));
}
