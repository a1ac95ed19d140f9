//! Where names go that have no place yet, and which pages a source keeps for those to come.
//!
//! First to where their chain ends so far, if there is room after it; else, if they are many, to a page of their own, so that what
//! follows them finds room beside them; else behind whatever came last.

use super::Index;
use super::bits::ones;
use super::page::{PLACES, Page, Warmth};
use super::position::Place;
use super::run::Run;
use super::sharded_table::{Entries, Entry};
use super::snapshot::Body;
use super::source::{Seat, Slot};
use super::source_state::{Ledger, Owner};
use super::update::{Gone, came};

/// A source has so many times as many pages as are kept for its next blocks.
const SPARE: usize = 16;
/// So many new blocks begin in a page of their own, so that what follows them finds room beside them.
const APART: usize = 16;

impl Index {
    /// Finds places for names that have none, and enters them. Answers with those that somebody else entered first.
    pub(super) fn settle(&self, owner: &Owner, ledger: &mut Ledger, seat: Seat, fresh: Run<'_>) -> Vec<u64> {
        if fresh.names.is_empty() {
            return Vec::new();
        }
        let mut entries = Entries::new();
        let mut settling = Vec::new();
        let mut rest = fresh;
        // First to where their chain ends so far, if there is room after it.
        let mut tail = fresh.after.and_then(|after| self.body.load().find(after)).map(Place::page);
        while !rest.names.is_empty() {
            let beside = tail.take();
            let Some(number) = beside.or_else(|| self.open(owner, ledger, rest.names.len())) else { break };
            let body = self.body.load();
            // Its chunk may have gone back to the system.
            let page = body.page(number);
            let _turn = page.as_ref().map(Page::turn);
            let takes = |page: &Page<'_>| {
                let goes_on = page.used().checked_sub(1).is_none_or(|last| rest.after == Some(page.name(last)));
                let joins = goes_on || beside.is_none() && rest.names.len() < APART;
                page.is_of(owner.slot) && page.used() < PLACES && joins
            };
            let Some(page) = page.filter(takes) else {
                if beside.is_none() {
                    ledger.open.next();
                }
                continue;
            };
            page.set_warmth(Warmth::Settling);
            let (now, later) = rest.split(rest.names.len().min((PLACES - page.used()) as usize));
            let before = page.holders().bytes();
            let joins = if now.chained { !1 } else { 0 };
            let first = page.append(seat, now, joins, &mut ledger.joined);
            self.crowds(before, page.holders().bytes());
            if let Some(after) = now.after.filter(|_| !page.joins_at(first)) {
                lead(&body, entries.last(), after, Place::new(number, first));
            }
            came(owner, ledger, seat, number, page, ones(now.names.len() as u32) << first);
            (first..).zip(now.names).for_each(|(at, name)| entries.push(*name, Place::new(number, at)));
            settling.push(number);
            rest = later;
        }
        let same =
            |name, place: Place| self.body.load().page(place.page()).is_some_and(|page| page.has(place.at(), name));
        let refused = self.locator.enter(
            &self.body.load(),
            &entries,
            same,
            |places| self.names_in(places),
            |shard, table| self.set_table(shard, table),
        );
        let body = self.body.load();
        for Entry { place, .. } in &refused {
            let Some(page) = body.page(place.page()) else { continue };
            let _turn = page.turn();
            // Nobody found it here, so nobody else holds it here.
            self.take(owner, ledger, seat, (place.page(), page), 1 << place.at(), &mut Gone::new());
        }
        for number in settling {
            let Some(page) = body.page(number) else { continue };
            let _turn = page.turn();
            // Who asks for it will warm it: what nobody asks for is forgotten before what somebody did.
            page.set_warmth(Warmth::Cold);
            self.discard(number, page);
        }
        refused.into_iter().map(|entry| entry.name).collect()
    }

    /// A page of the source's with room in it, probably; one after the other, as many as so many names will want.
    pub(super) fn open(&self, owner: &Owner, ledger: &mut Ledger, names: usize) -> Option<u32> {
        if ledger.open.is_empty() {
            // Those to come as well, so that a long chain lies together: a small part of what the source has.
            let wanted = names.div_ceil(PLACES as usize).max(owner.blocks() / PLACES as usize / SPARE);
            let numbers = self.arena.take(wanted, |change| self.set_chunk(change))?;
            let body = self.body.load();
            for number in numbers.clone() {
                let page = body.page(number)?;
                let _turn = page.turn();
                page.set_warmth(Warmth::Settling);
                page.hand_to(owner.slot);
            }
            ledger.open = numbers;
        }
        Some(ledger.open.start)
    }

    /// A source that holds nothing keeps no pages for what may come.
    pub(super) fn close_idle(&self, owner: &Owner, ledger: &mut Ledger) {
        if owner.blocks() == 0 {
            self.close(owner.slot, ledger);
        }
    }

    /// Lets go of the pages that a source had open, where it never came to use them.
    pub(super) fn close(&self, owner: Slot, ledger: &mut Ledger) {
        let body = self.body.load();
        for number in std::mem::take(&mut ledger.open) {
            let Some(page) = body.page(number) else { continue };
            let _turn = page.turn();
            // It may be another's by now.
            if page.live() == 0 && page.warmth() == Warmth::Settling && page.is_of(owner) {
                page.set_warmth(Warmth::Cold);
                self.discard(number, page);
            }
        }
    }
}

/// Notes in the page of a block where the chain goes on. The block was entered just now, or long ago.
fn lead(body: &Body, entered: Option<&Entry>, block: u64, next: Place) {
    let place = entered.map(|entry| entry.place).or_else(|| body.find(block));
    if let Some((place, page)) = place.and_then(|place| Some((place, body.page(place.page())?))) {
        page.goes_on(place.at(), next);
    }
}
