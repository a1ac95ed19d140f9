//! `blockyard calibrate`: estimates the speed of workers from a trace of served requests. It prints the profile to
//! standard output and the accuracy of the estimate to standard error.

use crate::commands::output;
use crate::commands::replay::{open, profile};
use anyhow::{Context, bail};
use router::Recorded;
use router::replay::{self, Calibration, Profile};
use serde::Serialize;
use std::io::BufRead;
use std::path::PathBuf;

/// `blockyard calibrate`.
#[derive(clap::Args, Debug)]
#[command(after_help = "`blockyard serve --set router.trace_file=run.jsonl` writes the trace. Then:\n\n  \
    blockyard calibrate run.jsonl > my-worker.toml\n  blockyard replay run.jsonl --profile my-worker.toml")]
pub struct Calibrate {
    /// A trace of served requests, as `router.trace_file` writes it. `-` reads standard input
    trace: PathBuf,

    /// Profile for the values that the trace does not contain: a TOML file, as this command prints it [default: the
    /// built-in h100-8b, a model of 8 billion parameters on an H100]
    #[arg(long, value_name = "FILE")]
    base: Option<PathBuf>,

    /// Use only the requests for this model [default: the only one in the trace]
    #[arg(long, value_name = "NAME")]
    model: Option<String>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    profile: &'a Profile,
    requests: usize,
    workers: usize,
    disaggregated: usize,
    prefill_median_relative_error: f64,
    decode_median_relative_error: f64,
    from_base: &'a [&'static str],
}

/// Runs the command.
pub fn run(args: &Calibrate) -> anyhow::Result<()> {
    let base = profile("--base", args.base.as_deref())?;
    let (lines, model) = read(args)?;
    let Calibration {
        mut profile,
        requests,
        workers,
        disaggregated,
        prefill_median_relative_error,
        decode_median_relative_error,
        from_base,
    } = replay::calibrate(&lines, &base).with_context(|| args.trace.display().to_string())?;
    profile.name = model;
    profile.origin = format!(
        "Calibrated on {requests} requests of {workers} worker{}. Median relative error: prefill {:.0} %, decode \
         {:.0} %. Taken from {}: {}.",
        if workers == 1 { "" } else { "s" },
        prefill_median_relative_error * 100.0,
        decode_median_relative_error * 100.0,
        base.name,
        from_base.join(", ")
    );
    output::note(&profile.origin);
    if disaggregated > 0 {
        let were = if disaggregated == 1 { "was" } else { "were" };
        output::note(format_args!(
            "{disaggregated} of them {were} prefilled and decoded by different workers and {were} not used."
        ));
    }
    let text = if args.json {
        let profile = &profile;
        let report = Report {
            profile,
            requests,
            workers,
            disaggregated,
            prefill_median_relative_error,
            decode_median_relative_error,
            from_base: &from_base,
        };
        serde_json::to_string_pretty(&report)? + "\n"
    } else {
        toml::to_string(&profile)?
    };
    output::print(&text)
}

/// The requests of one model, and its name.
fn read(args: &Calibrate) -> anyhow::Result<(Vec<Recorded>, String)> {
    let name = args.trace.display();
    let mut lines: Vec<Recorded> = Vec::new();
    for (at, line) in open(&args.trace)?.lines().enumerate() {
        let line = line.with_context(|| name.to_string())?;
        if !line.trim().is_empty() {
            let parsed = serde_json::from_str(&line);
            lines.push(parsed.with_context(|| format!("{name}, line {}: not a record of a served request", at + 1))?);
        }
    }
    let Some(model) = args.model.clone().or_else(|| Some(lines.first()?.model.clone())) else {
        bail!("{name}: contains no request");
    };
    let all = lines.len();
    lines.retain(|line| line.model == model);
    match args.model {
        None if lines.len() < all => {
            bail!("{name}: contains requests for several models; choose one, such as --model {model}")
        }
        Some(_) if lines.is_empty() => bail!("{name}: contains no request for the model {model}"),
        _ => Ok((lines, model)),
    }
}
