//! Domains side by side in one pool.

use super::*;
use crate::block::DomainId;
use crate::tier::{Quota, Shares};

const ONE: DomainId = DomainId::from_bytes([1; 16]);
const OTHER: DomainId = DomainId::from_bytes([2; 16]);

fn divided(capacity: usize, shares: &Shares) -> Pool {
    let (pool, ..) = pool(capacity);
    pool.divide(shares.at(Level::G1, 1));
    pool
}

fn numbered(n: u16) -> SequenceHash {
    SequenceHash::from_bytes(*blake3::hash(&n.to_le_bytes()).as_bytes().first_chunk().unwrap())
}

/// Blocks of a domain that nobody follows, registered one after the other.
fn fill(pool: &Pool, domain: DomainId, blocks: std::ops::Range<u16>) -> Vec<CachedBlocks> {
    let custody = Custody { domain, ..Custody::default() };
    let one = |n| {
        let slot = pool.allocate(1).expect("nothing is held").pop().unwrap();
        pool.register(vec![slot.complete(numbered(n), None, custody)])
    };
    blocks.map(one).collect()
}

fn here(pool: &Pool, blocks: std::ops::Range<u16>) -> usize {
    blocks.filter(|n| pool.holds(&[numbered(*n)]) == 1).count()
}

#[test]
fn a_flood_leaves_what_another_domain_is_guaranteed() {
    let quota = Quota { guaranteed: 40, maximum: None };
    let pool = divided(100, &Shares::default().promise(ONE, Level::G1, quota));
    drop(fill(&pool, ONE, 0..40));
    for n in 1_000..2_000 {
        drop(fill(&pool, OTHER, n..n + 1));
        // What is used again and again has no more right to another's place.
        drop(pool.matched(&[numbered(1_000)]));
    }
    assert_eq!((here(&pool, 0..40), here(&pool, 1_000..2_000)), (40, 60));
    // Beyond its guarantee it takes part like all others: the one with most over gives.
    drop(fill(&pool, ONE, 100..110));
    assert_eq!((here(&pool, 0..40), here(&pool, 100..110), here(&pool, 1_000..2_000)), (40, 10, 50));
}

#[test]
fn a_maximum_binds_while_there_is_room_and_leaves_what_is_held() {
    let quota = Quota { guaranteed: 0, maximum: Some(30) };
    let pool = divided(100, &Shares::default().promise(ONE, Level::G1, quota));
    drop(fill(&pool, OTHER, 1_000..1_020));
    let held = fill(&pool, ONE, 0..35);
    assert_eq!(here(&pool, 0..35), 35, "what runs is not robbed");
    drop(held);
    assert_eq!((here(&pool, 0..35), here(&pool, 1_000..1_020)), (30, 20));
    drop(fill(&pool, ONE, 100..150));
    assert_eq!((here(&pool, 0..35) + here(&pool, 100..150), here(&pool, 1_000..1_020)), (30, 20));
    assert_eq!(pool.available(), 100);
}

#[test]
fn running_work_finds_room_where_only_guarantees_are_left() {
    let quota = Quota { guaranteed: 8, maximum: None };
    let pool = divided(10, &Shares::default().promise(ONE, Level::G1, quota));
    drop(fill(&pool, ONE, 0..8));
    assert!(pool.allocate(5).is_some_and(|slots| slots.len() == 5), "what is only cached yields, or it would hang");
}
