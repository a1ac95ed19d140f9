use super::*;
use frontend::Health as _;
use futures::future::BoxFuture;
use kvbm::{Epoch, EventLog};
use tokio::sync::watch;
use worker::engine::{Engine, Error as EngineError, ModelCard, OutputStream, Request as EngineRequest};
use worker::plane::local::{LocalDiscovery, LocalEvents};
use worker::plane::{Instance, Load, Role};
use worker::serve::Worker;

/// An engine that is never asked.
struct Unused;

impl Engine for Unused {
    fn generate(&self, _: EngineRequest) -> BoxFuture<'_, Result<OutputStream, EngineError>> {
        Box::pin(async { Err(EngineError::Failed("it is not asked".into())) })
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        Vec::new()
    }

    fn readiness(&self) -> Readiness {
        Readiness::Ready
    }
}

fn instance(id: u64, epoch: u64) -> Instance {
    let model = Arc::new(ModelCard { vocabulary: 10, ..ModelCard::new("m", 64, 16) });
    Instance { id: WorkerId(id), epoch: Epoch(epoch), role: Role::Both, model, stores: vec![], kv_cache: None }
}

#[test]
fn a_process_whose_workers_cannot_be_registered_yet_says_why() {
    let health = WorkerHealth::default();
    let reason = || match health.readiness() {
        Readiness::NotReady(reason) => reason,
        Readiness::Ready => panic!("no worker is registered"),
    };
    assert_eq!(reason(), "the workers are not registered");
    health.tiers.set_registration_problem(Some("the disk of NATS is full".to_owned()));
    assert_eq!(reason(), "the disk of NATS is full");
    health.tiers.set_registration_problem(None);
    assert_eq!(reason(), "the workers are not registered");
}

/// Lets the tasks of the workers run.
async fn settle() {
    tokio::time::sleep(Duration::from_secs(2)).await;
}

#[tokio::test(start_paused = true)]
async fn a_process_whose_workers_another_process_serves_is_not_ready() {
    let planes = Planes { discovery: Arc::new(LocalDiscovery::default()), events: Arc::new(LocalEvents::default()) };
    let load = watch::Sender::new(Load::default());
    let mut workers = Vec::new();
    for id in [1, 2] {
        let log = Arc::new(EventLog::new(Epoch(1)));
        workers.push(Worker::start(&planes, instance(id, 1), Arc::new(Unused), log, load.subscribe()).await.unwrap());
    }
    let health = WorkerHealth { registered: AtomicBool::new(true), ..WorkerHealth::default() };
    let cordons = workers.iter().zip(1..).map(|(worker, id)| (WorkerId(id), worker.cordon().clone()));
    health.cordons.set(cordons.collect()).unwrap();
    let superseded = |id| format!("worker w{id} is not registered: another process serves it");
    assert!(matches!(health.readiness(), Readiness::Ready));

    let one = planes.discovery.register(instance(1, 2), Arc::new(Unused)).await.unwrap();
    settle().await;
    assert!(matches!(health.readiness(), Readiness::Ready), "the other worker is registered");
    assert!(health.degraded().iter().any(|problem| problem.contains(&superseded(1))), "{:?}", health.degraded());

    workers[1].cordon().cordon();
    settle().await;
    let Readiness::NotReady(reason) = health.readiness() else { panic!("no worker is in service") };
    assert!(reason.contains(&superseded(1)) && reason.contains("worker w2 is cordoned"), "{reason}");

    drop(one);
    settle().await;
    assert!(matches!(health.readiness(), Readiness::Ready), "it is registered again");
    assert!(!health.degraded().iter().any(|problem| problem.contains(&superseded(1))));
}
