//! Direct file access: aligned memory, `O_DIRECT`, reserving space and querying free space.
//!
//! This is the only file of the disk tier with `unsafe`. Buffered writes were six times slower than direct ones in
//! measurements. A filesystem that rejects direct access (tmpfs) is used through the page cache, with the same
//! layout.

use crate::permissions;
use crate::table::hugepages::{HUGE_PAGE, advise_hugepages};
use parking_lot::{Mutex, MutexGuard};
use std::alloc::{self, Layout};
use std::fs::{self, File, OpenOptions};
use std::io;
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::ptr::NonNull;
use std::sync::Arc;

/// An alignment of buffers that all common devices accept.
const BUFFER_ALIGN: usize = 4096;

/// Memory that is aligned for direct access, in huge pages where it is large enough and they are available. An I/O
/// request lists every physically contiguous range of the buffer, and the list is limited to some hundred, so a write
/// from small pages is split into requests of one megabyte; that took twice as long in measurements.
pub(super) struct Buffer {
    at: NonNull<u8>,
    layout: Layout,
}

// SAFETY: a buffer owns its memory exclusively, like a `Box<[u8]>`.
unsafe impl Send for Buffer {}
// SAFETY: shared access only reads.
unsafe impl Sync for Buffer {}

impl Buffer {
    pub(super) fn zeroed(bytes: usize) -> Self {
        let align = if bytes < HUGE_PAGE { BUFFER_ALIGN } else { HUGE_PAGE };
        let layout = Layout::from_size_align(bytes.max(1), align).expect("a buffer fits into memory");
        // SAFETY: the layout has a size above zero.
        let at = unsafe { alloc::alloc(layout) };
        let Some(at) = NonNull::new(at) else { alloc::handle_alloc_error(layout) };
        advise_hugepages(NonNull::slice_from_raw_parts(at, layout.size()).as_ptr().cast_const());
        // SAFETY: the allocation has this many bytes, and no other reference to it exists.
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

/// A pool of reusable buffers. Fresh memory costs a page fault and zeroing per page, which is significant at the
/// speed of a device.
#[derive(Clone, Default)]
pub(super) struct BufferPool(Arc<Mutex<Vec<Buffer>>>);

impl BufferPool {
    /// Buffer lengths are multiples of this, so that a buffer fits later requests.
    const SIZE_STEP: usize = 1 << 20;
    /// Maximum number of free buffers: as many as the readers and writers of one path use at once.
    const MAX_FREE_BUFFERS: usize = 24;

    /// A buffer of at least `bytes`, with arbitrary content.
    pub(super) fn take(&self, bytes: usize) -> PooledBuffer {
        let wanted = bytes.next_multiple_of(Self::SIZE_STEP).max(Self::SIZE_STEP);
        let found = {
            let mut free = self.lock();
            let fits = free.iter().position(|buffer| buffer.len() == wanted);
            fits.map(|at| free.swap_remove(at))
        };
        let buffer = found.unwrap_or_else(|| Buffer::zeroed(wanted));
        PooledBuffer { pool: self.clone(), buffer: Some(buffer) }
    }

    fn lock(&self) -> MutexGuard<'_, Vec<Buffer>> {
        // Only a push or a removal happens under this lock.
        self.0.lock()
    }
}

/// A buffer that returns to the pool when dropped.
pub(super) struct PooledBuffer {
    pool: BufferPool,
    /// `Some` until the drop.
    buffer: Option<Buffer>,
}

impl Drop for PooledBuffer {
    fn drop(&mut self) {
        let mut free = self.pool.lock();
        if free.len() >= BufferPool::MAX_FREE_BUFFERS {
            // Replaces a free buffer, because the size in use now is likely to be needed again.
            free.swap_remove(0);
        }
        free.extend(self.buffer.take());
    }
}

impl Deref for PooledBuffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.buffer.as_ref().expect("the buffer is present until the drop")
    }
}

impl DerefMut for PooledBuffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        self.buffer.as_mut().expect("the buffer is present until the drop")
    }
}

impl AsRef<[u8]> for PooledBuffer {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// How the files of a folder are read and written.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Access {
    /// Bypasses the page cache. Offsets and lengths are multiples of `alignment`, in bytes.
    Direct { alignment: u64 },
    /// Uses the page cache.
    Buffered,
}

impl Access {
    /// The smallest alignment in bytes, and the unit of stored offsets.
    pub(super) const UNIT: u64 = 512;

    /// Writes start and end at multiples of this, in bytes, whatever the alignment: a block of the filesystem and the
    /// device. A device has to read a block that is overwritten in part; and ext4 locks the whole file for a partial
    /// write to reserved space, which would serialize the writers.
    pub(super) const BLOCK: u64 = 4096;

    /// Determines by trial how a folder can be accessed.
    pub(super) fn probe(folder: &Path) -> io::Result<Self> {
        let path = unused(folder)?;
        let direct = |alignment: u64| {
            let file =
                Self::Direct { alignment }.open(&path, permissions::private_file_options().write(true).create(true))?;
            file.write_all_at(&Buffer::zeroed(alignment as usize), alignment)
        };
        let refused = |error: &io::Error| matches!(error.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP));
        let mut access = Self::Buffered;
        for alignment in [Self::UNIT, BUFFER_ALIGN as u64] {
            match direct(alignment) {
                Ok(()) => {
                    access = Self::Direct { alignment };
                    break;
                }
                Err(error) if refused(&error) => {}
                // A full disk does not show which access works; the log starts, and stores wait for space.
                Err(error) if error.kind() == io::ErrorKind::StorageFull => {
                    access = Self::Direct { alignment: BUFFER_ALIGN as u64 }
                }
                Err(error) => return Err(error),
            }
        }
        let _ = fs::remove_file(&path);
        Ok(access)
    }

    /// The alignment of offsets and lengths in bytes.
    pub(super) fn alignment(self) -> u64 {
        match self {
            Self::Direct { alignment } => alignment,
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

/// A path for a temporary file: unused, or left by a process that died.
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

/// Fills `into` from `offset` on and returns the number of bytes read, which is smaller only at the end of the file.
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

/// Offset of the next data at or after `at`, or the end of the file; the bytes before it are zeros. Fails when the
/// filesystem does not support it.
pub(super) fn next_data(file: &File, at: u64) -> io::Result<u64> {
    #[cfg(target_os = "linux")]
    {
        // SAFETY: plain call on a descriptor that `file` keeps open; no other code here uses the file's own position.
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

/// Reserves the space of a whole file, so that a full disk is detected here and not during a write.
pub(super) fn reserve(file: &File, bytes: u64) -> io::Result<()> {
    #[cfg(target_os = "linux")]
    // SAFETY: plain call on a descriptor that `file` keeps open.
    if unsafe { libc::fallocate(file.as_raw_fd(), 0, 0, bytes.cast_signed()) } != 0 {
        let error = io::Error::last_os_error();
        // On a filesystem without reservation, writes allocate the space.
        if error.raw_os_error() != Some(libc::EOPNOTSUPP) {
            return Err(error);
        }
    }
    Ok(())
}

/// Zeroes a file and sets its length, reusing its space, so that neither the filesystem nor the device has to
/// allocate again.
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

/// One part in 64 of the free space is left to the filesystem, which needs some for its own structures.
const METADATA_DIVISOR: u64 = 64;

/// The part of the free bytes that one file can take.
pub(super) fn usable(free: u64) -> u64 {
    free - free / METADATA_DIVISOR
}

/// Bytes of free space that the filesystem of a folder grants to this user.
pub(super) fn free_bytes(folder: &Path) -> io::Result<u64> {
    let path = std::ffi::CString::new(folder.as_os_str().as_bytes())?;
    let mut answer = std::mem::MaybeUninit::<libc::statvfs>::uninit();
    // SAFETY: `path` is a C string, and `answer` has room for the result.
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
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0, "the probe file is deleted");
        let alignment = access.alignment() as usize;
        let mut written = Buffer::zeroed(3 * alignment);
        written.iter_mut().enumerate().for_each(|(i, byte)| *byte = (i / 7) as u8);
        let path = folder.path().join("file");
        let file = access.open(&path, OpenOptions::new().write(true).create(true)).unwrap();
        reserve(&file, 10 * alignment as u64).unwrap();
        file.write_all_at(&written, 2 * alignment as u64).unwrap();

        for access in [access, Access::Buffered] {
            let file = access.open(&path, OpenOptions::new().read(true)).unwrap();
            let mut found = Buffer::zeroed(3 * alignment);
            assert_eq!(read(&file, 2 * alignment as u64, &mut found).unwrap(), 3 * alignment);
            assert_eq!(found[..], written[..]);
        }
    }

    #[test]
    fn a_read_beyond_the_end_of_the_file_is_short() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, [7; 700]).unwrap();
        let mut buffer = Buffer::zeroed(1024);
        let read = read(&File::open(&path).unwrap(), 512, &mut buffer).unwrap();
        assert_eq!((read, &buffer[..188]), (188, &[7; 188][..]));
    }
}
