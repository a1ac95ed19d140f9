//! Prefixes that are not computed again: from each tier, partly loaded, from a prefill worker, from a request beside.

use super::*;
use crate::handoff::{HandoffId, HandoffTicket};
use kvbm::{Faults, Faulty};

/// One writer fills all tiers; then the same turn is answered from each of them.
#[tokio::test(flavor = "multi_thread")]
async fn a_prefix_is_the_same_from_every_tier() {
    for (seed, mut rng) in cases() {
        let talk = Conversation::draw(&mut rng).await;
        let ssd = tempfile::tempdir().unwrap();
        let store = tempfile::tempdir().unwrap();
        let below = |lower| Harness::new(Shape { lower, ..Shape::default() });

        let log = disk(ssd.path());
        let writer = Harness::new(Shape {
            g2: 1200,
            lower: vec![Arc::clone(&log), shared(store.path()).await],
            ..Shape::default()
        });
        writer.run(&talk.first, ANSWER).await;
        talk.second_on(&writer, &format!("seed {seed}, g1"), Some(Level::G1)).await;
        writer.settle().await;
        talk.second_on(&writer, &format!("seed {seed}, g2"), Some(Level::G2)).await;
        talk.second_on(&below(vec![log]), &format!("seed {seed}, g3"), Some(Level::G3)).await;
        let other = shared(store.path()).await;
        talk.second_on(&below(vec![other]), &format!("seed {seed}, shared folder"), Some(Level::G4)).await;
        writer.close().await;
        let again = below(vec![disk(ssd.path())]);
        talk.second_on(&again, &format!("seed {seed}, g3 after a restart"), Some(Level::G3)).await;
    }
}

/// Blocks arrive late, in any order, corrupt or never: those that arrived in time are used, the others are computed,
/// and the answer is the same.
#[tokio::test(flavor = "multi_thread")]
async fn a_partly_loaded_prefix_changes_nothing() {
    let late = std::time::Duration::ZERO..=std::time::Duration::from_millis(400);
    for (seed, mut rng) in cases() {
        let talk = Conversation::draw(&mut rng).await;
        let ssd = tempfile::tempdir().unwrap();
        let log = disk(ssd.path());
        let writer = Harness::new(Shape { lower: vec![Arc::clone(&log)], ..Shape::default() });
        writer.run(&talk.first, ANSWER).await;
        writer.settle().await;
        let faults = Faults { latency: late.clone(), lost: 0.1, corrupt: 0.1, hang: 0.1, ..Faults::default() };
        let faulty: Arc<dyn Tier> = Arc::new(Faulty::new(log, seed, faults));
        let reader = Harness::new(Shape { chunk: 64, lower: vec![faulty], ..Shape::default() });
        for round in 0..3 {
            let case = format!("seed {seed}, round {round}");
            let both = [talk.second_on(&reader, &case, None), talk.second_on(&reader, &case, None)];
            join_all(both).await;
            while reader.manager.allocate(reader.manager.capacity()).is_none() {
                tokio::task::yield_now().await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_changes_nothing() {
    for (seed, mut rng) in cases() {
        let talk = Conversation::draw(&mut rng).await;
        let hand_over = async || {
            let peers = Peers::default();
            let prefill = Harness::new(Shape { worker: 1, peers: peers.clone(), ..Shape::default() });
            let decode = Harness::new(Shape { worker: 2, peers, ..Shape::default() });
            // Computing the blocks again takes longer than any transfer.
            decode.assume_slow_prefill();
            let mut prefill_request = request(&*prefill.engine, &talk.second, 1);
            prefill_request.work = Work::Prefill;
            let mut stream = prefill.engine.generate(prefill_request).await.unwrap();
            let Some(Ok(Output::Handoff(handoff))) = stream.next().await else {
                panic!("a prefill begins with a handoff")
            };
            let answer = decode.run_as(Work::Resume(handoff), &talk.second, ANSWER).await;
            answer.must_equal(&talk.answers[1], &format!("seed {seed}, handoff"), None);
            assert_eq!(answer.report.cached_tokens(), 0, "tokens computed for the request do not count as cached");
            answer.report.handed_over as usize
        };
        let all = (talk.second.len() - 1) / 16 * 16;
        unless_stalled(async || (hand_over().await == all).then_some(())).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn yielded_handoff_blocks_are_counted_once() {
    let (mut rng, peers) = (Rng(19), Peers::default());
    let prefill = Harness::new(Shape { worker: 1, peers: peers.clone(), ..Shape::default() });
    let decode = Harness::new(Shape { worker: 2, peers, g1: 60, engine: keeps_unread(), ..Shape::default() });
    let prompt = rng.tokens(448);
    prefill.run(&prompt[..304], 1).await;
    let start = async |harness: &Harness, work, prompt: &[u32], answer| {
        let mut request = request(&*harness.engine, prompt, answer);
        (request.work, request.stop.ignore_eos) = (work, true);
        harness.engine.generate(request).await.unwrap()
    };
    let mut prefill_stream = start(&prefill, Work::Prefill, &prompt, 1).await;
    let Some(Ok(Output::Handoff(handoff))) = prefill_stream.next().await else {
        panic!("a prefill begins with a handoff")
    };
    let available = async |most: usize| {
        let fit = async {
            while decode.manager.available() > most {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_mins(5), fit).await.expect("blocks are taken");
    };
    // One request runs until its output is unread, with 25 blocks; the next needs 35; the handoff takes 27 of the
    // others.
    let runs = start(&decode, Work::Generate, &rng.tokens(320), 600).await;
    available(35).await;
    let first = tokio::spawn(collect(start(&decode, Work::Generate, &rng.tokens(545), 1).await));
    decode.engine.load().wait_for(|load| load.waiting == 1).await.unwrap();
    let second = tokio::spawn(collect(start(&decode, Work::Resume(handoff), &prompt, 1).await));
    available(8).await;
    drop(runs);
    first.await.unwrap().unwrap();
    let report = second.await.unwrap().unwrap().prompt.unwrap();
    assert_eq!((report.handed_over, report.cached_tokens()), (432, 304));
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_of_an_unknown_peer_are_recomputed() {
    let mut rng = Rng(7);
    let talk = Conversation::draw(&mut rng).await;
    let peers = Peers::default();
    let ticket = HandoffTicket { peer: WorkerId(99), url: None, handoff: HandoffId(1) };
    let harness = Harness::new(Shape { peers, ..Shape::default() });
    let answer = harness.run_as(Work::Resume(ticket.encode()), &talk.second, ANSWER).await;
    answer.must_equal(&talk.answers[1], "unknown peer", None);
    assert_eq!((answer.report.handed_over, answer.report.cached_tokens()), (0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn identical_prompts_are_computed_once() {
    let harness = Harness::new(Shape { chunk: 64, ..Shape::default() });
    let prompt = Rng(5).tokens(640);
    let reports = join_all((0..4).map(|_| harness.run(&prompt, 3))).await;
    let computed: u32 = reports.iter().map(|answer| answer.report.computed).sum();
    // Each computes its own last block; all other blocks are computed once.
    assert!(computed <= 640 + 3 * 16, "{computed} tokens computed");
}
