//! One server: asks it for its models and publishers of KV events, and registers its models as workers.
//!
//! A server that does not answer yet is asked again until it does, so the order of starting does not matter. One that
//! stops answering stays registered: the router's circuit breaker and health checks keep requests away from it.
//!
//! **It is asked again at an interval, and when it may have restarted**, because a server may come back with other
//! models: after a request that it did not take or answered with 404, and when its publisher of KV events is a new one.
//! Models that it no longer lists are deregistered, and their running requests finish. A change of its publishers, its
//! block size or its first model registers all of them anew.
//!
//! The KV events of a server are followed where it publishes them, so that the router knows its cache. Its first
//! model, further names of that ([`names_of_first`]) and the adapters get the events. The cache of other models is
//! estimated by the router.
//!
//! **A data-parallel rank has a cache of its own, so it is a worker of its own**, where requests can name it. Other
//! ranks are one worker together. Where the server chooses the rank of a request, the engines of its ranks say so
//! ([`Engine::choosing_server`]).

use super::api::Api;
use super::ids::worker_id;
use super::listed::{LeftOut, names_of_first, to_register};
use super::registration_log::{CacheSource, Facts};
use super::takeover::Takeover;
use super::{CheckedUpstream, Intervals, Problem, ServerKey, Shared};
use crate::config::KvEvents;
use crate::node::workers::epoch_now;
use frontend::RegisteredTokenizer;
use http::StatusCode;
use kvbm::EventLog;
use std::collections::{BTreeMap, HashMap};
use std::convert::Infallible;
use std::net::IpAddr;
use std::panic::resume_unwind;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::task::JoinSet;
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;
use upstream::kv_events::Source;
use upstream::relay::client::Client;
use upstream::{
    CacheEvents, DEFAULT_BLOCK_SIZE, DiscoverError, KvSources, ListedModel, LoadReports, ModelLog, Program, Rank,
    ReportedLoad, TokenizeClient, UpstreamEngine, UpstreamSettings, discover,
};
use worker::engine::{Engine, ModelCard, UNKNOWN_CONTEXT};
use worker::plane::{Instance, PlaneError, Role, WorkerId};
use worker::serve::Worker;

/// How vLLM publishes its KV events.
pub(crate) const START_VLLM: &str = "start vLLM with --kv-events-config \
    '{\"enable_kv_cache_events\":true,\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\
    \"replay_endpoint\":\"tcp://*:5558\"}'";
/// How SGLang does. Its ranks are at the following ports, so the replay sockets are a hundred ports away.
pub(crate) const START_SGLANG: &str = "start SGLang with --page-size 64 --kv-events-config \
    '{\"publisher\":\"zmq\",\"endpoint\":\"tcp://*:5557\",\"replay_endpoint\":\"tcp://*:5657\"}'";

/// One server.
pub(super) struct Server {
    shared: Arc<Shared>,
    upstream: CheckedUpstream,
    takeover: Arc<Takeover>,
    addresses: Vec<IpAddr>,
    key: ServerKey,
    /// The URL as all gateways spell it, for ids.
    canonical_url: String,
    /// The host, or the address, as endpoints name it.
    host: String,
    /// Notified when the server may have restarted.
    may_have_changed: Arc<Notify>,
}

/// What a server says of itself.
struct Answer {
    program: Program,
    models: Vec<ListedModel>,
    /// Further models that it lists.
    left_out: LeftOut,
    /// `None`: it did not answer the request for this.
    kv: Option<KvSources>,
}

/// A server that has answered.
struct Registered {
    program: Program,
    version: Option<String>,
    kv: KvSources,
    api: Api,
    models: BTreeMap<String, RegisteredModel>,
    /// The names of the model that gets the KV events. None: there are no events.
    names: Vec<String>,
    /// The caches of the ranks as each name sees them, or as all models do. Not empty.
    caches: Vec<Vec<Cache>>,
    reports: Arc<LoadReports>,
    following: JoinSet<Infallible>,
    /// The log has named it.
    is_logged: bool,
}

/// A cache of a server: that of a rank, or of all ranks.
struct Cache {
    rank: Option<Rank>,
    events: Arc<CacheEvents>,
    /// Its publishers, until they are followed.
    unfollowed: Vec<Source>,
}

struct RegisteredModel {
    facts: ModelFacts,
    /// One for each cache.
    workers: Vec<(Worker, ReportedLoad)>,
    tokenizer: RegisteredTokenizer,
}

/// What makes a model another one if it changes.
#[derive(Clone, PartialEq, Eq, Debug)]
struct ModelFacts {
    /// The model that it is an adapter of.
    parent: Option<String>,
    /// The model that it is a further name of.
    name_of: Option<String>,
    context: usize,
    /// The events of the server are those of this model, or of one that it is an adapter of.
    gets_events: bool,
}

impl Registered {
    /// The caches of a model. An adapter has those of its model.
    fn caches_of(&self, id: &str, parent: Option<&str>) -> &[Cache] {
        let name = parent.unwrap_or(id);
        let at = self.names.iter().position(|known| known == name).unwrap_or_default();
        &self.caches[at]
    }

    /// Creates the event logs of a model, one for each of its caches. The caches add their events from now on.
    fn add_logs(&self, card: &ModelCard, facts: &ModelFacts) -> Vec<Arc<EventLog>> {
        let log = |cache: &Cache| {
            let log = Arc::new(EventLog::new(epoch_now()));
            if facts.gets_events {
                let adapter = facts.parent.is_some().then(|| card.id.clone());
                cache.events.set_model(ModelLog { identity: card.identity.clone(), adapter, log: Arc::clone(&log) });
            }
            log
        };
        self.caches_of(&card.id, facts.parent.as_deref()).iter().map(log).collect()
    }

    /// Follows the KV events of the caches that are not followed yet.
    fn follow(&mut self) {
        for cache in self.caches.iter_mut().flatten().filter(|cache| !cache.unfollowed.is_empty()) {
            self.following.spawn(Arc::clone(&cache.events).follow(std::mem::take(&mut cache.unfollowed)));
        }
    }
}

impl Server {
    /// The server of a URL at these addresses; none: at those that the host has at each connection.
    pub(super) fn new(
        shared: Arc<Shared>,
        upstream: CheckedUpstream,
        takeover: Arc<Takeover>,
        addresses: Vec<IpAddr>,
    ) -> Self {
        let url = &upstream.upstream.url;
        let first = addresses.first().copied();
        let host = match first {
            Some(IpAddr::V6(address)) => format!("[{address}]"),
            Some(IpAddr::V4(address)) => address.to_string(),
            None => url.host().unwrap_or_default().to_owned(),
        };
        let (key, canonical_url) = ((url.to_string(), first), upstream.upstream.canonical_url());
        let may_have_changed = Arc::default();
        Self { shared, upstream, takeover, addresses, key, canonical_url, host, may_have_changed }
    }

    /// Keeps the server's models registered until `stop`. Then their running requests finish.
    pub(super) async fn run(self, stop: CancellationToken) {
        let CheckedUpstream { upstream, authorities, .. } = &self.upstream;
        let settings = upstream.connection(self.addresses.clone(), authorities.as_ref());
        let client = match Client::new(&upstream.url, &settings) {
            Ok(client) => client,
            Err(error) => return tracing::error!(upstream = %self.name(), %error, "upstream cannot be used"),
        };
        let problem = Problem { shared: Arc::clone(&self.shared), key: self.key.clone() };
        let (mut registered, mut was_forbidden) = (None, false);
        let (mut last_error, mut last_left_out) = (String::new(), LeftOut::default());
        loop {
            let answer = tokio::select! {
                biased;
                () = stop.cancelled() => break,
                answer = self.ask(&client) => answer,
            };
            let has_answered = !matches!(answer, Err(DiscoverError::Ask(_)));
            let is_forbidden = matches!(answer, Err(DiscoverError::Status(StatusCode::FORBIDDEN)));
            // Proxies also limit rates with 403, so one of these says nothing.
            let is_refused =
                is_forbidden && was_forbidden || matches!(answer, Err(DiscoverError::Status(StatusCode::UNAUTHORIZED)));
            was_forbidden = is_forbidden;
            let outcome = match answer {
                Ok(answer) => {
                    let left_out = answer.left_out;
                    // Once per change.
                    if std::mem::replace(&mut last_left_out, left_out) != left_out {
                        left_out.warn(&self.name());
                    }
                    self.update(&client, &mut registered, answer).await.map_err(str::to_owned)
                }
                Err(error) => Err(with_advice(&error, upstream.api_key_file.is_some())),
            };
            // Requests would get this status too, and clients would take it for an error of their own keys.
            if is_refused && let Some(former) = registered.take() {
                self.deregister(former);
            }
            let error = outcome.err().unwrap_or_default();
            let is_registered = registered.is_some();
            // Once per reason: a server that loads its model is asked dozens of times.
            if !error.is_empty() && error != last_error {
                tracing::warn!(upstream = %self.name(), error, "{}", without_answer(is_registered));
            }
            // Health checks find out about a server that has been registered.
            let is_unknown = !is_registered && !error.is_empty();
            problem.set(is_unknown.then(|| {
                let what = if has_answered { "cannot be used" } else { "has not answered since the start" };
                format!("upstream {} {what}: {error}", self.name())
            }));
            last_error = error;
            let pause = async {
                let Intervals { retry, recheck, .. } = self.shared.intervals;
                sleep(retry).await;
                if is_registered && !was_forbidden {
                    // Ends at once if it was notified meanwhile. An error means that the time is over.
                    let _ = timeout(recheck.saturating_sub(retry), self.may_have_changed.notified()).await;
                }
            };
            let following = async {
                match &mut registered {
                    Some(Registered { following, .. }) => following.join_next().await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                biased;
                () = stop.cancelled() => break,
                Some(Err(error)) = following => if error.is_panic() { resume_unwind(error.into_panic()) },
                () = pause => {}
            }
        }
        self.shared.known.send_modify(|known| drop(known.remove(&self.key)));
        if let Some(registered) = registered {
            registered.models.into_values().for_each(|model| self.drain(model));
        }
    }

    async fn ask(&self, client: &Client) -> Result<Answer, DiscoverError> {
        let api_key = self.upstream.api_key.as_ref();
        let (models, left_out) = to_register(discover(client, api_key).await?);
        let program = Program::of_owner(models.iter().find_map(|model| model.owned_by.as_deref()));
        Ok(Answer { program, models, left_out, kv: self.kv_sources(client, program).await })
    }

    /// Where the server publishes its KV events, and its block size. What is configured is stronger than what the
    /// server says, because a server may not know how it is reached.
    async fn kv_sources(&self, client: &Client, program: Program) -> Option<KvSources> {
        let upstream = &self.upstream.upstream;
        let listed = KvSources::ask(client, self.upstream.api_key.as_ref(), &self.host, program).await?;
        let named = upstream.url.host().unwrap_or_default();
        let ranks = upstream.kv_events.ranks(listed.ranks);
        let sources = upstream.kv_events.sources(listed.sources, named, &self.host);
        // A page of SGLang has one token by default. For an estimate of its cache, blocks of the default size do.
        let is_exact = !sources.is_empty();
        let said = listed.block_size.filter(|size| is_exact || *size >= DEFAULT_BLOCK_SIZE);
        Some(KvSources { sources, ranks, block_size: upstream.block_size.or(said) })
    }

    /// Registers what is new, and deregisters what is gone.
    async fn update(
        &self,
        client: &Client,
        registered: &mut Option<Registered>,
        answer: Answer,
    ) -> Result<(), &'static str> {
        if answer.models.is_empty() {
            return Err("/v1/models lists no model with a valid id");
        }
        let kv = answer.kv.as_ref().or(registered.as_ref().map(|was| &was.kv));
        let publishes = kv.is_some_and(|kv| !kv.sources.is_empty());
        let names = if publishes { names_of_first(&answer.models) } else { Vec::new() };
        let with_facts = answer.models.into_iter().map(|ListedModel { card, .. }| {
            let (parent, name_of) = (card.parent.clone(), card.name_of.clone());
            let gets_events = publishes && (parent.is_some() || names.contains(&card.id));
            let facts = ModelFacts { parent, name_of, context: card.context, gets_events };
            (card, facts)
        });
        let listed: Vec<(ModelCard, ModelFacts)> = with_facts.collect();
        // Events after a change of the first model would be hashed as blocks of the former one.
        let base = |facts: &ModelFacts| facts.gets_events && facts.parent.is_none();
        let is_same = |was: &Registered| {
            answer.kv.as_ref().is_none_or(|kv| *kv == was.kv)
                && names == was.names
                && listed
                    .iter()
                    .filter(|(_, facts)| base(facts))
                    .all(|(card, facts)| was.models.get(&card.id).is_some_and(|model| model.facts == *facts))
        };
        let mut former = None;
        if registered.as_ref().is_none_or(|was| !is_same(was)) {
            let version = answer.program.version(client, self.upstream.api_key.as_ref());
            let (api, version) = tokio::join!(Api::of(&self.upstream, client), version);
            let api = api?;
            former = registered.take();
            if former.is_some() {
                tracing::info!(upstream = %self.name(), "the server has changed; registering it anew");
            }
            let kv = answer.kv.unwrap_or_default();
            *registered = Some(self.start(client, answer.program, version, kv, names, api));
        }
        let Some(current) = registered else { return Ok(()) };
        for id in gone(&current.models, &listed) {
            tracing::info!(upstream = %self.name(), model = id, "the server no longer has this model");
            current.models.remove(&id).into_iter().for_each(|model| self.drain(model));
        }
        let new = listed.into_iter().filter(|(card, _)| !current.models.contains_key(&card.id));
        let new: Vec<_> = new.map(|(card, facts)| (current.add_logs(&card, &facts), card, facts)).collect();
        // Only now: a publisher replays its events once, and those of models without a log would be lost.
        current.follow();
        for (logs, card, facts) in new {
            self.register(client, current, logs, card, facts).await;
        }
        // After the new ones, so that requests find a server at any time. A worker that has the id of another one
        // replaces it.
        for model in former.into_iter().flat_map(|former: Registered| former.models.into_values()) {
            self.drain(model);
        }
        self.takeover.complete().await;
        for model in current.models.values() {
            model.tokenizer.recheck().await;
        }
        let facts = self.facts(current);
        let (models, is_new) = (facts.models.clone(), !std::mem::replace(&mut current.is_logged, true));
        self.shared.known.send_if_modified(|known| {
            let changed = known.get(&self.key) != Some(&models);
            if changed || is_new {
                self.shared.log_registered(self.name(), facts);
            }
            if changed {
                known.insert(self.key.clone(), models);
            }
            changed
        });
        Ok(())
    }

    /// What the log says of the server.
    fn facts(&self, of: &Registered) -> Facts {
        let remedy = match (&self.upstream.upstream.kv_events, of.program) {
            (KvEvents::Off, _) => "set kv_events = \"auto\" in [[upstreams]]",
            (_, Program::Sglang) => START_SGLANG,
            (_, Program::Vllm | Program::Other) => START_VLLM,
        };
        let cache = match of.kv.sources.len() {
            0 => CacheSource::Estimate { remedy: (!of.is_logged).then_some(remedy) },
            publishers => CacheSource::Events { publishers },
        };
        let contexts = of.models.values().map(|model| model.facts.context);
        Facts {
            program: of.program.name(),
            version: of.version.clone(),
            models: of.models.keys().cloned().collect(),
            context: contexts.filter(|context| *context != UNKNOWN_CONTEXT).max(),
            block_size: of.kv.block_size.unwrap_or(DEFAULT_BLOCK_SIZE).get(),
            cache,
        }
    }

    /// Follows the load reports of a server that has no models yet, and prepares to follow its KV events.
    fn start(
        &self,
        client: &Client,
        program: Program,
        version: Option<String>,
        kv: KvSources,
        names: Vec<String>,
        api: Api,
    ) -> Registered {
        let block_size = kv.block_size.unwrap_or(DEFAULT_BLOCK_SIZE).get();
        let reports = Arc::new(LoadReports::default());
        let mut following = JoinSet::new();
        following.spawn(Arc::clone(&reports).follow(client.clone(), self.upstream.api_key.clone(), block_size));
        let mut caches = vec![self.caches(&self.name(), &kv, block_size)];
        // The blocks of each name have hashes of their own, so each name reads the events by itself.
        for name in names.iter().skip(1) {
            caches.push(self.caches(&format!("{} as {name}", self.name()), &kv, block_size));
        }
        let (models, is_logged) = (BTreeMap::new(), false);
        Registered { program, version, kv, api, models, names, caches, reports, following, is_logged }
    }

    /// The caches of the ranks for one name of the model. `server`: the server in logs.
    fn caches(&self, server: &str, kv: &KvSources, block_size: u32) -> Vec<Cache> {
        let cache = |rank: Option<Rank>, unfollowed: Vec<Source>| {
            let name = rank.map_or_else(|| server.to_owned(), |rank| format!("{server} rank {}", rank.number));
            let (salts, restarted) = (Arc::clone(&self.shared.salts), Arc::clone(&self.may_have_changed));
            let (ranks, metrics) = (unfollowed.len(), self.shared.metrics.clone());
            let events = CacheEvents::new(name, salts, block_size, ranks, restarted, metrics);
            let events = Arc::new(events);
            self.shared.watch_events(&events);
            Cache { rank, events, unfollowed }
        };
        let ranks = (0..).zip(&kv.ranks).zip(&kv.sources);
        let caches = ranks
            .map(|((position, number), source)| cache(Some(Rank { position, number: *number }), vec![source.clone()]));
        let caches: Vec<Cache> = caches.collect();
        if caches.is_empty() { vec![cache(None, kv.sources.clone())] } else { caches }
    }

    /// Registers a model with its event logs, one for each of its caches.
    async fn register(
        &self,
        client: &Client,
        to: &mut Registered,
        logs: Vec<Arc<EventLog>>,
        mut card: ModelCard,
        facts: ModelFacts,
    ) {
        card.block_size = to.kv.block_size.unwrap_or(DEFAULT_BLOCK_SIZE).get() as usize;
        card.has_exact_blocks = facts.gets_events;
        let (id, card) = (card.id.clone(), Arc::new(card));
        let tokenizer = TokenizeClient::new(client.clone(), self.upstream.api_key.clone(), self.name());
        let tokenizer = tokenizer.of_vllm(to.program == Program::Vllm);
        // First, so that the first request finds it.
        let tokenizer = self.shared.tokenizers.add_server(&card, facts.parent.as_deref(), Arc::new(tokenizer)).await;
        let mut workers = Vec::new();
        let mut failure = None;
        for (cache, log) in to.caches_of(&card.id, facts.parent.as_deref()).iter().zip(logs) {
            match self.start_worker(client, to, cache.rank, &card, log).await {
                Ok(worker) => workers.push(worker),
                Err(error) => failure = Some(error),
            }
        }
        let model = RegisteredModel { facts, workers, tokenizer };
        if let Some(error) = failure {
            tracing::error!(upstream = %self.name(), %error, "a model cannot be registered");
            return self.drain(model);
        }
        drop(to.models.insert(id, model));
    }

    /// Registers a model of one cache as a worker.
    async fn start_worker(
        &self,
        client: &Client,
        of: &Registered,
        rank: Option<Rank>,
        card: &Arc<ModelCard>,
        log: Arc<EventLog>,
    ) -> Result<(Worker, ReportedLoad), PlaneError> {
        let settings = UpstreamSettings {
            address: Some(self.name()),
            server: Some(self.worker_id("", None).0),
            api_key: self.upstream.api_key.clone(),
            salts: Arc::clone(&self.shared.salts),
            salted: of.api.salted.clone(),
            has_tenants: self.upstream.has_tenants,
            only: of.api.only,
            rank,
            continues_streams: of.api.continues_streams,
            may_have_changed: Arc::clone(&self.may_have_changed),
        };
        let metrics = self.shared.metrics.clone();
        let engine = Arc::new(UpstreamEngine::new(client.clone(), settings, Arc::clone(card), metrics));
        let (load, reported) = (engine.load(), engine.add_reports(&of.reports));
        let (id, epoch) = (self.worker_id(&card.id, rank), log.epoch());
        let (model, stores) = (Arc::clone(card), Vec::new());
        let instance = Instance { id, epoch, role: Role::Both, model, stores, kv_cache: None };
        let worker = Worker::start(&self.shared.planes, instance, engine as Arc<dyn Engine>, log, load).await?;
        Ok((worker, reported))
    }

    /// Deregisters all models until the server lists them again.
    fn deregister(&self, registered: Registered) {
        self.shared.known.send_modify(|known| drop(known.remove(&self.key)));
        registered.models.into_values().for_each(|model| self.drain(model));
    }

    /// Deregisters a model. Its running requests finish.
    fn drain(&self, RegisteredModel { workers, .. }: RegisteredModel) {
        for (worker, reported) in workers {
            // Only the own requests are waited for.
            drop(reported);
            self.shared.spawn(worker.drain());
        }
    }

    /// The id of a model of the server, or of a rank.
    fn worker_id(&self, model: &str, rank: Option<Rank>) -> WorkerId {
        worker_id(&self.canonical_url, self.key.1, model, rank.map(|rank| rank.position))
    }

    /// The server in logs and for operators.
    fn name(&self) -> String {
        let url = self.upstream.upstream.shown_url();
        match self.key.1 {
            Some(address) => format!("{url} at {address}"),
            None => url,
        }
    }
}

/// The models that are not listed as they were registered.
fn gone(registered: &BTreeMap<String, RegisteredModel>, listed: &[(ModelCard, ModelFacts)]) -> Vec<String> {
    let listed: HashMap<&str, &ModelFacts> = listed.iter().map(|(card, facts)| (card.id.as_str(), facts)).collect();
    let is_gone = |id: &str, model: &RegisteredModel| listed.get(id).is_none_or(|facts| **facts != model.facts);
    registered.iter().filter(|(id, model)| is_gone(id, model)).map(|(id, _)| id.clone()).collect()
}

/// What follows for a server whose models cannot be read.
fn without_answer(is_registered: bool) -> &'static str {
    if is_registered {
        "the models of the upstream cannot be read now; it is used with those that it had while its requests and \
         health checks succeed; asking again"
    } else {
        "upstream cannot be used now; asking again"
    }
}

/// The error of a server that cannot be asked, with what to change if that is known.
fn with_advice(error: &DiscoverError, has_key: bool) -> String {
    match error {
        DiscoverError::Status(StatusCode::UNAUTHORIZED) if has_key => {
            format!("{error}; correct the key in api_key_file of [[upstreams]], and reload it: SIGHUP")
        }
        DiscoverError::Status(StatusCode::UNAUTHORIZED) => format!("{error}; set api_key_file in [[upstreams]]"),
        _ => error.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_registered_server_without_an_answer_is_still_used() {
        assert!(without_answer(false).contains("cannot be used"));
        assert!(without_answer(true).contains("is used with those that it had"));
    }
}
