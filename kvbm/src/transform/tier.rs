//! A tier that transforms blocks on the way to another tier and back.

use crate::block::{Block, Fingerprint, SequenceHash};
use crate::tier::{LoadError, Loaded, StoreError, Tier, delegate};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use std::sync::Arc;

/// An invertible change of a block's payload.
pub(super) trait Transform: Send + Sync + 'static {
    /// Transforms a block before it is stored.
    fn apply(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Block, StoreError>>;

    /// Inverts the transform of a loaded block, which passed [`Block::check`].
    fn invert(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Inverted, LoadError>>;
}

/// Result of [`Transform::invert`].
pub(super) enum Inverted {
    /// The block as it was stored.
    Block(Block),
    /// This process has no key for the block; another one may have it. The block is withdrawn: if the tier still held
    /// it, no readable copy would be stored.
    Undecryptable,
    /// The block can never be read again: it is discarded.
    Unreadable,
}

/// A tier with a transform of its blocks.
pub(super) struct TransformedTier<F> {
    tier: Arc<dyn Tier>,
    transform: Arc<F>,
}

impl<F: Transform> TransformedTier<F> {
    /// Maximum number of blocks of one request that are transformed concurrently. The transform's
    /// [`BlockingPool`](super::BlockingPool) limits them further.
    const CONCURRENCY: usize = 32;

    pub(super) fn new(tier: Arc<dyn Tier>, transform: F) -> Self {
        Self { tier, transform: Arc::new(transform) }
    }
}

impl<F: Transform> Tier for TransformedTier<F> {
    delegate!(tier: level, holds, discard, withdraw, expire_one, expire, usage);

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (tier, transform) = (self.tier.clone(), self.transform.clone());
        let invert = move |hash: SequenceHash, answer: Result<Option<Block>, LoadError>| {
            let (tier, transform) = (tier.clone(), transform.clone());
            async move {
                let Some(block) = answer? else { return Ok(None) };
                block.check(hash, fingerprint)?;
                Ok(match transform.invert(block).await? {
                    Inverted::Block(block) => Some(block),
                    Inverted::Undecryptable => {
                        tier.withdraw(fingerprint, hash);
                        None
                    }
                    Inverted::Unreadable => {
                        tier.discard(fingerprint, hash);
                        None
                    }
                })
            }
        };
        let loaded = self.tier.load(fingerprint, hashes.clone());
        loaded
            .map(move |(index, answer)| {
                let inverting = invert(hashes[index], answer);
                async move { (index, inverting.await) }
            })
            .buffer_unordered(Self::CONCURRENCY)
            .boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let apply = move |block: Block| async move {
            let Block { header, .. } = &block;
            // A block that is stored already needs no transform.
            match self.tier.holds(header.fingerprint, &[header.hash]) {
                0 => self.transform.clone().apply(block).await.map(Some),
                _ => Ok(None),
            }
        };
        Box::pin(async move {
            let transformed: Vec<_> = stream::iter(blocks).map(apply).buffered(Self::CONCURRENCY).collect().await;
            let mut to_store = Vec::with_capacity(transformed.len());
            let answers: Vec<Result<bool, StoreError>> = transformed
                .into_iter()
                .map(|block| {
                    let block = block?;
                    let is_new = block.is_some();
                    to_store.extend(block);
                    Ok(is_new)
                })
                .collect();
            let mut stored = self.tier.store(to_store).await.into_iter();
            let answer = |answer: Result<bool, StoreError>| {
                if answer? { stored.next().expect("a tier answers for each block") } else { Ok(()) }
            };
            answers.into_iter().map(answer).collect()
        })
    }
}
