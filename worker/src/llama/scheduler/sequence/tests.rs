//! What a prefill reports to the decode worker.

use super::*;
use crate::engine::Engine;
use crate::engine::contract::{collect, request};
use crate::handoff::Progress;
use crate::llama::scheduler::output;
use crate::llama::tests::harness::{Harness, Shape};
use futures::{FutureExt, StreamExt};

#[tokio::test(flavor = "multi_thread")]
async fn the_last_blocks_of_a_prefill_are_reported_with_its_end() {
    let (harness, peers) = (Harness::new(Shape::default()), Peers::default());
    // Three blocks can be reused.
    let prompt: Vec<u32> = (0..49).collect();
    collect(harness.engine.generate(request(&*harness.engine, &prompt, 1)).await.unwrap()).await.unwrap();
    let prefill = Request { work: Work::Prefill, ..request(&*harness.engine, &prompt, 1) };
    let (sender, _stream) = output();
    let stats = EngineStats::new().accept(prompt.len());
    let mut sequence = Sequence::new(prefill, harness.engine.card(), 0, sender, stats);
    // As if they were computed.
    let compute = |sequence: &mut Sequence, blocks: usize| {
        let found = harness.manager.lookup(&sequence.missing_hashes()[..blocks]);
        sequence.attach(found, &harness.manager);
        sequence.report_progress(&peers, WorkerId(1));
    };
    compute(&mut sequence, 2);
    let handoff = sequence.progress.as_ref().unwrap().id();
    let mut followed = peers.follow(handoff).unwrap();
    assert_eq!(followed.next().await, Some(Progress::Computing { blocks: 2 }));
    compute(&mut sequence, 1);
    assert_eq!((sequence.pending(), followed.next().now_or_never()), (0, None));
    sequence.handoff(&peers, WorkerId(1)).complete(Vec::new());
    assert_eq!(followed.next().await, Some(Progress::Complete { cached: Vec::new() }));
}
