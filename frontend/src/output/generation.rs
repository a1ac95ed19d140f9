//! The choices of one request, as one stream of deltas.
//!
//! Of the choices of one prompt, only the first starts immediately. The others start when its first output arrives: by
//! then the prompt's blocks are cached, so the prompt is computed once. A router admits them together.

use super::choice::{ChoiceAssembler, ChoiceDelta, Deltas};
use super::merged::{ChoiceStream, Merged};
use super::meter::Meter;
use crate::error::Error;
use crate::http::RequestContext;
use crate::limits::RunningChoices;
use crate::model::ServedModel;
use crate::params::GenerationParams;
use async_openai::types::chat::{CompletionUsage, PromptTokensDetails};
use futures::future::try_join_all;
use futures::{StreamExt, TryFutureExt};
use std::sync::Arc;
use tokio::time::Instant;
use tracing::{Instrument, Span};
use worker::engine::{Domain, Engine, Request, RequestAttributes, RequestGroup, Work};

/// A parsed request: prompts as tokens, and parameters.
pub(crate) struct GenerationRequest {
    pub(crate) model: Arc<ServedModel>,
    pub(crate) prompts: Vec<Arc<[u32]>>,
    pub(crate) params: GenerationParams,
    /// The tenant; empty if there is none.
    pub(crate) tenant: Arc<str>,
    /// The cache domain of the prompts.
    pub(crate) domain: Domain,
    /// The latest time for the first token.
    pub(crate) deadline: Option<Instant>,
    /// The response carries the router's decision.
    pub(crate) explain: bool,
    /// Counts its choices against the limits of its connection and its tenant.
    pub(crate) running: RunningChoices,
}

/// The choices of a request, as one stream of deltas. Dropping it cancels all of them.
pub(crate) struct Generation {
    running: Merged,
    /// Per prompt, the choices that start at the first output of its first choice.
    deferred: Vec<Vec<ChoiceStream>>,
    /// Choices per prompt.
    n: usize,
    ended: usize,
    usage: Usage,
    meter: Meter,
    _running: RunningChoices,
}

/// Token counts so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Usage {
    prompt: u32,
    cached: u32,
    generated: u32,
}

impl Generation {
    /// Starts the first choice of each prompt. Fails if the engine rejects any of them.
    pub(crate) async fn start(
        engine: &Arc<dyn Engine>,
        request: GenerationRequest,
        context: Arc<RequestContext>,
    ) -> Result<Self, Error> {
        let n = request.params.n as usize;
        let choices = request.prompts.len() * n;
        let prompt_tokens: usize = request.prompts.iter().map(|tokens| tokens.len()).sum();
        let model: Arc<str> = request.model.card.id.as_str().into();
        context.set_prompt(&model, prompt_tokens);

        let groups: Vec<_> = request.prompts.iter().map(|_| (n > 1).then(|| RequestGroup::new(n as u32))).collect();
        let engine_request = |choice: usize| Request {
            group: groups[choice / n].map(|group| group.choice((choice % n) as u32)),
            ..engine_request(&request, &context, &model, choice, choices)
        };
        let assembler = |choice| ChoiceAssembler::new(choice, &request.model.vocabulary, &request.params);
        let firsts = (0..choices).step_by(n).map(|choice| engine.generate(engine_request(choice)));
        let opened = try_join_all(firsts).await?;
        let running = opened
            .into_iter()
            .zip((0..choices).step_by(n))
            .map(|(s, choice)| Deltas::new(s, assembler(choice)).boxed());
        let deferred = (0..choices).step_by(n).map(|first| {
            let rest = (first + 1)..(first + n);
            rest.map(|choice| {
                let (engine, span) = (engine.clone(), context.span.clone());
                deferred_choice(engine, engine_request(choice), assembler(choice), span)
            })
            .collect()
        });
        Ok(Self {
            running: running.collect(),
            deferred: deferred.collect(),
            n,
            ended: 0,
            usage: Usage { prompt: prompt_tokens as u32, ..Usage::default() },
            meter: Meter::new(context, model, choices, prompt_tokens),
            _running: request.running,
        })
    }

    /// The next delta of any choice; `None` when all have ended. An error is the last item.
    pub(crate) async fn next(&mut self) -> Option<Result<ChoiceDelta, Error>> {
        match self.running.next().await? {
            Ok(delta) => {
                self.account(&delta);
                let others = &mut self.deferred[delta.choice / self.n];
                self.running.extend(others.drain(..));
                Some(Ok(delta))
            }
            Err(error) => {
                self.running.clear();
                self.fail();
                Some(Err(error))
            }
        }
    }

    /// Counts the choices that have not ended as failed instead of cancelled.
    pub(crate) fn fail(&mut self) {
        self.meter.mark_failed();
    }

    /// The number of choices.
    pub(crate) fn choices(&self) -> usize {
        self.deferred.len() * self.n
    }

    /// Whether every choice has ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.ended == self.choices()
    }

    /// The usage so far. A prompt counts once, regardless of its number of choices.
    pub(crate) fn usage(&self) -> CompletionUsage {
        let Usage { prompt, cached, generated } = self.usage;
        CompletionUsage {
            prompt_tokens: prompt,
            completion_tokens: generated,
            total_tokens: prompt + generated,
            prompt_tokens_details: Some(PromptTokensDetails { cached_tokens: Some(cached), ..Default::default() }),
            completion_tokens_details: None,
        }
    }

    fn account(&mut self, delta: &ChoiceDelta) {
        self.meter.record(delta);
        if let Some(worker) = delta.prompt.as_ref().and_then(|report| report.worker.as_ref()) {
            self.meter.record_worker(worker);
        }
        self.usage.generated += delta.generated;
        self.ended += usize::from(delta.finish.is_some());
        // The other choices find the whole prompt cached by the first one, which does not count as cached.
        if let Some(report) = delta.prompt.as_ref().filter(|_| delta.choice.is_multiple_of(self.n)) {
            self.usage.cached += report.cached_tokens();
            self.meter.record_cached(report.cached_tokens(), self.usage.cached);
        }
    }
}

/// A choice that starts when it is first polled.
fn deferred_choice(engine: Arc<dyn Engine>, request: Request, assembler: ChoiceAssembler, span: Span) -> ChoiceStream {
    async move { engine.generate(request).await }
        .instrument(span)
        .map_ok(|stream| Deltas::new(stream, assembler))
        .map_err(Error::from)
        .try_flatten_stream()
        .boxed()
}

fn engine_request(
    request: &GenerationRequest,
    context: &RequestContext,
    model: &Arc<str>,
    choice: usize,
    choices: usize,
) -> Request {
    let id = &*context.id;
    let GenerationParams { sampling, stop, n, priority, session, retention, .. } = &request.params;
    let prompt = choice / *n as usize;
    let nth = choice % *n as usize;
    let mut sampling = sampling.clone();
    sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(nth as u64));
    // The choices of a prompt share its log-probabilities; only the first one computes the prompt.
    sampling.prompt_logprobs = sampling.prompt_logprobs.filter(|_| nth == 0);
    let attributes = RequestAttributes {
        tenant: request.tenant.clone(),
        session: session.clone(),
        priority: *priority,
        // The other choices start after the first token, so the deadline does not apply to them.
        deadline: request.deadline.filter(|_| nth == 0),
        has_estimated_tokens: false,
        has_stop_strings: !request.params.stop_strings.is_empty(),
        retention: *retention,
        server: None,
        trace: context.trace(),
        attempts: context.attempts(),
    };
    Request {
        id: if choices == 1 { id.into() } else { format!("{id}/{choice}").into() },
        model: model.clone(),
        tokens: request.prompts[prompt].clone(),
        generated_tokens: 0,
        sampling,
        stop: stop.clone(),
        work: Work::Generate,
        attributes,
        explain: request.explain && choice == 0,
        domain: request.domain.clone(),
        group: None,
    }
}
