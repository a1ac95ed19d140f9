//! Small objects become large ones, one's own and those that nobody looks after: a trickle leaves many, and a prompt that lies
//! in fifty of them takes fifty requests to read.
//!
//! What small objects hold is read, verified, and packed again like blocks that are new. The old objects stay as they are:
//! once everybody knows the new one, a collector finds that all their blocks lie elsewhere too, and removes them as it removes
//! others, with the same grace. So nothing here deletes, waits for anybody, or leaves anything wrong behind when it ends in
//! between; and where nobody collects, nobody should compact.

use crate::block::{Block, Header};
use crate::object::catalog::Small;
use crate::object::writer::Job;
use crate::object::{ObjectTier, PARALLEL, block};
use crate::tier::StoreError;
use futures::stream::{self, StreamExt};
use object_store::Error;
use std::io;
use std::time::Duration;
use tokio::sync::oneshot;

/// An object is small below this part of a full one: eight and more of such are read in as many requests as bytes, then.
const SMALL: u64 = 8;
/// So many of them are worth being one: fewer cost about as much to rewrite as they cost to read.
const ENOUGH: usize = 8;

/// What came of compacting.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Compaction {
    /// Small objects that were read.
    pub objects: u64,
    /// Blocks of theirs that rest in large ones now.
    pub blocks: u64,
}

impl ObjectTier {
    /// Packs what this process wrote in small objects into large ones, where there are enough of them, and what others did and
    /// left so for that long: whoever lives packs its own. Of theirs only what it reads from: the rest is for those who do. Blocks
    /// are as old as they were. To be called now and then where somebody collects; a second call at the same time does its work
    /// twice.
    pub async fn compact(&self, left: Duration) -> io::Result<Compaction> {
        let full = self.settings.object_bytes;
        let (mut done, mut noted) = (Compaction::default(), None);
        for group in self.catalog.small(self.writer, left, full / SMALL, |id| self.uses.idle(id).is_some()) {
            let mut packs: Vec<Vec<Small>> = Vec::new();
            let mut room = 0;
            for small in group {
                if small.object.bytes > room {
                    packs.push(Vec::new());
                    room = full;
                }
                room -= small.object.bytes;
                packs.last_mut().expect("one was begun").push(small);
            }
            for mut pack in packs {
                self.catalog.still(&mut pack);
                // Until the old ones have gone, what is packed again lies there twice.
                let bytes = pack.iter().map(|small| small.object.bytes).sum();
                if pack.len() < ENOUGH || self.check_capacity(bytes).is_err() {
                    continue;
                }
                let noted = match &mut noted {
                    Some(noted) => noted,
                    none => none.insert(self.uses.noted().await?),
                };
                let idle = pack.iter().map(|small| self.uses.idle_of(&small.object, noted)).min().unwrap_or_default();
                done.objects += pack.len() as u64;
                done.blocks += self.pack_again(pack, idle).await?;
            }
        }
        Ok(done)
    }

    /// Writes the blocks of some objects, not used for so long, again, and says how many rest.
    async fn pack_again(&self, pack: Vec<Small>, idle: Duration) -> io::Result<u64> {
        // All of them first, so that they are packed together. They are as much as one object.
        let mut reading = stream::iter(pack).map(async |small| self.read_small(small).await).buffered(PARALLEL);
        let mut blocks = Vec::new();
        while let Some(read) = reading.next().await {
            blocks.extend(read?);
        }
        drop(reading);
        let mut answers = Vec::with_capacity(blocks.len());
        for block in blocks {
            // Somebody writes it just now.
            let Ok(claim) = self.claims.claim(block.header.fingerprint, block.header.name) else { continue };
            let bytes = u32::try_from(Header::LEN as u64 + block.header.length).map_err(io::Error::other)?;
            let room = self.room.clone().acquire_many_owned(bytes).await.map_err(io::Error::other)?;
            let (answer, waiting) = oneshot::channel();
            self.jobs.send(Job { block, idle, answer, claim, room }).await.map_err(io::Error::other)?;
            answers.push(waiting);
        }
        let mut rest = 0;
        for waiting in answers {
            match waiting.await.unwrap_or_else(|died| Err(io::Error::other(died).into())) {
                Ok(()) => rest += 1,
                Err(StoreError::Io(error)) => return Err(error),
                Err(StoreError::Busy | StoreError::Full) => {}
            }
        }
        Ok(rest)
    }

    /// The blocks that are read from a small object, those that are what they were.
    async fn read_small(&self, small: Small) -> io::Result<Vec<Block>> {
        let object = &small.object;
        let bytes = match self.client.range(&object.path, 0..object.bytes).await {
            Ok(bytes) => bytes,
            Err(Error::NotFound { .. }) => {
                self.catalog.lose(small.number);
                return Ok(Vec::new());
            }
            // It stays as it is, and keeps nobody from packing the others.
            Err(error) => {
                tracing::warn!(object = %object.path, %error, "cannot read a small object; it is not compacted");
                return Ok(Vec::new());
            }
        };
        let sound = |(name, place): &(_, crate::object::catalog::Place)| {
            let block = block(&bytes, place.offset as usize, Header::LEN + place.length as usize).ok()?;
            block.check(*name, object.fingerprint).ok()?;
            Some(block)
        };
        Ok(small.blocks.iter().filter_map(sound).collect())
    }
}
