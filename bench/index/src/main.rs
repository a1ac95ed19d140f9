//! Compares the router's prefix index with published ones: the same events and lookups, on the same machine, in one
//! run.
//!
//! Each measurement of each index runs in a child process of this program, so that no index affects another's memory.

mod distinct;
mod indexes;
mod measure;
mod model;
mod options;
mod seam;
mod table;
mod workload;

use anyhow::{Context, Result, bail};
use dynamo_kv_router::{ConcurrentRadixTreeCompressed, PositionalIndexer};
use indexes::blockyard::Blockyard;
use indexes::dynamo::Dynamo;
use indexes::smg::{Chain, ChainInto};
use options::{Cell, Options, What};
use seam::{Index, Size};
use serde_json::{Value, json};
use std::process::{Command, Stdio};
use workload::{Evict, Plan, Workload};

/// Names as in the table.
const INDEXES: [&str; 5] = ["blockyard", "kv-index into", "kv-index", "dynamo crtc", "dynamo positional"];

fn main() -> Result<()> {
    let options = Options::from_args()?;
    if let Some(cell) = &options.cell {
        println!("{}", measure(&options, cell)?);
        return Ok(());
    }
    if let Some(blocks) = options.distinct {
        println!("{:#}", distinct::measure(blocks)?);
        return Ok(());
    }
    let mut records = Vec::new();
    for workers in &options.workers {
        for cell in Cell::all(*workers, options.repetitions, &options.indexes) {
            eprintln!("{cell}");
            let result = in_child_process(&options, &cell)?;
            records.push(json!({ "cell": cell, "result": result }));
        }
    }
    if options.json {
        println!("{}", serde_json::to_string_pretty(&records)?);
    } else {
        print!("{}", table::of(&records, &options));
    }
    Ok(())
}

/// Runs one measurement in a child process, which inherits stderr.
fn in_child_process(options: &Options, cell: &Cell) -> Result<Value> {
    let output = Command::new(std::env::current_exe()?)
        .arg("--trace")
        .arg(&options.trace)
        .args(["--cell", &serde_json::to_string(cell)?])
        .stderr(Stdio::inherit())
        .output()?;
    if !output.status.success() {
        bail!("{cell}: {}", output.status);
    }
    serde_json::from_slice(&output.stdout).with_context(|| format!("{cell}: no record"))
}

fn measure(options: &Options, cell: &Cell) -> Result<Value> {
    // Enough requests to fill the caches of a larger fleet.
    let copies = if cell.workers >= 1024 { 3 } else { 1 };
    let evict = if cell.what == What::CheckHeads { Evict::Head } else { Evict::Tail };
    let plan = Plan {
        trace: &options.trace,
        workers: cell.workers,
        cache: 16_384,
        copies,
        evict,
        singles: cell.what.singles(),
    };
    let workload = Workload::new(&plan)?;
    match cell.index.as_str() {
        "blockyard" => run::<Blockyard>(cell, &workload),
        "kv-index into" => run::<ChainInto>(cell, &workload),
        "kv-index" => run::<Chain>(cell, &workload),
        "dynamo crtc" => run::<Dynamo<ConcurrentRadixTreeCompressed>>(cell, &workload),
        "dynamo positional" => run::<Dynamo<PositionalIndexer>>(cell, &workload),
        other => bail!("no index is called {other}: {}", INDEXES.join(", ")),
    }
}

fn run<I: Index>(cell: &Cell, workload: &Workload) -> Result<Value> {
    let size = |threads| Size { workers: cell.workers, threads };
    Ok(match cell.what {
        What::Apply1 | What::Singles1 => measure::apply::<I>(workload, size(1)),
        What::Apply2 | What::Singles2 => measure::apply::<I>(workload, size(2)),
        What::Lookup => measure::lookup::<I>(workload, size(1)),
        What::Concurrent => measure::concurrent::<I>(workload, size(1))?,
        What::Memory => measure::memory::<I>(workload, size(1))?,
        What::Check | What::CheckHeads => measure::check::<I>(workload, size(1), false),
        What::CheckPunched => measure::check::<I>(workload, size(1), true),
    })
}
