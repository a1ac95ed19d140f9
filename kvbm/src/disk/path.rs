//! One path of the disk tier: a log while the folder can be used, nothing while it cannot.
//!
//! ```text
//!   open ──▶ up ── reads fail, or the folder is another one ──▶ down: its blocks are withdrawn, others take the writes
//!             ▲                                                   │
//!             └──────── opened again, and recovered ◀── a probe, in doubling pauses
//! ```
//!
//! A write that fails does not take a path down: what it has can still be read, and the log itself waits a second. A path goes
//! down also when the device does not answer for [`NO_ANSWER`], and when a task that works on it panics: what such a task left
//! half done is not used, but read back from the disk.

use super::log::{Log, REST, Shared};
use super::{OpenError, READERS, Settings, segment};
use crate::permissions;
use crate::tier::Gate;
use std::any::Any;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, RwLock, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// A path that stays broken is tried this often: opening a folder that is not there costs nothing, but may spin up a disk.
const PAUSE_MAX: Duration = Duration::from_mins(1);
/// A device that has not answered for so long has failed: a disk that has to spin up, or a flash device that cleans up, takes a
/// few seconds; the kernel itself gives up after thirty.
pub(super) const NO_ANSWER: Duration = Duration::from_secs(10);
/// How often that is looked at.
const LOOK: Duration = Duration::from_secs(1);
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
    tasks: TaskTracker,
    /// The tier ends: what is down stays down.
    closing: CancellationToken,
    up: RwLock<Option<(Arc<Log>, Instant)>>,
    /// The filesystem on which the log was found first.
    device: OnceLock<u64>,
    failures: AtomicU64,
    /// Why the path is down.
    failure: Mutex<Option<String>>,
    /// Failures in a row.
    row: AtomicU32,
}

impl Volume {
    pub(super) fn new(number: u8, folder: &Path, settings: Settings, shared: Shared, tasks: TaskTracker) -> Arc<Self> {
        let volume = Arc::new(Self {
            number,
            folder: folder.to_owned(),
            settings,
            readers: Gate::new(READERS, &shared.division.weights),
            shared,
            runtime: Handle::current(),
            tasks,
            closing: CancellationToken::new(),
            up: RwLock::default(),
            device: OnceLock::new(),
            failures: AtomicU64::new(0),
            failure: Mutex::default(),
            row: AtomicU32::new(0),
        });
        let watching = watch(Arc::downgrade(&volume));
        drop(volume.runtime.spawn(volume.closing.clone().run_until_cancelled_owned(watching)));
        volume
    }

    /// The log, while there is one.
    pub(super) fn log(&self) -> Option<Arc<Log>> {
        self.up.read().unwrap_or_else(PoisonError::into_inner).as_ref().map(|(log, _)| log.clone())
    }

    /// Runs `work` off the async threads; [`super::DiskTier::close`] waits for it.
    pub(super) fn spawn_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        self.tasks.spawn_blocking_on(work, &self.runtime)
    }

    /// Takes the log away for good, from everyone but those who work with it now.
    pub(super) fn close(&self) -> Option<Arc<Log>> {
        let mut up = self.up.write().unwrap_or_else(PoisonError::into_inner);
        self.closing.cancel();
        up.take().map(|(log, _)| log)
    }

    /// Works on the log, off the async threads. `None` when the work panicked, which takes the path down.
    pub(super) fn work<T>(self: &Arc<Self>, log: &Arc<Log>, work: impl FnOnce(&Log) -> T) -> Option<T> {
        // Nobody uses what may be half done: the log is lost, and its state with it.
        let done = catch_unwind(AssertUnwindSafe(|| work(log)));
        let done =
            done.map_err(|panic| log.lose(&io::Error::other(format!("a task panicked: {}", said(&*panic))))).ok();
        self.check(log);
        done
    }

    /// Why it is down, if it is.
    pub(super) fn failure(&self) -> Option<String> {
        self.reason().clone()
    }

    fn reason(&self) -> MutexGuard<'_, Option<String>> {
        self.failure.lock().unwrap_or_else(PoisonError::into_inner)
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
                return Err(failed(io::Error::other("another filesystem is mounted there")));
            }
        } else {
            permissions::named_dir(&self.folder, segment::is_ours).map_err(failed)?;
        }
        let log = Log::open(self.number, &self.folder, self.settings, self.shared.clone())?;
        let _ = self.device.set(std::fs::metadata(&self.folder).map_err(failed)?.dev());
        let mut up = self.up.write().unwrap_or_else(PoisonError::into_inner);
        if self.closing.is_cancelled() {
            return Err(failed(io::Error::other("G3 is closed")));
        }
        *up = Some((Arc::new(log), Instant::now()));
        self.reason().take();
        Ok(())
    }

    /// Finds what rests in the folder, and announces it.
    pub(super) fn recover(self: &Arc<Self>) {
        if let Some(log) = self.log() {
            self.work(&log, |log| {
                if let Err(error) = log.recover() {
                    log.lose(&error);
                }
            });
        }
    }

    /// Opens and recovers a path that did not open in time, however late it does.
    pub(super) fn opened_late(self: &Arc<Self>, opened: Result<(), OpenError>) {
        match opened {
            Ok(()) => self.recover(),
            Err(error) => self.fail(&error.to_string()),
        }
    }

    /// Takes the path down if its log is lost. To be called after work on the log, off the async threads.
    pub(super) fn check(self: &Arc<Self>, log: &Arc<Log>) {
        let Some(reason) = log.failure() else { return };
        let lived = {
            let mut up = self.up.write().unwrap_or_else(PoisonError::into_inner);
            match up.take_if(|(current, _)| Arc::ptr_eq(current, log)) {
                Some((_, since)) => {
                    // With the lock, so that it is known why the path is down as soon as it is.
                    self.count_failure(reason);
                    since.elapsed()
                }
                // Somebody else was faster.
                None => return,
            }
        };
        log.withdraw();
        if lived > SETTLED {
            self.row.store(0, Ordering::Relaxed);
        }
        self.come_back();
    }

    /// Counts a failure and lets a probe bring the path back.
    pub(super) fn fail(self: &Arc<Self>, reason: &str) {
        self.count_failure(reason);
        self.come_back();
    }

    fn come_back(self: &Arc<Self>) {
        let row = self.row.fetch_add(1, Ordering::Relaxed);
        let coming_back = come_back(Arc::downgrade(self), pause(row));
        drop(self.runtime.spawn(self.closing.clone().run_until_cancelled_owned(coming_back)));
    }
}

impl Volume {
    pub(super) fn count_failure(&self, reason: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *self.reason() = Some(reason.to_owned());
    }
}

/// Takes the path down when the device does not answer, and when the folder was removed, moved away or mounted over: what is
/// written to it then would be lost.
async fn watch(volume: Weak<Volume>) {
    let mut standing: Option<JoinHandle<()>> = None;
    loop {
        sleep(LOOK).await;
        let Some(volume) = volume.upgrade() else { return };
        let Some(log) = volume.log() else { continue };
        if standing.as_ref().is_none_or(JoinHandle::is_finished) {
            let (volume, log) = (volume.clone(), log.clone());
            // Not one of the tasks that a close waits for.
            standing = Some(volume.runtime.clone().spawn_blocking(move || {
                if let Err(error) = log.stands() {
                    log.lose(&error);
                    volume.check(&log);
                }
            }));
        }
        let Some(longest) = log.io.longest().filter(|longest| *longest >= NO_ANSWER) else { continue };
        let why = format!("the device did not answer for {} s", longest.as_secs());
        log.lose(&io::Error::new(io::ErrorKind::TimedOut, why));
        let checking = volume.clone();
        drop(volume.spawn_blocking(move || checking.check(&log)));
    }
}

/// What a panic said.
fn said(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// Before the first probe after so many failures in a row.
fn pause(row: u32) -> Duration {
    REST.saturating_mul(1 << row.min(6)).min(PAUSE_MAX)
}

async fn come_back(volume: Weak<Volume>, mut pause: Duration) {
    loop {
        sleep(pause).await;
        let Some(volume) = volume.upgrade() else { return };
        let opened = volume.clone().spawn_blocking(move || {
            let opened = volume.open();
            match &opened {
                Ok(()) => {
                    tracing::info!(folder = %volume.folder.display(), "G3 path is usable again");
                    volume.recover();
                }
                Err(error) => tracing::debug!(folder = %volume.folder.display(), %error, "G3 path is still down"),
            }
            opened.is_ok()
        });
        // One that panicked is no reason to give up either.
        if opened.await.unwrap_or(false) {
            return;
        }
        pause = (pause * 2).min(PAUSE_MAX);
    }
}
