//! Blocks keep their domain and retention when they are offloaded and onboarded.

use super::*;
use crate::block::{BlockRetention, Priority};
use crate::tier::conformance::load;

fn attrs() -> BlockAttrs {
    let date = |seconds| Some(Date::from_unix(seconds));
    let retention =
        BlockRetention { expires: date(4e9 as u64), pinned: date(3e9 as u64), store: true, priority: Priority::High };
    BlockAttrs { domain: DomainId::from_bytes([5; 16]), retention }
}

async fn stored_attributes(tier: &dyn Tier) -> Vec<Option<BlockAttrs>> {
    let blocks = load(tier, fingerprint(), hashes(3)).await;
    blocks.iter().map(|block| block.as_ref().map(|block| block.header().attrs())).collect()
}

#[tokio::test(start_paused = true)]
async fn attributes_survive_offload_and_onboarding() {
    let (first, second) = (placed(Level::G3, 0, 0), placed(Level::G3, 0, 0));
    let all = vec![Some(attrs()); 3];
    let writer = Harness::new(4, 4, vec![first.clone()]);
    drop(writer.compute_for(0..3, attrs()));
    writer.manager.flush().await;
    assert_eq!(stored_attributes(writer.host.as_ref().unwrap()).await, all);
    assert_eq!(stored_attributes(&*first).await, all);
    assert_eq!(stored_attributes(&*writer.manager.peer()).await, all);

    // Onboarded from the first tier, and offloaded to another, through a device without a G2.
    let reader = Harness::new(4, 0, vec![first, second.clone()]);
    let onboarded = reader.manager.onboard(&hashes(3), UNKNOWN).await.blocks;
    assert_eq!(onboarded.attrs(), vec![attrs(); 3]);
    reader.manager.flush().await;
    assert_eq!(stored_attributes(&*second).await, all);
    assert_eq!(stored_attributes(&*reader.manager.peer()).await, all);
}

#[tokio::test(start_paused = true)]
async fn a_block_not_to_be_stored_is_only_handed_over() {
    let secret = BlockAttrs { retention: BlockRetention { store: false, ..BlockRetention::default() }, ..attrs() };
    let (ours, theirs) = (placed(Level::G3, 0, 0), placed(Level::G3, 0, 0));
    let prefill = Harness::new(4, 4, vec![ours.clone()]);
    let decode = Harness::new(4, 4, vec![theirs.clone()]);
    drop(prefill.compute_for(0..3, secret));
    let onboarded = decode.manager.onboard_from(&prefill.manager.peer(), &hashes(3), UNKNOWN, &UNTRACED).await;
    assert_eq!(onboarded.blocks.len(), 3);
    for harness in [&prefill, &decode] {
        harness.manager.flush().await;
        assert_eq!(harness.host.as_ref().unwrap().hashes(), []);
        assert_eq!(harness.manager.lookup(&hashes(3)).len(), 3, "they are in the device");
    }
    assert!(stored_attributes(&*ours).await.iter().chain(&stored_attributes(&*theirs).await).all(Option::is_none));
}

const START: u64 = 1_000;

fn clock() -> Clock {
    Clock::manual(Date::from_unix(START))
}

fn ttl(seconds: u64) -> Retention {
    Retention { ttl: Some(Duration::from_secs(seconds)), ..Retention::default() }
}

impl Harness {
    fn compute_with_retention(&self, range: std::ops::Range<usize>, asked: Retention) -> CachedBlocks {
        self.compute_for(range, self.manager.attrs(DomainId::SHARED, &asked))
    }
}

#[tokio::test(start_paused = true)]
async fn an_expired_block_is_a_miss_in_every_tier() {
    let clock = clock();
    let ssd = placed(Level::G3, 0, 0);
    let harness = Harness::timed(4, 4, vec![ssd.clone()], &clock);
    drop(harness.compute_with_retention(0..3, ttl(10)));
    harness.manager.flush().await;
    let cold = Harness::timed(4, 0, vec![ssd.clone()], &clock);
    let peer = harness.manager.peer();
    clock.set(Date::from_unix(START + 9));
    assert_eq!(cold.manager.onboard(&hashes(1), UNKNOWN).await.blocks.len(), 1);
    clock.set(Date::from_unix(START + 10));
    // Before any expiry task ran: expiry is checked when a block is served.
    assert_eq!(harness.manager.lookup(&hashes(3)).len() + cold.manager.lookup(&hashes(1)).len(), 0);
    assert_eq!(harness.host.as_ref().unwrap().holds(fingerprint(), &hashes(3)), 0);
    assert_eq!(cold.manager.onboard_from(&peer, &hashes(3), UNKNOWN, &UNTRACED).await.blocks.len(), 0);
    assert_eq!(ssd.holds(fingerprint(), &hashes(3)), 3, "a tier without a clock");
    assert_eq!(cold.manager.onboard(&hashes(3), UNKNOWN).await.blocks.len(), 0);
    assert!(ssd.holds(fingerprint(), &hashes(3)) < 3, "discarded when it was read");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!((0..3).all(|n| ssd.holds(fingerprint(), &[hash(n)]) == 0), "the rest by the expiry task");
    assert!(harness.log.snapshot().runs.is_empty() && cold.log.snapshot().runs.is_empty());
    let expired = |level| harness.counter("expired_blocks_total", level) + cold.counter("expired_blocks_total", level);
    assert_eq!((expired(Level::G1), expired(Level::G2), expired(Level::G3)), (4, 3, 3));
}

#[tokio::test(start_paused = true)]
async fn expiry_is_announced_without_a_request() {
    let clock = clock();
    let harness = Harness::timed(4, 4, vec![], &clock);
    drop(harness.compute_with_retention(0..3, ttl(10)));
    harness.manager.flush().await;
    assert_eq!(harness.log.snapshot().blocks().count(), 6);
    clock.set(Date::from_unix(START + 10));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(harness.log.snapshot().runs.is_empty());
}

#[tokio::test(start_paused = true)]
async fn extending_retention_applies_to_g1_and_g2() {
    let clock = clock();
    let ssd = placed(Level::G3, 0, 0);
    let harness = Harness::timed(4, 4, vec![ssd.clone()], &clock);
    drop(harness.compute_with_retention(0..2, ttl(10)));
    drop(harness.compute_with_retention(2..3, Retention { store: false, ..ttl(10) }));
    harness.manager.flush().await;
    assert_eq!(ssd.holds(fingerprint(), &hashes(3)), 2);
    harness.manager.extend_retention(&hashes(3), &ttl(60));
    harness.manager.flush().await;
    assert_eq!(ssd.holds(fingerprint(), &hashes(3)), 3, "one of the requests permits to store it");
    clock.set(Date::from_unix(START + 59));
    drop(harness.manager.allocate(4));
    let again = harness.manager.onboard(&hashes(3), UNKNOWN).await;
    assert_eq!(again.from, [(Level::G2, 3)], "extended in G2, and sound");
    harness.assert_sound(&again.blocks);
    drop(again);
    clock.set(Date::from_unix(START + 60));
    assert_eq!(harness.manager.lookup(&hashes(1)).len() + harness.manager.count_in_tiers(&hashes(0)), 0);
}

#[tokio::test(start_paused = true)]
async fn a_block_with_extended_retention_verifies() {
    let clock = clock();
    let harness = Harness::timed(1, 2, vec![], &clock);
    harness.device.write(BlockId(0), &content(hash(0)));
    drop(harness.compute_with_retention(0..1, ttl(10)));
    harness.manager.flush().await;
    harness.manager.extend_retention(&hashes(1), &Retention::default());
    let loaded = load(harness.host.as_ref().unwrap(), fingerprint(), hashes(1)).await;
    assert_eq!(loaded[0].as_ref().unwrap().header().retention, BlockRetention::default());
}
