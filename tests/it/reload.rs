//! Reloads of the configuration in a running program: by SIGHUP, by a change of the file, and by the admin API.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::Process;
use super::process::{client, program};
use serde_json::{Value, json};
use std::io::{BufRead, BufReader};
use std::process::{Command, Stdio};
use std::time::Duration;

async fn get(url: &str) -> Value {
    client().get(url).header("x-blockyard-admin", "1").send().await.unwrap().json().await.unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn reloads_by_file_signal_and_admin_api_keep_streams_alive() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("blockyard.toml");
    std::fs::write(&file, "[router]\npolicy = 'kv'\n").unwrap();
    let settings = ["--set", "admin.listen=127.0.0.1:0", "--set", "tiers.g3=off", "--set", "tiers.g1=32MiB"];
    let arguments = [&["--workers", "both:2", "--config", file.to_str().unwrap()], &settings[..]].concat();
    let process = Process::start(&folder.path().join("data"), &arguments, &[]).await;
    let url = process.client.url.clone();
    let admin = format!("{}/admin", process.client.admin.clone().unwrap());
    assert_eq!(get(&format!("{admin}/config")).await["reload"], Value::Null);

    let http = client();
    let body = json!({"model": "tiny", "prompt": [5, 6, 7], "max_tokens": 300, "stream": true, "ignore_eos": true});
    let mut stream = http.post(format!("{url}/v1/completions")).json(&body).send().await.unwrap();
    assert!(stream.chunk().await.unwrap().is_some());

    let reload_by = async |trigger: &str| {
        for _ in 0..15_000 {
            let config = get(&format!("{admin}/config")).await;
            if config["reload"]["trigger"] == trigger {
                return (config["reload"].clone(), config["config"]["router.policy"]["value"].clone());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        panic!("no reload by {trigger}");
    };
    std::fs::write(&file, "shutdown_timeout = '9s'\n[router]\npolicy = 'random'\n").unwrap();
    let (report, policy) = reload_by("file").await;
    assert_eq!((&report["outcome"], &report["applied"]), (&json!("applied"), &json!(["router.policy"])));
    assert_eq!((&report["needs_restart"], policy), (&json!(["shutdown_timeout"]), json!("random")));

    let kill = Command::new("kill").args(["-HUP", &process.id().to_string()]).status().unwrap();
    assert!(kill.success());
    let (report, _) = reload_by("SIGHUP").await;
    assert_eq!(report["outcome"], "unchanged", "the file watch has applied this content");
    let log = process.log();
    let is_warning = |line: &str| line.contains("after a restart") && line.contains("keys=shutdown_timeout");
    assert!(log.lines().any(is_warning), "{log}");

    std::fs::write(&file, "[router]\npolicy = 'randm'\n").unwrap();
    let answer = http.post(format!("{admin}/reload")).header("x-blockyard-admin", "1").send().await.unwrap();
    assert_eq!(answer.status(), 422);
    let report: Value = answer.json().await.unwrap();
    assert!(report["error"].as_str().unwrap().contains("router.policy = \"randm\""), "{report}");
    assert_eq!(get(&format!("{admin}/config")).await["config"]["router.policy"]["value"], "random");
    let degraded = async || get(&format!("{url}/ready")).await["degraded"].clone();
    let listed = degraded().await;
    assert!(listed[0].as_str().is_some_and(|problem| problem.contains("configuration was rejected")), "{listed}");
    std::fs::write(&file, "[router]\npolicy = 'random'\n").unwrap();
    let answer = http.post(format!("{admin}/reload")).header("x-blockyard-admin", "1").send().await.unwrap();
    assert_eq!((answer.status().as_u16(), degraded().await), (200, Value::Null), "until one is accepted");

    let rest = stream.text().await.unwrap();
    assert!(rest.contains(r#""finish_reason":"length""#) && rest.trim_end().ends_with("[DONE]"), "{rest}");
    let metrics = http.get(format!("{url}/metrics")).send().await.unwrap().text().await.unwrap();
    // Once or twice: the file watch may have read the same content.
    let rejected =
        metrics.lines().find_map(|line| line.strip_prefix(r#"blockyard_config_reloads_total{outcome="rejected"} "#));
    assert!(rejected.is_some_and(|count| count != "0"), "{metrics}");
}

/// A process reads keys and certificates of servers again on SIGHUP, so it must not lose one.
#[tokio::test(flavor = "multi_thread")]
async fn a_sighup_during_the_start_reloads_the_configuration_after_it() {
    // The start waits for the server until the connection is closed.
    let server = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("http://{}", server.local_addr().unwrap());
    let mut child = program(&["--listen", "127.0.0.1:0", "--upstream", &url])
        .stdout(Stdio::null())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let connection = server.accept().await.unwrap();
    let kill = Command::new("kill").args(["-HUP", &child.id().to_string()]).status().unwrap();
    assert!(kill.success());
    drop((connection, server));
    let log = BufReader::new(child.stderr.take().unwrap());
    let is_reloaded =
        tokio::task::spawn_blocking(|| log.lines().map_while(Result::ok).any(|line| line.contains("trigger=SIGHUP")));
    let is_reloaded = tokio::time::timeout(Duration::from_mins(1), is_reloaded).await;
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(is_reloaded.expect("a line of the reload").unwrap());
}
