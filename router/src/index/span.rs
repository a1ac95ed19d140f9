//! Names that go together, and lie in one page: what an engine gives up is a part of a chain, most of the time.

use super::bits::ones;
use super::page::{PLACES, Page};
use super::position::Place;

/// A run of names in one page.
pub(super) struct Stretch {
    pub(super) bits: u64,
    /// How many of the names.
    pub(super) len: usize,
    /// Where the next probably lies, also one of a later event that goes on where this one ends.
    pub(super) beside: Option<Place>,
}

impl Stretch {
    /// The names that lie in the page from a place on; `None` if not even the first does. A chain is given up from its end, most
    /// of the time, so they may lie in either order.
    pub(super) fn of(page: Page<'_>, first: Place, names: &[u64]) -> Option<Self> {
        let at = first.at();
        if !page.has(at, names[0]) {
            return None;
        }
        let live = page.live();
        let has = |(at, name): (u32, &u64)| live >> at & 1 == 1 && page.name(at) == *name;
        let up = 1 + (at + 1..PLACES).zip(&names[1..]).take_while(|place| has(*place)).count() as u32;
        if up > 1 {
            let beside = match at + up {
                after if after < PLACES && names.len() == up as usize => Some(Place::new(first.page(), after)),
                after => page.next(after - 1),
            };
            return Some(Self { bits: ones(up) << at, len: up as usize, beside });
        }
        let down = 1 + (0..at).rev().zip(&names[1..]).take_while(|place| has(*place)).count() as u32;
        let beside = match (at + 1).checked_sub(down + 1) {
            Some(before) => (names.len() == down as usize).then(|| Place::new(first.page(), before)),
            None => first.page().checked_sub(1).map(|page| Place::new(page, PLACES - 1)),
        };
        Some(Self { bits: ones(down) << (at + 1 - down), len: down as usize, beside })
    }

    /// One name alone.
    pub(super) fn single(at: u32) -> Self {
        Self { bits: 1 << at, len: 1, beside: None }
    }
}
