//! `blockyard cache`: lists, verifies and collects stored blocks, also while other processes serve from the store. It
//! prints results to standard output and progress to standard error.

mod text;

use crate::commands::output;
use crate::config::{ByteSize, Config, Flag, HumanDuration, Sources};
use crate::node::{gc, sizes, stores, transforms};
use crate::process::machine::{self, Space};
use anyhow::{Context, anyhow, bail};
use clap::{Args, Subcommand};
use kvbm::crypt::Keyring;
use kvbm::object::gc::{Inventory, Policy};
use kvbm::object::{Collector, ObjectTotals, StoreLocation, Verification};
use kvbm::{Clock, DomainId, Level, SequenceHash, SetDigest, disk};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashSet};
use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// `blockyard cache`.
#[derive(Args, Debug)]
pub struct Cache {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand, Debug)]
enum Command {
    /// List the blocks in G4 and in the log of G3, by cache domain, fingerprint of the engine, and writer.
    ///
    /// With --g4 only that store is listed, unless --data-dir or --config also names the G3 of a node.
    Ls {
        #[command(flatten)]
        target: Target,
    },
    /// Remove objects that are expired, older than --max-age, or beyond --capacity.
    ///
    /// A run marks objects, so that every process stops reading them within seconds; a later run deletes them after the
    /// grace time. Several runs may be active at the same time, also while other processes serve.
    Gc {
        #[command(flatten)]
        target: Target,
        /// Remove objects that were not written or read for this time, like 720h. Reading the continuation of a prefix
        /// counts as reading the prefix [default: `tiers.g4.max_age`]
        #[arg(long, value_name = "TIME")]
        max_age: Option<HumanDuration>,
        /// Maximum size of what stays, like 500GiB; the least recently used objects are removed first
        /// [default: `tiers.g4.capacity`]
        #[arg(long, value_name = "SIZE")]
        capacity: Option<ByteSize>,
        /// Time from marking an object to deleting it, like 10m [default: `tiers.g4.gc_grace`, and 2m for shared flash]
        #[arg(long, value_name = "TIME")]
        grace: Option<HumanDuration>,
        /// Report what would be removed, and change nothing
        #[arg(long)]
        dry_run: bool,
    },
    /// Read every block of G4 and of the log of G3, and compare its checksum. The exit status is 1 when a block is
    /// corrupt.
    ///
    /// With --g4 only that store is read, unless --data-dir or --config also names the G3 of a node. The log of G3 is
    /// read only while no process uses it, and is not changed: corrupt blocks are dropped when they are loaded.
    Verify {
        #[command(flatten)]
        target: Target,
        /// In G4: remove objects that hold a corrupt block, with their other blocks, after `tiers.g4.gc_grace`; and
        /// remove entries of objects that are missing
        #[arg(long)]
        remove: bool,
    },
    /// Destroy the keys of a cache domain, so that its cached blocks cannot be used any more.
    ///
    /// After the command no process can decrypt a block of the domain that it does not have in memory. Running
    /// processes that reach the key store check it every 2 seconds: within 5 seconds each has dropped the domain from
    /// its memory (G1, G2, and blocks that are being loaded), and finds no block of it in any tier. A process that
    /// cannot reach the key store follows within 5 seconds of reaching it again; until then it uses the blocks that it
    /// has. Running requests finish with the blocks that they hold. After 10 more seconds new blocks are stored under a
    /// new key.
    ///
    /// The command needs tiers.encryption, with the same configuration as the processes. Without it there is no key to
    /// destroy and the command is refused: stop the processes, and delete the folders of G3 and G3.5 and the store. A
    /// domain that has never had a key is refused too, because its name is probably wrong.
    Shred {
        #[command(flatten)]
        target: Target,
        /// A tenant's name, or the 32 hexadecimal digits that `ls` shows
        #[arg(long, value_name = "NAME|ID")]
        domain: String,
        /// Also remove the encrypted blocks, after `tiers.g4.gc_grace`
        #[arg(long)]
        remove: bool,
    },
}

/// The stores, named with the configuration of `serve`.
#[derive(Args, Debug)]
#[command(args_override_self = true)]
struct Target {
    /// The store of G4: `s3://BUCKET/PREFIX`, `az://CONTAINER/PREFIX`, `gs://BUCKET/PREFIX`, or a folder
    /// [default: `tiers.g4.url`]
    #[arg(long, value_name = "URL|DIR")]
    g4: Option<String>,

    /// Use the folder of `tiers.g3_5.path` instead of G4
    #[arg(long = "g3-5")]
    g3_5: bool,

    /// Folder of a node, as for `serve`: its G3 log, and its keys when there is no G4
    /// [default: blockyard in `$XDG_CACHE_HOME`, else in `~/.cache`]
    #[arg(long, value_name = "DIR")]
    data_dir: Option<String>,

    /// TOML file with the configuration of `serve`; flags override its keys [default: none]
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,

    /// Set any key of the configuration, like tiers.g4.region=eu-west-1; may be repeated
    #[arg(long, value_name = "KEY=VALUE")]
    set: Vec<Flag>,

    /// Print JSON
    #[arg(long)]
    json: bool,
}

impl Target {
    /// Whether the command also covers the log of G3: not if --g4 is the only target given.
    fn has_g3(&self) -> bool {
        !self.g3_5 && (self.g4.is_none() || self.data_dir.is_some() || self.config.is_some())
    }
}

/// Runs the command.
pub fn run(cache: &Cache) -> anyhow::Result<()> {
    tokio::runtime::Builder::new_multi_thread().enable_all().build()?.block_on(execute(&cache.command))
}

async fn execute(command: &Command) -> anyhow::Result<()> {
    match command {
        Command::Ls { target } => list(target).await,
        Command::Gc { target, max_age, capacity, grace, dry_run } => {
            collect_garbage(target, *max_age, *capacity, *grace, *dry_run).await
        }
        Command::Verify { target, remove } => verify(target, *remove).await,
        Command::Shred { target, domain, remove } => shred(target, domain, *remove).await,
    }
}

async fn list(target: &Target) -> anyhow::Result<()> {
    let store = Store::open_or_local(target)?;
    let logs = if target.has_g3() { logs(&store.config)? } else { vec![] };
    if store.collector.is_none() && logs.is_empty() {
        return Err(nothing_stored(&store.config));
    }
    let inventory = match &store.collector {
        Some(collector) => Some(store.inventory(collector).await?),
        None => None,
    };
    let level = if target.g3_5 { Level::G3_5 } else { Level::G4 };
    let digests = digests(&logs, inventory.as_deref().map(|inventory| (level, inventory)));
    let holdings = inventory.map(|inventory| inventory.groups());
    let value = json!({ "g3": logs, "contents": holdings.as_deref().unwrap_or_default(), "digests": digests });
    print(target, &value, || logs.iter().map(text::log).chain(holdings.as_deref().map(text::holdings)).collect())
}

async fn collect_garbage(
    target: &Target,
    max_age: Option<HumanDuration>,
    capacity: Option<ByteSize>,
    grace: Option<HumanDuration>,
    dry_run: bool,
) -> anyhow::Result<()> {
    let (store, now) = (Store::open(target)?, Clock::system().now());
    let mut policy = store.policy.clone();
    policy.max_age = max_age.map_or(policy.max_age, |age| Some(age.0));
    if let Some(ByteSize(bytes)) = capacity {
        // Exactly this size, without headroom.
        (policy.capacity, policy.headroom) = (Some(bytes), 0);
    }
    policy.grace = grace.map_or(policy.grace, |grace| grace.0);
    let inventory = store.inventory(&store.collector).await?;
    let report = if dry_run {
        store.collector.dry_run(&inventory, &policy, now)
    } else {
        let now = store.collector.try_start(Duration::ZERO, now).await?.unwrap_or(now);
        store.collector.collect(&inventory, &policy, now).await?
    };
    print(target, &json!({ "dry_run": dry_run, "report": report }), || text::gc(&report, dry_run, policy.grace))
}

async fn verify(target: &Target, remove: bool) -> anyhow::Result<()> {
    let store = Store::open_or_local(target)?;
    let logs = if target.has_g3() { verify_logs(&store.config).await? } else { vec![] };
    if store.collector.is_none() && logs.is_empty() {
        return Err(nothing_stored(&store.config));
    }
    let keys = keys(&store.config).await?;
    let can_decrypt = async |domain, key| match &keys {
        Some(keys) => keys.opens(domain, key).await.map_err(io::Error::other),
        None => Ok(false),
    };
    let mut g3 = Vec::new();
    for log in logs {
        let mut undecryptable_blocks = 0;
        for (&(domain, key), blocks) in &log.keys {
            undecryptable_blocks += if can_decrypt(domain, key).await? { 0 } else { *blocks };
        }
        g3.push(VerifiedLog { log, undecryptable_blocks });
    }
    let verification = match &store.collector {
        Some(collector) => {
            let inventory = store.inventory(collector).await?;
            Some(collector.verify(&inventory, remove, can_decrypt, progress("objects")).await?)
        }
        None => None,
    };
    print(target, &json!(Verified { store: verification.as_ref(), g3: &g3 }), || {
        g3.iter().map(text::verified_log).chain(verification.as_ref().map(text::verified)).collect()
    })?;
    let damaged = |seen: &Verification| {
        seen.corrupt_blocks + seen.missing_objects + seen.corrupt_manifests + seen.unreadable_manifests > 0
    };
    if verification.as_ref().is_some_and(damaged) || g3.iter().any(|verified| !verified.log.is_intact()) {
        bail!("found corrupt, missing or unreadable data; the affected blocks are recomputed when needed");
    }
    Ok(())
}

async fn shred(target: &Target, domain: &str, remove: bool) -> anyhow::Result<()> {
    let store = Store::open_or_local(target)?;
    let Some(keys) = keys(&store.config).await? else {
        bail!(
            "tiers.encryption is not set, so there is no key to destroy; stop the processes and delete \
             what they stored"
        );
    };
    let domain = match domain.parse::<DomainId>() {
        Ok(id) => id,
        Err(()) => frontend::CacheDomains::open(&store.config.frontend)?.of(domain).id(),
    };
    // A wrong domain must not look like one whose keys are destroyed. Nothing is written for it.
    if !keys.knows(domain).await? {
        bail!(
            "domain {domain} has no key in this key store, so nothing was destroyed; check the name, and \
             frontend.tenant_secret_file: the id of a tenant is derived from it (`blockyard cache ls` shows the ids)"
        );
    }
    let destroyed = keys.shred(domain).await?;
    let removed = match (&store.collector, remove) {
        (Some(collector), true) => {
            let inventory = store.inventory(collector).await?;
            collector.mark_domain(&inventory, domain).await?
        }
        _ => ObjectTotals::default(),
    };
    let value = json!({ "domain": domain.to_string(), "destroyed_keys": destroyed, "marked": removed });
    print(target, &value, || text::shredded(domain, destroyed as u64, removed.objects))
}

/// The store, and the configuration that names it.
struct Store<C = Collector> {
    config: Config,
    policy: Policy,
    /// Where the store is, for errors.
    location: Option<StoreLocation>,
    collector: C,
}

impl<C> Store<C> {
    /// What is in the store, which `collector` is for.
    async fn inventory(&self, collector: &Collector) -> anyhow::Result<Arc<Inventory>> {
        let at = || self.location.as_ref().map_or_else(|| "the store".to_owned(), ToString::to_string);
        collector.scan(progress("manifests")).await.with_context(|| {
            format!("{} cannot be read (`blockyard doctor` with the same flags says what to change)", at())
        })
    }
}

impl Store {
    fn open(target: &Target) -> anyhow::Result<Self> {
        let Store { config, policy, location, collector } = Store::open_or_local(target)?;
        let collector = collector.context("no shared store is configured; name one with: --g4 URL|DIR")?;
        Ok(Self { config, policy, location, collector })
    }
}

impl Store<Option<Collector>> {
    fn open_or_local(target: &Target) -> anyhow::Result<Self> {
        let own = [("--g4", "tiers.g4.url", &target.g4), ("--data-dir", "data_dir", &target.data_dir)];
        let own = own.into_iter().filter_map(|(name, key, value)| Some(Flag::own(name, key, value.as_deref()?)));
        let sources = Sources::of_process(target.config.clone(), target.set.iter().cloned().chain(own).collect());
        let (config, _) = Config::load(&sources)?;
        machine::limit_umask(config.shared_folders());
        let (location, policy) = match &config.tiers.g3_5 {
            Some(flash) if target.g3_5 => {
                (Some(StoreLocation::Folder(flash.path.clone())), gc::g3_5_policy(&config, flash)?)
            }
            None if target.g3_5 => bail!(
                "tiers.g3_5.path is not set, so there is no G3.5 folder; set it: --set \
                 'tiers.g3_5={{path=\"DIR\", capacity=\"SIZE\"}}'"
            ),
            _ => (config.tiers.g4.url.clone(), gc::policy(&config)?),
        };
        if let Some(StoreLocation::Folder(folder)) = &location
            && !folder.exists()
        {
            bail!("the folder {} does not exist", folder.display());
        }
        let open = |location| {
            Collector::open_location(location, &stores::access(&config), config.tiers.g4.request_timeout.0)
                .with_context(|| format!("{location} cannot be used"))
        };
        let collector = location.as_ref().map(open).transpose()?;
        Ok(Self { config, policy, location, collector })
    }
}

async fn keys(config: &Config) -> anyhow::Result<Option<Arc<Keyring>>> {
    match &config.tiers.encryption {
        Some(encryption) => Ok(Some(transforms::keys(config, encryption).await.context("tiers.encryption")?)),
        None => Ok(None),
    }
}

/// Prints the progress to standard error if it is a terminal.
fn progress(of: &str) -> impl Fn(u64, u64) {
    let is_terminal = io::stderr().is_terminal();
    move |done, total| {
        if is_terminal && (done.is_multiple_of(64) || done == total) {
            let end = if done == total { "\n" } else { "" };
            output::progress(format_args!("\r{done} of {total} {of} read{end}"));
        }
    }
}

/// Prints the result.
fn print(target: &Target, value: &Value, text: impl FnOnce() -> String) -> anyhow::Result<()> {
    let text = if target.json { format!("{value}\n") } else { text() };
    output::print(&text)
}

/// The folders of G3.
fn disks(config: &Config) -> Vec<sizes::Disk> {
    sizes::disks(&config.tiers, &config.data_dir, |_| Space::default())
}

/// The error when there is neither a G3 log nor a shared store.
fn nothing_stored(config: &Config) -> anyhow::Error {
    let folders: Vec<String> = disks(config).iter().map(|disk| disk.folder.display().to_string()).collect();
    let log = if folders.is_empty() { "G3 is off".to_owned() } else { format!("no G3 log in {}", folders.join(", ")) };
    anyhow!("{log}, and no store is configured; name one with --data-dir or --g4")
}

/// Inspects each folder of G3 that contains a log.
fn logs(config: &Config) -> anyhow::Result<Vec<disk::LogContents>> {
    let (folders, now) = (disks(config), Clock::system().now());
    let inspect = |disk: &sizes::Disk| {
        let folder = &disk.folder;
        disk::inspect(folder, now)
            .with_context(|| format!("the log in {} cannot be read", folder.display()))
            .transpose()
    };
    folders.iter().filter_map(inspect).collect()
}

/// JSON of `cache verify`: the result of the shared store, if there is one, and of each G3 log.
#[derive(Serialize)]
struct Verified<'a> {
    #[serde(flatten)]
    store: Option<&'a Verification>,
    g3: &'a [VerifiedLog],
}

/// Result of reading a G3 log.
#[derive(Serialize)]
struct VerifiedLog {
    #[serde(flatten)]
    log: disk::Verification,
    /// Valid blocks whose data key is not available here.
    undecryptable_blocks: u64,
}

/// Reads the logs of G3. A log that a process uses is refused.
async fn verify_logs(config: &Config) -> anyhow::Result<Vec<disk::Verification>> {
    let folders = disks(config);
    let read = move |folder: PathBuf| match disk::verify(&folder, progress("segments")) {
        Err(disk::OpenError::Owned { folder, pid }) => {
            let owner = pid.map_or_else(|| "another process".into(), |pid| format!("process {pid}"));
            bail!(
                "the log in {} is in use by {owner}; it can be verified after that process has stopped",
                folder.display()
            )
        }
        read => {
            read.with_context(|| format!("the log in {} cannot be read", folder.display())).map(IntoIterator::into_iter)
        }
    };
    // Reading a disk would block an async thread.
    let all = move || folders.into_iter().map(|disk| read(disk.folder)).collect::<anyhow::Result<Vec<_>>>();
    Ok(tokio::task::spawn_blocking(all).await??.into_iter().flatten().collect())
}

/// Digest of the blocks in each tier, comparable with those of `/admin/index`.
fn digests(logs: &[disk::LogContents], shared: Option<(Level, &Inventory)>) -> BTreeMap<&'static str, SetDigest> {
    let distinct = |names: &mut dyn Iterator<Item = SequenceHash>| names.collect::<HashSet<_>>().into_iter().collect();
    let g3 = (!logs.is_empty()).then(|| distinct(&mut logs.iter().flat_map(|log| log.hashes.iter().copied())));
    let shared =
        shared.map(|(level, inventory)| (level.name(), distinct(&mut inventory.hashes(Clock::system().now()))));
    g3.map(|digest| (Level::G3.name(), digest)).into_iter().chain(shared).collect()
}
