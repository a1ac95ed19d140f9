//! Stops and the starts after them, with segments of the default size.

use super::*;
use crate::block::{Block, Date};
use std::sync::LazyLock;

/// Segments of the default size: what follows the last record of an open one is far longer than what is read at once.
fn full_size() -> Settings {
    Settings { capacity_bytes: 1 << 30, min_free_bytes: 0, ..Settings::default() }
}

/// More than is looked at together while a segment is scanned. Made once: every case stores them.
static BLOCKS: LazyLock<Vec<Block>> = LazyLock::new(|| chain_of(fingerprint(), 1, 8, 600_000));

fn blocks() -> Vec<Block> {
    BLOCKS.clone()
}

/// Opens the folder; every block must be there, and nothing counted as damage.
async fn assert_intact(folder: &Path, blocks: &[Block]) {
    let (tier, _) = open_with(folder, full_size());
    assert!(all(&load(&*tier, fingerprint(), names(blocks)).await), "a durable block is missing");
    assert_eq!((tier.damaged(), tier.damaged_footers()), (0, 0), "no damage");
}

fn unsealed(folder: &Path) -> u64 {
    survey(folder, Date::from_unix(0)).unwrap().unwrap().open_segments
}

#[tokio::test]
async fn close_seals_the_log_while_others_still_hold_the_tier() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), full_size());
    store(&*tier, blocks()).await;
    assert_eq!(unsealed(folder.path()), 1);
    let not_read_yet = tier.load(fingerprint(), names(&blocks()));
    tier.close().await;
    assert_eq!(unsealed(folder.path()), 0);
    assert_intact(folder.path(), &blocks()).await;
    let late = tier.store(chain(7, 2)).await;
    assert!(late.iter().all(|answer| matches!(answer, Err(StoreError::Busy))), "a closed tier takes nothing: {late:?}");
    drop(not_read_yet);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn close_waits_for_a_write_under_way() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), full_size());
    let faults = tier.shared.rig.faults(0);
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
async fn a_sealed_segment_that_was_not_cut_to_its_length_is_recovered() {
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

/// Stops the tier, ended after so many operations and a part of the next. Says whether the stop came that far.
async fn stop_ended(tier: Arc<DiskTier>, changes: usize, part: Part) -> bool {
    let faults = tier.shared.rig.faults(0);
    faults.end_after(changes, part);
    tier.close().await;
    faults.has_ended()
}

#[tokio::test]
async fn a_stop_cut_at_every_write_and_truncate_loses_nothing() {
    for part in [Part::Nothing, Part::Half, Part::All] {
        let mut changes = 0;
        loop {
            let folder = tempfile::tempdir().unwrap();
            let (tier, _) = open_with(folder.path(), full_size());
            store(&*tier, blocks()).await;
            let ended = stop_ended(tier, changes, part).await;
            assert_intact(folder.path(), &blocks()).await;
            if !ended {
                break;
            }
            changes += 1;
        }
        assert_eq!(changes, 2, "a stop writes a footer and cuts the file");
    }
}

#[tokio::test]
async fn a_start_after_a_cut_stop_may_be_cut_at_every_write_too() {
    for stopped_in in [Part::Nothing, Part::Half, Part::All] {
        for part in [Part::Nothing, Part::Half, Part::All] {
            let mut changes = 0;
            loop {
                let folder = tempfile::tempdir().unwrap();
                let (tier, _) = open_with(folder.path(), full_size());
                store(&*tier, blocks()).await;
                assert!(stop_ended(tier, 0, stopped_in).await);
                let rig = Rig::default();
                rig.faults(0).end_after(changes, part);
                drop(open_rigged(folder.path(), full_size(), rig.clone()));
                let ended = rig.faults(0).has_ended();
                assert_intact(folder.path(), &blocks()).await;
                if !ended {
                    break;
                }
                changes += 1;
            }
            assert!(changes >= 2, "a start seals what was open: {changes}");
        }
    }
}

#[tokio::test]
async fn a_process_that_ends_at_any_operation_loses_nothing_that_it_announced() {
    // Many small segments, so that the log rotates and gives old ones up.
    let settings = Settings { capacity_bytes: 400_000, ..settings() };
    for part in [Part::Half, Part::All] {
        let mut changes = 0;
        loop {
            let folder = tempfile::tempdir().unwrap();
            let (tier, events) = open_with(folder.path(), settings);
            let faults = tier.shared.rig.faults(0);
            faults.end_after(changes, part);
            for seed in 0..20 {
                let _ = tier.store(chain(seed, 12)).await;
            }
            tier.discard(fingerprint(), chain(19, 1)[0].header.name);
            tier.close().await;
            let (ended, announced) = (faults.has_ended(), announced(&events, Level::G3));
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

    let rig = Rig::default();
    // So that the scan does not end.
    rig.faults(0).hold_changes();
    let tier = claim_rigged(image.path(), settings(), rig.clone());
    let recovering = {
        let tier = tier.clone();
        tokio::task::spawn_blocking(move || tier.recover())
    };
    rig.faults(0).wait_for_a_held_operation();
    assert!(all(&load(&*tier, fingerprint(), names(&sealed)).await), "what needs no scan is there");
    rig.faults(0).release();
    recovering.await.unwrap();
    assert!(all(&load(&*tier, fingerprint(), names(&open)).await));
}

#[tokio::test]
async fn discards_hold_across_sealed_and_scanned_segments() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), settings());
    let blocks = chain(1, 60);
    store(&*tier, blocks.clone()).await;
    // The discard is in the last segment; the block is in the first, or in the last, or stored again after it.
    for at in [0, 59, 1] {
        tier.discard(fingerprint(), blocks[at].header.name);
    }
    idle(&tier).await;
    store(&*tier, blocks[1..2].to_vec()).await;
    let image = crashed(folder.path());
    let footerless = tempfile::tempdir().unwrap();
    for number in segment::numbers(image.path()).unwrap() {
        let bytes = fs::read(segment::path(image.path(), number)).unwrap();
        // Without its trailer every segment is scanned, in whatever order.
        fs::write(segment::path(footerless.path(), number), &bytes[..bytes.len() - 512]).unwrap();
    }
    for folder in [image.path(), footerless.path()] {
        let (tier, _) = open_with(folder, settings());
        let found = load(&*tier, fingerprint(), names(&blocks)).await;
        let missing: Vec<usize> = (0..60).filter(|at| found[*at].is_none()).collect();
        assert_eq!(missing, [0, 59]);
    }
}
