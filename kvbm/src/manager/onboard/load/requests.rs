//! Requests to tiers, and their answers.

use super::writes::WriteResult;
use super::{BlockStatus, Delivered, Loading};
use crate::block::{Block, SequenceHash};
use crate::manager::onboard::phase::{Phase, Wait};
use crate::manager::plan::TierSpeed;
use crate::manager::sources::Source;
use crate::manager::throughput::LoadSample;
use crate::metrics::Direction;
use crate::tier::LoadError;
use futures::future;
use futures::stream::{self, StreamExt};
use std::time::Duration;
use tokio::time::Instant;

/// Tail blocks are requested in pieces of what a tier delivers in this time, or in its latency if that is longer: small
/// enough to meet the engine closely, and with two pieces at a time the tier is kept busy.
const PIECE: Duration = Duration::from_millis(50);
const CONCURRENT_PIECES: usize = 2;

/// Blocks in a piece of a tier that was not measured, and in the largest piece.
const UNMEASURED_PIECE_BLOCKS: usize = 8;
const MAX_PIECE_BLOCKS: usize = 512;

/// What one source has done in a load since the last [`Loading::record`].
#[derive(Clone, Default)]
pub(super) struct SourceStats {
    /// Requested and answered blocks.
    requested: usize,
    pub(super) answered: usize,
    /// Blocks that were verified and written.
    pub(super) registered: usize,
    /// Calls of `Tier::load` that have not ended.
    open_calls: usize,
    /// When the source got the first request, counted from the start of the load, and how many blocks of other loads it
    /// had to answer before.
    since: Duration,
    queued: u64,
    /// The first and the last answer: the time since `since`, and the source's count of all its answers.
    first: Option<(Duration, u64)>,
    last: Option<(Duration, u64)>,
}

impl SourceStats {
    /// Whether a call is open and blocks are not answered.
    pub(super) fn has_outstanding(&self) -> bool {
        self.open_calls > 0 && self.answered < self.requested
    }

    fn answer(&mut self, now: Duration, count: u64) {
        self.answered += 1;
        let at = (now.saturating_sub(self.since), count);
        self.first.get_or_insert(at);
        self.last = Some(at);
    }

    fn sample(&self, now: Duration) -> LoadSample {
        let (first, last) = (self.first.unwrap_or_default(), self.last.unwrap_or_default());
        let blocks = 1 + last.1.saturating_sub(first.1);
        // A source with outstanding blocks takes at least until now for the next one.
        let (blocks, elapsed) =
            if self.has_outstanding() { (blocks + 1, now.saturating_sub(self.since)) } else { (blocks, last.0) };
        LoadSample { first: self.first.map(|(at, _)| at), blocks, elapsed, queued: self.queued }
    }
}

/// An item of a source's stream.
pub(super) enum Answer {
    Delivered(Delivered),
    /// The block is not there, or the error.
    Failed {
        source: usize,
        index: usize,
        error: Option<LoadError>,
    },
    /// The source answered all blocks of one call.
    EndOfCall(usize),
}

impl Loading<'_> {
    /// Requests retries, then the head, then pieces of the tail.
    pub(super) fn request(&mut self) {
        let goal = match self.job.shared.phase() {
            Phase::Prefetching | Phase::Started(_) => self.statuses.len(),
            Phase::Waiting(Wait { goal, .. }) => goal,
            Phase::Computing => 0,
        };
        for source in 0..self.job.sources.len() {
            let retries = std::mem::take(&mut self.retries[source]);
            self.request_from(source, retries);
            let head = self.unrequested[source].partition_point(|index| *index < goal);
            let head = self.unrequested[source].drain(..head).collect();
            self.request_from(source, head);
            while self.stats[source].open_calls < CONCURRENT_PIECES && !self.unrequested[source].is_empty() {
                let piece = self.next_piece(source);
                self.request_from(source, piece);
            }
        }
    }

    fn request_from(&mut self, source: usize, indices: Vec<usize>) {
        if indices.is_empty() {
            return;
        }
        let now = self.begun.elapsed();
        let throughput = &self.job.sources[source].throughput;
        let stats = &mut self.stats[source];
        if stats.requested == 0 {
            stats.since = now;
            stats.queued = throughput.queued();
        }
        throughput.requested(indices.len());
        stats.requested += indices.len();
        stats.open_calls += 1;
        for index in &indices {
            self.statuses[*index] = BlockStatus::Requested(source);
        }
        let hashes: Vec<SequenceHash> = indices.iter().map(|index| self.job.hashes[*index]).collect();
        let inbox = self.inbox(source, &indices, &hashes);
        let answer = move |(at, found): (usize, Result<Option<Block>, LoadError>)| {
            // An index that was not requested breaks the tier's contract; the block stays unanswered.
            let index = *indices.get(at)?;
            Some(match found {
                Ok(Some(block)) => Answer::Delivered(Delivered { source, index, block }),
                Ok(None) => Answer::Failed { source, index, error: None },
                Err(error) => Answer::Failed { source, index, error: Some(error) },
            })
        };
        let answer = move |loaded| future::ready(answer(loaded));
        let fingerprint = self.job.onboarder.core.device.fingerprint();
        let stream = self.job.sources[source].tier.load_into(fingerprint, hashes, inbox).filter_map(answer);
        self.streams.push(stream.chain(stream::iter([Answer::EndOfCall(source)])).boxed());
    }

    /// The speed of a source, including what it has shown in this load.
    pub(super) fn speed(&self, source: usize, now: Instant) -> TierSpeed {
        let throughput = &self.job.sources[source].throughput;
        let stats = &self.stats[source];
        if stats.requested == 0 {
            return throughput.speed(now);
        }
        throughput.speed_during_load(stats.sample(self.begun.elapsed()), stats.requested - stats.answered, now)
    }

    /// The next tail blocks to request from a source, the last first.
    fn next_piece(&mut self, source: usize) -> Vec<usize> {
        let size = match self.speed(source, Instant::now()) {
            TierSpeed::Measured(measured) => {
                let seconds = measured.latency.max(PIECE.as_secs_f64());
                (seconds / measured.seconds_per_block).ceil().clamp(1.0, MAX_PIECE_BLOCKS as f64) as usize
            }
            TierSpeed::Unmeasured | TierSpeed::Unresponsive => UNMEASURED_PIECE_BLOCKS,
        };
        let computed = self.job.shared.computed();
        let mut piece = Vec::with_capacity(size);
        while piece.len() < size
            && let Some(index) = self.unrequested[source].pop_back()
        {
            if index < computed {
                // The engine has computed this block, and so all blocks before it.
                self.unrequested[source].clear();
            } else if self.claim.includes(&self.job.hashes[index]) && !self.hold_if_resident(index) {
                piece.push(index);
            }
        }
        piece
    }

    /// Holds the block if it came to G1 in another way.
    fn hold_if_resident(&mut self, index: usize) -> bool {
        let found = self.job.onboarder.core.pool.lookup(&self.job.hashes[index..=index]);
        let is_resident = !found.is_empty();
        self.job.shared.hold(found);
        is_resident
    }

    pub(super) fn receive(&mut self, answer: Answer) {
        match answer {
            Answer::Delivered(delivered) => {
                self.count_answer(delivered.source);
                self.delivered.push(delivered);
            }
            Answer::Failed { source, index, error } => {
                self.count_answer(source);
                match error {
                    Some(LoadError::Corrupt(why)) => self.discard_corrupt(source, index, why),
                    Some(error) => tracing::debug!(tier = %self.level(source), %error, "cannot load a block"),
                    None => {}
                }
                self.try_next(source, index);
            }
            Answer::EndOfCall(source) => self.stats[source].open_calls -= 1,
        }
    }

    pub(super) fn count_answer(&mut self, source: usize) {
        let stats = &mut self.stats[source];
        if stats.answered < stats.requested {
            stats.answer(self.begun.elapsed(), self.job.sources[source].throughput.answered());
        }
    }

    /// Requests a block that a source did not deliver from the next source that holds it. Without one, it is computed.
    pub(super) fn try_next(&mut self, source: usize, index: usize) {
        self.job.onboarder.core.metrics.missed(self.level(source), 1);
        let now = Instant::now();
        let hash = &self.job.hashes[index..=index];
        let fingerprint = self.job.onboarder.core.device.fingerprint();
        let holds = |next: &usize| {
            let next = &self.job.sources[*next];
            next.throughput.is_available(now) && next.tier.holds(fingerprint, hash) == 1
        };
        match (source + 1..self.job.sources.len()).find(holds) {
            Some(next) => self.retries[next].push(index),
            None => self.statuses[index] = BlockStatus::Unavailable,
        }
    }

    /// Drops all open requests. Their blocks can be requested again.
    pub(super) fn cancel(&mut self) {
        self.streams.clear();
        self.close_inboxes();
        self.record();
        let delivered = self.delivered.iter().map(|delivered| delivered.index);
        let delivered: Vec<usize> = delivered.chain(self.arrived.iter().map(WriteResult::index)).collect();
        for (index, status) in self.statuses.iter_mut().enumerate() {
            if let BlockStatus::Requested(source) = *status
                && !delivered.contains(&index)
            {
                *status = BlockStatus::Unrequested;
                self.unrequested[source].push_back(index);
            }
        }
        self.unrequested.iter_mut().for_each(|list| list.make_contiguous().sort_unstable());
    }

    /// Records the measurements since the last call, and resets them. Blocks that were requested before may still be
    /// registered: they were being written.
    pub(super) fn record(&mut self) {
        let (now, elapsed) = (Instant::now(), self.begun.elapsed());
        let core = &self.job.onboarder.core;
        let bytes = core.device.block_bytes() as u64;
        for (source, stats) in
            self.stats.iter_mut().enumerate().filter(|(_, stats)| stats.requested + stats.registered > 0)
        {
            let Source { tier, throughput } = &self.job.sources[source];
            let sample = stats.sample(elapsed);
            if throughput.record(sample, now)
                && let Some(others) = core.unresponsive_log.admit()
            {
                tracing::warn!(
                    tier = %tier.level(), duration_s = elapsed.as_secs_f64(), suppressed = others,
                    "the tier did not answer in time; it is not used for a while"
                );
            }
            if stats.registered > 0 {
                core.metrics.moved(tier.level(), Direction::Onboard, stats.registered as u64 * bytes, sample.elapsed);
            }
            self.job.trace_load(tier.level(), (self.begun + stats.since, sample.elapsed), stats.registered);
            throughput.cancelled(stats.requested - stats.answered);
            core.metrics.missed(tier.level(), stats.requested - stats.answered);
            *stats = SourceStats::default();
        }
    }
}
