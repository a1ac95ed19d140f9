//! NVIDIA Dynamo's concurrent indexes, used as its router uses them: a pool of threads applies queued events, and
//! lookups run on the calling thread.

use crate::seam::{Block, Index, Size};
use dynamo_kv_router::protocols::{
    ExternalSequenceBlockHash, KvCacheEvent, KvCacheEventData, KvCacheRemoveData, KvCacheStoreData,
    KvCacheStoredBlockData, LocalBlockHash, OverlapScores, RouterEvent,
};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer, SyncIndexer, ThreadPoolIndexer};
use tokio::runtime::{Builder, Runtime};

/// One of the two indexes.
pub(crate) trait Kind: SyncIndexer {
    fn make() -> Self;
}

impl Kind for ConcurrentRadixTreeCompressed {
    fn make() -> Self {
        Self::new()
    }
}

impl Kind for PositionalIndexer {
    fn make() -> Self {
        // The jump size that its documentation names.
        Self::new(32)
    }
}

/// An index and its thread pool.
pub(crate) struct Dynamo<K: Kind> {
    pool: ThreadPoolIndexer<K>,
    runtime: Runtime,
}

impl<K: Kind> Dynamo<K> {
    fn send(&self, worker: u32, data: KvCacheEventData) {
        let event = KvCacheEvent { event_id: 0, data, dp_rank: 0 };
        self.pool.enqueue_event(RouterEvent::new(u64::from(worker), event)).expect("the pool runs");
    }
}

impl<K: Kind> Index for Dynamo<K> {
    type Query = Vec<LocalBlockHash>;
    type Answer = OverlapScores;
    const QUEUES: bool = true;

    fn new(size: Size) -> Self {
        let runtime = Builder::new_current_thread().build().expect("a runtime without drivers starts");
        Self { pool: ThreadPoolIndexer::new(K::make(), size.threads, 16), runtime }
    }

    fn stored(&self, worker: u32, parent: Option<u64>, blocks: &[Block]) {
        let block = |block: &Block| KvCacheStoredBlockData {
            block_hash: ExternalSequenceBlockHash(block.sequence),
            tokens_hash: LocalBlockHash(block.content),
            mm_extra_info: None,
        };
        let blocks = blocks.iter().map(block).collect();
        let parent_hash = parent.map(ExternalSequenceBlockHash);
        self.send(worker, KvCacheEventData::Stored(KvCacheStoreData { parent_hash, start_position: None, blocks }));
    }

    fn removed(&self, worker: u32, sequences: &[u64]) {
        let block_hashes = sequences.iter().copied().map(ExternalSequenceBlockHash).collect();
        self.send(worker, KvCacheEventData::Removed(KvCacheRemoveData { block_hashes }));
    }

    fn drain(&self) {
        self.runtime.block_on(self.pool.flush_and_wait()).expect("the pool runs");
    }

    fn query(prompt: &[Block]) -> Self::Query {
        prompt.iter().map(|block| LocalBlockHash(block.content)).collect()
    }

    fn overlap(&self, query: &Self::Query, answer: &mut OverlapScores) {
        *answer = self.pool.backend().find_matches(query, false);
    }

    fn depths(&self, answer: &OverlapScores) -> Vec<(u32, u32)> {
        answer.scores.iter().map(|(worker, depth)| (worker.worker_id as u32, *depth)).collect()
    }
}
