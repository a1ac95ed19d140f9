//! A device without space: what the log removes, what it still stores, and what it reports.

use super::*;
use crate::block::{BlockAttrs, BlockRetention, Date};
use crate::tier::Usage;

/// Bytes that are less than the `min_free_bytes` of a test, and more than a segment.
const TOO_LITTLE: u64 = 512 << 20;

/// Number of blocks in the smallest segment of a full disk.
const SMALLEST: u64 = 3;

/// A log of this many full segments, opened again on a disk that leaves it `left` bytes more.
async fn reopened_on_a_full_disk(folder: &Path, segments: u64, left: u64) -> Arc<DiskTier> {
    let (tier, _) = open(folder);
    for seed in 0..segments {
        store(&*tier, chain(1_000 + seed, FULL as usize)).await;
    }
    drop(tier);
    let (tier, _) = open(folder);
    assert_eq!(tier.usage().blocks, segments * FULL);
    tier.shared.hooks.fill_disk(tier.usage().bytes + left);
    tier
}

/// Leaves a log of one of the smallest segments in a folder.
async fn write_smallest_segment(folder: &Path) {
    let (tier, _) = open(folder);
    store(&*tier, chain(1_000, SMALLEST as usize)).await;
}

#[tokio::test]
async fn a_log_frees_as_much_space_as_others_need() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { capacity_bytes: 2 << 20, min_free_bytes: 200_000, ..settings() };
    let (tier, _) = open_with(folder.path(), settings);
    store(&*tier, (0..20).flat_map(|seed| chain(seed, 20)).collect()).await;
    let before = tier.usage().bytes;
    assert!(before > 1 << 20, "{before}");
    tier.shared.hooks.leave_space(before + 50_000);
    store(&*tier, chain(90, 40)).await;
    let after = tier.usage().bytes;
    assert!((before - 400_000..=before - 150_000).contains(&after), "200 KB are to be free: {before}, then {after}");
}

#[tokio::test]
async fn a_log_on_a_full_disk_keeps_a_quarter_and_writes_on() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { capacity_bytes: 2 << 20, min_free_bytes: 1 << 30, ..settings() };
    let (tier, _) = open_with(folder.path(), settings);
    tier.shared.hooks.leave_space(4 << 30);
    store(&*tier, (0..20).flat_map(|seed| chain(seed, 20)).collect()).await;
    tier.shared.hooks.leave_space(TOO_LITTLE);
    for seed in 100..140 {
        store(&*tier, chain(seed, 20)).await;
        let bytes = tier.usage().bytes;
        assert!(bytes >= settings.capacity_bytes / 4 - 2 * settings.segment_bytes, "{bytes} left");
    }
    let bytes = tier.usage().bytes;
    assert!(bytes <= settings.capacity_bytes / 4 + settings.segment_bytes, "it shrank as far as it may: {bytes}");
    assert_eq!(tier.holds(fingerprint(), &hashes(&chain(139, 20))), 20, "the last blocks are stored");
}

#[tokio::test(start_paused = true)]
async fn a_log_that_cannot_free_enough_reclaims_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    store(&*tier, chain(1, 20)).await;
    drop(tier);
    let settings = Settings { segment_bytes: 1 << 20, min_free_bytes: 1 << 30, ..settings() };
    let (tier, _) = open_with(folder.path(), settings);
    tier.shared.hooks.leave_space(TOO_LITTLE);
    let large = || chain_of(fingerprint(), 9, 1, 200_000);
    let answers = tier.store(large()).await;
    let [Err(StoreError::Io(error))] = &answers[..] else { panic!("{answers:?}") };
    assert!(error.to_string().contains("the disk is full"), "{error}");
    assert_eq!(tier.usage().blocks, 20, "all segments together would not suffice");
    tier.shared.hooks.leave_space(4 << 30);
    tokio::time::advance(Duration::from_secs(2)).await;
    store(&*tier, large()).await;
}

#[tokio::test]
async fn a_log_on_a_small_disk_replaces_its_oldest_blocks() {
    let folder = tempfile::tempdir().unwrap();
    // Less than one whole segment.
    let bytes = 60 << 10;
    for start in [0, 100] {
        let (tier, _) = open(folder.path());
        tier.shared.hooks.fill_disk(bytes);
        for seed in start..start + 40 {
            store(&*tier, chain(seed, 1)).await;
            let Usage { bytes: taken, blocks, .. } = tier.usage();
            let least = if seed < 2 * SMALLEST { seed + 1 } else { 2 * SMALLEST };
            assert!(taken <= bytes && blocks >= least, "after block {seed}: {blocks} blocks, {taken} bytes");
            assert_eq!(tier.holds(fingerprint(), &hashes(&chain(seed, 1))), 1, "block {seed}");
        }
        assert!(tier.paths()[0].limited_to.is_some());
    }
}

#[tokio::test]
async fn full_heads_that_writers_still_use_do_not_stop_a_log_on_a_small_disk() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    // Three heads fit.
    tier.shared.hooks.fill_disk(60 << 10);
    let log = tier.logs().remove(0).unwrap();
    let mut in_use = Vec::new();
    for seed in 0..3 * SMALLEST {
        store(&*tier, chain(seed, 1)).await;
        if seed == SMALLEST || seed == 2 * SMALLEST {
            let heads: Vec<_> = log.lock().heads.values().map(|open| open.head.clone()).collect();
            in_use.extend(heads);
        }
    }
    assert_eq!(log.lock().segments.len(), 3, "one is sealed, and two are in use");
    store(&*tier, chain(90, 1)).await;
    let held = |seed| tier.holds(fingerprint(), &hashes(&chain(seed, 1)));
    assert_eq!((held(0), held(SMALLEST), held(90)), (0, 1, 1), "the sealed one was reclaimed");
    drop(in_use);
    for seed in 91..120 {
        store(&*tier, chain(seed, 1)).await;
    }
}

#[tokio::test]
async fn one_segment_that_takes_all_space_is_replaced_by_smaller_ones() {
    let folder = tempfile::tempdir().unwrap();
    let tier = reopened_on_a_full_disk(folder.path(), 1, 0).await;
    let before = tier.usage().bytes;
    for seed in 0..40 {
        store(&*tier, chain(seed, 1)).await;
        let Usage { bytes, blocks, .. } = tier.usage();
        assert!(bytes <= before && blocks > seed.min(2 * SMALLEST), "after block {seed}: {blocks} blocks");
    }
    assert_eq!(tier.holds(fingerprint(), &hashes(&chain(39, 1))), 1);
}

#[tokio::test(start_paused = true)]
async fn a_full_disk_costs_no_block_when_one_small_segment_is_left() {
    let folder = tempfile::tempdir().unwrap();
    write_smallest_segment(folder.path()).await;
    let (tier, _) = open(folder.path());
    tier.shared.hooks.fill_disk(tier.usage().bytes);
    for seed in 0..5 {
        let answers = tier.store(chain(seed, 1)).await;
        let [Err(StoreError::Io(error))] = &answers[..] else { panic!("{answers:?}") };
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(tier.usage().blocks, SMALLEST);
        tokio::time::advance(Duration::from_secs(2)).await;
    }
    let kept = hashes(&chain(1_000, SMALLEST as usize));
    assert!(all(&load(&*tier, fingerprint(), kept).await), "its blocks are still read");
    tier.shared.hooks.clear_disk();
    store(&*tier, chain(9, 1)).await;
    assert_eq!(tier.usage().blocks, SMALLEST + 1);
}

#[tokio::test]
async fn a_full_disk_costs_one_segment_per_new_one() {
    let folder = tempfile::tempdir().unwrap();
    let tier = reopened_on_a_full_disk(folder.path(), 3, 0).await;
    let before = tier.usage().bytes;
    store(&*tier, chain(1, 1)).await;
    assert_eq!(tier.usage().blocks, 2 * FULL + 1, "the oldest segment made room for the new one");
    for seed in 2..100 {
        store(&*tier, chain(seed, 5)).await;
        let Usage { bytes, blocks, .. } = tier.usage();
        assert!(bytes <= before && blocks >= 5, "after chain {seed}: {blocks} blocks, {bytes} of {before} bytes");
    }
    assert_eq!(tier.holds(fingerprint(), &hashes(&chain(99, 5))), 5);
    // A writer may still copy blocks in use to the last head, which others have written to meanwhile.
    let log = tier.logs().remove(0).unwrap();
    log.wait(&mut log.lock(), |state| state.rotating);
    let held = tier.usage().blocks;
    drop(log);
    drop(tier);
    let (tier, _) = open(folder.path());
    assert_eq!(tier.usage().blocks, held, "segments of any size are recovered");
}

#[tokio::test(start_paused = true)]
async fn a_log_that_a_full_disk_limits_is_reported_until_space_is_free() {
    let limited_to = |tier: &DiskTier| tier.paths()[0].limited_to;
    // Without `min_free_bytes`, the filesystem refuses a segment; with it, the log shrinks before.
    for min_free_bytes in [0, 1 << 30] {
        let folder = tempfile::tempdir().unwrap();
        let (tier, _) = open_with(folder.path(), Settings { capacity_bytes: 2 << 20, min_free_bytes, ..settings() });
        tier.shared.hooks.leave_space(4 << 30);
        store(&*tier, (0..20).flat_map(|seed| chain(seed, 20)).collect()).await;
        assert_eq!(limited_to(&tier), None);
        if min_free_bytes == 0 {
            tier.shared.hooks.fill_disk(tier.usage().bytes);
        } else {
            tier.shared.hooks.leave_space(TOO_LITTLE);
        }
        store(&*tier, chain(100, 20)).await;
        assert_eq!(limited_to(&tier), Some(tier.usage().bytes));

        tier.shared.hooks.clear_disk();
        tier.shared.hooks.leave_space(4 << 30);
        for _ in 0..100_000 {
            if limited_to(&tier).is_none() {
                break;
            }
            tokio::time::advance(Duration::from_millis(200)).await;
            thread::sleep(Duration::from_millis(1));
        }
        assert_eq!(limited_to(&tier), None, "it is checked without a write");
    }
}

#[tokio::test]
async fn free_space_below_one_segment_is_used_before_blocks_are_removed() {
    let folder = tempfile::tempdir().unwrap();
    let tier = reopened_on_a_full_disk(folder.path(), 2, 40 << 10).await;
    store(&*tier, chain(1, 5)).await;
    assert_eq!(tier.usage().blocks, 2 * FULL + 5);
}

#[tokio::test(start_paused = true)]
async fn a_segment_without_space_for_it_is_not_attempted() {
    // Too little is free for the smallest segment, or what is free is to stay free.
    for (left, min_free_bytes) in [(8 << 10, 0), (40 << 10, 1 << 30)] {
        let folder = tempfile::tempdir().unwrap();
        write_smallest_segment(folder.path()).await;
        let (tier, _) = open_with(folder.path(), Settings { min_free_bytes, ..settings() });
        tier.shared.hooks.fill_disk(tier.usage().bytes + left);
        for seed in 0..5 {
            let answers = tier.store(chain(seed, 1)).await;
            let [Err(StoreError::Io(error))] = &answers[..] else { panic!("{answers:?}") };
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            tokio::time::advance(Duration::from_secs(2)).await;
        }
        assert_eq!((tier.usage().blocks, tier.shared.hooks.reservations()), (SMALLEST, 0), "{left} bytes are free");
    }
}

#[tokio::test]
async fn a_full_disk_keeps_its_free_space_while_the_log_replaces_segments() {
    let folder = tempfile::tempdir().unwrap();
    let min_free_bytes = 60 << 10;
    let (tier, _) = open_with(folder.path(), Settings { capacity_bytes: 2 << 20, min_free_bytes, ..settings() });
    store(&*tier, chain(1_000, 4 * FULL as usize)).await;
    // More than a segment is free, but not beyond what is to stay free.
    let limit = tier.usage().bytes + (10 << 10);
    tier.shared.hooks.leave_space(limit + min_free_bytes);
    for seed in 0..40 {
        store(&*tier, chain(seed, 10)).await;
        let Usage { bytes, blocks, .. } = tier.usage();
        assert!(bytes <= limit && blocks >= 2 * FULL, "after chain {seed}: {blocks} blocks, {bytes} of {limit} bytes");
    }
    let lowest = tier.shared.hooks.lowest_free().unwrap();
    assert!(lowest >= min_free_bytes, "{lowest} bytes were free");
    assert_eq!(tier.holds(fingerprint(), &hashes(&chain(39, 10))), 10);
}

#[tokio::test]
async fn an_empty_log_takes_only_what_may_be_taken() {
    let min_free_bytes = 100 << 10;
    let on_disk_with = async |beyond: u64| {
        let folder = tempfile::tempdir().unwrap();
        let (tier, _) = open_with(folder.path(), Settings { capacity_bytes: 2 << 20, min_free_bytes, ..settings() });
        tier.shared.hooks.leave_space(min_free_bytes + beyond);
        let answers = tier.store(chain(1, 5)).await;
        (folder, tier, answers)
    };
    let (_folder, tier, answers) = on_disk_with(40 << 10).await;
    assert!(answers.iter().all(Result::is_ok), "a small segment fits: {answers:?}");
    for seed in 2..20 {
        store(&*tier, chain(seed, 1)).await;
    }
    let lowest = tier.shared.hooks.lowest_free().unwrap();
    assert!(lowest >= min_free_bytes, "{lowest} bytes were free");

    let (_folder, tier, answers) = on_disk_with(8 << 10).await;
    let Some(Err(StoreError::Io(error))) = answers.first() else { panic!("{answers:?}") };
    assert_eq!(error.kind(), io::ErrorKind::StorageFull);
    assert!(error.to_string().contains("the disk is full"), "{error}");
    assert_eq!((tier.usage().blocks, tier.shared.hooks.reservations()), (0, 0));
}

#[tokio::test]
async fn a_log_of_small_segments_writes_on_when_others_fill_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    for seed in 0..5 {
        let (tier, _) = open(folder.path());
        store(&*tier, chain(1_000 + seed, 6)).await;
    }
    let settings = Settings { capacity_bytes: 2 << 20, min_free_bytes: 1 << 30, ..settings() };
    let (tier, _) = open_with(folder.path(), settings);
    let before = tier.usage().bytes;
    tier.shared.hooks.leave_space(TOO_LITTLE);
    for seed in 0..20 {
        store(&*tier, chain(seed, 3)).await;
        let Usage { bytes, blocks, .. } = tier.usage();
        assert!(bytes <= before && blocks >= 12, "after chain {seed}: {blocks} blocks, {bytes} of {before} bytes");
    }
    let lowest = tier.shared.hooks.lowest_free().unwrap();
    assert!(lowest >= TOO_LITTLE - before, "{lowest} bytes were free");
    assert_eq!(tier.holds(fingerprint(), &hashes(&chain(19, 3))), 3);
}

#[tokio::test]
async fn a_small_log_of_large_blocks_writes_on_when_others_fill_the_disk() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { capacity_bytes: 4 * (64 << 10), min_free_bytes: 1 << 30, ..settings() };
    let (tier, _) = open_with(folder.path(), settings);
    tier.shared.hooks.leave_space(4 << 30);
    // One block is in each segment.
    let block = |seed| chain_of(fingerprint(), seed, 1, 40_000);
    for seed in 0..4 {
        store(&*tier, block(seed)).await;
    }
    tier.shared.hooks.leave_space(TOO_LITTLE);
    for seed in 4..14 {
        store(&*tier, block(seed)).await;
        assert!(tier.usage().blocks >= 2, "after block {seed}");
        assert_eq!(tier.holds(fingerprint(), &hashes(&block(seed))), 1);
    }
}

#[tokio::test]
async fn pins_survive_a_full_disk() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { capacity_bytes: 2 << 20, min_free_bytes: 1 << 30, ..settings() };
    let (tier, _) = open_with(folder.path(), settings);
    tier.shared.hooks.leave_space(4 << 30);
    let retention = BlockRetention { pinned: Some(Date::from_unix(1_000)), ..BlockRetention::default() };
    let attrs = BlockAttrs { retention, ..BlockAttrs::default() };
    let pinned: Vec<Block> = chain(100, 4).into_iter().map(|block| block.with_attrs(attrs)).collect();
    store(&*tier, pinned.clone()).await;
    store(&*tier, chain(101, 100)).await;
    tier.shared.hooks.leave_space(TOO_LITTLE);
    for seed in 0..60 {
        store(&*tier, chain(seed, 10)).await;
    }
    idle(&tier).await;
    assert!(all(&load(&*tier, fingerprint(), hashes(&pinned)).await), "no load has read them");
}

#[tokio::test]
async fn a_large_block_gets_a_head_that_it_fits_into() {
    let folder = tempfile::tempdir().unwrap();
    let tier = reopened_on_a_full_disk(folder.path(), 5, 20 << 10).await;
    store(&*tier, chain_of(fingerprint(), 1, 1, 40_000)).await;
    assert_eq!(tier.usage().blocks, 4 * FULL + 1, "the free 20 KiB do not suffice for it");
}

#[tokio::test(start_paused = true)]
async fn space_that_others_take_costs_one_segment_at_most() {
    let folder = tempfile::tempdir().unwrap();
    let tier = reopened_on_a_full_disk(folder.path(), 6, 0).await;
    tier.shared.hooks.refuse_segments();
    for seed in 0..5 {
        assert!(matches!(tier.store(chain(seed, 1)).await[..], [Err(StoreError::Io(_))]));
        tokio::time::advance(Duration::from_secs(2)).await;
    }
    assert_eq!(tier.usage().blocks, 5 * FULL);
    tier.shared.hooks.clear_disk();
    store(&*tier, chain(9, 1)).await;
}
