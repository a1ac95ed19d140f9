//! The index within its budget: what it does when there are more blocks than it may know.
//!
//! It forgets, page by page. A hand goes round over all pages: one that was asked for or changed since it last came by is spared
//! once, the others go. What was forgotten counts as not held until its source announces it again or sends a snapshot:
//! never wrong, only forgetful.

use super::Index;
use super::holders::Holders;
use super::page::{Page, Warmth};
use super::sharded_table::ENTRY_BYTES;
use super::snapshot::PAGE_BYTES;
use super::source_state::{Ledger, Owner, fit};
use super::update::{Gone, digest};
use std::sync::atomic::Ordering;

/// Pages forgotten between two looks at the tables.
const BATCH: usize = 8;

impl Index {
    /// Forgets until the budget is kept, or nothing is left to forget. Answers with the pages forgotten.
    pub(super) fn trim(&self) -> usize {
        if self.fits() {
            return 0;
        }
        // Whoever is at it does it for all.
        let Ok(mut hand) = self.hand.try_lock() else { return 0 };
        let (mut forgotten, mut gone) = (0, Gone::new());
        let pages = self.body.load().shelves.pages();
        // What is left may be tables and ledgers alone.
        let enough = |gone: &Gone| self.fits() || self.locator.entries() <= gone.entries.len();
        // Twice round, everything has been cold once.
        for _ in 0..2 * pages {
            if gone.pages.len() == BATCH || enough(&gone) {
                self.bury(&gone);
                gone = Gone::new();
                if enough(&gone) {
                    break;
                }
            }
            *hand = (*hand + 1) % pages.max(1) as u32;
            forgotten += usize::from(self.forget_page(*hand, &mut gone));
        }
        self.bury(&gone);
        self.forgotten.fetch_add(forgotten as u64, Ordering::Relaxed);
        forgotten
    }

    /// Forgets a page, unless it is warm.
    fn forget_page(&self, number: u32, gone: &mut Gone) -> bool {
        let body = self.body.load();
        let Some(page) = body.page(number) else { return false };
        match page.warmth() {
            Warmth::Settling => return false,
            Warmth::Warm => {
                page.cool();
                return false;
            }
            Warmth::Cold => {}
        }
        let _turn = page.turn();
        if page.live() == 0 || page.warmth() == Warmth::Settling {
            return false;
        }
        self.strike_holders(page);
        let dead = page.set_holders(Holders::Nobody);
        gone.bury(number, page, dead);
        gone.pages.push(number);
        true
    }

    /// Takes a page's blocks off its holders' tallies. Their ledgers go on naming the page until they are [weighed](Self::weigh).
    fn strike_holders(&self, page: Page<'_>) {
        let (body, holders) = (self.body.load(), page.holders());
        self.bytes.crowds.fetch_sub(holders.bytes(), Ordering::Relaxed);
        for (seat, mask) in holders.to_vec() {
            if let Some(owner) = body.roll.by_slot(seat.slot()) {
                owner.went(seat, u64::from(mask.count_ones()), digest(page, mask));
                owner.lose();
            }
        }
    }

    fn fits(&self) -> bool {
        let budget = self.budget.load(Ordering::Relaxed);
        budget == usize::MAX || self.weight() <= budget
    }

    /// Bytes that what is known needs, spare room apart. Tables have spare room for what comes, and for what went until they shrink.
    fn weight(&self) -> usize {
        let entries = self.locator.entries() * ENTRY_BYTES;
        self.arena.used() * PAGE_BYTES + entries.max(self.bytes.tables.load(Ordering::Relaxed)) + self.bytes.apart()
    }

    /// Counts what a ledger takes, once it was changed, after clearing it of forgotten pages if they are many.
    pub(super) fn weigh(&self, owner: &Owner, ledger: &mut Ledger) {
        if owner.lost_many(ledger) {
            let body = self.body.load();
            for seat in super::seats(owner.slot) {
                let holds = |number: &u32| {
                    body.page(*number).is_some_and(|page| {
                        let _turn = page.turn();
                        page.holders().mask(seat) != 0
                    })
                };
                let pages = &mut ledger.pages[seat.level()];
                pages.retain(holds);
                fit(pages);
            }
        }
        let growth = ledger.growth();
        if growth != 0 {
            self.bytes.ledgers.fetch_add(growth, Ordering::Relaxed);
        }
    }
}
