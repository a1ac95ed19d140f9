//! The waiting room: who waits, whose turn it is, who is refused. Pure: values in, values out, and the time is passed in.
//!
//! - **Bounds** are in prompt tokens: of the room, of a tenant that waits, of a tenant that runs.
//! - **Classes**: a higher priority goes first; but while a class waits, a tenth of what those above it are granted is put
//!   down to its account, and when that pays for its next request, that one goes before them. The account of a class never
//!   exceeds what waits in it. A tenth of the room is guaranteed to each lower class, too (`displace.rs`): else requests of
//!   that class could not wait for their turn.
//! - **Tenants** share a class by weight: next is the one that got the fewest tokens for its weight since it began to wait.
//!   Tokens that are cached cost nothing. What nobody waited for is not counted.
//! - **Deadlines**: of one tenant's requests the one that must start first does, of those that would be in time behind the queue that
//!   their worker has; others then in the order of their arrival.
//! - Nobody waits behind a request that waits for another worker, or whose tenant has reached its limit.
//!
//! A request that would wait for too long at the measured drain rate is refused on arrival, or as soon as that is known.

mod displace;

use super::backlog::{Backlogs, SHARE};
use super::settings::Settings;
use super::ticket::{Asked, Lane, Turn};
use crate::load::Amount;
use displace::Places;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::plane::WorkerId;

/// The part of the wait limit that a newcomer's estimated wait may take. The rest is for the error of the estimate: in a
/// lasting overload every request that is let in waits for about as long as is allowed here.
const EXPECTED_WAIT_MAX: f64 = 0.9;
/// Tenants who want nothing now, and have got more than others who wait: so many are kept in mind, until they are caught up with.
const AHEAD: usize = 512;
/// In less time no client should come back, and beyond this an estimate is worth nothing.
const RETRY: (Duration, Duration) = (Duration::from_secs(1), Duration::from_mins(1));

/// What becomes of a request at the door.
#[derive(Clone, Debug)]
pub(crate) enum Entry {
    /// It runs.
    Straight(u64),
    /// It waits; for it, others had to go.
    Waits { number: u64, displaced: Vec<(u64, Asked)> },
    /// It does neither.
    Refused(Refusal),
}

/// Why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// The room is full.
    Full(Duration),
    /// It would wait for too long, by the measured drain rate.
    PredictedTimeout(Duration),
    /// It waits, and by the drain rate as it is measured now it would do so for too long.
    PredictedTimeoutQueued(Duration),
    /// Its tenant has as much in the room as it may.
    TenantFull(Duration),
    /// Somebody else gets its place.
    Displaced(Duration),
    /// It has waited for too long.
    InVain(Duration),
    /// Its deadline cannot be met.
    Late,
}

/// The room.
#[derive(Default)]
pub(crate) struct Room {
    last: u64,
    waiting: BTreeMap<u64, Asked>,
    /// When they wait no longer, and who.
    ends: BTreeSet<(Instant, u64)>,
    running: HashMap<u64, Running>,
    /// Those who are being placed anew: the accounts stay open for them.
    recalled: HashSet<u64>,
    /// By priority, the least first.
    classes: [Class; 3],
    tenants: BTreeMap<Arc<str>, Tenant>,
    /// When there are so many of them, some can be forgotten.
    tenants_max: usize,
    held: HashMap<WorkerId, Amount>,
    tokens: u64,
    /// What the tenant that went last had got for its weight; who begins to wait starts from here.
    clock: f64,
    backlogs: Backlogs,
}

/// A request that is with its worker.
struct Running {
    tenant: Arc<str>,
    model: Arc<str>,
    tokens: u64,
    charge: u64,
}

#[derive(Default)]
struct Class {
    /// Tokens that it has to its account.
    credit: f64,
    places: Places,
    flows: BTreeMap<Arc<str>, BTreeMap<Lane, BTreeSet<Turn>>>,
}

#[derive(Default)]
struct Tenant {
    waiting: u64,
    running: u64,
    /// Tokens got for its weight, since somebody waits.
    used: f64,
    /// By priority: when there will be room beyond what its refused requests were told to come back for.
    returning: [Option<Instant>; 3],
}

impl Room {
    /// A request comes. `open`: its lane takes it now, behind a queue of so long.
    pub(crate) fn enter(&mut self, limits: &Settings, asked: Asked, open: Option<Duration>, now: Instant) -> Entry {
        if asked.latest.is_some_and(|latest| latest <= now) {
            return Entry::Refused(Refusal::Late);
        }
        let fits = |queue| asked.latest.is_none_or(|latest| now + queue <= latest);
        if self.waiting.is_empty() && open.is_some_and(fits) && self.may_run(limits, &asked.tenant, asked.tokens) {
            return Entry::Straight(self.admit_now(&asked));
        }
        let of_tenant = self.tenants.get(&asked.tenant).map_or(0, |tenant| tenant.waiting);
        let most = limits.tenant(&asked.tenant).max_queued_tokens;
        if of_tenant > 0 && most.is_some_and(|most| of_tenant + asked.tokens > most) {
            return Entry::Refused(Refusal::TenantFull(self.retry_after(limits, &asked, now)));
        }
        // Where nobody waits before it, it goes with the next turn, whatever others wait for.
        let is_next = open.is_some() && asked.parts().all(|(worker, _)| !self.held.contains_key(&worker));
        if !is_next && self.excess_wait(limits, &asked, now).is_some_and(|excess| excess > Duration::ZERO) {
            return Entry::Refused(Refusal::PredictedTimeout(self.retry_after(limits, &asked, now)));
        }
        let Some(displaced) = self.displace(limits, &asked) else {
            return Entry::Refused(Refusal::Full(self.retry_after(limits, &asked, now)));
        };
        let displaced = displaced.into_iter().filter_map(|number| Some((number, self.take(number)?))).collect();
        self.last += 1;
        self.put(limits, self.last, asked);
        Entry::Waits { number: self.last, displaced }
    }

    /// Admits a request without queueing it.
    pub(super) fn admit_now(&mut self, asked: &Asked) -> u64 {
        self.last += 1;
        self.run(self.last, asked);
        self.last
    }

    /// Whose turn it is, of those whose lane is open; behind the queue that it has, a deadline must still be met. It runs from here on.
    pub(crate) fn turn(
        &mut self,
        limits: &Settings,
        now: Instant,
        mut open: impl FnMut(&Self, Lane) -> Option<Duration>,
    ) -> Option<u64> {
        let firsts: [Option<u64>; 3] = std::array::from_fn(|class| self.first_of(class, limits, now, &mut open));
        let charge = |number: u64| self.waiting[&number].charge as f64;
        let paid = (0..2).find(|class| firsts[*class].is_some_and(|n| self.classes[*class].credit >= charge(n)));
        let class = paid.or_else(|| (0..3).rev().find(|class| firsts[*class].is_some()))?;
        let number = firsts[class]?;
        let charge = charge(number);
        if paid.is_some() {
            self.classes[class].credit -= charge;
        }
        for (below, Class { credit: account, .. }) in self.classes[..class].iter_mut().enumerate() {
            let waiting = self.backlogs.cost(below) as f64;
            // More than what waits it could not pay for; what was earned is kept though those who waited are displaced.
            if waiting > 0.0 {
                *account = (*account + charge * SHARE).min(waiting.max(*account));
            }
        }
        let (weight, tenant) = (limits.tenant(&self.waiting[&number].tenant).weight, &self.waiting[&number].tenant);
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            self.clock = self.clock.max(tenant.used);
            tenant.used += charge / weight;
        }
        self.backlogs.granted(&self.waiting[&number], now);
        let asked = self.take(number)?;
        self.run(number, &asked);
        Some(number)
    }

    /// One that has waited until its deadline could not be met any more, or for long enough.
    pub(crate) fn overdue(&mut self, now: Instant) -> Option<(u64, Asked)> {
        let (_, number) = *self.ends.first().filter(|(end, _)| *end <= now)?;
        Some((number, self.take(number)?))
    }

    /// When the next is.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.ends.first().map(|(end, _)| *end)
    }

    /// A request goes, wherever it is. What it was, if it waited.
    pub(crate) fn leave(&mut self, number: u64) -> Option<Asked> {
        let waited = self.take(number);
        if let Some(Running { tenant: name, model, tokens, charge }) = self.running.remove(&number) {
            self.backlogs.ended(&model, charge);
            if let Some(tenant) = self.tenants.get_mut(&name) {
                tenant.running -= tokens;
                if tenant.running == 0 && self.waiting.is_empty() && self.recalled.is_empty() {
                    self.tenants.remove(&name);
                }
            }
        }
        if self.recalled.remove(&number) {
            self.close_accounts();
        }
        waited
    }

    /// A request that waits is to be placed anew: until then it is nowhere. Whether it did wait.
    pub(crate) fn recall(&mut self, number: u64) -> bool {
        if !self.waiting.contains_key(&number) {
            return false;
        }
        self.recalled.insert(number);
        self.take(number).is_some()
    }

    /// Up to `most` that wait and fit `which`: the most urgent first, and of those who have been where they are for the longest.
    pub(crate) fn some(&self, most: usize, which: impl Fn(&Asked) -> bool) -> Vec<u64> {
        let mut found: Vec<(&u64, &Asked)> = self.waiting.iter().filter(|(_, asked)| which(asked)).collect();
        found.sort_by_key(|(number, asked)| (Reverse(asked.priority), asked.placed, **number));
        found.into_iter().take(most).map(|(number, _)| *number).collect()
    }

    /// Workers that are waited for.
    pub(crate) fn awaited(&self) -> impl Iterator<Item = WorkerId> {
        self.held.keys().copied()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    /// Models that are waited for.
    pub(crate) fn models(&self) -> BTreeSet<Arc<str>> {
        self.waiting.values().map(|asked| asked.model.clone()).collect()
    }

    /// Prompt tokens that wait, by priority.
    pub(crate) fn by_class(&self) -> [u64; 3] {
        [0, 1, 2].map(|class: usize| self.classes[class].places.tokens())
    }

    /// What those who wait have booked on a worker.
    pub(crate) fn held(&self, worker: WorkerId) -> Amount {
        self.held.get(&worker).copied().unwrap_or_default()
    }

    /// So many requests of a model are with its workers: what a drain rate that is not measured yet cannot exceed.
    pub(crate) fn running(&mut self, model: &str, requests: u64) {
        self.backlogs.running(model, requests);
    }

    /// Takes those out that would wait for too long at the measured drain rate.
    pub(crate) fn hopeless(&mut self, now: Instant) -> Vec<(u64, Asked)> {
        let hopeless = self.backlogs.hopeless(now);
        hopeless.into_iter().filter_map(|number| Some((number, self.take(number)?))).collect()
    }

    /// Measured drain rates in tokens per second, by model.
    pub(crate) fn rates(&self, now: Instant) -> impl Iterator<Item = (&str, f64)> {
        self.backlogs.rates(now)
    }

    /// By how much the estimated wait of a newcomer exceeds what is allowed; `None` when nothing is measured.
    fn excess_wait(&self, limits: &Settings, asked: &Asked, now: Instant) -> Option<Duration> {
        let wait = self.backlogs.wait(asked, limits.tenant(&asked.tenant).weight, now)?;
        Some(wait.saturating_sub(Duration::from_secs_f64(limits.max_queue_time.as_secs_f64() * EXPECTED_WAIT_MAX)))
    }

    /// When a request that is refused should come back: the estimated time until the room has a place for it, and it would be
    /// served in time; behind those of its tenant that were refused before it, so that not all come back for the same place.
    pub(crate) fn retry_after(&mut self, limits: &Settings, asked: &Asked, now: Instant) -> Duration {
        let tenant = limits.tenant(&asked.tenant);
        // Bounds are in prompt tokens, rates in costs.
        let each = self.cost() as f64 / self.tokens.max(1) as f64;
        let of_tenant = self.tenants.get(&asked.tenant).map_or(0, |tenant| tenant.waiting);
        let short = |waiting: u64, most: u64| (waiting + asked.tokens).saturating_sub(most) as f64 * each;
        let most = tenant.max_queued_tokens.unwrap_or(u64::MAX);
        let room = self.backlogs.drain(short(self.tokens, limits.max_queued_tokens), now);
        let own = self.backlogs.turn(asked, tenant.weight, short(of_tenant, most), now);
        let wait = self.excess_wait(limits, asked, now);
        let Some(until) = [room, own, wait].into_iter().flatten().max() else { return RETRY.0 };
        let mut at = now + until.min(RETRY.1);
        if let Some(takes) = self.backlogs.turn(asked, tenant.weight, asked.charge as f64, now)
            && let Some(known) = self.tenants.get_mut(&asked.tenant)
        {
            let returning = &mut known.returning[asked.priority as usize];
            at = returning.map_or(at, |taken| taken.max(at)).min(now + RETRY.1);
            *returning = Some(at + takes);
        }
        (at - now).max(RETRY.0)
    }

    /// Cost of all that wait.
    fn cost(&self) -> u64 {
        (0..self.classes.len()).map(|class| self.backlogs.cost(class)).sum()
    }

    /// A request larger than what its tenant may run still runs, alone.
    fn may_run(&self, limits: &Settings, tenant: &str, tokens: u64) -> bool {
        let running = self.tenants.get(tenant).map_or(0, |tenant| tenant.running);
        running == 0 || limits.tenant(tenant).max_inflight_tokens.is_none_or(|most| running + tokens <= most)
    }

    fn first_of(
        &self,
        class: usize,
        limits: &Settings,
        now: Instant,
        open: &mut impl FnMut(&Self, Lane) -> Option<Duration>,
    ) -> Option<u64> {
        let mut best: Option<(f64, u64)> = None;
        for (name, lanes) in &self.classes[class].flows {
            let used = self.tenants.get(name).map_or(0.0, |tenant| tenant.used);
            if best.is_some_and(|(least, _)| least <= used) {
                continue;
            }
            // Who would come too late behind the queue waits for it to get shorter.
            let turns = lanes.iter().filter_map(|(lane, turns)| {
                let in_time = (false, Some(now + open(self, *lane)?), 0);
                turns.range(in_time..).next()
            });
            if let Some((.., number)) = turns.min()
                && self.may_run(limits, name, self.waiting[number].tokens)
            {
                best = Some((used, *number));
            }
        }
        best.map(|(_, number)| number)
    }

    fn run(&mut self, number: u64, asked: &Asked) {
        self.tenant(&asked.tenant).running += asked.tokens;
        self.backlogs.started(&asked.model, asked.charge);
        let (tenant, model) = (asked.tenant.clone(), asked.model.clone());
        self.running.insert(number, Running { tenant, model, tokens: asked.tokens, charge: asked.charge });
    }

    /// What is known of a tenant. Now and then those are forgotten who neither wait nor run: whoever has been caught up with
    /// would begin from there in any case, and of the others the nearest, when they are many.
    fn tenant(&mut self, name: &Arc<str>) -> &mut Tenant {
        if self.tenants.len() >= self.tenants_max.max(2 * AHEAD) {
            let idle = |tenant: &Tenant| tenant.waiting == 0 && tenant.running == 0;
            let of_idle = self.tenants.values().filter(|tenant| idle(tenant)).map(|tenant| tenant.used);
            let mut ahead: Vec<f64> = of_idle.filter(|used| *used > self.clock).collect();
            let last = ahead.len().checked_sub(AHEAD + 1);
            let caught_up = last.map_or(self.clock, |last| *ahead.select_nth_unstable_by(last, f64::total_cmp).1);
            self.tenants.retain(|_, tenant| !idle(tenant) || tenant.used > caught_up);
            self.tenants_max = 2 * self.tenants.len();
        }
        self.tenants.entry(name.clone()).or_default()
    }

    /// A request waits from now on; or again, if it was recalled: it has kept its number, and so its turn.
    pub(crate) fn put(&mut self, limits: &Settings, number: u64, asked: Asked) {
        let (clock, again) = (self.clock, self.recalled.remove(&number));
        let tenant = self.tenant(&asked.tenant);
        if tenant.waiting == 0 && !again {
            tenant.used = tenant.used.max(clock);
        }
        tenant.waiting += asked.tokens;
        self.tokens += asked.tokens;
        for (worker, held) in asked.parts() {
            self.held.entry(worker).or_default().add(held);
        }
        let weight = limits.tenant(&asked.tenant).weight;
        self.backlogs.add(number, &asked, weight, again);
        let class = &mut self.classes[asked.priority as usize];
        class.places.add(number, &asked, weight);
        class.flows.entry(asked.tenant.clone()).or_default().entry(asked.lane).or_default().insert(asked.turn(number));
        self.ends.insert((asked.end(), number));
        self.waiting.insert(number, asked);
    }

    fn take(&mut self, number: u64) -> Option<Asked> {
        let asked = self.waiting.remove(&number)?;
        self.ends.remove(&(asked.end(), number));
        self.tokens -= asked.tokens;
        for (worker, held) in asked.parts() {
            if let Some(sum) = self.held.get_mut(&worker) {
                sum.sub(held);
                if *sum == Amount::default() {
                    self.held.remove(&worker);
                }
            }
        }
        self.backlogs.remove(number, &asked);
        let class = &mut self.classes[asked.priority as usize];
        class.places.remove(number, &asked);
        // Only what is empty now is looked for: with many tenants a look at all of them for each request would be felt.
        if let Some(lanes) = class.flows.get_mut(&asked.tenant)
            && let Some(turns) = lanes.get_mut(&asked.lane)
        {
            turns.remove(&asked.turn(number));
            if turns.is_empty() {
                lanes.remove(&asked.lane);
            }
            if lanes.is_empty() {
                class.flows.remove(&asked.tenant);
            }
        }
        if let Some(tenant) = self.tenants.get_mut(&asked.tenant) {
            tenant.waiting -= asked.tokens;
        }
        self.close_accounts();
        Some(asked)
    }

    /// Closes the accounts when nobody waits.
    fn close_accounts(&mut self) {
        if self.waiting.is_empty() && self.recalled.is_empty() {
            self.clock = 0.0;
            self.classes.iter_mut().for_each(|class| class.credit = 0.0);
            self.tenants.retain(|_, tenant| {
                tenant.used = 0.0;
                tenant.running > 0
            });
        }
    }
}

#[cfg(test)]
mod tests;
