//! `blockyard doctor`: checks what `serve` with the same flags depends on, and says what to change.
//!
//! ```text
//!   local: configuration, ports, memory, model, disks, stores ──┐
//!   server: name, connection, key, version, models, clock ──────┼──▶ findings: Check ──▶ table, JSON, exit status
//!     └─ kv: publishers ── probe: completions, tokens ─▶ judge ─┘
//! ```
//! Servers are checked in parallel, and then compared (`same_server`). A check that depends on a failed one is left
//! out. `judge` is pure: it turns what `probe` has seen into checks. Not here: how servers are asked and their events
//! read (crate `upstream`), which is the code that `serve` uses.

mod findings;
mod judge;
mod kv;
mod local;
mod probe;
mod same_server;
mod server;

pub use findings::{Check, Status};

use crate::commands::cli::Configured;
use crate::commands::output;
use crate::config::{Config, Purpose, Sources};
use crate::node::aliases::incomplete;
use crate::node::load_tokenizers;
use crate::process::machine;
use clap::Args;
use findings::Findings;
use frontend::LocalTokenizer;
use futures::future::join_all;
use same_server::Location;
use std::collections::BTreeMap;
use std::io::{self, IsTerminal};
use std::sync::Arc;
use std::time::Duration;
use tokio::time::timeout;

/// `blockyard doctor`.
#[derive(Args, Debug, Default)]
#[command(args_override_self = true)]
pub struct Doctor {
    #[command(flatten)]
    configured: Configured,

    /// Send no completions to the servers (three short ones each, by default). Then it is not checked whether KV events
    /// arrive, nor what is cached
    #[arg(long)]
    no_probe: bool,

    /// Print the checks as a JSON array
    #[arg(long)]
    json: bool,
}

/// Whether completions are sent to the servers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Probing {
    /// Three of about four blocks each, with one token of output.
    Send,
    /// None.
    Skip,
}

/// What the checks have found.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// No problem; there may be warnings.
    Sound,
    /// At least one problem.
    Problems,
}

/// Time for all checks of one server, and so for all servers, after the resolution of its name. A user waits for the
/// result.
const SERVER_LIMIT: Duration = Duration::from_secs(25);
/// Maximum number of servers of one name that are checked: those of a large service are alike.
const MAX_SERVERS: usize = 64;

/// Runs all checks and prints them.
pub fn run(doctor: &Doctor) -> anyhow::Result<Outcome> {
    machine::check_address_space()?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let probing = if doctor.no_probe { Probing::Skip } else { Probing::Send };
    let checks = runtime.block_on(checks_of(&doctor.configured.sources(), probing));
    // A name that is still being resolved must not delay the end.
    runtime.shutdown_background();
    let text = if doctor.json {
        format!("{}\n", serde_json::to_string(&checks)?)
    } else {
        findings::table(&checks, io::stdout().is_terminal())
    };
    output::print(&text)?;
    let has_problems = checks.iter().any(|check| check.status == Status::Problem);
    Ok(if has_problems { Outcome::Problems } else { Outcome::Sound })
}

/// What the checks of servers need of the configuration of the gateway before them.
struct Gateway {
    /// Whether requests have tenants.
    tenants: bool,
    /// The local tokenizers, by model.
    tokenizers: BTreeMap<String, Arc<LocalTokenizer>>,
}

/// What was found out about a server.
struct Examined {
    checks: Vec<Check>,
    /// The models that it lists; `None`: it does not say.
    models: Option<Vec<String>>,
    /// Where it is; `None` of a name.
    location: Option<Location>,
}

impl Gateway {
    async fn of(config: &Config) -> Self {
        let loaded = config.clone();
        let load = move || load_tokenizers(&loaded, Purpose::Serve);
        let tokenizers = tokio::task::spawn_blocking(load).await.expect("loading does not panic");
        // Tokenizers that cannot be loaded are a problem of the configuration.
        Self { tenants: config.frontend.has_tenants(), tokenizers: tokenizers.unwrap_or_default() }
    }
}

async fn checks_of(sources: &Sources, probing: Probing) -> Vec<Check> {
    match Config::load_to_serve(sources) {
        Ok((config, _)) => examine(&config, probing).await,
        Err(errors) => local::unusable(&errors),
    }
}

/// The checks of a configuration: those of this machine, then those of each server in the order of the configuration.
pub async fn examine(config: &Config, probing: Probing) -> Vec<Check> {
    let gateway = &Gateway::of(config).await;
    let upstreams = config.upstreams.iter().enumerate().map(async |(at, upstream)| {
        let url = upstream.shown_url();
        let mut findings = Findings::of(url.clone());
        let servers = server::resolve(upstream, &mut findings).await;
        let several = servers.len() > 1;
        let checks = servers.into_iter().take(MAX_SERVERS).map(async |addresses| {
            let name = addresses.first().filter(|_| several).map(|address| format!("{url} at {address}"));
            let name = name.unwrap_or_else(|| url.clone());
            let mut findings = Findings::of(name.clone());
            let location = Some(Location::of(upstream, at, several, name, &addresses));
            let examined = server::examine(upstream, addresses, at, probing, gateway, &mut findings);
            let models = timeout(SERVER_LIMIT, examined).await.unwrap_or_else(|_| {
                let detail = format!("the checks have not ended within {} s", SERVER_LIMIT.as_secs());
                findings.problem("time", detail, "look at the load of the server, or skip the completions: --no-probe");
                None
            });
            Examined { checks: findings.into_checks(), models, location }
        });
        let checks = join_all(checks).await;
        // A name without a server says nothing of models.
        let models = (!checks.is_empty()).then(Vec::new);
        let of_name = Examined { checks: findings.into_checks(), models, location: None };
        [of_name].into_iter().chain(checks).collect::<Vec<_>>()
    });
    let (local, servers) = tokio::join!(local::examine(config), join_all(upstreams));
    let mut servers: Vec<Examined> = servers.into_iter().flatten().collect();
    same_server::check(&mut servers);
    let listed = servers.iter().map(|server| server.models.as_deref()).collect::<Option<Vec<_>>>();
    // What depends on all models is not known while a server does not say its own.
    let of_models = listed.map(|listed| {
        let mut listed: Vec<&str> = listed.into_iter().flatten().map(String::as_str).collect();
        listed.sort_unstable();
        listed.dedup();
        let mut findings = Findings::of("configuration");
        unlisted(gateway, &listed, &mut findings);
        aliases(config, &listed, &mut findings);
        findings.into_checks()
    });
    local
        .into_iter()
        .chain(of_models.into_iter().flatten())
        .chain(servers.into_iter().flat_map(|server| server.checks))
        .collect()
}

/// Local tokenizers of models that no server lists.
fn unlisted(gateway: &Gateway, listed: &[&str], findings: &mut Findings) {
    for model in gateway.tokenizers.keys().filter(|model| !listed.contains(&model.as_str())) {
        let detail = format!("tokenizers.{model:?}: no server lists this model, so its tokenizer is not used");
        let fix = "name the tokenizer by the id of its model in /v1/models of the servers, or remove it";
        findings.warning("local_tokenizer", detail, fix);
    }
}

/// Aliases of models that no server lists.
fn aliases(config: &Config, listed: &[&str], findings: &mut Findings) {
    const CHECK: &str = "alias";
    let incomplete = incomplete(&config.aliases, |model| listed.contains(&model));
    for alias in &incomplete {
        findings.wrong(!alias.is_served, CHECK, alias.to_string(), alias.fix(listed));
    }
    let complete = config.aliases.len() - incomplete.len();
    if complete > 0 {
        findings.ok(CHECK, format!("servers have all models of {}", output::count(complete as u64, "alias name")));
    }
}
