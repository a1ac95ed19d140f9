//! Manifests that are authenticated, forged, moved, or oversized.

use super::*;
use crate::transform::crypt::{Environment, KeySource, Keyring, MetadataKeys};
use object_store::ObjectStoreExt;

/// The metadata keys of a process with these master keys, in a shared key store.
async fn keys(key_store: &Arc<dyn ObjectStore>, masters: &str) -> Arc<MetadataKeys> {
    let masters = masters.to_owned();
    let environment: Environment = Arc::new(move |_| Some(masters.clone()));
    let keys = Keyring::open(key_store.clone(), "keys", KeySource::Env("KEYS".into()), environment).await.unwrap();
    MetadataKeys::open(keys).await.unwrap()
}

fn open(store: &Arc<dyn ObjectStore>, keys: Option<&Arc<MetadataKeys>>) -> Arc<ObjectTier> {
    let events = Arc::new(EventLog::new(Epoch(1)));
    ObjectTier::open_authenticated(store.clone(), "kv", Settings::default(), events, keys.cloned())
}

/// For a process that starts now: the number of `wanted` blocks that it loads, and of corrupt manifests.
async fn found(store: &Arc<dyn ObjectStore>, keys: Option<&Arc<MetadataKeys>>, wanted: &[Block]) -> (usize, u64) {
    let tier = open(store, keys);
    tier.wait_until_ready().await;
    (load(&*tier, fingerprint(), hashes(wanted)).await.iter().flatten().count(), tier.corrupt_manifests())
}

async fn manifests(store: &Arc<dyn ObjectStore>) -> Vec<(object_store::path::Path, Bytes)> {
    let listed: Vec<_> = store.list(Some(&Layout::new("kv").manifests())).collect().await;
    let mut found = Vec::new();
    for path in listed.into_iter().map(|meta| meta.unwrap().location) {
        let bytes = store.get(&path).await.unwrap().bytes().await.unwrap();
        found.push((path, bytes));
    }
    found.sort();
    found
}

#[tokio::test(start_paused = true)]
async fn unauthenticated_forged_or_moved_manifests_are_rejected() {
    let [store, key_store]: [Arc<dyn ObjectStore>; 2] = [Arc::new(InMemory::new()), Arc::new(InMemory::new())];
    let (old, new) = ("01".repeat(32), format!("{},{}", "02".repeat(32), "01".repeat(32)));
    let ours = keys(&key_store, &old).await;
    let blocks = chain(1, 10);
    let plain = chain(2, 10);
    super::store(&*open(&store, Some(&ours)), blocks.clone()).await;
    assert_eq!(found(&store, Some(&ours), &blocks).await, (10, 0));
    assert_eq!(found(&store, None, &blocks).await, (10, 0), "a process without keys has nothing to verify with");

    // Manifests stay readable when the master key is replaced.
    let rotated = keys(&key_store, &new).await;
    assert_eq!(found(&store, Some(&rotated), &blocks).await, (10, 0));
    let other: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let foreign = keys(&other, &"03".repeat(32)).await;
    assert_eq!(found(&store, Some(&foreign), &blocks).await, (0, 1), "authenticated with a key that it does not have");

    // Without a tag.
    super::store(&*open(&store, None), plain.clone()).await;
    assert_eq!(found(&store, Some(&ours), &plain).await, (0, 1));
    assert_eq!(found(&store, None, &plain).await, (10, 0));

    // With a tag, with one field changed and a valid checksum; or moved to another number.
    let manifests = manifests(&store).await;
    let (path, valid) = manifests.iter().find(|(_, bytes)| bytes.starts_with(b"BLKYMAN5")).unwrap();
    for at in (8..valid.len() - 8).step_by(7) {
        let mut corrupt = valid.to_vec();
        corrupt[at] ^= 1;
        let corrupt = crate::tests::fuzz::summed(corrupt);
        store.put(path, corrupt.into()).await.unwrap();
        assert_eq!(found(&store, Some(&ours), &blocks).await, (0, 2), "byte {at}");
    }
    let moved = path.as_ref().replace("000000000000", "000000000001");
    store.put(&moved.into(), valid.clone().into()).await.unwrap();
    store.delete(path).await.unwrap();
    assert_eq!(found(&store, Some(&ours), &blocks).await, (0, 2), "the same manifest under another number");
}

#[tokio::test]
async fn oversized_metadata_is_skipped_without_buffering() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = reopen(folder.path()).await;
    store(&*tier, chain(1, 10)).await;
    let huge = |path: PathBuf| {
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let file = fs::OpenOptions::new().write(true).create(true).truncate(false).open(path).unwrap();
        // A sparse file: it takes no space.
        file.set_len(1 << 40).unwrap();
    };
    let manifest = files(folder.path(), "manifests").remove(0);
    huge(manifest.with_file_name("000000000007"));
    let name = InstanceId::new().to_string();
    huge(folder.path().join("manifests").join(&name).join("000000000000"));
    huge(folder.path().join("removals").join(&name));
    huge(folder.path().join("uses").join(&name));
    huge(folder.path().join("collected"));
    let (reader, _) = reopen(folder.path()).await;
    assert!(all_found(&load(&*reader, fingerprint(), hashes(&chain(1, 10))).await));
    assert_eq!(reader.corrupt_manifests(), 2);
    let store = Arc::new(LocalFileSystem::new_with_prefix(folder.path()).unwrap());
    let collector = Collector::open(store, "", Duration::from_secs(10));
    let inventory = collector.scan(|_, _| {}).await.unwrap();
    let now = crate::block::Clock::system().now();
    assert!(collector.try_start(Duration::from_secs(9), now).await.unwrap().is_some());
    let seen = collector.verify(&inventory, false, async |_, _| Ok(true), |_, _| {}).await.unwrap();
    assert_eq!((seen.valid_blocks, seen.corrupt_manifests), (10, 2));
}
