//! `blockyard replay`: replays a trace through the router with simulated workers. It prints the results to standard
//! output and the progress to standard error.

mod policies;
mod table;

use self::policies::{Prefetch, configured_policies, policies_to_compare};
use self::table::{Report, table};
use crate::commands::cli::at_least_one;
use crate::commands::output::{self, count};
use crate::config::{Flag, HumanDuration, Invalid, Workers};
use crate::process::machine;
use anyhow::{Context, bail};
use router::replay::{
    self, AdmissionMode, Options, PolicyUnderTest, Profile, QueueOrder, Results, Runs, Slo, Trace, Traffic, Workload,
};
use router::{PlannerMode, Settings};
use std::fs::File;
use std::io::{BufRead, BufReader, BufWriter, ErrorKind, Write, stdin, stdout};
use std::num::NonZero;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Instant;
use worker::plane::Role;

/// `blockyard replay`.
#[derive(clap::Args, Debug)]
#[command(
    group(clap::ArgGroup::new("traffic").required(true).args(["trace", "workload"])),
    after_help = "A load factor of 1 is the capacity: the highest rate at which least-loaded keeps its p99 time to \
    first token and its median time between tokens under ten times those of an idle fleet. It is measured first, and \
    printed. The same trace or workload and options print the same results, byte for byte."
)]
pub struct Replay {
    /// A trace: a line of JSON per request, as `router.trace_file` writes it, or in Mooncake's format (`timestamp` in
    /// milliseconds, `input_length` and `output_length` in tokens, `hash_ids`). `-` reads standard input
    trace: Option<PathBuf>,

    /// Generated requests instead of a trace: agents, no-reuse, hot-prefix:LENGTH (like hot-prefix:32k),
    /// shifting-prefixes, decode-heavy, documents, chat or prefix-bursts
    #[arg(long, value_name = "CLASS")]
    workload: Option<Workload>,

    /// Number of generated requests [default: 500 per worker, at most 30,000]
    // Both: clap does not require what conflicts with another argument that is present.
    #[arg(long, value_name = "N", requires = "workload", conflicts_with = "trace")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    requests: Option<u32>,

    /// Write the generated requests as a trace into this file, at the one rate of --rate, and end. `-` writes standard
    /// output
    #[arg(long, value_name = "FILE", requires = "workload", requires = "rate", conflicts_with = "trace")]
    write_trace: Option<PathBuf>,

    /// Simulated workers: a number of workers that prefill and decode, or the number of each role, like
    /// prefill:4,decode:12
    #[arg(long, value_name = "N", default_value = "16", value_parser = workers)]
    workers: Workers,

    /// Routers that share the requests and exchange their reservations
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=128))]
    replicas: u32,

    /// Policies: kv, round-robin, least-loaded, random, power-of-two, session, and those of other routers, from their
    /// documentation: dynamo-cost, vllm-router, smg, llm-d, lmetric, loadaware, bounded-hash; or `composed`: the table
    /// in `router.policy` [default: all but `composed`, or the `router.policy` that --config or --set sets]
    #[arg(long, value_name = "NAME,…", value_delimiter = ',')]
    policy: Vec<String>,

    /// TOML file with the configuration; its [router] section applies to our own policies [default: none]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Set any key of the configuration, like `router.decode_interference_weight=2`; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Flag>,

    /// Request rates, as multiples of the measured capacity (see below)
    #[arg(long, value_name = "X,…", value_delimiter = ',', default_values_t = [0.6, 0.8, 1.0, 1.2])]
    #[arg(value_parser = load_factor)]
    load_factor: Vec<f64>,

    /// Request rates in requests per second, instead of load factors
    #[arg(long, value_name = "RPS,…", value_delimiter = ',', value_parser = rate, conflicts_with = "load_factor")]
    rate: Vec<f64>,

    /// Runs per policy and rate, each with its own seed; their results are averaged
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000))]
    runs: u64,

    /// Seed of the first run; each further run has the next one
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u32,

    /// Runs at the same time [default: the number of processors]
    #[arg(long, value_name = "N", value_parser = at_least_one::<NonZero<usize>>)]
    threads: Option<NonZero<usize>>,

    /// Also search for the best assignment of requests to workers, knowing all arrivals and output lengths. Takes a
    /// hundred times as long as the other runs
    #[arg(long)]
    clairvoyant: bool,

    /// Speed and cache sizes of a worker: a TOML file, as `blockyard calibrate` prints it [default: the built-in
    /// h100-8b, a model of 8 billion parameters on an H100]
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

    /// Time until a router that has missed events gets the snapshot that it requests
    #[arg(long, value_name = "TIME", default_value = "50ms")]
    resync_delay: HumanDuration,

    /// How requests are admitted: `off`: each goes to its worker at once; `queue`: a request waits in the router's
    /// admission queue while its worker is overloaded; `deadline`: also rejects a request whose first token would come
    /// later than --slo-ttft
    #[arg(long, value_name = "HOW", default_value = "off", value_parser = admission)]
    admission: AdmissionMode,

    /// Order of the queue of each worker: `fcfs`, first come, first served; `k-lpm:K`, of each K requests one is the
    /// oldest and the others have the longest cached prefix
    #[arg(long, value_name = "ORDER", default_value = "fcfs", value_parser = queue_order)]
    queue_order: QueueOrder,

    /// Whether idle workers copy shared prefixes into their host memory ahead of demand, as router.prefetch says: `on`,
    /// `off`, or `both`, each of our own policies with and without. Needs a profile with a table `[host]` [default:
    /// router.prefetch]
    #[arg(long, value_name = "WHICH", value_parser = prefetch)]
    prefetch: Option<Prefetch>,

    /// Let the planner change workers between prefill and decode, as router.planner.mode=apply does
    #[arg(long)]
    rebalance: bool,

    /// Goodput counts requests with at most this time to first token
    #[arg(long, value_name = "TIME", default_value = "2s")]
    slo_ttft: HumanDuration,

    /// Goodput counts requests with at most this mean time between tokens
    #[arg(long, value_name = "TIME", default_value = "100ms")]
    slo_itl: HumanDuration,

    /// Write an HTML page into this file: times and goodput over request rate, as charts and as a table
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

/// Limit of simulated workers: above any real fleet, and few enough for the memory of one machine.
const WORKERS_MAX: usize = 100_000;
const H100: &str = include_str!("../../deploy/profiles/h100-8b.toml");

impl Replay {
    /// Whether some workers have the role prefill or decode.
    fn is_disaggregated(&self) -> bool {
        self.workers.roles().any(|role| role != Role::Both)
    }
}

/// Runs the command.
pub fn run(args: &Replay) -> anyhow::Result<()> {
    machine::check_address_space()?;
    let configured = args.config.is_some() || !args.set.is_empty();
    let (mut settings, mut compared) =
        if configured { configured_policies(args)? } else { (Settings::default(), policies_to_compare(args, None)?) };
    if let Some(prefetch) = args.prefetch {
        settings.prefetch = prefetch != Prefetch::Off;
        compared = prefetch.apply(&settings, compared);
    }
    if let Some(path) = &args.write_trace {
        return write_trace(args, path);
    }
    let traffic = traffic(args)?;
    let options = options(args, settings)?;
    if let Some(path) = &args.html {
        // Check before the replay that the file can be written. An existing file is kept until the new one is written.
        File::options().append(true).create(true).open(path).with_context(|| format!("--html {}", path.display()))?;
    }
    if let Some(rate) = traffic.recorded_rate() {
        output::note(format_args!("{rate:.2} requests/s as recorded"));
    }
    let capacity = args.rate.is_empty().then(|| measured_capacity(&traffic, &options)).transpose()?;
    let rates: Vec<f64> = match capacity {
        Some(capacity) => args.load_factor.iter().map(|load| load * capacity).collect(),
        None => args.rate.clone(),
    };
    let (requests, bound) = describe(&traffic, &rates, args.seed.into());
    let mut policies = run_all(args, &traffic, &options, &rates, &compared)?;
    if capacity.is_some() {
        let of_rate = policies.len() / rates.len();
        for (results, load) in policies.chunks_mut(of_rate).zip(&args.load_factor) {
            for result in results {
                result.load_factor = Some(*load);
            }
        }
    }
    let disaggregated = args.is_disaggregated();
    let fleet = if disaggregated { args.workers.to_string() } else { args.workers.count().to_string() };
    if let Some(path) = &args.html {
        let title = format!(
            "{} × {}: first token within {}, then {} per token",
            fleet, options.profile.name, args.slo_ttft, args.slo_itl
        );
        std::fs::write(path, replay::html_report(&policies, &title))
            .with_context(|| format!("--html {}", path.display()))?;
    }
    let report = Report {
        profile: &options.profile.name,
        workers: options.workers.len(),
        roles: disaggregated.then(|| fleet.clone()),
        fleet,
        replicas: options.replicas,
        workload: args.workload.map(|workload| workload.to_string()),
        requests,
        recorded_rps: traffic.recorded_rate(),
        hit_rate_bound: bound,
        capacity_rps: capacity,
        event_delay_s: args.event_delay.as_secs_f64(),
        event_loss: args.event_loss,
        event_loss_until: args.event_loss_until,
        resync_delay_s: args.resync_delay.as_secs_f64(),
        rebalance: options.rebalance,
        prefetch: args.prefetch.map(Prefetch::name),
        router: configured.then_some(&options.settings),
        slo_ttft_s: options.slo.ttft.as_secs_f64(),
        slo_itl_s: options.slo.itl.as_secs_f64(),
        admission: args.admission.name(),
        runs: args.runs,
        seed: args.seed,
        policies,
    };
    let text = if args.json { serde_json::to_string_pretty(&report)? + "\n" } else { table(&report) };
    output::print(&text)
}

/// The simulated fleet and its router. An error names the option that is wrong.
fn options(args: &Replay, settings: Settings) -> anyhow::Result<Options> {
    let profile = profile("--profile", args.profile.as_deref())?;
    let disaggregated = args.is_disaggregated();
    if args.rebalance && !disaggregated {
        bail!("--rebalance: needs workers of the roles prefill and decode, like --workers prefill:4,decode:12");
    }
    if disaggregated && profile.peer.is_none() {
        bail!("--workers {}: the profile has no table [peer], the speed of KV transfers between workers", args.workers);
    }
    if let Some(prefetch) = args.prefetch.filter(|prefetch| *prefetch != Prefetch::Off && profile.host.is_none()) {
        bail!(
            "--prefetch {}: the profile has no table [host], the host memory into which workers copy prefixes; add one \
             to the file of --profile",
            prefetch.name()
        );
    }
    if args.clairvoyant && (disaggregated || profile.shared.is_some() || args.admission != AdmissionMode::Off) {
        bail!("--clairvoyant: needs workers of the role both, no [shared] in the profile, and no --admission");
    }
    Ok(Options {
        profile,
        workers: args.workers.roles().collect(),
        replicas: args.replicas as usize,
        event_delay: args.event_delay.0,
        event_loss: args.event_loss,
        event_loss_until: args.event_loss_until,
        resync_delay: args.resync_delay.0,
        slo: Slo { ttft: args.slo_ttft.0, itl: args.slo_itl.0 },
        admission: args.admission,
        queue_order: args.queue_order,
        // As the router of `serve` does, if there are workers of both roles.
        rebalance: args.rebalance || (disaggregated && settings.planner.mode == PlannerMode::Apply),
        settings,
    })
}

/// Measures the capacity of the fleet and prints the progress.
fn measured_capacity(traffic: &Traffic, options: &Options) -> anyhow::Result<f64> {
    let progress = |rate, replay::Service { ttft_p99_s: p99, itl_p50_s }| {
        if p99.is_finite() {
            output::note(format_args!(
                "  {rate:8.2}/s: p99 first token {p99:.3} s, p50 between tokens {:.1} ms",
                itl_p50_s * 1e3
            ));
        } else {
            output::note(format_args!("  {rate:8.2}/s: more than 1 % of the requests were rejected"));
        }
    };
    let found = replay::capacity(traffic, options, progress)?;
    output::note(format_args!("capacity of {}: {found:.2} requests/s", count(options.workers.len() as u64, "worker")));
    Ok(found)
}

fn traffic(args: &Replay) -> anyhow::Result<Traffic> {
    match (&args.trace, args.workload) {
        (_, Some(workload)) => {
            let default = Workload::default_requests(args.workers.count());
            Ok(Traffic::Generated { workload, requests: args.requests.map_or(default, |requests| requests as usize) })
        }
        (Some(path), None) => {
            Ok(Traffic::Recorded(Trace::read(open(path)?).with_context(|| path.display().to_string())?))
        }
        (None, None) => bail!("expected a trace, or generated requests: --workload CLASS"),
    }
}

/// Number of requests, and the hit rate of an unlimited cache: the highest of all rates, because fewer conversations
/// fit into a shorter time.
fn describe(traffic: &Traffic, rates: &[f64], seed: u64) -> (usize, f64) {
    let of = |rate: &f64| {
        let trace = traffic.at(*rate, seed);
        (trace.len(), trace.hit_rate_bound())
    };
    rates.iter().map(of).fold((0, 0.0), |(_, most), (requests, bound)| (requests, bound.max(most)))
}

fn write_trace(args: &Replay, path: &Path) -> anyhow::Result<()> {
    let [rate] = args.rate[..] else { bail!("--write-trace: needs one --rate, that of the generated requests") };
    let traffic = traffic(args)?;
    let named = || format!("--write-trace {}", path.display());
    let to: Box<dyn Write> = if path.as_os_str() == "-" {
        Box::new(stdout().lock())
    } else {
        Box::new(File::create(path).with_context(named)?)
    };
    let written = traffic.at(rate, args.seed.into()).write(BufWriter::new(to));
    match written {
        // A reader that closed its end, as `head` does, has read what it wanted.
        Err(error) if path.as_os_str() == "-" && error.kind() == ErrorKind::BrokenPipe => Ok(()),
        written => written.with_context(named),
    }
}

/// Runs each policy at each rate: the results by rate, then by policy.
fn run_all(
    args: &Replay,
    traffic: &Traffic,
    options: &Options,
    rates: &[f64],
    policies: &[PolicyUnderTest],
) -> anyhow::Result<Vec<Results>> {
    let threads = args.threads.unwrap_or_else(|| thread::available_parallelism().unwrap_or(NonZero::<usize>::MIN));
    // Fewer take longer, and have the same results.
    let threads = threads.min(machine::threads_within_addresses());
    let seeds = u64::from(args.seed)..u64::from(args.seed) + args.runs;
    let runs = Runs { traffic, options, policies, rates, seeds, threads, clairvoyant: args.clairvoyant };
    let started = Instant::now();
    let results = runs.replay(|Results { policy, rate_rps, ttft_mean_s, .. }| {
        if ttft_mean_s.is_nan() {
            output::note(format_args!("  {policy:<16} {rate_rps:8.2}/s: no request was served to its last token"));
        } else {
            output::note(format_args!("  {policy:<16} {rate_rps:8.2}/s: mean first token {ttft_mean_s:.3} s"));
        }
    })?;
    let simulated: f64 = results.iter().map(|results| results.makespan_s * args.runs as f64).sum();
    let (runs, took) = (results.len() as u64 * args.runs, started.elapsed().as_secs_f64());
    let (runs, threads) = (count(runs, "run"), count(threads.get() as u64, "thread"));
    output::note(format_args!("{runs}: {simulated:.0} s simulated in {took:.2} s on {threads}"));
    Ok(results)
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

/// Parses a number of workers with the role `both`, or a number of workers of each role.
fn workers(text: &str) -> Result<Workers, Invalid> {
    let all = text.parse::<usize>().map(|count| format!("both:{count}"));
    Workers::of(all.as_deref().unwrap_or(text), WORKERS_MAX)
}

fn admission(name: &str) -> Result<AdmissionMode, String> {
    let all = [AdmissionMode::Off, AdmissionMode::Queue, AdmissionMode::Deadline];
    all.into_iter().find(|each| each.name() == name).ok_or_else(|| "expected off, queue or deadline".into())
}

fn prefetch(name: &str) -> Result<Prefetch, String> {
    let all = [Prefetch::On, Prefetch::Off, Prefetch::Both];
    all.into_iter().find(|each| each.name() == name).ok_or_else(|| "expected on, off or both".into())
}

fn queue_order(text: &str) -> Result<QueueOrder, String> {
    let k = text.strip_prefix("k-lpm:").and_then(|k| k.parse().ok()).map(QueueOrder::KLpm);
    let order = if text == "fcfs" { Some(QueueOrder::Fcfs) } else { k };
    order.ok_or_else(|| "expected fcfs, or k-lpm:K with a number K of at least 1".into())
}

/// A rate of requests. A workload is generated from sessions that began minutes before: at a much higher rate these
/// alone are more than can be generated, and at a much lower one the simulated time is years.
fn rate(text: &str) -> Result<f64, String> {
    within(text, 0.001..=100_000.0)
}

fn load_factor(text: &str) -> Result<f64, String> {
    within(text, 0.001..=1000.0)
}

fn within(text: &str, range: RangeInclusive<f64>) -> Result<f64, String> {
    let number = text.parse().ok().filter(|number| range.contains(number));
    number.ok_or_else(|| format!("expected a number between {} and {}", range.start(), range.end()))
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
    fn the_built_in_profile_is_valid() {
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
