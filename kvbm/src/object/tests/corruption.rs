//! Corruption in the store: a load returns the block that was stored, or a miss.

use super::*;
use crate::block::Block;

/// A folder with several objects and manifests, and the blocks in them.
async fn folder_with_blocks() -> (TempDir, Vec<Block>) {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_in(folder.path(), Settings { object_bytes: 15_000, object_blocks: 1, ..Settings::default() });
    let mut blocks = Vec::new();
    for seed in 0..3 {
        let conversation = chain(seed, 10);
        store(&*tier, conversation.clone()).await;
        blocks.extend(conversation);
    }
    (folder, blocks)
}

/// Number of blocks that a new process loads. None may differ from what was stored.
async fn loaded_blocks(folder: &Path, blocks: &[Block]) -> usize {
    let (tier, _) = reopen(folder).await;
    let loaded = load(&*tier, fingerprint(), hashes(blocks)).await;
    for (loaded, block) in loaded.iter().zip(blocks) {
        assert!(loaded.as_ref().is_none_or(|loaded| loaded.payload() == block.payload));
    }
    loaded.iter().flatten().count()
}

#[tokio::test(start_paused = true)]
async fn a_flipped_bit_costs_one_block_or_one_manifest() {
    let (folder, blocks) = folder_with_blocks().await;
    let mut damaged_blocks = 0;
    for path in files(folder.path(), "blocks") {
        let valid = fs::read(&path).unwrap();
        for (nth, at) in (0..valid.len()).step_by(941).enumerate() {
            let mut corrupt = valid.clone();
            corrupt[at] ^= 1 << (nth % 8);
            fs::write(&path, corrupt).unwrap();
            assert_eq!(loaded_blocks(folder.path(), &blocks).await, blocks.len() - 1, "byte {at}");
            damaged_blocks += 1;
        }
        fs::write(&path, valid).unwrap();
    }
    for path in files(folder.path(), "manifests") {
        let valid = fs::read(&path).unwrap();
        for (nth, at) in (0..valid.len()).step_by(53).enumerate() {
            let mut corrupt = valid.clone();
            corrupt[at] ^= 1 << (nth % 8);
            fs::write(&path, corrupt).unwrap();
            assert!(loaded_blocks(folder.path(), &blocks).await < blocks.len());
        }
        fs::write(&path, valid).unwrap();
    }
    assert!(damaged_blocks > 50);
    assert_eq!(loaded_blocks(folder.path(), &blocks).await, blocks.len());
}

#[tokio::test(start_paused = true)]
async fn the_older_copy_is_read_when_the_newer_is_corrupt() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = chain(1, 10);
    let (one, other) = (reopen(folder.path()).await.0, reopen(folder.path()).await.0);
    let stored = tokio::join!(one.store(blocks.clone()), other.store(blocks.clone()));
    assert!(stored.0.iter().chain(&stored.1).all(Result::is_ok));
    let mut missed = 0;
    // Of one object a header, of the other one a payload, whichever is read first.
    for (path, at) in
        files(folder.path(), "blocks").into_iter().flat_map(|path| [(path.clone(), 3), (path, Header::LEN + 3)])
    {
        let valid = fs::read(&path).unwrap();
        let mut corrupt = valid.clone();
        corrupt[at] ^= 1;
        fs::write(&path, corrupt).unwrap();
        let (reader, events) = reopen(folder.path()).await;
        let found = load(&*reader, fingerprint(), hashes(&blocks)).await;
        for (block, _) in blocks.iter().zip(&found).filter(|(_, found)| found.is_none()) {
            missed += 1;
            // One reader reports the corrupt copy, and then another one that read the same copy, after a third one
            // loaded the other copy.
            reader.discard(fingerprint(), block.header.hash);
            assert!(all_found(&load(&*reader, fingerprint(), vec![block.header.hash]).await));
            reader.discard(fingerprint(), block.header.hash);
        }
        assert!(all_found(&load(&*reader, fingerprint(), hashes(&blocks)).await), "byte {at}, {missed} missed so far");
        assert_eq!(announced(&events, Level::G4).len(), 10, "it was never removed");
        // A report after this time concerns the second copy.
        tokio::time::sleep(Duration::from_mins(1)).await;
        for (block, _) in blocks.iter().zip(&found).filter(|(_, found)| found.is_none()) {
            reader.discard(fingerprint(), block.header.hash);
            assert_eq!(reader.holds(fingerprint(), &[block.header.hash]), 0);
        }
        fs::write(&path, valid).unwrap();
    }
    assert_eq!(missed, 2);
}

#[tokio::test(start_paused = true)]
async fn expiry_drops_all_copies_of_a_block() {
    let folder = tempfile::tempdir().unwrap();
    let blocks = chain(1, 10);
    let (one, other) = (reopen(folder.path()).await.0, reopen(folder.path()).await.0);
    let stored = tokio::join!(one.store(blocks.clone()), other.store(blocks.clone()));
    assert!(stored.0.iter().chain(&stored.1).all(Result::is_ok));
    let (reader, events) = reopen(folder.path()).await;
    for block in &blocks {
        let name = block.header.hash;
        // One reader finds the newer copy corrupt, and then another one finds the older one expired.
        reader.discard(fingerprint(), name);
        assert_eq!(reader.holds(fingerprint(), &[name]), 1, "there are two copies");
        assert_eq!([0; 2].map(|_| reader.expire_one(fingerprint(), name)), [1, 0]);
        assert_eq!(reader.holds(fingerprint(), &[name]), 0);
    }
    assert!(announced(&events, Level::G4).is_empty());
}

#[tokio::test(start_paused = true)]
async fn truncated_or_swapped_objects_yield_no_wrong_block() {
    let (folder, blocks) = folder_with_blocks().await;
    let objects = files(folder.path(), "blocks");
    let valid: Vec<_> = objects.iter().map(|path| fs::read(path).unwrap()).collect();
    for cut in (0..valid[0].len()).step_by(1511) {
        fs::write(&objects[0], &valid[0][..cut]).unwrap();
        assert!(loaded_blocks(folder.path(), &blocks).await < blocks.len());
    }
    fs::write(&objects[0], &valid[1]).unwrap();
    fs::write(&objects[1], &valid[0]).unwrap();
    assert!(loaded_blocks(folder.path(), &blocks).await < blocks.len());
    fs::write(&objects[0], &valid[0]).unwrap();
    fs::write(&objects[1], &valid[1]).unwrap();

    let manifests = files(folder.path(), "manifests");
    let (first, second) = (fs::read(&manifests[0]).unwrap(), fs::read(&manifests[1]).unwrap());
    fs::write(&manifests[0], &second).unwrap();
    fs::write(&manifests[1], &first).unwrap();
    assert_eq!(loaded_blocks(folder.path(), &blocks).await, blocks.len(), "the order of manifests does not matter");
    let foreign = folder.path().join("manifests").join(InstanceId::new().to_string());
    fs::create_dir(&foreign).unwrap();
    fs::copy(&manifests[0], foreign.join("000000000000")).unwrap();
    assert_eq!(loaded_blocks(folder.path(), &blocks).await, blocks.len(), "a manifest under another writer is ignored");
}

#[tokio::test(start_paused = true)]
async fn a_missing_object_is_a_miss_and_counted_once() {
    let (folder, blocks) = folder_with_blocks().await;
    let (tier, events) = reopen(folder.path()).await;
    let objects = files(folder.path(), "blocks");
    fs::remove_file(&objects[0]).unwrap();
    let truncated = fs::read(&objects[1]).unwrap();
    fs::write(&objects[1], &truncated[..10]).unwrap();
    // One by one from the end, including objects of which no byte is left.
    let (other, _) = reopen(folder.path()).await;
    for name in hashes(&blocks).into_iter().rev() {
        let (_, answer) = other.load(fingerprint(), vec![name]).next().await.expect("an answer for each");
        answer.expect("a missing block is not an error");
    }
    assert_eq!(other.missing_objects(), 2);
    for _ in 0..2 {
        let mut loading = tier.load(fingerprint(), hashes(&blocks));
        let mut missing = 0;
        while let Some((_, answer)) = loading.next().await {
            missing += usize::from(answer.expect("a missing block is not an error").is_none());
        }
        assert!(missing > 4 && missing < 15, "{missing}");
        assert_eq!(tier.missing_objects(), 2);
    }
    assert_eq!(announced(&events, Level::G4).len() as u64, tier.usage().blocks);
}

#[tokio::test(start_paused = true)]
async fn foreign_files_are_ignored() {
    let (folder, blocks) = folder_with_blocks().await;
    fs::write(folder.path().join("manifests/README"), "ours").unwrap();
    fs::create_dir(folder.path().join("manifests/not-a-writer")).unwrap();
    fs::write(files(folder.path(), "manifests")[0].with_file_name("notes"), "theirs").unwrap();
    assert_eq!(loaded_blocks(folder.path(), &blocks).await, blocks.len());
}
