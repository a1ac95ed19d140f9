//! The transforms of blocks below G2: none, compression, encryption, or both.
//!
//! The key store must be reachable for every process that shares the blocks. It is beside G4 if G4 is configured, else
//! in the folder of G3.5, else in the data folder.

use super::stores::access;
use crate::config::{Compression, Config, Encryption};
use anyhow::Context;
use kvbm::codec::{self, decoded, encoded};
use kvbm::crypt::{Environment, KeySource, Keyring, MetadataKeys, SourceError, encrypted};
use kvbm::object::StoreLocation;
use kvbm::{BlockManager, Metrics, Tier};
use std::path::Path;
use std::sync::Arc;
use tokio_util::task::AbortOnDropHandle;

/// The transforms that every tier below G2 is wrapped in.
pub(crate) struct Transforms {
    compression: Compression,
    keys: Option<Arc<Keyring>>,
    metadata: Option<Arc<MetadataKeys>>,
    metrics: Metrics,
}

/// Folder or prefix of the key store, within the shared store or a folder.
pub(super) const KEY_STORE: &str = "keys";

impl Transforms {
    /// Reads the master keys, if encryption is configured.
    pub(crate) async fn open(config: &Config, metrics: &Metrics) -> anyhow::Result<Self> {
        let keys = match &config.tiers.encryption {
            Some(encryption) => Some(keys(config, encryption).await.context("tiers.encryption")?),
            None => None,
        };
        let metadata = match &keys {
            Some(keys) => Some(MetadataKeys::open(keys.clone()).await.context("tiers.encryption")?),
            None => None,
        };
        Ok(Self { compression: config.tiers.compression, keys, metadata, metrics: metrics.clone() })
    }

    /// The keys that authenticate footers and manifests, if encryption is configured.
    pub(crate) fn metadata(&self) -> Option<Arc<MetadataKeys>> {
        self.metadata.clone()
    }

    /// Drops the blocks of shredded domains from the memory of `managers`, until the handle is dropped.
    pub(crate) fn follow_shreds(&self, managers: impl Iterator<Item = BlockManager>) -> Option<AbortOnDropHandle<()>> {
        let keys = self.keys.as_ref()?;
        let purgers: Vec<_> = managers.map(|manager| manager.purger()).collect();
        keys.on_shred(move |domain| {
            // Two rounds: managers load blocks from each other, so a purged block may come back once.
            let rounds = [(); 2].map(|()| purgers.iter().map(|purge| purge(domain)).sum::<usize>());
            tracing::info!(
                %domain, blocks = rounds.iter().sum::<usize>(),
                "the domain was shredded; its blocks in memory are dropped"
            );
        });
        Some(keys.watch())
    }

    /// The tier, with its blocks transformed: compressed first, then encrypted.
    pub(crate) fn wrap(&self, tier: Arc<dyn Tier>) -> Arc<dyn Tier> {
        let tier = match &self.keys {
            Some(keys) => encrypted(tier, keys.clone(), self.metrics.clone()),
            None => tier,
        };
        let metrics = self.metrics.clone();
        match self.compression {
            Compression::Off => decoded(tier, metrics),
            Compression::Auto => encoded(tier, codec::Mode::Faster, metrics),
            Compression::Always => encoded(tier, codec::Mode::Smaller, metrics),
        }
    }
}

/// Checks that the master keys can be read, if encryption is configured.
pub(super) fn check(config: &Config) -> Result<(), SourceError> {
    let Some(Encryption { keys }) = &config.tiers.encryption else { return Ok(()) };
    keys.check(&environment(config, keys))
}

/// The environment variable with the master keys, as the configuration loader read it.
fn environment(config: &Config, keys: &KeySource) -> Environment {
    let held = config.master_keys.clone();
    let wanted = match keys {
        KeySource::Env(name) => name.clone(),
        KeySource::File(_) | KeySource::Command(_) => String::new(),
    };
    Arc::new(move |name| held.as_ref().filter(|_| name == wanted).map(|secret| secret.0.clone()))
}

/// The data keys of all domains.
pub(crate) async fn keys(config: &Config, Encryption { keys }: &Encryption) -> anyhow::Result<Arc<Keyring>> {
    let environment = environment(config, keys);
    let in_folder =
        async |folder: &Path| Keyring::in_folder(&folder.join(KEY_STORE), keys.clone(), environment.clone()).await;
    let opened = match &config.tiers.g4.url {
        None => in_folder(config.tiers.g3_5.as_ref().map_or(&config.data_dir, |flash| &flash.path)).await,
        Some(StoreLocation::Folder(folder)) => in_folder(folder).await,
        Some(location @ StoreLocation::Cloud { prefix, .. }) => {
            let client =
                location.client(&access(config), config.tiers.g4.request_timeout.0)?.context("a cloud has a client")?;
            Keyring::open(client, prefix.clone().join(KEY_STORE).as_ref(), keys.clone(), environment).await
        }
    };
    Ok(opened?)
}
