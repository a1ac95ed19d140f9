//! Continuous batching: from accepted requests to streams of tokens, over one model and one block manager.

mod arrival;
mod batch;
mod blocks;
mod handoffs;
mod output;
mod prefix;
mod run;
mod sequence;
mod stats;
mod step;

pub(super) use output::output;
pub(super) use prefix::PrefixLoader;
#[cfg(test)]
pub(super) use run::PIN_RELEASE_DELAY;
pub(super) use run::{Resources, Scheduler};
pub(super) use sequence::Sequence;
pub(super) use stats::EngineStats;
