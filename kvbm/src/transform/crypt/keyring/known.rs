//! What a process knows about data keys: those in memory, and which others it need not ask the key store for.

use super::super::cipher::DataKey;
use super::super::key_store::ShredNotice;
use super::super::master_key::MasterKeys;
use crate::block::{DomainId, KeyId};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use tokio::time::Instant;

/// The keys in memory, and what is known about the others.
pub(super) struct KnownKeys {
    pub(super) masters: Arc<MasterKeys>,
    /// Time of the last read of the source.
    pub(super) read: Instant,
    /// Time of the last listing of the key store.
    pub(super) refreshed: Instant,
    /// Time at which the key store failed, if its last request did.
    pub(super) failed: Option<Instant>,
    pub(super) unwrapped: HashMap<(DomainId, KeyId), Arc<DataKey>>,
    /// The key of each domain that encrypts new blocks.
    pub(super) encryption_keys: HashMap<DomainId, Arc<DataKey>>,
    pub(super) shredded: HashSet<(DomainId, KeyId)>,
    /// Keys that the key store lacks.
    pub(super) unknown: HashSet<(DomainId, KeyId)>,
    /// Notices that existed at the start or were applied.
    pub(super) notices: HashSet<ShredNotice>,
    /// Domains that were shredded recently, with the time at which this process learned of it.
    pub(super) recently_shredded: HashMap<DomainId, Instant>,
    /// Whether the keys that were shredded before the start are known.
    pub(super) opened: bool,
}

/// Result of a lookup of a data key.
pub(in crate::transform::crypt) enum KeyLookup {
    Key(Arc<DataKey>),
    Shredded,
    /// The key store has no such key.
    Unknown,
}

impl KnownKeys {
    pub(super) fn new(masters: MasterKeys) -> Self {
        let now = Instant::now();
        Self {
            masters: Arc::new(masters),
            read: now,
            refreshed: now,
            failed: None,
            unwrapped: HashMap::new(),
            encryption_keys: HashMap::new(),
            shredded: HashSet::new(),
            unknown: HashSet::new(),
            notices: HashSet::new(),
            recently_shredded: HashMap::new(),
            opened: false,
        }
    }

    /// The result of a lookup if it needs no request to the key store.
    pub(super) fn get(&self, domain: DomainId, key: KeyId) -> Option<KeyLookup> {
        if let Some(data) = self.unwrapped.get(&(domain, key)) {
            return Some(KeyLookup::Key(data.clone()));
        }
        if self.shredded.contains(&(domain, key)) {
            return Some(KeyLookup::Shredded);
        }
        self.unknown.contains(&(domain, key)).then_some(KeyLookup::Unknown)
    }
}
