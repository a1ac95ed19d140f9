//! Compares the routers' index with the events of each worker and of the store, at each instant.
//!
//! Events are delayed, lost, repeated and reordered, so the index of a router differs from the blocks that a worker has
//! now. But it notes the last event that it includes, whether applied one by one or in a snapshot, and **its blocks are
//! exactly those that the worker had after that event**, not one more and not one less. In detail:
//!
//! - While events are missing, the index stays at the last one before the gap: early ones wait.
//! - While a snapshot is on its way, the index stays at the last event. The snapshot takes effect at one instant.
//! - A new epoch begins without blocks. The index has blocks of one epoch only.
//! - In an epoch the index never goes back, but to its beginning, when the worker has left and joins again.
//! - An index goes back to an older epoch only with a snapshot of it, which overrides what arrived before. It shows
//!   that a process with the id of another is not registered yet.
//!
//! A worker in turn announces each change at the instant at which it changes its blocks.

use crate::sim::cluster::Cluster;
use crate::sim::network::Node;
use crate::sim::world::World;
use kvbm::{BlockEvent, CacheDigest, Epoch, EventLog, Level, SequenceHash, SetDigest};
use router::IndexedEvents;
use router::index::Holder;
use std::cmp::Ordering;
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use tokio::time::Instant;
use worker::plane::Source;

/// The events of all workers and of the store so far, and how far each router has applied them.
#[derive(Default)]
pub(super) struct EventWatch {
    histories: BTreeMap<(Holder, Epoch), History>,
    /// Each worker that ever ran, and the store.
    holders: Vec<Holder>,
    routers: BTreeMap<u64, RouterWatch>,
}

/// The events of one epoch.
struct History {
    log: Arc<EventLog>,
    blocks: HashSet<(Level, SequenceHash)>,
    /// Digest of the blocks after each event. The first is that of no blocks, before the first event.
    digests: Vec<CacheDigest>,
    is_reported: bool,
}

/// What a router had indexed at the last instant.
struct RouterWatch {
    started: Instant,
    /// In the order of the holders.
    indexed: Vec<Indexed>,
}

#[derive(Clone, Copy, Default)]
struct Indexed {
    /// `None`: the holder has left, or has not joined.
    last: Option<IndexedEvents>,
    is_reported: bool,
}

/// Events that are read from a log at once.
const BATCH: usize = 64;

impl History {
    fn new(log: Arc<EventLog>) -> Self {
        Self { log, blocks: HashSet::new(), digests: vec![CacheDigest::default()], is_reported: false }
    }

    /// Number of the last event.
    fn last(&self) -> u64 {
        self.digests.len() as u64 - 1
    }

    /// Takes the events since the last instant. Returns whether there are any.
    fn follow(&mut self, world: &World) -> bool {
        let before = self.last();
        loop {
            let events = match self.log.after(self.last(), BATCH) {
                Ok(events) => events,
                Err(gap) => {
                    world.violated(format_args!("too many events at one instant: {gap}"));
                    return false;
                }
            };
            for event in &events {
                let digest = self.apply(&event.event);
                self.digests.push(digest);
            }
            if events.len() < BATCH {
                return self.last() > before;
            }
        }
    }

    /// Applies an event to the set of blocks. Returns its digest. Not taken from the log, which is under test too.
    fn apply(&mut self, event: &BlockEvent) -> CacheDigest {
        let last = self.digests.last().copied().unwrap_or_default();
        let term = |block: &SequenceHash| SetDigest::term(block.short());
        match event {
            BlockEvent::Stored { level, blocks, .. } => {
                let added = blocks.iter().filter(|block| self.blocks.insert((*level, **block)));
                added.fold(last, |all, block| all.with(*level, term(block)))
            }
            BlockEvent::Removed { level, blocks } => {
                let removed = blocks.iter().filter(|block| self.blocks.remove(&(*level, **block)));
                removed.fold(last, |all, block| all.without(*level, term(block)))
            }
            BlockEvent::Cleared { level } => {
                self.blocks.retain(|(at, _)| at != level);
                self.blocks.iter().fold(CacheDigest::default(), |all, (level, block)| all.with(*level, term(block)))
            }
        }
    }
}

impl EventWatch {
    /// Called at the end of each instant.
    pub(super) fn check(&mut self, cluster: &Cluster) {
        self.follow(cluster);
        let Self { histories, holders, routers } = self;
        for (number, process) in &*cluster.routers.lock() {
            let started = process.started;
            let watch = routers.entry(*number).or_insert(RouterWatch { started, indexed: Vec::new() });
            if watch.started != started {
                *watch = RouterWatch { started, indexed: Vec::new() };
            }
            watch.indexed.resize(holders.len(), Indexed::default());
            for (holder, indexed) in holders.iter().zip(&mut watch.indexed) {
                let (world, source) = (&cluster.world, source(*holder));
                let has_snapshot = |epoch| world.has_snapshot_now(Node::Router(*number), source, epoch);
                let now = process.router.indexed_events(*holder);
                if let Some(problem) = indexed.update(now, histories, *holder, has_snapshot) {
                    world.violated(format_args!("r{number}: {problem}"));
                }
            }
        }
    }

    /// Takes the events since the last instant, and compares them with the blocks of the processes that had some.
    fn follow(&mut self, cluster: &Cluster) {
        let logs = cluster.logs.lock();
        for (holder, log) in &logs[self.histories.len()..] {
            self.histories.insert((*holder, log.epoch()), History::new(log.clone()));
            if !self.holders.contains(holder) {
                self.holders.push(*holder);
            }
        }
        for ((holder, epoch), history) in &mut self.histories {
            if !history.follow(&cluster.world) {
                continue;
            }
            let Some(actual) = actual_digest(cluster, *holder, *epoch) else { continue };
            let announced = history.digests.last().copied().unwrap_or_default();
            if announced != actual && !std::mem::replace(&mut history.is_reported, true) {
                let last = history.last();
                cluster.world.violated(format_args!("{holder:?} has other blocks than announced up to event {last}"));
            }
        }
    }
}

impl Indexed {
    /// Compares the index of a router with the blocks that a holder had after the last event that the index includes.
    /// Returns what is wrong, once.
    fn update(
        &mut self,
        now: Option<IndexedEvents>,
        histories: &BTreeMap<(Holder, Epoch), History>,
        holder: Holder,
        has_snapshot: impl Fn(Epoch) -> bool,
    ) -> Option<String> {
        if now == self.last {
            return None;
        }
        let before = std::mem::replace(&mut self.last, now);
        let IndexedEvents { epoch, number, digest } = now?;
        let goes_back = |before: IndexedEvents| match epoch.cmp(&before.epoch) {
            Ordering::Less => !has_snapshot(epoch),
            Ordering::Equal => number < before.number,
            Ordering::Greater => false,
        };
        let expected = match number {
            0 => Some(CacheDigest::default()),
            _ => histories.get(&(holder, epoch)).and_then(|history| history.digests.get(number as usize)).copied(),
        };
        let problem = if expected.is_none() {
            "which there is not"
        // An index that has evicted blocks has no digest.
        } else if digest.is_some() && digest != expected {
            "and has other blocks than there were then"
        } else if number > 0 && before.is_some_and(goes_back) {
            "an older one than before"
        } else {
            self.is_reported = false;
            return None;
        };
        let is_new = !std::mem::replace(&mut self.is_reported, true);
        is_new.then(|| {
            format!("the index of {holder:?} is at event {number} of {epoch:?}, {problem}; before: {before:?}")
        })
    }
}

/// The source of the events of a holder.
fn source(holder: Holder) -> Source {
    match holder {
        Holder::Worker(id) | Holder::Estimate(id) => Source::Worker(id),
        Holder::Store(id) => Source::Store(id),
    }
}

/// What a worker of an epoch or the store has now. `None`: the worker has ended.
fn actual_digest(cluster: &Cluster, holder: Holder, epoch: Epoch) -> Option<CacheDigest> {
    let add = |all: CacheDigest, (level, digest): (Level, SetDigest)| all.with(level, digest.sum);
    if let Holder::Worker(id) = holder {
        let workers = cluster.workers.lock();
        let process = workers.get(&id).filter(|process| process.epoch == epoch.0)?;
        Some(process.manager.set_digest().into_iter().fold(CacheDigest::default(), add))
    } else {
        cluster.store.as_ref().map(|store| add(CacheDigest::default(), (Level::G4, store.set_digest())))
    }
}
