//! Names of models that stand for others: the engine in front of the router that replaces them.
//!
//! The model of a relayed request is chosen before its prompt is tokenized ([`Engine::resolve`]), because each model
//! has tokens of its own; that of another request, when it is sent.
//!
//! A name with several deployments is split between them by weight. **A conversation stays with its deployment**,
//! because that has its KV cache: the deployment is chosen by the session, else by the beginning of the conversation,
//! with weighted rendezvous hashing (Schindelhauer and Schomaker, 2005). So a change of one weight moves no more
//! conversations than it must. A deployment without a server is left out, and so is one whose servers are all cordoned
//! or fail, while another is available.
//!
//! **The deployments of a name are all upstreams, or all models of workers**: requests for an upstream are relayed as
//! they are, those for a worker are parsed and tokenized first. The first deployment that is there decides; those of
//! the other kind are left out.
//!
//! **A change of an alias takes effect when a server has one of its models**, as one that is added in the same change
//! has when it is registered. Until then the former definition counts, for [`KEEP_FORMER`] at most.
//!
//! Not here: the name in the body of a request, which the engine of the server replaces.

use crate::config::{Alias, Deployment};
use futures::future::BoxFuture;
use parking_lot::{Mutex, RwLock};
use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use upstream::conversation;
use worker::engine::{Conversation, Engine, Error, ModelCard, OutputStream, Readiness, Request, Work};

/// Maximum number of models of servers that a message about an alias names.
const MAX_NAMED: usize = 5;

/// How long the former definition of an alias counts while no server has a model of the present one: as long as servers
/// that leave serve until others are registered.
const KEEP_FORMER: Duration = super::upstreams::TAKEOVER;

/// The aliases that are in effect.
#[derive(Default)]
pub(crate) struct Aliases(RwLock<Definitions>);

#[derive(Default)]
struct Definitions {
    present: BTreeMap<String, Alias>,
    /// Those before the last change, and when that was.
    former: Option<(BTreeMap<String, Alias>, Instant)>,
}

/// The engine behind the aliases.
pub(super) struct Aliased {
    inner: Arc<dyn Engine>,
    aliases: Arc<Aliases>,
    /// By alias.
    cards: Mutex<HashMap<String, AliasCard>>,
}

/// The card of an alias.
struct AliasCard {
    /// The cards that it was made from.
    of: Vec<Arc<ModelCard>>,
    card: Arc<ModelCard>,
}

/// An alias with deployments whose model no server has.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct IncompleteAlias {
    alias: String,
    /// The models that no server has.
    absent: Vec<String>,
    /// A server has the model of another deployment.
    pub(crate) is_served: bool,
}

/// The aliases that name models which are not served, in the order of their names. A deployment with weight 0 gets no
/// requests, so it needs no server.
pub(crate) fn incomplete(aliases: &BTreeMap<String, Alias>, is_served: impl Fn(&str) -> bool) -> Vec<IncompleteAlias> {
    let of = |(name, alias): (&String, &Alias)| {
        let models = alias.deployments.iter().filter(|one| one.weight > 0).map(|one| one.model.clone());
        let (served, absent): (Vec<_>, Vec<_>) = models.partition(|model| is_served(model));
        let is_served = !served.is_empty();
        (!absent.is_empty()).then(|| IncompleteAlias { alias: name.clone(), absent, is_served })
    };
    aliases.iter().filter_map(of).collect()
}

impl IncompleteAlias {
    /// What to change, where servers have the models of `known`.
    pub(crate) fn fix(&self, known: &[&str]) -> String {
        let Self { alias, absent, .. } = self;
        let listed = known.iter().take(MAX_NAMED).copied().collect::<Vec<_>>().join(", ");
        let more = known.len().checked_sub(MAX_NAMED).filter(|more| *more > 0);
        let more = more.map(|more| format!(" and {more} more")).unwrap_or_default();
        format!(
            "let aliases.{alias:?} name models as /v1/models of the servers lists them ({listed}{more}), or start a \
             server with {}",
            absent.join(" and one with ")
        )
    }
}

impl fmt::Display for IncompleteAlias {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { alias, absent, is_served } = self;
        let consequence = if *is_served { "the other deployments get its requests" } else { "its requests get 404" };
        write!(f, "aliases.{alias:?}: no server has the model {}; {consequence}", absent.join(", nor "))
    }
}

impl Definitions {
    /// The definition of an alias that counts.
    fn get(&self, name: &str, served: impl FnOnce() -> Vec<Arc<ModelCard>>) -> Option<&Alias> {
        let present = self.present.get(name)?;
        let former = self.former.as_ref().filter(|(_, changed)| changed.elapsed() < KEEP_FORMER);
        let Some(former) = former.and_then(|(former, _)| former.get(name)) else { return Some(present) };
        let served = served();
        let is_served = |alias: &Alias| !available(alias, &served).is_empty();
        // An alias without any weight is to get no requests.
        let awaits_server = present.deployments.iter().any(|one| one.weight > 0) && !is_served(present);
        Some(if awaits_server && is_served(former) { former } else { present })
    }
}

impl Aliases {
    /// Replaces all aliases.
    pub(crate) fn set(&self, aliases: BTreeMap<String, Alias>) {
        let mut definitions = self.0.write();
        let former = std::mem::replace(&mut definitions.present, aliases);
        definitions.former = Some((former, Instant::now()));
    }

    /// The aliases that name models which are not among `served`.
    pub(super) fn incomplete(&self, served: &[Arc<ModelCard>]) -> Vec<IncompleteAlias> {
        incomplete(&self.0.read().present, |model| served.iter().any(|card| card.id == model))
    }
}

/// The log of incomplete aliases: one warning for each change of what an alias lacks.
#[derive(Default)]
pub(super) struct IncompleteLog(Vec<IncompleteAlias>);

impl IncompleteLog {
    /// Writes what has changed, and returns it.
    pub(super) fn update(&mut self, current: Vec<IncompleteAlias>) -> Vec<IncompleteAlias> {
        let new: Vec<_> = current.iter().filter(|one| !self.0.contains(one)).cloned().collect();
        for one in &new {
            tracing::warn!(alias = one.alias, models = one.absent.join(", "), "{one}");
        }
        self.0 = current;
        new
    }
}

impl Aliased {
    pub(super) fn new(inner: Arc<dyn Engine>, aliases: Arc<Aliases>) -> Self {
        Self { inner, aliases, cards: Mutex::default() }
    }

    /// The card of an alias, from those of its deployments that are there.
    fn card(&self, name: &str, alias: &Alias, served: &[Arc<ModelCard>]) -> Option<Arc<ModelCard>> {
        let available = available(alias, served);
        let deployed: Vec<Arc<ModelCard>> = available.iter().map(|(_, card)| Arc::clone(card)).collect();
        let first = deployed.first()?;
        let mut cards = self.cards.lock();
        if let Some(AliasCard { of, card }) = cards.get(name)
            && of.len() == deployed.len()
            && of.iter().zip(&deployed).all(|(one, other)| Arc::ptr_eq(one, other))
        {
            return Some(Arc::clone(card));
        }
        let is_left_out = |one: &&Deployment| {
            one.weight > 0 && served.iter().any(|card| card.id == one.model && card.is_relayed != first.is_relayed)
        };
        if let Some(left_out) = alias.deployments.iter().find(is_left_out) {
            tracing::warn!(
                alias = name,
                model = left_out.model,
                first = first.id,
                "a deployment gets no requests: the deployments of an alias are all upstreams or all models of workers"
            );
        }
        let same_tokenizer = deployed.iter().all(|card| card.tokenizer == first.tokenizer);
        let card = Arc::new(ModelCard {
            id: name.to_owned(),
            parent: None,
            name_of: None,
            context: deployed.iter().map(|card| card.context).max().unwrap_or(first.context),
            // Tokens of another model would find none of its blocks.
            tokenizer: first.tokenizer.clone().filter(|_| same_tokenizer),
            has_exact_blocks: deployed.iter().any(|card| card.has_exact_blocks),
            ..ModelCard::clone(first)
        });
        cards.insert(name.to_owned(), AliasCard { of: deployed, card: Arc::clone(&card) });
        Some(card)
    }
}

impl Engine for Aliased {
    fn generate(&self, mut request: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
        let attributes = &request.attributes;
        let conversation = Conversation {
            request: &request.id,
            tenant: &attributes.tenant,
            session: attributes.session.as_deref(),
            served_by: None,
            body: &[],
        };
        // A relayed request names the model that was chosen for it. That may be an alias of others too.
        if !matches!(request.work, Work::Relay(_))
            && let Some(card) = self.resolve(&request.model, &conversation)
        {
            request.model = card.id.as_str().into();
        }
        self.inner.generate(request)
    }

    /// `None` if the name is no alias, or none of its deployments is there.
    fn resolve(&self, name: &str, conversation: &Conversation<'_>) -> Option<Arc<ModelCard>> {
        let aliases = self.aliases.0.read();
        let alias = aliases.get(name, || self.inner.models())?;
        let served = self.inner.models();
        let mut available = available(alias, &served);
        // Another deployment does not have the object that the request names.
        let before = available.iter().position(|(one, _)| conversation.served_by == Some(&one.model));
        if let Some(before) = before {
            available = vec![available[before]];
        } else if available.len() > 1 {
            let accepting: Vec<_> =
                available.iter().copied().filter(|(one, _)| self.inner.is_available(&one.model)).collect();
            if !accepting.is_empty() {
                available = accepting;
            }
        }
        let chosen = match &available[..] {
            [(only, _)] => only,
            all => choose(all.iter().map(|(deployment, _)| *deployment), key(conversation))?,
        };
        available.iter().find(|(one, _)| one.model == chosen.model).map(|(_, card)| Arc::clone(card))
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        let served = self.inner.models();
        let aliases = self.aliases.0.read();
        if aliases.present.is_empty() {
            return served;
        }
        self.cards.lock().retain(|name, _| aliases.present.contains_key(name));
        let names = aliases.present.keys();
        let named = names.filter_map(|name| self.card(name, aliases.get(name, || served.clone())?, &served));
        let mut all: BTreeMap<String, Arc<ModelCard>> = named.map(|card| (card.id.clone(), card)).collect();
        for card in served {
            // An alias with the name of a model takes its place.
            all.entry(card.id.clone()).or_insert(card);
        }
        let mut all: Vec<_> = all.into_values().collect();
        all.sort_by_key(|card| card.parent.is_some());
        all
    }

    /// That of the first deployment which is absent. An alias with a deployment that is there is served.
    fn absence(&self, name: &str) -> Option<String> {
        let aliases = self.aliases.0.read();
        let Some(alias) = aliases.get(name, || self.inner.models()) else { return self.inner.absence(name) };
        alias.deployments.iter().find_map(|deployment| self.inner.absence(&deployment.model))
    }

    fn is_available(&self, name: &str) -> bool {
        let aliases = self.aliases.0.read();
        let Some(alias) = aliases.get(name, || self.inner.models()) else { return self.inner.is_available(name) };
        alias.deployments.iter().any(|deployment| self.inner.is_available(&deployment.model))
    }

    fn readiness(&self) -> Readiness {
        self.inner.readiness()
    }

    fn probe(&self) -> BoxFuture<'_, Result<(), Error>> {
        self.inner.probe()
    }

    fn degraded(&self) -> Vec<String> {
        let incomplete = self.aliases.incomplete(&self.inner.models());
        self.inner.degraded().into_iter().chain(incomplete.iter().map(ToString::to_string)).collect()
    }
}

/// The deployments of an alias that get requests, with their cards.
fn available<'a>(alias: &'a Alias, served: &'a [Arc<ModelCard>]) -> Vec<(&'a Deployment, &'a Arc<ModelCard>)> {
    let card = |one: &'a Deployment| Some((one, served.iter().find(|card| card.id == one.model)?));
    let mut available: Vec<_> =
        alias.deployments.iter().filter(|deployment| deployment.weight > 0).filter_map(card).collect();
    if let Some(is_relayed) = available.first().map(|(_, first)| first.is_relayed) {
        available.retain(|(_, card)| card.is_relayed == is_relayed);
    }
    available
}

/// What the requests of a conversation have in common, and those of others have not.
fn key(conversation: &Conversation<'_>) -> u64 {
    let Conversation { request, tenant, session, served_by: _, body } = conversation;
    let mut hasher = DefaultHasher::new();
    tenant.hash(&mut hasher);
    if let Some(session) = session {
        session.hash(&mut hasher);
    } else if let Some(beginning) = conversation::beginning(body) {
        beginning.hash(&mut hasher);
    } else {
        request.hash(&mut hasher);
    }
    hasher.finish()
}

/// The deployment of a key: each gets the share of all keys that its weight is of all weights.
fn choose<'a>(deployments: impl IntoIterator<Item = &'a Deployment>, key: u64) -> Option<&'a Deployment> {
    let score = |deployment: &Deployment| {
        let mut hasher = DefaultHasher::new();
        (key, &deployment.model).hash(&mut hasher);
        // Uniform in (0, 1).
        let uniform = ((hasher.finish() >> 11) as f64 + 0.5) / (1u64 << 53) as f64;
        -uniform.ln() / f64::from(deployment.weight)
    };
    deployments.into_iter().min_by(|one, other| score(one).total_cmp(&score(other)))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn deployment(model: &str, weight: u32) -> Deployment {
        Deployment { model: model.into(), weight }
    }

    /// Chosen models by key.
    fn chosen(weights: [u32; 3]) -> Vec<String> {
        let all: Vec<Deployment> =
            ["a", "b", "c"].iter().zip(weights).map(|(model, weight)| deployment(model, weight)).collect();
        let usable = || all.iter().filter(|one| one.weight > 0);
        (0..10_000).map(|key| choose(usable(), key).unwrap().model.clone()).collect()
    }

    #[test]
    fn deployments_of_one_kind_are_available() {
        let card =
            |id: &str, is_relayed| Arc::new(ModelCard { vocabulary: 10, is_relayed, ..ModelCard::new(id, 64, 16) });
        let served = [card("worker", false), card("upstream", true), card("other", true)];
        let names = |models: &[(&str, u32)]| {
            let deployments = models.iter().map(|(model, weight)| deployment(model, *weight)).collect();
            let alias = Alias { deployments };
            available(&alias, &served).iter().map(|(one, _)| one.model.clone()).collect::<Vec<_>>()
        };
        assert_eq!(names(&[("upstream", 1), ("worker", 9), ("other", 1)]), ["upstream", "other"]);
        assert_eq!(names(&[("upstream", 0), ("worker", 1), ("other", 1)]), ["worker"]);
        assert_eq!(names(&[("absent", 1), ("worker", 1)]), ["worker"], "one that is absent decides nothing");
    }

    #[test]
    fn keys_are_split_by_weight() {
        let chosen = chosen([6, 3, 1]);
        for (model, share) in [("a", 6000_i32), ("b", 3000), ("c", 1000)] {
            let count = chosen.iter().filter(|one| *one == model).count() as i32;
            assert!((count - share).abs() < 200, "{model}: {count}");
        }
    }

    #[test]
    fn a_changed_weight_moves_no_other_keys() {
        let (before, after) = (chosen([6, 3, 1]), chosen([6, 3, 0]));
        let moved = before.iter().zip(&after).filter(|(before, after)| before != after);
        assert!(moved.clone().count() > 0);
        assert!(moved.clone().all(|(before, _)| before == "c"), "only keys of the drained deployment move");
    }

    #[test]
    fn an_alias_for_a_model_without_a_server_is_named_once() {
        let alias = |models: &[(&str, u32)]| Alias {
            deployments: models.iter().map(|(model, weight)| deployment(model, *weight)).collect(),
        };
        let aliases = Aliases::default();
        aliases.set(
            [
                ("all".to_owned(), alias(&[("a", 1), ("gone", 0)])),
                ("none".to_owned(), alias(&[("x", 1), ("y", 1)])),
                ("some".to_owned(), alias(&[("a", 9), ("x", 1)])),
            ]
            .into(),
        );
        let cards = |ids: &[&str]| ids.iter().map(|id| Arc::new(ModelCard::new(id, 64, 16))).collect::<Vec<_>>();
        let incomplete = aliases.incomplete(&cards(&["a", "b"]));
        let said: Vec<_> = incomplete.iter().map(ToString::to_string).collect();
        assert_eq!(
            said,
            [
                "aliases.\"none\": no server has the model x, nor y; its requests get 404",
                "aliases.\"some\": no server has the model x; the other deployments get its requests",
            ]
        );
        assert_eq!(
            incomplete[1].fix(&["a", "b"]),
            "let aliases.\"some\" name models as /v1/models of the servers lists them (a, b), or start a server with x"
        );
        let mut log = IncompleteLog::default();
        assert_eq!(log.update(incomplete.clone()), incomplete);
        assert_eq!(log.update(incomplete.clone()), [], "nothing has changed");
        let fewer = aliases.incomplete(&cards(&["a", "y"]));
        assert_eq!(log.update(fewer.clone()), fewer[..1], "one lacks another model than before");
        assert_eq!(log.update(aliases.incomplete(&cards(&["a", "x", "y"]))), []);
        assert_eq!(log.update(incomplete.clone()), incomplete, "they lack them again");

        let served = cards(&["a"]);
        let fleet = Arc::new(Fleet { served, available: Mutex::default() });
        let aliased = Aliased::new(fleet as Arc<dyn Engine>, Arc::new(aliases));
        assert_eq!(aliased.degraded(), said);
    }

    /// An engine of relayed models, of which some are available.
    struct Fleet {
        served: Vec<Arc<ModelCard>>,
        available: Mutex<Vec<&'static str>>,
    }

    impl Engine for Fleet {
        fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, Error>> {
            unimplemented!("no request is sent")
        }

        fn models(&self) -> Vec<Arc<ModelCard>> {
            self.served.clone()
        }

        fn is_available(&self, model: &str) -> bool {
            self.available.lock().contains(&model)
        }

        fn readiness(&self) -> Readiness {
            Readiness::Ready
        }
    }

    #[test]
    fn a_deployment_that_is_not_available_is_left_out_while_another_is() {
        let served = ["a", "b"].map(|id| Arc::new(ModelCard::new(id, 64, 16))).to_vec();
        let fleet = Arc::new(Fleet { served, available: Mutex::default() });
        let aliases = Arc::new(Aliases::default());
        let deployments = vec![deployment("a", 9), deployment("b", 1)];
        aliases.set([("chat".to_owned(), Alias { deployments })].into());
        let aliased = Aliased::new(Arc::clone(&fleet) as Arc<dyn Engine>, aliases);
        let count_of_a = |available: &[&'static str]| {
            *fleet.available.lock() = available.to_vec();
            assert_eq!(aliased.is_available("chat"), !available.is_empty());
            let resolved = (0..1000).filter_map(|request| {
                let request = request.to_string();
                let conversation =
                    Conversation { request: &request, tenant: "", session: None, served_by: None, body: &[] };
                aliased.resolve("chat", &conversation)
            });
            resolved.filter(|card| card.id == "a").count()
        };
        assert!((850..950).contains(&count_of_a(&["a", "b"])));
        assert_eq!((count_of_a(&["b"]), count_of_a(&["a"])), (0, 1000));
        assert!((850..950).contains(&count_of_a(&[])), "requests fail with the error of their deployment");
    }

    /// As when an alias and the servers of its model are replaced in one change.
    #[tokio::test(start_paused = true)]
    async fn a_changed_alias_waits_for_a_server_of_its_model() {
        let served = ["a", "b"].map(|id| Arc::new(ModelCard::new(id, 64, 16))).to_vec();
        let fleet = Arc::new(Fleet { served, available: Mutex::new(vec!["a", "b"]) });
        let aliases = Arc::new(Aliases::default());
        let set = |model: &str, weight| {
            aliases.set([("chat".to_owned(), Alias { deployments: vec![deployment(model, weight)] })].into());
        };
        let aliased = Aliased::new(fleet as Arc<dyn Engine>, Arc::clone(&aliases));
        let resolved = || {
            let conversation = Conversation { request: "r", tenant: "", session: None, served_by: None, body: &[] };
            let is_listed = aliased.models().iter().any(|card| card.id == "chat");
            let card = aliased.resolve("chat", &conversation);
            assert_eq!(card.is_some(), is_listed);
            card.map(|card| card.id.clone())
        };
        set("a", 1);
        set("b", 1);
        assert_eq!(resolved().as_deref(), Some("b"), "its model is there");
        set("absent", 1);
        assert_eq!(resolved().as_deref(), Some("b"));
        tokio::time::advance(KEEP_FORMER).await;
        assert_eq!(resolved(), None);
        set("a", 1);
        set("b", 0);
        assert_eq!(resolved(), None, "it is to get no requests");
    }
}
