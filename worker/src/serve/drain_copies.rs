//! Copies of prefixes to other workers while a worker drains, so that requests find them there once it has ended.
//!
//! ```text
//!   prefixes in memory that requests used again, the most used first
//!     │ not in the object store
//!     ▼
//!   DrainCopies ── prefetch: "copy these blocks from me" ──▶ other worker, with its own limits
//!                                                             │ reads the memory of this one
//!                                                             ▼
//!                                                            G2
//! ```
//!
//! The worker that drains orders the copies itself. It has seen the requests of all routers, so each copy is ordered
//! once, and the worker need not stay registered until routers have ordered theirs. Others load only what they do not
//! have, and decline while they have a queue. What it does not know is their load, and what else they hold: so each
//! prefix goes to one worker, the one that got least so far, except that a prefix of which a worker got at least half
//! goes there too.
//!
//! Not here: which prefixes were used again (`kvbm`), and how a worker copies one.

use crate::engine::{Engine, PeerMemory, PrefetchError, Prefetched, PrefixCopy};
use crate::plane::{Instance, WorkerId};
use futures::StreamExt;
use futures::future::BoxFuture;
use futures::stream::FuturesUnordered;
use kvbm::{BlockManager, SequenceHash};
use std::collections::HashMap;
use std::fmt;
use std::ops::Add;
use std::sync::Arc;
use std::time::Duration;
use tokio::time::{Instant, sleep_until, timeout};

/// The copies of one worker that drains.
pub struct DrainCopies {
    prefixes: Box<dyn Prefixes>,
    /// The memory of the worker that drains.
    source: PeerMemory,
    receivers: Vec<Receiver>,
    /// The receiver of each block for which a copy was ordered, and did not fail.
    ordered: HashMap<SequenceHash, usize>,
    copied: Copies,
}

/// What was copied.
#[derive(Clone, Copy, PartialEq, Eq, Default, Debug)]
pub struct Copies {
    /// Prefixes that other workers have now.
    pub prefixes: u64,
    /// Blocks that they did not have before.
    pub blocks: u64,
    /// Bytes of these.
    pub bytes: u64,
}

/// Where the prefixes come from.
trait Prefixes: Send {
    /// Those that requests used again, the most used first.
    fn used_again(&self) -> BoxFuture<'_, Box<dyn Iterator<Item = Vec<SequenceHash>> + Send>>;

    /// Whether all other workers can load the prefix from a store.
    fn is_stored(&self, prefix: &[SequenceHash]) -> bool;
}

/// A worker that gets copies.
struct Receiver {
    worker: WorkerId,
    engine: Arc<dyn Engine>,
    /// Maximum number of blocks of one copy, which is also that of all copies of a drain.
    max_blocks: u64,
    taken: u64,
    is_copying: bool,
    /// Orders in a row that it declined, and when it gets the next one.
    declined: u32,
    retry_at: Option<Instant>,
    /// It gets no further copy.
    is_done: bool,
}

/// An order that has ended.
struct Ended {
    receiver: usize,
    prefix: Vec<SequenceHash>,
    answer: Result<Prefetched, PrefetchError>,
}

/// The next step of a drain.
enum Next {
    Order(usize),
    /// All receivers copy, or pause.
    Wait,
    /// There is no receiver any more.
    Stop,
}

/// Copies at a time, one for each receiver: few enough to leave the network to running requests.
const MAX_COPIES: usize = 4;
/// A drain takes at most one in this many blocks of G2 of another worker, which declines larger copies, too. The others
/// are of requests that were served there.
const MAX_SHARE: u64 = 4;
/// A receiver has given up a copy by then: the native engine does after 10 s, most of which it waits for its queue.
const COPY_TIMEOUT: Duration = Duration::from_secs(11);
/// Interval at which the process of a receiver is checked during a copy, which fails if it does not answer for two
/// seconds. So a receiver that is frozen, or whose machine is gone, does not delay the end of an idle worker by
/// [`COPY_TIMEOUT`].
const CHECK_INTERVAL: Duration = Duration::from_secs(1);
/// Pause of a receiver that has declined because it had a queue, or made another copy.
const PAUSE: Duration = Duration::from_millis(250);
/// A receiver that declines so often in a row, for two seconds, has no time for copies.
const MAX_DECLINED: u32 = 8;

impl Add for Copies {
    type Output = Self;

    fn add(self, Self { prefixes, blocks, bytes }: Self) -> Self {
        Self { prefixes: self.prefixes + prefixes, blocks: self.blocks + blocks, bytes: self.bytes + bytes }
    }
}

impl DrainCopies {
    /// Copies from a worker to `others`, those of `leaving` excepted, which are about to end. `own` is the instance
    /// that drains, whose blocks `blocks` has and `source` names.
    pub fn new(
        blocks: BlockManager,
        source: PeerMemory,
        own: &Instance,
        others: &[(Arc<Instance>, Arc<dyn Engine>)],
        leaving: &[WorkerId],
    ) -> Self {
        Self::of(Box::new(blocks), source, receivers(own, others, leaving))
    }

    fn of(prefixes: Box<dyn Prefixes>, source: PeerMemory, receivers: Vec<Receiver>) -> Self {
        Self { prefixes, source, receivers, ordered: HashMap::new(), copied: Copies::default() }
    }

    /// What was copied so far.
    pub fn copied(&self) -> Copies {
        self.copied
    }

    /// Copies what is there, and then what the running requests have added, which are those until `requests_ended`.
    /// Resolves when nothing is left to copy, or no worker takes more. Dropping the future stops the copies.
    pub async fn run(&mut self, requests_ended: impl Future<Output = ()>) {
        self.copy_all().await;
        requests_ended.await;
        self.copy_all().await;
    }

    async fn copy_all(&mut self) {
        if self.receivers.iter().all(|receiver| receiver.is_done) {
            return;
        }
        let mut prefixes = self.prefixes.used_again().await;
        let (mut next, mut again): (Option<Vec<SequenceHash>>, Vec<Vec<SequenceHash>>) = (None, Vec::new());
        let mut copying = FuturesUnordered::new();
        loop {
            let now = Instant::now();
            while copying.len() < MAX_COPIES {
                next = next.or_else(|| again.pop()).or_else(|| prefixes.find(|prefix| self.is_wanted(prefix)));
                let Some(prefix) = next.take() else { break };
                match self.next(&prefix, now) {
                    Next::Order(receiver) => copying.push(self.order(receiver, prefix)),
                    Next::Wait => {
                        next = Some(prefix);
                        break;
                    }
                    Next::Stop => break,
                }
            }
            if copying.is_empty() && next.is_none() {
                return;
            }
            let retry_at = self.receivers.iter().filter_map(|receiver| receiver.retry_at).filter(|at| *at > now).min();
            tokio::select! {
                Some(ended) = copying.next() => again.extend(self.ended(ended, Instant::now())),
                () = sleep_until(retry_at.unwrap_or(now)), if retry_at.is_some() => {}
                // Each receiver that is not done copies or pauses.
                else => return,
            }
        }
    }

    fn is_wanted(&self, prefix: &[SequenceHash]) -> bool {
        prefix.last().is_some_and(|last| !self.ordered.contains_key(last)) && !self.prefixes.is_stored(prefix)
    }

    /// Chooses the receiver of a prefix.
    fn next(&self, prefix: &[SequenceHash], now: Instant) -> Next {
        if let Some(receiver) = self.has_half_of(prefix) {
            return if self.receivers[receiver].is_free(now) { Next::Order(receiver) } else { Next::Wait };
        }
        let free = self.receivers.iter().enumerate().filter(|(_, receiver)| receiver.is_free(now));
        // The first of equal ones: their order is another one for each worker that drains.
        match free.min_by_key(|(_, receiver)| receiver.taken) {
            Some((at, _)) => Next::Order(at),
            None if self.receivers.iter().any(|receiver| !receiver.is_done) => Next::Wait,
            None => Next::Stop,
        }
    }

    /// The receiver that got at least half of a prefix, if it takes more: it has to read only the rest.
    fn has_half_of(&self, prefix: &[SequenceHash]) -> Option<usize> {
        let got = prefix.iter().rposition(|block| self.ordered.contains_key(block))?;
        let receiver = *self.ordered.get(&prefix[got])?;
        ((got + 1) * 2 >= prefix.len() && !self.receivers[receiver].is_done).then_some(receiver)
    }

    fn order(&mut self, at: usize, mut prefix: Vec<SequenceHash>) -> impl Future<Output = Ended> + Send + use<> {
        let receiver = &mut self.receivers[at];
        receiver.is_copying = true;
        receiver.retry_at = None;
        prefix.truncate(usize::try_from(receiver.max_blocks).unwrap_or(usize::MAX));
        self.ordered.extend(prefix.iter().map(|block| (*block, at)));
        let (engine, copy) =
            (Arc::clone(&receiver.engine), PrefixCopy { blocks: prefix[..].into(), peer: Some(self.source.clone()) });
        async move {
            let answer = timeout(COPY_TIMEOUT, prefetch(&*engine, copy)).await.unwrap_or(Err(PrefetchError::TimedOut));
            Ended { receiver: at, prefix, answer }
        }
    }

    /// Notes how an order has ended. Returns the prefix if another order may succeed.
    fn ended(&mut self, Ended { receiver: at, prefix, answer }: Ended, now: Instant) -> Option<Vec<SequenceHash>> {
        let receiver = &mut self.receivers[at];
        receiver.is_copying = false;
        let error = match answer {
            Ok(Prefetched { blocks, bytes }) => {
                receiver.declined = 0;
                receiver.taken += u64::from(blocks);
                receiver.is_done = receiver.taken >= receiver.max_blocks;
                self.copied.prefixes += 1;
                self.copied.blocks += u64::from(blocks);
                self.copied.bytes += bytes;
                return None;
            }
            Err(error) => error,
        };
        tracing::debug!(worker = %receiver.worker, %error, "prefix not copied to another worker");
        receiver.declined += 1;
        receiver.retry_at = Some(now + PAUSE);
        // Any other answer is the same for the next order.
        let may_repeat = matches!(error, PrefetchError::Busy | PrefetchError::NotFound);
        receiver.is_done = !may_repeat || receiver.declined >= MAX_DECLINED;
        for block in &prefix {
            if self.ordered.get(block) == Some(&at) {
                self.ordered.remove(block);
            }
        }
        // It was evicted here, for a running request.
        (error != PrefetchError::NotFound).then_some(prefix)
    }
}

impl Receiver {
    fn is_free(&self, now: Instant) -> bool {
        !self.is_done && !self.is_copying && self.retry_at.is_none_or(|at| at <= now)
    }
}

/// Has an engine copy a prefix, and checks its process meanwhile.
async fn prefetch(engine: &dyn Engine, copy: PrefixCopy) -> Result<Prefetched, PrefetchError> {
    let mut answer = engine.prefetch(copy);
    loop {
        match timeout(CHECK_INTERVAL, &mut answer).await {
            Ok(answer) => return answer,
            Err(_) => engine.check_process(),
        }
    }
}

/// The workers that can load the blocks of `own` and serve its requests: of the same model and fingerprint, with host
/// memory, and of the same role if there is one. Each worker that drains has them in another order.
fn receivers(own: &Instance, others: &[(Arc<Instance>, Arc<dyn Engine>)], leaving: &[WorkerId]) -> Vec<Receiver> {
    let Some(cache) = own.kv_cache else { return Vec::new() };
    let host_blocks = |other: &Instance| {
        let shares = other.model.id == own.model.id && other.id != own.id && !leaving.contains(&other.id);
        let same = other.kv_cache.filter(|others| shares && others.fingerprint == cache.fingerprint);
        same.map(|others| others.host_blocks).filter(|blocks| *blocks >= MAX_SHARE)
    };
    let all = others.iter().filter_map(|(other, engine)| Some((other, engine, host_blocks(other)?)));
    let (same_role, others): (Vec<_>, Vec<_>) = all.partition(|(other, ..)| other.role == own.role);
    let mut chosen = if same_role.is_empty() { others } else { same_role };
    // The order of rendezvous hashing.
    chosen.sort_by_key(|(other, ..)| kvbm::splitmix::mix(own.id.0 ^ kvbm::splitmix::mix(other.id.0)));
    let receiver = |(other, engine, host_blocks): (&Arc<Instance>, &Arc<dyn Engine>, u64)| Receiver {
        worker: other.id,
        engine: Arc::clone(engine),
        max_blocks: host_blocks / MAX_SHARE,
        taken: 0,
        is_copying: false,
        declined: 0,
        retry_at: None,
        is_done: false,
    };
    chosen.into_iter().map(receiver).collect()
}

impl Prefixes for BlockManager {
    fn used_again(&self) -> BoxFuture<'_, Box<dyn Iterator<Item = Vec<SequenceHash>> + Send>> {
        Box::pin(async { Box::new(self.reused_prefixes().await.map(|prefix| prefix.blocks)) as _ })
    }

    fn is_stored(&self, prefix: &[SequenceHash]) -> bool {
        self.is_in_object_store(prefix)
    }
}

impl fmt::Debug for DrainCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let receivers = self.receivers.len();
        f.debug_struct("DrainCopies")
            .field("receivers", &receivers)
            .field("copied", &self.copied)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
