//! Checks beyond the types of the values: the range of each number, and values that depend on each other.
//!
//! A new numeric key gets its range here, or in the `check` of the crate that owns it; a test tries every one with
//! zero, negative, infinite and absurd values.

use super::suggest::distance;
use super::{Budget, ByteSize, Config, HumanDuration, Model, Origins, Upstream};
use router::{PlannerMode, Problem};
use std::ops::RangeInclusive;
use std::time::Duration;
use tracing_subscriber::EnvFilter;
use tracing_subscriber::filter::LevelFilter;
use worker::plane::nats::LIBRARY_LOG_TARGET;

/// No machine can run a step of more than a million rows, or a batch of more than a million sequences.
const ENGINE: RangeInclusive<usize> = 1..=1 << 20;
/// A body is held in memory as a whole.
const BODY: RangeInclusive<ByteSize> = ByteSize(1)..=ByteSize(1 << 30);
/// All bodies in memory at the same time: no machine has more than a tebibyte for them.
const INFLIGHT_BODIES: RangeInclusive<ByteSize> = ByteSize(1)..=ByteSize(1 << 40);
/// More connections, or choices at the same time, than one process can have.
const MANY: RangeInclusive<usize> = 1..=1 << 24;
/// A tenant has about ten series, and Prometheus should get at most some hundred thousand of a process.
const TENANT_METRICS: RangeInclusive<usize> = 0..=10_000;
/// The HTTP library takes heads of up to 8 KiB in any case, so a lower limit would not hold.
const HEADERS: RangeInclusive<ByteSize> = ByteSize(8 << 10)..=ByteSize(16 << 20);
/// Bytes per second: no client sends more than a gibibyte.
const BODY_RATE: RangeInclusive<ByteSize> = ByteSize(1)..=ByteSize(1 << 30);
/// Timeouts of a connection.
const CONNECTION_TIME: RangeInclusive<HumanDuration> =
    HumanDuration(Duration::from_millis(1))..=HumanDuration(Duration::from_hours(24));
/// The key, which has the range of those times.
const MAX_REQUEST_TIME: &str = "frontend.max_request_time";
/// Time from marking an object to deleting it.
const GC_GRACE: RangeInclusive<HumanDuration> =
    HumanDuration(Duration::from_secs(1))..=HumanDuration(Duration::from_hours(24 * 365));
/// No request is faster; one that takes longer than an hour has failed.
const REQUEST_TIMEOUT: RangeInclusive<HumanDuration> =
    HumanDuration(Duration::from_millis(1))..=HumanDuration(Duration::from_hours(1));
/// Each run reads all manifests.
const GC_INTERVAL: RangeInclusive<HumanDuration> =
    HumanDuration(Duration::from_secs(1))..=HumanDuration(Duration::from_hours(24 * 365));
/// Blocks that are removed at once are not worth writing.
const MAX_AGE: RangeInclusive<HumanDuration> =
    HumanDuration(Duration::from_secs(1))..=HumanDuration(Duration::from_hours(24 * 1000));
/// The parts of the program that log: the targets of a log filter, apart from those of libraries.
const LOG_PARTS: [&str; 7] = ["frontend", "router", "worker", "kvbm", "upstream", "transport", "blockyard"];
/// Libraries whose lines help to find the cause of a failed connection.
const LOG_LIBRARIES: [&str; 4] = [LIBRARY_LOG_TARGET, "h2", "object_store", "rustls_platform_verifier"];
/// Weights of tenants beside each other.
const QUOTA_WEIGHT: RangeInclusive<f64> = 0.001..=1000.0;

impl Config {
    /// All invalid values, for every command.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let Self { engine, frontend, tiers, log, .. } = self;
        let (flash, g4) = (tiers.g3_5.as_ref(), &tiers.g4);
        let mut problems: Vec<Problem> = [
            Problem::unless_within("engine.max_prefill_chunk_tokens", engine.max_prefill_chunk_tokens, ENGINE),
            Problem::unless_within("engine.max_num_seqs", engine.max_num_seqs, ENGINE),
            Problem::unless_within("engine.max_queued_requests", engine.max_queued_requests, ENGINE),
            Problem::unless_within("frontend.max_body", frontend.max_body, BODY),
            Problem::unless_within("frontend.max_inflight_bodies", frontend.max_inflight_bodies, INFLIGHT_BODIES),
            Problem::unless_within("frontend.max_choices_per_connection", frontend.max_choices_per_connection, MANY),
            Problem::unless_within("frontend.max_choices_per_tenant", frontend.max_choices_per_tenant, MANY),
            Problem::unless_within("frontend.tenant_metrics", frontend.tenant_metrics, TENANT_METRICS),
            Problem::unless_within("frontend.max_connections", frontend.max_connections, MANY),
            Problem::unless_within("frontend.max_headers", frontend.max_headers, HEADERS),
            Problem::unless_within("frontend.min_body_rate", frontend.min_body_rate, BODY_RATE),
            Problem::unless_within("frontend.header_timeout", frontend.header_timeout, CONNECTION_TIME),
            Problem::unless_within("frontend.idle_timeout", frontend.idle_timeout, CONNECTION_TIME),
            Problem::unless_within("frontend.body_timeout", frontend.body_timeout, CONNECTION_TIME),
            Problem::unless_within("frontend.write_timeout", frontend.write_timeout, CONNECTION_TIME),
            frontend.max_request_time.and_then(|time| Problem::unless_within(MAX_REQUEST_TIME, time, CONNECTION_TIME)),
            Problem::unless_within("tiers.g4.gc_grace", g4.gc_grace, GC_GRACE),
            Problem::unless_within("tiers.g4.request_timeout", g4.request_timeout, REQUEST_TIMEOUT),
            Problem::unless_within("tiers.g4.gc_interval", g4.gc_interval, GC_INTERVAL),
            g4.max_age.and_then(|age| Problem::unless_within("tiers.g4.max_age", age, MAX_AGE)),
            unless_some("tiers.g4.capacity", g4.capacity),
            flash.and_then(|flash| unless_some("tiers.g3_5.capacity", Some(flash.capacity))),
            flash.and_then(|flash| Problem::unless_within("tiers.g3_5.max_age", flash.max_age?, MAX_AGE)),
            check_log_filter(&log.filter).err().map(|problem| Problem::new("log.filter", problem)),
            (frontend.max_inflight_bodies < frontend.max_body).then(|| {
                let problem = format!("no body of frontend.max_body fits; expected at least \"{}\"", frontend.max_body);
                Problem::new("frontend.max_inflight_bodies", problem)
            }),
        ]
        .into_iter()
        .flatten()
        .collect();
        for (nth, quota) in tiers.quotas.iter().enumerate() {
            let key = format!("tiers.quotas.{nth}.weight");
            problems.extend(Problem::unless_within(&key, quota.weight, QUOTA_WEIGHT));
        }
        for (nth, host) in frontend.allowed_hosts.iter().enumerate() {
            if host != "*" && host.contains(['/', ':', '*', ' ']) {
                let problem =
                    "expected the name of a host without scheme, port and path, like `kv.example.com`, or `*`";
                problems.push(Problem::new(format!("frontend.allowed_hosts.{nth}"), problem));
            }
        }
        // Servers of one canonical URL would be registered with one id.
        let urls: Vec<_> = self.upstreams.iter().map(Upstream::canonical_url).collect();
        for (nth, upstream) in self.upstreams.iter().enumerate() {
            if let Some(first) = urls[..nth].iter().position(|url| *url == urls[nth]) {
                let problem = format!("{} is upstreams.{first} already", upstream.shown_url());
                problems.push(Problem::new(format!("upstreams.{nth}.url"), problem));
            }
        }
        problems.extend(self.router.check());
        problems.extend(self.nats.problems());
        problems.extend(self.cluster.problems());
        problems.extend(self.tracing.problems());
        problems
    }

    /// Additional checks of `serve`: sections for unknown models or tenants, one port used twice, and G1 switched off.
    pub(super) fn problems_of_serving(&self) -> Vec<Problem> {
        let Self { router, frontend, listen, admin, .. } = self;
        let mut problems = Vec::new();
        if self.upstreams.is_empty()
            && let Some(name) = self.aliases.keys().next()
        {
            let problem = "aliases are of models of upstreams; expected servers in `upstreams`";
            problems.push(Problem::new(format!("aliases.{name}"), problem));
        }
        if !self.upstreams.is_empty() && router.planner.mode == PlannerMode::Apply {
            let problem = "upstreams do not change their role; expected `recommend` or `off`";
            problems.push(Problem::new("router.planner.mode", problem));
        }
        let served = self.model.id();
        let is_unknown = |model: &&String| self.upstreams.is_empty() && **model != served;
        for model in router.models.keys().filter(is_unknown) {
            let key = format!("router.models.{model}");
            problems.push(Problem::new(key, format!("no such model is served; the served model is `{served}`")));
        }
        if !frontend.has_tenants() {
            let is_specific = |tenant: &&String| tenant.as_str() != "*";
            for tenant in router.admission.tenants.keys().filter(is_specific) {
                let key = format!("router.admission.tenants.{tenant}");
                let problem =
                    "requests have no tenants unless frontend.tenant_header or frontend.api_keys_file says which";
                problems.push(Problem::new(key, problem));
            }
        }
        if !self.workers.any_decodes() {
            problems.push(Problem::new("workers", super::Workers::NONE_DECODES));
        }
        problems.extend(self.problem_of_g1());
        if admin.listen.as_ref().is_some_and(|admin| admin.port != 0 && admin == listen) {
            problems.push(Problem::new("admin.listen", "the API (`listen`) uses this port; expected another one"));
        }
        problems
    }

    /// The keys of the native engine that are set although no model is loaded, because there are upstreams.
    pub fn without_effect<'a>(&self, origins: &'a Origins) -> Vec<&'a str> {
        let is_native = |key: &&str| matches!(key.split('.').next(), Some("model" | "workers" | "tiers" | "engine"));
        if self.upstreams.is_empty() { Vec::new() } else { origins.keys_set().filter(is_native).collect() }
    }

    pub(super) fn problem_of_g1(&self) -> Option<Problem> {
        let problem = || Problem::new("tiers.g1", "the engine computes in it; expected a size, or `auto`");
        (self.tiers.g1 == Budget::Off).then(problem)
    }
}

impl Model {
    /// The model id in the API: the name of a built-in model, or of the folder.
    fn id(&self) -> String {
        match self {
            Self::BuiltIn(model) => model.name().into(),
            Self::Folder(path) => worker::llama::folder_name(path),
        }
    }
}

fn unless_some(key: &str, size: Option<ByteSize>) -> Option<Problem> {
    (size? == ByteSize(0)).then(|| Problem::new(key, "expected a size above 0, like \"100GiB\""))
}

/// What is wrong with a log filter, and what is expected.
pub fn check_log_filter(directives: &str) -> Result<(), String> {
    EnvFilter::try_new(directives)
        .map_err(|error| format!("expected directives like `info` or `info,kvbm=debug`: {error}"))?;
    // To the library a word alone that is no level is a target, so a misspelt level would silence all other targets.
    let is_level = |word: &str| word.is_empty() || word.parse::<LevelFilter>().is_ok();
    if let Some(word) = directives.split(',').find(|word| !word.contains(['=', '[']) && !is_level(word)) {
        return Err(format!(
            "{word:?} is no level; expected off, error, warn, info, debug or trace, or PART=LEVEL with a part of {}",
            LOG_PARTS.join(", ")
        ));
    }
    // The directive of a span may have commas and `=` in brackets.
    if directives.contains('[') {
        return Ok(());
    }
    let targets = directives.split(',').filter_map(|directive| directive.split_once('=')).map(|(target, _)| target);
    targets.map(|target| target.split("::").next().unwrap_or_default()).try_for_each(check_log_part)
}

/// A misspelt part would be accepted by the library, and have no effect.
fn check_log_part(part: &str) -> Result<(), String> {
    if LOG_PARTS.contains(&part) || LOG_LIBRARIES.contains(&part) {
        return Ok(());
    }
    // The library distinguishes upper and lower case, so `KVBM=debug` would have no effect.
    let lower = part.to_lowercase();
    let known = LOG_PARTS.iter().chain(&LOG_LIBRARIES);
    // Of the shortest names a few letters are most.
    let is_similar = |(letters, known): &(usize, &&str)| *letters <= 2 && letters * 2 <= known.len();
    let meant = known.map(|known| (distance(&lower, known), known)).filter(is_similar).min();
    Err(match meant {
        Some((_, known)) => format!("{part:?} is no part; did you mean {known}?"),
        None => format!("{part:?} is no part; expected one of {}", LOG_PARTS.join(", ")),
    })
}
