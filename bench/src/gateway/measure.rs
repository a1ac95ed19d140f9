//! Starts the engines and the gateways, and measures them.

use super::figures::{Results, What};
use super::load::{Load, Until, answers, run};
use super::options::Options;
use super::peers::{Gateway, Setting};
use super::process::Running;
use super::scenario::{LONG_PROMPT, LONG_SHARED, Scenario};
use super::tokenizer::{Tokenizer, words};
use crate::client::Client;
use crate::options::target_directory;
use crate::suite::{Program, number};
use anyhow::{Context, Result, bail, ensure};
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
/// Between two tokens of a stream while memory is measured: streams are open, and little is computed.
const SLOW_PACE: Duration = Duration::from_secs(1);
/// Open files for three streams, and those besides, while memory is measured. A gateway opens two for a stream, but
/// this program accepts connections of clients for at most three eighths of its files.
const FILES_FOR_THREE_STREAMS: usize = 8;
const OTHER_FILES: usize = 400;
/// Share of the prompts whose tokens must come from where the gateway has them. The first ones come before the KV
/// events do.
const MIN_KNOWN: f64 = 0.95;
/// Lines of text, of 1 KiB each, on which the tokenizer is measured, and repetitions, of which the fastest counts.
const TEXT_LINES: u64 = 512;
const TEXT_REPETITIONS: usize = 3;

/// Prompts of a gateway by the source of their tokens.
type Sources = BTreeMap<String, f64>;

/// Addresses of the engines.
pub fn engines() -> Vec<SocketAddr> {
    (ENGINES..ENGINES + ENGINE_COUNT).map(local).collect()
}

fn local(port: u16) -> SocketAddr {
    (Ipv4Addr::LOCALHOST, port).into()
}

/// The engines, and how gateways before them are started.
pub struct Bench<'a> {
    /// The command line.
    pub options: &'a Options,
    /// The program under test.
    pub blockyard: &'a Path,
    /// Folder of logs and configurations.
    pub folder: &'a Path,
    /// Addresses of the engines.
    pub engines: &'a [SocketAddr],
}

impl Bench<'_> {
    /// Starts the engines, and waits until they answer.
    pub async fn start_engines(&self) -> Result<Running> {
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

    /// What the configuration of a gateway depends on.
    pub fn setting(&self, gateway: Gateway) -> Setting<'_> {
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
    pub async fn matrix(
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
    pub fn new_text_us(&self) -> Result<Option<f64>> {
        let path = target_directory()?.join("dist/examples/tokenize");
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
    pub async fn memory(&self, gateway: Gateway, program: &Path) -> Result<Results> {
        let process = self.start(gateway, program).await?;
        let addresses = vec![self.setting(gateway).listen];
        let load = |clients, stream, tokens, until| {
            let (addresses, warmup) = (addresses.clone(), Duration::from_secs(4));
            Load { addresses, clients, stream, tokens, prompt: 128, shared: 64, warmup, until }
        };
        self.set_pace(SLOW_PACE).await?;
        let needed = (self.options.streams * FILES_FOR_THREE_STREAMS).div_ceil(3) + OTHER_FILES;
        let open = match open_files() {
            Some(limit) if limit < needed => {
                eprintln!(
                    "memory {}: {} open streams are left out, because they need {needed} open files and the limit is \
                     {limit}; raise it (ulimit -n {needed}) or set --streams {}",
                    gateway.name(),
                    self.options.streams,
                    limit.saturating_sub(OTHER_FILES) * 3 / FILES_FOR_THREE_STREAMS
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

#[cfg(test)]
mod tests {
    use super::*;

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
