//! Some workers and a frontend that knows them, and streams whose worker ends before they do.

use super::*;
use futures::future::join_all;

/// Workers, and a frontend that knew all of them at the start.
pub(super) struct Fleet<'a> {
    pub(super) frontend: Process,
    pub(super) workers: Vec<Process>,
    cluster: &'a Cluster,
    seats: Vec<Seat>,
    /// Arguments of each worker.
    of_workers: &'a [&'a str],
}

impl<'a> Fleet<'a> {
    pub(super) async fn start(cluster: &'a Cluster, workers: usize, of_workers: &'a [&'a str]) -> Self {
        let seats: Vec<Seat> = (1..=workers).map(|nth| cluster.seat(&format!("w{nth}"))).collect();
        let workers = join_all(seats.iter().map(|seat| cluster.worker_at(seat, of_workers))).await;
        let frontend = cluster.frontend().await;
        until_workers(&frontend, workers.len()).await;
        Self { frontend, workers, cluster, seats, of_workers }
    }

    /// Starts a worker that has ended, and waits until the frontend knows it.
    pub(super) async fn start_again(&mut self, at: usize) {
        self.workers[at] = self.cluster.worker_at(&self.seats[at], self.of_workers).await;
        until_workers(&self.frontend, self.workers.len()).await;
    }

    /// A stream of which each choice has begun.
    pub(super) async fn begun(&self, request: &Value) -> Streamed {
        let mut stream = Streamed::start(&self.frontend, request).await;
        stream.read_more(100).await;
        stream
    }

    /// The position of a worker that computes.
    pub(super) async fn busy(&self) -> usize {
        loop {
            for (at, worker) in self.workers.iter().enumerate() {
                if worker.client.metric("blockyard_worker_requests_running", "").await > 0.0 {
                    return at;
                }
            }
        }
    }

    /// Kills the worker that computes a stream, while other clients send requests. Returns its position, and the texts
    /// of the stream, which goes on.
    pub(super) async fn kill_in_mid_stream(&mut self, request: &Value) -> (usize, Vec<String>) {
        let stream = self.begun(request).await;
        let at = self.busy().await;
        let clients = SteadyClients::start(&self.frontend.client, 3);
        self.workers[at].kill();
        let texts = stream.read_to_the_end().await;
        clients.stop().await;
        assert!(self.moves("continued").await > 0.0);
        (at, texts)
    }

    /// Fails unless a stream of the same request that nothing disturbs has these texts.
    pub(super) async fn assert_undisturbed(&self, request: &Value, texts: &[String]) {
        let undisturbed = Streamed::start(&self.frontend, request).await.read_to_the_end().await;
        assert!(texts == undisturbed, "{texts:?}\n{undisturbed:?}");
    }

    /// The number of streams that were moved to another worker, with this outcome.
    pub(super) async fn moves(&self, outcome: &str) -> f64 {
        self.frontend.client.metric("blockyard_router_stream_moves_total", outcome).await
    }
}
