//! Blocks that other managers made: handed over, shared, left by a process before this one.

use super::*;
use crate::disk::{self, DiskTier};
use crate::object::{self, ObjectTier};

#[tokio::test]
async fn a_peer_hands_over_what_it_has_in_memory_and_takes_nothing() {
    let (prefill, decode) = (Site::new(8, 32, vec![]), Site::new(32, 0, vec![]));
    drop(prefill.compute(0..8));
    prefill.manager.flush().await;
    // The first four are in G1 and G2 now, the rest in G2 only.
    let kept = prefill.manager.matched(&names(4));
    drop(prefill.manager.allocate(4));
    let peer = prefill.manager.peer();
    assert_eq!(peer.holds(fingerprint(), &names(10)), 8);
    assert_eq!(peer.holds(Fingerprint::from_bytes([0; 32]), &names(10)), 0);
    let onboarded = decode.manager.onboard_from(&peer, &names(10), ms(10)).await;
    assert_eq!(onboarded.from, [(Level::Peer, 8)]);
    decode.assert_sound(&onboarded.blocks);
    let block = Block::seal(name(0), None, fingerprint(), content(name(0)).into());
    assert!(peer.store(vec![block]).await[0].is_err());
    assert_eq!(decode.manager.speeds()[0].level, Level::Peer);
    drop(kept);
}

#[tokio::test(start_paused = true)]
async fn a_defective_copy_in_g2_is_never_served_to_a_peer() {
    /// Device memory that goes bad once it was offloaded.
    struct Rotten(Arc<InMemory>);
    impl DeviceBlocks for Rotten {
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
    let (log, registry) = (log(), Registry::new());
    let device = Arc::new(Rotten(InMemory::new(8, SIZE, fingerprint())));
    let other = BlockManager::new(device, None, vec![], log, Metrics::new(&registry).unwrap());
    let slot = other.allocate(1).unwrap().pop().unwrap();
    drop(other.register(slot.complete(name(0), None, Custody::default())));
    let site = Site::new(8, 0, vec![]);
    let onboarded = site.manager.onboard_from(&other.peer(), &names(1), ms(10)).await;
    assert!(onboarded.blocks.is_empty(), "another engine's bytes");
}

#[tokio::test(start_paused = true)]
async fn a_log_on_disk_serves_the_next_process() {
    let folder = tempfile::tempdir().unwrap();
    let settings = disk::Settings { capacity_bytes: 8 << 20, segment_bytes: 1 << 20, min_free_bytes: 0 };
    let open = || DiskTier::open(folder.path(), settings, log()).unwrap();
    {
        let site = Site::new(64, 64, vec![open()]);
        drop(site.compute(0..40));
        site.manager.flush().await;
    }
    let reopened = loop {
        // The tasks of the first manager let go of the folder at their next turn.
        match DiskTier::open(folder.path(), settings, log()) {
            Ok(tier) => break tier,
            Err(disk::OpenError::Owned { .. }) => tokio::task::yield_now().await,
            Err(error) => panic!("{error}"),
        }
    };
    let site = Site::new(64, 64, vec![reopened]);
    let onboarded = site.manager.onboard(&names(50), UNKNOWN).await;
    assert_eq!(onboarded.from, [(Level::G3, 40)]);
    site.assert_sound(&onboarded.blocks);
}

#[tokio::test(start_paused = true)]
async fn a_shared_folder_serves_whoever_looks_there() {
    let folder = tempfile::tempdir().unwrap();
    let open = || ObjectTier::folder(folder.path(), object::Settings::default(), log()).unwrap();
    let writer = Site::new(64, 64, vec![open()]);
    drop(writer.compute(0..40));
    writer.manager.flush().await;
    let store = open();
    store.caught_up().await;
    let reader = Site::new(64, 64, vec![store]);
    let onboarded = reader.manager.onboard(&names(50), UNKNOWN).await;
    assert_eq!(onboarded.from, [(Level::G4, 40)]);
    reader.assert_sound(&onboarded.blocks);
}
