use super::*;
use crate::models::discover;
use crate::relay::client::Settings;
use crate::relay::fake::{FakeEngine, Script};
use serde_json::json;
use std::time::Duration;
use tokio::time::timeout;

/// For what must happen soon, on any machine.
const SOON: Duration = Duration::from_secs(20);
const NEVER: Duration = Duration::from_hours(1);

/// A server with one model, and its engine. A connection to it is open and idle. `health`: its next answers.
async fn engine(health: impl IntoIterator<Item = Script>) -> (FakeEngine, UpstreamEngine) {
    let server = FakeEngine::start(health).await.unwrap();
    server.set_page("/v1/models", Script::json(200, &json!({ "data": [{ "id": "org/m" }] })));
    let client = Client::new(&server.uri(), &Settings::default()).unwrap();
    let card = Arc::new(discover(&client, None).await.unwrap().remove(0).card);
    let metrics = Metrics::new(&prometheus::Registry::new()).unwrap();
    (server, UpstreamEngine::new(client, UpstreamSettings::default(), card, metrics))
}

/// The connections of the requests for the health of a server.
fn probed(server: &FakeEngine) -> Vec<usize> {
    let health = server.requests().into_iter().filter(|request| request.uri.path() == "/health");
    health.map(|request| request.connection).collect()
}

#[tokio::test]
async fn a_server_that_answers_on_another_connection_is_healthy() {
    let dead = Script::default().after(NEVER);
    let (server, engine) = engine([dead, Script::json(200, &json!({}))]).await;
    timeout(SOON, engine.probe()).await.expect("an answer").unwrap();
    assert_eq!(probed(&server), [0, 1], "the open connection, and a new one");
    timeout(SOON, server.cancelled(1)).await.expect("the first probe ends");
}

#[tokio::test]
async fn a_server_that_does_not_answer_on_a_new_connection_either_is_not_healthy() {
    let (server, engine) = engine([]).await;
    server.set_page("/health", Script::default().after(NEVER));
    assert!(timeout(Duration::from_secs(3), engine.probe()).await.is_err());
    assert_eq!(probed(&server), [0, 1]);
    timeout(SOON, server.cancelled(2)).await.expect("both probes end with their caller");
    server.set_page("/health", Script::json(500, &json!({})));
    assert!(matches!(timeout(SOON, engine.probe()).await.unwrap(), Err(Error::Failed(_))));
    drop(server);
}
