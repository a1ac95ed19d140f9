//! `blockyard replay`: replays a trace through the router with simulated workers. It prints the results to standard
//! output and the progress to standard error.

use crate::config::{self, Config, Flag, HumanDuration, Invalid, Origins, Sources, Workers};
use anyhow::{Context, bail};
use router::replay::{self, AdmissionMode, Options, PolicyUnderTest, Profile, Results, Slo, Trace};
use router::{PlannerMode, Policy, Settings};
use serde::Serialize;
use std::fs::File;
use std::io::{BufRead, BufReader, Write, stdin, stdout};
use std::path::{Path, PathBuf};
use std::time::Instant;
use worker::plane::Role;

/// `blockyard replay`.
#[derive(clap::Args, Debug)]
#[command(
    after_help = "A load factor of 1 is the capacity: the highest rate at which least-loaded keeps its p99 time to \
    first token under ten times that of an idle fleet. It is measured first, and printed. The same trace and options \
    print the same results, byte for byte."
)]
pub struct Replay {
    /// A trace in Mooncake's format (a line of JSON per request: `timestamp`, `input_length`, `output_length`,
    /// `hash_ids`);
    /// - reads standard input
    trace: PathBuf,

    /// Simulated workers: a number of workers that prefill and decode, or the number of each role, like
    /// prefill:4,decode:12
    #[arg(long, value_name = "N", default_value = "16", value_parser = workers)]
    workers: Workers,

    /// Routers that share the requests and exchange their reservations
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    replicas: u32,

    /// Policies: kv, round-robin, least-loaded, random, power-of-two, session, and those of other routers, from their
    /// documentation: dynamo-cost, smg-cache-aware [default: all of these, or the `router.policy` that --config or
    /// --set sets]; or presets: balanced, cache, latency; or `composed`: the table in `router.policy`
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    policy: Vec<String>,

    /// A TOML file of configuration; its [router] section applies to our own policies
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Sets any key of the configuration, like `router.decode_interference_weight=2`; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Flag>,

    /// Request rates, as multiples of the capacity
    #[arg(long, value_name = "X,…", value_delimiter = ',', default_values_t = [0.6, 0.8, 1.0, 1.2])]
    #[arg(value_parser = positive)]
    load_factor: Vec<f64>,

    /// Request rates in requests per second, instead of load factors
    #[arg(long, value_name = "RPS,…", value_delimiter = ',', value_parser = positive, conflicts_with = "load_factor")]
    rate: Vec<f64>,

    /// Runs per policy and rate, each with its own seed; their results are averaged
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    runs: u64,

    /// Speed and cache sizes of a worker: a TOML file like deploy/profiles/h100-8b.toml [default: that one]
    #[arg(long, value_name = "FILE")]
    profile: Option<PathBuf>,

    /// Delay of block events and reports on their way to the router
    #[arg(long, value_name = "TIME", default_value = "5ms")]
    event_delay: HumanDuration,

    /// Share of block events that are lost, from 0 up to, not including, 1
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    event_loss: f64,

    /// Share of the requests, from 0 to 1, after which no event is lost any more
    #[arg(long, value_name = "SHARE", default_value_t = 1.0, value_parser = part)]
    event_loss_until: f64,

    /// Time that a snapshot takes which a router requests after missed events
    #[arg(long, value_name = "TIME", default_value = "50ms")]
    resync_delay: HumanDuration,

    /// `AdmissionMode`: `off`; `queue`: a request waits in the router's admission queue while its worker is overloaded;
    /// `deadline`: also rejects a request whose first token would come later than --slo-ttft
    #[arg(long, value_name = "HOW", default_value = "off", value_parser = admission)]
    admission: AdmissionMode,

    /// Let the planner change workers between prefill and decode, as router.planner.mode=apply does
    #[arg(long)]
    rebalance: bool,

    /// Goodput counts requests whose time to first token is at most this …
    #[arg(long, value_name = "TIME", default_value = "2s")]
    slo_ttft: HumanDuration,

    /// … and whose mean time between tokens is at most this
    #[arg(long, value_name = "TIME", default_value = "100ms")]
    slo_itl: HumanDuration,

    /// Draw goodput over request rate as SVG into this file
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Limit of simulated workers: above any real fleet, and few enough for the memory of one machine.
const WORKERS_MAX: usize = 100_000;
const H100: &str = include_str!("../../deploy/profiles/h100-8b.toml");

/// What `--json` prints.
#[derive(Serialize)]
struct Report<'a> {
    profile: &'a str,
    workers: usize,
    /// Number of workers of each role, unless all have the role `both`.
    #[serde(skip_serializing_if = "Option::is_none")]
    roles: Option<String>,
    #[serde(skip)]
    fleet: String,
    replicas: usize,
    requests: usize,
    recorded_rps: f64,
    hit_rate_bound: f64,
    capacity_rps: Option<f64>,
    event_delay_s: f64,
    event_loss: f64,
    event_loss_until: f64,
    resync_delay_s: f64,
    rebalance: bool,
    /// The `[router]` section of the given configuration.
    #[serde(skip_serializing_if = "Option::is_none")]
    router: Option<&'a Settings>,
    slo_ttft_s: f64,
    slo_itl_s: f64,
    admission: &'static str,
    runs: u64,
    policies: Vec<Results>,
}

/// Runs the command.
pub fn run(args: &Replay) -> anyhow::Result<()> {
    let configured = args.config.is_some() || !args.set.is_empty();
    let (settings, compared) =
        if configured { configured_policies(args)? } else { (Settings::default(), policies_to_compare(args, None)?) };
    let trace = read(args)?;
    let slo = Slo { ttft: args.slo_ttft.0, itl: args.slo_itl.0 };
    let profile = profile("--profile", args.profile.as_deref())?;
    if let Some(path) = &args.svg {
        // Check before the replay that the file can be written. An existing file is kept until the new one is written.
        File::options().append(true).create(true).open(path).with_context(|| format!("--svg {}", path.display()))?;
    }
    let disaggregated = args.workers.roles().any(|role| role != Role::Both);
    let fleet = if disaggregated { args.workers.to_string() } else { args.workers.count().to_string() };
    if args.rebalance && !disaggregated {
        bail!("--rebalance: needs workers of the roles prefill and decode, like --workers prefill:4,decode:12");
    }
    if disaggregated && profile.peer.is_none() {
        bail!("--workers {}: the profile has no table [peer], the speed of KV transfers between workers", args.workers);
    }
    let options = Options {
        profile,
        workers: args.workers.roles().collect(),
        replicas: args.replicas as usize,
        event_delay: args.event_delay.0,
        event_loss: args.event_loss,
        event_loss_until: args.event_loss_until,
        resync_delay: args.resync_delay.0,
        slo,
        admission: args.admission,
        // As the router of `serve` does, if there are workers of both roles.
        rebalance: args.rebalance || (disaggregated && settings.planner.mode == PlannerMode::Apply),
        settings,
    };
    let bound = trace.hit_rate_bound();
    eprintln!(
        "{} requests, {:.2}/s as recorded; an unlimited cache would have a hit rate of {:.1} %",
        trace.len(),
        trace.rate(),
        bound * 100.0
    );

    let mut capacity = None;
    if args.rate.is_empty() {
        let progress = |rate, p99| eprintln!("  {rate:8.2}/s: p99 first token {p99:.3} s");
        let found = replay::capacity(&trace, &options, progress)?;
        eprintln!("capacity of {} workers: {found:.2} requests/s", options.workers.len());
        capacity = Some(found);
    }
    let rates: Vec<(Option<f64>, f64)> = match capacity {
        Some(capacity) => args.load_factor.iter().map(|load| (Some(*load), load * capacity)).collect(),
        None => args.rate.iter().map(|rate| (None, *rate)).collect(),
    };
    let mut policies = Vec::new();
    for (load, rate) in rates {
        for policy in &compared {
            let started = Instant::now();
            let results = Results { load_factor: load, ..replay::replay(&trace, &options, policy, rate, args.runs)? };
            let (took, simulated) = (started.elapsed().as_secs_f64(), results.makespan_s * args.runs as f64);
            eprintln!("  {:<16} {rate:8.2}/s: {simulated:.0} s in {took:.2} s", policy.name());
            policies.push(results);
        }
    }
    if let Some(path) = &args.svg {
        let title = format!(
            "{} × {}: first token within {}, then {} per token",
            fleet, options.profile.name, args.slo_ttft, args.slo_itl
        );
        std::fs::write(path, replay::goodput_svg(&policies, &title))
            .with_context(|| format!("--svg {}", path.display()))?;
    }
    let report = Report {
        profile: &options.profile.name,
        workers: options.workers.len(),
        roles: disaggregated.then(|| fleet.clone()),
        fleet,
        replicas: options.replicas,
        requests: trace.len(),
        recorded_rps: trace.rate(),
        hit_rate_bound: bound,
        capacity_rps: capacity,
        event_delay_s: args.event_delay.as_secs_f64(),
        event_loss: args.event_loss,
        event_loss_until: args.event_loss_until,
        resync_delay_s: args.resync_delay.as_secs_f64(),
        rebalance: options.rebalance,
        router: configured.then_some(&options.settings),
        slo_ttft_s: slo.ttft.as_secs_f64(),
        slo_itl_s: slo.itl.as_secs_f64(),
        admission: args.admission.name(),
        runs: args.runs,
        policies,
    };
    let text = if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { table(&report) };
    stdout().write_all(text.as_bytes()).context("standard output")
}

fn read(args: &Replay) -> anyhow::Result<Trace> {
    Trace::read(open(&args.trace)?).with_context(|| args.trace.display().to_string())
}

/// A file of lines; `-` is standard input.
pub(crate) fn open(path: &Path) -> anyhow::Result<Box<dyn BufRead>> {
    if path.as_os_str() == "-" {
        return Ok(Box::new(stdin().lock()));
    }
    let file = File::open(path).with_context(|| path.display().to_string())?;
    Ok(Box::new(BufReader::new(file)))
}

/// The profile that a flag names, or the built-in one.
pub(crate) fn profile(flag: &str, path: Option<&Path>) -> anyhow::Result<Profile> {
    let (name, text) = match path {
        None => ("the built-in profile".to_owned(), H100.to_owned()),
        Some(path) => {
            let name = format!("{flag} {}", path.display());
            let text = std::fs::read_to_string(path).with_context(|| name.clone())?;
            (name, text)
        }
    };
    let profile: Profile = toml::from_str(&text).with_context(|| name.clone())?;
    if let Err(wrong) = profile.check() {
        bail!("{name}: {wrong}");
    }
    Ok(profile)
}

fn table(report: &Report<'_>) -> String {
    let Report { fleet, profile, requests, hit_rate_bound: bound, .. } = report;
    let capacity = report.capacity_rps.map_or(String::new(), |capacity| format!(", capacity {capacity:.2} requests/s"));
    let mut lines = vec![
        format!("{fleet} × {profile}, {requests} requests, hit rate at most {:.1} %{capacity}\n", bound * 100.0),
        " load   req/s policy             hit   TTFT mean     p50     p90     p99   ITL p50   p90   p99  goodput  \
         \x20 SLO  imbal"
            .to_owned(),
    ];
    if report.roles.is_some() {
        lines[1] += "  remote";
    }
    if report.policies.iter().any(|results| results.role_changes.is_some()) {
        lines[1] += " roles";
    }
    lines.extend(report.policies.iter().map(row));
    let rejected = report.policies.iter().map(|f| f.rejected).max().filter(|rejected| *rejected > 0);
    let why = if report.admission == "off" {
        "did not fit on any worker"
    } else {
        "at most were rejected, or did not fit on any worker"
    };
    lines.extend(rejected.map(|rejected| format!("\n{rejected} requests {why}; times are those of the others.")));
    lines.join("\n") + "\n"
}

fn row(f: &Results) -> String {
    let load = f.load_factor.map_or(String::new(), |load| format!("{load:.2}"));
    let ttft = format!("{:8.3} s {:7.3} {:7.3} {:7.3}", f.ttft_mean_s, f.ttft_p50_s, f.ttft_p90_s, f.ttft_p99_s);
    let itl = format!("{:6.1} ms {:5.1} {:5.1}", f.itl_p50_s * 1e3, f.itl_p90_s * 1e3, f.itl_p99_s * 1e3);
    let good = format!("{:6.2}/s {:4.0} %", f.goodput_rps, f.slo_attainment * 100.0);
    let hit = f.hit_rate * 100.0;
    let share = |remote: u64| format!(" {:5.1} %", remote as f64 * 100.0 / f.completed.max(1) as f64);
    let changes = |changes: u64| format!(" {changes:5}");
    let disaggregated =
        f.remote_prefills.map(share).unwrap_or_default() + &f.role_changes.map(changes).unwrap_or_default();
    format!(
        "{load:>5} {:7.2} {:<16} {hit:4.1} % {ttft} {itl} {good} {:6.2}{disaggregated}",
        f.rate_rps, f.policy, f.imbalance
    )
}

/// The router settings of the given configuration, and the policies to compare: those of `--policy`, else the one that
/// the configuration sets, else all.
fn configured_policies(args: &Replay) -> anyhow::Result<(Settings, Vec<PolicyUnderTest>)> {
    let (config, origins) = load(args, None)?;
    let settings = config.router;
    let named = |origin: &str| origin != "default" && !origin.starts_with("preset ");
    let chosen = matches!(settings.policy, Policy::Composed(_)) || named(origins.of("router.policy"));
    let compared = if args.policy.is_empty() && chosen {
        vec![PolicyUnderTest::Settings(settings.policy.name(), Box::new(settings.clone()))]
    } else {
        policies_to_compare(args, Some(&settings))?
    };
    Ok((settings, compared))
}

/// The policies of `--policy`, without repetitions; all policies if the flag is absent. `configured` holds the settings
/// of the given configuration.
fn policies_to_compare(args: &Replay, configured: Option<&Settings>) -> anyhow::Result<Vec<PolicyUnderTest>> {
    let mut known = PolicyUnderTest::all();
    if args.policy.is_empty() {
        return Ok(known);
    }
    known.extend(PolicyUnderTest::presets());
    let names = known.iter().map(PolicyUnderTest::name).collect::<Vec<_>>().join(", ");
    let of = |name: &String| match (known.iter().find(|each| each.name() == name), configured) {
        (Some(PolicyUnderTest::Settings(preset, _)), Some(_)) => {
            // Keys that are set override the preset. The policy is always `kv`, since presets tune it.
            let settings = load(args, Some(preset))?.0.router.choosing(&Policy::Kv);
            Ok(PolicyUnderTest::Settings(preset, Box::new(settings)))
        }
        (Some(policy), _) => Ok(policy.clone()),
        (None, Some(Settings { policy: composed @ Policy::Composed(_), .. })) if name == "composed" => {
            Ok(PolicyUnderTest::Policy(composed.clone()))
        }
        (None, _) if name == "composed" => {
            let is = configured.map_or("kv", |settings| settings.policy.name());
            bail!("--policy composed: router.policy is {is}, not a table of filter, score and pick")
        }
        (None, _) => bail!("--policy {name}: expected one of {names}, composed"),
    };
    let first = |(at, name): &(usize, &String)| !args.policy[..*at].contains(name);
    args.policy.iter().enumerate().filter(first).map(|(_, name)| of(name)).collect()
}

/// The configuration that `serve` would have with this preset.
fn load(args: &Replay, preset: Option<&str>) -> Result<(Config, Origins), config::Errors> {
    let preset = preset.map(|preset| Flag::own(&format!("--policy {preset}"), "router.preset", preset));
    Config::load(&Sources::of_process(args.config.clone(), args.set.iter().cloned().chain(preset).collect()))
}

/// Parses a number of workers with the role `both`, or a number of workers of each role.
fn workers(text: &str) -> Result<Workers, Invalid> {
    let all = text.parse::<usize>().map(|count| format!("both:{count}"));
    Workers::of(all.as_deref().unwrap_or(text), WORKERS_MAX)
}

fn admission(name: &str) -> Result<AdmissionMode, String> {
    let all = [AdmissionMode::Off, AdmissionMode::Queue, AdmissionMode::Deadline];
    all.into_iter().find(|each| each.name() == name).ok_or_else(|| "expected off, queue or deadline".into())
}

fn positive(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x: &f64| x.is_finite() && *x > 0.0).ok_or_else(|| "expected a number above 0".into())
}

fn share(text: &str) -> Result<f64, String> {
    text.parse()
        .ok()
        .filter(|x| (0.0..1.0).contains(x))
        .ok_or_else(|| "expected a number from 0 up to, not including, 1".into())
}

fn part(text: &str) -> Result<f64, String> {
    text.parse().ok().filter(|x| (0.0..=1.0).contains(x)).ok_or_else(|| "expected a number from 0 to 1".into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_built_in_profile_is_sound() {
        toml::from_str::<Profile>(H100).unwrap().check().unwrap();
    }

    #[test]
    fn workers_are_a_number_or_numbers_by_role() {
        let read = |text| workers(text).map(|workers| workers.to_string()).map_err(|wrong| wrong.to_string());
        assert_eq!(read("16"), Ok("both:16".into()));
        assert_eq!(read("decode:12,prefill:4"), Ok("prefill:4,decode:12".into()));
        for wrong in ["0", "prefill:2", "-1", "100001", "prefill"] {
            assert!(read(wrong).is_err(), "{wrong}");
        }
    }
}
