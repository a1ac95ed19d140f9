//! The real program under load while file I/O fails in every way, files are corrupted and the process is killed: every
//! answer stays the same, memory and file descriptors do not grow, and index, tiers and files agree afterwards.
//!
//! `BLOCKYARD_SOAK_SECONDS` sets the duration (20), `BLOCKYARD_SOAK_SEED` the random choices (1). Failures name it.

#![expect(clippy::unwrap_used, reason = "these are tests, of which clippy sees only the functions marked so")]

use super::process::{Client, Process};
use super::{cache, index_audit};
use futures::future::join_all;
use serde_json::Value;
use std::ffi::OsStr;
use std::fs;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering::Relaxed};
use std::time::Duration;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep, timeout};

const CLIENTS: u64 = 4;
/// Number of runs that end with SIGKILL under load. One more run is checked for leaks and stopped cleanly.
const KILLS: u64 = 3;
/// The longest that an answer, a recovery or a stop may take on any machine.
pub(crate) const WAIT_LIMIT: Duration = Duration::from_mins(5);
/// The fewest answers in each half of the last run, however slow the machine: with fewer the program is not warm.
const MIN_ANSWERS: f64 = 30.0;
/// Allowed growth of resident memory after warm-up, in bytes: the allocator keeps some.
const MAX_GROWTH_BYTES: u64 = 24 << 20;
/// Allowed growth of open files after warm-up: the number of connections varies.
const MAX_GROWTH_FILES: usize = 16;

/// Faults to inject: how many of 1,000 calls fail with EIO, how many writes fail with ENOSPC, how many calls are
/// short, how many are delayed, and the delay in microseconds.
const FAULT_PROFILES: [[u64; 5]; 6] = [
    [0, 0, 0, 0, 0],
    [0, 0, 500, 0, 0],
    [200, 0, 50, 0, 0],
    [0, 900, 0, 0, 0],
    [10, 10, 100, 300, 30_000],
    // Every call fails, so the tier's cooldown grows each time. Not used in the last run.
    [1_000, 0, 0, 0, 0],
];

/// A number from the environment.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |n| n.parse().unwrap())
}

/// `SplitMix64`: the seed reproduces all random choices.
pub(crate) struct Rng(u64);

impl Rng {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % limit
    }
}

/// The folders of the program, and the faults that are injected into its file I/O.
struct Harness {
    folder: tempfile::TempDir,
    seed: u64,
}

impl Harness {
    /// Makes the folders and compiles `faults.c`.
    fn new(seed: u64) -> Self {
        let harness = Self { folder: tempfile::tempdir().unwrap(), seed };
        fs::create_dir(harness.at("blocks")).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/faults.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", "-o"]).arg(harness.at("faults.so")).arg(source).arg("-ldl");
        assert!(compiler.status().unwrap().success(), "cc compiles faults.c");
        harness
    }

    fn at(&self, path: &str) -> PathBuf {
        self.folder.path().join(path)
    }

    fn g3_setting(&self) -> String {
        format!(r#"tiers.g3_paths=[{{path="{}", capacity="12MiB"}}]"#, self.at("blocks/g3").display())
    }

    async fn start(&self) -> Process {
        self.set_faults(None);
        let blocks = self.at("blocks");
        let g3 = self.g3_setting();
        let shared = blocks.join("store");
        // G1 has space for four of the prompts, G3 and G4 for all of them.
        let sizes = ["--set", "tiers.g1=4MiB", "--set", "tiers.g2=2MiB", "--workers", "both:2", "--set", &g3];
        let shared = ["--g4", shared.to_str().unwrap(), "--set", "admin.listen=127.0.0.1:0"];
        let arguments = [&sizes[..], &shared].concat();
        let library = self.at("faults.so");
        let faults = self.at("faults");
        let environment: [(&str, &OsStr); 3] = [
            ("LD_PRELOAD", library.as_os_str()),
            ("FAULTS_FOLDER", blocks.as_os_str()),
            ("FAULTS_PROFILE", faults.as_os_str()),
        ];
        Process::start(&self.at("data"), &arguments, &environment).await
    }

    /// Sets the faults from now on; `None` injects none.
    fn set_faults(&self, faults: Option<[u64; 5]>) {
        let Some([eio, enospc, short, delayed, delay_us]) = faults else {
            let _ = fs::remove_file(self.at("faults"));
            return;
        };
        let text = format!("{} {eio} {enospc} {short} {delayed} {delay_us}", self.seed);
        // The rename is atomic: the program never reads half a profile.
        fs::write(self.at("faults.new"), text).unwrap();
        fs::rename(self.at("faults.new"), self.at("faults")).unwrap();
    }

    /// Flips one bit of a random file below `blocks`, or deletes an object of the shared store.
    fn corrupt_a_file(&self, rng: &mut Rng) {
        let files = files(&self.at("blocks"));
        let Some(file) = files.get(rng.below(files.len().max(1) as u64) as usize) else { return };
        if file.starts_with(self.at("blocks/store/blocks")) && rng.below(3) == 0 {
            let _ = fs::remove_file(file);
            return;
        }
        let Ok(open) = fs::OpenOptions::new().read(true).write(true).open(file) else { return };
        let length = open.metadata().unwrap().len();
        let mut byte = [0];
        let at = rng.below(length.max(1));
        if open.read_exact_at(&mut byte, at).is_ok() {
            open.write_all_at(&[byte[0] ^ (1 << rng.below(8))], at).unwrap();
        }
    }
}

/// All files below a folder, sorted.
fn files(root: &Path) -> Vec<PathBuf> {
    let mut files = Vec::new();
    let mut folders = vec![root.to_owned()];
    while let Some(folder) = folders.pop() {
        // Entries that the program deletes meanwhile are skipped.
        for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    files
}

/// Prompts, each with the answer of a program without lower tiers or faults. Neighbours share half of their tokens.
type Script = Arc<Vec<(Vec<u32>, Value)>>;

async fn script() -> Script {
    let data = tempfile::tempdir().unwrap();
    let sizes = ["--set", "tiers.g1=32MiB", "--set", "tiers.g2=off", "--set", "tiers.g3=off"];
    let reference = Process::start(data.path(), &sizes, &[]).await;
    let mut script = Vec::new();
    for n in 0..10_u32 {
        let kind = |at: u32| if at < 240 { n / 2 } else { n.div_ceil(2) };
        let prompt: Vec<u32> = (0..480).map(|at| 10 + (at * 7 + kind(at) * 31) % 500).collect();
        let answer = reference.client.complete(&prompt).await.unwrap().0;
        script.push((prompt, answer));
    }
    Arc::new(script)
}

/// Waits for an answer in steps of one second, so that a pause of the whole machine counts as one step.
async fn within_wait_limit<T>(answer: impl Future<Output = T>) -> Option<T> {
    let mut answer = std::pin::pin!(answer);
    for _ in 0..WAIT_LIMIT.as_secs() {
        if let Ok(answer) = timeout(Duration::from_secs(1), answer.as_mut()).await {
            return Some(answer);
        }
    }
    None
}

/// Starts clients that send random prompts until `over` is set.
fn start_load(client: &Client, script: &Script, over: &Arc<AtomicBool>, case: &str, seed: u64) -> Vec<JoinHandle<()>> {
    let client_task = |n: u64| {
        let (client, script, over) = (client.clone(), script.clone(), over.clone());
        let (case, mut rng) = (format!("{case}, client {n}"), Rng(seed * 1_000 + n));
        tokio::spawn(async move {
            let mut answered = 0;
            while !over.load(Relaxed) {
                let (prompt, want) = &script[rng.below(script.len() as u64) as usize];
                let answer = within_wait_limit(client.complete(prompt)).await;
                match answer.unwrap_or_else(|| panic!("{case}, answer {answered}: no answer")) {
                    Ok((answer, _)) => assert_eq!(answer, *want, "{case}, answer {answered}"),
                    Err(_) if over.load(Relaxed) => break,
                    Err(error) => panic!("{case}, answer {answered}: {error}"),
                }
                answered += 1;
            }
        })
    };
    (0..CLIENTS).map(client_task).collect()
}

/// Waits for the end of the clients.
async fn join_load(load: Vec<JoinHandle<()>>) {
    join_all(load).await.into_iter().for_each(Result::unwrap);
}

/// Counters of the program: answers, G3 block hits, and blocks whose offload was dropped or which were corrupt.
async fn counters(client: &Client) -> [f64; 3] {
    let answers = client.metric("blockyard_frontend_requests_total", "/v1/completions").await;
    let hits = client.metric("blockyard_tier_hit_blocks_total", "g3").await;
    let dropped = client.metric("blockyard_tier_offload_dropped_blocks_total", "").await;
    [answers, hits, dropped + client.metric("blockyard_tier_corrupt_blocks_total", "").await]
}

/// Resident bytes and open files: the smallest of ten samples, so that short peaks do not count.
async fn size(process: &Process) -> (u64, usize) {
    let folder = PathBuf::from(format!("/proc/{}", process.id()));
    let mut least = (u64::MAX, usize::MAX);
    for _ in 0..10 {
        let pages = fs::read_to_string(folder.join("statm")).unwrap();
        let resident = pages.split(' ').nth(1).unwrap().parse::<u64>().unwrap() * 4096;
        least = (least.0.min(resident), least.1.min(fs::read_dir(folder.join("fd")).unwrap().count()));
        sleep(Duration::from_millis(50)).await;
    }
    least
}

#[tokio::test(flavor = "multi_thread")]
async fn answers_stay_the_same_under_io_faults_and_kills() {
    let (seconds, seed) = (number("BLOCKYARD_SOAK_SECONDS", 20), number("BLOCKYARD_SOAK_SEED", 1));
    let mut rng = Rng(seed);
    let harness = Harness::new(seed);
    let script = script().await;
    println!("seed {seed}");
    // All runs are equally long, but the last takes twice as long: half of it is warm-up, half shows growth.
    let each = Duration::from_secs(seconds) / (KILLS as u32 + 2);
    for run in 0..KILLS {
        let mut process = harness.start().await;
        let over = Arc::new(AtomicBool::new(false));
        let case = format!("seed {seed}, run {run}");
        let load = start_load(&process.client, &script, &over, &case, seed + run);
        let end = Instant::now() + each.mul_f64(0.5 + rng.below(1_000) as f64 / 2_000.0);
        for faults in FAULT_PROFILES.into_iter().cycle().skip(rng.below(FAULT_PROFILES.len() as u64) as usize) {
            if Instant::now() >= end {
                break;
            }
            harness.set_faults(Some(faults));
            sleep(Duration::from_millis(rng.below(700))).await;
        }
        over.store(true, Relaxed);
        process.kill();
        join_load(load).await;
        for _ in 0..rng.below(6) {
            harness.corrupt_a_file(&mut rng);
        }
    }

    let mut process = harness.start().await;
    let over = Arc::new(AtomicBool::new(false));
    let case = format!("seed {seed}, last run");
    let load = start_load(&process.client, &script, &over, &case, seed + KILLS);
    let mut warm = (0, 0);
    for half in 1..=2 {
        let end = Instant::now() + each;
        let deadline = end + WAIT_LIMIT;
        for faults in FAULT_PROFILES[..5].iter().cycle() {
            let [answers, hits, failed] = counters(&process.client).await;
            // The half is long enough when requests were answered, hit G3 and met faults.
            if Instant::now() >= end && answers >= MIN_ANSWERS * f64::from(half) && hits > 0.0 && failed > 0.0 {
                println!("{case}: {answers} answers, {hits} G3 block hits, {failed} blocks dropped or corrupt");
                break;
            }
            assert!(
                Instant::now() < deadline,
                "{case}: {answers} answers, {hits} G3 block hits, {failed} dropped or corrupt"
            );
            harness.set_faults(Some(*faults));
            harness.corrupt_a_file(&mut rng);
            sleep(Duration::from_millis(rng.below(700))).await;
        }
        if half == 1 {
            warm = size(&process).await;
        }
    }
    harness.set_faults(None);
    // A failed SSD path is used again after its cooldown; a tier that lost all blocks is filled again.
    index_audit::wait_until_filled(&process.client, &case).await;
    let deadline = Instant::now() + WAIT_LIMIT;
    loop {
        let (bytes, open) = size(&process).await;
        let growth = format!("{case}: {bytes} bytes and {open} files, {warm:?} after warm-up");
        if bytes <= warm.0 + MAX_GROWTH_BYTES && open <= warm.1 + MAX_GROWTH_FILES {
            break println!("{growth}");
        }
        // A leak does not go away by waiting.
        assert!(Instant::now() < deadline, "{growth}");
    }
    over.store(true, Relaxed);
    join_load(load).await;

    // Once offloads and events are done, the index has exactly the blocks of each tier of each worker.
    index_audit::wait_until_indexed(&process.client, &case).await;
    for (n, (prompt, want)) in script.iter().enumerate() {
        let answer = process.client.complete(prompt).await;
        let (answer, cached) = answer.unwrap_or_else(|error| panic!("{case}, prompt {n} afterwards: {error:?}"));
        assert_eq!(answer, *want, "{case}, prompt {n} afterwards, {cached} tokens cached");
    }

    // The index also agrees with `blockyard cache ls`. Corrupt blocks that no request has read are found and removed by
    // `verify`, which reads all of them. The restarted process follows the removals.
    process.stop();
    let process = harness.start().await;
    let store = harness.at("blocks/store");
    let data = harness.at("data");
    let g3 = harness.g3_setting();
    let arguments = ["--data-dir", data.to_str().unwrap(), "--set", &g3];
    cache::cache_json(&store, &["verify", "--remove"]);
    let listed = index_audit::wait_until_listed(&process.client, &store, &arguments, &format!("seed {seed}")).await;
    // The comparison notices a lost object, unless the object is a duplicate or marked for deletion.
    let noticed = files(&store.join("blocks")).into_iter().any(|object| {
        fs::remove_file(object).unwrap();
        index_audit::listed_digests(&store, &arguments)["g4"] != listed["g4"]
    });
    assert!(noticed, "seed {seed}");
    cache::cache_json(&store, &["verify", "--remove"]);
    index_audit::wait_until_listed(&process.client, &store, &arguments, &format!("seed {seed}, one object less")).await;
}
