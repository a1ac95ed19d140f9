//! What happens when parts of a deployment do not reach each other, or a place of blocks fails.

use super::proxy::{Link, Of, Proxy};
use super::*;
use axum::Router;
use axum::http::StatusCode;

#[tokio::test(flavor = "multi_thread")]
async fn prompts_are_computed_while_prefill_workers_are_not_reached() {
    let Some(cluster) = Cluster::new() else { return };
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let proxy = Proxy::before(first.listen.clone(), Of::Http1).await;
    let advertise = format!("http://{}", proxy.address);
    let prefill = cluster.worker_at(&first, &["--workers", "prefill:1", "--advertise", &advertise]).await;
    let decode = cluster.worker_at(&second, &["--workers", "decode:1"]).await;
    let frontend = cluster.frontend_with(&["--set", "router.disaggregation=always"]).await;
    until_workers(&frontend, 2).await;
    let handed_over = async || decode.client.metric("blockyard_tier_transfer_bytes_total", "tier=\"peer\"").await;
    let mut seeds = 0..;
    let mut until_handed_over = async || {
        let before = handed_over().await;
        while handed_over().await <= before {
            frontend.client.complete(&prompt(seeds.next().unwrap())).await.unwrap();
        }
    };
    until_handed_over().await;
    proxy.set(Link::Severed);
    let computed = async || decode.client.metric("blockyard_worker_prompt_tokens_computed_total", "").await;
    let (before, mut answers) = (computed().await, Vec::new());
    for seed in 1000..1004 {
        answers.push(frontend.client.complete(&prompt(seed)).await.unwrap().0["text"].clone());
    }
    assert!(computed().await - before >= 4.0 * 256.0, "the decode worker computes the prompts");
    proxy.set(Link::Passing);
    until_handed_over().await;
    for (seed, text) in (1000..).zip(answers) {
        assert_eq!(frontend.client.complete(&prompt(seed)).await.unwrap().0["text"], text);
    }
    drop(prefill);
}

/// The part of a worker that is in an object store: a prefix of its own in the bucket of the tests.
fn in_store(command: &mut Command, endpoint: &str, name: &str) {
    command.args(["--g4", &format!("s3://kvbmtests/{name}"), "--set", &format!("tiers.g4.endpoint={endpoint}")]);
    command.env("AWS_ACCESS_KEY_ID", "test").env("AWS_SECRET_ACCESS_KEY", "test");
}

#[tokio::test(flavor = "multi_thread")]
async fn requests_are_served_while_the_object_store_is_down() {
    let (Some(cluster), Ok(store)) = (Cluster::new(), std::env::var("KVBM_TEST_MOTO")) else { return };
    let proxy = Proxy::before(store.strip_prefix("http://").unwrap().to_owned(), Of::All).await;
    let endpoint = format!("http://{}", proxy.address);
    let name = cluster.nats[1].replace('=', "-");
    let worker = |seat: &Seat| {
        let mut command = cluster.worker_command(seat, &["--set", "tiers.g3=off"]);
        in_store(&mut command, &endpoint, &name);
        command
    };
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let mut before = Process::launch(worker(&first)).await;
    let frontend = cluster.frontend().await;
    let stored = async |worker: &Process| worker.client.metric("blockyard_tier_blocks", "tier=\"g4\"").await;
    let until_stored = async |worker: &Process, count: f64| {
        while stored(worker).await < count {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let (choice, _) = frontend.client.complete(&prompt(1)).await.unwrap();
    until_stored(&before, 18.0).await;
    let until_degraded = async |worker: &Process, expected: bool| {
        while worker.client.get("/ready").await.1.contains("tiers.g4: ") != expected {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    };
    let clients = SteadyClients::start(&frontend.client, 3);
    proxy.set(Link::Closed);
    until_degraded(&before, true).await;
    for seed in 2..6 {
        frontend.client.complete(&prompt(seed)).await.unwrap();
    }
    assert!(before.client.get("/ready").await.0, "it serves without the store");
    // A worker starts without the store too.
    let after = Process::launch(worker(&second)).await;
    until_degraded(&after, true).await;
    proxy.set(Link::Passing);
    until_degraded(&before, false).await;
    until_degraded(&after, false).await;
    frontend.client.complete(&prompt(6)).await.unwrap();
    clients.stop().await;
    before.stop();
    // Another process has the blocks of the one that stopped.
    let (again, _) = until_cached(&frontend, &prompt(1)).await;
    assert_eq!(again["text"], choice["text"]);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_store_denies_access_serves_without_it() {
    let Some(cluster) = Cluster::new() else { return };
    let denied = "<Error><Code>AccessDenied</Code><Message>Access Denied</Message></Error>";
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let endpoint = format!("http://{}", listener.local_addr().unwrap());
    let denies = Router::new().fallback(async move || (StatusCode::FORBIDDEN, denied));
    let server = tokio::spawn(async move { axum::serve(listener, denies).await });
    let mut command = cluster.worker_command(&cluster.seat("a"), &[]);
    in_store(&mut command, &endpoint, "denied");
    let worker = Process::launch(command).await;
    let frontend = cluster.frontend().await;
    frontend.client.complete(&prompt(1)).await.unwrap();
    let (ready, body) = worker.client.get("/ready").await;
    assert!(ready && body.contains("tiers.g4: "), "{body}");
    let log = worker.log();
    assert!(log.contains("starting without s3://kvbmtests/denied"), "{log}");
    server.abort();
}

/// Faults of the file system below a folder, for one process: see `tests/it/faults.c`.
struct DiskFaults {
    library: PathBuf,
    profile: PathBuf,
}

impl DiskFaults {
    fn built(cluster: &Cluster) -> Self {
        let (library, profile) = (cluster.folder.path().join("faults.so"), cluster.folder.path().join("faults"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/faults.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", "-o"]).args([&library, &source]).arg("-ldl");
        assert!(compiler.status().unwrap().success());
        Self { library, profile }
    }

    fn apply(&self, command: &mut Command, folder: &str) {
        command.env("LD_PRELOAD", &self.library).env("FAULTS_FOLDER", folder).env("FAULTS_PROFILE", &self.profile);
    }

    fn set(&self, profile: &str) {
        std::fs::write(&self.profile, profile).unwrap();
    }

    fn end(&self) {
        std::fs::remove_file(&self.profile).unwrap();
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_disk_dies_goes_on_without_it() {
    let Some(cluster) = Cluster::new() else { return };
    let faults = DiskFaults::built(&cluster);
    let (first, second) = (cluster.seat("a"), cluster.seat("b"));
    let mut command = cluster.worker_command(&first, &[]);
    faults.apply(&mut command, &first.data);
    let (mut dies, _other) = tokio::join!(Process::launch(command), cluster.worker(&second));
    let frontend = cluster.frontend().await;
    until_workers(&frontend, 2).await;
    let mut texts = Vec::new();
    for seed in 0..8 {
        texts.push(frontend.client.complete(&prompt(seed)).await.unwrap().0["text"].clone());
    }
    let clients = SteadyClients::start(&frontend.client, 3);
    // Of 1,000 calls all fail.
    faults.set("1 1000 1000 0 0 0");
    let mut seed = 100;
    while !dies.log().contains("cannot write to G3") {
        frontend.client.complete(&prompt(seed)).await.unwrap();
        seed += 1;
    }
    // Reads fail too: after the third one the folder is down, which `/ready` says instead.
    let (ready, body) = dies.client.get("/ready").await;
    assert!(ready && body.contains("tiers.g3: "), "{body}");
    assert!(dies.client.metric("blockyard_tier_path_writable", "").await < 0.5);
    for (seed, text) in (0..).zip(texts) {
        assert_eq!(frontend.client.complete(&prompt(seed)).await.unwrap().0["text"], text);
    }
    assert!(dies.client.get("/ready").await.0 && frontend.client.get("/ready").await.0);
    dies.stop();
    clients.stop().await;
    frontend.client.complete(&prompt(1)).await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_whose_disk_is_full_is_degraded_until_it_can_write() {
    let Some(cluster) = Cluster::new() else { return };
    let seat = cluster.seat("a");
    let faults = DiskFaults::built(&cluster);
    let mut command = cluster.worker_command(&seat, &[]);
    faults.apply(&mut command, &seat.data);
    let worker = Process::launch(command).await;
    let frontend = cluster.frontend().await;
    let in_g3 = async || worker.client.metric("blockyard_tier_blocks", "tier=\"g3\"").await;
    let writable = async || worker.client.metric("blockyard_tier_path_writable", "").await;
    let text = frontend.client.complete(&prompt(1)).await.unwrap().0["text"].clone();
    while in_g3().await < 18.0 {
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    assert!((writable().await - 1.0).abs() < 0.5);
    // Of 1,000 writes all fail for lack of space; reads work.
    faults.set("1 0 1000 0 0 0");
    let mut seed = 100;
    let degraded = loop {
        frontend.client.complete(&prompt(seed)).await.unwrap();
        seed += 1;
        let (ready, body) = worker.client.get("/ready").await;
        assert!(ready, "{body}");
        if body.contains("degraded") {
            break body;
        }
    };
    let reason = format!("tiers.g3: cannot write to {}/g3: No space left on device", seat.data);
    assert!(degraded.contains(&reason), "{degraded}");
    assert!(writable().await < 0.5 && worker.client.metric("blockyard_tier_path_up", "").await > 0.5);
    assert_eq!(frontend.client.complete(&prompt(1)).await.unwrap().0["text"], text, "what is stored is read");
    faults.end();
    while worker.client.get("/ready").await.1.contains("degraded") {
        frontend.client.complete(&prompt(seed)).await.unwrap();
        seed += 1;
    }
    assert!((writable().await - 1.0).abs() < 0.5);
    assert!(worker.log().contains("writing to G3 works again"));
}
