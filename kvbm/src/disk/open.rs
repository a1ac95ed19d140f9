//! Opening a tier: locks the folders, opens all logs at once, and recovers their blocks.

use super::direct::BufferPool;
use super::log::Shared;
use super::path::{DEVICE_TIMEOUT, LogPath};
use super::tier::DiskTier;
use super::{OpenError, Settings};
use crate::block::{Header, Level};
use crate::event::EventLog;
use crate::tier::{Index, Quotas, WriteClaims};
use crate::transform::crypt::MetadataKeys;
use parking_lot::Mutex;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicU64;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SendError, sync_channel};
use std::thread;
use std::time::Instant;
use tokio::runtime::Handle;
use tokio::sync::watch;
use tokio_util::task::TaskTracker;

impl DiskTier {
    /// Locks a folder, recovers the blocks that an earlier process stored there, and publishes events for them.
    /// Blocks the calling thread meanwhile. [`DiskTier::close`] seals the log and unlocks the folder; otherwise that
    /// happens when the last read or write of the tier ends.
    ///
    /// # Panics
    /// Outside a tokio runtime.
    pub fn open(folder: &Path, settings: Settings, events: Arc<EventLog>) -> Result<Arc<Self>, OpenError> {
        Self::striped(&[(folder.to_owned(), settings)], events)
    }

    /// Opens a tier over several folders, best one per device. Blocks are striped over them, and read from all at
    /// once.
    ///
    /// A folder that cannot be used is left out until it can be. Fails only when no folder can be used, when another
    /// process owns one, or when the settings are invalid.
    ///
    /// # Panics
    /// Outside a tokio runtime, without a path, or with more than 255.
    pub fn striped(paths: &[(PathBuf, Settings)], events: Arc<EventLog>) -> Result<Arc<Self>, OpenError> {
        let tier = Self::claim(paths, &Quotas::default(), events, None)?;
        tier.recover();
        Ok(tier)
    }

    /// Opens a tier with quotas and recovers its blocks in the background; see [`DiskTier::recovered`]. `keys`
    /// authenticate the footers. Each domain with a quota or a weight has segments of its own on every path.
    ///
    /// # Panics
    /// As for [`DiskTier::striped`].
    pub fn open_in_background(
        paths: &[(PathBuf, Settings)],
        quotas: &Quotas,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Result<Arc<Self>, OpenError> {
        let tier = Self::claim(paths, quotas, events, keys)?;
        let recovering = tier.clone();
        drop(tier.tasks.spawn_blocking_on(move || recovering.recover(), &tier.runtime));
        Ok(tier)
    }

    fn claim(
        paths: &[(PathBuf, Settings)],
        quotas: &Quotas,
        events: Arc<EventLog>,
        keys: Option<Arc<MetadataKeys>>,
    ) -> Result<Arc<Self>, OpenError> {
        let shared = Shared {
            index: Arc::new(Index::new(Level::G3, events)),
            next: Arc::default(),
            pool: BufferPool::default(),
            paths: paths.len() as u32,
            quotas: quotas.for_tier(Level::G3, 1),
            capacity: paths.iter().map(|(_, settings)| settings.capacity_bytes).sum(),
            corruption: Arc::default(),
            max_block: Arc::new(AtomicU64::new(Header::MAX_LENGTH)),
            keys,
            spill: Arc::default(),
            #[cfg(test)]
            hooks: super::tests::TestHooks::default(),
        };
        Self::open_logs(paths, shared)
    }

    pub(super) fn open_logs(paths: &[(PathBuf, Settings)], shared: Shared) -> Result<Arc<Self>, OpenError> {
        assert!((1..=usize::from(u8::MAX)).contains(&paths.len()), "one to 255 paths");
        let tasks = TaskTracker::new();
        let log_path = |(number, (folder, settings)): (usize, &(PathBuf, Settings))| {
            LogPath::new(number as u8, folder, *settings, shared.clone(), tasks.clone())
        };
        let log_paths: Vec<Arc<LogPath>> = paths.iter().enumerate().map(log_path).collect();
        let mut down = Vec::new();
        for (log_path, opened) in log_paths.iter().zip(open_all(&log_paths)) {
            match opened {
                Ok(()) => {}
                Err(error @ OpenError::Io { .. }) => down.push((log_path, error)),
                Err(error) => return Err(error),
            }
        }
        if down.len() == log_paths.len() {
            return Err(down.swap_remove(0).1);
        }
        for (log_path, error) in down {
            tracing::warn!(
                folder = %log_path.folder.display(), %error,
                "cannot open a G3 path; G3 continues without it"
            );
            // A path whose opening timed out is completed by `LogPath::finish_open`.
            match &error {
                OpenError::Io { source, .. } if source.kind() == io::ErrorKind::TimedOut => {
                    log_path.count_failure(&log_path.reason(&error));
                }
                error => log_path.fail(&log_path.reason(error)),
            }
        }
        let (recovered, _) = watch::channel(false);
        let (striper, claims, runtime) = (Mutex::default(), WriteClaims::default(), Handle::current());
        Ok(Arc::new(Self { log_paths, shared, striper, claims, recovered, runtime, tasks }))
    }

    pub(super) fn recover(&self) {
        thread::scope(|scope| {
            for log_path in &self.log_paths {
                scope.spawn(|| log_path.recover());
            }
        });
        self.recovered.send_replace(true);
        self.start_writers();
    }
}

/// Receives the result of opening a path.
type Opening = Receiver<Result<(), OpenError>>;

/// Opens each path on a thread of its own, so that one that does not answer delays neither the others nor the start.
fn open_all(log_paths: &[Arc<LogPath>]) -> Vec<Result<(), OpenError>> {
    let open = |log_path: &Arc<LogPath>| {
        let (done, opened) = sync_channel(0);
        let (log_path, runtime) = (log_path.clone(), Handle::current());
        let opening = move || {
            let _inside = runtime.enter();
            if let Err(SendError(late)) = done.send(log_path.open()) {
                log_path.finish_open(late);
            }
        };
        thread::Builder::new().name("g3-open".into()).spawn(opening).map(|_| opened)
    };
    let opening: Vec<_> = log_paths.iter().map(open).collect();
    let deadline = Instant::now() + DEVICE_TIMEOUT;
    let wait = |(log_path, opened): (&Arc<LogPath>, io::Result<Opening>)| {
        let failed = |source| OpenError::Io { path: log_path.folder.clone(), source };
        let left = deadline.saturating_duration_since(Instant::now());
        match opened.map_err(failed)?.recv_timeout(left) {
            Ok(opened) => opened,
            Err(RecvTimeoutError::Timeout) => Err(failed(io::ErrorKind::TimedOut.into())),
            Err(RecvTimeoutError::Disconnected) => Err(failed(io::Error::other("opening the G3 path panicked"))),
        }
    };
    log_paths.iter().zip(opening).map(wait).collect()
}
