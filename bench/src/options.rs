//! Command-line options of a benchmark, and the paths of built programs.

use anyhow::{Context, Result, bail};
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::Command;

/// The command line.
#[derive(Clone, Debug)]
pub struct Options {
    /// Print JSON instead of a table.
    pub json: bool,
    /// Repetitions of each measurement.
    pub repetitions: usize,
    /// The model: a built-in one, or a folder.
    pub model: String,
    /// The program under test.
    pub binary: PathBuf,
    /// The seed of the prompts; `None` chooses a new one.
    pub seed: Option<u64>,
}

impl Options {
    /// Reads the command line. `about` is the first line of `--help`.
    pub fn from_args(about: &str) -> Result<Self> {
        let mut options =
            Self { json: false, repetitions: 3, model: "small".into(), binary: PathBuf::new(), seed: None };
        let mut arguments = std::env::args().skip(1);
        while let Some(argument) = arguments.next() {
            let mut value = || arguments.next().with_context(|| format!("{argument} needs a value"));
            match argument.as_str() {
                "--json" => options.json = true,
                "--repetitions" => options.repetitions = value()?.parse().context("--repetitions")?,
                "--model" => options.model = value()?,
                "--blockyard" => options.binary = value()?.into(),
                "--seed" => options.seed = Some(value()?.parse().context("--seed")?),
                "--help" | "-h" => {
                    println!("{about}\n\n{USAGE}");
                    std::process::exit(0);
                }
                _ => bail!("unknown option {argument}\n\n{USAGE}"),
            }
        }
        anyhow::ensure!(options.repetitions > 0, "--repetitions: at least 1");
        if options.binary.as_os_str().is_empty() {
            options.binary = release_binary()?;
        }
        anyhow::ensure!(
            options.binary.exists(),
            "{} is not there: cargo build --release, or --blockyard PATH",
            options.binary.display()
        );
        Ok(options)
    }
}

const USAGE: &str = "\
  --json            print JSON instead of a table
  --repetitions N   repetitions of each measurement (3)
  --model MODEL     built-in model, or a Hugging Face folder (small)
  --blockyard PATH  program under test (the release build of this checkout)
  --seed N          seed of the prompts (a new one each time)";

/// The root of this checkout.
pub fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().expect("bench is in the checkout")
}

/// Cargo's target directory of this checkout.
pub fn target_directory() -> Result<PathBuf> {
    target_directory_of(root())
}

/// Cargo's target directory of the workspace in a folder.
pub fn target_directory_of(folder: &Path) -> Result<PathBuf> {
    let mut cargo = Command::new("cargo");
    cargo.args(["metadata", "--no-deps", "--offline", "--format-version", "1"]).current_dir(folder);
    let metadata: Value = serde_json::from_slice(&cargo.output().context("cargo metadata")?.stdout)?;
    let target = metadata["target_directory"].as_str().context("cargo metadata has no target_directory")?;
    Ok(target.into())
}

fn release_binary() -> Result<PathBuf> {
    Ok(target_directory()?.join("release/blockyard"))
}
