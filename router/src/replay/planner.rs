//! The planner in a replay: the live one's own, asked as often, on virtual time.

use crate::control::rebalance::{Controller, INTERVAL};
use crate::fleet::Worker;
use crate::load::Totals;
use crate::policy::planner::{RoleChange, Settings};
use std::sync::Arc;
use tokio::time::Instant;

/// Looks at what requests ask and what workers can do.
pub(super) struct Advisor {
    targets: Settings,
    controller: Controller,
    totals: Totals,
}

impl Advisor {
    pub(super) fn new(targets: Settings) -> Self {
        Self { targets, controller: Controller::default(), totals: Totals::default() }
    }

    /// A prompt was placed that has so many tokens to compute.
    pub(super) fn placed(&self, tokens: u64) {
        self.totals.prompt(tokens);
    }

    /// An answer has ended. Its tokens are counted all at once, where a live router counts them as they pass.
    pub(super) fn ended(&self, tokens: u64) {
        self.totals.output(tokens as usize);
    }

    /// Who shall change sides, if anybody. `routers`: how many see a part of the requests each.
    pub(super) fn look(
        &mut self,
        routers: usize,
        members: &[Arc<Worker>],
        start: Instant,
        now: Instant,
    ) -> Option<RoleChange> {
        let members: Vec<&Worker> = members.iter().map(|member| &**member).collect();
        let (totals, seconds) = (self.totals.now(), INTERVAL.as_secs_f64());
        let need = self.controller.measure(totals, seconds, routers as f64, &members, &self.targets, now)?;
        self.controller.role_change(&need, &members, start, now)
    }
}
