//! What placing a request costs: the estimated time to its first token, term by term, and the time that it takes from others.
//!
//! Pure: a prompt and a worker's pace in, seconds out.

use crate::index::{LEVELS, WorkerOverlap};
use crate::load::Pace;
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

/// What is left to do for a prompt where so much of it is held: the same for all who hold as much.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Need {
    prompt: Prompt,
    pub(crate) held: WorkerOverlap,
    /// Tokens to compute.
    uncached: f64,
    /// A bit for each level, but the first, that blocks are to be brought up from.
    slower: u32,
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
    /// Waiting there for what others have asked for before.
    pub(crate) backlog: f64,
    /// Bringing blocks over from the worker that prefills.
    pub(crate) handover: f64,
    /// Sharing steps with the sequences that decode there.
    pub(crate) decode: f64,
    /// What those who come after wait for this prompt.
    pub(crate) crowd: f64,
    /// What others wait while this prompt is computed on a worker that decodes.
    pub(crate) stall: f64,
}

/// Output tokens that a request is expected to need room for, and charged for, unless it asks for fewer: most answers are shorter, and blocks
/// are taken as they fill.
pub(crate) const OUTPUT_TOKENS: u64 = 256;
/// Steps during which a request's neighbours are held against a worker. Fewer, and a batch of dozens looks as good as an
/// idle worker; many more, and a short answer gives up a long cached prefix for a slightly smaller batch.
const STEPS: f64 = 4.0;
/// Nobody waits longer for room: by then the engine has preempted someone or refused.
const ROOM_SECONDS_MAX: f64 = 60.0;

impl Prompt {
    /// Tokens that are not in `held`. At least one: the last token is always computed, for its logits.
    pub(crate) fn uncached(&self, held: WorkerOverlap) -> u64 {
        self.tokens.saturating_sub(u64::from(held.total()) * self.block_size).max(1)
    }

    /// Blocks that only the output will take.
    pub(crate) fn output_blocks(&self) -> u64 {
        self.blocks.saturating_sub(self.tokens.div_ceil(self.block_size))
    }
}

impl Need {
    pub(crate) fn of(prompt: Prompt, held: WorkerOverlap) -> Self {
        let slower = (1..LEVELS.len()).fold(0, |bits, at| bits | u32::from(held.per_level()[at] > 0) << at);
        Self { prompt, held, uncached: prompt.uncached(held) as f64, slower }
    }
}

impl Cost {
    /// The whole request on one worker. `weight`: how much the time of others counts.
    #[expect(clippy::inline_always, reason = "a thousand times per decision, and every figure stays in a register")]
    #[inline(always)]
    pub(crate) fn together(need: &Need, pace: &Pace, weight: f64) -> Self {
        let (mut onboard, mut backlog) = (0.0, 0.0);
        let mut slower = need.slower;
        while slower != 0 {
            let at = slower.trailing_zeros() as usize;
            slower &= slower - 1;
            let blocks = u64::from(need.held.per_level()[at]);
            // Whatever the tier promises: onboarding stops where recomputing would be quicker.
            let recompute = (blocks * need.prompt.block_size) as f64 * pace.token;
            let alone = pace.transfer(LEVELS[at], blocks).min(recompute);
            onboard += alone;
            backlog += pace.backlog(LEVELS[at]).min(recompute - alone);
        }
        Self {
            queue: pace.queue,
            room: room(need, pace),
            prefill: need.uncached * pace.token,
            onboard,
            backlog,
            decode: weight * STEPS * pace.batch,
            ..Self::default()
        }
    }

    /// Prefill as `prefill` costs on its worker, then decode where `held` is there already.
    pub(crate) fn apart(prefill: &Self, need: &Need, pace: &Pace, weight: f64) -> Self {
        let Need { prompt, held, .. } = need;
        let blocks = (prompt.tokens / prompt.block_size).saturating_sub(u64::from(held.total()));
        let transfer = pace.transfer(Level::Peer, blocks);
        // Where nothing is to come over nobody waits for it, and nobody waits longer than computing it takes.
        let recompute = (blocks * prompt.block_size) as f64 * pace.token;
        let backlog = pace.backlog(Level::Peer).min((recompute - transfer).max(0.0));
        let decode = Self::together(need, pace, weight);
        // While its prompt is computed there, those go on who wait here: it waits for what is left of them then.
        let left = (decode.busy() - prefill.first_token()).max(0.0);
        let room = decode.room.min(left);
        Self {
            queue: prefill.queue + left - room,
            room: prefill.room + room,
            handover: transfer + pace.resume,
            backlog: prefill.backlog + backlog,
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
        self.busy() + self.prefill + self.onboard + self.backlog + self.handover
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

/// Requests leave, and their blocks with them, at the rate of blocks in use over the time that a request stays.
#[inline]
fn room(need: &Need, pace: &Pace) -> f64 {
    if need.prompt.blocks <= u64::from(pace.free_blocks) { 0.0 } else { wait_for_room(need, pace) }
}

#[cold]
fn wait_for_room(Need { prompt, held, .. }: &Need, pace: &Pace) -> f64 {
    let need = prompt.blocks.saturating_sub(u64::from(held.in_g1()));
    let short = need.saturating_sub(pace.free_blocks.into()) as f64;
    (pace.residence * short / f64::from(pace.active_blocks.max(1))).min(ROOM_SECONDS_MAX)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::load::{Figure, Speeds, Standing, stand_in};

    const PROMPT: Prompt = Prompt { tokens: 1000, block_size: 10, blocks: 110 };

    fn standing(waiting_tokens: u32) -> Standing {
        let speeds = Speeds { prefill: Figure::of(1000.0), block_bytes: Figure::of(1000.0), ..Speeds::default() };
        Standing { waiting_tokens, speeds, ..Standing::default() }
    }

    fn together(held: [u32; LEVELS.len()], standing: &Standing) -> Cost {
        Cost::together(&Need::of(PROMPT, WorkerOverlap::of(held)), &Pace::of(standing), 1.0)
    }

    #[test]
    fn terms_are_seconds() {
        let cost = together([40, 0, 0, 0, 0], &standing(500));
        let want = Cost { queue: 0.5, prefill: 0.6, decode: cost.decode, ..Cost::default() };
        assert!(cost == want && (cost.total() - 1.1).abs() < 1e-9, "{cost:?}");
    }

    #[test]
    fn a_slow_tier_never_costs_more_than_a_miss() {
        let mut slow = standing(0);
        slow.speeds.onboards(Level::G3, 5.0, 1.0);
        let miss = together([0; 5], &slow);
        let hit = together([0, 0, 50, 0, 0], &slow);
        assert!(hit.total() <= miss.total() + 1e-9, "{hit:?} {miss:?}");
        let quick = together([0, 50, 0, 0, 0], &slow);
        assert!(quick.total() < hit.total());
    }

    #[test]
    fn a_tier_that_others_wait_for_costs_their_turn_and_never_more_than_a_miss() {
        let cost = |queued| {
            let mut standing = Standing { queued: [0, queued, 0, 0, 0], ..standing(0) };
            standing.speeds.onboards(Level::G3, 0.01, 1e6);
            together([0, 0, 50, 0, 0], &standing)
        };
        let (idle, busy, flooded) = (cost(0), cost(100), cost(1_000_000));
        // A thousandth of a second for each block.
        assert!((busy.backlog - 0.1).abs() < 1e-6 && (busy.total() - idle.total() - 0.1).abs() < 1e-6, "{busy:?}");
        assert_eq!((idle.backlog, idle.onboard), (0.0, busy.onboard), "what comes up is the same");
        assert!((flooded.total() - together([0; 5], &standing(0)).total()).abs() < 1e-9, "{flooded:?}");
    }

    #[test]
    fn what_comes_over_waits_its_turn_and_never_longer_than_computing_it_takes() {
        let cost = |held, queued| {
            let mut standing = Standing { queued: [0, 0, 0, 0, queued], ..standing(0) };
            standing.speeds.onboards(Level::Peer, 0.01, 1e6);
            let need = Need::of(PROMPT, WorkerOverlap::of([held, 0, 0, 0, 0]));
            Cost::apart(&Cost::default(), &need, &Pace::of(&standing), 1.0)
        };
        let (idle, busy, flooded) = (cost(40, 0), cost(40, 100), cost(40, 1_000_000));
        // A thousandth of a second for each block; sixty blocks take 0.6 seconds to compute.
        assert!((busy.backlog - 0.1).abs() < 1e-6 && idle.backlog == 0.0, "{busy:?}");
        assert!((flooded.backlog + flooded.handover - 0.6 - cost(100, 0).handover).abs() < 1e-9, "{flooded:?}");
        assert!(cost(100, 1_000_000).backlog < 1e-9, "nothing comes over");
    }

    #[test]
    fn what_is_left_of_the_wait_where_it_decodes_once_its_prompt_is_computed_counts() {
        let prefill = Cost { queue: 0.5, room: 0.1, prefill: 1.0, ..Cost::default() };
        let costs = |waiting, active_blocks| {
            let pace = Pace::of(&Standing { active_blocks, total_blocks: 170, ..standing(waiting) });
            let need = Need::of(PROMPT, WorkerOverlap::default());
            (Cost::together(&need, &pace, 1.0), Cost::apart(&prefill, &need, &pace, 1.0))
        };
        let is = |cost: &Cost, queue: f64, room: f64| {
            assert!((cost.queue - queue).abs() < 1e-9 && (cost.room - room).abs() < 1e-9, "{cost:?}: {queue} {room}");
        };
        // Its prompt is computed after 1.6 seconds.
        is(&costs(1500, 0).1, 0.5, 0.1);
        is(&costs(5000, 0).1, 0.5 + (5.0 - 1.6), 0.1);
        let (here, apart) = costs(1500, 90);
        is(&apart, 0.5, 0.1 + (1.5 + here.room - 1.6));
        let (here, apart) = costs(5000, 90);
        is(&apart, 0.5 + (5.0 - 1.6), 0.1 + here.room);
        assert!((apart.first_token() - apart.handover - here.queue - here.room).abs() < 1e-9, "as long as here");
    }

    #[test]
    fn the_longer_the_queues_the_longer_one_waits_for_a_cached_prefix() {
        let cost = |cached, waiting, prompts| {
            let mut cost = together([cached, 0, 0, 0, 0], &standing(waiting));
            cost.crowd = crowd(cost.prefill, prompts, prompts as f64);
            cost.total()
        };
        // Half of a second is cached, three quarters are to be waited for.
        assert!(cost(50, 750, 0) > cost(0, 0, 0), "alone, one computes it again");
        assert!(cost(50, 4750, 4) < cost(0, 4000, 4), "before others, one does not");
    }

    #[test]
    fn a_full_prompt_still_computes_one_token() {
        assert_eq!(PROMPT.uncached(WorkerOverlap::of([100, 0, 0, 0, 0])), 1);
    }

    #[test]
    fn a_worker_without_room_costs_the_wait_for_it() {
        let full = Standing { active_blocks: 100, total_blocks: 150, ..standing(0) };
        let short = together([0; 5], &full).room;
        assert!((short - stand_in::RESIDENCE * 60.0 / 100.0).abs() < 1e-9, "{short}");
        let cached = together([60, 0, 0, 0, 0], &full).room;
        assert!(cached < 1e-9, "cached blocks need no room");
    }
}
