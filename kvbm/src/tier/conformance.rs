//! The contract of [`Tier`] as a test suite: one function per MUST, run against every implementation.
//!
//! A test module calls `conformance::suite!(async || Subject::new(tier, log))` with a closure that makes an empty tier.

use super::{BlockReceiver, StoreError, Tier};
use crate::block::{
    Block, BlockAttrs, BlockRetention, Date, DomainId, Fingerprint, Level, Priority, SequenceHash, Verified,
};
use crate::event::{BlockEvent, EventLog};
use bytes::Bytes;
use futures::StreamExt;
use parking_lot::Mutex;
use std::any::Any;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

mod memory;
pub(crate) use memory::Memory;

/// An empty tier under test, and its event log.
pub(crate) struct Subject {
    tier: Arc<dyn Tier>,
    log: Arc<EventLog>,
    /// What the tier needs for as long as it lives: a folder, a server.
    _resources: Box<dyn Any + Send>,
}

impl Subject {
    pub(crate) fn new(tier: impl Tier, log: Arc<EventLog>) -> Self {
        Self::with_resources(Arc::new(tier), log, ())
    }

    /// A subject with resources that must live as long: a folder, a server.
    pub(crate) fn with_resources(tier: Arc<dyn Tier>, log: Arc<EventLog>, resources: impl Any + Send) -> Self {
        Self { tier, log, _resources: Box::new(resources) }
    }
}

/// Tests every MUST with a tier that the closure makes.
macro_rules! suite {
    ($make:expr) => {
        mod contract_of_tier {
            use super::*;

            $crate::tier::conformance::suite!(@tests $make;
                stored_blocks_come_back_as_they_were
                load_answers_every_index_once
                load_into_yields_what_its_receiver_has_not_taken
                holds_counts_the_prefix
                fingerprints_are_separate
                domain_and_retention_come_back
                expired_blocks_are_removed_and_announced
                storing_again_is_ok_and_announced_once
                a_discarded_block_is_missing_until_stored_again
                events_agree_with_holds
                empty_requests_are_answered
                a_dropped_load_leaves_the_tier_as_it_was
                concurrent_requests_are_all_answered
                a_dropped_store_is_whole_or_absent
            );
        }
    };
    (@tests $make:expr; $($test:ident)+) => {
        $(
            #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $test() {
                let make = $make;
                // Without a subject the test is skipped; the closure reports why.
                let subject: Option<$crate::tier::conformance::Subject> = make().await.into();
                if let Some(subject) = subject {
                    $crate::tier::conformance::$test(subject).await;
                }
            }
        )+
    };
}
pub(crate) use suite;

/// The fingerprint of the blocks of [`chain`].
pub(crate) fn fingerprint() -> Fingerprint {
    Fingerprint::from_bytes([0xF1; 32])
}

/// A chain of blocks, a function of the seed. Payloads have different, unaligned lengths.
pub(crate) fn chain(seed: u64, count: usize) -> Vec<Block> {
    chain_of(fingerprint(), seed, count, 3_000)
}

/// A chain with a fingerprint, and payload lengths from `bytes` to a tenth more.
pub(crate) fn chain_of(fingerprint: Fingerprint, seed: u64, count: usize, bytes: usize) -> Vec<Block> {
    let mut parent = None;
    let make = |n: usize| {
        let mut random = blake3::Hasher::new();
        random.update(&seed.to_le_bytes()).update(&(n as u64).to_le_bytes());
        let mut hash = [0; 16];
        hash.copy_from_slice(&random.finalize().as_bytes()[..16]);
        let hash = SequenceHash::from_bytes(hash);
        let mut payload = vec![0; bytes + (n * 37 + seed as usize) % (bytes / 10)];
        random.update(fingerprint.as_bytes()).finalize_xof().fill(&mut payload);
        let block = Block::new(hash, parent, fingerprint, Bytes::from(payload));
        parent = Some(hash);
        block
    };
    (0..count).map(make).collect()
}

pub(crate) fn hashes(blocks: &[Block]) -> Vec<SequenceHash> {
    blocks.iter().map(|block| block.header.hash).collect()
}

/// Loads and verifies blocks. `None` is a miss or a block that fails verification. Panics if an index is answered twice
/// or not at all.
pub(crate) async fn load(
    tier: &dyn Tier,
    fingerprint: Fingerprint,
    hashes: Vec<SequenceHash>,
) -> Vec<Option<Verified>> {
    let mut answers: BTreeMap<usize, Option<Verified>> = BTreeMap::new();
    let mut loading = tier.load(fingerprint, hashes.clone());
    while let Some((index, answer)) = within(loading.next()).await {
        let block = answer.ok().flatten().and_then(|block| block.verify(hashes[index], fingerprint).ok());
        assert!(answers.insert(index, block).is_none(), "index {index} answered twice");
    }
    assert_eq!(answers.len(), hashes.len(), "every index is answered");
    answers.into_values().collect()
}

/// Stores blocks, and retries those for which the tier is busy.
pub(crate) async fn store(tier: &dyn Tier, blocks: Vec<Block>) {
    for batch in blocks.chunks(32) {
        let mut left = batch.to_vec();
        while !left.is_empty() {
            let answers = within(tier.store(left.clone())).await;
            assert_eq!(answers.len(), left.len(), "an answer for each");
            let mut answers = answers.into_iter();
            left.retain(|_| match answers.next() {
                Some(Ok(())) => false,
                Some(Err(StoreError::Busy | StoreError::Unavailable(_))) => true,
                other => panic!("store answered {other:?}"),
            });
            tokio::task::yield_now().await;
        }
    }
}

/// The set of blocks that the events add up to.
pub(crate) fn announced(log: &EventLog, level: Level) -> Vec<SequenceHash> {
    let mut stored: Vec<SequenceHash> = Vec::new();
    for numbered in log.after(0, usize::MAX).expect("the log still has all") {
        match numbered.event {
            BlockEvent::Stored { level: at, blocks, .. } if at == level => {
                for block in blocks {
                    assert!(!stored.contains(&block), "{block} announced twice");
                    stored.push(block);
                }
            }
            BlockEvent::Removed { level: at, blocks } if at == level => {
                for block in blocks {
                    let known = stored.iter().position(|other| *other == block).expect("removed what was announced");
                    stored.remove(known);
                }
            }
            other => panic!("{other:?} is not of {level}"),
        }
    }
    stored.sort_unstable();
    stored
}

async fn within<T>(answer: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_mins(1), answer).await.expect("a tier answers")
}

fn same(loaded: Option<&Verified>, stored: &Block) -> bool {
    loaded.is_some_and(|block| *block.header() == stored.header && block.payload() == &stored.payload[..])
}

// One function per MUST.

pub(crate) async fn stored_blocks_come_back_as_they_were(subject: Subject) {
    let blocks = chain(1, 40);
    store(&*subject.tier, blocks.clone()).await;
    let loaded = load(&*subject.tier, fingerprint(), hashes(&blocks)).await;
    assert!(loaded.iter().zip(&blocks).all(|(loaded, block)| same(loaded.as_ref(), block)));
    assert_eq!(subject.tier.usage().blocks, 40);
}

pub(crate) async fn load_answers_every_index_once(subject: Subject) {
    let (here, never) = (chain(1, 6), chain(2, 6));
    store(&*subject.tier, here.clone()).await;
    let requested: Vec<Block> = here.iter().zip(&never).flat_map(|(a, b)| [b.clone(), a.clone(), a.clone()]).collect();
    let mut loading = subject.tier.load(fingerprint(), hashes(&requested));
    let mut answered = vec![0; requested.len()];
    while let Some((index, answer)) = within(loading.next()).await {
        answered[index] += 1;
        let block = answer.expect("a miss is not an error");
        assert_eq!(block.is_some(), index % 3 != 0, "index {index}");
    }
    assert_eq!(answered, vec![1; requested.len()]);
}

/// Takes the blocks with an even index.
#[derive(Default)]
struct TakesEven(Mutex<Vec<(usize, Block)>>);

impl BlockReceiver for TakesEven {
    fn take(&self, index: usize, block: Block) -> Option<Block> {
        if index % 2 == 1 {
            return Some(block);
        }
        self.0.lock().push((index, block));
        None
    }
}

pub(crate) async fn load_into_yields_what_its_receiver_has_not_taken(subject: Subject) {
    let (here, never) = (chain(1, 6), chain(2, 6));
    store(&*subject.tier, here.clone()).await;
    let requested: Vec<Block> = here.iter().zip(&never).flat_map(|(a, b)| [b.clone(), a.clone(), a.clone()]).collect();
    let receiver = Arc::new(TakesEven::default());
    let mut loading = subject.tier.load_into(fingerprint(), hashes(&requested), Arc::clone(&receiver) as _);
    let mut answers = BTreeMap::new();
    while let Some((index, answer)) = within(loading.next()).await {
        let block = answer.expect("a miss is not an error");
        assert!(answers.insert(index, block).is_none(), "index {index} answered twice");
    }
    for (index, block) in receiver.0.lock().drain(..) {
        assert!(answers.insert(index, Some(block)).is_none(), "index {index} taken and answered");
    }
    assert_eq!(answers.len(), requested.len(), "every index is taken or answered");
    for (index, block) in answers {
        assert_eq!(block.is_some(), index % 3 != 0, "index {index}");
        let Some(block) = block else { continue };
        assert!(block.verify(requested[index].header.hash, fingerprint()).is_ok(), "index {index}");
    }
}

pub(crate) async fn holds_counts_the_prefix(subject: Subject) {
    let blocks = chain(1, 5);
    let all = hashes(&blocks);
    assert_eq!(subject.tier.holds(fingerprint(), &all), 0);
    let without_third: Vec<Block> = blocks.iter().filter(|b| b.header.hash != all[2]).cloned().collect();
    store(&*subject.tier, without_third).await;
    assert_eq!(subject.tier.holds(fingerprint(), &all), 2);
    assert_eq!(subject.tier.holds(fingerprint(), &all[3..]), 2);
    assert_eq!(subject.tier.holds(fingerprint(), &[]), 0);
}

pub(crate) async fn fingerprints_are_separate(subject: Subject) {
    let other = Fingerprint::from_bytes([0x0F; 32]);
    let (ours, theirs) = (chain(1, 4), chain_of(other, 1, 4, 2_000));
    assert_eq!(hashes(&ours), hashes(&theirs), "the same hashes, other bytes");
    store(&*subject.tier, ours.clone()).await;
    assert_eq!(subject.tier.holds(other, &hashes(&ours)), 0);
    assert!(load(&*subject.tier, other, hashes(&ours)).await.iter().all(Option::is_none));
    store(&*subject.tier, theirs.clone()).await;
    for blocks in [&ours, &theirs] {
        let loaded = load(&*subject.tier, blocks[0].header.fingerprint, hashes(blocks)).await;
        assert!(loaded.iter().zip(blocks).all(|(loaded, block)| same(loaded.as_ref(), block)));
    }
    subject.tier.discard(other, hashes(&ours)[0]);
    assert_eq!(subject.tier.holds(fingerprint(), &hashes(&ours)), 4);
}

pub(crate) async fn domain_and_retention_come_back(subject: Subject) {
    let with_attrs = |(n, block): (usize, Block)| {
        let domain = DomainId::from_bytes([n as u8 / 2; 16]);
        let date = |odd: usize| (n % 3 == odd).then(|| Date::from_unix(4_000_000_000 + n as u64));
        let retention = BlockRetention { expires: date(1), pinned: date(2), store: true, priority: Priority::High };
        block.with_attrs(BlockAttrs { domain, retention })
    };
    let blocks: Vec<Block> = chain(1, 9).into_iter().enumerate().map(with_attrs).collect();
    store(&*subject.tier, blocks.clone()).await;
    let loaded = load(&*subject.tier, fingerprint(), hashes(&blocks)).await;
    assert!(loaded.iter().zip(&blocks).all(|(loaded, block)| same(loaded.as_ref(), block)));
}

pub(crate) async fn expired_blocks_are_removed_and_announced(subject: Subject) {
    let tier = &*subject.tier;
    let until = |seed: u64, expires: Option<Date>| -> Vec<Block> {
        let retention = BlockRetention { expires, ..BlockRetention::default() };
        let attrs = BlockAttrs { retention, ..BlockAttrs::default() };
        chain(seed, 5).into_iter().map(|block| block.with_attrs(attrs)).collect()
    };
    // The tier may have a clock of its own: by any clock the first blocks are expired, and the others are not.
    let (past, far) = (Date::from_unix(1_000_000), Date::from_unix(u64::MAX));
    let expired = until(1, Some(past));
    let others = [until(2, Some(far)), until(3, None)].concat();
    store(tier, [&expired[..], &others].concat()).await;
    tier.expire(past);
    assert_eq!(tier.holds(fingerprint(), &hashes(&expired)), 0);
    assert!(load(tier, fingerprint(), hashes(&expired)).await.iter().all(Option::is_none));
    assert!(load(tier, fingerprint(), hashes(&others)).await.iter().all(Option::is_some));
    let mut remaining = hashes(&others);
    remaining.sort_unstable();
    assert_eq!(announced(&subject.log, tier.level()), remaining);
    assert_eq!(tier.usage().blocks, 10);
    assert_eq!(tier.expire(past), 0, "removed before");
    store(tier, until(1, Some(far))).await;
    tier.expire(past);
    assert_eq!(tier.holds(fingerprint(), &hashes(&expired)), 5, "stored again with a later date");
}

pub(crate) async fn storing_again_is_ok_and_announced_once(subject: Subject) {
    let blocks = chain(1, 4);
    store(&*subject.tier, blocks.clone()).await;
    store(&*subject.tier, blocks.clone()).await;
    let twice = [blocks.clone(), blocks.clone()].concat();
    store(&*subject.tier, twice).await;
    assert_eq!(subject.tier.usage().blocks, 4);
    assert_eq!(announced(&subject.log, subject.tier.level()).len(), 4);
}

pub(crate) async fn a_discarded_block_is_missing_until_stored_again(subject: Subject) {
    let blocks = chain(1, 3);
    let all = hashes(&blocks);
    store(&*subject.tier, blocks.clone()).await;
    subject.tier.discard(fingerprint(), all[1]);
    subject.tier.discard(fingerprint(), all[1]);
    subject.tier.discard(fingerprint(), hashes(&chain(9, 1))[0]);
    assert_eq!(subject.tier.holds(fingerprint(), &all), 1);
    let loaded = load(&*subject.tier, fingerprint(), all.clone()).await;
    assert_eq!(loaded.iter().map(Option::is_some).collect::<Vec<_>>(), [true, false, true]);
    assert!(!announced(&subject.log, subject.tier.level()).contains(&all[1]));
    store(&*subject.tier, blocks.clone()).await;
    assert_eq!(subject.tier.holds(fingerprint(), &all), 3);
    assert!(load(&*subject.tier, fingerprint(), all).await.iter().all(Option::is_some));
}

pub(crate) async fn events_agree_with_holds(subject: Subject) {
    let level = subject.tier.level();
    let blocks: Vec<Block> = (0..20).flat_map(|seed| chain(seed, 10)).collect();
    for (n, batch) in blocks.chunks(25).enumerate() {
        store(&*subject.tier, batch.to_vec()).await;
        subject.tier.discard(fingerprint(), batch[n].header.hash);
    }
    let held = |hash: &SequenceHash| subject.tier.holds(fingerprint(), &[*hash]) == 1;
    let mut stored: Vec<SequenceHash> = hashes(&blocks).into_iter().filter(held).collect();
    stored.sort_unstable();
    assert_eq!(announced(&subject.log, level), stored);
    assert_eq!(subject.tier.usage().blocks, stored.len() as u64);
    let loaded = load(&*subject.tier, fingerprint(), stored).await;
    assert!(loaded.iter().all(Option::is_some), "every announced block can be loaded");
}

pub(crate) async fn empty_requests_are_answered(subject: Subject) {
    assert!(within(subject.tier.store(Vec::new())).await.is_empty());
    assert!(load(&*subject.tier, fingerprint(), Vec::new()).await.is_empty());
    let empty = Block::new(SequenceHash::from_bytes([1; 16]), None, fingerprint(), Bytes::new());
    store(&*subject.tier, vec![empty.clone()]).await;
    let loaded = load(&*subject.tier, fingerprint(), hashes(std::slice::from_ref(&empty))).await;
    assert!(same(loaded[0].as_ref(), &empty), "an empty payload is valid");
}

pub(crate) async fn a_dropped_load_leaves_the_tier_as_it_was(subject: Subject) {
    let blocks = chain(1, 60);
    store(&*subject.tier, blocks.clone()).await;
    drop(subject.tier.load(fingerprint(), hashes(&blocks)));
    let mut loading = subject.tier.load(fingerprint(), hashes(&blocks));
    assert!(within(loading.next()).await.is_some());
    drop(loading);
    assert_eq!(subject.tier.holds(fingerprint(), &hashes(&blocks)), 60);
    assert!(load(&*subject.tier, fingerprint(), hashes(&blocks)).await.iter().all(Option::is_some));
}

pub(crate) async fn concurrent_requests_are_all_answered(subject: Subject) {
    let tasks = (0..8).map(|seed| {
        let tier = subject.tier.clone();
        tokio::spawn(async move {
            let blocks = chain(seed, 30);
            for batch in blocks.chunks(7) {
                store(&*tier, batch.to_vec()).await;
                let loaded = load(&*tier, fingerprint(), hashes(batch)).await;
                assert!(loaded.iter().zip(batch).all(|(loaded, block)| same(loaded.as_ref(), block)));
            }
        })
    });
    for task in tasks.collect::<Vec<_>>() {
        task.await.expect("no task panics");
    }
    assert_eq!(subject.tier.usage().blocks, 240);
}

pub(crate) async fn a_dropped_store_is_whole_or_absent(subject: Subject) {
    let (dropped, kept) = (chain(1, 10), chain(2, 10));
    {
        let storing = subject.tier.store(dropped.clone());
        tokio::pin!(storing);
        let _ = futures::poll!(&mut storing);
    }
    store(&*subject.tier, kept.clone()).await;
    assert!(load(&*subject.tier, fingerprint(), hashes(&kept)).await.iter().all(Option::is_some));
    for (loaded, block) in load(&*subject.tier, fingerprint(), hashes(&dropped)).await.iter().zip(&dropped) {
        assert!(loaded.is_none() || same(loaded.as_ref(), block), "stored whole or not at all");
    }
}

/// For a tier with a capacity, which the caller makes: stores more blocks than fit.
pub(crate) async fn older_blocks_are_evicted_within_the_capacity(subject: Subject) {
    let tier = &*subject.tier;
    let capacity = tier.usage().capacity.expect("a tier with a capacity");
    let blocks: Vec<Block> = (0..20).flat_map(|seed| chain(seed, 20)).collect();
    let offered: u64 = blocks.iter().map(|block| block.header.length).sum();
    assert!(offered > 2 * capacity, "the test offers more than fits");
    for batch in blocks.chunks(20) {
        store(tier, batch.to_vec()).await;
        assert!(tier.usage().bytes <= capacity);
    }
    let last = &blocks[blocks.len() - 5..];
    assert!(load(tier, fingerprint(), hashes(last)).await.iter().all(Option::is_some), "the newest blocks are stored");
    // Evictions may end after the store is answered.
    for _ in 0..2_000 {
        let stored = announced(&subject.log, tier.level());
        let all_found = load(tier, fingerprint(), stored.clone()).await.iter().all(Option::is_some);
        if all_found && stored.len() as u64 == tier.usage().blocks {
            return;
        }
        tokio::time::sleep(std::time::Duration::from_millis(1)).await;
    }
    panic!("announced blocks differ from stored ones");
}
