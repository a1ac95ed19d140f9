//! How long requests wait in the admission queue: estimated from what waits before them and the measured drain rate of their
//! model. Pure: values in, values out, and the time is passed in.
//!
//! Costs are in tokens to be computed and generated, as fairness counts them. The estimate for a class is the smaller of two:
//! everything before it leaves at the rate that those leave who come meanwhile to the classes above (the wait in a queue with
//! priorities, Cobham 1954), or its own class alone leaves at the rate that is guaranteed to it.

use super::drain_rate::{Rate, WINDOW};
use super::ticket::Asked;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// What a lower class gets of what those above it are granted, and of the room: enough to move, too little to be felt.
pub(super) const SHARE: f64 = 0.1;

/// What waits, by model.
#[derive(Default)]
pub(super) struct Backlogs {
    models: BTreeMap<Arc<str>, Backlog>,
}

/// What waits for one model, and the rate at which it drains.
#[derive(Default)]
struct Backlog {
    rate: Rate,
    /// Requests that the workers have, as last seen, and the cost of those that left this queue.
    running: u64,
    running_cost: u64,
    /// Requests that wait; since when there are some, and how many have left since.
    requests: u64,
    since: Option<Instant>,
    left: u64,
    /// By priority, the least first.
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
    /// As configured when its first request came.
    weight: f64,
    cost: u64,
    /// The part of `cost` that has a deadline: it goes first.
    urgent: u64,
    /// All that wait.
    requests: usize,
    /// Those without a deadline, in the order of their arrival: number, cost, and when they have waited for too long.
    patient: BTreeSet<(u64, u64, Instant)>,
}

/// Cost per second that comes to a class, averaged over [`HORIZON`].
#[derive(Default)]
struct Inflow {
    /// Decayed sum of costs, and the time of the last one.
    sum: f64,
    last: Option<Instant>,
}

/// Over how long an inflow is averaged: as long as most requests may wait, so that a burst is not taken for what is to come.
const HORIZON: Duration = Duration::from_mins(1);
/// However slow: estimates beyond are of no use to anybody.
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
    /// A request waits from now on, of a tenant with this weight; `again` if it did before.
    pub(super) fn add(&mut self, number: u64, asked: &Asked, weight: f64, again: bool) {
        let backlog = self.models.entry(asked.model.clone()).or_default();
        let class = &mut backlog.classes[asked.priority as usize];
        class.cost += asked.charge;
        backlog.requests += 1;
        backlog.since.get_or_insert(asked.placed);
        if !again {
            class.inflow.add(asked.charge, asked.placed);
        }
        let tenant = class.tenants.entry(asked.tenant.clone()).or_insert_with(|| {
            class.weights += weight;
            Tenant { weight, cost: 0, urgent: 0, requests: 0, patient: BTreeSet::new() }
        });
        tenant.requests += 1;
        tenant.cost += asked.charge;
        if asked.latest.is_some() {
            tenant.urgent += asked.charge;
        } else {
            tenant.patient.insert((number, asked.charge, asked.tired));
        }
    }

    /// A request waits no longer, whatever became of it.
    pub(super) fn remove(&mut self, number: u64, asked: &Asked) {
        let Some(backlog) = self.models.get_mut(&asked.model) else { return };
        let class = &mut backlog.classes[asked.priority as usize];
        let Some(tenant) = class.tenants.get_mut(&asked.tenant) else { return };
        class.cost -= asked.charge;
        backlog.requests -= 1;
        tenant.requests -= 1;
        tenant.cost -= asked.charge;
        if asked.latest.is_some() {
            tenant.urgent -= asked.charge;
        } else {
            tenant.patient.remove(&(number, asked.charge, asked.tired));
        }
        if tenant.requests == 0 {
            class.weights -= tenant.weight;
            class.tenants.remove(&asked.tenant);
        }
        if class.tenants.is_empty() {
            // No rounding error outlives its terms.
            class.weights = 0.0;
        }
        if backlog.is_empty() {
            backlog.rate.pause();
            (backlog.since, backlog.left) = (None, 0);
        }
    }

    /// A request leaves the queue for its worker. Called before [`Self::remove`].
    pub(super) fn granted(&mut self, asked: &Asked, now: Instant) {
        if let Some(backlog) = self.models.get_mut(&asked.model) {
            backlog.rate.left(asked.charge, now);
            backlog.left += 1;
        }
    }

    /// A request of this cost goes to a worker.
    pub(super) fn started(&mut self, model: &Arc<str>, cost: u64) {
        self.models.entry(model.clone()).or_default().running_cost += cost;
    }

    /// A request of this cost has ended.
    pub(super) fn ended(&mut self, model: &str, cost: u64) {
        if let Some(backlog) = self.models.get_mut(model) {
            backlog.running_cost -= cost;
        }
    }

    /// So many requests of a model are with its workers.
    pub(super) fn running(&mut self, model: &str, requests: u64) {
        if let Some(backlog) = self.models.get_mut(model) {
            backlog.running = requests;
        }
    }

    /// Cost of all requests of a class that wait, whatever their model.
    pub(super) fn cost(&self, class: usize) -> u64 {
        self.models.values().map(|backlog| backlog.classes[class].cost).sum()
    }

    /// How long a newcomer would wait, if that is known.
    pub(super) fn wait(&self, asked: &Asked, weight: f64, now: Instant) -> Option<Duration> {
        let backlog = self.models.get(&asked.model)?;
        let tenant = backlog.classes[asked.priority as usize].tenants.get(&asked.tenant);
        let before = tenant.map_or(0, |tenant| if asked.latest.is_some() { tenant.urgent } else { tenant.cost });
        let rate = backlog.per_second(now)?;
        Some(backlog.seconds(asked.priority as usize, weight, before, asked.charge, rate, now))
    }

    /// How long it takes until tokens of this cost have left the queue, whatever their model.
    pub(super) fn drain(&self, cost: f64, now: Instant) -> Option<Duration> {
        let waiting = self.models.values().filter(|backlog| !backlog.is_empty());
        let rate: f64 = waiting.filter_map(|backlog| backlog.per_second(now)).sum();
        (rate > 0.0).then(|| seconds(cost / rate))
    }

    /// How long it takes until tokens of this cost have left the queue that are of the request's tenant, which shares its class
    /// with others.
    pub(super) fn turn(&self, asked: &Asked, weight: f64, cost: f64, now: Instant) -> Option<Duration> {
        let backlog = self.models.get(&asked.model)?;
        let weights = backlog.classes[asked.priority as usize].weights;
        Some(seconds(cost * (weights / weight).max(1.0) / backlog.per_second(now)?))
    }

    /// Requests that will not go before they have waited for too long, even if the rate is as much better than measured as its
    /// error allows: of each tenant the latest. A request with a deadline goes before those, and ends by itself.
    pub(super) fn hopeless(&self, now: Instant) -> Vec<u64> {
        let mut found = Vec::new();
        for backlog in self.models.values() {
            let Some(rate) = backlog.per_second(now) else { continue };
            // A bound is optimistic by itself.
            let rate = if backlog.left > 0 { rate * (1.0 + backlog.rate.error()) } else { rate };
            for (priority, class) in backlog.classes.iter().enumerate() {
                for tenant in class.tenants.values() {
                    let mut before = tenant.cost;
                    for (number, cost, tired) in tenant.patient.iter().rev() {
                        before -= cost;
                        if now + backlog.seconds(priority, tenant.weight, before, *cost, rate, now) <= *tired {
                            break;
                        }
                        found.push(*number);
                    }
                }
            }
        }
        found
    }

    /// Measured rates in tokens per second, of models for which requests wait.
    pub(super) fn rates(&self, now: Instant) -> impl Iterator<Item = (&str, f64)> {
        let waiting = self.models.iter().filter(|(_, backlog)| !backlog.is_empty());
        waiting.filter_map(move |(model, backlog)| Some((&**model, backlog.rate.per_second(now)?)))
    }
}

impl Backlog {
    fn is_empty(&self) -> bool {
        self.classes.iter().all(|class| class.tenants.is_empty())
    }

    /// The rate at which it drains. While nothing has left yet it is bounded: the requests that run have run for as long as others
    /// wait, so no more of them than there are end in as much time again. That is what is known of workers that take a minute
    /// for what they have.
    fn per_second(&self, now: Instant) -> Option<f64> {
        let measured = self.rate.per_second(now);
        let waits = self.since.map(|since| now.saturating_duration_since(since)).filter(|waits| *waits >= WINDOW);
        let Some(waits) = waits.filter(|_| self.left == 0 && self.requests > 0) else { return measured };
        let each = self.classes.iter().map(|class| class.cost).sum::<u64>() as f64 / self.requests as f64;
        // Requests that came to the workers by other ways are taken to cost what those cost that wait.
        let running = (self.running.max(1) as f64 * each).max(self.running_cost as f64);
        let bound = running / waits.as_secs_f64();
        Some(measured.map_or(bound, |measured| measured.min(bound))).filter(|rate| *rate > 0.0)
    }

    /// How long a request of this cost waits behind so much of its own tenant.
    fn seconds(&self, class: usize, weight: f64, before: u64, cost: u64, rate: f64, now: Instant) -> Duration {
        let own = &self.classes[class];
        // The other tenants of the class get their shares of that time.
        let before = (before as f64 * (own.weights / weight).max(1.0)).min(own.cost as f64);
        // Each class below gets its share of what this one and those above it get.
        let below = self.classes[..class].iter().filter(|class| class.cost > 0).count();
        let rate = rate / (1.0 + SHARE).powi(below as i32);
        let above = &self.classes[class + 1..];
        let waiting: u64 = above.iter().map(|class| class.cost).sum();
        let free = rate - above.iter().map(|class| class.inflow.per_second(now)).sum::<f64>();
        let all = if free > 0.0 { (waiting as f64 + before) / free } else { f64::INFINITY };
        let guaranteed = (before + cost as f64) / (rate * SHARE / (1.0 + SHARE));
        seconds(if above.is_empty() { all } else { all.min(guaranteed) })
    }
}

fn seconds(seconds: f64) -> Duration {
    Duration::from_secs_f64(seconds.clamp(0.0, SECONDS_MAX))
}
