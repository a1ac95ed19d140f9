//! The events of a replay: a heap ordered by time, and among equals by the order in which they were scheduled.

use super::engine::{Around, Effects, Engine, Turn};
use super::lru::Lru;
use super::plane::{Message, Plane};
use super::results::{Histogram, Outcome, Served};
use super::router::{Routing, Step};
use super::trace::Asked;
use super::{Admission, Chooser, Options, Profile, Trace};
use crate::admission::Stage;
use crate::control::rebalance::INTERVAL;
use crate::hash::splitmix64;
use crate::policy::planner::RoleChange;
use kvbm::Level;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};
use worker::plane::{Booked, Phase, WorkerId};

/// One policy at one rate with one seed.
pub(super) struct Simulation<'a> {
    requests: &'a [Asked],
    profile: &'a Profile,
    lag_ns: u64,
    repair_ns: u64,
    /// All of them get all messages; a request goes to one of them.
    routers: Vec<Routing>,
    seed: u64,
    plane: Plane,
    /// What routers tell each other, on its way, in order.
    talk: VecDeque<(usize, Vec<Booked>)>,
    workers: Vec<Worker>,
    around: Around,
    /// By feed: messages on their way, in order.
    underway: Vec<VecDeque<Message>>,
    /// The latest first: requests come before whatever else happens at their time.
    arrivals: Vec<(u64, u32)>,
    due: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    effects: Effects,
    served: Vec<Served>,
    gaps: Histogram,
    open: usize,
    has_door: bool,
    /// Whether some workers only prefill or decode.
    apart: bool,
    /// How often one changed between them, if they do.
    flips: Option<u64>,
}

struct Worker {
    engine: Engine,
    /// Until a step, or the wait for blocks, ends.
    occupied: bool,
    /// What a worker waits for was overtaken by an arrival when this has moved on.
    turn: u64,
    reported_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives(u32),
    /// Of a turn with this number.
    StepEnds(u32, u64),
    /// Likewise.
    WaitEnds(u32, u64),
    Heartbeat(u32),
    Message(u32),
    Talk,
    /// For one router, of a source.
    Snapshot(u32, u32),
    /// The planner looks.
    Plan,
    /// A worker prefills from now on, or decodes.
    RoleChange(u32, bool),
}

/// Requests are left that nobody will ever serve.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
#[error(
    "{requests} requests are stuck after {seconds} s of virtual time: no event is scheduled and every worker is idle"
)]
pub struct Standstill {
    requests: usize,
    seconds: u64,
}

/// Reports: at least so often, and never closer than that; as workers do it.
const REPORT_EVERY_NS: u64 = 1_000_000_000;
const REPORT_GAP_NS: u64 = 20_000_000;
/// Longer than anybody waits in the router: who has not moved by then never will.
const STILL_NS: u64 = 600_000_000_000;
const PLAN_EVERY_NS: u64 = INTERVAL.as_nanos() as u64;

impl<'a> Simulation<'a> {
    pub(super) fn new(trace: &'a Trace, options: &'a Options, chooser: &Chooser, rate: f64, seed: u64) -> Self {
        let (profile, count, requests) = (&options.profile, options.workers.len(), &trace.requests);
        // Each replica has a seed of its own, as it should; one alone has that of the run.
        let routing = |id| Routing::new(chooser, options, requests.len(), seed + 1_000 * id);
        let worker = |_| Worker { engine: Engine::new(profile), occupied: false, turn: 0, reported_ns: 0 };
        let arrivals = trace.arrivals(rate, seed);
        let sound_from = arrivals.get((arrivals.len() as f64 * options.loss_until) as usize);
        let sound_from_ns = sound_from.map_or(u64::MAX, |(at, _)| *at);
        let mut simulation = Self {
            requests,
            profile,
            lag_ns: options.lag.as_nanos() as u64,
            repair_ns: options.repair.as_nanos() as u64,
            routers: (0..options.replicas.max(1) as u64).map(routing).collect(),
            seed,
            plane: Plane::new(count, requests, options.loss, sound_from_ns, seed),
            talk: VecDeque::new(),
            workers: (0..count).map(worker).collect(),
            around: Around {
                store: profile.shared.map(|store| Lru::new(store.capacity_bytes / profile.block_bytes())),
                sends_ns: vec![0; count],
            },
            underway: (0..=count).map(|_| VecDeque::new()).collect(),
            arrivals: Vec::new(),
            due: BinaryHeap::new(),
            scheduled: 0,
            effects: Effects::default(),
            served: vec![Served::default(); requests.len()],
            gaps: Histogram::default(),
            open: 0,
            has_door: options.admission != Admission::Off,
            apart: options.workers.iter().any(|phase| *phase != Phase::Both),
            flips: options.flip.then_some(0),
        };
        for (at, request) in arrivals.into_iter().rev() {
            let asked = &requests[request as usize];
            simulation.served[request as usize] =
                Served { arrived_ns: at, blocks: asked.blocks.len() as u64, output: asked.output, ..Served::default() };
            if Engine::fits(profile, asked) {
                simulation.open += 1;
                simulation.arrivals.push((at, request));
            }
        }
        for worker in 0..count as u32 {
            // Not all at the same moment.
            simulation.schedule(REPORT_EVERY_NS * u64::from(worker) / count as u64, Event::Heartbeat(worker));
        }
        if options.flip {
            simulation.schedule(PLAN_EVERY_NS, Event::Plan);
        }
        simulation
    }

    /// Runs until every request has ended.
    pub(super) fn run(mut self) -> Result<Outcome, Standstill> {
        let end_ns = self.play()?;
        Ok(Outcome {
            served: self.served,
            gaps: self.gaps,
            busy_ns: self.workers.iter().map(|worker| worker.engine.busy_ns).collect(),
            end_ns,
            apart: self.apart,
            flips: self.flips,
        })
    }

    fn play(&mut self) -> Result<u64, Standstill> {
        let (mut end_ns, mut moved_ns) = (0, 0);
        while self.open > 0
            && let Some((now, event)) = self.next()
        {
            match event {
                Event::Arrives(_) | Event::StepEnds(..) | Event::WaitEnds(..) => moved_ns = now,
                Event::Heartbeat(0) if now > moved_ns + STILL_NS && self.is_still() => {
                    return Err(Standstill { requests: self.open, seconds: now / 1_000_000_000 });
                }
                _ => {}
            }
            end_ns = now;
            self.happen(now, event);
        }
        Ok(end_ns)
    }

    /// Whether nobody comes any more and no worker has anything to do.
    fn is_still(&self) -> bool {
        let works = |event: &Event| matches!(event, Event::StepEnds(..) | Event::WaitEnds(..));
        self.arrivals.is_empty() && !self.due.iter().any(|Reverse((.., event))| works(event))
    }

    /// What happens next.
    fn next(&mut self) -> Option<(u64, Event)> {
        let due = self.due.peek().map_or(u64::MAX, |Reverse((at, ..))| *at);
        if let Some((at, request)) = self.arrivals.pop_if(|(at, _)| *at <= due) {
            return Some((at, Event::Arrives(request)));
        }
        self.due.pop().map(|Reverse((at, _, event))| (at, event))
    }

    fn happen(&mut self, now: u64, event: Event) {
        self.pass(now, event);
        if self.has_door {
            for router in 0..self.routers.len() {
                let steps = self.routers[router].round(now, self.requests);
                self.follow(now, router, steps);
            }
        }
    }

    /// Does what a router decided.
    fn follow(&mut self, now: u64, router: usize, steps: Vec<Step>) {
        let mut booked = Vec::new();
        for step in steps {
            match step {
                Step::Say(news) => booked.push(news),
                Step::Refused => self.open -= 1,
                Step::Go { request, worker, part } => {
                    self.say(now, router, std::mem::take(&mut booked));
                    let (served, asked) = (&mut self.served[request as usize], &self.requests[request as usize]);
                    let from = served.helper.filter(|_| part == Stage::Decode);
                    match part {
                        Stage::Prefill => served.helper = Some(worker),
                        Stage::Whole | Stage::Decode => served.worker = worker,
                    }
                    self.workers[worker].engine.accept(request, asked, part, from);
                    self.interrupt(now, worker);
                    self.work(now, worker);
                }
            }
        }
        if !booked.is_empty() {
            self.say(now, router, booked);
        }
    }

    fn pass(&mut self, now: u64, event: Event) {
        match event {
            Event::Arrives(request) => {
                let router = self.router(request);
                let steps = self.routers[router].arrive(now, request, self.requests);
                self.follow(now, router, steps);
            }
            Event::StepEnds(at, turn) => {
                let at = at as usize;
                let Self { workers, requests, around, effects, .. } = self;
                if workers[at].turn != turn {
                    return;
                }
                workers[at].occupied = false;
                workers[at].engine.stepped(now, requests, &mut around.store, effects);
                self.tell(now, at);
                self.work(now, at);
            }
            Event::WaitEnds(at, turn) => {
                if self.workers[at as usize].turn == turn {
                    self.work(now, at as usize);
                }
            }
            Event::Heartbeat(at) => {
                if now >= self.workers[at as usize].reported_ns + REPORT_EVERY_NS || now < REPORT_EVERY_NS {
                    self.report(now, at as usize);
                }
                if at == 0 && self.routers.len() > 1 {
                    (0..self.routers.len()).for_each(|router| self.say(now, router, Vec::new()));
                    self.routers.iter_mut().for_each(|router| router.forget(now));
                }
                self.schedule(now + REPORT_EVERY_NS, Event::Heartbeat(at));
            }
            Event::Talk => {
                if let Some((from, booked)) = self.talk.pop_front() {
                    self.hear(now, from, &booked);
                }
            }
            Event::Message(from) => {
                if let Some(message) = self.underway[from as usize].pop_front() {
                    self.receive(now, from as usize, message);
                }
            }
            Event::Snapshot(router, from) => {
                let (routing, number) = (&mut self.routers[router as usize], self.plane.number(from as usize));
                let again = if let Some(worker) = self.workers.get(from as usize) {
                    routing.repair(from as usize, number, worker.engine.blocks())
                } else {
                    let blocks = self.around.store.as_ref().map(Lru::blocks).unwrap_or_default();
                    routing.repair(from as usize, number, blocks.into_iter().map(|block| (Level::G3, block)))
                };
                if again {
                    self.schedule(now.saturating_add(self.repair_ns), Event::Snapshot(router, from));
                }
            }
            Event::Plan => {
                let routers = self.routers.len();
                // A wish to the worker, and its answer to all.
                if let Some(RoleChange { worker, to }) = self.routers[0].plan(now, routers) {
                    self.schedule(now + 2 * self.lag_ns, Event::RoleChange(worker.0 as u32, to == Phase::Prefill));
                }
                self.schedule(now + PLAN_EVERY_NS, Event::Plan);
            }
            Event::RoleChange(worker, prefills) => {
                let to = if prefills { Phase::Prefill } else { Phase::Decode };
                let flip = RoleChange { worker: WorkerId(worker.into()), to };
                self.routers.iter_mut().for_each(|router| router.flip(flip));
                self.flips = self.flips.map(|flips| flips + 1);
            }
        }
    }

    /// A worker that is some steps ahead of time comes back to the one under way, since somebody came.
    fn interrupt(&mut self, now: u64, at: usize) {
        let worker = &mut self.workers[at];
        if worker.occupied
            && let Some(end) = worker.engine.cut(now)
        {
            worker.turn += 1;
            let event = Event::StepEnds(at as u32, worker.turn);
            self.schedule(end, event);
        }
    }

    /// Starts a worker's next step, unless one is under way.
    fn work(&mut self, now: u64, at: usize) {
        let Self { workers, requests, profile, around, effects, .. } = self;
        let worker = &mut workers[at];
        if worker.occupied {
            return;
        }
        worker.turn += 1;
        let (turn, number) = (worker.engine.turn(now, requests, profile, around, effects), worker.turn);
        match turn {
            Turn::Step(until) => {
                worker.occupied = true;
                self.schedule(until, Event::StepEnds(at as u32, number));
            }
            Turn::Wait(until) => self.schedule(until, Event::WaitEnds(at as u32, number)),
            Turn::Rest => {}
        }
        self.tell(now, at);
    }

    /// Notes what a worker did, and tells the routers.
    fn tell(&mut self, now: u64, at: usize) {
        let mut effects = std::mem::take(&mut self.effects);
        for (request, blocks) in effects.admitted.drain(..) {
            self.served[request as usize].hits = blocks;
        }
        for request in effects.lost.drain(..) {
            let decodes = self.served[request as usize].worker;
            // What is on its way there is handed over, even if nobody keeps it any more.
            if self.workers[decodes].engine.lost(request, &self.requests[request as usize]) {
                self.served[request as usize].helper = None;
            }
        }
        let mut helpers = Vec::new();
        for request in effects.first.drain(..) {
            self.served[request as usize].first_ns = now;
            let router = self.router(request);
            let booked = self.routers[router].started(now, request);
            self.say(now, router, booked);
            if let Some(helper) = self.served[request as usize].helper {
                self.workers[helper].engine.release(request, &self.requests[request as usize]);
                helpers.push(helper);
            }
        }
        for (gap, times) in effects.gaps.drain(..) {
            self.gaps.add(gap, times);
        }
        for request in effects.finished.drain(..) {
            self.served[request as usize].ended_ns = now;
            let router = self.router(request);
            self.routers[router].finished(now, request, &self.requests[request as usize]);
            self.say(now, router, vec![Booked::Released(request.into())]);
            self.open -= 1;
        }
        for (from, message) in self.plane.announce(now, at, &effects.changes) {
            self.send(now, from, message);
        }
        effects.changes.clear();
        if now >= self.workers[at].reported_ns + REPORT_GAP_NS {
            self.report(now, at);
        }
        for request in effects.handed.drain(..) {
            let router = self.router(request);
            let steps = self.routers[router].computed(now, request);
            self.follow(now, router, steps);
        }
        // They have room for others now.
        for helper in helpers {
            self.work(now, helper);
        }
        // Its lists keep their room.
        self.effects = effects;
    }

    /// Whose request it is.
    fn router(&self, request: u32) -> usize {
        (splitmix64(self.seed ^ u64::from(request)) % self.routers.len() as u64) as usize
    }

    /// A router tells the others.
    fn say(&mut self, now: u64, from: usize, booked: Vec<Booked>) {
        if self.routers.len() < 2 {
            return;
        }
        if self.lag_ns == 0 {
            self.hear(now, from, &booked);
        } else {
            self.talk.push_back((from, booked));
            self.schedule(now + self.lag_ns, Event::Talk);
        }
    }

    fn hear(&mut self, now: u64, from: usize, booked: &[Booked]) {
        for (_, other) in self.routers.iter_mut().enumerate().filter(|(at, _)| *at != from) {
            other.hear(now, from, booked.to_vec());
        }
    }

    fn report(&mut self, now: u64, at: usize) {
        self.workers[at].reported_ns = now;
        let message = self.plane.report(at, &self.workers[at].engine, self.profile);
        self.send(now, at, message);
    }

    fn send(&mut self, now: u64, from: usize, message: Message) {
        if self.lag_ns == 0 {
            self.receive(now, from, message);
        } else {
            self.underway[from].push_back(message);
            self.schedule(now + self.lag_ns, Event::Message(from as u32));
        }
    }

    fn receive(&mut self, now: u64, from: usize, message: Message) {
        // One copy less: nearly always there is one router.
        let last = self.routers.len() - 1;
        for router in 0..last {
            self.read(now, router, from, message.clone());
        }
        self.read(now, last, from, message);
    }

    fn read(&mut self, now: u64, router: usize, from: usize, message: Message) {
        if self.routers[router].receive(now, from, message) {
            self.schedule(now.saturating_add(self.repair_ns), Event::Snapshot(router as u32, from as u32));
        }
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.scheduled += 1;
        self.due.push(Reverse((at, self.scheduled, event)));
    }
}

#[cfg(test)]
mod tests;
