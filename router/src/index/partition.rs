//! Who has all of a prompt so far, counted page by page.
//!
//! Everybody has the beginning of a prompt that all share, and what a store has, all have who reach it. So workers that fared
//! alike are a class, a set of bits, and what a page adds is counted once for all of them. A class is split where a page tells
//! its members apart.
//!
//! **Who holds blocks by itself** stays in its class as long as the class has everything: it has what the class has, and at
//! faster levels perhaps, and the difference is noted. Where its class ends and it does not, it goes on alone. Of a page one
//! counts the classes, the workers that hold some of it by themselves, and those that go on alone; nobody else is touched.

use super::bits::{Bits, each, ones};
use super::holder_set::Group;
use super::page::Seen;
use super::source::{LEVELS, Seat};
use super::worker_overlap::{Answer, Held};
use std::slice::from_ref;

/// Those who have every block so far.
#[derive(Default)]
pub(super) struct Partition {
    classes: Vec<Class>,
    /// The members of one class after those of another, so many words each.
    sets: Vec<u64>,
    words: usize,
    /// Numbers of workers in no class, in order. What they have is in the answer.
    alone: Vec<u32>,
}

/// Workers that have the same, but for what the answer has of them apart.
#[derive(Clone, Copy, Default)]
struct Class {
    held: Held,
    /// What they reach of a page, level by level, and what that comes to.
    share: [u64; LEVELS.len()],
    run: u32,
    gain: Held,
}

/// Part of a page that a prompt goes through.
#[derive(Clone, Copy)]
pub(super) struct Window {
    /// The first place.
    pub(super) at: u32,
    /// Places.
    pub(super) len: u32,
    /// So many pages are the same.
    pub(super) times: u32,
}

/// The holders of a page, as far as the window shows.
struct Sight<'a> {
    window: Window,
    /// Workers, one by one, and what each has.
    seats: &'a [Seat],
    masks: &'a [u64],
    groups: &'a [Group],
    stores: &'a [Seat],
    store_masks: &'a [u64],
    /// Who reaches which store.
    reach: &'a [Bits],
}

/// Classes at a time. A prompt of which workers have parts in more ways than that is counted worker by worker.
const CLASSES: usize = 32;
/// Room at once for this part of what there may be.
const FRESH: usize = 4;
const WORD: usize = u64::BITS as usize;

impl Partition {
    /// So many workers have all of nothing.
    pub(super) fn begin(&mut self, workers: usize) -> usize {
        self.words = workers.div_ceil(WORD);
        self.alone.clear();
        self.alone.reserve(workers / FRESH);
        self.classes.clear();
        self.classes.reserve(CLASSES / FRESH);
        self.classes.push(Class::default());
        self.sets.clear();
        self.sets.reserve(self.words * CLASSES / FRESH);
        self.sets.resize(self.words, u64::MAX);
        self.words
    }

    /// Counts what a page has. Whether anybody has all of it.
    pub(super) fn count(&mut self, seen: &Seen, window: Window, reach: &[Bits], answer: &mut Answer) -> bool {
        let sight = Sight::new(seen, window, reach);
        if self.classes.is_empty() {
            self.count_alone(&sight, answer);
        } else {
            let alone = self.alone.len();
            self.split(&sight, answer);
            self.sort(alone);
            self.count_alone(&sight, answer);
            let alone = self.alone.len();
            self.count_apart(&sight, answer);
            self.sort(alone);
            self.settle(window, answer);
        }
        !(self.classes.is_empty() && self.alone.is_empty())
    }

    /// There are no more pages.
    pub(super) fn end(&self, answer: &mut Answer) {
        for (at, class) in self.classes.iter().enumerate() {
            answer.give(self.set(at), class.held);
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

    /// Puts those that came last where they belong.
    fn sort(&mut self, before: usize) {
        if self.alone.len() > before {
            self.alone.sort_unstable();
        }
    }

    /// Splits classes until all of one have the same of what is shared, and counts that.
    fn split(&mut self, sight: &Sight<'_>, answer: &mut Answer) {
        self.classes.iter_mut().for_each(|class| class.share = [0; LEVELS.len()]);
        for (level, mask, workers) in sight.shared() {
            for at in 0..self.classes.len() {
                let at = match meet(self.set(at), workers) {
                    (false, _) => continue,
                    (true, false) => at,
                    (true, true) if self.classes.len() < CLASSES => self.divide(at, workers),
                    (true, true) => {
                        self.scatter(at, workers, answer);
                        continue;
                    }
                };
                self.classes[at].share[level] |= mask;
            }
        }
        for class in &mut self.classes {
            (class.run, class.gain) = sight.window.leading(&class.share);
        }
    }

    /// Makes those of a class that are among these workers another, the last.
    fn divide(&mut self, class: usize, workers: &[u64]) -> usize {
        for word in 0..self.words {
            let set = &mut self.sets[class * self.words + word];
            let moved = *set & workers.get(word).unwrap_or(&0);
            *set &= !moved;
            self.sets.push(moved);
        }
        self.classes.push(self.classes[class]);
        self.classes.len() - 1
    }

    /// Has those of a class go on alone that are among these workers.
    fn scatter(&mut self, class: usize, workers: &[u64], answer: &mut Answer) {
        let held = self.classes[class].held;
        for (word, workers) in workers.iter().enumerate().take(self.words) {
            let set = &mut self.sets[class * self.words + word];
            for bit in each(*set & workers) {
                let worker = word * WORD + bit as usize;
                answer.add(worker, held);
                self.alone.push(worker as u32);
            }
            *set &= !workers;
        }
    }

    /// Counts those that go on alone.
    fn count_alone(&mut self, sight: &Sight<'_>, answer: &mut Answer) {
        let len = sight.window.len;
        let mut from = 0;
        self.alone.retain(|worker| {
            let worker = *worker as usize;
            from += before(&sight.seats[from..], worker);
            let (run, gain) = match sight.only(from, worker) {
                Some((level, mask)) => sight.window.at_one(level, mask),
                None => sight.window.leading(&sight.share(from, worker)),
            };
            answer.add(worker, gain);
            run == len
        });
    }

    /// Counts those of a class that hold some of the page by themselves: by how much they have it otherwise.
    fn count_apart(&mut self, sight: &Sight<'_>, answer: &mut Answer) {
        let mut at = 0;
        while let Some(seat) = sight.seats.get(at) {
            let worker = seat.slot().number();
            let class = if sight.sees(at) { self.class_of(worker) } else { None };
            let Some(class) = class else {
                at += 1;
                continue;
            };
            let Class { held, mut share, run, gain } = self.classes[class];
            at += sight.own(at, worker, &mut share);
            let (own_run, own_gain) = sight.window.leading(&share);
            if own_gain != gain {
                answer.add(worker, own_gain - gain);
            }
            if run < sight.window.len && own_run == sight.window.len {
                self.sets[class * self.words + worker / WORD] &= !(1 << (worker % WORD));
                answer.add(worker, held);
                answer.add(worker, gain);
                self.alone.push(worker as u32);
            }
        }
    }

    /// Ends the classes that do not have all of the page, and makes one of those that have the same.
    fn settle(&mut self, window: Window, answer: &mut Answer) {
        let mut at = 0;
        while let Some(class) = self.classes.get_mut(at) {
            class.held += class.gain;
            let Class { held, run, .. } = *class;
            let like = self.classes[..at].iter().position(|other| other.held == held);
            if run < window.len {
                answer.give(self.set(at), held);
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

impl Window {
    fn of(self, mask: u64) -> u64 {
        mask >> self.at & ones(self.len)
    }

    /// How far what is there at some level goes, and how much of it is at which: the fastest that has each block.
    #[expect(clippy::inline_always, reason = "for every worker of every page, and the masks stay in registers")]
    #[inline(always)]
    fn leading(self, share: &[u64; LEVELS.len()]) -> (u32, Held) {
        let any = share.iter().fold(0, |any, mask| any | mask);
        let run = (!any).trailing_zeros().min(self.len);
        let (mut rest, mut left, mut blocks) = (ones(run), run, [0; LEVELS.len()]);
        for (blocks, mask) in blocks.iter_mut().zip(share) {
            let here = mask & rest;
            // Most of the time it has all that is left, or the first of them: no need to count bits.
            *blocks = match here {
                _ if here == rest => left,
                _ if here & (here + 1) == 0 => here.trailing_ones(),
                _ => here.count_ones(),
            };
            left -= *blocks;
            rest &= !here;
        }
        self.on(run, Held(blocks))
    }

    /// The same of what is at one level.
    fn at_one(self, level: usize, mask: u64) -> (u32, Held) {
        let run = (!mask).trailing_zeros().min(self.len);
        let mut held = Held::default();
        held.0[level] = run;
        self.on(run, held)
    }

    /// Who has all of the first page has all of those that are the same.
    fn on(self, run: u32, held: Held) -> (u32, Held) {
        let times = if run == self.len { self.times } else { 1 };
        (run, Held(held.0.map(|blocks| blocks * times)))
    }
}

impl<'a> Sight<'a> {
    fn new(seen: &'a Seen, window: Window, reach: &'a [Bits]) -> Self {
        let (seats, masks, groups) = match seen.several.as_deref().and_then(|crowd| crowd.as_ref()) {
            Some(crowd) => {
                let (seats, masks) = crowd.singles();
                (seats, masks, crowd.groups())
            }
            None => (from_ref(&seen.seat), from_ref(&seen.mask), &[][..]),
        };
        // Stores come last.
        let own = match seats.last() {
            Some(last) if last.slot().is_store() => seats.partition_point(|seat| !seat.slot().is_store()),
            _ => seats.len(),
        };
        let ((seats, stores), (masks, store_masks)) = (seats.split_at(own), masks.split_at(own));
        Self { window, seats, masks, groups, stores, store_masks, reach }
    }

    /// What many workers have alike: the level, the blocks, and who they are.
    fn shared(&self) -> impl Iterator<Item = (usize, u64, &'a [u64])> {
        let groups = self.groups.iter().map(|group| (group.level, group.mask, group.workers.words()));
        let reach = |store: &Seat| self.reach.get(store.slot().number()).map_or(&[][..], Bits::words);
        let stores = self.stores.iter().zip(self.store_masks);
        let stores = stores.map(move |(store, mask)| (store.level(), *mask, reach(store)));
        let seen = |(level, mask, workers)| (level, self.window.of(mask), workers);
        groups.chain(stores).map(seen).filter(|(_, mask, _)| *mask != 0)
    }

    /// What a worker has if it is at one level, and its own. Most of the time it is so.
    fn only(&self, from: usize, worker: usize) -> Option<(usize, u64)> {
        let is = |seat: &&Seat| seat.slot().number() == worker;
        let seat = self.seats.get(from).filter(is)?;
        let shared = !self.groups.is_empty() || !self.stores.is_empty();
        let several = self.seats.get(from + 1).is_some_and(|next| is(&next));
        (!shared && !several).then(|| (seat.level(), self.window.of(self.masks[from])))
    }

    /// What a worker has at all levels, its own and shared.
    #[inline(never)]
    fn share(&self, from: usize, worker: usize) -> [u64; LEVELS.len()] {
        let mut share = [0; LEVELS.len()];
        self.own(from, worker, &mut share);
        for (level, mask, workers) in self.shared() {
            if workers.get(worker / WORD).is_some_and(|word| word >> (worker % WORD) & 1 == 1) {
                share[level] |= mask;
            }
        }
        share
    }

    /// Whether anything of what a worker holds by itself is in the window.
    fn sees(&self, at: usize) -> bool {
        self.window.of(self.masks[at]) != 0
    }

    /// Adds what a worker holds by itself, one by one, if that begins in this position. Answers with how many seats that is.
    fn own(&self, from: usize, worker: usize, share: &mut [u64; LEVELS.len()]) -> usize {
        let own = self.seats[from..].iter().zip(&self.masks[from..]);
        let own = own.take_while(|(seat, _)| seat.slot().number() == worker);
        own.map(|(seat, mask)| share[seat.level()] |= self.window.of(*mask)).count()
    }
}

/// Whether some of a set are among these workers, and whether some are not.
fn meet(set: &[u64], workers: &[u64]) -> (bool, bool) {
    let (known, beyond) = set.split_at(workers.len().min(set.len()));
    let (inside, outside) = known
        .iter()
        .zip(workers)
        .fold((0, 0), |(inside, outside), (set, workers)| (inside | set & workers, outside | set & !workers));
    (inside != 0, outside != 0 || beyond.iter().any(|set| *set != 0))
}

/// How many seats are of workers before this one. Fewer are looked at than that, where they are many.
fn before(seats: &[Seat], worker: usize) -> usize {
    let is = |seat: &Seat| seat.slot().number() < worker;
    let mut reach = 1;
    while seats.get(reach - 1).is_some_and(is) {
        reach *= 2;
    }
    let known = reach / 2;
    known + seats[known..seats.len().min(reach)].partition_point(is)
}
