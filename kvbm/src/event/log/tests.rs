use super::*;

fn hash(n: u8) -> SequenceHash {
    SequenceHash::from_bytes([n; 16])
}

fn stored(n: u8) -> BlockEvent {
    BlockEvent::Stored { level: Level::G1, parent: None, blocks: vec![hash(n)] }
}

#[test]
fn numbers_are_gapless_and_empty_events_get_none() {
    let log = EventLog::new(Epoch(1));
    log.announce(stored(1));
    log.announce(BlockEvent::Removed { level: Level::G1, blocks: vec![] });
    log.announce(stored(2));
    let numbers: Vec<u64> = log.after(0, 10).unwrap().iter().map(|e| e.number).collect();
    assert_eq!(numbers, [1, 2]);
    assert_eq!(*log.latest().borrow(), 2);
}

#[test]
fn an_event_with_many_blocks_is_split_into_several() {
    let hashes: Vec<SequenceHash> =
        (0..=2 * EventLog::MAX_EVENT_BLOCKS as u128).map(|n| SequenceHash::from_bytes(n.to_le_bytes())).collect();
    let log = EventLog::new(Epoch(1));
    log.announce(BlockEvent::Stored { level: Level::G1, parent: Some(hash(9)), blocks: hashes.clone() });
    let mut before = hash(9);
    let mut announced = Vec::new();
    for Numbered { event, .. } in log.after(0, 10).unwrap() {
        let BlockEvent::Stored { level: Level::G1, parent, blocks } = event else { panic!("{event:?}") };
        assert_eq!((parent, blocks.len() <= EventLog::MAX_EVENT_BLOCKS), (Some(before), true));
        before = *blocks.last().unwrap();
        announced.extend(blocks);
    }
    assert_eq!((&announced, log.digest().0, log.snapshot().runs.len()), (&hashes, 3, 1));
    log.announce(BlockEvent::Removed { level: Level::G1, blocks: hashes[..hashes.len() - 1].to_vec() });
    assert_eq!((log.digest().0, log.snapshot().blocks().count()), (5, 1));
}

#[test]
fn the_parts_of_an_event_with_many_blocks_have_no_spare_memory() {
    let blocks: Vec<SequenceHash> = (0..20 * 1024_u128).map(|n| SequenceHash::from_bytes(n.to_le_bytes())).collect();
    let log = EventLog::new(Epoch(1));
    log.announce(BlockEvent::Stored { level: Level::G1, parent: None, blocks: blocks.clone() });
    log.announce(BlockEvent::Removed { level: Level::G1, blocks });
    let state = log.lock();
    assert_eq!(state.ring.len(), 40);
    for Numbered { event, .. } in &state.ring {
        let (BlockEvent::Stored { blocks, .. } | BlockEvent::Removed { blocks, .. }) = event else {
            panic!("{event:?}")
        };
        assert!(blocks.capacity() <= EventLog::MAX_EVENT_BLOCKS, "{}", blocks.capacity());
    }
}

#[test]
fn the_digest_depends_on_the_blocks_and_not_on_the_history() {
    let removed = |level, n| BlockEvent::Removed { level, blocks: vec![hash(n)] };
    let digest = |events: &[BlockEvent]| {
        let log = EventLog::new(Epoch(1));
        for event in events {
            log.announce(event.clone());
        }
        log.digest().1
    };
    let both = digest(&[stored(1), stored(2)]);
    assert_eq!(both, digest(&[stored(2), stored(3), stored(1), removed(Level::G1, 3), stored(2)]));
    assert_ne!(both, digest(&[stored(1)]));
    assert_ne!(both, digest(&[stored(1), stored(3)]));
    let below = BlockEvent::Stored { level: Level::G2, parent: None, blocks: vec![hash(1)] };
    assert_ne!(digest(&[stored(1)]), digest(std::slice::from_ref(&below)), "the level counts, too");
    assert_eq!(
        both,
        digest(&[stored(1), below, stored(2), removed(Level::G2, 9), BlockEvent::Cleared { level: Level::G2 }])
    );
    assert_eq!(digest(&[stored(1), BlockEvent::Cleared { level: Level::G1 }]), CacheDigest::default());
}

#[test]
fn a_lagging_reader_gets_a_gap_and_a_consistent_snapshot() {
    let log = EventLog::new(Epoch(1));
    for _ in 0..EventLog::CAPACITY {
        log.announce(stored(1));
    }
    log.announce(BlockEvent::Removed { level: Level::G1, blocks: vec![hash(1)] });
    assert_eq!(log.after(0, 1), Err(Gap { oldest_lost: 1 }));
    assert_eq!(log.after(1, 1).unwrap()[0].number, 2);
    let snapshot = log.snapshot();
    assert_eq!((snapshot.number, snapshot.runs.len()), (EventLog::CAPACITY as u64 + 1, 0));
}

#[test]
fn a_snapshot_has_each_block_once_per_level_in_ordered_runs() {
    let log = EventLog::new(Epoch(1));
    let stored = |level, parent: Option<u8>, blocks: &[u8]| {
        let blocks = blocks.iter().map(|n| hash(*n)).collect();
        log.announce(BlockEvent::Stored { level, parent: parent.map(hash), blocks });
    };
    // One chain of five with two forks and a removed block, and another chain without its first blocks.
    stored(Level::G1, None, &[1, 2, 3, 4, 5]);
    stored(Level::G1, Some(2), &[13, 14]);
    stored(Level::G1, Some(2), &[23]);
    log.announce(BlockEvent::Removed { level: Level::G1, blocks: vec![hash(4)] });
    stored(Level::G1, Some(99), &[31, 32]);
    stored(Level::G2, None, &[1, 2]);
    // A cycle, which no chain of hashes has.
    stored(Level::G4, Some(42), &[41, 42]);
    let snapshot = log.snapshot();
    let mut found: Vec<(Level, SequenceHash)> = snapshot.blocks().collect();
    found.sort_unstable();
    let at = |level, blocks: &[u8]| blocks.iter().map(|n| (level, hash(*n))).collect::<Vec<_>>();
    let all = [at(Level::G1, &[1, 2, 3, 5, 13, 14, 23, 31, 32]), at(Level::G2, &[1, 2]), at(Level::G4, &[41, 42])];
    assert_eq!(found, all.concat());
    let runs = |level| snapshot.runs.iter().filter(move |run| run.level == level);
    assert_eq!(runs(Level::G1).count(), 5, "two forks, a removed block, and a chain without a start begin runs");
    assert_eq!((runs(Level::G2).count(), runs(Level::G4).count()), (1, 1));
    let mut seen = Vec::new();
    for run in runs(Level::G1) {
        let parent = run.parent.map(|parent| parent.as_bytes()[0]);
        assert!(parent.is_none_or(|parent| [4, 99].contains(&parent) || seen.contains(&parent)), "{run:?}");
        let mut before = parent;
        for block in run.blocks.iter().map(|block| block.as_bytes()[0]) {
            let follows = match block {
                1 => None,
                13 | 23 => Some(2),
                31 => Some(99),
                _ => Some(block - 1),
            };
            assert_eq!(before, follows, "{run:?}");
            seen.push(block);
            before = Some(block);
        }
    }
}
