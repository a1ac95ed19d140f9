//! Continues a stream on another worker when its worker fails, or is stopped, after the first output.
//!
//! The other worker gets the prompt and the tokens that were sent, so the client sees one stream. Relayed streams are
//! bytes: their engine says how another one continues them ([`Output::Rest`]), if it can.

use super::attempt::{MAX_FAILURES, also_unreachable, attempt, place_again, stream};
use crate::admission::Permit;
use crate::fleet::{HealthSignal, Worker, WorkerRun};
use crate::state::Core;
use futures::future::BoxFuture;
use futures::{FutureExt, Stream, StreamExt};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio_util::sync::CancellationToken;
use worker::engine::{Error, Output, OutputStream, RelayRest, Request, RequestAttributes, Sampling, Work};
use worker::plane::Instance;

/// The stream of a request, on one worker after the other.
pub(super) struct Continued {
    core: Arc<Core>,
    /// As the client asked for it; a relayed one without its tokens and its body.
    request: Request,
    /// The worker that has generated the first tokens. Other weights, even of a model of the same name, would continue
    /// with other text.
    first: Arc<Instance>,
    /// Tokens that were sent; none of a relayed stream.
    generated: Vec<u32>,
    /// How a relayed stream that breaks off is continued.
    relay_rest: Option<Box<RelayRest>>,
    /// How often a worker has failed the stream.
    failures: usize,
    /// Workers that were stopped while they generated it.
    stopped: Vec<WorkerRun>,
    /// Held until the last item.
    permit: Option<Arc<Permit>>,
    state: State,
}

enum State {
    /// A worker generates.
    Streaming(Generating, OutputStream),
    /// The router tries other workers.
    Moving(BoxFuture<'static, Result<(Generating, OutputStream), Error>>),
    Ended,
}

/// The worker that generates.
struct Generating {
    run: WorkerRun,
    lease_ended: CancellationToken,
    /// Whether it has sent an output after it had left. So it drains: the worker has left on purpose, and is able to
    /// compute the request. A worker that leaves because it fails sends none.
    drains: bool,
}

impl Generating {
    fn on(worker: &Worker) -> Self {
        Self { run: worker.run(), lease_ended: worker.lease_ended.clone(), drains: false }
    }
}

/// Workers that may fail one stream and are replaced. A request on which every worker fails must end. Workers that are
/// stopped do not count: a rolling restart stops all of them, and says nothing of the request. Each run of a worker
/// counts as stopped once, so the moves are limited by the number of runs.
const MAX_FAILED: usize = 2;

impl Continued {
    /// The stream of a request whose first output came from `worker`.
    pub(super) fn new(
        core: &Arc<Core>,
        mut request: Request,
        permit: Arc<Permit>,
        worker: &Worker,
        stream: OutputStream,
    ) -> Self {
        // The rest of a relayed stream has tokens and a body of its own. A body may have megabytes, and a stream lasts
        // for as long as its client reads.
        if let Work::Relay(http) = &mut request.work {
            request.tokens = Arc::default();
            drop(std::mem::take(&mut Arc::make_mut(http).body));
        }
        let (core, state) = (Arc::clone(core), State::Streaming(Generating::on(worker), stream));
        let (first, permit) = (Arc::clone(&worker.instance), Some(permit));
        let (generated, relay_rest, stopped) = (Vec::new(), None, Vec::new());
        Self { core, request, first, generated, relay_rest, failures: 0, stopped, permit, state }
    }

    /// Whether another worker may continue after this error of a worker; counts it.
    fn may_move(&mut self, error: &Error, from: WorkerRun, drained: bool) -> bool {
        let is_possible = matches!(self.request.work, Work::Generate) || self.relay_rest.is_some();
        if !HealthSignal::of(error).is_failure() || self.permit.is_none() || !is_possible {
            return false;
        }
        if drained && !self.stopped.contains(&from) && !self.core.fleet.snapshot().has(from) {
            self.stopped.push(from);
            return true;
        }
        self.failures += 1;
        self.failures <= MAX_FAILED
    }

    /// Whether another worker than the first one generates.
    fn has_moved(&self) -> bool {
        self.failures > 0 || !self.stopped.is_empty()
    }

    /// The request for the rest of the output.
    fn rest(&mut self) -> Request {
        let request = &self.request;
        let (tokens, generated_tokens, work) = if let Some(rest) = self.relay_rest.take() {
            (rest.tokens, rest.generated_tokens, Work::Relay(Arc::new(rest.http)))
        } else {
            let tokens = [&request.tokens[..], &self.generated].concat();
            (tokens.into(), self.generated.len(), Work::Generate)
        };
        Request {
            tokens,
            generated_tokens,
            // They were sent with the first output.
            sampling: Sampling { prompt_logprobs: None, ..request.sampling.clone() },
            explain: false,
            work,
            // The first token was in time, the tokens are those of the engine, and the other choices have been sent.
            attributes: RequestAttributes { deadline: None, has_estimated_tokens: false, ..request.attributes.clone() },
            group: None,
            ..request.clone()
        }
    }

    fn start_move(&mut self, from: WorkerRun, error: &Error, permit: Arc<Permit>) {
        let request = self.rest();
        let (core, first) = (Arc::clone(&self.core), Arc::clone(&self.first));
        tracing::warn!(
            request_id = %request.id, trace_id = request.attributes.trace.trace_id().map(tracing::field::display),
            worker = %from.worker, generated_tokens = request.generated_tokens, %error,
            "worker failed or stopped after the first output; another worker is asked for the rest"
        );
        let cause = error.clone();
        let moving = async move {
            let moved = continue_elsewhere(core, request, &first, permit, (from, &cause)).await;
            moved.map_err(|_| cause)
        };
        self.state = State::Moving(moving.boxed());
    }
}

/// Sends the rest of a request to a worker other than the one that failed with `cause`, with the same weights as
/// `first`. One with another fingerprint is taken if there is no other: its arithmetic may round differently, so greedy
/// text may continue differently, and that is better for a client than no text.
async fn continue_elsewhere(
    core: Arc<Core>,
    request: Request,
    first: &Instance,
    permit: Arc<Permit>,
    (failed, cause): (WorkerRun, &Error),
) -> Result<(Generating, OutputStream), Error> {
    let (mut tried, mut failures, mut takes_any_layout) = (vec![failed], 0, false);
    let neighbours = |worker: &Arc<Worker>| also_unreachable(&core, worker, cause);
    let mut avoided = core.fleet.snapshot().get(failed.worker).map_or_else(Vec::new, neighbours);
    let outcome = loop {
        // Workers may have joined since the last attempt.
        let mut excluded = tried.clone();
        for worker in core.fleet.snapshot().workers().filter(|worker| *worker.instance.model.id == *request.model) {
            let is_possible = worker.instance.model.identity == first.model.identity
                && (takes_any_layout || worker.instance.can_share_blocks(first));
            if !is_possible && !excluded.contains(&worker.run()) {
                excluded.push(worker.run());
            }
        }
        let placement = match place_again(&core, &request, &excluded, &avoided, None) {
            // It has joined in this moment.
            Ok(placement) if placement.decode.instance.model.identity != first.model.identity => continue,
            Ok(placement) => placement,
            Err(_) if !takes_any_layout => {
                takes_any_layout = true;
                continue;
            }
            Err(error) => break Err(error),
        };
        let generating = Generating::on(&placement.decode);
        let worker = generating.run;
        match attempt(&core, &request, &placement, &excluded).await {
            Ok(first) => break Ok((generating, stream(&core, &request, placement, permit, first, None))),
            Err(error) => {
                let signal = HealthSignal::of(&error);
                placement.decode.record_failure(signal, &error);
                tried.push(worker);
                avoided.extend(also_unreachable(&core, &placement.decode, &error));
                drop(placement);
                core.admission.notify();
                failures += usize::from(core.fleet.snapshot().has(worker));
                if signal == HealthSignal::Neutral || failures >= MAX_FAILURES {
                    break Err(error);
                }
            }
        }
    };
    let label = if outcome.is_ok() { "continued" } else { "failed" };
    core.metrics.stream_moves.with_label_values(&[label]).inc();
    outcome
}

impl Stream for Continued {
    type Item = Result<Output, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        loop {
            match &mut self.state {
                State::Ended => return Poll::Ready(None),
                State::Moving(moving) => match ready!(moving.poll_unpin(context)) {
                    Ok((worker, stream)) => self.state = State::Streaming(worker, stream),
                    Err(error) => {
                        (self.state, self.permit) = (State::Ended, None);
                        return Poll::Ready(Some(Err(error)));
                    }
                },
                State::Streaming(worker, stream) => {
                    let mut item = ready!(stream.poll_next_unpin(context));
                    if let Some(Ok(Output::Rest(rest))) = item {
                        self.relay_rest = Some(rest);
                        continue;
                    }
                    worker.drains |= matches!(item, Some(Ok(_))) && worker.lease_ended.is_cancelled();
                    let (run, drains) = (worker.run, worker.drains);
                    match &mut item {
                        Some(Ok(Output::Tokens(tokens))) => {
                            if self.has_moved() {
                                // The client has the report of the prompt.
                                tokens.prompt = None;
                            }
                            self.generated.extend_from_slice(&tokens.ids);
                            if tokens.finish.is_some() {
                                self.permit = None;
                            }
                        }
                        // The client has the head.
                        Some(Ok(Output::Head(_))) if self.has_moved() => continue,
                        Some(Ok(Output::End(_))) => self.permit = None,
                        Some(Err(error)) => {
                            if self.may_move(error, run, drains)
                                && let Some(permit) = self.permit.clone()
                            {
                                self.start_move(run, error, permit);
                                continue;
                            }
                            self.permit = None;
                        }
                        _ => {}
                    }
                    return Poll::Ready(item);
                }
            }
        }
    }
}
