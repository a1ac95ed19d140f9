//! What is in use: each process notes which objects it read from, and when, so that collectors in others know.
//!
//! The note is one small object under the reader's own name, written again at most every few minutes and only when there is
//! something new in it: no lock, no object per block, and no request on the path of a load. It is a hint: what was read since
//! the last note, or by a process that never could write one, counts as not read.
//!
//! Little endian: magic `BLKYUSE1`, reader 16, then for each object its writer 16, number 8 and date 4, then CRC-64/NVME 8
//! over all before.

use super::catalog::Object;
use super::client::Client;
use super::layout::{Layout, ObjectId, Writer};
use crate::{Clock, Date, Level};
use bytes::Bytes;
use crc_fast::{CrcAlgorithm, checksum};
use object_store::{Error, PutPayload};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

const MAGIC: [u8; 8] = *b"BLKYUSE1";
const ENTRY: usize = 28;

/// How often a process notes at most, and how exact its dates are. What may be deleted is hours or days old; in a pod's folder,
/// which a flood fills in minutes and where a note costs no money, minutes.
const NOTE: Duration = Duration::from_mins(10);
const POD_NOTE: Duration = Duration::from_mins(1);
/// Objects in a note, the last used ones: under 2 MB.
const MOST: usize = 1 << 16;

/// What one process used.
pub(super) struct Uses {
    client: Arc<Client>,
    layout: Layout,
    reader: Writer,
    clock: Clock,
    every: Duration,
    last: Mutex<Last>,
}

#[derive(Default)]
struct Last {
    of: HashMap<ObjectId, Date>,
    /// Something changed since the last note.
    news: bool,
}

impl Uses {
    pub(super) fn new(level: Level, client: Arc<Client>, layout: Layout, reader: Writer, clock: Clock) -> Self {
        let every = if level == Level::Pod { POD_NOTE } else { NOTE };
        Self { client, layout, reader, clock, every, last: Mutex::default() }
    }

    /// An object was read from.
    pub(super) fn used(&self, object: ObjectId) {
        let (now, mut last) = (self.clock.now(), self.lock());
        match last.of.entry(object) {
            // Near enough; and a date from the future, of a clock that was set back, is none.
            Entry::Occupied(before) if *before.get() <= now && before.get().after(self.every) > now => return,
            Entry::Occupied(mut before) => drop(before.insert(now)),
            Entry::Vacant(first) => drop(first.insert(now)),
        }
        last.news = true;
    }

    /// When this process last read from it, as far as it still knows.
    pub(super) fn last(&self, object: ObjectId) -> Option<Date> {
        self.lock().of.get(&object).copied()
    }

    /// When anybody last used objects, as far as that was noted.
    pub(super) async fn noted(&self) -> Result<HashMap<ObjectId, Date>, Error> {
        let mut noted = HashMap::new();
        for meta in self.client.list_all(&self.layout.all_uses()).await? {
            let Some(reader) = meta.location.filename().and_then(|name| name.parse().ok()) else { continue };
            let note = match self.client.get(&meta.location).await {
                Err(Error::NotFound { .. }) => continue,
                note => note?,
            };
            for (object, date) in decode(reader, &note).into_iter().flatten() {
                let last = noted.entry(object).or_insert(date);
                *last = date.max(*last);
            }
        }
        Ok(noted)
    }

    /// When what rests in an object was last used, given what others `noted`: written, if no more is known.
    pub(super) fn last_of(&self, object: &Object, noted: &HashMap<ObjectId, Date>) -> Date {
        let now = self.clock.now();
        let written = object.used.unwrap_or_else(|| now.before(object.since.elapsed()));
        let id = ObjectId::at(&object.path);
        let read = id.into_iter().flat_map(|id| [self.last(id), noted.get(&id).copied()]).flatten();
        // A date from the future, of a clock that is wrong, is none.
        read.filter(|date| *date <= now).fold(written, Date::max)
    }

    /// Notes now and then, for ever.
    pub(super) async fn run(self: Arc<Self>) {
        loop {
            tokio::time::sleep(self.every).await;
            self.note().await;
        }
    }

    /// Notes what is new.
    pub(super) async fn note(&self) {
        let Some(note) = self.news() else { return };
        if let Err(error) = self.client.put(&self.layout.uses(self.reader), PutPayload::from(note)).await {
            tracing::debug!(%error, "what was used is noted later");
            self.lock().news = true;
        }
    }

    /// What there is to note, if there is anything new.
    fn news(&self) -> Option<Bytes> {
        let mut last = self.lock();
        if !std::mem::take(&mut last.news) {
            return None;
        }
        let mut used: Vec<(ObjectId, Date)> = last.of.iter().map(|(object, date)| (*object, *date)).collect();
        used.sort_unstable_by_key(|(object, date)| (std::cmp::Reverse(*date), *object));
        for (object, _) in used.drain(used.len().min(MOST)..) {
            last.of.remove(&object);
        }
        Some(Bytes::from(encode(self.reader, &used)))
    }

    fn lock(&self) -> MutexGuard<'_, Last> {
        // One insertion at a time: nothing to find half done.
        self.last.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn encode(reader: Writer, used: &[(ObjectId, Date)]) -> Vec<u8> {
    let mut bytes = [&MAGIC[..], &reader.to_bytes()].concat();
    for (object, date) in used {
        bytes.extend(object.writer.to_bytes());
        bytes.extend(object.number.to_le_bytes());
        bytes.extend(Date::encode(Some(*date)).to_le_bytes());
    }
    let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes);
    bytes.extend(sum.to_le_bytes());
    bytes
}

/// Reads a note; `None` when it is not the one of that reader, whole and unchanged.
pub(super) fn decode(reader: Writer, bytes: &[u8]) -> Option<Vec<(ObjectId, Date)>> {
    let (body, sum) = bytes.split_last_chunk::<8>()?;
    if checksum(CrcAlgorithm::Crc64Nvme, body).to_le_bytes() != *sum {
        return None;
    }
    let body = body.strip_prefix(&MAGIC)?.strip_prefix(&reader.to_bytes())?;
    let (entries, rest) = body.as_chunks::<ENTRY>();
    let used = |entry: &[u8; ENTRY]| {
        let writer = Writer::from_bytes(std::array::from_fn(|i| entry[i]));
        let number = u64::from_le_bytes(std::array::from_fn(|i| entry[16 + i]));
        let date = Date::decode(u32::from_le_bytes(std::array::from_fn(|i| entry[24 + i])))?;
        Some((ObjectId { writer, number }, date))
    };
    if rest.is_empty() { entries.iter().map(used).collect() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::memory::InMemory;

    fn object(number: u64) -> ObjectId {
        ObjectId { writer: Writer::from_bytes([7; 16]), number }
    }

    #[test]
    fn what_was_noted_is_read_and_any_flipped_bit_cut_or_other_reader_is_seen() {
        let (reader, other) = (Writer::new(), Writer::new());
        let used: Vec<_> = (1..4).map(|n| (object(n), Date::from_unix(n * 100))).collect();
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

    #[tokio::test]
    async fn there_is_news_once_in_a_while_and_the_last_used_are_in_it() {
        let clock = Clock::standing(Date::from_unix(1_000_000));
        let client = Arc::new(Client::new(Arc::new(InMemory::new()), NOTE, 1));
        let uses = Uses::new(Level::G4, client, Layout::new(""), Writer::new(), clock.clone());
        assert_eq!(uses.news(), None);
        uses.used(object(1));
        assert!(uses.news().is_some());
        clock.set(Date::from_unix(1_000_000).after(NOTE / 2));
        uses.used(object(1));
        assert_eq!(uses.news(), None, "nearly the same");
        let later = Date::from_unix(1_000_000).after(NOTE);
        clock.set(later);
        (0..MOST as u64).for_each(|number| uses.used(object(number + 2)));
        let noted = decode(uses.reader, &uses.news().unwrap()).unwrap();
        assert_eq!(noted.len(), MOST);
        assert!(noted.iter().all(|(used, date)| *used != object(1) && *date == later));
    }
}
