//! The command line, and the description of one measurement.

use crate::INDEXES;
use anyhow::{Context, Result, bail, ensure};
use serde::{Deserialize, Serialize};
use std::fmt;
use std::path::PathBuf;

/// The command line.
pub(crate) struct Options {
    /// A trace in Mooncake's format.
    pub(crate) trace: PathBuf,
    pub(crate) json: bool,
    pub(crate) repetitions: usize,
    /// Fleet sizes.
    pub(crate) workers: Vec<u32>,
    pub(crate) indexes: Vec<String>,
    /// Number of distinct blocks to pass through the router's index with a memory limit, instead of all other
    /// measurements.
    pub(crate) distinct: Option<usize>,
    /// Set in a child process: the one measurement to run.
    pub(crate) cell: Option<Cell>,
}

/// One measurement of one index.
#[derive(Clone, Serialize, Deserialize)]
pub(crate) struct Cell {
    pub(crate) index: String,
    pub(crate) workers: u32,
    pub(crate) what: What,
}

/// Kind of measurement.
#[derive(Clone, Copy, PartialEq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum What {
    Apply1,
    Apply2,
    Singles1,
    Singles2,
    Lookup,
    Concurrent,
    Memory,
    Check,
    CheckHeads,
    CheckPunched,
}

const USAGE: &str = "\
The router's prefix index beside the published ones, on one stream of events made from a recorded trace.

  --trace FILE      the trace, in Mooncake's format (required; docs/replay.md says where to get one)
  --workers N,N     fleet sizes (128,1024)
  --repetitions N   of what is timed (3)
  --indexes A,B     blockyard, kv-index into, kv-index, dynamo crtc, dynamo positional (all)
  --distinct N      only this: pass N distinct blocks through this index within 64 MiB, and print what it took
  --json            print the records instead of tables
  --help            this
";

impl Options {
    pub(crate) fn from_args() -> Result<Self> {
        let mut options = Self {
            trace: PathBuf::new(),
            json: false,
            repetitions: 3,
            workers: vec![128, 1024],
            indexes: INDEXES.map(str::to_owned).to_vec(),
            distinct: None,
            cell: None,
        };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--trace" => options.trace = value()?.into(),
                "--json" => options.json = true,
                "--repetitions" => options.repetitions = value()?.parse().context("--repetitions")?,
                "--workers" => {
                    options.workers =
                        value()?.split(',').map(str::parse).collect::<Result<_, _>>().context("--workers")?;
                }
                "--distinct" => options.distinct = Some(value()?.parse().context("--distinct")?),
                "--indexes" => options.indexes = value()?.split(',').map(str::to_owned).collect(),
                "--cell" => options.cell = Some(serde_json::from_str(&value()?).context("--cell")?),
                "--help" | "-h" => {
                    print!("{USAGE}");
                    std::process::exit(0);
                }
                _ => bail!("unknown option {argument}\n\n{USAGE}"),
            }
        }
        if options.distinct.is_some() {
            return Ok(options);
        }
        ensure!(!options.trace.as_os_str().is_empty(), "--trace FILE is missing: which requests are to be replayed?");
        ensure!(options.trace.is_file(), "there is no trace to read at {}", options.trace.display());
        ensure!(options.repetitions > 0, "--repetitions: at least 1");
        if let Some(unknown) = options.indexes.iter().find(|name| !INDEXES.contains(&name.as_str())) {
            bail!("no index is called {unknown}: {}", INDEXES.join(", "));
        }
        Ok(options)
    }
}

impl Cell {
    /// All measurements of one fleet size. Indexes alternate, so that a slow phase of the machine affects all of them.
    pub(crate) fn all(workers: u32, repetitions: usize, indexes: &[String]) -> Vec<Self> {
        let of = |what: What| indexes.iter().map(move |index| Self { index: index.clone(), workers, what });
        let once = [What::Memory, What::Check, What::CheckHeads, What::CheckPunched];
        let timed = [What::Apply1, What::Apply2, What::Singles1, What::Singles2, What::Lookup, What::Concurrent];
        let repeated = (0..repetitions).flat_map(|_| timed);
        repeated.chain(once).flat_map(of).collect()
    }
}

impl What {
    /// Whether each removed block is an event of its own.
    pub(crate) fn singles(self) -> bool {
        matches!(self, Self::Singles1 | Self::Singles2)
    }
}

impl fmt::Display for Cell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} workers, {}: {:?}", self.workers, self.index, self.what)
    }
}
