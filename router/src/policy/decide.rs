//! The routing decision: a view of the fleet in, one decision out. It reserves nothing and reads no clock.
//!
//! A pass over all workers keeps a few numbers of each: the costs, or lower bounds of them, of which only the lowest
//! are computed in full. The terms of a cost are computed again from the same inputs for the few workers that need
//! them.

mod scored_worker;
mod shortlist;

use super::composition::Policy;
use super::copy_ahead::{self, CopyAhead, Place};
use super::cost::{Cost, DecodePricing, RemainingWork};
use super::disaggregate;
use super::disaggregate::ServingMode;
use super::inputs::{Eligibility, FleetView};
use super::prompt::Prompt;
use super::replication::Replication;
use super::select::{Candidate, SelectionContext, SelectionReason, lowest, select};
use super::tuning::{Disaggregation, Tuning};
use crate::fleet::{PromptTokens, Worker, WorkerEntry};
use crate::index::{Overlap, WorkerOverlap};
use crate::load::{Demand, ItlTarget, SharedPrefix, WorkerSnapshot};
pub(crate) use scored_worker::ScoredWorker;
use shortlist::Shortlist;
use std::borrow::Cow;
use std::sync::Arc;
use tokio::time::Instant;
use worker::engine::{ModelCard, Request, Work};
use worker::plane::{Role, WorkerId};

/// The properties of a request that placement depends on.
#[derive(Clone, Copy)]
pub(crate) struct PlacementRequest<'a> {
    /// Length of the prompt in tokens.
    pub(crate) tokens: usize,
    /// Expected output tokens per choice.
    pub(crate) output_tokens: f64,
    /// Mean output tokens of all requests of the model.
    pub(crate) mean_output_tokens: f64,
    /// The prefix of the prompt that many requests share, if there is one.
    pub(crate) shared: Option<SharedPrefix>,
    /// Number of choices (`n`) to generate.
    pub(crate) choices: u32,
    pub(crate) work: &'a Work,
    /// Whether another worker may prefill: not if the request wants the prompt's log-probabilities, which stay on the
    /// worker that computes the prompt.
    pub(crate) may_split: bool,
    /// Seconds left until the first token should be there: by the request's deadline, or by the configured target.
    pub(crate) within: Option<f64>,
}

/// A decision, before its reservation.
pub(crate) struct Decision<'a> {
    context: DecisionContext<'a>,
    /// The workers that could decode, of which those are left out that cost more than all that matter.
    candidates: &'a [Candidate],
    /// Number of workers that could decode.
    pub(crate) candidate_count: usize,
    pub(crate) chosen: ScoredWorker<'a>,
    pub(crate) why: SelectionReason,
    /// The best prefill worker, whether it is used or not.
    pub(crate) prefill: Option<ScoredWorker<'a>>,
}

/// Buffers that decisions reuse.
#[derive(Default)]
pub(crate) struct Scratch {
    remaining: Vec<RemainingWork>,
    prefill_candidates: Vec<Candidate>,
    candidates: Vec<Candidate>,
    shortlist: Shortlist,
}

/// Everything that the scoring of workers reads.
struct DecisionContext<'a> {
    tuning: &'a Tuning,
    fleet: FleetView<'a>,
    entries: &'a [WorkerEntry],
    /// By hash scheme: the prompt, and the index of its first element in `remaining`.
    prompts: Vec<(Prompt, usize)>,
    /// Remaining work for each distinct cached prefix.
    remaining: &'a [RemainingWork],
    pricing: DecodePricing,
    replication: Option<Replication>,
    /// Weight of the term for workers that share a device: less where a further copy of the prefix is worth its time,
    /// so that it spreads over the workers of one device too.
    device_weight: f64,
    /// Workers that were last chosen before this choice do not count what others of their device compute.
    unused_before: u64,
}

/// A worker that gets the same share of the requests as the others is chosen again within as many choices for each of
/// them, but for a probability of e⁻⁸.
const UNUSED_ROUNDS: u64 = 8;

impl<'a> PlacementRequest<'a> {
    /// `until`: when the first token should be there; `output_tokens`: expected of the request; `mean_output_tokens`:
    /// of all requests of the model.
    pub(crate) fn of(
        request: &'a Request,
        until: Option<Instant>,
        output_tokens: f64,
        mean_output_tokens: f64,
        now: Instant,
    ) -> Self {
        let Request { tokens, work, .. } = request;
        let within = until.map(|until| until.saturating_duration_since(now).as_secs_f64());
        let may_split = matches!(work, Work::Generate) && request.sampling.prompt_logprobs.is_none();
        let (tokens, choices) = (tokens.len(), request.choices());
        Self { tokens, output_tokens, mean_output_tokens, shared: None, choices, work, may_split, within }
    }

    fn prompt(&self, card: &ModelCard) -> Prompt {
        let (tokens, block_size) = (self.tokens as u64, card.block_size as u64);
        let output = (self.output_tokens as u64).max(1) * u64::from(self.choices);
        Prompt { tokens, block_size, blocks: (tokens + output).div_ceil(block_size), output_tokens: self.output_tokens }
    }
}

/// Decides. The same view and selection context make the same decision.
pub(crate) fn decide<'a>(
    tuning: &'a Tuning,
    request: PlacementRequest<'_>,
    fleet: FleetView<'a>,
    scratch: &'a mut Scratch,
    selection: SelectionContext,
) -> Option<Decision<'a>> {
    let (Scratch { remaining, prefill_candidates, candidates, shortlist }, pool) = (scratch, fleet.pool());
    remaining.clear();
    let (pricing, shared) = (pricing(tuning, &request, &fleet), request.shared.map_or(0, |shared| shared.blocks));
    let prompt_in = |(scheme, card): (usize, &Arc<ModelCard>)| {
        let (prompt, from) = (request.prompt(card), remaining.len());
        let work = |held: &WorkerOverlap| RemainingWork::of(prompt, *held, pricing.prefill, shared);
        remaining.extend(fleet.distinct_overlaps(scheme).iter().map(work));
        (prompt, from)
    };
    let prompts = pool.schemes().iter().enumerate().map(prompt_in).collect();
    let mut context = DecisionContext {
        tuning,
        entries: pool.entries(),
        prompts,
        remaining,
        pricing,
        replication: None,
        device_weight: 1.0,
        unused_before: fleet.last_choice().saturating_sub(UNUSED_ROUNDS * pool.entries().len() as u64),
        fleet,
    };
    if let Some(shared) = request.shared {
        let replication = context.replication(shared);
        let copy_seconds = context.remaining.first().and_then(|work| work.average_compute_of(shared.blocks));
        context.device_weight -= replication.repaid(copy_seconds);
        context.replication = Some(replication);
    }

    prefill_candidates.clear();
    if request.may_split && tuning.disaggregation != Disaggregation::Never && pool.has_prefill_workers() {
        context.score_all(
            |entry, eligibility| entry.role == Role::Prefill && eligibility == Eligibility::Eligible,
            None,
            prefill_candidates,
        );
    }
    let prefill = select(&tuning.policy, prefill_candidates, selection)
        .map(|(at, _)| context.row(prefill_candidates[at].entry as usize, None));

    let itl = context.itl_target(&request);
    let scored = if prefill.is_none() && itl.is_none() && context.may_shortlist(&request, selection) {
        context.shortlist(shortlist, candidates)
    } else {
        None
    };
    let candidate_count = scored.unwrap_or_else(|| {
        context.score_candidates(matches!(request.work, Work::Prefill), prefill.as_ref(), candidates);
        context.retain_targets(&request, itl, prefill.as_ref(), candidates);
        candidates.len()
    });
    let (at, why) = select(&tuning.policy, candidates, selection)?;
    let chosen = context.row(candidates[at].entry as usize, prefill.as_ref());
    Some(Decision { context, candidates, candidate_count, chosen, why, prefill })
}

impl<'a> Decision<'a> {
    /// Whether the tokens of the prompt are known.
    pub(crate) fn prompt_tokens(&self) -> PromptTokens {
        self.context.fleet.prompt_tokens()
    }

    /// All workers (data-parallel ranks) of the chosen worker's server, if that server, and not the router, chooses
    /// which of them computes the request. Otherwise empty.
    pub(crate) fn chosen_by_server(&self, request: &Request) -> Vec<Arc<Worker>> {
        let Some(server) = self.chosen.worker().engine.choosing_server(request) else { return Vec::new() };
        let workers = self.context.entries.iter().map(|entry| &entry.worker);
        workers.filter(|worker| worker.engine.choosing_server(request) == Some(server)).cloned().collect()
    }

    /// A worker with the terms of its cost.
    pub(crate) fn row(&self, entry: u32) -> ScoredWorker<'a> {
        self.context.row(entry as usize, self.prefill.as_ref())
    }

    /// The shared prefix of the prompt and its copies, if there is one.
    pub(crate) fn replication(&self) -> Option<&Replication> {
        self.context.replication.as_ref()
    }

    /// Number of workers that have the shared prefix in their own memory.
    pub(crate) fn copies_in_memory(&self) -> usize {
        let Some(Replication { shared, .. }) = self.replication() else { return 0 };
        let held = self.context.entries.iter().map(|entry| self.context.work(entry).held);
        held.filter(|held| held.in_memory() >= shared.blocks).count()
    }

    /// The further copy of the shared prefix that is worth making now, if one is. `stored`: blocks of the prefix that
    /// workers have now; `unavailable`: workers that get no copy now; `receivers`: workers that get one already.
    pub(crate) fn copy_ahead(
        &self,
        stored: &Overlap,
        unavailable: &[WorkerId],
        receivers: &[WorkerId],
    ) -> Option<CopyAhead<'a>> {
        let (context, shared) = (&self.context, self.replication()?.shared);
        let (entries, fleet): (&'a [WorkerEntry], _) = (context.entries, &context.fleet);
        let (prompt, _) = context.prompts.first()?;
        if fleet.prompt_tokens() == PromptTokens::Estimated {
            return None;
        }
        let (mut workers, mut places) = (Vec::new(), Vec::new());
        for (entry, snapshot) in entries.iter().zip(fleet.snapshots()) {
            // The demand was counted under the first hash scheme. A worker that decodes needs the blocks of a prompt in
            // its own memory in any case. One that only prefills does not: it leaves the prompt to one that has them.
            if entry.scheme != 0 || entry.role == Role::Prefill {
                continue;
            }
            // What a worker without accurate events has is a guess, and a server shares its memory with no other.
            let is_known = entry.remark(PromptTokens::Known).is_none() && !entry.worker.instance.model.is_relayed;
            let has_all = stored.at(entry.slot(PromptTokens::Known)).in_memory() >= shared.blocks;
            let is_free = snapshot.estimate.prompts == 0 && !unavailable.contains(&entry.id);
            workers.push(&entry.worker);
            places.push(Place {
                estimate: &snapshot.estimate,
                held: context.work(entry).held,
                is_on_the_way: receivers.contains(&entry.id),
                may_receive: is_known && is_free && fleet.eligibility(entry, snapshot) == Eligibility::Eligible,
                may_send: is_known && !fleet.is_passed_over(snapshot) && has_all,
            });
        }
        let per_sequence = context.pricing.per_sequence(prompt);
        let planned = copy_ahead::plan(shared, prompt.block_size, per_sequence, &places)?;
        let (to, from) = (workers[planned.to], planned.from.map(|at| workers[at]));
        if from.is_some_and(|from| !from.instance.can_share_blocks(&to.instance)) {
            return None;
        }
        Some(CopyAhead { to, from, blocks: shared.blocks, seconds: planned.seconds, saved: planned.saved })
    }

    /// All workers that could decode, in the order of the pool's entries. Computed again if some were left out.
    pub(crate) fn all_candidates(&self) -> Cow<'a, [Candidate]> {
        if self.candidates.len() == self.candidate_count && self.candidates.is_sorted_by_key(|it| it.nth) {
            return Cow::Borrowed(self.candidates);
        }
        let mut all = Vec::new();
        // A decision that leaves some out has neither a prefill worker nor targets.
        self.context.score_candidates(false, None, &mut all);
        Cow::Owned(all)
    }

    /// The lowest cost in seconds among the candidates that were not chosen.
    pub(crate) fn runner_up(&self) -> f64 {
        let others = self.candidates.iter().filter(|other| other.entry as usize != self.chosen.at);
        lowest(others.map(|other| match self.context.tuning.policy {
            // A composed score has its own unit.
            Policy::Composed(_) => self.row(other.entry).cost().total(),
            _ => other.cost,
        }))
    }

    /// The prefill worker, if the request is served disaggregated.
    pub(crate) fn prefill_worker(&self, row: &ScoredWorker<'_>) -> Option<&ScoredWorker<'a>> {
        self.prefill.as_ref().filter(|_| row.serving_mode == ServingMode::Disaggregated)
    }

    /// Seconds to the first token with empty queues; 0 if the speed was not measured, because that is no reason to
    /// reject.
    pub(crate) fn min_service_seconds(&self, row: &ScoredWorker<'_>) -> f64 {
        let (cost, measured) = (row.cost(), self.prefill_worker(row).unwrap_or(row).worker().has_measured_prefill());
        if measured { cost.prefill + cost.onboard + cost.kv_transfer } else { 0.0 }
    }
}

impl<'a> DecisionContext<'a> {
    /// Scores the workers among which one is selected.
    ///
    /// A prefill request goes to prefill workers; every other request goes to decoding workers, and to prefill workers
    /// only when no other is left. In both cases an ejected worker is better than none, and of these one that answers
    /// its health checks, or is only overloaded, is better than one that does not answer.
    fn score_candidates(
        &self,
        is_prefill_request: bool,
        prefill: Option<&ScoredWorker<'_>>,
        into: &mut Vec<Candidate>,
    ) {
        let suits = |entry: &WorkerEntry| (entry.role != Role::Prefill) != is_prefill_request;
        for wanted in [Eligibility::Eligible, Eligibility::TemporarilyEjected, Eligibility::Ejected] {
            self.score_all(|entry, eligibility| suits(entry) && eligibility == wanted, prefill, into);
            if !into.is_empty() {
                return;
            }
        }
        self.score_all(|_, eligibility| eligibility != Eligibility::Excluded, prefill, into);
    }

    /// Leaves the workers that meet the targets of the request, if there are any.
    fn retain_targets(
        &self,
        request: &PlacementRequest<'_>,
        itl: Option<ItlTarget>,
        prefill: Option<&ScoredWorker<'_>>,
        candidates: &mut Vec<Candidate>,
    ) {
        // Workers that meet the deadline or target are preferred to all others.
        if let Some(within) = request.within {
            let in_time = |it: &Candidate| self.row(it.entry as usize, prefill).cost().first_token() <= within;
            if candidates.iter().any(in_time) {
                candidates.retain(in_time);
            }
        }
        // Of these, workers that keep the target of the time between tokens.
        if let Some(itl) = itl {
            let keeps = |it: &Candidate| !self.misses_itl(itl, it);
            if candidates.iter().any(keeps) {
                candidates.retain(keeps);
            }
        }
        for (nth, candidate) in candidates.iter_mut().enumerate() {
            candidate.nth = nth as u32;
        }
    }

    /// Scores the workers that the filter accepts.
    fn score_all(
        &self,
        wanted: impl Fn(&WorkerEntry, Eligibility) -> bool,
        prefill: Option<&ScoredWorker<'_>>,
        into: &mut Vec<Candidate>,
    ) {
        into.clear();
        into.reserve(self.entries.len());
        // The common case: no prefill worker, and the score is the cost itself.
        let plain = prefill.is_none() && !matches!(self.tuning.policy, Policy::Composed(_));
        for (at, (entry, snapshot)) in self.entries.iter().zip(self.fleet.snapshots()).enumerate() {
            if !wanted(entry, self.fleet.eligibility(entry, snapshot)) {
                continue;
            }
            let candidate = if plain {
                let cost = self.aggregated(at, entry, self.work(entry), snapshot);
                candidate(at, entry, snapshot, &cost)
            } else {
                self.scored(at, prefill)
            };
            into.push(Candidate { nth: into.len() as u32, ..candidate });
        }
    }

    /// The copies of a shared prefix.
    fn replication(&self, shared: SharedPrefix) -> Replication {
        // Of most prefixes no worker has all blocks.
        let is_held = self.remaining.iter().any(|work| work.shared <= 0.0);
        let entries = if is_held { self.entries } else { &[] };
        let workers = entries.iter().zip(self.fleet.snapshots());
        let holders = workers.filter(|(entry, _)| self.work(entry).shared <= 0.0);
        let per_sequence = self.prompts.first().map_or(0.0, |(prompt, _)| self.pricing.per_sequence(prompt));
        let holders = holders.map(|(_, snapshot)| &snapshot.estimate);
        Replication::of(shared, holders, self.fleet.sequences(), per_sequence)
    }

    /// Scores one worker together with a prefill worker, or by a composition.
    #[inline(never)]
    fn scored(&self, at: usize, prefill: Option<&ScoredWorker<'_>>) -> Candidate {
        let row = self.row(at, prefill);
        let cost = row.cost();
        let total = candidate(at, row.entry, &row.snapshot, &cost);
        let Policy::Composed(composition) = &self.tuning.policy else { return total };
        let features = row.features();
        Candidate { cost: composition.score(&features), passes: composition.passes(&features), ..total }
    }

    /// Remaining work for the prompt on one worker.
    #[inline]
    fn work(&self, entry: &WorkerEntry) -> &RemainingWork {
        &self.remaining[self.work_at(entry)]
    }

    /// Index of it in `remaining`.
    #[inline]
    fn work_at(&self, entry: &WorkerEntry) -> usize {
        let (_, from) = self.prompts[entry.scheme as usize];
        from + self.fleet.overlap_index(entry)
    }

    /// The target of the time between tokens, if it is configured and the request has such a time.
    fn itl_target(&self, request: &PlacementRequest<'_>) -> Option<ItlTarget> {
        let decodes = !matches!(request.work, Work::Prefill) && request.output_tokens > 1.0;
        self.fleet.pool().itl_target(self.tuning.itl.filter(|_| decodes)?)
    }

    /// Whether a worker would miss the target with the request.
    fn misses_itl(&self, itl: ItlTarget, candidate: &Candidate) -> bool {
        let at = candidate.entry as usize;
        let ((prompt, _), stats) = (self.prompts[self.entries[at].scheme as usize], &self.fleet.snapshots()[at].stats);
        let context_tokens = prompt.tokens as f64 + prompt.output_tokens / 2.0;
        itl.is_missed(stats, stats.sequences_max.into(), Demand::default(), Some(context_tokens))
    }

    /// Cost of the whole request on one worker.
    #[expect(clippy::inline_always, reason = "a thousand times per decision, and every figure stays in a register")]
    #[inline(always)]
    fn aggregated(&self, at: usize, entry: &WorkerEntry, work: &RemainingWork, snapshot: &WorkerSnapshot) -> Cost {
        let (pricing, estimate) = (&self.pricing, &snapshot.estimate);
        let mut aggregated = Cost::aggregated(work, estimate, pricing);
        let others_delay = pricing.others_delay + aggregated.full_probability;
        aggregated.decode_stall =
            disaggregate::decode_stall(aggregated.compute, entry.role, estimate.sequences, others_delay);
        if let Some(replication) = self.replication.as_ref().filter(|replication| replication.may_copy()) {
            aggregated.replication = replication.saving(work, estimate, &aggregated);
        }
        // Where prompts are computed on workers of their own, the roles say which worker computes what. And no worker
        // is left without requests: its memory has a use too.
        if entry.role == Role::Both
            && snapshot.chosen >= self.unused_before
            && let Some(others) = self.fleet.others_on_device(at)
        {
            aggregated.share_device(&others, self.device_weight);
        }
        aggregated
    }

    fn row(&self, at: usize, prefill: Option<&ScoredWorker<'_>>) -> ScoredWorker<'a> {
        let (entry, snapshot) = (&self.entries[at], &self.fleet.snapshots()[at]);
        let ((prompt, _), work) = (self.prompts[entry.scheme as usize], self.work(entry));
        let (held, aggregated) = (work.held, self.aggregated(at, entry, work, snapshot));
        let mut row = ScoredWorker {
            at,
            entry,
            held,
            snapshot: *snapshot,
            prompt,
            aggregated,
            disaggregated: None,
            serving_mode: ServingMode::Aggregated,
            is_prefill_measured: self.pricing.prefill.is_some(),
        };
        if let Some(prefill) = prefill.filter(|prefill| prefill.at != at && prefill.entry.can_transfer_blocks(entry)) {
            let disaggregated = Cost::disaggregated(&prefill.aggregated, work, &snapshot.estimate, &self.pricing);
            row.serving_mode =
                disaggregate::decide(self.tuning.disaggregation, row.missing(), &row.aggregated, &disaggregated);
            row.disaggregated = Some(disaggregated);
        }
        row
    }
}

/// How the time between tokens counts in the costs of a request.
fn pricing(tuning: &Tuning, request: &PlacementRequest<'_>, fleet: &FleetView<'_>) -> DecodePricing {
    let decode_tokens = tuning.decode_tokens;
    // A single token has no time between tokens.
    let own_steps = decode_tokens * (1.0 - request.output_tokens.max(1.0).recip());
    let others_delay = decode_tokens / request.mean_output_tokens.max(1.0);
    let (step, prefill, arrivals) = (fleet.step_time(), fleet.prefill_time(), fleet.arrivals());
    let least_lost_share = fleet.least_lost_share();
    DecodePricing { step, prefill, own_steps, others_delay, arrivals, least_lost_share }
}

/// The fields that the selection reads.
#[inline]
fn candidate(at: usize, entry: &WorkerEntry, snapshot: &WorkerSnapshot, cost: &Cost) -> Candidate {
    Candidate {
        entry: at as u32,
        nth: 0,
        passes: 0,
        worker: entry.id.0,
        cost: cost.total(),
        load: cost.load(),
        device_compute: cost.device_compute,
        chosen: snapshot.chosen,
    }
}

#[cfg(test)]
mod tests;
