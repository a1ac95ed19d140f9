//! Files in the folder of a store whose names no object can have.

use super::*;
use crate::object::format::layout::FOLDERS;

#[tokio::test(flavor = "multi_thread")]
async fn files_that_no_object_can_be_keep_no_process_from_the_store() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = chain(1, 20);
    let (writer, _) = open_in(folder.path(), Settings::default());
    store(&*writer, blocks.clone()).await;
    drop(writer);
    let objects: Vec<PathBuf> = FOLDERS.iter().flat_map(|under| files(folder.path(), under)).collect();
    let of_objects = objects.iter().filter_map(|file| file.parent()).map(Path::to_owned);
    for folder in FOLDERS.iter().map(|under| folder.path().join(under)).chain(of_objects) {
        fs::write(folder.join("\u{1b}x"), "x").unwrap();
    }
    let capacity = Some(1 << 30);
    let (reader, _) = open_in(folder.path(), Settings { capacity, ..Settings::default() });
    // The follower has read the manifests, and the bytes of the store were measured.
    reader.wait_until_ready().await;
    assert_eq!(reader.holds(fingerprint(), &hashes(&blocks)), blocks.len());
    let location = StoreLocation::Folder(folder.path().to_owned());
    let access = Access { endpoint: None, region: None, credentials: Credentials::default() };
    let collector = Collector::open_location(&location, &access, Duration::from_secs(10)).unwrap();
    assert!(collector.scan(|_, _| ()).await.is_ok());
}
