//! Checks that weights fit into memory before they are loaded: otherwise the kernel kills the process.

use crate::llama::loader::error::FolderError;
use std::path::Path;

/// Rejects weights that need more than the available memory. Accepts them where the system does not report it.
pub(super) fn check(path: &Path, needed: u64) -> Result<(), FolderError> {
    let meminfo = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    fits(path, needed, available(&meminfo))
}

fn fits(path: &Path, needed: u64, available: Option<u64>) -> Result<(), FolderError> {
    match available {
        Some(available) if needed > available => Err(FolderError::Memory { path: path.to_owned(), needed, available }),
        _ => Ok(()),
    }
}

/// `MemAvailable` in bytes, from the text of `/proc/meminfo`.
fn available(meminfo: &str) -> Option<u64> {
    let line = meminfo.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    line.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_that_do_not_fit_are_refused_with_both_figures() {
        let available = available("MemTotal:  9 kB\nMemAvailable:    4096 kB\n");
        assert_eq!(available, Some(4 << 20));
        assert!(fits(Path::new("m"), 4 << 20, available).is_ok());
        let error = fits(Path::new("m"), (4 << 20) + 1, available).unwrap_err().to_string();
        assert!(error.contains("need 5 MiB of memory, 4 MiB are available"), "{error}");
        assert!(fits(Path::new("m"), u64::MAX, None).is_ok(), "nothing known, nothing refused");
    }
}
