//! What the machine has to give: memory, disk, threads. Read at start.

use kvbm::permissions;
use rustix::fs::Mode;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use std::num::NonZero;
use std::path::Path;

/// What the machine had to give when it was asked.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Machine {
    /// Bytes of memory that can be taken without pushing anybody out; `None` where the system does not say.
    pub memory: Option<u64>,
    /// Threads that run at the same time.
    pub threads: usize,
}

impl Machine {
    /// Asks the system.
    pub fn survey() -> Self {
        let memory = [available(), container()].into_iter().flatten().min();
        Self { memory, threads: std::thread::available_parallelism().map_or(1, NonZero::get) }
    }
}

/// Bytes of the disk of a folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    /// Free.
    pub free: u64,
    /// In all.
    pub total: u64,
}

/// The space of the disk of a folder, which need not be there yet; none where the system does not say.
pub fn space(folder: &Path) -> Space {
    let disk = folder.ancestors().find_map(|folder| {
        // The ancestor of a relative path is the working directory.
        let folder = if folder.as_os_str().is_empty() { Path::new(".") } else { folder };
        rustix::fs::statvfs(folder).ok()
    });
    let space = |disk: rustix::fs::StatVfs| Space {
        free: disk.f_bavail.saturating_mul(disk.f_frsize),
        total: disk.f_blocks.saturating_mul(disk.f_frsize),
    };
    disk.map(space).unwrap_or_default()
}

/// How many files this process may have open at the same time; `None` for as many as the system can.
pub fn open_files() -> Option<u64> {
    getrlimit(Resource::Nofile).current
}

/// Raises the limit of open files as far as the system allows. Shells set it to 1,024 for the sake of old programs, each
/// connection is one.
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

/// Has files and folders that this process creates be readable by their owner alone, whatever umask it was started with. Where one
/// of `folders` is [shared with its group](permissions::is_group_shared), its group can read and write new files too; files outside
/// of such folders are created with their own modes.
pub fn limit_umask<'a>(mut folders: impl Iterator<Item = &'a Path>) {
    let group = if folders.any(permissions::is_group_shared) { Mode::empty() } else { Mode::RWXG };
    rustix::process::umask(group | Mode::RWXO);
}

/// `MemAvailable` of Linux.
fn available() -> Option<u64> {
    field(&std::fs::read_to_string("/proc/meminfo").ok()?, "MemAvailable:").map(|kib| kib * 1024)
}

/// What the control groups of this process leave of their limits (version 2): in a container the machine's own figure says
/// nothing.
fn container() -> Option<u64> {
    let groups = std::fs::read_to_string("/proc/self/cgroup").ok()?;
    let own = groups.lines().find_map(|line| line.strip_prefix("0::/"))?;
    let root = Path::new("/sys/fs/cgroup");
    root.join(own).ancestors().take_while(|group| group.starts_with(root)).filter_map(left).min()
}

/// What one group has left. Files in memory that nobody reads now can be dropped, so they do not count as used.
fn left(group: &Path) -> Option<u64> {
    let read = |name| std::fs::read_to_string(group.join(name)).ok();
    let limit: u64 = read("memory.max")?.trim().parse().ok()?;
    let used: u64 = read("memory.current")?.trim().parse().ok()?;
    let droppable = field(&read("memory.stat")?, "inactive_file").unwrap_or(0);
    Some(limit.saturating_sub(used.saturating_sub(droppable)))
}

/// The number after a word at the start of a line.
fn field(text: &str, word: &str) -> Option<u64> {
    text.lines().find_map(|line| line.strip_prefix(word)?.split_whitespace().next()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_survey_finds_memory_disk_and_threads() {
        let machine = Machine::survey();
        assert!(machine.threads >= 1 && space(Path::new("not/there/yet")).free > 0);
        assert!(!cfg!(target_os = "linux") || machine.memory.is_some_and(|bytes| bytes > 1 << 20));
    }

    #[test]
    fn the_limit_of_open_files_is_raised_to_the_hard_one() {
        raise_open_files();
        assert_eq!(open_files(), getrlimit(Resource::Nofile).maximum);
    }

    #[test]
    fn a_group_has_left_what_its_limit_allows_beyond_what_cannot_be_dropped() {
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
