//! What a request asked for goes with its blocks, down and up.

use super::*;
use crate::contract::load;
use crate::{Date, Keep, Priority};

fn custody() -> Custody {
    let date = |seconds| Some(Date::from_unix(seconds));
    let keep = Keep { expires: date(4e9 as u64), pinned: date(3e9 as u64), store: true, priority: Priority::High };
    Custody { domain: DomainId::from_bytes([5; 16]), keep }
}

async fn resting(tier: &dyn Tier) -> Vec<Option<Custody>> {
    let blocks = load(tier, fingerprint(), names(3)).await;
    blocks.iter().map(|block| block.as_ref().map(|block| block.header().custody())).collect()
}

#[tokio::test]
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

#[tokio::test]
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
