//! What tiers are asked for, and what is heard of them.

use super::{Item, Loading, Phase, Place};
use crate::block::Block;
use crate::manager::locate::Source;
use crate::manager::plan::Known;
use crate::manager::throughput::Seen;
use crate::metrics::Direction;
use crate::tier::LoadError;
use futures::future;
use futures::stream::{self, StreamExt};
use std::time::Duration;
use tokio::time::Instant;

/// From the end, blocks are asked for in pieces of what a tier delivers in this time, so that the meeting point is met
/// closely, or in its latency, so that two pieces at a time keep it busy.
const PIECE: Duration = Duration::from_millis(50);
const PIECES: usize = 2;

/// A piece of a tier that was not measured, and the largest.
const PIECE_UNKNOWN: usize = 8;
const PIECE_MAX: usize = 512;

/// What one source did.
#[derive(Clone, Default)]
pub(super) struct Watch {
    asked: usize,
    pub(super) answered: usize,
    pub(super) delivered: usize,
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
    pub(super) fn owes(&self) -> bool {
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
pub(super) enum Answer {
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

impl Loading<'_> {
    pub(super) fn ask(&mut self) {
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

    /// What is known of a source, with what it has shown here.
    pub(super) fn known(&self, source: usize, now: Instant) -> Known {
        let (gauge, seen) = (&self.job.sources[source].gauge, &self.seen[source]);
        if seen.asked == 0 {
            return gauge.known(now);
        }
        gauge.known_amid(seen.seen(self.start.elapsed()), seen.asked - seen.answered, now)
    }

    /// The last blocks that a source is to be asked for, the last first.
    fn piece(&mut self, source: usize) -> Vec<usize> {
        let size = match self.known(source, Instant::now()) {
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

    pub(super) fn take(&mut self, answer: Answer) {
        match answer {
            Answer::Item(item) => {
                self.heard(item.source);
                self.queue.push(item);
            }
            Answer::Failed { source, index, error } => {
                self.heard(source);
                match error {
                    Some(LoadError::Corrupt(why)) => self.quarantine(source, index, why),
                    Some(error) => tracing::debug!(tier = %self.level(source), %error, "cannot load a block"),
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

    /// Finds the next source for a block that one did not deliver, or gives it up: then it is computed.
    pub(super) fn try_next(&mut self, source: usize, index: usize) {
        self.job.inner.core.metrics.missed(self.level(source), 1);
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

    /// Takes back what was asked for and did not come.
    pub(super) fn recall(&mut self) {
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

    /// Tells the gauges what was seen since the last time, and forgets it. What was asked for before may yet be delivered: it was
    /// being written.
    pub(super) fn learn(&mut self) {
        let (now, elapsed) = (Instant::now(), self.start.elapsed());
        let bytes = self.job.inner.core.device.block_bytes() as u64;
        for (source, seen) in self.seen.iter_mut().enumerate().filter(|(_, seen)| seen.asked + seen.delivered > 0) {
            let Source { tier, gauge } = &self.job.sources[source];
            let what = seen.seen(elapsed);
            if gauge.learn(what, now)
                && let Some(others) = self.job.inner.core.silences.pass()
            {
                tracing::warn!(
                    tier = %tier.level(), duration_s = elapsed.as_secs_f64(), suppressed = others,
                    "the tier did not answer in time; it is not used for a while"
                );
            }
            if seen.delivered > 0 {
                let (delivered, metrics) = (seen.delivered as u64, &self.job.inner.core.metrics);
                metrics.moved(tier.level(), Direction::Onboard, delivered * bytes, what.elapsed);
            }
            gauge.recalled(seen.asked - seen.answered);
            self.job.inner.core.metrics.missed(tier.level(), seen.asked - seen.answered);
            *seen = Watch::default();
        }
    }
}
