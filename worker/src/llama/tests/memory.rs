//! Too little device memory: preempted sequences, yielded blocks, requests that fill it.

use super::*;
use crate::engine::Error;
use kvbm::BlockEvent;

#[tokio::test(flavor = "multi_thread")]
async fn preemption_does_not_change_answers() {
    let mut rng = Rng(11);
    let prompts: Vec<_> = (0..6).map(|_| rng.tokens(300)).collect();
    // 60 blocks hold three such prompts with their answers; the others wait, and the youngest is preempted.
    let harness = Harness::new(Shape { g1: 60, g2: 200, ..Shape::default() });
    let answers = join_all(prompts.iter().map(|prompt| async {
        let mut request = request(&*harness.engine, prompt, 90);
        request.stop.ignore_eos = true;
        collect(harness.engine.generate(request).await.unwrap()).await.unwrap().ids
    }))
    .await;
    for (prompt, ids) in prompts.iter().zip(answers) {
        let alone = Harness::new(Shape::default()).run(prompt, 90).await;
        assert_eq!(ids, alone.ids);
    }
    // The prompts differ, so only a preempted sequence can hit blocks in G2.
    assert!(harness.count("blockyard_worker_preemptions_total", "w") > 0);
    assert!(harness.count("blockyard_tier_hit_blocks_total", "g2") > 0, "yielded blocks are onboarded again");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_preempted_sequence_onboards_while_it_waits() {
    unless_stalled(onboards_while_it_waits).await;
}

/// `None` if a request ended before the next one began, or if the blocks were not loaded.
async fn onboards_while_it_waits() -> Option<()> {
    let mut rng = Rng(13);
    let harness = Harness::new(Shape { g1: 60, g2: 400, engine: keeps_unread(), ..Shape::default() });
    harness.assume_slow_prefill();
    let mut running = 0;
    let mut start = async |tokens, answer| {
        let prompt = rng.tokens(tokens);
        let mut request = request(&*harness.engine, &prompt, answer);
        request.stop.ignore_eos = true;
        let stream = harness.engine.generate(request).await.unwrap();
        // One after the other: the last one that joins the batch is preempted. That may have happened before this test
        // sees it in the batch.
        running += 1;
        let preempted = || harness.count("blockyard_worker_preemptions_total", "w") > 0;
        let joins = async {
            while harness.engine.load().borrow().running != running && !preempted() {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_secs(20), joins).await.ok()?;
        Some((prompt, stream))
    };
    // 56 of 60 blocks at first. The first two need 22 more, so the youngest is preempted.
    let (_, mut long) = start(320, 600).await?;
    let (_, short) = start(128, 200).await?;
    let (prompt, victim) = start(448, 40).await?;
    let victim = tokio::spawn(collect(victim));
    let mut short = std::pin::pin!(collect(short));
    loop {
        tokio::select! {
            biased;
            ended = &mut short => break drop(ended.unwrap()),
            token = long.next() => drop(token.unwrap().unwrap()),
        }
    }
    // The output of the long one is not read from here on: it stays in the batch, and the youngest does not fit.
    assert!(harness.count("blockyard_worker_preemptions_total", "w") > 0);
    let card = Arc::clone(runtime().card());
    let names = ChainKey::root(&Domain::shared(), &card.identity, None).hashes(&prompt, card.block_size);
    let onboarded = || {
        let events = harness.log.after(0, usize::MAX).unwrap().into_iter().map(|numbered| numbered.event);
        let stored = events.filter_map(|event| match event {
            BlockEvent::Stored { level: Level::G1, blocks, .. } => Some(blocks),
            _ => None,
        });
        let theirs = stored.flatten().filter(|block| names.contains(block)).count();
        theirs > names.len()
    };
    let onboarding = async {
        while !onboarded() {
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(std::time::Duration::from_secs(20), onboarding).await.ok()?;
    assert!(!victim.is_finished(), "it still waits");
    collect(long).await.unwrap();
    let alone = Harness::new(Shape::default()).run(&prompt, 40).await;
    assert_eq!(victim.await.unwrap().unwrap().ids, alone.ids);
    Some(())
}

#[tokio::test(flavor = "multi_thread")]
async fn later_requests_yield_blocks_to_the_first() {
    let (mut rng, harness) = (Rng(17), Harness::new(Shape { g1: 60, engine: keeps_unread(), ..Shape::default() }));
    let start = async |prompt: &[u32], answer| {
        let mut request = request(&*harness.engine, prompt, answer);
        request.stop.ignore_eos = true;
        harness.engine.generate(request).await.unwrap()
    };
    let available = async |fits: &dyn Fn(usize) -> bool| {
        let fit = async {
            while !fits(harness.manager.available()) {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        tokio::time::timeout(std::time::Duration::from_mins(5), fit).await.expect("blocks come or go");
    };
    let known = rng.tokens(448);
    collect(start(&known, 1).await).await.unwrap();
    // Two run until they are 72 tokens ahead of their reader: 25 and 21 blocks.
    let mut running = Vec::new();
    for tokens in [320, 256] {
        running.push(start(&rng.tokens(tokens), 600).await);
    }
    available(&|blocks| blocks <= 14).await;
    // The first request needs 29 blocks; the second holds cached blocks.
    let first = tokio::spawn(collect(start(&rng.tokens(448), 1).await));
    harness.engine.load().wait_for(|load| load.waiting == 1).await.unwrap();
    let second = tokio::spawn(collect(start(&known, 1).await));
    available(&|blocks| blocks <= 4).await;
    assert!(!first.is_finished());
    running.pop();
    // After one running request has left, only the blocks that the second one holds are missing.
    tokio::time::timeout(std::time::Duration::from_secs(20), first)
        .await
        .expect("the first request runs")
        .unwrap()
        .unwrap();
    drop(running);
    second.await.unwrap().unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn the_context_is_what_the_memory_holds() {
    let full = runtime().card().context;
    for (g1, context) in [(12, 12 * 16), (full / 16, full), (full / 16 + 1, full)] {
        let engine = Harness::new(Shape { g1, ..Shape::default() }).engine;
        assert_eq!((engine.card().context, engine.models()[0].context), (context, context));
        let refused = engine.generate(request(&*engine, &vec![1; context], 1)).await.err();
        assert_eq!(refused, Some(Error::PromptTooLong { prompt: context, context }));
        let last = request(&*engine, &[1; 12 * 16 - 1], 1);
        assert_eq!(collect(engine.generate(last).await.unwrap()).await.unwrap().ids.len(), 1);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn filling_the_memory_ends_a_request_as_when_alone() {
    // Twelve blocks, so a context of 192 tokens. The first request stops within six full blocks, unread; the other
    // reuses those, and takes all.
    let shape = || Shape { g1: 12, engine: keeps_unread(), ..Shape::default() };
    let start = async |harness: &Harness, prompt: &[u32]| {
        let mut request = request(&*harness.engine, prompt, 600);
        request.stop.ignore_eos = true;
        harness.engine.generate(request).await.unwrap()
    };
    let prompt = Rng(23).tokens(25);
    let whole = collect(start(&Harness::new(shape()), &prompt).await).await.unwrap();
    assert_eq!((whole.ids.len(), whole.finish), (12 * 16 - 25, Some(FinishReason::Length)));
    // Once the first is read meanwhile, and once it stops when all blocks are taken.
    for reads in [true, false] {
        let harness = Harness::new(shape());
        let until = async |available: usize| {
            while harness.manager.available() > available {
                tokio::time::sleep(std::time::Duration::from_millis(2)).await;
            }
        };
        let done = async {
            let first = start(&harness, &prompt).await;
            until(6).await;
            // It stops 72 tokens ahead of its reader.
            let known = if reads { 72 } else { 12 * 16 - 73 - 25 };
            let second = start(&harness, &[&prompt[..], &whole.ids[..known]].concat()).await;
            if !reads {
                until(0).await;
                // Its reader goes on, and it needs another block.
                assert_eq!(collect(first).await.unwrap().ids, whole.ids);
            }
            let second = collect(second).await.unwrap();
            (known, second)
        };
        let done = tokio::time::timeout(std::time::Duration::from_mins(1), done).await;
        let (known, second) = done.unwrap_or_else(|_| panic!("the request waits for blocks forever, reads: {reads}"));
        assert_eq!(second.ids, whole.ids[known..]);
    }
}
