//! What placing a request costs: the estimated time to its first token, term by term, and the time that it takes from others.
//!
//! Pure: measurements and a prompt in, seconds out. A constant stands in only for what nobody in the fleet has measured.

use crate::index::{Held, LEVELS};
use crate::load::{Speeds, Standing};
use kvbm::Level;

/// A prompt, as far as its cost goes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Prompt {
    /// Tokens.
    pub(crate) tokens: u64,
    /// Tokens per block.
    pub(crate) block_size: u64,
    /// Blocks that prompt and expected output will take.
    pub(crate) blocks: u64,
}

/// Seconds, by what takes them.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(crate) struct Cost {
    /// Prompts that are computed before this one.
    pub(crate) queue: f64,
    /// Waiting until blocks are free.
    pub(crate) room: f64,
    /// Computing what is not cached.
    pub(crate) prefill: f64,
    /// Bringing cached blocks up from slower tiers.
    pub(crate) onboard: f64,
    /// Bringing blocks over from the worker that prefills.
    pub(crate) handover: f64,
    /// Sharing steps with the sequences that decode there.
    pub(crate) decode: f64,
    /// What those who come after wait for this prompt.
    pub(crate) crowd: f64,
    /// What others wait while this prompt is computed on a worker that decodes.
    pub(crate) stall: f64,
}

/// Stand-ins for what nobody has measured. They lie in the middle between a small model on two cores and a large one on an
/// accelerator, where a factor of ten either way still ranks a cached prefix before an uncached one.
mod stand_in {
    /// Tokens per second.
    pub(super) const PREFILL: f64 = 5_000.0;
    /// Seconds that a sequence adds to a step.
    pub(super) const STEP: f64 = 0.001;
    /// 16 tokens of a model of some billion parameters.
    pub(super) const BLOCK_BYTES: f64 = 1_048_576.0;
    /// Seconds until the first block and bytes per second after it: G1, G2, G3, a pod's folder, G4, a peer. Half of what
    /// memory, a single SSD, flash behind a network, an object store and a 25 Gbit network usually give.
    pub(super) const ONBOARD: [(f64, f64); 6] =
        [(0.0, f64::INFINITY), (0.000_1, 5e9), (0.001, 1e9), (0.003, 1e9), (0.03, 0.5e9), (0.001, 1.5e9)];
    /// Two hops and a turn in another batch.
    pub(super) const RESUME: f64 = 0.01;
    /// A few hundred tokens of output.
    pub(super) const RESIDENCE: f64 = 10.0;
}

/// Steps during which a request's neighbours are held against a worker. Fewer, and a batch of dozens looks as good as an
/// idle worker; many more, and a short answer gives up a long cached prefix for a slightly smaller batch.
const STEPS: f64 = 4.0;
/// Nobody waits longer for room: by then the engine has preempted someone or refused.
const ROOM_SECONDS_MAX: f64 = 60.0;

impl Prompt {
    /// Tokens that are not in `held`. At least one: the last token is always computed, for its logits.
    pub(crate) fn uncached(&self, held: Held) -> u64 {
        self.tokens.saturating_sub(u64::from(held.run()) * self.block_size).max(1)
    }
}

impl Cost {
    /// The whole request on one worker. `weight`: how much the time of others counts.
    #[expect(clippy::inline_always, reason = "a thousand times per decision, and every figure stays in a register")]
    #[inline(always)]
    pub(crate) fn together(prompt: Prompt, held: Held, standing: &Standing, weight: f64) -> Self {
        let speeds = &standing.speeds;
        let token = prefill_speed(speeds).recip();
        let mut onboard = 0.0;
        let held_at = held.blocks();
        for at in 1..LEVELS.len() {
            let (level, blocks) = (LEVELS[at], held_at[at]);
            if blocks == 0 {
                continue;
            }
            let recompute = u64::from(blocks) * prompt.block_size;
            // Whatever the tier promises: onboarding stops where recomputing would be quicker.
            onboard += transfer(speeds, level, u64::from(blocks)).min(recompute as f64 * token);
        }
        Self {
            queue: f64::from(standing.waiting_tokens) * token,
            room: room(prompt, held, standing),
            prefill: prompt.uncached(held) as f64 * token,
            onboard,
            decode: weight * STEPS * speeds.step.or(stand_in::STEP) * f64::from(standing.sequences),
            ..Self::default()
        }
    }

    /// Prefill as `prefill` costs on its worker, then decode where `held` is there already.
    pub(crate) fn apart(prefill: &Self, prompt: Prompt, held: Held, standing: &Standing, weight: f64) -> Self {
        let speeds = &standing.speeds;
        let blocks = (prompt.tokens / prompt.block_size).saturating_sub(u64::from(held.run()));
        let decode = Self::together(prompt, held, standing, weight);
        Self {
            handover: transfer(speeds, Level::Peer, blocks) + speeds.resume.or(stand_in::RESUME),
            room: prefill.room.max(decode.room),
            decode: decode.decode,
            stall: 0.0,
            ..*prefill
        }
    }

    /// All of it.
    pub(crate) fn total(&self) -> f64 {
        self.first_token() + self.decode + self.stall + self.crowd
    }

    /// The request's own time to its first token.
    pub(crate) fn first_token(&self) -> f64 {
        self.busy() + self.prefill + self.onboard + self.handover
    }

    /// What does not depend on what is cached.
    pub(crate) fn load(&self) -> f64 {
        self.busy() + self.decode
    }

    fn busy(&self) -> f64 {
        self.queue + self.room
    }
}

/// What those who come after wait for a prompt that takes `prefill` seconds. As many come while it waits as wait now: `here`
/// by the queue that it joins, `typical` by the average one. The first alone would send all long prompts to where the
/// short ones are not; the second alone lets prompts stay where they queue too long. On an idle fleet nobody comes after,
/// and the request looks at its own first token only; on a full one, what counts is that nothing is computed twice.
pub(crate) fn crowd(prefill: f64, here: u32, typical: f64) -> f64 {
    prefill * (f64::from(here) + typical)
}

/// The transfer of a hand-over alone.
#[inline]
pub(crate) fn transfer(speeds: &Speeds, level: Level, blocks: u64) -> f64 {
    if blocks == 0 {
        return 0.0;
    }
    let (latency, bytes_per_second) = speeds.from(level).unwrap_or(stand_in::ONBOARD[level as usize]);
    latency + blocks as f64 * speeds.block_bytes.or(stand_in::BLOCK_BYTES) / bytes_per_second
}

/// Prompt tokens per second.
#[inline]
pub(crate) fn prefill_speed(speeds: &Speeds) -> f64 {
    speeds.prefill.or(stand_in::PREFILL)
}

/// Requests leave, and their blocks with them, at the rate of blocks in use over the time that a request stays.
#[inline]
fn room(prompt: Prompt, held: Held, standing: &Standing) -> f64 {
    let free = u64::from(standing.total_blocks.saturating_sub(standing.active_blocks));
    if standing.total_blocks == 0 || prompt.blocks <= free { 0.0 } else { wait_for_room(prompt, held, standing, free) }
}

#[cold]
fn wait_for_room(prompt: Prompt, held: Held, standing: &Standing, free: u64) -> f64 {
    let need = prompt.blocks.saturating_sub(u64::from(held.resident()));
    let short = need.saturating_sub(free) as f64;
    let stay = standing.speeds.residence.or(stand_in::RESIDENCE);
    (stay * short / f64::from(standing.active_blocks.max(1))).min(ROOM_SECONDS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::Figure;

    const PROMPT: Prompt = Prompt { tokens: 1000, block_size: 10, blocks: 110 };

    fn standing(waiting_tokens: u32) -> Standing {
        let speeds = Speeds { prefill: Figure::of(1000.0), block_bytes: Figure::of(1000.0), ..Speeds::default() };
        Standing { waiting_tokens, speeds, ..Standing::default() }
    }

    #[test]
    fn terms_are_seconds() {
        let cost = Cost::together(PROMPT, Held::of([40, 0, 0, 0, 0]), &standing(500), 1.0);
        let want = Cost { queue: 0.5, prefill: 0.6, decode: cost.decode, ..Cost::default() };
        assert!(cost == want && (cost.total() - 1.1).abs() < 1e-9, "{cost:?}");
    }

    #[test]
    fn a_slow_tier_never_costs_more_than_a_miss() {
        let mut slow = standing(0);
        slow.speeds.onboards(Level::G3, 5.0, 1.0);
        let miss = Cost::together(PROMPT, Held::default(), &slow, 1.0);
        let hit = Cost::together(PROMPT, Held::of([0, 0, 50, 0, 0]), &slow, 1.0);
        assert!(hit.total() <= miss.total() + 1e-9, "{hit:?} {miss:?}");
        let quick = Cost::together(PROMPT, Held::of([0, 50, 0, 0, 0]), &slow, 1.0);
        assert!(quick.total() < hit.total());
    }

    #[test]
    fn the_longer_the_queues_the_longer_one_waits_for_a_cached_prefix() {
        let cost = |cached, waiting, prompts| {
            let mut cost = Cost::together(PROMPT, Held::of([cached, 0, 0, 0, 0]), &standing(waiting), 1.0);
            cost.crowd = crowd(cost.prefill, prompts, prompts as f64);
            cost.total()
        };
        // Half of a second is cached, three quarters are to be waited for.
        assert!(cost(50, 750, 0) > cost(0, 0, 0), "alone, one computes it again");
        assert!(cost(50, 4750, 4) < cost(0, 4000, 4), "before others, one does not");
    }

    #[test]
    fn a_full_prompt_still_computes_one_token() {
        assert_eq!(PROMPT.uncached(Held::of([100, 0, 0, 0, 0])), 1);
    }

    #[test]
    fn a_worker_without_room_costs_the_wait_for_it() {
        let full = Standing { active_blocks: 100, total_blocks: 150, ..standing(0) };
        let short = Cost::together(PROMPT, Held::default(), &full, 1.0).room;
        assert!((short - stand_in::RESIDENCE * 60.0 / 100.0).abs() < 1e-9, "{short}");
        let cached = Cost::together(PROMPT, Held::of([60, 0, 0, 0, 0]), &full, 1.0).room;
        assert!(cached < 1e-9, "cached blocks need no room");
    }
}
