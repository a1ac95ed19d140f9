//! Which of several workers: pure, values in, choice out.
//!
//! Costs that differ by less than anybody notices are a tie, and a tie goes to whoever was chosen longest ago. So one
//! shared first block does not pin a fleet's traffic to its holder, and new workers get their share at once.

use crate::settings::Policy;
use std::cmp::Reverse;

/// A worker, as far as the choice goes.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Candidate {
    /// Its place among the seats.
    pub(crate) seat: u32,
    /// Seconds, cache and all.
    pub(crate) cost: f64,
    /// Seconds of load, whatever is cached.
    pub(crate) load: f64,
    /// When it was last chosen, in choices; 0 is never.
    pub(crate) chosen: u64,
}

/// Why a candidate was chosen.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Why {
    /// Nobody else was there.
    Only,
    /// The lowest cost by more than a tie.
    Cheapest,
    /// One of several of about the same cost, chosen longest ago.
    Tie,
    /// Its turn.
    Turn,
    /// The least load.
    Idlest,
    /// Drawn.
    Drawn,
}

impl Why {
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Only => "only",
            Self::Cheapest => "cheapest",
            Self::Tie => "tie",
            Self::Turn => "turn",
            Self::Idlest => "idlest",
            Self::Drawn => "drawn",
        }
    }
}

/// Costs within a twentieth of the lowest are a tie: estimates are no better than that …
const TIE_FRACTION: f64 = 0.05;
/// … but at least 2 ms, which nobody notices, and at most 25 ms: a long queue must not hide a long cached prefix.
const TIE_SECONDS: (f64, f64) = (0.002, 0.025);

/// Chooses. `draw` is a random number; the same draw makes the same choice.
pub(crate) fn select(policy: Policy, candidates: &[Candidate], draw: u64) -> Option<(usize, Why)> {
    if candidates.len() < 2 {
        return (!candidates.is_empty()).then_some((0, Why::Only));
    }
    let everyone = 0..candidates.len();
    Some(match policy {
        Policy::Kv => least(candidates, everyone, draw, |candidate| candidate.cost, Why::Cheapest),
        Policy::LeastLoaded => least(candidates, everyone, draw, |candidate| candidate.load, Why::Idlest),
        Policy::PowerOfTwo => {
            let first = pick(draw, candidates.len());
            let step = 1 + pick(mix(draw), candidates.len() - 1);
            let two = [first, (first + step) % candidates.len()];
            least(candidates, two.into_iter(), draw, |candidate| candidate.load, Why::Idlest)
        }
        Policy::RoundRobin => (longest_ago(candidates, everyone, draw), Why::Turn),
        Policy::Random => (pick(draw, candidates.len()), Why::Drawn),
    })
}

fn least(
    candidates: &[Candidate],
    among: impl Iterator<Item = usize> + Clone,
    draw: u64,
    of: impl Fn(&Candidate) -> f64,
    clear: Why,
) -> (usize, Why) {
    let best = among.clone().map(|at| of(&candidates[at])).fold(f64::INFINITY, f64::min);
    let limit = best + (best * TIE_FRACTION).clamp(TIE_SECONDS.0, TIE_SECONDS.1);
    let tied = among.filter(|at| of(&candidates[*at]) <= limit);
    let why = if tied.clone().nth(1).is_some() { Why::Tie } else { clear };
    (longest_ago(candidates, tied, draw), why)
}

fn longest_ago(candidates: &[Candidate], among: impl Iterator<Item = usize>, draw: u64) -> usize {
    // Those never chosen come in an order that the draw decides, so that routers which start together part ways.
    let turn = |at: &usize| (Reverse(candidates[*at].chosen), mix(draw ^ *at as u64));
    among.max_by_key(turn).unwrap_or(0)
}

/// One of `n`, evenly enough for any fleet.
fn pick(draw: u64, n: usize) -> usize {
    ((u128::from(draw) * n as u128) >> 64) as usize
}

/// Scrambles a number: the finaliser of `SplitMix64` (Steele, Lea and Flood, 2014).
pub(crate) fn mix(mut z: u64) -> u64 {
    z = z.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(cost: f64, load: f64) -> Candidate {
        Candidate { seat: 0, cost, load, chosen: 0 }
    }

    /// Chooses `n` times, and counts.
    fn spread(policy: Policy, mut candidates: Vec<Candidate>, n: u64) -> Vec<u64> {
        let mut counts = vec![0; candidates.len()];
        for turn in 1..=n {
            let (chosen, _) = select(policy, &candidates, mix(turn)).unwrap();
            candidates[chosen].chosen = turn;
            counts[chosen] += 1;
        }
        counts
    }

    #[test]
    fn a_tiny_overlap_does_not_pin() {
        // One worker holds block 0 of a prompt that takes 100 ms, nobody holds more.
        assert_eq!(spread(Policy::Kv, vec![at(0.098, 0.0), at(0.1, 0.0), at(0.1, 0.0)], 30), [10, 10, 10]);
    }

    #[test]
    fn a_long_overlap_wins_until_its_queue_is_longer_than_a_miss() {
        assert_eq!(select(Policy::Kv, &[at(0.01, 0.0), at(0.5, 0.0)], 7), Some((0, Why::Cheapest)));
        assert_eq!(select(Policy::Kv, &[at(0.01 + 0.6, 0.6), at(0.5, 0.0)], 7), Some((1, Why::Cheapest)));
    }

    #[test]
    fn round_robin_takes_turns_and_the_newcomer_first() {
        assert_eq!(spread(Policy::RoundRobin, vec![at(9.0, 9.0), at(0.0, 0.0)], 10), [5, 5]);
        let new = [Candidate { chosen: 8, ..at(0.0, 0.0) }, at(0.0, 0.0), Candidate { chosen: 9, ..at(0.0, 0.0) }];
        assert_eq!(select(Policy::RoundRobin, &new, 0), Some((1, Why::Turn)));
    }

    #[test]
    fn load_policies_look_at_load_and_random_ones_at_nothing() {
        let uneven = vec![at(0.0, 9.0), at(5.0, 1.0), at(5.0, 5.0)];
        assert_eq!(spread(Policy::LeastLoaded, uneven.clone(), 10), [0, 10, 0]);
        let two = spread(Policy::PowerOfTwo, uneven.clone(), 300);
        assert_eq!(two[0], 0, "the most loaded of three loses every pair");
        assert!(two[1] > two[2] && two[2] > 50, "{two:?}");
        let random = spread(Policy::Random, uneven, 300);
        assert!(random.iter().all(|count| (60..140).contains(count)), "{random:?}");
    }

    #[test]
    fn nobody_and_only_one_need_no_policy() {
        for policy in Policy::ALL {
            assert_eq!(select(policy, &[], 1), None);
            assert_eq!(select(policy, &[at(1.0, 1.0)], 1), Some((0, Why::Only)));
        }
    }
}
