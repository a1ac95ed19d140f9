//! What is in use: each process notes which objects it read from, and how long ago, so that collectors in others know.
//!
//! The note is one small object under the reader's own name, written again at most every few minutes and only when there is
//! something new in it: no lock, no object per block, and no request on the path of a load. It is a hint: what was read since
//! the last note, or by a process that never could write one, counts as not read. It has ages and no dates: a reader's clock may be
//! far off, and when the note was written the store knows.
//!
//! Little endian: magic `BLKYUSE2`, reader 16, then for each object its writer 16, number 8 and the seconds since it was read 4, then
//! CRC-64/NVME 8 over all before.

use super::catalog::Object;
use super::client::{Client, is_too_large};
use super::format::layout::{Layout, ObjectId, Writer};
use super::format::manifest::seconds;
use crate::block::Level;
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};
use object_store::{Error, PutPayload};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

const MAGIC: [u8; 8] = *b"BLKYUSE2";
const ENTRY: usize = 28;

/// How often a process notes at most, and how exact its ages are. What may be deleted is hours or days old; in a pod's folder,
/// which a flood fills in minutes and where a note costs no money, minutes.
const NOTE: Duration = Duration::from_mins(10);
const POD_NOTE: Duration = Duration::from_mins(1);
/// Objects in a note, the last used ones: under 2 MB.
const MOST: usize = 1 << 16;
/// Bytes of a note at most.
pub(super) const MAX_BYTES: u64 = 32 + (MOST * ENTRY) as u64;

/// What one process used.
pub(super) struct Uses {
    client: Arc<Client>,
    layout: Layout,
    reader: Writer,
    every: Duration,
    last: Mutex<Last>,
}

#[derive(Default)]
struct Last {
    of: HashMap<ObjectId, Instant>,
    /// Something changed since the last note.
    news: bool,
}

impl Uses {
    pub(super) fn new(level: Level, client: Arc<Client>, layout: Layout, reader: Writer) -> Self {
        let every = if level == Level::Pod { POD_NOTE } else { NOTE };
        Self { client, layout, reader, every, last: Mutex::default() }
    }

    /// An object was read from.
    pub(super) fn used(&self, object: ObjectId) {
        let mut last = self.lock();
        match last.of.entry(object) {
            // Near enough.
            Entry::Occupied(before) if before.get().elapsed() < self.every => return,
            Entry::Occupied(mut before) => drop(before.insert(Instant::now())),
            Entry::Vacant(first) => drop(first.insert(Instant::now())),
        }
        last.news = true;
    }

    /// How long ago this process last read from it, as far as it still knows.
    pub(super) fn idle(&self, object: ObjectId) -> Option<Duration> {
        self.lock().of.get(&object).map(Instant::elapsed)
    }

    /// How long ago anybody last used objects, as far as that was noted.
    pub(super) async fn noted(&self) -> Result<HashMap<ObjectId, Duration>, Error> {
        // Then ours is the youngest of all notes, and its date is what time it is at the store.
        self.write().await?;
        let listed = self.client.list_all(&self.layout.all_uses()).await?;
        let now = listed.iter().map(|meta| meta.last_modified).max().unwrap_or_default();
        let mut noted = HashMap::new();
        for meta in listed {
            let Some(reader) = meta.location.filename().and_then(|name| name.parse().ok()) else { continue };
            let note = match self.client.get(&meta.location, MAX_BYTES).await {
                Err(Error::NotFound { .. }) => continue,
                Err(error) if is_too_large(&error) => continue,
                note => note?,
            };
            let since = (now - meta.last_modified).to_std().unwrap_or_default();
            for (object, idle) in decode(reader, &note).into_iter().flatten() {
                let (idle, last) = (idle + since, noted.entry(object).or_insert(Duration::MAX));
                *last = idle.min(*last);
            }
        }
        Ok(noted)
    }

    /// For how long nobody has used what rests in an object, given what others `noted`: since it was written, if no more is known.
    pub(super) fn idle_of(&self, object: &Object, noted: &HashMap<ObjectId, Duration>) -> Duration {
        let written = object.idle + object.since.elapsed();
        let id = ObjectId::at(&object.path);
        let read = id.into_iter().flat_map(|id| [self.idle(id), noted.get(&id).copied()]).flatten();
        read.fold(written, Duration::min)
    }

    /// Notes now and then, for ever.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(self.every).await;
            self.note().await;
        }
    }

    /// Notes what is new, if anything is.
    pub(super) async fn note(&self) {
        if !self.lock().news {
            return;
        }
        if let Err(error) = self.write().await {
            tracing::debug!(%error, "cannot write the access log; retrying later");
        }
    }

    async fn write(&self) -> Result<(), Error> {
        let written = self.client.put(&self.layout.uses(self.reader), PutPayload::from(self.said())).await;
        if written.is_err() {
            self.lock().news = true;
        }
        written.map(drop)
    }

    /// The note, as it is now.
    fn said(&self) -> Bytes {
        let mut last = self.lock();
        last.news = false;
        let mut used: Vec<(ObjectId, Instant)> = last.of.iter().map(|(object, at)| (*object, *at)).collect();
        used.sort_unstable_by_key(|(object, at)| (std::cmp::Reverse(*at), *object));
        for (object, _) in used.drain(used.len().min(MOST)..) {
            last.of.remove(&object);
        }
        let used: Vec<(ObjectId, Duration)> = used.into_iter().map(|(object, at)| (object, at.elapsed())).collect();
        Bytes::from(encode(self.reader, &used))
    }

    fn lock(&self) -> MutexGuard<'_, Last> {
        // One insertion at a time: nothing to find half done.
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn encode(reader: Writer, used: &[(ObjectId, Duration)]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &reader.to_bytes()].concat();
    for (object, idle) in used {
        bytes.extend(object.writer.to_bytes());
        bytes.extend(object.number.to_le_bytes());
        bytes.extend(seconds(*idle).to_le_bytes());
    }
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Reads a note; `None` when it is not the one of that reader, whole and unchanged.
pub(super) fn decode(reader: Writer, bytes: &[u8]) -> Option<Vec<(ObjectId, Duration)>> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != *sum {
        return None;
    }
    let body = body.strip_prefix(&MAGIC)?.strip_prefix(&reader.to_bytes())?;
    let (entries, rest) = body.as_chunks::<ENTRY>();
    let used = |entry: &[u8; ENTRY]| {
        let writer = Writer::from_bytes(std::array::from_fn(|i| entry[i]));
        let number = u64::from_le_bytes(std::array::from_fn(|i| entry[16 + i]));
        let idle = u32::from_le_bytes(std::array::from_fn(|i| entry[24 + i]));
        (ObjectId { writer, number }, Duration::from_secs(idle.into()))
    };
    rest.is_empty().then(|| entries.iter().map(used).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tests::fuzz;
    use object_store::memory::InMemory;
    use proptest::prelude::*;

    fn object(number: u64) -> ObjectId {
        ObjectId { writer: Writer::from_bytes([7; 16]), number }
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn any_bytes_decode_within_bounds_or_are_refused(
            bytes in fuzz::inputs(encode(Writer::from_bytes([7; 16]), &[(object(1), Duration::from_secs(9)); 5])),
        ) {
            let decoded = fuzz::bounded(&bytes, 4, |bytes| decode(Writer::from_bytes([7; 16]), bytes));
            assert!(decoded.is_none_or(|used| used.len() * ENTRY <= bytes.len()));
        }
    }

    #[test]
    fn what_was_noted_is_read_and_any_flipped_bit_cut_or_other_reader_is_seen() {
        let (reader, other) = (Writer::new(), Writer::new());
        let used: Vec<_> = (1..4).map(|n| (object(n), Duration::from_secs(n * 100))).collect();
        let sound = encode(reader, &used);
        assert_eq!(decode(reader, &sound), Some(used));
        for bit in 0..sound.len() * 8 {
            let mut bad = sound.clone();
            bad[bit / 8] ^= 1 << (bit % 8);
            assert_eq!(decode(reader, &bad), None, "bit {bit}");
        }
        assert!((0..sound.len()).all(|cut| decode(reader, &sound[..cut]).is_none()));
        assert_eq!(decode(other, &sound), None);
    }

    #[tokio::test(start_paused = true)]
    async fn there_is_news_once_in_a_while_and_the_last_used_are_in_it() {
        let client = Arc::new(Client::new(Arc::new(InMemory::new()), NOTE, 1));
        let uses = Uses::new(Level::G4, client, Layout::new(""), Writer::new());
        let news = || uses.lock().news;
        assert!(!news());
        uses.used(object(1));
        assert!(news());
        uses.note().await;
        tokio::time::advance(NOTE / 2).await;
        uses.used(object(1));
        assert!(!news(), "nearly the same");
        tokio::time::advance(NOTE / 2).await;
        (0..MOST as u64).for_each(|number| uses.used(object(number + 2)));
        tokio::time::advance(NOTE).await;
        let noted = decode(uses.reader, &uses.said()).unwrap();
        assert_eq!(noted.len(), MOST);
        assert!(noted.iter().all(|(used, idle)| *used != object(1) && *idle == NOTE));
    }
}
