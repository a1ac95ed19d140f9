//! The position of a block: a page and an offset in it.

/// The position of a block.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Position(pub(super) u32);

impl Position {
    /// Page 0 is never used.
    pub(super) const NONE: Self = Self(0);

    pub(super) fn new(page: u32, at: u32) -> Self {
        Self(page << 6 | at)
    }

    pub(super) fn page(self) -> u32 {
        self.0 >> 6
    }

    pub(super) fn offset(self) -> u32 {
        self.0 & 63
    }
}
