//! The planner in a replay: the code and interval of the live one, in virtual time.

use crate::config::Slo;
use crate::control::rebalance::{Controller, INTERVAL};
use crate::fleet::Worker;
use crate::load::Totals;
use crate::policy::planner::{Outlook, Plan, RoleChange, Settings, Targets};
use serde::Serialize;
use std::sync::Arc;
use tokio::time::Instant;

/// Measures the demand and decides about role changes.
pub(super) struct PlannerDriver {
    settings: Settings,
    targets: Targets,
    controller: Controller,
    totals: Totals,
    planned: Planned,
}

/// The largest advice of a run, and the worst expected times.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct Planned {
    /// Largest advised number of prefill workers.
    pub prefill_workers: u64,
    /// Largest advised number of decode workers.
    pub decode_workers: u64,
    /// Upper bound of both together.
    pub max_workers: u64,
    /// The mean time to first token.
    pub ttft: PlannedTarget,
    /// The time between tokens.
    pub itl: PlannedTarget,
}

/// One target in a run.
#[derive(Clone, Copy, PartialEq, Debug, Default, Serialize)]
pub struct PlannedTarget {
    /// The target, in seconds.
    pub target_s: f64,
    /// Share of the plans that miss it.
    pub missed: f64,
    /// Longest expected time of these plans, in seconds, of those in which the workers keep up with the load; 0 if
    /// there are none.
    pub expected_s: f64,
    /// Number of plans.
    #[serde(skip)]
    plans: u64,
}

impl PlannerDriver {
    pub(super) fn new(settings: &Settings, slo: &Slo) -> Self {
        let (settings, planned) = (settings.clone(), Planned::default());
        Self {
            settings,
            planned,
            targets: Targets::of(slo),
            controller: Controller::default(),
            totals: Totals::default(),
        }
    }

    /// A request was placed and has this many prompt tokens to compute.
    pub(super) fn prompt_placed(&self, tokens: u64) {
        self.totals.prompt(tokens);
    }

    /// A request has ended. Its output tokens are counted at once; a live router counts them as they are generated.
    pub(super) fn request_finished(&self, tokens: u64) {
        self.totals.output(tokens as usize);
    }

    /// The plans so far.
    pub(super) fn planned(&self) -> Planned {
        self.planned
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
        let goals = (&self.settings, &self.targets);
        let plan = self.controller.measure(totals, seconds, routers as f64, &workers, goals, now)?;
        self.planned.add(&plan);
        self.controller.role_change(&plan, &workers, start, now)
    }
}

impl Planned {
    fn add(&mut self, plan: &Plan) {
        self.prefill_workers = self.prefill_workers.max(plan.prefill_workers);
        self.decode_workers = self.decode_workers.max(plan.decode_workers);
        self.max_workers = self.max_workers.max(plan.max_workers);
        self.ttft.add(&plan.ttft);
        self.itl.add(&plan.itl);
    }

    /// The largest of several runs.
    pub(super) fn max(self, other: Self) -> Self {
        Self {
            prefill_workers: self.prefill_workers.max(other.prefill_workers),
            decode_workers: self.decode_workers.max(other.decode_workers),
            max_workers: self.max_workers.max(other.max_workers),
            ttft: self.ttft.and(other.ttft),
            itl: self.itl.and(other.itl),
        }
    }
}

impl PlannedTarget {
    fn add(&mut self, outlook: &Outlook) {
        let expected = if outlook.is_met || outlook.expected_s.is_infinite() { 0.0 } else { outlook.expected_s };
        let missed = f64::from(u8::from(!outlook.is_met));
        *self = self.and(Self { target_s: outlook.target_s, missed, expected_s: expected, plans: 1 });
    }

    fn and(self, other: Self) -> Self {
        let plans = self.plans + other.plans;
        let missed = self.missed * self.plans as f64 + other.missed * other.plans as f64;
        Self {
            target_s: self.target_s.max(other.target_s),
            missed: missed / plans.max(1) as f64,
            expected_s: self.expected_s.max(other.expected_s),
            plans,
        }
    }
}
