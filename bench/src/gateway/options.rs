//! The command line of the program `gateway`.

use crate::options::root;
use anyhow::{Context, Result, bail, ensure};
use std::path::PathBuf;

const USAGE: &str = "\
  --json             print JSON instead of a table
  --only NAME        a gateway to measure (repeatable; all)
  --measure NAME     plain, stream, paced, single, long or memory (repeatable; all)
  --blockyard PATH   program under test (target/dist/blockyard, with link-time optimization)
  --environment DIR  Python environment with the peers (bench/.venv-gateways)
  --seconds N        duration of each measurement (5)
  --repetitions N    repetitions of each measurement, of which the median counts (3)
  --prompts N        distinct prompts before memory is measured (200000)
  --streams N        open streams while memory is measured (1000); needs 8/3 as many open files and 400 more";

/// The command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// Prints JSON instead of a table.
    pub json: bool,
    /// Names of the gateways to measure; empty: all.
    pub only: Vec<String>,
    /// Names of the measurements; empty: all.
    pub measure: Vec<String>,
    /// The program under test; `None`: the build of this checkout with link-time optimization, as in the image.
    pub blockyard: Option<PathBuf>,
    /// A Python environment with the peers.
    pub environment: PathBuf,
    /// Duration of each measurement.
    pub seconds: f64,
    /// Repetitions of each measurement, of which the median counts.
    pub repetitions: usize,
    /// Distinct prompts before memory is measured.
    pub prompts: u64,
    /// Open streams while memory is measured.
    pub streams: usize,
}

impl Default for Options {
    fn default() -> Self {
        Self {
            json: false,
            only: Vec::new(),
            measure: Vec::new(),
            blockyard: None,
            environment: root().join("bench/.venv-gateways"),
            seconds: 5.0,
            repetitions: 3,
            prompts: 200_000,
            streams: 1_000,
        }
    }
}

impl Options {
    /// The options of this process. `--help` prints them and ends it.
    pub fn from_args() -> Result<Self> {
        let mut options = Self::default();
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--json" => options.json = true,
                "--only" => options.only.push(value()?),
                "--measure" => options.measure.push(value()?),
                "--blockyard" => options.blockyard = Some(value()?.into()),
                "--environment" => options.environment = value()?.into(),
                "--seconds" => options.seconds = value()?.parse().context("--seconds")?,
                "--repetitions" => options.repetitions = value()?.parse().context("--repetitions")?,
                "--prompts" => options.prompts = value()?.parse().context("--prompts")?,
                "--streams" => options.streams = value()?.parse().context("--streams")?,
                "--help" | "-h" => {
                    println!("Gateways side by side\n\n{USAGE}");
                    std::process::exit(0);
                }
                _ => bail!("unknown option {argument}\n\n{USAGE}"),
            }
        }
        ensure!(options.repetitions > 0 && options.seconds > 0.0, "--repetitions and --seconds: above 0");
        Ok(options)
    }
}
