//! Several paths: blocks are striped over them, and a path that fails loses its own blocks only.

use super::*;
use crate::block::{Block, SequenceHash};

/// A payload length in bytes at which a store of a few megabytes reaches every path.
const BLOCK: usize = 60_000;

fn large() -> Settings {
    Settings { segment_bytes: 4 << 20, ..settings() }
}

struct Paths {
    folders: Vec<TempDir>,
    tier: Arc<DiskTier>,
    events: Arc<EventLog>,
}

impl Paths {
    fn new(count: usize, settings: Settings) -> Self {
        Self::over((0..count).map(|_| tempfile::tempdir().unwrap()).collect(), settings)
    }

    fn over(folders: Vec<TempDir>, settings: Settings) -> Self {
        let events = Arc::new(EventLog::new(Epoch(1)));
        let paths: Vec<_> = folders.iter().map(|folder| (folder.path().join("kv"), settings)).collect();
        let tier = DiskTier::striped(&paths, events.clone()).unwrap();
        Self { folders, tier, events }
    }

    fn reopen(self, settings: Settings) -> Self {
        let Self { folders, tier, .. } = self;
        drop(tier);
        Self::over(folders, settings)
    }

    fn folder(&self, path: usize) -> PathBuf {
        self.folders[path].path().join("kv")
    }

    /// Why the last write to each path failed.
    fn write_failures(&self) -> Vec<Option<String>> {
        self.tier.paths().into_iter().map(|path| path.write_failure).collect()
    }

    fn up(&self) -> Vec<bool> {
        self.tier.paths().iter().map(|path| path.failure.is_none()).collect()
    }

    /// The path of each block.
    fn paths_of(&self, blocks: &[Block]) -> Vec<u8> {
        let path_of = |block: &Block| self.tier.shared.index.get(fingerprint(), block.header.hash).unwrap().path;
        blocks.iter().map(path_of).collect()
    }

    fn on(&self, path: u8, blocks: &[Block]) -> Vec<Block> {
        let paths_of = self.paths_of(blocks);
        blocks.iter().zip(paths_of).filter(|(_, on)| *on == path).map(|(block, _)| block.clone()).collect()
    }

    async fn found(&self, blocks: &[Block]) -> usize {
        load(&*self.tier, fingerprint(), hashes(blocks)).await.iter().flatten().count()
    }

    /// Loads the blocks until all are found. The paused clock may advance faster than the threads that read, so a path
    /// may go down and be reopened once more.
    async fn until_all_found(&self, blocks: &[Block]) {
        for _ in 0..100 {
            if self.found(blocks).await == blocks.len() {
                return;
            }
            self.until(|paths| paths.up().iter().all(|up| *up)).await;
        }
        panic!("{} of {} blocks are found", self.found(blocks).await, blocks.len());
    }

    /// Waits for a condition. The clock is paused, but real threads do the work.
    async fn until(&self, what: impl Fn(&Self) -> bool) {
        for _ in 0..100_000 {
            if what(self) {
                return;
            }
            tokio::time::advance(Duration::from_millis(200)).await;
            // Opening and recovery run on threads, which a paused clock does not advance.
            thread::sleep(Duration::from_millis(1));
        }
        panic!("it did not happen");
    }
}

fn blocks(seed: u64, count: usize) -> Vec<Block> {
    chain_of(fingerprint(), seed, count, BLOCK)
}

conformance::suite!(async || {
    let Paths { folders, tier, events } = Paths::new(3, settings());
    Subject::with_resources(tier, events, folders)
});

mod with_one_path_that_takes_nothing {
    use super::*;

    conformance::suite!(async || {
        let Paths { folders, tier, events } = Paths::new(2, settings());
        tier.shared.hooks.fail_writes(1, libc::ENOSPC);
        Subject::with_resources(tier, events, folders)
    });
}

#[tokio::test]
async fn the_capacity_of_each_path_holds() {
    let capacity_bytes = 300_000;
    let Paths { folders, tier, events } = Paths::new(2, Settings { capacity_bytes, ..settings() });
    conformance::older_blocks_are_evicted_within_the_capacity(Subject::with_resources(tier, events, folders)).await;
}

#[tokio::test]
async fn a_prefix_is_striped_in_long_runs_and_survives_a_restart() {
    let paths = Paths::new(3, large());
    let prefix = blocks(1, 240);
    store(&*paths.tier, prefix.clone()).await;
    let paths_of = paths.paths_of(&prefix);
    let runs = 1 + paths_of.windows(2).filter(|pair| pair[0] != pair[1]).count();
    assert!((7..=9).contains(&runs), "fourteen megabytes in runs of two: {paths_of:?}");
    assert!((0..3).all(|path| paths.on(path, &prefix).len() >= 60), "{paths_of:?}");
    let before = announced(&paths.events, Level::G3);
    let paths = paths.reopen(large());
    assert_eq!(announced(&paths.events, Level::G3), before);
    assert_eq!(paths.found(&prefix).await, 240);
}

#[tokio::test(start_paused = true)]
async fn failed_reads_take_one_path_down_until_it_is_reopened() {
    let paths = Paths::new(3, large());
    let prefix = blocks(1, 320);
    store(&*paths.tier, prefix.clone()).await;
    let second = paths.on(1, &prefix);
    let before = announced(&paths.events, Level::G3);

    paths.tier.shared.hooks.fail_reads(1, libc::EIO);
    assert_eq!(paths.found(&prefix).await, prefix.len() - second.len(), "the others' blocks are found");
    paths.until(|paths| paths.up() == [true, false, true]).await;
    assert_eq!(announced(&paths.events, Level::G3).len(), prefix.len() - second.len(), "events withdraw them");
    let mut loading = paths.tier.load(fingerprint(), hashes(&second));
    while let Some((_, answer)) = loading.next().await {
        assert!(answer.unwrap().is_none(), "a miss, not an error");
    }

    let more = blocks(2, 80);
    store(&*paths.tier, more.clone()).await;
    assert!(!paths.paths_of(&more).contains(&1), "written to the others");
    // A block of the failed path is stored again on another one.
    store(&*paths.tier, second[..2].to_vec()).await;

    paths.tier.shared.hooks.fail_reads(1, 0);
    paths.until(|paths| paths.up() == [true; 3] && paths.tier.usage().blocks == 400).await;
    assert_eq!(paths.found(&prefix).await, 320);
    assert_eq!(paths.found(&more).await, 80);
    let after = announced(&paths.events, Level::G3);
    assert!(before.iter().all(|name| after.contains(name)), "published again, once");
    assert_eq!(
        paths.tier.paths().iter().map(|path| path.failures).collect::<Vec<_>>()[1],
        1,
        "one outage is one failure"
    );
}

#[tokio::test(start_paused = true)]
async fn a_device_that_does_not_answer_takes_one_path_down() {
    let paths = Paths::new(2, large());
    let (before, during) = (blocks(1, 160), blocks(2, 160));
    store(&*paths.tier, before.clone()).await;
    let hanging = paths.on(1, &before);
    let faults = paths.tier.shared.hooks.faults(1);
    faults.hold();
    let reading = {
        let tier = paths.tier.clone();
        let names = hashes(&hanging);
        tokio::spawn(async move { tier.load(fingerprint(), names).collect::<Vec<_>>().await })
    };
    let storing = {
        let tier = paths.tier.clone();
        let blocks = during.clone();
        tokio::spawn(async move { tier.store(blocks).await })
    };
    paths.until(|paths| paths.up() == [true, false]).await;
    let answers = reading.await.unwrap();
    assert!(
        answers.len() == hanging.len() && answers.iter().all(|(_, answer)| answer.is_err()),
        "no load waits for it"
    );
    let stored = storing.await.unwrap();
    assert!(stored.iter().all(Result::is_ok), "the other path accepts the blocks: {stored:?}");
    let failure = paths.tier.paths()[1].failure.clone().unwrap();
    assert!(failure.contains("did not answer for 1"), "{failure}");
    assert_eq!(paths.found(&before).await, before.len() - hanging.len());

    faults.release();
    paths.until(|paths| paths.up() == [true; 2] && paths.tier.usage().blocks == 320).await;
    paths.until_all_found(&[before, during].concat()).await;
}

#[tokio::test(start_paused = true)]
async fn a_panic_takes_its_path_down_until_it_is_reopened() {
    let panics: [fn(&Paths); 2] = [
        |paths| paths.tier.shared.hooks.faults(1).panic_once(),
        |paths| {
            let log_path = &paths.tier.log_paths[1];
            let log = paths.tier.logs().remove(1).unwrap();
            let poisoned = log_path.work(&log, |log| {
                let _state = log.lock();
                panic!("injected");
            });
            assert_eq!(poisoned, None);
        },
    ];
    for panic in panics {
        let paths = Paths::new(2, large());
        let (before, during, after) = (blocks(1, 160), blocks(2, 160), blocks(3, 160));
        store(&*paths.tier, before.clone()).await;
        panic(&paths);
        store(&*paths.tier, during.clone()).await;
        paths.until(|paths| paths.tier.paths()[1].failures == 1).await;
        paths.until(|paths| paths.up() == [true; 2] && paths.tier.usage().blocks == 320).await;
        store(&*paths.tier, after.clone()).await;
        assert!(!paths.on(1, &after).is_empty(), "it is written to again");
        paths.until_all_found(&[before, during, after].concat()).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_removed_folder_takes_its_path_down_without_io() {
    let paths = Paths::new(1, large());
    store(&*paths.tier, blocks(1, 4)).await;
    fs::remove_dir_all(paths.folder(0)).unwrap();
    paths.until(|paths| !paths.up()[0]).await;
    assert!(paths.tier.paths()[0].failure.as_ref().unwrap().contains("removed"), "the reason is named");
    let answer = paths.tier.store(blocks(2, 1)).await.remove(0).unwrap_err().to_string();
    assert!(answer.starts_with("tier is down: ") && answer.contains("removed"), "{answer}");
    assert_eq!(paths.found(&blocks(1, 4)).await, 0, "its blocks are misses");
}

#[tokio::test]
async fn a_pipe_instead_of_a_segment_does_not_block_the_start() {
    let folder = tempfile::tempdir().unwrap();
    let kv = folder.path().join("kv");
    fs::create_dir(&kv).unwrap();
    for name in ["0000000031.segment", "spare"] {
        let made = std::process::Command::new("mkfifo").arg(kv.join(name)).status().unwrap();
        assert!(made.success());
    }
    let paths = Paths::over(vec![folder], large());
    paths.tier.recovered().await;
    store(&*paths.tier, blocks(1, 4)).await;
    assert_eq!(paths.found(&blocks(1, 4)).await, 4);
}

#[tokio::test(start_paused = true)]
async fn a_path_that_is_down_has_the_reason_of_the_last_attempt() {
    let paths = Paths::new(1, large());
    store(&*paths.tier, blocks(1, 4)).await;
    let aside = paths.folders[0].path().join("aside");
    let has_reason = |paths: &Paths, reason: &str| {
        paths.tier.paths()[0].failure.as_ref().is_some_and(|failure| failure.contains(reason))
    };
    fs::rename(paths.folder(0), &aside).unwrap();
    paths.until(|paths| has_reason(paths, "the folder was removed or moved away")).await;
    // A file where the folder was.
    fs::write(paths.folder(0), "").unwrap();
    paths.until(|paths| has_reason(paths, "Not a directory")).await;
    fs::remove_file(paths.folder(0)).unwrap();
    fs::rename(&aside, paths.folder(0)).unwrap();
    paths.until(|paths| paths.up()[0]).await;
    assert_eq!(paths.tier.paths()[0].failures, 1);
}

#[tokio::test(start_paused = true)]
async fn a_moved_folder_is_detected_and_reopened() {
    let paths = Paths::new(2, large());
    let prefix = blocks(1, 80);
    store(&*paths.tier, prefix.clone()).await;
    let first = paths.on(0, &prefix).len();
    let aside = paths.folders[0].path().join("aside");
    fs::rename(paths.folder(0), &aside).unwrap();
    assert_eq!(paths.found(&prefix).await, prefix.len() - first);
    paths.until(|paths| paths.up() == [false, true]).await;
    assert!(!paths.folder(0).exists(), "it is not created again: below a removed mount is another disk");
    let more = blocks(2, 80);
    store(&*paths.tier, more.clone()).await;
    assert_eq!(paths.found(&more).await, 80);
    fs::rename(&aside, paths.folder(0)).unwrap();
    paths.until(|paths| paths.up() == [true; 2] && paths.tier.usage().blocks == 160).await;
    assert_eq!(paths.found(&[prefix, more].concat()).await, 160);
}

#[tokio::test]
async fn another_log_in_place_of_the_folder_is_not_touched() {
    let paths = Paths::new(1, settings());
    store(&*paths.tier, chain(1, 40)).await;
    let log = paths.tier.logs().remove(0).unwrap();
    let head =
        segment::Head::create(&log.folder, (1_000, 0), 64 << 10, log.access, &log.io, None, &log.used_bytes).unwrap();
    fs::rename(paths.folder(0), paths.folders[0].path().join("aside")).unwrap();
    let others = Paths::over(paths.folders, settings());
    store(&*others.tier, chain(2, 40)).await;
    fs::write(segment::path(&others.folder(0), 1_000), "theirs").unwrap();
    fs::write(others.folder(0).join("spare"), "theirs").unwrap();
    let files = || {
        let files = fs::read_dir(others.folder(0)).unwrap().map(|file| file.unwrap());
        files.map(|file| (file.file_name(), file.metadata().unwrap().len())).collect::<BTreeSet<_>>()
    };
    let before = files();
    drop(head);
    assert_eq!(files(), before, "an empty head deletes its own file");
    // More than what already has space in the head.
    let answers = paths.tier.store(chain(3, 100)).await;
    assert!(answers.iter().any(Result::is_err));
    assert_eq!(files(), before);
    assert_eq!(others.found(&chain(2, 40)).await, 40);
}

#[tokio::test(start_paused = true)]
async fn a_path_with_failing_writes_still_reads() {
    for code in [libc::EIO, libc::ENOSPC, libc::EROFS] {
        let paths = Paths::new(2, large());
        let before = blocks(1, 80);
        store(&*paths.tier, before.clone()).await;
        assert_eq!(paths.write_failures(), [None, None]);
        paths.tier.shared.hooks.fail_writes(0, code);
        let during = blocks(2, 80);
        let answers = paths.tier.store(during.clone()).await;
        assert!(answers.iter().all(Result::is_ok), "one path refuses, the other accepts: {answers:?}");
        assert!(!paths.paths_of(&during).contains(&0));
        assert_eq!(paths.up(), [true; 2]);
        let reason = io::Error::from_raw_os_error(code).to_string();
        assert_eq!(paths.write_failures(), [Some(reason), None], "an operator sees it");
        assert_eq!(paths.found(&[before.clone(), during.clone()].concat()).await, 160);

        paths.tier.shared.hooks.fail_writes(0, 0);
        tokio::time::advance(Duration::from_secs(2)).await;
        let after = blocks(3, 80);
        store(&*paths.tier, after.clone()).await;
        assert!(paths.paths_of(&after).contains(&0), "it is written to again");
        assert_eq!(paths.write_failures(), [None, None]);
        assert_eq!(paths.found(&[before, during, after].concat()).await, 240);
    }
}

#[tokio::test(start_paused = true)]
async fn a_path_that_creates_files_but_writes_no_block_is_failing() {
    let paths = Paths::new(1, large());
    paths.tier.shared.hooks.fail_data(0, libc::EIO);
    assert!(paths.tier.store(blocks(1, 4)).await.iter().all(Result::is_err));
    assert!(paths.write_failures()[0].as_ref().unwrap().contains("os error 5"), "{:?}", paths.write_failures());
    tokio::time::advance(Duration::from_secs(2)).await;
    assert!(paths.tier.store(blocks(2, 4)).await.iter().all(Result::is_err));
    assert!(paths.write_failures()[0].is_some(), "a new segment is no successful write");
    // A path that is down has one reason: that one.
    fs::remove_dir_all(paths.folder(0)).unwrap();
    paths.until(|paths| !paths.up()[0]).await;
    assert_eq!(paths.write_failures(), [None]);
}

#[tokio::test(start_paused = true)]
async fn a_path_that_is_missing_at_the_start_joins_later() {
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    // A file where the folder should be.
    fs::write(folders[1].path().join("kv"), "").unwrap();
    let paths = Paths::over(folders.into(), settings());
    assert_eq!(paths.up(), [true, false]);
    store(&*paths.tier, chain(1, 20)).await;
    fs::remove_file(paths.folder(1)).unwrap();
    paths.until(|paths| paths.up() == [true; 2]).await;
    assert_eq!(paths.found(&chain(1, 20)).await, 20);
    let events = Arc::new(EventLog::new(Epoch(1)));
    let nowhere = [("/dev/null/a".into(), settings()), ("/dev/null/b".into(), settings())];
    assert!(matches!(DiskTier::striped(&nowhere, events), Err(OpenError::Io { .. })), "no path at all is an error");
}

#[tokio::test]
async fn discard_removes_the_copies_on_every_path() {
    let Paths { folders, tier, .. } = Paths::new(2, settings());
    let blocks = chain(1, 10);
    store(&*tier, blocks.clone()).await;
    drop(tier);
    // The same blocks on the other path, as after an outage of the first.
    for file in fs::read_dir(folders[0].path().join("kv")).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), folders[1].path().join("kv").join(file.file_name())).unwrap();
    }
    let paths = Paths::over(folders, settings());
    assert_eq!(announced(&paths.events, Level::G3).len(), 10, "published once");
    let discarded: Vec<SequenceHash> = hashes(&blocks[..4]);
    for name in discarded {
        paths.tier.discard(fingerprint(), name);
    }
    idle(&paths.tier).await;
    let paths = paths.reopen(settings());
    assert_eq!(paths.tier.usage().blocks, 6);
    assert_eq!(paths.found(&blocks).await, 6);
}

#[tokio::test]
async fn the_newest_record_wins_whichever_path_has_it() {
    let mut paths = Paths::new(2, settings());
    let old = chain(1, 1).remove(0);
    let new = Block::new(old.header.hash, None, fingerprint(), bytes::Bytes::from_static(&[7; 5_000]));
    store(&*paths.tier, vec![old.clone()]).await;
    let first = paths.paths_of(std::slice::from_ref(&old))[0];
    // As a block that this process cannot decrypt.
    paths.tier.withdraw(fingerprint(), old.header.hash);
    assert_eq!(paths.tier.holds(fingerprint(), &[old.header.hash]), 0);
    paths.tier.shared.hooks.fail_writes(first, libc::EIO);
    store(&*paths.tier, vec![new.clone()]).await;
    assert_ne!(paths.paths_of(std::slice::from_ref(&new))[0], first);
    for _ in 0..8 {
        paths = paths.reopen(settings());
        let loaded = load(&*paths.tier, fingerprint(), vec![old.header.hash]).await;
        assert_eq!(loaded[0].as_ref().unwrap().payload(), new.payload);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn recovered_blocks_are_served_during_recovery() {
    let paths = Paths::new(2, settings());
    let old = chain(1, 200);
    store(&*paths.tier, old.clone()).await;
    let Paths { folders, tier, .. } = paths;
    drop(tier);
    let over: Vec<_> = folders.iter().map(|folder| (folder.path().join("kv"), settings())).collect();
    let tier =
        DiskTier::open_in_background(&over, &crate::tier::Quotas::default(), Arc::new(EventLog::new(Epoch(1))), None)
            .unwrap();
    // Stored at once, while the recovery may still run.
    store(&*tier, chain(2, 20)).await;
    tier.recovered().await;
    assert_eq!(tier.usage().blocks, 220);
    assert!(all(&load(&*tier, fingerprint(), hashes(&old)).await));
}

#[tokio::test]
async fn a_block_stored_twice_concurrently_is_written_once() {
    let folder = tempfile::tempdir().unwrap();
    let (tier, _) = open(folder.path());
    let blocks = chain(1, 20);
    let (first, second) = tokio::join!(tier.store(blocks.clone()), tier.store(blocks.clone()));
    assert!(first.iter().chain(&second).all(Result::is_ok));
    drop(tier);
    let written: usize = segment::numbers(folder.path())
        .unwrap()
        .into_iter()
        .map(|number| {
            let bytes = fs::read(segment::path(folder.path(), number)).unwrap();
            bytes.chunks(512).filter(|chunk| chunk.starts_with(b"BLKYARD")).count()
        })
        .sum();
    assert_eq!(written, 20);
}
