//! Selects queued requests to remove in favour of a new one when the queue is full.
//!
//! A tenth of the queue's space is guaranteed to each class but the highest, which is guaranteed the rest. A new
//! request replaces, in this order and the latest arrival first:
//! 1. requests of lower classes, as long as those keep their guarantee;
//! 2. if its own class stays within its guarantee: the one request of a lower class that is partly above the
//!    guarantee, and requests of higher classes above theirs, but never the last one of a class;
//! 3. requests of its own class, of the tenant with the most tokens per weight, as long as that tenant keeps at least
//!    as many per weight as the new request's tenant then has;
//! 4. if it is not late itself: late requests of its own tenant and class.
//!
//! Each victim is found in logarithmic time.

use super::{FairQueue, LOWER_CLASS_SHARE};
use crate::admission::settings::Settings;
use crate::admission::ticket::QueuedRequest;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, btree_set};
use std::iter::{Peekable, Rev};
use std::sync::Arc;

/// Queued tokens of one class: requests by arrival, and tenants by their tokens per weight.
#[derive(Default)]
pub(super) struct Occupancy {
    tokens: u64,
    /// Number and tokens of each request, in order of arrival.
    arrivals: BTreeSet<(u64, u64)>,
    tenants: BTreeMap<Arc<str>, TenantTokens>,
    by_share: BTreeSet<(Share, Arc<str>)>,
    /// Requests and tenants that were examined.
    #[cfg(test)]
    pub(super) examined: std::cell::Cell<usize>,
}

/// Queued tokens of one tenant.
struct TenantTokens {
    tokens: u64,
    /// Weight as configured when its first request came.
    weight: f64,
    arrivals: BTreeSet<(u64, u64)>,
    /// Its late requests.
    late: BTreeSet<(u64, u64)>,
}

/// Tokens per weight, ordered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Share(u64);

impl Share {
    fn of(tokens: u64, weight: f64) -> Self {
        // The bits of positive floats are ordered as their values are.
        Self((tokens as f64 / weight).to_bits())
    }
}

impl TenantTokens {
    fn share(&self) -> Share {
        Share::of(self.tokens, self.weight)
    }
}

impl Occupancy {
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(super) fn add(&mut self, number: u64, request: &QueuedRequest, weight: f64) {
        self.change(number, request, weight, true);
    }

    pub(super) fn remove(&mut self, number: u64, request: &QueuedRequest) {
        self.change(number, request, 1.0, false);
    }

    fn change(&mut self, number: u64, request: &QueuedRequest, weight: f64, add: bool) {
        let one = (number, request.tokens);
        let fresh = || TenantTokens { tokens: 0, weight, arrivals: BTreeSet::new(), late: BTreeSet::new() };
        let of_tenant = self.tenants.entry(request.tenant.clone()).or_insert_with(fresh);
        self.by_share.remove(&(of_tenant.share(), request.tenant.clone()));
        if add {
            self.tokens += request.tokens;
            of_tenant.tokens += request.tokens;
            self.arrivals.insert(one);
            of_tenant.arrivals.insert(one);
            of_tenant.late.extend(request.is_late.then_some(one));
        } else {
            self.tokens -= request.tokens;
            of_tenant.tokens -= request.tokens;
            self.arrivals.remove(&one);
            of_tenant.arrivals.remove(&one);
            of_tenant.late.remove(&one);
        }
        if of_tenant.arrivals.is_empty() {
            self.tenants.remove(&request.tenant);
        } else {
            self.by_share.insert((of_tenant.share(), request.tenant.clone()));
        }
    }

    /// Takes the latest requests of the tenants with the most tokens per weight, while these keep at least as many as
    /// the tenant of the new request has with it.
    fn take_from_tenants(&self, request: &QueuedRequest, weight: f64, victims: &mut Victims) {
        let own = self.tenants.get(&request.tenant).map_or(0, |of_tenant| of_tenant.tokens);
        let mine = Share::of(own + request.tokens, weight);
        // Tenants that lost requests, by what is left to them; all others are in `by_share`.
        let mut touched: BinaryHeap<(Share, &Arc<str>)> = BinaryHeap::new();
        let mut left: HashMap<&Arc<str>, (u64, _)> = HashMap::new();
        let mut untouched = self.by_share.iter().rev().filter(|(_, name)| *name != request.tenant).peekable();
        while !victims.is_enough() {
            #[cfg(test)]
            self.examine();
            let next = untouched.peek().map(|(share, _)| *share);
            let name = match touched.peek() {
                Some(first) if next.is_none_or(|next| next <= first.0) => touched.pop().map(|(_, name)| name),
                _ => untouched.next().map(|(_, name)| name),
            };
            let Some(name) = name else { return };
            let of_tenant = &self.tenants[name];
            let (tokens, arrivals) =
                left.entry(name).or_insert_with(|| (of_tenant.tokens, of_tenant.arrivals.iter().rev()));
            let Some((number, one)) = arrivals.next() else { continue };
            *tokens -= one;
            let rest = Share::of(*tokens, of_tenant.weight);
            if rest < mine {
                return;
            }
            victims.take(*number, *one);
            touched.push((rest, name));
        }
    }

    /// Takes late requests of the tenant of a request that is not late, the latest first.
    fn take_late(&self, request: &QueuedRequest, victims: &mut Victims) {
        let Some(of_tenant) = self.tenants.get(&request.tenant).filter(|_| !request.is_late) else { return };
        for (number, tokens) in of_tenant.late.iter().rev() {
            if victims.is_enough() {
                return;
            }
            #[cfg(test)]
            self.examine();
            victims.take(*number, *tokens);
        }
    }

    #[cfg(test)]
    fn examine(&self) {
        self.examined.set(self.examined.get() + 1);
    }
}

/// The remaining requests of a class, the latest first.
struct Arrivals<'a> {
    #[cfg(test)]
    occupancy: &'a Occupancy,
    tokens: u64,
    requests: usize,
    latest_first: Peekable<Rev<btree_set::Iter<'a, (u64, u64)>>>,
}

impl<'a> Arrivals<'a> {
    fn of(occupancy: &'a Occupancy) -> Self {
        let latest_first = occupancy.arrivals.iter().rev().peekable();
        Self {
            #[cfg(test)]
            occupancy,
            tokens: occupancy.tokens,
            requests: occupancy.arrivals.len(),
            latest_first,
        }
    }

    /// Takes requests until the new one fits, while `may` allows it: of the class's tokens before and after, and its
    /// number of requests after.
    fn take(&mut self, victims: &mut Victims, may: impl Fn(u64, u64, usize) -> bool) {
        while !victims.is_enough()
            && let Some(&&(number, tokens)) = self.latest_first.peek()
        {
            #[cfg(test)]
            self.occupancy.examine();
            if !may(self.tokens, self.tokens - tokens, self.requests - 1) {
                return;
            }
            self.latest_first.next();
            (self.tokens, self.requests) = (self.tokens - tokens, self.requests - 1);
            victims.take(number, tokens);
        }
    }
}

/// Requests to remove in favour of a new one.
struct Victims {
    /// Tokens by which the new request exceeds the queue's space.
    short: u64,
    /// Tokens of the requests in `requests`.
    freed: u64,
    requests: Vec<(u64, u64)>,
}

impl Victims {
    fn is_enough(&self) -> bool {
        self.freed >= self.short
    }

    fn take(&mut self, number: u64, tokens: u64) {
        self.freed += tokens;
        self.requests.push((number, tokens));
    }

    /// Their numbers, without those that need not go because a larger one was taken after them.
    fn needed(mut self) -> Vec<u64> {
        let mut spare = self.freed - self.short;
        let mut needed: Vec<u64> = Vec::with_capacity(self.requests.len());
        while let Some((number, tokens)) = self.requests.pop() {
            if tokens <= spare {
                spare -= tokens;
            } else {
                needed.push(number);
            }
        }
        needed.reverse();
        needed
    }
}

impl FairQueue {
    /// Requests to remove so that a new one fits; `None` if that is not possible.
    pub(super) fn select_victims(&self, limits: &Settings, request: &QueuedRequest) -> Option<Vec<u64>> {
        let short = (self.tokens + request.tokens).saturating_sub(limits.max_queued_tokens);
        // An empty queue takes a request of any size.
        if short == 0 || self.waiting.is_empty() {
            return Some(Vec::new());
        }
        let mut victims = Victims { short, freed: 0, requests: Vec::new() };
        let class = request.priority as usize;
        let keep = |class| guaranteed(limits.max_queued_tokens, class);
        let mut latest = self.classes.each_ref().map(|class| Arrivals::of(&class.occupancy));
        for (lower, latest) in latest.iter_mut().enumerate().take(class) {
            latest.take(&mut victims, |_, after, _| after >= keep(lower));
        }
        if self.classes[class].occupancy.tokens + request.tokens <= keep(class) {
            for (lower, latest) in latest.iter_mut().enumerate().take(class) {
                latest.take(&mut victims, |before, _, _| before > keep(lower));
            }
            for (higher, latest) in latest.iter_mut().enumerate().skip(class + 1) {
                latest.take(&mut victims, |before, _, left| before > keep(higher) && left > 0);
            }
        }
        self.classes[class].occupancy.take_from_tenants(request, limits.tenant(&request.tenant).weight, &mut victims);
        self.classes[class].occupancy.take_late(request, &mut victims);
        victims.is_enough().then(|| victims.needed())
    }
}

/// Tokens that are guaranteed to a class.
fn guaranteed(queue: u64, class: usize) -> u64 {
    let lower = (queue as f64 * LOWER_CLASS_SHARE) as u64;
    if class < 2 { lower } else { queue - 2 * lower }
}
