//! The queue of requests: their order, its limits, and which requests are rejected. Pure: values in, values out, and
//! the time is passed in.
//!
//! - **Limits** are in prompt tokens: of the queue, of a tenant's queued requests, of a tenant's running requests.
//! - **Classes**: a higher priority goes first. But a waiting class earns credit: a tenth of the cost of each request
//!   that the classes above it send. When the credit covers its next request, that request goes before theirs. The
//!   credit never exceeds the cost of what waits in the class. A tenth of the queue's space is guaranteed to each
//!   lower class, too (`shed.rs`): else its requests could not wait for their turn.
//! - **Tenants** of a class share by weight, by start-time fair queueing (Goyal, Vin and Cheng 1996): next is the
//!   tenant with the least service per weight. A tenant that becomes active starts at the virtual time, or where its
//!   own service ended if that is later; both are kept while any request runs or waits. Cached tokens cost nothing,
//!   and requests that did not queue are not counted.
//! - **Deadlines and latency targets** decide between the requests of one tenant (`order.rs`).
//! - A request does not wait behind one for another worker, nor behind one of a tenant that has reached its limit.
//!
//! A request that would wait for too long at the measured drain rate is rejected on arrival, or once that is known.

mod order;
mod retry_after;
mod shed;

use super::backlog::{Backlogs, LOWER_CLASS_SHARE};
use super::saturation::Opening;
use super::settings::{LateRequests, Settings};
use super::ticket::{OrderKey, QueuedRequest, Route};
use crate::hash::{NumberMap, NumberSet};
use crate::load::Demand;
use shed::Occupancy;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::plane::WorkerId;

/// Maximum number of tenants without requests whose service is remembered because it is ahead of the virtual time.
const IDLE_TENANTS_MAX: usize = 512;

/// Result of [`FairQueue::admit_or_queue`].
#[derive(Clone, Debug)]
pub(crate) enum Enqueued {
    /// It runs.
    Immediate(u64),
    /// It waits. `shed`: queued requests that were removed in its favour.
    Queued { number: u64, shed: Vec<(u64, QueuedRequest)> },
    /// It is rejected.
    Rejected(Rejection),
}

/// Why a request is rejected. Durations are values of `Retry-After`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Rejection {
    /// The queue is full.
    QueueFull(Duration),
    /// On arrival: its estimated wait at the measured drain rate is too long.
    PredictedTimeout(Duration),
    /// In the queue: its estimated wait at the drain rate as measured now is too long.
    PredictedTimeoutQueued(Duration),
    /// Its tenant's queued requests have reached their limit.
    TenantLimit(Duration),
    /// It was removed in favour of another request.
    Shed(Duration),
    /// It has waited for `max_queue_time`.
    QueueTimeout(Duration),
    /// It cannot meet the target of the time to first token.
    Late(Duration),
    /// Its deadline cannot be met.
    DeadlineExceeded,
}

/// The queue, and the requests that run.
#[derive(Default)]
pub(crate) struct FairQueue {
    last_number: u64,
    waiting: BTreeMap<u64, QueuedRequest>,
    /// When queued requests expire, and their numbers.
    expiries: BTreeSet<(Instant, u64)>,
    /// When queued requests will be late, and their numbers.
    late_from: BTreeSet<(Instant, u64)>,
    running: NumberMap<u64, Running>,
    /// Requests that are being placed again. While there are any, credits are kept.
    rerouting: NumberSet<u64>,
    /// By priority, the lowest first.
    classes: [Class; 3],
    tenants: BTreeMap<Arc<str>, Tenant>,
    /// Number of tenants at which idle ones are removed.
    tenants_until_cleanup: usize,
    reserved: NumberMap<WorkerId, Demand>,
    tokens: u64,
    /// Virtual time: service per weight of the tenant that was served last. A tenant that becomes active starts here.
    virtual_time: f64,
    backlogs: Backlogs,
}

/// A request that was admitted and has not ended.
struct Running {
    tenant: Arc<str>,
    model: Arc<str>,
    tokens: u64,
    cost_tokens: u64,
}

#[derive(Default)]
struct Class {
    /// Credit in tokens, earned from higher classes.
    credit: f64,
    occupancy: Occupancy,
    flows: BTreeMap<Arc<str>, BTreeMap<Route, BTreeSet<OrderKey>>>,
}

#[derive(Default)]
struct Tenant {
    waiting: u64,
    running: u64,
    /// Service per weight, in cost tokens, on the scale of the virtual time.
    served: f64,
    /// By priority: cost of its late requests, and its credit for them in tokens.
    late: [LateShare; 3],
    /// By priority: when there will be space beyond that of which the `Retry-After` of its rejected requests tells.
    retry_slots: [Option<Instant>; 3],
}

/// The late requests of a tenant in one class.
#[derive(Clone, Copy, Default)]
struct LateShare {
    cost: u64,
    /// Earned from its requests in time.
    credit: f64,
}

impl FairQueue {
    /// Admits a new request, queues it, or rejects it. `open`: its route, if that has capacity.
    pub(crate) fn admit_or_queue(
        &mut self,
        limits: &Settings,
        request: QueuedRequest,
        open: Option<Opening>,
        now: Instant,
    ) -> Enqueued {
        if request.target.is_none() && request.start_by.is_some_and(|start_by| start_by <= now) {
            return Enqueued::Rejected(Rejection::DeadlineExceeded);
        }
        let fits = |Opening { queue_time, takes_late }: Opening| {
            if request.is_late {
                takes_late
            } else {
                request.start_by.is_none_or(|start_by| now + queue_time <= start_by)
            }
        };
        if self.waiting.is_empty() && open.is_some_and(fits) && self.may_run(limits, &request.tenant, request.tokens) {
            return Enqueued::Immediate(self.admit_now(&request));
        }
        if request.is_late && limits.late_requests == LateRequests::Reject {
            return Enqueued::Rejected(Rejection::Late(self.retry_after(limits, &request, now)));
        }
        let of_tenant = self.tenants.get(&request.tenant).map_or(0, |tenant| tenant.waiting);
        let most = limits.tenant(&request.tenant).max_queued_tokens;
        if of_tenant > 0 && most.is_some_and(|most| of_tenant + request.tokens > most) {
            return Enqueued::Rejected(Rejection::TenantLimit(self.retry_after(limits, &request, now)));
        }
        // A request on a route that no other waits for is admitted next, whatever the others wait for.
        let is_next = open.is_some() && request.parts().all(|(worker, _)| !self.reserved.contains_key(&worker));
        if !is_next && self.excess_wait(limits, &request, now).is_some_and(|excess| excess > Duration::ZERO) {
            return Enqueued::Rejected(Rejection::PredictedTimeout(self.retry_after(limits, &request, now)));
        }
        let Some(shed) = self.select_victims(limits, &request) else {
            return Enqueued::Rejected(Rejection::QueueFull(self.retry_after(limits, &request, now)));
        };
        let shed = shed.into_iter().filter_map(|number| Some((number, self.remove(number)?))).collect();
        self.last_number += 1;
        self.insert(limits, self.last_number, request);
        Enqueued::Queued { number: self.last_number, shed }
    }

    /// Number of queued requests, also those that are being placed again, and of running ones.
    pub(super) fn outstanding(&self) -> (usize, usize) {
        (self.waiting.len() + self.rerouting.len(), self.running.len())
    }

    /// Admits a request without queueing it.
    pub(super) fn admit_now(&mut self, request: &QueuedRequest) -> u64 {
        self.last_number += 1;
        self.run(self.last_number, request);
        self.last_number
    }

    /// Admits the next request. `open`: a route, if it has capacity.
    pub(crate) fn admit_next(
        &mut self,
        limits: &Settings,
        now: Instant,
        mut open: impl FnMut(&Self, Route) -> Option<Opening>,
    ) -> Option<u64> {
        let (mut firsts, mut held) = ([None; 3], BTreeSet::new());
        for class in (0..firsts.len()).rev() {
            firsts[class] = self.first_of(class, limits, now, &mut held, &mut open);
        }
        let cost_tokens = |number: u64| self.waiting[&number].cost_tokens as f64;
        let paid = (0..2).find(|class| firsts[*class].is_some_and(|n| self.classes[*class].credit >= cost_tokens(n)));
        let class = paid.or_else(|| (0..3).rev().find(|class| firsts[*class].is_some()))?;
        let number = firsts[class]?;
        let cost_tokens = cost_tokens(number);
        if paid.is_some() {
            self.classes[class].credit -= cost_tokens;
        }
        for (below, Class { credit: account, .. }) in self.classes[..class].iter_mut().enumerate() {
            let waiting = self.backlogs.cost(below) as f64;
            // Credit beyond the cost of what waits is useless. Earned credit is kept when requests are shed.
            if waiting > 0.0 {
                *account = (*account + cost_tokens * LOWER_CLASS_SHARE).min(waiting.max(*account));
            }
        }
        let (weight, tenant) = (limits.tenant(&self.waiting[&number].tenant).weight, &self.waiting[&number].tenant);
        let is_late = self.waiting[&number].is_late;
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            self.virtual_time = self.virtual_time.max(tenant.served);
            tenant.served += cost_tokens / weight;
            tenant.late[class].count(is_late, cost_tokens);
        }
        self.backlogs.departed(&self.waiting[&number], now);
        let request = self.remove(number)?;
        self.run(number, &request);
        self.reset_when_empty();
        Some(number)
    }

    /// Removes one request whose time in the queue is over.
    pub(crate) fn pop_expired(&mut self, now: Instant) -> Option<(u64, QueuedRequest)> {
        let (_, number) = *self.expiries.first().filter(|(end, _)| *end <= now)?;
        let request = self.remove(number)?;
        self.reset_when_empty();
        Some((number, request))
    }

    /// Queued requests that can no longer meet their target, the earliest first.
    pub(crate) fn late(&self, now: Instant) -> Vec<u64> {
        self.late_from.iter().take_while(|(from, _)| *from < now).map(|(_, number)| *number).collect()
    }

    /// Removes a queued request that is rejected.
    pub(crate) fn reject(&mut self, number: u64) -> Option<QueuedRequest> {
        let request = self.remove(number)?;
        self.reset_when_empty();
        Some(request)
    }

    /// When the next queued request expires.
    pub(crate) fn next_expiry(&self) -> Option<Instant> {
        self.expiries.first().map(|(end, _)| *end)
    }

    /// Removes a request in whatever state. Returns it if it was queued.
    pub(crate) fn leave(&mut self, number: u64) -> Option<QueuedRequest> {
        let waited = self.remove(number);
        if let Some(Running { tenant: name, model, tokens, cost_tokens }) = self.running.remove(&number) {
            self.backlogs.ended(&model, cost_tokens);
            let (is_drained, virtual_time) = (self.is_drained(), self.virtual_time);
            if let Some(tenant) = self.tenants.get_mut(&name) {
                tenant.running -= tokens;
                if tenant.running == 0 && is_drained && tenant.served <= virtual_time {
                    self.tenants.remove(&name);
                }
            }
        }
        if self.rerouting.remove(&number) || waited.is_some() {
            self.reset_when_empty();
        } else {
            self.end_busy_period();
        }
        waited
    }

    /// Removes a queued request that is to be placed again, until [`Self::insert`]. Returns whether it was queued.
    pub(crate) fn begin_reroute(&mut self, number: u64) -> bool {
        if !self.waiting.contains_key(&number) {
            return false;
        }
        self.rerouting.insert(number);
        self.remove(number).is_some()
    }

    /// Up to `most` queued requests that match: by priority, then those that are not late, then those that were placed
    /// the longest ago.
    pub(crate) fn select(&self, most: usize, which: impl Fn(&QueuedRequest) -> bool) -> Vec<u64> {
        let mut found: Vec<(&u64, &QueuedRequest)> =
            self.waiting.iter().filter(|(_, request)| which(request)).collect();
        found.sort_by_key(|(number, request)| (Reverse(request.priority), request.is_late, request.placed, **number));
        found.into_iter().take(most).map(|(number, _)| *number).collect()
    }

    /// Workers that queued requests wait for.
    pub(crate) fn awaited_workers(&self) -> impl Iterator<Item = WorkerId> {
        self.reserved.keys().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Models of queued requests.
    pub(crate) fn models(&self) -> BTreeSet<Arc<str>> {
        self.waiting.values().map(|request| request.model.clone()).collect()
    }

    /// Queued prompt tokens, by priority.
    pub(crate) fn queued_tokens(&self) -> [u64; 3] {
        [0, 1, 2].map(|class: usize| self.classes[class].occupancy.tokens())
    }

    /// Sum of the reservations of queued requests on a worker.
    pub(crate) fn reserved(&self, worker: WorkerId) -> Demand {
        self.reserved.get(&worker).copied().unwrap_or_default()
    }

    /// Sets the number of requests that the workers of a model have. It bounds the drain rate until that is measured.
    pub(crate) fn set_running(&mut self, model: &str, requests: u64) {
        self.backlogs.set_running(model, requests);
    }

    /// Removes requests that will wait for too long at the measured drain rate.
    pub(crate) fn pop_predicted_timeouts(&mut self, now: Instant) -> Vec<(u64, QueuedRequest)> {
        let found = self.backlogs.predicted_timeouts(now);
        let removed = found.into_iter().filter_map(|number| Some((number, self.remove(number)?))).collect();
        self.reset_when_empty();
        removed
    }

    /// Measured drain rates in tokens per second, by model.
    pub(crate) fn rates(&self, now: Instant) -> impl Iterator<Item = (&str, f64)> {
        self.backlogs.rates(now)
    }

    /// Whether a tenant's limit allows another running request. One larger than the limit runs alone.
    fn may_run(&self, limits: &Settings, tenant: &str, tokens: u64) -> bool {
        let running = self.tenants.get(tenant).map_or(0, |tenant| tenant.running);
        running == 0 || limits.tenant(tenant).max_inflight_tokens.is_none_or(|most| running + tokens <= most)
    }

    fn run(&mut self, number: u64, request: &QueuedRequest) {
        self.tenant(&request.tenant).running += request.tokens;
        self.backlogs.started(&request.model, request.cost_tokens);
        let (tenant, model) = (request.tenant.clone(), request.model.clone());
        self.running
            .insert(number, Running { tenant, model, tokens: request.tokens, cost_tokens: request.cost_tokens });
    }

    /// The state of a tenant. From time to time idle tenants are removed: those that the virtual time has passed,
    /// which would start at it in any case, and of the others the nearest to it, beyond [`IDLE_TENANTS_MAX`].
    fn tenant(&mut self, name: &Arc<str>) -> &mut Tenant {
        if self.tenants.len() >= self.tenants_until_cleanup.max(2 * IDLE_TENANTS_MAX) {
            let idle = |tenant: &Tenant| tenant.waiting == 0 && tenant.running == 0;
            let of_idle = self.tenants.values().filter(|tenant| idle(tenant)).map(|tenant| tenant.served);
            let mut ahead: Vec<f64> = of_idle.filter(|served| *served > self.virtual_time).collect();
            let last = ahead.len().checked_sub(IDLE_TENANTS_MAX + 1);
            let caught_up =
                last.map_or(self.virtual_time, |last| *ahead.select_nth_unstable_by(last, f64::total_cmp).1);
            self.tenants.retain(|_, tenant| !idle(tenant) || tenant.served > caught_up);
            self.tenants_until_cleanup = 2 * self.tenants.len();
        }
        self.tenants.entry(name.clone()).or_default()
    }

    /// Queues a request. A rerouted one has kept its number, and so its position.
    pub(crate) fn insert(&mut self, limits: &Settings, number: u64, request: QueuedRequest) {
        let (virtual_time, again) = (self.virtual_time, self.rerouting.remove(&number));
        let tenant = self.tenant(&request.tenant);
        if tenant.waiting == 0 && !again {
            tenant.served = tenant.served.max(virtual_time);
        }
        tenant.waiting += request.tokens;
        self.tokens += request.tokens;
        for (worker, amount) in request.parts() {
            self.reserved.entry(worker).or_default().add(amount);
        }
        let weight = limits.tenant(&request.tenant).weight;
        self.backlogs.add(number, &request, weight, again);
        let class = &mut self.classes[request.priority as usize];
        class.occupancy.add(number, &request, weight);
        class
            .flows
            .entry(request.tenant.clone())
            .or_default()
            .entry(request.route)
            .or_default()
            .insert(request.order_key(number));
        self.expiries.insert((request.expires_at(), number));
        self.late_from.extend(request.late_from().map(|from| (from, number)));
        if request.is_late {
            self.tenant(&request.tenant).late[request.priority as usize].cost += request.cost_tokens;
        }
        self.waiting.insert(number, request);
    }

    /// Removes a queued request. The caller then calls [`Self::reset_when_empty`], unless another request takes its
    /// place.
    fn remove(&mut self, number: u64) -> Option<QueuedRequest> {
        let request = self.waiting.remove(&number)?;
        self.expiries.remove(&(request.expires_at(), number));
        if let Some(from) = request.late_from() {
            self.late_from.remove(&(from, number));
        }
        self.tokens -= request.tokens;
        for (worker, amount) in request.parts() {
            if let Some(sum) = self.reserved.get_mut(&worker) {
                sum.sub(amount);
                if *sum == Demand::default() {
                    self.reserved.remove(&worker);
                }
            }
        }
        self.backlogs.remove(number, &request);
        let class = &mut self.classes[request.priority as usize];
        class.occupancy.remove(number, &request);
        // Only the entries of this request are checked for emptiness: a scan of all tenants for each request would be
        // slow.
        if let Some(routes) = class.flows.get_mut(&request.tenant)
            && let Some(keys) = routes.get_mut(&request.route)
        {
            keys.remove(&request.order_key(number));
            if keys.is_empty() {
                routes.remove(&request.route);
            }
            if routes.is_empty() {
                class.flows.remove(&request.tenant);
            }
        }
        if let Some(tenant) = self.tenants.get_mut(&request.tenant) {
            tenant.waiting -= request.tokens;
            if request.is_late {
                tenant.late[request.priority as usize].cost -= request.cost_tokens;
            }
        }
        Some(request)
    }

    /// When the queue is empty, resets credits and removes idle tenants that the virtual time has passed.
    fn reset_when_empty(&mut self) {
        if self.is_drained() {
            self.classes.iter_mut().for_each(|class| class.credit = 0.0);
            let virtual_time = self.virtual_time;
            self.tenants.retain(|_, tenant| tenant.running > 0 || tenant.served > virtual_time);
            self.end_busy_period();
        }
    }

    /// When nothing waits and nothing runs, capacity was left over: no tenant is ahead of another.
    fn end_busy_period(&mut self) {
        if self.is_drained() && self.running.is_empty() {
            self.virtual_time = 0.0;
            self.tenants.clear();
        }
    }

    /// Whether no request waits or is being placed again.
    fn is_drained(&self) -> bool {
        self.waiting.is_empty() && self.rerouting.is_empty()
    }
}

#[cfg(test)]
mod tests;
