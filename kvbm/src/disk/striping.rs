//! Chooses the path of each block. Pure.
//!
//! Consecutive blocks stay together for two megabytes, so that reads are long; then the next path follows, so that
//! one prefix is read from all paths at once. Paths are chosen in proportion to their capacities, so that all logs
//! reclaim at the same rate and a prefix does not lose its parts at different times.

/// Bytes that stay on one path: the length of one read.
const STRIPE_BYTES: u64 = super::load::MAX_READ_BYTES;

/// Smooth weighted round robin (as in nginx) over the paths that accept blocks.
#[derive(Default)]
pub(super) struct Striper {
    credits: Vec<i128>,
    current: Option<usize>,
    left: u64,
}

impl Striper {
    /// The path of a block of `bytes` payload bytes, among those with a weight; `None` when there is none.
    pub(super) fn next(&mut self, bytes: u64, weights: &[Option<u64>]) -> Option<usize> {
        let open = |path: usize| weights[path].is_some();
        if let Some(current) = self.current.filter(|current| self.left > 0 && open(*current)) {
            self.left = self.left.saturating_sub(bytes);
            return Some(current);
        }
        self.credits.resize(weights.len(), 0);
        let mut total = 0;
        for (credit, weight) in self.credits.iter_mut().zip(weights) {
            let weight = i128::from(weight.unwrap_or(0));
            *credit += weight;
            total += weight;
        }
        // Of equal credits, the first path.
        let next = (0..weights.len()).filter(|path| open(*path)).rev().max_by_key(|path| self.credits[*path])?;
        self.credits[next] -= total;
        self.current = Some(next);
        self.left = STRIPE_BYTES.saturating_sub(bytes);
        Some(next)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_path_gets_one_stripe_in_turn() {
        let mut striper = Striper::default();
        let paths = [Some(7), Some(7), Some(7)];
        let turns: Vec<_> = (0..24).map(|_| striper.next(STRIPE_BYTES / 4, &paths).unwrap()).collect();
        let turn = |path| [path; 4];
        assert_eq!(turns, [turn(0), turn(1), turn(2), turn(0), turn(1), turn(2)].concat());
    }

    #[test]
    fn stripes_are_in_proportion_to_capacities() {
        let mut striper = Striper::default();
        let turns: Vec<_> = (0..8).map(|_| striper.next(STRIPE_BYTES, &[Some(300), Some(100)]).unwrap()).collect();
        assert_eq!(turns, [0, 0, 1, 0, 0, 0, 1, 0]);
    }

    #[test]
    fn a_skipped_path_gets_no_extra_share_later() {
        let mut striper = Striper::default();
        let (both, second) = ([Some(1), Some(1)], [None, Some(1)]);
        assert_eq!(striper.next(1, &both), Some(0));
        assert!((0..50).all(|_| striper.next(STRIPE_BYTES, &second) == Some(1)), "at once, also within a stripe");
        let later: usize = (0..50).map(|_| striper.next(STRIPE_BYTES, &both).unwrap()).sum();
        assert!((24..=26).contains(&later), "{later}");
        assert_eq!(striper.next(1, &[None, None]), None);
    }
}
