//! A run of block hashes that are stored together.

/// Hashes of one event, or part of them.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub(super) hashes: &'a [u64],
    /// Hash of the block before the first one, if known.
    pub(super) parent: Option<u64>,
    /// Whether each block follows the one before it.
    pub(super) chained: bool,
}

impl<'a> Run<'a> {
    /// Hashes that do not follow each other, as far as is known.
    pub(super) fn unchained(hashes: &'a [u64]) -> Self {
        Self { hashes, parent: None, chained: false }
    }

    /// The first `len` hashes, and the rest.
    pub(super) fn split(self, len: usize) -> (Self, Self) {
        let (hashes, later) = self.hashes.split_at(len);
        let parent = if self.chained { hashes.last().copied().or(self.parent) } else { None };
        (Self { hashes, ..self }, Self { hashes: later, parent, ..self })
    }
}
