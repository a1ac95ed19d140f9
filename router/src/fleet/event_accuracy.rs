//! Whether what a worker announces can be believed: judged by what it answers. Pure.
//!
//! ```text
//!            answers, and no event tells of what it computed ──▶ approximate: silent
//!   exact ──                                                        │ an event came ──▶ exact
//!            half of its last answers differ from its events ──▶ approximate: lies, or unannounced
//!                                                                   │ they agree again ──▶ exact
//! ```
//! Whoever is not believed is known by what was sent to it; see [`Sent`](super::sent_blocks::Sent). What it announces is
//! followed all the same, so that it can be believed again.

use std::time::Duration;
use tokio::time::Instant;

/// What a worker is known by.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub(crate) enum Mode {
    /// Its events.
    #[default]
    Exact,
    /// What was sent there, with the reason why.
    Approximate(Reason),
}

/// Why a worker's events say too little.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Reason {
    /// There are none.
    Silent,
    /// It answers from blocks that no event told of: they are lost, or name blocks of another size.
    Unannounced,
    /// It does not find what its events told of.
    Lies,
}

/// What is held for and against a worker.
#[derive(Debug, Default)]
pub(crate) struct Trust {
    mode: Mode,
    /// The last event.
    announced: Option<Instant>,
    /// Since when an event is due.
    owed: Option<Instant>,
    /// The latest answers, the newest lowest: which differed from the events, and which of those found more.
    wrong: u16,
    more: u16,
    answers: u32,
}

/// An event is due at once; a slow plane takes a second, and a lost one is repaired within two.
const SILENT_AFTER: Duration = Duration::from_secs(5);
/// Answers that count.
const WINDOW: u32 = u16::BITS;
/// So many wrong ones of them are no accident: eviction between a decision and its turn, and events that are late, spoil one in
/// ten on a full fleet; a wrong block size spoils all.
const WRONG: u32 = 8;
/// So few are as good as it gets.
const RIGHT: u32 = 2;

impl Mode {
    /// The label in metrics.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Exact => "events",
            Self::Approximate(_) => "estimated",
        }
    }

    /// The labels in metrics.
    pub(crate) const NAMES: [&'static str; 2] = ["events", "estimated"];

    /// What an explanation says of it, unless all is well.
    pub(crate) const fn remark(self) -> Option<&'static str> {
        match self {
            Self::Exact => None,
            Self::Approximate(Reason::Silent) => Some("estimated: publishes no KV events"),
            Self::Approximate(Reason::Unannounced) => {
                Some("estimated: reports hits on blocks that its KV events do not contain; check its block size")
            }
            Self::Approximate(Reason::Lies) => Some("estimated: reports no hits on blocks that its KV events contain"),
        }
    }
}

impl Trust {
    /// An event came, or a snapshot that tells of some.
    pub(crate) fn announced(&mut self, now: Instant) {
        self.announced = Some(now);
        self.owed = None;
    }

    /// Whether no event ever came.
    pub(crate) fn never_announced(&self) -> bool {
        self.announced.is_none()
    }

    /// The worker has computed blocks that it had not announced, for a request that was placed then: an event is due.
    pub(crate) fn computed(&mut self, placed: Instant, now: Instant) {
        if self.announced.is_none_or(|at| at < placed) {
            self.owed.get_or_insert(now);
        }
    }

    /// An answer: tokens cached, as announced and as found. Less than a block is no difference, and neither is what is
    /// nearer to the truth than half.
    pub(crate) fn answered(&mut self, announced: u64, found: u64, block_size: u64) {
        let most = announced.max(found);
        if most < block_size {
            return;
        }
        let differs = announced.abs_diff(found);
        let wrong = differs > block_size && 2 * differs > most;
        self.wrong = self.wrong << 1 | u16::from(wrong);
        self.more = self.more << 1 | u16::from(wrong && found > announced);
        self.answers += 1;
    }

    /// How the worker is to be known from now on, when that changes.
    pub(crate) fn judge(&mut self, now: Instant) -> Option<Mode> {
        let silent = self.owed.is_some_and(|since| now.saturating_duration_since(since) >= SILENT_AFTER);
        let wrong = self.wrong.count_ones();
        let mode = match self.mode {
            Mode::Exact if silent || (wrong >= WRONG && self.never_announced()) => Mode::Approximate(Reason::Silent),
            Mode::Exact if wrong >= WRONG && 2 * self.more.count_ones() >= wrong => {
                Mode::Approximate(Reason::Unannounced)
            }
            Mode::Exact if wrong >= WRONG => Mode::Approximate(Reason::Lies),
            Mode::Approximate(Reason::Silent) if self.owed.is_none() && !self.never_announced() => Mode::Exact,
            Mode::Approximate(Reason::Unannounced | Reason::Lies) if self.answers >= WINDOW && wrong <= RIGHT => {
                Mode::Exact
            }
            same => same,
        };
        if mode == self.mode {
            return None;
        }
        *self = Self { mode, announced: self.announced, owed: self.owed, ..Self::default() };
        Some(mode)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn after(trust: &mut Trust, answers: u32, announced: u64, found: u64) -> Option<Mode> {
        (0..answers).for_each(|_| trust.answered(announced, found, 16));
        trust.judge(Instant::now())
    }

    fn heard() -> Trust {
        let mut trust = Trust::default();
        trust.announced(Instant::now());
        trust
    }

    #[test]
    fn half_of_the_last_answers_wrong_is_too_much_whichever_way() {
        for (announced, found, reason) in [(160, 0, Reason::Lies), (0, 160, Reason::Unannounced)] {
            let mut trust = heard();
            assert_eq!(after(&mut trust, 20, 160, 160), None);
            assert_eq!(after(&mut trust, WRONG - 1, announced, found), None);
            assert_eq!(after(&mut trust, 1, announced, found), Some(Mode::Approximate(reason)));
            assert_eq!(after(&mut trust, 5, announced, found), None, "said once");
        }
    }

    #[test]
    fn what_is_evicted_in_between_or_less_than_a_block_is_no_lie() {
        let mut trust = heard();
        for _ in 0..100 {
            trust.answered(160, 100, 16);
            trust.answered(16, 0, 16);
            trust.answered(0, 15, 16);
            assert_eq!(trust.judge(Instant::now()), None);
        }
        for _ in 0..50 {
            assert_eq!(after(&mut trust, 1, 160, 0), None);
            assert_eq!(after(&mut trust, 3, 160, 160), None, "one in four is what a full fleet may do");
        }
    }

    #[test]
    fn who_agrees_again_for_a_while_is_believed_again() {
        let mut trust = heard();
        assert!(after(&mut trust, WRONG, 160, 0).is_some());
        assert_eq!(after(&mut trust, WINDOW - 1, 160, 160), None, "not yet");
        assert_eq!(after(&mut trust, 1, 160, 160), Some(Mode::Exact));
        assert_eq!(after(&mut trust, WRONG - 1, 160, 0), None, "and begins anew");
    }

    #[test]
    fn who_answers_and_announces_nothing_is_silent_until_an_event_comes() {
        let (mut trust, now) = (Trust::default(), Instant::now());
        assert_eq!(trust.judge(now + SILENT_AFTER), None, "nothing computed, nothing owed");
        trust.computed(now, now);
        assert_eq!(trust.judge(now), None);
        assert_eq!(trust.judge(now + SILENT_AFTER), Some(Mode::Approximate(Reason::Silent)));
        trust.announced(now + SILENT_AFTER);
        assert_eq!(trust.judge(now + SILENT_AFTER), Some(Mode::Exact));
        trust.computed(now, now + SILENT_AFTER * 2);
        assert_eq!(trust.judge(now + SILENT_AFTER * 4), None, "the event came while the prompt was computed");
    }
}
