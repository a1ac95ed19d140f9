//! The data keys of all domains: unwrapped in memory, wrapped in the key store.
//!
//! Keys that are not in memory are fetched on use. A domain without a key gets one, which is stored before it is
//! used. While keys are in use, the key store is listed every half minute, and keys that another process shredded are
//! dropped. Keys in memory stay usable during an outage of the key store.

mod known;
mod rewrap;

pub(super) use self::known::KeyLookup;

use self::known::KnownKeys;
use super::cipher::DataKey;
use super::key_source::{Environment, KeySource};
use super::key_store::{KeyEntry, KeyState, KeyStore, PARALLEL, ShredNotice};
use super::master_key::MasterKeys;
use super::{KeyError, MasterKeyId, metadata};
use crate::block::{DomainId, KeyId};
use crate::permissions;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashSet;
use std::ffi::OsStr;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// Interval at which a process reads notices of shredded domains.
const WATCH_INTERVAL: Duration = Duration::from_secs(2);
/// A shredded domain gets no new key for this time after this process learns of it: blocks from before may still be on
/// their way to the tier, and must not be stored under the new key.
const NEW_KEY_DELAY: Duration = Duration::from_secs(10);
/// Interval at which the key store is listed: how long a key may be used after another process shredded it, if notices
/// are not read.
const REFRESH_INTERVAL: Duration = Duration::from_secs(30);
/// Minimum interval between two reads of a source that lacks a key.
const REREAD: Duration = Duration::from_secs(10);
/// Time without requests after the key store failed, so that one request waits for it and not one per block.
const COOLDOWN: Duration = Duration::from_secs(5);
/// Maximum number of missing keys that are remembered until the next refresh, and not requested again.
const MAX_UNKNOWN: usize = 4096;

/// The data keys of all domains. Tiers that share a key store share a keyring.
pub struct Keyring {
    store: KeyStore,
    source: KeySource,
    environment: Environment,
    known: Mutex<KnownKeys>,
    /// Serializes operations on the key store: fetching a key, creating one, shredding.
    serial: tokio::sync::Mutex<()>,
    /// Callbacks that drop a shredded domain's blocks in memory.
    purgers: Mutex<Vec<Purger>>,
}

type Purger = Box<dyn Fn(DomainId) + Send + Sync>;

impl Keyring {
    /// Opens a keyring with its key store under `prefix` of an object store. Reads the master keys, and rewraps data
    /// keys with the first one if the key store is reachable.
    pub async fn open(
        store: Arc<dyn ObjectStore>,
        prefix: &str,
        source: KeySource,
        environment: Environment,
    ) -> Result<Arc<Self>, KeyError> {
        let masters = read(&source, &environment).await?;
        let keys = Arc::new(Self {
            store: KeyStore::new(store, Path::from(prefix)),
            source,
            environment,
            known: Mutex::new(KnownKeys::new(masters)),
            serial: tokio::sync::Mutex::default(),
            purgers: Mutex::default(),
        });
        let opening = async {
            keys.rewrap().await?;
            let notices = keys.store.notices().await?;
            let mut known = keys.known();
            known.notices.extend(notices);
            known.opened = true;
            Ok(())
        };
        match opening.await {
            // The process starts without the key store; domains become readable once it is reachable.
            Err(error @ (KeyError::Store(_) | KeyError::Timeout)) => {
                tracing::warn!(%error, "cannot read the data keys; encrypted blocks count as misses");
            }
            done => done?,
        }
        Ok(keys)
    }

    /// Registers a callback for each domain that this process learns was shredded. It is called before the domain can
    /// get a new key, and must drop the domain's blocks in memory.
    pub fn on_shred(&self, purge: impl Fn(DomainId) + Send + Sync + 'static) {
        self.purgers.lock().push(Box::new(purge));
    }

    /// Reads notices of shredded domains every two seconds until the handle is dropped.
    #[must_use = "dropping it ends the watch"]
    pub fn watch(self: &Arc<Self>) -> AbortOnDropHandle<()> {
        let keys = self.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            let mut failing = false;
            loop {
                tokio::time::sleep(WATCH_INTERVAL).await;
                let result = keys.apply_notices().await;
                match &result {
                    Err(error) if !failing => {
                        tracing::warn!(%error, "cannot read notices of shredded domains; cached keys stay in use");
                    }
                    Ok(()) if failing => tracing::info!("reading notices of shredded domains works again"),
                    _ => {}
                }
                failing = result.is_err();
            }
        }))
    }

    /// Applies new notices of shredded domains.
    async fn apply_notices(&self) -> Result<(), KeyError> {
        let notices = self.store.notices().await?;
        let fresh: Vec<ShredNotice> = {
            let mut known = self.known();
            known.opened = true;
            known.notices.retain(|notice| notices.contains(notice));
            notices.into_iter().filter(|notice| !known.notices.contains(notice)).collect()
        };
        for notice in fresh {
            let _serial = self.serial.lock().await;
            // Drops the keys first: later loads are misses, and blocks loaded before are purged.
            let entries = self.store.list(Some(notice.domain)).await?;
            if !self.apply_listing(&entries, Some(notice.domain)).await?.contains(&notice.domain) {
                self.purge(notice.domain);
            }
            self.known().notices.insert(notice);
        }
        Ok(())
    }

    fn purge(&self, domain: DomainId) {
        self.known().recently_shredded.insert(domain, Instant::now());
        let purgers = self.purgers.lock();
        purgers.iter().for_each(|purge| purge(domain));
    }

    /// Opens a keyring with its key store in a folder, which is created if necessary. Writes are synced to the disk.
    pub async fn in_folder(
        folder: &std::path::Path,
        source: KeySource,
        environment: Environment,
    ) -> Result<Arc<Self>, KeyError> {
        let created = match (folder.parent(), folder.file_name().and_then(OsStr::to_str)) {
            (Some(root), Some(name)) => permissions::create_private_dirs_below(root, &[name]),
            _ => permissions::create_dir_all(folder),
        };
        created.map_err(|error| object_store::Error::Generic {
            store: "folder",
            source: format!("{}: {error}", folder.display()).into(),
        })?;
        let store = LocalFileSystem::new_with_prefix(folder)?.with_fsync(true);
        Self::open(Arc::new(store), "", source, environment).await
    }

    /// Whether the key store knows the domain: it has a data key, or had one that was shredded.
    pub async fn knows(&self, domain: DomainId) -> Result<bool, KeyError> {
        Ok(!self.store.list(Some(domain)).await?.is_empty())
    }

    /// Destroys the data keys of a domain, which makes all its blocks in all tiers permanent misses. Other processes
    /// that [watch](Self::watch) follow within seconds, and drop the domain's blocks in memory. A domain that is used
    /// again gets a new key. A domain without a key is dropped from memory as well: a caller to whom that is a mistake
    /// asks [`knows`](Self::knows) first. Returns the number of destroyed keys.
    pub async fn shred(&self, domain: DomainId) -> Result<usize, KeyError> {
        if domain == metadata::DOMAIN {
            return Err(KeyError::Reserved(domain));
        }
        let _serial = self.serial.lock().await;
        let entries = self.store.list(Some(domain)).await?;
        let keys: HashSet<KeyId> =
            entries.iter().filter(|entry| entry.state != KeyState::Shredded).map(|entry| entry.key).collect();
        // First the `shredded` entries, which override wrapped keys, then the keys: safe if the process crashes in
        // between.
        let put = |&key: &KeyId| self.store.put(KeyEntry { domain, key, state: KeyState::Shredded }, Bytes::new());
        let putting: Vec<_> = keys.iter().map(put).collect();
        stream::iter(putting).buffer_unordered(PARALLEL).try_collect::<()>().await?;
        self.store.notify(domain).await?;
        if !self.apply_listing(&self.store.list(Some(domain)).await?, Some(domain)).await?.contains(&domain) {
            self.purge(domain);
        }
        tracing::info!(%domain, keys = keys.len(), "domain shredded");
        Ok(keys.len())
    }

    /// Whether this process can decrypt blocks of a domain under a key. False if the key was shredded, is corrupt, or
    /// is wrapped by an unknown master key.
    pub async fn opens(self: &Arc<Self>, domain: DomainId, key: KeyId) -> Result<bool, KeyError> {
        match self.find(domain, key).await {
            Ok(found) => Ok(matches!(found, KeyLookup::Key(_))),
            Err(KeyError::UnknownMasterKey { .. } | KeyError::Corrupt { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads the source and lists the key store now.
    pub async fn refresh(&self) -> Result<(), KeyError> {
        let _serial = self.serial.lock().await;
        self.read().await?;
        self.refresh_locked().await
    }

    async fn refresh_locked(&self) -> Result<(), KeyError> {
        self.apply_listing(&self.store.list(None).await?, None).await?;
        let mut known = self.known();
        known.unknown.clear();
        known.refreshed = Instant::now();
        Ok(())
    }

    /// The ids of a domain's stored data keys that are not shredded.
    pub(super) async fn listed(&self, domain: DomainId) -> Result<HashSet<KeyId>, KeyError> {
        let _serial = self.serial.lock().await;
        let entries = self.store.list(Some(domain)).await?;
        self.apply_listing(&entries, Some(domain)).await?;
        let known = self.known();
        let usable = entries.iter().filter(|entry| !known.shredded.contains(&(domain, entry.key)));
        Ok(usable.map(|entry| entry.key).collect())
    }

    /// The key under which blocks of a domain were encrypted.
    pub(super) async fn find(self: &Arc<Self>, domain: DomainId, key: KeyId) -> Result<KeyLookup, KeyError> {
        self.refresh_if_due();
        if let Some(found) = self.known().get(domain, key) {
            return Ok(found);
        }
        let _serial = self.serial.lock().await;
        if let Some(found) = self.known().get(domain, key) {
            return Ok(found);
        }
        let fetched = self.with_cooldown(self.load(domain, key)).await?;
        let mut known = self.known();
        if known.shredded.contains(&(domain, key)) {
            return Ok(KeyLookup::Shredded);
        }
        let Some(data) = fetched else {
            if known.unknown.len() < MAX_UNKNOWN {
                known.unknown.insert((domain, key));
            }
            return Ok(KeyLookup::Unknown);
        };
        known.unwrapped.insert((domain, key), data.clone());
        Ok(KeyLookup::Key(data))
    }

    /// The key that encrypts new blocks of a domain.
    pub(super) async fn encryption_key(self: &Arc<Self>, domain: DomainId) -> Result<Arc<DataKey>, KeyError> {
        self.refresh_if_due();
        let ready = || self.known().encryption_keys.get(&domain).cloned();
        if let Some(key) = ready() {
            return Ok(key);
        }
        self.check_not_recently_shredded(domain)?;
        let _serial = self.serial.lock().await;
        if let Some(key) = ready() {
            return Ok(key);
        }
        self.with_cooldown(self.load_or_create(domain)).await
    }

    async fn load(&self, domain: DomainId, key: KeyId) -> Result<Option<Arc<DataKey>>, KeyError> {
        let entries = self.store.list(Some(domain)).await?;
        self.apply_listing(&entries, Some(domain)).await?;
        match &wrapping(&entries, key)[..] {
            [] => Ok(None),
            masters => self.fetch(domain, key, masters).await,
        }
    }

    async fn load_or_create(&self, domain: DomainId) -> Result<Arc<DataKey>, KeyError> {
        let entries = self.store.list(Some(domain)).await?;
        self.apply_listing(&entries, Some(domain)).await?;
        let mut candidates: Vec<KeyId> = entries.iter().map(|entry| entry.key).collect();
        candidates.sort_unstable();
        candidates.dedup();
        candidates.retain(|key| !self.known().shredded.contains(&(domain, *key)));
        // The listing may have shown that the domain was shredded.
        self.check_not_recently_shredded(domain)?;
        for key in candidates {
            match self.fetch(domain, key, &wrapping(&entries, key)).await {
                Ok(Some(data)) => return Ok(self.set_encryption_key(domain, data)),
                Ok(None) => {}
                Err(error @ (KeyError::UnknownMasterKey { .. } | KeyError::Corrupt { .. })) => {
                    tracing::warn!(%error, "cannot use a data key; it is skipped");
                }
                Err(error) => return Err(error),
            }
        }
        let data = Arc::new(DataKey::random()?);
        self.store_key(domain, &data).await?;
        tracing::info!(%domain, key = %data.id(), "data key created");
        Ok(self.set_encryption_key(domain, data))
    }

    /// An error while blocks from before the domain was shredded may still be on their way to the tier.
    fn check_not_recently_shredded(&self, domain: DomainId) -> Result<(), KeyError> {
        let mut known = self.known();
        known.recently_shredded.retain(|_, since| since.elapsed() < NEW_KEY_DELAY);
        if known.recently_shredded.contains_key(&domain) { Err(KeyError::RecentlyShredded(domain)) } else { Ok(()) }
    }

    /// Makes a request to the key store, unless it failed recently.
    async fn with_cooldown<T>(&self, request: impl Future<Output = Result<T, KeyError>>) -> Result<T, KeyError> {
        if self.known().failed.is_some_and(|failed| failed.elapsed() < COOLDOWN) {
            return Err(KeyError::Timeout);
        }
        let answer = request.await;
        let failed = matches!(answer, Err(KeyError::Store(_) | KeyError::Timeout));
        self.known().failed = failed.then(Instant::now);
        answer
    }

    fn set_encryption_key(&self, domain: DomainId, data: Arc<DataKey>) -> Arc<DataKey> {
        let mut known = self.known();
        known.unwrapped.insert((domain, data.id()), data.clone());
        known.encryption_keys.insert(domain, data.clone());
        data
    }

    /// Fetches a key that the master keys `by` wrap, and unwraps it; `None` if it does not exist any more.
    async fn fetch(&self, domain: DomainId, key: KeyId, by: &[MasterKeyId]) -> Result<Option<Arc<DataKey>>, KeyError> {
        let has = |masters: &MasterKeys| by.iter().copied().find(|master| masters.has(*master));
        let mut masters = self.known().masters.clone();
        if has(&masters).is_none() {
            self.reread().await?;
            masters = self.known().masters.clone();
        }
        let Some(master) = has(&masters) else {
            let Some(&master) = by.first() else { return Ok(None) };
            return Err(KeyError::UnknownMasterKey { domain, key, master });
        };
        let Some(bytes) = self.store.get(domain, key, master).await? else { return Ok(None) };
        Ok(Some(Arc::new(masters.unwrap(domain, key, master, &bytes)?)))
    }

    /// Wraps a key and stores it.
    async fn store_key(&self, domain: DomainId, data: &DataKey) -> Result<(), KeyError> {
        let masters = self.known().masters.clone();
        let wrapped = Bytes::copy_from_slice(&masters.wrap(domain, data)?);
        self.store.put(KeyEntry { domain, key: data.id(), state: KeyState::Wrapped(masters.first()) }, wrapped).await
    }

    /// Applies a listing of a domain, or of all: drops shredded keys, and deletes their remaining wrapped copies.
    /// Purges and returns the newly shredded domains.
    async fn apply_listing(
        &self,
        entries: &[KeyEntry],
        domain: Option<DomainId>,
    ) -> Result<HashSet<DomainId>, KeyError> {
        let of = |shredded: bool| {
            let these = entries.iter().filter(move |entry| (entry.state == KeyState::Shredded) == shredded);
            these.map(|entry| (entry.domain, entry.key)).collect::<HashSet<_>>()
        };
        let (shredded, wrapped) = (of(true), of(false));
        let fresh: HashSet<DomainId> = {
            let mut known = self.known();
            let is_removed = |of: DomainId, key: KeyId| {
                let listed = domain.is_none_or(|domain| domain == of);
                listed && (shredded.contains(&(of, key)) || !wrapped.contains(&(of, key)))
            };
            known.unwrapped.retain(|&(of, key), _| !is_removed(of, key));
            known.encryption_keys.retain(|&of, data| !is_removed(of, data.id()));
            let fresh = shredded.iter().filter(|key| known.opened && !known.shredded.contains(key));
            let fresh = fresh.map(|(domain, _)| *domain).collect();
            known.shredded.extend(&shredded);
            fresh
        };
        for domain in &fresh {
            self.purge(*domain);
        }
        let left = entries.iter().filter(|entry| entry.state != KeyState::Shredded);
        let left = left.filter(|entry| shredded.contains(&(entry.domain, entry.key)));
        self.store.remove(left.copied().collect()).await?;
        Ok(fresh)
    }

    /// Reads the source again unless it was read recently.
    async fn reread(&self) -> Result<(), KeyError> {
        if self.known().read.elapsed() < REREAD { Ok(()) } else { self.read().await }
    }

    async fn read(&self) -> Result<(), KeyError> {
        let masters = read(&self.source, &self.environment).await?;
        let mut known = self.known();
        known.masters = Arc::new(masters);
        known.read = Instant::now();
        Ok(())
    }

    /// Starts a refresh in the background if one is due.
    fn refresh_if_due(self: &Arc<Self>) {
        {
            let mut known = self.known();
            if known.refreshed.elapsed() < REFRESH_INTERVAL {
                return;
            }
            known.refreshed = Instant::now();
        }
        let keys = self.clone();
        tokio::spawn(async move {
            let _serial = keys.serial.lock().await;
            if let Err(error) = keys.refresh_locked().await {
                tracing::warn!(
                    %error,
                    "cannot read the key store; cached keys stay in use, and domains shredded elsewhere stay readable"
                );
            }
        });
    }

    fn known(&self) -> MutexGuard<'_, KnownKeys> {
        // Each change under this lock is one insertion or one filter.
        self.known.lock()
    }
}

impl fmt::Debug for Keyring {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.known();
        f.debug_struct("Keyring")
            .field("master", &known.masters.first())
            .field("unwrapped", &known.unwrapped.len())
            .field("shredded", &known.shredded.len())
            .finish_non_exhaustive()
    }
}

fn wrapping(entries: &[KeyEntry], key: KeyId) -> Vec<MasterKeyId> {
    let by = |entry: &KeyEntry| match entry.state {
        KeyState::Wrapped(master) if entry.key == key => Some(master),
        _ => None,
    };
    entries.iter().filter_map(by).collect()
}

async fn read(source: &KeySource, environment: &Environment) -> Result<MasterKeys, KeyError> {
    let (source, environment) = (source.clone(), environment.clone());
    let reading = tokio::task::spawn_blocking(move || source.read(&environment));
    Ok(reading.await.expect("reading a source does not panic")?)
}
