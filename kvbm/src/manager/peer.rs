//! Another manager's memory, in the same process, as a tier to read from: how prefilled blocks reach the decode worker.
//!
//! A block is held while it is copied and sealed on reading, so it is verified like any other tier's. The owner's life
//! is its own: once the last handle to the manager is gone, a peer has nothing.
//!
//! Look here in vain for writing: nobody stores into somebody else's memory.

use super::Core;
use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use crate::pool::CachedBlock;
use crate::tier::{Loaded, StoreError, Tier, Usage};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use std::io;
use std::sync::{Arc, Weak};

/// A manager's G1 and G2, seen from outside.
pub(crate) struct Peer(Weak<Core>);

impl Peer {
    /// Blocks copied per hop to a blocking thread: large enough to hide the hop, small enough to begin early.
    const BATCH_BYTES: usize = 4 << 20;

    pub(crate) fn new(core: &Arc<Core>) -> Self {
        Self(Arc::downgrade(core))
    }
}

impl Core {
    /// Copies a block out of device memory and describes it. Blocks for the time of the copy.
    pub(crate) fn read(&self, held: &CachedBlock) -> Block {
        let mut bytes = vec![0; self.device.block_bytes()];
        let (length, fingerprint, custody) = (bytes.len(), self.device.fingerprint(), held.custody());
        let header = Header::seal_along(held.name(), held.parent(), fingerprint, custody, length, |seen| {
            self.device.read_seen(held.slot(), &mut bytes, seen);
        });
        Block { header, payload: Bytes::from(bytes) }
    }

    /// Blocks from this process's memory, G2's copies first: they cost no copy and no read of the device.
    pub(crate) fn in_memory(&self, names: &[SequenceHash]) -> Vec<Option<Block>> {
        let mut found = self.host.as_ref().map_or_else(|| vec![None; names.len()], |host| host.get(names));
        let missing: Vec<usize> = (0..names.len()).filter(|index| found[*index].is_none()).collect();
        let held = self.pool.found(&missing.iter().map(|index| names[*index]).collect::<Vec<_>>());
        for (index, held) in missing.into_iter().zip(held) {
            found[index] = held.map(|held| self.read(&held));
        }
        found
    }
}

impl Tier for Peer {
    fn level(&self) -> Level {
        Level::Peer
    }

    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        let Some(core) = self.0.upgrade().filter(|core| core.device.fingerprint() == fingerprint) else { return 0 };
        let here = |name: &&SequenceHash| {
            let name = std::slice::from_ref(*name);
            core.pool.holds(name) == 1 || core.host.as_ref().is_some_and(|host| host.holds(fingerprint, name) == 1)
        };
        names.iter().take_while(here).count()
    }

    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let core = self.0.clone();
        let size = self.0.upgrade().map_or(1, |core| (Self::BATCH_BYTES / core.device.block_bytes().max(1)).max(1));
        let batches: Vec<(usize, Vec<SequenceHash>)> =
            names.chunks(size).enumerate().map(|(batch, names)| (batch * size, names.to_vec())).collect();
        let read = move |(first, names): (usize, Vec<SequenceHash>)| {
            let core = core.upgrade().filter(|core| core.device.fingerprint() == fingerprint);
            tokio::task::spawn_blocking(move || -> Vec<Loaded> {
                let found = core.map_or_else(|| vec![None; names.len()], |core| core.in_memory(&names));
                found.into_iter().enumerate().map(|(at, block)| (first + at, Ok(block))).collect()
            })
        };
        stream::iter(batches)
            .then(read)
            .flat_map(|loaded| stream::iter(loaded.expect("reading memory does not panic")))
            .boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let refuse =
            || Err(StoreError::Io(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, "a peer tier is read-only")));
        Box::pin(async move { blocks.iter().map(|_| refuse()).collect() })
    }

    fn discard(&self, _: Fingerprint, name: SequenceHash) {
        // The copy in flight was unsound, or the owner's G2 is: G1 is what the owner itself computes with.
        if let Some(host) = self.0.upgrade().and_then(|core| core.host.clone()) {
            host.discard(host.fingerprint(), name);
        }
    }

    fn expire(&self, _: Date) -> usize {
        // The owner does.
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
