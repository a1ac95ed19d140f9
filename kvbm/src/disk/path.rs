//! One path of the disk tier. It has a log while its folder is usable.
//!
//! ```text
//!   open ──▶ up ── reads fail, or another folder is mounted ──▶ down: its blocks are withdrawn
//!             ▲                                                  │
//!             └── reopened and recovered ◀── retry with exponential backoff
//! ```
//!
//! A failed write does not take a path down: its blocks can still be read, and the log suspends writes for a second.
//! A path goes down when reads fail, when the device does not answer for [`DEVICE_TIMEOUT`], and when a task on it
//! panics; the state of such a task is discarded and recovered from disk.

use super::log::{COOLDOWN, Log, REPLACED, Shared};
use super::{OpenError, Settings, segment};
use crate::permissions;
use crate::tier::FairSemaphore;
use parking_lot::{Mutex, RwLock};
use std::any::Any;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::Duration;
use tokio::runtime::Handle;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

/// Maximum number of concurrent reads per path. A SATA device is fast with two, an `NVMe` device with eight.
pub(super) const READERS: usize = 8;
/// Maximum delay between attempts to reopen a path. An attempt is cheap, but may spin up a disk.
const MAX_RETRY_DELAY: Duration = Duration::from_mins(1);
/// A device that does not answer for this long has failed. A disk that spins up, or a flash device that collects
/// garbage, takes a few seconds; the kernel gives up after thirty.
pub(super) const DEVICE_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval at which the folder and the oldest operation are checked.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Why a path whose folder was there before is down.
const GONE: &str = "the folder was removed or moved away";
/// Why a path is down below whose folder another filesystem is mounted, or was.
const MOUNTED_OVER: &str = "another filesystem is mounted there";
/// A log that worked for this long before it failed resets the backoff.
const STABLE_AFTER: Duration = Duration::from_mins(5);

pub(super) struct LogPath {
    pub(super) number: u8,
    pub(super) folder: PathBuf,
    pub(super) settings: Settings,
    /// Limits concurrent reads of this path, shared fairly by domains. A path that hangs delays no other.
    pub(super) readers: Arc<FairSemaphore>,
    shared: Shared,
    runtime: Handle,
    tasks: TaskTracker,
    /// The tier is closing: paths that are down stay down.
    closing: CancellationToken,
    log: RwLock<Option<(Arc<Log>, Instant)>>,
    /// Device number of the filesystem on which the log was opened first.
    device: OnceLock<u64>,
    failures: AtomicU64,
    /// Why the path is down.
    failure: Mutex<Option<String>>,
    /// Exponent of the backoff.
    consecutive_failures: AtomicU32,
}

impl LogPath {
    pub(super) fn new(number: u8, folder: &Path, settings: Settings, shared: Shared, tasks: TaskTracker) -> Arc<Self> {
        let log_path = Arc::new(Self {
            number,
            folder: folder.to_owned(),
            settings,
            readers: FairSemaphore::new(READERS, &shared.quotas.weights),
            shared,
            runtime: Handle::current(),
            tasks,
            closing: CancellationToken::new(),
            log: RwLock::default(),
            device: OnceLock::new(),
            failures: AtomicU64::new(0),
            failure: Mutex::default(),
            consecutive_failures: AtomicU32::new(0),
        });
        let watching = watch(Arc::downgrade(&log_path));
        drop(log_path.runtime.spawn(log_path.closing.clone().run_until_cancelled_owned(watching)));
        log_path
    }

    /// The log, while the path is up.
    pub(super) fn log(&self) -> Option<Arc<Log>> {
        self.log.read().as_ref().map(|(log, _)| log.clone())
    }

    /// Runs `work` on a blocking thread. [`super::DiskTier::close`] waits for it.
    pub(super) fn spawn_blocking<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> JoinHandle<T> {
        self.tasks.spawn_blocking_on(work, &self.runtime)
    }

    /// Takes the path down for good and returns its log. Tasks that work on the log keep their reference.
    pub(super) fn close(&self) -> Option<Arc<Log>> {
        let mut current = self.log.write();
        self.closing.cancel();
        current.take().map(|(log, _)| log)
    }

    /// Runs `work` on the log, on a blocking thread. Returns `None` when it panicked, which takes the path down.
    pub(super) fn work<T>(self: &Arc<Self>, log: &Arc<Log>, work: impl FnOnce(&Log) -> T) -> Option<T> {
        // The state of the log is discarded after a panic, so no code uses inconsistent state.
        let done = catch_unwind(AssertUnwindSafe(|| work(log)));
        let done = done
            .map_err(|panic| log.mark_failed(&io::Error::other(format!("a task panicked: {}", panic_message(&*panic)))))
            .ok();
        self.check(log);
        done
    }

    /// Why the path is down, if it is.
    pub(super) fn failure(&self) -> Option<String> {
        self.failure.lock().clone()
    }

    /// Number of times that the path went down.
    pub(super) fn failures(&self) -> u64 {
        self.failures.load(Ordering::Relaxed)
    }

    /// Locks the folder and brings the path up. Its blocks are known after [`Self::recover`].
    pub(super) fn open(&self) -> Result<(), OpenError> {
        let failed = |source| OpenError::Io { path: self.folder.clone(), source };
        if let Some(device) = self.device.get() {
            // Below a removed mount is another folder, on another filesystem, which must not be written to.
            let found = match std::fs::metadata(&self.folder) {
                Ok(found) => found.dev(),
                Err(error) if error.kind() == io::ErrorKind::NotFound => {
                    return Err(failed(io::Error::new(error.kind(), GONE)));
                }
                Err(error) => return Err(failed(error)),
            };
            if found != *device {
                return Err(failed(io::Error::other(MOUNTED_OVER)));
            }
        } else {
            permissions::create_configured_dir(&self.folder, segment::is_ours).map_err(failed)?;
        }
        let log = Log::open(self.number, &self.folder, self.settings, self.shared.clone())?;
        let _ = self.device.set(std::fs::metadata(&self.folder).map_err(failed)?.dev());
        let mut current = self.log.write();
        if self.closing.is_cancelled() {
            return Err(failed(io::Error::other("G3 is closed")));
        }
        *current = Some((Arc::new(log), Instant::now()));
        self.failure.lock().take();
        Ok(())
    }

    /// Recovers the blocks of the folder and publishes events for them.
    pub(super) fn recover(self: &Arc<Self>) {
        if let Some(log) = self.log() {
            self.work(&log, |log| {
                if let Err(error) = log.recover() {
                    log.mark_failed(&error);
                }
            });
        }
    }

    /// Handles the result of an opening that timed out before.
    pub(super) fn finish_open(self: &Arc<Self>, opened: Result<(), OpenError>) {
        match opened {
            Ok(()) => self.recover(),
            Err(error) => self.fail(&self.reason(&error)),
        }
    }

    /// Takes the path down if its log has failed. Call it after work on the log, on a blocking thread.
    pub(super) fn check(self: &Arc<Self>, log: &Arc<Log>) {
        let Some(reason) = log.failure() else { return };
        let uptime = {
            let mut current = self.log.write();
            match current.take_if(|(current, _)| Arc::ptr_eq(current, log)) {
                Some((_, since)) => {
                    // Under the lock, so that the reason is visible as soon as the path is down.
                    self.count_failure(reason);
                    since.elapsed()
                }
                // Another thread has taken the path down.
                None => return,
            }
        };
        log.withdraw();
        if uptime > STABLE_AFTER {
            self.consecutive_failures.store(0, Ordering::Relaxed);
        }
        self.reopen();
    }

    /// Counts a failure and schedules a reopening.
    pub(super) fn fail(self: &Arc<Self>, reason: &str) {
        self.count_failure(reason);
        self.reopen();
    }

    fn reopen(self: &Arc<Self>) {
        let consecutive_failures = self.consecutive_failures.fetch_add(1, Ordering::Relaxed);
        let reopening = reopen(Arc::downgrade(self), retry_delay(consecutive_failures));
        drop(self.runtime.spawn(self.closing.clone().run_until_cancelled_owned(reopening)));
    }
}

impl LogPath {
    pub(super) fn count_failure(&self, reason: &str) {
        self.failures.fetch_add(1, Ordering::Relaxed);
        *self.failure.lock() = Some(reason.to_owned());
    }

    /// The error as the reason of a failure. The folder is shown beside it, so it is not repeated.
    pub(super) fn reason(&self, error: &OpenError) -> String {
        match error {
            OpenError::Io { path, source } if *path == self.folder => source.to_string(),
            error => error.to_string(),
        }
    }

    /// Keeps the reason of the last attempt to reopen the path: the first failure may only be its consequence.
    fn still_down(&self, error: &OpenError) {
        let reason = self.reason(error);
        let folder = self.folder.display();
        let before = self.failure.lock().replace(reason.clone());
        if before.is_some_and(|before| is_same(&before, &reason)) {
            tracing::debug!(%folder, reason, "G3 path is still down");
        } else {
            tracing::warn!(%folder, reason, "G3 path is still down, for another reason than before");
        }
    }
}

/// Takes the path down when the device does not answer, and when the folder was removed, moved away or mounted over,
/// because later writes would be lost.
async fn watch(log_path: Weak<LogPath>) {
    let mut folder_check: Option<JoinHandle<()>> = None;
    loop {
        sleep(CHECK_INTERVAL).await;
        let Some(log_path) = log_path.upgrade() else { return };
        let Some(log) = log_path.log() else { continue };
        if folder_check.as_ref().is_none_or(JoinHandle::is_finished) {
            let (log_path, log) = (log_path.clone(), log.clone());
            // Not tracked, because a close must not wait for it.
            folder_check = Some(log_path.runtime.clone().spawn_blocking(move || match log.check_folder() {
                Ok(()) => log.check_space(),
                Err(error) => {
                    log.mark_failed(&error);
                    log_path.check(&log);
                }
            }));
        }
        let Some(longest) = log.io.longest_running().filter(|longest| *longest >= DEVICE_TIMEOUT) else { continue };
        let why = format!("the device did not answer for {} s", longest.as_secs());
        log.mark_failed(&io::Error::new(io::ErrorKind::TimedOut, why));
        let checking = log_path.clone();
        drop(log_path.spawn_blocking(move || checking.check(&log)));
    }
}

/// The message of a panic.
fn panic_message(panic: &(dyn Any + Send)) -> &str {
    let text = panic.downcast_ref::<String>().map(String::as_str);
    text.or_else(|| panic.downcast_ref::<&str>().copied()).unwrap_or("no message")
}

/// Whether a reason that follows another one says the same of the path. What has happened to a folder that is no longer
/// in its place is known only at the attempt to open it again.
fn is_same(before: &str, now: &str) -> bool {
    before == now || before == REPLACED && [GONE, MOUNTED_OVER].contains(&now)
}

/// Delay before the first attempt to reopen after so many consecutive failures.
fn retry_delay(consecutive_failures: u32) -> Duration {
    COOLDOWN.saturating_mul(1 << consecutive_failures.min(6)).min(MAX_RETRY_DELAY)
}

async fn reopen(log_path: Weak<LogPath>, mut retry_delay: Duration) {
    loop {
        sleep(retry_delay).await;
        let Some(log_path) = log_path.upgrade() else { return };
        let opened = log_path.clone().spawn_blocking(move || {
            let opened = log_path.open();
            match &opened {
                Ok(()) => {
                    tracing::info!(folder = %log_path.folder.display(), "G3 path is usable again");
                    log_path.recover();
                }
                Err(error) => log_path.still_down(error),
            }
            opened.is_ok()
        });
        // After a panic too, the next attempt follows.
        if opened.await.unwrap_or(false) {
            return;
        }
        retry_delay = (retry_delay * 2).min(MAX_RETRY_DELAY);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_folder_that_is_gone_is_one_reason_in_other_words() {
        assert!(is_same(REPLACED, GONE) && is_same(REPLACED, MOUNTED_OVER) && is_same(GONE, GONE));
        assert!(!is_same(GONE, MOUNTED_OVER), "it was removed, and then mounted");
        assert!(!is_same(REPLACED, "Permission denied (os error 13)"));
    }
}
