//! The router in a replay: the index, load, cost model and selection of the live router, in virtual time.

mod feed;

use super::admission::{AdmissionDecision, AdmissionDriver};
use super::baselines::Baseline;
use super::planner::{Planned, PlannerDriver};
use super::stub_engine::StubEngine;
use super::trace::{self, BLOCK_TOKENS, RequestSpec};
use super::{AdmissionMode, Options, PolicyUnderTest};
use crate::admission::{QueuedRequest, Resolution, Route, Stage, Ticket};
use crate::booking::{CopyEnd, InflightPrefix, InflightPrefixes, PrefixCopies, placed};
use crate::control::replicas::PeerRouters;
use crate::dispatch::order_copy;
use crate::fleet::{Fleet, Needs, Worker};
use crate::hash::splitmix64;
use crate::index::{Holder, HolderId, Index, NoAddresses};
use crate::load::{Demand, OutputEnd};
use crate::policy::planner::RoleChange;
use crate::policy::{
    Disaggregation, FleetView, Overlaps, PlacementRequest, ScoredWorker, Scratch, SelectionContext, decide,
};
use crate::state::{ResolvedSettings, Settings};
use feed::Feed;
use kvbm::{Epoch, Level, SequenceHash};
use std::iter;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use worker::engine::{PrefixCopy, Priority, Work};
use worker::handoff::PeerTicket;
use worker::plane::{Instance, ReservationUpdate, Role, StoreId, WorkerId};

/// One router. Requests and workers are identified by their positions.
pub(super) struct SimulatedRouter {
    settings_by_model: ResolvedSettings,
    seed: u64,
    baseline: Option<Baseline>,
    /// Leading cached blocks of a prompt, by worker: for the baseline.
    cached_blocks: Vec<u64>,
    index: Index,
    inflight: Arc<InflightPrefixes>,
    /// Copies ahead of demand, if the router orders any.
    copies: Option<PrefixCopies>,
    fleet: Fleet,
    workers: Vec<Arc<Worker>>,
    scratch: Scratch,
    /// Position in the event stream of each worker, and of the shared store at the end.
    feeds: Vec<Feed>,
    /// Start of virtual time. Only differences to it matter.
    start: Instant,
    peer_routers: PeerRouters,
    /// Placement of each request in flight, by request.
    placements: Vec<Option<Placement>>,
    admission: Option<AdmissionDriver>,
    /// Deadline and target of the first token, relative to the arrival.
    deadline: Option<Duration>,
    target: Option<Duration>,
    planner: PlannerDriver,
}

/// The workers of a request, and its reservations.
struct Placement {
    decode: Reservation,
    /// Set when another worker computes the prompt.
    prefill: Option<Reservation>,
    /// Expected seconds of the transfer from the prefill worker.
    transfer_s: f64,
    /// Time at which the prompt was computed, if the decode worker could continue at once.
    prefilled_at: Option<Instant>,
    /// Arrival of the request.
    arrived_at: Instant,
    /// Permit of the admission queue.
    permit: Option<u64>,
}

/// A reservation on a worker.
struct Reservation {
    worker: usize,
    /// Identifies the reservation in the worker's load.
    number: u64,
    /// Identifies the reservation in messages to other routers.
    shared_id: u64,
    demand: Demand,
    _inflight: InflightPrefix,
}

/// What the simulation does for the router.
pub(super) enum Action {
    /// Sends a stage of a request to a worker.
    Dispatch { request: u32, worker: usize, stage: Stage },
    /// Rejects the request.
    Reject,
    /// Has a worker copy this number of leading blocks of a request's prompt into its host memory. `from`: the worker
    /// whose memory they are in; `None`: they are in the shared store.
    Copy { request: u32, worker: usize, from: Option<usize>, blocks: usize },
    /// Sends an update to the other routers.
    Publish(ReservationUpdate),
}

const EPOCH: Epoch = Epoch(1);
const STORE: StoreId = StoreId(1);
const MODEL: &str = "replay";
/// Distinguishes the reservation on a prefill worker from that on the decode worker of the same request.
const REMOTE_PREFILL_BIT: u64 = 1 << 32;

impl Action {
    /// An order of a copy of the beginning of a request's prompt.
    fn copy(request: u32, to: &Worker, copy: &PrefixCopy) -> Self {
        let position = |id: WorkerId| id.0 as usize;
        let peer = copy.peer.as_ref().and_then(PeerTicket::decode);
        let from = peer.map(|ticket| position(ticket.peer));
        Self::Copy { request, worker: position(to.id()), from, blocks: copy.blocks.len() }
    }
}

impl SimulatedRouter {
    pub(super) fn new(
        policy: &PolicyUnderTest,
        options: &Options,
        requests: usize,
        seed: u64,
    ) -> Result<Self, NoAddresses> {
        let worker_count = options.workers.len();
        // Policies of other routers choose one worker for the whole request.
        let Settings { slo, planner, admission, .. } = options.settings.clone();
        let aggregated =
            Settings { disaggregation: Disaggregation::Never, slo, planner, admission, ..Settings::default() };
        let (settings, baseline) = match policy {
            PolicyUnderTest::Policy(policy) => (options.settings.clone().choosing(policy), None),
            PolicyUnderTest::Settings(_, settings) => (settings.as_ref().clone(), None),
            PolicyUnderTest::Peer(peer) => (aggregated, Some(Baseline::new(*peer, worker_count, seed))),
        };
        // A worker without host memory declines all copies, and other routers order none.
        let has_copies = settings.prefetch && baseline.is_none() && options.profile.host.is_some();
        let card = StubEngine::card(MODEL, BLOCK_TOKENS as usize);
        let index = Index::with_memory_limit(settings.index_memory.as_usize())?;
        let fleet = Fleet::default();
        let stores: Vec<StoreId> = options.profile.shared.iter().map(|_| STORE).collect();
        let kv_cache = Some(options.profile.kv_cache());
        let ids = (0..worker_count as u64).map(WorkerId);
        let slots = index.join_all(ids.clone(), &[STORE]);
        let worker = |((id, slot), role): ((WorkerId, HolderId), &Role)| {
            let (model, stores) = (card.clone(), stores.clone());
            let instance = Instance { id, epoch: EPOCH, role: *role, model, stores, kv_cache };
            Arc::new(Worker::new(Arc::new(instance), Arc::new(StubEngine), slot, None))
        };
        let workers: Vec<Arc<Worker>> = ids.zip(slots).zip(&options.workers).map(worker).collect();
        fleet.join_all(workers.iter().cloned());
        let holders = (0..worker_count as u64).map(|id| Holder::Worker(WorkerId(id))).chain([Holder::Store(STORE)]);
        Ok(Self {
            seed,
            baseline,
            cached_blocks: Vec::new(),
            index,
            inflight: Arc::default(),
            copies: has_copies.then(PrefixCopies::default),
            fleet,
            workers,
            scratch: Scratch::default(),
            feeds: holders.map(Feed::new).collect(),
            start: Instant::now(),
            peer_routers: PeerRouters::default(),
            placements: (0..requests).map(|_| None).collect(),
            admission: (options.admission != AdmissionMode::Off)
                .then(|| AdmissionDriver::new(settings.admission.clone(), settings.slo.itl.map(|itl| itl.0))),
            deadline: (options.admission == AdmissionMode::Deadline).then_some(options.slo.ttft),
            target: settings.slo.ttft.filter(|_| options.admission == AdmissionMode::Queue).map(|target| target.0),
            planner: PlannerDriver::new(&settings.planner, &settings.slo),
            settings_by_model: ResolvedSettings::from_valid(settings),
        })
    }

    /// Places an arriving request and passes it to the admission queue, if there is one.
    pub(super) fn arrive(&mut self, now_ns: u64, request: u32, requests: &[RequestSpec]) -> Vec<Action> {
        let (now, spec, mut actions) = (self.instant(now_ns), &requests[request as usize], Vec::new());
        let Some(queued) = self.place(now, None, request, spec, &mut actions) else { return vec![Action::Reject] };
        let fleet = self.fleet.snapshot();
        match &mut self.admission {
            None => self.dispatch(now, request, &mut actions),
            Some(driver) => {
                for decision in driver.admit_or_queue(request, &queued, &fleet, now) {
                    self.handle_decision(now, decision, &mut actions, requests);
                }
            }
        }
        actions
    }

    /// Runs the admission queue after a change.
    pub(super) fn dispatch_ready(&mut self, now_ns: u64, requests: &[RequestSpec]) -> Vec<Action> {
        let (now, fleet, mut actions) = (self.instant(now_ns), self.fleet.snapshot(), Vec::new());
        for decision in self.admission.as_mut().map(|driver| driver.dispatch_ready(&fleet, now)).unwrap_or_default() {
            self.handle_decision(now, decision, &mut actions, requests);
        }
        actions
    }

    fn handle_decision(
        &mut self,
        now: Instant,
        decision: AdmissionDecision,
        actions: &mut Vec<Action>,
        requests: &[RequestSpec],
    ) {
        let AdmissionDecision { request, permit, resolution } = decision;
        match resolution {
            Resolution::Admit => {
                if let Some(placement) = &mut self.placements[request as usize] {
                    placement.permit = Some(permit);
                }
                self.resume(request, actions);
                self.dispatch(now, request, actions);
            }
            Resolution::Reject(_) => {
                self.cancel_placement(now, request, &requests[request as usize], actions);
                actions.push(Action::Reject);
            }
            Resolution::Reroute => {
                // The request's own reservation must not count against the new placement.
                let spec = &requests[request as usize];
                let arrived_at = self.cancel_placement(now, request, spec, actions);
                match self.place(now, arrived_at, request, spec, actions) {
                    Some(queued) => {
                        if let Some(driver) = &mut self.admission {
                            driver.requeue(request, permit, queued);
                        }
                    }
                    None => actions.push(Action::Reject),
                }
            }
        }
    }

    /// Sends a placed request to its prefill worker, or to its decode worker if there is none.
    fn dispatch(&mut self, now: Instant, request: u32, actions: &mut Vec<Action>) {
        let Some(Placement { decode, prefill, .. }) = &self.placements[request as usize] else { return };
        match prefill {
            None => self.send_stage(now, request, decode, Stage::Whole, actions),
            Some(prefill) => {
                actions.push(Action::Publish(ReservationUpdate::Dequeued(decode.shared_id)));
                self.send_stage(now, request, prefill, Stage::Prefill, actions);
            }
        }
    }

    fn send_stage(
        &self,
        now: Instant,
        request: u32,
        reservation: &Reservation,
        stage: Stage,
        actions: &mut Vec<Action>,
    ) {
        let Reservation { worker, number, shared_id, .. } = *reservation;
        self.workers[worker].load.sent(number, now);
        actions
            .extend([Action::Publish(ReservationUpdate::Sent(shared_id)), Action::Dispatch { request, worker, stage }]);
    }

    /// The prompt is computed: sends the decode stage.
    pub(super) fn prompt_computed(&mut self, now_ns: u64, request: u32) -> Vec<Action> {
        let now = self.instant(now_ns);
        let Some(placement) = &mut self.placements[request as usize] else { return Vec::new() };
        // A request that waits for the decode worker's memory says nothing about the overhead of a handoff.
        placement.prefilled_at = Some(now).filter(|_| self.workers[placement.decode.worker].is_free(now));
        let Some(Placement { decode, prefill: Some(prefill), .. }) = &self.placements[request as usize] else {
            return Vec::new();
        };
        self.workers[prefill.worker].load.started(prefill.number, now);
        let mut actions = vec![Action::Publish(ReservationUpdate::Started(prefill.shared_id))];
        self.send_stage(now, request, decode, Stage::Decode, &mut actions);
        actions
    }

    /// Releases the reservations of a request. Returns its arrival.
    fn cancel_placement(
        &mut self,
        now: Instant,
        request: u32,
        spec: &RequestSpec,
        actions: &mut Vec<Action>,
    ) -> Option<Instant> {
        let Placement { decode, prefill, arrived_at, .. } = self.placements[request as usize].take()?;
        if let Some(baseline) = &mut self.baseline {
            baseline.finished(decode.worker, request, spec);
        }
        for reservation in [Some(decode), prefill].into_iter().flatten() {
            actions.push(Action::Publish(self.release(now, &reservation, 0)));
        }
        Some(arrived_at)
    }

    /// Sets the reservations of a late request to zero while it waits.
    fn suspend(&self, request: u32, actions: &mut Vec<Action>) {
        self.rebook(request, |_| Demand::default(), actions);
    }

    /// Restores the reservations of a request that will be sent.
    fn resume(&self, request: u32, actions: &mut Vec<Action>) {
        self.rebook(request, |reservation| reservation.demand, actions);
    }

    fn rebook(&self, request: u32, to: impl Fn(&Reservation) -> Demand, actions: &mut Vec<Action>) {
        let Some(Placement { decode, prefill, .. }) = &self.placements[request as usize] else { return };
        for reservation in [Some(decode), prefill.as_ref()].into_iter().flatten() {
            let demand = to(reservation);
            if self.workers[reservation.worker].load.rebook(reservation.number, demand) {
                let (number, prefill_tokens) = (reservation.shared_id, demand.prefill_tokens);
                actions.push(Action::Publish(ReservationUpdate::Revised { number, prefill_tokens }));
            }
        }
    }

    fn release(&self, now: Instant, reservation: &Reservation, generated: u64) -> ReservationUpdate {
        self.workers[reservation.worker].load.release(reservation.number, generated, now);
        ReservationUpdate::Released(reservation.shared_id)
    }

    /// Places a request that may wait. A late one reserves nothing until it is admitted. `arrived_at`: `None` if it
    /// arrives now.
    fn place(
        &mut self,
        now: Instant,
        arrived_at: Option<Instant>,
        request: u32,
        spec: &RequestSpec,
        actions: &mut Vec<Action>,
    ) -> Option<QueuedRequest> {
        let queued = self.reserve(now, arrived_at, request, spec, actions)?;
        if queued.is_late {
            self.suspend(request, actions);
        }
        Some(queued)
    }

    /// Chooses workers for a request and reserves them. Returns the entry for the admission queue; `None` without a
    /// worker.
    fn reserve(
        &mut self,
        now: Instant,
        arrived_at: Option<Instant>,
        request: u32,
        spec: &RequestSpec,
        actions: &mut Vec<Action>,
    ) -> Option<QueuedRequest> {
        let hashes: Vec<SequenceHash> = spec.blocks.iter().map(|block| trace::block_hash(*block)).collect();
        let mut overlaps = Overlaps::only(BLOCK_TOKENS as usize, hashes, &self.index);
        overlaps.extend(&self.inflight);
        let fleet = self.fleet.snapshot();
        let pool = fleet.pool(MODEL)?;
        let view = FleetView::new(pool, &overlaps, spec.input_tokens as usize, Needs::default(), &[], now);
        let random = splitmix64(self.seed ^ self.fleet.choices());
        // As in the live router, the length of the output is not known, but learned.
        let stats = pool.stats().clone();
        let (output, mean_output_tokens) = stats.expect_output(&spec.output_class(), spec.max_tokens);
        let output_tokens = output.tokens();
        let hashes = overlaps.hashes(0);
        let name = |at: usize| hashes[at].short();
        let is_new = arrived_at.is_none();
        let shared = stats.shared_prefix(hashes.len(), BLOCK_TOKENS as usize, name, is_new, now.into());
        let arrived_at = arrived_at.unwrap_or(now);
        let deadline = self.deadline.map(|deadline| arrived_at + deadline);
        let target = self.target.map(|target| arrived_at + target);
        let within = deadline.or(target).map(|until| until.saturating_duration_since(now).as_secs_f64());
        let placement_request = PlacementRequest {
            tokens: spec.input_tokens as usize,
            output_tokens,
            mean_output_tokens,
            shared,
            choices: 1,
            work: &Work::Generate,
            may_split: true,
            within,
        };
        let decision = decide(
            self.settings_by_model.of(&spec.model),
            placement_request,
            view,
            &mut self.scratch,
            SelectionContext { random, session: Some(spec.session) },
        )?;
        if let Some(copies) = &self.copies {
            order_copy(copies, &self.index, &decision, &overlaps, now);
            actions.extend(iter::from_fn(|| copies.take()).map(|(to, copy)| Action::copy(request, &to, &copy)));
        }
        // Rows are in the order of worker ids, which count from 0.
        let at = match &mut self.baseline {
            Some(baseline) => {
                self.cached_blocks.clear();
                let held = (0..self.workers.len() as u32).map(|at| u64::from(decision.row(at).held.total()));
                self.cached_blocks.extend(held);
                baseline.choose(request, spec, &self.cached_blocks)
            }
            None => decision.chosen.at,
        };
        let row = decision.row(at as u32);
        let prefill_row = decision.prefill_worker(&row);
        self.planner.prompt_placed(row.uncached());
        let mut book = |row: &ScoredWorker<'_>, shared_id, demand: Demand, hashes| {
            let worker = row.worker();
            self.fleet.choose(worker);
            let cached_tokens = (demand.prompts > 0).then(|| row.cached());
            let number = worker.load.book(demand, cached_tokens, output.clone(), now);
            let inflight = self.inflight.add(worker.slot, hashes, BLOCK_TOKENS as usize, row.held.total());
            actions.push(Action::Publish(placed(shared_id, worker.id(), demand, &inflight)));
            Reservation { worker: row.at, number, shared_id, demand, _inflight: inflight }
        };
        let (shared_id, hashes) = (u64::from(request), overlaps.hashes(0));
        // Transferred blocks arrive late; events will announce them.
        let decode = book(&row, shared_id, row.demand(), if prefill_row.is_some() { &[] } else { hashes });
        let prefill = prefill_row
            .map(|prefill_row| book(prefill_row, shared_id | REMOTE_PREFILL_BIT, prefill_row.prefill_demand(), hashes));
        let ticket = Ticket {
            model: MODEL.into(),
            tenant: Arc::from(&*spec.tenant),
            priority: Priority::Normal,
            deadline,
            target,
            queue_deadline: arrived_at
                + self.admission.as_ref().map(AdmissionDriver::max_queue_time).unwrap_or_default(),
            tokens: spec.input_tokens,
            choices: 1,
        };
        let route =
            Route { decode: row.worker().id(), prefill: prefill_row.map(|prefill_row| prefill_row.worker().id()) };
        let held = [row.demand(), prefill_row.map(ScoredWorker::prefill_demand).unwrap_or_default()];
        let queued = ticket.placed(route, held, output_tokens as u64, decision.min_service_seconds(&row), now);
        let transfer_s = row.snapshot.estimate.transfer(Level::Peer, row.missing() as u32);
        self.placements[request as usize] =
            Some(Placement { decode, prefill, transfer_s, prefilled_at: None, arrived_at, permit: None });
        Some(queued)
    }

    /// The request has its first token. Returns the updates for other routers.
    pub(super) fn first_token(&mut self, now_ns: u64, request: u32) -> Vec<ReservationUpdate> {
        let now = self.instant(now_ns);
        let Some(Placement { decode, prefill, transfer_s, prefilled_at, .. }) = &mut self.placements[request as usize]
        else {
            return Vec::new();
        };
        let (load, shared_id) = (&self.workers[decode.worker].load, decode.shared_id);
        load.started(decode.number, now);
        if let Some(prefilled_at) = prefilled_at {
            load.handed_off(*transfer_s, (now - *prefilled_at).as_secs_f64());
        }
        if let Some(baseline) = &mut self.baseline {
            baseline.started(decode.worker, request);
        }
        let released = prefill.take().map(|prefill| self.release(now, &prefill, 0));
        [ReservationUpdate::Started(shared_id)].into_iter().chain(released).collect()
    }

    /// Releases what a finished request holds.
    pub(super) fn finished(&mut self, now_ns: u64, request: u32, spec: &RequestSpec) {
        let Some(Placement { decode, permit, .. }) = self.placements[request as usize].take() else { return };
        self.release(self.instant(now_ns), &decode, spec.output_tokens);
        if let Some(pool) = self.fleet.snapshot().pool(MODEL) {
            pool.stats().output_ended(&spec.output_class(), spec.output_tokens, OutputEnd::Complete);
        }
        self.planner.request_finished(spec.output_tokens);
        if let (Some(driver), Some(permit)) = (&mut self.admission, permit) {
            driver.leave(permit);
        }
        if let Some(baseline) = &mut self.baseline {
            baseline.finished(decode.worker, request, spec);
        }
    }

    /// Whether the router orders copies ahead of demand where they pay.
    pub(super) fn orders_copies(&self) -> bool {
        self.copies.is_some()
    }

    /// A worker has answered an order of a copy.
    pub(super) fn copy_ended(&self, now_ns: u64, worker: usize, end: CopyEnd) {
        if let Some(copies) = &self.copies {
            copies.ended(WorkerId(worker as u64), Some(end), self.instant(now_ns));
        }
    }

    /// The role change that the planner decides on, if any. `routers`: number of routers that share the requests.
    pub(super) fn plan_roles(&mut self, now_ns: u64, routers: usize) -> Option<RoleChange> {
        let now = self.instant(now_ns);
        self.planner.decide(routers, &self.workers, self.start, now)
    }

    /// What the planner has advised.
    pub(super) fn planned(&self) -> Planned {
        self.planner.planned()
    }

    /// A worker has changed its role within the same epoch.
    pub(super) fn change_role(&mut self, RoleChange { worker, to }: RoleChange) {
        let worker = &mut self.workers[worker.0 as usize];
        let instance = Instance { role: to, ..(*worker.instance).clone() };
        *worker = Arc::new(Worker::new(Arc::new(instance), Arc::new(StubEngine), worker.slot, Some(worker)));
        self.fleet.join(worker.clone());
    }

    /// Output tokens that are expected of a request.
    #[cfg(test)]
    pub(super) fn expected_output(&self, spec: &RequestSpec) -> f64 {
        let fleet = self.fleet.snapshot();
        let stats = fleet.pool(MODEL).map(|pool| pool.stats().clone()).unwrap_or_default();
        stats.expect_output(&spec.output_class(), spec.max_tokens).0.tokens()
    }

    /// Whether no reservation is left, neither of this router nor of other routers.
    #[cfg(test)]
    pub(super) fn is_idle(&self) -> bool {
        let free = |worker: &Arc<Worker>| worker.load.booked() == Demand::default();
        self.placements.iter().all(Option::is_none) && self.workers.iter().all(free)
    }

    fn instant(&self, now_ns: u64) -> Instant {
        self.start + Duration::from_nanos(now_ns)
    }
}
