//! The real program under load, while its devices fail in every way and it is killed again and again: nobody can tell.
//!
//! `BLOCKYARD_SOAK_SECONDS=3600` for a night, `BLOCKYARD_SOAK_SEED` for another one. A failure names its seed.

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
/// How often the program is killed, each time under load.
const KILLS: u64 = 3;
/// No request takes so long, whatever happens below it; and nothing takes longer to happen that must, on any machine.
pub(crate) const PATIENCE: Duration = Duration::from_mins(5);
/// So often each half of the last life answers at least, however slow the machine: only then is the program warm.
const ANSWERS: f64 = 30.0;
/// What a program may have more than once it was warm: what an allocator keeps, and connections that come and go.
const GROWTH: (u64, usize) = (24 << 20, 16);

/// One after the other, of a thousand calls: EIO, ENOSPC, short, late; and by how many microseconds.
const WEATHERS: [[u64; 5]; 6] = [
    [0, 0, 0, 0, 0],
    [0, 0, 500, 0, 0],
    [200, 0, 50, 0, 0],
    [0, 900, 0, 0, 0],
    [10, 10, 100, 300, 30_000],
    // The device is gone, and is left alone for longer each time: only for lives that end soon.
    [1_000, 0, 0, 0, 0],
];

/// A number from the environment.
pub(crate) fn number(name: &str, default: u64) -> u64 {
    std::env::var(name).map_or(default, |n| n.parse().unwrap())
}

/// A small generator, so that a failing case is named by one number.
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

/// Where the program keeps its blocks, and what stands between it and them.
struct Place {
    folder: tempfile::TempDir,
    seed: u64,
}

impl Place {
    /// Compiles what is loaded before the program.
    fn new(seed: u64) -> Self {
        let place = Self { folder: tempfile::tempdir().unwrap(), seed };
        fs::create_dir(place.at("blocks")).unwrap();
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/it/faults.c");
        let mut compiler = Command::new("cc");
        compiler.args(["-O1", "-shared", "-fPIC", "-o"]).arg(place.at("faults.so")).arg(source).arg("-ldl");
        assert!(compiler.status().unwrap().success(), "a C compiler is what a build needs anyway");
        place
    }

    fn at(&self, what: &str) -> PathBuf {
        self.folder.path().join(what)
    }

    fn ssd(&self) -> String {
        format!(r#"tiers.g3_paths=[{{path="{}", capacity="12MiB"}}]"#, self.at("blocks/g3").display())
    }

    async fn start(&self) -> Process {
        self.weather(None);
        let blocks = self.at("blocks");
        let ssd = self.ssd();
        let shared = blocks.join("store");
        // Room for four of the prompts above, and for all below.
        let sizes = ["--set", "tiers.g1=4MiB", "--set", "tiers.g2=2MiB", "--workers", "both:2", "--set", &ssd];
        let shared = ["--g4", shared.to_str().unwrap(), "--set", "admin.listen=127.0.0.1:0"];
        let arguments = [&sizes[..], &shared].concat();
        let (library, weather) = (self.at("faults.so"), self.at("weather"));
        let environment: [(&str, &OsStr); 3] = [
            ("LD_PRELOAD", library.as_os_str()),
            ("FAULTS_UNDER", blocks.as_os_str()),
            ("FAULTS_NOW", weather.as_os_str()),
        ];
        Process::start(&self.at("data"), &arguments, &environment).await
    }

    /// From now on; `None`: nothing fails.
    fn weather(&self, faults: Option<[u64; 5]>) {
        let Some([eio, enospc, short, late, late_us]) = faults else {
            let _ = fs::remove_file(self.at("weather"));
            return;
        };
        let text = format!("{} {eio} {enospc} {short} {late} {late_us}", self.seed);
        // At once, for whoever reads it meanwhile.
        fs::write(self.at("weather.new"), text).unwrap();
        fs::rename(self.at("weather.new"), self.at("weather")).unwrap();
    }

    /// Flips a bit of some file of blocks, or has a shared object lost.
    fn vandalise(&self, rng: &mut Rng) {
        let files = files(&self.at("blocks"));
        let Some(file) = files.get(rng.below(files.len().max(1) as u64) as usize) else { return };
        if file.starts_with(self.at("blocks/store/blocks")) && rng.below(3) == 0 {
            let _ = fs::remove_file(file);
            return;
        }
        let Ok(open) = fs::OpenOptions::new().read(true).write(true).open(file) else { return };
        let (length, mut byte) = (open.metadata().unwrap().len(), [0]);
        let at = rng.below(length.max(1));
        if open.read_exact_at(&mut byte, at).is_ok() {
            open.write_all_at(&[byte[0] ^ (1 << rng.below(8))], at).unwrap();
        }
    }
}

/// All files below a folder, in order.
fn files(under: &Path) -> Vec<PathBuf> {
    let (mut files, mut folders) = (Vec::new(), vec![under.to_owned()]);
    while let Some(folder) = folders.pop() {
        // A file may go between the listing and the look.
        for path in fs::read_dir(folder).into_iter().flatten().flatten().map(|entry| entry.path()) {
            if path.is_dir() { folders.push(path) } else { files.push(path) }
        }
    }
    files.sort();
    files
}

/// Prompts, each with what a program without any cache answers; half of each is like the one before it.
type Script = Arc<Vec<(Vec<u32>, Value)>>;

async fn script() -> Script {
    let calm = tempfile::tempdir().unwrap();
    let sizes = ["--set", "tiers.g1=32MiB", "--set", "tiers.g2=off", "--set", "tiers.g3=off"];
    let undisturbed = Process::start(calm.path(), &sizes, &[]).await;
    let mut script = Vec::new();
    for n in 0..10_u32 {
        let kind = |at: u32| if at < 240 { n / 2 } else { n.div_ceil(2) };
        let prompt: Vec<u32> = (0..480).map(|at| 10 + (at * 7 + kind(at) * 31) % 500).collect();
        let answer = undisturbed.client.complete(&prompt).await.unwrap().0;
        script.push((prompt, answer));
    }
    Arc::new(script)
}

/// Waits for an answer, in short turns: who was stopped meanwhile, program or machine, has waited for one of them.
async fn patiently<T>(answer: impl Future<Output = T>) -> Option<T> {
    let mut answer = std::pin::pin!(answer);
    for _ in 0..PATIENCE.as_secs() {
        if let Ok(answer) = timeout(Duration::from_secs(1), answer.as_mut()).await {
            return Some(answer);
        }
    }
    None
}

/// Clients that ask at random until they are told to stop, or the program is gone.
fn load(client: &Client, script: &Script, over: &Arc<AtomicBool>, case: &str, seed: u64) -> Vec<JoinHandle<()>> {
    let one = |n: u64| {
        let (client, script, over) = (client.clone(), script.clone(), over.clone());
        let (case, mut rng) = (format!("{case}, client {n}"), Rng(seed * 1_000 + n));
        tokio::spawn(async move {
            let mut answered = 0;
            while !over.load(Relaxed) {
                let (prompt, want) = &script[rng.below(script.len() as u64) as usize];
                let answer = patiently(client.complete(prompt)).await;
                match answer.unwrap_or_else(|| panic!("{case}, answer {answered}: it hangs")) {
                    Ok((answer, _)) => assert_eq!(answer, *want, "{case}, answer {answered}"),
                    Err(_) if over.load(Relaxed) => break,
                    Err(error) => panic!("{case}, answer {answered}: {error}"),
                }
                answered += 1;
            }
        })
    };
    (0..CLIENTS).map(one).collect()
}

/// Waits for the clients.
async fn answered(load: Vec<JoinHandle<()>>) {
    join_all(load).await.into_iter().for_each(Result::unwrap);
}

/// What a program did: answers, blocks that came from the SSD, and blocks that were not kept or not what they were.
async fn done(client: &Client) -> [f64; 3] {
    let answers = client.metric("blockyard_frontend_requests_total", "/v1/completions").await;
    let found = client.metric("blockyard_tier_hit_blocks_total", "g3").await;
    let dropped = client.metric("blockyard_tier_offload_dropped_blocks_total", "").await;
    [answers, found, dropped + client.metric("blockyard_tier_corrupt_blocks_total", "").await]
}

/// Resident bytes and open files, the least of some looks: what is there for a moment is no growth.
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
async fn nobody_can_tell_that_devices_fail_and_processes_die() {
    let (seconds, seed) = (number("BLOCKYARD_SOAK_SECONDS", 20), number("BLOCKYARD_SOAK_SEED", 1));
    let (mut rng, place, script) = (Rng(seed), Place::new(seed), script().await);
    println!("seed {seed}");
    // Each life as long as the others, and the last one twice: to become warm, and to show that it does not grow.
    let each = Duration::from_secs(seconds) / (KILLS as u32 + 2);
    for life in 0..KILLS {
        let (mut process, over) = (place.start().await, Arc::new(AtomicBool::new(false)));
        let case = format!("seed {seed}, life {life}");
        let load = load(&process.client, &script, &over, &case, seed + life);
        let end = Instant::now() + each.mul_f64(0.5 + rng.below(1_000) as f64 / 2_000.0);
        for weather in WEATHERS.into_iter().cycle().skip(rng.below(WEATHERS.len() as u64) as usize) {
            if Instant::now() >= end {
                break;
            }
            place.weather(Some(weather));
            sleep(Duration::from_millis(rng.below(700))).await;
        }
        over.store(true, Relaxed);
        process.kill();
        answered(load).await;
        for _ in 0..rng.below(6) {
            place.vandalise(&mut rng);
        }
    }

    let (mut process, over) = (place.start().await, Arc::new(AtomicBool::new(false)));
    let case = format!("seed {seed}, last life");
    let load = load(&process.client, &script, &over, &case, seed + KILLS);
    let mut warm = (0, 0);
    for half in 1..=2 {
        let (end, late) = (Instant::now() + each, Instant::now() + each + PATIENCE);
        for weather in WEATHERS[..5].iter().cycle() {
            let [answers, found, failed] = done(&process.client).await;
            // It is no idle run.
            if Instant::now() >= end && answers >= ANSWERS * f64::from(half) && found > 0.0 && failed > 0.0 {
                println!("{case}: {answers} answers, {found} blocks from the SSD, {failed} not kept");
                break;
            }
            assert!(Instant::now() < late, "{case}: {answers} answers, {found} found, {failed} failed");
            place.weather(Some(*weather));
            place.vandalise(&mut rng);
            sleep(Duration::from_millis(rng.below(700))).await;
        }
        if half == 1 {
            warm = size(&process).await;
        }
    }
    place.weather(None);
    // A path of the SSD tier that went down is left alone for a while; what lost everything gets something again.
    index_audit::filled(&process.client, &case).await;
    let late = Instant::now() + PATIENCE;
    loop {
        let (bytes, open) = size(&process).await;
        let grown = format!("{case}: {bytes} bytes and {open} files, {warm:?} when it was warm");
        if bytes <= warm.0 + GROWTH.0 && open <= warm.1 + GROWTH.1 {
            break println!("{grown}");
        }
        // A leak stays.
        assert!(Instant::now() < late, "{grown}");
    }
    over.store(true, Relaxed);
    answered(load).await;

    // Once no block is on its way any more, the index has what rests, name by name, in each tier of each worker.
    index_audit::settled(&process.client, &case).await;
    for (n, (prompt, want)) in script.iter().enumerate() {
        let answer = process.client.complete(prompt).await;
        let (answer, cached) = answer.unwrap_or_else(|error| panic!("{case}, prompt {n} afterwards: {error:?}"));
        assert_eq!(answer, *want, "{case}, prompt {n} afterwards, {cached} tokens cached");
    }

    // And what is found from outside. A process that began later has not read what was damaged since; what was damaged
    // before, and nobody asked for, is found by reading all of it.
    process.stop();
    let process = place.start().await;
    let store = place.at("blocks/store");
    let (data, ssd) = (place.at("data"), place.ssd());
    let elsewhere = ["--data-dir", data.to_str().unwrap(), "--set", &ssd];
    cache::asked(&store, &["verify", "--remove"]);
    let found = index_audit::found(&process.client, &store, &elsewhere, &format!("seed {seed}")).await;
    // It would be seen if a name were missing: of an object that is not about to be deleted, nor a copy.
    let seen = files(&store.join("blocks")).into_iter().any(|object| {
        fs::remove_file(object).unwrap();
        index_audit::outside(&store, &elsewhere)["g4"] != found["g4"]
    });
    assert!(seen, "seed {seed}");
    cache::asked(&store, &["verify", "--remove"]);
    index_audit::found(&process.client, &store, &elsewhere, &format!("seed {seed}, one object less")).await;
}
