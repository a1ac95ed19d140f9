//! The read path: which ranges of which objects a load reads, and how blocks are decoded from them.
//!
//! Ranges are coalesced here (`crate::tier::coalesce`, also used by the disk tier) and not by
//! `ObjectStore::get_ranges` (`object_store` 0.14.2), which merges all ranges with a gap of at most 1 MiB into one
//! request without a size limit, and returns only when the last of its requests is done. A load streams blocks as soon
//! as their request is answered, and the bounded size of a request is the unit of fair queueing, of the memory limit,
//! of hedging and of the timeout.

use super::access_log::AccessLog;
use super::catalog::{self, Catalog};
use super::client::Client;
use super::client::health::StoreHealth;
use super::format::layout::ObjectId;
use crate::block::{Block, Corrupt, Fingerprint, Header, SequenceHash};
use crate::tier::coalesce::{self, BlockRange, ReadRun};
use crate::tier::{Change, FairSemaphore, LoadError, Loaded, Permit, TierQuotas};
use bytes::Bytes;
use futures::stream::{self, BoxStream, StreamExt};
use object_store::Error;
use std::collections::BTreeMap;
use std::io;
use std::sync::{Arc, OnceLock};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Concurrent requests of one load, poll or scan: stores reach their bandwidth through parallel requests.
pub(super) const PARALLEL_REQUESTS: usize = 16;
/// Concurrent requests of all loads, in fair order between domains. Further requests would wait in the network, where
/// no order is kept.
const MAX_REQUESTS: usize = 64;
/// Minimum bytes of a full ranged read. With 50 ms of latency and 100 MB/s per stream, most of its time is transfer.
const MIN_RANGE_BYTES: u64 = 4 << 20;
/// Large blocks per request, if a load is long enough to keep all parallel requests busy, and the maximum bytes of
/// such a request.
const BLOCKS_PER_RANGE: u64 = 16;
const MAX_RANGE_BYTES: u64 = 32 << 20;
/// Bytes of all loads that are being read: a range is buffered until it is complete.
const MAX_BUFFERED_BYTES: u64 = 512 << 20;
/// Reading over a gap of this size takes less time than another request.
const MAX_GAP_BYTES: u64 = 512 << 10;

/// Orders the requests of concurrent loads: fair between domains, and bounded in requests and bytes.
pub(super) struct ReadQueue {
    semaphore: Arc<FairSemaphore>,
    buffer_bytes: Arc<Semaphore>,
    quotas: OnceLock<TierQuotas>,
}

impl ReadQueue {
    pub(super) fn new() -> Self {
        Self {
            semaphore: FairSemaphore::new(MAX_REQUESTS, &[]),
            buffer_bytes: Arc::new(Semaphore::new(MAX_BUFFERED_BYTES as usize)),
            quotas: OnceLock::new(),
        }
    }

    /// Sets the weights of the domains, once.
    pub(super) fn set_quotas(&self, quotas: TierQuotas) {
        self.semaphore.set_weights(&quotas.weights);
        let _ = self.quotas.set(quotas);
    }

    async fn enter(&self, catalog: &Catalog, object: i64, run: &ReadRun) -> (Permit, Option<OwnedSemaphorePermit>) {
        let domain = catalog.object(object).map(|object| object.domain);
        let group = domain.zip(self.quotas.get()).map_or(0, |(domain, quotas)| quotas.group(domain));
        let bytes = run.end() - run.start();
        let permit = self.semaphore.acquire(group, bytes).await;
        // The semaphore is never closed.
        (permit, self.buffer_bytes.clone().acquire_many_owned(bytes.min(MAX_BUFFERED_BYTES) as u32).await.ok())
    }
}

/// Shared state of the reads of one load.
#[derive(Clone)]
pub(super) struct Reader {
    pub(super) client: Arc<Client>,
    pub(super) catalog: Arc<Catalog>,
    pub(super) queue: Arc<ReadQueue>,
    pub(super) access_log: Arc<AccessLog>,
    pub(super) fingerprint: Fingerprint,
    pub(super) hashes: Arc<[SequenceHash]>,
}

impl Reader {
    /// Loads the blocks of the reader. Blocks with a payload of more than `max_payload_bytes` are corrupt.
    pub(super) fn load(self, max_payload_bytes: u64) -> BoxStream<'static, Loaded> {
        let mut missing = Vec::new();
        let mut objects: BTreeMap<i64, Vec<BlockRange>> = BTreeMap::new();
        let locations = self.catalog.index.find(self.fingerprint, &self.hashes, |_| ());
        for (index, location) in locations.into_iter().enumerate() {
            let Some(location) = location else {
                missing.push(index);
                continue;
            };
            if u64::from(location.length) > max_payload_bytes {
                self.catalog.mark_corrupt(self.fingerprint, &[self.hashes[index]], location.object);
                missing.push(index);
                continue;
            }
            let offset = u64::from(location.offset);
            let length = Header::LEN as u64 + u64::from(location.length);
            objects.entry(location.object).or_default().push(BlockRange { index, offset, length });
        }
        let range = range_bytes(objects.values().flatten().map(|wanted| wanted.length));
        let runs = objects.into_iter().flat_map(|(object, wanted)| {
            coalesce::coalesce(wanted, MAX_GAP_BYTES, range).into_iter().map(move |run| (object, run))
        });
        let mut runs: Vec<(i64, ReadRun)> = runs.collect();
        runs.sort_by_key(|(_, run)| run.blocks.iter().map(|wanted| wanted.index).min());
        let read = move |(object, run)| {
            let reader = self.clone();
            async move {
                let _permit = reader.queue.enter(&reader.catalog, object, &run).await;
                stream::iter(reader.read_run(object, &run).await)
            }
        };
        let misses = stream::iter(missing.into_iter().map(|index| (index, Ok(None))));
        misses.chain(stream::iter(runs).map(read).buffer_unordered(PARALLEL_REQUESTS).flatten()).boxed()
    }

    /// Reads a run of blocks of one object. A missing object is a miss; a corrupt block is an error and leaves the
    /// catalog.
    async fn read_run(&self, number: i64, run: &ReadRun) -> Vec<Loaded> {
        let Self { client, catalog, .. } = self;
        let indices = || run.blocks.iter().map(|wanted| wanted.index);
        let misses = || indices().map(|index| (index, Ok(None))).collect();
        let Some(object) = catalog.object(number) else { return misses() };
        let attempt = client.reads.begin();
        let bytes = match client.get_range(&object.path, run.start()..run.end()).await {
            Ok(bytes) if bytes.len() as u64 == run.end() - run.start() => {
                if client.reads.succeeded() == Change::Changed {
                    tracing::info!(store = %client, "reading blocks from the store works again");
                }
                bytes
            }
            Ok(_) => {
                catalog.mark_missing(number);
                return misses();
            }
            Err(error) => {
                if has_changed(client, &object, &error).await {
                    catalog.mark_missing(number);
                    return misses();
                }
                if let StoreHealth::Refused(reason) = StoreHealth::from(&error)
                    && client.reads.failed(attempt, &reason) == Change::Changed
                {
                    tracing::warn!(
                        store = %client, object = %object.path, reason,
                        "the store refuses to return blocks; they are computed, and the next load is a new attempt"
                    );
                }
                let error = io::Error::from(error);
                let copy = || LoadError::Io(io::Error::new(error.kind(), error.to_string()));
                return indices().map(|index| (index, Err(copy()))).collect();
            }
        };
        if let Some(id) = ObjectId::from_path(&object.path) {
            self.access_log.record(id);
        }
        let decode = |wanted: &BlockRange| {
            let start = (wanted.offset - run.start()) as usize;
            let block = decode_block(&bytes, start, wanted.length as usize);
            (wanted.index, block.map(Some).map_err(LoadError::Corrupt))
        };
        let loaded: Vec<Loaded> = run.blocks.iter().map(decode).collect();
        let corrupt = loaded.iter().filter(|(_, result)| result.is_err()).map(|(index, _)| self.hashes[*index]);
        let corrupt: Vec<SequenceHash> = corrupt.collect();
        if !corrupt.is_empty() {
            catalog.mark_corrupt(self.fingerprint, &corrupt, number);
        }
        loaded
    }
}

/// The target size of a request of a load, for blocks of these lengths: larger for large blocks, as far as enough
/// requests remain to run in parallel.
pub(super) fn range_bytes(lengths: impl Iterator<Item = u64>) -> u64 {
    let mut total = 0;
    let mut largest = 0;
    lengths.for_each(|length| (total, largest) = (total + length, length.max(largest)));
    let maximum = (largest * BLOCKS_PER_RANGE).clamp(MIN_RANGE_BYTES, MAX_RANGE_BYTES);
    (total / PARALLEL_REQUESTS as u64).clamp(MIN_RANGE_BYTES, maximum)
}

/// Whether an object that could not be read is missing or has another size, rather than being unreachable.
async fn has_changed(client: &Client, object: &catalog::Object, error: &Error) -> bool {
    if matches!(error, Error::NotFound { .. }) {
        return true;
    }
    match client.head(&object.path).await {
        Ok(meta) => meta.size != object.bytes,
        Err(error) => matches!(error, Error::NotFound { .. }),
    }
}

/// Decodes the block at `start`. Does not verify its checksum: the code that serves the block does.
pub(super) fn decode_block(bytes: &Bytes, start: usize, length: usize) -> Result<Block, Corrupt> {
    let record = bytes.get(start..start + length).ok_or(Corrupt::Length)?;
    let header = Header::decode(record.first_chunk().ok_or(Corrupt::Length)?)?;
    Ok(Block { header, payload: bytes.slice(start + Header::LEN..start + length) })
}
