//! What to load and how long to wait for it, so that a hit is never slower than a miss. Pure: values in, values out.
//!
//! ```text
//!    blocks   0 ──────── head ─────────────────── tail ──────── end
//!             │ loaded    │ computed, front to back │ loaded,     │
//!             │ first     │ ───────▶        ◀────── │ last first  │
//! ```
//!
//! Attention needs the blocks before a block to compute it, but not to load it. So the engine may compute forward from the
//! head while the tiers deliver backward from the end, until both meet: with a tier as fast as computing, in half the time.
//! [`plan`] divides the blocks by measured speeds; what was not measured is tried. [`Patience`] guards against every
//! estimate being wrong: before it computes, a request waits a fixed grace at most, and beyond it only as long as what *has
//! arrived* saved. After that nothing is waited for: what arrives is skipped, what does not is computed.
//!
//! With a deadline, nothing is waited for that would make a request late which computing keeps in time, and nothing is
//! loaded that would come after it.

use std::time::Duration;

/// The next blocks in order, all from one tier.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Stretch {
    /// Which tier; stretches of one tier share its bandwidth.
    pub(crate) tier: usize,
    /// How many blocks.
    pub(crate) blocks: usize,
    /// What is known of the tier.
    pub(crate) known: Known,
}

/// What is known of a tier's speed.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum Known {
    /// Nothing yet, or too long ago: worth a try.
    Nothing,
    /// How fast it was.
    Speed(Measured),
    /// It did not answer when it was last asked: worth asking, not worth waiting for.
    Silent,
}

/// How fast a tier was seen to be.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Measured {
    /// Seconds until the first block, when nobody else is served.
    pub(crate) latency: f64,
    /// Seconds for each block after it.
    pub(crate) seconds_per_block: f64,
    /// Blocks that others wait for: served first.
    pub(crate) queued: usize,
}

impl Measured {
    /// Seconds until the first block.
    fn first(&self) -> f64 {
        self.latency + self.queued as f64 * self.seconds_per_block
    }

    /// Seconds until `blocks` are there.
    fn seconds(&self, blocks: usize) -> f64 {
        if blocks == 0 { 0.0 } else { self.first() + (blocks - 1) as f64 * self.seconds_per_block }
    }
}

/// What to do.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Plan {
    /// Leading blocks to load before anything is computed.
    pub(crate) head: usize,
    /// Blocks to load from the end, the last first, while those before them are computed.
    pub(crate) tail: usize,
    /// How long to wait for the head.
    pub(crate) patience: Patience,
}

/// How long to wait before computing, given what arrived.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Patience {
    /// With nothing to show for it.
    pub(crate) grace: Duration,
    /// More for each leading block that arrived: what it saved.
    pub(crate) per_block: Duration,
    /// With no news.
    pub(crate) silence: Duration,
}

impl Patience {
    /// The longest wait with nothing to show for it: what a hit may lose against a miss, once, when a tier turns out to
    /// hang. Most stores answer within it, and what comes later is not lost: it is loaded from the end.
    pub(crate) const GRACE: Duration = Duration::from_millis(100);

    /// Long prompts may wait this share of what is at stake, if it is more than the grace.
    const SHARE: f64 = 0.05;

    /// While nobody knows what recomputing costs: bounded, and enough to read a gigabyte from one SSD that keeps talking.
    const UNKNOWN: Self = Self { grace: Duration::from_secs(2), per_block: Duration::ZERO, silence: Self::GRACE };

    /// For `head` blocks of the stretches that cost `cost` seconds each to compute, when there are `slack` seconds to lose.
    fn of(stretches: &[Stretch], head: usize, cost: f64, slack: f64) -> Self {
        let mut grace = Self::GRACE.max(seconds(head as f64 * cost * Self::SHARE));
        if slack >= 0.0 {
            // What computing keeps in time, waiting must not make late.
            grace = grace.min(seconds(slack));
        }
        let mut left = head;
        let mut silence = Duration::ZERO;
        for stretch in stretches {
            if left == 0 {
                break;
            }
            left = left.saturating_sub(stretch.blocks);
            silence = silence.max(match stretch.known {
                // Four times what it usually takes, and two hiccups: then something has happened to it.
                Known::Speed(measured) => seconds(4.0 * measured.first().max(measured.seconds_per_block) + 2.0 * FREE),
                Known::Nothing | Known::Silent => Self::GRACE,
            });
        }
        Self { grace, per_block: seconds(cost), silence: silence.min(grace) }
    }

    /// From the start, when the first `arrived` blocks are there, the last of them since `news`.
    pub(crate) fn limit(&self, arrived: usize, news: Duration) -> Duration {
        let gained = self.per_block.saturating_mul(arrived.try_into().unwrap_or(u32::MAX));
        self.grace.saturating_add(gained).min(news.saturating_add(self.silence))
    }
}

/// A load that takes no longer than this counts as free: a scheduler's hiccup is no reason to leave a tier alone, and what
/// is loaded takes no computing away from other requests.
const FREE: f64 = 0.02;

/// Loading from the end pays when it saves this share of the time: computing meanwhile takes turns from other requests.
const WORTH: f64 = 0.1;

/// Which of the blocks that tiers hold are worth loading, and when. `recompute`: seconds to compute one block, when known.
/// `left`: seconds until the last of them must be there, when there is a deadline.
pub(crate) fn plan(stretches: &[Stretch], recompute: Option<f64>, left: Option<f64>) -> Plan {
    let total = stretches.iter().map(|stretch| stretch.blocks).sum::<usize>();
    // What follows a silent tier's blocks is of no use before the engine has computed those.
    let trusted = stretches.iter().take_while(|stretch| stretch.known != Known::Silent).map(|s| s.blocks).sum();
    let left = left.unwrap_or(f64::INFINITY);
    let Some(cost) = recompute.filter(|cost| cost.is_finite() && *cost >= 0.0) else {
        return in_time(stretches, trusted, total - trusted, left, Patience::UNKNOWN);
    };
    // What computing has to spare. With nothing to spare, nothing is free.
    let slack = left - total as f64 * cost;
    let free = slack.clamp(0.0, FREE);
    let heads = || heads(stretches, free).filter(|head| *head <= trusted);
    let by = |seconds: &dyn Fn(usize) -> f64| heads().min_by(|a, b| seconds(*a).total_cmp(&seconds(*b))).unwrap_or(0);
    let beyond = |head| (load_seconds(stretches, head, 0) - free).max(0.0) + (total - head) as f64 * cost;
    let alone = by(&beyond);
    // Asking a silent tier costs nothing: the engine computes meanwhile, and skips what arrives.
    let (mut head, mut tail) = (alone, if cost > 0.0 { total - alone.max(trusted) } else { 0 });
    if trusted == total {
        let met = |head| finish(stretches, head, meeting_point(stretches, head, cost), cost);
        let (both, one_end) = (by(&met), finish(stretches, alone, 0, cost));
        let gain = one_end - met(both);
        if gain > 0.0 && one_end > left || gain > FREE && gain > WORTH * one_end {
            (head, tail) = (both, meeting_point(stretches, both, cost));
        }
    }
    in_time(stretches, head, tail, left, Patience::of(stretches, head, cost, slack))
}

/// Only what the tiers deliver within `left` seconds: later it would be of no use, and hold up others.
fn in_time(stretches: &[Stretch], head: usize, tail: usize, left: f64, patience: Patience) -> Plan {
    let head = most(head, |head| load_seconds(stretches, head, 0) <= left);
    Plan { head, tail: most(tail, |tail| load_seconds(stretches, head, tail) <= left), patience }
}

/// The tail for which computing what lies before it takes as long as loading it, or a block less.
fn meeting_point(stretches: &[Stretch], head: usize, cost: f64) -> usize {
    let total = stretches.iter().map(|stretch| stretch.blocks).sum::<usize>();
    // More tail: later loaded, earlier computed. So the two cross once.
    most(total - head, |tail| {
        let computed = load_seconds(stretches, head, 0) + (total - head - tail) as f64 * cost;
        computed >= load_seconds(stretches, head, tail)
    })
}

/// The largest number up to `limit` that fits, when all smaller ones fit too; 0 when none does.
fn most(limit: usize, fits: impl Fn(usize) -> bool) -> usize {
    let (mut least, mut most) = (0, limit);
    while least < most {
        let middle = least.midpoint(most + 1);
        if fits(middle) {
            least = middle;
        } else {
            most = middle - 1;
        }
    }
    least
}

/// Seconds until all blocks are there: the head loaded and then the middle computed, and the tail loaded.
fn finish(stretches: &[Stretch], head: usize, tail: usize, cost: f64) -> f64 {
    let total = stretches.iter().map(|stretch| stretch.blocks).sum::<usize>();
    let computed = load_seconds(stretches, head, 0) + (total - head - tail) as f64 * cost;
    computed.max(load_seconds(stretches, head, tail))
}

/// Where the head may end with the least time. Time is convex within a stretch, bent only where the stretch's tier begins to
/// take longer than all others (and longer than what is `free`): so at that bend, or at the end.
fn heads(stretches: &[Stretch], free: f64) -> impl Iterator<Item = usize> {
    let mut heads = Vec::with_capacity(3 * stretches.len() + 1);
    let mut before = 0;
    heads.push(before);
    for stretch in stretches {
        if let Known::Speed(measured) = stretch.known
            && measured.seconds_per_block > 0.0
        {
            let asked = asked(stretches, stretch.tier, before, 0);
            let hidden = load_seconds(stretches, before, 0).max(free)
                - if asked == 0 { measured.first() } else { measured.seconds(asked) };
            // The tier's first block costs its latency and nothing more.
            let first = f64::from(u8::from(asked == 0));
            let bend = (hidden / measured.seconds_per_block).floor() + first;
            // The bend lies between two blocks.
            heads.extend([bend, bend + 1.0].map(|at| before + at.clamp(1.0, stretch.blocks as f64) as usize));
        }
        before += stretch.blocks;
        heads.push(before);
    }
    heads.into_iter()
}

/// Seconds until the first `head` and the last `tail` blocks are there: the tiers work at the same time.
fn load_seconds(stretches: &[Stretch], head: usize, tail: usize) -> f64 {
    let times = stretches.iter().map(|stretch| match stretch.known {
        Known::Speed(measured) => measured.seconds(asked(stretches, stretch.tier, head, tail)),
        // Not measured: assumed to be at once, so that it is tried; patience bounds what that can cost.
        Known::Nothing | Known::Silent => 0.0,
    });
    times.fold(0.0, f64::max)
}

/// How many of the first `head` and the last `tail` blocks come from `tier`.
fn asked(stretches: &[Stretch], tier: usize, head: usize, tail: usize) -> usize {
    let total: usize = stretches.iter().map(|stretch| stretch.blocks).sum();
    let mut start = 0;
    let mut asked = 0;
    for stretch in stretches {
        let end = start + stretch.blocks;
        if stretch.tier == tier {
            asked += end.min(head).saturating_sub(start) + end.saturating_sub(start.max(total - tail));
        }
        start = end;
    }
    asked
}

fn seconds(seconds: f64) -> Duration {
    Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX)
}

#[cfg(test)]
mod tests;
