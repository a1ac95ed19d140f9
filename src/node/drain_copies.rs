//! Copies of prefixes from the workers of this process, while they drain, to those of other processes.

use futures::future::join_all;
use kvbm::BlockManager;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout_at};
use tokio_util::sync::CancellationToken;
use worker::handoff::PeerTicket;
use worker::plane::nats::NatsDiscovery;
use worker::plane::{Instance, WorkerId};
use worker::serve::{Copies, DrainCopies};

/// The workers of other processes of the deployment.
pub(super) struct OtherWorkers {
    pub(super) discovery: Arc<NatsDiscovery>,
    /// The URL at which they read the memory of the workers of this process.
    pub(super) url: String,
}

/// Time to find the other workers: without NATS nothing is copied.
const FIND_TIMEOUT: Duration = Duration::from_secs(2);

impl OtherWorkers {
    /// Has them copy what requests will probably need of the blocks of workers that drain, until `deadline` at the
    /// latest. `requests_ended` is cancelled when the running requests of all of these have ended.
    pub(super) async fn copy_from(
        self,
        draining: Vec<(Instance, BlockManager)>,
        deadline: Instant,
        requests_ended: CancellationToken,
    ) {
        let began = Instant::now();
        let find_by = deadline.min(began + FIND_TIMEOUT);
        let others = match timeout_at(find_by, self.discovery.registered()).await {
            Ok(Ok(others)) => others,
            Ok(Err(error)) => {
                tracing::warn!(%error, "other workers are not known, so no prefix is copied to them");
                return;
            }
            Err(_) => {
                tracing::warn!("NATS does not answer, so no prefix is copied to other workers");
                return;
            }
        };
        let leaving: Vec<WorkerId> = draining.iter().map(|(instance, _)| instance.id).collect();
        let copies_of = |(instance, blocks): (Instance, BlockManager)| {
            let source = PeerTicket { peer: instance.id, url: Some(self.url.clone()) }.encode();
            DrainCopies::new(blocks, source, &instance, &others, &leaving)
        };
        let mut copies: Vec<DrainCopies> = draining.into_iter().map(copies_of).collect();
        let all = join_all(copies.iter_mut().map(|copies| copies.run(requests_ended.cancelled())));
        let is_complete = timeout_at(deadline, all).await.is_ok();
        let sum = |sum: Copies, copies: &DrainCopies| sum + copies.copied();
        let Copies { prefixes, blocks, bytes } = copies.iter().fold(Copies::default(), sum);
        if prefixes > 0 || !is_complete {
            let seconds = began.elapsed().as_secs_f64();
            tracing::info!(prefixes, blocks, bytes, seconds, is_complete, "prefixes copied to other workers");
        }
    }
}
