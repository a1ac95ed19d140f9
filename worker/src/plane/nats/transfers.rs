//! Transfers larger than a message, in pieces that the reader requests: tokenizers, and snapshots that cannot be read
//! over HTTP.
//!
//! A snapshot of a million blocks has 16 MB. The reader requests its pieces, a few at a time, so it sets the pace, the
//! NATS server holds less than half a megabyte for it, and a source that dies shows as a piece that does not come. Lost
//! pieces need no protocol of their own: the read fails, and the router asks again. A router limits its concurrent
//! snapshots, so a cold start takes longer instead of filling the queues of the server.

use super::codec::{self, CodecError};
use crate::plane::Source;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt};
use kvbm::{Epoch, SequenceHash, Snapshot};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::time::Duration;
use tokio::time::Instant;

/// Bytes of a piece: a message of the smallest permitted limit, 64 KiB, with room for the answer before it.
const PIECE_BYTES: usize = 48 << 10;

/// Pieces requested at a time: 384 KiB on the way, more than 1 Gbit/s times 2 ms.
const CONCURRENT_PIECES: usize = 8;

/// Memory reserved before any piece has arrived; the announced number of bytes may be wrong.
const MAX_RESERVED_BYTES: u64 = 64 << 20;

/// Snapshots that a process keeps open. Each may have tens of megabytes. Routers that ask for the same number share
/// one.
const MAX_OPEN: usize = 8;

/// A snapshot whose reader has not asked for a piece for this long is closed: longer than a reader waits for a piece.
const IDLE: Duration = Duration::from_secs(10);

/// The piece of encoded bytes at an offset; empty after the end.
pub(super) fn piece_of(encoded: &Bytes, offset: u64) -> Bytes {
    let start = usize::try_from(offset).map_or(encoded.len(), |offset| offset.min(encoded.len()));
    encoded.slice(start..encoded.len().min(start + PIECE_BYTES))
}

/// Reads the pieces after the first, and returns all `bytes`.
pub(super) async fn fetch<F, R>(first: Bytes, bytes: u64, read: F) -> Result<Vec<u8>, String>
where
    F: Fn(u64) -> R,
    R: Future<Output = Result<Bytes, String>>,
{
    let mut all = Vec::with_capacity(bytes.min(MAX_RESERVED_BYTES) as usize);
    all.extend_from_slice(&first);
    let offsets = (first.len() as u64..bytes).step_by(PIECE_BYTES);
    let mut pieces = futures::stream::iter(offsets.map(read)).buffered(CONCURRENT_PIECES);
    while let Some(piece) = pieces.try_next().await? {
        all.extend_from_slice(&piece);
    }
    if all.len() as u64 == bytes { Ok(all) } else { Err(format!("{} bytes of {bytes} arrived", all.len())) }
}

/// The snapshots that this process keeps open for readers.
#[derive(Default)]
pub(super) struct OpenSnapshots(Mutex<State>);

#[derive(Default)]
struct State {
    last: u64,
    open: BTreeMap<u64, OpenSnapshot>,
}

struct OpenSnapshot {
    of: (Source, Epoch, u64),
    encoded: Bytes,
    used: Instant,
}

impl OpenSnapshots {
    /// Whether another snapshot may be opened.
    pub(super) fn has_room(&self) -> bool {
        let mut state = self.0.lock();
        let now = Instant::now();
        state.open.retain(|_, open| now - open.used < IDLE);
        state.open.len() < MAX_OPEN
    }

    /// The open snapshot as of this number, with its number of bytes and first piece.
    pub(super) fn find(&self, source: Source, epoch: Epoch, number: u64) -> Option<(u64, u64, Bytes)> {
        let mut state = self.0.lock();
        let (id, open) = state.open.iter_mut().find(|(_, open)| open.of == (source, epoch, number))?;
        open.used = Instant::now();
        Some((*id, open.encoded.len() as u64, piece_of(&open.encoded, 0)))
    }

    /// Opens an encoded snapshot of this number for readers.
    pub(super) fn open(&self, source: Source, epoch: Epoch, number: u64, encoded: Bytes) -> (u64, u64, Bytes) {
        let (bytes, first) = (encoded.len() as u64, piece_of(&encoded, 0));
        let mut state = self.0.lock();
        state.last += 1;
        let id = state.last;
        // Nothing is left to be read of a snapshot of one piece.
        if first.len() < encoded.len() {
            state.open.insert(id, OpenSnapshot { of: (source, epoch, number), encoded, used: Instant::now() });
        }
        (id, bytes, first)
    }

    /// A piece of an open snapshot; `None` if it is not open any more.
    pub(super) fn read(&self, id: u64, offset: u64) -> Option<Bytes> {
        let mut state = self.0.lock();
        let open = state.open.get_mut(&id)?;
        open.used = Instant::now();
        Some(piece_of(&open.encoded, offset))
    }
}

/// A snapshot of more bytes is encoded and decoded on another thread: less than a millisecond.
const MAX_INLINE_BYTES: usize = 128 << 10;

/// Encodes a snapshot without blocking the async runtime.
pub(super) async fn encode_snapshot(snapshot: Snapshot) -> Bytes {
    let bytes = snapshot.blocks().count() * size_of::<SequenceHash>();
    on_blocking_thread_if_large(bytes, move || Bytes::from(codec::encode(&snapshot))).await
}

/// Decodes a snapshot without blocking the async runtime.
pub(super) async fn decode_snapshot(encoded: Vec<u8>) -> Result<Snapshot, CodecError> {
    on_blocking_thread_if_large(encoded.len(), move || codec::decode(&encoded)).await
}

async fn on_blocking_thread_if_large<T: Send + 'static>(bytes: usize, work: impl FnOnce() -> T + Send + 'static) -> T {
    if bytes <= MAX_INLINE_BYTES {
        return work();
    }
    tokio::task::spawn_blocking(work).await.expect("encoding and decoding do not panic")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::plane::WorkerId;
    use kvbm::{Level, Run};
    use std::future::ready;

    const SOURCE: Source = Source::Worker(WorkerId(1));

    fn snapshot(blocks: u128) -> Snapshot {
        let blocks = (0..blocks).map(|n| SequenceHash::from_bytes(n.to_le_bytes())).collect();
        Snapshot { epoch: Epoch(1), number: 5, runs: vec![Run { level: Level::G1, parent: None, blocks }] }
    }

    async fn opened(open: &OpenSnapshots, blocks: u128) -> (u64, u64, Bytes) {
        open.open(SOURCE, Epoch(1), 5, encode_snapshot(snapshot(blocks)).await)
    }

    #[tokio::test]
    async fn a_snapshot_of_many_pieces_arrives_complete() {
        let open = OpenSnapshots::default();
        let (id, bytes, first) = opened(&open, 20_000).await;
        assert!(bytes > 6 * PIECE_BYTES as u64);
        assert_eq!(open.find(SOURCE, Epoch(1), 5).map(|(same, ..)| same), Some(id), "another reader shares it");
        assert!(open.find(SOURCE, Epoch(1), 6).is_none());
        let read = |offset| ready(open.read(id, offset).ok_or_else(|| "closed".to_owned()));
        let all = fetch(first, bytes, read).await.unwrap();
        assert_eq!(decode_snapshot(all).await, Ok(snapshot(20_000)));
    }

    #[tokio::test(start_paused = true)]
    async fn snapshots_without_a_reader_are_closed() {
        let open = OpenSnapshots::default();
        let (small, ..) = opened(&open, 10).await;
        assert_eq!(open.read(small, 0), None, "its only piece was sent");
        let mut ids = Vec::new();
        while open.has_room() {
            ids.push(opened(&open, 4_000).await.0);
        }
        assert_eq!(ids.len(), MAX_OPEN);
        tokio::time::sleep(IDLE / 2).await;
        assert!(open.read(ids[0], 0).is_some());
        tokio::time::sleep(IDLE / 2).await;
        assert!(open.has_room());
        assert_eq!((open.read(ids[0], 0).is_some(), open.read(ids[1], 0)), (true, None));
    }

    #[tokio::test]
    async fn a_piece_that_is_too_short_is_noticed() {
        let read = |_| ready(Ok(Bytes::from_static(b"short")));
        assert!(fetch(Bytes::new(), 100, read).await.is_err());
    }
}
