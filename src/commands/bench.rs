//! `blockyard bench io`: measures the bandwidth of the configured tiers beside their raw devices, and estimates the
//! time to first token from it. It prints results to standard output and progress to standard error.
//!
//! The benchmark writes only to folders and prefixes of its own, and removes them at the end, also after Ctrl-C and
//! SIGTERM. It reads no cached block, so a node may serve from the same tiers meanwhile, more slowly.

mod codec;
mod expect;
mod raw;
mod tiers;

use crate::commands::output;
use crate::config::{ByteSize, Config, Flag, Sources};
use crate::process::with_causes;
use anyhow::anyhow;
use clap::{Args, Subcommand};
use expect::Expectation;
use serde_json::{Value, json};
use std::path::PathBuf;
use tiers::Case;
use tokio::signal::unix::{SignalKind, signal};

/// `blockyard bench`.
#[derive(Args, Debug)]
pub struct Bench {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// Measure each configured tier and its raw device, and estimate the time to first token.
    ///
    /// It uses the configuration of `serve`. It reads and writes in its own folders beside the cached blocks, and
    /// removes these folders at the end.
    Io(Box<Io>),
}

/// `blockyard bench io`.
#[derive(Args, Debug)]
struct Io {
    /// Estimate for this model: a Hugging Face folder, of which config.json is read, or a built-in model, which is run
    #[arg(long, value_name = "DIR|NAME")]
    model: Option<String>,

    /// Length of the prefix that is loaded or computed, in tokens
    #[arg(long, value_name = "N", default_value_t = 8192, requires = "model")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..))]
    context: u32,

    /// Prefill speed of the model on your machine, in tokens per second [default: measured for a built-in model, else
    /// unknown]
    #[arg(long, value_name = "N", requires = "model", value_parser = expect::positive)]
    prefill_tokens_per_second: Option<f64>,

    /// Measure lossless compression instead: of synthetic bf16 KV, and with --model of KV that the native engine
    /// computes
    #[arg(long)]
    compression: bool,

    /// Folder of the SSD tier, as for `serve` [default: blockyard in `$XDG_CACHE_HOME`, else in `~/.cache`]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,

    /// The object store of G4, as for `serve` [default: none, it is not measured]
    #[arg(long, value_name = "URL|DIR")]
    g4: Option<String>,

    /// TOML file with the configuration; flags override its keys [default: none]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Set any key of the configuration, like tiers.g3=20GiB; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Flag>,

    /// Block sizes to measure, from 4KiB to 16MiB
    #[arg(long, value_name = "SIZE,…", value_delimiter = ',', default_values = ["64KiB", "1MiB"], value_parser = block)]
    block: Vec<ByteSize>,

    /// Numbers of concurrent requests to measure, from 1 to 256
    #[arg(long, value_name = "N,…", value_delimiter = ',', default_values_t = [1, 4])]
    #[arg(value_parser = clap::value_parser!(u16).range(1..=256))]
    parallel: Vec<u16>,

    /// Size that is written and read in each measurement, from 16MiB to 16GiB
    #[arg(long, value_name = "SIZE", default_value = "256MiB", value_parser = amount)]
    bytes: ByteSize,

    /// Repetitions of each measurement; the median is shown
    #[arg(long, value_name = "N", default_value_t = 3, value_parser = clap::value_parser!(u8).range(1..=99))]
    rounds: u8,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Io {
    fn sources(&self) -> Sources {
        let flags = [
            ("--model", "model", &self.model),
            ("--data-dir", "data_dir", &self.data_dir),
            ("--g4", "tiers.g4.url", &self.g4),
        ];
        let flags = flags.into_iter().filter_map(|(name, key, value)| Some(Flag::own(name, key, value.as_deref()?)));
        Sources::of_process(self.config.clone(), self.set.iter().cloned().chain(flags).collect())
    }
}

/// Measures and prints.
pub fn run(bench: &Bench) -> anyhow::Result<()> {
    let Command::Io(io) = &bench.command;
    let (config, _) = Config::load(&io.sources())?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let report = runtime.block_on(async {
        let mut terminated = signal(SignalKind::terminate())?;
        let report = tokio::select! {
            biased;
            // Dropping the other future removes its folders.
            _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
            _ = terminated.recv() => Err(anyhow!("interrupted")),
            report = measure(io, &config) => report,
        };
        if !io.compression
            && let Err(error) = tiers::clear(&config).await
        {
            output::note(format_args!(
                "cannot remove the objects of this measurement from the shared store: {}",
                with_causes(&error)
            ));
        }
        report
    })?;
    output::print(&if io.json { format!("{:#}\n", report.json) } else { report.text })
}

/// The result, as JSON and as text.
struct Report {
    json: Value,
    text: String,
}

async fn measure(io: &Io, config: &Config) -> anyhow::Result<Report> {
    if io.compression {
        return codec::measure(config, io.model.is_some()).await;
    }
    let cases: Vec<Case> = (io.block.iter())
        .flat_map(|block| io.parallel.iter().map(|parallel| (block.0 as usize, usize::from(*parallel))))
        .map(|(block, parallel)| Case { block, parallel, bytes: io.bytes.0 as usize })
        .collect();
    // Read the model first, so that an unreadable one fails before minutes of measuring.
    let expected = match &io.model {
        Some(_) => Some(Expectation::of(config, io.context as usize, io.prefill_tokens_per_second).await?),
        None => None,
    };
    let measured = tiers::measure(config, &cases, usize::from(io.rounds)).await?;
    let mut text = tiers::table(&measured);
    let mut json = json!({ "rounds": io.rounds, "round_bytes": io.bytes.0, "tiers": measured });
    if let Some(expected) = expected {
        let expected = expected.with_tiers(&measured);
        text += &format!("\n{expected}");
        json["expected"] = serde_json::to_value(&expected)?;
    }
    Ok(Report { json, text })
}

/// Parses a block size, within the sizes that all tiers accept.
fn block(text: &str) -> Result<ByteSize, String> {
    within(text, 4 << 10, 16 << 20)
}

/// Parses the size of a measurement. With less than 16 MiB latency dominates; more than 16 GiB exceeds the memory of
/// most machines.
fn amount(text: &str) -> Result<ByteSize, String> {
    within(text, 16 << 20, 16 << 30)
}

fn within(text: &str, least: u64, most: u64) -> Result<ByteSize, String> {
    let size: ByteSize = text.parse().map_err(|error| format!("{error}"))?;
    if (least..=most).contains(&size.0) {
        return Ok(size);
    }
    Err(format!("expected {} to {}", ByteSize(least).about(), ByteSize(most).about()))
}
