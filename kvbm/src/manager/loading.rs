//! One load under way: streams of all tiers at once, verified and written on blocking threads, given to everyone at once.
//!
//! ```text
//!   Ahead ──the engine's turn──▶ Waiting ──the head is there, or patience ends──▶ Computing
//!   the head is loaded,          the head is loaded,                              what is left is loaded from the end,
//!   for as long as it takes      for as long as it pays                           until the engine meets it
//! ```
//!
//! What one tier fails to deliver is asked of the next. Dropping a load stops its reads, and still learns from them: a tier
//! that hangs is found out even by clients who do not wait for it.

use super::Inner;
use super::coming::Bringing;
use super::onboard::Shared;
use super::source::{Located, Source, extent, locate, stretches};
use super::speed::Seen;
use crate::block::{Block, Corrupt, Header};
use crate::metrics::Direction;
use crate::plan::{Known, Patience, Plan};
use crate::pool::{FullBlock, PartialBlock};
use crate::tier::LoadError;
use crate::{Level, SequenceHash};
use futures::future;
use futures::stream::{self, BoxStream, FuturesUnordered, SelectAll, StreamExt};
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};

/// Bytes verified and written per hop to a blocking thread: enough to hide the hop, few enough to begin early.
const WRITE_BYTES: usize = 4 << 20;

/// Hops at the same time: one core's memcpy does not fill the memory's bandwidth, two nearly do.
const WRITES: usize = 2;

/// From the end, blocks are asked for in pieces of what a tier delivers in this time, so that the meeting point is met
/// closely, or in its latency, so that two pieces at a time keep it busy.
const PIECE: Duration = Duration::from_millis(50);
const PIECES: usize = 2;

/// A piece of a tier that was not measured, and the largest.
const PIECE_UNKNOWN: usize = 8;
const PIECE_MAX: usize = 512;

/// A wait without an end.
const FOREVER: Duration = Duration::from_hours(24 * 365);

/// One load under way.
pub(super) struct Loading<'a> {
    job: &'a Job,
    phase: Phase,
    start: Instant,
    streams: SelectAll<BoxStream<'static, Answer>>,
    writes: FuturesUnordered<JoinHandle<Vec<Written>>>,
    /// Loaded, waiting for a hop.
    queue: Vec<Item>,
    places: Vec<Place>,
    /// Leading blocks that are there.
    lead: usize,
    /// When the last block came.
    news: Instant,
    /// Per source, in order: what it is yet to be asked for.
    todo: Vec<VecDeque<usize>>,
    /// Per source: the same, because another failed.
    wanted: Vec<Vec<usize>>,
    seen: Vec<Watch>,
    bringing: Bringing<'a>,
}

/// What is to be brought, for whom.
pub(super) struct Job {
    pub(super) inner: Arc<Inner>,
    pub(super) sources: Vec<Source>,
    pub(super) names: Vec<SequenceHash>,
    pub(super) seconds_per_block: Option<f64>,
    pub(super) shared: Arc<Shared>,
}

impl Job {
    /// Where the names from `lead` on are, and what to do about it, given the room.
    pub(super) fn plan(&self, lead: usize, now: Instant) -> (Located, Plan) {
        let located = locate(&self.inner.core, &self.sources, &self.names[lead..], now);
        let mut plan = crate::plan::plan(&stretches(&self.sources, &located, now), self.seconds_per_block);
        plan.head = plan.head.min(self.inner.core.pool.available());
        (located, plan)
    }
}

/// When the engine could begin to compute, and how many blocks were there then.
#[derive(Clone, Copy)]
pub(super) struct Turn {
    pub(super) since: Instant,
    pub(super) had: usize,
}

impl Turn {
    /// Until when to wait for more than the first `lead` blocks, the last of which came at `news`.
    pub(super) fn limit(&self, patience: Patience, lead: usize, news: Instant) -> Instant {
        self.since + patience.limit(lead - self.had, news.saturating_duration_since(self.since))
    }
}

enum Phase {
    /// The engine is busy with others.
    Ahead,
    /// The engine waits for the blocks before `goal`.
    Waiting { turn: Turn, goal: usize, patience: Patience },
    /// The engine computes.
    Computing,
}

/// What is known of one block.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Place {
    /// Nobody was asked.
    Unasked,
    /// That source is to deliver it.
    Asked(usize),
    There,
    /// Nobody has it.
    Lost,
}

/// What one source did.
#[derive(Clone, Default)]
struct Watch {
    asked: usize,
    answered: usize,
    delivered: usize,
    /// Calls that have not ended.
    pending: usize,
    /// When it was first asked, and behind how many blocks for others.
    since: Duration,
    queued: u64,
    /// Its first answer and its last: when, and which one of all that it gave to anybody.
    first: Option<(Duration, u64)>,
    last: Option<(Duration, u64)>,
}

impl Watch {
    /// The source was asked for something, and neither said what became of it nor ended.
    fn owes(&self) -> bool {
        self.pending > 0 && self.answered < self.asked
    }

    fn heard(&mut self, now: Duration, count: u64) {
        self.answered += 1;
        let at = (now.saturating_sub(self.since), count);
        self.first.get_or_insert(at);
        self.last = Some(at);
    }

    fn seen(&self, now: Duration) -> Seen {
        let (first, last) = (self.first.unwrap_or_default(), self.last.unwrap_or_default());
        let blocks = 1 + last.1.saturating_sub(first.1);
        // A source that still owes blocks takes at least until now for the next one.
        let (blocks, elapsed) =
            if self.owes() { (blocks + 1, now.saturating_sub(self.since)) } else { (blocks, last.0) };
        Seen { first: self.first.map(|(at, _)| at), blocks, elapsed, queued: self.queued }
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
    /// Begins to bring what was located from `lead` on: all of it, or with a `plan`, what that says.
    pub(super) fn new(
        job: &'a Job,
        bringing: Bringing<'a>,
        lead: usize,
        located: &Located,
        plan: Option<(Turn, Plan)>,
    ) -> Self {
        let (start, sources) = (Instant::now(), job.sources.len());
        let mut places = vec![Place::Unasked; job.names.len()];
        places[..lead].fill(Place::There);
        let mut loading = Self {
            job,
            phase: Phase::Ahead,
            start,
            streams: SelectAll::new(),
            writes: FuturesUnordered::new(),
            queue: Vec::new(),
            places,
            lead,
            news: start,
            todo: vec![VecDeque::new(); sources],
            wanted: vec![Vec::new(); sources],
            seen: vec![Watch::default(); sources],
            bringing,
        };
        loading.intend(lead, located);
        if let Some((turn, plan)) = plan {
            loading.keep_to(turn, plan, lead + extent(located));
        }
        loading
    }

    /// Brings blocks until there is nothing left to bring.
    pub(super) async fn run(&mut self) {
        let batch = (WRITE_BYTES / self.job.inner.core.device.block_bytes().max(1)).max(1);
        let limit = sleep_until(self.start + FOREVER);
        tokio::pin!(limit);
        loop {
            self.settle_phase();
            self.ask();
            if !self.queue.is_empty() && self.writes.len() < WRITES {
                self.write();
            }
            if self.is_done() {
                return;
            }
            if matches!(self.phase, Phase::Computing) {
                self.job.shared.go();
            }
            let until = self.limit();
            if limit.deadline() != until {
                limit.as_mut().reset(until);
            }
            tokio::select! {
                biased;
                // First, so that sources which always have something ready do not outrun it.
                () = &mut limit => self.out_of_patience(),
                since = self.job.shared.turned(), if matches!(self.phase, Phase::Ahead) => self.turn(since),
                Some(written) = self.writes.next() => match written {
                    Ok(written) => self.place(written),
                    Err(error) => match error.try_into_panic() {
                        Ok(panic) => resume_unwind(panic),
                        // The runtime is shutting down.
                        Err(_) => return,
                    },
                },
                Some(answer) = self.streams.next(), if self.queue.len() < batch => self.take(answer),
            }
        }
    }

    /// Puts what was located, counted from `lead`, on the sources' lists.
    fn intend(&mut self, lead: usize, located: &Located) {
        let unasked = |index: &usize| self.places[*index] == Place::Unasked;
        for (source, range) in located {
            self.todo[*source].extend((range.start + lead..range.end + lead).filter(unasked));
        }
    }

    /// The engine is ready for these blocks: from now on every moment counts.
    fn turn(&mut self, since: Instant) {
        let (located, plan) = self.job.plan(self.lead, Instant::now());
        let (lead, end) = (self.lead, self.lead + extent(&located));
        self.todo.iter_mut().for_each(VecDeque::clear);
        let goal = lead + plan.head;
        if self.places[goal..].iter().any(|place| matches!(place, Place::Asked(_))) {
            // More is on its way than is worth waiting for, in an order that was right while there was time.
            self.recall();
            self.todo.iter_mut().for_each(VecDeque::clear);
        }
        self.intend(lead, &located);
        self.keep_to(Turn { since, had: lead }, plan, end);
    }

    fn keep_to(&mut self, turn: Turn, plan: Plan, end: usize) {
        let goal = self.lead + plan.head;
        let tail = end.saturating_sub(plan.tail);
        self.todo.iter_mut().for_each(|todo| todo.retain(|index| *index < goal || *index >= tail));
        self.phase = Phase::Waiting { turn, goal, patience: plan.patience };
    }

    /// From waiting to computing, when there is nothing to wait for.
    fn settle_phase(&mut self) {
        if let Phase::Waiting { goal, .. } = self.phase
            && (self.lead >= goal || self.places[self.lead] == Place::Lost)
        {
            self.phase = Phase::Computing;
        }
    }

    fn out_of_patience(&mut self) {
        if !matches!(self.phase, Phase::Waiting { .. }) {
            return;
        }
        // Named after those that still owe something.
        for source in (0..self.seen.len()).filter(|source| self.seen[*source].owes()) {
            self.job.inner.core.metrics.deadline_missed(self.level(source));
        }
        if self.seen.iter().any(|seen| seen.answered > 0) {
            // Slow: from now on the last come first. One that has said nothing yet may as well go on saying nothing.
            self.recall();
        }
        self.phase = Phase::Computing;
    }

    /// Until when the phase lasts if nothing happens.
    fn limit(&self) -> Instant {
        match self.phase {
            Phase::Waiting { turn, patience, .. } => turn.limit(patience, self.lead, self.news),
            Phase::Ahead | Phase::Computing => self.start + FOREVER,
        }
    }

    /// Nothing is on its way and nothing is to be asked for; before the engine's turn that may change.
    fn is_done(&self) -> bool {
        let met = self.job.shared.claimed() >= self.places.len();
        let idle = self.streams.is_empty() && self.queue.is_empty() && self.writes.is_empty();
        !matches!(self.phase, Phase::Ahead) && (met || idle)
    }

    /// Takes back what was asked for and did not come.
    fn recall(&mut self) {
        self.streams.clear();
        self.learn();
        let queued: Vec<usize> = self.queue.iter().map(|item| item.index).collect();
        for (index, place) in self.places.iter_mut().enumerate() {
            if let Place::Asked(source) = *place
                && !queued.contains(&index)
            {
                *place = Place::Unasked;
                self.todo[source].push_back(index);
            }
        }
        self.todo.iter_mut().for_each(|todo| todo.make_contiguous().sort_unstable());
    }

    fn ask(&mut self) {
        for source in 0..self.job.sources.len() {
            let retried = std::mem::take(&mut self.wanted[source]);
            self.ask_for(source, retried);
            let goal = match self.phase {
                Phase::Ahead => self.places.len(),
                Phase::Waiting { goal, .. } => goal,
                Phase::Computing => 0,
            };
            let head = self.todo[source].partition_point(|index| *index < goal);
            let head = self.todo[source].drain(..head).collect();
            self.ask_for(source, head);
            while self.seen[source].pending < PIECES && !self.todo[source].is_empty() {
                let piece = self.piece(source);
                self.ask_for(source, piece);
            }
        }
    }

    /// The last blocks that a source is to be asked for, the last first.
    fn piece(&mut self, source: usize) -> Vec<usize> {
        let size = match self.job.sources[source].gauge.known(Instant::now()) {
            Known::Speed(measured) => {
                let seconds = measured.latency.max(PIECE.as_secs_f64());
                (seconds / measured.seconds_per_block).ceil().clamp(1.0, PIECE_MAX as f64) as usize
            }
            Known::Nothing | Known::Silent => PIECE_UNKNOWN,
        };
        let claimed = self.job.shared.claimed();
        let mut piece = Vec::with_capacity(size);
        while piece.len() < size
            && let Some(index) = self.todo[source].pop_back()
        {
            if index < claimed {
                // The engine has met us, and so it has for all before.
                self.todo[source].clear();
            } else if self.bringing.brings(&self.job.names[index]) && !self.is_here(index) {
                piece.push(index);
            }
        }
        piece
    }

    /// The block came to G1 in another way: then it is held.
    fn is_here(&mut self, index: usize) -> bool {
        let found = self.job.inner.core.pool.matched(&self.job.names[index..=index]);
        let here = !found.is_empty();
        self.job.shared.keep(found);
        here
    }

    fn ask_for(&mut self, source: usize, indices: Vec<usize>) {
        if indices.is_empty() {
            return;
        }
        let (now, gauge) = (self.start.elapsed(), &self.job.sources[source].gauge);
        let seen = &mut self.seen[source];
        if seen.asked == 0 {
            (seen.since, seen.queued) = (now, gauge.queued());
        }
        gauge.asked(indices.len());
        seen.asked += indices.len();
        seen.pending += 1;
        for index in &indices {
            self.places[*index] = Place::Asked(source);
        }
        let names = indices.iter().map(|index| self.job.names[*index]).collect();
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
        let fingerprint = self.job.inner.core.device.fingerprint();
        let stream = self.job.sources[source].tier.load(fingerprint, names).filter_map(answer);
        self.streams.push(stream.chain(stream::iter([Answer::Done(source)])).boxed());
    }

    fn take(&mut self, answer: Answer) {
        match answer {
            Answer::Item(item) => {
                self.heard(item.source);
                self.queue.push(item);
            }
            Answer::Failed { source, index, error } => {
                self.heard(source);
                match error {
                    Some(LoadError::Corrupt(why)) => self.quarantine(source, index, why),
                    Some(error) => tracing::debug!(tier = %self.level(source), %error, "a block was not loaded"),
                    None => {}
                }
                self.try_next(source, index);
            }
            Answer::Done(source) => self.seen[source].pending -= 1,
        }
    }

    fn heard(&mut self, source: usize) {
        let seen = &mut self.seen[source];
        if seen.answered < seen.asked {
            seen.heard(self.start.elapsed(), self.job.sources[source].gauge.answer());
        }
    }

    /// Verifies and writes what is queued and still wanted, on a blocking thread.
    fn write(&mut self) {
        let claimed = self.job.shared.claimed();
        let mut items = std::mem::take(&mut self.queue);
        items.retain(|item| item.index >= claimed);
        let core = self.job.inner.core.clone();
        let Some(slots) = core.pool.allocate(items.len()) else {
            return self.give_up(&items);
        };
        let names: Vec<_> = items.iter().map(|item| self.job.names[item.index]).collect();
        self.writes.push(tokio::task::spawn_blocking(move || {
            let items = items.into_iter().zip(names).zip(slots);
            items.map(|((item, name), slot)| core.write(item, name, slot)).collect()
        }));
    }

    /// There is no room: what is there so far must do.
    fn give_up(&mut self, items: &[Item]) {
        self.recall();
        self.todo.iter_mut().for_each(VecDeque::clear);
        for item in items {
            self.places[item.index] = Place::Lost;
        }
        self.places.iter_mut().filter(|place| **place == Place::Unasked).for_each(|place| *place = Place::Lost);
    }

    fn place(&mut self, mut written: Vec<Written>) {
        // In order, so that a run is announced as one.
        written.sort_by_key(|written| match written {
            Written::Good { index, .. } | Written::Bad { index, .. } | Written::Over { index, .. } => *index,
        });
        let (mut blocks, mut levels) = (Vec::new(), Vec::new());
        for written in written {
            match written {
                Written::Good { source, index, block } => {
                    self.seen[source].delivered += 1;
                    self.places[index] = Place::There;
                    blocks.push(block);
                    levels.push(self.level(source));
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
        if !blocks.is_empty() {
            // At once, for those who follow; and if this request is dropped, what it loaded stays cached.
            let cached = self.job.inner.core.pool.register(blocks);
            self.job.shared.keep_loaded(cached, &levels);
            self.lead += self.places[self.lead..].iter().take_while(|place| **place == Place::There).count();
            self.news = Instant::now();
            self.bringing.step();
        }
    }

    /// Finds the next source for a block that one did not deliver, or gives it up: then it is computed.
    fn try_next(&mut self, source: usize, index: usize) {
        let (now, name) = (Instant::now(), &self.job.names[index..=index]);
        let fingerprint = self.job.inner.core.device.fingerprint();
        let holds = |next: &usize| {
            let next = &self.job.sources[*next];
            next.gauge.is_awake(now) && next.tier.holds(fingerprint, name) == 1
        };
        match (source + 1..self.job.sources.len()).find(holds) {
            Some(next) => self.wanted[next].push(index),
            None => self.places[index] = Place::Lost,
        }
    }

    fn expire(&self, source: usize, index: usize) {
        let (tier, core, name) = (&self.job.sources[source].tier, &self.job.inner.core, self.job.names[index]);
        // Unless a sweep found it meanwhile.
        core.metrics.expired(tier.level(), tier.holds(core.device.fingerprint(), &[name]));
        tier.discard(core.device.fingerprint(), name);
    }

    fn quarantine(&self, source: usize, index: usize, why: Corrupt) {
        let (tier, name) = (&self.job.sources[source].tier, self.job.names[index]);
        tracing::warn!(tier = %tier.level(), block = %name, %why, "block quarantined");
        self.job.inner.core.metrics.quarantined(tier.level());
        tier.discard(self.job.inner.core.device.fingerprint(), name);
    }

    fn level(&self, source: usize) -> Level {
        self.job.sources[source].tier.level()
    }
}

impl Loading<'_> {
    /// Tells the gauges what was seen since the last time, and forgets it.
    fn learn(&mut self) {
        let (now, elapsed) = (Instant::now(), self.start.elapsed());
        let bytes = self.job.inner.core.device.block_bytes() as u64;
        for (source, seen) in self.seen.iter_mut().enumerate().filter(|(_, seen)| seen.asked > 0) {
            let Source { tier, gauge } = &self.job.sources[source];
            let what = seen.seen(elapsed);
            if gauge.learn(what, now) {
                tracing::warn!(tier = %tier.level(), ?elapsed, "tier did not answer in time; left alone for a while");
            }
            if seen.delivered > 0 {
                let (delivered, metrics) = (seen.delivered as u64, &self.job.inner.core.metrics);
                metrics.moved(tier.level(), Direction::Onboard, delivered * bytes, what.elapsed);
            }
            gauge.recalled(seen.asked - seen.answered);
            self.job.inner.core.metrics.hit(tier.level(), seen.delivered);
            self.job.inner.core.metrics.missed(tier.level(), seen.asked.saturating_sub(seen.delivered));
            *seen = Watch::default();
        }
    }
}

impl Drop for Loading<'_> {
    /// Learns, counts, and sends what came down to where it is missing.
    fn drop(&mut self) {
        self.learn();
        self.job.shared.offload(&self.job.inner);
    }
}

impl super::Core {
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
