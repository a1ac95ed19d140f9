//! Coalescing of reads: blocks that are close to each other in a file or object are read together. Pure.

/// Byte range of a requested block, and its index in the request.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct BlockRange {
    pub(crate) index: usize,
    pub(crate) offset: u64,
    pub(crate) length: u64,
}

/// Blocks that are read together, in the order of their offsets.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct ReadRun {
    pub(crate) blocks: Vec<BlockRange>,
}

impl ReadRun {
    pub(crate) fn start(&self) -> u64 {
        self.blocks[0].offset
    }

    pub(crate) fn end(&self) -> u64 {
        self.blocks.last().map_or(0, |last| last.offset + last.length)
    }
}

/// Joins adjacent ranges. A gap of up to `gap` bytes is read too, as that is cheaper than another read. A read has at
/// most `limit` bytes unless one block is larger, so that several reads run concurrently and the first blocks arrive
/// early.
pub(crate) fn coalesce(mut wanted: Vec<BlockRange>, gap: u64, limit: u64) -> Vec<ReadRun> {
    wanted.sort_unstable_by_key(|w| (w.offset, w.index));
    let mut reads: Vec<ReadRun> = Vec::new();
    for next in wanted {
        match reads.last_mut() {
            // A block that is requested twice starts another read: no read contains a byte twice.
            Some(read)
                if next.offset >= read.end()
                    && next.offset - read.end() <= gap
                    && next.offset + next.length - read.start() <= limit =>
            {
                read.blocks.push(next);
            }
            _ => reads.push(ReadRun { blocks: vec![next] }),
        }
    }
    reads
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read_indices(ranges: &[(u64, u64)]) -> Vec<Vec<usize>> {
        let wanted = ranges.iter().enumerate().map(|(index, &(offset, length))| BlockRange { index, offset, length });
        let indices = |read: &ReadRun| read.blocks.iter().map(|w| w.index).collect();
        coalesce(wanted.collect(), 10, 100).iter().map(indices).collect()
    }

    #[test]
    fn neighbours_are_joined_in_any_order_of_the_request() {
        assert_eq!(read_indices(&[(60, 20), (0, 30), (30, 30)]), [[1, 2, 0]]);
    }

    #[test]
    fn gaps_the_limit_and_repeated_blocks_begin_another_read() {
        assert_eq!(read_indices(&[(0, 10), (20, 10)]), vec![vec![0, 1]]);
        assert_eq!(read_indices(&[(0, 10), (21, 10)]), [[0], [1]]);
        assert_eq!(read_indices(&[(0, 60), (60, 60)]), [[0], [1]]);
        assert_eq!(read_indices(&[(0, 10), (0, 10)]), [[0], [1]]);
        assert_eq!(read_indices(&[(0, 1000)]), [[0]], "a block above the limit is one read");
        assert_eq!(read_indices(&[]), Vec::<Vec<usize>>::new());
    }
}
