//! Writing: blocks are packed into large objects, and an object counts once a manifest names it.
//!
//! ```text
//!   store ─▶ queue ─▶ pack (one per domain and fingerprint) ─full or lingering─▶ object ─▶ manifest ─▶ known, announced, answered
//! ```
//!
//! Objects are written side by side; manifests one after the other, each naming all objects that waited for it. A manifest
//! that cannot be written is tried again until it can, with the same bytes under the same number: whoever saw an earlier
//! attempt has seen all of it, and numbers have no gaps.

use super::Settings;
use super::catalog::{Catalog, paths};
use super::client::Client;
use super::format::layout::{Layout, Writer};
use super::format::manifest::{self, Entry, Section};
use crate::block::{Block, DomainId, Fingerprint, Header, Keep};
use crate::tier::{Claim, StoreError};
use crate::transform::crypt::MetadataKeys;
use bytes::Bytes;
use object_store::{PutPayload, path::Path};
use std::collections::BTreeMap;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::{OwnedSemaphorePermit, mpsc, oneshot};
use tokio::task::JoinSet;
use tokio::time::Instant;

/// How long an object that is not full waits for more blocks: about what one request to a store takes.
const LINGER: Duration = Duration::from_millis(200);
/// Objects under way at once: stores reach their bandwidth through parallel requests.
const UPLOADS: usize = 8;
/// Objects that one manifest names, so that it stays small.
const SECTIONS: usize = 64;
/// The first and the longest wait before a manifest is tried again.
const AGAIN: (Duration, Duration) = (Duration::from_millis(100), Duration::from_secs(10));

pub(super) type Answer = Result<(), StoreError>;

/// A block that waits, and who waits for it.
pub(super) struct Job {
    pub(super) block: Block,
    /// For how long nobody has used it, if it rests already and is packed again.
    pub(super) idle: Duration,
    pub(super) answer: oneshot::Sender<Answer>,
    /// Nobody else stores it meanwhile.
    pub(super) claim: Claim,
    /// Room in the queue, until the answer.
    pub(super) room: OwnedSemaphorePermit,
}

/// What everything that writes needs.
pub(super) struct Packer {
    pub(super) client: Arc<Client>,
    pub(super) layout: Layout,
    pub(super) writer: Writer,
    pub(super) catalog: Arc<Catalog>,
    pub(super) settings: Settings,
    /// What manifests are sealed with, if they are.
    pub(super) keys: Option<Arc<MetadataKeys>>,
}

/// Whose blocks an object has: one domain's, so that it can be deleted with the domain, and one engine's; those that are packed
/// again, which are old, apart from new ones.
type Owner = (DomainId, Fingerprint, Duration);

/// Blocks that will be one object.
struct Pack {
    jobs: Vec<Job>,
    bytes: u64,
    due: Instant,
}

/// An object that waits for its manifest.
struct Written {
    section: Section,
    answer: oneshot::Sender<Result<(), ()>>,
}

impl Packer {
    /// Packs and writes until nobody can offer blocks any more.
    pub(super) async fn run(self: Arc<Self>, mut jobs: mpsc::Receiver<Job>) {
        let (publish, written) = mpsc::channel(UPLOADS);
        let mut uploads = JoinSet::new();
        uploads.spawn(self.clone().publish(written));
        let mut packs: BTreeMap<Owner, Pack> = BTreeMap::new();
        let mut number = 0;
        loop {
            let due = packs.values().map(|pack| pack.due).min();
            // The publisher is one of them.
            let free = uploads.len() <= UPLOADS;
            tokio::select! {
                biased;
                Some(ended) = uploads.join_next() => ended.expect("an upload does not panic"),
                () = tokio::time::sleep_until(due.unwrap_or_else(Instant::now)), if free && due.is_some() => {
                    let now = Instant::now();
                    for (owner, pack) in packs.extract_if(.., |_, pack| pack.due <= now) {
                        uploads.spawn(self.clone().upload(owner, number, pack.jobs, publish.clone()));
                        number += 1;
                    }
                }
                job = jobs.recv(), if free => {
                    let Some(job) = job else { return };
                    let header = job.block.header;
                    let empty = || Pack { jobs: Vec::new(), bytes: 0, due: Instant::now() + LINGER };
                    let owner = (header.domain, header.fingerprint, job.idle);
                    let pack = packs.entry(owner).or_insert_with(empty);
                    pack.bytes += Header::LEN as u64 + header.length;
                    pack.jobs.push(job);
                    if self.settings.is_full(pack.jobs.len(), pack.bytes)
                        && let Some(full) = packs.remove(&owner)
                    {
                        uploads.spawn(self.clone().upload(owner, number, full.jobs, publish.clone()));
                        number += 1;
                    }
                }
            }
        }
    }

    /// Writes one object, waits for its manifest, and answers.
    async fn upload(
        self: Arc<Self>,
        (domain, fingerprint, idle): Owner,
        object: u64,
        jobs: Vec<Job>,
        publish: mpsc::Sender<Written>,
    ) {
        let mut entries = Vec::with_capacity(jobs.len());
        let mut offset = 0;
        for Job { block: Block { header, .. }, .. } in &jobs {
            let Header { name, parent, keep: Keep { expires, pinned, .. }, .. } = *header;
            entries.push(Entry { name, parent, offset: offset as u32, length: header.length as u32, expires, pinned });
            offset += Header::LEN as u64 + header.length;
        }
        let records = jobs
            .iter()
            .flat_map(|Job { block, .. }| [Bytes::copy_from_slice(&block.header.encode()), block.payload.clone()]);
        let section = Section { domain, fingerprint, object, idle, entries };
        let path = self.layout.blocks(domain, fingerprint, self.writer, object);
        let written = match self.put(&path, records.collect()).await {
            Ok(()) => {
                let (answer, published) = oneshot::channel();
                // A publisher that is gone drops the question, and the answer says so.
                let _ = publish.send(Written { section, answer }).await;
                published.await.unwrap_or(Err(())).map_err(|()| io::Error::other("the object is in no manifest"))
            }
            Err(error) => Err(error),
        };
        for job in jobs {
            drop(job.claim);
            let copy = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
            let _ = job.answer.send(written.as_ref().copied().map_err(|error| StoreError::Io(copy(error))));
            drop(job.room);
        }
    }

    /// Writes manifests, one after the other.
    async fn publish(self: Arc<Self>, mut written: mpsc::Receiver<Written>) {
        let mut number = 0;
        let mut waiting = Vec::new();
        while !waiting.is_empty() || written.recv_many(&mut waiting, SECTIONS).await > 0 {
            let (sections, mut answers): (Vec<Section>, Vec<_>) =
                waiting.drain(..fitting(&waiting)).map(|Written { section, answer }| (section, answer)).unzip();
            self.sealing(&mut answers).await;
            let bytes = Bytes::from(manifest::encode(self.writer, number, &sections, self.keys.as_deref()));
            let path = self.layout.manifest(self.writer, number);
            let mut pause = AGAIN.0;
            while let Err(error) = self.put(&path, PutPayload::from(bytes.clone())).await {
                tracing::warn!(
                    manifest = %path, %error, retry_after_s = pause.as_secs_f64(),
                    "cannot write a manifest"
                );
                // Nobody waits for a store that is away; its blocks are known later.
                tell(&mut answers, Err(()));
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(AGAIN.1);
            }
            for section in &sections {
                self.catalog.wrote(section.bytes());
                self.catalog.add(paths(&self.layout, self.writer), section);
            }
            tell(&mut answers, Ok(()));
            number += 1;
        }
    }

    /// Waits for a key to seal manifests with, if they are to be sealed.
    async fn sealing(&self, answers: &mut Vec<oneshot::Sender<Result<(), ()>>>) {
        let mut pause = AGAIN.0;
        while let Some(keys) = &self.keys
            && let Err(error) = keys.ready().await
        {
            tracing::warn!(%error, retry_after_s = pause.as_secs_f64(), "no key to encrypt manifests");
            tell(answers, Err(()));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(AGAIN.1);
        }
    }

    async fn put(&self, path: &Path, payload: PutPayload) -> io::Result<()> {
        Ok(self.client.put(path, payload).await?)
    }
}

/// How many of the objects that wait one manifest can name: at least one.
fn fitting(waiting: &[Written]) -> usize {
    let mut bytes = 0;
    let fits = waiting.iter().take_while(|written| {
        bytes += manifest::span(&written.section);
        bytes < manifest::MAX_BYTES / 2
    });
    fits.count().max(1)
}

/// Whoever asked may have gone.
fn tell(answers: &mut Vec<oneshot::Sender<Result<(), ()>>>, answer: Result<(), ()>) {
    for waiting in answers.drain(..) {
        let _ = waiting.send(answer);
    }
}
