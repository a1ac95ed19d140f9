//! One file of the log: open for writing, or sealed with a footer.
//!
//! ```text
//!   create ──▶ Head (open: records, no footer) ─drop─▶ sealed (records, footer) ─reclaim─▶ deleted
//!                     └── process dies ──▶ recover: scan, truncate, seal ──▲
//! ```
//!
//! A deleted segment may leave its space behind as a *spare* file, which the next segment zeroes and reuses. A full
//! log writes 1.5 times as fast in reused space as in space that the filesystem and the device have to allocate.

use super::direct::{self, Access, BufferPool};
use super::file_io::FileIo;
use super::footer::RecordList;
use super::lock;
use super::record::{ParsedRecord, Record};
use crate::permissions;
use crate::transform::crypt::MetadataKeys;
use parking_lot::{Mutex, MutexGuard};
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// State of a segment while it exists.
pub(super) struct Segment {
    number: u32,
    /// Quota group of the segment.
    group: u16,
    record_list: Mutex<RecordList>,
    bytes: AtomicU64,
    sealed: AtomicBool,
    /// The segment is a victim: it is still read, but its bytes no longer count.
    reclaiming: AtomicBool,
    /// Bytes of all segments of the log.
    used_bytes: Arc<AtomicU64>,
}

impl Segment {
    pub(super) fn new(
        (number, group): (u32, u16),
        record_list: RecordList,
        bytes: u64,
        sealed: bool,
        used_bytes: &Arc<AtomicU64>,
    ) -> Arc<Self> {
        used_bytes.fetch_add(bytes, Ordering::Relaxed);
        let (record_list, sealed, reclaiming) =
            (Mutex::new(record_list), AtomicBool::new(sealed), AtomicBool::new(false));
        Arc::new(Self {
            number,
            group,
            record_list,
            bytes: AtomicU64::new(bytes),
            sealed,
            reclaiming,
            used_bytes: used_bytes.clone(),
        })
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn group(&self) -> u16 {
        self.group
    }

    /// Sets the group, before the segment is shared.
    pub(super) fn set_group(self: &mut Arc<Self>, group: u16) {
        Arc::get_mut(self).expect("there is no other reference to the segment").group = group;
    }

    /// Length of the file in bytes; zero once it is deleted.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Whether no thread writes to the segment any more.
    pub(super) fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    /// Whether the segment is being reclaimed.
    pub(super) fn is_reclaiming(&self) -> bool {
        self.reclaiming.load(Ordering::Relaxed)
    }

    /// Marks the segment as a victim.
    pub(super) fn start_reclaiming(&self) {
        self.reclaiming.store(true, Ordering::Relaxed);
    }

    /// Whether the file is deleted.
    pub(super) fn is_deleted(&self) -> bool {
        self.is_sealed() && self.bytes() == 0
    }

    pub(super) fn record_list(&self) -> MutexGuard<'_, RecordList> {
        // Only pushes happen under this lock.
        self.record_list.lock()
    }

    pub(super) fn resize(&self, bytes: u64) {
        self.used_bytes.fetch_add(bytes, Ordering::Relaxed);
        self.used_bytes.fetch_sub(self.bytes.swap(bytes, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.used_bytes.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

/// Path of a segment's file.
pub(super) fn path(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("{number:010}.segment"))
}

/// Path of the spare file: a deleted segment whose space the next one reuses.
fn spare(folder: &Path) -> PathBuf {
    folder.join("spare")
}

/// Deletes a segment, or makes it the spare.
pub(super) fn delete_keeping_spare(io: &FileIo, folder: &Path, number: u32) -> io::Result<()> {
    let (path, spare) = (path(folder, number), spare(folder));
    // One spare suffices, because each new segment takes it before the next one is deleted.
    if io.query(|| spare.try_exists())? { io.remove(&path) } else { io.rename(&path, &spare) }
}

/// Deletes the spare. Returns false when there is none.
pub(super) fn delete_spare(io: &FileIo, folder: &Path) -> bool {
    io.remove(&spare(folder)).is_ok()
}

/// Bytes that the spare takes on the disk; 0 when there is none.
pub(super) fn spare_bytes(io: &FileIo, folder: &Path) -> u64 {
    /// The unit of `st_blocks`.
    const UNIT: u64 = 512;
    io.query(|| spare(folder).symlink_metadata()).map_or(0, |found| found.blocks() * UNIT)
}

/// Deletes the spare if it is larger than a new segment.
pub(super) fn delete_large_spare(io: &FileIo, folder: &Path, segment_bytes: u64) {
    let length = io.query(|| spare(folder).symlink_metadata()).map_or(0, |found| found.len());
    if length > segment_bytes {
        delete_spare(io, folder);
    }
}

/// Turns the spare into an empty segment. It is renamed only after its old content was zeroed.
fn reuse(io: &FileIo, folder: &Path, path: &Path, bytes: u64, access: Access) -> io::Result<File> {
    let spare = spare(folder);
    let regular = io.query(|| spare.symlink_metadata())?.is_file();
    if !regular {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let file = io.query(|| access.open(&spare, OpenOptions::new().write(true)))?;
    permissions::restrict_file(&file, &spare)?;
    io.mutate(|| direct::clear(&file, bytes))?;
    io.rename(&spare, path)?;
    Ok(file)
}

/// Numbers of the segments in a folder, oldest first.
pub(super) fn numbers(folder: &Path) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for file in fs::read_dir(folder)? {
        let name = file?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.strip_suffix(".segment")?.parse::<u32>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Restricts the modes of segments and the spare, which an earlier version may have left readable for other users.
pub(super) fn restrict_modes(folder: &Path, numbers: &[u32]) {
    for number in numbers {
        permissions::restrict_path(&path(folder, *number));
    }
    permissions::restrict_path(&spare(folder));
}

/// Whether a file name in the folder belongs to the log.
pub(super) fn is_ours(name: &OsStr) -> bool {
    let name = name.to_str().unwrap_or_default();
    matches!(name, "owner" | "spare") || name.starts_with("probe.") || name.ends_with(".segment")
}

/// A segment that is being written. Dropping the last reference seals the segment.
pub(super) struct Head {
    file: File,
    path: PathBuf,
    access: Access,
    io: Arc<FileIo>,
    /// Keys that authenticate the footer, if any.
    keys: Option<Arc<MetadataKeys>>,
    segment: Arc<Segment>,
}

impl Head {
    /// Creates a segment with all its space reserved.
    pub(super) fn create(
        folder: &Path,
        (number, group): (u32, u16),
        bytes: u64,
        access: Access,
        io: &Arc<FileIo>,
        keys: Option<Arc<MetadataKeys>>,
        used_bytes: &Arc<AtomicU64>,
    ) -> io::Result<Self> {
        let path = path(folder, number);
        let file = if let Ok(file) = reuse(io, folder, &path, bytes, access) {
            file
        } else {
            // There is no spare, or the filesystem cannot zero it.
            delete_spare(io, folder);
            let file =
                io.mutate(|| access.open(&path, permissions::private_file_options().write(true).create_new(true)))?;
            if let Err(error) = io.mutate(|| direct::reserve(&file, bytes)) {
                let _ = io.remove(&path);
                return Err(error);
            }
            file
        };
        let segment = Segment::new((number, group), RecordList::default(), bytes, false, used_bytes);
        Ok(Self { file, path, access, io: io.clone(), keys, segment })
    }

    pub(super) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Writes records from byte `at` on, in one write, and adds them to the record list. `at` is a multiple of
    /// [`Access::BLOCK`]. Returns the offset of each record.
    pub(super) fn write(&self, at: u64, records: &[Record<'_>], pool: &BufferPool) -> io::Result<Vec<u64>> {
        self.put(at, records, pool)?;
        let mut end = at;
        let mut offsets = Vec::with_capacity(records.len());
        let mut record_list = self.segment.record_list();
        for record in records {
            let found = match record {
                Record::Block(block) => ParsedRecord::Block(block.header),
                Record::Tombstone(fingerprint, hash) => ParsedRecord::Tombstone(*fingerprint, *hash),
            };
            record_list.push(&found, end);
            offsets.push(end);
            end += self.span(record) as u64;
        }
        Ok(offsets)
    }

    /// Writes records, and zeros up to a whole block. The records are copied to one buffer in huge pages, so that the
    /// device gets one request instead of several.
    fn put(&self, at: u64, records: &[Record<'_>], pool: &BufferPool) -> io::Result<()> {
        let total = records.iter().map(|record| self.span(record)).sum::<usize>();
        let total = total.next_multiple_of(Access::BLOCK as usize);
        let mut buffer = pool.take(total);
        let mut end = 0;
        for record in records {
            let start = end;
            end += self.span(record);
            record.encode(&mut buffer[start..end]);
        }
        buffer[end..total].fill(0);
        self.io.write_all(&self.file, &buffer[..total], at)
    }

    fn span(&self, record: &Record<'_>) -> usize {
        record.span(self.access.alignment()) as usize
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        let mut record_list = self.segment.record_list();
        if record_list.len() == 0 {
            // No record could be written, or none was to be kept.
            if lock::is_same_file(&self.file, &self.path) {
                let _ =
                    delete_keeping_spare(&self.io, self.path.parent().unwrap_or(Path::new("")), self.segment.number);
            }
            self.segment.resize(0);
        } else {
            match seal(&self.io, &self.file, &mut record_list, self.segment.number, self.keys.as_deref()) {
                Ok(bytes) => self.segment.resize(bytes),
                Err(error) => {
                    // The next recovery scans a segment without a footer. The space behind the records is freed.
                    tracing::warn!(segment = %self.path.display(), %error, "cannot seal a segment");
                    let end = record_list.end().next_multiple_of(Access::BLOCK);
                    if self.io.set_len(&self.file, end).is_ok() {
                        self.segment.resize(end);
                    }
                }
            }
        }
        self.segment.sealed.store(true, Ordering::Release);
    }
}

/// Writes the footer of segment `number`, truncates the file behind it, and returns the length of the file.
pub(super) fn seal(
    io: &FileIo,
    file: &File,
    record_list: &mut RecordList,
    number: u32,
    keys: Option<&MetadataKeys>,
) -> io::Result<u64> {
    record_list.sort();
    let at = record_list.end().next_multiple_of(Access::BLOCK);
    let footer = record_list.encode(at, number, keys);
    io.write_all(file, &footer, at)?;
    let length = at + footer.len() as u64;
    io.set_len(file, length)?;
    Ok(length)
}
