//! Limits on what requests may use at the same time: choices per client, and CPU time for text. And what was counted
//! against limits of tokens.

mod choices;
mod counted_responses;
mod work;

pub(crate) use choices::{ChoiceLimits, ConnectionChoices, RunningChoices};
pub(crate) use counted_responses::CountedResponses;
pub(crate) use work::{WorkPermit, WorkQueues};
