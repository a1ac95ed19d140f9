//! The hash table alone: growing, shrinking and full buckets, and random changes beside a map.

use super::super::sync::Ordering;
use super::super::table::{BUCKET_SLOTS, Inserted, Table};
use crate::hash::splitmix64;
use proptest::prelude::*;
use std::collections::HashMap;

/// Positions serve as hashes.
fn key(position: u32) -> u64 {
    splitmix64(u64::from(position))
}

fn keys(positions: &[u32]) -> Vec<u64> {
    positions.iter().map(|position| key(*position)).collect()
}

fn insert(table: &Table, key: u64, position: u32) -> Inserted {
    table.insert(table.state(Ordering::Relaxed).place(key), position, |here| here == position)
}

fn remove(table: &Table, key: u64, position: u32) -> bool {
    table.remove(table.state(Ordering::Relaxed).place(key), position)
}

#[test]
fn a_table_without_addresses_for_another_bucket_does_not_grow() {
    let table = Table::up_to(1).unwrap();
    assert!(!table.grow(|_| panic!("no entry moves")));
    assert_eq!(table.buckets(), 1);
    assert!(Table::up_to(1 << 15).unwrap().grow(|_| Vec::new()));
}

#[test]
fn a_table_keeps_its_entries_when_it_grows_and_shrinks() {
    let check = |table: &Table, positions: u32| {
        for position in 0..positions {
            assert_eq!(table.find(key(position), |here| here == position), Some(position));
            assert_eq!(insert(table, key(position), position), Inserted::Known);
        }
        assert_eq!(table.find(key(positions), |here| here == positions), None);
    };
    let (table, mut positions) = (Table::new().unwrap(), 0);
    // From one bucket to so many that tags change, and so full that groups overflow.
    for buckets in 1..300 {
        assert_eq!(table.buckets(), buckets);
        let wanted = (buckets * BUCKET_SLOTS * 2 / 5) as u32;
        (positions..wanted).for_each(|position| assert_eq!(insert(&table, key(position), position), Inserted::New));
        positions = wanted;
        if buckets.is_multiple_of(37) || buckets < 20 {
            check(&table, positions);
        }
        table.grow(keys);
    }
    for buckets in (1..300).rev() {
        let wanted = (buckets * BUCKET_SLOTS * 3 / 10) as u32;
        (wanted..positions).for_each(|position| assert!(remove(&table, key(position), position)));
        positions = positions.min(wanted);
        assert!(table.shrink(keys));
        assert_eq!(table.buckets(), buckets);
        if buckets.is_multiple_of(37) || buckets < 20 {
            check(&table, positions);
        }
    }
    assert!(!table.shrink(keys), "it has one bucket");
}

#[test]
fn a_full_bucket_takes_no_entry_and_is_not_merged() {
    let table = Table::new().unwrap();
    let keys = |positions: &[u32]| vec![7; positions.len()];
    let full = BUCKET_SLOTS as u32;
    (0..full).for_each(|position| assert_eq!(insert(&table, 7, position), Inserted::New));
    assert_eq!(insert(&table, 7, full), Inserted::Full);
    // Equal keys stay together.
    table.grow(keys);
    assert_eq!(insert(&table, 7, full), Inserted::Full);
    assert!(!table.shrink(keys), "there are too many entries");
    (0..full).for_each(|position| assert!(remove(&table, 7, position)));
    assert_eq!((table.shrink(keys), table.find(7, |_| true)), (true, None));
}

#[test]
fn hashes_are_read_only_where_tags_change() {
    let table = Table::new().unwrap();
    let read = std::cell::Cell::new(0);
    let count = |positions: &[u32]| {
        read.set(read.get() + positions.len());
        keys(positions)
    };
    // One entry per group at most times, so nothing overflows.
    (0..40).for_each(|position| assert_eq!(insert(&table, key(position), position), Inserted::New));
    let mut levels = Vec::new();
    for buckets in 1..64_usize {
        let before = read.get();
        table.grow(count);
        if read.get() > before {
            levels.push(buckets.ilog2());
        }
    }
    levels.dedup();
    assert_eq!((levels, read.get()), (vec![3], 40), "each entry once, when eight buckets become sixteen");
}

proptest! {
    #[test]
    fn a_table_answers_as_a_map_does(
        changes in proptest::collection::vec((0_u8..12, 0_u32..2000), 1..3000),
        crowded in any::<bool>(),
    ) {
        // Few distinct keys fill groups.
        let key = |position: u32| splitmix64(u64::from(if crowded { position % 37 } else { position }));
        let keys = |positions: &[u32]| positions.iter().map(|position| key(*position)).collect::<Vec<_>>();
        let (table, mut map) = (Table::new().unwrap(), HashMap::new());
        for (change, position) in changes {
            match change {
                0..6 => {
                    let known = map.insert(position, key(position)).is_some();
                    let answer = insert(&table, key(position), position);
                    if answer == Inserted::Full {
                        map.remove(&position);
                    }
                    prop_assert!(answer == Inserted::Full || (answer == Inserted::Known) == known);
                }
                6..9 => prop_assert_eq!(remove(&table, key(position), position), map.remove(&position).is_some()),
                9..11 => _ = table.grow(keys),
                _ => _ = table.shrink(keys),
            }
        }
        for position in 0..2000 {
            let found = table.find(key(position), |here| here == position);
            prop_assert_eq!(found.is_some(), map.contains_key(&position));
        }
    }
}
