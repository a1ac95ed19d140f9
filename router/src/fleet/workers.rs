//! Who is there, by model: a roster that readers take whole and the feed replaces.

use super::event_accuracy::Mode;
use super::health::{Health, Verdict};
use super::shadow::Ledger;
use crate::index::SourceId;
use crate::load::{Books, Desks, Moment, Standing};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use worker::engine::{Engine, ModelCard};
use worker::plane::{Instance, Load, Phase, WorkerId};

/// A worker, for one epoch.
pub(crate) struct Member {
    /// What it says of itself.
    pub(crate) instance: Arc<Instance>,
    /// What it serves with.
    pub(crate) engine: Arc<dyn Engine>,
    /// What it is known by.
    pub(crate) mode: Mode,
    /// Where that stands in the index.
    pub(crate) slot: SourceId,
    /// Where what it announces does, believed or not.
    pub(crate) announced: SourceId,
    /// What is known of it beside its events.
    pub(crate) ledger: Arc<Ledger>,
    /// How busy it is.
    pub(crate) books: Arc<Books>,
    /// Cancelled when its lease has ended.
    pub(crate) gone: CancellationToken,
    health: Mutex<Health>,
    /// When it last gave an output, in nanoseconds since `seen`.
    heard: AtomicU64,
    /// Sequences that it takes at a time; 0 when unknown.
    batch: AtomicU64,
    /// Whether it has measured how fast it computes a prompt.
    measured: AtomicBool,
    seen: Instant,
}

impl Member {
    /// A member. `before`: the same life of it, seen earlier, whose requests are still out there.
    pub(crate) fn new(instance: Arc<Instance>, engine: Arc<dyn Engine>, slot: SourceId, before: Option<&Self>) -> Self {
        let mode = before.map_or(Mode::Exact, |member| member.mode);
        Self {
            instance,
            engine,
            mode,
            slot: before.filter(|_| mode != Mode::Exact).map_or(slot, |member| member.slot),
            announced: slot,
            ledger: before.map(|member| member.ledger.clone()).unwrap_or_default(),
            books: before.map(|member| member.books.clone()).unwrap_or_default(),
            gone: before.map(|member| member.gone.clone()).unwrap_or_default(),
            health: Mutex::new(before.map(Self::health).unwrap_or_default()),
            heard: AtomicU64::new(before.map_or(0, |member| member.heard.load(Ordering::Relaxed))),
            batch: AtomicU64::new(before.map_or(0, Self::batch)),
            measured: AtomicBool::new(before.is_some_and(Self::measured)),
            seen: before.map_or_else(Instant::now, |member| member.seen),
        }
    }

    /// The same member, known by something else, which stands at `slot` in the index.
    pub(crate) fn known_by(&self, mode: Mode, slot: SourceId) -> Self {
        Self { mode, slot, ..Self::new(self.instance.clone(), self.engine.clone(), self.announced, Some(self)) }
    }

    pub(crate) fn id(&self) -> WorkerId {
        self.instance.id
    }

    /// Whether it is there to decode. Prefill workers can, and do when nobody else is left.
    pub(crate) fn decodes(&self) -> bool {
        self.instance.phase != Phase::Prefill
    }

    /// Notes how a request went wrong.
    pub(crate) fn note(&self, verdict: Verdict) {
        let now = Instant::now();
        self.change(|health| health.note(verdict, now));
    }

    /// Notes a first output.
    pub(crate) fn well(&self) {
        self.hear();
        self.note(Verdict::Well);
    }

    /// Notes that something came of it.
    pub(crate) fn hear(&self) {
        self.heard.store(self.seen.elapsed().as_nanos() as u64, Ordering::Relaxed);
    }

    /// Whether something came of it since then.
    pub(crate) fn heard_since(&self, then: Instant) -> bool {
        self.seen + Duration::from_nanos(self.heard.load(Ordering::Relaxed)) > then
    }

    /// Takes from a report what is asked of every worker at the door.
    pub(crate) fn reported(&self, load: &Load) {
        self.batch.store(load.sequences_max.into(), Ordering::Relaxed);
        self.measured.store(load.prefill_tokens_per_second.is_some(), Ordering::Relaxed);
    }

    /// Whether what comes to it waits neither for prompts nor for room.
    pub(crate) fn is_free(&self, now: Instant) -> bool {
        let Standing { prompts, active_blocks, total_blocks, .. } = self.books.standing(now);
        prompts == 0 && (total_blocks == 0 || active_blocks <= total_blocks)
    }

    /// Sequences that it takes at a time; 0 when unknown.
    pub(crate) fn batch(&self) -> u64 {
        self.batch.load(Ordering::Relaxed)
    }

    /// Whether it has measured how fast it computes a prompt.
    pub(crate) fn measured(&self) -> bool {
        self.measured.load(Ordering::Relaxed)
    }

    /// Whether it should be probed: it has rested, or it had nothing to do for `idle`.
    pub(crate) fn wants_probe(&self, idle: Duration, now: Instant) -> bool {
        let health = self.health();
        let Some(since) = now.checked_sub(idle).filter(|since| self.seen <= *since) else {
            return !health.is_closed() && health.wants_probe(now, now);
        };
        let idles = || {
            let standing = self.books.standing(now);
            standing.sequences == 0 && standing.prompts == 0 && !self.heard_since(since)
        };
        health.wants_probe(since, now) && (!health.is_closed() || idles())
    }

    /// Notes that a probe goes out.
    pub(crate) fn probe(&self, now: Instant) {
        self.change(|health| health.probe(now));
    }

    /// Notes what came of a probe.
    pub(crate) fn probed(&self, verdict: Verdict) {
        let now = Instant::now();
        self.change(|health| health.probed(verdict, now));
    }

    /// Whether it is better left alone while others are there.
    pub(crate) fn avoided(&self, now: impl Into<Moment>) -> bool {
        self.books.avoided(now)
    }

    fn health(&self) -> Health {
        *self.health.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn change(&self, change: impl FnOnce(&mut Health)) {
        let mut health = self.health.lock().unwrap_or_else(PoisonError::into_inner);
        change(&mut health);
        // Decisions read this, and no lock.
        self.books.rest_until(health.rests_until().map(Moment::from));
    }
}

/// Who serves a model.
#[derive(Default)]
pub(crate) struct Serving {
    seats: Vec<Seat>,
    /// The ways in which they name blocks: nearly always one.
    ways: Vec<Arc<ModelCard>>,
    /// The longest context of them.
    context: usize,
    /// Whether any of them is there to prefill.
    helpers: bool,
    /// What decisions know of them.
    desks: Mutex<Desks>,
}

/// A member, with what each decision asks of it close at hand.
pub(crate) struct Seat {
    pub(crate) id: WorkerId,
    pub(crate) member: Arc<Member>,
    pub(crate) books: Arc<Books>,
    pub(crate) slot: SourceId,
    /// Of the ways in which blocks are named, its own.
    pub(crate) way: u32,
    pub(crate) phase: Phase,
    pub(crate) context: usize,
}

impl Serving {
    pub(crate) fn seats(&self) -> &[Seat] {
        &self.seats
    }

    /// One card for each way of naming blocks.
    pub(crate) fn ways(&self) -> &[Arc<ModelCard>] {
        &self.ways
    }

    /// The longest prompt and answer that any of them takes.
    pub(crate) fn context(&self) -> usize {
        self.context
    }

    /// Whether any of them is there to prefill for others.
    pub(crate) fn helps(&self) -> bool {
        self.helpers
    }

    /// What is known of them now, for one decision at a time.
    pub(crate) fn desks(&self, now: Moment) -> MutexGuard<'_, Desks> {
        // Nothing that writes in them panics half-way.
        let mut desks = self.desks.lock().unwrap_or_else(PoisonError::into_inner);
        desks.catch_up(self.seats.iter().map(|seat| &*seat.books), now);
        desks
    }

    /// Takes a member in. One that is `cordoned` is known, and gets no seat: no decision can choose it.
    fn take(&mut self, member: &Arc<Member>, cordoned: bool) {
        let Instance { model: card, phase, .. } = &*member.instance;
        let same = |way: &Arc<ModelCard>| way.identity == card.identity && way.block_size == card.block_size;
        let way = self.ways.iter().position(same).unwrap_or_else(|| {
            self.ways.push(card.clone());
            self.ways.len() - 1
        });
        self.context = self.context.max(card.context);
        if cordoned {
            return;
        }
        let (id, slot, way) = (member.id(), member.slot, way as u32);
        self.helpers |= *phase == Phase::Prefill;
        let (member, books) = (member.clone(), member.books.clone());
        self.seats.push(Seat { id, member, books, slot, way, phase: *phase, context: card.context });
    }
}

/// All members at one time.
#[derive(Default)]
pub(crate) struct Roster {
    members: BTreeMap<WorkerId, Arc<Member>>,
    models: BTreeMap<String, Serving>,
    /// Workers that get no new requests, there or not: a worker that restarts stays cordoned.
    cordoned: BTreeSet<WorkerId>,
}

impl Roster {
    /// Who serves a model.
    pub(crate) fn serving(&self, model: &str) -> Option<&Serving> {
        self.models.get(model)
    }

    /// One card per model.
    pub(crate) fn cards(&self) -> Vec<Arc<ModelCard>> {
        self.models.values().filter_map(|serving| serving.ways.first().cloned()).collect()
    }

    /// Everybody.
    pub(crate) fn members(&self) -> impl Iterator<Item = &Arc<Member>> {
        self.members.values()
    }

    pub(crate) fn get(&self, id: WorkerId) -> Option<&Arc<Member>> {
        self.members.get(&id)
    }

    /// Whether a worker gets no new requests.
    pub(crate) fn is_cordoned(&self, id: WorkerId) -> bool {
        self.cordoned.contains(&id)
    }

    fn of(members: BTreeMap<WorkerId, Arc<Member>>, cordoned: BTreeSet<WorkerId>) -> Self {
        let mut models = BTreeMap::<String, Serving>::new();
        for (id, member) in &members {
            models.entry(member.instance.model.id.clone()).or_default().take(member, cordoned.contains(id));
        }
        Self { members, models, cordoned }
    }
}

/// The roster, and the count of choices made over it.
#[derive(Default)]
pub(crate) struct Fleet {
    roster: RwLock<Arc<Roster>>,
    choices: AtomicU64,
}

impl Fleet {
    /// Everybody who is there now.
    pub(crate) fn roster(&self) -> Arc<Roster> {
        self.roster.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Adds a member, or replaces the one of its name.
    pub(crate) fn join(&self, member: Arc<Member>) {
        self.change(|members| members.insert(member.id(), member));
    }

    /// Adds many members at once.
    pub(crate) fn join_all(&self, joining: impl Iterator<Item = Arc<Member>>) {
        self.change(|members| {
            members.extend(joining.map(|member| (member.id(), member)));
            None
        });
    }

    /// Takes a member out, and tells those who wait for it.
    pub(crate) fn leave(&self, id: WorkerId) {
        self.change(|members| members.remove(&id));
    }

    /// Notes that a member was chosen.
    pub(crate) fn choose(&self, member: &Member) {
        let now = self.choices.fetch_add(1, Ordering::Relaxed) + 1;
        member.books.choose(now);
    }

    /// Choices made so far.
    pub(crate) fn choices(&self) -> u64 {
        self.choices.load(Ordering::Relaxed)
    }

    fn change(&self, change: impl FnOnce(&mut BTreeMap<WorkerId, Arc<Member>>) -> Option<Arc<Member>>) {
        let mut roster = self.roster.write().unwrap_or_else(PoisonError::into_inner);
        let mut members = roster.members.clone();
        if let Some(before) = change(&mut members)
            && members.get(&before.id()).is_none_or(|now| now.instance.epoch != before.instance.epoch)
        {
            before.gone.cancel();
        }
        *roster = Arc::new(Roster::of(members, roster.cordoned.clone()));
    }

    /// Gives a worker that is there no new requests from now on, or gives it requests again. `false`: it is not there.
    pub(crate) fn cordon(&self, id: WorkerId, cordoned: bool) -> bool {
        let mut roster = self.roster.write().unwrap_or_else(PoisonError::into_inner);
        let (members, mut all) = (roster.members.clone(), roster.cordoned.clone());
        let there = members.contains_key(&id);
        if if cordoned { there && all.insert(id) } else { all.remove(&id) } {
            *roster = Arc::new(Roster::of(members, all));
        }
        there
    }
}
