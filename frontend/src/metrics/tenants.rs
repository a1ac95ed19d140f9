//! The metrics of tenants: requests by outcome, rejections, tokens, and the use of the limits of their API keys.
//!
//! The names of tenants may come from clients, so a limited number of them is exported: the tenants that appear first,
//! up to the limit, have series of their own. All others share those of the tenant [`OTHER`]. The table of tenants is
//! read for each request and changes only while it fills, so it is replaced as a whole (RCU), and readers take no lock.
//!
//! Not here: requests without a tenant, and the tenants of the admission queue (the router).

use super::counters;
use crate::error::CLIENT_CLOSED;
use crate::keys::{ApiKeys, KeyLimit};
use arc_swap::ArcSwap;
use parking_lot::Mutex;
use prometheus::core::{Collector, Desc};
use prometheus::{GaugeVec, IntCounter, IntCounterVec, Opts, proto};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock, Weak};

/// The label of the tenants beyond the limit.
const OTHER: &str = "other";

/// The reason of a rejection by the server behind this gateway, whose answer has no error of this program.
const BY_SERVER: &str = "server";

/// The metrics of tenants. Clones share them.
#[derive(Clone)]
pub(crate) struct TenantMetrics(Arc<Shared>);

struct Shared {
    families: Families,
    /// Maximum number of tenants with series of their own.
    max_tenants: usize,
    tenants: ArcSwap<HashMap<Arc<str>, Arc<Series>>>,
    /// Held while a tenant is added.
    adding: Mutex<()>,
    /// The series of the tenants beyond the limit; they exist once there is one.
    others: OnceLock<Arc<Series>>,
    /// The keys whose limits are exported.
    keys: OnceLock<Weak<ApiKeys>>,
    /// Held during a scrape, which reads the limits into the gauges.
    scrape: Mutex<()>,
}

struct Families {
    requests: IntCounterVec,
    rejections: IntCounterVec,
    prompt_tokens: IntCounterVec,
    cached_tokens: IntCounterVec,
    generated_tokens: IntCounterVec,
    limit_per_minute: GaugeVec,
    limit_used: GaugeVec,
}

/// The series of one tenant. They are looked up once, and begin with 0.
struct Series {
    /// The label.
    tenant: Arc<str>,
    /// In the order of [`Outcome::ALL`].
    requests: [IntCounter; Outcome::ALL.len()],
    prompt_tokens: IntCounter,
    cached_tokens: IntCounter,
    generated_tokens: IntCounter,
}

/// How a request ended.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Outcome {
    Ok,
    Rejected,
    Failed,
    Cancelled,
}

/// The tokens that a request has used.
#[derive(Clone, Copy, Default)]
pub(crate) struct UsedTokens {
    /// Of the prompt, cached ones included.
    pub(crate) prompt: u64,
    /// Of the prompt, those that were found in the KV cache.
    pub(crate) cached: u64,
    pub(crate) generated: u64,
}

impl TenantMetrics {
    /// Metrics of at most this number of tenants.
    pub(super) fn new(max_tenants: usize) -> Result<Self, prometheus::Error> {
        Ok(Self(Arc::new(Shared {
            families: Families::new()?,
            max_tenants,
            tenants: ArcSwap::default(),
            adding: Mutex::default(),
            others: OnceLock::new(),
            keys: OnceLock::new(),
            scrape: Mutex::default(),
        })))
    }

    /// Exports the limits of these keys from now on.
    pub(crate) fn export_limits(&self, keys: &Arc<ApiKeys>) {
        // Set once: a process has one set of keys.
        let _ = self.0.keys.set(Arc::downgrade(keys));
    }

    /// Counts a request that has ended with this status. `rejection` is why it was rejected, if this program did that.
    pub(crate) fn count(&self, tenant: &Arc<str>, status: u16, rejection: Option<&'static str>, used: UsedTokens) {
        let series = self.of(tenant);
        let outcome = Outcome::of_status(status);
        series.requests[outcome as usize].inc();
        if outcome == Outcome::Rejected {
            let labels = [&*series.tenant, rejection.unwrap_or(BY_SERVER)];
            self.0.families.rejections.with_label_values(&labels).inc();
        }
        series.prompt_tokens.inc_by(used.prompt);
        series.cached_tokens.inc_by(used.cached);
        series.generated_tokens.inc_by(used.generated);
    }

    /// The series of a tenant.
    fn of(&self, tenant: &Arc<str>) -> Arc<Series> {
        let tenants = self.0.tenants.load();
        match tenants.get(tenant) {
            Some(series) => Arc::clone(series),
            None if tenants.len() >= self.0.max_tenants => self.of_others(),
            None => self.add(tenant),
        }
    }

    fn of_others(&self) -> Arc<Series> {
        Arc::clone(self.0.others.get_or_init(|| Arc::new(self.0.families.of(OTHER.into()))))
    }

    fn add(&self, tenant: &Arc<str>) -> Arc<Series> {
        let _adding = self.0.adding.lock();
        // Another request may have added it, or the last one before the limit.
        let mut tenants = (**self.0.tenants.load()).clone();
        if let Some(series) = tenants.get(tenant) {
            return Arc::clone(series);
        }
        if tenants.len() >= self.0.max_tenants {
            return self.of_others();
        }
        let series = Arc::new(self.0.families.of(Arc::clone(tenant)));
        tenants.insert(Arc::clone(tenant), Arc::clone(&series));
        self.0.tenants.store(Arc::new(tenants));
        series
    }

    /// Reads the limits of all keys with a tenant into the gauges, which have the sum over the keys of a tenant.
    fn read_limits(&self) {
        let Families { limit_per_minute, limit_used, .. } = &self.0.families;
        limit_per_minute.reset();
        limit_used.reset();
        let keys = self.0.keys.get().and_then(Weak::upgrade).map(|keys| keys.of_file()).unwrap_or_default();
        for key in keys {
            let Some(tenant) = &key.tenant else { continue };
            let series = self.of(tenant);
            for KeyLimit { of, per_minute, used } in key.limits() {
                let labels = [&*series.tenant, of];
                limit_per_minute.with_label_values(&labels).add(per_minute.into());
                limit_used.with_label_values(&labels).add(used);
            }
        }
    }
}

impl Families {
    fn new() -> Result<Self, prometheus::Error> {
        let of_tenant = ["tenant"];
        Ok(Self {
            requests: counters(
                "tenant_requests_total",
                "Requests of a tenant that have ended, by outcome: ok, rejected (status 4xx), failed (5xx), or \
                 cancelled (the client disconnected).",
                &["tenant", "outcome"],
            )?,
            rejections: counters(
                "tenant_rejections_total",
                "Rejected requests of a tenant, by reason.",
                &["tenant", "reason"],
            )?,
            prompt_tokens: counters(
                "tenant_prompt_tokens_total",
                "Prompt tokens of a tenant, cached ones included, counted when a request has ended.",
                &of_tenant,
            )?,
            cached_tokens: counters(
                "tenant_cached_tokens_total",
                "Prompt tokens of a tenant that were found in the KV cache, counted when a request has ended.",
                &of_tenant,
            )?,
            generated_tokens: counters(
                "tenant_generated_tokens_total",
                "Tokens generated for a tenant, counted when a request has ended.",
                &of_tenant,
            )?,
            limit_per_minute: gauges(
                "tenant_limit_per_minute",
                "The limit of requests or tokens per minute of a tenant's API keys, added up.",
            )?,
            limit_used: gauges(
                "tenant_limit_used",
                "What a tenant's API keys have taken of their limit of requests or tokens per minute and is not \
                 refilled yet, added up.",
            )?,
        })
    }

    /// The series of a label.
    fn of(&self, tenant: Arc<str>) -> Series {
        let label = [&*tenant];
        Series {
            requests: Outcome::ALL.map(|outcome| self.requests.with_label_values(&[&*tenant, outcome.label()])),
            prompt_tokens: self.prompt_tokens.with_label_values(&label),
            cached_tokens: self.cached_tokens.with_label_values(&label),
            generated_tokens: self.generated_tokens.with_label_values(&label),
            tenant,
        }
    }

    fn all(&self) -> [&dyn Collector; 7] {
        [
            &self.requests,
            &self.rejections,
            &self.prompt_tokens,
            &self.cached_tokens,
            &self.generated_tokens,
            &self.limit_per_minute,
            &self.limit_used,
        ]
    }
}

fn gauges(name: &str, help: &str) -> Result<GaugeVec, prometheus::Error> {
    GaugeVec::new(Opts::new(format!("blockyard_frontend_{name}"), help), &["tenant", "limit"])
}

impl Outcome {
    const ALL: [Self; 4] = [Self::Ok, Self::Rejected, Self::Failed, Self::Cancelled];

    fn of_status(status: u16) -> Self {
        match status {
            CLIENT_CLOSED => Self::Cancelled,
            500.. => Self::Failed,
            400.. => Self::Rejected,
            _ => Self::Ok,
        }
    }

    fn label(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Rejected => "rejected",
            Self::Failed => "failed",
            Self::Cancelled => "cancelled",
        }
    }
}

impl Collector for TenantMetrics {
    fn desc(&self) -> Vec<&Desc> {
        self.0.families.all().into_iter().flat_map(Collector::desc).collect()
    }

    fn collect(&self) -> Vec<proto::MetricFamily> {
        let _one_at_a_time = self.0.scrape.lock();
        self.read_limits();
        self.0.families.all().into_iter().flat_map(Collector::collect).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::thread;

    fn count(metrics: &TenantMetrics, tenant: &str, used: UsedTokens) {
        metrics.count(&Arc::from(tenant), 200, None, used);
    }

    fn requests(metrics: &TenantMetrics, tenant: &str, outcome: Outcome) -> u64 {
        metrics.0.families.requests.with_label_values(&[tenant, outcome.label()]).get()
    }

    #[test]
    fn tenants_beyond_the_limit_share_one_label() {
        let metrics = TenantMetrics::new(2).unwrap();
        let used = UsedTokens { prompt: 7, cached: 4, generated: 2 };
        for (tenant, times) in [("ann", 1), ("bob", 2), ("cid", 3), ("dan", 4), ("ann", 5)] {
            (0..times).for_each(|_| count(&metrics, tenant, used));
        }
        let labels = [("ann", 6), ("bob", 2), (OTHER, 7)];
        for (tenant, expected) in labels {
            assert_eq!(requests(&metrics, tenant, Outcome::Ok), expected, "{tenant}");
        }
        let Families { prompt_tokens, cached_tokens, generated_tokens, .. } = &metrics.0.families;
        let tokens = [prompt_tokens, cached_tokens, generated_tokens].map(|of| of.with_label_values(&[OTHER]).get());
        assert_eq!(tokens, [49, 28, 14]);
        let families = metrics.collect();
        let series: usize = families.iter().map(|family| family.get_metric().len()).sum();
        assert_eq!(series, labels.len() * (Outcome::ALL.len() + 3), "no label for each of the others");
    }

    #[test]
    fn tenants_that_appear_at_the_same_time_keep_within_the_limit() {
        let metrics = TenantMetrics::new(8).unwrap();
        thread::scope(|scope| {
            for of_thread in 0..4 {
                let metrics = &metrics;
                scope.spawn(move || {
                    for tenant in 0..16 {
                        // All threads have half of the tenants in common.
                        let name = if tenant % 2 == 0 { tenant } else { 100 * of_thread + tenant };
                        count(metrics, &format!("t{name}"), UsedTokens::default());
                    }
                });
            }
        });
        assert_eq!(metrics.0.tenants.load().len(), 8);
        let tenants: Vec<Arc<str>> = metrics.0.tenants.load().keys().cloned().chain([OTHER.into()]).collect();
        let counted: u64 = tenants.iter().map(|tenant| requests(&metrics, tenant, Outcome::Ok)).sum();
        assert_eq!(counted, 4 * 16, "each request is counted once");
    }

    #[test]
    fn the_outcome_of_a_request_is_the_class_of_its_status() {
        let metrics = TenantMetrics::new(1).unwrap();
        for (status, rejection) in [(200, None), (429, Some("overloaded")), (404, None), (503, None), (499, None)] {
            metrics.count(&Arc::from("ann"), status, rejection, UsedTokens::default());
        }
        assert_eq!(Outcome::ALL.map(|outcome| requests(&metrics, "ann", outcome)), [1, 2, 1, 1]);
        let rejections = |reason: &str| metrics.0.families.rejections.with_label_values(&["ann", reason]).get();
        assert_eq!(["overloaded", BY_SERVER].map(rejections), [1, 1]);
    }
}
