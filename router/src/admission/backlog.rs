//! Estimates how long a request waits in the admission queue: from the cost of the requests before it and the measured
//! drain rate of its model. Pure: values in, values out, and the time is passed in.
//!
//! Costs are tokens to compute and to generate, as in fair shares. The estimate for a class is the smaller of two: the
//! wait in a queue with priorities (Cobham 1954), in which all requests before it leave at the drain rate less the
//! inflow to higher classes; or the wait in its own class alone, at the rate that is guaranteed to the class.

use super::drain_rate::{DrainRate, WINDOW};
use super::ticket::QueuedRequest;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// Share of a lower class, of what the classes above it get and of the queue's space: enough to make progress, too
/// little to be felt.
pub(super) const LOWER_CLASS_SHARE: f64 = 0.1;

/// Backlogs by model.
#[derive(Default)]
pub(super) struct Backlogs {
    models: BTreeMap<Arc<str>, Backlog>,
}

/// The queued requests of one model, and the rate at which they leave.
#[derive(Default)]
struct Backlog {
    rate: DrainRate,
    /// Number of requests that the workers have, as of the last poll, and total cost of those that came through this
    /// queue.
    running: u64,
    running_cost: u64,
    /// Number of queued requests; since when the queue is not empty, and how many requests have left it since.
    requests: u64,
    since: Option<Instant>,
    departed: u64,
    /// By priority, the lowest first.
    classes: [Class; 3],
}

#[derive(Default)]
struct Class {
    cost: u64,
    inflow: Inflow,
    /// Sum of the weights of its tenants.
    weights: f64,
    tenants: BTreeMap<Arc<str>, Tenant>,
}

/// One tenant's requests of a class.
struct Tenant {
    /// Weight as configured when its first request came.
    weight: f64,
    cost: u64,
    /// Part of `cost` of requests with a deadline, which go first.
    deadline_cost: u64,
    /// Number of queued requests.
    requests: usize,
    /// Requests without a deadline in order of arrival: number, cost, and latest time in the queue.
    without_deadline: BTreeSet<(u64, u64, Instant)>,
}

/// Cost per second of requests that come to a class: an exponential average over [`HORIZON`].
#[derive(Default)]
struct Inflow {
    /// Decayed sum of costs, and the time of the last request.
    sum: f64,
    last: Option<Instant>,
}

/// Share of the drain rate that a lower class gets at least.
const GUARANTEED_RATE: f64 = LOWER_CLASS_SHARE / (1.0 + LOWER_CLASS_SHARE);

/// Time constant of an inflow: as long as most requests may wait, so that a short burst does not count as lasting
/// load.
const HORIZON: Duration = Duration::from_mins(1);
/// Upper limit of estimates, in seconds.
const SECONDS_MAX: f64 = 1e6;

impl Inflow {
    fn add(&mut self, cost: u64, now: Instant) {
        self.sum = self.per_second(now) * HORIZON.as_secs_f64() + cost as f64;
        self.last = Some(now);
    }

    fn per_second(&self, now: Instant) -> f64 {
        let since = self.last.map_or(Duration::ZERO, |last| now.saturating_duration_since(last));
        self.sum * (-since.div_duration_f64(HORIZON)).exp() / HORIZON.as_secs_f64()
    }
}

impl Backlogs {
    /// Adds a queued request, of a tenant with this weight. A rerouted request does not count as inflow again.
    pub(super) fn add(&mut self, number: u64, request: &QueuedRequest, weight: f64, rerouted: bool) {
        let backlog = self.models.entry(request.model.clone()).or_default();
        let class = &mut backlog.classes[request.priority as usize];
        class.cost += request.cost_tokens;
        backlog.requests += 1;
        backlog.since.get_or_insert(request.placed);
        if !rerouted {
            class.inflow.add(request.cost_tokens, request.placed);
        }
        let tenant = class.tenants.entry(request.tenant.clone()).or_insert_with(|| {
            class.weights += weight;
            Tenant { weight, cost: 0, deadline_cost: 0, requests: 0, without_deadline: BTreeSet::new() }
        });
        tenant.requests += 1;
        tenant.cost += request.cost_tokens;
        if request.start_by.is_some() {
            tenant.deadline_cost += request.cost_tokens;
        } else {
            tenant.without_deadline.insert((number, request.cost_tokens, request.queue_deadline));
        }
    }

    /// Removes a queued request, for whatever reason.
    pub(super) fn remove(&mut self, number: u64, request: &QueuedRequest) {
        let Some(backlog) = self.models.get_mut(&request.model) else { return };
        let class = &mut backlog.classes[request.priority as usize];
        let Some(tenant) = class.tenants.get_mut(&request.tenant) else { return };
        class.cost -= request.cost_tokens;
        backlog.requests -= 1;
        tenant.requests -= 1;
        tenant.cost -= request.cost_tokens;
        if request.start_by.is_some() {
            tenant.deadline_cost -= request.cost_tokens;
        } else {
            tenant.without_deadline.remove(&(number, request.cost_tokens, request.queue_deadline));
        }
        if tenant.requests == 0 {
            class.weights -= tenant.weight;
            class.tenants.remove(&request.tenant);
        }
        if class.tenants.is_empty() {
            // Rounding errors do not outlive the terms of the sum.
            class.weights = 0.0;
        }
        if backlog.is_empty() {
            backlog.rate.pause();
            (backlog.since, backlog.departed) = (None, 0);
        }
    }

    /// Records that a request leaves the queue for its worker. Called before [`Self::remove`].
    pub(super) fn departed(&mut self, request: &QueuedRequest, now: Instant) {
        if let Some(backlog) = self.models.get_mut(&request.model) {
            backlog.rate.record(request.cost_tokens, now);
            backlog.departed += 1;
        }
    }

    /// Adds the cost of a request that starts to run.
    pub(super) fn started(&mut self, model: &Arc<str>, cost: u64) {
        self.models.entry(model.clone()).or_default().running_cost += cost;
    }

    /// Subtracts the cost of a request that has ended.
    pub(super) fn ended(&mut self, model: &str, cost: u64) {
        if let Some(backlog) = self.models.get_mut(model) {
            backlog.running_cost -= cost;
        }
    }

    /// Sets the number of requests that the workers of a model have.
    pub(super) fn set_running(&mut self, model: &str, requests: u64) {
        if let Some(backlog) = self.models.get_mut(model) {
            backlog.running = requests;
        }
    }

    /// Cost of all queued requests of a class, of all models.
    pub(super) fn cost(&self, class: usize) -> u64 {
        self.models.values().map(|backlog| backlog.classes[class].cost).sum()
    }

    /// Estimated wait of a new request; `None` when no rate is known.
    pub(super) fn wait(&self, request: &QueuedRequest, weight: f64, now: Instant) -> Option<Duration> {
        let backlog = self.models.get(&request.model)?;
        let tenant = backlog.classes[request.priority as usize].tenants.get(&request.tenant);
        let before =
            tenant.map_or(0, |tenant| if request.start_by.is_some() { tenant.deadline_cost } else { tenant.cost });
        let rate = backlog.per_second(now)?;
        Some(backlog.seconds(request.priority as usize, weight, before, request.cost_tokens, rate, now))
    }

    /// Estimated time until requests of this cost have left the queue for those of a class, of all models.
    pub(super) fn drain(&self, class: usize, cost: f64, now: Instant) -> Option<Duration> {
        let waiting = self.models.values().filter(|backlog| !backlog.is_empty());
        let rate: f64 = waiting.filter_map(|backlog| backlog.class_rate(class, now)).sum();
        (rate > 0.0).then(|| seconds(cost / rate))
    }

    /// Estimated time until requests of this cost have left the queue, of the tenant of `request`, which shares its
    /// class with others.
    pub(super) fn drain_tenant(
        &self,
        request: &QueuedRequest,
        weight: f64,
        cost: f64,
        now: Instant,
    ) -> Option<Duration> {
        let backlog = self.models.get(&request.model)?;
        let class = request.priority as usize;
        let weights = backlog.classes[class].weights;
        Some(seconds(cost * (weights / weight).max(1.0) / backlog.class_rate(class, now)?))
    }

    /// Requests that will exceed their time in the queue even if the rate is better than measured by its standard
    /// error, the latest of each tenant first. Requests with a deadline are left out: they go before these, and expire
    /// by themselves.
    pub(super) fn predicted_timeouts(&self, now: Instant) -> Vec<u64> {
        let mut found = Vec::new();
        for backlog in self.models.values() {
            let Some(rate) = backlog.per_second(now) else { continue };
            // The bound is already optimistic.
            let rate = if backlog.departed > 0 { rate * (1.0 + backlog.rate.error()) } else { rate };
            for (priority, class) in backlog.classes.iter().enumerate() {
                for tenant in class.tenants.values() {
                    let mut before = tenant.cost;
                    for (number, cost, queue_deadline) in tenant.without_deadline.iter().rev() {
                        before -= cost;
                        if now + backlog.seconds(priority, tenant.weight, before, *cost, rate, now) <= *queue_deadline {
                            break;
                        }
                        found.push(*number);
                    }
                }
            }
        }
        found
    }

    /// Measured rates in tokens per second, of models with queued requests.
    pub(super) fn rates(&self, now: Instant) -> impl Iterator<Item = (&str, f64)> {
        let waiting = self.models.iter().filter(|(_, backlog)| !backlog.is_empty());
        waiting.filter_map(move |(model, backlog)| Some((&**model, backlog.rate.per_second(now)?)))
    }
}

impl Backlog {
    fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| class.tenants.is_empty())
    }

    /// Rate at which the requests leave. Until the first request has left there is only a bound: the running requests
    /// have run at least as long as the oldest queued one waits, so in as much time again at most all of them end. For
    /// workers that need a minute per request this is all that is known.
    fn per_second(&self, now: Instant) -> Option<f64> {
        let measured = self.rate.per_second(now);
        let waits = self.since.map(|since| now.saturating_duration_since(since)).filter(|waits| *waits >= WINDOW);
        let Some(waits) = waits.filter(|_| self.departed == 0 && self.requests > 0) else { return measured };
        let each = self.classes.iter().map(|class| class.cost).sum::<u64>() as f64 / self.requests as f64;
        // Requests that did not come through the queue are assumed to cost as much as the queued ones.
        let running = (self.running.max(1) as f64 * each).max(self.running_cost as f64);
        let bound = running / waits.as_secs_f64();
        Some(measured.map_or(bound, |measured| measured.min(bound))).filter(|rate| *rate > 0.0)
    }

    /// The part of [`Self::per_second`] that a class gets: what the inflow of the classes above it leaves, at least
    /// what is guaranteed to it.
    fn class_rate(&self, class: usize, now: Instant) -> Option<f64> {
        let (rate, above) = (self.per_second(now)?, &self.classes[class + 1..]);
        let free = rate - above.iter().map(|class| class.inflow.per_second(now)).sum::<f64>();
        Some(free.max(rate * GUARANTEED_RATE))
    }

    /// Estimated wait of a request of this cost behind `before` of its own tenant.
    fn seconds(&self, class: usize, weight: f64, before: u64, cost: u64, rate: f64, now: Instant) -> Duration {
        let own = &self.classes[class];
        // Meanwhile the other tenants of the class get their shares.
        let before = (before as f64 * (own.weights / weight).max(1.0)).min(own.cost as f64);
        // Each lower class gets its share of what this class and those above it get.
        let below = self.classes[..class].iter().filter(|class| class.cost > 0).count();
        let rate = rate / (1.0 + LOWER_CLASS_SHARE).powi(below as i32);
        let above = &self.classes[class + 1..];
        let waiting: u64 = above.iter().map(|class| class.cost).sum();
        let free = rate - above.iter().map(|class| class.inflow.per_second(now)).sum::<f64>();
        let all = if free > 0.0 { (waiting as f64 + before) / free } else { f64::INFINITY };
        let guaranteed = (before + cost as f64) / (rate * GUARANTEED_RATE);
        seconds(if above.is_empty() { all } else { all.min(guaranteed) })
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, SECONDS_MAX))
}
