//! Blocks that a tier offers as they arrive are written at once.

use super::*;
use crate::tier::{BlockReceiver, PieceReceiver};
use futures::future;
use std::sync::atomic::AtomicUsize;

/// Device memory that is plain memory, and the time that a write takes.
struct Plain(Arc<InMemory>, Duration);

impl DeviceBlocks for Plain {
    fn capacity(&self) -> usize {
        self.0.capacity()
    }
    fn block_bytes(&self) -> usize {
        self.0.block_bytes()
    }
    fn fingerprint(&self) -> Fingerprint {
        self.0.fingerprint()
    }
    fn read(&self, slot: BlockId, into: &mut [u8]) {
        self.0.read(slot, into);
    }
    fn write(&self, slot: BlockId, from: &[u8]) {
        std::thread::sleep(self.1);
        self.0.write(slot, from);
    }
    fn write_part(&self, slot: BlockId, at: usize, from: &[u8], observe: &mut dyn FnMut(&[u8])) -> bool {
        self.0.write_part(slot, at, from, observe)
    }
    fn bytes(&self, slot: BlockId) -> Option<&[u8]> {
        let mut bytes = vec![0; self.block_bytes()];
        self.read(slot, &mut bytes);
        Some(bytes.leak())
    }
}

/// A manager without lower tiers.
pub(super) fn harness(slots: usize, is_plain: bool) -> Harness {
    harness_with(slots, |device| if is_plain { Arc::new(Plain(device, Duration::ZERO)) } else { device })
}

fn harness_with(slots: usize, memory: impl FnOnce(Arc<InMemory>) -> Arc<dyn DeviceBlocks>) -> Harness {
    let (log, registry) = (log(), Registry::new());
    let device = InMemory::new(slots, SIZE, fingerprint());
    let memory = memory(device.clone());
    let metrics = Metrics::new(&registry).unwrap();
    let manager = BlockManager::new(memory, None, vec![], log.clone(), metrics);
    Harness { device, manager, host: None, log, registry }
}

/// Offers each block to the receiver.
struct Offering {
    tier: Arc<dyn Tier>,
    taken: Arc<AtomicUsize>,
}

impl Tier for Offering {
    delegate!(tier: level, holds, load, store, discard, withdraw, expire_one, expire, usage);

    fn load_into(
        &self,
        fingerprint: Fingerprint,
        hashes: Vec<SequenceHash>,
        receiver: Arc<dyn BlockReceiver>,
    ) -> BoxStream<'static, Loaded> {
        let taken = Arc::clone(&self.taken);
        let offer = move |(index, loaded): Loaded| {
            let Ok(Some(block)) = loaded else { return Some((index, loaded)) };
            let left = receiver.take(index, block);
            taken.fetch_add(usize::from(left.is_none()), Ordering::Relaxed);
            left.map(|block| (index, Ok(Some(block))))
        };
        self.load(fingerprint, hashes).filter_map(move |loaded| future::ready(offer(loaded))).boxed()
    }
}

/// A tier with eight blocks and faults, as one that offers them, and the number of blocks that are taken.
pub(super) async fn offering(faults: Faults) -> (Arc<dyn Tier>, Arc<AtomicUsize>) {
    let filled = placed(Level::Peer, 0, 1);
    filled.fill(0..8).await;
    let (tier, taken) = (Arc::new(Faulty::new(filled, 1, faults)), Arc::default());
    (Arc::new(Offering { tier, taken: Arc::clone(&taken) }), taken)
}

#[tokio::test(start_paused = true)]
async fn blocks_are_written_as_they_arrive_where_device_memory_is_plain() {
    for (is_plain, expected) in [(true, 8), (false, 0)] {
        let (harness, (peer, taken)) = (harness(32, is_plain), offering(Faults::default()).await);
        let onboarded = harness.manager.onboard_from(&peer, &hashes(10), ms(1000), &UNTRACED).await;
        assert_eq!(onboarded.from, [(Level::Peer, 8)]);
        harness.assert_sound(&onboarded.blocks);
        assert_eq!(taken.load(Ordering::Relaxed), expected, "plain memory: {is_plain}");
        assert_eq!(harness.manager.speeds()[0].level, Level::Peer, "its speed is measured");
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_that_is_corrupt_when_it_arrives_is_not_registered() {
    for faults in [
        Faults { corrupt: 1.0, ..Faults::default() },
        Faults { short: 1.0, ..Faults::default() },
        Faults { wrong: 1.0, ..Faults::default() },
    ] {
        let (harness, (peer, taken)) = (harness(32, true), offering(faults).await);
        let onboarded = harness.manager.onboard_from(&peer, &hashes(8), ms(1000), &UNTRACED).await;
        assert!(onboarded.blocks.is_empty());
        // The engine computes from the first one on, and the load ends.
        assert!(taken.load(Ordering::Relaxed) > 0);
        assert!(harness.counter("corrupt_blocks_total", Level::Peer) > 0);
        drop(onboarded);
        assert!(harness.manager.allocate(32).is_some(), "their slots are free");
    }
}

/// Offers each block in pieces of 300 bytes, of which so many are passed on.
struct OfferingPieces {
    tier: Arc<dyn Tier>,
    pieces: usize,
    taken: Arc<AtomicUsize>,
}

impl Tier for OfferingPieces {
    delegate!(tier: level, holds, load, store, discard, withdraw, expire_one, expire, usage);

    fn load_into(
        &self,
        fingerprint: Fingerprint,
        hashes: Vec<SequenceHash>,
        receiver: Arc<dyn BlockReceiver>,
    ) -> BoxStream<'static, Loaded> {
        let (taken, pieces) = (Arc::clone(&self.taken), self.pieces);
        let offer = move |(index, loaded): Loaded| {
            let Ok(Some(block)) = loaded else { return Some((index, loaded)) };
            let Some(mut writer) = receiver.begin(index, &block.header) else { return Some((index, Ok(Some(block)))) };
            assert!(block.payload.chunks(300).take(pieces).all(|piece| writer.write(piece)));
            if pieces * 300 < block.payload.len() {
                let error = std::io::ErrorKind::UnexpectedEof.into();
                return Some((index, Err(crate::tier::LoadError::Io(error))));
            }
            writer.end();
            taken.fetch_add(1, Ordering::Relaxed);
            None
        };
        self.load(fingerprint, hashes).filter_map(move |loaded| future::ready(offer(loaded))).boxed()
    }
}

/// A tier with eight blocks and faults, which offers so many pieces of each, and the number of blocks that are taken.
pub(super) async fn offering_pieces(faults: Faults, pieces: usize) -> (Arc<dyn Tier>, Arc<AtomicUsize>) {
    let filled = placed(Level::Peer, 0, 1);
    filled.fill(0..8).await;
    let (tier, taken) = (Arc::new(Faulty::new(filled, 1, faults)), Arc::default());
    (Arc::new(OfferingPieces { tier, pieces, taken: Arc::clone(&taken) }), taken)
}

#[tokio::test(start_paused = true)]
async fn a_block_in_pieces_is_written_as_they_arrive() {
    for (is_plain, expected) in [(true, 8), (false, 0)] {
        let (harness, (peer, taken)) = (harness(32, is_plain), offering_pieces(Faults::default(), 4).await);
        let onboarded = harness.manager.onboard_from(&peer, &hashes(10), ms(1000), &UNTRACED).await;
        assert_eq!(onboarded.from, [(Level::Peer, 8)]);
        harness.assert_sound(&onboarded.blocks);
        assert_eq!(taken.load(Ordering::Relaxed), expected, "plain memory: {is_plain}");
        // The checksum that it arrived with is noted.
        let served: Vec<Loaded> = harness.manager.peer().load(fingerprint(), hashes(8)).collect().await;
        for (index, block) in served {
            assert_eq!(block.unwrap().unwrap().check(hash(index), fingerprint()), Ok(()));
        }
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_in_pieces_that_is_corrupt_is_not_registered() {
    for faults in [Faults { corrupt: 1.0, ..Faults::default() }, Faults { wrong: 1.0, ..Faults::default() }] {
        let (harness, (peer, _)) = (harness(32, true), offering_pieces(faults, 4).await);
        let onboarded = harness.manager.onboard_from(&peer, &hashes(8), ms(1000), &UNTRACED).await;
        assert!(onboarded.blocks.is_empty());
        assert!(harness.counter("corrupt_blocks_total", Level::Peer) > 0);
        drop(onboarded);
        assert!(harness.manager.allocate(32).is_some(), "their slots are free");
    }
}

#[tokio::test(start_paused = true)]
async fn a_block_that_ends_in_the_middle_of_its_pieces_is_not_registered() {
    let (harness, (peer, _)) = (harness(32, true), offering_pieces(Faults::default(), 2).await);
    let onboarded = harness.manager.onboard_from(&peer, &hashes(8), ms(1000), &UNTRACED).await;
    assert!(onboarded.blocks.is_empty());
    drop(onboarded);
    assert!(harness.manager.allocate(32).is_some(), "their slots are free");
}

/// Offers the first piece of a block, and keeps its receiver.
struct Stalling {
    tier: Arc<dyn Tier>,
    begun: Arc<Mutex<Vec<Box<dyn PieceReceiver>>>>,
}

impl Tier for Stalling {
    delegate!(tier: level, holds, load, store, discard, withdraw, expire_one, expire, usage);

    fn load_into(
        &self,
        fingerprint: Fingerprint,
        hashes: Vec<SequenceHash>,
        receiver: Arc<dyn BlockReceiver>,
    ) -> BoxStream<'static, Loaded> {
        let begun = Arc::clone(&self.begun);
        let offer = move |(index, loaded): Loaded| {
            let Ok(Some(block)) = loaded else { return Some((index, loaded)) };
            let mut writer = receiver.begin(index, &block.header)?;
            assert!(writer.write(&block.payload[..300]));
            begun.lock().push(writer);
            None
        };
        self.load(fingerprint, hashes)
            .filter_map(move |loaded| future::ready(offer(loaded)))
            .chain(futures::stream::pending())
            .boxed()
    }
}

#[tokio::test(start_paused = true)]
async fn a_load_that_stops_frees_the_slots_of_blocks_that_are_still_arriving() {
    let filled = placed(Level::Peer, 0, 1);
    filled.fill(0..8).await;
    let begun = Arc::new(Mutex::new(Vec::new()));
    let (harness, peer) = (harness(16, true), Arc::new(Stalling { tier: filled, begun: Arc::clone(&begun) }));
    let onboarded = harness.manager.onboard_from(&(peer as Arc<dyn Tier>), &hashes(8), ms(10), &UNTRACED).await;
    assert!(onboarded.blocks.is_empty() && !begun.lock().is_empty());
    drop(onboarded);
    // The receivers are still there, as they are until their connection is closed.
    assert!(harness.manager.allocate(16).is_some(), "their slots are free");
    assert!(begun.lock().iter_mut().all(|writer| !writer.write(&[0; 300])), "nothing is written to them any more");
}

#[tokio::test(start_paused = true)]
async fn blocks_without_a_free_slot_are_not_taken() {
    let (harness, (peer, taken)) = (harness(4, true), offering(Faults::default()).await);
    let held = harness.compute(20..24);
    let onboarded = harness.manager.prefetch_from(&peer, &hashes(8), &UNTRACED).await;
    assert!(onboarded.blocks.is_empty());
    assert_eq!(taken.load(Ordering::Relaxed), 0);
    drop(held);
    let onboarded = harness.manager.prefetch_from(&peer, &hashes(4), &UNTRACED).await;
    assert_eq!(onboarded.from, [(Level::Peer, 4)]);
    harness.assert_sound(&onboarded.blocks);
}

/// Offers blocks on a thread of its own, one after the other.
struct OnThread {
    tier: Arc<dyn Tier>,
    /// Number of blocks that were requested.
    requested: Arc<AtomicUsize>,
}

impl Tier for OnThread {
    delegate!(tier: level, holds, load, store, discard, withdraw, expire_one, expire, usage);

    fn load_into(
        &self,
        fingerprint: Fingerprint,
        hashes: Vec<SequenceHash>,
        receiver: Arc<dyn BlockReceiver>,
    ) -> BoxStream<'static, Loaded> {
        self.requested.fetch_add(hashes.len(), Ordering::Relaxed);
        let blocks = self.load(fingerprint, hashes);
        let (sender, left) = futures::channel::mpsc::unbounded();
        tokio::spawn(async move {
            let blocks: Vec<Loaded> = blocks.collect().await;
            std::thread::spawn(move || {
                for (index, loaded) in blocks {
                    let left = match loaded {
                        Ok(Some(block)) => receiver.take(index, block).map(|block| Ok(Some(block))),
                        other => Some(other),
                    };
                    if let Some(left) = left
                        && sender.unbounded_send((index, left)).is_err()
                    {
                        return;
                    }
                }
            });
        });
        left.boxed()
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_counts_the_slots_of_blocks_that_are_being_written() {
    let filled = placed(Level::Peer, 0, 1);
    filled.fill(0..8).await;
    let requested = Arc::new(AtomicUsize::new(0));
    let peer: Arc<dyn Tier> = Arc::new(OnThread { tier: filled, requested: Arc::clone(&requested) });
    // A write takes longer than it takes until the plan is made again. All slots are needed.
    let harness = harness_with(8, |device| Arc::new(Plain(device, Duration::from_millis(150))));
    let onboarded = harness.manager.prefetch_from(&peer, &hashes(8), &UNTRACED).await;
    assert_eq!(onboarded.from, [(Level::Peer, 8)]);
    harness.assert_sound(&onboarded.blocks);
    assert_eq!(requested.load(Ordering::Relaxed), 8, "no block was requested twice");
}
