//! Encryption of blocks at rest: AES-256-GCM, a data key per cache domain, wrapped by a master key.
//!
//! ```text
//!   master key (file, environment, command)
//!      └─ wraps ─▶ data keys of a domain (small objects: `keyring`)
//!                     └─ derives, with 24 random bytes ─▶ the key of one block (`cipher`)
//! ```
//!
//! What stands in the clear is the header: name, parent, fingerprint, length, codec, domain, data key. All of it is
//! authenticated. Who holds the store can drop blocks and put old ones back, each under its own name; nothing else.
//! A block in the clear is refused where everything is to be encrypted: the store could have put it there.
//!
//! **No nonce is ever used twice**, because none is chosen: each block has a key of its own, derived from its data key and
//! 24 random bytes, and the nonce under it is zero. A name does not decide its bytes (engines whose sums depend on the
//! batch write different ones), so nothing may be derived from it; and random bytes so many need no count of blocks, no
//! state that survives a crash, and no agreement between writers: 2^80 blocks under one data key leave the chance of a
//! repetition below 2^-32.
//!
//! Dropping a domain's data keys shreds it ([`Keys::shred`]): its blocks are misses from then on, whoever has the store.

mod cipher;
mod key_source;
mod key_store;
mod keyring;
mod master_key;
mod metadata;
#[cfg(test)]
mod tests;

pub use key_source::{Environment, KeySource, SourceError};
pub use keyring::Keys;
pub use master_key::MasterId;
pub use metadata::MetadataKeys;
pub(crate) use metadata::{Authenticity, Context, SEAL, Seal};

use super::{Buffers, Form, Formed, Hands, Taken};
use crate::block::{Block, Corrupt, DomainId, KeyId, Level};
use crate::metrics::Metrics;
use crate::tier::{LoadError, StoreError, Tier};
use futures::future::{BoxFuture, FutureExt};
use keyring::Found;
use std::io;
use std::sync::Arc;

/// A tier whose blocks rest encrypted, each under a data key of its domain.
///
/// What is to be compressed is compressed before: `encoded(encrypted(tier, …), …)`.
pub fn encrypted(tier: Arc<dyn Tier>, keys: Arc<Keys>, metrics: Metrics) -> Arc<dyn Tier> {
    let form = Encryption { level: tier.level(), keys, metrics, hands: Hands::new(), buffers: Arc::default() };
    Arc::new(Formed::new(tier, form))
}

/// A data key cannot be had now. Its blocks are not lost.
#[derive(Debug, thiserror::Error)]
pub enum KeyError {
    /// No master key.
    #[error(transparent)]
    Source(#[from] SourceError),
    /// The place of the wrapped keys failed.
    #[error("key store: {0}")]
    Store(#[from] object_store::Error),
    /// The place of the wrapped keys did not answer in time.
    #[error("key store: no answer")]
    Silent,
    /// The master key that wraps it is not among those that the source gives.
    #[error(
        "data key {key} of domain {domain} is wrapped by master key {master}, which the key source does not contain"
    )]
    Locked {
        /// Whose key.
        domain: DomainId,
        /// Which.
        key: KeyId,
        /// What would open it.
        master: MasterId,
    },
    /// The wrapped key was changed.
    #[error("data key {key} of domain {domain} is corrupt")]
    Damaged {
        /// Whose key.
        domain: DomainId,
        /// Which.
        key: KeyId,
    },
    /// The domain is not one of tenants: its keys authenticate metadata.
    #[error("domain {0} is reserved for the keys of metadata")]
    Reserved(DomainId),
    /// The domain was shredded just now: what is stored may be from before.
    #[error("domain {0} was shredded; it gets a new data key in a few seconds")]
    Settling(DomainId),
    /// The operating system has no random bytes to give.
    #[error("the system returned no random bytes")]
    Random,
}

struct Encryption {
    level: Level,
    keys: Arc<Keys>,
    metrics: Metrics,
    hands: Hands,
    buffers: Arc<Buffers>,
}

impl Form for Encryption {
    fn give(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Block, StoreError>> {
        async move {
            let key = self.keys.writing(block.header.domain).await.map_err(io::Error::other)?;
            let buffers = self.buffers.clone();
            let encrypted = self.hands.run(move || key.encrypt(&block, &buffers)).await?;
            Ok(encrypted.map_err(io::Error::other)?)
        }
        .boxed()
    }

    fn take(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Taken, LoadError>> {
        async move {
            let id = block.header.key.ok_or(Corrupt::Transform)?;
            let key = match self.keys.find(block.header.domain, id).await.map_err(io::Error::other)? {
                Found::Key(key) => key,
                missing => {
                    self.metrics.shredded(self.level);
                    return Ok(if missing.is_shredded() { Taken::Gone } else { Taken::Miss });
                }
            };
            let buffers = self.buffers.clone();
            let decrypted = self.hands.run(move || key.decrypt(&block, &buffers)).await?;
            Ok(Taken::Block(decrypted?))
        }
        .boxed()
    }
}
