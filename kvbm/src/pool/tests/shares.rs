//! Quotas of several domains in one pool.

use super::*;
use crate::block::DomainId;
use crate::tier::{Quota, Quotas};

const ONE: DomainId = DomainId::from_bytes([1; 16]);
const OTHER: DomainId = DomainId::from_bytes([2; 16]);

fn divided(capacity: usize, quotas: &Quotas) -> BlockPool {
    let (pool, ..) = pool(capacity);
    pool.set_quotas(quotas.for_tier(Level::G1, 1));
    pool
}

fn numbered(n: u16) -> SequenceHash {
    SequenceHash::from_bytes(*blake3::hash(&n.to_le_bytes()).as_bytes().first_chunk().unwrap())
}

/// Registers root blocks of a domain, one after the other.
fn fill(pool: &BlockPool, domain: DomainId, blocks: std::ops::Range<u16>) -> Vec<CachedBlocks> {
    let attrs = BlockAttrs { domain, ..BlockAttrs::default() };
    let one = |n| {
        let slot = pool.allocate(1).expect("nothing is held").pop().unwrap();
        pool.register(vec![slot.complete(numbered(n), None, attrs)])
    };
    blocks.map(one).collect()
}

fn count_resident(pool: &BlockPool, blocks: std::ops::Range<u16>) -> usize {
    blocks.filter(|n| pool.holds(&[numbered(*n)]) == 1).count()
}

#[test]
fn a_flood_leaves_another_domains_guarantee() {
    let quota = Quota { guaranteed: 40, maximum: None };
    let pool = divided(100, &Quotas::default().with_quota(ONE, Level::G1, quota));
    drop(fill(&pool, ONE, 0..40));
    for n in 1_000..2_000 {
        drop(fill(&pool, OTHER, n..n + 1));
        // Frequent use gives no claim to another domain's guarantee.
        drop(pool.lookup(&[numbered(1_000)]));
    }
    assert_eq!((count_resident(&pool, 0..40), count_resident(&pool, 1_000..2_000)), (40, 60));
    // Beyond its guarantee a domain competes like all others: the one furthest above its guarantee loses blocks.
    drop(fill(&pool, ONE, 100..110));
    assert_eq!(
        (count_resident(&pool, 0..40), count_resident(&pool, 100..110), count_resident(&pool, 1_000..2_000)),
        (40, 10, 50)
    );
}

#[test]
fn a_maximum_applies_with_free_slots_and_spares_held_blocks() {
    let quota = Quota { guaranteed: 0, maximum: Some(30) };
    let pool = divided(100, &Quotas::default().with_quota(ONE, Level::G1, quota));
    drop(fill(&pool, OTHER, 1_000..1_020));
    let held = fill(&pool, ONE, 0..35);
    assert_eq!(count_resident(&pool, 0..35), 35, "held blocks are not evicted");
    drop(held);
    assert_eq!((count_resident(&pool, 0..35), count_resident(&pool, 1_000..1_020)), (30, 20));
    drop(fill(&pool, ONE, 100..150));
    assert_eq!(
        (count_resident(&pool, 0..35) + count_resident(&pool, 100..150), count_resident(&pool, 1_000..1_020)),
        (30, 20)
    );
    assert_eq!(pool.available(), 100);
}

#[test]
fn allocation_may_evict_guaranteed_blocks() {
    let quota = Quota { guaranteed: 8, maximum: None };
    let pool = divided(10, &Quotas::default().with_quota(ONE, Level::G1, quota));
    drop(fill(&pool, ONE, 0..8));
    assert!(
        pool.allocate(5).is_some_and(|slots| slots.len() == 5),
        "blocks that are only cached are evicted, or the request would hang"
    );
}
