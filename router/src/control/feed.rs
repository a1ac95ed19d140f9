//! Keeps the router's picture of the fleet: one task that follows who is there and what changed.
//!
//! What to do about an event is the [`View`]'s decision; here it is done. What was missed of a source is asked for beside
//! everything else, a range of events first and then a snapshot, while what is known of it goes on serving. A large snapshot is
//! taken into the index beside everything else, too. The events of its own source wait for that in its view; but should the source
//! leave or begin anew meanwhile, the task itself waits, and all others with it.

pub(super) mod view;

use crate::fleet::{Member, Mode, Reason, reach, shadow};
use crate::index::{Index, LEVELS};
use crate::state::Core;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, FuturesUnordered};
use kvbm::{BlockEvent, CacheDigest, Epoch, Numbered, Run, Snapshot};
use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, MissedTickBehavior};
use view::{Ask, Outcome, View};
use worker::engine::Engine;
use worker::plane::{
    Discovery, Event, EventBody, Events, Instance, Load, Membership, PlaneError, Source, Topic, WorkerId,
};

/// The task.
pub(crate) struct Feed {
    core: Arc<Core>,
    events: Arc<dyn Events>,
    views: BTreeMap<Source, View>,
    repairs: FuturesUnordered<BoxFuture<'static, Repaired>>,
    /// Numbers questions.
    questions: u64,
    /// Keeps a fleet that starts at once from asking for all its snapshots at once.
    turns: Arc<Semaphore>,
    /// Whoever has it takes a large snapshot into the index, one at a time: requests need the other cores. Whatever else empties
    /// or fills what that source holds waits until it is laid, in the task.
    hand: Arc<Semaphore>,
}

struct Repaired {
    source: Source,
    question: u64,
    attempt: u32,
    answer: Answer,
    /// Both are kept until all that the answer brings is in the index.
    turn: Option<OwnedSemaphorePermit>,
    hand: Option<OwnedSemaphorePermit>,
}

enum Answer {
    /// Events after this one of this life, as far as they are kept.
    Range(Epoch, u64, Option<Vec<Numbered>>),
    Snapshot(Snapshot),
    /// The snapshot of this life, as of this number, is in the index.
    Laid(Epoch, u64),
    Failed(PlaneError),
}

/// Questions under way at a time, and snapshots in memory.
const REPAIRS: usize = 16;
/// Blocks that are put into the index where events wait for it: less than a millisecond.
const AT_ONCE: usize = 4096;
/// A snapshot of a large worker is some tens of megabytes; ten seconds are a slow network.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between attempts, doubling up to a maximum: a source that is not there yet is there soon, or not for long.
const RETRY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// How often gauges that nobody else sets are set.
const GAUGES_EVERY: Duration = Duration::from_secs(5);
/// How often it is asked whether workers can be believed: a few answers more by what was believed before do no harm.
const JUDGE_EVERY: Duration = Duration::from_secs(1);

impl Answer {
    /// Whether it takes long to put into the index.
    fn is_large(&self) -> bool {
        matches!(self, Self::Snapshot(snapshot) if snapshot.blocks().nth(AT_ONCE).is_some())
    }
}

impl Feed {
    pub(crate) fn new(core: Arc<Core>, events: Arc<dyn Events>) -> Self {
        Self {
            core,
            events,
            views: BTreeMap::new(),
            repairs: FuturesUnordered::new(),
            questions: 0,
            turns: Arc::new(Semaphore::new(REPAIRS)),
            hand: Arc::new(Semaphore::new(1)),
        }
    }

    /// Follows both planes until one of them ends, which neither should.
    pub(crate) async fn run(mut self, discovery: Arc<dyn Discovery>) {
        // Events first, so that what happens after a worker is seen is not missed.
        let mut events: BoxStream<'static, Event> = self.events.subscribe(Topic::Cache);
        let mut changes = discovery.watch();
        let mut gauges = tokio::time::interval(GAUGES_EVERY);
        gauges.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut court = tokio::time::interval(JUDGE_EVERY);
        court.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                biased;
                change = changes.next() => match change {
                    Some(Membership::Joined(instance, engine)) => self.joined(instance, engine),
                    Some(Membership::Left(id, epoch)) => self.left(id, epoch),
                    None => return,
                },
                Some(repaired) = self.repairs.next() => self.repaired(repaired),
                event = events.next() => match event {
                    Some(event) => self.event(event),
                    None => return,
                },
                _ = gauges.tick() => self.gauges(),
                _ = court.tick() => self.judge(),
            }
        }
    }

    fn joined(&mut self, instance: Arc<Instance>, engine: Arc<dyn Engine>) {
        let source = Source::Worker(instance.id);
        tracing::info!(worker = %instance.id, role = %instance.phase, model = %instance.model.id, "worker joined");
        let slot = self.core.index.join(instance.id, &instance.stores);
        // The same life seen again keeps its books: its requests are still out there. That its events are known already says
        // nothing: they may have come before it joined, and before its former life left.
        let before = self.core.fleet.roster().get(instance.id).cloned();
        let before = before.filter(|before| before.instance.epoch == instance.epoch);
        if before.is_none() {
            self.core.index.forget(Source::Worker(shadow(instance.id)));
        }
        if self.views.get(&source).and_then(View::life) != Some(instance.epoch) {
            self.core.index.clear(source);
            self.views.insert(source, View::of_life(Some(instance.epoch)));
            self.go_on(source, 0);
        }
        for store in instance.stores.iter().map(|store| Source::Store(*store)) {
            if let Entry::Vacant(unknown) = self.views.entry(store) {
                unknown.insert(View::of_life(None));
                self.go_on(store, 0);
            }
        }
        if let Some(before) = before.as_ref().filter(|before| before.mode != Mode::Exact) {
            self.core.index.join(shadow(instance.id), reach(before.mode, &instance.stores));
        }
        self.core.fleet.join(Arc::new(Member::new(instance, engine, slot, before.as_deref())));
        self.core.admission.notify();
        self.gauges();
    }

    fn left(&mut self, id: WorkerId, epoch: Epoch) {
        // A worker that came back at once must not fall with its former life.
        if self.core.fleet.roster().get(id).is_none_or(|member| member.instance.epoch != epoch) {
            return;
        }
        tracing::info!(worker = %id, "worker left");
        self.core.fleet.leave(id);
        self.core.admission.notify();
        self.views.remove(&Source::Worker(id));
        self.core.index.forget(Source::Worker(shadow(id)));
        for store in self.core.index.leave(id) {
            // Nobody can onboard from it now; whoever comes next brings a snapshot of it.
            self.core.index.forget(Source::Store(store));
            self.views.remove(&Source::Store(store));
        }
        self.core.metrics.remove_worker(id);
        self.gauges();
    }

    fn event(&mut self, Event { source, epoch, body }: Event) {
        match body {
            EventBody::Block { number, event } => self.block(source, epoch, number, event),
            EventBody::Load(load) => self.load(source, epoch, load),
            EventBody::Digest { number, digest } => self.digest(source, epoch, number, digest),
            // Not of this topic.
            EventBody::Bookings(_) | EventBody::Phase { .. } => {}
        }
    }

    fn block(&mut self, source: Source, epoch: Epoch, number: u64, event: BlockEvent) {
        // Of someone who has not joined yet: the snapshot taken when it joins will know.
        let Some(view) = self.views.get_mut(&source) else { return };
        let outcome = view.event(epoch, number, event);
        self.core.metrics.events.with_label_values(&[outcome.name()]).inc();
        match outcome {
            Outcome::Apply(event) => self.core.index.apply(source, &event),
            Outcome::Gap => tracing::debug!(%source, sequence = number, "gap in KV events"),
            Outcome::NewLife => self.core.index.clear(source),
            Outcome::Held | Outcome::Duplicate | Outcome::Stale => return,
        }
        self.go_on(source, 0);
    }

    /// The source says what it holds. Numbers in order do not tell that each event was understood: this does.
    fn digest(&mut self, source: Source, epoch: Epoch, number: u64, digest: CacheDigest) {
        let Some(view) = self.views.get_mut(&source) else { return };
        // A store makes no reports.
        view.behind(epoch, number, Instant::now());
        if view.stands_at(epoch, number)
            && index_digest(&self.core.index, source).is_some_and(|indexed| indexed != digest)
        {
            tracing::warn!(%source, sequence = number, "index diverges from the source; requesting a snapshot");
            self.core.metrics.divergences.inc();
            view.doubt();
        }
        self.go_on(source, 0);
    }

    fn load(&mut self, source: Source, epoch: Epoch, load: Load) {
        let Source::Worker(id) = source else { return };
        let roster = self.core.fleet.roster();
        let Some(member) = roster.get(id).filter(|member| member.instance.epoch == epoch) else { return };
        let now = Instant::now();
        if self.views.get_mut(&source).is_some_and(|view| view.behind(epoch, load.number, now)) {
            tracing::debug!(%source, sequence = load.number, "last KV events are missing");
            self.core.metrics.events.with_label_values(&[Outcome::Gap.name()]).inc();
            self.go_on(source, 0);
        }
        member.reported(&load);
        member.books.report(load, now);
        self.core.admission.notify();
    }

    /// Applies what a view has ready, and asks for what it lacks.
    fn go_on(&mut self, source: Source, attempt: u32) {
        let Some(view) = self.views.get_mut(&source) else { return };
        while let Some(event) = view.next() {
            self.core.index.apply(source, &event);
        }
        let Some(ask) = view.ask(self.questions + 1) else { return };
        self.questions += 1;
        let (events, turns, hand) = (self.events.clone(), self.turns.clone(), self.hand.clone());
        let question = self.questions;
        // A range is little, and whoever is late with it has to ask for more.
        let at_once = attempt == 0 || matches!(ask, Ask::Range(..));
        let pause = if at_once { Duration::ZERO } else { (RETRY.0 * (1 << attempt.min(10))).min(RETRY.1) };
        self.repairs.push(Box::pin(async move {
            tokio::time::sleep(pause).await;
            // The semaphores are never closed.
            let turn = turns.acquire_owned().await.ok();
            let answer = tokio::time::timeout(PATIENCE, put(ask, &*events, source)).await;
            let late = |_| Answer::Failed(PlaneError::Unavailable(format!("{source} did not answer in time")));
            let answer = answer.unwrap_or_else(late);
            // The view goes on until then: from when it takes a snapshot to when that is in the index, events are held.
            let hand = if answer.is_large() { hand.acquire_owned().await.ok() } else { None };
            Repaired { source, question, attempt, answer, turn, hand }
        }));
    }

    fn repaired(&mut self, Repaired { source, question, attempt, answer, turn, hand }: Repaired) {
        // It left meanwhile.
        let Some(view) = self.views.get_mut(&source) else { return };
        if !view.awaits(question) {
            // It came back since. What was put into the index for its former view is not what the present one knows of.
            if matches!(answer, Answer::Laid(..)) {
                view.doubt();
                self.go_on(source, 0);
            }
            return;
        }
        let (outcome, attempt) = match answer {
            Answer::Range(epoch, after, kept) => {
                let outcome = match &kept {
                    Some(events) if events.is_empty() => "empty",
                    Some(_) => "replayed",
                    None => "log_truncated",
                };
                view.range(epoch, after, kept);
                // Whoever does not keep it is asked for a snapshot at once.
                (outcome, attempt)
            }
            Answer::Snapshot(snapshot) if view.takes(snapshot.epoch, snapshot.number) => {
                let answer = Answer::Laid(snapshot.epoch, snapshot.number);
                self.lay(snapshot.runs, Repaired { source, question, attempt, answer, turn, hand });
                return;
            }
            Answer::Laid(epoch, number) if view.laid(epoch, number) => ("snapshot_applied", attempt + 1),
            Answer::Snapshot(_) | Answer::Laid(..) => ("snapshot_stale", attempt + 1),
            Answer::Failed(error) => {
                if !matches!(error, PlaneError::Absent(_)) {
                    tracing::warn!(%source, %error, "resync failed; the index keeps its current entries");
                }
                view.unanswered();
                ("failed", attempt + 1)
            }
        };
        self.core.metrics.resyncs.with_label_values(&[outcome]).inc();
        // The next attempt of this row, unless nothing is missing: a snapshot that comes too late to be followed is not the end of it.
        self.go_on(source, attempt);
    }

    /// Sets the index to what a snapshot tells of a source, and says so.
    fn lay(&self, runs: Vec<Run>, repaired: Repaired) {
        let (core, source) = (self.core.clone(), repaired.source);
        self.repairs.push(Box::pin(async move {
            let lay = move || core.index.replace(source, &runs);
            if repaired.hand.is_some() {
                tokio::task::spawn_blocking(lay).await.expect("applying a snapshot to the index does not panic");
            } else {
                lay();
            }
            repaired
        }));
    }

    /// Has each worker known by what can be believed of it.
    fn judge(&mut self) {
        for member in self.core.fleet.roster().members() {
            let (id, source) = (member.id(), Source::Worker(member.id()));
            if self.views.get_mut(&source).is_some_and(View::news) {
                member.ledger.announced();
            }
            if let Some(mode) = member.ledger.judge(&self.core.index, id) {
                self.know(member, mode);
            }
        }
    }

    fn know(&mut self, member: &Member, mode: Mode) {
        let (id, source) = (member.id(), Source::Worker(member.id()));
        let Core { index, fleet, .. } = &*self.core;
        if mode == Mode::Exact {
            tracing::info!(worker = %id, "KV events of the worker are accurate again; the index uses them");
            fleet.join(Arc::new(member.known_by(mode, member.announced)));
            index.forget(Source::Worker(shadow(id)));
        } else {
            let (why, block_size) = (mode.remark().unwrap_or_default(), member.instance.model.block_size);
            tracing::warn!(
                worker = %id, block_size, reason = why,
                "KV events of the worker are unusable; its cache is estimated"
            );
            let slot = index.join(shadow(id), reach(mode, &member.instance.stores));
            member.ledger.cast(index, id);
            fleet.join(Arc::new(member.known_by(mode, slot)));
        }
        // Perhaps it was only what is known here that was wrong.
        let lies = matches!(mode, Mode::Approximate(Reason::Unannounced | Reason::Lies));
        if lies && let Some(view) = self.views.get_mut(&source) {
            view.doubt();
            self.go_on(source, 0);
        }
        self.gauges();
    }

    fn gauges(&self) {
        let Core { index, fleet, metrics, .. } = &*self.core;
        metrics.index_entries.set(index.entries() as i64);
        metrics.index_bytes.set(index.bytes() as i64);
        metrics.index_evicted_pages.inc_by(index.evicted_pages().saturating_sub(metrics.index_evicted_pages.get()));
        let (roster, now) = (fleet.roster(), Instant::now());
        metrics.workers.reset();
        for member in roster.members() {
            for mode in Mode::NAMES {
                let is = i64::from(mode == member.mode.name());
                metrics.index_source.with_label_values(&[&*member.id().to_string(), mode]).set(is);
            }
            metrics.workers.with_label_values(&[&member.instance.phase.to_string()]).inc();
            let queued = member.books.standing(now).waiting_tokens;
            metrics.queued_prefill_tokens.with_label_values(&[&member.id().to_string()]).set(queued as i64);
        }
    }
}

/// Puts a question to a source.
async fn put(ask: Ask, events: &dyn Events, source: Source) -> Answer {
    match ask {
        Ask::Range(epoch, after) => {
            let kept = events.range(source, epoch, after).await;
            kept.map_or_else(Answer::Failed, |kept| Answer::Range(epoch, after, kept))
        }
        Ask::Snapshot => events.snapshot(source).await.map_or_else(Answer::Failed, Answer::Snapshot),
    }
}

/// Digest of the blocks of a source in the index, to be compared with the source's own; `None` if the index evicted some.
fn index_digest(index: &Index, source: Source) -> Option<CacheDigest> {
    let add = |all: CacheDigest, level| Some(all.with(level, index.digest(source, level)?.sum));
    let digest = LEVELS.into_iter().try_fold(CacheDigest::default(), add)?;
    index.is_complete(source).then_some(digest)
}
