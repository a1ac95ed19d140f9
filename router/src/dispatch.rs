//! Serving a request: let in and place, send, and until its first output is there, try again elsewhere.
//!
//! ```text
//!   admit ─▶ prefill leg ── Handoff ──▶ decode leg ── first output ──▶ the client's stream
//!     ▲          └── failed: the decode worker does it all │
//!     └──────────────── refused, died, left ───────────────┘
//! ```
//! Everything that a request holds (bookings, legs) lives in the future or the stream that the client holds, so dropping
//! either at any point cancels both legs and frees what was booked.
//!
//! Owns the path of a request: admission at the door, placement with its prediction of cache hits, sending, retries. Not
//! here: whose turn it is, which worker is best, and the background tasks.

pub(crate) mod admit;
mod place;
mod prediction;

pub(crate) use place::place;

use crate::admission::Permit;
use crate::booking::Booking;
use crate::fleet::{Member, Verdict};
use crate::state::Core;
use crate::trace::Life;
use admit::admit;
use futures::{StreamExt, future, stream};
use place::{Detour, Placement, patience};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, timeout, timeout_at};
use worker::engine::{Error, Handoff, Output, OutputStream, Request, Tokens, Work};
use worker::plane::WorkerId;

/// Workers tried for one request before its client hears of it: two may die at once, a third time is the request's fault.
const TRIES: usize = 3;
/// A worker that leaves may be finishing what it has: this long for the first output of a request that it was sent.
const FAREWELL: Duration = Duration::from_secs(2);
/// How often it is asked whether a worker hangs that has taken too long.
const LOOK_AGAIN: Duration = Duration::from_secs(1);

/// A request that has its first output.
struct Started {
    first: Output,
    rest: OutputStream,
}

/// Serves a request. Past its deadline its first output is worth nothing to anybody, and is not waited for.
pub(crate) async fn serve(core: &Arc<Core>, request: Request) -> Result<OutputStream, Error> {
    match request.terms.deadline {
        Some(deadline) => timeout_at(deadline, seek(core, request)).await.unwrap_or(Err(Error::Late)),
        None => seek(core, request).await,
    }
}

async fn seek(core: &Arc<Core>, request: Request) -> Result<OutputStream, Error> {
    let mut life = core.recorder.begin(Instant::now());
    let (first, permit) = admit(core, &request).await?;
    let mut next = Some(first);
    let mut tried = Vec::new();
    let mut last = None;
    while tried.len() < TRIES {
        // Who was let in once does not wait again.
        let placement = match next.take().map_or_else(|| place(core, &request, &tried), Ok) {
            Ok(placement) => placement,
            // What the last worker said is more to the point than that there is no other.
            Err(error) => return Err(last.unwrap_or(error)),
        };
        tried.push(placement.decode.id());
        if let Some(life) = &mut life {
            life.sent();
        }
        match attempt(core, &request, &placement, &tried).await {
            Ok(started) => {
                return Ok(stream(core, placement, permit, started, life));
            }
            Err(error) => {
                let verdict = Verdict::of(&error);
                placement.decode.note(verdict);
                drop(placement);
                core.admission.notify();
                if verdict == Verdict::Neutral {
                    return Err(error);
                }
                let reason = if matches!(verdict, Verdict::Busy(_)) { "busy" } else { "error" };
                core.metrics.retries.with_label_values(&[reason]).inc();
                tracing::info!(
                    request_id = %request.id, worker = ?tried.last(), %error,
                    "request failed; trying another worker"
                );
                last = Some(more_telling(last, error));
            }
        }
    }
    Err(last.unwrap_or_else(|| Error::Unavailable("no worker served the request".to_owned())))
}

/// Back-pressure tells a client what to do; it outlives a fault that came after it.
fn more_telling(last: Option<Error>, error: Error) -> Error {
    match (last, error) {
        (Some(Error::Overloaded { retry_after: a }), Error::Overloaded { retry_after: b }) => {
            Error::Overloaded { retry_after: a.min(b) }
        }
        (Some(busy @ Error::Overloaded { .. }), _) => busy,
        (_, error) => error,
    }
}

/// Gets the first output, over one leg or two.
async fn attempt(core: &Core, request: &Request, placement: &Placement, tried: &[WorkerId]) -> Result<Started, Error> {
    let Placement { decode, booking, others, prefill, uncached, first_token, .. } = placement;
    others.iter().for_each(Booking::going);
    let or_hung = hung(core, decode, &request.model, tried, *first_token);
    let mut request = request.clone();
    let Some(detour) = prefill else {
        return start(decode, booking, request, or_hung).await;
    };
    booking.going();
    let outcome = core.metrics.disaggregated.clone();
    match prefill_leg(core, detour, &request).await {
        Ok((handoff, blocks)) => {
            request.work = Work::Resume(handoff);
            let since = Instant::now();
            // Who waits there waits, however its prompt came to be: that is no time of a hand-over.
            let free = decode.is_free(since);
            let started = start(decode, booking, request, or_hung).await?;
            // The decode worker has what it needs: the prefill worker may let its blocks go.
            drop(blocks);
            if free {
                decode.books.resumed((since.elapsed().as_secs_f64() - detour.transfer).max(0.0));
            }
            outcome.with_label_values(&["remote_prefill"]).inc();
            Ok(started)
        }
        Err(error) => {
            tracing::info!(
                request_id = %request.id, worker = %detour.member.id(), %error,
                "remote prefill failed; the decode worker computes the prompt"
            );
            detour.member.note(Verdict::of(&error));
            core.admission.notify();
            outcome.with_label_values(&["local_fallback"]).inc();
            booking.amend(*uncached);
            start(decode, booking, request, or_hung).await
        }
    }
}

/// Has the prompt's blocks computed. They stay for as long as the stream is kept.
async fn prefill_leg(core: &Core, detour: &Detour, request: &Request) -> Result<(Handoff, OutputStream), Error> {
    let request = Request { work: Work::Prefill, explain: false, ..request.clone() };
    let never = future::pending();
    let started = timeout(detour.patience, start(&detour.member, &detour.booking, request, never)).await;
    let Started { first, rest } = started.map_err(|_| {
        detour.member.note(Verdict::Hung);
        Error::Failed(format!("no hand-over within {:?}", detour.patience))
    })??;
    // It is computed; what remains on the worker is blocks, not work.
    detour.booking.started();
    core.admission.notify();
    match first {
        Output::Handoff(handoff) => {
            detour.member.well();
            detour.forecast.computed(&core.index, &detour.member, None);
            Ok((handoff, rest))
        }
        Output::Tokens(_) | Output::Frame(..) => Err(Error::Failed("a prefill returned output tokens".to_owned())),
    }
}

/// Resolves when a worker has been silent for much longer than was expected, to everybody, while another could serve the
/// request. Where everybody is slow, nobody is better, and the request stays where it waits.
async fn hung(core: &Core, member: &Member, model: &str, tried: &[WorkerId], expected: f64) {
    let since = Instant::now();
    tokio::time::sleep(patience(expected)).await;
    loop {
        let (now, roster) = (Instant::now(), core.fleet.roster());
        let better = |other: &&Arc<Member>| {
            // Of what was sent to it nothing waits.
            let free = || other.books.standing(now).prompts == 0;
            *other.instance.model.id == *model
                && !tried.contains(&other.id())
                && !roster.is_cordoned(other.id())
                && (!other.avoided(now) || member.avoided(now))
                && (other.heard_since(since) || free())
        };
        if !member.heard_since(since) && roster.members().find(better).is_some() {
            return member.note(Verdict::Hung);
        }
        tokio::time::sleep(LOOK_AGAIN).await;
    }
}

/// Sends a request to a worker and waits for the first output, or for the worker to be gone or `hung`.
async fn start(
    member: &Member,
    booking: &Booking,
    request: Request,
    hung: impl Future<Output = ()>,
) -> Result<Started, Error> {
    let output = async {
        booking.sent();
        let mut rest = member.engine.generate(request).await?;
        match rest.next().await {
            Some(first) => Ok(Started { first: first?, rest }),
            None => Err(Error::Failed("the stream ended before the first output".to_owned())),
        }
    };
    let gone = async {
        member.gone.cancelled().await;
        tokio::time::sleep(FAREWELL).await;
    };
    tokio::select! {
        biased;
        started = output => started,
        () = gone => Err(Error::Unavailable(format!("worker {} left", member.id()))),
        () = hung => Err(Error::Failed(format!("worker {} sent no output in time", member.id()))),
    }
}

/// The client's stream: the first output with the explanation, then the rest; the booking inside it.
fn stream(
    core: &Core,
    placement: Placement,
    permit: Arc<Permit>,
    Started { mut first, rest }: Started,
    life: Option<Life>,
) -> OutputStream {
    let Placement { decode, booking, others, totals, explanation, forecast, prefill, line, .. } = placement;
    // Who has its place here comes now.
    drop((prefill, others));
    booking.started();
    core.admission.notify();
    decode.well();
    let report = match &first {
        Output::Tokens(tokens) => tokens.prompt.as_ref(),
        Output::Frame(..) | Output::Handoff(_) => None,
    };
    let mut life = life.zip(line).map(|(mut life, line)| {
        life.started(line, report);
        life
    });
    let found = report.map(|report| u64::from(report.cached_tokens()));
    forecast.computed(&core.index, &decode, found);
    if let Some(found) = found {
        forecast.compare(&core.metrics, &decode, found);
    }
    let mut before = None;
    match &mut first {
        Output::Tokens(tokens) => {
            tokens.explain = explanation;
            if let Some(report) = &mut tokens.prompt {
                report.worker = Some(decode.id().to_string().into());
            }
        }
        // An engine's own bytes have no place for it: it goes ahead, with no tokens.
        Output::Frame(..) | Output::Handoff(_) => {
            before = explanation.map(|explain| Tokens { explain: Some(explain), ..Tokens::default() });
        }
    }
    let ends = |item: &Result<Output, Error>| match item {
        Ok(Output::Tokens(tokens)) => tokens.finish.is_some(),
        Ok(Output::Frame(..) | Output::Handoff(_)) => false,
        Err(_) => true,
    };
    let mut held = Some((booking, permit));
    let items = stream::iter(before.map(|tokens| Ok(Output::Tokens(tokens))));
    let items = items.chain(stream::once(future::ready(Ok(first)))).chain(rest);
    items
        .inspect(move |item| {
            match item {
                Ok(output) => {
                    decode.hear();
                    let tokens = match output {
                        Output::Tokens(tokens) => tokens.ids.len(),
                        Output::Frame(_, ids) => ids.as_ref().map_or(0, Vec::len),
                        Output::Handoff(_) => 0,
                    };
                    totals.output(tokens);
                    if let Some(life) = &mut life {
                        life.output(tokens);
                    }
                }
                Err(error) => decode.note(Verdict::of(error)),
            }
            // Freed at the end, though a client may hold the stream longer.
            if ends(item) {
                drop((held.take(), life.take()));
            }
        })
        .boxed()
}
