//! Servers behind this gateway: which there are, as the configuration and the addresses of names say.
//!
//! ```text
//!   [[upstreams]] ── apply ──▶ Upstreams ── one task per table ──▶ its name, resolved again and again
//!                                                                       └── one task per address ──▶ Server
//! ```
//!
//! **A server that is no longer listed is deregistered, and its running requests finish.** This holds for a table that
//! was removed or changed, and for an address that a name no longer has. A table that leaves in the same change in
//! which others come serves until these have been registered, at most [`Intervals::takeover`] ([`Takeover`]).

mod api;
mod ids;
mod listed;
mod registration_log;
mod server;
mod takeover;

use super::aliases::{Aliases, IncompleteLog};
use crate::config::{Alias, Resolve, Upstream};
use anyhow::Context;
use frontend::Tokenizers;
use http::HeaderValue;
use parking_lot::Mutex;
use registration_log::{Facts, RegistrationLog};
use server::Server;
pub(crate) use server::{START_SGLANG, START_VLLM};
use std::collections::{BTreeMap, HashMap};
use std::future::Future;
use std::net::IpAddr;
use std::path::Path;
use std::sync::{Arc, Weak};
use std::time::Duration;
use takeover::Takeover;
use tokio::sync::watch;
use tokio::time::{Instant, sleep, timeout, timeout_at};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;
use upstream::relay::client::Client;
use upstream::relay::headers::bearer;
use upstream::resolve::{Lookup, NamedServers};
use upstream::{Authorities, CacheEvents, Metrics, Salts};
use worker::engine::ModelCard;
use worker::serve::Planes;

/// Time for one resolution. The operating system asks each name server for 5 s.
const RESOLVE_TIMEOUT: Duration = Duration::from_secs(10);

/// Between two checks of the aliases. Servers are asked for their models as often.
const ALIAS_CHECK: Duration = Duration::from_secs(10);

/// Longest wait for answers of all servers before aliases are checked: a server loads its model in this time. One that
/// accepts connections and never answers must not hide an alias that cannot be served.
const MAX_ALIAS_WAIT: Duration = Duration::from_mins(1);

/// For which a table that leaves serves at most until those that take its place have been registered. A server that
/// runs answers within a second, and one that is gone must not be used for long.
pub(super) const TAKEOVER: Duration = Duration::from_secs(5);

/// The servers behind this gateway. Dropping it deregisters them at once.
pub struct Upstreams {
    shared: Arc<Shared>,
    aliases: Arc<Aliases>,
    /// By URL.
    running: Mutex<BTreeMap<String, Running>>,
    _abort: DropGuard,
}

/// What all servers share.
struct Shared {
    planes: Planes,
    salts: Arc<Salts>,
    lookup: Lookup,
    tokenizers: Arc<Tokenizers>,
    metrics: Metrics,
    intervals: Intervals,
    known: watch::Sender<BTreeMap<ServerKey, Vec<String>>>,
    /// Why servers are not registered, for `/ready`.
    problems: Mutex<BTreeMap<ServerKey, String>>,
    /// The caches whose KV events are followed, for `/ready`.
    caches: Mutex<Vec<Weak<CacheEvents>>>,
    /// Registered servers that the log does not name yet.
    registration_log: RegistrationLog,
    tasks: TaskTracker,
    abort: CancellationToken,
}

/// Since when a server of some table has not answered.
#[derive(Default)]
struct UnansweredSince(Option<Instant>);

/// Intervals of the requests to servers and to DNS.
#[derive(Clone, Copy, Debug)]
struct Intervals {
    /// Between two resolutions of a name. The records of Kubernetes live for 5 s by default; a new server needs longer
    /// to load its model, and one that is gone is passed over as soon as it refuses a connection.
    resolve: Duration,
    /// Between attempts to reach a server. Servers load their models for a minute.
    retry: Duration,
    /// Between checks of a server that has answered. A server needs longer to restart with another model, and a check
    /// is three small requests that its engine does not see.
    recheck: Duration,
    /// For which registered servers are collected before the log names them. A fleet answers within seconds.
    collect: Duration,
    /// [`TAKEOVER`].
    takeover: Duration,
}

/// A server: the URL in the configuration, and the first of its addresses if it is one of several servers of a name.
type ServerKey = (String, Option<IpAddr>);

/// The place of a server among the [`problems`](Shared::problems), for as long as it is listed in the configuration.
struct Problem {
    shared: Arc<Shared>,
    key: ServerKey,
}

/// A table of the configuration that is in effect. Dropping it deregisters its servers.
struct Running {
    upstream: CheckedUpstream,
    stop: DropGuard,
    /// Those of the table.
    tasks: TaskTracker,
}

/// A table of the configuration that is followed.
#[derive(Clone)]
struct Table {
    upstream: CheckedUpstream,
    takeover: Arc<Takeover>,
    tasks: TaskTracker,
}

/// A table of the configuration that can be used.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct CheckedUpstream {
    upstream: Upstream,
    api_key: Option<HeaderValue>,
    authorities: Option<Authorities>,
    /// Requests have tenants, whose blocks must be kept apart.
    has_tenants: bool,
}

/// The servers of a URL that have answered.
#[derive(Clone, PartialEq, Eq, Default, Debug)]
pub(super) struct AnsweredServers {
    pub(super) servers: usize,
    pub(super) models: Vec<String>,
}

impl Upstreams {
    /// No servers yet. Names are resolved by `lookup`.
    pub(crate) fn new(
        planes: Planes,
        lookup: Lookup,
        aliases: Arc<Aliases>,
        tokenizers: Arc<Tokenizers>,
        metrics: Metrics,
    ) -> Self {
        Self { aliases, ..Self::with(planes, lookup, tokenizers, metrics, Intervals::default()) }
    }

    fn with(
        planes: Planes,
        lookup: Lookup,
        tokenizers: Arc<Tokenizers>,
        metrics: Metrics,
        intervals: Intervals,
    ) -> Self {
        let abort = CancellationToken::new();
        let (known, salts, tasks) = (watch::Sender::default(), Arc::default(), TaskTracker::new());
        let abort_all = abort.clone();
        let shared = Shared {
            planes,
            salts,
            lookup,
            tokenizers,
            metrics,
            intervals,
            known,
            problems: Mutex::default(),
            caches: Mutex::default(),
            registration_log: RegistrationLog::default(),
            tasks,
            abort: abort_all,
        };
        Self {
            shared: Arc::new(shared),
            aliases: Arc::default(),
            running: Mutex::default(),
            _abort: abort.drop_guard(),
        }
    }

    /// Checks each table, without an effect. `has_tenants`: requests have tenants.
    pub fn check(configured: &[Upstream], has_tenants: bool) -> anyhow::Result<Vec<CheckedUpstream>> {
        let check = |(number, upstream): (usize, &Upstream)| {
            let authorities = upstream.authorities().with_context(|| {
                let path = upstream.ca_file.as_deref().unwrap_or(Path::new(""));
                format!("upstreams.{number}.ca_file: {}", path.display())
            })?;
            Client::new(&upstream.url, &upstream.connection(Vec::new(), authorities.as_ref()))
                .with_context(|| format!("upstreams.{number}: {} cannot be used", upstream.shown_url()))?;
            let api_key = upstream.api_key().with_context(|| {
                let path = upstream.api_key_file.as_deref().unwrap_or(Path::new(""));
                format!("upstreams.{number}.api_key_file: {}", path.display())
            })?;
            let header = |key: String| {
                bearer(&key).with_context(|| {
                    format!("upstreams.{number}.api_key_file: the key has characters that no header may have")
                })
            };
            let api_key = api_key.map(header).transpose()?;
            Ok(CheckedUpstream { upstream: upstream.clone(), api_key, authorities, has_tenants })
        };
        configured.iter().enumerate().map(check).collect()
    }

    /// Makes these the servers. Those that stay as they are, are not touched.
    pub fn apply(&self, upstreams: Vec<CheckedUpstream>) {
        let mut running = self.running.lock();
        let is_listed = |was: &Running| upstreams.contains(&was.upstream);
        let mut leaving: BTreeMap<String, Running> = running.extract_if(.., |_, was| !is_listed(was)).collect();
        let mut coming: BTreeMap<String, CheckedUpstream> = BTreeMap::new();
        for upstream in upstreams {
            let url = upstream.upstream.url.to_string();
            if !running.contains_key(&url) {
                coming.entry(url).or_insert(upstream);
            }
        }
        let with_former = |(url, upstream)| {
            let former = leaving.remove(&url);
            (url, upstream, former)
        };
        let coming: Vec<_> = coming.into_iter().map(with_former).collect();
        for was in leaving.values() {
            let url = was.upstream.upstream.shown_url();
            tracing::info!(upstream = url, "upstream removed; its running requests finish");
        }
        // They leave with the last takeover of which they are a part, at once if there is none.
        let others = Arc::new(leaving);
        for (url, upstream, former) in coming {
            if former.is_some() {
                tracing::info!(upstream = upstream.upstream.shown_url(), "upstream changed; it is registered anew");
            }
            let takeover = Arc::new(Takeover::new(former, Arc::clone(&others)));
            running.insert(url, self.start(upstream, takeover));
        }
    }

    /// Follows the servers of a table, which takes the place of others.
    fn start(&self, upstream: CheckedUpstream, takeover: Arc<Takeover>) -> Running {
        let (stop, tasks) = (CancellationToken::new(), TaskTracker::new());
        let (late, limit) = (Arc::clone(&takeover), self.shared.intervals.takeover);
        self.shared.spawn(async move {
            sleep(limit).await;
            late.complete().await;
        });
        let table = Table { upstream: upstream.clone(), takeover: Arc::clone(&takeover), tasks: tasks.clone() };
        let following = follow(Arc::clone(&self.shared), table, stop.clone());
        self.shared.spawn(tasks.track_future(async move {
            following.await;
            takeover.complete().await;
        }));
        Running { upstream, stop: stop.drop_guard(), tasks }
    }

    /// Makes these the aliases of models.
    pub fn set_aliases(&self, aliases: BTreeMap<String, Alias>) {
        self.aliases.set(aliases);
    }

    /// Logs aliases whose models no server has, once each server has answered or [`MAX_ALIAS_WAIT`] is over, and again
    /// when that changes. `served`: the models that are served now, those of workers too.
    pub(super) fn watch_aliases(self: &Arc<Self>, served: impl Fn() -> Vec<Arc<ModelCard>> + Send + 'static) {
        let (upstreams, mut log) = (Arc::downgrade(self), IncompleteLog::default());
        let mut unanswered = UnansweredSince::default();
        self.shared.spawn(async move {
            while let Some(upstreams) = upstreams.upgrade() {
                if unanswered.is_over(upstreams.have_answered(), Instant::now()) {
                    log.update(upstreams.aliases.incomplete(&served()));
                }
                drop(upstreams);
                sleep(ALIAS_CHECK).await;
            }
        });
    }

    /// Whether a server of each table has answered. Until then it is not known which models there are.
    fn have_answered(&self) -> bool {
        let known = self.shared.known.borrow();
        self.running.lock().keys().all(|url| known.keys().any(|(of, _)| of == url))
    }

    /// Waits until a server has answered and every other one has answered or failed, at most until `deadline`.
    pub(super) async fn until_known(&self, deadline: Instant) {
        let urls: Vec<String> = self.running.lock().keys().cloned().collect();
        let are_known = |known: &BTreeMap<ServerKey, Vec<String>>| {
            let problems = self.shared.problems.lock();
            let is_tried = |url: &String| known.keys().chain(problems.keys()).any(|(of, _)| of == url);
            !known.is_empty() && urls.iter().all(is_tried)
        };
        let mut known = self.shared.known.subscribe();
        // The sender lives as long as `self`.
        let _ = timeout_at(deadline, known.wait_for(are_known)).await;
    }

    /// What is known of the servers of a URL.
    pub(super) fn known(&self, url: &str) -> AnsweredServers {
        let mut all = AnsweredServers::default();
        for (_, models) in self.shared.known.borrow().iter().filter(|((of, _), _)| of == url) {
            all.servers += 1;
            all.models.extend(models.iter().filter(|model| !all.models.contains(model)).cloned().collect::<Vec<_>>());
        }
        all
    }

    /// The servers that could not be used since the start and the names that cannot be resolved, with the reason.
    pub(super) fn problems(&self) -> Vec<String> {
        self.shared.problems.lock().values().cloned().collect()
    }

    /// The tables of which no server has answered or failed yet, as while a name is being resolved.
    pub(super) fn unanswered(&self) -> Vec<String> {
        let (known, problems) = (self.shared.known.borrow(), self.shared.problems.lock());
        let is_tried = |url: &String| known.keys().chain(problems.keys()).any(|(of, _)| of == url);
        let running = self.running.lock();
        let untried = running.iter().filter(|(url, _)| !is_tried(url));
        untried
            .map(|(_, table)| format!("upstream {} has not answered yet", table.upstream.upstream.shown_url()))
            .collect()
    }

    /// The servers whose KV events cannot be decoded, with the reason.
    pub(super) fn event_problems(&self) -> Vec<String> {
        let caches: Vec<Arc<CacheEvents>> = self.shared.caches.lock().iter().filter_map(Weak::upgrade).collect();
        caches.iter().filter_map(|cache| cache.problem()).collect()
    }

    /// Deregisters all servers. Streams that were started go on.
    pub(super) async fn stop(&self) {
        self.shared.abort.cancel();
        self.shared.tasks.close();
        self.shared.tasks.wait().await;
    }
}

impl UnansweredSince {
    /// Whether the servers need not be waited for any longer.
    fn is_over(&mut self, have_answered: bool, now: Instant) -> bool {
        if have_answered {
            self.0 = None;
            return true;
        }
        now.duration_since(*self.0.get_or_insert(now)) >= MAX_ALIAS_WAIT
    }
}

impl Default for Intervals {
    fn default() -> Self {
        let [resolve, retry, recheck, collect] = [5, 2, 10, 1].map(Duration::from_secs);
        Self { resolve, retry, recheck, collect, takeover: TAKEOVER }
    }
}

impl Shared {
    /// Watches a cache whose KV events are followed, for as long as they are.
    fn watch_events(&self, cache: &Arc<CacheEvents>) {
        let mut caches = self.caches.lock();
        caches.retain(|cache| cache.strong_count() > 0);
        caches.push(Arc::downgrade(cache));
    }

    /// Has the log name a registered server, together with others that are registered soon.
    fn log_registered(self: &Arc<Self>, server: String, facts: Facts) {
        if self.registration_log.add(server, facts) {
            let shared = Arc::clone(self);
            self.spawn(async move {
                sleep(shared.intervals.collect).await;
                shared.registration_log.log();
            });
        }
    }

    /// Runs a task until the end of the program.
    fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        let abort = self.abort.clone();
        self.tasks.spawn(async move {
            tokio::select! {
                biased;
                () = abort.cancelled() => {}
                () = task => {}
            }
        });
    }
}

impl Problem {
    fn set(&self, problem: Option<String>) {
        let has_problem = problem.is_some();
        let mut problems = self.shared.problems.lock();
        let former = match problem {
            Some(problem) => problems.insert(self.key.clone(), problem),
            None => problems.remove(&self.key),
        };
        drop(problems);
        if has_problem && former.is_none() {
            // `until_known` looks at the problems, too.
            self.shared.known.send_modify(|_| ());
        }
    }
}

impl Drop for Problem {
    fn drop(&mut self) {
        self.set(None);
    }
}

impl CheckedUpstream {
    /// The name that stands for several servers, if the URL has one.
    fn name(&self) -> Option<&str> {
        let host = self.upstream.url.host()?;
        let is_address = host.trim_start_matches('[').trim_end_matches(']').parse::<IpAddr>().is_ok();
        (self.upstream.resolve == Resolve::All && !is_address).then_some(host)
    }
}

/// Follows the servers of one table until `stop`.
async fn follow(shared: Arc<Shared>, table: Table, stop: CancellationToken) {
    let Table { upstream, takeover, tasks } = table;
    let Some(name) = upstream.name().map(str::to_owned) else {
        return Server::new(shared, upstream, takeover, Vec::new()).run(stop).await;
    };
    let (url, mut servers) = (upstream.upstream.shown_url(), NamedServers::default());
    let mut running: HashMap<IpAddr, CancellationToken> = HashMap::new();
    let mut last_error = String::new();
    let problem = Problem { shared: Arc::clone(&shared), key: (upstream.upstream.url.to_string(), None) };
    loop {
        let answer = tokio::select! {
            biased;
            () = stop.cancelled() => return,
            answer = timeout(RESOLVE_TIMEOUT, (shared.lookup)(name.clone())) => answer,
        };
        let error = match answer {
            Ok(Ok(addresses)) => {
                let changes = servers.update(&addresses);
                for addresses in changes.added {
                    let one = stop.child_token();
                    running.insert(addresses[0], one.clone());
                    tracing::debug!(upstream = url, ?addresses, "a server of the name was found");
                    let takeover = Arc::clone(&takeover);
                    let server = Server::new(Arc::clone(&shared), upstream.clone(), takeover, addresses);
                    shared.spawn(tasks.track_future(server.run(one)));
                }
                for address in changes.removed {
                    tracing::info!(
                        upstream = url, %address,
                        "the name no longer has this server; its running requests finish"
                    );
                    running.remove(&address).inspect(CancellationToken::cancel);
                }
                if addresses.is_empty() { "no addresses".to_owned() } else { String::new() }
            }
            Ok(Err(error)) => error.to_string(),
            Err(_) => format!("no answer within {} s", RESOLVE_TIMEOUT.as_secs()),
        };
        // Once per reason.
        if !error.is_empty() && error != last_error {
            tracing::warn!(
                upstream = url,
                servers = servers.len(),
                error,
                "the name cannot be resolved; keeping the servers that are known"
            );
        }
        let kept = if servers.is_empty() { "" } else { ", and the servers that are known are kept" };
        let is_unresolved = !error.is_empty();
        problem.set(is_unresolved.then(|| format!("upstream {url}: the name cannot be resolved{kept}: {error}")));
        last_error = error;
        tokio::select! {
            biased;
            () = stop.cancelled() => return,
            () = sleep(shared.intervals.resolve) => {}
        }
    }
}

#[cfg(test)]
mod tests;
