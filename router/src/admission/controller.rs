//! Decides what becomes of each request at admission. Pure: workers and time are passed in, and nothing is sent. The
//! router and `blockyard replay` use the same code.
//!
//! A queued request is rerouted when its worker has left, and when that may pay: another worker is idle, or another
//! worker would meet a deadline that its own would miss. A request that will exceed the limit on the time in the
//! queue, by the drain rate measured so far, is rejected at the same moments.

use super::queue::{Enqueued, FairQueue, Rejection};
use super::saturation::{Opening, Saturation, Stage, queue_time, saturation, takes_late};
use super::settings::{LateRequests, Settings};
use super::ticket::{QueuedRequest, Route};
use crate::fleet::{FleetSnapshot, Worker};
use crate::load::Demand;
use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;

/// The queue, and the time of the last poll for reroutes and predicted timeouts.
#[derive(Default)]
pub(crate) struct AdmissionController {
    pub(super) queue: FairQueue,
    polled: Option<Instant>,
}

/// What decisions are based on.
#[derive(Clone, Copy)]
pub(crate) struct Context<'a> {
    pub(crate) limits: &'a Settings,
    /// Target of the time between tokens (`router.slo.itl`), if there is one.
    pub(crate) itl: Option<Duration>,
    pub(crate) fleet: &'a FleetSnapshot,
    pub(crate) now: Instant,
}

/// A request that was not rejected.
pub(crate) struct Accepted {
    /// Identifies the request in the queue and while it runs.
    pub(crate) number: u64,
    /// Why it waits; `None`: it was admitted at once.
    pub(crate) queue_reason: Option<&'static str>,
    /// Queued requests that were rejected in its favour.
    pub(crate) shed: Vec<(u64, Resolution)>,
}

/// What becomes of a queued request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Resolution {
    Admit,
    /// Place it again, and queue it with [`AdmissionController::requeue`].
    Reroute,
    Reject(Rejection),
}

/// Interval of polls. Some changes come with time and without a notification: a worker stops reporting, a circuit
/// breaker closes. They are not urgent.
pub(crate) const POLL_INTERVAL: Duration = Duration::from_millis(250);

impl AdmissionController {
    /// Admits a new request, queues it, or rejects it.
    pub(crate) fn admit_or_queue(
        &mut self,
        context: Context<'_>,
        request: &QueuedRequest,
    ) -> Result<Accepted, Rejection> {
        let Context { limits, now, .. } = context;
        let state = route_state(context, &self.queue, request.route, Some(request.reserved));
        let queue_reason = match state {
            Err(saturation) => saturation.name(),
            Ok(_) if self.queue.is_empty() => "tenant",
            Ok(_) => "behind_others",
        };
        match self.queue.admit_or_queue(limits, request.clone(), state.ok(), now) {
            Enqueued::Immediate(number) => Ok(Accepted { number, queue_reason: None, shed: Vec::new() }),
            Enqueued::Queued { number, shed } => {
                let rejected = |(number, request): (_, QueuedRequest)| {
                    (number, Resolution::Reject(Rejection::Shed(self.queue.retry_after(limits, &request, now))))
                };
                let shed = shed.into_iter().map(rejected).collect();
                Ok(Accepted { number, queue_reason: Some(queue_reason), shed })
            }
            Enqueued::Rejected(rejection) => Err(rejection),
        }
    }

    /// Admits a request without queueing it: another choice of a prompt that was admitted before.
    pub(super) fn admit_now(&mut self, request: &QueuedRequest) -> u64 {
        self.queue.admit_now(request)
    }

    /// Queues a rerouted request again. It keeps its number, and so its position.
    pub(crate) fn requeue(&mut self, limits: &Settings, number: u64, request: QueuedRequest) {
        self.queue.insert(limits, number, request);
    }

    /// Resolutions of queued requests, in the order in which they are to take effect. Called after each change and at
    /// least every [`POLL_INTERVAL`].
    pub(crate) fn dispatch_ready(&mut self, context: Context<'_>) -> Vec<(u64, Resolution)> {
        let Context { limits, fleet, now, .. } = context;
        let mut resolutions: Vec<(u64, Resolution)> = Vec::new();
        if self.queue.is_empty() {
            return resolutions;
        }
        while let Some((number, request)) = self.queue.pop_expired(now) {
            let late = request.start_by.is_some_and(|start_by| start_by < request.queue_deadline);
            let why = if late {
                Rejection::DeadlineExceeded
            } else {
                Rejection::QueueTimeout(self.queue.retry_after(limits, &request, now))
            };
            resolutions.push((number, Resolution::Reject(why)));
        }
        for number in self.queue.late(now) {
            match limits.late_requests {
                // Another worker may still be in time. If not, it is placed as a late request.
                LateRequests::Last => self.reroute(vec![number], &mut resolutions),
                LateRequests::Reject => {
                    let Some(request) = self.queue.reject(number) else { continue };
                    let after = self.queue.retry_after(limits, &request, now);
                    resolutions.push((number, Resolution::Reject(Rejection::Late(after))));
                }
            }
        }
        let is_due = self.polled.is_none_or(|at| at + POLL_INTERVAL <= now);
        if is_due {
            self.polled = Some(now);
            for model in self.queue.models() {
                let sequences = |member: &Arc<Worker>| {
                    u64::from(member.load.stats(now).sequences).saturating_sub(not_sent(&self.queue, member).sequences)
                };
                let running = schedulable_workers(fleet, &model).map(sequences).sum();
                self.queue.set_running(&model, running);
            }
            for (number, request) in self.queue.pop_predicted_timeouts(now).into_iter().rev() {
                let after = self.queue.retry_after(limits, &request, now);
                resolutions.push((number, Resolution::Reject(Rejection::PredictedTimeoutQueued(after))));
            }
        }
        self.reroute_from_unavailable(fleet, now, &mut resolutions);
        let mut known = HashMap::new();
        while let Some(number) = self.queue.admit_next(limits, now, |queue, route| {
            *known.entry(route).or_insert_with(|| route_state(context, queue, route, None).ok())
        }) {
            known.clear();
            resolutions.push((number, Resolution::Admit));
        }
        if is_due {
            self.reroute_to_idle(context, &mut resolutions);
        }
        resolutions
    }

    /// Removes a request that has ended, in whatever state. Returns whether it was queued.
    pub(crate) fn leave(&mut self, number: u64) -> bool {
        self.queue.leave(number).is_some()
    }

    /// Has these queued requests placed again.
    fn reroute(&mut self, these: Vec<u64>, resolutions: &mut Vec<(u64, Resolution)>) {
        for number in these {
            self.queue.begin_reroute(number);
            resolutions.push((number, Resolution::Reroute));
        }
    }

    /// Reroutes requests whose worker has left, is cordoned or is ejected. Those of an ejected worker are rerouted at
    /// most once per [`POLL_INTERVAL`]: it may be the only worker.
    fn reroute_from_unavailable(
        &mut self,
        fleet: &FleetSnapshot,
        now: Instant,
        resolutions: &mut Vec<(u64, Resolution)>,
    ) {
        let gone = |id| fleet.get(id).is_none() || fleet.is_cordoned(id);
        let avoided = |id| fleet.get(id).is_some_and(|member| member.is_ejected(now));
        if self.queue.awaited_workers().any(|id| gone(id) || avoided(id)) {
            let at = |route: &Route, of: &dyn Fn(_) -> bool| of(route.decode) || route.prefill.is_some_and(of);
            let misplaced = |request: &QueuedRequest| {
                at(&request.route, &gone) || (request.placed + POLL_INTERVAL <= now && at(&request.route, &avoided))
            };
            self.reroute(self.queue.select(usize::MAX, misplaced), resolutions);
        }
    }

    /// Reroutes as many requests as there are idle workers, which may then get them; and, while other workers have
    /// capacity, as many requests as there are such workers that would miss their deadline or target where they are and
    /// meet it on one of these. Late requests go to workers that take them: they wait without a reservation, so
    /// placement does not spread them.
    fn reroute_to_idle(&mut self, context: Context<'_>, resolutions: &mut Vec<(u64, Resolution)>) {
        let Context { fleet, now, .. } = context;
        for model in self.queue.models() {
            let stale = |request: &QueuedRequest| request.model == model && request.placed + POLL_INTERVAL <= now;
            self.reroute(self.queue.select(idle_workers(fleet, &model, now), stale), resolutions);
            let opening = |member: &Arc<Worker>| {
                let route = Route { decode: member.id(), prefill: None };
                let opening = route_state(context, &self.queue, route, None).ok()?;
                Some(opening).filter(|_| member.decodes() && !member.is_ejected(now))
            };
            let openings: Vec<Opening> = schedulable_workers(fleet, &model).filter_map(opening).collect();
            let spare = openings.iter().filter(|opening| opening.takes_late).count();
            self.reroute(self.queue.select(spare, |request| request.is_late && stale(request)), resolutions);
            let queue = &self.queue;
            let Some(quickest) = openings.iter().map(|opening| opening.queue_time).min() else { continue };
            let late = |request: &QueuedRequest| {
                let by = |start_by| {
                    now + quickest <= start_by && start_by < now + route_queue_time(fleet, queue, request.route, now)
                };
                stale(request) && request.start_by.is_some_and(by)
            };
            self.reroute(queue.select(openings.len(), late), resolutions);
        }
    }
}

/// Workers of a model that are not cordoned.
fn schedulable_workers<'a>(fleet: &'a FleetSnapshot, model: &'a str) -> impl Iterator<Item = &'a Arc<Worker>> {
    fleet.workers().filter(move |member| *member.instance.model.id == *model && !fleet.is_cordoned(member.id()))
}

/// Number of idle workers of a model.
fn idle_workers(fleet: &FleetSnapshot, model: &str, now: Instant) -> usize {
    let is_idle = |member: &&Arc<Worker>| {
        let stats = member.load.stats(now);
        stats.waiting_tokens == 0 && stats.sequences == 0 && !member.is_ejected(now)
    };
    schedulable_workers(fleet, model).filter(is_idle).count()
}

/// A route with capacity, or why it has none. `own`: reservations of the request itself when
/// it is not in the queue.
fn route_state(
    Context { itl, fleet, now, .. }: Context<'_>,
    queue: &FairQueue,
    route: Route,
    own: Option<[Demand; 2]>,
) -> Result<Opening, Saturation> {
    let own = own.unwrap_or_default();
    let at = |id, own: Demand, stage| {
        // There is no reason to wait for a worker without load reports.
        let Some(member) = fleet.get(id).filter(|member| !member.load.is_silent(now)) else {
            return Ok(Opening { queue_time: Duration::ZERO, takes_late: true });
        };
        let not_sent = not_sent(queue, member).plus(own);
        let stats = member.load.stats(now);
        // An estimate that is not based on measurements does not close a route.
        let queue_time = if member.has_measured_prefill() { queue_time(&stats, not_sent) } else { Duration::ZERO };
        let takes_late = takes_late(&stats, not_sent, queue_time);
        let opening = Opening { queue_time, takes_late };
        let itl = itl.and_then(|itl| fleet.pool(&member.instance.model.id)?.itl_target(itl.as_secs_f64()));
        saturation(member.instance.role, &stats, member.max_num_seqs(), not_sent, stage, itl).map_or(Ok(opening), Err)
    };
    match route.prefill {
        None => at(route.decode, own[0], Stage::Whole),
        Some(prefill) => {
            let decode = at(route.decode, own[0], Stage::Decode)?;
            let prefill = at(prefill, own[1], Stage::Prefill)?;
            Ok(Opening { takes_late: prefill.takes_late && decode.takes_late, ..prefill })
        }
    }
}

/// Queue time of a route, whether or not it has capacity.
fn route_queue_time(fleet: &FleetSnapshot, queue: &FairQueue, route: Route, now: Instant) -> Duration {
    let member = fleet.get(route.prefill.unwrap_or(route.decode));
    member.map_or(Duration::ZERO, |member| queue_time(&member.load.stats(now), not_sent(queue, member)))
}

/// Reservations of requests that wait in this router or in another: the worker does not have them yet, and they must
/// not keep each other waiting.
fn not_sent(queue: &FairQueue, member: &Worker) -> Demand {
    queue.reserved(member.id()).plus(member.load.remote())
}
