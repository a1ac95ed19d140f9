//! Another manager's memory, in the same process, as a tier to read from: the way of prefilled blocks to the decode
//! worker.
//!
//! A block is held while it is read, and gets its header with a checksum then, so it is verified like any other tier's.
//! The checksum of a block's bytes is computed once: a block that was onboarded has the one that it arrived with, and
//! another keeps that of its first reader or of its copy in G2. So a later change of the bytes, by a fault of the
//! memory, is found by each reader.
//!
//! Where device memory is plain memory, the reader gets the block's own bytes and no copy of them. They are read for a
//! checksum when the block is taken from the stream, so that its next reader, the socket, finds them in the processor's
//! cache. A peer does not keep the manager alive; once its last handle is dropped, the peer is empty.
//!
//! Not here: storing. A peer is read-only.

use super::shared::Core;
use crate::block::{Block, Date, Fingerprint, Header, Level, SequenceHash};
use crate::blocking;
use crate::pool::{BlockId, CachedBlock, DeviceBlocks};
use crate::table::prefetch::prefetch;
use crate::tier::{Loaded, StoreError, Tier, Usage};
use bytes::Bytes;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use std::io;
use std::sync::{Arc, Weak};

/// A manager's G1 and G2, seen from outside.
pub(super) struct Peer(Weak<Core>);

impl Peer {
    /// Bytes that are looked up at a time, and read per task on a blocking thread: enough to hide the cost of the
    /// thread switch, few enough to begin early.
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
        if let Some(checksum) = held.checksum() {
            self.device.read(held.slot(), &mut bytes);
            return Block { header: self.header(held, checksum), payload: Bytes::from(bytes) };
        }
        let (length, fingerprint, attrs) = (bytes.len(), self.device.fingerprint(), held.attrs());
        let header = Header::new_while_copying(held.hash(), held.parent(), fingerprint, attrs, length, |observe| {
            self.device.read_observed(held.slot(), &mut bytes, observe);
        });
        held.note_checksum(header.payload_checksum());
        Block { header, payload: Bytes::from(bytes) }
    }

    /// The header of a block in device memory, the checksum of whose bytes is known.
    fn header(&self, held: &CachedBlock, checksum: u64) -> Header {
        let payload = (self.device.block_bytes(), checksum);
        Header::of_known_payload(held.hash(), held.parent(), self.device.fingerprint(), held.attrs(), payload)
    }

    /// Makes the header of a block. Its bytes are those of the device if that is plain memory, and hold the block.
    fn share(&self, held: CachedBlock) -> Block {
        let Some(bytes) = self.device.bytes(held.slot()) else { return self.read(&held) };
        let header = if let Some(checksum) = held.checksum() {
            self.header(&held, checksum)
        } else {
            let (parent, fingerprint) = (held.parent(), self.device.fingerprint());
            let (attrs, length) = (held.attrs(), bytes.len());
            let header = Header::new_while_copying(held.hash(), parent, fingerprint, attrs, length, |update| {
                read_ahead(bytes, update);
            });
            held.note_checksum(header.payload_checksum());
            header
        };
        Block { header, payload: Bytes::from_owner(HeldBytes { device: Arc::clone(&self.device), held }) }
    }

    /// Blocks from this process's memory, to be kept.
    pub(super) fn in_memory(&self, hashes: &[SequenceHash]) -> Vec<Option<Block>> {
        let read = |found: Option<Found>| found.map(|found| found.block(|held| self.read(&held)));
        self.find(hashes).into_iter().map(read).collect()
    }

    /// Where this process's memory has blocks, G2's copies first: their checksums are known.
    fn find(&self, hashes: &[SequenceHash]) -> Vec<Option<Found>> {
        let in_host = self.host.as_ref().map_or_else(|| vec![None; hashes.len()], |host| host.get(hashes));
        let mut found: Vec<Option<Found>> = in_host.into_iter().map(|block| block.map(Found::InHost)).collect();
        let missing: Vec<usize> = (0..hashes.len()).filter(|index| found[*index].is_none()).collect();
        let held = self.pool.get_each(&missing.iter().map(|index| hashes[*index]).collect::<Vec<_>>());
        for (index, held) in missing.into_iter().zip(held) {
            found[index] = held.map(Found::InDevice);
        }
        found
    }
}

/// Bytes that are requested from memory while as many before them are read: a third of a first-level cache.
const READ_AHEAD: usize = 16 << 10;

/// Bytes of a cache line.
const LINE: usize = 64;

/// Passes bytes that are in no cache to `update`. A processor alone does not fetch far enough ahead of a checksum,
/// which then waits for memory.
fn read_ahead(bytes: &[u8], update: &mut dyn FnMut(&[u8])) {
    let fetch = |piece: &[u8]| piece.iter().step_by(LINE).for_each(prefetch);
    let mut pieces = bytes.chunks(READ_AHEAD).peekable();
    pieces.peek().copied().into_iter().for_each(fetch);
    while let Some(piece) = pieces.next() {
        pieces.peek().copied().into_iter().for_each(fetch);
        update(piece);
    }
}

/// A block that is held in this process's memory.
enum Found {
    InHost(Block),
    InDevice(CachedBlock),
}

impl Found {
    fn block(self, read: impl FnOnce(CachedBlock) -> Block) -> Block {
        match self {
            Self::InHost(block) => block,
            Self::InDevice(held) => read(held),
        }
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
        let own = move || core.upgrade().filter(|core| core.device.fingerprint() == fingerprint);
        let (size, is_plain) = own().map_or((1, false), |core| {
            let size = (Self::BATCH_BYTES / core.device.block_bytes().max(1)).max(1);
            let has_slots = core.pool.capacity() > 0;
            (size, size > 1 && has_slots && core.device.bytes(BlockId(0)).is_some())
        });
        let batches: Vec<(usize, Vec<SequenceHash>)> =
            hashes.chunks(size).enumerate().map(|(batch, hashes)| (batch * size, hashes.to_vec())).collect();
        let find = |core: Option<Arc<Core>>, hashes: &[SequenceHash]| {
            core.map_or_else(|| hashes.iter().map(|_| None).collect(), |core| core.find(hashes))
        };
        if is_plain {
            // Without copies, a batch takes microseconds, and each block those of its checksum.
            let of_block = own.clone();
            let each = move |(at, found): (usize, Option<Found>)| {
                let block = found.zip(of_block()).map(|(found, core)| found.block(|held| core.share(held)));
                (at, Ok(block))
            };
            let batch = move |(first, hashes): (usize, Vec<SequenceHash>)| {
                let (own, each) = (own.clone(), each.clone());
                async move {
                    if first > 0 {
                        // The checksums of a batch may have taken most of a millisecond.
                        tokio::task::yield_now().await;
                    }
                    stream::iter((first..).zip(find(own(), &hashes)).map(each))
                }
            };
            return stream::iter(batches).then(batch).flatten().boxed();
        }
        let read = move |(first, hashes): (usize, Vec<SequenceHash>)| {
            let core = own();
            blocking::spawn(move || -> Vec<Loaded> {
                let found = find(core.clone(), &hashes);
                let shared = |core: &Core, found: Found| found.block(|held| core.share(held));
                let block = |found: Option<Found>| found.zip(core.as_deref()).map(|(found, core)| shared(core, found));
                found.into_iter().enumerate().map(|(at, found)| (first + at, Ok(block(found)))).collect()
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
