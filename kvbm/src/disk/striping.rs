//! Which path takes the next blocks. Pure.
//!
//! Blocks that follow each other stay together for two megabytes, so that reads are long; then the next path has its turn,
//! so that one prefix is read from all of them at once. Turns are in proportion to the budgets: the paths' logs come
//! round at the same time, and a prefix does not lose its parts one path after the other.

/// What stays together: as much as one read takes.
const UNIT: u64 = super::load::READ;

/// Whose turn it is: smooth weighted round robin over the paths that take blocks.
#[derive(Default)]
pub(super) struct Spread {
    credits: Vec<i128>,
    turn: Option<usize>,
    left: u64,
}

impl Spread {
    /// A path for a block of so many bytes, of those with a weight; `None` when there is none.
    pub(super) fn next(&mut self, bytes: u64, weights: &[Option<u64>]) -> Option<usize> {
        let open = |path: usize| weights[path].is_some();
        if let Some(turn) = self.turn.filter(|turn| self.left > 0 && open(*turn)) {
            self.left = self.left.saturating_sub(bytes);
            return Some(turn);
        }
        self.credits.resize(weights.len(), 0);
        let mut total = 0;
        for (credit, weight) in self.credits.iter_mut().zip(weights) {
            let weight = i128::from(weight.unwrap_or(0));
            *credit += weight;
            total += weight;
        }
        // The first of equals.
        let next = (0..weights.len()).filter(|path| open(*path)).rev().max_by_key(|path| self.credits[*path])?;
        self.credits[next] -= total;
        self.turn = Some(next);
        self.left = UNIT.saturating_sub(bytes);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_stay_together_for_a_unit_and_every_path_gets_its_turn() {
        let mut spread = Spread::default();
        let paths = [Some(7), Some(7), Some(7)];
        let turns: Vec<_> = (0..24).map(|_| spread.next(UNIT / 4, &paths).unwrap()).collect();
        let turn = |path| [path; 4];
        assert_eq!(turns, [turn(0), turn(1), turn(2), turn(0), turn(1), turn(2)].concat());
    }

    #[test]
    fn turns_are_in_proportion_to_budgets() {
        let mut spread = Spread::default();
        let turns: Vec<_> = (0..8).map(|_| spread.next(UNIT, &[Some(300), Some(100)]).unwrap()).collect();
        assert_eq!(turns, [0, 0, 1, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn a_path_that_takes_nothing_is_passed_over_and_gets_no_more_than_its_share_later() {
        let mut spread = Spread::default();
        let (both, second) = ([Some(1), Some(1)], [None, Some(1)]);
        assert_eq!(spread.next(1, &both), Some(0));
        assert!((0..50).all(|_| spread.next(UNIT, &second) == Some(1)), "at once, also within a turn");
        let later: usize = (0..50).map(|_| spread.next(UNIT, &both).unwrap()).sum();
        assert!((24..=26).contains(&later), "{later}");
        assert_eq!(spread.next(1, &[None, None]), None);
    }
}
