//! Which requests must go so that a newcomer fits into the full room.
//!
//! A tenth of the room is guaranteed to each class but the highest, which is guaranteed the rest. A newcomer takes the place
//! of, in this order and the latest arrival first:
//! 1. requests of lower classes, as long as those keep what is guaranteed to them;
//! 2. if its own class keeps within its guarantee: the one request of a lower class that is partly above the guarantee, and
//!    requests of higher classes that hold more than theirs, but never the last one of a class;
//! 3. requests of its own class, of the tenant that holds the most for its weight, as long as that one holds no less than
//!    the newcomer's.
//!
//! Each request that goes is found in logarithmic time, however many wait.

use super::{Room, SHARE};
use crate::admission::settings::Settings;
use crate::admission::ticket::Asked;
use std::collections::{BTreeMap, BTreeSet, BinaryHeap, HashMap, btree_set};
use std::iter::{Peekable, Rev};
use std::sync::Arc;

/// Requests of one class by arrival, and its tenants by what they hold.
#[derive(Default)]
pub(super) struct Places {
    tokens: u64,
    /// Number and tokens of each, in the order of arrival.
    arrivals: BTreeSet<(u64, u64)>,
    tenants: BTreeMap<Arc<str>, Held>,
    by_share: BTreeSet<(Share, Arc<str>)>,
    /// Requests and tenants that were looked at.
    #[cfg(test)]
    pub(super) examined: std::cell::Cell<usize>,
}

/// What one tenant holds.
struct Held {
    tokens: u64,
    /// As configured when its first request came.
    weight: f64,
    arrivals: BTreeSet<(u64, u64)>,
}

/// Tokens for a weight, ordered.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Share(u64);

impl Share {
    fn of(tokens: u64, weight: f64) -> Self {
        // The bits of positive floats are ordered as their values are.
        Self((tokens as f64 / weight).to_bits())
    }
}

impl Held {
    fn share(&self) -> Share {
        Share::of(self.tokens, self.weight)
    }
}

impl Places {
    pub(super) fn tokens(&self) -> u64 {
        self.tokens
    }

    pub(super) fn add(&mut self, number: u64, asked: &Asked, weight: f64) {
        self.change(number, asked, weight, true);
    }

    pub(super) fn remove(&mut self, number: u64, asked: &Asked) {
        self.change(number, asked, 1.0, false);
    }

    fn change(&mut self, number: u64, asked: &Asked, weight: f64, comes: bool) {
        let one = (number, asked.tokens);
        let fresh = || Held { tokens: 0, weight, arrivals: BTreeSet::new() };
        let held = self.tenants.entry(asked.tenant.clone()).or_insert_with(fresh);
        self.by_share.remove(&(held.share(), asked.tenant.clone()));
        if comes {
            self.tokens += asked.tokens;
            held.tokens += asked.tokens;
            self.arrivals.insert(one);
            held.arrivals.insert(one);
        } else {
            self.tokens -= asked.tokens;
            held.tokens -= asked.tokens;
            self.arrivals.remove(&one);
            held.arrivals.remove(&one);
        }
        if held.arrivals.is_empty() {
            self.tenants.remove(&asked.tenant);
        } else {
            self.by_share.insert((held.share(), asked.tenant.clone()));
        }
    }

    /// Takes the latest of the tenants that hold the most, as long as they hold no less than the tenant of the newcomer.
    fn take_from_tenants(&self, asked: &Asked, weight: f64, going: &mut Going) {
        let own = self.tenants.get(&asked.tenant).map_or(0, |held| held.tokens);
        let mine = Share::of(own + asked.tokens, weight);
        // Those of whom something was taken, by what is left to them; all others are in `by_share`.
        let mut touched: BinaryHeap<(Share, &Arc<str>)> = BinaryHeap::new();
        let mut left: HashMap<&Arc<str>, (u64, _)> = HashMap::new();
        let mut untouched = self.by_share.iter().rev().filter(|(_, name)| *name != asked.tenant).peekable();
        while !going.is_enough() {
            #[cfg(test)]
            self.examine();
            let next = untouched.peek().map(|(share, _)| *share);
            let name = match touched.peek() {
                Some(first) if next.is_none_or(|next| next <= first.0) => touched.pop().map(|(_, name)| name),
                _ => untouched.next().map(|(_, name)| name),
            };
            let Some(name) = name else { return };
            let held = &self.tenants[name];
            let (tokens, arrivals) = left.entry(name).or_insert_with(|| (held.tokens, held.arrivals.iter().rev()));
            let Some((number, one)) = arrivals.next() else { continue };
            *tokens -= one;
            let rest = Share::of(*tokens, held.weight);
            if rest < mine {
                return;
            }
            going.take(*number, *one);
            touched.push((rest, name));
        }
    }

    #[cfg(test)]
    fn examine(&self) {
        self.examined.set(self.examined.get() + 1);
    }
}

/// The requests of a class that are left, the latest first.
struct Latest<'a> {
    #[cfg(test)]
    places: &'a Places,
    tokens: u64,
    requests: usize,
    arrivals: Peekable<Rev<btree_set::Iter<'a, (u64, u64)>>>,
}

impl<'a> Latest<'a> {
    fn of(places: &'a Places) -> Self {
        let arrivals = places.arrivals.iter().rev().peekable();
        Self {
            #[cfg(test)]
            places,
            tokens: places.tokens,
            requests: places.arrivals.len(),
            arrivals,
        }
    }

    /// Takes one after another until the newcomer fits, while `may` of the tokens before and after, and the requests after.
    fn take(&mut self, going: &mut Going, may: impl Fn(u64, u64, usize) -> bool) {
        while !going.is_enough()
            && let Some(&&(number, tokens)) = self.arrivals.peek()
        {
            #[cfg(test)]
            self.places.examine();
            if !may(self.tokens, self.tokens - tokens, self.requests - 1) {
                return;
            }
            self.arrivals.next();
            (self.tokens, self.requests) = (self.tokens - tokens, self.requests - 1);
            going.take(number, tokens);
        }
    }
}

/// Requests that go for a newcomer.
struct Going {
    /// Tokens that the newcomer lacks.
    short: u64,
    /// Tokens of those that go.
    freed: u64,
    requests: Vec<(u64, u64)>,
}

impl Going {
    fn is_enough(&self) -> bool {
        self.freed >= self.short
    }

    fn take(&mut self, number: u64, tokens: u64) {
        self.freed += tokens;
        self.requests.push((number, tokens));
    }

    /// Their numbers, without those that need not go because a larger one went after them.
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

impl Room {
    /// The requests that must go so that a newcomer fits; `None` when it cannot be.
    pub(super) fn displace(&self, limits: &Settings, asked: &Asked) -> Option<Vec<u64>> {
        let short = (self.tokens + asked.tokens).saturating_sub(limits.max_queued_tokens);
        // An empty room takes any one.
        if short == 0 || self.waiting.is_empty() {
            return Some(Vec::new());
        }
        let mut going = Going { short, freed: 0, requests: Vec::new() };
        let class = asked.priority as usize;
        let keep = |class| guaranteed(limits.max_queued_tokens, class);
        let mut latest = self.classes.each_ref().map(|class| Latest::of(&class.places));
        for (lower, latest) in latest.iter_mut().enumerate().take(class) {
            latest.take(&mut going, |_, after, _| after >= keep(lower));
        }
        if self.classes[class].places.tokens + asked.tokens <= keep(class) {
            for (lower, latest) in latest.iter_mut().enumerate().take(class) {
                latest.take(&mut going, |before, _, _| before > keep(lower));
            }
            for (higher, latest) in latest.iter_mut().enumerate().skip(class + 1) {
                latest.take(&mut going, |before, _, left| before > keep(higher) && left > 0);
            }
        }
        self.classes[class].places.take_from_tenants(asked, limits.tenant(&asked.tenant).weight, &mut going);
        going.is_enough().then(|| going.needed())
    }
}

/// What is guaranteed to a class of the room.
fn guaranteed(room: u64, class: usize) -> u64 {
    let lower = (room as f64 * SHARE) as u64;
    if class < 2 { lower } else { room - 2 * lower }
}
