//! Has the planner's advice measured, shown, and followed.
//!
//! What requests ask is counted as they pass ([traffic](crate::load::Traffic)), what workers can do is in their reports. Every few seconds the
//! [planner](crate::policy::planner) looks at both, per model. Its counts are metrics, for whoever starts and stops workers; its flips
//! are wishes on the event plane, which the workers obey. Of several routers the first by name plans, for all of them.

use crate::fleet::{Member, Serving};
use crate::policy::planner::{Capacity, Demand, Flip, Mode, Need, Planner, Seat, Settings, Targets};
use crate::state::Core;
use kvbm::Epoch;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use tokio::time::{Instant, MissedTickBehavior};
use worker::plane::{Event, EventBody, Events, Phase, RouterId, Source};

/// What is known of one model's workers and requests.
#[derive(Default)]
pub(crate) struct Watched {
    before: [u64; 3],
    rates: Option<[f64; 3]>,
    steps: Line,
    planner: Planner,
}

/// A straight line through measurements that fade: seconds of a step over sequences in it.
#[derive(Default)]
struct Line {
    weight: f64,
    x: f64,
    y: f64,
    xx: f64,
    xy: f64,
}

/// Rates change within tens of seconds; twelve looks a minute are enough, and cost nothing.
pub(crate) const EVERY: Duration = Duration::from_secs(5);
/// How much of the old rates is left after a look: half after 20 s.
const FADE: f64 = 0.84;

impl Watched {
    /// Rates by the totals after `seconds`, of which this router saw one part in `routers`.
    fn rates(&mut self, totals: [u64; 3], seconds: f64, routers: f64) -> [f64; 3] {
        let fresh: [f64; 3] = std::array::from_fn(|i| (totals[i] - self.before[i]) as f64 / seconds * routers);
        let old = self.rates.unwrap_or(fresh);
        let rates = std::array::from_fn(|i| FADE * old[i] + (1.0 - FADE) * fresh[i]);
        (self.before, self.rates) = (totals, Some(rates));
        rates
    }
}

impl Line {
    fn point(&mut self, x: f64, y: f64) {
        self.weight += 1.0;
        self.x += x;
        self.y += y;
        self.xx += x * x;
        self.xy += x * y;
    }

    fn fade(&mut self) {
        for sum in [&mut self.weight, &mut self.x, &mut self.y, &mut self.xx, &mut self.xy] {
            *sum *= FADE;
        }
    }

    /// At 0, and per unit: neither below nothing. Points that all lie at one `x` say nothing of the start, and count as if it
    /// were 0: a worker is then thought to carry fewer sequences than it does, never more.
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

/// Plans, for as long as the router lives.
pub(crate) async fn keep(core: Arc<Core>, events: Arc<dyn Events>, id: RouterId) {
    let mut watched = BTreeMap::<Arc<str>, Watched>::new();
    let (start, mut before) = (Instant::now(), Instant::now());
    let mut looks = tokio::time::interval_at(start + EVERY, EVERY);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let now = looks.tick().await;
        let seconds = (now - std::mem::replace(&mut before, now)).as_secs_f64();
        let settings = core.settings().settings.planner.clone();
        let roster = core.fleet.roster();
        for (model, totals) in core.traffic.all() {
            let known = watched.entry(model.clone()).or_default();
            let members: Vec<&Member> =
                roster.serving(&model).into_iter().flat_map(Serving::seats).map(|seat| &*seat.member).collect();
            let (totals, routers) = (totals.now(), core.metrics.replicas.get().max(1) as f64);
            let Some(need) = known.look(totals, seconds, routers, &members, &settings, now) else { continue };
            if settings.mode == Mode::Off {
                // What was advised before is advice no more.
                core.metrics.desired_workers.reset();
                continue;
            }
            let (prefill, decode) = need.whole();
            for (phase, workers) in [(Phase::Prefill, prefill), (Phase::Decode, decode)] {
                core.metrics.desired_workers.with_label_values(&[&*model, &phase.to_string()]).set(workers as i64);
            }
            if settings.mode != Mode::Apply || !core.is_leader.load(Ordering::Relaxed) {
                continue;
            }
            if let Some(flip) = known.flip(&need, &members, start, now) {
                tracing::info!(%model, worker = %flip.worker, role = %flip.to, ?need, "requesting a role change");
                core.metrics.role_changes.with_label_values(&[&flip.to.to_string()]).inc();
                let body = EventBody::Phase { worker: flip.worker, phase: flip.to };
                events.publish(Event { source: Source::Router(id), epoch: Epoch(0), body });
            }
        }
    }
}

impl Watched {
    /// Looks at everybody after `seconds`: what meets the targets, once enough is measured to say.
    pub(crate) fn look(
        &mut self,
        totals: [u64; 3],
        seconds: f64,
        routers: f64,
        members: &[&Member],
        settings: &Settings,
        now: Instant,
    ) -> Option<Need> {
        let rates = self.rates(totals, seconds, routers);
        self.need(members, rates, settings, now)
    }

    /// Who shall change sides now, if anybody.
    pub(crate) fn flip(&mut self, need: &Need, members: &[&Member], start: Instant, now: Instant) -> Option<Flip> {
        let seats: Vec<Seat> = members.iter().map(|member| seat(member, now)).collect();
        self.planner.step((now - start).as_secs_f64(), need, &seats)
    }

    fn need(&mut self, members: &[&Member], rates: [f64; 3], settings: &Settings, now: Instant) -> Option<Need> {
        self.steps.fade();
        let mut demand =
            Demand { prompts: rates[0], prompt_tokens: rates[1], output_tokens: rates[2], ..Demand::default() };
        let (mut prefill, mut blocks, mut used) = (Vec::new(), 0.0, 0.0);
        for member in members {
            let standing = member.books.standing(now);
            demand.sequences += f64::from(standing.sequences);
            used += f64::from(standing.active_blocks);
            let Some(report) = member.books.latest(now) else { continue };
            blocks += report.total_blocks as f64 / members.len() as f64;
            prefill.extend(report.prefill_tokens_per_second);
            if let Some(step) = report.decode_step_seconds.filter(|_| report.running > 0) {
                self.steps.point(f64::from(report.running), step);
            }
        }
        demand.sequence_blocks = used / demand.sequences.max(1.0);
        let (step, step_per_sequence) = self.steps.fit()?;
        let prefill = prefill.iter().sum::<f64>() / prefill.len() as f64;
        let capacity = Capacity { prefill, step, step_per_sequence, blocks };
        let targets = Targets { ttft: settings.ttft.as_secs_f64(), itl: settings.itl.as_secs_f64() };
        prefill.is_finite().then(|| Need::of(&demand, &capacity, &targets))
    }
}

fn seat(member: &Member, now: Instant) -> Seat {
    let standing = member.books.standing(now);
    Seat { id: member.id(), phase: member.instance.phase, requests: u64::from(standing.sequences + standing.prompts) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_fitted_and_never_promises_more_than_was_seen() {
        let fit = |points: &[(f64, f64)]| {
            let mut line = Line::default();
            for (x, y) in points {
                line.point(*x, *y);
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
    fn rates_fade_and_count_for_all_routers() {
        let mut watched = Watched::default();
        let first = watched.rates([50, 5_000, 500], 5.0, 2.0);
        assert!(
            first.iter().zip([20.0, 2_000.0, 200.0]).all(|(rate, wanted)| (rate - wanted).abs() < 1e-9),
            "{first:?}"
        );
        let idle = watched.rates([50, 5_000, 500], 5.0, 2.0);
        assert!((idle[0] - 20.0 * FADE).abs() < 1e-9);
    }
}
