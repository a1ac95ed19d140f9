//! The next request of a class: of which tenant, and which of its requests.
//!
//! The tenant with the least service per weight is next. Of its requests, by the time to first token that they can
//! still reach:
//! 1. Requests **in time** for their deadline or target, the least slack first: `slack = start_by − now − queue time of
//!    the worker`, where `start_by` is the deadline or target less the estimated prefill, onboarding and transfer. One
//!    that would be late behind its worker's queue now, but not behind a shorter one, waits for that.
//! 2. Requests without a deadline or target, and **late** ones, in order of arrival. A request is late when it would
//!    miss its target on an idle worker.
//!
//! Least slack first alone (earliest deadline first) collapses under overload: each request is served when its slack is
//! used up, and a small error of the estimate makes all of them late (Locke 1986). Removing requests that have become
//! late from the order, and serving the others by the earliest latest start, is optimal for the share of requests in
//! time among non-preemptive orders that do not know the length of the work (shortest time to extinction; Panwar,
//! Towsley and Wolf 1988). Late requests are still served:
//! - A tenant earns a credit for them of a tenth of the cost of its requests in time. When it covers the oldest late
//!   one, that one is next.
//! - Otherwise they take the capacity that requests in time leave.
//!
//! In both cases a late request waits until its worker has capacity to spare (`saturation.rs`), because requests in
//! time that come after it have to wait for all of it. Requests behind it in the order wait for the same worker with
//! it, or else they would keep it busy, and a tenant or a class that has only late requests would lose its share.

use super::{Class, FairQueue, LOWER_CLASS_SHARE, LateShare};
use crate::admission::saturation::Opening;
use crate::admission::settings::Settings;
use crate::admission::ticket::{OrderKey, Route};
use std::cmp::Reverse;
use std::collections::{BTreeSet, BinaryHeap};
use std::sync::Arc;
use tokio::time::Instant;

/// Part of the cost of requests in time that is credited to the late requests of their tenant: as for lower classes.
const LATE_SHARE: f64 = LOWER_CLASS_SHARE;

impl LateShare {
    /// Counts a request of the tenant that is admitted.
    pub(super) fn count(&mut self, is_late: bool, cost: f64) {
        if !is_late {
            // Credit beyond the cost of what waits is useless.
            self.credit = (self.credit + cost * LATE_SHARE).min(self.credit.max(self.cost as f64));
        } else if self.credit >= cost {
            self.credit -= cost;
        }
    }
}

impl FairQueue {
    /// The next request of a class on a route with capacity. `held`: routes on which a request waits that is before
    /// all that are not examined yet.
    pub(super) fn first_of(
        &self,
        class: usize,
        limits: &Settings,
        now: Instant,
        held: &mut BTreeSet<Route>,
        open: &mut impl FnMut(&Self, Route) -> Option<Opening>,
    ) -> Option<u64> {
        let Class { flows, .. } = &self.classes[class];
        // The bits of positive floats are ordered as their values are.
        let served = |name: &Arc<str>| self.tenants.get(name).map_or(0, |tenant| tenant.served.to_bits());
        let mut tenants: BinaryHeap<Reverse<(u64, &Arc<str>)>> =
            flows.keys().map(|name| Reverse((served(name), name))).collect();
        while let Some(Reverse((_, name))) = tenants.pop() {
            let first = self.first_of_tenant(class, name, now, held, open);
            if let Some(number) = first.filter(|number| self.may_run(limits, name, self.waiting[number].tokens)) {
                return Some(number);
            }
        }
        None
    }

    fn first_of_tenant(
        &self,
        class: usize,
        name: &Arc<str>,
        now: Instant,
        held: &mut BTreeSet<Route>,
        open: &mut impl FnMut(&Self, Route) -> Option<Opening>,
    ) -> Option<u64> {
        let is_late = |(.., number): &OrderKey| self.waiting[number].is_late;
        let mut firsts: Vec<(OrderKey, Route)> = Vec::new();
        // The oldest late request, and whether its worker takes it now.
        let mut oldest: Option<(u64, Route, bool)> = None;
        let mut waits = Vec::new();
        for (route, keys) in &self.classes[class].flows[name] {
            let Some(opening) = open(self, *route).filter(|_| !held.contains(route)) else { continue };
            let Opening { queue_time, takes_late } = opening;
            let late = keys.range((true, None, 0)..).next().filter(|key| is_late(key));
            if let Some((.., number)) = late
                && oldest.is_none_or(|(oldest, ..)| *number < oldest)
            {
                oldest = Some((*number, *route, takes_late));
            }
            match keys.range((false, Some(now + queue_time), 0)..).next() {
                Some(first) if is_late(first) && !takes_late => waits.push(*route),
                Some(first) => firsts.push((*first, *route)),
                None => {}
            }
        }
        let credit = self.tenants.get(name).map_or(0.0, |tenant| tenant.late[class].credit);
        if let Some((number, route, takes_late)) =
            oldest.filter(|(number, ..)| self.waiting[number].cost_tokens as f64 <= credit)
        {
            if takes_late {
                return Some(number);
            }
            held.insert(route);
        }
        let first = firsts.into_iter().filter(|(_, route)| !held.contains(route)).min();
        held.extend(waits);
        first.map(|((.., number), _)| number)
    }
}
