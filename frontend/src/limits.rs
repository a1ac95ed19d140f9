//! Limits on what requests may use at the same time: choices per client, CPU time for text, and log lines.

mod choices;
mod log_limit;
mod work;

pub(crate) use choices::{ChoiceLimits, ConnectionChoices, RunningChoices};
pub(crate) use log_limit::LogLimit;
pub(crate) use work::{WorkPermit, WorkQueues};
