//! A tier with seeded faults in front of any other: what simulations and tests put where a real device would fail.
//!
//! Whether a fault strikes is a function of the seed, the operation, the block's name and how often that block was asked
//! for, so it does not depend on how tasks interleave: the same seed and the same requests meet the same faults.
//! Latency is `tokio::time`, so a paused clock makes it free.

use super::{LoadError, Loaded, StoreError, Tier, Usage};
use crate::block::{Block, Date, Fingerprint, Level, SequenceHash};
use bytes::Bytes;
use futures::future::{self, BoxFuture};
use futures::stream::{BoxStream, StreamExt};
use std::collections::HashMap;
use std::io;
use std::ops::RangeInclusive;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// How often what goes wrong: shares of all blocks, from 0 to 1, tried in the order of the fields.
#[derive(Clone, PartialEq, Debug)]
pub struct Faults {
    /// Every load and every store is late by this much.
    pub latency: RangeInclusive<Duration>,
    /// Loads and stores that never answer.
    pub hang: f64,
    /// Loads and stores that fail with an I/O error.
    pub error: f64,
    /// Stores that are told to come back later.
    pub busy: f64,
    /// Loads that find nothing although the tier holds the block.
    pub lost: f64,
    /// Loads that yield only a part of the payload.
    pub short: f64,
    /// Loads that yield a payload with one bit flipped.
    pub corrupt: f64,
    /// Loads that yield a sound block with another name.
    pub wrong: f64,
}

impl Default for Faults {
    /// None at all.
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

/// The decorator.
pub struct Faulty {
    tier: Arc<dyn Tier>,
    dice: Arc<Dice>,
}

impl Faulty {
    /// Puts faults in front of a tier.
    pub fn new(tier: Arc<dyn Tier>, seed: u64, faults: Faults) -> Self {
        Self { tier, dice: Arc::new(Dice { seed, faults: Mutex::new(faults), asked: Mutex::default() }) }
    }

    /// From now on other faults, for instance none: the device came back.
    pub fn set(&self, faults: Faults) {
        *self.dice.faults.lock().unwrap_or_else(PoisonError::into_inner) = faults;
    }
}

impl Tier for Faulty {
    fn level(&self) -> Level {
        self.tier.level()
    }

    fn holds(&self, fingerprint: Fingerprint, names: &[SequenceHash]) -> usize {
        self.tier.holds(fingerprint, names)
    }

    fn load(&self, fingerprint: Fingerprint, names: Vec<SequenceHash>) -> BoxStream<'static, Loaded> {
        let dice = self.dice.clone();
        let together = names.len().max(1);
        let found = self.tier.load(fingerprint, names.clone());
        found
            .map(move |(index, answer)| {
                let roll = dice.roll(Operation::Load, names[index]);
                async move {
                    tokio::time::sleep(roll.latency).await;
                    (index, roll.spoil(answer).await)
                }
            })
            .buffer_unordered(together)
            .boxed()
    }

    fn store(&self, blocks: Vec<Block>) -> BoxFuture<'_, Vec<Result<(), StoreError>>> {
        Box::pin(async move {
            let rolls: Vec<Roll> =
                blocks.iter().map(|block| self.dice.roll(Operation::Store, block.header.hash)).collect();
            let late = rolls.iter().map(|roll| roll.latency).max().unwrap_or_default();
            tokio::time::sleep(late).await;
            if rolls.iter().any(|roll| roll.fault == Some(Fault::Hang)) {
                return future::pending().await;
            }
            let sound = |roll: &Roll| !matches!(roll.fault, Some(Fault::Error | Fault::Busy));
            let passed = blocks.into_iter().zip(&rolls).filter(|(_, roll)| sound(roll)).map(|(block, _)| block);
            let mut answers = self.tier.store(passed.collect()).await.into_iter();
            let answer = |roll: &Roll| match roll.fault {
                Some(Fault::Error) => Err(StoreError::Io(injected())),
                Some(Fault::Busy) => Err(StoreError::Busy),
                _ => answers.next().expect("a tier answers for each block"),
            };
            rolls.iter().map(answer).collect()
        })
    }

    fn discard(&self, fingerprint: Fingerprint, name: SequenceHash) {
        self.tier.discard(fingerprint, name);
    }

    fn lapse(&self, fingerprint: Fingerprint, name: SequenceHash) -> usize {
        self.tier.lapse(fingerprint, name)
    }

    fn expire(&self, now: Date) -> usize {
        self.tier.expire(now)
    }

    fn usage(&self) -> Usage {
        self.tier.usage()
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

struct Dice {
    seed: u64,
    faults: Mutex<Faults>,
    asked: Mutex<HashMap<(bool, SequenceHash), u64>>,
}

impl Dice {
    fn roll(&self, operation: Operation, name: SequenceHash) -> Roll {
        let loads = operation == Operation::Load;
        let nth = {
            let mut asked = self.asked.lock().unwrap_or_else(PoisonError::into_inner);
            let nth = asked.entry((loads, name)).or_default();
            *nth += 1;
            *nth
        };
        let mut hasher = blake3::Hasher::new();
        hasher.update(&self.seed.to_le_bytes()).update(&[u8::from(loads)]).update(name.as_bytes());
        let mut random = hasher.update(&nth.to_le_bytes()).finalize_xof();
        let mut draw = || {
            let mut bytes = [0; 8];
            random.fill(&mut bytes);
            u64::from_le_bytes(bytes)
        };
        let mut share = || (draw() >> 11) as f64 / (1u64 << 53) as f64;

        let faults = self.faults.lock().unwrap_or_else(PoisonError::into_inner);
        let (least, most) = (*faults.latency.start(), *faults.latency.end());
        let latency = least + most.saturating_sub(least).mul_f64(share());
        let shares = [
            (Fault::Hang, faults.hang, true),
            (Fault::Error, faults.error, true),
            (Fault::Busy, faults.busy, !loads),
            (Fault::Lost, faults.lost, loads),
            (Fault::Short, faults.short, loads),
            (Fault::Corrupt, faults.corrupt, loads),
            (Fault::Wrong, faults.wrong, loads),
        ];
        let fault = shares.into_iter().filter(|(.., applies)| *applies).find(|(_, often, _)| share() < *often);
        Roll { latency, fault: fault.map(|(fault, ..)| fault), random: draw() }
    }
}

struct Roll {
    latency: Duration,
    fault: Option<Fault>,
    random: u64,
}

impl Roll {
    async fn spoil(self, answer: Result<Option<Block>, LoadError>) -> Result<Option<Block>, LoadError> {
        match (self.fault, answer) {
            (Some(Fault::Hang), _) => future::pending().await,
            (Some(Fault::Error), _) => Err(LoadError::Io(injected())),
            (Some(Fault::Lost), _) => Ok(None),
            (Some(fault), Ok(Some(block))) => Ok(Some(self.unsound(fault, block))),
            (_, answer) => answer,
        }
    }

    fn unsound(&self, fault: Fault, mut block: Block) -> Block {
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
                let mut name = *block.header.hash.as_bytes();
                name[self.random as usize % name.len()] ^= 1;
                let header = block.header;
                let name = SequenceHash::from_bytes(name);
                block = Block::new(name, header.parent, header.fingerprint, block.payload);
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

    /// What happened to each of 64 blocks, as one letter each.
    async fn story(seed: u64) -> String {
        let shares = Faults { error: 0.1, lost: 0.1, short: 0.1, corrupt: 0.1, wrong: 0.1, ..Faults::default() };
        let (tier, _) = faulty(seed, Faults::default());
        let blocks = chain(7, 64);
        let names: Vec<_> = blocks.iter().map(|block| block.header.hash).collect();
        let fingerprint = blocks[0].header.fingerprint;
        assert!(tier.store(blocks).await.iter().all(Result::is_ok));
        tier.set(Faults { latency: Duration::from_millis(1)..=Duration::from_secs(9), ..shares });
        let mut told = vec!['?'; names.len()];
        let mut answers = tier.load(fingerprint, names.clone());
        while let Some((index, answer)) = answers.next().await {
            told[index] = match answer {
                Err(_) => 'e',
                Ok(None) => 'n',
                Ok(Some(block)) => match block.verify(names[index], fingerprint) {
                    Ok(_) => '.',
                    Err(crate::block::Corrupt::OtherBlock) => 'w',
                    Err(crate::block::Corrupt::Length) => 's',
                    Err(_) => 'c',
                },
            };
        }
        told.into_iter().collect()
    }

    #[tokio::test(start_paused = true)]
    async fn a_seed_tells_the_same_story_again_and_another_seed_another() {
        let first = story(1).await;
        assert_eq!(first, story(1).await);
        assert_ne!(first, story(2).await);
        assert!("enswc.".chars().all(|kind| first.contains(kind)), "each fault strikes, none goes unseen: {first}");
    }

    #[tokio::test(start_paused = true)]
    async fn a_hang_never_answers_and_ends_when_it_is_dropped() {
        let (tier, _) = faulty(1, Faults { hang: 1.0, ..Faults::default() });
        let blocks = chain(7, 2);
        let hour = Duration::from_hours(1);
        assert!(tokio::time::timeout(hour, tier.store(blocks.clone())).await.is_err());
        tier.set(Faults::default());
        assert!(tier.store(blocks).await.iter().all(Result::is_ok));
    }
}
