//! Domains that are purged from memory, whatever is under way.

use super::*;
use crate::block::{Custody, DomainId};
use std::sync::Mutex;

fn tenant(n: u8) -> Custody {
    Custody { domain: DomainId::from_bytes([n; 16]), ..Custody::default() }
}

/// Blocks in G1 and in G2.
fn resident(site: &Site) -> [Vec<SequenceHash>; 2] {
    let sorted = |mut names: Vec<SequenceHash>| {
        names.sort_unstable();
        names
    };
    [sorted(site.manager.0.core.pool.names()), sorted(site.host.as_ref().map(HostTier::names).unwrap_or_default())]
}

#[tokio::test]
async fn a_purged_domain_is_gone_from_g1_and_g2_and_others_stay() {
    let site = Site::new(16, 16, vec![]);
    let held = site.compute_for(0..4, tenant(1));
    drop(site.compute_for(4..8, tenant(2)));
    site.manager.flush().await;
    let purge = site.manager.purger();
    assert_eq!(purge(tenant(1).domain), 8, "in G1 and in G2, held or not");
    let mut others: Vec<_> = (4..8).map(name).collect();
    others.sort_unstable();
    assert_eq!(resident(&site), [others.clone(), others]);
    assert!(site.manager.matched(&names(4)).is_empty());
    assert_eq!(site.manager.below(&names(4)), 0);
    // The request that holds them goes on with their bytes, and then their slots are free.
    site.assert_sound(&held);
    assert_eq!(site.manager.available(), 12);
    drop(held);
    assert_eq!(site.manager.available(), 16);
    // What is computed from now on stays.
    drop(site.compute_for(0..4, tenant(1)));
    assert_eq!(site.manager.matched(&names(4)).len(), 4);
    assert_eq!(purge(tenant(9).domain), 0);
}

type Hook = Box<dyn FnOnce() + Send>;

/// Runs something once, while blocks are being loaded: after they were asked for and before the first one is delivered.
struct Interrupted {
    tier: Arc<Memory>,
    hook: Arc<Mutex<Option<Hook>>>,
}

impl Tier for Interrupted {
    fn level(&self) -> Level {
        Level::G4
    }
    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.tier.holds(fingerprint, names)
    }
    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let hook = self.hook.clone();
        let interrupt = move |loaded| {
            if let Some(hook) = hook.lock().unwrap().take() {
                hook();
            }
            loaded
        };
        self.tier.load(fingerprint, names).map(interrupt).boxed()
    }
    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        self.tier.store(blocks)
    }
    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        self.tier.discard(fingerprint, name);
    }
    fn expire(&self, now: Date) -> usize {
        self.tier.expire(now)
    }
    fn usage(&self) -> Usage {
        self.tier.usage()
    }
}

#[tokio::test]
async fn a_load_under_way_when_its_domain_is_purged_is_not_served() {
    let (tier, hook) = (Arc::new(Memory::new(log(), None)), Arc::default());
    let block = |n: usize| {
        Block::seal(name(n), n.checked_sub(1).map(name), fingerprint(), content(name(n)).into()).in_custody(tenant(1))
    };
    tier.store((0..4).map(block).collect()).await;
    let site = Site::new(16, 0, vec![Arc::new(Interrupted { tier, hook: Arc::clone(&hook) })]);
    let purge = site.manager.purger();
    *hook.lock().unwrap() = Some(Box::new(move || assert_eq!(purge(tenant(1).domain), 0, "nothing is resident yet")));
    let names = names(4);
    let loaded = site.manager.onboard(&names, UNKNOWN).await;
    assert!(hook.lock().unwrap().is_none(), "the domain was purged during the load");
    assert!(loaded.blocks.is_empty() && resident(&site)[0].is_empty());
    // Their slots are free as soon as the threads that wrote into them have ended.
    while site.manager.available() < 16 {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    // A load that begins afterwards brings what is there then.
    assert_eq!(site.manager.onboard(&names, UNKNOWN).await.blocks.len(), 4);
}

#[tokio::test]
async fn a_copy_under_way_to_g2_does_not_restore_a_purged_domain() {
    let site = Site::new(8, 8, vec![]);
    let host = site.host.clone().unwrap();
    let held = site.compute_for(0..2, tenant(1));
    site.manager.flush().await;
    // As a copy does that looked the blocks up before the purge and writes them after it.
    let since = host.purges();
    assert_eq!((site.manager.purger())(tenant(1).domain), 4);
    let copied = host.fill(&held, since, |slot, into, seen| site.device.read_seen(slot, into, seen));
    drop(copied);
    assert_eq!(resident(&site), [vec![], vec![]]);
}
