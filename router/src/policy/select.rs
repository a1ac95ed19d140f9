//! Which of several workers: pure, values in, choice out.
//!
//! Costs that differ by less than anybody notices are a tie, and a tie goes to whoever was chosen longest ago. So one
//! shared first block does not pin a fleet's traffic to its holder, and new workers get their share at once.

use super::composition::{Composition, Pick, Policy};
use crate::hash::splitmix64;
use std::cmp::Ordering;

/// A worker, as far as the choice goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Candidate {
    /// Its place among the seats.
    pub(crate) seat: u32,
    /// A bit for each filter of a composition that it passes.
    pub(crate) passes: u32,
    /// Names the worker, whoever else is there.
    pub(crate) worker: u64,
    /// Seconds, cache and all; or what a composition scores.
    pub(crate) cost: f64,
    /// Seconds of load, whatever is cached.
    pub(crate) load: f64,
    /// When it was last chosen, in choices; 0 is never.
    pub(crate) chosen: u64,
}

/// Why a candidate was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// It was the only candidate.
    Only,
    /// It has the lowest cost, by more than a tie.
    Cheapest,
    /// It was least recently chosen among several of about the same cost.
    Tie,
    /// Round robin.
    Turn,
    /// It has the least load.
    Idlest,
    /// Random choice.
    Drawn,
    /// It is the first worker of the session.
    Session,
    /// It is a later worker of the session, because the first is overloaded.
    Spill,
}

/// What a choice depends on beside the candidates. The same makes the same choice.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Turn {
    /// A random number.
    pub(crate) draw: u64,
    /// The session's name, as a number.
    pub(crate) session: Option<u64>,
}

impl Why {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Cheapest => "lowest_cost",
            Self::Tie => "tie",
            Self::Turn => "round_robin",
            Self::Idlest => "least_loaded",
            Self::Drawn => "random",
            Self::Session => "session",
            Self::Spill => "overflow",
        }
    }
}

/// Costs within a twentieth of the lowest are a tie: estimates are no better than that …
const TIE_FRACTION: f64 = 0.05;
/// … but at least 2 ms, which nobody notices, and at most 25 ms: a long queue must not hide a long cached prefix.
const TIE_SECONDS: (f64, f64) = (0.002, 0.025);

/// A session stays while its worker's load is within a quarter of the mean, as the paper on bounded loads has it …
const BOUND: f64 = 1.25;
/// … and a quarter of a second, which is about what moving would cost.
const BOUND_SECONDS: f64 = 0.25;

/// Chooses.
pub(crate) fn select(policy: &Policy, candidates: &[Candidate], turn: Turn) -> Option<(usize, Why)> {
    if candidates.len() < 2 {
        return (!candidates.is_empty()).then_some((0, Why::Only));
    }
    let Turn { draw, session } = turn;
    let everyone = 0..candidates.len();
    Some(match (policy, session) {
        (Policy::Session, Some(session)) => home(candidates, session),
        (Policy::Kv | Policy::Session, _) => {
            least(candidates, everyone, draw, |candidate| candidate.cost, Why::Cheapest)
        }
        (Policy::LeastLoaded, _) => least(candidates, everyone, draw, |candidate| candidate.load, Why::Idlest),
        (Policy::PowerOfTwo, _) => of_two(candidates, everyone, draw, |candidate| candidate.load, Why::Idlest),
        (Policy::RoundRobin, _) => (longest_ago(candidates, everyone, draw), Why::Turn),
        (Policy::Random, _) => (pick(draw, candidates.len()), Why::Drawn),
        (Policy::Composed(Composition { filter, pick, .. }), _) => {
            let needed = needed(candidates, filter.len());
            let among = everyone.filter(|at| candidates[*at].passes & needed == needed);
            let score = |candidate: &Candidate| candidate.cost;
            match pick {
                Pick::Best => least(candidates, among, draw, score, Why::Cheapest),
                Pick::PowerOfTwo => of_two(candidates, among, draw, score, Why::Cheapest),
                Pick::Weighted => (weighted(candidates, among, draw), Why::Drawn),
            }
        }
    })
}

fn least(
    candidates: &[Candidate],
    among: impl Iterator<Item = usize> + Clone,
    draw: u64,
    of: impl Fn(&Candidate) -> f64,
    clear: Why,
) -> (usize, Why) {
    let best = lowest(among.clone().map(|at| of(&candidates[at])));
    let limit = best + (best * TIE_FRACTION).clamp(TIE_SECONDS.0, TIE_SECONDS.1);
    let mut tied = 0;
    let among = among.filter(|at| of(&candidates[*at]) <= limit).inspect(|_| tied += 1);
    let at = longest_ago(candidates, among, draw);
    (at, if tied > 1 { Why::Tie } else { clear })
}

fn of_two(
    candidates: &[Candidate],
    among: impl Iterator<Item = usize> + Clone,
    draw: u64,
    of: impl Fn(&Candidate) -> f64,
    clear: Why,
) -> (usize, Why) {
    let n = among.clone().count();
    let first = pick(draw, n);
    let second = (first + 1 + pick(splitmix64(draw), n.saturating_sub(1).max(1))) % n.max(1);
    let two = among.enumerate().filter(move |(nth, _)| *nth == first || *nth == second).map(|(_, at)| at);
    least(candidates, two, draw, of, clear)
}

/// One drawn, with a chance that falls by e for each mean distance from the best: so it needs no scale of its own.
fn weighted(candidates: &[Candidate], among: impl Iterator<Item = usize> + Clone, draw: u64) -> usize {
    let cost = |at: usize| candidates[at].cost;
    let best = lowest(among.clone().map(cost));
    let (sum, n) = among.clone().fold((0.0, 0.0), |(sum, n), at| (sum + cost(at) - best, n + 1.0));
    let mean = f64::max(sum / n, f64::MIN_POSITIVE);
    let chance = |at: usize| f64::exp(-(cost(at) - best) / mean);
    let all: f64 = among.clone().map(chance).sum();
    let mut left = (draw >> 11) as f64 / (1u64 << 53) as f64 * all;
    let drawn = |at: &usize| {
        left -= chance(*at);
        left < 0.0
    };
    // Rounding may leave nobody drawn; then it is the last.
    among.clone().find(drawn).or(among.last()).unwrap_or(0)
}

/// The session's worker: the one of the highest weight, which nobody's coming or going changes but its own (rendezvous
/// hashing; Thaler and Ravishankar, 1998). One that has more to do than its bound is passed over for the next
/// (bounded loads; Mirrokni, Thorup and Zadimoghaddam, 2018).
fn home(candidates: &[Candidate], session: u64) -> (usize, Why) {
    let mean = candidates.iter().map(|candidate| candidate.load).sum::<f64>() / candidates.len() as f64;
    let bound = mean * BOUND + BOUND_SECONDS;
    let weight = |at: &usize| splitmix64(session ^ splitmix64(candidates[*at].worker));
    let first = (0..candidates.len()).max_by_key(weight).unwrap_or(0);
    // The least loaded is never above the mean.
    let within = (0..candidates.len()).filter(|at| candidates[*at].load <= bound).max_by_key(weight).unwrap_or(first);
    (within, if within == first { Why::Session } else { Why::Spill })
}

/// The filters that count: each in turn, unless nobody would be left.
fn needed(candidates: &[Candidate], filters: usize) -> u32 {
    (0..filters).fold(0, |needed, filter| {
        let with = needed | 1 << filter;
        if candidates.iter().any(|candidate| candidate.passes & with == with) { with } else { needed }
    })
}

fn longest_ago(candidates: &[Candidate], among: impl Iterator<Item = usize>, draw: u64) -> usize {
    // Those never chosen come in an order that the draw decides, so that routers which start together part ways.
    let chosen = |at: usize| candidates[at].chosen;
    let turn = |at: usize| splitmix64(draw ^ at as u64);
    among
        .reduce(|a, b| match chosen(a).cmp(&chosen(b)).then_with(|| turn(b).cmp(&turn(a))) {
            Ordering::Greater => b,
            _ => a,
        })
        .unwrap_or(0)
}

/// The lowest of some numbers. Told by comparing, which a core foresees: `f64::min` would wait for each of a thousand in turn.
pub(crate) fn lowest(numbers: impl Iterator<Item = f64>) -> f64 {
    numbers.fold(f64::INFINITY, |lowest, number| if number < lowest { number } else { lowest })
}

/// One of `n`, evenly enough for any fleet.
fn pick(draw: u64, n: usize) -> usize {
    ((u128::from(draw) * n as u128) >> 64) as usize
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::hash_str;

    fn at(cost: f64, load: f64) -> Candidate {
        Candidate { seat: 0, passes: 0, worker: 0, cost, load, chosen: 0 }
    }

    fn turn(draw: u64) -> Turn {
        Turn { draw, session: None }
    }

    /// Chooses `n` times, and counts.
    fn spread(policy: &Policy, mut candidates: Vec<Candidate>, n: u64) -> Vec<u64> {
        let mut counts = vec![0; candidates.len()];
        for nth in 1..=n {
            let (chosen, _) = select(policy, &candidates, turn(splitmix64(nth))).unwrap();
            candidates[chosen].chosen = nth;
            counts[chosen] += 1;
        }
        counts
    }

    #[test]
    fn a_tiny_overlap_does_not_pin() {
        // One worker holds block 0 of a prompt that takes 100 ms, nobody holds more.
        assert_eq!(spread(&Policy::Kv, vec![at(0.098, 0.0), at(0.1, 0.0), at(0.1, 0.0)], 30), [10, 10, 10]);
    }

    #[test]
    fn a_long_overlap_wins_until_its_queue_is_longer_than_a_miss() {
        assert_eq!(select(&Policy::Kv, &[at(0.01, 0.0), at(0.5, 0.0)], turn(7)), Some((0, Why::Cheapest)));
        assert_eq!(select(&Policy::Kv, &[at(0.01 + 0.6, 0.6), at(0.5, 0.0)], turn(7)), Some((1, Why::Cheapest)));
    }

    #[test]
    fn round_robin_takes_turns_and_the_newcomer_first() {
        assert_eq!(spread(&Policy::RoundRobin, vec![at(9.0, 9.0), at(0.0, 0.0)], 10), [5, 5]);
        let new = [Candidate { chosen: 8, ..at(0.0, 0.0) }, at(0.0, 0.0), Candidate { chosen: 9, ..at(0.0, 0.0) }];
        assert_eq!(select(&Policy::RoundRobin, &new, turn(0)), Some((1, Why::Turn)));
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
    fn nobody_and_only_one_need_no_policy() {
        for policy in Policy::ALL {
            assert_eq!(select(&policy, &[], turn(1)), None);
            assert_eq!(select(&policy, &[at(1.0, 1.0)], turn(1)), Some((0, Why::Only)));
        }
    }

    fn composed(filters: usize, pick: Pick) -> Policy {
        let filter = vec![crate::policy::composition::Filter::Fits; filters];
        Policy::Composed(Composition { filter, score: vec![], pick })
    }

    #[test]
    fn a_session_keeps_its_worker_whoever_comes_or_goes_until_it_is_overloaded() {
        let fleet = |n: u64| (0..n).map(|worker| Candidate { worker, ..at(1.0, 0.1) }).collect::<Vec<_>>();
        let homes = |candidates: &[Candidate]| -> Vec<u64> {
            let home = |session: u64| {
                let session = hash_str(&format!("session {session}"));
                let (at, why) =
                    select(&Policy::Session, candidates, Turn { draw: session, session: Some(session) }).unwrap();
                assert_eq!(why, Why::Session);
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
        let choice =
            |candidates: &[Candidate]| select(&Policy::Session, candidates, Turn { draw: 1, session }).unwrap();
        assert_eq!(choice(&busy), (home, Why::Session), "a little more to do than the others");
        busy[home].load = 3.0;
        let (next, why) = choice(&busy);
        assert!(next != home && why == Why::Spill);
        assert_eq!(choice(&busy).0, next, "always the same next one, so that one copy more is enough");
        assert_eq!(
            select(&Policy::Session, &[at(1.0, 0.0), at(0.5, 0.0)], turn(3)),
            Some((1, Why::Cheapest)),
            "no session"
        );
    }

    #[test]
    fn a_filter_that_would_leave_nobody_is_passed_over() {
        let candidate = |passes, cost| Candidate { passes, ..at(cost, 0.0) };
        let candidates = [candidate(0b000, 0.1), candidate(0b101, 0.5), candidate(0b001, 0.2)];
        // The first leaves two, the second nobody, the third one.
        assert_eq!(select(&composed(3, Pick::Best), &candidates, turn(1)), Some((1, Why::Cheapest)));
        assert_eq!(select(&composed(1, Pick::Best), &candidates, turn(1)), Some((2, Why::Cheapest)));
        assert_eq!(select(&composed(0, Pick::Best), &candidates, turn(1)), Some((0, Why::Cheapest)));
        assert_eq!(
            select(&composed(1, Pick::PowerOfTwo), &candidates, turn(1)),
            Some((2, Why::Cheapest)),
            "of the two left"
        );
        assert_eq!(select(&composed(3, Pick::PowerOfTwo), &candidates, turn(1)).map(|(at, _)| at), Some(1), "of one");
    }

    #[test]
    fn weights_make_the_better_likelier_and_nobody_impossible() {
        let drawn = spread(&composed(0, Pick::Weighted), vec![at(-1.0, 0.0), at(0.0, 0.0), at(1.0, 0.0)], 600);
        assert!(drawn[0] > 2 * drawn[1] && drawn[1] > 2 * drawn[2] && drawn[2] > 20, "{drawn:?}");
        let alike = spread(&composed(0, Pick::Weighted), vec![at(2.0, 0.0); 3], 600);
        assert!(alike.iter().all(|count| (140..260).contains(count)), "{alike:?}");
    }
}
