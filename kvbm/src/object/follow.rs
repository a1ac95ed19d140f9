//! Learning what others wrote: writers are found by listing, their next manifests by asking for the next number.
//!
//! The work of a round is bounded, whatever lies in the store: one listing of writers, a bounded number of questions, and
//! the manifests that are new; and every few rounds, what somebody is about to delete. A manifest that is not sound is
//! skipped. Nothing is asked on the path of a request.

use super::catalog::{Catalog, paths};
use super::client::Client;
use super::layout::{Layout, ObjectId, Writer};
use super::manifest::{self, Section};
use super::{PARALLEL, Standing, removal};
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
const READ: u64 = 256;
/// Rounds from one look at what is about to be deleted to the next: seconds, of the minutes that are left.
const LOOK: u64 = 5;
/// Whoever slept for so long may wait for a manifest that was deleted meanwhile. Less than what deletions wait for.
const SLEPT: Duration = Duration::from_mins(1);

/// Keeps a catalog up to date with the store.
pub(super) struct Follower {
    client: Arc<Client>,
    layout: Layout,
    own: Writer,
    catalog: Arc<Catalog>,
    known: BTreeMap<Writer, Seen>,
    /// What is about to be deleted, by who said so.
    removals: BTreeMap<Writer, Going>,
    rounds: u64,
    /// The last round that went well.
    awake: Instant,
    standing: watch::Sender<Standing>,
    /// Whether what was there at the start is known.
    learned: bool,
    turn: usize,
}

/// Objects that somebody is about to delete, and the bytes of those that were known.
struct Going {
    objects: HashSet<ObjectId>,
    bytes: u64,
    /// The last of them to be deleted: once it is gone, nothing of them takes room. The list may stay for much longer.
    last: Option<Path>,
}

/// How far a writer was read.
#[derive(Clone, Copy)]
struct Seen {
    next: u64,
    last_news: Instant,
}

/// What asking for a manifest brought.
enum Asked {
    Sound(Vec<Section>),
    Unsound,
    NotYet,
}

impl Follower {
    pub(super) fn new(
        client: Arc<Client>,
        layout: Layout,
        own: Writer,
        catalog: Arc<Catalog>,
        standing: watch::Sender<Standing>,
    ) -> Self {
        let (known, removals, awake) = (BTreeMap::new(), BTreeMap::new(), Instant::now());
        Self { client, layout, own, catalog, known, removals, rounds: 0, awake, standing, learned: false, turn: 0 }
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
                    tracing::info!(store = %self.client, under = %self.layout, "store answers again");
                }
                (Standing::Learning | Standing::Ready, Standing::Away(why) | Standing::Refused(why)) => {
                    tracing::warn!(store = %self.client, under = %self.layout, why, "store does not serve; asked again every second");
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
        if self.learned {
            let slept = self.awake.elapsed() > SLEPT;
            let known: Vec<Writer> = self.known.keys().copied().filter(|_| slept).collect();
            for writer in strangers.into_iter().chain(known) {
                match self.read_listed(writer).await {
                    Ok(seen) => drop(self.known.insert(writer, seen)),
                    Err(error) => outcome = Err(error),
                }
            }
        } else {
            self.read_past(strangers).await?;
        }
        let asked = self.next_asked();
        let news: Vec<_> = stream::iter(asked)
            .map(|(writer, seen)| self.read_on(writer, seen))
            .buffer_unordered(PARALLEL)
            .collect()
            .await;
        for (writer, seen, read) in news {
            self.known.insert(writer, seen);
            outcome = outcome.and(read);
        }
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
        for collector in listed {
            if self.removals.contains_key(&collector) {
                continue;
            }
            let bytes = match self.client.get(&self.layout.removal(collector)).await {
                Ok(bytes) => bytes,
                // It is over with already.
                Err(Error::NotFound { .. }) => continue,
                Err(error) => return Err(error),
            };
            let condemned: HashSet<ObjectId> =
                removal::decode(collector, &bytes).unwrap_or_default().into_iter().collect();
            let (bytes, last) = self.catalog.forget(|object| condemned.contains(&object));
            self.removals.insert(collector, Going { objects: condemned, bytes, last });
        }
        for going in self.removals.values_mut() {
            let Some(last) = &going.last else { continue };
            if matches!(self.client.head(last).await, Err(Error::NotFound { .. })) {
                (going.bytes, going.last) = (0, None);
            }
        }
        self.catalog.going(self.removals.values().map(|going| going.bytes).sum());
        Ok(())
    }

    fn is_condemned(&self, writer: Writer, section: &Section) -> bool {
        let object = ObjectId { writer, number: section.object };
        self.removals.values().any(|going| going.objects.contains(&object))
    }

    /// Writers that were not there in the last round.
    async fn strangers(&self) -> Result<Vec<Writer>, Error> {
        let listed = self.client.list(&self.layout.manifests()).await?;
        let writers = listed.common_prefixes.iter().filter_map(|path| path.filename()?.parse().ok());
        Ok(writers.filter(|writer| *writer != self.own && !self.known.contains_key(writer)).collect())
    }

    /// The numbers of a writer's manifests, in order.
    async fn numbers(&self, writer: Writer) -> Result<Vec<u64>, Error> {
        let under = self.layout.manifests_of(writer);
        let number = |meta: &ObjectMeta| meta.location.filename().and_then(|name| name.parse::<u64>().ok());
        let mut numbers: Vec<u64> = self.client.list(&under).await?.objects.iter().filter_map(number).collect();
        numbers.sort_unstable();
        Ok(numbers)
    }

    /// Reads what was there before this process, newest first, as far as the catalog has room.
    async fn read_past(&mut self, mut writers: Vec<Writer>) -> Result<(), Error> {
        writers.sort_unstable();
        let mut room = true;
        for writer in writers.into_iter().rev() {
            let mut numbers = self.numbers(writer).await?;
            let next = numbers.last().map_or(0, |last| last + 1);
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
            self.known.insert(writer, Seen { next, last_news: Instant::now() });
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

    /// Reads the manifests of a writer that are there: some before them may be gone.
    async fn read_listed(&self, writer: Writer) -> Result<Seen, Error> {
        let from = self.known.get(&writer).map_or(0, |seen| seen.next);
        let numbers = self.numbers(writer).await?.into_iter().filter(|number| *number >= from);
        let mut next = from;
        for number in numbers {
            self.take(writer, &self.ask(writer, number).await?);
            next = number + 1;
        }
        Ok(Seen { next, last_news: Instant::now() })
    }

    fn take(&self, writer: Writer, asked: &Asked) {
        let Asked::Sound(sections) = asked else { return };
        for section in sections.iter().filter(|section| !self.is_condemned(writer, section)) {
            self.catalog.add(paths(&self.layout, writer), section);
        }
    }

    /// Reads a writer's manifests from the next number on. How far that went, and what stopped it.
    async fn read_on(&self, writer: Writer, mut seen: Seen) -> (Writer, Seen, Result<(), Error>) {
        for number in seen.next..seen.next + READ {
            match self.ask(writer, number).await {
                Ok(Asked::NotYet) => break,
                Ok(asked) => self.take(writer, &asked),
                Err(error) => return (writer, seen, Err(error)),
            }
            seen = Seen { next: number + 1, last_news: Instant::now() };
        }
        (writer, seen, Ok(()))
    }

    async fn ask(&self, writer: Writer, number: u64) -> Result<Asked, Error> {
        let path = self.layout.manifest(writer, number);
        let bytes = match self.client.get(&path).await {
            Ok(bytes) => bytes,
            Err(Error::NotFound { .. }) => return Ok(Asked::NotYet),
            Err(error) => return Err(error),
        };
        let sections = manifest::decode(writer, &bytes);
        if sections.is_none() {
            self.catalog.skip();
            tracing::warn!(manifest = %path, "manifest is not sound");
        }
        Ok(sections.map_or(Asked::Unsound, Asked::Sound))
    }
}
