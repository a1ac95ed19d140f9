//! Space on the device: what the log takes, and what it reclaims.

use super::*;
use crate::block::Block;

mod carry_over;
mod full_disk;

/// Number of blocks that fill a segment.
const FULL: u64 = 15;

/// Settings of a log of six segments.
fn small() -> Settings {
    Settings { capacity_bytes: 6 * (64 << 10), ..settings() }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_read_that_races_a_reclaim_is_a_miss() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let reading = {
        let tier = tier.clone();
        tokio::spawn(async move {
            let mut found = 0;
            for seed in (0..60).cycle().take(2_000) {
                let wanted = hashes(&chain(seed, 10));
                let mut loading = tier.load(fingerprint(), wanted.clone());
                while let Some((index, answer)) = loading.next().await {
                    let block = answer.expect("a race is not an error");
                    found += block.map_or(0, |block| block.verify(wanted[index], fingerprint()).map(|_| 1).unwrap());
                }
            }
            found
        })
    };
    for seed in (0..60).cycle().take(600) {
        store(&*tier, chain(seed, 10)).await;
    }
    assert!(reading.await.unwrap() > 0);
}

#[tokio::test]
async fn a_reused_segment_contains_no_old_record() {
    let mut folder = tempfile::tempdir().unwrap();
    let (mut tier, mut events) = open_with(folder.path(), small());
    for seed in 0..60 {
        store(&*tier, chain(seed, 7)).await;
        if seed % 3 == 2 {
            idle(&tier).await;
            let image = crashed(folder.path());
            let held = announced(&events, Level::G3);
            (tier, events) = open_with(image.path(), small());
            assert_eq!((announced(&events, Level::G3), tier.corrupt_ranges()), (held, 0), "after chain {seed}");
            folder = image;
        }
    }
}

#[tokio::test]
async fn a_smaller_capacity_applies_from_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let on_disk =
        || -> u64 { fs::read_dir(folder.path()).unwrap().map(|file| file.unwrap().metadata().unwrap().len()).sum() };
    let (tier, _) = open(folder.path());
    let blocks: Vec<Block> = (0..20).flat_map(|seed| chain(seed, 20)).collect();
    store(&*tier, blocks.clone()).await;
    drop(tier);
    let (tier, _) = open(folder.path());
    assert_eq!(tier.usage().blocks, 400, "the same capacity removes nothing");
    drop(tier);

    let (tier, events) = open_with(folder.path(), small());
    assert!(tier.usage().bytes <= small().capacity_bytes, "{} bytes", tier.usage().bytes);
    assert!(on_disk() <= small().capacity_bytes, "{} bytes on disk, with the spare", on_disk());
    let held = tier.usage().blocks;
    assert!(held > 4 * FULL, "{held} blocks are left");
    assert_eq!(announced(&events, Level::G3).len() as u64, held, "the removed blocks are not announced any more");
    assert_eq!(tier.holds(fingerprint(), &hashes(&blocks[399..])), 1, "the newest blocks are kept");
    store(&*tier, chain(99, 1)).await;
    idle(&tier).await;
    assert!(on_disk() <= small().capacity_bytes);
    assert!(all(&load(&*tier, fingerprint(), hashes(&chain(99, 1))).await));
}

#[tokio::test]
async fn recovery_counts_the_blocks_that_the_log_holds() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    let blocks: Vec<Block> = (0..20).flat_map(|seed| chain(seed, 20)).collect();
    store(&*tier, blocks.clone()).await;
    for block in &blocks[380..390] {
        tier.discard(fingerprint(), block.header.hash);
    }
    idle(&tier).await;
    drop(tier);
    let recovered = |settings| {
        let tier = open_logs_with_hooks(folder.path(), settings, TestHooks::default());
        let log = tier.logs().remove(0).unwrap();
        (log.recover().unwrap() as u64, tier.usage().blocks)
    };
    assert_eq!(recovered(settings()), (390, 390), "neither discarded blocks nor tombstones");
    let (counted, held) = recovered(small());
    assert_eq!(counted, held);
    assert!((1..390).contains(&held), "{held} blocks fit into the smaller capacity");
}

#[tokio::test]
async fn a_capacity_below_one_old_segment_removes_it() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), Settings { segment_bytes: 2 << 20, ..settings() });
    store(&*tier, chain(1, 400)).await;
    drop(tier);
    let (tier, events) = open_with(folder.path(), Settings { capacity_bytes: 1 << 20, ..settings() });
    assert_eq!((tier.usage().blocks, tier.usage().bytes, announced(&events, Level::G3).len()), (0, 0, 0));
    assert!(!folder.path().join("spare").exists());
    store(&*tier, chain(2, 40)).await;
}

#[tokio::test(start_paused = true)]
async fn a_failing_device_costs_new_blocks_only() {
    for code in [libc::EIO, libc::ENOSPC] {
        let folder = tempfile::tempdir().unwrap();
        let (tier, events) = open(folder.path());
        let (before, during, after) = (chain(1, 50), chain(2, 5), chain(3, 5));
        store(&*tier, before.clone()).await;
        tier.shared.hooks.fail_writes(0, code);
        assert!(tier.store(during.clone()).await.iter().all(Result::is_err));
        assert!(matches!(tier.store(during[..1].to_vec()).await[..], [Err(StoreError::Busy)]), "writes are suspended");
        assert!(all(&load(&*tier, fingerprint(), hashes(&before)).await), "reading goes on");
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(matches!(tier.store(during[..1].to_vec()).await[..], [Err(StoreError::Io(_) | StoreError::Full)]));

        tier.shared.hooks.fail_writes(0, 0);
        tokio::time::advance(Duration::from_secs(2)).await;
        store(&*tier, after.clone()).await;
        let kept = [before.clone(), after].concat();
        drop(tier);
        let (tier, restarted) = open(folder.path());
        assert_eq!(announced(&restarted, Level::G3), announced(&events, Level::G3));
        assert!(all(&load(&*tier, fingerprint(), hashes(&kept)).await));
        assert_eq!(tier.holds(fingerprint(), &hashes(&during)), 0);
    }
}

#[tokio::test]
async fn the_spare_counts_as_space_for_the_next_segment() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let log = tier.logs().remove(0).unwrap();
    assert_eq!(segment::spare_bytes(&log.io, folder.path()), 0);
    for seed in 0..20 {
        store(&*tier, chain(seed, 10)).await;
    }
    idle(&tier).await;
    assert!(segment::spare_bytes(&log.io, folder.path()) >= small().segment_bytes / 2);
    assert!(segment::delete_spare(&log.io, folder.path()));
    assert_eq!(segment::spare_bytes(&log.io, folder.path()), 0);
}

#[tokio::test(start_paused = true)]
async fn failing_data_writes_do_not_reclaim_a_segment_each() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    for seed in 0..20 {
        store(&*tier, chain(seed, 10)).await;
    }
    idle(&tier).await;
    let files = || segment::numbers(folder.path()).unwrap().len();
    let before = (tier.usage(), files());
    tier.shared.hooks.fail_data(0, libc::EIO);
    for _ in 0..20 {
        tokio::time::advance(Duration::from_secs(2)).await;
        assert!(matches!(tier.store(chain(99, 1)).await[..], [Err(StoreError::Io(_))]));
        idle(&tier).await;
    }
    let after = (tier.usage(), files());
    assert!(after.0.blocks >= before.0.blocks / 2 && after.1 <= before.1, "{before:?}, {after:?}");
    tier.shared.hooks.fail_data(0, 0);
    tokio::time::advance(Duration::from_secs(2)).await;
    store(&*tier, chain(99, 1)).await;
}

#[tokio::test]
async fn withdraw_includes_blocks_being_reclaimed() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, events) = open(folder.path());
    store(&*tier, chain(1, 100)).await;
    let log = tier.logs().remove(0).unwrap();
    let victim = log.next_victim(&mut log.lock(), 0);
    assert!(victim.is_some());
    log.withdraw();
    assert_eq!((tier.usage().blocks, announced(&events, Level::G3).len()), (0, 0));
}
