//! Retention and cache domains of a request's blocks, in every tier and for the next request.

use super::*;
use crate::llama::scheduler::PIN_RELEASE_DELAY;
use kvbm::{Clock, Date, Retention};
use std::time::{Duration, Instant};

const START: u64 = 1_000;
const REUSED: u32 = 96;

impl Harness {
    /// Runs a request of `domain` with this retention; returns the cached prompt tokens and the answer.
    async fn ask(&self, prompt: &[u32], domain: &Domain, retention: Retention) -> (u32, Vec<u32>) {
        let mut request = request(&*self.engine, prompt, 5);
        request.domain = domain.clone();
        request.attributes.retention = retention;
        let all = collect(self.engine.generate(request).await.unwrap()).await.unwrap();
        (all.prompt.unwrap().cached_tokens(), all.ids)
    }

    async fn cached(&self, prompt: &[u32], retention: Retention) -> u32 {
        self.ask(prompt, &Domain::shared(), retention).await.0
    }

    /// Runs other prompts, enough to evict all unpinned blocks.
    async fn scan(&self, seed: u64) {
        let mut rng = Rng(seed);
        let prompts: Vec<Vec<u32>> = (0..6).map(|_| rng.tokens(100)).collect();
        // Twice each: no policy would keep blocks that were used less often.
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
async fn blocks_with_store_off_stay_on_the_device() {
    let (ssd, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let lower = vec![disk(ssd.path()), shared(store.path()).await];
    let harness = Harness::new(Shape { g2: 40, lower: lower.clone(), ..Shape::default() });
    assert_eq!(harness.cached(&prompt(), no_store()).await, 0);
    assert_eq!(harness.cached(&prompt(), no_store()).await, REUSED, "from the device");
    harness.settle().await;
    assert!(lower.iter().all(|tier| tier.usage().blocks == 0));
    assert_eq!(harness.cached(&prompt(), Retention::default()).await, 0, "computed again");
    // These blocks may be stored, so the next request finds them in a lower tier.
    harness.settle().await;
    assert!(lower.iter().all(|tier| tier.usage().blocks > 0));
    assert!(harness.cached(&prompt(), no_store()).await > 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn expired_blocks_are_recomputed_from_every_tier() {
    let folder = tempfile::tempdir().unwrap();
    let clock = Clock::manual(Date::from_unix(START));
    let asked = Retention { ttl: Some(Duration::from_mins(1)), ..Retention::default() };
    let cold = |lower| Harness::new(Shape { lower, clock: clock.clone(), ..Shape::default() });
    let ssd = disk(folder.path());
    let harness = Harness::new(Shape { g2: 40, lower: vec![ssd.clone()], clock: clock.clone(), ..Shape::default() });
    harness.cached(&prompt(), asked).await;
    harness.manager.flush().await;
    clock.set(Date::from_unix(START + 59));
    for (harness, from) in [(&harness, "memory"), (&cold(vec![ssd.clone()]), "ssd")] {
        // The same expiry that the blocks have already.
        let second = Retention { ttl: Some(Duration::from_secs(1)), ..asked };
        assert!(harness.cached(&prompt(), second).await > 0, "{from}");
        harness.manager.flush().await;
    }
    clock.set(Date::from_unix(START + 60));
    for (harness, from) in [(&harness, "memory"), (&cold(vec![ssd.clone()]), "ssd")] {
        // Not stored, so that the second does not find what the first computed.
        assert_eq!(harness.cached(&prompt(), no_store()).await, 0, "{from}");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn pinned_blocks_survive_a_scan() {
    let clock = Clock::manual(Date::from_unix(START));
    let harness = Harness::new(Shape { g1: 20, clock: clock.clone(), ..Shape::default() });
    let pinned = Retention { pin: Some(Duration::from_mins(5)), ..Retention::default() };
    harness.cached(&prompt(), pinned).await;
    for seed in 1..4 {
        harness.scan(seed).await;
    }
    assert!(harness.manager.available() < 20);
    assert_eq!(harness.cached(&prompt(), Retention::default()).await, REUSED);
    clock.set(Date::from_unix(START + 300));
    harness.settle().await;
    assert_eq!(harness.cached(&prompt(), Retention::default()).await, 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn pins_are_released_for_a_request_that_needs_all_memory() {
    let harness = Harness::new(Shape { g1: 20, ..Shape::default() });
    let pinned = Retention { pin: Some(Duration::from_hours(1)), ..Retention::default() };
    harness.cached(&prompt(), pinned).await;
    assert!(harness.manager.available() < 16);
    let long = Rng(5).tokens(16 * 18);
    assert_eq!(harness.cached(&long, Retention::default()).await, 0);
    assert_eq!(harness.cached(&long, Retention::default()).await as usize, (long.len() - 1) / 16 * 16);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_handoff_that_does_not_end_is_released_before_pins() {
    for ends in [true, false] {
        let (pinned, left) = loop {
            let harness = Harness::new(Shape { g1: 20, ..Shape::default() });
            let pinned = Retention { pin: Some(Duration::from_hours(1)), ..Retention::default() };
            harness.cached(&prompt(), pinned).await;
            let mut prefill_request = request(&*harness.engine, &Rng(6).tokens(16 * 4 + 1), 1);
            prefill_request.work = Work::Prefill;
            let mut handing = harness.engine.generate(prefill_request).await.unwrap();
            assert!(matches!(handing.next().await, Some(Ok(Output::Handoff(_)))));
            assert!(matches!(handing.next().await, Some(Ok(Output::Prefilled))));
            let (pinned, start) = (harness.manager.pinned(), Instant::now());
            // It fits beside the pins once the four blocks of the handoff are free.
            let long = request(&*harness.engine, &Rng(5).tokens(16 * 12), 1);
            let asking = tokio::spawn(collect(harness.engine.generate(long).await.unwrap()));
            if ends {
                harness.engine.load().wait_for(|load| load.waiting + load.running > 0).await.unwrap();
                tokio::time::sleep(Duration::from_millis(20)).await;
                drop(handing);
                let waited = start.elapsed();
                asking.await.unwrap().unwrap();
                // The machine was busy with other work: try again.
                if waited > PIN_RELEASE_DELAY / 2 {
                    continue;
                }
            } else {
                asking.await.unwrap().unwrap();
            }
            break (pinned, harness.manager.pinned());
        };
        assert_eq!((pinned, left), (6, 6));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn blocks_loaded_behind_a_corrupt_one_do_not_block_requests() {
    let folder = tempfile::tempdir().unwrap();
    let ssd = disk(folder.path());
    let long = Rng(5).tokens(16 * 18);
    let writer = Harness::new(Shape { lower: vec![ssd.clone()], ..Shape::default() });
    writer.cached(&long, Retention::default()).await;
    let second = writer.kv(&long[..32])[writer.memory.device().block_bytes()..][..64].to_vec();
    writer.settle().await;
    corrupt(folder.path(), &second);

    let harness = Harness::new(Shape { g1: 20, lower: vec![ssd], ..Shape::default() });
    let mut other = harness.engine.generate(request(&*harness.engine, &Rng(6).tokens(16), 200)).await.unwrap();
    other.next().await.unwrap().unwrap();
    let asking = tokio::spawn(collect(harness.engine.generate(request(&*harness.engine, &long, 1)).await.unwrap()));
    harness.engine.load().wait_for(|load| load.waiting > 0).await.unwrap();
    // Time for the sound blocks to be onboarded while it waits.
    tokio::time::sleep(Duration::from_millis(200)).await;
    drop(other);
    let answer = tokio::time::timeout(Duration::from_mins(1), asking).await.expect("nothing runs, so it is admitted");
    assert_eq!(answer.unwrap().unwrap().ids.len(), 1);
}

/// Changes one byte of a block in the files of the disk log.
fn corrupt(folder: &std::path::Path, bytes: &[u8]) {
    for file in std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path()) {
        let Ok(mut all) = std::fs::read(&file) else { continue };
        if let Some(at) = all.windows(bytes.len()).position(|part| part == bytes) {
            all[at] ^= 1;
            return std::fs::write(file, all).unwrap();
        }
    }
    panic!("the bytes are in no file");
}

#[tokio::test(flavor = "multi_thread")]
async fn two_tenants_share_no_blocks_and_get_the_same_answer() {
    let folder = tempfile::tempdir().unwrap();
    let ssd = disk(folder.path());
    let harness = Harness::new(Shape { g2: 40, lower: vec![ssd.clone()], ..Shape::default() });
    let tenants = ["ann", "bob"].map(|name| Domain::derived(b"a deployment's secret", name));
    let mut answers = Vec::new();
    for tenant in &tenants {
        let (cached, answer) = harness.ask(&prompt(), tenant, Retention::default()).await;
        assert_eq!(cached, 0, "no blocks of another tenant");
        answers.push(answer);
    }
    assert_eq!(answers[0], answers[1]);
    harness.settle().await;
    assert!(harness.ask(&prompt(), &tenants[1], Retention::default()).await.0 > 0);
    assert_eq!(harness.cached(&prompt(), Retention::default()).await, 0, "no blocks of the shared domain");
    // The header of a stored block names its domain.
    let card = runtime().card().clone();
    for tenant in &tenants {
        let names = ChainKey::root(tenant, &card.identity, None).hashes(&prompt(), card.block_size);
        let mut loading = ssd.load(harness.memory.device().fingerprint(), names);
        while let Some((_, block)) = loading.next().await {
            assert_eq!(block.unwrap().unwrap().header.domain, tenant.id());
        }
    }
}
