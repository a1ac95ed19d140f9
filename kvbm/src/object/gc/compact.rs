//! Compaction: rewrites the blocks of small objects into large ones. A low write rate leaves many small objects, and a
//! prompt that is spread over fifty of them takes fifty requests to load.
//!
//! The blocks are read, verified, and written like new blocks. The old objects are not deleted here: once all
//! followers know the new object, garbage collection finds that the old ones are duplicates and removes them after the
//! usual grace period. An interrupted compaction therefore leaves nothing invalid behind, and without garbage
//! collection there should be no compaction.

use crate::block::{Block, Header};
use crate::object::catalog::{BlockLocation, SmallObject};
use crate::object::reader::{PARALLEL_REQUESTS, decode_block};
use crate::object::tier::ObjectTier;
use crate::object::writer::WriteJob;
use crate::tier::StoreError;
use futures::stream::{self, StreamExt};
use object_store::Error;
use std::io;
use std::time::Duration;
use tokio::sync::oneshot;

/// An object is small if it has less than a full object's size divided by this.
const MAX_SIZE_DIVISOR: u64 = 8;
/// The fewest small objects that are rewritten: fewer save about as many requests as the rewrite costs.
const MIN_OBJECTS: usize = 8;

/// Result of a compaction.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Compaction {
    /// Small objects that were read.
    pub objects: u64,
    /// Blocks of these that are stored in large objects now.
    pub blocks: u64,
}

impl ObjectTier {
    /// Rewrites small objects of this process, and those of other processes that have been known for `min_age` and
    /// that this process reads (live writers compact their own). Only done where there are enough of them. The blocks
    /// keep their idle time. Call it periodically where garbage collection runs; concurrent calls do the same work
    /// twice.
    pub async fn compact(&self, min_age: Duration) -> io::Result<Compaction> {
        let full = self.settings.object_bytes;
        let mut done = Compaction::default();
        let mut idle_times = None;
        for group in self
            .catalog
            .small_objects(self.writer, min_age, full / MAX_SIZE_DIVISOR, |id| self.access_log.idle_time(id).is_some())
        {
            let mut packs: Vec<Vec<SmallObject>> = Vec::new();
            let mut left = 0;
            for small in group {
                if small.object.bytes > left {
                    packs.push(Vec::new());
                    left = full;
                }
                left -= small.object.bytes;
                packs.last_mut().expect("a pack was started").push(small);
            }
            for mut pack in packs {
                self.catalog.retain_current(&mut pack);
                // Until the old objects are deleted, the blocks are stored twice.
                let bytes = pack.iter().map(|small| small.object.bytes).sum();
                if pack.len() < MIN_OBJECTS || self.check_capacity(bytes).is_err() {
                    continue;
                }
                let idle_times = match &mut idle_times {
                    Some(idle_times) => idle_times,
                    none => none.insert(self.access_log.read_all().await?),
                };
                let idle = pack
                    .iter()
                    .map(|small| self.access_log.object_idle_time(&small.object, idle_times))
                    .min()
                    .unwrap_or_default();
                done.objects += pack.len() as u64;
                done.blocks += self.rewrite(pack, idle).await?;
            }
        }
        Ok(done)
    }

    /// Writes the blocks of some objects again, with this idle time, and returns how many were stored.
    async fn rewrite(&self, pack: Vec<SmallObject>, idle: Duration) -> io::Result<u64> {
        // All are read first, so that they are packed together. Together they are as large as one object.
        let mut reading =
            stream::iter(pack).map(async |small| self.read_small(small).await).buffered(PARALLEL_REQUESTS);
        let mut blocks = Vec::new();
        while let Some(read) = reading.next().await {
            blocks.extend(read?);
        }
        drop(reading);
        let mut answers = Vec::with_capacity(blocks.len());
        for block in blocks {
            // The block is being written.
            let Ok(claim) = self.claims.claim(block.header.fingerprint, block.header.hash) else { continue };
            let bytes = u32::try_from(Header::LEN as u64 + block.header.length).map_err(io::Error::other)?;
            let queue_permit = self.queue_bytes.clone().acquire_many_owned(bytes).await.map_err(io::Error::other)?;
            let (answer, waiting) = oneshot::channel();
            self.jobs.send(WriteJob { block, idle, answer, claim, queue_permit }).await.map_err(io::Error::other)?;
            answers.push(waiting);
        }
        let mut stored = 0;
        for waiting in answers {
            match waiting.await.unwrap_or_else(|closed| Err(io::Error::other(closed).into())) {
                Ok(()) => stored += 1,
                Err(StoreError::Io(error)) => return Err(error),
                Err(_) => {}
            }
        }
        Ok(stored)
    }

    /// The valid blocks that are read from a small object.
    async fn read_small(&self, small: SmallObject) -> io::Result<Vec<Block>> {
        let object = &small.object;
        let bytes = match self.client.get_range(&object.path, 0..object.bytes).await {
            Ok(bytes) => bytes,
            Err(Error::NotFound { .. }) => {
                self.catalog.mark_missing(small.number);
                return Ok(Vec::new());
            }
            // The object is left as it is; the others are compacted.
            Err(error) => {
                tracing::warn!(object = %object.path, %error, "cannot read a small object; it is not compacted");
                return Ok(Vec::new());
            }
        };
        let valid = |(hash, location): &(_, BlockLocation)| {
            let block = decode_block(&bytes, location.offset as usize, Header::LEN + location.length as usize).ok()?;
            block.check(*hash, object.fingerprint).ok()?;
            Some(block)
        };
        Ok(small.blocks.iter().filter_map(valid).collect())
    }
}
