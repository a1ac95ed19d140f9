//! Checks of the configuration before anything is loaded or written. `--print-config` makes the same checks.
//!
//! Not here: what depends on the moment, like a port that is taken, a data folder that another process serves from, or
//! a store that denies access.

mod advice;

use super::sizes::{self, Disk, Needs, Sizes};
use super::stores::{access, same_place};
use super::{model, quotas, transforms};
use crate::config::{Budget, Config, Listen, Purpose};
use crate::otlp;
use crate::process::machine::{self, Machine};
use crate::process::with_causes;
use anyhow::{Context, anyhow};
use frontend::{CacheDomains, KeyFile};
use kvbm::crypt::SourceError;
use kvbm::object::StoreLocation;
use std::fmt;
use std::net::TcpListener;
use std::os::unix::fs::FileTypeExt;
use std::path::Path;
use transport::TlsError;

/// All reasons why a node cannot start; at least one.
#[derive(Debug)]
pub struct Refused(Vec<Reason>);

#[derive(Debug)]
struct Reason {
    error: anyhow::Error,
    /// What to change.
    fix: String,
}

impl Refused {
    /// Each reason as text, and what to change.
    pub fn reasons(&self) -> impl Iterator<Item = (String, String)> {
        self.0.iter().map(|Reason { error, fix }| {
            let text = with_causes(error);
            // The text of some errors ends with it.
            let problem = text.strip_suffix(fix.as_str()).and_then(|text| text.strip_suffix("; ")).map(str::to_owned);
            (problem.unwrap_or(text), fix.clone())
        })
    }
}

impl Reason {
    fn new(error: impl Into<anyhow::Error>, fix: impl Into<String>) -> Self {
        Self { error: error.into(), fix: fix.into() }
    }
}

impl From<TlsError> for Reason {
    fn from(error: TlsError) -> Self {
        let fix = advice::tls(&error);
        Self::new(error, fix)
    }
}

impl From<frontend::SecretError> for Reason {
    fn from(error: frontend::SecretError) -> Self {
        let fix = advice::tenant_secret(&error);
        Self::new(error, fix)
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
    preflight_on(&Machine::detect(), config, purpose)
}

/// Refuses a configuration that a restart of this process would refuse. Reasons that apply to its running configuration
/// too do not count: they are not of the change. Blocks while it reads files.
pub fn restart_preflight(config: &Config, running: &Config, purpose: Purpose) -> Result<(), Refused> {
    let machine = Machine::after_restart();
    let Err(Refused(mut reasons)) = preflight_on(&machine, config, purpose) else { return Ok(()) };
    if let Err(Refused(of_running)) = preflight_on(&machine, running, purpose) {
        let known: Vec<String> = of_running.iter().map(|reason| with_causes(&reason.error)).collect();
        reasons.retain(|reason| !known.contains(&with_causes(&reason.error)));
    }
    if reasons.is_empty() { Ok(()) } else { Err(Refused(reasons)) }
}

fn preflight_on(machine: &Machine, config: &Config, purpose: Purpose) -> Result<(), Refused> {
    let mut problems: Vec<Reason> = Vec::new();
    let mut check = |outcome: Result<(), Reason>| problems.extend(outcome.err());
    if purpose == Purpose::Worker {
        check(address("cluster.listen", &config.cluster.listen));
    } else {
        check(address("listen", &config.listen));
    }
    if purpose != Purpose::Serve {
        check(super::planes::check_secret(config).map_err(|error| {
            let fix = "let cluster.secret_file name a file with the secret of the deployment, which the user of this \
                       process can read; `openssl rand -hex 32` makes a secret";
            Reason::new(error, fix)
        }));
        check(cluster_tls(config).map_err(Reason::from));
        check(config.nats.settings().check_files().map_err(|error| {
            let fix =
                "let the key of [nats] name a file with what is expected, which the user of this process can read";
            Reason::new(error, fix)
        }));
    }
    if let Some(admin) = &config.admin.listen {
        check(address("admin.listen", admin));
    }
    check(otlp::check(config).map_err(|otlp::Unusable { error, fix }| Reason::new(error, fix)));
    // A worker may read the file of a frontend, whose other files are not there.
    if purpose != Purpose::Worker {
        check(trace_file(config));
        check(frontend::check_tls(&config.frontend).map(drop).map_err(Reason::from));
        check(api_keys(config));
    }
    if purpose == Purpose::Frontend || !config.upstreams.is_empty() {
        check(CacheDomains::open(&config.frontend).map(drop).map_err(Reason::from));
        check(super::tokenizers::load(config, purpose).map(drop).map_err(|error| {
            let fix = "name the folder with the tokenizer.json of the model there, which the user of this process can \
                       read, or remove the entry: then the servers are asked for the tokens";
            Reason::new(error, fix)
        }));
        return if problems.is_empty() { Ok(()) } else { Err(Refused(problems)) };
    }
    check(data_dir(config));
    for disk in &config.tiers.g3_paths {
        check(folder("tiers.g3_paths", &disk.path, "correct the path in tiers.g3_paths"));
    }
    if let Some(flash) = &config.tiers.g3_5 {
        check(folder("tiers.g3_5.path", &flash.path, "name a folder: --set tiers.g3_5.path=DIR"));
    }
    if let Some(StoreLocation::Folder(path)) = &config.tiers.g4.url {
        check(folder("tiers.g4.url", path, "name a folder: --g4 DIR"));
    }
    check(shared_store(config));
    check(encryption(config));
    check(native(machine, config));
    if problems.is_empty() { Ok(()) } else { Err(Refused(problems)) }
}

/// The certificates between processes.
fn cluster_tls(config: &Config) -> Result<(), TlsError> {
    let tls = &config.cluster.tls;
    tls.server()?.map(|files| files.check()).transpose()?;
    tls.client()?.map(|files| files.check()).transpose()?;
    Ok(())
}

/// The host must be an address of this machine. Whether the port is free is checked at the start.
fn address(key: &str, at: &Listen) -> Result<(), Reason> {
    let bound = TcpListener::bind((at.host.as_str(), 0)).map(drop);
    bound
        .with_context(|| format!("{key} = \"{at}\": cannot listen there; expected an address of this machine"))
        .map_err(|error| {
            let port = at.port;
            let fix = format!(
                "listen on this machine only, --set {key}=127.0.0.1:{port}, or on all its addresses, \
                 --set {key}=0.0.0.0:{port}"
            );
            Reason::new(error, fix)
        })
}

/// A folder may be missing, but the path must not be empty, and not a file or below one.
fn folder(key: &str, path: &Path, fix: &str) -> Result<(), Reason> {
    if path.as_os_str().is_empty() {
        return Err(Reason::new(anyhow!("{key} = \"\": expected the path of a folder"), fix));
    }
    let there = path.ancestors().find(|path| path.exists()).filter(|path| !path.is_dir());
    match there {
        Some(file) => {
            let error = anyhow!("{key} = \"{}\": {} is not a folder", path.display(), file.display());
            Err(Reason::new(error, fix))
        }
        None => Ok(()),
    }
}

/// The data folder is created on a disk.
fn data_dir(config: &Config) -> Result<(), Reason> {
    let path = config.data_dir.as_path();
    let fix = "name a folder on a disk: --data-dir DIR";
    if let Some(kernel) = machine::kernel_folder(path) {
        let (path, kernel) = (path.display(), kernel.display());
        let error = anyhow!("data_dir = \"{path}\": {kernel} is a view of the kernel, in which no file can be created");
        return Err(Reason::new(error, fix));
    }
    folder("data_dir", path, fix)?;
    let log = path.join(sizes::G3_FOLDER);
    if config.tiers.g3 != Budget::Off && config.tiers.g3_paths.is_empty() && log.exists() && !log.is_dir() {
        let (path, log) = (path.display(), log.display());
        let error = anyhow!("data_dir = \"{path}\": {log} is not a folder, and that of the G3 log has this name");
        let fix = format!("remove {log}, name another data folder: --data-dir DIR, or turn G3 off: --set tiers.g3=off");
        return Err(Reason::new(error, fix));
    }
    Ok(())
}

fn trace_file(config: &Config) -> Result<(), Reason> {
    let Some(path) = &config.router.trace_file else { return Ok(()) };
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    if path.metadata().is_ok_and(|data| data.file_type().is_fifo()) {
        let error = anyhow!("router.trace_file = \"{}\": expected a file, and this is a named pipe", path.display());
        return Err(Reason::new(error, "name another file: --set router.trace_file=FILE"));
    }
    if !path.as_os_str().is_empty() && !path.is_dir() && parent.is_dir() {
        return Ok(());
    }
    let fix = if path.is_dir() {
        format!("name a file in that folder: --set router.trace_file={}/trace.jsonl", path.display())
    } else if parent.is_dir() {
        "name a file: --set router.trace_file=FILE".to_owned()
    } else {
        format!("create the folder {}, or name another file: --set router.trace_file=FILE", parent.display())
    };
    let error = anyhow!("router.trace_file = \"{}\": expected a file in a folder that exists", path.display());
    Err(Reason::new(error, fix))
}

fn api_keys(config: &Config) -> Result<(), Reason> {
    let Some(path) = &config.frontend.api_keys_file else { return Ok(()) };
    KeyFile::read(path).map(drop).map_err(|error| {
        let fix = advice::api_keys(&error);
        Reason::new(anyhow::Error::from(error).context("frontend.api_keys_file"), fix)
    })
}

/// Checks that a client of the shared store can be created, and that G3.5 and G4 are different folders.
fn shared_store(config: &Config) -> Result<(), Reason> {
    let Some(location) = &config.tiers.g4.url else { return Ok(()) };
    if config.tiers.g3_5.as_ref().is_some_and(|flash| same_place(&flash.path, location)) {
        let error = anyhow!("tiers.g3_5.path and tiers.g4.url are the same folder; expected two different ones");
        return Err(Reason::new(error, "name another folder for one of them, or remove tiers.g3_5"));
    }
    let client = location.client(&access(config), config.tiers.g4.request_timeout.0);
    client.map(drop).map_err(|error| {
        let error = anyhow!("tiers.g4.url = \"{location}\" cannot be used: {error}");
        Reason::new(error, advice::store(location))
    })
}

fn encryption(config: &Config) -> Result<(), Reason> {
    transforms::check(config).map_err(|error: SourceError| {
        let fix = advice::master_keys(&error);
        Reason::new(anyhow::Error::from(error).context("tiers.encryption"), fix)
    })
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
    native_sizes_on(Machine::detect(), config)
}

fn native_sizes_on(machine: Machine, config: &Config) -> anyhow::Result<NativeSizes> {
    let shape = model::shape(&config.model, &machine)?;
    let needs = Needs::of(&shape);
    let disks = sizes::usable(sizes::disks(&config.tiers, &config.data_dir, machine::space), needs.block);
    let sizes = Sizes::compute(&config.tiers, config.workers.count(), needs, &machine, &disks)?;
    Ok(NativeSizes { needs, sizes, disks, machine })
}

/// Checks the model, and what it is served with.
fn native(machine: &Machine, config: &Config) -> Result<(), Reason> {
    if let Err(error) = model::shape(&config.model, machine) {
        let fix = if error.is::<model::TooLarge>() {
            model::TooLarge::ADVICE.to_owned()
        } else {
            format!("correct --model (model = \"{}\")", config.model)
        };
        return Err(Reason::new(error, fix));
    }
    native_tiers(*machine, config)
}

/// Checks that memory and disks suffice for the model and the tiers, and the tiers for the guaranteed sizes of tenants.
fn native_tiers(machine: Machine, config: &Config) -> Result<(), Reason> {
    let NativeSizes { needs, sizes, mut disks, .. } = native_sizes_on(machine, config).map_err(|error| {
        let advice = error.downcast_ref::<sizes::Error>().map(sizes::Error::advice);
        Reason::new(error, advice.unwrap_or_else(|| format!("correct --model (model = \"{}\")", config.model)))
    })?;
    let domains = CacheDomains::open(&config.frontend)?;
    let domain = config.frontend.has_tenants().then_some(|tenant: &str| domains.of(tenant));
    let shares = quotas::shares(&config.tiers.quotas, quotas::Capacities::of(config, &sizes), domain);
    let shares = shares.map_err(|error| {
        let advice = error.advice();
        Reason::new(error, advice)
    })?;
    if machine::kernel_folder(&config.data_dir).is_some() {
        // Has been refused as a whole.
        disks.retain(|disk| !disk.folder.starts_with(&config.data_dir));
    }
    super::stores::check_disks(&disks, &shares, needs.block).map_err(|error| {
        let advice = error.advice.clone();
        Reason::new(error, advice)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_to_change_is_said_once() {
        let refused = Refused(vec![
            Reason::new(anyhow!("too little; use less: --set a=1"), "use less: --set a=1"),
            Reason::new(anyhow!("b = 3: too much"), "--set b=2"),
        ]);
        let reasons: Vec<(String, String)> = refused.reasons().collect();
        let reason = |problem: &str, fix: &str| (problem.to_owned(), fix.to_owned());
        assert_eq!(reasons, [reason("too little", "use less: --set a=1"), reason("b = 3: too much", "--set b=2")]);
        assert_eq!(refused.to_string(), "too little; use less: --set a=1\n       b = 3: too much");
    }
}
