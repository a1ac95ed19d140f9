//! What an event does to the pages. The caller holds the lock on the source's ledger.
//!
//! **Invariant.** Who finds a name in the tables finds it in its page. So a name is in its page before it is entered, and is
//! removed from the tables before its place can be used for another; in between, a reader takes it for absent.

use super::Index;
use super::body::Place;
use super::holders::Holders;
use super::locator::Entry;
use super::owner::{Digest, Ledger, Owner, fit};
use super::page::{PLACES, Page, Warmth, ones};
use super::seat::Seat;
use std::sync::atomic::Ordering;

/// A name that comes, and the name before it in its chain, as far as that is known.
#[derive(Clone, Copy)]
pub(super) struct Piece {
    pub(super) name: u64,
    pub(super) after: Option<u64>,
}

/// Names handled at once: what they touch stays in the core's own cache.
const BATCH: usize = 128;
/// A page is given up for another when no more places than this are live, and all were used.
const SPARSE: u32 = PLACES / 4;

impl Index {
    /// A source holds these blocks from now on.
    pub(super) fn store(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, pieces: &[Piece]) {
        for pieces in pieces.chunks(BATCH) {
            let mut rest = pieces.to_vec();
            // What follows a block that nobody has is new as well, most of the time; the tables refuse what is not.
            if self.body.load().find(rest[0].name).is_none() {
                self.body.load().bring_near(rest.iter().map(|piece| piece.name));
                rest = self.settle(owner, ledger, seat, &rest);
            }
            // Another round takes somebody who entered or removed the same names meanwhile.
            while !rest.is_empty() {
                let fresh = self.join_holders(owner, ledger, seat, &rest);
                rest = self.settle(owner, ledger, seat, &fresh);
            }
        }
    }

    /// A source no longer holds these blocks.
    pub(super) fn evict(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, names: &[u64]) {
        for names in names.chunks(BATCH) {
            let body = self.body.load();
            let places = body.find_all(names);
            let found: Vec<(u64, Place)> =
                names.iter().zip(places).filter_map(|(name, place)| Some((*name, place?))).collect();
            let mut gone = Gone::default();
            for run in found.chunk_by(|(_, a), (_, b)| a.page() == b.page()) {
                let number = run[0].1.page();
                let Some(page) = body.page(number) else { continue };
                let turn = self.arena.turn(number);
                let here =
                    |bits, (name, place): &(u64, Place)| bits | u64::from(page.has(place.at(), *name)) << place.at();
                self.take(owner, ledger, seat, (number, page), run.iter().fold(0, here), &mut gone);
                drop(turn);
            }
            self.bury(&gone);
            for number in gone.sparse {
                self.repack(owner, ledger, seat, number);
            }
        }
        fit(&mut ledger.pages[seat.level()]);
    }

    /// A source holds nothing at a level any more.
    pub(super) fn empty(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat) {
        let pages: Vec<u32> = std::mem::take(&mut ledger.pages[seat.level()]).into_iter().collect();
        for numbers in pages.chunks(BATCH / 8) {
            let body = self.body.load();
            let mut gone = Gone::default();
            for number in numbers {
                if let Some(page) = body.page(*number) {
                    let _turn = self.arena.turn(*number);
                    self.take(owner, ledger, seat, (*number, page), u64::MAX, &mut gone);
                }
            }
            self.bury(&gone);
        }
    }

    /// Names of what a source holds at a level.
    pub(super) fn names(&self, ledger: &Ledger, seat: Seat) -> Vec<u64> {
        let body = self.body.load();
        let mut names = Vec::new();
        for number in &ledger.pages[seat.level()] {
            let Some(page) = body.page(*number) else { continue };
            let _turn = self.arena.turn(*number);
            let mask = page.holders().mask(seat);
            names.extend((0..PLACES).filter(|at| mask >> at & 1 == 1).map(|at| page.name(at)));
        }
        names
    }

    /// Adds a holder to blocks that are there. Answers with those that are not.
    fn join_holders(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, pieces: &[Piece]) -> Vec<Piece> {
        let body = self.body.load();
        let names: Vec<u64> = pieces.iter().map(|piece| piece.name).collect();
        let places = body.find_all(&names);
        let mut fresh = Vec::new();
        let found: Vec<(Piece, Option<Place>)> = pieces.iter().copied().zip(places).collect();
        for run in found.chunk_by(|(_, a), (_, b)| a.map(Place::page) == b.map(Place::page)) {
            let number = run[0].1.map(Place::page);
            let Some((number, page)) = number.and_then(|number| Some((number, body.page(number)?))) else {
                fresh.extend(run.iter().map(|(piece, _)| *piece));
                continue;
            };
            let _turn = self.arena.turn(number);
            // While another enters its names, one that lies here may yet be refused: only the table knows.
            let entered = page.warmth() != Warmth::Settling || page.is_of(owner.slot);
            let is = |piece: &Piece, place: Place| {
                page.has(place.at(), piece.name) && (entered || self.body.load().find(piece.name) == Some(place))
            };
            let mut bits = 0;
            for (piece, place) in run {
                match place {
                    Some(place) if is(piece, *place) => bits |= 1 << place.at(),
                    _ => fresh.push(*piece),
                }
            }
            let mut holders = page.holders();
            let before = holders.bytes();
            let added = holders.add(seat, bits);
            if added != 0 {
                self.crowds(before, holders.bytes());
                page.set_holders(holders);
                self.came(owner, ledger, seat, number, page, added);
            }
            page.warm();
        }
        fresh
    }

    /// Finds places for names that have none, and enters them. Answers with those that somebody else entered first.
    fn settle(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, fresh: &[Piece]) -> Vec<Piece> {
        let mut entries = Vec::with_capacity(fresh.len());
        let mut settling = Vec::new();
        let mut rest = fresh;
        while !rest.is_empty() {
            let Some(number) = self.open(owner, ledger) else { break };
            let body = self.body.load();
            let Some(page) = body.page(number) else {
                // It went back to the system with its chunk.
                ledger.open = None;
                continue;
            };
            let _turn = self.arena.turn(number);
            if !page.is_of(owner.slot) || page.used() >= PLACES {
                ledger.open = None;
                continue;
            }
            page.set_warmth(Warmth::Settling);
            let (now, later) = rest.split_at(rest.len().min((PLACES - page.used()) as usize));
            let before = page.holders().bytes();
            let first = page.append(seat, now.iter().map(|piece| (piece.name, piece.after)));
            self.crowds(before, page.holders().bytes());
            self.came(owner, ledger, seat, number, page, ones(now.len() as u32) << first);
            let entry = |(at, piece): (u32, &Piece)| Entry { name: piece.name, place: Place::new(number, at) };
            entries.extend((first..).zip(now).map(entry));
            settling.push(number);
            rest = later;
        }
        let same =
            |name, place: Place| self.body.load().page(place.page()).is_some_and(|page| page.has(place.at(), name));
        let refused = self.locator.enter(&entries, same, |shard, table| self.set_table(shard, table));
        self.entries.fetch_add(entries.len() - refused.len(), Ordering::Relaxed);
        let mut again = Vec::new();
        let body = self.body.load();
        for Entry { name, place } in refused {
            let Some(page) = body.page(place.page()) else { continue };
            let _turn = self.arena.turn(place.page());
            // Nobody found it here, so nobody else holds it here.
            self.take(owner, ledger, seat, (place.page(), page), 1 << place.at(), &mut Gone::default());
            again.extend(fresh.iter().find(|piece| piece.name == name));
        }
        for number in settling {
            let Some(page) = body.page(number) else { continue };
            let _turn = self.arena.turn(number);
            // Who asks for it will warm it: what nobody asks for is forgotten before what somebody did.
            page.set_warmth(Warmth::Cold);
            if page.live() == 0 {
                self.discard(number, page);
            }
        }
        again
    }

    /// A page of the source's with room in it, probably.
    fn open(&self, owner: &Owner, ledger: &mut Ledger) -> Option<u32> {
        if ledger.open.is_none() {
            let number = self.arena.take(|change| self.set_chunk(change))?;
            let body = self.body.load();
            let _turn = self.arena.turn(number);
            let page = body.page(number)?;
            page.set_warmth(Warmth::Settling);
            page.hand_to(owner.slot);
            ledger.open = Some(number);
        }
        ledger.open
    }

    /// Takes blocks of one page from a holder; the caller holds the page's lock.
    fn take(
        &self,
        owner: &Owner,
        ledger: &mut Ledger,
        seat: Seat,
        (number, page): (u32, &Page),
        bits: u64,
        gone: &mut Gone,
    ) {
        let mut holders = page.holders();
        let before = holders.bytes();
        let taken = holders.take(seat, bits);
        if taken == 0 {
            return;
        }
        let (alone, mine) = (matches!(holders, Holders::One(..)), holders.mask(seat));
        self.crowds(before, holders.bytes());
        let dead = page.set_holders(holders);
        owner.went(seat, u64::from(taken.count_ones()), digest(page, taken));
        self.memberships.fetch_sub(taken.count_ones() as usize, Ordering::Relaxed);
        if mine == 0 {
            ledger.pages[seat.level()].remove(&number);
        }
        let entry = |at| Entry { name: page.name(at), place: Place::new(number, at) };
        gone.entries.extend((0..PLACES).filter(|at| dead >> at & 1 == 1).map(entry));
        let live = page.live().count_ones();
        if live == 0 {
            gone.pages.push(number);
        } else if alone && mine != 0 && live <= SPARSE && page.used() == PLACES {
            gone.sparse.push(number);
        }
    }

    /// Removes names that nobody holds from the tables, and then lets go of the pages that are empty.
    pub(super) fn bury(&self, gone: &Gone) {
        self.locator.remove(&gone.entries, |shard, table| self.set_table(shard, table));
        self.entries.fetch_sub(gone.entries.len(), Ordering::Relaxed);
        let body = self.body.load();
        for number in &gone.pages {
            if let Some(page) = body.page(*number) {
                let _turn = self.arena.turn(*number);
                self.discard(*number, page);
            }
        }
    }

    /// Lets go of the page that a source had open, if it never came to use it.
    pub(super) fn close(&self, ledger: &mut Ledger) {
        let (Some(number), body) = (ledger.open.take(), self.body.load()) else { return };
        if let Some(page) = body.page(number) {
            let _turn = self.arena.turn(number);
            if page.live() == 0 && page.warmth() == Warmth::Settling {
                page.set_warmth(Warmth::Cold);
                self.discard(number, page);
            }
        }
    }

    /// Lets go of a page, unless it has come into use again; the caller holds its lock.
    fn discard(&self, number: u32, page: &Page) {
        if page.live() == 0 && page.in_use() && page.warmth() != Warmth::Settling {
            page.retire();
            self.arena.give(&[number], |change| self.set_chunk(change));
        }
    }

    /// Moves the few blocks that are left in a page, all of one holder, to where that holder's new ones go.
    fn repack(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, from: u32) {
        let sparse = |page: &Page| {
            let live = page.live();
            let few = live != 0 && live.count_ones() <= SPARSE && page.used() == PLACES;
            few && page.warmth() != Warmth::Settling && page.is_held_by(seat, live)
        };
        if !self.body.load().page(from).is_some_and(sparse) {
            return;
        }
        ledger.open = ledger.open.filter(|open| *open != from);
        let Some(to) = self.open(owner, ledger) else { return };
        let body = self.body.load();
        let (Some(old), Some(new)) = (body.page(from), body.page(to)) else {
            ledger.open = None;
            return;
        };
        let _turn = self.arena.turn(from);
        let Some(_second) = self.arena.try_turn(to, from) else { return };
        if !sparse(old) {
            return;
        }
        let live = old.live();
        if !new.is_of(owner.slot) || PLACES - new.used() < live.count_ones() {
            // The next page that is given up finds a new one open.
            ledger.open = None;
            return;
        }
        let places: Vec<u32> = (0..PLACES).filter(|at| live >> at & 1 == 1).collect();
        let before = new.holders().bytes();
        let names = places.iter().map(|at| (old.name(*at), at.checked_sub(1).map(|at| old.name(at))));
        let first = new.append(seat, names);
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

    /// Notes that a holder has more blocks in a page.
    fn came(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, number: u32, page: &Page, added: u64) {
        ledger.pages[seat.level()].insert(number);
        owner.came(seat, u64::from(added.count_ones()), digest(page, added));
        self.memberships.fetch_add(added.count_ones() as usize, Ordering::Relaxed);
    }

    fn crowds(&self, before: usize, after: usize) {
        self.crowd_bytes.fetch_add(after.wrapping_sub(before), Ordering::Relaxed);
    }
}

/// What a change left behind.
#[derive(Default)]
pub(super) struct Gone {
    /// Names that nobody holds any more.
    pub(super) entries: Vec<Entry>,
    /// Pages without a live block.
    pub(super) pages: Vec<u32>,
    /// Pages with few.
    sparse: Vec<u32>,
}

/// The part of some places in a digest.
pub(super) fn digest(page: &Page, places: u64) -> u64 {
    let mut rest = places;
    let mut sum = 0_u64;
    while rest != 0 {
        sum = sum.wrapping_add(Digest::of(page.name(rest.trailing_zeros())));
        rest &= rest - 1;
    }
    sum
}
