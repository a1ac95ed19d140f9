//! The admin API of a worker process, and reloads of its configuration.

use super::*;
use reqwest::Method;

/// A request to the admin API of a process: status and body.
async fn admin(process: &Process, method: Method, path: &str, body: &str) -> (u16, Value) {
    let url = format!("{}/admin{path}", process.client.admin.as_ref().unwrap());
    let request = client().request(method, url).header("x-blockyard-admin", "1").body(body.to_owned());
    let answer = request.send().await.unwrap();
    (answer.status().as_u16(), answer.json().await.unwrap())
}

/// Waits until a frontend knows so many workers, not more and not fewer.
async fn until_exactly(frontend: &Process, count: usize) {
    while (frontend.client.metric("blockyard_router_workers", "").await - count as f64).abs() > 0.5 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// The value of a key of the running configuration.
async fn value(process: &Process, key: &str) -> Value {
    admin(process, Method::GET, "/config", "").await.1["config"][key]["value"].clone()
}

/// Waits for a reload, and returns its report.
async fn reloaded(process: &Process, trigger: &str, outcome: &str) -> Value {
    loop {
        let report = admin(process, Method::GET, "/config", "").await.1["reload"].clone();
        if report["trigger"] == trigger && report["outcome"] == outcome {
            return report;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_reloads_its_configuration_while_it_serves() {
    let Some(cluster) = Cluster::new() else { return };
    let file = cluster.folder.path().join("worker.toml");
    std::fs::write(&file, "[engine]\nmax_num_seqs = 4\n").unwrap();
    let more = ["--config", file.to_str().unwrap(), "--set", "admin.listen=127.0.0.1:0"];
    let worker = cluster.worker_at(&cluster.seat("a"), &more).await;
    let frontend = cluster.frontend().await;
    let request = greedy(1, 1500);
    let mut stream = Streamed::start(&frontend, &request).await;
    stream.read_more(100).await;

    std::fs::write(&file, "[engine]\nmax_num_seqs = 3\n[tiers]\ng2 = \"off\"\n[log]\nfilter = \"debug\"\n").unwrap();
    let report = reloaded(&worker, "file", "applied").await;
    assert_eq!(report["applied"], json!(["engine.max_num_seqs", "log.filter"]));
    // Flags are stronger than the file, so `tiers.g2` is what it was.
    assert_eq!((&report["needs_restart"], value(&worker, "tiers.g2").await), (&json!([]), json!("32MiB")));
    assert_eq!(value(&worker, "engine.max_num_seqs").await, 3);

    worker.signal("HUP");
    reloaded(&worker, "SIGHUP", "unchanged").await;

    // A key that is wrong, and one that needs a restart.
    std::fs::write(&file, "[engine]\nmax_num_seqs = 0\n[log]\nfilter = \"info\"\n").unwrap();
    let (status, report) = admin(&worker, Method::POST, "/reload", "").await;
    assert_eq!((status, report["outcome"].as_str()), (422, Some("rejected")));
    assert!(report["error"].as_str().unwrap().contains("engine.max_num_seqs"), "{report}");
    assert_eq!(value(&worker, "log.filter").await, "debug", "all or nothing");
    std::fs::write(&file, "shutdown_timeout = \"9s\"\n[engine]\nmax_num_seqs = 5\n").unwrap();
    let (status, report) = admin(&worker, Method::POST, "/reload", "").await;
    assert_eq!((status, &report["applied"]), (200, &json!(["engine.max_num_seqs", "log.filter"])));
    assert_eq!(report["needs_restart"], json!(["shutdown_timeout"]));
    let rejected = worker.client.metric("blockyard_config_reloads_total", "rejected").await;
    assert!(rejected >= 1.0, "{rejected}");

    let texts = stream.read_to_the_end().await;
    let undisturbed = Streamed::start(&frontend, &request).await.read_to_the_end().await;
    assert!(texts == undisturbed, "{texts:?}\n{undisturbed:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_operator_drains_a_worker_for_all_frontends_and_looks_at_its_tiers() {
    let Some(cluster) = Cluster::new() else { return };
    let with_admin = ["--set", "admin.listen=127.0.0.1:0"];
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let (first, second) = tokio::join!(cluster.worker_at(&first, &with_admin), cluster.worker_at(&second, &with_admin));
    let (left, right) = tokio::join!(cluster.frontend(), cluster.frontend());
    let (_, listed) = admin(&first, Method::GET, "/workers", "").await;
    let status = |cordoned: bool, requests: u32| {
        json!({"worker": listed[0]["worker"], "role": "both", "cordoned": cordoned, "registered": !cordoned,
            "requests": requests})
    };
    assert_eq!(listed, json!([status(false, 0)]));
    let path = |verb: &str| format!("/workers/{}/{verb}", listed[0]["worker"].as_str().unwrap());
    for frontend in [&left, &right] {
        until_exactly(frontend, 2).await;
    }

    // With a running request the drain does not end in time.
    let mut stream = Streamed::start(&left, &greedy(1, 1000)).await;
    stream.read_more(100).await;
    let is_here = first.client.metric("blockyard_worker_requests_running", "").await > 0.0;
    let (code, report) = admin(&first, Method::POST, &path("drain?timeout=10ms"), "").await;
    let running = report["requests"].as_u64().unwrap();
    assert!(code == 200 || running == 1 && is_here, "{code} {report}");
    for frontend in [&left, &right] {
        until_exactly(frontend, 1).await;
    }
    let (ready, body) = first.client.get("/ready").await;
    assert!(!ready && body.contains("cordoned"), "{body}");
    let computed = async || first.client.metric("blockyard_worker_prompt_tokens_computed_total", "").await;
    let before = computed().await;
    for (frontend, seed) in [(&left, 2), (&right, 3), (&left, 4), (&right, 5)] {
        frontend.client.complete(&prompt(seed)).await.unwrap();
    }
    assert!((computed().await - before).abs() < 0.5, "no frontend sends it requests");
    stream.read_to_the_end().await;
    assert_eq!(admin(&first, Method::POST, &path("drain"), "").await, (200, status(true, 0)));

    assert_eq!(admin(&first, Method::POST, &path("uncordon"), "").await.0, 200);
    for frontend in [&left, &right] {
        until_exactly(frontend, 2).await;
    }
    assert!(first.client.get("/ready").await.0);
    let (_, others) = admin(&second, Method::GET, "/workers", "").await;
    let cordon = format!("/workers/{}/cordon", others[0]["worker"].as_str().unwrap());
    assert_eq!(admin(&second, Method::POST, &cordon, "").await.1["cordoned"], true);
    for frontend in [&left, &right] {
        until_exactly(frontend, 1).await;
        frontend.client.complete(&prompt(6)).await.unwrap();
    }
    assert!(computed().await > before, "it serves again");
    let (_, tiers) = admin(&first, Method::GET, "/index", "").await;
    let g1 = tiers.as_array().unwrap().iter().find(|tier| tier["tier"] == "g1").unwrap();
    assert!(g1["actual"]["blocks"].as_u64().unwrap() > 0 && g1["indexed"].is_null(), "no router is here: {tiers}");

    assert_eq!(admin(&first, Method::POST, "/workers/w1x/cordon", "").await.0, 404);
    assert_eq!(admin(&first, Method::POST, &path("drain?timeout=soon"), "").await.0, 400);
    let (code, filter) = admin(&first, Method::PUT, "/log-filter", "info,kvbm=debug").await;
    assert_eq!((code, filter), (200, json!({"value": "info,kvbm=debug", "origin": "admin API"})));
    let (code, refused) = admin(&first, Method::PUT, "/log-filter", "kvbm=loud").await;
    assert!(code == 422 && refused["error"]["message"].as_str().unwrap().contains("log.filter"), "{refused}");
    assert_eq!(value(&first, "log.filter").await, "info,kvbm=debug");
    for line in ["worker registered", "worker cordoned: it is being deregistered", "worker is registered again"] {
        assert_eq!(first.log().matches(line).count(), 1, "{line}: {}", first.log());
    }
    let unguarded =
        client().get(format!("{}/admin/config", first.client.admin.as_ref().unwrap())).send().await.unwrap();
    assert_eq!(unguarded.status().as_u16(), 403, "a web page cannot send the header");
}
