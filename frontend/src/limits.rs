//! Limits on what requests may use at the same time: choices per client, and CPU time for text. And what is remembered
//! of objects that servers store: where they are, and what was counted against limits of tokens.

mod choices;
mod stored_objects;
mod work;

pub(crate) use choices::{ChoiceLimits, ConnectionChoices, RunningChoices};
pub(crate) use stored_objects::{Place, StoredObjects};
pub(crate) use work::{WorkPermit, WorkQueues};
