//! Objects that a server stores: requests that name one go to this server.

use super::{Gateway, lists, server};
use blockyard::config::{Alias, Config, Deployment, Upstream};
use http::Method;
use serde_json::{Value, json};
use std::path::Path;
use upstream::relay::fake::{FakeEngine, Script};

/// Two servers, of which each creates objects with an id of its own, and answers 404 for that of the other.
async fn servers() -> [FakeEngine; 2] {
    let servers = [server([]).await, server([]).await];
    for (at, server) in servers.iter().enumerate() {
        for (collection, below) in
            [("responses", "cancel"), ("responses", "input_items"), ("files", "content"), ("conversations", "items")]
        {
            let created = json!({ "id": format!("id_{at}"), "status": "queued" });
            server.set_page(format!("/v1/{collection}").leak(), Script::json(200, &created));
            for owner in 0..servers.len() {
                let status = if owner == at { 200 } else { 404 };
                let path = format!("/v1/{collection}/id_{owner}");
                for path in [format!("{path}/{below}"), path] {
                    server.set_page(path.leak(), Script::json(status, &json!({ "server": at })));
                }
            }
        }
    }
    servers
}

impl Gateway {
    async fn status(&self, method: Method, path: &str) -> u16 {
        self.http.request(method, format!("{}{path}", self.url)).send().await.unwrap().status().as_u16()
    }

    /// Creates an object, and returns its id.
    async fn create(&self, path: &str, body: &Value) -> String {
        let created: Value = self.post(path, &body.to_string()).await.json().await.unwrap();
        created["id"].as_str().unwrap().to_owned()
    }
}

#[tokio::test]
async fn requests_for_a_stored_object_go_to_its_server() {
    let [one, other] = servers().await;
    let gateway = Gateway::start(&[&one, &other]).await;
    for turn in 0..6 {
        let response = gateway.create("/v1/responses", &json!({ "model": "org/m", "input": format!("{turn}") })).await;
        for (method, below) in [
            (Method::GET, ""),
            (Method::GET, "?stream=true"),
            (Method::GET, "/input_items"),
            (Method::POST, "/cancel"),
            (Method::DELETE, ""),
        ] {
            let path = format!("/v1/responses/{response}{below}");
            assert_eq!(gateway.status(method.clone(), &path).await, 200, "{method} {path}");
        }
        let next = json!({ "model": "org/m", "input": "next", "previous_response_id": response });
        assert_eq!(gateway.create("/v1/responses", &next).await, response, "from the same server");
        for (path, below) in [("/v1/files", "/content"), ("/v1/conversations", "/items")] {
            let object = gateway.create(path, &json!({ "purpose": "batch" })).await;
            assert_eq!(gateway.status(Method::GET, &format!("{path}/{object}")).await, 200);
            assert_eq!(gateway.status(Method::GET, &format!("{path}/{object}{below}")).await, 200);
        }
    }
}

#[tokio::test]
async fn a_stored_response_is_found_at_the_model_that_has_created_it() {
    let [one, other] = servers().await;
    other.set_page("/v1/models", lists("org/n"));
    let deployments = ["org/m", "org/n"].map(|model| Deployment { model: model.to_owned(), weight: 1 });
    let gateway = Gateway::with(Config {
        upstreams: [&one, &other].map(|server| Upstream::new(server.uri())).into(),
        aliases: [("chat".to_owned(), Alias { deployments: deployments.into() })].into(),
        ..Config::with_cache(Path::new("/nonexistent"))
    })
    .await;
    for (model, id) in [("org/m", "id_0"), ("org/n", "id_1")] {
        let created = gateway.create("/v1/responses", &json!({ "model": model, "input": "hello" })).await;
        assert_eq!(created, id);
        assert_eq!(gateway.status(Method::GET, &format!("/v1/responses/{id}")).await, 200, "{model}");
        for turn in 0..6 {
            let next = json!({ "model": "chat", "input": format!("{turn}"), "previous_response_id": id });
            assert_eq!(gateway.create("/v1/responses", &next).await, id, "the deployment that has the response");
        }
    }
}

#[tokio::test]
async fn a_response_whose_server_is_not_known_is_found_once() {
    let [one, other] = servers().await;
    let gateway = Gateway::start(&[&one, &other]).await;
    let mut tries = 0..100;
    while gateway.status(Method::GET, "/v1/responses/id_1").await != 200 {
        tries.next().expect("each server gets requests");
    }
    for _ in 0..8 {
        assert_eq!(gateway.status(Method::GET, "/v1/responses/id_1").await, 200);
    }
}
