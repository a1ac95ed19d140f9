//! Scenarios over the whole program.
