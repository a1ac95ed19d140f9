//! Lists a store that is a folder.
//!
//! **What no object can be is left out, with a warning**: a name with a control character or without UTF-8, and a link
//! to a folder that it is in. `LocalFileSystem` ends a list with an error at such a name, so that one foreign file
//! would keep all processes from the store.

use crate::folder::FileId;
use object_store::ObjectMeta;
use object_store::path::Path;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fs::{self, Metadata};
use std::io::{self, ErrorKind};
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

/// Lists the folders of a store.
pub(super) struct Listing {
    root: PathBuf,
    /// What was left out with a warning.
    left_out: Mutex<BTreeSet<PathBuf>>,
}

/// A folder of the store.
pub(super) struct Folder {
    pub(super) path: Path,
    /// The folders that it is in, up to the one that the list began with.
    within: Vec<FileId>,
}

/// What is directly in a folder.
#[derive(Default)]
pub(super) struct Page {
    pub(super) folders: Vec<Folder>,
    pub(super) objects: Vec<ObjectMeta>,
}

/// Names with a warning of their own. Further ones are left out silently: a folder may have any number.
const MAX_WARNINGS: usize = 10;

impl Folder {
    /// The folder that a list begins with.
    pub(super) fn of(prefix: &Path) -> Self {
        Self { path: prefix.clone(), within: Vec::new() }
    }
}

impl Listing {
    /// Of a store in a folder.
    pub(super) fn new(root: PathBuf) -> Self {
        Self { root, left_out: Mutex::default() }
    }

    /// Lists a folder. One that does not exist is empty.
    pub(super) async fn page(self: &Arc<Self>, folder: Folder) -> io::Result<Page> {
        let listing = Arc::clone(self);
        let read = tokio::task::spawn_blocking(move || match listing.read(folder) {
            Err(error) if error.kind() == ErrorKind::NotFound => Ok(Page::default()),
            read => read,
        });
        read.await.map_err(io::Error::other)?
    }

    fn read(&self, Folder { path, mut within }: Folder) -> io::Result<Page> {
        let at = self.root.join(path.as_ref());
        within.push(FileId::at(&at)?);
        let mut page = Page::default();
        for entry in fs::read_dir(&at)? {
            let entry = entry?;
            let (name, file) = (entry.file_name(), entry.path());
            let Some((name, path)) = name.to_str().and_then(|name| Some((name, child(&path, name)?))) else {
                self.leave_out(&file);
                continue;
            };
            // Of what a link names.
            let metadata = match fs::metadata(&file) {
                Ok(metadata) => metadata,
                // It was deleted meanwhile, or it is a link to nothing.
                Err(error) if error.kind() == ErrorKind::NotFound => continue,
                Err(_) if entry.file_type().is_ok_and(|kind| kind.is_symlink()) => continue,
                Err(error) => return Err(error),
            };
            if metadata.is_dir() {
                if within.contains(&FileId::from(&metadata)) {
                    self.leave_out(&file);
                } else {
                    page.folders.push(Folder { path, within: within.clone() });
                }
            } else if metadata.is_file() && !is_upload(name) {
                page.objects.push(meta(path, &metadata)?);
            }
        }
        Ok(page)
    }

    /// Warns once for each of the first names.
    fn leave_out(&self, file: &std::path::Path) {
        let mut left_out = self.left_out.lock();
        if left_out.len() < MAX_WARNINGS && left_out.insert(file.to_owned()) {
            // The name is escaped: it may have control characters.
            tracing::warn!(
                ?file,
                "the folder of a store has a file that is none of its objects; it is left out; move it elsewhere"
            );
        }
    }
}

/// The path of an object in a folder; `None` if no object can have the name.
fn child(folder: &Path, name: &str) -> Option<Path> {
    Path::parse(format!("{folder}/{name}")).ok()
}

/// Whether a name is that of an unfinished upload of `LocalFileSystem`, which adds `#` and a number.
fn is_upload(name: &str) -> bool {
    let number = name.split_once('#').map(|(_, number)| number);
    number.is_some_and(|number| !number.is_empty() && number.bytes().all(|byte| byte.is_ascii_digit()))
}

/// The metadata as `LocalFileSystem` has it.
fn meta(location: Path, metadata: &Metadata) -> io::Result<ObjectMeta> {
    let (modified, size) = (metadata.modified()?, metadata.len());
    let microseconds = modified.duration_since(UNIX_EPOCH).unwrap_or_default().as_micros();
    let e_tag = Some(format!("\"{:x}-{microseconds:x}-{size:x}\"", metadata.ino()));
    Ok(ObjectMeta { location, last_modified: modified.into(), size, e_tag, version: None })
}

#[cfg(test)]
mod tests {
    use super::*;
    use object_store::local::LocalFileSystem;
    use object_store::{ObjectStoreExt, PutPayload};
    use std::ffi::OsStr;
    use std::os::unix::ffi::OsStrExt;
    use std::os::unix::fs::symlink;

    #[tokio::test]
    async fn a_list_has_objects_and_folders_and_nothing_else() {
        let root = tempfile::tempdir().unwrap();
        let store = LocalFileSystem::new_with_prefix(root.path()).unwrap();
        let object = Path::from("blocks/a/1");
        store.put(&object, PutPayload::from_static(b"bytes")).await.unwrap();
        let (blocks, listing) = (root.path().join("blocks"), Arc::new(Listing::new(root.path().to_owned())));
        fs::create_dir(blocks.join("\u{1b}d")).unwrap();
        for name in [OsStr::new("\u{1b}x"), OsStr::from_bytes(b"\xff"), OsStr::new("2#1")] {
            fs::write(blocks.join("a").join(name), "x").unwrap();
        }
        symlink("nothing", blocks.join("a/dangling")).unwrap();
        symlink(&blocks, blocks.join("a/loop")).unwrap();
        let page = listing.page(Folder::of(&Path::from("blocks"))).await.unwrap();
        let [folder] = &page.folders[..] else { panic!("one folder") };
        assert_eq!((folder.path.as_ref(), page.objects.len()), ("blocks/a", 0));
        let page = listing.page(page.folders.into_iter().next().unwrap()).await.unwrap();
        assert_eq!(page.objects, [store.head(&object).await.unwrap()], "with the metadata of the store");
        assert!(page.folders.is_empty());
        let left_out: Vec<PathBuf> = listing.left_out.lock().iter().cloned().collect();
        assert_eq!(left_out.len(), 4, "{left_out:?}");
        let absent = listing.page(Folder::of(&Path::from("absent"))).await.unwrap();
        assert!(absent.objects.is_empty() && absent.folders.is_empty());
    }
}
