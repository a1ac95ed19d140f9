//! Servers that stop: the view stays, and is compared with the bucket afterwards.

use super::captured_log::CapturedLog;
use super::processes::Process;
use super::*;
use crate::plane::contract::{engine, instance, next};
use crate::plane::{Discovery, Event, EventBody, Events, Load, PlaneError, Source, Topic, WorkerId};
use kvbm::{BlockEvent, Epoch, EventLog, Level, SequenceHash};

const SOURCE: Source = Source::Worker(WorkerId(1));

fn load(number: u64) -> Event {
    Event { source: SOURCE, epoch: Epoch(1), body: EventBody::Load(Load { number, ..Load::default() }) }
}

/// Waits until the loss of the connection is noticed.
async fn lost(connection: &Connection) {
    connection.state().wait_for(|state| !state.connected).await.unwrap();
}

#[tokio::test]
async fn an_outage_leaves_the_view_as_it_was() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let settings = short_lease(settings(&server.url()));
    let connection = connect(settings.clone()).await;
    let workers = discovery_of(&connection);
    let _lease = workers.register(instance(1, 1), engine()).await.unwrap();
    let mut watch = watch(settings.clone()).await;
    assert_eq!(next(&mut watch).await, (1, 1, true));
    server.stop();
    lost(&connection).await;
    let refused = workers.register(instance(2, 1), engine()).await;
    assert!(matches!(refused, Err(PlaneError::Unavailable(_))));
    assert!(is_quiet(&mut watch, settings.lease * 2).await, "the lease expires, and the view stays");
    server.start_again().await;
    assert!(is_quiet(&mut watch, settings.lease * 2).await, "nothing is reported twice");
    let _other = workers.register(instance(3, 1), engine()).await.unwrap();
    assert_eq!(next(&mut watch).await, (3, 1, true));
}

#[tokio::test]
async fn a_worker_that_dies_in_an_outage_leaves_after_it() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let settings = short_lease(settings(&server.url()));
    let dying = Process::start(settings.clone(), 1, 1).await.unwrap();
    let _living = Process::start(settings.clone(), 2, 1).await.unwrap();
    let mut watch = watch(settings.clone()).await;
    let mut joined = [next(&mut watch).await, next(&mut watch).await];
    joined.sort_unstable();
    assert_eq!(joined, [(1, 1, true), (2, 1, true)]);
    server.stop();
    dying.kill();
    tokio::time::sleep(settings.lease).await;
    server.start_again().await;
    assert_eq!(next(&mut watch).await, (1, 1, false));
    assert!(is_quiet(&mut watch, settings.lease * 2).await, "the other one lives");
}

#[tokio::test]
async fn leases_that_cannot_be_renewed_are_reported_and_a_registration_may_be_repeated() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let settings = short_lease(settings(&server.url()));
    let (worker, frontend) = (connect(settings.clone()).await, connect(settings.clone()).await);
    let workers = discovery_of(&worker);
    let _lease = workers.register(instance(1, 1), engine()).await.unwrap();
    let mut watch = discovery_of(&frontend).watch();
    assert_eq!(next(&mut watch).await, (1, 1, true));
    assert_eq!([worker.lease_problems(), frontend.lease_problems()], [Vec::<String>::new(), Vec::new()]);
    server.stop();
    server.set_jetstream(false);
    server.start_again().await;
    let reports = async |connection: &Arc<Connection>, part: &str| {
        until(part, async || connection.lease_problems().iter().any(|problem| problem.contains(part))).await;
    };
    reports(&worker, "the lease of worker w1 could not be renewed").await;
    reports(&frontend, "no worker has renewed its lease").await;
    let error = workers.register(instance(2, 1), engine()).await.unwrap_err();
    assert!(matches!(error, PlaneError::Unavailable(_)), "{error}");
    assert!(is_quiet(&mut watch, settings.lease * 2).await, "the view stays");
    server.stop();
    server.set_jetstream(true);
    server.start_again().await;
    until("the lease is renewed", async || worker.is_connected() && worker.lease_problems().is_empty()).await;
    until("the renewal is seen", async || frontend.is_connected() && frontend.lease_problems().is_empty()).await;
    assert!(is_quiet(&mut watch, settings.lease * 2).await, "the worker never left");
}

#[tokio::test]
async fn an_outage_shorter_than_a_lease_ends_with_a_line_of_the_log() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let log = CapturedLog::start();
    // A renewal fails after six seconds.
    let settings =
        Settings { lease: Duration::from_secs(12), process: settings::Process::Worker, ..settings(&server.url()) };
    let connection = connect(settings).await;
    let _lease = discovery_of(&connection).register(instance(1, 1), engine()).await.unwrap();
    server.stop();
    until("the loss is logged", async || log.has("requests of frontends that know this worker are served")).await;
    until("a renewal fails", async || log.has("the lease cannot be renewed now")).await;
    server.start_again().await;
    until("the lease is renewed", async || log.has("the lease is renewed again")).await;
    assert!(!log.has("the last view of workers"), "{:?}", log.lines());
}

#[tokio::test]
async fn a_server_that_lost_its_data_is_filled_again() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let settings = short_lease(settings(&server.url()));
    let connection = connect(settings.clone()).await;
    let workers = discovery_of(&connection);
    let _lease = workers.register(instance(1, 1), engine()).await.unwrap();
    let mut watch = watch(settings.clone()).await;
    assert_eq!(next(&mut watch).await, (1, 1, true));
    server.stop();
    server.delete_data();
    server.start_again().await;
    until("the worker registers again", async || {
        connection.bucket.last(WorkerId(1)).await.is_ok_and(|last| last.value.is_some())
    })
    .await;
    assert!(is_quiet(&mut watch, settings.lease * 2).await);
    let _other = workers.register(instance(2, 1), engine()).await.unwrap();
    assert_eq!(next(&mut watch).await, (2, 1, true));
}

#[tokio::test]
async fn subscriptions_and_logs_survive_a_restart() {
    let Some(mut server) = Server::start(&[]).await else { return };
    let settings = settings(&server.url());
    let connection = connect(settings.clone()).await;
    let (worker, router) = (NatsEvents::new(Arc::clone(&connection)), NatsEvents::new(connect(settings).await));
    let mut events = router.subscribe(Topic::Cache);
    let log = Arc::new(EventLog::new(Epoch(1)));
    let _offer = worker.offer(SOURCE, Arc::clone(&log));
    until("the log is offered", async || router.snapshot(SOURCE).await.is_ok()).await;
    server.stop();
    lost(&connection).await;
    assert!(matches!(worker.snapshot(SOURCE).await, Err(PlaneError::Unavailable(_))));
    log.announce(BlockEvent::Removed { level: Level::G1, blocks: vec![SequenceHash::from_bytes([1; 16])] });
    (1..=10).for_each(|number| worker.publish(load(number)));
    server.start_again().await;
    until("the log answers", async || {
        router.range(SOURCE, Epoch(1), 0).await.is_ok_and(|range| range.is_some_and(|events| events.len() == 1))
    })
    .await;
    // The events of the outage arrive if both have connected again by then, and later ones in any case.
    worker.publish(load(11));
    let mut seen = 0;
    while seen < 11 {
        let EventBody::Load(load) = contract::soon(&mut events).await.body else { panic!("only load was sent") };
        assert!(load.number > seen, "in order");
        seen = load.number;
    }
}

#[tokio::test]
async fn a_cluster_of_three_goes_on_without_one() {
    let Some(mut servers) = Server::cluster().await else { return };
    let urls = servers.iter().map(Server::url).collect();
    let settings = Settings { servers: urls, replicas: 3, ..settings("") };
    let connection = connect(settings.clone()).await;
    let workers = discovery_of(&connection);
    let _lease = workers.register(instance(1, 1), engine()).await.unwrap();
    let mut watch = watch(settings.clone()).await;
    assert_eq!(next(&mut watch).await, (1, 1, true));
    let connected_to: usize = connection.client.server_info().server_name[1..].parse().unwrap();
    servers[connected_to].stop();
    let mut lease = None;
    until("the cluster accepts a registration", async || {
        lease = workers.register(instance(2, 1), engine()).await.ok();
        lease.is_some()
    })
    .await;
    assert_eq!(next(&mut watch).await, (2, 1, true), "the first never left");
    drop(lease);
    assert_eq!(next(&mut watch).await, (2, 1, false));
}
