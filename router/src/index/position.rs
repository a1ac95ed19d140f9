//! Where a block lies.

/// A block's place: its page, and where in it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Place(pub(super) u32);

impl Place {
    /// No block lies in the first page.
    pub(super) const NOWHERE: Self = Self(0);

    pub(super) fn new(page: u32, at: u32) -> Self {
        Self(page << 6 | at)
    }

    pub(super) fn page(self) -> u32 {
        self.0 >> 6
    }

    pub(super) fn at(self) -> u32 {
        self.0 & 63
    }
}
