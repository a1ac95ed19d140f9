//! The object tier: the tier contract on two stores, what other processes find, bounds, and fairness.

use super::catalog::Catalog;
use super::client::Client;
use super::follower::Follower;
use super::format::layout::{InstanceId, Layout};
use super::reader::range_bytes;
use super::*;
use crate::block::{Block, Date, DomainId, Fingerprint, Header, Level, SequenceHash, Verified};
use crate::event::{Epoch, EventLog};
use crate::tier::conformance::{self, Subject, announced, chain, chain_of, fingerprint, hashes, load, store};
use crate::tier::{LoadError, StoreError, Tier};
use bytes::Bytes;
use futures::stream::StreamExt;
use object_store::ObjectStore;
use object_store::local::LocalFileSystem;
use object_store::memory::InMemory;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tempfile::TempDir;
use tokio::sync::watch;
use tokio_util::task::AbortOnDropHandle;

mod access_logs;
mod authentication;
mod capacity;
mod compaction;
mod corruption;
mod flaky;
mod foreign_files;
mod garbage_collection;
mod gc_schedule;
mod outage;
mod retries;
mod s3_server;
mod servers;
mod unreadable;

pub(super) fn open_on(store: Arc<dyn ObjectStore>) -> (Arc<ObjectTier>, Arc<EventLog>) {
    let events = Arc::new(EventLog::new(Epoch(1)));
    (ObjectTier::open(store, "kv", Settings::default(), events.clone()), events)
}

pub(super) fn open_in(folder: &Path, settings: Settings) -> (Arc<ObjectTier>, Arc<EventLog>) {
    let events = Arc::new(EventLog::new(Epoch(1)));
    (ObjectTier::open_folder(folder, settings, events.clone()).unwrap(), events)
}

/// Opens a folder and waits until its blocks are known.
pub(super) async fn reopen(folder: &Path) -> (Arc<ObjectTier>, Arc<EventLog>) {
    let (tier, events) = open_in(folder, Settings::default());
    tier.wait_until_ready().await;
    (tier, events)
}

pub(super) fn all_found(loaded: &[Option<Verified>]) -> bool {
    loaded.iter().all(Option::is_some)
}

/// All files under a folder of a store, sorted.
pub(super) fn files(folder: &Path, under: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.join(under)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { found.push(path) }
        }
    }
    found.sort();
    found
}

mod in_memory {
    use super::*;
    conformance::suite!(async || {
        let (tier, events) = open_on(Arc::new(InMemory::new()));
        Subject::with_resources(tier, events, ())
    });
}

mod in_a_folder {
    use super::*;
    conformance::suite!(async || {
        let folder = tempfile::tempdir().unwrap();
        let (tier, events) = open_in(folder.path(), Settings::default());
        Subject::with_resources(tier, events, folder)
    });
}

/// Polls until all `wanted` blocks are found, and returns the seconds of virtual time that it took.
async fn seconds_until_found(tier: &ObjectTier, wanted: &[SequenceHash]) -> f64 {
    let start = tokio::time::Instant::now();
    while tier.holds(fingerprint(), wanted) < wanted.len() {
        tokio::time::sleep(Duration::from_millis(50)).await;
        assert!(start.elapsed() < Duration::from_mins(1), "never found");
    }
    start.elapsed().as_secs_f64()
}

#[tokio::test(start_paused = true)]
async fn another_process_finds_blocks_within_two_seconds() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let (reader, reader_events) = open_on(shared.clone());
    let (writer, _) = open_on(shared.clone());
    reader.wait_until_ready().await;
    for seed in 0..20 {
        let conversation = chain(seed, 12);
        // At different phases of the reader's polls.
        tokio::time::sleep(Duration::from_millis(seed * 130)).await;
        store(&*writer, conversation.clone()).await;
        assert!(seconds_until_found(&reader, &hashes(&conversation)).await < 2.0);
        assert!(all_found(&load(&*reader, fingerprint(), hashes(&conversation)).await));
    }
    assert_eq!(announced(&reader_events, Level::G4).len(), 240);
    // A process that starts later, and one that starts after the others ended.
    let (third, events) = open_on(shared.clone());
    third.wait_until_ready().await;
    assert_eq!(announced(&events, Level::G4).len(), 240);
    drop((reader, writer, third));
    let (late, _) = open_on(shared);
    late.wait_until_ready().await;
    assert!(all_found(&load(&*late, fingerprint(), hashes(&chain(7, 12))).await));
}

#[tokio::test(start_paused = true)]
async fn a_restart_finds_all_blocks_with_their_parents() {
    let folder = tempfile::tempdir().unwrap();
    let other = Fingerprint::from_bytes([9; 32]);
    let (tier, before) =
        open_in(folder.path(), Settings { object_bytes: 20_000, object_blocks: 1, ..Settings::default() });
    let blocks = chain(1, 50);
    let foreign = chain_of(other, 2, 8, 1_000);
    store(&*tier, blocks.clone()).await;
    store(&*tier, foreign.clone()).await;
    drop(tier);
    let (tier, after) = reopen(folder.path()).await;
    assert_eq!(announced(&after, Level::G4), announced(&before, Level::G4));
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&blocks)).await));
    assert!(all_found(&load(&*tier, other, hashes(&foreign)).await));
    for object in files(folder.path(), "blocks") {
        let path = object.to_str().unwrap();
        assert_ne!(path.contains(&fingerprint().to_string()), path.contains(&other.to_string()));
    }
}

#[tokio::test(start_paused = true)]
async fn an_object_holds_blocks_of_one_domain() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_in(folder.path(), Settings::default());
    let domains = [DomainId::SHARED, DomainId::from_bytes([7; 16]), DomainId::from_bytes([8; 16])];
    let in_turn = |(n, block): (usize, Block)| block.in_domain(domains[n % 3]);
    let blocks: Vec<Block> = chain(1, 30).into_iter().enumerate().map(in_turn).collect();
    store(&*tier, blocks.clone()).await;
    let objects = files(folder.path(), "blocks");
    for domain in domains {
        let name = domain.to_string();
        let own: Vec<_> = objects.iter().filter(|path| path.to_str().unwrap().contains(&name)).collect();
        assert_eq!(own.len(), 1, "{name}: {objects:?}");
        let bytes = Bytes::from(fs::read(own[0]).unwrap());
        let foreign = domains.iter().filter(|other| **other != domain && **other != DomainId::SHARED);
        assert!(foreign.clone().all(|other| !bytes.windows(16).any(|at| at == other.as_bytes())));
    }
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&blocks)).await));
    drop(tier);
    let (again, _) = reopen(folder.path()).await;
    assert!(all_found(&load(&*again, fingerprint(), hashes(&blocks)).await));
}

#[tokio::test(start_paused = true)]
async fn concurrent_stores_of_a_block_write_it_once() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open_in(folder.path(), Settings { object_bytes: 20_000, object_blocks: 1, ..Settings::default() });
    let blocks = chain(1, 24);
    let (one, other) = tokio::join!(tier.store(blocks.clone()), tier.store(blocks[4..].to_vec()));
    assert!(one.iter().chain(&other).all(Result::is_ok));
    let written: u64 = files(folder.path(), "blocks").iter().map(|path| fs::metadata(path).unwrap().len()).sum();
    let bytes = |block: &Block| Header::LEN as u64 + block.header.length;
    assert_eq!(written, blocks.iter().map(bytes).sum::<u64>());
}

#[tokio::test(start_paused = true)]
async fn requests_are_far_fewer_than_blocks() {
    let shared = Arc::new(flaky::Flaky::default());
    let (tier, _) = open_on(shared.clone());
    tier.wait_until_ready().await;
    let blocks = chain(1, 1_000);
    let before = shared.requests();
    let answers = tier.store(blocks.clone()).await;
    assert!(answers.iter().all(Result::is_ok));
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&blocks)).await));
    // Includes polls of the follower in this time.
    assert!(shared.requests() - before < 100, "{} requests for 1,000 blocks", shared.requests() - before);
}

#[tokio::test(start_paused = true)]
async fn loads_of_one_domain_do_not_starve_another() {
    let round_trip = Duration::from_millis(50);
    let throttled = ThrottledStore::new(
        InMemory::new(),
        ThrottleConfig { wait_get_per_call: round_trip, ..ThrottleConfig::default() },
    );
    let small = Settings { object_bytes: 10_000, object_blocks: 1, ..Settings::default() };
    let tier = ObjectTier::open(Arc::new(throttled), "kv", small, Arc::new(EventLog::new(Epoch(1))));
    let [flood, quiet] = [7, 8].map(|n| DomainId::from_bytes([n; 16]));
    tier.set_quotas(&crate::tier::Quotas::default().with_weight(flood, 2.0).with_weight(quiet, 1.5));
    let of = |domain, seed, count| -> Vec<Block> {
        chain(seed, count).into_iter().map(|block| block.in_domain(domain)).collect()
    };
    let (flood_blocks, quiet_blocks) = (of(flood, 1, 300), of(quiet, 2, 30));
    store(&*tier, flood_blocks.clone()).await;
    store(&*tier, quiet_blocks.clone()).await;
    let flooding = |_| {
        let tier = tier.clone();
        let wanted = hashes(&flood_blocks);
        tokio::spawn(async move { load(&*tier, fingerprint(), wanted).await })
    };
    let flooding: Vec<_> = (0..20).map(flooding).collect();
    tokio::time::sleep(round_trip * 4).await;
    let start = tokio::time::Instant::now();
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&quiet_blocks)).await));
    assert!(start.elapsed() < round_trip * 4, "{:?} of virtual time", start.elapsed());
    for loading in flooding {
        assert!(all_found(&loading.await.unwrap()));
    }
    assert!(start.elapsed() > round_trip * 16, "there was no flood: {:?}", start.elapsed());
}

#[tokio::test(start_paused = true)]
async fn the_catalog_is_bounded_and_keeps_the_newest() {
    let folder = tempfile::tempdir().unwrap();
    let settings = Settings { object_bytes: 10_000, object_blocks: 1, known_blocks: 100, ..Settings::default() };
    let (tier, events) = open_in(folder.path(), settings);
    for seed in 0..30 {
        store(&*tier, chain(seed, 10)).await;
        assert!(tier.usage().blocks <= 100);
    }
    assert!(all_found(&load(&*tier, fingerprint(), hashes(&chain(29, 10))).await));
    assert_eq!(announced(&events, Level::G4).len() as u64, tier.usage().blocks);
    drop(tier);
    let (tier, _) = open_in(folder.path(), settings);
    tier.wait_until_ready().await;
    assert!((90..=100).contains(&tier.usage().blocks));
    assert_eq!(tier.holds(fingerprint(), &hashes(&chain(29, 10))), 10);
    assert_eq!(tier.holds(fingerprint(), &hashes(&chain(0, 10))), 0);
}

#[tokio::test]
async fn prefixes_of_one_store_are_independent() {
    let shared: Arc<dyn ObjectStore> = Arc::new(InMemory::new());
    let open =
        |prefix| ObjectTier::open(shared.clone(), prefix, Settings::default(), Arc::new(EventLog::new(Epoch(1))));
    store(&*open("a"), chain(1, 3)).await;
    for (prefix, held) in [("a", 3), ("b", 0), ("a/manifests", 0)] {
        let tier = open(prefix);
        tier.wait_until_ready().await;
        assert_eq!(tier.usage().blocks, held, "under {prefix}");
    }
}

#[tokio::test]
async fn the_manifest_carries_the_retention_of_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let (writer, _) = reopen(folder.path()).await;
    let retention = crate::block::BlockRetention {
        expires: Some(Date::from_unix(1_000)),
        ..crate::block::BlockRetention::default()
    };
    let attrs = crate::block::BlockAttrs { retention, ..crate::block::BlockAttrs::default() };
    let blocks: Vec<Block> = chain(1, 4).into_iter().map(|block| block.with_attrs(attrs)).collect();
    store(&*writer, [blocks.clone(), chain(2, 4)].concat()).await;
    let (reader, events) = reopen(folder.path()).await;
    assert_eq!(reader.holds(fingerprint(), &hashes(&blocks)), 4);
    assert_eq!((reader.expire(Date::from_unix(999)), reader.expire(Date::from_unix(1_000))), (0, 4));
    let mut left = hashes(&chain(2, 4));
    left.sort_unstable();
    assert_eq!(announced(&events, Level::G4), left);
}
