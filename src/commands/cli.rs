//! The command line. `serve` has about ten flags; every other setting is a key of the configuration, set with `--set`.

mod hints;

use self::hints::with_hints;
use crate::commands::bench::Bench;
use crate::commands::cache::Cache;
use crate::commands::calibrate::Calibrate;
use crate::commands::doctor::Doctor;
use crate::commands::key::Key;
use crate::commands::replay::Replay;
use crate::config::{Flag, Purpose, Sources};
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;
use std::str::FromStr;

/// An OpenAI-compatible gateway that routes by KV-cache locality, with a KV block manager and a native CPU engine.
#[derive(Parser, Debug)]
#[command(name = "blockyard", version, propagate_version = true, disable_help_subcommand = true)]
pub struct Cli {
    /// The command to run.
    #[command(subcommand)]
    pub command: Command,
}

impl Cli {
    /// Parses the command line of the process. Exits with an error message if it is invalid.
    pub fn of_process() -> Self {
        let words: Vec<String> = std::env::args_os().map(|word| word.to_string_lossy().into_owned()).collect();
        Self::try_parse().unwrap_or_else(|error| with_hints(error, &words).exit())
    }
}

/// The commands.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run the OpenAI API, the router and the workers in one process, or the gateway of other servers.
    ///
    /// With --upstream it is the gateway of these servers, and loads no model. Else it serves a model itself. Without
    /// --model that is `small`, a built-in model with made-up weights: it computes real attention, and its text is
    /// meaningless. Ctrl-C stops it after running requests have finished, at most `shutdown_timeout` (25 s) later. A
    /// second Ctrl-C stops it at once. The exit status is 0 in both cases.
    Serve(Serve),

    /// Run a frontend and a router for workers in other processes, which are found over NATS, and for upstreams.
    ///
    /// It starts without workers, and serves requests once there are some. Several frontends may run; each routes to
    /// all workers, and to the upstreams that its own configuration names.
    Frontend(Frontend),

    /// Run workers for frontends in other processes: a model, the engine and its tiers.
    ///
    /// It registers its workers over NATS and takes requests of frontends over HTTP/2. SIGTERM deregisters them first.
    /// Then running requests finish and blocks are written, within `shutdown_timeout` (25 s).
    Worker(Worker),

    /// Check what `serve` with the same flags depends on: configuration, servers, KV events, tiers.
    ///
    /// Each check is ok, a warning or a problem; a problem comes with what to change. The exit status is 1 if there is
    /// a problem. The checks of a server end with three short completions, which show whether its KV events arrive and
    /// what it caches. All checks together take at most about 30 s.
    Doctor(Box<Doctor>),

    /// Replay a trace through the router with simulated workers, and compare routing policies. Runs no model.
    Replay(Box<Replay>),

    /// Estimate the speed of workers from a trace of served requests, and print it as a profile for `replay`.
    Calibrate(Calibrate),

    /// Measure the storage tiers of this machine.
    Bench(Bench),

    /// Add, list and remove API keys of clients.
    Key(Key),

    /// Inspect and maintain stored blocks, also while other processes serve from them.
    Cache(Cache),
}

/// What the help of commands that serve says of the configuration.
const PRECEDENCE: &str = "Every key of the configuration can also be set in the environment: \
    BLOCKYARD_ROUTER__POLICY=round-robin is --set router.policy=round-robin.\n\
    Precedence: defaults < --config FILE < environment < flags. --print-config shows all keys and their origins.";

/// Examples of `serve`, before [`PRECEDENCE`].
const SERVE_EXAMPLES: &str = "Examples:\n  \
    blockyard serve --model /srv/models/llama-3.1-8b --g4 s3://kv-blocks/prod\n  \
    blockyard serve --upstream http://10.0.0.1:8000 --upstream http://10.0.0.2:8000 --listen 0.0.0.0:8000\n\n";

/// `blockyard serve`.
#[derive(Args, Debug, Default)]
#[command(args_override_self = true, after_help = format!("{SERVE_EXAMPLES}{PRECEDENCE}"))]
pub struct Serve {
    #[command(flatten)]
    configured: Configured,

    #[command(flatten)]
    printed: Printed,
}

/// What a command that serves prints on standard output.
#[derive(Args, Clone, Copy, Debug, Default)]
pub struct Printed {
    /// Print the configuration with the origin of each value, and exit
    #[arg(long)]
    pub print_config: bool,

    /// Print JSON: the banner at the start, or with --print-config the configuration
    #[arg(long)]
    pub json: bool,
}

/// `blockyard frontend`.
#[derive(Args, Debug, Default)]
#[command(args_override_self = true, after_help = PRECEDENCE)]
pub struct Frontend {
    /// Address and port of the API, like 0.0.0.0:8000, or a port for this machine only; with port 0 the system chooses
    /// one [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<String>,

    /// URL of an OpenAI-compatible server (vLLM, SGLang, …) to route to beside the workers: like
    /// `http://10.0.0.1:8000`, without /v1; may be repeated. Name the same URLs in all frontends
    #[arg(long, value_name = "URL")]
    upstream: Vec<String>,

    #[command(flatten)]
    cluster: ClusterFlags,

    #[command(flatten)]
    any: AnyKey,

    #[command(flatten)]
    printed: Printed,
}

/// `blockyard worker`.
#[derive(Args, Debug, Default)]
#[command(args_override_self = true, after_help = PRECEDENCE)]
pub struct Worker {
    /// A Hugging Face folder (config.json, *.safetensors, tokenizer.json), or a built-in model: tiny, small or bench
    /// [default: small]
    #[arg(long, value_name = "DIR|NAME")]
    model: Option<String>,

    /// Folder of built-in models and of the SSD tier; each process needs its own
    /// [default: blockyard in `$XDG_CACHE_HOME`, else in `~/.cache`]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,

    /// Store that several nodes share: `s3://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `gs://BUCKET/PREFIX`, or a
    /// folder. Nodes load blocks that others computed [default: none]
    #[arg(long, value_name = "URL|DIR")]
    g4: Option<String>,

    /// Workers in this process: ROLE:NUMBER, like prefill:1 or decode:2, separated by commas; both:N for N workers that
    /// prefill and decode [default: both:1]
    #[arg(long, value_name = "SPEC")]
    workers: Option<String>,

    /// One worker with this role; --role prefill is --workers prefill:1
    #[arg(long, value_name = "ROLE", value_parser = ["prefill", "decode", "both"], conflicts_with = "workers")]
    role: Option<String>,

    /// Address and port for frontends, like 0.0.0.0:8100, or a port for this machine only; with port 0 the system
    /// chooses one [default: 127.0.0.1:8100]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<String>,

    /// URL at which frontends reach this process, like `http://10.0.0.7:8100` (`https://…` with TLS), the same after a
    /// restart [default: the address of --listen]
    #[arg(long, value_name = "URL")]
    advertise: Option<String>,

    #[command(flatten)]
    cluster: ClusterFlags,

    #[command(flatten)]
    any: AnyKey,

    #[command(flatten)]
    printed: Printed,
}

/// The flags of frontends and workers in separate processes.
#[derive(Args, Debug, Default)]
struct ClusterFlags {
    /// URL of a NATS server, `nats://HOST:PORT`, or `tls://HOST:PORT` with TLS; may be repeated for the servers of a
    /// cluster [default: `nats://127.0.0.1:4222`]
    #[arg(long, value_name = "URL")]
    nats: Vec<String>,

    /// File with the secret that frontends and workers share, the same in all processes; `openssl rand -hex 32` makes
    /// one [default: none, workers take requests of every process that reaches them]
    #[arg(long, value_name = "FILE")]
    secret_file: Option<String>,
}

/// The flags with which any key can be set.
#[derive(Args, Debug, Default)]
struct AnyKey {
    /// Log filter, like `debug` or `info,kvbm=debug`; `kvbm=debug` logs this part only [default: info]
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,

    /// TOML file with the configuration; flags override its keys [default: none]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Set any other key of the configuration, like router.policy=round-robin; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Flag>,
}

/// The flags that set keys of the configuration.
#[derive(Args, Debug, Default)]
pub struct Configured {
    /// A Hugging Face folder (config.json, *.safetensors, tokenizer.json), or a built-in model: tiny, small or bench
    /// [default: small]
    #[arg(long, value_name = "DIR|NAME")]
    model: Option<String>,

    /// URL of an OpenAI-compatible server (vLLM, SGLang, …) to route to, instead of serving a model: like
    /// `http://10.0.0.1:8000`, without /v1; may be repeated
    #[arg(long, value_name = "URL")]
    upstream: Vec<String>,

    /// Folder of built-in models and of the SSD tier; each process needs its own
    /// [default: blockyard in `$XDG_CACHE_HOME`, else in `~/.cache`]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,

    /// Store that several nodes share: `s3://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `gs://BUCKET/PREFIX`, or a
    /// folder. Nodes load blocks that others computed [default: none]
    #[arg(long, value_name = "URL|DIR")]
    g4: Option<String>,

    /// Address and port of the API, like 0.0.0.0:8000, or a port for this machine only; with port 0 the system chooses
    /// one [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<String>,

    /// Workers in this process: ROLE:NUMBER, separated by commas; both:N for N workers that prefill and decode
    /// [default: prefill:1,decode:2]
    #[arg(long, value_name = "SPEC")]
    workers: Option<String>,

    #[command(flatten)]
    any: AnyKey,
}

/// A command that serves: what it runs, its configuration, and what it prints.
pub struct Serving {
    /// The command.
    pub purpose: Purpose,
    /// The sources of its configuration.
    pub sources: Sources,
    /// What it prints.
    pub printed: Printed,
}

impl Serve {
    /// What the command runs.
    pub fn serving(&self) -> Serving {
        Serving { purpose: Purpose::Serve, sources: self.configured.sources(), printed: self.printed }
    }
}

impl Frontend {
    /// What the command runs.
    pub fn serving(&self) -> Serving {
        let flags = [("--listen", "listen", &self.listen)];
        let more = self.cluster.flags().chain(upstreams(&self.upstream));
        let sources = self.any.sources(&flags, more);
        Serving { purpose: Purpose::Frontend, sources, printed: self.printed }
    }
}

impl Worker {
    /// What the command runs.
    pub fn serving(&self) -> Serving {
        let of_role = self.role.as_ref().map(|role| format!("{role}:1"));
        let flags = [
            ("--model", "model", &self.model),
            ("--data-dir", "data_dir", &self.data_dir),
            ("--g4", "tiers.g4.url", &self.g4),
            ("--workers", "workers", &self.workers),
            ("--role", "workers", &of_role),
            ("--listen", "cluster.listen", &self.listen),
            ("--advertise", "cluster.advertise", &self.advertise),
        ];
        let sources = self.any.sources(&flags, self.cluster.flags());
        Serving { purpose: Purpose::Worker, sources, printed: self.printed }
    }
}

impl ClusterFlags {
    fn flags(&self) -> impl Iterator<Item = Flag> + use<> {
        let nats = (!self.nats.is_empty()).then(|| Flag::list("--nats", "nats.servers", &self.nats));
        let secret = self.secret_file.as_ref().map(|file| Flag::own("--secret-file", "cluster.secret_file", file));
        nats.into_iter().chain(secret)
    }
}

impl AnyKey {
    /// The sources of the configuration. A key is set by a flag such as `--listen`, or by `--set`, but not by both.
    fn sources(&self, flags: &[(&str, &str, &Option<String>)], more: impl IntoIterator<Item = Flag>) -> Sources {
        let log = [("--log", "log.filter", &self.log)];
        let flags = flags.iter().chain(&log);
        let flags = flags.filter_map(|(name, key, value)| Some(Flag::own(name, key, value.as_deref()?)));
        Sources::of_process(self.config.clone(), self.set.iter().cloned().chain(flags).chain(more).collect())
    }
}

impl Configured {
    /// The sources of the configuration.
    pub fn sources(&self) -> Sources {
        let flags = [
            ("--model", "model", &self.model),
            ("--data-dir", "data_dir", &self.data_dir),
            ("--g4", "tiers.g4.url", &self.g4),
            ("--listen", "listen", &self.listen),
            ("--workers", "workers", &self.workers),
        ];
        self.any.sources(&flags, upstreams(&self.upstream))
    }
}

/// The flag for the servers of a gateway or a frontend, if there are any.
fn upstreams(urls: &[String]) -> Option<Flag> {
    (!urls.is_empty()).then(|| Flag::list("--upstream", "upstreams", urls))
}

/// A whole number that is not 0, of a type like `NonZero<u32>`. What clap says of them has the names of Rust's types.
pub(super) fn at_least_one<T: FromStr>(text: &str) -> Result<T, &'static str> {
    text.parse().map_err(|_| "expected a whole number, 1 or more")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_consistent() {
        Cli::command().debug_assert();
    }

    /// The error of a command line.
    pub(super) fn refused(line: &str) -> String {
        let words: Vec<String> = line.split(' ').map(Into::into).collect();
        with_hints(Cli::try_parse_from(&words).unwrap_err(), &words).to_string()
    }

    /// Each argument of a command and of its subcommands, with its help.
    fn arguments(command: &clap::Command) -> Vec<(String, clap::Arg)> {
        let own =
            command.get_arguments().map(|argument| (format!("{} {argument}", command.get_name()), argument.clone()));
        own.chain(command.get_subcommands().flat_map(arguments)).collect()
    }

    #[test]
    fn a_time_or_a_size_is_shown_with_its_unit_and_its_default() {
        let (mut checked, mut command) = (0, Cli::command());
        command.build();
        for (name, argument) in arguments(&command) {
            let values = argument.get_value_names().unwrap_or_default();
            if !values.iter().any(|value| value.starts_with("TIME") || value.starts_with("SIZE")) {
                continue;
            }
            let help = argument.get_help().map(ToString::to_string).unwrap_or_default();
            let has_example = help.contains("like ") && help.contains("[default: ");
            assert!(has_example || !argument.get_default_values().is_empty(), "{name}: {help}");
            checked += 1;
        }
        assert!(checked >= 9, "{checked} arguments are a time or a size");
    }

    #[test]
    fn commands_that_serve_name_the_order_of_the_configuration() {
        for name in ["serve", "frontend", "worker"] {
            let help = Cli::command().find_subcommand_mut(name).unwrap().render_help().to_string();
            assert!(help.contains("Precedence: defaults < --config FILE"), "{name}: {help}");
        }
    }

    #[test]
    fn replay_needs_a_trace_or_a_workload_and_its_flags_fit_to_it() {
        assert!(refused("blockyard replay").contains("--workload"));
        for flags in ["--requests 9", "--workload chat", "--rate 1 --write-trace other.jsonl"] {
            let error = refused(&format!("blockyard replay trace.jsonl {flags}"));
            assert!(error.contains("cannot be used with"), "{flags}: {error}");
        }
    }

    #[test]
    fn a_limit_of_zero_is_refused_with_what_is_expected() {
        for flags in ["key add --file k ann --tokens-per-minute 0", "replay --workload chat --threads 0"] {
            let error = refused(&format!("blockyard {flags}"));
            assert!(error.contains("expected a whole number, 1 or more"), "{flags}: {error}");
        }
    }

    #[test]
    fn rates_of_a_replay_can_be_generated() {
        let parse = |flag: &str| Cli::try_parse_from(format!("blockyard replay --workload chat {flag}").split(' '));
        for flag in ["--rate 0.001,100000", "--load-factor 0.001,1000"] {
            assert!(parse(flag).is_ok(), "{flag}");
        }
        for flag in ["--rate 1e6", "--rate 1e300", "--rate 1e-9", "--rate nan", "--rate inf", "--load-factor 1e300"] {
            let error = refused(&format!("blockyard replay --workload chat {flag}"));
            assert!(error.contains("expected a number between 0.001 and 100"), "{flag}: {error}");
        }
    }

    #[test]
    fn the_role_of_a_worker_is_short_for_one_worker_with_it() {
        let workers = |flags: &str| {
            let line = format!("blockyard worker {flags}");
            let Command::Worker(worker) = Cli::try_parse_from(line.split(' ')).unwrap().command else {
                panic!("not worker")
            };
            let flags = Sources { environment: vec![("HOME".into(), "/".into())], ..worker.serving().sources };
            Config::load(&flags).unwrap().0.workers
        };
        for role in ["prefill", "decode", "both"] {
            let (short, long) = (workers(&format!("--role {role}")), workers(&format!("--workers {role}:1")));
            assert_eq!(short.to_string(), long.to_string(), "{role}");
        }
        assert_eq!(workers("--role decode --role prefill").to_string(), "prefill:1", "the last one wins");
        let both = refused("blockyard worker --role prefill --workers decode:2");
        assert!(both.contains("cannot be used with"), "{both}");
        let unknown = refused("blockyard worker --role encode");
        assert!(["prefill", "decode", "both"].iter().all(|role| unknown.contains(role)), "{unknown}");
    }

    #[test]
    fn the_last_of_two_flags_wins_and_each_set_applies() {
        let line = "blockyard serve --listen 1 --listen 2 --set log.filter=warn --set router.seed=3";
        let Command::Serve(serve) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!("not serve") };
        let flags = Sources { environment: vec![("HOME".into(), "/".into())], ..serve.serving().sources };
        let (config, _) = Config::load(&flags).unwrap();
        assert_eq!((config.listen.port, config.log.filter.as_str(), config.router.seed), (2, "warn", 3));
    }
}
