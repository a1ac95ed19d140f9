//! Which servers there are, how they are reached, and which one gets a request.

use super::super::process::{client, client_builder};
use super::{Gateway, TIMEOUT, chat, completions, models, server};
use blockyard::config::{Config, HttpVersion, Listen, Upstream};
use blockyard::node::{Node, Process};
use serde_json::{Value, json};
use std::path::Path;
use std::time::Duration;
use tokio::net::{TcpListener, TcpStream};
use tokio::time::{Instant, sleep, timeout};
use upstream::relay::fake::{FakeEngine, Script};

#[tokio::test]
async fn a_server_may_speak_http_2_without_tls() {
    let server = server([Script::chat(&["Hello"], None)]).await;
    let gateway = Gateway::of(vec![Upstream { http: HttpVersion::H2c, ..Upstream::new(server.uri()) }]).await;
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
    assert_eq!(completions(&server)[0].version, http::Version::HTTP_2);
}

#[tokio::test]
async fn a_server_may_have_an_authority_of_its_own() {
    // Another gateway is the server with TLS.
    let pem = Path::new("upstream/src/relay/client/tests");
    let server = server([Script::chat(&["Hello"], None)]).await;
    let mut config =
        Config { upstreams: vec![Upstream::new(server.uri())], ..Config::with_cache(Path::new("/nonexistent")) };
    config.listen = Listen { host: "127.0.0.1".into(), port: 0 };
    config.frontend.tls_cert_file = Some(pem.join("localhost.pem"));
    config.frontend.tls_key_file = Some(pem.join("localhost.key"));
    let behind = Node::start(&config).await.unwrap();
    let url: http::Uri = format!("https://localhost:{}", behind.address().port()).parse().unwrap();
    let gateway = Gateway::of(vec![Upstream { ca_file: Some(pem.join("localhost.pem")), ..Upstream::new(url) }]).await;
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
    assert_eq!(completions(&server).len(), 1);
}

#[tokio::test]
async fn a_certificate_that_is_not_reloaded_is_degraded() {
    let (pem, folder) = (Path::new("upstream/src/relay/client/tests"), tempfile::tempdir().unwrap());
    let [certificate, key] = ["localhost.pem", "localhost.key"].map(|name| folder.path().join(name));
    std::fs::copy(pem.join("localhost.pem"), &certificate).unwrap();
    std::fs::copy(pem.join("localhost.key"), &key).unwrap();
    let server = server([]).await;
    let mut config =
        Config { upstreams: vec![Upstream::new(server.uri())], ..Config::with_cache(Path::new("/nonexistent")) };
    config.frontend.tls_cert_file = Some(certificate.clone());
    config.frontend.tls_key_file = Some(key);
    let gateway = Gateway::with(config).await;
    let root = reqwest::Certificate::from_pem(&std::fs::read(&certificate).unwrap()).unwrap();
    let http = client_builder().add_root_certificate(root).build().unwrap();
    let ready = format!("https://localhost:{}/ready", gateway.node.address().port());
    let degraded = async || http.get(&ready).send().await.unwrap().json::<Value>().await.unwrap()["degraded"].clone();
    assert_eq!(degraded().await, Value::Null);

    std::fs::write(&certificate, "").unwrap();
    let until_degraded = async |expected: bool| {
        while degraded().await.to_string().contains("TLS certificate not reloaded: frontend.tls_cert_file") != expected
        {
            sleep(Duration::from_millis(50)).await;
        }
    };
    timeout(TIMEOUT, until_degraded(true)).await.expect("it is listed");
    std::fs::copy(pem.join("localhost.pem"), &certificate).unwrap();
    timeout(TIMEOUT, until_degraded(false)).await.expect("it has been reloaded");
}

#[tokio::test]
async fn servers_of_one_model_may_have_different_endpoints() {
    let answer = |text: &str| Script::json(200, &json!({ "object": text }));
    let (generates, pools) = (server([]).await, server([]).await);
    for (server, path) in [(&generates, "/v1/chat/completions"), (&pools, "/v1/embeddings")] {
        server.set_page("/openapi.json", Script::json(200, &json!({ "paths": { path: {} } })));
        server.set_page("/v1/chat/completions", Script::json(404, &json!({ "detail": "Not Found" })));
        server.set_page("/v1/embeddings", Script::json(404, &json!({ "detail": "Not Found" })));
        server.set_page(path, answer(path));
    }
    let gateway = Gateway::start(&[&generates, &pools]).await;
    for number in 0..4 {
        let body = json!({ "model": "org/m", "input": format!("text {number}") }).to_string();
        let embedded = gateway.post("/v1/embeddings", &body).await;
        assert_eq!(embedded.json::<Value>().await.unwrap()["object"], "/v1/embeddings");
        let chatted = gateway.post("/v1/chat/completions", &chat(&format!("text {number}"), false)).await;
        assert_eq!(chatted.json::<Value>().await.unwrap()["object"], "/v1/chat/completions");
    }
    assert_eq!((completions(&generates).len(), completions(&pools).len()), (4, 4));
}

#[tokio::test]
async fn gateways_that_are_upstreams_of_each_other_do_not_relay_without_end() {
    let server = server([]).await;
    server.set_page("/v1/chat/completions", Script::json(500, &json!({ "error": "broken" })));
    // The first gateway needs the address of the second one before that is known.
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let second_url = format!("http://{}", listener.local_addr().unwrap()).parse().unwrap();
    let upstreams = vec![Upstream::new(server.uri()), Upstream::new(second_url)];
    let listen = Listen { host: "127.0.0.1".into(), port: 0 };
    let config = Config { upstreams, listen, ..Config::with_cache(Path::new("/nonexistent")) };
    let node = Node::start(&config).await.unwrap();
    let url = format!("http://{}", node.address());
    let second = Gateway::of(vec![Upstream::new(url.parse().unwrap())]).await;
    let second_address = second.node.address();
    tokio::spawn(async move {
        while let Ok((mut from, _)) = listener.accept().await {
            tokio::spawn(async move {
                let mut to = TcpStream::connect(second_address).await?;
                tokio::io::copy_bidirectional(&mut from, &mut to).await
            });
        }
    });
    let first = Gateway { node, url, http: client() };
    let both_registered = async {
        while first.metric("blockyard_router_workers") < 2 {
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(TIMEOUT, both_registered).await.expect("the gateways know each other");

    let answer = timeout(TIMEOUT, first.post("/v1/chat/completions", &chat("hello", false))).await;
    let status = answer.expect("an answer").status();
    assert!(status.is_server_error(), "{status}");
    assert_eq!(completions(&server).len(), 1, "what came back to the first gateway was refused");
}

#[tokio::test]
async fn a_request_without_output_goes_to_another_server() {
    let role = Script::chat(&["never"], None).broken_after(1);
    let broken = server([Script::close(), role, Script::json(500, &json!({}))]).await;
    let good = server([]).await;
    let gateway = Gateway::start(&[&broken, &good]).await;
    // Until each of the three faults has been met; the circuit breaker opens after the third.
    let met = async {
        let mut asked = 0;
        while completions(&broken).len() < 3 {
            let answer = gateway.post("/v1/chat/completions", &chat(&format!("{asked} hello"), true)).await;
            assert_eq!(answer.status(), 200);
            assert!(answer.text().await.unwrap().ends_with("data: [DONE]\n\n"));
            asked += 1;
        }
    };
    tokio::time::timeout(TIMEOUT, met).await.expect("both servers get requests");
}

#[tokio::test]
async fn prompts_that_begin_alike_go_to_the_same_server() {
    let (one, other) = (server([]).await, server([]).await);
    let gateway = Gateway::start(&[&one, &other]).await;
    let text = "A block holds the keys and values of sixteen tokens. ".repeat(40);
    let deadline = Instant::now() + TIMEOUT;
    // Servers without KV events are recognised as such after some seconds.
    while gateway.metric("blockyard_router_worker_index_source") == 0 || !estimated(&gateway).await {
        assert!(Instant::now() < deadline, "the caches of both are estimated");
        for turn in 0..2 {
            gateway.post("/v1/chat/completions", &chat(&format!("{turn}{text}"), false)).await;
        }
        sleep(Duration::from_millis(200)).await;
    }
    let before = (completions(&one).len(), completions(&other).len());
    for turn in 0..6 {
        gateway.post("/v1/chat/completions", &chat(&format!("{text}{turn}"), false)).await;
    }
    let after = (completions(&one).len() - before.0, completions(&other).len() - before.1);
    assert!(after == (6, 0) || after == (0, 6), "{after:?}");
}

/// Whether the caches of both servers are estimated.
async fn estimated(gateway: &Gateway) -> bool {
    let text = gateway.http.get(format!("{}/metrics", gateway.url)).send().await.unwrap().text().await.unwrap();
    let lines = text.lines().filter(|line| line.starts_with("blockyard_router_worker_index_source{"));
    lines.filter(|line| line.contains("estimated") && line.ends_with(" 1")).count() == 2
}

#[tokio::test]
async fn a_name_with_one_address_is_one_server() {
    let server = server([]).await;
    let url = format!("http://localhost:{}", server.address().port()).parse().unwrap();
    let gateway = Gateway::of(vec![Upstream::new(url)]).await;
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
    assert_eq!(gateway.metric("blockyard_router_workers"), 1);
    let banner = gateway.node.banner().as_json();
    assert_eq!(banner["upstreams"][0]["servers"], 1, "localhost may have two addresses of one server");
}

#[tokio::test]
async fn a_server_that_starts_late_is_found() {
    let server = FakeEngine::start([Script::json(503, &json!({})), models()]).await.unwrap();
    let gateway = Gateway::start(&[&server]).await;
    assert_eq!(gateway.post("/v1/chat/completions", &chat("hello", true)).await.status(), 200);
    let text = gateway.node.banner().to_string();
    assert!(text.contains("org/m"), "{text}");
    gateway.node.shutdown().await;
}

#[tokio::test]
async fn adapters_are_listed_after_the_models_that_they_are_of() {
    let server = server([]).await;
    let adapter = json!({ "id": "adapter", "parent": "org/m", "root": "/srv/adapter" });
    server
        .set_page("/v1/models", Script::json(200, &json!({ "data": [adapter, { "id": "org/m" }, { "id": "org/n" }] })));
    let gateway = Gateway::start(&[&server]).await;
    let listed = gateway.http.get(format!("{}/v1/models", gateway.url)).send().await.unwrap();
    let listed: Value = listed.json().await.unwrap();
    let of = |model: &Value| (model["id"].as_str().unwrap().to_owned(), model["parent"].as_str().map(str::to_owned));
    let listed: Vec<_> = listed["data"].as_array().unwrap().iter().map(of).collect();
    let base = |id: &str| (id.to_owned(), None);
    assert_eq!(listed, [base("org/m"), base("org/n"), ("adapter".to_owned(), Some("org/m".to_owned()))]);
}
