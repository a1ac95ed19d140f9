//! Checks of the configuration before anything is loaded or written. `--print-config` makes the same checks.
//!
//! Not here: what depends on the moment, like a port that is taken, a data folder that another process serves from, or
//! a store that denies access.

use super::sizes::{self, Disk, Needs, Sizes};
use super::stores::{access, same_place};
use super::{model, quotas, transforms};
use crate::config::{Config, Listen, Purpose};
use crate::otlp;
use crate::process::machine::{self, Machine};
use crate::process::with_causes;
use anyhow::{Context, anyhow, bail};
use frontend::KeyFile;
use kvbm::object::StoreLocation;
use std::fmt;
use std::net::TcpListener;
use std::path::Path;

/// All reasons why a node cannot start; at least one.
#[derive(Debug)]
pub struct Refused(Vec<Reason>);

#[derive(Debug)]
struct Reason {
    error: anyhow::Error,
    /// What to change, if the error names no key.
    fix: Option<String>,
}

impl Refused {
    /// Each reason as text, and what to change if the text names no key.
    pub fn reasons(&self) -> impl Iterator<Item = (String, Option<String>)> {
        self.0.iter().map(|reason| (with_causes(&reason.error), reason.fix.clone()))
    }
}

impl From<anyhow::Error> for Reason {
    fn from(error: anyhow::Error) -> Self {
        Self { error, fix: None }
    }
}

impl fmt::Display for Refused {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0[..] {
            [reason] => f.write_str(&with_causes(&reason.error)),
            reasons => reasons.iter().enumerate().try_for_each(|(n, reason)| {
                let line = if n == 0 { "" } else { "\n       " };
                write!(f, "{line}{}", with_causes(&reason.error))
            }),
        }
    }
}

impl std::error::Error for Refused {}

/// Refuses a configuration that a command could not start with, with all reasons. Blocks while it reads files.
pub fn preflight(config: &Config, purpose: Purpose) -> Result<(), Refused> {
    let mut problems: Vec<Reason> = Vec::new();
    let mut check = |outcome: anyhow::Result<()>| problems.extend(outcome.err().map(Reason::from));
    if purpose == Purpose::Worker {
        check(address("cluster.listen", &config.cluster.listen));
    } else {
        check(address("listen", &config.listen));
    }
    if purpose != Purpose::Serve {
        check(super::planes::check_secret(config));
        check(cluster_tls(config));
    }
    if let Some(admin) = &config.admin.listen {
        check(address("admin.listen", admin));
    }
    check(otlp::check(config));
    // A worker may read the file of a frontend, whose other files are not there.
    if purpose != Purpose::Worker {
        check(trace_file(config));
        check(frontend::check_tls(&config.frontend).map(drop).map_err(anyhow::Error::from));
        if let Some(keys) = &config.frontend.api_keys_file {
            check(KeyFile::read(keys).map(drop).context("frontend.api_keys_file"));
        }
    }
    if purpose == Purpose::Frontend || !config.upstreams.is_empty() {
        check(super::tokenizers::load(config, purpose).map(drop));
        return if problems.is_empty() { Ok(()) } else { Err(Refused(problems)) };
    }
    check(folder("data_dir", &config.data_dir));
    for disk in &config.tiers.g3_paths {
        check(folder("tiers.g3_paths", &disk.path));
    }
    if let Some(flash) = &config.tiers.g3_5 {
        check(folder("tiers.g3_5.path", &flash.path));
    }
    if let Some(StoreLocation::Folder(path)) = &config.tiers.g4.url {
        check(folder("tiers.g4.url", path));
    }
    check(shared_store(config));
    check(transforms::check(config).context("tiers.encryption"));
    problems.extend(native(config).err());
    if problems.is_empty() { Ok(()) } else { Err(Refused(problems)) }
}

/// The certificates between processes.
fn cluster_tls(config: &Config) -> anyhow::Result<()> {
    let tls = &config.cluster.tls;
    tls.server()?.map(|files| files.check()).transpose()?;
    tls.client()?.map(|files| files.check()).transpose()?;
    Ok(())
}

/// The host must be an address of this machine. Whether the port is free is checked at the start.
fn address(key: &str, at: &Listen) -> anyhow::Result<()> {
    let bound = TcpListener::bind((at.host.as_str(), 0));
    bound
        .map(drop)
        .with_context(|| format!("{key} = \"{at}\": cannot listen there; expected an address of this machine"))
}

/// A folder may be missing, but the path must not be a file or below one.
fn folder(key: &str, path: &Path) -> anyhow::Result<()> {
    let there = path.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir());
    match there {
        Some(file) => bail!("{key} = \"{}\": {} is not a folder", path.display(), file.display()),
        None => Ok(()),
    }
}

fn trace_file(config: &Config) -> anyhow::Result<()> {
    let Some(path) = &config.router.trace_file else { return Ok(()) };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.is_dir() || !parent.is_dir() {
        bail!("router.trace_file = \"{}\": expected a file in a folder that exists", path.display());
    }
    Ok(())
}

/// Checks that a client of the shared store can be created, and that G3.5 and G4 are different folders.
fn shared_store(config: &Config) -> anyhow::Result<()> {
    let Some(location) = &config.tiers.g4.url else { return Ok(()) };
    if config.tiers.g3_5.as_ref().is_some_and(|flash| same_place(&flash.path, location)) {
        bail!("tiers.g3_5.path and tiers.g4.url are the same folder; expected two different ones");
    }
    let client = location.client(&access(config), config.tiers.g4.request_timeout.0);
    client.map(drop).map_err(|error| anyhow!("tiers.g4.url = \"{location}\" cannot be used: {error}"))
}

/// What the native engine of a configuration needs, and what the machine has.
pub(crate) struct NativeSizes {
    pub(crate) needs: Needs,
    pub(crate) sizes: Sizes,
    pub(crate) disks: Vec<Disk>,
    pub(crate) machine: Machine,
}

/// The sizes of the native engine. Reads the model's files, but not its weights.
pub(crate) fn native_sizes(config: &Config) -> anyhow::Result<NativeSizes> {
    let machine = Machine::detect();
    let shape = model::shape(&config.model, &machine)?;
    let needs = Needs::of(&shape);
    let disks = sizes::usable(sizes::disks(&config.tiers, &config.data_dir, machine::space), needs.block);
    let sizes = Sizes::compute(&config.tiers, config.workers.count(), needs, &machine, &disks)?;
    Ok(NativeSizes { needs, sizes, disks, machine })
}

/// Checks the model, and what it is served with.
fn native(config: &Config) -> Result<(), Reason> {
    if let Err(error) = model::shape(&config.model, &Machine::detect()) {
        let fix = format!("correct --model (model = \"{}\")", config.model);
        return Err(Reason { error, fix: Some(fix) });
    }
    native_tiers(config).map_err(Reason::from)
}

/// Checks that memory and disks suffice for the model and the tiers, and the tiers for the guaranteed sizes of tenants.
fn native_tiers(config: &Config) -> anyhow::Result<()> {
    let NativeSizes { needs, sizes, disks, .. } = native_sizes(config)?;
    let domains = frontend::CacheDomains::open(&config.frontend)?;
    let domain = config.frontend.has_tenants().then_some(|tenant: &str| domains.of(tenant));
    let shares = quotas::shares(&config.tiers.quotas, quotas::Capacities::of(config, &sizes), domain)?;
    super::stores::check_disks(&disks, &shares, needs.block)
}
