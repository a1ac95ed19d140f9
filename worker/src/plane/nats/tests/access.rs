//! Which clients may connect, and what each role may do.

use super::operator::Operator;
use super::*;
use crate::plane::contract::{engine, instance, next, soon};
use crate::plane::{Discovery, Event, EventBody, Events, PlaneError, ReservationUpdate, Role, RouterId, Source, Topic};
use crate::plane::{StoreId, WorkerId};
use async_nats::header::{HeaderMap, NATS_MESSAGE_TTL};
use kvbm::{BlockEvent, Epoch, EventLog, Level, SequenceHash};
use std::path::Path;

/// The documented permissions.
const PAGE: &str = include_str!("../../../../../docs/nats.md");

/// The counter of what was refused.
const REFUSED: &str = "blockyard_nats_refused_total";

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

/// A server with the documented users.
async fn documented() -> Option<Server> {
    let (_, text) = PAGE.split_once("```conf\n").unwrap();
    Server::with_configuration(text.split_once("```").unwrap().0).await
}

/// Whether the key of a worker holds its record.
async fn has_record(connection: &Connection, id: u64) -> bool {
    let last = connection.bucket.last(WorkerId(id)).await.unwrap().value;
    last.is_some_and(|stored| record::Record::admit(WorkerId(id), &stored, None).is_ok())
}

fn user(server: &Server, user: &str) -> Settings {
    let password_file = file(server.folder(), user, &format!("change-me-{user}\n"));
    let credentials = Credentials::UserPassword { user: user.to_owned(), password_file };
    Settings { credentials, ..only(&server.url()) }
}

fn block(source: Source) -> Event {
    let event = BlockEvent::Removed { level: Level::G1, blocks: vec![SequenceHash::from_bytes([1; 16])] };
    Event { source, epoch: Epoch(1), body: EventBody::Block { number: 1, event } }
}

#[tokio::test]
async fn a_worker_finds_the_registered_workers_with_its_permissions() {
    let Some(server) = documented().await else { return };
    let (one, two) = (connect(user(&server, "worker")).await, connect(user(&server, "worker")).await);
    let (own, other) = (discovery_of(&one), discovery_of(&two));
    let first = own.register(instance(1, 1), engine()).await.unwrap();
    let left = other.register(instance(2, 1), engine()).await.unwrap();
    let third = other.register(instance(3, 5), engine()).await.unwrap();
    drop(left);
    other.wait_until_deregistered().await;
    let found = own.registered().await.unwrap();
    let mut found: Vec<_> = found.iter().map(|(instance, _)| (instance.id.0, instance.epoch.0)).collect();
    found.sort_unstable();
    assert_eq!(found, [(1, 1), (3, 5)]);
    let keys = RecordKeys::fixed([RecordKey::derive(b"0123456789abcdef")]);
    let signed_only = discovery_with_keys(&one, Some(keys)).registered().await.unwrap();
    assert!(signed_only.is_empty(), "without its secret a worker is not sent anything");
    drop((first, third));
}

#[tokio::test]
async fn the_documented_permissions_suffice_and_separate_the_roles() {
    let Some(server) = documented().await else { return };
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
    let PlaneError::Denied(error) = refused else { panic!("{refused}") };
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
async fn the_documented_permissions_suffice_after_a_reconnect() {
    let Some(mut server) = documented().await else { return };
    let (worker, frontend) = (connect(user(&server, "worker")).await, connect(user(&server, "frontend")).await);
    let (workers, frontends) = (discovery_of(&worker), discovery_of(&frontend));
    let _lease = workers.register(instance(1, 1), engine()).await.unwrap();
    let mut instances = frontends.watch();
    assert_eq!(next(&mut instances).await, (1, 1, true));
    server.stop();
    until("the loss is noticed", async || !worker.is_connected() && !frontend.is_connected()).await;
    server.start_again().await;
    until("both are connected again", async || worker.is_connected() && frontend.is_connected()).await;
    // By then the client library has deleted its consumer, and made one.
    assert!(is_quiet(&mut instances, Duration::from_secs(1)).await, "the worker never left");
    for connection in [&worker, &frontend] {
        assert_eq!(connection.explain("denied".to_owned()), "denied", "nothing was denied");
    }
}

#[tokio::test]
async fn a_frontend_cannot_make_a_worker_overwrite_records() {
    let Some(server) = documented().await else { return };
    let (worker, registry) = open(user(&server, "worker")).await.unwrap();
    let frontend = connect(user(&server, "frontend")).await;
    let (workers, frontends) = (discovery_of(&worker), discovery_of(&frontend));
    let (worker_events, frontend_events) =
        (NatsEvents::new(Arc::clone(&worker)), NatsEvents::new(Arc::clone(&frontend)));
    let source = Source::Worker(WorkerId(1));
    let _offer = worker_events.offer(source, Arc::new(EventLog::new(Epoch(1))));
    let mut sent = instance(1, 1);
    Arc::make_mut(&mut sent.model).tokenizer = Some("tokenizer".into());
    let _lease = workers.register(sent, engine()).await.unwrap();
    let mut instances = frontends.watch();
    assert_eq!(next(&mut instances).await, (1, 1, true));
    until("the log answers", async || frontend_events.snapshot(source).await.is_ok()).await;

    // Requests that a frontend may send, for answers where only a worker may write.
    let stored = worker.bucket.last(WorkerId(1)).await.unwrap().value.unwrap();
    let json: serde_json::Value = serde_json::from_slice(&stored.json).unwrap();
    let subjects = &frontend.subjects;
    let requests = [
        (subjects.log(source), codec::encode(&codec::LogRequest::Epoch)),
        (subjects.log_of_epoch(source, Epoch(1)), codec::encode(&codec::LogRequest::OpenSnapshot)),
        (subjects.log(source), vec![]),
        (subjects.texts(json["texts"]["blake3"].as_str().unwrap()), codec::encode(&codec::Piece { offset: 0 })),
    ];
    let replies = [subjects.instance(WorkerId(1)), subjects.event(Topic::Cache, source)];
    for (subject, request) in &requests {
        for reply in &replies {
            let request = request.clone().into();
            frontend.client.publish_with_reply(subject.clone(), reply.clone(), request).await.unwrap();
        }
    }
    let sent = (requests.len() * replies.len()) as u64;
    until("the worker has refused all of them", async || counter(&registry, REFUSED, "reply") == sent).await;
    assert!(has_record(&worker, 1).await);
    assert!(is_quiet(&mut instances, Duration::from_millis(200)).await);
    assert_eq!(frontend_events.snapshot(source).await.unwrap().number, 0, "other requests are answered");
}

#[tokio::test]
async fn a_record_that_something_else_overwrites_does_not_end_a_worker() {
    let Some(server) = documented().await else { return };
    let worker = connect(short_lease(user(&server, "worker"))).await;
    let (frontend, registry) = open(short_lease(user(&server, "frontend"))).await.unwrap();
    let (workers, frontends) = (discovery_of(&worker), discovery_of(&frontend));
    let _lease = workers.register(instance(1, 1), engine()).await.unwrap();
    let mut instances = frontends.watch();
    assert_eq!(next(&mut instances).await, (1, 1, true));
    // JetStream itself answers to any subject.
    let overwrite = async |id: u64| {
        let (subject, reply) = ("$JS.API.STREAM.INFO.KV_blockyard", frontend.subjects.instance(WorkerId(id)));
        frontend.client.publish_with_reply(subject, reply, "".into()).await.unwrap();
    };
    let lease = tokio::time::Instant::now() + frontend.settings.lease * 2;
    while tokio::time::Instant::now() < lease {
        overwrite(1).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    until("the record is there again", async || has_record(&worker, 1).await).await;
    assert!(is_quiet(&mut instances, Duration::from_millis(200)).await, "the worker never left");
    // Once for each time that the worker has written its record in between.
    assert!(counter(&registry, REFUSED, "instance") >= 1, "it is reported");

    // A worker that is gone leaves although nothing expires what is in its place.
    let dying = processes::Process::start(short_lease(user(&server, "worker")), 2, 1).await.unwrap();
    assert_eq!(next(&mut instances).await, (2, 1, true));
    dying.kill();
    overwrite(2).await;
    assert_eq!(next(&mut instances).await, (2, 1, false));
}

#[tokio::test]
async fn with_a_secret_only_signed_records_are_used() {
    let Some(server) = documented().await else { return };
    let (worker, (frontend, registry)) =
        (connect(user(&server, "worker")).await, open(user(&server, "frontend")).await.unwrap());
    let [ours, other] = ["0123456789abcdef", "fedcba9876543210"]
        .map(|secret| RecordKeys::fixed([RecordKey::derive(secret.as_bytes())]));
    let workers = discovery_with_keys(&worker, Some(ours.clone()));
    let (unsigned, strangers) = (discovery_of(&worker), discovery_with_keys(&worker, Some(other)));
    let _leases = [
        workers.register(instance(1, 1), engine()).await.unwrap(),
        unsigned.register(instance(2, 1), engine()).await.unwrap(),
        strangers.register(instance(3, 1), engine()).await.unwrap(),
    ];
    // With the permissions of a worker and without the secret: a copy of a record under another id, and one with
    // another address in the place of the first.
    let stored = worker.bucket.last(WorkerId(1)).await.unwrap().value.unwrap();
    let (json, mac) = (String::from_utf8(stored.json.to_vec()).unwrap(), stored.mac.clone().unwrap());
    let forge = async |id: u64, from: &str, to: &str| {
        assert!(json.contains(from), "{json}");
        let mut headers = HeaderMap::new();
        headers.insert("Blockyard-MAC", mac.as_str());
        headers.insert(NATS_MESSAGE_TTL, "60");
        let (subject, forged) = (worker.subjects.instance(WorkerId(id)), json.replace(from, to));
        worker.client.publish_with_headers(subject, headers, forged.into()).await.unwrap();
    };
    let address = address().to_string();
    forge(4, "\"id\":1", "\"id\":4").await;
    let frontends = discovery_with_keys(&frontend, Some(ours));
    let mut instances = frontends.watch();
    assert_eq!(next(&mut instances).await, (1, 1, true));
    forge(1, &address, "http://127.0.0.1:10").await;
    forge(1, "\"epoch\":1", "\"epoch\":9").await;
    until("the others are refused", async || counter(&registry, REFUSED, "instance") >= 4).await;
    until("the worker has written its record again", async || {
        worker.bucket.last(WorkerId(1)).await.unwrap().value.is_some_and(|last| last == stored)
    })
    .await;
    assert!(is_quiet(&mut instances, Duration::from_millis(200)).await);

    // Without a secret all of them are used.
    let mut all = watch(user(&server, "frontend")).await;
    let mut seen: Vec<u64> = Vec::new();
    for _ in 0..4 {
        seen.push(next(&mut all).await.0);
    }
    seen.sort_unstable();
    assert_eq!(seen, [1, 2, 3, 4]);
}

#[tokio::test]
async fn records_are_signed_and_verified_again_when_keys_change() {
    let Some(server) = documented().await else { return };
    let worker = connect(short_lease(user(&server, "worker"))).await;
    let (frontend, registry) = open(short_lease(user(&server, "frontend"))).await.unwrap();
    let [former, new] = ["0123456789abcdef", "fedcba9876543210"].map(|secret| RecordKey::derive(secret.as_bytes()));
    let (of_worker, keys) = tokio::sync::watch::channel(vec![former.clone()]);
    let workers = discovery_with_keys(&worker, Some(RecordKeys::following(keys)));
    let (of_frontend, keys) = tokio::sync::watch::channel(vec![former.clone()]);
    let frontends = discovery_with_keys(&frontend, Some(RecordKeys::following(keys)));
    let _lease = workers.register(instance(1, 1), engine()).await.unwrap();
    let mut instances = frontends.watch();
    assert_eq!(next(&mut instances).await, (1, 1, true));

    // A rotation in three steps, the worker before the frontend.
    of_worker.send_replace(vec![former.clone(), new.clone()]);
    of_frontend.send_replace(vec![former.clone(), new.clone()]);
    of_worker.send_replace(vec![new.clone(), former.clone()]);
    let signed_with = async |key: &RecordKey| {
        let stored = worker.bucket.last(WorkerId(1)).await.unwrap().value;
        stored.is_some_and(|stored| stored.verify(WorkerId(1), Some(&RecordKeys::fixed([key.clone()]))).is_ok())
    };
    until("the record is signed with the new key", async || signed_with(&new).await).await;
    // Records arrive in order: a frontend that has this one has the other, too.
    let later = workers.register(instance(2, 1), engine()).await.unwrap();
    assert_eq!(next(&mut instances).await, (2, 1, true));
    drop(later);
    assert_eq!(next(&mut instances).await, (2, 1, false));
    of_frontend.send_replace(vec![new.clone(), former.clone()]);
    of_worker.send_replace(vec![new.clone()]);
    of_frontend.send_replace(vec![new.clone()]);
    assert!(is_quiet(&mut instances, frontend.settings.lease * 2).await, "the worker never left");
    assert_eq!(counter(&registry, REFUSED, "instance"), 0);

    // A worker that signs with a key that was removed leaves after a lease, and is back with the key.
    for times in 1..=2 {
        of_frontend.send_replace(vec![former.clone()]);
        assert_eq!(next(&mut instances).await, (1, 1, false));
        assert_eq!(counter(&registry, REFUSED, "instance"), times, "it is reported each time");
        of_frontend.send_replace(vec![new.clone()]);
        assert_eq!(next(&mut instances).await, (1, 1, true));
    }
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

/// Stops the server of a connection, and starts it again with another configuration and after a change of files.
async fn restart(server: &mut Server, connection: &Connection, configuration: &str, change: impl FnOnce()) {
    server.stop();
    until("the loss of the connection is noticed", async || !connection.is_connected()).await;
    file(server.folder(), "nats.conf", configuration);
    change();
    server.start_again().await;
    until("the process is connected again", async || connection.is_connected()).await;
}

#[tokio::test]
async fn credentials_are_read_again_at_each_connection() {
    let Some(mut server) = Server::with_configuration("authorization { token: former }").await else { return };
    let path = file(server.folder(), "token", "former\n");
    let credentials = Credentials::Token(path.clone());
    let connection = connect(Settings { credentials, ..only(&server.url()) }).await;
    let new = "authorization { token: other }";
    restart(&mut server, &connection, new, || std::fs::write(&path, "other\n").unwrap()).await;
    restart(&mut server, &connection, new, || std::fs::remove_file(&path).unwrap()).await;
}

#[tokio::test]
async fn a_credentials_file_is_accepted_by_a_server_that_trusts_the_operator_of_its_account() {
    let [operator, other] = [(); 2].map(|()| Operator::new());
    let Some(mut server) = Server::with_configuration(&operator.configuration()).await else { return };
    let path = file(server.folder(), "worker.creds", &other.user());
    let settings = Settings { credentials: Credentials::CredentialsFile(path.clone()), ..only(&server.url()) };
    let error = refused(settings.clone()).await;
    assert!(matches!(error, ConnectError::Refused { .. }), "{error}");
    std::fs::write(&path, operator.user()).unwrap();
    let connection = connect(settings).await;
    // The file is read again at the next connection.
    restart(&mut server, &connection, &other.configuration(), || std::fs::write(&path, other.user()).unwrap()).await;
}

#[tokio::test]
async fn tls_files_are_read_again_at_each_connection() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name);
    // Each certificate is its own authority.
    let write = |of_server: [&str; 2], of_client: [&str; 2]| {
        for (name, [certificate, key]) in [("server", of_server), ("client", of_client)] {
            file(folder.path(), &format!("{name}.pem"), certificate);
            file(folder.path(), &format!("{name}.key"), key);
        }
    };
    write(ONE, TWO);
    let configuration = format!(
        "tls {{ cert_file: {:?}, key_file: {:?}, ca_file: {:?}, verify: true }}",
        path("server.pem"),
        path("server.key"),
        path("client.pem")
    );
    let Some(mut server) = Server::with_configuration(&configuration).await else { return };
    let client = ClientCertificate { cert_file: path("client.pem"), key_file: path("client.key") };
    let tls = Some(Tls { ca_file: Some(path("server.pem")), client: Some(client) });
    let connection = connect(Settings { tls, ..only(&server.tls_url()) }).await;
    restart(&mut server, &connection, &configuration, || write(TWO, ONE)).await;
}

#[tokio::test]
async fn a_missing_secret_is_refused_by_its_key_and_path() {
    let credentials = Credentials::Token("/no/such/token".into());
    let error = refused(Settings { credentials, ..Settings::default() }).await;
    assert!(error.to_string().starts_with("nats.token_file = \"/no/such/token\": "), "{error}");
}

#[tokio::test]
async fn a_file_of_tls_that_cannot_be_used_is_refused_by_its_path() {
    let ca_file = Some(PathBuf::from("/no/such/ca.pem"));
    let tls = Some(Tls { ca_file, client: None });
    let error = refused(Settings { tls, ..Settings::default() }).await;
    let text = error.to_string();
    assert!(matches!(error, ConnectError::TlsFile(_)) && text.contains("nats.ca_file = \"/no/such/ca.pem\""), "{text}");
}

#[tokio::test]
async fn what_keeps_a_process_from_connecting_again_is_known() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str, text| file(folder.path(), name, text);
    let (certificate, key, ca_file) = (path("one.pem", ONE[0]), path("one.key", ONE[1]), path("ca.pem", ONE[0]));
    let configuration = |token: &str| {
        format!("tls {{ cert_file: {certificate:?}, key_file: {key:?} }}\nauthorization {{ token: {token} }}")
    };
    let Some(mut server) = Server::with_configuration(&configuration("former")).await else { return };
    let credentials = Credentials::Token(path("token", "former"));
    let tls = Some(Tls { ca_file: Some(ca_file.clone()), client: None });
    let connection = connect(Settings { tls, credentials, ..only(&server.tls_url()) }).await;
    assert_eq!(connection.problem(), None);
    server.stop();
    until("the loss of the connection is noticed", async || !connection.is_connected()).await;
    let problem_has = async |parts: [&str; 2]| {
        until(parts[0], async || {
            connection.problem().is_some_and(|problem| parts.iter().all(|part| problem.contains(part)))
        })
        .await;
    };
    problem_has(["not connected to NATS", "Connection refused"]).await;
    path("ca.pem", "");
    server.start_again().await;
    problem_has(["nats.ca_file = ", "expected PEM"]).await;
    path("ca.pem", TWO[0]);
    problem_has(["invalid peer certificate", "nats.ca_file = "]).await;
    server.stop();
    file(server.folder(), "nats.conf", &configuration("other"));
    server.start_again().await;
    path("ca.pem", ONE[0]);
    problem_has(["authorization violation", "nats.token_file = "]).await;
    path("token", "other");
    until("the process is connected again", async || connection.is_connected()).await;
    assert_eq!(connection.problem(), None);
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
        with_short_connect_timeout(Settings { tls, ..only(&server.tls_url()) })
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
