//! The waiting room: who waits, whose turn it is, who is refused. Pure: values in, values out, and the time is passed in.
//!
//! - **Bounds** are in prompt tokens: of the room, of a tenant that waits, of a tenant that runs.
//! - **Classes**: a higher priority goes first; but while a class waits, a tenth of what those above it are granted is put
//!   down to its account, and when that pays for its next request, that one goes before them. So nobody starves.
//! - **Tenants** share a class by weight: next is the one that got the fewest tokens for its weight since it began to wait.
//!   Tokens that are cached cost nothing. What nobody waited for is not counted.
//! - **Deadlines**: of one tenant's requests the one that must start first does, of those that would be in time behind the queue that
//!   their worker has; others then in the order of their arrival.
//! - Nobody waits behind a request that waits for another worker, or whose tenant has reached its limit.
//!
//! When the room is full, a newcomer takes the place of a request of a lower class, or of a tenant that has more than its
//! share of the room, the latest first.

use super::bid::{Asked, Lane, Turn};
use super::rate::Rate;
use super::settings::Settings;
use crate::load::Amount;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::Priority;
use worker::plane::WorkerId;

/// What a lower class gets of what those above it are granted: enough to move, too little to be felt.
const SHARE: f64 = 0.1;
/// Tenants who want nothing now, and have got more than others who wait: so many are kept in mind, until they are caught up with.
const AHEAD: usize = 512;
/// Fewer seconds no client should come back in, and for more nobody can promise anything.
const RETRY: (f64, f64) = (1.0, 60.0);

/// What becomes of a request at the door.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum Entry {
    /// It runs.
    Straight(u64),
    /// It waits; for it, others had to go.
    Waits { number: u64, displaced: Vec<u64> },
    /// It does neither.
    Refused(Refusal),
}

/// Why a request is refused.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Refusal {
    /// The room is full, or would not be empty in time.
    Full(Duration),
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
    running: HashMap<u64, (Arc<str>, u64)>,
    /// Those who are being placed anew, and their class: its accounts stay open.
    recalled: HashMap<u64, Priority>,
    /// By priority, the least first.
    classes: [Class; 3],
    tenants: BTreeMap<Arc<str>, Tenant>,
    /// When there are so many of them, some can be forgotten.
    tenants_max: usize,
    held: HashMap<WorkerId, Amount>,
    tokens: u64,
    /// What the tenant that went last had got for its weight; who begins to wait starts from here.
    clock: f64,
    rate: Rate,
}

#[derive(Default)]
struct Class {
    tokens: u64,
    /// Tokens that it has to its account.
    credit: f64,
    flows: BTreeMap<Arc<str>, BTreeMap<Lane, BTreeSet<Turn>>>,
}

#[derive(Default)]
struct Tenant {
    waiting: u64,
    running: u64,
    /// Tokens got for its weight, since somebody waits.
    used: f64,
}

impl Room {
    /// A request comes. `open`: its lane takes it now, behind a queue of so long.
    pub(crate) fn enter(&mut self, limits: &Settings, asked: Asked, open: Option<Duration>, now: Instant) -> Entry {
        if asked.latest.is_some_and(|latest| latest <= now) {
            return Entry::Refused(Refusal::Late);
        }
        let fits = |queue| asked.latest.is_none_or(|latest| now + queue <= latest);
        if self.waiting.is_empty() && open.is_some_and(fits) && self.may_run(limits, &asked.tenant, asked.tokens) {
            self.last += 1;
            self.run(self.last, asked.bid.tenant, asked.bid.tokens);
            return Entry::Straight(self.last);
        }
        self.rate.pass(now);
        let (ahead, of_tenant) = (self.ahead(limits, &asked), self.tenants.get(&asked.tenant).map_or(0, |t| t.waiting));
        let most = limits.tenant(&asked.tenant).waiting_tokens_max;
        if of_tenant > 0 && most.is_some_and(|most| of_tenant + asked.tokens > most) {
            return Entry::Refused(Refusal::TenantFull(self.retry_after(ahead)));
        }
        if self.rate.seconds(ahead).is_some_and(|seconds| seconds > limits.wait_seconds_max) {
            return Entry::Refused(Refusal::Full(self.retry_after(ahead)));
        }
        let Some(displaced) = self.displace(limits, &asked) else {
            return Entry::Refused(Refusal::Full(self.retry_after(ahead)));
        };
        for number in &displaced {
            self.take(*number);
        }
        self.last += 1;
        self.put(self.last, asked, now);
        Entry::Waits { number: self.last, displaced }
    }

    /// Whose turn it is, of those whose lane is open; behind the queue that it has, a deadline must still be met. It runs from here on.
    pub(crate) fn turn(
        &mut self,
        limits: &Settings,
        now: Instant,
        mut open: impl FnMut(&Self, Lane) -> Option<Duration>,
    ) -> Option<u64> {
        self.rate.pass(now);
        let firsts: [Option<u64>; 3] = std::array::from_fn(|class| self.first_of(class, limits, now, &mut open));
        let charge = |number: u64| self.waiting[&number].charge as f64;
        let paid = (0..2).find(|class| firsts[*class].is_some_and(|n| self.classes[*class].credit >= charge(n)));
        let class = paid.or_else(|| (0..3).rev().find(|class| firsts[*class].is_some()))?;
        let number = firsts[class]?;
        let charge = charge(number);
        if paid.is_some() {
            self.classes[class].credit -= charge;
        }
        for below in self.classes[..class].iter_mut().filter(|below| below.tokens > 0) {
            below.credit += charge * SHARE;
        }
        let (weight, tenant) = (limits.tenant(&self.waiting[&number].tenant).weight, &self.waiting[&number].tenant);
        if let Some(tenant) = self.tenants.get_mut(tenant) {
            self.clock = self.clock.max(tenant.used);
            tenant.used += charge / weight;
        }
        let asked = self.take(number)?;
        self.rate.granted(asked.tokens);
        self.run(number, asked.bid.tenant, asked.bid.tokens);
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
        if let Some((name, tokens)) = self.running.remove(&number)
            && let Some(tenant) = self.tenants.get_mut(&name)
        {
            tenant.running -= tokens;
            if tenant.running == 0 && self.waiting.is_empty() && self.recalled.is_empty() {
                self.tenants.remove(&name);
            }
        }
        if self.recalled.remove(&number).is_some() {
            self.close_accounts();
        }
        waited
    }

    /// A request that waits is to be placed anew: until then it is nowhere. Whether it did wait.
    pub(crate) fn recall(&mut self, number: u64) -> bool {
        let Some(asked) = self.waiting.get(&number) else { return false };
        self.recalled.insert(number, asked.priority);
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
        [0, 1, 2].map(|class: usize| self.classes[class].tokens)
    }

    /// What those who wait have booked on a worker.
    pub(crate) fn held(&self, worker: WorkerId) -> Amount {
        self.held.get(&worker).copied().unwrap_or_default()
    }

    /// When somebody who was refused, or waited in vain, should come back.
    pub(crate) fn come_back(&self, limits: &Settings, asked: &Asked) -> Duration {
        self.retry_after(self.ahead(limits, asked))
    }

    /// Prompt tokens that go before a newcomer, about: of the classes above, and of its own what its tenant has there and
    /// the others' shares of that time.
    fn ahead(&self, limits: &Settings, asked: &Asked) -> u64 {
        let class = asked.priority as usize;
        let above: u64 = self.classes[class + 1..].iter().map(|class| class.tokens).sum();
        let own = self.tenants.get(&asked.tenant).map_or(0, |tenant| tenant.waiting);
        let weights: f64 = self.classes[class].flows.keys().map(|name| limits.tenant(name).weight).sum();
        let shared = own as f64 * (weights / limits.tenant(&asked.tenant).weight).max(1.0);
        above + (shared as u64).min(self.classes[class].tokens)
    }

    fn retry_after(&self, ahead: u64) -> Duration {
        Duration::from_secs_f64(self.rate.seconds(ahead).unwrap_or(RETRY.0).clamp(RETRY.0, RETRY.1))
    }

    /// A request larger than what its tenant may run still runs, alone.
    fn may_run(&self, limits: &Settings, tenant: &str, tokens: u64) -> bool {
        let running = self.tenants.get(tenant).map_or(0, |tenant| tenant.running);
        running == 0 || limits.tenant(tenant).running_tokens_max.is_none_or(|most| running + tokens <= most)
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

    /// Who must go so that a newcomer fits; `None` when it cannot be.
    fn displace(&self, limits: &Settings, asked: &Asked) -> Option<Vec<u64>> {
        let mut short = (self.tokens + asked.tokens).saturating_sub(limits.waiting_tokens_max);
        let mut going = Vec::new();
        // An empty room takes any one.
        if short == 0 || self.waiting.is_empty() {
            return Some(going);
        }
        let latest = |class: usize| self.waiting.iter().rev().filter(move |(_, one)| one.priority as usize == class);
        for (number, lower) in (0..asked.priority as usize).flat_map(latest) {
            going.push(*number);
            short = short.saturating_sub(lower.tokens);
            if short == 0 {
                return Some(going);
            }
        }
        let share = |name: &str, tokens: u64| tokens as f64 / limits.tenant(name).weight;
        let mut left: BTreeMap<&str, u64> = BTreeMap::new();
        for (_, one) in latest(asked.priority as usize) {
            *left.entry(&one.tenant).or_default() += one.tokens;
        }
        let mine = share(&asked.tenant, left.remove(&*asked.tenant).unwrap_or(0) + asked.tokens);
        let mut there: Vec<(&u64, &Asked)> = latest(asked.priority as usize).collect();
        while short > 0 {
            let (greediest, _) = left.iter().max_by(|a, b| share(a.0, *a.1).total_cmp(&share(b.0, *b.1)))?;
            let greediest = *greediest;
            let at = there.iter().position(|(_, one)| *one.tenant == *greediest)?;
            let (number, one) = there.remove(at);
            let rest = left.get_mut(greediest)?;
            *rest -= one.tokens;
            if share(greediest, *rest) < mine {
                return None;
            }
            going.push(*number);
            short = short.saturating_sub(one.tokens);
        }
        Some(going)
    }

    fn run(&mut self, number: u64, tenant: Arc<str>, tokens: u64) {
        self.tenant(&tenant).running += tokens;
        self.running.insert(number, (tenant, tokens));
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
    pub(crate) fn put(&mut self, number: u64, asked: Asked, now: Instant) {
        if self.waiting.is_empty() {
            self.rate.begin(now);
        }
        let (clock, again) = (self.clock, self.recalled.remove(&number).is_some());
        let tenant = self.tenant(&asked.tenant);
        if tenant.waiting == 0 && !again {
            tenant.used = tenant.used.max(clock);
        }
        tenant.waiting += asked.tokens;
        self.tokens += asked.tokens;
        for (worker, held) in asked.parts() {
            self.held.entry(worker).or_default().add(held);
        }
        let class = &mut self.classes[asked.priority as usize];
        class.tokens += asked.tokens;
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
        let class = &mut self.classes[asked.priority as usize];
        class.tokens -= asked.tokens;
        if let Some(lanes) = class.flows.get_mut(&asked.tenant) {
            if let Some(turns) = lanes.get_mut(&asked.lane) {
                turns.remove(&asked.turn(number));
            }
            lanes.retain(|_, turns| !turns.is_empty());
        }
        class.flows.retain(|_, lanes| !lanes.is_empty());
        if let Some(tenant) = self.tenants.get_mut(&asked.tenant) {
            tenant.waiting -= asked.tokens;
        }
        self.close_accounts();
        Some(asked)
    }

    /// Closes the accounts of classes that nobody waits in; and all, when nobody waits.
    fn close_accounts(&mut self) {
        let Self { classes, recalled, .. } = self;
        for (priority, class) in classes.iter_mut().enumerate().filter(|(_, class)| class.flows.is_empty()) {
            if recalled.values().all(|recalled| *recalled as usize != priority) {
                class.credit = 0.0;
            }
        }
        if self.waiting.is_empty() && recalled.is_empty() {
            self.clock = 0.0;
            self.rate.end();
            self.tenants.retain(|_, tenant| {
                tenant.used = 0.0;
                tenant.running > 0
            });
        }
    }
}

#[cfg(test)]
mod tests;
