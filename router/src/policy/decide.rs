//! Deciding where a request goes: a survey of everybody in, one decision out. It books nothing and knows no clock.
//!
//! Everybody is weighed in one pass that keeps a few numbers of each; what a cost is made of is worked out again, from what
//! was seen then, for the few workers of whom somebody wants to know.

use super::composition::{Features, Policy};
use super::cost::{Cost, Need, OUTPUT_TOKENS, Prompt};
use super::disaggregate::Split;
use super::inputs::{Fit, Survey, cacheable};
use super::select::{Candidate, Turn, Why, lowest, select};
use super::tuning::{Disaggregation, Tuning};
use super::{cost, disaggregate};
use crate::fleet::{Member, Seat};
use crate::index::WorkerOverlap;
use crate::load::{Amount, Desk};
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::{ModelCard, Request, Work};
use worker::plane::Phase;

/// What is asked, as far as placing goes.
#[derive(Clone, Copy)]
pub(crate) struct Ask<'a> {
    /// Tokens of the prompt.
    pub(crate) tokens: usize,
    /// Output tokens of an answer at most, if the request says.
    pub(crate) max_tokens: Option<u32>,
    /// Answers that are to come.
    pub(crate) answers: u32,
    pub(crate) work: &'a Work,
    /// Whether another worker may prefill: not when the prompt's log-probabilities are wanted, which stay where it is computed.
    pub(crate) may_split: bool,
    /// Seconds that are left for the first token.
    pub(crate) within: Option<f64>,
}

/// A worker, weighed.
pub(crate) struct Row<'a> {
    /// Its place among the seats.
    pub(crate) at: usize,
    pub(crate) seat: &'a Seat,
    /// What the worker holds of the prompt.
    pub(crate) held: WorkerOverlap,
    pub(crate) desk: Desk,
    pub(crate) prompt: Prompt,
    /// All of it on this worker.
    pub(crate) together: Cost,
    /// With prefill elsewhere.
    pub(crate) apart: Option<Cost>,
    pub(crate) split: Split,
}

/// A decision, before it is booked.
pub(crate) struct Decision<'a> {
    scene: Scene<'a>,
    /// Those who could decode.
    pub(crate) candidates: &'a [Candidate],
    pub(crate) chosen: Row<'a>,
    pub(crate) why: Why,
    /// The best prefill worker, whether it is used or not.
    pub(crate) prefill: Option<Row<'a>>,
}

/// What decisions use in turn.
#[derive(Default)]
pub(crate) struct Scratch {
    needs: Vec<Need>,
    helpers: Vec<Candidate>,
    candidates: Vec<Candidate>,
}

/// Everything that weighing looks at.
struct Scene<'a> {
    tuning: &'a Tuning,
    survey: Survey<'a>,
    seats: &'a [Seat],
    /// By way of naming blocks: the prompt, and where its needs begin.
    prompts: Vec<(Prompt, usize)>,
    /// What is left to do for those who hold alike.
    needs: &'a [Need],
    /// Prompts that wait at a worker, on average.
    waiting: f64,
}

impl<'a> Ask<'a> {
    pub(crate) fn of(request: &'a Request, now: Instant) -> Self {
        let Request { tokens, stop, work, terms, .. } = request;
        let within = terms.deadline.map(|deadline| deadline.saturating_duration_since(now).as_secs_f64());
        let may_split = *work == Work::Generate && request.sampling.prompt_logprobs.is_none();
        Self { tokens: tokens.len(), max_tokens: stop.max_tokens, answers: request.choices(), work, may_split, within }
    }

    fn prompt(&self, card: &ModelCard) -> Prompt {
        let (tokens, block_size) = (self.tokens as u64, card.block_size as u64);
        let output = self.max_tokens.map_or(OUTPUT_TOKENS, |max| u64::from(max).min(OUTPUT_TOKENS));
        Prompt { tokens, block_size, blocks: (tokens + output * u64::from(self.answers)).div_ceil(block_size) }
    }
}

/// Decides. The same survey and turn make the same decision.
pub(crate) fn decide<'a>(
    tuning: &'a Tuning,
    ask: Ask<'_>,
    survey: Survey<'a>,
    scratch: &'a mut Scratch,
    turn: Turn,
) -> Option<Decision<'a>> {
    let (Scratch { needs, helpers, candidates }, serving) = (scratch, survey.serving());
    needs.clear();
    let prompt_in = |(way, card): (usize, &Arc<ModelCard>)| {
        let (prompt, from) = (ask.prompt(card), needs.len());
        needs.extend(survey.kinds(way).iter().map(|held| Need::of(prompt, *held)));
        (prompt, from)
    };
    let prompts = serving.ways().iter().enumerate().map(prompt_in).collect();
    let scene = Scene { tuning, seats: serving.seats(), prompts, needs, waiting: survey.prompts_typical(), survey };

    helpers.clear();
    if ask.may_split && tuning.disaggregation != Disaggregation::Never && serving.helps() {
        scene.weigh(|seat, fit| seat.phase == Phase::Prefill && fit == Fit::Well, None, helpers);
    }
    let prefill = select(&tuning.policy, helpers, turn).map(|(at, _)| scene.row(helpers[at].seat as usize, None));

    // A prefill request goes to prefill workers; everything else to those who decode, and to the others only when nobody
    // else is there. In both cases a worker that is avoided still comes before none.
    let suits = |seat: &Seat| (seat.phase != Phase::Prefill) != (*ask.work == Work::Prefill);
    scene.weigh(|seat, fit| suits(seat) && fit == Fit::Well, prefill.as_ref(), candidates);
    if candidates.is_empty() {
        scene.weigh(|seat, fit| suits(seat) && fit != Fit::Out, prefill.as_ref(), candidates);
    }
    if candidates.is_empty() {
        scene.weigh(|_, fit| fit != Fit::Out, prefill.as_ref(), candidates);
    }
    // Whoever is in time comes before those who are not, whatever else speaks for them.
    if let Some(within) = ask.within {
        let in_time = |it: &Candidate| scene.row(it.seat as usize, prefill.as_ref()).cost().first_token() <= within;
        if candidates.iter().any(in_time) {
            candidates.retain(in_time);
        }
    }
    let (at, why) = select(&tuning.policy, candidates, turn)?;
    let chosen = scene.row(candidates[at].seat as usize, prefill.as_ref());
    Some(Decision { scene, candidates, chosen, why, prefill })
}

impl<'a> Decision<'a> {
    /// What the cost of a candidate, or of anybody else, is made of.
    pub(crate) fn row(&self, seat: u32) -> Row<'a> {
        self.scene.row(seat as usize, self.prefill.as_ref())
    }

    /// The lowest cost, in seconds, of those who could decode and were not chosen.
    pub(crate) fn runner_up(&self) -> f64 {
        let others = self.candidates.iter().filter(|other| other.seat as usize != self.chosen.at);
        lowest(others.map(|other| match self.scene.tuning.policy {
            // It scores in units of its own.
            Policy::Composed(_) => self.row(other.seat).cost().total(),
            _ => other.cost,
        }))
    }

    /// Who prefills, when that is somebody else than who decodes.
    pub(crate) fn helper(&self, row: &Row<'_>) -> Option<&Row<'a>> {
        self.prefill.as_ref().filter(|_| row.split == Split::Apart)
    }

    /// Seconds to the first token that no queue can spare. What nobody has measured is no reason to refuse anybody.
    pub(crate) fn takes(&self, row: &Row<'_>) -> f64 {
        let (cost, measured) = (row.cost(), self.helper(row).unwrap_or(row).member().measured());
        if measured { cost.prefill + cost.onboard + cost.handover } else { 0.0 }
    }
}

impl<'a> Scene<'a> {
    /// Weighs those who are wanted.
    fn weigh(&self, wanted: impl Fn(&Seat, Fit) -> bool, prefill: Option<&Row<'_>>, into: &mut Vec<Candidate>) {
        into.clear();
        into.reserve(self.seats.len());
        // Nearly always nobody helps, and what counts is the cost itself.
        let plain = prefill.is_none() && !matches!(self.tuning.policy, Policy::Composed(_));
        for (at, (seat, desk)) in self.seats.iter().zip(self.survey.desks()).enumerate() {
            if !wanted(seat, self.survey.fit(seat, desk)) {
                continue;
            }
            if plain {
                let cost = self.together(seat, self.need(seat), desk);
                into.push(candidate(at, seat, desk, cost.total(), cost.load()));
            } else {
                into.push(self.scored(at, prefill));
            }
        }
    }

    /// One who is weighed together with somebody who prefills, or by what a composition scores.
    #[inline(never)]
    fn scored(&self, at: usize, prefill: Option<&Row<'_>>) -> Candidate {
        let row = self.row(at, prefill);
        let cost = row.cost();
        let total = candidate(at, row.seat, &row.desk, cost.total(), cost.load());
        let Policy::Composed(composition) = &self.tuning.policy else { return total };
        let features = row.features();
        Candidate { cost: composition.score(&features), passes: composition.passes(&features), ..total }
    }

    /// What is left to do of the prompt in a seat.
    #[inline]
    fn need(&self, seat: &Seat) -> &Need {
        let (_, from) = self.prompts[seat.way as usize];
        &self.needs[from + self.survey.kind(seat)]
    }

    /// All of the request in one seat.
    #[expect(clippy::inline_always, reason = "a thousand times per decision, and every figure stays in a register")]
    #[inline(always)]
    fn together(&self, seat: &Seat, need: &Need, desk: &Desk) -> Cost {
        let (weight, pace) = (self.tuning.decode_interference_weight, &desk.pace);
        let mut together = Cost::together(need, pace, weight);
        together.crowd = cost::crowd(together.prefill, pace.prompts, self.waiting + self.tuning.prefix_affinity);
        together.stall = disaggregate::stall(together.prefill, seat.phase, pace.sequences, weight);
        together
    }

    fn row(&self, at: usize, prefill: Option<&Row<'_>>) -> Row<'a> {
        let (seat, desk) = (&self.seats[at], &self.survey.desks()[at]);
        let ((prompt, _), need) = (self.prompts[seat.way as usize], self.need(seat));
        let (held, together) = (need.held, self.together(seat, need, desk));
        let mut row = Row { at, seat, held, desk: *desk, prompt, together, apart: None, split: Split::Together };
        // Only workers that name blocks alike can take over what the other computed.
        if let Some(prefill) = prefill.filter(|prefill| prefill.at != at && prefill.seat.way == seat.way) {
            let apart = Cost::apart(&prefill.together, need, &desk.pace, self.tuning.decode_interference_weight);
            row.split = disaggregate::decide(self.tuning.disaggregation, row.missing(), &row.together, &apart);
            row.apart = Some(apart);
        }
        row
    }
}

/// What the choice looks at.
#[inline]
fn candidate(at: usize, seat: &Seat, desk: &Desk, cost: f64, load: f64) -> Candidate {
    Candidate { seat: at as u32, passes: 0, worker: seat.id.0, cost, load, chosen: desk.chosen }
}

impl<'a> Row<'a> {
    pub(crate) fn member(&self) -> &'a Arc<Member> {
        &self.seat.member
    }

    /// The cost of serving the request here, the better way.
    pub(crate) fn cost(&self) -> Cost {
        match (self.split, self.apart) {
            (Split::Apart, Some(apart)) => apart,
            _ => self.together,
        }
    }

    /// What a composition looks at.
    pub(crate) fn features(&self) -> Features<'_> {
        let Self { prompt, held, desk: Desk { pace, standing, .. }, .. } = self;
        Features { cost: self.cost(), prompt: *prompt, held: *held, pace, standing }
    }

    /// What the request brings here, where it decodes.
    pub(crate) fn amount(&self) -> Amount {
        let here = self.split == Split::Together;
        let prefill_tokens = if here { self.uncached() } else { 0 };
        Amount { prefill_tokens, prompts: u64::from(here), blocks: self.prompt.blocks, sequences: 1 }
    }

    /// What its prompt brings here, when it decodes elsewhere.
    pub(crate) fn detour(&self) -> Amount {
        let blocks = self.prompt.tokens.div_ceil(self.prompt.block_size);
        Amount { prefill_tokens: self.uncached(), prompts: 1, blocks, sequences: 0 }
    }

    /// Prompt tokens that are not cached here.
    pub(crate) fn uncached(&self) -> u64 {
        self.prompt.uncached(self.held)
    }

    /// Prompt tokens that are.
    pub(crate) fn cached(&self) -> u64 {
        u64::from(self.held.total()) * self.prompt.block_size
    }

    /// Full blocks that are not.
    pub(crate) fn missing(&self) -> u64 {
        cacheable(self.prompt.tokens, self.prompt.block_size).saturating_sub(u64::from(self.held.total()))
    }
}

#[cfg(test)]
mod tests;
