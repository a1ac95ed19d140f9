//! Restarts and crashes: published blocks are recovered, and nothing else.

use super::*;
use crate::block::{Block, Date, DomainId, SequenceHash};
use proptest::prelude::*;
use std::collections::BTreeMap;

#[tokio::test]
async fn a_restart_publishes_the_same_chains() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, before) = open(folder.path());
    let blocks: Vec<Block> = (0..5).flat_map(|seed| chain(seed, 60)).collect();
    store(&*tier, blocks.clone()).await;
    let other = chain_of(Fingerprint::from_bytes([7; 32]), 1, 9, 2_000);
    store(&*tier, other.clone()).await;
    let usage = tier.usage();
    drop(tier);

    let (tier, after) = open(folder.path());
    assert_eq!(announced(&after, Level::G3), announced(&before, Level::G3));
    assert_eq!(tier.usage().blocks, usage.blocks);
    for (fingerprint, blocks) in [(fingerprint(), &blocks), (other[0].header.fingerprint, &other)] {
        let loaded = load(&*tier, fingerprint, hashes(blocks)).await;
        assert!(loaded.iter().zip(blocks).all(|(loaded, block)| loaded.as_ref().unwrap().payload() == block.payload));
    }
    // Every published run follows the parent that it names.
    let parents: BTreeMap<_, _> = blocks.iter().map(|block| (block.header.hash, block.header.parent)).collect();
    for numbered in after.after(0, usize::MAX).unwrap() {
        let BlockEvent::Stored { mut parent, blocks, .. } = numbered.event else { panic!("only stored") };
        for block in blocks {
            assert_eq!(parents[&block], parent);
            parent = Some(block);
        }
    }
}

#[tokio::test]
async fn discard_then_store_survives_a_restart() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    let blocks = chain(1, 40);
    store(&*tier, blocks.clone()).await;
    for block in &blocks[30..] {
        tier.discard(fingerprint(), block.header.hash);
    }
    store(&*tier, blocks[35..].to_vec()).await;
    idle(&tier).await;
    for image in [crashed(folder.path()), {
        drop(tier);
        folder
    }] {
        let (tier, _) = open(image.path());
        assert_eq!(tier.holds(fingerprint(), &hashes(&blocks)), 30);
        assert_eq!(tier.usage().blocks, 35);
        assert!(all(&load(&*tier, fingerprint(), hashes(&blocks[35..])).await));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_loses_no_published_block() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, events) = open(folder.path());
    let writing = {
        let tier = tier.clone();
        tokio::spawn(async move {
            for seed in 0..40 {
                store(&*tier, chain(seed, 25)).await;
            }
        })
    };
    let mut most = 0;
    let mut done = false;
    while !done {
        // Once more after the last write, because a fast disk may finish before the first check.
        done = writing.is_finished();
        let published = announced(&events, Level::G3);
        let image = crashed(folder.path());
        let (reopened, _) = open(image.path());
        assert!(all(&load(&*reopened, fingerprint(), published.clone()).await), "published and lost");
        most = most.max(published.len());
        // A block whose write was interrupted is there whole or not at all.
        let found = reopened.usage().blocks as usize;
        let everything: Vec<_> = (0..40).flat_map(|seed| hashes(&chain(seed, 25))).collect();
        assert_eq!(load(&*reopened, fingerprint(), everything).await.iter().flatten().count(), found);
    }
    writing.await.unwrap();
    assert!(most > 0);
}

#[derive(Clone, Debug)]
enum Step {
    Store { chain: u64, blocks: usize },
    Discard { chain: u64, block: usize },
    Restart,
    Crash,
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let step = prop_oneof![
        4 => (0..4u64, 1..30usize).prop_map(|(chain, blocks)| Step::Store { chain, blocks }),
        2 => (0..4u64, 0..30usize).prop_map(|(chain, block)| Step::Discard { chain, block }),
        1 => Just(Step::Restart),
        1 => Just(Step::Crash),
    ];
    proptest::collection::vec(step, 1..25)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, ..ProptestConfig::default() })]

    #[test]
    fn the_tier_agrees_with_a_set(steps in steps()) {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).enable_time().build().unwrap();
        runtime.block_on(async {
            let mut folder = tempfile::tempdir().unwrap();
            let (mut tier, mut events) = open(folder.path());
            let mut model: BTreeSet<SequenceHash> = BTreeSet::new();
            for step in steps {
                match step {
                    Step::Store { chain: seed, blocks } => {
                        let blocks = chain(seed, blocks);
                        model.extend(hashes(&blocks));
                        store(&*tier, blocks).await;
                    }
                    Step::Discard { chain: seed, block } => {
                        let name = hashes(&chain(seed, 30))[block];
                        model.remove(&name);
                        tier.discard(fingerprint(), name);
                    }
                    Step::Restart => {
                        drop(tier);
                        (tier, events) = open(folder.path());
                    }
                    Step::Crash => {
                        idle(&tier).await;
                        let image = crashed(folder.path());
                        (tier, events) = open(image.path());
                        folder = image;
                    }
                }
                assert_eq!(announced(&events, Level::G3), model.iter().copied().collect::<Vec<_>>());
            }
            let held: Vec<_> = model.into_iter().collect();
            assert!(all(&load(&*tier, fingerprint(), held).await));
        });
    }
}

#[tokio::test]
async fn inspect_works_on_open_and_crashed_logs() {
    let folder = tempfile::tempdir().unwrap();
    let look = |folder: &Path| inspect(folder, Date::from_unix(100)).unwrap();
    assert_eq!(look(folder.path()), None);
    let (tier, _) = open(folder.path());
    let tenant = DomainId::from_bytes([7; 16]);
    let theirs: Vec<_> = chain(1, 30).into_iter().map(|block| block.in_domain(tenant)).collect();
    store(&*tier, [theirs.clone(), chain(2, 40)].concat()).await;
    tier.discard(fingerprint(), theirs[29].header.hash);
    idle(&tier).await;
    let image = crashed(folder.path());
    let held = |log: &LogContents| -> Vec<(String, u64)> {
        log.contents.iter().map(|entry| (entry.domain.clone(), entry.blocks)).collect()
    };
    let wanted = [(DomainId::SHARED.to_string(), 40), (tenant.to_string(), 29)];
    let now = look(folder.path()).unwrap();
    assert_eq!((held(&now), now.in_use, now.owner_pid), (wanted.to_vec(), true, Some(std::process::id())));
    assert!(now.open_segments > 0 && now.segments > now.open_segments, "{now:?}");
    let died = look(image.path()).unwrap();
    assert_eq!((held(&died), died.in_use), (wanted.to_vec(), false));
    let (again, _) = open(image.path());
    assert_eq!(again.usage().blocks, 69, "inspecting changed nothing");
    drop(tier);
    let left = look(folder.path()).unwrap();
    assert_eq!((held(&left), left.in_use, left.open_segments), (wanted.to_vec(), false, 0));
}
