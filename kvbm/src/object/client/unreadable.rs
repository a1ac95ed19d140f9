//! Objects that cannot be read although the store answers: moved to cold storage, encrypted with a key that is disabled.
//!
//! Each is skipped at once and asked for again after a pause that doubles from seconds to an hour, so that one such object
//! neither stops the work on the others nor costs requests. Bounded: beyond [`MAX_OBJECTS`] an object is skipped without being
//! asked for again.

use object_store::Error;
use object_store::path::Path;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::time::Instant;

/// The first pause lets a fault of seconds pass; after the longest one, an object that was restored is read within the hour.
const PAUSE: (Duration, Duration) = (Duration::from_secs(2), Duration::from_hours(1));
/// Some megabytes of paths.
const MAX_OBJECTS: usize = 10_000;

/// Which objects could not be read, and when each is to be tried again.
#[derive(Default)]
pub(in crate::object) struct Unreadable {
    retries: Mutex<HashMap<Path, Retry>>,
}

struct Retry {
    due: Instant,
    pause: Duration,
}

impl Unreadable {
    /// How many there are.
    pub(in crate::object) fn len(&self) -> usize {
        self.lock().len()
    }

    /// Whether an object failed before and is not to be tried again yet.
    pub(in crate::object) fn is_waiting(&self, path: &Path) -> bool {
        self.lock().get(path).is_some_and(|retry| retry.due > Instant::now())
    }

    /// Notes that an object could not be read.
    pub(in crate::object) fn failed(&self, path: &Path, error: &Error) {
        let mut retries = self.lock();
        let full = retries.len() >= MAX_OBJECTS;
        match retries.entry(path.clone()) {
            Entry::Occupied(mut known) => {
                let pause = (known.get().pause * 2).min(PAUSE.1);
                known.insert(Retry { due: Instant::now() + pause, pause });
            }
            Entry::Vacant(_) if full => {}
            Entry::Vacant(first) => {
                first.insert(Retry { due: Instant::now() + PAUSE.0, pause: PAUSE.0 });
                tracing::warn!(object = %path, %error, "cannot read an object; it is skipped and retried later");
            }
        }
    }

    /// Notes that an object was read, or is gone.
    pub(in crate::object) fn resolved(&self, path: &Path) {
        if self.lock().remove(path).is_some() {
            tracing::info!(object = %path, "the object is readable again or deleted");
        }
    }

    /// The object that has been due for the longest time.
    pub(in crate::object) fn next_due(&self) -> Option<Path> {
        let (retries, now) = (self.lock(), Instant::now());
        let due = retries.iter().filter(|(_, retry)| retry.due <= now);
        due.min_by_key(|(_, retry)| retry.due).map(|(path, _)| path.clone())
    }

    /// Forgets objects that are not there any more.
    pub(in crate::object) fn retain(&self, there: impl Fn(&Path) -> bool) {
        self.lock().retain(|path, _| there(path));
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<Path, Retry>> {
        // One entry changes at a time, and nothing panics meanwhile.
        self.retries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn error() -> Error {
        Error::PermissionDenied { path: "a".into(), source: "archived".into() }
    }

    #[tokio::test(start_paused = true)]
    async fn an_unreadable_object_is_tried_again_ever_more_rarely() {
        let (unreadable, path) = (Unreadable::default(), Path::from("a"));
        let (start, mut tries) = (Instant::now(), 0);
        while start.elapsed() < Duration::from_hours(10) {
            if let Some(due) = unreadable.next_due().or_else(|| (tries == 0).then(|| path.clone())) {
                unreadable.failed(&due, &error());
                tries += 1;
            }
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
        assert!((18..=24).contains(&tries), "{tries} tries in ten hours");
        assert!(unreadable.is_waiting(&path) && !unreadable.is_waiting(&Path::from("b")));
        unreadable.resolved(&path);
        assert_eq!((unreadable.len(), unreadable.next_due()), (0, None));
    }

    #[tokio::test(start_paused = true)]
    async fn the_number_of_unreadable_objects_kept_is_bounded() {
        let unreadable = Unreadable::default();
        for number in 0..MAX_OBJECTS + 100 {
            unreadable.failed(&Path::from(number.to_string()), &error());
        }
        assert_eq!(unreadable.len(), MAX_OBJECTS);
        unreadable.retain(|path| path.as_ref() == "7");
        assert_eq!(unreadable.len(), 1);
    }
}
