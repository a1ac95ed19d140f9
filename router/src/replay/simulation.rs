//! The event loop of a replay: a heap of events, ordered by time and then by the order of scheduling.

mod copies;

use self::copies::Copying;
use super::engine::{Effects, Engine, Environment, Schedule};
use super::lru::Lru;
use super::plane::{EventPlane, Message};
use super::results::{Histogram, RequestRecord, RunOutcome};
use super::router::{Action, SimulatedRouter};
use super::trace::RequestSpec;
use super::{AdmissionMode, Options, PolicyUnderTest, Profile, Trace};
use crate::admission::Stage;
use crate::control::rebalance::INTERVAL;
use crate::hash::splitmix64;
use crate::index::NoAddresses;
use crate::policy::planner::RoleChange;
use kvbm::Level;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use std::io;
use worker::plane::{ReservationUpdate, Role, WorkerId};

/// One run: one policy at one rate with one seed. Times are nanoseconds of virtual time.
pub(super) struct Simulation<'a> {
    requests: &'a [RequestSpec],
    profile: &'a Profile,
    event_delay_ns: u64,
    resync_delay_ns: u64,
    /// Every router receives every event and report. A request belongs to one router.
    routers: Vec<SimulatedRouter>,
    seed: u64,
    plane: EventPlane,
    /// Messages between routers in transit, with the sender, in order.
    router_messages: VecDeque<(usize, Vec<ReservationUpdate>)>,
    workers: Vec<Worker>,
    environment: Environment,
    /// Events and reports in transit. All have the same delay, so they arrive in the order of sending.
    in_transit: VecDeque<InTransit>,
    /// Arrivals still to come, the latest first. An arrival precedes other events of the same time.
    arrivals: Vec<(u64, u32)>,
    events: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled_count: u64,
    effects: Effects,
    records: Vec<RequestRecord>,
    inter_token_gaps: Histogram,
    unfinished: usize,
    /// Number of requests that are too long for every worker.
    too_long: usize,
    has_admission: bool,
    /// Whether some workers have the role prefill or decode.
    disaggregated: bool,
    /// Number of role changes; `None` when the planner applies none.
    role_changes: Option<u64>,
    /// Copies ahead of demand that routers have ordered.
    copies: Vec<Copying>,
}

/// A message from a worker or the store to the routers.
struct InTransit {
    at_ns: u64,
    /// Order among everything that is scheduled for the same time.
    number: u64,
    from: usize,
    message: Message,
}

struct Worker {
    engine: Engine,
    /// Whether a step is in progress.
    is_busy: bool,
    /// Whether a copy ahead of demand is being made.
    is_copying: bool,
    /// Identifies the latest scheduled step or wait; end events of earlier generations are ignored.
    generation: u64,
    reported_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrival(u32),
    /// End of a step: worker and generation.
    StepEnd(u32, u64),
    /// Blocks have been onboarded: worker and generation.
    WaitEnd(u32, u64),
    Heartbeat(u32),
    /// The first message in transit arrives.
    Message,
    RouterMessage,
    /// A snapshot arrives: router and source.
    Snapshot(u32, u32),
    /// The planner runs.
    Plan,
    /// A worker changes its role: worker, and whether the new role is prefill.
    RoleChange(u32, bool),
    /// A copy ahead of demand proceeds.
    Copy(u32),
}

/// Why a run has no results.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// Requests remain, no event is scheduled and every worker is idle.
    #[error(
        "the simulation is stuck after {seconds} s of virtual time with unfinished requests ({requests}): no event is \
         scheduled and every worker is idle"
    )]
    Stalled {
        /// Unfinished requests.
        requests: usize,
        /// Virtual time, in seconds.
        seconds: u64,
    },
    /// The index of a simulated router has no memory.
    #[error("no memory for the index of a simulated router: {0}")]
    Memory(#[from] NoAddresses),
    /// No thread can be started.
    #[error("cannot start a thread for a run: {0}")]
    Thread(io::Error),
}

/// Longest and shortest interval between two reports of a worker, as for live workers.
const REPORT_INTERVAL_NS: u64 = 1_000_000_000;
const REPORT_MIN_GAP_NS: u64 = 20_000_000;
/// Longer than any request is queued in a router. Without progress for this long, the run is stalled.
const STALL_TIMEOUT_NS: u64 = 600_000_000_000;
const PLAN_INTERVAL_NS: u64 = INTERVAL.as_nanos() as u64;

impl<'a> Simulation<'a> {
    pub(super) fn new(
        trace: &'a Trace,
        options: &'a Options,
        policy: &PolicyUnderTest,
        rate: f64,
        seed: u64,
    ) -> Result<Self, NoAddresses> {
        let (profile, count, requests) = (&options.profile, options.workers.len(), &trace.requests);
        // Each router has its own seed. The first has the seed of the run.
        let routing = |id| SimulatedRouter::new(policy, options, requests.len(), seed + 1_000 * id);
        let worker = |_| Worker {
            engine: Engine::new(profile, options.queue_order),
            is_busy: false,
            is_copying: false,
            generation: 0,
            reported_ns: 0,
        };
        let arrivals = trace.arrivals(rate, seed);
        let lossless_from = arrivals.get((arrivals.len() as f64 * options.event_loss_until) as usize);
        let lossless_from_ns = lossless_from.map_or(u64::MAX, |(at, _)| *at);
        let mut simulation = Self {
            requests,
            profile,
            event_delay_ns: options.event_delay.as_nanos() as u64,
            resync_delay_ns: options.resync_delay.as_nanos() as u64,
            routers: (0..options.replicas.max(1) as u64).map(routing).collect::<Result<_, _>>()?,
            seed,
            plane: EventPlane::new(count, requests, options.event_loss, lossless_from_ns, seed),
            router_messages: VecDeque::new(),
            workers: (0..count).map(worker).collect(),
            environment: Environment {
                store: profile.shared.map(|store| Lru::new(store.capacity_bytes / profile.block_bytes())),
                send_link_free_ns: vec![0; count],
            },
            in_transit: VecDeque::new(),
            arrivals: Vec::new(),
            events: BinaryHeap::new(),
            scheduled_count: 0,
            effects: Effects::default(),
            records: vec![RequestRecord::default(); requests.len()],
            inter_token_gaps: Histogram::default(),
            unfinished: 0,
            too_long: 0,
            has_admission: options.admission != AdmissionMode::Off,
            disaggregated: options.workers.iter().any(|role| *role != Role::Both),
            role_changes: options.rebalance.then_some(0),
            copies: Vec::new(),
        };
        for (at, request) in arrivals.into_iter().rev() {
            let spec = &requests[request as usize];
            simulation.records[request as usize] = RequestRecord {
                arrived_ns: at,
                blocks: spec.blocks.len() as u64,
                output_tokens: spec.output_tokens,
                ..RequestRecord::default()
            };
            if Engine::fits(profile, spec) {
                simulation.unfinished += 1;
                simulation.arrivals.push((at, request));
            } else {
                simulation.too_long += 1;
            }
        }
        for worker in 0..count as u32 {
            // Spreads the heartbeats over the interval.
            simulation.schedule(REPORT_INTERVAL_NS * u64::from(worker) / count as u64, Event::Heartbeat(worker));
        }
        if options.rebalance {
            simulation.schedule(PLAN_INTERVAL_NS, Event::Plan);
        }
        Ok(simulation)
    }

    /// Runs until every request has ended.
    pub(super) fn run(mut self) -> Result<RunOutcome, RunError> {
        let end_ns = self.run_events()?;
        let copies = self.copies_made();
        Ok(RunOutcome {
            copies,
            requests: self.records,
            inter_token_gaps: self.inter_token_gaps,
            busy_ns: self.workers.iter().map(|worker| worker.engine.busy_ns).collect(),
            end_ns,
            disaggregated: self.disaggregated,
            planned: self.role_changes.map(|_| self.routers[0].planned()),
            role_changes: self.role_changes,
            too_long: self.too_long,
        })
    }

    fn run_events(&mut self) -> Result<u64, RunError> {
        let (mut end_ns, mut progress_ns) = (0, 0);
        while self.unfinished > 0
            && let Some((now, event)) = self.next_event()
        {
            match event {
                Event::Arrival(_) | Event::StepEnd(..) | Event::WaitEnd(..) => progress_ns = now,
                Event::Heartbeat(0) if now > progress_ns + STALL_TIMEOUT_NS && self.is_stalled() => {
                    return Err(RunError::Stalled { requests: self.unfinished, seconds: now / 1_000_000_000 });
                }
                _ => {}
            }
            end_ns = now;
            self.advance(now, event);
        }
        Ok(end_ns)
    }

    /// Whether no request is still to arrive and no worker is running or waiting for blocks.
    fn is_stalled(&self) -> bool {
        let works = |event: &Event| matches!(event, Event::StepEnd(..) | Event::WaitEnd(..));
        self.arrivals.is_empty() && !self.events.iter().any(|Reverse((.., event))| works(event))
    }

    /// Removes and returns the next event.
    fn next_event(&mut self) -> Option<(u64, Event)> {
        let event = self.events.peek().map_or((u64::MAX, u64::MAX), |Reverse((at, number, _))| (*at, *number));
        let message = self.in_transit.front().map_or((u64::MAX, u64::MAX), |first| (first.at_ns, first.number));
        let next_ns = event.0.min(message.0);
        if let Some((at, request)) = self.arrivals.pop_if(|(at, _)| *at <= next_ns) {
            return Some((at, Event::Arrival(request)));
        }
        if message < event {
            return Some((message.0, Event::Message));
        }
        self.events.pop().map(|Reverse((at, _, event))| (at, event))
    }

    fn advance(&mut self, now: u64, event: Event) {
        self.handle(now, event);
        if self.has_admission {
            for router in 0..self.routers.len() {
                let actions = self.routers[router].dispatch_ready(now, self.requests);
                self.apply(now, router, actions);
            }
        }
    }

    /// Carries out the actions of a router.
    fn apply(&mut self, now: u64, router: usize, actions: Vec<Action>) {
        let mut updates = Vec::new();
        for action in actions {
            match action {
                Action::Publish(news) => updates.push(news),
                Action::Reject => self.unfinished -= 1,
                Action::Copy { request, worker, from, blocks } => {
                    let prefix = self.requests[request as usize].blocks[..blocks].to_vec();
                    self.order_copy(now, (router, worker, from), prefix);
                }
                Action::Dispatch { request, worker, stage } => {
                    self.send_updates(now, router, std::mem::take(&mut updates));
                    let (records, spec) = (&mut self.records[request as usize], &self.requests[request as usize]);
                    let from = records.prefill_worker.filter(|_| stage == Stage::Decode);
                    match stage {
                        Stage::Prefill => records.prefill_worker = Some(worker),
                        Stage::Whole | Stage::Decode => records.worker = worker,
                    }
                    self.workers[worker].engine.accept(request, spec, stage, from);
                    self.interrupt(now, worker);
                    self.start_step(now, worker);
                }
            }
        }
        if !updates.is_empty() {
            self.send_updates(now, router, updates);
        }
    }

    fn handle(&mut self, now: u64, event: Event) {
        match event {
            Event::Arrival(request) => {
                let router = self.router_of(request);
                let actions = self.routers[router].arrive(now, request, self.requests);
                self.apply(now, router, actions);
            }
            Event::StepEnd(at, generation) => {
                let at = at as usize;
                let Self { workers, requests, environment, effects, .. } = self;
                if workers[at].generation != generation {
                    return;
                }
                workers[at].is_busy = false;
                workers[at].engine.complete_steps(now, requests, &mut environment.store, effects);
                self.publish_effects(now, at);
                self.start_step(now, at);
            }
            Event::WaitEnd(at, generation) => {
                if self.workers[at as usize].generation == generation {
                    self.start_step(now, at as usize);
                }
            }
            Event::Heartbeat(at) => {
                if now >= self.workers[at as usize].reported_ns + REPORT_INTERVAL_NS || now < REPORT_INTERVAL_NS {
                    self.report(now, at as usize);
                }
                if at == 0 && self.routers.len() > 1 {
                    (0..self.routers.len()).for_each(|router| self.send_updates(now, router, Vec::new()));
                    self.routers.iter_mut().for_each(|router| router.expire_peers(now));
                }
                self.schedule(now + REPORT_INTERVAL_NS, Event::Heartbeat(at));
            }
            Event::RouterMessage => {
                if let Some((from, updates)) = self.router_messages.pop_front() {
                    self.deliver_updates(now, from, &updates);
                }
            }
            Event::Message => {
                if let Some(InTransit { from, message, .. }) = self.in_transit.pop_front() {
                    self.deliver(now, from, message);
                }
            }
            Event::Snapshot(router, from) => {
                let (routing, sequence_number) =
                    (&mut self.routers[router as usize], self.plane.last_sequence_number(from as usize));
                let again = if let Some(worker) = self.workers.get(from as usize) {
                    routing.apply_snapshot(from as usize, sequence_number, worker.engine.blocks())
                } else {
                    let blocks = self.environment.store.as_ref().map(Lru::blocks).unwrap_or_default();
                    routing.apply_snapshot(
                        from as usize,
                        sequence_number,
                        blocks.into_iter().map(|block| (Level::G4, block)),
                    )
                };
                if again {
                    self.schedule(now.saturating_add(self.resync_delay_ns), Event::Snapshot(router, from));
                }
            }
            Event::Copy(number) => self.advance_copy(now, number as usize),
            Event::Plan => {
                let routers = self.routers.len();
                // Twice the delay: the request to the worker, and the announcement of its new role.
                if let Some(RoleChange { worker, to }) = self.routers[0].plan_roles(now, routers) {
                    self.schedule(
                        now + 2 * self.event_delay_ns,
                        Event::RoleChange(worker.0 as u32, to == Role::Prefill),
                    );
                }
                self.schedule(now + PLAN_INTERVAL_NS, Event::Plan);
            }
            Event::RoleChange(worker, prefills) => {
                let to = if prefills { Role::Prefill } else { Role::Decode };
                let change = RoleChange { worker: WorkerId(worker.into()), to };
                self.routers.iter_mut().for_each(|router| router.change_role(change));
                self.role_changes = self.role_changes.map(|role_changes| role_changes + 1);
            }
        }
    }

    /// A request arrived: if several steps are scheduled, keeps only the current one.
    fn interrupt(&mut self, now: u64, at: usize) {
        let worker = &mut self.workers[at];
        if worker.is_busy
            && let Some(end) = worker.engine.interrupt(now)
        {
            worker.generation += 1;
            let event = Event::StepEnd(at as u32, worker.generation);
            self.schedule(end, event);
        }
    }

    /// Starts a worker's next step, unless one is in progress.
    fn start_step(&mut self, now: u64, at: usize) {
        let Self { workers, requests, profile, environment, effects, .. } = self;
        let worker = &mut workers[at];
        if worker.is_busy {
            return;
        }
        worker.generation += 1;
        let (generation, number) =
            (worker.engine.schedule(now, requests, profile, environment, effects), worker.generation);
        match generation {
            Schedule::RunUntil(until) => {
                worker.is_busy = true;
                self.schedule(until, Event::StepEnd(at as u32, number));
            }
            Schedule::WaitUntil(until) => self.schedule(until, Event::WaitEnd(at as u32, number)),
            Schedule::Idle => {}
        }
        self.publish_effects(now, at);
    }

    /// Records the effects of a worker's step and informs the routers.
    fn publish_effects(&mut self, now: u64, at: usize) {
        let mut effects = std::mem::take(&mut self.effects);
        for (request, blocks) in effects.admitted.drain(..) {
            self.records[request as usize].hits = blocks;
        }
        for request in effects.dropped.drain(..) {
            let decodes = self.records[request as usize].worker;
            // Blocks in transit still arrive, even after their source drops the prompt.
            if self.workers[decodes].engine.recompute_prompt(request, &self.requests[request as usize]) {
                self.records[request as usize].prefill_worker = None;
            }
        }
        for copy in effects.used_copies.drain(..) {
            self.copies[copy as usize].used_blocks += 1;
        }
        let mut prefill_workers = Vec::new();
        for request in effects.first_tokens.drain(..) {
            self.records[request as usize].first_token_ns = now;
            let router = self.router_of(request);
            let updates = self.routers[router].first_token(now, request);
            self.send_updates(now, router, updates);
            if let Some(prefill_worker) = self.records[request as usize].prefill_worker {
                self.workers[prefill_worker].engine.release(request, &self.requests[request as usize]);
                prefill_workers.push(prefill_worker);
            }
        }
        for (gap, times) in effects.inter_token_gaps.drain(..) {
            self.inter_token_gaps.add(gap, times);
        }
        for request in effects.finished.drain(..) {
            self.records[request as usize].finished_ns = now;
            let router = self.router_of(request);
            self.routers[router].finished(now, request, &self.requests[request as usize]);
            self.send_updates(now, router, vec![ReservationUpdate::Released(request.into())]);
            self.unfinished -= 1;
        }
        for (from, message) in self.plane.announce(now, at, &effects.changes) {
            self.send(now, from, message);
        }
        effects.changes.clear();
        if now >= self.workers[at].reported_ns + REPORT_MIN_GAP_NS {
            self.report(now, at);
        }
        for request in effects.prefilled.drain(..) {
            let router = self.router_of(request);
            let actions = self.routers[router].prompt_computed(now, request);
            self.apply(now, router, actions);
        }
        // Released blocks may admit waiting requests.
        for prefill_worker in prefill_workers {
            self.start_step(now, prefill_worker);
        }
        // Keeps the capacity of its vectors.
        self.effects = effects;
    }

    /// The router that a request belongs to.
    fn router_of(&self, request: u32) -> usize {
        (splitmix64(self.seed ^ u64::from(request)) % self.routers.len() as u64) as usize
    }

    /// Sends reservation updates to the other routers.
    fn send_updates(&mut self, now: u64, from: usize, updates: Vec<ReservationUpdate>) {
        if self.routers.len() < 2 {
            return;
        }
        if self.event_delay_ns == 0 {
            self.deliver_updates(now, from, &updates);
        } else {
            self.router_messages.push_back((from, updates));
            self.schedule(now + self.event_delay_ns, Event::RouterMessage);
        }
    }

    fn deliver_updates(&mut self, now: u64, from: usize, updates: &[ReservationUpdate]) {
        for (_, other) in self.routers.iter_mut().enumerate().filter(|(at, _)| *at != from) {
            other.apply_updates(now, from, updates.to_vec());
        }
    }

    fn report(&mut self, now: u64, at: usize) {
        self.workers[at].reported_ns = now;
        let message = self.plane.report(at, &self.workers[at].engine, self.profile);
        self.send(now, at, message);
    }

    fn send(&mut self, now: u64, from: usize, message: Message) {
        if self.event_delay_ns == 0 {
            self.deliver(now, from, message);
        } else {
            self.scheduled_count += 1;
            let (at_ns, number) = (now + self.event_delay_ns, self.scheduled_count);
            self.in_transit.push_back(InTransit { at_ns, number, from, message });
        }
    }

    fn deliver(&mut self, now: u64, from: usize, message: Message) {
        // Avoids one clone; usually there is one router.
        let last = self.routers.len() - 1;
        for router in 0..last {
            self.deliver_to(now, router, from, message.clone());
        }
        self.deliver_to(now, last, from, message);
    }

    fn deliver_to(&mut self, now: u64, router: usize, from: usize, message: Message) {
        if self.routers[router].receive(now, from, message) {
            self.schedule(now.saturating_add(self.resync_delay_ns), Event::Snapshot(router as u32, from as u32));
        }
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.scheduled_count += 1;
        self.events.push(Reverse((at, self.scheduled_count, event)));
    }
}

#[cfg(test)]
mod tests;
