//! Verification: reads all live objects, and compares every block with its manifest entry and its checksum.

use super::collector::Collector;
use super::inventory::{Contents, Inventory, LiveObject};
use crate::block::{DomainId, Header, KeyId};
use crate::object::format::layout::ObjectId;
use crate::object::format::manifest::Section;
use crate::object::reader::decode_block;
use bytes::Bytes;
use futures::stream::{self, StreamExt, TryStreamExt};
use object_store::Error;
use serde::Serialize;
use std::collections::BTreeMap;
use std::io;

/// Concurrent reads of whole objects when all are verified. Each takes memory for one object.
const PARALLEL_OBJECTS: usize = 4;

/// Result of reading all objects.
#[derive(Clone, PartialEq, Eq, Debug, Default, Serialize)]
pub struct Verification {
    /// Objects that were read.
    pub objects: u64,
    /// Blocks that match their checksums.
    pub valid_blocks: u64,
    /// Valid blocks whose data key is not available here.
    pub undecryptable_blocks: u64,
    /// Blocks that do not match their checksums.
    pub corrupt_blocks: u64,
    /// Objects that a manifest lists and the store does not have.
    pub missing_objects: u64,
    /// Manifests that do not match their checksums.
    pub corrupt_manifests: u64,
    /// Manifests that could not be read although the store answers.
    pub unreadable_manifests: u64,
    /// Objects with corrupt blocks, and missing objects, that were marked for deletion.
    pub marked_objects: u64,
}

impl Collector {
    /// Reads every block of the live objects. `has_key` tells whether a data key is available; with `remove`, missing
    /// objects and objects with corrupt blocks are marked.
    pub async fn verify(
        &self,
        inventory: &Inventory,
        remove: bool,
        has_key: impl AsyncFn(DomainId, KeyId) -> io::Result<bool>,
        progress: impl Fn(u64, u64),
    ) -> io::Result<Verification> {
        let live: Vec<_> = inventory.live().collect();
        let total = live.len() as u64;
        let mut damaged: Vec<ObjectId> = inventory.missing().collect();
        let mut result = Verification {
            missing_objects: damaged.len() as u64,
            corrupt_manifests: inventory.count_manifests(|contents| matches!(contents, Contents::Invalid)),
            unreadable_manifests: inventory.unreadable_manifests(),
            ..Verification::default()
        };
        let read = |live: LiveObject<'_>| {
            // Bytes after the listed blocks are not read.
            let (path, bytes) = (live.stored.path.clone(), live.stored.bytes.min(live.section.bytes()));
            async move {
                match self.client.get_first(&path, bytes).await {
                    Ok(bytes) => Ok(Some(bytes)),
                    Err(Error::NotFound { .. }) => Ok(None),
                    Err(error) => Err(error),
                }
            }
        };
        let mut reading = stream::iter(live.clone()).map(read).buffered(PARALLEL_OBJECTS);
        let mut keys: BTreeMap<(DomainId, KeyId), bool> = BTreeMap::new();
        for live in live {
            let Some(bytes) = reading.try_next().await? else { break };
            let Some(bytes) = bytes else {
                result.missing_objects += 1;
                damaged.push(live.id);
                continue;
            };
            let before = result.corrupt_blocks;
            for header in block_headers(&bytes, live.section) {
                let Some(header) = header else {
                    result.corrupt_blocks += 1;
                    continue;
                };
                result.valid_blocks += 1;
                let Some(key) = header.key else { continue };
                let found = match keys.get(&(header.domain, key)) {
                    Some(found) => *found,
                    None => has_key(header.domain, key).await?,
                };
                keys.insert((header.domain, key), found);
                result.undecryptable_blocks += u64::from(!found);
            }
            if result.corrupt_blocks > before {
                damaged.push(live.id);
            }
            result.objects += 1;
            progress(result.objects, total);
        }
        if remove {
            result.marked_objects = damaged.len() as u64;
            self.mark(damaged).await?;
        }
        Ok(result)
    }
}

/// The headers of the blocks in an object; `None` for a block that does not match its entry or its checksum.
fn block_headers(bytes: &Bytes, section: &Section) -> impl Iterator<Item = Option<Header>> {
    section.entries.iter().map(|entry| {
        let block = decode_block(bytes, entry.offset as usize, Header::LEN + entry.length as usize).ok()?;
        block.check(entry.hash, section.fingerprint).ok()?;
        Some(block.header)
    })
}
