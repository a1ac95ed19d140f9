//! Placing a request: asks the index and the books, lets policy choose, and books what was chosen.

use super::prediction::Forecast;
use crate::booking::Booking;
use crate::fleet::Member;
use crate::hash::{mix, number};
use crate::load::{Amount, Totals};
use crate::policy::{Ask, Decision, Overlaps, Policy, Row, Survey, Turn, decide, explain};
use crate::state::Core;
use crate::trace::Line;
use kvbm::Level;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{Error, Request, Work};
use worker::plane::WorkerId;

/// Where a request goes, with what it takes booked.
pub(crate) struct Placement {
    /// Who decodes.
    pub(crate) decode: Arc<Member>,
    pub(crate) booking: Booking,
    /// Places of other answers that come with it, until they do.
    pub(crate) others: Vec<Booking>,
    /// Where its output is counted.
    pub(crate) totals: Arc<Totals>,
    /// What is booked there.
    pub(crate) amount: Amount,
    /// Seconds to the first token, as estimated; and those of them that no queue can spare.
    pub(crate) first_token: f64,
    pub(crate) takes: f64,
    /// Who prefills, when that is somebody else.
    pub(crate) prefill: Option<Detour>,
    /// Prompt tokens that `decode` would have to compute itself.
    pub(crate) uncached: u64,
    /// What `decode` should find cached.
    pub(crate) forecast: Forecast,
    /// Why, as one line of JSON, when somebody wants to know.
    pub(crate) explanation: Option<Arc<str>>,
    /// What a record says of it, when there is one.
    pub(crate) line: Option<Line>,
}

/// Prefill on another worker.
pub(crate) struct Detour {
    pub(crate) member: Arc<Member>,
    pub(crate) booking: Booking,
    /// What is booked there.
    pub(crate) amount: Amount,
    /// When to give it up.
    pub(crate) patience: Duration,
    /// Seconds that the transfer should take.
    pub(crate) transfer: f64,
    pub(crate) forecast: Forecast,
}

/// However wrong an estimate.
const SECONDS_MAX: f64 = 600.0;

/// How long a worker may take for what should take so many seconds, before it counts as hung: ten times as long, and ten seconds.
pub(crate) fn patience(seconds: f64) -> Duration {
    Duration::from_secs_f64((seconds * 10.0 + 10.0).clamp(10.0, SECONDS_MAX))
}

/// Decides and books. `tried`: workers that this request was on already.
pub(crate) fn place(core: &Core, request: &Request, tried: &[WorkerId]) -> Result<Placement, Error> {
    let since = std::time::Instant::now();
    let roster = core.fleet.roster();
    let serving = roster.serving(&request.model).ok_or_else(|| Error::UnknownModel(request.model.to_string()))?;
    let (prompt, context) = (request.tokens.len(), serving.context());
    if prompt >= context {
        return Err(Error::PromptTooLong { prompt, context });
    }
    if serving.seats().is_empty() {
        return Err(Error::Unavailable("every worker of the model is cordoned".to_owned()));
    }
    // The long part, hashing and look-up, before the lock that decisions take turns on.
    // A request for the prompt's log-probabilities uses no cached block.
    let cacheable = if request.sampling.prompt_logprobs.is_some() { &[] } else { &*request.tokens };
    let mut overlaps = Overlaps::of(cacheable, &request.domain, serving, &core.index);
    let mut scratch = core.deciding.lock().unwrap_or_else(PoisonError::into_inner);
    overlaps.extend(&core.promises);
    let now = Instant::now();
    let survey = Survey::new(serving, &overlaps, prompt, tried, now);
    let (rules, session) = (core.rules(), request.terms.session.as_deref().map(number));
    let (tuning, draw) = (rules.of(&request.model), mix(rules.settings.seed ^ core.lots ^ core.fleet.choices()));
    let decision = decide(tuning, Ask::of(request, now), survey, &mut scratch, Turn { draw, session })
        .ok_or_else(|| Error::Unavailable("every worker of the model has been tried".to_owned()))?;
    let placement = book(core, &tuning.policy, request, &overlaps, &decision, tried);
    core.metrics.decision_seconds.observe(since.elapsed().as_secs_f64());
    Ok(placement)
}

fn book(
    core: &Core,
    policy: &Policy,
    request: &Request,
    overlaps: &Overlaps,
    decision: &Decision<'_>,
    tried: &[WorkerId],
) -> Placement {
    let row = &decision.chosen;
    let wanted = request.explain || tracing::enabled!(tracing::Level::DEBUG);
    let explanation = wanted.then(|| explain::line(policy, decision, tried));
    if let Some(line) = &explanation {
        tracing::debug!(request_id = %request.id, decision = %line, "request placed");
    }
    let apart = decision.helper(row);
    let uncached = row.uncached();
    let totals = core.traffic.of(&request.model);
    totals.prompt(uncached);
    let (member, others) = (row.member(), 1..request.choices());
    let another =
        Amount { sequences: 1, blocks: row.prompt.output_blocks() / u64::from(request.choices()), ..Amount::default() };
    let whole = row.amount();
    let amount = Amount {
        sequences: u64::from(request.work != Work::Prefill),
        blocks: whole.blocks - another.blocks * others.len() as u64,
        ..whole
    };
    let forecast = |row: &Row<'_>| Forecast::of(&core.promises, decision, row, overlaps);
    let (here, there) = (forecast(row), apart.map(forecast));
    let promise = |row: &Row<'_>| {
        let names = overlaps.names(row.seat.way);
        core.promises.make(row.seat.slot, names, row.prompt.block_size as usize, row.held.run())
    };
    // What is handed over comes late: an event will tell of it, and nobody should queue behind it before.
    let ours = if apart.is_some() { core.promises.make(row.seat.slot, &[], 1, 0) } else { promise(row) };
    let place_of = |_| Booking::new(member, another, core.promises.make(row.seat.slot, &[], 1, 0), &core.herald);
    let line = core.recorder.is_on().then(|| {
        let draw = mix(core.fleet.choices());
        Line::placed(request, row, overlaps.names(row.seat.way), apart.is_some(), draw)
    });
    core.fleet.choose(member);
    core.metrics.requests.with_label_values(&[&member.id().to_string(), policy.name()]).inc();
    Placement {
        decode: member.clone(),
        booking: Booking::new(member, amount, ours, &core.herald),
        totals,
        amount: others.clone().fold(amount, |all, _| all.plus(another)),
        others: others.map(place_of).collect(),
        first_token: row.cost().first_token(),
        takes: decision.takes(row),
        prefill: apart.zip(there).map(|(prefill, forecast)| {
            let helper = prefill.member();
            core.fleet.choose(helper);
            let amount = prefill.detour();
            Detour {
                member: helper.clone(),
                booking: Booking::new(helper, amount, promise(prefill), &core.herald),
                amount,
                patience: patience(prefill.together.first_token()),
                transfer: row.desk.pace.transfer(Level::Peer, row.missing()),
                forecast,
            }
        }),
        uncached,
        forecast: here,
        explanation,
        line,
    }
}
