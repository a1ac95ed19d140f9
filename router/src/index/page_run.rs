//! A run of hashes within one page. Engines mostly evict parts of a chain.

use super::bits::ones;
use super::page::{PAGE_BLOCKS, Page};
use super::position::Position;

/// A run of hashes in one page.
pub(super) struct PageRun {
    pub(super) bits: u64,
    /// Number of hashes.
    pub(super) len: usize,
    /// Predicted position of the next hash, also if that comes with a later event.
    pub(super) predicted: Option<Position>,
}

impl PageRun {
    /// The run of hashes that starts at a position; `None` if the first is not there. Engines mostly evict a chain from
    /// its end, so the hashes may be in ascending or descending order.
    pub(super) fn of(page: Page<'_>, first: Position, hashes: &[u64]) -> Option<Self> {
        let at = first.offset();
        if !page.has(at, hashes[0]) {
            return None;
        }
        let live = page.live();
        let has = |(at, hash): (u32, &u64)| live >> at & 1 == 1 && page.hash(at) == *hash;
        let up = 1 + (at + 1..PAGE_BLOCKS).zip(&hashes[1..]).take_while(|position| has(*position)).count() as u32;
        if up > 1 {
            let predicted = match at + up {
                after if after < PAGE_BLOCKS && hashes.len() == up as usize => Some(Position::new(first.page(), after)),
                after => page.successor(after - 1),
            };
            return Some(Self { bits: ones(up) << at, len: up as usize, predicted });
        }
        let down = 1 + (0..at).rev().zip(&hashes[1..]).take_while(|position| has(*position)).count() as u32;
        let predicted = match (at + 1).checked_sub(down + 1) {
            Some(before) => (hashes.len() == down as usize).then(|| Position::new(first.page(), before)),
            None => first.page().checked_sub(1).map(|page| Position::new(page, PAGE_BLOCKS - 1)),
        };
        Some(Self { bits: ones(down) << (at + 1 - down), len: down as usize, predicted })
    }

    /// A single hash.
    pub(super) fn single(at: u32) -> Self {
        Self { bits: 1 << at, len: 1, predicted: None }
    }
}
