//! Placing a request: asks the index and the books, lets policy choose, and books what was chosen.

use crate::booking::Booking;
use crate::cost::{self, Cost, Prompt};
use crate::disaggregate::{self, Split};
use crate::explain;
use crate::fleet::{Member, Roster};
use crate::index::{Held, Index, Overlap};
use crate::load::{Amount, Speeds, Standing};
use crate::promise::Promises;
use crate::router::Core;
use crate::select::{Candidate, Why, mix, select};
use crate::settings::{Disaggregation, Settings};
use kvbm::{ChainKey, Level, SequenceHash};
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{Error, ModelCard, Request, Work};
use worker::plane::{Phase, WorkerId};

/// Where a request goes, with what it takes booked.
pub(crate) struct Placement {
    /// Who decodes.
    pub(crate) decode: Arc<Member>,
    pub(crate) booking: Booking,
    /// Who prefills, when that is somebody else.
    pub(crate) prefill: Option<Detour>,
    /// Prompt tokens that `decode` would have to compute itself.
    pub(crate) uncached: u64,
    /// Prompt tokens that `decode` should find cached.
    pub(crate) predicted: u64,
    /// Why, as one line of JSON, when somebody wants to know.
    pub(crate) explanation: Option<Arc<str>>,
}

/// Prefill on another worker.
pub(crate) struct Detour {
    pub(crate) member: Arc<Member>,
    pub(crate) booking: Booking,
    /// When to give it up.
    pub(crate) patience: Duration,
    /// Seconds that the transfer should take.
    pub(crate) transfer: f64,
}

/// What is asked, as far as placing goes.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    pub(crate) model: &'a str,
    /// Tokens of the prompt.
    pub(crate) tokens: usize,
    /// Output tokens at most, if the request says.
    pub(crate) max_tokens: Option<u32>,
    pub(crate) work: &'a Work,
}

/// A worker that was considered.
pub(crate) struct Row<'a> {
    pub(crate) member: &'a Arc<Member>,
    pub(crate) prompt: Prompt,
    pub(crate) held: Held,
    pub(crate) standing: Standing,
    /// All of it on this worker.
    pub(crate) together: Cost,
    /// With prefill elsewhere.
    pub(crate) apart: Option<Cost>,
    pub(crate) split: Split,
}

/// A decision, before it is booked.
pub(crate) struct Decision<'a> {
    /// Those who could decode.
    pub(crate) rows: Vec<Row<'a>>,
    /// Of `rows`, the one that does.
    pub(crate) chosen: usize,
    pub(crate) why: Why,
    /// The best prefill worker, whether it is used or not.
    pub(crate) prefill: Option<Row<'a>>,
}

/// Output tokens that a request is expected to need room for, unless it asks for fewer: most answers are shorter, and blocks
/// are taken as they fill.
const OUTPUT_TOKENS: u64 = 256;
/// A prefill may take ten times as long as estimated, and ten seconds more, before its worker counts as hung.
const PATIENCE: (f64, Duration) = (10.0, Duration::from_secs(10));
/// However wrong the estimate.
const PATIENCE_MAX: Duration = Duration::from_mins(10);

impl<'a> Ask<'a> {
    fn of(request: &'a Request) -> Self {
        let Request { model, tokens, stop, work, .. } = request;
        Self { model, tokens: tokens.len(), max_tokens: stop.max_tokens, work }
    }
}

impl Row<'_> {
    /// The cost of serving the request here, the better way.
    pub(crate) fn cost(&self) -> Cost {
        match (self.split, self.apart) {
            (Split::Apart, Some(apart)) => apart,
            _ => self.together,
        }
    }

    /// What the request brings here when all of it is done here.
    pub(crate) fn amount(&self) -> Amount {
        let prefill_tokens = self.prompt.uncached(self.held);
        Amount { prefill_tokens, prompts: 1, blocks: self.prompt.blocks, sequences: 1 }
    }

    fn candidate(&self) -> Candidate {
        let cost = self.cost();
        Candidate { cost: cost.total(), load: cost.load(), chosen: self.member.chosen() }
    }

    fn missing(&self) -> u64 {
        cacheable(self.prompt.tokens, self.prompt.block_size).saturating_sub(u64::from(self.held.run()))
    }
}

/// Decides and books. `tried`: workers that this request was on already.
pub(crate) fn place(core: &Core, request: &Request, tried: &[WorkerId]) -> Result<Placement, Error> {
    let since = std::time::Instant::now();
    let roster = core.fleet.roster();
    let serving = roster.serving(&request.model);
    if serving.is_empty() {
        return Err(Error::UnknownModel(request.model.to_string()));
    }
    let prompt = request.tokens.len();
    let context = serving.iter().map(|member| member.instance.model.context).max().unwrap_or(0);
    if prompt >= context {
        return Err(Error::PromptTooLong { prompt, context });
    }
    // The long part, hashing and look-up, before the lock that decisions take turns on.
    let mut overlaps = Overlaps::of(core, request, serving);
    let _turn = core.deciding.lock().unwrap_or_else(PoisonError::into_inner);
    overlaps.extend(&core.promises);
    let draw = mix(core.settings.seed ^ core.fleet.choices());
    let decision = decide(&core.settings, Ask::of(request), &roster, &overlaps, tried, draw, Instant::now())
        .ok_or_else(|| Error::Unavailable("no worker is left to try".to_owned()))?;
    let placement = book(core, request, &overlaps, &decision, tried);
    core.metrics.decision_seconds.observe(since.elapsed().as_secs_f64());
    Ok(placement)
}

/// Decides; books nothing, knows no clock.
pub(crate) fn decide<'a>(
    settings: &Settings,
    ask: Ask<'_>,
    roster: &'a Roster,
    overlaps: &Overlaps,
    tried: &[WorkerId],
    draw: u64,
    now: Instant,
) -> Option<Decision<'a>> {
    let mut everyone: Vec<(&Arc<Member>, Standing)> =
        roster.serving(ask.model).iter().map(|member| (member, member.books.standing(now))).collect();
    let typical = Speeds::typical(&everyone.iter().map(|(_, standing)| &standing.speeds));
    let mut waiting = 0;
    for (_, standing) in &mut everyone {
        standing.speeds.fill(&typical);
        waiting += standing.prompts;
    }
    let prompts_typical = waiting as f64 / everyone.len().max(1) as f64;
    let fresh = || {
        let fits = |(member, _): &&(&'a Arc<Member>, Standing)| ask.tokens < member.instance.model.context;
        everyone.iter().filter(fits).filter(|(member, _)| !tried.contains(&member.id()))
    };
    let prefill_only = |(member, _): &&(&'a Arc<Member>, Standing)| member.instance.phase == Phase::Prefill;
    let parts = *ask.work == Work::Generate && settings.disaggregation != Disaggregation::Never;
    let helpers = fresh().filter(prefill_only).filter(|(member, _)| parts && !member.avoided(now));
    let row = |(member, standing): &(&'a Arc<Member>, Standing)| {
        let (member, standing) = (*member, *standing);
        let (prompt, held) = (prompt(ask, member), overlaps.of_member(member));
        let mut together = Cost::together(prompt, held, &standing, settings.decode_weight);
        together.crowd = cost::crowd(together.prefill, standing.prompts, prompts_typical);
        let phase = member.instance.phase;
        together.stall = disaggregate::stall(together.prefill, phase, standing.sequences, settings.decode_weight);
        Row { member, prompt, held, standing, together, apart: None, split: Split::Together }
    };
    let best = |rows: &[Row<'_>]| {
        let candidates: Vec<Candidate> = rows.iter().map(Row::candidate).collect();
        select(settings.policy, &candidates, draw)
    };

    let mut prefills: Vec<Row<'a>> = helpers.map(row).collect();
    let prefill = best(&prefills).map(|(at, _)| prefills.swap_remove(at));

    // A prefill request goes to prefill workers; everything else to those who decode, and to the others only when nobody
    // else is there. In both cases a worker that is avoided still comes before none.
    let suits = |(member, _): &&(&'a Arc<Member>, Standing)| member.decodes() != (*ask.work == Work::Prefill);
    let mut rows: Vec<Row<'a>> = fresh().filter(suits).filter(|(member, _)| !member.avoided(now)).map(row).collect();
    if rows.is_empty() {
        rows = fresh().filter(suits).map(row).collect();
    }
    if rows.is_empty() {
        rows = fresh().map(row).collect();
    }
    if let Some(prefill) = &prefill {
        for row in rows.iter_mut().filter(|row| row.member.id() != prefill.member.id() && row.kin(prefill)) {
            let apart = Cost::apart(&prefill.together, row.prompt, row.held, &row.standing, settings.decode_weight);
            row.split = disaggregate::decide(settings.disaggregation, row.missing(), &row.together, &apart);
            row.apart = Some(apart);
        }
    }
    let (chosen, why) = best(&rows)?;
    Some(Decision { rows, chosen, why, prefill })
}

fn book(core: &Core, request: &Request, overlaps: &Overlaps, decision: &Decision<'_>, tried: &[WorkerId]) -> Placement {
    let row = &decision.rows[decision.chosen];
    let wanted = request.explain || tracing::enabled!(tracing::Level::DEBUG);
    let explanation = wanted.then(|| explain::line(core.settings.policy, decision, tried));
    if let Some(line) = &explanation {
        tracing::debug!(request = %request.id, decision = %line, "placed");
    }
    let apart = decision.prefill.as_ref().filter(|_| row.split == Split::Apart);
    let uncached = row.prompt.uncached(row.held);
    let amount = Amount {
        prefill_tokens: if apart.is_some() { 0 } else { uncached },
        prompts: u64::from(apart.is_none()),
        sequences: u64::from(request.work != Work::Prefill),
        ..row.amount()
    };
    let promise = |member: &Member| core.promises.make(member.slot, overlaps.names_of(member));
    // What is handed over comes late: an event will tell of it, and nobody should queue behind it before.
    let ours = if apart.is_some() { core.promises.make(row.member.slot, &[]) } else { promise(row.member) };
    core.fleet.choose(row.member);
    core.metrics.requests.with_label_values(&[&row.member.id().to_string(), core.settings.policy.name()]).inc();
    Placement {
        decode: row.member.clone(),
        booking: Booking::new(&row.member.books, amount, ours),
        prefill: apart.map(|prefill| {
            core.fleet.choose(prefill.member);
            let tokens = prefill.prompt.uncached(prefill.held);
            let blocks = prefill.prompt.tokens.div_ceil(prefill.prompt.block_size);
            let amount = Amount { prefill_tokens: tokens, prompts: 1, blocks, sequences: 0 };
            let seconds = prefill.together.first_token().min(PATIENCE_MAX.as_secs_f64()) * PATIENCE.0;
            Detour {
                member: prefill.member.clone(),
                booking: Booking::new(&prefill.member.books, amount, promise(prefill.member)),
                patience: (PATIENCE.1 + Duration::from_secs_f64(seconds)).min(PATIENCE_MAX),
                transfer: cost::transfer(&row.standing.speeds, Level::Peer, row.missing()),
            }
        }),
        uncached,
        predicted: u64::from(row.held.run()) * row.prompt.block_size,
        explanation,
    }
}

impl Row<'_> {
    /// Whether two workers name blocks alike, so that one can take over what the other computed.
    fn kin(&self, other: &Row<'_>) -> bool {
        let (a, b) = (&self.member.instance.model, &other.member.instance.model);
        a.identity == b.identity && a.block_size == b.block_size
    }
}

/// One prompt's overlap, for each way in which the workers of a model name blocks: nearly always one.
pub(crate) struct Overlaps(Vec<Way>);

/// One way to name blocks.
struct Way {
    card: Arc<ModelCard>,
    names: Vec<SequenceHash>,
    overlap: Overlap,
}

impl Overlaps {
    fn of(core: &Core, request: &Request, serving: &[Arc<Member>]) -> Self {
        let mut ways: Vec<Way> = Vec::new();
        for card in serving.iter().map(|member| &member.instance.model) {
            if ways.iter().any(|way| way.names_for(card)) {
                continue;
            }
            let full = cacheable(request.tokens.len() as u64, card.block_size as u64) as usize;
            let cached = &request.tokens[..full * card.block_size];
            let names = ChainKey::root(&request.domain, &card.identity, None).names(cached, card.block_size);
            ways.push(Way { card: card.clone(), overlap: core.index.overlap(&names), names });
        }
        Self(ways)
    }

    /// The only way in which blocks are named.
    pub(crate) fn only(card: Arc<ModelCard>, names: Vec<SequenceHash>, index: &Index) -> Self {
        Self(vec![Way { card, overlap: index.overlap(&names), names }])
    }

    /// Adds what requests under way have promised.
    pub(crate) fn extend(&mut self, promises: &Promises) {
        self.0.iter_mut().for_each(|way| promises.extend(&mut way.overlap, &way.names));
    }

    /// The prompt's blocks as a member names them.
    pub(crate) fn names_of(&self, member: &Member) -> &[SequenceHash] {
        self.way(member).map_or(&[], |way| &way.names)
    }

    fn of_member(&self, member: &Member) -> Held {
        self.way(member).map_or_else(Held::default, |way| way.overlap.at(member.slot))
    }

    fn way(&self, member: &Member) -> Option<&Way> {
        self.0.iter().find(|way| way.names_for(&member.instance.model))
    }
}

impl Way {
    fn names_for(&self, card: &ModelCard) -> bool {
        self.card.identity == card.identity && self.card.block_size == card.block_size
    }
}

/// Full blocks of a prompt that a cache can spare: the last token is always computed, for its logits.
fn cacheable(tokens: u64, block_size: u64) -> u64 {
    tokens.saturating_sub(1) / block_size
}

fn prompt(ask: Ask<'_>, member: &Member) -> Prompt {
    let block_size = member.instance.model.block_size as u64;
    let tokens = ask.tokens as u64;
    let output = ask.max_tokens.map_or(OUTPUT_TOKENS, |max| u64::from(max).min(OUTPUT_TOKENS));
    Prompt { tokens, block_size, blocks: (tokens + output).div_ceil(block_size) }
}
