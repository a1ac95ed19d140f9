//! What decisions know of the workers of a model, kept from one decision to the next.
//!
//! A desk is written anew once its worker's books have changed, or say something else because time has passed: a few of a
//! thousand at each decision. A decision keeps all of them until it is made, explained and booked, so what explains it is
//! what made it.

use super::books::{Books, Glance};
use super::estimate::Pace;
use super::stats::{Known, Spread, Standing, Typical};
use super::timestamp::Moment;

/// All desks, by seat.
#[derive(Default)]
pub(crate) struct Desks {
    stamps: Vec<Stamp>,
    all: Vec<Desk>,
    /// Prompts that wait, at all of them.
    prompts: u64,
    /// What stands in for what some have not measured.
    typical: Typical,
}

/// What is known of the worker in a seat. What every decision reads of everybody lies on its first cache line, and what it
/// reads of those who have something to bring up on the next.
#[derive(Clone, Copy, PartialEq, Debug)]
#[repr(C, align(64))]
pub(crate) struct Desk {
    /// Better left alone while others are there.
    pub(crate) avoided: bool,
    /// When it was last chosen, in choices; 0 is never.
    pub(crate) chosen: u64,
    /// How it keeps pace, with means of the others where it has measured nothing.
    pub(crate) pace: Pace,
    /// Which speeds it has measured itself.
    known: Known,
    /// What its books say.
    pub(crate) standing: Standing,
}

/// What a desk was written from: these books, and until then.
#[derive(Clone, Copy)]
struct Stamp {
    version: u32,
    until: u64,
}

impl Stamp {
    /// Nothing was written yet.
    const BLANK: Self = Self { version: 0, until: 0 };
}

impl Desks {
    /// Brings them up to date.
    pub(crate) fn catch_up<'a>(&mut self, books: impl ExactSizeIterator<Item = &'a Books>, now: Moment) {
        self.stamps.resize(books.len(), Stamp::BLANK);
        self.all.resize(books.len(), Desk::default());
        let mut measured = false;
        for (at, (books, stamp)) in books.zip(&mut self.stamps).enumerate() {
            let version = books.version();
            if version == stamp.version && now.bits() < stamp.until {
                continue;
            }
            // What changes from here on raises the version again.
            let glance = books.glance(now);
            *stamp = Stamp { version, until: glance.until.map_or(u64::MAX, Moment::bits) };
            let desk = &mut self.all[at];
            measured |= glance.known != desk.known;
            self.prompts += u64::from(glance.standing.prompts);
            self.prompts -= u64::from(desk.standing.prompts);
            *desk = Desk::of(&glance, &self.typical);
        }
        self.keep_typical(measured, now);
    }

    /// Prompts that wait at a worker, on average.
    pub(crate) fn prompts_typical(&self) -> f64 {
        self.prompts as f64 / self.all.len().max(1) as f64
    }

    #[inline]
    pub(crate) fn all(&self) -> &[Desk] {
        &self.all
    }

    /// `measured`: others may have measured other things than before.
    fn keep_typical(&mut self, measured: bool, now: Moment) {
        let Self { all, typical, .. } = self;
        let mut spread = typical.spread();
        if measured {
            spread = Spread::default();
            for desk in all.iter() {
                spread.add(desk.known);
            }
        }
        if typical.keep_up(spread, now, || all.iter().map(|desk| desk.standing.speeds)) {
            for desk in all.iter_mut() {
                desk.pace = pace(desk.standing, desk.known, typical);
            }
        }
    }
}

impl Desk {
    fn of(glance: &Glance, typical: &Typical) -> Self {
        let Glance { standing, known, avoided, chosen, .. } = *glance;
        Self { pace: pace(standing, known, typical), chosen, avoided, known, standing }
    }
}

/// With means where it has measured nothing and others have.
fn pace(mut standing: Standing, known: Known, typical: &Typical) -> Pace {
    typical.fill(known, &mut standing.speeds);
    Pace::of(&standing)
}

impl Default for Desk {
    fn default() -> Self {
        let standing = Standing::default();
        Self { pace: Pace::of(&standing), chosen: 0, avoided: false, known: Known::default(), standing }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hash::splitmix64;
    use crate::load::books::Amount;
    use crate::load::stats::MEANS_STAND;
    use std::collections::HashSet;
    use std::time::Duration;
    use tokio::time::Instant;
    use worker::plane::Load;

    /// All that decisions see of a fleet: from new desks.
    fn anew(fleet: &[Books], now: Instant) -> Desks {
        let mut desks = Desks::default();
        desks.catch_up(fleet.iter(), now.into());
        desks
    }

    #[test]
    fn desks_that_were_kept_say_what_new_ones_would() {
        let (fleet, mut kept) = ((0..8).map(|_| Books::default()).collect::<Vec<_>>(), Desks::default());
        let (start, mut open, mut avoided) = (Instant::now(), Vec::new(), HashSet::new());
        for round in 0..1_000 {
            let draw = splitmix64(round);
            // So slowly that reports grow old, and means are worked out anew each time.
            let now = start + 2 * MEANS_STAND * round as u32;
            let books = &fleet[(draw % 8) as usize];
            match draw >> 8 & 7 {
                0 => books.report(
                    Load {
                        running: (draw >> 16 & 15) as u32,
                        waiting_tokens: draw >> 20 & 4095,
                        total_blocks: 100,
                        prefill_tokens_per_second: (draw >> 32 & 1 == 0).then_some(500.0 + (draw >> 40 & 511) as f64),
                        decode_step_seconds: Some(0.01),
                        ..Load::default()
                    },
                    now,
                ),
                1 | 2 => {
                    open.push((books, books.book(Amount { prefill_tokens: 99, prompts: 1, ..Amount::default() }, now)));
                }
                3 => open.drain(..open.len().min(2)).for_each(|(books, number)| books.release(number, now)),
                4 => books.choose(round),
                5 => books.rest_until(Some(Moment::from(now + Duration::from_millis(draw >> 16 & 2047)))),
                _ => {}
            }
            kept.catch_up(fleet.iter(), now.into());
            let new = anew(&fleet, now);
            assert_eq!((&kept.all, kept.prompts), (&new.all, new.prompts), "round {round}");
            avoided.extend(kept.all.iter().map(|desk| desk.avoided));
        }
        assert_eq!(avoided.len(), 2, "some were silent or rested");
    }
}
