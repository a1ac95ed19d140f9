//! Growth and shrinking of a [`Table`] by one bucket.
//!
//! An entry keeps its group when its bucket is divided or merged, and mostly its tag, which says where it goes. Its
//! hash is read only if it may be in a group that is not its home, or if its tag changes. The caller holds the writers'
//! lock.

use super::group::{EMPTY, Group};
use super::sync::{CacheLine, Ordering, prefetch_for_write};
use super::table::{BUCKET_SLOTS, GROUPS, MAX_LEVEL, Motion, Place, Table, first_tag_bit};

/// Groups that are prefetched for the next division. The processor's prefetcher finds the others.
const PREFETCH: usize = 8;

impl Table {
    /// Divides the next bucket in two. `keys` reads the keys of positions. Returns whether it did: not if there is no
    /// memory or no address for another bucket.
    pub(crate) fn grow(&self, keys: impl Fn(&[u32]) -> Vec<u64>) -> bool {
        let state = self.state(Ordering::Relaxed);
        let (level, split) = (state.level(), state.split());
        let (from, to) = (split as usize, split as usize + (1 << level));
        if level + 1 == MAX_LEVEL || !self.ensure(to) {
            return false;
        }
        self.set_state(level, split, Motion::Dividing);
        let keeps_tags = first_tag_bit(level + 1) == first_tag_bit(level);
        let deciding_bit = level - first_tag_bit(level);
        let mut unplaced = Vec::new();
        for (group, at_home, line) in self.groups_at_home(from) {
            if at_home && keeps_tags {
                Group(line).divide(deciding_bit, Group(&self.bucket(to)[group]));
            } else {
                unplaced.extend(Group(line).positions());
            }
        }
        self.place(&unplaced, (level, level + 1), keys);
        let (level, split) = if split + 1 == 1 << level { (level + 1, 0) } else { (level, split + 1) };
        self.set_state(level, split, Motion::None);
        // The next division begins with these.
        self.bucket(split as usize).iter().take(PREFETCH).for_each(prefetch_for_write);
        true
    }

    /// Merges the last bucket with the one that it was divided from. Returns whether it did: not if it is the only one,
    /// or if they have too many entries for one.
    pub(crate) fn shrink(&self, keys: impl Fn(&[u32]) -> Vec<u64>) -> bool {
        let state = self.state(Ordering::Relaxed);
        let (level, split) = match (state.level(), state.split()) {
            (0, 0) => return false,
            (level, 0) => (level - 1, (1 << (level - 1)) - 1),
            (level, split) => (level, split - 1),
        };
        let (to, from) = (split as usize, split as usize + (1 << level));
        let used = |group| Group(group).tags(Ordering::Relaxed).used().slots().count();
        let entries = |bucket| -> usize { self.bucket(bucket).iter().map(used).sum() };
        if entries(from) + entries(to) > BUCKET_SLOTS / 4 * 3 {
            return false;
        }
        self.set_state(level, split, Motion::Merging);
        let keeps_tags = first_tag_bit(level + 1) == first_tag_bit(level);
        let mut unplaced = Vec::new();
        if !keeps_tags {
            self.bucket(to).iter().for_each(|line| unplaced.extend(Group(line).positions()));
        }
        for (group, at_home, line) in self.groups_at_home(from) {
            let (source, tags) = (Group(line), Group(line).tags(Ordering::Relaxed));
            if !at_home || !keeps_tags {
                unplaced.extend(source.positions());
                continue;
            }
            for slot in tags.used().slots() {
                self.put(Place { home: (to * GROUPS + group) as u32, tag: tags.tag(slot) }, source.position(slot));
                source.set_tag(slot, EMPTY);
            }
        }
        self.place(&unplaced, (level + 1, level), keys);
        self.set_state(level, split, Motion::None);
        self.release_from(from);
        true
    }

    /// The groups of a bucket with their numbers, and whether a group is the home of all entries in it.
    fn groups_at_home(&self, bucket: usize) -> impl Iterator<Item = (usize, bool, &CacheLine)> {
        let groups = self.bucket(bucket);
        let no_overflow = |group: &CacheLine| Group(group).tags(Ordering::Relaxed).has_no_overflow();
        let mut at_home = groups.last().is_none_or(no_overflow);
        groups.iter().enumerate().map(move |(group, line)| {
            let after = no_overflow(line);
            (group, std::mem::replace(&mut at_home, after), line)
        })
    }

    /// Moves entries from their places at one level to those at another.
    fn place(&self, positions: &[u32], (before, after): (u32, u32), keys: impl Fn(&[u32]) -> Vec<u64>) {
        if positions.is_empty() {
            return;
        }
        for (position, key) in positions.iter().zip(keys(positions)) {
            let (old, new) = (Place::at_level(key, before), Place::at_level(key, after));
            if new.home != old.home {
                self.put(new, *position);
                self.remove_at(old, *position);
            } else if new.tag != old.tag {
                self.retag(old, *position, new.tag);
            }
        }
    }
}
