//! The memory of a worker in another process, as a tier to read from: `POST /workers/<id>/blocks` over HTTP/1.1.
//!
//! Blocks are read over several connections at a time, each by a task of its own. The task offers a block to the
//! receiver of the load, which verifies and copies it while its bytes are in the processor's cache: a small block when
//! it has arrived, a large one piece by piece. Other blocks are verified by the caller, like those of any tier.
//! Dropping the stream closes its connections. Which blocks of a prefill are computed is read from
//! `GET /workers/<id>/handoffs/<handoff>`.

mod connection;
mod endpoint;

use super::blocks::{PREFIX, decode_header, decode_prefix, encode_request};
use super::connect::Credentials;
use super::progress;
use crate::handoff::{HandoffId, Progress, ProgressStream, RemoteMemory};
use crate::plane::WorkerId;
use bytes::{Bytes, BytesMut};
use connection::{MAX_CACHED_PART_BYTES, Response};
use endpoint::PeerEndpoint;
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream};
use kvbm::{Block, BlockReceiver, Date, Fingerprint, Header, Level, LoadError, Loaded, SequenceHash};
use kvbm::{PieceReceiver, StoreError, Tier, Usage};
use parking_lot::Mutex;
use std::collections::HashSet;
use std::io;
use std::sync::Arc;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tokio_util::task::AbortOnDropHandle;

/// The memory of a worker in another process.
pub struct RemotePeer {
    endpoint: Arc<PeerEndpoint>,
    blocks_path: String,
    handoffs_path: String,
    max_connections: usize,
    /// Blocks that were found corrupt; they are not asked for again.
    discarded: Mutex<HashSet<SequenceHash>>,
}

/// Connections of one load: one does not use a fast network, and more than a few threads do not read faster.
const MAX_CONNECTIONS: usize = 4;
/// Consecutive blocks that come over one connection, before the next ones come over another: so the first blocks arrive
/// first, and short loads use one connection.
const STRIPE_BLOCKS: usize = 8;
/// Blocks of a load that have arrived and wait to be verified, beside one for each connection. They keep buffers of
/// connections from being used again.
const MAX_ARRIVED: usize = 8;
/// Corrupt blocks that are remembered. When there are more, the memory begins anew.
const MAX_DISCARDED: usize = 1024;

impl RemotePeer {
    /// The memory of `worker`, whose process listens at `url`. Connects with the first load.
    pub fn new(worker: WorkerId, url: &str, credentials: impl Into<Credentials>) -> Self {
        Self {
            endpoint: Arc::new(PeerEndpoint::new(url, credentials.into())),
            blocks_path: format!("/workers/{}/blocks", worker.0),
            handoffs_path: format!("/workers/{}/handoffs/", worker.0),
            max_connections: MAX_CONNECTIONS,
            discarded: Mutex::default(),
        }
    }

    /// Reads over at most this many connections at a time: for measurements.
    #[must_use]
    pub fn with_connections(self, max_connections: usize) -> Self {
        Self { max_connections: max_connections.max(1), ..self }
    }

    /// Reads blocks over several connections.
    fn read(
        &self,
        fingerprint: Fingerprint,
        hashes: &[SequenceHash],
        receiver: Option<&Arc<dyn BlockReceiver>>,
    ) -> BoxStream<'static, Loaded> {
        if hashes.is_empty() {
            return stream::empty().boxed();
        }
        let (sender, arriving) = mpsc::channel(MAX_ARRIVED);
        let read = |indexes: Vec<usize>| {
            let wanted: Vec<SequenceHash> = indexes.iter().map(|index| hashes[*index]).collect();
            let request = self.endpoint.request("POST", &self.blocks_path, &encode_request(fingerprint, &wanted));
            let (endpoint, missing, left) = (Arc::clone(&self.endpoint), vec![true; indexes.len()], indexes.len());
            let part = Part { endpoint, request, indexes, missing, left, receiver: receiver.cloned() };
            AbortOnDropHandle::new(tokio::spawn(part.read(sender.clone())))
        };
        let reading: Vec<_> = stripes(hashes.len(), self.max_connections).into_iter().map(read).collect();
        ReceiverStream::new(arriving)
            .inspect(move |_| {
                // Dropped with the stream.
                let _ = &reading;
            })
            .boxed()
    }
}

/// Blocks that are read over one connection, with their indexes in the load.
struct Part {
    endpoint: Arc<PeerEndpoint>,
    request: Vec<u8>,
    indexes: Vec<usize>,
    /// Which of them have not arrived yet.
    missing: Vec<bool>,
    /// Number of those.
    left: usize,
    /// Takes blocks as they arrive.
    receiver: Option<Arc<dyn BlockReceiver>>,
}

impl Part {
    /// Reads the blocks. Those that cannot be read are errors.
    async fn read(mut self, into: mpsc::Sender<Loaded>) {
        let Err(error) = self.read_all(&into).await else { return };
        if self.left == self.indexes.len() {
            let what = "the memory of another worker cannot be read; its blocks are recomputed";
            self.endpoint.log_failure(&error, what);
        }
        let kind = error.kind();
        for index in self.indexes.iter().zip(&self.missing).filter_map(|(index, missing)| missing.then_some(*index)) {
            if into.send((index, Err(LoadError::Io(kind.into())))).await.is_err() {
                return;
            }
        }
    }

    async fn read_all(&mut self, into: &mpsc::Sender<Loaded>) -> io::Result<()> {
        let mut response = self.endpoint.send(&self.request).await?;
        while self.left > 0 {
            let (at, header) = next_header(&mut response).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
            if self.missing.get(at) != Some(&true) {
                return Err(io::ErrorKind::InvalidData.into());
            }
            let index = self.indexes[at];
            if let Some(header) = &header
                && header.length > MAX_CACHED_PART_BYTES as u64
                && let Some(pieces) = self.receiver.as_ref().and_then(|receiver| receiver.begin(index, header))
            {
                if !take_pieces(&mut response, header.length, pieces).await? {
                    // The load was dropped.
                    return Ok(());
                }
                self.arrived(at);
                continue;
            }
            let block = match header {
                Some(header) => Some(take_block(&mut response, header).await?),
                None => None,
            };
            self.arrived(at);
            let block = match (block, &self.receiver) {
                (Some(block), Some(receiver)) => match receiver.take(index, block) {
                    // The buffer is free to be used again.
                    None => continue,
                    block => block,
                },
                (block, _) => block,
            };
            if into.send((index, Ok(block))).await.is_err() {
                // The load was dropped.
                return Ok(());
            }
        }
        if response.take(1).await?.is_none() {
            self.endpoint.keep(response);
        }
        Ok(())
    }

    fn arrived(&mut self, at: usize) {
        self.missing[at] = false;
        self.left -= 1;
    }
}

/// The header of the next block of a response, which the server may not have found. `None` at its end.
async fn next_header<S: AsyncRead + AsyncWrite + Unpin>(
    response: &mut Response<S>,
) -> io::Result<Option<(usize, Option<Header>)>> {
    let Some(prefix) = response.take(PREFIX).await? else { return Ok(None) };
    let prefix = prefix.first_chunk().expect("so many bytes were taken");
    let (index, is_found) = decode_prefix(*prefix).map_err(io::Error::other)?;
    if !is_found {
        return Ok(Some((index, None)));
    }
    let header = response.take(Header::LEN).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
    let header = header.first_chunk().expect("so many bytes were taken");
    let header = decode_header(header, Header::MAX_LENGTH).map_err(io::Error::other)?;
    Ok(Some((index, Some(header))))
}

/// The block of a header.
async fn take_block<S: AsyncRead + AsyncWrite + Unpin>(
    response: &mut Response<S>,
    header: Header,
) -> io::Result<Block> {
    let payload = match header.length {
        0 => Bytes::new(),
        length => response.take(length as usize).await?.ok_or(io::ErrorKind::UnexpectedEof)?,
    };
    Ok(Block { header, payload })
}

/// Passes a payload on as it arrives. Returns whether its receiver has taken it: it may have been dropped.
async fn take_pieces<S: AsyncRead + AsyncWrite + Unpin>(
    response: &mut Response<S>,
    length: u64,
    mut receiver: Box<dyn PieceReceiver>,
) -> io::Result<bool> {
    let mut left = length as usize;
    while left > 0 {
        let piece = response.take_piece(left).await?.ok_or(io::ErrorKind::UnexpectedEof)?;
        if !receiver.write(&piece) {
            return Ok(false);
        }
        left -= piece.len();
    }
    receiver.end();
    Ok(true)
}

/// The indexes of a load for each connection.
fn stripes(blocks: usize, max_connections: usize) -> Vec<Vec<usize>> {
    let connections = blocks.div_ceil(STRIPE_BLOCKS).clamp(1, max_connections);
    let of = |connection| (0..blocks).filter(move |index| index / STRIPE_BLOCKS % connections == connection).collect();
    (0..connections).map(of).collect()
}

/// Reads the progress of a prefill; `None` after the last, or if the connection or its worker fails.
async fn next_progress<S: AsyncRead + AsyncWrite + Unpin>(response: &mut Response<S>) -> Option<Progress> {
    let mut arrived = BytesMut::new();
    loop {
        match progress::decode(&mut arrived) {
            Ok(Some(progress)) => return Some(progress),
            Ok(None) => {}
            Err(_) => return None,
        }
        // They are few, and small.
        arrived.extend_from_slice(&response.take(1).await.ok()??);
    }
}

impl RemoteMemory for RemotePeer {
    fn progress(&self, handoff: HandoffId) -> ProgressStream {
        let (endpoint, path) = (Arc::clone(&self.endpoint), format!("{}{handoff}", self.handoffs_path));
        let opened = async move {
            match endpoint.send(&endpoint.request("GET", &path, &[])).await {
                Ok(response) => stream::unfold(response, async |mut response| {
                    let progress = next_progress(&mut response).await?;
                    Some((progress, response))
                })
                .boxed(),
                Err(error) => {
                    endpoint.log_failure(&error, "the progress of a prefill on another worker cannot be read");
                    stream::empty().boxed()
                }
            }
        };
        stream::once(opened).flatten().boxed()
    }
}

impl Tier for RemotePeer {
    fn level(&self) -> Level {
        Level::Peer
    }

    /// A hint: the worker has said that it holds the blocks of a hand-over.
    fn holds(&self, _: Fingerprint, hashes: &[SequenceHash]) -> usize {
        let discarded = self.discarded.lock();
        hashes.iter().take_while(|hash| !discarded.contains(hash)).count()
    }

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        self.read(fingerprint, &hashes, None)
    }

    fn load_into(
        &self,
        fingerprint: Fingerprint,
        hashes: Vec<SequenceHash>,
        receiver: Arc<dyn BlockReceiver>,
    ) -> BoxStream<'static, Loaded> {
        self.read(fingerprint, &hashes, Some(&receiver))
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let reject = || Err(StoreError::Io(io::ErrorKind::ReadOnlyFilesystem.into()));
        Box::pin(async move { blocks.iter().map(|_| reject()).collect() })
    }

    fn discard(&self, _: Fingerprint, hash: SequenceHash) {
        let mut discarded = self.discarded.lock();
        if discarded.len() >= MAX_DISCARDED {
            discarded.clear();
        }
        discarded.insert(hash);
    }

    fn expire(&self, _: Date) -> usize {
        // The owner expires its blocks.
        0
    }

    /// Unknown here; the owner reports it.
    fn usage(&self) -> Usage {
        Usage::default()
    }
}
