//! Selection among scored candidates. Pure.
//!
//! Costs within 5 % (2 to 25 ms) are ties, broken by least recently chosen. So a single shared first block does not pin
//! all traffic to its holder, and new workers get their share at once.

use super::composition::{Composition, Pick, Policy};
use crate::hash::splitmix64;
use std::cmp::Ordering;

/// The fields of a worker that the selection reads.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Candidate {
    /// Index of the worker's entry in the pool.
    pub(crate) entry: u32,
    /// Number of candidates before it.
    pub(crate) nth: u32,
    /// A bit for each filter of a composition that the worker passes.
    pub(crate) passes: u32,
    /// Id of the worker.
    pub(crate) worker: u64,
    /// Cost in seconds, or the score of a composition.
    pub(crate) cost: f64,
    /// The part of the cost in seconds that does not depend on the cache.
    pub(crate) load: f64,
    /// Seconds of computation for which other workers of the device wait.
    pub(crate) device_compute: f64,
    /// Number of the choice that last chose the worker; 0 means never.
    pub(crate) chosen: u64,
}

/// Why a candidate was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum SelectionReason {
    /// It was the only candidate.
    Only,
    /// It has the lowest cost, by more than a tie.
    LowestCost,
    /// It was least recently chosen among several of about the same cost; on one device, among those that compute about
    /// the least.
    Tie,
    /// Round robin.
    RoundRobin,
    /// It has the least load.
    LeastLoaded,
    /// Random choice.
    Random,
    /// It is the first worker of the session.
    Session,
    /// It is a later worker of the session, because the first is overloaded.
    Overflow,
}

/// Inputs of the selection beside the candidates. Equal inputs give equal choices.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct SelectionContext {
    /// A random number.
    pub(crate) random: u64,
    /// Hash of the session's name.
    pub(crate) session: Option<u64>,
}

impl SelectionReason {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::LowestCost => "lowest_cost",
            Self::Tie => "tie",
            Self::RoundRobin => "round_robin",
            Self::LeastLoaded => "least_loaded",
            Self::Random => "random",
            Self::Session => "session",
            Self::Overflow => "overflow",
        }
    }
}

/// Costs within a twentieth of the lowest are ties: estimates are not more accurate than that. The mean of the last 500
/// output lengths, of which the terms of decoding are multiples, has a standard error of 4.5 % …
const TIE_FRACTION: f64 = 0.05;
/// … but at least 2 ms, and at most 25 ms: a long queue must not hide a long cached prefix. Where an engine is in its
/// present step is unknown. The standard deviation of that is the step divided by the root of 12: 2 ms for a decode
/// step of 7 ms, 23 ms for a full step of prompt tokens of 80 ms. These are the steps of an 8B model on an H100.
const TIE_SECONDS: (f64, f64) = (0.002, 0.025);

/// A session stays while its worker has at most a quarter more load than the mean (bounded loads) …
const MAX_LOAD_FACTOR: f64 = 1.25;
/// … plus a quarter of a second, about the cost of moving a session.
const MAX_LOAD_SLACK_SECONDS: f64 = 0.25;

/// Chooses a candidate. Returns its index and the reason.
pub(crate) fn select(
    policy: &Policy,
    candidates: &[Candidate],
    context: SelectionContext,
) -> Option<(usize, SelectionReason)> {
    if candidates.len() < 2 {
        return (!candidates.is_empty()).then_some((0, SelectionReason::Only));
    }
    let SelectionContext { random, session } = context;
    let all = 0..candidates.len();
    Some(match (policy, session) {
        (Policy::Session, Some(session)) => rendezvous_hash(candidates, session),
        (Policy::Kv | Policy::Session, _) => least_computation(candidates, all, random),
        (Policy::LeastLoaded, _) => {
            least(candidates, all, random, |candidate| candidate.load, SelectionReason::LeastLoaded)
        }
        (Policy::PowerOfTwo, _) => {
            power_of_two(candidates, all, random, |candidate| candidate.load, SelectionReason::LeastLoaded)
        }
        (Policy::RoundRobin, _) => (least_recently_chosen(candidates, all, random), SelectionReason::RoundRobin),
        (Policy::Random, _) => (index(random, candidates.len()), SelectionReason::Random),
        (Policy::Composed(Composition { filter, pick, .. }), _) => {
            let required = required(candidates, filter.len());
            let among = all.filter(|at| candidates[*at].passes & required == required);
            let score = |candidate: &Candidate| candidate.cost;
            match pick {
                Pick::Best => least(candidates, among, random, score, SelectionReason::LowestCost),
                Pick::PowerOfTwo => power_of_two(candidates, among, random, score, SelectionReason::LowestCost),
                Pick::Weighted => (weighted(candidates, among, random), SelectionReason::Random),
            }
        }
    })
}

/// The candidate with the least value, with this reason; or the least recently chosen of several with about the same.
fn least(
    candidates: &[Candidate],
    among: impl Iterator<Item = usize> + Clone,
    random: u64,
    of: impl Fn(&Candidate) -> f64 + Clone,
    reason: SelectionReason,
) -> (usize, SelectionReason) {
    let tied = tied(candidates, among, of);
    let reason = if tied.clone().nth(1).is_some() { SelectionReason::Tie } else { reason };
    (least_recently_chosen(candidates, tied, random), reason)
}

/// The candidate with the lowest cost. Of several with about the same, those for which other workers of their device
/// wait about the least; of these the least recently chosen.
///
/// To spread requests over the workers of one device gains little, and what a placement computes is certain, while the
/// queues are estimates.
fn least_computation(
    candidates: &[Candidate],
    among: impl Iterator<Item = usize> + Clone,
    random: u64,
) -> (usize, SelectionReason) {
    let least_cost = tied(candidates, among, |candidate| candidate.cost);
    let least_compute = tied(candidates, least_cost.clone(), |candidate| candidate.device_compute);
    let reason = if least_cost.clone().nth(1).is_some() { SelectionReason::Tie } else { SelectionReason::LowestCost };
    (least_recently_chosen(candidates, least_compute, random), reason)
}

/// The candidates whose value ties with the least one.
fn tied<'a>(
    candidates: &'a [Candidate],
    among: impl Iterator<Item = usize> + Clone + 'a,
    of: impl Fn(&Candidate) -> f64 + Clone + 'a,
) -> impl Iterator<Item = usize> + Clone + 'a {
    let limit = tie_limit(lowest(among.clone().map(|at| of(&candidates[at]))));
    among.filter(move |at| of(&candidates[*at]) <= limit)
}

/// The highest cost that ties with the lowest one.
pub(super) fn tie_limit(lowest: f64) -> f64 {
    lowest + (lowest * TIE_FRACTION).clamp(TIE_SECONDS.0, TIE_SECONDS.1)
}

/// The lesser of two random candidates.
fn power_of_two(
    candidates: &[Candidate],
    among: impl Iterator<Item = usize> + Clone,
    random: u64,
    of: impl Fn(&Candidate) -> f64 + Clone,
    reason: SelectionReason,
) -> (usize, SelectionReason) {
    let n = among.clone().count();
    let first = index(random, n);
    let second = (first + 1 + index(splitmix64(random), n.saturating_sub(1).max(1))) % n.max(1);
    let two = among.enumerate().filter(move |(nth, _)| *nth == first || *nth == second).map(|(_, at)| at);
    least(candidates, two, random, of, reason)
}

/// A random candidate, whose probability falls by a factor of e for each mean distance from the best (softmax with the
/// mean distance as temperature).
fn weighted(candidates: &[Candidate], among: impl Iterator<Item = usize> + Clone, random: u64) -> usize {
    let cost = |at: usize| candidates[at].cost;
    let best = lowest(among.clone().map(cost));
    let (sum, n) = among.clone().fold((0.0, 0.0), |(sum, n), at| (sum + cost(at) - best, n + 1.0));
    let mean = f64::max(sum / n, f64::MIN_POSITIVE);
    let chance = |at: usize| f64::exp(-(cost(at) - best) / mean);
    let all: f64 = among.clone().map(chance).sum();
    let mut left = (random >> 11) as f64 / (1u64 << 53) as f64 * all;
    let chosen = |at: &usize| {
        left -= chance(*at);
        left < 0.0
    };
    // Rounding may leave no candidate; then the last one is chosen.
    among.clone().find(chosen).or(among.last()).unwrap_or(0)
}

/// The session's worker by rendezvous hashing (Thaler and Ravishankar, 1998): the highest weight, which changes only
/// when that worker joins or leaves. A worker above its load bound is skipped for the next one (bounded loads;
/// Mirrokni, Thorup and Zadimoghaddam, 2018).
fn rendezvous_hash(candidates: &[Candidate], session: u64) -> (usize, SelectionReason) {
    let mean = candidates.iter().map(|candidate| candidate.load).sum::<f64>() / candidates.len() as f64;
    let bound = mean * MAX_LOAD_FACTOR + MAX_LOAD_SLACK_SECONDS;
    let weight = |at: &usize| splitmix64(session ^ splitmix64(candidates[*at].worker));
    let first = (0..candidates.len()).max_by_key(weight).unwrap_or(0);
    // The least loaded is never above the mean.
    let within = (0..candidates.len()).filter(|at| candidates[*at].load <= bound).max_by_key(weight).unwrap_or(first);
    (within, if within == first { SelectionReason::Session } else { SelectionReason::Overflow })
}

/// The filters that apply: each in order, unless no candidate would pass.
fn required(candidates: &[Candidate], filters: usize) -> u32 {
    (0..filters).fold(0, |required, filter| {
        let with = required | 1 << filter;
        if candidates.iter().any(|candidate| candidate.passes & with == with) { with } else { required }
    })
}

fn least_recently_chosen(candidates: &[Candidate], among: impl Iterator<Item = usize>, random: u64) -> usize {
    // Workers that were never chosen come in random order, so that routers that start together differ.
    let chosen = |at: usize| candidates[at].chosen;
    let tie_break = |at: usize| splitmix64(random ^ u64::from(candidates[at].nth));
    among
        .reduce(|a, b| match chosen(a).cmp(&chosen(b)).then_with(|| tie_break(b).cmp(&tie_break(a))) {
            Ordering::Greater => b,
            _ => a,
        })
        .unwrap_or(0)
}

/// The lowest number. Written as a comparison, which the CPU predicts: `f64::min` is a dependency chain over a thousand
/// values.
pub(crate) fn lowest(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(f64::INFINITY, |lowest, number| if number < lowest { number } else { lowest })
}

/// An index below `n` (multiply-shift), uniform enough for any fleet.
fn index(random: u64, n: usize) -> usize {
    ((u128::from(random) * n as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::hash_str;

    fn at(cost: f64, load: f64) -> Candidate {
        Candidate { entry: 0, nth: 0, passes: 0, worker: 0, cost, load, device_compute: 0.0, chosen: 0 }
    }

    fn context(random: u64) -> SelectionContext {
        SelectionContext { random, session: None }
    }

    /// Chooses `n` times and counts the choices of each candidate.
    fn spread(policy: &Policy, mut candidates: Vec<Candidate>, n: u64) -> Vec<u64> {
        candidates.iter_mut().zip(0..).for_each(|(candidate, nth)| candidate.nth = nth);
        let mut counts = vec![0; candidates.len()];
        for nth in 1..=n {
            let (chosen, _) = select(policy, &candidates, context(splitmix64(nth))).unwrap();
            candidates[chosen].chosen = nth;
            counts[chosen] += 1;
        }
        counts
    }

    #[test]
    fn a_tiny_overlap_does_not_pin() {
        // One worker holds block 0 of a prompt that takes 100 ms; no worker holds more.
        assert_eq!(spread(&Policy::Kv, vec![at(0.098, 0.0), at(0.1, 0.0), at(0.1, 0.0)], 30), [10, 10, 10]);
    }

    #[test]
    fn of_about_equal_workers_of_a_device_the_one_that_computes_least_is_chosen() {
        let computes = |device_compute, cost| Candidate { device_compute, ..at(cost, 0.0) };
        // Their costs are ties. The second one computes 50 ms less, the third one as much as it within 2 ms.
        let tied = [computes(0.08, 0.5), computes(0.03, 0.51), computes(0.0315, 0.515)];
        assert_eq!(spread(&Policy::Kv, tied.to_vec(), 30), [0, 15, 15]);
        assert_eq!(select(&Policy::Kv, &tied, context(7)).map(|(_, reason)| reason), Some(SelectionReason::Tie));
        // A cost that is lower by more than a tie decides.
        let lower = [computes(0.08, 0.45), computes(0.03, 0.5)];
        assert_eq!(select(&Policy::Kv, &lower, context(7)), Some((0, SelectionReason::LowestCost)));
    }

    #[test]
    fn a_long_overlap_wins_until_its_queue_is_longer_than_a_miss() {
        assert_eq!(
            select(&Policy::Kv, &[at(0.01, 0.0), at(0.5, 0.0)], context(7)),
            Some((0, SelectionReason::LowestCost))
        );
        assert_eq!(
            select(&Policy::Kv, &[at(0.01 + 0.6, 0.6), at(0.5, 0.0)], context(7)),
            Some((1, SelectionReason::LowestCost))
        );
    }

    #[test]
    fn round_robin_takes_turns_and_the_newcomer_first() {
        assert_eq!(spread(&Policy::RoundRobin, vec![at(9.0, 9.0), at(0.0, 0.0)], 10), [5, 5]);
        let new = [Candidate { chosen: 8, ..at(0.0, 0.0) }, at(0.0, 0.0), Candidate { chosen: 9, ..at(0.0, 0.0) }];
        assert_eq!(select(&Policy::RoundRobin, &new, context(0)), Some((1, SelectionReason::RoundRobin)));
    }

    #[test]
    fn load_policies_look_at_load_and_random_ones_at_nothing() {
        let uneven = vec![at(0.0, 9.0), at(5.0, 1.0), at(5.0, 5.0)];
        assert_eq!(spread(&Policy::LeastLoaded, uneven.clone(), 10), [0, 10, 0]);
        let two = spread(&Policy::PowerOfTwo, uneven.clone(), 300);
        assert_eq!(two[0], 0, "the most loaded of three loses every pair");
        assert!(two[1] > two[2] && two[2] > 50, "{two:?}");
        let random = spread(&Policy::Random, uneven, 300);
        assert!(random.iter().all(|count| (60..140).contains(count)), "{random:?}");
    }

    #[test]
    fn zero_or_one_candidate_needs_no_policy() {
        for policy in Policy::ALL {
            assert_eq!(select(&policy, &[], context(1)), None);
            assert_eq!(select(&policy, &[at(1.0, 1.0)], context(1)), Some((0, SelectionReason::Only)));
        }
    }

    fn composed(filters: usize, pick: Pick) -> Policy {
        let filter = vec![crate::policy::composition::Filter::Fits; filters];
        Policy::Composed(Composition { filter, score: vec![], pick })
    }

    #[test]
    fn a_session_keeps_its_worker_until_it_is_overloaded() {
        let fleet = |n: u64| (0..n).map(|worker| Candidate { worker, ..at(1.0, 0.1) }).collect::<Vec<_>>();
        let homes = |candidates: &[Candidate]| -> Vec<u64> {
            let home = |session: u64| {
                let session = hash_str(&format!("session {session}"));
                let (at, why) =
                    select(&Policy::Session, candidates, SelectionContext { random: session, session: Some(session) })
                        .unwrap();
                assert_eq!(why, SelectionReason::Session);
                candidates[at].worker
            };
            (0..1000).map(home).collect()
        };
        let (ten, eleven) = (homes(&fleet(10)), homes(&fleet(11)));
        let moved = ten.iter().zip(&eleven).filter(|(a, b)| a != b);
        assert!(moved.clone().all(|(_, to)| *to == 10), "only to the newcomer");
        assert!((50..140).contains(&moved.count()), "and its share of them");
        assert!((0..10).all(|worker| (60..150).contains(&ten.iter().filter(|home| **home == worker).count())));

        let mut busy = fleet(10);
        let session = Some(hash_str("session 0"));
        let home = busy.iter().position(|candidate| candidate.worker == ten[0]).unwrap();
        busy[home].load = 0.3;
        let choice = |candidates: &[Candidate]| {
            select(&Policy::Session, candidates, SelectionContext { random: 1, session }).unwrap()
        };
        assert_eq!(choice(&busy), (home, SelectionReason::Session), "a little more to do than the others");
        busy[home].load = 3.0;
        let (next, why) = choice(&busy);
        assert!(next != home && why == SelectionReason::Overflow);
        assert_eq!(choice(&busy).0, next, "always the same next one, so that one copy more is enough");
        assert_eq!(
            select(&Policy::Session, &[at(1.0, 0.0), at(0.5, 0.0)], context(3)),
            Some((1, SelectionReason::LowestCost)),
            "no session"
        );
    }

    #[test]
    fn a_filter_that_no_candidate_passes_is_skipped() {
        let candidate = |passes, cost| Candidate { passes, ..at(cost, 0.0) };
        let candidates = [candidate(0b000, 0.1), candidate(0b101, 0.5), candidate(0b001, 0.2)];
        // The first filter leaves two candidates, the second none, the third one.
        assert_eq!(select(&composed(3, Pick::Best), &candidates, context(1)), Some((1, SelectionReason::LowestCost)));
        assert_eq!(select(&composed(1, Pick::Best), &candidates, context(1)), Some((2, SelectionReason::LowestCost)));
        assert_eq!(select(&composed(0, Pick::Best), &candidates, context(1)), Some((0, SelectionReason::LowestCost)));
        assert_eq!(
            select(&composed(1, Pick::PowerOfTwo), &candidates, context(1)),
            Some((2, SelectionReason::LowestCost)),
            "of the two left"
        );
        assert_eq!(
            select(&composed(3, Pick::PowerOfTwo), &candidates, context(1)).map(|(at, _)| at),
            Some(1),
            "of one"
        );
    }

    #[test]
    fn weighted_picks_prefer_lower_scores_and_exclude_none() {
        let chosen = spread(&composed(0, Pick::Weighted), vec![at(-1.0, 0.0), at(0.0, 0.0), at(1.0, 0.0)], 600);
        assert!(chosen[0] > 2 * chosen[1] && chosen[1] > 2 * chosen[2] && chosen[2] > 20, "{chosen:?}");
        let alike = spread(&composed(0, Pick::Weighted), vec![at(2.0, 0.0); 3], 600);
        assert!(alike.iter().all(|count| (140..260).contains(count)), "{alike:?}");
    }
}
