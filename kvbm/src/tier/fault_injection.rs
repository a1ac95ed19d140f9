//! Seeded fault injection for any tier, for simulations and tests.
//!
//! A fault is a function of the seed, the operation, the block's hash and the number of earlier requests for the block.
//! It does not depend on how tasks interleave: the same seed and the same requests get the same faults. Latency uses
//! `tokio::time`, so it takes no real time under a paused clock.

use super::{LoadError, Loaded, StoreError, Tier, delegate};
use crate::block::{Block, Fingerprint, SequenceHash};
use bytes::Bytes;
use futures::future::{self, BoxFuture};
use futures::stream::{BoxStream, StreamExt};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::Arc;
use std::time::Duration;

/// Probabilities of faults per block, from 0 to 1, tried in the order of the fields.
#[derive(Clone, PartialEq, Debug)]
pub struct Faults {
    /// Range of the delay of each load and each store.
    pub latency: RangeInclusive<Duration>,
    /// Loads and stores never answer.
    pub hang: f64,
    /// Loads and stores fail with an I/O error.
    pub error: f64,
    /// Stores are answered with [`StoreError::Busy`].
    pub busy: f64,
    /// Loads miss although the tier has the block.
    pub lost: f64,
    /// Loads yield only a part of the payload.
    pub short: f64,
    /// Loads yield a payload with one bit flipped.
    pub corrupt: f64,
    /// Loads yield an intact block with another hash.
    pub wrong: f64,
}

impl Default for Faults {
    /// No faults.
    fn default() -> Self {
        Self {
            latency: Duration::ZERO..=Duration::ZERO,
            hang: 0.0,
            error: 0.0,
            busy: 0.0,
            lost: 0.0,
            short: 0.0,
            corrupt: 0.0,
            wrong: 0.0,
        }
    }
}

/// A tier with injected faults.
pub struct Faulty {
    tier: Arc<dyn Tier>,
    injector: Arc<FaultInjector>,
}

impl Faulty {
    /// Wraps a tier.
    pub fn new(tier: Arc<dyn Tier>, seed: u64, faults: Faults) -> Self {
        Self {
            tier,
            injector: Arc::new(FaultInjector { seed, faults: Mutex::new(faults), requests: Mutex::default() }),
        }
    }

    /// Replaces the faults.
    pub fn set(&self, faults: Faults) {
        *self.injector.faults.lock() = faults;
    }
}

impl Tier for Faulty {
    delegate!(tier: level, holds, discard, withdraw, expire_one, expire, usage);

    fn load(&self, fingerprint: Fingerprint, hashes: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let injector = self.injector.clone();
        let concurrency = hashes.len().max(1);
        let found = self.tier.load(fingerprint, hashes.clone());
        found
            .map(move |(index, answer)| {
                let outcome = injector.draw(Operation::Load, hashes[index]);
                async move {
                    tokio::time::sleep(outcome.latency).await;
                    (index, outcome.apply(answer).await)
                }
            })
            .buffer_unordered(concurrency)
            .boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        Box::pin(async move {
            let outcomes: Vec<Outcome> =
                blocks.iter().map(|block| self.injector.draw(Operation::Store, block.header.hash)).collect();
            let latency = outcomes.iter().map(|outcome| outcome.latency).max().unwrap_or_default();
            tokio::time::sleep(latency).await;
            if outcomes.iter().any(|outcome| outcome.fault == Some(Fault::Hang)) {
                return future::pending().await;
            }
            let passes = |outcome: &Outcome| !matches!(outcome.fault, Some(Fault::Error | Fault::Busy));
            let passed =
                blocks.into_iter().zip(&outcomes).filter(|(_, outcome)| passes(outcome)).map(|(block, _)| block);
            let mut answers = self.tier.store(passed.collect()).await.into_iter();
            let answer = |outcome: &Outcome| match outcome.fault {
                Some(Fault::Error) => Err(StoreError::Io(injected())),
                Some(Fault::Busy) => Err(StoreError::Busy),
                _ => answers.next().expect("a tier answers for each block"),
            };
            outcomes.iter().map(answer).collect()
        })
    }
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum Operation {
    Load,
    Store,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Fault {
    Hang,
    Error,
    Busy,
    Lost,
    Short,
    Corrupt,
    Wrong,
}

struct FaultInjector {
    seed: u64,
    faults: Mutex<Faults>,
    /// Number of requests so far, by operation (loads: true) and block.
    requests: Mutex<HashMap<(bool, SequenceHash), u64>>,
}

impl FaultInjector {
    fn draw(&self, operation: Operation, hash: SequenceHash) -> Outcome {
        let loads = operation == Operation::Load;
        let nth = {
            let mut requests = self.requests.lock();
            let nth = requests.entry((loads, hash)).or_default();
            *nth += 1;
            *nth
        };
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes()).update(&[u8::from(loads)]).update(hash.as_bytes());
        let mut random = hasher.update(&nth.to_le_bytes()).finalize_xof();
        let mut bits = || {
            let mut bytes = [0; 8];
            random.fill(&mut bytes);
            u64::from_le_bytes(bytes)
        };
        let mut uniform = || (bits() >> 11) as f64 / (1u64 << 53) as f64;

        let faults = self.faults.lock();
        let (least, most) = (*faults.latency.start(), *faults.latency.end());
        let latency = least + most.saturating_sub(least).mul_f64(uniform());
        let probabilities = [
            (Fault::Hang, faults.hang, true),
            (Fault::Error, faults.error, true),
            (Fault::Busy, faults.busy, !loads),
            (Fault::Lost, faults.lost, loads),
            (Fault::Short, faults.short, loads),
            (Fault::Corrupt, faults.corrupt, loads),
            (Fault::Wrong, faults.wrong, loads),
        ];
        let fault = probabilities
            .into_iter()
            .filter(|(.., applies)| *applies)
            .find(|(_, probability, _)| uniform() < *probability);
        Outcome { latency, fault: fault.map(|(fault, ..)| fault), random: bits() }
    }
}

/// What happens to one operation.
struct Outcome {
    latency: Duration,
    fault: Option<Fault>,
    /// Selects the position of the damage.
    random: u64,
}

impl Outcome {
    async fn apply(self, answer: Result<Option<Block>, LoadError>) -> Result<Option<Block>, LoadError> {
        match (self.fault, answer) {
            (Some(Fault::Hang), _) => future::pending().await,
            (Some(Fault::Error), _) => Err(LoadError::Io(injected())),
            (Some(Fault::Lost), _) => Ok(None),
            (Some(fault), Ok(Some(block))) => Ok(Some(self.damage(fault, block))),
            (_, answer) => answer,
        }
    }

    fn damage(&self, fault: Fault, mut block: Block) -> Block {
        let length = block.payload.len();
        match fault {
            Fault::Short => block.payload.truncate(self.random as usize % length.max(1)),
            Fault::Corrupt if length > 0 => {
                let bit = self.random as usize % (length * 8);
                let mut bytes = block.payload.to_vec();
                bytes[bit / 8] ^= 1 << (bit % 8);
                block.payload = Bytes::from(bytes);
            }
            Fault::Wrong => {
                let mut hash = *block.header.hash.as_bytes();
                hash[self.random as usize % hash.len()] ^= 1;
                let header = block.header;
                let hash = SequenceHash::from_bytes(hash);
                block = Block::new(hash, header.parent, header.fingerprint, block.payload);
            }
            _ => {}
        }
        block
    }
}

fn injected() -> io::Error {
    io::Error::other("injected fault")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::event::{Epoch, EventLog};
    use crate::tier::conformance::{self, Memory, Subject, chain};

    fn faulty(seed: u64, faults: Faults) -> (Faulty, Arc<EventLog>) {
        let log = Arc::new(EventLog::new(Epoch(1)));
        (Faulty::new(Arc::new(Memory::new(log.clone(), None)), seed, faults), log)
    }

    conformance::suite!(async || {
        let (tier, log) = faulty(1, Faults::default());
        Subject::new(tier, log)
    });

    /// The result of loading each of 64 blocks, one letter each.
    async fn outcomes(seed: u64) -> String {
        let faults = Faults { error: 0.1, lost: 0.1, short: 0.1, corrupt: 0.1, wrong: 0.1, ..Faults::default() };
        let (tier, _) = faulty(seed, Faults::default());
        let blocks = chain(7, 64);
        let hashes: Vec<_> = blocks.iter().map(|block| block.header.hash).collect();
        let fingerprint = blocks[0].header.fingerprint;
        assert!(tier.store(blocks).await.iter().all(Result::is_ok));
        tier.set(Faults { latency: Duration::from_millis(1)..=Duration::from_secs(9), ..faults });
        let mut letters = vec!['?'; hashes.len()];
        let mut answers = tier.load(fingerprint, hashes.clone());
        while let Some((index, answer)) = answers.next().await {
            letters[index] = match answer {
                Err(_) => 'e',
                Ok(None) => 'n',
                Ok(Some(block)) => match block.verify(hashes[index], fingerprint) {
                    Ok(_) => '.',
                    Err(crate::block::Corrupt::OtherBlock) => 'w',
                    Err(crate::block::Corrupt::Length) => 's',
                    Err(_) => 'c',
                },
            };
        }
        letters.into_iter().collect()
    }

    #[tokio::test(start_paused = true)]
    async fn faults_are_a_function_of_the_seed() {
        let first = outcomes(1).await;
        assert_eq!(first, outcomes(1).await);
        assert_ne!(first, outcomes(2).await);
        assert!("enswc.".chars().all(|kind| first.contains(kind)), "each fault occurs and is detected: {first}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_hanging_store_ends_when_dropped() {
        let (tier, _) = faulty(1, Faults { hang: 1.0, ..Faults::default() });
        let blocks = chain(7, 2);
        let hour = Duration::from_hours(1);
        assert!(tokio::time::timeout(hour, tier.store(blocks.clone())).await.is_err());
        tier.set(Faults::default());
        assert!(tier.store(blocks).await.iter().all(Result::is_ok));
    }
}
