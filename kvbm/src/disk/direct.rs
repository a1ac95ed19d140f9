//! Files past the page cache: aligned memory, `O_DIRECT`, reserved and free space.
//!
//! The only file of the disk tier with `unsafe`. Buffered writes were six times slower than direct ones where this was
//! measured; a filesystem that refuses direct access (tmpfs) is used through the page cache, with the same layout.

use crate::permissions;
use crate::table::hugepages::{LARGE, enlarge};
use std::alloc::{self, Layout};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What every device in use is content with for memory.
const ALIGN: usize = 4096;

/// Memory at an address that direct access takes. In large pages where it is large enough and they are had: a request to a
/// device names each stretch of memory that lies together, and may name some hundred, so that one over small pages is
/// broken up into requests of a megabyte, which took twice as long where this was measured.
pub(super) struct Buffer {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a buffer owns its memory alone, like a `Box<[u8]>`.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(super) fn zeroed(bytes: usize) -> Self {
        let align = if bytes < LARGE { ALIGN } else { LARGE };
        let layout = Layout::from_size_align(bytes.max(1), align).expect("a buffer fits into memory");
        // SAFETY: the layout has a size above zero.
        let at = unsafe { alloc::alloc(layout) };
        let Some(at) = NonNull::new(at) else { alloc::handle_alloc_error(layout) };
        enlarge(NonNull::slice_from_raw_parts(at, layout.size()).as_ptr().cast_const());
        // SAFETY: so many bytes were allocated, and nobody else knows of them.
        unsafe { at.write_bytes(0, layout.size()) };
        Self { at, layout }
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        // SAFETY: allocated in `zeroed` with this layout, freed only here.
        unsafe { alloc::dealloc(self.at.as_ptr(), self.layout) }
    }
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `size` bytes are allocated and were zeroed, and live as long as `self`.
        unsafe { std::slice::from_raw_parts(self.at.as_ptr(), self.layout.size()) }
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and `&mut self` makes the access exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.at.as_ptr(), self.layout.size()) }
    }
}

/// Buffers that are used again: fresh memory costs a fault and zeros for every page, which at the speed of a device is time
/// that counts.
#[derive(Clone, Default)]
pub(super) struct Pool(Arc<Mutex<Vec<Buffer>>>);

impl Pool {
    /// Buffers are as long as a multiple of this, so that they fit others.
    const STEP: usize = 1 << 20;
    /// Free buffers that are kept: what the readers and writers of one path have under way at once, and what they brought
    /// is looked at.
    const KEPT: usize = 24;

    /// At least `bytes`, with anything in them.
    pub(super) fn take(&self, bytes: usize) -> Pooled {
        let wanted = bytes.next_multiple_of(Self::STEP).max(Self::STEP);
        let found = {
            let mut free = self.lock();
            let fits = free.iter().position(|buffer| buffer.len() == wanted);
            fits.map(|at| free.swap_remove(at))
        };
        let buffer = found.unwrap_or_else(|| Buffer::zeroed(wanted));
        Pooled { pool: self.clone(), buffer: Some(buffer) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        // A push or a removal is all that happens under this lock.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A buffer that goes back when it is dropped.
pub(super) struct Pooled {
    pool: Pool,
    /// There until the drop.
    buffer: Option<Buffer>,
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let mut free = self.pool.lock();
        if free.len() >= Pool::KEPT {
            // Of the sizes that are used now some come again.
            free.swap_remove(0);
        }
        free.extend(self.buffer.take());
    }
}

impl Deref for Pooled {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_ref().expect("there until the drop")
    }
}

impl DerefMut for Pooled {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().expect("there until the drop")
    }
}

impl AsRef<[u8]> for Pooled {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// How the files of a folder are read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    /// Past the page cache; offsets and lengths are multiples of `grain`.
    Direct { grain: u64 },
    /// Through the page cache.
    Buffered,
}

impl Access {
    /// The smallest grain, which offsets are counted in whatever the device wants.
    pub(super) const UNIT: u64 = 512;

    /// What a write begins and ends at, whatever the grain: a block of the filesystem and of the device. One that covers a
    /// block in part makes the device read it first; and in space that is reserved and not written yet, ext4 lets nobody
    /// else write to the file until it is done, so that two writers would take turns.
    pub(super) const BLOCK: u64 = 4096;

    /// Finds out by trying.
    pub(super) fn probe(folder: &Path) -> io::Result<Self> {
        let path = unused(folder)?;
        let direct = |grain: u64| {
            let file = Self::Direct { grain }.open(&path, permissions::private().write(true).create(true))?;
            file.write_all_at(&Buffer::zeroed(grain as usize), grain)
        };
        let refused = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP));
        let mut access = Self::Buffered;
        for grain in [Self::UNIT, ALIGN as u64] {
            match direct(grain) {
                Ok(()) => {
                    access = Self::Direct { grain };
                    break;
                }
                Err(error) if refused(&error) => {}
                // A full disk says nothing about access; the log starts, and stores wait for room.
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    access = Self::Direct { grain: ALIGN as u64 }
                }
                Err(error) => return Err(error),
            }
        }
        let _ = fs::remove_file(&path);
        Ok(access)
    }

    /// What offsets and lengths are multiples of.
    pub(super) fn grain(self) -> u64 {
        match self {
            Self::Direct { grain } => grain,
            Self::Buffered => Self::UNIT,
        }
    }

    pub(super) fn open(self, path: &Path, options: &mut OpenOptions) -> io::Result<File> {
        if let Self::Direct { .. } = self {
            #[cfg(target_os = "linux")]
            options.custom_flags(libc::O_DIRECT);
        }
        options.open(path)
    }
}

/// A path in the folder for a file of a moment: free, or of a process that died before it removed its own.
fn unused(folder: &Path) -> io::Result<PathBuf> {
    const NAMES: u32 = 16;
    for number in 0..NAMES {
        let path = folder.join(format!("probe.{number}"));
        match fs::symlink_metadata(&path) {
            Ok(found) if found.is_file() => return Ok(path),
            Ok(_) => {}
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(path),
            Err(error) => return Err(error),
        }
    }
    Err(io::Error::other(format!("{NAMES} files named `probe.…` already exist")))
}

/// Fills `into` from `offset` on; less only at the end of the file. Returns the bytes read.
pub(super) fn read(file: &File, offset: u64, into: &mut [u8]) -> io::Result<usize> {
    let mut total = 0;
    while total < into.len() {
        match file.read_at(&mut into[total..], offset + total as u64) {
            Ok(0) => break,
            Ok(read) => total += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    Ok(total)
}

/// Where the next byte is that was written, from `at` on; the end of the file where there is none. What lies before it reads as
/// zeros. An error where the filesystem does not say.
pub(super) fn next_data(file: &File, at: u64) -> io::Result<u64> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: plain call on a descriptor that `file` keeps open; nothing here reads at the file's own position.
        let found = unsafe { libc::lseek(file.as_raw_fd(), at.cast_signed(), libc::SEEK_DATA) };
        if let Ok(found) = u64::try_from(found) {
            return Ok(found);
        }
        let error = io::Error::last_os_error();
        if error.raw_os_error() == Some(libc::ENXIO) { Ok(file.metadata()?.len()) } else { Err(error) }
    }
    #[cfg(not(target_os = "linux"))]
    Err(io::ErrorKind::Unsupported.into())
}

/// Takes the space of a whole file at once, so that a full disk is met here and not in the middle of a write.
pub(super) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    // SAFETY: plain call on a descriptor that `file` keeps open.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes.cast_signed()) } != 0 {
        let error = io::Error::last_os_error();
        // Some filesystems cannot reserve; then writes take the space as they come.
        if error.raw_os_error() != Some(libc::EOPNOTSUPP) {
            return Err(error);
        }
    }
    Ok(())
}

/// Makes zeros of what a file holds and gives it that length, in the space that it has: what was written there before is
/// gone, but the filesystem and the device need not find room again.
pub(super) fn clear(file: &File, bytes: u64) -> io::Result<()> {
    file.set_len(bytes)?;
    #[cfg(target_os = "linux")]
    // SAFETY: plain call on a descriptor that `file` keeps open.
    return match unsafe { libc::fallocate(file.as_raw_fd(), libc::FALLOC_FL_ZERO_RANGE, 0, bytes.cast_signed()) } {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    #[cfg(not(target_os = "linux"))]
    Err(io::ErrorKind::Unsupported.into())
}

/// What the filesystem of a folder has left for us.
pub(super) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a C string and `answer` has room for what the call writes.
    if unsafe { libc::statvfs(path.as_ptr(), answer.as_mut_ptr()) } != 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call succeeded, so it filled `answer`.
    let answer = unsafe { answer.assume_init() };
    Ok(answer.f_bavail * answer.f_frsize)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn direct_and_buffered_access_agree() {
        let folder = tempfile::tempdir().unwrap();
        let access = Access::probe(folder.path()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "the probe is gone");
        let grain = access.grain() as usize;
        let mut written = Buffer::zeroed(3 * grain);
        written.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7) as u8);
        let path = folder.path().join("file");
        let file = access.open(&path, OpenOptions::new().write(true).create(true)).unwrap();
        reserve(&file, 10 * grain as u64).unwrap();
        file.write_all_at(&written, 2 * grain as u64).unwrap();

        for access in [access, Access::Buffered] {
            let file = access.open(&path, OpenOptions::new().read(true)).unwrap();
            let mut found = Buffer::zeroed(3 * grain);
            assert_eq!(read(&file, 2 * grain as u64, &mut found).unwrap(), 3 * grain);
            assert_eq!(found[..], written[..]);
        }
    }

    #[test]
    fn a_read_over_the_end_of_the_file_is_short() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, [7; 700]).unwrap();
        let mut buffer = Buffer::zeroed(1024);
        let read = read(&File::open(&path).unwrap(), 512, &mut buffer).unwrap();
        assert_eq!((read, &buffer[..188]), (188, &[7; 188][..]));
    }
}
