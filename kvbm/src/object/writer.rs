//! The write path: packs blocks into large objects. A block is stored once a manifest lists its object.
//!
//! ```text
//!   store ─▶ queue ─▶ pack per domain and fingerprint ─full or old─▶ object ─▶ manifest ─▶ catalog, event
//! ```
//!
//! Objects are uploaded concurrently; manifests are written one after the other, each listing all objects that wait
//! for it. A manifest whose write fails is retried until it succeeds, with the same bytes under the same number: a
//! reader that saw an earlier attempt saw the whole manifest, and the numbers have no gaps.

use super::catalog::{Catalog, object_paths};
use super::client::Client;
use super::client::health::reason;
use super::format::layout::{InstanceId, Layout};
use super::format::manifest::{self, BlockEntry, Section};
use super::settings::Settings;
use crate::block::{Block, BlockRetention, DomainId, Fingerprint, Header};
use crate::tier::{Change, StoreError, WriteClaim};
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

/// How long a pack that is not full waits for more blocks: about the duration of one request.
const MAX_BATCH_DELAY: Duration = Duration::from_millis(200);
/// Concurrent uploads: stores reach their bandwidth through parallel requests.
const MAX_UPLOADS: usize = 8;
/// Objects per manifest, so that it stays small.
const MAX_MANIFEST_SECTIONS: usize = 64;
/// The first and the longest pause before a manifest write is retried.
const RETRY_PAUSE_MIN: Duration = Duration::from_millis(100);
const RETRY_PAUSE_MAX: Duration = Duration::from_secs(10);

pub(super) type StoreResult = Result<(), StoreError>;

/// A block to be written.
pub(super) struct WriteJob {
    pub(super) block: Block,
    /// For how long the block has not been used, if compaction writes it again; otherwise 0.
    pub(super) idle: Duration,
    pub(super) answer: oneshot::Sender<StoreResult>,
    /// Prevents concurrent writes of the same block in this process.
    pub(super) claim: WriteClaim,
    /// The block's bytes in the queue, released with the answer.
    pub(super) queue_permit: OwnedSemaphorePermit,
}

/// Shared state of the write path.
pub(super) struct Packer {
    pub(super) client: Arc<Client>,
    pub(super) layout: Layout,
    pub(super) writer: InstanceId,
    pub(super) catalog: Arc<Catalog>,
    pub(super) settings: Settings,
    /// The keys that authenticate manifests, if any.
    pub(super) keys: Option<Arc<MetadataKeys>>,
}

/// Blocks of one object have this key in common: one domain, so that the object can be deleted with it, and one
/// engine. Blocks that compaction writes again are separate from new ones.
type PackKey = (DomainId, Fingerprint, Duration);

/// Blocks that will be one object.
struct Pack {
    jobs: Vec<WriteJob>,
    bytes: u64,
    flush_at: Instant,
}

/// An uploaded object that waits for its manifest.
struct UploadedObject {
    section: Section,
    answer: oneshot::Sender<Result<(), ()>>,
}

impl Packer {
    /// Packs and writes until all senders of jobs are dropped.
    pub(super) async fn run(self: Arc<Self>, mut jobs: mpsc::Receiver<WriteJob>) {
        let (publish, uploaded) = mpsc::channel(MAX_UPLOADS);
        let mut uploads = JoinSet::new();
        uploads.spawn(self.clone().publish(uploaded));
        let mut packs: BTreeMap<PackKey, Pack> = BTreeMap::new();
        let mut number = 0;
        loop {
            let flush_at = packs.values().map(|pack| pack.flush_at).min();
            // The publisher is one of the tasks.
            let free = uploads.len() <= MAX_UPLOADS;
            tokio::select! {
                biased;
                Some(ended) = uploads.join_next() => ended.expect("an upload does not panic"),
                () = tokio::time::sleep_until(flush_at.unwrap_or_else(Instant::now)), if free && flush_at.is_some() => {
                    let now = Instant::now();
                    for (key, pack) in packs.extract_if(.., |_, pack| pack.flush_at <= now) {
                        uploads.spawn(self.clone().upload(key, number, pack.jobs, publish.clone()));
                        number += 1;
                    }
                }
                job = jobs.recv(), if free => {
                    let Some(job) = job else { return };
                    let header = job.block.header;
                    let empty = || Pack { jobs: Vec::new(), bytes: 0, flush_at: Instant::now() + MAX_BATCH_DELAY };
                    let key = (header.domain, header.fingerprint, job.idle);
                    let pack = packs.entry(key).or_insert_with(empty);
                    pack.bytes += Header::LEN as u64 + header.length;
                    pack.jobs.push(job);
                    if self.settings.is_full(pack.jobs.len(), pack.bytes)
                        && let Some(full) = packs.remove(&key)
                    {
                        uploads.spawn(self.clone().upload(key, number, full.jobs, publish.clone()));
                        number += 1;
                    }
                }
            }
        }
    }

    /// Uploads one object, waits for its manifest, and answers.
    async fn upload(
        self: Arc<Self>,
        (domain, fingerprint, idle): PackKey,
        object: u64,
        jobs: Vec<WriteJob>,
        publish: mpsc::Sender<UploadedObject>,
    ) {
        let mut entries = Vec::with_capacity(jobs.len());
        let mut offset = 0;
        for WriteJob { block: Block { header, .. }, .. } in &jobs {
            let Header { hash, parent, retention: BlockRetention { expires, pinned, .. }, .. } = *header;
            entries.push(BlockEntry {
                hash,
                parent,
                offset: offset as u32,
                length: header.length as u32,
                expires,
                pinned,
            });
            offset += Header::LEN as u64 + header.length;
        }
        let records = jobs
            .iter()
            .flat_map(|WriteJob { block, .. }| [Bytes::copy_from_slice(&block.header.encode()), block.payload.clone()]);
        let section = Section { domain, fingerprint, object, idle, entries };
        let path = self.layout.object(domain, fingerprint, self.writer, object);
        let written = match self.put(&path, records.collect()).await {
            Ok(()) => {
                let (answer, published) = oneshot::channel();
                // If the publisher has ended, the receiver below fails.
                let _ = publish.send(UploadedObject { section, answer }).await;
                published.await.unwrap_or(Err(())).map_err(|()| io::Error::other("the object is in no manifest"))
            }
            Err(error) => Err(error),
        };
        for job in jobs {
            drop(job.claim);
            let copy = |error: &io::Error| io::Error::new(error.kind(), error.to_string());
            let _ = job.answer.send(written.as_ref().copied().map_err(|error| StoreError::Io(copy(error))));
            drop(job.queue_permit);
        }
    }

    /// Writes manifests, one after the other.
    async fn publish(self: Arc<Self>, mut uploaded: mpsc::Receiver<UploadedObject>) {
        let mut number = 0;
        let mut waiting = Vec::new();
        while !waiting.is_empty() || uploaded.recv_many(&mut waiting, MAX_MANIFEST_SECTIONS).await > 0 {
            let (sections, mut answers): (Vec<Section>, Vec<_>) = waiting
                .drain(..sections_that_fit(&waiting))
                .map(|UploadedObject { section, answer }| (section, answer))
                .unzip();
            self.wait_for_key(&mut answers).await;
            let bytes = Bytes::from(manifest::encode(self.writer, number, &sections, self.keys.as_deref()));
            let path = self.layout.manifest(self.writer, number);
            let mut pause = RETRY_PAUSE_MIN;
            while let Err(error) = self.put(&path, PutPayload::from(bytes.clone())).await {
                tracing::warn!(
                    manifest = %path, %error, retry_after_s = pause.as_secs_f64(),
                    "cannot write a manifest"
                );
                // Callers do not wait for an unavailable store. The blocks are added to the catalog once the manifest
                // is written.
                answer_all(&mut answers, Err(()));
                tokio::time::sleep(pause).await;
                pause = (pause * 2).min(RETRY_PAUSE_MAX);
            }
            for section in &sections {
                self.catalog.record_written(section.bytes());
                self.catalog.insert_newest(object_paths(&self.layout, self.writer), section);
            }
            answer_all(&mut answers, Ok(()));
            number += 1;
        }
    }

    /// Waits until there is a key to authenticate manifests with, if they are authenticated.
    async fn wait_for_key(&self, answers: &mut Vec<oneshot::Sender<Result<(), ()>>>) {
        let mut pause = RETRY_PAUSE_MIN;
        while let Some(keys) = &self.keys
            && let Err(error) = keys.ready().await
        {
            tracing::warn!(%error, retry_after_s = pause.as_secs_f64(), "no key to encrypt manifests");
            answer_all(answers, Err(()));
            tokio::time::sleep(pause).await;
            pause = (pause * 2).min(RETRY_PAUSE_MAX);
        }
    }

    async fn put(&self, path: &Path, payload: PutPayload) -> io::Result<()> {
        // An open circuit breaker says nothing about writes: reads open it too.
        self.client.check_circuit()?;
        let (writes, store, prefix) = (&self.client.writes, &self.client, &self.layout);
        let attempt = writes.begin();
        let written = self.client.put(path, payload).await;
        match &written {
            Ok(()) if writes.succeeded() == Change::Changed => {
                tracing::info!(%store, %prefix, "writing to the store works again");
            }
            Err(error) => {
                let reason = reason(error);
                if writes.failed(attempt, &reason) == Change::Changed {
                    tracing::warn!(
                        %store, %prefix, reason,
                        "cannot write to the store; the next blocks are new attempts"
                    );
                }
            }
            Ok(()) => {}
        }
        Ok(written?)
    }
}

/// Number of waiting objects that one manifest can list: at least one.
fn sections_that_fit(waiting: &[UploadedObject]) -> usize {
    let mut bytes = 0;
    let fits = waiting.iter().take_while(|written| {
        bytes += manifest::encoded_len(&written.section);
        bytes < manifest::MAX_BYTES / 2
    });
    fits.count().max(1)
}

/// Receivers may have been dropped.
fn answer_all(answers: &mut Vec<oneshot::Sender<Result<(), ()>>>, answer: Result<(), ()>) {
    for waiting in answers.drain(..) {
        let _ = waiting.send(answer);
    }
}
