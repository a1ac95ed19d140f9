//! The command line. About ten flags; whatever else can be chosen is a key of the configuration, reached with `--set`.

use crate::bench::Bench;
use crate::cache::Cache;
use crate::config::{Flag, Sources};
use crate::fit::Fit;
use crate::replay::Replay;
use clap::{Args, Parser, Subcommand};
use std::path::PathBuf;

/// An OpenAI-compatible gateway that routes by KV-cache locality, with a KV block manager and a native CPU engine.
#[derive(Parser, Debug)]
#[command(name = "blockyard", version, propagate_version = true, disable_help_subcommand = true)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Run every role in one process: front door, router and workers, with nothing else installed.
    ///
    /// Without --model this serves `small`, a built-in model with made-up weights: it computes real attention, and its text
    /// is meaningless. Stop it with Ctrl-C; it lets requests finish. A second Ctrl-C ends it at once.
    Serve(Serve),

    /// Replay a recorded trace through the router with simulated workers, and compare policies.
    Replay(Box<Replay>),

    /// Learn from a record of served requests how fast the workers were, as a profile for `replay`.
    Fit(Fit),

    /// Measure this machine.
    Bench(Bench),

    /// Look after the shared store, also while others serve from it.
    Cache(Cache),
}

/// `blockyard serve`.
#[derive(Args, Debug, Default)]
#[command(
    args_override_self = true,
    after_help = "Every key of the configuration can also be set in the environment: \
    BLOCKYARD_ROUTER__POLICY=round-robin is --set router.policy=round-robin.\n\
    Precedence: defaults < --config FILE < environment < flags. --print-config shows all keys and who set them."
)]
pub struct Serve {
    /// A Hugging Face folder (config.json, *.safetensors, tokenizer.json), or a built-in model: tiny, small or bench
    /// [default: small]
    #[arg(long, value_name = "DIR|NAME")]
    model: Option<String>,

    /// Where built-in models and the SSD tier are kept [default: blockyard in the user's cache folder]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,

    /// What several nodes share, like `s3://bucket/prefix` or a folder: what one of them computed, the others load
    #[arg(long, value_name = "URL|DIR")]
    shared: Option<String>,

    /// Where to listen; port 0 lets the system choose [default: 127.0.0.1:8000]
    #[arg(long, value_name = "ADDR:PORT")]
    listen: Option<String>,

    /// How many workers of which phase, or both:1 to prefill and decode in one [default: prefill:1,decode:2]
    #[arg(long, value_name = "SPEC")]
    workers: Option<String>,

    /// What to log, like `debug` or `info,kvbm=debug` [default: info]
    #[arg(long, value_name = "FILTER")]
    log: Option<String>,

    /// A TOML file of configuration
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Sets any key of the configuration; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Flag>,

    /// Print the configuration and where each value came from, and end
    #[arg(long)]
    pub print_config: bool,

    /// Print for programs: the banner, or the configuration, as JSON
    #[arg(long)]
    pub json: bool,
}

impl Serve {
    /// Where the configuration comes from.
    pub fn sources(&self) -> Sources {
        let own = [
            ("--model", "model", &self.model),
            ("--data-dir", "data_dir", &self.data_dir),
            ("--shared", "shared", &self.shared),
            ("--listen", "listen", &self.listen),
            ("--workers", "workers", &self.workers),
            ("--log", "log.filter", &self.log),
        ];
        let own = own.into_iter().filter_map(|(name, key, value)| Some(Flag::own(name, key, value.as_deref()?)));
        // Flags of their own come last: who writes `--listen` means it.
        Sources::of_process(self.config.clone(), self.set.iter().cloned().chain(own).collect())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Config;
    use clap::CommandFactory;

    #[test]
    fn the_command_line_is_sound() {
        Cli::command().debug_assert();
    }

    #[test]
    fn the_last_of_two_equal_flags_wins_and_every_set_counts() {
        let line = "blockyard serve --listen 1 --listen 2 --set log.filter=warn --set router.seed=3";
        let Command::Serve(serve) = Cli::try_parse_from(line.split(' ')).unwrap().command else { panic!("not serve") };
        let flags = Sources { environment: vec![("HOME".into(), "/".into())], ..serve.sources() };
        let (config, _) = Config::load(&flags).unwrap();
        assert_eq!((config.listen.port, config.log.filter.as_str(), config.router.seed), (2, "warn", 3));
    }
}
