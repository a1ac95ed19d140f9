//! Names that come together, and whether they follow each other.

/// Names that come.
#[derive(Clone, Copy)]
pub(super) struct Run<'a> {
    pub(super) names: &'a [u64],
    /// The name before the first in its chain, as far as that is known.
    pub(super) after: Option<u64>,
    /// Whether each follows the one before it.
    pub(super) chained: bool,
}

impl<'a> Run<'a> {
    /// Names that do not follow each other, as far as is known.
    pub(super) fn loose(names: &'a [u64]) -> Self {
        Self { names, after: None, chained: false }
    }

    /// The first `len` of them, and the others.
    pub(super) fn split(self, len: usize) -> (Self, Self) {
        let (names, later) = self.names.split_at(len);
        let after = if self.chained { names.last().copied().or(self.after) } else { None };
        (Self { names, ..self }, Self { names: later, after, ..self })
    }
}
