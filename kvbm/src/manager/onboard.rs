//! Onboarding: the load of one request's blocks into G1, before the engine is ready for them, while it waits, and while
//! it computes ([`phase`]).
//!
//! **Invariant: the engine waits only within a [`WaitBudget`](super::plan::WaitBudget).** Dropping an [`Onboarding`]
//! stops its reads; slots of blocks that were not registered are freed.

mod job;
mod load;
mod onboarding;
mod phase;
mod shared;

pub(super) use job::Onboarder;
pub use job::Recompute;
pub use onboarding::{Onboarded, Onboarding};
pub(super) use onboarding::{onboard, prefetch};
