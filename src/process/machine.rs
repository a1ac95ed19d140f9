//! Resources of the machine, read at the start: memory, disk space, threads, and the limit of open files.

use anyhow::bail;
use kvbm::permissions;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::fs::Metadata;
use std::num::NonZero;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

/// Resources at the time of the call.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine {
    /// Bytes of memory available without swapping, within the limits of the control groups; `None` if the system does
    /// not report it.
    pub memory: Option<u64>,
    /// Hardware threads that the process may use.
    pub threads: usize,
}

impl Machine {
    /// Reads the resources from the system.
    pub fn detect() -> Self {
        let memory = [available(), container()].into_iter().flatten().min();
        Self { memory, threads: std::thread::available_parallelism().map_or(1, NonZero::get) }
    }

    /// The resources once this process has ended: its memory is available then.
    pub fn after_restart() -> Self {
        let machine = Self::detect();
        let resident = resident().unwrap_or_default();
        Self { memory: machine.memory.map(|available| available.saturating_add(resident)), ..machine }
    }
}

/// A number that all processes on this machine read, also in containers, until it is started again; `None` if the
/// system does not report one.
pub fn boot_id() -> Option<u64> {
    let id = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").ok()?;
    let digits: String = id.chars().filter(char::is_ascii_hexdigit).take(16).collect();
    u64::from_str_radix(&digits, 16).ok()
}

/// Space on a disk, in bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Available to this process.
    pub free: u64,
    /// Size of the disk.
    pub total: u64,
    /// Taken by the files of the folder.
    pub taken: u64,
}

/// The space on the disk of a folder. The folder may be missing. Zero if the system does not report it.
pub fn space(folder: &Path) -> Space {
    let disk = folder.ancestors().find_map(|folder| {
        // The ancestor of a relative path is the working directory.
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        rustix::fs::statvfs(folder).ok()
    });
    let space = |disk: rustix::fs::StatVfs| Space {
        free: disk.f_bavail.saturating_mul(disk.f_frsize),
        total: disk.f_blocks.saturating_mul(disk.f_frsize),
        taken: taken(folder),
    };
    disk.map(space).unwrap_or_default()
}

/// Whether a folder is in a file system that shows the state of the kernel, like `/proc`: no file can be created there,
/// whatever the rights of the user are.
#[cfg(target_os = "linux")]
pub fn is_of_kernel(folder: &Path) -> bool {
    let disk = rustix::fs::statfs(folder);
    // The number is Linux's `SYSFS_MAGIC`, which rustix does not name.
    disk.is_ok_and(|disk| disk.f_type == rustix::fs::PROC_SUPER_MAGIC || disk.f_type == 0x6265_6572)
}

/// Other systems have no such folders.
#[cfg(not(target_os = "linux"))]
pub fn is_of_kernel(_folder: &Path) -> bool {
    false
}

/// The existing folder in which `folder` would be created, if it is [of the kernel](is_of_kernel).
pub fn kernel_folder(folder: &Path) -> Option<&Path> {
    folder.ancestors().find(|folder| folder.exists()).filter(|folder| is_of_kernel(folder))
}

/// Bytes that the files of a folder take on its disk. Zero if the folder cannot be read.
fn taken(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder).into_iter().flatten().filter_map(|entry| entry.ok()?.metadata().ok());
    files.filter(Metadata::is_file).map(|file| file.blocks() * 512).sum()
}

/// The limit of open files of this process; `None` if there is no limit.
pub fn open_files() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// The limit up to which [`raise_open_files`] raises it; `None` if there is no limit.
pub fn max_open_files() -> Option<u64> {
    getrlimit(Resource::Nofile).maximum
}

/// The limit of the address space of this process in bytes (`ulimit -v`); `None` if there is no limit.
pub fn address_space() -> Option<u64> {
    getrlimit(Resource::As).current
}

/// Smallest limit of the address space that a process can run with. It has some tens of threads. For each the system
/// library reserves 2 MiB for the stack and up to 64 MiB for allocations, whose failure aborts the process. The index
/// of the router, the program and its libraries take 150 MiB.
const MIN_ADDRESSES: u64 = 512 << 20;

/// Refuses a limit of the address space that is too low for any configuration.
pub fn check_address_space() -> anyhow::Result<()> {
    check_addresses(address_space())
}

/// Addresses of a thread that computes much at once: its stack, its heap, and as much again for what it allocates.
const ADDRESSES_OF_THREAD: u64 = 128 << 20;

/// The most threads that compute at once for which the limit of the address space has room.
pub fn threads_within_addresses() -> NonZero<usize> {
    threads_within(address_space())
}

fn threads_within(limit: Option<u64>) -> NonZero<usize> {
    // Half of the smallest limit is for the rest of the process.
    let fit = limit.map_or(u64::MAX, |limit| limit.saturating_sub(MIN_ADDRESSES / 2) / ADDRESSES_OF_THREAD);
    usize::try_from(fit).ok().map_or(NonZero::<usize>::MAX, |fit| NonZero::new(fit).unwrap_or(NonZero::<usize>::MIN))
}

fn check_addresses(limit: Option<u64>) -> anyhow::Result<()> {
    if let Some(limit) = limit.filter(|limit| *limit < MIN_ADDRESSES) {
        bail!(
            "the address space of this process is limited to {limit} bytes, and at least {MIN_ADDRESSES} are reserved \
             for threads and the index; raise the limit (RLIMIT_AS: ulimit -v unlimited, LimitAS=infinity in systemd)"
        );
    }
    Ok(())
}

/// Raises the soft limit of open files to the hard limit. Shells commonly set 1,024, and each connection takes one.
pub fn raise_open_files() {
    let limit = getrlimit(Resource::Nofile);
    if limit.current == limit.maximum {
        return;
    }
    match setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit }) {
        Ok(()) => tracing::debug!(before = limit.current, now = limit.maximum, "raised the limit of open files"),
        Err(error) => tracing::warn!(%error, limit = limit.current, "cannot raise the limit of open files"),
    }
}

/// Sets the umask so that only the owner can read files that this process creates. If one of `folders` is [shared with
/// its group](permissions::is_group_shared), the umask allows the group too; files outside of such folders are created
/// with explicit modes.
pub fn limit_umask<'a>(mut folders: impl Iterator<Item = &'a Path>) {
    let group = if folders.any(permissions::is_group_shared) { Mode::empty() } else { Mode::RWXG };
    rustix::process::umask(group | Mode::RWXO);
}

/// `MemAvailable` of Linux.
fn available() -> Option<u64> {
    field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:").map(|kib| kib * 1024)
}

/// The least memory that the control groups (version 2) of this process have left. In a container `/proc/meminfo` shows
/// the host.
fn container() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    root.join(own).ancestors().take_while(|group| group.starts_with(root)).filter_map(left).min()
}

/// Memory that one group has left. Inactive page cache can be dropped, so it does not count as used.
fn left(group: &Path) -> Option<u64> {
    let read = |name| std::fs::read_to_string(group.join(name)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let droppable = field(&read("memory.stat")?, "inactive_file").unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(droppable)))
}

/// Resident memory of this process.
fn resident() -> Option<u64> {
    field(&std::fs::read_to_string("/proc/self/status").ok()?, "VmRSS:").map(|kib| kib * 1024)
}

/// The number after a word at the start of a line.
fn field(text: &str, word: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(word)?.split_whitespace().next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_disk_and_threads_are_detected() {
        let machine = Machine::detect();
        assert!(machine.threads >= 1 && space(Path::new("not/there/yet")).free > 0);
        assert!(!cfg!(target_os = "linux") || machine.memory.is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn a_folder_below_proc_is_of_the_kernel() {
        assert_eq!(kernel_folder(Path::new("/proc/blockyard/g3")), Some(Path::new("/proc")));
        let disk = tempfile::tempdir().unwrap();
        assert_eq!(kernel_folder(&disk.path().join("not/there/yet")), None);
    }

    #[test]
    fn the_limit_of_open_files_is_raised_to_the_hard_one() {
        raise_open_files();
        assert_eq!(open_files(), max_open_files());
    }

    #[test]
    fn inactive_page_cache_does_not_count_as_used() {
        let group = tempfile::tempdir().unwrap();
        let write = |name, text| std::fs::write(group.path().join(name), text).unwrap();
        write("memory.current", "700\n");
        write("memory.stat", "anon 500\ninactive_file 150\n");
        write("memory.max", "max\n");
        assert_eq!(left(group.path()), None, "no limit");
        write("memory.max", "1000\n");
        assert_eq!(left(group.path()), Some(450));
    }
}
