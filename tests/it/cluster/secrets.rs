//! The secret of a deployment, replaced while requests are served.

use super::*;

const FORMER: &str = "0123456789abcdef0123456789abcdef";
const NEW: &str = "fedcba9876543210fedcba9876543210";
const RELOADS: &str = "blockyard_cluster_secret_reloads_total";

/// Writes the file of each process, one after the other, and waits each time until the process has loaded it.
async fn step(processes: [(&Process, &Path); 3], secrets: &[&str]) {
    for (process, file) in processes {
        let before = process.client.metric(RELOADS, "applied").await;
        std::fs::write(file, secrets.join("\n")).unwrap();
        while process.client.metric(RELOADS, "applied").await <= before {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn no_request_fails_while_the_secret_is_replaced() {
    let Some(mut cluster) = Cluster::new() else { return };
    let folder = cluster.folder.path().to_owned();
    let file = |name: &str, secret: &str| {
        let file = folder.join(name);
        std::fs::write(&file, secret).unwrap();
        file
    };
    let files = ["secret-of-prefill", "secret-of-decode", "secret-of-frontend"].map(|name| file(name, FORMER));
    cluster.secret.clone_from(&files[0]);
    let prefill = cluster.worker_at(&cluster.seat("a"), &["--workers", "prefill:1"]).await;
    cluster.secret.clone_from(&files[1]);
    let decode = cluster.worker_at(&cluster.seat("b"), &["--workers", "decode:1"]).await;
    cluster.secret.clone_from(&files[2]);
    let split = ["--set", "router.disaggregation=always"];
    let frontend = cluster.frontend_with(&split).await;
    until_workers(&frontend, 2).await;
    let clients = SteadyClients::start(&frontend.client, 3);

    let processes = [(&prefill, &*files[0]), (&decode, &*files[1]), (&frontend, &*files[2])];
    step(processes, &[FORMER, NEW]).await;
    step(processes, &[NEW, FORMER]).await;
    // A process that has only the new secret uses workers that have registered with it.
    cluster.secret = file("secret-of-late", NEW);
    let late = cluster.frontend_with(&split).await;
    until_workers(&late, 2).await;
    step(processes, &[NEW]).await;
    late.client.complete(&prompt(4000)).await.unwrap();

    // A file without a secret changes nothing.
    std::fs::write(&files[2], "\n").unwrap();
    while frontend.client.metric(RELOADS, "rejected").await < 1.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Blocks come from the memory of the other worker, with the new secret.
    let handed_over = async || decode.client.metric("blockyard_tier_transfer_bytes_total", "tier=\"peer\"").await;
    let before = handed_over().await;
    while handed_over().await <= before {
        clients.check();
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    clients.stop().await;

    // A rejected call could have been repeated elsewhere, or its prompt computed.
    for process in [&prefill, &decode, &frontend, &late] {
        let log = process.log();
        assert!(!log.contains("status 401") && !log.contains(FORMER) && !log.contains(NEW), "{log}");
    }
    assert!(frontend.client.metric("blockyard_nats_refused_total", "kind=\"instance\"").await < 1.0);
    // The log is written by another thread than the one that counts.
    while !frontend.log().contains("cluster.secret_file not reloaded") {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    for (secret, status) in [(FORMER, 401), (NEW, 404)] {
        let request = client().post(format!("{}/workers/1/generate", prefill.client.url));
        let mac = worker::remote::Secret::new(secret).unwrap().header(&prefill.client.url);
        let request = request.header("authorization", mac).header("x-blockyard-protocol", "3");
        assert_eq!(request.send().await.unwrap().status().as_u16(), status);
    }
}
