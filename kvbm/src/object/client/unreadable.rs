//! Objects that cannot be read although the store serves reads: moved to cold storage, or encrypted with a disabled
//! key.
//!
//! Each is skipped and retried after a pause that doubles from seconds to an hour, so that such an object neither
//! blocks the work on others nor costs many requests. At most [`MAX_OBJECTS`] are remembered; further ones are skipped
//! without being retried.

use object_store::Error;
use object_store::path::Path;
use parking_lot::{Mutex, MutexGuard};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::time::Duration;
use tokio::time::Instant;

/// The first pause outlasts a fault of seconds. With the longest one, a restored object is read within the hour.
const PAUSE_MIN: Duration = Duration::from_secs(2);
const PAUSE_MAX: Duration = Duration::from_hours(1);
/// Some megabytes of paths.
const MAX_OBJECTS: usize = 10_000;

/// The objects that could not be read, and when each is retried.
#[derive(Default)]
pub(in crate::object) struct Unreadable {
    retries: Mutex<HashMap<Path, Retry>>,
}

struct Retry {
    due: Instant,
    pause: Duration,
}

impl Unreadable {
    /// Number of objects.
    pub(in crate::object) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether an object failed before and its retry is not due yet.
    pub(in crate::object) fn is_waiting(&self, path: &Path) -> bool {
        self.lock().get(path).is_some_and(|retry| retry.due > Instant::now())
    }

    /// Records a failed read of an object.
    pub(in crate::object) fn record_failure(&self, path: &Path, error: &Error) {
        let mut retries = self.lock();
        let full = retries.len() >= MAX_OBJECTS;
        match retries.entry(path.clone()) {
            Entry::Occupied(mut entry) => {
                let pause = (entry.get().pause * 2).min(PAUSE_MAX);
                entry.insert(Retry { due: Instant::now() + pause, pause });
            }
            Entry::Vacant(_) if full => {}
            Entry::Vacant(entry) => {
                entry.insert(Retry { due: Instant::now() + PAUSE_MIN, pause: PAUSE_MIN });
                tracing::warn!(object = %path, %error, "cannot read an object; it is skipped and retried later");
            }
        }
    }

    /// Records that an object was read or deleted.
    pub(in crate::object) fn record_success(&self, path: &Path) {
        if self.lock().remove(path).is_some() {
            tracing::info!(object = %path, "the object is readable again or deleted");
        }
    }

    /// The object whose retry has been due for the longest time.
    pub(in crate::object) fn next_due(&self) -> Option<Path> {
        let (retries, now) = (self.lock(), Instant::now());
        let due = retries.iter().filter(|(_, retry)| retry.due <= now);
        due.min_by_key(|(_, retry)| retry.due).map(|(path, _)| path.clone())
    }

    /// Keeps only the objects for which `exists` is true.
    pub(in crate::object) fn retain(&self, exists: impl Fn(&Path) -> bool) {
        self.lock().retain(|path, _| exists(path));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Path, Retry>> {
        // One entry changes at a time, and no code that could panic runs in between.
        self.retries.lock()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error() -> Error {
        Error::PermissionDenied { path: "a".into(), source: "archived".into() }
    }

    #[tokio::test(start_paused = true)]
    async fn retries_of_an_unreadable_object_become_rare() {
        let unreadable = Unreadable::default();
        let path = Path::from("a");
        let start = Instant::now();
        let mut tries = 0;
        while start.elapsed() < Duration::from_hours(10) {
            if let Some(due) = unreadable.next_due().or_else(|| (tries == 0).then(|| path.clone())) {
                unreadable.record_failure(&due, &error());
                tries += 1;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!((18..=24).contains(&tries), "{tries} tries in ten hours");
        assert!(unreadable.is_waiting(&path) && !unreadable.is_waiting(&Path::from("b")));
        unreadable.record_success(&path);
        assert_eq!((unreadable.len(), unreadable.next_due()), (0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_remembered_objects_is_bounded() {
        let unreadable = Unreadable::default();
        for number in 0..MAX_OBJECTS + 100 {
            unreadable.record_failure(&Path::from(number.to_string()), &error());
        }
        assert_eq!(unreadable.len(), MAX_OBJECTS);
        unreadable.retain(|path| path.as_ref() == "7");
        assert_eq!(unreadable.len(), 1);
    }
}
