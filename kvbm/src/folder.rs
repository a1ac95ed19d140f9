//! The identity of files and folders: whether a path still names the one that was opened. It also opens files that must
//! be regular ones.
//!
//! Below a removed mount is another folder, on the disk of the system. A program that creates missing folders would
//! fill that disk.

use std::fs::{self, File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

/// Opens a regular file. A pipe or a device is an error, because opening or reading it could block for ever.
pub(crate) fn open_regular(path: &Path, options: &OpenOptions) -> io::Result<File> {
    if !fs::metadata(path)?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "expected a regular file"));
    }
    options.open(path)
}

/// Device and inode of a file or folder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct FileId {
    device: u64,
    inode: u64,
}

impl FileId {
    /// The identity of what a path names. Links are followed.
    pub(crate) fn at(path: &Path) -> io::Result<Self> {
        fs::metadata(path).map(|metadata| Self::from(&metadata))
    }
}

impl From<&Metadata> for FileId {
    fn from(metadata: &Metadata) -> Self {
        Self { device: metadata.dev(), inode: metadata.ino() }
    }
}

/// A folder that was opened.
///
/// It is known by its device and inode, and by when it was created where the filesystem says so. A network filesystem
/// that is mounted again may have another device number, and the roots of most filesystems have the same inode number.
/// So on another device, the folders in it must be the same, too.
#[derive(Clone, Debug)]
pub(crate) struct OpenedFolder {
    path: PathBuf,
    device: u64,
    root: Identity,
    /// Folders in it, by name.
    below: Vec<(&'static str, Identity)>,
}

/// What a folder is known by within its filesystem.
#[derive(Clone, Copy, Debug)]
struct Identity {
    inode: u64,
    /// `None` if the filesystem does not say.
    created: Option<SystemTime>,
}

impl Identity {
    fn is(self, other: Self) -> bool {
        let created = self.created.zip(other.created);
        self.inode == other.inode && created.is_none_or(|(one, other)| one == other)
    }
}

impl From<&Metadata> for Identity {
    fn from(metadata: &Metadata) -> Self {
        Self { inode: metadata.ino(), created: metadata.created().ok() }
    }
}

/// A folder is no longer in its place.
#[derive(Debug, thiserror::Error)]
pub(crate) enum FolderLost {
    /// Its path names nothing.
    #[error(
        "the folder {0} was removed or moved away, or its filesystem was unmounted; mount it again, or move the folder \
         back"
    )]
    Gone(String),
    /// Its path names another folder.
    #[error(
        "another folder is at {0} than when it was opened, as after a mount or an unmount; mount the former filesystem \
         again, or restart this process to use the folder that is there now"
    )]
    Replaced(String),
    /// What its path names is unknown.
    #[error("the folder {0} cannot be found: {1}")]
    Unknown(String, io::Error),
}

impl OpenedFolder {
    /// Remembers a folder, and folders that are in it as long as it is used.
    pub(crate) fn open(path: &Path, below: &[&'static str]) -> io::Result<Self> {
        let path = path.canonicalize()?;
        let root = fs::metadata(&path)?;
        let identity = |name: &&'static str| {
            let found = fs::metadata(path.join(name));
            found.map(|found| (*name, Identity::from(&found)))
        };
        let below = below.iter().map(identity).collect::<io::Result<Vec<_>>>()?;
        Ok(Self { device: root.dev(), root: Identity::from(&root), below, path })
    }

    /// Fails if the folder is no longer in its place. Blocks as long as the filesystem does not answer.
    pub(crate) fn check(&self) -> Result<(), FolderLost> {
        let path = || self.path.display().to_string();
        match fs::metadata(&self.path).and_then(|found| self.is(&found)) {
            Ok(true) => Ok(()),
            Ok(false) => Err(FolderLost::Replaced(path())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(FolderLost::Gone(path())),
            Err(error) => Err(FolderLost::Unknown(path(), error)),
        }
    }

    /// Whether this is what was opened.
    fn is(&self, found: &Metadata) -> io::Result<bool> {
        if !self.root.is(Identity::from(found)) {
            return Ok(false);
        }
        // The folders in it may be removed and created again while the filesystem is mounted.
        if found.dev() == self.device {
            return Ok(true);
        }
        for (name, identity) in &self.below {
            match fs::metadata(self.path.join(name)) {
                Ok(found) if identity.is(Identity::from(&found)) => {}
                Ok(_) => return Ok(false),
                Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        Ok(!self.below.is_empty())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_is_lost_until_the_same_one_is_back() {
        let parent = tempfile::tempdir().unwrap();
        let (at, aside) = (parent.path().join("kv"), parent.path().join("aside"));
        fs::create_dir(&at).unwrap();
        let folder = OpenedFolder::open(&at, &[]).unwrap();
        assert!(folder.check().is_ok());
        fs::rename(&at, &aside).unwrap();
        assert!(matches!(folder.check(), Err(FolderLost::Gone(_))));
        fs::create_dir(&at).unwrap();
        assert!(matches!(folder.check(), Err(FolderLost::Replaced(_))));
        fs::remove_dir(&at).unwrap();
        fs::rename(&aside, &at).unwrap();
        assert!(folder.check().is_ok());
    }

    #[test]
    fn a_folder_on_another_device_is_the_same_if_what_is_in_it_is() {
        let at = tempfile::tempdir().unwrap();
        let blocks = at.path().join("blocks");
        fs::create_dir(&blocks).unwrap();
        let mut folder = OpenedFolder::open(at.path(), &["blocks"]).unwrap();
        // As after another filesystem was mounted whose root has the same inode number, or the same one again.
        folder.device += 1;
        assert!(folder.check().is_ok(), "a network filesystem that was mounted again");
        fs::rename(&blocks, at.path().join("aside")).unwrap();
        assert!(matches!(folder.check(), Err(FolderLost::Replaced(_))), "an empty filesystem");
        fs::create_dir(&blocks).unwrap();
        assert!(matches!(folder.check(), Err(FolderLost::Replaced(_))), "another store");
        folder.device -= 1;
        assert!(folder.check().is_ok(), "the folders in it may be created again");
        folder.root.created = folder.root.created.map(|created| created - std::time::Duration::from_secs(1));
        assert_eq!(folder.check().is_ok(), folder.root.created.is_none(), "another root with the same numbers");
    }
}
