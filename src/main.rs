//! The program: log, configuration, build, wait, drain.

use anyhow::Context;
use blockyard::admin;
use blockyard::commands::bench;
use blockyard::commands::cache;
use blockyard::commands::cli::{Cli, Command, Serve};
use blockyard::config::{self, Config, Log, LogFormat, Origins, Sources};
use blockyard::process::with_causes;
use blockyard::commands::calibrate;
use blockyard::process::machine;
use blockyard::node::{Node, preflight};
use blockyard::process::panics;
use blockyard::reload::{Apply, Reload, Relog};
use blockyard::commands::replay;
use std::io::IsTerminal;
use std::process::ExitCode;
use std::sync::Arc;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let outcome = match Cli::of_process().command {
        Command::Serve(serve) => run(&serve),
        Command::Replay(replay) => replay::run(&replay),
        Command::Calibrate(calibrate) => fit::run(&calibrate),
        Command::Bench(bench) => bench::run(&bench),
        Command::Cache(cache) => cache::run(&cache),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", with_causes(&error));
            ExitCode::FAILURE
        }
    }
}

fn run(serve: &Serve) -> anyhow::Result<()> {
    let sources = serve.sources();
    let (config, origins) = Config::load_to_serve(&sources)?;
    if serve.print_config {
        preflight(&config)?;
        if serve.json {
            println!("{:#}", config::as_json(&config, &origins));
        } else {
            print!("{}", config::as_toml(&config, &origins));
        }
        return Ok(());
    }
    machine::limit_umask(config.shared_folders());
    let relog = start_log(&config.log)?;
    panics::watch();
    machine::raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(live(sources, (config, origins), relog, serve.json));
    // What still runs on a thread of its own (a long step of the engine) must not hold up the end.
    runtime.shutdown_background();
    outcome
}

async fn live(sources: Sources, loaded: (Config, Origins), relog: Relog, json: bool) -> anyhow::Result<()> {
    // From the first moment on: as process 1 of a container, nobody else would act on a signal.
    let mut signals = Signals::listen()?;
    let (admin, settings) = (loaded.0.admin.listen.clone(), loaded.0.frontend.clone());
    let mut node = tokio::select! {
        biased;
        () = signals.end() => return Ok(()),
        node = Node::start(&loaded.0) => node?,
    };
    let reload = Reload::new(sources, loaded, Arc::clone(node.router()), relog, node.registry())?;
    // Ended with this function.
    let mut beside = JoinSet::new();
    let mut banner = node.banner().as_json();
    beside.spawn(Arc::clone(&reload).watch());
    if let Some(at) = admin {
        let (address, serving) = {
            let serving = (node.server().clone(), &settings);
            admin::open(&at, Arc::clone(&reload), Arc::downgrade(node.audit()), Arc::downgrade(node.router()), serving)
                .await?
        };
        beside.spawn(serving);
        banner["admin_address"] = address.to_string().into();
        tracing::info!(%address, "admin API listening");
    }
    if json {
        println!("{banner}");
    } else {
        println!("{}", node.banner());
    }
    let outcome = loop {
        tokio::select! {
            biased;
            asked = signals.next() => match asked {
                Asked::Interrupt => break Ok(false),
                Asked::Terminate => break Ok(true),
                Asked::ReadAgain => drop(reload.now("SIGHUP")),
            },
            // What audit below is closed in order all the same.
            error = node.failed() => break Err(error),
        }
    };
    tracing::info!("shutting down: running requests may finish; press Ctrl-C again to stop at once");
    let shutdown = async {
        // Ctrl-C is a person's at a terminal; SIGTERM is an orchestrator's, and load balancers send requests for a while.
        if let Ok(true) = outcome {
            node.announce_shutdown().await;
        }
        node.shutdown().await;
    };
    tokio::select! {
        biased;
        () = signals.end() => tracing::warn!(
            "stopped at once; blocks that were not written yet are lost and will be recomputed"
        ),
        () = shutdown => {}
    }
    outcome.map(|_terminated| ())
}

/// Starts the log; what it answers with changes what is logged.
fn start_log(log: &Log) -> anyhow::Result<Relog> {
    let builder = tracing_subscriber::fmt().with_env_filter(filter(&log.filter)?).with_writer(std::io::stderr);
    Ok(match log.format {
        LogFormat::Text => {
            let ansi = std::io::stderr().is_terminal();
            let builder = builder.with_ansi(ansi).with_target(false).with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            relog(move |filter| handle.reload(filter))
        }
        LogFormat::Json => {
            // Flat, so that log stores filter by each field. What a request's lines say they say themselves.
            let builder = builder.json().flatten_event(true).with_current_span(false).with_span_list(false);
            let builder = builder.with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            relog(move |filter| handle.reload(filter))
        }
    })
}

fn relog<E: std::fmt::Display>(change: impl Fn(EnvFilter) -> Result<(), E> + Send + Sync + 'static) -> Relog {
    Box::new(move |directives, apply| {
        let filter = filter(directives).map_err(|error| with_causes(&error))?;
        if apply == Apply::Try { Ok(()) } else { change(filter).map_err(|error| error.to_string()) }
    })
}

fn filter(directives: &str) -> anyhow::Result<EnvFilter> {
    // The certificates' library repeats with every request what the log says once, of the store that it is about.
    EnvFilter::try_new(format!("rustls_platform_verifier=off,{directives}"))
        .with_context(|| format!("log.filter = {directives:?}: expected directives like `info` or `info,kvbm=debug`"))
}

/// Ctrl-C, and what orchestrators send.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// Read the configuration again.
    hangup: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    async fn next(&mut self) -> Asked {
        tokio::select! {
            biased;
            _ = self.interrupt.recv() => Asked::Interrupt,
            _ = self.terminate.recv() => Asked::Terminate,
            _ = self.hangup.recv() => Asked::ReadAgain,
        }
    }

    /// Resolves when the process is to end.
    async fn end(&mut self) {
        while self.next().await == Asked::ReadAgain {}
    }
}

/// What a signal asks for.
#[derive(PartialEq, Eq)]
enum Asked {
    /// End, for a person.
    Interrupt,
    /// End, for an orchestrator.
    Terminate,
    /// Read the configuration again.
    ReadAgain,
}
