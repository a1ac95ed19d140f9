//! Blocks of a segment that is reclaimed: which of them are carried over, and what becomes of the others.

use super::*;
use crate::block::{BlockAttrs, BlockRetention, Date};

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

#[tokio::test]
async fn a_block_is_a_miss_while_it_is_spilled() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_with(folder.path(), small());
    let found = Arc::new(Mutex::new(Vec::new()));
    let index = tier.shared.index.clone();
    let looks = found.clone();
    let accepts = move |fingerprint, name| {
        looks.lock().push(index.get(fingerprint, name).is_some());
        false
    };
    tier.spill(accepts, mpsc::channel(1).0);
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
