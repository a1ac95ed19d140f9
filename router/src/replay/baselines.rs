//! How others say that they choose, for comparison: written from their public descriptions, not from their code, and run on
//! the same simulated fleet. What they leave open is decided in their favour and said here.
//!
//! - `dynamo-cost`: the cost function in NVIDIA Dynamo's router documentation ("Routing Concepts"): the lowest
//!   `overlap_score_weight × prefill_blocks + decode_blocks` with the default weight 1 and temperature 0. It sees the same
//!   exact index as `kv`, and keeps its own count of active blocks, as described.
//! - `smg-cache-aware`: the rule in SMG's documentation ("Cache-Aware Routing"), which `SGLang`'s router shares: when
//!   `max − min > balance_abs_threshold` and `max > balance_rel_threshold × min` requests, the least loaded; else, above
//!   `cache_threshold`, whoever a tree of what was sent says has the longest prefix; else the least loaded. Documented
//!   defaults: 64, 1.5, 0.3. The tree never forgets here, which is generous at this size.

use super::trace::{Asked, BLOCK_TOKENS};
use std::collections::{HashMap, HashSet};

/// Somebody else's way to choose, with what it remembers.
pub(super) enum Peer {
    Dynamo(DynamoCost),
    Smg(CacheAware),
}

/// Dynamo's documented cost function.
pub(super) struct DynamoCost {
    /// By worker: blocks still to be prefilled, and blocks in use.
    active: Vec<(f64, f64)>,
    /// By request: the blocks that it has to prefill.
    prefills: HashMap<u32, f64>,
}

/// SMG's documented rule.
pub(super) struct CacheAware {
    /// By worker: requests in flight.
    requests: Vec<u64>,
    /// By worker: blocks of what was sent there.
    sent: Vec<HashSet<u32>>,
}

impl Peer {
    pub(super) fn dynamo(workers: usize) -> Self {
        Self::Dynamo(DynamoCost { active: vec![(0.0, 0.0); workers], prefills: HashMap::new() })
    }

    pub(super) fn smg(workers: usize) -> Self {
        Self::Smg(CacheAware { requests: vec![0; workers], sent: vec![HashSet::new(); workers] })
    }

    /// Chooses, and remembers. `held`: leading blocks that a worker has, as the exact index says.
    pub(super) fn choose(&mut self, request: u32, asked: &Asked, held: impl Fn(usize) -> u32) -> usize {
        match self {
            Self::Dynamo(peer) => peer.choose(request, asked, held),
            Self::Smg(peer) => peer.choose(asked),
        }
    }

    /// The request has its first token.
    pub(super) fn started(&mut self, worker: usize, request: u32) {
        if let Self::Dynamo(peer) = self {
            peer.active[worker].0 -= peer.prefills.remove(&request).unwrap_or_default();
        }
    }

    /// The request has ended.
    pub(super) fn finished(&mut self, worker: usize, asked: &Asked) {
        match self {
            Self::Dynamo(peer) => peer.active[worker].1 -= asked.blocks.len() as f64,
            Self::Smg(peer) => peer.requests[worker] -= 1,
        }
    }
}

impl DynamoCost {
    const OVERLAP_SCORE_WEIGHT: f64 = 1.0;

    fn choose(&mut self, request: u32, asked: &Asked, held: impl Fn(usize) -> u32) -> usize {
        let blocks = asked.blocks.len() as f64;
        let new = |worker: usize| {
            asked.input.saturating_sub(u64::from(held(worker)) * BLOCK_TOKENS) as f64 / BLOCK_TOKENS as f64
        };
        let cost = |worker: usize| {
            let (prefill, decode) = self.active[worker];
            Self::OVERLAP_SCORE_WEIGHT * (prefill + new(worker)) + decode + blocks
        };
        let worker = lowest(self.active.len(), cost);
        let prefill = new(worker);
        self.active[worker].0 += prefill;
        self.active[worker].1 += blocks;
        self.prefills.insert(request, prefill);
        worker
    }
}

impl CacheAware {
    const CACHE_THRESHOLD: f64 = 0.3;
    const BALANCE_ABS_THRESHOLD: u64 = 64;
    const BALANCE_REL_THRESHOLD: f64 = 1.5;

    fn choose(&mut self, asked: &Asked) -> usize {
        let worker = self.matching(asked).unwrap_or_else(|| lowest(self.requests.len(), |at| self.requests[at] as f64));
        self.requests[worker] += 1;
        self.sent[worker].extend(&asked.blocks);
        worker
    }

    /// The worker of the longest prefix, when load allows and the prefix is long enough.
    fn matching(&self, asked: &Asked) -> Option<usize> {
        let (min, max) = (self.requests.iter().min()?, self.requests.iter().max()?);
        if max - min > Self::BALANCE_ABS_THRESHOLD && *max as f64 > Self::BALANCE_REL_THRESHOLD * *min as f64 {
            return None;
        }
        let prefix = |at: usize| asked.blocks.iter().take_while(|block| self.sent[at].contains(*block)).count();
        let longest = lowest(self.sent.len(), |at| -(prefix(at) as f64));
        let tokens = (prefix(longest) as u64 * BLOCK_TOKENS).min(asked.input);
        (tokens as f64 / asked.input as f64 > Self::CACHE_THRESHOLD).then_some(longest)
    }
}

/// The first of the lowest.
fn lowest(n: usize, of: impl Fn(usize) -> f64) -> usize {
    (0..n).min_by(|a, b| of(*a).total_cmp(&of(*b))).unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn asked(blocks: &[u32]) -> Asked {
        Asked {
            at_ms: 0,
            input: blocks.len() as u64 * BLOCK_TOKENS,
            output: 1,
            blocks: blocks.to_vec(),
            session: 0,
            model: "".into(),
        }
    }

    #[test]
    fn dynamo_weighs_a_cached_block_like_an_active_one() {
        let mut peer = Peer::dynamo(2);
        let (two, four) = (asked(&[1, 2]), asked(&[1, 2, 3, 4]));
        assert_eq!(peer.choose(0, &two, |_| 0), 0, "the first of equals");
        // Worker 0: 2 to prefill, 2 in use, 4 - 3 new; worker 1: 4 new. 5 + 4 against 4 + 4.
        assert_eq!(peer.choose(1, &four, |at| if at == 0 { 3 } else { 0 }), 1);
        peer.started(0, 0);
        // 1 + 2 + 4 against 4 + 4 + 4 + 4.
        assert_eq!(peer.choose(2, &four, |at| if at == 0 { 3 } else { 0 }), 0);
        peer.finished(0, &four);
        peer.finished(0, &two);
        let Peer::Dynamo(state) = &peer else { unreachable!() };
        assert!(state.active[0].1.abs() < 1e-9, "blocks are given back");
    }

    #[test]
    fn smg_follows_a_prefix_above_the_threshold_until_load_is_out_of_balance() {
        let mut peer = Peer::smg(2);
        let long = asked(&[1, 2, 3, 4]);
        for request in 0..=64 {
            assert_eq!(peer.choose(request, &long, |_| 0), 0);
        }
        assert_eq!(peer.choose(65, &long, |_| 0), 1, "65 requests more than the other");
        assert_eq!(peer.choose(66, &asked(&[1, 7, 8, 9]), |_| 0), 1, "a quarter is not enough");
    }
}
