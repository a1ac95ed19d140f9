//! The router in a replay: the live one's index, views, books, costs and choice, on virtual time.

use super::admission::{Door, Word};
use super::baselines::Peer;
use super::plane::Message;
use super::planner::Advisor;
use super::trace::{self, Asked, BLOCK_TOKENS};
use super::{Admission, Chooser, Options};
use crate::admission::{QueuedRequest, Resolution, Route, Stage, Ticket};
use crate::booking::{InflightPrefix, InflightPrefixes};
use crate::control::replicas::PeerRouters;
use crate::control::{Outcome, SourceCursor};
use crate::fleet::{Fleet, Worker};
use crate::hash::splitmix64;
use crate::index::{Index, SourceId};
use crate::load::Demand;
use crate::policy::planner::RoleChange;
use crate::policy::{
    Disaggregation, FleetView, Overlaps, PlacementRequest, ScoredWorker, Scratch, SelectionContext, decide,
};
use crate::settings::{ResolvedSettings, Settings};
use futures::future::BoxFuture;
use kvbm::{Epoch, Level, Run, SequenceHash};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{self, ModelCard, OutputStream, Priority, Readiness, Request, Work};
use worker::plane::{Booked, Instance, Phase, RouterId, Source, StoreId, WorkerId};

/// The router, and what it believes.
pub(super) struct Routing {
    rules: ResolvedSettings,
    seed: u64,
    peer: Option<Peer>,
    index: Index,
    inflight: Arc<InflightPrefixes>,
    fleet: Fleet,
    members: Vec<Arc<Worker>>,
    scratch: Scratch,
    /// By worker, and at the end for the shared store.
    feeds: Vec<Feed>,
    /// Virtual time starts here. Only differences are ever looked at.
    start: Instant,
    others: PeerRouters,
    /// By request, while it is in flight.
    placed: Vec<Option<Placed>>,
    door: Option<Door>,
    /// When a first token is too late, from the arrival on.
    deadline: Option<Duration>,
    advisor: Advisor,
}

/// Where a request is, and what was booked for it.
struct Placed {
    decode: Booking,
    /// When its prompt is computed elsewhere.
    prefill: Option<Booking>,
    /// Seconds that its blocks should take from there.
    transfer: f64,
    /// When they were ready.
    handed: Option<Instant>,
    /// When it came.
    arrived: Instant,
    /// Its number at the door.
    permit: Option<u64>,
}

/// A place taken on a worker.
struct Booking {
    worker: usize,
    /// In its books.
    number: u64,
    /// What other routers know it by.
    name: u64,
    _promise: InflightPrefix,
}

/// What becomes of a request.
pub(super) enum Step {
    /// A part of it goes to a worker.
    Go { request: u32, worker: usize, part: Stage },
    /// It is refused.
    Refused,
    /// Other routers are told of it.
    Say(Booked),
}

/// How far a source was followed.
struct Feed {
    source: Source,
    cursor: SourceCursor,
}

const EPOCH: Epoch = Epoch(1);
const STORE: StoreId = StoreId(1);
const MODEL: &str = "replay";
/// A request's number, and this, is what its place with a prefill worker is known by.
const DETOUR: u64 = 1 << 32;

/// Stands where a live worker's engine would be; nobody calls it.
pub(crate) struct Simulated;

impl Simulated {
    /// What it would say that it serves.
    pub(crate) fn card(model: &str, block_size: usize) -> Arc<ModelCard> {
        Arc::new(ModelCard {
            id: model.to_owned(),
            identity: model.to_owned(),
            created: 0,
            context: usize::MAX,
            block_size,
            vocabulary: 0,
            eos: Vec::new(),
            tokenizer: "".into(),
            chat_template: None,
            special_tokens: Vec::new(),
            sampling: worker::engine::SamplingDefaults::default(),
            random_weights: true,
        })
    }
}

impl engine::Engine for Simulated {
    fn generate(&self, _: Request) -> BoxFuture<'_, Result<OutputStream, engine::Error>> {
        Box::pin(std::future::ready(Err(engine::Error::Unavailable("simulated".to_owned()))))
    }

    fn models(&self) -> Vec<Arc<ModelCard>> {
        Vec::new()
    }

    fn readiness(&self) -> Readiness {
        Readiness::NotReady("simulated".to_owned())
    }
}

impl Routing {
    pub(super) fn new(chooser: &Chooser, options: &Options, requests: usize, seed: u64) -> Self {
        let workers = options.workers.len();
        // Rules of others choose one worker, who does it all.
        let Settings { planner, admission, .. } = options.settings.clone();
        let together = Settings { disaggregation: Disaggregation::Never, planner, admission, ..Settings::default() };
        let (settings, peer) = match chooser {
            Chooser::Policy(policy) => (options.settings.clone().choosing(policy), None),
            Chooser::Settings(_, settings) => (settings.as_ref().clone(), None),
            Chooser::DynamoCost => (together, Some(Peer::dynamo(workers))),
            Chooser::SmgCacheAware => (together, Some(Peer::smg(workers))),
        };
        let card = Simulated::card(MODEL, BLOCK_TOKENS as usize);
        let (index, fleet) = (Index::with_memory_limit(settings.index_memory.as_usize()), Fleet::default());
        let ids = (0..workers as u64).map(WorkerId);
        let slots = index.join_all(ids.clone(), &[STORE]);
        let member = |((id, slot), phase): ((WorkerId, SourceId), &Phase)| {
            let (model, stores) = (card.clone(), vec![STORE]);
            let instance = Instance { id, epoch: EPOCH, phase: *phase, model, stores };
            Arc::new(Worker::new(Arc::new(instance), Arc::new(Simulated), slot, None))
        };
        let members: Vec<Arc<Worker>> = ids.zip(slots).zip(&options.workers).map(member).collect();
        fleet.join_all(members.iter().cloned());
        let sources = (0..workers as u64).map(|id| Source::Worker(WorkerId(id))).chain([Source::Store(STORE)]);
        let feed = |source| {
            let mut cursor = SourceCursor::new(Some(EPOCH));
            cursor.snapshot_applied(EPOCH, 0);
            Feed { source, cursor }
        };
        Self {
            seed,
            peer,
            index,
            inflight: Arc::default(),
            fleet,
            members,
            scratch: Scratch::default(),
            feeds: sources.map(feed).collect(),
            start: Instant::now(),
            others: PeerRouters::default(),
            placed: (0..requests).map(|_| None).collect(),
            door: (options.admission != Admission::Off).then(|| Door::new(settings.admission.clone())),
            deadline: (options.admission == Admission::Deadline).then_some(options.slo.ttft),
            advisor: Advisor::new(settings.planner.clone()),
            rules: ResolvedSettings::from_valid(settings),
        }
    }

    /// A request comes.
    pub(super) fn arrive(&mut self, now_ns: u64, request: u32, requests: &[Asked]) -> Vec<Step> {
        let (now, asked, mut steps) = (self.at(now_ns), &requests[request as usize], Vec::new());
        let Some(bidden) = self.place(now, now, request, asked, &mut steps) else { return vec![Step::Refused] };
        let roster = self.fleet.snapshot();
        match &mut self.door {
            None => self.go(now, request, &mut steps),
            Some(door) => {
                for word in door.enter(request, &bidden, &roster, now) {
                    self.heed(now, word, &mut steps, requests);
                }
            }
        }
        steps
    }

    /// Something changed: who may go, or must.
    pub(super) fn round(&mut self, now_ns: u64, requests: &[Asked]) -> Vec<Step> {
        let (now, roster, mut steps) = (self.at(now_ns), self.fleet.snapshot(), Vec::new());
        for word in self.door.as_mut().map(|door| door.round(&roster, now)).unwrap_or_default() {
            self.heed(now, word, &mut steps, requests);
        }
        steps
    }

    fn heed(&mut self, now: Instant, word: Word, steps: &mut Vec<Step>, requests: &[Asked]) {
        let Word { request, permit, told } = word;
        match told {
            Resolution::Admit => {
                if let Some(placed) = &mut self.placed[request as usize] {
                    placed.permit = Some(permit);
                }
                self.go(now, request, steps);
            }
            Resolution::Reject(_) => {
                self.withdraw(now, request, steps);
                steps.push(Step::Refused);
            }
            Resolution::Reroute => {
                // Its own booking must not stand in its way.
                let arrived = self.withdraw(now, request, steps).unwrap_or(now);
                match self.place(now, arrived, request, &requests[request as usize], steps) {
                    Some(bidden) => {
                        if let Some(door) = &mut self.door {
                            door.again(request, permit, bidden);
                        }
                    }
                    None => steps.push(Step::Refused),
                }
            }
        }
    }

    /// It is sent to where it was placed: to its prefill worker first, if it has one.
    fn go(&mut self, now: Instant, request: u32, steps: &mut Vec<Step>) {
        let Some(Placed { decode, prefill, .. }) = &self.placed[request as usize] else { return };
        match prefill {
            None => self.send(now, request, decode, Stage::Whole, steps),
            Some(prefill) => {
                steps.push(Step::Say(Booked::Going(decode.name)));
                self.send(now, request, prefill, Stage::Prefill, steps);
            }
        }
    }

    fn send(&self, now: Instant, request: u32, booking: &Booking, part: Stage, steps: &mut Vec<Step>) {
        let Booking { worker, number, name, .. } = *booking;
        self.members[worker].load.sent(number, now);
        steps.extend([Step::Say(Booked::Sent(name)), Step::Go { request, worker, part }]);
    }

    /// Its prompt is computed, and where it decodes it goes on.
    pub(super) fn computed(&mut self, now_ns: u64, request: u32) -> Vec<Step> {
        let now = self.at(now_ns);
        let Some(placed) = &mut self.placed[request as usize] else { return Vec::new() };
        // Who waits there waits, however its prompt came to be: that is no time of a hand-over.
        placed.handed = Some(now).filter(|_| self.members[placed.decode.worker].is_free(now));
        let Some(Placed { decode, prefill: Some(prefill), .. }) = &self.placed[request as usize] else {
            return Vec::new();
        };
        self.members[prefill.worker].load.started(prefill.number);
        let mut steps = vec![Step::Say(Booked::Started(prefill.name))];
        self.send(now, request, decode, Stage::Decode, &mut steps);
        steps
    }

    /// Takes back what was booked for it. When it came.
    fn withdraw(&mut self, now: Instant, request: u32, steps: &mut Vec<Step>) -> Option<Instant> {
        let Placed { decode, prefill, arrived, .. } = self.placed[request as usize].take()?;
        for booking in [Some(decode), prefill].into_iter().flatten() {
            steps.push(Step::Say(self.release(now, &booking)));
        }
        Some(arrived)
    }

    fn release(&self, now: Instant, booking: &Booking) -> Booked {
        self.members[booking.worker].load.release(booking.number, now);
        Booked::Released(booking.name)
    }

    /// Where a request goes; it is booked there. What it brings to the door.
    fn place(
        &mut self,
        now: Instant,
        arrived: Instant,
        request: u32,
        asked: &Asked,
        steps: &mut Vec<Step>,
    ) -> Option<QueuedRequest> {
        let names: Vec<SequenceHash> = asked.blocks.iter().map(|block| trace::name(*block)).collect();
        let mut overlaps = Overlaps::only(BLOCK_TOKENS as usize, names, &self.index);
        overlaps.extend(&self.inflight);
        let roster = self.fleet.snapshot();
        let pool = roster.pool(MODEL)?;
        let view = FleetView::new(pool, &overlaps, asked.input as usize, &[], now);
        let draw = splitmix64(self.seed ^ self.fleet.choices());
        // A router does not know how long an answer will be.
        let deadline = self.deadline.map(|deadline| arrived + deadline);
        let within = deadline.map(|deadline| deadline.saturating_duration_since(now).as_secs_f64());
        let ask = PlacementRequest {
            tokens: asked.input as usize,
            max_tokens: None,
            choices: 1,
            work: &Work::Generate,
            may_split: true,
            within,
        };
        let decision = decide(
            self.rules.of(&asked.model),
            ask,
            view,
            &mut self.scratch,
            SelectionContext { random: draw, session: Some(asked.session) },
        )?;
        // Seats are in the order of their workers' ids, which count from 0.
        let at = match &mut self.peer {
            Some(peer) => peer.choose(request, asked, |at| decision.row(at as u32).held.total()),
            None => decision.chosen.at,
        };
        let row = decision.row(at as u32);
        let helper = decision.prefill_worker(&row);
        self.advisor.placed(row.uncached());
        let mut book = |row: &ScoredWorker<'_>, name, amount, promised| {
            let member = row.worker();
            self.fleet.choose(member);
            let number = member.load.book(amount, now);
            let promise = self.inflight.add(member.slot, promised, BLOCK_TOKENS as usize, row.held.total());
            let Demand { prefill_tokens, blocks, sequences, .. } = amount;
            let (worker, decodes, anchors) = (member.id(), sequences > 0, promise.anchors().to_vec());
            let placed = Booked::Placed { number: name, worker, prefill_tokens, blocks, decodes, anchors };
            steps.push(Step::Say(placed));
            Booking { worker: row.at, number, name, _promise: promise }
        };
        let (name, names) = (u64::from(request), overlaps.hashes(0));
        // What is handed over comes late: an event will tell of it.
        let decode = book(&row, name, row.demand(), if helper.is_some() { &[] } else { names });
        let prefill = helper.map(|helper| book(helper, name | DETOUR, helper.prefill_demand(), names));
        let ticket = Ticket {
            model: MODEL.into(),
            tenant: "".into(),
            priority: Priority::Normal,
            deadline,
            queue_deadline: arrived + self.door.as_ref().map(Door::patience).unwrap_or_default(),
            tokens: asked.input,
            max_tokens: None,
            choices: 1,
        };
        let route = Route { decode: row.worker().id(), prefill: helper.map(|helper| helper.worker().id()) };
        let held = [row.demand(), helper.map(ScoredWorker::prefill_demand).unwrap_or_default()];
        let bidden = ticket.placed(route, held, decision.min_service_seconds(&row), now);
        let transfer = row.snapshot.estimate.transfer(Level::Peer, row.missing());
        self.placed[request as usize] = Some(Placed { decode, prefill, transfer, handed: None, arrived, permit: None });
        Some(bidden)
    }

    /// The request has its first token. What other routers are told.
    pub(super) fn started(&mut self, now_ns: u64, request: u32) -> Vec<Booked> {
        let now = self.at(now_ns);
        let Some(Placed { decode, prefill, transfer, handed, .. }) = &mut self.placed[request as usize] else {
            return Vec::new();
        };
        let (load, name) = (&self.members[decode.worker].load, decode.name);
        load.started(decode.number);
        if let Some(handed) = handed {
            load.handed_off(((now - *handed).as_secs_f64() - *transfer).max(0.0));
        }
        if let Some(peer) = &mut self.peer {
            peer.started(decode.worker, request);
        }
        let released = prefill.take().map(|prefill| self.release(now, &prefill));
        [Booked::Started(name)].into_iter().chain(released).collect()
    }

    /// The request has ended.
    pub(super) fn finished(&mut self, now_ns: u64, request: u32, asked: &Asked) {
        let Some(Placed { decode, permit, .. }) = self.placed[request as usize].take() else { return };
        self.release(self.at(now_ns), &decode);
        self.advisor.ended(asked.output);
        if let (Some(door), Some(permit)) = (&mut self.door, permit) {
            door.leave(permit);
        }
        if let Some(peer) = &mut self.peer {
            peer.finished(decode.worker, asked);
        }
    }

    /// Who shall change between prefill and decode, if anybody.
    pub(super) fn plan(&mut self, now_ns: u64, routers: usize) -> Option<RoleChange> {
        let now = self.at(now_ns);
        self.advisor.look(routers, &self.members, self.start, now)
    }

    /// A worker has changed, in the same life.
    pub(super) fn flip(&mut self, RoleChange { worker, to }: RoleChange) {
        let member = &mut self.members[worker.0 as usize];
        let instance = Instance { phase: to, ..(*member.instance).clone() };
        *member = Arc::new(Worker::new(Arc::new(instance), Arc::new(Simulated), member.slot, Some(member)));
        self.fleet.join(member.clone());
    }

    /// Another router tells what it booked.
    pub(super) fn hear(&mut self, now_ns: u64, from: usize, booked: Vec<Booked>) {
        let now = self.at(now_ns);
        self.others.apply(RouterId(from as u64), booked, &self.fleet, &self.inflight, now);
    }

    /// A second has passed: who is silent has gone.
    pub(super) fn forget(&mut self, now_ns: u64) {
        let now = self.at(now_ns);
        self.others.expire(now);
    }

    /// A message arrives. Whether the source's snapshot is needed.
    pub(super) fn receive(&mut self, now_ns: u64, from: usize, message: Message) -> bool {
        let now = self.at(now_ns);
        let feed = &mut self.feeds[from];
        match message {
            Message::Load(load) => {
                feed.cursor.behind(EPOCH, load.number, now);
                self.members[from].reported(&load);
                self.members[from].load.report(load, now);
            }
            Message::Blocks(number, event) => {
                if let Outcome::Apply(event) = feed.cursor.event(EPOCH, number, event) {
                    self.index.apply(feed.source, &event);
                }
            }
        }
        feed.cursor.next_request(0).is_some()
    }

    /// A snapshot of a source, taken now, arrives. Whether another is needed.
    pub(super) fn repair(&mut self, from: usize, number: u64, blocks: impl Iterator<Item = (Level, u32)>) -> bool {
        let feed = &mut self.feeds[from];
        let run = |(level, block)| Run { level, parent: None, blocks: vec![trace::name(block)] };
        let runs: Vec<Run> = blocks.map(run).collect();
        if feed.cursor.accept_snapshot(EPOCH, number) {
            self.index.replace(feed.source, &runs);
            feed.cursor.snapshot_applied(EPOCH, number);
        }
        while let Some(event) = feed.cursor.next() {
            self.index.apply(feed.source, &event);
        }
        feed.cursor.next_request(0).is_some()
    }

    /// Whether nothing is booked, here or by others that told.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let free = |member: &Arc<Worker>| member.load.booked() == Demand::default();
        self.placed.iter().all(Option::is_none) && self.members.iter().all(free)
    }

    fn at(&self, now_ns: u64) -> Instant {
        self.start + Duration::from_nanos(now_ns)
    }
}
