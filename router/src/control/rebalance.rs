//! Measures the planner's inputs, publishes its plan, and requests role changes.
//!
//! Requests are counted as they pass ([traffic](crate::load::Traffic)); reports say what workers can do. Every few
//! seconds the [planner](crate::policy::planner) reads both, per model. Its counts are metrics, for an outer
//! autoscaler; its role changes are requests on the event plane that the workers follow. Of several routers the one
//! with the lowest id plans for all.

use crate::fleet::{ModelPool, Worker};
use crate::policy::planner::{
    Capacity, Mode, Outlook, Plan, PlanStatus, PlannedWorker, Planner, RoleChange, Settings, Targets, Workload,
};
use crate::state::Core;
use kvbm::Epoch;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};
use worker::plane::{Event, EventBody, Events, Role, RouterId, Source};

/// Planner of one model, with its measurements.
#[derive(Default)]
pub(crate) struct Controller {
    previous: [u64; 3],
    rates: Option<[f64; 3]>,
    steps: LinearFit,
    planner: Planner,
    /// Names of the targets that the last plan misses, and when that was logged.
    missed: Vec<&'static str>,
    logged: Option<Instant>,
}

/// Least-squares line through exponentially decaying measurements: seconds of a step over sequences in it.
#[derive(Default)]
struct LinearFit {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

/// Interval of the planner: rates change within tens of seconds, and twelve measurements a minute cost nothing.
pub(crate) const INTERVAL: Duration = Duration::from_secs(5);
/// Shortest time between two log lines about missed targets of a model: a load at the limit would change them with
/// every plan.
const LOG_INTERVAL: Duration = Duration::from_mins(1);
/// Decay of old rates per interval: half is left after 20 s.
const DECAY: f64 = 0.84;

impl Controller {
    /// Updates the rates from totals after `seconds`. This router sees one part in `routers` of the traffic.
    fn rates(&mut self, totals: [u64; 3], seconds: f64, routers: f64) -> [f64; 3] {
        let fresh: [f64; 3] = std::array::from_fn(|i| (totals[i] - self.previous[i]) as f64 / seconds * routers);
        let old = self.rates.unwrap_or(fresh);
        let rates = std::array::from_fn(|i| DECAY * old[i] + (1.0 - DECAY) * fresh[i]);
        (self.previous, self.rates) = (totals, Some(rates));
        rates
    }
}

impl LinearFit {
    fn add(&mut self, x: f64, y: f64) {
        self.weight += 1.0;
        self.x += x;
        self.y += y;
        self.xx += x * x;
        self.xy += x * y;
    }

    fn decay(&mut self) {
        for sum in [&mut self.weight, &mut self.x, &mut self.y, &mut self.xx, &mut self.xy] {
            *sum *= DECAY;
        }
    }

    /// Intercept and slope, neither negative. Points with a single `x` do not determine the intercept, which is then 0:
    /// a worker is then assumed to carry fewer sequences than it does, never more.
    fn fit(&self) -> Option<(f64, f64)> {
        if self.weight < 0.1 || self.x <= 0.0 {
            return None;
        }
        let spread = self.xx - self.x * self.x / self.weight;
        if spread <= 1e-3 * self.xx {
            return Some((0.0, self.y / self.x));
        }
        let slope = ((self.xy - self.x * self.y / self.weight) / spread).max(0.0);
        let start = (self.y - slope * self.x) / self.weight;
        Some(if start < 0.0 { (0.0, self.xy / self.xx) } else { (start, slope) })
    }
}

/// Plans for all models, for as long as the router lives. Of the routers over the same workers, only the leader
/// requests role changes.
pub(crate) async fn run(core: Arc<Core>, events: Arc<dyn Events>, id: RouterId, is_leader: Arc<AtomicBool>) {
    let mut controllers = BTreeMap::<Arc<str>, Controller>::new();
    let (start, mut previous) = (Instant::now(), Instant::now());
    let mut ticks = tokio::time::interval_at(start + INTERVAL, INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let now = ticks.tick().await;
        let seconds = (now - std::mem::replace(&mut previous, now)).as_secs_f64();
        let resolved = core.settings();
        let (settings, targets) = (&resolved.settings.planner, Targets::of(&resolved.settings.slo));
        let fleet = core.fleet.snapshot();
        for (model, totals) in core.traffic.all() {
            let controller = controllers.entry(model.clone()).or_default();
            let workers: Vec<&Worker> =
                fleet.pool(&model).into_iter().flat_map(ModelPool::entries).map(|entry| &*entry.worker).collect();
            let (totals, routers) = (totals.now(), core.metrics.replicas.get().max(1) as f64);
            let plan = controller.measure(totals, seconds, routers, &workers, (settings, &targets), now);
            let Some(plan) = plan else { continue };
            if settings.mode == Mode::Off {
                // An old plan must not stay in the metrics.
                core.metrics.remove_plans();
                core.plans.lock().clear();
                continue;
            }
            publish(&core, &model, &plan);
            let slo = resolved.settings.slo;
            let is_set = |target: &str| if target == "ttft" { slo.ttft.is_some() } else { slo.itl.is_some() };
            controller.log(&model, &plan, now, is_set);
            if settings.mode != Mode::Apply || !is_leader.load(Ordering::Relaxed) {
                continue;
            }
            if let Some(change) = controller.role_change(&plan, &workers, start, now) {
                let RoleChange { worker, to } = change;
                tracing::info!(
                    %model, %worker, role = %to,
                    needed_prefill_workers = plan.need.prefill, needed_decode_workers = plan.need.decode,
                    "requesting a role change"
                );
                core.metrics.role_changes.with_label_values(&[&change.to.to_string()]).inc();
                let body = EventBody::RoleRequest { worker: change.worker, role: change.to };
                events.publish(Event { source: Source::Router(id), epoch: Epoch(0), body });
            }
        }
    }
}

/// Shows a plan in the metrics and to [`crate::Router::plans`].
fn publish(core: &Core, model: &Arc<str>, plan: &Plan) {
    for (role, workers) in [(Role::Prefill, plan.prefill_workers), (Role::Decode, plan.decode_workers)] {
        core.metrics.desired_workers.with_label_values(&[&**model, &role.to_string()]).set(workers as i64);
    }
    for (target, outlook) in plan.outlooks() {
        core.metrics.planner_expected.with_label_values(&[&**model, target]).set(outlook.expected_s);
        core.metrics.planner_missed.with_label_values(&[&**model, target]).set(i64::from(!outlook.is_met));
    }
    core.plans.lock().insert(model.clone(), plan.status(model));
}

impl Controller {
    /// Logs that a target is missed with the advised workers, or no longer, when that changes. Only configured targets,
    /// which `is_set` selects: no configuration sets the others, and the metrics show them.
    fn log(&mut self, model: &str, plan: &Plan, now: Instant, is_set: impl Fn(&str) -> bool) {
        let outlooks = missed_targets(plan.outlooks(), is_set);
        let missed: Vec<&str> = outlooks.iter().map(|(name, _)| *name).collect();
        if missed == self.missed || self.logged.is_some_and(|at| now - at < LOG_INTERVAL) {
            return;
        }
        self.logged = Some(now);
        let PlanStatus { prefill_workers, decode_workers, max_workers, .. } = plan.status(model);
        for (target, outlook) in outlooks {
            tracing::warn!(
                %model, target, target_s = outlook.target_s, expected_s = outlook.expected_s, least_s = outlook.least_s,
                prefill_workers, decode_workers, max_workers, advice = advice(target, &outlook),
                "a latency target is missed even with the number of workers that the planner advises"
            );
        }
        if missed.is_empty() {
            tracing::info!(%model, prefill_workers, decode_workers, "the plan meets its targets again");
        }
        self.missed = missed;
    }

    /// Updates the measurements after `seconds`. Returns the plan, once enough is measured.
    pub(crate) fn measure(
        &mut self,
        totals: [u64; 3],
        seconds: f64,
        routers: f64,
        workers: &[&Worker],
        goals: (&Settings, &Targets),
        now: Instant,
    ) -> Option<Plan> {
        let rates = self.rates(totals, seconds, routers);
        self.plan(workers, rates, goals, now)
    }

    /// The next role change, if one is due.
    pub(crate) fn role_change(
        &mut self,
        plan: &Plan,
        workers: &[&Worker],
        start: Instant,
        now: Instant,
    ) -> Option<RoleChange> {
        let planned: Vec<PlannedWorker> = workers.iter().map(|worker| planned_worker(worker, now)).collect();
        self.planner.step((now - start).as_secs_f64(), &plan.need, &planned)
    }

    fn plan(
        &mut self,
        workers: &[&Worker],
        rates: [f64; 3],
        (settings, targets): (&Settings, &Targets),
        now: Instant,
    ) -> Option<Plan> {
        self.steps.decay();
        let mut workload =
            Workload { prompts: rates[0], prompt_tokens: rates[1], output_tokens: rates[2], ..Workload::default() };
        let (mut prefill, mut blocks, mut used) = (Vec::new(), 0.0, 0.0);
        for worker in workers {
            let stats = worker.load.stats(now);
            workload.sequences += f64::from(stats.sequences);
            used += f64::from(stats.active_blocks);
            let Some(report) = worker.load.latest(now) else { continue };
            blocks += report.total_blocks as f64 / workers.len() as f64;
            prefill.extend(report.prefill_tokens_per_second);
            if let Some(step) = report.decode_step_seconds.filter(|_| report.running > 0) {
                self.steps.add(f64::from(report.running), step);
            }
        }
        workload.sequence_blocks = used / workload.sequences.max(1.0);
        let (step, step_per_sequence) = self.steps.fit()?;
        let prefill = prefill.iter().sum::<f64>() / prefill.len() as f64;
        let capacity = Capacity { prefill, step, step_per_sequence, blocks };
        let plan = || Plan::of(&workload, &capacity, targets, workers.len(), settings.max_workers);
        prefill.is_finite().then(plan)
    }
}

/// The configured targets that the plan misses.
fn missed_targets(
    outlooks: [(&'static str, Outlook); 2],
    is_set: impl Fn(&str) -> bool,
) -> Vec<(&'static str, Outlook)> {
    outlooks.into_iter().filter(|(target, outlook)| !outlook.is_met && is_set(target)).collect()
}

/// What to change about a target that is missed with the advised workers, by the keys of the configuration.
fn advice(target: &str, outlook: &Outlook) -> String {
    let Outlook { target_s, least_s, .. } = *outlook;
    if least_s > target_s {
        format!("no number of workers meets router.slo.{target}; increase it to more than {least_s:.3} s")
    } else {
        format!(
            "router.slo.{target} needs more workers than the planner asks for; increase router.planner.max_workers \
             (default: twice the workers that there are)"
        )
    }
}

fn planned_worker(worker: &Worker, now: Instant) -> PlannedWorker {
    let stats = worker.load.stats(now);
    PlannedWorker { id: worker.id(), role: worker.instance.role, requests: u64::from(stats.sequences + stats.prompts) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_fit_never_exceeds_what_was_measured() {
        let fit = |points: &[(f64, f64)]| {
            let mut line = LinearFit::default();
            for (x, y) in points {
                line.add(*x, *y);
            }
            line.fit().map(|(start, slope)| ((start * 1e6).round() / 1e6, (slope * 1e6).round() / 1e6))
        };
        assert_eq!(fit(&[]), None);
        assert_eq!(fit(&[(10.0, 0.02), (30.0, 0.04)]), Some((0.01, 0.001)));
        assert_eq!(fit(&[(10.0, 0.02), (10.0, 0.02)]), Some((0.0, 0.002)), "nothing is known of smaller batches");
        assert_eq!(fit(&[(10.0, 0.04), (30.0, 0.02)]), Some((0.03, 0.0)), "more sequences cost at least nothing");
        assert_eq!(fit(&[(10.0, 0.0), (20.0, 0.1)]).map(|(start, _)| start), Some(0.0));
    }

    #[test]
    fn a_missed_target_names_the_key_to_change() {
        let missed = |least_s: f64| Outlook { target_s: 1.0, expected_s: 9.0, least_s, is_met: false };
        let (bounded, unattainable) = (advice("ttft", &missed(0.5)), advice("itl", &missed(2.0)));
        assert!(bounded.contains("router.slo.ttft") && bounded.contains("router.planner.max_workers"), "{bounded}");
        assert!(unattainable.contains("router.slo.itl") && !unattainable.contains("max_workers"), "{unattainable}");
    }

    #[test]
    fn only_targets_that_are_configured_are_reported_as_missed() {
        let missed = Outlook { target_s: 1.0, expected_s: 9.0, least_s: 0.5, is_met: false };
        let names = |is_set: fn(&str) -> bool| {
            let missed = missed_targets([("ttft", missed), ("itl", missed)], is_set);
            missed.into_iter().map(|(name, _)| name).collect::<Vec<_>>()
        };
        assert!(names(|_| false).is_empty());
        assert_eq!(names(|target| target == "itl"), ["itl"]);
        assert_eq!(names(|_| true), ["ttft", "itl"]);
        let met = Outlook { is_met: true, ..missed };
        assert!(missed_targets([("ttft", met), ("itl", met)], |_| true).is_empty());
    }

    #[test]
    fn rates_decay_and_count_for_all_routers() {
        let mut controller = Controller::default();
        let first = controller.rates([50, 5_000, 500], 5.0, 2.0);
        assert!(
            first.iter().zip([20.0, 2_000.0, 200.0]).all(|(rate, wanted)| (rate - wanted).abs() < 1e-9),
            "{first:?}"
        );
        let idle = controller.rates([50, 5_000, 500], 5.0, 2.0);
        assert!((idle[0] - 20.0 * DECAY).abs() < 1e-9);
    }
}
