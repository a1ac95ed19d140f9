//! Gateways side by side in front of the same engines: CPU time per request and per chunk, added time to the first
//! token, memory. Blockyard's figures stand beside their goals, those of the others without.

use anyhow::{Context, Result, bail, ensure};
use bench::client::Client;
use bench::figure::{Figure, Goal};
use bench::gateway::load::{Load, Measured, Until, answers, run};
use bench::gateway::peers::{Gateway, Setting};
use bench::gateway::process::Running;
use bench::gateway::tokenizer::{Tokenizer, words};
use bench::options::{root, target_directory};
use bench::report::circumstances;
use bench::suite::{self, Program, number};
use serde_json::json;
use std::collections::BTreeMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};
use tokio::time::sleep;

/// Ports of the engines, their events and the gateways. Fixed, because the gateways need them in configurations.
const ENGINES: u16 = 19_100;
const EVENTS: u16 = 19_200;
const GATEWAYS: u16 = 19_300;
/// Ports of one gateway: its own and that of its metrics.
const PORTS_EACH: u16 = 2;
/// Number of engines.
const ENGINE_COUNT: u16 = 4;
/// Time for a gateway's start. `LiteLLM` takes half a minute.
const START_TIMEOUT: Duration = Duration::from_mins(3);
/// Between two tokens of a paced stream: 50 tokens per second.
const PACE: Duration = Duration::from_millis(20);
/// The same while memory is measured: streams are open, and little is computed.
const SLOW_PACE: Duration = Duration::from_secs(1);

/// Open files that a process may need for a stream while memory is measured: a gateway has two, and this program takes
/// at most half of the limit for connections of clients. Twice that, for connections that are about to close.
const FILES_PER_STREAM: usize = 4;

/// Size of the prompts of [`Scenario::Long`], and of what each of them shares with others.
const LONG_PROMPT: usize = 16 << 10;
const LONG_SHARED: usize = 12 << 10;
/// Share of the prompts whose tokens must come from where the gateway has them. The first ones come before the KV
/// events do.
const MIN_KNOWN: f64 = 0.95;
/// Lines of text, of 1 KiB each, on which the tokenizer is measured, and repetitions, of which the fastest counts.
const TEXT_LINES: u64 = 512;
const TEXT_REPETITIONS: usize = 3;

/// The name of the measurement of memory; the others are [`Scenario`]s.
const MEMORY: &str = "memory";

const USAGE: &str = "\
  --json             print JSON instead of a table
  --only NAME        a gateway to measure (repeatable; all)
  --measure NAME     plain, stream, paced, single, long or memory (repeatable; all)
  --blockyard PATH   program under test (the release build of this checkout)
  --environment DIR  Python environment with the peers (bench/.venv-gateways)
  --seconds N        duration of each measurement (5)
  --repetitions N    repetitions of each measurement, of which the median counts (3)
  --prompts N        distinct prompts before memory is measured (200000)
  --streams N        open streams while memory is measured (1000); needs four times as many open files";

/// The command line.
struct Options {
    json: bool,
    only: Vec<String>,
    measure: Vec<String>,
    blockyard: Option<PathBuf>,
    environment: PathBuf,
    seconds: f64,
    repetitions: usize,
    prompts: u64,
    streams: usize,
}

impl Options {
    fn from_args() -> Result<Self> {
        let mut options = Self {
            json: false,
            only: Vec::new(),
            measure: Vec::new(),
            blockyard: None,
            environment: root().join("bench/.venv-gateways"),
            seconds: 5.0,
            repetitions: 3,
            prompts: 200_000,
            streams: 1_000,
        };
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

/// What is measured while all gateways run.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Scenario {
    /// Short prompts, whole answers.
    Plain,
    /// The same, as streams without a pace.
    Stream,
    /// 256 streams of 50 tokens per second.
    Paced,
    /// One request at a time, one token.
    Single,
    /// Prompts of 16 KiB, of which 12 KiB are shared, one token.
    Long,
}

impl Scenario {
    const ALL: [Self; 5] = [Self::Plain, Self::Stream, Self::Paced, Self::Single, Self::Long];

    fn load(self, addresses: Vec<SocketAddr>, time: Duration) -> Load {
        let (clients, stream, tokens, prompt, shared) = match self {
            Self::Plain => (32, false, 64, 128, 64),
            Self::Stream => (32, true, 64, 128, 64),
            Self::Paced => (256, true, 64, 128, 64),
            Self::Single => (1, true, 1, 128, 64),
            Self::Long => (32, true, 1, LONG_PROMPT, LONG_SHARED),
        };
        let warmup = Duration::from_secs(if self == Self::Paced { 2 } else { 1 });
        Load { addresses, clients, stream, tokens, prompt, shared, warmup, until: Until::Elapsed(time) }
    }

    fn pace(self) -> Duration {
        if self == Self::Paced { PACE } else { Duration::ZERO }
    }
}

/// A figure of one gateway, in the order of the table.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum What {
    CpuRequest,
    CpuChunk,
    CpuChunkPaced,
    CpuLong,
    AddedFirst50,
    AddedFirst99,
    MemoryStreams,
    MemoryPrompts,
}

impl What {
    const ALL: [Self; 8] = [
        Self::CpuRequest,
        Self::CpuChunk,
        Self::CpuChunkPaced,
        Self::CpuLong,
        Self::AddedFirst50,
        Self::AddedFirst99,
        Self::MemoryStreams,
        Self::MemoryPrompts,
    ];

    fn name(self, options: &Options) -> String {
        match self {
            Self::CpuRequest => "CPU per request, 32 clients".to_owned(),
            Self::CpuChunk => "CPU per chunk, 32 streams unpaced".to_owned(),
            Self::CpuChunkPaced => "CPU per chunk, 256 streams at 50/s".to_owned(),
            Self::CpuLong => "CPU per request, prompts of 16 KiB".to_owned(),
            Self::AddedFirst50 => "added first token p50, one at a time".to_owned(),
            Self::AddedFirst99 => "added first token p99, one at a time".to_owned(),
            Self::MemoryStreams => format!("memory at {} open streams", options.streams),
            Self::MemoryPrompts => format!("memory after {} distinct prompts", options.prompts),
        }
    }

    const fn unit(self) -> &'static str {
        match self {
            Self::MemoryStreams | Self::MemoryPrompts => "MiB",
            _ => "µs",
        }
    }

    /// The goal of this program, where it is a number.
    fn goal(self, gateway: Gateway, options: &Options) -> Goal {
        match (gateway, self) {
            (Gateway::Blockyard, Self::AddedFirst50) => Goal::AtMost(100.0),
            (Gateway::Blockyard, Self::AddedFirst99) => Goal::AtMost(200.0),
            (Gateway::Blockyard, Self::MemoryPrompts) if options.prompts == 200_000 => Goal::AtMost(80.0),
            _ => Goal::None,
        }
    }
}

/// Prompts of a gateway by the source of their tokens.
type Sources = BTreeMap<String, f64>;

/// The figures of one gateway, or why there are none.
type Results = BTreeMap<What, Result<f64, &'static str>>;

#[tokio::main]
async fn main() -> Result<()> {
    let options = Options::from_args()?;
    let names = Gateway::ALL.map(Gateway::name);
    let only = suite::selected(&names, &options.only)?;
    let measured: Vec<&str> = Scenario::ALL.map(Scenario::name).into_iter().chain([MEMORY]).collect();
    let measured = suite::selected(&measured, &options.measure)?;
    let scenarios: Vec<Scenario> =
        Scenario::ALL.into_iter().filter(|scenario| measured.iter().any(|name| name == scenario.name())).collect();
    let folder = tempfile::tempdir()?;
    let blockyard = match &options.blockyard {
        Some(path) => path.canonicalize().with_context(|| path.display().to_string())?,
        None => target_directory()?.join("release/blockyard"),
    };
    let engines: Vec<SocketAddr> = (ENGINES..ENGINES + ENGINE_COUNT).map(local).collect();
    let bench = Bench { options: &options, blockyard: &blockyard, folder: folder.path(), engines: &engines };
    let _engines = bench.start_engines().await?;
    let (mut installed, mut missing) = (Vec::new(), BTreeMap::new());
    for gateway in Gateway::ALL.into_iter().filter(|gateway| only.contains(&gateway.name().to_owned())) {
        match gateway.program(&bench.setting(gateway)) {
            Some(program) => installed.push((gateway, program)),
            None => drop(missing.insert(gateway.name(), gateway.install(&options.environment))),
        }
    }
    let mut results = bench.matrix(&installed, &scenarios).await?;
    let is_measured =
        |(gateway, _): &&(Gateway, PathBuf)| *gateway != Gateway::Dynamo && measured.iter().any(|name| name == MEMORY);
    for (gateway, program) in installed.iter().filter(is_measured) {
        let memory = bench.memory(*gateway, program).await?;
        results.entry(gateway.name()).or_default().extend(memory);
    }
    for name in missing.keys() {
        results.insert(name, What::ALL.map(|what| (what, Err("not installed"))).into());
    }
    let mut circumstances = circumstances();
    circumstances["not_installed"] = json!(missing);
    let is_tokenized =
        results.get(Gateway::BlockyardTokenizer.name()).is_some_and(|all| all.contains_key(&What::CpuLong));
    let new_text_us = if is_tokenized { bench.new_text_us()? } else { None };
    let figures = figures(&results, &options, new_text_us);
    suite::print(&circumstances, &figures, &serde_json::Value::Null, options.json);
    if !options.json {
        for (name, install) in &missing {
            println!("not installed: {name}; {install}");
        }
    }
    Ok(())
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

struct Bench<'a> {
    options: &'a Options,
    blockyard: &'a Path,
    folder: &'a Path,
    engines: &'a [SocketAddr],
}

impl Bench<'_> {
    async fn start_engines(&self) -> Result<Running> {
        let program = std::env::current_exe()?.with_file_name("engine");
        ensure!(program.exists(), "{} is not there: make bench-gateway builds it", program.display());
        let mut command = Command::new(program);
        command.args([ENGINES, ENGINE_COUNT, EVENTS].map(|number| number.to_string()));
        let mut engines = Running::start(command, "engine", self.folder)?;
        for address in self.engines {
            self.until_ready("engine", &mut engines, *address).await?;
        }
        Ok(engines)
    }

    fn setting(&self, gateway: Gateway) -> Setting<'_> {
        let at = Gateway::ALL.iter().position(|other| *other == gateway).unwrap_or_default();
        let listen = local(GATEWAYS + at as u16 * PORTS_EACH);
        let environment = &self.options.environment;
        Setting { blockyard: self.blockyard, environment, folder: self.folder, engines: self.engines, listen }
    }

    async fn start(&self, gateway: Gateway, program: &Path) -> Result<Running> {
        let setting = self.setting(gateway);
        eprintln!("starting {} …", gateway.name());
        let command = gateway.command(program, &setting)?;
        let mut running = Running::start(command, gateway.name(), self.folder)?;
        self.until_ready(gateway.name(), &mut running, setting.listen).await?;
        Ok(running)
    }

    async fn until_ready(&self, name: &str, running: &mut Running, address: SocketAddr) -> Result<()> {
        let started = Instant::now();
        loop {
            let error = match answers(address, Duration::from_secs(5)).await {
                Ok(()) => return Ok(()),
                Err(error) => error,
            };
            if !running.is_running() || started.elapsed() > START_TIMEOUT {
                let log = std::fs::read_to_string(self.folder.join(format!("{name}.log"))).unwrap_or_default();
                bail!("{name} does not answer at {address}: {error:#}\n{log}");
            }
            sleep(Duration::from_millis(200)).await;
        }
    }

    async fn set_pace(&self, pace: Duration) -> Result<()> {
        let url = format!("http://{}/interval?us={}", self.engines[0], pace.as_micros());
        tokio::task::spawn_blocking(move || ureq::post(url).send_empty()).await??;
        Ok(())
    }

    /// Every scenario with every gateway in turn, so that a change of the machine concerns all of them.
    async fn matrix(
        &self,
        installed: &[(Gateway, PathBuf)],
        scenarios: &[Scenario],
    ) -> Result<BTreeMap<&'static str, Results>> {
        let (mut running, mut own_engines) = (Vec::new(), Vec::new());
        for (gateway, program) in installed {
            if let Some(command) = gateway.own_engines(program, &self.setting(*gateway))? {
                own_engines.push(Running::start(command, &format!("{}-engines", gateway.name()), self.folder)?);
            }
            running.push((*gateway, self.start(*gateway, program).await?));
        }
        let time = Duration::from_secs_f64(self.options.seconds);
        let mut samples: BTreeMap<(&str, What), Vec<f64>> = BTreeMap::new();
        let mut failed: BTreeMap<(&str, Scenario), &str> = BTreeMap::new();
        for repetition in 0..self.options.repetitions {
            for scenario in scenarios.iter().copied() {
                self.set_pace(scenario.pace()).await?;
                let direct = match scenario {
                    Scenario::Single => Some(run(&scenario.load(self.engines.to_vec(), time), None).await),
                    _ => None,
                };
                // Turned around in every other repetition, because the order may matter.
                let order: Vec<_> =
                    if repetition % 2 == 0 { running.iter().collect() } else { running.iter().rev().collect() };
                for (gateway, process) in order.into_iter().filter(|(gateway, _)| scenario.concerns(*gateway)) {
                    let name = gateway.name();
                    let before = self.token_sources(*gateway).await?;
                    let measured = run(&scenario.load(vec![self.setting(*gateway).listen], time), Some(process)).await;
                    let sources = self.token_sources(*gateway).await?;
                    eprintln!(
                        "{} {name}: {} requests, {} chunks, {} errors {}",
                        scenario.name(),
                        measured.requests,
                        measured.chunks,
                        measured.errors,
                        measured.error.as_deref().unwrap_or_default()
                    );
                    if measured.errors > 0 || measured.requests == 0 {
                        failed.insert((name, scenario), "requests failed");
                        continue;
                    }
                    if !has_tokens(*gateway, &before, &sources) {
                        eprintln!("{} {name}: prompts by the source of their tokens: {sources:?}", scenario.name());
                        failed.insert((name, scenario), "tokens of prompts unknown");
                        continue;
                    }
                    for (what, value) in scenario.values(&measured, direct.as_ref()) {
                        samples.entry((name, what)).or_default().push(value);
                    }
                }
            }
        }
        let mut results: BTreeMap<&'static str, Results> = BTreeMap::new();
        for (gateway, _) in installed {
            let name = gateway.name();
            for scenario in scenarios.iter().copied().filter(|scenario| scenario.concerns(*gateway)) {
                for what in scenario.measures() {
                    let value = match (failed.get(&(name, scenario)), samples.get_mut(&(name, *what))) {
                        (Some(why), _) => Err(*why),
                        (None, Some(values)) => Ok(median(values)),
                        (None, None) => Err("not measured"),
                    };
                    results.entry(name).or_default().insert(*what, value);
                }
            }
        }
        Ok(results)
    }

    /// The prompts so far by the source of their tokens. Empty for a gateway that routes without them.
    async fn token_sources(&self, gateway: Gateway) -> Result<Sources> {
        if gateway.tokens_from().is_none() {
            return Ok(Sources::new());
        }
        let client = Client::new(&format!("http://{}", self.setting(gateway).listen));
        let scrape = tokio::task::spawn_blocking(move || client.metrics()).await??;
        Ok(scrape.by("blockyard_frontend_relayed_prompts_total", "tokens"))
    }

    /// Time of the gateway's tokenizer for the new text of one of the long prompts, on one thread. `None`: the program
    /// that measures it was not built.
    fn new_text_us(&self) -> Result<Option<f64>> {
        let path = target_directory()?.join("release/examples/tokenize");
        if !path.exists() {
            eprintln!("{} is not there: make bench-gateway builds it", path.display());
            return Ok(None);
        }
        let (files, text) = (self.folder.join("tokenizer"), self.folder.join("text"));
        Tokenizer::default().write(&files)?;
        std::fs::write(&text, (0..TEXT_LINES).map(|line| words(line, 1 << 10) + "\n").collect::<String>())?;
        let (file, text) = (files.join("tokenizer.json").display().to_string(), text.display().to_string());
        let program = Program::new("tokenize", path, &[&file, &text]);
        let mut fastest = f64::INFINITY;
        for _ in 0..TEXT_REPETITIONS {
            let (printed, _) = program.run()?;
            let printed = printed.first().context("tokenize printed nothing")?;
            fastest = fastest.min(number(&printed["new_s"])? / number(&printed["bytes"])?);
        }
        Ok(Some(fastest * (LONG_PROMPT - LONG_SHARED) as f64 * 1e6))
    }

    /// Memory, in a new process.
    async fn memory(&self, gateway: Gateway, program: &Path) -> Result<Results> {
        let process = self.start(gateway, program).await?;
        let addresses = vec![self.setting(gateway).listen];
        let load = |clients, stream, tokens, until| {
            let (addresses, warmup) = (addresses.clone(), Duration::from_secs(4));
            Load { addresses, clients, stream, tokens, prompt: 128, shared: 64, warmup, until }
        };
        self.set_pace(SLOW_PACE).await?;
        let needed = self.options.streams * FILES_PER_STREAM;
        let open = match open_files() {
            Some(limit) if limit < needed => {
                eprintln!(
                    "memory {}: {} open streams are left out, because they need {needed} open files and the limit is \
                     {limit}; raise it (ulimit -n {needed}) or set --streams {}",
                    gateway.name(),
                    self.options.streams,
                    limit / FILES_PER_STREAM
                );
                Err("too few open files")
            }
            _ => {
                // Longer than the measurement, so that all are open at its end.
                let streams = load(self.options.streams, true, 25, Until::Elapsed(Duration::from_secs(2)));
                let streams = run(&streams, Some(&process)).await;
                eprintln!("memory {}: {} streams failed", gateway.name(), streams.errors);
                if streams.errors == 0 && streams.chunks > 0 { Ok(streams.resident_mib) } else { Err("streams failed") }
            }
        };
        self.set_pace(Duration::ZERO).await?;
        let count = self.options.prompts;
        let prompts = run(&load(32, false, 1, Until::Answered(count)), Some(&process)).await;
        eprintln!("memory {}: {} prompts", gateway.name(), prompts.requests);
        let after = if prompts.requests >= count { Ok(prompts.resident_mib) } else { Err("not reached in 10 min") };
        Ok([(What::MemoryStreams, open), (What::MemoryPrompts, after)].into())
    }
}

impl Scenario {
    /// Whether it says something about a gateway. Dynamo's own engines send tokens at a pace of their own, and several
    /// in one chunk.
    fn concerns(self, gateway: Gateway) -> bool {
        gateway != Gateway::Dynamo || matches!(self, Self::Plain | Self::Long)
    }

    fn measures(self) -> &'static [What] {
        match self {
            Self::Plain => &[What::CpuRequest],
            Self::Stream => &[What::CpuChunk],
            Self::Paced => &[What::CpuChunkPaced],
            Self::Single => &[What::AddedFirst50, What::AddedFirst99],
            Self::Long => &[What::CpuLong],
        }
    }

    const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain",
            Self::Stream => "stream",
            Self::Paced => "paced",
            Self::Single => "single",
            Self::Long => "long",
        }
    }

    fn values(self, measured: &Measured, direct: Option<&Measured>) -> Vec<(What, f64)> {
        let added = |quantile| Some(measured.first_us(quantile)? - direct?.first_us(quantile)?);
        let value = |what| match what {
            What::CpuRequest | What::CpuLong => Some(measured.cpu_per_request()),
            What::CpuChunk | What::CpuChunkPaced => Some(measured.cpu_per_chunk()),
            What::AddedFirst50 => added(0.5),
            What::AddedFirst99 => added(0.99),
            What::MemoryStreams | What::MemoryPrompts => None,
        };
        self.measures().iter().filter_map(|what| Some((*what, value(*what)?))).collect()
    }
}

/// The soft limit of open files of this process, which those that it starts inherit; `None` if there is none.
fn open_files() -> Option<usize> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    limits.lines().find_map(|line| line.strip_prefix("Max open files"))?.split_whitespace().next()?.parse().ok()
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[(values.len() - 1) / 2]
}

/// Whether nearly all prompts between two counts have their tokens from where the gateway has them. Otherwise it was
/// routing by text, which is another measurement.
fn has_tokens(gateway: Gateway, before: &Sources, after: &Sources) -> bool {
    let Some(source) = gateway.tokens_from() else { return true };
    let of = |sources: &Sources, name: &str| sources.get(name).copied().unwrap_or_default();
    let more = |name: &str| of(after, name) - of(before, name);
    let all: f64 = after.keys().map(|name| more(name)).sum();
    all > 0.0 && more(source) >= MIN_KNOWN * all
}

/// The figures of all gateways, and this program's as parts of the others'. `new_text_us`: what the tokenizer takes for
/// the new text of a long prompt.
fn figures(results: &BTreeMap<&'static str, Results>, options: &Options, new_text_us: Option<f64>) -> Vec<Figure> {
    let mut figures = Vec::new();
    for what in What::ALL {
        for gateway in Gateway::ALL {
            let Some(result) = results.get(gateway.name()).and_then(|results| results.get(&what)) else { continue };
            let name = format!("{}: {}", what.name(options), gateway.name());
            let goal = what.goal(gateway, options);
            figures.push(match result {
                Ok(value) => Figure::of(name, *value, what.unit(), goal),
                Err(why) => Figure::missing(name, why, goal),
            });
        }
        if matches!(what, What::CpuRequest | What::CpuChunk | What::CpuChunkPaced) {
            figures.extend(ratios(what, results, options));
        }
    }
    figures.extend(events(results, new_text_us));
    figures
}

/// This program's CPU time as a part of that of nginx, and of the best gateway that knows engines.
fn ratios(what: What, results: &BTreeMap<&'static str, Results>, options: &Options) -> [Figure; 2] {
    let of = |gateway: Gateway| results.get(gateway.name())?.get(&what)?.ok();
    let peers = [Gateway::VllmRouter, Gateway::Smg, Gateway::LiteLlm];
    let best = peers.into_iter().filter_map(of).min_by(f64::total_cmp);
    [("the best router", best, Goal::AtMost(0.5)), ("nginx", of(Gateway::Nginx), Goal::AtMost(2.0))].map(
        |(other, reference, goal)| {
            let name = format!("{}: blockyard / {other}", what.name(options));
            match (of(Gateway::Blockyard), reference) {
                (Some(own), Some(reference)) if reference > 0.0 => Figure::ratio(name, own / reference, goal),
                _ => Figure::missing(name, "not measured", goal),
            }
        },
    )
}

/// What routing by KV events adds to a request, with the tokens from an engine, and with those of a local tokenizer
/// beyond the time that it takes for the new text.
fn events(results: &BTreeMap<&'static str, Results>, new_text_us: Option<f64>) -> Vec<Figure> {
    let of = |gateway: Gateway| results.get(gateway.name())?.get(&What::CpuLong)?.ok();
    let added = |gateway| Some(of(gateway)? - of(Gateway::Blockyard)?);
    let figure = |what: &str, value: Option<f64>, goal| {
        let name = format!("CPU per request, prompts of 16 KiB: {what}");
        value.map(|value| Figure::of(name, value, "µs", goal))
    };
    let (from_engine, local) = (added(Gateway::BlockyardEvents), added(Gateway::BlockyardTokenizer));
    let beyond = local.and_then(|local| Some(local - new_text_us?));
    let of_dynamo = of(Gateway::BlockyardTokenizer).and_then(|own| Some(own / of(Gateway::Dynamo)?));
    let figures = [
        figure("added by KV events, tokens from an engine", from_engine, Goal::None),
        figure("added by KV events, local tokenizer", local, Goal::None),
        figure("tokens of 4 KiB of new text, one thread", new_text_us, Goal::None),
        figure("added by KV events, local tokenizer, beyond the tokens of the new text", beyond, Goal::AtMost(60.0)),
    ];
    let name = "CPU per request, prompts of 16 KiB: blockyard-tokenizer / dynamo";
    let of_dynamo = of_dynamo.map(|ratio| Figure::ratio(name.to_owned(), ratio, Goal::Below(1.0)));
    figures.into_iter().flatten().chain(of_dynamo).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn options() -> Options {
        Options {
            json: false,
            only: Vec::new(),
            measure: Vec::new(),
            blockyard: None,
            environment: PathBuf::new(),
            seconds: 1.0,
            repetitions: 1,
            prompts: 200_000,
            streams: 1_000,
        }
    }

    #[test]
    fn ratios_need_both_and_take_the_best_router() {
        let cpu = |value| Results::from([(What::CpuRequest, value)]);
        let mut results = BTreeMap::from([
            ("blockyard", cpu(Ok(30.0))),
            ("vllm-router", cpu(Ok(75.0))),
            ("smg", cpu(Ok(180.0))),
            ("nginx", cpu(Err("not installed"))),
        ]);
        let [routers, nginx] = ratios(What::CpuRequest, &results, &options());
        assert_eq!((routers.met(), nginx.met()), (Some(true), None));
        assert_eq!(routers.row()[1], "0.40");
        results.remove("vllm-router");
        results.insert("nginx", cpu(Ok(10.0)));
        let [routers, nginx] = ratios(What::CpuRequest, &results, &options());
        assert_eq!((routers.row()[1].as_str(), nginx.met()), ("0.17", Some(false)));
    }

    #[test]
    fn a_gateway_that_is_not_installed_has_no_number() {
        let results = BTreeMap::from([("nginx", Results::from([(What::CpuRequest, Err("not installed"))]))]);
        let rows: Vec<_> = figures(&results, &options(), None).iter().map(Figure::row).collect();
        assert_eq!(rows[0][1], "not installed");
        assert!(rows.iter().all(|row| row[1].starts_with("not ")), "{rows:?}");
    }

    #[test]
    fn routing_by_kv_events_has_its_goal_beyond_the_tokens_of_the_new_text() {
        let cpu = |value| Results::from([(What::CpuLong, Ok(value))]);
        let mut results = BTreeMap::from([("blockyard", cpu(150.0)), ("blockyard-tokenizer", cpu(300.0))]);
        let met = |new_text_us| events(&results, new_text_us).iter().filter_map(Figure::met).collect::<Vec<_>>();
        assert_eq!((met(Some(100.0)), met(Some(80.0)), met(None)), (vec![true], vec![false], vec![]));
        results.insert("dynamo", cpu(6000.0));
        assert_eq!(events(&results, None).last().and_then(Figure::met), Some(true));
    }

    #[test]
    fn prompts_without_tokens_are_no_measurement_of_kv_events() {
        let sources =
            |counts: [f64; 2]| Sources::from([("engine".to_owned(), counts[0]), ("estimate".to_owned(), counts[1])]);
        let of = |gateway, after| has_tokens(gateway, &sources([10.0, 90.0]), &sources(after));
        assert!(of(Gateway::BlockyardEvents, [110.0, 91.0]) && !of(Gateway::BlockyardEvents, [10.0, 190.0]));
        assert!(!of(Gateway::BlockyardTokenizer, [110.0, 91.0]) && of(Gateway::Nginx, [10.0, 190.0]));
        assert!(!of(Gateway::BlockyardEvents, [10.0, 90.0]), "none was counted");
    }
}
