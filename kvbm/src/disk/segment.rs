//! One file of the log: being written, or sealed with a footer.
//!
//! ```text
//!   create ──▶ Head (open: records, no footer) ──drop──▶ sealed (records, footer) ──remove──▶ gone
//!                     └── process dies ──▶ recover: scan, cut the tail, seal ──▲
//! ```
//!
//! What is gone may leave its space behind as a *spare*, which the next segment takes, cleared: a full log writes half as
//! fast again in space that it has as in space that the filesystem and the device first have to find.

use super::direct::{self, Access, Pool};
use super::file_io::FileIo;
use super::footer::Listing;
use super::lock;
use super::record::{Found, Record};
use crate::permissions;
use crate::transform::crypt::MetadataKeys;
use std::ffi::OsStr;
use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What is known of a segment while it exists.
pub(super) struct Segment {
    number: u32,
    /// Whose blocks it has, as far as domains are told apart.
    group: u16,
    listing: Mutex<Listing>,
    bytes: AtomicU64,
    sealed: AtomicBool,
    /// Chosen to be given up.
    going: AtomicBool,
    /// Bytes of all segments of the log.
    taken: Arc<AtomicU64>,
}

impl Segment {
    pub(super) fn new(
        (number, group): (u32, u16),
        listing: Listing,
        bytes: u64,
        sealed: bool,
        taken: &Arc<AtomicU64>,
    ) -> Arc<Self> {
        taken.fetch_add(bytes, Ordering::Relaxed);
        let (listing, sealed, going) = (Mutex::new(listing), AtomicBool::new(sealed), AtomicBool::new(false));
        Arc::new(Self { number, group, listing, bytes: AtomicU64::new(bytes), sealed, going, taken: taken.clone() })
    }

    pub(super) fn number(&self) -> u32 {
        self.number
    }

    pub(super) fn group(&self) -> u16 {
        self.group
    }

    /// Says whose it is, before anybody else knows of it.
    pub(super) fn give(self: &mut Arc<Self>, group: u16) {
        Arc::get_mut(self).expect("there is no other reference to the segment").group = group;
    }

    /// Bytes that it takes.
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.load(Ordering::Relaxed)
    }

    /// Nobody writes to it any more.
    pub(super) fn is_sealed(&self) -> bool {
        self.sealed.load(Ordering::Acquire)
    }

    /// It is still to be read, and counts no more.
    pub(super) fn is_going(&self) -> bool {
        self.going.load(Ordering::Relaxed)
    }

    /// Chooses it to be given up.
    pub(super) fn go(&self) {
        self.going.store(true, Ordering::Relaxed);
    }

    /// Nothing of it is left.
    pub(super) fn is_gone(&self) -> bool {
        self.is_sealed() && self.bytes() == 0
    }

    pub(super) fn listing(&self) -> MutexGuard<'_, Listing> {
        // Pushes are all that happens under this lock.
        self.listing.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn resize(&self, bytes: u64) {
        self.taken.fetch_add(bytes, Ordering::Relaxed);
        self.taken.fetch_sub(self.bytes.swap(bytes, Ordering::Relaxed), Ordering::Relaxed);
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.taken.fetch_sub(*self.bytes.get_mut(), Ordering::Relaxed);
    }
}

/// The file of a segment.
pub(super) fn path(folder: &Path, number: u32) -> PathBuf {
    folder.join(format!("{number:010}.segment"))
}

/// The file of a segment that is gone, in whose space the next one is written.
fn spare(folder: &Path) -> PathBuf {
    folder.join("spare")
}

/// Removes a segment, all but its space.
pub(super) fn retire(io: &FileIo, folder: &Path, number: u32) -> io::Result<()> {
    let (path, spare) = (path(folder, number), spare(folder));
    // One is enough: each new segment takes it before the next one goes.
    if io.look(|| spare.try_exists())? { io.remove(&path) } else { io.rename(&path, &spare) }
}

/// Gives the space of a spare back. False: there is none.
pub(super) fn give_back(io: &FileIo, folder: &Path) -> bool {
    io.remove(&spare(folder)).is_ok()
}

/// Opens a file. A pipe or a device in its place is an error: opening or reading it could block for ever.
pub(super) fn open_regular(path: &Path, options: &OpenOptions) -> io::Result<File> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    options.open(path)
}

/// The spare as an empty segment. It bears the name of one only once nothing of the old one is left in it.
fn reuse(io: &FileIo, folder: &Path, path: &Path, bytes: u64, access: Access) -> io::Result<File> {
    let spare = spare(folder);
    let regular = io.look(|| spare.symlink_metadata())?.is_file();
    if !regular {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let file = io.look(|| access.open(&spare, OpenOptions::new().write(true)))?;
    permissions::narrow(&file, &spare)?;
    io.change(|| direct::clear(&file, bytes))?;
    io.rename(&spare, path)?;
    Ok(file)
}

/// The segments of a folder, oldest first.
pub(super) fn numbers(folder: &Path) -> io::Result<Vec<u32>> {
    let mut numbers = Vec::new();
    for file in fs::read_dir(folder)? {
        let name = file?.file_name();
        numbers.extend(name.to_str().and_then(|name| name.strip_suffix(".segment")?.parse::<u32>().ok()));
    }
    numbers.sort_unstable();
    Ok(numbers)
}

/// Narrows the segments, and the spare, that an earlier version left readable for other users.
pub(super) fn narrow(folder: &Path, numbers: &[u32]) {
    for number in numbers {
        permissions::narrow_path(&path(folder, *number));
    }
    permissions::narrow_path(&spare(folder));
}

/// Whether an entry of a folder belongs to the log.
pub(super) fn is_ours(name: &OsStr) -> bool {
    let name = name.to_str().unwrap_or_default();
    matches!(name, "owner" | "spare") || name.starts_with("probe.") || name.ends_with(".segment")
}

/// A segment that is being written. Dropping it, by whoever writes last, seals the segment.
pub(super) struct Head {
    file: File,
    path: PathBuf,
    access: Access,
    io: Arc<FileIo>,
    /// What the footer is sealed with, if it is.
    keys: Option<Arc<MetadataKeys>>,
    segment: Arc<Segment>,
}

impl Head {
    /// A new segment with all its space reserved.
    pub(super) fn create(
        folder: &Path,
        (number, group): (u32, u16),
        bytes: u64,
        access: Access,
        io: &Arc<FileIo>,
        keys: Option<Arc<MetadataKeys>>,
        taken: &Arc<AtomicU64>,
    ) -> io::Result<Self> {
        let path = path(folder, number);
        let file = if let Ok(file) = reuse(io, folder, &path, bytes, access) {
            file
        } else {
            // There is none, or the filesystem cannot clear it.
            give_back(io, folder);
            let file = io.change(|| access.open(&path, permissions::private().write(true).create_new(true)))?;
            if let Err(error) = io.change(|| direct::reserve(&file, bytes)) {
                let _ = io.remove(&path);
                return Err(error);
            }
            file
        };
        let segment = Segment::new((number, group), Listing::default(), bytes, false, taken);
        Ok(Self { file, path, access, io: io.clone(), keys, segment })
    }

    pub(super) fn segment(&self) -> &Arc<Segment> {
        &self.segment
    }

    /// Writes records from byte `at` on, which is a multiple of [`Access::BLOCK`], in one go and up to another, and lists
    /// them. Returns the offset of each.
    pub(super) fn write(&self, at: u64, records: &[Record<'_>], pool: &Pool) -> io::Result<Vec<u64>> {
        self.put(at, records, pool)?;
        let mut end = at;
        let mut offsets = Vec::with_capacity(records.len());
        let mut listing = self.segment.listing();
        for record in records {
            let found = match record {
                Record::Block(block) => Found::Block(block.header),
                Record::Gone(fingerprint, name) => Found::Gone(*fingerprint, *name),
            };
            listing.push(&found, end);
            offsets.push(end);
            end += self.span(record) as u64;
        }
        Ok(offsets)
    }

    /// Writes records, and zeros up to a whole block. They are copied, because a buffer lies in large pages and in one piece,
    /// which what it is copied from may not: the device is asked once for what would take several requests.
    fn put(&self, at: u64, records: &[Record<'_>], pool: &Pool) -> io::Result<()> {
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
        record.span(self.access.grain()) as usize
    }
}

impl Drop for Head {
    fn drop(&mut self) {
        let mut listing = self.segment.listing();
        if listing.len() == 0 {
            // Nothing could be written to it, or nothing of it was to stay.
            if lock::is_at(&self.file, &self.path) {
                let _ = retire(&self.io, self.path.parent().unwrap_or(Path::new("")), self.segment.number);
            }
            self.segment.resize(0);
        } else {
            match seal(&self.io, &self.file, &mut listing, self.segment.number, self.keys.as_deref()) {
                Ok(bytes) => self.segment.resize(bytes),
                Err(error) => {
                    // Without a footer it is scanned when the log is opened again; what has no records goes back.
                    tracing::warn!(segment = %self.path.display(), %error, "cannot seal a segment");
                    let end = listing.end().next_multiple_of(Access::BLOCK);
                    if self.io.set_len(&self.file, end).is_ok() {
                        self.segment.resize(end);
                    }
                }
            }
        }
        self.segment.sealed.store(true, Ordering::Release);
    }
}

/// Writes the footer of segment `number`, cuts what follows it, and returns the length of the file.
pub(super) fn seal(
    io: &FileIo,
    file: &File,
    listing: &mut Listing,
    number: u32,
    keys: Option<&MetadataKeys>,
) -> io::Result<u64> {
    listing.sort();
    let at = listing.end().next_multiple_of(Access::BLOCK);
    let footer = listing.encode(at, number, keys);
    io.write_all(file, &footer, at)?;
    let length = at + footer.len() as u64;
    io.set_len(file, length)?;
    Ok(length)
}
