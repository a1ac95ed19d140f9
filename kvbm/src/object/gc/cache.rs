//! What a collector has read already, so that the next pass reads only what is new.
//!
//! Manifests and lists of removals never change, and a note of uses is another one once it did: an object of the same size,
//! time and tag as the one that was read is the same. Bounded: what there is no room for is read again each time, and what is
//! known stays known, so that a store that is too large costs as much less as fits.

use object_store::ObjectMeta;
use object_store::path::Path;
use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};

/// What small objects said.
pub(in crate::object) struct Known<T> {
    limit: usize,
    state: Mutex<State<T>>,
}

struct State<T> {
    read: HashMap<Path, Read<T>>,
    bytes: usize,
}

struct Read<T> {
    meta: ObjectMeta,
    bytes: usize,
    said: T,
}

impl<T: Clone> Known<T> {
    /// Of so many bytes at most.
    pub(in crate::object) fn new(limit: usize) -> Self {
        Self { limit, state: Mutex::new(State { read: HashMap::new(), bytes: 0 }) }
    }

    /// What an object said when it was read, if it is still the same.
    pub(in crate::object) fn get(&self, meta: &ObjectMeta) -> Option<T> {
        let state = self.lock();
        state.read.get(&meta.location).filter(|read| read.meta == *meta).map(|read| read.said.clone())
    }

    /// An object was read; what it said takes so many bytes.
    pub(in crate::object) fn learn(&self, meta: ObjectMeta, said: T, bytes: usize) {
        let mut state = self.lock();
        state.forget(&meta.location);
        if state.bytes + bytes <= self.limit {
            state.bytes += bytes;
            state.read.insert(meta.location.clone(), Read { meta, bytes, said });
        }
    }

    /// Forgets what is not there any more.
    pub(in crate::object) fn retain(&self, there: &HashSet<Path>) {
        let mut state = self.lock();
        let gone: Vec<Path> = state.read.keys().filter(|path| !there.contains(*path)).cloned().collect();
        for path in &gone {
            state.forget(path);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // Sum and map change together, without anything between that could panic.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl<T> State<T> {
    fn forget(&mut self, path: &Path) {
        if let Some(read) = self.read.remove(path) {
            self.bytes -= read.bytes;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::time::{Duration, SystemTime};

    fn meta(path: &str, seconds: u64) -> ObjectMeta {
        let last_modified = (SystemTime::UNIX_EPOCH + Duration::from_secs(seconds)).into();
        ObjectMeta { location: Path::from(path), last_modified, size: 10, e_tag: None, version: None }
    }

    #[test]
    fn the_same_is_known_another_is_not_and_what_does_not_fit_leaves_what_is_known() {
        let known = Known::new(100);
        known.learn(meta("a", 1), 'a', 60);
        known.learn(meta("b", 1), 'b', 60);
        assert_eq!(
            [known.get(&meta("a", 1)), known.get(&meta("a", 2)), known.get(&meta("b", 1))],
            [Some('a'), None, None]
        );
        known.retain(&[Path::from("b")].into());
        known.learn(meta("b", 1), 'b', 60);
        assert_eq!([known.get(&meta("a", 1)), known.get(&meta("b", 1))], [None, Some('b')]);
        known.learn(meta("b", 2), 'c', 100);
        assert_eq!([known.get(&meta("b", 1)), known.get(&meta("b", 2))], [None, Some('c')], "its own room is free");
    }
}
