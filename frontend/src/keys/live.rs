//! The keys of a running process, which follow the key file.

use super::file::{KeyEntry, KeyFile, KeyFileError};
use super::{Key, KeyHash};
use parking_lot::RwLock;
use prometheus::IntCounterVec;
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;
use transport::WatchedFiles;

/// The name of the key from the environment.
const FROM_ENVIRONMENT: &str = "BLOCKYARD_API_KEY";

/// The keys in effect.
pub(crate) struct ApiKeys {
    path: Option<PathBuf>,
    /// The key from the environment.
    single: Option<(KeyHash, Arc<Key>)>,
    of_file: RwLock<HashMap<KeyHash, Arc<Key>>>,
    /// What is wrong with the file.
    problem: RwLock<Option<String>>,
    reloads: IntCounterVec,
}

impl ApiKeys {
    /// The keys of a file, whose changes they follow, and the key from the environment. `None` without both: requests
    /// need no key. `reloads` counts the changes by outcome. With a file, this must be called within a runtime.
    pub(crate) fn open(
        path: Option<PathBuf>,
        single: Option<KeyHash>,
        reloads: IntCounterVec,
    ) -> Result<Option<Arc<Self>>, KeyFileError> {
        if path.is_none() && single.is_none() {
            return Ok(None);
        }
        let single = single.map(|hash| (hash, Arc::new(Key::unlimited(FROM_ENVIRONMENT))));
        let files = path.clone().map(|path| WatchedFiles::now(vec![path]));
        let keys = Self { path, single, of_file: RwLock::default(), problem: RwLock::default(), reloads };
        let count = keys.load()?;
        *keys.problem.write() = keys.locks_out(count);
        let keys = Arc::new(keys);
        if let Some(files) = files {
            files.spawn(&keys, Self::reload);
        }
        Ok(Some(keys))
    }

    /// The key that a client presents.
    ///
    /// The table compares hashes, and a comparison may stop at the first byte that differs. Its time tells at most
    /// where the hash of what the client sent differs from that of a key. That is of no use to guess a key, because
    /// no text can be chosen by its SHA-256.
    pub(crate) fn find(&self, presented: &[u8]) -> Option<Arc<Key>> {
        let hash = KeyHash::of(presented);
        match &self.single {
            Some((single, key)) if *single == hash => Some(Arc::clone(key)),
            _ => self.of_file.read().get(&hash).cloned(),
        }
    }

    /// The keys of the file.
    pub(crate) fn of_file(&self) -> Vec<Arc<Key>> {
        self.of_file.read().values().cloned().collect()
    }

    /// What is wrong with the file, without its content, as a predicate: "is not valid".
    pub(crate) fn problem(&self) -> Option<String> {
        self.problem.read().clone()
    }

    fn reload(&self) {
        let (outcome, problem) = match self.load() {
            Ok(keys) => {
                tracing::info!(keys, "API keys reloaded");
                ("applied", self.locks_out(keys))
            }
            Err(error) => {
                tracing::error!(%error, "API keys not reloaded; the previous keys stay in effect");
                ("rejected", Some(format!("{}; the previous keys stay in effect", error.without_content())))
            }
        };
        *self.problem.write() = problem;
        self.reloads.with_label_values(&[outcome]).inc();
    }

    /// The problem of a file with this number of keys if no request has a valid key, which it logs too.
    fn locks_out(&self, keys: usize) -> Option<String> {
        let path = self.path.as_ref().filter(|_| keys == 0 && self.single.is_none())?;
        tracing::warn!(
            "the file of API keys {path:?} has no keys, so every request that needs one gets 401; add a key: blockyard \
             key add --file {path:?} NAME"
        );
        Some("has no keys, so every request that needs one gets 401; add one with `blockyard key add`".to_owned())
    }

    /// Reads the file, and puts its keys into effect. Returns their number.
    fn load(&self) -> Result<usize, KeyFileError> {
        let Some(path) = &self.path else { return Ok(0) };
        let file = KeyFile::read(path)?;
        // One task at a time loads, so nothing changes between these two locks.
        let previous = self.of_file.read().clone();
        let key = |entry: &KeyEntry| {
            let before = previous.get(&entry.hash).map(|key| &**key);
            (entry.hash, Arc::new(Key::new(entry, before)))
        };
        let keys: HashMap<_, _> = file.keys.iter().map(key).collect();
        let count = keys.len();
        let may_have_websockets = |hash| keys.get(hash).is_some_and(|key| key.websocket_problem().is_none());
        let ended: Vec<_> =
            previous.iter().filter(|(hash, _)| !may_have_websockets(*hash)).map(|(_, key)| key).collect();
        *self.of_file.write() = keys;
        for key in ended {
            key.end_websockets();
        }
        Ok(count)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::keys::ApiKey;
    use prometheus::Opts;
    use std::fs;
    use std::num::NonZero;

    fn reloads() -> IntCounterVec {
        IntCounterVec::new(Opts::new("reloads", "r"), &["outcome"]).unwrap()
    }

    fn entry(name: &str, key: &ApiKey, requests: u32) -> KeyEntry {
        KeyEntry { requests_per_minute: NonZero::new(requests), ..KeyEntry::new(name, key.hash()) }
    }

    #[tokio::test]
    async fn a_reload_keeps_what_was_used_of_a_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        let [one, two] = [(); 2].map(|()| ApiKey::generate().unwrap());
        let write = |entries: Vec<KeyEntry>| {
            KeyFile::change(&path, |file| {
                file.keys = entries;
                Ok(())
            })
            .unwrap();
        };
        write(vec![entry("one", &one, 2), entry("two", &two, 2)]);
        let keys = ApiKeys::open(Some(path.clone()), None, reloads()).unwrap().unwrap();
        let take = |key: &ApiKey| keys.find(key.reveal().as_bytes()).unwrap().take_request().is_ok();
        assert!(take(&one) && take(&one) && !take(&one) && take(&two) && take(&two) && !take(&two));
        write(vec![entry("renamed", &one, 2), entry("two", &two, 3)]);
        keys.reload();
        assert!(!take(&one), "the limit is the same");
        assert!(take(&two), "another limit begins anew");
        fs::write(&path, "keys = 1").unwrap();
        keys.reload();
        let problem = keys.problem().unwrap();
        assert!(problem.contains("is not valid: line 1") && problem.ends_with("the previous keys stay in effect"));
        assert!(keys.find(one.reveal().as_bytes()).is_some(), "the previous keys stay");
        fs::remove_file(&path).unwrap();
        write(vec![]);
        keys.reload();
        assert!(keys.find(one.reveal().as_bytes()).is_none());
        let count = |outcome| keys.reloads.with_label_values(&[outcome]).get();
        assert_eq!((count("applied"), count("rejected")), (2, 1));
    }

    #[tokio::test]
    async fn a_file_without_keys_is_a_problem_unless_there_is_another_key() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("keys.toml");
        fs::write(&path, "").unwrap();
        let keys = ApiKeys::open(Some(path.clone()), None, reloads()).unwrap().unwrap();
        assert!(keys.problem().is_some_and(|problem| problem.contains("has no keys")));
        let key = ApiKey::generate().unwrap();
        let set = |entries: Vec<KeyEntry>| {
            KeyFile::change(&path, |file| {
                file.keys = entries;
                Ok(())
            })
            .unwrap();
            keys.reload();
            keys.problem()
        };
        assert_eq!(set(vec![entry("one", &key, 2)]), None);
        assert!(set(vec![]).is_some_and(|problem| problem.contains("has no keys")));
        let keys = ApiKeys::open(Some(path.clone()), Some(key.hash()), reloads()).unwrap().unwrap();
        assert_eq!(keys.problem(), None);
    }

    #[tokio::test]
    async fn only_the_very_key_of_the_environment_is_known() {
        let key = ApiKey::chosen("sixteen-letters!").unwrap();
        let keys = ApiKeys::open(None, Some(key.hash()), reloads()).unwrap().unwrap();
        assert!(keys.find(b"sixteen-letters!").is_some());
        for wrong in ["", "sixteen-letters", "sixteen-letters!!", "Sixteen-letters!"] {
            assert!(keys.find(wrong.as_bytes()).is_none(), "{wrong}");
        }
        assert!(ApiKeys::open(None, None, reloads()).unwrap().is_none());
    }
}
