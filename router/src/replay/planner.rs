//! The planner in a replay: the code and interval of the live one, in virtual time.

use crate::control::rebalance::{Controller, INTERVAL};
use crate::fleet::Worker;
use crate::load::Totals;
use crate::policy::planner::{RoleChange, Settings};
use std::sync::Arc;
use tokio::time::Instant;

/// Measures the demand and decides about role changes.
pub(super) struct PlannerDriver {
    settings: Settings,
    controller: Controller,
    totals: Totals,
}

impl PlannerDriver {
    pub(super) fn new(settings: Settings) -> Self {
        Self { settings, controller: Controller::default(), totals: Totals::default() }
    }

    /// A request was placed and has this many prompt tokens to compute.
    pub(super) fn prompt_placed(&self, tokens: u64) {
        self.totals.prompt(tokens);
    }

    /// A request has ended. Its output tokens are counted at once; a live router counts them as they are generated.
    pub(super) fn request_finished(&self, tokens: u64) {
        self.totals.output(tokens as usize);
    }

    /// The role change that is due, if any. `routers`: number of routers that share the requests.
    pub(super) fn decide(
        &mut self,
        routers: usize,
        workers: &[Arc<Worker>],
        start: Instant,
        now: Instant,
    ) -> Option<RoleChange> {
        let workers: Vec<&Worker> = workers.iter().map(|worker| &**worker).collect();
        let (totals, seconds) = (self.totals.now(), INTERVAL.as_secs_f64());
        let need = self.controller.measure(totals, seconds, routers as f64, &workers, &self.settings, now)?;
        self.controller.role_change(&need, &workers, start, now)
    }
}
