//! Closing and reopening, with segments of the default size.

use super::*;
use crate::block::{Block, Date};
use std::sync::LazyLock;

/// Segments of the default size: the space behind the last record is much longer than one read.
fn full_size() -> Settings {
    Settings { capacity_bytes: 1 << 30, min_free_bytes: 0, ..Settings::default() }
}

/// More than one window of a scan. Created once, because every case stores them.
static BLOCKS: LazyLock<Vec<Block>> = LazyLock::new(|| chain_of(fingerprint(), 1, 8, 600_000));

fn blocks() -> Vec<Block> {
    BLOCKS.clone()
}

/// Opens the folder and checks that every block is there and that no corruption is counted.
async fn assert_intact(folder: &Path, blocks: &[Block]) {
    let (tier, _) = open_with(folder, full_size());
    assert!(all(&load(&*tier, fingerprint(), hashes(blocks)).await), "a durable block is missing");
    assert_eq!((tier.corrupt_ranges(), tier.corrupt_footers()), (0, 0), "no damage");
}

fn unsealed(folder: &Path) -> u64 {
    inspect(folder, Date::from_unix(0)).unwrap().unwrap().open_segments
}

#[tokio::test]
async fn close_seals_the_log_of_a_referenced_tier() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), full_size());
    store(&*tier, blocks()).await;
    assert_eq!(unsealed(folder.path()), 1);
    let not_read_yet = tier.load(fingerprint(), hashes(&blocks()));
    tier.close().await;
    assert_eq!(unsealed(folder.path()), 0);
    assert_intact(folder.path(), &blocks()).await;
    let late = tier.store(chain(7, 2)).await;
    assert!(
        late.iter().all(|answer| matches!(answer, Err(StoreError::Unavailable(_)))),
        "a closed tier accepts no block: {late:?}"
    );
    drop(not_read_yet);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_waits_for_a_running_write() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), full_size());
    let faults = tier.shared.hooks.faults(0);
    faults.hold();
    let storing = {
        let tier = tier.clone();
        tokio::spawn(async move { tier.store(blocks()).await })
    };
    faults.wait_for_a_held_operation();
    let mut closing = Box::pin(tier.close());
    assert!(futures::poll!(&mut closing).is_pending(), "a writer still has blocks");
    faults.release();
    closing.await;
    assert!(storing.await.unwrap().iter().all(Result::is_ok));
    assert_eq!(unsealed(folder.path()), 0);
    assert_intact(folder.path(), &blocks()).await;
}

#[tokio::test]
async fn a_sealed_segment_with_a_tail_is_recovered() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), full_size());
    store(&*tier, blocks()).await;
    tier.close().await;
    drop(tier);
    let path = segment::path(folder.path(), 0);
    let sealed = fs::metadata(&path).unwrap().len();
    fs::File::options().write(true).open(&path).unwrap().set_len(full_size().segment_bytes).unwrap();
    assert_intact(folder.path(), &blocks()).await;
    assert_eq!(fs::metadata(&path).unwrap().len(), sealed, "it is sealed again");
}

/// Closes a tier whose process ends during the operation after so many. Returns whether it came that far.
async fn close_interrupted(tier: Arc<DiskTier>, changes: usize, progress: Progress) -> bool {
    let faults = tier.shared.hooks.faults(0);
    faults.end_after(changes, progress);
    tier.close().await;
    faults.has_ended()
}

#[tokio::test]
async fn a_close_interrupted_at_any_operation_loses_nothing() {
    for part in [Progress::Nothing, Progress::Half, Progress::All] {
        let mut changes = 0;
        loop {
            let folder = tempfile::tempdir().unwrap();
            let (tier, _) = open_with(folder.path(), full_size());
            store(&*tier, blocks()).await;
            let ended = close_interrupted(tier, changes, part).await;
            assert_intact(folder.path(), &blocks()).await;
            if !ended {
                break;
            }
            changes += 1;
        }
        assert_eq!(changes, 2, "a close writes a footer and truncates the file");
    }
}

#[tokio::test]
async fn a_recovery_interrupted_at_any_write_loses_nothing() {
    for stopped_in in [Progress::Nothing, Progress::Half, Progress::All] {
        for part in [Progress::Nothing, Progress::Half, Progress::All] {
            let mut changes = 0;
            loop {
                let folder = tempfile::tempdir().unwrap();
                let (tier, _) = open_with(folder.path(), full_size());
                store(&*tier, blocks()).await;
                assert!(close_interrupted(tier, 0, stopped_in).await);
                let hooks = TestHooks::default();
                hooks.faults(0).end_after(changes, part);
                drop(open_with_hooks(folder.path(), full_size(), hooks.clone()));
                let ended = hooks.faults(0).has_ended();
                assert_intact(folder.path(), &blocks()).await;
                if !ended {
                    break;
                }
                changes += 1;
            }
            assert!(changes >= 2, "a recovery seals the open segment: {changes}");
        }
    }
}

#[tokio::test]
async fn a_crash_at_any_operation_loses_no_published_block() {
    // Many small segments, so that the log rotates and reclaims.
    let settings = Settings { capacity_bytes: 400_000, ..settings() };
    for part in [Progress::Half, Progress::All] {
        let mut changes = 0;
        loop {
            let folder = tempfile::tempdir().unwrap();
            let (tier, events) = open_with(folder.path(), settings);
            let faults = tier.shared.hooks.faults(0);
            faults.end_after(changes, part);
            for seed in 0..20 {
                let _ = tier.store(chain(seed, 12)).await;
            }
            tier.discard(fingerprint(), chain(19, 1)[0].header.hash);
            tier.close().await;
            let ended = faults.has_ended();
            let announced = announced(&events, Level::G3);
            drop(tier);
            let (tier, _) = open_with(folder.path(), settings);
            assert!(
                all(&load(&*tier, fingerprint(), announced).await),
                "ended in operation {changes}, {part:?} of it done"
            );
            if !ended {
                break;
            }
            changes += 1;
        }
        assert!(changes > 30, "{changes}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sealed_segments_are_served_while_another_is_scanned() {
    let folder = tempfile::tempdir().unwrap();
    let (sealed, open) = (chain(1, 60), chain(2, 5));
    let (tier, _) = open_with(folder.path(), settings());
    store(&*tier, sealed.clone()).await;
    tier.close().await;
    drop(tier);
    let (tier, _) = open_with(folder.path(), settings());
    store(&*tier, open.clone()).await;
    let image = crashed(folder.path());

    let hooks = TestHooks::default();
    // So that the scan does not end.
    hooks.faults(0).hold_changes();
    let tier = open_logs_with_hooks(image.path(), settings(), hooks.clone());
    let recovering = {
        let tier = tier.clone();
        tokio::task::spawn_blocking(move || tier.recover())
    };
    hooks.faults(0).wait_for_a_held_operation();
    assert!(all(&load(&*tier, fingerprint(), hashes(&sealed)).await), "sealed segments need no scan");
    hooks.faults(0).release();
    recovering.await.unwrap();
    assert!(all(&load(&*tier, fingerprint(), hashes(&open)).await));
}

#[tokio::test]
async fn tombstones_apply_across_sealed_and_scanned_segments() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), settings());
    let blocks = chain(1, 60);
    store(&*tier, blocks.clone()).await;
    // The tombstone is in the last segment; the block is in the first, in the last, or stored again after it.
    for at in [0, 59, 1] {
        tier.discard(fingerprint(), blocks[at].header.hash);
    }
    idle(&tier).await;
    store(&*tier, blocks[1..2].to_vec()).await;
    let image = crashed(folder.path());
    let footerless = tempfile::tempdir().unwrap();
    for number in segment::numbers(image.path()).unwrap() {
        let bytes = fs::read(segment::path(image.path(), number)).unwrap();
        // Without its trailer every segment is scanned, in any order.
        fs::write(segment::path(footerless.path(), number), &bytes[..bytes.len() - 512]).unwrap();
    }
    for folder in [image.path(), footerless.path()] {
        let (tier, _) = open_with(folder, settings());
        let found = load(&*tier, fingerprint(), hashes(&blocks)).await;
        let missing: Vec<usize> = (0..60).filter(|at| found[*at].is_none()).collect();
        assert_eq!(missing, [0, 59]);
    }
}
