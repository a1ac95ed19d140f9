//! The events of a replay: a heap ordered by time, and among equals by the order in which they were scheduled.

use super::engine::{Effects, Engine, Turn};
use super::figures::{Histogram, Outcome, Served};
use super::fleet::{Message, Routing};
use super::store::Lru;
use super::trace::Asked;
use super::{Chooser, Options, Profile, Trace};
use kvbm::Level;
use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

/// One policy at one rate with one seed.
pub(super) struct Simulation<'a> {
    requests: &'a [Asked],
    profile: &'a Profile,
    lag_ns: u64,
    routing: Routing,
    workers: Vec<Worker>,
    shared: Option<Lru>,
    /// By feed: messages on their way, in order.
    underway: Vec<VecDeque<Message>>,
    due: BinaryHeap<Reverse<(u64, u64, Event)>>,
    scheduled: u64,
    effects: Effects,
    served: Vec<Served>,
    gaps: Histogram,
    open: usize,
}

struct Worker {
    engine: Engine,
    /// Until a step, or the wait for blocks, ends.
    occupied: bool,
    /// What `occupied` waits for was overtaken by an arrival when this has moved on.
    turn: u64,
    reported_ns: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrives(u32),
    StepEnds(u32),
    /// Of a wait with this number.
    WaitEnds(u32, u64),
    Heartbeat(u32),
    Message(u32),
    Snapshot(u32),
}

/// Reports: at least so often, and never closer than that; as workers do it.
const REPORT_EVERY_NS: u64 = 1_000_000_000;
const REPORT_GAP_NS: u64 = 20_000_000;
/// Asking for a snapshot, and getting one.
const SNAPSHOT_NS: u64 = 50_000_000;

impl<'a> Simulation<'a> {
    pub(super) fn new(trace: &'a Trace, options: &'a Options, chooser: &Chooser, rate: f64, seed: u64) -> Self {
        let Options { profile, workers: count, .. } = options;
        let requests = &trace.requests;
        let routing = Routing::new(chooser, *count, requests.len(), seed, options.loss);
        let worker = |_| Worker { engine: Engine::new(profile), occupied: false, turn: 0, reported_ns: 0 };
        let mut simulation = Self {
            requests,
            profile,
            lag_ns: options.lag.as_nanos() as u64,
            routing,
            workers: (0..*count).map(worker).collect(),
            shared: profile.shared.map(|store| Lru::new(store.bytes / profile.block_bytes())),
            underway: (0..=*count).map(|_| VecDeque::new()).collect(),
            due: BinaryHeap::new(),
            scheduled: 0,
            effects: Effects::default(),
            served: vec![Served::default(); requests.len()],
            gaps: Histogram::default(),
            open: 0,
        };
        for (at, request) in trace.arrivals(rate, seed) {
            let asked = &requests[request as usize];
            simulation.served[request as usize] =
                Served { arrived_ns: at, blocks: asked.blocks.len() as u64, output: asked.output, ..Served::default() };
            if Engine::fits(profile, asked) {
                simulation.open += 1;
                simulation.schedule(at, Event::Arrives(request));
            }
        }
        for worker in 0..*count as u32 {
            // Not all at the same moment.
            simulation.schedule(REPORT_EVERY_NS * u64::from(worker) / *count as u64, Event::Heartbeat(worker));
        }
        simulation
    }

    /// Runs until every request has ended.
    pub(super) fn run(mut self) -> Outcome {
        let mut end_ns = 0;
        while self.open > 0
            && let Some(Reverse((now, _, event))) = self.due.pop()
        {
            end_ns = now;
            self.happen(now, event);
        }
        Outcome {
            served: self.served,
            gaps: self.gaps,
            busy_ns: self.workers.iter().map(|worker| worker.engine.busy_ns).collect(),
            end_ns,
        }
    }

    fn happen(&mut self, now: u64, event: Event) {
        match event {
            Event::Arrives(request) => {
                let asked = &self.requests[request as usize];
                let at = self.routing.place(now, request, asked);
                self.workers[at].engine.accept(request, asked);
                self.work(now, at);
            }
            Event::StepEnds(at) => {
                let at = at as usize;
                let Self { workers, requests, shared, effects, .. } = self;
                workers[at].occupied = false;
                workers[at].engine.stepped(now, requests, shared, effects);
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
                self.schedule(now + REPORT_EVERY_NS, Event::Heartbeat(at));
            }
            Event::Message(from) => {
                if let Some(message) = self.underway[from as usize].pop_front() {
                    self.receive(now, from as usize, message);
                }
            }
            Event::Snapshot(from) => {
                let again = if let Some(worker) = self.workers.get(from as usize) {
                    self.routing.repair(from as usize, worker.engine.blocks())
                } else {
                    let blocks = self.shared.as_ref().map(Lru::blocks).unwrap_or_default();
                    self.routing.repair(from as usize, blocks.into_iter().map(|block| (Level::G3, block)))
                };
                if again {
                    self.schedule(now + SNAPSHOT_NS, Event::Snapshot(from));
                }
            }
        }
    }

    /// Starts a worker's next step, unless one is under way.
    fn work(&mut self, now: u64, at: usize) {
        let Self { workers, requests, profile, shared, effects, .. } = self;
        let worker = &mut workers[at];
        if worker.occupied {
            return;
        }
        worker.turn += 1;
        let (turn, number) = (worker.engine.turn(now, requests, profile, shared, effects), worker.turn);
        match turn {
            Turn::Step(ns) => {
                worker.occupied = true;
                self.schedule(now + ns, Event::StepEnds(at as u32));
            }
            Turn::Wait(until) => self.schedule(until, Event::WaitEnds(at as u32, number)),
            Turn::Rest => {}
        }
        self.tell(now, at);
    }

    /// Notes what a worker did, and tells the router.
    fn tell(&mut self, now: u64, at: usize) {
        let Self { routing, effects, served, gaps, requests, open, .. } = self;
        for (request, blocks) in effects.admitted.drain(..) {
            served[request as usize].hits = blocks;
        }
        for request in effects.first.drain(..) {
            served[request as usize].first_ns = now;
            routing.started(request);
        }
        for (_, gap) in effects.gaps.drain(..) {
            gaps.add(gap);
        }
        for request in effects.finished.drain(..) {
            served[request as usize].ended_ns = now;
            routing.finished(now, request, &requests[request as usize]);
            *open -= 1;
        }
        let messages = routing.announce(at, &effects.changes);
        effects.changes.clear();
        for (from, message) in messages {
            self.send(now, from, message);
        }
        if now >= self.workers[at].reported_ns + REPORT_GAP_NS {
            self.report(now, at);
        }
    }

    fn report(&mut self, now: u64, at: usize) {
        self.workers[at].reported_ns = now;
        let message = self.routing.report(at, &self.workers[at].engine, self.profile);
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
        if self.routing.receive(now, from, message) {
            self.schedule(now + SNAPSHOT_NS, Event::Snapshot(from as u32));
        }
    }

    fn schedule(&mut self, at: u64, event: Event) {
        self.scheduled += 1;
        self.due.push(Reverse((at, self.scheduled, event)));
    }
}
