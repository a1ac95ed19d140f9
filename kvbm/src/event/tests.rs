use super::*;

fn name(n: u8) -> SequenceHash {
    SequenceHash::from_bytes([n; 16])
}

fn stored(n: u8) -> BlockEvent {
    BlockEvent::Stored { level: Level::G1, parent: None, blocks: vec![name(n)] }
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
fn what_names_many_blocks_is_several_events_of_one_chain() {
    let names: Vec<SequenceHash> =
        (0..=2 * EventLog::BLOCKS_MAX as u128).map(|n| SequenceHash::from_bytes(n.to_le_bytes())).collect();
    let log = EventLog::new(Epoch(1));
    log.announce(BlockEvent::Stored { level: Level::G1, parent: Some(name(9)), blocks: names.clone() });
    let (mut before, mut told) = (name(9), Vec::new());
    for Numbered { event, .. } in log.after(0, 10).unwrap() {
        let BlockEvent::Stored { level: Level::G1, parent, blocks } = event else { panic!("{event:?}") };
        assert_eq!((parent, blocks.len() <= EventLog::BLOCKS_MAX), (Some(before), true));
        before = *blocks.last().unwrap();
        told.extend(blocks);
    }
    assert_eq!((&told, log.digest().0, log.snapshot().runs.len()), (&names, 3, 1));
    log.announce(BlockEvent::Removed { level: Level::G1, blocks: names[..names.len() - 1].to_vec() });
    assert_eq!((log.digest().0, log.snapshot().blocks().count()), (5, 1));
}

#[test]
fn a_digest_tells_what_is_there_whatever_happened_before() {
    let removed = |level, n| BlockEvent::Removed { level, blocks: vec![name(n)] };
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
    let below = BlockEvent::Stored { level: Level::G2, parent: None, blocks: vec![name(1)] };
    assert_ne!(digest(&[stored(1)]), digest(std::slice::from_ref(&below)), "where counts, too");
    assert_eq!(
        both,
        digest(&[stored(1), below, stored(2), removed(Level::G2, 9), BlockEvent::Cleared { level: Level::G2 }])
    );
    assert_eq!(digest(&[stored(1), BlockEvent::Cleared { level: Level::G1 }]), Digest::default());
}

#[test]
fn a_reader_that_lags_gets_a_gap_and_a_snapshot_that_agrees() {
    let log = EventLog::new(Epoch(1));
    for _ in 0..EventLog::KEPT {
        log.announce(stored(1));
    }
    log.announce(BlockEvent::Removed { level: Level::G1, blocks: vec![name(1)] });
    assert_eq!(log.after(0, 1), Err(Gap { oldest_lost: 1 }));
    assert_eq!(log.after(1, 1).unwrap()[0].number, 2);
    let snapshot = log.snapshot();
    assert_eq!((snapshot.number, snapshot.runs.len()), (EventLog::KEPT as u64 + 1, 0));
}

#[test]
fn a_snapshot_tells_each_block_once_a_level_in_runs_that_follow_their_parents() {
    let log = EventLog::new(Epoch(1));
    let stored = |level, parent: Option<u8>, blocks: &[u8]| {
        let blocks = blocks.iter().map(|n| name(*n)).collect();
        log.announce(BlockEvent::Stored { level, parent: parent.map(name), blocks });
    };
    // One chain of five that forks twice, a hole in it, and another whose head is gone.
    stored(Level::G1, None, &[1, 2, 3, 4, 5]);
    stored(Level::G1, Some(2), &[13, 14]);
    stored(Level::G1, Some(2), &[23]);
    log.announce(BlockEvent::Removed { level: Level::G1, blocks: vec![name(4)] });
    stored(Level::G1, Some(99), &[31, 32]);
    stored(Level::G2, None, &[1, 2]);
    // A circle, which no chain of hashes has.
    stored(Level::G4, Some(42), &[41, 42]);
    let snapshot = log.snapshot();
    let mut told: Vec<(Level, SequenceHash)> = snapshot.blocks().collect();
    told.sort_unstable();
    let at = |level, blocks: &[u8]| blocks.iter().map(|n| (level, name(*n))).collect::<Vec<_>>();
    let all = [at(Level::G1, &[1, 2, 3, 5, 13, 14, 23, 31, 32]), at(Level::G2, &[1, 2]), at(Level::G4, &[41, 42])];
    assert_eq!(told, all.concat());
    let runs = |level| snapshot.runs.iter().filter(move |run| run.level == level);
    assert_eq!(runs(Level::G1).count(), 5, "a fork begins two more, a hole and a lost head one each");
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
