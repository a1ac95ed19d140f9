//! A segment that is reclaimed: its blocks in use are copied to the head or spilled, then it is deleted.
//!
//! Not here: which segment is reclaimed, and when (`space`); which of its blocks are in use (`reclaim`).

use super::direct::Access;
use super::log::{Location, Log, OpenHead, Spill, State};
use super::reclaim::{self, Candidate};
use super::record::{self, Record};
use super::segment::{self, Head, Segment};
use crate::block::Block;
use crate::tier::coalesce::{self, BlockRange, ReadRun};
use std::collections::HashSet;
use std::io;
use std::sync::Arc;

/// At most a quarter of a segment is carried over, so that reclaiming frees space.
const CARRIED_DIVISOR: u64 = 4;
/// Maximum length in bytes of one read and one write of carried over blocks.
const CARRY_BYTES: u64 = 4 << 20;

/// A victim: no longer part of the log, but still readable.
pub(super) struct ReclaimingSegment {
    pub(super) segment: Arc<Segment>,
    /// Blocks that the index locates in the segment.
    blocks: Vec<(Candidate, Location)>,
    /// Blocks to carry over, with their space in the head.
    carried_over: Vec<CarryOver>,
    /// Indices of blocks in use that are not carried over but worth spilling.
    to_spill: Vec<usize>,
}

/// Blocks that are copied together.
struct CarryOver {
    run: ReadRun,
    /// The head and the offset in it; `None` when the blocks wait in memory for the next head.
    to: Option<(Arc<Head>, u64)>,
}

/// The blocks of some runs, in memory.
pub(super) type KeptBlocks = Vec<Vec<Block>>;

impl ReclaimingSegment {
    /// A victim of which nothing is carried over.
    pub(super) fn new(segment: Arc<Segment>) -> Self {
        Self { segment, blocks: Vec::new(), carried_over: Vec::new(), to_spill: Vec::new() }
    }

    /// Bytes that the blocks to carry over take in a head.
    pub(super) fn carried_bytes(&self) -> u64 {
        self.carried_over.iter().map(|carried_over| whole_blocks(&carried_over.run)).sum()
    }

    /// The runs of records of some blocks.
    fn runs(&self, positions: &[usize]) -> Vec<ReadRun> {
        let wanted = positions.iter().map(|&index| {
            let (candidate, location) = &self.blocks[index];
            BlockRange { index, offset: u64::from(location.offset) * Access::UNIT, length: candidate.bytes }
        });
        coalesce::coalesce(wanted.collect(), 0, CARRY_BYTES)
    }
}

impl Log {
    /// Chooses the blocks of a victim to carry over to the open head of its group, if there is one, and those worth
    /// spilling.
    pub(super) fn choose_carried_over_to_head(
        &self,
        state: &mut State,
        carry_bytes: u64,
        victim: &mut ReclaimingSegment,
    ) {
        let open = state.heads.get_mut(&victim.segment.group());
        // One rotation may reclaim several segments.
        let left = open.as_ref().map_or(0, |open| carry_bytes.saturating_sub(open.end));
        self.choose_carried_over(open, left, victim);
    }

    /// Chooses the blocks of a victim to carry over, at most `left` bytes, and those worth spilling. Without an open
    /// head the former wait in memory for the next one.
    pub(super) fn choose_carried_over(
        &self,
        mut open: Option<&mut OpenHead>,
        left: u64,
        victim: &mut ReclaimingSegment,
    ) {
        let number = victim.segment.number();
        let record_list = victim.segment.record_list();
        let blocks = record_list.iter().filter(|(_, entry)| !entry.is_tombstone).filter_map(|(fingerprint, entry)| {
            let location = self.shared.index.get(fingerprint, entry.hash)?;
            let bytes = record::span(u64::from(entry.length), self.access.alignment());
            let (hash, parent, hot) = (entry.hash, entry.parent, location.hot);
            let pinned = self.shared.index.is_pinned(fingerprint, hash);
            let candidate = Candidate { fingerprint, hash, parent, hot, pinned, bytes };
            (self.is_in_segment(&location, number) && location.offset == entry.offset).then_some((candidate, location))
        });
        victim.blocks = blocks.collect();
        drop(record_list);
        let candidates: Vec<Candidate> = victim.blocks.iter().map(|(candidate, _)| *candidate).collect();
        let part = self.settings.segment_bytes / CARRIED_DIVISOR;
        let budget = left.min(part);
        let mut max_carried = budget;
        let (carried, runs) = loop {
            let carried = reclaim::carried(&candidates, max_carried);
            let runs = victim.runs(&carried);
            // Each copied run takes whole device blocks.
            let takes: u64 = runs.iter().map(whole_blocks).sum();
            if takes <= budget {
                break (carried, runs);
            }
            max_carried = (u128::from(max_carried) * u128::from(budget) / u128::from(takes)) as u64;
        };
        victim.to_spill = reclaim::carried(&candidates, part.saturating_add(budget));
        victim.to_spill.retain(|index| carried.binary_search(index).is_err());
        let carried_over = runs.into_iter().map(|run| {
            let (bytes, records) = (run.end() - run.start(), run.blocks.len());
            let to = open.as_deref_mut().map(|open| (open.head.clone(), open.take(bytes, records)));
            CarryOver { run, to }
        });
        victim.carried_over = carried_over.collect();
    }

    /// Carries over and spills the chosen blocks, and deletes the segment. Returns the blocks that wait for the next
    /// head. They are misses until they are in it.
    pub(super) fn reclaim(&self, victim: &ReclaimingSegment) -> KeptBlocks {
        // The other blocks leave the index first, so that a store of one of them is not answered as already stored.
        let carried_over: HashSet<usize> = victim
            .carried_over
            .iter()
            .flat_map(|carried_over| carried_over.run.blocks.iter().map(|wanted| wanted.index))
            .collect();
        let removed = victim.blocks.iter().enumerate().filter(|(index, _)| !carried_over.contains(index));
        let removed = removed.map(|(_, (block, _))| (block.fingerprint, block.hash));
        self.shared.index.remove(removed, |location| self.is_in_segment(location, victim.segment.number()));
        let kept = self.carry_over(victim).unwrap_or_else(|error| {
            tracing::warn!(folder = %self.folder.display(), %error, "cannot copy hot blocks to a new segment");
            Vec::new()
        });
        self.delete_segment(&victim.segment);
        kept
    }

    /// Writes blocks to the places in the head that were taken for them.
    pub(super) fn write_kept(&self, head: &Head, kept: &[(u64, Vec<Block>)]) -> io::Result<()> {
        for (at, blocks) in kept {
            let records: Vec<Record<'_>> = blocks.iter().map(Record::Block).collect();
            let offsets = head.write(*at, &records, &self.shared.pool)?;
            let entries = blocks.iter().zip(offsets);
            self.index_blocks(entries.map(|(block, offset)| self.index_entry(block, head.segment(), offset)));
            self.remove_if_withdrawn(blocks, head);
        }
        Ok(())
    }

    /// Removes blocks that were written to the head from the index, if `withdraw` did not find them there.
    fn remove_if_withdrawn(&self, written: &[Block], head: &Head) {
        if self.is_withdrawn() {
            let blocks = written.iter().map(|block| (block.header.fingerprint, block.header.hash));
            self.shared.index.remove(blocks, |location| self.is_in_segment(location, head.segment().number()));
        }
    }

    /// Deletes a segment, with those of its blocks that the index still locates there.
    fn delete_segment(&self, segment: &Segment) {
        let (number, record_list) = (segment.number(), std::mem::take(&mut *segment.record_list()));
        let blocks = record_list.iter().map(|(fingerprint, entry)| (fingerprint, entry.hash));
        self.shared.index.remove(blocks, |location| self.is_in_segment(location, number));
        if let Err(error) = segment::delete_keeping_spare(&self.io, &self.folder, number) {
            tracing::warn!(folder = %self.folder.display(), segment = number, %error, "cannot delete a segment");
        }
        segment.resize(0);
    }

    /// Copies the chosen blocks to the head, and spills others. Returns those that wait for the next head.
    fn carry_over(&self, victim: &ReclaimingSegment) -> io::Result<KeptBlocks> {
        let number = victim.segment.number();
        let (mut unreadable, mut last, mut kept) = (0, None, Vec::new());
        for CarryOver { run, to } in &victim.carried_over {
            // An unreadable run loses its own blocks only.
            let valid = match self.read_valid(victim, run) {
                Ok(valid) => valid,
                Err(error) => {
                    (unreadable, last) = (unreadable + run.blocks.len(), Some(error));
                    continue;
                }
            };
            let Some((head, at)) = to else {
                if !valid.is_empty() {
                    kept.push(valid);
                }
                continue;
            };
            let records: Vec<Record<'_>> = valid.iter().map(Record::Block).collect();
            let offsets = head.write(*at, &records, &self.shared.pool)?;
            for (block, offset) in valid.iter().zip(offsets) {
                let new = self.index_entry(block, head.segment(), offset);
                let is_in_victim = |location: &Location| self.is_in_segment(location, number);
                self.shared.index.relocate(new.fingerprint, new.hash, is_in_victim, new.location);
            }
            self.remove_if_withdrawn(&valid, head);
        }
        if let Some(error) = last {
            tracing::warn!(
                folder = %self.folder.display(), segment = number, blocks = unreadable, %error,
                "cannot read blocks in use; they are deleted with their segment"
            );
        }
        if let Some(Spill { accepts, to }) = self.shared.spill.get() {
            let wanted = |index: &&usize| accepts(victim.blocks[**index].0.fingerprint, victim.blocks[**index].0.hash);
            let to_spill: Vec<usize> = victim.to_spill.iter().filter(wanted).copied().collect();
            for run in victim.runs(&to_spill) {
                // Blocks that do not fit into the channel are dropped.
                let valid = self.read_valid(victim, &run).unwrap_or_default();
                for block in valid {
                    let _ = to.try_send(block);
                }
            }
        }
        Ok(kept)
    }

    /// The blocks of a run that pass verification.
    fn read_valid(&self, victim: &ReclaimingSegment, run: &ReadRun) -> io::Result<Vec<Block>> {
        let records = run.blocks.iter().zip(self.read(victim.segment.number(), run)?);
        let valid = records.filter_map(|(wanted, record)| {
            let candidate = victim.blocks[wanted.index].0;
            let read = record::block(&record?).ok()?;
            read.check(candidate.hash, candidate.fingerprint).ok()?;
            Some(read)
        });
        Ok(valid.collect())
    }
}

/// Bytes that a run takes in a head.
fn whole_blocks(run: &ReadRun) -> u64 {
    (run.end() - run.start()).next_multiple_of(Access::BLOCK)
}
