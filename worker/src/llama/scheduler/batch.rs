//! Which rows one step computes: a pure function.
//!
//! Every decoding sequence gets its one row; the rest of the token budget goes to prompts in order of arrival. A prompt
//! whose next block is being computed by an earlier one in the same step waits: in the next step it finds the block in
//! the cache instead of computing it again.

use kvbm::SequenceHash;
use std::collections::HashSet;

/// The state of one running sequence that the choice depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct Candidate {
    /// Tokens that are known and not computed yet.
    pub(super) pending: usize,
    /// How many tokens of the unfinished block are computed.
    pub(super) offset: usize,
    /// The hash of the first block that the next rows complete, when all its tokens are known.
    pub(super) next_hash: Option<SequenceHash>,
    /// Rows until the next block that was loaded meanwhile and need not be computed.
    pub(super) rows_to_cached_block: usize,
    /// The sequence waits for onboarding, or its client reads too slowly; computing more would only pile up tokens.
    pub(super) stalled: bool,
}

/// Rows of one sequence in the step.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Rows {
    /// Index of the candidate.
    pub(super) index: usize,
    /// How many of its pending tokens are computed.
    pub(super) count: usize,
}

/// Chooses the rows of the next step. `budget` bounds the prompt tokens of a step, and with them the time between two
/// tokens of a decoding sequence. A prompt that does not fit the budget stops at the end of a block, where a cached
/// block can follow.
pub(super) fn choose(candidates: &[Candidate], budget: usize, block_size: usize) -> Vec<Rows> {
    let mut left = budget;
    let mut being_computed = HashSet::new();
    let mut rows = Vec::with_capacity(candidates.len());
    for (index, candidate) in candidates.iter().enumerate() {
        let count = match candidate.pending {
            _ if candidate.stalled => 0,
            0 | 1 => candidate.pending,
            _ if candidate.next_hash.is_some_and(|hash| !being_computed.insert(hash)) => 0,
            pending => {
                let max = left.min(candidate.rows_to_cached_block);
                let count = if pending <= max { pending } else { whole_blocks(candidate.offset, max, block_size) };
                left -= count;
                count
            }
        };
        if count > 0 {
            rows.push(Rows { index, count });
        }
    }
    rows
}

/// The largest number of rows, at most `left`, that ends with a block when `offset` tokens of the first block are
/// computed.
fn whole_blocks(offset: usize, left: usize, block_size: usize) -> usize {
    ((offset + left) / block_size * block_size).saturating_sub(offset)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn candidate(pending: usize, next: u8) -> Candidate {
        Candidate {
            pending,
            offset: 0,
            next_hash: Some(SequenceHash::from_bytes([next; 16])),
            rows_to_cached_block: usize::MAX,
            stalled: false,
        }
    }

    #[test]
    fn decoding_sequences_always_get_their_row() {
        let rows = choose(&[candidate(900, 1), candidate(1, 2), candidate(700, 3), candidate(1, 4)], 512, 16);
        let want = [(0, 512), (1, 1), (3, 1)].map(|(index, count)| Rows { index, count });
        assert_eq!(rows, want);
    }

    #[test]
    fn the_rest_of_the_budget_goes_to_the_next_prompt() {
        let rows = choose(&[candidate(100, 1), candidate(700, 3)], 512, 16);
        assert_eq!(rows[1], Rows { index: 1, count: 400 });
    }

    #[test]
    fn a_block_is_computed_by_one_sequence_at_a_time() {
        let rows = choose(&[candidate(100, 1), candidate(100, 1), candidate(100, 2)], 512, 16);
        assert_eq!(rows.iter().map(|r| r.index).collect::<Vec<_>>(), [0, 2]);
    }

    #[test]
    fn a_prompt_stops_before_loaded_blocks() {
        let met = Candidate { rows_to_cached_block: 48, ..candidate(900, 1) };
        let rows = choose(&[met, candidate(700, 3)], 512, 16);
        assert_eq!(rows, [(0, 48), (1, 464)].map(|(index, count)| Rows { index, count }));
    }

    #[test]
    fn chunks_end_with_a_block() {
        assert_eq!(whole_blocks(5, 100, 16), 91);
        assert_eq!(whole_blocks(0, 15, 16), 0);
    }

    #[test]
    fn a_stalled_sequence_gets_no_rows() {
        let stalled = Candidate { stalled: true, ..candidate(1, 1) };
        assert!(choose(&[stalled], 512, 16).is_empty());
    }
}
