//! Which program has a port: another Blockyard says so, and whether it is shutting down. An admin API is recognised by
//! its refusal of requests without its header, and the port of a worker by what it says to clients.

use crate::config::Listen;
use http::{StatusCode, Uri};
use std::fmt;
use std::time::Duration;
use upstream::ask::{self, AnswerLimits, ServerAnswer};
use upstream::relay::client::{Client, Settings};

/// Limits of an answer of the program. Blockyard's answers have 20 to 300 bytes.
const LIMITS: AnswerLimits = AnswerLimits { bytes: 4096, time: Duration::from_secs(2) };

/// A Blockyard that has a port.
pub(crate) struct RunningBlockyard {
    /// Unless it takes a key to read, or the port is that of an admin API.
    version: Option<String>,
    pub(crate) is_shutting_down: bool,
}

impl fmt::Display for RunningBlockyard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (before, after) = if self.is_shutting_down { ("a", " that is shutting down") } else { ("a running", "") };
        match &self.version {
            Some(version) => write!(f, "{before} Blockyard {version}{after}"),
            None => write!(f, "{before} Blockyard{after}"),
        }
    }
}

/// The Blockyard that answers at an address.
pub(super) async fn blockyard_at(at: &Listen) -> Option<RunningBlockyard> {
    let host = match at.host.as_str() {
        "0.0.0.0" => "127.0.0.1".to_owned(),
        "::" => "[::1]".to_owned(),
        host if host.contains(':') => format!("[{host}]"),
        host => host.to_owned(),
    };
    let address: Uri = format!("http://{host}:{}", at.port).parse().ok()?;
    let client = Client::new(&address, &Settings::default()).ok()?;
    let get = async |path| ask::get(&client, None, path, LIMITS).await.ok();
    let json = |answer: &ServerAnswer| serde_json::from_slice::<serde_json::Value>(&answer.body).ok();
    let live = get("/live").await?;
    let answer = json(&live)?;
    if answer["error"]["code"] == "admin_header_required" {
        return Some(RunningBlockyard { version: None, is_shutting_down: false });
    }
    if answer["status"] != "ok" {
        return None;
    }
    // Every answer of the API has the header. The port of a worker says what it is.
    if live.header("x-request-id").is_none() {
        let elsewhere = json(&get("/").await?)?;
        elsewhere["error"]["message"].as_str().filter(|message| message.contains(frontend::WORKER_PORT))?;
    }
    let version = get("/version").await?;
    let version = match version.status {
        StatusCode::UNAUTHORIZED => None,
        _ => Some(json(&version)?["version"].as_str()?.to_owned()),
    };
    let ready = get("/ready").await.as_ref().and_then(json);
    let is_shutting_down = ready.is_some_and(|ready| ready["error"]["code"] == "shutting_down");
    Some(RunningBlockyard { version, is_shutting_down })
}

#[cfg(test)]
mod tests {
    use super::*;
    use axum::{Json, Router, routing::get};
    use frontend::{Health, Server, Shutdown};
    use prometheus::Registry;
    use serde_json::json;
    use tokio::net::TcpListener;
    use worker::engine::Readiness;

    struct Ready;

    impl Health for Ready {
        fn readiness(&self) -> Readiness {
            Readiness::Ready
        }

        fn degraded(&self) -> Vec<String> {
            Vec::new()
        }
    }

    /// What is found at the port of an application.
    async fn found(app: Router) -> Option<String> {
        let server = Server::new(&frontend::Settings::default(), &Registry::new()).unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let at = Listen { host: "127.0.0.1".into(), port: listener.local_addr().unwrap().port() };
        let serving = tokio::spawn(async move { server.serve(listener, app, Shutdown::default()).await });
        let found = blockyard_at(&at).await;
        serving.abort();
        found.map(|blockyard| blockyard.to_string())
    }

    #[tokio::test]
    async fn ports_of_workers_and_of_the_admin_api_are_recognised() {
        let settings = frontend::Settings::default();
        let worker = frontend::internal_router(Router::new(), std::sync::Arc::new(Ready), Registry::new(), &settings);
        let version = env!("CARGO_PKG_VERSION");
        assert_eq!(found(worker).await, Some(format!("a running Blockyard {version}")));
        let admin = frontend::guard_admin(Router::new(), &settings);
        assert_eq!(found(admin).await.as_deref(), Some("a running Blockyard"));
        let other = Router::new().route("/live", get(async || Json(json!({"status": "ok"}))));
        assert_eq!(found(other).await, None);
    }
}
