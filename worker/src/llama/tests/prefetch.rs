//! Prefixes that are copied into the host memory of an engine before a request needs them.

use super::*;
use crate::engine::{PrefetchError, PrefixCopy};
use crate::handoff::PeerTicket;
use kvbm::SequenceHash;

const HOLDER: WorkerId = WorkerId(1);
const BLOCKS: usize = 24;
const OUTCOMES: &str = "blockyard_worker_prefetches_total";

fn hashes(prompt: &[u32]) -> Vec<SequenceHash> {
    let card = Arc::clone(runtime().card());
    ChainKey::root(&Domain::shared(), &card.identity, None).hashes(prompt, card.block_size)
}

/// A copy of a prompt from the memory of the holder.
fn copy(prompt: &[u32]) -> PrefixCopy {
    let peer = PeerTicket { peer: HOLDER, url: None }.encode();
    PrefixCopy { blocks: hashes(prompt).into(), peer: Some(peer) }
}

fn prompt(seed: u64) -> Vec<u32> {
    Rng(seed).tokens(16 * BLOCKS as u64 + 1)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_comes_from_the_memory_of_another_worker_and_gives_the_same_answer() {
    let (prompt, peers) = (prompt(71), Peers::default());
    let holder = Harness::new(Shape { worker: HOLDER.0, peers: peers.clone(), ..Shape::default() });
    let want = holder.run(&prompt, 5).await.ids;
    let idle = Harness::new(Shape { worker: 2, g2: 200, peers, ..Shape::default() });
    let done = idle.engine.prefetch(copy(&prompt)).await.unwrap();
    assert_eq!((done.blocks as usize, done.bytes), (BLOCKS, (BLOCKS * runtime().block_bytes()) as u64));
    assert_eq!(idle.manager.count_in_tiers(&hashes(&prompt)), BLOCKS, "they are in its host memory");
    assert_eq!(idle.manager.hold(&hashes(&prompt)).len(), 0, "and take no device memory");
    assert_eq!(idle.count("blockyard_worker_prefetched_blocks_total", "w"), BLOCKS as u64);
    assert_eq!(idle.run(&prompt, 5).await.ids, want);
    assert_eq!(idle.engine.prefetch(copy(&prompt)).await.unwrap().blocks, 0, "they are there already");
    assert_eq!(idle.count(OUTCOMES, "complete"), 2);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_that_two_routers_order_is_made_once() {
    let (prompt, peers) = (prompt(76), Peers::default());
    let holder = Harness::new(Shape { worker: HOLDER.0, peers: peers.clone(), ..Shape::default() });
    let want = holder.run(&prompt, 5).await.ids;
    let idle = Harness::new(Shape { worker: 2, g2: 200, peers, ..Shape::default() });
    let orders = tokio::join!(idle.engine.prefetch(copy(&prompt)), idle.engine.prefetch(copy(&prompt)));
    let mut blocks = 0;
    for answer in [orders.0, orders.1] {
        match answer {
            Ok(done) => blocks += done.blocks as usize,
            Err(error) => assert_eq!(error, PrefetchError::Busy, "the other one is being made"),
        }
    }
    assert_eq!((blocks, idle.manager.count_in_tiers(&hashes(&prompt))), (BLOCKS, BLOCKS));
    assert_eq!(idle.count("blockyard_worker_prefetched_blocks_total", "w"), BLOCKS as u64);
    assert_eq!(idle.run(&prompt, 5).await.ids, want);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_without_host_memory_declines() {
    let (prompt, peers) = (prompt(72), Peers::default());
    let holder = Harness::new(Shape { worker: HOLDER.0, peers: peers.clone(), ..Shape::default() });
    holder.run(&prompt, 1).await;
    let idle = Harness::new(Shape { worker: 2, peers, ..Shape::default() });
    assert_eq!(idle.engine.prefetch(copy(&prompt)).await, Err(PrefetchError::NoMemory));
    assert_eq!(idle.count(OUTCOMES, "no_memory"), 1);
}

#[tokio::test(flavor = "multi_thread")]
async fn an_unknown_worker_or_prefix_is_not_found() {
    let peers = Peers::default();
    let idle = Harness::new(Shape { worker: 2, g2: 200, peers: peers.clone(), ..Shape::default() });
    assert_eq!(idle.engine.prefetch(copy(&prompt(73))).await, Err(PrefetchError::NotFound), "no such worker");
    let _holder = Harness::new(Shape { worker: HOLDER.0, peers, ..Shape::default() });
    assert_eq!(idle.engine.prefetch(copy(&prompt(73))).await, Err(PrefetchError::NotFound), "no such prefix");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_engine_with_a_queue_declines() {
    let (prompt, peers) = (prompt(74), Peers::default());
    let holder = Harness::new(Shape { worker: HOLDER.0, peers: peers.clone(), ..Shape::default() });
    holder.run(&prompt, 1).await;
    let engine = Settings { max_num_seqs: 1, ..keeps_unread() };
    let busy = Harness::new(Shape { worker: 2, g2: 200, peers, engine, ..Shape::default() });
    // The first is never read, so it stays in the batch, and the second waits.
    let mut streams = Vec::new();
    for _ in 0..2 {
        streams.push(busy.engine.generate(request(&*busy.engine, &Rng(75).tokens(40), 400)).await.unwrap());
    }
    busy.engine.load().wait_for(|load| load.running == 1 && load.waiting == 1).await.unwrap();
    assert_eq!(busy.engine.prefetch(copy(&prompt)).await, Err(PrefetchError::Busy));
    drop(streams);
    busy.engine.load().wait_for(crate::plane::Load::is_idle).await.unwrap();
    assert_eq!(busy.engine.prefetch(copy(&prompt)).await.map(|done| done.blocks as usize), Ok(BLOCKS));
}
