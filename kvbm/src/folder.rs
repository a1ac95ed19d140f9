//! The identity of files and folders: whether a path still names the one that was opened.
//!
//! Below a removed mount is another folder, on the disk of the system. A program that creates missing folders would
//! fill that disk.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

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

/// A folder that was opened. It is known by its inode alone: a network filesystem that is mounted again may have
/// another device number, and the folder below a mount has another inode than the root of what is mounted there.
#[derive(Clone, Debug)]
pub(crate) struct OpenedFolder {
    path: PathBuf,
    inode: u64,
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
    /// Remembers the inode of a folder.
    pub(crate) fn open(path: &Path) -> io::Result<Self> {
        let path = path.canonicalize()?;
        Ok(Self { inode: FileId::at(&path)?.inode, path })
    }

    /// Fails if the folder is no longer in its place. Blocks as long as the filesystem does not answer.
    pub(crate) fn check(&self) -> Result<(), FolderLost> {
        let path = || self.path.display().to_string();
        match FileId::at(&self.path) {
            Ok(found) if found.inode == self.inode => Ok(()),
            Ok(_) => Err(FolderLost::Replaced(path())),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Err(FolderLost::Gone(path())),
            Err(error) => Err(FolderLost::Unknown(path(), error)),
        }
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
        let folder = OpenedFolder::open(&at).unwrap();
        assert!(folder.check().is_ok());
        fs::rename(&at, &aside).unwrap();
        assert!(matches!(folder.check(), Err(FolderLost::Gone(_))));
        fs::create_dir(&at).unwrap();
        assert!(matches!(folder.check(), Err(FolderLost::Replaced(_))));
        fs::remove_dir(&at).unwrap();
        fs::rename(&aside, &at).unwrap();
        assert!(folder.check().is_ok());
    }
}
