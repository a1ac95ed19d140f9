//! The program: loads the configuration, starts the log and the node, waits for a signal, shuts down.

use anyhow::anyhow;
use blockyard::admin;
use blockyard::commands::cli::{Cli, Command, Printed, Serving};
use blockyard::commands::{bench, cache, calibrate, doctor, key, output, replay};
use blockyard::config::{self, Config, Log, LogFormat, Origins, Purpose, Sources};
use blockyard::node::banner::Banner;
use blockyard::node::{Node, Process, WorkerNode, preflight};
use blockyard::process::log_fields::EscapedFields;
use blockyard::process::log_lines::TextLines;
use blockyard::process::log_writer::{self, LineQueue};
use blockyard::process::{machine, panics, with_causes};
use blockyard::reload::{Apply, Engines, FileStamp, Reload, Routing, Section, Servers, SetLogFilter};
use std::io::{IsTerminal, Write};
use std::net::SocketAddr;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::task::JoinSet;
use tracing_subscriber::EnvFilter;
use worker::plane::nats::LIBRARY_LOG_TARGET;

fn main() -> ExitCode {
    let outcome = match Cli::of_process().command {
        Command::Serve(serve) => run(serve.serving()),
        Command::Frontend(frontend) => run(frontend.serving()),
        Command::Worker(worker) => run(worker.serving()),
        Command::Doctor(doctor) => match doctor::run(&doctor) {
            Ok(doctor::Outcome::Sound) => Ok(()),
            Ok(doctor::Outcome::Problems) => return ExitCode::FAILURE,
            Err(error) => Err(error),
        },
        Command::Replay(replay) => replay::run(&replay),
        Command::Calibrate(calibrate) => calibrate::run(&calibrate),
        Command::Bench(bench) => bench::run(&bench),
        Command::Cache(cache) => cache::run(&cache),
        Command::Key(key) => key::run(&key),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output::note(format_args!("error: {}", with_causes(&error)));
            ExitCode::FAILURE
        }
    }
}

fn run(Serving { purpose, sources, printed }: Serving) -> anyhow::Result<()> {
    machine::check_address_space()?;
    let stamp = FileStamp::of(&sources);
    let (config, origins) = Config::load_for(&sources, purpose)?;
    if printed.print_config {
        preflight(&config, purpose)?;
        return output::print(&if printed.json {
            format!("{:#}\n", config::as_json(&config, &origins))
        } else {
            config::as_toml(&config, &origins)
        });
    }
    kvbm::heap::return_large_allocations();
    machine::limit_umask(config.shared_folders());
    let (log_writer, _flush_log) = log_writer::to_stderr()?;
    let set_log_filter = start_log(&config.log, log_writer)?;
    panics::install_hook();
    let without_effect = config.without_effect(&origins);
    // Frontends and workers may share a file of configuration.
    if purpose == Purpose::Serve && !without_effect.is_empty() {
        let keys = without_effect.join(" ");
        tracing::warn!(keys, "these keys have no effect with upstreams, because no model is loaded");
    }
    machine::raise_open_files();
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let outcome = runtime.block_on(async {
        // Before anything else: process 1 of a container has no default action for signals.
        let mut signals = Signals::listen()?;
        let launch = Launch { purpose, sources, loaded: (config, origins, stamp), set_log_filter, printed };
        match purpose {
            Purpose::Worker => Box::pin(launch.worker(&mut signals)).await,
            _ => Box::pin(launch.node(&mut signals)).await,
        }
    });
    // Threads that still run (a long step of the engine) must not delay the end.
    runtime.shutdown_background();
    outcome
}

/// What a process is started with.
struct Launch {
    purpose: Purpose,
    sources: Sources,
    loaded: (Config, Origins, FileStamp),
    set_log_filter: SetLogFilter,
    printed: Printed,
}

impl Launch {
    /// Runs `serve` or `frontend`.
    async fn node(self, signals: &mut Signals) -> anyhow::Result<()> {
        let config = &self.loaded.0;
        let starting = Box::pin(async {
            match self.purpose {
                Purpose::Frontend => Node::start_frontend(config).await,
                _ => Node::start(config).await,
            }
        });
        let Some(node) = unless_stopped(starting, signals).await? else { return Ok(()) };
        let mut sections: Vec<Box<dyn Section>> = vec![Box::new(Routing(Arc::clone(node.router())))];
        if let Some(limits) = node.limits() {
            sections.push(Box::new(Engines(limits)));
        }
        if let Some(upstreams) = node.upstreams() {
            let has_tenants = config.frontend.has_tenants();
            let may_be_none = self.purpose == Purpose::Frontend;
            sections.push(Box::new(Servers { upstreams: Arc::clone(upstreams), has_tenants, may_be_none }));
        }
        let workers = admin::routed_workers::routes(Arc::downgrade(node.router()));
        self.run(node, sections, workers, signals).await
    }

    /// Runs `worker`.
    async fn worker(self, signals: &mut Signals) -> anyhow::Result<()> {
        let starting = Box::pin(WorkerNode::start(&self.loaded.0));
        let Some(node) = unless_stopped(starting, signals).await? else { return Ok(()) };
        let sections: Vec<Box<dyn Section>> = vec![Box::new(Engines(node.limits()))];
        let workers = admin::own_workers::routes(node.cordons());
        self.run(node, sections, workers, signals).await
    }

    /// Runs a started process until it is to stop. `sections` are the keys of its configuration that can be reloaded,
    /// `workers` the part of the admin API that depends on the kind of process.
    async fn run(
        self,
        node: impl Process,
        sections: Vec<Box<dyn Section>>,
        workers: axum::Router,
        signals: &mut Signals,
    ) -> anyhow::Result<()> {
        let Self { purpose, sources, loaded, set_log_filter, printed } = self;
        let (admin, settings) = (loaded.0.admin.listen.clone(), loaded.0.frontend.clone());
        let shown = Arc::clone(node.reload_state());
        let reload = Reload::new((sources, purpose), loaded, sections, set_log_filter, node.registry(), shown)?;
        // Aborted when this function returns.
        let mut background = JoinSet::new();
        let mut admin_address = None;
        background.spawn(Arc::clone(&reload).watch());
        if let Some(at) = admin {
            let serving = (node.server().clone(), &settings);
            let audit = Arc::downgrade(node.audit());
            let (address, serving) = admin::open(&at, Arc::clone(&reload), audit, workers, serving).await?;
            background.spawn(serving);
            admin_address = Some(address);
            tracing::info!(%address, "admin API listening");
        }
        print_banner(node.banner(), admin_address, printed);
        if std::mem::take(&mut signals.reload_is_due) {
            reload.now("SIGHUP");
        }
        until_stopped(node, signals, || drop(reload.now("SIGHUP"))).await
    }
}

/// The started process, or `None` if a signal stops it before.
async fn unless_stopped<P>(
    starting: impl Future<Output = anyhow::Result<P>>,
    signals: &mut Signals,
) -> anyhow::Result<Option<P>> {
    tokio::select! {
        biased;
        () = signals.end() => {
            tracing::info!("stopped by a signal before it was ready");
            Ok(None)
        }
        started = starting => started.map(Some),
    }
}

fn print_banner(banner: &Banner, admin_address: Option<SocketAddr>, printed: Printed) {
    let text = if printed.json {
        let mut banner = banner.as_json();
        if let Some(address) = admin_address {
            banner["admin_address"] = address.to_string().into();
        }
        banner.to_string()
    } else {
        banner.to_string()
    };
    // A server does not stop because nothing reads its standard output.
    if let Err(error) = writeln!(std::io::stdout(), "{text}") {
        tracing::debug!(%error, "cannot write to standard output");
    }
}

/// Waits until the process is to stop or has failed, and stops it in order.
async fn until_stopped(mut node: impl Process, signals: &mut Signals, reload: impl Fn()) -> anyhow::Result<()> {
    let outcome = loop {
        tokio::select! {
            biased;
            request = signals.next() => match request {
                SignalRequest::Interrupt => break Ok(false),
                SignalRequest::Terminate => break Ok(true),
                SignalRequest::Reload => reload(),
            },
            // The other components are stopped in order all the same.
            error = node.failed() => break Err(error),
        }
    };
    // SIGTERM comes from an orchestrator, whose load balancers send requests for some more seconds. SIGINT comes from a
    // person at a terminal.
    let announced = matches!(outcome, Ok(true));
    ignore_copies(async || signals.next().await).await;
    tracing::info!("{}", node.shutdown_notice(announced));
    let shutdown = async {
        if announced {
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

/// Starts the log. Returns the function that changes its filter.
fn start_log(log: &Log, writer: LineQueue) -> anyhow::Result<SetLogFilter> {
    let builder = tracing_subscriber::fmt().with_env_filter(filter(&log.filter)?).with_writer(writer);
    Ok(match log.format {
        LogFormat::Text => {
            let ansi = std::io::stderr().is_terminal();
            let builder =
                builder.with_ansi(ansi).fmt_fields(EscapedFields).event_format(TextLines).with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            filter_setter(move |filter| handle.reload(filter))
        }
        LogFormat::Json => {
            // Flat, so that log stores can filter by each field. Spans are left out: each line carries its own fields.
            let builder = builder.json().flatten_event(true).with_current_span(false).with_span_list(false);
            let builder = builder.with_filter_reloading();
            let handle = builder.reload_handle();
            builder.init();
            filter_setter(move |filter| handle.reload(filter))
        }
    })
}

fn filter_setter<E: std::fmt::Display>(
    change: impl Fn(EnvFilter) -> Result<(), E> + Send + Sync + 'static,
) -> SetLogFilter {
    Box::new(move |directives, apply| {
        let filter = filter(directives).map_err(|error| with_causes(&error))?;
        if apply == Apply::Check { Ok(()) } else { change(filter).map_err(|error| error.to_string()) }
    })
}

fn filter(directives: &str) -> anyhow::Result<EnvFilter> {
    let wrong = |problem: String| anyhow!("log.filter = {directives:?}: {problem}");
    config::check_log_filter(directives).map_err(wrong)?;
    // The certificate library repeats an error with every request; the tier logs it once. The planes log the connection
    // to NATS themselves. `log.filter` may name both.
    EnvFilter::try_new(format!("rustls_platform_verifier=off,{LIBRARY_LOG_TARGET}=off,{directives}"))
        .map_err(|error| wrong(error.to_string()))
}

/// Time in which copies of a signal arrive. No person sends a second signal within it.
const TIME_OF_COPIES: Duration = Duration::from_millis(50);

/// The signals that the process handles.
struct Signals {
    interrupt: Signal,
    terminate: Signal,
    /// SIGHUP: reload the configuration.
    hangup: Signal,
    /// A reload was requested while it could not be carried out, as during the start.
    reload_is_due: bool,
}

impl Signals {
    fn listen() -> std::io::Result<Self> {
        Ok(Self {
            interrupt: signal(SignalKind::interrupt())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            reload_is_due: false,
        })
    }

    async fn next(&mut self) -> SignalRequest {
        tokio::select! {
            biased;
            _ = self.interrupt.recv() => SignalRequest::Interrupt,
            _ = self.terminate.recv() => SignalRequest::Terminate,
            _ = self.hangup.recv() => SignalRequest::Reload,
        }
    }

    /// Resolves when the process is to stop. Notes a request to reload meanwhile.
    async fn end(&mut self) {
        while self.next().await == SignalRequest::Reload {
            self.reload_is_due = true;
        }
    }
}

/// Drops the signals of the first moment after the signal to stop: copies of it, which are no second one, because
/// `timeout` signals the process and its group, and so do some process managers; and requests to reload what ends.
async fn ignore_copies(mut next: impl AsyncFnMut() -> SignalRequest) {
    let copies = async {
        loop {
            next().await;
        }
    };
    let _: Result<(), _> = tokio::time::timeout(TIME_OF_COPIES, copies).await;
}

/// What a signal requests.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum SignalRequest {
    /// SIGINT: stop.
    Interrupt,
    /// SIGTERM: stop after announcing the shutdown.
    Terminate,
    /// SIGHUP: reload the configuration.
    Reload,
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::sync::mpsc;
    use tokio::time::{Instant, sleep_until};

    #[tokio::test(start_paused = true)]
    async fn signals_within_50_ms_of_the_first_are_no_second_one() {
        let (sender, mut received) = mpsc::unbounded_channel();
        let start = Instant::now();
        tokio::spawn(async move {
            let signals = [SignalRequest::Terminate, SignalRequest::Reload, SignalRequest::Terminate];
            for (signal, at) in signals.into_iter().chain([SignalRequest::Interrupt]).zip([0, 10, 49, 51]) {
                sleep_until(start + Duration::from_millis(at)).await;
                sender.send(signal).unwrap();
            }
        });
        ignore_copies(async || received.recv().await.unwrap()).await;
        assert_eq!(start.elapsed(), Duration::from_millis(50));
        assert_eq!(received.recv().await, Some(SignalRequest::Interrupt));
    }
}
