//! The tier on real protocols: every MUST, and what others find, is lost, or is refused, against servers behind sockets.
//!
//! Two S3 servers live in this process. `make test` starts others (`tests/servers/run.py`) and names them in the
//! environment; without them their tests say aloud that they were skipped.

use super::server::{BUCKET, Conditions, KEYS, Server};
use super::used;
use super::*;
use object_store::{ObjectStoreExt, PutMode, PutOptions, PutPayload};
use std::io::Write;
use std::sync::atomic::{AtomicU64, Ordering};

/// A server under test, and a prefix of its own.
struct Place {
    location: Location,
    access: Access,
    server: Option<Server>,
}

impl Place {
    fn new(scheme: &str, endpoint: &str, variables: &[(&str, &str)], server: Option<Server>) -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Servers are shared by processes: nobody else has this prefix. Short, for one of them makes file names of keys.
        let prefix = format!("p{}n{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let location = format!("{scheme}://{BUCKET}/{prefix}").parse().unwrap();
        let (endpoint, region) = (Some(endpoint.parse().unwrap()), None);
        let credentials = Credentials::from_environment(variables.iter().copied());
        Self { location, access: Access { endpoint, region, credentials }, server }
    }

    fn s3(endpoint: &str, server: Option<Server>) -> Self {
        let keys = [("AWS_ACCESS_KEY_ID", KEYS.0), ("AWS_SECRET_ACCESS_KEY", KEYS.1)];
        Self::new("s3", endpoint, &keys, server)
    }

    fn in_process(conditions: Conditions) -> Self {
        let server = Server::start(conditions);
        Self::s3(&server.endpoint.clone(), Some(server))
    }

    /// A server that `make test` started.
    fn outside(name: &str, make: impl Fn(&str) -> Self) -> Option<Self> {
        let Ok(endpoint) = std::env::var(name) else {
            // Not `eprintln`: the test harness would swallow it.
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
        (ObjectTier::at(&self.location, &self.access, settings, events.clone(), None).unwrap(), events)
    }

    /// The store without the tier, and every object in it.
    async fn raw(&self) -> (Arc<dyn ObjectStore>, Vec<object_store::path::Path>) {
        let Location::Cloud { prefix, .. } = &self.location else { unreachable!("a cloud") };
        let store = self.location.client(&self.access, Duration::from_secs(30)).unwrap().unwrap();
        let listed: Vec<_> = store.list(Some(prefix)).map(|meta| meta.unwrap().location).collect().await;
        (store, listed)
    }
}

/// Tests of everything, against the server that the expression names.
macro_rules! on {
    ($name:ident, $make:expr) => {
        mod $name {
            use super::*;

            fn place() -> Option<Place> {
                ($make).into()
            }

            conformance::suite!(async || {
                place().map(|place| {
                    let (tier, events) = place.open();
                    Subject::keeping(tier, events, place)
                })
            });

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn others_find_and_load_it_now_and_after_a_restart() {
                if let Some(place) = place() {
                    super::others_find_and_load_it_now_and_after_a_restart(place).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn what_is_gone_or_cut_is_a_miss_and_counted() {
                if let Some(place) = place() {
                    super::what_is_gone_or_cut_is_a_miss_and_counted(place).await;
                }
            }

            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn a_large_object_goes_in_parts() {
                if let Some(place) = place() {
                    super::a_large_object_goes_in_parts(place).await;
                }
            }

            #[tokio::test]
            async fn what_is_read_stays_and_a_pass_reads_what_is_new() {
                if let Some(place) = place() {
                    let Location::Cloud { prefix, .. } = &place.location else { unreachable!("a cloud") };
                    let prefix = prefix.to_string();
                    used::what_is_read_stays_and_a_pass_reads_what_is_new(place.raw().await.0, &prefix).await;
                }
            }

            #[tokio::test]
            async fn a_bucket_that_is_not_there_is_refused_in_words() {
                if let Some(place) = place() {
                    super::a_bucket_that_is_not_there_is_refused_in_words(place).await;
                }
            }
        }
    };
}

on!(s3, Place::in_process(Conditions::Honoured));
on!(s3_that_ignores_conditions, Place::in_process(Conditions::Ignored));
on!(moto, Place::outside("KVBM_TEST_MOTO", |endpoint| Place::s3(endpoint, None)));
on!(
    azurite,
    Place::outside("KVBM_TEST_AZURITE", |endpoint| {
        // The account and the key that every Azurite has; they are in its documentation.
        let account = ("AZURE_STORAGE_ACCOUNT_NAME", "devstoreaccount1");
        let key = "Eby8vdM02xNOcqFlqUwJPLlmEtlCDXJ1OUzFT50uSRZ6IFsuFq2UVErCz4I6tq/K1SZFPTOtr/KBHBeksoGMGw==";
        Place::new("az", endpoint, &[account, ("AZURE_STORAGE_ACCOUNT_KEY", key)], None)
    })
);
// Google's XML dialect is S3's; nobody checks a signature there.
on!(
    google_on_moto,
    Place::outside("KVBM_TEST_MOTO", |endpoint| {
        Place::new("gs", endpoint, &[("GOOGLE_BEARER_TOKEN", "anybody")], None)
    })
);

async fn others_find_and_load_it_now_and_after_a_restart(place: Place) {
    let (reader, learned) = place.open();
    reader.caught_up().await;
    let (writer, _) = place.open();
    let blocks = chain(1, 40);
    store(&*writer, blocks.clone()).await;
    let found = async {
        while reader.holds(fingerprint(), &names(&blocks)) < blocks.len() {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
    };
    tokio::time::timeout(Duration::from_mins(1), found).await.expect("a running process learns of it");
    assert!(all(&load(&*reader, fingerprint(), names(&blocks)).await));
    drop((reader, writer));
    let (later, announces) = place.open();
    later.caught_up().await;
    assert_eq!(announced(&announces, Level::G4), announced(&learned, Level::G4));
    assert!(all(&load(&*later, fingerprint(), names(&blocks)).await));
}

async fn what_is_gone_or_cut_is_a_miss_and_counted(place: Place) {
    let (tier, events) = place.open_with(Settings { object_bytes: 15_000, object_blocks: 1, ..Settings::default() });
    let blocks = chain(1, 30);
    store(&*tier, blocks.clone()).await;
    let (raw, listed) = place.raw().await;
    let objects: Vec<_> = listed.iter().filter(|path| path.as_ref().contains("/blocks/")).collect();
    assert!(objects.len() >= 3, "{listed:?}");
    raw.delete(objects[0]).await.unwrap();
    let whole = raw.get(objects[1]).await.unwrap().bytes().await.unwrap();
    raw.put(objects[1], PutPayload::from(whole.slice(..100))).await.unwrap();
    let mut loading = tier.load(fingerprint(), names(&blocks));
    let (mut missing, mut sound) = (0, 0);
    while let Some((_, answer)) = loading.next().await {
        *if answer.expect("a loss is not an error").is_some() { &mut sound } else { &mut missing } += 1;
    }
    assert!(missing >= 2 && sound >= 1 && missing + sound == 30, "{missing} missing, {sound} sound");
    assert_eq!(tier.lost_objects(), 2);
    assert_eq!(announced(&events, Level::G4).len(), sound);
}

async fn a_large_object_goes_in_parts(place: Place) {
    let (tier, _) = place.open_with(Settings { object_bytes: 24 << 20, object_blocks: 1, ..Settings::default() });
    let blocks = chain_of(fingerprint(), 1, 7, 4 << 20);
    store(&*tier, blocks.clone()).await;
    let (raw, listed) = place.raw().await;
    let mut sizes = Vec::new();
    for path in listed.iter().filter(|path| path.as_ref().contains("/blocks/")) {
        sizes.push(raw.head(path).await.unwrap().size);
    }
    assert!(sizes.iter().any(|size| *size >= 24 << 20), "{sizes:?}");
    assert!(all(&load(&*tier, fingerprint(), names(&blocks)).await));
}

async fn a_bucket_that_is_not_there_is_refused_in_words(place: Place) {
    let elsewhere: Location = place.location.to_string().replace(BUCKET, "nobodysbucket").parse().unwrap();
    let log = Arc::new(EventLog::new(Epoch(1)));
    let tier = ObjectTier::at(&elsewhere, &place.access, Settings::default(), log, None).unwrap();
    let Standing::Refused(why) = tier.settled().await else { panic!("{:?}", tier.settled().await) };
    assert!(why.contains("no such bucket"), "{why}");
}

#[tokio::test]
async fn a_wrong_key_is_refused_in_words_without_the_key() {
    let place = Place::in_process(Conditions::Honoured);
    let keys = [("AWS_ACCESS_KEY_ID", KEYS.0), ("AWS_SECRET_ACCESS_KEY", "not-the-key-of-the-tests")];
    let access = Access { credentials: Credentials::from_environment(keys), ..place.access.clone() };
    let log = Arc::new(EventLog::new(Epoch(1)));
    let tier = ObjectTier::at(&place.location, &access, Settings::default(), log, None).unwrap();
    let Standing::Refused(why) = tier.settled().await else { panic!("{:?}", tier.settled().await) };
    assert!(why.contains("denied") && why.contains("SignatureDoesNotMatch") && !why.contains("of-the-tests"), "{why}");
}

#[tokio::test]
async fn requests_are_far_fewer_than_blocks_on_a_server() {
    let place = Place::in_process(Conditions::Honoured);
    let (tier, _) = place.open();
    tier.caught_up().await;
    let blocks = chain_of(fingerprint(), 1, 1_000, 30_000);
    let server = place.server.as_ref().unwrap();
    let before = server.requests();
    assert!(tier.store(blocks.clone()).await.iter().all(Result::is_ok));
    assert!(all(&load(&*tier, fingerprint(), names(&blocks)).await));
    let requests = server.requests() - before;
    assert!(requests < 50, "{requests} requests to write and read 1,000 blocks");
}

#[tokio::test]
async fn one_server_honours_conditions_and_the_other_ignores_them() {
    for (conditions, overwrites) in [(Conditions::Honoured, false), (Conditions::Ignored, true)] {
        let place = Place::in_process(conditions);
        let (raw, _) = place.raw().await;
        let create = || PutOptions { mode: PutMode::Create, ..PutOptions::default() };
        let path = object_store::path::Path::from("once");
        raw.put_opts(&path, "first".into(), create()).await.unwrap();
        assert_eq!(raw.put_opts(&path, "second".into(), create()).await.is_ok(), overwrites, "{conditions:?}");
    }
}
