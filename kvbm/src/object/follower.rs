//! Learning what others wrote: writers are found by listing, their next manifests by asking for the next number.
//!
//! The work of a round is bounded, whatever lies in the store: one listing of writers, a bounded number of questions, and
//! the manifests that are new; and every few rounds, what somebody is about to delete. A manifest that is not sound is
//! skipped, and so is one that cannot be read although the store answers (`unreadable`): neither fails the round. Numbers may
//! be missing where manifests were collected, so a writer without news is listed now and then, from its next number on.
//! Nothing is asked on the path of a request.

use super::catalog::{Catalog, paths};
use super::client::unreadable::Unreadable;
use super::client::{Client, is_too_large};
use super::format::layout::{Layout, ObjectId, Writer};
use super::format::manifest::{self, Section};
use super::format::tombstones;
use super::{PARALLEL, Standing};
use crate::transform::crypt::{KeyError, MetadataKeys};
use bytes::Bytes;
use futures::stream::{self, StreamExt};
use object_store::path::Path;
use object_store::{Error, ObjectMeta};
use std::collections::{BTreeMap, HashSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::watch;
use tokio::time::{Instant, MissedTickBehavior};

/// A conversation of another process is to be found within two seconds: one to ask, one to read.
const ROUND: Duration = Duration::from_secs(1);
/// Writers asked in a round: the ones that wrote last, and as many of the others in turn.
const ASKED: usize = 32;
/// Manifests of one writer read in a round; the rest follows in the next.
const READ: usize = 256;
/// How often a writer without news is listed, and how many such writers in a round: about as many lists as those of writers.
const LIST_INTERVAL: Duration = Duration::from_mins(1);
const LISTED: usize = 1;
/// Rounds from one look at what is about to be deleted to the next: seconds, of the minutes that are left.
const LOOK: u64 = 5;
/// Whoever slept for so long may wait for a manifest that was deleted meanwhile. Less than what deletions wait for.
const SLEPT: Duration = Duration::from_mins(1);

/// A process that wrote within this time is likely to write again.
const ACTIVE: Duration = Duration::from_mins(1);

/// Keeps a catalog up to date with the store.
pub(super) struct Follower {
    client: Arc<Client>,
    layout: Layout,
    own: Writer,
    catalog: Arc<Catalog>,
    known: BTreeMap<Writer, Seen>,
    /// What is about to be deleted, by who said so.
    removals: BTreeMap<Writer, HashSet<ObjectId>>,
    rounds: u64,
    unreadable_removals: Unreadable,
    /// The last round that went well.
    awake: Instant,
    standing: watch::Sender<Standing>,
    /// What manifests must be sealed with, if they must.
    keys: Option<Arc<MetadataKeys>>,
    /// Whether what was there at the start is known.
    learned: bool,
    turn: usize,
}

/// How far a writer was read.
#[derive(Clone, Copy)]
struct Seen {
    next: u64,
    last_news: Instant,
    /// When its manifests were last listed.
    listed: Option<Instant>,
}

impl Seen {
    /// A writer of which nothing is known.
    fn new() -> Self {
        Self { next: 0, last_news: Instant::now(), listed: None }
    }

    fn read(&mut self, number: u64) {
        (self.next, self.last_news) = (number + 1, Instant::now());
    }

    fn is_list_due(&self) -> bool {
        self.listed.is_none_or(|listed| listed.elapsed() >= LIST_INTERVAL)
    }
}

/// What asking for a manifest brought.
enum Asked {
    Sound(Vec<Section>),
    Unsound,
    /// It is not there.
    Absent,
    /// It cannot be read, although the store answers.
    Unreadable,
}

impl Follower {
    pub(super) fn new(
        client: Arc<Client>,
        layout: Layout,
        own: Writer,
        catalog: Arc<Catalog>,
        standing: watch::Sender<Standing>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Self {
        Self {
            client,
            layout,
            own,
            catalog,
            known: BTreeMap::new(),
            removals: BTreeMap::new(),
            rounds: 0,
            unreadable_removals: Unreadable::default(),
            awake: Instant::now(),
            standing,
            keys,
            learned: false,
            turn: 0,
        }
    }

    /// Follows for ever.
    pub(super) async fn run(mut self) {
        let mut rounds = tokio::time::interval(ROUND);
        rounds.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            rounds.tick().await;
            let now = self.follow_once().await;
            let before = self.standing.send_replace(now.clone());
            // Once, not every second.
            match (&before, &now) {
                (Standing::Away(_) | Standing::Refused(_), Standing::Ready) => {
                    tracing::info!(store = %self.client, prefix = %self.layout, "the store is reachable again");
                }
                (Standing::Learning | Standing::Ready, Standing::Away(why) | Standing::Refused(why)) => {
                    tracing::warn!(
                        store = %self.client, prefix = %self.layout, reason = why,
                        "the store is not usable; retrying every second"
                    );
                }
                _ => {}
            }
        }
    }

    pub(super) async fn follow_once(&mut self) -> Standing {
        let now = match self.round().await {
            Ok(()) => Standing::Ready,
            Err(error) => Standing::from(&error),
        };
        self.learned |= now == Standing::Ready;
        now
    }

    async fn round(&mut self) -> Result<(), Error> {
        let look = self.rounds.is_multiple_of(LOOK);
        // Whether this one goes well or not.
        self.rounds += 1;
        // Before the manifests, which still name what goes. What cannot be read keeps nobody from the rest.
        let mut outcome = if look { self.look_at_removals().await } else { Ok(()) };
        let strangers = self.strangers().await?;
        let slept = self.learned && self.awake.elapsed() > SLEPT;
        if self.learned {
            self.known.extend(strangers.iter().map(|writer| (*writer, Seen::new())));
        } else {
            self.read_past(strangers).await?;
        }
        let asked =
            if slept { self.known.iter().map(|(writer, seen)| (*writer, *seen)).collect() } else { self.next_asked() };
        let mut due: Vec<(Writer, Option<Instant>)> =
            asked.iter().filter(|(_, seen)| seen.is_list_due()).map(|(writer, seen)| (*writer, seen.listed)).collect();
        due.sort_unstable_by_key(|(_, listed)| *listed);
        let lists = |writer: &Writer| slept || due.iter().take(LISTED).any(|(due, _)| due == writer);
        let news: Vec<_> = stream::iter(asked)
            .map(|(writer, seen)| self.read_on(writer, seen, lists(&writer)))
            .buffer_unordered(PARALLEL)
            .collect()
            .await;
        for (writer, seen, read) in news {
            self.known.insert(writer, seen);
            outcome = outcome.and(read);
        }
        let active = self.known.values().filter(|seen| seen.last_news.elapsed() < ACTIVE).count();
        self.catalog.set_active_writers(active);
        self.retry_unreadable().await?;
        outcome?;
        self.awake = Instant::now();
        Ok(())
    }

    /// Forgets what somebody is about to delete.
    async fn look_at_removals(&mut self) -> Result<(), Error> {
        let listed = self.client.list(&self.layout.removals()).await?;
        let listed: HashSet<Writer> =
            listed.objects.iter().filter_map(|meta| meta.location.filename()?.parse().ok()).collect();
        self.removals.retain(|collector, _| listed.contains(collector));
        let paths: HashSet<Path> = listed.iter().map(|collector| self.layout.removal(*collector)).collect();
        self.unreadable_removals.retain(|path| paths.contains(path));
        for collector in listed {
            if self.removals.contains_key(&collector) {
                continue;
            }
            let path = self.layout.removal(collector);
            if self.unreadable_removals.is_waiting(&path) {
                continue;
            }
            let bytes = match self.client.get(&path, tombstones::MAX_BYTES).await {
                Ok(bytes) => bytes,
                Err(error) if is_too_large(&error) => Bytes::new(),
                // It is over with already.
                Err(Error::NotFound { .. }) => continue,
                Err(error) => {
                    self.client.check_reads(&self.layout.absent(self.own)).await?;
                    self.unreadable_removals.failed(&path, &error);
                    continue;
                }
            };
            self.unreadable_removals.resolved(&path);
            let condemned: HashSet<ObjectId> =
                tombstones::decode(collector, &bytes).unwrap_or_default().into_iter().collect();
            self.catalog.forget(|object| condemned.contains(&object));
            self.removals.insert(collector, condemned);
        }
        Ok(())
    }

    fn is_condemned(&self, writer: Writer, section: &Section) -> bool {
        let object = ObjectId { writer, number: section.object };
        self.removals.values().any(|condemned| condemned.contains(&object))
    }

    /// Writers that were not there in the last round.
    async fn strangers(&self) -> Result<Vec<Writer>, Error> {
        let listed = self.client.list(&self.layout.manifests()).await?;
        let writers = listed.common_prefixes.iter().filter_map(|path| path.filename()?.parse().ok());
        Ok(writers.filter(|writer| *writer != self.own && !self.known.contains_key(writer)).collect())
    }

    /// The numbers of a writer's manifests from one on, in order.
    async fn numbers(&self, writer: Writer, from: u64) -> Result<Vec<u64>, Error> {
        let under = self.layout.manifests_of(writer);
        let after = from.checked_sub(1).map(|last| self.layout.manifest(writer, last));
        let number =
            |meta: &ObjectMeta| ObjectId::at(&meta.location).filter(|id| id.writer == writer).map(|id| id.number);
        let listed = self.client.list_after(&under, after.as_ref()).await?;
        let mut numbers: Vec<u64> = listed.iter().filter_map(number).filter(|number| *number >= from).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Reads what was there before this process, newest first, as far as the catalog has room.
    async fn read_past(&mut self, mut writers: Vec<Writer>) -> Result<(), Error> {
        writers.sort_unstable();
        let mut room = true;
        for writer in writers.into_iter().rev() {
            let mut numbers = self.numbers(writer, 0).await?;
            let mut seen = Seen { listed: Some(Instant::now()), ..Seen::new() };
            numbers.last().into_iter().for_each(|last| seen.read(*last));
            if !room {
                numbers.clear();
            }
            let mut manifests =
                stream::iter(numbers.into_iter().rev()).map(|number| self.ask(writer, number)).buffered(PARALLEL);
            while let Some(asked) = manifests.next().await {
                let Asked::Sound(sections) = asked? else { continue };
                let mut sections = sections.iter().rev().filter(|section| !self.is_condemned(writer, section));
                room = sections.all(|section| self.catalog.add_older(paths(&self.layout, writer), section));
                if !room {
                    break;
                }
            }
            drop(manifests);
            self.known.insert(writer, seen);
        }
        Ok(())
    }

    /// Whom to ask in this round.
    fn next_asked(&mut self) -> Vec<(Writer, Seen)> {
        let mut writers: Vec<(Writer, Seen)> = self.known.iter().map(|(writer, seen)| (*writer, *seen)).collect();
        writers.sort_by_key(|(writer, seen)| (std::cmp::Reverse(seen.last_news), *writer));
        let quiet = writers.split_off(writers.len().min(ASKED));
        let turn = self.turn.checked_rem(quiet.len()).unwrap_or(0);
        writers.extend(quiet.iter().cycle().skip(turn).take(ASKED.min(quiet.len())));
        self.turn = turn + ASKED;
        writers
    }

    /// Reads a writer's manifests from the next number on. How far that went, and what stopped it.
    async fn read_on(&self, writer: Writer, mut seen: Seen, list: bool) -> (Writer, Seen, Result<(), Error>) {
        let read = self.advance(writer, &mut seen, list).await;
        (writer, seen, read)
    }

    async fn advance(&self, writer: Writer, seen: &mut Seen, list: bool) -> Result<(), Error> {
        let mut unreadable = false;
        for _ in 0..READ {
            let path = self.layout.manifest(writer, seen.next);
            // It may not even be there: some stores deny what they would not find.
            if self.catalog.unreadable.is_waiting(&path) {
                break;
            }
            match self.ask(writer, seen.next).await? {
                // Of an empty folder no number is known to count from.
                Asked::Absent if seen.next == 0 => return self.read_listed(writer, seen).await,
                Asked::Absent => break,
                Asked::Unreadable => {
                    unreadable = true;
                    break;
                }
                asked => self.take(writer, &asked),
            }
            seen.read(seen.next);
        }
        if unreadable || list { self.read_listed(writer, seen).await } else { Ok(()) }
    }

    /// Reads the manifests of a writer that are there, whatever numbers are missing between them.
    async fn read_listed(&self, writer: Writer, seen: &mut Seen) -> Result<(), Error> {
        let numbers = self.numbers(writer, seen.next).await?;
        // What is left of many is listed again in the next round.
        seen.listed = (numbers.len() <= READ).then(Instant::now);
        for number in numbers.into_iter().take(READ) {
            if !self.catalog.unreadable.is_waiting(&self.layout.manifest(writer, number)) {
                self.take(writer, &self.ask(writer, number).await?);
            }
            seen.read(number);
        }
        Ok(())
    }

    /// Tries one of the manifests again that could not be read.
    async fn retry_unreadable(&self) -> Result<(), Error> {
        let Some(path) = self.catalog.unreadable.next_due() else { return Ok(()) };
        match ObjectId::at(&path) {
            Some(ObjectId { writer, number }) => self.take(writer, &self.ask(writer, number).await?),
            None => self.catalog.unreadable.resolved(&path),
        }
        Ok(())
    }

    fn take(&self, writer: Writer, asked: &Asked) {
        let Asked::Sound(sections) = asked else { return };
        for section in sections.iter().filter(|section| !self.is_condemned(writer, section)) {
            self.catalog.add(paths(&self.layout, writer), section);
        }
    }

    async fn ask(&self, writer: Writer, number: u64) -> Result<Asked, Error> {
        let path = self.layout.manifest(writer, number);
        let bytes = match self.client.get(&path, manifest::MAX_BYTES).await {
            Ok(bytes) => bytes,
            Err(Error::NotFound { .. }) => {
                self.catalog.unreadable.resolved(&path);
                return Ok(Asked::Absent);
            }
            // What is no manifest is not sound either.
            Err(error) if is_too_large(&error) => Bytes::new(),
            Err(error) => {
                // Fails the round unless it is this manifest alone.
                self.client.check_reads(&self.layout.absent(self.own)).await?;
                self.catalog.unreadable.failed(&path, &error);
                return Ok(Asked::Unreadable);
            }
        };
        let believed = match &self.keys {
            Some(keys) => manifest::authentic(writer, number, &bytes, keys).await,
            None => Ok(true),
        };
        let believed = match believed {
            Ok(believed) => believed,
            // Nothing is known of its seal now.
            Err(error) => {
                self.catalog.unreadable.failed(&path, &unverified(error));
                return Ok(Asked::Unreadable);
            }
        };
        self.catalog.unreadable.resolved(&path);
        let sections = manifest::decode(writer, &bytes).filter(|_| believed);
        if sections.is_none() {
            self.catalog.skip();
            if let Some(suppressed) = self.catalog.unsound_lines.pass() {
                tracing::warn!(manifest = %path, suppressed, "manifest is corrupt");
            }
        }
        Ok(sections.map_or(Asked::Unsound, Asked::Sound))
    }
}

/// The error of the keys that a seal is verified with, as one of the store.
fn unverified(error: KeyError) -> Error {
    match error {
        KeyError::Store(error) => error,
        error => Error::Generic { store: "keys", source: Box::new(error) },
    }
}
