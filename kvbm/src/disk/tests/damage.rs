//! Corruption: whatever happens to the files, a load returns the stored block or a miss.

use super::*;
use crate::block::{Block, SequenceHash};
use crate::transform::crypt::{Environment, KeySource, Keyring, MetadataKeys};
use std::collections::BTreeMap;

/// A folder with sealed segments and one that was open when the process was killed, and the stored blocks.
async fn image() -> (TempDir, Vec<Block>) {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    let blocks: Vec<Block> = (0..3).flat_map(|seed| chain(seed, 12)).collect();
    store(&*tier, blocks.clone()).await;
    (crashed(folder.path()), blocks)
}

fn segments(folder: &Path) -> Vec<PathBuf> {
    segment::numbers(folder).unwrap().into_iter().map(|number| segment::path(folder, number)).collect()
}

/// Opens the folder and loads all blocks. Returns how many were found, each unchanged.
async fn survivors(folder: &Path, blocks: &[Block]) -> usize {
    let (tier, _) = open(folder);
    let stored: BTreeMap<SequenceHash, &Block> = blocks.iter().map(|block| (block.header.hash, block)).collect();
    let loaded = load(&*tier, fingerprint(), hashes(blocks)).await;
    for block in loaded.iter().flatten() {
        assert_eq!(block.payload(), stored[&block.header().hash].payload);
    }
    loaded.iter().flatten().count()
}

#[tokio::test]
async fn a_flipped_bit_costs_at_most_one_block() {
    let (folder, blocks) = image().await;
    flip_everywhere(&folder, &blocks).await;
    assert_eq!(survivors(folder.path(), &blocks).await, blocks.len(), "undamaged, and all segments sealed by now");
    flip_everywhere(&folder, &blocks).await;
}

async fn flip_everywhere(folder: &TempDir, blocks: &[Block]) {
    let (mut costs_nothing, mut costs_one) = (0, 0);
    for path in segments(folder.path()) {
        let sound = fs::read(&path).unwrap();
        // A prime stride visits headers, payloads, padding, footer and trailer; each of the last bytes is visited.
        let positions = (0..sound.len()).step_by(1543).chain(sound.len() - 64..sound.len());
        for (nth, at) in positions.enumerate() {
            let mut bad = sound.clone();
            bad[at] ^= 1 << (nth % 8);
            let copy = crashed(folder.path());
            fs::write(copy.path().join(path.file_name().unwrap()), &bad).unwrap();
            match blocks.len() - survivors(copy.path(), blocks).await {
                0 => costs_nothing += 1,
                1 => costs_one += 1,
                lost => panic!("{lost} blocks lost by byte {at} of {}", path.display()),
            }
        }
    }
    assert!(costs_nothing > 30 && costs_one > 30, "{costs_nothing} and {costs_one}");
}

#[tokio::test]
async fn only_a_written_footer_counts_as_corrupt() {
    let (folder, blocks) = image().await;
    assert_eq!(survivors(folder.path(), &blocks).await, blocks.len(), "all segments are sealed by now");
    let path = segments(folder.path()).remove(0);
    let sound = fs::read(&path).unwrap();
    let footers = async |bytes: &[u8]| {
        let copy = crashed(folder.path());
        fs::write(copy.path().join(path.file_name().unwrap()), bytes).unwrap();
        assert_eq!(survivors(copy.path(), &blocks).await, blocks.len());
        fs::write(copy.path().join(path.file_name().unwrap()), bytes).unwrap();
        let (tier, _) = open(copy.path());
        assert_eq!(tier.corrupt_ranges(), 0);
        tier.corrupt_footers()
    };
    let trailer = sound.len() - 32;
    for at in trailer..sound.len() {
        let mut bad = sound.clone();
        bad[at] ^= 1;
        assert_eq!(footers(&bad).await, 1, "byte {} of the trailer", at - trailer);
    }
    assert_eq!(footers(&sound[..trailer]).await, 1, "cut off");
    let begins = u64::from_le_bytes(sound[trailer + 8..trailer + 16].try_into().unwrap()) as usize;
    for written in [begins, begins + 7, begins + 200, sound.len()] {
        let mut died = sound.clone();
        died[written..].fill(0);
        died.resize(sound.len() + 8_192, 0);
        assert_eq!(footers(&died).await, 0, "{} bytes of the footer were written", written - begins);
    }
}

#[tokio::test]
async fn a_truncated_segment_keeps_the_blocks_before_the_cut() {
    let (folder, blocks) = image().await;
    for path in segments(folder.path()) {
        let sound = fs::read(&path).unwrap();
        let mut last = 0;
        for cut in (0..=sound.len()).step_by(1987) {
            let copy = crashed(folder.path());
            fs::write(copy.path().join(path.file_name().unwrap()), &sound[..cut]).unwrap();
            let found = survivors(copy.path(), &blocks).await;
            assert!(found >= last, "a longer file holds at least as much");
            last = found;
        }
        assert!(last > blocks.len() - 12);
    }
}

#[tokio::test]
async fn swapped_segments_yield_no_wrong_block() {
    let (folder, blocks) = image().await;
    survivors(folder.path(), &blocks).await;
    let paths = segments(folder.path());
    let (tier, _) = open(folder.path());
    // Done while the tier is open, so that its index has the old locations.
    fs::rename(&paths[0], folder.path().join("aside")).unwrap();
    fs::rename(&paths[1], &paths[0]).unwrap();
    fs::rename(folder.path().join("aside"), &paths[1]).unwrap();
    let loaded = load(&*tier, fingerprint(), hashes(&blocks)).await;
    for (loaded, block) in loaded.iter().zip(&blocks) {
        assert!(loaded.as_ref().is_none_or(|loaded| loaded.payload() == block.payload));
    }
    drop(tier);
    assert_eq!(survivors(folder.path(), &blocks).await, blocks.len(), "after reopening, each is found at its location");
}

#[tokio::test]
async fn an_invalid_record_is_reported_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, events) = open(folder.path());
    let blocks = chain(1, 3);
    store(&*tier, blocks.clone()).await;
    let path = &segments(folder.path())[0];
    let mut bad = fs::read(path).unwrap();
    bad[0] ^= 1;
    fs::write(path, bad).unwrap();
    let mut loading = tier.load(fingerprint(), hashes(&blocks));
    let mut corrupt = Vec::new();
    while let Some((index, answer)) = loading.next().await {
        if let Err(error) = answer {
            assert!(matches!(error, LoadError::Corrupt(_)));
            corrupt.push(index);
        }
    }
    assert_eq!(corrupt, [0]);
    assert_eq!(tier.holds(fingerprint(), &hashes(&blocks)), 0);
    assert_eq!(announced(&events, Level::G3).len(), 2);
}

#[tokio::test]
async fn a_missing_segment_is_noticed_by_the_first_read_and_loses_all_its_blocks() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, events) = open(folder.path());
    let blocks: Vec<Block> = (0..3).flat_map(|seed| chain(seed, 12)).collect();
    store(&*tier, blocks.clone()).await;
    let of = |number: u32| {
        let at = |block: &Block| tier.shared.index.get(fingerprint(), block.header.hash);
        let inside = |block: &&Block| at(block).is_some_and(|location| location.segment == number);
        blocks.iter().filter(inside).cloned().collect::<Vec<Block>>()
    };
    let numbers = segment::numbers(folder.path()).unwrap();
    let (sealed, head) = (numbers[0], *numbers.last().unwrap());
    assert!(sealed != head && !of(sealed).is_empty() && !of(head).is_empty());
    let mut left = blocks.len();
    for (missing, number) in [(1, sealed), (2, head)] {
        let (lost, used) = (of(number), tier.usage().bytes);
        fs::remove_file(segment::path(folder.path(), number)).unwrap();
        assert!(load(&*tier, fingerprint(), hashes(&lost[..1])).await[0].is_none());
        left -= lost.len();
        assert_eq!((tier.usage().blocks, tier.missing_segments()), (left as u64, missing));
        assert_eq!(announced(&events, Level::G3).len(), left, "the removal is announced");
        assert!(tier.usage().bytes < used);
        assert!(tier.paths()[0].failure.is_none());
    }
    // Its blocks can be stored again.
    store(&*tier, blocks.clone()).await;
    assert!(all(&load(&*tier, fingerprint(), hashes(&blocks)).await));
    assert_eq!(tier.missing_segments(), 2);
}

#[tokio::test]
async fn other_files_are_left_alone() {
    let (folder, blocks) = image().await;
    fs::write(folder.path().join("notes.txt"), "mine").unwrap();
    fs::write(folder.path().join("7.segment"), "not a segment").unwrap();
    for name in ["probe", "probe.0", "spare", "0000000009.segment"] {
        fs::create_dir(folder.path().join(name)).unwrap();
    }
    assert_eq!(survivors(folder.path(), &blocks).await, blocks.len());
    assert_eq!(fs::read(folder.path().join("notes.txt")).unwrap(), b"mine");
}

#[tokio::test]
async fn a_segment_of_garbage_counts_as_corrupt_and_an_unfinished_first_write_does_not() {
    let (folder, blocks) = image().await;
    let path = segments(folder.path()).remove(0);
    let sound = fs::read(&path).unwrap();
    let ranges = async |bytes: &[u8]| {
        let copy = crashed(folder.path());
        fs::write(copy.path().join(path.file_name().unwrap()), bytes).unwrap();
        let (tier, _) = open(copy.path());
        assert!(load(&*tier, fingerprint(), hashes(&blocks)).await.iter().any(Option::is_some), "other segments");
        (tier.corrupt_ranges(), copy.path().join(path.file_name().unwrap()).exists())
    };
    let garbage: Vec<u8> = (0..20_000_u32).map(|n| (n * 7 + n / 251) as u8 | 1).collect();
    assert_eq!(ranges(&garbage).await, (1, false));
    assert_eq!(ranges(&[&[0; 8_192], &garbage[..]].concat()).await, (1, false));
    // The header of the first block, and a part of its payload.
    assert_eq!(ranges(&[&sound[..1_024], &[0; 8_192][..]].concat()).await, (0, false));
    assert_eq!(ranges(&[0; 8_192]).await, (0, false));
    assert_eq!(ranges(&[]).await, (0, false));
}

/// The metadata keys of a process with this master key and its own key store.
async fn keys(master: &str) -> Arc<MetadataKeys> {
    let master = master.repeat(32);
    let environment: Environment = Arc::new(move |_| Some(master.clone()));
    let shelf = Arc::new(object_store::memory::InMemory::new());
    let keys = Keyring::open(shelf, "", KeySource::Env("KEYS".into()), environment).await.unwrap();
    MetadataKeys::open(keys).await.unwrap()
}

#[tokio::test]
async fn a_forged_footer_costs_a_scan_and_no_block() {
    let (folder, blocks) = image().await;
    survivors(folder.path(), &blocks).await;
    // Block length, number of entries, number of namespaces, and the footer's offset, each with a valid checksum.
    for (field, nth) in [("length", 36), ("entries", 16), ("owners", 20), ("start", 8)] {
        let copy = crashed(folder.path());
        for path in segments(copy.path()) {
            let mut bytes = fs::read(&path).unwrap();
            let trailer = bytes.len() - 32;
            let start = u64::from_le_bytes(bytes[trailer + 8..trailer + 16].try_into().unwrap()) as usize;
            match field {
                "length" => bytes[start + nth..start + nth + 4].fill(0xFF),
                "start" => bytes[trailer + nth..trailer + nth + 8].fill(0),
                _ => bytes[trailer + nth..trailer + nth + 4].fill(0xFF),
            }
            let footer = crate::tests::fuzz::summed(bytes.split_off(start));
            bytes.extend(footer);
            fs::write(&path, &bytes).unwrap();
        }
        let segments = segments(copy.path()).len() as u64;
        let (tier, _) = open(copy.path());
        let found = load(&*tier, fingerprint(), hashes(&blocks)).await.iter().flatten().count();
        assert_eq!((found, tier.corrupt_footers()), (blocks.len(), segments), "{field}");
    }
}

#[tokio::test]
async fn with_keys_invalid_footers_are_scanned_and_sealed() {
    let (folder, blocks) = image().await;
    let ours = keys("01").await;
    let opened = async |folder: &Path, keys: &Arc<MetadataKeys>| {
        let events = Arc::new(EventLog::new(Epoch(1)));
        let path = [(folder.to_owned(), settings())];
        let tier =
            DiskTier::open_in_background(&path, &crate::tier::Quotas::default(), events, Some(keys.clone())).unwrap();
        tier.recovered().await;
        let found = load(&*tier, fingerprint(), hashes(&blocks)).await.iter().flatten().count();
        (found, tier.corrupt_footers())
    };
    // Sealed segments of an earlier version, or from before blocks were encrypted.
    survivors(folder.path(), &blocks).await;
    let count = segments(folder.path()).len() as u64;
    assert_eq!(opened(folder.path(), &ours).await, (blocks.len(), 0), "scanned, and not corrupt");
    assert_eq!(opened(folder.path(), &ours).await, (blocks.len(), 0), "sealed now");
    assert_eq!(survivors(folder.path(), &blocks).await, blocks.len(), "without keys there is nothing to verify with");
    // A footer with a valid checksum that gives a wrong location for a block.
    for path in segments(folder.path()) {
        let mut bytes = fs::read(&path).unwrap();
        let trailer = bytes.len() - 32;
        let start = u64::from_le_bytes(bytes[trailer + 8..trailer + 16].try_into().unwrap()) as usize;
        bytes[start] ^= 1;
        let footer = crate::tests::fuzz::summed(bytes.split_off(start));
        bytes.extend(footer);
        fs::write(&path, &bytes).unwrap();
    }
    let forged = crashed(folder.path());
    assert_eq!(opened(forged.path(), &ours).await, (blocks.len(), count));
    assert_eq!(opened(folder.path(), &keys("02").await).await, (blocks.len(), 0), "another key: scanned");
}
