//! What an event does to the pages. The caller holds the lock on the source's ledger.
//!
//! **Invariant.** Who finds a name in the tables finds it in its page. So a name is in its page before it is entered, and is
//! removed from the tables before its place can be used for another; in between, a reader takes it for absent.

use super::Index;
use super::bits::{each, ones};
use super::holders::Holders;
use super::page::{PLACES, Page, Warmth};
use super::position::Place;
use super::run::Run;
use super::sharded_table::{BATCH, Entries};
use super::source::Seat;
use super::source_state::{Ledger, Owner, fit};
use super::span::Stretch;
use kvbm::SetDigest;
use std::sync::atomic::Ordering;

/// Names that are brought near at once while looking for them.
const AHEAD: usize = 128;
/// A page is given up for another when no more places than this are live, and all were used.
const SPARSE: u32 = PLACES / 4;

impl Index {
    /// A source holds these blocks from now on.
    pub(super) fn store(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, run: Run<'_>) {
        let mut rest = run;
        while !rest.names.is_empty() {
            let (mut part, later) = rest.split(rest.names.len().min(BATCH));
            rest = later;
            if !part.chained {
                let body = self.body.load();
                part.names.iter().for_each(|name| body.fetch(*name));
            }
            let mut refused = Vec::new();
            while !part.names.is_empty() {
                let known = self.join_holders(owner, ledger, seat, part.names);
                part = part.split(known).1;
                let (fresh, later) = part.split(self.fresh(part));
                refused.extend(self.settle(owner, ledger, seat, fresh));
                part = later;
            }
            if !refused.is_empty() {
                self.store(owner, ledger, seat, Run::loose(&refused));
            }
        }
    }

    /// How many blocks are new, counted from the first. What follows a block that nobody has is new as well, most of the time;
    /// the tables refuse what is not.
    fn fresh(&self, run: Run<'_>) -> usize {
        let body = self.body.load();
        let fresh = || run.names.iter().take_while(|name| body.find(**name).is_none()).count();
        if run.chained { run.names.len() } else { fresh() }
    }

    /// A source no longer holds these blocks.
    pub(super) fn evict(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, names: &[u64]) {
        for names in names.chunks(BATCH) {
            let body = self.body.load();
            let mut gone = Gone::new();
            // Where the next name lies if a chain's pages lie side by side.
            let (mut at, mut near, mut beside) = (0, 0, ledger.gone_beside.take());
            body.fetch(names[0]);
            while at < names.len() {
                let guess = beside.take();
                if guess.is_none() && at >= near {
                    near = names.len().min(at + AHEAD);
                    names[at..near].iter().for_each(|name| body.fetch(*name));
                    body.bring_pages_near(&names[at..near]);
                }
                let Some((place, page)) = body.find_near(guess, names[at], owner.slot) else {
                    at += 1;
                    continue;
                };
                let _turn = page.turn();
                let Some(stretch) = Stretch::of(page, place, &names[at..]) else {
                    // Gone since it was looked at; where it was only guessed, the tables know.
                    at += usize::from(guess.is_none());
                    continue;
                };
                if let Some(beside) = stretch.beside.and_then(|beside| body.page(beside.page())) {
                    beside.fetch();
                }
                // While another enters its names, those beside this one may be refused yet, and then lie elsewhere.
                let whole = page.warmth() != Warmth::Settling || page.is_of(owner.slot);
                let stretch = if whole { stretch } else { Stretch::single(place.at()) };
                self.take(owner, ledger, seat, (place.page(), page), stretch.bits, &mut gone);
                (at, beside) = (at + stretch.len, stretch.beside);
            }
            ledger.gone_beside = beside;
            self.bury(&gone);
            for number in gone.sparse {
                self.repack(owner, ledger, seat, number);
            }
        }
        fit(&mut ledger.pages[seat.level()]);
        self.close_idle(owner, ledger);
    }

    /// A source holds nothing at a level any more.
    pub(super) fn empty(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat) {
        let pages: Vec<u32> = std::mem::take(&mut ledger.pages[seat.level()]).into_iter().collect();
        for numbers in pages.chunks(BATCH / PLACES as usize) {
            let body = self.body.load();
            let mut gone = Gone::new();
            for number in numbers {
                if let Some(page) = body.page(*number) {
                    let _turn = page.turn();
                    self.take(owner, ledger, seat, (*number, page), u64::MAX, &mut gone);
                }
            }
            self.bury(&gone);
        }
        self.close_idle(owner, ledger);
    }

    /// Names of what a source holds at a level.
    pub(super) fn names(&self, ledger: &Ledger, seat: Seat) -> Vec<u64> {
        let body = self.body.load();
        let mut names = Vec::new();
        for number in &ledger.pages[seat.level()] {
            let Some(page) = body.page(*number) else { continue };
            let _turn = page.turn();
            let mask = page.holders().mask(seat);
            names.extend(each(mask).map(|at| page.name(at)));
        }
        names
    }

    /// Adds a holder to blocks that are there, up to the first that is not. Answers with how many.
    fn join_holders(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, names: &[u64]) -> usize {
        let (mut known, mut next) = (0, None);
        while known < names.len() {
            let body = self.body.load();
            let Some((place, page)) = body.find_near(next, names[known], owner.slot) else { break };
            let number = place.page();
            let _turn = page.turn();
            // While another enters its names, one that lies here may yet be refused: only the table knows.
            let entered = page.warmth() != Warmth::Settling || page.is_of(owner.slot);
            let is = |at: u32, name: u64| {
                page.has(at, name) && (entered || self.body.load().find(name) == Some(Place::new(number, at)))
            };
            let here = (place.at()..PLACES).zip(&names[known..]).take_while(|(at, name)| is(*at, **name)).count();
            let mut holders = page.holders();
            let before = holders.bytes();
            let added = holders.add(seat, ones(here as u32) << place.at(), &mut ledger.joined);
            if added != 0 {
                self.crowds(before, holders.bytes());
                page.set_holders(holders);
                came(owner, ledger, seat, number, page, added);
            }
            page.warm();
            known += here;
            next = (place.at() + here as u32).checked_sub(1).and_then(|last| page.next(last));
        }
        known
    }

    /// The names in places that are entered.
    pub(super) fn names_in(&self, places: &[u32]) -> Vec<u64> {
        let body = self.body.load();
        let name = |place: Place| body.page(place.page()).map_or(0, |page| page.name(place.at()));
        places.iter().map(|place| name(Place(*place))).collect()
    }

    /// Takes blocks of one page from a holder; the caller holds the page's lock.
    pub(super) fn take(
        &self,
        owner: &Owner,
        ledger: &mut Ledger,
        seat: Seat,
        (number, page): (u32, Page<'_>),
        bits: u64,
        gone: &mut Gone,
    ) {
        let mut holders = page.holders();
        let before = holders.bytes();
        let taken = holders.take(seat, bits, &mut ledger.left);
        if taken == 0 {
            return;
        }
        let (alone, mine) = (matches!(holders, Holders::One(..)), holders.mask(seat));
        self.crowds(before, holders.bytes());
        let dead = page.set_holders(holders);
        owner.went(seat, u64::from(taken.count_ones()), digest(page, taken));
        if mine == 0 {
            ledger.pages[seat.level()].remove(&number);
        }
        gone.bury(number, page, dead);
        let live = page.live().count_ones();
        if live == 0 {
            gone.pages.push(number);
        } else if alone && mine != 0 && live <= SPARSE && page.used() == PLACES {
            gone.sparse.push(number);
        }
    }

    /// Removes names that nobody holds from the tables, and then lets go of the pages that are empty.
    pub(super) fn bury(&self, gone: &Gone) {
        self.locator.remove(
            &self.body.load(),
            &gone.entries,
            |places| self.names_in(places),
            |shard, table| self.set_table(shard, table),
        );
        let body = self.body.load();
        let retires = |number: &u32| {
            body.page(*number).is_some_and(|page| {
                let _turn = page.turn();
                page.retire()
            })
        };
        if gone.pages.is_empty() {
            return;
        }
        let retired: Vec<u32> = gone.pages.iter().copied().filter(retires).collect();
        self.arena.give(&retired, |change| self.set_chunk(change));
    }

    /// Lets go of a page, unless it has come into use again; the caller holds its lock.
    pub(super) fn discard(&self, number: u32, page: Page<'_>) {
        if page.retire() {
            self.arena.give(&[number], |change| self.set_chunk(change));
        }
    }

    /// Moves the few blocks that are left in a page, all of one holder, to where that holder's new ones go.
    fn repack(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, from: u32) {
        let sparse = |page: Page<'_>| {
            let live = page.live();
            let few = live != 0 && live.count_ones() <= SPARSE && page.used() == PLACES;
            few && page.warmth() != Warmth::Settling && page.is_held_by(seat, live)
        };
        if !self.body.load().page(from).is_some_and(sparse) {
            return;
        }
        if ledger.open.start == from {
            ledger.open.next();
        }
        let Some(to) = self.open(owner, ledger, 1) else { return };
        let body = self.body.load();
        let (Some(old), Some(new)) = (body.page(from), body.page(to)) else {
            ledger.open.next();
            return;
        };
        let _turn = old.turn();
        let Some(_second) = new.try_turn() else { return };
        if !sparse(old) {
            return;
        }
        let live = old.live();
        if !new.is_of(owner.slot) || PLACES - new.used() < live.count_ones() {
            // The next page that is given up finds a new one open.
            ledger.open.next();
            return;
        }
        let places: Vec<u32> = each(live).collect();
        let names: Vec<u64> = places.iter().map(|at| old.name(*at)).collect();
        let before = new.holders().bytes();
        let joins = (0..).zip(&places).fold(0, |joins, (to, at)| joins | u64::from(old.joins_at(*at)) << to);
        let first = new.append(seat, Run::loose(&names), joins, &mut ledger.joined);
        self.crowds(before, new.holders().bytes());
        for (to_at, at) in (first..).zip(&places) {
            self.locator.point(old.name(*at), Place::new(from, *at), Place::new(to, to_at));
        }
        old.set_holders(Holders::Nobody);
        new.set_warmth(old.warmth());
        ledger.pages[seat.level()].remove(&from);
        ledger.pages[seat.level()].insert(to);
        self.discard(from, old);
    }

    pub(super) fn crowds(&self, before: usize, after: usize) {
        if before != after {
            self.bytes.crowds.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
        }
    }
}

/// What a change left behind.
pub(super) struct Gone {
    /// Names that nobody holds any more.
    pub(super) entries: Entries,
    /// Pages without a live block.
    pub(super) pages: Vec<u32>,
    /// Pages with few.
    sparse: Vec<u32>,
}

impl Gone {
    pub(super) fn new() -> Self {
        Self { entries: Entries::new(), pages: Vec::new(), sparse: Vec::new() }
    }

    /// Nobody holds these places of a page.
    pub(super) fn bury(&mut self, number: u32, page: Page<'_>, dead: u64) {
        each(dead).for_each(|at| self.entries.push(page.name(at), Place::new(number, at)));
    }
}

/// Notes that a holder has more blocks in a page.
pub(super) fn came(owner: &Owner, ledger: &mut Ledger, seat: Seat, number: u32, page: Page<'_>, added: u64) {
    ledger.pages[seat.level()].insert(number);
    owner.came(seat, u64::from(added.count_ones()), digest(page, added));
}

/// The part of some places in a digest.
pub(super) fn digest(page: Page<'_>, places: u64) -> u64 {
    each(places).fold(0, |sum: u64, at| sum.wrapping_add(SetDigest::term(page.name(at))))
}
