//! One path of the disk tier: a log while the folder can be used, nothing while it cannot.
//!
//! ```text
//!   open ──▶ up ── reads fail, or the folder is another one ──▶ down: its blocks are withdrawn, others take the writes
//!             ▲                                                   │
//!             └──────── opened again, and recovered ◀── a probe, in doubling pauses
//! ```
//!
//! A write that fails does not take a path down: what it has can still be read, and the log itself waits a second.

use super::log::{Log, REST, Shared};
use super::{OpenError, READERS, Settings};
use crate::fair::Gate;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::time::{Instant, sleep};

/// A path that stays broken is tried this often: opening a folder that is not there costs nothing, but may spin up a disk.
const PAUSE_MAX: Duration = Duration::from_mins(1);
/// A log that served for so long and fails is a new trouble, not the old one.
const SETTLED: Duration = Duration::from_mins(5);

pub(super) struct Volume {
    pub(super) number: u8,
    pub(super) folder: PathBuf,
    pub(super) settings: Settings,
    /// Reads at once, in turns of their domains; of this path alone: one that hangs holds up nobody else.
    pub(super) readers: Arc<Gate>,
    shared: Shared,
    runtime: Handle,
    up: RwLock<Option<(Arc<Log>, Instant)>>,
    /// The filesystem on which the log was found first.
    device: OnceLock<u64>,
    failures: AtomicU64,
    /// Failures in a row.
    row: AtomicU32,
}

impl Volume {
    pub(super) fn new(number: u8, folder: &Path, settings: Settings, shared: Shared) -> Arc<Self> {
        Arc::new(Self {
            number,
            folder: folder.to_owned(),
            settings,
            readers: Gate::new(READERS, &shared.division.weights),
            shared,
            runtime: Handle::current(),
            up: RwLock::default(),
            device: OnceLock::new(),
            failures: AtomicU64::new(0),
            row: AtomicU32::new(0),
        })
    }

    /// The log, while there is one.
    pub(super) fn log(&self) -> Option<Arc<Log>> {
        self.up.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(log, _)| log.clone())
    }

    /// How often it went down.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Takes possession of the folder. What rests there is known once [`Self::recover`] has looked.
    pub(super) fn open(&self) -> Result<(), OpenError> {
        let failed = |source| OpenError::Io { path: self.folder.clone(), source };
        if let Some(device) = self.device.get() {
            // Below a mount that is gone lies another folder, on another filesystem: nothing to write to.
            let found = std::fs::metadata(&self.folder).map_err(failed)?.dev();
            if found != *device {
                return Err(failed(io::Error::other("another filesystem than before")));
            }
        } else {
            std::fs::create_dir_all(&self.folder).map_err(failed)?;
        }
        let log = Log::open(self.number, &self.folder, self.settings, self.shared.clone())?;
        let _ = self.device.set(std::fs::metadata(&self.folder).map_err(failed)?.dev());
        *self.up.write().unwrap_or_else(PoisonError::into_inner) = Some((Arc::new(log), Instant::now()));
        Ok(())
    }

    /// Finds what rests in the folder, and announces it.
    pub(super) fn recover(self: &Arc<Self>) {
        if let Some(log) = self.log()
            && let Err(error) = log.recover()
        {
            log.lose(&error);
            self.check(&log);
        }
    }

    /// Takes the path down if its log is lost. To be called after work on the log, off the async threads.
    pub(super) fn check(self: &Arc<Self>, log: &Arc<Log>) {
        if !log.is_lost() {
            return;
        }
        let lived = {
            let mut up = self.up.write().unwrap_or_else(PoisonError::into_inner);
            match up.take_if(|(current, _)| Arc::ptr_eq(current, log)) {
                Some((_, since)) => since.elapsed(),
                // Somebody else was faster.
                None => return,
            }
        };
        log.withdraw();
        if lived > SETTLED {
            self.row.store(0, Ordering::Relaxed);
        }
        self.fail();
    }

    /// Counts a failure and lets a probe bring the path back.
    pub(super) fn fail(self: &Arc<Self>) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        let row = self.row.fetch_add(1, Ordering::Relaxed);
        drop(self.runtime.spawn(come_back(Arc::downgrade(self), pause(row))));
    }
}

/// Before the first probe after so many failures in a row.
fn pause(row: u32) -> Duration {
    REST.saturating_mul(1 << row.min(6)).min(PAUSE_MAX)
}

async fn come_back(volume: Weak<Volume>, mut pause: Duration) {
    loop {
        sleep(pause).await;
        let Some(volume) = volume.upgrade() else { return };
        let opened = volume.runtime.clone().spawn_blocking(move || {
            let opened = volume.open();
            match &opened {
                Ok(()) => {
                    volume.recover();
                    tracing::info!(folder = %volume.folder.display(), "path of the disk tier is back");
                }
                Err(error) => tracing::debug!(folder = %volume.folder.display(), %error, "path still down"),
            }
            opened.is_ok()
        });
        if opened.await.unwrap_or(true) {
            return;
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}
