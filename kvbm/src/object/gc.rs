//! Which objects go: pure, so that several collectors that see the same store choose the same.
//!
//! ```text
//!   live ──expired, copied, too old, over budget──▶ condemned ──grace──▶ deleted, then the manifests that named only such
//!           pinned ones stay                a list of removals says so; whoever follows the store stops asking
//! ```
//!
//! An object is as old as its last use, and as young as the youngest that builds on it; of one age the last part of a chain
//! goes first: so a prefix does not lose its head before its tail. What cannot be read as ours (another version's) goes by age alone, if at all;
//! what a manifest names that the store does not hand out is unknown, and stays. Of a writer's manifests the highest stays as long as another one does.

mod age;
mod cache;
pub(super) mod collector;
pub(super) mod compact;
pub(super) mod schedule;

use super::format::layout::{ObjectId, Writer};
use super::format::manifest::{Entry, Section};
use crate::block::{Date, DomainId, Fingerprint, SequenceHash};
use crate::tier::Quota;
use object_store::path::Path;
use serde::Serialize;
use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// An object that no manifest names by then never gets one: its writer tries for as long as it lives, but whoever could
/// read it has long recomputed.
const ORPHAN: Duration = Duration::from_hours(1);

/// By then whoever follows the store knows what goes: two looks at the lists of removals, and a load. An object that only its
/// own writer used is deleted after that, whatever the grace.
const NOTICE: Duration = Duration::from_secs(15);

/// How long what a process noted of its uses is believed after it wrote no more: it ended, and others have used since what is
/// still in use.
const NOTED: Duration = Duration::from_hours(30 * 24);

/// What may stay.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Objects that were not used for so long go, written or read from; the age of what others build on is theirs. Default: none
    /// is too old.
    pub age_max: Option<Duration>,
    /// Bytes that may rest, all domains together, and what is not known to belong to one. Default: as many as there are.
    pub budget: Option<u64>,
    /// Bytes of the budget that are kept free for what is written next, as far as that takes nothing that is promised. Default 0.
    pub headroom: u64,
    /// What single domains are promised of the budget, and how much of them may rest.
    pub shares: BTreeMap<DomainId, Quota>,
    /// From the word that an object goes to its end. Default 10 minutes: whoever follows the store knows after seconds,
    /// and a load takes less than one. What a collecting process wrote itself, and no other noted a use of, waits 15 s at most.
    pub grace: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Self { age_max: None, budget: None, headroom: 0, shares: BTreeMap::new(), grace: Duration::from_mins(10) }
    }
}

/// How much of a budget is kept free in a store that is written to meanwhile: an eighth, for what comes until what was named as
/// going has gone.
pub const fn headroom(budget: u64) -> u64 {
    budget / 8
}

/// Why an object is marked for deletion.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Why {
    /// All its blocks are expired.
    Expired,
    /// Other objects contain all its blocks.
    #[serde(rename = "duplicate")]
    Copied,
    /// It was not used for `max_age`.
    #[serde(rename = "max_age")]
    Age,
    /// The store is above its capacity.
    #[serde(rename = "capacity")]
    Budget,
    /// An operator requested it.
    #[serde(rename = "requested")]
    Asked,
}

/// All that lies in a store.
#[derive(Debug, Default)]
pub struct Survey {
    pub(super) manifests: Vec<Manifest>,
    pub(super) objects: BTreeMap<ObjectId, Stored>,
    pub(super) removals: Vec<Removal>,
    pub(super) notes: Vec<Note>,
    /// The process that collects, if it writes to the store too.
    pub(super) own: Option<Writer>,
}

#[cfg(test)]
thread_local! {
    /// How often this thread made a plan.
    pub(super) static PLANNED: std::cell::Cell<u32> = const { std::cell::Cell::new(0) };
}

#[derive(Debug)]
pub(super) struct Manifest {
    pub(super) path: Path,
    pub(super) writer: Writer,
    /// Counted by its writer.
    pub(super) number: u64,
    pub(super) modified: Date,
    pub(super) contents: Contents,
}

/// What a manifest names.
#[derive(Clone, Debug)]
pub(super) enum Contents {
    Sections(Arc<[Section]>),
    /// It is damaged, or another version wrote it.
    Foreign,
    /// It could not be read although the store answers, so nothing is known of it.
    Unreadable,
}

/// What a process noted of its uses.
#[derive(Debug)]
pub(super) struct Note {
    pub(super) path: Path,
    /// Which process.
    pub(super) reader: Writer,
    pub(super) modified: Date,
    /// And how long before it did so.
    pub(super) used: Arc<[(ObjectId, Duration)]>,
}

#[derive(Debug)]
pub(super) struct Stored {
    pub(super) path: Path,
    pub(super) bytes: u64,
    pub(super) modified: Date,
}

#[derive(Debug)]
pub(super) struct Removal {
    pub(super) path: Path,
    pub(super) modified: Date,
    pub(super) objects: Arc<[ObjectId]>,
}

/// Blocks of one cache domain, one engine fingerprint and one writer that the store can serve.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Holding {
    /// Id of the cache domain.
    pub domain: String,
    /// Fingerprint of the engine.
    pub fingerprint: String,
    /// Id of the process that wrote them.
    pub writer: String,
    /// Number of blocks.
    pub blocks: u64,
    /// Number of objects that contain them.
    pub objects: u64,
    /// Bytes of these objects.
    pub bytes: u64,
    /// When the first of them was written, in seconds since 1970.
    pub first_written_at: u64,
    /// When the last of them was written, in seconds since 1970.
    pub last_written_at: u64,
    /// When one of them was last written or read, in seconds since 1970, as far as reads are logged.
    pub last_used_at: u64,
}

/// What is to be done.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Plan {
    pub(super) condemn: Vec<(ObjectId, Why)>,
    /// In the order in which they are to be deleted: what is read first goes first, and the word that it goes last.
    pub(super) manifests: Vec<Path>,
    pub(super) objects: Vec<ObjectId>,
    pub(super) removals: Vec<Path>,
    pub(super) notes: Vec<Path>,
    /// After how long the next object that is named as going is to be deleted.
    pub(super) next: Option<Duration>,
}

/// For which bound an object is looked at.
#[derive(Clone, Copy)]
enum Round {
    Maximum,
    Sparing,
    Budget,
}

/// An object that can be asked for.
#[derive(Clone, Copy)]
pub(super) struct Live<'a> {
    pub(super) id: ObjectId,
    pub(super) section: &'a Section,
    pub(super) stored: &'a Stored,
    /// When it was last written or, as far as that was noted, read from.
    pub(super) used: Date,
}

impl Survey {
    /// Objects that a manifest names, that are there, and that nobody is about to delete.
    pub(super) fn live(&self) -> impl Iterator<Item = Live<'_>> {
        let condemned: BTreeSet<ObjectId> =
            self.removals.iter().flat_map(|list| list.objects.iter().copied()).collect();
        self.named().filter(move |live| !condemned.contains(&live.id))
    }

    /// Objects that a manifest names and that are gone, though nobody said so.
    pub(super) fn missing(&self) -> impl Iterator<Item = ObjectId> {
        let condemned: BTreeSet<ObjectId> =
            self.removals.iter().flat_map(|list| list.objects.iter().copied()).collect();
        let named = self.manifests.iter().flat_map(Manifest::named).map(|(id, _)| id);
        named.filter(move |id| !self.objects.contains_key(id) && !condemned.contains(id))
    }

    /// Manifests that could not be read although the store answers.
    pub(super) fn unreadable(&self) -> u64 {
        self.manifests_that(|contents| matches!(contents, Contents::Unreadable))
    }

    pub(super) fn manifests_that(&self, are: impl Fn(&Contents) -> bool) -> u64 {
        self.manifests.iter().filter(|manifest| are(&manifest.contents)).count() as u64
    }

    fn named(&self) -> impl Iterator<Item = Live<'_>> {
        let mut used: BTreeMap<ObjectId, Date> = BTreeMap::new();
        for note in &self.notes {
            for &(id, idle) in note.used.iter() {
                let date = note.modified.before(idle);
                let last = used.entry(id).or_insert(date);
                *last = date.max(*last);
            }
        }
        let sections = self.manifests.iter().flat_map(Manifest::named);
        sections.filter_map(move |(id, section)| {
            let stored = self.objects.get(&id)?;
            // Packed again is not used again.
            let written = stored.modified.before(section.idle);
            let used = used.get(&id).map_or(written, |used| written.max(*used));
            Some(Live { id, section, stored, used })
        })
    }

    /// What is there to be asked for, by domain, fingerprint and writer.
    pub fn holdings(&self) -> Vec<Holding> {
        let mut holdings: BTreeMap<(DomainId, Fingerprint, Writer), Holding> = BTreeMap::new();
        for Live { id, section, stored, used } in self.live() {
            let [at, used] = [stored.modified, used].map(|date| u64::from(Date::encode(Some(date))));
            let holding = holdings.entry((section.domain, section.fingerprint, id.writer)).or_insert_with(|| Holding {
                domain: section.domain.to_string(),
                fingerprint: section.fingerprint.to_string(),
                writer: id.writer.to_string(),
                blocks: 0,
                objects: 0,
                bytes: 0,
                first_written_at: at,
                last_written_at: at,
                last_used_at: used,
            });
            holding.blocks += section.entries.len() as u64;
            holding.objects += 1;
            holding.bytes += stored.bytes;
            holding.first_written_at = holding.first_written_at.min(at);
            holding.last_written_at = holding.last_written_at.max(at);
            holding.last_used_at = holding.last_used_at.max(used);
        }
        holdings.into_values().collect()
    }

    /// The names of the blocks that can be asked for and are not over by `now`; one for each place where such a block lies.
    pub fn names(&self, now: Date) -> impl Iterator<Item = SequenceHash> {
        let entries = self.live().flat_map(|live| &live.section.entries);
        entries.filter(move |entry| !entry.keep().is_over(now)).map(|entry| entry.name)
    }

    /// Bytes of all objects, those that are about to be deleted included.
    pub fn bytes(&self) -> u64 {
        self.objects.values().map(|stored| stored.bytes).sum()
    }

    /// What a policy makes of it.
    pub(super) fn plan(&self, policy: &Policy, now: Date) -> Plan {
        #[cfg(test)]
        PLANNED.set(PLANNED.get() + 1);
        let condemn = self.condemned(policy, now);
        let over = |since: Date, wait: Duration| since.after(wait) <= now;
        let mut said: BTreeMap<ObjectId, Date> = BTreeMap::new();
        for removal in &self.removals {
            for object in removal.objects.iter() {
                let first = said.entry(*object).or_insert(removal.modified);
                *first = removal.modified.min(*first);
            }
        }
        let named: BTreeSet<ObjectId> = self.named().map(|live| live.id).collect();
        // What another version wrote may be named in a way that we cannot read, and so may what an unreadable manifest names.
        let writers = |of: fn(&Contents) -> bool| -> BTreeSet<Writer> {
            let manifests = self.manifests.iter().filter(|manifest| of(&manifest.contents));
            manifests.map(|manifest| manifest.writer).collect()
        };
        let foreign = writers(|contents| matches!(contents, Contents::Foreign));
        let unreadable = writers(|contents| matches!(contents, Contents::Unreadable));
        let too_old = |modified: Date| policy.age_max.is_some_and(|age| over(modified, age.max(ORPHAN)));
        let used: BTreeSet<ObjectId> = self
            .notes
            .iter()
            .filter(|note| Some(note.reader) != self.own)
            .flat_map(|note| note.used.iter().map(|(object, _)| *object))
            .collect();
        let grace = |id: &ObjectId| match self.own {
            Some(own) if id.writer == own && !used.contains(id) => policy.grace.min(NOTICE),
            _ => policy.grace,
        };
        let goes = |(id, stored): &(&ObjectId, &Stored)| match said.get(id) {
            Some(since) => over(*since, grace(id)),
            None if named.contains(id) => false,
            None if unreadable.contains(&id.writer) => false,
            None if foreign.contains(&id.writer) => too_old(stored.modified),
            None => over(stored.modified, policy.grace.max(ORPHAN)),
        };
        let objects: Vec<ObjectId> = self.objects.iter().filter(goes).map(|(id, _)| *id).collect();
        let gone: BTreeSet<ObjectId> = objects.iter().copied().collect();
        let stays = |id: &ObjectId| self.objects.contains_key(id) && !gone.contains(id);
        let dead = |manifest: &Manifest| match &manifest.contents {
            Contents::Sections(_) => {
                over(manifest.modified, policy.grace) && !manifest.named().any(|(id, _)| stays(&id))
            }
            Contents::Foreign => too_old(manifest.modified),
            Contents::Unreadable => false,
        };
        // A process that starts later counts from the highest number that it finds: it stays as long as another does.
        let staying: BTreeSet<Writer> =
            self.manifests.iter().filter(|manifest| !dead(manifest)).map(|manifest| manifest.writer).collect();
        let mut highest: BTreeMap<Writer, u64> = BTreeMap::new();
        for manifest in &self.manifests {
            let highest = highest.entry(manifest.writer).or_default();
            *highest = manifest.number.max(*highest);
        }
        let needed = |manifest: &Manifest| {
            staying.contains(&manifest.writer) && highest.get(&manifest.writer) == Some(&manifest.number)
        };
        let (dead, alive): (Vec<&Manifest>, Vec<&Manifest>) =
            self.manifests.iter().partition(|manifest| dead(manifest) && !needed(manifest));
        let still_named: BTreeSet<ObjectId> =
            alive.iter().flat_map(|manifest| manifest.named()).map(|(id, _)| id).collect();
        let done = |removal: &&Removal| {
            let needed = |id: &ObjectId| stays(id) || still_named.contains(id);
            over(removal.modified, policy.grace) && !removal.objects.iter().any(needed)
        };
        let noted = NOTED.max(policy.age_max.unwrap_or_default());
        let forgotten = self.notes.iter().filter(|note| over(note.modified, noted));
        let said_before = said.iter().filter(|(id, _)| stays(id)).map(|(id, since)| since.after(grace(id)).since(now));
        let next = said_before.chain(condemn.iter().map(|(id, _)| grace(id))).min();
        Plan {
            condemn,
            next,
            manifests: dead.into_iter().map(|manifest| manifest.path.clone()).collect(),
            objects,
            removals: self.removals.iter().filter(done).map(|removal| removal.path.clone()).collect(),
            notes: forgotten.map(|note| note.path.clone()).collect(),
        }
    }

    /// Which live objects are to go, and why, in order.
    fn condemned(&self, policy: &Policy, now: Date) -> Vec<(ObjectId, Why)> {
        let live: Vec<Live<'_>> = self.live().collect();
        let best = age::best(&live, now);
        let (youth, copied) = (age::youth(&live, &best), age::copied(&live, &best, now));
        // What will be a copy as soon as everybody knows of the other takes no room from others: it goes anyway.
        let soon = now.after(age::LEARNED);
        let passing = age::copied(&live, &age::best(&live, soon), soon);
        let mut condemned = BTreeMap::new();
        let mut candidates = Vec::new();
        for (index, (live, &youth)) in live.iter().zip(&youth).enumerate() {
            let entries = &live.section.entries;
            if entries.iter().all(|entry| entry.keep().is_over(now)) {
                condemned.insert(live.id, Why::Expired);
            } else if copied.contains(&index) {
                condemned.insert(live.id, Why::Copied);
            } else if passing.contains(&index) || entries.iter().any(|entry| is_pinned(entry, now)) {
                // Stays, whatever it takes.
            } else if policy.age_max.is_some_and(|age| youth.after(age) <= now) {
                condemned.insert(live.id, Why::Age);
            } else {
                candidates.push((youth, Reverse(live.stored.modified), Reverse(live.id), live));
            }
        }
        candidates.sort_unstable_by_key(|(youth, modified, id, _)| (*youth, *modified, *id));
        let mut rest: BTreeMap<DomainId, u64> = BTreeMap::new();
        let staying = live.iter().enumerate().filter(|(index, _)| !passing.contains(index)).map(|(_, live)| live);
        for live in staying.filter(|live| !condemned.contains_key(&live.id)) {
            *rest.entry(live.section.domain).or_default() += live.stored.bytes;
        }
        // What no manifest names that can be read takes room too, until it goes.
        let named: BTreeSet<ObjectId> = self.named().map(|live| live.id).collect();
        let going: BTreeSet<ObjectId> = self.removals.iter().flat_map(|list| list.objects.iter().copied()).collect();
        let unnamed = self.objects.iter().filter(|(id, _)| !named.contains(id) && !going.contains(id));
        let mut all: u64 = rest.values().sum::<u64>() + unnamed.map(|(_, stored)| stored.bytes).sum::<u64>();
        // First what a domain has beyond its own maximum; then the oldest of all, sparing what is promised; then, when more is
        // promised than there is room for, that too.
        for round in [Round::Maximum, Round::Sparing, Round::Budget] {
            for (.., live) in &candidates {
                let domain = live.section.domain;
                let quota = policy.shares.get(&domain).copied().unwrap_or_default();
                let (own, bytes) = (rest.entry(domain).or_default(), live.stored.bytes);
                let over = |headroom| policy.budget.is_some_and(|budget| all > budget.saturating_sub(headroom));
                let goes = match round {
                    Round::Maximum => quota.maximum.is_some_and(|most| *own > most),
                    Round::Sparing => over(policy.headroom) && *own >= quota.guaranteed.saturating_add(bytes),
                    Round::Budget => over(0),
                };
                if goes && condemned.insert(live.id, Why::Budget).is_none() {
                    *own -= bytes;
                    all -= bytes;
                }
            }
        }
        condemned.into_iter().collect()
    }
}

impl Manifest {
    fn named(&self) -> impl Iterator<Item = (ObjectId, &Section)> {
        let sections = match &self.contents {
            Contents::Sections(sections) => &sections[..],
            Contents::Foreign | Contents::Unreadable => &[],
        };
        sections.iter().map(|section| (ObjectId { writer: self.writer, number: section.object }, section))
    }
}

fn is_pinned(entry: &Entry, now: Date) -> bool {
    !entry.keep().is_over(now) && entry.pinned.is_some_and(|pinned| pinned > now)
}

#[cfg(test)]
mod tests;
