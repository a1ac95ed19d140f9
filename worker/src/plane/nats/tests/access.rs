//! Who may connect, and what each role may do.

use super::*;
use crate::plane::contract::{engine, instance, next, soon};
use crate::plane::{Discovery, Event, EventBody, Events, PlaneError, ReservationUpdate, Role, RouterId, Source, Topic};
use crate::plane::{StoreId, WorkerId};
use kvbm::{BlockEvent, Epoch, EventLog, Level, SequenceHash};
use std::path::Path;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::TcpListener;

/// The documented permissions.
const PAGE: &str = include_str!("../../../../../docs/nats.md");

/// Certificates for `localhost`, each its own authority.
const ONE: [&str; 2] = [
    include_str!("../../../../../frontend/tests/fixtures/tls/one.pem"),
    include_str!("../../../../../frontend/tests/fixtures/tls/one.key"),
];
const TWO: [&str; 2] = [
    include_str!("../../../../../frontend/tests/fixtures/tls/two.pem"),
    include_str!("../../../../../frontend/tests/fixtures/tls/two.key"),
];

fn file(folder: &Path, name: &str, text: &str) -> PathBuf {
    let path = folder.join(name);
    std::fs::write(&path, text).unwrap();
    path
}

fn user(server: &Server, user: &str) -> Settings {
    let password_file = file(server.folder(), user, &format!("change-me-{user}\n"));
    let credentials = Credentials::UserPassword { user: user.to_owned(), password_file };
    Settings { credentials, ..only(&server.url()) }
}

fn impatient(settings: Settings) -> Settings {
    Settings { connect_timeout: Duration::from_millis(600), ..settings }
}

async fn refused(settings: Settings) -> ConnectError {
    match open(settings).await {
        Ok(_) => panic!("it connected"),
        Err(error) => error,
    }
}

fn block(source: Source) -> Event {
    let event = BlockEvent::Removed { level: Level::G1, blocks: vec![SequenceHash::from_bytes([1; 16])] };
    Event { source, epoch: Epoch(1), body: EventBody::Block { number: 1, event } }
}

#[tokio::test]
async fn the_documented_permissions_suffice_and_separate_the_roles() {
    let (_, text) = PAGE.split_once("```conf\n").unwrap();
    let Some(server) = Server::with_configuration(text.split_once("```").unwrap().0).await else { return };
    let (worker, frontend) = (connect(user(&server, "worker")).await, connect(user(&server, "frontend")).await);
    let (workers, frontends) = (discovery_of(&worker), discovery_of(&frontend));
    let (worker_events, frontend_events) = (NatsEvents::new(worker), NatsEvents::new(frontend));

    // What a worker does, and what a frontend sees of it.
    let mut instances = frontends.watch();
    let mut seen = frontend_events.subscribe(Topic::Cache);
    let source = Source::Worker(WorkerId(1));
    let log = Arc::new(EventLog::new(Epoch(1)));
    let _offers = [worker_events.offer(source, Arc::clone(&log)), worker_events.offer(Source::Store(StoreId(2)), log)];
    let mut sent = instance(1, 1);
    Arc::make_mut(&mut sent.model).tokenizer = Some("tokenizer".into());
    let lease = workers.register(sent, engine()).await.unwrap();
    assert_eq!(next(&mut instances).await, (1, 1, true), "with its texts");
    assert_eq!(frontend_events.snapshot(source).await.unwrap().number, 0);
    assert_eq!(frontend_events.range(Source::Store(StoreId(2)), Epoch(1), 0).await, Ok(Some(vec![])));

    // What a frontend does, and what workers and frontends see of it.
    let router = Source::Router(RouterId(1));
    let mut requests = worker_events.subscribe(Topic::RoleRequests);
    let mut reservations = frontend_events.subscribe(Topic::Reservations);
    until("the worker receives role requests", async || {
        let body = EventBody::RoleRequest { worker: WorkerId(1), role: Role::Prefill };
        frontend_events.publish(Event { source: router, epoch: Epoch(1), body });
        !is_quiet(&mut requests, Duration::from_millis(100)).await
    })
    .await;
    let body = EventBody::Reservations(vec![ReservationUpdate::Sent(1)]);
    frontend_events.publish(Event { source: router, epoch: Epoch(1), body: body.clone() });
    assert_eq!(soon(&mut reservations).await.body, body);

    // What neither may do.
    frontend_events.publish(block(source));
    let refused = frontends.register(instance(9, 1), engine()).await.unwrap_err();
    let PlaneError::Unavailable(error) = refused else { panic!("{refused}") };
    assert!(error.contains("Permissions Violation"), "{error}");
    worker_events.publish(Event { source: router, epoch: Epoch(1), body });
    worker_events.publish(block(Source::Store(StoreId(2))));
    let first = soon(&mut seen).await.source;
    assert_eq!(first, Source::Store(StoreId(2)), "the frontend's announcement of blocks did not arrive");
    assert!(is_quiet(&mut reservations, Duration::from_millis(200)).await);
    drop(lease);
    assert_eq!(next(&mut instances).await, (1, 1, false));
}

#[tokio::test]
async fn each_kind_of_credentials_is_accepted_and_wrong_ones_are_refused() {
    let key = nkeys::KeyPair::new_user();
    let configurations = [
        "authorization { user: u, password: change-me-u }".to_owned(),
        "authorization { token: t0ken }".to_owned(),
        format!("authorization {{ users = [{{ nkey: {} }}] }}", key.public_key()),
    ];
    for (at, configuration) in configurations.iter().enumerate() {
        let Some(server) = Server::with_configuration(configuration).await else { return };
        let token = |text: &str| Credentials::Token(file(server.folder(), text, &format!("{text}\n")));
        let nkey =
            |key: &nkeys::KeyPair| Credentials::Nkey(file(server.folder(), &key.public_key(), &key.seed().unwrap()));
        let settings = |credentials| Settings { credentials, ..only(&server.url()) };
        let (right, wrong) = match at {
            0 => (user(&server, "u").credentials, user(&server, "v").credentials),
            1 => (token("t0ken"), token("other")),
            _ => (nkey(&key), nkey(&nkeys::KeyPair::new_user())),
        };
        let error = refused(settings(wrong)).await;
        assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
        connect(settings(right)).await;
    }
}

#[tokio::test]
async fn a_missing_secret_is_refused_by_its_path() {
    let credentials = Credentials::Token("/no/such/token".into());
    let error = refused(Settings { credentials, ..Settings::default() }).await;
    assert!(matches!(&error, ConnectError::File { .. }) && error.to_string().contains("/no/such/token"), "{error}");
}

#[tokio::test]
async fn servers_and_clients_are_verified_by_tls() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str, text| file(folder.path(), name, text);
    let (one, one_key) = (path("one.pem", ONE[0]), path("one.key", ONE[1]));
    let (two, two_key) = (path("two.pem", TWO[0]), path("two.key", TWO[1]));
    let configuration = format!(
        "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: true }}",
        one.display().to_string(),
        one_key.display().to_string(),
        two.display().to_string()
    );
    let Some(server) = Server::with_configuration(&configuration).await else { return };
    let client = ClientCertificate { cert_file: two.clone(), key_file: two_key };
    let settings = |ca: &PathBuf, client| {
        let tls = Some(Tls { ca_file: Some(ca.clone()), client });
        impatient(Settings { tls, ..only(&server.tls_url()) })
    };
    connect(settings(&one, Some(client.clone()))).await;
    let unknown_server = refused(settings(&two, Some(client))).await;
    assert!(unknown_server.to_string().contains("certificate"), "{unknown_server}");
    let unknown_client = refused(settings(&one, None)).await;
    assert!(
        matches!(unknown_client, ConnectError::Unreachable { .. } | ConnectError::Refused { .. }),
        "{unknown_client}"
    );
}

/// A server that says which version it has.
async fn server_of_version(version: &'static str) -> String {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!("nats://{}", listener.local_addr().unwrap());
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let info =
                format!(r#"INFO {{"server_name":"old","version":"{version}","jetstream":true,"max_payload":1048576}}"#);
            tokio::spawn(async move {
                stream.write_all(format!("{info}\r\n").as_bytes()).await.unwrap();
                let (reader, mut writer) = stream.split();
                let mut lines = BufReader::new(reader).lines();
                while let Ok(Some(line)) = lines.next_line().await {
                    if line == "PING" {
                        writer.write_all(b"PONG\r\n").await.unwrap();
                    }
                }
            });
        }
    });
    url
}

#[tokio::test]
async fn an_old_server_is_refused_with_its_version() {
    let error = refused(only(&server_of_version("2.9.10").await)).await;
    assert_eq!(error.to_string(), "nats server old has version 2.9.10; 2.11 or later is needed");
}

#[tokio::test]
async fn a_server_that_cannot_be_reached_is_named() {
    let port = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
    let url = format!("nats://127.0.0.1:{port}");
    let error = refused(impatient(only(&url))).await;
    assert!(matches!(&error, ConnectError::Unreachable { servers, .. } if *servers == url), "{error}");
}

#[tokio::test]
async fn a_server_without_jetstream_is_refused() {
    let Some(server) = Server::without_jetstream().await else { return };
    let error = refused(impatient(only(&server.url()))).await;
    assert!(error.to_string().contains("is JetStream enabled"), "{error}");
}

#[tokio::test]
async fn a_bucket_whose_keys_do_not_expire_is_refused() {
    let Some(server) = shared() else { return };
    let settings = settings(&server);
    let client = async_nats::connect(&server).await.unwrap();
    let config = async_nats::jetstream::kv::Config { bucket: settings.bucket.clone(), ..Default::default() };
    let jetstream = async_nats::jetstream::new(client);
    jetstream.create_key_value(config.clone()).await.unwrap();
    let error = refused(settings.clone()).await;
    assert!(error.to_string().contains("keys do not expire"), "{error}");
    let long = Duration::from_mins(1);
    let bucket = format!("{}-long", settings.bucket);
    let config = async_nats::jetstream::kv::Config { bucket: bucket.clone(), limit_markers: Some(long), ..config };
    jetstream.create_key_value(config).await.unwrap();
    let error = refused(Settings { bucket, ..settings }).await;
    assert!(error.to_string().contains("no key expires sooner"), "{error}");
}
