//! A lookup: along a prompt from page to page, all workers at once.
//!
//! A page says for up to 64 blocks at once who holds them, a word per holder; what a worker has of them without a gap is one
//! instruction, and a worker is touched once a page.

use super::LEVELS;
use super::body::{Body, Place};
use super::locator::Key;
use super::overlap::Overlap;
use super::page::{PLACES, Seen, ones};
use super::seat::Seat;
use kvbm::SequenceHash;

/// Pages that are brought near at once: as many as a core can wait for.
const AHEAD: usize = 8;
/// A block may be moved between finding and reading it, and then be found again.
const TRIES: usize = 3;

/// The walk.
pub(super) struct Walk<'a> {
    body: &'a Body,
    names: &'a [SequenceHash],
    out: &'a mut Overlap,
    /// Blocks walked.
    at: usize,
    /// Those before this one were brought near.
    near: usize,
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
        Self { body, names, out, at: 0, near: 0 }
    }

    /// Walks as far as anybody holds the prompt.
    pub(super) fn run(mut self) {
        let mut place = None;
        while self.at < self.names.len() {
            let Some((place_now, seen)) = self.page(place.take()) else { return };
            let window = Window { at: place_now.at(), len: seen.len, before: self.at as u32 };
            if !self.count(&seen, window) {
                return;
            }
            self.at += seen.len as usize;
            if place_now.at() + seen.len == PLACES {
                self.look_ahead();
            }
        }
    }

    /// The page that has the next block, and how much of the prompt.
    fn page(&self, mut place: Option<Place>) -> Option<(Place, Seen)> {
        for _ in 0..TRIES {
            let found = place.take().or_else(|| self.body.find(self.names[self.at].short()))?;
            let page = self.body.page(found.page())?;
            let seen = page.look(found.at(), &self.names[self.at..])?;
            if seen.len > 0 {
                page.warm();
                return Some((found, seen));
            }
        }
        None
    }

    /// Brings near the pages that come next if the prompt goes on as it does most of the time: from the first place of one
    /// page to the first of another.
    fn look_ahead(&mut self) {
        if self.at < self.near || self.at + PLACES as usize >= self.names.len() {
            return;
        }
        let next =
            || self.names[self.at..].iter().step_by(PLACES as usize).take(AHEAD).map(|name| Key::of(name.short()));
        let near = next().fold(0, |sum, key| sum ^ self.body.tables[key.shard].touch(key.tag));
        let pages = next().filter_map(|key| {
            let place = Place(self.body.tables[key.shard].find(key.tag, |_| true)?);
            Some(self.body.page(place.page())?.touch(place.at()))
        });
        std::hint::black_box(pages.fold(near, |sum, page| sum ^ page));
        self.near = self.at + AHEAD * PLACES as usize;
    }

    /// Counts what a page has. Whether somebody has all of it.
    fn count(&mut self, seen: &Seen, window: Window) -> bool {
        let crowd = seen.several.as_deref().and_then(|crowd| crowd.as_ref());
        let (seats, masks) = match crowd {
            Some(crowd) => (crowd.seats(), crowd.masks()),
            None => (&[seen.seat][..], &[seen.mask][..]),
        };
        match seats.last() {
            Some(last) if last.slot().is_store() && *last < Seat::SEVERAL => self.count_shared(seats, masks, window),
            _ => self.count_own(seats, masks, window),
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
        let any = share.iter().fold(0, |any, mask| any | mask);
        let run = (!any).trailing_zeros().min(window.len);
        let mut rest = ones(run);
        for (blocks, mask) in self.out.held[worker].0.iter_mut().zip(share) {
            if mask & rest == rest {
                // All that is left, most of the time: no need to count bits.
                *blocks += if rest == ones(run) { run } else { rest.count_ones() };
                break;
            }
            *blocks += (mask & rest).count_ones();
            rest &= !mask;
        }
        *depth += run;
        run == window.len
    }
}
