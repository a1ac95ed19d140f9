//! Time to first token at the client: cold, and with the prompt's prefix in each tier.
//!
//! Every repetition has new prompts, so that cold requests hit no block. The server's metrics show after each request
//! from which tier its blocks came; a cell with blocks from another tier is marked.

use anyhow::{Context, Result};
use bench::client::Client;
use bench::options::Options;
use bench::prompt::Source;
use bench::report::{circumstances, describe, median, short, table};
use bench::server::{Server, Settings};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::{Duration, Instant};
use tempfile::TempDir;

/// Prompt lengths, in tokens.
const LENGTHS: [usize; 3] = [512, 2048, 8192];

/// Capacity of G1, in tokens: one longest prompt fits, two do not.
const G1_TOKENS: u64 = 9_216;

/// Tokens per block, the server's default.
const BLOCK: u64 = 16;

/// Length of the filler prompts: two of them evict everything else from G1.
const FILLER_TOKENS: usize = 6_144;

/// Tokens of an answer: enough to time the first one.
const ANSWER_TOKENS: u32 = 2;

/// Offloads count as finished when no byte was written for this long.
const QUIET_TIME: Duration = Duration::from_millis(500);

/// The longest wait for offloads. A few hundred megabytes take seconds.
const MAX_SETTLE_TIME: Duration = Duration::from_mins(1);

/// A cell is valid when at least this share of the prompt came from the tier of its row.
const MIN_SHARE: f64 = 0.95;

/// The origin of tokens that no tier had.
const COMPUTED: &str = "computed";

/// Location of the prefix when the request arrives.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
enum Location {
    Cold,
    G1,
    G2,
    G3,
    G3Restarted,
    Shared,
}

impl Location {
    const ALL: [Self; 6] = [Self::Cold, Self::G1, Self::G2, Self::G3, Self::G3Restarted, Self::Shared];

    const fn title(self) -> &'static str {
        match self {
            Self::Cold => "cold",
            Self::G1 => "G1",
            Self::G2 => "G2",
            Self::G3 => "G3",
            Self::G3Restarted => "G3 after restart",
            Self::Shared => "shared folder",
        }
    }

    /// The tier's label in metrics.
    const fn tier(self) -> &'static str {
        match self {
            Self::Cold => COMPUTED,
            Self::G1 => "g1",
            Self::G2 => "g2",
            Self::G3 | Self::G3Restarted => "g3",
            Self::Shared => "g4",
        }
    }
}

/// One request: time to its first token, and the prompt tokens from each origin.
#[derive(Clone, Debug)]
struct Sample {
    first_token: Duration,
    origin: BTreeMap<&'static str, u64>,
}

type Cells = BTreeMap<(Location, usize), Vec<Sample>>;

const ABOUT: &str = "Time to first token: cold, and with the prompt's prefix in each tier.";

fn main() -> Result<()> {
    let options = Options::from_args(ABOUT)?;
    let cells = measure(&options)?;
    let circumstances = circumstances();
    if options.json {
        println!("{:#}", as_json(&options, &circumstances, &cells));
    } else {
        print(&options, &circumstances, &cells);
    }
    Ok(())
}

/// Starts the servers one after the other; each measures the locations that its configuration allows.
fn measure(options: &Options) -> Result<Cells> {
    let folders = TempDir::with_prefix("blockyard-bench-")?;
    let folder = |name: &str| folders.path().join(name);
    let mut source = Source::new(options.seed.unwrap_or_else(Source::fresh_seed));
    let mut make = || -> Vec<Vec<u32>> {
        LENGTHS
            .iter()
            .flat_map(|length| std::iter::repeat_n(*length, options.repetitions))
            .map(|n| source.tokens(n))
            .collect()
    };
    let (first, second) = (make(), make());
    let fillers = [source.tokens(FILLER_TOKENS), source.tokens(FILLER_TOKENS)];
    let warm_up = source.tokens(LENGTHS[0]);
    let block = block_bytes(options, &folder("probe"), &warm_up)?;
    let mut cells = Cells::new();
    let start = |name: &str, config: String| -> Result<Bench> {
        let data = folder(name);
        let settings = Settings { binary: &options.binary, model: &options.model, data: &data, config };
        Bench::start(&settings, &warm_up)
    };

    eprintln!("cold, then from G1");
    let server = start("one", config(block, "1GiB", Some(&folder("shared"))))?;
    for prompt in &first {
        server.settle()?;
        server.ask(prompt, Location::Cold, &mut cells)?;
        server.ask(prompt, Location::G1, &mut cells)?;
    }
    eprintln!("from G2");
    server.evict(&fillers)?;
    server.ask_all(&first, Location::G2, &mut cells)?;
    server.stop()?;

    eprintln!("from G3 after a restart");
    let server = start("one", config(block, "off", None))?;
    server.ask_all(&first, Location::G3Restarted, &mut cells)?;
    eprintln!("from G3");
    for prompt in &second {
        server.settle()?;
        server.ask(prompt, Location::Cold, &mut cells)?;
    }
    server.evict(&fillers)?;
    server.ask_all(&second, Location::G3, &mut cells)?;
    server.stop()?;

    eprintln!("from the shared folder, in a process with a folder of its own");
    let server = start("two", config(block, "off", Some(&folder("shared"))))?;
    server.ask_all(&first, Location::Shared, &mut cells)?;
    server.stop()?;
    Ok(cells)
}

/// One worker with a small G1; only the lower tiers differ between servers.
fn config(block_bytes: u64, g2: &str, shared: Option<&Path>) -> String {
    let g4 = shared.map(|folder| format!("g4 = {:?}\n", folder.display().to_string())).unwrap_or_default();
    let g1 = G1_TOKENS / BLOCK * block_bytes;
    format!("workers = \"both:1\"\n[tiers]\ng1 = \"{g1}B\"\ng2 = \"{g2}\"\n{g4}")
}

/// Bytes of one block of the model: bytes offloaded to G2 by a short prompt, divided by the blocks in G2.
fn block_bytes(options: &Options, data: &Path, prompt: &[u32]) -> Result<u64> {
    let config = "workers = \"both:1\"\n[tiers]\ng3 = \"off\"\n".to_owned();
    let server = Bench::start(&Settings { binary: &options.binary, model: &options.model, data, config }, prompt)?;
    server.settle()?;
    let metrics = server.client().metrics()?;
    let bytes = metrics.sum("blockyard_tier_transfer_bytes_total", &[("tier", "g2"), ("direction", "offload")]) as u64;
    let blocks = metrics.sum("blockyard_tier_blocks", &[("tier", "g2")]) as u64;
    server.stop()?;
    bytes.checked_div(blocks).filter(|bytes| *bytes > 0).context("nothing was offloaded to G2")
}

/// A running server under measurement.
struct Bench {
    server: Server,
    model: String,
}

impl Bench {
    fn start(settings: &Settings<'_>, warm_up: &[u32]) -> Result<Self> {
        let server = Server::start(settings)?;
        let model = server.client.model()?;
        server.client.complete(&model, warm_up, ANSWER_TOKENS)?;
        Ok(Self { server, model })
    }

    fn client(&self) -> &Client {
        &self.server.client
    }

    fn stop(self) -> Result<()> {
        self.settle()?;
        self.server.stop()
    }

    fn ask_all(&self, prompts: &[Vec<u32>], location: Location, cells: &mut Cells) -> Result<()> {
        prompts.iter().try_for_each(|prompt| self.ask(prompt, location, cells))
    }

    /// Sends one request and records its time and the origin of its prompt tokens.
    fn ask(&self, prompt: &[u32], location: Location, cells: &mut Cells) -> Result<()> {
        let before = self.client().metrics()?;
        let answer = self.client().complete(&self.model, prompt, ANSWER_TOKENS)?;
        let after = self.client().metrics()?;
        let increase = |name, labels: &[_]| after.increase_since(&before, name, labels) as u64;
        let mut origin: BTreeMap<_, _> = ["g1", "g2", "g3", "g4", "peer"]
            .map(|tier| (tier, increase("blockyard_worker_prompt_tokens_cached_total", &[("tier", tier)])))
            .into_iter()
            .filter(|(_, tokens)| *tokens > 0)
            .collect();
        origin.insert(COMPUTED, increase("blockyard_worker_prompt_tokens_computed_total", &[]));
        eprintln!("  {:>5} tokens, {}: {}", prompt.len(), location.title(), short(answer.first_token));
        let sample = Sample { first_token: answer.first_token, origin };
        cells.entry((location, prompt.len())).or_default().push(sample);
        Ok(())
    }

    /// Evicts all earlier prompts from G1, after they are offloaded.
    fn evict(&self, fillers: &[Vec<u32>]) -> Result<()> {
        self.settle()?;
        for filler in fillers {
            self.client().complete(&self.model, filler, ANSWER_TOKENS)?;
        }
        self.settle()
    }

    /// Waits until no offload writes to a tier.
    fn settle(&self) -> Result<()> {
        let written = || -> Result<f64> {
            Ok(self.client().metrics()?.sum("blockyard_tier_transfer_bytes_total", &[("direction", "offload")]))
        };
        let started = Instant::now();
        let mut last = written()?;
        while started.elapsed() < MAX_SETTLE_TIME {
            std::thread::sleep(QUIET_TIME);
            let now = written()?;
            if now <= last {
                return Ok(());
            }
            last = now;
        }
        anyhow::bail!("offloads did not finish within {MAX_SETTLE_TIME:?}:\n{}", self.server.log_tail())
    }
}

/// The median, and a note when blocks came from another tier.
struct Cell {
    median: Duration,
    note: Option<String>,
}

fn cell(cells: &Cells, location: Location, length: usize) -> Option<Cell> {
    let samples = cells.get(&(location, length))?;
    let times: Vec<_> = samples.iter().map(|sample| sample.first_token).collect();
    let share =
        |sample: &Sample| sample.origin.get(location.tier()).copied().unwrap_or_default() as f64 / length as f64;
    let other_origin = samples.iter().find(|sample| share(sample) < MIN_SHARE);
    let note = other_origin.map(|sample| {
        let parts: Vec<_> = sample.origin.iter().map(|(tier, tokens)| format!("{tier} {tokens}")).collect();
        format!("{} at {length} tokens: not all from {}, but {}", location.title(), location.tier(), parts.join(", "))
    });
    Some(Cell { median: median(&times), note })
}

fn print(options: &Options, circumstances: &Value, cells: &Cells) {
    println!("time to first token, {}, median of {} (× is cold ÷ this)", options.model, options.repetitions);
    println!("{}\n", describe(circumstances));
    let head: Vec<String> = LENGTHS.iter().flat_map(|n| [format!("{n} tokens"), "×".into(), "saved".into()]).collect();
    let head: Vec<&str> = std::iter::once("prefix in").chain(head.iter().map(String::as_str)).collect();
    let mut notes = Vec::new();
    let mut row = |location: Location| {
        let columns = LENGTHS.iter().flat_map(|length| {
            let (Some(cold), Some(this)) = (cell(cells, Location::Cold, *length), cell(cells, location, *length))
            else {
                return ["-".into(), String::new(), String::new()];
            };
            let mark = if this.note.is_some() { "*" } else { "" };
            notes.extend(this.note);
            let time = short(this.median) + mark;
            if location == Location::Cold {
                return [time, String::new(), String::new()];
            }
            let ratio = cold.median.as_secs_f64() / this.median.as_secs_f64();
            [time, format!("{ratio:.1}"), short(cold.median.saturating_sub(this.median))]
        });
        std::iter::once(location.title().to_owned()).chain(columns).collect::<Vec<_>>()
    };
    let rows: Vec<_> = Location::ALL.into_iter().map(&mut row).collect();
    print!("{}", table(&head, &rows));
    for note in notes {
        println!("* {note}");
    }
    println!("\nsaved: engine seconds that one request with that prefix does not need");
}

fn as_json(options: &Options, circumstances: &Value, cells: &Cells) -> Value {
    let measured: Vec<Value> = cells
        .iter()
        .filter_map(|((location, length), samples)| {
            let this = cell(cells, *location, *length)?;
            let cold = cell(cells, Location::Cold, *length)?;
            Some(json!({
                "prefix_in": location.title(),
                "prompt_tokens": length,
                "median_seconds": this.median.as_secs_f64(),
                "seconds": samples.iter().map(|sample| sample.first_token.as_secs_f64()).collect::<Vec<_>>(),
                "times_faster_than_cold": cold.median.as_secs_f64() / this.median.as_secs_f64(),
                "engine_seconds_saved": cold.median.saturating_sub(this.median).as_secs_f64(),
                "origin_tokens": samples.iter().map(|sample| json!(sample.origin)).collect::<Vec<_>>(),
                "as_named": this.note.is_none(),
            }))
        })
        .collect();
    json!({"benchmark": "ttft", "model": options.model, "circumstances": circumstances, "cells": measured})
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_configuration_has_a_g4_folder_and_sizes_with_units() {
        let text = config(1_000, "1GiB", Some(Path::new("/shared")));
        assert_eq!(text, "workers = \"both:1\"\n[tiers]\ng1 = \"576000B\"\ng2 = \"1GiB\"\ng4 = \"/shared\"\n");
        assert!(!config(1_000, "off", None).contains("g4"));
    }
}
