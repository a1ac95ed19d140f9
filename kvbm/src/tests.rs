//! What holds across all tiers and forms at once, and what the tests of several modules share.

mod damage;
pub(crate) mod fuzz;
