//! The catalog: which copy of a block is read, and which objects are dropped.

use super::*;
use crate::block::Header;
use crate::event::Epoch;

fn section(object: u64, hashes: &[u8]) -> Section {
    let entry = |&n: &u8| BlockEntry {
        hash: SequenceHash::from_bytes([n; 16]),
        parent: None,
        offset: 0,
        length: 0,
        expires: None,
        pinned: None,
    };
    let entries = hashes.iter().map(entry).collect();
    let domain = DomainId::SHARED;
    let fingerprint = Fingerprint::from_bytes([0; 32]);
    Section { domain, fingerprint, object, idle: Duration::ZERO, entries }
}

fn catalog(limit: usize) -> Catalog {
    Catalog::new(Level::G4, limit, true, Arc::new(EventLog::new(Epoch(1))))
}

fn known(catalog: &Catalog) -> Vec<u8> {
    let held = |n: &u8| catalog.index.get(section(0, &[]).fingerprint, SequenceHash::from_bytes([*n; 16])).is_some();
    (0..20).filter(held).collect()
}

fn path(section: &Section) -> Path {
    Path::from(section.object.to_string())
}

#[test]
fn the_oldest_objects_are_dropped_in_any_insertion_order() {
    let catalog = catalog(6);
    assert!(catalog.insert_oldest(path, &section(2, &[3, 4])));
    assert!(catalog.insert_oldest(path, &section(1, &[1, 2])));
    assert!(!catalog.insert_oldest(path, &section(0, &[17, 18, 19])), "above the maximum number of blocks");
    catalog.insert_newest(path, &section(3, &[5, 6]));
    catalog.insert_newest(path, &section(4, &[7]));
    assert_eq!(known(&catalog), [3, 4, 5, 6, 7]);
}

#[test]
fn a_missing_object_drops_only_blocks_without_copies() {
    let catalog = catalog(10);
    catalog.insert_newest(path, &section(1, &[1, 2]));
    catalog.insert_newest(path, &section(2, &[2, 3]));
    catalog.mark_missing(0);
    assert_eq!(known(&catalog), [2, 3]);
    catalog.mark_missing(0);
    assert_eq!((catalog.missing_objects(), catalog.used_bytes()), (1, Header::LEN as u64));
}

#[test]
fn an_object_that_is_inserted_twice_is_known_once() {
    let catalog = catalog(10);
    catalog.insert_newest(path, &section(1, &[1, 2]));
    catalog.insert_newest(path, &section(1, &[1, 2]));
    assert!(catalog.insert_oldest(path, &section(1, &[1, 2])));
    assert_eq!(catalog.used_bytes(), Header::LEN as u64);
    catalog.mark_missing(0);
    assert_eq!((known(&catalog), catalog.used_bytes()), (vec![], 0), "it was inserted once");
    catalog.insert_newest(path, &section(1, &[1, 2]));
    assert_eq!(known(&catalog), [1, 2], "it can be inserted again");
}

#[test]
fn a_block_is_read_from_the_newest_remaining_object() {
    let catalog = catalog(20);
    let at = |n| catalog.index.get(section(0, &[]).fingerprint, SequenceHash::from_bytes([n; 16])).map(|at| at.object);
    catalog.insert_newest(path, &section(1, &[1, 2]));
    catalog.insert_newest(path, &section(2, &[2, 3]));
    assert!(catalog.insert_oldest(path, &section(3, &[1, 2, 3, 4])));
    assert_eq!([1, 2, 3, 4].map(at), [Some(0), Some(1), Some(1), Some(-1)]);
    catalog.mark_missing(1);
    assert_eq!([1, 2, 3, 4].map(at), [Some(0), Some(0), Some(-1), Some(-1)]);
    catalog.mark_missing(-1);
    assert_eq!(known(&catalog), [1, 2]);
}

#[test]
fn only_blocks_with_copies_are_searched_in_other_objects() {
    let catalog = catalog(1_000);
    for object in 0..50 {
        catalog.insert_newest(path, &section(object, &[object as u8]));
    }
    assert!(catalog.insert_oldest(path, &section(99, &[7, 8, 60])));
    catalog.mark_missing(9);
    assert_eq!(catalog.scanned_objects.load(Ordering::Relaxed), 0, "its block has no copy");
    catalog.mark_missing(7);
    assert_eq!(known(&catalog), [vec![0, 1, 2, 3, 4, 5, 6, 7, 8], (10..20).collect()].concat());
    assert_eq!(catalog.scanned_objects.load(Ordering::Relaxed), 49);
}

#[test]
fn object_numbers_exceed_32_bits() {
    let catalog = catalog(20);
    let at = section(0, &[]).fingerprint;
    {
        let mut objects = catalog.lock();
        (objects.next, objects.first) = (i64::from(i32::MAX), i64::from(i32::MIN));
    }
    for object in 0..4 {
        catalog.insert_newest(path, &section(object, &[object as u8]));
        assert!(catalog.insert_oldest(path, &section(object + 10, &[object as u8 + 10])));
    }
    assert_eq!(known(&catalog), [0, 1, 2, 3, 10, 11, 12, 13]);
    let newest = catalog.index.get(at, SequenceHash::from_bytes([3; 16])).unwrap().object;
    assert_eq!(newest, i64::from(i32::MAX) + 3);
    assert!(catalog.object(newest).is_some());
}

#[test]
fn numbers_of_removed_objects_are_not_reused() {
    let catalog = catalog(10);
    for (object, older) in [(1, false), (2, true)] {
        let add = |object| {
            let section = section(object, &[object as u8]);
            if older {
                assert!(catalog.insert_oldest(path, &section));
            } else {
                catalog.insert_newest(path, &section);
            }
            catalog.index.get(section.fingerprint, SequenceHash::from_bytes([object as u8; 16])).unwrap().object
        };
        let reading = add(object);
        catalog.mark_missing(reading);
        assert_ne!(add(object + 10), reading);
        assert!(catalog.object(reading).is_none());
    }
}
