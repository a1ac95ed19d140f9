//! The phases of one onboarding, shared by the engine's handle ([`super::Onboarding`]) and its load
//! ([`super::load::Loading`]).
//!
//! ```text
//!            start_waiting             wait_for                proceed
//!   Prefetching ───────────▶ Started ────────────▶ Waiting ──────────────▶ Computing
//!     │                         │                  │    ▲                      ▲
//!     │                         │                  └────┘ wait_for             │
//!     └─────────────────────────┴──────── proceed: the load has ended ─────────┘
//! ```
//!
//! The engine makes the first transition, the load all others. While the phase is `Prefetching`, the load takes as long
//! as it needs. In `Started` it is to make a plan, or follows another load. In `Waiting` it loads the head, for as long
//! as that is faster than computing it, and plans again from time to time. In `Computing` it loads what is left from
//! the end, until the engine meets it.

use crate::manager::plan::WaitBudget;
use tokio::time::Instant;

/// What the engine and the load of one onboarding do.
#[derive(Clone, Copy, PartialEq, Debug, Default)]
pub(super) enum Phase {
    /// The engine is busy with other requests.
    #[default]
    Prefetching,
    /// The engine could compute since this time, and waits. There is no plan yet.
    Started(Instant),
    /// The engine waits for the head of a plan.
    Waiting(Wait),
    /// The engine computes, or should.
    Computing,
}

/// When the engine could begin to compute, and how many leading blocks were in G1 then.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct WaitStart {
    pub(super) at: Instant,
    pub(super) ready: usize,
}

/// What the engine waits for, and how long.
#[derive(Clone, Copy, PartialEq, Debug)]
pub(super) struct Wait {
    pub(super) start: WaitStart,
    /// The number of leading blocks that it waits for.
    pub(super) goal: usize,
    pub(super) budget: WaitBudget,
    /// When the plan is made again.
    pub(super) review: Instant,
}

impl WaitStart {
    /// Until when to wait for more than `ready` leading blocks, the last of which arrived at `last_arrival`.
    pub(super) fn limit(&self, budget: WaitBudget, ready: usize, last_arrival: Instant) -> Instant {
        self.at + budget.limit(ready - self.ready, last_arrival.saturating_duration_since(self.at))
    }
}

impl Phase {
    /// The engine is ready for these blocks. Has no effect in a later phase.
    pub(super) fn start_waiting(&mut self, now: Instant) {
        if *self == Self::Prefetching {
            *self = Self::Started(now);
        }
    }

    /// The load has made a plan, its first one or another.
    pub(super) fn wait_for(&mut self, wait: Wait) {
        debug_assert!(matches!(self, Self::Started(_) | Self::Waiting(_)), "a plan in phase {self:?}");
        *self = Self::Waiting(wait);
    }

    /// The engine should compute now. False: it should already.
    pub(super) fn proceed(&mut self) -> bool {
        std::mem::replace(self, Self::Computing) != Self::Computing
    }

    /// Since when the engine waits, if it does.
    pub(super) fn waiting_since(&self) -> Option<Instant> {
        match self {
            Self::Started(since) => Some(*since),
            Self::Waiting(wait) => Some(wait.start.at),
            Self::Prefetching | Self::Computing => None,
        }
    }

    /// Whether the load has not planned for a waiting engine yet.
    pub(super) fn is_unplanned(&self) -> bool {
        matches!(self, Self::Prefetching | Self::Started(_))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::Duration;

    #[test]
    fn transitions_from_every_phase() {
        let now = Instant::now();
        let later = now + Duration::from_secs(1);
        let start = WaitStart { at: now, ready: 0 };
        let budget = WaitBudget { base: WaitBudget::BASE, per_block: Duration::ZERO, idle_timeout: WaitBudget::BASE };
        let wait = Wait { start, goal: 4, budget, review: later };
        let replanned = Wait { goal: 2, ..wait };
        let after = |phase: Phase, transition: &dyn Fn(&mut Phase)| {
            let mut phase = phase;
            transition(&mut phase);
            phase
        };
        for (phase, started) in [
            (Phase::Prefetching, Phase::Started(later)),
            (Phase::Started(now), Phase::Started(now)),
            (Phase::Waiting(wait), Phase::Waiting(wait)),
            (Phase::Computing, Phase::Computing),
        ] {
            assert_eq!(after(phase, &|phase| phase.start_waiting(later)), started, "start_waiting in {phase:?}");
            let notifies = phase != Phase::Computing;
            let mut proceeded = phase;
            assert_eq!(proceeded.proceed(), notifies, "proceed in {phase:?}");
            assert_eq!(proceeded, Phase::Computing);
        }
        for phase in [Phase::Started(now), Phase::Waiting(wait)] {
            assert_eq!(after(phase, &|phase| phase.wait_for(replanned)), Phase::Waiting(replanned));
            assert_eq!(phase.waiting_since(), Some(now));
        }
    }
}
