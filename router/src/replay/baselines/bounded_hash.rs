//! Consistent hashing with bounded loads (Mirrokni, Thorup and Zadimoghaddam, arXiv 1608.01350), as `KubeAI` uses it
//! for prefixes: the hash of the beginning of the prompt is a point on a ring; the request goes to the next worker on
//! the ring with at most 1.25 times the mean load, both with the request and rounded up as in the paper. Documented
//! defaults of `KubeAI`: 125 % (`meanLoadFactor`), 256 points per worker (`replication`), and the first 100 characters
//! of the prompt (`prefixCharLength`), which are within the first block here.

use super::View;
use crate::hash::splitmix64;

/// Points of the workers, in order: the point, and the worker.
pub(super) struct Ring(Vec<(u64, usize)>);

const REPLICATION: u64 = 256;
const MEAN_LOAD_FACTOR: f64 = 1.25;

impl Ring {
    pub(super) fn new(workers: usize) -> Self {
        let points = |worker: usize| {
            (0..REPLICATION).map(move |nth| (splitmix64(splitmix64(worker as u64 * REPLICATION + nth)), worker))
        };
        let mut ring: Vec<(u64, usize)> = (0..workers).flat_map(points).collect();
        ring.sort_unstable();
        Self(ring)
    }

    pub(super) fn choose(&self, view: &View<'_>) -> usize {
        let (all, workers) = (view.requests.iter().sum::<u64>(), view.workers() as f64);
        let bound = (MEAN_LOAD_FACTOR * (all + 1) as f64 / workers).ceil() as u64;
        let key = splitmix64(view.spec.blocks.first().copied().unwrap_or_default().into());
        let begin = self.0.partition_point(|(point, _)| *point < key);
        let (before, after) = self.0.split_at(begin);
        // Not all workers are above the mean, so one is found.
        let mut in_order = after.iter().chain(before).map(|(_, worker)| *worker);
        in_order.find(|worker| view.requests[*worker] < bound).unwrap_or(0)
    }
}
