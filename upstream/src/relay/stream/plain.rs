//! A body that is no stream: it passes unchanged, and its usage is read on the way.

use super::Usage;
use crate::relay::chunk::UsageScanner;

#[derive(Debug)]
pub(super) struct Plain(UsageScanner);

impl Plain {
    pub(super) fn new() -> Self {
        Self(UsageScanner::of_answer())
    }

    /// Reads the next part of the body.
    pub(super) fn read(&mut self, part: &[u8]) {
        self.0.push(part);
    }

    /// The usage of a whole body.
    pub(super) fn usage(&mut self) -> Option<Usage> {
        self.0.take().usage
    }
}
