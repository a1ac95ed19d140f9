//! Blocks of other managers: handed over, shared, or stored by an earlier process.

use super::*;
use crate::block::Corrupt;
use crate::disk::{self, DiskTier};
use crate::object::{self, ObjectTier};

#[tokio::test]
async fn a_peer_serves_its_memory_and_is_read_only() {
    let (prefill, decode) = (Harness::new(8, 32, vec![]), Harness::new(32, 0, vec![]));
    drop(prefill.compute(0..8));
    prefill.manager.flush().await;
    // The first four are in G1 and G2 now, the rest in G2 only.
    let kept = prefill.manager.lookup(&hashes(4));
    drop(prefill.manager.allocate(4));
    let peer = prefill.manager.peer();
    assert_eq!(peer.holds(fingerprint(), &hashes(10)), 8);
    assert_eq!(peer.holds(Fingerprint::from_bytes([0; 32]), &hashes(10)), 0);
    let onboarded = decode.manager.onboard_from(&peer, &hashes(10), ms(10), &UNTRACED).await;
    assert_eq!(onboarded.from, [(Level::Peer, 8)]);
    decode.assert_sound(&onboarded.blocks);
    let block = Block::new(hash(0), None, fingerprint(), content(hash(0)).into());
    assert!(peer.store(vec![block]).await[0].is_err());
    assert_eq!(decode.manager.speeds()[0].level, Level::Peer);
    drop(kept);
}

#[tokio::test]
async fn a_peer_is_another_source_of_an_onboarding() {
    let (prefill, decode) = (Harness::new(16, 0, vec![]), Harness::new(32, 32, vec![]));
    drop(decode.compute(0..4));
    decode.manager.flush().await;
    drop(decode.manager.allocate(32));
    let kept = prefill.compute(0..8);
    // The first four are in G2 here and in G1 there, the next four there only.
    let (peer, wake) = (prefill.manager.peer(), Arc::new(Notify::new()));
    assert!(decode.manager.start_onboarding(&hashes(8)[4..], ms(10), wake.clone(), &UNTRACED).is_none());
    let onboarding =
        decode.manager.start_onboarding_with(Some(&peer), &hashes(10), ms(1000), wake.clone(), &UNTRACED).unwrap();
    onboarding.start_waiting();
    while onboarding.should_wait() {
        wake.notified().await;
    }
    let held = decode.manager.hold(&hashes(10));
    assert_eq!(held.len(), 8);
    decode.assert_sound(&held);
    assert!((4..8).all(|nth| onboarding.loaded_from(&hash(nth)) == Some(Level::Peer)));
    drop(kept);
}

/// The blocks of a peer, in the order of their indices.
async fn loaded(peer: &Arc<dyn Tier>, hashes: Vec<SequenceHash>) -> Vec<Block> {
    let mut blocks: Vec<_> = peer.load(fingerprint(), hashes).collect().await;
    blocks.sort_by_key(|(at, _)| *at);
    blocks.into_iter().map(|(_, block)| block.unwrap().expect("it is in memory")).collect()
}

#[tokio::test]
async fn each_reader_finds_that_the_bytes_have_changed_since_the_first_one() {
    for is_plain in [false, true] {
        let owner = inbox::harness(4, is_plain);
        let (kept, peer) = (owner.compute(0..3), owner.manager.peer());
        for (block, hash) in loaded(&peer, hashes(2)).await.iter().zip(hashes(2)) {
            assert_eq!(block.check(hash, fingerprint()), Ok(()));
            assert_eq!(block.payload, content(hash));
        }
        for block in &kept {
            owner.device.write(block.slot(), &[1; SIZE]);
        }
        let [one, two, first_read] = loaded(&peer, hashes(3)).await.try_into().unwrap();
        for (block, hash) in [(one, hash(0)), (two, hash(1))] {
            assert_eq!(block.check(hash, fingerprint()), Err(Corrupt::Checksum));
        }
        assert_eq!(first_read.check(hash(2), fingerprint()), Ok(()), "nothing is known of its former bytes");
        // Another block in the same slots.
        drop((kept, first_read));
        drop(owner.manager.allocate(4));
        let kept = owner.compute(10..14);
        let reused: Vec<_> = (10..14).map(hash).collect();
        for (block, hash) in loaded(&peer, reused.clone()).await.iter().zip(reused) {
            assert_eq!(block.check(hash, fingerprint()), Ok(()));
        }
        drop(kept);
    }
}

#[tokio::test]
async fn an_onboarded_block_is_served_with_the_checksum_that_it_arrived_with() {
    for is_plain in [false, true] {
        let (first, second) = (inbox::harness(4, is_plain), inbox::harness(4, is_plain));
        let kept = first.compute(0..4);
        let onboarded = second.manager.onboard_from(&first.manager.peer(), &hashes(4), ms(10), &UNTRACED).await;
        let peer = second.manager.peer();
        let (sent, served) = (loaded(&first.manager.peer(), hashes(4)).await, loaded(&peer, hashes(4)).await);
        let headers = |blocks: &[Block]| blocks.iter().map(|block| block.header).collect::<Vec<_>>();
        assert_eq!(headers(&sent), headers(&served));
        for block in &onboarded.blocks {
            second.device.write(block.slot(), &[1; SIZE]);
        }
        for (block, hash) in loaded(&peer, hashes(4)).await.iter().zip(hashes(4)) {
            assert_eq!(block.check(hash, fingerprint()), Err(Corrupt::Checksum));
        }
        drop(kept);
    }
}

#[tokio::test(start_paused = true)]
async fn a_prefetch_takes_as_long_as_the_tier() {
    let (prefill, decode) = (Harness::new(16, 0, vec![]), Harness::new(32, 0, vec![]));
    let kept = prefill.compute(0..8);
    // Slower than any wait budget.
    let latency = Duration::from_secs(5)..=Duration::from_secs(5);
    let faulty = Faulty::new(prefill.manager.peer(), 1, Faults { latency, ..Faults::default() });
    let peer: Arc<dyn Tier> = Arc::new(faulty);
    assert!(decode.manager.onboard_from(&peer, &hashes(4), UNKNOWN, &UNTRACED).await.blocks.is_empty());
    tokio::time::sleep(Duration::from_secs(2)).await;
    let onboarded = decode.manager.prefetch_from(&peer, &hashes(8), &UNTRACED).await;
    assert_eq!(onboarded.from, [(Level::Peer, 8)], "although it was unresponsive before");
    decode.assert_sound(&onboarded.blocks);
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn a_peer_with_another_fingerprint_is_not_used() {
    /// Device memory of an engine with another fingerprint.
    struct OtherEngine(Arc<InMemory>);
    impl DeviceBlocks for OtherEngine {
        fn capacity(&self) -> usize {
            self.0.capacity()
        }
        fn block_bytes(&self) -> usize {
            self.0.block_bytes()
        }
        fn fingerprint(&self) -> Fingerprint {
            Fingerprint::from_bytes([0xBA; 32])
        }
        fn read(&self, slot: BlockId, into: &mut [u8]) {
            self.0.read(slot, into);
        }
        fn write(&self, slot: BlockId, from: &[u8]) {
            self.0.write(slot, from);
        }
    }
    let log = log();
    let registry = Registry::new();
    let device = Arc::new(OtherEngine(InMemory::new(8, SIZE, fingerprint())));
    let other = BlockManager::new(device, None, vec![], log, Metrics::new(&registry).unwrap());
    let slot = other.allocate(1).unwrap().pop().unwrap();
    drop(other.register(slot.complete(hash(0), None, BlockAttrs::default())));
    let harness = Harness::new(8, 0, vec![]);
    let onboarded = harness.manager.onboard_from(&other.peer(), &hashes(1), ms(10), &UNTRACED).await;
    assert!(onboarded.blocks.is_empty(), "another engine's bytes");
}

#[tokio::test(start_paused = true)]
async fn a_log_on_disk_serves_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let settings = disk::Settings { capacity_bytes: 8 << 20, segment_bytes: 1 << 20, min_free_bytes: 0 };
    let open = || DiskTier::open(folder.path(), settings, log()).unwrap();
    {
        let harness = Harness::new(64, 64, vec![open()]);
        drop(harness.compute(0..40));
        harness.manager.flush().await;
    }
    let reopened = loop {
        // The tasks of the first manager release the folder when they run next.
        match DiskTier::open(folder.path(), settings, log()) {
            Ok(tier) => break tier,
            Err(disk::OpenError::Owned { .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    };
    let harness = Harness::new(64, 64, vec![reopened]);
    let onboarded = harness.manager.onboard(&hashes(50), UNKNOWN).await;
    assert_eq!(onboarded.from, [(Level::G3, 40)]);
    harness.assert_sound(&onboarded.blocks);
}

#[tokio::test(start_paused = true)]
async fn a_shared_folder_serves_another_process() {
    let folder = tempfile::tempdir().unwrap();
    let open = || ObjectTier::open_folder(folder.path(), object::Settings::default(), log()).unwrap();
    let writer = Harness::new(64, 64, vec![open()]);
    drop(writer.compute(0..40));
    writer.manager.flush().await;
    let store = open();
    store.wait_until_ready().await;
    let reader = Harness::new(64, 64, vec![store]);
    let onboarded = reader.manager.onboard(&hashes(50), UNKNOWN).await;
    assert_eq!(onboarded.from, [(Level::G4, 40)]);
    reader.assert_sound(&onboarded.blocks);
}
