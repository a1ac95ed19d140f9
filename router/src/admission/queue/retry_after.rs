//! The estimated wait of a request at the measured drain rates, and the `Retry-After` of one that is rejected.

use super::FairQueue;
use crate::admission::settings::Settings;
use crate::admission::ticket::QueuedRequest;
use std::time::Duration;
use tokio::time::Instant;

/// Part of `max_queue_time` that the estimated wait of a new request may take. The rest is for the error of the
/// estimate: in a lasting overload every accepted request waits for about that long.
const ESTIMATED_WAIT_SHARE: f64 = 0.9;
/// Range of `Retry-After`. Beyond a minute an estimate is worth nothing.
const RETRY_AFTER_MIN: Duration = Duration::from_secs(1);
const RETRY_AFTER_MAX: Duration = Duration::from_mins(1);

impl FairQueue {
    /// By how much the estimated wait of a new request exceeds the limit; `None` when no rate is known.
    pub(super) fn excess_wait(&self, limits: &Settings, request: &QueuedRequest, now: Instant) -> Option<Duration> {
        let wait = self.backlogs.wait(request, limits.tenant(&request.tenant).weight, now)?;
        Some(wait.saturating_sub(Duration::from_secs_f64(limits.max_queue_time.as_secs_f64() * ESTIMATED_WAIT_SHARE)))
    }

    /// `Retry-After` of a rejected request: the estimated time until the queue has space for it and it would be served
    /// in time; after the times given to earlier rejected requests of its tenant, so that they do not all return for
    /// the same space.
    pub(crate) fn retry_after(&mut self, limits: &Settings, request: &QueuedRequest, now: Instant) -> Duration {
        let tenant = limits.tenant(&request.tenant);
        // Limits are in prompt tokens, rates in cost tokens.
        let each = self.cost() as f64 / self.tokens.max(1) as f64;
        let of_tenant = self.tenants.get(&request.tenant).map_or(0, |tenant| tenant.waiting);
        let short = |waiting: u64, most: u64| (waiting + request.tokens).saturating_sub(most) as f64 * each;
        let most = tenant.max_queued_tokens.unwrap_or(u64::MAX);
        let class = request.priority as usize;
        let space = self.backlogs.drain(class, short(self.tokens, limits.max_queued_tokens), now);
        let own = self.backlogs.drain_tenant(request, tenant.weight, short(of_tenant, most), now);
        let wait = self.excess_wait(limits, request, now);
        let Some(until) = [space, own, wait].into_iter().flatten().max() else { return RETRY_AFTER_MIN };
        let mut at = now + until.min(RETRY_AFTER_MAX);
        if let Some(takes) = self.backlogs.drain_tenant(request, tenant.weight, request.cost_tokens as f64, now)
            && let Some(known) = self.tenants.get_mut(&request.tenant)
        {
            let retry_slots = &mut known.retry_slots[request.priority as usize];
            at = retry_slots.map_or(at, |taken| taken.max(at)).min(now + RETRY_AFTER_MAX);
            *retry_slots = Some(at + takes);
        }
        (at - now).max(RETRY_AFTER_MIN)
    }

    /// Cost of all queued requests.
    fn cost(&self) -> u64 {
        (0..self.classes.len()).map(|class| self.backlogs.cost(class)).sum()
    }
}
