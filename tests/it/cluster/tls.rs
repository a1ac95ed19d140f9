//! TLS between frontends and workers, and between workers.

#[path = "../../../transport/src/tests/authority.rs"]
mod authority;

use super::*;
use authority::Authority;

/// The settings of a process: its certificate, the authority of the workers, and that of the clients.
fn settings(identity: Option<&[PathBuf; 2]>, ca: Option<&Path>, client_ca: Option<&Path>) -> Vec<String> {
    let set = |key: &str, path: &Path| ["--set".to_owned(), format!("cluster.tls.{key}={}", path.display())];
    let identity = identity
        .into_iter()
        .flat_map(|[certificate, key]| [set("cert_file", certificate), set("key_file", key)].concat());
    let ca = ca.into_iter().flat_map(|path| set("ca_file", path));
    identity.chain(ca).chain(client_ca.into_iter().flat_map(|path| set("client_ca_file", path))).collect()
}

fn words(settings: &[String]) -> Vec<&str> {
    settings.iter().map(String::as_str).collect()
}

/// A client that trusts an authority and shows no certificate.
fn https(authority: &Authority) -> reqwest::Client {
    let _ = client();
    let root = reqwest::Certificate::from_pem(authority.pem().as_bytes()).unwrap();
    client_builder().add_root_certificate(root).build().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_show_each_other_certificates_and_reject_others() {
    let Some(cluster) = Cluster::new() else { return };
    let folder = cluster.folder.path();
    let (ours, other) = (Authority::new(), Authority::new());
    let (ca, other_ca) = (ours.write(&folder.join("ca.pem")), other.write(&folder.join("other-ca.pem")));
    let of_worker = ours.sign(folder, "worker", &["127.0.0.1"], false);
    let worker = settings(Some(&of_worker), Some(&ca), Some(&ca));
    let launch = async |name: &str, role: &str| {
        let seat = cluster.seat(name);
        let command = cluster.worker_command(&seat, &[&words(&worker)[..], &["--workers", role]].concat());
        Process::launch_with_tls(command, https(&ours)).await
    };
    let (prefill, decode) = (launch("a", "prefill:1").await, launch("b", "decode:1").await);
    let of_frontend = ours.sign(folder, "frontend", &["frontend"], false);
    let known = settings(Some(&of_frontend), Some(&ca), None);
    let frontend =
        cluster.frontend_with(&[&words(&known)[..], &["--set", "router.disaggregation=always"]].concat()).await;
    until_workers(&frontend, 2).await;
    let handed_over = async || decode.client.metric("blockyard_tier_transfer_bytes_total", "tier=\"peer\"").await;
    let mut seeds = 0..;
    while handed_over().await == 0.0 {
        frontend.client.complete(&prompt(seeds.next().unwrap())).await.unwrap();
    }
    until_logs_are_read(&frontend, "http").await;
    assert!(log_reads(&frontend, "nats").await < 1.0, "{}", frontend.log());
    // Callers that are no process of the deployment.
    let plain = client().get(prefill.client.url.replace("https", "http")).send().await.unwrap();
    assert_eq!(plain.status().as_u16(), 400);
    assert!(plain.text().await.unwrap().contains("speaks HTTPS"));
    for path in ["generate", "blocks"] {
        let request = https(&ours).post(format!("{}/workers/1/{path}", prefill.client.url));
        let request = request.header("authorization", "Bearer 0123456789abcdef0123456789abcdef");
        let response = request.header("x-blockyard-protocol", "1").send().await.unwrap();
        assert_eq!(response.status().as_u16(), 401);
        assert!(response.text().await.unwrap().contains("without a client certificate"));
    }
    // Frontends whose certificates are wrong.
    let foreign = other.sign(folder, "foreign", &["foreign"], false);
    let expired = ours.sign(folder, "expired", &["expired"], true);
    for (settings, expected) in [
        (settings(None, None, None), "set cluster.tls.ca_file"),
        (settings(Some(&of_frontend), Some(&other_ca), None), "signed by no authority in cluster.tls.ca_file = "),
        (settings(None, Some(&ca), None), "came without a client certificate"),
        (settings(Some(&foreign), Some(&ca), None), "refuses the certificate of this process"),
        (settings(Some(&expired), Some(&ca), None), "the certificate of this process has expired"),
    ] {
        let wrong = cluster.frontend_with(&words(&settings)).await;
        let answer = wrong.client.ask(&prompt(1)).await.unwrap();
        let message = answer["error"]["message"].as_str().unwrap_or_else(|| panic!("{expected}: {answer}"));
        assert!(message.ends_with("no worker of the model `tiny` answers now"), "the log has the cause: {message}");
        // A thread of its own writes the log.
        while !wrong.log().contains("request failed on a worker") {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert!(wrong.log().contains(expected), "{expected}: {}", wrong.log());
        // Which blocks the workers have it reads over NATS.
        until_logs_are_read(&wrong, "nats").await;
        assert!(log_reads(&wrong, "http").await < 1.0);
    }
    assert!(prefill.log().contains("the certificate of a client is not accepted"), "{}", prefill.log());
}

#[tokio::test(flavor = "multi_thread")]
async fn certificates_and_authorities_are_replaced_while_requests_are_served() {
    let Some(cluster) = Cluster::new() else { return };
    let folder = cluster.folder.path();
    let (before, after) = (Authority::new(), Authority::new());
    let ca = before.write(&folder.join("ca.pem"));
    let of_worker = before.sign(folder, "worker", &["127.0.0.1"], false);
    let of_frontend = before.sign(folder, "frontend", &["frontend"], false);
    let worker = settings(Some(&of_worker), Some(&ca), Some(&ca));
    let command = cluster.worker_command(&cluster.seat("a"), &words(&worker));
    // It trusts both authorities, as the frontend does during the rotation.
    let both = reqwest::Certificate::from_pem_bundle((before.pem() + &after.pem()).as_bytes()).unwrap();
    let http = both.into_iter().fold(client_builder(), reqwest::ClientBuilder::add_root_certificate);
    let worker = Process::launch_with_tls(command, http.build().unwrap()).await;
    let frontend = cluster.frontend_with(&words(&settings(Some(&of_frontend), Some(&ca), None))).await;
    let mut stream = Streamed::start(&frontend, &greedy(1, 2000)).await;
    stream.read_more(1).await;
    let reloads = async |process: &Process, outcome: &str| {
        process.client.metric("blockyard_cluster_certificate_reloads_total", outcome).await
    };
    // A worker has two uses of the files: as server and as client.
    let until_applied = async |of_worker: f64, of_frontend: f64| {
        while reloads(&worker, "applied").await < of_worker || reloads(&frontend, "applied").await < of_frontend {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    std::fs::write(&ca, before.pem() + &after.pem()).unwrap();
    until_applied(2.0, 1.0).await;
    after.sign(folder, "worker", &["127.0.0.1"], false);
    after.sign(folder, "frontend", &["frontend"], false);
    until_applied(4.0, 2.0).await;
    after.write(&ca);
    until_applied(6.0, 3.0).await;
    // A new process knows the new authority only.
    let new = cluster.frontend_with(&words(&settings(Some(&of_frontend), Some(&ca), None))).await;
    new.client.complete(&prompt(2)).await.unwrap();
    std::fs::write(&of_frontend[0], "no certificate").unwrap();
    while reloads(&frontend, "rejected").await < 1.0 {
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
    stream.read_to_the_end().await;
    frontend.client.complete(&prompt(3)).await.unwrap();
    assert!(frontend.log().contains("not reloaded; the previous one stays in effect"));
}
