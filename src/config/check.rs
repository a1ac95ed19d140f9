//! Which values are possible, beyond what their types say: each number within its range, and values that need each other.
//!
//! A new numeric key gets its range here, or in the `check` of the crate that owns it; a test tries every one with zero,
//! negative, infinite and absurd values.

use super::{Budget, ByteSize, Config, Model, Span};
use router::Problem;
use std::ops::RangeInclusive;
use std::time::Duration;
use tracing_subscriber::EnvFilter;

/// A step of a million rows, or a batch of so many sequences, fits no machine.
const ENGINE: RangeInclusive<usize> = 1..=1 << 20;
/// A body is held in memory as a whole.
const BODY_BYTES: RangeInclusive<usize> = 1..=1 << 30;
/// All bodies that are worked on at the same time: a tebibyte is more than machines have.
const INFLIGHT_BODY_BYTES: RangeInclusive<usize> = 1..=1 << 40;
/// More connections, or choices at the same time, than one process can have.
const MANY: RangeInclusive<usize> = 1..=1 << 24;
/// Where less than the HTTP library's own least is said, that holds.
const HEADER_BYTES: RangeInclusive<usize> = 1..=16 << 20;
/// A gigabyte a second is more than a client sends.
const BODY_RATE: RangeInclusive<usize> = 1..=1 << 30;
/// What a connection may take its time for.
const CONNECTION_TIME: RangeInclusive<Span> = Span(Duration::from_millis(1))..=Span(Duration::from_hours(24));
/// From naming an object to deleting it.
const GC_GRACE: RangeInclusive<Span> = Span(Duration::from_secs(1))..=Span(Duration::from_hours(24 * 365));
/// Less is no request, and what takes longer than an hour has failed.
const REQUEST_TIMEOUT: RangeInclusive<Span> = Span(Duration::from_millis(1))..=Span(Duration::from_hours(1));
/// All manifests are read each time.
const COLLECT_EVERY: RangeInclusive<Span> = Span(Duration::from_secs(1))..=Span(Duration::from_hours(24 * 365));
/// What may stay for no time at all is not worth writing.
const AGE_MAX: RangeInclusive<Span> = Span(Duration::from_secs(1))..=Span(Duration::from_hours(24 * 1000));
/// Weights of tenants beside each other.
const QUOTA_WEIGHT: RangeInclusive<f64> = 0.001..=1000.0;

impl Config {
    /// All values that are impossible, whatever the configuration is read for.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let Self { engine, frontend, tiers, shared_store, log, .. } = self;
        let mut problems: Vec<Problem> = [
            Problem::unless_within("engine.prefill_chunk", engine.prefill_chunk, ENGINE),
            Problem::unless_within("engine.sequences_max", engine.sequences_max, ENGINE),
            Problem::unless_within("engine.waiting_max", engine.waiting_max, ENGINE),
            Problem::unless_within("frontend.body_bytes_max", frontend.body_bytes_max, BODY_BYTES),
            Problem::unless_within(
                "frontend.max_inflight_body_bytes",
                frontend.max_inflight_body_bytes,
                INFLIGHT_BODY_BYTES,
            ),
            Problem::unless_within("frontend.max_choices_per_connection", frontend.max_choices_per_connection, MANY),
            Problem::unless_within("frontend.max_choices_per_tenant", frontend.max_choices_per_tenant, MANY),
            Problem::unless_within("frontend.max_connections", frontend.max_connections, MANY),
            Problem::unless_within("frontend.max_header_bytes", frontend.max_header_bytes, HEADER_BYTES),
            Problem::unless_within("frontend.min_body_bytes_per_second", frontend.min_body_bytes_per_second, BODY_RATE),
            Problem::unless_within("frontend.header_timeout", frontend.header_timeout, CONNECTION_TIME),
            Problem::unless_within("frontend.idle_timeout", frontend.idle_timeout, CONNECTION_TIME),
            Problem::unless_within("frontend.body_timeout", frontend.body_timeout, CONNECTION_TIME),
            Problem::unless_within("frontend.write_timeout", frontend.write_timeout, CONNECTION_TIME),
            Problem::unless_within("shared_store.gc_grace", shared_store.gc_grace, GC_GRACE),
            Problem::unless_within("shared_store.request_timeout", shared_store.request_timeout, REQUEST_TIMEOUT),
            Problem::unless_within("shared_store.collect_every", shared_store.collect_every, COLLECT_EVERY),
            shared_store.age_max.and_then(|age| Problem::unless_within("shared_store.age_max", age, AGE_MAX)),
            unless_some("shared_store.budget", shared_store.budget),
            tiers.pod.as_ref().and_then(|pod| unless_some("tiers.pod.budget", Some(pod.budget))),
            tiers.pod.as_ref().and_then(|pod| Problem::unless_within("tiers.pod.age_max", pod.age_max?, AGE_MAX)),
            log_filter(&log.filter),
        ]
        .into_iter()
        .flatten()
        .collect();
        for (nth, quota) in tiers.quotas.iter().enumerate() {
            let key = format!("tiers.quotas.{nth}.weight");
            problems.extend(Problem::unless_within(&key, quota.weight, QUOTA_WEIGHT));
        }
        problems.extend(self.router.check());
        problems
    }

    /// All values that `serve` refuses beyond these: what concerns a model or a tenant that there is not, a port taken twice, a
    /// tier that has to be there.
    pub(super) fn problems_of_serving(&self) -> Vec<Problem> {
        let Self { router, frontend, tiers, listen, admin, .. } = self;
        let mut problems = Vec::new();
        let served = self.model.id();
        for model in router.models.keys().filter(|model| **model != served) {
            let key = format!("router.models.{model}");
            problems.push(Problem::new(key, format!("no such model is served; the one that is is called `{served}`")));
        }
        if frontend.tenant_header.is_none() {
            let unnamed = |tenant: &&String| tenant.as_str() != "*";
            for tenant in router.admission.tenants.keys().filter(unnamed) {
                let key = format!("router.admission.tenants.{tenant}");
                let problem = "requests have no tenants unless frontend.tenant_header names the header that says which";
                problems.push(Problem::new(key, problem));
            }
        }
        if tiers.g1 == Budget::Off {
            problems.push(Problem::new("tiers.g1", "the engine computes in it; expected a size, or `auto`"));
        }
        if admin.listen.as_ref().is_some_and(|admin| admin.port != 0 && admin == listen) {
            problems.push(Problem::new("admin.listen", "the front door listens there; expected another port"));
        }
        problems
    }
}

impl Model {
    /// What clients call it: a built-in model's name, or that of its folder.
    fn id(&self) -> String {
        match self {
            Self::BuiltIn(model) => model.name().into(),
            Self::Folder(path) => worker::engine::llama::folder_name(path),
        }
    }
}

fn unless_some(key: &str, size: Option<ByteSize>) -> Option<Problem> {
    (size? == ByteSize(0)).then(|| Problem::new(key, "expected a size above 0, like \"100GiB\""))
}

fn log_filter(directives: &str) -> Option<Problem> {
    let error = EnvFilter::try_new(directives).err()?;
    Some(Problem::new("log.filter", format!("expected directives like `info` or `info,kvbm=debug`: {error}")))
}
