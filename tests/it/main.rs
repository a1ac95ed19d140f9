//! Scenarios over the whole program.

mod configuration;
mod layers;
mod serve;
