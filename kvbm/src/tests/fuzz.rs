//! Inputs for fuzz tests of parsers of stored bytes, and a limit on the memory that a parser may allocate for them.
//!
//! The fuzz tests are beside their parsers. They run with the other tests, on arbitrary bytes, on changed valid ones,
//! and on the corpus. `PROPTEST_CASES=1000000` runs them for longer.

use crc_fast::{CrcAlgorithm, checksum};
use proptest::collection::vec;
use proptest::prelude::*;
use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::fs;
use std::path::Path;

/// Counts what each thread allocates.
struct Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

thread_local! {
    static ALLOCATED: Cell<u64> = const { Cell::new(0) };
}

fn count(bytes: usize) {
    // A thread that is ending may allocate, too.
    let _ = ALLOCATED.try_with(|allocated| allocated.set(allocated.get() + bytes as u64));
}

// SAFETY: every call goes to the system's allocator, which keeps the contract; counting allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size());
        // SAFETY: the caller keeps the contract of `alloc_zeroed`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count(size);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(at, layout, size) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(at, layout) }
    }
}

/// Runs `work`, and returns the number of bytes that this thread allocates meanwhile, freed ones included.
pub(crate) fn allocated<T>(work: impl FnOnce() -> T) -> (T, u64) {
    let before = ALLOCATED.get();
    let done = work();
    (done, ALLOCATED.get() - before)
}

/// Parses `bytes`. Panics if that allocates more than `factor` times their length plus 16 KiB.
pub(crate) fn bounded<T>(bytes: &[u8], factor: u64, parse: impl FnOnce(&[u8]) -> T) -> T {
    let (parsed, allocated) = allocated(|| parse(bytes));
    let most = factor * bytes.len() as u64 + (16 << 10);
    assert!(allocated <= most, "{allocated} bytes allocated for an input of {}", bytes.len());
    parsed
}

/// Up to 4 KiB of arbitrary bytes.
pub(crate) fn arbitrary() -> impl Strategy<Value = Vec<u8>> {
    vec(any::<u8>(), 0..4096)
}

/// Arbitrary bytes, changed valid ones, and both with a valid checksum, so that they reach further into the parser.
pub(crate) fn inputs(valid: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    let magic = valid[..8].to_vec();
    let headed = arbitrary().prop_map(move |rest| [magic.clone(), rest].concat());
    prop_oneof![
        1 => arbitrary(),
        1 => changed(valid.clone()),
        4 => changed(valid).prop_map(summed),
        2 => headed.prop_map(summed),
    ]
}

/// Replaces the last eight bytes by the checksum of the others.
pub(crate) fn summed(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(body) = bytes.len().checked_sub(8) {
        let sum = checksum(CrcAlgorithm::Crc64Nvme, &bytes[..body]);
        bytes[body..].copy_from_slice(&sum.to_le_bytes());
    }
    bytes
}

/// A change to valid bytes.
#[derive(Clone, Debug)]
enum Change {
    Flip(prop::sample::Index, u8),
    Half(prop::sample::Index, u32),
    Word(prop::sample::Index, u64),
    Cut(prop::sample::Index),
    Grow(u16, u8),
    Repeat(prop::sample::Index, u8),
}

fn change() -> impl Strategy<Value = Change> {
    let at = any::<prop::sample::Index>;
    let extremes = |most: u64| prop_oneof![Just(0), Just(1), Just(most / 2), Just(most - 1), Just(most), 0..=most];
    prop_oneof![
        (at(), 0..8u8).prop_map(|(at, bit)| Change::Flip(at, bit)),
        (at(), extremes(u32::MAX.into())).prop_map(|(at, value)| Change::Half(at, value as u32)),
        (at(), extremes(u64::MAX)).prop_map(|(at, value)| Change::Word(at, value)),
        at().prop_map(Change::Cut),
        (0..2048u16, any::<u8>()).prop_map(|(more, byte)| Change::Grow(more, byte)),
        (at(), any::<u8>()).prop_map(|(at, length)| Change::Repeat(at, length)),
    ]
}

/// Valid bytes with some changes; lengths and counts are often set to extremes.
pub(crate) fn changed(valid: Vec<u8>) -> impl Strategy<Value = Vec<u8>> {
    vec(change(), 1..6).prop_map(move |changes| {
        let mut bytes = valid.clone();
        for change in changes {
            apply(&mut bytes, &change);
        }
        bytes
    })
}

fn apply(bytes: &mut Vec<u8>, change: &Change) {
    let length = bytes.len();
    if length == 0 {
        return;
    }
    let mut put = |at: usize, value: &[u8]| {
        let end = (at + value.len()).min(length);
        bytes[at..end].copy_from_slice(&value[..end - at]);
    };
    match change {
        Change::Flip(at, bit) => bytes[at.index(length)] ^= 1 << bit,
        // Fields are aligned to four bytes.
        Change::Half(at, value) => put(at.index(length) & !3, &value.to_le_bytes()),
        Change::Word(at, value) => put(at.index(length) & !3, &value.to_le_bytes()),
        Change::Cut(at) => bytes.truncate(at.index(length)),
        Change::Grow(more, byte) => bytes.resize(length + usize::from(*more), *byte),
        Change::Repeat(at, some) => {
            let at = at.index(length);
            let part = bytes[at..(at + usize::from(*some)).min(length)].to_vec();
            bytes.splice(at..at, part);
        }
    }
}

/// The corpus: inputs that once broke a parser, and others that reach far into one.
pub(crate) fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src/tests/corpus");
    let mut inputs: Vec<_> = fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "bin"))
        .map(|path| (path.file_stem().unwrap().to_string_lossy().into_owned(), fs::read(&path).unwrap()))
        .collect();
    inputs.sort();
    assert!(!inputs.is_empty());
    inputs
}

/// Fails when an input is not in the corpus. Adds it when `BLOCKYARD_WRITE_CORPUS` is set.
pub(crate) fn in_corpus(name: &str, bytes: &[u8]) {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("src/tests/corpus/{name}.bin"));
    if std::env::var_os("BLOCKYARD_WRITE_CORPUS").is_some() {
        fs::write(&path, bytes).unwrap();
    }
    assert!(fs::read(&path).is_ok_and(|found| found == bytes), "{name}: not in the corpus as it is made");
}
