//! Copies of a shared prefix ahead of demand: whether a further one pays, which worker gets it, and from where.
//!
//! A copy that is made while a request waits for it costs that request the time of computing or loading the prefix. One
//! that is loaded before costs no request anything. So it is made when what later requests save, as in
//! [`replication`](super::replication), is more than the time for which it occupies its source, and when loading is
//! faster than computing.

use super::replication::Replication;
use crate::fleet::Worker;
use crate::index::{LEVELS, WorkerOverlap};
use crate::load::{ServiceEstimate, SharedPrefix};
use kvbm::Level;
use std::sync::Arc;

/// A worker as a place for a copy.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place<'a> {
    pub(super) estimate: &'a ServiceEstimate,
    /// What it can reach of the prompt, with what running requests will have computed there.
    pub(super) held: WorkerOverlap,
    /// It gets a copy now.
    pub(super) is_on_the_way: bool,
    /// It has no queue, and can take a copy, if it has room for requests that use it.
    pub(super) may_receive: bool,
    /// Others can read its memory, and it has all of the prefix there now.
    pub(super) may_send: bool,
}

/// The copy to make, by the indexes of the workers.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct PlannedCopy {
    pub(super) to: usize,
    /// The worker whose memory it comes from. `None`: stores that the receiver loads from.
    pub(super) from: Option<usize>,
    /// Estimated seconds of the load.
    pub(super) seconds: f64,
    /// Estimated seconds that requests save within the horizon of the demand.
    pub(super) saved: f64,
}

/// The copy to make.
pub(crate) struct CopyAhead<'a> {
    pub(crate) to: &'a Arc<Worker>,
    /// The worker whose memory it comes from. `None`: stores that the receiver loads from.
    pub(crate) from: Option<&'a Arc<Worker>>,
    /// Length in blocks.
    pub(crate) blocks: u32,
    /// Estimated seconds of the load, and seconds that requests save.
    pub(crate) seconds: f64,
    pub(crate) saved: f64,
}

/// Requests that a copy must be expected to serve within the horizon of the demand. It takes the place of blocks that
/// were used once or twice, and one that is used as rarely is no better than these.
const MIN_REQUESTS: f64 = 4.0;

impl Place<'_> {
    /// Leading blocks of the prefix that are not in its memory.
    fn missing(&self, shared: SharedPrefix) -> u32 {
        shared.blocks.saturating_sub(self.held.in_memory())
    }

    /// Whether it can get the copy. Requests that use it need as many blocks of G1. Where these are nearly all in use,
    /// each further prefix delays the requests that wait for blocks.
    fn is_receiver(&self, shared: SharedPrefix) -> bool {
        self.may_receive && !self.has_copy(shared) && self.estimate.has_room(shared.blocks.into())
    }

    fn has_copy(&self, shared: SharedPrefix) -> bool {
        self.is_on_the_way || self.missing(shared) == 0
    }

    /// Seconds to load what is missing from stores, if they have it.
    fn load_seconds_from_stores(&self, shared: SharedPrefix) -> Option<f64> {
        let missing = self.missing(shared);
        let below = LEVELS.into_iter().zip(*self.held.per_level()).filter(|(level, _)| *level > Level::G2);
        let seconds = below
            .filter(|(_, blocks)| *blocks > 0)
            .map(|(level, blocks)| self.estimate.transfer(level, blocks.min(missing)) + self.estimate.backlog(level));
        (self.held.total() >= shared.blocks).then(|| seconds.sum())
    }

    /// Seconds to load what is missing from the memory of another worker.
    fn load_seconds_from_peer(&self, shared: SharedPrefix) -> f64 {
        self.estimate.transfer(Level::Peer, self.missing(shared)) + self.estimate.backlog(Level::Peer)
    }
}

/// Plans the further copy of a prefix that saves most, if one pays. `per_sequence`: as for [`Replication::of`].
pub(super) fn plan(
    shared: SharedPrefix,
    block_size: u64,
    per_sequence: f64,
    places: &[Place<'_>],
) -> Option<PlannedCopy> {
    let holders = places.iter().filter(|place| place.has_copy(shared)).map(|place| place.estimate);
    let all = places.iter().map(|place| place.estimate).collect();
    let replication = Replication::of(shared, holders, all, per_sequence);
    if !replication.may_copy() || shared.requests / f64::from(replication.copies + 1) < MIN_REQUESTS {
        return None;
    }
    let senders = places.iter().enumerate().filter(|(_, place)| place.may_send && place.missing(shared) == 0);
    let load = |place: &Place<'_>| (place.estimate.sequences, place.estimate.queue);
    let peer = senders
        .min_by(|(_, a), (_, b)| {
            let ((fewer, shorter), (sequences, queue)) = (load(a), load(b));
            fewer.cmp(&sequences).then(shorter.total_cmp(&queue))
        })
        .map(|(at, _)| at);
    let copy_to = |(to, place): (usize, &Place<'_>)| {
        let stores = place.load_seconds_from_stores(shared).map(|seconds| (None, seconds));
        let peer = peer.map(|at| (Some(at), place.load_seconds_from_peer(shared)));
        let (from, seconds) = stores.into_iter().chain(peer).min_by(|(_, a), (_, b)| a.total_cmp(b))?;
        let computing = (u64::from(place.missing(shared)) * block_size) as f64 * place.estimate.seconds_per_token;
        let saved = replication.saved(place.estimate);
        (seconds < computing && saved > seconds).then_some(PlannedCopy { to, from, seconds, saved })
    };
    let receivers = places.iter().enumerate().filter(|(_, place)| place.is_receiver(shared));
    let gain = |copy: &PlannedCopy| copy.saved - copy.seconds;
    // The first of equal ones.
    receivers.filter_map(copy_to).min_by(|a, b| gain(b).total_cmp(&gain(a)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::LoadStats;

    const SHARED: SharedPrefix = SharedPrefix { blocks: 64, requests: 600.0, share: 0.9 };
    const IN_MEMORY: [u32; 5] = [40, 24, 0, 0, 0];
    const IN_STORE: [u32; 5] = [0, 0, 0, 0, 64];
    const NOWHERE: [u32; 5] = [0; 5];

    fn busy(sequences: u32) -> ServiceEstimate {
        ServiceEstimate::of(&LoadStats { sequences, ..LoadStats::default() })
    }

    fn place(estimate: &ServiceEstimate, held: [u32; 5]) -> Place<'_> {
        let held = WorkerOverlap::of(held);
        Place { estimate, held, is_on_the_way: false, may_receive: true, may_send: true }
    }

    /// Each sequence fewer saves ten milliseconds.
    fn planned(shared: SharedPrefix, places: &[Place<'_>]) -> Option<(usize, Option<usize>)> {
        plan(shared, 16, 0.01, places).map(|copy| (copy.to, copy.from))
    }

    #[test]
    fn the_least_loaded_worker_without_the_prefix_gets_a_copy() {
        let loads = [20, 2, 0, 1].map(busy);
        let [holder, a, b, c] = [0, 1, 2, 3].map(|at| place(&loads[at], if at == 0 { IN_MEMORY } else { NOWHERE }));
        assert_eq!(planned(SHARED, &[holder, a, b, c]), Some((2, Some(0))));
        let unavailable = Place { may_receive: false, ..b };
        assert_eq!(planned(SHARED, &[holder, a, unavailable, c]), Some((3, Some(0))));
        assert_eq!(planned(SHARED, &[holder, unavailable]), None);
    }

    #[test]
    fn the_faster_source_is_taken_and_none_that_is_slower_than_computing() {
        let (full, idle) = (busy(20), busy(0));
        let holder = place(&full, IN_MEMORY);
        let no_peer = Place { may_send: false, ..holder };
        assert_eq!(planned(SHARED, &[holder, place(&idle, IN_STORE)]), Some((1, Some(0))), "the memory of a peer");
        assert_eq!(planned(SHARED, &[no_peer, place(&idle, IN_STORE)]), Some((1, None)));
        assert_eq!(planned(SHARED, &[no_peer, place(&idle, NOWHERE)]), None, "there is no source");
        let partial = place(&idle, [0, 0, 0, 0, 63]);
        assert_eq!(planned(SHARED, &[no_peer, partial]), None, "the last block is in no store");
        let mut stats = LoadStats::default();
        stats.speeds.set_onboard(Level::G4, 60.0, 1e6);
        let slow = ServiceEstimate::of(&stats);
        assert_eq!(planned(SHARED, &[no_peer, place(&slow, IN_STORE)]), None, "computing takes less");
    }

    #[test]
    fn nothing_is_copied_that_is_not_hot_or_whose_holders_are_idle() {
        let (full, idle) = (busy(20), busy(0));
        let places = [place(&full, IN_MEMORY), place(&idle, IN_STORE)];
        assert!(planned(SHARED, &places).is_some());
        assert_eq!(planned(SharedPrefix { requests: 7.0, ..SHARED }, &places), None, "3.5 requests for the copy");
        assert_eq!(planned(SHARED, &[place(&idle, IN_MEMORY), place(&idle, IN_STORE)]), None);
        assert_eq!(planned(SHARED, &[place(&full, IN_STORE), place(&idle, IN_STORE)]), None, "none is in memory");
        assert_eq!(planned(SHARED, &[place(&full, IN_MEMORY), place(&idle, IN_MEMORY)]), None, "all have it");
    }

    #[test]
    fn a_worker_whose_memory_is_nearly_full_gets_no_copy() {
        let with_memory = |active_blocks: u32| {
            ServiceEstimate::of(&LoadStats { sequences: 4, active_blocks, total_blocks: 1000, ..LoadStats::default() })
        };
        let (holder, half, nearly) = (busy(20), with_memory(300), with_memory(900));
        let to = |worker| planned(SHARED, &[place(&holder, IN_MEMORY), place(worker, NOWHERE)]);
        assert_eq!(to(&half), Some((1, Some(0))));
        assert_eq!(to(&nearly), None, "the prefix takes 64 of the 100 free blocks, whose number varies");
    }

    #[test]
    fn copies_on_the_way_count_as_copies() {
        let (full, idle) = (busy(20), busy(0));
        let (holder, next) = (place(&full, IN_MEMORY), place(&idle, NOWHERE));
        let on_the_way = Place { is_on_the_way: true, ..next };
        let both = plan(SHARED, 16, 0.01, &[holder, next, next]).unwrap();
        let rest = plan(SHARED, 16, 0.01, &[holder, on_the_way, next]).unwrap();
        assert_eq!((both.to, rest.to, rest.from), (1, 2, Some(0)), "a copy that is on the way is no source");
        assert!(rest.saved < both.saved, "{rest:?} {both:?}");
        assert_eq!(planned(SHARED, &[holder, on_the_way, on_the_way]), None);
    }
}
