//! Scenarios over the whole program.

mod layers;
