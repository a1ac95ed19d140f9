//! Continuous batching: from accepted requests to streams of tokens, over one model and one block manager.

mod batch;
mod prefix;
mod run;
mod sequence;
mod stats;
mod step;

pub(super) use prefix::Preparer;
#[cfg(test)]
pub(super) use run::MOMENT;
pub(super) use run::{Resources, Scheduler};
pub(super) use sequence::{Outbox, Sequence};
pub(super) use stats::Vitals;
