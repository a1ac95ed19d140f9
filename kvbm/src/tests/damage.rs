//! Damage to stored bytes, seen through the manager: each region of each file, with each transform. A damaged block is
//! either served with the bytes that were stored, or a miss; blocks found corrupt are counted.

use crate::block::{Block, Codec, Header, Level};
use crate::disk::DiskTier;
use crate::event::{Epoch, EventLog};
use crate::manager::{BlockManager, Recompute};
use crate::metrics::Metrics;
use crate::object::ObjectTier;
use crate::pool::DeviceBlocks;
use crate::pool::device::conformance::InMemory;
use crate::tier::Tier;
use crate::tier::conformance::{chain, fingerprint, hashes, store};
use crate::transform::codec::{Mode, encoded, synthetic};
use crate::transform::crypt::{KeySource, Keyring, encrypted};
use crate::{disk, object};
use bytes::Bytes;
use futures::StreamExt;
use object_store::memory::InMemory as Shelf;
use prometheus::Registry;
use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

/// Two batches of three blocks.
const BATCH: usize = 3;
const BLOCKS: usize = 2 * BATCH;
/// The block that is damaged; it has neighbours on both sides.
const DAMAGED: usize = 1;
const SHAPE: synthetic::Shape = synthetic::Shape { layers: 1, tokens: 16, channels: 64 };
const SIZE: usize = 16 * 64 * 2 * 2;

/// The fields of a block's header, as in `block/header.rs`.
const HEADER: [(&str, Range<usize>); 15] = [
    ("magic", 0..8),
    ("name", 8..24),
    ("parent", 24..40),
    ("fingerprint", 40..72),
    ("length", 72..80),
    ("codec", 80..81),
    ("has a parent", 81..82),
    ("cipher", 82..83),
    ("priority", 83..84),
    ("expires", 84..88),
    ("pinned until", 88..92),
    ("not to rest", 92..93),
    ("zeros", 93..96),
    ("data key", 96..104),
    ("domain", 104..120),
];
const CHECKSUM: Range<usize> = 120..128;

/// The fields of an entry in a footer and in a manifest, which differ in the middle.
const FOOTER_ENTRY: [(&str, Range<usize>); 8] = [
    ("name", 0..16),
    ("parent", 16..32),
    ("offset", 32..36),
    ("length", 36..40),
    ("owner's number", 40..43),
    ("kind", 43..44),
    ("expires", 44..48),
    ("pinned until", 48..52),
];
const MANIFEST_ENTRY: [(&str, Range<usize>); 8] = [
    ("name", 0..16),
    ("parent", 16..32),
    ("offset", 32..36),
    ("length", 36..40),
    ("expires", 40..44),
    ("pinned until", 44..48),
    ("has a parent", 48..49),
    ("zeros", 49..52),
];
const ENTRY: usize = 52;

/// The fields of a footer's trailer: start and end, counted from the end of the file.
const FOOTER_TRAILER: [(&str, usize, usize); 5] =
    [("magic", 32, 24), ("offset", 24, 16), ("entries", 16, 12), ("owners", 12, 8), ("checksum", 8, 0)];

/// The offset of a payload in a record on disk.
const SECTOR: usize = 512;

/// The fields of a manifest with one section, from the start of the file.
const MANIFEST_HEAD: [(&str, Range<usize>); 7] = [
    ("magic", 0..8),
    ("writer", 8..24),
    ("domain", 24..40),
    ("fingerprint", 40..72),
    ("object", 72..80),
    ("entries", 80..84),
    ("zeros", 84..88),
];

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Form {
    Plain,
    Encoded,
    Encrypted,
    Both,
}

const FORMS: [Form; 4] = [Form::Plain, Form::Encoded, Form::Encrypted, Form::Both];

/// What a read of all blocks found.
#[derive(Clone, Debug)]
struct Outcome {
    /// Blocks that were served with the bytes that were stored.
    served: Vec<usize>,
    /// Number of blocks counted as corrupt. As an expectation, `None` means at least one, with misses for the others.
    quarantined: Option<u64>,
}

impl Outcome {
    fn undamaged() -> Self {
        Self::without(&[], 0)
    }

    fn without(lost: &[usize], quarantined: u64) -> Self {
        Self { served: (0..BLOCKS).filter(|n| !lost.contains(n)).collect(), quarantined: Some(quarantined) }
    }

    fn quarantined(lost: &[usize]) -> Self {
        Self::without(lost, lost.len() as u64)
    }

    fn is(&self, found: &Self) -> bool {
        let counted = match self.quarantined {
            Some(_) => self.quarantined == found.quarantined,
            None => found.quarantined > Some(0),
        };
        counted && self.served == found.served
    }
}

/// Blocks, their transform, and the folders in which they are stored.
struct Harness {
    level: Level,
    form: Form,
    keys: Arc<Keyring>,
    blocks: Vec<Block>,
    /// The folder after an orderly end of the process, after a crash, and after a crash with the first batch alone.
    whole: TempDir,
    killed: TempDir,
    early: TempDir,
}

impl Harness {
    async fn new(level: Level, form: Form) -> Self {
        let source = KeySource::Env("KEYS".into());
        let environment = Arc::new(|name: &str| (name == "KEYS").then(|| "01".repeat(32)));
        let keys = Keyring::open(Arc::new(Shelf::new()), "keys", source, environment).await.unwrap();
        let payload = |seed| Bytes::from(synthetic::bf16(&synthetic::kv(seed, SHAPE)));
        let seal = |(n, block): (usize, Block)| {
            Block::new(block.header.hash, block.header.parent, fingerprint(), payload(n as u64))
        };
        let blocks: Vec<Block> = chain(7, BLOCKS).into_iter().enumerate().map(seal).collect();
        let whole = tempfile::tempdir().unwrap();
        let [early, killed] = {
            let tier = Self::open(level, whole.path()).await;
            let wrapped = wrap(form, tier.clone(), &keys, &metrics());
            store(&*wrapped, blocks[..BATCH].to_vec()).await;
            let early = copy(whole.path());
            store(&*wrapped, blocks[BATCH..].to_vec()).await;
            let codec = if matches!(form, Form::Plain | Form::Encrypted) { Codec::Raw } else { Codec::Bf16 };
            let encrypted = matches!(form, Form::Encrypted | Form::Both);
            let stored = tier.load(fingerprint(), hashes(&blocks)).next().await.unwrap().1.unwrap().unwrap().header;
            assert_eq!(
                (stored.codec, stored.key.is_some()),
                (codec, encrypted),
                "blocks are stored with the tested transform"
            );
            [early, copy(whole.path())]
        };
        Self { level, form, keys, blocks, whole, killed, early }
    }

    async fn open(level: Level, folder: &Path) -> Arc<dyn Tier> {
        let log = Arc::new(EventLog::new(Epoch(1)));
        if level == Level::G3 {
            return disk(folder, log);
        }
        let tier = ObjectTier::open_folder(folder, object::Settings::default(), log).unwrap();
        tier.wait_until_ready().await;
        tier
    }

    /// Opens the folder with an empty memory and requests each block; asserts that served bytes are those that were
    /// stored.
    async fn read(&self, folder: &Path, case: &str) -> Outcome {
        self.read_from(Self::open(self.level, folder).await, case).await
    }

    async fn read_from(&self, tier: Arc<dyn Tier>, case: &str) -> Outcome {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let device = InMemory::new(2 * BLOCKS, SIZE, fingerprint());
        let tier = wrap(self.form, tier, &self.keys, &metrics);
        let log = Arc::new(EventLog::new(Epoch(1)));
        let manager = BlockManager::new(device.clone(), None, vec![tier], log, metrics);
        let mut served = Vec::new();
        for (n, block) in self.blocks.iter().enumerate() {
            // Computing takes long, so the manager waits for as long as answers may arrive.
            let recompute = Recompute { seconds_per_block: Some(1e6), deadline: None };
            let onboarded = manager.onboard(&[block.header.hash], recompute).await;
            for held in &onboarded.blocks {
                let mut bytes = vec![0; SIZE];
                device.read(held.slot(), &mut bytes);
                assert!(held.hash() == block.header.hash && bytes == block.payload, "{case}: wrong bytes served");
                served.push(n);
            }
        }
        Outcome { served, quarantined: Some(counter(&registry, "corrupt_blocks_total")) }
    }

    /// Damages a copy, and compares the outcome of a read with the expected one.
    async fn damage(&self, image: &TempDir, case: &str, damage: impl FnOnce(&Path), want: &Outcome) {
        let folder = copy(image.path());
        damage(folder.path());
        let case = format!("{:?}, {:?}: {case}", self.level, self.form);
        let found = self.read(folder.path(), &case).await;
        assert!(want.is(&found), "{case}: {found:?}, wanted {want:?}");
    }

    /// Flips the first bit and the last one of a region, one at a time.
    async fn flip(&self, image: &TempDir, file: &Path, region: &str, range: Range<usize>, want: &Outcome) {
        for (at, bit) in [(range.start, 1), (range.end - 1, 0x80)] {
            let case = format!("{region}, byte {at}");
            self.damage(image, &case, |folder| change(&folder.join(file), |bytes| bytes[at] ^= bit), want).await;
        }
    }

    fn files(&self, under: &str) -> Vec<PathBuf> {
        files(self.whole.path(), under)
    }

    /// The file that contains a block, and the range of its header and payload there.
    fn place(&self, block: usize) -> (PathBuf, Range<usize>) {
        let header = self.blocks[block].header;
        for file in self.files(if self.level == Level::G3 { "" } else { "blocks" }) {
            let bytes = fs::read(self.whole.path().join(&file)).unwrap();
            let start = [&b"BLKYARD2"[..], header.hash.as_bytes()].concat();
            if let Some(at) = bytes.windows(start.len()).position(|window| window == start) {
                let header = Header::decode(bytes[at..].first_chunk().unwrap()).unwrap();
                let body = at + if self.level == Level::G3 { SECTOR } else { Header::LEN };
                return (file, at..body + header.length as usize);
            }
        }
        panic!("block {block} is in no file");
    }
}

fn disk(folder: &Path, log: Arc<EventLog>) -> Arc<DiskTier> {
    let settings = disk::Settings { capacity_bytes: 64 << 20, segment_bytes: 128 << 10, min_free_bytes: 0 };
    DiskTier::open(folder, settings, log).unwrap()
}

/// The number of damaged records that opening the folder finds.
fn found_damaged(folder: &Path) -> u64 {
    disk(folder, Arc::new(EventLog::new(Epoch(1)))).corrupt_ranges()
}

fn wrap(form: Form, tier: Arc<dyn Tier>, keys: &Arc<Keyring>, metrics: &Metrics) -> Arc<dyn Tier> {
    let secret = |tier| encrypted(tier, keys.clone(), metrics.clone());
    match form {
        Form::Plain => tier,
        Form::Encoded => encoded(tier, Mode::Smaller, metrics.clone()),
        Form::Encrypted => secret(tier),
        Form::Both => encoded(secret(tier), Mode::Smaller, metrics.clone()),
    }
}

fn metrics() -> Metrics {
    Metrics::new(&Registry::new()).unwrap()
}

fn counter(registry: &Registry, name: &str) -> u64 {
    let families = registry.gather();
    let family = families.iter().filter(|family| family.name() == format!("blockyard_tier_{name}"));
    family
        .flat_map(prometheus::proto::MetricFamily::get_metric)
        .map(|metric| metric.get_counter().get_value() as u64)
        .sum()
}

/// Every file below a folder, by relative path, in order.
fn files(folder: &Path, under: &str) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut folders = vec![folder.join(under)];
    while let Some(next) = folders.pop() {
        for entry in fs::read_dir(next).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() { folders.push(path) } else { found.push(path.strip_prefix(folder).unwrap().to_owned()) }
        }
    }
    found.sort();
    found
}

fn copy(folder: &Path) -> TempDir {
    let copy = tempfile::tempdir().unwrap();
    for file in files(folder, "") {
        let to = copy.path().join(&file);
        fs::create_dir_all(to.parent().unwrap()).unwrap();
        fs::copy(folder.join(file), to).unwrap();
    }
    copy
}

fn change(file: &Path, change: impl FnOnce(&mut Vec<u8>)) {
    let mut bytes = fs::read(file).unwrap();
    change(&mut bytes);
    fs::write(file, bytes).unwrap();
}

/// Exchanges two ranges of the same length.
fn exchange(bytes: &mut [u8], one: &Range<usize>, other: &Range<usize>) {
    let first = bytes[one.clone()].to_vec();
    bytes.copy_within(other.clone(), one.start);
    bytes[other.clone()].copy_from_slice(&first);
}

async fn harnesses(level: Level) -> Vec<Harness> {
    let mut harnesses = Vec::new();
    for form in FORMS {
        harnesses.push(Harness::new(level, form).await);
    }
    // From here on no deadline depends on the load of the machine.
    tokio::time::pause();
    for harness in &harnesses {
        // The read also seals segments that the first process left open.
        assert!(Outcome::undamaged().is(&harness.read(harness.whole.path(), "whole").await));
    }
    harnesses
}

/// The regions of a stored block: the header's fields, and the payload's start, middle and end.
fn regions(level: Level, record: &Range<usize>) -> Vec<(String, Range<usize>)> {
    let start = record.start;
    let body = start + if level == Level::G3 { SECTOR } else { Header::LEN };
    let field =
        |(name, range): &(&str, Range<usize>)| (format!("header, {name}"), start + range.start..start + range.end);
    let mut regions: Vec<_> = HEADER.iter().map(field).collect();
    regions.push(("header, checksum".into(), start + CHECKSUM.start..start + CHECKSUM.end));
    let middle = usize::midpoint(body, record.end);
    for (name, range) in
        [("start", body..body + 32), ("middle", middle..middle + 8), ("end", record.end - 32..record.end)]
    {
        regions.push((format!("payload, {name}"), range));
    }
    regions
}

async fn damage_block_regions_at(level: Level) {
    for harness in harnesses(level).await {
        let (file, record) = harness.place(DAMAGED);
        if level == Level::G3 {
            assert_eq!(found_damaged(copy(harness.killed.path()).path()), 0, "killed, and sound");
        }
        for (region, range) in regions(level, &record) {
            harness.flip(&harness.whole, &file, &region, range.clone(), &Outcome::quarantined(&[DAMAGED])).await;
            if level == Level::G3 {
                // Without a footer the segment is scanned, and damaged records are counted there.
                let folder = copy(harness.killed.path());
                change(&folder.path().join(&file), |bytes| bytes[range.start] ^= 4);
                assert_eq!(found_damaged(folder.path()), 1, "{region}");
                let region = format!("open segment, {region}");
                harness.flip(&harness.killed, &file, &region, range, &Outcome::without(&[DAMAGED], 0)).await;
            }
        }
    }
}

#[tokio::test]
async fn damage_to_each_region_of_a_block_on_disk() {
    damage_block_regions_at(Level::G3).await;
}

#[tokio::test]
async fn damage_to_each_region_of_a_block_in_an_object() {
    damage_block_regions_at(Level::G4).await;
}

/// A footer repeats what a scan finds: a damaged one costs a scan.
#[tokio::test]
async fn damage_to_a_footer_loses_no_block() {
    for harness in harnesses(Level::G3).await {
        let (file, _) = harness.place(DAMAGED);
        let bytes = fs::read(harness.whole.path().join(&file)).unwrap();
        let end = bytes.len();
        let word = |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap());
        let footer = word(end - 24) as usize;
        let entry = footer + DAMAGED * ENTRY;
        let entries = FOOTER_ENTRY.map(|(name, range)| (name, entry + range.start..entry + range.end));
        let owner = footer + BLOCKS * ENTRY;
        let owner = [("fingerprint", owner..owner + 32), ("domain", owner + 32..owner + 48)];
        let trailer = FOOTER_TRAILER.map(|(name, from, to)| (name, end - from..end - to));
        for (region, range) in entries.into_iter().chain(owner).chain(trailer) {
            harness.flip(&harness.whole, &file, &format!("footer, {region}"), range, &Outcome::undamaged()).await;
        }
    }
}

/// A manifest with damage is ignored as a whole, and its blocks cannot be found without it.
#[tokio::test]
async fn damage_to_a_manifest_loses_its_blocks() {
    for harness in harnesses(Level::G4).await {
        let file = harness.files("manifests").remove(0);
        let end = fs::metadata(harness.whole.path().join(&file)).unwrap().len() as usize;
        let entry = 88 + DAMAGED * ENTRY;
        let entries = MANIFEST_ENTRY.map(|(name, range)| (name, entry + range.start..entry + range.end));
        for (region, range) in MANIFEST_HEAD.into_iter().chain(entries).chain([("checksum", end - 8..end)]) {
            let want = Outcome::without(&[0, 1, 2], 0);
            harness.flip(&harness.whole, &file, &format!("manifest, {region}"), range, &want).await;
        }
    }
}

async fn swaps_and_truncations_at(level: Level) {
    for harness in harnesses(level).await {
        let ((file, one), (_, other)) = (harness.place(0), harness.place(1));
        if one.len() == other.len() {
            let swap = |folder: &Path| change(&folder.join(&file), |bytes| exchange(bytes, &one, &other));
            harness.damage(&harness.whole, "two blocks swapped", swap, &Outcome::quarantined(&[0, 1])).await;
        }
        for (cut, kept) in [(one.end, 1), (other.start + 64, 1), (other.end - 1, 1), (other.end, 2)] {
            let lost: Vec<usize> = (kept..if level == Level::G3 { BLOCKS } else { BATCH }).collect();
            let truncate = |folder: &Path| change(&folder.join(&file), |bytes| bytes.truncate(cut));
            harness.damage(&harness.whole, &format!("cut at {cut}"), truncate, &Outcome::without(&lost, 0)).await;
        }
    }
}

#[tokio::test]
async fn swapped_blocks_and_truncated_segments() {
    swaps_and_truncations_at(Level::G3).await;
}

#[tokio::test]
async fn swapped_blocks_and_truncated_objects() {
    swaps_and_truncations_at(Level::G4).await;
}

#[tokio::test]
async fn an_older_segment_in_place_of_a_newer_one() {
    for harness in harnesses(Level::G3).await {
        let (file, _) = harness.place(DAMAGED);
        let replay = |folder: &Path| fs::copy(harness.early.path().join(&file), folder.join(&file)).map(drop).unwrap();
        harness.damage(&harness.whole, "older segment", replay, &Outcome::without(&[3, 4, 5], 0)).await;
        // In a running process, whose index contains the newer blocks.
        let folder = copy(harness.whole.path());
        let tier = Harness::open(Level::G3, folder.path()).await;
        replay(folder.path());
        let case = format!("{:?}: older segment under a running process", harness.form);
        let found = harness.read_from(tier, &case).await;
        assert!(Outcome::quarantined(&[3, 4, 5]).is(&found), "{case}: {found:?}");
    }
}

#[tokio::test]
async fn an_older_object_or_manifest_in_place_of_a_newer_one() {
    for harness in harnesses(Level::G4).await {
        // Encoded blocks differ in length: some would lie beyond the end of the replaced file.
        let counted = |blocks| (harness.form != Form::Encoded).then_some(blocks);
        let unsound = Outcome { quarantined: counted(3), ..Outcome::quarantined(&[3, 4, 5]) };
        for (under, want) in [("manifests", Outcome::without(&[3, 4, 5], 0)), ("blocks", unsound)] {
            let files = harness.files(under);
            let (older, newer) = (&files[0], &files[1]);
            let replay = |folder: &Path| fs::copy(folder.join(older), folder.join(newer)).map(drop).unwrap();
            harness.damage(&harness.whole, &format!("older one of {under}"), replay, &want).await;
        }
        let objects = harness.files("blocks");
        let swap = |folder: &Path| {
            fs::rename(folder.join(&objects[0]), folder.join("aside")).unwrap();
            fs::rename(folder.join(&objects[1]), folder.join(&objects[0])).unwrap();
            fs::rename(folder.join("aside"), folder.join(&objects[1])).unwrap();
        };
        let nothing = Outcome { served: Vec::new(), quarantined: counted(BLOCKS as u64) };
        harness.damage(&harness.whole, "two objects swapped", swap, &nothing).await;
    }
}
