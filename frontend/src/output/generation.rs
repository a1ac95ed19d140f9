//! All choices of one request, running together. Of the choices of one prompt the first starts alone, and the others when its
//! first output arrives: by then the prompt's blocks are cached, so the prompt is computed once. A router admits them together.

use super::choice::{Assembler, Piece, pieces};
use super::meter::Meter;
use crate::error::Error;
use crate::http::Ticket;
use crate::limits::Running;
use crate::model::Model;
use crate::params::Controls;
use async_openai::types::chat::{CompletionUsage, PromptTokensDetails};
use futures::future::try_join_all;
use futures::stream::{BoxStream, SelectAll};
use futures::{StreamExt, TryFutureExt};
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::{Domain, Engine, Request, RequestGroup, Terms, Work};

/// A request that was understood: prompts as tokens, and what to do with each.
pub(crate) struct Order {
    pub(crate) model: Arc<Model>,
    pub(crate) prompts: Vec<Arc<[u32]>>,
    pub(crate) controls: Controls,
    /// For whom it is; empty: nobody in particular.
    pub(crate) tenant: Arc<str>,
    /// Whose cache the prompts belong to.
    pub(crate) domain: Domain,
    /// When the first token is of no more use.
    pub(crate) deadline: Option<Instant>,
    /// The client wants the router's decision explained.
    pub(crate) explain: bool,
    /// Counts its choices among those of its connection and its tenant.
    pub(crate) running: Running,
}

/// The choices of a request, as one stream of pieces. Dropping it cancels them all.
pub(crate) struct Generation {
    running: SelectAll<BoxStream<'static, Result<Piece, Error>>>,
    /// Per prompt, the choices that wait for the first one's output.
    waiting: Vec<Vec<BoxStream<'static, Result<Piece, Error>>>>,
    /// Choices per prompt.
    n: usize,
    ended: usize,
    usage: Usage,
    meter: Meter,
    _running: Running,
}

/// What a request cost so far.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
struct Usage {
    prompt: u32,
    cached: u32,
    generated: u32,
}

impl Generation {
    /// Starts the first choice of each prompt. Fails if the engine refuses any of them.
    pub(crate) async fn start(engine: &Arc<dyn Engine>, order: Order, ticket: Arc<Ticket>) -> Result<Self, Error> {
        let n = order.controls.n as usize;
        let choices = order.prompts.len() * n;
        let prompt_tokens: usize = order.prompts.iter().map(|tokens| tokens.len()).sum();
        let model: Arc<str> = order.model.card.id.as_str().into();
        ticket.accepted(&model, prompt_tokens);

        let groups: Vec<_> = order.prompts.iter().map(|_| (n > 1).then(|| RequestGroup::new(n as u32))).collect();
        let request = |choice: usize| Request {
            group: groups[choice / n].map(|group| group.choice((choice % n) as u32)),
            ..request(&order, &ticket.id, &model, choice, choices)
        };
        let assembler = |choice| Assembler::new(choice, &order.model.vocabulary, &order.controls);
        let firsts = (0..choices).step_by(n).map(|choice| engine.generate(request(choice)));
        let opened = try_join_all(firsts).await?;
        let running = opened.into_iter().zip((0..choices).step_by(n)).map(|(s, choice)| pieces(s, assembler(choice)));
        let waiting = (0..choices).step_by(n).map(|first| {
            let rest = (first + 1)..(first + n);
            rest.map(|choice| later(engine.clone(), request(choice), assembler(choice))).collect()
        });
        Ok(Self {
            running: running.collect(),
            waiting: waiting.collect(),
            n,
            ended: 0,
            usage: Usage { prompt: prompt_tokens as u32, ..Usage::default() },
            meter: Meter::new(ticket, model, choices),
            _running: order.running,
        })
    }

    /// The next piece of any choice; `None` when all have ended. After an error there is nothing more.
    pub(crate) async fn next(&mut self) -> Option<Result<Piece, Error>> {
        match self.running.next().await? {
            Ok(piece) => {
                self.account(&piece);
                let others = &mut self.waiting[piece.choice / self.n];
                self.running.extend(others.drain(..));
                Some(Ok(piece))
            }
            Err(error) => {
                self.running.clear();
                self.fail();
                Some(Err(error))
            }
        }
    }

    /// The choices that have not ended yet count as failed, not as cancelled.
    pub(crate) fn fail(&mut self) {
        self.meter.failed();
    }

    /// How many choices there are.
    pub(crate) fn choices(&self) -> usize {
        self.waiting.len() * self.n
    }

    /// Whether every choice has ended, so that `next` would say so.
    pub(crate) fn is_over(&self) -> bool {
        self.ended == self.choices()
    }

    /// What it cost so far: a prompt counts once, however many choices it has.
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

    fn account(&mut self, piece: &Piece) {
        self.meter.piece(piece);
        if let Some(worker) = piece.prompt.as_ref().and_then(|report| report.worker.as_ref()) {
            self.meter.placed(worker);
        }
        self.usage.generated += piece.generated;
        self.ended += usize::from(piece.finish.is_some());
        // The later choices find the whole prompt cached by the first: that is no saving of the client's.
        if let Some(report) = piece.prompt.as_ref().filter(|_| piece.choice.is_multiple_of(self.n)) {
            self.usage.cached += report.cached_tokens();
            self.meter.cached(report.cached_tokens(), self.usage.cached);
        }
    }
}

/// A choice that starts when it is first polled.
fn later(engine: Arc<dyn Engine>, request: Request, assembler: Assembler) -> BoxStream<'static, Result<Piece, Error>> {
    async move { engine.generate(request).await }
        .map_ok(|stream| pieces(stream, assembler))
        .map_err(Error::from)
        .try_flatten_stream()
        .boxed()
}

fn request(order: &Order, id: &str, model: &Arc<str>, choice: usize, choices: usize) -> Request {
    let Controls { sampling, stop, n, priority, session, retention, .. } = &order.controls;
    let (prompt, nth) = (choice / *n as usize, choice % *n as usize);
    let mut sampling = sampling.clone();
    sampling.seed = sampling.seed.map(|seed| seed.wrapping_add(nth as u64));
    // The first choice's are those of the others too, which find its blocks.
    sampling.prompt_logprobs = sampling.prompt_logprobs.filter(|_| nth == 0);
    let terms = Terms {
        tenant: order.tenant.clone(),
        session: session.clone(),
        priority: *priority,
        // The later choices start when the first one's token is there.
        deadline: order.deadline.filter(|_| nth == 0),
        retention: *retention,
    };
    Request {
        id: if choices == 1 { id.into() } else { format!("{id}/{choice}").into() },
        model: model.clone(),
        tokens: order.prompts[prompt].clone(),
        sampling,
        stop: stop.clone(),
        work: Work::Generate,
        terms,
        explain: order.explain && choice == 0,
        domain: order.domain.clone(),
        group: None,
    }
}
