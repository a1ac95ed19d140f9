//! Memory of KV events, measured by a counting allocator: of decoding hostile payloads, and per known block.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use upstream::kv_events::{Batch, Chain, EngineHash, Event, Root, Stored, View};

struct Counting;

static LIVE: AtomicUsize = AtomicUsize::new(0);
static PEAK: AtomicUsize = AtomicUsize::new(0);
/// The tests of this file run one at a time.
static ONE_TEST: Mutex<()> = Mutex::new(());

// SAFETY: Both methods pass their arguments to the system's allocator.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        let live = LIVE.fetch_add(layout.size(), Relaxed) + layout.size();
        PEAK.fetch_max(live, Relaxed);
        // SAFETY: The caller's guarantees are those that the system's allocator needs.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        LIVE.fetch_sub(layout.size(), Relaxed);
        // SAFETY: `pointer` came from `alloc`, which calls the system's allocator.
        unsafe { System.dealloc(pointer, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Bytes allocated at the peak of `work` and still allocated after it, and its result.
fn measure<T>(work: impl FnOnce() -> T) -> (usize, usize, T) {
    let before = LIVE.load(Relaxed);
    PEAK.store(before, Relaxed);
    let result = work();
    (PEAK.load(Relaxed) - before, LIVE.load(Relaxed).saturating_sub(before), result)
}

fn payload(events: usize, event: &[u8]) -> Vec<u8> {
    let mut payload = vec![0x92, 1, 0xdd];
    payload.extend((events as u32).to_be_bytes());
    (0..events).for_each(|_| payload.extend(event));
    payload
}

#[test]
fn decoding_takes_a_small_multiple_of_the_input() {
    let _guard = ONE_TEST.lock();
    let stored = |rest: &[u8]| [&b"\x92\xabBlockStored"[..], rest].concat();
    let many = |head: &[u8], element: &[u8]| {
        let mut event = [head, &0x000f_4240_u32.to_be_bytes()].concat();
        (0..1_000_000).for_each(|_| event.extend(element));
        event
    };
    let extra = many(b"\x82\xa4type\xabBlockStored\xaaextra_keys\xdd", b"\x91\xa1a");
    let hostile = [
        ("hashes of one byte", payload(1, &stored(&many(b"\xdd", b"\x01")))),
        ("tokens of one byte", payload(1, &many(b"\x94\xabBlockStored\x90\xc0\xdd", b"\x01"))),
        ("empty events", payload(50_000, &stored(b"\x90"))),
        ("short extra keys", payload(1, &extra)),
        ("claimed elements", payload(50_000, &stored(b"\xdd\x00\x0a\x00\x00"))),
        ("claimed bytes", payload(50_000, &stored(b"\xc6\xff\xff\xff\xff"))),
    ];
    for (name, payload) in hostile {
        let (peak, ..) = measure(|| Batch::decode(&payload));
        let multiple = peak as f64 / payload.len() as f64;
        println!("{name}: {} bytes, peak {peak} bytes, {multiple:.1} times", payload.len());
        assert!(multiple <= 20.0, "{name}: {multiple:.1} times");
    }
}

/// As large as those of `cache_events`: a model's number with a chain value of 32 bytes, and with a hash of 16.
struct Sized;

impl Chain for Sized {
    type Key = (u32, [u32; 8]);
    type Hash = (u32, [u8; 16]);

    fn root(&self, _: Root<'_>) -> Option<Self::Key> {
        Some((0, [0; 8]))
    }

    fn child(&self, (model, parent): &Self::Key, tokens: &[u32]) -> Self::Key {
        let mut key = *parent;
        key[0] = key[0].wrapping_add(1);
        key[1] ^= tokens[0];
        (*model, key)
    }

    fn hash(&self, (model, key): &Self::Key) -> Self::Hash {
        (*model, std::array::from_fn(|at| (key[at / 4] >> (at % 4 * 8)) as u8))
    }
}

#[test]
fn a_known_block_takes_a_fixed_size() {
    let _guard = ONE_TEST.lock();
    assert_eq!(View::<Sized>::BYTES_PER_BLOCK, 72);
    // Just below and just above sizes at which the table and the array grow.
    for blocks in [114_000_u64, 115_000, 131_000, 132_000, 229_000] {
        let (peak, kept, view) = measure(|| {
            let (mut view, mut changes) = (View::new(Sized, 16, usize::MAX), Vec::new());
            for first in (0..blocks).step_by(1000) {
                let blocks = (first..first + 1000).map(EngineHash).collect();
                let stored = Stored { blocks, tokens: vec![first as u32; 16_000], block_size: 16, ..Stored::default() };
                view.apply(&Event::Stored(Box::new(stored)), &mut changes);
                changes.clear();
            }
            view
        });
        let per_block = kept as f64 / view.len() as f64;
        println!("{blocks} blocks: {per_block:.0} bytes per block, {:.0} at the peak", peak as f64 / blocks as f64);
        assert!(per_block < 72.0 * 2.0 + 17.0 * 16.0 / 7.0 + 8.0, "{per_block}");
    }
}
