//! A cache of decoded small objects, so that a scan only reads what is new.
//!
//! Manifests and tombstone lists never change, and an access log that was rewritten has another date: an object of the
//! same size, date and tag has the same contents. Bounded: objects that do not fit are read again by each scan, and
//! cached ones stay, so that a store that is too large still benefits from the whole cache.

use object_store::ObjectMeta;
use object_store::path::Path;
use parking_lot::{Mutex, MutexGuard};
use std::collections::{HashMap, HashSet};

/// Decoded values of small objects.
pub(super) struct ScanCache<T> {
    max_bytes: usize,
    state: Mutex<State<T>>,
}

struct State<T> {
    objects: HashMap<Path, Cached<T>>,
    bytes: usize,
}

struct Cached<T> {
    meta: ObjectMeta,
    bytes: usize,
    value: T,
}

impl<T: Clone> ScanCache<T> {
    /// Creates a cache of at most `max_bytes`.
    pub(super) fn new(max_bytes: usize) -> Self {
        Self { max_bytes, state: Mutex::new(State { objects: HashMap::new(), bytes: 0 }) }
    }

    /// The cached value of an object, if it has not changed.
    pub(super) fn get(&self, meta: &ObjectMeta) -> Option<T> {
        let state = self.lock();
        state.objects.get(&meta.location).filter(|cached| cached.meta == *meta).map(|cached| cached.value.clone())
    }

    /// Caches the value of an object; `bytes` is its size.
    pub(super) fn insert(&self, meta: ObjectMeta, value: T, bytes: usize) {
        let mut state = self.lock();
        state.remove(&meta.location);
        if state.bytes + bytes <= self.max_bytes {
            state.bytes += bytes;
            state.objects.insert(meta.location.clone(), Cached { meta, bytes, value });
        }
    }

    /// Removes objects that do not exist any more.
    pub(super) fn retain(&self, existing: &HashSet<Path>) {
        let mut state = self.lock();
        let deleted: Vec<Path> = state.objects.keys().filter(|path| !existing.contains(*path)).cloned().collect();
        for path in &deleted {
            state.remove(path);
        }
    }

    fn lock(&self) -> MutexGuard<'_, State<T>> {
        // The map and its sum change together, and no code that could panic runs in between.
        self.state.lock()
    }
}

impl<T> State<T> {
    fn remove(&mut self, path: &Path) {
        if let Some(cached) = self.objects.remove(path) {
            self.bytes -= cached.bytes;
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
    fn unchanged_objects_are_cached_and_the_size_is_bounded() {
        let cache = ScanCache::new(100);
        cache.insert(meta("a", 1), 'a', 60);
        cache.insert(meta("b", 1), 'b', 60);
        assert_eq!(
            [cache.get(&meta("a", 1)), cache.get(&meta("a", 2)), cache.get(&meta("b", 1))],
            [Some('a'), None, None]
        );
        cache.retain(&[Path::from("b")].into());
        cache.insert(meta("b", 1), 'b', 60);
        assert_eq!([cache.get(&meta("a", 1)), cache.get(&meta("b", 1))], [None, Some('b')]);
        cache.insert(meta("b", 2), 'c', 100);
        assert_eq!(
            [cache.get(&meta("b", 1)), cache.get(&meta("b", 2))],
            [None, Some('c')],
            "its previous value is replaced"
        );
    }
}
