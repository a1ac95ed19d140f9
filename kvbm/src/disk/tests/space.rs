//! Space: what is reclaimed when the log is full, and when the device has no space.

use super::*;
use crate::block::{Block, BlockAttrs, BlockRetention, Date};
use crate::tier::Usage;

fn small() -> Settings {
    Settings { capacity_bytes: 6 * (64 << 10), ..settings() }
}

#[tokio::test]
async fn reclaiming_keeps_blocks_in_use_and_their_parents() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, events) = open_with(folder.path(), small());
    let (used, unused) = (chain(100, 4), chain(101, 4));
    store(&*tier, used.clone()).await;
    store(&*tier, unused.clone()).await;
    for seed in 0..30 {
        store(&*tier, chain(seed, 10)).await;
        // Only the leaf is read; its parents are kept because of it.
        assert!(all(&load(&*tier, fingerprint(), hashes(&used[3..])).await), "after chain {seed}");
    }
    assert!(all(&load(&*tier, fingerprint(), hashes(&used)).await));
    assert_eq!(tier.holds(fingerprint(), &hashes(&unused)), 0);
    idle(&tier).await;
    let held = announced(&events, Level::G3);
    drop(tier);
    let (_tier, events) = open_with(folder.path(), small());
    assert_eq!(announced(&events, Level::G3), held, "carried over blocks are found at their new location");
}

#[tokio::test]
async fn parents_of_blocks_in_later_segments_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let system_prompt = chain(100, 2);
    store(&*tier, system_prompt.clone()).await;
    for seed in 0..40 {
        let mut conversation = chain(seed, 8);
        let first = &conversation[0];
        let parent = Some(system_prompt[1].header.hash);
        conversation[0] = Block::new(first.header.hash, parent, fingerprint(), first.payload.clone());
        store(&*tier, conversation).await;
    }
    assert!(all(&load(&*tier, fingerprint(), hashes(&system_prompt)).await), "never read, but parents of later blocks");
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
    let answers = tier.store(chain(9, 1)).await;
    let [Err(StoreError::Io(error))] = &answers[..] else { panic!("{answers:?}") };
    assert!(error.to_string().contains("the disk is full"), "{error}");
    assert_eq!(tier.usage().blocks, 20, "all segments together would not suffice");
    tier.shared.hooks.leave_space(4 << 30);
    tokio::time::advance(Duration::from_secs(2)).await;
    store(&*tier, chain(9, 1)).await;
}

/// Bytes that are less than the `min_free_bytes` of a test, and more than a segment.
const TOO_LITTLE: u64 = 512 << 20;

/// Number of blocks that fill a segment.
const FULL: u64 = 15;

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

#[tokio::test(start_paused = true)]
async fn a_full_disk_costs_no_block_when_one_segment_is_left() {
    let folder = tempfile::tempdir().unwrap();
    let tier = reopened_on_a_full_disk(folder.path(), 1, 0).await;
    for seed in 0..5 {
        let answers = tier.store(chain(seed, 1)).await;
        let [Err(StoreError::Io(error))] = &answers[..] else { panic!("{answers:?}") };
        assert_eq!(error.kind(), io::ErrorKind::StorageFull);
        assert_eq!(tier.usage().blocks, FULL);
        tokio::time::advance(Duration::from_secs(2)).await;
    }
    assert!(all(&load(&*tier, fingerprint(), hashes(&chain(1_000, FULL as usize))).await), "its blocks are still read");
    tier.shared.hooks.clear_disk();
    store(&*tier, chain(9, 1)).await;
    assert_eq!(tier.usage().blocks, FULL + 1);
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
    let held = tier.usage().blocks;
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
        drop(reopened_on_a_full_disk(folder.path(), 1, 0).await);
        let (tier, _) = open_with(folder.path(), Settings { min_free_bytes, ..settings() });
        tier.shared.hooks.fill_disk(tier.usage().bytes + left);
        for seed in 0..5 {
            let answers = tier.store(chain(seed, 1)).await;
            let [Err(StoreError::Io(error))] = &answers[..] else { panic!("{answers:?}") };
            assert_eq!(error.kind(), io::ErrorKind::StorageFull);
            tokio::time::advance(Duration::from_secs(2)).await;
        }
        assert_eq!((tier.usage().blocks, tier.shared.hooks.reservations()), (FULL, 0), "{left} bytes are free");
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
    // The only full segment is not removed for more blocks.
    assert!(tier.store(chain(2, 20)).await.iter().any(Result::is_err));
    assert!(all(&load(&*tier, fingerprint(), hashes(&chain(1, 5))).await));
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

#[tokio::test]
async fn pins_survive_reclaiming_and_dates_survive_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let date = |seconds| Some(Date::from_unix(seconds));
    let kept = |seed, retention: BlockRetention| -> Vec<Block> {
        let attrs = BlockAttrs { retention, ..BlockAttrs::default() };
        chain(seed, 4).into_iter().map(|block| block.with_attrs(attrs)).collect()
    };
    let pinned = kept(100, BlockRetention { expires: date(2_000), pinned: date(1_000), ..BlockRetention::default() });
    let (tier, _) = open_with(folder.path(), small());
    store(&*tier, pinned.clone()).await;
    let scan = async |tier: &DiskTier, seeds: std::ops::Range<u64>| {
        for seed in seeds {
            store(tier, chain(seed, 10)).await;
        }
    };
    scan(&tier, 0..40).await;
    assert_eq!(tier.holds(fingerprint(), &hashes(&pinned)), 4, "no load has read it");
    drop(tier);
    let (tier, events) = open_with(folder.path(), small());
    scan(&tier, 40..80).await;
    assert_eq!(tier.holds(fingerprint(), &hashes(&pinned)), 4, "also after a restart");
    assert_eq!((tier.expire(Date::from_unix(1_999)), tier.expire(Date::from_unix(2_000))), (0, 4));
    assert!(announced(&events, Level::G3).iter().all(|name| !hashes(&pinned).contains(name)));

    let ended = kept(101, BlockRetention { pinned: date(2_000), ..BlockRetention::default() });
    store(&*tier, ended.clone()).await;
    scan(&tier, 80..120).await;
    assert_eq!(tier.holds(fingerprint(), &hashes(&ended)), 0, "its pin had ended before");
}

#[tokio::test]
async fn blocks_in_use_without_space_are_spilled_if_wanted() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let (to, mut spilled) = mpsc::channel(1_000);
    let (hot, cold) = (chain(100, 18), chain(101, 18));
    let unwanted = hot[17].header.hash;
    tier.spill(move |of, name| of == fingerprint() && name != unwanted, to);
    store(&*tier, cold.clone()).await;
    store(&*tier, hot.clone()).await;
    let mut found = Vec::new();
    for seed in 0..30 {
        load(&*tier, fingerprint(), hashes(&hot)).await;
        store(&*tier, chain(seed, 10)).await;
        while let Ok(block) = spilled.try_recv() {
            assert!(block.check(block.header.hash, fingerprint()).is_ok());
            found.push(block.header.hash);
        }
    }
    let held = tier.holds(fingerprint(), &hashes(&hot));
    assert!((1..18).contains(&held), "a quarter of a segment is carried over: {held}");
    let lost = &hashes(&hot)[held..17];
    assert!(lost.iter().any(|name| found.contains(name)), "{} were lost, {} handed over", lost.len(), found.len());
    assert!(!found.contains(&unwanted));
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

#[tokio::test]
async fn a_block_is_a_miss_while_it_is_spilled() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let found = Arc::new(Mutex::new(Vec::new()));
    let index = tier.shared.index.clone();
    let looks = found.clone();
    let wants = move |fingerprint, name| {
        looks.lock().push(index.get(fingerprint, name).is_some());
        false
    };
    tier.spill(wants, mpsc::channel(1).0);
    let used = chain(100, 14);
    store(&*tier, used.clone()).await;
    assert!(all(&load(&*tier, fingerprint(), hashes(&used)).await));
    for seed in 0..30 {
        store(&*tier, chain(seed, 10)).await;
    }
    idle(&tier).await;
    let found = found.lock();
    assert!(!found.is_empty() && found.iter().all(|found| !found), "{found:?}");
}

#[tokio::test]
async fn a_block_carried_over_during_a_load_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let used = chain(100, 4);
    store(&*tier, used.clone()).await;
    let names = hashes(&used);
    let (missing, mut parts) = load::plan(&tier.shared, &tier.logs(), fingerprint(), &names);
    assert!(missing.is_empty());
    let segment = || tier.shared.index.get(fingerprint(), names[0]).unwrap().segment;
    let first = segment();
    for seed in 0.. {
        store(&*tier, chain(seed, 10)).await;
        if segment() != first {
            break;
        }
    }
    idle(&tier).await;
    let log = tier.logs().remove(0).unwrap();
    let loaded: Vec<_> = parts.remove(0).iter().flat_map(|part| log.load(fingerprint(), &names, part)).collect();
    assert_eq!(loaded.len(), 4);
    for (index, answer) in loaded {
        assert_eq!(answer.unwrap().expect("it is stored").payload, used[index].payload);
    }
}

#[tokio::test]
async fn a_block_as_large_as_a_segment_is_stored_despite_carry_over() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let retention = BlockRetention { pinned: Some(Date::from_unix(1_000)), ..BlockRetention::default() };
    let attrs = BlockAttrs { retention, ..BlockAttrs::default() };
    for seed in 100..200 {
        store(&*tier, chain(seed, 4).into_iter().map(|block| block.with_attrs(attrs)).collect()).await;
    }
    let last = || segment::numbers(folder.path()).unwrap().pop().unwrap();
    let before = last();
    for seed in 0..20 {
        store(&*tier, chain_of(fingerprint(), seed, 1, 55_000)).await;
    }
    // Two for each, and more where carry-over begins between them.
    let segments = last() - before;
    assert!(segments <= 60, "{segments} segments for twenty blocks");
}

#[tokio::test]
async fn carried_over_blocks_fit_into_a_segment() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    // One kilobyte each, of which every other one is in use: each is carried over separately, in one device block.
    let one = |seed| chain_of(fingerprint(), seed, 1, 400).remove(0);
    let blocks: Vec<Block> = (1_000..1_300).map(one).collect();
    let used: Vec<Block> = blocks.iter().step_by(2).cloned().collect();
    store(&*tier, blocks).await;
    for seed in 0..30 {
        load(&*tier, fingerprint(), hashes(&used)).await;
        store(&*tier, chain(seed, 10)).await;
        for number in segment::numbers(folder.path()).unwrap() {
            let bytes = fs::metadata(segment::path(folder.path(), number)).unwrap().len();
            assert!(bytes <= small().capacity_bytes / 6, "segment {number}: {bytes}");
        }
    }
    assert!(used.iter().any(|block| tier.holds(fingerprint(), &[block.header.hash]) == 1), "some were carried over");
}

#[tokio::test]
async fn parents_of_blocks_being_written_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let prefix = chain(100, 2);
    let log = tier.logs().remove(0).unwrap();
    store(&*tier, prefix.clone()).await;
    let segment = || tier.shared.index.get(fingerprint(), prefix[1].header.hash).unwrap().segment;
    let first = segment();
    let child = chain(200, 1).remove(0);
    let child = Block::new(child.header.hash, Some(prefix[1].header.hash), fingerprint(), child.payload.clone());
    for seed in 0.. {
        store(&*tier, chain(seed, 10)).await;
        idle(&tier).await;
        if log.lock().segments.keys().next().is_some_and(|oldest| *oldest == first) && log.lock().segments.len() > 4 {
            break;
        }
    }
    let _answer = log.queue.push(child, None).unwrap();
    let mut writer = log.queue.writer().unwrap();
    let (batch, step) = log.next(&mut writer).unwrap();
    let victim = log.next_victim(&mut log.lock(), 1 << 20).unwrap();
    log.reclaim(&victim);
    let write::Step::Write { head, at } = step else { panic!("there is room") };
    log.write(&head, at, &batch).unwrap();
    drop(writer);
    assert_eq!(tier.holds(fingerprint(), &hashes(&prefix)), 2, "its parents were carried over");
    assert_ne!(segment(), first);
}
