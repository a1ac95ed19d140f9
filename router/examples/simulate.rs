//! Runs the deterministic simulation for many seeds:
//!
//! ```text
//! cargo run --release -p router --example simulate -- --seeds 0..10000
//! cargo run --release -p router --example simulate -- --seeds 17 --trace
//! ```
//! Prints each seed that violates an invariant, and how to replay it. `--trace` prints the log of events of each seed,
//! `--twice` runs each seed twice and compares the logs, `--threads N` runs seeds side by side. With `--skip-removals`
//! routers skip removals of blocks, a fault that the checks must find.

#[path = "../tests/simulation/sim/mod.rs"]
mod sim;

use std::ops::Range;
use std::process::ExitCode;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

struct Options {
    seeds: Range<u64>,
    is_traced: bool,
    is_repeated: bool,
    threads: usize,
    kind: Option<sim::Kind>,
}

#[derive(Default)]
struct Totals {
    seeds: u64,
    lines: u64,
    seconds: u64,
    failed: Vec<u64>,
}

fn options() -> Result<Options, String> {
    let mut options = Options { seeds: 0..100, is_traced: false, is_repeated: false, threads: 1, kind: None };
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        let mut value = || arguments.next().ok_or_else(|| format!("{argument} needs a value"));
        match argument.as_str() {
            "--seeds" => options.seeds = seeds(&value()?)?,
            "--threads" => options.threads = value()?.parse().map_err(|_| "--threads: expected a number".to_owned())?,
            "--trace" => options.is_traced = true,
            "--twice" => options.is_repeated = true,
            "--skip-removals" => options.kind = Some(sim::Kind::SkippedRemovals),
            _ => {
                let known = "--seeds, --trace, --twice, --skip-removals or --threads";
                return Err(format!("unknown argument {argument}; expected {known}"));
            }
        }
    }
    Ok(options)
}

/// `7` or `0..100`.
fn seeds(text: &str) -> Result<Range<u64>, String> {
    let number =
        |text: &str| text.parse().map_err(|_| format!("--seeds {text}: expected a number, or a range as 0..9"));
    match text.split_once("..") {
        Some((first, end)) => Ok(number(first)?..number(end)?),
        None => number(text).map(|seed: u64| seed..seed + 1),
    }
}

fn run(seed: u64, options: &Options, totals: &Mutex<Totals>) {
    let outcome = sim::run(seed, options.kind, options.is_traced);
    let is_replayed = !options.is_repeated || sim::run(seed, options.kind, false) == outcome;
    if !outcome.violations.is_empty() || !is_replayed {
        let kind = if options.kind.is_some() { " --skip-removals" } else { "" };
        let replay = "cargo run --release -p router --example simulate --";
        println!("seed {seed} FAILED; replay: {replay} --seeds {seed} --trace{kind}");
        outcome.violations.iter().for_each(|violation| println!("  {violation}"));
        if !is_replayed {
            println!("  another log of events when it ran again");
        }
    }
    if options.is_traced {
        println!("seed {seed}: log {} of {} lines, {} s", outcome.digest, outcome.lines, outcome.seconds);
    }
    let mut totals = totals.lock().expect("no thread panics with the lock");
    totals.seeds += 1;
    totals.lines += outcome.lines;
    totals.seconds += outcome.seconds;
    if !outcome.violations.is_empty() || !is_replayed {
        totals.failed.push(seed);
    }
}

fn main() -> ExitCode {
    let options = match options() {
        Ok(options) => options,
        Err(error) => {
            eprintln!("simulate: {error}");
            return ExitCode::FAILURE;
        }
    };
    let (next, totals, start) = (AtomicU64::new(options.seeds.start), Mutex::new(Totals::default()), Instant::now());
    std::thread::scope(|scope| {
        for _ in 0..options.threads.max(1) {
            scope.spawn(|| {
                loop {
                    let seed = next.fetch_add(1, Ordering::Relaxed);
                    if seed >= options.seeds.end {
                        return;
                    }
                    run(seed, &options, &totals);
                }
            });
        }
    });
    let totals = totals.into_inner().expect("no thread panics with the lock");
    println!(
        "{} seeds, {} failed {:?}; {} events, {} h of virtual time in {} s",
        totals.seeds,
        totals.failed.len(),
        totals.failed,
        totals.lines,
        totals.seconds / 3600,
        start.elapsed().as_secs()
    );
    if totals.failed.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
