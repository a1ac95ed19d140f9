//! One part of the index: blocks and their holders, in as little memory as a table of integers takes.
//!
//! A block with one holder is 12 bytes in the table: 8 of its name, 4 of its holder. With more holders, the 4 bytes point
//! into a list of [`Holders`] beside it. Both give memory back as they empty.

use super::holders::{Holders, Seat};
use std::collections::{HashMap, HashSet};
use std::hash::{BuildHasherDefault, Hash, Hasher};

/// Blocks and their holders.
#[derive(Default)]
pub(super) struct Shard {
    blocks: HashMap<Key, Entry, BuildHasherDefault<AsIs>>,
    shared: Vec<Holders>,
    /// Places in `shared` that hold nothing.
    free: Vec<u32>,
}

/// Who holds a block, as found.
#[derive(Clone, Copy)]
pub(super) enum Found<'a> {
    /// Nobody.
    Nobody,
    /// Exactly one.
    One(Seat),
    /// Several.
    Several(&'a Holders),
}

/// A block's name in 4-byte halves: a table of these needs no padding.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Key([u32; 2]);

/// A seat, or with the highest bit set, a place in `shared`.
#[derive(Clone, Copy)]
struct Entry(u32);

const SHARED: u32 = 1 << 31;
/// Tables smaller than this are not worth shrinking.
const SMALL: usize = 64;

impl Shard {
    pub(super) fn get(&self, short: u64) -> Found<'_> {
        match self.blocks.get(&Key::of(short)).map(|entry| entry.0) {
            None => Found::Nobody,
            Some(raw) if raw & SHARED == 0 => Found::One(Seat::from_raw(raw)),
            Some(raw) => Found::Several(&self.shared[(raw ^ SHARED) as usize]),
        }
    }

    pub(super) fn insert(&mut self, short: u64, seat: Seat) {
        let entry = self.blocks.entry(Key::of(short)).or_insert(Entry(seat.raw()));
        if entry.0 == seat.raw() {
            return;
        }
        if entry.0 & SHARED != 0 {
            self.shared[(entry.0 ^ SHARED) as usize].insert(seat);
            return;
        }
        let holders = Holders::pair(Seat::from_raw(entry.0), seat);
        let at = if let Some(at) = self.free.pop() {
            self.shared[at as usize] = holders;
            at
        } else {
            self.shared.push(holders);
            self.shared.len() as u32 - 1
        };
        *entry = Entry(at | SHARED);
    }

    pub(super) fn remove(&mut self, short: u64, seat: Seat) {
        let key = Key::of(short);
        let Some(entry) = self.blocks.get_mut(&key) else { return };
        if entry.0 & SHARED != 0 {
            let at = entry.0 ^ SHARED;
            if let Some(last) = self.shared[at as usize].remove(seat) {
                *entry = Entry(last.raw());
                self.free.push(at);
                self.fit_shared();
            }
        } else if entry.0 == seat.raw() {
            self.blocks.remove(&key);
            if self.blocks.capacity() > SMALL && self.blocks.len() * 4 < self.blocks.capacity() {
                self.blocks.shrink_to(self.blocks.len() * 2);
            }
        }
    }

    /// Closes the holes in `shared` when most of it is holes.
    fn fit_shared(&mut self) {
        if self.shared.len() < SMALL || self.free.len() * 4 < self.shared.len() * 3 {
            return;
        }
        let mut kept = Vec::with_capacity((self.shared.len() - self.free.len()) * 2);
        for entry in self.blocks.values_mut().filter(|entry| entry.0 & SHARED != 0) {
            let from = &mut self.shared[(entry.0 ^ SHARED) as usize];
            let nothing = Holders::pair(Seat::from_raw(0), Seat::from_raw(0));
            *entry = Entry(kept.len() as u32 | SHARED);
            kept.push(std::mem::replace(from, nothing));
        }
        self.shared = kept;
        self.free = Vec::new();
    }

    pub(super) fn bytes(&self) -> usize {
        table_bytes(self.blocks.capacity(), size_of::<(Key, Entry)>())
            + self.shared.capacity() * size_of::<Holders>()
            + self.shared.iter().map(Holders::bytes).sum::<usize>()
            + self.free.capacity() * size_of::<u32>()
    }
}

/// A set of short names.
#[derive(Default)]
pub(super) struct Names(HashSet<u64, BuildHasherDefault<AsIs>>);

impl Names {
    pub(super) fn insert(&mut self, short: u64) -> bool {
        self.0.insert(short)
    }

    pub(super) fn remove(&mut self, short: u64) -> bool {
        self.0.remove(&short)
    }

    pub(super) fn contains(&self, short: u64) -> bool {
        self.0.contains(&short)
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// In no order that means anything.
    pub(super) fn iter(&self) -> impl Iterator<Item = u64> {
        self.0.iter().copied()
    }

    /// Gives back memory when most of it is spare.
    pub(super) fn fit(&mut self) {
        if self.0.capacity() > SMALL && self.0.len() * 4 < self.0.capacity() {
            self.0.shrink_to(self.0.len() * 2);
        }
    }

    pub(super) fn bytes(&self) -> usize {
        table_bytes(self.0.capacity(), size_of::<u64>())
    }
}

/// Bytes of a std table: buckets are a power of two, at most 7/8 full, with a control byte each.
fn table_bytes(capacity: usize, item: usize) -> usize {
    if capacity == 0 { 0 } else { (capacity * 8 / 7).next_power_of_two() * (item + 1) }
}

impl Key {
    fn of(short: u64) -> Self {
        Self([short as u32, (short >> 32) as u32])
    }
}

impl Hash for Key {
    fn hash<H: Hasher>(&self, state: &mut H) {
        state.write_u64(u64::from(self.0[0]) | u64::from(self.0[1]) << 32);
    }
}

/// Names are hashes already. Whoever grinds tokens for names that collide slows only the shard they collide in, at
/// thousands of hashed blocks per collision.
#[derive(Default)]
pub(super) struct AsIs(u64);

impl Hasher for AsIs {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for byte in bytes {
            self.0 = self.0.rotate_left(8) ^ u64::from(*byte);
        }
    }

    fn write_u64(&mut self, value: u64) {
        self.0 = value;
    }
}
