//! Servers that take the salts of tenants, and servers that do not.

use super::*;

#[tokio::test]
async fn tenants_are_served_by_a_server_that_takes_salts_only() {
    let server = any_server().await;
    let mut harness = Harness::new();
    harness.apply_for(&[&server.uri().to_string()], true);
    let asked = || server.requests().iter().filter(|request| request.uri.path() == "/openapi.json").count();
    let refused = async {
        while asked() < 3 {
            sleep(QUICK.retry).await;
        }
    };
    timeout(TIMEOUT, refused).await.expect("the server is asked again");
    assert_eq!(harness.upstreams.known(&server.uri().to_string()), AnsweredServers::default());
    server.set_page("/openapi.json", Script::json(200, &json!({ "components": { "cache_salt": {} } })));
    let (_, engine) = harness.joined().await;
    let tenant = Request { domain: worker::engine::Domain::derived(b"secret", "ann"), ..request() };
    let outputs = engine.generate(tenant).await.unwrap();
    assert!(outputs.count().await > 1);
    let sent = server.requests().into_iter().rfind(|request| request.method == Method::POST).unwrap();
    let sent: serde_json::Value = serde_json::from_slice(&sent.body).unwrap();
    assert!(sent["cache_salt"].is_string(), "{sent}");
}

#[test]
fn what_to_change_for_a_server_without_salts_fits_into_ready() {
    let problem = format!("upstream http://vllm-0.vllm.models.svc:8000/ cannot be used: {}", api::NO_SALTS);
    assert!(problem.chars().count() <= crate::node::health::MAX_PROBLEM_CHARS, "{problem}");
}

#[tokio::test]
async fn without_tenants_no_salt_is_refused() {
    let server = any_server().await;
    server.set_page("/openapi.json", Script::json(200, &json!({ "components": { "cache_salt": {} } })));
    let mut harness = Harness::new();
    harness.apply(&[&server.uri().to_string()]);
    let (_, engine) = harness.joined().await;
    let Work::Relay(http) = request().work else { unreachable!() };
    let body = r#"{"text":"x","extra_key":"k"}"#;
    let http =
        HttpRequest { target: PathAndQuery::from_static("/generate"), body: body.into(), ..HttpRequest::clone(&http) };
    let domain = Domain::shared().salted("extra_key");
    let asked = Request { work: Work::Relay(Arc::new(http)), domain, ..request() };
    assert!(engine.generate(asked).await.unwrap().count().await > 1);
    let sent = server.requests().into_iter().rfind(|request| request.method == Method::POST).unwrap();
    assert_eq!((sent.uri.path(), &sent.body[..]), ("/generate", body.as_bytes()), "it passes as it came");
}

#[tokio::test]
async fn a_tenant_is_refused_at_endpoints_without_salts() {
    let server = any_server().await;
    let schema = |name: &str| json!({ "$ref": format!("#/components/schemas/{name}") });
    let endpoint =
        |name| json!({ "post": { "requestBody": { "content": { "application/json": { "schema": schema(name) } } } } });
    let description = json!({
        "paths": { "/v1/completions": endpoint("Completion"), "/v1/messages": endpoint("Messages") },
        "components": { "schemas": {
            "Completion": { "properties": { "cache_salt": { "type": "string" } } },
            "Messages": { "properties": { "model": { "type": "string" } } },
        } },
    });
    server.set_page("/openapi.json", Script::json(200, &description));
    let mut harness = Harness::new();
    harness.apply_for(&[&server.uri().to_string()], true);
    let (_, engine) = harness.joined().await;
    let Work::Relay(http) = request().work else { unreachable!() };
    let to = |path: &'static str, domain: &Domain| {
        let http = HttpRequest { target: PathAndQuery::from_static(path), ..HttpRequest::clone(&http) };
        engine.generate(Request { work: Work::Relay(Arc::new(http)), domain: domain.clone(), ..request() })
    };
    let ann = Domain::derived(b"secret", "ann");
    // The router sends it to another server, if one of the model takes it.
    for (path, domain, expected) in [
        ("/v1/messages", &ann, true),
        ("/v1/messages", &Domain::shared(), false),
        ("/v1/completions", &ann, false),
        ("/v1/embeddings", &ann, false),
    ] {
        let http = HttpRequest { target: PathAndQuery::from_static(path), ..HttpRequest::clone(&http) };
        let asked = Request { work: Work::Relay(Arc::new(http)), domain: domain.clone(), ..request() };
        assert_eq!(engine.refuses(&asked), expected, "{path} {domain:?}");
    }
    assert!(to("/v1/completions", &ann).await.unwrap().count().await > 1);
    assert!(to("/v1/embeddings", &ann).await.unwrap().count().await > 1);
    assert!(to("/v1/messages", &Domain::shared()).await.unwrap().count().await > 1, "it has no tenant");
    let messages = || server.requests().iter().filter(|request| request.uri.path() == "/v1/messages").count();
    match to("/v1/messages", &ann).await {
        Err(Error::Invalid { field: "cache_salt", problem }) => {
            assert!(problem.contains("no field cache_salt for /v1/messages"), "{problem}");
        }
        other => panic!("{:?}", other.map(drop)),
    }
    assert_eq!(messages(), 1, "the server got only the one without a tenant");
}
