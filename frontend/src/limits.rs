//! Limits on what requests may use at the same time: choices per client, and CPU time for text.

mod choices;
mod work;

pub(crate) use choices::{ChoiceLimits, ConnectionChoices, RunningChoices};
pub(crate) use work::{WorkPermit, WorkQueues};
