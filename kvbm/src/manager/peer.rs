//! Another manager's memory, in the same process, as a tier to read from: the way of prefilled blocks to the decode
//! worker.
//!
//! A block is held while it is read, and gets its header with a checksum then, so it is verified like any other tier's.
//! Where device memory is plain memory, the reader gets the block's own bytes and no copy of them. A peer does not keep
//! the manager alive; once its last handle is dropped, the peer is empty.
//!
//! Not here: storing. A peer is read-only.

use super::shared::Core;
use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use crate::blocking;
use crate::pool::{CachedBlock, DeviceBlocks};
use crate::tier::{Loaded, StoreError, Tier, Usage};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use std::io;
use std::sync::{Arc, Weak};

/// A manager's G1 and G2, seen from outside.
pub(super) struct Peer(Weak<Core>);

impl Peer {
    /// Bytes read per task on a blocking thread: enough to hide the cost of the thread switch, few enough to begin
    /// early.
    const BATCH_BYTES: usize = 4 << 20;
    /// Tasks at a time for one reader: one batch gets its headers while it reads another.
    const CONCURRENT_BATCHES: usize = 2;

    pub(super) fn new(core: &Arc<Core>) -> Self {
        Self(Arc::downgrade(core))
    }
}

/// The bytes of a block in device memory.
struct HeldBytes {
    device: Arc<dyn DeviceBlocks>,
    held: CachedBlock,
}

impl AsRef<[u8]> for HeldBytes {
    fn as_ref(&self) -> &[u8] {
        self.device.bytes(self.held.slot()).expect("the device is plain memory")
    }
}

impl Core {
    /// Copies a block out of device memory, and makes its header. Blocks for the time of the copy.
    pub(super) fn read(&self, held: &CachedBlock) -> Block {
        let mut bytes = vec![0; self.device.block_bytes()];
        let (length, fingerprint, attrs) = (bytes.len(), self.device.fingerprint(), held.attrs());
        let header = Header::new_while_copying(held.hash(), held.parent(), fingerprint, attrs, length, |observe| {
            self.device.read_observed(held.slot(), &mut bytes, observe);
        });
        Block { header, payload: Bytes::from(bytes) }
    }

    /// Makes the header of a block. Its bytes are those of the device if that is plain memory, and hold the block.
    fn share(&self, held: CachedBlock) -> Block {
        let Some(bytes) = self.device.bytes(held.slot()) else { return self.read(&held) };
        let (parent, fingerprint) = (held.parent(), self.device.fingerprint());
        let header = Header::new(held.hash(), parent, fingerprint, held.attrs(), bytes);
        Block { header, payload: Bytes::from_owner(HeldBytes { device: Arc::clone(&self.device), held }) }
    }

    /// Blocks from this process's memory, to be kept.
    pub(super) fn in_memory(&self, hashes: &[SequenceHash]) -> Vec<Option<Block>> {
        self.find(hashes, |held| self.read(&held))
    }

    /// Blocks from this process's memory, G2's copies first: their checksums are known.
    fn find(&self, hashes: &[SequenceHash], read: impl Fn(CachedBlock) -> Block) -> Vec<Option<Block>> {
        let mut found = self.host.as_ref().map_or_else(|| vec![None; hashes.len()], |host| host.get(hashes));
        let missing: Vec<usize> = (0..hashes.len()).filter(|index| found[*index].is_none()).collect();
        let held = self.pool.get_each(&missing.iter().map(|index| hashes[*index]).collect::<Vec<_>>());
        for (index, held) in missing.into_iter().zip(held) {
            found[index] = held.map(&read);
        }
        found
    }
}

impl Tier for Peer {
    fn level(&self) -> Level {
        Level::Peer
    }

    fn holds(&self, fingerprint: Fingerprint, hashes: &[SequenceHash]) -> usize {
        let Some(core) = self.0.upgrade().filter(|core| core.device.fingerprint() == fingerprint) else { return 0 };
        let here = |hash: &&SequenceHash| {
            let hash = std::slice::from_ref(*hash);
            core.pool.holds(hash) == 1 || core.host.as_ref().is_some_and(|host| host.holds(fingerprint, hash) == 1)
        };
        hashes.iter().take_while(here).count()
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let core = self.0.clone();
        let size = self.0.upgrade().map_or(1, |core| (Self::BATCH_BYTES / core.device.block_bytes().max(1)).max(1));
        let batches: Vec<(usize, Vec<SequenceHash>)> =
            hashes.chunks(size).enumerate().map(|(batch, hashes)| (batch * size, hashes.to_vec())).collect();
        let read = move |(first, hashes): (usize, Vec<SequenceHash>)| {
            let core = core.upgrade().filter(|core| core.device.fingerprint() == fingerprint);
            blocking::spawn(move || -> Vec<Loaded> {
                let shared = |core: Arc<Core>| core.find(&hashes, |held| core.share(held));
                let found = core.map_or_else(|| vec![None; hashes.len()], shared);
                found.into_iter().enumerate().map(|(at, block)| (first + at, Ok(block))).collect()
            })
        };
        stream::iter(batches)
            .map(read)
            .buffered(Self::CONCURRENT_BATCHES)
            .flat_map(|loaded| stream::iter(loaded.expect("reading memory does not panic")))
            .boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let reject =
            || Err(StoreError::Io(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "a peer tier is read-only")));
        Box::pin(async move { blocks.iter().map(|_| reject()).collect() })
    }

    fn discard(&self, _: Fingerprint, hash: SequenceHash) {
        // Either the copy or G2's block is corrupt; G1's block is not discarded, since the owner computes with it.
        if let Some(host) = self.0.upgrade().and_then(|core| core.host.clone()) {
            host.discard(host.fingerprint(), hash);
        }
    }

    fn expire(&self, _: Date) -> usize {
        // The owner expires its blocks.
        0
    }

    fn usage(&self) -> Usage {
        let Some(core) = self.0.upgrade() else { return Usage::default() };
        let (blocks, size) = (core.pool.resident() as u64, core.device.block_bytes() as u64);
        let host = core.host.as_ref().map(Tier::usage).unwrap_or_default();
        let capacity = core.pool.capacity() as u64 * size + host.capacity.unwrap_or(0);
        Usage { blocks: blocks + host.blocks, bytes: blocks * size + host.bytes, capacity: Some(capacity) }
    }
}
