//! The data keys of all domains: unwrapped ones in memory, wrapped ones on their shelf.
//!
//! A key that is needed and not in memory is fetched; a domain without one gets one, which rests before it is used. Every
//! half minute, while keys are in use, the shelf is looked at again: what another process shredded is forgotten here.
//! Keys in memory outlive an outage of the shelf.

use super::cipher::DataKey;
use super::key_source::{Environment, KeySource};
use super::key_store::{Entry, Notice, PARALLEL, Shelf, State};
use super::master_key::Masters;
use super::{KeyError, MasterId, metadata};
use crate::block::{DomainId, KeyId};
use crate::permissions;
use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream};
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::path::Path;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::ffi::OsStr;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;

/// How often a running process looks for notices of shredded domains.
const WATCH: Duration = Duration::from_secs(2);
/// A domain that was shredded gets no new key for so long after this process has learned of it: until then blocks from before may
/// still be on their way down, and must not come to rest under the new key.
const SETTLE: Duration = Duration::from_secs(10);
/// How long a key may be used after another process shredded it, where notices are not read.
const REFRESH: Duration = Duration::from_secs(30);
/// A source that lacks a key is asked again after so long.
const REREAD: Duration = Duration::from_secs(10);
/// A shelf that failed is left alone for so long: one request waits for it, not each block's.
const REST: Duration = Duration::from_secs(5);
/// Keys that were looked for in vain and are not looked for again until the next refresh.
const UNKNOWN: usize = 4096;

/// The data keys of all domains. To be shared by the tiers that share a shelf.
pub struct Keys {
    shelf: Shelf,
    source: KeySource,
    environment: Environment,
    known: Mutex<Known>,
    /// Held over what must not be done twice at once: fetching a key, making one, shredding.
    slow: tokio::sync::Mutex<()>,
    /// What makes a shredded domain's blocks in memory misses.
    purgers: Mutex<Vec<Purger>>,
}

type Purger = Box<dyn Fn(DomainId) + Send + Sync>;

struct Known {
    masters: Arc<Masters>,
    read: Instant,
    refreshed: Instant,
    failed: Option<Instant>,
    unwrapped: HashMap<(DomainId, KeyId), Arc<DataKey>>,
    writing: HashMap<DomainId, Arc<DataKey>>,
    shredded: HashSet<(DomainId, KeyId)>,
    unknown: HashSet<(DomainId, KeyId)>,
    /// Notices that were there at the start, or were followed.
    notices: HashSet<Notice>,
    /// When this process learned that a domain was shredded.
    settling: HashMap<DomainId, Instant>,
    /// What was shredded before the start is known.
    opened: bool,
}

/// What became of a data key.
pub(super) enum Found {
    Key(Arc<DataKey>),
    Shredded,
    /// There is no trace of it.
    Unknown,
}

impl Found {
    pub(super) fn is_shredded(&self) -> bool {
        matches!(self, Self::Shredded)
    }
}

impl Keys {
    /// Keys whose shelf is under `prefix` of an object store. Reads the master keys, and wraps by the first of them what
    /// others wrap, if the shelf is within reach.
    pub async fn open(
        store: Arc<dyn ObjectStore>,
        prefix: &str,
        source: KeySource,
        environment: Environment,
    ) -> Result<Arc<Self>, KeyError> {
        let masters = read(&source, &environment).await?;
        let now = Instant::now();
        let known = Known {
            masters: Arc::new(masters),
            read: now,
            refreshed: now,
            failed: None,
            unwrapped: HashMap::new(),
            writing: HashMap::new(),
            shredded: HashSet::new(),
            unknown: HashSet::new(),
            notices: HashSet::new(),
            settling: HashMap::new(),
            opened: false,
        };
        let keys = Arc::new(Self {
            shelf: Shelf::new(store, Path::from(prefix)),
            source,
            environment,
            known: Mutex::new(known),
            slow: tokio::sync::Mutex::default(),
            purgers: Mutex::default(),
        });
        let opening = async {
            keys.rewrap().await?;
            let notices = keys.shelf.notices().await?;
            let mut known = keys.known();
            known.notices.extend(notices);
            known.opened = true;
            Ok(())
        };
        match opening.await {
            // A shelf that is away keeps nobody from starting: domains wait for it, and come by themselves.
            Err(error @ (KeyError::Store(_) | KeyError::Silent)) => {
                tracing::warn!(%error, "cannot read the data keys; encrypted blocks count as misses");
            }
            done => done?,
        }
        Ok(keys)
    }

    /// Has `purge` called for each domain of which this process learns that it was shredded, before the domain can get a new key. It
    /// makes the domain's blocks in memory misses.
    pub fn on_shred(&self, purge: impl Fn(DomainId) + Send + Sync + 'static) {
        self.purgers.lock().unwrap_or_else(PoisonError::into_inner).push(Box::new(purge));
    }

    /// Looks for shredded domains every two seconds, until it is dropped.
    #[must_use = "dropping it ends the watch"]
    pub fn watch(self: &Arc<Self>) -> AbortOnDropHandle<()> {
        let keys = self.clone();
        AbortOnDropHandle::new(tokio::spawn(async move {
            let mut failing = false;
            loop {
                tokio::time::sleep(WATCH).await;
                let looked = keys.follow_notices().await;
                match &looked {
                    Err(error) if !failing => {
                        tracing::warn!(%error, "cannot read notices of shredded domains; cached keys stay in use");
                    }
                    Ok(()) if failing => tracing::info!("reading notices of shredded domains works again"),
                    _ => {}
                }
                failing = looked.is_err();
            }
        }))
    }

    /// Drops what was shredded since the last time.
    async fn follow_notices(&self) -> Result<(), KeyError> {
        let notices = self.shelf.notices().await?;
        let fresh: Vec<Notice> = {
            let mut known = self.known();
            known.opened = true;
            known.notices.retain(|notice| notices.contains(notice));
            notices.into_iter().filter(|notice| !known.notices.contains(notice)).collect()
        };
        for notice in fresh {
            let _one = self.slow.lock().await;
            // Its keys first: what is loaded from now on is a miss, and what was loaded before is purged.
            let entries = self.shelf.list(Some(notice.domain)).await?;
            if !self.learn(&entries, Some(notice.domain)).await?.contains(&notice.domain) {
                self.purge(notice.domain);
            }
            self.known().notices.insert(notice);
            tracing::info!(domain = %notice.domain, "domain was shredded; its blocks in memory are dropped");
        }
        Ok(())
    }

    fn purge(&self, domain: DomainId) {
        self.known().settling.insert(domain, Instant::now());
        let purgers = self.purgers.lock().unwrap_or_else(PoisonError::into_inner);
        purgers.iter().for_each(|purge| purge(domain));
    }

    /// Keys whose shelf is a folder, which is made if it is not there. Written through to the disk.
    pub async fn in_folder(
        folder: &std::path::Path,
        source: KeySource,
        environment: Environment,
    ) -> Result<Arc<Self>, KeyError> {
        let made = match (folder.parent(), folder.file_name().and_then(OsStr::to_str)) {
            (Some(root), Some(name)) => permissions::own_dirs_below(root, &[name]),
            _ => permissions::create_dir_all(folder),
        };
        made.map_err(|error| object_store::Error::Generic {
            store: "folder",
            source: format!("{}: {error}", folder.display()).into(),
        })?;
        let store = LocalFileSystem::new_with_prefix(folder)?.with_fsync(true);
        Self::open(Arc::new(store), "", source, environment).await
    }

    /// Makes all blocks of a domain misses, for good, wherever they rest: its data keys are destroyed. Other processes that
    /// [watch](Self::watch) follow within seconds, and drop what they have of it in memory. A domain that goes on being used gets a new
    /// key. Says how many keys there were.
    pub async fn shred(&self, domain: DomainId) -> Result<usize, KeyError> {
        if domain == metadata::DOMAIN {
            return Err(KeyError::Reserved(domain));
        }
        let _one = self.slow.lock().await;
        let entries = self.shelf.list(Some(domain)).await?;
        let keys: HashSet<KeyId> =
            entries.iter().filter(|entry| entry.state != State::Shredded).map(|entry| entry.key).collect();
        // First the word that outweighs everything, then the keys: a crash in between loses no word.
        let put = |&key: &KeyId| self.shelf.put(Entry { domain, key, state: State::Shredded }, Bytes::new());
        let putting: Vec<_> = keys.iter().map(put).collect();
        stream::iter(putting).buffer_unordered(PARALLEL).try_collect::<()>().await?;
        self.shelf.notify(domain).await?;
        if !self.learn(&self.shelf.list(Some(domain)).await?, Some(domain)).await?.contains(&domain) {
            self.purge(domain);
        }
        tracing::info!(%domain, keys = keys.len(), "domain shredded");
        Ok(keys.len())
    }

    /// Whether blocks of a domain that rest under a key can be opened here. A key that was shredded, or that no master key of
    /// ours unwraps, opens none.
    pub async fn opens(self: &Arc<Self>, domain: DomainId, key: KeyId) -> Result<bool, KeyError> {
        match self.find(domain, key).await {
            Ok(found) => Ok(matches!(found, Found::Key(_))),
            Err(KeyError::Locked { .. } | KeyError::Damaged { .. }) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Reads the source and looks at the shelf again, now.
    pub async fn refresh(&self) -> Result<(), KeyError> {
        let _one = self.slow.lock().await;
        self.read().await?;
        self.look().await
    }

    async fn look(&self) -> Result<(), KeyError> {
        self.learn(&self.shelf.list(None).await?, None).await?;
        let mut known = self.known();
        known.unknown.clear();
        known.refreshed = Instant::now();
        Ok(())
    }

    /// Wraps all data keys by the first master key, so that the others can be retired. Says how many it wrapped anew.
    pub async fn rewrap(&self) -> Result<usize, KeyError> {
        let _one = self.slow.lock().await;
        let entries = self.shelf.list(None).await?;
        self.learn(&entries, None).await?;
        let first = self.known().masters.first();
        let mut wrapped = BTreeMap::<(DomainId, KeyId), Vec<MasterId>>::new();
        for Entry { domain, key, state } in entries {
            if let State::Wrapped(master) = state
                && !self.known().shredded.contains(&(domain, key))
            {
                wrapped.entry((domain, key)).or_default().push(master);
            }
        }
        wrapped.retain(|_, masters| *masters != [first]);
        let rewrapping: Vec<_> =
            wrapped.into_iter().map(|((domain, key), masters)| self.rewrap_one(domain, key, masters, first)).collect();
        let done: Vec<bool> = stream::iter(rewrapping).buffer_unordered(PARALLEL).try_collect().await?;
        let count = done.into_iter().filter(|done| *done).count();
        if count > 0 {
            // Whoever shredded one of them meanwhile said so before: a second look removes what was brought back.
            self.learn(&self.shelf.list(None).await?, None).await?;
            tracing::info!(keys = count, master = %first, "data keys rewrapped with the first master key");
        }
        Ok(count)
    }

    async fn rewrap_one(
        &self,
        domain: DomainId,
        key: KeyId,
        masters: Vec<MasterId>,
        first: MasterId,
    ) -> Result<bool, KeyError> {
        if !masters.contains(&first) {
            match self.fetch(domain, key, &masters).await {
                Ok(Some(data)) => self.keep(domain, &data).await?,
                Ok(None) => return Ok(false),
                // One key that cannot be unwrapped must not keep the others, and the service, from going on.
                Err(error @ (KeyError::Locked { .. } | KeyError::Damaged { .. })) => {
                    tracing::warn!(%error, "cannot rewrap a data key");
                    return Ok(false);
                }
                Err(error) => return Err(error),
            }
        }
        let old = masters.into_iter().filter(|master| *master != first);
        self.shelf.remove(old.map(|master| Entry { domain, key, state: State::Wrapped(master) }).collect()).await?;
        Ok(true)
    }

    /// The numbers of a domain's data keys that rest and are not shredded.
    pub(super) async fn listed(&self, domain: DomainId) -> Result<HashSet<KeyId>, KeyError> {
        let _one = self.slow.lock().await;
        let entries = self.shelf.list(Some(domain)).await?;
        self.learn(&entries, Some(domain)).await?;
        let known = self.known();
        let usable = entries.iter().filter(|entry| !known.shredded.contains(&(domain, entry.key)));
        Ok(usable.map(|entry| entry.key).collect())
    }

    /// The key that blocks of a domain were encrypted under.
    pub(super) async fn find(self: &Arc<Self>, domain: DomainId, key: KeyId) -> Result<Found, KeyError> {
        self.freshen();
        if let Some(found) = self.known().get(domain, key) {
            return Ok(found);
        }
        let _one = self.slow.lock().await;
        if let Some(found) = self.known().get(domain, key) {
            return Ok(found);
        }
        let fetched = self.noting(self.look_for(domain, key)).await?;
        let mut known = self.known();
        if known.shredded.contains(&(domain, key)) {
            return Ok(Found::Shredded);
        }
        let Some(data) = fetched else {
            if known.unknown.len() < UNKNOWN {
                known.unknown.insert((domain, key));
            }
            return Ok(Found::Unknown);
        };
        known.unwrapped.insert((domain, key), data.clone());
        Ok(Found::Key(data))
    }

    /// A key to encrypt blocks of a domain under.
    pub(super) async fn writing(self: &Arc<Self>, domain: DomainId) -> Result<Arc<DataKey>, KeyError> {
        self.freshen();
        let ready = || self.known().writing.get(&domain).cloned();
        if let Some(key) = ready() {
            return Ok(key);
        }
        self.settled(domain)?;
        let _one = self.slow.lock().await;
        if let Some(key) = ready() {
            return Ok(key);
        }
        self.noting(self.choose(domain)).await
    }

    async fn look_for(&self, domain: DomainId, key: KeyId) -> Result<Option<Arc<DataKey>>, KeyError> {
        let entries = self.shelf.list(Some(domain)).await?;
        self.learn(&entries, Some(domain)).await?;
        match &wrapping(&entries, key)[..] {
            [] => Ok(None),
            masters => self.fetch(domain, key, masters).await,
        }
    }

    async fn choose(&self, domain: DomainId) -> Result<Arc<DataKey>, KeyError> {
        let entries = self.shelf.list(Some(domain)).await?;
        self.learn(&entries, Some(domain)).await?;
        let mut candidates: Vec<KeyId> = entries.iter().map(|entry| entry.key).collect();
        candidates.sort_unstable();
        candidates.dedup();
        candidates.retain(|key| !self.known().shredded.contains(&(domain, *key)));
        // What was read just now may have said that the domain was shredded.
        self.settled(domain)?;
        for key in candidates {
            match self.fetch(domain, key, &wrapping(&entries, key)).await {
                Ok(Some(data)) => return Ok(self.write_with(domain, data)),
                Ok(None) => {}
                Err(error @ (KeyError::Locked { .. } | KeyError::Damaged { .. })) => {
                    tracing::warn!(%error, "cannot use a data key; it is skipped");
                }
                Err(error) => return Err(error),
            }
        }
        let data = Arc::new(DataKey::random()?);
        self.keep(domain, &data).await?;
        tracing::info!(%domain, key = %data.id(), "data key created");
        Ok(self.write_with(domain, data))
    }

    /// An error while blocks from before a domain was shredded may still be on their way.
    fn settled(&self, domain: DomainId) -> Result<(), KeyError> {
        let mut known = self.known();
        known.settling.retain(|_, since| since.elapsed() < SETTLE);
        if known.settling.contains_key(&domain) { Err(KeyError::Settling(domain)) } else { Ok(()) }
    }

    /// Asks the shelf, unless it failed just now.
    async fn noting<T>(&self, asking: impl Future<Output = Result<T, KeyError>>) -> Result<T, KeyError> {
        if self.known().failed.is_some_and(|failed| failed.elapsed() < REST) {
            return Err(KeyError::Silent);
        }
        let answer = asking.await;
        let failed = matches!(answer, Err(KeyError::Store(_) | KeyError::Silent));
        self.known().failed = failed.then(Instant::now);
        answer
    }

    fn write_with(&self, domain: DomainId, data: Arc<DataKey>) -> Arc<DataKey> {
        let mut known = self.known();
        known.unwrapped.insert((domain, data.id()), data.clone());
        known.writing.insert(domain, data.clone());
        data
    }

    /// Unwraps a key by any of the masters that wrap it; `None` when it is gone.
    async fn fetch(&self, domain: DomainId, key: KeyId, by: &[MasterId]) -> Result<Option<Arc<DataKey>>, KeyError> {
        let has = |masters: &Masters| by.iter().copied().find(|master| masters.has(*master));
        let mut masters = self.known().masters.clone();
        if has(&masters).is_none() {
            self.reread().await?;
            masters = self.known().masters.clone();
        }
        let Some(master) = has(&masters) else {
            let Some(&master) = by.first() else { return Ok(None) };
            return Err(KeyError::Locked { domain, key, master });
        };
        let Some(bytes) = self.shelf.get(domain, key, master).await? else { return Ok(None) };
        Ok(Some(Arc::new(masters.unwrap(domain, key, master, &bytes)?)))
    }

    /// Wraps a key and puts it on the shelf.
    async fn keep(&self, domain: DomainId, data: &DataKey) -> Result<(), KeyError> {
        let masters = self.known().masters.clone();
        let wrapped = Bytes::copy_from_slice(&masters.wrap(domain, data)?);
        self.shelf.put(Entry { domain, key: data.id(), state: State::Wrapped(masters.first()) }, wrapped).await
    }

    /// Takes in what the shelf says of a domain, or of all: forgets what was shredded, and sweeps up what is left of it. Domains of
    /// which it is news that they were shredded are purged, and returned.
    async fn learn(&self, entries: &[Entry], domain: Option<DomainId>) -> Result<HashSet<DomainId>, KeyError> {
        let of = |shredded: bool| {
            let these = entries.iter().filter(move |entry| (entry.state == State::Shredded) == shredded);
            these.map(|entry| (entry.domain, entry.key)).collect::<HashSet<_>>()
        };
        let (shredded, wrapped) = (of(true), of(false));
        let fresh: HashSet<DomainId> = {
            let mut known = self.known();
            let gone = |of: DomainId, key: KeyId| {
                let listed = domain.is_none_or(|domain| domain == of);
                listed && (shredded.contains(&(of, key)) || !wrapped.contains(&(of, key)))
            };
            known.unwrapped.retain(|&(of, key), _| !gone(of, key));
            known.writing.retain(|&of, data| !gone(of, data.id()));
            let fresh = shredded.iter().filter(|key| known.opened && !known.shredded.contains(key));
            let fresh = fresh.map(|(domain, _)| *domain).collect();
            known.shredded.extend(&shredded);
            fresh
        };
        for domain in &fresh {
            self.purge(*domain);
        }
        let left = entries.iter().filter(|entry| entry.state != State::Shredded);
        let left = left.filter(|entry| shredded.contains(&(entry.domain, entry.key)));
        self.shelf.remove(left.copied().collect()).await?;
        Ok(fresh)
    }

    /// Reads the source again, if it was not read just now.
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

    /// Starts a refresh if one is due; nobody waits for it.
    fn freshen(self: &Arc<Self>) {
        {
            let mut known = self.known();
            if known.refreshed.elapsed() < REFRESH {
                return;
            }
            known.refreshed = Instant::now();
        }
        let keys = self.clone();
        tokio::spawn(async move {
            let _one = keys.slow.lock().await;
            if let Err(error) = keys.look().await {
                tracing::warn!(
                    %error,
                    "cannot read the key store; cached keys stay in use, and domains shredded elsewhere stay readable"
                );
            }
        });
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Each change under this lock is one insertion or one sweep.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Known {
    fn get(&self, domain: DomainId, key: KeyId) -> Option<Found> {
        if let Some(data) = self.unwrapped.get(&(domain, key)) {
            return Some(Found::Key(data.clone()));
        }
        if self.shredded.contains(&(domain, key)) {
            return Some(Found::Shredded);
        }
        self.unknown.contains(&(domain, key)).then_some(Found::Unknown)
    }
}

impl fmt::Debug for Keys {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let known = self.known();
        f.debug_struct("Keys")
            .field("master", &known.masters.first())
            .field("unwrapped", &known.unwrapped.len())
            .field("shredded", &known.shredded.len())
            .finish_non_exhaustive()
    }
}

fn wrapping(entries: &[Entry], key: KeyId) -> Vec<MasterId> {
    let by = |entry: &Entry| match entry.state {
        State::Wrapped(master) if entry.key == key => Some(master),
        _ => None,
    };
    entries.iter().filter_map(by).collect()
}

async fn read(source: &KeySource, environment: &Environment) -> Result<Masters, KeyError> {
    let (source, environment) = (source.clone(), environment.clone());
    let reading = tokio::task::spawn_blocking(move || source.read(&environment));
    Ok(reading.await.expect("reading a source does not panic")?)
}
