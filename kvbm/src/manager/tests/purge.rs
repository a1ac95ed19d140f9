//! Purges of a domain from memory, during loads and copies.

use super::*;
use crate::block::{BlockAttrs, DomainId};
use parking_lot::Mutex;

fn tenant(n: u8) -> BlockAttrs {
    BlockAttrs { domain: DomainId::from_bytes([n; 16]), ..BlockAttrs::default() }
}

/// Blocks in G1 and in G2.
fn resident(harness: &Harness) -> [Vec<SequenceHash>; 2] {
    let sorted = |mut hashes: Vec<SequenceHash>| {
        hashes.sort_unstable();
        hashes
    };
    [
        sorted(harness.manager.0.core.pool.hashes()),
        sorted(harness.host.as_ref().map(HostTier::hashes).unwrap_or_default()),
    ]
}

#[tokio::test]
async fn a_purge_removes_one_domain_from_g1_and_g2() {
    let harness = Harness::new(16, 16, vec![]);
    let held = harness.compute_for(0..4, tenant(1));
    drop(harness.compute_for(4..8, tenant(2)));
    harness.manager.flush().await;
    let purge = harness.manager.purger();
    assert_eq!(purge(tenant(1).domain), 8, "in G1 and in G2, held or not");
    let mut others: Vec<_> = (4..8).map(hash).collect();
    others.sort_unstable();
    assert_eq!(resident(&harness), [others.clone(), others]);
    assert!(harness.manager.lookup(&hashes(4)).is_empty());
    assert_eq!(harness.manager.count_in_tiers(&hashes(4)), 0);
    // A request that holds the blocks can still read them; then their slots are free.
    harness.assert_sound(&held);
    assert_eq!(harness.manager.available(), 12);
    drop(held);
    assert_eq!(harness.manager.available(), 16);
    // Blocks that are computed later stay.
    drop(harness.compute_for(0..4, tenant(1)));
    assert_eq!(harness.manager.lookup(&hashes(4)).len(), 4);
    assert_eq!(purge(tenant(9).domain), 0);
}

type Hook = Box<dyn FnOnce() + Send>;

/// Runs a hook once during a load: after the request and before the first block is delivered.
struct InterruptedTier {
    tier: Arc<Memory>,
    hook: Arc<Mutex<Option<Hook>>>,
}

impl Tier for InterruptedTier {
    delegate!(tier: holds, store, discard, withdraw, expire_one, expire, usage);

    fn level(&self) -> Level {
        Level::G4
    }
    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let hook = self.hook.clone();
        let interrupt = move |loaded| {
            if let Some(hook) = hook.lock().take() {
                hook();
            }
            loaded
        };
        self.tier.load(fingerprint, hashes).map(interrupt).boxed()
    }
}

#[tokio::test]
async fn a_load_in_progress_of_a_purged_domain_is_not_served() {
    let tier = Arc::new(Memory::new(log(), None));
    let hook = Arc::default();
    let block = |n: usize| {
        Block::new(hash(n), n.checked_sub(1).map(hash), fingerprint(), content(hash(n)).into()).with_attrs(tenant(1))
    };
    tier.store((0..4).map(block).collect()).await;
    let harness = Harness::new(16, 0, vec![Arc::new(InterruptedTier { tier, hook: Arc::clone(&hook) })]);
    let purge = harness.manager.purger();
    *hook.lock() = Some(Box::new(move || assert_eq!(purge(tenant(1).domain), 0, "nothing is resident yet")));
    let hashes = hashes(4);
    let loaded = harness.manager.onboard(&hashes, UNKNOWN).await;
    assert!(hook.lock().is_none(), "the domain was purged during the load");
    assert!(loaded.blocks.is_empty() && resident(&harness)[0].is_empty());
    // The slots are free when the threads that wrote into them have ended.
    while harness.manager.available() < 16 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // A load that begins afterwards registers its blocks.
    assert_eq!(harness.manager.onboard(&hashes, UNKNOWN).await.blocks.len(), 4);
}

#[tokio::test]
async fn a_copy_in_progress_does_not_restore_a_purged_domain() {
    let harness = Harness::new(8, 8, vec![]);
    let host = harness.host.clone().unwrap();
    let held = harness.compute_for(0..2, tenant(1));
    harness.manager.flush().await;
    // Like a copy that looked the blocks up before the purge and writes them after it.
    let since = host.purges();
    assert_eq!((harness.manager.purger())(tenant(1).domain), 4);
    let copied =
        host.copy_from_device(&held, since, |slot, into, observe| harness.device.read_observed(slot, into, observe));
    drop(copied);
    assert_eq!(resident(&harness), [vec![], vec![]]);
}
