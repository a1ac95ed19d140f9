//! Files past the page cache: aligned memory, `O_DIRECT`, scattered reads, reserved and free space.
//!
//! The only file of the disk tier with `unsafe`. Buffered writes were six times slower than direct ones where this was
//! measured; a filesystem that refuses direct access (tmpfs) is used through the page cache, with the same layout.

use std::alloc::{self, Layout};
use std::fs::{self, File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::ops::{Deref, DerefMut};
use std::os::fd::AsRawFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::ptr::NonNull;

/// What every device in use is content with for memory.
const ALIGN: usize = 4096;
/// Vectors that one call takes, by POSIX on Linux.
const VECTORS: libc::c_int = 1024;

/// Zeroed memory at an address that direct access takes.
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
        let layout = Layout::from_size_align(bytes.max(1), ALIGN).expect("a buffer fits into memory");
        // SAFETY: the layout has a size above zero.
        let at = unsafe { alloc::alloc_zeroed(layout) };
        let Some(at) = NonNull::new(at) else { alloc::handle_alloc_error(layout) };
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

impl AsRef<[u8]> for Buffer {
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

    /// Finds out by trying.
    pub(super) fn probe(folder: &Path) -> io::Result<Self> {
        let path = folder.join("probe");
        let direct = |grain: u64| {
            let file = Self::Direct { grain }.open(&path, OpenOptions::new().write(true).create(true))?;
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

/// Fills `parts` one after the other from `offset` on; less only at the end of the file. Returns the bytes read.
pub(super) fn read_scattered(file: &File, mut offset: u64, parts: &mut [IoSliceMut<'_>]) -> io::Result<usize> {
    let mut left = parts;
    let mut total = 0;
    while !left.is_empty() {
        let count = left.len().try_into().unwrap_or(VECTORS).min(VECTORS);
        // SAFETY: `IoSliceMut` has the layout of `iovec`; the vectors stay borrowed, exclusively, during the call.
        let read = unsafe { libc::preadv(file.as_raw_fd(), left.as_mut_ptr().cast(), count, offset.cast_signed()) };
        match read {
            0 => break,
            1.. => {
                total += read as usize;
                offset += read as u64;
                IoSliceMut::advance_slices(&mut left, read as usize);
            }
            _ => {
                let error = io::Error::last_os_error();
                if error.kind() != io::ErrorKind::Interrupted {
                    return Err(error);
                }
            }
        }
    }
    Ok(total)
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
            let (mut gap, mut rest) = (Buffer::zeroed(grain), Buffer::zeroed(2 * grain));
            let mut parts = [IoSliceMut::new(&mut gap), IoSliceMut::new(&mut rest)];
            assert_eq!(read_scattered(&file, 2 * grain as u64, &mut parts).unwrap(), 3 * grain);
            assert_eq!([&gap[..], &rest[..]].concat(), written[..]);
        }
    }

    #[test]
    fn a_read_over_the_end_of_the_file_is_short() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        fs::write(&path, [7; 700]).unwrap();
        let mut buffer = Buffer::zeroed(1024);
        let read = read_scattered(&File::open(&path).unwrap(), 512, &mut [IoSliceMut::new(&mut buffer)]).unwrap();
        assert_eq!((read, &buffer[..188]), (188, &[7; 188][..]));
    }

    #[test]
    fn more_parts_than_one_call_takes_are_all_filled() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..3000).map(|i| (i % 251) as u8).collect();
        fs::write(&path, &bytes).unwrap();
        let mut into = vec![0; 3000];
        let mut parts: Vec<_> = into.chunks_mut(1).map(IoSliceMut::new).collect();
        assert_eq!(read_scattered(&File::open(&path).unwrap(), 0, &mut parts).unwrap(), 3000);
        assert_eq!(into, bytes);
    }
}
