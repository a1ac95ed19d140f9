//! A body that is no stream: it passes unchanged, and its usage is read on the way.

use super::Report;
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

    /// What the body says of itself up to here.
    pub(super) fn so_far(&self) -> Report {
        let found = self.0.so_far();
        Report { usage: found.usage, response_id: found.response_id, failed: false }
    }

    /// What a whole body says of itself.
    pub(super) fn report(&mut self) -> Report {
        let found = self.0.take();
        Report { usage: found.usage, response_id: found.response_id, failed: false }
    }
}
