//! The feed: one task that follows discovery, load reports and KV events.
//!
//! [`SourceCursor`] decides what to do about an event; the feed does it. Missing events of a source are requested
//! concurrently, first as a range, then as a snapshot, while the index keeps serving its current entries. A large
//! snapshot is applied to the index on another thread. Events of its source are buffered meanwhile; but if the source
//! leaves or starts a new epoch in between, the task itself waits for it, and all other sources with it.

pub(super) mod cursor;
mod freed;

use crate::admission::Admission;
use crate::fleet::{CacheView, EstimateReason, Fleet, Worker, reachable_stores};
use crate::index::{Holder, Index};
use crate::telemetry::Metrics;
use cursor::{Outcome, ResyncRequest, SourceCursor};
use freed::FreedBlocks;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{BoxStream, FuturesUnordered};
use kvbm::{BlockEvent, CacheDigest, Epoch, Numbered, Snapshot, heap};
use std::collections::BTreeSet;
use std::collections::btree_map::{BTreeMap, Entry};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, MissedTickBehavior};
use worker::engine::Engine;
use worker::plane::{
    Discovery, Event, EventBody, Events, Instance, Load, Membership, PlaneError, Role, Source, Topic, WorkerId,
};

/// State of the task.
pub(crate) struct Feed {
    index: Arc<Index>,
    fleet: Arc<Fleet>,
    /// Notified when a worker may have more capacity.
    admission: Arc<Admission>,
    metrics: Metrics,
    events: Arc<dyn Events>,
    followed: BTreeMap<Source, Followed>,
    /// Models that workers and servers of other programs serve under one name, which is logged once.
    named_twice: BTreeSet<String>,
    /// Models whose workers have different weights, which is logged once.
    mixed: BTreeSet<String>,
    /// Workers have joined or left since [`members_changed`](Self::members_changed).
    has_changed: bool,
    freed: FreedBlocks,
    resyncs: FuturesUnordered<BoxFuture<'static, ResyncResult>>,
    /// Sequence number of the last resync request.
    request_seq: u64,
    /// Limits concurrent resync requests when a whole fleet starts at once.
    request_permits: Arc<Semaphore>,
    /// Serializes the application of large snapshots: requests need the other cores. Other changes of the same source
    /// wait in the task until the snapshot is applied.
    apply_permit: Arc<Semaphore>,
}

/// A source of KV events.
struct Followed {
    /// What it is in the index.
    holder: Holder,
    cursor: SourceCursor,
}

struct ResyncResult {
    source: Source,
    request_seq: u64,
    attempt: u32,
    answer: Answer,
    /// Both permits are held until the answer is applied to the index.
    request_permit: Option<OwnedSemaphorePermit>,
    apply_permit: Option<OwnedSemaphorePermit>,
}

enum Answer {
    /// Events after a number of an epoch; `None` when the log is truncated.
    Range(Epoch, u64, Option<Vec<Numbered>>),
    Snapshot(Snapshot),
    /// The snapshot of this epoch and number was applied to the index.
    Applied(Epoch, u64),
    Failed(PlaneError),
}

/// Concurrent resync requests, and snapshots in memory.
const MAX_REQUESTS: usize = 16;
/// Blocks applied in the task itself, where events wait: less than a millisecond.
const APPLY_INLINE_BLOCKS: usize = 4096;
/// Timeout of a resync request: a snapshot of a large worker has some tens of megabytes; ten seconds are a slow
/// network.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);
/// First and longest delay between attempts; the delay doubles. A source that has not joined yet either joins soon or
/// stays away for long.
const RETRY_DELAY: (Duration, Duration) = (Duration::from_millis(50), Duration::from_secs(5));
/// Interval at which the gauges of this task are set.
const GAUGES_INTERVAL: Duration = Duration::from_secs(5);
/// Interval at which the accuracy of events is evaluated: a few more decisions by the old view do no harm.
const EVALUATE_INTERVAL: Duration = Duration::from_secs(1);

impl Answer {
    /// Whether applying it takes long.
    fn is_large(&self) -> bool {
        matches!(self, Self::Snapshot(snapshot) if snapshot.blocks().nth(APPLY_INLINE_BLOCKS).is_some())
    }
}

impl Feed {
    pub(crate) fn new(
        index: Arc<Index>,
        fleet: Arc<Fleet>,
        admission: Arc<Admission>,
        metrics: Metrics,
        events: Arc<dyn Events>,
    ) -> Self {
        Self {
            index,
            fleet,
            admission,
            metrics,
            events,
            followed: BTreeMap::new(),
            named_twice: BTreeSet::new(),
            mixed: BTreeSet::new(),
            has_changed: false,
            freed: FreedBlocks::default(),
            resyncs: FuturesUnordered::new(),
            request_seq: 0,
            request_permits: Arc::new(Semaphore::new(MAX_REQUESTS)),
            apply_permit: Arc::new(Semaphore::new(1)),
        }
    }

    /// Follows both planes until one of them ends, which neither should.
    pub(crate) async fn run(mut self, discovery: Arc<dyn Discovery>) {
        // Subscribed first, so that no event after a worker's join is missed.
        let mut events: BoxStream<'static, Event> = self.events.subscribe(Topic::Cache);
        let mut changes = discovery.watch();
        let mut gauges = tokio::time::interval(GAUGES_INTERVAL);
        gauges.set_missed_tick_behavior(MissedTickBehavior::Skip);
        let mut evaluations = tokio::time::interval(EVALUATE_INTERVAL);
        evaluations.set_missed_tick_behavior(MissedTickBehavior::Skip);
        loop {
            tokio::select! {
                biased;
                change = changes.next() => match change {
                    Some(Membership::Joined(instance, engine)) => self.joined(instance, engine),
                    Some(Membership::Left(id, epoch)) => self.left(id, epoch),
                    None => return,
                },
                // After all changes that wait: it takes time proportional to the number of workers, and a server with
                // hundreds of models joins as that many workers.
                () = std::future::ready(()), if self.has_changed => self.members_changed(),
                Some(result) = self.resyncs.next() => self.resync_finished(result),
                event = events.next() => match event {
                    Some(event) => self.event(event),
                    None => return,
                },
                _ = gauges.tick() => {
                    self.gauges();
                    if self.freed.take(Instant::now()) {
                        heap::return_freed();
                    }
                }
                _ = evaluations.tick() => self.evaluate(),
            }
        }
    }

    fn joined(&mut self, instance: Arc<Instance>, engine: Arc<dyn Engine>) {
        let (source, holder) = (Source::Worker(instance.id), Holder::Worker(instance.id));
        let (role, model, address) = (instance.role, &instance.model.id, engine.address());
        if instance.model.is_relayed {
            // What registers the servers of other programs logs them, all that are alike in one line.
            tracing::debug!(worker = %instance.id, %model, address = address.as_deref(), "worker joined");
        } else {
            tracing::info!(worker = %instance.id, %role, %model, address = address.as_deref(), "worker joined");
        }
        let slot = self.index.join(instance.id, &instance.stores);
        // A rejoin of the same epoch keeps its load: its requests are still running. A known cursor does not show that
        // the worker has joined before: events may arrive before its join, and before the end of its former epoch.
        let previous = self.fleet.snapshot().get(instance.id).cloned();
        let previous = previous.filter(|previous| previous.instance.epoch == instance.epoch);
        if previous.is_none() {
            self.index.forget(Holder::Estimate(instance.id));
        }
        if self.followed.get(&source).and_then(|followed| followed.cursor.epoch()) != Some(instance.epoch) {
            self.index.clear(holder);
            self.index.note_event(holder, instance.epoch, 0);
            self.followed.insert(source, Followed { holder, cursor: SourceCursor::new(Some(instance.epoch)) });
            self.advance_source(source, 0);
        }
        for store in &instance.stores {
            if let Entry::Vacant(unknown) = self.followed.entry(Source::Store(*store)) {
                unknown.insert(Followed { holder: Holder::Store(*store), cursor: SourceCursor::new(None) });
                self.advance_source(Source::Store(*store), 0);
            }
        }
        if let Some(previous) = previous.as_ref().filter(|previous| previous.cache_view != CacheView::Events) {
            self.index.join_estimate(instance.id, reachable_stores(previous.cache_view, &instance.stores));
        }
        let text_slot = Worker::needs_text_estimate(&instance.model).then(|| {
            let cache_view = previous.as_ref().map_or(CacheView::Events, |previous| previous.cache_view);
            self.index.join_estimate(instance.id, reachable_stores(cache_view, &instance.stores))
        });
        let worker = Worker::new(instance, engine, slot, previous.as_deref()).with_text_slot(text_slot);
        if previous.is_none() && !Worker::publishes_events(&worker.instance.model) {
            worker.estimated_cache.expect_no_events();
            self.estimate(&worker, CacheView::Estimated(EstimateReason::NoEvents));
        } else {
            self.fleet.join(Arc::new(worker));
        }
        self.admission.notify();
        self.has_changed = true;
    }

    fn left(&mut self, id: WorkerId, epoch: Epoch) {
        // The end of a former epoch must not remove a worker that has rejoined.
        let worker = self.fleet.snapshot().get(id).filter(|worker| worker.instance.epoch == epoch).cloned();
        let Some(worker) = worker else { return };
        if worker.instance.model.is_relayed {
            tracing::debug!(worker = %id, "worker left");
        } else {
            tracing::info!(worker = %id, "worker left");
        }
        self.fleet.leave(id);
        self.admission.notify();
        self.followed.remove(&Source::Worker(id));
        let blocks = self.index.entries();
        for store in self.index.leave(id) {
            // No worker can onboard from the store now; the next one to join brings a snapshot of it.
            self.index.forget(Holder::Store(store));
            self.followed.remove(&Source::Store(store));
        }
        self.freed.add(blocks.saturating_sub(self.index.entries()));
        self.metrics.remove_worker(id);
        self.has_changed = true;
    }

    /// Updates the log and the gauges that are about all workers together.
    fn members_changed(&mut self) {
        self.has_changed = false;
        // Of a model that has left, too.
        self.metrics.output_tokens.reset();
        self.check_names();
        self.check_weights();
        self.gauges();
    }

    /// Logs the models of servers that get no requests, because workers serve a model of that name.
    fn check_names(&mut self) {
        let now = self.fleet.snapshot().unused_models();
        for model in now.difference(&self.named_twice) {
            tracing::warn!(
                model,
                "workers and upstreams serve a model of this name; requests go to the workers only. Rename one of the \
                 two models"
            );
        }
        for model in self.named_twice.difference(&now) {
            tracing::info!(model, "workers and upstreams no longer serve a model of the same name");
        }
        self.named_twice = now;
    }

    /// Logs the models whose workers have different weights: what a client gets depends on the worker.
    fn check_weights(&mut self) {
        let now = self.fleet.snapshot().mixed_models();
        for model in now.difference(&self.mixed) {
            tracing::warn!(
                model,
                "workers have different weights under this name, so answers depend on the worker; unless an update is \
                 in progress, compare --model of the workers, whose fingerprints are in GET /admin/workers"
            );
        }
        for model in self.mixed.difference(&now) {
            tracing::info!(model, "all workers of the model have the same weights again");
        }
        self.mixed = now;
    }

    fn event(&mut self, Event { source, epoch, body }: Event) {
        match body {
            EventBody::Block { number, event } => self.block(source, epoch, number, event),
            EventBody::Load(load) => self.load(source, epoch, load),
            EventBody::Digest { number, digest } => self.digest(source, epoch, number, digest),
            // Not of this topic.
            EventBody::Reservations(_) | EventBody::RoleRequest { .. } => {}
        }
    }

    fn block(&mut self, source: Source, epoch: Epoch, number: u64, event: BlockEvent) {
        // The source has not joined yet: the snapshot after its join will contain the event.
        let Some(Followed { holder, cursor }) = self.followed.get_mut(&source) else { return };
        let outcome = cursor.event(epoch, number, event);
        self.metrics.events.with_label_values(&[outcome.name()]).inc();
        match outcome {
            Outcome::Apply(event) => {
                self.index.apply(*holder, &event);
                self.index.note_event(*holder, epoch, number);
            }
            Outcome::Gap => tracing::debug!(%source, sequence = number, "gap in KV events"),
            Outcome::NewEpoch => {
                self.index.clear(*holder);
                self.index.note_event(*holder, epoch, 0);
            }
            Outcome::Buffered | Outcome::Duplicate | Outcome::Stale => return,
        }
        self.advance_source(source, 0);
    }

    /// Compares a source's digest with the index. Complete sequence numbers do not show that each event was applied
    /// correctly; the digest does.
    fn digest(&mut self, source: Source, epoch: Epoch, number: u64, digest: CacheDigest) {
        let Some(Followed { holder, cursor }) = self.followed.get_mut(&source) else { return };
        // Stores send digests but no load reports.
        cursor.behind(epoch, number, Instant::now());
        if cursor.is_at(epoch, number) && self.index.cache_digest(*holder).is_some_and(|indexed| indexed != digest) {
            tracing::warn!(%source, sequence = number, "index diverges from the source; requesting a snapshot");
            self.metrics.divergences.inc();
            cursor.invalidate();
        }
        self.advance_source(source, 0);
    }

    fn load(&mut self, source: Source, epoch: Epoch, load: Load) {
        let Source::Worker(id) = source else { return };
        let workers = self.fleet.snapshot();
        let Some(worker) = workers.get(id).filter(|worker| worker.instance.epoch == epoch) else { return };
        let now = Instant::now();
        let followed = self.followed.get_mut(&source);
        if followed.is_some_and(|followed| followed.cursor.behind(epoch, load.number, now)) {
            tracing::debug!(%source, sequence = load.number, "last KV events are missing");
            self.metrics.events.with_label_values(&[Outcome::Gap.name()]).inc();
            self.advance_source(source, 0);
        }
        worker.reported(&load);
        worker.load.report(load, now);
        self.admission.notify();
    }

    /// Applies the buffered events that are ready, and sends the next resync request.
    fn advance_source(&mut self, source: Source, attempt: u32) {
        let Some(Followed { holder, cursor }) = self.followed.get_mut(&source) else { return };
        while let Some(event) = cursor.next() {
            self.index.apply(*holder, &event);
            if let Some(epoch) = cursor.epoch() {
                self.index.note_event(*holder, epoch, cursor.number());
            }
        }
        let Some(request) = cursor.next_request(self.request_seq + 1) else { return };
        self.request_seq += 1;
        let (events, request_permits, apply_permit) =
            (self.events.clone(), self.request_permits.clone(), self.apply_permit.clone());
        let request_seq = self.request_seq;
        // A range is small, and a late answer to it is followed by another request.
        let immediately = attempt == 0 || matches!(request, ResyncRequest::Range(..));
        let delay =
            if immediately { Duration::ZERO } else { (RETRY_DELAY.0 * (1 << attempt.min(10))).min(RETRY_DELAY.1) };
        self.resyncs.push(Box::pin(async move {
            tokio::time::sleep(delay).await;
            // The semaphores are never closed.
            let request_permit = request_permits.acquire_owned().await.ok();
            let answer = tokio::time::timeout(REQUEST_TIMEOUT, send_request(request, &*events, source)).await;
            let timed_out = |_| Answer::Failed(PlaneError::Unavailable(format!("{source} did not answer in time")));
            let answer = answer.unwrap_or_else(timed_out);
            // Waits before the cursor accepts the snapshot: from then until it is applied, events are buffered.
            let apply_permit = if answer.is_large() { apply_permit.acquire_owned().await.ok() } else { None };
            ResyncResult { source, request_seq, attempt, answer, request_permit, apply_permit }
        }));
    }

    fn resync_finished(
        &mut self,
        ResyncResult { source, request_seq, attempt, answer, request_permit, apply_permit }: ResyncResult,
    ) {
        // The source has left.
        let Some(Followed { holder, cursor }) = self.followed.get_mut(&source) else { return };
        if !cursor.awaits(request_seq) {
            // The source left and rejoined: the index has the snapshot of its former cursor.
            if matches!(answer, Answer::Applied(..)) {
                cursor.invalidate();
                self.advance_source(source, 0);
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
                cursor.range(epoch, after, kept);
                // With a truncated log the snapshot is requested without delay.
                (outcome, attempt)
            }
            Answer::Snapshot(snapshot) if cursor.accept_snapshot(snapshot.epoch, snapshot.number) => {
                let answer = Answer::Applied(snapshot.epoch, snapshot.number);
                let holder = *holder;
                self.apply_snapshot(
                    holder,
                    snapshot,
                    ResyncResult { source, request_seq, attempt, answer, request_permit, apply_permit },
                );
                return;
            }
            Answer::Applied(epoch, number) if cursor.snapshot_applied(epoch, number) => {
                ("snapshot_applied", attempt + 1)
            }
            Answer::Snapshot(_) | Answer::Applied(..) => ("snapshot_stale", attempt + 1),
            Answer::Failed(error) => {
                if !matches!(error, PlaneError::Absent(_)) {
                    tracing::warn!(%source, %error, "resync failed; the index keeps its current entries");
                }
                cursor.request_failed();
                ("failed", attempt + 1)
            }
        };
        self.metrics.resyncs.with_label_values(&[outcome]).inc();
        // The next attempt, unless nothing is missing: a stale snapshot is followed by another.
        self.advance_source(source, attempt);
    }

    /// Replaces the blocks of a holder in the index by a snapshot, then reports back.
    fn apply_snapshot(&self, holder: Holder, snapshot: Snapshot, result: ResyncResult) {
        let index = self.index.clone();
        self.resyncs.push(Box::pin(async move {
            let apply_snapshot = move || {
                index.replace(holder, &snapshot.runs);
                index.note_event(holder, snapshot.epoch, snapshot.number);
            };
            if result.apply_permit.is_some() {
                tokio::task::spawn_blocking(apply_snapshot)
                    .await
                    .expect("applying a snapshot to the index does not panic");
            } else {
                apply_snapshot();
            }
            result
        }));
    }

    /// Updates the cache view of each worker.
    fn evaluate(&mut self) {
        for worker in self.fleet.snapshot().workers() {
            let (id, source) = (worker.id(), Source::Worker(worker.id()));
            if self.followed.get_mut(&source).is_some_and(|followed| followed.cursor.take_has_new_events()) {
                worker.estimated_cache.event_arrived();
            }
            if let Some(cache_view) = worker.estimated_cache.evaluate(&self.index, id, worker.text_slot.is_some()) {
                self.set_cache_view(worker, cache_view);
            }
        }
    }

    /// Joins a worker with an estimate of its cache.
    fn estimate(&self, worker: &Worker, cache_view: CacheView) {
        let slot = self.index.join_estimate(worker.id(), reachable_stores(cache_view, &worker.instance.stores));
        worker.estimated_cache.publish_estimate(&self.index, worker.id());
        self.fleet.join(Arc::new(worker.with_cache_view(cache_view, slot)));
    }

    fn set_cache_view(&mut self, worker: &Worker, cache_view: CacheView) {
        let (id, source) = (worker.id(), Source::Worker(worker.id()));
        if cache_view == CacheView::Events {
            tracing::info!(worker = %id, "KV events of the worker are accurate again; the index uses them");
            self.fleet.join(Arc::new(worker.with_cache_view(cache_view, worker.events_slot)));
            if worker.text_slot.is_none() {
                self.index.forget(Holder::Estimate(id));
            }
        } else {
            let (why, block_size) = (cache_view.remark().unwrap_or_default(), worker.instance.model.block_size);
            let address = worker.engine.address();
            tracing::warn!(
                worker = %id, address = address.as_deref(), block_size, reason = why,
                "KV events of the worker are unusable; its cache is estimated"
            );
            self.estimate(worker, cache_view);
        }
        // The events may be right and the index wrong: compare it with a snapshot.
        let wrong =
            matches!(cache_view, CacheView::Estimated(EstimateReason::MissingEvents | EstimateReason::WrongEvents));
        if wrong && let Some(followed) = self.followed.get_mut(&source) {
            followed.cursor.invalidate();
            self.advance_source(source, 0);
        }
        self.gauges();
    }

    fn gauges(&self) {
        let Self { index, fleet, metrics, .. } = self;
        metrics.index_entries.set(index.entries() as i64);
        metrics.index_bytes.set(index.bytes() as i64);
        metrics.index_evicted_pages.inc_by(index.evicted_pages().saturating_sub(metrics.index_evicted_pages.get()));
        let (workers, now) = (fleet.snapshot(), Instant::now());
        // A role without workers has a series too: an alert on no workers compares the sum with 0.
        for role in [Role::Prefill, Role::Decode, Role::Both] {
            let count = workers.workers().filter(|worker| worker.instance.role == role).count();
            metrics.workers.with_label_values(&[&role.to_string()]).set(count as i64);
        }
        for worker in workers.workers() {
            for cache_view in CacheView::ALL {
                let (is, [source, reason]) = (i64::from(cache_view == worker.cache_view), cache_view.labels());
                metrics.index_source.with_label_values(&[&*worker.id().to_string(), source, reason]).set(is);
            }
            let queued = worker.load.stats(now).waiting_tokens;
            metrics.queued_prefill_tokens.with_label_values(&[&worker.id().to_string()]).set(queued as i64);
        }
        for (model, pool) in workers.pools() {
            let Some(quantiles) = pool.stats().output_quantiles([0.5, 0.9]) else { continue };
            for (share, tokens) in ["0.5", "0.9"].into_iter().zip(quantiles) {
                metrics.output_tokens.with_label_values(&[model, share]).set(tokens.round() as i64);
            }
        }
    }
}

/// Sends a resync request to a source.
async fn send_request(request: ResyncRequest, events: &dyn Events, source: Source) -> Answer {
    match request {
        ResyncRequest::Range(epoch, after) => {
            let kept = events.range(source, epoch, after).await;
            kept.map_or_else(Answer::Failed, |kept| Answer::Range(epoch, after, kept))
        }
        ResyncRequest::Snapshot => events.snapshot(source).await.map_or_else(Answer::Failed, Answer::Snapshot),
    }
}
