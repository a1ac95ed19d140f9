//! Tiers whose blocks rest in another form than they travel in: encoded, encrypted.
//!
//! This room owns the wrapper that turns any tier into such a tier, and its two transforms: [`codec`] makes blocks
//! smaller without loss, [`crypt`] encrypts them and keeps the keys. It promises that what comes back is what was
//! stored, or an error. Not here: storing. The tier below does that.
//!
//! ```text
//!   manager ── raw ──▶ Formed<codec> ── encoded ──▶ Formed<cipher> ── encrypted ──▶ any tier
//! ```
//!
//! The tier below sees ordinary blocks whose header describes the bytes as they rest, so it can check, list and recover
//! them without knowing the form. The checksum of the engine's bytes travels inside: what was damaged before it was
//! given the form is still found out after the form was taken off.

mod buffers;
pub mod codec;
pub mod crypt;

pub(crate) use buffers::Buffers;

use crate::block::{Block, Date, Fingerprint, Level, SequenceHash};
use crate::tier::{LoadError, Loaded, StoreError, Tier, Usage};
use futures::future::BoxFuture;
use futures::stream::{self, BoxStream, StreamExt};
use std::io;
use std::num::NonZero;
use std::sync::Arc;
use tokio::sync::Semaphore;
use tokio_util::task::AbortOnDropHandle;

/// A form, and how it is given and taken.
pub(crate) trait Form: Send + Sync + 'static {
    /// Gives a block the form in which it rests.
    fn give(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Block, StoreError>>;

    /// Takes the form off a block that [checks](Block::check).
    fn take(self: Arc<Self>, block: Block) -> BoxFuture<'static, Result<Taken, LoadError>>;
}

/// What is left of a block without its form.
pub(crate) enum Taken {
    /// The block as it was given.
    Block(Block),
    /// Nothing, for now.
    Miss,
    /// Nothing, for good: the block can go.
    Gone,
}

/// A tier and the form of its blocks.
pub(crate) struct Formed<F> {
    tier: Arc<dyn Tier>,
    form: Arc<F>,
}

impl<F: Form> Formed<F> {
    /// Blocks of one request whose form is given or taken at the same time; how many really are is for the form's
    /// [`Hands`] to say.
    const TOGETHER: usize = 32;

    pub(crate) fn new(tier: Arc<dyn Tier>, form: F) -> Self {
        Self { tier, form: Arc::new(form) }
    }
}

impl<F: Form> Tier for Formed<F> {
    fn level(&self) -> Level {
        self.tier.level()
    }

    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.tier.holds(fingerprint, names)
    }

    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let (tier, form) = (self.tier.clone(), self.form.clone());
        let take = move |name: SequenceHash, answer: Result<Option<Block>, LoadError>| {
            let (tier, form) = (tier.clone(), form.clone());
            async move {
                let Some(block) = answer? else { return Ok(None) };
                block.check(name, fingerprint)?;
                Ok(match form.take(block).await? {
                    Taken::Block(block) => Some(block),
                    Taken::Miss => None,
                    Taken::Gone => {
                        tier.discard(fingerprint, name);
                        None
                    }
                })
            }
        };
        let found = self.tier.load(fingerprint, names.clone());
        found
            .map(move |(index, answer)| {
                let taking = take(names[index], answer);
                async move { (index, taking.await) }
            })
            .buffer_unordered(Self::TOGETHER)
            .boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        let give = move |block: Block| async move {
            let Block { header, .. } = &block;
            // What is there already would be given its form for nothing.
            match self.tier.holds(header.fingerprint, &[header.hash]) {
                0 => self.form.clone().give(block).await.map(Some),
                _ => Ok(None),
            }
        };
        Box::pin(async move {
            let given: Vec<_> = stream::iter(blocks).map(give).buffered(Self::TOGETHER).collect().await;
            let mut passed = Vec::with_capacity(given.len());
            let answers: Vec<Result<bool, StoreError>> = given
                .into_iter()
                .map(|given| {
                    let block = given?;
                    let wanted = block.is_some();
                    passed.extend(block);
                    Ok(wanted)
                })
                .collect();
            let mut stored = self.tier.store(passed).await.into_iter();
            let answer = |answer: Result<bool, StoreError>| {
                if answer? { stored.next().expect("a tier answers for each block") } else { Ok(()) }
            };
            answers.into_iter().map(answer).collect()
        })
    }

    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        self.tier.discard(fingerprint, name);
    }

    fn expire_one(&self, fingerprint: Fingerprint, name: SequenceHash) -> usize {
        self.tier.expire_one(fingerprint, name)
    }

    fn expire(&self, now: Date) -> usize {
        self.tier.expire(now)
    }

    fn usage(&self) -> Usage {
        self.tier.usage()
    }
}

/// The threads that a form may keep busy, over all requests.
pub(crate) struct Hands {
    free: Arc<Semaphore>,
    count: usize,
}

impl Hands {
    /// As many as there are cores.
    pub(crate) fn new() -> Self {
        let count = std::thread::available_parallelism().map_or(1, NonZero::get);
        Self { free: Arc::new(Semaphore::new(count)), count }
    }

    pub(crate) fn count(&self) -> usize {
        self.count
    }

    /// Runs `work` off the async threads. Dropping the future calls off what has not started.
    pub(crate) async fn run<T: Send + 'static>(&self, work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
        let permit = self.free.clone().acquire_owned().await.map_err(io::Error::other)?;
        let running = tokio::task::spawn_blocking(move || {
            let done = work();
            drop(permit);
            done
        });
        AbortOnDropHandle::new(running).await.map_err(io::Error::other)
    }
}
