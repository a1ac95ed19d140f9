//! What a request asked for goes with its blocks, down and up.

use super::*;
use crate::block::{Keep, Priority};
use crate::tier::conformance::load;

fn custody() -> Custody {
    let date = |seconds| Some(Date::from_unix(seconds));
    let keep = Keep { expires: date(4e9 as u64), pinned: date(3e9 as u64), store: true, priority: Priority::High };
    Custody { domain: DomainId::from_bytes([5; 16]), keep }
}

async fn resting(tier: &dyn Tier) -> Vec<Option<Custody>> {
    let blocks = load(tier, fingerprint(), names(3)).await;
    blocks.iter().map(|block| block.as_ref().map(|block| block.header().custody())).collect()
}

#[tokio::test(start_paused = true)]
async fn domain_and_terms_go_with_a_block_down_and_up_and_down_again() {
    let (first, second) = (at(Level::G3, 0, 0), at(Level::G3, 0, 0));
    let all = vec![Some(custody()); 3];
    let writer = Site::new(4, 4, vec![first.clone()]);
    drop(writer.compute_for(0..3, custody()));
    writer.manager.flush().await;
    assert_eq!(resting(writer.host.as_ref().unwrap()).await, all);
    assert_eq!(resting(&*first).await, all);
    assert_eq!(resting(&*writer.manager.peer()).await, all);

    // Up from the first tier, and down to another, through a device without a G2.
    let reader = Site::new(4, 0, vec![first, second.clone()]);
    let onboarded = reader.manager.onboard(&names(3), UNKNOWN).await.blocks;
    assert_eq!(onboarded.custody(), vec![custody(); 3]);
    reader.manager.flush().await;
    assert_eq!(resting(&*second).await, all);
    assert_eq!(resting(&*reader.manager.peer()).await, all);
}

#[tokio::test(start_paused = true)]
async fn what_is_not_to_be_stored_is_handed_over_and_rests_nowhere() {
    let secret = Custody { keep: Keep { store: false, ..Keep::default() }, ..custody() };
    let (ours, theirs) = (at(Level::G3, 0, 0), at(Level::G3, 0, 0));
    let prefill = Site::new(4, 4, vec![ours.clone()]);
    let decode = Site::new(4, 4, vec![theirs.clone()]);
    drop(prefill.compute_for(0..3, secret));
    let onboarded = decode.manager.onboard_from(&prefill.manager.peer(), &names(3), UNKNOWN).await;
    assert_eq!(onboarded.blocks.len(), 3);
    for site in [&prefill, &decode] {
        site.manager.flush().await;
        assert_eq!(site.host.as_ref().unwrap().names(), []);
        assert_eq!(site.manager.matched(&names(3)).len(), 3, "the device has it");
    }
    assert!(resting(&*ours).await.iter().chain(&resting(&*theirs).await).all(Option::is_none));
}

const START: u64 = 1_000;

fn clock() -> Clock {
    Clock::standing(Date::from_unix(START))
}

fn ttl(seconds: u64) -> Retention {
    Retention { ttl: Some(Duration::from_secs(seconds)), ..Retention::default() }
}

impl Site {
    fn compute_asking(&self, range: std::ops::Range<usize>, asked: Retention) -> CachedBlocks {
        self.compute_for(range, self.manager.custody(DomainId::SHARED, &asked))
    }
}

#[tokio::test(start_paused = true)]
async fn what_is_over_is_a_miss_in_every_tier() {
    let (clock, ssd) = (clock(), at(Level::G3, 0, 0));
    let site = Site::timed(4, 4, vec![ssd.clone()], &clock);
    drop(site.compute_asking(0..3, ttl(10)));
    site.manager.flush().await;
    let cold = Site::timed(4, 0, vec![ssd.clone()], &clock);
    let peer = site.manager.peer();
    clock.set(Date::from_unix(START + 9));
    assert_eq!(cold.manager.onboard(&names(1), UNKNOWN).await.blocks.len(), 1);
    clock.set(Date::from_unix(START + 10));
    // Before any sweep: what is served is looked at when it is served.
    assert_eq!(site.manager.matched(&names(3)).len() + cold.manager.matched(&names(1)).len(), 0);
    assert_eq!(site.host.as_ref().unwrap().holds(fingerprint(), &names(3)), 0);
    assert_eq!(cold.manager.onboard_from(&peer, &names(3), UNKNOWN).await.blocks.len(), 0);
    assert_eq!(ssd.holds(fingerprint(), &names(3)), 3, "a tier without a clock");
    assert_eq!(cold.manager.onboard(&names(3), UNKNOWN).await.blocks.len(), 0);
    assert!(ssd.holds(fingerprint(), &names(3)) < 3, "discarded as it was met");
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!((0..3).all(|n| ssd.holds(fingerprint(), &[name(n)]) == 0), "the rest by the sweep");
    assert!(site.log.snapshot().runs.is_empty() && cold.log.snapshot().runs.is_empty());
    let expired = |level| site.counter("expired_blocks_total", level) + cold.counter("expired_blocks_total", level);
    assert_eq!((expired(Level::G1), expired(Level::G2), expired(Level::G3)), (4, 3, 3));
}

#[tokio::test(start_paused = true)]
async fn a_sweep_announces_what_nobody_asks_for() {
    let clock = clock();
    let site = Site::timed(4, 4, vec![], &clock);
    drop(site.compute_asking(0..3, ttl(10)));
    site.manager.flush().await;
    assert_eq!(site.log.snapshot().blocks().count(), 6);
    clock.set(Date::from_unix(START + 10));
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert!(site.log.snapshot().runs.is_empty());
}

#[tokio::test(start_paused = true)]
async fn who_asks_for_more_extends_what_is_in_memory() {
    let (clock, ssd) = (clock(), at(Level::G3, 0, 0));
    let site = Site::timed(4, 4, vec![ssd.clone()], &clock);
    drop(site.compute_asking(0..2, ttl(10)));
    drop(site.compute_asking(2..3, Retention { store: false, ..ttl(10) }));
    site.manager.flush().await;
    assert_eq!(ssd.holds(fingerprint(), &names(3)), 2);
    site.manager.renew(&names(3), &ttl(60));
    site.manager.flush().await;
    assert_eq!(ssd.holds(fingerprint(), &names(3)), 3, "somebody lets it be stored");
    clock.set(Date::from_unix(START + 59));
    drop(site.manager.allocate(4));
    let again = site.manager.onboard(&names(3), UNKNOWN).await;
    assert_eq!(again.from, [(Level::G2, 3)], "extended in G2, and sound");
    site.assert_sound(&again.blocks);
    drop(again);
    clock.set(Date::from_unix(START + 60));
    assert_eq!(site.manager.matched(&names(1)).len() + site.manager.below(&names(0)), 0);
}

#[tokio::test(start_paused = true)]
async fn a_block_that_was_made_longer_lived_is_still_verified() {
    let clock = clock();
    let site = Site::timed(1, 2, vec![], &clock);
    site.device.write(BlockId(0), &content(name(0)));
    drop(site.compute_asking(0..1, ttl(10)));
    site.manager.flush().await;
    site.manager.renew(&names(1), &Retention::default());
    let loaded = load(site.host.as_ref().unwrap(), fingerprint(), names(1)).await;
    assert_eq!(loaded[0].as_ref().unwrap().header().keep, Keep::default());
}
