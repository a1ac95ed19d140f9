//! Authentication of metadata: the footers of segments (G3) and the manifests of a shared store.
//!
//! ```text
//!   master key ── wraps ─▶ data key of the reserved domain ── derives ─▶ metadata key ── BLAKE3, keyed ─▶ tag
//! ```
//!
//! The data key is wrapped, rotated and shared like those of cache domains ([`super::Keyring`]), so metadata stays
//! valid when the master key is replaced. A tag covers the kind of the metadata, its position and all its bytes: a
//! footer is valid in its segment only, and a manifest for its writer and number only.

use super::KeyError;
use super::cipher::DataKey;
use super::keyring::{KeyLookup, Keyring};
use crate::block::{DomainId, KeyId};
use parking_lot::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::collections::HashMap;
use std::sync::Arc;

/// The domain of the data keys for metadata. The ids of other domains are hashes, so none equals it.
pub(super) const DOMAIN: DomainId = DomainId::from_bytes(*b"\xFF\xFFblkyd-metadata");

/// Bytes of a stored [`MetadataTag`].
pub(crate) const METADATA_TAG_LEN: usize = 40;

/// Kind and position of metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Context {
    /// The footer of the segment with this number.
    Footer(u32),
    /// The manifest of a writer, by its number.
    Manifest([u8; 16], u64),
}

impl Context {
    /// Encodes the context in a fixed length, so that context and content cannot be confused.
    fn bytes(self) -> [u8; 32] {
        let mut bytes = [0; 32];
        match self {
            Self::Footer(segment) => {
                bytes[..8].copy_from_slice(b"footer  ");
                bytes[8..12].copy_from_slice(&segment.to_le_bytes());
            }
            Self::Manifest(writer, number) => {
                bytes[..8].copy_from_slice(b"manifest");
                bytes[8..24].copy_from_slice(&writer);
                bytes[24..].copy_from_slice(&number.to_le_bytes());
            }
        }
        bytes
    }
}

/// A tag of metadata, and the id of its key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct MetadataTag {
    pub(crate) key: KeyId,
    tag: [u8; 32],
}

impl MetadataTag {
    pub(crate) fn to_bytes(self) -> [u8; METADATA_TAG_LEN] {
        let mut bytes = [0; METADATA_TAG_LEN];
        bytes[..8].copy_from_slice(self.key.as_bytes());
        bytes[8..].copy_from_slice(&self.tag);
        bytes
    }

    pub(crate) fn from_bytes(bytes: &[u8; METADATA_TAG_LEN]) -> Self {
        let key = KeyId::from_bytes(std::array::from_fn(|i| bytes[i]));
        Self { key, tag: std::array::from_fn(|i| bytes[8 + i]) }
    }
}

/// Result of verifying metadata.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Authenticity {
    /// The tag was made with the key.
    Authentic,
    /// The tag does not match.
    Forged,
    /// The key is not in memory.
    UnknownKey,
}

/// The keys that authenticate metadata. They are fetched in advance, so making and verifying a tag never waits.
pub struct MetadataKeys {
    keys: Arc<Keyring>,
    state: RwLock<State>,
}

#[derive(Default)]
struct State {
    /// The key of new tags.
    tagging_key: Option<KeyId>,
    /// Metadata keys by the data keys that they are derived from.
    secrets: HashMap<KeyId, [u8; 32]>,
}

impl MetadataKeys {
    /// Fetches the metadata keys, and creates the first one. While the key store is unreachable there are none:
    /// metadata gets no tag, and none is accepted.
    pub async fn open(keys: Arc<Keyring>) -> Result<Arc<Self>, KeyError> {
        let metadata = Arc::new(Self { keys, state: RwLock::default() });
        match metadata.fetch_all().await {
            Err(error @ (KeyError::Store(_) | KeyError::Timeout)) => {
                tracing::warn!(%error, "cannot read the metadata keys; segments are scanned instead");
            }
            done => done?,
        }
        Ok(metadata)
    }

    async fn fetch_all(&self) -> Result<(), KeyError> {
        self.ready().await?;
        for key in self.keys.listed(DOMAIN).await? {
            match self.fetch(key).await {
                Err(error @ (KeyError::UnknownMasterKey { .. } | KeyError::Corrupt { .. })) => {
                    tracing::warn!(%error, "a metadata key is unusable; metadata authenticated with it is ignored");
                }
                done => drop(done?),
            }
        }
        Ok(())
    }

    /// Resolves when there is a key for new tags.
    pub(crate) async fn ready(&self) -> Result<(), KeyError> {
        if self.read().tagging_key.is_none() {
            let key = self.keys.encryption_key(DOMAIN).await?;
            let mut state = self.write();
            state.secrets.insert(key.id(), secret(&key));
            state.tagging_key = Some(key.id());
        }
        Ok(())
    }

    /// Fetches a key that is not in memory. Returns false if it does not exist.
    pub(crate) async fn fetch(&self, key: KeyId) -> Result<bool, KeyError> {
        if self.read().secrets.contains_key(&key) {
            return Ok(true);
        }
        let KeyLookup::Key(found) = self.keys.find(DOMAIN, key).await? else { return Ok(false) };
        self.write().secrets.insert(key, secret(&found));
        Ok(true)
    }

    /// The tag of metadata. `None` if there is no key yet.
    pub(crate) fn make_tag(&self, context: Context, bytes: [&[u8]; 2]) -> Option<MetadataTag> {
        let state = self.read();
        let key = state.tagging_key?;
        Some(MetadataTag { key, tag: *tag(state.secrets.get(&key)?, context, bytes).as_bytes() })
    }

    /// Verifies metadata, in constant time.
    pub(crate) fn verify(&self, context: Context, bytes: [&[u8]; 2], found: &MetadataTag) -> Authenticity {
        let state = self.read();
        match state.secrets.get(&found.key) {
            None => Authenticity::UnknownKey,
            // `blake3::Hash` compares in constant time.
            Some(secret) if tag(secret, context, bytes) == found.tag => Authenticity::Authentic,
            Some(_) => Authenticity::Forged,
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, State> {
        // Each change under this lock is one insertion.
        self.state.read()
    }

    fn write(&self) -> RwLockWriteGuard<'_, State> {
        self.state.write()
    }
}

fn secret(key: &DataKey) -> [u8; 32] {
    blake3::derive_key("blockyard 2026-11 metadata authentication", key.secret())
}

/// The tag of two parts, one after the other.
fn tag(secret: &[u8; 32], context: Context, bytes: [&[u8]; 2]) -> blake3::Hash {
    let mut hasher = blake3::Hasher::new_keyed(secret);
    hasher.update(&context.bytes()).update(bytes[0]).update(bytes[1]);
    hasher.finalize()
}
