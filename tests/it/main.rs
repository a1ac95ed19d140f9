//! Scenarios over the whole program.

mod cache;
mod configuration;
mod connections;
mod killed;
mod layers;
mod metrics;
mod modes;
mod names;
mod overload;
mod record;
mod reload;
mod serve;
mod shred;
mod soak;
mod stop_soak;
mod terms;
