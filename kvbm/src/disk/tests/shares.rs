//! Quotas: floods, limits, restarts.

use super::*;
use crate::block::{Block, DomainId};
use crate::tier::Quota;

const KIB: u64 = 1 << 10;

fn domain(n: u8) -> DomainId {
    DomainId::from_bytes([n; 16])
}

fn of(n: u8, seed: u64, count: usize) -> Vec<Block> {
    chain(seed, count).into_iter().map(|block| block.in_domain(domain(n))).collect()
}

fn quotas_of_tenant(guaranteed: u64, maximum: Option<u64>) -> Quotas {
    Quotas::default().with_quota(domain(1), Level::G3, Quota { guaranteed, maximum })
}

/// A log of two megabytes on each of some paths.
async fn open_sharing(paths: &[&TempDir], quotas: &Quotas) -> (Arc<DiskTier>, Arc<EventLog>) {
    let settings = Settings { capacity_bytes: 2 << 20, ..settings() };
    let paths: Vec<_> = paths.iter().map(|folder| (folder.path().to_owned(), settings)).collect();
    let events = Arc::new(EventLog::new(Epoch(1)));
    let tier = DiskTier::open_in_background(&paths, quotas, events.clone(), None).unwrap();
    tier.recovered().await;
    (tier, events)
}

/// Stores seven megabytes in the shared domain.
async fn flood(tier: &DiskTier, seed: u64) {
    for seed in seed..seed + 100 {
        store(tier, chain(seed, 20)).await;
    }
    idle(tier).await;
}

#[tokio::test]
async fn a_flood_leaves_the_guarantee_of_another_domain_intact() {
    let folders = [(); 2].map(|()| tempfile::tempdir().unwrap());
    let blocks = of(1, 1_000, 200);
    for (paths, guaranteed, stays) in
        [(&folders[..1], 800 * KIB, true), (&folders[..1], 0, false), (&folders[..], 1_600 * KIB, true)]
    {
        let paths: Vec<&TempDir> = paths.iter().collect();
        let quotas = quotas_of_tenant(guaranteed, None);
        let (tier, _) = open_sharing(&paths, &quotas).await;
        store(&*tier, blocks.clone()).await;
        flood(&tier, 0).await;
        let usage = tier.usage();
        assert!(usage.bytes <= usage.capacity.unwrap(), "{usage:?}");
        assert_eq!(all(&load(&*tier, fingerprint(), hashes(&blocks)).await), stays, "{guaranteed} guaranteed");
        drop(tier);
        let (tier, events) = open_sharing(&paths, &quotas).await;
        flood(&tier, 500).await;
        assert_eq!(tier.holds(fingerprint(), &hashes(&blocks)) == 200, stays, "{guaranteed} guaranteed, restarted");
        assert_eq!(announced(&events, Level::G3).len() as u64, tier.usage().blocks);
    }
}

#[tokio::test]
async fn a_domain_over_its_limit_reclaims_its_own_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_sharing(&[&folder], &quotas_of_tenant(0, Some(300 * KIB))).await;
    let others = chain(5_000, 100);
    store(&*tier, others.clone()).await;
    for seed in 0..50 {
        store(&*tier, of(1, seed, 20)).await;
    }
    assert!(all(&load(&*tier, fingerprint(), hashes(&others)).await));
    let held: usize = (0..50).map(|seed| tier.holds(fingerprint(), &hashes(&of(1, seed, 20)))).sum();
    // Whole segments of twelve to sixteen blocks.
    assert!((40..=100).contains(&held), "{held} blocks of 3.5 KiB each");
    assert!(all(&load(&*tier, fingerprint(), hashes(&of(1, 49, 20))).await), "the latest stay");
}

#[tokio::test]
async fn blocks_from_before_quotas_are_recovered_and_reclaimed() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_sharing(&[&folder], &Quotas::default()).await;
    let mixed: Vec<Block> = [of(1, 1, 10), of(2, 2, 10)].concat();
    store(&*tier, mixed.clone()).await;
    drop(tier);
    let (tier, _) = open_sharing(&[&folder], &quotas_of_tenant(800 * KIB, None)).await;
    assert!(all(&load(&*tier, fingerprint(), hashes(&mixed)).await));
    drop(tier);
    let (tier, _) = open_sharing(&[&folder], &Quotas::default()).await;
    flood(&tier, 100).await;
    assert_eq!(tier.holds(fingerprint(), &hashes(&mixed)), 0);
}

#[tokio::test]
async fn a_tombstone_is_kept_as_long_as_its_block() {
    let folder = tempfile::tempdir().unwrap();
    let quotas = quotas_of_tenant(800 * KIB, None);
    let (tier, _) = open_sharing(&[&folder], &quotas).await;
    let blocks = of(1, 1_000, 20);
    store(&*tier, blocks.clone()).await;
    tier.discard(fingerprint(), blocks[0].header.hash);
    idle(&tier).await;
    flood(&tier, 0).await;
    drop(tier);
    let (tier, _) = open_sharing(&[&folder], &quotas).await;
    let held = |blocks: &[Block]| tier.holds(fingerprint(), &hashes(blocks));
    assert_eq!((held(&blocks[..1]), held(&blocks[1..])), (0, 19));
}

#[tokio::test]
async fn segments_of_tombstones_alone_are_kept_over_restarts() {
    let folder = tempfile::tempdir().unwrap();
    let quotas = quotas_of_tenant(800 * KIB, None);
    let blocks = of(1, 1_000, 20);
    let (tier, _) = open_sharing(&[&folder], &quotas).await;
    store(&*tier, blocks.clone()).await;
    drop(tier);
    let (tier, _) = open_sharing(&[&folder], &quotas).await;
    tier.discard(fingerprint(), blocks[0].header.hash);
    idle(&tier).await;
    drop(tier);
    let (tier, _) = open_sharing(&[&folder], &quotas).await;
    flood(&tier, 0).await;
    drop(tier);
    let (tier, _) = open_sharing(&[&folder], &quotas).await;
    let held = |blocks: &[Block]| tier.holds(fingerprint(), &hashes(blocks));
    assert_eq!((held(&blocks[..1]), held(&blocks[1..])), (0, 19));
}

#[tokio::test]
async fn tombstones_of_several_domains_outlive_their_blocks() {
    for order in [[1, 2], [2, 1]] {
        let folder = tempfile::tempdir().unwrap();
        let blocks = [of(1, 1_000, 20), of(2, 2_000, 20)];
        // Without quotas, and each opening starts a segment.
        for which in order {
            let (tier, _) = open_sharing(&[&folder], &Quotas::default()).await;
            store(&*tier, blocks[which - 1].clone()).await;
        }
        let (tier, _) = open_sharing(&[&folder], &Quotas::default()).await;
        for blocks in &blocks {
            tier.discard(fingerprint(), blocks[0].header.hash);
        }
        idle(&tier).await;
        drop(tier);
        let quotas = quotas_of_tenant(800 * KIB, None);
        let (tier, _) = open_sharing(&[&folder], &quotas).await;
        flood(&tier, 0).await;
        drop(tier);
        let (tier, _) = open_sharing(&[&folder], &quotas).await;
        let held = |blocks: &[Block]| tier.holds(fingerprint(), &hashes(blocks));
        assert_eq!((held(&blocks[0][..1]), held(&blocks[0][1..])), (0, 19), "{order:?}");
    }
}
