//! A lookup: along a prompt from page to page, all workers at once.
//!
//! A page says for up to 64 blocks at once who holds them, a word per holder; what a worker has of them without a gap is one
//! instruction, and a worker is touched once a page.
//!
//! **What a store has** of a prompt's beginning, all of its workers have alike, hundreds of them: that is counted once, and of a
//! worker only what is otherwise because it holds blocks itself. Nobody falls behind what the store has, so this goes on for
//! as long as the store has everything; then each worker gets its due, and goes on alone.

use super::LEVELS;
use super::bits::Bits;
use super::body::{Body, Place};
use super::locator::Key;
use super::overlap::Overlap;
use super::page::{PLACES, Seen, ones};
use super::seat::{Seat, Slot};
use kvbm::SequenceHash;

/// Places looked for at once, one for each page that a prompt takes at least: as many as a core can wait for.
const AHEAD: usize = 16;
/// Blocks from one to the next.
const STRIDE: usize = PLACES as usize;
/// A block may be moved between finding and reading it, and then be found again.
const TRIES: usize = 3;

/// The walk.
pub(super) struct Walk<'a> {
    body: &'a Body,
    names: &'a [SequenceHash],
    out: &'a mut Overlap,
    /// Blocks walked.
    at: usize,
    /// Where blocks ahead are, probably: one in [`STRIDE`], from `ahead_from` on.
    ahead: [Option<Place>; AHEAD],
    ahead_from: usize,
    /// What is still to be added to some workers.
    alike: Option<Alike<'a>>,
}

/// What all workers of a store have of the pages so far, because the store has all of them.
struct Alike<'a> {
    store: Slot,
    workers: &'a Bits,
    held: [u32; LEVELS.len()],
}

/// Part of a page that a prompt goes through.
#[derive(Clone, Copy)]
struct Window {
    /// The first place.
    at: u32,
    /// Places.
    len: u32,
    /// Blocks of the prompt before it.
    before: u32,
}

impl Window {
    fn of(self, mask: u64) -> u64 {
        mask >> self.at & ones(self.len)
    }
}

impl<'a> Walk<'a> {
    pub(super) fn new(body: &'a Body, names: &'a [SequenceHash], out: &'a mut Overlap) -> Self {
        out.reset(body.roll.workers.len());
        Self { body, names, out, at: 0, ahead: [None; AHEAD], ahead_from: 0, alike: None }
    }

    /// Walks as far as anybody holds the prompt.
    pub(super) fn run(mut self) {
        self.walk();
        self.part();
    }

    fn walk(&mut self) {
        // The first page says whether to look further.
        let mut look_ahead_at = 1;
        while self.at < self.names.len() {
            if self.at >= look_ahead_at {
                self.look_ahead();
                look_ahead_at = self.at + AHEAD * STRIDE;
            }
            let Some((place, seen)) = self.page() else { return };
            let window = Window { at: place.at(), len: seen.len, before: self.at as u32 };
            if !self.count(&seen, window) {
                return;
            }
            self.at += seen.len as usize;
        }
    }

    /// The page that has the next block, and how much of the prompt.
    fn page(&self) -> Option<(Place, Seen)> {
        let mut guess = self.guess();
        let mut tries = 0;
        while tries < TRIES {
            let guessed = guess.take();
            tries += usize::from(guessed.is_none());
            let place = guessed.or_else(|| self.body.find(self.names[self.at].short()))?;
            let Some(page) = self.body.page(place.page()) else { continue };
            let seen = page.look(place.at(), &self.names[self.at..])?;
            if seen.len > 0 {
                page.warm();
                return Some((place, seen));
            }
        }
        None
    }

    /// Where the next block is if it lies in one page with the next that was looked for.
    fn guess(&self) -> Option<Place> {
        let between = self.at.checked_sub(self.ahead_from)?;
        let next = between.div_ceil(STRIDE);
        let place = (*self.ahead.get(next)?)?;
        let at = place.at().checked_sub((next * STRIDE - between) as u32)?;
        Some(Place::new(place.page(), at))
    }

    /// Brings near the pages that come next, and notes where they are. A page has sixty-four blocks of the prompt at most, so one
    /// of as many is in each of them.
    fn look_ahead(&mut self) {
        let names = &self.names[self.at..];
        let keys = || names.iter().step_by(STRIDE).take(AHEAD).map(|name| Key::of(name.short()));
        keys().for_each(|key| self.body.tables[key.shard].fetch(key.tag));
        self.ahead = [None; AHEAD];
        self.ahead_from = self.at;
        for (place, key) in self.ahead.iter_mut().zip(keys()) {
            *place = self.body.tables[key.shard].find(key.tag, |_| true).map(Place);
        }
        let places = self.ahead.iter().flatten();
        let pages = places.filter_map(|place| Some(self.body.page(place.page())?.touch(place.at())));
        std::hint::black_box(pages.fold(0, |sum, page| sum ^ page));
    }

    /// Counts what a page has. Whether somebody has all of it.
    fn count(&mut self, seen: &Seen, window: Window) -> bool {
        let crowd = seen.several.as_deref().and_then(|crowd| crowd.as_ref());
        let (seats, masks) = match crowd {
            Some(crowd) => (crowd.seats(), crowd.masks()),
            None => (&[seen.seat][..], &[seen.mask][..]),
        };
        match seats.last() {
            Some(last) if last.slot().is_store() && *last < Seat::SEVERAL => {
                self.count_alike(seats, masks, window).unwrap_or_else(|| {
                    self.part();
                    self.count_shared(seats, masks, window)
                })
            }
            _ => {
                self.part();
                self.count_own(seats, masks, window)
            }
        }
    }

    /// One store is among the holders, and has had everything so far. `None`: it is not so.
    fn count_alike(&mut self, seats: &[Seat], masks: &[u64], window: Window) -> Option<bool> {
        let own = seats.partition_point(|seat| !seat.slot().is_store());
        let store = seats[own].slot();
        if seats.last().is_some_and(|last| last.slot() != store) {
            return None;
        }
        if window.before == 0 {
            let workers = self.body.roll.reach.get(store.number())?;
            self.alike = Some(Alike { store, workers, held: [0; LEVELS.len()] });
        }
        if self.alike.as_ref()?.store != store {
            return None;
        }
        let mut alike = self.alike.take()?;
        let mut common = [0; LEVELS.len()];
        for (seat, mask) in seats[own..].iter().zip(&masks[own..]) {
            common[seat.level()] |= window.of(*mask);
        }
        let (run, gain) = split(|at| common[at], window.len);
        let mut goes_on = run == window.len;
        let mut at = 0;
        while at < own {
            let (slot, level, mask) = (seats[at].slot(), seats[at].level(), window.of(masks[at]));
            let worker = slot.number();
            at += 1;
            // One level, most of the time; so that nothing goes through memory, it is told apart.
            let several = at < own && seats[at].slot() == slot;
            let mut share = [0; LEVELS.len()];
            if several || !alike.workers.has(worker as u32) {
                share[level] = mask;
                while at < own && seats[at].slot() == slot {
                    share[seats[at].level()] = window.of(masks[at]);
                    at += 1;
                }
            }
            if !alike.workers.has(worker as u32) {
                goes_on |= self.settle(worker, &share, window);
                continue;
            }
            let (run, own_gain) = if several {
                split(|at| share[at] | common[at], window.len)
            } else {
                split(|at| common[at] | if at == level { mask } else { 0 }, window.len)
            };
            goes_on |= run == window.len;
            if let Some(held) = self.out.held.get_mut(worker) {
                // Less than nothing at some level, until what all have alike is added.
                for (level, held) in held.0.iter_mut().enumerate() {
                    *held = held.wrapping_add(own_gain[level]).wrapping_sub(gain[level]);
                }
            }
        }
        alike.held.iter_mut().zip(gain).for_each(|(held, gain)| *held += gain);
        self.alike = Some(alike);
        if run < window.len {
            self.part();
        }
        Some(goes_on)
    }

    /// Gives each worker what all of them had alike; from here on they are counted one by one.
    fn part(&mut self) {
        let Some(alike) = self.alike.take() else { return };
        for worker in alike.workers.iter() {
            let Some(held) = self.out.held.get_mut(worker as usize) else { continue };
            held.0.iter_mut().zip(alike.held).for_each(|(held, alike)| *held = held.wrapping_add(alike));
            self.out.depths[worker as usize] = held.run();
        }
    }

    /// Holders are workers: the levels of each come together.
    fn count_own(&mut self, seats: &[Seat], masks: &[u64], window: Window) -> bool {
        let mut goes_on = false;
        let mut rest = 0;
        while let Some(seat) = seats.get(rest) {
            let worker = seat.slot().number();
            let follows = |at: usize| seats.get(at).is_some_and(|next| next.slot() == seat.slot());
            if !follows(rest + 1) {
                // One level, most of the time.
                goes_on |= self.settle_one(worker, seat.level(), window.of(masks[rest]), window);
                rest += 1;
                continue;
            }
            let mut share = [0; LEVELS.len()];
            while rest < seats.len() && follows(rest) {
                share[seats[rest].level()] = window.of(masks[rest]);
                rest += 1;
            }
            goes_on |= self.settle(worker, &share, window);
        }
        goes_on
    }

    /// Stores are among the holders: what a store has, each worker has that reaches it.
    fn count_shared(&mut self, seats: &[Seat], masks: &[u64], window: Window) -> bool {
        let mut shares = std::mem::take(&mut self.out.shares);
        shares.clear();
        shares.resize(self.out.depths.len(), [0; LEVELS.len()]);
        for (seat, mask) in seats.iter().zip(masks) {
            let (level, mask) = (seat.level(), window.of(*mask));
            let number = seat.slot().number();
            if !seat.slot().is_store() {
                if let Some(share) = shares.get_mut(number) {
                    share[level] |= mask;
                }
            } else if let Some(reach) = self.body.roll.reach.get(number) {
                for worker in reach.iter() {
                    if let Some(share) = shares.get_mut(worker as usize) {
                        share[level] |= mask;
                    }
                }
            }
        }
        let mut goes_on = false;
        for (worker, share) in shares.iter().enumerate() {
            goes_on |= self.settle(worker, share, window);
        }
        self.out.shares = shares;
        goes_on
    }

    /// The same as [`settle`](Self::settle), where it has it at one level only.
    fn settle_one(&mut self, worker: usize, level: usize, mask: u64, window: Window) -> bool {
        let Some(depth) = self.out.depths.get_mut(worker).filter(|depth| **depth == window.before) else {
            return false;
        };
        let run = (!mask).trailing_zeros().min(window.len);
        self.out.held[worker].0[level] += run;
        *depth += run;
        run == window.len
    }

    /// Counts what one worker has of a page, if it had everything before. Whether it has all of it.
    fn settle(&mut self, worker: usize, share: &[u64; LEVELS.len()], window: Window) -> bool {
        let Some(depth) = self.out.depths.get_mut(worker).filter(|depth| **depth == window.before) else {
            return false;
        };
        let (run, gain) = split(|at| share[at], window.len);
        self.out.held[worker].0.iter_mut().zip(gain).for_each(|(held, gain)| *held += gain);
        *depth += run;
        run == window.len
    }
}

/// The leading blocks of a page that are there at some level, and how many of them are at which: the fastest that has each.
#[expect(clippy::inline_always, reason = "a thousand times per page, and the masks stay in registers")]
#[inline(always)]
fn split(share: impl Fn(usize) -> u64, len: u32) -> (u32, [u32; LEVELS.len()]) {
    let any = (0..LEVELS.len()).fold(0, |any, level| any | share(level));
    let run = (!any).trailing_zeros().min(len);
    let (mut rest, mut left, mut blocks) = (ones(run), run, [0; LEVELS.len()]);
    for (level, blocks) in blocks.iter_mut().enumerate() {
        let here = share(level) & rest;
        // Most of the time it has all that is left, or the first of them: no need to count bits.
        *blocks = match here {
            _ if here == rest => left,
            _ if here & (here + 1) == 0 => here.trailing_ones(),
            _ => here.count_ones(),
        };
        left -= *blocks;
        rest &= !here;
    }
    (run, blocks)
}
