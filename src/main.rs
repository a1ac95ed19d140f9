//! The program: log, configuration, build, wait, drain.

use anyhow::Context;
use blockyard::cli::{Cli, Command, Serve};
use blockyard::config::{self, Config, Log, LogFormat};
use blockyard::node::Node;
use blockyard::replay;
use clap::Parser;
use std::io::IsTerminal;
use std::process::ExitCode;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tracing_subscriber::EnvFilter;

fn main() -> ExitCode {
    let outcome = match Cli::parse().command {
        Command::Serve(serve) => run(&serve),
        Command::Replay(replay) => replay::run(&replay),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {}", said(&error));
            ExitCode::FAILURE
        }
    }
}

/// An error with its causes, each once: some spell theirs out themselves.
fn said(error: &anyhow::Error) -> String {
    error.chain().map(ToString::to_string).fold(String::new(), |text, cause| match text.as_str() {
        "" => cause,
        text if text.contains(&cause) => text.into(),
        text => format!("{text}: {cause}"),
    })
}

fn run(serve: &Serve) -> anyhow::Result<()> {
    let (config, origins) = Config::load(&serve.sources())?;
    if serve.print_config {
        if serve.json {
            println!("{:#}", config::as_json(&config, &origins));
        } else {
            print!("{}", config::as_toml(&config, &origins));
        }
        return Ok(());
    }
    start_log(&config.log)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(live(&config, serve.json));
    // What still runs on a thread of its own (a long step of the engine) must not hold up the end.
    runtime.shutdown_background();
    outcome
}

async fn live(config: &Config, json: bool) -> anyhow::Result<()> {
    // From the first moment on: as process 1 of a container, nobody else would act on a signal.
    let mut signals = Signals::listen()?;
    let mut node = tokio::select! {
        biased;
        () = signals.next() => return Ok(()),
        node = Node::start(config) => node?,
    };
    if json {
        println!("{}", node.banner().as_json());
    } else {
        println!("{}", node.banner());
    }
    tokio::select! {
        biased;
        () = signals.next() => tracing::info!("stopping: requests may finish; another Ctrl-C ends at once"),
        error = node.failed() => return Err(error),
    }
    tokio::select! {
        biased;
        () = signals.next() => tracing::warn!("ended at once; what was not written yet is lost, and will be recomputed"),
        () = node.shutdown() => {}
    }
    Ok(())
}

fn start_log(log: &Log) -> anyhow::Result<()> {
    let filter = EnvFilter::try_new(&log.filter).with_context(|| {
        format!("log.filter = {:?}: expected directives like `info` or `info,kvbm=debug`", log.filter)
    })?;
    let builder = tracing_subscriber::fmt().with_env_filter(filter).with_writer(std::io::stderr);
    match log.format {
        LogFormat::Text => builder.with_ansi(std::io::stderr().is_terminal()).with_target(false).init(),
        LogFormat::Json => builder.json().init(),
    }
    Ok(())
}

/// Ctrl-C, and what orchestrators send.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self { interrupt: signal(SignalKind::interrupt())?, terminate: signal(SignalKind::terminate())? })
    }

    async fn next(&mut self) {
        tokio::select! {
            biased;
            _ = self.interrupt.recv() => {}
            _ = self.terminate.recv() => {}
        }
    }
}
