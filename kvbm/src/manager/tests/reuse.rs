//! Prefixes that requests have used again, in both memories.

use super::*;

fn found(prefixes: crate::manager::ReusedPrefixes) -> Vec<usize> {
    prefixes.map(|prefix| prefix.blocks.len()).collect()
}

#[tokio::test]
async fn a_prefix_is_found_again_in_host_memory_after_the_device_has_evicted_it() {
    let harness = Harness::new(4, 16, vec![]);
    drop(harness.compute(0..3));
    assert!(found(harness.manager.reused_prefixes().await).is_empty());
    assert_eq!(harness.manager.lookup(&hashes(3)).len(), 3);
    assert_eq!(found(harness.manager.reused_prefixes().await), [3]);
    harness.manager.flush().await;
    drop(harness.manager.allocate(4));
    assert_eq!(harness.manager.hold(&hashes(3)).len(), 0, "only G2 has it");
    assert_eq!(found(harness.manager.reused_prefixes().await), [3]);
}

#[tokio::test]
async fn a_prefix_is_in_the_object_store_when_all_of_it_is() {
    let (log, store) = (placed(Level::G3, 0, 0), placed(Level::G4, 0, 0));
    log.fill(0..4).await;
    store.fill(0..2).await;
    let harness = Harness::new(4, 16, vec![log as Arc<dyn Tier>, store as Arc<dyn Tier>]);
    assert!(harness.manager.is_in_object_store(&hashes(2)));
    assert!(!harness.manager.is_in_object_store(&hashes(3)));
}
