//! The native engine and its tiers: the model, the stores, and the workers.

use super::banner::NativeFacts;
use super::drain_copies::OtherWorkers;
use super::health::Health;
use super::scope::Scope;
use super::sizes::{self, Disk, Needs, ShortContext, Shortage, Sizes};
use super::stores::{Stores, check_owners};
use super::transforms::Transforms;
use super::workers::{RunningWorker, Shared};
use super::{model, quotas};
use crate::config::{Config, Model};
use crate::process::machine::{self, Machine, Space};
use crate::process::with_causes;
use anyhow::{Context, anyhow};
use futures::future::{OptionFuture, join, join_all};
use kvbm::{BlockManager, Level, permissions};
use prometheus::Registry;
use spans::Tracer;
use std::ffi::OsStr;
use std::io;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep, timeout_at};
use tokio_util::sync::CancellationToken;
use tokio_util::task::AbortOnDropHandle;
use worker::handoff::Peers;
use worker::llama::Limits;
use worker::plane::WorkerId;
use worker::serve::{Cordon, Planes};

/// The native engine and its tiers, running.
pub(super) struct Native {
    pub(super) stores: Stores,
    pub(super) facts: NativeFacts,
    workers: Vec<RunningWorker>,
    scope: Scope,
    /// Drops the blocks of shredded domains.
    _shred_watch: Option<AbortOnDropHandle<()>>,
}

/// Interval at which a stop checks whether the stores that it writes to still answer. They are polled every second.
const AVAILABILITY_INTERVAL: Duration = Duration::from_millis(200);

/// Time for which a stop waits for an SSD that cannot be written to. Writing is tried again every second.
const UNWRITABLE_TIME: Duration = Duration::from_secs(3);

/// The folders of the G3 log. Logs those that have too little space for one.
fn usable_disks(config: &Config, block: u64) -> Vec<Disk> {
    let disks = sizes::disks(&config.tiers, &config.data_dir, machine::space);
    let usable = sizes::usable(disks.clone(), block);
    for disk in disks.iter().filter(|disk| !usable.contains(disk)) {
        let detail = disk.detail(machine::space(&disk.folder).free);
        tracing::warn!("too little free space for a block of the model; G3 is off there: {detail}");
    }
    usable
}

impl Native {
    /// Loads the model, opens the tiers, and starts the workers.
    pub(super) async fn start(
        config: &Config,
        planes: Planes,
        scope: Scope,
        (peers, tracer): (Peers, Tracer),
        health: &Health,
        registry: &Registry,
    ) -> anyhow::Result<Self> {
        permissions::create_configured_dir(&config.data_dir, is_ours)
            .with_context(|| format!("cannot create the data folder {}", config.data_dir.display()))
            .map_err(|error| with_another_folder(&error))?;
        check_owners(&sizes::disks(&config.tiers, &config.data_dir, machine::space)).await?;
        let machine = Machine::detect();
        let threads = config.threads.on(machine.threads);
        let runtime = model::open(&config.model, &config.data_dir, threads, &machine).await;
        let runtime = runtime.map_err(|error| {
            // Only a built-in model is written.
            let is_built_in = matches!(config.model, Model::BuiltIn(_));
            if is_built_in && is_not_writable(&error) { with_another_folder(&error) } else { error }
        })?;
        frontend::check_model(runtime.card())
            .map_err(|problem| anyhow!(problem))
            .context("the model cannot be served")?;
        let needs = Needs::of(&runtime.shape());
        let disks = usable_disks(config, needs.block);
        let sizes = Sizes::compute(&config.tiers, config.workers.count(), needs, &machine, &disks)?;
        if let Some(ShortContext { detail, advice }) = sizes.short_context(&needs) {
            tracing::warn!("{detail}; {advice}");
        }
        for disk in &disks {
            let Space { free, taken, .. } = machine::space(&disk.folder);
            if let Some(Shortage { detail, advice, .. }) = disk.shortage(&config.tiers, free, taken) {
                tracing::warn!("too little free space: {detail}; {advice}");
            }
        }
        let domains = frontend::CacheDomains::open(&config.frontend)?;
        let domain = config.frontend.has_tenants().then_some(|tenant: &str| domains.of(tenant));
        let shares = quotas::shares(&config.tiers.quotas, quotas::Capacities::of(config, &sizes), domain)?;
        let blocks = kvbm::Metrics::new(registry)?;
        let transforms = Transforms::open(config, &blocks).await?;
        let stores =
            Stores::open(config, &disks, &shares, (&planes, &scope), &transforms, needs.block, registry).await?;
        stores.observe(registry)?;
        stores.watch(health);
        let shared = Shared::new(Arc::clone(&runtime), sizes, planes, &stores, config.engine, blocks, registry)?;
        let shared = shared.with_quotas(shares).with_peers(peers).with_tracer(tracer).with_lease(config.nats.lease.0);
        let mut workers = Vec::new();
        for (number, role) in config.workers.roles().enumerate() {
            workers.push(shared.start(scope.worker(number as u64 + 1), role, health).await?);
        }
        let shred_watch = transforms.follow_shreds(workers.iter().map(|worker| worker.blocks().1));
        let facts = NativeFacts {
            model: Arc::clone(workers.first().map_or(runtime.card(), RunningWorker::card)),
            roles: config.workers.roles().collect(),
            threads,
            sizes,
            disks: disks.into_iter().map(|disk| disk.folder).collect(),
            data_dir: config.data_dir.clone(),
            g3_5: config.tiers.g3_5.clone(),
            g4: config.tiers.g4.url.clone(),
        };
        Ok(Self { stores, facts, workers, scope, _shred_watch: shred_watch })
    }

    /// The block manager of each worker.
    pub(super) fn managers(&self) -> Vec<(WorkerId, BlockManager)> {
        self.workers.iter().map(RunningWorker::blocks).collect()
    }

    /// The limits of the engine of each worker.
    pub(super) fn limits(&self) -> Vec<Arc<Limits>> {
        self.workers.iter().map(RunningWorker::limits).collect()
    }

    /// Takes each worker out of service and back.
    pub(super) fn cordons(&self) -> Vec<(WorkerId, Cordon)> {
        self.workers.iter().map(RunningWorker::cordon).collect()
    }

    /// Deregisters the workers, waits for running requests until `end_requests`, and writes blocks until `deadline`.
    /// Meanwhile `others` copy prefixes, if there are workers of other processes. `end` ends the requests that run
    /// longer. Returns the stores, which the router's index still follows.
    pub(super) async fn drain(
        self,
        end_requests: Instant,
        deadline: Instant,
        others: Option<OtherWorkers>,
        end: impl FnOnce(),
    ) -> Stores {
        let draining = self.workers.iter().map(|worker| (worker.instance(), worker.blocks().1)).collect();
        let (serving, managers): (Vec<_>, Vec<_>) = self.workers.into_iter().map(RunningWorker::into_parts).unzip();
        let ended = CancellationToken::new();
        let drained = async {
            let drained = join_all(serving.into_iter().map(worker::serve::Worker::drain));
            let drained = timeout_at(end_requests, drained).await;
            ended.cancel();
            drained
        };
        let copied: OptionFuture<_> =
            others.map(|others| others.copy_from(draining, end_requests, ended.clone())).into();
        let (drained, _) = join(drained, copied).await;
        if drained.is_err() {
            tracing::warn!("{}", ended_requests(&self.scope));
            end();
        }
        flush(&managers, &self.stores, deadline).await;
        self.stores
    }
}

/// The log line for requests that the workers still compute when their time is over.
fn ended_requests(scope: &Scope) -> &'static str {
    match scope {
        Scope::Process => {
            "the workers still compute requests after shutdown_timeout; the requests end here and no other worker \
             continues them; raise shutdown_timeout for longer requests"
        }
        Scope::Deployment(_) => {
            "the workers still compute requests after four fifths of shutdown_timeout; the requests end here, and \
             their frontends continue them on other workers; raise shutdown_timeout for longer requests"
        }
    }
}

/// Writes the queued blocks to each tier until `deadline`, except to a tier whose store does not answer, or whose
/// folders cannot be written to.
async fn flush(managers: &[BlockManager], stores: &Stores, deadline: Instant) {
    let flush_to = async |level: Level| {
        let flushed = join_all(managers.iter().map(|manager| manager.flush_level(level)));
        let why = tokio::select! {
            biased;
            flushed = timeout_at(deadline, flushed) => match flushed {
                Ok(_) => return,
                Err(_) => "the shutdown timeout is over",
            },
            () = until_unavailable(stores, level) => "the store does not answer",
            () = until_unwritable(stores, level) => "no folder of the tier can be written to",
        };
        tracing::warn!(
            tier = %level, reason = why,
            "queued blocks were not written to the tier; those that are in no other tier will be recomputed"
        );
    };
    join_all(stores.levels().into_iter().map(flush_to)).await;
}

/// Resolves when the store of a tier does not answer ([`Stores::is_unavailable`]), and not at once: with nothing
/// queued, the flush ends first.
async fn until_unavailable(stores: &Stores, level: Level) {
    loop {
        sleep(AVAILABILITY_INTERVAL).await;
        if stores.is_unavailable(level) {
            return;
        }
    }
}

/// Resolves when no folder of the tier could be written to for [`UNWRITABLE_TIME`]: the disk is full, or fails.
async fn until_unwritable(stores: &Stores, level: Level) {
    let mut writable_at = Instant::now();
    while writable_at.elapsed() < UNWRITABLE_TIME {
        sleep(AVAILABILITY_INTERVAL).await;
        if !stores.is_unwritable(level) {
            writable_at = Instant::now();
        }
    }
}

/// Whether an entry of the data folder is one that the program creates.
fn is_ours(name: &OsStr) -> bool {
    [sizes::G3_FOLDER, super::transforms::KEY_STORE, "models"].iter().any(|ours| name == *ours)
}

/// Whether the system refused to write a file or a folder.
fn is_not_writable(error: &anyhow::Error) -> bool {
    let mut causes = error.chain().filter_map(|cause| cause.downcast_ref::<io::Error>());
    causes.any(|cause| matches!(cause.kind(), io::ErrorKind::ReadOnlyFilesystem | io::ErrorKind::PermissionDenied))
}

/// An error of the data folder, with what to change.
fn with_another_folder(error: &anyhow::Error) -> anyhow::Error {
    anyhow!("{}; name a folder that can be written to: --data-dir DIR", with_causes(error))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_requests_of_a_deployment_continue_on_other_workers() {
        let continues = "their frontends continue them on other workers";
        assert!(ended_requests(&Scope::of("http://a:8100")).contains(continues));
        let alone = ended_requests(&Scope::Process);
        assert!(!alone.contains(continues) && alone.contains("after shutdown_timeout;"), "{alone}");
    }

    #[test]
    fn a_data_folder_that_cannot_be_written_to_is_an_error_with_advice() {
        let error =
            |kind: io::ErrorKind| anyhow::Error::from(io::Error::from(kind)).context("cannot load the model small");
        assert!(is_not_writable(&error(io::ErrorKind::ReadOnlyFilesystem)));
        assert!(is_not_writable(&error(io::ErrorKind::PermissionDenied)));
        assert!(!is_not_writable(&error(io::ErrorKind::NotFound)));
        let text = with_another_folder(&error(io::ErrorKind::ReadOnlyFilesystem)).to_string();
        assert!(text.starts_with("cannot load the model small: "), "{text}");
        assert!(text.ends_with("; name a folder that can be written to: --data-dir DIR"), "{text}");
    }
}
