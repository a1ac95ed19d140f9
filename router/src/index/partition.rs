//! Counts for each worker how many leading blocks of a prompt it has, page by page, by partition refinement.
//!
//! Many workers have the same blocks: a common prefix is on all of them, and blocks of a store are available to all
//! workers that can read it. Workers with equal overlap so far form a class, a bitmap, and a page is counted once per
//! class. A class is split where a page distinguishes its members.
//!
//! **A worker with blocks of its own** (listed individually in the page) stays in its class as long as the class has
//! every block: it has at least the blocks of its class, perhaps at faster levels, and the difference is recorded.
//! Where the class ends and the worker goes on, it becomes an individual. The work per page is proportional to the
//! number of classes, of workers listed in the page, and of individuals.

use super::bits::{Bits, each, ones};
use super::holder::{HolderLevel, LEVELS};
use super::holder_set::BitmapGroup;
use super::page::PageRead;
use super::worker_overlap::{WorkerOverlap, WorkerOverlaps};
use std::slice::from_ref;

/// The workers that have every block so far.
#[derive(Default)]
pub(super) struct Partition {
    classes: Vec<Class>,
    /// Bitmaps of all classes, `words` words each.
    sets: Vec<u64>,
    words: usize,
    /// Sorted indexes of workers that are in no class. Their overlap is in the result.
    individuals: Vec<u32>,
}

/// Workers with the same overlap, apart from differences recorded in the result.
#[derive(Clone, Copy, Default)]
struct Class {
    held: WorkerOverlap,
    /// Masks of the blocks of the page by level, the number of leading blocks, and the overlap that they add.
    masks: [u64; LEVELS.len()],
    run: u32,
    gain: WorkerOverlap,
}

/// The part of a page that matches the prompt.
#[derive(Clone, Copy)]
pub(super) struct MatchedRange {
    /// First offset.
    pub(super) at: u32,
    /// Number of positions.
    pub(super) len: u32,
    /// Number of consecutive pages with the same holders.
    pub(super) times: u32,
}

/// The holders of a page within the matched range.
struct PageView<'a> {
    matched: MatchedRange,
    /// Workers that are listed individually, and their masks.
    holder_levels: &'a [HolderLevel],
    masks: &'a [u64],
    groups: &'a [BitmapGroup],
    stores: &'a [HolderLevel],
    store_masks: &'a [u64],
    /// By store: the workers that can read it.
    readers: &'a [Bits],
}

/// Maximum number of classes. If workers differ in more ways, the members of a class that would be split become
/// individuals.
const MAX_CLASSES: usize = 32;
/// Fraction of the maximum capacity that is reserved at the start.
const INITIAL_SHARE: usize = 4;
const WORD: usize = u64::BITS as usize;

impl Partition {
    /// Starts with all workers in one class. Returns the number of words of a bitmap.
    pub(super) fn begin(&mut self, workers: usize) -> usize {
        self.words = workers.div_ceil(WORD);
        self.individuals.clear();
        self.individuals.reserve(workers / INITIAL_SHARE);
        self.classes.clear();
        self.classes.reserve(MAX_CLASSES / INITIAL_SHARE);
        self.classes.push(Class::default());
        self.sets.clear();
        self.sets.reserve(self.words * MAX_CLASSES / INITIAL_SHARE);
        self.sets.resize(self.words, u64::MAX);
        self.words
    }

    /// Counts a page. Returns whether any worker has the whole matched range.
    pub(super) fn count(
        &mut self,
        read: &PageRead,
        matched: MatchedRange,
        readers: &[Bits],
        overlaps: &mut WorkerOverlaps,
    ) -> bool {
        let view = PageView::new(read, matched, readers);
        if self.classes.is_empty() {
            self.count_individuals(&view, overlaps);
        } else {
            let individuals = self.individuals.len();
            self.split(&view, overlaps);
            self.sort(individuals);
            self.count_individuals(&view, overlaps);
            let individuals = self.individuals.len();
            self.count_own_blocks(&view, overlaps);
            self.sort(individuals);
            self.finish_page(matched, overlaps);
        }
        !(self.classes.is_empty() && self.individuals.is_empty())
    }

    /// Ends the lookup: adds the overlap of each class to its members.
    pub(super) fn end(&self, overlaps: &mut WorkerOverlaps) {
        for (at, class) in self.classes.iter().enumerate() {
            overlaps.add_to_set(self.set(at), class.held);
        }
    }

    fn set(&self, class: usize) -> &[u64] {
        &self.sets[class * self.words..][..self.words]
    }

    /// The class of a worker, if it is in one.
    fn class_of(&self, worker: usize) -> Option<usize> {
        let (word, bit) = (worker / WORD, worker % WORD);
        let has = |class: &usize| self.sets[class * self.words + word] >> bit & 1 == 1;
        (word < self.words).then(|| (0..self.classes.len()).find(has)).flatten()
    }

    /// Sorts the individuals again if some were added.
    fn sort(&mut self, before: usize) {
        if self.individuals.len() > before {
            self.individuals.sort_unstable();
        }
    }

    /// Splits classes until all members of a class share the same group and store masks, and counts those.
    fn split(&mut self, view: &PageView<'_>, overlaps: &mut WorkerOverlaps) {
        self.classes.iter_mut().for_each(|class| class.masks = [0; LEVELS.len()]);
        for (level, mask, workers) in view.shared() {
            for at in 0..self.classes.len() {
                let at = match intersect(self.set(at), workers) {
                    (false, _) => continue,
                    (true, false) => at,
                    (true, true) if self.classes.len() < MAX_CLASSES => self.split_class(at, workers),
                    (true, true) => {
                        self.dissolve(at, workers, overlaps);
                        continue;
                    }
                };
                self.classes[at].masks[level] |= mask;
            }
        }
        for class in &mut self.classes {
            (class.run, class.gain) = view.matched.leading(&class.masks);
        }
    }

    /// Moves the members that are among these workers to a new class, the last.
    fn split_class(&mut self, class: usize, workers: &[u64]) -> usize {
        for word in 0..self.words {
            let set = &mut self.sets[class * self.words + word];
            let moved = *set & workers.get(word).unwrap_or(&0);
            *set &= !moved;
            self.sets.push(moved);
        }
        self.classes.push(self.classes[class]);
        self.classes.len() - 1
    }

    /// Makes the members that are among these workers individuals.
    fn dissolve(&mut self, class: usize, workers: &[u64], overlaps: &mut WorkerOverlaps) {
        let held = self.classes[class].held;
        for (word, workers) in workers.iter().enumerate().take(self.words) {
            let set = &mut self.sets[class * self.words + word];
            for bit in each(*set & workers) {
                let worker = word * WORD + bit as usize;
                overlaps.add(worker, held);
                self.individuals.push(worker as u32);
            }
            *set &= !workers;
        }
    }

    /// Counts the individuals.
    fn count_individuals(&mut self, view: &PageView<'_>, overlaps: &mut WorkerOverlaps) {
        let len = view.matched.len;
        let mut from = 0;
        self.individuals.retain(|worker| {
            let worker = *worker as usize;
            from += count_before(&view.holder_levels[from..], worker);
            let (run, gain) = match view.single_level(from, worker) {
                Some((level, mask)) => view.matched.leading_at(level, mask),
                None => view.matched.leading(&view.masks_of(from, worker)),
            };
            overlaps.add(worker, gain);
            run == len
        });
    }

    /// Counts the class members that are listed individually: the difference to the overlap of their class.
    fn count_own_blocks(&mut self, view: &PageView<'_>, overlaps: &mut WorkerOverlaps) {
        let mut at = 0;
        while let Some(holder_level) = view.holder_levels.get(at) {
            let worker = holder_level.holder_id().index();
            let class = if view.has_matched_blocks(at) { self.class_of(worker) } else { None };
            let Some(class) = class else {
                at += 1;
                continue;
            };
            let Class { held, mut masks, run, gain } = self.classes[class];
            at += view.add_own(at, worker, &mut masks);
            let (own_run, own_gain) = view.matched.leading(&masks);
            if own_gain != gain {
                overlaps.add(worker, own_gain - gain);
            }
            if run < view.matched.len && own_run == view.matched.len {
                self.sets[class * self.words + worker / WORD] &= !(1 << (worker % WORD));
                overlaps.add(worker, held);
                overlaps.add(worker, gain);
                self.individuals.push(worker as u32);
            }
        }
    }

    /// Removes the classes that do not have the whole matched range, and merges classes with equal overlap.
    fn finish_page(&mut self, matched: MatchedRange, overlaps: &mut WorkerOverlaps) {
        let mut at = 0;
        while let Some(class) = self.classes.get_mut(at) {
            class.held += class.gain;
            let Class { held, run, .. } = *class;
            let like = self.classes[..at].iter().position(|other| other.held == held);
            if run < matched.len {
                overlaps.add_to_set(self.set(at), held);
            } else if let Some(like) = like {
                for word in 0..self.words {
                    self.sets[like * self.words + word] |= self.sets[at * self.words + word];
                }
            } else {
                at += 1;
                continue;
            }
            self.remove(at);
        }
    }

    fn remove(&mut self, class: usize) {
        self.classes.swap_remove(class);
        let last = self.classes.len() * self.words;
        self.sets.copy_within(last.., class * self.words);
        self.sets.truncate(last);
    }
}

impl MatchedRange {
    fn of(self, mask: u64) -> u64 {
        mask >> self.at & ones(self.len)
    }

    /// Number of leading blocks, and how many of them are at each level; a block counts at its fastest level.
    #[expect(clippy::inline_always, reason = "for every worker of every page, and the masks stay in registers")]
    #[inline(always)]
    fn leading(self, masks: &[u64; LEVELS.len()]) -> (u32, WorkerOverlap) {
        let any = masks.iter().fold(0, |any, mask| any | mask);
        let run = (!any).trailing_zeros().min(self.len);
        let (mut rest, mut left, mut blocks) = (ones(run), run, [0; LEVELS.len()]);
        for (blocks, mask) in blocks.iter_mut().zip(masks) {
            let here = mask & rest;
            // Most often a level has all remaining blocks or a prefix of them, which needs no popcount.
            *blocks = match here {
                _ if here == rest => left,
                _ if here & (here + 1) == 0 => here.trailing_ones(),
                _ => here.count_ones(),
            };
            left -= *blocks;
            rest &= !here;
        }
        self.repeat(run, WorkerOverlap(blocks))
    }

    /// The same for blocks at one level.
    fn leading_at(self, level: usize, mask: u64) -> (u32, WorkerOverlap) {
        let run = (!mask).trailing_zeros().min(self.len);
        let mut held = WorkerOverlap::default();
        held.0[level] = run;
        self.repeat(run, held)
    }

    /// A worker with all of the first page has all of the equal pages as well.
    fn repeat(self, run: u32, held: WorkerOverlap) -> (u32, WorkerOverlap) {
        let times = if run == self.len { self.times } else { 1 };
        (run, WorkerOverlap(held.0.map(|blocks| blocks * times)))
    }
}

impl<'a> PageView<'a> {
    fn new(read: &'a PageRead, matched: MatchedRange, readers: &'a [Bits]) -> Self {
        let (holder_levels, masks, groups) = match read.holder_set.as_deref().and_then(|holder_set| holder_set.as_ref())
        {
            Some(holder_set) => {
                let (holder_levels, masks) = holder_set.singles();
                (holder_levels, masks, holder_set.groups())
            }
            None => (from_ref(&read.holder_level), from_ref(&read.mask), &[][..]),
        };
        // Stores are sorted after workers.
        let own = match holder_levels.last() {
            Some(last) if last.holder_id().is_store() => {
                holder_levels.partition_point(|holder_level| !holder_level.holder_id().is_store())
            }
            _ => holder_levels.len(),
        };
        let ((holder_levels, stores), (masks, store_masks)) = (holder_levels.split_at(own), masks.split_at(own));
        Self { matched, holder_levels, masks, groups, stores, store_masks, readers }
    }

    /// Masks that apply to many workers, of groups and of stores: level, blocks, workers.
    fn shared(&self) -> impl Iterator<Item = (usize, u64, &'a [u64])> {
        let groups = self.groups.iter().map(|group| (group.level, group.mask, group.workers.words()));
        let readers = |store: &HolderLevel| self.readers.get(store.holder_id().index()).map_or(&[][..], Bits::words);
        let stores = self.stores.iter().zip(self.store_masks);
        let stores = stores.map(move |(store, mask)| (store.level(), *mask, readers(store)));
        let in_range = |(level, mask, workers)| (level, self.matched.of(mask), workers);
        groups.chain(stores).map(in_range).filter(|(_, mask, _)| *mask != 0)
    }

    /// Level and mask of a worker that is listed once, if there are no groups or stores: the common case.
    fn single_level(&self, from: usize, worker: usize) -> Option<(usize, u64)> {
        let is = |holder_level: &&HolderLevel| holder_level.holder_id().index() == worker;
        let holder_level = self.holder_levels.get(from).filter(is)?;
        let shared = !self.groups.is_empty() || !self.stores.is_empty();
        let holder_set = self.holder_levels.get(from + 1).is_some_and(|next| is(&next));
        (!shared && !holder_set).then(|| (holder_level.level(), self.matched.of(self.masks[from])))
    }

    /// Masks of a worker by level: its own, its groups' and its stores'.
    #[inline(never)]
    fn masks_of(&self, from: usize, worker: usize) -> [u64; LEVELS.len()] {
        let mut masks = [0; LEVELS.len()];
        self.add_own(from, worker, &mut masks);
        for (level, mask, workers) in self.shared() {
            if workers.get(worker / WORD).is_some_and(|word| word >> (worker % WORD) & 1 == 1) {
                masks[level] |= mask;
            }
        }
        masks
    }

    /// Whether the listed mask has a block in the matched range.
    fn has_matched_blocks(&self, at: usize) -> bool {
        self.matched.of(self.masks[at]) != 0
    }

    /// Adds the listed masks of a worker, which start at index `from`. Returns their number.
    fn add_own(&self, from: usize, worker: usize, masks: &mut [u64; LEVELS.len()]) -> usize {
        let own = self.holder_levels[from..].iter().zip(&self.masks[from..]);
        let own = own.take_while(|(holder_level, _)| holder_level.holder_id().index() == worker);
        own.map(|(holder_level, mask)| masks[holder_level.level()] |= self.matched.of(*mask)).count()
    }
}

/// Whether some members of a set are among these workers, and whether some are not.
fn intersect(set: &[u64], workers: &[u64]) -> (bool, bool) {
    let (known, beyond) = set.split_at(workers.len().min(set.len()));
    let (inside, outside) = known
        .iter()
        .zip(workers)
        .fold((0, 0), |(inside, outside), (set, workers)| (inside | set & workers, outside | set & !workers));
    (inside != 0, outside != 0 || beyond.iter().any(|set| *set != 0))
}

/// Number of holders at a level, of workers, before this one, by exponential search.
fn count_before(holder_levels: &[HolderLevel], worker: usize) -> usize {
    let is = |holder_level: &HolderLevel| holder_level.holder_id().index() < worker;
    let mut bound = 1;
    while holder_levels.get(bound - 1).is_some_and(is) {
        bound *= 2;
    }
    let known = bound / 2;
    known + holder_levels[known..holder_levels.len().min(bound)].partition_point(is)
}
