//! The order of offloads among cache domains, and which requests are dropped when the queue is full. Pure.
//!
//! **Order**: start-time fair queueing (Goyal, Vin, Cheng, 1996). Each domain has a queue; the domain with the smallest
//! virtual time (blocks served, divided by its weight) is served next. A domain that becomes active begins at the
//! queue's virtual time, or at its own if that is later. **Drops**: longest queue first. When the queue is full, the
//! domain with the most requests for its weight loses its latest ones. So a flood costs its own domain blocks, and no
//! other.
//!
//! Not `tier::drr`: domains here are not known in advance, the queue is bounded with drops from the longest flow, and a
//! batch takes as many blocks of one domain as fit, whereas DRR serves a fixed set of groups in quanta of bytes and
//! makes a request wait until its group has saved up credit for it.

use crate::block::{DomainId, SequenceHash};
use crate::tier::Quotas;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A block to offload, and its cache domain.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(in crate::manager) struct OffloadRequest {
    pub(in crate::manager) hash: SequenceHash,
    pub(in crate::manager) domain: DomainId,
}

/// Offload requests by domain.
pub(super) struct FairQueue {
    capacity: usize,
    quotas: Quotas,
    domains: BTreeMap<DomainId, DomainQueue>,
    /// The next domain: virtual times of all domains with requests.
    order: BTreeSet<(VirtualTime, DomainId)>,
    /// Virtual times of domains with empty queues, where they are later than `now`: a domain with few requests at a
    /// time is charged for those served before.
    inactive: BTreeMap<DomainId, VirtualTime>,
    /// The virtual time: that of the domain served last, when it was chosen.
    now: VirtualTime,
    waiting: usize,
    /// The number of the next request, ascending.
    number: u64,
}

/// Number of requests served, divided by the weight.
type VirtualTime = u64;

struct DomainQueue {
    weight: u32,
    virtual_time: VirtualTime,
    hashes: VecDeque<(u64, SequenceHash)>,
}

impl DomainQueue {
    fn cost(&self, hashes: usize) -> VirtualTime {
        /// Fixed-point factor, so that integers suffice for large weights.
        const SCALE: u64 = 1 << 20;
        hashes as u64 * SCALE / u64::from(self.weight.max(1))
    }

    fn load(&self) -> u64 {
        self.cost(self.hashes.len())
    }
}

impl FairQueue {
    pub(super) fn new(capacity: usize) -> Self {
        let (domains, order, inactive) = (BTreeMap::new(), BTreeSet::new(), BTreeMap::new());
        Self { capacity, quotas: Quotas::default(), domains, order, inactive, now: 0, waiting: 0, number: 0 }
    }

    /// Sets the weights of domains that become active from now on.
    pub(super) fn set_weights(&mut self, quotas: &Quotas) {
        self.quotas = quotas.clone();
    }

    /// Number of queued requests.
    pub(super) fn len(&self) -> usize {
        self.waiting
    }

    /// The number that the next request gets; queued ones have lower numbers.
    pub(super) fn next_number(&self) -> u64 {
        self.number
    }

    /// The number of the oldest queued request.
    pub(super) fn oldest(&self) -> Option<u64> {
        self.domains.values().filter_map(|domain_queue| domain_queue.hashes.front()).map(|(number, _)| *number).min()
    }

    /// Queues requests, and returns how many were dropped: of these or of earlier ones.
    pub(super) fn push(&mut self, requests: &[OffloadRequest]) -> usize {
        for same in requests.chunk_by(|one, next| one.domain == next.domain) {
            let domain = same[0].domain;
            let domain_queue = self.domains.entry(domain).or_insert_with(|| {
                let virtual_time = self.inactive.remove(&domain).unwrap_or_default().max(self.now);
                self.order.insert((virtual_time, domain));
                DomainQueue { weight: self.quotas.weight(domain), virtual_time, hashes: VecDeque::new() }
            });
            domain_queue.hashes.extend((self.number..).zip(same).map(|(number, request)| (number, request.hash)));
            self.number += same.len() as u64;
            self.waiting += same.len();
        }
        let dropped = self.waiting.saturating_sub(self.capacity);
        while self.waiting > self.capacity {
            self.drop_latest(self.waiting - self.capacity);
        }
        dropped
    }

    /// Drops up to `limit` requests of the domain with the longest queue, until another one is as long.
    fn drop_latest(&mut self, limit: usize) {
        let mut longest: [Option<(u64, DomainId)>; 2] = [None; 2];
        for (domain, domain_queue) in &self.domains {
            let load = Some((domain_queue.load(), *domain));
            if load > longest[0] {
                longest = [load, longest[0]];
            } else {
                longest[1] = longest[1].max(load);
            }
        }
        let [Some((load, domain)), next] = longest else { return };
        let domain_queue = self.domains.get_mut(&domain).expect("its length was just read");
        let above = load - next.map_or(0, |(load, _)| load);
        let count = (above / domain_queue.cost(1).max(1)).clamp(1, limit as u64) as usize;
        let left = domain_queue.hashes.len().saturating_sub(count);
        self.waiting -= domain_queue.hashes.len() - left;
        domain_queue.hashes.truncate(left);
        if left == 0 {
            self.remove(domain);
        }
    }

    /// Takes up to `limit` requests in fair order.
    pub(super) fn take(&mut self, limit: usize) -> Vec<OffloadRequest> {
        let mut taken = Vec::with_capacity(limit.min(self.waiting));
        while taken.len() < limit
            && let Some((virtual_time, domain)) = self.order.pop_first()
        {
            self.now = virtual_time;
            let domain_queue = self.domains.get_mut(&domain).expect("a waiting domain has a queue");
            let count = domain_queue.hashes.len().min(limit - taken.len());
            taken.extend(domain_queue.hashes.drain(..count).map(|(_, hash)| OffloadRequest { hash, domain }));
            self.waiting -= count;
            domain_queue.virtual_time += domain_queue.cost(count);
            if domain_queue.hashes.is_empty() {
                self.inactive.insert(domain, domain_queue.virtual_time);
                self.domains.remove(&domain);
            } else {
                self.order.insert((domain_queue.virtual_time, domain));
            }
        }
        if self.waiting == 0 {
            self.inactive.clear();
        } else {
            self.inactive.retain(|_, virtual_time| *virtual_time > self.now);
        }
        taken
    }

    fn remove(&mut self, domain: DomainId) {
        if let Some(domain_queue) = self.domains.remove(&domain) {
            self.order.remove(&(domain_queue.virtual_time, domain));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: usize = 100;

    fn domain(n: u8) -> DomainId {
        DomainId::from_bytes([n; 16])
    }

    fn requests(of: u8, from: u64, count: u64) -> Vec<OffloadRequest> {
        let hash = |n: u64| {
            let mut bytes = [of; 16];
            bytes[8..].copy_from_slice(&n.to_le_bytes());
            SequenceHash::from_bytes(bytes)
        };
        (from..from + count).map(|n| OffloadRequest { hash: hash(n), domain: domain(of) }).collect()
    }

    fn count_of(requests: &[OffloadRequest], n: u8) -> usize {
        requests.iter().filter(|request| request.domain == domain(n)).count()
    }

    #[test]
    fn a_flood_drops_its_own_latest_requests() {
        let mut queue = FairQueue::new(CAPACITY);
        assert_eq!(queue.push(&requests(1, 0, 100)), 0);
        assert_eq!(queue.push(&requests(2, 0, 30)), 30);
        assert_eq!(queue.push(&requests(1, 100, 1_000)), 1_000);
        assert_eq!(queue.len(), CAPACITY);
        let all = queue.take(CAPACITY);
        assert_eq!((count_of(&all, 1), count_of(&all, 2)), (70, 30));
        let first: Vec<OffloadRequest> = all.into_iter().filter(|request| request.domain == domain(1)).collect();
        assert_eq!(first, requests(1, 0, 70));
        assert!(queue.domains.is_empty() && queue.order.is_empty() && queue.len() == 0);
    }

    #[test]
    fn a_full_queue_is_shared_by_weight() {
        let mut queue = FairQueue::new(CAPACITY);
        queue.set_weights(&Quotas::default().with_weight(domain(3), 2.0));
        let dropped: usize =
            (0..50).map(|n| (1..=3).map(|of| queue.push(&requests(of, n * 9, 9))).sum::<usize>()).sum();
        assert_eq!(dropped, 50 * 27 - CAPACITY);
        let all = queue.take(CAPACITY);
        assert!(
            count_of(&all, 1).abs_diff(25) <= 1 && count_of(&all, 2).abs_diff(25) <= 1,
            "{} {}",
            count_of(&all, 1),
            count_of(&all, 2)
        );
    }

    #[test]
    fn a_new_domain_waits_for_one_batch() {
        let mut queue = FairQueue::new(10_000);
        queue.set_weights(&Quotas::default().with_weight(domain(3), 2.0));
        queue.push(&requests(1, 0, 3_000));
        assert_eq!(count_of(&queue.take(10), 1), 10);
        queue.push(&requests(2, 0, 4));
        queue.push(&requests(3, 0, 3_000));
        let next = [queue.take(10), queue.take(10)].concat();
        assert_eq!(count_of(&next, 2), 4, "a new domain does not wait for the flood");
        let many: Vec<OffloadRequest> = (0..90).flat_map(|_| queue.take(10)).collect();
        assert!(count_of(&many, 3).abs_diff(600) <= 20, "two thirds: {}", count_of(&many, 3));
        assert_eq!(many.len(), 900);
    }

    #[test]
    fn the_oldest_request_of_all_domains_is_known() {
        let mut queue = FairQueue::new(CAPACITY);
        assert_eq!((queue.oldest(), queue.next_number()), (None, 0));
        queue.push(&[requests(1, 0, 2), requests(2, 0, 2), requests(1, 2, 1)].concat());
        assert_eq!((queue.oldest(), queue.next_number()), (Some(0), 5));
        queue.take(3);
        assert_eq!(queue.oldest(), Some(2));
    }

    #[test]
    fn small_repeated_requests_do_not_starve_a_flood() {
        let mut queue = FairQueue::new(10_000);
        queue.push(&requests(9, 0, 5_000));
        let mut got = 0;
        for round in 0..100 {
            // As many requests are queued as were taken.
            for of in 1..=4 {
                queue.push(&requests(of, 10 * round, 10));
            }
            got += self::count_of(&queue.take(40), 9);
        }
        assert!((700..=900).contains(&got), "{got} of 4,000 for the fifth of five equal domains");
        assert!(queue.inactive.len() <= 5);
    }
}
