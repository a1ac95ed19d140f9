//! What a request asks for its blocks, from the request to every tier and back to the next request.

use super::*;
use crate::llama::scheduler::MOMENT;
use kvbm::{Date, Retention};
use std::time::{Duration, Instant};

const START: u64 = 1_000;
const REUSED: u32 = 96;

impl Rig {
    /// Asks as `domain`, on terms, and says how many tokens of the prompt were cached.
    async fn ask(&self, prompt: &[u32], domain: &Domain, retention: Retention) -> (u32, Vec<u32>) {
        let mut request = request(&*self.engine, prompt, 5);
        request.domain = domain.clone();
        request.terms.retention = retention;
        let all = collect(self.engine.generate(request).await.unwrap()).await.unwrap();
        (all.prompt.unwrap().cached_tokens(), all.ids)
    }

    async fn cached(&self, prompt: &[u32], retention: Retention) -> u32 {
        self.ask(prompt, &Domain::shared(), retention).await.0
    }

    /// Prompts of others, enough to push out everything that may go.
    async fn scan(&self, seed: u64) {
        let mut rng = Rng(seed);
        let prompts: Vec<Vec<u32>> = (0..6).map(|_| rng.tokens(100)).collect();
        // Twice each: no policy would keep what was used less.
        for prompt in prompts.iter().chain(&prompts) {
            self.cached(prompt, Retention::default()).await;
        }
    }
}

fn prompt() -> Vec<u32> {
    Rng(21).tokens(u64::from(REUSED) + 1)
}

fn no_store() -> Retention {
    Retention { store: false, ..Retention::default() }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_not_to_be_stored_is_found_on_the_device_and_nowhere_below() {
    let (ssd, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let lower = vec![disk(ssd.path()), shared(store.path()).await];
    let rig = Rig::new(Shape { g2: 40, lower: lower.clone(), ..Shape::default() });
    assert_eq!(rig.cached(&prompt(), no_store()).await, 0);
    assert_eq!(rig.cached(&prompt(), no_store()).await, REUSED, "from the device");
    rig.settle().await;
    assert!(lower.iter().all(|tier| tier.usage().blocks == 0));
    assert_eq!(rig.cached(&prompt(), Retention::default()).await, 0, "computed again");
    // This one may be stored, and so the next finds it below.
    rig.settle().await;
    assert!(lower.iter().all(|tier| tier.usage().blocks > 0));
    assert!(rig.cached(&prompt(), no_store()).await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_over_is_computed_again_whichever_tier_has_it() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Clock::manual(Date::from_unix(START));
    let asked = Retention { ttl: Some(Duration::from_mins(1)), ..Retention::default() };
    let cold = |lower| Rig::new(Shape { lower, clock: clock.clone(), ..Shape::default() });
    let ssd = disk(folder.path());
    let rig = Rig::new(Shape { g2: 40, lower: vec![ssd.clone()], clock: clock.clone(), ..Shape::default() });
    rig.cached(&prompt(), asked).await;
    rig.manager.flush().await;
    clock.set(Date::from_unix(START + 59));
    for (rig, from) in [(&rig, "memory"), (&cold(vec![ssd.clone()]), "ssd")] {
        // Asks for the very end that the blocks have already.
        let second = Retention { ttl: Some(Duration::from_secs(1)), ..asked };
        assert!(rig.cached(&prompt(), second).await > 0, "{from}");
        rig.manager.flush().await;
    }
    clock.set(Date::from_unix(START + 60));
    for (rig, from) in [(&rig, "memory"), (&cold(vec![ssd.clone()]), "ssd")] {
        // Not to be stored, so that one does not find what the other computed.
        assert_eq!(rig.cached(&prompt(), no_store()).await, 0, "{from}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_pinned_survives_a_scan() {
    let clock = Clock::manual(Date::from_unix(START));
    let rig = Rig::new(Shape { g1: 20, clock: clock.clone(), ..Shape::default() });
    let pinned = Retention { pin: Some(Duration::from_mins(5)), ..Retention::default() };
    rig.cached(&prompt(), pinned).await;
    for seed in 1..4 {
        rig.scan(seed).await;
    }
    assert!(rig.manager.available() < 20);
    assert_eq!(rig.cached(&prompt(), Retention::default()).await, REUSED);
    clock.set(Date::from_unix(START + 300));
    rig.settle().await;
    assert_eq!(rig.cached(&prompt(), Retention::default()).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_give_way_to_a_request_that_could_not_run_beside_them() {
    let rig = Rig::new(Shape { g1: 20, ..Shape::default() });
    let pinned = Retention { pin: Some(Duration::from_hours(1)), ..Retention::default() };
    rig.cached(&prompt(), pinned).await;
    assert!(rig.manager.available() < 16);
    let long = Rng(5).tokens(16 * 18);
    assert_eq!(rig.cached(&long, Retention::default()).await, 0);
    assert_eq!(rig.cached(&long, Retention::default()).await as usize, (long.len() - 1) / 16 * 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_give_way_to_a_hand_over_only_when_it_does_not_end() {
    for ends in [true, false] {
        let (pinned, left) = loop {
            let rig = Rig::new(Shape { g1: 20, ..Shape::default() });
            let pinned = Retention { pin: Some(Duration::from_hours(1)), ..Retention::default() };
            rig.cached(&prompt(), pinned).await;
            let mut leg = request(&*rig.engine, &Rng(6).tokens(16 * 4 + 1), 1);
            leg.work = Work::Prefill;
            let mut handing = rig.engine.generate(leg).await.unwrap();
            assert!(matches!(handing.next().await, Some(Ok(Output::Handoff(_)))));
            let (pinned, start) = (rig.manager.pinned(), Instant::now());
            // It fits beside the pins, once those four blocks are free.
            let long = request(&*rig.engine, &Rng(5).tokens(16 * 12), 1);
            let asking = tokio::spawn(collect(rig.engine.generate(long).await.unwrap()));
            if ends {
                rig.engine.load().wait_for(|load| load.waiting + load.running > 0).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
                drop(handing);
                let waited = start.elapsed();
                asking.await.unwrap().unwrap();
                // Of a machine that was busy elsewhere in between nothing is to be learned.
                if waited > MOMENT / 2 {
                    continue;
                }
            } else {
                asking.await.unwrap().unwrap();
            }
            break (pinned, rig.manager.pinned());
        };
        assert_eq!((pinned, left), (6, if ends { 6 } else { 0 }));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_came_up_behind_a_bad_block_keeps_nobody_waiting() {
    let folder = tempfile::tempdir().unwrap();
    let ssd = disk(folder.path());
    let long = Rng(5).tokens(16 * 18);
    let writer = Rig::new(Shape { lower: vec![ssd.clone()], ..Shape::default() });
    writer.cached(&long, Retention::default()).await;
    let second = writer.kv(&long[..32])[writer.memory.device().block_bytes()..][..64].to_vec();
    writer.settle().await;
    spoil(folder.path(), &second);

    let rig = Rig::new(Shape { g1: 20, lower: vec![ssd], ..Shape::default() });
    let mut other = rig.engine.generate(request(&*rig.engine, &Rng(6).tokens(16), 200)).await.unwrap();
    other.next().await.unwrap().unwrap();
    let asking = tokio::spawn(collect(rig.engine.generate(request(&*rig.engine, &long, 1)).await.unwrap()));
    rig.engine.load().wait_for(|load| load.waiting > 0).await.unwrap();
    // Time for what is whole to come up while it waits.
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(other);
    let answer = tokio::time::timeout(Duration::from_mins(1), asking).await.expect("nothing runs, so it has its turn");
    assert_eq!(answer.unwrap().unwrap().ids.len(), 1);
}

/// Changes one byte of what a log has in its files.
fn spoil(folder: &std::path::Path, bytes: &[u8]) {
    for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let Ok(mut all) = std::fs::read(&file) else { continue };
        if let Some(at) = all.windows(bytes.len()).position(|part| part == bytes) {
            all[at] ^= 1;
            return std::fs::write(file, all).unwrap();
        }
    }
    panic!("it rests in no file");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tenants_share_nothing_and_get_the_same_answer() {
    let folder = tempfile::tempdir().unwrap();
    let ssd = disk(folder.path());
    let rig = Rig::new(Shape { g2: 40, lower: vec![ssd.clone()], ..Shape::default() });
    let tenants = ["ann", "bob"].map(|name| Domain::derived(b"a deployment's secret", name));
    let mut answers = Vec::new();
    for tenant in &tenants {
        let (cached, answer) = rig.ask(&prompt(), tenant, Retention::default()).await;
        assert_eq!(cached, 0, "nobody else's");
        answers.push(answer);
    }
    assert_eq!(answers[0], answers[1]);
    rig.settle().await;
    assert!(rig.ask(&prompt(), &tenants[1], Retention::default()).await.0 > 0);
    assert_eq!(rig.cached(&prompt(), Retention::default()).await, 0, "nor what everybody shares");
    // At rest each block says whose it is.
    let card = runtime().card().clone();
    for tenant in &tenants {
        let names = ChainKey::root(tenant, &card.identity, None).hashes(&prompt(), card.block_size);
        let mut loading = ssd.load(rig.memory.device().fingerprint(), names);
        while let Some((_, block)) = loading.next().await {
            assert_eq!(block.unwrap().unwrap().header.domain, tenant.id());
        }
    }
}
