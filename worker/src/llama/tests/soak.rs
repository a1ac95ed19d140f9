//! All faults of the tiers below the engine, combined, seeded and under load: answers do not change.
//!
//! `BLOCKYARD_SOAK_SECONDS=3600` for a long run. A failure names its seed.

use super::*;
use kvbm::{DiskTier, Faults, Faulty, ObjectTier, disk, object};
use std::collections::HashSet;
use std::fs;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout};

const TURNS: usize = 3;
const CLIENTS: u64 = 4;
/// Longer than any request takes under these faults.
const REQUEST_TIMEOUT: Duration = Duration::from_mins(2);
/// Capacity of G3, in bytes.
const G3_CAPACITY: u64 = 6 << 20;

fn length() -> Duration {
    let seconds = std::env::var("BLOCKYARD_SOAK_SECONDS").map_or(20, |n| n.parse().unwrap());
    Duration::from_secs(seconds)
}

/// The prompts of a conversation, each with the answer of an engine without a cache.
struct Script(Vec<(Vec<u32>, Vec<u32>)>);

impl Script {
    async fn draw(rng: &mut Rng, opening: &[u32]) -> Self {
        let mut compute = Vec::new();
        let mut prompt = opening.to_vec();
        for _ in 0..TURNS {
            prompt.extend(rng.random_tokens(30..250));
            let answer = Harness::new(Shape::default()).run(&prompt, ANSWER).await.ids;
            compute.push((prompt.clone(), answer.clone()));
            prompt.extend(answer);
        }
        Self(compute)
    }
}

/// The fault profiles that are set one after the other.
fn fault_profiles() -> Vec<Faults> {
    let ms = Duration::from_millis;
    let none = Faults::default;
    vec![
        none(),
        Faults { error: 0.3, ..none() },
        Faults { short: 0.2, corrupt: 0.2, wrong: 0.2, ..none() },
        Faults { busy: 0.5, lost: 0.3, ..none() },
        Faults { latency: ms(0)..=ms(400), error: 0.1, ..none() },
        Faults { hang: 0.05, corrupt: 0.05, ..none() },
        // Every write and every read fails.
        Faults { error: 1.0, ..none() },
    ]
}

fn files(folder: &Path) -> Vec<PathBuf> {
    let (mut found, mut folders) = (Vec::new(), vec![folder.to_owned()]);
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
            // A file may be deleted after it was listed.
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => folders.push(entry.path()),
                _ => found.push(entry.path()),
            }
        }
    }
    found.sort();
    found
}

/// Flips a bit of a file, truncates it, or deletes it.
fn damage(rng: &mut Rng, file: &Path, deletes: bool) {
    use std::os::unix::fs::FileExt;
    let Ok(open) = fs::OpenOptions::new().read(true).write(true).open(file) else { return };
    let length = open.metadata().map_or(0, |meta| meta.len());
    if length == 0 {
        return;
    }
    let at = rng.within(0..length);
    match rng.within(0..8) {
        0 if deletes => drop(fs::remove_file(file)),
        1 if deletes => drop(open.set_len(at)),
        _ => {
            let mut byte = [0];
            if open.read_exact_at(&mut byte, at).is_ok() {
                let _ = open.write_all_at(&[byte[0] ^ (1 << rng.within(0..8))], at);
            }
        }
    }
}

/// Asserts that a tier holds exactly the blocks that it has announced.
fn assert_agrees(log: &EventLog, tier: &dyn Tier, fingerprint: kvbm::Fingerprint, case: &str) {
    let announced: HashSet<_> = log.snapshot().blocks().filter(|(at, _)| *at == tier.level()).collect();
    let level = tier.level();
    assert!(
        announced.iter().all(|(_, name)| tier.holds(fingerprint, &[*name]) == 1),
        "{case}: {level} lacks announced blocks"
    );
    assert_eq!(announced.len() as u64, tier.usage().blocks, "{case}: {level} holds blocks that it has not announced");
}

#[tokio::test(flavor = "multi_thread")]
async fn faults_of_tiers_do_not_change_answers() {
    let seed = std::env::var("BLOCKYARD_SOAK_SEED").map_or(1, |n| n.parse().unwrap());
    let mut rng = Rng(seed);
    let opening = rng.tokens(100);
    let mut scripts = Vec::new();
    for n in 0..6 {
        // Half of them share a prefix.
        scripts.push(Script::draw(&mut rng, if n % 2 == 0 { &opening } else { &[] }).await);
    }
    let scripts = Arc::new(scripts);

    let (ssd, store) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let logs = [log(), log()];
    let settings = disk::Settings { capacity_bytes: G3_CAPACITY, segment_bytes: 512 << 10, min_free_bytes: 0 };
    let g3: Arc<dyn Tier> = DiskTier::open(ssd.path(), settings, Arc::clone(&logs[0])).unwrap();
    let small = object::Settings { object_bytes: 256 << 10, object_blocks: 1, ..object::Settings::default() };
    let g4: Arc<dyn Tier> = ObjectTier::open_folder(store.path(), small, Arc::clone(&logs[1])).unwrap();
    let faulty = [&g3, &g4].map(|tier| Arc::new(Faulty::new(Arc::clone(tier), seed, Faults::default())));
    let lower = faulty.iter().map(|tier| Arc::clone(tier) as Arc<dyn Tier>).collect();
    // G1 holds two long conversations, G2 a few more blocks.
    let harness = Arc::new(Harness::new(Shape { chunk: 64, g1: 130, g2: 40, lower, ..Shape::default() }));

    let over = Arc::new(AtomicBool::new(false));
    let clients = (0..CLIENTS).map(|client| {
        let (harness, scripts, over) = (Arc::clone(&harness), Arc::clone(&scripts), Arc::clone(&over));
        let mut rng = Rng(seed * 1000 + client);
        tokio::spawn(async move {
            let mut answered = 0_u32;
            while !over.load(Relaxed) {
                let script = &scripts[rng.within(0..scripts.len() as u64) as usize];
                let (prompt, want) = &script.0[rng.within(0..TURNS as u64) as usize];
                let case = format!("seed {seed}, client {client}, request {answered}, {} tokens", prompt.len());
                let mut stream = harness.engine.generate(request(&*harness.engine, prompt, ANSWER)).await.unwrap();
                if rng.within(0..6) == 0 {
                    // Some clients disconnect.
                    let _ = timeout(Duration::from_millis(rng.within(0..60)), stream.next()).await;
                    continue;
                }
                let all =
                    timeout(REQUEST_TIMEOUT, collect(stream)).await.unwrap_or_else(|_| panic!("{case}: timed out"));
                assert_eq!(all.unwrap().ids, *want, "{case}: another answer");
                answered += 1;
            }
            answered
        })
    });
    let clients: Vec<_> = clients.collect();
    let profiles = fault_profiles();
    let (end, mut largest) = (Instant::now() + length(), 0);
    while Instant::now() < end {
        for tier in &faulty {
            tier.set(profiles[rng.within(0..profiles.len() as u64) as usize].clone());
        }
        for _ in 0..rng.within(0..4) {
            let (folder, deletes) = if rng.within(0..2) == 0 { (ssd.path(), false) } else { (store.path(), true) };
            let files = files(folder);
            if !files.is_empty() {
                let file = &files[rng.within(0..files.len() as u64) as usize];
                damage(&mut rng, file, deletes);
            }
        }
        sleep(Duration::from_millis(rng.within(100..900))).await;
        largest = largest.max(g3.usage().bytes);
    }
    for tier in &faulty {
        tier.set(Faults::default());
    }
    over.store(true, Relaxed);
    let mut answered = 0;
    for client in join_all(clients).await {
        answered += client.unwrap();
    }
    assert!(answered > 0, "seed {seed}: no request was answered");

    timeout(REQUEST_TIMEOUT, harness.settle()).await.expect("all slots are released and all offloads end");
    assert_eq!(harness.manager.available(), harness.manager.capacity(), "seed {seed}: slots");
    assert!(largest <= G3_CAPACITY, "seed {seed}: {largest} bytes on disk");
    let fingerprint = harness.memory.device().fingerprint();
    assert_agrees(&logs[0], &*g3, fingerprint, &format!("seed {seed}"));
    assert_agrees(&logs[1], &*g4, fingerprint, &format!("seed {seed}"));
    let host = harness.host.as_ref().unwrap();
    let announced = harness.log.snapshot();
    let in_host: HashSet<_> = announced.blocks().filter(|(level, _)| *level == Level::G2).collect();
    assert_eq!(in_host.len() as u64, host.usage().blocks, "seed {seed}: G2");
    // Every answer once more, without faults.
    for (prompt, want) in scripts.iter().flat_map(|script| &script.0) {
        assert_eq!(harness.run(prompt, ANSWER).await.ids, *want, "seed {seed}, afterwards");
    }
}

/// While a request waits for its blocks, it adds no rows to the steps of others.
#[tokio::test(start_paused = true)]
async fn a_request_that_waits_for_blocks_adds_no_rows() {
    let ssd = tempfile::tempdir().unwrap();
    let below = disk(ssd.path());
    let mut rng = Rng(31);
    // One token, so that prefill is not measured: in virtual time it would take no time.
    let (beside, prompt) = (rng.tokens(1), rng.tokens(641));
    let writer = Harness::new(Shape { lower: vec![Arc::clone(&below)], ..Shape::default() });
    let want = writer.run(&prompt, 1).await.ids;
    writer.settle().await;
    let late = Duration::from_millis(50);
    let slow: Arc<dyn Tier> = Arc::new(Faulty::new(below, 1, Faults { latency: late..=late, ..Faults::default() }));
    let harness = Harness::new(Shape { chunk: 64, lower: vec![slow], ..Shape::default() });
    let mut other = harness.engine.generate(request(&*harness.engine, &beside, 200)).await.unwrap();
    let Some(Ok(Output::Tokens(first))) = other.next().await else { panic!("a first token") };
    let waiting = harness.engine.generate(request(&*harness.engine, &prompt, 1)).await.unwrap();
    let (rest, waited) = futures::join!(collect(other), collect(waiting));
    let (rest, waited) = (rest.unwrap(), waited.unwrap());
    assert_eq!((first.ids.len() + rest.ids.len(), &waited.ids), (200, &want));
    assert_eq!(waited.prompt.unwrap().cached_tokens(), 640, "all cached blocks were waited for");
    // The single token that is always computed takes part in a decode step.
    let (prefill, decode) = (harness.steps("prefill"), harness.steps("decode"));
    assert!(prefill == 0 && (200..=201).contains(&decode), "{prefill} steps with prompts, {decode} without");
}
