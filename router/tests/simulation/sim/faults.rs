//! Injects the faults of a scenario, and ends them.

use super::cluster::Cluster;
use super::network::{Node, Quality};
use super::scenario::Fault;
use kvbm::Faults;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, sleep_until};
use worker::plane::WorkerId;

/// Injects all faults, and returns when the last has ended.
pub(super) async fn run(cluster: &Arc<Cluster>) {
    let start = Instant::now();
    let faults = cluster.scenario.faults.iter().cloned().map(|(at, fault)| {
        let cluster = cluster.clone();
        tokio::spawn(async move {
            sleep_until(start + at).await;
            cluster.world.fault_begins(&fault);
            inject(&cluster, fault.clone()).await;
            cluster.world.fault_ends(&fault);
        })
    });
    for fault in faults.collect::<Vec<_>>() {
        if fault.await.is_err() {
            cluster.world.violated(format_args!("a fault panicked"));
        }
    }
}

async fn inject(cluster: &Arc<Cluster>, fault: Fault) {
    let network = &cluster.world.network;
    match fault {
        Fault::Kill(worker, time) => {
            cluster.kill_worker(worker);
            sleep(time).await;
            restart(cluster, worker).await;
        }
        Fault::Drain(worker, limit) => {
            cluster.drain_worker(worker, limit).await;
            restart(cluster, worker).await;
        }
        Fault::RollingRestart(times, limit) => {
            let workers = cluster.scenario.first_workers();
            for worker in (0..times * workers).map(|nth| WorkerId(nth % workers)) {
                cluster.drain_worker(worker, limit).await;
                restart(cluster, worker).await;
                // Routers learn of it before the next one leaves.
                sleep(Duration::from_secs(1)).await;
            }
        }
        Fault::SameId(worker, time) => {
            let Some(shape) = cluster.scenario.workers.get(worker.0 as usize) else { return };
            let Some(first) = cluster.displace_worker(worker) else { return };
            cluster.start_worker(worker, shape).await;
            sleep(time).await;
            cluster.end_displaced(worker, first);
        }
        Fault::OtherVariant(time) => {
            let worker = WorkerId(cluster.scenario.first_workers());
            restart(cluster, worker).await;
            sleep(time).await;
            cluster.drain_worker(worker, None).await;
        }
        Fault::KillRouter(router, time) => {
            cluster.kill_router(router);
            sleep(time).await;
            if !cluster.routers.lock().contains_key(&router) {
                cluster.start_router(router);
            }
        }
        Fault::Freeze(node, time) => {
            network.freeze(node);
            sleep(time).await;
            network.thaw(node);
        }
        Fault::Cut(a, b, time) => {
            network.cut(a, b);
            sleep(time).await;
            network.mend(a, b);
        }
        Fault::Quality(quality, time) => {
            network.set_quality(quality);
            sleep(time).await;
            network.set_quality(Quality::default());
        }
        Fault::Tier(worker, faults, time) => {
            set_tier(cluster, worker, &faults);
            sleep(time).await;
            set_tier(cluster, worker, &Faults::default());
        }
        Fault::Clock(worker, seconds, time) => {
            set_clock(cluster, worker, seconds);
            sleep(time).await;
            set_clock(cluster, worker, 0);
        }
        Fault::Collect(nth) => {
            if let Some(hash) = cluster.store.as_ref().and_then(|store| store.remove(nth)) {
                cluster.world.log(format_args!("{} loses {hash}", Node::Store));
            }
        }
    }
}

/// Starts a worker unless it runs.
async fn restart(cluster: &Arc<Cluster>, worker: WorkerId) {
    let runs = cluster.workers.lock().contains_key(&worker);
    if let Some(shape) = cluster.scenario.workers.get(worker.0 as usize).filter(|_| !runs) {
        cluster.start_worker(worker, shape).await;
    }
}

fn set_tier(cluster: &Cluster, worker: WorkerId, faults: &Faults) {
    let store = cluster.workers.lock().get(&worker).and_then(|process| process.store.clone());
    if let Some(store) = store {
        store.set(faults.clone());
    }
}

fn set_clock(cluster: &Cluster, worker: WorkerId, seconds: i64) {
    if let Some(process) = cluster.workers.lock().get_mut(&worker) {
        process.clock_error = seconds;
    }
}
