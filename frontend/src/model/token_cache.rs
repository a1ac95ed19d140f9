//! Tokens of texts that were tokenized before, by cache domain, within a limit of bytes.
//!
//! Entries are compared by their whole key, because tokens of another text would be a wrong prompt. Eviction is by two
//! generations, as in a copying collector: an entry that is used moves to the young one, and when the young one has
//! half of the capacity, the old one is dropped.

use foldhash::fast::{FixedState, RandomState};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::hash::BuildHasher;
use std::mem;
use std::sync::Arc;
use worker::engine::Domain;

/// Bytes of an entry beside key and tokens: two reference counts, the domain, and its place in the table.
const ENTRY_BYTES: usize = 192;

/// Tokens by key.
pub(crate) struct TokenCache {
    /// Of the whole text of a prompt, so a fast one. It is seeded, and a client that finds keys that collide has only
    /// that the tokens of one of them are not kept.
    hasher: RandomState,
    generations: Mutex<Generations>,
    capacity: usize,
}

/// Entries by the hash of their key.
type Entries = HashMap<u64, Entry, FixedState>;

#[derive(Default)]
struct Generations {
    young: Entries,
    /// Bytes of the young entries.
    bytes: usize,
    old: Entries,
}

struct Entry {
    domain: Domain,
    key: Box<[u8]>,
    tokens: Arc<[u32]>,
}

impl Entry {
    fn bytes(&self) -> usize {
        self.key.len() + size_of_val(&*self.tokens) + ENTRY_BYTES
    }

    fn is(&self, domain: &Domain, key: &[u8]) -> bool {
        self.domain == *domain && *self.key == *key
    }
}

impl TokenCache {
    /// A cache of at most `capacity` bytes.
    pub(crate) fn new(capacity: usize) -> Self {
        Self { hasher: RandomState::default(), generations: Mutex::default(), capacity }
    }

    /// The tokens of this key in a domain.
    pub(crate) fn get(&self, domain: &Domain, key: &[u8]) -> Option<Arc<[u32]>> {
        let hash = self.hasher.hash_one((domain, key));
        let mut generations = self.generations.lock();
        if let Some(entry) = generations.young.get(&hash) {
            return entry.is(domain, key).then(|| Arc::clone(&entry.tokens));
        }
        if !generations.old.get(&hash)?.is(domain, key) {
            return None;
        }
        let entry = generations.old.remove(&hash)?;
        let tokens = Arc::clone(&entry.tokens);
        let dropped = generations.insert(hash, entry, self.capacity / 2);
        drop(generations);
        drop(dropped);
        Some(tokens)
    }

    /// Keeps the tokens of this key in a domain. An entry that would take more than an eighth of the cache is not kept.
    pub(crate) fn insert(&self, domain: &Domain, key: &[u8], tokens: Arc<[u32]>) {
        let entry = Entry { domain: domain.clone(), key: key.into(), tokens };
        if entry.bytes() > self.capacity / 8 {
            return;
        }
        let hash = self.hasher.hash_one((domain, key));
        let dropped = self.generations.lock().insert(hash, entry, self.capacity / 2);
        // After the lock: freeing a generation takes milliseconds.
        drop(dropped);
    }

    #[cfg(test)]
    pub(super) fn entries(&self) -> usize {
        let generations = self.generations.lock();
        generations.young.len() + generations.old.len()
    }

    #[cfg(test)]
    fn bytes(&self) -> usize {
        let generations = self.generations.lock();
        generations.young.values().chain(generations.old.values()).map(Entry::bytes).sum()
    }
}

impl Generations {
    /// Adds an entry to the young generation of at most `limit` bytes. Returns what is no longer needed.
    fn insert(&mut self, hash: u64, entry: Entry, limit: usize) -> Entries {
        let mut dropped = Entries::default();
        if self.bytes + entry.bytes() > limit {
            dropped = mem::replace(&mut self.old, mem::take(&mut self.young));
            self.bytes = 0;
        }
        self.bytes += entry.bytes();
        if let Some(replaced) = self.young.insert(hash, entry) {
            self.bytes -= replaced.bytes();
        }
        dropped
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn tokens(number: u32) -> Arc<[u32]> {
        vec![number; 10].into()
    }

    #[test]
    fn entries_in_use_outlive_those_that_are_not() {
        let (cache, all) = (TokenCache::new(64 << 10), Domain::shared());
        cache.insert(&all, b"used", tokens(7));
        for number in 0..2000_u32 {
            cache.insert(&all, &number.to_le_bytes(), tokens(number));
            assert_eq!(cache.get(&all, b"used"), Some(tokens(7)), "after {number}");
        }
        assert!(cache.bytes() <= 64 << 10);
        assert_eq!(cache.get(&all, &1999_u32.to_le_bytes()), Some(tokens(1999)));
        assert_eq!(cache.get(&all, &0_u32.to_le_bytes()), None);
    }

    #[test]
    fn an_entry_is_found_in_its_domain_only() {
        let (cache, all, ann) = (TokenCache::new(8 << 10), Domain::shared(), Domain::derived(b"secret", "ann"));
        cache.insert(&ann, b"text", tokens(1));
        assert_eq!((cache.get(&all, b"text"), cache.get(&ann.salted("s"), b"text")), (None, None));
        cache.insert(&all, b"text", tokens(2));
        assert_eq!((cache.get(&ann, b"text"), cache.get(&all, b"text")), (Some(tokens(1)), Some(tokens(2))));
    }

    #[test]
    fn an_entry_that_would_fill_the_cache_is_not_kept() {
        let (cache, all) = (TokenCache::new(8 << 10), Domain::shared());
        cache.insert(&all, &[0; 1 << 10], tokens(1));
        assert_eq!((cache.get(&all, &[0; 1 << 10]), cache.bytes()), (None, 0));
        cache.insert(&all, &[0; 500], tokens(1));
        cache.insert(&all, &[0; 500], tokens(2));
        assert_eq!((cache.get(&all, &[0; 500]), cache.bytes()), (Some(tokens(2)), 500 + 40 + ENTRY_BYTES));
    }
}
