//! One process: which roles it has, and how they are put together.

pub mod sizes;
