//! Blocks of one batch that are verified and written into G2: by the tasks that have read them, while their bytes are
//! in the processor's cache, or on a blocking thread. They are registered together, when the batch has ended.

use crate::block::{Block, Corrupt, Date, Fingerprint, Header, PieceVerifier, SequenceHash};
use crate::pool::{FullBlock, HostTier, PartialBlock};
use crate::tier::{BlockReceiver, PieceReceiver};
use parking_lot::Mutex;
use std::sync::Arc;
use tokio::time::Instant;

/// Largest block that is copied as a whole on the thread that has read it, as in onboarding.
const MAX_BLOCK_BYTES: usize = 2 << 20;

/// Writes the blocks of one batch.
pub(super) struct HostInbox {
    host: HostTier,
    fingerprint: Fingerprint,
    hashes: Vec<SequenceHash>,
    written: Mutex<Written>,
}

struct Written {
    /// The blocks in order, verified and written or corrupt.
    blocks: Vec<Option<Result<(Header, FullBlock), Corrupt>>>,
    /// When the first one was there.
    first: Option<Instant>,
}

/// A block of which not all pieces have arrived. Dropping it frees its slot.
struct Arriving {
    inbox: Arc<HostInbox>,
    index: usize,
    slot: PartialBlock,
    verifier: PieceVerifier,
    at: usize,
}

impl HostInbox {
    pub(super) fn new(host: HostTier, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> Arc<Self> {
        let blocks = hashes.iter().map(|_| None).collect();
        Arc::new(Self { host, fingerprint, hashes, written: Mutex::new(Written { blocks, first: None }) })
    }

    /// The receiver of a load.
    pub(super) fn receiver(self: &Arc<Self>) -> Arc<dyn BlockReceiver> {
        Arc::new(Receiver(Arc::clone(self)))
    }

    /// Verifies and writes a block, unless there is no slot for it. Blocks for the time of the copy.
    pub(super) fn write(&self, index: usize, block: Block) -> Option<Block> {
        let Some(&hash) = self.hashes.get(index) else { return Some(block) };
        if block.payload.len() != self.host.block_bytes() {
            self.note(index, Err(Corrupt::Length));
            return None;
        }
        let Ok(mut slot) = self.host.allocate_for(block.header.parent) else { return Some(block) };
        let copy = |bytes: &[u8], observe: &mut dyn FnMut(&[u8])| {
            self.host.write_part(&mut slot, 0, bytes, observe);
        };
        let verified = block.verify_while_copying(hash, self.fingerprint, copy);
        self.note(index, verified.map(|block| (*block.header(), self.host.complete(slot, block.header()))));
        None
    }

    fn note(&self, index: usize, block: Result<(Header, FullBlock), Corrupt>) {
        let mut written = self.written.lock();
        written.first.get_or_insert_with(Instant::now);
        if let Some(before) = written.blocks.get_mut(index) {
            *before = Some(block);
        }
    }

    /// When the first block was there.
    pub(super) fn first(&self) -> Option<Instant> {
        self.written.lock().first
    }

    /// Registers the leading blocks that are intact and not expired at `now`. Returns their number, and what is wrong
    /// with the next one if it is corrupt. The others are dropped.
    pub(super) fn register(&self, now: Date, since: u64) -> (usize, Option<Corrupt>) {
        let blocks = std::mem::take(&mut self.written.lock().blocks);
        let (mut full, mut corrupt) = (Vec::with_capacity(blocks.len()), None);
        for block in blocks {
            match block {
                Some(Ok((header, block))) if !header.retention.is_expired(now) => full.push(block),
                Some(Err(why)) => {
                    corrupt = Some(why);
                    break;
                }
                Some(Ok(_)) | None => break,
            }
        }
        let count = full.len();
        self.host.insert(full, since);
        (count, corrupt)
    }
}

struct Receiver(Arc<HostInbox>);

impl BlockReceiver for Receiver {
    fn take(&self, index: usize, block: Block) -> Option<Block> {
        if block.payload.len() > MAX_BLOCK_BYTES { Some(block) } else { self.0.write(index, block) }
    }

    fn begin(&self, index: usize, header: &Header) -> Option<Box<dyn PieceReceiver>> {
        let inbox = &self.0;
        let hash = *inbox.hashes.get(index)?;
        if header.length != inbox.host.block_bytes() as u64 {
            return None;
        }
        let verifier = PieceVerifier::new(header, hash, inbox.fingerprint).ok()?;
        let slot = inbox.host.allocate_for(header.parent).ok()?;
        Some(Box::new(Arriving { inbox: Arc::clone(inbox), index, slot, verifier, at: 0 }))
    }
}

impl PieceReceiver for Arriving {
    fn write(&mut self, bytes: &[u8]) -> bool {
        let verifier = &mut self.verifier;
        self.inbox.host.write_part(&mut self.slot, self.at, bytes, &mut |piece| verifier.update(piece));
        self.at += bytes.len();
        true
    }

    fn end(self: Box<Self>) {
        let Self { inbox, index, slot, verifier, .. } = *self;
        let verified = verifier.verify();
        inbox.note(index, verified.map(|header| (header, inbox.host.complete(slot, &header))));
    }
}
