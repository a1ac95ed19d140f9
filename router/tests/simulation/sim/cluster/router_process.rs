//! A router in a process of its own.

use super::Cluster;
use crate::sim::network::Node;
use router::Router;
use std::sync::Arc;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use worker::plane::RouterId;

pub(in crate::sim) struct RouterProcess {
    pub(in crate::sim) router: Arc<Router>,
    pub(in crate::sim) registry: prometheus::Registry,
    /// Cancelled when the process is killed: the connections of its clients break.
    pub(in crate::sim) dead: CancellationToken,
    pub(in crate::sim) started: Instant,
}

impl Cluster {
    /// Starts a router. A restarted one has another id.
    pub(in crate::sim) fn start_router(&self, number: u64) {
        let (life, dead, registry) = (self.life(), CancellationToken::new(), prometheus::Registry::new());
        let planes = self.planes(Node::Router(number), life, &dead);
        let settings = self.scenario.settings.clone();
        self.world.log(format_args!("r{number} starts, with id {life}"));
        match Router::new(RouterId(life), planes.discovery, planes.events, settings, &registry) {
            Ok(router) => {
                let process = RouterProcess { router, registry, dead, started: Instant::now() };
                self.routers.lock().insert(number, process);
            }
            Err(error) => self.world.violated(format_args!("r{number} does not start: {error}")),
        }
    }

    /// Kills a router.
    pub(in crate::sim) fn kill_router(&self, number: u64) {
        let process = self.routers.lock().remove(&number);
        if let Some(process) = process {
            self.world.log(format_args!("r{number} is killed"));
            process.dead.cancel();
        }
    }
}
