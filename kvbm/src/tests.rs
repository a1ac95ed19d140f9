//! What holds across all tiers and forms at once.

mod damage;
