//! Damage to what rests, through the manager: each region of each file, in each form. Whatever happens, a block is the one
//! that was stored, or it is computed again; and what is served as damaged is counted.

use crate::block::{Block, Codec, Header, Level};
use crate::disk::DiskTier;
use crate::event::{Epoch, EventLog};
use crate::manager::{BlockManager, Recompute};
use crate::metrics::Metrics;
use crate::object::ObjectTier;
use crate::pool::DeviceBlocks;
use crate::pool::device::conformance::InMemory;
use crate::tier::Tier;
use crate::tier::conformance::{chain, fingerprint, names, store};
use crate::transform::codec::{Mode, encoded, synthetic};
use crate::transform::crypt::{KeySource, Keys, encrypted};
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

/// Two batches of three blocks: the first, and what came after it.
const BATCH: usize = 3;
const BLOCKS: usize = 2 * BATCH;
/// The block that is hurt, which has neighbours on both sides.
const VICTIM: usize = 1;
const SHAPE: synthetic::Shape = synthetic::Shape { layers: 1, tokens: 16, channels: 64 };
const SIZE: usize = 16 * 64 * 2 * 2;

/// The fields of a block's header, as `block.rs` lists them.
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

/// Those of an entry in a footer and in a manifest, which differ in their middle.
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

/// From the end of a footer: where a field begins, and where it ends.
const FOOTER_TRAILER: [(&str, usize, usize); 5] =
    [("magic", 32, 24), ("offset", 24, 16), ("entries", 16, 12), ("owners", 12, 8), ("checksum", 8, 0)];

/// Where a payload begins on a disk.
const SECTOR: usize = 512;

/// From the start of a manifest with one section.
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

/// What becomes of the blocks.
#[derive(Clone, Debug)]
struct Fate {
    /// Served, with the bytes that were stored.
    served: Vec<usize>,
    /// Found to be unsound and counted. As what is wanted: `None` for some of them, the others being misses.
    quarantined: Option<u64>,
}

impl Fate {
    fn unharmed() -> Self {
        Self::without(&[], 0)
    }

    fn without(gone: &[usize], quarantined: u64) -> Self {
        Self { served: (0..BLOCKS).filter(|n| !gone.contains(n)).collect(), quarantined: Some(quarantined) }
    }

    fn quarantined(gone: &[usize]) -> Self {
        Self::without(gone, gone.len() as u64)
    }

    fn is(&self, found: &Self) -> bool {
        let counted = match self.quarantined {
            Some(_) => self.quarantined == found.quarantined,
            None => found.quarantined > Some(0),
        };
        counted && self.served == found.served
    }
}

/// Some blocks, how they rest, and what they rest in.
struct World {
    level: Level,
    form: Form,
    keys: Arc<Keys>,
    blocks: Vec<Block>,
    /// As the process left it: orderly, killed, and killed after the first batch.
    whole: TempDir,
    killed: TempDir,
    early: TempDir,
}

impl World {
    async fn new(level: Level, form: Form) -> Self {
        let source = KeySource::Env("KEYS".into());
        let environment = Arc::new(|name: &str| (name == "KEYS").then(|| "01".repeat(32)));
        let keys = Keys::open(Arc::new(Shelf::new()), "keys", source, environment).await.unwrap();
        let payload = |seed| Bytes::from(synthetic::bf16(&synthetic::kv(seed, SHAPE)));
        let seal = |(n, block): (usize, Block)| {
            Block::seal(block.header.name, block.header.parent, fingerprint(), payload(n as u64))
        };
        let blocks: Vec<Block> = chain(7, BLOCKS).into_iter().enumerate().map(seal).collect();
        let whole = tempfile::tempdir().unwrap();
        let [early, killed] = {
            let tier = Self::open(level, whole.path()).await;
            let dressed = dress(form, tier.clone(), &keys, &metrics());
            store(&*dressed, blocks[..BATCH].to_vec()).await;
            let early = copy(whole.path());
            store(&*dressed, blocks[BATCH..].to_vec()).await;
            let codec = if matches!(form, Form::Plain | Form::Encrypted) { Codec::Raw } else { Codec::Bf16 };
            let encrypted = matches!(form, Form::Encrypted | Form::Both);
            let rests = tier.load(fingerprint(), names(&blocks)).next().await.unwrap().1.unwrap().unwrap().header;
            assert_eq!(
                (rests.codec, rests.key.is_some()),
                (codec, encrypted),
                "blocks rest in the form that is tested"
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
        let tier = ObjectTier::folder(folder, object::Settings::default(), log).unwrap();
        tier.caught_up().await;
        tier
    }

    /// Has a new process, with an empty memory, ask for each block: what comes is what was stored.
    async fn read(&self, folder: &Path, case: &str) -> Fate {
        self.ask(Self::open(self.level, folder).await, case).await
    }

    async fn ask(&self, tier: Arc<dyn Tier>, case: &str) -> Fate {
        let registry = Registry::new();
        let metrics = Metrics::new(&registry).unwrap();
        let device = InMemory::new(2 * BLOCKS, SIZE, fingerprint());
        let tier = dress(self.form, tier, &self.keys, &metrics);
        let log = Arc::new(EventLog::new(Epoch(1)));
        let manager = BlockManager::new(device.clone(), None, vec![tier], log, metrics);
        let mut served = Vec::new();
        for (n, block) in self.blocks.iter().enumerate() {
            // Computing would take for ever: it is waited for as long as anything can come.
            let recompute = Recompute { seconds_per_block: Some(1e6), by: None };
            let onboarded = manager.onboard(&[block.header.name], recompute).await;
            for held in &onboarded.blocks {
                let mut bytes = vec![0; SIZE];
                device.read(held.slot(), &mut bytes);
                assert!(held.name() == block.header.name && bytes == block.payload, "{case}: wrong bytes served");
                served.push(n);
            }
        }
        Fate { served, quarantined: Some(counter(&registry, "corrupt_blocks_total")) }
    }

    /// Hurts a copy, and holds what a new process makes of it against what it should.
    async fn hurt(&self, image: &TempDir, case: &str, hurt: impl FnOnce(&Path), want: &Fate) {
        let folder = copy(image.path());
        hurt(folder.path());
        let case = format!("{:?}, {:?}: {case}", self.level, self.form);
        let found = self.read(folder.path(), &case).await;
        assert!(want.is(&found), "{case}: {found:?}, wanted {want:?}");
    }

    /// Flips the first bit and the last one of a region, one at a time.
    async fn flip(&self, image: &TempDir, file: &Path, region: &str, range: Range<usize>, want: &Fate) {
        for (at, bit) in [(range.start, 1), (range.end - 1, 0x80)] {
            let case = format!("{region}, byte {at}");
            self.hurt(image, &case, |folder| change(&folder.join(file), |bytes| bytes[at] ^= bit), want).await;
        }
    }

    fn files(&self, under: &str) -> Vec<PathBuf> {
        files(self.whole.path(), under)
    }

    /// The file in which a block rests, and its place there: header and payload.
    fn place(&self, block: usize) -> (PathBuf, Range<usize>) {
        let header = self.blocks[block].header;
        for file in self.files(if self.level == Level::G3 { "" } else { "blocks" }) {
            let bytes = fs::read(self.whole.path().join(&file)).unwrap();
            let start = [&b"BLKYARD2"[..], header.name.as_bytes()].concat();
            if let Some(at) = bytes.windows(start.len()).position(|window| window == start) {
                let header = Header::decode(bytes[at..].first_chunk().unwrap()).unwrap();
                let body = at + if self.level == Level::G3 { SECTOR } else { Header::LEN };
                return (file, at..body + header.length as usize);
            }
        }
        panic!("block {block} rests nowhere");
    }
}

fn disk(folder: &Path, log: Arc<EventLog>) -> Arc<DiskTier> {
    let settings = disk::Settings { capacity_bytes: 64 << 20, segment_bytes: 128 << 10, min_free_bytes: 0 };
    DiskTier::open(folder, settings, log).unwrap()
}

/// How much damage a new process finds while it looks for what rests on disk.
fn found_damaged(folder: &Path) -> u64 {
    disk(folder, Arc::new(EventLog::new(Epoch(1)))).damaged()
}

fn dress(form: Form, tier: Arc<dyn Tier>, keys: &Arc<Keys>, metrics: &Metrics) -> Arc<dyn Tier> {
    let secret = |tier| encrypted(tier, keys.clone(), metrics.clone());
    match form {
        Form::Plain => tier,
        Form::Encoded => encoded(tier, Mode::Smaller),
        Form::Encrypted => secret(tier),
        Form::Both => encoded(secret(tier), Mode::Smaller),
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

/// Every file below a folder, by its path from there, in order.
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

/// Exchanges two stretches of the same length.
fn exchange(bytes: &mut [u8], one: &Range<usize>, other: &Range<usize>) {
    let first = bytes[one.clone()].to_vec();
    bytes.copy_within(other.clone(), one.start);
    bytes[other.clone()].copy_from_slice(&first);
}

async fn worlds(level: Level) -> Vec<World> {
    let mut worlds = Vec::new();
    for form in FORMS {
        worlds.push(World::new(level, form).await);
    }
    // From here on no deadline depends on how busy the machine is.
    tokio::time::pause();
    for world in &worlds {
        // Which also seals what the first process may have left open.
        assert!(Fate::unharmed().is(&world.read(world.whole.path(), "whole").await));
    }
    worlds
}

/// The regions of a block at rest: the header's fields, and the payload's start, middle and end.
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

async fn blocks_at(level: Level) {
    for world in worlds(level).await {
        let (file, record) = world.place(VICTIM);
        if level == Level::G3 {
            assert_eq!(found_damaged(copy(world.killed.path()).path()), 0, "killed, and sound");
        }
        for (region, range) in regions(level, &record) {
            world.flip(&world.whole, &file, &region, range.clone(), &Fate::quarantined(&[VICTIM])).await;
            if level == Level::G3 {
                // Without a footer the segment is scanned: what is not sound is counted there.
                let folder = copy(world.killed.path());
                change(&folder.path().join(&file), |bytes| bytes[range.start] ^= 4);
                assert_eq!(found_damaged(folder.path()), 1, "{region}");
                let region = format!("open segment, {region}");
                world.flip(&world.killed, &file, &region, range, &Fate::without(&[VICTIM], 0)).await;
            }
        }
    }
}

#[tokio::test]
async fn each_region_of_a_block_on_disk_in_each_form() {
    blocks_at(Level::G3).await;
}

#[tokio::test]
async fn each_region_of_a_block_in_an_object_in_each_form() {
    blocks_at(Level::G4).await;
}

/// A footer only says what can be found without it: a damaged one costs a scan.
#[tokio::test]
async fn each_region_of_a_footer_costs_nothing() {
    for world in worlds(Level::G3).await {
        let (file, _) = world.place(VICTIM);
        let bytes = fs::read(world.whole.path().join(&file)).unwrap();
        let (end, word) = (bytes.len(), |at: usize| u64::from_le_bytes(bytes[at..at + 8].try_into().unwrap()));
        let footer = word(end - 24) as usize;
        let entry = footer + VICTIM * ENTRY;
        let entries = FOOTER_ENTRY.map(|(name, range)| (name, entry + range.start..entry + range.end));
        let owner = footer + BLOCKS * ENTRY;
        let owner = [("fingerprint", owner..owner + 32), ("domain", owner + 32..owner + 48)];
        let trailer = FOOTER_TRAILER.map(|(name, from, to)| (name, end - from..end - to));
        for (region, range) in entries.into_iter().chain(owner).chain(trailer) {
            world.flip(&world.whole, &file, &format!("footer, {region}"), range, &Fate::unharmed()).await;
        }
    }
}

/// A manifest is believed whole or not at all, and what it names is not known without it.
#[tokio::test]
async fn each_region_of_a_manifest_costs_what_it_names() {
    for world in worlds(Level::G4).await {
        let file = world.files("manifests").remove(0);
        let end = fs::metadata(world.whole.path().join(&file)).unwrap().len() as usize;
        let entry = 88 + VICTIM * ENTRY;
        let entries = MANIFEST_ENTRY.map(|(name, range)| (name, entry + range.start..entry + range.end));
        for (region, range) in MANIFEST_HEAD.into_iter().chain(entries).chain([("checksum", end - 8..end)]) {
            let want = Fate::without(&[0, 1, 2], 0);
            world.flip(&world.whole, &file, &format!("manifest, {region}"), range, &want).await;
        }
    }
}

async fn places_and_ends_at(level: Level) {
    for world in worlds(level).await {
        let ((file, one), (_, other)) = (world.place(0), world.place(1));
        if one.len() == other.len() {
            let swap = |folder: &Path| change(&folder.join(&file), |bytes| exchange(bytes, &one, &other));
            world.hurt(&world.whole, "two blocks swapped", swap, &Fate::quarantined(&[0, 1])).await;
        }
        for (cut, kept) in [(one.end, 1), (other.start + 64, 1), (other.end - 1, 1), (other.end, 2)] {
            let gone: Vec<usize> = (kept..if level == Level::G3 { BLOCKS } else { BATCH }).collect();
            let truncate = |folder: &Path| change(&folder.join(&file), |bytes| bytes.truncate(cut));
            world.hurt(&world.whole, &format!("cut at {cut}"), truncate, &Fate::without(&gone, 0)).await;
        }
    }
}

#[tokio::test]
async fn blocks_on_disk_that_change_places_and_segments_that_end_early() {
    places_and_ends_at(Level::G3).await;
}

#[tokio::test]
async fn blocks_in_objects_that_change_places_and_objects_that_end_early() {
    places_and_ends_at(Level::G4).await;
}

#[tokio::test]
async fn an_older_segment_in_place_of_a_newer_one() {
    for world in worlds(Level::G3).await {
        let (file, _) = world.place(VICTIM);
        let replay = |folder: &Path| fs::copy(world.early.path().join(&file), folder.join(&file)).map(drop).unwrap();
        world.hurt(&world.whole, "older segment", replay, &Fate::without(&[3, 4, 5], 0)).await;
        // While the process runs, and believes that the newer blocks are there.
        let folder = copy(world.whole.path());
        let tier = World::open(Level::G3, folder.path()).await;
        replay(folder.path());
        let case = format!("{:?}: older segment under a running process", world.form);
        let found = world.ask(tier, &case).await;
        assert!(Fate::quarantined(&[3, 4, 5]).is(&found), "{case}: {found:?}");
    }
}

#[tokio::test]
async fn an_older_object_or_manifest_in_place_of_a_newer_one() {
    for world in worlds(Level::G4).await {
        // Encoded blocks differ in length: some lie beyond the end of what is there now.
        let counted = |blocks| (world.form != Form::Encoded).then_some(blocks);
        let unsound = Fate { quarantined: counted(3), ..Fate::quarantined(&[3, 4, 5]) };
        for (under, want) in [("manifests", Fate::without(&[3, 4, 5], 0)), ("blocks", unsound)] {
            let files = world.files(under);
            let (older, newer) = (&files[0], &files[1]);
            let replay = |folder: &Path| fs::copy(folder.join(older), folder.join(newer)).map(drop).unwrap();
            world.hurt(&world.whole, &format!("older one of {under}"), replay, &want).await;
        }
        let objects = world.files("blocks");
        let swap = |folder: &Path| {
            fs::rename(folder.join(&objects[0]), folder.join("aside")).unwrap();
            fs::rename(folder.join(&objects[1]), folder.join(&objects[0])).unwrap();
            fs::rename(folder.join("aside"), folder.join(&objects[1])).unwrap();
        };
        let nothing = Fate { served: Vec::new(), quarantined: counted(BLOCKS as u64) };
        world.hurt(&world.whole, "two objects swapped", swap, &nothing).await;
    }
}
