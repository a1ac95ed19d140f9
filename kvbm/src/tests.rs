//! Tests across tiers and transforms, and what the tests of several rooms share.

mod damage;
pub(crate) mod fuzz;
