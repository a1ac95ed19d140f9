//! Blocks on their way up: found, planned, loaded from several tiers at once, verified, written into G1.
//!
//! ```text
//!   locate ──▶ plan ──▶ streams of all tiers ──▶ verify + write, on blocking threads ──▶ register the leading run
//!                             │    ▲ what one tier fails to deliver is asked of the next
//!                             ▼    │
//!                     patience: drop the streams, keep what arrived
//! ```
//!
//! **Invariant: nothing is awaited here without [`Patience`].** Dropping the future drops the streams; slots of blocks
//! that were not registered go back by themselves.

use super::Core;
use super::coming::Bringing;
use super::speed::{Gauge, Seen};
use crate::block::{Block, Corrupt, Header};
use crate::metrics::Direction;
use crate::plan::{Patience, Stretch};
use crate::pool::{CachedBlocks, FullBlock, PartialBlock};
use crate::tier::{LoadError, Tier};
use crate::{Level, SequenceHash};
use futures::future;
use futures::stream::{self, BoxStream, FuturesUnordered, SelectAll, StreamExt};
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// A tier to load from, and what is known of its speed.
#[derive(Clone)]
pub(super) struct Source {
    pub(super) tier: Arc<dyn Tier>,
    pub(super) gauge: Arc<Gauge>,
}

/// Which names come from where: consecutive ranges that begin at 0.
pub(super) type Located = Vec<(usize, Range<usize>)>;

/// What a load brought into G1: the leading blocks, and each one's source.
pub(super) struct Loaded {
    pub(super) blocks: CachedBlocks,
    pub(super) sources: Vec<usize>,
}

/// What a load is to do.
pub(super) struct Order<'a> {
    /// The leading blocks.
    pub(super) names: &'a [SequenceHash],
    /// Where they and perhaps others after them are.
    pub(super) located: &'a Located,
    /// Since when the request waits, and how many blocks it got meanwhile from others' loads.
    pub(super) since: (Instant, usize),
    pub(super) patience: Patience,
    /// Told of every step.
    pub(super) bringing: Bringing<'a>,
}

/// Bytes verified and written per hop to a blocking thread: enough to hide the hop, few enough to begin early.
const WRITE_BYTES: usize = 4 << 20;

/// Hops at the same time: one core's memcpy does not fill the memory's bandwidth, two nearly do.
const WRITES: usize = 2;

/// The leading `names` that sources hold, each at the first source in order (the fastest) that does.
pub(super) fn locate(core: &Core, sources: &[Source], names: &[SequenceHash], now: Instant) -> Located {
    let fingerprint = core.device.fingerprint();
    let awake: Vec<usize> = (0..sources.len()).filter(|source| sources[*source].gauge.is_awake(now)).collect();
    let holds = |source: usize, names: &[SequenceHash]| sources[source].tier.holds(fingerprint, names);
    let mut located: Located = Vec::new();
    let mut at = 0;
    while at < names.len() {
        let found = awake.iter().enumerate().map(|(rank, source)| (rank, *source, holds(*source, &names[at..])));
        let Some((rank, source, count)) = found.into_iter().find(|(.., count)| *count > 0) else { break };
        // A slower tier's run ends where a faster one has the next block.
        let faster = &awake[..rank];
        let end =
            (at + 1..at + count).find(|next| faster.iter().any(|source| holds(*source, &names[*next..=*next]) > 0));
        let end = end.unwrap_or(at + count);
        located.push((source, at..end));
        at = end;
    }
    located
}

/// The same for the plan.
pub(super) fn stretches(sources: &[Source], located: &Located, now: Instant) -> Vec<Stretch> {
    let stretch = |(tier, range): &(usize, Range<usize>)| Stretch {
        tier: *tier,
        blocks: range.len(),
        measured: sources[*tier].gauge.measured(now),
    };
    located.iter().map(stretch).collect()
}

/// Loads blocks for as long as patience allows.
pub(super) async fn load(core: &Arc<Core>, sources: &[Source], order: Order<'_>) -> Loaded {
    let (located, blocks) = (order.located, order.names.len());
    let mut loading = Loading::new(core, sources, order);
    for (source, range) in located {
        loading.wanted[*source].extend(range.clone().filter(|index| *index < blocks));
    }
    loading.ask_wanted();
    loading.run().await;
    loading.finish()
}

/// One onboarding under way.
struct Loading<'a> {
    core: &'a Arc<Core>,
    sources: &'a [Source],
    order: Order<'a>,
    start: Instant,
    streams: SelectAll<BoxStream<'static, Answer>>,
    writes: FuturesUnordered<JoinHandle<Vec<Written>>>,
    /// Loaded, waiting for a hop.
    queue: Vec<Item>,
    /// By index, with the source: those that wait for one before them.
    arrived: Vec<Option<(FullBlock, usize)>>,
    /// The leading ones, given to everyone.
    loaded: Loaded,
    /// The first that will never be there.
    end: usize,
    /// Per source: what it is yet to be asked for, because another failed.
    wanted: Vec<Vec<usize>>,
    seen: Vec<Watch>,
}

/// What one source did.
#[derive(Clone, Default)]
struct Watch {
    asked: usize,
    answered: usize,
    /// Since it was first asked: its first and its last answer.
    since: Duration,
    first: Option<Duration>,
    last: Duration,
    delivered: usize,
    pending: usize,
}

impl Watch {
    /// The source was asked for something, and neither said what became of it nor ended.
    fn owes(&self) -> bool {
        self.pending > 0 && self.answered < self.asked
    }

    fn heard(&mut self, now: Duration) {
        self.answered += 1;
        self.last = now.saturating_sub(self.since);
        self.first.get_or_insert(self.last);
    }
}

/// What a source's stream yields.
enum Answer {
    Item(Item),
    /// Nothing, or an error.
    Failed {
        source: usize,
        index: usize,
        error: Option<LoadError>,
    },
    /// The source answered for everything that one call asked of it.
    Done(usize),
}

struct Item {
    source: usize,
    index: usize,
    block: Block,
}

/// What became of an item.
enum Written {
    Good {
        source: usize,
        index: usize,
        block: FullBlock,
    },
    Bad {
        source: usize,
        index: usize,
        why: Corrupt,
    },
    /// Sound, and older than its request allowed.
    Over {
        source: usize,
        index: usize,
    },
}

impl<'a> Loading<'a> {
    fn new(core: &'a Arc<Core>, sources: &'a [Source], order: Order<'a>) -> Self {
        Self {
            core,
            sources,
            start: Instant::now(),
            streams: SelectAll::new(),
            writes: FuturesUnordered::new(),
            queue: Vec::new(),
            arrived: order.names.iter().map(|_| None).collect(),
            loaded: Loaded { blocks: CachedBlocks::default(), sources: Vec::new() },
            end: order.names.len(),
            order,
            wanted: vec![Vec::new(); sources.len()],
            seen: vec![Watch::default(); sources.len()],
        }
    }

    fn ask(&mut self, source: usize, indices: Vec<usize>) {
        if indices.is_empty() {
            return;
        }
        let now = self.start.elapsed();
        let seen = &mut self.seen[source];
        if seen.asked == 0 {
            seen.since = now;
        }
        seen.asked += indices.len();
        seen.pending += 1;
        let names = indices.iter().map(|index| self.order.names[*index]).collect();
        let answer = move |(at, found): (usize, Result<Option<Block>, LoadError>)| {
            // An index that was not asked for breaks the contract; what it should have been stays unanswered.
            let index = *indices.get(at)?;
            Some(match found {
                Ok(Some(block)) => Answer::Item(Item { source, index, block }),
                Ok(None) => Answer::Failed { source, index, error: None },
                Err(error) => Answer::Failed { source, index, error: Some(error) },
            })
        };
        let answer = move |loaded| future::ready(answer(loaded));
        let stream = self.sources[source].tier.load(self.core.device.fingerprint(), names).filter_map(answer);
        self.streams.push(stream.chain(stream::iter([Answer::Done(source)])).boxed());
    }

    async fn run(&mut self) {
        let batch = (WRITE_BYTES / self.core.device.block_bytes().max(1)).max(1);
        let limit = sleep_until(self.limit());
        tokio::pin!(limit);
        while self.loaded.blocks.len() < self.end {
            if !self.queue.is_empty() && self.writes.len() < WRITES {
                self.write();
            }
            if self.is_answered() {
                self.ask_wanted();
                if self.is_answered() && self.writes.is_empty() {
                    // A tier broke its contract and left something unanswered.
                    return;
                }
            }
            let until = self.limit();
            if limit.deadline() != until {
                limit.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                // First, so that sources which always have something ready do not outrun it.
                () = &mut limit => return self.out_of_time(),
                Some(written) = self.writes.next() => match written {
                    Ok(written) => self.place(written),
                    Err(error) => match error.try_into_panic() {
                        Ok(panic) => std::panic::resume_unwind(panic),
                        // The runtime is shutting down.
                        Err(_) => return,
                    },
                },
                Some(answer) = self.streams.next(), if self.queue.len() < batch => self.take(answer),
            }
        }
    }

    fn take(&mut self, answer: Answer) {
        let now = self.start.elapsed();
        match answer {
            Answer::Item(item) => {
                self.seen[item.source].heard(now);
                self.queue.push(item);
            }
            Answer::Failed { source, index, error } => {
                self.seen[source].heard(now);
                match error {
                    Some(LoadError::Corrupt(why)) => self.quarantine(source, index, why),
                    Some(error) => tracing::debug!(tier = %self.level(source), %error, "a block was not loaded"),
                    None => {}
                }
                self.try_next(source, index);
            }
            Answer::Done(source) => {
                self.seen[source].pending -= 1;
                self.ask_wanted();
            }
        }
    }

    /// What some sources failed to deliver is asked of others, in one go each.
    fn ask_wanted(&mut self) {
        for source in 0..self.sources.len() {
            let indices = std::mem::take(&mut self.wanted[source]);
            self.ask(source, indices);
        }
    }

    /// Verifies and writes what is queued, on a blocking thread.
    fn write(&mut self) {
        let items = std::mem::take(&mut self.queue);
        let Some(slots) = self.core.pool.allocate(items.len()) else {
            // No room: what was written so far must do.
            let first = items.iter().map(|item| item.index).min();
            self.end = self.end.min(first.unwrap_or(self.end));
            return;
        };
        let (core, names) =
            (self.core.clone(), items.iter().map(|item| self.order.names[item.index]).collect::<Vec<_>>());
        self.writes.push(tokio::task::spawn_blocking(move || {
            let items = items.into_iter().zip(names).zip(slots);
            items.map(|((item, name), slot)| core.write(item, name, slot)).collect()
        }));
    }

    fn place(&mut self, written: Vec<Written>) {
        for written in written {
            match written {
                Written::Good { source, index, block } => {
                    self.seen[source].delivered += 1;
                    self.arrived[index] = Some((block, source));
                }
                Written::Bad { source, index, why } => {
                    self.quarantine(source, index, why);
                    self.try_next(source, index);
                }
                Written::Over { source, index } => {
                    self.expire(source, index);
                    self.try_next(source, index);
                }
            }
        }
        let lead = self.loaded.blocks.len();
        let next = self.arrived[lead..].iter_mut().map_while(Option::take);
        let (blocks, sources): (Vec<FullBlock>, Vec<usize>) = next.unzip();
        if !blocks.is_empty() {
            // At once, for those who follow; and if this request is dropped, what it loaded stays cached.
            self.loaded.blocks.extend(self.core.pool.register(blocks));
            self.loaded.sources.extend(sources);
            self.order.bringing.step();
        }
    }

    /// Until when to wait, as things are.
    fn limit(&self) -> Instant {
        let (since, gained) = self.order.since;
        since + self.order.patience.limit(gained + self.loaded.blocks.len())
    }

    /// Finds the next source for a block that one did not deliver, or gives up on it and all that follow.
    fn try_next(&mut self, source: usize, index: usize) {
        let (now, name) = (Instant::now(), &self.order.names[index..=index]);
        let fingerprint = self.core.device.fingerprint();
        let holds = |next: &usize| {
            let next = &self.sources[*next];
            next.gauge.is_awake(now) && next.tier.holds(fingerprint, name) == 1
        };
        match (source + 1..self.sources.len()).find(holds) {
            Some(next) => self.wanted[next].push(index),
            None => self.end = self.end.min(index),
        }
    }

    fn expire(&self, source: usize, index: usize) {
        let (tier, fingerprint) = (&self.sources[source].tier, self.core.device.fingerprint());
        let name = self.order.names[index];
        // Unless a sweep found it meanwhile.
        self.core.metrics.expired(tier.level(), tier.holds(fingerprint, &[name]));
        tier.discard(fingerprint, name);
    }

    fn quarantine(&self, source: usize, index: usize, why: Corrupt) {
        let (tier, name) = (&self.sources[source].tier, self.order.names[index]);
        tracing::warn!(tier = %tier.level(), block = %name, %why, "block quarantined");
        self.core.metrics.quarantined(tier.level());
        tier.discard(self.core.device.fingerprint(), name);
    }

    /// No source owes anything.
    fn is_answered(&self) -> bool {
        self.queue.is_empty() && self.seen.iter().all(|seen| seen.pending == 0)
    }

    fn out_of_time(&mut self) {
        // Named after those that still owe something.
        for source in (0..self.sources.len()).filter(|source| self.seen[*source].owes()) {
            self.core.metrics.deadline_missed(self.level(source));
        }
    }

    fn level(&self, source: usize) -> Level {
        self.sources[source].tier.level()
    }

    /// Learns, counts, and hands over the leading run.
    fn finish(mut self) -> Loaded {
        self.streams.clear();
        let (now, elapsed) = (Instant::now(), self.start.elapsed());
        let bytes = self.core.device.block_bytes() as u64;
        for (source, seen) in self.seen.iter().enumerate().filter(|(_, seen)| seen.asked > 0) {
            let level = self.sources[source].tier.level();
            // A source that still owes blocks takes at least until now for the next one.
            let (until, blocks) = if seen.owes() {
                (elapsed.saturating_sub(seen.since), seen.delivered + 1)
            } else {
                (seen.last, seen.delivered)
            };
            if self.sources[source].gauge.learn(Seen { first: seen.first, blocks, elapsed: until }, now) {
                tracing::warn!(tier = %level, ?elapsed, "tier did not answer in time; left alone for a while");
            }
            self.core.metrics.hit(level, seen.delivered);
            self.core.metrics.missed(level, seen.asked - seen.delivered);
            if seen.delivered > 0 {
                self.core.metrics.moved(level, Direction::Onboard, seen.delivered as u64 * bytes, until);
            }
        }
        self.loaded
    }
}

impl Core {
    /// Writes a block into the device if it is what was asked for. Runs on a blocking thread.
    fn write(&self, item: Item, name: SequenceHash, slot: PartialBlock) -> Written {
        let Item { source, index, block } = item;
        let fits = |block: &crate::Verified| block.payload().len() == self.device.block_bytes();
        let verified = block.verify(name, self.device.fingerprint());
        match verified.and_then(|block| if fits(&block) { Ok(block) } else { Err(Corrupt::Length) }) {
            Ok(block) if block.header().keep.is_over(self.clock.now()) => Written::Over { source, index },
            Ok(block) => {
                self.device.write(slot.slot(), block.payload());
                let Header { parent, .. } = *block.header();
                Written::Good { source, index, block: slot.complete(name, parent, block.header().custody()) }
            }
            Err(why) => Written::Bad { source, index, why },
        }
    }
}
