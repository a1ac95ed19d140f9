use super::*;
use crate::block::{Codec, Header, SequenceHash};
use crate::disk::{self, DiskTier};
use crate::event::{Epoch, EventLog};
use crate::tier::conformance::{self, Memory, Subject, chain, fingerprint, hashes};
use crate::transform::codec::{Mode, encoded};
use bytes::Bytes;
use futures::StreamExt;
use object_store::memory::InMemory;
use object_store::path::Path;
use object_store::throttle::{ThrottleConfig, ThrottledStore};
use object_store::{ObjectStore, ObjectStoreExt};
use parking_lot::Mutex;
use prometheus::Registry;
use std::collections::HashSet;
use std::time::Duration;

/// The key store and the tier that all processes share.
struct Harness {
    key_store: Arc<dyn ObjectStore>,
    memory: Arc<Memory>,
    registry: Registry,
    metrics: Metrics,
}

impl Harness {
    fn new() -> Self {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let memory = Arc::new(Memory::new(Arc::new(EventLog::new(Epoch(1))), None));
        Self { key_store: Arc::new(InMemory::new()), memory, registry, metrics }
    }

    /// A process with these master keys.
    async fn process(&self, masters: &MasterSource) -> Process {
        let keys = Keyring::open(self.key_store.clone(), "keys", KeySource::Env("KEYS".into()), masters.environment());
        let keys = keys.await.unwrap();
        Process { tier: encrypted(self.memory.clone(), keys.clone(), self.metrics.clone()), keys }
    }

    async fn key_paths(&self) -> Vec<String> {
        let listed = self.key_store.list(None).map(|meta| meta.unwrap().location.to_string());
        let mut listed: Vec<String> = listed.collect().await;
        listed.sort();
        listed
    }

    fn shredded(&self) -> u64 {
        self.count("tier_shredded_blocks_total")
    }

    fn undecryptable(&self) -> u64 {
        self.count("tier_undecryptable_blocks_total")
    }

    /// The sum over all tiers.
    fn count(&self, name: &str) -> u64 {
        let family = self.registry.gather().into_iter().find(|family| family.name().ends_with(name));
        let value = |metric: &prometheus::proto::Metric| metric.get_counter().get_value() as u64;
        family.map_or(0, |family| family.get_metric().iter().map(value).sum())
    }

    async fn stored(&self, blocks: &[Block]) -> Vec<Option<Block>> {
        self.memory.load(fingerprint(), hashes(blocks)).map(|(_, block)| block.unwrap()).collect().await
    }
}

struct Process {
    tier: Arc<dyn Tier>,
    keys: Arc<Keyring>,
}

impl Process {
    /// Number of blocks that come back as they were stored.
    async fn count_found(&self, blocks: &[Block]) -> usize {
        let loaded = conformance::load(&*self.tier, fingerprint(), hashes(blocks)).await;
        let same = |(loaded, block): &(Option<crate::block::Verified>, &Block)| {
            loaded.as_ref().is_some_and(|loaded| *loaded.header() == block.header && loaded.payload() == block.payload)
        };
        loaded.into_iter().zip(blocks).filter(same).count()
    }

    /// The error of loading a block.
    async fn load_error(&self, hash: SequenceHash) -> LoadError {
        let answer = self.tier.load(fingerprint(), vec![hash]).next().await.unwrap().1;
        answer.expect_err("the block is refused")
    }
}

/// A source of master keys whose content can be changed.
#[derive(Clone)]
struct MasterSource(Arc<Mutex<String>>);

impl MasterSource {
    fn of(keys: &[u8]) -> Self {
        let masters = Self(Arc::default());
        masters.set(keys);
        masters
    }

    fn set(&self, keys: &[u8]) {
        *self.0.lock() = keys.iter().map(|byte| format!("{byte:02x}").repeat(32) + "\n").collect();
    }

    fn environment(&self) -> Environment {
        let text = self.0.clone();
        Arc::new(move |hash| (hash == "KEYS").then(|| text.lock().clone()))
    }
}

fn tenant(n: u8) -> DomainId {
    DomainId::from_bytes([n; 16])
}

fn blocks_of(domain: DomainId, seed: u64, count: usize) -> Vec<Block> {
    chain(seed, count).into_iter().map(|block| block.in_domain(domain)).collect()
}

mod in_memory {
    use super::*;

    conformance::suite!(async || {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let keys = Keyring::open(
            Arc::new(InMemory::new()),
            "",
            KeySource::Env("KEYS".into()),
            MasterSource::of(&[1]).environment(),
        );
        let memory = Arc::new(Memory::new(log.clone(), None));
        Subject::with_resources(encrypted(memory, keys.await.unwrap(), Harness::new().metrics), log, ())
    });
}

mod encoded_on_disk {
    use super::*;

    conformance::suite!(async || {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let folder = tempfile::tempdir().unwrap();
        let settings = disk::Settings { capacity_bytes: 64 << 20, min_free_bytes: 0, ..Default::default() };
        let disk = DiskTier::open(folder.path(), settings, log.clone()).unwrap();
        let key_store = folder.path().join("keys");
        let keys =
            Keyring::in_folder(&key_store, KeySource::Env("KEYS".into()), MasterSource::of(&[1]).environment()).await;
        let tier = encrypted(disk, keys.unwrap(), Harness::new().metrics);
        Subject::with_resources(encoded(tier, Mode::Smaller, Harness::new().metrics), log, folder)
    });
}

#[tokio::test]
async fn blocks_are_compressed_before_they_are_encrypted() {
    let harness = Harness::new();
    let process = harness.process(&MasterSource::of(&[1])).await;
    let tier = encoded(process.tier.clone(), Mode::Smaller, harness.metrics.clone());
    let shape = crate::transform::codec::synthetic::Shape { layers: 2, tokens: 16, channels: 512 };
    let kv = Bytes::from(crate::transform::codec::synthetic::bf16(&crate::transform::codec::synthetic::kv(1, shape)));
    let block = Block::new(SequenceHash::from_bytes([1; 16]), None, fingerprint(), kv.clone());
    conformance::store(&*tier, vec![block.clone()]).await;
    let stored = harness.stored(std::slice::from_ref(&block)).await.pop().flatten().unwrap();
    assert!(stored.header.codec == Codec::Bf16 && stored.header.key.is_some());
    assert!(stored.payload.len() < kv.len() * 3 / 4);
    let loaded = conformance::load(&*tier, fingerprint(), vec![block.header.hash]).await;
    assert_eq!(loaded[0].as_ref().unwrap().payload(), kv);
}

#[tokio::test]
async fn any_flipped_byte_of_a_stored_block_is_detected() {
    let harness = Harness::new();
    let process = harness.process(&MasterSource::of(&[1])).await;
    let block = chain(1, 1).remove(0);
    let hash = block.header.hash;
    conformance::store(&*process.tier, vec![block.clone()]).await;
    let stored = harness.stored(std::slice::from_ref(&block)).await.pop().flatten().unwrap();
    let bytes = [&stored.header.encode()[..], &stored.payload].concat();
    let mut found = 0;
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        let Ok(header) = Header::decode(bad.first_chunk().unwrap()) else { continue };
        harness.memory.discard(fingerprint(), hash);
        // With another hash or fingerprint it is another block, which is not requested here.
        if header.hash == hash && header.fingerprint == fingerprint() {
            harness.memory.store(vec![Block { header, payload: Bytes::copy_from_slice(&bad[Header::LEN..]) }]).await;
            assert!(matches!(process.load_error(hash).await, LoadError::Corrupt(_)), "byte {at}");
            found += 1;
        }
    }
    assert!(found > stored.payload.len());
    assert_eq!(harness.shredded(), 0);
}

#[tokio::test]
async fn an_unencrypted_block_is_refused() {
    let harness = Harness::new();
    let process = harness.process(&MasterSource::of(&[1])).await;
    let planted = chain(1, 1).remove(0);
    harness.memory.store(vec![planted.clone()]).await;
    assert!(matches!(process.load_error(planted.header.hash).await, LoadError::Corrupt(Corrupt::Transform)));
}

#[tokio::test]
async fn a_domains_key_cannot_decrypt_another_domains_blocks() {
    let harness = Harness::new();
    let process = harness.process(&MasterSource::of(&[1])).await;
    let (ours, theirs) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(2), 2, 3));
    let all = [ours.clone(), theirs.clone()].concat();
    conformance::store(&*process.tier, all.clone()).await;
    assert_eq!(process.count_found(&all).await, 6);
    let stored: Vec<Block> = harness.stored(&all).await.into_iter().flatten().collect();
    let keys: HashSet<_> = stored.iter().map(|block| (block.header.domain, block.header.key)).collect();
    assert_eq!(keys.len(), 2);
    // The store returns one tenant's block as another's.
    let foreign = Header { domain: tenant(2), key: stored[5].header.key, ..stored[0].header };
    let foreign = Block { header: foreign.for_payload(&stored[0].payload), payload: stored[0].payload.clone() };
    harness.memory.discard(fingerprint(), foreign.header.hash);
    harness.memory.store(vec![foreign.clone()]).await;
    assert!(matches!(process.load_error(foreign.header.hash).await, LoadError::Corrupt(Corrupt::Forged)));
}

#[tokio::test(start_paused = true)]
async fn a_shredded_domain_is_a_permanent_miss_everywhere() {
    let harness = Harness::new();
    let masters = MasterSource::of(&[1]);
    let (here, there) = (harness.process(&masters).await, harness.process(&masters).await);
    let (ours, theirs) = (blocks_of(tenant(1), 1, 4), blocks_of(tenant(2), 2, 4));
    let all = [ours.clone(), theirs.clone()].concat();
    conformance::store(&*here.tier, all.clone()).await;
    assert_eq!(there.count_found(&all).await, 8);
    let backup: Vec<(Path, Bytes)> = backup(&*harness.key_store).await;

    assert_eq!(here.keys.shred(tenant(1)).await.unwrap(), 1);
    let known = [here.keys.knows(tenant(1)).await.unwrap(), here.keys.knows(tenant(3)).await.unwrap()];
    assert_eq!(known, [true, false], "a shredded domain stays known");
    assert_eq!((here.count_found(&ours[..2]).await, harness.shredded()), (0, 2));
    assert_eq!(here.tier.holds(fingerprint(), &hashes(&ours)), 0, "unreadable blocks are discarded");
    there.keys.refresh().await.unwrap();
    assert_eq!((there.count_found(&ours[2..]).await, harness.shredded()), (0, 4));
    assert_eq!(there.count_found(&theirs).await, 4);

    // The wrapped keys are restored, by a backup or a race: the `shredded` entries override them.
    for (path, bytes) in backup {
        harness.key_store.put(&path, bytes.into()).await.unwrap();
    }
    let later = harness.process(&masters).await;
    let left = harness.key_paths().await.into_iter().filter(|path| path.contains(&tenant(1).to_string()));
    assert_eq!(left.filter(|path| !path.contains("/shreds/")).count(), 1);

    // The tenant stores blocks again, under a new key.
    conformance::store(&*later.tier, ours.clone()).await;
    assert_eq!(later.count_found(&all).await, 8);
}

async fn backup(key_store: &dyn ObjectStore) -> Vec<(Path, Bytes)> {
    let paths: Vec<Path> = key_store.list(None).map(|meta| meta.unwrap().location).collect().await;
    let mut saved = Vec::new();
    for path in paths {
        let bytes = key_store.get(&path).await.unwrap().bytes().await.unwrap();
        saved.push((path, bytes));
    }
    saved
}

#[tokio::test(start_paused = true)]
async fn a_process_learns_of_shredding_while_it_reads() {
    let harness = Harness::new();
    let masters = MasterSource::of(&[1]);
    let (here, there) = (harness.process(&masters).await, harness.process(&masters).await);
    let ours = blocks_of(tenant(1), 1, 4);
    conformance::store(&*here.tier, ours.clone()).await;
    assert_eq!(there.count_found(&ours[..1]).await, 1);
    here.keys.shred(tenant(1)).await.unwrap();
    tokio::time::advance(Duration::from_secs(31)).await;
    // The first load starts the refresh in the background, which takes no time here.
    let mut left = 4;
    for _ in 0..100 {
        left = there.count_found(&ours).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(left, 0);
}

#[tokio::test(start_paused = true)]
async fn the_master_key_rotates_while_blocks_are_read() {
    let harness = Harness::new();
    let (masters, fixed) = (MasterSource::of(&[1]), MasterSource::of(&[1]));
    let (reading, unaware) = (harness.process(&masters).await, harness.process(&fixed).await);
    let (before, after) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(2), 2, 3));
    conformance::store(&*reading.tier, before.clone()).await;
    assert_eq!(unaware.count_found(&before).await, 3);

    // The new key is put first, and the old one stays: a process that starts with them rewraps all keys.
    masters.set(&[2, 1]);
    tokio::time::advance(Duration::from_secs(11)).await;
    let wrapped = harness.key_paths().await;
    let rotated = harness.process(&masters).await;
    assert!(harness.key_paths().await.iter().all(|path| !wrapped.contains(path)), "nothing is wrapped by the old key");
    conformance::store(&*rotated.tier, after.clone()).await;
    for process in [&reading, &rotated] {
        assert_eq!((process.count_found(&before).await, process.count_found(&after).await), (3, 3));
    }

    // The old key is not needed any more.
    let alone = harness.process(&MasterSource::of(&[2])).await;
    assert_eq!((alone.count_found(&before).await, alone.count_found(&after).await), (3, 3));

    // A process without the new key uses its keys in memory, and stores what it cannot decrypt again.
    assert_eq!((unaware.count_found(&before).await, harness.undecryptable()), (3, 0));
    assert_eq!((unaware.count_found(&after).await, harness.undecryptable()), (0, 3));
    conformance::store(&*unaware.tier, after.clone()).await;
    assert_eq!((unaware.count_found(&after).await, harness.undecryptable()), (3, 3));
    assert_eq!(harness.shredded(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_watching_process_learns_of_a_shred_within_seconds() {
    let harness = Harness::new();
    let masters = MasterSource::of(&[1]);
    let (here, there) = (harness.process(&masters).await, harness.process(&masters).await);
    let purged: Arc<Mutex<Vec<DomainId>>> = Arc::default();
    let seen = purged.clone();
    let _watch = there.keys.watch();
    there.keys.on_shred(move |domain| seen.lock().push(domain));
    let (ours, theirs) = (blocks_of(tenant(1), 1, 4), blocks_of(tenant(2), 2, 4));
    conformance::store(&*here.tier, [ours.clone(), theirs.clone()].concat()).await;
    assert_eq!((there.count_found(&ours).await, there.count_found(&theirs).await), (4, 4));

    here.keys.shred(tenant(1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert_eq!(*purged.lock(), [tenant(1)]);
    assert_eq!((there.count_found(&ours).await, there.count_found(&theirs).await), (0, 4));
    // A domain without a stored key can have blocks in memory.
    here.keys.shred(tenant(3)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert_eq!(*purged.lock(), [tenant(1), tenant(3)]);
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(purged.lock().len(), 2, "each once");
    here.keys.shred(tenant(1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert_eq!(purged.lock().len(), 3, "and again when it is shredded again");
}

#[tokio::test(start_paused = true)]
async fn no_new_key_while_blocks_from_before_may_be_stored() {
    let harness = Harness::new();
    let masters = MasterSource::of(&[1]);
    let (here, there) = (harness.process(&masters).await, harness.process(&masters).await);
    let purged = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let seen = purged.clone();
    there.keys.on_shred(move |_| _ = seen.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let (before, after) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(1), 2, 3));
    conformance::store(&*there.tier, before[..1].to_vec()).await;
    here.keys.shred(tenant(1)).await.unwrap();
    // That process has its key still in memory: blocks that it stores under that key are lost.
    there.keys.refresh().await.unwrap();
    assert_eq!(purged.load(std::sync::atomic::Ordering::Relaxed), 1, "a refresh purges, too");
    for process in [&here, &there] {
        let answers = process.tier.store(before.clone()).await;
        assert!(answers[1..].iter().all(Result::is_err), "{answers:?}");
    }
    assert_eq!(there.count_found(&before).await, 0);
    tokio::time::advance(Duration::from_secs(10)).await;
    conformance::store(&*there.tier, after.clone()).await;
    assert_eq!((here.count_found(&after).await, there.count_found(&after).await), (3, 3));
}

#[tokio::test]
async fn the_keys_of_metadata_cannot_be_shredded() {
    let harness = Harness::new();
    let process = harness.process(&MasterSource::of(&[1])).await;
    drop(MetadataKeys::open(process.keys.clone()).await.unwrap());
    assert!(matches!(process.keys.shred(metadata::DOMAIN).await, Err(KeyError::Reserved(_))));
}

#[tokio::test]
async fn two_first_keys_of_a_domain_are_both_valid() {
    let harness = Harness::new();
    let masters = MasterSource::of(&[1]);
    let (one, other) = (harness.process(&masters).await, harness.process(&masters).await);
    let (ours, theirs) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(1), 2, 3));
    tokio::join!(conformance::store(&*one.tier, ours.clone()), conformance::store(&*other.tier, theirs.clone()));
    assert_eq!((one.count_found(&theirs).await, other.count_found(&ours).await), (3, 3));
    let restarted = harness.process(&masters).await;
    conformance::store(&*restarted.tier, blocks_of(tenant(1), 3, 3)).await;
    assert!(harness.key_paths().await.len() <= 2, "a restart creates no new key");
}

#[tokio::test(start_paused = true)]
async fn keys_in_memory_outlive_an_outage_of_the_key_store() {
    let key_store = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
    let harness = Harness { key_store: key_store.clone(), ..Harness::new() };
    let masters = MasterSource::of(&[1]);
    let (here, there) = (harness.process(&masters).await, harness.process(&masters).await);
    let (ours, theirs) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(2), 2, 3));
    conformance::store(&*here.tier, ours.clone()).await;
    conformance::store(&*there.tier, theirs.clone()).await;

    let delay = |by: u64| key_store.config_mut(|config| config.wait_list_per_call = Duration::from_secs(by));
    delay(3600);
    let began = tokio::time::Instant::now();
    assert_eq!((here.count_found(&ours).await, here.count_found(&theirs).await), (3, 0));
    let answers = here.tier.store(blocks_of(tenant(3), 3, 5)).await;
    assert!(answers.iter().all(|answer| matches!(answer, Err(StoreError::Io(_)))));
    assert_eq!(began.elapsed().as_secs(), 10);

    delay(0);
    tokio::time::advance(Duration::from_secs(5)).await;
    assert_eq!(here.count_found(&theirs).await, 3);
    assert_eq!(harness.shredded(), 0);
}

/// A process with another key store and the same master key.
async fn with_other_key_store(harness: &Harness, tier: Arc<dyn Tier>) -> Arc<dyn Tier> {
    let source = KeySource::Env("KEYS".into());
    let keys = Keyring::open(Arc::new(InMemory::new()), "", source, MasterSource::of(&[1]).environment());
    encrypted(tier, keys.await.unwrap(), harness.metrics.clone())
}

#[tokio::test]
async fn on_disk_a_block_without_a_known_key_is_stored_again_and_its_record_stays() {
    let (harness, folder) = (Harness::new(), tempfile::tempdir().unwrap());
    let keys = harness.process(&MasterSource::of(&[1])).await.keys;
    let open = || {
        let settings = disk::Settings { capacity_bytes: 64 << 20, min_free_bytes: 0, ..Default::default() };
        DiskTier::open(folder.path(), settings, Arc::new(EventLog::new(Epoch(1)))).unwrap()
    };
    let blocks = chain(1, 2);
    let found = async |tier: &Arc<dyn Tier>| {
        conformance::load(&**tier, fingerprint(), hashes(&blocks)).await.iter().filter(|block| block.is_some()).count()
    };
    let tier = encrypted(open(), keys.clone(), harness.metrics.clone());
    conformance::store(&*tier, blocks.clone()).await;
    drop(tier);

    let tier = with_other_key_store(&harness, open()).await;
    assert_eq!((found(&tier).await, harness.undecryptable(), harness.shredded()), (0, 2, 0));
    assert_eq!(tier.holds(fingerprint(), &hashes(&blocks)), 0);
    drop(tier);
    let tier = encrypted(open(), keys.clone(), harness.metrics.clone());
    assert_eq!(found(&tier).await, 2, "the key is back");
    drop(tier);

    let tier = with_other_key_store(&harness, open()).await;
    assert_eq!(found(&tier).await, 0);
    conformance::store(&*tier, blocks.clone()).await;
    assert_eq!(found(&tier).await, 2);
}

#[tokio::test(start_paused = true)]
async fn in_a_shared_store_a_block_without_a_known_key_is_stored_again_beside_the_other_copy() {
    let (harness, store) = (Harness::new(), Arc::new(InMemory::new()));
    let keys = harness.process(&MasterSource::of(&[1])).await.keys;
    let open = || {
        let log = Arc::new(EventLog::new(Epoch(1)));
        crate::object::ObjectTier::open(store.clone(), "kv", crate::object::Settings::default(), log)
    };
    let blocks = chain(1, 2);
    let found = async |tier: &Arc<dyn Tier>| {
        conformance::load(&**tier, fingerprint(), hashes(&blocks)).await.iter().filter(|block| block.is_some()).count()
    };
    let ours = open();
    ours.wait_until_ready().await;
    let ours = encrypted(ours, keys, harness.metrics.clone());
    conformance::store(&*ours, blocks.clone()).await;

    let other = open();
    other.wait_until_ready().await;
    let other = with_other_key_store(&harness, other).await;
    assert_eq!((found(&other).await, harness.undecryptable()), (0, 2));
    assert_eq!(other.holds(fingerprint(), &hashes(&blocks)), 0);
    conformance::store(&*other, blocks.clone()).await;
    assert_eq!(found(&other).await, 2);

    // The copy of the other process is the newest. It is dropped when it is met, a moment after it became known.
    tokio::time::sleep(Duration::from_mins(1)).await;
    found(&ours).await;
    assert_eq!((found(&ours).await, found(&other).await), (2, 2));
}

#[tokio::test]
async fn a_corrupt_wrapped_key_is_reported_and_replaced() {
    let harness = Harness::new();
    let masters = MasterSource::of(&[1]);
    let block = blocks_of(tenant(1), 1, 1);
    conformance::store(&*harness.process(&masters).await.tier, block.clone()).await;
    let (path, bytes) = backup(&*harness.key_store).await.remove(0);
    let mut bad = bytes.to_vec();
    bad[60] ^= 1;
    harness.key_store.put(&path, bad.into()).await.unwrap();
    let process = harness.process(&masters).await;
    assert_eq!((process.count_found(&block).await, harness.undecryptable()), (0, 1));
    let new = blocks_of(tenant(1), 2, 1);
    conformance::store(&*process.tier, new.clone()).await;
    assert_eq!(process.count_found(&new).await, 1);
}
