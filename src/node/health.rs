//! The engine that the frontend sees: the router, plus the failed components that `/ready` lists while requests are
//! served.

use super::upstreams::Upstreams;
use crate::config::ByteSize;
use crate::process::panics;
use futures::future::BoxFuture;
use kvbm::disk::PathState;
use kvbm::{DiskTier, ObjectTier, Tier};
use parking_lot::Mutex;
use router::Router;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use transport::CertificateMetrics;
use worker::engine::{Engine, Error, ModelCard, OutputStream, Readiness, Request};
use worker::plane::nats::Connection;

/// Maximum number of upstreams whose problem the reason of `/ready` names.
const MAX_PROBLEMS: usize = 3;

/// Maximum characters of each problem: a URL, the reason, and what to change, which is at the end.
pub(super) const MAX_PROBLEM_CHARS: usize = 400;

/// Components that can fail while requests are still served.
#[derive(Default)]
pub(super) struct Health {
    /// Set once G3 is open.
    disk: OnceLock<Weak<DiskTier>>,
    /// G3.5 and G4, set once they are open.
    shared: OnceLock<Vec<Weak<ObjectTier>>>,
    /// The connection to NATS, if the process has one.
    nats: OnceLock<Weak<Connection>>,
    /// The servers behind the process, if it is a gateway.
    upstreams: OnceLock<Weak<Upstreams>>,
    /// The certificates of the process.
    certificates: Mutex<Vec<CertificateMetrics>>,
    /// Why a worker of the process could not be registered yet, while it is tried again.
    registration: Mutex<Option<String>>,
    /// The model of the process is being loaded, which takes minutes if it is large.
    is_loading: AtomicBool,
    pub(super) reload: Arc<ReloadState>,
}

/// Whether the last reload of the configuration was rejected.
#[derive(Default, Debug)]
pub struct ReloadState {
    is_rejected: AtomicBool,
}

/// Without the reason, which may have values of the configuration that clients must not see.
const REJECTED: &str = "the changed configuration was rejected, so the former one stays in effect; the log and \
                        GET /admin/config have the reason";

impl ReloadState {
    /// Records the outcome of a reload.
    pub fn record(&self, is_rejected: bool) {
        self.is_rejected.store(is_rejected, Ordering::Relaxed);
    }

    fn problem(&self) -> Option<String> {
        self.is_rejected.load(Ordering::Relaxed).then(|| REJECTED.to_owned())
    }
}

impl Health {
    pub(super) fn set_loading(&self, is_loading: bool) {
        self.is_loading.store(is_loading, Ordering::Relaxed);
    }

    pub(super) fn set_registration_problem(&self, problem: Option<String>) {
        *self.registration.lock() = problem;
    }

    pub(super) fn registration_problem(&self) -> Option<String> {
        self.registration.lock().clone()
    }

    pub(super) fn watch_disk(&self, disk: Weak<DiskTier>) {
        // Set once: a node has one G3.
        let _ = self.disk.set(disk);
    }

    pub(super) fn watch_shared(&self, tiers: Vec<Weak<ObjectTier>>) {
        let _ = self.shared.set(tiers);
    }

    pub(super) fn watch_nats(&self, connection: Weak<Connection>) {
        // Set once: a process has one connection.
        let _ = self.nats.set(connection);
    }

    pub(super) fn watch_upstreams(&self, upstreams: Weak<Upstreams>) {
        // Set once: a process has one set of upstreams, which reloads change.
        let _ = self.upstreams.set(upstreams);
    }

    pub(super) fn watch_certificates(&self, certificates: CertificateMetrics) {
        self.certificates.lock().push(certificates);
    }

    /// Why upstreams have not been used since the start: the first ones, each shortened, and how many others there are.
    /// `None` if there is none.
    fn upstream_problems(&self) -> Option<String> {
        let upstreams = self.upstreams.get().and_then(Weak::upgrade)?;
        let problems: Vec<String> = upstreams.problems().into_iter().chain(upstreams.unanswered()).collect();
        listed_problems(&problems)
    }

    pub(super) fn degraded(&self) -> Vec<String> {
        let panics = panics::counts().into_iter();
        let panics = panics
            .map(|(component, count)| format!("{component}: {count} panics since the start; the log has the details"));
        let disk = self.disk.get().and_then(Weak::upgrade);
        let paths = disk.iter().flat_map(|disk| disk.paths()).filter_map(problem_of_path);
        let shared = self.shared.get().into_iter().flatten().filter_map(Weak::upgrade);
        let shared = shared.flat_map(|tier| {
            let problems = problems_of_store(tier.outage(), tier.read_failure(), tier.write_failure());
            problems.into_iter().map(move |problem| format!("tiers.{}: {problem}", tier.level().name()))
        });
        let nats = self.nats.get().and_then(Weak::upgrade);
        let nats = nats.iter().flat_map(|nats| nats.problem().into_iter().chain(nats.lease_problems()));
        let upstreams = self.upstreams.get().and_then(Weak::upgrade);
        let of_upstreams = |upstreams: &Arc<Upstreams>| {
            upstreams.problems().into_iter().chain(upstreams.unanswered()).chain(upstreams.event_problems())
        };
        let upstreams = upstreams.iter().flat_map(of_upstreams);
        let certificates: Vec<_> = self.certificates.lock().iter().flat_map(CertificateMetrics::problems).collect();
        let reload = self.reload.problem();
        nats.chain(upstreams).chain(paths).chain(shared).chain(certificates).chain(reload).chain(panics).collect()
    }
}

/// The first of these problems, each shortened, and how many others there are. `None` without any.
fn listed_problems(problems: &[String]) -> Option<String> {
    let shortened = |problem: &String| match problem.char_indices().nth(MAX_PROBLEM_CHARS) {
        Some((end, _)) => format!("{}…", &problem[..end]),
        None => problem.clone(),
    };
    let listed: Vec<String> = problems.iter().take(MAX_PROBLEMS).map(shortened).collect();
    let listed = listed.join(" | ");
    match problems.len() {
        0 => None,
        all if all > MAX_PROBLEMS => Some(format!("{listed} | and {} more", all - MAX_PROBLEMS)),
        _ => Some(listed),
    }
}

/// What `/ready` says of a folder of G3 that is not used, to which the last write failed, or whose disk is full.
fn problem_of_path(PathState { folder, failure, write_failure, limited_to, .. }: PathState) -> Option<String> {
    let folder = folder.display();
    match (failure, write_failure, limited_to) {
        (Some(why), ..) => Some(format!("tiers.g3: {folder} is down: {why}")),
        (None, Some(why), _) => Some(format!("tiers.g3: cannot write to {folder}: {why}; {STILL_READ}")),
        (None, None, Some(bytes)) => {
            let size = ByteSize(bytes).about();
            Some(format!("tiers.g3: the disk of {folder} is full; the log is limited to {size}, below its capacity"))
        }
        (None, None, None) => None,
    }
}

/// The same of a store, and of one that refused the last read of blocks.
fn problems_of_store(
    outage: Option<String>,
    read_failure: Option<String>,
    write_failure: Option<String>,
) -> Vec<String> {
    if let Some(why) = outage {
        return vec![format!("the store cannot be used: {why}")];
    }
    let reads = read_failure.map(|why| format!("cannot read blocks: {why}; {COMPUTED}"));
    let writes = write_failure.map(|why| format!("cannot write to the store: {why}; {STILL_READ}"));
    reads.into_iter().chain(writes).collect()
}

/// What happens while reads are refused, and when the report of it ends.
const COMPUTED: &str = "they are computed, and the next load of blocks is a new attempt";

/// What works while writes fail, and when the report of it ends.
const STILL_READ: &str = "its blocks are still read, and the next offloaded block is a new attempt";

/// The router, with the health of the node.
pub(super) struct MonitoredRouter {
    pub(super) router: Arc<Router>,
    pub(super) health: Arc<Health>,
    /// Whether only servers of other processes serve requests.
    pub(super) is_gateway: bool,
}

impl Engine for MonitoredRouter {
    fn generate(&self, request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        self.router.generate(request)
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        self.router.models()
    }

    fn absence(&self, model: &str) -> Option<String> {
        self.router.absence(model)
    }

    fn is_available(&self, model: &str) -> bool {
        self.router.is_available(model)
    }

    fn readiness(&self) -> Readiness {
        let absent = match self.is_gateway {
            true => "no upstream can be used yet",
            false if self.health.is_loading.load(Ordering::Relaxed) => "the model is being loaded",
            false => "no worker that decodes is registered now",
        };
        match self.health.upstream_problems() {
            Some(problems) => self.router.readiness_or(&format!("{absent}: {problems}")),
            None => self.router.readiness_or(absent),
        }
    }

    fn degraded(&self) -> Vec<String> {
        self.health.degraded().into_iter().chain(self.router.degraded()).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use worker::plane::RouterId;
    use worker::plane::local::{LocalDiscovery, LocalEvents};

    #[test]
    fn the_reason_names_a_few_upstreams_and_is_bounded() {
        assert_eq!(listed_problems(&[]), None);
        let unauthorized = "upstream http://a/ cannot be used: /v1/models answered 401 Unauthorized".to_owned();
        assert_eq!(listed_problems(std::slice::from_ref(&unauthorized)), Some(unauthorized));
        let long = vec!["ü".repeat(10_000); 50];
        let listed = listed_problems(&long).unwrap();
        assert!(listed.ends_with("ü… | and 47 more") && listed.chars().count() < 1300, "{listed}");
    }

    #[tokio::test]
    async fn the_reason_says_that_the_model_is_being_loaded() {
        let (discovery, events) = (Arc::new(LocalDiscovery::default()), Arc::new(LocalEvents::default()));
        let (settings, registry) = (router::Settings::default(), prometheus::Registry::new());
        let router = Router::new(RouterId(1), discovery, events, settings, &registry).unwrap();
        let engine = MonitoredRouter { router, health: Arc::new(Health::default()), is_gateway: false };
        let reason = || match engine.readiness() {
            Readiness::NotReady(reason) => reason,
            Readiness::Ready => "ready".to_owned(),
        };
        assert_eq!(reason(), "no worker that decodes is registered now");
        engine.health.set_loading(true);
        assert_eq!(reason(), "the model is being loaded");
    }

    #[test]
    fn a_tier_that_cannot_write_is_listed_with_the_reason() {
        let limited = |failure: Option<&str>, write_failure: Option<&str>, limited_to| {
            let [failure, write_failure] = [failure, write_failure].map(|why| why.map(str::to_owned));
            problem_of_path(PathState { folder: "/kv".into(), failure, write_failure, limited_to, failures: 0 })
        };
        let path = |failure, write_failure| limited(failure, write_failure, None);
        assert_eq!(path(None, None), None);
        let small = limited(None, None, Some(1 << 30)).unwrap();
        assert_eq!(small, "tiers.g3: the disk of /kv is full; the log is limited to 1.0 GiB, below its capacity");
        assert!(limited(None, Some("full"), Some(1 << 30)).unwrap().contains("cannot write"));
        let full = path(None, Some("No space left on device (os error 28)")).unwrap();
        assert!(full.starts_with("tiers.g3: cannot write to /kv: No space left on device"), "{full}");
        assert_eq!(path(Some("gone"), Some("full")).unwrap(), "tiers.g3: /kv is down: gone");
        let why = |text: &str| Some(text.to_owned());
        assert!(problems_of_store(None, None, None).is_empty());
        let denied = problems_of_store(None, why("denied"), why("no access"));
        assert!(denied[0].starts_with("cannot read blocks: denied"), "{denied:?}");
        assert!(denied[1].starts_with("cannot write to the store: no access"), "{denied:?}");
        let outage = problems_of_store(why("connection refused"), why("denied"), why("timeout"));
        assert_eq!(outage, ["the store cannot be used: connection refused"], "reads and writes fail for that reason");
    }
}
