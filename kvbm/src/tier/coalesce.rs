//! Neighbouring blocks of one file or object, read in one go. Pure.

/// Where a wanted block lies, and for which index of the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Wanted {
    pub(crate) index: usize,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// Wanted blocks in the order of their offsets, and close enough to be read together.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Run {
    pub(crate) wanted: Vec<Wanted>,
}

impl Run {
    pub(crate) fn start(&self) -> u64 {
        self.wanted[0].offset
    }

    pub(crate) fn end(&self) -> u64 {
        self.wanted.last().map_or(0, |last| last.offset + last.length)
    }
}

/// Joins neighbours: a gap up to `gap` is cheaper to read than to skip, and a run ends at `limit` bytes so that several
/// are under way at once and the first blocks arrive early.
pub(crate) fn runs(mut wanted: Vec<Wanted>, gap: u64, limit: u64) -> Vec<Run> {
    wanted.sort_unstable_by_key(|w| (w.offset, w.index));
    let mut runs: Vec<Run> = Vec::new();
    for next in wanted {
        match runs.last_mut() {
            // The same block wanted twice starts a run of its own: runs never read a byte twice.
            Some(run)
                if next.offset >= run.end()
                    && next.offset - run.end() <= gap
                    && next.offset + next.length - run.start() <= limit =>
            {
                run.wanted.push(next);
            }
            _ => runs.push(Run { wanted: vec![next] }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(places: &[(u64, u64)]) -> Vec<Vec<usize>> {
        let wanted = places.iter().enumerate().map(|(index, &(offset, length))| Wanted { index, offset, length });
        let indices = |run: &Run| run.wanted.iter().map(|w| w.index).collect();
        runs(wanted.collect(), 10, 100).iter().map(indices).collect()
    }

    #[test]
    fn neighbours_join_whatever_order_they_were_asked_in() {
        assert_eq!(of(&[(60, 20), (0, 30), (30, 30)]), [[1, 2, 0]]);
    }

    #[test]
    fn a_wide_gap_a_full_run_and_a_repeated_block_each_begin_another_run() {
        assert_eq!(of(&[(0, 10), (20, 10)]), vec![vec![0, 1]]);
        assert_eq!(of(&[(0, 10), (21, 10)]), [[0], [1]]);
        assert_eq!(of(&[(0, 60), (60, 60)]), [[0], [1]]);
        assert_eq!(of(&[(0, 10), (0, 10)]), [[0], [1]]);
        assert_eq!(of(&[(0, 1000)]), [[0]], "a block longer than a run is one");
        assert_eq!(of(&[]), Vec::<Vec<usize>>::new());
    }
}
