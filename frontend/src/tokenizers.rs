//! Tokens of the prompts of servers behind this gateway: from a local tokenizer that was checked against the server,
//! else from the server, which is asked once for each prompt.
//!
//! ```text
//!   configuration ─▶ LocalTokenizer ──check──▶ used for the kinds of prompts with the server's tokens
//!   server ────────▶ Tokenize ─────────────▶ asked for all other prompts; its answers are kept
//! ```
//! **A local tokenizer is not used before it was compared with a server.** A server that does not answer is asked again
//! later. If no server of the model has `/tokenize`, the local tokenizer is used without a comparison.
//!
//! Not here: which requests need tokens, and what they are used for (`api`).

mod check;

pub use check::{TokenAgreement, TokenizerComparison, compare_tokenizer};

use crate::metrics::TokenizerMetrics;
use crate::model::{ContentFormat, EncodeJob, LocalTokenizer, PromptKind, PromptText, TokenCache, TooMuchNewText};
use bytes::Bytes;
use parking_lot::{Mutex, RwLock};
use prometheus::Registry;
use serde_json::{Map, Value};
use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{Domain, ModelCard, Tokenize, TokenizeError};

/// Memory for answers of servers: of a thousand prompts of 16 KB.
const ANSWERS_BYTES: usize = 32 << 20;
/// Servers that are asked for one prompt. If two fail, the prompt is not worth more time.
const MAX_ASKED: usize = 2;
/// Time for which a server that failed is not asked: a server that hangs costs each prompt two seconds.
const PAUSE_FAILED: Duration = Duration::from_secs(10);
/// Time for which a server without `/tokenize` is not asked. It may be replaced by one that has it.
const PAUSE_UNSUPPORTED: Duration = Duration::from_mins(1);

/// The tokenizers of relayed models.
pub struct Tokenizers {
    /// By model, as configured.
    local: BTreeMap<String, Arc<LocalTokenizer>>,
    /// By the identity of the model, which is also that of the first model of an alias.
    models: RwLock<HashMap<String, Arc<ModelTokenizers>>>,
    answers: TokenCache,
    next: AtomicUsize,
    metrics: TokenizerMetrics,
}

/// The tokenizers of one model.
#[derive(Clone, Default)]
pub(crate) struct ModelTokenizers {
    /// The name of the model at its servers.
    pub(crate) id: String,
    /// The model that this one is an adapter of, if it has the tokenizer of that.
    parent: Option<String>,
    pub(crate) local: Option<CheckedTokenizer>,
    servers: Vec<Arc<Server>>,
}

impl ModelTokenizers {
    /// Whether all servers of the model make chats of requests of other APIs in the way of vLLM, which is known.
    /// gpt-oss is an exception: vLLM renders its prompts without the chat template.
    pub(crate) fn convert_as_vllm(&self) -> bool {
        let is_gpt_oss = self.id.to_ascii_lowercase().contains("gpt-oss")
            || self.local.as_ref().is_some_and(|local| local.tokenizer.is_of_gpt_oss());
        !is_gpt_oss && self.servers.iter().all(|server| server.tokenizer.converts_as_vllm())
    }
}

/// A server of a model. Dropping it removes the server.
#[must_use]
pub struct RegisteredTokenizer {
    tokenizers: Arc<Tokenizers>,
    /// The name of the model.
    model: String,
    identity: String,
    server: Arc<Server>,
}

impl RegisteredTokenizer {
    /// Compares the local tokenizer with the server again, if the server did not answer before.
    pub async fn recheck(&self) {
        if matches!(*self.server.comparison.lock(), Some(Comparison::Failed)) {
            self.compare().await;
            self.tokenizers.update(&mut self.tokenizers.models.write(), &self.identity);
        }
    }

    /// Compares the model's local tokenizer with the server, if it has one.
    async fn compare(&self) {
        let Some(local) = self.tokenizers.local.get(&self.model) else { return };
        let known = self.tokenizers.models.read().get(&self.identity).cloned();
        let format = known.and_then(|known| Some(known.local.as_ref()?.format));
        let comparison = check::check(&self.model, local, format, &*self.server.tokenizer).await;
        *self.server.comparison.lock() = Some(comparison);
    }
}

impl Drop for RegisteredTokenizer {
    fn drop(&mut self) {
        let mut models = self.tokenizers.models.write();
        let Some(known) = models.get_mut(&self.identity) else { return };
        Arc::make_mut(known).servers.retain(|server| !Arc::ptr_eq(server, &self.server));
        if known.servers.is_empty() {
            models.remove(&self.identity);
            self.tokenizers.metrics.remove_model(&self.model);
        } else {
            self.tokenizers.update(&mut models, &self.identity);
        }
    }
}

/// A local tokenizer, and where its tokens are those of the servers.
#[derive(Clone)]
pub(crate) struct CheckedTokenizer {
    tokenizer: Arc<LocalTokenizer>,
    format: ContentFormat,
    /// Whether it is used, by kind of prompt.
    used: [bool; PromptKind::ALL.len()],
}

/// What the comparison of a local tokenizer with a server has found.
#[derive(Clone)]
enum Comparison {
    /// Where it has the tokens of the server.
    Compared(CheckedTokenizer),
    /// The server has no `/tokenize`.
    Unsupported,
    /// The server did not answer.
    Failed,
}

struct Server {
    tokenizer: Arc<dyn Tokenize>,
    /// `None`: the model has no local tokenizer.
    comparison: Mutex<Option<Comparison>>,
    /// No request is sent to it before this time.
    paused_until: Mutex<Option<Instant>>,
}

impl CheckedTokenizer {
    /// The prompt in these fields, if its tokens are known to be those of the servers.
    pub(crate) fn prompt(&self, fields: Map<String, Value>) -> Option<PromptText> {
        let is_used = self.used[PromptKind::of(&fields) as usize];
        is_used.then(|| self.tokenizer.prompt(fields, self.format)).flatten()
    }

    /// The tokens of a prompt, unless more than `max_new` bytes of its text would have to be tokenized.
    pub(crate) fn tokens(
        &self,
        prompt: &PromptText,
        max_new: usize,
        job: &EncodeJob,
    ) -> Result<Option<Vec<u32>>, TooMuchNewText> {
        self.tokenizer.tokens(prompt, max_new, job)
    }

    /// Used for all prompts, without a comparison.
    fn unchecked(tokenizer: &Arc<LocalTokenizer>) -> Self {
        let (tokenizer, format) = (Arc::clone(tokenizer), ContentFormat::Text);
        Self { tokenizer, format, used: [true; PromptKind::ALL.len()] }
    }

    /// Where a local tokenizer has the tokens of all servers that were compared. `None`: it may not be used.
    fn agreed(tokenizer: &Arc<LocalTokenizer>, servers: &[Arc<Server>]) -> Option<Self> {
        let comparisons: Vec<Comparison> =
            servers.iter().filter_map(|server| server.comparison.lock().clone()).collect();
        let compared = comparisons.iter().filter_map(|comparison| match comparison {
            Comparison::Compared(checked) => Some(checked.clone()),
            Comparison::Unsupported | Comparison::Failed => None,
        });
        let unchecked = || {
            let all_unsupported = comparisons.iter().all(|one| matches!(one, Comparison::Unsupported));
            all_unsupported.then(|| Self::unchecked(tokenizer))
        };
        compared.reduce(|one, other| one.and(&other)).or_else(unchecked)
    }

    /// Used for what both are used for: two servers of a model.
    fn and(self, other: &Self) -> Self {
        let same = |kind| kind == PromptKind::Completion || self.format == other.format;
        let both = |kind| self.used[kind as usize] && other.used[kind as usize] && same(kind);
        Self { used: PromptKind::ALL.map(both), ..self }
    }
}

impl Tokenizers {
    /// Tokenizers for models, by model.
    pub fn new(local: BTreeMap<String, Arc<LocalTokenizer>>, registry: &Registry) -> Result<Self, prometheus::Error> {
        Ok(Self {
            local,
            models: RwLock::default(),
            answers: TokenCache::new(ANSWERS_BYTES),
            next: AtomicUsize::new(0),
            metrics: TokenizerMetrics::new(registry)?,
        })
    }

    /// Adds a server of a model, and checks the model's local tokenizer against it. `parent`: the model that this one
    /// is an adapter of, whose tokenizer it shares.
    pub async fn add_server(
        self: &Arc<Self>,
        card: &ModelCard,
        parent: Option<&str>,
        server: Arc<dyn Tokenize>,
    ) -> RegisteredTokenizer {
        let server =
            Arc::new(Server { tokenizer: server, comparison: Mutex::default(), paused_until: Mutex::default() });
        let (model, identity) = (card.id.clone(), card.identity.clone());
        let registered = RegisteredTokenizer { tokenizers: Arc::clone(self), model, identity, server };
        registered.compare().await;
        let mut models = self.models.write();
        let known = Arc::make_mut(models.entry(card.identity.clone()).or_default());
        known.id.clone_from(&card.id);
        known.parent = parent.filter(|_| !self.local.contains_key(&card.id)).map(str::to_owned);
        known.servers.push(Arc::clone(&registered.server));
        self.update(&mut models, &card.identity);
        drop(models);
        registered
    }

    /// Finds out again where the local tokenizer of a model has the tokens of its servers; also for its adapters.
    fn update(&self, models: &mut HashMap<String, Arc<ModelTokenizers>>, identity: &str) {
        let Some(known) = models.get(identity) else { return };
        let local = if let Some(parent) = &known.parent {
            models.values().find(|model| model.id == *parent).and_then(|model| model.local.clone())
        } else {
            let local = self.local.get(&known.id);
            local.and_then(|local| CheckedTokenizer::agreed(local, &known.servers))
        };
        let (id, has_local) = (known.id.clone(), local.is_some() || self.local.contains_key(&known.id));
        for (of, model) in models.iter_mut() {
            if of != identity && model.parent.as_ref() != Some(&id) {
                continue;
            }
            Arc::make_mut(model).local.clone_from(&local);
            for kind in PromptKind::ALL.into_iter().filter(|_| has_local) {
                let used = local.as_ref().is_some_and(|local| local.used[kind as usize]);
                let gauge = self.metrics.local_tokenizer_used.with_label_values(&[&*model.id, kind.label()]);
                gauge.set(used.into());
            }
        }
    }

    /// The tokenizers of a model, or of the first model of an alias.
    pub(crate) fn of(&self, card: &ModelCard) -> Option<Arc<ModelTokenizers>> {
        self.models.read().get(&card.identity).cloned()
    }

    /// The tokens of a prompt of a cache domain, from one of the model's servers. `body` is that of a request to
    /// `/tokenize`.
    pub(crate) async fn ask(&self, card: &ModelCard, domain: &Domain, body: &Bytes) -> Option<Arc<[u32]>> {
        let known = self.of(card)?;
        let model = known.id.as_str();
        if let Some(tokens) = self.answers.get(domain, body) {
            self.metrics.requests.with_label_values(&[model, "cached"]).inc();
            return Some(tokens);
        }
        let first = self.next.fetch_add(1, Ordering::Relaxed);
        let order = (0..known.servers.len()).map(|at| &known.servers[(first + at) % known.servers.len()]);
        for server in order.filter(|server| !server.is_paused()).take(MAX_ASKED) {
            let answer = server.tokenizer.tokenize(body.clone()).await;
            let outcome = match &answer {
                Ok(_) => "answered",
                Err(TokenizeError::Refused(_)) => "refused",
                Err(TokenizeError::Unsupported | TokenizeError::Failed(_)) => "failed",
            };
            self.metrics.requests.with_label_values(&[model, outcome]).inc();
            match answer {
                Ok(tokens) => {
                    let tokens: Arc<[u32]> = tokens.into();
                    self.answers.insert(domain, body, Arc::clone(&tokens));
                    return Some(tokens);
                }
                // Another server would refuse it too, and the client will learn why.
                Err(TokenizeError::Refused(_)) => return None,
                Err(TokenizeError::Unsupported) => server.pause(PAUSE_UNSUPPORTED),
                Err(error @ TokenizeError::Failed(_)) => {
                    tracing::debug!(model, upstream = server.tokenizer.name(), %error, "a prompt is not tokenized");
                    server.pause(PAUSE_FAILED);
                }
            }
        }
        None
    }
}

impl Server {
    fn is_paused(&self) -> bool {
        self.paused_until.lock().is_some_and(|until| Instant::now() < until)
    }

    fn pause(&self, time: Duration) {
        *self.paused_until.lock() = Some(Instant::now() + time);
    }
}

#[cfg(test)]
mod tests;
