//! Encryption of blocks at rest: AES-256-GCM, a data key per cache domain, wrapped by a master key.
//!
//! ```text
//!   master key (file, environment, command)
//!      └─ wraps ─▶ data keys of a domain (small objects: `keyring`)
//!                     └─ derives, with 24 random bytes ─▶ the key of one block (`cipher`)
//! ```
//!
//! The header is not encrypted: hash, parent, fingerprint, length, codec, domain, data key. All of it is authenticated.
//! An attacker with write access to the store can delete blocks, and restore old ones under their own hashes; nothing
//! else. An unencrypted block in an encrypted tier is refused: the attacker could have put it there.
//!
//! **No nonce is used twice with a key**: each block has a key of its own, derived from its data key and 24 random
//! bytes, and its nonce is zero. The key is not derived from the hash, as blocks with the same hash can have different
//! bytes (the sums of some engines depend on the batch). With 24 random bytes no counter, no state that survives a
//! crash and no agreement between writers is needed: after 2^80 blocks under one data key the probability of a
//! repetition is below 2^-32.
//!
//! Deleting a domain's data keys shreds it ([`Keyring::shred`]): from then on its blocks are misses, for all processes.

mod cipher;
mod key_source;
mod key_store;
mod keyring;
mod master_key;
mod metadata;
#[cfg(test)]
mod tests;

pub use key_source::{Environment, KeySource, SourceError};
pub use keyring::Keyring;
pub use master_key::MasterKeyId;
pub use metadata::MetadataKeys;
pub(crate) use metadata::{Authenticity, Context, METADATA_TAG_LEN, MetadataTag};

use super::{BlockingPool, Buffers, Inverted, Transform, TransformedTier, Undecryptable};
use crate::block::{Block, Corrupt, DomainId, KeyId, Level};
use crate::metrics::Metrics;
use crate::tier::{LoadError, StoreError, Tier};
use futures::future::{BoxFuture, FutureExt};
use keyring::KeyLookup;
use std::io;
use std::sync::Arc;

/// A tier that stores blocks encrypted, each under a data key of its domain.
///
/// Compression comes before encryption: `encoded(encrypted(tier, …), …)`.
pub fn encrypted(tier: Arc<dyn Tier>, keys: Arc<Keyring>, metrics: Metrics) -> Arc<dyn Tier> {
    let encryption = Encryption {
        level: tier.level(),
        keys,
        undecryptable: Undecryptable::new(tier.level(), metrics.clone()),
        metrics,
        pool: BlockingPool::new(),
        buffers: Arc::default(),
    };
    Arc::new(TransformedTier::new(tier, encryption))
}

/// A data key is not available now. Its blocks are not lost.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// There is no master key.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The key store failed.
    #[error("key store: {0}")]
    Store(#[from] object_store::Error),
    /// The key store did not answer in time.
    #[error("key store: no answer")]
    Timeout,
    /// The key source does not contain the master key that wraps the data key.
    #[error(
        "data key {key} of domain {domain} is wrapped by master key {master}, which the key source does not contain"
    )]
    UnknownMasterKey {
        /// Domain of the key.
        domain: DomainId,
        /// The data key.
        key: KeyId,
        /// The master key that wraps it.
        master: MasterKeyId,
    },
    /// The wrapped key is corrupt.
    #[error("data key {key} of domain {domain} is corrupt")]
    Corrupt {
        /// Domain of the key.
        domain: DomainId,
        /// The data key.
        key: KeyId,
    },
    /// The domain is reserved: its keys authenticate metadata.
    #[error("domain {0} is reserved for the keys of metadata")]
    Reserved(DomainId),
    /// The domain was shredded recently: blocks from before may still be on their way to the tier.
    #[error("domain {0} was shredded; it gets a new data key in a few seconds")]
    RecentlyShredded(DomainId),
    /// The operating system returned no random bytes.
    #[error("the system returned no random bytes")]
    Random,
}

struct Encryption {
    level: Level,
    keys: Arc<Keyring>,
    undecryptable: Undecryptable,
    metrics: Metrics,
    pool: BlockingPool,
    buffers: Arc<Buffers>,
}

impl Transform for Encryption {
    fn apply(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Block, StoreError>> {
        async move {
            let key = self.keys.encryption_key(block.header.domain).await.map_err(io::Error::other)?;
            let buffers = self.buffers.clone();
            let encrypted = self.pool.run(move || key.encrypt(&block, &buffers)).await?;
            Ok(encrypted.map_err(io::Error::other)?)
        }
        .boxed()
    }

    fn invert(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Inverted, LoadError>> {
        async move {
            let id = block.header.key.ok_or(Corrupt::Transform)?;
            let key = match self.keys.find(block.header.domain, id).await {
                Ok(KeyLookup::Key(key)) => key,
                Ok(KeyLookup::Shredded) => {
                    self.metrics.shredded(self.level);
                    return Ok(Inverted::Unreadable);
                }
                Ok(KeyLookup::Unknown) => {
                    self.undecryptable.count(&block, format_args!("the key store has no data key {id}"));
                    return Ok(Inverted::Undecryptable);
                }
                Err(error @ (KeyError::UnknownMasterKey { .. } | KeyError::Corrupt { .. })) => {
                    self.undecryptable.count(&block, error);
                    return Ok(Inverted::Undecryptable);
                }
                // The key store or the source fails: the key may be there in a moment.
                Err(error) => return Err(io::Error::other(error).into()),
            };
            let buffers = self.buffers.clone();
            let decrypted = self.pool.run(move || key.decrypt(&block, &buffers)).await?;
            Ok(Inverted::Block(decrypted?))
        }
        .boxed()
    }
}
