//! The tier over real protocols: the tier contract, other processes, and faults, against servers behind sockets.
//!
//! Two S3 servers run in this process. `make test` starts others (`tests/servers/run.py`) and passes their addresses
//! in the environment; without them these tests print that they were skipped.

use super::access_logs;
use super::s3_server::{BUCKET, Conditions, KEYS, S3Server};
use super::*;
use object_store::{ObjectStoreExt, PutMode, PutOptions, PutPayload};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// A server under test, and a prefix of its own.
struct TestServer {
    location: StoreLocation,
    access: Access,
    server: Option<S3Server>,
}

impl TestServer {
    fn new(scheme: &str, endpoint: &str, variables: &[(&str, &str)], server: Option<S3Server>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Test processes share servers, so each has its own prefix. Short, because one of the servers uses keys as
        // file names.
        let prefix = format!("p{}n{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let location = format!("{scheme}://{BUCKET}/{prefix}").parse().unwrap();
        let endpoint = Some(endpoint.parse().unwrap());
        let region = None;
        let credentials = Credentials::from_environment(variables.iter().copied());
        Self { location, access: Access { endpoint, region, credentials }, server }
    }

    fn s3(endpoint: &str, server: Option<S3Server>) -> Self {
        let keys = [("AWS_ACCESS_KEY_ID", KEYS.0), ("AWS_SECRET_ACCESS_KEY", KEYS.1)];
        Self::new("s3", endpoint, &keys, server)
    }

    fn in_process(conditions: Conditions) -> Self {
        let server = S3Server::start(conditions);
        Self::s3(&server.endpoint.clone(), Some(server))
    }

    /// A server that `make test` started.
    fn outside(name: &str, make: impl Fn(&str) -> Self) -> Option<Self> {
        let Ok(endpoint) = std::env::var(name) else {
            // Not `eprintln`: the test harness captures it.
            let _ = writeln!(std::io::stderr(), "SKIPPED: no server in {name}; `make test` starts one");
            return None;
        };
        Some(make(&endpoint))
    }

    fn open(&self) -> (Arc<ObjectTier>, Arc<EventLog>) {
        self.open_with(Settings::default())
    }

    fn open_with(&self, settings: Settings) -> (Arc<ObjectTier>, Arc<EventLog>) {
        let events = Arc::new(EventLog::new(Epoch(1)));
        (ObjectTier::open_location(&self.location, &self.access, settings, events.clone(), None).unwrap(), events)
    }

    /// The store itself, and every object in it.
    async fn raw(&self) -> (Arc<dyn ObjectStore>, Vec<object_store::path::Path>) {
        let StoreLocation::Cloud { prefix, .. } = &self.location else { unreachable!("a cloud") };
        let store = self.location.client(&self.access, Duration::from_secs(30)).unwrap().unwrap();
        let listed: Vec<_> = store.list(Some(prefix)).map(|meta| meta.unwrap().location).collect().await;
        (store, listed)
    }
}

/// All tests against the server of the expression.
macro_rules! on {
    ($name:ident, $make:expr) => {
        mod $name {
            use super::*;

            fn server() -> Option<TestServer> {
                ($make).into()
            }

            conformance::suite!(async || {
                server().map(|server| {
                    let (tier, events) = server.open();
                    Subject::with_resources(tier, events, server)
                })
            });

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn blocks_are_found_by_others_and_after_a_restart() {
                if let Some(server) = server() {
                    super::blocks_are_found_by_others_and_after_a_restart(server).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn missing_and_truncated_objects_are_counted_misses() {
                if let Some(server) = server() {
                    super::missing_and_truncated_objects_are_counted_misses(server).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_large_object_is_uploaded_in_parts() {
                if let Some(server) = server() {
                    super::a_large_object_is_uploaded_in_parts(server).await;
                }
            }

            #[tokio::test]
            async fn read_objects_are_kept_and_scans_are_incremental() {
                if let Some(server) = server() {
                    let StoreLocation::Cloud { prefix, .. } = &server.location else { unreachable!("a cloud") };
                    let prefix = prefix.to_string();
                    access_logs::read_objects_are_kept_and_scans_are_incremental(server.raw().await.0, &prefix).await;
                }
            }

            #[tokio::test]
            async fn a_missing_bucket_is_refused_with_the_reason() {
                if let Some(server) = server() {
                    super::a_missing_bucket_is_refused_with_the_reason(server).await;
                }
            }
        }
    };
}

on!(s3, TestServer::in_process(Conditions::Honoured));
on!(s3_that_ignores_conditions, TestServer::in_process(Conditions::Ignored));
on!(moto, TestServer::outside("KVBM_TEST_MOTO", |endpoint| TestServer::s3(endpoint, None)));
on!(
    azurite,
    TestServer::outside("KVBM_TEST_AZURITE", |endpoint| {
        // The documented account and key of every Azurite.
        let account = ("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1");
        let key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
        TestServer::new("az", endpoint, &[account, ("AZURE_STORAGE_ACCOUNT_KEY", key)], None)
    })
);
// Google's XML API equals S3's; the test server checks no signature.
on!(
    google_on_moto,
    TestServer::outside("KVBM_TEST_MOTO", |endpoint| {
        TestServer::new("gs", endpoint, &[("GOOGLE_BEARER_TOKEN", "any")], None)
    })
);

async fn blocks_are_found_by_others_and_after_a_restart(server: TestServer) {
    let (reader, learned) = server.open();
    reader.wait_until_ready().await;
    let (writer, _) = server.open();
    let blocks = chain(1, 40);
    store(&*writer, blocks.clone()).await;
    let found = async {
        while reader.holds(fingerprint(), &hashes(&blocks)) < blocks.len() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), found).await.expect("a running process learns of it");
    assert!(all_found(&load(&*reader, fingerprint(), hashes(&blocks)).await));
    drop((reader, writer));
    let (later, announces) = server.open();
    later.wait_until_ready().await;
    assert_eq!(announced(&announces, Level::G4), announced(&learned, Level::G4));
    assert!(all_found(&load(&*later, fingerprint(), hashes(&blocks)).await));
}

async fn missing_and_truncated_objects_are_counted_misses(server: TestServer) {
    let (tier, events) = server.open_with(Settings { object_bytes: 15_000, object_blocks: 1, ..Settings::default() });
    let blocks = chain(1, 30);
    store(&*tier, blocks.clone()).await;
    let (raw, listed) = server.raw().await;
    let objects: Vec<_> = listed.iter().filter(|path| path.as_ref().contains("/blocks/")).collect();
    assert!(objects.len() >= 3, "{listed:?}");
    raw.delete(objects[0]).await.unwrap();
    let whole = raw.get(objects[1]).await.unwrap().bytes().await.unwrap();
    raw.put(objects[1], PutPayload::from(whole.slice(..100))).await.unwrap();
    let mut loading = tier.load(fingerprint(), hashes(&blocks));
    let mut missing = 0;
    let mut valid = 0;
    while let Some((_, answer)) = loading.next().await {
        *if answer.expect("a missing block is not an error").is_some() { &mut valid } else { &mut missing } += 1;
    }
    assert!(missing >= 2 && valid >= 1 && missing + valid == 30, "{missing} missing, {valid} valid");
    assert_eq!(tier.missing_objects(), 2);
    assert_eq!(announced(&events, Level::G4).len(), valid);
}

async fn a_large_object_is_uploaded_in_parts(server: TestServer) {
    let (tier, _) = server.open_with(Settings { object_bytes: 24 << 20, object_blocks: 1, ..Settings::default() });
    let blocks = chain_of(fingerprint(), 1, 7, 4 << 20);
    store(&*tier, blocks.clone()).await;
    let (raw, listed) = server.raw().await;
    let mut sizes = Vec::new();
    for path in listed.iter().filter(|path| path.as_ref().contains("/blocks/")) {
        sizes.push(raw.head(path).await.unwrap().size);
    }
    assert!(sizes.iter().any(|size| *size >= 24 << 20), "{sizes:?}");
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&blocks)).await));
}

async fn a_missing_bucket_is_refused_with_the_reason(server: TestServer) {
    let elsewhere: StoreLocation = server.location.to_string().replace(BUCKET, "missingbucket").parse().unwrap();
    let log = Arc::new(EventLog::new(Epoch(1)));
    let tier = ObjectTier::open_location(&elsewhere, &server.access, Settings::default(), log, None).unwrap();
    let StoreHealth::Refused(why) = tier.initial_health().await else { panic!("{:?}", tier.initial_health().await) };
    assert!(why.contains("no such bucket"), "{why}");
}

#[tokio::test]
async fn a_wrong_key_is_refused_without_printing_it() {
    let server = TestServer::in_process(Conditions::Honoured);
    let keys = [("AWS_ACCESS_KEY_ID", KEYS.0), ("AWS_SECRET_ACCESS_KEY", "not-the-key-of-the-tests")];
    let access = Access { credentials: Credentials::from_environment(keys), ..server.access.clone() };
    let log = Arc::new(EventLog::new(Epoch(1)));
    let tier = ObjectTier::open_location(&server.location, &access, Settings::default(), log, None).unwrap();
    let StoreHealth::Refused(why) = tier.initial_health().await else { panic!("{:?}", tier.initial_health().await) };
    assert!(why.contains("denied") && why.contains("SignatureDoesNotMatch") && !why.contains("of-the-tests"), "{why}");
}

#[tokio::test]
async fn requests_are_far_fewer_than_blocks_on_a_server() {
    let server = TestServer::in_process(Conditions::Honoured);
    let (tier, _) = server.open();
    tier.wait_until_ready().await;
    let blocks = chain_of(fingerprint(), 1, 1_000, 30_000);
    let server = server.server.as_ref().unwrap();
    let before = server.requests();
    assert!(tier.store(blocks.clone()).await.iter().all(Result::is_ok));
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&blocks)).await));
    let requests = server.requests() - before;
    assert!(requests < 50, "{requests} requests to write and read 1,000 blocks");
}

#[tokio::test]
async fn test_servers_differ_in_conditional_writes() {
    for (conditions, overwrites) in [(Conditions::Honoured, false), (Conditions::Ignored, true)] {
        let server = TestServer::in_process(conditions);
        let (raw, _) = server.raw().await;
        let create = || PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let path = object_store::path::Path::from("once");
        raw.put_opts(&path, "first".into(), create()).await.unwrap();
        assert_eq!(raw.put_opts(&path, "second".into(), create()).await.is_ok(), overwrites, "{conditions:?}");
    }
}
