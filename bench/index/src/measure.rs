//! The measurements. Each runs in a process of its own and returns a flat record.

use crate::model::Model;
use crate::seam::{Block, Index, Size};
use crate::workload::{Event, Workload, mix};
use anyhow::{Context, Result};
use rustix::thread::{CpuSet, sched_setaffinity};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

/// Events between two drains where a queue must stay short: for latency and memory.
const BATCH: usize = 256;
const LOOKUP_TIME: Duration = Duration::from_secs(3);
const CHECKED: usize = 2000;
/// Sparse memory is measured with every block removed except one in this many.
const PUNCHED: u64 = 9;

/// Millions of block operations per second until the last one is visible, and nanoseconds of CPU time of all threads
/// per block operation: filling an empty index, and churn.
pub(crate) fn apply<I: Index>(workload: &Workload, size: Size) -> Value {
    let index = I::new(size);
    let lanes = if I::QUEUES { 1 } else { size.threads };
    let measure = |events: &[Event]| {
        let lane = |lane| events.iter().filter(move |event| event.worker as usize % lanes == lane).copied();
        let lanes: Vec<Vec<Event>> = (0..lanes).map(|at| lane(at).collect()).collect();
        let (start, cpu) = (Instant::now(), cpu_seconds());
        std::thread::scope(|scope| {
            for lane in &lanes[1..] {
                scope.spawn(|| lane.iter().for_each(|event| workload.apply(&index, event)));
            }
            lanes[0].iter().for_each(|event| workload.apply(&index, event));
        });
        index.drain();
        let operations = Workload::operations(events) as f64;
        (operations / start.elapsed().as_secs_f64() / 1e6, (cpu_seconds() - cpu) / operations * 1e9)
    };
    let (fill, churn) = workload.events.split_at(workload.churn);
    let ((fill_mops, fill_cpu_ns), (churn_mops, churn_cpu_ns)) = (measure(fill), measure(churn));
    json!({
        "fill_mops": fill_mops,
        "fill_cpu_ns": fill_cpu_ns,
        "churn_mops": churn_mops,
        "churn_cpu_ns": churn_cpu_ns,
    })
}

/// Latency of lookups of recent prompts while nothing else runs.
pub(crate) fn lookup<I: Index>(workload: &Workload, size: Size) -> Value {
    let index = filled::<I>(workload, size, &workload.events);
    let queries = queries::<I>(workload);
    let until = Instant::now() + LOOKUP_TIME;
    let applied = AtomicUsize::new(workload.prompts.len());
    latencies(&index, &queries, workload.recent, &applied, || Instant::now() < until)
}

/// The same on one core, while another core applies the churn as fast as it can.
pub(crate) fn concurrent<I: Index>(workload: &Workload, size: Size) -> Result<Value> {
    // Threads that the index starts inherit the affinity.
    pin(1)?;
    let (fill, churn) = workload.events.split_at(workload.churn);
    let index = filled::<I>(workload, size, fill);
    // Everything is prepared before the churn begins, so that lookups last as long as the churn.
    let queries = queries::<I>(workload);
    let applied = AtomicUsize::new(workload.prompts.len() - workload.recent);
    let applying = AtomicBool::new(true);
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| {
            pin(0)?;
            anyhow::Ok(latencies(&index, &queries, workload.recent, &applied, || applying.load(Ordering::Relaxed)))
        });
        let start = Instant::now();
        for batch in churn.chunks(BATCH) {
            batch.iter().for_each(|event| workload.apply(&index, event));
            index.drain();
            applied.store(batch[batch.len() - 1].request, Ordering::Relaxed);
        }
        let seconds = start.elapsed().as_secs_f64();
        applying.store(false, Ordering::Relaxed);
        let mut record = reader.join().expect("the reader does not panic")?;
        record["churn_mops"] = json!(Workload::operations(churn) as f64 / seconds / 1e6);
        Ok(record)
    })
}

/// Resident bytes per entry after all events, and with one block in nine left; and the memory that remains in an empty
/// index.
pub(crate) fn memory<I: Index>(workload: &Workload, size: Size) -> Result<Value> {
    let model = filled::<Model>(workload, size, &workload.events);
    let entries = model.entries();
    let before = resident()?;
    let index = filled::<I>(workload, size, &workload.events);
    let grown = resident()? - before;
    let remove = |keep: &dyn Fn(u64) -> bool| {
        for worker in 0..size.workers {
            let evicted: Vec<u64> = model.held(worker).into_iter().filter(|hash| !keep(*hash)).collect();
            index.removed(worker, &evicted);
            model.removed(worker, &evicted);
            index.drain();
        }
    };
    remove(&|hash| mix(hash).is_multiple_of(PUNCHED));
    let (few, sparse) = (model.entries(), resident()? - before);
    remove(&|_| false);
    let left = resident()? - before;
    drop(index);
    let mib = |bytes: i64| bytes as f64 / f64::from(1 << 20);
    Ok(json!({
        "entries": entries,
        "bytes_per_entry": grown as f64 / entries as f64,
        "sparse_bytes_per_entry": sparse as f64 / few as f64,
        "grown_mib": mib(grown),
        "left_mib": mib(left),
    }))
}

/// Compares answers with the model, for each worker and many prompts. `holed`: number of pairs of a prompt and a worker
/// that has the end of the prompt but not all blocks before it.
pub(crate) fn check<I: Index>(workload: &Workload, size: Size, punched: bool) -> Value {
    let model = filled::<Model>(workload, size, &workload.events);
    let index = filled::<I>(workload, size, &workload.events);
    if punched {
        for worker in 0..size.workers {
            let held = model.held(worker);
            let evicted: Vec<u64> = held.into_iter().filter(|hash| mix(*hash).is_multiple_of(64)).collect();
            model.removed(worker, &evicted);
            index.removed(worker, &evicted);
        }
        index.drain();
    }
    let recent = &workload.prompts[workload.prompts.len() - workload.recent..];
    let mut answer = I::Answer::default();
    let (mut pairs, mut holed, mut over, mut under) = (0, 0, 0, 0);
    for at in 0..CHECKED.min(recent.len()) {
        let prompt: &[Block] = &recent[at * recent.len() / CHECKED.min(recent.len())];
        index.overlap(&I::query(prompt), &mut answer);
        let depths: BTreeMap<u32, u32> = index.depths(&answer).into_iter().collect();
        for worker in 0..size.workers {
            let (held, answered) = (model.depth(worker, prompt), depths.get(&worker).copied().unwrap_or(0));
            let end = prompt.last().is_some_and(|block| model.holds(worker, *block));
            pairs += u32::from(held > 0);
            holed += u32::from(end && (held as usize) < prompt.len());
            over += u32::from(answered > held);
            under += u32::from(answered < held);
        }
    }
    json!({ "pairs": pairs, "holed": holed, "over": over, "under": under })
}

fn filled<I: Index>(workload: &Workload, size: Size, events: &[Event]) -> I {
    let index = I::new(size);
    for batch in events.chunks(BATCH) {
        batch.iter().for_each(|event| workload.apply(&index, event));
        index.drain();
    }
    index
}

fn queries<I: Index>(workload: &Workload) -> Vec<I::Query> {
    workload.prompts.iter().map(|prompt| I::query(prompt)).collect()
}

/// Times individual lookups of the prompts that precede the applied events most closely, so that they are as recent
/// with churn as without.
fn latencies<I: Index>(
    index: &I,
    queries: &[I::Query],
    recent: usize,
    applied: &AtomicUsize,
    more: impl Fn() -> bool,
) -> Value {
    let mut answer = I::Answer::default();
    let mut taken = Vec::with_capacity(1 << 22);
    let start = Instant::now();
    for draw in 1.. {
        let newest = applied.load(Ordering::Relaxed);
        let query = &queries[newest - 1 - mix(draw) as usize % recent];
        let begin = Instant::now();
        index.overlap(black_box(query), &mut answer);
        black_box(&mut answer);
        taken.push(begin.elapsed().as_nanos() as u64);
        if draw % 64 == 0 && !more() {
            break;
        }
    }
    let seconds = start.elapsed().as_secs_f64();
    taken.sort_unstable();
    let at = |share: f64| taken[((taken.len() - 1) as f64 * share) as usize] as f64 / 1e3;
    json!({
        "lookups": taken.len(),
        "lookups_per_s": taken.len() as f64 / seconds,
        "p50_us": at(0.5),
        "p99_us": at(0.99),
        "p999_us": at(0.999),
    })
}

/// Resident bytes after the allocator has returned free memory.
pub(crate) fn resident() -> Result<i64> {
    // SAFETY: the function takes a number and has no preconditions.
    unsafe { libc::malloc_trim(0) };
    let statm = std::fs::read_to_string("/proc/self/statm").context("/proc/self/statm")?;
    let pages: i64 = statm.split(' ').nth(1).context("statm has a second field")?.parse()?;
    Ok(pages * page_bytes())
}

/// CPU time of all threads of this process so far, in seconds.
fn cpu_seconds() -> f64 {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the function writes to `time`, which is valid. This clock always exists on Linux.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

fn page_bytes() -> i64 {
    // SAFETY: the function takes a number and has no preconditions.
    unsafe { libc::sysconf(libc::_SC_PAGESIZE) }
}

/// Pins the calling thread, and all threads that it starts, to one core.
fn pin(core: usize) -> Result<()> {
    let mut set = CpuSet::new();
    set.set(core);
    sched_setaffinity(None, &set).with_context(|| format!("core {core} cannot be used; this needs two cores"))
}
