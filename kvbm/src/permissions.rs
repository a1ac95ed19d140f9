//! Modes of the files and folders that hold KV, keys and traces: only their owner may read them, regardless of the
//! umask.
//!
//! A folder that this program names is always restricted to mode 0700. A folder that the configuration names is created
//! with mode 0700; an existing one is restricted only if everything in it belongs to this program, because others may
//! need to pass through it.
//!
//! One folder may be shared by several users: a G4 store in a folder or shared flash (G3.5). It is shared with its
//! group if an operator has made it so, by the setgid bit and write permission for the group (`chmod 2770`).

use std::ffi::OsStr;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions, Permissions};
use std::io;
use std::os::unix::fs::{DirBuilderExt, OpenOptionsExt, PermissionsExt};
use std::path::Path;

/// Permission bits of the group and of all others.
const GROUP_AND_WORLD: u32 = 0o077;
/// Permission bits of all others, the group excepted.
const WORLD: u32 = 0o007;
const SETGID: u32 = 0o2000;
const STICKY: u32 = 0o1000;
const GROUP_WRITE: u32 = 0o020;

/// Creates a folder, and those above it that are missing, with mode 0700. An existing folder keeps its mode.
pub fn create_dir_all(folder: &Path) -> io::Result<()> {
    DirBuilder::new().recursive(true).mode(0o700).create(folder)
}

/// Creates a folder that the configuration names. An existing one is restricted to mode 0700 if this program alone uses
/// it, which means that `is_ours` holds for the name of every entry. One that is [shared with its
/// group](is_group_shared) keeps its mode: Kubernetes makes volumes so (`fsGroup`), and they belong to root.
pub fn create_configured_dir(folder: &Path, is_ours: impl Fn(&OsStr) -> bool) -> io::Result<()> {
    create_dir_all(folder)?;
    let metadata = fs::metadata(folder)?;
    let mode = metadata.permissions().mode();
    if mode & GROUP_AND_WORLD == 0 || mode & STICKY != 0 || is_group_shared(folder) {
        return Ok(());
    }
    for entry in fs::read_dir(folder)? {
        if !is_ours(&entry?.file_name()) {
            return Ok(());
        }
    }
    restrict_path(folder);
    Ok(())
}

/// Whether an operator shares a folder with its group: it has the setgid bit, and the group may write to it.
pub fn is_group_shared(folder: &Path) -> bool {
    let shares = |metadata: Metadata| metadata.permissions().mode() & (SETGID | GROUP_WRITE) == SETGID | GROUP_WRITE;
    fs::metadata(folder).is_ok_and(shares)
}

/// Creates the folders below `root` that this program names, or restricts existing ones: to mode 0700, or to 2770 if
/// `root` is [shared with its group](is_group_shared).
pub(crate) fn create_private_dirs_below(root: &Path, folders: &[&str]) -> io::Result<()> {
    let shared = is_group_shared(root);
    for folder in folders.iter().map(|folder| root.join(folder)) {
        create_dir_all(&folder)?;
        set(&folder, |mode| if shared { (mode | SETGID | 0o770) & !WORLD } else { mode & !GROUP_AND_WORLD });
    }
    Ok(())
}

/// Options that create a file with mode 0600.
pub fn private_file_options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.mode(0o600);
    options
}

/// Removes the permissions of the group and others from an open file. Only from regular files: a pipe or a device has
/// no content of this program. A file of another user stays as it is, with a warning.
pub fn restrict_file(file: &File, path: &Path) -> io::Result<()> {
    let metadata = file.metadata()?;
    let mode = metadata.permissions().mode();
    if metadata.is_file()
        && mode & GROUP_AND_WORLD != 0
        && let Err(error) = file.set_permissions(Permissions::from_mode(mode & !GROUP_AND_WORLD & 0o7777))
    {
        warn(path, mode, &error);
    }
    Ok(())
}

/// Removes the permissions of the group and others from a file or folder, if it exists.
pub(crate) fn restrict_path(path: &Path) {
    set(path, |mode| mode & !GROUP_AND_WORLD);
}

fn set(path: &Path, wanted: impl Fn(u32) -> u32) {
    let Ok(metadata) = fs::symlink_metadata(path) else { return };
    let mode = metadata.permissions().mode() & 0o7777;
    // A link is left alone: it points to a place that an operator chose.
    if metadata.is_symlink() || wanted(mode) == mode {
        return;
    }
    if let Err(error) = fs::set_permissions(path, Permissions::from_mode(wanted(mode))) {
        warn(path, mode, &error);
    }
}

fn warn(path: &Path, mode: u32, error: &io::Error) {
    tracing::warn!(
        path = %path.display(), mode = format!("{:04o}", mode & 0o7777), %error,
        "cannot restrict permissions; other users may read this file"
    );
}

#[cfg(test)]
mod tests {
    use super::*;

    fn mode(path: &Path) -> u32 {
        fs::metadata(path).unwrap().permissions().mode() & 0o7777
    }

    fn chmod(path: &Path, mode: u32) {
        fs::set_permissions(path, Permissions::from_mode(mode)).unwrap();
    }

    #[test]
    fn new_and_existing_folders_and_files_are_private() {
        let root = tempfile::tempdir().unwrap();
        let [folder, file] = [root.path().join("a/b"), root.path().join("file")];
        let create = || create_private_dirs_below(folder.parent().unwrap(), &["b"]).unwrap();
        create();
        assert_eq!([mode(&root.path().join("a")), mode(&folder)], [0o700; 2]);
        chmod(&folder, 0o755);
        create();
        assert_eq!(mode(&folder), 0o700);
        fs::write(&file, "").unwrap();
        chmod(&file, 0o664);
        restrict_file(&File::open(&file).unwrap(), &file).unwrap();
        assert_eq!(mode(&file), 0o600);
        fs::remove_file(&file).unwrap();
        private_file_options().write(true).create(true).open(&file).unwrap();
        assert_eq!(mode(&file), 0o600);
    }

    #[test]
    fn a_configured_folder_with_foreign_entries_keeps_its_mode() {
        let root = tempfile::tempdir().unwrap();
        let folder = root.path().join("mount");
        create_configured_dir(&folder, |_| true).unwrap();
        assert_eq!(mode(&folder), 0o700);
        fs::write(folder.join("theirs"), "").unwrap();
        chmod(&folder, 0o755);
        create_configured_dir(&folder, |name| name == "ours").unwrap();
        assert_eq!(mode(&folder), 0o755);
        fs::rename(folder.join("theirs"), folder.join("ours")).unwrap();
        create_configured_dir(&folder, |name| name == "ours").unwrap();
        assert_eq!(mode(&folder), 0o700);
        chmod(&folder, 0o1777);
        create_configured_dir(&folder, |_| true).unwrap();
        assert_eq!(mode(&folder), 0o1777, "a folder like /tmp");
        chmod(&folder, 0o2775);
        create_configured_dir(&folder, |_| true).unwrap();
        assert_eq!(mode(&folder), 0o2775, "a volume of Kubernetes");
    }

    #[test]
    fn a_setgid_folder_stays_shared_with_its_group_alone() {
        let root = tempfile::tempdir().unwrap();
        let below = root.path().join("blocks");
        create_private_dirs_below(root.path(), &["blocks"]).unwrap();
        assert_eq!(mode(&below), 0o700);
        chmod(root.path(), 0o2775);
        create_private_dirs_below(root.path(), &["blocks"]).unwrap();
        assert_eq!(mode(&below), 0o2770);
        chmod(root.path(), 0o775);
        create_private_dirs_below(root.path(), &["blocks"]).unwrap();
        assert_eq!(mode(&below) & 0o777, 0o700, "without the setgid bit nothing is shared");
    }
}
