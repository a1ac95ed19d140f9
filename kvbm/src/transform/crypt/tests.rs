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
use prometheus::Registry;
use std::collections::HashSet;
use std::sync::Mutex;
use std::time::Duration;

/// The shelf and the tier that all processes share, and the events of one.
struct Site {
    shelf: Arc<dyn ObjectStore>,
    memory: Arc<Memory>,
    registry: Registry,
    metrics: Metrics,
}

impl Site {
    fn new() -> Self {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let memory = Arc::new(Memory::new(Arc::new(EventLog::new(Epoch(1))), None));
        Self { shelf: Arc::new(InMemory::new()), memory, registry, metrics }
    }

    /// What a process with these master keys makes of it.
    async fn process(&self, masters: &Masters) -> Process {
        let keys = Keys::open(self.shelf.clone(), "keys", KeySource::Env("KEYS".into()), masters.environment());
        let keys = keys.await.unwrap();
        Process { tier: encrypted(self.memory.clone(), keys.clone(), self.metrics.clone()), keys }
    }

    async fn shelved(&self) -> Vec<String> {
        let listed = self.shelf.list(None).map(|meta| meta.unwrap().location.to_string());
        let mut listed: Vec<String> = listed.collect().await;
        listed.sort();
        listed
    }

    fn shredded(&self) -> u64 {
        let family =
            self.registry.gather().into_iter().find(|family| family.name().ends_with("tier_shredded_blocks_total"));
        family.map_or(0, |family| family.get_metric()[0].get_counter().get_value() as u64)
    }

    async fn at_rest(&self, blocks: &[Block]) -> Vec<Option<Block>> {
        self.memory.load(fingerprint(), hashes(blocks)).map(|(_, block)| block.unwrap()).collect().await
    }
}

struct Process {
    tier: Arc<dyn Tier>,
    keys: Arc<Keys>,
}

impl Process {
    /// How many come back as they were.
    async fn finds(&self, blocks: &[Block]) -> usize {
        let loaded = conformance::load(&*self.tier, fingerprint(), hashes(blocks)).await;
        let same = |(loaded, block): &(Option<crate::block::Verified>, &Block)| {
            loaded.as_ref().is_some_and(|loaded| *loaded.header() == block.header && loaded.payload() == block.payload)
        };
        loaded.into_iter().zip(blocks).filter(same).count()
    }

    /// Why a block is not served.
    async fn refusal(&self, name: SequenceHash) -> LoadError {
        let answer = self.tier.load(fingerprint(), vec![name]).next().await.unwrap().1;
        answer.expect_err("not served")
    }
}

/// A source whose content changes under the processes that read it.
#[derive(Clone)]
struct Masters(Arc<Mutex<String>>);

impl Masters {
    fn of(keys: &[u8]) -> Self {
        let masters = Self(Arc::default());
        masters.set(keys);
        masters
    }

    fn set(&self, keys: &[u8]) {
        *self.0.lock().unwrap() = keys.iter().map(|byte| format!("{byte:02x}").repeat(32) + "\n").collect();
    }

    fn environment(&self) -> Environment {
        let text = self.0.clone();
        Arc::new(move |name| (name == "KEYS").then(|| text.lock().unwrap().clone()))
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
        let keys =
            Keys::open(Arc::new(InMemory::new()), "", KeySource::Env("KEYS".into()), Masters::of(&[1]).environment());
        let memory = Arc::new(Memory::new(log.clone(), None));
        Subject::with_resources(encrypted(memory, keys.await.unwrap(), Site::new().metrics), log, ())
    });
}

mod encoded_on_disk {
    use super::*;

    conformance::suite!(async || {
        let log = Arc::new(EventLog::new(Epoch(1)));
        let folder = tempfile::tempdir().unwrap();
        let settings = disk::Settings { capacity_bytes: 64 << 20, min_free_bytes: 0, ..Default::default() };
        let disk = DiskTier::open(folder.path(), settings, log.clone()).unwrap();
        let shelf = folder.path().join("keys");
        let keys = Keys::in_folder(&shelf, KeySource::Env("KEYS".into()), Masters::of(&[1]).environment()).await;
        let tier = encrypted(disk, keys.unwrap(), Site::new().metrics);
        Subject::with_resources(encoded(tier, Mode::Smaller), log, folder)
    });
}

#[tokio::test]
async fn compressed_first_a_block_rests_small_and_secret() {
    let site = Site::new();
    let process = site.process(&Masters::of(&[1])).await;
    let tier = encoded(process.tier.clone(), Mode::Smaller);
    let shape = crate::transform::codec::synthetic::Shape { layers: 2, tokens: 16, channels: 512 };
    let kv = Bytes::from(crate::transform::codec::synthetic::bf16(&crate::transform::codec::synthetic::kv(1, shape)));
    let block = Block::new(SequenceHash::from_bytes([1; 16]), None, fingerprint(), kv.clone());
    conformance::store(&*tier, vec![block.clone()]).await;
    let rests = site.at_rest(std::slice::from_ref(&block)).await.pop().flatten().unwrap();
    assert!(rests.header.codec == Codec::Bf16 && rests.header.key.is_some());
    assert!(rests.payload.len() < kv.len() * 3 / 4);
    let loaded = conformance::load(&*tier, fingerprint(), vec![block.header.hash]).await;
    assert_eq!(loaded[0].as_ref().unwrap().payload(), kv);
}

#[tokio::test]
async fn any_flip_of_a_block_at_rest_is_found_out() {
    let site = Site::new();
    let process = site.process(&Masters::of(&[1])).await;
    let block = chain(1, 1).remove(0);
    let name = block.header.hash;
    conformance::store(&*process.tier, vec![block.clone()]).await;
    let rests = site.at_rest(std::slice::from_ref(&block)).await.pop().flatten().unwrap();
    let bytes = [&rests.header.encode()[..], &rests.payload].concat();
    let mut found = 0;
    for at in 0..bytes.len() {
        let mut bad = bytes.clone();
        bad[at] ^= 1 << (at % 8);
        let Ok(header) = Header::decode(bad.first_chunk().unwrap()) else { continue };
        site.memory.discard(fingerprint(), name);
        // A flipped name or fingerprint is somebody else's block, which nobody asks this tier for.
        if header.hash == name && header.fingerprint == fingerprint() {
            site.memory.store(vec![Block { header, payload: Bytes::copy_from_slice(&bad[Header::LEN..]) }]).await;
            assert!(matches!(process.refusal(name).await, LoadError::Corrupt(_)), "byte {at}");
            found += 1;
        }
    }
    assert!(found > rests.payload.len());
    assert_eq!(site.shredded(), 0);
}

#[tokio::test]
async fn what_the_store_put_there_in_the_clear_is_refused() {
    let site = Site::new();
    let process = site.process(&Masters::of(&[1])).await;
    let planted = chain(1, 1).remove(0);
    site.memory.store(vec![planted.clone()]).await;
    assert!(matches!(process.refusal(planted.header.hash).await, LoadError::Corrupt(Corrupt::Transform)));
}

#[tokio::test]
async fn domains_have_keys_of_their_own_and_none_opens_anothers_blocks() {
    let site = Site::new();
    let process = site.process(&Masters::of(&[1])).await;
    let (ours, theirs) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(2), 2, 3));
    let all = [ours.clone(), theirs.clone()].concat();
    conformance::store(&*process.tier, all.clone()).await;
    assert_eq!(process.finds(&all).await, 6);
    let rests: Vec<Block> = site.at_rest(&all).await.into_iter().flatten().collect();
    let keys: HashSet<_> = rests.iter().map(|block| (block.header.domain, block.header.key)).collect();
    assert_eq!(keys.len(), 2);
    // The store says that one tenant's block is another's.
    let foreign = Header { domain: tenant(2), key: rests[5].header.key, ..rests[0].header };
    let foreign = Block { header: foreign.for_payload(&rests[0].payload), payload: rests[0].payload.clone() };
    site.memory.discard(fingerprint(), foreign.header.hash);
    site.memory.store(vec![foreign.clone()]).await;
    assert!(matches!(process.refusal(foreign.header.hash).await, LoadError::Corrupt(Corrupt::Forged)));
}

#[tokio::test(start_paused = true)]
async fn a_shredded_domain_is_a_miss_for_good_in_every_process() {
    let site = Site::new();
    let masters = Masters::of(&[1]);
    let (here, there) = (site.process(&masters).await, site.process(&masters).await);
    let (ours, theirs) = (blocks_of(tenant(1), 1, 4), blocks_of(tenant(2), 2, 4));
    let all = [ours.clone(), theirs.clone()].concat();
    conformance::store(&*here.tier, all.clone()).await;
    assert_eq!(there.finds(&all).await, 8);
    let backup: Vec<(Path, Bytes)> = backup(&*site.shelf).await;

    assert_eq!(here.keys.shred(tenant(1)).await.unwrap(), 1);
    assert_eq!((here.finds(&ours[..2]).await, site.shredded()), (0, 2));
    assert_eq!(here.tier.holds(fingerprint(), &hashes(&ours)), 0, "what can never be read again is given up");
    there.keys.refresh().await.unwrap();
    assert_eq!((there.finds(&ours[2..]).await, site.shredded()), (0, 4));
    assert_eq!(there.finds(&theirs).await, 4);

    // The wrapped keys come back, from a backup or a racing process: the word that they are shredded outweighs them.
    for (path, bytes) in backup {
        site.shelf.put(&path, bytes.into()).await.unwrap();
    }
    let later = site.process(&masters).await;
    let left = site.shelved().await.into_iter().filter(|path| path.contains(&tenant(1).to_string()));
    assert_eq!(left.filter(|path| !path.contains("/shreds/")).count(), 1);

    // The tenant comes back: with a new key, and without the old blocks.
    conformance::store(&*later.tier, ours.clone()).await;
    assert_eq!(later.finds(&all).await, 8);
}

async fn backup(shelf: &dyn ObjectStore) -> Vec<(Path, Bytes)> {
    let paths: Vec<Path> = shelf.list(None).map(|meta| meta.unwrap().location).collect().await;
    let mut saved = Vec::new();
    for path in paths {
        let bytes = shelf.get(&path).await.unwrap().bytes().await.unwrap();
        saved.push((path, bytes));
    }
    saved
}

#[tokio::test(start_paused = true)]
async fn a_process_learns_of_shredding_while_it_reads() {
    let site = Site::new();
    let masters = Masters::of(&[1]);
    let (here, there) = (site.process(&masters).await, site.process(&masters).await);
    let ours = blocks_of(tenant(1), 1, 4);
    conformance::store(&*here.tier, ours.clone()).await;
    assert_eq!(there.finds(&ours[..1]).await, 1);
    here.keys.shred(tenant(1)).await.unwrap();
    tokio::time::advance(Duration::from_secs(31)).await;
    // The first look starts the refresh, which takes no time here; nobody waits for it.
    let mut left = 4;
    for _ in 0..100 {
        left = there.finds(&ours).await;
        tokio::task::yield_now().await;
    }
    assert_eq!(left, 0);
}

#[tokio::test(start_paused = true)]
async fn the_master_key_rotates_while_blocks_are_read() {
    let site = Site::new();
    let (masters, fixed) = (Masters::of(&[1]), Masters::of(&[1]));
    let (reading, unaware) = (site.process(&masters).await, site.process(&fixed).await);
    let (before, after) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(2), 2, 3));
    conformance::store(&*reading.tier, before.clone()).await;
    assert_eq!(unaware.finds(&before).await, 3);

    // The new key goes first, the old one stays: a process that starts with them wraps all keys anew.
    masters.set(&[2, 1]);
    tokio::time::advance(Duration::from_secs(11)).await;
    let wrapped = site.shelved().await;
    let rotated = site.process(&masters).await;
    assert!(site.shelved().await.iter().all(|path| !wrapped.contains(path)), "nothing is wrapped by the old key");
    conformance::store(&*rotated.tier, after.clone()).await;
    for process in [&reading, &rotated] {
        assert_eq!((process.finds(&before).await, process.finds(&after).await), (3, 3));
    }

    // Who cannot have the new key goes on with what it knows, and what it cannot open it leaves alone.
    assert_eq!(unaware.finds(&before).await, 3);
    assert!(unaware.refusal(after[0].header.hash).await.to_string().contains("is wrapped by master key"));

    // The old key can go.
    let alone = site.process(&Masters::of(&[2])).await;
    assert_eq!((alone.finds(&before).await, alone.finds(&after).await), (3, 3));
    assert_eq!(site.shredded(), 0);
}

#[tokio::test(start_paused = true)]
async fn a_watching_process_learns_of_a_shred_within_seconds() {
    let site = Site::new();
    let masters = Masters::of(&[1]);
    let (here, there) = (site.process(&masters).await, site.process(&masters).await);
    let purged: Arc<Mutex<Vec<DomainId>>> = Arc::default();
    let (heard, _watch) = (purged.clone(), there.keys.watch());
    there.keys.on_shred(move |domain| heard.lock().unwrap().push(domain));
    let (ours, theirs) = (blocks_of(tenant(1), 1, 4), blocks_of(tenant(2), 2, 4));
    conformance::store(&*here.tier, [ours.clone(), theirs.clone()].concat()).await;
    assert_eq!((there.finds(&ours).await, there.finds(&theirs).await), (4, 4));

    here.keys.shred(tenant(1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert_eq!(*purged.lock().unwrap(), [tenant(1)]);
    assert_eq!((there.finds(&ours).await, there.finds(&theirs).await), (0, 4));
    // A domain without a key on the shelf can have blocks in memory all the same.
    here.keys.shred(tenant(3)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert_eq!(*purged.lock().unwrap(), [tenant(1), tenant(3)]);
    tokio::time::sleep(Duration::from_mins(1)).await;
    assert_eq!(purged.lock().unwrap().len(), 2, "each once");
    here.keys.shred(tenant(1)).await.unwrap();
    tokio::time::sleep(Duration::from_millis(2_100)).await;
    assert_eq!(purged.lock().unwrap().len(), 3, "and again when it is shredded again");
}

#[tokio::test(start_paused = true)]
async fn no_new_key_while_blocks_from_before_may_be_stored() {
    let site = Site::new();
    let masters = Masters::of(&[1]);
    let (here, there) = (site.process(&masters).await, site.process(&masters).await);
    let purged = Arc::new(std::sync::atomic::AtomicU32::new(0));
    let heard = purged.clone();
    there.keys.on_shred(move |_| _ = heard.fetch_add(1, std::sync::atomic::Ordering::Relaxed));
    let (before, after) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(1), 2, 3));
    conformance::store(&*there.tier, before[..1].to_vec()).await;
    here.keys.shred(tenant(1)).await.unwrap();
    // It has not looked yet, and its key is still in memory: what it stores under that is lost.
    there.keys.refresh().await.unwrap();
    assert_eq!(purged.load(std::sync::atomic::Ordering::Relaxed), 1, "whichever way it learns");
    for process in [&here, &there] {
        let answers = process.tier.store(before.clone()).await;
        assert!(answers[1..].iter().all(Result::is_err), "{answers:?}");
    }
    assert_eq!(there.finds(&before).await, 0);
    tokio::time::advance(Duration::from_secs(10)).await;
    conformance::store(&*there.tier, after.clone()).await;
    assert_eq!((here.finds(&after).await, there.finds(&after).await), (3, 3));
}

#[tokio::test]
async fn the_keys_of_metadata_cannot_be_shredded() {
    let site = Site::new();
    let process = site.process(&Masters::of(&[1])).await;
    drop(MetadataKeys::open(process.keys.clone()).await.unwrap());
    assert!(matches!(process.keys.shred(metadata::DOMAIN).await, Err(KeyError::Reserved(_))));
}

#[tokio::test]
async fn two_processes_that_make_a_first_key_at_once_read_each_others_blocks() {
    let site = Site::new();
    let masters = Masters::of(&[1]);
    let (one, other) = (site.process(&masters).await, site.process(&masters).await);
    let (ours, theirs) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(1), 2, 3));
    tokio::join!(conformance::store(&*one.tier, ours.clone()), conformance::store(&*other.tier, theirs.clone()));
    assert_eq!((one.finds(&theirs).await, other.finds(&ours).await), (3, 3));
    let restarted = site.process(&masters).await;
    conformance::store(&*restarted.tier, blocks_of(tenant(1), 3, 3)).await;
    assert!(site.shelved().await.len() <= 2, "a restart makes no new key");
}

#[tokio::test(start_paused = true)]
async fn keys_in_memory_outlive_an_outage_of_the_shelf_and_only_one_request_waits_for_it() {
    let shelf = Arc::new(ThrottledStore::new(InMemory::new(), ThrottleConfig::default()));
    let site = Site { shelf: shelf.clone(), ..Site::new() };
    let masters = Masters::of(&[1]);
    let (here, there) = (site.process(&masters).await, site.process(&masters).await);
    let (ours, theirs) = (blocks_of(tenant(1), 1, 3), blocks_of(tenant(2), 2, 3));
    conformance::store(&*here.tier, ours.clone()).await;
    conformance::store(&*there.tier, theirs.clone()).await;

    let delay = |by: u64| shelf.config_mut(|config| config.wait_list_per_call = Duration::from_secs(by));
    delay(3600);
    let began = tokio::time::Instant::now();
    assert_eq!((here.finds(&ours).await, here.finds(&theirs).await), (3, 0));
    let answers = here.tier.store(blocks_of(tenant(3), 3, 5)).await;
    assert!(answers.iter().all(|answer| matches!(answer, Err(StoreError::Io(_)))));
    assert_eq!(began.elapsed().as_secs(), 10);

    delay(0);
    tokio::time::advance(Duration::from_secs(5)).await;
    assert_eq!(here.finds(&theirs).await, 3);
    assert_eq!(site.shredded(), 0);
}

#[tokio::test]
async fn a_key_that_nobody_knows_makes_a_miss_and_the_block_stays() {
    let site = Site::new();
    let process = site.process(&Masters::of(&[1])).await;
    let block = chain(1, 1);
    conformance::store(&*process.tier, block.clone()).await;
    let stranger =
        Keys::open(Arc::new(InMemory::new()), "", KeySource::Env("KEYS".into()), Masters::of(&[1]).environment());
    let stranger = encrypted(site.memory.clone(), stranger.await.unwrap(), site.metrics.clone());
    assert!(conformance::load(&*stranger, fingerprint(), hashes(&block)).await[0].is_none());
    assert_eq!(site.shredded(), 1);
    assert_eq!(process.finds(&block).await, 1);
}

#[tokio::test]
async fn a_wrapped_key_that_was_changed_is_named_and_replaced_for_new_blocks() {
    let site = Site::new();
    let masters = Masters::of(&[1]);
    let block = blocks_of(tenant(1), 1, 1);
    conformance::store(&*site.process(&masters).await.tier, block.clone()).await;
    let (path, bytes) = backup(&*site.shelf).await.remove(0);
    let mut bad = bytes.to_vec();
    bad[60] ^= 1;
    site.shelf.put(&path, bad.into()).await.unwrap();
    let process = site.process(&masters).await;
    assert!(process.refusal(block[0].header.hash).await.to_string().contains("is corrupt"));
    let new = blocks_of(tenant(1), 2, 1);
    conformance::store(&*process.tier, new.clone()).await;
    assert_eq!(process.finds(&new).await, 1);
}
