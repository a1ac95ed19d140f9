//! Copies into G2 ahead of demand.

use super::*;
use crate::manager::{Copied, NoRoom};
use std::pin::pin;
use tokio::time::timeout;

fn copied(missing: usize, blocks: usize) -> Copied {
    Copied { missing, blocks, bytes: (blocks * SIZE) as u64 }
}

#[tokio::test]
async fn blocks_are_copied_into_host_memory_and_take_no_device_memory() {
    let store = placed(Level::G4, 0, 0);
    store.fill(0..6).await;
    let harness = Harness::new(8, 32, vec![store.clone() as Arc<dyn Tier>]);
    assert_eq!(harness.manager.copy_to_host(None, &hashes(8), || true).await, Ok(copied(8, 6)));
    assert_eq!(harness.host.as_ref().unwrap().holds(fingerprint(), &hashes(8)), 6);
    assert_eq!(harness.manager.hold(&hashes(8)).len(), 0, "no block is in G1");
    let onboarded = harness.manager.onboard(&hashes(6), ms(100)).await;
    assert_eq!(onboarded.from, [(Level::G2, 6)]);
    harness.assert_sound(&onboarded.blocks);
    assert_eq!(
        harness.manager.copy_to_host(None, &hashes(6), || true).await,
        Ok(copied(0, 0)),
        "they are there already"
    );
}

#[tokio::test]
async fn blocks_are_copied_from_the_memory_of_another_manager() {
    let (holder, idle) = (Harness::new(16, 0, vec![]), Harness::new(16, 64, vec![]));
    let kept = holder.compute(0..8);
    assert_eq!(idle.manager.copy_to_host(Some(&holder.manager.peer()), &hashes(8), || true).await, Ok(copied(8, 8)));
    let onboarded = idle.manager.onboard(&hashes(8), ms(100)).await;
    assert_eq!(onboarded.from, [(Level::G2, 8)]);
    idle.assert_sound(&onboarded.blocks);
    drop(kept);
}

#[tokio::test]
async fn blocks_are_stored_as_they_arrive() {
    for in_pieces in [false, true] {
        let (peer, taken) = if in_pieces {
            inbox::offering_pieces(Faults::default(), 4).await
        } else {
            inbox::offering(Faults::default()).await
        };
        let harness = Harness::new(16, 64, vec![]);
        assert_eq!(harness.manager.copy_to_host(Some(&peer), &hashes(9), || true).await, Ok(copied(9, 8)));
        assert_eq!(taken.load(Ordering::Relaxed), 8, "in pieces: {in_pieces}");
        let onboarded = harness.manager.onboard(&hashes(8), ms(100)).await;
        assert_eq!(onboarded.from, [(Level::G2, 8)]);
        harness.assert_sound(&onboarded.blocks);
    }
}

#[tokio::test]
async fn a_block_that_is_corrupt_or_cut_when_it_arrives_is_not_stored() {
    let corrupt = || Faults { corrupt: 1.0, ..Faults::default() };
    let (whole, pieces) = (inbox::offering(corrupt()).await.0, inbox::offering_pieces(corrupt(), 4).await.0);
    for (peer, counted) in [(whole, 1), (pieces, 1), (inbox::offering_pieces(Faults::default(), 2).await.0, 0)] {
        let harness = Harness::new(16, 64, vec![]);
        assert_eq!(harness.manager.copy_to_host(Some(&peer), &hashes(8), || true).await, Ok(copied(8, 0)));
        assert!(harness.host.as_ref().unwrap().hashes().is_empty());
        assert_eq!(harness.counter("corrupt_blocks_total", Level::Peer), counted);
    }
}

#[tokio::test(start_paused = true)]
async fn a_copy_gives_way_until_it_may_go_on() {
    let store = placed(Level::G4, 0, 0);
    store.fill(0..4).await;
    let harness = Harness::new(8, 32, vec![store.clone() as Arc<dyn Tier>]);
    let may_copy = AtomicBool::new(false);
    let (wanted, host) = (hashes(4), harness.host.as_ref().unwrap());
    let mut copying = pin!(harness.manager.copy_to_host(None, &wanted, || may_copy.load(Ordering::SeqCst)));
    assert!(timeout(Duration::from_mins(1), &mut copying).await.is_err());
    assert_eq!(host.holds(fingerprint(), &wanted), 0);
    may_copy.store(true, Ordering::SeqCst);
    assert_eq!(copying.await, Ok(copied(4, 4)));
}

#[tokio::test]
async fn a_corrupt_block_is_not_stored_and_ends_the_copy() {
    let store = placed(Level::G4, 0, 0);
    store.fill(0..2).await;
    let sound = Block::new(hash(2), Some(hash(1)), fingerprint(), content(hash(2)).into());
    let corrupt = Block { payload: content(hash(3)).into(), ..sound };
    store.tier.store(vec![corrupt]).await;
    let harness = Harness::new(8, 32, vec![store.clone() as Arc<dyn Tier>]);
    assert_eq!(harness.manager.copy_to_host(None, &hashes(3), || true).await, Ok(copied(3, 2)));
    assert_eq!(harness.host.as_ref().unwrap().holds(fingerprint(), &hashes(3)), 2);
    assert_eq!(harness.counter("corrupt_blocks_total", Level::G4), 1);
    assert_eq!(store.holds(fingerprint(), &hashes(3)), 2, "it is deleted");
}

#[tokio::test]
async fn without_room_in_host_memory_nothing_is_copied() {
    let store = placed(Level::G4, 0, 0);
    store.fill(0..3).await;
    let of = |host| Harness::new(8, host, vec![store.clone() as Arc<dyn Tier>]);
    assert_eq!(of(0).manager.copy_to_host(None, &hashes(3), || true).await, Err(NoRoom::NoHostTier));
    let small = of(8);
    assert_eq!(small.manager.copy_to_host(None, &hashes(3), || true).await, Err(NoRoom::TooLarge(3)));
    assert_eq!(small.manager.copy_to_host(None, &hashes(2), || true).await, Ok(copied(2, 2)));
}
