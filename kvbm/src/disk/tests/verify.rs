//! Verifying a whole log: corruption is found in sealed and in unsealed segments, and owners are not disturbed.

use super::*;

fn verified(folder: &Path) -> Verification {
    verify(folder, |_, _| ()).unwrap().expect("there is a log")
}

/// A log of one sealed segment with 12 blocks.
async fn sealed() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    store(&*tier, chain(1, 12)).await;
    drop(tier);
    // The thread that drops the last reference to the log seals it.
    while verified(folder.path()).unsealed_segments > 0 {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    folder
}

fn segment_of(folder: &Path) -> PathBuf {
    segment::path(folder, segment::numbers(folder).unwrap()[0])
}

#[tokio::test]
async fn verify_counts_every_block_of_an_intact_log() {
    let folder = sealed().await;
    let steps = Mutex::new(Vec::new());
    let seen = verify(folder.path(), |done, total| steps.lock().push((done, total))).unwrap().unwrap();
    assert_eq!((seen.valid_blocks, seen.segments, seen.unsealed_segments), (12, 1, 0));
    assert!(seen.is_intact() && seen.bytes > 0);
    assert_eq!(steps.into_inner(), [(1, 1)]);
    // Verification changes nothing.
    assert_eq!(verified(folder.path()), seen);
}

#[tokio::test]
async fn verify_reads_the_segment_of_a_killed_process() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    store(&*tier, chain(1, 12)).await;
    let copy = crashed(folder.path());
    let seen = verified(copy.path());
    assert!(seen.is_intact() && seen.unsealed_segments > 0, "{seen:?}");
    assert_eq!(seen.valid_blocks, 12);
}

#[tokio::test]
async fn verify_finds_every_corrupt_block_and_footer() {
    let folder = sealed().await;
    let path = segment_of(folder.path());
    let whole = fs::read(&path).unwrap();
    let mut unsound = 0;
    let mut footers = 0;
    for at in (0..whole.len()).step_by(977).chain(whole.len() - 32..whole.len()) {
        let mut bad = whole.clone();
        bad[at] ^= 1;
        fs::write(&path, &bad).unwrap();
        let seen = verified(folder.path());
        assert!(seen.corrupt_blocks + seen.corrupt_footers + seen.corrupt_ranges <= 2, "byte {at}: {seen:?}");
        assert!(seen.corrupt_blocks == 1 || seen.valid_blocks == 12, "byte {at}: {seen:?}");
        unsound += seen.corrupt_blocks;
        footers += u64::from(seen.corrupt_footers == 1 || seen.unsealed_segments == 1);
    }
    assert!(unsound > 10 && footers >= 32, "{unsound} blocks, {footers} footers");
    fs::write(&path, &whole[..whole.len() / 2]).unwrap();
    let seen = verified(folder.path());
    assert!(seen.valid_blocks < 12 && seen.unsealed_segments == 1, "{seen:?}");
}

#[tokio::test]
async fn verify_rejects_a_log_in_use_and_finds_none_elsewhere() {
    let folder = tempfile::tempdir().unwrap();
    assert!(verify(folder.path(), |_, _| ()).unwrap().is_none());
    let (tier, _) = open(folder.path());
    store(&*tier, chain(1, 2)).await;
    let refused = verify(folder.path(), |_, _| ());
    assert!(matches!(refused, Err(OpenError::Owned { pid: Some(pid), .. }) if pid == std::process::id()));
    drop(tier);
    assert_eq!(verified(folder.path()).valid_blocks, 2);
}
